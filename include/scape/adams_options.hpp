#pragma once

#include <scape/delayed_mask_scheduler.hpp>
#include <scape/error.hpp>
#include <scape/fingerprint.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace scape::inline v0 {

/// What AdamS is told, the same on every rank.
struct AdamSOptions {
  float learning_rate = 1e-3f;
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0;          ///< decoupled, as in AdamW; not on segments with decay = false
  float clip_norm = 0;             ///< 0: none; what is clipped is the rule's choice
  double density = 1;              ///< share of elements kept: 0.01 is 99% sparsity; 1 is dense AdamS
  std::size_t density_warmup = 0;  ///< steps over which the density falls, geometrically, from 1
  int delay = 1;                   ///< steps from a mask's making to its use
  std::size_t refresh = 1;         ///< a new mask every so many steps
  MaskCoding mask_coding = MaskCoding::automatic;
  bool exact_mask_parts = false;  ///< for unbalanced layouts: no padding in the mask exchange (MaskPlan)

  MaskOptions masks() const {
    return {
        .density = DensitySchedule(density, density_warmup), .delay = delay, .refresh = refresh, .coding = mask_coding};
  }

  void check() const {
    const auto finite = [](float value) { return std::isfinite(value) && value >= 0; };
    expects(finite(learning_rate), "learning_rate", learning_rate, "must be finite and at least 0");
    expects(beta1 >= 0 && beta1 < 1, "beta1", beta1, "must be at least 0 and below 1");
    expects(beta2 >= 0 && beta2 < 1, "beta2", beta2, "must be at least 0 and below 1");
    expects(finite(epsilon), "epsilon", epsilon, "must be finite and at least 0");
    expects(finite(weight_decay), "weight_decay", weight_decay, "must be finite and at least 0");
    expects(finite(clip_norm), "clip_norm", clip_norm, "must be finite and at least 0");
    expects(density >= 0 && density <= 1, "density", density, "must be 0 to 1");
    expects(delay >= 0 && delay <= 1000, "delay", delay, "must be 0 to 1000");
    expects(refresh >= 1, "refresh", refresh, "must be at least 1");
    const int coding = static_cast<int>(mask_coding);
    expects(coding >= 0 && coding <= 2, "mask_coding", coding, "must be one of MaskCoding");
  }

  std::uint64_t fingerprint() const noexcept {
    return Fingerprint()
        .add(double{learning_rate})
        .add(double{beta1})
        .add(double{beta2})
        .add(double{epsilon})
        .add(double{weight_decay})
        .add(double{clip_norm})
        .add(density)
        .add(std::uint64_t{density_warmup})
        .add(static_cast<std::uint64_t>(delay))
        .add(std::uint64_t{refresh})
        .add(static_cast<std::uint64_t>(mask_coding))
        .add(std::uint64_t{exact_mask_parts})
        .value();
  }
};

}  // namespace scape::inline v0
