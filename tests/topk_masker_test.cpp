#include "backends.hpp"

#include <scape/layout.hpp>
#include <scape/plan_tables.hpp>
#include <scape/topk_masker.hpp>

#include <scape/host/select.hpp>
#include <scape/host/update.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using scape::MaskPlan;
using scape::MaskWord;
using Values = std::vector<float>;
using Mask = std::vector<MaskWord>;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr MaskWord untouched = 0xdeadbeef;

struct CustomLayout {
  std::vector<scape::Segment> list;
  int count;
  std::size_t size() const { return list.empty() ? 0 : list.back().begin + list.back().count; }
  int ranks() const { return count; }
  std::span<const scape::Segment> segments() const { return list; }
};

MaskPlan flat(std::size_t size) { return MaskPlan(scape::FlatLayout(size, 1)); }

bool larger(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && !std::isnan(b);
  return std::fabs(a) > std::fabs(b);
}

// The slow and obvious way: a stable sort of each of a rank's segments.
class Reference {
 public:
  Reference(const MaskPlan& plan, int rank, const Values& values) : plan_(plan), rank_(rank) {
    for (std::size_t i = plan.first_tile(rank); i < plan.first_dense_tile(rank); ++i) {
      const scape::Tile& tile = plan.tiles()[i];
      const scape::Segment& segment = plan.segments()[tile.segment];
      if (tile.element != segment.begin) continue;
      std::vector<std::size_t> order(segment.count);
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return larger(values[segment.begin + a], values[segment.begin + b]);
      });
      sorted_.push_back({tile.bit, std::move(order)});
    }
  }

  // The whole mask after the rank's selection, if all was `untouched` before.
  Mask mask(double density) const {
    Mask mask(plan_.words(), untouched);
    const std::size_t begin = plan_.part_begin(rank_);
    for (std::size_t i = 0; i < plan_.part_words()[static_cast<std::size_t>(rank_)]; ++i) mask[begin + i] = 0;
    for (const auto& [bit, order] : sorted_)
      for (std::size_t i = 0; i < scape::kept_count(order.size(), density); ++i)
        mask[(bit + order[i]) / 32] |= MaskWord{1} << (bit + order[i]) % 32;
    return mask;
  }

 private:
  struct Sorted {
    std::size_t bit;
    std::vector<std::size_t> order;
  };
  const MaskPlan& plan_;
  int rank_;
  std::vector<Sorted> sorted_;
};

template <class B>
Mask select(B& backend, const MaskPlan& plan, int rank, const Values& values, double density) {
  const scape::PlanTables tables(plan, backend.memory, backend.stream);
  const scape::TopKMasker masker(plan, tables.view(), rank);
  const auto device_values = backend.array(values);
  const auto mask = backend.array(Mask(plan.words(), untouched));
  const auto workspace = backend.array(std::vector<std::byte>(masker.workspace_bytes(backend.stream)));
  masker.select(std::span<const float>(device_values.span()), density, mask.span(), workspace.span(), backend.stream);
  return backend.read(mask);
}

template <class B>
void check_equal(B& backend, const Values& values, std::initializer_list<double> densities) {
  const MaskPlan plan = flat(values.size());
  const Reference reference(plan, 0, values);
  for (const double density : densities) {
    CAPTURE(values.size());
    CAPTURE(density);
    CHECK(select(backend, plan, 0, values, density) == reference.mask(density));
  }
}

std::size_t bits_of(const Mask& mask) {
  std::size_t sum = 0;
  for (const MaskWord word : mask) sum += static_cast<std::size_t>(std::popcount(word));
  return sum;
}

// The kept indices of a mask over one segment.
std::vector<std::size_t> indices(const Mask& mask) {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < mask.size() * 32; ++i)
    if ((mask[i / 32] >> i % 32 & 1) != 0) result.push_back(i);
  return result;
}

template <class F>
Values make(std::size_t size, F value) {
  Values values(size);
  for (std::size_t i = 0; i < size; ++i) values[i] = static_cast<float>(value(i));
  return values;
}

Values normal(std::size_t size, std::uint32_t seed = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  return make(size, [&](std::size_t) { return distribution(generator); });
}

// Random numbers by index.
std::uint32_t random_bits(std::size_t i) {
  std::uint64_t x = i * 0x9e3779b97f4a7c15 + 0x7f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return static_cast<std::uint32_t>(x >> 32);
}

struct Kind {
  std::string name;
  std::function<float(std::size_t)> value;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> list = {
      {"all zero", [](std::size_t) { return 0.f; }},
      {"all equal", [](std::size_t i) { return random_bits(i) % 2 != 0 ? 1.5f : -1.5f; }},
      {"two values", [](std::size_t i) { return random_bits(i) % 3 == 0 ? -2.f : 1.f; }},
      {"neighbours", [](std::size_t i) { return random_bits(i) % 3 == 0 ? 1.f : std::nextafter(1.f, 2.f); }},
      {"all NaN", [](std::size_t i) { return random_bits(i) % 2 != 0 ? not_a_number : -not_a_number; }},
      {"NaN of any payload, infinities, numbers",
       [](std::size_t i) {
         const std::uint32_t bits = random_bits(i);
         return std::bit_cast<float>(bits % 4 == 0 ? bits | 0x7f800000 : bits % 4 == 1 ? bits & 0xff800000 : bits);
       }},
      {"any bits", [](std::size_t i) { return std::bit_cast<float>(random_bits(i)); }},
      {"zeros of both signs, few others",
       [](std::size_t i) { return random_bits(i) % 64 == 0  ? 1e-30f
                                  : random_bits(i) % 2 != 0 ? 0.f
                                                            : -0.f; }},
      {"denormals",
       [](std::size_t i) { return std::bit_cast<float>(random_bits(i) % 0x00800000 | (random_bits(i) & 0x80000000)); }},
      {"few denormals", [](std::size_t i) { return std::bit_cast<float>(random_bits(i) % 5); }},
      {"integers with ties", [](std::size_t i) { return static_cast<float>(random_bits(i) % 1001) - 500; }},
      {"exponents all different",
       [](std::size_t i) { return std::ldexp(1.f, static_cast<int>(random_bits(i) % 277) - 149); }},
      {"one exponent", [](std::size_t i) { return 1 + static_cast<float>(random_bits(i) >> 8) * 0x1p-24f; }},
      {"one bin of 11 bits", [](std::size_t i) { return 1 + static_cast<float>(random_bits(i) >> 8) * 0x1p-28f; }},
      {"one bin of 21 bits", [](std::size_t i) { return 1 + static_cast<float>(random_bits(i) % 1024) * 0x1p-23f; }},
      {"eight neighbours", [](std::size_t i) { return 1 + static_cast<float>(random_bits(i) % 8) * 0x1p-23f; }},
      {"sorted up", [](std::size_t i) { return static_cast<float>(i); }},
      {"sorted down", [](std::size_t i) { return 1e7f - static_cast<float>(i); }},
      {"all in one place", [](std::size_t i) { return i / 1000 == 70 ? 1 + static_cast<float>(i % 1000) * 1e-4f : 0; }},
  };
  return list;
}

// Worth twice as much where the last mask has the bit: needs element and bit in their own spaces.
struct Sticky {
  const float* values;
  const MaskWord* last;
  SCAPE_HOST_DEVICE float operator()(std::size_t element, std::size_t bit) const {
    return values[element] * static_cast<float>(1 + (last[bit / 32] >> bit % 32 & 1));
  }
};

// Segments of random sizes, owners and flags, some of them empty; the last rank owns nothing.
CustomLayout random_layout(int ranks, std::uint32_t seed) {
  std::mt19937 generator(seed);
  const auto below = [&](std::uint32_t bound) { return generator() % bound; };
  CustomLayout layout{{}, ranks};
  for (int i = 0; i < 40; ++i) {
    const std::size_t sizes[] = {0, 1 + below(40), 1 + below(300), 1 + below(5000), 1 + below(20000)};
    const int owner = ranks == 1 ? 0 : static_cast<int>(below(static_cast<std::uint32_t>(ranks - 1)));
    layout.list.push_back({layout.size(), sizes[below(5)], owner, below(5) == 0});
  }
  layout.list.push_back({layout.size(), 140000 + below(10000), 0});
  return layout;
}

}  // namespace

TEST_CASE_TEMPLATE("select keeps what a stable sort puts first, at all sizes and densities", B, SCAPE_BACKENDS) {
  B backend;
  for (const int size :
       {0, 1, 31, 32, 33, 100, 255, 256, 257, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 131072, 131073, (1 << 20) + 1})
    check_equal(backend, normal(static_cast<std::size_t>(size)), {0., 0.001, 0.01, 0.1, 0.29, 0.5, 0.999, 1.});
}

TEST_CASE_TEMPLATE("select is exact whatever the values", B, SCAPE_BACKENDS) {
  B backend;
  for (const Kind& kind : kinds()) {
    CAPTURE(kind.name);
    for (const std::size_t size : {100u, 3000u, 70000u, 210001u})
      check_equal(backend, make(size, kind.value), {0., 0.001, 0.01, 0.1, 0.4, 0.9});
  }
}

TEST_CASE_TEMPLATE("select finds ties in a full bin, in candidates many and few", B, SCAPE_BACKENDS) {
  B backend;
  const std::size_t size = 300000;
  // A share of the elements in the bin of 1, so many of them equal; the rest far above and below.
  for (const std::uint32_t share : {1u, 3u, 6u, 50u}) {  // per cent; there is room for about 5
    for (const std::uint32_t different : {1u, 7u, 5000u}) {
      CAPTURE(share);
      CAPTURE(different);
      const Values values = make(size, [&](std::size_t i) {
        if (random_bits(i) % 100 >= share) return random_bits(i + size) % 100 == 0 ? 8. : 0.25;
        return 1 + random_bits(i + 2 * size) % different * 0x1p-22;
      });
      check_equal(backend, values, {0.012, 0.015, 0.02, 0.04, 0.06, 0.3, 0.5, 0.6});
    }
  }
}

TEST_CASE_TEMPLATE("select is exact where candidates just fit, and just do not", B, SCAPE_BACKENDS) {
  B backend;
  // Zeros, at the end too, compete for the last places.
  for (const std::size_t size : {3001u, 100001u, 210001u}) {
    const std::size_t limit = scape::detail::candidates_for(size);
    for (const std::size_t zeros : {limit - 40, limit - 1, limit, limit + 1}) {
      CAPTURE(zeros);
      const Values values = make(size, [&](std::size_t i) { return i < size - zeros ? 1. : i % 2 == 0 ? 0. : 1e-44; });
      const double others = static_cast<double>(size - zeros);
      for (const double kept : {others - 1, others, others + 1, others + 200, others + 500})
        check_equal(backend, values, {kept / static_cast<double>(size)});
    }
  }
}

TEST_CASE_TEMPLATE("select writes the rank's own part of any layout, and nothing else", B, SCAPE_BACKENDS) {
  B backend;
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (const bool exact_parts : {false, true}) {
      const MaskPlan plan(random_layout(ranks, static_cast<std::uint32_t>(ranks)), exact_parts);
      const Values values = normal(plan.size());
      for (int rank = 0; rank < ranks; ++rank) {
        CAPTURE(ranks);
        CAPTURE(rank);
        const Reference reference(plan, rank, values);
        for (const double density : {0., 0.01, 0.29, 1.}) {
          const Mask mask = select(backend, plan, rank, values, density);
          CHECK(mask == reference.mask(density));
          const auto part = mask.begin() + static_cast<std::ptrdiff_t>(plan.part_begin(rank));
          const auto words = static_cast<std::ptrdiff_t>(plan.part_words()[static_cast<std::size_t>(rank)]);
          std::size_t kept = 0;
          for (const scape::Segment& segment : plan.segments())
            if (segment.owner == rank && !segment.dense) kept += plan.kept(segment, density);
          CHECK(bits_of(Mask(part, part + words)) == kept);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("a score is a function of the element and of its bit", B, SCAPE_BACKENDS) {
  B backend;
  const MaskPlan plan(random_layout(3, 7));
  const Values values = normal(plan.size());
  Mask last(plan.words());
  for (std::size_t i = 0; i < last.size(); ++i) last[i] = random_bits(i);
  Values worth = values;
  for (const scape::Tile& tile : plan.tiles())
    for (std::size_t i = 0; i < tile.count; ++i)
      if ((last[(tile.bit + i) / 32] >> (tile.bit + i) % 32 & 1) != 0) worth[tile.element + i] *= 2;

  const auto device_values = backend.array(values);
  const auto device_last = backend.array(last);
  const scape::PlanTables tables(plan, backend.memory, backend.stream);
  for (int rank = 0; rank < 3; ++rank) {
    const scape::TopKMasker masker(plan, tables.view(), rank);
    const auto mask = backend.array(Mask(plan.words(), untouched));
    const auto workspace = backend.array(std::vector<std::byte>(masker.workspace_bytes(backend.stream)));
    masker.select(Sticky{device_values.span().data(), device_last.span().data()}, 0.1, mask.span(), workspace.span(),
                  backend.stream);
    CHECK(backend.read(mask) == Reference(plan, rank, worth).mask(0.1));
  }
}

TEST_CASE_TEMPLATE("NaN counts as the largest, and exactly k bits are set", B, SCAPE_BACKENDS) {
  B backend;
  using Indices = std::vector<std::size_t>;
  const auto kept = [&](const Values& values, std::size_t k) {
    const double density = static_cast<double>(k) / static_cast<double>(values.size());
    return indices(select(backend, flat(values.size()), 0, values, density));
  };
  const Values mixed = {not_a_number, infinity, infinity, 3,        infinity,
                        infinity,     infinity, infinity, infinity, infinity};
  CHECK(kept(mixed, 1) == Indices{0});
  CHECK(kept(mixed, 9) == Indices{0, 1, 2, 4, 5, 6, 7, 8, 9});
  CHECK(kept({-1, not_a_number, 2, 1}, 1) == Indices{1});
  CHECK(kept({0.5f, not_a_number, -not_a_number, not_a_number, not_a_number}, 3) == Indices{1, 2, 3});
  CHECK(kept({0.5f, -infinity, -infinity, -infinity, -infinity}, 3) == Indices{1, 2, 3});
  CHECK(kept({0.5f, infinity, infinity, infinity, infinity}, 3) == Indices{1, 2, 3});

  // The same on each path: one thread with and without histograms, and all threads.
  for (const float top : {not_a_number, -not_a_number, infinity, -infinity}) {
    for (const std::size_t repeats : {1u, 1000u, 100000u}) {
      CAPTURE(top);
      CAPTURE(repeats);
      const Values values = make(5 * repeats, [&](std::size_t i) { return i % 5 == 0 ? 0.5f : top; });
      Indices expected;
      for (std::size_t i = 0; expected.size() < 3 * repeats; ++i)
        if (i % 5 != 0) expected.push_back(i);
      CHECK(kept(values, 3 * repeats) == expected);
    }
  }
}

TEST_CASE_TEMPLATE("among equals the lower index is kept, every time", B, SCAPE_BACKENDS) {
  B backend;
  using Indices = std::vector<std::size_t>;
  const MaskPlan six = flat(6), five = flat(5);
  const Indices expected[] = {{3}, {2, 3}, {2, 3, 4}, {1, 2, 3, 4}, {0, 1, 2, 3, 4}};
  for (int time = 0; time < 100; ++time) {
    CHECK(indices(select(backend, six, 0, {3, 2, 3, 2, 1, 1}, 2 / 6.)) == Indices{0, 2});
    for (std::size_t k = 1; k <= 5; ++k)
      CHECK(indices(select(backend, five, 0, {1, 2, 4, 5, 4}, static_cast<double>(k) / 5)) == expected[k - 1]);
  }
  CHECK(indices(select(backend, five, 0, {1, 2, 5, 4, 5}, 1 / 5.)) == Indices{2});
  CHECK(indices(select(backend, five, 0, {0.f, -0.f, 0.f, -0.f, 0.f}, 3 / 5.)) == Indices{0, 1, 2});
}

TEST_CASE_TEMPLATE("empty and tiny segments are legal", B, SCAPE_BACKENDS) {
  B backend;
  CHECK(select(backend, flat(0), 0, {}, 0.01).empty());
  CHECK(select(backend, flat(1), 0, {0}, 0.001) == Mask{1});
  CHECK(select(backend, flat(1), 0, {not_a_number}, 0) == Mask{1});
  CHECK(select(backend, flat(33), 0, Values(33), 1) == Mask{0xffffffff, 1});
  const MaskPlan plan(scape::TensorLayout({{0}, {1}, {7}, {0}, {8}}, 1));
  const Values values = normal(16);
  for (const double density : {0., 0.001, 0.5, 1.})
    CHECK(select(backend, plan, 0, values, density) == Reference(plan, 0, values).mask(density));
}

TEST_CASE_TEMPLATE("k is floor(density * n + 1e-6), at least one", B, SCAPE_BACKENDS) {
  B backend;
  struct Case {
    std::size_t size, tenth, hundredth;
  };
  for (const Case& test : {Case{1, 1, 1}, Case{9, 1, 1}, Case{10, 1, 1}, Case{11, 1, 1}, Case{99, 9, 1},
                           Case{100, 10, 1}, Case{101, 10, 1}, Case{1000001, 100000, 10000}}) {
    CAPTURE(test.size);
    CHECK(bits_of(select(backend, flat(test.size), 0, normal(test.size), 0.1)) == test.tenth);
    CHECK(bits_of(select(backend, flat(test.size), 0, normal(test.size), 0.01)) == test.hundredth);
  }
  CHECK(bits_of(select(backend, flat(100), 0, normal(100), 0.29)) == 29);
  CHECK(bits_of(select(backend, flat(1000), 0, normal(1000), 0.009)) == 9);
  CHECK(bits_of(select(backend, flat(1000), 0, normal(1000), 0.009f)) == 9);
}

TEST_CASE_TEMPLATE("the scope decides whether tensors compete", B, SCAPE_BACKENDS) {
  B backend;
  const std::size_t size = 320;
  const Values values =
      make(2 * size, [&](std::size_t i) { return (i < size ? 1 : 1e-3) * (1 + static_cast<double>(i % 10) * 0.01); });
  const MaskPlan apart(scape::TensorLayout({{size}, {size}}, 1));
  const MaskPlan together(scape::TensorLayout({{size}, {size}}, 1, scape::Scope::shard));
  const Mask each = select(backend, apart, 0, values, 0.5);
  CHECK(bits_of(Mask(each.begin(), each.begin() + size / 32)) == size / 2);
  CHECK(bits_of(each) == size);
  const Mask global = select(backend, together, 0, values, 0.5);
  CHECK(bits_of(Mask(global.begin(), global.begin() + size / 32)) == size);
  CHECK(bits_of(global) == size);
}

TEST_CASE_TEMPLATE("wrong arguments throw before anything is enqueued", B, SCAPE_BACKENDS) {
  B backend;
  const std::size_t size = 300000;
  const MaskPlan plan(scape::FlatLayout(2 * size, 2));
  CHECK_THROWS_WITH_AS(scape::TopKMasker(plan, -1), doctest::Contains("rank is -1"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(scape::TopKMasker(plan, 2), doctest::Contains("rank is 2"), std::invalid_argument);

  const scape::PlanTables tables(plan, backend.memory, backend.stream);
  const scape::TopKMasker masker(plan, tables.view(), 1);
  const auto values = backend.array(normal(2 * size));
  const auto mask = backend.array(Mask(plan.words(), untouched));
  const std::size_t needed = masker.workspace_bytes(backend.stream);
  CHECK(needed > 0);
  CHECK(needed < size);
  const auto workspace = backend.array(std::vector<std::byte>(needed));
  const auto& stream = backend.stream;
  const std::span<const float> all = values.span();
  for (const double density : {-0.1, 1.5, -infinity + 0., infinity + 0., not_a_number + 0.})
    CHECK_THROWS_WITH_AS(masker.select(all, density, mask.span(), workspace.span(), stream),
                         doctest::Contains("density is"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(masker.select(all, 1.5, mask.span(), workspace.span(), stream),
                       doctest::Contains("density is 1.5"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(masker.select(all, 0.5, mask.span().first(7), workspace.span(), stream),
                       doctest::Contains("mask.size() is 7"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(masker.select(all, 0.5, mask.span(), workspace.span().first(needed - 1), stream),
                       doctest::Contains("workspace.size() is"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(masker.select(all.first(3), 0.5, mask.span(), workspace.span(), stream),
                       doctest::Contains("values.size() is 3"), std::invalid_argument);
  CHECK(backend.read(mask) == Mask(plan.words(), untouched));
}

#if !defined(__CUDACC__)

namespace {

// Selections one after the other with one workspace.
class Selections {
 public:
  explicit Selections(const MaskPlan& plan, scape::HostPool& pool, std::byte garbage = std::byte{0})
      : plan_(plan), stream_(pool), masker_(plan, 0), workspace_(masker_.workspace_bytes(stream_) + 1, garbage) {}

  template <class Score>
  Mask select(Score score, double density) {
    Mask mask(plan_.words(), untouched);
    masker_.select(score, density, mask, std::span(workspace_).subspan(1), stream_);  // need not be aligned
    stream_.synchronize();
    return mask;
  }
  Mask select(const Values& values, double density) { return select(scape::Magnitude{values.data()}, density); }

  // How many scores a selection computes for each element.
  double reads(const Values& values, double density) {
    std::atomic<std::size_t> count = 0;
    const auto score = [&](std::size_t i, std::size_t) {
      count.fetch_add(1, std::memory_order_relaxed);
      return values[i];
    };
    CHECK(select(score, density) == Reference(plan_, 0, values).mask(density));
    return static_cast<double>(count) / static_cast<double>(plan_.size());
  }

 private:
  const MaskPlan& plan_;
  scape::HostStream stream_;
  scape::TopKMasker masker_;
  std::vector<std::byte> workspace_;
};

}  // namespace

TEST_CASE("the host's selection does not depend on its threads") {
  const MaskPlan plan(random_layout(2, 11));
  const Values values = make(plan.size(), [](std::size_t i) { return static_cast<float>(random_bits(i) % 1001) / 7; });
  const Reference reference(plan, 0, values);
  const auto check = [&](scape::HostPool& pool) {
    Selections selections(plan, pool);
    for (int time = 0; time < 5; ++time)
      for (const double density : {0.001, 0.01, 0.3})
        CHECK(selections.select(values, density) == reference.mask(density));
  };
  for (const int threads : {1, 2, 3, 4, 5}) {
    scape::HostPool pool(threads);
    check(pool);
  }
  scape::HostPool own(2, [](std::size_t count, void (*body)(void*, std::size_t), void* context) {
    std::thread odd([=] {
      for (std::size_t i = 1; i < count; i += 2) body(context, i);
    });
    for (std::size_t i = (count - 1) / 2 * 2 + 2; i >= 2; i -= 2) body(context, i - 2);
    odd.join();
  });
  check(own);
}

TEST_CASE("the host's selection does not depend on what the last one left, nor on garbage") {
  scape::HostPool pool(3);
  const MaskPlan plan(random_layout(1, 5));
  const Values normal_values = normal(plan.size(), 3);
  const auto scaled = [&](float factor) {
    return make(plan.size(), [&](std::size_t i) { return factor * normal_values[i]; });
  };
  for (const int garbage : {0x00, 0xff, 0x7f, 0x80, 0x3f, 0x01}) {
    CAPTURE(garbage);
    Selections selections(plan, pool, static_cast<std::byte>(garbage));
    // The same again, near, and far above and below.
    for (const float factor : {1.f, 1.f, 1.001f, 0.98f, 1.2f, 1e30f, 1e-38f, 1.f, 1.f}) {
      CAPTURE(factor);
      const Values values = scaled(factor);
      const Reference reference(plan, 0, values);
      for (const double density : {0.01, 0.0101, 0.5})
        CHECK(selections.select(values, density) == reference.mask(density));
    }
  }
  // Every kind follows another, twice over.
  Selections selections(plan, pool);
  for (std::size_t i = 0; i < 2 * kinds().size(); ++i) {
    const Kind& kind = kinds()[i * 5 % kinds().size()];
    CAPTURE(kind.name);
    const Values values = make(plan.size(), kind.value);
    CHECK(selections.select(values, 0.05) == Reference(plan, 0, values).mask(0.05));
  }
}

TEST_CASE("the host reads the scores once, and again only where it must") {
  scape::HostPool pool(2);
  const auto blend = [](const Values& a, const Values& b) {
    return make(a.size(), [&](std::size_t i) { return 0.9f * a[i] + 0.1f * b[i]; });
  };
  for (const std::size_t size : {50000u, 300000u}) {
    if (sanitized && size > 50000) continue;
    const MaskPlan plan = flat(size);
    for (const double density : {0.001, 0.01, 0.1, 0.9}) {
      CAPTURE(size);
      CAPTURE(density);
      Values values = normal(size);
      Selections selections(plan, pool);
      CHECK(selections.reads(values, density) < 1.2);  // from a sample
      for (int time = 0; time < 5; ++time) selections.reads(values, density);
      const double repeated = selections.reads(values, density);
      CHECK(repeated == 1);
      double sum = 0;
      for (std::uint32_t time = 0; time < 20; ++time) {
        values = blend(values, normal(size, 2 + time));
        sum += selections.reads(values, density);
      }
      CHECK(sum < 20 * 1.2);

      // Where thresholds grow steadily, the last ones tell the next, but for some calls where their exponent changes.
      Selections growing(plan, pool);
      int sampled = 0;
      for (int time = 0; time < 50 && density == 0.01; ++time) {
        const Values grown =
            make(size, [&](std::size_t i) { return (1 + 0.02f * static_cast<float>(time)) * values[i]; });
        if (growing.reads(grown, density) > 1 && time >= 10) ++sampled;
      }
      CHECK(sampled <= 15);

      // Once more for the first of many equals; and where these are next to another value, to part them.
      const Values two_values = make(size, kinds()[2].value);
      const Values border = make(size, [&](std::size_t i) { return random_bits(i) < density * 0x1p32 ? 2 : 1; });
      Selections equals(plan, pool), parted(plan, pool);
      for (int time = 0; time < 5; ++time) {
        CHECK(equals.reads(two_values, density) < 3.5);
        CHECK(parted.reads(border, density) < 4.5);
      }
      CHECK(equals.reads(two_values, density) < 2.3);
    }
  }
  // Of a small segment twice where nothing is known of it, both out of the cache.
  const MaskPlan plan(scape::TensorLayout(std::vector<std::size_t>(100, 1000), 1));
  const Values values = normal(plan.size());
  Selections selections(plan, pool);
  CHECK(selections.reads(values, 0.1) < 2.1);
  for (int time = 0; time < 5; ++time) selections.reads(values, 0.1);
  CHECK(selections.reads(values, 0.1) < 1.1);
}

TEST_CASE("the host prepares every tile once, ahead of its scores, whatever is guessed") {
  for (const int threads : {1, 3}) {
    scape::HostPool pool(threads);
    const scape::HostStream stream(pool);
    const int ranks = 3;
    const MaskPlan plan(random_layout(ranks, 7));
    const Values normal_values = normal(plan.size(), 5);
    for (int rank = 0; rank < ranks; ++rank) {  // the last owns nothing
      const scape::TopKMasker masker(plan, rank);
      std::vector<std::byte> workspace(masker.workspace_bytes(stream));
      // Cold, the same again, near, and where the last threshold tells nothing.
      for (const float factor : {1.f, 1.f, 1.001f, 1e30f, 1e-30f, 1e-30f})
        for (const double density : {0.01, 0.3, 1.}) {
          CAPTURE(threads);
          CAPTURE(rank);
          CAPTURE(factor);
          CAPTURE(density);
          const Values values = make(plan.size(), [&](std::size_t i) { return factor * normal_values[i]; });
          Values prepared(plan.size(), not_a_number);  // which would be kept
          std::vector<std::atomic<int>> calls(plan.tiles().size());
          Mask mask(plan.words(), untouched);
          std::atomic<bool> is_written = false;
          masker.select(
              scape::Magnitude{prepared.data()}, density, mask, workspace,
              [&](std::size_t i) {
                const scape::Tile& tile = plan.tiles()[i];
                ++calls[i];
                std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(tile.element), tile.count,
                            prepared.begin() + static_cast<std::ptrdiff_t>(tile.element));
                for (std::size_t bit = tile.bit; bit < tile.bit + tile.count; bit += 32)
                  if (mask[bit / 32] != untouched) is_written = true;
              },
              stream);
          stream.synchronize();
          CHECK(std::all_of(calls.begin(), calls.end(), [](const auto& count) { return count == 1; }));
          CHECK(!is_written);
          CHECK(prepared == values);
          CHECK(mask == Reference(plan, rank, values).mask(density));
        }
    }
  }
}

namespace {

// Values with a bound that is up to twice as large; of some NaN it is infinity only.
struct Bounded {
  const float* values;
  std::atomic<std::size_t>* scores;
  float operator()(std::size_t i, std::size_t) const {
    scores->fetch_add(1, std::memory_order_relaxed);
    return values[i];
  }
  float bound(std::size_t i, std::size_t) const {
    if (std::isnan(values[i])) return i % 2 == 0 ? not_a_number : infinity;
    return std::fabs(values[i]) * (1 + static_cast<float>(random_bits(i) % 1024) / 1024);
  }
};

}  // namespace

TEST_CASE("the host computes few of the scores that have a bound, and keeps the same") {
  scape::HostPool pool(2);
  for (const std::size_t size : {33u, 5000u, 210001u}) {
    const MaskPlan plan = flat(size);
    for (const Kind& kind : kinds()) {
      CAPTURE(size);
      CAPTURE(kind.name);
      const Values values = make(size, kind.value);
      const Reference reference(plan, 0, values);
      std::atomic<std::size_t> scores = 0;
      Selections selections(plan, pool);
      for (int time = 0; time < 2; ++time)
        for (const double density : {0.001, 0.1, 0.4, 0.9})
          CHECK(selections.select(Bounded{values.data(), &scores}, density) == reference.mask(density));
    }
  }
  const MaskPlan plan = flat(300000);
  const Values values = normal(plan.size());
  std::atomic<std::size_t> scores = 0;
  Selections selections(plan, pool);
  for (int time = 0; time < 6; ++time) {
    scores = 0;
    selections.select(Bounded{values.data(), &scores}, 0.01);
  }
  CHECK(scores >= 3000);
  CHECK(scores < 100000);
}

TEST_CASE("a lambda is a score") {
  scape::HostPool pool(2);
  const scape::HostStream stream(pool);
  const MaskPlan plan = flat(5);
  const Values values = {1, 2, 4, 5, 4};
  const scape::TopKMasker masker(plan, 0);
  Mask mask(1);
  std::vector<std::byte> workspace(masker.workspace_bytes(stream));
  masker.select([&](std::size_t i, std::size_t) { return 6 - values[i]; }, 0.4, mask, workspace, stream);
  stream.synchronize();
  CHECK(mask == Mask{0b11});
}

TEST_CASE("the host's workspace stays small up to 2^31 elements and beyond") {
  scape::HostPool pool(1);
  const scape::HostStream stream(pool);
  CHECK(scape::TopKMasker(flat(0), 0).workspace_bytes(stream) == 0);
  CHECK(scape::TopKMasker(flat(131072), 0).workspace_bytes(stream) == 131072 / 4096 * 12 + 8);
  for (const std::size_t size :
       {std::size_t{1} << 18, (std::size_t{1} << 31) - 1, std::size_t{1} << 31, (std::size_t{1} << 31) + 1}) {
    const MaskPlan plan = flat(size);
    const double count = static_cast<double>(size), share = std::pow(count, 2 / 3.);
    const std::size_t bytes = scape::TopKMasker(plan, 0).workspace_bytes(stream);
    CHECK(static_cast<double>(bytes) > 23.9 * share);
    CHECK(static_cast<double>(bytes) < 24 * share + 0.0034 * count + 100);
  }
}

#endif
