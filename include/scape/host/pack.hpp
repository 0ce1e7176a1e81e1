#pragma once

#include <scape/bit_packer.hpp>
#include <scape/elias_fano.hpp>
#include <scape/error.hpp>
#include <scape/host/bytes.hpp>
#include <scape/host/loop.hpp>
#include <scape/host/set_bits.hpp>
#include <scape/host/stream.hpp>
#include <scape/mask_plan.hpp>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace scape::inline v0 {

namespace detail {

/// Calls body(begin, end) for runs of `run` of count items, on the pool.
template <class F>
void run_parts(HostPool& pool, std::size_t count, std::size_t run, F body) {
  pool.run(count / run + (count % run != 0),
           [&](std::size_t i) { body(i * run, i * run + std::min(run, count - i * run)); });
}

/// Bits that a thread packs or unpacks at once.
inline constexpr std::size_t pack_run = 65536;

/// Bit j = flags[j], which is 0 or 1.
inline MaskWord word_of(const std::uint8_t (&flags)[word_bits]) {
#if defined(__SSE2__)
  const auto half = [&](std::size_t first) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + first));
    return static_cast<MaskWord>(_mm_movemask_epi8(_mm_slli_epi16(bytes, 7)));
  };
  return half(0) | half(16) << 16;
#else
  MaskWord word = 0;
  for (std::size_t i = 0; i < word_bits; ++i) word |= MaskWord{flags[i]} << i;
  return word;
#endif
}

/// Whole words: bit j of words[i] = predicate(first + 32 * i + j).
template <class Predicate>
SCAPE_HOST_LOOP void pack_words(const Predicate predicate, std::size_t first, MaskWord* words, std::size_t count) {
  std::size_t i = 0;
  if constexpr (std::is_same_v<Predicate, NonZero>) i = pack_bytes(predicate.flags + first, words, count);
  for (; i < count; ++i) {
    std::uint8_t flags[word_bits];
    for (std::size_t j = 0; j < word_bits; ++j) flags[j] = static_cast<bool>(predicate(first + i * word_bits + j));
    words[i] = word_of(flags);
  }
}

/// Bits [begin, end) of one word: bit begin + j = predicate(first + j); the others stay.
template <class Predicate>
void pack_part(const Predicate& predicate, std::size_t first, MaskWord& word, std::size_t begin, std::size_t end) {
  MaskWord result = word;
  for (std::size_t j = begin; j < end; ++j) {
    const MaskWord bit = MaskWord{1} << j;
    result = predicate(first + j - begin) ? result | bit : result & ~bit;
  }
  word = result;
}

/// flags[i] = bit `bit + i` of words.
SCAPE_HOST_LOOP inline void unpack_run(const MaskWord* words, std::size_t bit, std::uint8_t* flags, std::size_t count) {
  const std::size_t shift = bit % word_bits;
  words += bit / word_bits;
  const std::size_t whole = count / word_bits;
  for (std::size_t i = unpack_bytes(words, shift, flags, whole); i < whole; ++i) {
    const std::uint64_t next = shift == 0 ? 0 : words[i + 1];
    const MaskWord word = static_cast<MaskWord>((next << word_bits | words[i]) >> shift);
    for (std::size_t j = 0; j < word_bits; ++j) flags[i * word_bits + j] = (word >> j) & 1;
  }
  for (std::size_t i = whole * word_bits; i < count; ++i)
    flags[i] = (words[(shift + i) / word_bits] >> ((shift + i) % word_bits)) & 1;
}

SCAPE_HOST_LOOP inline std::size_t count_bits(const MaskWord* words, std::size_t count) {
  std::size_t sum = 0, i = 0;
  for (std::uint64_t pair; i + 2 <= count; i += 2) {
    std::memcpy(&pair, words + i, sizeof pair);
    sum += static_cast<std::size_t>(std::popcount(pair));
  }
  if (i < count) sum += static_cast<std::size_t>(std::popcount(words[i]));
  return sum;
}

/// Calls visit(bits, first) for SetBits of words [begin, end), ascending: the set bits are at first + each number.
template <class F>
void for_each_batch(const MaskWord* words, std::size_t begin, std::size_t end, F visit) {
  SetBits bits;
  for (; begin < end; begin += SetBits::words) {
    bits.find(words + begin, std::min(SetBits::words, end - begin));
    visit(bits, begin * word_bits);
  }
}

/// The counts of set bits in runs of `run` words, in the workspace, replaced by what comes before each run. Returns the
/// sum.
inline std::size_t number_bits(HostPool& pool, std::span<const MaskWord> words, std::size_t run, std::size_t* before) {
  run_parts(pool, words.size(), run, [=](std::size_t begin, std::size_t end) {
    before[begin / run] = count_bits(words.data() + begin, end - begin);
  });
  std::size_t sum = 0;
  for (std::size_t i = 0; i * run < words.size(); ++i) sum += std::exchange(before[i], sum);
  return sum;
}

inline void clear_words(HostPool& pool, std::span<MaskWord> words) {
  run_parts(pool, words.size(), 16 * count_words,
            [=](std::size_t begin, std::size_t end) { std::fill_n(words.data() + begin, end - begin, MaskWord{0}); });
}

/// Sets bits in words that were zero before the loop, a pair of words at a time. Of what several threads set, each
/// thread's part of an ascending sequence, only the first and the last pair can be another thread's too; else any pair.
class BitSetter {
 public:
  explicit BitSetter(MaskWord* words, bool ascending) : words_(words), ascending_(ascending) {}
  BitSetter(const BitSetter&) = delete;
  ~BitSetter() {
    shared_ = true;
    flush();
  }

  void set(std::size_t position) {
    if (position / pair_bits != pair_) {
      flush();
      pair_ = position / pair_bits;
      bits_ = 0;
    }
    bits_ |= std::uint64_t{1} << (position % pair_bits);
  }

 private:
  static constexpr std::size_t pair_bits = 2 * word_bits;

  void flush() {
    if (bits_ == 0) return;
    MaskWord* const pair = words_ + 2 * pair_;
    const MaskWord bits[] = {static_cast<MaskWord>(bits_), static_cast<MaskWord>(bits_ >> word_bits)};
    if (!shared_) {
      pair[0] = bits[0];
      pair[1] = bits[1];
    } else {
      // Behind the last pair's bits no word may be.
      if (bits[0] != 0) std::atomic_ref(pair[0]).fetch_or(bits[0], std::memory_order_relaxed);
      if (bits[1] != 0) std::atomic_ref(pair[1]).fetch_or(bits[1], std::memory_order_relaxed);
    }
    shared_ = !ascending_;
  }

  MaskWord* words_;
  bool ascending_, shared_ = true;
  std::size_t pair_ = 0;
  std::uint64_t bits_ = 0;
};

/// Appends bits from `bit` on in words that were zero before the loop, of which the first and the last word may be
/// another thread's too.
class BitAppender {
 public:
  BitAppender(MaskWord* words, std::size_t bit) : word_(words + bit / word_bits), used_(bit % word_bits) {}
  BitAppender(const BitAppender&) = delete;
  ~BitAppender() {
    if (bits_ != 0) std::atomic_ref(*word_).fetch_or(static_cast<MaskWord>(bits_), std::memory_order_relaxed);
  }

  /// The last `count` bits of value; the others must be 0.
  void append(std::uint64_t value, std::size_t count) {
    if (count > word_bits) {
      append_part(static_cast<MaskWord>(value), word_bits);
      value >>= word_bits;
      count -= word_bits;
    }
    append_part(value, count);
  }

 private:
  void append_part(std::uint64_t value, std::size_t count) {
    bits_ |= value << used_;
    used_ += count;
    if (used_ < word_bits) return;
    const std::atomic_ref word(*word_++);
    const MaskWord full = static_cast<MaskWord>(bits_);
    shared_ ? void(word.fetch_or(full, std::memory_order_relaxed)) : word.store(full, std::memory_order_relaxed);
    shared_ = false;
    bits_ >>= word_bits;
    used_ -= word_bits;
  }

  MaskWord* word_;
  std::uint64_t bits_ = 0;
  std::size_t used_;
  bool shared_ = true;
};

/// At least 33 bits, from `bit` on. Two words are read.
inline std::uint64_t bits_from(const MaskWord* words, std::size_t bit) {
  words += bit / word_bits;
  std::uint64_t pair = 0;
  if constexpr (std::endian::native == std::endian::little)
    std::memcpy(&pair, words, sizeof pair);  // one load
  else
    pair = std::uint64_t{words[1]} << word_bits | words[0];
  return pair >> (bit % word_bits);
}

/// The `count` bits from `bit` on. Where there are any, the word after them is read, too: the high part is there.
inline std::size_t get_low(const MaskWord* words, std::size_t bit, std::size_t count) {
  if (count == 0) return 0;
  const std::uint64_t pair = bits_from(words, bit);
  if (count <= word_bits) return pair & ((std::uint64_t{1} << count) - 1);
  return static_cast<MaskWord>(pair) | get_low(words, bit + word_bits, count - word_bits) << word_bits;
}

SCAPE_HOST_LOOP inline void list_part(const MaskWord* words, std::size_t begin, std::size_t end, std::size_t* indices) {
  for_each_batch(words, begin, end, [&](const SetBits& bits, std::size_t first) {
    for (const std::size_t bit : bits) *indices++ = first + bit;
  });
}

SCAPE_HOST_LOOP inline bool mark_part(const std::size_t* indices, std::size_t count, std::span<MaskWord> words) {
  BitSetter setter(words.data(), false);
  for (std::size_t i = 0; i < count; ++i) {
    if (indices[i] / word_bits >= words.size()) return false;
    setter.set(indices[i]);
  }
  return true;
}

/// Elements whose low parts are coded at once, where they fit into a word.
inline constexpr std::size_t low_group = 4;

/// Codes the set bits of words [begin, end), the first of which is the mask's i-th.
SCAPE_HOST_LOOP inline void encode_part(const EliasFano& code, const MaskWord* words, std::size_t begin,
                                        std::size_t end, std::size_t i, MaskWord* out) {
  const std::size_t bits = code.low_bits(), low_mask = (std::size_t{1} << bits) - 1;
  const bool grouped = low_group * bits <= word_bits;
  BitAppender low(out, i * bits);
  BitSetter high(out + code.low_words(), true);
  for_each_batch(words, begin, end, [&](const SetBits& kept, std::size_t first) {
    std::size_t j = 0;
    const auto append = [&](std::size_t count) {
      std::uint64_t parts = 0;
      for (std::size_t k = count; k-- > 0;) parts = parts << bits | ((first + kept[j + k]) & low_mask);
      low.append(parts, count * bits);
      for (std::size_t k = 0; k < count; ++k) high.set(((first + kept[j++]) >> bits) + i++);
    };
    while (grouped && j + low_group <= kept.size()) append(low_group);
    while (j < kept.size()) append(1);
  });
}

/// How the decoding of the high part is shared: by runs of its words, as short as the workspace allows, since each
/// stands for many more bits of the mask.
class HighRuns {
 public:
  HighRuns(const EliasFano& code, const std::size_t* before)
      : code_(code),
        before_(before),
        size_(std::max<std::size_t>(64, code.high_words() / (code.workspace_bytes() / sizeof(std::size_t)) + 1)) {}

  std::size_t size() const { return size_; }
  std::size_t ones_before(std::size_t word) const { return before_[word / size_]; }

  /// The mask's words in which the bucket lies, of the 2^low_bits positions with equal high bits, that a run begins
  /// with; the run before may end with it, too.
  std::pair<std::size_t, std::size_t> shared_words(std::size_t word) const {
    if (word == 0) return {0, 0};
    const std::size_t words = words_for(code_.bits());
    if (word >= code_.high_words()) return {words, words};
    const std::size_t bucket = word * word_bits - ones_before(word);
    return {std::min(words, (bucket << code_.low_bits()) / word_bits),
            std::min(words, words_for((bucket + 1) << code_.low_bits()))};
  }

 private:
  EliasFano code_;
  const std::size_t* before_;
  std::size_t size_;
};

/// Writes the words between those that the run [begin, end) of the high part shares, and sets its bits in these, which
/// were cleared. Returns false where the code gives no ascending positions inside the mask.
SCAPE_HOST_LOOP inline bool decode_run(const EliasFano& code, const HighRuns& runs, const MaskWord* in,
                                       std::size_t begin, std::size_t end, MaskWord* words) {
  const std::size_t bits = code.low_bits();
  const MaskWord* const high = in + code.low_words();
  const std::size_t first = runs.shared_words(begin).second;
  const std::size_t own = std::max(first, runs.shared_words(end).first) - first;
  std::fill_n(words + first, own, MaskWord{0});

  // The buckets that lie in these words, whatever the low bits are.
  const std::size_t low_mask = (std::size_t{1} << bits) - 1;
  const std::size_t first_bucket = (first * word_bits + low_mask) >> bits;
  const std::size_t buckets_end = ((first + own) * word_bits) >> bits;

  std::size_t i = runs.ones_before(begin);
  std::size_t last = ~std::size_t{0};  // the position before, at first -1
  // The run's first element has the high bits of the one before it only where their ones are neighbours.
  if (i != 0 && begin != 0 && high[begin - 1] >> (word_bits - 1) != 0)
    last = (begin * word_bits - i) << bits | get_low(in, (i - 1) * bits, bits);
  std::size_t ascends = ~std::size_t{0};  // its highest bit, as long as each position is above the one before

  const bool grouped = bits != 0 && low_group * bits <= word_bits;
  for_each_batch(high, begin, end, [&](const SetBits& ones, std::size_t first_one) {
    const auto bucket = [&, before = first_one - i](std::size_t j) { return before + ones[j] - j; };
    std::size_t j = 0;
    const auto next = [&](std::size_t low) {
      const std::size_t position = bucket(j++) << bits | low;
      ascends &= last - position;
      return last = position;
    };
    while (j < ones.size()) {
      if (grouped && j + low_group <= ones.size() && bucket(j) >= first_bucket &&
          bucket(j + low_group - 1) < buckets_end) {
        std::uint64_t low = bits_from(in, (i + j) * bits);
        for (std::size_t k = 0; k < low_group; ++k, low >>= bits) {
          const std::size_t position = next(low & low_mask);
          words[position / word_bits] |= MaskWord{1} << (position % word_bits);
        }
      } else {
        const std::size_t position = next(get_low(in, (i + j) * bits, bits)), word = position / word_bits;
        const MaskWord bit = MaskWord{1} << (position % word_bits);
        if (word - first < own)
          words[word] |= bit;
        else if (position < code.bits())
          std::atomic_ref(words[word]).fetch_or(bit, std::memory_order_relaxed);
      }
    }
    i += ones.size();
  });
  return ascends >> (std::numeric_limits<std::size_t>::digits - 1) != 0 && last + 1 <= code.bits();
}

/// Whether the bits that pad `count` bits to whole words are zero.
inline bool padding_is_zero(const MaskWord* words, std::size_t count) {
  return count % word_bits == 0 || words[count / word_bits] >> (count % word_bits) == 0;
}

}  // namespace detail

/// Bit first_bit + i of words = predicate(i), for i < count; the other bits stay. The predicate is copied, is called
/// from several threads and must not throw. Moves what the predicate reads and an eighth of a byte per bit.
template <class Predicate>
void pack_bits(Predicate predicate, std::size_t count, std::span<MaskWord> words, std::size_t first_bit,
               const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    const std::size_t lead = first_bit % word_bits;
    MaskWord* const first_word = words.data() + first_bit / word_bits;
    detail::run_parts(pool, count == 0 ? 0 : lead + count, detail::pack_run, [=](std::size_t begin, std::size_t end) {
      // Bits [begin, end), counted from first_word's; those below `lead` are not ours.
      MaskWord* word = first_word + begin / word_bits;
      std::size_t bit = std::max(begin, lead);
      if (bit % word_bits != 0) {
        const std::size_t stop = std::min(end, begin + word_bits);
        detail::pack_part(predicate, bit - lead, *word++, bit - begin, stop - begin);
        bit = stop;
      }
      const std::size_t whole = (end - bit) / word_bits;
      detail::pack_words(predicate, bit - lead, word, whole);
      bit += whole * word_bits;
      if (bit != end) detail::pack_part(predicate, bit - lead, word[whole], 0, end - bit);
    });
  });
}

/// flags[i] = bit first_bit + i of words, 0 or 1.
inline void unpack_bits(std::span<const MaskWord> words, std::size_t first_bit, std::span<std::uint8_t> flags,
                        const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    detail::run_parts(pool, flags.size(), detail::pack_run, [=](std::size_t begin, std::size_t end) {
      detail::unpack_run(words.data(), first_bit + begin, flags.data() + begin, end - begin);
    });
  });
}

namespace detail {

inline void count_tiles(HostPool& pool, PlanView plan, std::span<const MaskWord> words, std::span<std::size_t> counts) {
  run_parts(pool, plan.tiles.size(), 32, [=](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const Tile& tile = plan.tiles[i];
      counts[i] = count_bits(words.data() + tile.bit / word_bits, words_for(tile.count));
    }
  });
}

}  // namespace detail

/// By tile: the payload position of its first kept element. With stride 0 the payload has no gaps; else rank r's part
/// begins at r * stride, which must be no less than any rank keeps.
inline void count_offsets(PlanView plan, std::span<const MaskWord> words, std::size_t stride,
                          std::span<std::size_t> offsets, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    detail::count_tiles(pool, plan, words, offsets);
    std::size_t offset = 0;
    for (std::size_t rank = 0; rank + 1 < plan.first_tile.size(); ++rank) {
      if (stride != 0) offset = rank * stride;
      for (std::size_t i = plan.first_tile[rank]; i < plan.first_tile[rank + 1]; ++i) {
        const std::size_t count = offsets[i];
        offsets[i] = offset;
        offset += count;
      }
    }
  });
}

/// The same for the payload of several buckets (MaskPlan::payload_parts). The span without a
/// name: scratch, one for each bucket and rank.
inline void count_offsets_in_buckets(PlanView plan, std::span<const MaskWord> words, bool by_rank,
                                     std::span<std::size_t>, std::span<std::size_t> offsets, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    detail::count_tiles(pool, plan, words, offsets);
    const std::size_t ranks = plan.first_tile.size() - 1;
    const auto run = [&](std::size_t r) {
      return plan.payload_order.subspan(plan.payload_runs[r], plan.payload_runs[r + 1] - plan.payload_runs[r]);
    };
    std::size_t offset = 0;
    for (std::size_t bucket = 0; bucket + 1 < plan.payload_runs.size(); bucket += ranks) {
      std::size_t most = 0;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        std::size_t count = 0;
        for (const std::uint32_t tile : run(bucket + rank)) count += offsets[tile];
        most = std::max(most, count);
      }
      const std::size_t begin = offset, stride = most + most % 2;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        if (by_rank) offset = begin + rank * stride;
        for (const std::uint32_t tile : run(bucket + rank)) {
          const std::size_t count = offsets[tile];
          offsets[tile] = offset;
          offset += count;
        }
      }
      if (by_rank) offset = begin + ranks * stride;
    }
  });
}

/// The positions of the set bits, ascending. Fails, with nothing written, where they are not as many as indices.
/// Workspace: count_workspace_bytes(words.size()).
inline void list_bits(std::span<const MaskWord> words, std::span<std::size_t> indices, std::span<std::byte> workspace,
                      const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    auto* const before = reinterpret_cast<std::size_t*>(workspace.data());
    const std::size_t count = detail::number_bits(pool, words, count_words, before);
    if (count != indices.size())
      throw Error("the mask has " + std::to_string(count) + " set bits, not " + std::to_string(indices.size()));
    detail::run_parts(pool, words.size(), count_words, [=](std::size_t begin, std::size_t end) {
      detail::list_part(words.data(), begin, end, indices.data() + before[begin / count_words]);
    });
  });
}

/// Sets the bits at the indices, in any order, and no others. Fails where one is past the words.
inline void mark_bits(std::span<const std::size_t> indices, std::span<MaskWord> words, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    detail::clear_words(pool, words);
    std::atomic<bool> valid = true;
    detail::run_parts(pool, indices.size(), 4096, [=, &valid](std::size_t begin, std::size_t end) {
      if (!detail::mark_part(indices.data() + begin, end - begin, words)) valid = false;
    });
    if (!valid) throw Error("an index is past the mask's " + std::to_string(words.size() * word_bits) + " bits");
  });
}

/// Fails, with nothing written, where the mask does not have the code's number of set bits.
inline void encode_elias_fano(EliasFano code, std::span<const MaskWord> words, std::span<MaskWord> out,
                              std::span<std::byte> workspace, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    auto* const before = reinterpret_cast<std::size_t*>(workspace.data());
    const std::size_t count = detail::number_bits(pool, words, count_words, before);
    if (count != code.kept() || !detail::padding_is_zero(words.data(), code.bits()))
      throw Error("the mask of " + std::to_string(code.bits()) + " bits has " + std::to_string(count) +
                  " set, its Elias-Fano code is for " + std::to_string(code.kept()));
    if (count == 0) return;
    detail::clear_words(pool, out.first(code.words()));
    detail::run_parts(pool, words.size(), count_words, [=](std::size_t begin, std::size_t end) {
      detail::encode_part(code, words.data(), begin, end, before[begin / count_words], out.data());
    });
  });
}

/// Writes all words. Fails where the code is not one that encode_elias_fano writes for the same number of bits and of
/// set bits; the words then hold anything.
inline void decode_elias_fano(EliasFano code, std::span<const MaskWord> in, std::span<MaskWord> words,
                              std::span<std::byte> workspace, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    if (code.kept() == 0) return detail::clear_words(pool, words);
    auto* const before = reinterpret_cast<std::size_t*>(workspace.data());
    const detail::HighRuns runs(code, before);
    const auto high = in.subspan(code.low_words(), code.high_words());
    const std::size_t count = detail::number_bits(pool, high, runs.size(), before);
    std::atomic<bool> valid = count == code.kept() && detail::padding_is_zero(in.data(), code.kept() * code.low_bits());
    if (valid) {
      for (std::size_t i = runs.size(); i < high.size(); i += runs.size()) {
        const auto [first, last] = runs.shared_words(i);
        std::fill(words.data() + first, words.data() + last, MaskWord{0});
      }
      detail::run_parts(pool, high.size(), runs.size(), [=, &valid](std::size_t begin, std::size_t end) {
        if (!detail::decode_run(code, runs, in.data(), begin, end, words.data())) valid = false;
      });
    }
    if (!valid)
      throw Error("not the Elias-Fano code of " + std::to_string(code.kept()) + " set bits in " +
                  std::to_string(code.bits()));
  });
}

}  // namespace scape::inline v0
