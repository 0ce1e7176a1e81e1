#pragma once

#include <scape/scape.hpp>
#if defined(__CUDACC__)
#include <scape/scape.cuh>
#endif

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>

inline std::size_t from_environment(const char* name, std::size_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<std::size_t>(std::strtoull(text, nullptr, 10));
}

/// Registers benchmarks on a backend and times them. A backend has
///   Stream, Memory   types; members memory, stream and side
///   outside          memory for offloaded residuals; has_bus   whether the stream's work must have them copied
///   elements, iterations, sector   constants: defaults, and the bytes that its memory moves at once
///   name()           of the machine
///   seconds(work)    that what work() enqueues on `stream` takes
///   flush()          empties the caches
///   copy(from, to), sweep(count, f)   the fastest copy there is; f(i) for every i, a plain loop or kernel
template <class B>
class Bench {
 public:
  template <class T>
  using Array = scape::Buffer<T, typename B::Memory>;

  B backend;
  const std::size_t elements = from_environment("SCAPE_BENCH_ELEMENTS", B::elements);

  template <class T>
  Array<T> array(std::size_t size) {
    return Array<T>(size, backend.memory);
  }

  /// body() makes its data and calls time() once.
  template <class F>
  void add(const std::string& operation, double density, F body) {
    char text[16] = "";
    if (density >= 0) std::snprintf(text, sizeof text, "/%g", density);
    const auto iterations = from_environment("SCAPE_BENCH_ITERATIONS", B::iterations);
    benchmark::RegisterBenchmark((operation + text).c_str(),
                                 [this, body](benchmark::State& state) mutable {
                                   state_ = &state;
                                   body();
                                 })
        ->UseManualTime()
        ->Iterations(static_cast<benchmark::IterationCount>(iterations))
        ->Unit(benchmark::kMillisecond);
  }

  /// Times what work() enqueues, after what prepare() does, with cold caches. It must move `bytes` bytes for each of
  /// `count` elements. Returns the best bandwidth, as STREAM does.
  template <class Work, class Prepare>
  double time(double bytes, std::size_t count, Work work, Prepare prepare) {
    prepare();
    backend.seconds(work);
    double fastest = std::numeric_limits<double>::infinity();
    for (auto _ : *state_) {
      prepare();
      backend.flush();
      const double seconds = std::max(backend.seconds(work), 1e-9);
      state_->SetIterationTime(seconds);
      fastest = std::min(fastest, seconds);
    }
    const double total = bytes * static_cast<double>(count), bandwidth = total / fastest;
    state_->SetBytesProcessed(static_cast<std::int64_t>(total * static_cast<double>(state_->iterations())));
    state_->counters["bytes_per_element"] = bytes;
    state_->counters["seconds"] = fastest;
    state_->counters["bandwidth"] = bandwidth;
    if (copy_bandwidth > 0) state_->counters["copy_share"] = bandwidth / copy_bandwidth;
    return bandwidth;
  }
  template <class Work>
  double time(double bytes, Work work) {
    return time(bytes, elements, work, [] {});
  }

  /// Of the copy benchmark, which is the first to run.
  double copy_bandwidth = 0;

 private:
  benchmark::State* state_ = nullptr;
};

/// Bytes for each element of an array that memory moves at least, when a share of the elements, at random places and of
/// `size` bytes each, is read; or is written, where a sector that is only partly written is read before.
template <class B>
double gathered(double share, double size = 4) {
  return size * (1 - std::pow(1 - share, B::sector / size));
}
template <class B>
double scattered(double share, double size = 4) {
  return 2 * gathered<B>(share, size) - size * std::pow(share, B::sector / size);
}

template <class B, class Register>
int run_benchmarks(int argc, char** argv, Register add_benchmarks) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  Bench<B> bench;
  add_benchmarks(bench);
  benchmark::AddCustomContext("machine", bench.backend.name());
  benchmark::AddCustomContext("elements", std::to_string(bench.elements));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
