// float16, bfloat16, e5m2, e4m3: every number there and back, rounding against double arithmetic and against CUDA's.

#include "backends.hpp"
#include "narrow_reference.hpp"
#include "support.hpp"

#include <scape/scape.hpp>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

using scape::bfloat16;
using scape::e4m3;
using scape::e5m2;
using scape::float16;

template <class T>
struct Narrow {
  const float* values;
  T* codes;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const { codes[i] = T(values[i]); }
};
template <class T>
struct Widen {
  const T* codes;
  float* values;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const { values[i] = static_cast<float>(codes[i]); }
};

template <class T, class Backend>
std::vector<T> narrowed(Backend& backend, const Floats& values) {
  const auto from = backend.array(values);
  const auto to = backend.array(std::vector<T>(values.size()));
  scape::for_each(values.size(), Narrow<T>{from.span().data(), to.span().data()}, backend.stream);
  return backend.read(to);
}
template <class T, class Backend>
Floats widened(Backend& backend, const std::vector<T>& codes) {
  const auto from = backend.array(codes);
  const auto to = backend.array(Floats(codes.size()));
  scape::for_each(codes.size(), Widen<T>{from.span().data(), to.span().data()}, backend.stream);
  return backend.read(to);
}

template <class T>
std::vector<T> all_codes() {
  std::vector<T> codes(2 * Format<T>::sign);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i].bits = static_cast<decltype(T::bits)>(i);
  return codes;
}

constexpr float infinity = std::numeric_limits<float>::infinity();

// Numbers, what lies halfway between two and beyond the largest, all neighbours of these, and of any bits.
template <class T>
Floats interesting_values() {
  Floats values = {0,
                   infinity,
                   std::numeric_limits<float>::quiet_NaN(),
                   std::numeric_limits<float>::signaling_NaN(),
                   std::bit_cast<float>(0x7fffffffu),
                   std::bit_cast<float>(1u),
                   std::numeric_limits<float>::max()};
  for (std::uint32_t code = 0; code < Format<T>::finite; ++code) {
    const double number = number_of<T>(code), next = number_of<T>(code + 1);
    for (const double exact : {number, (number + next) / 2}) {
      const float value = static_cast<float>(exact);
      values.insert(values.end(), {value, std::nextafter(value, infinity), std::nextafter(value, -infinity)});
    }
  }
  for (std::size_t i = 0; i < 300'000; ++i) values.push_back(std::bit_cast<float>(random_bits(i)));
  const std::size_t count = values.size();
  for (std::size_t i = 0; i < count; ++i) values.push_back(-values[i]);
  return values;
}

template <class T>
std::uint32_t expected_code(float value) {
  const std::uint32_t sign = std::signbit(value) ? Format<T>::sign : 0;
  if (std::isnan(value)) return Format<T>::nan;
  if constexpr (sizeof(T) == 1) return sign | saturated_code<T>(std::abs(static_cast<double>(value)));
  return sign | (std::isinf(value) ? Format<T>::finite : nearest_code<T>(std::abs(static_cast<double>(value))));
}

// bfloat16 keeps a NaN's sign and first bits.
template <class T>
bool is_nan(T code) {
  return (code.bits & (Format<T>::sign - 1)) > Format<T>::finite - (std::is_same_v<T, e4m3> ? 1 : 0);
}
template <class T>
bool same_code(T a, T b) {
  return a == b || (std::is_same_v<T, bfloat16> && is_nan(a) && is_nan(b));
}

template <class T, class Backend>
void check_widening(Backend& backend) {
  const std::vector<T> codes = all_codes<T>();
  const Floats values = widened(backend, codes);
  const std::vector<T> back = narrowed<T>(backend, values);
  std::size_t wrong = 0, nans = 0;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const std::uint32_t magnitude = codes[i].bits & (Format<T>::sign - 1);
    const bool negative = codes[i].bits & Format<T>::sign;
    if (is_nan(codes[i])) {
      ++nans;
      wrong += !std::isnan(values[i]) || !is_nan(back[i]);
    } else if (magnitude == Format<T>::finite) {
      wrong += values[i] != (negative ? -infinity : infinity);
    } else {
      const float exact = static_cast<float>(number_of<T>(magnitude));
      wrong += std::bit_cast<std::uint32_t>(values[i]) != std::bit_cast<std::uint32_t>(negative ? -exact : exact);
      wrong += back[i] != codes[i];
    }
  }
  CHECK(wrong == 0);
  CHECK(nans == 2 * (Format<T>::sign - Format<T>::finite - (std::is_same_v<T, e4m3> ? 0 : 1)));
}

template <class T, class Backend>
void check_rounding(Backend& backend) {
  const Floats values = interesting_values<T>();
  const std::vector<T> codes = narrowed<T>(backend, values);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const T expected = std::bit_cast<T>(static_cast<decltype(T::bits)>(expected_code<T>(values[i])));
    if (same_code(codes[i], expected)) continue;
    if (++wrong > 5) continue;
    CAPTURE(values[i]);
    CHECK(codes[i].bits == expected.bits);
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE_TEMPLATE("number formats: all codes mean what they should, and come back", Backend, SCAPE_BACKENDS) {
  Backend backend;
  check_widening<float16>(backend);
  check_widening<bfloat16>(backend);
  check_widening<e5m2>(backend);
  check_widening<e4m3>(backend);
}

TEST_CASE_TEMPLATE("number formats: to the nearest, ties to even; 8 bits saturate, NaNs stay", Backend,
                   SCAPE_BACKENDS) {
  Backend backend;
  SUBCASE("float16") { check_rounding<float16>(backend); }
  SUBCASE("bfloat16") { check_rounding<bfloat16>(backend); }
  SUBCASE("e5m2") { check_rounding<e5m2>(backend); }
  SUBCASE("e4m3") { check_rounding<e4m3>(backend); }
}

TEST_CASE("number formats: known values") {
  CHECK(static_cast<float>(float16(65519.0f)) == 65504);
  CHECK(static_cast<float>(float16(65520.0f)) == infinity);
  CHECK(static_cast<float>(e5m2(1e9f)) == 57344);
  CHECK(static_cast<float>(e5m2(-infinity)) == -57344);
  CHECK(static_cast<float>(e4m3(1e9f)) == 448);
  CHECK(static_cast<float>(e4m3(infinity)) == 448);
  CHECK(static_cast<float>(e4m3(1.06f)) == 1.0f);
  CHECK(static_cast<float>(e4m3(1.07f)) == 1.125f);
}

#if defined(__CUDACC__)

namespace {

template <class T, class F>
void check_against_cuda(F cuda_code) {
  std::size_t wrong = 0;
  for (const float value : interesting_values<T>()) {
    const T code(value);
    wrong += !same_code(code, std::bit_cast<T>(static_cast<decltype(T::bits)>(cuda_code(value))));
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("cuda: number formats have the bits of __half, __nv_bfloat16, __nv_fp8_e5m2 and __nv_fp8_e4m3") {
  check_against_cuda<float16>([](float x) { return std::bit_cast<std::uint16_t>(__float2half_rn(x)); });
  check_against_cuda<bfloat16>([](float x) { return std::bit_cast<std::uint16_t>(__float2bfloat16_rn(x)); });
  check_against_cuda<e5m2>([](float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2); });
  check_against_cuda<e4m3>([](float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); });
}

#endif
