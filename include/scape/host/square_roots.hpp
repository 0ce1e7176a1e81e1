#pragma once

#include <scape/arithmetic.hpp>

#include <cstddef>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace scape::inline v0::detail {

inline constexpr std::size_t update_batch = 64;  // elements whose square roots are taken at once

#if defined(__x86_64__) && defined(__GNUC__)
[[gnu::target("avx")]] inline void take_square_roots_avx(float* values) {
  for (std::size_t i = 0; i < update_batch; i += 8)
    _mm256_storeu_ps(values + i, _mm256_sqrt_ps(_mm256_loadu_ps(values + i)));
}
#endif

// Apart, since GCC does not vectorise std::sqrt, which may set errno.
inline void take_square_roots(float (&values)[update_batch]) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx")) return take_square_roots_avx(values);
#endif
  for (float& value : values) value = square_root(value);
}

}  // namespace scape::inline v0::detail
