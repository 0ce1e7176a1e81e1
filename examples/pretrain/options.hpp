#pragma once

#include "model.hpp"

#include <scape/delayed_mask_scheduler.hpp>
#include <scape/payload_format.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace pretrain {

enum class Method { adamw, adams, scape, clock };
enum class Ranks { threads, mpi };

// One training run: what the table has a row for.
struct Run {
  Method method = Method::adamw;
  double sparsity = 0;
  double learning_rate = 0;

  std::string optimizer() const;  // "clock"
  std::string label() const;      // "clock-99%"
};

struct Options {
  ModelShape shape;
  Ranks communicator = Ranks::threads;
  int ranks = 0;          // 0: four threads, or all processes
  std::size_t batch = 4;  // sequences per rank and step
  std::size_t steps = 1000;
  std::vector<Run> runs;

  std::size_t lr_warmup = 50;
  double lr_final = 0.1;  // of the peak: the end of the cosine
  double weight_decay = 0.1;
  double clip_norm = 0;  // 0: none
  double beta1 = 0.9, beta2 = 0.95;

  std::size_t density_warmup = 300;
  int delay = 1;
  double cap = 64;
  bool select_per_shard = false;
  bool sharded = false;  // masters; parameters are bfloat16 then
  bool overlap = false;  // with backward
  std::size_t buckets = 8;
  bool score_after_update = false;
  scape::MaskCoding mask_coding = scape::MaskCoding::automatic;
  scape::PayloadFormat payload = scape::PayloadFormat::float32;
  std::filesystem::path offload;  // folder for residuals; empty: in memory

  std::uint64_t seed = 1;
  std::filesystem::path text;
  std::filesystem::path output = "runs/pretrain";
  std::size_t eval_every = 100;
  std::size_t eval_windows = 1024;
  double rate = 100;  // Mbit/s
  bool quiet = false;
  std::size_t skip_steps = 0;    // that times and bytes of a step leave out
  std::size_t report_every = 1;  // steps between those that tell their phases, which costs a little
  std::string interface;         // of the network, whose bytes are counted too
};

// Ends the program after --help and, with a message that names the option, after a bad value.
Options parse_options(int argc, char** argv);

}  // namespace pretrain
