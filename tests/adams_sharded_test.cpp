// AdamS with sharded masters: the same masters as the replicated run's parameters, replicas that follow them.

#include "reference.hpp"
#include "support.hpp"

#include <scape/bfloat16.hpp>
#include <scape/sharding.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using scape::AdamSOptions;
using scape::bfloat16;
using scape::ClockRule;
using scape::ScapeRule;
using scape::Sharded;

// Calls body(rule, parameter) with either rule and either type of parameters.
template <class F>
void for_rules_and_types(F body) {
  const auto with = [&](const auto& rule) {
    body(rule, float{});
    body(rule, bfloat16{});
  };
  {
    INFO("rule scape");
    with(ScapeRule{});
  }
  {
    INFO("rule scape, scored after the update");
    with(ScapeRule{.score = scape::MaskScore::updated});
  }
  {
    INFO("rule clock");
    with(ClockRule{});
  }
}

// The simulator of devices takes its time, and so do processes of which each trains all ranks.
#if defined(__CUDACC__) || defined(SCAPE_TESTS_OVER_MPI)
constexpr bool quick = true;
#else
constexpr bool quick = false;
#endif

// Segments of every size, some empty, dense or without decay, by owners in turn; the last rank may own nothing.
OwnLayout mixed(int ranks, bool idle) {
  OwnLayout layout({}, ranks);
  const std::size_t sizes[] = {100, 0, 33, 4097, 1, 64, 500, 31, 900};
  for (std::size_t i = 0; i < std::size(sizes); ++i)
    layout.list.push_back(
        {layout.size(), sizes[i], static_cast<int>(i) % (ranks - (idle && ranks > 1)), i % 4 == 2, i % 3 != 1});
  return layout;
}

// A rank with a sharded optimizer and its parameters.
template <class Rank, class Rule, class P>
struct ShardedSession {
  using Optimizer = scape::AdamS<typename Rank::Stream, typename Rank::Communicator,
                                 std::remove_cvref_t<decltype(Rank::memory)>, Rule, Sharded<P>>;

  ShardedSession(Rank& rank, const Problem& problem, const Rule& rule)
      : rank(rank),
        parameters(rank.backend.array(std::vector<P>(problem.parameters.begin(), problem.parameters.end()))),
        optimizer(problem.layout, rank.communicator, rank.memory, rank.compute, rank.side, problem.options, rule) {
    const auto masters = rank.backend.array(problem.parameters);
    optimizer.load_masters(masters.span(), rank.compute);
    rank.compute.synchronize();
  }

  template <class T>
  std::vector<T> read(std::span<const T> values) const {
    std::vector<T> result(values.size());
    scape::copy_values(values, std::span<T>(result), rank.compute);
    rank.compute.synchronize();
    return result;
  }

  // The first of the rank's own elements where the master differs from `expected`, or "".
  std::string wrong_master(const Floats& expected) const {
    const Floats masters = read(std::span<const float>(optimizer.masters()));
    const scape::MaskPlan& plan = optimizer.plan();
    for (std::size_t t = plan.first_tile(rank.rank()); t < plan.first_tile(rank.rank() + 1); ++t) {
      const scape::Tile& tile = plan.tiles()[t];
      for (std::size_t i = 0; i < tile.count; ++i)
        if (std::bit_cast<std::uint32_t>(masters[tile.own + i]) !=
            std::bit_cast<std::uint32_t>(expected[tile.element + i]))
          return "master of element " + std::to_string(tile.element + i);
    }
    return "";
  }

  Rank& rank;
  decltype(std::declval<Rank&>().backend.array(std::vector<P>{})) parameters;
  Optimizer optimizer;
};

}  // namespace

TEST_CASE_TEMPLATE("sharded: masters are the replicated run's parameters, to the bit, and replicas their rounding",
                   Rank, SCAPE_RANKS) {
  for_rules_and_types([]<class Rule, class P>(const Rule& rule, P) {
    const AdamSOptions all[] = {{.density = 0.1},
                                {.clip_norm = 1, .density = 0.05, .density_warmup = 4},
                                {.density = 0.1, .delay = 0},
                                {.density = 0.1, .delay = 2, .exact_mask_parts = true},
                                {.density = 1}};
    for (const int ranks : {1, 2, 5})
      for (const bool idle : {false, true})
        for (const AdamSOptions& options : all) {
          if (quick && (ranks == 1 || idle == (ranks == 2))) continue;
          CAPTURE(ranks);
          CAPTURE(options.density);
          const Problem problem = random_problem(mixed(ranks, idle), options, quick ? 4 : 6);
          const History expected = train<Rank>(problem, rule);
          Rank::run(ranks, [&](Rank& rank) {
            const std::size_t me = static_cast<std::size_t>(rank.rank());
            ShardedSession<Rank, Rule, P> session(rank, problem, rule);
            for (std::size_t step = 0; step < problem.gradients.size(); ++step) {
              const auto gradient = rank.backend.array(problem.gradients[step][me]);
              scape::StepReport report;
              session.optimizer.step(gradient.span(), session.parameters.span(), rank.compute,
                                     step % 2 == 0 ? &report : nullptr);
              rank.compute.synchronize();
              CHECK(session.wrong_master(expected[step][me].parameters) == "");
              CHECK(same_bits(session.read(session.optimizer.store(rank.compute)), expected[step][me].store));
              CHECK(session.read(std::span<const P>(session.parameters.span())) ==
                    rounded<P>(expected[step][me].parameters));
              if (step % 2 == 0) {
                CHECK(report.kept == expected[step][me].report.kept);
                CHECK(report.jaccard == expected[step][me].report.jaccard);
              }
            }
          });
        }
  });
}

TEST_CASE_TEMPLATE(
    "sharded: weight decay of rule scape leaves replicas behind by what it moved, until they are synchronized", Rank,
    SCAPE_RANKS) {
  const auto check = []<class P>(P) {
    for (const int ranks : {1, 3}) {
      const Problem problem =
          random_problem(mixed(ranks, true), {.learning_rate = 0.01f, .weight_decay = 0.1f, .density = 0.05}, 8);
      const History expected = train<Rank>(problem, ScapeRule{});
      Rank::run(ranks, [&](Rank& rank) {
        const std::size_t me = static_cast<std::size_t>(rank.rank());
        ShardedSession<Rank, ScapeRule, P> session(rank, problem, ScapeRule{});
        std::vector<std::size_t> since(problem.layout.size());  // steps since an element was kept
        for (std::size_t step = 0; step < problem.gradients.size(); ++step) {
          const auto gradient = rank.backend.array(problem.gradients[step][me]);
          session.optimizer.step(gradient.span(), session.parameters.span(), rank.compute);
          rank.compute.synchronize();
          const State& state = expected[step][me];
          CHECK(session.wrong_master(state.parameters) == "");
          const auto replicas = session.read(std::span<const P>(session.parameters.span()));
          std::size_t wrong = 0;
          for (std::size_t i = 0; i < replicas.size(); ++i) {
            since[i] = state.mask[i] ? 0 : since[i] + 1;
            const double master = static_cast<double>(state.parameters[i]);
            const double moved = std::abs(master) * (std::pow(1 - 0.001, -static_cast<double>(since[i])) - 1);
            const double ulp = std::is_same_v<P, float> ? 1e-6 : 1.0 / 256;  // of the rounding, relative
            wrong += std::abs(static_cast<double>(static_cast<float>(replicas[i])) - master) >
                     moved + ulp * std::abs(master) * 1.01 + 1e-30;
          }
          CHECK(wrong == 0);
        }
        session.optimizer.synchronize_parameters(session.parameters.span(), rank.compute);
        rank.compute.synchronize();
        CHECK(session.read(std::span<const P>(session.parameters.span())) ==
              rounded<P>(expected.back()[me].parameters));
      });
    }
  };
  check(float{});
  check(bfloat16{});
}

TEST_CASE_TEMPLATE("sharded: bytes kept and sent are the documented ones", Rank, SCAPE_RANKS) {
  for_rules_and_types([]<class Rule, class P>(const Rule& rule, P) {
    constexpr std::size_t ranks = 4, own = 8'000, size = ranks * own, kept = own / 100;
    Problem problem = random_problem(scape::FlatLayout(size, ranks), {.density = 0.01}, 1);
    Rank::run(ranks, [&](Rank& rank) {
      ShardedSession<Rank, Rule, P> session(rank, problem, rule);
      const auto gradient = rank.backend.array(problem.gradients[0][static_cast<std::size_t>(rank.rank())]);
      scape::StepReport report;
      session.optimizer.step(gradient.span(), session.parameters.span(), rank.compute, &report);
      constexpr bool clock = std::is_same_v<Rule, ClockRule>;
      CHECK(report.payload_bytes == (clock ? 1 : 2) * (ranks - 1) * kept * 4);
      CHECK(report.parameter_bytes == (ranks - 1) * kept * sizeof(P));
      const std::size_t masks = 2 * (size / 8 + size / 4096 * 8 + 8 * ranks);
      const std::size_t state = 4 * size + 4 * own + (clock ? 6 * own : 0) + masks;
      CHECK(session.optimizer.state_bytes() >= state - masks);
      CHECK(session.optimizer.state_bytes() <= state + 36'000);  // tables of plan and powers
    });
  });
}

TEST_CASE_TEMPLATE("sharded: synchronizing sends every parameter, in pieces of the payload's size", Rank, SCAPE_RANKS) {
  for (const int ranks : {1, 2, 5}) {
    const Problem problem = random_problem(mixed(ranks, true), {.density = 0.003}, 1);
    Rank::run(ranks, [&](Rank& rank) {
      ShardedSession<Rank, ClockRule, bfloat16> session(rank, problem, ClockRule{});
      scape::fill_values(session.parameters.span(), bfloat16(7.0f), rank.compute);
      session.optimizer.synchronize_parameters(session.parameters.span(), rank.compute);
      rank.compute.synchronize();
      CHECK(session.read(std::span<const bfloat16>(session.parameters.span())) ==
            rounded<bfloat16>(problem.parameters));
    });
  }
}

TEST_CASE_TEMPLATE("sharded: masters must be loaded, and everything must have the layout's size", Rank, SCAPE_RANKS) {
  Rank::run(1, [](Rank& rank) {
    scape::AdamS optimizer(scape::FlatLayout(10, 1), rank.communicator, rank.memory, rank.compute, rank.side, {},
                           ClockRule{}, Sharded<bfloat16>{});
    const auto values = rank.backend.array(Floats(10, 1));
    const auto parameters = rank.backend.array(std::vector<bfloat16>(10));
    CHECK(message_of([&] { optimizer.step(values.span(), parameters.span(), rank.compute); }) ==
          "masters is not loaded: call load_masters() before the first step");
    CHECK(message_of([&] { optimizer.load_masters(values.span().first(9), rank.compute); }) ==
          "values.size() is 9: must be the layout's size, 10");
    optimizer.load_masters(values.span(), rank.compute);
    CHECK(message_of([&] { optimizer.step(values.span(), parameters.span().first(9), rank.compute); }) ==
          "parameters.size() is 9: must be the layout's size, 10");
    optimizer.step(values.span(), parameters.span(), rank.compute);
    rank.compute.synchronize();
  });
}
