#pragma once

#include <scape/error.hpp>

#include <cmath>
#include <cstddef>

namespace scape::inline v0 {

/// The density of step t: density^(t / warmup) for t < warmup, a geometric fall from 1; then density. warmup 0: none.
class DensitySchedule {
 public:
  explicit DensitySchedule(double density, std::size_t warmup = 0) : density_(density), warmup_(warmup) {
    expects(density >= 0 && density <= 1, "density", density, "must be 0 to 1");
  }
  double operator()(std::size_t step) const noexcept {
    if (step >= warmup_) return density_;
    return step == 0 ? 1 : std::pow(density_, static_cast<double>(step) / static_cast<double>(warmup_));
  }
  /// The largest density of any step.
  double largest() const noexcept { return warmup_ == 0 ? density_ : 1; }

 private:
  double density_;
  std::size_t warmup_;
};

}  // namespace scape::inline v0
