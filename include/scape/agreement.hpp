#pragma once

#include <scape/arithmetic.hpp>
#include <scape/communicator.hpp>
#include <scape/error.hpp>
#include <scape/memory.hpp>
#include <scape/stream.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace scape::inline v0 {

/// A value that must be the same on all ranks.
struct AgreedValue {
  enum class Form { integer, real, hash };

  const char* name;  ///< in errors
  std::uint64_t bits;
  Form form;

  static AgreedValue integer(const char* name, std::uint64_t value) { return {name, value, Form::integer}; }
  static AgreedValue real(const char* name, double value) {
    return {name, std::bit_cast<std::uint64_t>(value + 0.0), Form::real};  // -0 is 0
  }
  static AgreedValue hash(const char* name, std::uint64_t value) { return {name, value, Form::hash}; }
};

namespace detail {

inline constexpr std::size_t words_a_value = 2;

inline void write_words(std::uint64_t value, MaskWord* words) {
  words[0] = static_cast<MaskWord>(value);
  words[1] = static_cast<MaskWord>(value >> 32);
}

// Names the first rank whose value differs from most ranks', of two the second; "" where all agree. records: every
// rank's values, by rank.
inline std::string disagreement(std::span<const AgreedValue> values, std::span<const MaskWord> records) {
  const std::size_t width = values.size() * words_a_value, ranks = records.size() / width;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto of = [&](std::size_t rank) {
      const MaskWord* const words = records.data() + rank * width + i * words_a_value;
      return std::uint64_t{words[1]} << 32 | words[0];
    };
    std::size_t odd = 0;
    while (odd < ranks && of(odd) == of(0)) ++odd;
    if (odd == ranks) continue;
    std::map<std::uint64_t, std::size_t> counts;
    for (std::size_t rank = 0; rank < ranks; ++rank) ++counts[of(rank)];
    std::uint64_t usual = of(0);
    for (const auto& [value, count] : counts)
      if (count > counts[usual]) usual = value;
    if (usual != of(0)) odd = 0;
    std::ostringstream text;
    const auto write = [&](std::uint64_t bits) {
      values[i].form == AgreedValue::Form::real ? text << std::bit_cast<double>(bits) : text << bits;
    };
    text << "rank " << odd << " disagrees with the other ranks: its " << values[i].name;
    if (values[i].form == AgreedValue::Form::hash) {
      text << " differs";
    } else {
      text << " is ";
      write(of(odd));
      text << ", theirs ";
      write(usual);
    }
    return text.str();
  }
  return {};
}

template <std::size_t N>
struct WriteWords {
  MaskWord* to;
  MaskWord words[N];
  SCAPE_HOST_DEVICE void operator()(std::size_t i) const { to[i] = words[i]; }
};

}  // namespace detail

/// Collective; waits. Throws scape::Error on every rank unless all give the same values, under the same names; it names
/// the odd rank and the value.
template <Stream S, Communicator<S> C, MemoryResource M>
void expect_agreement(std::span<const AgreedValue> values, C& communicator, M& memory, const S& stream) {
  const std::size_t width = values.size() * detail::words_a_value,
                    ranks = static_cast<std::size_t>(communicator.size());
  std::vector<MaskWord> own(width), read(ranks * width);
  for (std::size_t i = 0; i < values.size(); ++i)
    detail::write_words(values[i].bits, own.data() + i * detail::words_a_value);
  const Buffer<MaskWord, M> all(read.size(), memory);
  const auto part = all.span().subspan(static_cast<std::size_t>(communicator.rank()) * width, width);
  copy_values(std::span<const MaskWord>(own), part, stream);
  communicator.all_gather(part, all.span(), stream);
  copy_values(std::span<const MaskWord>(all.span()), std::span(read), stream);
  stream.synchronize();
  if (const std::string text = detail::disagreement(values, read); !text.empty()) throw Error(text);
}

/// Compares what may come to differ between ranks while they train: number of the step, learning rate, the order in
/// which buckets were added, and every bit of the mask that was exchanged, as 32 bytes a rank. All work is enqueued on
/// the side stream, behind the exchange of the mask and before the payload at it: on a HostStream no payload of ranks
/// that disagree moves. A CudaStream cannot be stopped by what its work finds: there rethrow(), called by each step,
/// throws once the comparison has been made.
///
/// Owns 32 bytes a rank in the memory of M and as much in memory that the host can read.
template <Stream S, MemoryResource M>
class StepAgreement {
 public:
  StepAgreement(int rank, int ranks, M& memory)
      : rank_(static_cast<std::size_t>(rank)),
        records_(width * static_cast<std::size_t>(ranks), memory),
        read_(records_.size(), host_memory_) {}
  StepAgreement(const StepAgreement&) = delete;

  /// Enqueues a comparison. `order`: a hash of it. `mask`: all words of a mask that has arrived, or none.
  template <Communicator<S> C>
  void compare(std::size_t step, float learning_rate, std::uint64_t order, std::span<const MaskWord> mask,
               C& communicator, const S& side) {
    const std::span<MaskWord> own = records_.span().subspan(rank_ * width, width);
    detail::WriteWords<width> write{own.data(), {}};
    detail::write_words(std::uint64_t{step}, write.words);
    detail::write_words(AgreedValue::real("", static_cast<double>(learning_rate)).bits, write.words + 2);
    detail::write_words(order, write.words + 4);
    for_each(width, write, side);
    hash_words(mask, own.template subspan<width - 2, 2>(), side);
    communicator.all_gather(own, records_.span(), side);
    copy_values(std::span<const MaskWord>(records_.span()), read_.span(), side);
    call_on_host(*this, side);
  }

  /// What a comparison found, as scape::Error; nothing while all agree.
  void rethrow() const {
    if (failed_.load(std::memory_order_acquire)) throw Error(text_);
  }

  /// The comparison itself, when the side stream has got here.
  void operator()() noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    const MaskWord* const own = read_.span().data() + rank_ * width;
    const std::array values = {AgreedValue::integer("number of steps", 0), AgreedValue::real("learning rate", 0),
                               AgreedValue::hash("order of buckets", 0), AgreedValue::hash("mask", 0)};
    text_ = detail::disagreement(values, read_.span());
    if (text_.empty()) return;
    text_ = "step " + std::to_string(std::uint64_t{own[1]} << 32 | own[0]) + ": " + text_;
    failed_.store(true, std::memory_order_release);
  }

 private:
  static constexpr std::size_t width = 4 * detail::words_a_value;

  std::size_t rank_;
  Buffer<MaskWord, M> records_;
  typename S::HostVisibleMemory host_memory_;
  Buffer<MaskWord, typename S::HostVisibleMemory> read_;
  std::string text_;
  std::atomic<bool> failed_ = false;
};

}  // namespace scape::inline v0
