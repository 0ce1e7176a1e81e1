#pragma once

#include <scape/arithmetic.hpp>
#include <scape/cuda/launch.cuh>
#include <scape/cuda/stream.hpp>
#include <scape/mask_plan.hpp>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include <cstddef>
#include <cstdint>
#include <span>

namespace scape::inline v0 {

namespace detail {

inline constexpr unsigned select_bins = 2048;
inline constexpr std::uint32_t all_keys = 0x80000000u;

// Half the width of the range of keys around the last threshold in which the next is looked for: 1/32 of an octave.
inline constexpr std::uint32_t prediction = 1u << 18;
static_assert(2 * prediction + 1 <= 1u << 20);  // fits a candidate

// Elements of a segment for each candidate that there is room for.
inline constexpr unsigned elements_per_candidate = 16;

// The selection in one segment of several tiles. `threshold` is all that outlives a call: a guess, always verified.
struct SelectState {
  unsigned long long k, needed;     // kept in all, and in the range of keys that is still open
  unsigned long long above, found;  // keys above the predicted range, and in it
  unsigned long long equal;         // keys that equal the threshold in the end
  std::uint32_t low, width;         // the open range of keys
  std::uint32_t base;               // of the candidates' keys
  std::uint32_t threshold;          // of the last call
  std::uint32_t predicted;          // whether the candidates hold the k-th key
  std::uint32_t first_tile, tiles;
};

// Where everything is; all tiles are those that the rank selects in.
template <class Score>
struct SelectTask {
  Score score;
  const Tile* tiles;
  const Segment* segments;
  double density;
  MaskWord *words, *ties;  // whole mask; bits of keys equal to the threshold, from first_word on
  std::size_t first_word;
  SelectState* states;  // by Tile::large
  unsigned* bins;       // select_bins a state
  std::uint64_t*
      candidates;  // key - base in 20 bits, bit from first_word on in 44; a segment's begin at its own first bit / 16
  std::size_t* tie_counts;  // by tile

  __device__ bool is_large(const Tile& tile) const { return segments[tile.segment].count > tile_bits; }
  __device__ std::size_t kept(const Tile& tile) const { return kept_count(segments[tile.segment].count, density); }
  __device__ std::uint32_t key(const Tile& tile, unsigned place) const {
    return score_key(score(tile.element + place, tile.bit + place));
  }
  static constexpr int bit_bits = 44;
  __device__ static std::uint32_t key_of(std::uint64_t candidate, const SelectState& state) {
    return state.base + static_cast<std::uint32_t>(candidate >> bit_bits);
  }
  __device__ static std::size_t bit_of(std::uint64_t candidate) {
    return candidate & ((std::uint64_t{1} << bit_bits) - 1);
  }
  __device__ std::uint64_t* candidates_of(const SelectState& state) const {
    return candidates + (tiles[state.first_tile].bit - first_word * word_bits) / elements_per_candidate;
  }
  __device__ std::size_t room(const SelectState& state) const {
    return segments[tiles[state.first_tile].segment].count / elements_per_candidate;
  }
};

// Counts into a histogram in shared memory. Equal neighbours are counted together, for up to two values a warp: where
// all keys agree or are of two kinds, atomics would wait for each other.
__device__ inline void count_key(unsigned* bins, bool counts, unsigned bin) {
  for (int round = 0; round < 2; ++round) {
    const unsigned left = __ballot_sync(~0u, counts);
    if (left == 0) return;
    const int leader = __ffs(static_cast<int>(left)) - 1;
    const unsigned first = __shfl_sync(~0u, bin, leader);
    const unsigned same = __ballot_sync(~0u, counts && bin == first);
    if (static_cast<int>(threadIdx.x % word_bits) == leader)
      atomicAdd(bins + first, static_cast<unsigned>(__popc(same)));
    if (bin == first) counts = false;
  }
  if (counts) atomicAdd(bins + bin, 1u);
}

// The bin, from the top, in which the needed-th key lies; needed becomes its number there. All threads of a block.
__device__ inline unsigned find_bin(const unsigned* bins, unsigned used, unsigned long long& needed) {
  using Scan = cub::BlockScan<unsigned long long, block_threads>;
  __shared__ typename Scan::TempStorage scratch;
  __shared__ unsigned found;
  __shared__ unsigned long long left;
  constexpr unsigned each = select_bins / block_threads;
  unsigned long long own = 0, above;
  const unsigned top = used - 1 - threadIdx.x * each;  // counted down; used is a multiple of `each`
  const bool has_bins = threadIdx.x * each < used;
  for (unsigned i = 0; i < each && has_bins; ++i) own += bins[top - i];
  Scan(scratch).ExclusiveSum(own, above);
  if (has_bins && above < needed && needed <= above + own) {
    unsigned bin = top;
    unsigned long long rest = needed - above;
    for (; bins[bin] < rest; --bin) rest -= bins[bin];
    found = bin;
    left = rest;
  }
  __syncthreads();
  needed = left;
  const unsigned result = found;
  __syncthreads();
  return result;
}

// Of the set bits of `ties`, the first `quota`.
__device__ inline MaskWord first_bits(MaskWord ties, unsigned long long quota) {
  unsigned count = static_cast<unsigned>(__popc(ties));
  for (; count > quota; --count) ties ^= 0x80000000u >> __clz(static_cast<int>(ties));
  return ties;
}

// One word of a tile a thread: joins the first `quota` of the tile's ties to its bits.
__device__ inline void join_ties(const Tile& tile, MaskWord* words, MaskWord above, MaskWord ties,
                                 unsigned long long quota) {
  using Scan = cub::BlockScan<unsigned, block_threads>;
  __shared__ typename Scan::TempStorage scratch;
  unsigned before;
  Scan(scratch).ExclusiveSum(static_cast<unsigned>(__popc(ties)), before);
  if (threadIdx.x < words_for(tile.count))
    words[tile.bit / word_bits + threadIdx.x] = above | (before < quota ? first_bits(ties, quota - before) : 0);
}

// Segments of one tile: all at once, by the block, in shared memory.
template <class Score>
__global__ void __launch_bounds__(block_threads) select_small_kernel(SelectTask<Score> task) {
  const Tile tile = task.tiles[blockIdx.x];
  if (task.is_large(tile)) return;
  __shared__ std::uint32_t keys[tile_bits];
  __shared__ unsigned bins[select_bins];
  __shared__ MaskWord above[tile_bits / word_bits], ties[tile_bits / word_bits];
  const unsigned padded = static_cast<unsigned>(words_for(tile.count) * word_bits);
  for (unsigned i = threadIdx.x; i < tile.count; i += block_threads) keys[i] = task.key(tile, i);
  unsigned long long needed = task.kept(tile);
  std::uint32_t low = 0, width = all_keys;
  for (const int shift : {20, 10, 0}) {
    for (unsigned i = threadIdx.x; i < select_bins; i += block_threads) bins[i] = 0;
    __syncthreads();
    for (unsigned first = 0; first < padded; first += block_threads) {
      const unsigned i = first + threadIdx.x;
      const std::uint32_t key = i < tile.count ? keys[i] - low : ~0u;
      count_key(bins, key < width, key >> shift);
    }
    __syncthreads();
    low += find_bin(bins, width >> shift, needed) << shift;
    width = 1u << shift;
  }
  if (threadIdx.x < tile_bits / word_bits) above[threadIdx.x] = ties[threadIdx.x] = 0;
  __syncthreads();
  for (unsigned first = threadIdx.x & ~31u; first < padded; first += block_threads) {
    const unsigned i = first + threadIdx.x % word_bits;
    const MaskWord larger = __ballot_sync(~0u, i < tile.count && keys[i] > low);
    const MaskWord equal = __ballot_sync(~0u, i < tile.count && keys[i] == low);
    if (i % word_bits == 0) {
      above[i / word_bits] = larger;
      ties[i / word_bits] = equal;
    }
  }
  __syncthreads();
  const bool has_word = threadIdx.x < tile_bits / word_bits;
  join_ties(tile, task.words, has_word ? above[threadIdx.x] : 0, has_word ? ties[threadIdx.x] : 0, needed);
}

// A block a tile; only the first of a large segment's does anything.
template <class Score>
__global__ void __launch_bounds__(block_threads) select_begin_kernel(SelectTask<Score> task) {
  const Tile tile = task.tiles[blockIdx.x];
  const Segment& segment = task.segments[tile.segment];
  if (!task.is_large(tile) || tile.element != segment.begin) return;
  SelectState& state = task.states[tile.large];
  for (unsigned i = threadIdx.x; i < select_bins; i += block_threads) task.bins[tile.large * select_bins + i] = 0;
  if (threadIdx.x != 0) return;
  state.k = task.kept(tile);
  state.above = state.found = 0;
  state.first_tile = blockIdx.x;
  state.tiles = static_cast<std::uint32_t>((segment.count + tile_bits - 1) / tile_bits);
  const std::uint32_t guess = state.threshold & 0x7fffffff;
  state.low = state.base = guess < prediction ? 0 : guess - prediction;
  state.width = (guess > all_keys - 1 - prediction ? all_keys - 1 : guess + prediction) - state.low + 1;
}

// The one read of the common case: the bits of the keys above the predicted range, and the keys in it as candidates.
template <class Score>
__global__ void __launch_bounds__(block_threads) select_predict_kernel(SelectTask<Score> task) {
  const Tile tile = task.tiles[blockIdx.x];
  if (!task.is_large(tile)) return;
  SelectState& state = task.states[tile.large];
  const std::uint32_t low = state.low, high = low + state.width;
  std::uint64_t* const candidates = task.candidates_of(state);
  const std::size_t room = task.room(state);
  const unsigned lane = threadIdx.x % word_bits;
  unsigned above = 0;
  for (unsigned first = threadIdx.x - lane; first < tile.count; first += block_threads) {
    const unsigned i = first + lane;
    const std::uint32_t key = i < tile.count ? task.key(tile, i) : 0;
    const MaskWord larger = __ballot_sync(~0u, i < tile.count && key >= high);
    const MaskWord inside = __ballot_sync(~0u, i < tile.count && key >= low && key < high);
    const std::size_t word = (tile.bit + first) / word_bits;
    if (lane == 0) {
      task.words[word] = larger;
      task.ties[word - task.first_word] = 0;
      above += static_cast<unsigned>(__popc(larger));
    }
    if (inside == 0) continue;
    unsigned long long place = 0;
    if (lane == 0) place = atomicAdd(&state.found, static_cast<unsigned long long>(__popc(inside)));
    place = __shfl_sync(~0u, place, 0) + static_cast<unsigned>(__popc(inside & ((1u << lane) - 1)));
    if (inside >> lane & 1 && place < room)
      candidates[place] = std::uint64_t{key - low} << task.bit_bits | (tile.bit + i - task.first_word * word_bits);
  }
  using Reduce = cub::BlockReduce<unsigned, block_threads>;
  __shared__ typename Reduce::TempStorage scratch;
  above = Reduce(scratch).Sum(above);
  if (threadIdx.x == 0 && above != 0) atomicAdd(&state.above, static_cast<unsigned long long>(above));
}

// Whether the prediction held; else all keys are looked through.
template <class Score>
__global__ void select_verify_kernel(SelectTask<Score> task) {
  const Tile tile = task.tiles[blockIdx.x];
  if (!task.is_large(tile) || tile.element != task.segments[tile.segment].begin) return;
  SelectState& state = task.states[tile.large];
  state.predicted = state.above < state.k && state.k <= state.above + state.found && state.found <= task.room(state);
  state.needed = state.predicted ? state.k - state.above : state.k;
  state.low = 0;
  state.width = all_keys;
}

// A histogram of the open range by the bits above `shift`; from the candidates, 256 a tile's block, or from all keys.
template <class Score>
__global__ void __launch_bounds__(block_threads) select_count_kernel(SelectTask<Score> task, int shift) {
  const Tile tile = task.tiles[blockIdx.x];
  if (!task.is_large(tile)) return;
  const SelectState& state = task.states[tile.large];
  const unsigned part = blockIdx.x - state.first_tile;
  constexpr unsigned own = static_cast<unsigned>(tile_bits) / elements_per_candidate;
  static_assert(own == block_threads);
  const unsigned long long found = state.found;
  if (state.predicted && std::size_t{part} * own >= found) return;
  __shared__ unsigned bins[select_bins];
  for (unsigned i = threadIdx.x; i < select_bins; i += block_threads) bins[i] = 0;
  __syncthreads();
  const std::uint32_t low = state.low, width = state.width;
  if (state.predicted) {
    const std::size_t i = std::size_t{part} * own + threadIdx.x;
    const std::uint32_t key = i < found ? task.key_of(task.candidates_of(state)[i], state) - low : ~0u;
    count_key(bins, key < width, key >> shift);
  } else {
    for (unsigned first = 0; first < tile_bits; first += block_threads) {
      const unsigned i = first + threadIdx.x;
      const std::uint32_t key = i < tile.count ? task.key(tile, i) - low : ~0u;
      count_key(bins, key < width, key >> shift);
    }
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < width >> shift; i += block_threads)
    if (bins[i] != 0) atomicAdd(task.bins + tile.large * select_bins + i, bins[i]);
}

template <class Score>
__global__ void __launch_bounds__(block_threads) select_narrow_kernel(SelectTask<Score> task, int shift) {
  const Tile tile = task.tiles[blockIdx.x];
  if (!task.is_large(tile) || tile.element != task.segments[tile.segment].begin) return;
  SelectState& state = task.states[tile.large];
  unsigned* const bins = task.bins + tile.large * select_bins;
  unsigned long long needed = state.needed;
  const unsigned bin = find_bin(bins, state.width >> shift, needed);
  const unsigned equal = bins[bin];
  __syncthreads();
  for (unsigned i = threadIdx.x; i < select_bins; i += block_threads) bins[i] = 0;
  if (threadIdx.x != 0) return;
  state.needed = needed;
  state.equal = equal;
  state.low += bin << shift;
  state.width = 1u << shift;
  state.threshold = state.low;
}

// The bits of all keys above the threshold, and apart those of the keys that equal it.
template <class Score>
__global__ void __launch_bounds__(block_threads) select_emit_kernel(SelectTask<Score> task) {
  const Tile tile = task.tiles[blockIdx.x];
  if (!task.is_large(tile)) return;
  const SelectState& state = task.states[tile.large];
  const std::uint32_t threshold = state.threshold;
  if (state.predicted) {
    const std::size_t i = std::size_t{blockIdx.x - state.first_tile} * block_threads + threadIdx.x;
    if (i >= state.found) return;
    const std::uint64_t candidate = task.candidates_of(state)[i];
    const std::uint32_t key = task.key_of(candidate, state);
    const std::size_t bit = task.bit_of(candidate);
    if (key > threshold) atomicOr(task.words + task.first_word + bit / word_bits, 1u << bit % word_bits);
    if (key == threshold) atomicOr(task.ties + bit / word_bits, 1u << bit % word_bits);
    return;
  }
  const unsigned lane = threadIdx.x % word_bits;
  for (unsigned first = threadIdx.x - lane; first < tile.count; first += block_threads) {
    const unsigned i = first + lane;
    const std::uint32_t key = i < tile.count ? task.key(tile, i) : 0;
    const MaskWord larger = __ballot_sync(~0u, i < tile.count && key > threshold);
    const MaskWord equal = __ballot_sync(~0u, i < tile.count && key == threshold);
    const std::size_t word = (tile.bit + first) / word_bits;
    if (lane == 0) {
      task.words[word] = larger;
      task.ties[word - task.first_word] = equal;
    }
  }
}

template <class Score>
__global__ void __launch_bounds__(block_threads) select_count_ties_kernel(SelectTask<Score> task) {
  const Tile tile = task.tiles[blockIdx.x];
  if (!task.is_large(tile)) return;
  const SelectState& state = task.states[tile.large];
  if (state.equal == state.needed) return;  // all of them are kept
  using Reduce = cub::BlockReduce<unsigned, block_threads>;
  __shared__ typename Reduce::TempStorage scratch;
  const std::size_t word = tile.bit / word_bits - task.first_word + threadIdx.x;
  const unsigned count = threadIdx.x < words_for(tile.count) ? static_cast<unsigned>(__popc(task.ties[word])) : 0;
  const unsigned sum = Reduce(scratch).Sum(count);
  if (threadIdx.x == 0) task.tie_counts[blockIdx.x] = sum;
}

template <class Score>
__global__ void __launch_bounds__(block_threads) select_scan_ties_kernel(SelectTask<Score> task) {
  const Tile tile = task.tiles[blockIdx.x];
  if (!task.is_large(tile) || tile.element != task.segments[tile.segment].begin) return;
  const SelectState& state = task.states[tile.large];
  if (state.equal == state.needed) return;
  using Scan = cub::BlockScan<std::size_t, block_threads>;
  __shared__ typename Scan::TempStorage scratch;
  std::size_t carry = 0;
  for (std::uint32_t first = 0; first < state.tiles; first += block_threads) {
    const std::uint32_t i = first + threadIdx.x;
    std::size_t* const count = task.tie_counts + state.first_tile + i;
    std::size_t before, sum;
    Scan(scratch).ExclusiveSum(i < state.tiles ? *count : 0, before, sum);
    if (i < state.tiles) *count = carry + before;
    carry += sum;
    __syncthreads();
  }
}

template <class Score>
__global__ void __launch_bounds__(block_threads) select_join_kernel(SelectTask<Score> task) {
  const Tile tile = task.tiles[blockIdx.x];
  if (!task.is_large(tile)) return;
  const SelectState& state = task.states[tile.large];
  const bool all = state.equal == state.needed;
  const std::size_t before = all ? 0 : task.tie_counts[blockIdx.x];
  const bool has_word = threadIdx.x < words_for(tile.count);
  const std::size_t word = tile.bit / word_bits + threadIdx.x;
  const MaskWord above = has_word ? task.words[word] : 0, ties = has_word ? task.ties[word - task.first_word] : 0;
  const unsigned long long quota = all ? tile_bits : before < state.needed ? state.needed - before : 0;
  join_ties(tile, task.words, above, ties, quota);
}

// How a rank's selection lies in its workspace.
struct SelectWorkspace {
  std::size_t tiles = 0, large = 0, words = 0;
  std::size_t states = 0, bins = 0, candidates = 0, tie_counts = 0, ties = 0, bytes = 0;  // offsets, and the whole

  SelectWorkspace(const MaskPlan& plan, int rank) {
    const auto own = plan.tiles().subspan(plan.first_tile(rank), plan.first_dense_tile(rank) - plan.first_tile(rank));
    tiles = own.size();
    for (const Tile& tile : own)
      if (plan.segments()[tile.segment].count > tile_bits) large = std::max<std::size_t>(large, tile.large + 1);
    if (large == 0) return;
    words = plan.part_words()[static_cast<std::size_t>(rank)];
    const auto place = [&](std::size_t size) { return std::exchange(bytes, (bytes + size + 255) / 256 * 256); };
    states = place(large * sizeof(SelectState));
    bins = place(large * select_bins * sizeof(unsigned));
    candidates = place(words * word_bits / elements_per_candidate * sizeof(std::uint64_t));
    tie_counts = place(tiles * sizeof(std::size_t));
    ties = place(words * sizeof(MaskWord));
  }
};

}  // namespace detail

/// Bytes that select_top works in: 0.63 for an element of the rank's segments, and 8 KiB for every segment of more than
/// 4,096 elements. What it held in the last call speeds up the next: the same workspace for every step, zeros at first.
inline std::size_t select_workspace_bytes(const MaskPlan& plan, int rank, const CudaStream&) {
  return detail::SelectWorkspace(plan, rank).bytes;
}

/// The same as in host/select.hpp, with the same bits. Where a segment's threshold lies within 3% of the last one the
/// scores are computed once; else they are computed five times. Nothing is read back. `tables` are the plan's, in
/// memory of the device.
template <class Score>
void select_top(const MaskPlan& plan, PlanView tables, int rank, double density, Score score, std::span<MaskWord> words,
                std::span<std::byte> workspace, const CudaStream& stream) {
  const detail::SelectWorkspace layout(plan, rank);
  const std::size_t first_word = plan.part_begin(rank), part = plan.part_words()[static_cast<std::size_t>(rank)];
  const auto own = plan.tiles().subspan(plan.first_tile(rank), layout.tiles);
  const std::size_t used = own.empty() ? first_word : own.back().bit / word_bits + words_for(own.back().count);
  if (used < first_word + part)
    check(cudaMemsetAsync(words.data() + used, 0, (first_word + part - used) * sizeof(MaskWord), stream.handle()),
          "cudaMemsetAsync");
  std::byte* const base = workspace.data();
  const detail::SelectTask<Score> task{score,
                                       tables.tiles.data() + plan.first_tile(rank),
                                       tables.segments.data(),
                                       density,
                                       words.data(),
                                       reinterpret_cast<MaskWord*>(base + layout.ties),
                                       first_word,
                                       reinterpret_cast<detail::SelectState*>(base + layout.states),
                                       reinterpret_cast<unsigned*>(base + layout.bins),
                                       reinterpret_cast<std::uint64_t*>(base + layout.candidates),
                                       reinterpret_cast<std::size_t*>(base + layout.tie_counts)};
  const auto run = [&](auto kernel, auto... arguments) {
    detail::launch(kernel, layout.tiles, detail::block_threads, stream, task, arguments...);
  };
  run(detail::select_small_kernel<Score>);
  if (layout.large == 0) return;
  run(detail::select_begin_kernel<Score>);
  run(detail::select_predict_kernel<Score>);
  detail::launch(detail::select_verify_kernel<Score>, layout.tiles, 1, stream, task);
  for (const int shift : {20, 10, 0}) {
    run(detail::select_count_kernel<Score>, shift);
    run(detail::select_narrow_kernel<Score>, shift);
  }
  run(detail::select_emit_kernel<Score>);
  run(detail::select_count_ties_kernel<Score>);
  run(detail::select_scan_ties_kernel<Score>);
  run(detail::select_join_kernel<Score>);
}

}  // namespace scape::inline v0
