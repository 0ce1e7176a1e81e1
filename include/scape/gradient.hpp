#pragma once

#include <scape/arithmetic.hpp>
#include <scape/step_scalars.hpp>

#include <concepts>
#include <cstddef>
#include <type_traits>

namespace scape::inline v0 {

/// An element of a gradient: float, bfloat16, __half and the like.
template <class G>
concept GradientType = std::is_trivially_copyable_v<G> && requires(const G& g) {
  static_cast<float>(g);
};

/// The gradient as rules score by it, a functor of element and bit: this rank's, scaled.
template <GradientType G>
struct ScaledGradient {
  const G* values;
  const StepScalars* now;
  SCAPE_HOST_DEVICE float operator()(std::size_t element) const {
    return multiply(static_cast<float>(values[element]), now->gradient_scale);
  }
  SCAPE_HOST_DEVICE float operator()(std::size_t element, std::size_t) const { return (*this)(element); }
};

/// The same where micro-batches were added up, on the rank's own part of the mask only.
struct SummedGradient {
  const float* sums;
  std::size_t first_bit;
  SCAPE_HOST_DEVICE float operator()(std::size_t, std::size_t bit) const { return sums[bit - first_bit]; }
};

}  // namespace scape::inline v0
