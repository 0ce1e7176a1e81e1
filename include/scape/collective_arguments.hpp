#pragma once

#include <scape/error.hpp>

#include <cstddef>
#include <numeric>
#include <span>

// What all communicators ask of a collective's arguments, which std::invalid_argument names where they are wrong, and
// count as sent. Sizes are numbers of elements.
namespace scape::inline v0::detail {

inline void expects_all_reduce(std::size_t in, std::size_t out) {
  expects(out == in, "out.size()", out, "must be in.size(), ", in);
}

inline void expects_reduce_scatter(std::size_t in, std::size_t out, std::size_t ranks) {
  expects(in == out * ranks, "in.size()", in, "must be size() * out.size(), ", out * ranks);
}

inline void expects_all_gather(std::size_t own, std::size_t all, std::size_t ranks) {
  expects(all == own * ranks, "all.size()", all, "must be size() * own.size(), ", own * ranks);
}

inline void expects_all_gather_uneven(std::size_t own, std::size_t all, std::span<const std::size_t> counts,
                                      std::size_t rank, std::size_t ranks) {
  expects(counts.size() == ranks, "counts.size()", counts.size(), "must be size(), ", ranks);
  expects(counts[rank] == own, "own.size()", own, "must be counts[rank()]");
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  expects(all == total, "all.size()", all, "must be the sum of counts, ", total);
}

inline void expects_all_to_all(std::size_t in, std::size_t out, std::size_t ranks) {
  expects(in % ranks == 0, "in.size()", in, "must be a multiple of size(), ", ranks);
  expects(out == in, "out.size()", out, "must be in.size(), ", in);
}

/// Elements that a rank sends of `count` where every rank sums one part and then all gather the parts: in turn every
/// part but one, twice. Of a count that does not divide, the first ranks' parts are longer.
inline std::size_t all_reduce_sends(std::size_t count, std::size_t rank, std::size_t ranks) {
  const std::size_t own = count / ranks + (rank < count % ranks);
  return count - own + (ranks - 1) * own;
}

}  // namespace scape::inline v0::detail
