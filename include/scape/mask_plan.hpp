#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>
#include <scape/fingerprint.hpp>
#include <scape/layout.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace scape::inline v0 {

inline constexpr std::size_t word_bits = 32;

/// Bits of a mask that are worked on at once: 16 KiB of floats, so a tile of three arrays stays in a core's first
/// cache.
inline constexpr std::size_t tile_bits = 4096;

SCAPE_HOST_DEVICE constexpr std::size_t words_for(std::size_t bits) noexcept {
  return bits / word_bits + (bits % word_bits != 0);
}

/// Elements that a segment of `count` elements keeps: max(1, floor(density * count + 1e-6)), all at density >= 1.
SCAPE_HOST_DEVICE inline std::size_t kept_count(std::size_t count, double density) noexcept {
  if (count == 0 || density >= 1) return count;
  // Fused, so that every compiler and device rounds once.
  const double share = std::fma(density, static_cast<double>(count), 1e-6);
  const std::size_t kept = static_cast<std::size_t>(share);
  return kept < 1 ? 1 : kept > count ? count : kept;
}

/// A run of at most tile_bits elements of one segment.
struct Tile {
  std::size_t element;    ///< first element in parameter space
  std::size_t bit;        ///< its bit in mask space; a multiple of word_bits
  std::size_t own;        ///< its place in arrays of what its owner keeps: `element` where every rank keeps all
  std::uint32_t count;    ///< elements
  std::uint32_t segment;  ///< index into the layout's segments
  std::uint32_t large;    ///< which of its owner's segments of more than one tile that one is; dense ones not counted
};

/// Where scores find what only the owner keeps of an element: Tile::own, for selection on a rank's own part.
struct PlaceOfElement {  // every rank keeps all
  SCAPE_HOST_DEVICE std::size_t operator()(std::size_t element, std::size_t) const { return element; }
};
struct PlaceInPart {  // sharded
  std::size_t first_bit;
  SCAPE_HOST_DEVICE std::size_t operator()(std::size_t, std::size_t bit) const { return bit - first_bit; }
};

/// The tables of a MaskPlan, in memory that the stream's work can read.
struct PlanView {
  std::span<const Tile> tiles;              ///< in payload order
  std::span<const Segment> segments;        ///< in the layout's order
  std::span<const std::size_t> first_tile;  ///< by rank, and one more: its tiles are [first_tile[r], first_tile[r + 1])
  std::span<const std::uint32_t> payload_order{};  ///< where there are several buckets: tiles by bucket, owner, index
  std::span<const std::size_t> payload_runs{};     ///< by bucket and owner, and one more: places in that order
};

/// The run of payload positions that a bucket's kept elements have.
struct PayloadPart {
  std::size_t begin = 0, count = 0;
  std::size_t stride = 0;  ///< 0, or of a payload by ranks: where each rank's positions begin in it, times the rank
};

/// A mask with all that is needed to use it.
struct MaskView {
  PlanView plan;
  std::span<const MaskWord> words;          ///< bits in mask space; those of no element are zero
  std::span<const std::size_t> offsets;     ///< by tile: payload position of its first kept element
  std::size_t kept;                         ///< elements of the payload
  std::span<const PayloadPart> parts{};     ///< by bucket; in host memory
  std::span<const std::uint32_t> chosen{};  ///< the tiles that a pass visits, where it is not all of them: see only()

  /// Tiles that a pass visits, and the index of the i-th.
  std::size_t visits() const noexcept { return chosen.empty() ? plan.tiles.size() : chosen.size(); }
  std::size_t visited(std::size_t i) const noexcept { return chosen.empty() ? i : chosen[i]; }

  /// For passes over some tiles only, given by their indices, in memory like the plan's; not none.
  MaskView only(std::span<const std::uint32_t> tiles) const {
    MaskView some = *this;
    some.chosen = tiles;
    return some;
  }
  /// The mask as if there were only the tiles [first, last), at the same places of the payload.
  MaskView part(std::size_t first, std::size_t last) const {
    MaskView part = *this;
    part.plan.tiles = plan.tiles.subspan(first, last - first);
    part.offsets = offsets.subspan(first, last - first);
    return part;
  }
};

/// How masks over a layout are laid out in memory; made once, on the host.
///
/// Mask space holds first the words that travel, by owner, each segment padded to whole words; then the words of the
/// dense segments, which never change and never travel. With uniform parts every rank's part is padded to the largest,
/// so that one all-gather of equal counts writes straight into the mask: ranks() times the busiest owner's share; with
/// exact parts nothing is padded, and the communicator must be an UnevenCommunicator.
/// The payload is in the order of the tiles: by owner, the sparse segments first; within a segment by index. Of several
/// buckets each has its run of the payload, in that order.
class MaskPlan {
 public:
  /// `sharded`: for arrays of which every rank holds its own elements only, Tile::own counts those.
  /// Throws std::invalid_argument where the segments are not ordered, disjoint and covering, or an owner is no rank.
  template <ShardedLayout L>
  explicit MaskPlan(const L& layout, bool exact_parts = false, bool sharded = false)
      : MaskPlan(layout.size(), layout.ranks(), layout.segments(), exact_parts, sharded) {}

  MaskPlan(std::size_t size, int ranks, std::span<const Segment> segments, bool exact_parts, bool sharded = false)
      : size_(size),
        ranks_(ranks),
        exact_parts_(exact_parts),
        sharded_(sharded),
        segments_(segments.begin(), segments.end()) {
    check();
    place_parts();
    place_tiles();
    order_payload();
  }

  std::size_t size() const noexcept { return size_; }
  int ranks() const noexcept { return ranks_; }
  bool exact_parts() const noexcept { return exact_parts_; }
  bool sharded() const noexcept { return sharded_; }
  std::span<const Segment> segments() const noexcept { return segments_; }
  std::span<const Tile> tiles() const noexcept { return tiles_; }

  /// Words of a whole mask, and of its first part, which travels.
  std::size_t words() const noexcept { return words_; }
  std::size_t exchanged_words() const noexcept { return part_begin_.back(); }

  /// Words of every rank's part, and where a rank's begins.
  std::span<const std::size_t> part_words() const noexcept { return part_words_; }
  std::size_t part_begin(int rank) const noexcept { return part_begin_[static_cast<std::size_t>(rank)]; }

  /// Tiles of a rank in payload order: those it selects in, then those of its dense segments.
  std::size_t first_tile(int rank) const noexcept { return first_tile_[static_cast<std::size_t>(rank)]; }
  std::size_t first_dense_tile(int rank) const noexcept { return first_dense_tile_[static_cast<std::size_t>(rank)]; }

  /// Buckets that payloads are reduced in, and one's tiles, by owner, out of the plan's tables or a copy of them; of
  /// one bucket alone there is no such list.
  std::size_t buckets() const noexcept { return (payload_runs_.size() - 1) / static_cast<std::size_t>(ranks_); }
  std::span<const std::uint32_t> bucket_tiles(PlanView tables, std::size_t bucket) const noexcept {
    const std::size_t ranks = static_cast<std::size_t>(ranks_), begin = payload_runs_[bucket * ranks];
    return tables.payload_order.subspan(begin, payload_runs_[(bucket + 1) * ranks] - begin);
  }
  /// Those of one owner.
  std::span<const std::uint32_t> bucket_tiles(PlanView tables, std::size_t bucket, int rank) const noexcept {
    const std::size_t run = bucket * static_cast<std::size_t>(ranks_) + static_cast<std::size_t>(rank);
    return tables.payload_order.subspan(payload_runs_[run], payload_runs_[run + 1] - payload_runs_[run]);
  }

  /// The tables as host memory; they live as long as the plan.
  PlanView view() const noexcept { return {tiles_, segments_, first_tile_, payload_order_, payload_runs_}; }

  /// Elements kept of a segment, of all, and of every rank's segments.
  std::size_t kept(const Segment& segment, double density) const noexcept {
    return kept_count(segment.count, segment.dense ? 1 : density);
  }
  std::size_t kept(double density) const noexcept {
    std::size_t sum = 0;
    for (const Segment& segment : segments_) sum += kept(segment, density);
    return sum;
  }
  std::vector<std::size_t> kept_by_rank(double density) const {
    std::vector<std::size_t> sums(static_cast<std::size_t>(ranks_));
    for (const Segment& segment : segments_) sums[static_cast<std::size_t>(segment.owner)] += kept(segment, density);
    return sums;
  }

  /// The last without the dense segments, into a vector; allocates only where its capacity is below ranks().
  void selected_by_rank(double density, std::vector<std::size_t>& sums) const {
    sums.assign(static_cast<std::size_t>(ranks_), 0);
    for (const Segment& segment : segments_)
      if (!segment.dense) sums[static_cast<std::size_t>(segment.owner)] += kept(segment, density);
  }

  /// Elements of arrays of what a rank keeps: sharded, its own, each segment padded to whole words, the sparse ones
  /// first, as they lie in its part of the mask.
  std::size_t own_elements(int rank) const noexcept { return own_elements_[static_cast<std::size_t>(rank)]; }

  /// The payload of a mask by buckets. By ranks: each rank has as many positions of a bucket as the busiest keeps
  /// there, rounded up to whole words of 2 bytes an element; else nothing is padded. Into a vector: allocates only
  /// where a capacity is below buckets() or, of `sums`, which is scratch, buckets() * ranks().
  void payload_parts(double density, bool by_rank, std::vector<PayloadPart>& parts,
                     std::vector<std::size_t>& sums) const {
    const std::size_t ranks = static_cast<std::size_t>(ranks_);
    sums.assign(buckets() * ranks, 0);
    for (const Segment& segment : segments_)
      sums[segment.bucket * ranks + static_cast<std::size_t>(segment.owner)] += kept(segment, density);
    parts.clear();
    std::size_t begin = 0;
    for (auto run = sums.begin(); run != sums.end(); run += static_cast<std::ptrdiff_t>(ranks)) {
      const auto end = run + static_cast<std::ptrdiff_t>(ranks);
      const std::size_t most = *std::max_element(run, end), stride = by_rank ? most + most % 2 : 0;
      parts.push_back({begin, by_rank ? stride * ranks : std::accumulate(run, end, std::size_t{0}), stride});
      begin += parts.back().count;
    }
  }
  std::vector<PayloadPart> payload_parts(double density, bool by_rank) const {
    std::vector<PayloadPart> parts;
    std::vector<std::size_t> sums;
    payload_parts(density, by_rank, parts, sums);
    return parts;
  }
  /// Positions in all.
  std::size_t payload_size(double density, bool by_rank) const {
    const std::vector<PayloadPart> parts = payload_parts(density, by_rank);
    return parts.back().begin + parts.back().count;
  }

  /// Equal on two ranks whose layouts are equal; another number, almost surely, where anything differs.
  std::uint64_t fingerprint() const noexcept {
    Fingerprint hash;
    hash.add(std::uint64_t{size_})
        .add(static_cast<std::uint64_t>(ranks_))
        .add(std::uint64_t{exact_parts_} * 2 + std::uint64_t{sharded_});
    for (const Segment& segment : segments_)
      hash.add(std::uint64_t{segment.begin})
          .add(std::uint64_t{segment.count})
          .add(static_cast<std::uint64_t>(segment.owner))
          .add(std::uint64_t{segment.bucket} * 4 + std::uint64_t{segment.dense} * 2 + std::uint64_t{segment.decay});
    return hash.value();
  }

 private:
  void check() const {
    expects(ranks_ >= 1, "layout.ranks()", ranks_, "must be at least 1");
    expects(segments_.size() <= 0xffffffff, "layout.segments().size()", segments_.size(), "must be below 2^32");
    std::size_t end = 0;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      const Segment& segment = segments_[i];
      const std::string name = "layout.segments()[" + std::to_string(i) + "]";
      expects(segment.begin == end, name + ".begin", segment.begin,
              "segments must be in order, disjoint and covering; expected ", end);
      expects(segment.count <= size_ - end, name + ".count", segment.count, "runs past the layout's size");
      expects(segment.owner >= 0 && segment.owner < ranks_, name + ".owner", segment.owner, "must be a rank, 0 to ",
              (ranks_ - 1));
      expects(segment.bucket < segments_.size(), name + ".bucket", segment.bucket,
              "must be below the number of segments, ", segments_.size());
      end += segment.count;
    }
    expects(end == size_, "layout.size()", size_, "the segments cover ", end, " elements");
  }

  void place_parts() {
    part_words_.assign(static_cast<std::size_t>(ranks_), 0);
    for (const Segment& segment : segments_)
      if (!segment.dense) part_words_[static_cast<std::size_t>(segment.owner)] += words_for(segment.count);
    if (!exact_parts_)
      part_words_.assign(part_words_.size(), *std::max_element(part_words_.begin(), part_words_.end()));
    part_begin_.assign(1, 0);
    for (const std::size_t words : part_words_) part_begin_.push_back(part_begin_.back() + words);
  }

  void place_tiles() {
    std::vector<std::vector<std::uint32_t>> owned(static_cast<std::size_t>(ranks_));
    for (std::size_t i = 0; i < segments_.size(); ++i)
      owned[static_cast<std::size_t>(segments_[i].owner)].push_back(static_cast<std::uint32_t>(i));
    std::size_t dense_word = exchanged_words();
    for (int rank = 0; rank < ranks_; ++rank) {
      std::size_t word = part_begin(rank), own = 0;
      std::uint32_t large = 0;
      first_tile_.push_back(tiles_.size());
      for (const std::uint32_t segment : owned[static_cast<std::size_t>(rank)])
        if (!segments_[segment].dense)
          append_tiles(segment, word, own, segments_[segment].count > tile_bits ? large++ : 0);
      first_dense_tile_.push_back(tiles_.size());
      for (const std::uint32_t segment : owned[static_cast<std::size_t>(rank)])
        if (segments_[segment].dense) append_tiles(segment, dense_word, own, 0);
      own_elements_.push_back(sharded_ ? own : size_);
    }
    first_tile_.push_back(tiles_.size());
    words_ = dense_word;
  }

  void order_payload() {
    std::uint32_t last = 0;
    for (const Segment& segment : segments_) last = std::max(last, segment.bucket);
    if (last == 0) {
      payload_runs_ = first_tile_;
      return;
    }
    const std::size_t ranks = static_cast<std::size_t>(ranks_);
    const auto run = [&](std::size_t tile) {
      const Segment& segment = segments_[tiles_[tile].segment];
      return segment.bucket * ranks + static_cast<std::size_t>(segment.owner);
    };
    expects(tiles_.size() <= 0xffffffff, "layout.size()", size_, "is too large for several buckets");
    payload_runs_.assign((last + std::size_t{1}) * ranks + 1, 0);
    for (std::size_t tile = 0; tile < tiles_.size(); ++tile) ++payload_runs_[run(tile) + 1];
    std::partial_sum(payload_runs_.begin(), payload_runs_.end(), payload_runs_.begin());
    std::vector<std::size_t> next(payload_runs_.begin(), payload_runs_.end() - 1);
    payload_order_.resize(tiles_.size());
    for (std::size_t tile = 0; tile < tiles_.size(); ++tile)
      payload_order_[next[run(tile)]++] = static_cast<std::uint32_t>(tile);
  }

  void append_tiles(std::uint32_t index, std::size_t& word, std::size_t& own, std::uint32_t large) {
    const Segment& segment = segments_[index];
    for (std::size_t done = 0; done < segment.count; done += tile_bits)
      tiles_.push_back({segment.begin + done, word * word_bits + done, sharded_ ? own + done : segment.begin + done,
                        static_cast<std::uint32_t>(std::min(tile_bits, segment.count - done)), index, large});
    word += words_for(segment.count);
    own += words_for(segment.count) * word_bits;
  }

  std::size_t size_;
  int ranks_;
  bool exact_parts_, sharded_;
  std::size_t words_ = 0;
  std::vector<Segment> segments_;
  std::vector<std::size_t> part_words_, part_begin_, own_elements_;
  std::vector<Tile> tiles_;
  std::vector<std::size_t> first_tile_, first_dense_tile_, payload_runs_;
  std::vector<std::uint32_t> payload_order_;
};

}  // namespace scape::inline v0
