// Ranks that disagree: every rank hears which one is odd and in what.

#include "ranks.hpp"
#include "support.hpp"

#include <scape/adams.hpp>
#include <scape/agreement.hpp>
#include <scape/fingerprint.hpp>
#include <scape/host/hash.hpp>
#include <scape/host/pack.hpp>
#include <scape/host/payload.hpp>
#include <scape/host/select.hpp>
#include <scape/host/update.hpp>
#include <scape/layout.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using scape::AgreedValue;
using scape::MaskWord;

void check_all(const std::map<int, std::string>& texts, const std::string& expected) {
  for (const auto& found : texts) {
    CAPTURE(found.first);
    CHECK(found.second == expected);
  }
}

struct Flip {
  MaskWord* words;
  SCAPE_HOST_DEVICE void operator()(std::size_t) const { words[0] ^= 4; }
};

// A communicator that flips one bit of what it gathers into a bitmap, in the call after `calls` others.
template <class Rank>
class FaultyCommunicator {
 public:
  using Stream = typename Rank::Stream;

  FaultyCommunicator(Rank& rank, std::size_t words, std::size_t calls) : rank_(rank), words_(words), calls_(calls) {}
  int rank() const { return rank_.rank(); }
  int size() const { return rank_.communicator.size(); }
  std::uint64_t bytes_sent() const { return rank_.communicator.bytes_sent(); }
  void all_reduce_mean(std::span<const float> in, std::span<float> out, const Stream& stream) {
    ++reductions;
    rank_.communicator.all_reduce_mean(in, out, stream);
  }
  void reduce_scatter_mean(std::span<const float> in, std::span<float> out, const Stream& stream) {
    rank_.communicator.reduce_scatter_mean(in, out, stream);
  }
  void all_gather(std::span<const MaskWord> own, std::span<MaskWord> all, const Stream& stream) {
    rank_.communicator.all_gather(own, all, stream);
    if (all.size() == words_ && calls_-- == 0) for_each(1, Flip{all.data()}, stream);
  }
  std::size_t reductions = 0;

 private:
  Rank& rank_;
  std::size_t words_, calls_;
};

}  // namespace

TEST_CASE_TEMPLATE("agreement: a hash of words is the same everywhere, and shows every changed bit", Backend,
                   SCAPE_BACKENDS) {
  Backend backend;
  const auto hash = [&](const Words& words) {
    const auto array = backend.array(words);
    const auto result = backend.array(Words(2, 7));
    hash_words(std::span<const MaskWord>(array.span()), result.span().template first<2>(), backend.stream);
    const Words read = backend.read(result);
    return std::pair(read[0], read[1]);
  };
  CHECK(hash({}) == std::pair<MaskWord, MaskWord>(0, 0));
  for (const std::size_t size : Counts{1, 31, 33, 1000, 40'000}) {
    Words words(size);
    for (std::size_t i = 0; i < size; ++i) words[i] = random_bits(i);
    std::pair<MaskWord, MaskWord> expected = {0, 0};
    for (std::size_t i = 0; i < size; ++i) {
      expected.first += scape::detail::HashWord::first(i, words[i]);
      expected.second += scape::detail::HashWord::second(i, words[i]);
    }
    CHECK(hash(words) == expected);
  }
  std::set<std::pair<MaskWord, MaskWord>> seen = {hash(Words(65))};
  for (std::size_t bit = 0; bit < 65 * 32; ++bit) {
    Words words(65);
    words[bit / 32] = MaskWord{1} << bit % 32;
    seen.insert(hash(words));
  }
  CHECK(seen.size() == 65 * 32 + 1);
}

TEST_CASE("agreement: the odd one is who differs from most; of two, the second") {
  const std::array values = {AgreedValue::integer("count", 0), AgreedValue::real("rate", 0),
                             AgreedValue::hash("print", 0)};
  const auto told = [&](const std::vector<std::array<std::uint64_t, 3>>& of_ranks) {
    Words records;
    for (const auto& record : of_ranks)
      for (const std::uint64_t value : record) {
        records.push_back(static_cast<MaskWord>(value));
        records.push_back(static_cast<MaskWord>(value >> 32));
      }
    return scape::detail::disagreement(values, records);
  };
  const std::uint64_t half = AgreedValue::real("", 0.5).bits, big = 5'000'000'000;
  CHECK(told({{1, half, 3}, {1, half, 3}}) == "");
  CHECK(told({{1, half, 3}}) == "");
  CHECK(told({{1, half, 3}, {big, half, 3}}) ==
        "rank 1 disagrees with the other ranks: its count is 5000000000, theirs 1");
  CHECK(told({{2, half, 3}, {1, half, 3}, {1, half, 3}}) ==
        "rank 0 disagrees with the other ranks: its count is 2, theirs 1");
  CHECK(told({{1, half, 3}, {1, 0, 3}, {1, half, 3}}) ==
        "rank 1 disagrees with the other ranks: its rate is 0, theirs 0.5");
  CHECK(told({{1, half, 3}, {1, half, 3}, {1, half, 4}}) == "rank 2 disagrees with the other ranks: its print differs");
  CHECK(told({{1, half, 3}, {1, half, 3 + (std::uint64_t{1} << 32)}}) ==
        "rank 1 disagrees with the other ranks: its print differs");
  CHECK(AgreedValue::real("", -0.0).bits == AgreedValue::real("", 0.0).bits);
}

TEST_CASE_TEMPLATE("agreement: step, learning rate, order of buckets and mask are compared, on every rank", Rank,
                   SCAPE_RANKS) {
  for (const int ranks : {2, 3, 5})
    for (const int odd : {1, ranks - 1})
      for (const int field : {0, 1, 2, 3, 4}) {
        CAPTURE(ranks);
        CAPTURE(odd);
        const auto texts = thrown_by_ranks<Rank>(ranks, [&](Rank& rank) {
          const auto mask = rank.backend.array(Words(100, 0x55555555));
          Words other(100, 0x55555555);
          other[99] ^= 1u << 31;
          const auto odd_mask = rank.backend.array(other);
          scape::StepAgreement<typename Rank::Stream, std::remove_reference_t<decltype(rank.memory)>> agreement(
              rank.rank(), ranks, rank.memory);
          const auto compare = [&](std::size_t step, bool is_odd) {
            agreement.compare(is_odd && field == 0 ? 7 : step, is_odd && field == 1 ? 0.5f : 0.25f,
                              is_odd && field == 2 ? 8 : 9, is_odd && field == 3 ? odd_mask.span() : mask.span(),
                              rank.communicator, rank.side);
          };
          compare(3, false);
          rank.side.synchronize();
          agreement.rethrow();
          compare(4, rank.rank() == odd);
          if (field == 4) agreement.compare(5, 0.25f, 9, {}, rank.communicator, rank.side);
          const std::string text = thrown_by<scape::Error>([&] { rank.side.synchronize(); });
          CHECK((text == "" || text == thrown_by<scape::Error>([&] { agreement.rethrow(); })));
          agreement.rethrow();
        });
        const std::string name = "rank " + std::to_string(odd) + " disagrees with the other ranks: its ";
        const std::string what[] = {"number of steps is 7, theirs 4", "learning rate is 0.5, theirs 0.25",
                                    "order of buckets differs", "mask differs"};
        for (const auto& [rank, text] : texts) {
          const std::string step = "step " + std::to_string(field == 0 && rank == odd ? 7 : 4) + ": ";
          CHECK(text == (field == 4 ? "" : step + name + what[field]));
        }
      }
}

TEST_CASE_TEMPLATE("agreement: a learning rate that one rank alone is given ends the next step on all", Rank,
                   SCAPE_RANKS) {
  for (const double density : {1.0, 0.1})
    for (const auto& [every, found] : {std::pair<std::size_t, const char*>(1, "3"), {4, "5"}, {0, ""}}) {
      const auto texts = thrown_by_ranks<Rank>(3, [&, every = every](Rank& rank) {
        const scape::FlatLayout layout(1000, 3);
        const auto gradient = rank.backend.array(Floats(1000, 1)), parameters = rank.backend.array(Floats(1000, 1));
        scape::AdamS optimizer(layout, rank.communicator, rank.memory, rank.compute, rank.side,
                               {.density = density, .compare_every = every});
        for (std::size_t step = 0; step < 6; ++step) {
          if (step == 2 && rank.rank() == 1) optimizer.set_learning_rate(0.5f);
          optimizer.step(gradient.span(), parameters.span(), rank.compute);
          rank.compute.synchronize();
          rank.side.synchronize();
        }
      });
      const std::string text = ": rank 1 disagrees with the other ranks: its learning rate is 0.5, theirs 0.001";
      check_all(texts, every == 0 ? "" : "step " + std::string(found) + text);
    }
}

TEST_CASE_TEMPLATE("agreement: one bit of one rank's mask", Rank, SCAPE_RANKS) {
  const auto texts = thrown_by_ranks<Rank>(3, [&](Rank& rank) {
    const scape::FlatLayout layout(1000, 3);
    const std::size_t words = scape::MaskPlan(layout).exchanged_words();
    FaultyCommunicator<Rank> communicator(rank, words, rank.rank() == 2 ? 3 : 1000);
    const auto gradient = rank.backend.array(floats_of(1, 1000)), parameters = rank.backend.array(Floats(1000, 1));
    scape::AdamS optimizer(layout, communicator, rank.memory, rank.compute, rank.side,
                           {.density = 0.1, .mask_coding = scape::MaskCoding::bitmap});
    const std::string text = thrown_by<scape::Error>([&] {
      for (std::size_t step = 0; step < 6; ++step) {
        optimizer.step(gradient.span(), parameters.span(), rank.compute);
        rank.compute.synchronize();
        rank.side.synchronize();
      }
    });
    CHECK(communicator.reductions == 3);
    if (text != "") throw scape::Error(text);
  });
  // The first mask serves step 1, the second, made in it, step 2; the fourth is made in step 3, for the payload of 4.
  check_all(texts, "step 3: rank 2 disagrees with the other ranks: its mask differs");
}

TEST_CASE_TEMPLATE("agreement: buckets that one rank adds in another order", Rank, SCAPE_RANKS) {
  const auto texts = thrown_by_ranks<Rank>(3, [](Rank& rank) {
    const scape::BucketLayout layout({{300, false, true, 0}, {300, false, true, 1}, {300, false, true, 2}}, 3);
    const auto gradient = rank.backend.array(Floats(900, 1)), parameters = rank.backend.array(Floats(900, 1));
    scape::AdamS optimizer(layout, rank.communicator, rank.memory, rank.compute, rank.side, {.density = 0.1});
    for (std::size_t i = 0; i < 4; ++i) {
      auto step = optimizer.begin_step(gradient.span(), rank.compute);
      for (const std::size_t bucket : {0u, 1u, 2u}) step.add(i == 1 && rank.rank() == 1 ? 2 - bucket : bucket);
      step.finish(parameters.span());
      rank.compute.synchronize();
      rank.side.synchronize();
    }
  });
  check_all(texts, "step 2: rank 1 disagrees with the other ranks: its order of buckets differs");
}
