#include "primitives.hpp"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

struct CudaBackend {
  using Stream = scape::CudaStream;
  using Memory = scape::CudaMemory;
  static constexpr std::size_t elements = 256 << 20, iterations = 20, steps_before = 40;
  static constexpr double sector = 32;  // bytes that memory moves at once
  static constexpr bool has_bus = true;

  Memory memory;
  scape::PinnedMemory outside;
  Stream stream = new_stream(), side = new_stream();
  cudaEvent_t begin = new_event(), end = new_event();
  scape::Buffer<std::byte, Memory> other{2 * last_cache(), memory};

  // Streams and events end with the process.
  static Stream new_stream() {
    cudaStream_t handle = nullptr;
    scape::check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return Stream(handle);
  }
  static cudaEvent_t new_event() {
    cudaEvent_t event = nullptr;
    scape::check(cudaEventCreate(&event), "cudaEventCreate");
    return event;
  }
  static std::size_t last_cache() {
    int bytes = 0;
    scape::check(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, 0), "cudaDeviceGetAttribute");
    return static_cast<std::size_t>(std::max(bytes, 1 << 16));
  }

  std::string name() const {
    cudaDeviceProp properties;
    scape::check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    return properties.name;
  }

  // Between events: what was enqueued before gives the host time to be ahead.
  template <class Work>
  double seconds(Work work) {
    scape::check(cudaEventRecord(begin, stream.handle()), "cudaEventRecord");
    work();
    scape::check(cudaEventRecord(end, stream.handle()), "cudaEventRecord");
    scape::check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    scape::check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) / 1000;
  }

  void flush() {
    scape::check(cudaMemsetAsync(other.span().data(), 0, other.size(), stream.handle()), "cudaMemsetAsync");
  }
  void copy(std::span<const float> from, std::span<float> to) { scape::copy_values(from, to, stream); }
  template <class F>
  void sweep(std::size_t count, F f) {
    scape::for_each(count, f, stream);
  }
};

// Copies to the host and from it at once: the limit of what is offloaded.
void add_bus(Bench<CudaBackend>& bench) {
  bench.add("bus", -1, [&bench] {
    auto& backend = bench.backend;
    const auto from = noise(bench, bench.elements), to = noise(bench, bench.elements);
    const scape::Buffer<float, scape::PinnedMemory> in(bench.elements, backend.outside),
        out(bench.elements, backend.outside);
    bench.time(bus_bytes, [&] {
      backend.side.wait_for(backend.stream);
      scape::copy_values(std::span<const float>(from.span()), out.span(), backend.side);
      scape::copy_values(std::span<const float>(in.span()), to.span(), backend.stream);
      backend.stream.wait_for(backend.side);
    });
  });
}

int main(int argc, char** argv) {
  return run_benchmarks<CudaBackend>(argc, argv, [](Bench<CudaBackend>& bench) {
    add_benchmarks(bench);
    add_bus(bench);
  });
}
