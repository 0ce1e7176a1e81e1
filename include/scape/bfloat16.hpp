#pragma once

#include <scape/arithmetic.hpp>

#include <cstdint>

namespace scape::inline v0 {

/// A float32 of which the upper 16 bits are kept. For arrays on hosts and devices: the bits are those of __nv_bfloat16.
struct bfloat16 {
  std::uint16_t bits = 0;

  bfloat16() = default;
  /// To the nearest, ties to even; a NaN stays one.
  SCAPE_HOST_DEVICE explicit bfloat16(float value) {
    const std::uint32_t x = bits_of(value);
    const std::uint32_t rounded = (x + 0x7fffu + (x >> 16 & 1)) >> 16, nan = x >> 16 | 0x40u;
    const std::uint32_t is_nan = 0u - static_cast<std::uint32_t>((x & 0x7fffffffu) > 0x7f800000u);
    bits = static_cast<std::uint16_t>(rounded ^ ((rounded ^ nan) & is_nan));  // without a branch: loops vectorise
  }
  SCAPE_HOST_DEVICE explicit operator float() const { return float_of(std::uint32_t{bits} << 16); }

  friend bool operator==(bfloat16, bfloat16) = default;  // of the bits
};

}  // namespace scape::inline v0
