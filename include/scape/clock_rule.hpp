#pragma once

#include <scape/adams_options.hpp>
#include <scape/arithmetic.hpp>
#include <scape/fingerprint.hpp>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/prefetch.hpp>
#include <scape/residual_store.hpp>
#include <scape/step_scalars.hpp>
#include <scape/stream.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace scape::inline v0 {

/// Our update rule, a clock per parameter (docs/algorithm.md, "Rule clock"): an element that is kept after n steps
/// moves as n steps of AdamS with the mean of its n gradients would have moved it. Off the mask nothing of a parameter
/// moves, weight decay included. The ResidualStore holds the gradients not sent yet; the rule owns 6 bytes a parameter
/// more: the first moment, and the step of last use in 16 bits. n is exact up to `longest`, where it stays. Clips the
/// local gradient. No bias correction.
struct ClockRule {
  float cap = 64;  ///< an element moves by at most this many learning rates (times 1.13): where a rate is too high for
                   ///< dense training, long waits make it worse

  /// Clipped is the local gradient, never the residual.
  static constexpr bool clips_gradient = true;
  /// Elements of a mask that waits for its turn are scored as if they had been sent, or masks would repeat.
  static constexpr bool pending_counts_as_sent = true;
  /// The present gradient stands for the next.
  static constexpr bool scores_gradient = true;
  /// Other ranks' elements are their own business.
  static constexpr bool follows_others = false;
  SCAPE_HOST_DEVICE static float residual(float state, bool) { return state; }
  std::uint64_t fingerprint() const noexcept { return Fingerprint().add(std::uint64_t{2}).add(double{cap}).value(); }

  /// Steps are stored modulo 2^16. Every `sweep` steps those that lie more than `longest` back are moved up to there,
  /// so that no difference wraps: longest + sweep = 65535.
  static constexpr unsigned sweep = 16384, longest = 65535 - sweep;

  /// beta^n and 1 - beta^n, for both betas.
  struct Powers {
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
  };

  /// Elements' clocks. steps(i, now) = n for the step numbered `now` (from 1 on).
  struct Clocks {
    std::uint16_t* last;
    const std::uint64_t* powers;  // for each n beta1^n and, in the upper half, 1 - beta1^n; the same for beta2
    unsigned largest;             // n beyond which the powers do not change

    SCAPE_HOST_DEVICE unsigned steps(std::size_t i, std::uint64_t now) const {
      const unsigned n = static_cast<std::uint16_t>(now - last[i]);
      return n < longest ? n : longest;
    }
    SCAPE_HOST_DEVICE Powers at(unsigned n) const {
      // Two numbers with one look-up: where vectors gather, that is what takes the time.
      const std::uint64_t* const power = powers + 2 * (n < largest ? n : largest);
      const std::uint64_t first = power[0], second = power[1];
      return {float_of(static_cast<std::uint32_t>(first)), float_of(static_cast<std::uint32_t>(first >> 32)),
              float_of(static_cast<std::uint32_t>(second)), float_of(static_cast<std::uint32_t>(second >> 32))};
    }
  };
  /// The same where it is one n for all.
  struct SameClock {
    std::uint16_t* last;
    unsigned n;
    Powers power;

    SCAPE_HOST_DEVICE unsigned steps(std::size_t, std::uint64_t) const { return n; }
    SCAPE_HOST_DEVICE Powers at(unsigned) const {  // one by one: GCC vectorises no copy of a struct
      return {power.beta1, power.one_minus_beta1, power.beta2, power.one_minus_beta2};
    }
  };

  struct Advance {
    SCAPE_HOST_DEVICE void operator()(StepScalars&) const {}
  };

  struct Sweep {
    Clocks clocks;
    SCAPE_HOST_DEVICE bool is_due(const StepScalars& now) const { return now.step % sweep == 0; }
    SCAPE_HOST_DEVICE void operator()(std::size_t i, const StepScalars& now) const {
      clocks.last[i] = static_cast<std::uint16_t>(now.step - clocks.steps(i, now.step));
    }
  };

  template <class C>
  struct UpdateBy {
    float *parameters, *moments;
    const float* payload;
    C clocks;
    float cap, epsilon, weight_decay;
    std::size_t shift = 0;  // from an element to its place in the other arrays: set for each tile

    SCAPE_HOST_DEVICE bool needs_every(const Segment&) const { return false; }
    SCAPE_HOST_DEVICE void every(std::size_t, const StepScalars&) const {}
    SCAPE_HOST_DEVICE float second_moment(std::size_t i, std::size_t position, const StepScalars& now) const {
      i += shift;
      const unsigned n = clocks.steps(i, now.step);
      const Powers power = clocks.at(n);
      const float gradient = divide(payload[position], static_cast<float>(n));
      return add(multiply(power.beta2, multiply(moments[i], moments[i])),
                 multiply(power.one_minus_beta2, multiply(gradient, gradient)));
    }
    SCAPE_HOST_DEVICE void kept(std::size_t i, std::size_t position, bool decay, float root,
                                const StepScalars& now) const {
      i += shift;
      const unsigned n = clocks.steps(i, now.step);
      const Powers power = clocks.at(n);
      const float count = static_cast<float>(n);
      const float gradient = divide(payload[position], count);
      const float first = add(multiply(power.beta1, moments[i]), multiply(power.one_minus_beta1, gradient));
      const float scale = add(root, epsilon);  // 0 only where the first moment is as good as 0
      const float step = divide(first, choose(scale == 0, 1.0f, scale));
      const float pull = multiply(choose(decay, weight_decay, 0.0f), parameters[i]);
      const float rate = multiply(now.learning_rate, choose(count < cap, count, cap));
      parameters[i] = subtract(parameters[i], multiply(rate, add(step, pull)));
      moments[i] = first;
      clocks.last[i] = static_cast<std::uint16_t>(now.step);
    }
    // Runs f with what does the same for elements [i, i + count): faster where all were kept in the same step.
    template <class F>
    void for_run(std::size_t i, std::size_t count, const StepScalars& now, F f) const {
      if (!are_equal(clocks.last + (i + shift), count)) return f(*this);
      const unsigned n = clocks.steps(i + shift, now.step);
      f(UpdateBy<SameClock>{
          parameters, moments, payload, {clocks.last, n, clocks.at(n)}, cap, epsilon, weight_decay, shift});
    }
    static bool are_equal(const std::uint16_t* values, std::size_t count) {
      unsigned differences = 0;
      for (std::size_t i = 1; i < count; ++i) differences |= static_cast<unsigned>(values[i] ^ values[0]);
      return differences == 0;
    }
    void prefetch(std::size_t i) const {
      prefetch_to_write(parameters + (i + shift));
      prefetch_to_write(moments + (i + shift));
      prefetch_to_write(clocks.last + (i + shift));
    }
  };
  using Update = UpdateBy<Clocks>;

  // What the element's first moment would be if it were kept in the step `ahead` of this one, the present gradient
  // standing for the next, times the steps that it would move by.
  template <class Gradient, class Place>
  struct Score {
    Gradient gradient;
    Place place;  // in moments and clocks
    const float *residual, *moments;
    Clocks clocks;
    const StepScalars* now;
    std::uint64_t ahead;
    float most;  // n * beta1^n for any n

    SCAPE_HOST_DEVICE float operator()(std::size_t element, std::size_t bit) const {
      return of(element, bit, residual[element], clocks.steps(place(element, bit), now->step + ahead));
    }
    SCAPE_HOST_DEVICE float of(std::size_t element, std::size_t bit, float unsent, unsigned n) const {
      const Powers power = clocks.at(n);
      const float count = static_cast<float>(n);
      const float sum = add(unsent, gradient(element, bit)), moment = moments[place(element, bit)];
      return multiply(count, add(multiply(power.beta1, moment), multiply(power.one_minus_beta1, divide(sum, count))));
    }
    // At least |score|, without the clock: n * beta1^n and (1 - beta1^n) are bounded. What is added covers rounding.
    SCAPE_HOST_DEVICE float bound(std::size_t element, std::size_t bit) const {
      return bound_of(element, bit, residual[element]);
    }
    SCAPE_HOST_DEVICE float bound_of(std::size_t element, std::size_t bit, float unsent) const {
      const float sum = magnitude(add(unsent, gradient(element, bit)));
      const float moment = magnitude(moments[place(element, bit)]);
      return multiply_add(add(sum, multiply(most, moment)), 1 + 0x1p-20f, 0x1p-126f);
    }
  };
  // The same where other masks wait for their turn: their elements, `sent`, count as sent.
  template <class Gradient, class Place>
  struct ScoreAfterPending {
    Score<Gradient, Place> score;
    const MaskWord* sent;

    SCAPE_HOST_DEVICE float operator()(std::size_t element, std::size_t bit) const {
      const bool is_sent = sent[bit / word_bits] >> bit % word_bits & 1;
      return is_sent ? score.of(element, bit, 0, 1) : score(element, bit);
    }
    SCAPE_HOST_DEVICE float bound(std::size_t element, std::size_t bit) const {
      const bool is_sent = sent[bit / word_bits] >> bit % word_bits & 1;
      return score.bound_of(element, bit, choose(is_sent, 0.0f, score.residual[element]));
    }
  };

  template <MemoryResource M>
  class State;
};

/// What the rule keeps for an optimizer, and the functors that it hands to the stream's work.
template <MemoryResource M>
class ClockRule::State {
 public:
  template <Stream S>
  State(const ClockRule& rule, const AdamSOptions& options, std::size_t size, std::size_t, std::size_t, M& memory,
        const S& stream)
      : rule_(rule),
        options_(options),
        moments_(size, memory),
        last_(size, memory),
        table_(powers_of(options)),
        most_(largest_product(table_)),
        powers_(table_.size(), memory) {
    expects(rule.cap >= 1 && rule.cap <= static_cast<float>(longest), "cap", rule.cap, "must be 1 to ", longest);
    fill_values(moments_.span(), 0.0f, stream);
    fill_values(last_.span(), std::uint16_t{0}, stream);
    copy_values(std::span<const std::uint64_t>(table_), powers_.span(), stream);
    stream.synchronize();
  }

  std::size_t state_bytes() const noexcept { return moments_.bytes() + last_.bytes() + powers_.bytes(); }
  std::size_t workspace_bytes() const noexcept { return 0; }
  bool selects_after_update() const noexcept { return true; }
  std::span<float> set_aside(std::size_t) const noexcept { return {}; }

  /// The first moment, and the number modulo 2^16 of the step that last kept the element (0: none), counted from 1.
  std::span<const float> moments() const noexcept { return moments_.span(); }
  std::span<const std::uint16_t> last() const noexcept { return last_.span(); }

  /// Work at the start of a step: keeps the clocks from wrapping.
  template <Stream S>
  void begin(const StepScalars& now, const S& stream) const {
    for_each_if_due(last_.size(), Sweep{clocks()}, now, stream);
  }

  /// Work between steps: none.
  template <Stream S>
  void settle(std::span<float>, MaskView, const S&) const {}

  Advance advance() const { return {}; }
  ErrorFeedback accumulation() const { return {}; }
  Update update(std::span<float> parameters, std::span<float>, std::span<const float> payload) const {
    return {parameters.data(), moments_.span().data(), payload.data(),       clocks(),
            rule_.cap,         options_.epsilon,       options_.weight_decay};
  }

  /// select(score) with the score of a mask for this step, made before accumulating, or for a later one.
  template <class Gradient, class Place, class Select>
  void score_before(Gradient gradient, Place place, std::span<const float> residual, MaskView, const StepScalars& now,
                    Select select) const {
    select(score(gradient, place, residual, now, 0));
  }
  template <class Gradient, class Place, class Select>
  void score_after(Gradient gradient, Place place, std::span<const float> residual, MaskView,
                   std::span<const MaskWord> sent, const StepScalars& now, Select select) const {
    const auto after = score(gradient, place, residual, now, 1);
    if (sent.empty())
      select(after);
    else
      select(ScoreAfterPending<Gradient, Place>{after, sent.data()});
  }

 private:
  template <class Gradient, class Place>
  Score<Gradient, Place> score(Gradient gradient, Place place, std::span<const float> residual, const StepScalars& now,
                               std::uint64_t ahead) const {
    return {gradient, place, residual.data(), moments_.span().data(), clocks(), &now, ahead, most_};
  }

  Clocks clocks() const noexcept {
    return {last_.span().data(), powers_.span().data(), static_cast<unsigned>(table_.size() / 2 - 1)};
  }

  // The largest n * beta^n of the table: where it ends, either n is longest or the power 0.
  static float largest_product(const std::vector<std::uint64_t>& table) {
    float most = 0;
    for (std::size_t n = 0; 2 * n < table.size(); ++n)
      most = std::max(most, static_cast<float>(n) * float_of(static_cast<std::uint32_t>(table[2 * n])));
    return most;
  }

  // By repeated multiplication, so that every machine computes the same. Ends where both powers count for nothing.
  static std::vector<std::uint64_t> powers_of(const AdamSOptions& options) {
    const auto pair = [](double power) {
      const auto bits = [](double value) { return std::uint64_t{bits_of(static_cast<float>(value))}; };
      return bits(power) | bits(1 - power) << 32;
    };
    std::vector<std::uint64_t> table;
    double first = 1, second = 1;
    for (unsigned n = 0; n <= longest; ++n) {
      table.push_back(pair(first));
      table.push_back(pair(second));
      if (static_cast<float>(first) == 0 && static_cast<float>(second) == 0) break;
      first *= static_cast<double>(options.beta1);
      second *= static_cast<double>(options.beta2);
    }
    return table;
  }

  ClockRule rule_;
  AdamSOptions options_;
  Buffer<float, M> moments_;
  Buffer<std::uint16_t, M> last_;
  std::vector<std::uint64_t> table_;
  float most_;
  Buffer<std::uint64_t, M> powers_;
};

}  // namespace scape::inline v0
