// MpiCommunicator: the bodies of all communicators, and what only processes have; every error on a group of its own.

#include "../communicator_test.cpp"

#include <scape/mpi/communicator.hpp>

#include <sys/mman.h>
#include <unistd.h>

#include <optional>

namespace {

using scape::MpiCommunicator;
using scape::MpiOptions;

// A rank of the first `ranks` processes, which has ended its work when this returns: the text of the scape::Error that
// body or streams threw, "" for none. Nothing in the other processes.
template <class F>
std::optional<std::string> error_of(int ranks, const MpiOptions& options, F body) {
  const MPI_Comm group = MpiRank::first(ranks);
  if (group == MPI_COMM_NULL) return std::nullopt;
  std::string text;
  {
    MpiRank rank(group, options, 1);
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
  }
  MPI_Barrier(group);  // the next group is made of the same processes
  return text;
}

// So long that ranks which are merely slow are not given up.
constexpr std::chrono::milliseconds patience = 1s;

// If this process is one of the ranks.
void check_contains(const std::optional<std::string>& error, const std::string& text) {
  if (!error) return;
  CAPTURE(*error);
  CHECK(error->find(text) != std::string::npos);
}

void reduce(MpiRank& rank, std::vector<scape::bfloat16>& values) {
  rank.communicator.all_reduce_mean(values, values, rank.side);
}

// One message from each of the others, past the communicator.
void hear_from_others(MPI_Comm group) {
  int size = 0;
  MPI_Comm_size(group, &size);
  for (int other = 1; other < size; ++other)
    MPI_Recv(nullptr, 0, MPI_BYTE, MPI_ANY_SOURCE, 0, group, MPI_STATUS_IGNORE);
}
void tell(MPI_Comm group, int rank) { MPI_Send(nullptr, 0, MPI_BYTE, rank, 0, group); }

}  // namespace

TEST_CASE("mpi: blocks of one element, of a few, and one for all give the same bits") {
  for (const int world : {1, 2, 3, 5})
    for (const std::size_t staging : Counts{1, 4, 64, 1000, 1 << 20}) {
      CAPTURE(world);
      CAPTURE(staging);
      const std::size_t ranks = static_cast<std::size_t>(world);
      for (const std::size_t size : Counts{0, 1, 2, 7, 33, 500}) {
        const Floats mean = mean_of_all(ranks, size), mean_of_parts = mean_of_all(ranks, size * ranks);
        const Counts even(ranks, size), uneven = uneven_counts(ranks, size);
        const auto error = error_of(world, {.staging_bytes = staging}, [&](MpiRank& rank) {
          check_all_reduce(rank, size, mean);
          check_reduce_scatter(rank, size, mean_of_parts);
          auto& communicator = rank.communicator;
          check_gather(rank, even, [&](auto own, auto all) { communicator.all_gather(own, all, rank.side); });
          check_gather(rank, uneven,
                       [&](auto own, auto all) { communicator.all_gather_uneven(own, all, uneven, rank.side); });
        });
        CHECK(error.value_or("") == "");
      }
    }
}

TEST_CASE("mpi: all_to_all of wrong sizes is refused") {
  run_ranks(2, [](MpiRank& rank) {
    const Words in(4);
    Words out(6);
    CHECK(message_of([&] {
            rank.communicator.all_to_all(in, out, rank.side);
          }).starts_with("out.size() is 6: must be in.size(), 4"));
    CHECK(message_of([&] {
            rank.communicator.all_to_all(std::span(in).first(3), std::span(out).first(3), rank.side);
          }).starts_with("in.size() is 3: must be a multiple of size(), 2"));
    CHECK(rank.communicator.bytes_sent() == 0);
  });
}

// Elements and bytes that no int can count; the pages are the same few again and again.
TEST_CASE("mpi: more than 2^31 elements") {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  if (MpiRank::world() > 1) return;
  constexpr std::size_t count = (std::size_t{1} << 31) + 5, page = 64 << 20, bytes = (count * 2 / page + 1) * page;
  const int file = memfd_create("pages", 0);
  REQUIRE(ftruncate(file, page) == 0);
  void* const memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  for (std::size_t at = 0; at < bytes; at += page)  // the last one is by itself
    REQUIRE(mmap(static_cast<std::byte*>(memory) + at, page, PROT_READ | PROT_WRITE,
                 MAP_FIXED | (at + page < bytes ? MAP_SHARED : MAP_PRIVATE), file, 0) != MAP_FAILED);
  auto* const values = static_cast<scape::bfloat16*>(memory);
  const std::size_t tail = count - 3;
  Words own(3), all(3);
  run_ranks(1, [&](MpiRank& rank) {
    scape::MpiCommunicator communicator(MPI_COMM_SELF);
    const std::span<scape::bfloat16> span(values, count);
    values[1] = scape::bfloat16(3.0f);
    values[tail] = scape::bfloat16(5.0f);
    communicator.all_reduce_mean(span, span, rank.side);
    rank.side.synchronize();
    CHECK(static_cast<float>(values[1]) == 3);
    CHECK(static_cast<float>(values[tail]) == 5);
    // Sent from the end to the beginning, so that what is not sent is missed.
    communicator.all_gather(span.subspan(tail - 1, 4), span.first(4), rank.side);
    rank.side.synchronize();
    CHECK(static_cast<float>(values[1]) == 5);
  });
  munmap(memory, bytes);
  close(file);
#endif
}

TEST_CASE("mpi: ranks that call different collectives all hear which rank is the odd one, and what it called") {
  for (const int before : {0, 3}) {
    const auto after_good_ones = [&](MpiRank& rank, Arrays& arrays) {
      for (int i = 0; i < before; ++i) all_reduce(rank, arrays, 5);
    };
    const auto error = error_of(3, {}, [&](MpiRank& rank) {
      Arrays arrays;
      after_good_ones(rank, arrays);
      all_reduce(rank, arrays, rank.rank() == 2 ? 11 : 10);
      try {
        rank.side.synchronize();
      } catch (const scape::Error&) {
        CHECK_THROWS_AS(all_reduce(rank, arrays, 5), scape::Error);  // and from then on
        throw;
      }
    });
    check_contains(error, "collective " + std::to_string(before) + ": rank 2 calls all_reduce_mean of 11 float, " +
                              "the others all_reduce_mean of 10 float");
  }
}

TEST_CASE("mpi: another element type, collective, or counts") {
  check_contains(error_of(3, {},
                          [](MpiRank& rank) {
                            Arrays arrays;
                            std::vector<scape::bfloat16> values(5);
                            rank.rank() == 0 ? reduce(rank, values) : all_reduce(rank, arrays, 5);
                            rank.side.synchronize();  // before the arrays go
                          }),
                 "collective 0: rank 0 calls all_reduce_mean of 5 bfloat16, the others all_reduce_mean of 5 float");
  check_contains(error_of(5, {},
                          [](MpiRank& rank) {
                            Arrays arrays;
                            if (rank.rank() == 3)
                              rank.communicator.all_gather(arrays.words(2), std::span(arrays.all).first(10), rank.side);
                            else
                              all_reduce(rank, arrays, 10);
                            rank.side.synchronize();
                          }),
                 "rank 3 calls all_gather of 10 MaskWord, the others all_reduce_mean of 10 float");
  const Counts theirs = {1, 3, 2}, its = {1, 2, 3};
  check_contains(error_of(3, {},
                          [&](MpiRank& rank) {
                            Arrays arrays;
                            const Counts& counts = rank.rank() == 2 ? its : theirs;
                            const std::size_t own = counts[static_cast<std::size_t>(rank.rank())];
                            rank.communicator.all_gather_uneven(arrays.words(own), std::span(arrays.all).first(6),
                                                                counts, rank.side);
                            rank.side.synchronize();
                          }),
                 "rank 2 calls all_gather_uneven of 6 MaskWord");
}

TEST_CASE("mpi: a rank that makes one call more or less than the others is an error on all that wait") {
  for (const int extra : {-1, 1}) {
    bool waits = false;
    const auto error = error_of(3, {}, [&](MpiRank& rank) {
      Arrays arrays;
      waits = (rank.rank() == 1) == (extra > 0);
      for (int i = 0; i < 3 + (rank.rank() == 1 ? extra : 0); ++i) all_reduce(rank, arrays, 8);
      rank.side.synchronize();
    });
    if (!error) continue;
    CAPTURE(*error);
    CHECK(error->empty() == !waits);
    if (waits) check_contains(error, "left the group while rank");
    if (waits && extra < 0) CHECK(error->starts_with("rank 1 left"));
    if (waits) check_contains(error, "all_reduce_mean, collective " + std::to_string(3 + std::min(extra, 0)));
  }
}

// Red while a rank that has left counts as gone from the collectives that it has finished.
TEST_CASE("mpi: a rank that leaves early does not disturb collectives that it has finished") {
  for (int repetition = 0; repetition < 20; ++repetition)
    run_ranks(3, [](MpiRank& rank) {
      Arrays arrays;
      all_reduce(rank, arrays, 33);
      rank.side.synchronize();
      REQUIRE(arrays.out[32] == 1);
    });
}

TEST_CASE("mpi: a rank that does not come is named after the patience") {
  const MPI_Comm group = MpiRank::first(3);
  const auto error = error_of(3, {.patience = patience}, [&](MpiRank& rank) {
    Arrays arrays;
    all_reduce(rank, arrays, 8);
    rank.side.synchronize();
    if (rank.rank() == 1) hear_from_others(group);
    all_reduce(rank, arrays, 8);
    try {
      rank.side.synchronize();
    } catch (const scape::Error&) {
      if (rank.rank() != 1) tell(group, 1);
      throw;
    }
  });
  check_contains(error,
                 "has waited for 1000 ms in all_reduce_mean, collective 1: only 2 of 3 ranks came, rank 1 did not");
  if (error) CHECK(error->ends_with("rank 1 did not"));
}

TEST_CASE("mpi: a rank that stays away in the middle of a collective") {
  const MPI_Comm group = MpiRank::first(3);
  const auto error = error_of(3, {.patience = patience}, [&](MpiRank& rank) {
    scape::HostPool pool(1, [&](std::size_t count, void (*body)(void*, std::size_t), void* context) {
      if (rank.rank() == 1) hear_from_others(group);
      for (std::size_t i = 0; i < count; ++i) body(context, i);
    });
    const scape::HostStream stream(pool);
    Floats values(8, 2);
    Arrays arrays;
    rank.communicator.all_reduce_mean(values, values, stream);
    if (rank.rank() == 1) {
      stream.synchronize();  // well, since it has all that it needs
      all_reduce(rank, arrays, 8);
    }
    try {
      stream.synchronize();
    } catch (const scape::Error&) {
      tell(group, 1);
      throw;
    }
  });
  check_contains(error, "has waited for 1000 ms in all_reduce_mean, collective 0: all ranks came");
}

TEST_CASE("mpi: patience without end") {
  const auto error = error_of(2, {.patience = std::chrono::milliseconds::max()}, [](MpiRank& rank) {
    Arrays arrays;
    if (rank.rank() == 1) std::this_thread::sleep_for(20ms);
    all_reduce(rank, arrays, 8);
    rank.side.synchronize();
  });
  CHECK(error.value_or("") == "");
}

TEST_CASE("mpi: abort before, in and after collectives, first reason") {
  for (const int collectives : {0, 1, 5}) {
    const auto error = error_of(3, {}, [&](MpiRank& rank) {
      Arrays arrays;
      for (int i = 0; i < collectives; ++i) all_reduce(rank, arrays, 8);
      if (rank.rank() == 2) {
        rank.side.synchronize();
        rank.communicator.abort("out of fuel");
        rank.communicator.abort("too late");
      }
      all_reduce(rank, arrays, 8);
      rank.side.synchronize();
    });
    if (error) CHECK(*error == "rank 2: out of fuel");
  }
}

TEST_CASE("mpi: abort by a rank whose own stream waits in a collective") {
  const MPI_Comm group = MpiRank::first(3);
  const auto error = error_of(3, {}, [&](MpiRank& rank) {
    Arrays arrays;
    if (rank.rank() == 0) {
      tell(group, 1);
      tell(group, 2);
    } else {
      all_reduce(rank, arrays, 8);
      MPI_Recv(nullptr, 0, MPI_BYTE, 0, 0, group, MPI_STATUS_IGNORE);
    }
    if (rank.rank() == 2) rank.communicator.abort("enough");
    if (rank.rank() != 0) rank.side.synchronize();
    if (rank.rank() == 0) all_reduce(rank, arrays, 8);
    rank.side.synchronize();
  });
  if (error) CHECK(*error == "rank 2: enough");
}

TEST_CASE("mpi: a reason longer than a message is cut") {
  const std::string reason(2000, 'x');
  const auto error = error_of(2, {}, [&](MpiRank& rank) {
    Arrays arrays;
    if (rank.rank() == 0) rank.communicator.abort(reason);
    all_reduce(rank, arrays, 8);
    rank.side.synchronize();
  });
  check_contains(error, "rank 0: " + reason.substr(0, 400));
}

TEST_CASE("mpi: a rank whose own threads fail in a collective does not leave the others waiting") {
  const auto error = error_of(3, {}, [](MpiRank& rank) {
    scape::HostPool pool(1, [&](std::size_t count, void (*body)(void*, std::size_t), void* context) {
      if (rank.rank() == 1) throw std::runtime_error("no threads");
      for (std::size_t i = 0; i < count; ++i) body(context, i);
    });
    const scape::HostStream stream(pool);
    Floats values(8, 2);
    rank.communicator.all_reduce_mean(values, values, stream);
    if (rank.rank() == 1) {
      CHECK_THROWS_WITH(stream.synchronize(), "no threads");
      throw scape::Error("rank 1 failed in a collective");  // as the others find
    }
    stream.synchronize();
  });
  check_contains(error, "rank 1 failed in a collective");
}

// Red (with the address sanitizer) where MPI reads or writes the caller's buffers.
TEST_CASE("mpi: aborted at any moment, all ranks end and may free their memory at once") {
  for (std::size_t repetition = 0; repetition < 20; ++repetition) {
    const auto error = error_of(3, {.staging_bytes = 256}, [&](MpiRank& rank) {
      std::thread aborter;
      if (rank.rank() == 1)
        aborter = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::microseconds(random_bits(repetition) % 3000));
          rank.communicator.abort("enough");
        });
      try {
        while (true) {
          const auto values = std::make_unique<Floats>(500, 1.f);
          const auto words = std::make_unique<Words>(300, 1);
          const std::span part = std::span(*words).subspan(100 * static_cast<std::size_t>(rank.rank()), 100);
          rank.communicator.all_reduce_mean(*values, *values, rank.side);
          rank.communicator.all_gather(part, *words, rank.side);
          rank.side.synchronize();
        }
      } catch (const scape::Error&) {
        if (aborter.joinable()) aborter.join();
        throw;
      }
    });
    if (error) REQUIRE(*error == "rank 1: enough");
  }
}

TEST_CASE("mpi: the program's own messages and collectives on the same group do not mix with ours") {
  const MPI_Comm group = MpiRank::first(3);
  const Floats expected = mean_of_all(3, 1000);
  const auto error = error_of(3, {.staging_bytes = 256}, [&](MpiRank& rank) {
    const int me = rank.rank(), next = (me + 1) % 3;
    for (int round = 0; round < 10; ++round) {
      Floats values = floats_of(static_cast<std::size_t>(me), 1000);
      int received = -1, sum = me;
      MPI_Request any;
      MPI_Irecv(&received, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, group, &any);
      rank.communicator.all_reduce_mean(values, values, rank.side);
      MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, group);
      rank.side.synchronize();
      MPI_Send(&me, 1, MPI_INT, next, 0, group);
      MPI_Wait(&any, MPI_STATUS_IGNORE);
      REQUIRE(received == (me + 2) % 3);
      REQUIRE(sum == 3);
      REQUIRE(same_bits(values, expected));
    }
  });
  CHECK(error.value_or("") == "");
}

// Red (it hangs) while making a communicator keeps the others of the process from going on.
TEST_CASE("mpi: a communicator is made while another one is at work, on which the other rank waits first") {
  const MPI_Comm group = MpiRank::first(2);
  if (group == MPI_COMM_NULL) return;
  Arrays arrays, others;
  MpiRank rank(group, {}, 1);
  if (rank.rank() == 1) std::this_thread::sleep_for(50ms);  // so that rank 0 is making its second one by then
  all_reduce(rank, arrays, 8);
  if (rank.rank() == 1) rank.side.synchronize();
  MpiRank second(group, {}, 1);
  all_reduce(second, others, 8);
  CHECK_NOTHROW(second.side.synchronize());
  CHECK_NOTHROW(rank.side.synchronize());
}

TEST_CASE("mpi: a rank in two groups, one of them broken") {
  const MPI_Comm world = MpiRank::first(4);
  if (world == MPI_COMM_NULL) return;
  int me = 0;
  MPI_Comm_rank(world, &me);
  MPI_Comm row, column;
  MPI_Comm_split(world, me / 2, me, &row);
  MPI_Comm_split(world, me % 2, me, &column);
  std::string row_error, column_error;
  {
    Arrays arrays, others;
    MpiRank in_row(row, {}, 1);
    MpiRank in_column(column, {}, 1);
    try {
      for (int round = 0; round < 20; ++round) {
        all_reduce(in_row, arrays, 8 + static_cast<std::size_t>(me / 2));
        all_reduce(in_column, others, 8 + static_cast<std::size_t>(me % 2));
      }
      in_row.side.synchronize();
      if (me == 3) in_row.communicator.abort("row only");
      all_reduce(in_column, others, 8);
      in_column.side.synchronize();
    } catch (const scape::Error& error) {
      column_error = error.what();
    }
    try {
      all_reduce(in_row, arrays, 8);
      in_row.side.synchronize();
    } catch (const scape::Error& error) {
      row_error = error.what();
    }
  }
  CHECK(column_error == "");
  CHECK(row_error == (me < 2 ? "" : "rank 1: row only"));
  MPI_Comm_free(&row);
  MPI_Comm_free(&column);
}

TEST_CASE("mpi: wrong arguments are named, and nothing is sent") {
  CHECK(message_of([] { MpiCommunicator{MPI_COMM_NULL}; }).starts_with("group is MPI_COMM_NULL:"));
  CHECK(message_of([] {
          MpiCommunicator(MPI_COMM_SELF, {.staging_bytes = std::size_t{1} << 31});
        }).starts_with("staging_bytes is 2147483648:"));
  if (MpiRank::world() > 1) {  // two groups, joined
    int me = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm half, both;
    MPI_Comm_split(MPI_COMM_WORLD, me % 2, me, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - me % 2, 0, &both);
    CHECK(message_of([&] { MpiCommunicator{both}; }).starts_with("group is an intercommunicator:"));
    MPI_Comm_free(&both);
    MPI_Comm_free(&half);
  }
  run_ranks(2, [](MpiRank& rank) {
    auto& communicator = rank.communicator;
    const auto& side = rank.side;
    Arrays arrays;
    const std::span out(arrays.out);
    const std::span all(arrays.all);
    const Counts three = {1, 1, 1}, two = {2, 2};
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
            communicator.all_gather_uneven(arrays.words(3), all.first(5), two, side);
          }).starts_with("own.size() is 3:"));
    CHECK(message_of([&] {
            communicator.all_gather_uneven(arrays.words(2), all.first(6), two, side);
          }).starts_with("all.size() is 6:"));
    CHECK(communicator.bytes_sent() == 0);
  });
}

namespace {

// MPI need not know the memory of a device.
struct DeviceStream : scape::HostStream {};  // of another type, at least

template <class S>
concept Reduces = requires(MpiCommunicator& to, std::span<float> values, const S& stream) {
  to.all_reduce_mean(values, values, stream);
};
template <class S>
concept ReducesAndScatters = requires(MpiCommunicator& to, std::span<float> values, const S& stream) {
  to.reduce_scatter_mean(values, values, stream);
};
template <class S>
concept Gathers = requires(MpiCommunicator& to, std::span<MaskWord> words, const S& stream) {
  to.all_gather(words, words, stream);
};
template <class S>
concept GathersUneven = requires(MpiCommunicator& to, std::span<MaskWord> words, Counts& counts, const S& stream) {
  to.all_gather_uneven(words, words, counts, stream);
};
template <class S>
concept Exchanges = requires(MpiCommunicator& to, std::span<MaskWord> words, const S& stream) {
  to.all_to_all(words, words, stream);
};
template <class S>
constexpr int accepted = Reduces<S> + ReducesAndScatters<S> + Gathers<S> + GathersUneven<S> + Exchanges<S>;
static_assert(accepted<scape::HostStream> == 5);
static_assert(accepted<DeviceStream> == 0);

}  // namespace
