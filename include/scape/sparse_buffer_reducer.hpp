#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/payload_format.hpp>
#include <scape/stream.hpp>

#include <algorithm>
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
/// Work before the collective and after it is the caller's `compute` stream's, the collective, with coding and
/// decoding, the `side` stream's; events order the two, so that compute may go on with other work between `reduce` and
/// `wait`. The payload is in place: sent values until the collective runs, then their mean over the ranks.
///
/// As float32, owns `capacity` floats, the payload; the mean is the communicator's, which tells the order of the sum,
/// and a rank sends 2 (W - 1) / W * 4 * mask.kept bytes.
///
/// In the other formats every rank codes its payload, gets its slice of everyone's (all_to_all), decodes them, adds
/// them up in the order of the ranks in float32, and divides: with any communicator the same bits. `reduce` codes the
/// means again and gathers all slices, so that all ranks have the same; `reduce_scatter` leaves each its own, in
/// float32. Owns `capacity` floats more, the errors, and the code twice: 2 (bfloat16) or 129 / 128 (e5m2, e4m3) bytes a
/// value, in whole blocks of payload_block values, as many for each rank. Sends 2 (W - 1) / W times the code, or half
/// of that.
template <Stream S, MemoryResource M>
class SparseBufferReducer {
 public:
  SparseBufferReducer(std::size_t capacity, M& memory)
      : SparseBufferReducer(capacity, PayloadFormat::float32, 1, memory) {}
  /// The stream only tells the type.
  SparseBufferReducer(std::size_t capacity, M& memory, const S&) : SparseBufferReducer(capacity, memory) {}
  /// For a communicator of so many ranks; float32 goes with any. `keeps_errors`: 4 bytes a value more, for
  /// keep_errors().
  SparseBufferReducer(std::size_t capacity, PayloadFormat format, int ranks, M& memory, bool keeps_errors = false)
      : format_(format),
        ranks_(count_of(ranks)),
        payload_(capacity, memory),
        errors_(format == PayloadFormat::float32 ? 0 : capacity, memory),
        kept_errors_(keeps_errors ? errors_.size() : 0, memory),
        sent_(errors_.size() == 0 ? 0 : ranks_ * slice_words(capacity), memory),
        received_(sent_.size(), memory) {}

  std::size_t capacity() const noexcept { return payload_.size(); }
  PayloadFormat format() const noexcept { return format_; }
  /// Bytes that are kept from one collective to the next: the errors.
  std::size_t state_bytes() const noexcept { return errors_.bytes(); }
  std::size_t workspace_bytes() const noexcept {
    return payload_.bytes() + kept_errors_.bytes() + sent_.bytes() + received_.bytes();
  }

  /// The mask's part of the payload.
  std::span<float> payload(MaskView mask) const {
    expects(mask.kept <= payload_.size(), "mask.kept", mask.kept, "must be at most the payload's capacity, ",
            payload_.size());
    return payload_.span().first(mask.kept);
  }

  /// What coding has rounded away, by payload position: to be added to what this rank sends later. What all ranks'
  /// errors and W times the mean add up to is what they all have sent, but for the rounding of that sum. 0 where this
  /// rank has sent no finite number, and nothing is added where the mean is none. Empty for float32. Valid from `wait`
  /// to the next collective, for the mask that was reduced.
  std::span<const float> errors(MaskView mask) const {
    return errors_.span().first(format_ == PayloadFormat::float32 ? 0 : payload(mask).size());
  }

  /// A copy of them, which the next collectives leave alone: parts of another mask's payload may lie over them.
  std::span<const float> keep_errors(MaskView mask, const S& compute) const {
    const std::span<const float> errors = this->errors(mask);
    expects(errors.size() <= kept_errors_.size(), "keeps_errors", false, "must be true for keep_errors()");
    copy_values(errors, kept_errors_.span().first(errors.size()), compute);
    return kept_errors_.span().first(errors.size());
  }

  /// payload[p] = values[element] for every kept element.
  void gather(std::span<const float> values, MaskView mask, const S& stream) const {
    for_each_kept(mask, detail::Gather{values.data(), payload(mask).data()}, stream);
  }

  /// values[element] = payload[p] for every kept element; the others stay.
  void scatter(MaskView mask, std::span<float> values, const S& stream) const {
    for_each_kept(mask, detail::Scatter{payload(mask).data(), values.data()}, stream);
  }

  /// Starts the mean over all ranks of what compute has put into the payload. All formats but float32 need an
  /// AllToAllCommunicator of as many ranks as the reducer was made for.
  template <Communicator<S> C>
  void reduce(MaskView mask, C& communicator, const S& compute, const S& side) {
    reduce(PayloadPart{0, payload(mask).size()}, communicator, compute, side);
  }

  /// The same of one bucket's part of it: several may be under way, one after the other.
  template <Communicator<S> C>
  void reduce(const PayloadPart& part, C& communicator, const S& compute, const S& side) {
    const std::span<float> values = values_of(part);
    check_communicator<C>(communicator.size());
    begin(compute, side);
    reduce_range(values, errors_of(values), codes_for(values.size()), communicator, side);
    side.record(reduced_);
  }

  /// The same to the owners, in place: this rank's positions get the mean.
  template <Communicator<S> C>
  void reduce_scatter(const PayloadPart& part, C& communicator, const S& compute, const S& side) {
    reduce_scatter(
        part,
        payload_.span().subspan(part.begin + static_cast<std::size_t>(communicator.rank()) * part.stride, part.stride),
        communicator, compute, side);
  }

  /// The same to the owners: the part's positions are padded, rank r's from r * stride on, and `own` (stride long) gets
  /// the mean of this rank's; it may be their place in the payload. Half the bytes of `reduce`, but for padding.
  template <Communicator<S> C>
  void reduce_scatter(const PayloadPart& part, std::span<float> own, C& communicator, const S& compute, const S& side) {
    expects(part.count == part.stride * static_cast<std::size_t>(communicator.size()), "part.count", part.count,
            "must be size() times the stride, ", part.stride);
    const std::span<float> values = values_of(part);
    expects(own.size() == part.stride, "own.size()", own.size(), "must be the stride, ", part.stride);
    check_communicator<C>(communicator.size());
    begin(compute, side);
    reduce_scatter_range(values, errors_of(values), codes_for(part.count), own, communicator, side);
    side.record(reduced_);
  }

  /// Work enqueued on compute later runs after the collective.
  void wait(const S& compute) const { compute.wait_for(reduced_); }

 private:
  // Memory for the codes of a run of the payload: what this rank sends, and what it gets. Runs may share it, since the
  // side stream works on one after the other.
  struct Codes {
    std::span<MaskWord> sent, received;
  };

  static std::size_t count_of(int ranks) {
    expects(ranks >= 1, "ranks", ranks, "must be at least 1");
    return static_cast<std::size_t>(ranks);
  }

  std::span<float> values_of(const PayloadPart& part) const {
    expects(part.begin <= payload_.size() && part.count <= payload_.size() - part.begin, "part.count", part.count,
            "must fit the payload's capacity, ", payload_.size());
    return payload_.span().subspan(part.begin, part.count);
  }

  // Blocks are dealt out evenly: every rank adds up as many of `count` values.
  std::size_t slice_blocks(std::size_t count) const {
    const std::size_t blocks = count / payload_block + (count % payload_block != 0);
    return blocks / ranks_ + (blocks % ranks_ != 0);
  }
  std::size_t slice_words(std::size_t count) const { return slice_blocks(count) * payload_block_words(format_); }

  // Also for `ranks` parts of count / ranks values each, which take as many blocks.
  Codes codes_for(std::size_t count) const {
    const std::size_t words = sent_.size() == 0 ? 0 : ranks_ * slice_words(count);
    return {sent_.span().first(words), received_.span().first(words)};
  }

  // By place in the payload's memory.
  std::span<float> errors_of(std::span<const float> values) const {
    if (format_ == PayloadFormat::float32) return {};
    return errors_.span().subspan(static_cast<std::size_t>(values.data() - payload_.span().data()), values.size());
  }

  template <class C>
  void check_communicator(int size) const {
    if (format_ == PayloadFormat::float32) return;
    expects(AllToAllCommunicator<C, S>, "format", name_of(format_), "needs a communicator with all_to_all");
    expects(count_of(size) == ranks_, "communicator.size()", size, "must be the reducer's ranks, ", ranks_);
  }

  void begin(const S& compute, const S& side) {
    compute.record(gathered_);
    side.wait_for(gathered_);
  }

  // The mean of a run of the payload, in place. All on side, as the next one.
  template <Communicator<S> C>
  void reduce_range(std::span<float> values, std::span<float> errors, Codes codes, C& communicator, const S& side) {
    if (format_ == PayloadFormat::float32) return communicator.all_reduce_mean(values, values, side);
    if constexpr (AllToAllCommunicator<C, S>) {
      const std::size_t words = codes.sent.size() / ranks_, rank = static_cast<std::size_t>(communicator.rank());
      const std::size_t slice = slice_blocks(values.size()) * payload_block;
      const std::size_t from = std::min(values.size(), rank * slice);
      const std::span<float> own_errors = errors.subspan(from, std::min(slice, values.size() - from));
      const std::span<MaskWord> mean =
          codes.sent.subspan(rank * words, words);  // nobody reads what was sent any longer

      encode_payload(format_, values, codes.sent, errors, side);
      communicator.all_to_all(codes.sent, codes.received, side);
      average_payloads(format_, codes.received, ranks_, mean, own_errors, side);
      communicator.all_gather(mean, codes.sent, side);
      decode_payload(format_, codes.sent, values, side);
    }
  }

  // The mean of this rank's part of a run that holds as much for every rank.
  template <Communicator<S> C>
  void reduce_scatter_range(std::span<float> values, std::span<float> errors, Codes codes, std::span<float> own,
                            C& communicator, const S& side) {
    if (format_ == PayloadFormat::float32) return communicator.reduce_scatter_mean(values, own, side);
    if constexpr (AllToAllCommunicator<C, S>) {
      encode_payload(format_, values, ranks_, codes.sent, errors, side);
      communicator.all_to_all(codes.sent, codes.received, side);
      average_payloads(format_, codes.received, ranks_, own, side);
    }
  }

  PayloadFormat format_;
  std::size_t ranks_;
  Buffer<float, M> payload_, errors_, kept_errors_;
  Buffer<MaskWord, M> sent_, received_;
  typename S::Event gathered_, reduced_;
};

}  // namespace scape::inline v0
