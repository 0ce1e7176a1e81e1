#pragma once

#include <scape/bfloat16.hpp>
#include <scape/host/loop.hpp>
#include <scape/host/stream.hpp>

#include <algorithm>
#include <array>
#include <cstddef>

namespace scape::inline v0::detail {

/// The part of `count` elements that a rank sums: even, the first ones an element longer where `ranks` does not divide.
struct Slice {
  std::size_t begin, size;
};
inline Slice slice_of(std::size_t count, std::size_t ranks, std::size_t rank) noexcept {
  const std::size_t share = count / ranks, rest = count % ranks;
  return {rank * share + std::min(rank, rest), share + (rank < rest)};
}

template <class T>
SCAPE_HOST_LOOP void widen(const T* values, float* wide, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) wide[i] = static_cast<float>(values[i]);
}
template <class T>
SCAPE_HOST_LOOP void add_to(float* sum, const T* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += static_cast<float>(values[i]);
}
template <class T>
SCAPE_HOST_LOOP void divide_into(T* out, const float* sum, float divisor, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<T>(sum[i] / divisor);
}

/// out = the mean of the ranks' values, input(rank), of float or bfloat16: summed in the order of the ranks in float32,
/// each element by itself, divided, and rounded to T once. out may be one of the inputs.
template <class T, class Input>
void mean_in_rank_order(std::size_t ranks, Input input, T* out, std::size_t count, HostPool& pool) {
  constexpr std::size_t run = 4096;
  pool.run((count + run - 1) / run, [&](std::size_t i) {
    const std::size_t first = i * run, size = std::min(run, count - first);
    std::array<float, run> sum;  // by itself, since out may be one of the inputs
    widen(input(0) + first, sum.data(), size);
    for (std::size_t rank = 1; rank < ranks; ++rank) add_to(sum.data(), input(rank) + first, size);
    divide_into(out + first, sum.data(), static_cast<float>(ranks), size);
  });
}

}  // namespace scape::inline v0::detail
