// What the terminal shows while a run trains.
#pragma once

#include "options.hpp"
#include "trainer.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace pretrain {

// One line that rewrites itself on a terminal; elsewhere a line for each validation.
class Progress {
 public:
  explicit Progress(const Options& options);

  void start(const Run& run);
  void step(std::size_t step, double loss, std::uint64_t bytes_sent);
  void validation(const CurvePoint& point);
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  void print_line();

  const Options& options_;
  const bool rewrites_;
  Clock::time_point start_, run_start_, printed_;
  std::size_t runs_ = 0, step_ = 0;  // started; done of the last
  double loss_ = 0, validation_loss_ = 0;
  std::uint64_t bytes_ = 0, step_bytes_ = 0;
};

}  // namespace pretrain
