#pragma once

#include <scape/mask_plan.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Between bits and bytes, 64 at once, where the processor has masks for that. What is left is the caller's.

namespace scape::inline v0::detail {

#if defined(__x86_64__)
// Targets and inlining as in SetBits::find_avx512.
[[gnu::noinline, gnu::target("avx2,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl")]] inline void
pack_bytes_avx512(const std::uint8_t* bytes, MaskWord* words, std::size_t pairs) {
  for (std::size_t i = 0; i < pairs; ++i) {
    const __m512i flags = _mm512_loadu_si512(bytes + 64 * i);
    const std::uint64_t pair = _mm512_test_epi8_mask(flags, flags);
    std::memcpy(words + 2 * i, &pair, sizeof pair);
  }
}

[[gnu::noinline, gnu::target("avx2,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl")]] inline void
unpack_bytes_avx512(const MaskWord* words, std::size_t shift, std::uint8_t* bytes, std::size_t pairs) {
  const __m512i ones = _mm512_set1_epi8(1);
  for (std::size_t i = 0; i < pairs; ++i) {
    std::uint64_t pair;
    std::memcpy(&pair, words + 2 * i, sizeof pair);
    if (shift != 0) pair = pair >> shift | std::uint64_t{words[2 * i + 2]} << (64 - shift);
    _mm512_storeu_si512(bytes + 64 * i, _mm512_maskz_mov_epi8(pair, ones));
  }
}
#endif

/// Bit j of words[i] = (bytes[32 * i + j] != 0) for the first words; returns how many of `count` those are.
inline std::size_t pack_bytes([[maybe_unused]] const std::uint8_t* bytes, [[maybe_unused]] MaskWord* words,
                              [[maybe_unused]] std::size_t count) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw")) {
    pack_bytes_avx512(bytes, words, count / 2);
    return count / 2 * 2;
  }
#endif
  return 0;
}

/// bytes[i] = bit shift + i of words, for the first bytes; returns how many times 32 of `count` those are. shift < 32.
inline std::size_t unpack_bytes([[maybe_unused]] const MaskWord* words, [[maybe_unused]] std::size_t shift,
                                [[maybe_unused]] std::uint8_t* bytes, [[maybe_unused]] std::size_t count) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw")) {
    unpack_bytes_avx512(words, shift, bytes, count / 2);
    return count / 2 * 2;
  }
#endif
  return 0;
}

}  // namespace scape::inline v0::detail
