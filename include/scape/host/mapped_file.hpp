#pragma once

// POSIX only, unlike the rest of host/.

#include <scape/error.hpp>
#include <scape/memory.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

namespace scape::inline v0 {

/// Memory that is a file: each allocation a temporary one in a folder, already without a name, so that it is gone with
/// the process, however that ends. The room is reserved at once: what would not fit on the disk fails in the
/// constructor that asked for it and not in a step. Throws scape::Error with folder, call and reason.
class MappedFileMemory {
 public:
  explicit MappedFileMemory(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void* allocate(std::size_t bytes, std::size_t) {  // at a page, which is aligned to more than anything needs
    const File file(folder_);
    const auto size = static_cast<off_t>(bytes);
    if (size < 0 || static_cast<std::size_t>(size) != bytes) fail(folder_, "posix_fallocate", bytes, EFBIG);
    if (const int error = posix_fallocate(file.descriptor, 0, size); error != 0)
      fail(folder_, "posix_fallocate", bytes, error);
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor, 0);
    if (memory == MAP_FAILED) fail(folder_, "mmap", bytes, errno);
    return memory;
  }
  void deallocate(void* memory, std::size_t bytes, std::size_t) noexcept { munmap(memory, bytes); }

 private:
  [[noreturn]] static void fail(const std::filesystem::path& folder, const char* call, std::size_t bytes, int error) {
    throw Error("a file of " + std::to_string(bytes) + " bytes in \"" + folder.string() + "\": " + call + ": " +
                std::generic_category().message(error));
  }

  struct File {
    int descriptor;
    explicit File(const std::filesystem::path& folder) {
      std::string name = (folder / "scape-XXXXXX").string();
      descriptor = mkstemp(name.data());
      if (descriptor < 0) fail(folder, "mkstemp", 0, errno);
      unlink(name.c_str());
      fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    }
    File(const File&) = delete;
    ~File() { close(descriptor); }
  };

  std::filesystem::path folder_;
};
static_assert(MemoryResource<MappedFileMemory>);

}  // namespace scape::inline v0
