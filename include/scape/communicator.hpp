#pragma once

#include <scape/stream.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace scape::inline v0 {

/// 32 bits of a mask or of its code, the least significant first.
using MaskWord = std::uint32_t;

/// A group of ranks with collectives that are enqueued on a stream. Every rank calls the same collectives with the same
/// counts in the same order; one at a time per rank. Inputs and outputs must live until the stream has passed them.
template <class C, class S>
concept Communicator = Stream<S> &&
    requires(C& communicator, std::span<const float> in, std::span<float> out, std::span<const MaskWord> own,
             std::span<MaskWord> all, std::span<const std::size_t> counts, const S& stream) {
  { communicator.rank() } -> std::convertible_to<int>;
  { communicator.size() } -> std::convertible_to<int>;
  // out = mean of all ranks' in. Same size; in place allowed.
  communicator.all_reduce_mean(in, out, stream);
  // out = part of the mean that belongs to this rank: in holds size() parts of out's size, by rank.
  communicator.reduce_scatter_mean(in, out, stream);
  // all = all ranks' own, by rank: all.size() = size() * own.size(). own may be its own place in all.
  communicator.all_gather(own, all, stream);
  // What this rank has sent so far, in bytes.
  { communicator.bytes_sent() } -> std::convertible_to<std::uint64_t>;
};

/// A communicator that can also gather parts of different sizes: counts holds every rank's, and is read before the call
/// returns.
template <class C, class S>
concept UnevenCommunicator = Communicator<C, S> &&
    requires(C& communicator, std::span<const MaskWord> own, std::span<MaskWord> all,
             std::span<const std::size_t> counts, const S& stream) {
  communicator.all_gather_uneven(own, all, counts, stream);
};

/// A communicator that can also exchange parts: payloads of low precision need it. in and out, which do not overlap,
/// hold size() parts of equal size; part r of in becomes part rank() of rank r's out.
template <class C, class S>
concept AllToAllCommunicator = Communicator<C, S> &&
    requires(C& communicator, std::span<const MaskWord> in, std::span<MaskWord> out, const S& stream) {
  communicator.all_to_all(in, out, stream);
};

}  // namespace scape::inline v0
