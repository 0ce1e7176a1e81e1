// AdamS as a whole, for both rules: layouts and options against the reference, arguments, ranks that disagree or fail.

#include "reference.hpp"
#include "support.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if !defined(__CUDACC__)

// Counts what all threads of this program take from operator new, in every form. Not in sanitizers' place, which see
// there what is deleted in another form than it was made in.
namespace {

std::atomic<std::size_t> allocations = 0;

}  // namespace

#if !defined(SCAPE_SANITIZED)

namespace {

void* counted(std::size_t size, std::size_t alignment) {
  ++allocations;
  const std::size_t rounded = (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
  if (void* const memory = std::aligned_alloc(alignment, rounded)) return memory;
  throw std::bad_alloc();
}

}  // namespace

// Not inlined, or GCC takes each for a mismatch of new and free.
[[gnu::noinline]] void* operator new(std::size_t size) { return counted(size, alignof(std::max_align_t)); }
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept try {
  return counted(size, alignof(std::max_align_t));
} catch (...) {
  return nullptr;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

#endif
#endif

namespace {

using scape::AdamSOptions;
using scape::ClockRule;
using scape::ScapeRule;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

// Segments of any size, some empty, some dense, some without decay, with any owners.
OwnLayout random_layout(std::mt19937& random, int ranks) {
  const std::size_t sizes[] = {0, 1, 2, 31, 32, 33, 63, 64, 65, 100, 1000, 4095, 4097};
  OwnLayout layout({}, ranks);
  const std::size_t count = random() % 9;
  for (std::size_t i = 0; i < count; ++i)
    layout.list.push_back({layout.size(), sizes[random() % std::size(sizes)],
                           static_cast<int>(random() % static_cast<unsigned>(ranks)), random() % 4 == 0,
                           random() % 3 != 0});
  return layout;
}

AdamSOptions random_options(std::mt19937& random) {
  const double densities[] = {0, 0.001, 0.01, 0.1, 0.29, 0.5, 0.9, 1};
  return {.learning_rate = 0.01f,
          .beta1 = random() % 2 ? 0.9f : 0.5f,
          .beta2 = random() % 2 ? 0.95f : 0.7f,
          .weight_decay = random() % 2 ? 0.1f : 0.0f,
          .clip_norm = random() % 2 ? 3.0f : 0.0f,
          .density = densities[random() % std::size(densities)],
          .density_warmup = random() % 2 ? random() % 12 : 0,
          .delay = static_cast<int>(random() % 4),
          .refresh = std::array<std::size_t, 4>{1, 1, 2, 5}[random() % 4],
          .mask_coding = static_cast<scape::MaskCoding>(random() % 3),
          .exact_mask_parts = random() % 2 == 0};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE_TEMPLATE("adams: random layouts and options as the reference", Rank, SCAPE_RANKS) {
  const std::array worlds = {1, 2, 3, 5, 8};
#if defined(SCAPE_TESTS_OVER_MPI)
  const unsigned seeds = 10;
#else
  const unsigned seeds = cuts_long_runs() ? 25 : 100;
#endif
  for (unsigned seed = 0; seed < seeds; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const OwnLayout layout = random_layout(random, worlds[random() % worlds.size()]);
    const Problem problem = random_problem(layout, random_options(random), 13, seed);
    for_rules([&](const auto& rule) { CHECK(difference<Rank>(problem, rule) == ""); });
  }
}

TEST_CASE_TEMPLATE("adams: every delay with every refresh as the reference", Rank, SCAPE_RANKS) {
  for (const int delay : {0, 1, 2, 3})
    for (const std::size_t refresh : {1u, 2u, 5u})
      for (const std::size_t warmup : {0u, 6u}) {
        CAPTURE(delay);
        CAPTURE(refresh);
        CAPTURE(warmup);
        const AdamSOptions options{
            .learning_rate = 0.01f, .density = 0.1, .density_warmup = warmup, .delay = delay, .refresh = refresh};
        const Problem problem = random_problem(scape::BucketLayout({{200}, {90}}, 2), options, 14);
        for_rules([&](const auto& rule) { CHECK(difference<Rank>(problem, rule) == ""); });
      }
}

TEST_CASE_TEMPLATE("adams: the library's layouts as the reference", Rank, SCAPE_RANKS) {
  const AdamSOptions options{.learning_rate = 0.01f, .weight_decay = 0.1f, .density = 0.1};
  const auto check = [&](const auto& layout) {
    for_rules([&](const auto& rule) { CHECK(difference<Rank>(random_problem(layout, options, 8), rule) == ""); });
  };
  for (const int ranks : {1, 3, 5}) {
    CAPTURE(ranks);
    check(scape::FlatLayout(1000, ranks));
    check(scape::FlatLayout(3, ranks));
    check(scape::TensorLayout({{0}, {1}, {7}, {100, true}, {0}, {8, false, false}, {90}}, ranks));
    check(scape::TensorLayout({{64}, {1}, {70}, {100, true}, {8, false, false}, {90}}, ranks, scape::Scope::shard));
    check(scape::BucketLayout({{96}, {10}, {3}, {55, true}, {300, false, false}}, ranks));
  }
}

TEST_CASE_TEMPLATE("adams: an owner of 90% with exact and with padded mask parts", Rank, SCAPE_RANKS) {
  const OwnLayout layout({{0, 9000, 1}, {9000, 0, 3}, {9000, 900, 0}, {9900, 50, 1, true}, {9950, 50, 2}}, 4);
  for (const scape::MaskCoding coding : {scape::MaskCoding::bitmap, scape::MaskCoding::elias_fano})
    for_rules([&](const auto& rule) {
      Problem problem = random_problem(layout, {.learning_rate = 0.01f, .density = 0.05, .mask_coding = coding}, 6);
      const History padded = train<Rank>(problem, rule);
      problem.options.exact_mask_parts = true;
      const History exact = train<Rank>(problem, rule);
      CHECK(same(padded, exact));
      CHECK(difference(exact, problem, rule) == "");
      CHECK(padded[3][1].report.mask_bytes == exact[3][1].report.mask_bytes);  // the busiest sends the same
      CHECK(padded[3][2].report.mask_bytes > 20 * exact[3][2].report.mask_bytes);
      CHECK(exact[3][3].report.mask_bytes == 0);  // owns nothing
    });
}

TEST_CASE_TEMPLATE("adams: 0, 1, 31, 32, 33 and 1000 elements as the reference", Rank, SCAPE_RANKS) {
  for (const std::size_t size : {0u, 1u, 31u, 32u, 33u, 1000u})
    for (const int ranks : {1, 2, 5})
      for (const double density : {0.001, 0.1, 1.0}) {
        CAPTURE(size);
        CAPTURE(ranks);
        CAPTURE(density);
        const AdamSOptions options{.learning_rate = 0.01f, .clip_norm = 1, .density = density};
        const Problem problem = random_problem(scape::FlatLayout(size, ranks), options, 5);
        for_rules([&](const auto& rule) { CHECK(difference<Rank>(problem, rule) == ""); });
      }
}

TEST_CASE_TEMPLATE("adams: dense segments keep all, segments without decay do not decay", Rank, SCAPE_RANKS) {
  const OwnLayout layout({{0, 100, 0}, {100, 10, 1, true}, {110, 100, 1, false, false}, {210, 5, 0, true, false}}, 2);
  for_rules([&](const auto& rule) {
    Problem problem = random_problem(layout, {.learning_rate = 0.1f, .weight_decay = 0.5f, .density = 0.1}, 6);
    for (std::vector<Floats>& step : problem.gradients)  // all that moves is the decay
      for (Floats& gradient : step) gradient.assign(gradient.size(), 0);
    const History history = train<Rank>(problem, rule);
    for (const std::vector<State>& step : history)
      for (std::size_t i = 100; i < 215; ++i)
        if (i < 110 || i >= 210) CHECK(step[1].mask[i] == 1);
    const Floats &start = problem.parameters, &end = history.back()[0].parameters;
    CHECK(std::equal(start.begin() + 110, start.end(), end.begin() + 110));
    for (std::size_t i = 100; i < 110; ++i) CHECK(near(end[i], start[i] * std::pow(0.95, 6)));
  });
}

TEST_CASE_TEMPLATE("adams: a report tells what the reference finds, and its times are sane", Rank, SCAPE_RANKS) {
  const AdamSOptions options{.learning_rate = 0.01f, .clip_norm = 0.5f, .density = 0.1, .density_warmup = 3};
  for_rules([&](const auto& rule) {
    const Problem problem = random_problem(scape::FlatLayout(3000, 3), options, 8);
    const History history = train<Rank>(problem, rule);
    CHECK(difference(history, problem, rule) == "");
    CHECK(history[0][0].report.density == 1);
    CHECK(history[0][0].report.jaccard == 0);  // there was no mask before
    CHECK(history[1][0].report.density == doctest::Approx(std::pow(0.1, 1 / 3.0)));
    CHECK(history[7][0].report.density == 0.1);
    CHECK(history[7][0].report.kept == 300);
    for (const std::vector<State>& step : history)
      for (const State& state : step) {
        const auto& seconds = state.report.seconds;
        for (const double time :
             {seconds.select, seconds.mask_wait, seconds.accumulate, seconds.payload_wait, seconds.update}) {
          CHECK(time >= 0);
          CHECK(time < 60);
        }
        CHECK(state.report.gradient_norm == step[0].report.gradient_norm);
      }
  });
}

TEST_CASE_TEMPLATE("adams: results do not depend on the pool's threads or on reports", Rank, SCAPE_RANKS) {
  const AdamSOptions options{.learning_rate = 0.01f, .weight_decay = 0.1f, .clip_norm = 1, .density = 0.02};
  for_rules([&](const auto& rule) {
    const Problem problem = random_problem(scape::BucketLayout({{30000}, {17, true}, {5001}}, 2), options, 6);
    const History expected = train<Rank>(problem, rule);
    for (const int threads : {1, 2, 3}) CHECK(same(train<Rank>(problem, rule, threads == 2, threads), expected));
  });
}

TEST_CASE_TEMPLATE("adams: steps that are enqueued without waiting give the same", Rank, SCAPE_RANKS) {
  const AdamSOptions options{.learning_rate = 0.01f, .clip_norm = 1, .density = 0.02, .delay = 2};
  for_rules([&](const auto& rule) {
    const Problem problem = random_problem(scape::FlatLayout(20000, 2), options, 12);
    const History expected = train<Rank>(problem, rule);
    run<Rank>(2, [&](Rank& rank) {
      const std::size_t me = static_cast<std::size_t>(rank.rank());
      std::vector<decltype(rank.backend.array(Floats()))> gradients;
      for (const std::vector<Floats>& step : problem.gradients) gradients.push_back(rank.backend.array(step[me]));
      auto parameters = rank.backend.array(problem.parameters);
      scape::AdamS optimizer(problem.layout, rank.communicator, rank.memory, rank.compute, rank.side, options, rule);
      for (const auto& gradient : gradients) optimizer.step(gradient.span(), parameters.span(), rank.compute);
      CHECK(same_bits(rank.backend.read(parameters), expected.back()[me].parameters));
    });
  });
}

#if !defined(__CUDACC__)  // on a device they are not

TEST_CASE_TEMPLATE("adams: vectors, arrays and spans are arguments", Rank, SCAPE_RANKS) {
  run<Rank>(1, [](Rank& rank) {
    scape::AdamS optimizer(scape::FlatLayout(3, 1), rank.communicator, rank.memory, rank.compute, rank.side);
    std::vector<float> gradients = {1, 2, 3}, parameters(3);
    optimizer.step(gradients, parameters, rank.compute);
    std::array<float, 3> other_gradients = {1, 2, 3}, other_parameters = {};
    optimizer.step(other_gradients, other_parameters, rank.compute);
    const std::vector<float> constant = gradients;
    optimizer.step(constant, std::span(parameters).first(3), rank.compute);
    optimizer.step(std::span<const float, 3>(other_gradients), std::span<float>(parameters), rank.compute);
    CHECK(optimizer.steps() == 4);
    rank.compute.synchronize();
  });
}

#endif

TEST_CASE_TEMPLATE("adams: set_learning_rate holds from the next step on", Rank, SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    run<Rank>(1, [&](Rank& rank) {
      const OwnLayout layout(scape::FlatLayout(2, 1));
      Session session(rank, layout, {.learning_rate = 0.5f, .weight_decay = 1}, rule, {1, 1});
      Session fresh(rank, layout, {.learning_rate = 0.25f, .weight_decay = 1}, rule, {1, 1});
      session.optimizer.set_learning_rate(0.25f);
      session.step({1, -1});
      fresh.step({1, -1});
      CHECK(same_bits(session.state().parameters, fresh.state().parameters));
      CHECK(session.optimizer.options().learning_rate == 0.25f);
      const Floats before = session.state().parameters;
      session.optimizer.set_learning_rate(0);
      session.step({1, -1});
      CHECK(same_bits(session.state().parameters, before));
      session.optimizer.set_learning_rate(0.125f);
      session.step({1, -1});
      CHECK(!same_bits(session.state().parameters, before));
    });
  });
}

TEST_CASE_TEMPLATE("adams: F4, rows without gradient are not selected, and nothing is NaN with epsilon 0", Rank,
                   SCAPE_RANKS) {
  constexpr std::size_t rows = 1024, columns = 64, used = 128 * columns;
  for_rules([](const auto& rule) {
    const AdamSOptions options{.learning_rate = 0.01f, .epsilon = 0, .density = 0.05};
    Problem problem = random_problem(scape::TensorLayout({{rows * columns}, {64}}, 1), options, 6);
    for (std::vector<Floats>& step : problem.gradients)
      std::fill_n(step[0].begin() + used, rows * columns - used, 0.0f);
    const History history = train<Rank>(problem, rule);
    std::size_t selected = 0, residuals = 0, faults = 0;
    for (const std::vector<State>& step : history)
      for (std::size_t i = 0; i < rows * columns; ++i) {
        const bool empty = i >= used;
        selected += empty && step[0].mask[i];
        residuals += empty && step[0].residual[i] != 0;
        faults += !std::isfinite(step[0].parameters[i]) || (empty && step[0].parameters[i] != problem.parameters[i]);
      }
    CHECK(selected == 0);
    CHECK(residuals == 0);
    CHECK(faults == 0);
  });
}

TEST_CASE_TEMPLATE("adams: F4, all gradients zero with epsilon 0 moves nothing", Rank, SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    for (const double density : {0.1, 1.0}) {
      Problem problem =
          random_problem(scape::FlatLayout(100, 2), {.epsilon = 0, .clip_norm = 1, .density = density}, 3);
      for (std::vector<Floats>& step : problem.gradients) step.assign(2, Floats(100));
      CHECK(same_bits(train<Rank>(problem, rule).back()[1].parameters, problem.parameters));
    }
  });
}

TEST_CASE_TEMPLATE("adams: F9, micro-batches added up before the step are one gradient; a step for each is not", Rank,
                   SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    const AdamSOptions options{.learning_rate = 0.01f, .density = 0.1};
    Problem micro = random_problem(scape::FlatLayout(1000, 2), options, 16), summed = micro, added = micro;
    for (std::vector<Floats>& step : micro.gradients)
      for (Floats& gradient : step)
        for (float& value : gradient) value = std::round(value * 64);  // sums are exact
    summed.gradients.assign(4, std::vector<Floats>(2, Floats(1000)));
    added = summed;
    for (std::size_t batch = 0; batch < 16; ++batch)
      for (std::size_t rank = 0; rank < 2; ++rank)
        for (std::size_t i = 0; i < 1000; ++i) {
          summed.gradients[batch / 4][rank][i] += micro.gradients[batch][rank][i];
          added.gradients[batch / 4][rank][i] += micro.gradients[batch / 4 * 8 + 3 - batch][rank][i];
        }
    const History expected = train<Rank>(summed, rule);
    CHECK(same(train<Rank>(added, rule), expected));
    CHECK(!same_bits(train<Rank>(micro, rule).back()[0].parameters, expected.back()[0].parameters));
  });
}

TEST_CASE_TEMPLATE("adams: A12, the scope of the selection is the tensor or the shard", Rank, SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    const AdamSOptions options{.density = 0.5};
    const auto kept_of_first = [&](scape::Scope scope) {
      Problem problem = random_problem(scape::TensorLayout({{100}, {100}}, 1, scope), options, 1);
      for (std::size_t i = 0; i < 200; ++i)
        problem.gradients[0][0][i] = (i < 100 ? 1 : 1e-3f) * (1 + static_cast<float>(i % 7));
      const State state = train<Rank>(problem, rule)[0][0];
      CHECK(std::count(state.mask.begin(), state.mask.end(), 1) == 100);
      return std::count(state.mask.begin(), state.mask.begin() + 100, 1);
    };
    CHECK(kept_of_first(scape::Scope::tensor) == 50);
    CHECK(kept_of_first(scape::Scope::shard) == 100);
  });
}

TEST_CASE_TEMPLATE("adams: NaN and infinite gradients keep exactly k bits and spoil no other element", Rank,
                   SCAPE_RANKS) {
  for (const float bad : {not_a_number, -not_a_number, infinity, -infinity})
    for (const std::size_t spoiled_rank : {0u, 1u})
      for_rules([&](const auto& rule) {
        CAPTURE(bad);
        CAPTURE(spoiled_rank);
        // Element 5 is rank 0's. Where its owner sees the bad number, it is in the next mask.
        Problem problem = random_problem(OwnLayout({{0, 100, 0}, {100, 100, 1}}, 2), {.density = 0.1}, 8);
        problem.gradients[2][spoiled_rank][5] = bad;
        const History history = train<Rank>(problem, rule);
        CHECK(disagreement(history) == "");
        for (std::size_t step = 0; step < history.size(); ++step) {
          const State& state = history[step][0];
          CHECK(std::count(state.mask.begin(), state.mask.begin() + 100, 1) == 10);
          CHECK(std::count(state.mask.begin() + 100, state.mask.end(), 1) == 10);
          std::size_t others = 0;
          for (std::size_t i = 0; i < 200; ++i)
            others += i != 5 && !(std::isfinite(state.parameters[i]) && std::isfinite(history[step][0].store[i]) &&
                                  std::isfinite(history[step][1].store[i]));
          CHECK(others == 0);
          if (spoiled_rank == 0 && step >= 3) {
            CHECK(state.mask[5] == 1);
            CHECK(!std::isfinite(state.parameters[5]));
          }
        }
      });
}

TEST_CASE_TEMPLATE("adams: gradients that are all NaN or infinite keep exactly k bits", Rank, SCAPE_RANKS) {
  for (const float bad : {not_a_number, infinity})
    for (const float clip : {0.0f, 1.0f})
      for_rules([&](const auto& rule) {
        Problem problem = random_problem(scape::FlatLayout(1000, 2), {.clip_norm = clip, .density = 0.1}, 5);
        for (Floats& gradient : problem.gradients[1]) gradient.assign(1000, bad);
        const History history = train<Rank>(problem, rule);
        CHECK(disagreement(history) == "");
        for (const std::vector<State>& step : history)
          CHECK(std::count(step[0].mask.begin(), step[0].mask.end(), 1) == 100);
      });
}

#if !defined(__CUDACC__)

namespace {

// Masks come late: every gather of one waits first.
template <class Communicator>
class SlowCommunicator {
 public:
  explicit SlowCommunicator(Communicator& communicator) : to_(communicator) {}
  int rank() const { return to_.rank(); }
  int size() const { return to_.size(); }
  std::uint64_t bytes_sent() const { return to_.bytes_sent(); }
  void all_reduce_mean(std::span<const float> in, std::span<float> out, const scape::HostStream& stream) {
    to_.all_reduce_mean(in, out, stream);
  }
  void reduce_scatter_mean(std::span<const float> in, std::span<float> out, const scape::HostStream& stream) {
    to_.reduce_scatter_mean(in, out, stream);
  }
  void all_gather(std::span<const scape::MaskWord> own, std::span<scape::MaskWord> all,
                  const scape::HostStream& stream) {
    ++travelling;
    stream.enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
    to_.all_gather(own, all, stream);
    stream.enqueue([this] { --travelling; });
  }
  std::atomic<int> travelling = 0;

 private:
  Communicator& to_;
};

}  // namespace

TEST_CASE_TEMPLATE("adams: E2, the gradient may be overwritten when compute has passed, while the mask still travels",
                   Rank, SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    const Problem problem = random_problem(scape::FlatLayout(2000, 2), {.density = 0.05, .delay = 2}, 8);
    const History expected = train<Rank>(problem, rule);
    run<Rank>(2, [&](Rank& rank) {
      const std::size_t me = static_cast<std::size_t>(rank.rank());
      SlowCommunicator communicator(rank.communicator);
      Floats gradient, parameters = problem.parameters;
      int travelling = 0;
      scape::AdamS optimizer(problem.layout, communicator, rank.memory, rank.compute, rank.side, problem.options, rule);
      for (std::size_t step = 0; step < problem.gradients.size(); ++step) {
        gradient = problem.gradients[step][me];
        optimizer.step(gradient, parameters, rank.compute);
        rank.compute.synchronize();
        travelling += communicator.travelling;
        gradient.assign(gradient.size(), not_a_number);
        CHECK(same_bits(parameters, expected[step][me].parameters));
      }
      CHECK(travelling > 0);
    });
  });
}

TEST_CASE_TEMPLATE("adams: E5, a step allocates nothing after the second", Rank, SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    const std::size_t steps = cuts_long_runs() ? 200 : 1000;
    const AdamSOptions options{.clip_norm = 1, .density = 0.01, .density_warmup = 100, .delay = 2};
    const Problem problem = random_problem(scape::BucketLayout({{3000}, {10, true}, {1001}}, 2), options, 1);
    constexpr bool threads = std::is_same_v<Rank, ThreadRank>;  // which allocate in the same process
    std::barrier meeting(threads ? 2 : 1);
    std::size_t before = 0, after = 0;
    const auto body = [&](Rank& rank) {
      const Floats& gradient = problem.gradients[0][static_cast<std::size_t>(rank.rank())];
      Floats parameters = problem.parameters;
      scape::AdamS optimizer(problem.layout, rank.communicator, rank.memory, rank.compute, rank.side, options, rule);
      const auto count_when_all_are_here = [&](std::size_t& count) {
        rank.compute.synchronize();
        rank.side.synchronize();
        meeting.arrive_and_wait();
        if (rank.rank() == 0 || !threads) count = allocations;
        meeting.arrive_and_wait();
      };
      for (std::size_t step = 0; step < steps; ++step) {
        if (step == 2) count_when_all_are_here(before);
        scape::StepReport report;
        if (step % 10 == 0) optimizer.set_learning_rate(1e-3f / static_cast<float>(step + 1));
        optimizer.step(gradient, parameters, rank.compute, step % 10 == 0 ? &report : nullptr);
      }
      count_when_all_are_here(after);
    };
    run<Rank>(2, body, 2);
    CHECK(after - before == 0);
  });
}

#endif

TEST_CASE_TEMPLATE("adams: steps may run far ahead of their exchanges while the density falls", Rank, SCAPE_RANKS) {
  // What a mask's exchange is told must not change when the host drafts the next mask in the same memory.
  for (const bool exact_parts : {false, true})
    for (const int delay : {0, 1, 2}) {
      CAPTURE(exact_parts);
      CAPTURE(delay);
      const AdamSOptions options{
          .density = 0.01, .density_warmup = 60, .delay = delay, .exact_mask_parts = exact_parts};
      const Problem problem = random_problem(OwnLayout({{0, 3000, 0}, {3000, 900, 1}, {3900, 300, 0}}, 2), options, 80);
      const History expected = train<Rank>(problem, ScapeRule{});
      run<Rank>(2, [&](Rank& rank) {
        const std::size_t me = static_cast<std::size_t>(rank.rank());
        std::vector<decltype(rank.backend.array(Floats()))> gradients;
        for (const std::vector<Floats>& step : problem.gradients) gradients.push_back(rank.backend.array(step[me]));
        auto parameters = rank.backend.array(problem.parameters);
        scape::AdamS optimizer(problem.layout, rank.communicator, rank.memory, rank.compute, rank.side, options);
        for (const auto& gradient : gradients) optimizer.step(gradient.span(), parameters.span(), rank.compute);
        CHECK(same_bits(rank.backend.read(parameters), expected.back()[me].parameters));
      });
    }
}

TEST_CASE_TEMPLATE("adams: bad options are named with their value", Rank, SCAPE_RANKS) {
  const auto expect = [](auto change, const std::string& name, const std::string& value) {
    run<Rank>(1, [&](Rank& rank) {
      AdamSOptions options;
      change(options);
      const std::string text = thrown_by<std::invalid_argument>([&] {
        scape::AdamS(scape::FlatLayout(10, 1), rank.communicator, rank.memory, rank.compute, rank.side, options);
      });
      CAPTURE(text);
      CHECK(contains(text, name + " is " + value));
    });
  };
  const auto expect_float = [&](float AdamSOptions::*field, const std::string& name, std::vector<float> values) {
    for (const float value : values) {
      std::ostringstream text;
      text << value;
      expect([&](AdamSOptions& options) { options.*field = value; }, name, text.str());
    }
  };
  const float below_zero = std::nextafter(0.0f, -1.0f);
  for (const auto& [field, name] :
       {std::pair(&AdamSOptions::learning_rate, "learning_rate"), std::pair(&AdamSOptions::epsilon, "epsilon"),
        std::pair(&AdamSOptions::weight_decay, "weight_decay"), std::pair(&AdamSOptions::clip_norm, "clip_norm")})
    expect_float(field, name, {not_a_number, -1, below_zero, infinity, -infinity});
  for (const auto& [field, name] : {std::pair(&AdamSOptions::beta1, "beta1"), std::pair(&AdamSOptions::beta2, "beta2")})
    expect_float(field, name, {not_a_number, -0.5f, below_zero, 1, 1.5f, infinity, -infinity});
  const double no_densities[] = {std::numeric_limits<double>::quiet_NaN(), -0.1, 1.5, static_cast<double>(infinity)};
  const char* const texts[] = {"nan", "-0.1", "1.5", "inf"};
  for (std::size_t i = 0; i < 4; ++i)
    expect([&](AdamSOptions& options) { options.density = no_densities[i]; }, "density", texts[i]);
  expect([](AdamSOptions& options) { options.delay = -1; }, "delay", "-1");
  expect([](AdamSOptions& options) { options.refresh = 0; }, "refresh", "0");
}

TEST_CASE_TEMPLATE("adams: a bad cap of the rule is named with its value", Rank, SCAPE_RANKS) {
  for (const auto& [cap, value] :
       {std::pair(not_a_number, "nan"), std::pair(0.5f, "0.5"), std::pair(-1.0f, "-1"), std::pair(infinity, "inf")})
    run<Rank>(1, [&, cap = cap, value = value](Rank& rank) {
      const std::string text = thrown_by<std::invalid_argument>([&] {
        // Large enough that work on the buffers would still be under way when they go.
        scape::AdamS(scape::FlatLayout(sanitized ? 100000 : 3000000, 1), rank.communicator, rank.memory, rank.compute,
                     rank.side, {.density = 0.1}, ClockRule{.cap = cap});
      });
      CHECK(contains(text, std::string("cap is ") + value));
    });
}

TEST_CASE_TEMPLATE("adams: a layout for another number of ranks is named on every rank", Rank, SCAPE_RANKS) {
  for (const int layout_ranks : {1, 2, 4}) {
    CAPTURE(layout_ranks);
    const auto texts = thrown_by_ranks<Rank, std::invalid_argument>(3, [&](Rank& rank) {
      scape::AdamS(scape::FlatLayout(100000, layout_ranks), rank.communicator, rank.memory, rank.compute, rank.side,
                   {.density = 0.1});
    });
    for (const auto& found : texts) {
      const std::string& text = found.second;
      CAPTURE(text);
      CHECK(contains(text, "layout.ranks() is " + std::to_string(layout_ranks)));
      CHECK(contains(text, "3"));
    }
  }
}

TEST_CASE_TEMPLATE("adams: a bad call is named, and the next step is as if it had not been", Rank, SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    const Problem problem = random_problem(scape::FlatLayout(100, 2), {.density = 0.1}, 6);
    const History expected = train<Rank>(problem, rule);
    run<Rank>(2, [&](Rank& rank) {
      const std::size_t me = static_cast<std::size_t>(rank.rank());
      Session session(rank, problem.layout, problem.options, rule, problem.parameters);
      const auto message = [&](std::size_t gradients, std::size_t parameters) {
        Floats wrong(parameters);
        const std::string text =
            thrown_by<std::invalid_argument>([&] { session.optimizer.step(Floats(gradients), wrong, rank.compute); });
        CHECK(wrong == Floats(parameters));
        return text;
      };
      for (std::size_t step = 0; step < problem.gradients.size(); ++step) {
        CHECK(contains(message(99, 100), "gradients.size() is 99"));
        CHECK(contains(message(0, 0), "gradients.size() is 0"));
        CHECK(contains(message(100, 101), "parameters.size() is 101"));
        for (const auto& [rate, value] :
             {std::pair(not_a_number, "nan"), std::pair(-1.0f, "-1"), std::pair(infinity, "inf")})
          CHECK(contains(
              thrown_by<std::invalid_argument>([&, rate = rate] { session.optimizer.set_learning_rate(rate); }),
              std::string("learning_rate is ") + value));
        CHECK(session.optimizer.steps() == step);
        session.step(problem.gradients[step][me]);
        const State state = session.state();
        CHECK(agree(state, expected[step][me]));
        CHECK(same_bits(state.store, expected[step][me].store));
      }
    });
  });
}

namespace {

// Builds an optimizer on each rank with what make(rank) gives; every rank must be told that `odd` is the odd one.
template <class Rank, class F>
void expect_disagreement(int ranks, int odd, const std::string& what, F make) {
  CAPTURE(what);
  const auto texts = thrown_by_ranks<Rank>(ranks, [&](Rank& rank) { make(rank, rank.rank() == odd); });
  for (const auto& found : texts) {
    const std::string& text = found.second;
    CAPTURE(text);
    CHECK(contains(text, "rank " + std::to_string(odd)));
    CHECK(contains(text, what));
  }
}

}  // namespace

TEST_CASE_TEMPLATE("adams: ranks that disagree on layout, options or rule all hear which one is odd", Rank,
                   SCAPE_RANKS) {
  const auto make = [](Rank& rank, const auto& layout, const AdamSOptions& options, const auto& rule) {
    scape::AdamS(layout, rank.communicator, rank.memory, rank.compute, rank.side, options, rule);
  };
  for (const int odd : {0, 1, 3}) {
    const OwnLayout even({{0, 100, 0}, {100, 28, 1}}, 4);
    for (const scape::Segment& other : {scape::Segment{100, 28, 2}, scape::Segment{100, 29, 1},
                                        scape::Segment{100, 28, 1, true}, scape::Segment{100, 28, 1, false, false}})
      expect_disagreement<Rank>(4, odd, "layout", [&](Rank& rank, bool is_odd) {
        make(rank, is_odd ? OwnLayout({{0, 100, 0}, other}, 4) : even, {.density = 0.1}, ScapeRule{});
      });
    const std::vector<std::pair<const char*, std::function<void(AdamSOptions&)>>> changes = {
        {"learning_rate is 0.5, theirs 0.001", [](AdamSOptions& o) { o.learning_rate = 0.5f; }},
        {"beta1 is 0.5", [](AdamSOptions& o) { o.beta1 = 0.5f; }},
        {"beta2 is 0.5", [](AdamSOptions& o) { o.beta2 = 0.5f; }},
        {"epsilon is 0.5", [](AdamSOptions& o) { o.epsilon = 0.5f; }},
        {"weight_decay is 0.5", [](AdamSOptions& o) { o.weight_decay = 0.5f; }},
        {"clip_norm is 0.5", [](AdamSOptions& o) { o.clip_norm = 0.5f; }},
        {"density is 0.5", [](AdamSOptions& o) { o.density = 0.5; }},
        {"density_warmup is 5, theirs 0", [](AdamSOptions& o) { o.density_warmup = 5; }},
        {"delay is 5, theirs 1", [](AdamSOptions& o) { o.delay = 5; }},
        {"refresh is 5, theirs 1", [](AdamSOptions& o) { o.refresh = 5; }},
        {"mask_coding is 1, theirs 0", [](AdamSOptions& o) { o.mask_coding = scape::MaskCoding::bitmap; }},
        {"compare_every is 5, theirs 1", [](AdamSOptions& o) { o.compare_every = 5; }}};
    for (const auto& [what, change] : changes)
      expect_disagreement<Rank>(4, odd, std::string("its options.") + what,
                                [&, &change = change](Rank& rank, bool is_odd) {
                                  AdamSOptions options{.density = 0.1};
                                  if (is_odd) change(options);
                                  make(rank, even, options, ScapeRule{});
                                });
    expect_disagreement<Rank>(4, odd, "", [&](Rank& rank, bool is_odd) {  // layout or options
      make(rank, even, {.density = 0.1, .exact_mask_parts = is_odd}, ScapeRule{});
    });
    expect_disagreement<Rank>(4, odd, "rule", [&](Rank& rank, bool is_odd) {
      make(rank, even, {},
           ScapeRule{.bias_correction = is_odd ? scape::BiasCorrection::none : scape::BiasCorrection::adam});
    });
    expect_disagreement<Rank>(4, odd, "rule", [&](Rank& rank, bool is_odd) {
      make(rank, even, {}, ScapeRule{.score = is_odd ? scape::MaskScore::updated : scape::MaskScore::corrected});
    });
    expect_disagreement<Rank>(4, odd, "rule", [&](Rank& rank, bool is_odd) {
      make(rank, even, {}, ClockRule{.cap = is_odd ? 63.0f : 64.0f});
    });
    expect_disagreement<Rank>(4, odd, "rule", [&](Rank& rank, bool is_odd) {
      is_odd ? make(rank, even, {}, ClockRule{}) : make(rank, even, {}, ScapeRule{});
    });
  }
  expect_disagreement<Rank>(2, 1, "options", [&](Rank& rank, bool is_odd) {  // of two, the second is the odd one
    make(rank, scape::FlatLayout(10, 2), {.learning_rate = is_odd ? 1.0f : 0.1f}, ScapeRule{});
  });
}

#if !defined(__CUDACC__)  // NCCL tells nobody

TEST_CASE_TEMPLATE("adams: a rank that throws between steps does not hang the others, which hear its name", Rank,
                   SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    const Problem problem = random_problem(scape::FlatLayout(1000, 3), {.density = 0.1}, 1);
    std::atomic<bool> takes_part = false;
    const auto body = [&](Rank& rank) {
      takes_part = true;
      const std::size_t me = static_cast<std::size_t>(rank.rank());
      Floats parameters = problem.parameters;  // outlive the optimizer, which waits for the work in flight
      scape::AdamS optimizer(problem.layout, rank.communicator, rank.memory, rank.compute, rank.side, problem.options,
                             rule);
      const auto train = [&] {
        for (std::size_t step = 0; step < 50; ++step) {
          if (me == 1 && step == 3) throw std::runtime_error("out of data");
          optimizer.step(problem.gradients[0][me], parameters, rank.compute);
          rank.compute.synchronize();
        }
      };
      if (me == 1) train();
      CHECK(contains(thrown_by<scape::Error>(train), "rank 1"));
      // Afterwards no step goes on as if nothing had been.
      CHECK(thrown_by<scape::Error>(train) != "");
    };
    const std::string text = thrown_by<std::runtime_error>([&] { run<Rank>(3, body); });
    CHECK((text != "") == takes_part);
  });
}

TEST_CASE_TEMPLATE("adams: a rank that makes fewer steps does not hang the others, which hear its name", Rank,
                   SCAPE_RANKS) {
  const Problem problem = random_problem(scape::FlatLayout(1000, 3), {.density = 0.1}, 1);
  const auto texts = thrown_by_ranks<Rank>(3, [&](Rank& rank) {
    const std::size_t me = static_cast<std::size_t>(rank.rank());
    Floats parameters = problem.parameters;
    scape::AdamS optimizer(problem.layout, rank.communicator, rank.memory, rank.compute, rank.side, problem.options);
    for (std::size_t step = 0; step < (me == 1 ? 3 : 5); ++step) {
      optimizer.step(problem.gradients[0][me], parameters, rank.compute);
      rank.compute.synchronize();
    }
  });
  for (const auto& [rank, text] : texts) CHECK((rank == 1 ? text == "" : contains(text, "rank 1")));
}

#endif
