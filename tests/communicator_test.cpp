// Collectives: exact results whatever the threads and the cut, documented bytes, errors instead of hangs.

#include "ranks.hpp"
#include "support.hpp"

#include <scape/bfloat16.hpp>
#include <scape/communicator.hpp>
#include <scape/thread_communicator.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using scape::MaskWord;
using scape::ThreadGroup;
using namespace std::chrono_literals;

constexpr std::size_t sizes[] = {0, 1, 2, 31, 33, 1000, 100'003};

Words words_of(std::size_t rank, std::size_t count) {
  Words words(count);
  for (std::size_t i = 0; i < count; ++i) words[i] = random_bits(1'000'000 * rank + i);
  return words;
}

// In the order of the ranks, in float32.
Floats mean_of_all(std::size_t ranks, std::size_t count) {
  Floats sum = floats_of(0, count);
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    const Floats values = floats_of(rank, count);
    for (std::size_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  for (float& value : sum) value /= static_cast<float>(ranks);
  return sum;
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return std::ranges::equal(a, b, {}, std::bit_cast<std::uint32_t, T>, std::bit_cast<std::uint32_t, T>);
}
bool same_bits(const Floats& a, const Floats& b) { return same_bits(std::span(a), std::span(b)); }

// Parts of different sizes; those of some ranks are empty.
Counts uneven_counts(std::size_t ranks, std::size_t count) {
  Counts counts(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) counts[rank] = rank % 3 == 1 ? 0 : count / (rank + 1) + rank % 2;
  return counts;
}

template <class Rank>
void check_all_reduce(Rank& rank, std::size_t count, const Floats& expected) {
  const std::size_t me = static_cast<std::size_t>(rank.rank());
  const auto in = rank.backend.array(floats_of(me, count));
  const auto out = rank.backend.array(Floats(count, -1));
  rank.communicator.all_reduce_mean(in.span(), out.span(), rank.side);
  rank.communicator.all_reduce_mean(in.span(), in.span(), rank.side);
  rank.side.synchronize();
  CHECK(same_bits(rank.backend.read(out), expected));
  CHECK(same_bits(rank.backend.read(in), expected));
}

template <class Rank>
void check_reduce_scatter(Rank& rank, std::size_t count, const Floats& expected) {
  const std::size_t me = static_cast<std::size_t>(rank.rank());
  const auto in = rank.backend.array(floats_of(me, expected.size()));
  const auto out = rank.backend.array(Floats(count, -1));
  rank.communicator.reduce_scatter_mean(in.span(), out.span(), rank.side);
  rank.side.synchronize();
  CHECK(same_bits(std::span<const float>(rank.backend.read(out)), std::span(expected).subspan(me * count, count)));
  CHECK(same_bits(rank.backend.read(in), floats_of(me, expected.size())));
}

// Parts by rank, into an array of their own and in place.
template <class Rank, class Gather>
void check_gather(Rank& rank, const Counts& counts, Gather gather) {
  const std::size_t me = static_cast<std::size_t>(rank.rank());
  Words expected, in_place;
  for (std::size_t other = 0; other < counts.size(); ++other) {
    const Words words = words_of(other, counts[other]);
    expected.insert(expected.end(), words.begin(), words.end());
    in_place.insert(in_place.end(), words.size(), 7);
    if (other == me) std::copy(words.begin(), words.end(), in_place.end() - static_cast<std::ptrdiff_t>(words.size()));
  }
  const auto own = rank.backend.array(words_of(me, counts[me]));
  const auto all = rank.backend.array(Words(expected.size(), 7));
  const auto both = rank.backend.array(in_place);
  const std::size_t begin = std::accumulate(counts.begin(), counts.begin() + rank.rank(), std::size_t{0});
  gather(std::span<const MaskWord>(own.span()), all.span());
  gather(std::span<const MaskWord>(both.span().subspan(begin, counts[me])), both.span());
  rank.side.synchronize();
  CHECK(rank.backend.read(all) == expected);
  CHECK(rank.backend.read(both) == expected);
}

// Arrays for one rank's collectives, large enough for what the tests below call.
struct Arrays {
  Floats in = Floats(64, 1), out = Floats(64);
  Words own = Words(64, 1), all = Words(64);
  std::span<const float> floats(std::size_t count) const { return std::span(in).first(count); }
  std::span<const MaskWord> words(std::size_t count) const { return std::span(own).first(count); }
};

template <class Rank>
void all_reduce(Rank& rank, Arrays& arrays, std::size_t count) {
  rank.communicator.all_reduce_mean(arrays.floats(count), std::span(arrays.out).first(count), rank.side);
}

}  // namespace

TEST_CASE("every collective, of every size, on any number of threads") {
  for (const int world : worlds) {
    const std::size_t ranks = static_cast<std::size_t>(world);
    for (const std::size_t size : sizes) {
      CAPTURE(world);
      CAPTURE(size);
      const Floats mean = mean_of_all(ranks, size);
      const Floats mean_of_parts = mean_of_all(ranks, size * ranks);
      const Counts even(ranks, size), uneven = uneven_counts(ranks, size);
      for (const int threads : {1, 3}) {
        if (threads == 3 && size < 1000) continue;
        run_ranks(
            world,
            [&](auto& rank) {
              check_all_reduce(rank, size, mean);
              check_reduce_scatter(rank, size, mean_of_parts);
              auto& communicator = rank.communicator;
              check_gather(rank, even, [&](auto own, auto all) { communicator.all_gather(own, all, rank.side); });
              check_gather(rank, uneven,
                           [&](auto own, auto all) { communicator.all_gather_uneven(own, all, uneven, rank.side); });
            },
            threads);
      }
    }
  }
}

TEST_CASE("bfloat16: summed in float32 in the order of the ranks, rounded once; half the bytes") {
  const auto narrow = [](const Floats& values) { return std::vector<scape::bfloat16>(values.begin(), values.end()); };
  for (const int world : worlds)
    for (const std::size_t size : Counts{0, 1, 33, 10'007}) {
      CAPTURE(world);
      CAPTURE(size);
      const std::size_t ranks = static_cast<std::size_t>(world);
      Floats sum(size * ranks);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const auto values = narrow(floats_of(rank, size * ranks));
        for (std::size_t i = 0; i < sum.size(); ++i)
          sum[i] = rank == 0 ? static_cast<float>(values[i]) : sum[i] + static_cast<float>(values[i]);
      }
      for (float& value : sum) value /= static_cast<float>(ranks);
      const std::vector<scape::bfloat16> mean = narrow(sum);
      run_ranks(world, [&](auto& rank) {
        const std::size_t me = static_cast<std::size_t>(rank.rank());
        auto& communicator = rank.communicator;
        const auto own = rank.backend.array(narrow(floats_of(me, size * ranks)));
        const auto all = rank.backend.array(mean), part = rank.backend.array(narrow(Floats(size, -1)));
        communicator.reduce_scatter_mean(own.span(), part.span(), rank.side);
        communicator.all_reduce_mean(own.span(), own.span(), rank.side);
        scape::fill_values(all.span(), scape::bfloat16(-1), rank.side);
        communicator.all_gather(part.span(), all.span(), rank.side);
        rank.side.synchronize();
        CHECK(rank.backend.read(own) == mean);
        CHECK(rank.backend.read(all) == mean);
        CHECK(communicator.bytes_sent() == (ranks - 1) * 4 * size * 2);
      });
    }
}

TEST_CASE("a payload in one collective or in ten gives the same bits") {
  constexpr std::size_t size = 12'345;
  for (const int world : {2, 3, 8}) {
    const Floats expected = mean_of_all(static_cast<std::size_t>(world), size);
    for (const std::size_t parts : Counts{1, 2, 10})
      run_ranks(world, [&](auto& rank) {
        const auto values = rank.backend.array(floats_of(static_cast<std::size_t>(rank.rank()), size));
        for (std::size_t part = 0; part < parts; ++part) {
          const std::size_t begin = size * part / parts, end = size * (part + 1) / parts;
          const auto piece = values.span().subspan(begin, end - begin);
          rank.communicator.all_reduce_mean(piece, piece, rank.side);
        }
        rank.side.synchronize();
        CHECK(same_bits(rank.backend.read(values), expected));
      });
  }
}

TEST_CASE("NaN, infinity and -0 are summed like other numbers") {
  const float inf = std::numeric_limits<float>::infinity();
  run_ranks(2, [&](auto& rank) {
    const auto values =
        rank.backend.array(rank.rank() == 0 ? Floats{-0.f, inf, inf, 3e38f} : Floats{-0.f, 1, -inf, 3e38f});
    rank.communicator.all_reduce_mean(values.span(), values.span(), rank.side);
    rank.side.synchronize();
    const Floats mean = rank.backend.read(values);
    CHECK(std::bit_cast<std::uint32_t>(mean[0]) == 0x80000000);
    CHECK(mean[1] == inf);
    CHECK(mean[2] != mean[2]);
    CHECK(mean[3] == inf);
  });
}

TEST_CASE("bytes sent are the documented ones") {
  for (const int world : worlds) {
    const std::size_t ranks = static_cast<std::size_t>(world);
    for (const std::size_t size : Counts{0, 1, 7, 40, 1001}) {
      CAPTURE(world);
      CAPTURE(size);
      const Counts uneven = uneven_counts(ranks, size);
      run_ranks(world, [&](auto& rank) {
        auto& communicator = rank.communicator;
        const auto sent_by = [&](auto collective) {
          const std::uint64_t before = communicator.bytes_sent();
          collective();
          rank.side.synchronize();
          return communicator.bytes_sent() - before;
        };
        const std::size_t me = static_cast<std::size_t>(rank.rank());
        const std::size_t sum = std::accumulate(uneven.begin(), uneven.end(), std::size_t{0});
        const auto whole = rank.backend.array(Floats(size * ranks, 1)), part = rank.backend.array(Floats(size, 1));
        const auto own = rank.backend.array(Words(std::max(size, uneven[me]), 1)),
                   all = rank.backend.array(Words(std::max(size * ranks, sum), 1));
        CHECK(communicator.bytes_sent() == 0);
        // W divides this one's size, so every rank sends the same.
        CHECK(sent_by([&] { communicator.all_reduce_mean(whole.span(), whole.span(), rank.side); }) ==
              2 * (ranks - 1) * size * 4);
        const std::size_t slice = size / ranks + (me < size % ranks);
        CHECK(sent_by([&] { communicator.all_reduce_mean(part.span(), part.span(), rank.side); }) ==
              (size - slice + (ranks - 1) * slice) * 4);
        CHECK(sent_by([&] { communicator.reduce_scatter_mean(whole.span(), part.span(), rank.side); }) ==
              (ranks - 1) * size * 4);
        CHECK(sent_by([&] {
                communicator.all_gather(own.span().first(size), all.span().first(size * ranks), rank.side);
              }) == (ranks - 1) * size * 4);
        CHECK(sent_by([&] {
                communicator.all_gather_uneven(own.span().first(uneven[me]), all.span().first(sum), uneven, rank.side);
              }) == (ranks - 1) * uneven[me] * 4);
      });
    }
  }
}

TEST_CASE("many small collectives in a row, host ahead of the streams") {
  run_ranks(5, [](auto& rank) {
    const std::size_t me = static_cast<std::size_t>(rank.rank());
    const auto values = rank.backend.array(Floats{static_cast<float>(me), 5});
    const auto words = rank.backend.array(Words(5, 0));
    for (int i = 0; i < 1000; ++i) {
      rank.communicator.all_reduce_mean(values.span(), values.span(), rank.side);
      rank.communicator.all_gather(words.span().subspan(me, 1), words.span(), rank.side);
    }
    rank.side.synchronize();
    CHECK(rank.backend.read(values) == Floats{2, 5});
  });
}

TEST_CASE("all_to_all: part r of every rank's, by rank; the documented bytes") {
  for (const int world : worlds)
    for (const std::size_t size : sizes) {
      const std::size_t ranks = static_cast<std::size_t>(world);
      CAPTURE(world);
      CAPTURE(size);
      run_ranks(world, [&](auto& rank) {
        const std::size_t me = static_cast<std::size_t>(rank.rank());
        const Words sent = words_of(me, size * ranks);
        Words expected;
        for (std::size_t other = 0; other < ranks; ++other) {
          const Words words = words_of(other, size * ranks);
          const auto begin = words.begin() + static_cast<std::ptrdiff_t>(me * size);
          expected.insert(expected.end(), begin, begin + static_cast<std::ptrdiff_t>(size));
        }
        const auto in = rank.backend.array(sent);
        const auto out = rank.backend.array(Words(size * ranks, 7));
        rank.communicator.all_to_all(in.span(), out.span(), rank.side);
        rank.side.synchronize();
        CHECK(rank.backend.read(out) == expected);
        CHECK(rank.backend.read(in) == sent);
        CHECK(rank.communicator.bytes_sent() == (ranks - 1) * size * 4);
      });
    }
}

#if !defined(SCAPE_TESTS_OVER_MPI)  // threads' own

namespace {

// One rank's thread, with streams that are empty before the communicator goes, whatever happens. Returns the text of
// the scape::Error that body or streams threw, "" for none.
std::string error_of_rank(const ThreadGroup& group, int index, const std::function<void(ThreadRank&)>& body) {
  ThreadRank rank(group, index, 1);
  std::string text;
  const auto note = [&](auto&& f) {
    try {
      f();
    } catch (const scape::Error& error) {
      text = error.what();
    }
  };
  note([&] { body(rank); });
  note([&] { rank.compute.synchronize(); });
  note([&] { rank.side.synchronize(); });
  return text;
}

std::vector<std::string> errors_of(const ThreadGroup& group, const std::function<void(ThreadRank&)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(group.size()));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group.size(); ++rank)
    threads.emplace_back([&, rank] { errors[static_cast<std::size_t>(rank)] = error_of_rank(group, rank, body); });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Every rank has an error that contains the text.
void check_all_contain(const std::vector<std::string>& errors, const std::string& text) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    CAPTURE(rank);
    CAPTURE(errors[rank]);
    CHECK(errors[rank].find(text) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("wrong arguments are refused at once, by name and value") {
  const ThreadGroup group(2);
  CHECK(group.size() == 2);
  for (const int ranks : {0, -1})
    CHECK(message_of([&] { ThreadGroup{ranks}; }).starts_with("ranks is " + std::to_string(ranks) + ":"));
  for (const int rank : {-1, 2})
    CHECK(message_of([&] {
            scape::ThreadCommunicator(group, rank);
          }).starts_with("rank is " + std::to_string(rank) + ":"));

  ThreadRank rank(group, 1, 1);
  auto& communicator = rank.communicator;
  CHECK(communicator.rank() == 1);
  CHECK(communicator.size() == 2);
  Arrays arrays;
  const std::span out(arrays.out);
  const std::span all(arrays.all);
  const Counts three = {1, 1, 1}, two = {2, 3};
  const auto& side = rank.side;
  CHECK(message_of([&] {
          communicator.all_reduce_mean(arrays.floats(5), out.first(4), side);
        }).starts_with("out.size() is 4:"));
  CHECK(message_of([&] {
          communicator.reduce_scatter_mean(arrays.floats(5), out.first(2), side);
        }).starts_with("in.size() is 5:"));
  CHECK(message_of([&] {
          communicator.all_gather(arrays.words(2), all.first(5), side);
        }).starts_with("all.size() is 5:"));
  CHECK(message_of([&] {
          communicator.all_gather_uneven(arrays.words(1), all.first(3), three, side);
        }).starts_with("counts.size() is 3:"));
  CHECK(message_of([&] {
          communicator.all_gather_uneven(arrays.words(2), all.first(5), two, side);
        }).starts_with("own.size() is 2:"));
  CHECK(message_of([&] {
          communicator.all_gather_uneven(arrays.words(3), all.first(6), two, side);
        }).starts_with("all.size() is 6:"));
  CHECK(communicator.bytes_sent() == 0);
  CHECK_NOTHROW(side.synchronize());
}

TEST_CASE("ranks that call different collectives all hear which rank is the odd one, and what it called") {
  using Calls = std::function<void(ThreadRank&, Arrays&)>;
  const Calls reduce_10 = [](ThreadRank& rank, Arrays& arrays) { all_reduce(rank, arrays, 10); };
  const Calls reduce_11 = [](ThreadRank& rank, Arrays& arrays) { all_reduce(rank, arrays, 11); };
  const Calls gather_10 = [](ThreadRank& rank, Arrays& arrays) {
    const std::size_t ranks = static_cast<std::size_t>(rank.communicator.size());
    rank.communicator.all_gather(arrays.words(10), std::span(arrays.all).first(10 * ranks), rank.side);
  };
  const struct {
    const char* what;
    int world, odd;
    Calls usual, other;
    const char* found;
    const char* expected;
  } cases[] = {
      {"another count", 2, 1, reduce_10, reduce_11, "rank 1 calls all_reduce_mean of 11 float",
       "all_reduce_mean of 10 float"},
      {"another count", 5, 0, reduce_10, reduce_11, "rank 0 calls all_reduce_mean of 11 float",
       "all_reduce_mean of 10 float"},
      {"another collective", 4, 2, reduce_10, gather_10, "rank 2 calls all_gather of 40 MaskWord",
       "all_reduce_mean of 10 float"},
      {"another collective", 4, 3, gather_10, reduce_10, "rank 3 calls all_reduce_mean of 10 float",
       "all_gather of 40 MaskWord"},
  };
  for (const auto& test : cases)
    for (const int before : {0, 3}) {  // good collectives before the bad one: the error counts them
      CAPTURE(test.what);
      const ThreadGroup group(test.world);
      const std::vector<std::string> errors = errors_of(group, [&](ThreadRank& rank) {
        Arrays arrays;
        for (int i = 0; i < before; ++i) all_reduce(rank, arrays, 5);
        (rank.rank() == test.odd ? test.other : test.usual)(rank, arrays);
        try {
          rank.side.synchronize();
        } catch (const scape::Error&) {
          CHECK_THROWS_AS(all_reduce(rank, arrays, 5), scape::Error);  // and from then on
          throw;
        }
      });
      check_all_contain(errors, test.found);
      check_all_contain(errors, test.expected);
      check_all_contain(errors, "collective " + std::to_string(before));
    }
}

// Red while ranks compare the sum of the counts only: then one rank reads past another's part.
TEST_CASE("ranks that disagree on the counts of an uneven gather get an error") {
  const Counts theirs = {1, 3, 2}, its = {1, 2, 3};
  const std::vector<std::string> errors = errors_of(ThreadGroup(3), [&](ThreadRank& rank) {
    Arrays arrays;
    const Counts& counts = rank.rank() == 2 ? its : theirs;
    const std::size_t own = counts[static_cast<std::size_t>(rank.rank())];
    rank.communicator.all_gather_uneven(arrays.words(own), std::span(arrays.all).first(6), counts, rank.side);
    rank.side.synchronize();
  });
  check_all_contain(errors, "rank 2");
}

TEST_CASE("a rank that makes one call more or less than the others is an error on all that wait") {
  for (const int extra : {-1, 1}) {
    const std::vector<std::string> errors = errors_of(ThreadGroup(3), [&](ThreadRank& rank) {
      Arrays arrays;
      for (int i = 0; i < 3 + (rank.rank() == 1 ? extra : 0); ++i) all_reduce(rank, arrays, 8);
      rank.side.synchronize();
    });
    for (std::size_t rank = 0; rank < 3; ++rank) {
      CAPTURE(errors[rank]);
      const bool waits = (rank == 1) == (extra > 0);
      CHECK(errors[rank].empty() == !waits);
      if (waits) CHECK(errors[rank].find("left the group while rank") != std::string::npos);
      if (waits && extra < 0) CHECK(errors[rank].starts_with("rank 1 left"));
      if (waits)
        CHECK(errors[rank].find("all_reduce_mean, collective " + std::to_string(3 + std::min(extra, 0))) !=
              std::string::npos);
    }
  }
}

TEST_CASE("a rank that leaves early does not disturb collectives that it has finished") {
  for (int repetition = 0; repetition < 100; ++repetition)
    run_ranks(4, [](ThreadRank& rank) {
      Arrays arrays;
      all_reduce(rank, arrays, 33);
      rank.side.synchronize();
      REQUIRE(arrays.out[32] == 1);
    });
}

// Red while the error tells only how many ranks came.
TEST_CASE("a rank that never comes is named after the group's patience") {
  const ThreadGroup group(3, 50ms);
  std::latch others_failed(2);
  const std::vector<std::string> errors = errors_of(group, [&](ThreadRank& rank) {
    Arrays arrays;
    if (rank.rank() == 1) others_failed.wait();
    all_reduce(rank, arrays, 8);
    try {
      rank.side.synchronize();
    } catch (const scape::Error&) {
      if (rank.rank() != 1) others_failed.count_down();
      throw;
    }
  });
  check_all_contain(errors, "50 ms");
  check_all_contain(errors, "2 of 3 ranks came");
  check_all_contain(errors, "all_reduce_mean");
  check_all_contain(errors, "rank 1");
}

// Red where the longest patience of all overflows to none.
TEST_CASE("patience without end") {
  const ThreadGroup group(2, std::chrono::milliseconds::max());
  const std::vector<std::string> errors = errors_of(group, [](ThreadRank& rank) {
    Arrays arrays;
    if (rank.rank() == 1) std::this_thread::sleep_for(20ms);
    all_reduce(rank, arrays, 8);
    rank.side.synchronize();
  });
  CHECK(errors == std::vector<std::string>{"", ""});
}

TEST_CASE("abort, by a rank or from outside, before, in and after a collective") {
  for (const bool by_rank : {false, true})
    for (const int collectives : {0, 1, 5}) {
      const ThreadGroup group(3);
      const std::vector<std::string> errors = errors_of(group, [&](ThreadRank& rank) {
        Arrays arrays;
        for (int i = 0; i < collectives; ++i) all_reduce(rank, arrays, 8);
        if (rank.rank() == 2) {
          rank.side.synchronize();
          by_rank ? rank.communicator.abort("out of fuel") : group.abort("out of fuel");
        }
        all_reduce(rank, arrays, 8);
        rank.side.synchronize();
      });
      check_all_contain(errors, by_rank ? "rank 2: out of fuel" : "out of fuel");
    }
}

TEST_CASE("a group that was aborted is aborted for those who come later, with the first reason") {
  const ThreadGroup group(2);
  group.abort("first");
  group.abort("second");
  const std::vector<std::string> errors = errors_of(group, [](ThreadRank& rank) {
    Arrays arrays;
    all_reduce(rank, arrays, 8);
    rank.side.synchronize();
  });
  CHECK(errors == std::vector<std::string>{"first", "first"});
}

TEST_CASE("groups side by side do not meet") {
  // Four threads, two groups of two, of different sizes and numbers of collectives.
  std::vector<std::thread> threads;
  std::vector<std::string> errors(2);
  for (const std::size_t which : {std::size_t{0}, std::size_t{1}})
    threads.emplace_back([&, which] {
      const ThreadGroup group(2);
      const std::size_t count = which == 0 ? 1000 : 77;
      const Floats expected = mean_of_all(2, count);
      for (const std::string& error : errors_of(group, [&](ThreadRank& rank) {
             for (int i = 0; i < (which == 0 ? 50 : 80); ++i) {
               Floats values = floats_of(static_cast<std::size_t>(rank.rank()), count);
               rank.communicator.all_reduce_mean(values, values, rank.side);
               rank.side.synchronize();
               if (!same_bits(values, expected)) throw scape::Error("wrong values");
             }
           }))
        errors[which] += error;
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(errors == std::vector<std::string>{"", ""});
}

TEST_CASE("a rank in two groups, one of them broken") {
  const ThreadGroup rows[] = {ThreadGroup(2), ThreadGroup(2)}, columns[] = {ThreadGroup(2), ThreadGroup(2)};
  std::vector<std::string> row_errors(4), column_errors(4);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      const std::size_t me = static_cast<std::size_t>(i), row = me / 2, column = me % 2;
      row_errors[me] = error_of_rank(rows[row], i % 2, [&](ThreadRank& in_row) {
        column_errors[me] = error_of_rank(columns[column], i / 2, [&](ThreadRank& in_column) {
          Arrays arrays, others;
          for (int round = 0; round < 20; ++round) {
            all_reduce(in_row, arrays, 8 + row);
            all_reduce(in_column, others, 8 + column);
          }
          in_row.side.synchronize();
          if (i == 3) in_row.communicator.abort("row only");
          all_reduce(in_column, others, 8);
          in_column.side.synchronize();
        });
        Arrays arrays;
        all_reduce(in_row, arrays, 8);
        in_row.side.synchronize();
      });
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(column_errors == std::vector<std::string>(4));
  CHECK(row_errors == std::vector<std::string>{"", "", "rank 1: row only", "rank 1: row only"});
}

TEST_CASE("a failed rank's memory is not given back while another still reads it") {
  std::latch reads(1), may_go_on(1);
  const ThreadGroup group(2);
  std::atomic<bool> first_returned = false;
  std::thread first([&] {
    error_of_rank(group, 0, [&](ThreadRank& rank) {
      auto values = std::make_unique<Floats>(10'000, 1.f);
      rank.communicator.all_reduce_mean(*values, *values, rank.side);
      CHECK_THROWS_AS(rank.side.synchronize(), scape::Error);
      first_returned = true;
    });
  });
  std::thread second([&] {
    // This rank's loops begin late: it has met the other, and is about to read its values.
    scape::HostPool pool(1, [&](std::size_t count, void (*body)(void*, std::size_t), void* context) {
      reads.count_down();
      may_go_on.wait();
      for (std::size_t i = 0; i < count; ++i) body(context, i);
    });
    scape::ThreadCommunicator communicator(group, 1);
    const scape::HostStream stream(pool);
    Floats values(10'000, 2);
    communicator.all_reduce_mean(values, values, stream);
    CHECK_THROWS_AS(stream.synchronize(), scape::Error);
  });
  reads.wait();
  group.abort("enough");
  std::this_thread::sleep_for(30ms);
  CHECK(!first_returned);
  may_go_on.count_down();
  first.join();
  second.join();
  CHECK(first_returned);
}

TEST_CASE("aborted at any moment, all ranks end and may free their memory at once") {
  for (int repetition = 0; repetition < 150; ++repetition) {
    const ThreadGroup group(3);
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(random_bits(static_cast<std::size_t>(repetition)) % 1500));
      group.abort("enough");
    });
    const std::vector<std::string> errors = errors_of(group, [](ThreadRank& rank) {
      while (true) {
        const auto values = std::make_unique<Floats>(500, 1.f);
        const auto words = std::make_unique<Words>(300, 1);
        const std::span part = std::span(*words).subspan(100 * static_cast<std::size_t>(rank.rank()), 100);
        rank.communicator.all_reduce_mean(*values, *values, rank.side);
        rank.communicator.all_gather(part, *words, rank.side);
        rank.side.synchronize();
      }
    });
    aborter.join();
    REQUIRE(errors == std::vector<std::string>(3, "enough"));
  }
}

// Red (a data race that only the thread sanitizer sees, or a wrong verdict) while a rank that has heard of the
// mismatch can write its next call where others still compare.
TEST_CASE("after a mismatch a rank may call on another stream while others still compare") {
  for (int repetition = 0; repetition < 200; ++repetition) {
    const std::vector<std::string> errors = errors_of(ThreadGroup(4), [](ThreadRank& rank) {
      Arrays arrays;
      all_reduce(rank, arrays, rank.rank() == 2 ? 9 : 8);
      try {
        rank.side.synchronize();
      } catch (const scape::Error&) {
      }
      rank.communicator.all_reduce_mean(arrays.floats(9), std::span(arrays.out).first(9), rank.compute);
      rank.compute.synchronize();
    });
    for (const std::string& error : errors) {
      CAPTURE(error);
      REQUIRE(error.find("rank 2 calls all_reduce_mean of 9") != std::string::npos);
    }
  }
}

// Red (it hangs) while a rank whose work fails between two meetings counts as reading for ever, and (a data race) while
// it frees its buffers before the other has read them.
TEST_CASE("a rank whose own threads fail in a collective does not leave the others waiting") {
  const ThreadGroup group(2, 100ms);
  std::thread first([&] {
    const std::string error = error_of_rank(group, 0, [](ThreadRank& rank) {
      Arrays arrays;
      all_reduce(rank, arrays, 8);
      rank.side.synchronize();
    });
    CHECK(error.find("rank 1") != std::string::npos);
  });
  std::thread second([&] {
    scape::HostPool pool(
        1, [](std::size_t, void (*)(void*, std::size_t), void*) { throw std::runtime_error("no threads"); });
    scape::ThreadCommunicator communicator(group, 1);
    const scape::HostStream stream(pool);
    Floats values(8, 2);
    communicator.all_reduce_mean(values, values, stream);
    CHECK_THROWS_WITH(stream.synchronize(), "no threads");
  });
  first.join();
  second.join();
}

TEST_CASE("all_to_all of wrong sizes is refused") {
  const ThreadGroup group(2);
  ThreadRank rank(group, 0, 1);
  Arrays arrays;
  const std::span all(arrays.all);
  CHECK(message_of([&] {
          rank.communicator.all_to_all(arrays.words(5), all.first(5), rank.side);
        }).starts_with("in.size() is 5: must be a multiple of size(), 2"));
  CHECK(message_of([&] {
          rank.communicator.all_to_all(arrays.words(6), all.first(4), rank.side);
        }).starts_with("out.size() is 4: must be in.size(), 6"));
  CHECK(rank.communicator.bytes_sent() == 0);
}

TEST_CASE("all_to_all of another size is an error that names the rank") {
  const ThreadGroup group(3);
  std::vector<std::unique_ptr<Arrays>> arrays;
  for (int rank = 0; rank < 3; ++rank) arrays.push_back(std::make_unique<Arrays>());
  check_all_contain(errors_of(group,
                              [&](ThreadRank& rank) {
                                Arrays& mine = *arrays[static_cast<std::size_t>(rank.rank())];
                                const std::size_t count = rank.rank() == 1 ? 12 : 9;
                                rank.communicator.all_to_all(mine.words(count), std::span(mine.all).first(count),
                                                             rank.side);
                              }),
                    "rank 1 calls all_to_all of 12 MaskWord");
}

#endif
