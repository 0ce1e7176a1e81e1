#pragma once

#include <scape/communicator.hpp>
#include <scape/gradient.hpp>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/step_scalars.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace scape::inline v0 {

namespace detail {
struct AnySelect {  // stands for what scores are handed to
  template <class Score>
  void operator()(const Score&) const {}
};
}  // namespace detail

/// What AdamS asks of an update rule: scape_rule.hpp and clock_rule.hpp are the two there are; a third is a new file.
/// The rule itself is a small value, the user's options. Its State<M> holds the arrays it needs besides the
/// ResidualStore's, made in the constructor State(rule, options, size, largest payload, payload at the last density,
/// memory, stream), and hands out functors, called by host threads and kernels alike:
///   advance()       (StepScalars&): what depends on the step, at its start; step and both scales are set already
///   begin(scalars, stream): once a step, ahead of the others: enqueues what else a step starts with
///   accumulation()  members state, payload and optionally moment and returned, as ErrorFeedback has them
///   settle(state, mask, stream): enqueues what brings the store up to date at the last mask, for who looks at it
///                   between steps
///   update(...)     members needs_every, every, second_moment, kept, shift, as ScapeRule::Update has them
///   score_before, score_after: call select once with the ScoreFunction of a mask for this step, before anything is
///                   accumulated, or for a later one; which of update and score_after is first, the rule says. If
///                   score_after is, its score must read its own element only, and no mask but this step's: hosts call
///                   it while other elements are still to be accumulated
///   follow(...)     only where follows_others: a functor for kept elements of other ranks, if parameters are sharded
template <class R, class M>
concept UpdateRule = MemoryResource<M> && std::copyable<R> &&
    requires(const R& rule, typename R::template State<M>& state, std::span<const float> values, std::span<float> array,
             ScaledGradient<float> gradient, std::span<const MaskWord> sent, MaskView mask, StepScalars& scalars,
             detail::AnySelect select) {
  { R::clips_gradient } -> std::convertible_to<bool>;          // the local gradient is clipped, else the payload
  { R::pending_counts_as_sent } -> std::convertible_to<bool>;  // score_after is told what waits in other masks
  { R::follows_others } -> std::convertible_to<bool>;          // every rank needs the whole reduced payload
  { R::scores_gradient } -> std::convertible_to<bool>;         // score_after reads the gradient
  { R::residual(0.0f, true) } -> std::same_as<float>;          // of an element, from store and mask
  { rule.fingerprint() } -> std::same_as<std::uint64_t>;       // equal on all ranks, or they disagree
  { state.selects_after_update() } -> std::same_as<bool>;
  { state.set_aside(std::size_t{}) } -> std::same_as<std::span<float>>;  // accumulation().moment goes here, by position
  { state.state_bytes() } -> std::same_as<std::size_t>;
  { state.workspace_bytes() } -> std::same_as<std::size_t>;
  state.advance()(scalars);
  state.accumulation();
  state.update(array, array, values);
  state.score_before(gradient, PlaceOfElement{}, values, mask, scalars, select);
  state.score_after(gradient, PlaceOfElement{}, values, mask, sent, scalars, select);
};

}  // namespace scape::inline v0
