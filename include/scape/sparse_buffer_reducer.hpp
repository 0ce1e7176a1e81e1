#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/stream.hpp>

#include <cstddef>
#include <span>
#include <string>

namespace scape::inline v0 {

namespace detail {

struct Gather {
  const float* values;
  float* payload;
  SCAPE_HOST_DEVICE void operator()(std::size_t element, std::size_t position) const {
    payload[position] = values[element];
  }
};
struct Scatter {
  const float* payload;
  float* values;
  SCAPE_HOST_DEVICE void operator()(std::size_t element, std::size_t position) const {
    values[element] = payload[position];
  }
};

}  // namespace detail

/// Averages over the ranks the values at a mask: all segments in one payload, one collective, no indices.
///
/// Owns `capacity` floats, the payload. Work before the collective and after it is the caller's `compute` stream's, the
/// collective the `side` stream's; events order the two, so that compute may go on with other work between `reduce` and
/// `wait`. The payload is in place: sent values until the collective runs, then their mean over the ranks, in the order
/// that the communicator sums them. Bytes sent by a rank: 2 (W - 1) / W * 4 * mask.kept.
template <Stream S, MemoryResource M>
class SparseBufferReducer {
 public:
  SparseBufferReducer(std::size_t capacity, M& memory) : payload_(capacity, memory) {}
  /// The stream only tells the type.
  SparseBufferReducer(std::size_t capacity, M& memory, const S&) : SparseBufferReducer(capacity, memory) {}

  std::size_t capacity() const noexcept { return payload_.size(); }

  /// The mask's part of the payload.
  std::span<float> payload(MaskView mask) const {
    expects(mask.kept <= payload_.size(), "mask.kept", mask.kept, "must be at most the payload's capacity, ",
            payload_.size());
    return payload_.span().first(mask.kept);
  }

  /// payload[p] = values[element] for every kept element.
  void gather(std::span<const float> values, MaskView mask, const S& stream) const {
    for_each_kept(mask, detail::Gather{values.data(), payload(mask).data()}, stream);
  }

  /// values[element] = payload[p] for every kept element; the others stay.
  void scatter(MaskView mask, std::span<float> values, const S& stream) const {
    for_each_kept(mask, detail::Scatter{payload(mask).data(), values.data()}, stream);
  }

  /// Starts the mean over all ranks of what compute has put into the payload.
  template <Communicator<S> C>
  void reduce(MaskView mask, C& communicator, const S& compute, const S& side) {
    const std::span<float> values = payload(mask);
    begin(compute, side);
    communicator.all_reduce_mean(values, values, side);
    side.record(reduced_);
  }

  /// The same of one bucket's part of it: several may be under way, one after the other.
  template <Communicator<S> C>
  void reduce(const PayloadPart& part, C& communicator, const S& compute, const S& side) {
    const std::span<float> values = payload_.span().subspan(part.begin, part.count);
    begin(compute, side);
    communicator.all_reduce_mean(values, values, side);
    side.record(reduced_);
  }

  /// The same to the owners, in place: this rank's positions get the mean.
  template <Communicator<S> C>
  void reduce_scatter(const PayloadPart& part, C& communicator, const S& compute, const S& side) {
    const std::span<float> values = payload_.span().subspan(part.begin, part.count);
    begin(compute, side);
    communicator.reduce_scatter_mean(
        values, values.subspan(static_cast<std::size_t>(communicator.rank()) * part.stride, part.stride), side);
    side.record(reduced_);
  }

  /// The same to the owners: the mask's positions are padded, rank r's from r * stride on (count_offsets with that
  /// stride), and `own` (stride long) gets the mean of this rank's; it may be
  /// their place in the payload. Half the bytes of `reduce`, but for padding.
  template <Communicator<S> C>
  void reduce_scatter(std::size_t stride, std::span<float> own, C& communicator, const S& compute, const S& side) {
    const std::size_t count = stride * static_cast<std::size_t>(communicator.size());
    expects(count <= payload_.size(), "stride", stride, "size() times it must fit the payload's capacity");
    expects(own.size() == stride, "own.size()", own.size(), "must be the stride, ", stride);
    begin(compute, side);
    communicator.reduce_scatter_mean(payload_.span().first(count), own, side);
    side.record(reduced_);
  }

  /// Work enqueued on compute later runs after the collective.
  void wait(const S& compute) const { compute.wait_for(reduced_); }

 private:
  void begin(const S& compute, const S& side) {
    compute.record(gathered_);
    side.wait_for(gathered_);
  }

  Buffer<float, M> payload_;
  typename S::Event gathered_, reduced_;
};

}  // namespace scape::inline v0
