#pragma once

#include <scape/communicator.hpp>
#include <scape/density_schedule.hpp>
#include <scape/elias_fano.hpp>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/stream.hpp>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

namespace scape::inline v0 {

/// The form in which masks travel.
enum class MaskCoding {
  automatic,  ///< the shorter of the two: Elias-Fano where less than a quarter of the selectable elements is kept
  bitmap,     ///< one bit an element
  elias_fano  ///< k log2(n / k) + k + n / 2^floor(log2(n / k)) bits: a size that n and k fix
};

/// When masks are made and how they travel.
struct MaskOptions {
  DensitySchedule density{1};
  int delay = 1;            ///< steps from a mask's making to its first use; its exchange may take as long
  std::size_t refresh = 1;  ///< a new mask every so many steps
  MaskCoding coding = MaskCoding::automatic;
  bool payload_by_rank = false;  ///< payloads are not packed: rank r's part begins at r * MaskView::stride
};

/// Owns the masks, the one in use and those on their way, and exchanges the owners' parts in the background.
///
/// A step asks, in this order:
///   if (masks.draft_first()) { select into masks.draft(compute); masks.publish(...); }  // delay 0, and the very first
///   mask masks.advance(compute);                          // from here on compute waits for this step's mask, no
///   earlier
///   ... use masks.current(), and masks.previous() until the next draft ...
///   if (masks.draft_next()) { select into masks.draft(compute); masks.publish(...); }
///   masks.finish();
/// Every rank must make the same calls. A mask stays in use until the next one is due.
///
/// Collectives of one communicator run in order, so a delay above 1 hides an exchange behind more computation only
/// while no payload is due: 1 is nearly always right.
///
/// Owns, in the memory of M, max(delay, 1) + 1 bitmaps with 8 bytes of offsets per 4,096 elements, and the codes of one
/// mask. An exchange sends (W - 1) / W of the mask's bytes, as bitmap or code. The draft is written on the compute
/// stream; coding, exchange and decoding run on the side stream. Must stay until both have passed; the constructor
/// waits. docs/algorithm.md, "What both rules share".
template <Stream S, MemoryResource M>
class DelayedMaskScheduler {
 public:
  /// `plan` must outlive the scheduler; `tables` are the plan's, where the stream's work can read them.
  DelayedMaskScheduler(const MaskPlan& plan, PlanView tables, int rank, MaskOptions options, M& memory, const S& stream)
      : plan_(plan),
        tables_(tables),
        rank_(static_cast<std::size_t>(rank)),
        options_(options),
        codes_(plan.ranks() == 1 ? 0 : largest_code_words(), memory),
        workspace_(codes_.size() == 0 ? 0 : largest_workspace_bytes(), memory) {
    expects(rank >= 0 && rank < plan.ranks(), "rank", rank, "must be below the plan's ranks");
    expects(options.delay >= 0 && options.delay <= 1000, "delay", options.delay, "must be 0 to 1000");
    expects(options.refresh >= 1, "refresh", options.refresh, "must be at least 1");
    const std::size_t slots = static_cast<std::size_t>(std::max(options.delay, 1)) + 1;
    slots_.reserve(slots);
    pending_.reserve(slots);
    for (std::size_t i = 0; i < slots; ++i) slots_.emplace_back(plan, memory);
    for (Slot& slot : slots_) {
      fill_dense(slot, stream);
      fill_values(slot.offsets.span(), std::size_t{0}, stream);
    }
    fill_values(slots_[0].words.span(), MaskWord{0}, stream);  // before the first step nothing is kept
    slots_[0].has_dense = false;
    fill_values(codes_.span(), MaskWord{0}, stream);  // its padding travels too
    previous_ = current_ = &slots_[0];
    stream.synchronize();
  }

  /// Steps finished.
  std::size_t step() const noexcept { return step_; }

  /// Whether the step that begins needs a mask from its own numbers, before all else.
  bool draft_first() const noexcept {
    if (options_.density(step_) >= 1) return false;
    return options_.delay == 0 ? !started_ || step_ % options_.refresh == 0 : !started_;
  }

  /// Whether the step makes a mask for a later one.
  bool draft_next() const noexcept {
    return options_.delay > 0 && step_ % options_.refresh == 0 && options_.density(due()) < 1;
  }

  /// The density of the mask to be drafted.
  double draft_density() const noexcept { return options_.density(due()); }

  /// The words of the mask to be drafted: the owner selects into its part, on compute.
  std::span<MaskWord> draft(const S& compute) {
    Slot& slot = free_slot();
    if (!slot.has_dense) fill_dense(slot, compute);
    return slot.words.span();
  }

  /// Masks that are published but not in use yet, as whole masks of which only this rank's part may be read.
  std::size_t pending() const noexcept { return pending_.size(); }
  std::span<const MaskWord> pending(std::size_t i) const noexcept { return pending_[i].slot->words.span(); }

  /// Hands the draft over: its exchange starts on side when compute has got here.
  template <Communicator<S> C>
  void publish(C& communicator, const S& compute, const S& side) {
    Slot& slot = free_slot();
    slot.set_density(draft_density(), plan_, options_);
    compute.record(slot.selected);
    side.wait_for(slot.selected);
    if (plan_.ranks() > 1 && plan_.exchanged_words() > 0) exchange(slot, communicator, side);
    complete(slot, side);
    slot.arrived = false;
    pending_.push_back({&slot, due()});
  }

  /// The mask of this step becomes current(), the one in use so far previous(); compute waits until it has arrived.
  void advance(const S& compute) {
    previous_ = current_;
    if (!pending_.empty() && pending_.front().due <= step_) {
      current_ = pending_.front().slot;
      pending_.erase(pending_.begin());
      if (!current_->arrived) compute.wait_for(current_->ready);
    } else if (!started_) {  // density 1: every rank knows the mask
      Slot& slot = free_slot();
      slot.set_density(1, plan_, options_);
      fill_mask(tables_, slot.words.span(), compute);
      slot.has_dense = true;
      complete(slot, compute);
      current_ = &slot;
    }
    started_ = advanced_ = true;
  }

  /// Makes compute wait for all masks under way, so that no later work needs an event recorded before.
  void await(const S& compute) {
    for (const Pending& pending : pending_) {
      if (!pending.slot->arrived) compute.wait_for(pending.slot->ready);
      pending.slot->arrived = true;
    }
  }

  void finish() noexcept {
    ++step_;
    advanced_ = false;
  }

  MaskView current() const noexcept { return view(*current_); }
  MaskView previous() const noexcept { return view(*previous_); }

  /// The density that current() was made for.
  double density() const noexcept { return current_->density; }

  std::size_t state_bytes() const noexcept {
    std::size_t sum = 0;
    for (const Slot& slot : slots_) sum += slot.words.bytes() + slot.offsets.bytes();
    return sum;
  }
  std::size_t workspace_bytes() const noexcept { return codes_.bytes() + workspace_.bytes(); }

 private:
  // A mask and, for its density, what is kept in all and how each rank's part travels.
  struct Slot {
    Slot(const MaskPlan& plan, M& memory) : words(plan.words(), memory), offsets(plan.tiles().size(), memory) {
      codes.reserve(static_cast<std::size_t>(plan.ranks()));
      code_words.reserve(static_cast<std::size_t>(plan.ranks()));
    }

    void set_density(double value, const MaskPlan& plan, const MaskOptions& options) {
      if (value == density) return;
      density = value;
      stride = options.payload_by_rank ? plan.payload_stride(density, code_words) : 0;
      kept = options.payload_by_rank ? stride * static_cast<std::size_t>(plan.ranks()) : plan.kept(density);
      codes.clear();
      code_words.clear();
      plan.selected_by_rank(density, code_words);
      for (std::size_t rank = 0; rank < code_words.size(); ++rank) {
        codes.emplace_back(plan.part_words()[rank] * word_bits, code_words[rank]);
        code_words[rank] = codes[rank].words();
      }
      if (!plan.exact_parts())
        code_words.assign(code_words.size(), *std::max_element(code_words.begin(), code_words.end()));
      coded_words = std::accumulate(code_words.begin(), code_words.end(), std::size_t{0});
      coded = options.coding == MaskCoding::elias_fano ||
              (options.coding == MaskCoding::automatic && coded_words < plan.exchanged_words());
    }

    Buffer<MaskWord, M> words;
    Buffer<std::size_t, M> offsets;
    double density = -1;
    std::size_t kept = 0, stride = 0;
    bool coded = false, arrived = true;  // arrived: compute has waited for it already
    bool has_dense = false;              // whether the bits of dense segments are set
    std::size_t coded_words = 0;
    std::vector<EliasFano> codes;
    std::vector<std::size_t> code_words;
    typename S::Event selected, ready;
  };
  struct Pending {
    Slot* slot;
    std::size_t due;
  };

  // The step that a mask drafted now is for.
  std::size_t due() const noexcept { return advanced_ ? step_ + static_cast<std::size_t>(options_.delay) : step_; }

  MaskView view(const Slot& slot) const noexcept {
    return {tables_, slot.words.span(), slot.offsets.span(), slot.kept, slot.stride};
  }

  // Sets the bits of the dense segments, whose words do not travel: nobody writes them again.
  void fill_dense(Slot& slot, const S& stream) {
    fill_mask(tables_, slot.words.span(), stream);
    fill_values(slot.words.span().first(plan_.exchanged_words()), MaskWord{0}, stream);
    slot.has_dense = true;
  }

  // There are delay + 1 slots: one in use, at most delay - 1 pending when a draft begins. With delay 1 the free one is
  // the one that previous() is in, which is why that ends with the next draft.
  Slot& free_slot() noexcept {
    const auto taken = [&](const Slot& slot) {
      return &slot == current_ || std::any_of(pending_.begin(), pending_.end(),
                                              [&](const Pending& pending) { return pending.slot == &slot; });
    };
    return *std::find_if_not(slots_.begin(), slots_.end(), taken);
  }

  void complete(Slot& slot, const S& stream) {
    count_offsets(tables_, slot.words.span(), slot.stride, slot.offsets.span(), stream);
    stream.record(slot.ready);
  }

  template <Communicator<S> C>
  void exchange(Slot& slot, C& communicator, const S& side) {
    const std::span<MaskWord> bitmap = slot.words.span().first(plan_.exchanged_words());
    if (!slot.coded) return gather(bitmap, plan_.part_words(), communicator, side);
    const std::span<MaskWord> all = codes_.span().first(slot.coded_words);
    encode_elias_fano(slot.codes[rank_], std::span<const MaskWord>(part(bitmap, plan_.part_words(), rank_)),
                      part(all, slot.code_words, rank_), workspace_.span(), side);
    gather(all, slot.code_words, communicator, side);
    for (std::size_t rank = 0; rank < slot.codes.size(); ++rank)
      if (rank != rank_)
        decode_elias_fano(slot.codes[rank], std::span<const MaskWord>(part(all, slot.code_words, rank)),
                          part(bitmap, plan_.part_words(), rank), workspace_.span(), side);
  }

  template <Communicator<S> C>
  void gather(std::span<MaskWord> all, std::span<const std::size_t> counts, C& communicator, const S& side) const {
    const std::span<const MaskWord> own = part(all, counts, rank_);
    if (!plan_.exact_parts()) return communicator.all_gather(own, all, side);
    if constexpr (UnevenCommunicator<C, S>)
      communicator.all_gather_uneven(own, all, counts, side);
    else
      expects(false, "exact_parts", true, "this communicator has no all_gather_uneven");
  }

  static std::span<MaskWord> part(std::span<MaskWord> all, std::span<const std::size_t> counts, std::size_t rank) {
    const auto begin =
        std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(rank), std::size_t{0});
    return all.subspan(begin, counts[rank]);
  }

  // Bounds over all densities of the schedule. An Elias-Fano code of n bits is at most 2 n + 2 words long.
  std::size_t largest_code_words() const noexcept {
    switch (options_.coding) {
      case MaskCoding::bitmap:
        return 0;
      case MaskCoding::automatic:
        return plan_.exchanged_words();
      case MaskCoding::elias_fano:
        break;
    }
    return 2 * (plan_.exchanged_words() + static_cast<std::size_t>(plan_.ranks()));
  }
  std::size_t largest_workspace_bytes() const noexcept {
    const auto parts = plan_.part_words();
    return count_workspace_bytes(2 * *std::max_element(parts.begin(), parts.end()) + 2);
  }

  const MaskPlan& plan_;
  PlanView tables_;
  std::size_t rank_;
  MaskOptions options_;
  Buffer<MaskWord, M> codes_;
  Buffer<std::byte, M> workspace_;
  std::vector<Slot> slots_;
  std::vector<Pending> pending_;  // by due step
  Slot *current_, *previous_;
  std::size_t step_ = 0;
  bool started_ = false, advanced_ = false;
};

}  // namespace scape::inline v0
