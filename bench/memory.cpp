// Bytes that a rank holds and sends, for dense and sparse optimizers: measured for the model of examples/pretrain, with
// memory resources that count; computed by the formulas of docs/design.md for larger ones. Prints docs/memory.md's
// table.
#include <scape/bfloat16.hpp>
#include <scape/host/mapped_file.hpp>
#include <scape/scape.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

constexpr int ranks = 4;
constexpr double density = 0.01;

// The tensors of examples/pretrain: width 112, 3 layers, 256 bytes.
std::vector<scape::Tensor> tensors() {
  constexpr std::size_t width = 112, hidden = (width * 8 / 3 + 15) / 16 * 16;
  std::vector<scape::Tensor> list = {{256 * width}};
  for (int layer = 0; layer < 3; ++layer)
    for (const scape::Tensor& tensor : {scape::Tensor{width, true, false},
                                        {3 * width * width},
                                        {width * width},
                                        {width, true, false},
                                        {2 * hidden * width},
                                        {width * hidden}})
      list.push_back(tensor);
  list.push_back({width, true, false});
  list.push_back({256 * width});
  return list;
}

template <class Base>
class Counting : public Base {
 public:
  using Base::Base;
  void* allocate(std::size_t bytes, std::size_t alignment) {
    now_ += bytes;
    peak_ = std::max(peak_, now_);
    return Base::allocate(bytes, alignment);
  }
  void deallocate(void* pointer, std::size_t bytes, std::size_t alignment) noexcept {
    now_ -= bytes;
    Base::deallocate(pointer, bytes, alignment);
  }
  std::size_t peak() const { return peak_; }

 private:
  std::size_t now_ = 0, peak_ = 0;
};
using Memory = Counting<scape::HostMemory>;
using Files = Counting<scape::MappedFileMemory>;

struct Row {
  std::string name;
  double state = 0, outside = 0, peak = 0, sent = 0;  // bytes; peak: with gradients and parameters
};

// Trains a few steps and looks. G: gradients and parameters.
template <class G, class Rule, class Masters, class Residuals, class Make>
Row measured(const std::string& name, const scape::AdamSOptions& options, const Rule& rule, Masters masters, Make make,
             std::type_identity<Residuals>) {
  const scape::TensorLayout layout(tensors(), ranks);
  const scape::ThreadGroup group(ranks);
  Row row{name};
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      Memory memory;
      Files files(std::filesystem::temp_directory_path());
      scape::HostPool pool(1);
      const scape::HostStream compute(pool), side(pool);
      scape::ThreadCommunicator communicator(group, r);
      using Parameter = typename Masters::Parameter;
      const scape::Buffer<G, Memory> gradients(layout.size(), memory);
      const scape::Buffer<Parameter, Memory> parameters(layout.size(), memory);
      for (std::size_t i = 0; i < layout.size(); ++i) {
        gradients.span()[i] = G(std::sin(static_cast<float>(i * (static_cast<std::size_t>(r) + 1))));
        parameters.span()[i] = Parameter(1.0f);
      }
      scape::AdamS optimizer(layout, communicator, memory, compute, side, options, rule, masters, make(files));
      if constexpr (Masters::sharded) optimizer.load_masters(parameters.span(), compute);
      std::uint64_t sent = 0;
      for (int step = 0; step < 4; ++step) {
        const std::uint64_t before = communicator.bytes_sent();
        optimizer.step(gradients.span(), parameters.span(), compute);
        compute.synchronize();
        side.synchronize();
        sent = communicator.bytes_sent() - before;
      }
      const std::lock_guard lock(mutex);  // the largest of the ranks
      row.state = std::max(row.state, static_cast<double>(optimizer.state_bytes()));
      row.outside = std::max(row.outside, static_cast<double>(files.peak()));
      row.peak = std::max(row.peak, static_cast<double>(memory.peak()));
      row.sent = std::max(row.sent, static_cast<double>(sent));
    });
  for (std::thread& thread : threads) thread.join();
  return row;
}

Row adamw() {  // moments, gradient, parameters; all-reduce of the gradient
  double n = 0;
  for (const scape::Tensor& tensor : tensors()) n += static_cast<double>(tensor.size);
  return {"dense AdamW", 8 * n, 0, 16 * n, 2.0 * (ranks - 1) / ranks * 4 * n};
}

// ---- By formula, of n parameters on w ranks.

// A mask of d n of n elements, in bits an element: the shorter of bitmap and Elias-Fano code.
double mask_bits(double d) {
  const double low = std::floor(std::log2(1 / d));
  return d >= 1 ? 0 : std::min(1.0, d * low + d + std::exp2(-low));
}

Row computed(const std::string& name, double n, double w, double d, bool clock, bool sharded, bool outside,
             double payload, double parameter) {
  const double all = (w - 1) / w, masks = 2.0 / 8, kept = d * n;
  Row row{name};
  row.state = n * (masks + 40.0 / 4096 + 2 * 8.0 / 4096);
  (outside ? row.outside : row.state) += 4 * n;
  if (clock) row.state += 6 * n / (sharded ? w : 1);
  if (!clock && d < 1) row.state += 4 * kept;
  if (sharded) row.state += 4 * n / w;
  if (payload < 4) row.state += 4 * kept;
  double scratch = kept * 4 + n * 8 / 4096 + (clock ? 0 : 4 * kept);  // payload, norms, moments set aside
  if (d < 1) scratch += n / 8;                                        // codes
  if (payload < 4) scratch += 2 * payload * kept;
  if (sharded) scratch += parameter * kept;
  row.peak = row.state + scratch + 2 * parameter * n;
  row.sent = all * n * mask_bits(d) / 8 + all * kept * payload * (clock && sharded ? 1 : 2);
  if (sharded) row.sent += all * w * kept / w * parameter;
  return row;
}

std::vector<Row> computed_rows(double n, double w) {
  return {{"dense AdamW", 8 * n, 0, 16 * n, 2 * (w - 1) / w * 4 * n},
          computed("dense AdamS", n, w, 1, false, false, false, 4, 4),
          computed("replicated, 99%", n, w, density, true, false, false, 4, 4),
          computed("sharded, 99%", n, w, density, true, true, false, 4, 2),
          computed("sharded, offloaded, bfloat16 payload, 99%", n, w, density, true, true, true, 2, 2)};
}

std::string bytes_text(double bytes) {
  const char* const units[] = {"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  for (; bytes >= 999.5 && unit < 4; ++unit) bytes /= 1000;
  char text[32];
  std::snprintf(text, sizeof text, "%.3g %s", bytes, units[unit]);
  return text;
}

void print(const std::string& title, const std::vector<Row>& rows) {
  std::printf(
      "\n### %s\n\n| | state | of it elsewhere | peak, with parameters and gradients | sent a step | dense / sent |\n"
      "|---|---|---|---|---|---|\n",
      title.c_str());
  for (const Row& row : rows)
    std::printf("| %s | %s | %s | %s | %s | %.3g |\n", row.name.c_str(), bytes_text(row.state + row.outside).c_str(),
                row.outside == 0 ? "" : bytes_text(row.outside).c_str(), bytes_text(row.peak).c_str(),
                bytes_text(row.sent).c_str(), rows[0].sent / row.sent);
}

}  // namespace

int main() {
  using scape::bfloat16;
  const auto in_memory = [](Files&) { return scape::InMemory{}; };
  const auto in_files = [](Files& files) { return scape::Offloaded<Files>(files); };
  const std::type_identity<scape::InMemory> inside;
  const std::type_identity<scape::Offloaded<Files>> outside;
  scape::AdamSOptions dense, sparse{.density = density}, narrow = sparse;
  dense.compare_every = sparse.compare_every = narrow.compare_every = 0;
  narrow.payload = scape::PayloadFormat::bfloat16;
  const scape::ClockRule clock;
  double n = 0;
  for (const scape::Tensor& tensor : tensors()) n += static_cast<double>(tensor.size);
  print("Measured: 515,088 parameters on 4 ranks",
        {adamw(), measured<float>("dense AdamS", dense, scape::ScapeRule{}, scape::Replicated{}, in_memory, inside),
         measured<float>("replicated, 99%", sparse, clock, scape::Replicated{}, in_memory, inside),
         measured<bfloat16>("sharded, 99%", sparse, clock, scape::Sharded<bfloat16>{}, in_memory, inside),
         measured<bfloat16>("sharded, offloaded, bfloat16 payload, 99%", narrow, clock, scape::Sharded<bfloat16>{},
                            in_files, outside)});
  print("Computed: the same", computed_rows(n, ranks));
  for (const auto& [size, name] : {std::pair(0.5e9, "0.5B"), {1.8e9, "1.8B"}, {70e9, "70B"}})
    print(std::string("Computed: ") + name + " parameters on 64 ranks", computed_rows(size, 64));
}
