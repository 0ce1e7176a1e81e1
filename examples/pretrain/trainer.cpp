#include "trainer.hpp"

#include "progress.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <numbers>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

namespace pretrain {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Rises linearly to the peak, then falls along a cosine.
double learning_rate(const Options& options, double peak, std::size_t step) {
  const auto share = [&](std::size_t of) { return static_cast<double>(step) / static_cast<double>(of); };
  const double rise = step < options.lr_warmup ? share(options.lr_warmup) : 1;
  const double fall = 0.5 * (1 + std::cos(std::numbers::pi * share(options.steps)));
  return peak * rise * (options.lr_final + (1 - options.lr_final) * fall);
}

// What the ranks of a run share. Losses travel over a group of their own: they do not count as traffic of the training.
class Team {
 public:
  explicit Team(int ranks) : training(ranks), monitoring(ranks) {}

  // A rank that cannot go on tells why, and lets the others go.
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    for (const auto* group : {&training, &monitoring}) group->abort("another rank failed");
  }
  void rethrow_failure() const {
    if (error_) std::rethrow_exception(error_);
  }

  scape::ThreadGroup training, monitoring;

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

class Rank {
 public:
  Rank(const Options& options, const Run& run, const Text& text, const Team& team, int rank)
      : options_(options),
        run_(run),
        text_(text),
        validation_(text.validation_windows(options.eval_windows, rank, options.ranks)),
        model_(options.shape, options.seed),
        monitor_(team.monitoring, rank),
        context_(team.training, rank),
        optimizer_(make_optimizer(options, run, model_.tensors(), context_)) {
    std::seed_seq seeds{options.seed, static_cast<std::uint64_t>(rank)};
    random_.seed(seeds);
  }

  // `progress` is null on all ranks but the first.
  Result train(Progress* progress) {
    Result result;
    result.run = run_;
    double loss_since_point = 0;
    for (std::size_t step = 1; step <= options_.steps; ++step) {
      const double loss = train_one_step(step, result);
      loss_since_point += loss;
      if (progress != nullptr) progress->step(step, loss, context_.communicator.bytes_sent());

      if (step % options_.eval_every != 0 && step != options_.steps) continue;
      const std::size_t steps = step - (result.curve.empty() ? 0 : result.curve.back().step);
      result.curve.push_back({.step = step,
                              .training_loss = mean_over_ranks(loss_since_point / static_cast<double>(steps)),
                              .validation_loss = validate(),
                              .bytes = context_.communicator.bytes_sent(),
                              .seconds = seconds_});
      loss_since_point = 0;
      if (progress != nullptr) progress->validation(result.curve.back());
    }
    return result;
  }

  std::span<const float> parameters() { return model_.parameters(); }

 private:
  double train_one_step(std::size_t step, Result& result) {
    const double start = now();
    const double loss = model_.forward_backward(text_.sample(options_.batch, random_));
    if (!std::isfinite(loss))
      throw std::runtime_error("the loss of step " + std::to_string(step) +
                               " is not finite: try a lower learning rate");
    const double computed = now();
    const std::uint64_t sent = context_.communicator.bytes_sent();
    StepFigures figures =
        optimizer_->step(model_.gradients(), model_.parameters(), learning_rate(options_, run_.learning_rate, step));
    context_.compute.synchronize();  // the next forward reads the parameters
    seconds_ += now() - start;

    figures.times.compute = computed - start;
    for (const Phase& phase : phases)
      result.times.*phase.seconds += figures.times.*phase.seconds / static_cast<double>(options_.steps);
    result.mask_bytes = figures.mask_bytes;
    result.payload_bytes = figures.payload_bytes;
    result.step_bytes = context_.communicator.bytes_sent() - sent;
    return loss;
  }

  // Mean loss over the validation windows of all ranks.
  double validate() {
    const std::size_t window = options_.shape.context + 1, chunk = window * options_.batch;
    double sum = 0;
    for (std::size_t begin = 0; begin < validation_.size(); begin += chunk) {
      const auto windows = std::span(validation_).subspan(begin, std::min(chunk, validation_.size() - begin));
      sum += model_.loss(windows) * static_cast<double>(windows.size());
    }
    return mean_over_ranks(sum) / mean_over_ranks(static_cast<double>(validation_.size()));
  }

  double mean_over_ranks(double value) {
    std::array<float, 1> mean{static_cast<float>(value)};
    monitor_.all_reduce_mean(mean, mean, context_.compute);
    context_.compute.synchronize();
    return mean[0];
  }

  const Options& options_;
  const Run& run_;
  const Text& text_;
  std::vector<std::uint8_t> validation_;
  std::mt19937_64 random_;
  Model model_;
  scape::ThreadCommunicator monitor_;
  RankContext context_;
  std::unique_ptr<Optimizer> optimizer_;
  double seconds_ = 0;
};

void expect_identical(const std::vector<std::vector<float>>& parameters) {
  for (std::size_t rank = 1; rank < parameters.size(); ++rank)
    if (std::memcmp(parameters[0].data(), parameters[rank].data(), parameters[0].size() * sizeof(float)) != 0)
      throw std::runtime_error("the parameters of rank " + std::to_string(rank) + " differ from those of rank 0");
}

}  // namespace

Result train(const Options& options, const Run& run, const Text& text, Progress& progress) {
  const auto ranks = static_cast<std::size_t>(options.ranks);
  Team team(options.ranks);
  Result result;
  std::vector<std::vector<float>> parameters(ranks);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      std::optional<Rank> rank;  // lives until the team knows of a failure: the others must not be the first to tell
      try {
        use_one_thread_per_rank();
        rank.emplace(options, run, text, team, static_cast<int>(r));
        Result own = rank->train(r == 0 ? &progress : nullptr);
        parameters[r].assign(rank->parameters().begin(), rank->parameters().end());
        if (r == 0) result = std::move(own);
      } catch (...) {
        team.fail(std::current_exception());
      }
    });
  for (std::thread& thread : threads) thread.join();
  team.rethrow_failure();
  expect_identical(parameters);
  return result;
}

}  // namespace pretrain
