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
// Targets and inlining as in SetBits::find_avx512.
[[gnu::noinline, gnu::target("avx2,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl")]] inline void join_avx512(
    const float* values, MaskWord chosen, const float* others, float* joined) {
  for (int begin = 0; begin < 32; begin += 16, chosen >>= 16) {
    const MaskWord here = chosen & 0xffff;
    const int count = std::popcount(here);
    const __m512 given = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), others);
    const __m512 own = _mm512_loadu_ps(values + begin);
    _mm512_storeu_ps(joined + begin, _mm512_mask_expand_ps(own, static_cast<__mmask16>(here), given));
    others += count;
  }
}
#endif

/// joined[i] = values[i], or where bit i is set the next of `others`, for i < count, at most word_bits.
inline void join(const float* values, std::size_t count, MaskWord chosen, const float* others, float* joined) {
#if defined(__x86_64__)
  if (count == word_bits && __builtin_cpu_supports("avx512bw")) return join_avx512(values, chosen, others, joined);
#endif
  std::copy_n(values, count, joined);
  for (; chosen != 0; chosen &= chosen - 1) joined[std::countr_zero(chosen)] = *others++;
}

}  // namespace scape::inline v0::detail
