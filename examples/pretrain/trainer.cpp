#include "trainer.hpp"

#include "progress.hpp"

#include <scape/fingerprint.hpp>
#include <scape/mpi/communicator.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <exception>
#include <fstream>
#include <mutex>
#include <numbers>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

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

// Bytes that a network interface of this process's namespace has sent; 0 without a name.
double bytes_sent_by(const std::string& interface) {
  if (interface.empty()) return 0;
  std::ifstream file("/proc/self/net/dev");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string name;
    if (!std::getline(fields >> std::ws, name, ':') || name != interface) continue;
    double value = 0;
    for (int field = 0; field <= 8; ++field) fields >> value;  // the ninth: bytes sent
    if (fields) return value;
  }
  throw std::runtime_error("no counters of the network interface " + interface);
}

template <class Communicator>
class Rank {
 public:
  // `training` and `monitoring` are what communicators are made of. Losses travel over one of their own: they do not
  // count as traffic of the training.
  template <class... Group>
  Rank(const Options& options, const Run& run, const Text& text, int rank, const std::tuple<Group...>& training,
       const std::tuple<Group...>& monitoring)
      : options_(options),
        run_(run),
        text_(text),
        validation_(text.validation_windows(options.eval_windows, rank, options.ranks)),
        model_(options.shape, options.seed),
        monitor_(std::make_from_tuple<Communicator>(monitoring)),
        context_(std::make_from_tuple<RankContext<Communicator>>(training)),
        optimizer_(make_optimizer(options, run, model_.tensors(), context_)) {
    std::seed_seq seeds{options.seed, static_cast<std::uint64_t>(rank)};
    random_.seed(seeds);
  }

  // `progress` is null on all ranks but the first.
  Result train(Progress* progress) {
    Result result;
    result.run = run_;
    double loss_since_point = 0, interface_bytes = 0;
    for (std::size_t step = 1; step <= options_.steps; ++step) {
      const double before = bytes_sent_by(options_.interface);
      const double loss = train_one_step(step, result);
      if (step > options_.skip_steps) interface_bytes += bytes_sent_by(options_.interface) - before;
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
    const auto steps = static_cast<double>(options_.steps - std::min(options_.steps, options_.skip_steps));
    result.interface_bytes = interface_bytes / steps;
    for (const Phase& phase : phases) result.times.*phase.seconds /= static_cast<double>(timed_steps_);
    result.step_seconds = others_ == 0 ? timed_seconds_ / static_cast<double>(timed_steps_)
                                       : other_seconds_ / static_cast<double>(others_);
    result.fingerprint = common_fingerprint();
    return result;
  }

 private:
  double train_one_step(std::size_t step, Result& result) {
    const double start = now();
    const double loss = model_.forward_backward(text_.sample(options_.batch, random_));
    if (!std::isfinite(loss))
      throw std::runtime_error("the loss of step " + std::to_string(step) +
                               " is not finite: try a lower learning rate");
    const double computed = now();
    const std::uint64_t sent = context_.communicator.bytes_sent();
    const StepFigures figures =
        optimizer_->step(model_.gradients(), model_.parameters(), learning_rate(options_, run_.learning_rate, step),
                         (options_.steps - step) % options_.report_every == 0);
    context_.compute.synchronize();  // the next forward reads the parameters
    const double took = now() - start;
    seconds_ += took;
    result.step_bytes = context_.communicator.bytes_sent() - sent;
    if (figures.timed) {
      result.mask_bytes = figures.mask_bytes;
      result.payload_bytes = figures.payload_bytes;
    }
    if (step <= options_.skip_steps) return loss;
    if (!figures.timed) {
      other_seconds_ += took;
      ++others_;
      return loss;
    }
    timed_seconds_ += took;
    ++timed_steps_;
    result.times.compute += computed - start;
    for (const Phase& phase : phases) result.times.*phase.seconds += figures.times.*phase.seconds;
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

  // A hash of the parameters; throws where ranks have not the same.
  std::uint64_t common_fingerprint() {
    scape::Fingerprint hash;
    for (const float value : model_.parameters()) hash.add(static_cast<double>(value));
    std::vector<scape::MaskWord> all(2 * static_cast<std::size_t>(monitor_.size()));
    const std::array own{static_cast<scape::MaskWord>(hash.value()), static_cast<scape::MaskWord>(hash.value() >> 32)};
    monitor_.all_gather(own, all, context_.compute);
    context_.compute.synchronize();
    for (std::size_t rank = 1; 2 * rank < all.size(); ++rank)
      if (all[2 * rank] != all[0] || all[2 * rank + 1] != all[1])
        throw std::runtime_error("the parameters of rank " + std::to_string(rank) + " differ from those of rank 0");
    return hash.value();
  }

  const Options& options_;
  const Run& run_;
  const Text& text_;
  std::vector<std::uint8_t> validation_;
  std::mt19937_64 random_;
  Model model_;
  Communicator monitor_;
  RankContext<Communicator> context_;
  std::unique_ptr<Optimizer> optimizer_;
  double seconds_ = 0, timed_seconds_ = 0, other_seconds_ = 0;
  std::size_t timed_steps_ = 0, others_ = 0;
};

Result train_threads(const Options& options, const Run& run, const Text& text, Progress& progress) {
  using Rank = Rank<scape::ThreadCommunicator>;
  Team team(options.ranks);
  Result result;
  std::vector<std::thread> threads;
  for (int r = 0; r < options.ranks; ++r)
    threads.emplace_back([&, r] {
      std::optional<Rank> rank;  // lives until the team knows of a failure: the others must not be the first to tell
      try {
        use_one_thread_per_rank();
        rank.emplace(options, run, text, r, std::tie(std::as_const(team.training), std::as_const(r)),
                     std::tie(std::as_const(team.monitoring), std::as_const(r)));
        Result own = rank->train(r == 0 ? &progress : nullptr);
        if (r == 0) result = std::move(own);
      } catch (...) {
        team.fail(std::current_exception());
      }
    });
  for (std::thread& thread : threads) thread.join();
  team.rethrow_failure();
  return result;
}

Result train_process(const Options& options, const Run& run, const Text& text, Progress& progress) {
  use_one_thread_per_rank();
  int r = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &r);
  const std::tuple<MPI_Comm> world(MPI_COMM_WORLD);
  Rank<scape::MpiCommunicator> rank(options, run, text, r, world, world);
  return rank.train(r == 0 ? &progress : nullptr);
}

}  // namespace

Result train(const Options& options, const Run& run, const Text& text, Progress& progress) {
  return options.communicator == Ranks::mpi ? train_process(options, run, text, progress)
                                            : train_threads(options, run, text, progress);
}

}  // namespace pretrain
