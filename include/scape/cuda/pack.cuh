#pragma once

#include <scape/cuda/launch.cuh>
#include <scape/cuda/stream.hpp>
#include <scape/elias_fano.hpp>
#include <scape/mask_plan.hpp>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include <cstddef>
#include <cstdint>
#include <span>

namespace scape::inline v0 {

namespace detail {

inline constexpr unsigned scan_threads = 1024;

template <class Predicate>
__global__ void __launch_bounds__(block_threads)
    pack_kernel(Predicate predicate, std::size_t count, MaskWord* words, unsigned lead) {
  const std::size_t bit = blockIdx.x * std::size_t{block_threads} + threadIdx.x;
  const bool ours = bit >= lead && bit < lead + count;
  const MaskWord covered = __ballot_sync(~0u, ours);
  const MaskWord bits = __ballot_sync(~0u, ours && predicate(bit - lead));
  if (threadIdx.x % word_bits != 0 || covered == 0) return;
  MaskWord& word = words[bit / word_bits];
  word = covered == ~MaskWord{0} ? bits : (word & ~covered) | bits;
}

template <int = 0>  // inline, which kernels cannot be
__global__ void __launch_bounds__(block_threads)
    unpack_kernel(const MaskWord* words, std::size_t first_bit, std::uint8_t* flags, std::size_t count) {
  const std::size_t i = blockIdx.x * std::size_t{block_threads} + threadIdx.x, bit = first_bit + i;
  if (i < count) flags[i] = words[bit / word_bits] >> bit % word_bits & 1;
}

// A warp counts a run's set bits: `words_of(i, first, last)` says which words run i has.
template <class WordsOf>
__global__ void __launch_bounds__(block_threads)
    count_kernel(const MaskWord* words, std::size_t runs, WordsOf words_of, std::size_t* counts) {
  const std::size_t i = (blockIdx.x * std::size_t{block_threads} + threadIdx.x) / word_bits;
  if (i >= runs) return;
  std::size_t first, last;
  words_of(i, first, last);
  unsigned count = 0;
  for (std::size_t word = first + threadIdx.x % word_bits; word < last; word += word_bits)
    count += static_cast<unsigned>(__popc(words[word]));
  count = __reduce_add_sync(~0u, count);
  if (threadIdx.x % word_bits == 0) counts[i] = count;
}

struct WordsOfTile {
  const Tile* tiles;
  __device__ void operator()(std::size_t i, std::size_t& first, std::size_t& last) const {
    first = tiles[i].bit / word_bits;
    last = first + words_for(tiles[i].count);
  }
};
struct WordsOfRun {
  std::size_t words;
  __device__ void operator()(std::size_t i, std::size_t& first, std::size_t& last) const {
    first = i * count_words;
    last = first + count_words < words ? first + count_words : words;
  }
};

// One block turns counts into what comes before each: in all, or with a stride anew from r * stride for each rank r.
template <int = 0>  // inline, which kernels cannot be
__global__ void __launch_bounds__(scan_threads)
    scan_kernel(std::size_t* counts, std::size_t size, const std::size_t* first_of_rank, std::size_t ranks,
                std::size_t stride) {
  using Scan = cub::BlockScan<std::size_t, scan_threads, cub::BLOCK_SCAN_WARP_SCANS>;  // the default spills
  __shared__ typename Scan::TempStorage scratch;
  std::size_t carry = 0;
  for (std::size_t rank = 0; rank < (stride == 0 ? 1 : ranks); ++rank) {
    const std::size_t begin = stride == 0 ? 0 : first_of_rank[rank], end = stride == 0 ? size : first_of_rank[rank + 1];
    if (stride != 0) carry = rank * stride;
    for (std::size_t i = begin; i < end; i += scan_threads) {
      const std::size_t place = i + threadIdx.x;
      const std::size_t count = place < end ? counts[place] : 0;
      std::size_t before, sum;
      Scan(scratch).ExclusiveSum(count, before, sum);
      if (place < end) counts[place] = carry + before;
      carry += sum;
      __syncthreads();
    }
  }
}

// A payload's runs of tiles, one for each bucket and rank.
struct PayloadRuns {
  const std::uint32_t* order;
  const std::size_t* begin;
  std::size_t ranks;
};

// A block for each run: its set bits, from those of its tiles.
template <int = 0>  // inline, which kernels cannot be
__global__ void __launch_bounds__(block_threads)
    sum_runs_kernel(PayloadRuns runs, const std::size_t* counts, std::size_t* sums) {
  using Reduce = cub::BlockReduce<std::size_t, block_threads>;
  __shared__ typename Reduce::TempStorage scratch;
  const std::size_t end = runs.begin[blockIdx.x + 1];
  std::size_t sum = 0;
  for (std::size_t i = runs.begin[blockIdx.x] + threadIdx.x; i < end; i += block_threads) sum += counts[runs.order[i]];
  sum = Reduce(scratch).Sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// The same blocks: from what runs hold to where their tiles begin.
template <int = 0>  // inline, which kernels cannot be
__global__ void __launch_bounds__(block_threads)
    place_runs_kernel(PayloadRuns runs, bool by_rank, const std::size_t* sums, std::size_t* counts) {
  using Reduce = cub::BlockReduce<std::size_t, block_threads>;
  using Scan = cub::BlockScan<std::size_t, block_threads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ union {
    typename Reduce::TempStorage reduce;
    typename Scan::TempStorage scan;
  } scratch;
  __shared__ std::size_t start;
  const std::size_t ranks = runs.ranks, bucket = blockIdx.x / ranks, rank = blockIdx.x % ranks;
  const auto stride = [&](std::size_t b) {
    std::size_t most = 0;
    for (std::size_t r = 0; r < ranks; ++r) most = sums[b * ranks + r] > most ? sums[b * ranks + r] : most;
    return most + most % 2;
  };
  std::size_t before = 0;
  if (by_rank) {
    for (std::size_t b = threadIdx.x; b < bucket; b += block_threads) before += ranks * stride(b);
    if (threadIdx.x == 0) before += rank * stride(bucket);
  } else {
    for (std::size_t run = threadIdx.x; run < blockIdx.x; run += block_threads) before += sums[run];
  }
  before = Reduce(scratch.reduce).Sum(before);
  if (threadIdx.x == 0) start = before;
  __syncthreads();
  std::size_t carry = start;
  const std::size_t end = runs.begin[blockIdx.x + 1];
  for (std::size_t i = runs.begin[blockIdx.x]; i < end; i += block_threads) {
    const std::size_t place = i + threadIdx.x;
    const std::size_t tile = place < end ? runs.order[place] : 0;
    std::size_t count = place < end ? counts[tile] : 0, sum;
    Scan(scratch.scan).ExclusiveSum(count, count, sum);
    if (place < end) counts[tile] = carry + count;
    carry += sum;
    __syncthreads();
  }
}

template <class WordsOf>
void count_runs(const MaskWord* words, std::size_t runs, WordsOf words_of, std::size_t* counts,
                const CudaStream& stream) {
  launch(count_kernel<WordsOf>, runs / (block_threads / word_bits) + (runs % (block_threads / word_bits) != 0),
         block_threads, stream, words, runs, words_of, counts);
}

// The set bits before every run of count_words words.
inline std::size_t* number_bits(std::span<const MaskWord> words, std::span<std::byte> workspace,
                                const CudaStream& stream) {
  auto* const before = reinterpret_cast<std::size_t*>(workspace.data());
  const std::size_t runs = words.size() / count_words + (words.size() % count_words != 0);
  count_runs(words.data(), runs, WordsOfRun{words.size()}, before, stream);
  if (runs != 0)
    launch(scan_kernel<>, 1, scan_threads, stream, before, runs, static_cast<const std::size_t*>(nullptr),
           std::size_t{0}, std::size_t{0});
  return before;
}

// visit(position, number) for the set bits of a run of count_words words, a block each; bits are numbered over all
// runs.
template <class Visit>
__global__ void __launch_bounds__(block_threads)
    visit_kernel(const MaskWord* words, std::size_t size, const std::size_t* before, Visit visit) {
  using Scan = cub::BlockScan<unsigned, block_threads>;
  __shared__ typename Scan::TempStorage scratch;
  constexpr unsigned each = count_words / block_threads;
  const std::size_t first = blockIdx.x * count_words + threadIdx.x * each;
  MaskWord own[each];
  unsigned number = 0;
#pragma unroll
  for (unsigned i = 0; i < each; ++i) {
    own[i] = first + i < size ? words[first + i] : 0;
    number += static_cast<unsigned>(__popc(own[i]));
  }
  Scan(scratch).ExclusiveSum(number, number);
  std::size_t next = before[blockIdx.x] + number;
#pragma unroll
  for (unsigned i = 0; i < each; ++i)
    for (MaskWord bits = own[i]; bits != 0; bits &= bits - 1)
      visit((first + i) * word_bits + static_cast<unsigned>(__ffs(static_cast<int>(bits)) - 1), next++);
}

template <class Visit>
void visit_bits(std::span<const MaskWord> words, const std::size_t* before, Visit visit, const CudaStream& stream) {
  launch(visit_kernel<Visit>, words.size() / count_words + (words.size() % count_words != 0), block_threads, stream,
         words.data(), words.size(), before, visit);
}

struct ListBit {
  std::size_t* indices;
  std::size_t count;
  __device__ void operator()(std::size_t position, std::size_t number) const {
    if (number < count) indices[number] = position;
  }
};

template <int = 0>  // inline, which kernels cannot be
__global__ void __launch_bounds__(block_threads)
    mark_kernel(const std::size_t* indices, std::size_t count, MaskWord* words, std::size_t size) {
  const std::size_t i = blockIdx.x * std::size_t{block_threads} + threadIdx.x;
  if (i < count && indices[i] / word_bits < size)
    atomicOr(words + indices[i] / word_bits, 1u << indices[i] % word_bits);
}

// A code's sizes, as kernels take them.
struct DeviceCode {
  std::size_t bits, kept, low_bits, low_words;
  explicit DeviceCode(const EliasFano& code)
      : bits(code.bits()), kept(code.kept()), low_bits(code.low_bits()), low_words(code.low_words()) {}
};

struct EncodeBit {
  DeviceCode code;
  MaskWord* out;
  __device__ void operator()(std::size_t position, std::size_t number) const {
    if (number >= code.kept || position >= code.bits) return;
    for (std::size_t done = 0; done < code.low_bits; done += word_bits) {
      const std::size_t left = code.low_bits - done, bit = number * code.low_bits + done;
      const std::uint64_t mask = left < word_bits ? (std::uint64_t{1} << left) - 1 : 0xffffffff;
      const std::uint64_t part = (position >> done & mask) << bit % word_bits;
      if (static_cast<MaskWord>(part) != 0) atomicOr(out + bit / word_bits, static_cast<MaskWord>(part));
      if (part >> word_bits != 0) atomicOr(out + bit / word_bits + 1, static_cast<MaskWord>(part >> word_bits));
    }
    const std::size_t one = (position >> code.low_bits) + number;
    atomicOr(out + code.low_words + one / word_bits, 1u << one % word_bits);
  }
};

struct DecodeBit {
  DeviceCode code;
  const MaskWord* in;
  MaskWord* words;
  __device__ void operator()(std::size_t one, std::size_t number) const {
    if (number >= code.kept) return;
    std::size_t position = (one - number) << code.low_bits;
    for (std::size_t done = 0; done < code.low_bits; done += word_bits) {
      const std::size_t left = code.low_bits - done, bit = number * code.low_bits + done;
      const std::uint64_t mask = left < word_bits ? (std::uint64_t{1} << left) - 1 : 0xffffffff;
      const MaskWord* const word = in + bit / word_bits;  // the word after it exists: the high part's
      const std::uint64_t pair = std::uint64_t{word[1]} << word_bits | word[0];
      position |= (pair >> bit % word_bits & mask) << done;
    }
    if (position < code.bits) atomicOr(words + position / word_bits, 1u << position % word_bits);
  }
};

inline void clear_words(std::span<MaskWord> words, const CudaStream& stream) {
  if (!words.empty()) check(cudaMemsetAsync(words.data(), 0, words.size_bytes(), stream.handle()), "cudaMemsetAsync");
}

}  // namespace detail

// The same functions as in host/pack.hpp. What fails there from the stream's work, a mask or a code with another number
// of set bits than announced, goes unnoticed here, but nothing is written out of bounds.

template <class Predicate>
void pack_bits(Predicate predicate, std::size_t count, std::span<MaskWord> words, std::size_t first_bit,
               const CudaStream& stream) {
  const std::size_t lead = first_bit % word_bits, covered = count == 0 ? 0 : lead + count;
  detail::launch(detail::pack_kernel<Predicate>,
                 covered / detail::block_threads + (covered % detail::block_threads != 0), detail::block_threads,
                 stream, predicate, count, words.data() + first_bit / word_bits, static_cast<unsigned>(lead));
}

inline void unpack_bits(std::span<const MaskWord> words, std::size_t first_bit, std::span<std::uint8_t> flags,
                        const CudaStream& stream) {
  detail::launch(detail::unpack_kernel<>,
                 flags.size() / detail::block_threads + (flags.size() % detail::block_threads != 0),
                 detail::block_threads, stream, words.data(), first_bit, flags.data(), flags.size());
}

inline void count_offsets(PlanView plan, std::span<const MaskWord> words, std::size_t stride,
                          std::span<std::size_t> offsets, const CudaStream& stream) {
  if (plan.tiles.empty()) return;
  detail::count_runs(words.data(), plan.tiles.size(), detail::WordsOfTile{plan.tiles.data()}, offsets.data(), stream);
  detail::launch(detail::scan_kernel<>, 1, detail::scan_threads, stream, offsets.data(), plan.tiles.size(),
                 plan.first_tile.data(), plan.first_tile.size() - 1, stride);
}

inline void count_offsets_in_buckets(PlanView plan, std::span<const MaskWord> words, bool by_rank,
                                     std::span<std::size_t> sums, std::span<std::size_t> offsets,
                                     const CudaStream& stream) {
  if (plan.tiles.empty()) return;
  const detail::PayloadRuns runs{plan.payload_order.data(), plan.payload_runs.data(), plan.first_tile.size() - 1};
  const std::size_t blocks = plan.payload_runs.size() - 1;
  detail::count_runs(words.data(), plan.tiles.size(), detail::WordsOfTile{plan.tiles.data()}, offsets.data(), stream);
  detail::launch(detail::sum_runs_kernel<>, blocks, detail::block_threads, stream, runs,
                 static_cast<const std::size_t*>(offsets.data()), sums.data());
  detail::launch(detail::place_runs_kernel<>, blocks, detail::block_threads, stream, runs, by_rank,
                 static_cast<const std::size_t*>(sums.data()), offsets.data());
}

inline void list_bits(std::span<const MaskWord> words, std::span<std::size_t> indices, std::span<std::byte> workspace,
                      const CudaStream& stream) {
  const std::size_t* const before = detail::number_bits(words, workspace, stream);
  detail::visit_bits(words, before, detail::ListBit{indices.data(), indices.size()}, stream);
}

inline void mark_bits(std::span<const std::size_t> indices, std::span<MaskWord> words, const CudaStream& stream) {
  detail::clear_words(words, stream);
  detail::launch(detail::mark_kernel<>,
                 indices.size() / detail::block_threads + (indices.size() % detail::block_threads != 0),
                 detail::block_threads, stream, indices.data(), indices.size(), words.data(), words.size());
}

inline void encode_elias_fano(EliasFano code, std::span<const MaskWord> words, std::span<MaskWord> out,
                              std::span<std::byte> workspace, const CudaStream& stream) {
  if (code.kept() == 0) return;
  detail::clear_words(out.first(code.words()), stream);
  const std::size_t* const before = detail::number_bits(words, workspace, stream);
  detail::visit_bits(words, before, detail::EncodeBit{detail::DeviceCode(code), out.data()}, stream);
}

inline void decode_elias_fano(EliasFano code, std::span<const MaskWord> in, std::span<MaskWord> words,
                              std::span<std::byte> workspace, const CudaStream& stream) {
  detail::clear_words(words, stream);
  if (code.kept() == 0) return;
  const auto high = in.subspan(code.low_words(), code.high_words());
  const std::size_t* const before = detail::number_bits(high, workspace, stream);
  detail::visit_bits(high, before, detail::DecodeBit{detail::DeviceCode(code), in.data(), words.data()}, stream);
}

}  // namespace scape::inline v0
