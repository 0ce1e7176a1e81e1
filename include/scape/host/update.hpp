#pragma once

#include <scape/arithmetic.hpp>
#include <scape/host/join.hpp>
#include <scape/host/loop.hpp>
#include <scape/host/set_bits.hpp>
#include <scape/host/square_roots.hpp>
#include <scape/host/stream.hpp>
#include <scape/mask_plan.hpp>
#include <scape/residual_store.hpp>
#include <scape/step_scalars.hpp>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace scape::inline v0 {

namespace detail {

// What a tile's gradient is, scaled, at the `place`-th element of the word that begins at `first`.
template <class G>
struct TileGradient {
  const G* values;
  float scale;

  void load(std::size_t, std::size_t, MaskWord) {}
  float operator()(std::size_t first, std::size_t place) const {
    return multiply(static_cast<float>(values[first + place]), scale);
  }
};
// The same with the errors of the elements that were kept, which are next to each other: load() goes from word to word.
template <class G>
struct TileGradientAndErrors {
  TileGradient<G> gradient;
  const float* errors;
  float sums[word_bits] = {};

  void load(std::size_t first, std::size_t count, MaskWord was) {
    for (std::size_t i = 0; i < count; ++i) sums[i] = gradient(first, i);
    if (was == ~MaskWord{0}) {
      for (std::size_t i = 0; i < word_bits; ++i) sums[i] = add(sums[i], errors[i]);
      errors += word_bits;
    } else {
      for (; was != 0; was &= was - 1) {
        float& sum = sums[std::countr_zero(was)];
        sum = add(sum, *errors++);
      }
    }
  }
  float operator()(std::size_t, std::size_t place) const { return sums[place]; }
};

// A tile's states, word by word: where those of its `count` elements are.
struct TileState {
  const float* values;

  const float* load(std::size_t first, std::size_t, MaskWord) { return values + first; }
};
// The same where what stands for the states of kept elements is next to each other elsewhere.
struct TileStateAndReturned {
  const float *values, *returned;
  float joined[word_bits] = {};

  const float* load(std::size_t first, std::size_t count, MaskWord was) {
    if (was == 0) return values + first;
    const float* const here = returned;
    returned += std::popcount(was);
    if (was == ~MaskWord{0}) return here;
    join(values + first, count, was, here, joined);
    return joined;
  }
};

template <class Gradient, class State, class F>
SCAPE_HOST_LOOP void accumulate_tile(const Tile& tile, Gradient gradient, State state_before, float* state,
                                     const MaskWord* was, const MaskWord* is, float* payload, float* moments, F rule) {
  state += tile.element;
  was += tile.bit / word_bits;
  is += tile.bit / word_bits;
  const auto kept = [&](std::size_t first, std::size_t place, float a, std::size_t position, bool was_kept) {
    payload[position] = rule.payload(gradient(first, place), a, was_kept);
    if constexpr (requires { rule.moment(a, was_kept); }) moments[position] = rule.moment(a, was_kept);
  };
  std::size_t position = 0;
  std::size_t first = 0;
  for (; first + word_bits <= tile.count; first += word_bits, ++was, ++is) {
    const MaskWord before = *was, now = *is;
    const float* const a = state_before.load(first, word_bits, before);
    gradient.load(first, word_bits, before);
    if (now == ~MaskWord{0}) {
      SCAPE_INDEPENDENT_ITERATIONS
      for (std::size_t i = 0; i < word_bits; ++i) kept(first, i, a[i], position + i, before >> i & 1);
      position += word_bits;
    } else {
      for (MaskWord bits = now; bits != 0; bits &= bits - 1) {
        const std::size_t i = static_cast<std::size_t>(std::countr_zero(bits));
        kept(first, i, a[i], position++, before >> i & 1);
      }
    }
    SCAPE_INDEPENDENT_ITERATIONS
    for (std::size_t i = 0; i < word_bits; ++i)
      state[first + i] = rule.state(gradient(first, i), a[i], before >> i & 1, now >> i & 1);
  }
  if (first == tile.count) return;
  const float* const a = state_before.load(first, tile.count - first, *was);
  gradient.load(first, tile.count - first, *was);
  for (std::size_t i = 0; first + i < tile.count; ++i) {
    const bool was_kept = *was >> i & 1, is_kept = *is >> i & 1;
    if (is_kept) kept(first, i, a[i], position++, was_kept);
    state[first + i] = rule.state(gradient(first, i), a[i], was_kept, is_kept);
  }
}

// Every kept element of a tile: full(element, position) for each 32 that a word full of ones stands for, one(element,
// position) for the others.
template <class Full, class One>
SCAPE_HOST_LOOP void visit_kept(const Tile& tile, const MaskWord* words, std::size_t position, Full full, One one) {
  words += tile.bit / word_bits;
  for (std::size_t first = 0; first < tile.count; first += word_bits, ++words) {
    const std::size_t element = tile.element + first;
    if (*words == ~MaskWord{0}) {
      full(element, position);
      position += word_bits;
    } else {
      for (MaskWord bits = *words; bits != 0; bits &= bits - 1)
        one(element + static_cast<std::size_t>(std::countr_zero(bits)), position++);
    }
  }
}

// accumulate_gradient's work on one tile.
template <class G, class F>
struct AccumulateTile {
  const G* gradient;
  float* state;
  const MaskWord* before;
  const std::size_t* places;  // of what was kept
  const float* errors;
  const Tile* tiles;
  const MaskWord* mask;
  const std::size_t* offsets;
  float *payload, *moments;
  F rule;
  const StepScalars* scalars;

  void operator()(std::size_t i) const {
    const Tile& tile = tiles[i];
    const std::size_t offset = offsets[i];
    const auto accumulate = [&](auto of_tile, auto state_before) {
      accumulate_tile(tile, of_tile, state_before, state, before, mask, payload + offset,
                      moments == nullptr ? nullptr : moments + offset, rule);
    };
    const auto accumulate_with = [&](auto of_tile) {
      const float* const values = state + tile.element;
      if constexpr (requires(F f) { f.returned; })
        if (const float* const returned = returned_by(rule); returned != nullptr)
          return accumulate(of_tile, TileStateAndReturned{values, returned + places[i]});
      accumulate(of_tile, TileState{values});
    };
    const TileGradient<G> of_tile{gradient + tile.element, scalars->gradient_scale};
    if (errors == nullptr)
      accumulate_with(of_tile);
    else
      accumulate_with(TileGradientAndErrors<G>{of_tile, errors + places[i]});
  }
};

// The kept elements element_of(0) to element_of(count - 1), at payload positions from `position` on.
template <class F, class Elements>
void update_batch_of(const F& rule, Elements element_of, std::size_t position, std::size_t count, bool decay,
                     const StepScalars& now) {
  float roots[update_batch] = {};
  SCAPE_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < count; ++i) roots[i] = rule.second_moment(element_of(i), position + i, now);
  take_square_roots(roots);
  SCAPE_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < count; ++i) rule.kept(element_of(i), position + i, decay, roots[i], now);
}

template <class F>
SCAPE_HOST_LOOP void update_every(const Tile& tile, StepScalars now, F rule) {
  SCAPE_INDEPENDENT_ITERATIONS
  for (std::size_t i = tile.element; i < tile.element + tile.count; ++i) rule.every(i, now);
}

// A tile of which all is kept; `every`: what is done for every element before.
template <class F>
SCAPE_HOST_LOOP void update_all(const Tile& tile, std::size_t position, bool every, bool decay, StepScalars now,
                                F rule) {
  for (std::size_t first = 0; first < tile.count; first += update_batch) {
    const std::size_t begin = tile.element + first, count = std::min(update_batch, tile.count - first);
    if (every) {
      SCAPE_INDEPENDENT_ITERATIONS
      for (std::size_t i = begin; i < begin + count; ++i) rule.every(i, now);
    }
    const auto element_of = [=](std::size_t i) { return begin + i; };
    if (count == update_batch)  // known to the compiler
      update_batch_of(rule, element_of, position + first, update_batch, decay, now);
    else
      update_batch_of(rule, element_of, position + first, count, decay, now);
  }
}

template <class F>
SCAPE_HOST_LOOP void update_listed(const Tile& tile, const SetBits& kept, std::size_t position, bool decay,
                                   StepScalars now, F rule) {
  if constexpr (requires { rule.step(position, 0.0f, now); })  // vectors do all but the last loop
    if (rule.splits()) {
      for (std::size_t begin = 0; begin < kept.size(); begin += update_batch, position += update_batch) {
        const std::size_t count = std::min(update_batch, kept.size() - begin);
        float roots[update_batch] = {};
        SCAPE_INDEPENDENT_ITERATIONS
        for (std::size_t i = 0; i < count; ++i) roots[i] = rule.second_moment(0, position + i, now);
        take_square_roots(roots);
        SCAPE_INDEPENDENT_ITERATIONS
        for (std::size_t i = 0; i < count; ++i) roots[i] = rule.step(position + i, roots[i], now);
        for (std::size_t i = 0; i < count; ++i) rule.move(tile.element + kept[begin + i], roots[i]);
      }
      return;
    }
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const std::size_t element = tile.element + kept[i];
    rule.kept(element, position + i, decay, square_root(rule.second_moment(element, position + i, now)), now);
  }
}

// Tiles that a thread takes at once: neighbours, since memory delivers long runs faster.
inline std::size_t tiles_at_once(std::size_t tiles, const HostPool& pool) {
  return std::clamp<std::size_t>(tiles / (8 * static_cast<std::size_t>(pool.threads())), 1, 16);
}

// In an order that does not depend on threads: lanes, then halves.
inline constexpr std::size_t lanes = 256;

template <class F>
SCAPE_HOST_LOOP double squares_of_run(std::size_t begin, std::size_t count, F value) {
  double sums[lanes] = {};
  std::size_t first = 0;
  for (; first + lanes <= count; first += lanes)
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      const double x = static_cast<double>(value(begin + first + lane));
      sums[lane] += x * x;
    }
  for (std::size_t lane = 0; first + lane < count; ++lane) {
    const double x = static_cast<double>(value(begin + first + lane));
    sums[lane] += x * x;
  }
  for (std::size_t half = lanes / 2; half != 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

SCAPE_HOST_LOOP inline double sum_of_run(const double* values, std::size_t count) {
  double sums[lanes] = {};
  for (std::size_t i = 0; i < count; ++i) sums[i % lanes] += values[i];
  for (std::size_t half = lanes / 2; half != 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

}  // namespace detail

/// Runs f(scalars) when the stream gets here.
template <class F>
void transform(StepScalars& scalars, F f, const HostStream& stream) {
  stream.enqueue([&scalars, f] { f(scalars); });
}

/// accumulate_gradient for one tile at a time: a functor of the tile's number, for work that follows on the stream and
/// goes on with what it finds in the cache.
template <class G, class F>
auto tile_accumulation(std::span<const G> gradient, std::span<float> state, MaskView before,
                       std::span<const float> errors, MaskView mask, std::span<float> payload, std::span<float> moments,
                       F rule, const StepScalars& scalars, const HostStream&) {
  return detail::AccumulateTile<G, F>{gradient.data(),
                                      state.data(),
                                      before.words.data(),
                                      before.offsets.data(),
                                      errors.empty() ? nullptr : errors.data(),
                                      mask.plan.tiles.data(),
                                      mask.words.data(),
                                      mask.offsets.data(),
                                      payload.data(),
                                      moments.empty() ? nullptr : moments.data(),
                                      rule,
                                      &scalars};
}

/// The pass over gradient and state: for every element with gradient g = scale * gradient[i] and state a
///   state[i] = rule.state(g, a, was_kept, is_kept)
/// and for every kept one, at its payload position p
///   payload[p] = rule.payload(g, a, was_kept), moments[p] = rule.moment(a, was_kept)
/// (the last only where the rule has that member), with was_kept from `before`, is_kept from `mask`. Where the rule has
/// an array `returned`, a is returned[q] where the element was kept, at position q. `errors`, where it
/// is not empty, is what payloads have rounded away at `before`, by its positions, and is added to g.
/// Reads gradient and state once and writes state once.
template <class G, class F>
void accumulate_gradient(std::span<const G> gradient, std::span<float> state, MaskView before,
                         std::span<const float> errors, MaskView mask, std::span<float> payload,
                         std::span<float> moments, F rule, const StepScalars& scalars, const HostStream& stream) {
  const auto accumulate =
      tile_accumulation(gradient, state, before, errors, mask, payload, moments, rule, scalars, stream);
  stream.enqueue([accumulate, mask, &pool = stream.pool()] {
    const std::size_t tiles = mask.visits(), run = detail::tiles_at_once(tiles, pool);
    pool.run((tiles + run - 1) / run, [&](std::size_t r) {
      for (std::size_t i = r * run; i < std::min(tiles, (r + 1) * run); ++i) accumulate(mask.visited(i));
    });
  });
}

/// Sets the bits of all elements.
inline void fill_mask(PlanView plan, std::span<MaskWord> words, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    pool.run(plan.tiles.size(), [&](std::size_t i) {
      const Tile& tile = plan.tiles[i];
      const auto first = words.begin() + static_cast<std::ptrdiff_t>(tile.bit / word_bits);
      const auto last = std::fill_n(first, tile.count / word_bits, ~MaskWord{0});
      if (tile.count % word_bits != 0) *last = (MaskWord{1} << tile.count % word_bits) - 1;
    });
  });
}

/// f(element, position) for every kept element, at its place in the payload.
template <class F>
void for_each_kept(MaskView mask, F f, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    pool.run(mask.visits(), [&](std::size_t visit) {
      const std::size_t tile = mask.visited(visit);
      const auto full = [f](std::size_t element, std::size_t position) {
        SCAPE_INDEPENDENT_ITERATIONS
        for (std::size_t i = 0; i < word_bits; ++i) f(element + i, position + i);
      };
      detail::visit_kept(mask.plan.tiles[tile], mask.words.data(), mask.offsets[tile], full, f);
    });
  });
}

/// For every element of a segment where rule.needs_every(segment): rule.every(element, scalars); then for every kept
/// element: rule.kept(element, position, segment.decay, root, scalars), where root is the square root of
/// rule.second_moment(element, position, scalars). Before each tile rule.shift is set to Tile::own - Tile::element.
/// A rule may have prefetch(element), too, which fetches what belongs to an element that is kept soon.
template <class F>
void update(MaskView mask, F of_tiles, const StepScalars& scalars, const HostStream& stream) {
  stream.enqueue([=, &scalars, &pool = stream.pool()] {
    const StepScalars now = scalars;
    const std::size_t tiles = mask.visits(), run = detail::tiles_at_once(tiles, pool);
    pool.run((tiles + run - 1) / run, [&](std::size_t r) {
      const std::size_t begin = r * run, end = std::min(tiles, begin + run);
      detail::SetBits kept[2];
      F rule = of_tiles;
      for (std::size_t i = begin; i <= end; ++i) {
        if (i != end) {  // one tile ahead
          const Tile& tile = mask.plan.tiles[mask.visited(i)];
          rule.shift = tile.own - tile.element;
          kept[i % 2].find(mask.words.data() + tile.bit / word_bits, words_for(tile.count));
          if constexpr (requires { rule.prefetch(tile.element); }) {
            if (kept[i % 2].size() < tile.count / 16)  // far from one another
              for (const std::size_t place : kept[i % 2]) rule.prefetch(tile.element + place);
          }
        }
        if (i == begin) continue;
        const std::size_t visited = mask.visited(i - 1);
        const Tile& tile = mask.plan.tiles[visited];
        const Segment& segment = mask.plan.segments[tile.segment];
        const bool every = rule.needs_every(segment);
        rule.shift = tile.own - tile.element;
        const detail::SetBits& bits = kept[(i - 1) % 2];
        if (bits.size() == tile.count) {
          const auto update_all = [&](const auto& same) {
            detail::update_all(tile, mask.offsets[visited], every, segment.decay, now, same);
          };
          if constexpr (requires { rule.for_run(tile.element, tile.count, now, update_all); })
            rule.for_run(tile.element, tile.count, now, update_all);
          else
            update_all(rule);
        } else {
          if (every) detail::update_every(tile, now, rule);
          detail::update_listed(tile, bits, mask.offsets[visited], segment.decay, now, rule);
        }
      }
    });
  });
}

/// f(i) for every i below count.
template <class F>
void for_each(std::size_t count, F f, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    pool.run((count + tile_bits - 1) / tile_bits, [&](std::size_t run) {
      const std::size_t end = std::min(count, (run + 1) * tile_bits);
      for (std::size_t i = run * tile_bits; i < end; ++i) f(i);
    });
  });
}

/// f(i, scalars) for every i below count, in the steps in which f.is_due(scalars).
template <class F>
void for_each_if_due(std::size_t count, F f, const StepScalars& scalars, const HostStream& stream) {
  stream.enqueue([=, &scalars, &pool = stream.pool()] {
    if (!f.is_due(scalars)) return;
    pool.run((count + tile_bits - 1) / tile_bits, [&](std::size_t run) {
      const std::size_t end = std::min(count, (run + 1) * tile_bits);
      for (std::size_t i = run * tile_bits; i < end; ++i) f(i, scalars);
    });
  });
}

/// Doubles that squared_norm and mask_overlap need as scratch for `count` values.
inline std::size_t norm_partials(std::size_t count, const HostStream&) { return (count + tile_bits - 1) / tile_bits; }

/// result = sum of value(i)^2 over i < count, in double and in a fixed order.
template <class F>
void squared_norm(std::size_t count, F value, std::span<double> partials, double& result, const HostStream& stream) {
  stream.enqueue([=, &result, &pool = stream.pool()] {
    const std::size_t runs = (count + tile_bits - 1) / tile_bits;
    pool.run(runs, [&](std::size_t i) {
      partials[i] = detail::squares_of_run(i * tile_bits, std::min(tile_bits, count - i * tile_bits), value);
    });
    result = detail::sum_of_run(partials.data(), runs);
  });
}

/// Of the elements kept now and in the mask before: adds how many there are to scalars.overlap. By tile, into partials,
/// two for each: the squares of the payload at those elements, and at all. sum_overlap() adds those up.
inline void mask_overlap(std::span<const MaskWord> before, MaskView mask, std::span<const float> payload,
                         std::span<double> partials, StepScalars& scalars, const HostStream& stream) {
  stream.enqueue([=, &scalars, &pool = stream.pool()] {
    std::atomic<std::uint64_t> overlap = 0;
    pool.run(mask.visits(), [&](std::size_t visit) {
      const std::size_t i = mask.visited(visit);
      const Tile& tile = mask.plan.tiles[i];
      std::size_t position = mask.offsets[i];
      std::uint64_t count = 0;
      double squares = 0, all = 0;
      for (std::size_t word = tile.bit / word_bits; word < tile.bit / word_bits + words_for(tile.count); ++word) {
        const MaskWord both = mask.words[word] & before[word];
        count += static_cast<std::uint64_t>(std::popcount(both));
        for (MaskWord bits = mask.words[word]; bits != 0; bits &= bits - 1, ++position) {
          const double x = static_cast<double>(payload[position]);
          if (both >> std::countr_zero(bits) & 1) squares += x * x;
          all += x * x;
        }
      }
      partials[i] = squares;
      partials[mask.plan.tiles.size() + i] = all;
      overlap += count;
    });
    scalars.overlap += overlap;
  });
}

/// What mask_overlap left of all tiles: squared_overlap and squared_payload, in a fixed order.
inline void sum_overlap(std::size_t tiles, std::span<const double> partials, StepScalars& scalars,
                        const HostStream& stream) {
  stream.enqueue([=, &scalars] {
    scalars.squared_overlap = detail::sum_of_run(partials.data(), tiles);
    scalars.squared_payload = detail::sum_of_run(partials.data() + tiles, tiles);
  });
}

}  // namespace scape::inline v0
