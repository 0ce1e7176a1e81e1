// What rule `clock` implies (ALGORITHM, "Rule clock"), each by itself, and the rule against the reference.

#include "reference.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using scape::AdamSOptions;
using scape::ClockRule;

// When masks are made: what must not matter to what a rule conserves.
constexpr struct {
  double density;
  std::size_t warmup;
  int delay;
  std::size_t refresh;
} timings[] = {{0.1, 0, 1, 1}, {0.02, 7, 1, 1}, {0.1, 0, 0, 1}, {0.1, 0, 2, 1}, {0.05, 4, 3, 2}, {0.2, 0, 1, 5}};

template <class F>
void for_timings(F body) {
  for (const auto& timing : timings) {
    CAPTURE(timing.density);
    CAPTURE(timing.warmup);
    CAPTURE(timing.delay);
    CAPTURE(timing.refresh);
    body(AdamSOptions{.learning_rate = 0.01f,
                      .weight_decay = 0.1f,
                      .density = timing.density,
                      .density_warmup = timing.warmup,
                      .delay = timing.delay,
                      .refresh = timing.refresh});
  }
}

}  // namespace

TEST_CASE_TEMPLATE("clock: density 1 is AdamS without bias correction bit for bit", Rank, SCAPE_RANKS) {
  for (const int ranks : {1, 2, 3, 5}) {
    CAPTURE(ranks);
    const AdamSOptions options{.learning_rate = 0.013f, .weight_decay = 0.1f};
    const Problem problem = random_problem(scape::FlatLayout(1001, ranks), options, 12);
    const History history = train<Rank>(problem, ClockRule{});
    const float b1_rest = static_cast<float>(1 - static_cast<double>(options.beta1));
    const float b2_rest = static_cast<float>(1 - static_cast<double>(options.beta2));
    Floats w = problem.parameters, m(w.size());
    for (std::size_t step = 0; step < history.size(); ++step) {
      for (std::size_t i = 0; i < w.size(); ++i) {
        float g = 0;
        for (const Floats& gradient : problem.gradients[step]) g += gradient[i];
        g /= static_cast<float>(ranks);
        const float v = options.beta2 * (m[i] * m[i]) + b2_rest * (g * g);
        m[i] = options.beta1 * m[i] + b1_rest * g;
        w[i] -= options.learning_rate * (m[i] / (std::sqrt(v) + options.epsilon) + options.weight_decay * w[i]);
      }
      for (const State& state : history[step]) {
        CHECK(same_bits(state.parameters, w));
        CHECK(same_bits(state.moments, m));
        CHECK(state.residual == Floats(w.size()));
      }
    }
  }
}

TEST_CASE_TEMPLATE("clock: density 1 without weight decay is rule scape without bias correction", Rank, SCAPE_RANKS) {
  const Problem problem = random_problem(scape::FlatLayout(1001, 3), {.learning_rate = 0.013f}, 12);
  const History clock = train<Rank>(problem, ClockRule{});
  const History plain = train<Rank>(problem, scape::ScapeRule{.bias_correction = scape::BiasCorrection::none});
  for (std::size_t step = 0; step < clock.size(); ++step)
    CHECK(same_bits(clock[step][0].parameters, plain[step][0].parameters));
}

TEST_CASE_TEMPLATE("clock: what was sent and what is left sum up to the gradients, whatever the masks", Rank,
                   SCAPE_RANKS) {
  for_timings([](const AdamSOptions& options) {
    constexpr std::size_t ranks = 3;
    const Problem problem = random_problem(some_tensors(ranks), options, 24);
    const History history = train<Rank>(problem, ClockRule{});
    const std::size_t size = problem.layout.size();
    std::vector<double> sent(size), brought(size);
    std::size_t faults = 0;
    for (std::size_t step = 0; step < history.size(); ++step)
      for (std::size_t i = 0; i < size; ++i) {
        const State& state = history[step][0];
        double left = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          brought[i] += static_cast<double>(problem.gradients[step][rank][i]) / ranks;
          left += static_cast<double>(history[step][rank].residual[i]) / ranks;
        }
        if (state.mask[i]) {
          // n ghat = n (m' - b1^n m) / (1 - b1^n), with the n and m of before
          const double n = step == 0 ? 1 : static_cast<double>(history[step - 1][0].elapsed[i]);
          const double old = step == 0 ? 0 : history[step - 1][0].moments[i], power = std::pow(0.9, n);
          sent[i] += n * (state.moments[i] - power * old) / (1 - power);
          faults += left != 0;
        }
        faults += !near(sent[i] + left, brought[i], 1e-4);
      }
    CHECK(faults == 0);
  });
}

TEST_CASE_TEMPLATE("clock: with a constant gradient a kept first moment is dense AdamS's, whatever the masks", Rank,
                   SCAPE_RANKS) {
  for_timings([](const AdamSOptions& options) {
    Problem problem = random_problem(some_tensors(2), options, 1);
    problem.gradients.resize(40, problem.gradients[0]);
    const History history = train<Rank>(problem, ClockRule{});
    std::size_t kept = 0, faults = 0;
    for (std::size_t step = 0; step < history.size(); ++step)
      for (std::size_t i = 0; i < problem.layout.size(); ++i) {
        if (!history[step][0].mask[i]) continue;
        const double mean = (static_cast<double>(problem.gradients[0][0][i]) + problem.gradients[0][1][i]) / 2;
        const double expected = (1 - std::pow(0.9, step + 1)) * mean;
        faults +=
            std::abs(history[step][0].moments[i] - expected) > 1e-5 * std::abs(expected) + 1e-6;  // the mean may cancel
        ++kept;
      }
    CHECK(kept > problem.layout.size());
    CHECK(faults == 0);
  });
}

TEST_CASE_TEMPLATE("clock: no element moves more than lr min(n, cap) (1.13 + wd |w|), whatever its residual", Rank,
                   SCAPE_RANKS) {
  for (const float cap : {64.0f, 3.0f}) {
    const AdamSOptions options{.learning_rate = 0.01f, .epsilon = 0, .weight_decay = 0.1f, .density = 0.03};
    Problem problem = random_problem(some_tensors(2), options, 60);
    std::mt19937 random(7);
    std::uniform_real_distribution<float> exponent(-6, 6);
    for (std::vector<Floats>& step : problem.gradients)
      for (Floats& gradient : step)
        for (float& value : gradient) value *= std::pow(10.0f, exponent(random));
    const History history = train<Rank>(problem, ClockRule{.cap = cap});
    std::size_t faults = 0;
    double largest = 0;
    for (std::size_t step = 1; step < history.size(); ++step)
      for (std::size_t i = 0; i < problem.layout.size(); ++i) {
        const State &was = history[step - 1][0], &is = history[step][0];
        const double n = std::min<double>(static_cast<double>(was.elapsed[i]), cap), w = was.parameters[i];
        const double moved = std::abs(is.parameters[i] - w) / (0.01 * n);
        faults += moved > 1.13 + 0.1 * std::abs(w) + 1e-4;
        largest = std::max(largest, moved);
      }
    CHECK(faults == 0);
    CHECK(largest > 0.9);  // the bound is not empty
  }
}

TEST_CASE_TEMPLATE("clock: parameters are bit-unchanged off the mask, weight decay included", Rank, SCAPE_RANKS) {
  for_timings([](AdamSOptions options) {
    options.weight_decay = 0.5f;
    const Problem problem = random_problem(some_tensors(2), options, 12);
    const History history = train<Rank>(problem, ClockRule{});
    std::size_t faults = 0, off = 0;
    for (std::size_t step = 0; step < history.size(); ++step)
      for (std::size_t i = 0; i < problem.layout.size(); ++i) {
        if (history[step][0].mask[i]) continue;
        const Floats& before = step == 0 ? problem.parameters : history[step - 1][0].parameters;
        faults += history[step][0].parameters[i] != before[i];
        ++off;
      }
    CHECK(off > 0);
    CHECK(faults == 0);
  });
}

TEST_CASE_TEMPLATE("clock: equal gradients on 2, 4 and 8 ranks give what one rank gives", Rank, SCAPE_RANKS) {
  const std::vector<scape::Segment> segments = {{0, 300, 0}, {300, 500, 0}, {800, 7, 0, true}, {807, 193, 0}};
  Problem one = random_problem(OwnLayout(segments, 1), {.learning_rate = 0.01f, .density = 0.1}, 15);
  for (std::vector<Floats>& gradients : one.gradients)
    for (float& value : gradients[0]) value = std::round(value * 1024) / 1024;  // so that all sums are exact
  const History expected = train<Rank>(one, ClockRule{});
  for (const int ranks : {2, 4, 8}) {
    CAPTURE(ranks);
    Problem several = one;
    several.layout.world = ranks;
    for (std::size_t i = 0; i < segments.size(); ++i) several.layout.list[i].owner = static_cast<int>(i) % ranks;
    for (std::vector<Floats>& gradients : several.gradients)
      gradients.resize(static_cast<std::size_t>(ranks), gradients[0]);
    const History history = train<Rank>(several, ClockRule{});
    for (std::size_t step = 0; step < history.size(); ++step)
      for (const State& state : history[step]) {
        CHECK(agree(state, expected[step][0]));
        CHECK(same_bits(state.residual, expected[step][0].residual));
      }
  }
}

TEST_CASE_TEMPLATE("clock: replicas and masks are bit-identical after every step", Rank, SCAPE_RANKS) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    CAPTURE(ranks);
    const AdamSOptions options{.learning_rate = 0.01f, .weight_decay = 0.1f, .clip_norm = 5, .density = 0.05};
    CHECK(disagreement(train<Rank>(random_problem(some_tensors(ranks), options, 15), ClockRule{})) == "");
  }
}

TEST_CASE_TEMPLATE("clock: state is 10 bytes a parameter and two bitmaps", Rank, SCAPE_RANKS) {
  run<Rank>(1, [](Rank& rank) {
    const std::size_t size = 1 << 18;
    const Session session(rank, OwnLayout(scape::FlatLayout(size, 1)), {.density = 0.01}, ClockRule{}, Floats(size));
    CHECK(session.optimizer.state_bytes() >= size * 10 + 2 * size / 8);
    CHECK(session.optimizer.state_bytes() <= size * 10 + 2 * size / 8 + size / 4096 * 64 + 65536);
  });
}

TEST_CASE_TEMPLATE("clock: the local gradient is clipped by its own norm, the residual never", Rank, SCAPE_RANKS) {
  // Norms 5 and 0.5, limit 1: rank 0 is clipped, rank 1 is not.
  const AdamSOptions options{.learning_rate = 0.1f, .clip_norm = 1, .density = 0.5};
  const Problem problem{OwnLayout({{0, 2, 0}}, 2),
                        options,
                        Floats(2),
                        {{{4.0f, 3.0f}, {0.4f, 0.3f}}, {{8.0f, 6.0f}, {0.0f, 0.0f}}, {{0.0f, 0.0f}, {0.0f, 0.0f}}}};
  const History history = train<Rank>(problem, ClockRule{});
  const double scale = 1 / (5 + 1e-6);
  CHECK(history[0][0].mask == Mask{1, 0});
  CHECK(near(history[0][0].moments[0], 0.1 * (4 * scale + 0.4) / 2, 1e-6));
  CHECK(near(history[0][0].residual[1], 3 * scale, 1e-6));
  CHECK(near(history[0][1].residual[1], 0.3, 1e-6));
  CHECK(history[1][0].mask == Mask{0, 1});  // 2 * (0.19 * 1.2 / 2) beats 0.9 * 0.06 + 0.1 * 0.8
  CHECK(near(history[1][0].report.gradient_norm, (1.2 + 0.3) / 2, 1e-6));  // the payload: unclipped residual, n steps
  CHECK(difference(history, problem, ClockRule{}) == "");
}

TEST_CASE_TEMPLATE("clock: an element of a mask that waits is scored as if it had been sent", Rank, SCAPE_RANKS) {
  // Four equal elements: with delay 2 the masks must go round them, not repeat.
  const AdamSOptions options{.density = 0.25, .delay = 2};
  const Problem problem{OwnLayout({{0, 4, 0}}, 1), options, Floats(4), Gradients(16, {{1.0f, 1.0f, 1.0f, 1.0f}})};
  const History history = train<Rank>(problem, ClockRule{});
  for (std::size_t step = 2; step < history.size(); ++step) CHECK(history[step][0].mask != history[step - 1][0].mask);
  for (std::size_t i = 0; i < 4; ++i) CHECK(history.back()[0].elapsed[i] <= 5);
}

TEST_CASE_TEMPLATE("clock: caps as the reference", Rank, SCAPE_RANKS) {
  for (const float cap : {1.0f, 2.5f, 64.0f}) {
    CAPTURE(cap);
    const AdamSOptions options{.learning_rate = 0.02f,
                               .beta1 = 0.85f,
                               .beta2 = 0.97f,
                               .epsilon = 1e-3f,
                               .weight_decay = 0.2f,
                               .density = 0.05};
    CHECK(difference<Rank>(random_problem(some_tensors(3), options, 25), ClockRule{.cap = cap}) == "");
  }
}

TEST_CASE_TEMPLATE("clock: timings of masks as the reference", Rank, SCAPE_RANKS) {
  for_timings([](const AdamSOptions& options) {
    CHECK(difference<Rank>(random_problem(some_tensors(3), options, 20), ClockRule{}) == "");
  });
}

TEST_CASE_TEMPLATE("clock: n is exact up to 49151 and stays there, past several sweeps", Rank, SCAPE_RANKS) {
  // Pairs of elements, one of each kept. The first keeps its place by a large gradient until the second gets a larger
  // one, in the step before it shall be selected: in the step that makes its n the given one. The last pair's never
  // does.
  const std::vector<std::size_t> due = cuts_long_runs()
                                           ? std::vector<std::size_t>{3, 16383, 16384, 16385}
                                           : std::vector<std::size_t>{3,     16383, 16384, 16385, 32768, 49150, 49151,
                                                                      49152, 49153, 65535, 65536, 65537, 69999};
  const std::size_t pairs = due.size() + 1, steps = due.back() + 2, longest = ClockRule::longest;
  REQUIRE(longest == 49151);
  std::vector<scape::Segment> segments;
  for (std::size_t pair = 0; pair < pairs; ++pair) segments.push_back({2 * pair, 2, 0});
  // Powers that still tell n from n + 1 after 49151 steps.
  const AdamSOptions options{
      .learning_rate = 0.001f, .beta1 = 0.99995f, .beta2 = 0.9999f, .epsilon = 0, .density = 0.5};
  const ClockRule rule{.cap = static_cast<float>(longest)};
  run<Rank>(1, [&](Rank& rank) {
    Session session(rank, OwnLayout(segments, 1), options, rule, Floats(2 * pairs));
    const float small = 0.0009765625f, large = 1e6f;  // a power of two, so that the residual is exact
    Floats gradient(2 * pairs, small);
    for (std::size_t pair = 0; pair < pairs; ++pair) gradient[2 * pair] = 100;
    std::size_t next = 0;
    for (std::size_t step = 0; step < steps; ++step) {
      for (std::size_t pair = 0; pair < due.size(); ++pair)  // in the next step n is step + 2
        gradient[2 * pair + 1] = step + 2 == due[pair] ? large : small;
      session.step(gradient);
      if (next == due.size() || step + 1 != due[next]) continue;
      const State state = session.state();
      const std::size_t i = 2 * next + 1;
      CAPTURE(step);
      REQUIRE(state.mask[i] == 1);
      CHECK(state.elapsed[i] == 1);
      CHECK(state.elapsed[2 * pairs - 1] == std::min(step + 2, longest));
      const double n = static_cast<double>(std::min(step + 1, longest));
      const double sum = static_cast<double>(static_cast<float>(step) * small + large), mean = sum / n;
      const double power1 = std::pow(static_cast<double>(options.beta1), n);
      const double power2 = std::pow(static_cast<double>(options.beta2), n);
      CHECK(state.moments[i] == doctest::Approx((1 - power1) * mean).epsilon(2e-6));
      const double move = 0.001 * n * (1 - power1) / std::sqrt(1 - power2);
      CHECK(-state.parameters[i] == doctest::Approx(move).epsilon(2e-6));
      ++next;
    }
    CHECK(next == due.size());
  });
}

TEST_CASE_TEMPLATE("clock: 2^20 + 1 elements as the reference", Rank, SCAPE_RANKS) {
  const std::size_t size = sanitized ? (1 << 16) + 1 : (1 << 20) + 1;
  const AdamSOptions options{.learning_rate = 0.01f, .weight_decay = 0.1f, .density = 0.01};
  CHECK(difference<Rank>(random_problem(scape::FlatLayout(size, 2), options, 3), ClockRule{}) == "");
}

#if !defined(__CUDACC__) && !defined(SCAPE_TESTS_OVER_MPI)

namespace {

// The state of the rule, without an optimizer, and what its functors work on.
struct Alone {
  HostBackend backend;
  ClockRule::State<scape::HostMemory> rule;
  Floats parameters, residual, gradient, payload;
  scape::StepScalars now;

  Alone(std::size_t size, const AdamSOptions& options)
      : rule(ClockRule{}, options, size, size, size, backend.memory, backend.stream),
        parameters(size),
        residual(size),
        gradient(size),
        payload(size) {
    now.step = 1;
    now.gradient_scale = 1;
  }
  ClockRule::Update update() { return rule.update(parameters, {}, payload); }
};

std::uint32_t drawn_bits(std::mt19937& generator) { return static_cast<std::uint32_t>(generator()); }

}  // namespace

TEST_CASE("clock: no score is above its bound, whatever the numbers") {
  const std::size_t size = 20000;
  for (const auto& betas : {std::pair(0.9f, 0.95f), std::pair(0.0f, 0.5f), std::pair(0.9999f, 0.9f)})
    for (const bool any : {false, true}) {
      const float beta1 = betas.first, beta2 = betas.second;
      CAPTURE(beta1);
      CAPTURE(any);
      Alone alone(size, {.beta1 = beta1, .beta2 = beta2});
      std::mt19937 generator(3);
      std::normal_distribution<float> normal;
      const auto number = [&] { return any ? std::bit_cast<float>(drawn_bits(generator)) : normal(generator); };
      const auto update = alone.update();
      std::vector<scape::MaskWord> sent(size / 32);
      for (scape::MaskWord& word : sent) word = drawn_bits(generator);
      alone.now.step = 70000;
      std::size_t close = 0, faults = 0;
      for (std::size_t i = 0; i < size; ++i) {
        alone.residual[i] = number();
        alone.gradient[i] = i % 3 == 0 ? 0 : number();
        update.moments[i] = i % 5 == 0 ? 0 : number();
        update.clocks.last[i] = static_cast<std::uint16_t>(69999 - drawn_bits(generator) % (i % 2 == 0 ? 30 : 65000));
      }
      const auto check = [&](auto score) {
        for (std::size_t i = 0; i < size; ++i) {
          const float found = score(i, i), bound = score.bound(i, i);
          // Selection takes infinity as a bound of NaN.
          faults += scape::score_key(bound) < std::min(scape::score_key(found), 0x7f800000u);
          close += std::abs(found) > 0.9f * bound;
        }
      };
      const scape::ScaledGradient<float> gradient{alone.gradient.data(), &alone.now};
      alone.rule.score_before(gradient, scape::PlaceOfElement{}, alone.residual, {}, alone.now, check);
      alone.rule.score_after(gradient, scape::PlaceOfElement{}, alone.residual, {}, {}, alone.now, check);
      alone.rule.score_after(gradient, scape::PlaceOfElement{}, alone.residual, {}, sent, alone.now, check);
      CHECK(faults == 0);
      CHECK(close > size / 10);
    }
}

TEST_CASE("clock: a tile that is kept whole is updated as its elements are, of one clock or of several") {
  const std::size_t size = 2 * scape::tile_bits + 77;
  const scape::MaskPlan plan(scape::FlatLayout(size, 1));
  const std::vector<scape::MaskWord> words = [&] {
    std::vector<scape::MaskWord> words(plan.words(), ~scape::MaskWord{0});
    words.back() = (scape::MaskWord{1} << size % 32) - 1;
    return words;
  }();
  const std::vector<std::size_t> offsets = {0, scape::tile_bits, 2 * scape::tile_bits};
  for (const std::size_t odd : {size, std::size_t{0}, scape::tile_bits - 1, size - 1}) {  // of another clock
    CAPTURE(odd);
    Alone alone(size, {.weight_decay = 0.1f}), expected(size, {.weight_decay = 0.1f});
    for (Alone* one : {&alone, &expected}) {
      std::mt19937 generator(3);
      std::normal_distribution<float> normal;
      one->now.step = 9;
      one->now.learning_rate = 0.01f;
      const auto update = one->update();
      for (std::size_t i = 0; i < size; ++i) {
        one->parameters[i] = normal(generator);
        one->payload[i] = normal(generator);
        update.moments[i] = normal(generator);
        update.clocks.last[i] = i == odd ? 2 : 6;
      }
    }
    const scape::MaskView mask{plan.view(), words, offsets, size};
    scape::update(mask, alone.update(), alone.now, alone.backend.stream);
    alone.backend.stream.synchronize();
    const auto update = expected.update();
    for (std::size_t i = 0; i < size; ++i)
      update.kept(i, i, true, scape::square_root(update.second_moment(i, i, expected.now)), expected.now);
    CHECK(same_bits(alone.parameters, expected.parameters));
    const auto values = [](auto span) { return std::vector(span.begin(), span.end()); };
    CHECK(same_bits(values(alone.rule.moments()), values(expected.rule.moments())));
    CHECK(values(alone.rule.last()) == values(expected.rule.last()));
  }
}

#endif
