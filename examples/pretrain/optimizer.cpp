#include "optimizer.hpp"

#include <scape/host/mapped_file.hpp>
#include <scape/mpi/communicator.hpp>

#include <chrono>
#include <cmath>
#include <numeric>
#include <type_traits>

namespace pretrain {
namespace {

// The baseline as people know it: all-reduce the gradient, then AdamW on every element.
template <class Communicator>
class AdamW final : public Optimizer {
 public:
  AdamW(const Options& options, const std::vector<ModelTensor>& tensors, RankContext<Communicator>& context)
      : options_(options), tensors_(tensors), context_(context) {
    std::size_t size = 0;
    for (const ModelTensor& tensor : tensors) size += tensor.size;
    for (auto* array : {&gradient_, &first_moment_, &second_moment_}) array->resize(size);
  }

  StepFigures step(std::span<const float> gradients, std::span<float> parameters, double learning_rate, bool) override {
    const auto start = std::chrono::steady_clock::now();
    const std::uint64_t sent = context_.communicator.bytes_sent();
    context_.communicator.all_reduce_mean(gradients, std::span<float>(gradient_), context_.compute);
    context_.compute.synchronize();
    const auto reduced = std::chrono::steady_clock::now();
    update(parameters, static_cast<float>(learning_rate));
    const auto end = std::chrono::steady_clock::now();

    StepFigures figures;
    figures.times.payload = std::chrono::duration<double>(reduced - start).count();
    figures.times.update = std::chrono::duration<double>(end - reduced).count();
    figures.payload_bytes = context_.communicator.bytes_sent() - sent;
    return figures;
  }

 private:
  void update(std::span<float> parameters, float learning_rate) {
    const auto beta1 = static_cast<float>(options_.beta1), beta2 = static_cast<float>(options_.beta2);
    ++steps_;
    const float correction1 = 1 - std::pow(beta1, static_cast<float>(steps_));
    const float correction2 = 1 - std::pow(beta2, static_cast<float>(steps_));
    const float scale = clipping();
    std::size_t begin = 0;
    for (const ModelTensor& tensor : tensors_) {
      const float decay = tensor.is_norm ? 0 : learning_rate * static_cast<float>(options_.weight_decay);
      for (std::size_t i = begin; i < begin + tensor.size; ++i) {
        const float g = scale * gradient_[i];
        float& m = first_moment_[i];
        float& v = second_moment_[i];
        m = beta1 * m + (1 - beta1) * g;
        v = beta2 * v + (1 - beta2) * g * g;
        parameters[i] -=
            decay * parameters[i] + learning_rate * (m / correction1) / (std::sqrt(v / correction2) + 1e-8f);
      }
      begin += tensor.size;
    }
  }

  // The factor that brings the gradient's norm down to the limit.
  float clipping() const {
    if (options_.clip_norm == 0) return 1;
    const double norm = std::sqrt(std::inner_product(gradient_.begin(), gradient_.end(), gradient_.begin(), 0.0));
    return norm > options_.clip_norm ? static_cast<float>(options_.clip_norm / (norm + 1e-6)) : 1;
  }

  const Options& options_;
  const std::vector<ModelTensor>& tensors_;
  RankContext<Communicator>& context_;
  std::vector<float> gradient_, first_moment_, second_moment_;
  int steps_ = 0;
};

std::vector<scape::Tensor> describe(const std::vector<ModelTensor>& tensors) {
  std::vector<scape::Tensor> described;
  for (const ModelTensor& tensor : tensors)
    described.push_back({.size = tensor.size, .dense = tensor.is_norm, .decay = !tensor.is_norm});
  return described;
}

// AdamS with one of the library's rules; dense where the sparsity is 0. Offloads: residuals lie in a file.
template <class Communicator, class Rule, bool offloads>
class Scape final : public Optimizer {
 public:
  Scape(const Options& options, const Run& run, const std::vector<ModelTensor>& tensors,
        RankContext<Communicator>& context, const Rule& rule)
      : context_(context),
        layout_(describe(tensors), options.ranks,
                options.select_per_shard ? scape::Scope::shard : scape::Scope::tensor),
        files_(options.offload),
        adams_(layout_, context.communicator, context.memory, context.compute, context.side,
               scape::AdamSOptions{
                   .learning_rate = static_cast<float>(run.learning_rate),
                   .beta1 = static_cast<float>(options.beta1),
                   .beta2 = static_cast<float>(options.beta2),
                   .weight_decay = static_cast<float>(options.weight_decay),
                   .clip_norm = static_cast<float>(options.clip_norm),
                   .density = 1 - run.sparsity,
                   .density_warmup = options.density_warmup,
                   .delay = options.delay,
                   .mask_coding = options.mask_coding,
               },
               rule, scape::Replicated{}, keep()) {}

  StepFigures step(std::span<const float> gradients, std::span<float> parameters, double learning_rate,
                   bool timed) override {
    scape::StepReport report;
    adams_.set_learning_rate(static_cast<float>(learning_rate));
    adams_.step(gradients, parameters, context_.compute, timed ? &report : nullptr);

    StepFigures figures;
    figures.timed = timed;
    figures.mask_bytes = report.mask_bytes;
    figures.payload_bytes = report.payload_bytes;
    figures.times.accumulate = report.seconds.accumulate;
    figures.times.select = report.seconds.select;
    figures.times.wait = report.seconds.mask_wait;
    figures.times.payload = report.seconds.payload_wait;
    figures.times.update = report.seconds.update;
    return figures;
  }

 private:
  using Keep = std::conditional_t<offloads, scape::Offloaded<scape::MappedFileMemory>, scape::InMemory>;
  Keep keep() {
    if constexpr (offloads)
      return Keep(files_);
    else
      return {};
  }

  RankContext<Communicator>& context_;
  scape::TensorLayout layout_;
  scape::MappedFileMemory files_;
  scape::AdamS<scape::HostStream, Communicator, scape::HostMemory, Rule, scape::Replicated, Keep> adams_;
};

template <class Communicator, class Rule>
std::unique_ptr<Optimizer> make_scape(const Options& options, const Run& run, const std::vector<ModelTensor>& tensors,
                                      RankContext<Communicator>& context, const Rule& rule) {
  if (options.offload.empty())
    return std::make_unique<Scape<Communicator, Rule, false>>(options, run, tensors, context, rule);
  return std::make_unique<Scape<Communicator, Rule, true>>(options, run, tensors, context, rule);
}

}  // namespace

template <class Communicator>
std::unique_ptr<Optimizer> make_optimizer(const Options& options, const Run& run,
                                          const std::vector<ModelTensor>& tensors, RankContext<Communicator>& context) {
  const scape::ScapeRule scape{.score = options.score_after_update ? scape::MaskScore::updated
                                                                   : scape::MaskScore::corrected};
  const scape::ClockRule clock{.cap = static_cast<float>(options.cap)};
  switch (run.method) {
    case Method::adamw:
      return std::make_unique<AdamW<Communicator>>(options, tensors, context);
    case Method::clock:
      return make_scape(options, run, tensors, context, clock);
    case Method::adams:
    case Method::scape:
      return make_scape(options, run, tensors, context, scape);
  }
  return nullptr;
}

template std::unique_ptr<Optimizer> make_optimizer(const Options&, const Run&, const std::vector<ModelTensor>&,
                                                   RankContext<scape::ThreadCommunicator>&);
template std::unique_ptr<Optimizer> make_optimizer(const Options&, const Run&, const std::vector<ModelTensor>&,
                                                   RankContext<scape::MpiCommunicator>&);

}  // namespace pretrain
