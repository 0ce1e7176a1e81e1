// NcclCommunicator: every collective, a thread for each device and one thread for all, and wrong arguments.

#include "ranks.hpp"

#include <scape/scape.hpp>

#include <doctest/doctest.h>

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using scape::MaskWord;
using Floats = std::vector<float>;
using Words = std::vector<MaskWord>;
using Counts = std::vector<std::size_t>;

// Small integers, so that sums are exact in any order.
float value_of(std::size_t rank, std::size_t i) { return static_cast<float>((rank * 7 + i * 12) % 48); }
MaskWord word_of(std::size_t rank, std::size_t i) { return static_cast<MaskWord>(rank * 1000003 + i * 17 + 1); }

Floats values_of(std::size_t rank, std::size_t count) {
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = value_of(rank, i);
  return values;
}
Words words_of(std::size_t rank, std::size_t count) {
  Words words(count);
  for (std::size_t i = 0; i < count; ++i) words[i] = word_of(rank, i);
  return words;
}

bool near(const Floats& found, const Floats& expected) {  // the mean of three is rounded as NCCL likes
  if (found.size() != expected.size()) return false;
  for (std::size_t i = 0; i < found.size(); ++i)
    if (!(std::abs(found[i] - expected[i]) <= 1e-5f * expected[i])) return false;
  return true;
}

// A rank with its arrays, and what it must have in the end: enqueue() and check() apart, since one thread that drives
// all ranks enqueues them as a group.
class Rank {
 public:
  explicit Rank(ncclComm_t handle) : communicator(handle), me_(static_cast<std::size_t>(communicator.rank())) {}

  void enqueue_all_reduce(std::size_t count, bool in_place) {
    in_.push_back(backend.array(values_of(me_, count)));
    if (!in_place) out_.push_back(backend.array(Floats(count, -7)));
    const std::span<float> in = in_.back().span(), out = in_place ? in : out_.back().span();
    call([=, this] { communicator.all_reduce_mean(in, out, backend.stream); });
    Floats mean(count);
    for (std::size_t i = 0; i < count; ++i) mean[i] = this->mean(i);
    expect(out, mean);
    bytes_ += all_reduce_bytes(count);
  }

  void enqueue_reduce_scatter(std::size_t count, bool in_place) {
    in_.push_back(backend.array(values_of(me_, count * world())));
    if (!in_place) out_.push_back(backend.array(Floats(count, -7)));
    const std::span<float> in = in_.back().span();
    const std::span<float> out = in_place ? in.subspan(me_ * count, count) : out_.back().span();
    call([=, this] { communicator.reduce_scatter_mean(in, out, backend.stream); });
    Floats part(count);
    for (std::size_t i = 0; i < count; ++i) part[i] = mean(me_ * count + i);
    expect(out, part);
    bytes_ += (world() - 1) * count * 4;
  }

  void enqueue_all_gather(std::size_t count, bool in_place) { enqueue_gather(Counts(world(), count), in_place, true); }
  void enqueue_uneven(const Counts& counts, bool in_place) { enqueue_gather(counts, in_place, false); }

  void enqueue_all_to_all(std::size_t count) {
    own_.push_back(backend.array(words_of(me_, count * world())));
    all_.push_back(backend.array(Words(count * world(), 0xdeadbeef)));
    const std::span<const MaskWord> in = own_.back().span();
    const std::span<MaskWord> out = all_.back().span();
    call([=, this] { communicator.all_to_all(in, out, backend.stream); });
    Words expected;
    for (std::size_t rank = 0; rank < world(); ++rank)
      for (std::size_t i = 0; i < count; ++i) expected.push_back(word_of(rank, me_ * count + i));
    expect(out, expected);
    bytes_ += (world() - 1) * count * 4;
  }

  void run_calls() {
    for (const auto& call : calls_) call();
  }
  void check() {
    backend.stream.synchronize();
    communicator.check();
    for (const auto& check : checks_) check();
    CHECK(communicator.bytes_sent() == bytes_);
  }
  std::size_t world() const { return static_cast<std::size_t>(communicator.size()); }

  CudaBackend backend;
  scape::NcclCommunicator communicator;

 private:
  void call(std::function<void()> call) { calls_.push_back(std::move(call)); }

  float mean(std::size_t i) const {
    float sum = 0;
    for (std::size_t rank = 0; rank < world(); ++rank) sum += value_of(rank, i);
    return sum / static_cast<float>(world());
  }

  std::uint64_t all_reduce_bytes(std::size_t count) const {
    const std::size_t own = count / world() + (me_ < count % world());
    return (count - own + (world() - 1) * own) * 4;
  }

  void enqueue_gather(const Counts& counts, bool in_place, bool even) {
    std::size_t begin = 0, total = 0;
    Words expected;
    for (std::size_t rank = 0; rank < world(); ++rank) {
      if (rank == me_) begin = total;
      total += counts[rank];
      const Words words = words_of(rank, counts[rank]);
      expected.insert(expected.end(), words.begin(), words.end());
    }
    Words start(total, 0xdeadbeef);
    const Words own = words_of(me_, counts[me_]);
    if (in_place) std::copy(own.begin(), own.end(), start.begin() + static_cast<std::ptrdiff_t>(begin));
    all_.push_back(backend.array(start));
    const std::span<MaskWord> all = all_.back().span();
    if (!in_place) own_.push_back(backend.array(own));
    const std::span<const MaskWord> part = in_place ? all.subspan(begin, own.size()) : own_.back().span();
    call([=, this] {
      if (even)
        communicator.all_gather(part, all, backend.stream);
      else
        communicator.all_gather_uneven(part, all, counts, backend.stream);
    });
    expect(all, expected);
    bytes_ += (world() - 1) * own.size() * 4;
  }

  void expect(std::span<const MaskWord> words, const Words& expected) {
    checks_.push_back([=, this] {
      Words found(words.size());
      scape::copy_values(words, std::span(found), backend.stream);
      backend.stream.synchronize();
      CHECK(found == expected);
    });
  }

  void expect(std::span<const float> values, const Floats& expected) {
    checks_.push_back([=, this] {
      Floats found(values.size());
      scape::copy_values(values, std::span(found), backend.stream);
      backend.stream.synchronize();
      CHECK(near(found, expected));
    });
  }

  std::size_t me_;
  std::vector<CudaBackend::Array<float>> in_, out_;
  std::vector<CudaBackend::Array<MaskWord>> own_, all_;
  std::vector<std::function<void()>> calls_, checks_;
  std::uint64_t bytes_ = 0;
};

// Every collective, in both forms, with counts that do not divide and of nothing.
void enqueue_all(Rank& rank) {
  for (const bool in_place : {false, true}) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{4099}}) {
      rank.enqueue_all_reduce(count, in_place);
      rank.enqueue_reduce_scatter(count, in_place);
      rank.enqueue_all_gather(count, in_place);
      rank.enqueue_all_to_all(count);
    }
    for (Counts counts : {Counts{3, 0, 700, 1}, Counts{0, 5, 0, 0}, Counts{0, 0, 0, 0}, Counts{0, 0, 2, 2}}) {
      counts.resize(rank.world());
      rank.enqueue_uneven(counts, in_place);
    }
  }
}

template <class Exception, class F>
std::string message_of(F call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace

TEST_CASE("nccl: every collective, a thread for each device") {
  for (const int ranks : {1, 2, 3, 4}) {
    CAPTURE(ranks);
    run_ranks(ranks, [&](NcclRank& self) {
      Rank rank(self.communicator.handle());
      CHECK(rank.communicator.rank() == self.rank());
      CHECK(rank.communicator.size() == ranks);
      enqueue_all(rank);
      rank.run_calls();
      rank.check();
    });
  }
}

TEST_CASE("nccl: every collective, one thread for all devices") {
  for (const int ranks : {1, 2, 3, 4}) {
    CAPTURE(ranks);
    std::vector<ncclComm_t> handles(static_cast<std::size_t>(ranks));
    REQUIRE(ncclCommInitAll(handles.data(), ranks, nullptr) == ncclSuccess);
    {
      std::vector<std::unique_ptr<Rank>> world;
      for (int rank = 0; rank < ranks; ++rank) {
        scape::check(cudaSetDevice(rank), "cudaSetDevice");
        world.push_back(std::make_unique<Rank>(handles[static_cast<std::size_t>(rank)]));
        enqueue_all(*world.back());
      }
      REQUIRE(ncclGroupStart() == ncclSuccess);
      for (int rank = 0; rank < ranks; ++rank) {
        scape::check(cudaSetDevice(rank), "cudaSetDevice");
        world[static_cast<std::size_t>(rank)]->run_calls();
      }
      REQUIRE(ncclGroupEnd() == ncclSuccess);
      for (int rank = 0; rank < ranks; ++rank) {
        scape::check(cudaSetDevice(rank), "cudaSetDevice");
        world[static_cast<std::size_t>(rank)]->check();
      }
    }
    for (const ncclComm_t handle : handles) CHECK(ncclCommDestroy(handle) == ncclSuccess);
  }
  scape::check(cudaSetDevice(0), "cudaSetDevice");
}

TEST_CASE("nccl: wrong sizes are named with their value, and nothing is sent") {
  run_ranks(2, [](NcclRank& rank) {
    const auto values = rank.backend.array(Floats(20));
    const auto words = rank.backend.array(Words(20));
    const std::span<float> floats = values.span();
    const std::span<MaskWord> masks = words.span();
    auto& communicator = rank.communicator;
    const std::size_t me = static_cast<std::size_t>(rank.rank());
    const auto names = [](const std::string& start, auto call) {
      const std::string text = message_of<std::invalid_argument>(call);
      CHECK_MESSAGE(text.starts_with(start), text);
    };
    names("out.size() is 5: must be in.size(), 6",
          [&] { communicator.all_reduce_mean(floats.first(6), floats.first(5), rank.compute); });
    names("in.size() is 6: must be size() * out.size(), 8",
          [&] { communicator.reduce_scatter_mean(floats.first(6), floats.subspan(8, 4), rank.compute); });
    names("all.size() is 6: must be size() * own.size(), 8",
          [&] { communicator.all_gather(masks.first(4), masks.subspan(10, 6), rank.compute); });
    names("counts.size() is 1: must be size(), 2",
          [&] { communicator.all_gather_uneven(masks.first(4), masks, Counts{4}, rank.compute); });
    names("own.size() is 3: must be counts[rank()]", [&] {
      communicator.all_gather_uneven(masks.first(3), masks.first(9), Counts{4, 5}, rank.compute);
    });
    names("all.size() is 8: must be the sum of counts, 9", [&] {
      communicator.all_gather_uneven(masks.first(4 + me), masks.first(8), Counts{4, 5}, rank.compute);
    });
    names("in.size() is 7: must be a multiple of size(), 2",
          [&] { communicator.all_to_all(masks.first(7), masks.subspan(7, 7), rank.compute); });
    names("out.size() is 4: must be in.size(), 6",
          [&] { communicator.all_to_all(masks.first(6), masks.subspan(6, 4), rank.compute); });
    CHECK(communicator.bytes_sent() == 0);
    communicator.all_reduce_mean(floats, floats, rank.compute);  // and nothing has gone out of step
    rank.compute.synchronize();
    communicator.check();
  });
}

TEST_CASE("nccl: a bad handle is an error") {
  CHECK(
      message_of<std::invalid_argument>([] { scape::NcclCommunicator{ncclComm_t{}}; }).starts_with("communicator is"));
  run_ranks(1, [](NcclRank& rank) {
    // A pointer that no device can read.
    float* const nowhere = nullptr;
    const std::string text = message_of<scape::Error>([&] {
      rank.communicator.all_reduce_mean(std::span<const float>(nowhere, 10), std::span<float>(nowhere, 10),
                                        rank.compute);
    });
    CHECK_MESSAGE(text.starts_with("ncclAllReduce: "), text);
  });
}
