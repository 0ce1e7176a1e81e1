#pragma once

#include <scape/arithmetic.hpp>
#include <scape/host/loop.hpp>
#include <scape/host/stream.hpp>
#include <scape/mask_plan.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace scape::inline v0 {
namespace detail {

inline constexpr std::size_t select_block = 1024;             // elements whose keys are computed at once
inline constexpr std::size_t small_segment = 32 * tile_bits;  // most elements that one thread selects from alone
inline constexpr std::size_t tiny_segment = 256;              // most that are sorted out without a histogram
inline constexpr std::size_t few_candidates = 2048;           // most that are sorted out without further histograms

/// A run of a segment that one thread works on at a time, and what is known of it.
struct alignas(64) SelectChunk {
  std::array<std::uint32_t, 2048> bins;  ///< keys by their next 11 or 10 bits
  std::size_t inside;                    ///< keys in the range in which the k-th lies
  std::size_t kept;                      ///< how many of those are kept: the first ones, where not all
  std::size_t first, last;               ///< its candidates
};

/// Elements of a chunk: at least 65,536, and so many that a segment has at most 512 chunks.
inline std::size_t chunk_elements(std::size_t count) noexcept {
  return tile_bits * std::max<std::size_t>(16, count / (tile_bits * 512) + 1);
}
inline std::size_t chunks_for(std::size_t count) noexcept { return (count - 1) / chunk_elements(count) + 1; }

/// Room for candidates: a bin of evenly spread values holds 1/16 of them at most.
inline std::size_t candidates_for(std::size_t count) noexcept { return count / 14; }

template <class Score>
SCAPE_HOST_LOOP void compute_keys(Score score, std::size_t element, std::size_t bit, std::size_t count,
                                  std::uint32_t* keys) {
  for (std::size_t i = 0; i < count; ++i) keys[i] = score_key(score(element + i, bit + i));
}

SCAPE_HOST_LOOP inline void compare_keys(const std::uint32_t* keys, std::size_t words, std::uint32_t bound,
                                         MaskWord* bits) {
  for (std::size_t w = 0; w < words; ++w) {
    MaskWord word = 0;
    for (std::size_t i = 0; i < word_bits; ++i) word |= static_cast<MaskWord>(keys[w * word_bits + i] >= bound) << i;
    bits[w] = word;
  }
}

/// Finds the k largest keys of one segment, the lower index first where they are equal, and writes its words.
///
/// Radix selection: a histogram of the keys' top 11 bits tells in which bin the k-th lies; the next read writes the
/// bits of what is above it and collects what is inside, in order of index, as candidates, among which the histograms
/// of the next 10 and last 10 bits decide. A bin with more keys than there is room is narrowed by further reads
/// instead.
template <class Score>
class Selection {
 public:
  /// With a pool, all chunks at once; without, there is one chunk.
  Selection(Score score, std::size_t element, std::size_t bit, std::size_t count, MaskWord* words,
            std::span<SelectChunk> chunks, std::span<std::uint64_t> candidates, HostPool* pool)
      : score_(score),
        element_(element),
        bit_(bit),
        count_(count),
        words_(words),
        chunks_(chunks),
        chunk_size_(chunks.size() == 1 ? count : chunk_elements(count)),
        candidates_(candidates),
        pool_(pool) {}

  void select(std::size_t k) {
    if (k == count_) return for_chunks([this](std::size_t i) { keep_all(i); });
    needed_ = k;
    if (count_ <= tiny_segment) return sort_out_all();
    bool collected = false;
    for (const int shift : {20, 10, 0}) {
      for_chunks([&](std::size_t i) { collected ? count_candidates(chunks_[i], shift) : count_elements(i, shift); });
      const std::size_t inside = narrow(shift);
      if (inside == needed_) break;
      if (!collected && shift != 0 && inside <= candidates_.size()) {
        collect();
        if (inside <= few_candidates) return sort_out(candidates_.first(inside));
        collected = true;
      }
    }
    std::size_t left = needed_;
    for (SelectChunk& chunk : chunks_) left -= chunk.kept = std::min(left, chunk.inside);
    for_chunks([&](std::size_t i) { collected ? keep_candidates(chunks_[i]) : write_words<false>(i); });
  }

 private:
  using Keys = std::array<std::uint32_t, select_block>;

  template <class F>
  void for_chunks(F body) {
    if (pool_ != nullptr) return pool_->run(chunks_.size(), body);
    body(0);
  }

  template <class F>
  void for_blocks(std::size_t chunk, F body) {
    const std::size_t end = std::min(count_, (chunk + 1) * chunk_size_);
    for (std::size_t i = chunk * chunk_size_; i < end; i += select_block) body(i, std::min(select_block, end - i));
  }

  void keep_all(std::size_t i) {
    for_blocks(i, [&](std::size_t begin, std::size_t count) {
      std::fill_n(words_ + begin / word_bits, words_for(count), ~MaskWord{0});
      clear_tail(words_ + begin / word_bits, count);
    });
  }

  static void clear_tail(MaskWord* words, std::size_t count) {
    if (count % word_bits != 0) words[count / word_bits] &= (MaskWord{1} << count % word_bits) - 1;
  }

  // Counts the keys in [low_, low_ + width_) by the bits above `shift`; two histograms take turns, since an increment
  // waits for the one before it in the same place.
  void count_elements(std::size_t i, int shift) {
    alignas(64) Keys keys;
    std::array<std::uint32_t, 2048> odd{};
    std::array<std::uint32_t, 2048>& even = chunks_[i].bins;
    even.fill(0);
    for_blocks(i, [&](std::size_t begin, std::size_t count) {
      compute_keys(score_, element_ + begin, bit_ + begin, count, keys.data());
      for (std::size_t j = 0; j + 1 < count; j += 2) {
        if (keys[j] - low_ < width_) ++even[(keys[j] - low_) >> shift];
        if (keys[j + 1] - low_ < width_) ++odd[(keys[j + 1] - low_) >> shift];
      }
      if (count % 2 != 0 && keys[count - 1] - low_ < width_) ++even[(keys[count - 1] - low_) >> shift];
    });
    for (std::size_t j = 0; j < odd.size(); ++j) even[j] += odd[j];
  }

  void count_candidates(SelectChunk& chunk, int shift) {
    chunk.bins.fill(0);
    for (const std::uint64_t candidate : candidates_.subspan(chunk.first, chunk.last - chunk.first)) {
      const std::uint32_t key = key_of(candidate) - low_;
      if (key < width_) ++chunk.bins[key >> shift];
    }
  }

  // Narrows the range to the bin in which the k-th key lies; returns how many keys are inside.
  std::size_t narrow(int shift) {
    std::array<std::uint64_t, 2048> totals{};
    for (const SelectChunk& chunk : chunks_)
      for (std::size_t j = 0; j < totals.size(); ++j) totals[j] += chunk.bins[j];
    std::size_t bin = (width_ >> shift) - 1;
    for (; totals[bin] < needed_; --bin) needed_ -= totals[bin];
    low_ += static_cast<std::uint32_t>(bin) << shift;
    width_ = std::uint32_t{1} << shift;
    for (SelectChunk& chunk : chunks_) chunk.inside = chunk.bins[bin];
    return totals[bin];
  }

  // Writes the bits of all keys above the range and collects those inside; their keys count from low_ from now on.
  void collect() {
    std::size_t first = 0;
    for (SelectChunk& chunk : chunks_) {
      chunk.first = first;
      chunk.last = first += chunk.inside;
    }
    for_chunks([this](std::size_t i) { write_words<true>(i); });
    low_ = 0;
  }

  template <bool collecting>
  void write_words(std::size_t i) {
    alignas(64) Keys keys;
    std::array<MaskWord, select_block / word_bits> reached;
    std::size_t next = chunks_[i].first, left = chunks_[i].kept;
    for_blocks(i, [&](std::size_t begin, std::size_t count) {
      compute_keys(score_, element_ + begin, bit_ + begin, count, keys.data());
      const std::size_t used = words_for(count);
      std::fill(keys.begin() + static_cast<std::ptrdiff_t>(count),
                keys.begin() + static_cast<std::ptrdiff_t>(used * word_bits), 0);
      MaskWord* const words = words_ + begin / word_bits;
      compare_keys(keys.data(), used, low_ + width_, words);
      compare_keys(keys.data(), used, low_, reached.data());
      clear_tail(reached.data(), count);
      for (std::size_t w = 0; w < used; ++w) {
        MaskWord inside = reached[w] & ~words[w];
        if constexpr (collecting) {
          for (; inside != 0; inside &= inside - 1) {
            const std::size_t j = w * word_bits + static_cast<std::size_t>(std::countr_zero(inside));
            candidates_[next++] = candidate(keys[j] - low_, begin + j);
          }
        } else if (inside != 0) {
          std::size_t count_inside = static_cast<std::size_t>(std::popcount(inside));
          for (; count_inside > left; --count_inside) inside ^= std::bit_floor(inside);
          left -= count_inside;
          words[w] |= inside;
        }
      }
    });
  }

  void keep_candidates(SelectChunk& chunk) {
    for (const std::uint64_t candidate : candidates_.subspan(chunk.first, chunk.last - chunk.first)) {
      const std::uint32_t key = key_of(candidate);
      if (key < low_) continue;
      if (key - low_ < width_) {
        if (chunk.kept == 0) continue;
        --chunk.kept;
      }
      keep(candidate);
    }
  }

  void sort_out_all() {
    Keys keys;
    compute_keys(score_, element_, bit_, count_, keys.data());
    index_bits_ = 32;
    for (std::size_t i = 0; i < count_; ++i) candidates_[i] = candidate(keys[i], i);
    std::fill_n(words_, words_for(count_), 0);
    sort_out(candidates_.first(count_));
  }

  void sort_out(std::span<std::uint64_t> candidates) {
    const auto end = candidates.begin() + static_cast<std::ptrdiff_t>(needed_);
    std::nth_element(candidates.begin(), end, candidates.end(), std::greater());
    std::for_each(candidates.begin(), end, [this](std::uint64_t candidate) { keep(candidate); });
  }

  // A candidate is a number: the larger is kept. All that collect() finds agree in all but the last 20 bits of the key.
  std::uint64_t candidate(std::uint32_t key, std::uint64_t index) const {
    return std::uint64_t{key} << index_bits_ | (index_mask() - index);
  }
  std::uint32_t key_of(std::uint64_t candidate) const { return static_cast<std::uint32_t>(candidate >> index_bits_); }
  std::uint64_t index_mask() const { return (std::uint64_t{1} << index_bits_) - 1; }

  void keep(std::uint64_t candidate) {
    const std::uint64_t index = index_mask() - (candidate & index_mask());
    words_[index / word_bits] |= MaskWord{1} << index % word_bits;
  }

  Score score_;
  std::size_t element_, bit_, count_;
  MaskWord* words_;
  std::span<SelectChunk> chunks_;
  std::size_t chunk_size_;
  std::span<std::uint64_t> candidates_;
  HostPool* pool_;
  int index_bits_ = 44;                                     // of a candidate; those above hold its key
  std::uint32_t low_ = 0, width_ = std::uint32_t{1} << 31;  // the range of keys in which the k-th lies
  std::size_t needed_ = 0;                                  // how many of them are kept
};

}  // namespace detail

/// Bytes that select_top works in: 0.7 an element of the rank's largest segment, 0.6 from 2^28 elements on; none where
/// no segment has more than 131,072.
inline std::size_t select_workspace_bytes(const MaskPlan& plan, int rank, const HostStream&) {
  std::size_t largest = 0;
  for (const Segment& segment : plan.segments())
    if (segment.owner == rank && !segment.dense) largest = std::max(largest, segment.count);
  if (largest <= detail::small_segment) return 0;
  return alignof(detail::SelectChunk) + detail::chunks_for(largest) * sizeof(detail::SelectChunk) +
         detail::candidates_for(largest) * sizeof(std::uint64_t);
}

/// Writes the rank's part of a mask: in each of its segments the bits of the k largest score_key(score(element, bit)),
/// the lower index first where keys are equal. Computes every score twice; three or four times only where more than
/// 1/14 of a segment agree with the k-th in exponent and three bits of the mantissa.
template <class Score>
void select_top(const MaskPlan& plan, PlanView, int rank, double density, Score score, std::span<MaskWord> words,
                std::span<std::byte> workspace, const HostStream& stream) {
  stream.enqueue([=, &plan, &pool = stream.pool()] {
    const auto tiles = plan.tiles().subspan(plan.first_tile(rank), plan.first_dense_tile(rank) - plan.first_tile(rank));
    const auto segment_of = [&](const Tile& tile) -> const Segment& { return plan.segments()[tile.segment]; };
    const auto select = [&](const Tile& tile, std::span<detail::SelectChunk> chunks,
                            std::span<std::uint64_t> candidates, HostPool* threads) {
      const Segment& segment = segment_of(tile);
      detail::Selection(score, tile.element, tile.bit, segment.count, words.data() + tile.bit / word_bits, chunks,
                        candidates, threads)
          .select(plan.kept(segment, density));
    };

    constexpr std::size_t run = 32;
    pool.run(words_for(tiles.size()), [&](std::size_t i) {
      for (const Tile& tile : tiles.subspan(i * run, std::min(run, tiles.size() - i * run))) {
        if (tile.element != segment_of(tile).begin || segment_of(tile).count > detail::small_segment) continue;
        detail::SelectChunk chunk;
        std::array<std::uint64_t, detail::few_candidates> candidates;
        select(tile, {&chunk, 1}, candidates, nullptr);
      }
    });

    for (std::size_t i = 0; i < tiles.size(); i += (segment_of(tiles[i]).count - 1) / tile_bits + 1) {
      const std::size_t count = segment_of(tiles[i]).count;
      if (count <= detail::small_segment) continue;
      void* place = workspace.data();
      std::size_t room = workspace.size();
      std::align(alignof(detail::SelectChunk), sizeof(detail::SelectChunk), place, room);
      auto* const chunks = static_cast<detail::SelectChunk*>(place);
      std::uninitialized_default_construct_n(chunks, detail::chunks_for(count));
      auto* const candidates = reinterpret_cast<std::uint64_t*>(chunks + detail::chunks_for(count));
      select(tiles[i], {chunks, detail::chunks_for(count)}, {candidates, detail::candidates_for(count)}, &pool);
    }

    const std::size_t begin = plan.part_begin(rank), end = begin + plan.part_words()[static_cast<std::size_t>(rank)];
    const std::size_t used = tiles.empty() ? begin : tiles.back().bit / word_bits + words_for(tiles.back().count);
    std::fill(words.begin() + static_cast<std::ptrdiff_t>(used), words.begin() + static_cast<std::ptrdiff_t>(end), 0);
  });
}

}  // namespace scape::inline v0
