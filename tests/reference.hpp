#pragma once

// The step of ALGORITHM, slow and obvious: every equation in double, over all ranks at once, masks by a stable sort.
// And what tests of AdamS share: problems, and the training of one on every rank with all that came out.

#include "ranks.hpp"

#include <scape/scape.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

// Whether long runs are cut: also where a simulator stands for the device, and where every process does it all.
inline bool cuts_long_runs() {
#if defined(__CUDACC__)
  return sanitized || in_rank_order();
#elif defined(SCAPE_TESTS_OVER_MPI)
  return true;
#else
  return sanitized;
#endif
}

// Fewer worlds and steps where a simulator stands for the device.
#if defined(__CUDACC__)
inline constexpr bool few = true;
#else
inline constexpr bool few = false;
#endif

using Floats = std::vector<float>;
using Mask = std::vector<char>;                      // by element: 1 is kept
using Gradients = std::vector<std::vector<Floats>>;  // by step and rank

/// A layout like a user's own.
struct OwnLayout {
  std::vector<scape::Segment> list;
  int world = 1;

  OwnLayout(std::vector<scape::Segment> list, int world) : list(std::move(list)), world(world) {}
  template <scape::ShardedLayout L>
  explicit OwnLayout(const L& layout)
      : list(layout.segments().begin(), layout.segments().end()), world(layout.ranks()) {}

  std::size_t size() const { return list.empty() ? 0 : list.back().begin + list.back().count; }
  int ranks() const { return world; }
  std::span<const scape::Segment> segments() const { return list; }
};

namespace reference {

using Values = std::vector<double>;

/// What both rules share.
class Optimizer {
 public:
  Optimizer(const OwnLayout& layout, const scape::AdamSOptions& options, const Floats& start)
      : parameters(start.begin(), start.end()),
        moments(layout.size()),
        residuals(static_cast<std::size_t>(layout.ranks()), Values(layout.size())),
        mask(layout.size()),
        layout_(layout),
        options_(options) {}
  virtual ~Optimizer() = default;

  /// One step of all ranks. `found` is the mask that was used elsewhere: it is taken over if it is a right one, that
  /// is, if it differs from ours only where scores are equal to rounding; else fault says so.
  void step(const std::vector<Floats>& gradients, const Mask* found = nullptr) {
    gradients_.clear();
    for (const Floats& gradient : gradients) gradients_.emplace_back(gradient.begin(), gradient.end());
    clip_gradients();
    sums_ = gradients_;
    for (std::size_t rank = 0; rank < ranks(); ++rank)
      for (std::size_t i = 0; i < size(); ++i) sums_[rank][i] += residuals[rank][i];
    const Mask before = mask;
    use_mask(found);
    payload_mean_.assign(size(), 0);
    for (std::size_t i = 0; i < size(); ++i)
      if (mask[i])
        for (std::size_t rank = 0; rank < ranks(); ++rank)
          payload_mean_[i] += sums_[rank][i] / static_cast<double>(ranks());
    gradient_norm = norm(payload_mean_);
    compare_with(before);
    move();
    if (options_.delay > 0 && step_ % options_.refresh == 0) {
      const std::size_t due = step_ + static_cast<std::size_t>(options_.delay);
      if (density_at(due) < 1) pending_.push_back(build(due, next_scores()));
    }
    residual_norms.clear();
    for (const Values& residual : residuals) residual_norms.push_back(norm(residual));
    ++step_;
  }

  Values parameters, moments;
  std::vector<Values> residuals;
  Mask mask;
  // The figures of a StepReport.
  double density = 1, gradient_norm = 0, jaccard = 0;
  std::size_t kept = 0;
  Values residual_norms, energy_shares;
  std::string fault;

 protected:
  struct Drafted {
    std::size_t due;
    double density;
    Mask mask;
    Values scores;  // the owners'
  };

  std::size_t size() const { return layout_.size(); }
  std::size_t ranks() const { return static_cast<std::size_t>(layout_.ranks()); }
  static double norm(const Values& values) {
    double sum = 0;
    for (const double value : values) sum += value * value;
    return std::sqrt(sum);
  }
  double clip_factor(double norm) const {
    const double clip = static_cast<double>(options_.clip_norm);
    return clip > 0 && norm > clip ? clip / (norm + 1e-6) : 1;
  }

  virtual void clip_gradients() {}
  virtual std::vector<Values> first_scores() = 0;  // by rank, of a mask for this step
  virtual void move() = 0;                         // residuals, moments and parameters to after the step
  virtual std::vector<Values> next_scores() = 0;   // by rank, after move()

  OwnLayout layout_;
  scape::AdamSOptions options_;
  std::size_t step_ = 0;
  std::vector<Values> gradients_, sums_;
  Values payload_mean_;  // 0 off the mask
  std::vector<Drafted> pending_;

 private:
  double density_at(std::size_t step) const {
    if (step >= options_.density_warmup) return options_.density;
    return std::pow(options_.density, static_cast<double>(step) / static_cast<double>(options_.density_warmup));
  }

  static std::size_t kept_of(const scape::Segment& segment, double density) {
    if (segment.count == 0) return 0;
    if (segment.dense || density >= 1) return segment.count;
    return std::max<std::size_t>(
        1, static_cast<std::size_t>(std::floor(density * static_cast<double>(segment.count) + 1e-6)));
  }

  Drafted build(std::size_t due, const std::vector<Values>& scores) const {
    Drafted drafted{due, density_at(due), Mask(size()), Values(size())};
    for (const scape::Segment& segment : layout_.list) {
      const Values& score = scores[static_cast<std::size_t>(segment.owner)];
      std::vector<std::size_t> order(segment.count);
      std::iota(order.begin(), order.end(), segment.begin);
      std::stable_sort(order.begin(), order.end(),
                       [&](std::size_t a, std::size_t b) { return std::abs(score[a]) > std::abs(score[b]); });
      for (std::size_t i = 0; i < kept_of(segment, drafted.density); ++i) drafted.mask[order[i]] = 1;
      for (const std::size_t i : order) drafted.scores[i] = std::abs(score[i]);
    }
    return drafted;
  }

  void use_mask(const Mask* found) {
    const bool has_none = options_.delay == 0 ? step_ == 0 || step_ % options_.refresh == 0 : step_ == 0;
    if (has_none && density_at(step_) < 1) pending_.insert(pending_.begin(), build(step_, first_scores()));
    if (!pending_.empty() && pending_.front().due <= step_) {
      Drafted drafted = pending_.front();
      pending_.erase(pending_.begin());
      if (found != nullptr && is_right(*found, drafted)) drafted.mask = *found;
      density = drafted.density;
      mask = drafted.mask;
    } else if (step_ == 0) {
      mask.assign(size(), 1);
    }
    if (found != nullptr && *found != mask) fault = "wrong mask in step " + std::to_string(step_);
    kept = static_cast<std::size_t>(std::count(mask.begin(), mask.end(), 1));
  }

  bool is_right(const Mask& found, const Drafted& drafted) const {
    for (const scape::Segment& segment : layout_.list) {
      double least_kept = std::numeric_limits<double>::infinity(), largest_other = 0;
      std::size_t count = 0;
      for (std::size_t i = segment.begin; i < segment.begin + segment.count; ++i) {
        count += found[i] != 0;
        if (found[i])
          least_kept = std::min(least_kept, drafted.scores[i]);
        else
          largest_other = std::max(largest_other, drafted.scores[i]);
      }
      if (count != kept_of(segment, drafted.density) || least_kept < largest_other * (1 - 1e-5)) return false;
    }
    return true;
  }

  void compare_with(const Mask& before) {
    std::size_t both = 0, either = 0;
    bool any_before = false;
    for (std::size_t i = 0; i < size(); ++i) {
      both += before[i] && mask[i];
      either += before[i] || mask[i];
      any_before = any_before || before[i];
    }
    jaccard = any_before ? static_cast<double>(both) / static_cast<double>(either) : 0;
    energy_shares.clear();
    for (const Values& sums : sums_) {
      double all = 0, shared = 0;
      for (std::size_t i = 0; i < size(); ++i) {
        if (mask[i]) all += sums[i] * sums[i];
        if (mask[i] && before[i]) shared += sums[i] * sums[i];
      }
      energy_shares.push_back(any_before && all > 0 ? shared / all : 0);
    }
  }
};

class ScapeOptimizer : public Optimizer {
 public:
  ScapeOptimizer(const OwnLayout& layout, const scape::AdamSOptions& options, const Floats& start,
                 const scape::ScapeRule& rule)
      : Optimizer(layout, options, start), rule_(rule) {}

 private:
  std::vector<Values> first_scores() override { return corrected(); }

  std::vector<Values> next_scores() override {
    if (rule_.score == scape::MaskScore::corrected) return corrected_;
    std::vector<Values> scores = residuals;
    for (Values& score : scores)
      for (std::size_t i = 0; i < size(); ++i) score[i] = mask[i] ? moments[i] : (1 - beta1_) * score[i];
    return scores;
  }

  void move() override {
    corrected_ = corrected();
    const double factor = clip_factor(gradient_norm), t = static_cast<double>(step_) + 1;
    const bool adam = rule_.bias_correction == scape::BiasCorrection::adam;
    const bool adams = rule_.bias_correction == scape::BiasCorrection::adams;
    const double c1 = adam || adams ? 1 - std::pow(beta1_, t) : 1, c2 = adam ? 1 - std::pow(beta2_, t) : 1;
    const double lr = static_cast<double>(options_.learning_rate);
    for (const scape::Segment& segment : layout_.list)
      for (std::size_t i = segment.begin; i < segment.begin + segment.count; ++i) {
        for (std::size_t rank = 0; rank < ranks(); ++rank)
          residuals[rank][i] = mask[i] ? 0 : sums_[rank][i] + beta1_ * moments[i] / (1 - beta1_);
        if (segment.decay) parameters[i] *= 1 - lr * static_cast<double>(options_.weight_decay);
        if (mask[i]) {
          const double gradient = factor * payload_mean_[i], old = adams ? moments[i] / c1 : moments[i];
          const double second = beta2_ * old * old + (1 - beta2_) * gradient * gradient;
          moments[i] = beta1_ * moments[i] + (1 - beta1_) * gradient;
          const double scale = std::sqrt(second / c2) + static_cast<double>(options_.epsilon);
          if (scale != 0) parameters[i] -= lr * (moments[i] / c1) / scale;
        } else {
          moments[i] = 0;
        }
      }
  }

  std::vector<Values> corrected() const {
    std::vector<Values> scores = sums_;
    for (Values& score : scores)
      for (std::size_t i = 0; i < size(); ++i) score[i] = beta1_ * moments[i] + (1 - beta1_) * score[i];
    return scores;
  }

  scape::ScapeRule rule_;
  double beta1_ = static_cast<double>(options_.beta1), beta2_ = static_cast<double>(options_.beta2);
  std::vector<Values> corrected_;
};

class ClockOptimizer : public Optimizer {
 public:
  ClockOptimizer(const OwnLayout& layout, const scape::AdamSOptions& options, const Floats& start,
                 const scape::ClockRule& rule)
      : Optimizer(layout, options, start), elapsed(layout.size(), 1), rule_(rule) {}

  std::vector<std::size_t> elapsed;  // n

 private:
  void clip_gradients() override {
    for (Values& gradient : gradients_) {
      const double factor = clip_factor(norm(gradient));
      for (double& value : gradient) value *= factor;
    }
  }

  std::vector<Values> first_scores() override { return scores({}); }
  std::vector<Values> next_scores() override {
    Mask sent(size());
    for (const Drafted& drafted : pending_)
      for (std::size_t i = 0; i < size(); ++i) sent[i] = sent[i] || drafted.mask[i];
    return scores(sent);
  }

  // Elements of `sent` as if they had been sent.
  std::vector<Values> scores(Mask sent) const {
    sent.resize(size());
    std::vector<Values> scores = gradients_;
    for (std::size_t rank = 0; rank < ranks(); ++rank)
      for (std::size_t i = 0; i < size(); ++i) {
        const double n = sent[i] ? 1 : static_cast<double>(elapsed[i]), power = std::pow(beta1_, n);
        const double sum = gradients_[rank][i] + (sent[i] ? 0 : residuals[rank][i]);
        scores[rank][i] = n * std::abs(power * moments[i] + (1 - power) * sum / n);
      }
    return scores;
  }

  void move() override {
    const double lr = static_cast<double>(options_.learning_rate);
    for (const scape::Segment& segment : layout_.list)
      for (std::size_t i = segment.begin; i < segment.begin + segment.count; ++i) {
        for (std::size_t rank = 0; rank < ranks(); ++rank) residuals[rank][i] = mask[i] ? 0 : sums_[rank][i];
        if (mask[i]) {
          const double n = static_cast<double>(elapsed[i]);
          const double gradient = payload_mean_[i] / n, power1 = std::pow(beta1_, n), power2 = std::pow(beta2_, n);
          const double second = power2 * moments[i] * moments[i] + (1 - power2) * gradient * gradient;
          moments[i] = power1 * moments[i] + (1 - power1) * gradient;
          const double scale = std::sqrt(second) + static_cast<double>(options_.epsilon);
          const double pull = segment.decay ? static_cast<double>(options_.weight_decay) * parameters[i] : 0;
          parameters[i] -=
              lr * std::min(n, static_cast<double>(rule_.cap)) * ((scale != 0 ? moments[i] / scale : 0) + pull);
          elapsed[i] = 1;
        } else {
          elapsed[i] = std::min<std::size_t>(elapsed[i] + 1, scape::ClockRule::longest);
        }
      }
  }

  scape::ClockRule rule_;
  double beta1_ = static_cast<double>(options_.beta1), beta2_ = static_cast<double>(options_.beta2);
};

}  // namespace reference

/// What an optimizer is to be trained on.
struct Problem {
  OwnLayout layout;
  scape::AdamSOptions options;
  Floats parameters;
  Gradients gradients;
};

inline Floats normal_values(std::size_t count, std::mt19937& random, float deviation = 1) {
  std::normal_distribution<float> normal(0, deviation);
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

template <scape::ShardedLayout L>
Problem random_problem(const L& layout, const scape::AdamSOptions& options, std::size_t steps, unsigned seed = 1) {
  std::mt19937 random(seed);
  Problem problem{OwnLayout(layout), options, normal_values(layout.size(), random), {}};
  for (std::size_t step = 0; step < steps; ++step) {
    problem.gradients.emplace_back();
    for (int rank = 0; rank < layout.ranks(); ++rank)
      problem.gradients.back().push_back(normal_values(layout.size(), random));
  }
  return problem;
}

/// What a rank has after a step, in the host's memory. The moments are the rule's: of rule `scape` the store's kept
/// part.
struct State {
  Floats parameters, store, moments, residual, errors;
  Mask mask;
  std::vector<std::size_t> elapsed;  // of rule `clock`: n
  scape::StepReport report;
  std::uint64_t bytes_sent = 0;
};
using History = std::vector<std::vector<State>>;  // by step and rank

/// A rank with an optimizer and its parameters.
template <class Rank, class Rule>
class Session {
 public:
  using Stream = typename Rank::Stream;
  using Optimizer =
      scape::AdamS<Stream, typename Rank::Communicator, std::remove_cvref_t<decltype(Rank::memory)>, Rule>;

  Session(Rank& rank, const OwnLayout& layout, const scape::AdamSOptions& options, const Rule& rule,
          const Floats& parameters)
      : rank_(rank),
        parameters_(rank.backend.array(parameters)),
        gradient_(rank.backend.array(Floats(layout.size()))),
        optimizer(layout, rank.communicator, rank.memory, rank.compute, rank.side, options, rule) {}

  void step(const Floats& gradient, scape::StepReport* report = nullptr) {
    scape::copy_values(std::span<const float>(gradient), gradient_.span(), rank_.compute);
    rank_.compute.synchronize();
    optimizer.step(gradient_.span(), parameters_.span(), rank_.compute, report);
  }

  std::span<float> parameters() const { return parameters_.span(); }

  State state() {
    State state;
    state.parameters = read(std::span<const float>(parameters_.span()));
    state.store = read(optimizer.store(rank_.compute));
    state.errors = read(optimizer.errors());
    state.mask.resize(state.store.size());
    const std::vector<scape::MaskWord> words = read(optimizer.mask().words);
    for (const scape::Tile& tile : optimizer.plan().tiles())
      for (std::size_t i = 0; i < tile.count; ++i)
        state.mask[tile.element + i] = words[(tile.bit + i) / 32] >> (tile.bit + i) % 32 & 1;
    state.moments = state.residual = state.store;
    if constexpr (std::is_same_v<Rule, scape::ClockRule>) {
      state.moments = read(optimizer.rule_state().moments());
      for (const std::uint16_t last : read(optimizer.rule_state().last()))
        state.elapsed.push_back(
            std::min<std::size_t>(static_cast<std::uint16_t>(optimizer.steps() + 1 - last), scape::ClockRule::longest));
    } else {
      for (std::size_t i = 0; i < state.mask.size(); ++i) (state.mask[i] ? state.residual[i] : state.moments[i]) = 0;
    }
    state.bytes_sent = rank_.communicator.bytes_sent();
    return state;
  }

 private:
  template <class T>
  std::vector<T> read(std::span<const T> values) const {
    std::vector<T> result(values.size());
    scape::copy_values(values, std::span<T>(result), rank_.compute);
    rank_.compute.synchronize();
    return result;
  }

  Rank& rank_;
  decltype(std::declval<Rank&>().backend.array(Floats{})) parameters_, gradient_;

 public:
  Optimizer optimizer;
};

/// run_ranks on a kind of rank. (Each kind has its own run_ranks: of threads, of processes.)
template <class Rank, class F>
void run(int ranks, F body, int threads = 1) {
  Rank::run(ranks, body, threads);
}

/// Trains on all ranks; what every rank had after every step, or after the last alone where nobody looks before.
template <class Rank, class Rule>
History train(const Problem& problem, const Rule& rule, bool reports = true, int threads = 1, bool looks = true) {
  const std::size_t world = static_cast<std::size_t>(problem.layout.ranks());
  History history(problem.gradients.size(), std::vector<State>(world));
#if defined(SCAPE_TESTS_OVER_MPI)  // a process sees its own rank's only: of the others, what they must have
  if constexpr (!std::is_same_v<Rank, ThreadRank>) history = train<ThreadRank>(problem, rule, reports, threads, looks);
#endif
  run<Rank>(
      problem.layout.ranks(),
      [&](Rank& rank) {
        const std::size_t me = static_cast<std::size_t>(rank.rank());
        Session session(rank, problem.layout, problem.options, rule, problem.parameters);
        for (std::size_t step = 0; step < problem.gradients.size(); ++step) {
          scape::StepReport report;
          session.step(problem.gradients[step][me], reports ? &report : nullptr);
          if (looks || step + 1 == problem.gradients.size()) history[step][me] = session.state();
          history[step][me].report = report;
        }
      },
      threads);
  return history;
}

inline bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// Bit-identical in all but the residuals, which are each rank's own: what ranks must agree on.
inline bool agree(const State& a, const State& b) {
  return same_bits(a.parameters, b.parameters) && same_bits(a.moments, b.moments) && a.mask == b.mask &&
         a.elapsed == b.elapsed;
}

/// Bit-identical in all.
inline bool same(const History& a, const History& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t step = 0; step < a.size(); ++step)
    for (std::size_t rank = 0; rank < a[step].size(); ++rank)
      if (!agree(a[step][rank], b[step][rank]) || !same_bits(a[step][rank].store, b[step][rank].store) ||
          !same_bits(a[step][rank].errors, b[step][rank].errors))
        return false;
  return true;
}

template <class Rank, class T>
std::vector<T> read(Rank& rank, std::span<const T> values) {
  std::vector<T> result(values.size());
  scape::copy_values(values, std::span<T>(result), rank.compute);
  rank.compute.synchronize();
  return result;
}

template <class P>
std::vector<P> rounded(const Floats& values) {
  std::vector<P> result;
  for (const float value : values) result.push_back(P(value));
  return result;
}

inline scape::TensorLayout some_tensors(int ranks) {
  return {{{100}, {7, true, false}, {333}, {0}, {64}, {1}, {5000}, {31, true}, {32}, {33}, {450}}, ranks};
}

/// Calls body(rule) with either rule.
template <class F>
void for_rules(F body) {
  {
    INFO("rule scape");
    body(scape::ScapeRule{});
  }
  {
    INFO("rule scape, scored after the update");
    body(scape::ScapeRule{.score = scape::MaskScore::updated});
  }
  {
    INFO("rule clock");
    body(scape::ClockRule{});
  }
}

/// Empty, or the first place where the ranks of a history disagree.
inline std::string disagreement(const History& history) {
  for (std::size_t step = 0; step < history.size(); ++step)
    for (std::size_t rank = 1; rank < history[step].size(); ++rank)
      if (!agree(history[step][0], history[step][rank]))
        return "ranks 0 and " + std::to_string(rank) + " in step " + std::to_string(step);
  return "";
}

/// Relative, and to the size of what was added up where that cancels.
inline bool near(double value, double expected, double tolerance = 2e-5) {
  return std::abs(value - expected) <= tolerance * std::max(std::abs(expected), 0.1);
}

/// Empty, or the first difference of a training from the reference.
template <class Rule>
std::string difference(const History& history, const Problem& problem, const Rule& rule) {
  constexpr bool clock = std::is_same_v<Rule, scape::ClockRule>;
  using Reference = std::conditional_t<clock, reference::ClockOptimizer, reference::ScapeOptimizer>;
  Reference expected(problem.layout, problem.options, problem.parameters, rule);
  if (const std::string found = disagreement(history); !found.empty()) return found;
  for (std::size_t step = 0; step < history.size(); ++step) {
    expected.step(problem.gradients[step], &history[step][0].mask);
    if (!expected.fault.empty()) return expected.fault;
    for (std::size_t rank = 0; rank < history[step].size(); ++rank) {
      const State& state = history[step][rank];
      const auto at = [&](const char* what, std::size_t i) {
        return std::string(what) + " of element " + std::to_string(i) + " in step " + std::to_string(step) +
               " on rank " + std::to_string(rank);
      };
      for (std::size_t i = 0; i < state.parameters.size(); ++i) {
        if (!near(state.parameters[i], expected.parameters[i])) return at("parameter", i);
        if (!near(state.moments[i], expected.moments[i])) return at("first moment", i);
        if (!near(state.residual[i], expected.residuals[rank][i])) return at("residual", i);
        if constexpr (clock)
          if (state.elapsed[i] != expected.elapsed[i]) return at("clock", i);
      }
      const scape::StepReport& report = state.report;
      if (report.step != step) return at("report's step", 0);
      if (!near(report.density, expected.density, 1e-12)) return at("report's density", 0);
      if (report.kept != expected.kept) return at("report's kept", 0);
      if (!near(report.gradient_norm, expected.gradient_norm)) return at("report's gradient norm", 0);
      if (!near(report.residual_norm, expected.residual_norms[rank])) return at("report's residual norm", 0);
      if (!near(report.jaccard, expected.jaccard, 1e-12)) return at("report's jaccard", 0);
      if (!near(report.energy_share, expected.energy_shares[rank])) return at("report's energy share", 0);
    }
  }
  return "";
}

/// Trains, and compares every step with the reference: empty, or the first difference.
template <class Rank, class Rule>
std::string difference(const Problem& problem, const Rule& rule) {
  return difference(train<Rank>(problem, rule), problem, rule);
}
