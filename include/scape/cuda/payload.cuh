#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>
#include <scape/cuda/launch.cuh>
#include <scape/cuda/stream.hpp>
#include <scape/cuda/update.cuh>
#include <scape/payload_format.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace scape::inline v0 {
namespace detail {

// A thread has four values, a warp a group, a block of threads a block of the payload.
inline constexpr unsigned payload_threads = payload_block / quad;
static_assert(scale_group == warp_threads * quad);

// The four values of this thread in an array of `count`; those behind its end are 0.
class PayloadQuad {
 public:
  Quad<float> values = {};

  __device__ explicit PayloadQuad(std::size_t count)
      : begin_(blockIdx.x * payload_block + threadIdx.x * quad), count_(count) {}
  // In an array of parts, behind whose ends they are 0, too.
  __device__ explicit PayloadQuad(PayloadParts parts) {
    const std::size_t blocks = parts.groups / groups_per_block, part = blockIdx.x / blocks;
    begin_ = part * parts.stride + blockIdx.x % blocks * payload_block + threadIdx.x * quad;
    count_ = (part + 1) * parts.stride;
  }
  __device__ void load(const float* from) {
    if (begin_ + quad <= count_ && takes_quads(from + begin_)) {
      values = *reinterpret_cast<const Quad<float>*>(from + begin_);
    } else {
      for (unsigned i = 0; i < quad; ++i)
        if (begin_ + i < count_) values.values[i] = from[begin_ + i];
    }
  }
  __device__ void store(float* to) const {
    if (begin_ + quad <= count_ && takes_quads(to + begin_)) {
      *reinterpret_cast<Quad<float>*>(to + begin_) = values;
    } else {
      for (unsigned i = 0; i < quad; ++i)
        if (begin_ + i < count_) to[begin_ + i] = values.values[i];
    }
  }

 private:
  std::size_t begin_, count_;
};

template <class T>
struct CodeQuad {
  Quad<T> codes;
  std::uint32_t scale = 0;

  __device__ void load(const MaskWord* from) {
    const std::byte* const bytes = reinterpret_cast<const std::byte*>(from);
    codes = *reinterpret_cast<const Quad<T>*>(bytes + codes_of_group<T>(group()) + place());
    if constexpr (PayloadCode<T>::has_scale)
      scale = *reinterpret_cast<const std::uint8_t*>(bytes + scale_of_group<T>(group()));
  }
  __device__ void store(MaskWord* to) const {
    std::byte* const bytes = reinterpret_cast<std::byte*>(to);
    *reinterpret_cast<Quad<T>*>(bytes + codes_of_group<T>(group()) + place()) = codes;
    if constexpr (PayloadCode<T>::has_scale)
      if (threadIdx.x % warp_threads == 0)
        *reinterpret_cast<std::uint8_t*>(bytes + scale_of_group<T>(group())) = static_cast<std::uint8_t>(scale);
  }
  __device__ float decode(unsigned i) const { return PayloadCode<T>::decode(codes.values[i], scale); }

  // By whole warps. Leaves in `values` what was rounded away.
  __device__ void encode(PayloadQuad& values) {
    std::uint32_t largest = 0;
    for (const float value : values.values.values) largest = max(largest, finite_magnitude(value));
    scale = PayloadCode<T>::scale(__reduce_max_sync(~0u, largest));
    for (unsigned i = 0; i < quad; ++i) {
      float& value = values.values.values[i];
      codes.values[i] = PayloadCode<T>::encode(value, scale);
      value = rounding_error(value, decode(i));
    }
  }

 private:
  __device__ static std::size_t group() { return blockIdx.x * groups_per_block + threadIdx.x / warp_threads; }
  __device__ static std::size_t place() { return threadIdx.x % warp_threads * sizeof(Quad<T>); }
};

template <class T>
__global__ void __launch_bounds__(payload_threads)
    encode_payload_kernel(const float* payload, PayloadParts parts, MaskWord* codes, float* errors) {
  PayloadQuad values(parts);
  CodeQuad<T> coded;
  values.load(payload);
  coded.encode(values);
  coded.store(codes);
  values.store(errors);
}

// Leaves the mean of all ranks' codes in `sum`.
template <class T>
__device__ void average_codes(const MaskWord* parts, std::size_t ranks, std::size_t stride, PayloadQuad& sum) {
  CodeQuad<T> coded;
  coded.load(parts);
  for (unsigned i = 0; i < quad; ++i) sum.values.values[i] = coded.decode(i);
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    coded.load(parts + rank * stride);
    for (unsigned i = 0; i < quad; ++i) sum.values.values[i] = add(sum.values.values[i], coded.decode(i));
  }
  const float divisor = static_cast<float>(ranks);
  for (float& value : sum.values.values) value = divide(value, divisor);
}

template <class T>
__global__ void __launch_bounds__(payload_threads)
    average_payloads_kernel(const MaskWord* parts, std::size_t ranks, std::size_t stride, float* mean,
                            std::size_t count) {
  PayloadQuad sum(count);
  average_codes<T>(parts, ranks, stride, sum);
  for (float& value : sum.values.values) value = with_one_nan(value);
  sum.store(mean);
}

template <class T>
__global__ void __launch_bounds__(payload_threads)
    average_and_encode_kernel(const MaskWord* parts, std::size_t ranks, std::size_t stride, MaskWord* mean,
                              float* errors, std::size_t count) {
  PayloadQuad sum(count), error(count);
  CodeQuad<T> coded;
  average_codes<T>(parts, ranks, stride, sum);
  const float divisor = static_cast<float>(ranks);
  coded.encode(sum);
  coded.store(mean);
  error.load(errors);
  for (unsigned i = 0; i < quad; ++i)
    error.values.values[i] = multiply_add(divisor, sum.values.values[i], error.values.values[i]);
  error.store(errors);
}

template <class T>
__global__ void __launch_bounds__(payload_threads)
    decode_payload_kernel(const MaskWord* codes, float* payload, std::size_t count) {
  PayloadQuad values(count);
  CodeQuad<T> coded;
  coded.load(codes);
  for (unsigned i = 0; i < quad; ++i) values.values.values[i] = coded.decode(i);
  values.store(payload);
}

}  // namespace detail

// The same functions as in host/payload.hpp, with the same results to the bit. Codes begin at multiples of 8 bytes
// where the format is bfloat16.

inline void encode_payload(PayloadFormat format, std::span<const float> payload, std::size_t parts,
                           std::span<MaskWord> codes, std::span<float> errors, const CudaStream& stream) {
  const detail::PayloadParts split(format, payload.size(), codes.size(), parts);
  detail::with_code_of(format, [&]<class T>(std::type_identity<T>) {
    detail::launch(detail::encode_payload_kernel<T>, codes.size() / payload_block_words(format),
                   detail::payload_threads, stream, payload.data(), split, codes.data(), errors.data());
  });
}
inline void encode_payload(PayloadFormat format, std::span<const float> payload, std::span<MaskWord> codes,
                           std::span<float> errors, const CudaStream& stream) {
  encode_payload(format, payload, 1, codes, errors, stream);
}

inline void average_payloads(PayloadFormat format, std::span<const MaskWord> parts, std::size_t ranks,
                             std::span<MaskWord> mean, std::span<float> errors, const CudaStream& stream) {
  detail::with_code_of(format, [&]<class T>(std::type_identity<T>) {
    detail::launch(detail::average_and_encode_kernel<T>, mean.size() / payload_block_words(format),
                   detail::payload_threads, stream, parts.data(), ranks, parts.size() / ranks, mean.data(),
                   errors.data(), errors.size());
  });
}

inline void average_payloads(PayloadFormat format, std::span<const MaskWord> parts, std::size_t ranks,
                             std::span<float> mean, const CudaStream& stream) {
  detail::with_code_of(format, [&]<class T>(std::type_identity<T>) {
    detail::launch(detail::average_payloads_kernel<T>, parts.size() / ranks / payload_block_words(format),
                   detail::payload_threads, stream, parts.data(), ranks, parts.size() / ranks, mean.data(),
                   mean.size());
  });
}

inline void decode_payload(PayloadFormat format, std::span<const MaskWord> codes, std::span<float> payload,
                           const CudaStream& stream) {
  detail::with_code_of(format, [&]<class T>(std::type_identity<T>) {
    detail::launch(detail::decode_payload_kernel<T>, codes.size() / payload_block_words(format),
                   detail::payload_threads, stream, codes.data(), payload.data(), payload.size());
  });
}

}  // namespace scape::inline v0
