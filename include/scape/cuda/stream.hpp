#pragma once

#include <scape/error.hpp>
#include <scape/memory.hpp>
#include <scape/stream.hpp>

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

namespace scape::inline v0 {

/// A call of the CUDA runtime that failed; `code` is its result.
class CudaError : public Error {
 public:
  CudaError(cudaError_t code, const char* call)
      : Error(std::string(call) + ": " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code)), code(code) {}
  cudaError_t code;
};

/// Throws CudaError unless `code` is success. `call` names what was called.
inline void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw CudaError(code, call);
}

/// Memory of the device that is current when it is asked for.
class CudaMemory {
 public:
  void* allocate(std::size_t bytes, std::size_t) {
    void* pointer = nullptr;
    check(cudaMalloc(&pointer, bytes), "cudaMalloc");
    return pointer;
  }
  void deallocate(void* pointer, std::size_t, std::size_t) noexcept { cudaFree(pointer); }
};

/// Page-locked host memory, which kernels and asynchronous copies of every device can reach.
class PinnedMemory {
 public:
  void* allocate(std::size_t bytes, std::size_t) {
    void* pointer = nullptr;
    check(cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable), "cudaHostAlloc");
    return pointer;
  }
  void deallocate(void* pointer, std::size_t, std::size_t) noexcept { cudaFreeHost(pointer); }
};
static_assert(MemoryResource<CudaMemory> && MemoryResource<PinnedMemory>);

/// The caller's cudaStream_t as a scape stream: a non-owning handle. Work is enqueued on the device that is current,
/// which must be the stream's. Nothing here allocates after an Event's first recording, so steps can be captured.
class CudaStream {
 public:
  /// Memory that both the stream's work and the host can read and write.
  using HostVisibleMemory = PinnedMemory;

  /// A point in a stream; makes its cudaEvent_t when it is first recorded, on the device that is current then.
  class Event {
    friend class CudaStream;
    struct Destroy {
      void operator()(cudaEvent_t event) const noexcept { cudaEventDestroy(event); }
    };
    std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, Destroy> event_;
  };

  /// The handle of a stream; 0 and cudaStreamLegacy would order it with all others, so they are refused:
  /// std::invalid_argument.
  explicit CudaStream(cudaStream_t stream) : stream_(stream) {
    expects(stream != nullptr && stream != cudaStreamLegacy, "stream", static_cast<void*>(stream),
            "must not be the legacy default stream, which waits for all others");
  }

  cudaStream_t handle() const noexcept { return stream_; }

  void record(Event& event) const {
    if (event.event_ == nullptr) {
      cudaEvent_t made = nullptr;
      check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags");
      event.event_.reset(made);
    }
    check(cudaEventRecord(event.event_.get(), stream_), "cudaEventRecord");
  }
  void wait_for(const Event& event) const {
    if (event.event_ != nullptr) check(cudaStreamWaitEvent(stream_, event.event_.get(), 0), "cudaStreamWaitEvent");
  }
  /// Not for steps: makes an event.
  void wait_for(const CudaStream& other) const {
    if (other.stream_ == stream_) return;
    Event event;
    other.record(event);
    wait_for(event);
  }
  void synchronize() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  /// Whether work is captured into a graph at present, not run.
  bool is_capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream_, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  friend bool operator==(const CudaStream&, const CudaStream&) = default;

 private:
  cudaStream_t stream_;
};
static_assert(Stream<CudaStream>);

/// Copies between arrays of equal size, in device or host memory; from pageable host memory the source is read at once.
template <class T>
void copy_values(std::span<const T> from, std::span<T> to, const CudaStream& stream) {
  if (!from.empty())
    check(cudaMemcpyAsync(to.data(), from.data(), from.size_bytes(), cudaMemcpyDefault, stream.handle()),
          "cudaMemcpyAsync");
}

/// Calls f(), which must not throw, on the host when the stream gets here.
template <class F>
void call_on_host(F& f, const CudaStream& stream) {
  const auto call = [](void* to) { (*static_cast<F*>(to))(); };
  check(cudaLaunchHostFunc(stream.handle(), call, &f), "cudaLaunchHostFunc");
}

/// Writes the time at which the stream gets here, in seconds since an arbitrary start.
inline void record_time(double& seconds, const CudaStream& stream) {
  const auto write = [](void* to) {
    *static_cast<double*>(to) =
        std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  check(cudaLaunchHostFunc(stream.handle(), write, &seconds), "cudaLaunchHostFunc");
}

}  // namespace scape::inline v0
