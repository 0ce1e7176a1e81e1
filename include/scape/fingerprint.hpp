#pragma once

#include <bit>
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

}  // namespace scape::inline v0
