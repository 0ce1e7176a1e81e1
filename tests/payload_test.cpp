// Coded payloads: blocks, scales, rounding errors and means against double arithmetic, bit for bit on every backend.

#include "backends.hpp"
#include "narrow_reference.hpp"
#include "support.hpp"

#include <scape/scape.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using scape::bfloat16;
using scape::e4m3;
using scape::e5m2;
using scape::MaskWord;
using scape::payload_block;
using scape::PayloadFormat;
using scape::scale_group;

constexpr std::size_t sizes[] = {0, 1, 127, 128, 129, 511, 512, 513, 5000};
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float largest = std::numeric_limits<float>::max();
constexpr float untouched = -77;
constexpr MaskWord unwritten = 0xdeadbeef;

template <class T>
constexpr PayloadFormat format_of = scape::detail::PayloadCode<T>::format;

std::size_t words_of(PayloadFormat format, std::size_t count) {
  return (count + payload_block - 1) / payload_block * scape::payload_block_words(format);
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, {}, std::bit_cast<std::uint32_t, float>, std::bit_cast<std::uint32_t, float>);
}

// Of one kind each.
std::vector<Floats> payloads(std::size_t count) {
  std::vector<Floats> all = {floats_of(1, count), Floats(count, 0.0f), Floats(count, -0.0f), Floats(count, 0.3f)};
  Floats any(count), denormal(count), huge(count), outlier(count), broken(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = random_bits(i);
    any[i] = std::bit_cast<float>(bits % 0x7f800000 | (bits << 31));
    denormal[i] = std::bit_cast<float>((bits & 0x807fffff) >> (bits % 9 == 0 ? 0 : 31));
    huge[i] = std::bit_cast<float>((bits & 0x807fffff) | (253 + bits % 2) << 23);
    outlier[i] = i % scale_group == 77 ? 1e6f : floats_of(2, 1)[0] * static_cast<float>(i % 13);
    broken[i] = i % 100 == 3 ? infinity : i % 100 == 51 ? -infinity : i % 100 == 99 ? -not_a_number : any[i];
  }
  all.insert(all.end(), {any, denormal, huge, outlier, broken, Floats(count, largest), Floats(count, not_a_number)});
  return all;
}

struct Coded {
  Words codes;
  Floats errors;
};

template <class Backend>
Coded encoded(Backend& backend, PayloadFormat format, const Floats& values) {
  const auto from = backend.array(values);
  const auto codes = backend.array(Words(words_of(format, values.size()), unwritten));
  const auto errors = backend.array(Floats(values.size(), untouched));
  encode_payload(format, from.span(), codes.span(), errors.span(), backend.stream);
  return {backend.read(codes), backend.read(errors)};
}
template <class Backend>
Floats decoded(Backend& backend, PayloadFormat format, const Words& codes, std::size_t count) {
  const auto from = backend.array(codes);
  const auto to = backend.array(Floats(count, untouched));
  decode_payload(format, from.span(), to.span(), backend.stream);
  return backend.read(to);
}

template <class T, class Backend>
void check_there_and_back(Backend& backend) {
  for (const std::size_t count : sizes) {
    const std::vector<Floats> all = payloads(count);
    for (std::size_t kind = 0; kind < all.size(); ++kind) {
      CAPTURE(count);
      CAPTURE(kind);
      Floats lost;
      const Floats expected = decoded_values<T>(all[kind], lost);
      const Coded coded = encoded(backend, format_of<T>, all[kind]);
      CHECK(same_bits(coded.errors, lost));
      CHECK(same_bits(decoded(backend, format_of<T>, coded.codes, count), expected));
      for (std::size_t i = 0; i < count; ++i)  // exact: nothing is lost for good
        if (std::isfinite(all[kind][i]) && double{coded.errors[i]} + double{expected[i]} != double{all[kind][i]})
          FAIL("value ", i, " is not code and error");
    }
  }
}

// Means of payloads of different kinds; in `errors`, which end before the last block does, what was there stays.
template <class T, class Backend>
void check_average(Backend& backend) {
  for (const std::size_t ranks : Counts{1, 2, 3, 5})
    for (const std::size_t count : sizes) {
      CAPTURE(ranks);
      CAPTURE(count);
      const std::vector<Floats> all = payloads(count);
      Floats sum, lost;
      Words parts;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const Floats& own = all[(4 + 4 * rank) % all.size()];
        const Words codes = encoded(backend, format_of<T>, own).codes;
        parts.insert(parts.end(), codes.begin(), codes.end());
        const Floats values = decoded_values<T>(own, lost);
        if (rank == 0) sum.assign(count, -0.0f);
        for (std::size_t i = 0; i < count; ++i) sum[i] = sum[i] + values[i];
      }
      for (float& value : sum) value /= static_cast<float>(ranks);
      const Floats expected = decoded_values<T>(sum, lost);
      const Floats before = floats_of(9, count);
      for (std::size_t i = 0; i < count; ++i) {
        const float scaled = static_cast<float>(ranks) * lost[i];
        lost[i] = before[i] + scaled;
      }

      const auto from = backend.array(parts);
      const auto mean = backend.array(Words(words_of(format_of<T>, count), unwritten));
      const auto errors = backend.array(before);
      average_payloads(format_of<T>, from.span(), ranks, mean.span(), errors.span(), backend.stream);
      CHECK(same_bits(backend.read(errors), lost));
      CHECK(same_bits(decoded(backend, format_of<T>, backend.read(mean), count), expected));
    }
}

}  // namespace

TEST_CASE_TEMPLATE("payload: codes and errors are those of double arithmetic, and add up to the values", Backend,
                   SCAPE_BACKENDS) {
  Backend backend;
  SUBCASE("bfloat16") { check_there_and_back<bfloat16>(backend); }
  SUBCASE("e5m2") { check_there_and_back<e5m2>(backend); }
  SUBCASE("e4m3") { check_there_and_back<e4m3>(backend); }
}

TEST_CASE_TEMPLATE("payload: means in the order of the ranks, and what coding them rounds away", Backend,
                   SCAPE_BACKENDS) {
  Backend backend;
  SUBCASE("bfloat16") { check_average<bfloat16>(backend); }
  SUBCASE("e5m2") { check_average<e5m2>(backend); }
  SUBCASE("e4m3") { check_average<e4m3>(backend); }
}

TEST_CASE_TEMPLATE("payload: a block is its codes and then its scales, every byte of it written", Backend,
                   SCAPE_BACKENDS) {
  Backend backend;
  Floats values(payload_block + 1);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = i < scale_group ? 448.0f : std::ldexp(1.0f, static_cast<int>(i / scale_group) - 1);
  const Words codes = encoded(backend, PayloadFormat::e4m3, values).codes;
  std::vector<std::uint8_t> bytes(codes.size() * sizeof(MaskWord));
  std::memcpy(bytes.data(), codes.data(), bytes.size());
  REQUIRE(bytes.size() == 2 * 516);
  CHECK(bytes[0] == 0x7e);            // 448 at the scale 1
  CHECK(bytes[scale_group] == 0x78);  // 256 at the scale 2^-8
  CHECK(bytes[512] == 127);           // 1
  CHECK(bytes[513] == 119);           // 2^-8
  CHECK(bytes[515] == 121);           // 2^-6
  CHECK(bytes[516] == 0x78);          // 8
  CHECK(bytes[517] == 0);             // behind the payload's end
  CHECK(bytes[516 + 511] == 0);
  CHECK(bytes[516 + 512] == 122);
  CHECK(bytes[516 + 513] == 1);  // of nothing: the smallest
  CHECK(bytes[516 + 515] == 1);

  const Words halves = encoded(backend, PayloadFormat::bfloat16, values).codes;
  REQUIRE(halves.size() == 2 * 256);
  CHECK(halves[0] == 0x43e043e0);
  CHECK(halves[256] == 0x00004100);
  CHECK(halves.back() == 0);
}

TEST_CASE_TEMPLATE("payload: codes of more blocks than the payload has are zeros", Backend, SCAPE_BACKENDS) {
  Backend backend;
  for (const PayloadFormat format : {PayloadFormat::bfloat16, PayloadFormat::e5m2, PayloadFormat::e4m3}) {
    const auto values = backend.array(Floats(10, 1.5f));
    const auto codes = backend.array(Words(3 * scape::payload_block_words(format), unwritten));
    const auto errors = backend.array(Floats(10, untouched));
    encode_payload(format, values.span(), codes.span(), errors.span(), backend.stream);
    Floats expected(3 * payload_block);
    std::fill_n(expected.begin(), 10, 1.5f);
    CHECK(same_bits(decoded(backend, format, backend.read(codes), expected.size()), expected));
  }
}

TEST_CASE_TEMPLATE("payload: a NaN or an infinity shows, and spoils nothing else", Backend, SCAPE_BACKENDS) {
  Backend backend;
  for (const PayloadFormat format : {PayloadFormat::bfloat16, PayloadFormat::e5m2, PayloadFormat::e4m3}) {
    Floats values(300, 1.25f);
    values[5] = not_a_number;
    values[130] = infinity;
    values[131] = -infinity;
    const Coded coded = encoded(backend, format, values);
    const Floats result = decoded(backend, format, coded.codes, values.size());
    const bool has_infinities = format == PayloadFormat::bfloat16;
    CHECK(std::isnan(result[5]));
    CHECK((has_infinities ? result[130] == infinity : std::isnan(result[130])));
    CHECK((has_infinities ? result[131] == -infinity : std::isnan(result[131])));
    CHECK(std::ranges::count(result, 1.25f) == 297);
    CHECK(std::ranges::count(coded.errors, 0.0f) == 300);
  }
}

TEST_CASE("payload: the same codes for any number of threads") {
  const Floats values = floats_of(4, 20'000);
  HostBackend one(1), three(3);
  for (const PayloadFormat format : {PayloadFormat::bfloat16, PayloadFormat::e5m2, PayloadFormat::e4m3})
    CHECK(encoded(one, format, values).codes == encoded(three, format, values).codes);
}
