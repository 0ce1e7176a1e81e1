#pragma once

#include "model.hpp"
#include "options.hpp"

#include <scape/scape.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace pretrain {

// What a rank gives the library: streams, each a queue of work with a thread of its own, memory, a communicator.
template <class Communicator>
struct RankContext {
  template <class... Arguments>
  explicit RankContext(Arguments&&... arguments) : communicator(std::forward<Arguments>(arguments)...) {}

  Communicator communicator;
  scape::HostMemory memory;
  scape::HostPool pool{1};
  scape::HostStream compute{pool}, side{pool};
};

// Where the time of a step goes, in seconds.
struct StepTimes {
  double compute = 0, accumulate = 0, select = 0, wait = 0, payload = 0, update = 0;
};

struct Phase {
  const char* name;
  double StepTimes::*seconds;
};
inline constexpr std::array phases = {
    Phase{"compute", &StepTimes::compute},  // forward and backward
    Phase{"accumulate", &StepTimes::accumulate}, Phase{"select", &StepTimes::select},
    Phase{"mask wait", &StepTimes::wait},        Phase{"payload", &StepTimes::payload},
    Phase{"update", &StepTimes::update},
};

struct StepFigures {
  bool timed = true;  // whether the phases are told
  StepTimes times;
  std::uint64_t mask_bytes = 0;  // sent by this rank
  std::uint64_t payload_bytes = 0;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // Averages the gradients over the ranks, in the optimizer's own way, and updates the parameters.
  // Phases are told where `timed`.
  virtual StepFigures step(std::span<const float> gradients, std::span<float> parameters, double learning_rate,
                           bool timed) = 0;
};

// Communicator: scape's ThreadCommunicator or MpiCommunicator.
template <class Communicator>
std::unique_ptr<Optimizer> make_optimizer(const Options& options, const Run& run,
                                          const std::vector<ModelTensor>& tensors, RankContext<Communicator>& context);

}  // namespace pretrain
