// What rule `scape` implies (ALGORITHM, "What rule scape implies"), each by itself, and the rule against the reference.

#include "reference.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using scape::AdamSOptions;
using scape::BiasCorrection;
using scape::MaskScore;
using scape::ScapeRule;

constexpr std::array corrections = {BiasCorrection::adam, BiasCorrection::none, BiasCorrection::adams};

// Dense AdamS, as one would write it: mean of the ranks' gradients, summed in their order.
class DenseAdamS {
 public:
  DenseAdamS(const AdamSOptions& options, BiasCorrection correction, Floats parameters)
      : options_(options), correction_(correction), parameters_(std::move(parameters)), moments_(parameters_.size()) {}

  void step(const std::vector<Floats>& gradients) {
    power1_ *= static_cast<double>(options_.beta1);
    power2_ *= static_cast<double>(options_.beta2);
    const float b1 = options_.beta1, b1_rest = static_cast<float>(1 - static_cast<double>(b1));
    const float b2 = options_.beta2, b2_rest = static_cast<float>(1 - static_cast<double>(b2));
    const float first = static_cast<float>(1 - power1_), second = static_cast<float>(1 - power2_);
    const float decay = static_cast<float>(1 - static_cast<double>(options_.learning_rate) *
                                                   static_cast<double>(options_.weight_decay));
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      float g = 0;
      for (const Floats& gradient : gradients) g += gradient[i];
      g /= static_cast<float>(gradients.size());
      float m = moments_[i];
      const float old = correction_ == BiasCorrection::adams ? m / first : m;
      float v = b2 * (old * old) + b2_rest * (g * g);
      m = b1 * m + b1_rest * g;
      moments_[i] = m;
      if (correction_ != BiasCorrection::none) m /= first;
      if (correction_ == BiasCorrection::adam) v /= second;
      parameters_[i] *= decay;
      parameters_[i] -= options_.learning_rate * (m / (std::sqrt(v) + options_.epsilon));
    }
  }

  const Floats& parameters() const { return parameters_; }
  const Floats& moments() const { return moments_; }

 private:
  AdamSOptions options_;
  BiasCorrection correction_;
  Floats parameters_, moments_;
  double power1_ = 1, power2_ = 1;
};

// The factors by which bias correction changes the first and the square root of the second moment in step t, from 0.
double bias_factor(BiasCorrection correction, std::size_t t, double beta1, double beta2) {
  const double c1 = 1 - std::pow(beta1, t + 1), c2 = 1 - std::pow(beta2, t + 1);
  if (correction == BiasCorrection::none) return 1;
  return correction == BiasCorrection::adam ? std::sqrt(c2) / c1 : 1 / c1;
}

}  // namespace

TEST_CASE_TEMPLATE("scape: density 1 is dense AdamS bit for bit, and all residuals are zero", Rank, SCAPE_RANKS) {
  for (const BiasCorrection correction : corrections)
    for (const int ranks : {1, 2, 3, 5}) {
      CAPTURE(static_cast<int>(correction));
      CAPTURE(ranks);
      const AdamSOptions options{.learning_rate = 0.013f, .weight_decay = 0.1f};
      const Problem problem = random_problem(scape::FlatLayout(1001, ranks), options, 12);
      const History history = train<Rank>(problem, ScapeRule{.bias_correction = correction});
      DenseAdamS expected(options, correction, problem.parameters);
      for (std::size_t step = 0; step < history.size(); ++step) {
        expected.step(problem.gradients[step]);
        for (const State& state : history[step]) {
          CHECK(same_bits(state.parameters, expected.parameters()));
          CHECK(same_bits(state.moments, expected.moments()));
          CHECK(state.residual == Floats(problem.layout.size()));
          CHECK(state.report.kept == problem.layout.size());
          CHECK(state.report.mask_bytes == 0);
        }
      }
    }
}

TEST_CASE_TEMPLATE("scape: replicas and masks are bit-identical after every step", Rank, SCAPE_RANKS) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    CAPTURE(ranks);
    const AdamSOptions options{.learning_rate = 0.01f, .weight_decay = 0.1f, .clip_norm = 5, .density = 0.05};
    const History history = train<Rank>(random_problem(some_tensors(ranks), options, 15), ScapeRule{});
    CHECK(disagreement(history) == "");
    if (ranks > 1) CHECK(!same_bits(history.back()[0].residual, history.back()[1].residual));
  }
}

TEST_CASE_TEMPLATE("scape: one array holds the first moment on the mask and the residual off it", Rank, SCAPE_RANKS) {
  const AdamSOptions options{.learning_rate = 0.01f, .density = 0.1};
  const Problem problem = random_problem(some_tensors(3), options, 8);
  const History history = train<Rank>(problem, ScapeRule{});
  reference::ScapeOptimizer expected(problem.layout, options, problem.parameters, ScapeRule{});
  for (std::size_t step = 0; step < history.size(); ++step) {
    expected.step(problem.gradients[step], &history[step][0].mask);
    REQUIRE(expected.fault == "");
    std::size_t faults = 0;
    for (std::size_t rank = 0; rank < 3; ++rank)
      for (std::size_t i = 0; i < problem.layout.size(); ++i) {
        const bool kept = expected.mask[i];
        faults += (kept ? expected.residuals[rank][i] : expected.moments[i]) != 0;
        faults += !near(history[step][rank].store[i], kept ? expected.moments[i] : expected.residuals[rank][i]);
      }
    CHECK(faults == 0);
  }
}

TEST_CASE_TEMPLATE("scape: state is 4 bytes a parameter, 4 a kept element, and two bitmaps", Rank, SCAPE_RANKS) {
  run<Rank>(1, [](Rank& rank) {
    const std::size_t size = 1 << 18;
    const Session session(rank, OwnLayout(scape::FlatLayout(size, 1)), {.density = 0.01}, ScapeRule{}, Floats(size));
    const std::size_t bytes = size * 4 + scape::kept_count(size, 0.01) * 4 + 2 * size / 8;
    CHECK(session.optimizer.state_bytes() >= bytes);
    CHECK(session.optimizer.state_bytes() <= bytes + size / 4096 * 64 + 1024);
  });
}

TEST_CASE_TEMPLATE("scape: first moment and mean residual conserve what gradients bring", Rank, SCAPE_RANKS) {
  for (const MaskScore score : {MaskScore::corrected, MaskScore::updated}) {
    const AdamSOptions options{.learning_rate = 0.01f, .density = 0.07, .delay = 2, .refresh = 2};
    const int ranks = 3;
    const Problem problem = random_problem(some_tensors(ranks), options, 20);
    const History history = train<Rank>(problem, ScapeRule{.score = score});
    std::size_t faults = 0;
    for (std::size_t step = 1; step < history.size(); ++step)
      for (std::size_t i = 0; i < problem.layout.size(); ++i) {
        double before = 0, after = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          const State &was = history[step - 1][rank], &is = history[step][rank];
          const double gradient = problem.gradients[step][rank][i];
          before += (0.9 * was.moments[i] + 0.1 * (gradient + was.residual[i])) / ranks;
          after += (is.moments[i] + 0.1 * is.residual[i]) / ranks;
        }
        faults += !near(after, before);
      }
    CHECK(faults == 0);
  }
}

TEST_CASE_TEMPLATE("scape: a newly selected element moves by lr (1 - b1) / sqrt(1 - b2) times the bias factors", Rank,
                   SCAPE_RANKS) {
  for (const BiasCorrection correction : corrections) {
    CAPTURE(static_cast<int>(correction));
    const AdamSOptions options{.learning_rate = 0.01f, .beta1 = 0.8f, .beta2 = 0.9f, .epsilon = 0, .density = 0.1};
    Problem problem = random_problem(scape::FlatLayout(1000, 2), options, 20);
    problem.parameters.assign(1000, 0);  // so that moves are seen without rounding
    const History history = train<Rank>(problem, ScapeRule{.bias_correction = correction});
    const double move = 0.01 * 0.2 / std::sqrt(0.1);
    std::size_t news = 0, faults = 0;
    for (std::size_t i = 0; i < 1000; ++i) {
      bool is_new = true;  // no step has moved it yet
      for (std::size_t step = 0; is_new && step < history.size(); ++step) {
        const State& state = history[step][0];
        const double expected = state.mask[i] ? move * bias_factor(correction, step, 0.8, 0.9) : 0;
        faults += std::abs(std::abs(static_cast<double>(state.parameters[i])) - expected) > 2e-6 * expected;
        is_new = !state.mask[i];
        news += !is_new;
      }
    }
    CHECK(news > 300);
    CHECK(faults == 0);
  }
}

TEST_CASE_TEMPLATE("scape: bytes sent at 99% sparsity are the formula's, as bitmap and Elias-Fano coded", Rank,
                   SCAPE_RANKS) {
  constexpr std::size_t ranks = 4, size = ranks * 32000, kept = size / 100;
  constexpr std::size_t payload = 2 * (ranks - 1) * kept * 4 / ranks;
  // Of a rank's n = 32000 bits k = 320 are set: l = 6, 320 low parts of 6 bits, 320 + 500 bits of high parts.
  constexpr std::size_t bitmap = 32000 / 8, elias_fano = (320 * 6 / 32 + (320 + 500 + 31) / 32) * 4;
  for (const auto& [coding, part] :
       {std::pair(scape::MaskCoding::bitmap, bitmap), std::pair(scape::MaskCoding::elias_fano, elias_fano),
        std::pair(scape::MaskCoding::automatic, elias_fano)}) {
    const AdamSOptions options{.density = 0.01, .mask_coding = coding};
    const History history = train<Rank>(random_problem(scape::FlatLayout(size, ranks), options, 4), ScapeRule{});
    for (std::size_t rank = 0; rank < ranks; ++rank)
      for (std::size_t step = 0; step < history.size(); ++step) {
        const State& state = history[step][rank];
        const std::size_t masks = (step == 0 ? 2 : 1) * (ranks - 1) * part;  // the first step makes two
        CHECK(state.report.kept == kept);
        CHECK(state.report.payload_bytes == payload);
        CHECK(state.report.mask_bytes == masks);
        const std::size_t compared = (step == 0 ? 2 : 1) * (ranks - 1) * 32;
        CHECK(state.report.compare_bytes == compared);
        if (step > 0) CHECK(state.bytes_sent - history[step - 1][rank].bytes_sent == payload + masks + compared);
      }
  }
}

TEST_CASE_TEMPLATE("scape: equal gradients on 2 and 4 ranks give what one rank gives", Rank, SCAPE_RANKS) {
  const AdamSOptions options{.learning_rate = 0.01f, .density = 0.1};
  const std::vector<scape::Segment> segments = {{0, 300, 0}, {300, 500, 0}, {800, 7, 0, true}, {807, 193, 0}};
  const Problem one = random_problem(OwnLayout(segments, 1), options, 12);
  const History expected = train<Rank>(one, ScapeRule{});
  for (const int ranks : {2, 4}) {
    CAPTURE(ranks);
    Problem several = one;
    several.layout.world = ranks;
    for (std::size_t i = 0; i < segments.size(); ++i) several.layout.list[i].owner = static_cast<int>(i) % ranks;
    for (std::vector<Floats>& gradients : several.gradients)
      gradients.resize(static_cast<std::size_t>(ranks), gradients[0]);
    const History history = train<Rank>(several, ScapeRule{});
    CHECK(disagreement(history) == "");
    for (std::size_t step = 0; step < history.size(); ++step) CHECK(agree(history[step][0], expected[step][0]));
  }
}

TEST_CASE_TEMPLATE("scape: F2, three steps of each bias correction against hand values", Rank, SCAPE_RANKS) {
  // lr 0.1, b1 0.9, b2 0.95, eps 0, gradients 2, -1, 0.5: m = 0.2, 0.08, 0.122, and v from the m before.
  const double m[] = {0.2, 0.08, 0.122};
  const double v[] = {0.05 * 4, 0.95 * 0.04 + 0.05, 0.95 * 0.0064 + 0.05 * 0.25};
  const double c1[] = {0.1, 0.19, 0.271}, c2[] = {0.05, 0.0975, 0.142625};
  const double v_adams[] = {0.05 * 4, 0.95 * (0.2 / 0.19) * (0.2 / 0.19) + 0.05,
                            0.95 * (0.08 / 0.271) * (0.08 / 0.271) + 0.05 * 0.25};
  for (const BiasCorrection correction : corrections) {
    CAPTURE(static_cast<int>(correction));
    const AdamSOptions options{.learning_rate = 0.1f, .epsilon = 0};
    const Problem problem{OwnLayout(scape::FlatLayout(1, 1)), options, {1.0f}, {{{2.0f}}, {{-1.0f}}, {{0.5f}}}};
    const History history = train<Rank>(problem, ScapeRule{.bias_correction = correction});
    double expected = 1;
    for (std::size_t t = 0; t < 3; ++t) {
      if (correction == BiasCorrection::none) expected -= 0.1 * m[t] / std::sqrt(v[t]);
      if (correction == BiasCorrection::adam) expected -= 0.1 * (m[t] / c1[t]) / std::sqrt(v[t] / c2[t]);
      if (correction == BiasCorrection::adams) expected -= 0.1 * (m[t] / c1[t]) / std::sqrt(v_adams[t]);
      CHECK(std::abs(history[t][0].parameters[0] - expected) < 4e-7);
      CHECK(std::abs(history[t][0].moments[0] - m[t]) < 1e-7);
    }
  }
}

TEST_CASE_TEMPLATE("scape: F6, clipping scales the rebuilt gradient, and what is clipped is lost", Rank, SCAPE_RANKS) {
  // The means of the kept elements are 3 and 4, their norm 5; the other two elements are never large enough.
  const AdamSOptions options{.learning_rate = 0.1f, .epsilon = 0, .clip_norm = 1, .density = 0.5};
  const Problem problem{OwnLayout({{0, 2, 0}, {2, 2, 1}}, 2),
                        options,
                        Floats(4),
                        {{{2.0f, 0.5f, 3.0f, 0.25f}, {4.0f, -0.25f, 5.0f, 0.0f}}}};
  const History history = train<Rank>(problem, ScapeRule{});
  const double scale = 1 / (5 + 1e-6);
  for (const State& state : history[0]) {
    CHECK(state.mask == Mask{1, 0, 1, 0});
    CHECK(state.report.gradient_norm == doctest::Approx(5).epsilon(1e-12));  // before clipping
    CHECK(state.moments[0] == doctest::Approx(0.1 * 3 * scale).epsilon(1e-6));
    CHECK(state.moments[2] == doctest::Approx(0.1 * 4 * scale).epsilon(1e-6));
    CHECK(state.residual[0] == 0);
    CHECK(state.residual[2] == 0);
  }
  CHECK(history[0][0].residual[1] == 0.5f);  // not clipped
  CHECK(history[0][1].residual[1] == -0.25f);
}

TEST_CASE_TEMPLATE("scape: a norm at the limit is not clipped", Rank, SCAPE_RANKS) {
  AdamSOptions options{.clip_norm = 5};
  const Problem problem{OwnLayout(scape::FlatLayout(2, 1)), options, Floats(2), {{{3.0f, 4.0f}}}};
  CHECK(near(train<Rank>(problem, ScapeRule{})[0][0].moments[0], 0.3, 1e-6));
}

TEST_CASE_TEMPLATE("scape: what has left the mask takes its first moment into every rank's residual", Rank,
                   SCAPE_RANKS) {
  // Element 0 is kept in step 0 and gone in step 1, since 9 u is more than c of step 0.
  const AdamSOptions options{.beta1 = 0.5f, .density = 0.5, .delay = 0};
  const Problem problem{
      OwnLayout({{0, 2, 0}}, 2), options, Floats(2), {{{4.0f, 1.0f}, {2.0f, 1.0f}}, {{0.25f, 100.0f}, {0.5f, 0.0f}}}};
  const History history = train<Rank>(problem, ScapeRule{});
  CHECK(history[0][0].mask == Mask{1, 0});
  CHECK(history[0][0].moments[0] == 1.5f);  // 0.5 * (4 + 2) / 2
  CHECK(history[1][0].mask == Mask{0, 1});
  CHECK(history[1][0].moments[0] == 0);
  CHECK(history[1][0].residual[0] == 0.25f + 1.5f);
  CHECK(history[1][1].residual[0] == 0.5f + 1.5f);
  CHECK(history[1][0].moments[1] == 0.5f * (101 + 1) / 2);  // the residuals were 1 each
}

TEST_CASE_TEMPLATE("scape: the mask is the owner's choice alone, so density does not grow with the ranks", Rank,
                   SCAPE_RANKS) {
  // Rank 1 owns the segment; what rank 0 would choose is another element.
  const AdamSOptions options{.density = 0.25};
  const Problem problem{OwnLayout({{0, 4, 1}}, 2), options, Floats(4), {{{9, 0, 0, 0}, {0, 0, 1, 0}}}};
  const History history = train<Rank>(problem, ScapeRule{});
  for (const State& state : history[0]) CHECK(state.mask == Mask{0, 0, 1, 0});
}

TEST_CASE_TEMPLATE("scape: every bias correction and score as the reference", Rank, SCAPE_RANKS) {
  for (const BiasCorrection correction : corrections)
    for (const MaskScore score : {MaskScore::corrected, MaskScore::updated}) {
      CAPTURE(static_cast<int>(correction));
      CAPTURE(static_cast<int>(score));
      const AdamSOptions options{.learning_rate = 0.02f,
                                 .beta1 = 0.85f,
                                 .beta2 = 0.97f,
                                 .epsilon = 1e-3f,
                                 .weight_decay = 0.2f,
                                 .density = 0.1};
      const Problem problem = random_problem(some_tensors(3), options, 12);
      CHECK(difference<Rank>(problem, ScapeRule{.bias_correction = correction, .score = score}) == "");
    }
}

// Where a step is not reported on, the host selects while it accumulates: the same must come out.
TEST_CASE_TEMPLATE("scape: reported on or not, looked at or not, whatever the timing, the same bits", Rank,
                   SCAPE_RANKS) {
  const auto check = [](const auto& layout, AdamSOptions options, MaskScore score, std::size_t steps) {
    CAPTURE(options.density);
    CAPTURE(options.density_warmup);
    CAPTURE(options.delay);
    CAPTURE(options.refresh);
    CAPTURE(static_cast<int>(score));
    options.learning_rate = 0.01f;
    options.weight_decay = 0.1f;
    Problem problem = random_problem(layout, options, steps);
    for (std::size_t step = 0; step < steps; ++step)  // thresholds that no last one tells, now and then
      if (step % 4 == 3)
        for (Floats& gradient : problem.gradients[step])
          for (float& value : gradient) value *= 1e6f;
    const ScapeRule rule{.score = score};
    const History expected = train<Rank>(problem, rule);
    CHECK(disagreement(expected) == "");
    CHECK(same(train<Rank>(problem, rule, false, 2), expected));
    // First moments lie elsewhere until somebody looks at the store, or the next step takes them.
    for (const bool reports : {false, true})
      CHECK(same({train<Rank>(problem, rule, reports, 2, false).back()}, {expected.back()}));
  };
  for (const AdamSOptions& options :
       {AdamSOptions{.density = 0.1}, AdamSOptions{.density = 0.02, .density_warmup = 5},
        AdamSOptions{.density = 0.1, .delay = 0}, AdamSOptions{.density = 0.1, .delay = 2},
        AdamSOptions{.density = 0.1, .delay = 3, .refresh = 2}, AdamSOptions{.density = 0.1, .refresh = 5}})
    for (const int ranks : {1, 3}) check(some_tensors(ranks), options, MaskScore::corrected, 12);
  check(some_tensors(2), {.density = 0.1}, MaskScore::updated, 8);
  // Segments that all threads work on.
  const std::size_t size = cuts_long_runs() ? 10000 : 150000;
  check(scape::TensorLayout({{size}, {7}, {5000, true}, {size + 33}}, 2), {.density = 0.01}, MaskScore::corrected, 6);
}

TEST_CASE_TEMPLATE("scape: looking at the store inside a step changes nothing", Rank, SCAPE_RANKS) {
  const AdamSOptions options{.density = 0.1, .adds = true};
  const Problem problem = random_problem(some_tensors(2), options, 12);
  run<Rank>(2, [&](Rank& rank) {
    const std::size_t me = static_cast<std::size_t>(rank.rank());
    Session looked_at(rank, problem.layout, options, ScapeRule{}, problem.parameters);
    Session left_alone(rank, problem.layout, options, ScapeRule{}, problem.parameters);
    for (std::size_t step = 0; step + 1 < problem.gradients.size(); step += 2) {
      const auto gradient = rank.backend.array(problem.gradients[step][me]);
      for (Session<Rank, ScapeRule>* session : {&looked_at, &left_alone})
        session->optimizer.add(gradient.span(), rank.compute);
      CHECK(looked_at.optimizer.store(rank.compute).size() == problem.layout.size());
      rank.compute.synchronize();
      for (Session<Rank, ScapeRule>* session : {&looked_at, &left_alone})
        session->step(problem.gradients[step + 1][me]);
    }
    CHECK(same_bits(looked_at.state().parameters, left_alone.state().parameters));
    CHECK(same_bits(looked_at.state().store, left_alone.state().store));
  });
}

TEST_CASE_TEMPLATE("scape: 2^20 + 1 elements as the reference", Rank, SCAPE_RANKS) {
  const std::size_t size = sanitized ? (1 << 16) + 1 : (1 << 20) + 1;
  const AdamSOptions options{.learning_rate = 0.01f, .weight_decay = 0.1f, .density = 0.01};
  CHECK(difference<Rank>(random_problem(scape::FlatLayout(size, 2), options, 3), ScapeRule{}) == "");
}
