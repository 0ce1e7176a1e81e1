#pragma once

// Ranks on devices, each with a thread of its own, joined by NCCL: the kind of rank that the test bodies run on when
// they are compiled as CUDA C++.

#include "backends.hpp"

#include <scape/nccl/communicator.hpp>

#include <nccl.h>

#include <exception>
#include <string>
#include <thread>
#include <vector>

// Whether NCCL adds up in the order of the ranks, and divides the sum: cudasim does; devices have their own order.
inline bool in_rank_order() {
  cudaDeviceProp properties;
  scape::check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return std::string(properties.name).starts_with("cudasim");
}

struct NcclRank {
  using Stream = scape::CudaStream;
  using Communicator = scape::NcclCommunicator;

  CudaBackend backend;
  scape::CudaMemory& memory = backend.memory;
  Stream compute = backend.stream, side = backend.new_stream();
  Communicator communicator;

  explicit NcclRank(ncclComm_t handle) : communicator(handle) {}
  int rank() const { return communicator.rank(); }

  // Nothing: how late a device does its work is not the test's to say. cudasim's schedule `lazy` holds back all it can.
  struct Hold {
    explicit Hold(const Stream&) {}
    void release() {}
  };

  // Calls body(rank) in `ranks` threads at once, each on a device of its own; throws what the first rank threw.
  template <class F>
  static void run(int ranks, F body, int = 1) {
    int devices = 0;
    scape::check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    if (devices < ranks) throw scape::Error("this test needs " + std::to_string(ranks) + " devices");
    ncclUniqueId id;
    if (ncclGetUniqueId(&id) != ncclSuccess) throw scape::Error("ncclGetUniqueId");
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
    std::vector<std::thread> workers;
    for (int rank = 0; rank < ranks; ++rank)
      workers.emplace_back([&, rank] {
        ncclComm_t handle = nullptr;
        try {
          scape::check(cudaSetDevice(rank), "cudaSetDevice");
          if (ncclCommInitRank(&handle, ranks, id, rank) != ncclSuccess) throw scape::Error("ncclCommInitRank");
          NcclRank self(handle);
          body(self);
          self.compute.synchronize();
          self.side.synchronize();
          self.communicator.check();
        } catch (...) {
          errors[static_cast<std::size_t>(rank)] = std::current_exception();
        }
        if (handle != nullptr) ncclCommDestroy(handle);
      });
    for (std::thread& worker : workers) worker.join();
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
  }
};
