#pragma once

#include "backends.hpp"

#include <scape/thread_communicator.hpp>

#include <cstddef>
#include <exception>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

// One rank on the host, of any communicator: what a trainer would have.
template <class C>
struct HostRank {
  using Stream = scape::HostStream;
  using Communicator = C;

  Communicator communicator;  // outlives the streams, whose work uses it
  HostBackend backend;
  scape::HostMemory& memory = backend.memory;
  Stream compute = backend.stream, side = backend.new_stream();

  template <class Group, class Which>
  HostRank(const Group& group, const Which& which, int threads) : communicator(group, which), backend(threads) {}
  int rank() const { return communicator.rank(); }

  // Keeps what is enqueued on a stream later from starting, until release().
  class Hold {
   public:
    explicit Hold(const Stream& stream) {
      stream.enqueue([latch = latch_] { latch->wait(); });
    }
    void release() { latch_->count_down(); }

   private:
    std::shared_ptr<std::latch> latch_ = std::make_shared<std::latch>(1);
  };
};

// One of a world of threads.
struct ThreadRank : HostRank<scape::ThreadCommunicator> {
  ThreadRank(const scape::ThreadGroup& group, int rank, int threads) : HostRank(group, rank, threads) {}

  // Calls body(rank) in `ranks` threads at once, each with its own streams and communicator; throws what was thrown
  // first. A rank that throws takes the others out of their collectives.
  template <class F>
  static void run(int ranks, F body, int threads = 1) {
    const scape::ThreadGroup group(ranks);
    std::mutex mutex;
    std::exception_ptr first;
    std::vector<std::thread> workers;
    for (int rank = 0; rank < ranks; ++rank)
      workers.emplace_back([&, rank] {
        ThreadRank self(group, rank, threads);
        try {
          body(self);
          self.compute.synchronize();
          self.side.synchronize();
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
          group.abort("rank " + std::to_string(rank) + " failed");
        }
      });
    for (std::thread& worker : workers) worker.join();
    if (first) std::rethrow_exception(first);
  }
};

#if defined(__CUDACC__)
#include "cuda_ranks.cuh"
#define SCAPE_RANKS NcclRank
#elif defined(SCAPE_TESTS_OVER_MPI)
#include "mpi_ranks.hpp"
#define SCAPE_RANKS MpiRank
#else
#define SCAPE_RANKS ThreadRank
#endif

template <class F>
void run_ranks(int ranks, F body, int threads = 1) {
  SCAPE_RANKS::run(ranks, body, threads);
}

/// What body(rank) threw as Exception, "" for nothing, by rank: of all ranks where they are threads, of its own where
/// they are processes. Streams that have failed too are no news.
template <class Rank, class Exception = scape::Error, class F>
std::map<int, std::string> thrown_by_ranks(int ranks, F body) {
  std::mutex mutex;
  std::map<int, std::string> texts;
  try {
    Rank::run(ranks, [&](Rank& rank) {
      std::string text;
      try {
        body(rank);
      } catch (const Exception& exception) {
        text = exception.what();
      }
      const std::lock_guard lock(mutex);
      texts[rank.rank()] = text;
    });
  } catch (const scape::Error&) {
  }
  return texts;
}
