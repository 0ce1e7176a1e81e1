// HostPool and HostStream: loops on threads, ordered queues of work, events, failures.

#include "backends.hpp"

#include <scape/host/stream.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <latch>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// Every allocation of a thread is counted. (Inlined, GCC would take new and free for a mismatch.) Not with clang's
// thread sanitizer, which cannot give up operator new.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SCAPE_COUNTS_NOTHING
#endif
#endif
namespace {
thread_local std::size_t allocations = 0;
}
#if !defined(SCAPE_COUNTS_NOTHING)
namespace {
void* counted(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  void* const memory =
      std::aligned_alloc(alignment, (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
#endif

namespace {

using scape::HostPool;
using scape::HostStream;
using namespace std::chrono_literals;

// Holds up the work that waits for it. What it shares outlives it, and it opens when a test ends early.
class Gate {
 public:
  ~Gate() { open(); }
  void open() {
    if (!std::exchange(is_open_, true)) latch_->count_down();
  }
  auto waiter() const {
    return [latch = latch_] { latch->wait(); };
  }

 private:
  std::shared_ptr<std::latch> latch_ = std::make_shared<std::latch>(1);
  bool is_open_ = false;
};

// A user's pool: threads of its own for every loop.
void run_on_fresh_threads(std::size_t count, void (*body)(void*, std::size_t), void* context) {
  std::atomic<std::size_t> next = 0;
  const auto drain = [&] {
    for (std::size_t i; (i = next++) < count;) body(context, i);
  };
  std::thread other(drain);
  drain();
  other.join();
}

// How often a loop over `count` calls its body for every index.
bool calls_each_once(HostPool& pool, std::size_t count) {
  std::vector<std::uint8_t> calls(count);
  pool.run(count, [&](std::size_t i) { ++calls[i]; });
  return std::all_of(calls.begin(), calls.end(), [](std::uint8_t n) { return n == 1; });
}

template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

struct Failing {
  void operator()() const { throw std::runtime_error("broken work"); }
};

}  // namespace

TEST_CASE("HostPool: every index once, for any count and number of threads") {
  for (int threads = 1; threads <= 4; ++threads) {
    HostPool pool(threads);
    CHECK(pool.threads() == threads);
    for (const std::size_t count : std::vector<std::size_t>{0, 1, 2, 3, 5, 64, 1000, 2'000'000}) {
      CAPTURE(count);
      CHECK(calls_each_once(pool, count));
    }
    for (int repetition = 0; repetition < 2000; ++repetition) REQUIRE(calls_each_once(pool, 4));
  }
}

TEST_CASE("HostPool: the workers take part") {
  HostPool pool(3);
  std::latch all_here(3);  // or this never ends
  pool.run(3, [&](std::size_t) { all_here.arrive_and_wait(); });
}

TEST_CASE("HostPool: on the user's threads") {
  std::size_t loops = 0;
  HostPool pool(2, [&](std::size_t count, void (*body)(void*, std::size_t), void* context) {
    ++loops;
    run_on_fresh_threads(count, body, context);
  });
  CHECK(pool.threads() == 2);
  CHECK(calls_each_once(pool, 0));
  CHECK(loops == 0);
  CHECK(calls_each_once(pool, 1));
  CHECK(calls_each_once(pool, 10'000));
  CHECK(loops == 2);
}

TEST_CASE("HostPool: bodies that cannot be copied, are constant, or are functions' own variables") {
  HostPool pool(2);
  std::atomic<std::size_t> sum = 0;
  pool.run(10, [&sum, one = std::make_unique<std::size_t>(1)](std::size_t i) { sum += i + *one; });
  const auto constant = [&sum](std::size_t i) { sum += i; };
  pool.run(10, constant);
  CHECK(sum == 55 + 45);
}

TEST_CASE("HostPool: loops inside loops, of several threads at once") {
  for (const int threads : {1, 2, 4}) {
    HostPool pool(threads);
    std::atomic<std::size_t> sum = 0;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller)
      callers.emplace_back([&] {
        for (int repetition = 0; repetition < 50; ++repetition)
          pool.run(5, [&](std::size_t i) { pool.run(i + 1, [&](std::size_t j) { sum += 10 * i + j; }); });
      });
    for (std::thread& caller : callers) caller.join();
    // 10 i (i + 1) + i (i + 1) / 2, summed over i < 5.
    CHECK(sum == 4 * 50 * (10 * 40 + 20));
  }
}

TEST_CASE("HostPool: a loop that is held up does not hold up another's") {
  for (const int threads : {1, 2, 3}) {
    HostPool pool(threads);
    const HostStream held(pool), free(pool);
    Gate gate;
    held.enqueue([&pool, wait = gate.waiter()] { pool.run(5, [&](std::size_t) { wait(); }); });
    bool done = false;
    free.enqueue([&] { done = calls_each_once(pool, 100'000); });
    free.synchronize();
    CHECK(done);
    gate.open();
    held.synchronize();
  }
}

TEST_CASE("HostPool: wrong arguments") {
  CHECK(message_of([] { HostPool(0); }).starts_with("threads is 0:"));
  CHECK(message_of([] { HostPool(-1); }).starts_with("threads is -1:"));
  CHECK(message_of([] { HostPool(0, run_on_fresh_threads); }).starts_with("threads is 0:"));
  CHECK(message_of([] { HostPool(1, nullptr); }).starts_with("runner is empty:"));
}

TEST_CASE("HostStream: in order, also many times its capacity") {
  HostPool pool(1);
  const HostStream stream(pool);
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < 20 * HostStream::capacity + 7; ++i) stream.enqueue([&order, i] { order.push_back(i); });
  stream.synchronize();
  std::vector<std::size_t> expected(20 * HostStream::capacity + 7);
  std::iota(expected.begin(), expected.end(), std::size_t{0});
  CHECK(order == expected);
}

TEST_CASE("HostStream: copies are one queue, others are others") {
  HostPool pool(1);
  const HostStream stream(pool), other(pool);
  const HostStream copy = stream;
  CHECK(copy == stream);
  CHECK(other != stream);
  CHECK(&copy.pool() == &pool);
  Gate gate;
  int done = 0;
  stream.enqueue(gate.waiter());
  copy.enqueue([&] { done = 1; });
  CHECK(done == 0);
  gate.open();
  stream.synchronize();
  CHECK(done == 1);
}

TEST_CASE("HostStream: enqueuing from several threads") {
  HostPool pool(1);
  const HostStream stream(pool);
  std::vector<std::vector<int>> orders(4);
  std::vector<std::thread> callers;
  for (std::vector<int>& order : orders)
    callers.emplace_back([&] {
      for (int i = 0; i < 500; ++i) stream.enqueue([&order, i] { order.push_back(i); });
    });
  for (std::thread& caller : callers) caller.join();
  stream.synchronize();
  for (const std::vector<int>& order : orders) {
    CHECK(order.size() == 500);
    CHECK(std::is_sorted(order.begin(), order.end()));
  }
}

TEST_CASE("HostStream: a full queue holds the caller up, and goes on") {
  HostPool pool(1);
  const HostStream stream(pool);
  Gate gate;
  stream.enqueue(gate.waiter());
  for (std::size_t i = 1; i < HostStream::capacity; ++i) stream.enqueue([] {});
  std::atomic<bool> enqueued = false;
  std::thread caller([&] {
    stream.enqueue([] {});
    enqueued = true;
  });
  std::this_thread::sleep_for(20ms);
  CHECK(!enqueued);
  gate.open();
  caller.join();
  stream.synchronize();
  CHECK(enqueued);
}

TEST_CASE("HostStream: work is destroyed once it has run, or was skipped") {
  HostPool pool(1);
  const HostStream stream(pool);
  const auto token = std::make_shared<int>(0);
  stream.enqueue([token, big = std::array<std::byte, 300>{}] { static_cast<void>(big); });
  stream.enqueue([token, owned = std::make_unique<int>(1)] {});  // needs no copy
  stream.synchronize();
  CHECK(token.use_count() == 1);
  Gate gate;
  stream.enqueue(gate.waiter());
  stream.enqueue(Failing{});
  stream.enqueue([token] { ++*token; });
  CHECK(token.use_count() == 2);
  gate.open();
  CHECK(message_of([&] { stream.synchronize(); }) == "broken work");
  CHECK(token.use_count() == 1);
  CHECK(*token == 0);
}

TEST_CASE("HostStream: waits for an event, for no more than it stood for, and for a whole stream") {
  HostPool pool(1);
  const HostStream first(pool), second(pool), third(pool);
  Gate gate, later;
  int value = 0;
  HostStream::Event event;
  first.enqueue(gate.waiter());
  first.enqueue([&] { value = 1; });
  first.record(event);
  first.enqueue(later.waiter());  // not part of the event
  first.enqueue([&] { value = 3; });
  int seen_by_second = 0, seen_by_third = 0;
  second.wait_for(event);
  second.enqueue([&] { seen_by_second = value; });
  third.wait_for(first);
  third.enqueue([&] { seen_by_third = value; });
  gate.open();
  second.synchronize();
  CHECK(seen_by_second == 1);
  later.open();
  third.synchronize();
  CHECK(seen_by_third == 3);
}

TEST_CASE("HostStream: an event that is recorded again stands for the later point, for later waits") {
  HostPool pool(1);
  const HostStream first(pool), second(pool), third(pool);
  Gate gate;
  HostStream::Event event;
  first.record(event);  // of an empty stream: past
  second.wait_for(event);
  first.enqueue(gate.waiter());
  first.record(event);
  second.synchronize();
  third.wait_for(event);
  std::atomic<bool> passed = false;
  third.enqueue([&] { passed = true; });
  std::this_thread::sleep_for(10ms);
  CHECK(!passed);
  gate.open();
  third.synchronize();
}

TEST_CASE("HostStream: never recorded events, and itself, are not waited for") {
  HostPool pool(1);
  const HostStream stream(pool);
  HostStream::Event event;
  stream.wait_for(event);
  stream.wait_for(stream);
  stream.wait_for(HostStream(stream));
  Gate gate;
  stream.enqueue(gate.waiter());
  stream.record(event);
  stream.wait_for(event);
  gate.open();
  stream.synchronize();
}

TEST_CASE("HostStream: a value handed round over several streams") {
  HostPool pool(2);
  std::vector<HostStream> streams;
  for (int i = 0; i < 5; ++i) streams.emplace_back(pool);
  std::size_t value = 0;  // no lock: the events order all
  HostStream::Event event;
  for (std::size_t i = 0; i < 1000; ++i) {
    const HostStream& stream = streams[i * 7 % streams.size()];
    stream.wait_for(event);
    stream.enqueue([&value, i] { value = value == i ? i + 1 : 0; });
    stream.record(event);
  }
  streams[999 * 7 % streams.size()].synchronize();
  CHECK(value == 1000);
}

TEST_CASE("HostStream: what work throws is kept, and later work skipped") {
  HostPool pool(1);
  const HostStream stream(pool);
  int done = 0;
  Gate gate;
  stream.enqueue(gate.waiter());
  stream.enqueue([&] { done += 1; });
  stream.enqueue(Failing{});
  stream.enqueue([&] { done += 10; });
  stream.enqueue([] { throw std::logic_error("not reached"); });
  gate.open();
  for (int again = 0; again < 2; ++again) {
    CHECK(message_of([&] { stream.synchronize(); }) == "broken work");
    CHECK(message_of([&] { stream.enqueue([&] { done += 100; }); }) == "broken work");
    CHECK(message_of([&] { HostStream(stream).synchronize(); }) == "broken work");
  }
  CHECK(done == 1);
}

TEST_CASE("HostStream: streams that wait for a failed one fail too, others do not") {
  HostPool pool(1);
  const HostStream failing(pool), waiting(pool), behind(pool), other(pool);
  Gate gate;
  int done = 0;
  failing.enqueue(gate.waiter());
  failing.enqueue(Failing{});
  waiting.wait_for(failing);
  waiting.enqueue([&] { ++done; });
  behind.wait_for(waiting);
  behind.enqueue([&] { ++done; });
  other.enqueue([&] { done += 10; });
  other.synchronize();
  gate.open();
  CHECK(message_of([&] { behind.synchronize(); }) == "broken work");
  CHECK(message_of([&] { waiting.synchronize(); }) == "broken work");
  CHECK(message_of([&] { failing.synchronize(); }) == "broken work");
  CHECK_NOTHROW(other.synchronize());
  CHECK(done == 10);
}

TEST_CASE("HostStream: a full queue that fails lets the caller go") {
  HostPool pool(1);
  const HostStream stream(pool);
  Gate gate;
  stream.enqueue(gate.waiter());
  stream.enqueue(Failing{});
  for (std::size_t i = 2; i < HostStream::capacity; ++i) stream.enqueue([] {});
  std::thread opener([&] {
    std::this_thread::sleep_for(5ms);
    gate.open();
  });
  CHECK(message_of([&] {
          for (int i = 0; i < 200; ++i) {
            stream.enqueue([] {});
            std::this_thread::sleep_for(1ms);
          }
        }) == "broken work");
  opener.join();
}

TEST_CASE("HostStream: destroyed with work queued, the work is done first") {
  HostPool pool(2);
  for (int repetition = 0; repetition < 100; ++repetition) {
    int done = 0;
    {
      const HostStream stream(pool);
      for (int i = 0; i < 50; ++i) stream.enqueue([&] { ++done; });
    }
    REQUIRE(done == 50);
  }
}

TEST_CASE("HostStream: destroyed while others wait for it, or hold its events") {
  HostPool pool(1);
  const HostStream waiting(pool);
  Gate gate;
  HostStream::Event event;
  int value = 0, seen = 0;
  std::optional<HostStream> stream(pool);
  stream->enqueue(gate.waiter());
  stream->enqueue([&] { value = 1; });
  stream->record(event);
  waiting.wait_for(*stream);
  waiting.enqueue([&] { seen = value; });
  std::thread opener([&] {
    std::this_thread::sleep_for(5ms);
    gate.open();
  });
  stream.reset();
  CHECK(value == 1);
  waiting.wait_for(event);
  waiting.synchronize();
  CHECK(seen == 1);
  opener.join();
}

TEST_CASE("HostStream: a failure outlives the stream, for those who wait") {
  HostPool pool(1);
  const HostStream waiting(pool);
  HostStream::Event event;
  {
    const HostStream failing(pool);
    failing.enqueue(Failing{});
    failing.record(event);
  }
  waiting.wait_for(event);
  CHECK(message_of([&] { waiting.synchronize(); }) == "broken work");
}

// Red while a failure is not kept with its place in the queue: what a wait sees then depends on time.
TEST_CASE("HostStream: a failure behind an event does not reach those who wait for the event") {
  HostPool pool(1);
  const HostStream failing(pool), waiting(pool);
  HostStream::Event before;
  failing.enqueue([] {});
  failing.record(before);
  failing.enqueue(Failing{});
  CHECK(message_of([&] { failing.synchronize(); }) == "broken work");
  waiting.wait_for(before);
  CHECK_NOTHROW(waiting.synchronize());
}

TEST_CASE("HostStream: enqueuing, events, waits and synchronising do not allocate") {
  HostPool pool(3);
  const HostStream stream(pool), other(pool);
  std::vector<float> from(100'000, 1.5f), to(from.size());
  HostStream::Event event;
  const auto round = [&] {
    for (int i = 0; i < 200; ++i) {
      scape::copy_values(std::span<const float>(from), std::span<float>(to), stream);
      scape::fill_values(std::span<float>(to), 2.5f, stream);
      stream.record(event);
      other.wait_for(event);
      other.enqueue([big = std::array<std::byte, 384>{}] { static_cast<void>(big); });
      stream.wait_for(other);
    }
    stream.synchronize();
    other.synchronize();
  };
  round();
  const std::size_t before = allocations;
  round();
  CHECK(allocations == before);
  std::size_t in_stream = 1;
  stream.enqueue([&] {
    const std::size_t start = allocations;
    pool.run(1000, [](std::size_t) {});
    in_stream = allocations - start;
  });
  stream.synchronize();
  CHECK(in_stream == 0);
  CHECK(allocations == before);
}

TEST_CASE_TEMPLATE("copy_values and fill_values, of any size, in stream order", Backend, SCAPE_BACKENDS) {
  Backend backend;
  for (const std::size_t size : std::vector<std::size_t>{0, 1, 31, 65535, 65536, 65537, 200'000}) {
    CAPTURE(size);
    std::vector<std::uint32_t> values(size);
    std::iota(values.begin(), values.end(), 7u);
    const auto from = backend.array(values);
    const auto to = backend.array(std::vector<std::uint32_t>(size + 2, 1));
    const auto middle = to.span().subspan(1, size);
    scape::fill_values(middle, 5u, backend.stream);
    std::vector<std::uint32_t> expected(size + 2, 5);
    expected.front() = expected.back() = 1;
    CHECK(backend.read(to) == expected);
    scape::fill_values(middle, 6u, backend.stream);
    scape::copy_values(std::span<const std::uint32_t>(from.span()), middle, backend.stream);
    std::copy(values.begin(), values.end(), expected.begin() + 1);
    CHECK(backend.read(to) == expected);
  }
}

TEST_CASE_TEMPLATE("record_time: the time at which the stream gets there", Backend, SCAPE_BACKENDS) {
  Backend backend;
  std::array<double, 3> seconds{};
  for (double& second : seconds) {
    scape::record_time(second, backend.stream);
    backend.stream.synchronize();
    std::this_thread::sleep_for(2ms);
  }
  CHECK(seconds[1] - seconds[0] >= 0.002);
  CHECK(seconds[2] - seconds[1] >= 0.002);
  CHECK(seconds[2] - seconds[0] < 60);
}
