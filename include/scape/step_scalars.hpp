#pragma once

#include <scape/arithmetic.hpp>

#include <cstdint>

namespace scape::inline v0 {

/// What changes from step to step and what the step itself finds out, in memory of the stream: the step's kernels read
/// it there, so that nothing has to be read back.
struct StepScalars {
  std::uint64_t step = 0;       ///< steps begun; 1 in the first
  double beta1_power = 1;       ///< beta1^step
  double beta2_power = 1;       ///< beta2^step
  double squared_norm = 0;      ///< of what is clipped; after the step, where reported, of the reduced payload
  double squared_residual = 0;  ///< of this rank's residual; for a report only, like the next three
  double squared_payload = 0;   ///< of what this rank sends
  double squared_overlap = 0;   ///< of those of its elements that the mask before had too
  std::uint64_t overlap = 0;    ///< how many they are
  float learning_rate = 0;
  float given_scale = 1;        ///< of gradients: the caller's
  float decay = 1;              ///< 1 - learning_rate * weight_decay
  float first_correction = 1;   ///< divides the first moment
  float old_correction = 1;     ///< divides the old first moment inside the second
  float second_correction = 1;  ///< divides the second moment
  float gradient_scale = 1;     ///< multiplies every local gradient as it is read: given_scale, and what clips
  float payload_scale = 1;      ///< multiplies the reduced payload as it is read
};

/// The factor that clips a norm: limit / (norm + 1e-6) above the limit, else 1; limit 0 is no clipping. An infinite
/// norm gives 0, so one infinite element makes itself NaN and all others 0.
SCAPE_HOST_DEVICE inline float clip_scale(double squared_norm, float limit) {
  const double norm = std::sqrt(squared_norm);
  return limit > 0 && norm > static_cast<double>(limit) ? static_cast<float>(static_cast<double>(limit) / (norm + 1e-6))
                                                        : 1.0f;
}

}  // namespace scape::inline v0
