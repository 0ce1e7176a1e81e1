// The program of every consumer in this folder: two ranks train a little.
#include <scape/scape.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

static_assert(__cplusplus >= 202002L, "scape::scape asks for C++20");

static void train(const scape::ThreadGroup& group, int rank, std::vector<float>& parameters) {
  scape::HostMemory memory;
  scape::HostPool pool(1);
  scape::HostStream compute(pool), side(pool);
  scape::ThreadCommunicator communicator(group, rank);
  const scape::FlatLayout layout(parameters.size(), communicator.size());
  scape::AdamS optimizer(layout, communicator, memory, compute, side, {.learning_rate = 0.003f, .density = 0.1},
                         scape::ClockRule{});
  std::vector<float> gradients(parameters.size());
  for (int step = 0; step < 2000; ++step) {
    for (std::size_t i = 0; i < parameters.size(); ++i) gradients[i] = parameters[i] - static_cast<float>(rank);
    optimizer.step(gradients, parameters, compute);
    compute.synchronize();
  }
}

int main() {
  const scape::ThreadGroup group(2);
  std::vector<float> first(1000, 2.0f), second = first;
  std::thread rank0([&] { train(group, 0, first); }), rank1([&] { train(group, 1, second); });
  rank0.join();
  rank1.join();
  float error = 0;  // the ranks' optima are 0 and 1
  for (const float value : first) error = std::max(error, std::abs(value - 0.5f));
  std::printf("scape %d.%d.%d: replicas %s, off by %g\n", SCAPE_VERSION_MAJOR, SCAPE_VERSION_MINOR, SCAPE_VERSION_PATCH,
              first == second ? "equal" : "DIFFERENT", static_cast<double>(error));
  return first == second && error < 0.1f ? 0 : 1;
}
