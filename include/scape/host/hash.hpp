#pragma once

#include <scape/communicator.hpp>
#include <scape/fingerprint.hpp>
#include <scape/host/loop.hpp>
#include <scape/host/stream.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <span>

namespace scape::inline v0 {
namespace detail {

SCAPE_HOST_LOOP inline void hash_part(const MaskWord* words, std::size_t begin, std::size_t end, MaskWord* sums) {
  MaskWord first = 0, second = 0;
  for (std::size_t i = begin; i < end; ++i) {
    first += HashWord::first(i, words[i]);
    second += HashWord::second(i, words[i]);
  }
  sums[0] = first;
  sums[1] = second;
}

}  // namespace detail

/// A hash of the words, in two words; 0 and 0 for none. Not cryptographic. A single changed word always shows.
inline void hash_words(std::span<const MaskWord> words, std::span<MaskWord, 2> hash, const HostStream& stream) {
  stream.enqueue([=, &pool = stream.pool()] {
    constexpr std::size_t run = 16384;
    std::atomic<MaskWord> first = 0, second = 0;  // sums of integers: in any order
    pool.run((words.size() + run - 1) / run, [&](std::size_t i) {
      MaskWord sums[2];
      detail::hash_part(words.data(), i * run, std::min(words.size(), (i + 1) * run), sums);
      first += sums[0];
      second += sums[1];
    });
    hash[0] = first;
    hash[1] = second;
  });
}

}  // namespace scape::inline v0
