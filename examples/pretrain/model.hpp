// A Llama-style decoder over bytes: RMSNorm, rotary embedding, SwiGLU, no biases. LibTorch stays behind this header,
// because its own headers take long to compile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace pretrain {

struct ModelShape {
  std::size_t width = 112;
  std::size_t layers = 3;
  std::size_t heads = 4;
  std::size_t context = 64;
};

// One tensor of the model. Tensors lie one after the other in the flat buffers, in the order of `Model::tensors()`.
struct ModelTensor {
  std::size_t size = 0;
  bool is_norm = false;  // norm weights stay dense and do not decay
};

// Owns two flat buffers, parameters and gradients; every tensor of the network is a view of them.
class Model {
 public:
  // The same shape and seed give the same parameters, bit for bit.
  Model(const ModelShape& shape, std::uint64_t seed);
  ~Model();

  const std::vector<ModelTensor>& tensors() const;
  std::span<float> parameters();
  std::span<const float> gradients() const;

  // Windows are `context + 1` bytes each, one after the other: all but the last byte are read, all but the first are
  // predicted. Returns the mean loss in nats per byte, and overwrites the gradients with those of that mean. Backward
  // calls ready(i) as soon as the gradient of the i-th tensor is in place, the last tensors first.
  float forward_backward(std::span<const std::uint8_t> windows, std::function<void(std::size_t)> ready = {});

  // The mean loss alone.
  float loss(std::span<const std::uint8_t> windows) const;

 private:
  struct Network;
  std::unique_ptr<Network> network_;
};

// LibTorch and its BLAS compute on the calling thread alone from here on: parallelism comes from the ranks.
void use_one_thread_per_rank();

}  // namespace pretrain
