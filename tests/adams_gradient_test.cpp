// What becomes of gradients before a step: other types, a scale, micro-batches, and steps that are not made.

#include "reference.hpp"
#include "support.hpp"

#include <scape/bfloat16.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using scape::AdamSOptions;
using scape::bfloat16;
using scape::ClockRule;
using scape::ScapeRule;

// Calls body(rule) with either rule; rule scape without bias correction, so that its arithmetic can be exact.
template <class F>
void for_uncorrected_rules(F body) {
  const auto none = scape::BiasCorrection::none;
  {
    INFO("rule scape");
    body(ScapeRule{.bias_correction = none});
  }
  {
    INFO("rule scape, scored after the update");
    body(ScapeRule{.bias_correction = none, .score = scape::MaskScore::updated});
  }
  {
    INFO("rule clock");
    body(ClockRule{});
  }
}

// As train(), with step(session, rank, step) in the place of a step; it says whether the step was made.
template <class Rank, class Rule, class F>
History train_with(const Problem& problem, const Rule& rule, F step) {
  const std::size_t world = static_cast<std::size_t>(problem.layout.ranks());
  History history(problem.gradients.size(), std::vector<State>(world));
#if defined(SCAPE_TESTS_OVER_MPI)  // as in train()
  if constexpr (!std::is_same_v<Rank, ThreadRank>) history = train_with<ThreadRank>(problem, rule, step);
#endif
  Rank::run(problem.layout.ranks(), [&](Rank& rank) {
    Session session(rank, problem.layout, problem.options, rule, problem.parameters);
    for (std::size_t i = 0; i < problem.gradients.size(); ++i) {
      step(session, rank, i);
      rank.compute.synchronize();
      history[i][static_cast<std::size_t>(rank.rank())] = session.state();
    }
  });
  return history;
}

// Integers of at most two digits: sums of some, halved a few times, are exact in float32.
void make_exact(Problem& problem) {
  for (auto& of_ranks : problem.gradients)
    for (Floats& gradient : of_ranks)
      for (float& value : gradient) value = std::round(value * 20);
}

std::vector<AdamSOptions> some_options() {
  return {{.density = 1},
          {.density = 0.1},
          {.weight_decay = 0.1f, .density = 0.1, .density_warmup = 4},
          {.density = 0.05, .delay = 2},
          {.density = 0.1, .delay = 3, .refresh = 2},
          {.density = 0.1, .payload = scape::PayloadFormat::bfloat16},
          {.density = 0.05, .density_warmup = 4, .payload = scape::PayloadFormat::e4m3}};
}

const OwnLayout layout({{0, 100, 0}, {100, 33, 1, true}, {133, 4097, 1}, {4230, 70, 0, false, false}}, 2);

}  // namespace

TEST_CASE_TEMPLATE("gradients: bfloat16 is worked on as the same values in float", Rank, SCAPE_RANKS) {
  for_uncorrected_rules([](const auto& rule) {
    for (const AdamSOptions& options : {AdamSOptions{.clip_norm = 2, .density = 0.1}, {.density = 0.1, .delay = 0}}) {
      Problem problem = random_problem(layout, options, 5);
      for (auto& of_ranks : problem.gradients)
        for (Floats& gradient : of_ranks)
          for (float& value : gradient) value = static_cast<float>(bfloat16(value));
      const History history = train_with<Rank>(problem, rule, [&](auto& session, auto& rank, std::size_t i) {
        const Floats& gradient = problem.gradients[i][static_cast<std::size_t>(rank.rank())];
        const auto rounded = rank.backend.array(std::vector<bfloat16>(gradient.begin(), gradient.end()));
        session.optimizer.step(rounded.span(), session.parameters(), rank.compute);
        rank.compute.synchronize();
      });
      CHECK(same(history, train<Rank>(problem, rule)));
    }
  });
}

TEST_CASE_TEMPLATE("gradients: a scale is applied as they are read, before clipping", Rank, SCAPE_RANKS) {
  for_uncorrected_rules([](const auto& rule) {
    for (const float clip : {0.0f, 2.0f})
      for (const int delay : {0, 1}) {
        const Problem problem = random_problem(layout, {.clip_norm = clip, .density = 0.1, .delay = delay}, 5);
        Problem scaled = problem;
        scaled.options.gradient_scale = 1.0f / 64;
        for (std::size_t i = 0; i < 5; ++i)
          for (Floats& gradient : scaled.gradients[i])
            for (float& value : gradient) value *= i < 3 ? 64.0f : 1024.0f;
        const History history = train_with<Rank>(scaled, rule, [&](auto& session, auto& rank, std::size_t i) {
          if (i == 3) session.optimizer.set_gradient_scale(1.0f / 1024);
          session.step(scaled.gradients[i][static_cast<std::size_t>(rank.rank())]);
        });
        CHECK(same(history, train<Rank>(problem, rule)));
      }
  });
}

TEST_CASE_TEMPLATE("gradients: micro-batches are one step on their sum, to the bit where sums are exact", Rank,
                   SCAPE_RANKS) {
  for_uncorrected_rules([](const auto& rule) {
    for (AdamSOptions options : some_options()) {
      options.beta1 = 0.5f;
      options.adds = true;
      Problem problem = random_problem(layout, options, 7);
      make_exact(problem);
      const History history = train_with<Rank>(problem, rule, [&](auto& session, auto& rank, std::size_t i) {
        // One to four parts; the buffer is overwritten as soon as compute has passed.
        const std::size_t parts = 1 + i % 4;
        const Floats& sum = problem.gradients[i][static_cast<std::size_t>(rank.rank())];
        Floats left = sum;
        const auto buffer = rank.backend.array(sum);
        for (std::size_t part = 0; part < parts; ++part) {
          Floats now = left;
          if (part + 1 < parts)
            for (std::size_t j = 0; j < now.size(); ++j) now[j] = std::round(static_cast<float>(j % 7) - left[j] / 3);
          for (std::size_t j = 0; j < now.size(); ++j) left[j] -= now[j];
          scape::copy_values(std::span<const float>(now), buffer.span(), rank.compute);
          if (part + 1 < parts)
            session.optimizer.add(buffer.span(), rank.compute);
          else
            session.optimizer.step(buffer.span(), session.parameters(), rank.compute);
          rank.compute.synchronize();
        }
      });
      CHECK(same(history, train<Rank>(problem, rule)));
    }
  });
}

TEST_CASE_TEMPLATE("gradients: micro-batches of bfloat16, scaled", Rank, SCAPE_RANKS) {
  for_uncorrected_rules([](const auto& rule) {
    Problem problem = random_problem(layout, {.beta1 = 0.5f, .gradient_scale = 0.25f, .density = 0.1, .adds = true}, 5);
    make_exact(problem);
    const History history = train_with<Rank>(problem, rule, [&](auto& session, auto& rank, std::size_t i) {
      const Floats& gradient = problem.gradients[i][static_cast<std::size_t>(rank.rank())];
      const auto rounded = rank.backend.array(std::vector<bfloat16>(gradient.begin(), gradient.end()));
      for (int part = 0; part < 3; ++part) session.optimizer.add(rounded.span(), rank.compute);
      session.optimizer.step(rounded.span(), session.parameters(), rank.compute);
      rank.compute.synchronize();
    });
    problem.options.gradient_scale = 1;
    CHECK(same(history, train<Rank>(problem, rule)));
  });
}

TEST_CASE_TEMPLATE("gradients: a step that overflows on one rank changes nothing anywhere", Rank, SCAPE_RANKS) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
  for_uncorrected_rules([&](const auto& rule) {
    for (const AdamSOptions& options : some_options())
      for (const int odd : {0, 1}) {
        const Problem problem = random_problem(layout, options, 6);
        const History history = train_with<Rank>(problem, rule, [&](auto& session, auto& rank, std::size_t i) {
          const auto gradient = rank.backend.array(problem.gradients[i][static_cast<std::size_t>(rank.rank())]);
          const auto attempt = [&](auto values, std::optional<bool> overflowed = std::nullopt) {
            const bool made = session.optimizer.try_step(values, session.parameters(), rank.compute, overflowed);
            rank.compute.synchronize();
            return made;
          };
          if (i % 2 == 1) {
            const std::size_t steps = session.optimizer.steps();
            for (const float bad : {not_a_number, -infinity}) {
              Floats values(layout.size(), 1);
              values[rank.rank() == odd ? layout.size() - 1 : 0] = rank.rank() == odd ? bad : 3e38f;
              const auto array = rank.backend.array(values);
              const auto rounded = rank.backend.array(std::vector<bfloat16>(values.begin(), values.end()));
              CHECK_FALSE(attempt(array.span()));
              CHECK_FALSE(attempt(rounded.span()));
            }
            CHECK_FALSE(attempt(gradient.span(), rank.rank() == odd));
            CHECK(session.optimizer.steps() == steps);
          }
          CHECK(attempt(gradient.span(), i % 3 == 0 ? std::optional(false) : std::nullopt));
        });
        CHECK(same(history, train<Rank>(problem, rule)));
      }
  });
}

TEST_CASE_TEMPLATE("gradients: a flag that the caller brings is believed", Rank, SCAPE_RANKS) {
  Rank::run(2, [](Rank& rank) {
    Session session(rank, layout, {.density = 0.1}, ScapeRule{}, Floats(layout.size()));
    Floats values(layout.size(), 1);
    values[3] = std::numeric_limits<float>::quiet_NaN();
    const auto gradient = rank.backend.array(values);
    CHECK(session.optimizer.try_step(gradient.span(), session.parameters(), rank.compute, false));
    rank.compute.synchronize();
    CHECK(std::isnan(session.state().parameters[3]));
  });
}

TEST_CASE_TEMPLATE("gradients: calls that cannot be served are named", Rank, SCAPE_RANKS) {
  Rank::run(1, [](Rank& rank) {
    const scape::FlatLayout flat(10, 1);
    const auto refused = [&](const AdamSOptions& options, const auto& rule, auto call) {
      const auto gradient = rank.backend.array(Floats(10, 1));  // outlives the session's work
      Session session(rank, OwnLayout(flat), options, rule, Floats(10));
      return thrown_by<std::invalid_argument>([&] { call(session, gradient.span()); });
    };
    const auto add = [&](auto& session, std::span<float> gradient) { session.optimizer.add(gradient, rank.compute); };
    const auto add_and_try = [&](auto& session, std::span<float> gradient) {
      session.optimizer.add(gradient, rank.compute);
      session.optimizer.try_step(gradient, session.parameters(), rank.compute);
    };
    CHECK(refused({.density = 0.5}, ScapeRule{}, add) == "options.adds is 0: must be true for add()");
    CHECK(refused({.density = 0.5, .delay = 0, .adds = true}, ScapeRule{}, add) ==
          "options.delay is 0: must be at least 1 for add()");
    CHECK(refused({.clip_norm = 1, .adds = true}, ClockRule{}, add) ==
          "options.clip_norm is 1: must be 0 for add() with this rule");
    CHECK(refused({.clip_norm = 1, .adds = true}, ScapeRule{}, add) == "");
    CHECK(refused({.adds = true}, ScapeRule{}, add_and_try) ==
          "try_step is called after add(): what was added cannot be taken back");
    CHECK(refused({.adds = true}, ScapeRule{}, [&](auto& session, std::span<float> gradient) {
            session.optimizer.add(gradient.first(9), rank.compute);
          }) == "gradients.size() is 9: must be the layout's size, 10");
    CHECK(thrown_by<std::invalid_argument>([] {
            AdamSOptions{.gradient_scale = std::numeric_limits<float>::infinity()}.check();
          }) == "gradient_scale is inf: must be finite");
    CHECK(refused({}, ScapeRule{}, [&](auto& session, std::span<float>) {
            session.optimizer.set_gradient_scale(std::numeric_limits<float>::infinity());
          }) == "scale is inf: must be finite");
  });
}
