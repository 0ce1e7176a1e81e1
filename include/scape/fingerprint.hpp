#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>

namespace scape::inline v0 {

/// A 64-bit hash of the numbers fed to it, in order: ranks compare it to see whether they agree. Not cryptographic.
class Fingerprint {
 public:
  constexpr Fingerprint& add(std::uint64_t value) noexcept {
    hash_ = (hash_ ^ value) * 0x9e3779b97f4a7c15;
    hash_ ^= hash_ >> 32;
    return *this;
  }
  constexpr Fingerprint& add(double value) noexcept {
    return add(std::bit_cast<std::uint64_t>(value + 0.0));
  }  // -0 is 0
  constexpr std::uint64_t value() const noexcept { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325;
};

namespace detail {

// Adds a hash of each word and its place to two sums. A changed word changes its term, since the steps are invertible.
struct HashWord {
  SCAPE_HOST_DEVICE static MaskWord first(std::size_t i, MaskWord word) {
    return mixed(word + static_cast<MaskWord>(i) * 0x9e3779b1u, 0x85ebca6bu);
  }
  SCAPE_HOST_DEVICE static MaskWord second(std::size_t i, MaskWord word) {
    return mixed(word ^ static_cast<MaskWord>(i) * 0x27d4eb2fu, 0xc2b2ae35u);
  }

 private:
  SCAPE_HOST_DEVICE static MaskWord mixed(MaskWord word, MaskWord factor) {
    word ^= word >> 16;
    word *= factor;
    return word ^ word >> 13;
  }
};

}  // namespace detail
}  // namespace scape::inline v0
