// DelayedMaskScheduler by itself, with masks drawn by hand: each one's bits tell in which step it was made.

#include "ranks.hpp"
#include "support.hpp"

#include <scape/communicator.hpp>
#include <scape/delayed_mask_scheduler.hpp>
#include <scape/density_schedule.hpp>
#include <scape/layout.hpp>
#include <scape/mask_plan.hpp>
#include <scape/plan_tables.hpp>

#include <scape/host/pack.hpp>
#include <scape/host/update.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <latch>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using scape::DelayedMaskScheduler;
using scape::DensitySchedule;
using scape::MaskCoding;
using scape::MaskOptions;
using scape::MaskPlan;
using scape::MaskWord;
using scape::Segment;
using namespace std::chrono_literals;

// Sparse, dense and empty segments, one of several tiles, in an order that is not the owners'; with more than two
// ranks some own nothing, or nothing but dense segments.
ListLayout mixed_layout(int ranks) {
  ListLayout layout{{}, ranks};
  layout.add(100, 1);
  layout.add(7, 0, true);
  layout.add(5000, 0);
  layout.add(0, 1);
  layout.add(33, 4, true);
  layout.add(1, 1);
  layout.add(64, 0);
  layout.add(300, 5);
  layout.add(4097, 1, true);
  return layout;
}

// The mask that is made for `tag` on purpose: k neighbours from a place that tag and segment fix, cyclically.
void draw(const MaskPlan& plan, int rank, double density, std::size_t tag, Words& mask) {
  for (std::size_t i = plan.first_tile(rank); i < plan.first_dense_tile(rank); ++i) {
    const scape::Tile& tile = plan.tiles()[i];
    const Segment& segment = plan.segments()[tile.segment];
    if (tile.element != segment.begin) continue;
    for (std::size_t j = 0; j < plan.kept(segment, density); ++j) {
      const std::size_t bit = tile.bit + (tag * 37 + j) % segment.count;
      mask[bit / 32] |= MaskWord{1} << bit % 32;
    }
  }
}

// A mask and all that belongs to it, as it must come out.
struct Expected {
  Words words;
  Counts offsets;
  std::size_t kept = 0;
};

Expected expected_mask(const MaskPlan& plan, double density, std::size_t tag, std::size_t stride) {
  Expected expected{Words(plan.words()), {}, 0};
  for (int rank = 0; rank < plan.ranks(); ++rank) draw(plan, rank, density, tag, expected.words);
  std::size_t position = 0;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    if (stride != 0) position = static_cast<std::size_t>(rank) * stride;
    for (std::size_t i = plan.first_tile(rank); i < plan.first_tile(rank + 1); ++i) {
      const scape::Tile& tile = plan.tiles()[i];
      expected.offsets.push_back(position);
      for (std::size_t bit = tile.bit; bit < tile.bit + tile.count; ++bit) {
        if (plan.segments()[tile.segment].dense) expected.words[bit / 32] |= MaskWord{1} << bit % 32;
        position += expected.words[bit / 32] >> bit % 32 & 1;
      }
    }
  }
  expected.kept = stride == 0 ? position : stride * static_cast<std::size_t>(plan.ranks());
  return expected;
}

constexpr std::size_t bootstrap_tag = 1000;

// Which mask a step uses: the density that it is made for, and the step in which it is made.
struct Made {
  double density;
  std::size_t tag;
};

Made made_for(std::size_t step, const MaskOptions& options) {
  const std::size_t delay = static_cast<std::size_t>(options.delay);
  if (step < delay || (delay == 0 && step < options.refresh))
    return {options.density(0), bootstrap_tag};  // all bits at density 1, whatever the tag
  const std::size_t made = (step - delay) - (step - delay) % options.refresh;
  return {options.density(made + delay), made};
}

// A rank's scheduler and what it did, read back in stream order; the host does not wait.
template <class Rank>
class Run {
 public:
  using Stream = typename Rank::Stream;
  using Memory = std::remove_cvref_t<decltype(std::declval<Rank&>().memory)>;

  struct Seen {
    Words words, previous;
    Counts offsets;
    std::size_t kept, pending;
    double density;
  };

  Run(Rank& rank, const MaskPlan& plan, MaskOptions options)
      : rank_(rank),
        plan_(plan),
        tables_(plan, rank.memory, rank.compute),
        masks_(plan, tables_.view(), rank.rank(), options, rank.memory, rank.compute) {}
  Run(const Run&) = delete;
  ~Run() {
    for (const Stream* stream : {&rank_.side, &rank_.compute}) try {
        stream->synchronize();
      } catch (const scape::Error&) {  // the test hears of it from seen()
      }
  }

  template <class Communicator>
  void step(Communicator& communicator) {
    if (masks_.draft_first()) make(communicator, masks_.step() == 0 ? bootstrap_tag : masks_.step());
    masks_.advance(rank_.compute);
    Seen& seen = seen_.emplace_back();
    seen.words = Words(plan_.words(), 1);
    seen.previous = Words(plan_.words(), 1);
    seen.offsets = Counts(plan_.tiles().size(), 1);
    copy(masks_.current().words, seen.words);
    copy(masks_.current().offsets, seen.offsets);
    copy(masks_.previous().words, seen.previous);
    seen.kept = masks_.current().kept;
    seen.density = masks_.density();
    if (masks_.draft_next()) make(communicator, masks_.step());
    seen.pending = masks_.pending();
    masks_.finish();
  }
  void step() { step(rank_.communicator); }

  // What every step saw, once all is done.
  const std::deque<Seen>& seen() {
    rank_.side.synchronize();
    rank_.compute.synchronize();
    return seen_;
  }
  const std::vector<double>& drafted() const { return drafted_; }
  const auto& masks() const { return masks_; }

 private:
  template <class T>
  void copy(std::span<const T> from, std::vector<T>& to) {
    scape::copy_values(from, std::span<T>(to), rank_.compute);
  }

  template <class Communicator>
  void make(Communicator& communicator, std::size_t tag) {
    const std::size_t begin = plan_.part_begin(rank_.rank());
    const std::size_t count = plan_.part_words()[static_cast<std::size_t>(rank_.rank())];
    drafted_.push_back(masks_.draft_density());
    Words& drawn = drawings_.emplace_back(plan_.words());
    draw(plan_, rank_.rank(), masks_.draft_density(), tag, drawn);
    scape::copy_values(std::span<const MaskWord>(drawn).subspan(begin, count),
                       masks_.draft(rank_.compute).subspan(begin, count), rank_.compute);
    masks_.publish(communicator, rank_.compute, rank_.side);
  }

  Rank& rank_;
  const MaskPlan& plan_;
  scape::PlanTables<Memory> tables_;
  DelayedMaskScheduler<Stream, Memory> masks_;
  std::deque<Words> drawings_;  // must stay until the stream has passed
  std::deque<Seen> seen_;
  std::vector<double> drafted_;  // their densities
};

template <class Rank>
void check_steps(Rank& rank, const MaskPlan& plan, const MaskOptions& options, std::size_t steps) {
  Run run(rank, plan, options);
  for (std::size_t i = 0; i < steps; ++i) run.step();
  std::optional<Expected> last;
  for (std::size_t step = 0; step < steps; ++step) {
    CAPTURE(step);
    const Made made = made_for(step, options);
    const Expected expected =
        expected_mask(plan, made.density, made.tag, options.payload_by_rank ? plan.payload_stride(made.density) : 0);
    const auto& seen = run.seen()[step];
    REQUIRE(seen.words == expected.words);
    REQUIRE(seen.offsets == expected.offsets);
    REQUIRE(seen.kept == expected.kept);
    REQUIRE(seen.density == made.density);
    if (last) REQUIRE(seen.previous == last->words);
    last = expected;
  }
}

// Elias-Fano words of k bits out of n, from the formula.
std::size_t coded_words(std::size_t bits, std::size_t kept) {
  if (kept == 0) return 0;
  std::size_t low = 0;
  while (kept << (low + 1) <= bits) ++low;
  const std::size_t high = kept + (bits + (std::size_t{1} << low) - 1) / (std::size_t{1} << low);
  return (kept * low + 31) / 32 + (high + 31) / 32;
}

// Bytes that a rank sends for one mask.
std::uint64_t mask_bytes(const MaskPlan& plan, double density, MaskCoding coding, int rank) {
  Counts bitmap(plan.part_words().begin(), plan.part_words().end()), code, selected;
  plan.selected_by_rank(density, selected);
  for (std::size_t i = 0; i < bitmap.size(); ++i) code.push_back(coded_words(bitmap[i] * 32, selected[i]));
  if (!plan.exact_parts()) code.assign(code.size(), *std::max_element(code.begin(), code.end()));
  const auto sum = [](const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), std::size_t{0}); };
  const bool coded = coding == MaskCoding::elias_fano || (coding == MaskCoding::automatic && sum(code) < sum(bitmap));
  return (bitmap.size() - 1) * (coded ? code : bitmap)[static_cast<std::size_t>(rank)] * 4;
}

// A communicator that has no all_gather_uneven, and whose all_gather waits for a latch first where it was given one.
template <class Rank>
struct HeldCommunicator {
  Rank& base;
  std::shared_ptr<std::latch> may_go;
  int rank() const { return base.communicator.rank(); }
  int size() const { return base.communicator.size(); }
  std::uint64_t bytes_sent() const { return base.communicator.bytes_sent(); }
  void all_reduce_mean(std::span<const float> in, std::span<float> out, const typename Rank::Stream& stream) {
    base.communicator.all_reduce_mean(in, out, stream);
  }
  void reduce_scatter_mean(std::span<const float> in, std::span<float> out, const typename Rank::Stream& stream) {
    base.communicator.reduce_scatter_mean(in, out, stream);
  }
  void all_gather(std::span<const MaskWord> own, std::span<MaskWord> all, const typename Rank::Stream& stream) {
    if constexpr (std::is_same_v<typename Rank::Stream, scape::HostStream>)
      if (may_go) stream.enqueue([latch = may_go] { latch->wait(); });
    base.communicator.all_gather(own, all, stream);
  }
};
static_assert(scape::Communicator<HeldCommunicator<ThreadRank>, scape::HostStream>);
static_assert(!scape::UnevenCommunicator<HeldCommunicator<ThreadRank>, scape::HostStream>);

}  // namespace

TEST_CASE("DensitySchedule: a geometric fall from 1, then the density") {
  const DensitySchedule constant(0.1), falling(0.01, 4), one(1, 5), none(0);
  CHECK(constant(0) == 0.1);
  CHECK(constant(1'000'000) == 0.1);
  CHECK(constant.largest() == 0.1);
  CHECK(falling(0) == 1);
  CHECK(falling(1) == doctest::Approx(std::pow(0.01, 0.25)));
  CHECK(falling(2) == doctest::Approx(0.1));
  CHECK(falling(3) > 0.01);
  CHECK(falling(4) == 0.01);
  CHECK(falling(5) == 0.01);
  CHECK(falling.largest() == 1);
  CHECK(one(3) == 1);
  CHECK(none(0) == 0);
  CHECK(DensitySchedule(0, 3)(0) == 1);
  CHECK(DensitySchedule(0, 3)(1) == 0);
  CHECK(message_of([] { DensitySchedule(-0.1); }).starts_with("density is -0.1:"));
  CHECK(message_of([] { DensitySchedule(1.5, 3); }).starts_with("density is 1.5:"));
  const double not_a_number = std::numeric_limits<double>::quiet_NaN();
  CHECK(message_of([&] { DensitySchedule{not_a_number}; }).starts_with("density is nan:"));
}

TEST_CASE("every step has the mask that is due, whatever delay, refresh and density") {
  const DensitySchedule densities[] = {DensitySchedule(0.05), DensitySchedule(0.05, 6), DensitySchedule(0.6, 3)};
  for (const int world : worlds)
    for (const bool exact : {false, true}) {
      const MaskPlan plan(mixed_layout(world), exact);
      run_ranks(world, [&](auto& rank) {
        for (const DensitySchedule& density : densities)
          for (const int delay : {0, 1, 2, 3})
            for (const std::size_t refresh : Counts{1, 2, 5}) {
              CAPTURE(world);
              CAPTURE(exact);
              CAPTURE(density(1));
              CAPTURE(delay);
              CAPTURE(refresh);
              // Exact parts' codes have a test of their own.
              const MaskCoding coding = exact ? MaskCoding::bitmap : MaskCoding::automatic;
              check_steps(rank, plan, {.density = density, .delay = delay, .refresh = refresh, .coding = coding}, 12);
            }
      });
    }
}

TEST_CASE("density 1: the full mask, and never an exchange") {
  for (const int delay : {0, 1, 2}) {
    const MaskPlan plan(mixed_layout(3));
    run_ranks(3, [&](auto& rank) {
      Run run(rank, plan, {.density = DensitySchedule(1), .delay = delay});
      for (int step = 0; step < 4; ++step) run.step();
      const Expected full = expected_mask(plan, 1, 0, 0);
      for (const auto& seen : run.seen()) {
        CHECK(seen.words == full.words);
        CHECK(seen.offsets == full.offsets);
        CHECK(seen.kept == plan.size());
        CHECK(seen.density == 1);
      }
      CHECK(run.drafted().empty());
      CHECK(rank.communicator.bytes_sent() == 0);
    });
  }
}

TEST_CASE("drafts: how many, of which densities, and what is pending") {
  const struct {
    int delay;
    std::size_t refresh, warmup;
    std::vector<std::size_t> due;  // of the drafts of eight steps
    Counts pending;                // after each step
  } cases[] = {
      {0, 1, 0, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 0, 0, 0, 0, 0, 0, 0}},
      {0, 3, 0, {0, 3, 6}, {0, 0, 0, 0, 0, 0, 0, 0}},
      {0, 3, 9, {3, 6}, {0, 0, 0, 0, 0, 0, 0, 0}},
      {1, 1, 0, {0, 1, 2, 3, 4, 5, 6, 7, 8}, {1, 1, 1, 1, 1, 1, 1, 1}},
      {1, 1, 9, {1, 2, 3, 4, 5, 6, 7, 8}, {1, 1, 1, 1, 1, 1, 1, 1}},
      {1, 5, 0, {0, 1, 6}, {1, 0, 0, 0, 0, 1, 0, 0}},
      {3, 1, 9, {3, 4, 5, 6, 7, 8, 9, 10}, {1, 2, 3, 3, 3, 3, 3, 3}},
      {3, 2, 0, {0, 3, 5, 7, 9}, {1, 1, 2, 1, 2, 1, 2, 1}},
  };
  const MaskPlan plan(mixed_layout(2));
  for (const auto& test : cases)
    run_ranks(2, [&](auto& rank) {
      CAPTURE(test.delay);
      CAPTURE(test.refresh);
      CAPTURE(test.warmup);
      const DensitySchedule density(0.01, test.warmup);
      Run run(rank, plan, {.density = density, .delay = test.delay, .refresh = test.refresh});
      for (int step = 0; step < 8; ++step) run.step();
      std::vector<double> expected;
      for (const std::size_t due : test.due) expected.push_back(density(due));
      CHECK(run.drafted() == expected);
      for (std::size_t step = 0; step < 8; ++step) CHECK(run.seen()[step].pending == test.pending[step]);
      CHECK(run.masks().step() == 8);
    });
}

TEST_CASE("bitmap, Elias-Fano and automatic coding: identical masks, the expected bytes") {
  for (const int world : worlds)
    for (const bool exact : {false, true})
      for (const double density : {0.9, 0.3, 0.25, 0.24, 0.01, 0.0}) {
        const MaskPlan plan(mixed_layout(world), exact);
        run_ranks(world, [&](auto& rank) {
          for (const MaskCoding coding : {MaskCoding::automatic, MaskCoding::bitmap, MaskCoding::elias_fano}) {
            CAPTURE(world);
            CAPTURE(exact);
            CAPTURE(density);
            CAPTURE(static_cast<int>(coding));
            const std::uint64_t before = rank.communicator.bytes_sent();
            check_steps(rank, plan, {.density = DensitySchedule(density), .coding = coding}, 4);
            CHECK(rank.communicator.bytes_sent() - before == 5 * mask_bytes(plan, density, coding, rank.rank()));
          }
        });
      }
}

TEST_CASE("a payload by ranks: each one's part begins at its multiple of what the busiest keeps, at any density") {
  for (const int world : worlds) {
    const MaskPlan plan(mixed_layout(world));
    for (const double density : {0.1, 0.37, 1.0}) {
      const Counts kept = plan.kept_by_rank(density);
      const std::size_t most = *std::max_element(kept.begin(), kept.end());
      CHECK(plan.payload_stride(density) == most + most % 2);
    }
    run_ranks(world, [&](auto& rank) {
      CAPTURE(world);
      check_steps(rank, plan, {.density = DensitySchedule(0.1), .payload_by_rank = true}, 3);
      check_steps(rank, plan, {.density = DensitySchedule(0.1, 3), .payload_by_rank = true}, 5);
    });
  }
}

TEST_CASE("layouts of which nothing travels") {
  for (const int world : {1, 3})
    for (const bool exact : {false, true})
      for (const MaskCoding coding : {MaskCoding::automatic, MaskCoding::elias_fano}) {
        const MaskPlan plans[] = {MaskPlan(ListLayout{{}, world}, exact),
                                  MaskPlan(ListLayout{{{0, 0, 0}}, world}, exact),
                                  MaskPlan(ListLayout{{{0, 9, 0, true}, {9, 5000, world - 1, true}}, world}, exact)};
        for (const MaskPlan& plan : plans)
          run_ranks(world, [&](auto& rank) {
            check_steps(rank, plan, {.density = DensitySchedule(0.1, 2), .coding = coding}, 4);
            CHECK(rank.communicator.bytes_sent() == 0);
          });
      }
}

TEST_CASE("codes of exact parts, the density changing, every step awaited") {
  for (const int world : worlds) {
    const MaskPlan plan(mixed_layout(world), true);
    run_ranks(world, [&](auto& rank) {
      const MaskOptions options{.density = DensitySchedule(0.01, 8), .coding = MaskCoding::elias_fano};
      Run run(rank, plan, options);
      for (std::size_t step = 0; step < 10; ++step) {
        run.step();
        const Made made = made_for(step, options);
        REQUIRE(run.seen()[step].words == expected_mask(plan, made.density, made.tag, 0).words);
      }
    });
  }
}

// Red while the counts of an exchange that is still to run are overwritten when the host makes a later draft.
TEST_CASE("codes of exact parts, the density changing, the host far ahead of the side stream") {
  const MaskPlan plan(mixed_layout(3), true);
  run_ranks(3, [&](auto& rank) {
    typename std::remove_cvref_t<decltype(rank)>::Hold hold(rank.side);
    const MaskOptions options{.density = DensitySchedule(0.01, 8), .coding = MaskCoding::elias_fano};
    Run run(rank, plan, options);
    for (int step = 0; step < 4; ++step) run.step();
    hold.release();
    for (std::size_t step = 0; step < 4; ++step) {
      CAPTURE(step);
      const Made made = made_for(step, options);
      CHECK(run.seen()[step].words == expected_mask(plan, made.density, made.tag, 0).words);
    }
  });
}

TEST_CASE("before the first step nothing is kept, not even of dense segments") {
  for (const int world : {1, 3}) {
    const MaskPlan plan(mixed_layout(world));
    run_ranks(world, [&](auto& rank) {
      Run run(rank, plan, {.density = DensitySchedule(0.1)});
      const scape::MaskView mask = run.masks().previous();
      Words words(mask.words.size());
      Counts offsets(mask.offsets.size());
      scape::copy_values(mask.words, std::span<MaskWord>(words), rank.compute);
      scape::copy_values(mask.offsets, std::span<std::size_t>(offsets), rank.compute);
      rank.compute.synchronize();
      CHECK(words == Words(plan.words()));
      CHECK(mask.kept == 0);
      CHECK(offsets == Counts(plan.tiles().size()));
    });
  }
}

#if !defined(__CUDACC__)

TEST_CASE("the exchange runs beside compute, which waits at advance and no earlier") {
  const MaskPlan plan(mixed_layout(2));
  for (const int delay : {1, 2}) {
    CAPTURE(delay);
    run_ranks(2, [&](auto& rank) {
      using Rank = std::remove_cvref_t<decltype(rank)>;
      const auto release = std::make_shared<std::latch>(1);
      HeldCommunicator<Rank> free{rank, nullptr}, held{rank, release};
      const MaskOptions options{.density = DensitySchedule(0.1), .delay = delay};
      Run run(rank, plan, options);
      run.step(free);  // the first mask is needed at once, and so is the second with delay 1
      rank.compute.synchronize();
      run.step(held);  // its mask travels from here on
      // Backward and forward, and steps whose masks have arrived: compute finishes them all.
      for (int step = 2; step < 1 + delay; ++step) run.step(free);
      rank.compute.synchronize();
      // The step that uses the mask.
      std::promise<void> passed;
      std::future<void> has_passed = passed.get_future();
      run.step(free);
      rank.compute.enqueue([&passed] { passed.set_value(); });
      CHECK(has_passed.wait_for(20ms) == std::future_status::timeout);
      release->count_down();
      for (std::size_t step = 0; step < static_cast<std::size_t>(2 + delay); ++step) {
        const Made made = made_for(step, options);
        CHECK(run.seen()[step].words == expected_mask(plan, made.density, made.tag, 0).words);
      }
    });
  }
}

#endif

TEST_CASE("exact parts need a communicator with all_gather_uneven, and say so") {
  const MaskPlan plan(mixed_layout(2), true);
  for (const MaskCoding coding : {MaskCoding::bitmap, MaskCoding::elias_fano})
    run_ranks(2, [&](auto& rank) {
      using Rank = std::remove_cvref_t<decltype(rank)>;
      HeldCommunicator<Rank> communicator{rank, nullptr};
      Run run(rank, plan, {.density = DensitySchedule(0.1), .coding = coding});
      const std::string message = message_of([&] { run.step(communicator); });
      CHECK(message.find("exact_parts") != std::string::npos);
      CHECK(message.find("all_gather_uneven") != std::string::npos);
      rank.side.synchronize();
      rank.compute.synchronize();
    });
}

TEST_CASE_TEMPLATE("wrong arguments are refused by name and value", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const MaskPlan plan(mixed_layout(2));
  const scape::PlanTables tables(plan, backend.memory, backend.stream);
  using Scheduler = DelayedMaskScheduler<typename Backend::Stream, decltype(backend.memory)>;
  const auto refusal = [&](int rank, MaskOptions options) {
    const std::string message =
        message_of([&] { Scheduler(plan, tables.view(), rank, options, backend.memory, backend.stream); });
    backend.stream.synchronize();
    return message;
  };
  CHECK(refusal(-1, {}).starts_with("rank is -1:"));
  CHECK(refusal(2, {}).starts_with("rank is 2:"));
  CHECK(refusal(0, {.delay = -1}).starts_with("delay is -1:"));
  CHECK(refusal(0, {.refresh = 0}).starts_with("refresh is 0:"));
}

// Red while nobody compares the stride with what ranks keep: one rank's payload then runs into the next one's, and
// the last one's past the end of the buffer.
TEST_CASE_TEMPLATE("bytes owned are the documented ones", Backend, SCAPE_BACKENDS) {
  Backend backend;
  for (const int delay : {0, 1, 3})
    for (const MaskCoding coding : {MaskCoding::bitmap, MaskCoding::automatic}) {
      const MaskPlan plan(mixed_layout(3));
      const scape::PlanTables tables(plan, backend.memory, backend.stream);
      const DelayedMaskScheduler masks(plan, tables.view(), 0,
                                       MaskOptions{.density = DensitySchedule(0.1), .delay = delay, .coding = coding},
                                       backend.memory, backend.stream);
      backend.stream.synchronize();
      const std::size_t bitmaps = static_cast<std::size_t>(std::max(delay, 1)) + 1;
      CHECK(masks.state_bytes() == bitmaps * (plan.words() * 4 + plan.tiles().size() * 8));
      CHECK((masks.workspace_bytes() == 0) == (coding == MaskCoding::bitmap));
      CHECK(masks.workspace_bytes() <= plan.exchanged_words() * 4 + 64);
    }
}

#if !defined(__CUDACC__)

// Gives `allocations` buffers and no more, and notices what is written into one that was given back.
class ScarceMemory {
 public:
  explicit ScarceMemory(int allocations) : left_(allocations) {}
  ~ScarceMemory() {
    for (const Block& block : back_) ::operator delete(block.data, std::align_val_t(256));
  }
  void* allocate(std::size_t bytes, std::size_t alignment) {
    if (left_-- == 0) throw std::bad_alloc();
    return ::operator new(bytes, std::align_val_t(alignment));
  }
  void deallocate(void* pointer, std::size_t bytes, std::size_t) noexcept {
    std::fill_n(static_cast<unsigned char*>(pointer), bytes, 0xa5);
    back_.push_back({static_cast<unsigned char*>(pointer), bytes});
  }
  bool untouched_since() const {
    return std::all_of(back_.begin(), back_.end(), [](const Block& block) {
      return std::all_of(block.data, block.data + block.bytes, [](unsigned char byte) { return byte == 0xa5; });
    });
  }

 private:
  struct Block {
    unsigned char* data;
    std::size_t bytes;
  };
  int left_;
  std::vector<Block> back_;
};

// Red while a constructor that runs out of memory gives back buffers that it has enqueued work for.
TEST_CASE("without memory enough the constructor throws, and no work is left for what it gave back") {
  const MaskPlan plan(mixed_layout(2));
  HostBackend backend;
  const scape::PlanTables tables(plan, backend.memory, backend.stream);
  backend.stream.synchronize();
  for (int allocations = 0; allocations < 8; ++allocations) {
    CAPTURE(allocations);
    ScarceMemory memory(allocations);
    const scape::HostStream stream = backend.new_stream();
    std::latch release(1);
    std::thread opener([&] {
      std::this_thread::sleep_for(5ms);
      release.count_down();
    });
    stream.enqueue([&] { release.wait(); });
    using Scheduler = DelayedMaskScheduler<scape::HostStream, ScarceMemory>;
    const MaskOptions options{.density = DensitySchedule(0.1), .delay = 2};
    CHECK_THROWS_AS(Scheduler(plan, tables.view(), 0, options, memory, stream), std::bad_alloc);
    opener.join();
    stream.synchronize();
    CHECK(memory.untouched_since());
  }
}

#endif
