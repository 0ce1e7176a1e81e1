// How dense a payload becomes where every rank picks its own top-k and all send the union, as plain sparsification
// does, beside owners that pick for all: fill_in TEXT. Trains the model of examples/pretrain by SGD with error
// feedback, each rank on data of its own, and prints the last step's densities, tab-separated.
#include "model.hpp"
#include "text.hpp"

#include <scape/scape.hpp>

#include <bit>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <random>
#include <span>
#include <vector>

namespace {

using Mask = std::vector<scape::MaskWord>;

std::size_t count(const Mask& mask) {
  std::size_t sum = 0;
  for (const scape::MaskWord word : mask) sum += static_cast<std::size_t>(std::popcount(word));
  return sum;
}

// Every rank's residuals, from which it picks.
class Ranks {
 public:
  Ranks(std::size_t ranks, std::size_t size) : residuals_(ranks, std::vector<float>(size)) {}

  std::vector<float>& of(std::size_t rank) { return residuals_[rank]; }

  // The top-k of each rank's residual, tensor by tensor, in one mask.
  Mask pick_union(const scape::TensorLayout& layout, double density) {
    Mask all;
    for (const std::vector<float>& residual : residuals_) {
      const Mask own = pick(layout, 0, residual, density);
      if (all.empty()) all.resize(own.size());
      for (std::size_t i = 0; i < own.size(); ++i) all[i] |= own[i];
    }
    return all;
  }

  // Sends what the mask keeps: the mean of it moves the parameters.
  void send(const Mask& mask, std::span<float> parameters, float learning_rate) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if ((mask[i / 32] >> i % 32 & 1) == 0) continue;
      float sum = 0;
      for (std::vector<float>& residual : residuals_) {
        sum += residual[i];
        residual[i] = 0;
      }
      parameters[i] -= learning_rate * sum / static_cast<float>(residuals_.size());
    }
  }

 private:
  // In parameter space: masks of plans have words of their own.
  Mask pick(const scape::TensorLayout& layout, int rank, std::span<const float> values, double density) {
    const scape::MaskPlan plan(layout);
    const scape::TopKMasker masker(plan, rank);
    Mask words(plan.words()), mask((layout.size() + 31) / 32);
    std::vector<std::byte> workspace(masker.workspace_bytes(stream_));
    masker.select(values, density, words, workspace, stream_);
    stream_.synchronize();
    for (const scape::Tile& tile : plan.tiles())
      for (std::size_t i = 0; i < tile.count; ++i)
        if (words[(tile.bit + i) / 32] >> (tile.bit + i) % 32 & 1)
          mask[(tile.element + i) / 32] |= scape::MaskWord{1} << (tile.element + i) % 32;
    return mask;
  }

  std::vector<std::vector<float>> residuals_;
  scape::HostPool pool_;
  scape::HostStream stream_{pool_};
};

double measure(const pretrain::Text& text, std::size_t ranks, double density, std::size_t steps) {
  pretrain::Model model({}, 1);
  std::vector<scape::Tensor> tensors;
  for (const pretrain::ModelTensor& tensor : model.tensors()) tensors.push_back({.size = tensor.size});
  const scape::TensorLayout layout(tensors, 1);
  Ranks all(ranks, layout.size());
  std::vector<std::mt19937_64> random;
  for (std::size_t rank = 0; rank < ranks; ++rank) random.emplace_back(rank + 1);
  std::size_t kept = 0;
  for (std::size_t step = 0; step < steps; ++step) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      model.forward_backward(text.sample(4, random[rank]));
      for (std::size_t i = 0; i < layout.size(); ++i) all.of(rank)[i] += model.gradients()[i];
    }
    const Mask mask = all.pick_union(layout, density);
    all.send(mask, model.parameters(), 0.1f);
    kept = count(mask);
  }
  return static_cast<double>(kept) / static_cast<double>(layout.size());
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::fprintf(stderr, "usage: fill_in TEXT\n");
    return 2;
  }
  pretrain::use_one_thread_per_rank();
  const pretrain::Text text(argv[1], pretrain::ModelShape{}.context + 1);
  std::printf("ranks\tk / n\tunion of the ranks' own\ttimes k / n\tpartitioned\n");
  for (const double density : {0.1, 0.01})
    for (const std::size_t ranks : {2, 4, 8, 16}) {
      const double found = measure(text, ranks, density, 20);
      std::printf("%zu\t%g\t%.4f\t%.2f\t%g\n", ranks, density, found, found / density, density);
      std::fflush(stdout);
    }
} catch (const std::exception& error) {
  std::fprintf(stderr, "fill_in: %s\n", error.what());
  return 1;
}
