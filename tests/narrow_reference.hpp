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

struct Reduced {
  std::vector<float> mean;
  std::vector<std::vector<float>> errors;  // by rank
};

// By hand, as the documentation says: the mean of all ranks' codes, in their order, and each one's errors.
template <class T>
Reduced averaged(const std::vector<std::vector<float>>& sent) {
  const std::size_t ranks = sent.size(), count = sent[0].size();
  Reduced result{std::vector<float>(count, -0.0f), std::vector<std::vector<float>>(ranks)};
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::vector<float> values = decoded_values<T>(sent[rank], result.errors[rank]);
    for (std::size_t i = 0; i < count; ++i) result.mean[i] = result.mean[i] + values[i];
  }
  for (float& value : result.mean) {
    value /= static_cast<float>(ranks);
    if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
  }
  return result;
}

// The same, coded again: what that rounds away is W times the loss of the rank that did it.
template <class T>
Reduced reduced(const std::vector<std::vector<float>>& sent) {
  Reduced result = averaged<T>(sent);
  const std::size_t ranks = sent.size(), count = sent[0].size();
  const std::size_t blocks = (count + scape::payload_block - 1) / scape::payload_block;
  const std::size_t slice = (blocks + ranks - 1) / ranks * scape::payload_block;
  std::vector<float> lost;
  result.mean = decoded_values<T>(result.mean, lost);
  for (std::size_t i = 0; i < count; ++i) {
    const float scaled = static_cast<float>(ranks) * lost[i];
    float& error = result.errors[i / slice][i];
    error = error + scaled;
  }
  return result;
}
inline Reduced reduced(scape::PayloadFormat format, const std::vector<std::vector<float>>& sent) {
  if (format == scape::PayloadFormat::bfloat16) return reduced<scape::bfloat16>(sent);
  return format == scape::PayloadFormat::e5m2 ? reduced<scape::e5m2>(sent) : reduced<scape::e4m3>(sent);
}

// By hand, of the other collective: parts of equal size, one a rank, each coded by itself.
template <class T>
Reduced scattered(const std::vector<std::vector<float>>& sent) {
  const std::size_t ranks = sent.size(), stride = sent[0].size() / ranks;
  Reduced result{{}, std::vector<std::vector<float>>(ranks)};
  for (std::size_t part = 0; part < ranks; ++part) {
    std::vector<std::vector<float>> parts;
    for (const std::vector<float>& values : sent) {
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>(part * stride);
      parts.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(stride));
    }
    const Reduced of_part = averaged<T>(parts);
    result.mean.insert(result.mean.end(), of_part.mean.begin(), of_part.mean.end());
    for (std::size_t rank = 0; rank < ranks; ++rank)
      result.errors[rank].insert(result.errors[rank].end(), of_part.errors[rank].begin(), of_part.errors[rank].end());
  }
  return result;
}
inline Reduced scattered(scape::PayloadFormat format, const std::vector<std::vector<float>>& sent) {
  if (format == scape::PayloadFormat::bfloat16) return scattered<scape::bfloat16>(sent);
  return format == scape::PayloadFormat::e5m2 ? scattered<scape::e5m2>(sent) : scattered<scape::e4m3>(sent);
}

// Of the code of `count` values, in as many blocks for each rank.
inline std::size_t code_bytes(scape::PayloadFormat format, std::size_t count, std::size_t ranks) {
  const std::size_t blocks = (count + 511) / 512, slice = (blocks + ranks - 1) / ranks;
  return ranks * slice * (format == scape::PayloadFormat::bfloat16 ? 1024 : 516);
}
