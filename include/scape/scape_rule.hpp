#pragma once

#include <scape/adams_options.hpp>
#include <scape/arithmetic.hpp>
#include <scape/error.hpp>
#include <scape/fingerprint.hpp>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/prefetch.hpp>
#include <scape/step_scalars.hpp>
#include <scape/stream.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace scape::inline v0 {

/// What divides the moments of step t, counted from 0.
enum class BiasCorrection {
  adam,  ///< the first by 1 - beta1^(t+1), the second by 1 - beta2^(t+1)
  none,
  adams  ///< the new first moment and the old one inside the second by 1 - beta1^(t+1): the AdamS authors' code
};

/// By what the owner ranks the elements of its segments for the next mask.
enum class MaskScore {
  corrected,  ///< |beta1 m + (1 - beta1) u|, u the owner's own residual plus gradient: known before the payload travels
  updated     ///< |m| after the update where kept, (1 - beta1) |residual| elsewhere; a mask made from its own step's
              ///< numbers (the first one, and every one with delay 0) is scored by `corrected` even so
};

/// The paper's update rule (docs/algorithm.md, "Rule scape"): an element that leaves the mask gives its first moment
/// back to the residuals, so the first moment lives on the mask alone, by payload position, and the residual off it, in
/// the ResidualStore's one array. The rule owns 4 bytes for each element of the largest payload, and, unless
/// the final density is 1, max(delay, 1) times 4 for each of one at that density. Clips the rebuilt gradient.
struct ScapeRule {
  BiasCorrection bias_correction = BiasCorrection::adam;
  MaskScore score = MaskScore::corrected;

  /// Clipped is the reduced payload, not the local gradient.
  static constexpr bool clips_gradient = false;
  /// Whether elements of a mask that waits for its turn are scored as if they had been sent.
  static constexpr bool pending_counts_as_sent = false;
  /// Whether score_after reads the gradient.
  static constexpr bool scores_gradient = false;
  /// Whether every rank needs the reduced payload, not its part alone: for the first moments that return to residuals.
  static constexpr bool follows_others = true;
  /// The residual of an element, given what the store holds and whether the element is kept.
  SCAPE_HOST_DEVICE static float residual(float state, bool is_kept) { return is_kept ? 0.0f : state; }
  std::uint64_t fingerprint() const noexcept {
    return Fingerprint()
        .add(std::uint64_t{1})
        .add(static_cast<std::uint64_t>(bias_correction))
        .add(static_cast<std::uint64_t>(score))
        .value();
  }

  // In Update, `root` is the square root of second_moment(): apart, since hosts take many roots at once.
  // In Accumulation, a = residual where the element was off the mask, first moment where it was on it (the other of the
  // two is 0). All become u + beta1 / (1 - beta1) m = c / (1 - beta1), c being the corrected first moment: off the mask
  // that is the new residual, and everywhere it is what the mask is scored by. Kept elements send u and set m aside.
  // First moments lie by position: `returned` of the mask before, which the pass takes in their elements' place, or
  // null before there are any.
  struct Accumulation {
    float moment_to_residual;
    const float* returned = nullptr;
    SCAPE_HOST_DEVICE float state(float g, float a, bool was_kept, bool) const {
      return multiply_add(choose(was_kept, moment_to_residual, 1.0f), a, g);
    }
    SCAPE_HOST_DEVICE float payload(float g, float a, bool was_kept) const { return add(choose(was_kept, 0.0f, a), g); }
    SCAPE_HOST_DEVICE float moment(float a, bool was_kept) const { return choose(was_kept, a, 0.0f); }
  };

  struct Advance {
    float beta1, beta2, weight_decay;
    BiasCorrection correction;
    SCAPE_HOST_DEVICE void operator()(StepScalars& now) const {
      now.beta1_power *= static_cast<double>(beta1);
      now.beta2_power *= static_cast<double>(beta2);
      now.decay = static_cast<float>(1.0 - static_cast<double>(now.learning_rate) * static_cast<double>(weight_decay));
      const float first = static_cast<float>(1.0 - now.beta1_power);
      now.first_correction = correction == BiasCorrection::none ? 1.0f : first;
      now.old_correction = correction == BiasCorrection::adams ? first : 1.0f;
      now.second_correction = correction == BiasCorrection::adam ? static_cast<float>(1.0 - now.beta2_power) : 1.0f;
    }
  };

  // Leaves the first moment by position, or at its element where `state` is not null.
  struct Update {
    float *parameters, *state;
    const float* payload;
    float* moments;
    float beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon;
    bool decays;
    std::size_t shift = 0;  // from an element to its place in `parameters`: set for each tile

    SCAPE_HOST_DEVICE bool needs_every(const Segment& segment) const { return decays && segment.decay; }
    SCAPE_HOST_DEVICE void every(std::size_t i, const StepScalars& now) const {
      parameters[i + shift] = multiply(now.decay, parameters[i + shift]);
    }
    SCAPE_HOST_DEVICE float second_moment(std::size_t, std::size_t position, const StepScalars& now) const {
      const float gradient = multiply(payload[position], now.payload_scale);
      const float old = corrected(moments[position], now.old_correction);
      const float second =
          add(multiply(beta2, multiply(old, old)), multiply(one_minus_beta2, multiply(gradient, gradient)));
      return corrected(second, now.second_correction);
    }
    SCAPE_HOST_DEVICE void kept(std::size_t i, std::size_t position, bool, float root, const StepScalars& now) const {
      const float first = first_moment(position, now);
      move(i, step_by(first, root, now));
      leave(i, position, first);
    }
    // kept() in two, for hosts, where moments stay by position: what needs the position alone, and what is left.
    SCAPE_HOST_DEVICE bool splits() const { return state == nullptr; }
    SCAPE_HOST_DEVICE float step(std::size_t position, float root, const StepScalars& now) const {
      const float first = first_moment(position, now);
      moments[position] = first;
      return step_by(first, root, now);
    }
    SCAPE_HOST_DEVICE void move(std::size_t i, float step) const {
      parameters[i + shift] = subtract(parameters[i + shift], step);
    }
    SCAPE_HOST_DEVICE void leave(std::size_t i, std::size_t position, float first) const {
      if (state == nullptr)
        moments[position] = first;
      else
        state[i] = first;
    }
    SCAPE_HOST_DEVICE float step_by(float first, float root, const StepScalars& now) const {
      const float scale = add(root, epsilon);  // 0 only where the first moment is as good as 0
      return multiply(now.learning_rate,
                      divide(corrected(first, now.first_correction), choose(scale == 0, 1.0f, scale)));
    }
    // Corrections become 1 after some hundred steps: no division, then.
    SCAPE_HOST_DEVICE static float corrected(float moment, float correction) {
      return correction == 1 ? moment : divide(moment, correction);
    }
    void prefetch(std::size_t i) const {
      if (!decays) prefetch_to_write(parameters + (i + shift));  // else all of them are read
    }
    SCAPE_HOST_DEVICE float first_moment(std::size_t position, const StepScalars& now) const {
      const float gradient = multiply(payload[position], now.payload_scale);
      return add(multiply(beta1, moments[position]), multiply(one_minus_beta1, gradient));
    }
  };

  // What a rank does for kept elements that it does not own, where it does not update them.
  struct Follow {
    Update update;
    const StepScalars* now;
    SCAPE_HOST_DEVICE void operator()(std::size_t i, std::size_t position) const {
      update.leave(i, position, update.first_moment(position, *now));
    }
  };

  // Puts the first moments where their elements are.
  struct Settle {
    float* state;
    const float* moments;
    SCAPE_HOST_DEVICE void operator()(std::size_t i, std::size_t position) const { state[i] = moments[position]; }
  };

  template <class Gradient>
  struct ScoreBefore {
    Accumulation accumulation;
    Gradient gradient;
    const float* state;
    const MaskWord* was;
    SCAPE_HOST_DEVICE float operator()(std::size_t element, std::size_t bit) const {
      const bool was_kept = was[bit / word_bits] >> bit % word_bits & 1;
      return accumulation.state(gradient(element, bit), state[element], was_kept, false);
    }
  };
  struct ScoreCorrected {
    const float* state;
    SCAPE_HOST_DEVICE float operator()(std::size_t element, std::size_t) const { return state[element]; }
    const float* array(std::size_t element) const { return state + element; }
  };
  struct ScoreUpdated {
    const float* state;
    const MaskWord* is;
    float one_minus_beta1;
    SCAPE_HOST_DEVICE float operator()(std::size_t element, std::size_t bit) const {
      const bool is_kept = is[bit / word_bits] >> bit % word_bits & 1;
      return multiply(choose(is_kept, 1.0f, one_minus_beta1), state[element]);
    }
  };

  template <MemoryResource M>
  class State;
};

/// What the rule keeps for an optimizer, and the functors that it hands to the stream's work.
template <MemoryResource M>
class ScapeRule::State {
 public:
  template <Stream S>
  State(const ScapeRule& rule, const AdamSOptions& options, std::size_t, std::size_t largest_payload,
        std::size_t last_payload, M& memory, const S&)
      : rule_(rule), options_(options), last_payload_(options.density < 1 ? last_payload : 0) {
    // As many as there are masks, so that steps captured into a graph find the same ones in every replay.
    moments_.emplace_back(largest_payload, memory);
    for (int i = 0; i < std::max(options.delay, 1); ++i) moments_.emplace_back(last_payload_, memory);
  }

  std::size_t state_bytes() const noexcept { return moments_.back().bytes(); }
  std::size_t workspace_bytes() const noexcept {
    return moments_[0].bytes() + (moments_.size() - 2) * moments_.back().bytes();
  }

  /// Whether the masks of later steps are scored after the update of this one.
  bool selects_after_update() const noexcept { return rule_.score == MaskScore::updated; }

  /// Once at the start of a step, ahead of set_aside(): where the last first moments are. Enqueues nothing.
  template <Stream S>
  void begin(const StepScalars&, const S& stream) {
    has_returned_ = step_ != 0 && waits_;
    returned_ = has_returned_ ? moments_[current_].span().data() : nullptr;
    is_captured_ = false;
    if constexpr (requires { stream.is_capturing(); }) is_captured_ = stream.is_capturing();
    ++step_;
  }

  /// Where accumulating sets the kept elements' first moments aside, by position in a payload of `count`. There the new
  /// ones wait for the next step, too, unless a score looks at them first; or payloads are those of a density warm-up,
  /// which share one array.
  std::span<float> set_aside(std::size_t count) {
    const bool shares = count > last_payload_;
    waits_ = !shares && !selects_after_update();
    expects(!waits_ || has_returned_ || !is_captured_, "step", step_ - 1,
            "is the first of all or behind the density warm-up, which cannot be captured: make it before");
    current_ = shares ? 0 : step_ % moments_.size();
    return moments_[current_].span();
  }

  /// Work between steps, for who wants to look at the last mask's elements in `state`: puts their first moments there,
  /// where else there is what they were selected by.
  template <Stream S>
  void settle(std::span<float> state, MaskView mask, const S& stream) const {
    if (waits_) for_each_kept(mask, Settle{state.data(), moments_[current_].span().data()}, stream);
  }

  Advance advance() const { return {options_.beta1, options_.beta2, options_.weight_decay, rule_.bias_correction}; }
  Accumulation accumulation() const {
    return {static_cast<float>(static_cast<double>(options_.beta1) / (1.0 - static_cast<double>(options_.beta1))),
            returned_};
  }
  Update update(std::span<float> parameters, std::span<float> state, std::span<const float> payload) const {
    return {parameters.data(), waits_ ? nullptr : state.data(), payload.data(), moments_[current_].span().data(),
            options_.beta1,    complement(options_.beta1),      options_.beta2, complement(options_.beta2),
            options_.epsilon,  options_.weight_decay != 0};
  }

  /// For kept elements of other ranks, where parameters are sharded.
  Follow follow(std::span<float> state, std::span<const float> payload, const StepScalars& now) const {
    return {update({}, state, payload), &now};
  }

  /// select(score) with the score of a mask for this step, made before accumulating, or for a later one.
  template <class Gradient, class Place, class Select>
  void score_before(Gradient gradient, Place, std::span<const float> state, MaskView before, const StepScalars&,
                    Select select) const {
    select(ScoreBefore<Gradient>{accumulation(), gradient, state.data(), before.words.data()});
  }
  template <class Gradient, class Place, class Select>
  void score_after(Gradient, Place, std::span<const float> state, MaskView mask, std::span<const MaskWord>,
                   const StepScalars&, Select select) const {
    if (rule_.score == MaskScore::corrected)
      select(ScoreCorrected{state.data()});
    else
      select(ScoreUpdated{state.data(), mask.words.data(), complement(options_.beta1)});
  }

 private:
  static float complement(float beta) { return static_cast<float>(1.0 - static_cast<double>(beta)); }

  ScapeRule rule_;
  AdamSOptions options_;
  std::size_t last_payload_;               // largest of which first moments wait for the next step
  std::vector<Buffer<float, M>> moments_;  // by position; the first holds the largest payload's
  std::size_t step_ = 0, current_ = 0;     // the step that has begun, from 1, and its array
  const float* returned_ = nullptr;        // the array of the step before
  bool waits_ = false, has_returned_ = false, is_captured_ = false;
};

}  // namespace scape::inline v0
