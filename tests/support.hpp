#pragma once

// What several test files need: a user's layout, random values, what a call throws.

#include <scape/communicator.hpp>
#include <scape/layout.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

using Floats = std::vector<float>;
using Words = std::vector<scape::MaskWord>;
using Counts = std::vector<std::size_t>;

inline constexpr int worlds[] = {1, 2, 3, 5, 8};

// A layout as a user would write it, of any segments.
struct ListLayout {
  std::vector<scape::Segment> list;
  int count;
  std::size_t size() const { return list.empty() ? 0 : list.back().begin + list.back().count; }
  int ranks() const { return count; }
  std::span<const scape::Segment> segments() const { return list; }
  void add(std::size_t elements, int owner, bool dense = false) {
    list.push_back({size(), elements, owner % count, dense});
  }
};

// The i-th number of a fixed sequence that looks random.
inline std::uint32_t random_bits(std::size_t i) {
  std::uint64_t x = i * 0x9e3779b97f4a7c15 + 0x7f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return static_cast<std::uint32_t>(x >> 32);
}

// Of many magnitudes, so that another order of the sum gives other bits.
inline Floats floats_of(std::size_t seed, std::size_t count) {
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = random_bits(i * 64 + seed);
    values[i] = std::bit_cast<float>((bits & 0x807fffff) | (120 + bits % 16) << 23);
  }
  return values;
}

// What a call throws as a wrong argument.
template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// What body throws: "" if nothing.
template <class Exception, class F>
std::string thrown_by(F body) {
  try {
    body();
  } catch (const Exception& exception) {
    return exception.what();
  }
  return "";
}
