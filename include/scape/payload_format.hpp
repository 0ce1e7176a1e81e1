#pragma once

#include <scape/arithmetic.hpp>
#include <scape/bfloat16.hpp>
#include <scape/float8.hpp>
#include <scape/narrow_float.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace scape::inline v0 {

/// As what the values of a payload travel. The formats of 8 bits come with scales.
enum class PayloadFormat : std::uint8_t { float32, bfloat16, e5m2, e4m3 };

inline const char* name_of(PayloadFormat format) noexcept {
  constexpr const char* names[] = {"float32", "bfloat16", "e5m2", "e4m3"};
  return names[static_cast<std::size_t>(format)];
}

/// Positions that share a scale: as many as a warp reads with four a thread, and its byte adds less than 1%.
inline constexpr std::size_t scale_group = 128;

/// Positions of a coded payload's unit: their codes, in order, then the scales of its groups, which fill one word.
inline constexpr std::size_t payload_block = 4 * scale_group;

/// Words of a block's code: 128 of codes and one of scales, or 256 of bfloat16.
SCAPE_HOST_DEVICE constexpr std::size_t payload_block_words(PayloadFormat format) noexcept {
  constexpr std::size_t word = sizeof(std::uint32_t);
  if (format == PayloadFormat::float32) return payload_block;
  if (format == PayloadFormat::bfloat16) return payload_block * sizeof(bfloat16) / word;
  return payload_block / word + payload_block / scale_group / word;
}

namespace detail {

inline constexpr std::size_t groups_per_block = payload_block / scale_group;

SCAPE_HOST_DEVICE inline bool is_finite(float value) { return is_nonfinite(value) == 0; }
SCAPE_HOST_DEVICE inline bool is_nan(float value) { return (bits_of(value) & 0x7fffffffu) > 0x7f800000u; }
SCAPE_HOST_DEVICE inline float quiet_nan() { return float_of(0x7fc00000u); }
SCAPE_HOST_DEVICE inline float with_one_nan(float value) { return scape::choose(is_nan(value), quiet_nan(), value); }

// How a group of values is coded as T, e5m2 or e4m3, with the scale 2^(scale - 127): what is finite stays finite, all
// else becomes NaN. NaNs have one bit pattern, so that every machine's are the same.
template <class T>
struct PayloadCode {
  static constexpr bool has_scale = true;
  static constexpr PayloadFormat format = std::is_same_v<T, e5m2> ? PayloadFormat::e5m2 : PayloadFormat::e4m3;

  /// The smallest scale with which the group's largest magnitude, given as its bits, does not exceed T's largest
  /// number, 1.75 * 2^T::largest_exponent. Held where neither scale nor decoded values leave float32's normal numbers:
  /// so magnitudes above 1.75 * 2^127 are cut.
  SCAPE_HOST_DEVICE static std::uint32_t scale(std::uint32_t largest) {
    constexpr int top = T::largest_exponent;
    const int fitting = static_cast<int>((largest + 0x1fffffu) >> 23) - top;  // one more above 1.75 * 2^n
    return static_cast<std::uint32_t>(fitting < 1 ? 1 : fitting > 254 - top ? 254 - top : fitting);
  }
  SCAPE_HOST_DEVICE static T encode(float value, std::uint32_t scale) {
    return T(scape::choose(is_finite(value), multiply(value, float_of((254 - scale) << 23)), quiet_nan()));
  }
  SCAPE_HOST_DEVICE static float decode(T code, std::uint32_t scale) {
    return with_one_nan(multiply(static_cast<float>(code), float_of(scale << 23)));
  }
};

// Infinities stay; finite magnitudes that would be rounded up to infinity are cut to the largest finite number.
template <>
struct PayloadCode<bfloat16> {
  static constexpr bool has_scale = false;
  static constexpr PayloadFormat format = PayloadFormat::bfloat16;

  SCAPE_HOST_DEVICE static std::uint32_t scale(std::uint32_t) { return 0; }
  SCAPE_HOST_DEVICE static bfloat16 encode(float value, std::uint32_t) {
    constexpr std::uint32_t most = 0x7f7f0000;
    const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    const float cut = float_of((bits & 0x80000000u) | most);
    const float kept = scape::choose(magnitude > most && magnitude < 0x7f800000u, cut, value);
    return bfloat16(scape::choose(is_nan(value), quiet_nan(), kept));
  }
  SCAPE_HOST_DEVICE static float decode(bfloat16 code, std::uint32_t) { return static_cast<float>(code); }
};

// What a group's scale is made from: the bits of the magnitude, which are ordered as it; 0 for no finite number.
SCAPE_HOST_DEVICE inline std::uint32_t finite_magnitude(float value) {
  return choose(is_finite(value), bits_of(value) & 0x7fffffffu, 0u);
}

// What was rounded away: exact. Nothing is left of a value that is no finite number.
SCAPE_HOST_DEVICE inline float rounding_error(float value, float decoded) {
  return scape::choose(is_finite(value), subtract(value, decoded), 0.0f);
}

// A payload of so many parts of `stride` values, each coded by itself in `groups` groups.
struct PayloadParts {
  std::size_t stride, groups;

  PayloadParts(PayloadFormat format, std::size_t count, std::size_t words, std::size_t parts)
      : stride(count / parts), groups(words / parts / payload_block_words(format) * groups_per_block) {}
};

// Where in a payload's code the codes and the scale of a group are, in bytes.
template <class T>
SCAPE_HOST_DEVICE constexpr std::size_t codes_of_group(std::size_t group) {
  constexpr std::size_t block_bytes = payload_block_words(PayloadCode<T>::format) * sizeof(std::uint32_t);
  return group / groups_per_block * block_bytes + group % groups_per_block * scale_group * sizeof(T);
}
template <class T>
SCAPE_HOST_DEVICE constexpr std::size_t scale_of_group(std::size_t group) {
  return codes_of_group<T>(group / groups_per_block * groups_per_block) + payload_block * sizeof(T) +
         group % groups_per_block;
}

// Calls f with std::type_identity of the type that codes have, which float32 has not.
template <class F>
void with_code_of(PayloadFormat format, F f) {
  if (format == PayloadFormat::bfloat16) f(std::type_identity<bfloat16>{});
  if (format == PayloadFormat::e5m2) f(std::type_identity<e5m2>{});
  if (format == PayloadFormat::e4m3) f(std::type_identity<e4m3>{});
}

}  // namespace detail
}  // namespace scape::inline v0
