#pragma once

#include <scape/arithmetic.hpp>
#include <scape/host/loop.hpp>
#include <scape/mask_plan.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace scape::inline v0::detail {

inline constexpr std::uint32_t key_end = 0x80000000;       // above all keys
inline constexpr std::uint32_t infinite_key = 0x7f800000;  // only NaN's is larger

/// Keys [low, high).
struct KeyRange {
  std::uint32_t low, high;
  std::uint32_t width() const noexcept { return high - low; }
  bool operator==(const KeyRange&) const = default;
};

/// How many keys are above a range, and how many are in it or above.
struct KeyCounts {
  std::size_t above = 0, reached = 0;
  std::size_t inside() const noexcept { return reached - above; }
  void operator+=(const KeyCounts& other) noexcept {
    above += other.above;
    reached += other.reached;
  }
};

#if defined(__x86_64__)
// Targets and inlining as in SetBits::find_avx512.
[[gnu::noinline, gnu::target("avx2,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl")]] inline KeyCounts
mark_range_avx512(const float* scores, std::size_t count, KeyRange range, MaskWord* above, MaskWord* reached) {
  const __m512i sign_out = _mm512_set1_epi32(0x7fffffff);
  const __m512i low = _mm512_set1_epi32(static_cast<int>(range.low));
  const __m512i high = _mm512_set1_epi32(static_cast<int>(range.high));
  KeyCounts counts;
  for (std::size_t i = 0; i < count; i += word_bits) {
    const __m512i first = _mm512_and_si512(sign_out, _mm512_loadu_si512(scores + i));
    const __m512i second = _mm512_and_si512(sign_out, _mm512_loadu_si512(scores + i + 16));
    const MaskWord larger =
        _mm512_kunpackw(_mm512_cmpge_epu32_mask(second, high), _mm512_cmpge_epu32_mask(first, high));
    const MaskWord inside = _mm512_kunpackw(_mm512_cmpge_epu32_mask(second, low), _mm512_cmpge_epu32_mask(first, low));
    *above++ = larger;
    *reached++ = inside;
    counts.above += static_cast<std::size_t>(std::popcount(larger));
    counts.reached += static_cast<std::size_t>(std::popcount(inside));
  }
  return counts;
}
#endif

SCAPE_HOST_LOOP inline KeyCounts mark_range_plain(const float* scores, std::size_t count, KeyRange range,
                                                  MaskWord* above, MaskWord* reached) {
  KeyCounts counts;
  for (std::size_t i = 0; i < count; i += word_bits) {
    MaskWord larger = 0, inside = 0;
    for (std::size_t j = 0; j < word_bits; ++j) {
      const std::uint32_t bits = bits_of(scores[i + j]) & 0x7fffffff;
      larger |= static_cast<MaskWord>(bits >= range.high) << j;
      inside |= static_cast<MaskWord>(bits >= range.low) << j;
    }
    *above++ = larger;
    *reached++ = inside;
    counts.above += static_cast<std::size_t>(std::popcount(larger));
    counts.reached += static_cast<std::size_t>(std::popcount(inside));
  }
  return counts;
}

/// Of as many scores as fill words: one bit each for a key above the range, and for one inside it or above. Compares
/// the scores' bits, of which those of all NaNs stand for the one largest key.
inline KeyCounts mark_range(const float* scores, std::size_t count, KeyRange range, MaskWord* above,
                            MaskWord* reached) {
  const auto bits_from = [](std::uint32_t key) { return key == key_end ? key : std::min(key, infinite_key + 1); };
  range = {bits_from(range.low), bits_from(range.high)};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw")) return mark_range_avx512(scores, count, range, above, reached);
#endif
  return mark_range_plain(scores, count, range, above, reached);
}

}  // namespace scape::inline v0::detail
