#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>
#include <scape/error.hpp>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/stream.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>

namespace scape::inline v0 {

/// Every rank keeps all parameters, in float32, and updates them alike: for AdamS, the default.
struct Replicated {
  static constexpr bool sharded = false, replicates = true;
  using Parameter = float;
};

/// As ZeRO-1 and Megatron's distributed optimizer: the owner of an element alone keeps its master, in float32, and what
/// the rule keeps besides the residual; every rank's parameters are of type P: float, bfloat16, __half or the like.
/// Kept elements' new values travel from their owners to all.
template <class P>
struct Sharded {
  static_assert(std::is_trivially_copyable_v<P> && (sizeof(P) == 2 || sizeof(P) == 4));
  static constexpr bool sharded = true, replicates = true;
  using Parameter = P;
};

/// As ZeRO-3 and FSDP: parameters, too, are kept by their owner alone. A step's `parameters` are the rank's own, as
/// Tile::own places them: with a BucketLayout one run of each bucket after the other, padded to 32 elements. They are
/// the rounded masters after every step; gathering them for forward and backward is the trainer's. docs/fsdp.md.
template <class P>
struct FullySharded {
  static_assert(std::is_trivially_copyable_v<P> && (sizeof(P) == 2 || sizeof(P) == 4));
  static constexpr bool sharded = true, replicates = false;
  using Parameter = P;
};

namespace detail {

struct NoMasters {
  template <class... Arguments>
  explicit NoMasters(const Arguments&...) {}
  std::size_t state_bytes() const noexcept { return 0; }
  std::size_t workspace_bytes() const noexcept { return 0; }
};

// Functors over the elements of tiles, 4096 places each.
template <class T>
struct LoadMasters {
  const Tile* tiles;
  const T* values;
  float* masters;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const {
    const Tile& tile = tiles[i / tile_bits];
    const std::size_t place = i % tile_bits;
    if (place < tile.count) masters[tile.own + place] = static_cast<float>(values[tile.element + place]);
  }
};
template <class P>
struct RoundMasters {
  const float* masters;
  P* values;
  std::size_t count;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const { values[i] = i < count ? P(masters[i]) : P(0.0f); }
};
// Of a rank's masters [begin, begin + count) those that lie in the tiles.
template <class P>
struct PlaceMasters {
  const Tile* tiles;
  const P* values;
  P* parameters;
  std::size_t begin, count;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const {
    const Tile& tile = tiles[i / tile_bits];
    const std::size_t place = i % tile_bits, own = tile.own + place - begin;
    if (place < tile.count && own < count) parameters[tile.element + place] = values[own];
  }
};

// Functors over kept elements.
template <class P>
struct PlaceValue {
  const P* values;
  P* parameters;
  SCAPE_HOST_DEVICE void operator()(std::size_t element, std::size_t position) const {
    parameters[element] = values[position];
  }
};

// The rounding of what an update has left: a rule without arithmetic.
template <class P>
struct RoundKept {
  const float* masters;
  P *values, *parameters;
  std::size_t shift = 0;
  SCAPE_HOST_DEVICE bool needs_every(const Segment&) const { return false; }
  template <class Scalars>
  SCAPE_HOST_DEVICE void every(std::size_t, const Scalars&) const {}
  template <class Scalars>
  SCAPE_HOST_DEVICE float second_moment(std::size_t, std::size_t, const Scalars&) const {
    return 0;
  }
  template <class Scalars>
  SCAPE_HOST_DEVICE void kept(std::size_t element, std::size_t position, bool, float, const Scalars&) const {
    parameters[element] = values[position] = P(masters[element + shift]);
  }
};

}  // namespace detail

/// The masters of a rank's own elements, and the exchange by which every rank's parameters follow them.
///
/// Owns 4 bytes for each element that the rank owns, and sizeof(P) for each element of the largest payload; 0 of those
/// where parameters are sharded too. Work on
/// masters and parameters is on compute, what travels on side, behind what compute has been given.
template <class P, Stream S, MemoryResource M>
class MasterStore {
 public:
  MasterStore(const MaskPlan& plan, PlanView tables, int rank, std::size_t payload, M& memory)
      : plan_(plan),
        tables_(tables),
        rank_(static_cast<std::size_t>(rank)),
        masters_(plan.own_elements(rank), memory),
        values_(payload == 0 ? 0 : std::max(payload, 2 * static_cast<std::size_t>(plan.ranks())), memory) {}

  std::span<float> masters() const noexcept { return masters_.span(); }
  std::size_t state_bytes() const noexcept { return masters_.bytes(); }
  std::size_t workspace_bytes() const noexcept { return values_.bytes(); }

  /// The masters become the rank's own elements of `values`, an array of all parameters in any type.
  template <class T>
  void load(std::span<const T> values, const S& compute) const {
    fill_values(masters_.span(), 0.0f, compute);  // the padding between segments
    const auto tiles = tiles_of(rank_);
    for_each(tiles.size() * tile_bits, detail::LoadMasters<T>{tiles.data(), values.data(), masters_.span().data()},
             compute);
  }

  /// The masters become `own`, which lie as they do.
  void load_own(std::span<const float> own, const S& compute) const { copy_values(own, masters_.span(), compute); }

  /// Rounds all masters, into parameters that lie as they do.
  void round(std::span<P> own, const S& compute) const {
    for_each(own.size(), detail::RoundMasters<P>{masters_.span().data(), own.data(), own.size()}, compute);
  }

  /// Rounds the kept masters, into this rank's parameters, and starts their way to the other ranks. Sends
  /// (W - 1) * sizeof(P) times the stride of each of the mask's parts.
  template <Communicator<S> C, class Scalars>
  void send(MaskView mask, std::span<P> parameters, const Scalars& scalars, C& communicator, const S& compute,
            const S& side) {
    update(mask.part(first_tile(rank_), first_tile(rank_ + 1)),
           detail::RoundKept<P>{masters_.span().data(), values_.span().data(), parameters.data()}, scalars, compute);
    if (plan_.ranks() == 1) return;
    for (const PayloadPart& part : mask.parts) gather(part.begin, part.stride, communicator, compute, side);
  }

  /// Puts the other ranks' values into the parameters, once they have arrived.
  void receive(MaskView mask, std::span<P> parameters, const S& compute) const {
    if (plan_.ranks() == 1) return;
    compute.wait_for(arrived_);
    const detail::PlaceValue<P> place{values_.span().data(), parameters.data()};
    for_each_kept(mask.part(0, first_tile(rank_)), place, compute);
    for_each_kept(mask.part(first_tile(rank_ + 1), mask.plan.tiles.size()), place, compute);
  }

  /// Makes all parameters equal to their rounded masters. Collective. Sends (W - 1) times the rank's own parameters.
  template <Communicator<S> C>
  void synchronize(std::span<P> parameters, C& communicator, const S& compute, const S& side) {
    const std::size_t ranks = static_cast<std::size_t>(plan_.ranks()), stride = values_.size() / ranks / 2 * 2;
    std::size_t most = 0;
    for (int rank = 0; rank < plan_.ranks(); ++rank) most = std::max(most, plan_.own_elements(rank));
    for (std::size_t begin = 0; begin < most; begin += stride) {
      const std::size_t own = std::min(begin, masters_.size());
      for_each(stride,
               detail::RoundMasters<P>{masters_.span().data() + own, values_.span().data() + rank_ * stride,
                                       masters_.size() - own},
               compute);
      if (ranks > 1) gather(0, stride, communicator, compute, side);
      compute.wait_for(arrived_);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        // The tiles of a rank ascend in its own elements.
        const auto tiles = plan_.tiles().subspan(first_tile(rank), first_tile(rank + 1) - first_tile(rank));
        const auto at = [&](std::size_t place) {
          return static_cast<std::size_t>(
              std::lower_bound(tiles.begin(), tiles.end(), place,
                               [](const Tile& tile, std::size_t value) { return tile.own + tile.count <= value; }) -
              tiles.begin());
        };
        const std::size_t first = at(begin), last = std::min(at(begin + stride) + 1, tiles.size());
        for_each((last - std::min(first, last)) * tile_bits,
                 detail::PlaceMasters<P>{tiles_of(rank).data() + first, values_.span().data() + rank * stride,
                                         parameters.data(), begin, stride},
                 compute);
      }
    }
  }

 private:
  std::size_t first_tile(std::size_t rank) const { return plan_.view().first_tile[rank]; }
  std::span<const Tile> tiles_of(std::size_t rank) const {
    return tables_.tiles.subspan(first_tile(rank), first_tile(rank + 1) - first_tile(rank));
  }

  // Every rank's `stride` values, from `begin` on; both are even numbers, so these are whole words.
  template <Communicator<S> C>
  void gather(std::size_t begin, std::size_t stride, C& communicator, const S& compute, const S& side) {
    const std::size_t ranks = static_cast<std::size_t>(plan_.ranks()), words = stride * sizeof(P) / sizeof(MaskWord);
    const std::span<MaskWord> all(reinterpret_cast<MaskWord*>(values_.span().data() + begin), ranks * words);
    compute.record(rounded_);
    side.wait_for(rounded_);
    communicator.all_gather(all.subspan(rank_ * words, words), all, side);
    side.record(arrived_);
  }

  const MaskPlan& plan_;
  PlanView tables_;
  std::size_t rank_;
  Buffer<float, M> masters_;
  Buffer<P, M> values_;
  typename S::Event rounded_, arrived_;
};

}  // namespace scape::inline v0
