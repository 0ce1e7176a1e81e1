#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>
#include <scape/host/loop.hpp>
#include <scape/host/stream.hpp>
#include <scape/payload_format.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

namespace scape::inline v0 {
namespace detail {

// The values of a group; those behind the payload's end are 0.
struct GroupValues {
  float values[scale_group] = {};
  std::size_t begin, count;

  GroupValues(std::size_t group, std::size_t size)
      : begin(group * scale_group), count(std::min(scale_group, size - std::min(size, begin))) {}
  GroupValues(PayloadParts parts, std::size_t group) : GroupValues(group % parts.groups, parts.stride) {
    begin += group / parts.groups * parts.stride;
  }
  void load(std::span<const float> from) {
    if (count != 0) std::memcpy(values, from.data() + begin, count * sizeof(float));
  }
  void store(std::span<float> to) const {
    if (count != 0) std::memcpy(to.data() + begin, values, count * sizeof(float));
  }
};

template <class T>
struct GroupCodes {
  T codes[scale_group];
  std::uint8_t scale = 0;

  void load(const MaskWord* from, std::size_t group) {
    const std::byte* const bytes = reinterpret_cast<const std::byte*>(from);
    std::memcpy(codes, bytes + codes_of_group<T>(group), sizeof(codes));
    if constexpr (PayloadCode<T>::has_scale) std::memcpy(&scale, bytes + scale_of_group<T>(group), 1);
  }
  void store(MaskWord* to, std::size_t group) const {
    std::byte* const bytes = reinterpret_cast<std::byte*>(to);
    std::memcpy(bytes + codes_of_group<T>(group), codes, sizeof(codes));
    if constexpr (PayloadCode<T>::has_scale) std::memcpy(bytes + scale_of_group<T>(group), &scale, 1);
  }
  float decode(std::size_t i) const { return PayloadCode<T>::decode(codes[i], scale); }

  // Leaves in `values` what was rounded away.
  void encode(float* values) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < scale_group; ++i) largest = std::max(largest, finite_magnitude(values[i]));
    scale = static_cast<std::uint8_t>(PayloadCode<T>::scale(largest));
    for (std::size_t i = 0; i < scale_group; ++i) {
      codes[i] = PayloadCode<T>::encode(values[i], scale);
      values[i] = rounding_error(values[i], decode(i));
    }
  }
};

template <class T>
SCAPE_HOST_LOOP void encode_group(std::span<const float> payload, PayloadParts parts, MaskWord* codes,
                                  std::span<float> errors, std::size_t group) {
  GroupValues values(parts, group);
  GroupCodes<T> coded;
  values.load(payload);
  coded.encode(values.values);
  coded.store(codes, group);
  values.store(errors);
}

// Leaves the mean of all ranks' codes of a group in `sum`.
template <class T>
void average_codes(std::span<const MaskWord> parts, std::size_t ranks, std::size_t group, float* sum) {
  const std::size_t stride = parts.size() / ranks;
  const float divisor = static_cast<float>(ranks);
  GroupCodes<T> coded;
  coded.load(parts.data(), group);
  for (std::size_t i = 0; i < scale_group; ++i) sum[i] = coded.decode(i);
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    coded.load(parts.data() + rank * stride, group);
    for (std::size_t i = 0; i < scale_group; ++i) sum[i] = add(sum[i], coded.decode(i));
  }
  for (std::size_t i = 0; i < scale_group; ++i) sum[i] = divide(sum[i], divisor);
}

template <class T>
SCAPE_HOST_LOOP void average_group(std::span<const MaskWord> parts, std::size_t ranks, std::span<float> mean,
                                   std::size_t group) {
  GroupValues sum(group, mean.size());
  average_codes<T>(parts, ranks, group, sum.values);
  for (float& value : sum.values) value = with_one_nan(value);
  sum.store(mean);
}

template <class T>
SCAPE_HOST_LOOP void average_group(std::span<const MaskWord> parts, std::size_t ranks, MaskWord* mean,
                                   std::span<float> errors, std::size_t group) {
  const float divisor = static_cast<float>(ranks);
  GroupValues sum(group, errors.size()), error(group, errors.size());
  GroupCodes<T> coded;
  average_codes<T>(parts, ranks, group, sum.values);
  coded.encode(sum.values);
  coded.store(mean, group);
  error.load(errors);
  for (std::size_t i = 0; i < scale_group; ++i) error.values[i] = multiply_add(divisor, sum.values[i], error.values[i]);
  error.store(errors);
}

template <class T>
SCAPE_HOST_LOOP void decode_group(const MaskWord* codes, std::span<float> payload, std::size_t group) {
  GroupValues values(group, payload.size());
  GroupCodes<T> coded;
  coded.load(codes, group);
  for (std::size_t i = 0; i < scale_group; ++i) values.values[i] = coded.decode(i);
  values.store(payload);
}

// f(std::type_identity of the codes' type, group) for every group of so many words of code.
template <class F>
void for_each_group(PayloadFormat format, std::size_t words, HostPool& pool, F f) {
  with_code_of(format, [&](auto type) {
    constexpr std::size_t run = 8 * groups_per_block;
    const std::size_t groups = words / payload_block_words(format) * groups_per_block;
    pool.run((groups + run - 1) / run, [&](std::size_t i) {
      for (std::size_t group = i * run; group < std::min(groups, (i + 1) * run); ++group) f(type, group);
    });
  });
}

}  // namespace detail

/// codes = the payload in that format, which is not float32, in whole blocks: codes may hold more than the payload, and
/// then holds zeros. errors, as long as the payload: what was rounded away, exactly; 0 for a NaN or an infinity. With
/// `parts` above 1 payload and codes hold as many parts of equal size, each in blocks of its own.
inline void encode_payload(PayloadFormat format, std::span<const float> payload, std::size_t parts,
                           std::span<MaskWord> codes, std::span<float> errors, const HostStream& stream) {
  const detail::PayloadParts split(format, payload.size(), codes.size(), parts);
  stream.enqueue([=, &pool = stream.pool()] {
    detail::for_each_group(format, codes.size(), pool, [&]<class T>(std::type_identity<T>, std::size_t group) {
      detail::encode_group<T>(payload, split, codes.data(), errors, group);
    });
  });
}
inline void encode_payload(PayloadFormat format, std::span<const float> payload, std::span<MaskWord> codes,
                           std::span<float> errors, const HostStream& stream) {
  encode_payload(format, payload, 1, codes, errors, stream);
}

/// mean = the code of the mean of all ranks' codes, which lie in parts, by rank: decoded and added in the order of the
/// ranks in float32, divided, and coded again. errors, which may end before the mean does, grow by `ranks` times what
/// that rounded away.
inline void average_payloads(PayloadFormat format, std::span<const MaskWord> parts, std::size_t ranks,
                             std::span<MaskWord> mean, std::span<float> errors, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    detail::for_each_group(format, mean.size(), pool, [&]<class T>(std::type_identity<T>, std::size_t group) {
      detail::average_group<T>(parts, ranks, mean.data(), errors, group);
    });
  });
}

/// mean = the same mean, as float32 and not coded again; it may end before its code would. Every NaN is the same.
inline void average_payloads(PayloadFormat format, std::span<const MaskWord> parts, std::size_t ranks,
                             std::span<float> mean, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    detail::for_each_group(format, parts.size() / ranks, pool, [&]<class T>(std::type_identity<T>, std::size_t group) {
      detail::average_group<T>(parts, ranks, mean, group);
    });
  });
}

/// payload = what the codes stand for; it may end before they do.
inline void decode_payload(PayloadFormat format, std::span<const MaskWord> codes, std::span<float> payload,
                           const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    detail::for_each_group(format, codes.size(), pool, [&]<class T>(std::type_identity<T>, std::size_t group) {
      detail::decode_group<T>(codes.data(), payload, group);
    });
  });
}

}  // namespace scape::inline v0
