#include "model.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <limits>
#include <utility>

extern "C" void openblas_set_num_threads(int) __attribute__((weak));  // null where the BLAS is another one

namespace pretrain {
namespace {

using at::Tensor;

constexpr std::int64_t vocabulary = 256;  // bytes

struct Layer {
  Tensor attention_norm, query_key_value, attention_out;
  Tensor mlp_norm, gate_up, down;
};

Tensor rms_norm(const Tensor& x, const Tensor& weight) {
  const Tensor mean_square = x.square().mean(-1, /*keepdim=*/true);
  return x * (mean_square + 1e-5).rsqrt() * weight;
}

Tensor swiglu(const Tensor& gate_up) {
  const auto halves = gate_up.chunk(2, -1);
  return at::silu(halves[0]) * halves[1];
}

// Entry [t, 0, 0, j] is exp(i t theta_j): what turns the j-th pair of a head's coordinates at position t.
Tensor rotations(std::int64_t context, std::int64_t head_width) {
  const Tensor frequency = at::pow(10'000.0, -at::arange(0, head_width, 2, at::kFloat) / head_width);
  const Tensor angle = at::outer(at::arange(context, at::kFloat), frequency);
  return at::polar(at::ones_like(angle), angle).view({context, 1, 1, head_width / 2});
}

// Added to the attention scores: no position sees a later one.
Tensor causal_mask(std::int64_t context) {
  return at::full({1, context, context}, -std::numeric_limits<float>::infinity()).triu(1);
}

}  // namespace

struct Model::Network {
  std::int64_t width, heads, context;
  std::vector<ModelTensor> tensors;
  Tensor parameters, gradients;  // flat
  Tensor embedding, final_norm, unembedding;
  std::vector<Layer> layers;
  Tensor rotation, mask;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators;  // of gradients, by tensor
  std::function<void(std::size_t)> ready;

  Network(const ModelShape& shape, std::uint64_t seed);
  Tensor attention(const Layer& layer, const Tensor& x) const;
  Tensor logits(const Tensor& bytes) const;
  Tensor loss(std::span<const std::uint8_t> windows) const;
};

Model::Network::Network(const ModelShape& shape, std::uint64_t seed)
    : width(static_cast<std::int64_t>(shape.width)),
      heads(static_cast<std::int64_t>(shape.heads)),
      context(static_cast<std::int64_t>(shape.context)),
      layers(shape.layers),
      rotation(rotations(context, width / heads)),
      mask(causal_mask(context)) {
  // First the list of tensors, then the flat buffers, then each tensor as a view of them.
  struct Slot {
    Tensor* tensor;
    std::vector<std::int64_t> shape;
    double deviation;  // of the normal distribution it starts from; 0: starts as ones
  };
  std::vector<Slot> slots;
  const auto add = [&](Tensor& tensor, std::vector<std::int64_t> dims, double deviation) {
    tensors.push_back({static_cast<std::size_t>(c10::multiply_integers(dims)), deviation == 0});
    slots.push_back({&tensor, std::move(dims), deviation});
  };
  const std::int64_t hidden = (width * 8 / 3 + 15) / 16 * 16;
  const double into = 1 / std::sqrt(static_cast<double>(width));               // keeps the scale of its input
  const double out = into / std::sqrt(2 * static_cast<double>(shape.layers));  // sums up in the residual stream
  add(embedding, {vocabulary, width}, 1);
  for (Layer& layer : layers) {
    add(layer.attention_norm, {width}, 0);
    add(layer.query_key_value, {3 * width, width}, into);
    add(layer.attention_out, {width, width}, out);
    add(layer.mlp_norm, {width}, 0);
    add(layer.gate_up, {2 * hidden, width}, into);
    add(layer.down, {width, hidden}, out * std::sqrt(static_cast<double>(width) / static_cast<double>(hidden)));
  }
  add(final_norm, {width}, 0);
  add(unembedding, {vocabulary, width}, into);

  std::int64_t size = 0;
  for (const ModelTensor& tensor : tensors) size += static_cast<std::int64_t>(tensor.size);
  parameters = at::empty({size});
  gradients = at::zeros({size});
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::int64_t begin = 0;
  for (const Slot& slot : slots) {
    const std::int64_t count = c10::multiply_integers(slot.shape);
    const Tensor values = parameters.narrow(0, begin, count);
    if (slot.deviation == 0)
      values.fill_(1);
    else
      values.normal_(0, slot.deviation, generator);
    *slot.tensor = values.view(slot.shape).detach().requires_grad_();
    slot.tensor->mutable_grad() = gradients.narrow(0, begin, count).view(slot.shape);
    accumulators.push_back(torch::autograd::impl::grad_accumulator(*slot.tensor));
    using Tensors = std::vector<Tensor>;
    const auto tell = [this, i = accumulators.size() - 1](const Tensors& outputs, const Tensors&) -> Tensors {
      if (ready) ready(i);
      return outputs;
    };
    accumulators.back()->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(tell));
    begin += count;
  }
}

Tensor Model::Network::attention(const Layer& layer, const Tensor& x) const {
  const std::int64_t sequences = x.size(0) / context, head_width = width / heads;
  const Tensor projected = at::linear(x, layer.query_key_value).view({sequences, context, 3, heads, head_width});
  const auto by_head = [&](const Tensor& t) {  // [sequence, position, head, .] to [sequence * head, position, .]
    return t.transpose(1, 2).reshape({sequences * heads, context, head_width});
  };
  const Tensor pairs = projected.narrow(2, 0, 2).unflatten(-1, {head_width / 2, 2});
  const Tensor rotated = at::view_as_real(at::view_as_complex(pairs) * rotation).flatten(-2);
  const Tensor query = by_head(rotated.select(2, 0)), key = by_head(rotated.select(2, 1));
  const Tensor value = by_head(projected.select(2, 2));
  const double scale = 1 / std::sqrt(static_cast<double>(head_width));
  const Tensor weights = at::softmax(at::baddbmm(mask, query, key.transpose(1, 2), /*beta=*/1, scale), -1);
  const Tensor mixed = at::bmm(weights, value).view({sequences, heads, context, head_width});
  return at::linear(mixed.transpose(1, 2).reshape({-1, width}), layer.attention_out);
}

Tensor Model::Network::logits(const Tensor& bytes) const {
  Tensor x = at::embedding(embedding, bytes);
  for (const Layer& layer : layers) {
    x = x + attention(layer, rms_norm(x, layer.attention_norm));
    x = x + at::linear(swiglu(at::linear(rms_norm(x, layer.mlp_norm), layer.gate_up)), layer.down);
  }
  return at::linear(rms_norm(x, final_norm), unembedding);
}

Tensor Model::Network::loss(std::span<const std::uint8_t> windows) const {
  const Tensor bytes =
      at::from_blob(const_cast<std::uint8_t*>(windows.data()), {static_cast<std::int64_t>(windows.size())}, at::kByte)
          .to(at::kLong)
          .view({-1, context + 1});
  const Tensor input = bytes.narrow(1, 0, context).reshape(-1);
  const Tensor target = bytes.narrow(1, 1, context).reshape(-1);
  return at::cross_entropy_loss(logits(input), target);
}

Model::Model(const ModelShape& shape, std::uint64_t seed) : network_(std::make_unique<Network>(shape, seed)) {}
Model::~Model() = default;

const std::vector<ModelTensor>& Model::tensors() const { return network_->tensors; }

std::span<float> Model::parameters() {
  return {network_->parameters.data_ptr<float>(), static_cast<std::size_t>(network_->parameters.numel())};
}

std::span<const float> Model::gradients() const {
  return {network_->gradients.data_ptr<float>(), static_cast<std::size_t>(network_->gradients.numel())};
}

float Model::forward_backward(std::span<const std::uint8_t> windows, std::function<void(std::size_t)> ready) {
  network_->gradients.zero_();
  network_->ready = std::move(ready);
  const Tensor loss = network_->loss(windows);
  loss.backward();  // adds to the views of the flat gradient
  return loss.item<float>();
}

float Model::loss(std::span<const std::uint8_t> windows) const {
  const at::NoGradGuard no_graph;
  return network_->loss(windows).item<float>();
}

void use_one_thread_per_rank() {
  at::set_num_threads(1);
  if (openblas_set_num_threads != nullptr) openblas_set_num_threads(1);
}

}  // namespace pretrain
