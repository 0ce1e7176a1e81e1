// Trains a small classifier on all GPUs of a machine, each with data of its own, and sends 1% of the gradients.
//
//   nccl_trainer [--gpus N] [--steps N] [--density D]        density 1 is dense training, to compare with
#include <scape/nccl/communicator.hpp>
#include <scape/scape.cuh>

#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/reduce.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

struct Options {
  int gpus = 4;  // at most; fewer where there are fewer
  int steps = 200;
  double density = 0.01;
};

constexpr int inputs = 64, hidden = 128, classes = 8, clusters = 32, batch = 32;
constexpr float learning_rate = 0.003f, enough = 0.1f;  // the loss to reach; guessing gives ln 8 = 2.1

// ---- The model: what a trainer already has -------------------------------------------------------------------------

// A dense layer's place in the flat buffers: a row of weights an input, and after them, as one more row, the biases.
struct Layer {
  int inputs, outputs;
  float *parameters, *gradients;
  int size() const { return (inputs + 1) * outputs; }
};

constexpr int threads = 128;
constexpr unsigned blocks(int count) { return static_cast<unsigned>((count + threads - 1) / threads); }
__device__ int thread_index() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

// A random number that depends on i and seed alone, evenly from -1 to 1.
__device__ float noise(unsigned seed, int i) {
  unsigned x = seed * 0x9E3779B9u + static_cast<unsigned>(i);
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return static_cast<float>((x ^ x >> 16) >> 8) / (1 << 23) - 1;
}

__global__ void initialize(Layer layer, unsigned seed) {
  const int i = thread_index();
  if (i >= (layer.inputs + 1) * layer.outputs) return;
  const bool is_bias = i >= layer.inputs * layer.outputs;
  layer.parameters[i] = is_bias ? 0 : noise(seed, i) * sqrtf(6.0f / static_cast<float>(layer.inputs));
}

// A batch: points around the corners of a cube that are the clusters' centres. A class has several clusters, so that no
// linear model can tell it. A thread an input.
__global__ void draw(unsigned seed, float* points, int* labels) {
  const int i = thread_index();
  if (i >= batch * inputs) return;
  const int sample = i / inputs, input = i % inputs;
  const int cluster = static_cast<int>((noise(seed, sample) + 1) / 2 * clusters) % clusters;
  points[i] = (noise(0, cluster * inputs + input) < 0 ? -1.0f : 1.0f) + 2 * noise(seed, batch + i);
  if (input == 0) labels[sample] = cluster % classes;
}

// A thread an output of a sample.
__global__ void forward(Layer layer, const float* in, float* out, bool relu) {
  const int i = thread_index();
  if (i >= batch * layer.outputs) return;
  const int sample = i / layer.outputs, output = i % layer.outputs;
  float sum = layer.parameters[layer.inputs * layer.outputs + output];
  for (int k = 0; k < layer.inputs; ++k)
    sum += in[sample * layer.inputs + k] * layer.parameters[k * layer.outputs + output];
  out[i] = relu && sum < 0 ? 0 : sum;
}

// Cross-entropy, and in place of the logits its gradient. A thread a sample.
__global__ void softmax_loss(float* logits, const int* labels, float* losses) {
  const int sample = thread_index();
  if (sample >= batch) return;
  float* const row = logits + sample * classes;
  float largest = row[0], sum = 0;
  for (int c = 1; c < classes; ++c) largest = fmaxf(largest, row[c]);
  for (int c = 0; c < classes; ++c) sum += expf(row[c] - largest);
  losses[sample] = largest + logf(sum) - row[labels[sample]];
  for (int c = 0; c < classes; ++c)
    row[c] = (expf(row[c] - largest) / sum - (c == labels[sample] ? 1.0f : 0.0f)) / batch;
}

// A thread a parameter: no atomics, so that every run gives the same bits.
__global__ void backward_parameters(Layer layer, const float* in, const float* out_gradients) {
  const int i = thread_index();
  if (i >= (layer.inputs + 1) * layer.outputs) return;
  const int input = i / layer.outputs, output = i % layer.outputs;
  float sum = 0;
  for (int sample = 0; sample < batch; ++sample)
    sum += (input == layer.inputs ? 1 : in[sample * layer.inputs + input]) *
           out_gradients[sample * layer.outputs + output];
  layer.gradients[i] = sum;
}

// Through the ReLU that the layer's inputs come from. A thread an input of a sample.
__global__ void backward_inputs(Layer layer, const float* in, const float* out_gradients, float* in_gradients) {
  const int i = thread_index();
  if (i >= batch * layer.inputs) return;
  const int sample = i / layer.inputs, input = i % layer.inputs;
  float sum = 0;
  for (int k = 0; k < layer.outputs; ++k)
    sum += out_gradients[sample * layer.outputs + k] * layer.parameters[input * layer.outputs + k];
  in_gradients[i] = in[i] > 0 ? sum : 0;
}

template <class T>
T* raw(thrust::device_vector<T>& array) {
  return thrust::raw_pointer_cast(array.data());
}

class Classifier {
 public:
  explicit Classifier(cudaStream_t stream) : stream_(stream) {
    int place = 0;
    for (Layer& layer : layers_) {
      layer.parameters = raw(parameters_) + place;
      layer.gradients = raw(gradients_) + place;
      place += layer.size();
      initialize<<<blocks(layer.size()), threads, 0, stream_>>>(layer, static_cast<unsigned>(place));
    }
    scape::check(cudaGetLastError(), "initialize");
  }

  // Weights are sparse; biases, a few elements that matter, always travel, and do not decay.
  std::vector<scape::Tensor> tensors() const {
    std::vector<scape::Tensor> tensors;
    for (const Layer& layer : layers_) {
      tensors.push_back({.size = static_cast<std::size_t>(layer.inputs * layer.outputs)});
      tensors.push_back({.size = static_cast<std::size_t>(layer.outputs), .dense = true, .decay = false});
    }
    return tensors;
  }
  std::span<float> parameters() { return {raw(parameters_), parameters_.size()}; }
  std::span<const float> gradients() { return {raw(gradients_), gradients_.size()}; }

  // On the batch that the seed tells.
  void forward_backward(unsigned seed) {
    const auto& [first, second] = layers_;
    draw<<<blocks(batch * inputs), threads, 0, stream_>>>(seed, raw(points_), raw(labels_));
    forward<<<blocks(batch * hidden), threads, 0, stream_>>>(first, raw(points_), raw(hidden_), true);
    forward<<<blocks(batch * classes), threads, 0, stream_>>>(second, raw(hidden_), raw(logits_), false);
    softmax_loss<<<blocks(batch), threads, 0, stream_>>>(raw(logits_), raw(labels_), raw(losses_));
    backward_parameters<<<blocks(second.size()), threads, 0, stream_>>>(second, raw(hidden_), raw(logits_));
    backward_inputs<<<blocks(batch * hidden), threads, 0, stream_>>>(second, raw(hidden_), raw(logits_),
                                                                     raw(hidden_gradients_));
    backward_parameters<<<blocks(first.size()), threads, 0, stream_>>>(first, raw(points_), raw(hidden_gradients_));
    scape::check(cudaGetLastError(), "forward_backward");
  }

  // The mean loss on the last batch. Waits for it.
  float loss() const { return thrust::reduce(thrust::cuda::par.on(stream_), losses_.begin(), losses_.end()) / batch; }

 private:
  static constexpr int size = (inputs + 1) * hidden + (hidden + 1) * classes;

  cudaStream_t stream_;
  thrust::device_vector<float> parameters_ = thrust::device_vector<float>(size), gradients_ = parameters_;
  thrust::device_vector<float> points_ = thrust::device_vector<float>(batch * inputs);
  thrust::device_vector<float> hidden_ = thrust::device_vector<float>(batch * hidden), hidden_gradients_ = hidden_;
  thrust::device_vector<float> logits_ = thrust::device_vector<float>(batch * classes);
  thrust::device_vector<float> losses_ = thrust::device_vector<float>(batch);
  thrust::device_vector<int> labels_ = thrust::device_vector<int>(batch);
  Layer layers_[2] = {{inputs, hidden, nullptr, nullptr}, {hidden, classes, nullptr, nullptr}};
};

// ---- The trainer ---------------------------------------------------------------------------------------------------

// Owners of the handles that scape borrows.
template <auto destroy>
struct Destroy {
  void operator()(auto* handle) const { destroy(handle); }
};
using OwnedStream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, Destroy<cudaStreamDestroy>>;
using OwnedGroup = std::unique_ptr<std::remove_pointer_t<ncclComm_t>, Destroy<ncclCommDestroy>>;

void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) throw scape::Error(std::string(call) + ": " + ncclGetErrorString(result));
}

OwnedStream make_stream() {
  cudaStream_t stream = nullptr;
  scape::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return OwnedStream(stream);
}

OwnedGroup join(ncclUniqueId id, int rank, int ranks) {
  ncclComm_t group = nullptr;
  check(ncclCommInitRank(&group, ranks, id, rank), "ncclCommInitRank");
  return OwnedGroup(group);
}

struct Result {
  float loss_before = 0, loss_after = 0;
  std::uint64_t bytes_sent = 0;
  std::vector<float> parameters;
};

void train(ncclUniqueId id, int rank, int ranks, const Options& options, Result& result) {
  scape::check(cudaSetDevice(rank), "cudaSetDevice");
  const OwnedStream first = make_stream(), second = make_stream();
  const OwnedGroup group = join(id, rank, ranks);
  const scape::CudaStream compute(first.get()), side(second.get());
  scape::NcclCommunicator communicator(group.get());
  scape::CudaMemory memory;

  Classifier model(first.get());
  const scape::BucketLayout layout(model.tensors(), ranks);
  scape::AdamS optimizer(layout, communicator, memory, compute, side,
                         {.learning_rate = learning_rate,
                          .density = options.density,
                          .density_warmup = static_cast<std::size_t>(options.steps) / 10},
                         scape::ClockRule{});

  const auto batch_seed = [=](int step) { return static_cast<unsigned>(1 + step * ranks + rank); };
  for (int step = 0; step < options.steps; ++step) {
    model.forward_backward(batch_seed(step));  // the next mask travels meanwhile
    if (step == 0) result.loss_before = model.loss();
    if (rank == 0 && step % std::max(options.steps / 10, 1) == 0)
      std::printf("step %5d  loss %.3f\n", step, double{model.loss()});
    const float left = static_cast<float>(options.steps - step) / static_cast<float>(options.steps);
    optimizer.set_learning_rate(learning_rate * left);
    optimizer.step(model.gradients(), model.parameters(), compute);
  }
  model.forward_backward(batch_seed(options.steps));
  result.loss_after = model.loss();
  result.bytes_sent = communicator.bytes_sent();
  result.parameters.resize(layout.size());
  scape::copy_values(std::span<const float>(model.parameters()), std::span(result.parameters), compute);
  compute.synchronize();
  communicator.check();
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--gpus")
      options.gpus = std::atoi(value);
    else if (name == "--steps")
      options.steps = std::atoi(value);
    else if (name == "--density")
      options.density = std::atof(value);
    else
      options.steps = 0;
  }
  if (options.gpus > 0 && options.steps > 0) return options;
  std::fputs("usage: nccl_trainer [--gpus N] [--steps N] [--density D]\n", stderr);
  std::exit(2);
}

int main(int argc, char** argv) try {
  const Options options = parse(argc, argv);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no device");
    return 77;
  }
  const int ranks = std::min(options.gpus, devices);
  ncclUniqueId id;
  check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  std::vector<Result> results(static_cast<std::size_t>(ranks));
  std::vector<std::thread> workers;
  for (int rank = 0; rank < ranks; ++rank)
    workers.emplace_back([&, rank] {
      try {
        train(id, rank, ranks, options, results[static_cast<std::size_t>(rank)]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::_Exit(1);  // the other ranks would wait for this one for ever
      }
    });
  for (std::thread& worker : workers) worker.join();

  float before = 0, after = 0;  // means over the ranks
  bool equal = true;
  for (const Result& result : results) {
    before += result.loss_before / static_cast<float>(ranks);
    after += result.loss_after / static_cast<float>(ranks);
    equal = equal && result.parameters == results[0].parameters;
  }
  const std::size_t parameters = results[0].parameters.size();
  const double sent = static_cast<double>(results[0].bytes_sent);
  const double dense = 2.0 * (ranks - 1) / ranks * static_cast<double>(parameters * sizeof(float)) * options.steps;
  std::printf("GPUs        %d\n", ranks);
  std::printf("parameters  %zu\n", parameters);
  std::printf("loss        %.3f before, %.3f after %d steps, must be below %.3f\n", double{before}, double{after},
              options.steps, double{enough});
  std::printf("bytes sent  %.0f by a rank, density warm-up included; %.0f if dense\n", sent, dense);
  std::printf("replicas    %s\n", equal ? "identical" : "DIFFERENT");
  return equal && after < enough ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "nccl_trainer: %s\n", error.what());
  return 1;
}
