#pragma once

#include <scape/error.hpp>
#include <scape/memory.hpp>
#include <scape/stream.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace scape::inline v0 {

/// Threads for the loops of any number of HostStreams: its own, or the caller's. Must outlive the streams.
class HostPool {
 public:
  /// How the caller's own pool runs a loop: body(context, i) for every i below count, in any order, on any threads;
  /// returns when all are done.
  using Runner = std::function<void(std::size_t count, void (*body)(void* context, std::size_t i), void* context)>;

  /// A loop runs on `threads` threads: the caller's and threads - 1 that the pool starts.
  explicit HostPool(int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency())))
      : threads_(threads) {
    expects(threads >= 1, "threads", threads, "must be at least 1");
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  /// Loops run on the caller's pool of `threads` threads.
  HostPool(int threads, Runner runner) : threads_(threads), runner_(std::move(runner)) {
    expects(threads >= 1, "threads", threads, "must be at least 1");
    expects(static_cast<bool>(runner_), "runner", "empty", "must be callable");
  }
  HostPool(const HostPool&) = delete;
  ~HostPool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const noexcept { return threads_; }

  /// Calls body(i) for every i below count, in any order; returns when all are done. The body must not throw. Loops
  /// of several threads may run at once.
  template <class F>
  void run(std::size_t count, F&& body) {
    const auto call = [](void* context, std::size_t i) { (*static_cast<std::remove_reference_t<F>*>(context))(i); };
    void* const context = const_cast<void*>(static_cast<const void*>(std::addressof(body)));
    if (runner_) {
      if (count != 0) runner_(count, call, context);
    } else if (count <= 1 || workers_.empty()) {
      for (std::size_t i = 0; i < count; ++i) body(i);
    } else {
      run_on_workers({call, context, count});
    }
  }

 private:
  struct Loop {
    void (*call)(void*, std::size_t);
    void* context;
    std::size_t count;
    std::atomic<std::size_t> next = 0;
    int helpers = 0;  // workers inside; guarded by the mutex
    Loop* following = nullptr;

    Loop(void (*call)(void*, std::size_t), void* context, std::size_t count)
        : call(call), context(context), count(count) {}
    void drain() {
      for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) call(context, i);
    }
  };

  void run_on_workers(Loop loop) {
    {
      const std::lock_guard lock(mutex_);
      loop.following = std::exchange(loops_, &loop);
    }
    wake_.notify_all();
    loop.drain();
    std::unique_lock lock(mutex_);
    Loop** link = &loops_;
    while (*link != &loop) link = &(*link)->following;
    *link = loop.following;
    left_.wait(lock, [&] { return loop.helpers == 0; });
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      Loop* loop = loops_;
      while (loop != nullptr && loop->next.load(std::memory_order_relaxed) >= loop->count) loop = loop->following;
      if (loop == nullptr) {
        if (stopping_) return;
        wake_.wait(lock);
        continue;
      }
      ++loop->helpers;
      lock.unlock();
      loop->drain();
      lock.lock();
      if (--loop->helpers == 0) left_.notify_all();
    }
  }

  int threads_;
  Runner runner_;
  std::mutex mutex_;
  std::condition_variable wake_, left_;
  Loop* loops_ = nullptr;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

/// An ordered queue of work with a thread of its own, whose loops run on a HostPool. Copies are the same queue.
///
/// The last copy must not be destroyed by the queue's own work. Enqueuing does not allocate; it blocks while `capacity`
/// items wait. What work throws is kept: the rest of the queue is skipped, streams that wait for this one fail too, and
/// enqueue and synchronize throw it, from then on.
class HostStream {
  struct State;

 public:
  static constexpr std::size_t capacity = 64;

  /// Memory that both the stream's work and the host can read and write.
  using HostVisibleMemory = HostMemory;

  /// A point in a stream.
  class Event {
    friend class HostStream;
    std::shared_ptr<State> state_;
    std::uint64_t point_ = 0;
  };

  explicit HostStream(HostPool& pool) : queue_(std::make_shared<Queue>(pool)) {}

  /// Work is a callable of at most 384 bytes.
  template <class F>
  void enqueue(F work) const {
    queue_->push(std::move(work));
  }

  void record(Event& event) const {
    event.state_ = queue_->state;
    event.point_ = queue_->state->position();
  }

  void wait_for(const Event& event) const {
    if (event.state_ == nullptr || event.state_ == queue_->state) return;
    enqueue([event] { event.state_->wait(event.point_); });
  }

  void wait_for(const HostStream& other) const {
    Event event;
    other.record(event);
    wait_for(event);
  }

  void synchronize() const {
    const std::shared_ptr<State> state = queue_->state;
    state->wait(state->position());
  }

  HostPool& pool() const noexcept { return queue_->pool; }

  friend bool operator==(const HostStream&, const HostStream&) = default;

 private:
  // What others wait on; outlives the queue where they still do.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t enqueued = 0, completed = 0, failed = 0;  // failed: the item that did
    std::exception_ptr error;

    std::uint64_t position() {
      const std::lock_guard lock(mutex);
      return enqueued;
    }

    void wait(std::uint64_t point) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return completed >= point; });
      if (error && point > failed) std::rethrow_exception(error);
    }
  };

  struct alignas(64) Slot {
    std::array<std::byte, 384> storage;
    void (*run)(void* work, bool skip);  // runs the work unless it is to be skipped, and destroys it
  };

  struct Queue {
    HostPool& pool;
    std::shared_ptr<State> state = std::make_shared<State>();
    std::unique_ptr<Slot[]> slots = std::make_unique<Slot[]>(capacity);
    bool stopping = false;
    std::thread worker;

    explicit Queue(HostPool& pool) : pool(pool), worker([this] { work(); }) {}
    ~Queue() {
      {
        const std::lock_guard lock(state->mutex);
        stopping = true;
      }
      state->changed.notify_all();
      worker.join();
    }

    template <class F>
    void push(F&& work) {
      using Work = std::remove_cvref_t<F>;
      static_assert(sizeof(Work) <= sizeof(Slot::storage) && alignof(Work) <= alignof(Slot));
      std::unique_lock lock(state->mutex);
      state->changed.wait(lock, [&] { return state->enqueued - state->completed < capacity; });
      if (state->error) std::rethrow_exception(state->error);
      Slot& slot = slots[state->enqueued % capacity];
      ::new (static_cast<void*>(slot.storage.data())) Work(std::forward<F>(work));
      slot.run = [](void* storage, bool skip) {
        Work& stored = *std::launder(static_cast<Work*>(storage));
        struct Destroy {
          Work& work;
          ~Destroy() { work.~Work(); }
        } destroy{stored};
        if (!skip) stored();
      };
      ++state->enqueued;
      lock.unlock();
      state->changed.notify_all();
    }

    void work() {
      std::unique_lock lock(state->mutex);
      while (true) {
        state->changed.wait(lock, [&] { return stopping || state->completed < state->enqueued; });
        if (state->completed == state->enqueued) return;
        Slot& slot = slots[state->completed % capacity];
        const bool skip = state->error != nullptr;
        lock.unlock();
        std::exception_ptr error;
        try {
          slot.run(slot.storage.data(), skip);
        } catch (...) {
          error = std::current_exception();
        }
        lock.lock();
        if (error) {
          state->error = error;
          state->failed = state->completed;
        }
        ++state->completed;
        state->changed.notify_all();
      }
    }
  };

  std::shared_ptr<Queue> queue_;
};
static_assert(Stream<HostStream>);

/// Copies between arrays of equal size that do not overlap; also from the host's memory to the stream's and back.
template <class T>
void copy_values(std::span<const T> from, std::span<T> to, const HostStream& stream) {
  stream.enqueue([=] {
    if (!from.empty()) std::memcpy(to.data(), from.data(), from.size_bytes());
  });
}

template <class T>
void fill_values(std::span<T> values, T value, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    constexpr std::size_t run = 65536;
    pool.run(values.size() / run + 1, [&](std::size_t i) {
      const auto part = values.subspan(i * run, std::min(run, values.size() - i * run));
      std::fill(part.begin(), part.end(), value);
    });
  });
}

/// Calls check() on the host when the stream gets here, then check.rethrow(), which may fail the stream.
template <class F>
void call_on_host(F& check, const HostStream& stream) {
  stream.enqueue([&check] {
    check();
    check.rethrow();
  });
}

/// Writes the time at which the stream gets here, in seconds since an arbitrary start.
inline void record_time(double& seconds, const HostStream& stream) {
  stream.enqueue([&seconds] {
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  });
}

}  // namespace scape::inline v0
