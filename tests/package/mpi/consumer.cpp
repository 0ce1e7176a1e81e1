// The mean over the ranks of MPI_COMM_WORLD, of which there is one where no mpirun starts it.
#include <scape/mpi/communicator.hpp>
#include <scape/scape.hpp>

#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  int threads = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &threads);
  std::vector<float> values = {1, 2, 3};
  int rank = 0;
  {
    scape::HostPool pool(1);
    scape::MpiCommunicator communicator(MPI_COMM_WORLD);
    const scape::HostStream stream(pool);
    rank = communicator.rank();
    communicator.all_reduce_mean(values, values, stream);
    stream.synchronize();
  }
  MPI_Finalize();
  std::printf("rank %d: %g\n", rank, static_cast<double>(values[2]));
  return values == std::vector<float>{1, 2, 3} ? 0 : 1;
}
