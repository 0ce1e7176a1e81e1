// Residuals outside the optimizer's memory: the same bits, and the memory told apart.

#include "reference.hpp"
#include "support.hpp"

#include <scape/bfloat16.hpp>
#include <scape/offload.hpp>
#include <scape/sharding.hpp>

#include <scape/host/huge_pages.hpp>
#include <scape/host/mapped_file.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using scape::AdamSOptions;
using scape::ClockRule;
using scape::InMemory;
using scape::MappedFileMemory;
using scape::Offloaded;
using scape::Replicated;
using scape::ScapeRule;
using scape::Sharded;

template <class Rank>
auto outside() {
#if defined(__CUDACC__)
  return scape::PinnedMemory();
#else
  return MappedFileMemory(std::filesystem::temp_directory_path());
#endif
}

OwnLayout any_sizes(int ranks) {
  OwnLayout layout({}, ranks);
  const std::size_t sizes[] = {100, 0, 33, 4097, 1, 8192, 31, 900};
  for (std::size_t i = 0; i < std::size(sizes); ++i)
    layout.list.push_back({layout.size(), sizes[i], static_cast<int>(i) % ranks, i % 4 == 2, i % 3 != 1});
  return layout;
}

// The same in buckets: of several chunks that do not follow one another, more than there are staging buffers; of few
// small ones; and of none.
OwnLayout any_sizes_in_buckets(int ranks) {
  OwnLayout layout = any_sizes(ranks);
  const std::uint32_t buckets[] = {1, 2, 0, 1, 0, 1, 0, 1};
  for (std::size_t i = 0; i < std::size(buckets); ++i) layout.list[i].bucket = buckets[i];
  return layout;
}

template <class T, class S>
std::vector<T> read(std::span<const T> values, const S& stream) {
  std::vector<T> result(values.size());
  scape::copy_values(values, std::span<T>(result), stream);
  stream.synchronize();
  return result;
}

// What a rank has at the end: parameters as float, store, words of the mask, masters.
struct Result {
  Floats parameters, store, masters;
  Words mask;
  double residual_norm = 0;
  std::size_t state_bytes = 0, offloaded_bytes = 0, workspace_bytes = 0;
};

// A step whose gradients come bucket by bucket, into an array or, if they pass, each alone, in an order of its own.
template <class Rank, class Optimizer, class P>
void step_in_buckets(Rank& rank, Optimizer& optimizer, std::span<const float> whole, std::span<P> parameters,
                     std::size_t number, bool pass, scape::StepReport* report) {
  const auto array = rank.backend.array(Floats(whole.size(), 1e30f));
  const auto segments = optimizer.plan().segments();
  const std::size_t buckets = optimizer.plan().buckets();
  auto step = pass ? optimizer.template begin_step<float>(rank.compute, report)
                   : optimizer.begin_step(array.span(), rank.compute, report);
  for (std::size_t i = 0; i < buckets; ++i) {
    const std::size_t bucket = number % 2 == 0 ? buckets - 1 - i : (i + number) % buckets;
    std::size_t begin = whole.size(), end = 0;
    for (const scape::Segment& segment : segments) {
      if (segment.bucket != bucket || segment.count == 0) continue;
      scape::copy_values(whole.subspan(segment.begin, segment.count),
                         array.span().subspan(segment.begin, segment.count), rank.compute);
      begin = std::min(begin, segment.begin);
      end = std::max(end, segment.begin + segment.count);
    }
    if (pass)
      step.add(bucket, std::span<const float>(array.span()).subspan(begin, end - begin));
    else
      step.add(bucket);
  }
  step.finish(parameters);
  rank.compute.synchronize();
}

enum class Way { whole, in_buckets, passing };

// Trains a few steps: of two micro-batches more where options.adds, plain, and tried, some of which overflow; or in
// buckets.
template <class Rank, class H, class K, class Rule>
std::vector<Result> train_keeping(const Problem& problem, const Rule& rule, const K& keep, Way way = Way::whole) {
  std::vector<Result> results(static_cast<std::size_t>(problem.layout.ranks()));
  run<Rank>(problem.layout.ranks(), [&](Rank& rank) {
    using P = typename H::Parameter;
    const std::size_t me = static_cast<std::size_t>(rank.rank());
    const auto parameters = rank.backend.array(std::vector<P>(problem.parameters.begin(), problem.parameters.end()));
    const auto gradient = rank.backend.array(Floats(problem.layout.size()));
    using Memory = std::remove_cvref_t<decltype(rank.memory)>;
    scape::AdamS<typename Rank::Stream, typename Rank::Communicator, Memory, Rule, H, K> optimizer(
        problem.layout, rank.communicator, rank.memory, rank.compute, rank.side, problem.options, rule, H{}, keep);
    if constexpr (H::sharded) {
      const auto masters = rank.backend.array(problem.parameters);
      optimizer.load_masters(masters.span(), rank.compute);
      rank.compute.synchronize();
    }
    const auto set = [&](const Floats& values) {
      scape::copy_values(std::span<const float>(values), gradient.span(), rank.compute);
      rank.compute.synchronize();
    };
    scape::StepReport report;
    Result& result = results[me];
    for (std::size_t step = 0; step < problem.gradients.size(); ++step) {
      const Floats& values = problem.gradients[step][me];
      set(values);
      if (problem.options.adds) {
        optimizer.add(gradient.span(), rank.compute);
        optimizer.add(gradient.span(), rank.compute);
      }
      if (way != Way::whole) {
        step_in_buckets(rank, optimizer, std::span<const float>(gradient.span()), parameters.span(), step,
                        way == Way::passing, step % 2 == 0 ? &report : nullptr);
        result.residual_norm += report.residual_norm;
      } else if (problem.options.adds) {
        optimizer.step(gradient.span(), parameters.span(), rank.compute);
      } else if (step % 3 == 2) {
        optimizer.try_step(gradient.span(), parameters.span(), rank.compute, step % 2 == 0);
      } else {
        optimizer.step(gradient.span(), parameters.span(), rank.compute, step % 2 == 0 ? &report : nullptr);
        result.residual_norm += report.residual_norm;
      }
    }
    const std::vector<P> all = read(std::span<const P>(parameters.span()), rank.compute);
    for (const P& value : all) result.parameters.push_back(static_cast<float>(value));
    result.store = read(optimizer.store(rank.compute), rank.compute);
    result.mask = read(optimizer.mask().words, rank.compute);
    if constexpr (H::sharded) result.masters = read(optimizer.masters(), rank.compute);
    if constexpr (requires { optimizer.residual_store().is_pinned(); }) CHECK(optimizer.residual_store().is_pinned());
    CHECK(optimizer.residual_store().values().data() == optimizer.store(rank.compute).data());
    result.state_bytes = optimizer.state_bytes();
    result.offloaded_bytes = optimizer.offloaded_bytes();
    result.workspace_bytes = optimizer.workspace_bytes();
  });
  return results;
}

template <class Rank, class H, class Rule>
std::string difference_outside(const Problem& problem, const Rule& rule, Way way = Way::whole) {
  auto memory = outside<Rank>();
  const Offloaded keep(memory, {.buffer_bytes = 20'000});
  const auto inside = train_keeping<Rank, H>(problem, rule, InMemory{}, way);
  const auto found = train_keeping<Rank, H>(problem, rule, keep, way);
  const std::size_t bytes = problem.layout.size() * sizeof(float);
  for (std::size_t rank = 0; rank < found.size(); ++rank) {
    const Result &a = found[rank], &b = inside[rank];
    const std::string at = " on rank " + std::to_string(rank);
    if (!same_bits(a.parameters, b.parameters)) return "parameters" + at;
    if (!same_bits(a.store, b.store)) return "store" + at;
    if (!same_bits(a.masters, b.masters)) return "masters" + at;
    if (a.mask != b.mask) return "mask" + at;
    if (a.residual_norm != b.residual_norm) return "residual norm" + at;
    if (b.offloaded_bytes != 0 || a.offloaded_bytes != bytes) return "offloaded_bytes()" + at;
    if (a.state_bytes + bytes != b.state_bytes) return "state_bytes()" + at;
    if (a.workspace_bytes < b.workspace_bytes) return "workspace_bytes()" + at;
  }
  return "";
}

}  // namespace

TEST_CASE_TEMPLATE("offloaded residuals: every step has the bits that it has without", Rank, SCAPE_RANKS) {
  const AdamSOptions all[] = {{.density = 0.1},
                              {.weight_decay = 0.1f, .density = 0.05, .density_warmup = 4, .delay = 2},
                              {.density = 0.1, .delay = 0},
                              {.density = 1}};
  for (const int ranks : {1, 3})
    for (const AdamSOptions& options : all) {
      CAPTURE(ranks);
      CAPTURE(options.density);
      CAPTURE(options.delay);
      const Problem problem = random_problem(any_sizes(ranks), options, 7);
      for_rules([&](const auto& rule) {
        CHECK(difference_outside<Rank, Replicated>(problem, rule) == "");
        CHECK(difference_outside<Rank, Sharded<scape::bfloat16>>(problem, rule) == "");
      });
    }
}

TEST_CASE_TEMPLATE("offloaded residuals: micro-batches, too", Rank, SCAPE_RANKS) {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const Problem problem =
        random_problem(any_sizes(ranks), {.density = 0.1, .density_warmup = 2, .delay = 1, .adds = true}, 5);
    for_rules([&](const auto& rule) {
      CHECK(difference_outside<Rank, Replicated>(problem, rule) == "");
      CHECK(difference_outside<Rank, Sharded<float>>(problem, rule) == "");
    });
  }
}

TEST_CASE_TEMPLATE("offloaded residuals: bucket by bucket, too", Rank, SCAPE_RANKS) {
  const AdamSOptions all[] = {{.density = 0.1},
                              {.weight_decay = 0.1f, .density = 0.05, .density_warmup = 4, .delay = 2},
                              {.density = 0.1, .density_warmup = 3, .payload = scape::PayloadFormat::e5m2},
                              {.density = 0.1, .density_warmup = 2, .adds = true},
                              {.density = 1}};
  for (const int ranks : {1, 2})
    for (const AdamSOptions& options : all) {
      CAPTURE(ranks);
      CAPTURE(options.density);
      CAPTURE(options.delay);
      CAPTURE(options.adds);
      const Problem problem = random_problem(any_sizes_in_buckets(ranks), options, 5);
      for_rules([&](const auto& rule) {
        CHECK(difference_outside<Rank, Replicated>(problem, rule, Way::in_buckets) == "");
        CHECK(difference_outside<Rank, Sharded<scape::bfloat16>>(problem, rule, Way::in_buckets) == "");
      });
    }
}

TEST_CASE_TEMPLATE("offloaded residuals: gradients that pass, with and without micro-batches before", Rank,
                   SCAPE_RANKS) {
  const scape::BucketLayout layout({{100, false, true, 1}, {33, true, true, 1}, {17000, false, false, 0}, {64}}, 2);
  for (const bool adds : {false, true}) {
    CAPTURE(adds);
    const Problem problem = random_problem(layout, {.density = 0.1, .density_warmup = 2, .adds = adds}, 4);
    for (const scape::MaskScore score : {scape::MaskScore::corrected, scape::MaskScore::updated})
      CHECK(difference_outside<Rank, Replicated>(problem, ScapeRule{.score = score}, Way::passing) == "");
    if (adds) CHECK(difference_outside<Rank, Sharded<float>>(problem, ClockRule{}, Way::passing) == "");
  }
}

#if !defined(__CUDACC__)

namespace {

// An empty folder of its own, removed at the end.
struct Folder {
  std::filesystem::path path;
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "scape-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw scape::Error("mkdtemp");
    path = name;
  }
  Folder(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path); }
};

}  // namespace

TEST_CASE("memory in huge pages: is memory, aligned to a page where it fills one") {
  using scape::HugePageMemory;
  HugePageMemory memory;
  const std::size_t page = HugePageMemory::page;
  std::vector<scape::Buffer<unsigned char, HugePageMemory>> buffers;
  for (const std::size_t size : {std::size_t{1}, page - 1, page, page + 1, 3 * page}) {
    buffers.emplace_back(size, memory);
    const auto values = buffers.back().span();
    CHECK(reinterpret_cast<std::uintptr_t>(values.data()) % (size < page ? 256 : page) == 0);
    std::fill(values.begin(), values.end(), static_cast<unsigned char>(size % 251));
  }
  for (const auto& buffer : buffers)
    CHECK(std::count(buffer.span().begin(), buffer.span().end(), static_cast<unsigned char>(buffer.size() % 251)) ==
          static_cast<std::ptrdiff_t>(buffer.size()));
  void* const strict = memory.allocate(page, 2 * page);  // more than it aligns to by itself
  CHECK(reinterpret_cast<std::uintptr_t>(strict) % (2 * page) == 0);
  memory.deallocate(strict, page, 2 * page);
}

TEST_CASE("memory in a file: is memory, aligned, and leaves no file") {
  const Folder folder;
  MappedFileMemory memory(folder.path);
  const std::size_t sizes[] = {1, 4095, 4096, 4097, 1'000'003};
  std::vector<scape::Buffer<unsigned char, MappedFileMemory>> buffers;
  for (const std::size_t size : sizes) {
    buffers.emplace_back(size, memory);
    const auto values = buffers.back().span();
    CHECK(reinterpret_cast<std::uintptr_t>(values.data()) % 256 == 0);
    for (std::size_t i = 0; i < size; ++i) values[i] = static_cast<unsigned char>(i * 7 + size);
  }
  for (const auto& buffer : buffers) {
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < buffer.size(); ++i)
      wrong += buffer.span()[i] != static_cast<unsigned char>(i * 7 + buffer.size());
    CHECK(wrong == 0);
  }
  CHECK(std::filesystem::is_empty(folder.path));
}

TEST_CASE("memory in a file: no folder, and no room, are told by folder, call and reason") {
  const Folder folder;
  MappedFileMemory nowhere(folder.path / "none");
  const std::string none = thrown_by<scape::Error>([&] { scape::Buffer<float, MappedFileMemory>(1, nowhere); });
  CHECK(none.find((folder.path / "none").string()) != std::string::npos);
  CHECK(none.find("mkstemp: No such file or directory") != std::string::npos);

  MappedFileMemory small(folder.path);
  const std::size_t bytes = std::size_t{1} << 62;
  const std::string full = thrown_by<scape::Error>([&] { small.allocate(bytes, 256); });
  CHECK(full.find(folder.path.string()) != std::string::npos);
  CHECK(full.find(std::to_string(bytes)) != std::string::npos);
  CHECK(full.find("posix_fallocate: ") != std::string::npos);
  const std::string beyond = thrown_by<scape::Error>([&] { small.allocate(~std::size_t{0}, 256); });
  CHECK(beyond.find("posix_fallocate: File too large") != std::string::npos);
  CHECK(std::filesystem::is_empty(folder.path));
}

#endif
