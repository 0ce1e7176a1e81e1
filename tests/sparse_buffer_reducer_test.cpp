// SparseBufferReducer: values at a mask to one payload, its mean over the ranks, and back.

#include "narrow_reference.hpp"
#include "ranks.hpp"
#include "support.hpp"

#include <scape/layout.hpp>
#include <scape/mask_plan.hpp>
#include <scape/plan_tables.hpp>
#include <scape/sparse_buffer_reducer.hpp>

#include <scape/host/pack.hpp>
#include <scape/host/payload.hpp>
#include <scape/host/update.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using scape::MaskPlan;
using scape::MaskWord;
using scape::PayloadFormat;
using scape::Segment;
using scape::SparseBufferReducer;

constexpr float untouched = -77;

// Segments of all kinds in an order that is not the owners'; some ranks may own nothing.
ListLayout mixed_layout(int ranks) {
  ListLayout layout{{}, ranks};
  layout.add(100, 1);
  layout.add(7, 0, true);
  layout.add(5000, 0);
  layout.add(0, 1);
  layout.add(33, 4, true);
  layout.add(1, 1);
  layout.add(4096, 5);
  return layout;
}

// Whether an element is kept: of 1000, `share`; in dense segments all.
bool kept(const Segment& segment, std::size_t element, std::uint32_t share) {
  return segment.dense || random_bits(element + 12345) % 1000 < share;
}

// The same, laid out by hand: bits, kept elements in payload order, and by rank how many of them.
struct Drawn {
  Words words;
  Counts elements, by_rank;

  Drawn(const MaskPlan& plan, std::uint32_t share)
      : words(plan.words()), by_rank(static_cast<std::size_t>(plan.ranks())) {
    for (const scape::Tile& tile : plan.tiles()) {
      const Segment& segment = plan.segments()[tile.segment];
      for (std::size_t i = 0; i < tile.count; ++i) {
        if (!kept(segment, tile.element + i, share)) continue;
        words[(tile.bit + i) / 32] |= MaskWord{1} << (tile.bit + i) % 32;
        elements.push_back(tile.element + i);
        ++by_rank[static_cast<std::size_t>(segment.owner)];
      }
    }
  }
};

// A drawn mask in the stream's memory. Its payload is packed, or padded where a stride is given.
template <class Backend>
class Mask {
 public:
  Mask(Backend& backend, const MaskPlan& plan, const Drawn& drawn, std::size_t stride = 0)
      : tables_(plan, backend.memory, backend.stream),
        words_(backend.array(drawn.words)),
        offsets_(plan.tiles().size(), backend.memory),
        kept_(stride == 0 ? drawn.elements.size() : stride * drawn.by_rank.size()) {
    count_offsets(tables_.view(), words_.span(), stride, offsets_.span(), backend.stream);
    backend.stream.synchronize();
  }
  scape::MaskView view() const { return {tables_.view(), words_.span(), offsets_.span(), kept_}; }

 private:
  scape::PlanTables<std::remove_cvref_t<decltype(std::declval<Backend&>().memory)>> tables_;
  typename Backend::template Array<MaskWord> words_;
  typename Backend::template Array<std::size_t> offsets_;
  std::size_t kept_;
};

template <class Backend>
auto reducer_of(Backend& backend, std::size_t capacity) {
  using Memory = std::remove_cvref_t<decltype(backend.memory)>;
  return SparseBufferReducer<typename Backend::Stream, Memory>(capacity, backend.memory);
}

template <class Backend>
auto reducer_of(Backend& backend, std::size_t capacity, PayloadFormat format, int ranks) {
  using Memory = std::remove_cvref_t<decltype(backend.memory)>;
  return SparseBufferReducer<typename Backend::Stream, Memory>(capacity, format, ranks, backend.memory);
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, {}, std::bit_cast<std::uint32_t, float>, std::bit_cast<std::uint32_t, float>);
}

Floats at(const Floats& values, const Counts& elements) {
  Floats result;
  for (const std::size_t element : elements) result.push_back(values[element]);
  return result;
}

template <class Backend>
Floats read(Backend& backend, std::span<const float> from) {
  Floats values(from.size());
  scape::copy_values(from, std::span<float>(values), backend.stream);
  backend.stream.synchronize();
  return values;
}

// The mean of the ranks' values at the mask, in the order of the ranks.
Floats mean_at(std::size_t ranks, std::size_t size, const Counts& elements) {
  Floats sum = at(floats_of(0, size), elements);
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    const Floats values = at(floats_of(rank, size), elements);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  }
  for (float& value : sum) value /= static_cast<float>(ranks);
  return sum;
}

constexpr PayloadFormat low_formats[] = {PayloadFormat::bfloat16, PayloadFormat::e5m2, PayloadFormat::e4m3};

// A mask that keeps all of `size` elements.
MaskPlan dense_plan(std::size_t size, int ranks) {
  ListLayout layout{{}, ranks};
  layout.add(size, 0, true);
  return MaskPlan(layout);
}

// What a rank sends: many magnitudes, some values that are no finite numbers, or so large that four-fold they are not.
Floats sent_by(std::size_t rank, std::size_t count, int kind) {
  Floats values = floats_of(rank, count);
  for (std::size_t i = 0; i < count; ++i) {
    if (kind == 1 && i % 41 == rank) values[i] = i % 2 == 0 ? std::numeric_limits<float>::infinity() : std::nanf("");
    if (kind == 1 && i % 50 == 7) values[i] = (rank % 2 == 0 ? 1 : -1) * std::numeric_limits<float>::infinity();
    if (kind == 2) values[i] = std::ldexp(values[i], i / 100 % 2 == 0 ? 120 : -140);
    if (kind == 3) values[i] = i % 3 == 0 ? 0.0f : -0.7f;
  }
  return values;
}

constexpr std::uint32_t shares[] = {0, 1, 10, 250, 999, 1000};

}  // namespace

TEST_CASE_TEMPLATE("gather and scatter: the kept elements, at their places, and no others", Backend, SCAPE_BACKENDS) {
  Backend backend;
  for (const int ranks : {1, 3, 8})
    for (const bool exact : {false, true})
      for (const std::uint32_t share : shares) {
        CAPTURE(ranks);
        CAPTURE(exact);
        CAPTURE(share);
        const MaskPlan plan(mixed_layout(ranks), exact);
        const Drawn drawn(plan, share);
        const Mask<Backend> mask(backend, plan, drawn);
        const Floats values = floats_of(3, plan.size());
        const auto reducer = reducer_of(backend, drawn.elements.size() + 3);
        CHECK(reducer.capacity() == drawn.elements.size() + 3);
        CHECK(reducer.payload(mask.view()).size() == drawn.elements.size());

        const auto from = backend.array(values);
        reducer.gather(from.span(), mask.view(), backend.stream);
        CHECK(same_bits(read(backend, reducer.payload(mask.view())), at(values, drawn.elements)));

        const auto to = backend.array(Floats(plan.size(), untouched));
        reducer.scatter(mask.view(), to.span(), backend.stream);
        Floats expected(plan.size(), untouched);
        for (const std::size_t element : drawn.elements) expected[element] = values[element];
        CHECK(same_bits(backend.read(to), expected));
      }
}

TEST_CASE_TEMPLATE("a mask without elements, and a layout without", Backend, SCAPE_BACKENDS) {
  Backend backend;
  for (const ListLayout& layout :
       {ListLayout{{}, 2}, ListLayout{{{0, 0, 1}, {0, 0, 0, true}}, 2}, ListLayout{{{0, 100, 1}}, 2}}) {
    const MaskPlan plan(layout);
    const Drawn drawn(plan, 0);
    const Mask<Backend> mask(backend, plan, drawn);
    const auto reducer = reducer_of(backend, 0);
    const auto values = backend.array(Floats(plan.size(), untouched));
    reducer.gather(values.span(), mask.view(), backend.stream);
    reducer.scatter(mask.view(), values.span(), backend.stream);
    CHECK(reducer.payload(mask.view()).empty());
    CHECK(backend.read(values) == Floats(plan.size(), untouched));
  }
}

TEST_CASE_TEMPLATE("a mask that keeps more than the capacity is refused before anything is touched", Backend,
                   SCAPE_BACKENDS) {
  Backend backend;
  const MaskPlan plan(mixed_layout(2));
  const Drawn drawn(plan, 100);
  const Mask<Backend> mask(backend, plan, drawn);
  const auto reducer = reducer_of(backend, drawn.elements.size() - 1);
  const auto values = backend.array(Floats(plan.size(), untouched));
  const std::string expected = "mask.kept is " + std::to_string(drawn.elements.size()) + ":";
  CHECK(message_of([&] { reducer.payload(mask.view()); }).starts_with(expected));
  CHECK(message_of([&] { reducer.gather(values.span(), mask.view(), backend.stream); }).starts_with(expected));
  CHECK(message_of([&] { reducer.scatter(mask.view(), values.span(), backend.stream); }).starts_with(expected));
  CHECK(backend.read(values) == Floats(plan.size(), untouched));
}

TEST_CASE("reduce: the mean at the mask in one collective, the documented bytes; off the mask nothing moves") {
  for (const int world : worlds)
    for (const std::uint32_t share : {0u, 100u, 1000u}) {
      CAPTURE(world);
      CAPTURE(share);
      const MaskPlan plan(mixed_layout(world));
      const Drawn drawn(plan, share);
      const Floats mean = mean_at(static_cast<std::size_t>(world), plan.size(), drawn.elements);
      run_ranks(world, [&](auto& rank) {
        const std::size_t me = static_cast<std::size_t>(rank.rank());
        const Mask mask(rank.backend, plan, drawn);
        auto reducer = reducer_of(rank.backend, drawn.elements.size());
        const Floats mine = floats_of(me, plan.size());
        const auto values = rank.backend.array(mine);
        reducer.gather(values.span(), mask.view(), rank.compute);
        reducer.reduce(mask.view(), rank.communicator, rank.compute, rank.side);
        reducer.wait(rank.compute);
        reducer.scatter(mask.view(), values.span(), rank.compute);
        rank.compute.synchronize();
        CHECK(same_bits(read(rank.backend, reducer.payload(mask.view())), mean));
        Floats expected = mine;
        for (std::size_t i = 0; i < mean.size(); ++i) expected[drawn.elements[i]] = mean[i];
        CHECK(same_bits(rank.backend.read(values), expected));
        const std::size_t ranks = static_cast<std::size_t>(world), size = mean.size();
        const std::size_t slice = size / ranks + (me < size % ranks);
        CHECK(rank.communicator.bytes_sent() == (size - slice + (ranks - 1) * slice) * 4);
      });
    }
}

TEST_CASE("reduce_scatter: every owner has its part of what reduce gives, bit for bit, for half the bytes") {
  for (const int world : worlds)
    for (const std::uint32_t share : {0u, 100u, 1000u})
      for (const std::size_t padding : Counts{0, 3}) {
        CAPTURE(world);
        CAPTURE(share);
        CAPTURE(padding);
        const MaskPlan plan(mixed_layout(world));
        const Drawn drawn(plan, share);
        const Floats mean = mean_at(static_cast<std::size_t>(world), plan.size(), drawn.elements);
        const std::size_t stride = *std::max_element(drawn.by_rank.begin(), drawn.by_rank.end()) + padding;
        run_ranks(world, [&](auto& rank) {
          const std::size_t me = static_cast<std::size_t>(rank.rank()), ranks = static_cast<std::size_t>(world);
          const Mask mask(rank.backend, plan, drawn, stride);
          auto reducer = reducer_of(rank.backend, stride * ranks);
          scape::fill_values(reducer.payload(mask.view()), 0.0f, rank.compute);
          const auto values = rank.backend.array(floats_of(me, plan.size()));
          const auto own = rank.backend.array(Floats(stride, untouched));
          reducer.gather(values.span(), mask.view(), rank.compute);
          reducer.reduce_scatter({0, ranks * stride, stride}, own.span(), rank.communicator, rank.compute, rank.side);
          reducer.wait(rank.compute);
          rank.compute.synchronize();
          std::size_t begin = 0;
          for (std::size_t other = 0; other < me; ++other) begin += drawn.by_rank[other];
          const Floats part = rank.backend.read(own);
          CHECK(same_bits(std::span(part).first(drawn.by_rank[me]), std::span(mean).subspan(begin, drawn.by_rank[me])));
          CHECK(std::all_of(part.begin() + static_cast<std::ptrdiff_t>(drawn.by_rank[me]), part.end(),
                            [](float x) { return x == 0; }));
          CHECK(rank.communicator.bytes_sent() == (ranks - 1) * stride * 4);
        });
      }
}

TEST_CASE("reduce_scatter refuses a stride that does not fit") {
  run_ranks(2, [](auto& rank) {
    auto reducer = reducer_of(rank.backend, 10);
    const auto own = rank.backend.array(Floats(8, untouched));
    const auto refusal = [&](std::size_t stride, std::size_t size) {
      return message_of([&] {
        reducer.reduce_scatter({0, 2 * stride, stride}, own.span().first(size), rank.communicator, rank.compute,
                               rank.side);
      });
    };
    CHECK(refusal(6, 6).starts_with("part.count is 12:"));
    CHECK(refusal(5, 4).starts_with("own.size() is 4:"));
    CHECK(refusal((~std::size_t{0} >> 1) + 3, 2) != "nothing was thrown");  // twice as much is 4
    CHECK(rank.communicator.bytes_sent() == 0);
  });
}

TEST_CASE("between reduce and wait compute goes on; from wait on it has the mean; many rounds in one buffer") {
  const MaskPlan plan(mixed_layout(3));
  const Drawn drawn(plan, 300);
  const Floats mean = mean_at(3, plan.size(), drawn.elements);
  run_ranks(3, [&](auto& rank) {
    const Mask mask(rank.backend, plan, drawn);
    auto reducer = reducer_of(rank.backend, drawn.elements.size());
    const auto values = rank.backend.array(floats_of(static_cast<std::size_t>(rank.rank()), plan.size()));
    const auto results = rank.backend.array(Floats(plan.size(), untouched));
    reducer.wait(rank.compute);  // nothing has been reduced yet
    for (int round = 0; round < 20; ++round) {
      typename std::remove_cvref_t<decltype(rank)>::Hold hold(rank.side);
      reducer.gather(values.span(), mask.view(), rank.compute);
      reducer.reduce(mask.view(), rank.communicator, rank.compute, rank.side);
      rank.compute.synchronize();  // would never end if compute waited for the collective
      hold.release();
      reducer.wait(rank.compute);
      reducer.scatter(mask.view(), results.span(), rank.compute);
    }
    rank.compute.synchronize();
    CHECK(same_bits(at(rank.backend.read(results), drawn.elements), mean));
  });
}

TEST_CASE("low formats: mean and errors are those of the definition, bit for bit, for the documented bytes") {
  for (const PayloadFormat format : low_formats)
    for (const int world : {1, 2, 3, 5})
      for (const std::size_t size : Counts{0, 1, 31, 33, 127, 128, 129, 511, 512, 513, 5000})
        for (const int kind : {0, 1, 2, 3}) {
          const std::size_t ranks = static_cast<std::size_t>(world);
          CAPTURE(std::string(name_of(format)));
          CAPTURE(world);
          CAPTURE(size);
          CAPTURE(kind);
          const MaskPlan plan = dense_plan(size, world);
          const Drawn drawn(plan, 1000);
          std::vector<Floats> sent;
          for (std::size_t rank = 0; rank < ranks; ++rank) sent.push_back(sent_by(rank, size, kind));
          const Reduced expected = reduced(format, sent);
          run_ranks(
              world,
              [&](auto& rank) {
                const std::size_t me = static_cast<std::size_t>(rank.rank());
                const Mask mask(rank.backend, plan, drawn);
                auto reducer = reducer_of(rank.backend, size, format, world);
                const auto values = rank.backend.array(sent[me]);
                reducer.gather(values.span(), mask.view(), rank.compute);
                reducer.reduce(mask.view(), rank.communicator, rank.compute, rank.side);
                reducer.wait(rank.compute);
                rank.compute.synchronize();
                CHECK(same_bits(read(rank.backend, reducer.payload(mask.view())), expected.mean));
                CHECK(same_bits(read(rank.backend, reducer.errors(mask.view())), expected.errors[me]));
                CHECK(rank.communicator.bytes_sent() == 2 * (ranks - 1) * code_bytes(format, size, ranks) / ranks);
                CHECK(reducer.workspace_bytes() == 4 * size + 2 * code_bytes(format, size, ranks));
                CHECK(reducer.state_bytes() == 4 * size);
              },
              3);
        }
}

// Strides of a few values and of several blocks; padding and other ranks' parts, which do not travel back, show too.
TEST_CASE("low formats: reduce_scatter's mean and errors are those of the definition, for the documented bytes") {
  for (const PayloadFormat format : low_formats)
    for (const int world : {1, 2, 3, 5})
      for (const std::size_t stride : Counts{0, 1, 31, 33, 127, 130, 511, 512, 513, 1026})
        for (const int kind : {0, 1, 2, 3}) {
          const bool in_place = (kind + static_cast<int>(stride)) % 2 == 0;
          const std::size_t ranks = static_cast<std::size_t>(world), size = stride * ranks;
          CAPTURE(std::string(name_of(format)));
          CAPTURE(world);
          CAPTURE(stride);
          CAPTURE(kind);
          CAPTURE(in_place);
          const MaskPlan plan = dense_plan(size, world);
          const Drawn drawn(plan, 1000);
          std::vector<Floats> sent;
          for (std::size_t rank = 0; rank < ranks; ++rank) sent.push_back(sent_by(rank, size, kind));
          const Reduced expected = scattered(format, sent);
          run_ranks(world, [&](auto& rank) {
            const std::size_t me = static_cast<std::size_t>(rank.rank());
            const Mask mask(rank.backend, plan, drawn);
            auto reducer = reducer_of(rank.backend, size + 3, format, world);
            const auto values = rank.backend.array(sent[me]);
            const auto apart = rank.backend.array(Floats(stride, untouched));
            const auto payload = reducer.payload(mask.view());
            const auto own = in_place ? payload.subspan(me * stride, stride) : apart.span();
            reducer.gather(values.span(), mask.view(), rank.compute);
            reducer.reduce_scatter({0, ranks * stride, stride}, own, rank.communicator, rank.compute, rank.side);
            reducer.wait(rank.compute);
            rank.compute.synchronize();
            Floats mean(expected.mean.begin() + static_cast<std::ptrdiff_t>(me * stride),
                        expected.mean.begin() + static_cast<std::ptrdiff_t>((me + 1) * stride));
            CHECK(same_bits(read(rank.backend, own), mean));
            CHECK(same_bits(read(rank.backend, reducer.errors(mask.view())), expected.errors[me]));
            Floats left = sent[me];
            if (in_place) std::copy(mean.begin(), mean.end(), left.begin() + static_cast<std::ptrdiff_t>(me * stride));
            CHECK(same_bits(read(rank.backend, payload), left));
            CHECK(rank.communicator.bytes_sent() == (ranks - 1) * code_bytes(format, size, ranks) / ranks);
          });
        }
}

TEST_CASE("low formats: all errors and W times the mean add up to what was sent, but for the rounding of the sum") {
  for (const PayloadFormat format : low_formats)
    for (const int world : {1, 2, 3, 5, 8}) {
      CAPTURE(std::string(name_of(format)));
      CAPTURE(world);
      const std::size_t size = 3000, ranks = static_cast<std::size_t>(world);
      const MaskPlan plan = dense_plan(size, world);
      const Drawn drawn(plan, 1000);
      std::vector<Floats> all_sent;
      for (std::size_t rank = 0; rank < ranks; ++rank) all_sent.push_back(sent_by(rank, size, 0));
      run_ranks(world, [&](auto& rank) {
        const Mask mask(rank.backend, plan, drawn);
        auto reducer = reducer_of(rank.backend, size, format, world);
        const auto values = rank.backend.array(all_sent[static_cast<std::size_t>(rank.rank())]);
        reducer.gather(values.span(), mask.view(), rank.compute);
        reducer.reduce(mask.view(), rank.communicator, rank.compute, rank.side);
        reducer.wait(rank.compute);
        rank.compute.synchronize();
        const Floats mean = read(rank.backend, reducer.payload(mask.view()));
        Words own(size);
        std::ranges::transform(read(rank.backend, reducer.errors(mask.view())), own.begin(),
                               std::bit_cast<MaskWord, float>);
        const auto from = rank.backend.array(own), to = rank.backend.array(Words(ranks * size));
        rank.communicator.all_gather(from.span(), to.span(), rank.side);
        rank.side.synchronize();
        const Words errors = rank.backend.read(to);
        std::size_t beyond = 0, rounded = 0;
        for (std::size_t i = 0; i < size; ++i) {
          double missing = world * static_cast<double>(mean[i]), magnitudes = 0;
          for (std::size_t other = 0; other < ranks; ++other) {
            const double sent = static_cast<double>(all_sent[other][i]);
            const float error = std::bit_cast<float>(errors[other * size + i]);
            missing += static_cast<double>(error) - sent;
            magnitudes += std::abs(sent);
            rounded += error != 0;
          }
          beyond += std::abs(missing) > (world + 2) * 0x1p-23 * magnitudes;
        }
        CHECK(beyond == 0);
        CHECK(rounded >= size);  // else there was nothing to add up
      });
    }
}

TEST_CASE("low formats: rounds of masks of different sizes in one reducer") {
  for (const PayloadFormat format : low_formats) {
    CAPTURE(std::string(name_of(format)));
    const MaskPlan plan(mixed_layout(3));
    run_ranks(3, [&](auto& rank) {
      const std::size_t me = static_cast<std::size_t>(rank.rank());
      auto reducer = reducer_of(rank.backend, plan.size(), format, 3);
      const auto values = rank.backend.array(floats_of(me, plan.size()));
      for (const std::uint32_t share : {1000u, 10u, 300u, 999u, 0u}) {
        const Drawn drawn(plan, share);
        const Mask mask(rank.backend, plan, drawn);
        std::vector<Floats> sent;
        for (std::size_t other = 0; other < 3; ++other)
          sent.push_back(at(floats_of(other, plan.size()), drawn.elements));
        const Reduced expected = reduced(format, sent);
        typename std::remove_cvref_t<decltype(rank)>::Hold hold(rank.side);
        reducer.gather(values.span(), mask.view(), rank.compute);
        reducer.reduce(mask.view(), rank.communicator, rank.compute, rank.side);
        rank.compute.synchronize();  // would never end if compute waited for the collective
        hold.release();
        reducer.wait(rank.compute);
        rank.compute.synchronize();
        CHECK(same_bits(read(rank.backend, reducer.payload(mask.view())), expected.mean));
        CHECK(same_bits(read(rank.backend, reducer.errors(mask.view())), expected.errors[me]));
      }
    });
  }
}

TEST_CASE("formats: float32 has no errors and needs no more than the payload; wrong arguments are named") {
  run_ranks(2, [](auto& rank) {
    const MaskPlan plan = dense_plan(100, 2);
    const Drawn drawn(plan, 1000);
    const Mask mask(rank.backend, plan, drawn);
    auto plain = reducer_of(rank.backend, 100);
    CHECK(plain.format() == PayloadFormat::float32);
    CHECK(plain.errors(mask.view()).empty());
    CHECK(plain.workspace_bytes() == 400);
    CHECK(plain.state_bytes() == 0);

    CHECK(message_of([&] { reducer_of(rank.backend, 100, PayloadFormat::e4m3, 0); }).starts_with("ranks is 0:"));
    auto coded = reducer_of(rank.backend, 100, PayloadFormat::e4m3, 3);
    CHECK(coded.format() == PayloadFormat::e4m3);
    CHECK(message_of([&] {
            coded.reduce(mask.view(), rank.communicator, rank.compute, rank.side);
          }).starts_with("communicator.size() is 2: must be the reducer's ranks, 3"));
    CHECK(message_of([&] {
            coded.reduce_scatter({0, 100, 50}, coded.payload(mask.view()).first(50), rank.communicator, rank.compute,
                                 rank.side);
          }).starts_with("communicator.size() is 2: must be the reducer's ranks, 3"));
    auto small = reducer_of(rank.backend, 99, PayloadFormat::e4m3, 2);
    CHECK(message_of([&] { small.errors(mask.view()); }).starts_with("mask.kept is 100:"));
    CHECK(rank.communicator.bytes_sent() == 0);
  });
}

// A communicator as it was before there were formats.
struct WithoutAllToAll {
  template <class S>
  void all_reduce_mean(std::span<const float>, std::span<float>, const S&) {
    ++reductions;
  }
  template <class S>
  void reduce_scatter_mean(std::span<const float>, std::span<float>, const S&) {}
  template <class S>
  void all_gather(std::span<const MaskWord>, std::span<MaskWord>, const S&) {}
  int rank() const { return 0; }
  int size() const { return 1; }
  std::uint64_t bytes_sent() const { return 0; }
  int reductions = 0;
};

TEST_CASE_TEMPLATE("formats: without all_to_all there is float32", Backend, SCAPE_BACKENDS) {
  Backend backend;
  const MaskPlan plan = dense_plan(100, 1);
  const Drawn drawn(plan, 1000);
  const Mask<Backend> mask(backend, plan, drawn);
  WithoutAllToAll communicator;
  const auto side = backend.new_stream();
  auto plain = reducer_of(backend, 100);
  plain.reduce(mask.view(), communicator, backend.stream, side);
  CHECK(communicator.reductions == 1);
  auto coded = reducer_of(backend, 100, PayloadFormat::bfloat16, 1);
  CHECK(message_of([&] {
          coded.reduce(mask.view(), communicator, backend.stream, side);
        }).starts_with("format is bfloat16: needs a communicator with all_to_all"));
}
