// The values that must come out (tests/golden.json, computed in float64 by an independent program).

#include "reference.hpp"

#include <scape/scape.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using Json = nlohmann::json;

struct Layout {
  std::vector<scape::Segment> list;
  int world;
  std::size_t size() const { return list.empty() ? 0 : list.back().begin + list.back().count; }
  int ranks() const { return world; }
  std::span<const scape::Segment> segments() const { return list; }
};

Layout layout_of(const Json& golden) {
  Layout layout{{}, golden["world_size"]};
  for (const Json& segment : golden["segments"])
    layout.list.push_back({layout.size(), segment["size"], segment["owner"], segment["dense"]});
  return layout;
}

scape::AdamSOptions options_of(const Json& golden) {
  return {.learning_rate = golden["learning_rate"],
          .beta1 = golden["beta1"],
          .beta2 = golden["beta2"],
          .epsilon = golden["epsilon"],
          .weight_decay = golden["weight_decay"],
          .clip_norm = golden["clip_norm"],
          .density = golden["density"],
          .density_warmup = golden["density_warmup"]};
}

// Relative to what was added up: sums of numbers near 1 may cancel.
bool near_golden(double value, double expected) {
  return std::abs(value - expected) <= 1e-5 * std::max(std::abs(expected), 0.1);
}

template <class Rank, class Rule>
void check_rank(const Json& golden, Rank& rank, const Rule& rule, std::vector<std::string>& faults) {
  const Layout layout = layout_of(golden);
  scape::AdamS optimizer(layout, rank.communicator, rank.memory, rank.compute, rank.side, options_of(golden), rule);
  const auto device_parameters = rank.backend.array(golden["parameters"].get<std::vector<float>>());
  const std::size_t me = static_cast<std::size_t>(rank.rank());
  for (std::size_t step = 0; step < golden["gradients"].size(); ++step) {
    const auto gradients = rank.backend.array(golden["gradients"][step][me].get<std::vector<float>>());
    const Json& expected = golden["expected"][step];
    scape::StepReport report;
    optimizer.step(gradients.span(), device_parameters.span(), rank.compute, &report);
    const auto expect = [&](bool holds, const char* what, std::size_t i) {
      if (!holds)
        faults.push_back(golden["name"].get<std::string>() + ", step " + std::to_string(step) + ", rank " +
                         std::to_string(me) + ": " + what + " of element " + std::to_string(i));
    };
    if (expected.contains("gradient_norm"))
      expect(near_golden(report.gradient_norm, expected["gradient_norm"]), "norm", 0);
    const std::vector<float> parameters = rank.backend.read(device_parameters),
                             store = read(rank, optimizer.store(rank.compute));
    const std::vector<scape::MaskWord> mask = read(rank, optimizer.mask().words);
    std::vector<float> moments;
    std::vector<std::uint16_t> last;
    if constexpr (std::is_same_v<Rule, scape::ClockRule>) {
      moments = read(rank, optimizer.rule_state().moments());
      last = read(rank, optimizer.rule_state().last());
    }
    for (const scape::Tile& tile : optimizer.plan().tiles()) {
      for (std::size_t i = tile.element; i < tile.element + tile.count; ++i) {
        const std::size_t bit = tile.bit + (i - tile.element);
        const bool kept = mask[bit / 32] >> bit % 32 & 1;
        expect(kept == (expected["mask"][i].get<int>() != 0), "mask", i);
        expect(near_golden(parameters[i], expected["parameters"][i]), "parameter", i);
        expect(near_golden(Rule::residual(store[i], kept), expected["residual"][me][i]), "residual", i);
        if constexpr (std::is_same_v<Rule, scape::ClockRule>) {
          expect(near_golden(moments[i], expected["first_moment"][i]), "first moment", i);
          const auto elapsed = static_cast<std::uint16_t>(step + 2 - last[i]);
          expect(elapsed == expected["elapsed"][i].get<int>(), "clock", i);
        } else {
          expect(near_golden(kept ? store[i] : 0, expected["first_moment"][i]), "first moment", i);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE_TEMPLATE("golden values", Rank, SCAPE_RANKS) {
  const Json golden = Json::parse(std::ifstream(SCAPE_GOLDEN_JSON));
  REQUIRE(golden["cases"].size() == 11);
  for (const Json& test : golden["cases"]) {
    CAPTURE(test["name"].get<std::string>());
    std::mutex mutex;
    std::vector<std::string> faults;
    run_ranks(test["world_size"], [&](Rank& rank) {
      std::vector<std::string> mine;
      if (test["rule"] == "clock") {
        check_rank(test, rank, scape::ClockRule{.cap = test["clock_cap"]}, mine);
      } else {
        const bool corrects = test["bias_correction"];
        const auto correction = corrects ? scape::BiasCorrection::adam : scape::BiasCorrection::none;
        check_rank(test, rank, scape::ScapeRule{.bias_correction = correction}, mine);
      }
      const std::lock_guard lock(mutex);
      faults.insert(faults.end(), mine.begin(), mine.end());
    });
    CHECK(faults.size() == 0);
    for (std::size_t i = 0; i < std::min<std::size_t>(faults.size(), 5); ++i) MESSAGE(faults[i]);
  }
}
