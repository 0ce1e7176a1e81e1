// Prints a hash of what both rules compute on random data. Every build of it must print the same.
#include <scape/scape.hpp>

#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <thread>
#include <vector>

// Two ranks, so that masks are coded and payloads averaged; the hash is the first's.
template <class Rule>
static std::uint64_t train(const scape::ThreadGroup& group, int rank, const Rule& rule) {
  scape::ThreadCommunicator communicator(group, rank);
  scape::HostMemory memory;
  scape::HostPool pool(2);
  scape::HostStream compute(pool), side(pool);
  const scape::FlatLayout layout(40001, 2);
  scape::AdamS optimizer(
      layout, communicator, memory, compute, side,
      {.learning_rate = 0.01f, .weight_decay = 0.1f, .clip_norm = 1, .density = 0.05, .density_warmup = 10}, rule);
  std::vector<float> parameters(layout.size(), 1.0f), gradients(layout.size());
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  for (int step = 0; step < 40; ++step) {
    for (float& value : gradients) value = static_cast<float>(random()) / 4294967296.0f - 0.5f;
    optimizer.step(gradients, parameters, compute);
    compute.synchronize();
  }
  const std::span<const float> store = optimizer.store(compute);
  compute.synchronize();
  scape::Fingerprint print;
  for (const float value : parameters) print.add(std::uint64_t{scape::bits_of(value)});
  for (const float value : store) print.add(std::uint64_t{scape::bits_of(value)});
  return print.value();
}

template <class Rule>
static std::uint64_t train(const Rule& rule) {
  const scape::ThreadGroup group(2);
  std::thread second([&] { train(group, 1, rule); });
  const std::uint64_t print = train(group, 0, rule);
  second.join();
  return print;
}

int main() {
  std::printf("%016llx %016llx\n", static_cast<unsigned long long>(train(scape::ScapeRule{})),
              static_cast<unsigned long long>(train(scape::ClockRule{})));
}
