// AdamS whose gradients come bucket by bucket: the same bits as with a whole step, and payloads that leave early.

#include "reference.hpp"
#include "support.hpp"

#include <scape/bfloat16.hpp>
#include <scape/sharding.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using scape::AdamSOptions;
using scape::ClockRule;
using scape::ScapeRule;

// Segments of every size in buckets that are neither in order nor whole runs; bucket 3 holds no element, and the last
// rank may own nothing.
OwnLayout in_buckets(int ranks, bool idle = false) {
  OwnLayout layout({}, ranks);
  const std::pair<std::size_t, std::uint32_t> sizes[] = {{100, 2}, {0, 3},   {33, 0}, {4097, 1}, {1, 0},
                                                         {64, 2},  {500, 1}, {31, 4}, {900, 0}};
  for (std::size_t i = 0; i < std::size(sizes); ++i)
    layout.list.push_back({layout.size(), sizes[i].first, static_cast<int>(i) % (ranks - (idle && ranks > 1)),
                           i % 4 == 2, i % 3 != 1, sizes[i].second});
  return layout;
}

OwnLayout in_one_bucket(OwnLayout layout) {
  for (scape::Segment& segment : layout.list) segment.bucket = 0;
  return layout;
}

// Another order in every step, the same on all ranks.
std::vector<std::size_t> order_of(std::size_t buckets, std::size_t step) {
  std::vector<std::size_t> order(buckets);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = 0; i < step; ++i) std::next_permutation(order.begin(), order.end());
  if (step % 2 == 0) std::reverse(order.begin(), order.end());
  return order;
}

// As train(), bucket by bucket: a bucket's gradients are written just before it is added. Micro-batches: the same
// gradient i % 3 times before that.
template <class Rank, class Rule>
History train_in_buckets(const Problem& problem, const Rule& rule, bool micro_batches = false) {
  const std::size_t world = static_cast<std::size_t>(problem.layout.ranks());
  History history(problem.gradients.size(), std::vector<State>(world));
#if defined(SCAPE_TESTS_OVER_MPI)  // as in train()
  if constexpr (!std::is_same_v<Rank, ThreadRank>) history = train_in_buckets<ThreadRank>(problem, rule, micro_batches);
#endif
  Rank::run(problem.layout.ranks(), [&](Rank& rank) {
    const std::size_t me = static_cast<std::size_t>(rank.rank());
    Session session(rank, problem.layout, problem.options, rule, problem.parameters);
    auto& optimizer = session.optimizer;
    for (std::size_t i = 0; i < problem.gradients.size(); ++i) {
      const Floats& gradient = problem.gradients[i][me];
      const auto whole = rank.backend.array(gradient);
      const auto array = rank.backend.array(Floats(gradient.size(), 1e30f));
      for (std::size_t batch = 0; micro_batches && batch < i % 3; ++batch) optimizer.add(whole.span(), rank.compute);
      State& state = history[i][me];
      auto step = optimizer.begin_step(array.span(), rank.compute, &state.report);
      for (const std::size_t bucket : order_of(optimizer.plan().buckets(), i)) {
        for (const scape::Segment& segment : problem.layout.list)
          if (segment.bucket == bucket)
            scape::copy_values(std::span<const float>(whole.span()).subspan(segment.begin, segment.count),
                               array.span().subspan(segment.begin, segment.count), rank.compute);
        step.add(bucket);
      }
      auto moved = std::move(step);
      moved.finish(session.parameters());
      rank.compute.synchronize();
      const scape::StepReport report = state.report;
      state = session.state();
      state.report = report;
    }
  });
  return history;
}

void check_same_reports(const History& history, const History& expected) {
  for (std::size_t i = 0; i < history.size(); ++i)
    for (std::size_t rank = 0; rank < history[i].size(); ++rank) {
      const scape::StepReport &is = history[i][rank].report, &must = expected[i][rank].report;
      CHECK(is.step == must.step);
      CHECK(is.kept == must.kept);
      CHECK(is.mask_bytes == must.mask_bytes);
      CHECK(is.payload_bytes == must.payload_bytes);
      CHECK(is.compare_bytes == must.compare_bytes);
      CHECK(is.gradient_norm == must.gradient_norm);
      CHECK(is.residual_norm == must.residual_norm);
      CHECK(is.jaccard == must.jaccard);
      CHECK(is.energy_share == must.energy_share);
    }
}

}  // namespace

TEST_CASE_TEMPLATE("overlap: bucket by bucket in any order is a whole step, to the bit", Rank, SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    constexpr bool clips = !std::remove_cvref_t<decltype(rule)>::clips_gradient;
    const AdamSOptions all[] = {{.density = 0.1},
                                {.clip_norm = clips ? 1.0f : 0.0f, .density = 0.05, .density_warmup = 3},
                                {.weight_decay = 0.1f, .density = 0.1, .delay = 2, .refresh = 2},
                                {.density = 1},
                                {.density = 0.1, .density_warmup = 3, .payload = scape::PayloadFormat::e5m2}};
    for (const int ranks : {1, 2, 5})
      for (const AdamSOptions& options : all) {
        if (few && ranks != 2 + (options.delay > 1)) continue;
        CAPTURE(ranks);
        CAPTURE(options.density);
        const Problem problem = random_problem(in_buckets(ranks, ranks == 5), options, few ? 4 : 6);
        const History history = train_in_buckets<Rank>(problem, rule), expected = train<Rank>(problem, rule);
        CHECK(same(history, expected));
        check_same_reports(history, expected);
        if (options.clip_norm != 0) continue;  // a norm's rounding follows the order of the payload, and so do blocks
        if (options.payload != scape::PayloadFormat::float32) continue;
        Problem whole = problem;
        whole.layout = in_one_bucket(problem.layout);
        CHECK(same(history, train<Rank>(whole, rule)));
      }
  });
}

TEST_CASE_TEMPLATE("overlap: after micro-batches", Rank, SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    Problem problem = random_problem(in_buckets(2), {.beta1 = 0.5f, .density = 0.1, .adds = true}, 6);
    for (auto& of_ranks : problem.gradients)
      for (Floats& gradient : of_ranks)
        for (float& value : gradient) value = std::round(value * 20);
    const History history = train_in_buckets<Rank>(problem, rule, true);
    for (std::size_t i = 0; i < problem.gradients.size(); ++i)
      for (Floats& gradient : problem.gradients[i])
        for (float& value : gradient) value *= static_cast<float>(1 + i % 3);
    const History expected = train<Rank>(problem, rule);
    for (std::size_t i = 0; i < history.size(); ++i)
      for (std::size_t rank = 0; rank < 2; ++rank) {
        CAPTURE(i);
        CHECK(same_bits(history[i][rank].parameters, expected[i][rank].parameters));
        CHECK(history[i][rank].mask == expected[i][rank].mask);
      }
  });
}

TEST_CASE_TEMPLATE("overlap: with sharded masters, the replicated run's parameters", Rank, SCAPE_RANKS) {
  using scape::bfloat16;
  for_rules([]<class Rule>(const Rule& rule) {
    for (const int ranks : {1, 2, 3}) {
      if (few && ranks != 2) continue;
      const Problem problem = random_problem(in_buckets(ranks), {.density = 0.1, .density_warmup = 2}, 5);
      const History expected = train<Rank>(problem, rule);
      Rank::run(ranks, [&](Rank& rank) {
        const std::size_t me = static_cast<std::size_t>(rank.rank());
        const auto masters = rank.backend.array(problem.parameters);
        const auto parameters =
            rank.backend.array(std::vector<bfloat16>(problem.parameters.begin(), problem.parameters.end()));
        std::optional<decltype(rank.backend.array(Floats()))> gradient;
        scape::AdamS optimizer(problem.layout, rank.communicator, rank.memory, rank.compute, rank.side, problem.options,
                               rule, scape::Sharded<bfloat16>{});
        optimizer.load_masters(masters.span(), rank.compute);
        for (std::size_t i = 0; i < problem.gradients.size(); ++i) {
          gradient.emplace(rank.backend.array(problem.gradients[i][me]));
          scape::StepReport report;
          auto step = optimizer.begin_step(gradient->span(), rank.compute, i % 2 == 0 ? &report : nullptr);
          for (const std::size_t bucket : order_of(optimizer.plan().buckets(), i)) step.add(bucket);
          step.finish(parameters.span());
          rank.compute.synchronize();
          std::vector<bfloat16> rounded;
          for (const float value : expected[i][me].parameters) rounded.push_back(bfloat16(value));
          CHECK(rank.backend.read(parameters) == rounded);
          if (i % 2 != 0) continue;
          CHECK(report.jaccard == expected[i][me].report.jaccard);
          if (Rule::follows_others)
            CHECK(report.gradient_norm == doctest::Approx(expected[i][me].report.gradient_norm).epsilon(1e-6));
          else
            CHECK(report.gradient_norm <= expected[i][me].report.gradient_norm * 1.000001);
        }
      });
    }
  });
}

TEST_CASE_TEMPLATE("overlap: parameters sharded too, and gradients that pass", Rank, SCAPE_RANKS) {
  using scape::bfloat16;
  for_rules([]<class Rule>(const Rule& rule) {
    for (const int ranks : {1, 2, 3})
      for (const auto payload : {scape::PayloadFormat::float32, scape::PayloadFormat::bfloat16}) {
        if (few && ranks != 2) continue;
        if (!Rule::follows_others && payload != scape::PayloadFormat::float32) continue;  // replicas get rounded means
        CAPTURE(ranks);
        const scape::BucketLayout buckets({{100, false, true, 1},
                                           {33, true, true, 1},
                                           {9000, false, false, 0},
                                           {64, false, true, 3},
                                           {5, true, false, 3}},
                                          ranks);
        const OwnLayout layout({buckets.segments().begin(), buckets.segments().end()}, ranks);
        const Problem problem = random_problem(
            layout, {.weight_decay = 0.1f, .density = 0.1, .density_warmup = 3, .payload = payload, .adds = true}, 6);
        const History expected = train<Rank>(problem, rule);
        Rank::run(ranks, [&](Rank& rank) {
          const std::size_t me = static_cast<std::size_t>(rank.rank());
          const auto masters = rank.backend.array(problem.parameters);
          scape::AdamS optimizer(problem.layout, rank.communicator, rank.memory, rank.compute, rank.side,
                                 problem.options, rule, scape::FullySharded<bfloat16>{});
          const auto own = rank.backend.array(std::vector<bfloat16>(optimizer.masters().size()));
          optimizer.load_masters(masters.span(), rank.compute);
          for (std::size_t i = 0; i < problem.gradients.size(); ++i) {
            const Floats& gradient = problem.gradients[i][me];
            auto step = optimizer.template begin_step<float>(rank.compute);
            for (const std::size_t bucket : order_of(4, i)) {
              Floats part;
              for (const scape::Segment& segment : layout.list)
                if (segment.bucket == bucket)
                  part.insert(part.end(), gradient.begin() + static_cast<std::ptrdiff_t>(segment.begin),
                              gradient.begin() + static_cast<std::ptrdiff_t>(segment.begin + segment.count));
              const auto passing = rank.backend.array(part);
              step.add(bucket, passing.span());
              scape::fill_values(passing.span(), 1e30f, rank.compute);
              rank.compute.synchronize();
            }
            step.finish(own.span());
            rank.compute.synchronize();
            const std::vector<bfloat16> parameters = rank.backend.read(own);
            const scape::MaskPlan& plan = optimizer.plan();
            std::size_t wrong = 0;
            for (std::size_t t = plan.first_tile(rank.rank()); t < plan.first_tile(rank.rank() + 1); ++t)
              for (std::size_t j = 0; j < plan.tiles()[t].count; ++j)
                wrong += parameters[plan.tiles()[t].own + j] !=
                         bfloat16(expected[i][me].parameters[plan.tiles()[t].element + j]);
            CHECK(wrong == 0);
          }
        });
      }
  });
}

// Red while what a step sees of its gradients is taken for the next one's, or replaces that of micro-batches before it.
TEST_CASE_TEMPLATE("overlap: gradients that pass, after micro-batches and between whole steps", Rank, SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    const scape::BucketLayout buckets({{100, false, true, 1}, {33, true, true, 1}, {9000, false, false, 0}, {5}}, 2);
    const OwnLayout layout(buckets);
    Problem problem =
        random_problem(layout, {.beta1 = 0.5f, .density = 0.1, .density_warmup = 2, .adds = true}, few ? 5 : 7);
    for (auto& of_ranks : problem.gradients)
      for (Floats& gradient : of_ranks)
        for (float& value : gradient) value = std::round(value * 20);
    History history(problem.gradients.size(), std::vector<State>(2));
    Rank::run(2, [&](Rank& rank) {
      const std::size_t me = static_cast<std::size_t>(rank.rank());
      Session session(rank, layout, problem.options, rule, problem.parameters);
      auto& optimizer = session.optimizer;
      for (std::size_t i = 0; i < problem.gradients.size(); ++i) {
        const Floats& gradient = problem.gradients[i][me];
        const auto whole = rank.backend.array(gradient);
        for (std::size_t batch = 0; batch < i % 3; ++batch) optimizer.add(whole.span(), rank.compute);
        if (i % 2 == 1) {
          optimizer.step(whole.span(), session.parameters(), rank.compute);
        } else {
          auto step = optimizer.template begin_step<float>(rank.compute);
          for (const std::size_t bucket : order_of(2, i)) {
            std::size_t begin = layout.size(), end = 0;
            for (const scape::Segment& segment : layout.list)
              if (segment.bucket == bucket) {
                begin = std::min(begin, segment.begin);
                end = std::max(end, segment.begin + segment.count);
              }
            step.add(bucket, std::span<const float>(whole.span()).subspan(begin, end - begin));
          }
          step.finish(session.parameters());
        }
        history[i][me] = session.state();
      }
    });
    for (std::size_t i = 0; i < problem.gradients.size(); ++i)
      for (Floats& gradient : problem.gradients[i])
        for (float& value : gradient) value *= static_cast<float>(1 + i % 3);
    const History expected = train<Rank>(problem, rule);
    for (std::size_t i = 0; i < history.size(); ++i)
      for (std::size_t rank = 0; rank < 2; ++rank) {
        if (history[i][rank].parameters.empty()) continue;  // a rank of another process
        CAPTURE(i);
        CHECK(same_bits(history[i][rank].parameters, expected[i][rank].parameters));
        CHECK(history[i][rank].mask == expected[i][rank].mask);
      }
  });
}

TEST_CASE_TEMPLATE("overlap: a bucket's payload leaves when it is added", Rank, SCAPE_RANKS) {
  for_rules([](const auto& rule) {
    const OwnLayout layout = in_buckets(2);
    Rank::run(2, [&](Rank& rank) {
      const auto gradient = rank.backend.array(floats_of(1, layout.size()));
      Session session(rank, layout, {.density = 0.1}, rule, Floats(layout.size(), 1));
      session.optimizer.step(gradient.span(), session.parameters(), rank.compute);
      const auto parts = session.optimizer.plan().payload_parts(0.1, false);
      auto step = session.optimizer.begin_step(gradient.span(), rank.compute);
      for (const std::size_t bucket : {2u, 1u, 0u, 4u, 3u}) {
        const std::uint64_t before = rank.communicator.bytes_sent();
        step.add(bucket);
        CHECK(rank.communicator.bytes_sent() - before == parts[bucket].count * 4);  // 2 (W - 1) / W values
        rank.side.synchronize();  // the others' come, too, while the last buckets have not been added
      }
      step.finish(session.parameters());
      rank.compute.synchronize();
    });
  });
}

TEST_CASE_TEMPLATE("overlap: calls that cannot be served are named", Rank, SCAPE_RANKS) {
  Rank::run(1, [](Rank& rank) {
    const OwnLayout layout = in_buckets(1);
    const auto refused = [](auto call) { return thrown_by<std::invalid_argument>(call); };
    const auto gradient = rank.backend.array(floats_of(1, layout.size()));
    const auto begin = [&](const AdamSOptions& options, const auto& rule) {
      Session session(rank, layout, options, rule, Floats(layout.size()));
      return refused([&] { session.optimizer.begin_step(gradient.span(), rank.compute); });
    };
    CHECK(begin({.density = 0.1, .delay = 0}, ScapeRule{}) ==
          "options.delay is 0: must be at least 1 for begin_step()");
    const auto begin_passing = [&](const AdamSOptions& options, const auto& rule) {
      Session session(rank, layout, options, rule, Floats(layout.size()));
      return refused([&] { session.optimizer.template begin_step<float>(rank.compute); });
    };
    CHECK(begin_passing({.density = 0.1, .density_warmup = 2}, ClockRule{}) ==
          "options.adds is 0: must be true for gradients that pass");
    CHECK(
        begin_passing({.density = 0.1}, ScapeRule{}) ==
        "options.density_warmup is 0: must be at least 1 for gradients that pass, since the first mask would need them "
        "all");
    CHECK(begin({.clip_norm = 1, .density = 0.1}, ClockRule{}) ==
          "options.clip_norm is 1: must be 0 for begin_step() with this rule");

    Session session(rank, layout, {.density = 0.1, .adds = true}, ClockRule{}, Floats(layout.size()));
    auto& optimizer = session.optimizer;
    CHECK(refused([&] { optimizer.begin_step(gradient.span().first(3), rank.compute); }) ==
          "gradients.size() is 3: must be the layout's size, 5726");
    for (int i = 0; i < 2; ++i) {
      auto step = optimizer.begin_step(gradient.span(), rank.compute);
      CHECK(refused([&] { step.add(5); }) == "bucket is 5: must be below the layout's buckets, 5");
      step.add(4);
      CHECK(refused([&] { step.add(4); }) == "bucket is 4: has been added already");
      CHECK(refused([&] { step.finish(session.parameters()); }) == "bucket is 0: has not been added");
      for (const std::size_t bucket : {0u, 1u, 2u, 3u}) step.add(bucket);
      CHECK(refused([&] { step.finish(session.parameters().first(3)); }) ==
            "parameters.size() is 3: must be the layout's size, 5726");
      const std::string under_way = "step is under way: finish() what begin_step() began";
      CHECK(refused([&] { optimizer.step(gradient.span(), session.parameters(), rank.compute); }) == under_way);
      CHECK(refused([&] { optimizer.add(gradient.span(), rank.compute); }) == under_way);
      CHECK(refused([&] { optimizer.begin_step(gradient.span(), rank.compute); }) == under_way);
      CHECK(refused([&] { optimizer.try_step(gradient.span(), session.parameters(), rank.compute); }) == under_way);
      step.finish(session.parameters());
      CHECK(refused([&] { step.finish(session.parameters()); }) == "the step is finished: begin another one");
      CHECK(refused([&] { step.add(0); }) == "the step is finished: begin another one");
    }
    optimizer.step(gradient.span(), session.parameters(), rank.compute);
    {
      auto step = optimizer.begin_step(gradient.span(), rank.compute);
      CHECK(refused([&] { step.add(0, gradient.span()); }) ==
            "gradients is given: begin_step() was given the array: add(bucket)");
      for (const std::size_t bucket : {0u, 1u, 2u, 3u, 4u}) step.add(bucket);
      step.finish(session.parameters());
    }
    {
      auto step = optimizer.template begin_step<float>(rank.compute);
      CHECK(refused([&] { step.add(4); }) ==
            "gradients is not given: begin_step() was given no array: add(bucket, gradients)");
      CHECK(refused([&] { step.add(5, gradient.span()); }) == "bucket is 5: must be below the layout's buckets, 5");
      CHECK(refused([&] { step.add(0, gradient.span()); }) ==
            "bucket is 0: has segments that do not follow one another");
      CHECK(refused([&] { step.add(4, gradient.span()); }) == "gradients.size() is 5726: must be the bucket's, 31");
      step.add(4, gradient.span().first(31));
    }
    CHECK(thrown_by<scape::Error>([&] { optimizer.step(gradient.span(), session.parameters(), rank.compute); }) ==
          "an earlier step failed halfway: the optimizer's state is no longer valid");
    rank.compute.synchronize();
  });
  CHECK(thrown_by<std::invalid_argument>([] {
          scape::MaskPlan(OwnLayout({{0, 5, 0, false, true, 1}}, 1));
        }) == "layout.segments()[0].bucket is 1: must be below the number of segments, 1");
}

TEST_CASE("overlap: tensors are dealt into buckets by size") {
  std::vector<scape::Tensor> tensors = {{10}, {0}, {5}, {30}, {2}};
  CHECK(scape::assign_buckets(tensors, 12) == 3);
  std::vector<std::uint32_t> buckets;
  for (const scape::Tensor& tensor : tensors) buckets.push_back(tensor.bucket);
  CHECK(buckets == std::vector<std::uint32_t>{0, 0, 0, 1, 2});
  CHECK(scape::assign_buckets(tensors, 0) == 4);
  CHECK(scape::assign_buckets({}, 12) == 0);
}
