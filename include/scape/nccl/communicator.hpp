#pragma once

#include <scape/collective_arguments.hpp>
#include <scape/communicator.hpp>
#include <scape/cuda/stream.hpp>
#include <scape/error.hpp>

#include <cuda_bf16.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace scape::inline v0 {

/// A Communicator over the caller's ncclComm_t, any group: a non-owning handle, to be used while the communicator's
/// device is current. Buffers are device memory. Owns nothing; collectives are enqueued, can be captured into a graph,
/// and are summed in the order that NCCL chooses, the same on every rank. Failed calls throw scape::Error; errors that
/// happen later are what check() polls. Must outlive the work enqueued with it.
class NcclCommunicator {
 public:
  explicit NcclCommunicator(ncclComm_t communicator) : communicator_(communicator) {
    expects(communicator != nullptr, "communicator", "null", "must be an initialised ncclComm_t");
    check(ncclCommUserRank(communicator, &rank_), "ncclCommUserRank");
    check(ncclCommCount(communicator, &size_), "ncclCommCount");
  }
  NcclCommunicator(const NcclCommunicator&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  ncclComm_t handle() const noexcept { return communicator_; }

  /// Bytes that a ring sends for this rank's part of the collectives enqueued so far: NCCL does not tell what it moved.
  std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }

  /// Throws scape::Error where a collective has failed since it was enqueued. Does not wait.
  void check() const {
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError");
    if (state != ncclInProgress) check(state, "a collective of rank " + std::to_string(rank_));
  }

  void all_reduce_mean(std::span<const float> in, std::span<float> out, const CudaStream& stream) {
    all_reduce(in, out, ncclFloat, stream);
  }
  void all_reduce_mean(std::span<const __nv_bfloat16> in, std::span<__nv_bfloat16> out, const CudaStream& stream) {
    all_reduce(in, out, ncclBfloat16, stream);
  }

  void reduce_scatter_mean(std::span<const float> in, std::span<float> out, const CudaStream& stream) {
    reduce_scatter(in, out, ncclFloat, stream);
  }
  void reduce_scatter_mean(std::span<const __nv_bfloat16> in, std::span<__nv_bfloat16> out, const CudaStream& stream) {
    reduce_scatter(in, out, ncclBfloat16, stream);
  }

  void all_gather(std::span<const MaskWord> own, std::span<MaskWord> all, const CudaStream& stream) {
    detail::expects_all_gather(own.size(), all.size(), ranks());
    bytes_sent_ += others(own.size_bytes());
    check(ncclAllGather(own.data(), all.data(), own.size(), ncclUint32, communicator_, stream.handle()),
          "ncclAllGather");
  }

  /// A broadcast from every rank that has a part, in one group.
  void all_gather_uneven(std::span<const MaskWord> own, std::span<MaskWord> all, std::span<const std::size_t> counts,
                         const CudaStream& stream) {
    detail::expects_all_gather_uneven(own.size(), all.size(), counts, static_cast<std::size_t>(rank_), ranks());
    bytes_sent_ += others(own.size_bytes());
    check(ncclGroupStart(), "ncclGroupStart");
    MaskWord* part = all.data();
    for (int root = 0; root < size_; ++root) {
      const std::size_t count = counts[static_cast<std::size_t>(root)];
      const MaskWord* const from = root == rank_ ? own.data() : part;
      if (count != 0)
        check(ncclBroadcast(from, part, count, ncclUint32, root, communicator_, stream.handle()), "ncclBroadcast");
      part += count;
    }
    check(ncclGroupEnd(), "ncclGroupEnd");
  }

  /// A send to every rank and a receive from it, in one group.
  void all_to_all(std::span<const MaskWord> in, std::span<MaskWord> out, const CudaStream& stream) {
    detail::expects_all_to_all(in.size(), out.size(), ranks());
    const std::size_t part = in.size() / ranks();
    bytes_sent_ += others(part * sizeof(MaskWord));
    if (part == 0) return;
    check(ncclGroupStart(), "ncclGroupStart");
    for (int peer = 0; peer < size_; ++peer) {
      const std::size_t begin = static_cast<std::size_t>(peer) * part;
      check(ncclSend(in.data() + begin, part, ncclUint32, peer, communicator_, stream.handle()), "ncclSend");
      check(ncclRecv(out.data() + begin, part, ncclUint32, peer, communicator_, stream.handle()), "ncclRecv");
    }
    check(ncclGroupEnd(), "ncclGroupEnd");
  }

 private:
  template <class T>
  void all_reduce(std::span<const T> in, std::span<T> out, ncclDataType_t type, const CudaStream& stream) {
    detail::expects_all_reduce(in.size(), out.size());
    bytes_sent_ += detail::all_reduce_sends(in.size(), static_cast<std::size_t>(rank_), ranks()) * sizeof(T);
    check(ncclAllReduce(in.data(), out.data(), in.size(), type, ncclAvg, communicator_, stream.handle()),
          "ncclAllReduce");
  }
  template <class T>
  void reduce_scatter(std::span<const T> in, std::span<T> out, ncclDataType_t type, const CudaStream& stream) {
    detail::expects_reduce_scatter(in.size(), out.size(), ranks());
    bytes_sent_ += others(out.size_bytes());
    check(ncclReduceScatter(in.data(), out.data(), out.size(), type, ncclAvg, communicator_, stream.handle()),
          "ncclReduceScatter");
  }

  static void check(ncclResult_t result, const std::string& call) {
    if (result != ncclSuccess) throw Error(call + ": " + ncclGetErrorString(result));
  }
  std::size_t ranks() const noexcept { return static_cast<std::size_t>(size_); }
  std::uint64_t others(std::size_t bytes) const noexcept { return std::uint64_t{bytes} * (ranks() - 1); }

  ncclComm_t communicator_;
  int rank_ = 0, size_ = 1;
  std::uint64_t bytes_sent_ = 0;
};
static_assert(UnevenCommunicator<NcclCommunicator, CudaStream>);
static_assert(AllToAllCommunicator<NcclCommunicator, CudaStream>);

}  // namespace scape::inline v0
