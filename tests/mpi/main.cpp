// main() of the tests that mpirun starts: every process runs all of them, in step.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <scape/mpi/communicator.hpp>  // with mpi.h

int main(int argc, char** argv) {
  int threads = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &threads);
  const int result = doctest::Context(argc, argv).run();
  MPI_Finalize();
  return result;
}
