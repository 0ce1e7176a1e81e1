// A layout of one's own, as llm.c shards its state: the parameters lie tensor by tensor, a tensor holds all layers, and
// every layer of every tensor is cut into one slice a rank.
#include <scape/scape.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <thread>
#include <vector>

constexpr int ranks = 3, steps = 500;

// A parameter of the model: `layers` times `size` elements.
struct LayeredTensor {
  std::size_t layers, size;
  bool is_norm = false;
};

class LayerSlices {
 public:
  LayerSlices(const std::vector<LayeredTensor>& tensors, int ranks) : ranks_(ranks) {
    for (const LayeredTensor& tensor : tensors)
      for (std::size_t layer = 0; layer < tensor.layers; ++layer) cut(tensor);
  }

  // What makes it a layout: these three.
  std::size_t size() const { return size_; }
  int ranks() const { return ranks_; }
  const std::vector<scape::Segment>& segments() const { return segments_; }

 private:
  // Slices of equal length, so the last ranks get less, or nothing, where the size is not a multiple.
  void cut(const LayeredTensor& tensor) {
    const std::size_t ranks = static_cast<std::size_t>(ranks_), slice = (tensor.size + ranks - 1) / ranks;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const std::size_t begin = std::min(rank * slice, tensor.size), end = std::min(begin + slice, tensor.size);
      segments_.push_back({.begin = size_ + begin,
                           .count = end - begin,
                           .owner = static_cast<int>(rank),
                           .dense = tensor.is_norm,  // a few elements that matter: they all travel, always
                           .decay = !tensor.is_norm});
    }
    size_ += tensor.size;
  }

  std::size_t size_ = 0;
  int ranks_;
  std::vector<scape::Segment> segments_;
};
static_assert(scape::ShardedLayout<LayerSlices>);

// The same cut with what the library has: a bucket for every layer of every tensor.
scape::BucketLayout buckets(const std::vector<LayeredTensor>& tensors, int ranks) {
  std::vector<scape::Tensor> buckets;
  for (const LayeredTensor& tensor : tensors)
    buckets.insert(buckets.end(), tensor.layers, {tensor.size, tensor.is_norm, !tensor.is_norm});
  return scape::BucketLayout(buckets, ranks);
}

// Where the loss of a rank, half the squared distance to it, is smallest: every rank pulls elsewhere.
float target(int rank, std::size_t i) {
  const double x = static_cast<double>(i), r = static_cast<double>(rank);
  return static_cast<float>(std::sin(x) + 0.5 * std::cos((r + 1) * x));
}

template <scape::ShardedLayout L>
void train(const L& layout, const scape::ThreadGroup& group, int rank, std::vector<float>& parameters) {
  scape::HostMemory memory;
  scape::HostPool threads(1);
  scape::HostStream compute(threads), side(threads);
  scape::ThreadCommunicator communicator(group, rank);
  scape::AdamS optimizer(layout, communicator, memory, compute, side,
                         {.weight_decay = 0.01f, .density = 0.05, .density_warmup = steps / 10}, scape::ClockRule{});
  std::vector<float> gradients(parameters.size());
  for (int step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < gradients.size(); ++i) gradients[i] = parameters[i] - target(rank, i);
    optimizer.set_learning_rate(0.02f * static_cast<float>(steps - step) / steps);
    optimizer.step(gradients, parameters, compute);
    compute.synchronize();
  }
}

// The parameters of all ranks after training.
template <scape::ShardedLayout L>
std::vector<std::vector<float>> train_all(const L& layout) {
  const scape::ThreadGroup group(layout.ranks());
  std::vector<std::vector<float>> parameters(static_cast<std::size_t>(layout.ranks()),
                                             std::vector<float>(layout.size()));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < layout.ranks(); ++rank)
    threads.emplace_back(train<L>, std::cref(layout), std::cref(group), rank,
                         std::ref(parameters[static_cast<std::size_t>(rank)]));
  for (std::thread& thread : threads) thread.join();
  return parameters;
}

int main() {
  constexpr std::size_t layers = 4, width = 20, vocabulary = 101;
  const std::vector<LayeredTensor> tensors = {
      {1, vocabulary * width},      // embedding
      {layers, width, true},        // norm before attention
      {layers, 3 * width * width},  // queries, keys, values
      {layers, width * width},      // attention's output
      {layers, width, true},        // norm before the MLP
      {layers, 4 * width * width},  // MLP in
      {layers, 4 * width * width},  // MLP out
      {1, width, true},             // last norm
  };
  const LayerSlices layout(tensors, ranks);
  const auto mine = train_all(layout);
  const auto theirs = train_all(buckets(tensors, ranks));

  double distance = 0, at_start = 0;  // to the mean of the ranks' targets
  for (std::size_t i = 0; i < layout.size(); ++i) {
    double mean = 0;
    for (int rank = 0; rank < ranks; ++rank) mean += static_cast<double>(target(rank, i)) / ranks;
    distance += std::pow(static_cast<double>(mine[0][i]) - mean, 2);
    at_start += std::pow(mean, 2);
  }
  const bool same = mine == theirs;
  const bool equal = std::all_of(mine.begin(), mine.end(), [&](const auto& replica) { return replica == mine[0]; });
  std::printf("layout                %zu parameters in %zu segments, busiest rank %.3f of the mean\n", layout.size(),
              layout.segments().size(), scape::imbalance(layout));
  std::printf("distance              %.2f before, %.2f after\n", std::sqrt(at_start), std::sqrt(distance));
  std::printf("replicas              %s\n", equal ? "equal" : "DIFFERENT");
  std::printf("own and BucketLayout  %s\n", same ? "the same parameters" : "DIFFERENT parameters");
  return same && equal && distance < at_start / 100 ? 0 : 1;
}
