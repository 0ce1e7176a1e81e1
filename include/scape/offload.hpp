#pragma once

#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/residual_store.hpp>
#include <scape/stream.hpp>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

namespace scape::inline v0 {

class HostStream;

/// How residuals outside the device's memory are kept. Without a meaning where streams work in any memory at once, as
/// HostStream does.
struct OffloadOptions {
  /// Of each of the three staging buffers; at least a tile's 16 KiB.
  std::size_t buffer_bytes = 16 << 20;
  /// Whether memory that cannot be had is an error. If not, it is replaced by pageable memory, with one warning.
  bool strict = false;
  /// Takes the warning; empty: std::clog.
  std::function<void(const std::string&)> warn = {};
};

namespace detail {

// What holds residuals in the memory of E for the work of S, whose own memory is M's.
template <class S, class E, class M>
struct StoreOutside;
template <class E, class M>
struct StoreOutside<HostStream, E, M> {
  struct type : ResidualStore<E> {
    type(const MaskPlan& plan, E& memory, M&, const HostStream& stream, const OffloadOptions&)
        : ResidualStore<E>(plan.size(), memory, stream) {}
    std::size_t host_bytes() const noexcept { return this->values().size_bytes(); }
    std::size_t device_bytes() const noexcept { return 0; }
  };
};

}  // namespace detail

/// Residuals lie with all other state: for AdamS, the default.
struct InMemory {
  static constexpr bool offloads = false;
  template <Stream S, MemoryResource M>
  using Store = ResidualStore<M>;

  template <Stream S, MemoryResource M>
  ResidualStore<M> store(const MaskPlan& plan, M& memory, const S& stream) const {
    return ResidualStore<M>(plan.size(), memory, stream);
  }
};

/// Residuals lie in the memory of E, which must outlive the optimizer: PinnedMemory for CudaStream,
/// OffloadedResidualStore says how; MappedFileMemory for HostStream. The same bits as InMemory.
template <MemoryResource E>
class Offloaded {
 public:
  static constexpr bool offloads = true;
  template <Stream S, MemoryResource M>
  using Store = typename detail::StoreOutside<S, E, M>::type;

  explicit Offloaded(E& memory, OffloadOptions options = {}) : memory_(&memory), options_(std::move(options)) {}

  template <Stream S, MemoryResource M>
  Store<S, M> store(const MaskPlan& plan, M& memory, const S& stream) const {
    return Store<S, M>(plan, *memory_, memory, stream, options_);
  }

 private:
  E* memory_;
  OffloadOptions options_;
};

}  // namespace scape::inline v0
