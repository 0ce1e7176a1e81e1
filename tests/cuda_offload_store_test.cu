// OffloadedResidualStore: the bits of ResidualStore for any chunks, what overlaps, and what happens without memory.

#include "backends.hpp"
#include "reference.hpp"
#include "support.hpp"

#include <scape/offload.hpp>
#include <scape/plan_tables.hpp>

#include <cuda_bf16.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using scape::AdamSOptions;
using scape::CudaError;
using scape::CudaMemory;
using scape::ErrorFeedback;
using scape::MaskPlan;
using scape::MaskView;
using scape::OffloadOptions;
using scape::PinnedMemory;
using scape::ScapeRule;
using scape::StepScalars;
using Store = scape::OffloadedResidualStore<PinnedMemory, CudaMemory>;

constexpr std::size_t tile = 4096;

ListLayout many_segments() {
  ListLayout layout{{}, 3};
  for (std::size_t i = 0; i < 40; ++i)
    layout.add(std::size_t{1} << random_bits(i) % 13, static_cast<int>(i), i % 7 == 3);
  layout.add(3 * tile + 17, 1);
  layout.add(0, 2);
  return layout;
}

std::vector<ListLayout> layouts() {
  std::vector<ListLayout> all = {many_segments()};
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{31}, std::size_t{33}, tile - 1, tile, tile + 1, 5 * tile}) {
    all.push_back({{}, 1});
    all.back().add(size, 0);
  }
  all.push_back({{}, 2});  // no segment
  return all;
}

// A mask that keeps about one element of `apart`, and all of dense segments.
class RandomMask {
 public:
  RandomMask(CudaBackend& backend, const MaskPlan& plan, scape::PlanView tables, std::uint32_t apart, std::size_t seed)
      : tables_(tables),
        words_(backend.array(words_of(plan, apart, seed))),
        offsets_(plan.tiles().size(), backend.memory) {
    count_offsets(tables, words_.span(), 0, offsets_.span(), backend.stream);
    backend.stream.synchronize();
  }
  MaskView view() const { return {tables_, words_.span(), offsets_.span(), kept_}; }

 private:
  Words words_of(const MaskPlan& plan, std::uint32_t apart, std::size_t seed) {
    Words words(plan.words());
    for (const scape::Tile& t : plan.tiles())
      for (std::size_t i = 0; i < t.count; ++i) {
        if (!plan.segments()[t.segment].dense && random_bits((t.element + i) * 8 + seed) % apart != 0) continue;
        words[(t.bit + i) / 32] |= scape::MaskWord{1} << (t.bit + i) % 32;
        ++kept_;
      }
    return words;
  }

  std::size_t kept_ = 0;
  scape::PlanView tables_;
  scape::Buffer<scape::MaskWord, CudaMemory> words_;
  scape::Buffer<std::size_t, CudaMemory> offsets_;
};

// A plan with all that a pass needs.
struct Ground {
  CudaBackend backend;
  MaskPlan plan;
  scape::PlanTables<CudaMemory> tables{plan, backend.memory, backend.stream};
  PinnedMemory pinned;
  scape::Buffer<StepScalars, CudaMemory> scalars = backend.array(std::vector<StepScalars>{some_scalars()});

  explicit Ground(const ListLayout& layout) : plan(layout) {}
  static StepScalars some_scalars() {
    StepScalars scalars;
    scalars.gradient_scale = 0.75f;
    return scalars;
  }
  const StepScalars& now() const { return scalars.span()[0]; }
  Floats read(std::span<const float> values) {
    Floats result(values.size());
    scape::copy_values(values, std::span<float>(result), backend.stream);
    backend.stream.synchronize();
    return result;
  }
};

template <class G>
std::vector<G> gradient_of(std::size_t seed, std::size_t count) {
  std::vector<G> result;
  for (const float value : floats_of(seed, count)) result.push_back(G(value));
  return result;
}

// Five steps of every kind of pass, in `outside` as in a ResidualStore: the first difference, or "".
template <class G, class Rule, class Outside>
std::string difference(Ground& ground, const Outside& outside, const Rule& rule) {
  auto& backend = ground.backend;
  const auto& stream = backend.stream;
  const std::size_t size = ground.plan.size();
  const scape::ResidualStore<CudaMemory> inside(size, backend.memory, stream);
  for (std::size_t step = 0; step < 5; ++step) {
    const RandomMask before(backend, ground.plan, ground.tables.view(), 3, step);
    const RandomMask now(backend, ground.plan, ground.tables.view(), step == 2 ? 1 : 5, step + 1);
    const MaskView mask = now.view();
    const auto gradient = backend.array(gradient_of<G>(step, size));
    const std::span<const G> g = gradient.span();
    const auto errors = backend.array(floats_of(step + 9, step % 2 == 0 ? 0 : before.view().kept));
    const auto pass = [&](const auto& store) {
      const auto payload = backend.array(Floats(mask.kept, -7)), moments = backend.array(Floats(mask.kept, -7));
      store.accumulate(g, before.view(), errors.span(), mask, payload.span(), moments.span(), rule, ground.now(),
                       stream);
      store.add(g, mask, payload.span(), rule, ground.now(), stream);
      store.add(g, ground.now(), stream);
      store.release(before.view(), stream);
      store.add(g, stream);
      std::vector<Floats> found = {ground.read(store.values()), backend.read(payload), backend.read(moments)};
      return found;
    };
    const std::vector<Floats> found = pass(outside), expected = pass(inside);
    for (std::size_t i = 0; i < found.size(); ++i)
      if (!same_bits(found[i], expected[i]))
        return std::vector<std::string>{"store", "payload", "moments"}[i] + " in step " + std::to_string(step);
  }
  return "";
}

// Has no memory.
struct EmptyMemory {
  void* allocate(std::size_t, std::size_t) {
    void* pointer = nullptr;
    cudaMalloc(&pointer, std::size_t{1} << 60);  // leaves its error behind, as cudaHostAlloc does
    throw CudaError(cudaErrorMemoryAllocation, "cudaHostAlloc");
  }
  void deallocate(void*, std::size_t, std::size_t) noexcept {}
};

}  // namespace

TEST_CASE("offload: the bits of the store in device memory, for any segments and chunks") {
  for (const ListLayout& layout : layouts()) {
    Ground ground(layout);
    CAPTURE(ground.plan.size());
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{20'000}, std::size_t{65'536}, std::size_t{1} << 22}) {
      CAPTURE(bytes);
      const Store store(ground.plan, ground.pinned, ground.backend.memory, ground.backend.stream,
                        {.buffer_bytes = bytes});
      CHECK(difference<float>(ground, store, ErrorFeedback{}) == "");
      const Store second(ground.plan, ground.pinned, ground.backend.memory, ground.backend.stream,
                         {.buffer_bytes = bytes});
      CHECK(difference<__nv_bfloat16>(ground, second, ScapeRule::Accumulation{9}) == "");
    }
  }
}

TEST_CASE("offload: tiles in parts, of a bucket or anywhere, after prepare()") {
  Ground ground(many_segments());
  const auto tiles = ground.plan.tiles();
  const auto& stream = ground.backend.stream;
  const RandomMask before(ground.backend, ground.plan, ground.tables.view(), 3, 1);
  const RandomMask now(ground.backend, ground.plan, ground.tables.view(), 5, 2);
  const MaskView mask = now.view();
  const auto gradient = ground.backend.array(floats_of(1, ground.plan.size()));
  const std::span<const float> g = gradient.span();
  const auto errors = ground.backend.array(floats_of(2, before.view().kept));
  for (const bool buckets : {true, false})
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{1} << 16}) {
      CAPTURE(buckets);
      CAPTURE(bytes);
      // In the order of the tiles, by owner: a bucket is a range of elements, other parts are any.
      std::vector<std::vector<std::uint32_t>> parts(3);
      for (std::uint32_t i = 0; i < tiles.size(); ++i)
        parts[buckets ? tiles[i].element * 3 / ground.plan.size() : random_bits(i) % 3].push_back(i);
      Store store(ground.plan, ground.pinned, ground.backend.memory, stream, {.buffer_bytes = bytes});
      const scape::ResidualStore<CudaMemory> inside(ground.plan.size(), ground.backend.memory, stream);
      const auto payload = ground.backend.array(Floats(mask.kept, -7)),
                 moments = ground.backend.array(Floats(mask.kept, -7));
      const auto expected_payload = ground.backend.array(Floats(mask.kept, -7));
      const auto expected_moments = ground.backend.array(Floats(mask.kept, -7));
      const ScapeRule::Accumulation rule{9};
      std::vector<decltype(ground.backend.array(parts[0]))> chosen;
      const std::size_t bytes_before = store.device_bytes();
      for (const auto& part : parts) {
        chosen.push_back(ground.backend.array(part));
        store.prepare(ground.plan, part, chosen.back().span(), stream);
      }
      CHECK(store.device_bytes() == bytes_before + tiles.size() * 4);
      for (std::size_t step = 0; step < 3; ++step) {
        for (const auto& part : chosen) {
          store.accumulate(g, before.view(), errors.span(), mask.only(part.span()), payload.span(), moments.span(),
                           rule, ground.now(), stream);
          store.add(g, mask.only(part.span()), payload.span(), rule, ground.now(), stream);
          inside.accumulate(g, before.view(), errors.span(), mask.only(part.span()), expected_payload.span(),
                            expected_moments.span(), rule, ground.now(), stream);
          inside.add(g, mask.only(part.span()), expected_payload.span(), rule, ground.now(), stream);
        }
        CHECK(same_bits(ground.read(store.values()), ground.read(inside.values())));
        CHECK(ground.backend.read(payload) == ground.backend.read(expected_payload));
        CHECK(ground.backend.read(moments) == ground.backend.read(expected_moments));
      }
    }
}

TEST_CASE("offload: wrong arguments are refused by name and value") {
  Ground ground(many_segments());
  const auto& stream = ground.backend.stream;
  Store store(ground.plan, ground.pinned, ground.backend.memory, stream);
  const RandomMask now(ground.backend, ground.plan, ground.tables.view(), 5, 2);
  const MaskView mask = now.view();
  const std::size_t size = ground.plan.size(), count = ground.plan.tiles().size();
  const auto gradient = ground.backend.array(Floats(size)), payload = ground.backend.array(Floats(mask.kept));
  const std::vector<std::uint32_t> two = {0, 1}, beyond = {static_cast<std::uint32_t>(count)};
  const auto chosen = ground.backend.array(two);
  const auto accumulate = [&](std::size_t gradients, MaskView at, std::size_t payloads) {
    return message_of([&] {
      store.accumulate(std::span<const float>(gradient.span()).first(gradients), mask, {}, at,
                       payload.span().first(payloads), {}, ErrorFeedback{}, ground.now(), stream);
    });
  };
  CHECK(accumulate(size - 1, mask, mask.kept).starts_with("gradient.size() is " + std::to_string(size - 1)));
  CHECK(accumulate(size, mask, mask.kept - 1).starts_with("payload.size() is " + std::to_string(mask.kept - 1)));
  CHECK(accumulate(size, mask.part(0, 2), mask.kept).starts_with("mask.plan.tiles.size() is 2"));
  CHECK(accumulate(size, mask.only(chosen.span()), mask.kept).starts_with("mask.chosen.size() is 2: prepare()"));
  CHECK(message_of([&] {
          store.prepare(ground.plan, beyond, chosen.span().first(1), stream);
        }).starts_with("tile is " + std::to_string(count)));
  CHECK(message_of([&] {
          store.prepare(ground.plan, two, chosen.span().first(1), stream);
        }).starts_with("tiles.size() is 2"));
  CHECK(message_of([&] {
          store.accumulate(std::span<const float>(gradient.span()), mask, {}, mask, payload.span(), {},
                           ScapeRule::Accumulation{9}, ground.now(), stream);
        }).starts_with("moments.size() is 0"));
  CHECK(message_of([&] {
          store.accumulate(std::span<const float>(gradient.span()), mask, payload.span().first(1), mask, payload.span(),
                           {}, ErrorFeedback{}, ground.now(), stream);
        }).starts_with("errors.size() is 1"));
  CHECK(same_bits(ground.read(store.values()), Floats(size, 0)));
}

TEST_CASE("offload: device memory is three buffers and a table, and the array is on the host") {
  ListLayout layout{{}, 1};
  layout.add(100 * tile, 0);
  const std::size_t size = layout.size(), table = 100 * 4, slack = 64;
  Ground ground(layout);
  for (const std::size_t bytes : {std::size_t{1}, 10 * tile * 4, 1000 * tile * 4}) {
    const Store store(ground.plan, ground.pinned, ground.backend.memory, ground.backend.stream,
                      {.buffer_bytes = bytes});
    const std::size_t chunk = std::min(std::max(bytes / 4, tile), size);
    CHECK(store.device_bytes() == 3 * (chunk + slack) * 4 + table);
    CHECK(store.host_bytes() == size * 4);
    CHECK(store.is_pinned());
    cudaPointerAttributes attributes;
    scape::check(cudaPointerGetAttributes(&attributes, store.values().data()), "cudaPointerGetAttributes");
    CHECK(attributes.type == cudaMemoryTypeHost);
  }
}

TEST_CASE("offload: memory that cannot be had is pageable memory, and one warning, or an error where strict") {
  Ground ground(many_segments());
  const auto& stream = ground.backend.stream;
  EmptyMemory none;
  std::vector<std::string> warnings;
  const OffloadOptions options{.buffer_bytes = 20'000,
                               .warn = [&](const std::string& text) { warnings.push_back(text); }};
  const scape::OffloadedResidualStore<EmptyMemory, CudaMemory> store(ground.plan, none, ground.backend.memory, stream,
                                                                     options);
  CHECK_FALSE(store.is_pinned());
  CHECK(store.host_bytes() == ground.plan.size() * 4);
  CHECK(difference<float>(ground, store, ErrorFeedback{}) == "");
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("pageable") != std::string::npos);
  CHECK(warnings[0].find(std::to_string(ground.plan.size() * 4) + " bytes") != std::string::npos);
  CHECK(warnings[0].find("cudaErrorMemoryAllocation") != std::string::npos);

  OffloadOptions strict = options;
  strict.strict = true;
  const std::string thrown = thrown_by<CudaError>([&] {
    scape::OffloadedResidualStore<EmptyMemory, CudaMemory>(ground.plan, none, ground.backend.memory, stream, strict);
  });
  CHECK(thrown.starts_with("cudaHostAlloc: cudaErrorMemoryAllocation"));
  CHECK(warnings.size() == 1);
  cudaGetLastError();
}

namespace {

// The work of one accumulate, as a captured graph has it: of every chunk the copy in, the kernel and the copy back, in
// the order in which they were enqueued, and whether one must run before another.
struct Order {
  std::vector<cudaGraphNode_t> nodes;
  std::vector<std::vector<bool>> before;  // [a][b]: a before b

  explicit Order(cudaGraph_t graph) {
    std::size_t count = 0;
    scape::check(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
    nodes.resize(count);
    scape::check(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
    before.assign(count, std::vector<bool>(count));
    for (std::size_t b = 0; b < count; ++b) {
      std::size_t edges = 0;
      scape::check(cudaGraphNodeGetDependencies(nodes[b], nullptr, nullptr, &edges), "cudaGraphNodeGetDependencies");
      std::vector<cudaGraphNode_t> dependencies(edges);
      if (edges != 0)
        scape::check(cudaGraphNodeGetDependencies(nodes[b], dependencies.data(), nullptr, &edges),
                     "cudaGraphNodeGetDependencies");
      for (const cudaGraphNode_t node : dependencies)
        before[static_cast<std::size_t>(std::ranges::find(nodes, node) - nodes.begin())][b] = true;
    }
    for (std::size_t k = 0; k < count; ++k)
      for (std::size_t a = 0; a < count; ++a)
        for (std::size_t b = 0; b < count; ++b)
          if (before[a][k] && before[k][b]) before[a][b] = true;
  }
  cudaGraphNodeType type(std::size_t i) const {
    cudaGraphNodeType type;
    scape::check(cudaGraphNodeGetType(nodes[i], &type), "cudaGraphNodeGetType");
    return type;
  }
  bool at_once(std::size_t a, std::size_t b) const { return !before[a][b] && !before[b][a]; }
};

}  // namespace

TEST_CASE("offload: a chunk is copied in while the one before is worked on and the one before that copied back") {
  constexpr std::size_t chunks = 8;
  ListLayout layout{{}, 1};
  layout.add(chunks * tile, 0);
  Ground ground(layout);
  const auto& stream = ground.backend.stream;
  const Store store(ground.plan, ground.pinned, ground.backend.memory, stream, {.buffer_bytes = tile * 4});
  const RandomMask now(ground.backend, ground.plan, ground.tables.view(), 5, 2);
  const auto gradient = ground.backend.array(floats_of(1, layout.size()));
  const auto payload = ground.backend.array(Floats(now.view().kept));
  cudaGraph_t graph = nullptr;
  scape::check(cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  scape::fill_values(payload.span(), 0.0f, stream);  // something before
  store.accumulate(std::span<const float>(gradient.span()), now.view(), {}, now.view(), payload.span(), {},
                   ErrorFeedback{}, ground.now(), stream);
  scape::fill_values(payload.span(), 0.0f, stream);  // and something after
  scape::check(cudaStreamEndCapture(stream.handle(), &graph), "cudaStreamEndCapture");
  {
    const Order order(graph);
    REQUIRE(order.nodes.size() == 3 * chunks + 2);
    const auto in = [](std::size_t i) { return 3 * i + 1; };
    const auto work = [](std::size_t i) { return 3 * i + 2; };
    const auto out = [](std::size_t i) { return 3 * i + 3; };
    const std::size_t first = 0, last = 3 * chunks + 1;
    for (std::size_t i = 0; i < chunks; ++i) {
      CAPTURE(i);
      REQUIRE(order.type(in(i)) == cudaGraphNodeTypeMemcpy);
      REQUIRE(order.type(work(i)) == cudaGraphNodeTypeKernel);
      REQUIRE(order.type(out(i)) == cudaGraphNodeTypeMemcpy);
      CHECK(order.before[first][in(i)]);
      CHECK(order.before[in(i)][work(i)]);
      CHECK(order.before[work(i)][out(i)]);
      CHECK(order.before[out(i)][last]);
      if (i + 1 < chunks) CHECK(order.at_once(in(i + 1), work(i)));
      if (i + 1 < chunks) CHECK(order.at_once(work(i + 1), out(i)));
      if (i + 2 < chunks) CHECK(order.at_once(in(i + 2), out(i)));
      if (i + 3 < chunks) CHECK(order.before[out(i)][in(i + 3)]);  // the buffer is the same
    }
  }
  scape::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

namespace {

// Captured steps with the residuals outside, replayed, against steps one by one with the residuals in device memory.
template <class Rule>
std::string replay_difference(NcclRank& rank, const OwnLayout& layout, const AdamSOptions& options, const Rule& rule) {
  const std::size_t captured = static_cast<std::size_t>(std::max(options.delay, 1)) + 1, before = 3, replays = 4;
  const auto gradient = rank.backend.array(floats_of(static_cast<std::size_t>(rank.rank()), layout.size()));
  const auto inside_parameters = rank.backend.array(Floats(layout.size(), 1));
  const auto outside_parameters = rank.backend.array(Floats(layout.size(), 1));
  PinnedMemory pinned;
  scape::AdamS inside(layout, rank.communicator, rank.memory, rank.compute, rank.side, options, rule);
  scape::AdamS outside(layout, rank.communicator, rank.memory, rank.compute, rank.side, options, rule,
                       scape::Replicated{}, scape::Offloaded(pinned, {.buffer_bytes = 20'000}));
  const auto step = [&](auto& optimizer, const auto& parameters) {
    optimizer.step(gradient.span(), parameters.span(), rank.compute);
  };
  for (std::size_t i = 0; i < before + captured * replays; ++i) step(inside, inside_parameters);
  for (std::size_t i = 0; i < before; ++i) step(outside, outside_parameters);
  outside.await_masks(rank.compute);
  rank.compute.synchronize();
  rank.side.synchronize();
  std::size_t free_before = 0, free_after = 0, all = 0;
  scape::check(cudaMemGetInfo(&free_before, &all), "cudaMemGetInfo");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  scape::check(cudaStreamBeginCapture(rank.compute.handle(), cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture");
  for (std::size_t i = 0; i < captured; ++i) step(outside, outside_parameters);
  outside.await_masks(rank.compute);
  scape::check(cudaStreamEndCapture(rank.compute.handle(), &graph), "cudaStreamEndCapture");
  scape::check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (std::size_t i = 0; i < replays; ++i)
    scape::check(cudaGraphLaunch(executable, rank.compute.handle()), "cudaGraphLaunch");
  rank.compute.synchronize();
  rank.side.synchronize();
  scape::check(cudaMemGetInfo(&free_after, &all), "cudaMemGetInfo");
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  if (in_rank_order() && free_before != free_after) return "steps allocated";  // graphs of real devices take memory
  const auto read = [&](std::span<const float> values) {
    Floats result(values.size());
    scape::copy_values(values, std::span<float>(result), rank.compute);
    rank.compute.synchronize();
    return result;
  };
  if (!same_bits(read(outside_parameters.span()), read(inside_parameters.span()))) return "parameters";
  return same_bits(read(outside.store(rank.compute)), read(inside.store(rank.compute))) ? "" : "store";
}

}  // namespace

TEST_CASE("offload: captured steps, replayed, are steps with the store in device memory, and none allocates") {
  for (const int ranks : {1, 2})
    for (const int delay : {0, 1}) {
      CAPTURE(ranks);
      CAPTURE(delay);
      if (int devices = 0; cudaGetDeviceCount(&devices) == cudaSuccess && devices < ranks) continue;
      const OwnLayout layout(scape::BucketLayout({{9001}, {17, true, false}, {15003}}, ranks));
      const auto check = [&](const auto& rule) {
        std::vector<std::string> found(static_cast<std::size_t>(ranks), "nothing ran");
        run<NcclRank>(ranks, [&](NcclRank& rank) {
          found[static_cast<std::size_t>(rank.rank())] = replay_difference(
              rank, layout, {.weight_decay = 0.1f, .clip_norm = 1, .density = 0.05, .delay = delay}, rule);
        });
        for (const std::string& text : found) CHECK(text == "");
      };
      check(ScapeRule{});
      check(scape::ClockRule{});
    }
}
