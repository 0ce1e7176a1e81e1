#pragma once

#include <scape/host/stream.hpp>
#include <scape/memory.hpp>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

// Sanitizers cost a factor of ten or more: long runs are cut there.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SCAPE_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SCAPE_SANITIZED 1
#endif
#endif
#ifdef SCAPE_SANITIZED
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif

// What a test body needs of a backend: a stream, and arrays in the memory that the stream's work reads and writes.
// Bodies are written once, as TEST_CASE_TEMPLATE("...", Backend, SCAPE_BACKENDS).
struct HostBackend {
  using Stream = scape::HostStream;
  template <class T>
  using Array = scape::Buffer<T, scape::HostMemory>;

  // Whether work that finds its input wrong, as a mask with another number of bits than announced, fails the stream.
  static constexpr bool reports_failed_work = true;

  scape::HostPool pool;
  scape::HostMemory memory;
  Stream stream;

  explicit HostBackend(int threads = 2) : pool(threads), stream(pool) {}
  HostBackend(int threads, scape::HostPool::Runner runner) : pool(threads, std::move(runner)), stream(pool) {}

  // One more: a stream whose work has thrown is of no use any longer.
  Stream new_stream() { return Stream(pool); }

  template <class T>
  Array<T> array(std::span<const T> values) {
    Array<T> result(values.size(), memory);
    scape::copy_values(values, result.span(), stream);
    stream.synchronize();
    return result;
  }
  template <class T>
  Array<T> array(const std::vector<T>& values) {
    return array(std::span<const T>(values));
  }

  template <class T>
  std::vector<T> read(const Array<T>& array) {
    std::vector<T> values(array.size());
    scape::copy_values(std::span<const T>(array.span()), std::span<T>(values), stream);
    stream.synchronize();
    return values;
  }
};

#if defined(__CUDACC__)

#include <scape/scape.cuh>

// The device that is current where it is made.
struct CudaBackend {
  using Stream = scape::CudaStream;
  template <class T>
  using Array = scape::Buffer<T, scape::CudaMemory>;

  static constexpr bool reports_failed_work = false;

  std::vector<cudaStream_t> handles;
  scape::CudaMemory memory;
  Stream stream = new_stream();

  explicit CudaBackend(int = 1) {}  // threads mean nothing here
  CudaBackend(const CudaBackend&) = delete;
  ~CudaBackend() {
    for (cudaStream_t handle : handles) cudaStreamDestroy(handle);
  }

  Stream new_stream() {
    cudaStream_t handle = nullptr;
    scape::check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    handles.push_back(handle);
    return Stream(handle);
  }

  template <class T>
  Array<T> array(std::span<const T> values) {
    Array<T> result(values.size(), memory);
    scape::copy_values(values, result.span(), stream);
    stream.synchronize();
    return result;
  }
  template <class T>
  Array<T> array(const std::vector<T>& values) {
    return array(std::span<const T>(values));
  }

  template <class T>
  std::vector<T> read(const Array<T>& array) {
    std::vector<T> values(array.size());
    scape::copy_values(std::span<const T>(array.span()), std::span<T>(values), stream);
    stream.synchronize();
    return values;
  }
};

#define SCAPE_BACKENDS CudaBackend
#else
#define SCAPE_BACKENDS HostBackend
#endif
