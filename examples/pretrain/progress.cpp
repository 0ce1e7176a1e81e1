#include "progress.hpp"

#include "format.hpp"

#include <unistd.h>

#include <cstdio>
#include <string>

namespace pretrain {

Progress::Progress(const Options& options)
    : options_(options), rewrites_(isatty(STDOUT_FILENO) != 0), start_(Clock::now()) {}

void Progress::start(const Run& run) {
  ++runs_;
  run_start_ = printed_ = Clock::now();
  step_ = 0;
  bytes_ = step_bytes_ = 0;
  validation_loss_ = 0;
  if (options_.quiet) return;
  std::printf("[%zu/%zu] %s, learning rate %g\n", runs_, options_.runs.size(), run.label().c_str(), run.learning_rate);
  std::fflush(stdout);
}

void Progress::step(std::size_t step, double loss, std::uint64_t bytes_sent) {
  step_ = step;
  loss_ = loss;
  step_bytes_ = bytes_sent - bytes_;
  bytes_ = bytes_sent;
  if (!rewrites_ || Clock::now() - printed_ < std::chrono::milliseconds(200)) return;
  print_line();
}

void Progress::validation(const CurvePoint& point) {
  validation_loss_ = point.validation_loss;
  print_line();
}

void Progress::print_line() {
  if (options_.quiet) return;
  printed_ = Clock::now();
  const auto seconds = [&](Clock::time_point since) { return std::chrono::duration<double>(printed_ - since).count(); };
  const auto tokens = static_cast<double>(step_ * options_.batch * options_.shape.context) * options_.ranks;
  const auto done = static_cast<double>((runs_ - 1) * options_.steps + step_);
  const auto left = static_cast<double>(options_.runs.size() * options_.steps) - done;
  const std::string validation = validation_loss_ == 0 ? "-" : fixed(validation_loss_, 4);
  std::printf("%s  step %5zu/%zu  loss %.4f  validation %-6s  %6.0f tokens/s  %9s/step  %s left%s",
              rewrites_ ? "\r" : "", step_, options_.steps, loss_, validation.c_str(), tokens / seconds(run_start_),
              bytes_text(static_cast<double>(step_bytes_)).c_str(),
              duration_text(left * seconds(start_) / done).c_str(), rewrites_ ? "\033[K" : "\n");
  std::fflush(stdout);
}

void Progress::finish() {
  if (!options_.quiet && rewrites_) std::printf("\n");
}

}  // namespace pretrain
