// The kernels against the host's functions, bit for bit, and what only a device has: streams that are refused, failed
// calls, a selection's memory of its last threshold, positions that no array of the test's could reach.

#include "backends.hpp"

#include <scape/scape.cuh>

#include <doctest/doctest.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using scape::MaskPlan;
using scape::MaskWord;
using scape::PlanTables;
using scape::Segment;
using scape::StepScalars;
using scape::Tile;
using Floats = std::vector<float>;
using Words = std::vector<MaskWord>;

struct OwnLayout {
  std::vector<Segment> list;
  int world;
  std::size_t size() const { return list.empty() ? 0 : list.back().begin + list.back().count; }
  int ranks() const { return world; }
  std::span<const Segment> segments() const { return list; }
};

OwnLayout layout_of(int ranks, std::initializer_list<Segment> counts) {
  OwnLayout layout{{}, ranks};
  for (Segment segment : counts) {
    segment.begin = layout.size();
    layout.list.push_back(segment);
  }
  return layout;
}

// Of every kind; tiles begin at addresses of every alignment.
OwnLayout mixed_layout(int ranks) {
  const int other = ranks - 1;
  return layout_of(ranks, {{0, 100, other},
                           {0, 7, 0, true},
                           {0, 9001, 0},
                           {0, 0, other},
                           {0, 8192, other},
                           {0, 33, other, true},
                           {0, 1, other},
                           {0, 20002, other},
                           {0, 4097, 0, true, false},
                           {0, 4096, 0, false, false}});
}

SCAPE_HOST_DEVICE std::uint32_t random_bits(std::size_t i) {
  std::uint64_t x = i * 0x9e3779b97f4a7c15 + 0x7f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return static_cast<std::uint32_t>(x >> 32);
}

Floats normal(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  Floats values(size);
  for (float& value : values) value = distribution(random);
  return values;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class B>
using MemoryOf = std::remove_cvref_t<decltype(std::declval<B&>().memory)>;

// A mask of a plan in a backend's memory: of 1,000 elements of a sparse segment it keeps `share`.
template <class B>
class Mask {
 public:
  Mask(B& backend, const MaskPlan& plan, std::uint32_t share, std::size_t seed)
      : tables_(plan, backend.memory, backend.stream),
        words_(backend.array(words_of(plan, share, seed))),
        offsets_(plan.tiles().size(), backend.memory) {
    count_offsets(tables_.view(), words_.span(), 0, offsets_.span(), backend.stream);
    backend.stream.synchronize();
  }
  scape::MaskView view() const { return {tables_.view(), words_.span(), offsets_.span(), kept_}; }

 private:
  Words words_of(const MaskPlan& plan, std::uint32_t share, std::size_t seed) {
    Words words(plan.words());
    for (const Tile& tile : plan.tiles())
      for (std::size_t i = 0; i < tile.count; ++i) {
        if (!plan.segments()[tile.segment].dense && random_bits((tile.element + i) * 8 + seed) % 1000 >= share)
          continue;
        words[(tile.bit + i) / 32] |= MaskWord{1} << (tile.bit + i) % 32;
        ++kept_;
      }
    return words;
  }

  std::size_t kept_ = 0;
  PlanTables<MemoryOf<B>> tables_;
  typename B::template Array<MaskWord> words_;
  typename B::template Array<std::size_t> offsets_;
};

}  // namespace

TEST_CASE("cuda: the legacy default stream is refused in every form, the per-thread one is a stream") {
  const auto refusal = [](cudaStream_t handle) -> std::string {
    try {
      const scape::CudaStream stream(handle);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  for (const cudaStream_t handle : {cudaStream_t{}, cudaStreamLegacy}) {
    CHECK(refusal(handle).starts_with("stream is "));
    CHECK(refusal(handle).find("default stream") != std::string::npos);
  }
  CHECK(refusal(cudaStreamPerThread) == "");
  CudaBackend backend;
  const scape::CudaStream stream(cudaStreamPerThread);
  const auto values = backend.array(Floats(1000, 1));
  Floats read(1000);
  scape::fill_values(values.span(), 7.0f, stream);
  scape::copy_values(std::span<const float>(values.span()), std::span(read), stream);
  stream.synchronize();
  CHECK(read == Floats(1000, 7));
}

TEST_CASE("cuda: an error names the call and the code") {
  scape::CudaMemory memory;
  scape::PinnedMemory pinned;
  const auto message = [](auto call) -> std::string {
    try {
      call();
    } catch (const scape::CudaError& error) {
      CHECK(error.code != cudaSuccess);
      CHECK(std::string(error.what()).find(cudaGetErrorName(error.code)) != std::string::npos);
      cudaGetLastError();
      return error.what();
    }
    return "";
  };
  CHECK(message([&] { memory.allocate(std::size_t{1} << 60, 256); }).starts_with("cudaMalloc: "));
  CHECK(message([&] { pinned.allocate(std::size_t{1} << 60, 256); }).starts_with("cudaHostAlloc: "));
  CHECK(message([] { scape::check(cudaErrorLaunchOutOfResources, "kernel launch"); }).starts_with("kernel launch: "));
  CHECK(message([] { scape::check(cudaSuccess, "nothing"); }) == "");
  // What was asked for in vain leaves all in order.
  CudaBackend backend;
  CHECK(backend.read(backend.array(Floats{1, 2})) == Floats{1, 2});
}

TEST_CASE("cuda: a selection's workspace near 2^31 elements is 0.63 bytes an element and a little") {
  CudaBackend backend;
  for (const std::size_t below : {0u, 1u, 10u, 100u, 1000u, 100000u}) {
    const std::size_t size = (std::size_t{1} << 31) - below;
    const MaskPlan plan(scape::FlatLayout(size, 1));
    const std::size_t bytes = scape::TopKMasker(plan, 0).workspace_bytes(backend.stream);
    CHECK(bytes >= size / 8 * 5);
    CHECK(bytes < size / 8 * 5 + size / 4096 * 8 + 16384);
  }
  const std::size_t size = (std::size_t{1} << 33) + 1;
  CHECK(scape::TopKMasker(MaskPlan(scape::FlatLayout(size, 2)), 1).workspace_bytes(backend.stream) <
        size / 2 / 100 * 64);
  CHECK(scape::TopKMasker(MaskPlan(scape::FlatLayout(4096, 1)), 0).workspace_bytes(backend.stream) == 0);
}

namespace {

// Whether the last selection found its thresholds near the ones before: by large segment.
std::vector<bool> predicted(CudaBackend& backend, const MaskPlan& plan, int rank,
                            std::span<const std::byte> workspace) {
  const scape::detail::SelectWorkspace layout(plan, rank);
  std::vector<scape::detail::SelectState> states(layout.large);
  scape::copy_values(
      std::span(reinterpret_cast<const scape::detail::SelectState*>(workspace.data() + layout.states), layout.large),
      std::span(states), backend.stream);
  backend.stream.synchronize();
  std::vector<bool> result;
  for (const auto& state : states) result.push_back(state.predicted != 0);
  return result;
}

// Selections one after the other with one workspace, each against the host's.
class Selections {
 public:
  Selections(CudaBackend& backend, const OwnLayout& layout, int rank, std::byte garbage = std::byte{0})
      : backend_(backend),
        plan_(layout),
        rank_(rank),
        tables_(plan_, backend.memory, backend.stream),
        masker_(plan_, tables_.view(), rank),
        workspace_(backend.array(std::vector<std::byte>(masker_.workspace_bytes(backend.stream), garbage))) {}

  // How many of the rank's large segments were predicted, or -1 where the mask is not the host's.
  int select(const Floats& values, double density) {
    const auto array = backend_.array(values);
    const auto mask = backend_.array(Words(plan_.words(), 0xdeadbeef));
    masker_.select(std::span<const float>(array.span()), density, mask.span(), workspace_.span(), backend_.stream);
    Words expected(plan_.words(), 0xdeadbeef);
    const scape::TopKMasker masker(plan_, rank_);
    std::vector<std::byte> scratch(masker.workspace_bytes(host_.stream));
    masker.select(std::span<const float>(values), density, std::span(expected), std::span(scratch), host_.stream);
    host_.stream.synchronize();
    if (backend_.read(mask) != expected) return -1;
    int sum = 0;
    for (const bool one : predicted(backend_, plan_, rank_, workspace_.span())) sum += one;
    return sum;
  }

 private:
  CudaBackend& backend_;
  HostBackend host_;
  MaskPlan plan_;
  int rank_;
  PlanTables<scape::CudaMemory> tables_;
  scape::TopKMasker masker_;
  CudaBackend::Array<std::byte> workspace_;
};

}  // namespace

TEST_CASE("cuda: select is the host's, whether it predicts or not") {
  CudaBackend backend;
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const OwnLayout layout = mixed_layout(ranks);
    const int large = ranks == 1 ? 3 : 2;  // of the last rank's, 8,192 and 20,002 elements
    Selections selections(backend, layout, ranks - 1);
    const Floats values = normal(layout.size(), 1), others = normal(layout.size(), 2);
    const auto scaled = [&](float factor) {
      Floats result = values;
      for (float& value : result) value *= factor;
      return result;
    };
    const auto blended = [&](float share) {
      Floats result = values;
      for (std::size_t i = 0; i < result.size(); ++i) result[i] += share * others[i];
      return result;
    };
    for (const double density : {0.003, 0.05, 0.5}) {
      CAPTURE(density);
      CHECK(selections.select(scaled(1000), density) >= 0);
      CHECK(selections.select(values, density) == 0);      // far from the threshold before
      CHECK(selections.select(values, density) == large);  // the same
      CHECK(selections.select(scaled(1.01f), density) == large);
      CHECK(selections.select(blended(0.02f), density) >= 0);
      CHECK(selections.select(scaled(1.1f), density) == 0);  // above what is looked through
      CHECK(selections.select(scaled(0.9f), density) == 0);  // and below
      CHECK(selections.select(scaled(1e-30f), density) == 0);
      CHECK(selections.select(scaled(1e30f), density) == 0);
    }
    // Another density is another threshold.
    for (const double density : {0.01, 0.0101, 0.2, 0.999, 1.0, 0.0}) CHECK(selections.select(values, density) >= 0);
  }
}

TEST_CASE("cuda: select is the host's with many ties, two values, NaN, and more candidates than there is room for") {
  CudaBackend backend;
  const float not_a_number = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const OwnLayout layout = mixed_layout(2);
  Selections selections(backend, layout, 1);
  const auto make = [&](auto value) {
    Floats values(layout.size());
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(value(i));
    return values;
  };
  const std::vector<Floats> kinds = {
      make([](std::size_t) { return 0; }),
      make([](std::size_t i) { return i % 2 == 0 ? 0.0f : -0.0f; }),
      make([](std::size_t) { return -3; }),
      make([](std::size_t i) { return random_bits(i) % 20 == 0 ? 2 : -1; }),
      make([](std::size_t i) { return random_bits(i) % 1000; }),
      make([](std::size_t i) { return 1 + static_cast<float>(random_bits(i) % 4000) * 0x1p-22f; }),  // all near
      make([&](std::size_t i) { return random_bits(i) % 40 == 0 ? not_a_number : 1.0f; }),
      make([&](std::size_t i) { return random_bits(i) % 3 == 0 ? -not_a_number : infinity; }),
      make([&](std::size_t) { return not_a_number; }),
      make([](std::size_t i) { return std::bit_cast<float>(random_bits(i)); }),
      make([](std::size_t i) { return std::bit_cast<float>(random_bits(i) % 5); }),
      make([](std::size_t i) { return i < 9200 ? 1 : 0; }),
      make([](std::size_t i) { return static_cast<float>(i); }),
  };
  for (std::size_t kind = 0; kind < kinds.size(); ++kind)
    for (const double density : {0.001, 0.04, 0.3}) {
      CAPTURE(kind);
      CAPTURE(density);
      for (int again = 0; again < 2; ++again) CHECK(selections.select(kinds[kind], density) >= 0);
    }
  // In turns, so that every kind follows another.
  for (std::size_t i = 0; i < 2 * kinds.size(); ++i) CHECK(selections.select(kinds[i * 5 % kinds.size()], 0.05) >= 0);
}

TEST_CASE("cuda: what the workspace holds does not change a selection") {
  CudaBackend backend;
  const OwnLayout layout = mixed_layout(2);
  for (const int garbage : {0xff, 0x7f, 0x80, 0x3f, 0x01}) {
    CAPTURE(garbage);
    Selections selections(backend, layout, 1, static_cast<std::byte>(garbage));
    for (int again = 0; again < 2; ++again) CHECK(selections.select(normal(layout.size(), 3), 0.02) >= 0);
  }
}

namespace {

template <class G>
G gradient_of(float value) {
  if constexpr (std::is_same_v<G, __half>)
    return __float2half(value);
  else if constexpr (std::is_same_v<G, __nv_bfloat16>)
    return __float2bfloat16(value);
  else
    return value;
}

// State, payload and moments after accumulating; `shift` elements of the gradient's array come before its first.
template <class G, class Rule, class B>
std::vector<Floats> accumulated(B& backend, const MaskPlan& plan, const Rule& rule, std::uint32_t share,
                                std::size_t shift) {
  const Mask<B> before(backend, plan, 300, 1), mask(backend, plan, share, 2);
  std::vector<G> gradients(plan.size() + shift);
  for (std::size_t i = 0; i < gradients.size(); ++i)
    gradients[i] = gradient_of<G>(std::ldexp(static_cast<float>(random_bits(i) >> 8), -24 - static_cast<int>(i % 20)));
  const auto gradient = backend.array(gradients);
  const auto state = backend.array(normal(plan.size(), 5));
  const auto payload = backend.array(Floats(mask.view().kept, -7)),
             moments = backend.array(Floats(mask.view().kept, -7));
  StepScalars scalars;
  scalars.gradient_scale = 0.7f;
  const auto now = backend.array(std::vector<StepScalars>{scalars});
  accumulate_gradient(std::span<const G>(gradient.span()).subspan(shift), state.span(), before.view(), {}, mask.view(),
                      payload.span(), moments.span(), rule, *now.span().data(), backend.stream);
  return {backend.read(state), backend.read(payload), backend.read(moments)};
}

template <class G>
void check_accumulate() {
  HostBackend host;
  CudaBackend device;
  for (const int ranks : {1, 2}) {
    const MaskPlan plan(mixed_layout(ranks));
    for (const std::uint32_t share : {0u, 10u, 500u, 1000u})
      for (const std::size_t shift : {0u, 1u, 4u}) {
        CAPTURE(ranks);
        CAPTURE(share);
        CAPTURE(shift);
        const auto check = [&](const auto& rule) {
          const auto expected = accumulated<G>(host, plan, rule, share, shift);
          const auto found = accumulated<G>(device, plan, rule, share, shift);
          for (std::size_t i = 0; i < 3; ++i) CHECK(same_bits(found[i], expected[i]));
        };
        check(scape::ErrorFeedback{});
        check(scape::ScapeRule::Accumulation{9.0f});
      }
  }
}

}  // namespace

TEST_CASE("cuda: accumulate is the host's for float, half and bfloat16 gradients, wherever they begin") {
  SUBCASE("float") { check_accumulate<float>(); }
  SUBCASE("half") { check_accumulate<__half>(); }
  SUBCASE("bfloat16") { check_accumulate<__nv_bfloat16>(); }
}

TEST_CASE("cuda: float16 gradients are added up like the host's") {
  const auto sum = [](auto& backend, auto type) {
    using G = decltype(type);
    std::vector<G> gradients(5000);
    for (std::size_t i = 0; i < gradients.size(); ++i) gradients[i] = gradient_of<G>(static_cast<float>(i) * 0.37f);
    const auto gradient = backend.array(gradients);
    const scape::ResidualStore<std::remove_cvref_t<decltype(backend.memory)>> store(5000, backend.memory,
                                                                                    backend.stream);
    for (int i = 0; i < 3; ++i) store.add(std::span<const G>(gradient.span()), backend.stream);
    Floats values(5000);
    scape::copy_values(std::span<const float>(store.values()), std::span(values), backend.stream);
    backend.stream.synchronize();
    return values;
  };
  HostBackend host;
  CudaBackend device;
  CHECK(same_bits(sum(device, __half{}), sum(host, __half{})));
  CHECK(same_bits(sum(device, __nv_bfloat16{}), sum(host, __nv_bfloat16{})));
}

TEST_CASE("cuda: norms and overlaps are summed in the host's order") {
  const auto norm = [](auto& backend, const Floats& values) {
    const auto array = backend.array(values);
    const auto partials = backend.array(std::vector<double>(scape::norm_partials(values.size(), backend.stream), -1.0));
    const auto result = backend.array(std::vector<double>{-1.0});
    scape::squared_norm(values.size(), scape::detail::Values{array.span().data()}, partials.span(),
                        *result.span().data(), backend.stream);
    return backend.read(result);
  };
  const auto overlap = [](auto& backend, const MaskPlan& plan, std::uint32_t share) {
    using B = std::remove_cvref_t<decltype(backend)>;
    const Mask<B> before(backend, plan, 300, 1), mask(backend, plan, share, 2);
    const auto payload = backend.array(normal(mask.view().kept, 6));
    const auto partials = backend.array(std::vector<double>(2 * plan.tiles().size(), -1.0));
    const auto scalars = backend.array(std::vector<StepScalars>(1));
    scape::mask_overlap(before.view().words, mask.view(), payload.span(), partials.span(), *scalars.span().data(),
                        backend.stream);
    scape::sum_overlap(plan.tiles().size(), std::span<const double>(partials.span()), *scalars.span().data(),
                       backend.stream);
    const StepScalars found = backend.read(scalars)[0];
    return std::vector<double>{found.squared_overlap, found.squared_payload, static_cast<double>(found.overlap)};
  };
  HostBackend host;
  CudaBackend device;
  for (const std::size_t size : {0u, 1u, 255u, 256u, 257u, 4095u, 4096u, 4097u, 70001u, 1100001u}) {
    CAPTURE(size);
    const Floats values = normal(size, 4);
    CHECK(same_bits(norm(device, values), norm(host, values)));
  }
  for (const std::uint32_t share : {0u, 10u, 1000u}) {
    const MaskPlan plan(mixed_layout(2));
    CHECK(same_bits(overlap(device, plan, share), overlap(host, plan, share)));
  }
}

TEST_CASE("cuda: Elias-Fano codes are the host's, back and forth") {
  HostBackend host;
  CudaBackend device;
  const auto code_of = [](auto& backend, scape::EliasFano code, const Words& words) {
    const auto mask = backend.array(words), out = backend.array(Words(code.words(), 0xabcdef));
    const auto back = backend.array(Words(words.size(), 0xabcdef));
    const auto scratch = backend.array(std::vector<std::byte>(code.workspace_bytes()));
    scape::BitPacker::encode(code, mask.span(), out.span(), scratch.span(), backend.stream);
    scape::BitPacker::decode(code, out.span(), back.span(), scratch.span(), backend.stream);
    return std::pair(backend.read(out), backend.read(back));
  };
  for (const std::size_t bits : {1u, 33u, 4096u, 100003u, 1048577u})
    for (const std::uint32_t share : {1000u, 400u, 30u, 1u}) {
      CAPTURE(bits);
      CAPTURE(share);
      Words words(scape::words_for(bits));
      std::size_t kept = 0;
      for (std::size_t i = 0; i < bits; ++i)
        if (random_bits(i) % 1000 < share) {
          words[i / 32] |= MaskWord{1} << i % 32;
          ++kept;
        }
      const auto found = code_of(device, {bits, kept}, words), expected = code_of(host, {bits, kept}, words);
      CHECK(found.first == expected.first);
      CHECK(found.second == words);
      CHECK(expected.second == words);
    }
}

namespace {

// Positions past 2^32, with arrays that hold the last few of them only: rank 1's, behind a huge segment of rank 0's.
constexpr std::size_t far = (std::size_t{1} << 32) + 4321;

OwnLayout far_layout() {
  return layout_of(2, {{0, far, 0}, {0, 50001, 1}, {0, 100, 1}, {0, 9, 1, true}, {0, 5000, 1, true}, {0, 12288, 1}});
}

// A score without an array.
struct FarScore {
  SCAPE_HOST_DEVICE float operator()(std::size_t element, std::size_t bit) const {
    return static_cast<float>(random_bits(element) % 5000) + static_cast<float>(bit % 7);
  }
};

// Where the array would begin whose elements from `first` on are `values`; for pointer arithmetic alone.
template <class T>
T* beginning(std::span<T> values, std::size_t first) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(values.data()) - first * sizeof(T));
}
template <class T>
std::span<T> from(std::span<T> values, std::size_t first, std::size_t size) {
  return {beginning(values, first), size};
}

struct NoteElement {
  std::uint64_t* elements;
  SCAPE_HOST_DEVICE void operator()(std::size_t element, std::size_t position) const { elements[position] = element; }
};

// What rank 1 makes of its part.
template <class B>
std::vector<Floats> far_results(B& backend, const MaskPlan& plan, Words& mask_words, std::vector<std::size_t>& numbers,
                                std::vector<std::uint64_t>& elements) {
  const std::size_t first_word = plan.part_begin(1), size = plan.size() - far;
  const std::size_t first_tile = plan.first_tile(1), dense_words = plan.words() - plan.exchanged_words();
  REQUIRE(plan.part_words()[1] + first_word == plan.exchanged_words());
  const auto words = backend.array(Words(plan.words() - first_word));
  const std::span<MaskWord> mask = from(words.span(), first_word, plan.words());

  // The plan's own tables, and of rank 1 alone.
  const PlanTables tables(plan, backend.memory, backend.stream);
  const std::size_t tiles = plan.tiles().size() - first_tile;
  const auto first = backend.array(std::vector<std::size_t>{0, 0, tiles});
  const scape::PlanView own{tables.view().tiles.subspan(first_tile), tables.view().segments, first.span()};
  scape::fill_mask(own, mask, backend.stream);
  const scape::TopKMasker masker(plan, tables.view(), 1);
  const auto workspace = backend.array(std::vector<std::byte>(masker.workspace_bytes(backend.stream)));
  for (int again = 0; again < 2; ++again) masker.select(FarScore{}, 0.1, mask, workspace.span(), backend.stream);
  mask_words = backend.read(words);
  CHECK(dense_words * 32 >= 5009);

  const std::size_t stride = far + 5;  // of the payload: rank 1's part begins there
  const auto offsets = backend.array(std::vector<std::size_t>(tiles));
  count_offsets(own, mask, stride, offsets.span(), backend.stream);
  numbers = backend.read(offsets);
  std::size_t kept = 0;
  for (const MaskWord word : mask_words) kept += static_cast<std::size_t>(std::popcount(word));
  const scape::MaskView view{own, mask, offsets.span(), stride + kept};

  const auto noted = backend.array(std::vector<std::uint64_t>(kept));
  for_each_kept(view, NoteElement{beginning(noted.span(), stride)}, backend.stream);
  elements = backend.read(noted);

  const auto gradient = backend.array(normal(size, 7)), state = backend.array(normal(size, 8));
  const auto parameters = backend.array(normal(size, 9));
  const auto payload = backend.array(Floats(kept)), moments = backend.array(Floats(kept));
  const auto returned = backend.array(normal(kept, 10));
  StepScalars scalars;
  scalars.learning_rate = 0.1f;
  scalars.decay = 0.9f;
  const auto now = backend.array(std::vector<StepScalars>{scalars});
  const std::span<float> whole = from(state.span(), far, plan.size());
  accumulate_gradient(std::span<const float>(from(gradient.span(), far, plan.size())), whole, view, {}, view,
                      from(payload.span(), stride, stride + kept), from(moments.span(), stride, stride + kept),
                      scape::ScapeRule::Accumulation{9.0f, beginning(returned.span(), stride)}, *now.span().data(),
                      backend.stream);
  update(view,
         scape::ScapeRule::Update{beginning(parameters.span(), far), nullptr, beginning(payload.span(), stride),
                                  beginning(moments.span(), stride), 0.9f, 0.1f, 0.95f, 0.05f, 1e-8f, true},
         *now.span().data(), backend.stream);
  return {backend.read(state), backend.read(payload), backend.read(moments), backend.read(parameters)};
}

struct EncodeAt {
  scape::detail::EncodeBit encode;
  const std::size_t* positions;
  __device__ void operator()(std::size_t i) const { encode(positions[i], i); }
};
struct DecodeAt {
  scape::detail::DecodeBit decode;
  const std::size_t* ones;
  __device__ void operator()(std::size_t i) const { decode(ones[i], i); }
};

}  // namespace

TEST_CASE("cuda: a rank's work past 2^32 elements, bits and payload positions is the host's") {
  HostBackend host;
  CudaBackend device;
  const MaskPlan plan(far_layout(), true);
  CHECK(plan.part_begin(1) * 32 > std::size_t{1} << 32);
  Words expected_mask, mask;
  std::vector<std::size_t> expected_offsets, offsets;
  std::vector<std::uint64_t> expected_elements, elements;
  const auto expected = far_results(host, plan, expected_mask, expected_offsets, expected_elements);
  const auto found = far_results(device, plan, mask, offsets, elements);
  CHECK(mask == expected_mask);
  CHECK(offsets == expected_offsets);
  CHECK(elements == expected_elements);
  CHECK(offsets[0] == far + 5);
  CHECK(elements[0] >= far);
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(same_bits(found[i], expected[i]));
}

TEST_CASE("cuda: Elias-Fano positions of more than 32 bits") {
  CudaBackend backend;
  const std::size_t bits = (std::size_t{1} << 40) + 77, kept = 100, window = 1 << 16, begin = bits - window;
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < kept; ++i) positions.push_back(begin + i * 600 + random_bits(i) % 600);
  const scape::EliasFano code(bits, kept);
  REQUIRE(code.low_bits() == 33);
  Words expected(code.words());
  std::vector<std::size_t> ones;
  for (std::size_t i = 0; i < kept; ++i) {
    for (std::size_t j = 0; j < 33; ++j)
      expected[(i * 33 + j) / 32] |= static_cast<MaskWord>(positions[i] >> j & 1) << (i * 33 + j) % 32;
    ones.push_back((positions[i] >> 33) + i);
    expected[code.low_words() + ones[i] / 32] |= MaskWord{1} << ones[i] % 32;
  }
  const auto given = backend.array(positions), at = backend.array(ones);
  const auto out = backend.array(Words(code.words()));
  const scape::detail::DeviceCode sizes(code);
  scape::for_each(kept, EncodeAt{{sizes, out.span().data()}, given.span().data()}, backend.stream);
  CHECK(backend.read(out) == expected);
  const std::size_t first_word = begin / 32;
  const auto words = backend.array(Words(scape::words_for(bits) - first_word));
  scape::for_each(kept, DecodeAt{{sizes, out.span().data(), beginning(words.span(), first_word)}, at.span().data()},
                  backend.stream);
  Words marked(words.size());
  for (const std::size_t position : positions) marked[position / 32 - first_word] |= MaskWord{1} << position % 32;
  CHECK(backend.read(words) == marked);
}
