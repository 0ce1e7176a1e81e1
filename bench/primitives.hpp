#pragma once

// The benchmarks of every backend. Each states the bytes that its operation must move for an element at least.

#include "bench.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

using scape::MaskWord;

// ---- Data

SCAPE_HOST_DEVICE inline std::uint64_t hash(std::uint64_t x) {  // splitmix64's
  x = (x + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

/// Random values with heavy tails, as gradients have them: Student's t with two degrees of freedom.
SCAPE_HOST_DEVICE inline float random_value(std::size_t i, std::uint64_t seed) {
  const double u = (static_cast<double>(hash(i + (seed << 40)) >> 12) + 0.5) / (std::uint64_t{1} << 51) - 1;
  return static_cast<float>(u * std::sqrt(2 / (1 - u * u)));
}
struct Noise {
  float* values;
  std::uint64_t seed;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const { values[i] = random_value(i, seed); }
};
/// Nine tenths of what was there and one of something new, as in a momentum.
struct Drift {
  float* values;
  std::uint64_t seed;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const {
    values[i] = 0.9f * values[i] + 0.1f * random_value(i, seed);
  }
};
struct TwoValues {
  float* values;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const { values[i] = hash(i) & 1 ? 1.0f : 2.0f; }
};

struct NextStep {
  SCAPE_HOST_DEVICE void operator()(scape::StepScalars& now) const {
    now.step += 1;
    now.learning_rate = 1e-3f;
    now.decay = 0.9999f;
  }
};
struct FirstStep {
  SCAPE_HOST_DEVICE void operator()(scape::StepScalars& now) const { now = scape::StepScalars{}; }
};

template <class B>
auto noise(Bench<B>& bench, std::size_t count, std::uint64_t seed = 0) {
  auto values = bench.template array<float>(count);
  scape::for_each(count, Noise{values.span().data(), seed}, bench.backend.stream);
  return values;
}

template <class T, class B>
auto filled(Bench<B>& bench, std::size_t count, T value = {}) {
  auto values = bench.template array<T>(count);
  scape::fill_values(values.span(), value, bench.backend.stream);
  return values;
}

template <class B>
auto scalars(Bench<B>& bench) {
  auto result = bench.template array<scape::StepScalars>(1);
  scape::transform(result.span()[0], FirstStep{}, bench.backend.stream);
  scape::transform(result.span()[0], NextStep{}, bench.backend.stream);
  return result;
}

/// Where masks are: the plan of a layout, and the scratch of selecting in it.
template <class B>
struct Space {
  template <scape::ShardedLayout L>
  Space(Bench<B>& bench, const L& layout)
      : bench(bench),
        plan(layout),
        tables(plan, bench.backend.memory, bench.backend.stream),
        masker(plan, tables.view(), 0),
        scratch(filled<std::byte>(bench, masker.workspace_bytes(bench.backend.stream))) {}
  explicit Space(Bench<B>& bench) : Space(bench, scape::FlatLayout(bench.elements, 1)) {}

  void select(std::span<const float> values, double density, std::span<MaskWord> words) {
    masker.select(values, density, words, scratch.span(), bench.backend.stream);
  }
  void forget() { scape::fill_values(scratch.span(), std::byte{0}, bench.backend.stream); }

  Bench<B>& bench;
  scape::MaskPlan plan;
  scape::PlanTables<typename B::Memory> tables;
  scape::TopKMasker masker;
  scape::Buffer<std::byte, typename B::Memory> scratch;
};

/// A mask at random places.
template <class B>
struct Mask {
  Mask(Space<B>& space, double density, std::uint64_t seed = 1)
      : words(space.plan.words(), space.bench.backend.memory),
        offsets(space.plan.tiles().size(), space.bench.backend.memory),
        view{space.tables.view(), words.span(), offsets.span(), space.plan.kept(density)} {
    const auto values = noise(space.bench, space.plan.size(), seed);
    space.select(values.span(), density, words.span());
    scape::count_offsets(view.plan, view.words, 0, offsets.span(), space.bench.backend.stream);
    space.bench.backend.stream.synchronize();
  }

  scape::Buffer<MaskWord, typename B::Memory> words;
  scape::Buffer<std::size_t, typename B::Memory> offsets;
  scape::MaskView view;
};

// ---- The yardsticks: copy, triad, dense AdamS

struct Triad {
  const float *b, *c;
  float* a;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const { a[i] = b[i] + 3.0f * c[i]; }
};

/// The update of an element as one would write it without scape. Second moment and rest apart, since hosts take many
/// roots at once.
struct DenseAdamS {
  float *parameters, *moments;
  const float* gradients;
  SCAPE_HOST_DEVICE float second_moment(std::size_t i) const {
    return 0.95f * moments[i] * moments[i] + 0.05f * gradients[i] * gradients[i];
  }
  SCAPE_HOST_DEVICE void apply(std::size_t i, float root) const {
    const float first = 0.9f * moments[i] + 0.1f * gradients[i];
    parameters[i] = 0.9999f * parameters[i] - 1e-3f * first / (root + 1e-8f);
    moments[i] = first;
  }
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const { apply(i, scape::square_root(second_moment(i))); }
};

template <class B>
void add_yardsticks(Bench<B>& bench) {
  bench.add("copy", -1, [&bench] {
    const auto from = noise(bench, bench.elements), to = filled<float>(bench, bench.elements);
    const double bandwidth = bench.time(8, [&] { bench.backend.copy(from.span(), to.span()); });
    bench.copy_bandwidth = std::max(bench.copy_bandwidth, bandwidth);
  });
  bench.add("triad", -1, [&bench] {
    const auto b = noise(bench, bench.elements), c = noise(bench, bench.elements, 1);
    const auto a = filled<float>(bench, bench.elements);
    bench.time(12, [&] {
      bench.backend.sweep(bench.elements, Triad{b.span().data(), c.span().data(), a.span().data()});
    });
  });
  bench.add("dense_adams", -1, [&bench] {
    const auto gradients = noise(bench, bench.elements), parameters = noise(bench, bench.elements, 1);
    const auto moments = noise(bench, bench.elements, 2);
    bench.time(20, [&] {
      bench.backend.sweep(bench.elements,
                          DenseAdamS{parameters.span().data(), moments.span().data(), gradients.span().data()});
    });
  });
}

// ---- Selecting, and what is done with bits

template <class B>
void add_select(Bench<B>& bench) {
  constexpr double one_read = 4.125;
  const auto& stream = bench.backend.stream;
  const auto none = [](Space<B>&, std::span<float>) {};
  const auto forget = [](Space<B>& space, std::span<float>) { space.forget(); };
  const auto drift = [&stream, seed = std::uint64_t{0}](Space<B>&, std::span<float> values) mutable {
    scape::for_each(values.size(), Drift{values.data(), ++seed}, stream);
  };
  const auto random = [&bench](std::size_t count) { return noise(bench, count); };

  // `before` comes before each call, untimed.
  const auto add = [&bench](const std::string& name, double density, auto layout, auto make_values, auto before) {
    bench.add("select/" + name, density, [=, &bench]() mutable {
      Space<B> space(bench, layout);
      const auto values = make_values(space.plan.size());
      const auto words = bench.template array<MaskWord>(space.plan.words());
      bench.time(
          one_read, space.plan.size(), [&] { space.select(values.span(), density, words.span()); },
          [&] { before(space, values.span()); });
    });
  };
  const scape::FlatLayout one(bench.elements, 1);
  for (const double density : {0.001, 0.01, 0.1}) {
    add("cold", density, one, random, forget);
    add("repeated", density, one, random, none);
    add("drift", density, one, random, drift);
  }
  add(
      "all_equal", 0.1, one, [&bench](std::size_t count) { return filled(bench, count, 1.0f); }, none);
  add(
      "two_values", 0.1, one,
      [&bench, &stream](std::size_t count) {
        auto values = bench.template array<float>(count);
        scape::for_each(count, TwoValues{values.span().data()}, stream);
        return values;
      },
      none);
  const std::size_t segments = std::clamp<std::size_t>(bench.elements / 1000, 1, 10'000);
  const scape::TensorLayout many(std::vector<std::size_t>(segments, 1000), 1);
  for (const double density : {0.01, 0.1}) {
    add("segments_of_1000/cold", density, many, random, forget);
    add("segments_of_1000/repeated", density, many, random, none);
    add("segments_of_1000/drift", density, many, random, drift);
  }
}

struct Exceeds {
  const float* values;
  float bound;
  SCAPE_HOST_DEVICE bool operator()(std::size_t i) const { return values[i] > bound; }
};

template <class B>
void add_bits(Bench<B>& bench) {
  using scape::BitPacker;
  const auto& stream = bench.backend.stream;
  bench.add("pack/floats", -1, [&] {
    const auto values = noise(bench, bench.elements);
    const auto words = bench.template array<MaskWord>(BitPacker::words(bench.elements));
    bench.time(4.125, [&] {
      BitPacker::pack(Exceeds{values.span().data(), 2.0f}, bench.elements, words.span(), 0, stream);
    });
  });
  bench.add("pack/bytes", -1, [&] {
    const auto flags = filled(bench, bench.elements, std::uint8_t{1});
    const auto words = bench.template array<MaskWord>(BitPacker::words(bench.elements));
    bench.time(1.125, [&] { BitPacker::pack(std::span<const std::uint8_t>(flags.span()), words.span(), 0, stream); });
  });
  bench.add("unpack", -1, [&] {
    const auto words = filled(bench, BitPacker::words(bench.elements), MaskWord{0x12345678});
    const auto flags = filled<std::uint8_t>(bench, bench.elements);
    bench.time(1.125, [&] { BitPacker::unpack(words.span(), 0, flags.span(), stream); });
  });
  bench.add("offsets", -1, [&] {
    Space<B> space(bench);
    const Mask<B> mask(space, 0.1);
    const double table = static_cast<double>(sizeof(scape::Tile) + sizeof(std::size_t)) / scape::tile_bits;
    bench.time(0.125 + table,
               [&] { BitPacker::offsets(mask.view.plan, mask.view.words, 0, mask.offsets.span(), stream); });
  });
  for (const double density : {0.001, 0.01, 0.1})
    for (const bool encodes : {true, false})
      bench.add(encodes ? "elias_fano/encode" : "elias_fano/decode", density, [=, &bench, &stream] {
        Space<B> space(bench);
        const Mask<B> mask(space, density);
        const scape::EliasFano code(bench.elements, mask.view.kept);
        const auto coded = bench.template array<MaskWord>(code.words());
        const auto scratch = bench.template array<std::byte>(code.workspace_bytes());
        const auto encode = [&] { BitPacker::encode(code, mask.words.span(), coded.span(), scratch.span(), stream); };
        const auto decode = [&] { BitPacker::decode(code, coded.span(), mask.words.span(), scratch.span(), stream); };
        encode();
        const double bytes = 0.125 + static_cast<double>(coded.bytes()) / static_cast<double>(bench.elements);
        encodes ? bench.time(bytes, encode) : bench.time(bytes, decode);
      });
}

// ---- Passes over the elements

template <class B>
void add_kept(Bench<B>& bench) {
  for (const double density : {0.001, 0.01, 0.1})
    for (const bool gathers : {true, false})
      bench.add(gathers ? "for_each_kept/gather" : "for_each_kept/scatter", density, [=, &bench] {
        Space<B> space(bench);
        const Mask<B> mask(space, density);
        const auto values = noise(bench, bench.elements);
        scape::SparseBufferReducer<typename B::Stream, typename B::Memory> reducer(mask.view.kept,
                                                                                   bench.backend.memory);
        const auto gather = [&] { reducer.gather(values.span(), mask.view, bench.backend.stream); };
        const auto scatter = [&] { reducer.scatter(mask.view, values.span(), bench.backend.stream); };
        gather();
        const double bytes = 0.125 + 4 * density;
        gathers ? bench.time(bytes + gathered<B>(density), gather) : bench.time(bytes + scattered<B>(density), scatter);
      });
  bench.add("squared_norm", -1, [&bench] {
    const auto& stream = bench.backend.stream;
    const auto values = noise(bench, bench.elements);
    const auto partials = bench.template array<double>(scape::norm_partials(bench.elements, stream));
    const auto now = scalars(bench);
    bench.time(4, [&] {
      scape::squared_norm(bench.elements, scape::detail::Values{values.span().data()}, partials.span(),
                          now.span()[0].squared_norm, stream);
    });
  });
}

// Every value kept: what it costs to send them as codes. The mean is of four ranks' codes, for as many values.
template <class B>
void add_payload(Bench<B>& bench) {
  using scape::PayloadFormat;
  const auto& stream = bench.backend.stream;
  for (const PayloadFormat format : {PayloadFormat::bfloat16, PayloadFormat::e5m2, PayloadFormat::e4m3}) {
    constexpr std::size_t ranks = 4;
    const std::size_t words =
        (bench.elements + scape::payload_block - 1) / scape::payload_block * payload_block_words(format);
    const double code = static_cast<double>(words) * 4 / static_cast<double>(bench.elements);
    const std::string name = scape::name_of(format);
    bench.add("payload/encode/" + name, -1, [=, &bench, &stream] {
      const auto values = noise(bench, bench.elements), errors = filled<float>(bench, bench.elements);
      const auto codes = bench.template array<MaskWord>(words);
      bench.time(8 + code, [&] { scape::encode_payload(format, values.span(), codes.span(), errors.span(), stream); });
    });
    bench.add("payload/average/" + name, -1, [=, &bench, &stream] {
      const auto values = noise(bench, bench.elements), errors = filled<float>(bench, bench.elements);
      const auto parts = bench.template array<MaskWord>(ranks * words), mean = bench.template array<MaskWord>(words);
      for (std::size_t rank = 0; rank < ranks; ++rank)
        scape::encode_payload(format, values.span(), parts.span().subspan(rank * words, words), errors.span(), stream);
      bench.time(8 + (ranks + 1) * code,
                 [&] { scape::average_payloads(format, parts.span(), ranks, mean.span(), errors.span(), stream); });
    });
    bench.add("payload/decode/" + name, -1, [=, &bench, &stream] {
      const auto values = noise(bench, bench.elements), errors = filled<float>(bench, bench.elements);
      const auto codes = bench.template array<MaskWord>(words);
      scape::encode_payload(format, values.span(), codes.span(), errors.span(), stream);
      bench.time(4 + code, [&] { scape::decode_payload(format, codes.span(), values.span(), stream); });
    });
  }
}

template <class Rule>
constexpr bool is_clock = std::is_same_v<Rule, scape::ClockRule>;
template <class Rule>
std::string name_of() {
  return is_clock<Rule> ? "clock" : "scape";
}

// Gradient and state read, state written; the bits; the payload, and for rule `scape` the first moments set aside,
// those that return, and the bits of the step before.
template <class Rule>
double accumulate_bytes(double density) {
  return is_clock<Rule> ? 12.125 + 4 * density : 12.25 + (density < 1 ? 12 : 8) * density;
}

// Of residuals outside a device's memory: in and out.
inline constexpr double bus_bytes = 8;

// The bits and the payload; then, at the mask, for rule `clock` parameters, first moments and clocks; for rule `scape`
// the first moments, by position, and the parameters (all of them where they decay).
template <class Rule, class B>
double update_bytes(double density, bool decays) {
  if (is_clock<Rule>) return 0.125 + 4 * density + 4 * gathered<B>(density) + 2 * gathered<B>(density, 2);
  return 0.125 + 12 * density + (decays ? 8 : 2 * gathered<B>(density));
}

// Without fusing it with another pass: what the score reads, once, and the bits, which the offsets read again.
template <class Rule>
double select_bytes(double density) {
  return density == 1 ? 0 : is_clock<Rule> ? 14.25 : 4.25;
}

/// In its second step, of which the first has left first moments.
template <class Rule, class B>
auto rule_state(Bench<B>& bench, double density, std::size_t kept, float decay = 0) {
  const auto& stream = bench.backend.stream;
  typename Rule::template State<typename B::Memory> rule(Rule{}, {.weight_decay = decay, .density = density},
                                                         bench.elements, kept, kept, bench.backend.memory, stream);
  const auto now = scalars(bench);
  for (int step = 0; step < 2; ++step) {
    rule.begin(now.span()[0], stream);
    if (const auto moments = rule.set_aside(kept); !moments.empty()) scape::fill_values(moments, 0.5f, stream);
  }
  stream.synchronize();
  return rule;
}

template <class Rule, class B>
void add_rule(Bench<B>& bench) {
  const auto& stream = bench.backend.stream;
  for (const bool has_errors : {false, true})
    for (const double density : {0.001, 0.01, 0.1, 1.0})
      bench.add("accumulate/" + name_of<Rule>() + (has_errors ? "/errors" : ""), density, [=, &bench, &stream] {
        Space<B> space(bench);
        const Mask<B> before(space, density, 1), mask(space, density, 2);
        const auto errors = filled<float>(bench, has_errors ? before.view.kept : 0);
        auto rule = rule_state<Rule>(bench, density, mask.view.kept);
        const auto gradient = noise(bench, bench.elements);
        const auto now = scalars(bench);
        const auto payload = bench.template array<float>(mask.view.kept);
        const scape::ResidualStore store(bench.elements, bench.backend.memory, stream);
        bench.time(accumulate_bytes<Rule>(density) + (has_errors ? 4 * density : 0), [&] {
          store.accumulate(std::span<const float>(gradient.span()), before.view, errors.span(), mask.view,
                           payload.span(), rule.set_aside(mask.view.kept), rule.accumulation(), now.span()[0], stream);
        });
      });
  for (const double density : {0.01, 0.1, 1.0})
    bench.add("accumulate/" + name_of<Rule>() + "/offloaded", density, [=, &bench, &stream] {
      auto& backend = bench.backend;
      Space<B> space(bench);
      const Mask<B> before(space, density, 1), mask(space, density, 2);
      auto rule = rule_state<Rule>(bench, density, mask.view.kept);
      const auto gradient = noise(bench, bench.elements);
      const auto now = scalars(bench);
      const auto payload = bench.template array<float>(mask.view.kept);
      const auto store =
          scape::Offloaded(backend.outside).template store<typename B::Stream>(space.plan, backend.memory, stream);
      bench.time(B::has_bus ? bus_bytes : accumulate_bytes<Rule>(density), [&] {
        store.accumulate(std::span<const float>(gradient.span()), before.view, {}, mask.view, payload.span(),
                         rule.set_aside(mask.view.kept), rule.accumulation(), now.span()[0], stream);
      });
    });
  for (const float decay : {0.0f, 0.1f})
    for (const double density : {0.001, 0.01, 0.1, 1.0})
      bench.add("update/" + name_of<Rule>() + (decay > 0 ? "/decay" : ""), density, [=, &bench, &stream] {
        Space<B> space(bench);
        const Mask<B> mask(space, density);
        const auto rule = rule_state<Rule>(bench, density, mask.view.kept, decay);
        const auto parameters = noise(bench, bench.elements), state = noise(bench, bench.elements, 1);
        const auto payload = noise(bench, mask.view.kept, 2);
        const auto now = scalars(bench);
        bench.time(
            update_bytes<Rule, B>(density, decay > 0), bench.elements,
            [&] {
              scape::update(mask.view, rule.update(parameters.span(), state.span(), payload.span()), now.span()[0],
                            stream);
            },
            [&] { scape::transform(now.span()[0], NextStep{}, stream); });
      });
}

// ---- The whole step

/// Ranks that all do as this one does: nothing travels.
template <class S>
struct Alike {
  int ranks;
  int rank() const { return 0; }
  int size() const { return ranks; }
  std::uint64_t bytes_sent() const { return 0; }
  void all_reduce_mean(std::span<const float> in, std::span<float> out, const S& stream) { copy(in, out, stream); }
  void reduce_scatter_mean(std::span<const float> in, std::span<float> out, const S& stream) {
    copy(in.first(out.size()), out, stream);
  }
  void all_gather(std::span<const MaskWord> own, std::span<MaskWord> all, const S& stream) {
    for (std::size_t begin = 0; begin < all.size(); begin += own.size())
      copy(own, all.subspan(begin, own.size()), stream);
  }

 private:
  template <class T>
  void copy(std::span<const T> in, std::span<T> out, const S& stream) {
    if (in.data() != out.data()) scape::copy_values(in, out, stream);
  }
};

template <class Rule, class B>
void add_step(Bench<B>& bench) {
  for (const int ranks : {1, 8})
    for (const double density : {0.01, 0.1, 1.0})
      bench.add("step/" + name_of<Rule>() + (ranks == 1 ? "" : "/of_8_ranks"), density, [=, &bench] {
        constexpr std::size_t shift = 4096, gradients = 16;  // new gradients each step: windows on one array
        auto& backend = bench.backend;
        const auto noises = noise(bench, bench.elements + shift * gradients);
        const auto parameters = noise(bench, bench.elements, 1);
        Alike<typename B::Stream> communicator{ranks};
        scape::AdamS optimizer(scape::FlatLayout(bench.elements, ranks), communicator, backend.memory, backend.stream,
                               backend.side, {.weight_decay = 0.1f, .density = density}, Rule{});
        const auto step = [&] {
          const auto gradient = noises.span().subspan(optimizer.steps() % gradients * shift, bench.elements);
          optimizer.step(gradient, parameters.span(), backend.stream);
        };
        for (std::size_t i = 0; i < B::steps_before; ++i) step();
        bench.time(accumulate_bytes<Rule>(density) + select_bytes<Rule>(density) / ranks +
                       update_bytes<Rule, B>(density, true),
                   step);
      });
}

template <class B>
void add_benchmarks(Bench<B>& bench) {
  add_yardsticks(bench);
  add_rule<scape::ScapeRule>(bench);
  add_rule<scape::ClockRule>(bench);
  add_select(bench);
  add_bits(bench);
  add_kept(bench);
  add_payload(bench);
  add_step<scape::ScapeRule>(bench);
  add_step<scape::ClockRule>(bench);
}
