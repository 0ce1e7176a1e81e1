// AdamS on devices: the host's results to the bit, and steps as a CUDA graph.

#include "reference.hpp"

#include <cuda_bf16.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
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

using scape::AdamSOptions;
using scape::BiasCorrection;
using scape::ClockRule;
using scape::MaskScore;
using scape::ScapeRule;

// Segments that begin and end anywhere, so that few tiles begin at a multiple of 16 bytes; some dense, some without
// decay, some of several tiles.
OwnLayout odd_layout(std::mt19937& random, int ranks) {
  const std::size_t sizes[] = {0, 1, 2, 31, 33, 65, 333, 1001, 4095, 4096, 4097, 8191, 8192, 12289};
  OwnLayout layout({}, ranks);
  const std::size_t count = 1 + random() % 9;
  for (std::size_t i = 0; i < count; ++i)
    layout.list.push_back({layout.size(), sizes[random() % std::size(sizes)],
                           static_cast<int>(random() % static_cast<unsigned>(ranks)), random() % 5 == 0,
                           random() % 3 != 0});
  return layout;
}

AdamSOptions any_options(std::mt19937& random) {
  const double densities[] = {0, 0.001, 0.01, 0.1, 0.29, 0.9, 1};
  return {.learning_rate = 0.01f,
          .beta1 = random() % 2 ? 0.9f : 0.55f,
          .beta2 = random() % 2 ? 0.95f : 0.7f,
          .epsilon = random() % 4 ? 1e-8f : 0.0f,
          .weight_decay = random() % 2 ? 0.1f : 0.0f,
          .clip_norm = random() % 2 ? 3.0f : 0.0f,
          .density = densities[random() % std::size(densities)],
          .density_warmup = random() % 3 ? 0 : random() % 6,
          .delay = static_cast<int>(random() % 4),
          .refresh = std::array<std::size_t, 4>{1, 1, 2, 3}[random() % 4],
          .mask_coding = static_cast<scape::MaskCoding>(random() % 3),
          .payload = static_cast<scape::PayloadFormat>(random() % 4),
          .exact_mask_parts = random() % 2 == 0};
}

template <class F>
void for_all_rules(F body) {
  for (const BiasCorrection correction : {BiasCorrection::adam, BiasCorrection::none, BiasCorrection::adams})
    for (const MaskScore score : {MaskScore::corrected, MaskScore::updated}) {
      CAPTURE(static_cast<int>(correction));
      CAPTURE(static_cast<int>(score));
      body(ScapeRule{.bias_correction = correction, .score = score});
    }
  for (const float cap : {64.0f, 2.5f}) {
    CAPTURE(cap);
    body(ClockRule{.cap = cap});
  }
}

// Empty, or the first difference of two histories, reports included.
std::string difference(const History& found, const History& expected) {
  for (std::size_t step = 0; step < expected.size(); ++step)
    for (std::size_t rank = 0; rank < expected[step].size(); ++rank) {
      const State &a = found[step][rank], &b = expected[step][rank];
      const auto at = [&](const char* what) {
        return std::string(what) + " in step " + std::to_string(step) + " on rank " + std::to_string(rank);
      };
      if (a.mask != b.mask) return at("mask");
      if (!same_bits(a.parameters, b.parameters)) return at("parameters");
      if (!same_bits(a.store, b.store)) return at("store");
      if (!same_bits(a.errors, b.errors)) return at("errors");
      if (!same_bits(a.moments, b.moments)) return at("moments");
      if (a.elapsed != b.elapsed) return at("clocks");
      if (a.bytes_sent != b.bytes_sent) return at("bytes");
      const scape::StepReport &x = a.report, &y = b.report;
      if (x.step != y.step || x.kept != y.kept || x.density != y.density || x.payload_bytes != y.payload_bytes ||
          x.mask_bytes != y.mask_bytes || x.gradient_norm != y.gradient_norm || x.residual_norm != y.residual_norm ||
          x.jaccard != y.jaccard || x.energy_share != y.energy_share)
        return at("report");
    }
  return "";
}

}  // namespace

// Of more than two ranks only where NCCL adds up in the order of the ranks, as cudasim does: on devices its order is
// its own, and it multiplies by 1 / W.
TEST_CASE("cuda: AdamS over NCCL is AdamS over threads, bit for bit") {
  const int most = in_rank_order() ? 4 : 2;
  unsigned seed = 0;
  for_all_rules([&](const auto& rule) {
    for (int round = 0; round < 8; ++round, ++seed) {
      CAPTURE(seed);
      std::mt19937 random(seed);
      const int ranks = std::min(1 + static_cast<int>(seed % 4), most);
      const Problem problem = random_problem(odd_layout(random, ranks), any_options(random), 8, seed);
      CAPTURE(ranks);
      CAPTURE(problem.layout.size());
      const bool reports = round % 2 == 0;
      CHECK(difference(train<NcclRank>(problem, rule, reports), train<ThreadRank>(problem, rule, reports)) == "");
    }
  });
}

TEST_CASE("cuda: every delay, dense and sparse, is the host's bit for bit") {
  for (const int delay : {0, 1, 2, 3})
    for (const double density : {0.02, 1.0}) {
      CAPTURE(delay);
      CAPTURE(density);
      const AdamSOptions options{.learning_rate = 0.01f,
                                 .weight_decay = 0.1f,
                                 .clip_norm = 1,
                                 .density = density,
                                 .density_warmup = 3,
                                 .delay = delay};
      const scape::BucketLayout layout({{20001}, {17, true, false}, {5003}, {1}}, 2);
      const Problem problem = random_problem(layout, options, 8);
      const auto check = [&](const auto& rule) {
        CHECK(difference(train<NcclRank>(problem, rule), train<ThreadRank>(problem, rule)) == "");
      };
      check(ScapeRule{});
      check(ScapeRule{.score = MaskScore::updated});
      check(ClockRule{});
    }
}

namespace {

// A captured sequence of steps.
class Graph {
 public:
  template <class F>
  Graph(const scape::CudaStream& stream, F enqueue) {
    scape::check(cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue();
    scape::check(cudaStreamEndCapture(stream.handle(), &graph_), "cudaStreamEndCapture");
    scape::check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  Graph(const Graph&) = delete;
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  void launch(const scape::CudaStream& stream) const {
    scape::check(cudaGraphLaunch(executable_, stream.handle()), "cudaGraphLaunch");
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

std::size_t free_memory() {
  std::size_t free = 0, all = 0;
  scape::check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
  return free;
}

// As many gradients as steps are captured; they take turns.
class TurningGradients {
 public:
  TurningGradients(NcclRank& rank, std::size_t size, const AdamSOptions& options) {
    std::mt19937 random(static_cast<unsigned>(rank.rank() + 1));
    for (int i = 0; i < std::max(options.delay, 1) + 1; ++i)
      arrays_.push_back(rank.backend.array(normal_values(size, random)));
  }
  std::size_t count() const { return arrays_.size(); }
  std::span<const float> operator[](std::size_t step) const { return arrays_[step % count()].span(); }

 private:
  std::vector<decltype(std::declval<NcclRank&>().backend.array(Floats()))> arrays_;
};

// Steps before the capture, ten replays with a new learning rate halfway, and steps after it, against the same steps
// one by one.
template <class Trainer>
std::string replay_difference(NcclRank& rank, Trainer& eager, Trainer& replayed, std::size_t captured) {
  const std::size_t before = 3, replays = 10;
  for (std::size_t i = 0; i < before; ++i) eager.step(i);
  for (std::size_t i = 0; i < before; ++i) replayed.step(i);
  rank.compute.synchronize();
  rank.side.synchronize();
  const std::size_t free_before = free_memory();
  replayed.optimizer().await_masks(rank.compute);
  const Graph graph(rank.compute, [&] {
    for (std::size_t i = 0; i < captured; ++i) replayed.step(before + i);
    replayed.optimizer().await_masks(rank.compute);
  });
  for (std::size_t replay = 0; replay < replays; ++replay) {
    graph.launch(rank.compute);
    if (replay == replays / 2) replayed.optimizer().set_learning_rate(0.002f, rank.compute);
  }
  rank.compute.synchronize();
  for (std::size_t replay = 0; replay < replays; ++replay) {
    for (std::size_t i = 0; i < captured; ++i) eager.step(before + i);
    if (replay == replays / 2) eager.optimizer().set_learning_rate(0.002f, rank.compute);
  }
  rank.compute.synchronize();
  rank.side.synchronize();
  if (in_rank_order() && free_memory() != free_before) return "steps allocated";  // graphs of real devices take memory
  if (!eager.is_same(replayed)) return "replays differ";
  for (std::size_t i = 0; i < captured + 1; ++i) {
    eager.step(before + i);
    replayed.step(before + i);
  }
  return eager.is_same(replayed) ? "" : "steps after replays differ";
}

template <class T>
std::vector<T> read(std::span<const T> values, const scape::CudaStream& stream) {
  std::vector<T> result(values.size());
  scape::copy_values(values, std::span<T>(result), stream);
  stream.synchronize();
  return result;
}

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// A rank that makes whole steps.
template <class Rule>
class WholeSteps {
 public:
  WholeSteps(NcclRank& rank, const OwnLayout& layout, const AdamSOptions& options, const Rule& rule,
             const TurningGradients& gradients)
      : rank_(rank), gradients_(gradients), session_(rank, layout, options, rule, Floats(layout.size(), 1)) {}
  auto& optimizer() { return session_.optimizer; }
  void step(std::size_t i) { optimizer().step(gradients_[i], session_.parameters(), rank_.compute); }

  // But for what is reckoned from steps(), which counts no replays.
  bool is_same(WholeSteps& other) {
    const State a = session_.state(), b = other.session_.state();
    return same_bits(a.parameters, b.parameters) && same_bits(a.moments, b.moments) && same_bits(a.store, b.store) &&
           same_bits(a.errors, b.errors) && a.mask == b.mask && last() == other.last();
  }

 private:
  std::vector<std::uint16_t> last() {
    if constexpr (std::is_same_v<Rule, ClockRule>)
      return read(std::span<const std::uint16_t>(optimizer().rule_state().last()), rank_.compute);
    else
      return {};
  }

  NcclRank& rank_;
  const TurningGradients& gradients_;
  Session<NcclRank, Rule> session_;
};

// A rank whose steps come bucket by bucket, always in the same order, each after a micro-batch where options.adds; the
// parameters and residuals may be anywhere.
template <class Rule, class H, class K>
class OverlappedSteps {
 public:
  using P = typename H::Parameter;

  OverlappedSteps(NcclRank& rank, const OwnLayout& layout, const AdamSOptions& options, const Rule& rule,
                  const TurningGradients& gradients, const K& keep)
      : rank_(rank),
        layout_(layout),
        gradients_(gradients),
        parameters_(rank.backend.array(std::vector<P>(layout.size(), P(1.0f)))),
        gradient_(rank.backend.array(Floats(layout.size()))),
        optimizer_(layout, rank.communicator, rank.memory, rank.compute, rank.side, options, rule, H{}, keep) {
    if constexpr (H::sharded) optimizer_.load_masters(parameters_.span(), rank.compute);
  }
  auto& optimizer() { return optimizer_; }

  void step(std::size_t i) {
    if (optimizer_.options().adds) optimizer_.add(gradients_[i], rank_.compute);
    scape::fill_values(gradient_.span(), 1e30f, rank_.compute);
    auto step = optimizer_.begin_step(gradient_.span(), rank_.compute);
    for (std::size_t bucket = optimizer_.plan().buckets(); bucket-- > 0;) {
      for (const scape::Segment& segment : layout_.list)
        if (segment.bucket == bucket && segment.count != 0)
          scape::copy_values(gradients_[i].subspan(segment.begin, segment.count),
                             gradient_.span().subspan(segment.begin, segment.count), rank_.compute);
      step.add(bucket);
    }
    step.finish(parameters_.span());
  }

  bool is_same(OverlappedSteps& other) {
    const auto same = [&](auto of) {
      return same_bytes(read(of(*this), rank_.compute), read(of(other), rank_.compute));
    };
    bool is = same([](auto& t) { return std::span<const P>(t.parameters_.span()); }) &&
              same([](auto& t) { return t.optimizer_.store(t.rank_.compute); }) &&
              same([](auto& t) { return t.optimizer_.errors(); }) &&
              same([](auto& t) { return t.optimizer_.mask().words; });
    if constexpr (H::sharded) is = is && same([](auto& t) { return t.optimizer_.masters(); });
    if constexpr (std::is_same_v<Rule, ClockRule>)
      is = is && same([](auto& t) { return std::span<const std::uint16_t>(t.optimizer_.rule_state().last()); });
    return is;
  }

 private:
  NcclRank& rank_;
  OwnLayout layout_;
  const TurningGradients& gradients_;
  CudaBackend::Array<P> parameters_;
  CudaBackend::Array<float> gradient_;
  scape::AdamS<scape::CudaStream, scape::NcclCommunicator, scape::CudaMemory, Rule, H, K> optimizer_;
};

template <class F>
void check_replays(int ranks, F difference) {
  std::vector<std::string> found(static_cast<std::size_t>(ranks), "nothing ran");
  run<NcclRank>(ranks, [&](NcclRank& rank) { found[static_cast<std::size_t>(rank.rank())] = difference(rank); });
  for (const std::string& text : found) CHECK(text == "");
}

template <class H, class Rule, class K = scape::InMemory>
void check_overlapped_replays(const OwnLayout& layout, const AdamSOptions& options, const Rule& rule,
                              const K& keep = {}) {
  check_replays(layout.ranks(), [&](NcclRank& rank) {
    const TurningGradients gradients(rank, layout.size(), options);
    OverlappedSteps<Rule, H, K> eager(rank, layout, options, rule, gradients, keep),
        replayed(rank, layout, options, rule, gradients, keep);
    return replay_difference(rank, eager, replayed, gradients.count());
  });
}

}  // namespace

TEST_CASE("cuda: captured steps, replayed, are steps made one by one, and none allocates") {
  std::mt19937 random(1);
  for (const int ranks : {1, 2})
    for (const double density : {0.05, 1.0})
      for (const int delay : {0, 1, 2}) {
        if (density == 1 && delay != 1) continue;
        CAPTURE(ranks);
        CAPTURE(density);
        CAPTURE(delay);
        for (const scape::PayloadFormat payload : {scape::PayloadFormat::float32, scape::PayloadFormat::e4m3}) {
          CAPTURE(static_cast<int>(payload));
          const AdamSOptions options{.learning_rate = 0.01f,
                                     .weight_decay = 0.1f,
                                     .clip_norm = 1,
                                     .density = density,
                                     .delay = delay,
                                     .payload = payload};
          const OwnLayout layout(scape::BucketLayout({{9001}, {17, true, false}, {5003}}, ranks));
          const auto check = [&]<class Rule>(const Rule& rule) {
            check_replays(ranks, [&](NcclRank& rank) {
              const TurningGradients gradients(rank, layout.size(), options);
              WholeSteps<Rule> eager(rank, layout, options, rule, gradients),
                  replayed(rank, layout, options, rule, gradients);
              return replay_difference(rank, eager, replayed, gradients.count());
            });
          };
          check(ScapeRule{});
          check(ScapeRule{.bias_correction = BiasCorrection::adams, .score = MaskScore::updated});
          check(ClockRule{});
        }
      }
}

TEST_CASE("cuda: captured steps in buckets, replayed, are steps made one by one, wherever residuals are") {
  for (const int ranks : {1, 2})
    for (const int delay : {1, 2}) {
      if (ranks != delay) continue;
      CAPTURE(ranks);
      CAPTURE(delay);
      // Owners by tensor: buckets of elements that do not follow one another, in several chunks on their way.
      const OwnLayout layout(scape::TensorLayout({{9001, false, true, 1},
                                                  {17, true, false, 0},
                                                  {5003, false, true, 2},
                                                  {4100, false, true, 1},
                                                  {33},
                                                  {700, false, true, 1}},
                                                 ranks));
      scape::PinnedMemory memory;
      const scape::Offloaded outside(memory, {.buffer_bytes = 20'000, .strict = true});
      const auto check = [&](const auto& rule, const AdamSOptions& options) {
        CAPTURE(static_cast<int>(options.payload));
        check_overlapped_replays<scape::Replicated>(layout, options, rule);
        check_overlapped_replays<scape::Sharded<__nv_bfloat16>>(layout, options, rule, outside);
      };
      AdamSOptions options{.learning_rate = 0.01f, .weight_decay = 0.1f, .density = 0.05, .delay = delay};
      check_overlapped_replays<scape::Sharded<__nv_bfloat16>>(layout, options, ClockRule{});
      check_overlapped_replays<scape::Replicated>(layout, options, ClockRule{}, outside);
      options.adds = true;
      check(ClockRule{}, options);
      options.adds = false;
      options.clip_norm = 1;
      check(ScapeRule{}, options);
      options.payload = scape::PayloadFormat::e5m2;
      check(ScapeRule{.score = MaskScore::updated}, options);
    }
}

// Where first moments wait for the next step, the step that finds none yet is no pattern for others.
TEST_CASE("cuda: the first step behind a density warm-up is not captured") {
  run<NcclRank>(1, [](NcclRank& rank) {
    const OwnLayout layout(scape::FlatLayout(5000, 1));
    const auto gradient = rank.backend.array(Floats(layout.size(), 1));
    {  // nothing is kept of nothing, and nothing missed
      Session session(rank, OwnLayout(scape::FlatLayout(0, 1)), {.density = 0.1}, ScapeRule{}, Floats());
      session.optimizer.step(std::span<const float>(), session.parameters(), rank.compute);
      session.optimizer.await_masks(rank.compute);
      rank.compute.synchronize();
      const Graph graph(rank.compute, [&] {
        session.optimizer.step(std::span<const float>(), session.parameters(), rank.compute);
        session.optimizer.await_masks(rank.compute);
      });
    }
    for (const std::size_t before : {2u, 3u, 4u}) {
      Session session(rank, layout, {.density = 0.1, .density_warmup = 3}, ScapeRule{}, Floats(layout.size(), 1));
      const auto step = [&] { session.optimizer.step(gradient.span(), session.parameters(), rank.compute); };
      for (std::size_t i = 0; i < before; ++i) step();
      session.optimizer.await_masks(rank.compute);
      rank.compute.synchronize();
      std::string message;
      const Graph graph(rank.compute, [&] {
        try {
          step();
          session.optimizer.await_masks(rank.compute);
        } catch (const std::invalid_argument& error) {
          message = error.what();
          session.optimizer.await_masks(rank.compute);
        }
      });
      CHECK((message.find("first of all or behind the density warm-up") != std::string::npos) == (before == 3));
    }
  });
}

TEST_CASE("cuda: a thousand steps leave memory as it was") {
  run<NcclRank>(2, [](NcclRank& rank) {
    const AdamSOptions options{.clip_norm = 1, .density = 0.01, .density_warmup = 100, .delay = 2};
    const OwnLayout layout(scape::BucketLayout({{3000}, {10, true}, {1001}}, 2));
    Session session(rank, layout, options, ClockRule{}, Floats(layout.size(), 1));
    const auto gradient = rank.backend.array(Floats(layout.size(), 1));
    std::size_t before = 0;
    for (std::size_t step = 0; step < 1000; ++step) {
      if (step == 2) before = free_memory();
      session.optimizer.step(gradient.span(), session.parameters(), rank.compute);
    }
    rank.compute.synchronize();
    rank.side.synchronize();
    CHECK(free_memory() == before);
  });
}

TEST_CASE("cuda: the gradient may be overwritten in stream order right after the step") {
  const Problem problem = random_problem(scape::FlatLayout(20000, 2), {.density = 0.05, .delay = 2}, 8);
  const auto check = [&](const auto& rule) {
    const History expected = train<NcclRank>(problem, rule, false);
    run<NcclRank>(2, [&](NcclRank& rank) {
      const std::size_t me = static_cast<std::size_t>(rank.rank());
      Session session(rank, problem.layout, problem.options, rule, problem.parameters);
      const auto gradient = rank.backend.array(Floats(20000));
      for (const auto& gradients : problem.gradients) {
        scape::copy_values(std::span<const float>(gradients[me]), gradient.span(), rank.compute);
        session.optimizer.step(gradient.span(), session.parameters(), rank.compute);
        scape::fill_values(gradient.span(), std::numeric_limits<float>::quiet_NaN(), rank.compute);
      }
      CHECK(same_bits(session.state().parameters, expected.back()[me].parameters));
    });
  };
  check(ScapeRule{});
  check(ScapeRule{.score = MaskScore::updated});
  check(ClockRule{});
}
