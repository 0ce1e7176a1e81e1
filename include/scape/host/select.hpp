#pragma once

#include <scape/arithmetic.hpp>
#include <scape/host/loop.hpp>
#include <scape/host/stream.hpp>
#include <scape/mask_plan.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

namespace scape::inline v0 {
namespace detail {

inline constexpr std::uint32_t key_end = 0x80000000;          // above all keys
inline constexpr std::size_t select_block = 1024;             // elements whose keys are compared at once
inline constexpr std::size_t select_chunk = 16 * tile_bits;   // elements that a thread takes at once
inline constexpr std::size_t small_segment = 32 * tile_bits;  // most elements that one thread selects from alone
inline constexpr std::size_t small_room = 8192;               // candidates of such a segment

/// Keys [low, high).
struct KeyRange {
  std::uint32_t low, high;
  std::uint32_t width() const noexcept { return high - low; }
  bool operator==(const KeyRange&) const = default;
};

/// How many keys are above a range, and how many are in it or above.
struct KeyCounts {
  std::size_t above = 0, reached = 0;
  std::size_t inside() const noexcept { return reached - above; }
  void operator+=(const KeyCounts& other) noexcept {
    above += other.above;
    reached += other.reached;
  }
};

/// What is remembered of a segment's last threshold: that the next may lie less than `reach` from it. All zero at
/// first.
struct LastThreshold {
  std::uint32_t key : 31, moves : 1;  ///< moves: so far from call to call that a sample tells more
  std::uint32_t reach;
};

/// count^(2/3): in that many of a segment's keys a range that holds the k-th is found in about as long as is then spent
/// on the keys in it, three times as many at most.
inline std::size_t share_of(std::size_t count) noexcept {
  const double root = std::cbrt(static_cast<double>(count));
  return static_cast<std::size_t>(root * root);
}
/// All keys where they fit into a core's first cache.
inline std::size_t sample_size(std::size_t count) noexcept { return count <= tile_bits ? count : share_of(count); }
inline std::size_t candidates_for(std::size_t count) noexcept { return 3 * share_of(count); }

/// Keys `begin` to `end` of a sample: one from a place like random in every stride.
template <class Score>
SCAPE_HOST_LOOP void sample_keys(Score score, std::size_t element, std::size_t bit, std::size_t stride,
                                 std::size_t begin, std::size_t end, std::uint32_t* keys) {
  for (std::size_t i = begin; i < end; ++i) {
    const std::size_t place = i * stride + (i * 0x9e3779b97f4a7c15 >> 32) % stride;
    keys[i] = score_key(score(element + place, bit + place));
  }
}

/// One bit a key: whether it is above the range, and whether it is in it or above.
template <class Score>
SCAPE_HOST_LOOP KeyCounts compare_keys(Score score, std::size_t element, std::size_t bit, std::size_t count,
                                       KeyRange range, MaskWord* above, MaskWord* reached) {
  KeyCounts counts;
  const auto compare = [&](std::size_t begin, std::size_t bits) {
    MaskWord larger = 0, larger_or_inside = 0;
    for (std::size_t i = 0; i < bits; ++i) {
      const std::uint32_t key = score_key(score(element + begin + i, bit + begin + i));
      larger |= static_cast<MaskWord>(key >= range.high) << i;
      larger_or_inside |= static_cast<MaskWord>(key >= range.low) << i;
    }
    above[begin / word_bits] = larger;
    reached[begin / word_bits] = larger_or_inside;
    counts.above += static_cast<std::size_t>(std::popcount(larger));
    counts.reached += static_cast<std::size_t>(std::popcount(larger_or_inside));
  };
  std::size_t begin = 0;
  for (; begin + word_bits <= count; begin += word_bits) compare(begin, word_bits);
  if (begin != count) compare(begin, count - begin);
  return counts;
}

// Both of fewer than 2^32 keys.
SCAPE_HOST_LOOP inline std::size_t count_reached(std::span<const std::uint32_t> keys, std::uint32_t bound) {
  std::uint32_t reached = 0;
  for (const std::uint32_t key : keys) reached += key >= bound;
  return reached;
}

SCAPE_HOST_LOOP inline std::uint32_t smallest_reached(std::span<const std::uint32_t> keys, std::uint32_t bound) {
  std::uint32_t smallest = key_end;
  for (const std::uint32_t key : keys) smallest = std::min(smallest, key >= bound ? key : key_end);
  return smallest;
}

/// Bit by bit, until a bound is found that only k keys reach.
inline std::uint32_t kth_largest(std::span<const std::uint32_t> keys, std::size_t k) {
  std::uint32_t bound = 0;
  for (std::uint32_t bit = key_end / 2; bit != 0; bit /= 2) {
    const std::size_t reached = count_reached(keys, bound | bit);
    if (reached >= k) bound |= bit;
    if (reached == k) return smallest_reached(keys, bound);
  }
  return bound;
}

/// Sets, of each word's bits in `reached` and not in `words`, the first `left`; counts them down.
inline void join_first(std::span<MaskWord> words, const MaskWord* reached, std::size_t& left) {
  for (std::size_t w = 0; w < words.size() && left != 0; ++w) {
    MaskWord joined = reached[w] & ~words[w];
    std::size_t count = static_cast<std::size_t>(std::popcount(joined));
    for (; count > left; --count) joined ^= std::bit_floor(joined);
    left -= count;
    words[w] |= joined;
  }
}

/// A run of a segment that one thread works on at a time.
struct SelectChunk {
  KeyCounts counts;  ///< of the last read
  std::size_t kept;  ///< how many of the keys inside are kept: the first ones, where not all
};
inline std::size_t chunks_for(std::size_t count) noexcept { return (count - 1) / select_chunk + 1; }

/// Finds the k largest keys of one segment, the lower index first where they are equal, and writes its words.
///
/// A range of keys that should hold the k-th is guessed, from the last call's threshold or else from a sample. One read
/// writes the bits of the keys above it, counts, and collects the few keys inside as candidates, among which the rest
/// is decided. Where the guess was wrong, or more keys are inside than there is room for, the counts narrow what is
/// open and another guess is read; at worst down to one key that many elements share, the first of which one more read
/// finds.
template <class Score>
class Selection {
 public:
  /// One chunk for every select_chunk elements; they are worked on one after the other where there is no pool. The
  /// scratch is aligned for candidates.
  Selection(Score score, std::size_t element, std::size_t bit, std::size_t count, MaskWord* words,
            std::span<SelectChunk> chunks, std::span<std::byte> scratch, HostPool* pool)
      : score_(score),
        element_(element),
        bit_(bit),
        count_(count),
        words_(words),
        chunks_(chunks),
        candidates_(reinterpret_cast<std::uint64_t*>(scratch.data())),
        room_(candidates_for(count)),
        sample_(reinterpret_cast<std::uint32_t*>(scratch.data()), sample_size(count)),
        pool_(pool) {}

  void select(std::size_t k, LastThreshold& last) {
    if (k == count_) return run(chunks_.size(), [this](std::size_t i) { keep_all(i); });
    k_ = k;
    for (KeyRange guess = first_guess(last);; guess = next_guess()) {
      const KeyCounts counts = read(guess);
      if (counts.above >= k_) {
        open_.low = guess.high;
        counts_.reached = counts.above;
      } else if (counts.reached < k_) {
        open_.high = guess.low;
        counts_.above = counts.reached;
      } else {
        open_ = guess;
        counts_ = counts;
        if (is_collected()) return remember(keep_candidates(), last);
        if (guess.width() == 1) return keep_first(), remember(guess.low, last);
      }
    }
  }

 private:
  template <class F>
  void run(std::size_t count, F body) {
    if (pool_ != nullptr) return pool_->run(count, body);
    for (std::size_t i = 0; i < count; ++i) body(i);
  }

  template <class F>
  void for_blocks(std::size_t chunk, F body) {
    const std::size_t end = std::min(count_, (chunk + 1) * select_chunk);
    for (std::size_t i = chunk * select_chunk; i < end; i += select_block) body(i, std::min(select_block, end - i));
  }

  void keep_all(std::size_t chunk) {
    for_blocks(chunk, [&](std::size_t begin, std::size_t count) {
      std::fill_n(words_ + begin / word_bits, words_for(count), ~MaskWord{0});
      if (count % word_bits != 0) words_[(begin + count) / word_bits] = (MaskWord{1} << count % word_bits) - 1;
    });
  }

  // ---- Guesses

  KeyRange first_guess(LastThreshold last) {
    if (last.reach == 0 || last.moves) return next_guess();
    return {last.key - std::min(last.key + 0u, last.reach - 1),
            static_cast<std::uint32_t>(std::min(std::uint64_t{key_end}, std::uint64_t{last.key} + last.reach))};
  }

  // A part of what is open, or all of it where that can be collected.
  KeyRange next_guess() {
    if (fits(open_, counts_.inside())) return open_;
    take_sample();
    if (sample_.size() == count_) return only(kth_largest(sample_, k_));
    const KeyRange guess = range_around_threshold();
    margin_ *= 4;
    if (guess.low < guess.high && guess != open_) return guess;
    return only(middle_key());
  }
  static KeyRange only(std::uint32_t key) { return {key, key + 1}; }

  void take_sample() {
    constexpr std::size_t part = 1024;
    run((sample_.size() - 1) / part + 1, [this](std::size_t i) {
      sample_keys(score_, element_, bit_, count_ / sample_.size(), i * part, std::min(sample_.size(), (i + 1) * part),
                  sample_.data());
    });
  }

  // Where the k-th key of all should be by the sample's keys, give or take their standard deviation times the margin.
  KeyRange range_around_threshold() const {
    const double size = static_cast<double>(sample_.size());
    const double rank = size * static_cast<double>(k_) / static_cast<double>(count_);
    const double error = margin_ * std::sqrt(rank * (1 - rank / size)) + 2;
    KeyRange range = open_;
    if (rank + error < size)
      range.low = std::max(range.low, kth_largest(sample_, static_cast<std::size_t>(rank + error)));
    if (rank - error >= 1)
      range.high = std::min(range.high, kth_largest(sample_, static_cast<std::size_t>(rank - error)) + 1);
    return range;
  }

  // The median of the sample's keys that are open, or else just the middle.
  std::uint32_t middle_key() const {
    const std::size_t above = count_reached(sample_, open_.high), reached = count_reached(sample_, open_.low);
    return above == reached ? open_.low + open_.width() / 2 : kth_largest(sample_, (above + reached + 1) / 2);
  }

  // For the next call: the threshold of this one, and where the next may be, given how far it moves from call to call
  // and how close the keys are.
  void remember(std::uint32_t threshold, LastThreshold& last) const {
    const double keys_per_element = static_cast<double>(open_.width()) / static_cast<double>(counts_.inside());
    const double limit = keys_per_element * static_cast<double>(share_of(count_));
    const double moved = last.reach == 0 ? 0 : std::abs(static_cast<double>(threshold) - last.key);
    const double reach = std::max({4 * moved, last.reach / 2.0, limit / 16});
    last.key = threshold & (key_end - 1);
    last.moves = reach > limit;
    last.reach = 1 + static_cast<std::uint32_t>(std::min({reach, 4 * limit, key_end / 2.0}));
  }

  // ---- Reads

  // Whether candidates from the range fit: so many, and each in 64 bits.
  bool fits(KeyRange range, std::size_t inside) const { return inside <= room_ && candidate_bits(range) <= 64; }

  KeyCounts read(KeyRange range) {
    range_ = range;
    found_ = 0;
    run(chunks_.size(), [this](std::size_t i) { read_chunk(i); });
    KeyCounts counts;
    for (const SelectChunk& chunk : chunks_) counts += chunk.counts;
    return counts;
  }

  void read_chunk(std::size_t i) {
    std::array<MaskWord, select_block / word_bits> reached;
    std::array<std::uint64_t, 2 * select_block> collected;
    std::size_t pending = 0;
    KeyCounts counts;
    for_blocks(i, [&](std::size_t begin, std::size_t count) {
      MaskWord* const above = words_ + begin / word_bits;
      const KeyCounts block =
          compare_keys(score_, element_ + begin, bit_ + begin, count, range_, above, reached.data());
      counts += block;
      if (block.inside() == 0 || !fits(range_, found_)) return;
      collect(begin, {above, words_for(count)}, reached.data(), collected.data() + pending);
      pending += block.inside();
      if (pending >= select_block) add_candidates({collected.data(), std::exchange(pending, 0)});
    });
    add_candidates({collected.data(), pending});
    chunks_[i].counts = counts;
  }

 public:
  SCAPE_HOST_LOOP void collect(std::size_t begin, std::span<const MaskWord> above, const MaskWord* reached,
                               std::uint64_t* out) const {
    for (std::size_t w = 0; w < above.size(); ++w)
      for (MaskWord inside = reached[w] & ~above[w]; inside != 0; inside &= inside - 1) {
        const std::size_t place = begin + w * word_bits + static_cast<std::size_t>(std::countr_zero(inside));
        *out++ = candidate(score_key(score_(element_ + place, bit_ + place)), place);
      }
  }

 private:
  void add_candidates(std::span<const std::uint64_t> collected) {
    const std::size_t place = found_.fetch_add(collected.size(), std::memory_order_relaxed);
    if (place + collected.size() <= room_) std::copy(collected.begin(), collected.end(), candidates_ + place);
  }

  // ---- Decisions

  bool is_collected() const { return fits(open_, counts_.inside()); }

  // A candidate is a number: the larger is kept.
  std::uint64_t candidate(std::uint32_t key, std::size_t place) const {
    return std::uint64_t{key - range_.low} << index_bits_ | (index_mask() - place);
  }
  std::size_t candidate_bits(KeyRange range) const {
    return index_bits_ + static_cast<std::size_t>(std::bit_width(range.width() - 1));
  }
  std::uint64_t index_mask() const { return (std::uint64_t{1} << index_bits_) - 1; }

  void keep(std::uint64_t candidate) {
    const std::uint64_t place = index_mask() - (candidate & index_mask());
    words_[place / word_bits] |= MaskWord{1} << place % word_bits;
  }

  // Of the candidates; returns the threshold.
  std::uint32_t keep_candidates() {
    constexpr std::size_t few = 256;
    std::size_t needed = k_ - counts_.above;
    std::span<std::uint64_t> open(candidates_, counts_.inside());
    if (open.size() > few) open = keep_upper_bins(open, needed);
    const auto last = open.begin() + static_cast<std::ptrdiff_t>(needed - 1);
    std::nth_element(open.begin(), last, open.end(), std::greater());
    std::for_each(open.begin(), last + 1, [this](std::uint64_t value) { keep(value); });
    return range_.low + static_cast<std::uint32_t>(*last >> index_bits_);
  }

  // Keeps those in the bins of a histogram above the one that holds the needed-th, and returns the rest of them, which
  // is moved to the front, to choose from.
  std::span<std::uint64_t> keep_upper_bins(std::span<std::uint64_t> all, std::size_t& needed) {
    constexpr std::size_t bin_bits = 10;
    const std::size_t shift = std::max(candidate_bits(range_), bin_bits) - bin_bits;
    std::array<std::size_t, std::size_t{1} << bin_bits> bins{};
    for (const std::uint64_t value : all) ++bins[value >> shift];
    std::size_t bin = bins.size() - 1;
    for (; bins[bin] < needed; --bin) needed -= bins[bin];
    std::size_t rest = 0;
    for (const std::uint64_t value : all) {
      if (value >> shift > bin) keep(value);
      if (value >> shift == bin) all[rest++] = value;
    }
    return all.first(rest);
  }

  // Of the keys inside, which are equal.
  void keep_first() {
    std::size_t left = k_ - counts_.above;
    for (SelectChunk& chunk : chunks_) left -= chunk.kept = std::min(left, chunk.counts.inside());
    run(chunks_.size(), [this](std::size_t i) {
      std::array<MaskWord, select_block / word_bits> reached;
      std::size_t kept = chunks_[i].kept;
      if (kept == 0) return;
      for_blocks(i, [&](std::size_t begin, std::size_t count) {
        MaskWord* const words = words_ + begin / word_bits;
        compare_keys(score_, element_ + begin, bit_ + begin, count, range_, words, reached.data());
        join_first({words, words_for(count)}, reached.data(), kept);
      });
    });
  }

  Score score_;
  std::size_t element_, bit_, count_, k_ = 0;
  MaskWord* words_;
  std::span<SelectChunk> chunks_;
  std::uint64_t* candidates_;
  std::size_t room_;                 // for candidates
  std::span<std::uint32_t> sample_;  // in the same memory
  HostPool* pool_;
  std::size_t index_bits_ =
      static_cast<std::size_t>(std::bit_width(count_));  // of a candidate; those above hold its key

  KeyRange open_{0, key_end};           // where the k-th key is
  KeyCounts counts_{0, count_};         // of that range
  KeyRange range_{};                    // of the last read
  std::atomic<std::size_t> found_ = 0;  // keys in it
  double margin_ = 2.5;
};

/// visit(i, segment) for the segments that a rank selects in, i counting its tiles up to their first.
template <class F>
void for_selected_segments(const MaskPlan& plan, int rank, F visit) {
  const auto tiles = plan.tiles().subspan(plan.first_tile(rank), plan.first_dense_tile(rank) - plan.first_tile(rank));
  for (std::size_t i = 0; i < tiles.size();) {
    const Segment& segment = plan.segments()[tiles[i].segment];
    visit(i, segment);
    i += (segment.count - 1) / tile_bits + 1;
  }
}

struct SelectWorkspace {
  std::size_t chunks = 0, scratch = 0, bytes = 0;

  SelectWorkspace(const MaskPlan& plan, int rank) {
    std::size_t largest = 0;
    for_selected_segments(plan, rank,
                          [&](std::size_t, const Segment& segment) { largest = std::max(largest, segment.count); });
    if (largest == 0) return;
    chunks = (plan.first_dense_tile(rank) - plan.first_tile(rank)) * sizeof(LastThreshold);
    scratch = chunks;
    if (largest > small_segment) {
      scratch += chunks_for(largest) * sizeof(SelectChunk);
      bytes = candidates_for(largest) * sizeof(std::uint64_t);
    }
    bytes += scratch + alignof(std::uint64_t);
  }
};

}  // namespace detail

inline std::size_t select_workspace_bytes(const MaskPlan& plan, int rank, const HostStream&) {
  return detail::SelectWorkspace(plan, rank).bytes;
}

template <class Score>
void select_top(const MaskPlan& plan, PlanView, int rank, double density, Score score, std::span<MaskWord> words,
                std::span<std::byte> workspace, const HostStream& stream) {
  stream.enqueue([=, &plan, &pool = stream.pool()] {
    const detail::SelectWorkspace layout(plan, rank);
    void* place = workspace.data();
    std::size_t room = workspace.size();
    std::align(alignof(std::uint64_t), 0, place, room);
    std::byte* const base = static_cast<std::byte*>(place);
    const auto states = reinterpret_cast<detail::LastThreshold*>(base);
    const auto chunks = reinterpret_cast<detail::SelectChunk*>(base + layout.chunks);

    const auto tiles = plan.tiles().subspan(plan.first_tile(rank), plan.first_dense_tile(rank) - plan.first_tile(rank));
    const auto segment_of = [&](const Tile& tile) -> const Segment& { return plan.segments()[tile.segment]; };
    constexpr std::size_t run = 32;
    pool.run(words_for(tiles.size()), [&](std::size_t r) {
      std::array<detail::SelectChunk, 2> chunk;
      alignas(8) std::array<std::byte, detail::small_room * 8> scratch;
      for (std::size_t i = r * run; i < std::min(tiles.size(), (r + 1) * run); ++i) {
        const Tile& tile = tiles[i];
        const Segment& segment = segment_of(tile);
        if (tile.element != segment.begin || segment.count > detail::small_segment) continue;
        detail::Selection(score, tile.element, tile.bit, segment.count, words.data() + tile.bit / word_bits,
                          {chunk.data(), detail::chunks_for(segment.count)}, scratch, nullptr)
            .select(plan.kept(segment, density), states[i]);
      }
    });
    detail::for_selected_segments(plan, rank, [&](std::size_t i, const Segment& segment) {
      if (segment.count <= detail::small_segment) return;
      const Tile& tile = tiles[i];
      detail::Selection(score, tile.element, tile.bit, segment.count, words.data() + tile.bit / word_bits,
                        {chunks, detail::chunks_for(segment.count)},
                        {base + layout.scratch, detail::candidates_for(segment.count) * 8}, &pool)
          .select(plan.kept(segment, density), states[i]);
    });

    const std::size_t begin = plan.part_begin(rank), end = begin + plan.part_words()[static_cast<std::size_t>(rank)];
    const std::size_t used = tiles.empty() ? begin : tiles.back().bit / word_bits + words_for(tiles.back().count);
    std::fill(words.begin() + static_cast<std::ptrdiff_t>(used), words.begin() + static_cast<std::ptrdiff_t>(end), 0);
  });
}

}  // namespace scape::inline v0
