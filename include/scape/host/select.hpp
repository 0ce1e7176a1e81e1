#pragma once

#include <scape/arithmetic.hpp>
#include <scape/host/loop.hpp>
#include <scape/host/mark_range.hpp>
#include <scape/host/set_bits.hpp>
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
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

namespace scape::inline v0 {
namespace detail {

inline constexpr std::size_t select_block = 1024;             // elements whose keys are compared at once
inline constexpr std::size_t select_chunk = 16 * tile_bits;   // elements that a thread takes at once
inline constexpr std::size_t small_segment = 32 * tile_bits;  // most elements that one thread selects from alone
inline constexpr std::size_t small_room = 8192;               // for the candidates of such a segment
inline constexpr std::size_t sample_run = 8;                  // elements side by side that a sample takes

/// What is remembered of a segment: where the next threshold should be, less than `reach` away, and by how much
/// thresholds grow from call to call. Zeros: nothing. A guess, whatever it holds.
struct LastThreshold {
  std::uint32_t next : 31, jumps : 1;  ///< jumps: so far from where they should be that a sample tells more
  std::uint32_t reach;
  std::int32_t growth;
};

/// A run of a segment that one thread works on at a time.
struct SelectChunk {
  KeyCounts counts;  ///< of the last read
  std::size_t kept;  ///< how many of the keys inside are kept: the first ones
};
inline std::size_t chunks_for(std::size_t count) noexcept { return (count - 1) / select_chunk + 1; }

inline int bits_for(std::uint64_t number) noexcept { return static_cast<int>(std::bit_width(number)); }

/// A key of the range that was read, and where it is, as one number: the larger is kept, the lower index first.
struct CandidateCode {
  std::uint32_t low;  ///< of the range
  int index_bits;
  std::uint64_t index_mask() const { return (std::uint64_t{1} << index_bits) - 1; }
  std::uint64_t encode(std::uint32_t key, std::size_t index) const {
    return std::uint64_t{key - low} << index_bits | (index_mask() - index);
  }
  std::uint32_t key(std::uint64_t candidate) const { return low + static_cast<std::uint32_t>(candidate >> index_bits); }
  std::size_t index(std::uint64_t candidate) const { return index_mask() - (candidate & index_mask()); }
};

/// count^(2/3): a sample of that many keys leaves about twice as many candidates, so that neither costs much more time
/// than the other.
inline std::size_t sample_share(std::size_t count) noexcept {
  const double root = std::cbrt(static_cast<double>(count));
  return static_cast<std::size_t>(root * root);
}
inline std::size_t candidates_for(std::size_t count) noexcept { return 3 * sample_share(count); }

/// Of a segment that fits into a core's first cache the sample is all.
inline std::size_t sample_size(std::size_t count) noexcept {
  return count <= tile_bits ? count : sample_share(count) / sample_run * sample_run;
}

template <class Score>
SCAPE_HOST_LOOP void compute_keys(Score score, std::size_t element, std::size_t bit, std::size_t count,
                                  std::uint32_t* keys) {
  for (std::size_t i = 0; i < count; ++i) keys[i] = score_key(score(element + i, bit + i));
}

template <class Score>
SCAPE_HOST_LOOP void compute_scores(Score score, std::size_t element, std::size_t bit, std::size_t count,
                                    float* scores) {
  for (std::size_t i = 0; i < count; ++i) scores[i] = score(element + i, bit + i);
}

template <class Score>
SCAPE_HOST_LOOP void compute_bounds(Score score, std::size_t element, std::size_t bit, std::size_t count,
                                    float* bounds) {
  for (std::size_t i = 0; i < count; ++i) bounds[i] = score.bound(element + i, bit + i);
}

/// Of chosen ones.
template <class Score>
SCAPE_HOST_LOOP void compute_chosen_scores(Score score, std::size_t element, std::size_t bit, const SetBits& chosen,
                                           float* scores) {
  for (const std::size_t i : chosen) scores[i] = score(element + i, bit + i);
}

/// The scores of at most select_block elements side by side: where they are, if that is an array, or computed.
class ScoreBlock {
 public:
  /// Where scores have a bound, those whose bound's key reaches `least`; the others are the bound.
  template <class Score>
  void read(const Score& score, std::size_t element, std::size_t bit, std::size_t count, std::uint32_t least) {
    count_ = count;
    if constexpr (requires { score.array(element); }) {
      scores_ = score.array(element);
      if (count % word_bits == 0) return;  // else there may be no array behind them
      std::copy(scores_, scores_ + count, computed_);
    } else if constexpr (requires { score.bound(element, bit); }) {
      compute_bounds(score, element, bit, count, computed_);
    } else {
      compute_scores(score, element, bit, count, computed_);
    }
    scores_ = computed_;
    std::fill(computed_ + count, computed_ + words_for(count) * word_bits, 0.0f);
    if constexpr (
        requires { score.bound(element, bit); } && !requires { score.array(element); }) {
      MaskWord none[select_block / word_bits], possible[select_block / word_bits];
      const std::size_t found = mark({std::min(least, infinite_key), key_end}, none, possible).reached;
      if (found > count / 3) return compute_scores(score, element, bit, count, computed_);  // side by side is faster
      SetBits chosen;
      chosen.find(possible, words_for(count));
      compute_chosen_scores(score, element, bit, chosen, computed_);
    }
  }

  std::uint32_t key(std::size_t i) const noexcept { return score_key(scores_[i]); }

  /// Writes one bit for each element whose key is above the range, and for each whose key is inside it or above.
  KeyCounts mark(KeyRange range, MaskWord* above, MaskWord* reached) const {
    KeyCounts counts = mark_range(scores_, words_for(count_) * word_bits, range, above, reached);
    if (count_ % word_bits != 0) {
      const auto trim = [this](MaskWord& last) {
        const MaskWord padding = last & ~MaskWord{0} << count_ % word_bits;
        last ^= padding;
        return static_cast<std::size_t>(std::popcount(padding));
      };
      counts.above -= trim(above[count_ / word_bits]);
      counts.reached -= trim(reached[count_ / word_bits]);
    }
    return counts;
  }

 private:
  std::size_t count_ = 0;
  const float* scores_ = nullptr;
  float computed_[select_block];
};

/// Encodes the keys inside the range, by the bits that ScoreBlock::mark wrote. Those of a segment count from `begin`.
inline void collect_keys(const ScoreBlock& scores, std::size_t begin, std::span<const MaskWord> above,
                         const MaskWord* reached, CandidateCode code, std::uint64_t* candidates) {
  for (std::size_t w = 0; w < above.size(); ++w)
    for (MaskWord inside = reached[w] & ~above[w]; inside != 0; inside &= inside - 1) {
      const std::size_t i = w * word_bits + static_cast<std::size_t>(std::countr_zero(inside));
      *candidates++ = code.encode(scores.key(i), begin + i);
    }
}

/// Adds to the words the first `left` of the bits that `reached` has and they have not; counts them down.
SCAPE_HOST_LOOP inline void join_first(std::span<MaskWord> words, const MaskWord* reached, std::size_t& left) {
  for (std::size_t w = 0; w < words.size() && left != 0; ++w) {
    MaskWord joined = reached[w] & ~words[w];
    std::size_t count = static_cast<std::size_t>(std::popcount(joined));
    for (; count > left; --count) joined ^= std::bit_floor(joined);
    left -= count;
    words[w] |= joined;
  }
}

/// Of fewer than 2^32 keys.
SCAPE_HOST_LOOP inline std::size_t count_reached(std::span<const std::uint32_t> keys, std::uint32_t bound) {
  std::uint32_t reached = 0;
  for (const std::uint32_t key : keys) reached += key >= bound;
  return reached;
}

/// A range that holds the k-th largest key, of one key or with no more than `few` inside. Halves it again and again:
/// counting takes vectors little time.
inline KeyRange range_of_kth(std::span<const std::uint32_t> keys, std::size_t k, std::size_t few) {
  KeyRange range{0, key_end};
  KeyCounts counts{0, keys.size()};
  while (counts.inside() > few && range.width() > 1) {
    const std::uint32_t middle = range.low + range.width() / 2;
    const std::size_t reached = count_reached(keys, middle);
    (reached >= k ? range.low : range.high) = middle;
    (reached >= k ? counts.reached : counts.above) = reached;
  }
  return range;
}

/// What select_top does ahead of a tile's first score: nothing.
struct NothingFirst {
  void operator()(std::size_t) const {}
};

/// Finds the k largest keys of one segment, the lower index first where they are equal, and writes its words.
///
/// A range of keys that should hold the k-th is guessed, from the last call's threshold or else from a sample. One read
/// writes the bits of the keys above it, counts, and collects the few keys inside as candidates, among which the rest
/// is decided. Where the guess was wrong, or more keys are inside than there is room for, the counts narrow what is
/// open and another guess is read; at worst down to one key that many elements share, the first of which one more read
/// finds.
///
/// prepare(i) is called once for the i-th tile_bits elements, ahead of their first score: by the read itself, so that
/// it finds them in the cache, unless a sample has to be taken before.
template <class Score, class Prepare>
class Selection {
 public:
  /// One chunk for every select_chunk elements; they are worked on one after the other where there is no pool. Scratch:
  /// candidates_for(count) numbers.
  Selection(Score score, Prepare prepare, std::size_t element, std::size_t bit, std::size_t count, MaskWord* words,
            std::span<SelectChunk> chunks, std::byte* scratch, HostPool* pool)
      : score_(score),
        prepare_(prepare),
        element_(element),
        bit_(bit),
        count_(count),
        words_(words),
        chunks_(chunks),
        candidates_(reinterpret_cast<std::uint64_t*>(scratch), candidates_for(count)),
        sample_(reinterpret_cast<std::uint32_t*>(scratch), sample_size(count)),
        pool_(pool) {}

  void select(std::size_t k, LastThreshold& last) {
    if (k == count_) {
      prepare_all();
      return run(chunks_.size(), [this](std::size_t i) { keep_all(i); });
    }
    k_ = k;
    for (KeyRange guess = first_guess(last);; guess = next_guess()) {
      const KeyCounts counts = read(guess);
      if (counts.above >= k) {
        open_.low = guess.high;
        counts_.reached = counts.above;
      } else if (counts.reached < k) {
        open_.high = guess.low;
        counts_.above = counts.reached;
      } else {
        open_ = guess;
        counts_ = counts;
        if (can_collect(open_, counts_.inside())) return remember(keep_candidates(), last);
        if (open_.width() == 1) return keep_first(), remember(open_.low, last);
      }
    }
  }

 private:
  static constexpr std::size_t few = 16;           // candidates to be left by a guess from all keys
  static constexpr std::size_t few_to_sort = 256;  // candidates among which no histogram is needed

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

  void prepare_all() {
    run(chunks_.size(),
        [this](std::size_t i) { for_blocks(i, [this](std::size_t begin, std::size_t) { prepare(begin); }); });
    is_prepared_ = true;
  }
  void prepare(std::size_t begin) const {
    if (begin % tile_bits == 0) prepare_(begin / tile_bits);
  }

  void keep_all(std::size_t chunk) {
    for_blocks(chunk, [&](std::size_t begin, std::size_t count) {
      std::fill_n(words_ + begin / word_bits, words_for(count), ~MaskWord{0});
      if (count % word_bits != 0) words_[(begin + count) / word_bits] = (MaskWord{1} << count % word_bits) - 1;
    });
  }

  // ---- Guesses

  KeyRange first_guess(LastThreshold last) {
    if (last.reach == 0 || last.jumps) {
      prepare_all();
      return next_guess();
    }
    const std::uint32_t key = last.next;
    return {key - std::min(key, last.reach - 1), key + std::min(key_end - key, last.reach)};
  }

  // A part of what is open, or all of it where that can be collected.
  KeyRange next_guess() {
    if (can_collect(open_, counts_.inside())) return open_;
    take_sample();
    const KeyRange likely = sample_.size() == count_ ? range_of_kth(sample_, k_, few) : likely_range();
    const KeyRange guess{std::max(open_.low, likely.low), std::min(open_.high, likely.high)};
    margin_ *= 4;
    return guess.low < guess.high && guess != open_ ? guess : median_key();
  }

  // All keys, or runs of them, one at a place like random in every stride.
  void take_sample() {
    if (sample_.size() == count_) return compute_keys(score_, element_, bit_, count_, sample_.data());
    constexpr std::size_t part = 128;
    const std::size_t runs = sample_.size() / sample_run, stride = count_ / runs, rest = count_ % runs;
    run((runs - 1) / part + 1, [=, this](std::size_t i) {
      for (std::size_t r = i * part; r < std::min(runs, (i + 1) * part); ++r) {
        const std::size_t shift = (r * 0x9e3779b97f4a7c15 >> 32) % (stride - sample_run + 1);
        const std::size_t place = r * stride + r * rest / runs + shift;
        compute_keys(score_, element_ + place, bit_ + place, sample_run, sample_.data() + r * sample_run);
      }
    });
  }

  // Around the key whose place in the sample is that of the k-th among all: as far as the margin times the standard
  // deviation of how many of the k a sample has.
  KeyRange likely_range() const {
    const double size = static_cast<double>(sample_.size());
    const double rank = size * static_cast<double>(k_) / static_cast<double>(count_);
    const double error = margin_ * std::sqrt(rank * (1 - rank / size)) + 2;
    const auto accuracy = static_cast<std::size_t>(error / 16);
    KeyRange range{0, key_end};
    if (rank + error < size) range.low = range_of_kth(sample_, static_cast<std::size_t>(rank + error), accuracy).low;
    if (rank - error >= 1) range.high = range_of_kth(sample_, static_cast<std::size_t>(rank - error), accuracy).high;
    return range;
  }

  // Of the sample's keys that are open, or just the middle where none is: what bounds the worst case.
  KeyRange median_key() const {
    const std::size_t above = count_reached(sample_, open_.high), reached = count_reached(sample_, open_.low);
    const std::uint32_t middle = open_.low + open_.width() / 2;
    return above == reached ? KeyRange{middle, middle + 1} : range_of_kth(sample_, (above + reached + 1) / 2, 0);
  }

  // For the next call, whose threshold should grow as the last ones did, smoothed. It is looked for four times as far
  // away as this one was from where it should have been, half as far as this time, or among a few elements, whichever
  // is most; a sample tells more where that is too much.
  void remember(std::uint32_t threshold, LastThreshold& last) const {
    const double most = spacing(threshold) * static_cast<double>(std::min(sample_share(count_), 2 * k_));
    const double error = static_cast<double>(threshold) - last.next;
    const double before = last.reach == 0 ? 0 : last.reach - 1;
    const double reach = std::max({4 * std::abs(error), before / 2, most / 16});
    const double growth = last.reach == 0 ? 0 : std::clamp(last.growth + error / 2, -0x1p30, 0x1p30);
    last.next = static_cast<std::uint32_t>(std::clamp(threshold + growth, 0.0, key_end - 1.0)) & (key_end - 1);
    last.jumps = reach > most;
    last.reach = 1 + static_cast<std::uint32_t>(std::min({reach, 4 * most, key_end / 2.0}));
    last.growth = static_cast<std::int32_t>(growth);
  }

  // From one element's key to the next, on average, near the threshold: in the last range, up to where it has a bound.
  double spacing(std::uint32_t threshold) const {
    double keys = 0, elements = 1;
    if (open_.low != 0) {
      keys += threshold - open_.low + 1;
      elements += static_cast<double>(counts_.reached - k_);
    }
    if (open_.high != key_end) {
      keys += open_.high - threshold;
      elements += static_cast<double>(k_ - counts_.above);
    }
    return keys / elements;
  }

  // ---- Reads

  CandidateCode code(KeyRange range) const { return {range.low, bits_for(count_)}; }
  int candidate_bits(KeyRange range) const { return bits_for(count_) + bits_for(range.width() - 1); }
  bool can_collect(KeyRange range, std::size_t inside) const {
    return inside <= candidates_.size() && candidate_bits(range) <= 64;
  }

  KeyCounts read(KeyRange range) {
    found_ = 0;
    run(chunks_.size(), [=, this](std::size_t i) { chunks_[i].counts = read_chunk(i, range); });
    is_prepared_ = true;
    KeyCounts counts;
    for (const SelectChunk& chunk : chunks_) counts += chunk.counts;
    return counts;
  }

  KeyCounts read_chunk(std::size_t chunk, KeyRange range) {
    ScoreBlock scores;
    std::array<MaskWord, select_block / word_bits> reached;
    std::array<std::uint64_t, 2 * select_block> collected;
    std::size_t pending = 0;
    KeyCounts counts;
    for_blocks(chunk, [&](std::size_t begin, std::size_t count) {
      if (!is_prepared_) prepare(begin);
      MaskWord* const above = words_ + begin / word_bits;
      scores.read(score_, element_ + begin, bit_ + begin, count, range.low);
      const KeyCounts block = scores.mark(range, above, reached.data());
      counts += block;
      if (block.inside() == 0 || !can_collect(range, found_)) return;
      collect_keys(scores, begin, {above, words_for(count)}, reached.data(), code(range), collected.data() + pending);
      pending += block.inside();
      if (pending >= select_block) add_candidates({collected.data(), std::exchange(pending, 0)});
    });
    add_candidates({collected.data(), pending});
    return counts;
  }

  void add_candidates(std::span<const std::uint64_t> collected) {
    const std::size_t place = found_.fetch_add(collected.size(), std::memory_order_relaxed);
    if (place + collected.size() <= candidates_.size())
      std::copy(collected.begin(), collected.end(), candidates_.data() + place);
  }

  // ---- Decisions

  // Of the candidates, in whatever order they were found. Returns the threshold.
  std::uint32_t keep_candidates() {
    std::size_t needed = k_ - counts_.above;
    std::span<std::uint64_t> undecided = candidates_.first(counts_.inside());
    if (undecided.size() > few_to_sort) undecided = keep_upper_bins(undecided, needed);
    const auto last = undecided.begin() + static_cast<std::ptrdiff_t>(needed - 1);
    std::nth_element(undecided.begin(), last, undecided.end(), std::greater());
    std::for_each(undecided.begin(), last + 1, [this](std::uint64_t candidate) { keep(candidate); });
    return code(open_).key(*last);
  }

  // By a histogram: keeps what is in bins above the one that the last of the needed is in, and moves that one's to the
  // front.
  std::span<std::uint64_t> keep_upper_bins(std::span<std::uint64_t> candidates, std::size_t& needed) {
    constexpr int bin_bits = 10;
    const int shift = std::max(candidate_bits(open_) - bin_bits, 0);
    std::array<std::size_t, std::size_t{1} << bin_bits> bins{};
    for (const std::uint64_t candidate : candidates) ++bins[candidate >> shift];
    std::size_t bin = bins.size() - 1;
    for (; bins[bin] < needed; --bin) needed -= bins[bin];
    std::size_t inside = 0;
    for (const std::uint64_t candidate : candidates) {
      if (candidate >> shift > bin) keep(candidate);
      if (candidate >> shift == bin) candidates[inside++] = candidate;
    }
    return candidates.first(inside);
  }

  void keep(std::uint64_t candidate) {
    const std::size_t index = code(open_).index(candidate);
    words_[index / word_bits] |= MaskWord{1} << index % word_bits;
  }

  // Of the keys inside, which are all equal.
  void keep_first() {
    std::size_t left = k_ - counts_.above;
    for (SelectChunk& chunk : chunks_) left -= chunk.kept = std::min(left, chunk.counts.inside());
    run(chunks_.size(), [this](std::size_t i) {
      std::size_t kept = chunks_[i].kept;
      if (kept == 0) return;
      for_blocks(i, [&](std::size_t begin, std::size_t count) {
        ScoreBlock scores;
        std::array<MaskWord, select_block / word_bits> reached;
        MaskWord* const words = words_ + begin / word_bits;
        scores.read(score_, element_ + begin, bit_ + begin, count, open_.low);
        scores.mark(open_, words, reached.data());
        join_first({words, words_for(count)}, reached.data(), kept);
      });
    });
  }

  Score score_;
  Prepare prepare_;
  bool is_prepared_ = std::is_same_v<Prepare, NothingFirst>;
  std::size_t element_, bit_, count_;
  MaskWord* words_;
  std::span<SelectChunk> chunks_;
  std::span<std::uint64_t> candidates_;
  std::span<std::uint32_t> sample_;  // in the same memory: a sample is taken before candidates are collected
  HostPool* pool_;

  std::size_t k_ = 0;
  KeyRange open_{0, key_end};           // where the k-th key is
  KeyCounts counts_{0, count_};         // of that range
  double margin_ = 2.5;                 // of the next guess
  std::atomic<std::size_t> found_ = 0;  // candidates, whether there was room for them or not
};

/// visit(i, segment) for the segments that a rank selects in; the first tile of each is its i-th.
template <class F>
void for_selected_segments(const MaskPlan& plan, int rank, F visit) {
  for (std::size_t i = plan.first_tile(rank); i < plan.first_dense_tile(rank);) {
    const Segment& segment = plan.segments()[plan.tiles()[i].segment];
    visit(i - plan.first_tile(rank), segment);
    i += (segment.count - 1) / tile_bits + 1;
  }
}

/// How a rank's selection lies in its workspace.
struct HostSelectWorkspace {
  std::size_t chunks = 0, scratch = 0, bytes = 0;  // after the last thresholds, by tile; offsets, and the whole

  HostSelectWorkspace(const MaskPlan& plan, int rank) {
    std::size_t largest = 0;
    for_selected_segments(plan, rank, [&](std::size_t, const Segment& segment) {
      if (segment.count > small_segment) largest = std::max(largest, segment.count);
    });
    const std::size_t tiles = plan.first_dense_tile(rank) - plan.first_tile(rank);
    chunks = (tiles * sizeof(LastThreshold) + alignof(SelectChunk) - 1) / alignof(SelectChunk) * alignof(SelectChunk);
    scratch = chunks + (largest == 0 ? 0 : chunks_for(largest)) * sizeof(SelectChunk);
    bytes = scratch + candidates_for(largest) * sizeof(std::uint64_t) + (tiles == 0 ? 0 : alignof(std::uint64_t));
  }
};

}  // namespace detail

/// Bytes that select_top works in: 12 for each tile that the rank selects in, which remember the last call, and, where
/// a segment has more than 131,072 elements, of the largest one 24 for every 65,536 elements and 24 * count^(2/3).
inline std::size_t select_workspace_bytes(const MaskPlan& plan, int rank, const HostStream&) {
  return detail::HostSelectWorkspace(plan, rank).bytes;
}

/// Writes the rank's part of a mask: in each of its segments the bits of the k largest score_key(score(element, bit)),
/// the lower index first where keys are equal. Computes every score once, and those of a sample
/// where thresholds jump; all twice where more keys are equal to the k-th
/// than there is room for, or where a guess fails: about once in a hundred times. At worst, with scores made for it,
/// about 50 times.
///
/// Calls prepare(i) once for every tile of the plan, of whatever rank, ahead of all scores of the tile's elements and
/// of what is written of its words; mostly right ahead, so that scores find in the cache what prepare has left there.
template <class Score, class Prepare>
void select_top(const MaskPlan& plan, PlanView, int rank, double density, Score score, std::span<MaskWord> words,
                std::span<std::byte> workspace, Prepare prepare, const HostStream& stream) {
  stream.enqueue([=, &plan, &pool = stream.pool()] {
    const detail::HostSelectWorkspace layout(plan, rank);
    void* base = workspace.data();
    std::size_t size = workspace.size();
    std::align(alignof(std::uint64_t), 0, base, size);
    const auto at = [base](std::size_t offset) { return static_cast<std::byte*>(base) + offset; };
    const std::size_t first_tile = plan.first_tile(rank);
    const auto tiles = plan.tiles().subspan(first_tile, plan.first_dense_tile(rank) - first_tile);
    const auto select = [&](std::size_t i, const Segment& segment, detail::SelectChunk* chunks, std::byte* scratch,
                            HostPool* threads) {
      const auto select_after = [&](auto first) {
        detail::Selection(score, first, segment.begin, tiles[i].bit, segment.count,
                          words.data() + tiles[i].bit / word_bits, {chunks, detail::chunks_for(segment.count)}, scratch,
                          threads)
            .select(plan.kept(segment, density), reinterpret_cast<detail::LastThreshold*>(at(0))[i]);
      };
      if constexpr (std::is_same_v<Prepare, detail::NothingFirst>)
        select_after(prepare);
      else
        select_after([&prepare, first = first_tile + i](std::size_t tile) { prepare(first + tile); });
    };

    constexpr std::size_t run = 32;
    pool.run((tiles.size() + run - 1) / run, [&](std::size_t r) {
      std::array<detail::SelectChunk, detail::small_segment / detail::select_chunk> chunks;
      alignas(std::uint64_t) std::array<std::byte, detail::small_room * sizeof(std::uint64_t)> scratch;
      for (std::size_t i = r * run; i < std::min(tiles.size(), (r + 1) * run); ++i) {
        const Segment& segment = plan.segments()[tiles[i].segment];
        if (tiles[i].element == segment.begin && segment.count <= detail::small_segment)
          select(i, segment, chunks.data(), scratch.data(), nullptr);
      }
    });
    detail::for_selected_segments(plan, rank, [&](std::size_t i, const Segment& segment) {
      if (segment.count > detail::small_segment)
        select(i, segment, reinterpret_cast<detail::SelectChunk*>(at(layout.chunks)), at(layout.scratch), &pool);
    });
    if constexpr (!std::is_same_v<Prepare, detail::NothingFirst>) {  // the tiles that are not selected in
      constexpr std::size_t neighbours = detail::select_chunk / tile_bits;
      const std::size_t others = plan.tiles().size() - tiles.size();
      pool.run((others + neighbours - 1) / neighbours, [&](std::size_t r) {
        for (std::size_t i = r * neighbours; i < std::min(others, (r + 1) * neighbours); ++i)
          prepare(i < first_tile ? i : i + tiles.size());
      });
    }

    const std::size_t begin = plan.part_begin(rank), end = begin + plan.part_words()[static_cast<std::size_t>(rank)];
    const std::size_t used = tiles.empty() ? begin : tiles.back().bit / word_bits + words_for(tiles.back().count);
    std::fill(words.begin() + static_cast<std::ptrdiff_t>(used), words.begin() + static_cast<std::ptrdiff_t>(end), 0);
  });
}

/// The same with nothing to prepare.
template <class Score>
void select_top(const MaskPlan& plan, PlanView tables, int rank, double density, Score score, std::span<MaskWord> words,
                std::span<std::byte> workspace, const HostStream& stream) {
  select_top(plan, tables, rank, density, score, words, workspace, detail::NothingFirst{}, stream);
}

}  // namespace scape::inline v0
