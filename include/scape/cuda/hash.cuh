#pragma once

#include <scape/communicator.hpp>
#include <scape/cuda/launch.cuh>
#include <scape/cuda/stream.hpp>
#include <scape/cuda/update.cuh>
#include <scape/fingerprint.hpp>

#include <algorithm>
#include <cstddef>
#include <span>

namespace scape::inline v0 {
namespace detail {

template <int = 0>  // inline, which kernels cannot be
__global__ void __launch_bounds__(block_threads) hash_kernel(const MaskWord* words, std::size_t count, MaskWord* hash) {
  MaskWord first = 0, second = 0;
  const std::size_t stride = gridDim.x * std::size_t{block_threads};
  for (std::size_t i = blockIdx.x * std::size_t{block_threads} + threadIdx.x; i < count; i += stride) {
    first += HashWord::first(i, words[i]);
    second += HashWord::second(i, words[i]);
  }
  first = __reduce_add_sync(~0u, first);
  second = __reduce_add_sync(~0u, second);
  if (threadIdx.x % warp_threads != 0) return;
  atomicAdd(hash, first);
  atomicAdd(hash + 1, second);
}

}  // namespace detail

// The same function as in host/hash.hpp, with the same results to the bit.
inline void hash_words(std::span<const MaskWord> words, std::span<MaskWord, 2> hash, const CudaStream& stream) {
  fill_values(std::span<MaskWord>(hash), MaskWord{0}, stream);
  const std::size_t blocks = std::min<std::size_t>(1024, detail::blocks_for(words.size(), detail::block_threads));
  detail::launch(detail::hash_kernel<>, blocks, detail::block_threads, stream, words.data(), words.size(), hash.data());
}

}  // namespace scape::inline v0
