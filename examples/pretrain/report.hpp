#pragma once

#include "options.hpp"
#include "trainer.hpp"

#include <vector>

namespace pretrain {

void print_table(const std::vector<Result>& results);

// table.csv, table.json, curves.csv and, where gnuplot is installed, loss.png and loss.svg, in the output folder.
void write_files(const Options& options, const std::vector<Result>& results);

}  // namespace pretrain
