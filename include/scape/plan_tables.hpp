#pragma once

#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/stream.hpp>

#include <cstddef>

namespace scape::inline v0 {

/// A MaskPlan's tables in memory that the stream's work can read: 40 bytes for every 4,096 elements
/// and 24 a segment. Must stay until the streams that use it have passed.
template <MemoryResource M>
class PlanTables {
 public:
  /// Copies, and waits.
  template <Stream S>
  PlanTables(const MaskPlan& plan, M& memory, const S& stream)
      : tiles_(plan.tiles().size(), memory),
        segments_(plan.segments().size(), memory),
        first_tile_(plan.view().first_tile.size(), memory) {
    copy_values(plan.view().tiles, tiles_.span(), stream);
    copy_values(plan.view().segments, segments_.span(), stream);
    copy_values(plan.view().first_tile, first_tile_.span(), stream);
    stream.synchronize();
  }

  PlanView view() const noexcept { return {tiles_.span(), segments_.span(), first_tile_.span()}; }
  std::size_t bytes() const noexcept { return tiles_.bytes() + segments_.bytes() + first_tile_.bytes(); }

 private:
  Buffer<Tile, M> tiles_;
  Buffer<Segment, M> segments_;
  Buffer<std::size_t, M> first_tile_;
};

}  // namespace scape::inline v0
