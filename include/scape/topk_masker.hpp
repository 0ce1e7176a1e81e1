#pragma once

#include <scape/arithmetic.hpp>
#include <scape/error.hpp>
#include <scape/mask_plan.hpp>
#include <scape/stream.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <string>

namespace scape::inline v0 {

/// How much an element is worth: a cheap pure function of its index in parameter space and its bit in mask space,
/// called on the fly, any number of times, on any thread. Elements are ranked by |score|. It may have a member of the
/// same arguments, bound: at least |score|, or NaN, and infinity or NaN where the score is NaN. Hosts then compute only
/// scores whose bound reaches what they look for. Where scores lie in an array, array(element) may tell where: hosts
/// then compute none.
template <class F>
concept ScoreFunction = std::copy_constructible<F> && requires(const F& score, std::size_t element, std::size_t bit) {
  { score(element, bit) } -> std::same_as<float>;
};

/// The score of an array of values: each one's magnitude.
struct Magnitude {
  const float* values;
  SCAPE_HOST_DEVICE float operator()(std::size_t element, std::size_t) const { return values[element]; }
  const float* array(std::size_t element) const { return values + element; }
};

/// Exact top-k of a score on each segment that a rank owns, straight to the bits of a mask.
///
/// Owns nothing; keeps a pointer to the plan, which must outlive it and its work. select() enqueues on the stream and
/// returns: what the score reads, mask and workspace must live, and the former stay unchanged, until the stream has
/// passed. The rank's part of the mask is written, padding included, and nothing else.
/// Exactly k = max(1, floor(density * n + 1e-6)) bits are set in a segment of n > 0 elements, whatever the scores:
/// those of the largest magnitudes, denormals counted, -0 equal to +0, every NaN above infinity; among equals the lower
/// index comes first. The result does not depend on threads or backend.
///
/// Throws std::invalid_argument on a wrong argument, before anything is enqueued.
///
/// The workspace is the masker's own from call to call, zeros before the first: the last thresholds stay there and make
/// the next call cheaper; what it holds never changes the result.
///
/// Moves 4.125 bytes an element of the rank's segments where a score reads 4: one read and the bits, wherever the guess
/// of the threshold holds, from the last call or, on the host, from a sample. Further reads where it does not, or where
/// many scores are equal to the k-th; none at density 1.
///
/// Source: the selection rule of SCAPE (arXiv 2607.01678); radix selection as in AIR Top-K (Zhang et al., SC'23).
class TopKMasker {
 public:
  /// `tables` are the plan's, where the stream's work can read them (PlanTables).
  TopKMasker(const MaskPlan& plan, PlanView tables, int rank) : plan_(&plan), tables_(tables), rank_(rank) {
    expects(rank >= 0 && rank < plan.ranks(), "rank", rank, "must be 0 to ", (plan.ranks() - 1));
  }

  /// For streams whose work can read the plan itself: HostStream.
  TopKMasker(const MaskPlan& plan, int rank) : TopKMasker(plan, plan.view(), rank) {}

  /// Bytes of scratch that select() needs, at any density.
  template <Stream S>
  std::size_t workspace_bytes(const S& stream) const {
    static_assert(
        requires { select_workspace_bytes(*plan_, rank_, stream); },
        "selection is not implemented for this stream; include <scape/host/select.hpp> or <scape/cuda/select.cuh>");
    return select_workspace_bytes(*plan_, rank_, stream);
  }

  /// Writes the rank's part of `mask`, which holds all of plan.words().
  template <ScoreFunction F, Stream S>
  void select(F score, double density, std::span<MaskWord> mask, std::span<std::byte> workspace,
              const S& stream) const {
    static_assert(
        requires { select_top(*plan_, tables_, rank_, density, score, mask, workspace, stream); },
        "selection is not implemented for this stream; include <scape/host/select.hpp> or <scape/cuda/select.cuh>");
    check(density, mask, workspace, stream);
    select_top(*plan_, tables_, rank_, density, score, mask, workspace, stream);
  }

  /// The same, after prepare(i) was called for every tile of the plan, of whatever rank: once each, on any thread,
  /// ahead of the scores of the tile's elements, and mostly right ahead of them, so that they find in the cache what it
  /// has left there. Not every stream can: HostStream can.
  template <ScoreFunction F, class Prepare, Stream S>
  void select(F score, double density, std::span<MaskWord> mask, std::span<std::byte> workspace, Prepare prepare,
              const S& stream) const {
    static_assert(
        requires { select_top(*plan_, tables_, rank_, density, score, mask, workspace, prepare, stream); },
        "this stream cannot select right behind other work; HostStream can, with <scape/host/select.hpp>");
    check(density, mask, workspace, stream);
    select_top(*plan_, tables_, rank_, density, score, mask, workspace, prepare, stream);
  }

  /// The same by the magnitudes of `values`, an array over all of parameter space.
  template <Stream S>
  void select(std::span<const float> values, double density, std::span<MaskWord> mask, std::span<std::byte> workspace,
              const S& stream) const {
    expects(values.size() == plan_->size(), "values.size()", values.size(), "must be plan.size(), ", plan_->size());
    select(Magnitude{values.data()}, density, mask, workspace, stream);
  }

 private:
  template <Stream S>
  void check(double density, std::span<MaskWord> mask, std::span<std::byte> workspace, const S& stream) const {
    expects(density >= 0 && density <= 1, "density", density, "must be 0 to 1");
    expects(mask.size() == plan_->words(), "mask.size()", mask.size(), "must be plan.words(), ", plan_->words());
    const std::size_t needed = workspace_bytes(stream);
    expects(workspace.size() >= needed, "workspace.size()", workspace.size(), "must be at least workspace_bytes(), ",
            needed);
  }

  const MaskPlan* plan_;
  PlanView tables_;
  int rank_;
};

}  // namespace scape::inline v0
