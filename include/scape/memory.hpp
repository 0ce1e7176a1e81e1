#pragma once

#include <scape/error.hpp>

#include <concepts>
#include <cstddef>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

namespace scape::inline v0 {

/// Where buffers come from. std::pmr::memory_resource and anything shaped like it fits; the memory must be accessible
/// to the stream that works on it (HostMemory for HostStream). Used in constructors only, never in a step.
template <class M>
concept MemoryResource = requires(M& memory, void* pointer, std::size_t bytes, std::size_t alignment) {
  { memory.allocate(bytes, alignment) } -> std::same_as<void*>;
  memory.deallocate(pointer, bytes, alignment);
};

/// Host memory from operator new.
class HostMemory {
 public:
  void* allocate(std::size_t bytes, std::size_t alignment) {
    return ::operator new(bytes, std::align_val_t(alignment));
  }
  void deallocate(void* pointer, std::size_t, std::size_t alignment) noexcept {
    ::operator delete(pointer, std::align_val_t(alignment));
  }
};
static_assert(MemoryResource<HostMemory>);

/// An uninitialised array in the memory of a resource, which must outlive it; size * sizeof(T) bytes, aligned to 256.
template <class T, MemoryResource M>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
  static constexpr std::size_t alignment = 256;

 public:
  /// Throws what the resource throws where it has no memory.
  Buffer(std::size_t size, M& memory) : memory_(&memory), size_(size) {
    if (size != 0) data_ = static_cast<T*>(memory.allocate(size * sizeof(T), alignment));
  }
  Buffer(Buffer&& other) noexcept
      : memory_(other.memory_), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) memory_->deallocate(data_, size_ * sizeof(T), alignment);
  }

  std::size_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept { return size_ * sizeof(T); }
  std::span<T> span() const noexcept { return {data_, size_}; }

 private:
  M* memory_;
  T* data_ = nullptr;
  std::size_t size_;
};

}  // namespace scape::inline v0
