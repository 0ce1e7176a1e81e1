#pragma once

// POSIX only, unlike the rest of host/.

#include <scape/memory.hpp>

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace scape::inline v0 {

/// Host memory in pages of 2 MiB, where Linux has them for those who ask (transparent_hugepage = madvise); ordinary
/// memory elsewhere. Every pass over large arrays is faster by them, the more the less it computes: for the optimizer,
/// and better still for parameters and gradients, too. Allocations of less than 2 MiB are ordinary ones.
class HugePageMemory {
 public:
  static constexpr std::size_t page = std::size_t{2} << 20;

  void* allocate(std::size_t bytes, std::size_t alignment) {
    void* const memory = ::operator new(bytes, alignment_of(bytes, alignment));
#if defined(MADV_HUGEPAGE)
    if (bytes >= page) madvise(memory, bytes / page * page, MADV_HUGEPAGE);  // a wish: nothing is lost if it fails
#endif
    return memory;
  }
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment) noexcept {
    ::operator delete(memory, alignment_of(bytes, alignment));
  }

 private:
  static std::align_val_t alignment_of(std::size_t bytes, std::size_t alignment) {
    return std::align_val_t(bytes < page || alignment > page ? alignment : page);
  }
};
static_assert(MemoryResource<HugePageMemory>);

}  // namespace scape::inline v0
