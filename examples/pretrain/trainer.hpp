#pragma once

#include "optimizer.hpp"
#include "options.hpp"
#include "text.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pretrain {

class Progress;

// A run at one of its validations.
struct CurvePoint {
  std::size_t step = 0;
  double training_loss = 0;  // mean over the ranks and over the steps since the last point
  double validation_loss = 0;
  std::uint64_t bytes = 0;  // sent by a rank so far
  double seconds = 0;       // of training so far, without validations
};

// Bytes are those that the first rank's communicator counted. Means leave the skipped steps out.
struct Result {
  Run run;
  std::vector<CurvePoint> curve;
  StepTimes times;               // of a timed step, mean
  double step_seconds = 0;       // of the others, of all where all are timed
  std::uint64_t mask_bytes = 0;  // of the last timed step, so at the final density
  std::uint64_t payload_bytes = 0;
  std::uint64_t step_bytes = 0;   // of the last step
  double interface_bytes = 0;     // of a step, all ranks together, as the network interface counted them; mean
  std::uint64_t fingerprint = 0;  // of the parameters in the end

  double validation_loss() const { return curve.back().validation_loss; }
  double mean_step_bytes() const {  // over the run, density warm-up included
    return static_cast<double>(curve.back().bytes) / static_cast<double>(curve.back().step);
  }
};

// Trains a model on all ranks, or on this process's where they are processes: the first has the result. Throws if the
// ranks' parameters are not identical at the end.
Result train(const Options& options, const Run& run, const Text& text, Progress& progress);

}  // namespace pretrain
