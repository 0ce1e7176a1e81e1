#pragma once

#include <scape/error.hpp>
#include <scape/mask_plan.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <string>

namespace scape::inline v0 {

/// Words whose set bits are counted at once where set bits are numbered: 4 KiB.
inline constexpr std::size_t count_words = 1024;

/// Scratch to number the set bits of so many words: 8 bytes for every 32768 bits.
constexpr std::size_t count_workspace_bytes(std::size_t words) noexcept {
  return (words / count_words + (words % count_words != 0)) * sizeof(std::size_t);
}

/// The form of the Elias-Fano code of a mask: what depends on its size and on the number of set bits only.
///
/// With l = floor(log2(bits / kept)), the i-th set bit, at position p, is p mod 2^l in l bits from i * l on and, in the
/// high part, a one at p / 2^l + i: kept * l bits and kept + ceil(bits / 2^l) bits, each padded to whole words. At most
/// 12 % above the entropy of random positions; 0.525 bits a parameter at density 0.1, 0.0856 at 0.01, 0.0120 at 0.001.
/// Worth its while below density 1/4; at more a bitmap is smaller. docs/algorithm.md, "Mask on the wire"; Elias, J. ACM
/// 21(2), 1974.
class EliasFano {
 public:
  /// Throws std::invalid_argument where kept > bits.
  constexpr EliasFano(std::size_t bits, std::size_t kept) : bits_(bits), kept_(kept) {
    if (kept > bits) expects(false, "kept", kept, "must be at most bits = ", bits);
  }

  constexpr std::size_t bits() const noexcept { return bits_; }
  constexpr std::size_t kept() const noexcept { return kept_; }

  /// Bits of a position that are stored as they are.
  constexpr std::size_t low_bits() const noexcept {
    return kept_ == 0 ? 0 : static_cast<std::size_t>(std::bit_width(bits_ / kept_)) - 1;
  }
  /// Bits of the high part, without its padding.
  constexpr std::size_t high_bits() const noexcept { return kept_ == 0 ? 0 : kept_ + ((bits_ - 1) >> low_bits()) + 1; }

  /// Words of the two parts, and of the whole code: the low part comes first.
  constexpr std::size_t low_words() const noexcept { return words_for(kept_ * low_bits()); }
  constexpr std::size_t high_words() const noexcept { return words_for(high_bits()); }
  constexpr std::size_t words() const noexcept { return low_words() + high_words(); }

  /// Scratch of encoding and of decoding.
  constexpr std::size_t workspace_bytes() const noexcept {
    return count_workspace_bytes(std::max(words_for(bits_), high_words()));
  }

  friend constexpr bool operator==(const EliasFano&, const EliasFano&) = default;

 private:
  std::size_t bits_, kept_;
};

}  // namespace scape::inline v0
