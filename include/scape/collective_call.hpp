#pragma once

#include <scape/bfloat16.hpp>
#include <scape/communicator.hpp>
#include <scape/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace scape::inline v0::detail {

enum class Collective : std::uint32_t {
  all_reduce_mean,
  reduce_scatter_mean,
  all_gather,
  all_gather_uneven,
  all_to_all
};

inline std::string name_of(Collective collective) {
  constexpr const char* names[] = {"all_reduce_mean", "reduce_scatter_mean", "all_gather", "all_gather_uneven",
                                   "all_to_all"};
  return names[static_cast<std::size_t>(collective)];
}

enum class Element : std::uint32_t { float32, bfloat16, mask_word };

template <class T>
inline constexpr Element element_of = Element::float32;
template <>
inline constexpr Element element_of<bfloat16> = Element::bfloat16;
template <>
inline constexpr Element element_of<MaskWord> = Element::mask_word;

/// What a rank calls: ranks compare it before they exchange anything. Plain bytes, which processes send to each other.
struct CollectiveCall {
  Collective collective = {};
  Element element = {};
  std::uint64_t count = 0;            // elements that all ranks must agree on
  std::uint64_t own = 0, counts = 0;  // of an uneven gather: this rank's elements, and a hash of all ranks'

  bool agrees_with(const CollectiveCall& other) const noexcept {
    return collective == other.collective && element == other.element && count == other.count && counts == other.counts;
  }
  std::string text() const {
    constexpr const char* elements[] = {"float", "bfloat16", "MaskWord"};
    return name_of(collective) + " of " + std::to_string(count) + " " + elements[static_cast<std::size_t>(element)];
  }
};

/// Throws scape::Error that names the odd rank unless all ranks make the same call, the `number`-th of their group. All
/// ranks come to the same verdict, since all see the same calls.
inline void check_calls(std::span<const CollectiveCall> calls, std::uint64_t number) {
  const auto agrees = [&](const CollectiveCall& call) { return call.agrees_with(calls.front()); };
  if (std::all_of(calls.begin(), calls.end(), agrees)) return;  // what follows takes W^2 comparisons
  const auto agreeing = [&](const CollectiveCall& call) {
    return std::count_if(calls.begin(), calls.end(), [&](const auto& other) { return call.agrees_with(other); });
  };
  const CollectiveCall& usual = *std::max_element(
      calls.begin(), calls.end(), [&](const auto& a, const auto& b) { return agreeing(a) < agreeing(b); });
  for (std::size_t odd = 0; odd < calls.size(); ++odd)
    if (!calls[odd].agrees_with(usual))
      throw Error("collective " + std::to_string(number) + ": rank " + std::to_string(odd) + " calls " +
                  calls[odd].text() + ", the others " + usual.text());
}

}  // namespace scape::inline v0::detail
