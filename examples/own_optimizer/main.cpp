// An optimizer of one's own from the parts of scape: momentum SGD that sends the largest elements of residual plus
// gradient, and keeps the rest for later (error feedback).
#include <scape/scape.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <span>
#include <thread>
#include <vector>

// The update of one element. Functors are at namespace scope, where a kernel could take them too.
struct MomentumUpdate {
  const float* mean;
  float *moment, *parameters;
  float learning_rate;
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const {
    moment[i] = 0.9f * moment[i] + mean[i];
    parameters[i] -= learning_rate * moment[i];
  }
};

class TopKMomentum {
 public:
  using Stream = scape::HostStream;
  using Memory = scape::HostMemory;

  template <scape::ShardedLayout L>
  TopKMomentum(const L& layout, double density, scape::ThreadCommunicator& communicator, Memory& memory,
               const Stream& compute, const Stream& side)
      : communicator_(communicator),
        compute_(compute),
        side_(side),
        plan_(layout),
        tables_(plan_, memory, compute),
        masker_(plan_, tables_.view(), communicator.rank()),
        masks_(plan_, tables_.view(), communicator.rank(), {.density = scape::DensitySchedule(density)}, memory,
               compute),
        residual_(plan_.size(), memory, compute),
        reducer_(plan_.kept(density), memory),
        mean_(plan_.size(), memory),
        moment_(plan_.size(), memory),
        scratch_(masker_.workspace_bytes(compute), memory) {
    scape::fill_values(scratch_.span(), std::byte{0}, compute);  // a device's selection remembers thresholds in it
    scape::fill_values(moment_.span(), 0.0f, compute);
  }
  TopKMomentum(const TopKMomentum&) = delete;

  // The work in flight uses what is destroyed next.
  ~TopKMomentum() {
    side_.synchronize();
    compute_.synchronize();
  }

  // Enqueues one step. Gradients and parameters must stay until compute has passed it.
  void step(std::span<const float> gradients, std::span<float> parameters, float learning_rate) {
    residual_.add(gradients, compute_);  // what was never sent, and what is new
    if (masks_.draft_first()) draft();   // the very first step: no step before it has made a mask
    masks_.advance(compute_);            // compute goes on when this step's mask has arrived
    const scape::MaskView mask = masks_.current();
    reducer_.gather(residual_.values(), mask, compute_);
    reducer_.reduce(mask, communicator_, compute_, side_);
    residual_.release(mask, compute_);  // while the payload travels: what was sent is no residual any more,
    if (masks_.draft_next()) draft();   // and the next mask is made of the others
    scape::fill_values(mean_.span(), 0.0f, compute_);
    reducer_.wait(compute_);  // from here on the payload is the mean over the ranks
    reducer_.scatter(mask, mean_.span(), compute_);
    const MomentumUpdate update{mean_.span().data(), moment_.span().data(), parameters.data(), learning_rate};
    scape::for_each(parameters.size(), update, compute_);
    masks_.finish();
  }

  // Where the last step's mask has its bits: where no segment needs padding, the indices of parameters.
  std::vector<std::size_t> kept_bits(Memory& memory) const {
    const scape::MaskView mask = masks_.current();
    std::vector<std::size_t> bits(mask.kept);
    const scape::Buffer<std::byte, Memory> scratch(scape::BitPacker::indices_workspace_bytes(mask.words.size()),
                                                   memory);
    scape::BitPacker::indices(mask.words, bits, scratch.span(), compute_);
    compute_.synchronize();
    return bits;
  }

 private:
  // This rank selects in the segments that it owns; the others' parts arrive in the background.
  void draft() {
    masker_.select(residual_.values(), masks_.draft_density(), masks_.draft(compute_), scratch_.span(), compute_);
    masks_.publish(communicator_, compute_, side_);
  }

  scape::ThreadCommunicator& communicator_;
  Stream compute_, side_;
  scape::MaskPlan plan_;              // where everything lies: masks, payload, parts of the ranks
  scape::PlanTables<Memory> tables_;  // the same where the stream's work can read it
  scape::TopKMasker masker_;
  scape::DelayedMaskScheduler<Stream, Memory> masks_;
  scape::ResidualStore<Memory> residual_;
  scape::SparseBufferReducer<Stream, Memory> reducer_;
  scape::Buffer<float, Memory> mean_, moment_;
  scape::Buffer<std::byte, Memory> scratch_;
};

constexpr int ranks = 4, steps = 500;
constexpr std::size_t size = 1024, samples = 200;

// Logistic regression on data of this rank.
class Model {
 public:
  std::vector<float> parameters = std::vector<float>(size), gradients = parameters;

  explicit Model(int rank) : inputs_(samples * size), labels_(samples) {
    std::mt19937 random;
    std::normal_distribution<float> normal;
    std::vector<float> truth(size);  // the same on every rank
    for (float& value : truth) value = normal(random);
    random.seed(static_cast<std::mt19937::result_type>(rank));
    for (float& value : inputs_) value = normal(random);
    for (std::size_t i = 0; i < samples; ++i) labels_[i] = dot(i, truth) > 0 ? 1.0f : -1.0f;
  }

  // The mean loss, and its gradient.
  float forward_backward() {
    float loss = 0;
    std::fill(gradients.begin(), gradients.end(), 0.0f);
    for (std::size_t i = 0; i < samples; ++i) {
      const float margin = labels_[i] * dot(i, parameters);
      const float slope = -labels_[i] / (1 + std::exp(margin)) / samples;
      for (std::size_t j = 0; j < size; ++j) gradients[j] += slope * inputs_[i * size + j];
      loss += std::log1p(std::exp(-margin)) / samples;
    }
    return loss;
  }

 private:
  float dot(std::size_t i, const std::vector<float>& weights) const {
    float sum = 0;
    for (std::size_t j = 0; j < size; ++j) sum += inputs_[i * size + j] * weights[j];
    return sum;
  }

  std::vector<float> inputs_, labels_;
};

struct Result {
  float loss_before, loss_after;
  std::uint64_t bytes_sent;
  std::vector<std::size_t> kept;
  std::vector<float> parameters;
};

void train(const scape::ThreadGroup& group, int rank, Result& result) {
  Model model(rank);
  scape::HostMemory memory;
  scape::HostPool threads(1);
  scape::HostStream compute(threads), side(threads);
  scape::ThreadCommunicator communicator(group, rank);
  const scape::FlatLayout layout(size, communicator.size());
  TopKMomentum optimizer(layout, 0.01, communicator, memory, compute, side);

  result.loss_before = model.forward_backward();
  for (int step = 0; step < steps; ++step) {
    model.forward_backward();
    optimizer.step(model.gradients, model.parameters, 0.3f);
    compute.synchronize();  // the model computes in this thread
  }
  result.loss_after = model.forward_backward();
  result.bytes_sent = communicator.bytes_sent();
  result.kept = optimizer.kept_bits(memory);
  result.parameters = model.parameters;
}

int main() {
  const scape::ThreadGroup group(ranks);
  std::vector<Result> results(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back(train, std::cref(group), rank, std::ref(results[static_cast<std::size_t>(rank)]));
  for (std::thread& thread : threads) thread.join();

  const Result& first = results[0];
  const bool equal = std::all_of(results.begin(), results.end(), [&](const Result& result) {
    return result.parameters == first.parameters && result.kept == first.kept;
  });
  constexpr double dense = 2.0 * (ranks - 1) / ranks * size * sizeof(float) * steps;
  std::printf("loss        %.4f before, %.4f after\n", double{first.loss_before}, double{first.loss_after});
  std::printf("bytes sent  %.1f%% of dense\n", 100 * static_cast<double>(first.bytes_sent) / dense);
  std::printf("last mask  ");
  for (const std::size_t bit : first.kept) std::printf(" %zu", bit);
  std::printf("\nreplicas    %s\n", equal ? "equal" : "DIFFERENT");
  return equal && first.loss_after < first.loss_before / 10 ? 0 : 1;
}
