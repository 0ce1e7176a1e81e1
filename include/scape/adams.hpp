#pragma once

#include <scape/adams_options.hpp>
#include <scape/agreement.hpp>
#include <scape/arithmetic.hpp>
#include <scape/clock_rule.hpp>
#include <scape/communicator.hpp>
#include <scape/delayed_mask_scheduler.hpp>
#include <scape/error.hpp>
#include <scape/gradient.hpp>
#include <scape/layout.hpp>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/offload.hpp>
#include <scape/plan_tables.hpp>
#include <scape/residual_store.hpp>
#include <scape/scape_rule.hpp>
#include <scape/sharding.hpp>
#include <scape/shared_flag.hpp>
#include <scape/sparse_buffer_reducer.hpp>
#include <scape/step_report.hpp>
#include <scape/step_scalars.hpp>
#include <scape/stream.hpp>
#include <scape/topk_masker.hpp>
#include <scape/update_rule.hpp>
#include <scape/version.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace scape::inline v0 {

namespace detail {

// Functors are at namespace scope since kernels cannot take private types.
struct Reset {
  SCAPE_HOST_DEVICE void operator()(StepScalars& now) const { now = StepScalars{}; }
};
template <class Advance>
struct BeginStep {
  Advance advance;
  SCAPE_HOST_DEVICE void operator()(StepScalars& now) const {
    now.step += 1;
    now.gradient_scale = now.given_scale;
    now.payload_scale = 1;
    advance(now);
  }
};
struct SetRates {
  float learning_rate, gradient_scale;
  SCAPE_HOST_DEVICE void operator()(StepScalars& now) const {
    now.learning_rate = learning_rate;
    now.given_scale = gradient_scale;
  }
};
struct ClipGradient {
  float limit;
  SCAPE_HOST_DEVICE void operator()(StepScalars& now) const {
    now.gradient_scale = multiply(now.gradient_scale, clip_scale(now.squared_norm, limit));
  }
};
struct ClipPayload {
  float limit;
  SCAPE_HOST_DEVICE void operator()(StepScalars& now) const { now.payload_scale = clip_scale(now.squared_norm, limit); }
};
struct Values {
  const float* values;
  SCAPE_HOST_DEVICE float operator()(std::size_t i) const { return values[i]; }
};
// Adds the gradient of a rank's own elements up, as they lie in the mask.
template <class G>
struct SumUp {
  const Tile* tiles;
  float* sums;
  std::size_t first_bit;
  ScaledGradient<G> gradient;
  bool first;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const {
    const Tile& tile = tiles[i / tile_bits];
    const std::size_t place = i % tile_bits;
    if (place >= tile.count) return;
    float& sum = sums[tile.bit + place - first_bit];
    sum = add(first ? 0.0f : sum, gradient(tile.element + place));
  }
};
struct Merge {
  MaskWord* into;
  const MaskWord* from;
  bool first;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const { into[i] = first ? from[i] : into[i] | from[i]; }
};
// The residual of the i-th place of the tiles, each tile taken as tile_bits long.
template <class R>
struct ResidualAt {
  const Tile* tiles;
  const MaskWord* words;
  const float* store;
  SCAPE_HOST_DEVICE float operator()(std::size_t i) const {
    const Tile& tile = tiles[i / tile_bits];
    const std::size_t place = i % tile_bits, bit = tile.bit + place;
    return place < tile.count ? R::residual(store[tile.element + place], words[bit / word_bits] >> bit % word_bits & 1)
                              : 0.0f;
  }
};

}  // namespace detail

/// The AdamS optimizer with sparse communication: goes where a trainer had all_reduce(gradients) and a step of AdamW.
///
/// Owns the state, for rule `scape` 4 bytes a parameter and two bitmaps, for `clock` 6 bytes more, and one workspace;
/// state_bytes() and workspace_bytes() tell. Every buffer is made in the constructor: a step enqueues its work and
/// returns, without allocation or synchronisation. Gradients and parameters must stay until `compute` has passed the
/// step; collectives run on `side`, the mask of the next step beside the next forward and backward. Parameters, first
/// moment and masks are bit-identical on all ranks after every step; with density 1 it is dense AdamS to the bit.
/// Steps must be made on the same compute stream, or on streams that the caller orders. Layout, communicator and memory
/// are used as they are; communicator and memory must outlive the optimizer.
///
/// NaN and infinite gradients are worked on like others: they are kept first, and spoil the elements that they reach.
///
/// Throws std::invalid_argument for wrong arguments, before anything has changed; scape::Error, on every rank and
/// naming the odd one, where ranks disagree: on version, layout, options or rule in the constructor, on step, learning
/// rate or mask when a step has compared them (StepAgreement says when that is). After a step that failed halfway all
/// further steps throw. Sources: SCAPE, arXiv 2607.01678; AdamS, arXiv 2505.16363; docs/algorithm.md.
template <Stream S, Communicator<S> C, MemoryResource M, UpdateRule<M> R = ScapeRule, class H = Replicated,
          class K = InMemory>
class AdamS {
 public:
  /// Of the parameters.
  using Parameter = typename H::Parameter;

  template <ShardedLayout L>
  AdamS(const L& layout, C& communicator, M& memory, const S& compute, const S& side, const AdamSOptions& options = {},
        const R& rule = {}, H = {}, const K& keep = {})
      : communicator_(communicator),
        compute_(compute),
        side_(side),
        options_((options.check(), options)),
        plan_(fitting(layout, communicator), options.exact_mask_parts, H::sharded),
        tables_(plan_, memory, compute),
        scalars_(1, memory),
        masks_(plan_, tables_.view(), communicator.rank(), mask_options(), memory, compute),
        masker_(plan_, tables_.view(), communicator.rank()),
        store_(keep.template store<S>(plan_, memory, compute)),
        reducer_(payload_capacity(), memory),
        rule_(rule, options, plan_.own_elements(communicator.rank()), reducer_.capacity(), memory, compute),
        masters_(plan_, tables_.view(), communicator.rank(), reducer_.capacity(), memory),
        sent_(R::pending_counts_as_sent && options.delay > 1 ? plan_.words() : 0, memory),
        sums_(R::scores_gradient && options.adds
                  ? plan_.part_words()[static_cast<std::size_t>(communicator.rank())] * word_bits
                  : 0,
              memory),
        select_workspace_(options.density < 1 ? masker_.workspace_bytes(compute) : 0, memory),
        agreement_(communicator.rank(), communicator.size(), memory),
        flag_(communicator.rank(), communicator.size(), memory),
        partials_(
            norm_partials(std::max({plan_.size(), plan_.tiles().size() * tile_bits, reducer_.capacity()}), compute),
            memory) {
    fill_values(select_workspace_.span(), std::byte{0}, compute);
    transform(scalars(), detail::Reset{}, compute);
    compute.synchronize();
    if (plan_.ranks() > 1) check_agreement(rule, memory);
  }
  AdamS(const AdamS&) = delete;

  /// Waits for the work in flight. While an exception unwinds the stack the other ranks are told not to wait.
  ~AdamS() {
    if (std::uncaught_exceptions() > exceptions_)
      if constexpr (requires { communicator_.abort(""); }) communicator_.abort("left while an exception was thrown");
    for (const S* stream : {&side_, &compute_}) try {
        stream->synchronize();
      } catch (...) {  // the caller hears of it from the stream
      }
  }

  /// Holds from the next step on. A step that is captured into a graph keeps its rate: see the other form.
  void set_learning_rate(float learning_rate) {
    expects(std::isfinite(learning_rate) && learning_rate >= 0, "learning_rate", learning_rate,
            "must be finite and at least 0");
    rates_are_new_ |= learning_rate != options_.learning_rate;
    options_.learning_rate = learning_rate;
  }

  /// The same at once, in stream order: also between replays of captured steps.
  void set_learning_rate(float learning_rate, const S& compute) {
    set_learning_rate(learning_rate);
    set_rates(compute);
  }

  /// The same two for what multiplies every gradient as it is read.
  void set_gradient_scale(float scale) {
    expects(std::isfinite(scale), "scale", scale, "must be finite");
    rates_are_new_ |= scale != options_.gradient_scale;
    options_.gradient_scale = scale;
  }
  void set_gradient_scale(float scale, const S& compute) {
    set_gradient_scale(scale);
    set_rates(compute);
  }

  /// Makes compute wait for the masks under way: before steps are captured into a CUDA graph, and as the last thing
  /// that is captured. Capture max(delay, 1) + 1 steps after the density warm-up, with refresh = 1: as many masks take
  /// turns, and another number of steps would use the wrong ones. steps() and the communicator's bytes count captures,
  /// not replays. End the capture before the optimizer is destroyed.
  void await_masks(const S& compute) {
    masks_.await(compute);
    if (!compares()) return;
    side_.record(compared_);  // the comparison is behind the mask
    compute.wait_for(compared_);
  }

  /// Sharded only, and before the first step: the masters become the rank's own elements of `values`, all parameters in
  /// any type, here or where the parameters were made: float32 has digits that P has not.
  template <std::ranges::contiguous_range V>
  void load_masters(const V& values, const S& compute) requires(H::sharded) {
    masters_.load(checked(values, "values"), compute);
    has_masters_ = true;
  }

  /// Sharded only: makes every rank's parameters equal to their rounded masters. With rule `clock` they always are;
  /// with `scape` weight decay moves masters off the mask too: docs/algorithm.md, "Sharded". Collective; for once in a
  /// while.
  void synchronize_parameters(std::span<Parameter> parameters, const S& compute) requires(H::sharded) {
    check_parameters(parameters);
    masters_.synchronize(parameters, communicator_, compute, side_);
  }

  /// Sharded only: the rank's own elements in float32, Tile::own says where each is.
  std::span<const float> masters() const noexcept requires(H::sharded) { return masters_.masters(); }

  /// One step: enqueues on `compute` and returns. The gradients are this rank's own, an array or span of float,
  /// bfloat16, __half or the like; the parameters every rank's. With a report: waits for the step and fills it.
  template <std::ranges::contiguous_range G>
  void step(const G& gradients, std::span<Parameter> parameters, const S& compute, StepReport* report = nullptr) {
    const auto values = checked(gradients, "gradients");
    check_parameters(parameters);
    enqueue_whole(compute, [&] { enqueue(values, parameters, compute, report); });
  }

  /// Adds the gradient of a micro-batch, which may be overwritten when compute has passed; the step with the last one
  /// follows. No buffer is needed: gradients go straight into the store, and into the payload at the step's mask, which
  /// the first call waits for. As one step on the sum of the gradients, to the bit where the sums are exact in float32.
  /// Needs the option `adds`, a delay of at least 1, and no clip_norm where the rule clips the local gradient.
  template <std::ranges::contiguous_range G>
  void add(const G& gradients, const S& compute) {
    const auto values = checked(gradients, "gradients");
    expects(options_.adds, "options.adds", options_.adds, "must be true for add()");
    expects(options_.delay >= 1, "options.delay", options_.delay, "must be at least 1 for add()");
    expects(!clips_gradient(), "options.clip_norm", options_.clip_norm, "must be 0 for add() with this rule");
    enqueue_whole(compute, [&] { enqueue_add(values, compute); });
  }

  /// A step that is made everywhere or nowhere: where a gradient is NaN or infinite on any rank nothing changes on any,
  /// and the result is false; the next step is as if this one had never been. Reads the gradient once more and waits
  /// until all ranks have; with `overflowed`, which a rank may know already, nothing is read. Collective; not after
  /// add(), which cannot be taken back, and not in a graph.
  template <std::ranges::contiguous_range G>
  bool try_step(const G& gradients, std::span<Parameter> parameters, const S& compute,
                std::optional<bool> overflowed = std::nullopt, StepReport* report = nullptr) {
    const auto values = checked(gradients, "gradients");
    expects(micro_batches_ == 0, "try_step", "called after add()", "what was added cannot be taken back");
    if (overflowed)
      flag_.set(*overflowed, compute);
    else
      find_nonfinite(values, flag_.own(), compute);
    if (flag_.raised_anywhere(communicator_, compute, side_)) return false;
    step(values, parameters, compute, report);
    return true;
  }

  /// Steps made.
  std::size_t steps() const noexcept { return masks_.step(); }
  const MaskPlan& plan() const noexcept { return plan_; }
  const AdamSOptions& options() const noexcept { return options_; }

  /// The mask of the last step. Like the next two, for work of the compute stream, until the next step.
  MaskView mask() const noexcept { return masks_.current(); }
  /// The ResidualStore's array; rule `scape`: the first moment on the mask, the residual off it.
  std::span<const float> store() const noexcept { return store_.values(); }
  /// The store itself; offloaded, it tells whether its memory is what was asked for.
  const auto& residual_store() const noexcept { return store_; }
  /// What the rule keeps besides.
  const auto& rule_state() const noexcept { return rule_; }

  /// Bytes that are kept from step to step, residuals outside the optimizer's memory left out.
  std::size_t state_bytes() const noexcept {
    return (K::offloads ? 0 : store_.values().size_bytes()) + masks_.state_bytes() + rule_.state_bytes() +
           masters_.state_bytes() + tables_.bytes() + scalars_.bytes();
  }
  /// Bytes of residuals that lie elsewhere: see Offloaded.
  std::size_t offloaded_bytes() const noexcept { return K::offloads ? store_.values().size_bytes() : 0; }
  /// Bytes of scratch. The payload's share follows the largest density, so a density warm-up costs 4 bytes a parameter
  /// here, 8 with rule `scape`.
  std::size_t workspace_bytes() const noexcept {
    return masks_.workspace_bytes() + reducer_.capacity() * sizeof(float) + rule_.workspace_bytes() +
           masters_.workspace_bytes() + sent_.bytes() + sums_.bytes() + select_workspace_.bytes() + partials_.bytes() +
           staging_bytes();
  }

 private:
  std::size_t staging_bytes() const noexcept {
    if constexpr (K::offloads)
      return store_.device_bytes();
    else
      return 0;
  }

  template <ShardedLayout L>
  static const L& fitting(const L& layout, const C& communicator) {
    expects(layout.ranks() == communicator.size(), "layout.ranks()", layout.ranks(),
            "must be the communicator's size, ", communicator.size());
    return layout;
  }

  // Whether every rank gets the mean of all, not of its own part alone.
  static constexpr bool has_whole_payload = !H::sharded || R::follows_others;

  MaskOptions mask_options() const {
    MaskOptions options = options_.masks();
    options.payload_by_rank = H::sharded;
    return options;
  }
  std::size_t payload_capacity() const {
    const double density = options_.masks().density.largest();
    return H::sharded ? plan_.payload_stride(density) * static_cast<std::size_t>(plan_.ranks()) : plan_.kept(density);
  }

  template <std::ranges::contiguous_range V>
  auto checked(const V& array, const char* name) const {
    using Value = std::ranges::range_value_t<V>;
    static_assert(GradientType<Value>, "an array of float, bfloat16, __half or the like is needed");
    const std::span<const Value> values(std::ranges::data(array), std::ranges::size(array));
    if (values.size() != plan_.size())
      expects(false, std::string(name) + ".size()", values.size(), "must be the layout's size, ", plan_.size());
    return values;
  }
  void check_parameters(std::span<Parameter> parameters) const {
    expects(parameters.size() == plan_.size(), "parameters.size()", parameters.size(), "must be the layout's size, ",
            plan_.size());
    expects(!H::sharded || has_masters_, "masters", "not loaded", "call load_masters() before the first step");
  }

  template <class F>
  void enqueue_whole(const S& compute, F work) {
    agreement_.rethrow();
    if (broken_) throw Error("an earlier step failed halfway: the optimizer's state is no longer valid");
    broken_ = true;
    compute_ = compute;
    work();
    broken_ = false;
  }

  // What a step is: the text to copy for another optimizer.
  template <class G>
  void enqueue(std::span<const G> gradients, std::span<Parameter> parameters, const S& compute, StepReport* report) {
    PhaseClock clock(report != nullptr, times_, compute);
    const std::uint64_t bytes_before = communicator_.bytes_sent();
    bytes_compared_ = 0;
    begin(gradients, compute);
    if (micro_batches_ != 0) sum_up(gradients, compute);
    if (masks_.draft_first())
      with_gradient(gradients, [&](auto gradient) {
        rule_.score_before(gradient, place(), store_.values(), masks_.current(), scalars(),
                           select_and_publish(compute));
      });
    clock.lap(&StepReport::Seconds::select);
    if (!at_mask_) masks_.advance(compute);
    clock.lap(&StepReport::Seconds::mask_wait);
    accumulate(gradients, compute);
    clock.lap(&StepReport::Seconds::accumulate);
    const MaskView before = masks_.previous(), mask = masks_.current();
    const std::span<float> payload = reducer_.payload(mask);
    const std::size_t kept_before = masks_.step() == 0 ? 0 : plan_.kept(density_before_);
    if (report != nullptr) begin_report(*report, before, mask, payload, compute);
    const std::uint64_t bytes_of_payload = reduce(mask, compute);
    if (!rule_.selects_after_update()) draft(gradients, mask, compute);
    clock.lap(&StepReport::Seconds::select);
    reducer_.wait(compute);
    clock.lap(&StepReport::Seconds::payload_wait);
    const std::span<const float> reduced = has_whole_payload ? payload : own_payload(mask);
    if (report != nullptr || clips_payload()) take_norm(detail::Values{reduced.data()}, reduced.size(), compute);
    if (clips_payload()) transform(scalars(), detail::ClipPayload{options_.clip_norm}, compute);
    const std::uint64_t bytes_of_parameters = update_parameters(mask, parameters, payload, compute);
    clock.lap(&StepReport::Seconds::update);
    if (rule_.selects_after_update()) draft(gradients, mask, compute);
    clock.lap(&StepReport::Seconds::select);
    if constexpr (H::sharded) masters_.receive(mask, parameters, compute);
    clock.lap(&StepReport::Seconds::parameter_wait);
    if (!masks_.draft_next()) compare({});
    density_before_ = masks_.density();
    masks_.finish();
    micro_batches_ = 0;
    at_mask_ = false;
    if (report == nullptr) return;
    report->payload_bytes = bytes_of_payload;
    report->compare_bytes = bytes_compared_;
    report->parameter_bytes = bytes_of_parameters;
    report->mask_bytes =
        communicator_.bytes_sent() - bytes_before - bytes_of_payload - bytes_of_parameters - bytes_compared_;
    finish_report(*report, kept_before, compute);
    clock.read(report->seconds);
  }

  // Where the step must make its own mask, which is the first step only, nothing is known of it yet.
  template <class G>
  void enqueue_add(std::span<const G> gradients, const S& compute) {
    begin(gradients, compute);
    sum_up(gradients, compute);
    if (masks_.draft_first()) {
      store_.add(gradients, scalars(), compute);
    } else {
      if (!at_mask_) masks_.advance(compute);
      accumulate(gradients, compute);
    }
    ++micro_batches_;
  }

  // The first gradient at the step's mask, or one more.
  template <class G>
  void accumulate(std::span<const G> gradients, const S& compute) {
    const MaskView mask = masks_.current();
    const std::span<float> payload = reducer_.payload(mask);
    if (H::sharded && !at_mask_ && masks_.density() != padded_for_) {  // what lies between the ranks' parts counts
      fill_values(payload, 0.0f, compute);                             // as nothing in norms
      padded_for_ = masks_.density();
    }
    if (at_mask_)
      store_.add(gradients, mask, payload, rule_.accumulation(), scalars(), compute);
    else
      store_.accumulate(gradients, masks_.previous(), mask, payload, rule_.set_aside(), rule_.accumulation(), scalars(),
                        compute);
    at_mask_ = true;
  }

  template <class G>
  void sum_up(std::span<const G> gradients, const S& compute) {
    const int rank = communicator_.rank();
    const auto tiles =
        tables_.view().tiles.subspan(plan_.first_tile(rank), plan_.first_dense_tile(rank) - plan_.first_tile(rank));
    if (sums_.size() != 0)
      for_each(tiles.size() * tile_bits,
               detail::SumUp<G>{tiles.data(),
                                sums_.span().data(),
                                plan_.part_begin(rank) * word_bits,
                                {gradients.data(), &scalars()},
                                micro_batches_ == 0},
               compute);
  }

  // f(gradient) with the gradient that scores see.
  template <class G, class F>
  void with_gradient(std::span<const G> gradients, F f) {
    if (micro_batches_ != 0 && sums_.size() != 0)
      f(SummedGradient{sums_.span().data(), plan_.part_begin(communicator_.rank()) * word_bits});
    else
      f(ScaledGradient<G>{gradients.data(), &scalars()});
  }

  void set_rates(const S& compute) {
    transform(scalars(), detail::SetRates{options_.learning_rate, options_.gradient_scale}, compute);
    rates_are_new_ = false;
  }

  template <class G>
  void begin(std::span<const G> gradients, const S& compute) {
    if (micro_batches_ != 0) return;
    if (rates_are_new_) set_rates(compute);
    transform(scalars(), detail::BeginStep<decltype(rule_.advance())>{rule_.advance()}, compute);
    rule_.begin(scalars(), compute);
    if (clips_gradient()) {
      take_norm(ScaledGradient<G>{gradients.data(), &scalars()}, gradients.size(), compute);
      transform(scalars(), detail::ClipGradient{options_.clip_norm}, compute);
    }
  }

  std::uint64_t reduce(MaskView mask, const S& compute) {
    const std::uint64_t before = communicator_.bytes_sent();
    if constexpr (has_whole_payload)
      reducer_.reduce(mask, communicator_, compute, side_);
    else
      reducer_.reduce_scatter(mask.stride, own_payload(mask), communicator_, compute, side_);
    return communicator_.bytes_sent() - before;
  }

  // Returns the bytes sent.
  std::uint64_t update_parameters(MaskView mask, std::span<Parameter> parameters, std::span<const float> payload,
                                  const S& compute) {
    if constexpr (!H::sharded) {
      update(mask, rule_.update(parameters, store_.values(), payload), scalars(), compute);
      return 0;
    } else {
      const std::size_t first = plan_.first_tile(communicator_.rank()),
                        last = plan_.first_tile(communicator_.rank() + 1);
      update(mask.part(first, last), rule_.update(masters_.masters(), store_.values(), payload), scalars(), compute);
      if constexpr (R::follows_others)
        for (const MaskView& others : {mask.part(0, first), mask.part(last, mask.plan.tiles.size())})
          for_each_kept(others, rule_.follow(store_.values(), payload, scalars()), compute);
      const std::uint64_t before = communicator_.bytes_sent();
      masters_.send(mask, parameters, scalars(), communicator_, compute, side_);
      return communicator_.bytes_sent() - before;
    }
  }

  // Where scores find what the rule keeps of an element.
  auto place() const {
    if constexpr (H::sharded)
      return PlaceInPart{plan_.part_begin(communicator_.rank()) * word_bits};
    else
      return PlaceOfElement{};
  }

  std::span<float> own_payload(MaskView mask) const {
    return reducer_.payload(mask).subspan(static_cast<std::size_t>(communicator_.rank()) * mask.stride, mask.stride);
  }

  // Selects the mask of a later step, and starts its exchange.
  template <class G>
  void draft(std::span<const G> gradients, MaskView mask, const S& compute) {
    if (!masks_.draft_next()) return;
    const std::span<MaskWord> own = own_part(sent_.span());
    for (std::size_t i = 0; i < masks_.pending() && !own.empty(); ++i)
      for_each(own.size(), detail::Merge{own.data(), own_part(masks_.pending(i)).data(), i == 0}, compute);
    const auto sent = masks_.pending() == 0 ? std::span<const MaskWord>() : std::span<const MaskWord>(sent_.span());
    with_gradient(gradients, [&](auto gradient) {
      rule_.score_after(gradient, place(), store_.values(), mask, sent, scalars(), select_and_publish(compute));
    });
  }

  auto select_and_publish(const S& compute) {
    return [this, &compute](auto score) {
      masker_.select(score, masks_.draft_density(), masks_.draft(compute), select_workspace_.span(), compute);
      masks_.publish(communicator_, compute, side_);
      compare(masks_.pending(masks_.pending() - 1));
    };
  }

  template <class Word>
  std::span<Word> own_part(std::span<Word> words) const {
    if (words.empty()) return words;
    const int rank = communicator_.rank();
    return words.subspan(plan_.part_begin(rank), plan_.part_words()[static_cast<std::size_t>(rank)]);
  }

  bool clips_gradient() const noexcept { return R::clips_gradient && options_.clip_norm > 0; }
  bool clips_payload() const noexcept { return !R::clips_gradient && options_.clip_norm > 0; }

  template <class F>
  void take_norm(F value, std::size_t count, const S& compute) {
    squared_norm(count, value, partials_.span(), scalars().squared_norm, compute);
  }

  // The overlap is taken before the next draft takes `before`'s memory.
  void begin_report(StepReport& report, MaskView before, MaskView mask, std::span<const float> payload,
                    const S& compute) {
    report = {};
    report.step = masks_.step();
    report.density = masks_.density();
    report.kept = plan_.kept(masks_.density());
    mask_overlap(before.words, mask, payload, partials_.span(), scalars(), compute);
    squared_norm(payload.size(), detail::Values{payload.data()}, partials_.span(), scalars().squared_payload, compute);
  }

  void finish_report(StepReport& report, std::size_t kept_before, const S& compute) {
    const MaskView mask = masks_.current();
    squared_norm(plan_.tiles().size() * tile_bits,
                 detail::ResidualAt<R>{mask.plan.tiles.data(), mask.words.data(), store_.values().data()},
                 partials_.span(), scalars().squared_residual, compute);
    copy_values(std::span<const StepScalars>(scalars_.span()), std::span<StepScalars>(host_scalars_), compute);
    compute.synchronize();
    const StepScalars& found = host_scalars_[0];
    if (report.step != 0 && kept_before != 0) {
      const auto both = static_cast<double>(found.overlap);
      report.jaccard = both / (static_cast<double>(kept_before + report.kept) - both);
      report.energy_share = found.squared_payload == 0 ? 0 : found.squared_overlap / found.squared_payload;
    }
    report.gradient_norm = std::sqrt(found.squared_norm);
    report.residual_norm = std::sqrt(found.squared_residual);
  }

  // Collective. Throws on every rank where not all were given the same.
  void check_agreement(const R& rule, M& memory) {
    std::vector<AgreedValue> values = {
        AgreedValue::integer("version of scape",
                             SCAPE_VERSION_MAJOR * 1'000'000 + SCAPE_VERSION_MINOR * 1'000 + SCAPE_VERSION_PATCH),
        AgreedValue::integer("layout.size()", plan_.size()), AgreedValue::hash("layout", plan_.fingerprint()),
        AgreedValue::hash("rule", rule.fingerprint()), AgreedValue::integer("bytes of a parameter", sizeof(Parameter))};
    for (const AgreedValue& value : options_.agreed()) values.push_back(value);
    expect_agreement(std::span<const AgreedValue>(values), communicator_, memory, side_);
  }

  bool compares() const noexcept { return plan_.ranks() > 1 && options_.compare_every != 0; }

  // Enqueued once a step, behind the exchange of its mask, where there is one.
  void compare(std::span<const MaskWord> mask) {
    if (!compares() || masks_.step() % options_.compare_every != 0) return;
    const std::uint64_t before = communicator_.bytes_sent();
    agreement_.compare(masks_.step() + 1, options_.learning_rate, mask, communicator_, side_);
    bytes_compared_ += communicator_.bytes_sent() - before;
  }

  StepScalars& scalars() const noexcept { return *scalars_.span().data(); }

  // Times between the phases of a step that is reported on.
  class PhaseClock {
   public:
    using Phase = double StepReport::Seconds::*;
    PhaseClock(bool runs, std::array<double, 9>& times, const S& compute)
        : runs_(runs), times_(times), compute_(compute) {
      if (runs) record_time(times_[0], compute_);
    }
    void lap(Phase phase) {
      if (!runs_) return;
      phases_[laps_++] = phase;
      record_time(times_[laps_], compute_);
    }
    void read(StepReport::Seconds& seconds) const {
      for (std::size_t i = 0; i < laps_; ++i) seconds.*phases_[i] += times_[i + 1] - times_[i];
    }

   private:
    bool runs_;
    std::array<double, 9>& times_;
    const S& compute_;
    std::array<Phase, 8> phases_{};
    std::size_t laps_ = 0;
  };

  C& communicator_;
  S compute_, side_;
  AdamSOptions options_;
  MaskPlan plan_;
  PlanTables<M> tables_;
  Buffer<StepScalars, M> scalars_;
  DelayedMaskScheduler<S, M> masks_;
  TopKMasker masker_;
  typename K::template Store<S, M> store_;
  SparseBufferReducer<S, M> reducer_;
  typename R::template State<M> rule_;
  [[no_unique_address]] std::conditional_t<H::sharded, MasterStore<Parameter, S, M>, detail::NoMasters> masters_;
  Buffer<MaskWord, M> sent_;
  Buffer<float, M> sums_;
  Buffer<std::byte, M> select_workspace_;
  StepAgreement<S, M> agreement_;
  typename S::Event compared_;
  SharedFlag<S, M> flag_;
  Buffer<double, M> partials_;
  std::uint64_t bytes_compared_ = 0;             // in the step
  double density_before_ = 0, padded_for_ = -1;  // of the masks of the last step, and for which the payload is padded
  bool has_masters_ = false;
  std::size_t micro_batches_ = 0;  // of the step that has begun
  bool at_mask_ = false;           // whether they are in the payload
  bool rates_are_new_ = true, broken_ = false;
  int exceptions_ = std::uncaught_exceptions();
  std::array<double, 9> times_{};
  std::array<StepScalars, 1> host_scalars_;
};

}  // namespace scape::inline v0
