#include "options.hpp"

#include <CLI/CLI.hpp>

#include <cmath>
#include <cstdlib>
#include <map>
#include <sstream>
#include <utility>

namespace pretrain {
namespace {

const std::map<std::string, Method> methods = {
    {"adamw", Method::adamw}, {"adams", Method::adams}, {"scape", Method::scape}, {"clock", Method::clock}};

const std::map<std::string, Ranks> kinds_of_ranks = {{"threads", Ranks::threads}, {"mpi", Ranks::mpi}};
const std::map<std::string, scape::MaskCoding> codings = {{"automatic", scape::MaskCoding::automatic},
                                                          {"bitmap", scape::MaskCoding::bitmap},
                                                          {"elias-fano", scape::MaskCoding::elias_fano}};
const std::map<std::string, scape::PayloadFormat> formats = {{"float32", scape::PayloadFormat::float32},
                                                             {"bfloat16", scape::PayloadFormat::bfloat16},
                                                             {"e5m2", scape::PayloadFormat::e5m2},
                                                             {"e4m3", scape::PayloadFormat::e4m3}};

// Peaks by optimizer: one for all sparsities, or one for each.
using LearningRates = std::map<std::string, std::vector<double>>;

// What the optimizer is trained at: the dense ones once.
std::vector<double> sparsities_of(const std::string& optimizer, const std::vector<double>& sparsities) {
  const Method method = methods.at(optimizer);
  return method == Method::scape || method == Method::clock ? sparsities : std::vector<double>{0};
}

std::vector<Run> list_runs(const std::vector<std::string>& optimizers, const std::vector<double>& sparsities,
                           const LearningRates& learning_rates) {
  std::vector<Run> runs;
  for (const std::string& optimizer : optimizers) {
    const std::vector<double>& rates = learning_rates.at(optimizer);
    for (std::size_t i = 0; const double sparsity : sparsities_of(optimizer, sparsities))
      runs.push_back({methods.at(optimizer), sparsity, rates[rates.size() == 1 ? 0 : i++]});
  }
  return runs;
}

// Accepts the numbers from `low` to `high`; `words` says so to people.
CLI::Validator number(double low, double high, const std::string& words) {
  const auto check = [=](const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool holds = !text.empty() && *end == '\0' && value >= low && value <= high;
    return holds ? std::string() : "must be " + words + ", not " + text;
  };
  return CLI::Validator(check, words);
}

template <class... Parts>
std::string concatenated(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

void check(const Options& options, const std::vector<double>& sparsities, const LearningRates& rates) {
  const ModelShape& shape = options.shape;
  if (shape.width % (2 * shape.heads) != 0)
    throw CLI::ValidationError("--width",
                               concatenated(shape.width, " is not a multiple of twice --heads, ", 2 * shape.heads));
  for (const auto& [optimizer, list] : rates) {
    const std::size_t runs = sparsities_of(optimizer, sparsities).size();
    if (list.size() != 1 && list.size() != runs)
      throw CLI::ValidationError(
          "--lr-" + optimizer,
          concatenated("must be one value", runs > 1 ? ", or one for each sparsity" : "", ", not ", list.size()));
  }
}

}  // namespace

std::string Run::optimizer() const {
  for (const auto& [name, value] : methods)
    if (value == method) return name;
  return {};
}

std::string Run::label() const {
  return sparsity == 0 ? optimizer() : concatenated(optimizer(), '-', 100 * sparsity, '%');
}

Options parse_options(int argc, char** argv) {
  Options options;
  LearningRates rates = {
      {"adamw", {4e-3}}, {"adams", {1e-3}}, {"scape", {2e-3}}, {"clock", {1e-3}}};  // sweep.sh's best
  std::vector<std::string> optimizers = {"adamw", "adams", "scape", "clock"};
  std::vector<double> sparsities = {0.9, 0.99};
  double density_warmup = 0.3;
  std::string scope = "tensor", score = "corrected", communicator = "threads", coding = "automatic",
              payload = "float32";

  const CLI::Validator count = number(1, 1e9, "1 or more"), at_least_zero = number(0, 1e9, "0 or more");
  const CLI::Validator positive = number(1e-9, 1e9, "above 0"), share = number(0, 1, "0 to 1");
  const CLI::Validator below_one = number(0, std::nexttoward(1.0, 0.0), "0 to below 1");

  CLI::App app("Trains one model from one start with several optimizers, on data-parallel ranks, and compares them.");
  app.option_defaults()->always_capture_default();
  app.get_formatter()->column_width(46);
  const auto add = [&](const char* group, const char* name, auto& value, const char* description) {
    return app.add_option(name, value, description)->group(group);
  };

  add("Data", "--text", options.text, "File to train on; its last 5% are held out")
      ->required()
      ->take_last()
      ->check(CLI::ExistingFile);
  add("Data", "--seed", options.seed, "Of the parameters and of the data's order")->check(number(0, 1e18, "0 or more"));

  add("Model", "--width", options.shape.width, "Width of the residual stream")->check(count);
  add("Model", "--layers", options.shape.layers, "Layers")->check(count);
  add("Model", "--heads", options.shape.heads, "Attention heads of a layer")->check(count);
  add("Model", "--context", options.shape.context, "Bytes of a sequence")->check(count);

  add("Training", "--communicator", communicator, "What ranks are: threads, or the processes that mpirun starts")
      ->check(CLI::IsMember(kinds_of_ranks));
  add("Training", "--ranks", options.ranks, "Ranks; 0: four threads, or all processes")
      ->check(number(0, 256, "0 to 256"));
  add("Training", "--batch", options.batch, "Sequences per rank and step")->check(count);
  add("Training", "--steps", options.steps, "Steps of each run")->check(count);
  add("Training", "--optimizers", optimizers, "Which to run, in this order")->check(CLI::IsMember(methods));
  add("Training", "--sparsity", sparsities, "For scape and clock: what share of the parameters is not sent")
      ->check(below_one);
  add("Training", "--density-warmup", density_warmup,
      "Steps in which the density falls from 1 to its final value; below 1: a share of --steps")
      ->check(at_least_zero);
  add("Training", "--delay", options.delay, "Steps between making a mask and using it")
      ->check(number(1, 1000, "1 to 1000"));
  add("Training", "--cap", options.cap, "For clock: the most learning rates that an element moves at once")
      ->check(number(1, 49151, "1 to 49151"));
  add("Training", "--scope", scope, "Who competes for the payload: a tensor's elements, or all of a rank's shard")
      ->check(CLI::IsMember({"tensor", "shard"}));
  add("Training", "--score", score, "For scape: what elements are ranked by, before or after the update")
      ->check(CLI::IsMember({"corrected", "updated"}));

  add("Training", "--mask-coding", coding, "How masks travel")->check(CLI::IsMember(codings));
  add("Training", "--payload", payload, "For scape and clock: as what kept gradients travel")
      ->check(CLI::IsMember(formats));

  app.add_flag("--sharded", options.sharded,
               "For AdamS: masters in float32 with their owner only; parameters held and sent as bfloat16")
      ->group("Training");
  app.add_flag("--overlap", options.overlap, "For AdamS: gradients leave, bucket by bucket, while backward runs")
      ->group("Training");
  add("Training", "--buckets", options.buckets, "Of --overlap, about")->check(count);
  add("Training", "--offload", options.offload, "Keep residuals in temporary files in this folder, not in memory")
      ->check(CLI::ExistingDirectory);

  for (auto& [optimizer, list] : rates)
    add("Optimizer", ("--lr-" + optimizer).c_str(), list, "Peak learning rate: one for all sparsities, or one for each")
        ->check(positive);
  add("Optimizer", "--lr-warmup", options.lr_warmup, "Steps in which the learning rate rises to its peak")
      ->check(at_least_zero);
  add("Optimizer", "--lr-final", options.lr_final, "Where the cosine ends, as a share of the peak; 1: constant")
      ->check(share);
  add("Optimizer", "--weight-decay", options.weight_decay, "Decoupled; norms have none")->check(at_least_zero);
  add("Optimizer", "--clip", options.clip_norm, "Largest norm of a gradient; 0: none")->check(at_least_zero);
  add("Optimizer", "--beta1", options.beta1, "Decay of the first moment")->check(below_one);
  add("Optimizer", "--beta2", options.beta2, "Decay of the second moment")->check(below_one);

  add("Report", "--output", options.output, "Folder for tables, curves and pictures")->take_last();
  add("Report", "--eval-every", options.eval_every, "Steps between validations")->check(count);
  add("Report", "--eval-windows", options.eval_windows, "Most sequences in a validation")->check(count);
  add("Report", "--rate", options.rate, "Mbit/s of the link for which loss is drawn against time")->check(positive);
  add("Report", "--skip-steps", options.skip_steps, "Steps at the start that times and bytes of a step leave out")
      ->check(at_least_zero);
  add("Report", "--report-every", options.report_every, "Steps between those whose phases are timed; others are faster")
      ->check(count);
  add("Report", "--interface", options.interface, "Network interface whose bytes are counted too, as lo");
  app.add_flag("--quiet", options.quiet, "Show the table only")->group("Report");

  try {
    app.parse(argc, argv);
    check(options, sparsities, rates);
  } catch (const CLI::Error& error) {
    std::exit(app.exit(error));
  }
  options.density_warmup = static_cast<std::size_t>(
      std::lround(density_warmup < 1 ? density_warmup * static_cast<double>(options.steps) : density_warmup));
  options.select_per_shard = scope == "shard";
  options.score_after_update = score == "updated";
  options.communicator = kinds_of_ranks.at(communicator);
  options.mask_coding = codings.at(coding);
  options.payload = formats.at(payload);
  options.runs = list_runs(optimizers, sparsities, rates);
  return options;
}

}  // namespace pretrain
