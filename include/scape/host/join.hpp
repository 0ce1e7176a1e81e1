#pragma once

#include <scape/mask_plan.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace scape::inline v0::detail {

#if defined(__x86_64__)
[[gnu::target("avx512f,popcnt")]] inline const float* join_half_avx512(const float* values, unsigned chosen,
                                                                       const float* others, float* joined) {
  const int count = std::popcount(chosen);
  const __m512 given = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), others);
  _mm512_storeu_ps(joined, _mm512_mask_expand_ps(_mm512_loadu_ps(values), static_cast<__mmask16>(chosen), given));
  return others + count;
}
[[gnu::target("avx512f,popcnt")]] inline void join_avx512(const float* values, MaskWord chosen, const float* others,
                                                          float* joined) {
  others = join_half_avx512(values, chosen & 0xffff, others, joined);
  join_half_avx512(values + 16, chosen >> 16, others, joined + 16);
}
#endif

/// joined[i] = values[i], or where bit i is set the next of `others`, for i < count, at most word_bits.
inline void join(const float* values, std::size_t count, MaskWord chosen, const float* others, float* joined) {
#if defined(__x86_64__)
  if (count == word_bits && __builtin_cpu_supports("avx512f")) return join_avx512(values, chosen, others, joined);
#endif
  std::copy_n(values, count, joined);
  for (; chosen != 0; chosen &= chosen - 1) joined[std::countr_zero(chosen)] = *others++;
}

}  // namespace scape::inline v0::detail
