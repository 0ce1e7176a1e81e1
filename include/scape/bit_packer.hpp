#pragma once

#include <scape/arithmetic.hpp>
#include <scape/elias_fano.hpp>
#include <scape/error.hpp>
#include <scape/mask_plan.hpp>
#include <scape/stream.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace scape::inline v0 {

namespace detail {

struct NonZero {
  const std::uint8_t* flags;
  SCAPE_HOST_DEVICE bool operator()(std::size_t i) const { return flags[i] != 0; }
};

}  // namespace detail

/// One bit an element: to and from predicates, bytes and lists of indices; the offsets that turn bits into payload
/// positions; the Elias-Fano code in which sparse masks travel.
///
/// Owns nothing: a mask is a span of words, bit i of it bit i % 32 of words[i / 32], anywhere in the caller's memory.
/// All work is enqueued on the stream; what the spans refer to must live, and stay as it is, until the stream has
/// passed it. Workspaces are scratch, aligned for std::size_t as every Buffer is. Exact: every form gives back the same
/// bits, and the same code on every backend and for any number of threads. Throws std::invalid_argument where sizes do
/// not fit, before anything is enqueued; what only the bits can tell, such as a code that was damaged on the wire, is
/// an Error from the stream's work. Moves 1/8 byte a parameter for the bits, twice where they have to be counted first,
/// plus the other form once. Source: docs/algorithm.md, "Mask on the wire".
class BitPacker {
 public:
  /// Words that hold so many bits.
  static constexpr std::size_t words(std::size_t bits) noexcept { return words_for(bits); }

  /// Bit first_bit + i of words = predicate(i), for i < count; the other bits stay. The predicate is copied, is called
  /// in any order, on any thread, and must not throw. Words at the ends that it shares with other bits are rewritten.
  template <class Predicate, Stream S>
  static void pack(Predicate predicate, std::size_t count, std::span<MaskWord> words, std::size_t first_bit,
                   const S& stream) {
    static_assert(implemented<S>, "bits are not packed on this stream; for HostStream include <scape/host/pack.hpp>");
    expect_bits(words.size(), first_bit, count);
    pack_bits(predicate, count, words, first_bit, stream);
  }

  /// The same from bytes: bit first_bit + i = (flags[i] != 0).
  template <Stream S>
  static void pack(std::span<const std::uint8_t> flags, std::span<MaskWord> words, std::size_t first_bit,
                   const S& stream) {
    pack(detail::NonZero{flags.data()}, flags.size(), words, first_bit, stream);
  }

  /// flags[i] = bit first_bit + i, 0 or 1.
  template <Stream S>
  static void unpack(std::span<const MaskWord> words, std::size_t first_bit, std::span<std::uint8_t> flags,
                     const S& stream) {
    static_assert(implemented<S>, "bits are not packed on this stream; for HostStream include <scape/host/pack.hpp>");
    expect_bits(words.size(), first_bit, flags.size());
    unpack_bits(words, first_bit, flags, stream);
  }

  /// By tile of the plan, whose tables must be in the stream's memory: the payload position of its first kept element.
  /// With stride 0 the payload has no gaps; else rank r's part begins at r * stride, which is no less than any rank
  /// keeps: the form for a reduce-scatter.
  template <Stream S>
  static void offsets(PlanView plan, std::span<const MaskWord> words, std::size_t stride,
                      std::span<std::size_t> offsets, const S& stream) {
    static_assert(implemented<S>, "bits are not packed on this stream; for HostStream include <scape/host/pack.hpp>");
    expects(offsets.size() == plan.tiles.size(), "offsets.size()", offsets.size(), "must be the plan's tiles, ",
            plan.tiles.size());
    count_offsets(plan, words, stride, offsets, stream);
  }

  /// Scratch of indices().
  static constexpr std::size_t indices_workspace_bytes(std::size_t words) noexcept {
    return count_workspace_bytes(words);
  }

  /// The positions of the set bits, ascending. There must be exactly indices.size() of them: else Error.
  template <Stream S>
  static void indices(std::span<const MaskWord> words, std::span<std::size_t> indices, std::span<std::byte> workspace,
                      const S& stream) {
    static_assert(implemented<S>, "bits are not packed on this stream; for HostStream include <scape/host/pack.hpp>");
    expects(indices.size() <= words.size() * word_bits, "indices.size()", indices.size(), "must be at most the mask's ",
            words.size() * word_bits, " bits");
    expect_workspace(workspace, indices_workspace_bytes(words.size()));
    list_bits(words, indices, workspace, stream);
  }

  /// Sets the bits at the indices, which may be in any order, and clears all others. An index past the words: Error.
  template <Stream S>
  static void from_indices(std::span<const std::size_t> indices, std::span<MaskWord> words, const S& stream) {
    static_assert(implemented<S>, "bits are not packed on this stream; for HostStream include <scape/host/pack.hpp>");
    mark_bits(indices, words, stream);
  }

  /// The first code.words() words of out = the code of the mask, which must have exactly code.kept() bits set, all
  /// below code.bits(): else Error. Workspace: code.workspace_bytes().
  template <Stream S>
  static void encode(EliasFano code, std::span<const MaskWord> words, std::span<MaskWord> out,
                     std::span<std::byte> workspace, const S& stream) {
    static_assert(implemented<S>, "bits are not packed on this stream; for HostStream include <scape/host/pack.hpp>");
    expect_mask(code, words.size());
    expects(out.size() >= code.words(), "out.size()", out.size(), "must hold the code's words, ", code.words());
    expect_workspace(workspace, code.workspace_bytes());
    encode_elias_fano(code, words, out, workspace, stream);
  }

  /// Writes all words of the mask whose code begins at `in`. A code that encode() cannot have written: Error.
  template <Stream S>
  static void decode(EliasFano code, std::span<const MaskWord> in, std::span<MaskWord> words,
                     std::span<std::byte> workspace, const S& stream) {
    static_assert(implemented<S>, "bits are not packed on this stream; for HostStream include <scape/host/pack.hpp>");
    expects(in.size() >= code.words(), "in.size()", in.size(), "must hold the code's words, ", code.words());
    expect_mask(code, words.size());
    expect_workspace(workspace, code.workspace_bytes());
    decode_elias_fano(code, in, words, workspace, stream);
  }

 private:
  template <class S>
  static constexpr bool implemented = requires(std::span<const MaskWord> words, std::span<std::uint8_t> flags,
                                               const S& stream) {
    unpack_bits(words, std::size_t{}, flags, stream);
  };

  static void expect_bits(std::size_t words, std::size_t first_bit, std::size_t count) {
    const std::size_t bits = words * word_bits;
    expects(first_bit <= bits, "first_bit", first_bit, "must be at most the mask's ", bits, " bits");
    expects(count <= bits - first_bit, "words.size()", words, "must hold ", count, " bits from bit ", first_bit, " on");
  }

  static void expect_mask(EliasFano code, std::size_t words) {
    expects(words == words_for(code.bits()), "words.size()", words, "must hold the code's ", code.bits(),
            " bits and no more: ", words_for(code.bits()));
  }

  static void expect_workspace(std::span<std::byte> workspace, std::size_t bytes) {
    expects(workspace.size() >= bytes, "workspace.size()", workspace.size(), "must be at least ", bytes);
    expects(reinterpret_cast<std::uintptr_t>(workspace.data()) % alignof(std::size_t) == 0, "workspace.data()",
            static_cast<const void*>(workspace.data()), "must be aligned for std::size_t");
  }
};

}  // namespace scape::inline v0
