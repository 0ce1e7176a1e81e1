#include "primitives.hpp"

#include <scape/host/huge_pages.hpp>
#include <scape/host/mapped_file.hpp>

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

template <class F>
SCAPE_HOST_LOOP void sweep_run(std::size_t begin, std::size_t end, F f) {
  if constexpr (requires { f.second_moment(begin); }) {
    for (; begin + scape::detail::update_batch <= end; begin += scape::detail::update_batch) {
      float roots[scape::detail::update_batch];
      SCAPE_INDEPENDENT_ITERATIONS
      for (std::size_t i = 0; i < scape::detail::update_batch; ++i) roots[i] = f.second_moment(begin + i);
      scape::detail::take_square_roots(roots);
      SCAPE_INDEPENDENT_ITERATIONS
      for (std::size_t i = 0; i < scape::detail::update_batch; ++i) f.apply(begin + i, roots[i]);
    }
  }
  SCAPE_INDEPENDENT_ITERATIONS
  for (std::size_t i = begin; i < end; ++i) f(i);
}

// As bits, whose sum may be taken in any order.
SCAPE_HOST_LOOP inline std::uint32_t sum_of_bits(const float* values, std::size_t count) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += std::bit_cast<std::uint32_t>(values[i]);
  return sum;
}

/// Ordinary memory, or huge pages for all arrays, those of the yardsticks included.
struct BenchMemory {
  bool is_huge = from_environment("SCAPE_BENCH_HUGE_PAGES", 0) != 0;
  void* allocate(std::size_t bytes, std::size_t alignment) {
    return is_huge ? scape::HugePageMemory().allocate(bytes, alignment)
                   : scape::HostMemory().allocate(bytes, alignment);
  }
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment) noexcept {
    is_huge ? scape::HugePageMemory().deallocate(memory, bytes, alignment)
            : scape::HostMemory().deallocate(memory, bytes, alignment);
  }
};

struct HostBackend {
  using Stream = scape::HostStream;
  using Memory = BenchMemory;
  static constexpr std::size_t elements = 32 << 20, iterations = 7, steps_before = 40;
  static constexpr double sector = 64;  // bytes that memory moves at once
  static constexpr bool has_bus = false;

  scape::HostPool pool{static_cast<int>(from_environment("SCAPE_BENCH_THREADS", std::thread::hardware_concurrency()))};
  Memory memory;
  scape::MappedFileMemory outside{std::filesystem::temp_directory_path()};
  Stream stream{pool}, side{pool};
  std::vector<char> other = std::vector<char>(2 * std::max<std::size_t>(32 << 20, last_cache()));

  // SCAPE_BENCH_CLOCK=cpu: the process's CPU time over its threads, for machines that are not quiet.
  const char* const clock = std::getenv("SCAPE_BENCH_CLOCK");
  const bool counts_cpu = clock != nullptr && std::strcmp(clock, "cpu") == 0;

  // SCAPE_BENCH_PIN=1: each thread of the main stream's loops keeps to a CPU of its own. Some schedulers leave a thread
  // that wakes on the CPU that woke it, which is busy: for milliseconds, longer than a short benchmark.
  const bool pinned = from_environment("SCAPE_BENCH_PIN", 0) != 0;

  HostBackend() {
    if (pinned) stream.enqueue([this] { pin(); });
  }

  void pin() {
    cpu_set_t allowed;
    sched_getaffinity(0, sizeof allowed, &allowed);
    std::vector<int> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
    std::atomic<int> inside = 0;  // no thread may leave before every thread has its share
    pool.run(static_cast<std::size_t>(pool.threads()), [&](std::size_t i) {
      cpu_set_t own;
      CPU_ZERO(&own);
      CPU_SET(cpus[i % cpus.size()], &own);
      sched_setaffinity(0, sizeof own, &own);
      for (++inside; inside < pool.threads();) std::this_thread::yield();
    });
  }

  double now() const {
    timespec time;
    clock_gettime(counts_cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  }

  static std::size_t last_cache() { return static_cast<std::size_t>(std::max(0L, sysconf(_SC_LEVEL3_CACHE_SIZE))); }

  std::string name() const {
    std::ifstream file("/proc/cpuinfo");
    std::string model = "unknown CPU";
    for (std::string line; std::getline(file, line);)
      if (line.starts_with("model name")) model = line.substr(line.find(':') + 2);
    return model + ", " + std::to_string(pool.threads()) + " thread(s)" + (memory.is_huge ? ", huge pages" : "") +
           (pinned ? ", pinned" : "") + (counts_cpu ? ", by CPU time" : "");
  }

  template <class Work>
  double seconds(Work work) {
    stream.synchronize();
    const double begin = now();
    work();
    stream.synchronize();
    return (now() - begin) / (counts_cpu ? pool.threads() : 1);
  }

  void flush() {
    std::memset(other.data(), ++other[0], other.size());
    benchmark::ClobberMemory();
  }

  void copy(std::span<const float> from, std::span<float> to) {
    stream.enqueue([=, this] {
      const std::size_t run = from.size() / static_cast<std::size_t>(pool.threads()) + 1;
      scape::detail::run_parts(pool, from.size(), run, [=](std::size_t begin, std::size_t end) {
        std::memcpy(to.data() + begin, from.data() + begin, (end - begin) * sizeof(float));
      });
    });
  }

  template <class F>
  void sweep(std::size_t count, F f) {
    stream.enqueue([=, this] {
      scape::detail::run_parts(pool, count, 65536,
                               [f](std::size_t begin, std::size_t end) { sweep_run(begin, end, f); });
    });
  }
};

// What there is without scape.
void add_peers(Bench<HostBackend>& bench) {
  // Short: as many bytes as `pack/bytes` and `unpack` move, for what waking the threads takes.
  for (const bool is_short : {false, true})
    bench.add(is_short ? "read/short" : "read", -1, [=, &bench] {
      HostBackend& backend = bench.backend;
      const auto values = noise(bench, is_short ? bench.elements * 9 / 32 : bench.elements);
      std::atomic<std::uint32_t> sum = 0;
      const auto read = [&] {
        backend.stream.enqueue([&sum, &pool = backend.pool, all = values.span()] {
          scape::detail::run_parts(pool, all.size(), 65536, [&](std::size_t begin, std::size_t end) {
            sum += sum_of_bits(all.data() + begin, end - begin);
          });
        });
      };
      bench.time(4, values.size(), read, [] {});
      benchmark::DoNotOptimize(sum.load());
    });
  bench.add("memcpy", -1, [&bench] {
    const auto from = noise(bench, bench.elements), to = filled<float>(bench, bench.elements);
    bench.time(8, [&] { std::memcpy(to.span().data(), from.span().data(), from.bytes()); });
  });
  for (const double density : {0.001, 0.01, 0.1})
    bench.add("nth_element", density, [=, &bench] {
      const auto values = noise(bench, bench.elements), copy = bench.array<float>(bench.elements);
      bench.backend.stream.synchronize();
      bench.time(8.125, [&] {
        const std::span<float> magnitudes = copy.span();
        std::ranges::transform(values.span(), magnitudes.begin(), [](float value) { return std::fabs(value); });
        const auto k = static_cast<std::ptrdiff_t>(scape::kept_count(magnitudes.size(), density));
        std::nth_element(magnitudes.begin(), magnitudes.begin() + k, magnitudes.end(), std::greater());
        benchmark::ClobberMemory();
      });
    });
}

int main(int argc, char** argv) {
  return run_benchmarks<HostBackend>(argc, argv, [](Bench<HostBackend>& bench) {
    add_benchmarks(bench);
    add_peers(bench);
  });
}
