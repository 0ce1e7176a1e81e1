#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>
#include <scape/cuda/launch.cuh>
#include <scape/cuda/stream.hpp>
#include <scape/cuda/update.cuh>

#include <algorithm>
#include <cstddef>
#include <span>

namespace scape::inline v0 {
namespace detail {

template <class G>
__global__ void __launch_bounds__(block_threads) nonfinite_kernel(const G* values, std::size_t count, MaskWord* flag) {
  std::uint32_t found = 0;
  const std::size_t stride = gridDim.x * std::size_t{block_threads};
#pragma unroll 4
  for (std::size_t i = blockIdx.x * std::size_t{block_threads} + threadIdx.x; i < count; i += stride)
    found |= is_nonfinite(static_cast<float>(values[i]));
  if (__syncthreads_or(static_cast<int>(found)) != 0 && threadIdx.x == 0) atomicOr(flag, 1u);
}

}  // namespace detail

// The same function as in host/finite.hpp.
template <class G>
void find_nonfinite(std::span<const G> values, std::span<MaskWord, 1> flag, const CudaStream& stream) {
  fill_values(std::span<MaskWord>(flag), MaskWord{0}, stream);
  const std::size_t blocks = std::min<std::size_t>(1024, detail::blocks_for(values.size(), detail::block_threads));
  detail::launch(detail::nonfinite_kernel<G>, blocks, detail::block_threads, stream, values.data(), values.size(),
                 flag.data());
}

}  // namespace scape::inline v0
