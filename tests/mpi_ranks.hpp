#pragma once

// Ranks that are processes, joined by MPI: the kind of rank that the test bodies run on in a program that mpirun
// starts. For ranks.hpp, which includes it.

#include "backends.hpp"

#include <scape/mpi/communicator.hpp>

#include <mpi.h>

#include <chrono>
#include <exception>
#include <map>

struct MpiRank : HostRank<scape::MpiCommunicator> {
  MpiRank(MPI_Comm group, const scape::MpiOptions& options, int threads) : HostRank(group, options, threads) {}

  static int world() {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
  }
  // The first `ranks` processes; for the others, nothing, and they need not call it. Kept, since making one costs more
  // than most tests.
  static MPI_Comm first(int ranks) {
    static std::map<int, MPI_Comm> groups;
    int me = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    if (me >= ranks || ranks > world()) return MPI_COMM_NULL;
    const auto [found, is_new] = groups.emplace(ranks, MPI_COMM_NULL);
    if (is_new) {
      int range[1][3] = {{0, ranks - 1, 1}};
      MPI_Group all, some;
      MPI_Comm_group(MPI_COMM_WORLD, &all);
      MPI_Group_range_incl(all, 1, range, &some);
      MPI_Comm_create_group(MPI_COMM_WORLD, some, ranks, &found->second);
      MPI_Group_free(&some);
      MPI_Group_free(&all);
    }
    return found->second;
  }

  // Calls body(rank) in the first `ranks` processes, if there are as many; throws what it threw, or that it threw in
  // another one. Payloads of a few kilobytes take several blocks.
  template <class F>
  static void run(int ranks, F body, int threads = 1) {
    const MPI_Comm group = first(ranks);
    if (group == MPI_COMM_NULL) return;
    std::exception_ptr error;
    {
      MpiRank self(group, {.patience = std::chrono::minutes(1), .staging_bytes = 4096}, threads);
      try {
        body(self);
        self.compute.synchronize();
        self.side.synchronize();
      } catch (...) {
        error = std::current_exception();
        self.communicator.abort("failed");
      }
    }
    int failed = error != nullptr;
    MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, group);
    if (error) std::rethrow_exception(error);
    if (failed) throw scape::Error("another rank failed");
  }
};
