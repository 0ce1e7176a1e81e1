#pragma once

// Number formats and coded payloads in double arithmetic, from their definitions and without bit tricks.

#include <scape/bfloat16.hpp>
#include <scape/float16.hpp>
#include <scape/float8.hpp>
#include <scape/payload_format.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

template <class T>
struct Format;
template <>
struct Format<scape::float16> {
  static constexpr int mantissa = 10, bias = 15;
  static constexpr std::uint32_t finite = 0x7c00, sign = 0x8000, nan = 0x7fff;  // finite: codes of one sign
};
template <>
struct Format<scape::bfloat16> {
  static constexpr int mantissa = 7, bias = 127;
  static constexpr std::uint32_t finite = 0x7f80, sign = 0x8000, nan = 0x7fc0;
};
template <>
struct Format<scape::e5m2> {
  static constexpr int mantissa = 2, bias = 15;
  static constexpr std::uint32_t finite = 0x7c, sign = 0x80, nan = 0x7f;
};
template <>
struct Format<scape::e4m3> {
  static constexpr int mantissa = 3, bias = 7;
  static constexpr std::uint32_t finite = 0x7f, sign = 0x80, nan = 0x7f;
};

// The finite number that a code without a sign stands for.
template <class T>
double number_of(std::uint32_t code) {
  constexpr std::uint32_t one = 1u << Format<T>::mantissa;
  const std::uint32_t exponent = code / one, mantissa = code % one;
  const double significand = exponent == 0 ? mantissa : mantissa + one;
  return std::ldexp(significand, static_cast<int>(std::max(exponent, 1u)) - Format<T>::bias - Format<T>::mantissa);
}

// The code of the nearest finite number, of two the even one. Beyond the largest: the one behind it where that is
// nearer, which would be infinity.
template <class T>
std::uint32_t nearest_code(double magnitude) {
  std::uint32_t below = 0, above = Format<T>::finite;
  while (above - below > 1) {
    const std::uint32_t middle = (below + above) / 2;
    (number_of<T>(middle) <= magnitude ? below : above) = middle;
  }
  const double down = magnitude - number_of<T>(below), up = number_of<T>(above) - magnitude;
  return down < up || (down == up && below % 2 == 0) ? below : above;
}
template <class T>
std::uint32_t saturated_code(double magnitude) {
  return std::min(nearest_code<T>(magnitude), Format<T>::finite - 1);
}

// Of a group of values: the exponent of their scale, by trial.
template <class T>
int scale_exponent(std::span<const float> values) {
  if constexpr (sizeof(T) == 2) {
    return 0;
  } else {
    double largest = 0;
    for (const float value : values)
      if (std::isfinite(value)) largest = std::max(largest, std::abs(static_cast<double>(value)));
    const double top = number_of<T>(Format<T>::finite - 1);
    int exponent = -126;
    while (std::ldexp(top, exponent) < largest && std::ldexp(top, exponent + 1) <= 0x1.fffffep127) ++exponent;
    return exponent;
  }
}

// What a value becomes on its way.
template <class T>
float decoded_value(float value, int scale) {
  if (std::isnan(value)) return std::numeric_limits<float>::quiet_NaN();
  if (std::isinf(value)) return sizeof(T) == 2 ? value : std::numeric_limits<float>::quiet_NaN();
  const double magnitude = std::ldexp(std::abs(static_cast<double>(value)), -scale);
  const double number = std::ldexp(number_of<T>(saturated_code<T>(magnitude)), scale);
  return static_cast<float>(std::signbit(value) ? -number : number);
}

// What a payload becomes on its way; lost: what was rounded away.
template <class T>
std::vector<float> decoded_values(std::span<const float> values, std::vector<float>& lost) {
  std::vector<float> result;
  for (std::size_t begin = 0; begin < values.size(); begin += scape::scale_group) {
    const std::span<const float> group = values.subspan(begin, std::min(scape::scale_group, values.size() - begin));
    const int scale = scale_exponent<T>(group);
    for (const float value : group) result.push_back(decoded_value<T>(value, scale));
  }
  lost.resize(values.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    lost[i] = std::isfinite(values[i]) ? static_cast<float>(double{values[i]} - double{result[i]}) : 0;
  return result;
}
