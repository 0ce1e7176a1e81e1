#pragma once

#include <scape/communicator.hpp>
#include <scape/error.hpp>
#include <scape/fingerprint.hpp>
#include <scape/host/loop.hpp>
#include <scape/host/stream.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace scape::inline v0 {

class ThreadCommunicator;

/// What the ranks of one process share: make one, and a ThreadCommunicator of it in every rank's thread.
class ThreadGroup {
 public:
  /// A collective that some rank has not joined within `patience` fails on the ranks that wait in it.
  explicit ThreadGroup(int ranks, std::chrono::milliseconds patience = std::chrono::minutes(10));

  int size() const noexcept;

  /// Makes all present and future collectives of the group fail with scape::Error: `reason`.
  void abort(const std::string& reason) const;

 private:
  friend class ThreadCommunicator;

  // One rank's part in a collective.
  struct Call {
    const char* name = "";
    std::size_t count = 0;  // elements that all ranks must agree on
    const void* in = nullptr;
    void* out = nullptr;
    std::size_t own = 0;  // of an uneven gather: this rank's elements, and a hash of all ranks'
    std::uint64_t counts = 0;
  };

  struct State {
    explicit State(int ranks, std::chrono::milliseconds patience)
        : patience(patience),
          calls(static_cast<std::size_t>(ranks)),
          left(calls.size()),
          reading(calls.size()),
          here(calls.size()) {}

    const std::chrono::milliseconds patience;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Call> calls;
    std::vector<char> left, reading, here;  // by rank: gone; may look into the others' buffers; waits for the others
    std::size_t arrived = 0;
    std::uint64_t generation = 0, collectives = 0;
    std::string broken;

    void fail(const std::string& reason) {  // with the mutex held
      if (broken.empty()) broken = reason;
      changed.notify_all();
    }
    // A rank's work has failed: it reads no more, and nobody is to wait for it. Returns when nobody reads its buffers.
    void give_up(std::size_t rank, const std::string& reason) {
      std::unique_lock lock(mutex);
      reading[rank] = false;
      fail(reason);
      wait_for_readers(lock);
    }
    void wait_for_readers(std::unique_lock<std::mutex>& lock) {
      changed.wait(lock, [&] { return std::find(reading.begin(), reading.end(), true) == reading.end(); });
    }
    // Returns when all ranks are here; throws on all of them where one cannot come, but not while a rank may still be
    // reading the others' buffers, as all do between the first and the last meeting of a collective.
    void meet(std::size_t rank, bool last = false);
    // Meets, and fails unless all ranks make the same call.
    void join(std::size_t rank, const Call& call);
    void check_calls();
  };

  std::shared_ptr<State> state_;
};

/// A Communicator between the threads of one process: the default of tests and examples, and of training on CPUs.
///
/// Owns no buffers. Sums run in the order of the ranks in float32, each element by itself, so results do not depend on
/// the number of threads or on how a buffer is cut. Ranks that call different collectives, a rank that leaves (its
/// communicator is destroyed) while others wait, and one that never comes make every rank's stream fail with
/// scape::Error that names the rank. Must outlive the work enqueued with it.
class ThreadCommunicator {
 public:
  ThreadCommunicator(const ThreadGroup& group, int rank) : state_(group.state_), rank_(static_cast<std::size_t>(rank)) {
    expects(rank >= 0 && rank < group.size(), "rank", rank, "must be 0 to ", (group.size() - 1));
  }
  ThreadCommunicator(const ThreadCommunicator&) = delete;
  ~ThreadCommunicator() {
    const std::lock_guard lock(state_->mutex);
    state_->left[rank_] = true;
    state_->reading[rank_] = false;
    state_->changed.notify_all();
  }

  int rank() const noexcept { return static_cast<int>(rank_); }
  int size() const noexcept { return static_cast<int>(ranks()); }

  /// Bytes of this rank's memory that collectives gave to other ranks, counted when they are enqueued.
  std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }

  /// Makes the group's collectives fail on every rank: for a rank that cannot go on.
  void abort(const std::string& reason) const {
    const std::lock_guard lock(state_->mutex);
    state_->fail("rank " + std::to_string(rank_) + ": " + reason);
  }

  /// Sends 2 (W - 1) / W * in.size_bytes(): every rank sums one slice, then all gather the slices.
  void all_reduce_mean(std::span<const float> in, std::span<float> out, const HostStream& stream) {
    expects(out.size() == in.size(), "out.size()", out.size(), "must be in.size(), ", in.size());
    const std::size_t own = slice(in.size(), rank_).size;
    bytes_sent_ += (in.size() - own + (ranks() - 1) * own) * sizeof(float);
    enqueue(stream, [this, in, out, &pool = stream.pool()] {
      state_->join(rank_, {"all_reduce_mean", in.size(), in.data(), out.data()});
      const Slice own = slice(in.size(), rank_);
      mean_of(own.begin, out.data() + own.begin, own.size, pool);
      state_->meet(rank_);
      for (std::size_t other = 0; other < ranks(); ++other)
        if (other != rank_)
          take(static_cast<const float*>(state_->calls[other].out), out.data(), slice(in.size(), other));
      state_->meet(rank_, true);
    });
  }

  /// Sends (W - 1) / W * in.size_bytes().
  void reduce_scatter_mean(std::span<const float> in, std::span<float> out, const HostStream& stream) {
    expects(in.size() == out.size() * ranks(), "in.size()", in.size(), "must be size() * out.size(), ",
            (out.size() * ranks()));
    bytes_sent_ += (ranks() - 1) * out.size_bytes();
    enqueue(stream, [this, in, out, &pool = stream.pool()] {
      state_->join(rank_, {"reduce_scatter_mean", in.size(), in.data(), out.data()});
      mean_of(rank_ * out.size(), out.data(), out.size(), pool);
      state_->meet(rank_, true);
    });
  }

  /// Sends (W - 1) * own.size_bytes().
  void all_gather(std::span<const MaskWord> own, std::span<MaskWord> all, const HostStream& stream) {
    expects(all.size() == own.size() * ranks(), "all.size()", all.size(), "must be size() * own.size(), ",
            (own.size() * ranks()));
    bytes_sent_ += (ranks() - 1) * own.size_bytes();
    enqueue(stream, [this, own, all] {
      state_->join(rank_, {"all_gather", all.size(), own.data(), all.data()});
      for (std::size_t other = 0; other < ranks(); ++other) place(other, own.size(), all.data() + other * own.size());
      state_->meet(rank_, true);
    });
  }

  /// Sends (W - 1) * own.size_bytes().
  void all_gather_uneven(std::span<const MaskWord> own, std::span<MaskWord> all, std::span<const std::size_t> counts,
                         const HostStream& stream) {
    expects(counts.size() == ranks(), "counts.size()", counts.size(), "must be size(), ", ranks());
    expects(counts[rank_] == own.size(), "own.size()", own.size(), "must be counts[rank()]");
    std::size_t total = 0;
    for (const std::size_t count : counts) total += count;
    expects(all.size() == total, "all.size()", all.size(), "must be the sum of counts, ", total);
    bytes_sent_ += (ranks() - 1) * own.size_bytes();
    Fingerprint print;
    for (const std::size_t count : counts) print.add(std::uint64_t{count});
    enqueue(stream, [this, own, all, print = print.value()] {
      state_->join(rank_, {"all_gather_uneven", all.size(), own.data(), all.data(), own.size(), print});
      MaskWord* to = all.data();
      for (std::size_t other = 0; other < ranks(); to += state_->calls[other++].own)
        place(other, state_->calls[other].own, to);
      state_->meet(rank_, true);
    });
  }

  /// Sends (W - 1) / W * in.size_bytes().
  void all_to_all(std::span<const MaskWord> in, std::span<MaskWord> out, const HostStream& stream) {
    expects(in.size() % ranks() == 0, "in.size()", in.size(), "must be a multiple of size(), ", ranks());
    expects(out.size() == in.size(), "out.size()", out.size(), "must be in.size(), ", in.size());
    const std::size_t part = in.size() / ranks();
    bytes_sent_ += (ranks() - 1) * part * sizeof(MaskWord);
    enqueue(stream, [this, in, out, part] {
      state_->join(rank_, {"all_to_all", in.size(), in.data(), out.data()});
      for (std::size_t other = 0; other < ranks(); ++other) {
        const MaskWord* const from = static_cast<const MaskWord*>(state_->calls[other].in) + rank_ * part;
        if (part != 0) std::memcpy(out.data() + other * part, from, part * sizeof(MaskWord));
      }
      state_->meet(rank_, true);
    });
  }

 private:
  template <class F>
  void enqueue(const HostStream& stream, F collective) {
    stream.enqueue([this, collective] {
      try {
        collective();
      } catch (const Error& error) {
        state_->give_up(rank_, error.what());
        throw;
      } catch (...) {
        state_->give_up(rank_, "rank " + std::to_string(rank_) + " failed in a collective");
        throw;
      }
    });
  }

  struct Slice {
    std::size_t begin, size;
  };
  static constexpr std::size_t run = 4096;

  std::size_t ranks() const noexcept { return state_->calls.size(); }

  Slice slice(std::size_t count, std::size_t rank) const noexcept {
    const std::size_t share = count / ranks(), rest = count % ranks();
    return {rank * share + std::min(rank, rest), share + (rank < rest)};
  }

  static void take(const float* from, float* to, Slice slice) {
    if (slice.size != 0) std::memcpy(to + slice.begin, from + slice.begin, slice.size * sizeof(float));
  }

  void place(std::size_t other, std::size_t count, MaskWord* to) const {
    const void* const from = state_->calls[other].in;
    if (count != 0 && from != to) std::memcpy(to, from, count * sizeof(MaskWord));
  }

  void mean_of(std::size_t begin, float* out, std::size_t count, HostPool& pool) const {
    pool.run((count + run - 1) / run, [&](std::size_t i) {
      const std::size_t first = i * run, size = std::min(run, count - first);
      std::array<float, run> sum;  // by itself, since out may be one of the inputs
      const auto input = [&](std::size_t rank) {
        return static_cast<const float*>(state_->calls[rank].in) + begin + first;
      };
      std::copy_n(input(0), size, sum.data());
      for (std::size_t rank = 1; rank < ranks(); ++rank) add_to(sum.data(), input(rank), size);
      divide_by(sum.data(), static_cast<float>(ranks()), size);
      std::copy_n(sum.data(), size, out + first);
    });
  }

  SCAPE_HOST_LOOP static void add_to(float* sum, const float* values, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  SCAPE_HOST_LOOP static void divide_by(float* values, float divisor, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) values[i] /= divisor;
  }

  std::shared_ptr<ThreadGroup::State> state_;
  std::size_t rank_;
  std::uint64_t bytes_sent_ = 0;
};
static_assert(UnevenCommunicator<ThreadCommunicator, HostStream>);
static_assert(AllToAllCommunicator<ThreadCommunicator, HostStream>);

inline ThreadGroup::ThreadGroup(int ranks, std::chrono::milliseconds patience) {
  expects(ranks >= 1, "ranks", ranks, "must be at least 1");
  state_ = std::make_shared<State>(ranks, patience);
}

inline int ThreadGroup::size() const noexcept { return static_cast<int>(state_->calls.size()); }

inline void ThreadGroup::abort(const std::string& reason) const {
  const std::lock_guard lock(state_->mutex);
  state_->fail(reason);
}

inline void ThreadGroup::State::meet(std::size_t rank, bool last) {
  std::unique_lock lock(mutex);
  reading[rank] = false;
  changed.notify_all();
  const std::uint64_t mine = generation;
  const auto over = [&] {
    if (generation != mine || !broken.empty()) return true;
    const auto gone = std::find(left.begin(), left.end(), true);
    if (gone == left.end()) return false;
    fail("rank " + std::to_string(gone - left.begin()) + " left the group while rank " + std::to_string(rank) +
         " waits in " + calls[rank].name + ", collective " + std::to_string(collectives));
    return true;
  };
  const auto now = std::chrono::steady_clock::now();
  const auto end = std::chrono::steady_clock::time_point::max();
  const auto until = patience < std::chrono::duration_cast<std::chrono::milliseconds>(end - now) ? now + patience : end;
  if (broken.empty()) here[rank] = true;
  if (broken.empty() && ++arrived == calls.size()) {
    arrived = 0;
    std::fill(here.begin(), here.end(), false);
    std::fill(reading.begin(), reading.end(), !last);
    collectives += last;
    ++generation;
    changed.notify_all();
  } else if (!changed.wait_until(lock, until, over)) {
    std::string missing;
    for (std::size_t other = 0; other < here.size(); ++other)
      if (!here[other]) missing += ", rank " + std::to_string(other) + " did not";
    fail("rank " + std::to_string(rank) + " has waited for " + std::to_string(patience.count()) + " ms in " +
         calls[rank].name + ", collective " + std::to_string(collectives) + ": only " + std::to_string(arrived) +
         " of " + std::to_string(calls.size()) + " ranks came" + missing);
  }
  if (generation != mine) return;
  wait_for_readers(lock);
  throw Error(broken);
}

inline void ThreadGroup::State::join(std::size_t rank, const Call& call) {
  {
    const std::lock_guard lock(mutex);
    if (broken.empty()) calls[rank] = call;  // else others may still be comparing
  }
  meet(rank);
  check_calls();
}

// All ranks come to the same verdict, since all see the same calls.
inline void ThreadGroup::State::check_calls() {
  const auto same = [](const Call& a, const Call& b) {
    return a.count == b.count && a.counts == b.counts && std::strcmp(a.name, b.name) == 0;
  };
  const auto agreeing = [&](const Call& call) {
    return std::count_if(calls.begin(), calls.end(), [&](const Call& other) { return same(call, other); });
  };
  const auto text = [](const Call& c) { return std::string(c.name) + " of " + std::to_string(c.count) + " elements"; };
  const Call& usual = *std::max_element(calls.begin(), calls.end(),
                                        [&](const Call& a, const Call& b) { return agreeing(a) < agreeing(b); });
  for (std::size_t odd = 0; odd < calls.size(); ++odd)
    if (!same(calls[odd], usual))
      throw Error("collective " + std::to_string(collectives) + ": rank " + std::to_string(odd) + " calls " +
                  text(calls[odd]) + ", the others " + text(usual));
}

}  // namespace scape::inline v0
