#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define SCAPE_HOST_DEVICE __host__ __device__
#else
/// Marks functions that kernels call too: user-defined scores and rules.
#define SCAPE_HOST_DEVICE
#endif

namespace scape::inline v0 {

// Element-wise mathematics is written with these, so that the host's results are the device's, bit for bit: every
// operation is rounded by itself, never contracted into a fused multiply-add, whatever flags the caller compiles with.
// (GCC contracts across functions where the target has FMA: host loops switch that off, see SCAPE_HOST_LOOP.)
#if defined(__CUDA_ARCH__)
SCAPE_HOST_DEVICE inline float multiply(float a, float b) { return __fmul_rn(a, b); }
SCAPE_HOST_DEVICE inline float add(float a, float b) { return __fadd_rn(a, b); }
SCAPE_HOST_DEVICE inline float subtract(float a, float b) { return __fsub_rn(a, b); }
SCAPE_HOST_DEVICE inline float divide(float a, float b) { return __fdiv_rn(a, b); }
SCAPE_HOST_DEVICE inline float square_root(float a) { return __fsqrt_rn(a); }
SCAPE_HOST_DEVICE inline std::uint32_t bits_of(float a) { return __float_as_uint(a); }
SCAPE_HOST_DEVICE inline float float_of(std::uint32_t bits) { return __uint_as_float(bits); }
#else
SCAPE_HOST_DEVICE inline float multiply(float a, float b) { return a * b; }
SCAPE_HOST_DEVICE inline float add(float a, float b) { return a + b; }
SCAPE_HOST_DEVICE inline float subtract(float a, float b) { return a - b; }
SCAPE_HOST_DEVICE inline float divide(float a, float b) { return a / b; }
SCAPE_HOST_DEVICE inline float square_root(float a) { return std::sqrt(a); }
SCAPE_HOST_DEVICE inline std::uint32_t bits_of(float a) { return std::bit_cast<std::uint32_t>(a); }
SCAPE_HOST_DEVICE inline float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
#endif

/// a * b + c with two roundings.
SCAPE_HOST_DEVICE inline float multiply_add(float a, float b, float c) { return add(multiply(a, b), c); }

/// condition ? a : b without a branch: GCC does not vectorise loops over the plain form, since either side might trap.
SCAPE_HOST_DEVICE inline float choose(bool condition, float a, float b) {
  const std::uint32_t x = bits_of(a), y = bits_of(b);
  return float_of(y ^ ((x ^ y) & (0u - static_cast<std::uint32_t>(condition))));
}

/// |a|
SCAPE_HOST_DEVICE inline float magnitude(float a) { return float_of(bits_of(a) & 0x7fffffffu); }

/// 1 for NaN and infinity, else 0.
SCAPE_HOST_DEVICE inline std::uint32_t is_nonfinite(float a) { return (bits_of(a) & 0x7f800000u) == 0x7f800000u; }

/// The integer by which scores are ranked: the bits of |score|; every NaN is the largest, -0 equals +0, denormals
/// count.
SCAPE_HOST_DEVICE inline std::uint32_t score_key(float score) {
  const std::uint32_t bits = bits_of(score) & 0x7fffffffu;
  return bits > 0x7f800000u ? 0x7fffffffu : bits;
}

}  // namespace scape::inline v0
