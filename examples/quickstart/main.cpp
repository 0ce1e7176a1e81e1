// Four ranks fit one linear model, each to data of its own, and send 1% of their gradients.
#include <scape/scape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <thread>
#include <vector>

constexpr int ranks = 4, steps = 1000;
constexpr std::size_t size = 1000, batch = 16;

// What a trainer already has: parameters and gradients in flat buffers.
struct Model {
  std::vector<float> parameters = std::vector<float>(size), gradients = parameters, truth = parameters;
  std::mt19937 random;
  std::normal_distribution<float> normal;

  explicit Model(int rank) {
    for (float& value : truth) value = normal(random);          // the same on every rank
    random.seed(static_cast<std::mt19937::result_type>(rank));  // from here on each rank draws data of its own
  }

  // The mean squared error on a new batch, and its gradient.
  float forward_backward() {
    std::vector<float> input(size);
    float loss = 0;
    std::fill(gradients.begin(), gradients.end(), 0.0f);
    for (std::size_t sample = 0; sample < batch; ++sample) {
      float error = 0;
      for (float& value : input) value = normal(random);
      for (std::size_t i = 0; i < size; ++i) error += input[i] * (parameters[i] - truth[i]);
      for (std::size_t i = 0; i < size; ++i) gradients[i] += 2 * error * input[i] / batch;
      loss += error * error / batch;
    }
    return loss;
  }
};

struct Result {
  float loss_before, loss_after;
  std::uint64_t bytes_sent;
  std::vector<float> parameters;
};

void train(const scape::ThreadGroup& group, int rank, Result& result) {
  Model model(rank);
  scape::HostMemory memory;
  scape::HostPool threads(1);
  scape::HostStream compute(threads), side(threads);
  scape::ThreadCommunicator communicator(group, rank);

  const scape::FlatLayout layout(size, communicator.size());
  scape::AdamS optimizer(layout, communicator, memory, compute, side, {.density = 0.01, .density_warmup = steps / 10},
                         scape::ClockRule{});
  result.loss_before = model.forward_backward();
  for (int step = 0; step < steps; ++step) {
    model.forward_backward();  // the next mask travels meanwhile
    optimizer.set_learning_rate(0.01f * static_cast<float>(steps - step) / steps);
    optimizer.step(model.gradients, model.parameters, compute);
    compute.synchronize();  // since this model computes on the caller's thread; one that uses the stream need not wait
  }
  result.loss_after = model.forward_backward();
  result.bytes_sent = communicator.bytes_sent();
  result.parameters = model.parameters;
}

int main() {
  const scape::ThreadGroup group(ranks);
  std::vector<Result> results(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back(train, std::cref(group), rank, std::ref(results[static_cast<std::size_t>(rank)]));
  for (std::thread& thread : threads) thread.join();

  const auto& [before, after, sent, parameters] = results[0];
  const bool equal = std::all_of(results.begin(), results.end(),
                                 [&](const Result& result) { return result.parameters == results[0].parameters; });
  constexpr double dense = 2.0 * (ranks - 1) / ranks * size * sizeof(float) * steps;
  std::printf("loss        %.1f before, %.1f after\n", double{before}, double{after});
  std::printf("bytes sent  %.1f%% of dense, density warm-up included\n", 100 * static_cast<double>(sent) / dense);
  std::printf("replicas    %s\n", equal ? "equal" : "DIFFERENT");
  return equal && after < before / 100 ? 0 : 1;
}
