#pragma once

#include <scape/arithmetic.hpp>

#include <cstdint>

namespace scape::inline v0::detail {

/// condition ? a : b without a branch, as `choose` for float.
SCAPE_HOST_DEVICE inline std::uint32_t choose(bool condition, std::uint32_t a, std::uint32_t b) {
  return b ^ ((a ^ b) & (0u - static_cast<std::uint32_t>(condition)));
}

/// What the floating-point formats of fewer bits and exponents than float32 have in common: `width` bits, of which the
/// last `mantissa` are the mantissa's. Without their signs, codes are ordered as the numbers are: `largest` is the one
/// for all that is too large, those from `special` on are no finite numbers, and `nan` is the NaN that is made. No
/// branches, so that loops vectorise; no float32 denormals on the way, so that modes without them change nothing.
template <int width, int mantissa, std::uint32_t largest, std::uint32_t special, std::uint32_t nan>
struct NarrowFloat {
  /// To the nearest, ties to even. Every NaN becomes the same one, since its sign is not the same on all machines.
  SCAPE_HOST_DEVICE static std::uint32_t narrow(float value) {
    const std::uint32_t bits = bits_of(value), x = bits & 0x7fffffffu;
    const std::uint32_t odd = x >> dropped & 1;
    const std::uint32_t normal = ((x + ((1u << (dropped - 1)) - 1) + odd) >> dropped) - (rebias << mantissa);
    // The adder rounds, where the other number's last bit is worth as much as that of the denormals.
    const std::uint32_t denormal = bits_of(add(float_of(x), float_of(anchor))) - anchor;
    const std::uint32_t code = choose(x < (rebias + 1) << 23, denormal, normal);
    const std::uint32_t sign = bits >> 31 << (width - 1);
    return choose(x > 0x7f800000u, nan, sign | choose(code < largest, code, largest));
  }

  /// Exact.
  SCAPE_HOST_DEVICE static float widen(std::uint32_t code) {
    const std::uint32_t x = code & ((1u << (width - 1)) - 1), sign = code >> (width - 1) << 31;
    const std::uint32_t normal = (x << dropped) + (rebias << 23);
    const float denormal = multiply(static_cast<float>(static_cast<std::int32_t>(x)), float_of(unit));
    const std::uint32_t finite = choose(x < 1u << mantissa, bits_of(denormal), normal);
    return float_of(sign | choose(x < special, finite, normal | 0x7f800000u));
  }

 private:
  static constexpr int dropped = 23 - mantissa;  // bits of float32's mantissa
  static constexpr std::uint32_t bias = (1u << (width - 2 - mantissa)) - 1, rebias = 127 - bias;
  static constexpr std::uint32_t unit = (rebias + 1 - mantissa) << 23;  // the smallest denormal, as float32
  static constexpr std::uint32_t anchor = unit + (23u << 23);           // the float32 whose last bit is worth that
};

}  // namespace scape::inline v0::detail
