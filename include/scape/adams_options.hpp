#pragma once

#include <scape/agreement.hpp>
#include <scape/delayed_mask_scheduler.hpp>
#include <scape/error.hpp>
#include <scape/payload_format.hpp>

#include <array>
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
  float gradient_scale = 1;        ///< multiplies every gradient as it is read: 1 / loss scale, 1 / micro-batches
  double density = 1;              ///< share of elements kept: 0.01 is 99% sparsity; 1 is dense AdamS
  std::size_t density_warmup = 0;  ///< steps over which the density falls, geometrically, from 1
  int delay = 1;                   ///< steps from a mask's making to its use
  std::size_t refresh = 1;         ///< a new mask every so many steps
  MaskCoding mask_coding = MaskCoding::automatic;
  PayloadFormat payload = PayloadFormat::float32;  ///< as what kept gradients travel; docs/algorithm.md, "Payloads"
  bool exact_mask_parts = false;  ///< for unbalanced layouts: no padding in the mask exchange (MaskPlan)
  bool adds = false;  ///< whether add() is used: rule `clock` needs 4 bytes more for each element it owns then
  std::size_t compare_every = 1;  ///< ranks compare step, rate and mask every so many steps; 0: never

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
    expects(std::isfinite(gradient_scale), "gradient_scale", gradient_scale, "must be finite");
    expects(density >= 0 && density <= 1, "density", density, "must be 0 to 1");
    expects(delay >= 0 && delay <= 1000, "delay", delay, "must be 0 to 1000");
    expects(refresh >= 1, "refresh", refresh, "must be at least 1");
    const int coding = static_cast<int>(mask_coding);
    expects(coding >= 0 && coding <= 2, "mask_coding", coding, "must be one of MaskCoding");
    const int format = static_cast<int>(payload);
    expects(format >= 0 && format <= 3, "payload", format, "must be one of PayloadFormat");
  }

  /// All of them, as ranks compare them.
  std::array<AgreedValue, 15> agreed() const {
    return {AgreedValue::real("options.learning_rate", double{learning_rate}),
            AgreedValue::real("options.beta1", double{beta1}),
            AgreedValue::real("options.beta2", double{beta2}),
            AgreedValue::real("options.epsilon", double{epsilon}),
            AgreedValue::real("options.weight_decay", double{weight_decay}),
            AgreedValue::real("options.clip_norm", double{clip_norm}),
            AgreedValue::real("options.density", density),
            AgreedValue::integer("options.density_warmup", density_warmup),
            AgreedValue::integer("options.delay", static_cast<std::uint64_t>(delay)),
            AgreedValue::integer("options.refresh", refresh),
            AgreedValue::integer("options.mask_coding", static_cast<std::uint64_t>(mask_coding)),
            AgreedValue::integer("options.payload", static_cast<std::uint64_t>(payload)),
            AgreedValue::integer("options.exact_mask_parts", exact_mask_parts),
            AgreedValue::integer("options.adds", adds),
            AgreedValue::integer("options.compare_every", compare_every)};
  }
};

}  // namespace scape::inline v0
