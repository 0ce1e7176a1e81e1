#pragma once

#include <scape/arithmetic.hpp>
#include <scape/cuda/launch.cuh>
#include <scape/cuda/stream.hpp>
#include <scape/mask_plan.hpp>
#include <scape/residual_store.hpp>
#include <scape/step_scalars.hpp>

#include <cub/block/block_scan.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace scape::inline v0 {

namespace detail {

inline constexpr unsigned warp_threads = 32;
inline constexpr unsigned tile_words = static_cast<unsigned>(tile_bits / word_bits);

// A mask as kernels take it.
struct DeviceMask {
  const Tile* tiles;
  const Segment* segments;
  const MaskWord* words;
  const std::size_t* offsets;
  const std::uint32_t* chosen;

  explicit DeviceMask(const MaskView& mask)
      : tiles(mask.plan.tiles.data()),
        segments(mask.plan.segments.data()),
        words(mask.words.data()),
        offsets(mask.offsets.data()),
        chosen(mask.chosen.data()) {}

  // The tile of this block.
  __device__ std::size_t tile() const { return chosen == nullptr ? blockIdx.x : chosen[blockIdx.x]; }
};

// The words of a block's tile and, before each, how many bits are set in the tile: no atomics, no look-back, since the
// tile's own offset is known.
struct TileBits {
  MaskWord words[tile_words];
  unsigned before[tile_words];

  __device__ void load(const Tile& tile, const MaskWord* mask) {
    using Scan = cub::BlockScan<unsigned, block_threads>;
    __shared__ typename Scan::TempStorage scratch;
    const unsigned i = threadIdx.x;
    const MaskWord word = i < words_for(tile.count) ? mask[tile.bit / word_bits + i] : 0;
    unsigned count = static_cast<unsigned>(__popc(word));
    Scan(scratch).ExclusiveSum(count, count);
    if (i < tile_words) {
      words[i] = word;
      before[i] = count;
    }
    __syncthreads();
  }
  __device__ bool kept(unsigned place) const { return words[place / word_bits] >> place % word_bits & 1; }
  __device__ std::size_t position(unsigned place) const {
    return before[place / word_bits] + __popc(words[place / word_bits] & ((1u << place % word_bits) - 1));
  }
};
static_assert(block_threads >= tile_words);

template <class F>
__global__ void transform_kernel(StepScalars* scalars, F f) {
  f(*scalars);
}

template <class F>
__global__ void for_each_kernel(std::size_t count, F f) {
  const std::size_t i = blockIdx.x * std::size_t{block_threads} + threadIdx.x;
  if (i < count) f(i);
}

// A few blocks that mostly find nothing to do.
template <class F>
__global__ void for_each_if_due_kernel(std::size_t count, F f, const StepScalars* scalars) {
  if (!f.is_due(*scalars)) return;
  const std::size_t stride = gridDim.x * std::size_t{block_threads};
  for (std::size_t i = blockIdx.x * std::size_t{block_threads} + threadIdx.x; i < count; i += stride) f(i, *scalars);
}

template <class T>
struct FillWith {
  T* values;
  T value;
  __device__ void operator()(std::size_t i) const { values[i] = value; }
};

// Four values with one access, where the address allows it.
template <class T>
struct alignas(4 * sizeof(T)) Quad {
  T values[4];
};
inline constexpr unsigned quad = 4;

template <class T>
__device__ bool takes_quads(const T* address) {
  return reinterpret_cast<std::uintptr_t>(address) % sizeof(Quad<T>) == 0;
}

// What lies by the previous mask's positions, of a block's tile: what payloads have rounded away, and what stands for
// the state of elements that were kept; either may be null.
struct NothingBefore {
  __device__ void load(const Tile&, std::size_t, const DeviceMask&, const float*, const float*) {}
  __device__ void join(unsigned, bool, float&, float&) const {}
};
struct TileBefore {
  TileBits bits;
  const float *errors, *returned;

  __device__ void load(const Tile& tile, std::size_t index, const DeviceMask& before, const float* all_errors,
                       const float* all_returned) {
    if (threadIdx.x == 0) {
      errors = all_errors == nullptr ? nullptr : all_errors + before.offsets[index];
      returned = all_returned == nullptr ? nullptr : all_returned + before.offsets[index];
    }
    bits.load(tile, before.words);  // and synchronises
  }
  __device__ void join(unsigned place, bool was_kept, float& g, float& a) const {
    if (!was_kept) return;
    const std::size_t position = bits.position(place);
    if (errors != nullptr) g = add(g, errors[position]);
    if (returned != nullptr) a = returned[position];
  }
};

template <class Before, class G, class F>
__global__ void __launch_bounds__(block_threads)
    accumulate_kernel(DeviceMask mask, DeviceMask previous, const float* errors, const float* returned,
                      const G* gradient, float* state, float* payload, float* moments, F rule,
                      const StepScalars* scalars) {
  __shared__ TileBits bits;
  __shared__ Before was;
  const Tile tile = mask.tiles[mask.tile()];
  bits.load(tile, mask.words);
  was.load(tile, mask.tile(), previous, errors, returned);
  const float scale = scalars->gradient_scale;
  const std::size_t offset = mask.offsets[mask.tile()];
  const MaskWord* const before = previous.words + tile.bit / word_bits;
  gradient += tile.element;
  state += tile.element;
  const auto accumulate = [&](unsigned place, bool was_kept, float g, float& a) {
    const bool is_kept = bits.kept(place);
    g = multiply(g, scale);
    was.join(place, was_kept, g, a);
    if (is_kept) {
      const std::size_t position = offset + bits.position(place);
      payload[position] = rule.payload(g, a, was_kept);
      if constexpr (requires { rule.moment(a, was_kept); }) moments[position] = rule.moment(a, was_kept);
    }
    a = rule.state(g, a, was_kept, is_kept);
  };
  if (tile.count == tile_bits && takes_quads(gradient) && takes_quads(state)) {
#pragma unroll
    for (unsigned first = 0; first < tile_bits; first += block_threads * quad) {
      const unsigned place = first + threadIdx.x * quad;
      const Quad<G> g = *reinterpret_cast<const Quad<G>*>(gradient + place);
      Quad<float> a = *reinterpret_cast<const Quad<float>*>(state + place);
      const MaskWord was_kept = before[place / word_bits] >> place % word_bits;
#pragma unroll
      for (unsigned i = 0; i < quad; ++i)
        accumulate(place + i, was_kept >> i & 1, static_cast<float>(g.values[i]), a.values[i]);
      *reinterpret_cast<Quad<float>*>(state + place) = a;
    }
  } else {
    for (unsigned place = threadIdx.x; place < tile.count; place += block_threads)
      accumulate(place, before[place / word_bits] >> place % word_bits & 1, static_cast<float>(gradient[place]),
                 state[place]);
  }
}

template <class F>
__global__ void __launch_bounds__(block_threads) for_each_kept_kernel(DeviceMask mask, F f) {
  __shared__ TileBits bits;
  const Tile tile = mask.tiles[mask.tile()];
  bits.load(tile, mask.words);
  const std::size_t offset = mask.offsets[mask.tile()];
  for (unsigned place = threadIdx.x; place < tile.count; place += block_threads)
    if (bits.kept(place)) f(tile.element + place, offset + bits.position(place));
}

template <class F>
__global__ void __launch_bounds__(block_threads) update_kernel(DeviceMask mask, F rule, const StepScalars* scalars) {
  __shared__ TileBits bits;
  const Tile tile = mask.tiles[mask.tile()];
  const Segment segment = mask.segments[tile.segment];
  rule.shift = tile.own - tile.element;
  const StepScalars now = *scalars;
  bits.load(tile, mask.words);
  const std::size_t offset = mask.offsets[mask.tile()];
  const bool every = rule.needs_every(segment);
#pragma unroll 4
  for (unsigned place = threadIdx.x; place < tile.count; place += block_threads) {
    const std::size_t element = tile.element + place;
    if (every) rule.every(element, now);
    if (bits.kept(place)) {
      const std::size_t position = offset + bits.position(place);
      rule.kept(element, position, segment.decay, square_root(rule.second_moment(element, position, now)), now);
    }
  }
}

template <int = 0>  // inline, which kernels cannot be
__global__ void fill_mask_kernel(const Tile* tiles, MaskWord* words) {
  const Tile tile = tiles[blockIdx.x];
  const unsigned i = threadIdx.x, whole = tile.count / word_bits, rest = tile.count % word_bits;
  if (i < whole) words[tile.bit / word_bits + i] = ~MaskWord{0};
  if (i == whole && rest != 0) words[tile.bit / word_bits + i] = (MaskWord{1} << rest) - 1;
}

// Adds up the lanes' sums by halves, the order that the host keeps too; the result is thread 0's.
__device__ inline double sum_of_lanes(double sum) {
  __shared__ double sums[block_threads];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned half = block_threads / 2; half != 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] = __dadd_rn(sums[threadIdx.x], sums[threadIdx.x + half]);
    __syncthreads();
  }
  return sums[0];
}

template <class F>
__global__ void __launch_bounds__(block_threads) squares_kernel(std::size_t count, F value, double* partials) {
  const std::size_t begin = blockIdx.x * tile_bits;
  double sum = 0;
  for (std::size_t place = threadIdx.x; place < tile_bits && begin + place < count; place += block_threads) {
    const double x = static_cast<double>(value(begin + place));
    sum = __dadd_rn(sum, __dmul_rn(x, x));
  }
  sum = sum_of_lanes(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <int = 0>  // inline, which kernels cannot be
__global__ void __launch_bounds__(block_threads) sum_kernel(const double* values, std::size_t count, double* result) {
  double sum = 0;
  for (std::size_t i = threadIdx.x; i < count; i += block_threads) sum = __dadd_rn(sum, values[i]);
  sum = sum_of_lanes(sum);
  if (threadIdx.x == 0) *result = sum;
}

// A thread a tile: for reports only, and in the host's order.
template <int = 0>  // inline, which kernels cannot be
__global__ void overlap_kernel(DeviceMask mask, std::size_t visits, std::size_t tiles, const MaskWord* before,
                               const float* payload, double* partials, StepScalars* scalars) {
  const std::size_t visit = blockIdx.x * std::size_t{block_threads} + threadIdx.x;
  if (visit >= visits) return;
  const std::size_t i = mask.chosen == nullptr ? visit : mask.chosen[visit];
  const Tile tile = mask.tiles[i];
  std::size_t position = mask.offsets[i];
  unsigned long long overlap = 0;
  double squares = 0, all = 0;
  for (std::size_t word = tile.bit / word_bits; word < tile.bit / word_bits + words_for(tile.count); ++word) {
    const MaskWord both = mask.words[word] & before[word];
    overlap += static_cast<unsigned>(__popc(both));
    for (MaskWord bits = mask.words[word]; bits != 0; bits &= bits - 1, ++position) {
      const double x = static_cast<double>(payload[position]);
      if (both >> (__ffs(static_cast<int>(bits)) - 1) & 1) squares = __dadd_rn(squares, __dmul_rn(x, x));
      all = __dadd_rn(all, __dmul_rn(x, x));
    }
  }
  partials[i] = squares;
  partials[tiles + i] = all;
  atomicAdd(reinterpret_cast<unsigned long long*>(&scalars->overlap), overlap);
}

inline std::size_t blocks_for(std::size_t count, std::size_t each) { return count / each + (count % each != 0); }

}  // namespace detail

// The same functions as in host/update.hpp, with the same results to the bit.

template <class T>
void fill_values(std::span<T> values, T value, const CudaStream& stream) {
  detail::launch(detail::for_each_kernel<detail::FillWith<T>>, detail::blocks_for(values.size(), detail::block_threads),
                 detail::block_threads, stream, values.size(), detail::FillWith<T>{values.data(), value});
}

template <class F>
void transform(StepScalars& scalars, F f, const CudaStream& stream) {
  detail::launch(detail::transform_kernel<F>, 1, 1, stream, &scalars, f);
}

template <class F>
void for_each(std::size_t count, F f, const CudaStream& stream) {
  detail::launch(detail::for_each_kernel<F>, detail::blocks_for(count, detail::block_threads), detail::block_threads,
                 stream, count, f);
}

template <class F>
void for_each_if_due(std::size_t count, F f, const StepScalars& scalars, const CudaStream& stream) {
  const std::size_t blocks = std::min<std::size_t>(1024, detail::blocks_for(count, detail::block_threads));
  detail::launch(detail::for_each_if_due_kernel<F>, blocks, detail::block_threads, stream, count, f, &scalars);
}

template <class G, class F>
void accumulate_gradient(std::span<const G> gradient, std::span<float> state, MaskView before,
                         std::span<const float> errors, MaskView mask, std::span<float> payload,
                         std::span<float> moments, F rule, const StepScalars& scalars, const CudaStream& stream) {
  const float* const returned = detail::returned_by(rule);
  const auto kernel = errors.empty() && returned == nullptr ? detail::accumulate_kernel<detail::NothingBefore, G, F>
                                                            : detail::accumulate_kernel<detail::TileBefore, G, F>;
  detail::launch(kernel, mask.visits(), detail::block_threads, stream, detail::DeviceMask(mask),
                 detail::DeviceMask(before), errors.empty() ? nullptr : errors.data(), returned, gradient.data(),
                 state.data(), payload.data(), moments.data(), rule, &scalars);
}

template <class F>
void for_each_kept(MaskView mask, F f, const CudaStream& stream) {
  detail::launch(detail::for_each_kept_kernel<F>, mask.visits(), detail::block_threads, stream,
                 detail::DeviceMask(mask), f);
}

template <class F>
void update(MaskView mask, F rule, const StepScalars& scalars, const CudaStream& stream) {
  detail::launch(detail::update_kernel<F>, mask.visits(), detail::block_threads, stream, detail::DeviceMask(mask), rule,
                 &scalars);
}

inline void fill_mask(PlanView plan, std::span<MaskWord> words, const CudaStream& stream) {
  detail::launch(detail::fill_mask_kernel<>, plan.tiles.size(), detail::block_threads, stream, plan.tiles.data(),
                 words.data());
}

inline std::size_t norm_partials(std::size_t count, const CudaStream&) { return detail::blocks_for(count, tile_bits); }

template <class F>
void squared_norm(std::size_t count, F value, std::span<double> partials, double& result, const CudaStream& stream) {
  const std::size_t runs = detail::blocks_for(count, tile_bits);
  detail::launch(detail::squares_kernel<F>, runs, detail::block_threads, stream, count, value, partials.data());
  detail::launch(detail::sum_kernel<>, 1, detail::block_threads, stream, static_cast<const double*>(partials.data()),
                 runs, &result);
}

inline void mask_overlap(std::span<const MaskWord> before, MaskView mask, std::span<const float> payload,
                         std::span<double> partials, StepScalars& scalars, const CudaStream& stream) {
  const std::size_t visits = mask.visits();
  detail::launch(detail::overlap_kernel<>, detail::blocks_for(visits, detail::block_threads), detail::block_threads,
                 stream, detail::DeviceMask(mask), visits, mask.plan.tiles.size(), before.data(), payload.data(),
                 partials.data(), &scalars);
}

inline void sum_overlap(std::size_t tiles, std::span<const double> partials, StepScalars& scalars,
                        const CudaStream& stream) {
  detail::launch(detail::sum_kernel<>, 1, detail::block_threads, stream, partials.data(), tiles,
                 &scalars.squared_overlap);
  detail::launch(detail::sum_kernel<>, 1, detail::block_threads, stream, partials.data() + tiles, tiles,
                 &scalars.squared_payload);
}

}  // namespace scape::inline v0
