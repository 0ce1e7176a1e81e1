#pragma once

#include <scape/narrow_float.hpp>

#include <cstdint>

namespace scape::inline v0 {

// The two formats of "OCP 8-bit Floating Point Specification (OFP8)", revision 1.0. Conversions saturate, and have the
// bits of __nv_fp8_e5m2 and __nv_fp8_e4m3: to the nearest, ties to even; what is larger than the largest finite
// number, infinities included, becomes that one; a NaN becomes 0x7f.

/// 8 bits, 5 of exponent and 2 of mantissa: up to 57344, down to 2^-16.
struct e5m2 {
  std::uint8_t bits = 0;
  static constexpr int largest_exponent = 15;  ///< of the largest finite number, 1.75 * 2^15

  e5m2() = default;
  SCAPE_HOST_DEVICE explicit e5m2(float value) : bits(static_cast<std::uint8_t>(Format::narrow(value))) {}
  /// Exact; 0x7c and 0xfc are infinities, which no conversion makes.
  SCAPE_HOST_DEVICE explicit operator float() const { return Format::widen(bits); }

  friend bool operator==(e5m2, e5m2) = default;  // of the bits

 private:
  using Format = detail::NarrowFloat<8, 2, 0x7b, 0x7c, 0x7f>;
};

/// 8 bits, 4 of exponent and 3 of mantissa: up to 448, down to 2^-9. Has no infinities.
struct e4m3 {
  std::uint8_t bits = 0;
  static constexpr int largest_exponent = 8;  ///< of the largest finite number, 1.75 * 2^8

  e4m3() = default;
  SCAPE_HOST_DEVICE explicit e4m3(float value) : bits(static_cast<std::uint8_t>(Format::narrow(value))) {}
  /// Exact.
  SCAPE_HOST_DEVICE explicit operator float() const { return Format::widen(bits); }

  friend bool operator==(e4m3, e4m3) = default;  // of the bits

 private:
  using Format = detail::NarrowFloat<8, 3, 0x7e, 0x7f, 0x7f>;
};

}  // namespace scape::inline v0
