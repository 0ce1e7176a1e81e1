#pragma once

#include <scape/error.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

namespace scape::inline v0 {

/// A range of the flat parameter space that one rank owns: a tensor, or a piece of one. Elements are kept per segment:
/// a segment of n elements keeps k = max(1, floor(density * n + 1e-6)) of them.
struct Segment {
  std::size_t begin;         ///< first element in the flat space
  std::size_t count;         ///< elements; 0 is legal
  int owner;                 ///< the rank that selects here
  bool dense = false;        ///< true: all elements are kept, always (norms, biases)
  bool decay = true;         ///< false: no weight decay here
  std::uint32_t bucket = 0;  ///< payloads are reduced bucket by bucket, so that one may leave before the next is ready
};

/// How the flat space of parameters is cut over ranks. Any type with these three members fits.
template <class L>
concept ShardedLayout = requires(const L& layout) {
  { layout.size() } -> std::convertible_to<std::size_t>;  // elements of the flat space
  { layout.ranks() } -> std::convertible_to<int>;
  { layout.segments() } -> std::convertible_to<std::span<const Segment>>;  // in order, disjoint, covering
};

/// A tensor (or bucket) as the layouts below take it: a run of the flat space that follows the one before.
struct Tensor {
  std::size_t size;          ///< elements
  bool dense = false;        ///< as in Segment
  bool decay = true;         ///< as in Segment
  std::uint32_t bucket = 0;  ///< as in Segment
};

/// Numbers the tensors' buckets: runs of neighbours of at least `elements`, from 0 on; the last may be smaller. Returns
/// how many there are.
inline std::uint32_t assign_buckets(std::span<Tensor> tensors, std::size_t elements) {
  std::uint32_t bucket = 0;
  std::size_t filled = 0;
  for (Tensor& tensor : tensors) {
    if (filled >= elements && filled != 0) {
      ++bucket;
      filled = 0;
    }
    tensor.bucket = bucket;
    filled += tensor.size;
  }
  return tensors.empty() ? 0 : bucket + 1;
}

/// What "top-k" ranges over.
enum class Scope {
  tensor,  ///< every tensor keeps its own share
  shard    ///< neighbouring tensors of one owner with the same flags and bucket compete with one another
};

/// Elements of the busiest owner over the mean: 1 is a perfect balance, ranks() the worst.
template <ShardedLayout L>
double imbalance(const L& layout) {
  std::vector<std::size_t> load(static_cast<std::size_t>(layout.ranks()));
  auto&& segments = layout.segments();  // by reference or by value
  for (const Segment& segment : std::span<const Segment>(segments))
    load[static_cast<std::size_t>(segment.owner)] += segment.count;
  if (layout.size() == 0) return 1;
  return static_cast<double>(*std::max_element(load.begin(), load.end())) * static_cast<double>(load.size()) /
         static_cast<double>(layout.size());
}

namespace detail {

inline std::vector<Tensor> tensors_of(std::span<const std::size_t> sizes) {
  std::vector<Tensor> tensors;
  for (const std::size_t size : sizes) tensors.push_back({size});
  return tensors;
}

class SegmentList {
 public:
  explicit SegmentList(int ranks) : ranks_(ranks) { expects(ranks >= 1, "ranks", ranks, "must be at least 1"); }
  std::size_t size() const noexcept { return size_; }
  int ranks() const noexcept { return ranks_; }
  std::span<const Segment> segments() const noexcept { return segments_; }

 protected:
  void append(const Tensor& tensor, std::size_t count, int owner) {
    segments_.push_back({size_, count, owner, tensor.dense, tensor.decay, tensor.bucket});
    size_ += count;
  }
  std::vector<Segment> segments_;

 private:
  std::size_t size_ = 0;
  int ranks_;
};

}  // namespace detail

/// An even cut: rank r owns the r-th of `ranks` runs of ceil(size / ranks) elements; the last may be shorter or empty.
class FlatLayout : public detail::SegmentList {
 public:
  FlatLayout(std::size_t size, int ranks) : SegmentList(ranks) {
    const std::size_t run = size / static_cast<std::size_t>(ranks) + (size % static_cast<std::size_t>(ranks) != 0);
    for (int rank = 0; rank < ranks; ++rank) append({size}, std::min(run, size - this->size()), rank);
  }
};

/// Whole tensors by owner: each rank owns a run of neighbouring tensors, cut so that the busiest rank owns as little as
/// it can. Fewer tensors than ranks are legal: some ranks own nothing then.
class TensorLayout : public detail::SegmentList {
 public:
  TensorLayout(std::span<const Tensor> tensors, int ranks, Scope scope = Scope::tensor) : SegmentList(ranks) {
    const std::size_t limit = smallest_limit(tensors, ranks);
    std::size_t load = 0;
    int owner = 0;
    for (const Tensor& tensor : tensors) {
      if (load + tensor.size > limit) {
        ++owner;
        load = 0;
      }
      load += tensor.size;
      append(tensor, tensor.size, owner);
    }
    if (scope == Scope::shard) merge();
  }
  TensorLayout(std::span<const std::size_t> sizes, int ranks, Scope scope = Scope::tensor)
      : TensorLayout(detail::tensors_of(sizes), ranks, scope) {}
  TensorLayout(std::initializer_list<Tensor> tensors, int ranks, Scope scope = Scope::tensor)
      : TensorLayout(std::span<const Tensor>(tensors.begin(), tensors.size()), ranks, scope) {}

 private:
  // The least limit on a rank's elements under which the tensors, dealt in order, need no more than `ranks` ranks.
  static std::size_t smallest_limit(std::span<const Tensor> tensors, int ranks) {
    std::size_t low = 0, high = 0;
    for (const Tensor& tensor : tensors) {
      low = std::max(low, tensor.size);
      high += tensor.size;
    }
    while (low < high) {
      const std::size_t limit = low + (high - low) / 2;
      std::size_t load = 0;
      int needed = 1;
      for (const Tensor& tensor : tensors) {
        if (load + tensor.size > limit) {
          ++needed;
          load = 0;
        }
        load += tensor.size;
      }
      needed <= ranks ? high = limit : low = limit + 1;
    }
    return low;
  }

  void merge() {
    std::vector<Segment> merged;
    for (const Segment& segment : segments_) {
      const bool joins = !merged.empty() && merged.back().owner == segment.owner &&
                         merged.back().dense == segment.dense && merged.back().decay == segment.decay &&
                         merged.back().bucket == segment.bucket;
      joins ? void(merged.back().count += segment.count) : merged.push_back(segment);
    }
    segments_ = std::move(merged);
  }
};

/// Every bucket (or tensor) sliced over all ranks, as ZeRO does: rank r owns the r-th run of ceil(size / ranks)
/// elements of each.
class BucketLayout : public detail::SegmentList {
 public:
  BucketLayout(std::span<const Tensor> buckets, int ranks) : SegmentList(ranks) {
    for (const Tensor& bucket : buckets) {
      const std::size_t parts = static_cast<std::size_t>(ranks);
      const std::size_t run = bucket.size / parts + (bucket.size % parts != 0);
      std::size_t left = bucket.size;
      for (int rank = 0; rank < ranks; ++rank) {
        const std::size_t count = std::min(run, left);
        append(bucket, count, rank);
        left -= count;
      }
    }
  }
  BucketLayout(std::span<const std::size_t> sizes, int ranks) : BucketLayout(detail::tensors_of(sizes), ranks) {}
  BucketLayout(std::initializer_list<Tensor> buckets, int ranks)
      : BucketLayout(std::span<const Tensor>(buckets.begin(), buckets.size()), ranks) {}
};

static_assert(ShardedLayout<FlatLayout> && ShardedLayout<TensorLayout> && ShardedLayout<BucketLayout>);

}  // namespace scape::inline v0
