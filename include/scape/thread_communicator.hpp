#pragma once

#include <scape/bfloat16.hpp>
#include <scape/collective_arguments.hpp>
#include <scape/collective_call.hpp>
#include <scape/communicator.hpp>
#include <scape/error.hpp>
#include <scape/fingerprint.hpp>
#include <scape/host/mean.hpp>
#include <scape/host/stream.hpp>

#include <algorithm>
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

  // One rank's memory in a collective.
  struct Memory {
    const void* in = nullptr;
    void* out = nullptr;
  };

  struct State {
    explicit State(int ranks, std::chrono::milliseconds patience)
        : patience(patience),
          calls(static_cast<std::size_t>(ranks)),
          memory(calls.size()),
          left(calls.size()),
          reading(calls.size()),
          here(calls.size()) {}

    const std::chrono::milliseconds patience;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<detail::CollectiveCall> calls;
    std::vector<Memory> memory;
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
    void join(std::size_t rank, const detail::CollectiveCall& call, const Memory& own);
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
    all_reduce(in, out, stream);
  }
  void all_reduce_mean(std::span<const bfloat16> in, std::span<bfloat16> out, const HostStream& stream) {
    all_reduce(in, out, stream);
  }

  /// Sends (W - 1) / W * in.size_bytes().
  void reduce_scatter_mean(std::span<const float> in, std::span<float> out, const HostStream& stream) {
    reduce_scatter(in, out, stream);
  }
  void reduce_scatter_mean(std::span<const bfloat16> in, std::span<bfloat16> out, const HostStream& stream) {
    reduce_scatter(in, out, stream);
  }

  /// Sends (W - 1) * own.size_bytes().
  void all_gather(std::span<const MaskWord> own, std::span<MaskWord> all, const HostStream& stream) {
    gather(own, all, stream);
  }
  void all_gather(std::span<const bfloat16> own, std::span<bfloat16> all, const HostStream& stream) {
    gather(own, all, stream);
  }

  /// Sends (W - 1) * own.size_bytes().
  void all_gather_uneven(std::span<const MaskWord> own, std::span<MaskWord> all, std::span<const std::size_t> counts,
                         const HostStream& stream) {
    detail::expects_all_gather_uneven(own.size(), all.size(), counts, rank_, ranks());
    bytes_sent_ += (ranks() - 1) * own.size_bytes();
    Fingerprint print;
    for (const std::size_t count : counts) print.add(std::uint64_t{count});
    enqueue(stream, [this, own, all, print = print.value()] {
      state_->join(rank_, call_of<MaskWord>(Collective::all_gather_uneven, all.size(), own.size(), print),
                   {own.data(), all.data()});
      MaskWord* to = all.data();
      for (std::size_t other = 0; other < ranks(); to += state_->calls[other++].own)
        place(other, state_->calls[other].own, to);
      state_->meet(rank_, true);
    });
  }

  /// Sends (W - 1) / W * in.size_bytes().
  void all_to_all(std::span<const MaskWord> in, std::span<MaskWord> out, const HostStream& stream) {
    detail::expects_all_to_all(in.size(), out.size(), ranks());
    const std::size_t part = in.size() / ranks();
    bytes_sent_ += (ranks() - 1) * part * sizeof(MaskWord);
    enqueue(stream, [this, in, out, part] {
      state_->join(rank_, call_of<MaskWord>(Collective::all_to_all, in.size()), {in.data(), out.data()});
      for (std::size_t other = 0; other < ranks(); ++other) {
        const MaskWord* const from = static_cast<const MaskWord*>(state_->memory[other].in) + rank_ * part;
        if (part != 0) std::memcpy(out.data() + other * part, from, part * sizeof(MaskWord));
      }
      state_->meet(rank_, true);
    });
  }

 private:
  using Collective = detail::Collective;
  using Slice = detail::Slice;

  template <class T>
  void all_reduce(std::span<const T> in, std::span<T> out, const HostStream& stream) {
    detail::expects_all_reduce(in.size(), out.size());
    bytes_sent_ += detail::all_reduce_sends(in.size(), rank_, ranks()) * sizeof(T);
    enqueue(stream, [this, in, out, &pool = stream.pool()] {
      state_->join(rank_, call_of<T>(Collective::all_reduce_mean, in.size()), {in.data(), out.data()});
      const Slice own = slice(in.size(), rank_);
      mean_of(own.begin, out.data() + own.begin, own.size, pool);
      state_->meet(rank_);
      for (std::size_t other = 0; other < ranks(); ++other)
        if (other != rank_) take(static_cast<const T*>(state_->memory[other].out), out.data(), slice(in.size(), other));
      state_->meet(rank_, true);
    });
  }

  template <class T>
  void reduce_scatter(std::span<const T> in, std::span<T> out, const HostStream& stream) {
    detail::expects_reduce_scatter(in.size(), out.size(), ranks());
    bytes_sent_ += (ranks() - 1) * out.size_bytes();
    enqueue(stream, [this, in, out, &pool = stream.pool()] {
      state_->join(rank_, call_of<T>(Collective::reduce_scatter_mean, in.size()), {in.data(), out.data()});
      mean_of(rank_ * out.size(), out.data(), out.size(), pool);
      state_->meet(rank_, true);
    });
  }

  template <class T>
  void gather(std::span<const T> own, std::span<T> all, const HostStream& stream) {
    detail::expects_all_gather(own.size(), all.size(), ranks());
    bytes_sent_ += (ranks() - 1) * own.size_bytes();
    enqueue(stream, [this, own, all] {
      state_->join(rank_, call_of<T>(Collective::all_gather, all.size()), {own.data(), all.data()});
      for (std::size_t other = 0; other < ranks(); ++other) place(other, own.size(), all.data() + other * own.size());
      state_->meet(rank_, true);
    });
  }

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

  std::size_t ranks() const noexcept { return state_->calls.size(); }
  Slice slice(std::size_t count, std::size_t rank) const noexcept { return detail::slice_of(count, ranks(), rank); }

  template <class T>
  static detail::CollectiveCall call_of(Collective collective, std::size_t count, std::size_t own = 0,
                                        std::uint64_t counts = 0) {
    return {collective, detail::element_of<T>, count, own, counts};
  }

  template <class T>
  static void take(const T* from, T* to, Slice slice) {
    if (slice.size != 0) std::memcpy(to + slice.begin, from + slice.begin, slice.size * sizeof(T));
  }

  template <class T>
  void place(std::size_t other, std::size_t count, T* to) const {
    const void* const from = state_->memory[other].in;
    if (count != 0 && from != to) std::memcpy(to, from, count * sizeof(T));
  }

  template <class T>
  void mean_of(std::size_t begin, T* out, std::size_t count, HostPool& pool) const {
    const auto input = [&](std::size_t rank) { return static_cast<const T*>(state_->memory[rank].in) + begin; };
    detail::mean_in_rank_order(ranks(), input, out, count, pool);
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
         " waits in " + name_of(calls[rank].collective) + ", collective " + std::to_string(collectives));
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
         name_of(calls[rank].collective) + ", collective " + std::to_string(collectives) + ": only " +
         std::to_string(arrived) + " of " + std::to_string(calls.size()) + " ranks came" + missing);
  }
  if (generation != mine) return;
  wait_for_readers(lock);
  throw Error(broken);
}

inline void ThreadGroup::State::join(std::size_t rank, const detail::CollectiveCall& call, const Memory& own) {
  {
    const std::lock_guard lock(mutex);
    if (broken.empty()) {  // else others may still be comparing
      calls[rank] = call;
      memory[rank] = own;
    }
  }
  meet(rank);
  detail::check_calls(calls, collectives);
}

}  // namespace scape::inline v0
