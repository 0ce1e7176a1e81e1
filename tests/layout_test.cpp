// Layouts, and the tables that a MaskPlan makes of them.

#include "backends.hpp"
#include "support.hpp"

#include <scape/layout.hpp>
#include <scape/mask_plan.hpp>
#include <scape/plan_tables.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using scape::MaskPlan;
using scape::Scope;
using scape::Segment;
using scape::Tensor;
using Sizes = std::vector<std::size_t>;

constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();

// A user's own type.
struct OwnLayout {
  std::vector<Segment> list;
  int count;
  std::size_t total;
  std::size_t size() const { return total; }
  int ranks() const { return count; }
  const std::vector<Segment>& segments() const { return list; }
};
static_assert(scape::ShardedLayout<OwnLayout>);

OwnLayout own_layout(std::vector<Segment> list, int ranks) {
  const std::size_t size = list.empty() ? 0 : list.back().begin + list.back().count;
  return {std::move(list), ranks, size};
}

// Segments of random sizes (some empty), owners and flags; the last of several ranks owns nothing.
OwnLayout random_layout(int ranks, std::uint32_t seed) {
  std::mt19937 generator(seed);
  const auto below = [&](std::uint32_t bound) { return generator() % bound; };
  std::vector<Segment> list;
  std::size_t begin = 0;
  for (int i = 0; i < 20; ++i) {
    const std::size_t sizes[] = {0, 1 + below(40), 32 * below(4), 1 + below(5000), 4096 * below(4), 1 + below(20000)};
    const int owner = ranks == 1 ? 0 : static_cast<int>(below(static_cast<std::uint32_t>(ranks - 1)));
    list.push_back({begin, sizes[below(6)], owner, below(4) == 0, below(3) != 0});
    begin += list.back().count;
  }
  return own_layout(list, ranks);
}

template <class L>
Sizes loads(const L& layout) {
  Sizes sums(static_cast<std::size_t>(layout.ranks()));
  for (const Segment& segment : layout.segments()) sums[static_cast<std::size_t>(segment.owner)] += segment.count;
  return sums;
}

template <class L>
Sizes counts(const L& layout) {
  Sizes result;
  for (const Segment& segment : layout.segments()) result.push_back(segment.count);
  return result;
}

// Ordered, disjoint, covering, every owner a rank.
template <class L>
bool is_partition(const L& layout, std::size_t size, int ranks) {
  std::size_t end = 0;
  bool valid = layout.size() == size && layout.ranks() == ranks;
  for (const Segment& segment : layout.segments()) {
    valid = valid && segment.begin == end && segment.owner >= 0 && segment.owner < ranks;
    end += segment.count;
  }
  return valid && end == size;
}

std::size_t largest(const Sizes& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

// The least that the busiest of `ranks` can own where each owns a run of neighbours: by trying all first runs.
std::size_t least_busiest(std::span<const std::size_t> sizes, int ranks) {
  std::size_t all = 0;
  for (const std::size_t size : sizes) all += size;
  if (ranks == 1) return all;
  std::size_t best = all, first = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    first += sizes[i];
    best = std::min(best, std::max(first, least_busiest(sizes.subspan(i + 1), ranks - 1)));
  }
  return best;
}

// The first word of a segment in mask space, by laying them out again in the documented order.
Sizes first_words(const MaskPlan& plan) {
  Sizes first(plan.segments().size());
  std::size_t dense_word = plan.exchanged_words();
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    std::size_t word = plan.part_begin(rank);
    for (std::size_t i = 0; i < first.size(); ++i) {
      const Segment& segment = plan.segments()[i];
      if (segment.owner != rank) continue;
      std::size_t& next = segment.dense ? dense_word : word;
      first[i] = next;
      next += (segment.count + 31) / 32;
    }
    CHECK(word <= plan.part_begin(rank) + plan.part_words()[static_cast<std::size_t>(rank)]);
  }
  CHECK(plan.words() == dense_word);
  return first;
}

// Tiles by owner, the sparse segments first, then by index; each at its place in parameter and in mask space.
void check_tiles(const MaskPlan& plan) {
  const Sizes first = first_words(plan);
  const std::span<const scape::Tile> tiles = plan.tiles();
  std::size_t next = 0;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    std::uint32_t large = 0;
    for (const bool dense : {false, true}) {
      CHECK(next == (dense ? plan.first_dense_tile(rank) : plan.first_tile(rank)));
      for (std::size_t i = 0; i < first.size(); ++i) {
        const Segment& segment = plan.segments()[i];
        if (segment.owner != rank || segment.dense != dense) continue;
        for (std::size_t done = 0; done < segment.count; ++next) {
          REQUIRE(next < tiles.size());
          const scape::Tile& tile = tiles[next];
          CHECK(tile.segment == i);
          CHECK(tile.element == segment.begin + done);
          CHECK(tile.large == (dense || segment.count <= scape::tile_bits ? 0 : large));
          CHECK(tile.bit == first[i] * 32 + done);
          CHECK(tile.count == std::min<std::size_t>(scape::tile_bits, segment.count - done));
          done += tile.count;
        }
        large += segment.count > scape::tile_bits;
      }
    }
  }
  CHECK(next == tiles.size());
  CHECK(plan.first_tile(plan.ranks()) == tiles.size());
}

void check_parts(const MaskPlan& plan) {
  Sizes needed(static_cast<std::size_t>(plan.ranks()));
  for (const Segment& segment : plan.segments())
    if (!segment.dense) needed[static_cast<std::size_t>(segment.owner)] += (segment.count + 31) / 32;
  if (!plan.exact_parts()) needed.assign(needed.size(), largest(needed));
  CHECK(Sizes(plan.part_words().begin(), plan.part_words().end()) == needed);
  std::size_t begin = 0;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    CHECK(plan.part_begin(rank) == begin);
    begin += needed[static_cast<std::size_t>(rank)];
  }
  CHECK(plan.exchanged_words() == begin);
}

}  // namespace

TEST_CASE("FlatLayout: an even cut, also with fewer elements than ranks") {
  struct Case {
    std::size_t size;
    int ranks;
    Sizes counts;
    double imbalance;
  };
  const Case cases[] = {{96, 5, {20, 20, 20, 20, 16}, 20.0 * 5 / 96},
                        {10, 4, {3, 3, 3, 1}, 1.2},
                        {3, 8, {1, 1, 1, 0, 0, 0, 0, 0}, 8.0 / 3},
                        {0, 3, {0, 0, 0}, 1},
                        {7, 1, {7}, 1},
                        {5, 4, {2, 2, 1, 0}, 1.6},
                        {56124554, 4, {14031139, 14031139, 14031139, 14031137}, 14031139.0 * 4 / 56124554},
                        {huge, 2, {huge / 2 + 1, huge / 2}, 1}};
  for (const Case& test : cases) {
    CAPTURE(test.size);
    const scape::FlatLayout layout(test.size, test.ranks);
    CHECK(is_partition(layout, test.size, test.ranks));
    CHECK(counts(layout) == test.counts);
    CHECK(loads(layout) == test.counts);
    CHECK(scape::imbalance(layout) == doctest::Approx(test.imbalance));
  }
}

TEST_CASE("TensorLayout: whole neighbouring tensors, the busiest rank owns as little as it can") {
  std::mt19937 generator(1);
  for (int repetition = 0; repetition < 400; ++repetition) {
    Sizes sizes(generator() % 8);
    std::size_t total = 0;
    for (std::size_t& size : sizes) total += size = generator() % 3 == 0 ? 0 : generator() % 12;
    for (const int ranks : {1, 2, 3, 5, 9}) {
      const scape::TensorLayout layout(sizes, ranks);
      CAPTURE(sizes.size());
      CAPTURE(ranks);
      CHECK(is_partition(layout, total, ranks));
      CHECK(counts(layout) == sizes);
      CHECK(largest(loads(layout)) == least_busiest(sizes, ranks));
      CHECK(std::ranges::is_sorted(layout.segments(), {}, &Segment::owner));
    }
  }
}

TEST_CASE("TensorLayout: one tensor that outweighs a hundred, in front, behind and between") {
  for (const std::size_t place : Sizes{0, 50, 100}) {
    Sizes sizes(101, 10);
    sizes[place] = 1'000'000;
    const scape::TensorLayout layout(sizes, 4);
    CHECK(is_partition(layout, 1'001'000, 4));
    CHECK(largest(loads(layout)) == 1'000'000);
    CHECK(scape::imbalance(layout) == doctest::Approx(4 / 1.001));
  }
}

TEST_CASE("TensorLayout: nothing, and nothing but empty tensors") {
  CHECK(is_partition(scape::TensorLayout(Sizes{}, 3), 0, 3));
  CHECK(scape::TensorLayout(Sizes{}, 3).segments().empty());
  CHECK(counts(scape::TensorLayout(Sizes{0, 0, 0}, 2)) == Sizes{0, 0, 0});
  CHECK(scape::imbalance(scape::TensorLayout(Sizes{0, 0, 0}, 2)) == 1);
}

TEST_CASE("Scope::shard joins neighbours of one owner with the same flags, and no others") {
  const scape::TensorLayout layout(
      {{10}, {20}, {5, true}, {6, true}, {0}, {7}, {8, false, false}, {9, false, false}, {65}}, 2, Scope::shard);
  const Segment expected[] = {{0, 30, 0}, {30, 11, 0, true}, {41, 7, 0}, {48, 17, 0, false, false}, {65, 65, 1}};
  REQUIRE(layout.segments().size() == std::size(expected));
  CHECK(is_partition(layout, 130, 2));
  for (std::size_t i = 0; i < std::size(expected); ++i) {
    CAPTURE(i);
    const Segment& segment = layout.segments()[i];
    CHECK(segment.begin == expected[i].begin);
    CHECK(segment.count == expected[i].count);
    CHECK(segment.owner == expected[i].owner);
    CHECK(segment.dense == expected[i].dense);
    CHECK(segment.decay == expected[i].decay);
  }
  CHECK(scape::TensorLayout(Sizes{4, 4, 4}, 1, Scope::shard).segments().size() == 1);
  CHECK(scape::TensorLayout(Sizes{4, 4, 4}, 3, Scope::shard).segments().size() == 3);
}

TEST_CASE("BucketLayout: every bucket over all ranks, flags kept") {
  const scape::BucketLayout layout({{10}, {0}, {3, true}, {8, false, false}}, 4);
  CHECK(is_partition(layout, 21, 4));
  CHECK(counts(layout) == Sizes{3, 3, 3, 1, 0, 0, 0, 0, 1, 1, 1, 0, 2, 2, 2, 2});
  CHECK(loads(layout) == Sizes{6, 6, 6, 3});
  for (std::size_t i = 0; i < layout.segments().size(); ++i) {
    CHECK(layout.segments()[i].owner == static_cast<int>(i % 4));
    CHECK(layout.segments()[i].dense == (i / 4 == 2));
    CHECK(layout.segments()[i].decay == (i / 4 != 3));
  }
  CHECK(counts(scape::BucketLayout(Sizes{5}, 3)) == Sizes{2, 2, 1});
}

TEST_CASE("layouts refuse a number of ranks below one") {
  for (const int ranks : {0, -1}) {
    const std::string expected = "ranks is " + std::to_string(ranks) + ":";
    CHECK(message_of([&] { scape::FlatLayout(5, ranks); }).starts_with(expected));
    CHECK(message_of([&] { scape::TensorLayout(Sizes{5}, ranks); }).starts_with(expected));
    CHECK(message_of([&] { scape::BucketLayout(Sizes{5}, ranks); }).starts_with(expected));
  }
}

TEST_CASE("imbalance of a user's layout") {
  CHECK(scape::imbalance(own_layout({{0, 9, 1}, {9, 1, 0}}, 2)) == doctest::Approx(1.8));
  CHECK(scape::imbalance(own_layout({{0, 10, 3}}, 5)) == doctest::Approx(5));
}

TEST_CASE("MaskPlan: parts and tiles of random layouts") {
  for (const int ranks : {1, 2, 3, 8})
    for (std::uint32_t seed = 0; seed < 6; ++seed)
      for (const bool exact : {false, true}) {
        CAPTURE(ranks);
        CAPTURE(seed);
        CAPTURE(exact);
        const OwnLayout layout = random_layout(ranks, seed);
        const MaskPlan plan(layout, exact);
        CHECK(plan.size() == layout.size());
        CHECK(plan.ranks() == ranks);
        CHECK(plan.exact_parts() == exact);
        check_parts(plan);
        check_tiles(plan);
      }
}

TEST_CASE("MaskPlan: nothing to select") {
  for (const bool exact : {false, true}) {
    const MaskPlan nothing(own_layout({}, 3), exact);
    CHECK(nothing.words() == 0);
    CHECK(nothing.tiles().empty());
    CHECK(nothing.kept(0.5) == 0);
    const MaskPlan empty(own_layout({{0, 0, 2}, {0, 0, 0, true}}, 3), exact);
    CHECK(empty.words() == 0);
    CHECK(empty.tiles().empty());
    const MaskPlan dense(own_layout({{0, 40, 2, true}, {40, 1, 0, true}}, 3), exact);
    CHECK(dense.exchanged_words() == 0);
    CHECK(dense.words() == 3);
    CHECK(dense.kept(0.01) == 41);
    check_tiles(dense);
  }
}

TEST_CASE("kept counts: max(1, floor(density * n + 1e-6)), in double") {
  const Sizes sizes = {1, 9, 10, 11, 99, 100, 101, 1'000'001};
  const struct {
    double density;
    Sizes kept;
  } cases[] = {{0.1, {1, 1, 1, 1, 9, 10, 10, 100'000}},
               {0.01, {1, 1, 1, 1, 1, 1, 1, 10'000}},
               {0.29, {1, 2, 2, 3, 28, 29, 29, 290'000}},
               {0.0, {1, 1, 1, 1, 1, 1, 1, 1}},
               {1e-300, {1, 1, 1, 1, 1, 1, 1, 1}},
               {0.999, {1, 8, 9, 10, 98, 99, 100, 999'000}},
               {1.0, sizes}};
  for (const auto& test : cases)
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      CAPTURE(test.density);
      CAPTURE(sizes[i]);
      CHECK(scape::kept_count(sizes[i], test.density) == test.kept[i]);
    }
  CHECK(scape::kept_count(0, 0.5) == 0);
  CHECK(scape::kept_count(0, 1) == 0);
  CHECK(scape::kept_count(1000, 0.009) == 9);
  CHECK(scape::kept_count(1000, 0.009f) == 9);
  CHECK(scape::kept_count(std::size_t{1} << 40, 0.25) == std::size_t{1} << 38);
}

TEST_CASE("MaskPlan: kept of all, by rank, and by rank without the dense segments") {
  const MaskPlan plan(own_layout({{0, 100, 1}, {100, 7, 0, true}, {107, 50, 1, true}, {157, 0, 0}, {157, 9, 3}}, 4));
  CHECK(plan.kept(0.1) == 10 + 7 + 50 + 0 + 1);
  CHECK(plan.kept(1) == plan.size());
  CHECK(plan.kept_by_rank(0.1) == Sizes{7, 60, 0, 1});
  Sizes selected = {1, 2, 3, 4, 5, 6};
  plan.selected_by_rank(0.1, selected);
  CHECK(selected == Sizes{0, 10, 0, 1});
}

TEST_CASE("MaskPlan: fingerprints are equal for equal plans only") {
  const std::vector<Segment> list = {{0, 40, 0}, {40, 30, 1, true}, {70, 30, 1}};
  std::set<std::uint64_t> prints;
  std::size_t plans = 0;
  const auto add = [&](std::vector<Segment> segments, int ranks, bool exact) {
    const OwnLayout layout = own_layout(std::move(segments), ranks);
    CHECK(MaskPlan(layout, exact).fingerprint() == MaskPlan(layout, exact).fingerprint());
    prints.insert(MaskPlan(layout, exact).fingerprint());
    ++plans;
  };
  const auto add_changed = [&](auto change) {
    std::vector<Segment> changed = list;
    change(changed);
    add(changed, 2, false);
  };
  add(list, 2, false);
  add(list, 2, true);
  add(list, 3, false);
  add_changed([](auto& segments) { segments[0].owner = 1; });
  add_changed([](auto& segments) { segments[0].dense = true; });
  add_changed([](auto& segments) { segments[0].dense = true, segments[0].decay = false; });
  add_changed([](auto& segments) { segments[1].dense = false; });
  add_changed([](auto& segments) { segments[2].decay = false; });
  add_changed([](auto& segments) { segments[2].count = 31; });
  add_changed([](auto& segments) { segments[0].count = 41, segments[1] = {41, 29, 1, true}; });
  add_changed([](auto& segments) { segments.push_back({100, 0, 0}); });
  add_changed([](auto& segments) { segments.insert(segments.begin(), {0, 0, 0}); });
  add_changed([](auto& segments) { segments.insert(segments.begin() + 1, {40, 0, 0}); });
  add({}, 2, false);
  CHECK(prints.size() == plans);
  CHECK(MaskPlan(scape::FlatLayout(10, 2)).fingerprint() ==
        MaskPlan(own_layout({{0, 5, 0}, {5, 5, 1}}, 2)).fingerprint());
}

TEST_CASE("MaskPlan: memory of the gathered mask with 256 ranks") {
  constexpr std::size_t size = 10'000'000, words = size / 32;
  constexpr int ranks = 256;
  const auto skewed = [&] {
    std::vector<Segment> list = {{0, size * 9 / 10, 17}};
    for (int rank = 0; rank < ranks; ++rank) {
      const std::size_t begin = list.back().begin + list.back().count;
      list.push_back({begin, rank + 1 == ranks ? size - begin : size / 10 / ranks, rank});
    }
    return own_layout(list, ranks);
  }();
  const MaskPlan balanced(scape::FlatLayout(size, ranks));
  CHECK(balanced.exchanged_words() >= words);
  CHECK(balanced.exchanged_words() <= words + ranks);
  CHECK(MaskPlan(scape::FlatLayout(size, ranks), true).exchanged_words() <= words + ranks);
  // ranks() times the busiest owner's share, as documented; exact parts need no more than the bits, padded.
  CHECK(scape::imbalance(skewed) == doctest::Approx(0.9 * ranks).epsilon(0.01));
  CHECK(MaskPlan(skewed).exchanged_words() <=
        static_cast<std::size_t>(scape::imbalance(skewed) * static_cast<double>(words)) + 2 * ranks);
  CHECK(MaskPlan(skewed, true).exchanged_words() <= words + ranks + 1);
}

TEST_CASE("MaskPlan: bad layouts are refused by name and value") {
  const struct {
    const char* what;
    std::vector<Segment> list;
    int ranks;
    std::size_t size;
    const char* message;
  } cases[] = {
      {"gap", {{0, 4, 0}, {5, 5, 1}}, 2, 10, "layout.segments()[1].begin is 5:"},
      {"gap in front", {{1, 9, 0}}, 2, 10, "layout.segments()[0].begin is 1:"},
      {"overlap", {{0, 6, 0}, {5, 5, 1}}, 2, 10, "layout.segments()[1].begin is 5:"},
      {"order", {{5, 5, 1}, {0, 5, 0}}, 2, 10, "layout.segments()[0].begin is 5:"},
      {"owner too large", {{0, 5, 0}, {5, 5, 2}}, 2, 10, "layout.segments()[1].owner is 2:"},
      {"owner of an empty segment", {{0, 0, 2}, {0, 10, 0}}, 2, 10, "layout.segments()[0].owner is 2:"},
      {"negative owner", {{0, 5, -1}, {5, 5, 1}}, 2, 10, "layout.segments()[0].owner is -1:"},
      {"segments too short", {{0, 5, 0}, {5, 4, 1}}, 2, 10, "layout.size() is 10:"},
      {"no segments", {}, 2, 10, "layout.size() is 10:"},
      {"segments too long", {{0, 5, 0}, {5, 6, 1}}, 2, 10, "layout.segments()[1].count is 6:"},
      {"count that wraps", {{0, 5, 0}, {5, huge, 1}}, 2, 10, "layout.segments()[1].count is 18446744073709551615:"},
      {"no ranks", {}, 0, 0, "layout.ranks() is 0:"},
      {"negative ranks", {{0, 10, 0}}, -3, 10, "layout.ranks() is -3:"},
  };
  for (const auto& test : cases) {
    CAPTURE(test.what);
    const std::string message = message_of([&] { MaskPlan{OwnLayout{test.list, test.ranks, test.size}}; });
    CAPTURE(message);
    CHECK(message.starts_with(test.message));
  }
}

TEST_CASE("MaskPlan: positions past 2^32") {
  constexpr std::size_t size = (std::size_t{1} << 33) + 5, tiles = (std::size_t{1} << 21) + 1;
  const MaskPlan one(scape::FlatLayout(size, 1));
  CHECK(one.words() == (std::size_t{1} << 28) + 1);
  CHECK(one.kept(0.25) == (std::size_t{1} << 31) + 1);
  REQUIRE(one.tiles().size() == tiles);
  bool in_place = true;
  for (std::size_t i = 0; i < tiles; ++i)
    in_place = in_place && one.tiles()[i].element == i * 4096 && one.tiles()[i].bit == i * 4096;
  CHECK(in_place);
  CHECK(one.tiles().back().count == 5);

  const MaskPlan three(own_layout({{0, size, 2, true}, {size, 33, 2}, {size + 33, 1, 0}}, 3));
  CHECK(three.part_begin(2) == 4);
  CHECK(three.exchanged_words() == 6);
  CHECK(three.words() == 6 + (std::size_t{1} << 28) + 1);
  CHECK(three.tiles()[0].element == size + 33);
  CHECK(three.tiles()[1].element == size);
  CHECK(three.tiles()[1].bit == 4 * 32);
  CHECK(three.tiles().back().bit == 6 * 32 + (std::size_t{1} << 33));
  CHECK(three.kept_by_rank(0.1) == Sizes{1, 0, size + 3});
}

TEST_CASE_TEMPLATE("PlanTables: the plan's tables in the stream's memory", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const auto read = [&]<class T>(std::span<const T> from) {
    std::vector<T> values(from.size());
    scape::copy_values(from, std::span<T>(values), backend.stream);
    backend.stream.synchronize();
    return values;
  };
  for (const int ranks : {1, 3}) {
    const MaskPlan plan(random_layout(ranks, 7));
    const scape::PlanTables tables(plan, backend.memory, backend.stream);
    const std::vector<scape::Tile> tiles = read(tables.view().tiles);
    const std::vector<Segment> segments = read(tables.view().segments);
    CHECK(std::ranges::equal(tiles, plan.tiles(), [](const scape::Tile& a, const scape::Tile& b) {
      return a.element == b.element && a.bit == b.bit && a.own == b.own && a.count == b.count && a.segment == b.segment;
    }));
    CHECK(std::ranges::equal(segments, plan.segments(), [](const Segment& a, const Segment& b) {
      return a.begin == b.begin && a.count == b.count && a.owner == b.owner && a.dense == b.dense && a.decay == b.decay;
    }));
    CHECK(std::ranges::equal(read(tables.view().first_tile), plan.view().first_tile));
    CHECK(tables.bytes() ==
          tiles.size() * 40 + segments.size() * sizeof(Segment) + static_cast<std::size_t>(ranks + 1) * 8);
  }
}

TEST_CASE("a sharded plan counts a rank's own elements, as they lie in its part of the mask") {
  for (const int ranks : {1, 2, 3}) {
    const ListLayout layout = [&] {
      ListLayout list{{}, ranks};
      for (const std::size_t size : Counts{100, 0, 5000, 1, 33, 4096})
        list.add(size, static_cast<int>(size % 7), size == 33);
      return list;
    }();
    const MaskPlan replicated(layout), sharded(layout, false, true);
    CHECK(replicated.fingerprint() != sharded.fingerprint());
    for (const scape::Tile& tile : replicated.tiles()) CHECK(tile.own == tile.element);
    for (int rank = 0; rank < ranks; ++rank) {
      CHECK(replicated.own_elements(rank) == layout.size());
      std::size_t end = 0;
      for (std::size_t i = sharded.first_tile(rank); i < sharded.first_tile(rank + 1); ++i) {
        const scape::Tile& tile = sharded.tiles()[i];
        CHECK(tile.own == end);
        end += scape::words_for(tile.count) * 32;
        if (!sharded.segments()[tile.segment].dense)
          CHECK(scape::PlaceInPart{sharded.part_begin(rank) * 32}(tile.element, tile.bit) == tile.own);
      }
      CHECK(sharded.own_elements(rank) == end);
    }
  }
}
