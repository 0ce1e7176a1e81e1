// Trains the same model from the same start with each optimizer, and compares loss, traffic and time.
#include "format.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "text.hpp"
#include "trainer.hpp"

#include <mpi.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace {

// MPI, where ranks are processes.
class Processes {
 public:
  explicit Processes(pretrain::Options& options) : runs_(options.communicator == pretrain::Ranks::mpi) {
    if (!runs_) {
      if (options.ranks == 0) options.ranks = 4;
      return;
    }
    int threads = 0, size = 1, rank = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &threads);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (options.ranks != 0 && options.ranks != size)
      fail("--ranks is " + std::to_string(options.ranks) + ", but mpirun has started " + std::to_string(size));
    options.ranks = size;
    is_first_ = rank == 0;
    if (!is_first_) options.quiet = true;
  }
  ~Processes() {
    if (runs_) MPI_Finalize();
  }

  bool is_first() const { return is_first_; }

  // Ends the program, and all processes with it.
  [[noreturn]] void fail(const std::string& reason) const {
    std::cerr << "pretrain: " << reason << std::endl;
    if (runs_) MPI_Abort(MPI_COMM_WORLD, 1);
    std::exit(1);
  }

 private:
  bool runs_, is_first_ = true;
};

}  // namespace

int main(int argc, char** argv) {
  pretrain::Options options = pretrain::parse_options(argc, argv);
  const Processes processes(options);
  try {
    const pretrain::Text text(options.text, options.shape.context + 1);
    if (!options.quiet)
      std::cout << pretrain::Model(options.shape, options.seed).parameters().size() << " parameters, " << options.ranks
                << " ranks, " << options.batch << " sequences of " << options.shape.context << " bytes each; text of "
                << pretrain::bytes_text(static_cast<double>(text.training().size())) << " and "
                << pretrain::bytes_text(static_cast<double>(text.validation().size())) << " held out" << std::endl;

    pretrain::Progress progress(options);
    std::vector<pretrain::Result> results;
    for (const pretrain::Run& run : options.runs) {
      progress.start(run);
      results.push_back(pretrain::train(options, run, text, progress));
      progress.finish();
    }
    if (!processes.is_first()) return 0;
    pretrain::print_table(results);
    pretrain::write_files(options, results);
  } catch (const std::exception& error) {
    processes.fail(error.what());
  }
}
