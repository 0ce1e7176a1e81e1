#pragma once

#include <scape/host/loop.hpp>
#include <scape/mask_plan.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace scape::inline v0::detail {

/// Where the set bits of at most tile_bits bits are: their numbers, ascending. 8 KiB, written anew by find().
///
/// Found without a branch on the bits themselves, which no predictor foresees.
class SetBits {
 public:
  static constexpr std::size_t words = tile_bits / word_bits;

  /// Of `count` words, at most `words`.
  void find(const MaskWord* first, std::size_t count) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512vbmi2")) return find_avx512(first, count);
#endif
    find_plain(first, count);
  }

  std::size_t size() const noexcept { return size_; }
  std::size_t operator[](std::size_t i) const noexcept { return numbers_[i]; }
  const std::uint16_t* begin() const noexcept { return numbers_; }
  const std::uint16_t* end() const noexcept { return numbers_ + size_; }

 private:
  static constexpr std::size_t pair_bits = 2 * word_bits;

  // Writes four numbers at once, as most pairs of words have no more, and goes on behind those that are bits.
  SCAPE_HOST_LOOP void find_plain(const MaskWord* first, std::size_t count) {
    std::uint16_t* next = numbers_;
    for (std::size_t i = 0; i < count; i += 2) {
      std::uint64_t bits = first[i] | std::uint64_t{i + 1 < count ? first[i + 1] : 0} << word_bits;
      const int found = std::popcount(bits);
      std::uint16_t* place = next;
      do {
        for (int j = 0; j < 4; ++j, bits &= bits - 1) {
          const int number = std::countr_zero(bits | std::uint64_t{1} << (pair_bits - 1));  // never of 0: no branch
          *place++ = static_cast<std::uint16_t>(i * word_bits + static_cast<std::size_t>(number));
        }
      } while (bits != 0);
      next += found;
    }
    size_ = static_cast<std::size_t>(next - numbers_);
  }

#if defined(__x86_64__)
  [[gnu::target("avx2")]] static void write16(std::uint16_t* to, std::uint64_t first, __m128i bytes) {
    const __m256i numbers = _mm256_add_epi16(_mm256_set1_epi16(static_cast<short>(first)), _mm256_cvtepu8_epi16(bytes));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), numbers);
  }

  // First the pairs of words in which there are any, then the numbers in each: the bytes 0 to 63, compressed.
  // Not arch=..., which would take away what the command line allows and the intrinsics then use. Not inlined, since
  // clones of the caller for other targets come later.
  [[gnu::noinline, gnu::target("avx2,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2")]] void
  find_avx512(const MaskWord* first, std::size_t count) {
    std::uint64_t pairs[words / 2 + 8], pairs_at[words / 2 + 8];
    std::size_t used = 0;
    __m512i at = _mm512_setr_epi64(0, 64, 128, 192, 256, 320, 384, 448);
    for (std::size_t i = 0; i < count; i += 16) {
      const std::uint32_t here = count - i < 16 ? (1u << (count - i)) - 1 : 0xffff;
      const __m512i bits = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(here), first + i);
      const __mmask8 any = _mm512_test_epi64_mask(bits, bits);
      _mm512_storeu_si512(pairs + used, _mm512_maskz_compress_epi64(any, bits));
      _mm512_storeu_si512(pairs_at + used, _mm512_maskz_compress_epi64(any, at));
      used += static_cast<std::size_t>(std::popcount(any));
      at = _mm512_add_epi64(at, _mm512_set1_epi64(512));
    }

    std::uint8_t bytes[pair_bits];
    for (std::size_t i = 0; i < pair_bits; ++i) bytes[i] = static_cast<std::uint8_t>(i);
    const __m512i all = _mm512_loadu_si512(bytes);
    std::uint16_t* next = numbers_;
    for (std::size_t i = 0; i < used; ++i) {
      const __m512i in = _mm512_maskz_compress_epi8(pairs[i], all);
      const std::size_t found = static_cast<std::size_t>(std::popcount(pairs[i]));
      write16(next, pairs_at[i], __builtin_shufflevector(in, in, 0, 1));
      if (found > 16) {
        write16(next + 16, pairs_at[i], __builtin_shufflevector(in, in, 2, 3));
        write16(next + 32, pairs_at[i], __builtin_shufflevector(in, in, 4, 5));
        write16(next + 48, pairs_at[i], __builtin_shufflevector(in, in, 6, 7));
      }
      next += found;
    }
    size_ = static_cast<std::size_t>(next - numbers_);
  }
#endif

  std::size_t size_ = 0;
  std::uint16_t numbers_[tile_bits + pair_bits];  // what is written at once may run past the last number
};

}  // namespace scape::inline v0::detail
