#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>
#include <scape/memory.hpp>
#include <scape/stream.hpp>

#include <algorithm>
#include <cstddef>
#include <span>

namespace scape::inline v0 {

namespace detail {
struct SetWord {
  MaskWord* word;
  bool value;
  SCAPE_HOST_DEVICE void operator()(std::size_t) const { *word = value; }
};
}  // namespace detail

/// A flag that any rank can raise for all. Owns 4 bytes a rank in the memory of M and as much in memory that the host
/// can read; must stay until the streams have passed.
template <Stream S, MemoryResource M>
class SharedFlag {
 public:
  SharedFlag(int rank, int ranks, M& memory)
      : rank_(static_cast<std::size_t>(rank)),
        flags_(static_cast<std::size_t>(ranks), memory),
        read_(flags_.size(), host_memory_) {}
  SharedFlag(const SharedFlag&) = delete;

  /// This rank's flag, for work that compute does: 0 is not raised.
  std::span<MaskWord, 1> own() const noexcept { return flags_.span().subspan(rank_).template first<1>(); }
  void set(bool raised, const S& compute) const { for_each(1, detail::SetWord{own().data(), raised}, compute); }

  /// Collective, on side behind what compute has been given; waits. Sends 4 bytes a rank.
  template <Communicator<S> C>
  bool raised_anywhere(C& communicator, const S& compute, const S& side) {
    compute.record(set_);
    side.wait_for(set_);
    communicator.all_gather(own(), flags_.span(), side);
    copy_values(std::span<const MaskWord>(flags_.span()), read_.span(), side);
    side.synchronize();
    return std::any_of(read_.span().begin(), read_.span().end(), [](MaskWord flag) { return flag != 0; });
  }

 private:
  std::size_t rank_;
  Buffer<MaskWord, M> flags_;
  typename S::HostVisibleMemory host_memory_;
  Buffer<MaskWord, typename S::HostVisibleMemory> read_;
  typename S::Event set_;
};

}  // namespace scape::inline v0
