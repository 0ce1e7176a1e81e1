#pragma once

#include <scape/adams_options.hpp>
#include <scape/agreement.hpp>
#include <scape/arithmetic.hpp>
#include <scape/clock_rule.hpp>
#include <scape/communicator.hpp>
#include <scape/delayed_mask_scheduler.hpp>
#include <scape/error.hpp>
#include <scape/fingerprint.hpp>
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
#include <utility>
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
    now.overlap = 0;
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
  const Tile* tiles;  // the rank's, from first_tile on
  std::size_t first_tile;
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
// The same in chosen tiles, of which the dense ones have no place among the sums.
template <class G>
struct SumUpInTiles {
  const Tile* tiles;
  const std::uint32_t* chosen;
  std::size_t end_bit;
  SumUp<G> sum;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const {
    const std::size_t tile = chosen[i / tile_bits];
    if (tiles[tile].bit < end_bit) sum((tile - sum.first_tile) * tile_bits + i % tile_bits);
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
/// Owns the state, for rule `scape` 4 bytes a parameter, 4 a kept element and two bitmaps, for `clock` 10 bytes a
/// parameter and two bitmaps, and one workspace;
/// state_bytes() and workspace_bytes() tell. Every buffer is made in the constructor: a step enqueues its work and
/// returns, without allocation or synchronisation. Gradients and parameters must stay until `compute` has passed the
/// step; collectives run on `side`, the mask of the next step beside the next forward and backward. Parameters, first
/// moment and masks are bit-identical on all ranks after every step; with density 1 it is dense AdamS to the bit.
/// Steps must be made on the same compute stream, or on streams that the caller orders. Layout, communicator and memory
/// are used as they are; communicator and memory must outlive the optimizer.
///
/// NaN and infinite gradients are worked on like others: they are kept first, and spoil the elements that they reach.
///
/// H says who keeps what: Replicated, Sharded<P> or FullySharded<P>; K where residuals lie: InMemory or Offloaded<E>.
///
/// Throws std::invalid_argument for wrong arguments, before anything has changed; scape::Error, on every rank and
/// naming the odd one, where ranks disagree: on version, layout, options or rule in the constructor, on step, learning
/// rate, order of buckets or mask when a step has compared them (StepAgreement says when that is). After a step that
/// failed halfway all further steps throw. Sources: SCAPE, arXiv 2607.01678; AdamS, arXiv 2505.16363;
/// docs/algorithm.md.
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
        plan_(fitting(layout, communicator, options), options.exact_mask_parts, H::sharded),
        tables_(plan_, memory, compute),
        scalars_(1, memory),
        masks_(plan_, tables_.view(), communicator.rank(), mask_options(), memory, compute),
        masker_(plan_, tables_.view(), communicator.rank()),
        store_(keep.template store<S>(plan_, memory, compute)),
        reducer_(payload_capacity(), options.payload, communicator.size(), memory, plan_.buckets() > 1),
        rule_(rule, options, plan_.own_elements(communicator.rank()), reducer_.capacity(),
              plan_.payload_size(options.density, H::sharded), memory, compute),
        masters_(plan_, tables_.view(), communicator.rank(), H::replicates ? reducer_.capacity() : 0, memory),
        sent_(R::pending_counts_as_sent && options.delay > 1 ? plan_.words() : 0, memory),
        sums_(R::scores_gradient && options.adds
                  ? plan_.part_words()[static_cast<std::size_t>(communicator.rank())] * word_bits
                  : 0,
              memory),
        select_workspace_(options.density < 1 ? masker_.workspace_bytes(compute) : 0, memory),
        agreement_(communicator.rank(), communicator.size(), memory),
        flag_(communicator.rank(), communicator.size(), memory),
        partials_(
            std::max(
                norm_partials(std::max({plan_.size(), plan_.tiles().size() * tile_bits, reducer_.capacity()}), compute),
                2 * plan_.tiles().size()),
            memory),
        added_(plan_.buckets()),
        clock_(plan_.buckets()) {
    fill_values(select_workspace_.span(), std::byte{0}, compute);
    transform(scalars(), detail::Reset{}, compute);
    if constexpr (requires {
                    store_.prepare(plan_, plan_.bucket_tiles(plan_.view(), 0), plan_.bucket_tiles(plan_.view(), 0),
                                   compute);
                  })
      for (std::size_t bucket = 0; plan_.buckets() > 1 && bucket < plan_.buckets(); ++bucket)
        if (const auto tiles = plan_.bucket_tiles(plan_.view(), bucket); !tiles.empty())
          store_.prepare(plan_, tiles, plan_.bucket_tiles(tables_.view(), bucket), compute);
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
  /// that is captured. Capture max(delay, 1) + 1 steps, behind the density warm-up and one step more, with refresh = 1:
  /// as many masks take turns, and another number of steps would use the wrong ones. steps() and the communicator's
  /// bytes count captures, not replays. End the capture before the optimizer is destroyed.
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

  /// The same of the rank's own elements alone, as masters() has them.
  void load_own_masters(std::span<const float> own, const S& compute) requires(H::sharded) {
    expects(own.size() == masters().size(), "own.size()", own.size(), "must be the rank's own elements, ",
            masters().size());
    masters_.load_own(own, compute);
    has_masters_ = true;
  }

  /// Sharded only: makes every rank's parameters equal to their rounded masters. With rule `clock` they always are;
  /// with `scape` weight decay moves masters off the mask too: docs/algorithm.md, "Sharded". Collective; for once in a
  /// while.
  void synchronize_parameters(std::span<Parameter> parameters, const S& compute) requires(H::sharded&& H::replicates) {
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
    expects(!under_way_, "step", "under way", "finish() what begin_step() began");
    expects(micro_batches_ == 0, "try_step", "called after add()", "what was added cannot be taken back");
    if (overflowed)
      flag_.set(*overflowed, compute);
    else
      find_nonfinite(values, flag_.own(), compute);
    if (flag_.raised_anywhere(communicator_, compute, side_)) return false;
    step(values, parameters, compute, report);
    return true;
  }

  /// A step whose gradients become ready bucket by bucket (Segment::bucket), while backward still runs: what it has
  /// sent arrives beside the rest of backward. Move it as you like, but end it with finish(): else the optimizer is
  /// done.
  template <class G>
  class OverlappedStep {
   public:
    OverlappedStep(OverlappedStep&& other) noexcept
        : optimizer_(std::exchange(other.optimizer_, nullptr)),
          gradients_(other.gradients_),
          compute_(other.compute_),
          report_(other.report_) {}
    ~OverlappedStep() {
      if (optimizer_ != nullptr) optimizer_->abandon();
    }

    /// The bucket's gradients are in place as far as compute has been given work: accumulates them and starts the
    /// reduction of what they leave at the mask. Every bucket once, in any order that is the same on all ranks.
    void add(std::size_t bucket) {
      check();
      expects(!optimizer_->passing_, "gradients", "not given",
              "begin_step() was given no array: add(bucket, gradients)");
      optimizer_->add_bucket(bucket, gradients_, compute_);
    }

    /// The same of a step that has no array: the bucket's gradients alone, which may be overwritten when compute has
    /// passed. The bucket's segments must follow one another in the layout.
    void add(std::size_t bucket, std::span<const G> gradients) {
      check();
      expects(optimizer_->passing_, "gradients", "given", "begin_step() was given the array: add(bucket)");
      optimizer_->add_bucket(bucket, optimizer_->as_whole(bucket, gradients), compute_);
    }

    /// The rest of the step, when all buckets have been added. The same bits as step(), where the communicator's sum
    /// does not depend on how a payload is cut: the order of ranks (threads, MPI) does not, NCCL's may.
    void finish(std::span<Parameter> parameters) {
      check();
      optimizer_->finish_step(gradients_, parameters, compute_, report_);
      optimizer_ = nullptr;
    }

   private:
    friend AdamS;
    OverlappedStep(AdamS& optimizer, std::span<const G> gradients, const S& compute, StepReport* report)
        : optimizer_(&optimizer), gradients_(gradients), compute_(compute), report_(report) {}

    void check() const { expects(optimizer_ != nullptr, "the step", "finished", "begin another one"); }

    AdamS* optimizer_;
    std::span<const G> gradients_;
    S compute_;
    StepReport* report_;
  };

  /// Begins such a step, at the rate that holds now, where compute is: before backward writes its first gradient into
  /// the array, which must stay until compute has passed the step. The first step of all waits for the whole gradient
  /// unless its mask is dense. May follow add(). Needs a delay of at least 1, and no clip_norm where the rule clips the
  /// local gradient. With a report: finish() waits for the step and fills it.
  template <std::ranges::contiguous_range G>
  auto begin_step(const G& gradients, const S& compute, StepReport* report = nullptr) {
    const auto values = checked(gradients, "gradients");
    begin_overlapped(values, compute, report);
    passing_ = false;
    return OverlappedStep<typename decltype(values)::value_type>(*this, values, compute, report);
  }

  /// The same where there is never a whole gradient: add() brings each bucket's, of type G. Not for the first step,
  /// unless its mask is dense, as a density warm-up makes it; with rule `clock` needs the option `adds`.
  template <GradientType G>
  OverlappedStep<G> begin_step(const S& compute, StepReport* report = nullptr) {
    expects(!R::scores_gradient || options_.adds, "options.adds", options_.adds,
            "must be true for gradients that pass");
    expects(!masks_.draft_first(), "options.density_warmup", options_.density_warmup,
            "must be at least 1 for gradients that pass, since the first mask would need them all");
    begin_overlapped(std::span<const G>(), compute, report);
    passing_ = true;
    return OverlappedStep<G>(*this, {}, compute, report);
  }

  /// Steps made.
  std::size_t steps() const noexcept { return masks_.step(); }
  const MaskPlan& plan() const noexcept { return plan_; }
  const AdamSOptions& options() const noexcept { return options_; }

  /// The mask of the last step. Like the next three, for work of the compute stream, until the next step.
  MaskView mask() const noexcept { return masks_.current(); }
  /// The ResidualStore's array; rule `scape`: the first moment on the mask, which compute puts there now, the residual
  /// off it. Counts as work of the step before: order the next step, and destruction, behind it. Inside a step, between
  /// add() or begin_step() and its end, and after a failure, nothing is put anywhere.
  std::span<const float> store(const S& compute) const {
    if (!broken_ && !under_way_ && micro_batches_ == 0) settle(compute);
    return store_.values();
  }
  /// The store itself; offloaded, it tells whether its memory is what was asked for.
  const auto& residual_store() const noexcept { return store_; }
  /// What coding the last step's payload has rounded away, by payload position: the next step adds it to the gradient.
  /// Empty where payloads are float32.
  std::span<const float> errors() const { return reducer_.errors(masks_.current()); }
  /// What the rule keeps besides.
  const auto& rule_state() const noexcept { return rule_; }

  /// Bytes that are kept from step to step, residuals outside the optimizer's memory left out.
  std::size_t state_bytes() const noexcept {
    return (K::offloads ? 0 : store_.values().size_bytes()) + masks_.state_bytes() + reducer_.state_bytes() +
           rule_.state_bytes() + masters_.state_bytes() + tables_.bytes() + scalars_.bytes();
  }
  /// Bytes of residuals that lie elsewhere: see Offloaded.
  std::size_t offloaded_bytes() const noexcept { return K::offloads ? store_.values().size_bytes() : 0; }
  /// Bytes of scratch. The payload's share follows the largest density, so a density warm-up costs 4 bytes a parameter
  /// here, 8 with rule `scape`.
  std::size_t workspace_bytes() const noexcept {
    return masks_.workspace_bytes() + reducer_.workspace_bytes() + rule_.workspace_bytes() +
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
  static const L& fitting(const L& layout, const C& communicator, const AdamSOptions& options) {
    expects(layout.ranks() == communicator.size(), "layout.ranks()", layout.ranks(),
            "must be the communicator's size, ", communicator.size());
    expects(options.payload == PayloadFormat::float32 || AllToAllCommunicator<C, S>, "options.payload",
            name_of(options.payload), "needs a communicator with all_to_all");
    return layout;
  }

  // Whether every rank gets the mean of all, not of its own part alone.
  static constexpr bool has_whole_payload = !H::sharded || R::follows_others;

  MaskOptions mask_options() const {
    MaskOptions options = options_.masks();
    options.payload_by_rank = H::sharded;
    return options;
  }
  std::size_t payload_capacity() const { return plan_.payload_size(options_.masks().density.largest(), H::sharded); }

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
    if constexpr (H::replicates)
      expects(parameters.size() == plan_.size(), "parameters.size()", parameters.size(), "must be the layout's size, ",
              plan_.size());
    else
      expects(parameters.size() == masters().size(), "parameters.size()", parameters.size(),
              "must be the rank's own elements, ", masters().size());
    expects(!H::sharded || has_masters_, "masters", "not loaded", "call load_masters() before the first step");
  }

  template <class F>
  void enqueue_whole(const S& compute, F work) {
    expects(!under_way_, "step", "under way", "finish() what begin_step() began");
    guard(compute, work);
  }

  // What throws in the middle leaves the optimizer broken.
  template <class F>
  void guard(const S& compute, F work) {
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
    open(gradients, compute, report);
    take(gradients, compute, report);
    complete(gradients, parameters, compute, report);
  }

  // Before any gradient is looked at, but to clip it.
  template <class G>
  void open(std::span<const G> gradients, const S& compute, StepReport* report) {
    clock_.start(report != nullptr, compute);
    bytes_before_ = communicator_.bytes_sent();
    bytes_compared_ = bytes_of_payload_ = 0;
    order_ = Fingerprint();
    drafted_ = false;
    begin(gradients, compute);
  }

  // The whole gradient at once: up to where its payload is on its way.
  template <class G>
  void take(std::span<const G> gradients, const S& compute, StepReport* report) {
    if (micro_batches_ != 0) sum_up(gradients, compute);
    if (masks_.draft_first())
      with_gradient(gradients, [&](auto gradient) {
        rule_.score_before(gradient, place(), store_.values(), masks_.current(), scalars(),
                           select_and_publish(compute));
      });
    clock_.lap(&StepReport::Seconds::select, compute);
    reach_mask(compute, report);
    send(gradients, compute);
  }

  template <class G>
  void send(std::span<const G> gradients, const S& compute) {
    const MaskView mask = masks_.current();
    drafted_ = accumulate_and_draft(gradients, compute);
    if (!drafted_) accumulate(gradients, mask, compute);
    clock_.lap(&StepReport::Seconds::accumulate, compute);
    if (clock_.runs()) note_overlap(mask, compute);
    for (const PayloadPart& part : mask.parts) reduce(part, compute);
  }

  // From here on the step knows its mask.
  void reach_mask(const S& compute, StepReport* report) {
    if (!at_mask_) {
      masks_.advance(compute);
      if (H::sharded && masks_.density() != padded_for_) {  // what lies between the ranks' parts counts as nothing in
        fill_values(reducer_.payload(masks_.current()), 0.0f, compute);  // norms
        padded_for_ = masks_.density();
      }
    }
    errors_before_ = reducer_.errors(masks_.previous());
    clock_.lap(&StepReport::Seconds::mask_wait, compute);
    if (report == nullptr) return;
    *report = {};
    report->step = masks_.step();
    report->density = masks_.density();
    report->kept = plan_.kept(masks_.density());
  }

  // When the payload is on its way.
  template <class G>
  void complete(std::span<const G> gradients, std::span<Parameter> parameters, const S& compute, StepReport* report) {
    const MaskView mask = masks_.current();
    const std::span<float> payload = reducer_.payload(mask);
    const std::size_t kept_before = masks_.step() == 0 ? 0 : plan_.kept(density_before_);
    if (report != nullptr) sum_overlap(plan_.tiles().size(), partials_.span(), scalars(), compute);
    clock_.mark(compute);
    if (drafted_)
      publish(compute);
    else if (!rule_.selects_after_update())
      draft(gradients, mask, compute);
    clock_.lap(&StepReport::Seconds::select, compute);
    reducer_.wait(compute);
    clock_.lap(&StepReport::Seconds::payload_wait, compute);
    if (report != nullptr || clips_payload()) {
      const std::span<const float> reduced = reduced_payload(mask, compute);
      take_norm(detail::Values{reduced.data()}, reduced.size(), compute);
    }
    if (clips_payload()) transform(scalars(), detail::ClipPayload{options_.clip_norm}, compute);
    const std::uint64_t bytes_of_parameters = update_parameters(mask, parameters, payload, compute);
    clock_.lap(&StepReport::Seconds::update, compute);
    if (rule_.selects_after_update()) draft(gradients, mask, compute);
    clock_.lap(&StepReport::Seconds::select, compute);
    if constexpr (H::sharded && H::replicates) masters_.receive(mask, parameters, compute);
    clock_.lap(&StepReport::Seconds::parameter_wait, compute);
    if (!masks_.draft_next()) compare({});
    density_before_ = masks_.density();
    masks_.finish();
    micro_batches_ = 0;
    at_mask_ = false;
    if (report == nullptr) return;
    report->payload_bytes = bytes_of_payload_;
    report->compare_bytes = bytes_compared_;
    report->parameter_bytes = bytes_of_parameters;
    report->mask_bytes =
        communicator_.bytes_sent() - bytes_before_ - bytes_of_payload_ - bytes_of_parameters - bytes_compared_;
    finish_report(*report, kept_before, compute);
    clock_.read(report->seconds);
  }

  // ---- A step in buckets

  template <class G>
  void begin_overlapped(std::span<const G> gradients, const S& compute, StepReport* report) {
    expects(options_.delay >= 1, "options.delay", options_.delay, "must be at least 1 for begin_step()");
    expects(!clips_gradient(), "options.clip_norm", options_.clip_norm, "must be 0 for begin_step() with this rule");
    expects(!H::sharded || has_masters_, "masters", "not loaded", "call load_masters() before the first step");
    enqueue_whole(compute, [&] {
      open(gradients, compute, report);
      selects_first_ = masks_.draft_first();
      if (selects_first_) return;
      reach_mask(compute, report);
      if (added_.size() > 1) errors_before_ = reducer_.keep_errors(masks_.previous(), compute);
    });
    std::fill(added_.begin(), added_.end(), false);
    under_way_ = true;
  }

  // One bucket's gradients, so that elements index them.
  template <class G>
  std::span<const G> as_whole(std::size_t bucket, std::span<const G> gradients) const {
    expects(bucket < added_.size(), "bucket", bucket, "must be below the layout's buckets, ", added_.size());
    std::size_t begin = 0, end = 0;
    for (const Segment& segment : plan_.segments()) {
      if (segment.bucket != bucket || segment.count == 0) continue;
      if (end == 0) begin = end = segment.begin;
      expects(segment.begin == end, "bucket", bucket, "has segments that do not follow one another");
      end += segment.count;
    }
    expects(gradients.size() == end - begin, "gradients.size()", gradients.size(), "must be the bucket's, ",
            end - begin);
    return {gradients.data() - begin, plan_.size()};
  }

  template <class G>
  void add_bucket(std::size_t bucket, std::span<const G> gradients, const S& compute) {
    expects(bucket < added_.size(), "bucket", bucket, "must be below the layout's buckets, ", added_.size());
    expects(!added_[bucket], "bucket", bucket, "has been added already");
    guard(compute, [&] {
      added_[bucket] = true;
      order_.add(std::uint64_t{bucket});
      if (selects_first_ || plan_.tiles().empty()) return;
      clock_.mark(compute);
      MaskView mask = masks_.current();
      const PayloadPart& part = mask.parts[bucket];
      if (added_.size() > 1) {
        const std::span<const std::uint32_t> tiles = plan_.bucket_tiles(tables_.view(), bucket);
        if (tiles.empty()) return;
        mask = mask.only(tiles);
      }
      if (passing_) sum_up(gradients, bucket, compute);
      accumulate(gradients, mask, compute);
      clock_.lap(&StepReport::Seconds::accumulate, compute);
      if (clock_.runs()) note_overlap(mask, compute);
      reduce(part, compute);
    });
  }

  template <class G>
  void finish_step(std::span<const G> gradients, std::span<Parameter> parameters, const S& compute,
                   StepReport* report) {
    check_parameters(parameters);
    const auto missing = std::find(added_.begin(), added_.end(), false);
    expects(missing == added_.end(), "bucket", missing - added_.begin(), "has not been added");
    guard(compute, [&] {
      clock_.mark(compute);
      if (selects_first_)
        take(gradients, compute, report);
      else if (micro_batches_ != 0 && !passing_)
        sum_up(gradients, compute);
      complete(gradients, parameters, compute, report);
    });
    under_way_ = passing_ = false;
  }

  void abandon() noexcept {
    broken_ = true;
    under_way_ = passing_ = false;
  }

  // Where the step must make its own mask, which is the first step only, nothing is known of it yet.
  template <class G>
  void enqueue_add(std::span<const G> gradients, const S& compute) {
    begin(gradients, compute);
    sum_up(gradients, compute);
    if (masks_.draft_first()) {
      store_.add(gradients, scalars(), compute);
    } else {
      reach_mask(compute, nullptr);
      accumulate(gradients, masks_.current(), compute);
      at_mask_ = true;
    }
    ++micro_batches_;
  }

  // The first gradient at the step's mask, or one more, in the tiles that are chosen.
  template <class G>
  void accumulate(std::span<const G> gradients, MaskView mask, const S& compute) {
    const std::span<float> payload = reducer_.payload(mask);
    if (at_mask_)
      store_.add(gradients, mask, payload, rule_.accumulation(), scalars(), compute);
    else
      store_.accumulate(gradients, masks_.previous(), errors_before_, mask, payload, rule_.set_aside(payload.size()),
                        rule_.accumulation(), scalars(), compute);
  }

  // Accumulating and selecting the next mask in one, where the stream can: each tile's scores are computed right after
  // it was accumulated, and found in the cache. The mask is written over `before`, tile by tile, which is why a step
  // that is reported on selects later, and so does the first, whose `before` has no dense bits yet. Returns whether.
  template <class G>
  bool accumulate_and_draft(std::span<const G> gradients, const S& compute) {
    const MaskView mask = masks_.current();
    const std::span<float> payload = reducer_.payload(mask);
    if constexpr (requires {
                    store_.accumulation(gradients, mask, errors_before_, mask, payload, payload, rule_.accumulation(),
                                        scalars(), compute);
                  }) {
      if (clock_.runs() || at_mask_ || rule_.selects_after_update() || !masks_.draft_next() || masks_.step() == 0)
        return false;
      const auto accumulation =
          store_.accumulation(gradients, masks_.previous(), errors_before_, mask, payload,
                              rule_.set_aside(payload.size()), rule_.accumulation(), scalars(), compute);
      score_after(gradients, mask, compute, [&](auto score) {
        masker_.select(score, masks_.draft_density(), masks_.draft(compute), select_workspace_.span(), accumulation,
                       compute);
      });
      return true;
    }
    return false;
  }

  template <class G>
  void sum_up(std::span<const G> gradients, const S& compute) {
    const int rank = communicator_.rank();
    const auto tiles =
        tables_.view().tiles.subspan(plan_.first_tile(rank), plan_.first_dense_tile(rank) - plan_.first_tile(rank));
    if (sums_.size() != 0) for_each(tiles.size() * tile_bits, sum_of(gradients), compute);
  }
  template <class G>
  void sum_up(std::span<const G> gradients, std::size_t bucket, const S& compute) {
    if (added_.size() == 1) return sum_up(gradients, compute);
    const int rank = communicator_.rank();
    const auto chosen = plan_.bucket_tiles(tables_.view(), bucket, rank);
    const std::size_t end = plan_.part_begin(rank) + plan_.part_words()[static_cast<std::size_t>(rank)];
    if (sums_.size() != 0)
      for_each(chosen.size() * tile_bits,
               detail::SumUpInTiles<G>{tables_.view().tiles.data(), chosen.data(), end * word_bits, sum_of(gradients)},
               compute);
  }
  template <class G>
  detail::SumUp<G> sum_of(std::span<const G> gradients) const {
    const int rank = communicator_.rank();
    const std::size_t first = plan_.first_tile(rank);
    return {tables_.view().tiles.data() + first,
            first,
            sums_.span().data(),
            plan_.part_begin(rank) * word_bits,
            {gradients.data(), &scalars()},
            micro_batches_ == 0};
  }

  // f(gradient) with the gradient that scores see.
  template <class G, class F>
  void with_gradient(std::span<const G> gradients, F f) {
    if ((micro_batches_ != 0 || passing_) && sums_.size() != 0)
      f(SummedGradient{sums_.span().data(), plan_.part_begin(communicator_.rank()) * word_bits});
    else
      f(ScaledGradient<G>{gradients.data(), &scalars()});
  }

  // Brings the store up to date at the last mask.
  void settle(const S& compute) const {
    if (masks_.step() != 0) rule_.settle(store_.values(), masks_.current(), compute);
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
    if (masks_.draft_first()) settle(compute);
    rule_.begin(scalars(), compute);
    if (clips_gradient()) {
      take_norm(ScaledGradient<G>{gradients.data(), &scalars()}, gradients.size(), compute);
      transform(scalars(), detail::ClipGradient{options_.clip_norm}, compute);
    }
  }

  void reduce(const PayloadPart& part, const S& compute) {
    if (part.count == 0) return;
    const std::uint64_t before = communicator_.bytes_sent();
    if constexpr (has_whole_payload)
      reducer_.reduce(part, communicator_, compute, side_);
    else
      reducer_.reduce_scatter(part, communicator_, compute, side_);
    bytes_of_payload_ += communicator_.bytes_sent() - before;
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
      if constexpr (!H::replicates) {
        masters_.round(parameters, compute);
        return 0;
      }
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

  // What this rank knows of the reduced payload, for norms: of several buckets' parts the others' values become 0.
  std::span<const float> reduced_payload(MaskView mask, const S& compute) const {
    const std::span<float> payload = reducer_.payload(mask);
    if (has_whole_payload) return payload;
    const std::size_t rank = static_cast<std::size_t>(communicator_.rank());
    if (mask.parts.size() == 1) return payload.subspan(rank * mask.parts[0].stride, mask.parts[0].stride);
    for (const PayloadPart& part : mask.parts) {
      const std::size_t own = part.begin + rank * part.stride, end = part.begin + part.count;
      fill_values(payload.subspan(part.begin, own - part.begin), 0.0f, compute);
      fill_values(payload.subspan(own + part.stride, end - own - part.stride), 0.0f, compute);
    }
    return payload;
  }

  // Selects the mask of a later step, and starts its exchange.
  template <class G>
  void draft(std::span<const G> gradients, MaskView mask, const S& compute) {
    if (masks_.draft_next()) score_after(gradients, mask, compute, select_and_publish(compute));
  }

  // select(score) with the score of a later step's mask.
  template <class G, class Select>
  void score_after(std::span<const G> gradients, MaskView mask, const S& compute, Select select) {
    const std::span<MaskWord> own = own_part(sent_.span());
    for (std::size_t i = 0; i < masks_.pending() && !own.empty(); ++i)
      for_each(own.size(), detail::Merge{own.data(), own_part(masks_.pending(i)).data(), i == 0}, compute);
    const auto sent = masks_.pending() == 0 ? std::span<const MaskWord>() : std::span<const MaskWord>(sent_.span());
    with_gradient(gradients, [&](auto gradient) {
      rule_.score_after(gradient, place(), store_.values(), mask, sent, scalars(), select);
    });
  }

  auto select_and_publish(const S& compute) {
    return [this, &compute](auto score) {
      masker_.select(score, masks_.draft_density(), masks_.draft(compute), select_workspace_.span(), compute);
      publish(compute);
    };
  }

  void publish(const S& compute) {
    masks_.publish(communicator_, compute, side_);
    compare(masks_.pending(masks_.pending() - 1));
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

  // Before the payload travels, and before the next draft takes the memory of the mask before.
  void note_overlap(MaskView mask, const S& compute) {
    mask_overlap(masks_.previous().words, mask, reducer_.payload(mask), partials_.span(), scalars(), compute);
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
    agreement_.compare(masks_.step() + 1, options_.learning_rate, order_.value(), mask, communicator_, side_);
    bytes_compared_ += communicator_.bytes_sent() - before;
  }

  StepScalars& scalars() const noexcept { return *scalars_.span().data(); }

  // When the compute stream passes the phases of a step that is reported on.
  class PhaseClock {
   public:
    using Phase = double StepReport::Seconds::*;
    explicit PhaseClock(std::size_t buckets) : marks_(2 * buckets + 12) {}
    bool runs() const noexcept { return runs_; }
    void start(bool runs, const S& compute) {
      runs_ = runs;
      count_ = 0;
      mark(compute);
    }
    /// What came since the last mark belongs to no phase.
    void mark(const S& compute) { lap(nullptr, compute); }
    void lap(Phase phase, const S& compute) {
      if (!runs_) return;
      marks_[count_].phase = phase;
      record_time(marks_[count_++].time, compute);
    }
    void read(StepReport::Seconds& seconds) const {
      for (std::size_t i = 1; i < count_; ++i)
        if (marks_[i].phase != nullptr) seconds.*marks_[i].phase += marks_[i].time - marks_[i - 1].time;
    }

   private:
    struct Mark {
      double time = 0;
      Phase phase = nullptr;
    };
    std::vector<Mark> marks_;
    std::size_t count_ = 0;
    bool runs_ = false;
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
  std::vector<bool> added_;  // buckets of the step that begin_step() began
  PhaseClock clock_;
  std::uint64_t bytes_before_ = 0, bytes_compared_ = 0, bytes_of_payload_ = 0;  // the last two in the step
  Fingerprint order_;                                                           // of its buckets
  double density_before_ = 0, padded_for_ = -1;  // of the masks of the last step, and for which the payload is padded
  bool has_masters_ = false;
  std::size_t micro_batches_ = 0;         // of the step that has begun
  bool at_mask_ = false;                  // whether they are in the payload
  std::span<const float> errors_before_;  // at the previous mask
  bool drafted_ = false;                  // whether the step's accumulation has selected a mask, to be published
  bool selects_first_ = false;            // whether buckets can only wait until the last is there
  bool passing_ = false;                  // whether a step in buckets sees each one's gradients once only
  bool rates_are_new_ = true, broken_ = false, under_way_ = false;
  int exceptions_ = std::uncaught_exceptions();
  std::array<StepScalars, 1> host_scalars_;
};

}  // namespace scape::inline v0
