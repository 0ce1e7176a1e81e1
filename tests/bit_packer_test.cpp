#include "backends.hpp"

#include <scape/bit_packer.hpp>
#include <scape/host/pack.hpp>
#include <scape/layout.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using scape::BitPacker;
using scape::EliasFano;
using scape::MaskWord;
using Words = std::vector<MaskWord>;

namespace {

constexpr std::size_t sizes[] = {0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 255, 257, 1000, (1 << 20) + 1};

enum class Pattern { all, alternating, first, last, random };
constexpr Pattern patterns[] = {Pattern::all, Pattern::alternating, Pattern::first, Pattern::last, Pattern::random};

// Which of n elements a pattern sets; callable from kernels.
struct Sets {
  Pattern pattern;
  std::size_t n;

  SCAPE_HOST_DEVICE bool operator()(std::size_t i) const {
    switch (pattern) {
      case Pattern::all:
        return true;
      case Pattern::alternating:
        return i % 2 == 0;
      case Pattern::first:
        return i == 0;
      case Pattern::last:
        return i + 1 == n;
      default:
        return ((i + 1) * 0x9e3779b97f4a7c15) >> 62 == 0;
    }
  }
};

bool bit_of(const Words& words, std::size_t i) { return (words[i / 32] >> (i % 32) & 1) != 0; }

void set_bit(Words& words, std::size_t i, bool value = true) {
  const MaskWord bit = MaskWord{1} << (i % 32);
  words[i / 32] = value ? words[i / 32] | bit : words[i / 32] & ~bit;
}

Words words_of(std::size_t bits, const std::vector<std::size_t>& positions) {
  Words words(BitPacker::words(bits));
  for (const std::size_t position : positions) set_bit(words, position);
  return words;
}

std::vector<std::size_t> positions_of(const Words& words) {
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < words.size() * 32; ++i)
    if (bit_of(words, i)) positions.push_back(i);
  return positions;
}

std::vector<std::size_t> random_positions(std::size_t bits, std::size_t kept, unsigned seed) {
  std::vector<std::size_t> all(bits), positions;
  std::iota(all.begin(), all.end(), std::size_t{0});
  std::sample(all.begin(), all.end(), std::back_inserter(positions), kept, std::mt19937(seed));
  return positions;
}

Words random_words(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  Words words(size);
  for (MaskWord& word : words) word = static_cast<MaskWord>(random());
  return words;
}

// The code, bit by bit.
Words slow_code(EliasFano code, const std::vector<std::size_t>& positions) {
  Words words(code.words());
  const std::size_t low = code.low_bits();
  for (std::size_t i = 0; i < positions.size(); ++i) {
    for (std::size_t j = 0; j < low; ++j)
      if (positions[i] >> j & 1) set_bit(words, i * low + j);
    set_bit(words, code.low_words() * 32 + (positions[i] >> low) + i);
  }
  return words;
}

template <class Backend>
auto workspace(Backend& backend, std::size_t bytes) {
  return backend.array(std::vector<std::byte>(bytes));
}

template <class Backend>
Words encode(Backend& backend, EliasFano code, const Words& mask) {
  const auto words = backend.array(mask);
  const auto out = backend.array(random_words(code.words(), 1));
  const auto scratch = workspace(backend, code.workspace_bytes());
  BitPacker::encode(code, words.span(), out.span(), scratch.span(), backend.stream);
  return backend.read(out);
}

template <class Backend>
Words decode(Backend& backend, EliasFano code, const Words& coded, const typename Backend::Stream& stream) {
  const auto in = backend.array(coded);
  const auto words = backend.array(random_words(BitPacker::words(code.bits()), 2));
  const auto scratch = workspace(backend, code.workspace_bytes());
  BitPacker::decode(code, in.span(), words.span(), scratch.span(), stream);
  stream.synchronize();
  return backend.read(words);
}

template <class F>
std::string message_of(F&& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing thrown";
}

}  // namespace

TEST_CASE_TEMPLATE("bits are packed at any offset and unpacked again, and their neighbours stay", Backend,
                   SCAPE_BACKENDS) {
  Backend backend;
  for (const std::size_t n : sizes)
    for (std::size_t offset = 0; offset < 64; offset += n < 2000 ? 1 : 21)
      for (const Pattern pattern : patterns) {
        CAPTURE(n);
        CAPTURE(offset);
        CAPTURE(static_cast<int>(pattern));
        const Sets sets{pattern, n};
        const Words before = random_words(BitPacker::words(offset + n) + offset % 3, static_cast<unsigned>(n + offset));
        Words expected = before;
        std::vector<std::uint8_t> flags(n), bytes(n);
        for (std::size_t i = 0; i < n; ++i) {
          flags[i] = sets(i);
          bytes[i] = sets(i) ? static_cast<std::uint8_t>(1 + i % 255) : 0;
          set_bit(expected, offset + i, sets(i));
        }
        const auto from_predicate = backend.array(before), from_bytes = backend.array(before);
        // The bytes begin anywhere, too.
        const std::size_t lead = offset % 7;
        bytes.insert(bytes.begin(), lead, 1);
        flags.insert(flags.begin(), lead, 7);
        const auto given = backend.array(bytes), unpacked = backend.array(std::vector<std::uint8_t>(lead + n, 7));
        BitPacker::pack(sets, n, from_predicate.span(), offset, backend.stream);
        BitPacker::pack(given.span().subspan(lead), from_bytes.span(), offset, backend.stream);
        BitPacker::unpack(from_predicate.span(), offset, unpacked.span().subspan(lead), backend.stream);
        REQUIRE(backend.read(from_predicate) == expected);
        REQUIRE(backend.read(from_bytes) == expected);
        REQUIRE(backend.read(unpacked) == flags);
      }
}

TEST_CASE("words hold 32 bits") {
  static_assert(BitPacker::words(0) == 0 && BitPacker::words(1) == 1 && BitPacker::words(32) == 1);
  static_assert(BitPacker::words(33) == 2 && BitPacker::words((std::size_t{1} << 33) + 1) == (1u << 28) + 1);
}

TEST_CASE_TEMPLATE("offsets are those of a slow loop over the tiles", Backend, SCAPE_BACKENDS) {
  Backend backend;
  std::mt19937 random(3);
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  for (const int ranks : {1, 2, 3, 5, 8})
    for (int round = 0; round < 8; ++round) {
      CAPTURE(ranks);
      CAPTURE(round);
      std::vector<scape::Segment> segments;
      std::size_t size = 0;
      for (std::size_t i = below(12); i > 0; --i) {
        const std::size_t count = below(4) == 0 ? below(3) : below(20000);
        segments.push_back({size, count, static_cast<int>(below(static_cast<std::size_t>(ranks))), below(4) == 0});
        size += count;
      }
      const scape::MaskPlan plan(size, ranks, segments, round % 2 == 1);
      Words mask(plan.words());
      for (const scape::Tile& tile : plan.tiles())
        for (std::size_t i = 0; i < tile.count; ++i) set_bit(mask, tile.bit + i, below(10) == 0);

      std::vector<std::size_t> kept_by_rank;
      for (int rank = 0; rank < ranks; ++rank) {
        std::size_t kept = 0;
        for (std::size_t t = plan.first_tile(rank); t < plan.first_tile(rank + 1); ++t)
          for (std::size_t i = 0; i < plan.tiles()[t].count; ++i) kept += bit_of(mask, plan.tiles()[t].bit + i);
        kept_by_rank.push_back(kept);
      }
      const std::size_t most = *std::max_element(kept_by_rank.begin(), kept_by_rank.end());

      const scape::PlanView view = plan.view();
      const auto tiles = backend.array(view.tiles);
      const auto plan_segments = backend.array(view.segments);
      const auto first_tile = backend.array(view.first_tile);
      const auto words = backend.array(mask);
      for (const std::size_t stride : {std::size_t{0}, most, most + 5}) {
        CAPTURE(stride);
        std::vector<std::size_t> expected;
        std::size_t kept = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          if (stride != 0) kept = static_cast<std::size_t>(rank) * stride;
          for (std::size_t t = plan.first_tile(rank); t < plan.first_tile(rank + 1); ++t) {
            expected.push_back(kept);
            for (std::size_t i = 0; i < plan.tiles()[t].count; ++i) kept += bit_of(mask, plan.tiles()[t].bit + i);
          }
        }
        const auto offsets = backend.array(std::vector<std::size_t>(plan.tiles().size(), 99));
        BitPacker::offsets({tiles.span(), plan_segments.span(), first_tile.span()}, words.span(), stride,
                           offsets.span(), backend.stream);
        REQUIRE(backend.read(offsets) == expected);
      }
    }
}

TEST_CASE_TEMPLATE("masks become lists of indices and lists become masks", Backend, SCAPE_BACKENDS) {
  Backend backend;
  for (const std::size_t n : sizes)
    for (const Pattern pattern : patterns) {
      CAPTURE(n);
      CAPTURE(static_cast<int>(pattern));
      std::vector<std::size_t> positions;
      for (std::size_t i = 0; i < n; ++i)
        if (Sets{pattern, n}(i)) positions.push_back(i);
      const Words mask = words_of(n, positions);
      const auto words = backend.array(mask);
      const auto indices = backend.array(std::vector<std::size_t>(positions.size()));
      const auto scratch = workspace(backend, BitPacker::indices_workspace_bytes(mask.size()));
      BitPacker::indices(words.span(), indices.span(), scratch.span(), backend.stream);
      REQUIRE(backend.read(indices) == positions);

      std::shuffle(positions.begin(), positions.end(), std::mt19937(4));
      const auto shuffled = backend.array(positions);
      const auto marked = backend.array(random_words(mask.size(), 5));
      BitPacker::from_indices(indices.span(), marked.span(), backend.stream);
      REQUIRE(backend.read(marked) == mask);
      BitPacker::from_indices(shuffled.span(), words.span(), backend.stream);
      REQUIRE(backend.read(words) == mask);
    }
}

TEST_CASE_TEMPLATE("wrong counts and indices are errors, not writes out of bounds", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const std::size_t bits = 100000;
  const Words mask = words_of(bits, random_positions(bits, 1000, 6));
  const auto words = backend.array(mask);
  const auto scratch = workspace(backend, BitPacker::indices_workspace_bytes(mask.size()));
  for (const std::size_t count : {0u, 999u, 1001u}) {
    const auto stream = backend.new_stream();
    const auto indices = backend.array(std::vector<std::size_t>(count + 2, 7));
    BitPacker::indices(words.span(), indices.span().first(count), scratch.span(), stream);
    if constexpr (Backend::reports_failed_work)
      CHECK_THROWS_WITH_AS(stream.synchronize(), doctest::Contains("1000 set bits"), scape::Error);
    else
      stream.synchronize();
    const std::vector<std::size_t> found = backend.read(indices);
    CHECK(std::count(found.begin() + static_cast<std::ptrdiff_t>(count), found.end(), 7) == 2);
  }
  for (const std::size_t index : {mask.size() * 32, mask.size() * 32 + 31, std::size_t{1} << 40, ~std::size_t{0}}) {
    const auto stream = backend.new_stream();
    const auto indices = backend.array(std::vector<std::size_t>{1, 2, index, 3});
    BitPacker::from_indices(indices.span(), words.span(), stream);
    if constexpr (Backend::reports_failed_work) {
      CHECK_THROWS_AS(stream.synchronize(), scape::Error);
    } else {
      stream.synchronize();
      CHECK(positions_of(backend.read(words)) == std::vector<std::size_t>{1, 2, 3});
    }
  }
}

TEST_CASE("the Elias-Fano code has the size that its formula says, and that was promised") {
  const auto bits_a_parameter = [](double density) {
    const std::size_t bits = 1'000'000'000;
    const EliasFano code(bits, scape::kept_count(bits, density));
    return static_cast<double>(code.words()) * 32 / static_cast<double>(bits);
  };
  CHECK(bits_a_parameter(0.25) == doctest::Approx(1).epsilon(1e-6));
  CHECK(bits_a_parameter(0.1) == doctest::Approx(0.525).epsilon(1e-4));
  CHECK(bits_a_parameter(0.05) == doctest::Approx(0.3125).epsilon(1e-4));
  CHECK(bits_a_parameter(0.01) == doctest::Approx(0.0856).epsilon(5e-4));
  CHECK(bits_a_parameter(0.001) == doctest::Approx(0.0120).epsilon(5e-3));

  static_assert(EliasFano(0, 0).words() == 0 && EliasFano(1000, 0).words() == 0);
  static_assert(EliasFano(1000, 0).low_bits() == 0 && EliasFano(1000, 501).low_bits() == 0);
  static_assert(EliasFano(1000, 500).low_bits() == 1 && EliasFano(1000, 1).low_bits() == 9);
  static_assert(EliasFano(1024, 1).low_bits() == 10 && EliasFano(1023, 1).low_bits() == 9);
  static_assert(EliasFano(1000, 10).low_words() == 2 && EliasFano(1000, 10).high_bits() == 10 + 16);
  static_assert(EliasFano(1000, 10).words() == 3 && EliasFano(1, 1).words() == 1);
}

TEST_CASE("nothing in the form of a code is 32 bits wide") {
  constexpr std::size_t huge = std::size_t{1} << 40;
  static_assert(EliasFano(huge, 1).low_bits() == 40 && EliasFano(huge, 1).words() == 3);
  static_assert(EliasFano(huge, huge).low_bits() == 0 && EliasFano(huge, huge).high_bits() == 2 * huge);
  static_assert(EliasFano(huge, huge / 128).low_words() == huge / 128 * 7 / 32);
  static_assert(EliasFano(huge, huge / 128).high_words() == huge / 128 * 2 / 32);
  static_assert(BitPacker::indices_workspace_bytes(huge / 32) == huge / 32 / 1024 * 8);
  static_assert(EliasFano((std::size_t{1} << 31) + 1, 1).low_bits() == 31);
}

TEST_CASE_TEMPLATE("Elias-Fano: every mask of up to 12 bits", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const auto in = backend.array(Words(1)), out = backend.array(Words(8)), back = backend.array(Words(1));
  const auto scratch = workspace(backend, EliasFano(12, 12).workspace_bytes());
  for (std::size_t n = 0; n <= 12; ++n)
    for (MaskWord mask = 0; mask < 1u << n; ++mask) {
      CAPTURE(n);
      CAPTURE(mask);
      const EliasFano code(n, static_cast<std::size_t>(std::popcount(mask)));
      const std::size_t size = BitPacker::words(n);
      const Words words(size, mask), untouched(8, 0xabcdef01);
      scape::copy_values(std::span<const MaskWord>(words), in.span().first(size), backend.stream);
      scape::copy_values(std::span<const MaskWord>(untouched), out.span(), backend.stream);
      BitPacker::encode(code, in.span().first(size), out.span(), scratch.span(), backend.stream);
      BitPacker::decode(code, out.span().first(code.words()), back.span().first(size), scratch.span(), backend.stream);
      Words expected = slow_code(code, positions_of(words));
      expected.resize(8, 0xabcdef01);
      REQUIRE(backend.read(out) == expected);
      if (n != 0) REQUIRE(backend.read(back) == words);
    }
}

TEST_CASE_TEMPLATE("Elias-Fano: every density, and single bits", Backend, SCAPE_BACKENDS) {
  Backend backend;
  for (const std::size_t bits : {1u, 31u, 32u, 33u, 64u, 1000u, 32768u, 32769u, (1u << 20) + 1}) {
    std::vector<std::vector<std::size_t>> masks;
    for (const double density : {1.0, 0.5, 0.25, 0.1, 0.01, 0.001})
      masks.push_back(random_positions(bits, scape::kept_count(bits, density), 7));
    masks.push_back({});
    masks.push_back({0});
    masks.push_back({bits - 1});
    std::vector<std::size_t> run(bits / 16);  // all in the first few buckets, then all in the last
    std::iota(run.begin(), run.end(), std::size_t{0});
    masks.push_back(run);
    std::iota(run.begin(), run.end(), bits - run.size());
    masks.push_back(run);
    for (const std::vector<std::size_t>& positions : masks) {
      CAPTURE(bits);
      CAPTURE(positions.size());
      const EliasFano code(bits, positions.size());
      const Words mask = words_of(bits, positions), expected = slow_code(code, positions);
      REQUIRE(encode(backend, code, mask) == expected);
      REQUIRE(decode(backend, code, expected, backend.stream) == mask);
    }
  }
}

TEST_CASE_TEMPLATE("Elias-Fano: every width of the low parts, and nothing is written behind the code", Backend,
                   SCAPE_BACKENDS) {
  Backend backend;
  const std::size_t bits = (1 << 17) + 5;
  for (std::size_t width = 0; width <= 13; ++width)
    for (std::size_t extra = 0; extra < 5; ++extra) {
      const EliasFano code(bits, (bits >> width) - extra * (width == 0 ? 2048 : 1));
      CAPTURE(width);
      CAPTURE(code.kept());
      REQUIRE(code.low_bits() == width);
      // At random places, and as near to each other as there are, in the middle.
      std::vector<std::size_t> neighbours(code.kept());
      std::iota(neighbours.begin(), neighbours.end(), (bits - code.kept()) / 2);
      for (const auto& positions : {random_positions(bits, code.kept(), 12), neighbours}) {
        const Words mask = words_of(bits, positions);
        Words expected = slow_code(code, positions);
        expected.push_back(0xabcdef01);
        const auto words = backend.array(mask), out = backend.array(Words(code.words() + 1, 0xabcdef01));
        const auto scratch = workspace(backend, code.workspace_bytes());
        BitPacker::encode(code, words.span(), out.span(), scratch.span(), backend.stream);
        REQUIRE(backend.read(out) == expected);
        REQUIRE(decode(backend, code, expected, backend.stream) == mask);
      }
    }
}

TEST_CASE_TEMPLATE("Elias-Fano: a mask that the code is not for is an error", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const auto words = backend.array(words_of(1000, {5, 6, 999}));
  const auto stray = backend.array(words_of(1024, {5, 6, 1000}));
  const auto scratch = workspace(backend, 1024);
  const auto fails = [&](EliasFano code, const auto& mask, const char* text) {
    const auto stream = backend.new_stream();
    const auto out = backend.array(Words(64, 1));
    BitPacker::encode(code, mask.span(), out.span(), scratch.span(), stream);
    if constexpr (Backend::reports_failed_work) {
      CHECK_THROWS_WITH_AS(stream.synchronize(), doctest::Contains(text), scape::Error);
      CHECK(backend.read(out) == Words(64, 1));
    } else {
      stream.synchronize();
      const Words found = backend.read(out);
      CHECK(std::all_of(found.begin() + static_cast<std::ptrdiff_t>(code.words()), found.end(),
                        [](MaskWord word) { return word == 1; }));
    }
  };
  fails({1000, 2}, words, "has 3 set");
  fails({1000, 4}, words, "is for 4");
  fails({1000, 0}, words, "has 3 set");
  fails({1000, 3}, stray, "1000 bits");
}

TEST_CASE_TEMPLATE("Elias-Fano: a damaged code is an error, or the code of another mask", Backend, SCAPE_BACKENDS) {
  Backend backend;
  // True where it was an error, or would have been where failed work is reported.
  const auto check = [&](EliasFano code, const Words& damaged) {
    Words mask;
    try {
      mask = decode(backend, code, damaged, backend.new_stream());
    } catch (const scape::Error&) {
      return true;
    }
    if constexpr (!Backend::reports_failed_work)
      if (positions_of(mask).size() != code.kept() || encode(backend, code, mask) != damaged) return true;
    REQUIRE(encode(backend, code, mask) == damaged);
    return false;
  };

  SUBCASE("any one bit of a small one") {
    for (const std::size_t n : {5u, 37u})
      for (MaskWord mask = 1; mask < 32; ++mask) {
        const EliasFano code(n, static_cast<std::size_t>(std::popcount(mask)));
        Words positions(BitPacker::words(n));
        positions[0] = mask;
        const Words valid = slow_code(code, positions_of(positions));
        for (std::size_t i = 0; i < valid.size() * 32; ++i) {
          CAPTURE(n);
          CAPTURE(mask);
          CAPTURE(i);
          Words damaged = valid;
          set_bit(damaged, i, !bit_of(damaged, i));
          const bool error = check(code, damaged);
          if (i >= code.low_words() * 32) REQUIRE(error);  // one set bit too many or too few
        }
      }
  }
  SUBCASE("anything at all") {
    const EliasFano code(100001, 3001);
    const Words valid = slow_code(code, random_positions(100001, 3001, 8));
    for (unsigned round = 0; round < 50; ++round) {
      CAPTURE(round);
      Words damaged = round % 2 == 0 ? random_words(code.words(), round) : valid;
      std::mt19937 random(round);
      if (round % 2 != 0)
        for (int i = 0; i < 3; ++i) std::swap(damaged[random() % damaged.size()], damaged[random() % damaged.size()]);
      if (check(code, damaged) == false) CHECK(round % 2 != 0);
    }
    CHECK(check(code, Words(code.words(), 0)));
    CHECK(check(code, Words(code.words(), ~MaskWord{0})));
    CHECK_FALSE(check(code, valid));
  }
  SUBCASE("positions that do not ascend where the high part is cut for the threads") {
    // 16 neighbours in each bucket: every 17 bits of the high part hold 16 ones, and a cut falls between two of them.
    const EliasFano code(std::size_t{1} << 20, 65536);
    std::vector<std::size_t> positions(65536);
    std::iota(positions.begin(), positions.end(), std::size_t{0});
    const std::size_t cut = scape::count_words * 32, at = code.low_words() * 32 + cut;
    const Words valid = slow_code(code, positions);
    REQUIRE(code.low_bits() == 4);
    REQUIRE((bit_of(valid, at - 1) && bit_of(valid, at)));
    CHECK_FALSE(check(code, valid));
    const std::size_t first = cut - cut / 17;  // the number of the element after the cut
    for (const std::size_t same_as : {first - 1, first + 1}) {
      Words damaged = valid;
      for (std::size_t j = 0; j < 4; ++j) set_bit(damaged, first * 4 + j, bit_of(valid, same_as * 4 + j));
      CHECK(check(code, damaged));
    }
  }
  SUBCASE("positions past the end, behind which nothing is written") {
    const EliasFano code(4096, 33);
    REQUIRE(code.low_bits() == 6);
    REQUIRE(code.high_words() == 4);
    for (const std::size_t past : {1u, 4u, 5u, 33u}) {
      CAPTURE(past);
      Words coded(code.words());
      for (std::size_t i = 0; i < 33; ++i) {
        for (std::size_t j = 0; j < 6; ++j) set_bit(coded, i * 6 + j, (i >> j & 1) != 0);
        set_bit(coded, code.low_words() * 32 + i + (i + past < 33 ? 0 : 128 - 33));
      }
      const auto stream = backend.new_stream();
      const auto in = backend.array(coded), words = backend.array(Words(256, 5));
      const auto scratch = workspace(backend, code.workspace_bytes());
      BitPacker::decode(code, in.span(), words.span().first(128), scratch.span(), stream);
      if constexpr (Backend::reports_failed_work)
        CHECK_THROWS_AS(stream.synchronize(), scape::Error);
      else
        stream.synchronize();
      const Words all = backend.read(words);
      CHECK(std::count(all.begin() + 128, all.end(), 5u) == 128);
    }
  }
  SUBCASE("two equal positions anywhere") {
    const EliasFano code(4096, 256);
    std::vector<std::size_t> positions(256);
    std::iota(positions.begin(), positions.end(), std::size_t{800});
    const Words valid = slow_code(code, positions);
    REQUIRE(code.low_bits() == 4);
    CHECK_FALSE(check(code, valid));
    for (std::size_t i = 1; i < 256; ++i) {
      CAPTURE(i);
      if (i % 16 == 0) continue;  // the first of another bucket
      Words damaged = valid;
      for (std::size_t j = 0; j < 4; ++j) set_bit(damaged, i * 4 + j, bit_of(valid, (i - 1) * 4 + j));
      REQUIRE(check(code, damaged));
    }
  }
}

TEST_CASE("parts are the same size for every rank that keeps as many, so a plain all-gather carries codes") {
  // 10^7 parameters on 256 ranks, at 1 %: what a rank receives is near 0.0856 bits a parameter.
  const std::size_t size = 10'000'000;
  const scape::MaskPlan plan(scape::FlatLayout(size, 256));
  const std::vector<std::size_t> kept = plan.kept_by_rank(0.01);
  const EliasFano code(plan.part_words()[0] * 32, kept[0]);
  std::size_t received = 0;
  for (std::size_t rank = 0; rank + 1 < 256; ++rank) {
    REQUIRE(EliasFano(plan.part_words()[rank] * 32, kept[rank]) == code);
    received += code.words() * 32;
  }
  CHECK(static_cast<double>(received) / static_cast<double>(size) == doctest::Approx(0.0856).epsilon(0.01));
}

TEST_CASE_TEMPLATE("positions past 2^31", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const std::size_t edge = std::size_t{1} << (sanitized ? 22 : 31);  // bits of memory that is not shadowed
  const std::size_t bits = edge + 8192;
  const auto words = typename Backend::template Array<MaskWord>(BitPacker::words(bits), backend.memory);
  const auto scratch = workspace(backend, EliasFano(bits, 8).workspace_bytes());

  const std::vector<std::size_t> positions{0, 12345, edge - 2, edge - 1, edge, edge + 1, edge + 4097, bits - 1};
  const auto marks = backend.array(positions);
  const auto indices = backend.array(std::vector<std::size_t>(8));
  BitPacker::from_indices(marks.span(), words.span(), backend.stream);
  BitPacker::indices(words.span(), indices.span(), scratch.span(), backend.stream);
  CHECK(backend.read(indices) == positions);

  const EliasFano code(bits, 8);
  const auto coded = backend.array(Words(code.words()));
  BitPacker::encode(code, words.span(), coded.span(), scratch.span(), backend.stream);
  CHECK(backend.read(coded) == slow_code(code, positions));
  BitPacker::decode(code, coded.span(), words.span(), scratch.span(), backend.stream);
  BitPacker::indices(words.span(), indices.span(), scratch.span(), backend.stream);
  CHECK(backend.read(indices) == positions);

  const auto flags = backend.array(std::vector<std::uint8_t>(9));
  BitPacker::unpack(words.span(), edge - 4, flags.span(), backend.stream);
  CHECK(backend.read(flags) == std::vector<std::uint8_t>{0, 0, 1, 1, 1, 1, 0, 0, 0});
  BitPacker::pack(Sets{Pattern::alternating, 9}, 9, words.span(), edge - 4, backend.stream);
  BitPacker::unpack(words.span(), edge - 5, flags.span(), backend.stream);
  CHECK(backend.read(flags) == std::vector<std::uint8_t>{0, 1, 0, 1, 0, 1, 0, 1, 0});

  const auto tiles = backend.array(
      std::vector<scape::Tile>{{0, 0, 0, 4096, 0, 0}, {4096, edge, 0, 4096, 0, 0}, {8192, edge + 4096, 0, 4096, 0, 0}});
  const auto first_tile = backend.array(std::vector<std::size_t>{0, 2, 3});
  const auto offsets = backend.array(std::vector<std::size_t>(3));
  BitPacker::offsets({tiles.span(), {}, first_tile.span()}, words.span(), edge, offsets.span(), backend.stream);
  CHECK(backend.read(offsets) == std::vector<std::size_t>{0, 1, edge});
}

#if !defined(__CUDACC__)

TEST_CASE("positions of more than 32 bits are coded and decoded") {
  // The low parts of a code of 2^40 bits, which no test has the memory for.
  std::mt19937_64 random(9);
  for (std::size_t count = 1; count <= 40; ++count) {
    const std::size_t kept = 100;
    std::vector<std::size_t> values(kept);
    for (std::size_t& value : values) value = random() >> (64 - count);
    Words low(scape::words_for(kept * count) + 1), expected = low;
    {
      scape::detail::BitAppender appender(low.data(), 0);
      for (const std::size_t value : values) appender.append(value, count);
    }
    for (std::size_t i = 0; i < kept; ++i)
      for (std::size_t j = 0; j < count; ++j)
        if (values[i] >> j & 1) set_bit(expected, i * count + j);
    REQUIRE(low == expected);
    for (std::size_t i = 0; i < kept; ++i) REQUIRE(scape::detail::get_low(low.data(), i * count, count) == values[i]);
  }
}

TEST_CASE("results do not depend on the number of threads or on whose they are") {
  const std::size_t bits = 300'007;
  const auto positions = random_positions(bits, 5000, 10);
  const auto results = [&](HostBackend& backend) {
    std::vector<Words> all;
    const auto words = backend.array(random_words(BitPacker::words(bits + 13), 11));
    BitPacker::pack(Sets{Pattern::random, bits}, bits, words.span(), 13, backend.stream);
    all.push_back(backend.read(words));
    const auto marks = backend.array(positions);
    const auto mask = backend.array(Words(BitPacker::words(bits)));
    BitPacker::from_indices(marks.span(), mask.span(), backend.stream);
    all.push_back(backend.read(mask));
    all.push_back(encode(backend, {bits, 5000}, all.back()));
    all.push_back(decode(backend, {bits, 5000}, all.back(), backend.stream));
    const auto indices = backend.array(std::vector<std::size_t>(5000));
    const auto scratch = workspace(backend, BitPacker::indices_workspace_bytes(mask.size()));
    BitPacker::indices(mask.span(), indices.span(), scratch.span(), backend.stream);
    CHECK(backend.read(indices) == positions);
    return all;
  };
  HostBackend one(1), two(2), three(3);
  HostBackend runner(2, [](std::size_t count, void (*body)(void*, std::size_t), void* context) {
    std::thread other([=] {
      for (std::size_t i = count; i-- > count / 2;) body(context, i);
    });
    for (std::size_t i = count / 2; i-- > 0;) body(context, i);
    other.join();
  });
  const auto expected = results(one);
  CHECK(results(two) == expected);
  CHECK(results(three) == expected);
  CHECK(results(runner) == expected);
}

#endif

TEST_CASE_TEMPLATE("wrong arguments are named, and nothing is enqueued", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const auto words = backend.array(Words(4, 5)), code_words = backend.array(Words(16, 5));
  const auto flags = backend.array(std::vector<std::uint8_t>(128));
  const auto indices = backend.array(std::vector<std::size_t>(200));
  const auto scratch = workspace(backend, 64);
  const auto& stream = backend.stream;
  const EliasFano code(128, 10);
  const Sets sets{Pattern::all, 200};
  const auto names = [](const std::string& text, auto&& call) {
    CHECK_MESSAGE(message_of(call).starts_with(text), message_of(call));
  };

  names("first_bit is 129: ", [&] { BitPacker::pack(sets, 0, words.span(), 129, stream); });
  names("words.size() is 4: must hold 100 bits from bit 29 on",
        [&] { BitPacker::pack(sets, 100, words.span(), 29, stream); });
  names("words.size() is 4: ", [&] { BitPacker::pack(sets, ~std::size_t{0}, words.span(), 1, stream); });
  names("first_bit is 18446744073709551615: ",
        [&] { BitPacker::pack(sets, 2, words.span(), ~std::size_t{0}, stream); });
  names("words.size() is 4: ", [&] { BitPacker::pack(flags.span(), words.span(), 1, stream); });
  names("words.size() is 4: ", [&] { BitPacker::unpack(words.span(), 1, flags.span(), stream); });
  names("offsets.size() is 200: ", [&] { BitPacker::offsets({}, words.span(), 0, indices.span(), stream); });
  names("indices.size() is 200: ", [&] { BitPacker::indices(words.span(), indices.span(), scratch.span(), stream); });
  names("workspace.size() is 7: ",
        [&] { BitPacker::indices(words.span(), indices.span().first(9), scratch.span().first(7), stream); });
  names("workspace.data() is ",
        [&] { BitPacker::indices(words.span(), indices.span().first(9), scratch.span().subspan(1), stream); });
  names("kept is 129: ", [&] { EliasFano(128, 129); });
  names("words.size() is 3: must hold the code's 128 bits",
        [&] { BitPacker::encode(code, words.span().first(3), code_words.span(), scratch.span(), stream); });
  names("words.size() is 16: ",
        [&] { BitPacker::encode(code, code_words.span(), code_words.span(), scratch.span(), stream); });
  names("out.size() is 1: ",
        [&] { BitPacker::encode(code, words.span(), code_words.span().first(1), scratch.span(), stream); });
  names("workspace.size() is 0: ", [&] { BitPacker::encode(code, words.span(), code_words.span(), {}, stream); });
  names("in.size() is 1: ",
        [&] { BitPacker::decode(code, code_words.span().first(1), words.span(), scratch.span(), stream); });
  names("words.size() is 3: ",
        [&] { BitPacker::decode(code, code_words.span(), words.span().first(3), scratch.span(), stream); });
  names("workspace.size() is 0: ", [&] { BitPacker::decode(code, code_words.span(), words.span(), {}, stream); });
  CHECK(backend.read(words) == Words(4, 5));
  CHECK(backend.read(code_words) == Words(16, 5));
}
