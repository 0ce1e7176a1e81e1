// ResidualStore: gradients add up, kept elements go to the payload, the rule says what stays.

#include "backends.hpp"
#include "support.hpp"

#include <scape/arithmetic.hpp>
#include <scape/layout.hpp>
#include <scape/mask_plan.hpp>
#include <scape/plan_tables.hpp>
#include <scape/residual_store.hpp>
#include <scape/step_scalars.hpp>

#include <scape/host/pack.hpp>
#include <scape/host/update.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using scape::MaskPlan;
using scape::MaskWord;
using scape::ResidualStore;
using scape::Segment;
using scape::StepScalars;

constexpr float untouched = -77;

ListLayout mixed_layout() {
  ListLayout layout{{}, 3};
  layout.add(100, 1);
  layout.add(7, 0, true);
  layout.add(9000, 0);
  layout.add(0, 1);
  layout.add(33, 1, true);
  layout.add(1, 1);
  layout.add(4096, 1);
  layout.add(31, 0);
  return layout;
}

// Of 1000 elements of a sparse segment the mask keeps `share`, other ones for another seed.
struct Choice {
  std::uint32_t share;
  std::size_t seed;
  bool operator()(const Segment& segment, std::size_t element) const {
    return segment.dense || random_bits(element * 8 + seed) % 1000 < share;
  }
};

template <class Backend>
class Mask {
 public:
  Mask(Backend& backend, const MaskPlan& plan, Choice keeps)
      : chosen(plan.size()),
        tables_(plan, backend.memory, backend.stream),
        words_(backend.array(words_of(plan, keeps))),
        offsets_(plan.tiles().size(), backend.memory) {
    count_offsets(tables_.view(), words_.span(), 0, offsets_.span(), backend.stream);
    backend.stream.synchronize();
  }
  scape::MaskView view() const { return {tables_.view(), words_.span(), offsets_.span(), elements.size()}; }

  std::vector<char> chosen;           // by element
  std::vector<std::size_t> elements;  // the kept ones in payload order

 private:
  Words words_of(const MaskPlan& plan, Choice keeps) {
    Words words(plan.words());
    for (const scape::Tile& tile : plan.tiles())
      for (std::size_t i = 0; i < tile.count; ++i) {
        if (!keeps(plan.segments()[tile.segment], tile.element + i)) continue;
        words[(tile.bit + i) / 32] |= MaskWord{1} << (tile.bit + i) % 32;
        chosen[tile.element + i] = true;
        elements.push_back(tile.element + i);
      }
    return words;
  }

  scape::PlanTables<std::remove_cvref_t<decltype(std::declval<Backend&>().memory)>> tables_;
  typename Backend::template Array<MaskWord> words_;
  typename Backend::template Array<std::size_t> offsets_;
};

// Rules of which every argument shows in the result; exact in float32 for the small integers that they are given.
struct Tracing {
  SCAPE_HOST_DEVICE float state(float g, float a, bool was_kept, bool is_kept) const {
    return g + 100 * a + (was_kept ? 0.25f : 0.0f) + (is_kept ? 0.5f : 0.0f);
  }
  SCAPE_HOST_DEVICE float payload(float g, float a, bool was_kept) const { return g - a + (was_kept ? 0.25f : 0.0f); }
};
struct TracingWithMoment : Tracing {
  SCAPE_HOST_DEVICE float moment(float a, bool was_kept) const { return was_kept ? a : -a; }
};

Floats small_integers(std::size_t seed, std::size_t count) {
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(random_bits(i * 64 + seed) % 64) - 32;
  return values;
}

// Gradients that are no floats.
struct Half {
  std::uint16_t bits;
  SCAPE_HOST_DEVICE operator float() const { return scape::float_of(static_cast<std::uint32_t>(bits) << 16); }
};

bool same_bits(const Floats& a, const Floats& b) {
  return std::ranges::equal(a, b, {}, std::bit_cast<std::uint32_t, float>, std::bit_cast<std::uint32_t, float>);
}

template <class Backend>
auto store_of(Backend& backend, std::size_t size) {
  return ResidualStore<std::remove_cvref_t<decltype(backend.memory)>>(size, backend.memory, backend.stream);
}

template <class Backend>
Floats read(Backend& backend, std::span<const float> from) {
  Floats values(from.size());
  scape::copy_values(from, std::span<float>(values), backend.stream);
  backend.stream.synchronize();
  return values;
}

template <class Backend>
auto scalars_of(Backend& backend, float gradient_scale = 1) {
  StepScalars scalars;
  scalars.gradient_scale = gradient_scale;
  return backend.array(std::vector<StepScalars>{scalars});
}

// One accumulate against the definition, an element at a time.
template <class Rule, class Backend>
void check_accumulate(Backend& backend, const MaskPlan& plan, Choice was, Choice is, float scale,
                      bool has_errors = false) {
  constexpr bool has_moment = requires(const Rule& rule) { rule.moment(1.0f, true); };
  const Mask<Backend> before(backend, plan, was), mask(backend, plan, is);
  const std::size_t kept = mask.elements.size();
  const Floats states = small_integers(1, plan.size()), gradients = small_integers(2, plan.size());
  const Floats errors = has_errors ? small_integers(3, before.elements.size()) : Floats();
  Floats sums(plan.size());
  for (std::size_t i = 0; i < plan.size(); ++i) sums[i] = gradients[i] * scale;
  for (std::size_t p = 0; p < errors.size(); ++p) sums[before.elements[p]] += errors[p];
  const Rule rule;
  Floats expected_states(plan.size()), expected_payload(kept + 2, untouched), expected_moments(kept + 2, untouched);
  for (std::size_t i = 0; i < plan.size(); ++i)
    expected_states[i] = rule.state(sums[i], states[i], before.chosen[i], mask.chosen[i]);
  for (std::size_t p = 0; p < kept; ++p) {
    const std::size_t i = mask.elements[p];
    expected_payload[p] = rule.payload(sums[i], states[i], before.chosen[i]);
    if constexpr (has_moment) expected_moments[p] = rule.moment(states[i], before.chosen[i]);
  }

  const auto store = store_of(backend, plan.size());
  scape::copy_values(std::span<const float>(states), store.values(), backend.stream);
  const auto gradient = backend.array(gradients), rounded_away = backend.array(errors);
  const auto payload = backend.array(Floats(kept + 2, untouched)), moments = backend.array(Floats(kept + 2, untouched));
  const auto scalars = scalars_of(backend, scale);
  store.accumulate(std::span<const float>(gradient.span()), before.view(), rounded_away.span(), mask.view(),
                   payload.span(), has_moment ? moments.span() : std::span<float>(), rule, scalars.span()[0],
                   backend.stream);
  CHECK(same_bits(read(backend, store.values()), expected_states));
  CHECK(same_bits(backend.read(payload), expected_payload));
  CHECK(same_bits(backend.read(moments), expected_moments));
}

}  // namespace

TEST_CASE_TEMPLATE("zero at first; add sums up, element by element", Backend, SCAPE_BACKENDS) {
  for (const std::size_t size : std::vector<std::size_t>{0, 1, 31, 4096, 10'000}) {
    Backend backend;
    CAPTURE(size);
    const auto store = store_of(backend, size);
    CHECK(store.values().size() == size);
    CHECK(same_bits(read(backend, store.values()), Floats(size, 0)));
    const Floats first = floats_of(1, size), second = floats_of(2, size);
    const auto a = backend.array(first), b = backend.array(second);
    store.add(std::span<const float>(a.span()), backend.stream);
    store.add(std::span<const float>(b.span()), backend.stream);
    Floats sum(size);
    for (std::size_t i = 0; i < size; ++i) sum[i] = first[i] + second[i];
    CHECK(same_bits(read(backend, store.values()), sum));
  }
}

TEST_CASE_TEMPLATE("gradients of another type are summed in float32", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const MaskPlan plan(mixed_layout());
  const auto store = store_of(backend, plan.size());
  const auto gradient = backend.array(std::vector<Half>(plan.size(), Half{0x3a83}));  // about 1e-3
  const Floats step(1, static_cast<float>(Half{0x3a83}));
  float sum = 0;
  for (int i = 0; i < 1000; ++i, sum += step[0]) store.add(std::span<const Half>(gradient.span()), backend.stream);
  CHECK(same_bits(read(backend, store.values()), Floats(plan.size(), sum)));
  CHECK(sum == doctest::Approx(1000 * static_cast<double>(step[0])).epsilon(1e-5));

  const Mask<Backend> mask(backend, plan, {300, 1});
  const auto payload = backend.array(Floats(mask.elements.size()));
  const auto scalars = scalars_of(backend);
  store.accumulate(std::span<const Half>(gradient.span()), mask.view(), {}, mask.view(), payload.span(), {},
                   scape::ErrorFeedback{}, scalars.span()[0], backend.stream);
  CHECK(same_bits(backend.read(payload), Floats(mask.elements.size(), sum + step[0])));
}

TEST_CASE_TEMPLATE("accumulate does what the rule says, for any mask before and now", Backend, SCAPE_BACKENDS) {
  const MaskPlan plan(mixed_layout());
  for (const int threads : {1, 3}) {
    Backend backend(threads);
    for (const std::uint32_t before : {0u, 10u, 500u, 1000u})
      for (const std::uint32_t now : {0u, 1u, 10u, 500u, 990u, 1000u})
        for (const float scale : {1.0f, 0.5f}) {
          CAPTURE(before);
          CAPTURE(now);
          CAPTURE(scale);
          check_accumulate<Tracing>(backend, plan, {before, 1}, {now, 2}, scale);
          check_accumulate<TracingWithMoment>(backend, plan, {before, 1}, {now, 2}, scale);
          check_accumulate<Tracing>(backend, plan, {before, 1}, {now, 2}, scale, true);
          check_accumulate<TracingWithMoment>(backend, plan, {before, 1}, {now, 2}, scale, true);
        }
  }
}

TEST_CASE_TEMPLATE("accumulate over nothing", Backend, SCAPE_BACKENDS) {
  Backend backend;
  for (const ListLayout& layout : {ListLayout{{}, 2}, ListLayout{{{0, 0, 1}, {0, 0, 0, true}}, 2}}) {
    const MaskPlan plan(layout);
    check_accumulate<TracingWithMoment>(backend, plan, {1000, 1}, {1000, 2}, 1);
    const Mask<Backend> mask(backend, plan, {1000, 1});
    store_of(backend, 0).release(mask.view(), backend.stream);
    backend.stream.synchronize();
  }
}

TEST_CASE_TEMPLATE("error feedback: what is not sent is sent later, nothing is lost", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const MaskPlan plan(mixed_layout());
  const auto store = store_of(backend, plan.size());
  const auto scalars = scalars_of(backend);
  Floats given(plan.size(), 0), sent(plan.size(), 0);
  for (std::size_t step = 0; step < 10; ++step) {
    const Mask<Backend> before(backend, plan, {100, step}), mask(backend, plan, {100, step + 1});
    const Floats gradients = small_integers(step, plan.size());
    const auto gradient = backend.array(gradients);
    const auto payload = backend.array(Floats(mask.elements.size()));
    store.accumulate(std::span<const float>(gradient.span()), before.view(), {}, mask.view(), payload.span(), {},
                     scape::ErrorFeedback{}, scalars.span()[0], backend.stream);
    const Floats now = backend.read(payload);
    for (std::size_t p = 0; p < now.size(); ++p) sent[mask.elements[p]] += now[p];
    for (std::size_t i = 0; i < plan.size(); ++i) given[i] += gradients[i];
    const Floats left = read(backend, store.values());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < plan.size(); ++i)
      wrong += sent[i] + left[i] != given[i] || (mask.chosen[i] && left[i] != 0);
    CHECK(wrong == 0);
  }
}

TEST_CASE_TEMPLATE("release clears the elements that were sent, and no others", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const MaskPlan plan(mixed_layout());
  for (const std::uint32_t share : {0u, 10u, 990u, 1000u}) {
    CAPTURE(share);
    const Mask<Backend> mask(backend, plan, {share, 1});
    const auto store = store_of(backend, plan.size());
    const Floats before = floats_of(1, plan.size());
    scape::copy_values(std::span<const float>(before), store.values(), backend.stream);
    store.release(mask.view(), backend.stream);
    Floats after = before;
    for (const std::size_t element : mask.elements) after[element] = 0;
    CHECK(same_bits(read(backend, store.values()), after));
  }
}

TEST_CASE_TEMPLATE("wrong sizes are refused by name and value, before anything is touched", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const MaskPlan plan(mixed_layout());
  const Mask<Backend> mask(backend, plan, {100, 1});
  const std::size_t kept = mask.elements.size();
  const auto store = store_of(backend, plan.size());
  const auto gradient = backend.array(Floats(plan.size() + 1, 1)), payload = backend.array(Floats(kept, untouched));
  const auto scalars = scalars_of(backend);
  const auto accumulate = [&](std::size_t gradients, std::size_t payloads) {
    store.accumulate(std::span<const float>(gradient.span()).first(gradients), mask.view(), {}, mask.view(),
                     payload.span().first(payloads), {}, Tracing{}, scalars.span()[0], backend.stream);
  };
  for (const std::size_t size : {std::size_t{0}, plan.size() - 1, plan.size() + 1}) {
    const std::string expected = "gradient.size() is " + std::to_string(size) + ":";
    CHECK(message_of([&] { accumulate(size, kept); }).starts_with(expected));
    CHECK(message_of([&] {
            store.add(std::span<const float>(gradient.span()).first(size), backend.stream);
          }).starts_with(expected));
  }
  CHECK(message_of([&] {
          accumulate(plan.size(), kept - 1);
        }).starts_with("payload.size() is " + std::to_string(kept - 1) + ":"));
  CHECK(same_bits(read(backend, store.values()), Floats(plan.size(), 0)));
  CHECK(backend.read(payload) == Floats(kept, untouched));
}

TEST_CASE_TEMPLATE("fewer errors than the mask before keeps are refused", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const MaskPlan plan(mixed_layout());
  const Mask<Backend> before(backend, plan, {200, 1}), mask(backend, plan, {100, 2});
  const std::size_t kept = before.elements.size();
  const auto store = store_of(backend, plan.size());
  const auto gradient = backend.array(Floats(plan.size(), 1)), errors = backend.array(Floats(kept));
  const auto payload = backend.array(Floats(mask.elements.size()));
  const auto scalars = scalars_of(backend);
  CHECK(message_of([&] {
          store.accumulate(std::span<const float>(gradient.span()), before.view(), errors.span().first(kept - 1),
                           mask.view(), payload.span(), {}, Tracing{}, scalars.span()[0], backend.stream);
        }).starts_with("errors.size() is " + std::to_string(kept - 1) + ":"));
}

// Red while the moments' size is not checked: a rule with `moment` writes past too short an array, or to no array.
TEST_CASE_TEMPLATE("moments too short for a rule that sets them aside are refused", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const MaskPlan plan(mixed_layout());
  const Mask<Backend> mask(backend, plan, {100, 1});
  const std::size_t kept = mask.elements.size();
  const auto store = store_of(backend, plan.size());
  const auto gradient = backend.array(Floats(plan.size(), 1));
  const auto payload = backend.array(Floats(kept)), moments = backend.array(Floats(kept));
  const auto scalars = scalars_of(backend);
  const std::string message = message_of([&] {
    store.accumulate(std::span<const float>(gradient.span()), mask.view(), {}, mask.view(), payload.span(),
                     moments.span().first(kept - 1), TracingWithMoment{}, scalars.span()[0], backend.stream);
    backend.stream.synchronize();
  });
  CHECK(message.starts_with("moments.size() is " + std::to_string(kept - 1) + ":"));
}
