#include "optimizer.hpp"

#include <scape/bfloat16.hpp>
#include <scape/host/mapped_file.hpp>
#include <scape/mpi/communicator.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>

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

  void begin(std::span<const float> gradients, double learning_rate, bool) override {
    given_ = gradients;
    learning_rate_ = learning_rate;
  }

  StepFigures end(std::span<float> parameters) override {
    const auto start = std::chrono::steady_clock::now();
    const std::uint64_t sent = context_.communicator.bytes_sent();
    context_.communicator.all_reduce_mean(given_, std::span<float>(gradient_), context_.compute);
    context_.compute.synchronize();
    const auto reduced = std::chrono::steady_clock::now();
    update(parameters, static_cast<float>(learning_rate_));
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
  std::span<const float> given_;
  double learning_rate_ = 0;
  std::vector<float> gradient_, first_moment_, second_moment_;
  int steps_ = 0;
};

std::vector<scape::Tensor> describe(const Options& options, const std::vector<ModelTensor>& tensors) {
  std::vector<scape::Tensor> described;
  std::size_t size = 0;
  for (const ModelTensor& tensor : tensors) {
    described.push_back({.size = tensor.size, .dense = tensor.is_norm, .decay = !tensor.is_norm});
    size += tensor.size;
  }
  if (options.overlap) scape::assign_buckets(described, size / options.buckets);
  return described;
}

// Whole tensors by owner; where masters are sharded, slices of each tensor, since every bucket's payload is padded to
// the rank that owns most of it.
class Layout {
 public:
  Layout(const Options& options, const std::vector<scape::Tensor>& tensors)
      : Layout(options.sharded
                   ? copy(scape::BucketLayout(tensors, options.ranks))
                   : copy(scape::TensorLayout(tensors, options.ranks,
                                              options.select_per_shard ? scape::Scope::shard : scape::Scope::tensor))) {
  }
  std::size_t size() const { return size_; }
  int ranks() const { return ranks_; }
  std::span<const scape::Segment> segments() const { return segments_; }

 private:
  Layout(std::size_t size, int ranks, std::vector<scape::Segment> segments)
      : size_(size), ranks_(ranks), segments_(std::move(segments)) {}
  static Layout copy(const scape::ShardedLayout auto& layout) {
    return Layout(layout.size(), layout.ranks(), {layout.segments().begin(), layout.segments().end()});
  }

  std::size_t size_;
  int ranks_;
  std::vector<scape::Segment> segments_;
};

// AdamS with one of the library's rules; dense where the sparsity is 0. Residuals lie where `Residuals` keeps them.
template <class Communicator, class Rule, class Masters, class Residuals>
class Scape final : public Optimizer {
  using AdamS = scape::AdamS<scape::HostStream, Communicator, scape::HostMemory, Rule, Masters, Residuals>;
  using Parameter = typename Masters::Parameter;

 public:
  Scape(const Options& options, const Run& run, const std::vector<ModelTensor>& tensors, std::span<float> parameters,
        RankContext<Communicator>& context, const Rule& rule)
      : context_(context),
        tensors_(describe(options, tensors)),
        layout_(options, tensors_),
        files_(options.offload.empty() ? std::filesystem::temp_directory_path() : options.offload),
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
                   .payload = run.method == Method::adams ? scape::PayloadFormat::float32 : options.payload,
               },
               rule, {}, keep()),
        overlaps_(options.overlap) {
    if constexpr (Masters::sharded) {
      adams_.load_masters(parameters, context.compute);
      context.compute.synchronize();
      for (float& value : parameters) value = static_cast<float>(rounded_.emplace_back(value));
    }
    for (const scape::Tensor& tensor : tensors_)
      unready_.resize(std::max<std::size_t>(unready_.size(), tensor.bucket + 1));
  }

  void begin(std::span<const float> gradients, double learning_rate, bool timed) override {
    gradients_ = gradients;
    timed_ = timed;
    adams_.set_learning_rate(static_cast<float>(learning_rate));
    if (!overlaps_) return;
    std::fill(unready_.begin(), unready_.end(), 0);
    for (const scape::Tensor& tensor : tensors_) ++unready_[tensor.bucket];
    left_ = unready_.size();
    step_.emplace(adams_.begin_step(gradients, context_.compute, timed ? &report_ : nullptr));
  }

  // The last bucket first, as backward goes, in the same order on all ranks.
  void ready(std::size_t tensor) override {
    --unready_[tensors_[tensor].bucket];
    for (; left_ != 0 && unready_[left_ - 1] == 0; --left_) step_->add(left_ - 1);
  }

  StepFigures end(std::span<float> parameters) override {
    if (overlaps_)
      step_->finish(held(parameters));
    else
      adams_.step(gradients_, held(parameters), context_.compute, timed_ ? &report_ : nullptr);
    step_.reset();
    if constexpr (Masters::sharded) {
      context_.compute.synchronize();
      std::transform(rounded_.begin(), rounded_.end(), parameters.begin(),
                     [](Parameter value) { return static_cast<float>(value); });
    }

    StepFigures figures;
    figures.timed = timed_;
    if (!timed_) return figures;
    figures.mask_bytes = report_.mask_bytes;
    figures.payload_bytes = report_.payload_bytes + report_.parameter_bytes;
    figures.times.accumulate = report_.seconds.accumulate;
    figures.times.select = report_.seconds.select;
    figures.times.wait = report_.seconds.mask_wait;
    figures.times.payload = report_.seconds.payload_wait + report_.seconds.parameter_wait;
    figures.times.update = report_.seconds.update;
    return figures;
  }

 private:
  std::span<Parameter> held(std::span<float> parameters) {
    if constexpr (Masters::sharded)
      return rounded_;
    else
      return parameters;
  }
  Residuals keep() {
    if constexpr (Residuals::offloads)
      return Residuals(files_);
    else
      return {};
  }

  RankContext<Communicator>& context_;
  std::vector<scape::Tensor> tensors_;
  Layout layout_;
  scape::MappedFileMemory files_;
  AdamS adams_;
  std::vector<Parameter> rounded_;  // where masters are sharded: what the model computes with
  bool overlaps_, timed_ = false;
  std::span<const float> gradients_;
  scape::StepReport report_;
  std::vector<std::size_t> unready_;  // tensors, by bucket
  std::size_t left_ = 0;              // buckets
  std::optional<typename AdamS::template OverlappedStep<float>> step_;
};

}  // namespace

template <class Communicator>
std::unique_ptr<Optimizer> make_optimizer(const Options& options, const Run& run, Model& model,
                                          RankContext<Communicator>& context) {
  const auto make_with = [&]<class Masters, class Residuals>(
                             const auto& rule, Masters, std::type_identity<Residuals>) -> std::unique_ptr<Optimizer> {
    return std::make_unique<Scape<Communicator, std::remove_cvref_t<decltype(rule)>, Masters, Residuals>>(
        options, run, model.tensors(), model.parameters(), context, rule);
  };
  const auto make = [&](const auto& rule) {
    const std::type_identity<scape::InMemory> in_memory;
    const std::type_identity<scape::Offloaded<scape::MappedFileMemory>> in_files;
    const bool offloads = !options.offload.empty();
    if (options.sharded) {
      const scape::Sharded<scape::bfloat16> masters;
      return offloads ? make_with(rule, masters, in_files) : make_with(rule, masters, in_memory);
    }
    return offloads ? make_with(rule, scape::Replicated{}, in_files) : make_with(rule, scape::Replicated{}, in_memory);
  };
  switch (run.method) {
    case Method::adamw:
      return std::make_unique<AdamW<Communicator>>(options, model.tensors(), context);
    case Method::clock:
      return make(scape::ClockRule{.cap = static_cast<float>(options.cap)});
    case Method::adams:
    case Method::scape:
      return make(scape::ScapeRule{.score = options.score_after_update ? scape::MaskScore::updated
                                                                       : scape::MaskScore::corrected});
  }
  return nullptr;
}

template std::unique_ptr<Optimizer> make_optimizer(const Options&, const Run&, Model&,
                                                   RankContext<scape::ThreadCommunicator>&);
template std::unique_ptr<Optimizer> make_optimizer(const Options&, const Run&, Model&,
                                                   RankContext<scape::MpiCommunicator>&);

}  // namespace pretrain
