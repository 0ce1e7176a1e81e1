// Trains the same model from the same start with each optimizer, and compares loss, traffic and time.
#include "format.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "text.hpp"
#include "trainer.hpp"

#include <exception>
#include <iostream>
#include <vector>

int main(int argc, char** argv) try {
  const pretrain::Options options = pretrain::parse_options(argc, argv);
  const pretrain::Text text(options.text, options.shape.context + 1);
  if (!options.quiet)
    std::cout << pretrain::Model(options.shape, options.seed).parameters().size() << " parameters, " << options.ranks
              << " ranks, " << options.batch << " sequences of " << options.shape.context << " bytes each; text of "
              << pretrain::bytes_text(static_cast<double>(text.training().size())) << " and "
              << pretrain::bytes_text(static_cast<double>(text.validation().size())) << " held out\n";

  pretrain::Progress progress(options);
  std::vector<pretrain::Result> results;
  for (const pretrain::Run& run : options.runs) {
    progress.start(run);
    results.push_back(pretrain::train(options, run, text, progress));
    progress.finish();
  }
  pretrain::print_table(results);
  pretrain::write_files(options, results);
} catch (const std::exception& error) {
  std::cerr << "pretrain: " << error.what() << '\n';
  return 1;
}
