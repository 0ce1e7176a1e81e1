#pragma once

#include <scape/arithmetic.hpp>
#include <scape/gradient.hpp>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/step_scalars.hpp>
#include <scape/stream.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace scape::inline v0 {

/// How a gradient g joins the state a of its element in plain error feedback: what is not sent is kept and added to the
/// next gradient. A rule with other members of these names goes in its place. It may have `moment`, of which the value
/// is set aside by payload position, and `returned`: an array, or null, of what stands for the states of the elements
/// kept before, by that mask's positions.
struct ErrorFeedback {
  SCAPE_HOST_DEVICE float state(float g, float a, bool, bool is_kept) const { return choose(is_kept, 0.0f, add(a, g)); }
  SCAPE_HOST_DEVICE float payload(float g, float a, bool) const { return add(a, g); }
};

namespace detail {

template <class Rule>
const float* returned_by(const Rule& rule) {
  if constexpr (requires { rule.returned; })
    return rule.returned;
  else
    return nullptr;
}

template <class G>
struct AddTo {
  float* values;
  const G* gradient;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const {
    values[i] = scape::add(values[i], static_cast<float>(gradient[i]));
  }
};
template <class G>
struct AddScaled {
  float* values;
  ScaledGradient<G> gradient;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const { values[i] = scape::add(values[i], gradient(i)); }
};
// The same in chosen tiles, 4096 places each.
template <class G>
struct AddScaledInTiles {
  const Tile* tiles;
  const std::uint32_t* chosen;
  AddScaled<G> add;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const {
    const Tile& tile = tiles[chosen[i / tile_bits]];
    if (i % tile_bits < tile.count) add(tile.element + i % tile_bits);
  }
};
// Behind AddScaled, at the mask: the payload grows, and the state is what the rule leaves of a kept element's.
template <class G, class Rule>
struct AddToPayload {
  float *values, *payload;
  ScaledGradient<G> gradient;
  Rule rule;
  SCAPE_HOST_DEVICE void operator()(std::size_t element, std::size_t position) const {
    payload[position] = scape::add(payload[position], gradient(element));
    values[element] = rule.state(0.0f, values[element], false, true);
  }
};
struct Clear {
  float* values;
  SCAPE_HOST_DEVICE void operator()(std::size_t element, std::size_t) const { values[element] = 0; }
};

}  // namespace detail

/// What was not sent yet: the array that every gradient is added to.
///
/// Owns 4 bytes a parameter, zero at first, in the memory of M. All work is enqueued on the stream that is given; the
/// gradient, and the store itself, must stay until the stream has passed; the constructor waits. Accumulating moves 12
/// bytes a parameter (gradient and state read, state written) and two bits, and for each kept element 4 more, or 12
/// where first moments are set aside and return.
template <MemoryResource M>
class ResidualStore {
 public:
  template <Stream S>
  ResidualStore(std::size_t size, M& memory, const S& stream) : values_(size, memory) {
    fill_values(values_.span(), 0.0f, stream);
    stream.synchronize();
  }

  std::span<float> values() const noexcept { return values_.span(); }

  /// Adds the gradient, gathers the kept elements into `payload` (mask.kept long, by position) and `moments` (the same,
  /// or empty for a rule without), and leaves what the rule says. `before` is the mask of the step before; `errors`
  /// (before.kept long, by its positions, or empty) what of that step's payload was rounded away, which counts as
  /// gradient.
  template <class G, class Rule, Stream S>
  void accumulate(std::span<const G> gradient, MaskView before, std::span<const float> errors, MaskView mask,
                  std::span<float> payload, std::span<float> moments, const Rule& rule, const StepScalars& scalars,
                  const S& stream) const {
    check(gradient, before, errors, mask, payload, moments, rule);
    accumulate_gradient(gradient, values(), before, errors, mask, payload, moments, rule, scalars, stream);
  }

  /// The same as a functor of a tile's number, to be called once for each by other work of the stream, such as
  /// TopKMasker::select. Not every stream has it: HostStream has.
  template <class G, class Rule, Stream S>
  auto accumulation(std::span<const G> gradient, MaskView before, std::span<const float> errors, MaskView mask,
                    std::span<float> payload, std::span<float> moments, const Rule& rule, const StepScalars& scalars,
                    const S& stream) const requires(requires {
    tile_accumulation(gradient, payload, before, errors, mask, payload, moments, rule, scalars, stream);
  }) {
    check(gradient, before, errors, mask, payload, moments, rule);
    return tile_accumulation(gradient, values(), before, errors, mask, payload, moments, rule, scalars, stream);
  }

  /// values += gradient, for algorithms that select from the sum before they send.
  template <class G, Stream S>
  void add(std::span<const G> gradient, const S& stream) const {
    expects(gradient.size() == values_.size(), "gradient.size()", gradient.size(), "must be the store's size, ",
            values_.size());
    for_each(values_.size(), detail::AddTo<G>{values_.span().data(), gradient.data()}, stream);
  }

  /// One more gradient, scaled, of a step of which none was accumulated yet.
  template <class G, Stream S>
  void add(std::span<const G> gradient, const StepScalars& scalars, const S& stream) const {
    expects(gradient.size() == values_.size(), "gradient.size()", gradient.size(), "must be the store's size, ",
            values_.size());
    for_each(values_.size(), detail::AddScaled<G>{values_.span().data(), {gradient.data(), &scalars}}, stream);
  }

  /// The same where one was, in the tiles that the mask's passes visit: what it leaves at the mask goes to the payload,
  /// too.
  template <class G, class Rule, Stream S>
  void add(std::span<const G> gradient, MaskView mask, std::span<float> payload, const Rule& rule,
           const StepScalars& scalars, const S& stream) const {
    if (mask.chosen.empty())
      add(gradient, scalars, stream);
    else
      for_each(mask.visits() * tile_bits,
               detail::AddScaledInTiles<G>{
                   mask.plan.tiles.data(), mask.chosen.data(), {values_.span().data(), {gradient.data(), &scalars}}},
               stream);
    expects(payload.size() >= mask.kept, "payload.size()", payload.size(), "must be at least the mask's ", mask.kept);
    for_each_kept(
        mask, detail::AddToPayload<G, Rule>{values_.span().data(), payload.data(), {gradient.data(), &scalars}, rule},
        stream);
  }

  /// values = 0 at the mask: they have been sent.
  template <Stream S>
  void release(MaskView sent, const S& stream) const {
    for_each_kept(sent, detail::Clear{values_.span().data()}, stream);
  }

 private:
  template <class G, class Rule>
  void check(std::span<const G> gradient, const MaskView& before, std::span<const float> errors, const MaskView& mask,
             std::span<float> payload, std::span<float> moments, const Rule& rule) const {
    expects(gradient.size() == values_.size(), "gradient.size()", gradient.size(), "must be the store's size, ",
            values_.size());
    expects(payload.size() >= mask.kept, "payload.size()", payload.size(), "must be at least the mask's ", mask.kept);
    expects(errors.empty() || errors.size() >= before.kept, "errors.size()", errors.size(),
            "must be 0 or at least the mask before's ", before.kept);
    if constexpr (requires { rule.moment(0.0f, true); })
      expects(moments.size() >= mask.kept, "moments.size()", moments.size(), "must be at least the mask's ", mask.kept);
  }

  Buffer<float, M> values_;
};

}  // namespace scape::inline v0
