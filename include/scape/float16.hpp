#pragma once

#include <scape/narrow_float.hpp>

#include <cstdint>

namespace scape::inline v0 {

/// IEEE's binary16. For arrays on hosts and devices: the bits are those of __half.
struct float16 {
  std::uint16_t bits = 0;

  float16() = default;
  /// To the nearest, ties to even; from 65520 on infinity; a NaN becomes 0x7fff.
  SCAPE_HOST_DEVICE explicit float16(float value) : bits(static_cast<std::uint16_t>(Format::narrow(value))) {}
  /// Exact.
  SCAPE_HOST_DEVICE explicit operator float() const { return Format::widen(bits); }

  friend bool operator==(float16, float16) = default;  // of the bits

 private:
  using Format = detail::NarrowFloat<16, 10, 0x7c00, 0x7c00, 0x7fff>;
};

}  // namespace scape::inline v0
