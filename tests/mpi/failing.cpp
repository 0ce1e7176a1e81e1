// A training that one rank ends in a way of its own: what the others are told, the test expects on their output.
//
//   failing kill | exit | throw | stop | uninitialised | single | serialized

#include <scape/mpi/communicator.hpp>
#include <scape/scape.hpp>

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;

// Rank 1 fails in step 20; a step is a handful of collectives.
void train(const std::string& how) {
  const std::vector<float> gradients(100'000, 1);
  std::vector<float> parameters(100'000);
  scape::HostMemory memory;
  scape::HostPool pool(1);
  const auto patience = how == "stop" || how == "exit" ? 2'000ms : 60'000ms;
  scape::MpiCommunicator communicator(MPI_COMM_WORLD, {.patience = patience});
  scape::HostStream compute(pool), side(pool);
  scape::AdamS optimizer(scape::FlatLayout(100'000, communicator.size()), communicator, memory, compute, side,
                         {.density = 0.1});
  for (int step = 0; step < 40; ++step) {
    if (communicator.rank() == 1 && step == 20) {
      if (how == "kill") kill(getpid(), SIGKILL);
      if (how == "exit") _exit(0);
      if (how == "throw") throw std::runtime_error("out of data");
      if (how == "stop") std::this_thread::sleep_for(1h);
    }
    optimizer.step(gradients, parameters, compute);
    if (step % 5 == 0) compute.synchronize();  // else the steps run ahead, so that the end comes amid collectives
  }
  compute.synchronize();
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string how = argv[1];
  if (how != "uninitialised") {
    int threads = 0;
    const int level = how == "single"       ? MPI_THREAD_SINGLE
                      : how == "serialized" ? MPI_THREAD_SERIALIZED
                                            : MPI_THREAD_MULTIPLE;
    MPI_Init_thread(&argc, &argv, level, &threads);
  }
  train(how);
  MPI_Finalize();
  std::puts("trained");
} catch (const std::exception& error) {
  std::printf("failed: %s\n", error.what());
  std::fflush(stdout);
  std::this_thread::sleep_for(2s);  // mpirun ends all when the first is gone: let them have their say
  std::_Exit(1);
}
