#pragma once

#include "backends.hpp"

#include <scape/thread_communicator.hpp>

#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

// One rank of a world of threads: what a trainer would have.
struct ThreadRank {
  using Stream = scape::HostStream;
  using Communicator = scape::ThreadCommunicator;

  HostBackend backend;
  scape::HostMemory& memory = backend.memory;
  Stream compute = backend.stream, side = backend.new_stream();
  Communicator communicator;

  ThreadRank(const scape::ThreadGroup& group, int rank, int threads) : backend(threads), communicator(group, rank) {}
  int rank() const { return communicator.rank(); }
};

// Calls body(rank) in `ranks` threads at once, each with its own streams and communicator; throws what the first rank
// threw. A rank that throws takes the others out of their collectives.
template <class F>
void run_ranks(int ranks, F body, int threads = 1) {
  const scape::ThreadGroup group(ranks);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> workers;
  for (int rank = 0; rank < ranks; ++rank)
    workers.emplace_back([&, rank] {
      try {
        ThreadRank self(group, rank, threads);
        body(self);
        self.compute.synchronize();
        self.side.synchronize();
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
        group.abort("rank " + std::to_string(rank) + " failed");
      }
    });
  for (std::thread& worker : workers) worker.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}
