// A training iteration, optimizer and communication included, as a CUDA graph: captured once, replayed, and compared
// with the same training without a graph, bit for bit. On all GPUs of the machine up to 4, or: cuda_graph GPUS
#include <scape/nccl/communicator.hpp>
#include <scape/scape.cuh>

#include <thrust/device_vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

constexpr int size = 500, batch = 16;      // of the model; samples a step and rank
constexpr int warmup = 20, replays = 140;  // steps before the capture; replays, of two steps each
constexpr double density = 0.1;
constexpr float learning_rate = 0.02f;

// ---- The model: a linear one, fitted to a hidden truth by least squares --------------------------------------------

// A random number that depends on i and seed alone, evenly from -1 to 1.
__device__ float noise(unsigned seed, int i) {
  unsigned x = seed * 0x9E3779B9u + static_cast<unsigned>(i);
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return static_cast<float>((x ^ x >> 16) >> 8) / (1 << 23) - 1;
}
__device__ float truth(int i) { return noise(0, i); }

// A graph's kernels get the same arguments in every replay. So what changes, here the seed of the data, lies in device
// memory and is moved on there.
__global__ void next_batch(unsigned* seed, unsigned ranks) { *seed += ranks; }

// A thread a sample.
__global__ void forward(const unsigned* seed, const float* parameters, float* errors) {
  const int sample = static_cast<int>(threadIdx.x);
  float error = 0;
  for (int i = 0; i < size; ++i) error += noise(*seed, sample * size + i) * (parameters[i] - truth(i));
  errors[sample] = error;
}

// A thread a parameter: no atomics, so that every run gives the same bits.
__global__ void backward(const unsigned* seed, const float* errors, float* gradients) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= size) return;
  float sum = 0;
  for (int sample = 0; sample < batch; ++sample) sum += errors[sample] * noise(*seed, sample * size + i);
  gradients[i] = 2 * sum / batch;
}

template <class T>
std::span<T> span_of(thrust::device_vector<T>& array) {
  return {thrust::raw_pointer_cast(array.data()), array.size()};
}

struct Model {
  thrust::device_vector<float> parameters = thrust::device_vector<float>(size), gradients = parameters;
  thrust::device_vector<float> errors = thrust::device_vector<float>(batch);
  thrust::device_vector<unsigned> seed;

  explicit Model(int rank) : seed(1, static_cast<unsigned>(rank)) {}

  void forward_backward(int ranks, cudaStream_t stream) {
    next_batch<<<1, 1, 0, stream>>>(span_of(seed).data(), static_cast<unsigned>(ranks));
    forward<<<1, batch, 0, stream>>>(span_of(seed).data(), span_of(parameters).data(), span_of(errors).data());
    backward<<<(size + 127) / 128, 128, 0, stream>>>(span_of(seed).data(), span_of(errors).data(),
                                                     span_of(gradients).data());
    scape::check(cudaGetLastError(), "forward_backward");
  }
};

// ---- The trainer ---------------------------------------------------------------------------------------------------

// Owners of handles.
template <auto destroy>
struct Destroy {
  void operator()(auto* handle) const { destroy(handle); }
};
template <class Handle, auto destroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<destroy>>;
using Stream = Owned<cudaStream_t, cudaStreamDestroy>;
using Group = Owned<ncclComm_t, ncclCommDestroy>;
using Graph = Owned<cudaGraph_t, cudaGraphDestroy>;
using ExecutableGraph = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;

void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) throw scape::Error(std::string(call) + ": " + ncclGetErrorString(result));
}

Stream make_stream() {
  cudaStream_t stream = nullptr;
  scape::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return Stream(stream);
}

// What enqueue() enqueues on the stream and on those that it forks from it and joins again; nothing runs yet.
template <class F>
ExecutableGraph capture(cudaStream_t stream, F enqueue) {
  // Other threads, the other ranks', may do meanwhile what a capture forbids.
  scape::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  cudaGraph_t captured = nullptr;
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream, &captured);  // until then no memory can be freed, as destructors are about to
    throw;
  }
  scape::check(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
  const Graph graph(captured);
  cudaGraphExec_t executable = nullptr;
  scape::check(cudaGraphInstantiate(&executable, graph.get(), 0), "cudaGraphInstantiate");
  return ExecutableGraph(executable);
}

struct Result {
  std::vector<float> parameters, errors;  // after training; of the last batch
  bool operator==(const Result&) const = default;
};

Result train(scape::NcclCommunicator& communicator, cudaStream_t main, cudaStream_t second, bool as_graph) {
  const scape::CudaStream compute(main), side(second);
  scape::CudaMemory memory;
  Model model(communicator.rank());
  const scape::FlatLayout layout(size, communicator.size());
  scape::AdamS optimizer(layout, communicator, memory, compute, side,
                         {.learning_rate = learning_rate, .density = density, .density_warmup = warmup - 2},
                         scape::ClockRule{});
  const auto iteration = [&] {
    model.forward_backward(communicator.size(), main);
    optimizer.step(span_of(model.gradients), span_of(model.parameters), compute);
  };
  // Steps of the density warm-up differ in size: a graph can hold none of them.
  for (int step = 0; step < warmup; ++step) iteration();

  ExecutableGraph two_iterations;
  if (as_graph) {
    optimizer.await_masks(compute);  // a capture cannot wait for what came before it
    two_iterations = capture(main, [&] {
      iteration();  // two, since two buffers take turns for the masks
      iteration();
      optimizer.await_masks(compute);  // joins the side stream
    });
  }
  for (int replay = 0; replay < replays; ++replay) {
    // Kept on the device: a graph sees it.
    optimizer.set_learning_rate(learning_rate * static_cast<float>(replays - replay) / replays, compute);
    if (as_graph) {
      scape::check(cudaGraphLaunch(two_iterations.get(), main), "cudaGraphLaunch");
    } else {
      iteration();
      iteration();
    }
  }
  Result result{std::vector<float>(size), std::vector<float>(batch)};
  scape::copy_values<float>(span_of(model.parameters), result.parameters, compute);
  scape::copy_values<float>(span_of(model.errors), result.errors, compute);
  compute.synchronize();
  communicator.check();
  return result;
}

int main(int argc, char** argv) try {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no device");
    return 77;
  }
  const int ranks = std::clamp(argc > 1 ? std::atoi(argv[1]) : 4, 1, devices);
  // Or NCCL may choose another algorithm in a graph than outside, which may sum in another order.
  setenv("NCCL_GRAPH_REGISTER", "0", 0);
  ncclUniqueId id;
  check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  std::vector<Result> eager(static_cast<std::size_t>(ranks)), replayed = eager;
  std::vector<std::thread> workers;
  for (int rank = 0; rank < ranks; ++rank)
    workers.emplace_back([&, rank] {
      try {
        scape::check(cudaSetDevice(rank), "cudaSetDevice");
        const Stream main = make_stream(), second = make_stream();
        ncclComm_t joined = nullptr;
        check(ncclCommInitRank(&joined, ranks, id, rank), "ncclCommInitRank");
        const Group group(joined);
        scape::NcclCommunicator communicator(group.get());
        const std::size_t r = static_cast<std::size_t>(rank);
        eager[r] = train(communicator, main.get(), second.get(), false);
        replayed[r] = train(communicator, main.get(), second.get(), true);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::_Exit(1);  // the other ranks would wait for this one for ever
      }
    });
  for (std::thread& worker : workers) worker.join();

  const bool same = replayed == eager;
  const bool equal = std::all_of(replayed.begin(), replayed.end(),
                                 [&](const Result& result) { return result.parameters == replayed[0].parameters; });
  const std::vector<float>& errors = replayed[0].errors;
  const float loss = std::inner_product(errors.begin(), errors.end(), errors.begin(), 0.0f) / batch;
  constexpr float enough = 1;  // at the start 56: the mean square of a sum of 500 products of numbers from -1 to 1
  std::printf("GPUs             %d\n", ranks);
  std::printf("steps            %d, and %d from %d replays\n", warmup, 2 * replays, replays);
  std::printf("loss             %.3f, must be below %.0f\n", double{loss}, double{enough});
  std::printf("graph and eager  %s\n", same ? "the same bits" : "DIFFERENT");
  std::printf("replicas         %s\n", equal ? "identical" : "DIFFERENT");
  return same && equal && loss < enough ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "cuda_graph: %s\n", error.what());
  return 1;
}
