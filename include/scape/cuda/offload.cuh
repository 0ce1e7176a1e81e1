#pragma once

#include <scape/cuda/stream.hpp>
#include <scape/cuda/update.cuh>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/offload.hpp>
#include <scape/residual_store.hpp>
#include <scape/step_scalars.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace scape::inline v0 {

/// Pageable host memory that kernels can read and write: managed, and kept on the host where the device allows it.
class PageableMemory {
 public:
  void* allocate(std::size_t bytes, std::size_t) {
    int device = 0, stays = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&stays, cudaDevAttrConcurrentManagedAccess, device), "cudaDeviceGetAttribute");
    void* pointer = nullptr;
    check(cudaMallocManaged(&pointer, bytes, cudaMemAttachGlobal), "cudaMallocManaged");
    const auto hint = [&](cudaMemoryAdvise advice, cudaMemLocation where) {  // what it cannot do costs time only
      if (cudaMemAdvise(pointer, bytes, advice, where) != cudaSuccess) cudaGetLastError();
    };
    if (stays) {
      hint(cudaMemAdviseSetPreferredLocation, {cudaMemLocationTypeHost, 0});
      hint(cudaMemAdviseSetAccessedBy, {cudaMemLocationTypeDevice, device});
    }
    return pointer;
  }
  void deallocate(void* pointer, std::size_t, std::size_t) noexcept { cudaFree(pointer); }
};
static_assert(MemoryResource<PageableMemory>);

/// A ResidualStore whose array lies in host memory, and travels through the device once a step.
///
/// Owns 4 bytes a parameter in the memory of E; in device memory, from M, three staging buffers and a table of 4 bytes
/// for every 4,096 elements; and two streams for copies. Accumulating copies a chunk in while the one before is worked
/// on and the one before that copied back: hence three buffers, since of two a copy in and a copy back would share one
/// and take turns. 8 bytes a parameter cross the bus, half of them each way and both ways at once. All else, such as
/// selection on the rank's own part or the update at the mask, reaches values() over the bus.
///
/// All work is enqueued, without allocation or synchronisation, and ordered by the stream that is given; so it can be
/// captured. The bits are ResidualStore's.
template <MemoryResource E, MemoryResource M>
class OffloadedResidualStore {
 public:
  static constexpr std::size_t buffers = 3;

  /// `plan`: of the masks that will be given. Where E has no memory, PageableMemory takes its place, with one warning;
  /// if strict, what E threw is thrown. Waits for the stream.
  OffloadedResidualStore(const MaskPlan& plan, E& memory, M& device_memory, const CudaStream& stream,
                         const OffloadOptions& options = {})
      : size_(plan.size()),
        tiles_(plan.tiles().size()),
        chunk_(chunk_of(plan, options.buffer_bytes)),
        device_memory_(&device_memory),
        values_(allocate(plan.size(), memory, options)),
        pageable_values_(values_.size() == plan.size() ? 0 : plan.size(), pageable_),
        staging_(buffers * (chunk_ == 0 ? 0 : chunk_ + slack), device_memory),
        whole_(tour_of(plan, all_tiles(plan), stream)) {
    fill_values(values(), 0.0f, stream);
    for (Lane& lane : lanes_)  // an event is made at its first recording
      for (CudaStream::Event* event : {&lane.filled, &lane.worked_on, &lane.emptied}) stream.record(*event);
    stream.record(begun_);
    stream.synchronize();
  }
  OffloadedResidualStore(const OffloadedResidualStore&) = delete;

  /// Reachable by kernels, and by the host when the stream has passed.
  std::span<float> values() const noexcept { return is_pinned() ? values_.span() : pageable_values_.span(); }

  /// Whether the array is in the memory of E, as it should be.
  bool is_pinned() const noexcept { return pageable_values_.size() == 0; }
  std::size_t host_bytes() const noexcept { return values().size_bytes(); }
  std::size_t device_bytes() const noexcept {
    std::size_t bytes = staging_.bytes() + whole_.order.bytes();
    for (const Tour& tour : tours_) bytes += tour.order.bytes();
    return bytes;
  }

  /// Once, before accumulating at mask.only(chosen): `tiles` are the same indices as `chosen`, on the host. They are
  /// visited in the order of their elements, so that few long copies are made; 4 bytes a tile. Waits for the stream.
  void prepare(const MaskPlan& plan, std::span<const std::uint32_t> tiles, std::span<const std::uint32_t> chosen,
               const CudaStream& stream) {
    expects(tiles.size() == chosen.size() && !tiles.empty(), "tiles.size()", tiles.size(),
            "must be that of the list in device memory, ", chosen.size(), ", and not 0");
    for (const std::uint32_t tile : tiles) expects(tile < tiles_, "tile", tile, "must be below ", tiles_);
    Tour tour = tour_of(plan, {tiles.begin(), tiles.end()}, stream);
    tour.chosen = chosen.data();
    tours_.push_back(std::move(tour));
  }

  /// As ResidualStore's. A mask with `chosen` tiles: after prepare().
  template <class G, class Rule>
  void accumulate(std::span<const G> gradient, MaskView before, std::span<const float> errors, MaskView mask,
                  std::span<float> payload, std::span<float> moments, const Rule& rule, const StepScalars& scalars,
                  const CudaStream& stream) const {
    check_sizes(gradient, mask, payload);
    expects(errors.empty() || errors.size() >= before.kept, "errors.size()", errors.size(),
            "must be 0 or at least the mask before's ", before.kept);
    if constexpr (requires { rule.moment(0.0f, true); })
      expects(moments.size() >= mask.kept, "moments.size()", moments.size(), "must be at least the mask's ", mask.kept);
    travel(tour_for(mask), stream, [&](const Chunk&, std::span<const std::uint32_t> tiles, float* state) {
      accumulate_gradient(gradient, std::span<float>(state, size_), before, errors, mask.only(tiles), payload, moments,
                          rule, scalars, stream);
    });
  }

  template <class G>
  void add(std::span<const G> gradient, const CudaStream& stream) const {
    check_size(gradient);
    travel(whole_, stream, [&](const Chunk& chunk, std::span<const std::uint32_t>, float* state) {
      for_each(chunk.count, detail::AddTo<G>{state + chunk.begin, gradient.data() + chunk.begin}, stream);
    });
  }

  template <class G>
  void add(std::span<const G> gradient, const StepScalars& scalars, const CudaStream& stream) const {
    check_size(gradient);
    travel(whole_, stream, [&](const Chunk& chunk, std::span<const std::uint32_t>, float* state) {
      for_each(chunk.count, detail::AddScaled<G>{state + chunk.begin, {gradient.data() + chunk.begin, &scalars}},
               stream);
    });
  }

  template <class G, class Rule>
  void add(std::span<const G> gradient, MaskView mask, std::span<float> payload, const Rule& rule,
           const StepScalars& scalars, const CudaStream& stream) const {
    check_sizes(gradient, mask, payload);
    travel(tour_for(mask), stream, [&](const Chunk& chunk, std::span<const std::uint32_t> tiles, float* state) {
      for_each(chunk.count, detail::AddScaled<G>{state + chunk.begin, {gradient.data() + chunk.begin, &scalars}},
               stream);
      for_each_kept(mask.only(tiles),
                    detail::AddToPayload<G, Rule>{state, payload.data(), {gradient.data(), &scalars}, rule}, stream);
    });
  }

  void release(MaskView sent, const CudaStream& stream) const {
    for_each_kept(sent, detail::Clear{values().data()}, stream);
  }

 private:
  // A run of elements that travels at once, and its tiles, [first, last) of a tour's order.
  struct Chunk {
    std::size_t begin, count, first, last;
  };
  // The tiles of a pass, in the order of their elements.
  struct Tour {
    Buffer<std::uint32_t, M> order;
    std::vector<Chunk> chunks;
    const std::uint32_t* chosen = nullptr;  // the list that it stands for
  };
  struct Lane {
    CudaStream::Event filled, worked_on, emptied;
  };
  struct OwnStream {
    struct Destroy {
      void operator()(cudaStream_t stream) const noexcept { cudaStreamDestroy(stream); }
    };
    std::unique_ptr<std::remove_pointer_t<cudaStream_t>, Destroy> handle{make()};
    static cudaStream_t make() {
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
      return stream;
    }
    CudaStream stream() const { return CudaStream(handle.get()); }
  };

  // A chunk lies in its buffer as it does in memory: at the same place of a line, so that kernels can take 16 bytes.
  static constexpr std::size_t slack = 64;

  // Elements of a chunk: a tile's at least, and no more than there are.
  static std::size_t chunk_of(const MaskPlan& plan, std::size_t buffer_bytes) {
    return std::min(plan.size(), std::max(buffer_bytes / sizeof(float), tile_bits));
  }

  static Buffer<float, E> allocate(std::size_t size, E& memory, const OffloadOptions& options) {
    try {
      return Buffer<float, E>(size, memory);
    } catch (const std::exception& error) {
      if (options.strict) throw;
      cudaGetLastError();  // or the next launch would be blamed for it
      const std::string text = std::string("scape: residuals are in pageable host memory, which is slower, since ") +
                               std::to_string(size * sizeof(float)) +
                               " bytes of the memory asked for failed: " + error.what();
      if (options.warn)
        options.warn(text);
      else
        std::clog << text << std::endl;
      return Buffer<float, E>(0, memory);
    }
  }

  static std::vector<std::uint32_t> all_tiles(const MaskPlan& plan) {
    std::vector<std::uint32_t> tiles(plan.tiles().size());
    for (std::size_t i = 0; i < tiles.size(); ++i) tiles[i] = static_cast<std::uint32_t>(i);
    return tiles;
  }

  Tour tour_of(const MaskPlan& plan, std::vector<std::uint32_t> tiles, const CudaStream& stream) const {
    std::sort(tiles.begin(), tiles.end(),
              [&](std::uint32_t a, std::uint32_t b) { return plan.tiles()[a].element < plan.tiles()[b].element; });
    Tour tour{Buffer<std::uint32_t, M>(tiles.size(), *device_memory_), {}};
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      const Tile& tile = plan.tiles()[tiles[i]];
      Chunk* const last = tour.chunks.empty() ? nullptr : &tour.chunks.back();
      if (last != nullptr && last->begin + last->count == tile.element && last->count + tile.count <= chunk_) {
        last->count += tile.count;
        last->last = i + 1;
      } else {
        tour.chunks.push_back({tile.element, tile.count, i, i + 1});
      }
    }
    copy_values(std::span<const std::uint32_t>(tiles), tour.order.span(), stream);
    stream.synchronize();
    return tour;
  }

  const Tour& tour_for(const MaskView& mask) const {
    if (mask.chosen.empty()) return whole_;
    const auto found = std::find_if(tours_.begin(), tours_.end(), [&](const Tour& tour) {
      return tour.chosen == mask.chosen.data() && tour.order.size() == mask.chosen.size();
    });
    expects(found != tours_.end(), "mask.chosen.size()", mask.chosen.size(), "prepare() was not called for this list");
    return *found;
  }

  // Calls work(chunk, its tiles, state) for every chunk: enqueues on `stream` what is done with the chunk, whose
  // element i is state[i] meanwhile.
  template <class F>
  void travel(const Tour& tour, const CudaStream& stream, F work) const {
    if (tour.chunks.empty()) return;
    const CudaStream in = in_.stream(), out = out_.stream();
    stream.record(begun_);
    in.wait_for(begun_);
    for (std::size_t i = 0; i < tour.chunks.size(); ++i) {
      const Chunk& chunk = tour.chunks[i];
      Lane& lane = lanes_[i % buffers];
      const std::span<float> outside = values().subspan(chunk.begin, chunk.count);
      const std::span<float> inside =
          staging_.span().subspan(i % buffers * (chunk_ + slack) + chunk.begin % slack, chunk.count);
      if (i >= buffers) in.wait_for(lane.emptied);  // the first ones were emptied before the stream got here
      copy_values(std::span<const float>(outside), inside, in);
      in.record(lane.filled);
      stream.wait_for(lane.filled);
      work(chunk, std::span<const std::uint32_t>(tour.order.span()).subspan(chunk.first, chunk.last - chunk.first),
           shifted(inside.data(), chunk.begin));
      stream.record(lane.worked_on);
      out.wait_for(lane.worked_on);
      copy_values(std::span<const float>(inside), outside, out);
      out.record(lane.emptied);
    }
    stream.wait_for(lanes_[(tour.chunks.size() - 1) % buffers].emptied);  // and with it all copies before
  }

  // Where element 0 would be. As a number: it may lie outside the buffer.
  static float* shifted(float* pointer, std::size_t begin) {
    return reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(pointer) - begin * sizeof(float));
  }

  template <class G>
  void check_size(std::span<const G> gradient) const {
    expects(gradient.size() == size_, "gradient.size()", gradient.size(), "must be the store's size, ", size_);
  }
  template <class G>
  void check_sizes(std::span<const G> gradient, const MaskView& mask, std::span<float> payload) const {
    check_size(gradient);
    expects(mask.plan.tiles.size() == tiles_, "mask.plan.tiles.size()", mask.plan.tiles.size(),
            "must be that of the store's plan, ", tiles_);
    expects(payload.size() >= mask.kept, "payload.size()", payload.size(), "must be at least the mask's ", mask.kept);
  }

  std::size_t size_, tiles_, chunk_;
  M* device_memory_;
  PageableMemory pageable_;
  Buffer<float, E> values_;
  Buffer<float, PageableMemory> pageable_values_;  // one of the two is empty
  Buffer<float, M> staging_;
  Tour whole_;
  std::vector<Tour> tours_;
  OwnStream in_, out_;
  mutable std::array<Lane, buffers> lanes_;
  mutable CudaStream::Event begun_;
};

namespace detail {
template <class E, class M>
struct StoreOutside<CudaStream, E, M> {
  using type = OffloadedResidualStore<E, M>;
};
}  // namespace detail

}  // namespace scape::inline v0
