#include "report.hpp"

#include "format.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace pretrain {
namespace {

using Json = nlohmann::ordered_json;

const Result* find(const std::vector<Result>& results, Method method) {
  const auto found =
      std::find_if(results.begin(), results.end(), [&](const Result& r) { return r.run.method == method; });
  return found == results.end() ? nullptr : &*found;
}

// What the rows are compared with: the loss of dense AdamS, the bytes of any dense run.
struct Baseline {
  explicit Baseline(const std::vector<Result>& results) {
    const Result* const adams = find(results, Method::adams);
    const Result* const dense = adams != nullptr ? adams : find(results, Method::adamw);
    if (adams != nullptr) loss = adams->validation_loss();
    if (dense != nullptr && dense->step_bytes > 0) bytes = static_cast<double>(dense->step_bytes);
  }
  std::optional<double> difference(double other) const { return loss ? std::optional(other - *loss) : std::nullopt; }
  std::optional<double> ratio(double other) const { return bytes ? std::optional(*bytes / other) : std::nullopt; }

  std::optional<double> loss, bytes;
};

Json number(std::optional<double> value) { return value ? Json(*value) : Json(nullptr); }

std::string hexadecimal(std::uint64_t value) {
  std::ostringstream text;
  text << std::hex << std::setw(16) << std::setfill('0') << value;
  return text.str();
}

Json row(const Result& result, const Baseline& baseline) {
  Json row = {
      {"optimizer", result.run.optimizer()},
      {"sparsity", result.run.sparsity},
      {"learning_rate", result.run.learning_rate},
      {"validation_loss", result.validation_loss()},
      {"difference_to_adams", number(baseline.difference(result.validation_loss()))},
      {"mask_bytes_per_step", result.mask_bytes},
      {"payload_bytes_per_step", result.payload_bytes},
      {"bytes_per_step", result.step_bytes},
      {"dense_bytes_over_these", number(baseline.ratio(static_cast<double>(result.step_bytes)))},
      {"mean_bytes_per_step_of_the_run", result.mean_step_bytes()},
      {"dense_bytes_over_those_of_the_run", number(baseline.ratio(result.mean_step_bytes()))},
  };
  row["step_seconds"] = result.step_seconds;
  row["interface_bytes_per_step"] = result.interface_bytes;
  row["parameters"] = hexadecimal(result.fingerprint);
  for (const Phase& phase : phases) {
    std::string key = phase.name + std::string("_seconds");
    std::replace(key.begin(), key.end(), ' ', '_');
    row[key] = result.times.*phase.seconds;
  }
  return row;
}

Json curve_row(const Options& options, const Run& run, const CurvePoint& point) {
  const double transfer = static_cast<double>(point.bytes) * 8 / (options.rate * 1e6);
  return {
      {"run", run.label()},
      {"step", point.step},
      {"training_loss", point.training_loss},
      {"validation_loss", point.validation_loss},
      {"bytes_sent_per_rank", point.bytes},
      {"seconds", point.seconds},
      {"seconds_on_the_link", point.seconds + transfer},
  };
}

Json settings(const Options& options) {
  return {
      {"width", options.shape.width},
      {"layers", options.shape.layers},
      {"heads", options.shape.heads},
      {"context", options.shape.context},
      {"communicator", options.communicator == Ranks::mpi ? "mpi" : "threads"},
      {"ranks", options.ranks},
      {"sequences_per_rank", options.batch},
      {"steps", options.steps},
      {"lr_warmup", options.lr_warmup},
      {"lr_final", options.lr_final},
      {"density_warmup", options.density_warmup},
      {"weight_decay", options.weight_decay},
      {"clip", options.clip_norm},
      {"beta1", options.beta1},
      {"beta2", options.beta2},
      {"delay", options.delay},
      {"payload", scape::name_of(options.payload)},
      {"cap", options.cap},
      {"scope", options.select_per_shard ? "shard" : "tensor"},
      {"score", options.score_after_update ? "updated" : "corrected"},
      {"seed", options.seed},
      {"text", options.text.filename().string()},
      {"rate_in_mbit_per_second", options.rate},
  };
}

std::ofstream create(const std::filesystem::path& path) {
  std::ofstream file(path);
  if (!file) throw std::runtime_error("cannot write " + path.string());
  return file;
}

// A list of objects with equal keys.
void write_csv(const std::filesystem::path& path, const Json& rows) {
  std::ofstream file = create(path);
  const auto line = [&](auto&& field) {
    for (const auto& [key, value] : rows.front().items())
      file << (key == rows.front().begin().key() ? "" : ",") << field(key);
    file << '\n';
  };
  line([](const std::string& key) { return key; });
  for (const Json& row : rows)
    line([&](const std::string& key) {
      const Json& value = row.at(key);
      return value.is_null() ? std::string() : value.is_string() ? value.get<std::string>() : value.dump();
    });
}

void draw(const Options& options) {
  const auto quoted = [](const std::string& text) {
    std::string out = "'";
    for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
    return out + "'";
  };
  const std::string command = "cd " + quoted(options.output.string()) + " && gnuplot -c " + quoted(PRETRAIN_PLOT) +
                              " " + fixed(options.rate, 0);
  if (std::system(command.c_str()) != 0) std::cerr << "No pictures: is gnuplot installed?\n";
}

using Row = std::vector<std::string>;

// The first column to the left, the others to the right.
void print_aligned(const std::vector<Row>& rows) {
  std::vector<std::size_t> widths(rows.front().size());
  for (const Row& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i)
      std::cout << (i == 0 ? std::left : std::right) << std::setw(static_cast<int>(widths[i])) << row[i]
                << (i + 1 < row.size() ? "  " : "\n");
  }
}

std::string or_dash(std::optional<double> value, int digits) { return value ? fixed(*value, digits) : "-"; }

}  // namespace

void print_table(const std::vector<Result>& results) {
  const Baseline baseline(results);
  std::vector<Row> traffic = {{"", "validation", "to dense", "mask", "payload", "sent", "dense /", "dense / sent"},
                              {"optimizer", "loss", "adams", "a step", "a step", "a step", "sent", "in whole run"}};
  std::vector<Row> times = {{"ms a step"}};
  for (const Phase& phase : phases) times[0].push_back(phase.name);
  times[0].push_back("all");
  for (const Result& result : results) {
    traffic.push_back(
        {result.run.label(), fixed(result.validation_loss(), 4),
         or_dash(baseline.difference(result.validation_loss()), 4), bytes_text(static_cast<double>(result.mask_bytes)),
         bytes_text(static_cast<double>(result.payload_bytes)), bytes_text(static_cast<double>(result.step_bytes)),
         or_dash(baseline.ratio(static_cast<double>(result.step_bytes)), 1),
         or_dash(baseline.ratio(result.mean_step_bytes()), 1)});
    Row row = {result.run.label()};
    double all = 0;
    for (const Phase& phase : phases) {
      row.push_back(fixed(1e3 * result.times.*phase.seconds, 2));
      all += result.times.*phase.seconds;
    }
    row.push_back(fixed(1e3 * all, 2));
    times.push_back(row);
  }
  std::cout << "\nBytes are those a rank sent, by its communicator's count; a step is the last one.\n\n";
  print_aligned(traffic);
  std::cout << '\n';
  print_aligned(times);
}

void write_files(const Options& options, const std::vector<Result>& results) {
  const Baseline baseline(results);
  Json table = Json::array(), curves = Json::array();
  for (const Result& result : results) {
    table.push_back(row(result, baseline));
    for (const CurvePoint& point : result.curve) curves.push_back(curve_row(options, result.run, point));
  }
  std::filesystem::create_directories(options.output);
  write_csv(options.output / "table.csv", table);
  write_csv(options.output / "curves.csv", curves);
  create(options.output / "table.json") << Json{{"settings", settings(options)}, {"runs", table}}.dump(2) << '\n';
  draw(options);
  std::cout << "\nTables, curves and pictures are in " << options.output.string() << '\n';
}

}  // namespace pretrain
