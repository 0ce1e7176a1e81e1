#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>
#include <scape/host/loop.hpp>
#include <scape/host/stream.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace scape::inline v0 {
namespace detail {

template <class G>
SCAPE_HOST_LOOP bool any_nonfinite(const G* values, std::size_t count) {
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found |= is_nonfinite(static_cast<float>(values[i]));
  return found != 0;
}

}  // namespace detail

/// flag = 1 where a value is NaN or infinite, else 0. Reads every value once.
template <class G>
void find_nonfinite(std::span<const G> values, std::span<MaskWord, 1> flag, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    constexpr std::size_t run = 65536;
    std::atomic<MaskWord> found = 0;
    pool.run((values.size() + run - 1) / run, [&](std::size_t i) {
      if (detail::any_nonfinite(values.data() + i * run, std::min(run, values.size() - i * run))) found = 1;
    });
    flag[0] = found;
  });
}

}  // namespace scape::inline v0
