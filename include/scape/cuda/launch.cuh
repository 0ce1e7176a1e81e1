#pragma once

#include <scape/cuda/stream.hpp>

#include <cstddef>

namespace scape::inline v0 {
namespace detail {

inline constexpr unsigned block_threads = 256;

// One block for each of `blocks`; none is no launch. Throws what the launch reports.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), std::size_t blocks, unsigned threads, const CudaStream& stream,
            Arguments... arguments) {
  if (blocks == 0) return;
  expects(blocks <= 0x7fffffff, "blocks", blocks, "a grid has at most 2^31 - 1");
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream.handle()>>>(arguments...);
  check(cudaGetLastError(), "kernel launch");
}

}  // namespace detail
}  // namespace scape::inline v0
