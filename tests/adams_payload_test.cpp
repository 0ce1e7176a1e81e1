// AdamS with payloads of low precision: every step to the bit as a slow one, element by element, and nothing lost.

#include "narrow_reference.hpp"
#include "reference.hpp"
#include "support.hpp"

#include <scape/arithmetic.hpp>
#include <scape/bfloat16.hpp>
#include <scape/sharding.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using scape::AdamSOptions;
using scape::bfloat16;
using scape::ClockRule;
using scape::PayloadFormat;
using scape::Replicated;
using scape::ScapeRule;
using scape::Sharded;

constexpr PayloadFormat low_formats[] = {PayloadFormat::bfloat16, PayloadFormat::e5m2, PayloadFormat::e4m3};
constexpr std::size_t nothing = std::numeric_limits<std::size_t>::max();

// Steps of all ranks on the masks that were found, with the rule's arithmetic and payloads coded by hand.
template <class Rule>
class SlowSteps {
 public:
  // `scatters`: every rank gets the mean of its own part only, and it is not coded again.
  SlowSteps(const Problem& problem, const Rule& rule, bool sharded, bool scatters)
      : options_(problem.options),
        plan_(problem.layout, options_.exact_mask_parts, sharded),
        sharded_(sharded),
        scatters_(scatters),
        world_(static_cast<std::size_t>(plan_.ranks())),
        before_(plan_.size()),
        given_(plan_.size()),
        applied_(plan_.size()),
        bound_(plan_.size()) {
    for (std::size_t rank = 0; rank < world_; ++rank) {
      const std::size_t positions = plan_.payload_size(1, true);
      rules_.push_back(std::make_unique<State>(rule, options_, plan_.size(), positions, positions, memory_, stream_));
      parameters.push_back(problem.parameters);
      stores.emplace_back(plan_.size());
    }
    errors.resize(world_);
    scalars_.learning_rate = options_.learning_rate;
  }

  void step(const std::vector<Floats>& gradients, const Mask& mask, std::size_t stride) {
    if (!next_.empty() && next_ != mask) fault = "mask";
    scalars_.step += 1;
    scalars_.gradient_scale = options_.gradient_scale;
    rules_[0]->advance()(scalars_);
    const std::vector<std::size_t> order_before = order_;
    lay_out(mask, stride);
    std::vector<Floats> sent, returned;
    for (std::size_t rank = 0; rank < world_; ++rank)
      sent.push_back(accumulate(gradients[rank], mask, rank, order_before));
    if constexpr (std::is_same_v<Rule, ScapeRule>) select(gradients, mask);
    const Reduced reduced = scatters_ ? scattered(options_.payload, sent) : ::reduced(options_.payload, sent);
    errors = reduced.errors;
    for (std::size_t rank = 0; rank < world_; ++rank) update(reduced.mean, rank);
    if constexpr (std::is_same_v<Rule, ClockRule>) select(gradients, mask);
    before_ = mask;
    for (std::size_t p = 0; p < order_.size(); ++p)
      if (order_[p] != nothing)
        applied_[order_[p]] += static_cast<double>(world_) * static_cast<double>(reduced.mean[p]);
  }

  // The first element of which more was given than has been applied or is left, or less, beyond rounding; or `nothing`.
  std::size_t lost() const {
    std::vector<double> left(plan_.size());
    for (std::size_t rank = 0; rank < world_; ++rank) {
      for (std::size_t i = 0; i < left.size(); ++i)
        left[i] += static_cast<double>(Rule::residual(stores[rank][i], before_[i]));
      for (std::size_t p = 0; p < order_.size(); ++p)
        if (order_[p] != nothing) left[order_[p]] += static_cast<double>(errors[rank][p]);
    }
    for (std::size_t i = 0; i < left.size(); ++i)
      if (!(std::abs(given_[i] - applied_[i] - left[i]) <= bound_[i])) return i;
    return nothing;
  }

  std::vector<Floats> parameters, stores, errors;  // by rank; the errors by position
  std::string fault;

 private:
  using State = typename Rule::template State<scape::HostMemory>;

  // Which element is at which position.
  void lay_out(const Mask& mask, std::size_t stride) {
    order_.assign(stride * world_, nothing);
    for (std::size_t rank = 0; rank < world_; ++rank) {
      std::size_t position = sharded_ ? rank * stride : order_.size();
      for (std::size_t t = plan_.first_tile(static_cast<int>(rank)); t < plan_.first_tile(static_cast<int>(rank) + 1);
           ++t)
        for (std::size_t i = 0; i < plan_.tiles()[t].count; ++i) {
          const std::size_t element = plan_.tiles()[t].element + i;
          if (!mask[element]) continue;
          if (position == order_.size()) order_.push_back(nothing);
          order_[position++] = element;
        }
    }
  }

  Floats accumulate(const Floats& gradient, const Mask& mask, std::size_t rank,
                    const std::vector<std::size_t>& order_before) {
    const auto rule = rules_[rank]->accumulation();
    Floats& store = stores[rank];
    Floats sums(gradient.size()), payload(order_.size());
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] = scape::multiply(gradient[i], scalars_.gradient_scale);
      given_[i] += static_cast<double>(sums[i]);
      bound_[i] += rounding() * (std::abs(static_cast<double>(sums[i])) + std::abs(static_cast<double>(store[i])));
    }
    for (std::size_t p = 0; p < order_before.size(); ++p)
      if (order_before[p] != nothing) {
        float& sum = sums[order_before[p]];
        sum = sum + errors[rank][p];
        bound_[order_before[p]] += rounding() * std::abs(static_cast<double>(errors[rank][p]));
      }
    for (std::size_t p = 0; p < order_.size(); ++p) {
      const std::size_t i = order_[p];
      if (i == nothing) continue;
      payload[p] = rule.payload(sums[i], store[i], before_[i]);
      if constexpr (requires { rule.moment(0.0f, true); })
        rules_[rank]->set_aside(order_.size())[p] = rule.moment(store[i], before_[i]);
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if constexpr (requires { rule.moment(0.0f, true); })  // goes back to the residual
        if (before_[i] && !mask[i]) {
          const double moment = static_cast<double>(rule.moment_to_residual) * static_cast<double>(store[i]);
          given_[i] += moment;
          bound_[i] += rounding() * std::abs(moment);
        }
      store[i] = rule.state(sums[i], store[i], before_[i], mask[i]);
    }
    return payload;
  }

  void update(Floats mean, std::size_t rank) {
    const auto rule = rules_[rank]->update(parameters[rank], stores[rank], mean);
    for (const scape::Segment& segment : plan_.segments())
      if (rule.needs_every(segment))
        for (std::size_t i = segment.begin; i < segment.begin + segment.count; ++i) rule.every(i, scalars_);
    for (std::size_t p = 0; p < order_.size(); ++p)
      if (order_[p] != nothing) {
        const float root = scape::square_root(rule.second_moment(order_[p], p, scalars_));
        rule.kept(order_[p], p, segment_of(order_[p]).decay, root, scalars_);
        if constexpr (std::is_same_v<Rule, ScapeRule>)
          if (options_.density < 1)  // first moments wait by position
            stores[rank][order_[p]] = rules_[rank]->set_aside(order_.size())[p];
      }
  }

  const scape::Segment& segment_of(std::size_t element) const {
    return *std::ranges::find_if(
        plan_.segments(), [&](const scape::Segment& segment) { return element - segment.begin < segment.count; });
  }

  // The mask of the next step, where it is made in this one: by the owners' scores.
  void select(const std::vector<Floats>& gradients, const Mask& mask) {
    next_.clear();
    const double density = options_.masks().density(scalars_.step);
    if (options_.delay != 1 || options_.refresh != 1 || density >= 1) return;
    next_.resize(mask.size());
    for (const scape::Segment& segment : plan_.segments()) {
      const std::size_t owner = static_cast<std::size_t>(segment.owner);
      std::vector<std::size_t> order(segment.count);
      std::iota(order.begin(), order.end(), segment.begin);
      rules_[owner]->score_after(
          scape::ScaledGradient<float>{gradients[owner].data(), &scalars_}, scape::PlaceOfElement{}, stores[owner],
          scape::MaskView{}, {}, scalars_, [&](const auto& score) {
            std::ranges::stable_sort(order, std::greater(),
                                     [&](std::size_t i) { return scape::score_key(score(i, 0)); });
          });
      order.resize(plan_.kept(segment, density));
      for (const std::size_t i : order) next_[i] = 1;
    }
  }

  // Of a step, in parts of what was brought: two roundings where error, gradient and residual are added, W + 1 in the
  // mean of the codes, two where its error is, and those of a first moment; codes are up to an eighth larger.
  double rounding() const { return (static_cast<double>(world_) + 8) * 0x1p-24; }

  AdamSOptions options_;
  scape::MaskPlan plan_;
  bool sharded_, scatters_;
  std::size_t world_;
  scape::HostMemory memory_;
  scape::HostPool pool_{1};
  scape::HostStream stream_{pool_};
  std::vector<std::unique_ptr<State>> rules_;
  scape::StepScalars scalars_;
  std::vector<std::size_t> order_;  // of the last step
  Mask before_, next_;
  std::vector<double> given_, applied_, bound_;  // by element, over all steps and ranks
};

// Trains, every step beside a slow one.
template <class Rank, class H, class Rule>
void check_training(const Problem& problem, const Rule& rule) {
  using P = typename H::Parameter;
  using Optimizer = scape::AdamS<typename Rank::Stream, typename Rank::Communicator,
                                 std::remove_cvref_t<decltype(Rank::memory)>, Rule, H>;
  constexpr bool scatters = H::sharded && !Rule::follows_others;
  Rank::run(problem.layout.ranks(), [&](Rank& rank) {
    const std::size_t me = static_cast<std::size_t>(rank.rank()),
                      ranks = static_cast<std::size_t>(problem.layout.ranks());
    const PayloadFormat format = problem.options.payload;
    SlowSteps<Rule> expected(problem, rule, H::sharded, scatters);
    const auto parameters = rank.backend.array(rounded<P>(problem.parameters));
    const auto masters = rank.backend.array(problem.parameters);
    const auto gradient = rank.backend.array(Floats(problem.layout.size()));
    Optimizer optimizer(problem.layout, rank.communicator, rank.memory, rank.compute, rank.side, problem.options, rule);
    if constexpr (H::sharded) optimizer.load_masters(masters.span(), rank.compute);
    CHECK(optimizer.errors().empty());
    std::size_t rounded_away = 0;
    for (std::size_t step = 0; step < problem.gradients.size(); ++step) {
      CAPTURE(step);
      scape::copy_values(std::span<const float>(problem.gradients[step][me]), gradient.span(), rank.compute);
      scape::StepReport report;
      optimizer.step(gradient.span(), parameters.span(), rank.compute, step % 2 == 0 ? &report : nullptr);
      const Words words = read(rank, optimizer.mask().words);
      Mask mask(problem.layout.size());
      for (const scape::Tile& tile : optimizer.plan().tiles())
        for (std::size_t i = 0; i < tile.count; ++i)
          mask[tile.element + i] = words[(tile.bit + i) / 32] >> (tile.bit + i) % 32 & 1;
      expected.step(problem.gradients[step], mask, optimizer.mask().parts[0].stride);
      CHECK(expected.fault == "");
      const Floats errors = read(rank, optimizer.errors());
      CHECK(same_bits(errors, expected.errors[me]));
      CHECK(same_bits(read(rank, optimizer.store(rank.compute)), expected.stores[me]));
      CHECK(read(rank, std::span<const P>(parameters.span())) == rounded<P>(expected.parameters[me]));
      CHECK(expected.lost() == nothing);
      rounded_away += static_cast<std::size_t>(std::ranges::count_if(errors, [](float error) { return error != 0; }));
      if (step % 2 == 0)
        CHECK(report.payload_bytes ==
              (scatters ? 1 : 2) * (ranks - 1) * code_bytes(format, errors.size(), ranks) / ranks);
    }
    CHECK(rounded_away > 0);
  });
}

// Segments of every size, some empty, dense or without decay, by owners in turn; the last rank owns nothing where there
// are more than two.
OwnLayout mixed(int ranks) {
  OwnLayout layout({}, ranks);
  const std::size_t sizes[] = {100, 0, 33, 4097, 1, 64, 500, 31, 900};
  for (std::size_t i = 0; i < std::size(sizes); ++i)
    layout.list.push_back(
        {layout.size(), sizes[i], static_cast<int>(i) % (ranks > 2 ? ranks - 1 : ranks), i % 4 == 2, i % 3 != 1});
  return layout;
}

template <class F>
void for_formats_and_options(F body) {
  const AdamSOptions all[] = {{.density = 0.1},
                              {.gradient_scale = 0.5f, .density = 0.05, .density_warmup = 4},
                              {.density = 1},
                              {.density = 0.1, .delay = 0},
                              {.density = 0.1, .delay = 2, .exact_mask_parts = true},
                              {.density = 0.03, .delay = 1, .refresh = 3}};
  for (const PayloadFormat format : low_formats)
    for (std::size_t i = 0; i < std::size(all); ++i) {
      if (few && i % 3 != static_cast<std::size_t>(format) - 1) continue;
      AdamSOptions options = all[i];
      options.payload = format;
      CAPTURE(std::string(name_of(format)));
      CAPTURE(i);
      body(options);
    }
}

// Gradients of as many magnitudes as real ones have, so that groups have different scales.
Problem problem_of(int ranks, const AdamSOptions& options, std::size_t steps) {
  Problem problem = random_problem(mixed(ranks), options, steps);
  for (auto& of_ranks : problem.gradients)
    for (Floats& gradient : of_ranks)
      for (std::size_t i = 0; i < gradient.size(); ++i)
        gradient[i] = std::ldexp(gradient[i], static_cast<int>(random_bits(i) % 20) - 20);
  return problem;
}

}  // namespace

TEST_CASE_TEMPLATE("payload formats: replicated, every step is the slow one's, to the bit", Rank, SCAPE_RANKS) {
  for_formats_and_options([](const AdamSOptions& options) {
    for (const int ranks : {1, 2, 5}) {
      if (few && ranks != 2) continue;
      CAPTURE(ranks);
      const Problem problem = problem_of(ranks, options, few ? 4 : 8);
      check_training<Rank, Replicated>(problem, ScapeRule{});
      check_training<Rank, Replicated>(problem, ClockRule{});
    }
  });
}

TEST_CASE_TEMPLATE("payload formats: sharded, every step is the slow one's, to the bit", Rank, SCAPE_RANKS) {
  for_formats_and_options([](const AdamSOptions& options) {
    for (const int ranks : {1, 3}) {
      if (few && ranks != 3) continue;
      CAPTURE(ranks);
      const Problem problem = problem_of(ranks, options, few ? 4 : 8);
      check_training<Rank, Sharded<bfloat16>>(problem, ScapeRule{});
      check_training<Rank, Sharded<bfloat16>>(problem, ClockRule{});
    }
  });
}

TEST_CASE_TEMPLATE("payload formats: what is given is applied or kept, over many steps", Rank, SCAPE_RANKS) {
  for (const PayloadFormat format : low_formats) {
    if (few && format != PayloadFormat::e5m2) continue;
    CAPTURE(std::string(name_of(format)));
    const Problem problem =
        problem_of(3, {.weight_decay = 0.1f, .density = 0.02, .density_warmup = 10, .payload = format}, few ? 12 : 60);
    check_training<Rank, Replicated>(problem, ClockRule{});
    check_training<Rank, Sharded<float>>(problem, ClockRule{});
    Problem without_decay = problem;
    without_decay.options.weight_decay = 0;
    check_training<Rank, Replicated>(problem, ScapeRule{});
    check_training<Rank, Sharded<float>>(without_decay, ScapeRule{});
  }
}

TEST_CASE_TEMPLATE("payload formats: bytes kept", Rank, SCAPE_RANKS) {
  for (const int ranks : {1, 3})
    Rank::run(ranks, [&](Rank& rank) {
      const auto bytes = [&](PayloadFormat format) {
        const scape::AdamS optimizer(mixed(ranks), rank.communicator, rank.memory, rank.compute, rank.side,
                                     {.density = 0.1, .payload = format});
        return std::pair(optimizer.state_bytes(), optimizer.workspace_bytes());
      };
      const auto plain = bytes(PayloadFormat::float32);
      const std::size_t kept = scape::MaskPlan(mixed(ranks)).kept(0.1);
      for (const PayloadFormat format : low_formats) {
        CHECK(bytes(format).first == plain.first + 4 * kept);
        CHECK(bytes(format).second == plain.second + 2 * code_bytes(format, kept, static_cast<std::size_t>(ranks)));
      }
    });
}

TEST_CASE("payload formats: ranks that were told different ones hear of it, and values that are none are refused") {
  const auto told = [](int rank) {
    return AdamSOptions{.payload = rank == 1 ? PayloadFormat::e4m3 : PayloadFormat::e5m2};
  };
  std::vector<std::string> errors(3);
  run_ranks(3, [&](auto& rank) {
    errors[static_cast<std::size_t>(rank.rank())] = thrown_by<scape::Error>([&] {
      const scape::AdamS optimizer(mixed(3), rank.communicator, rank.memory, rank.compute, rank.side,
                                   told(rank.rank()));
    });
    CHECK(errors[static_cast<std::size_t>(rank.rank())].find("options.payload") != std::string::npos);
    CHECK(errors[static_cast<std::size_t>(rank.rank())].find("rank 1") != std::string::npos);
  });
  CHECK(message_of([] { AdamSOptions{.payload = static_cast<PayloadFormat>(7)}.check(); }) ==
        "payload is 7: must be one of PayloadFormat");
}

// A communicator as it was before there were formats.
template <class C>
struct WithoutAllToAll {
  C& inner;
  int rank() const { return inner.rank(); }
  int size() const { return inner.size(); }
  std::uint64_t bytes_sent() const { return inner.bytes_sent(); }
  template <class S>
  void all_reduce_mean(std::span<const float> in, std::span<float> out, const S& stream) {
    inner.all_reduce_mean(in, out, stream);
  }
  template <class S>
  void reduce_scatter_mean(std::span<const float> in, std::span<float> out, const S& stream) {
    inner.reduce_scatter_mean(in, out, stream);
  }
  template <class S>
  void all_gather(std::span<const scape::MaskWord> own, std::span<scape::MaskWord> all, const S& stream) {
    inner.all_gather(own, all, stream);
  }
};

TEST_CASE("payload formats: a communicator without all_to_all does for float32") {
  run_ranks(2, [](auto& rank) {
    WithoutAllToAll<std::remove_cvref_t<decltype(rank.communicator)>> communicator{rank.communicator};
    const auto refusal = [&](PayloadFormat format) {
      return message_of([&] {
        const scape::AdamS optimizer(mixed(2), communicator, rank.memory, rank.compute, rank.side, {.payload = format});
      });
    };
    CHECK(refusal(PayloadFormat::float32) == "nothing was thrown");
    CHECK(refusal(PayloadFormat::e4m3) == "options.payload is e4m3: needs a communicator with all_to_all");
  });
}
