// The data: bytes of a file, the last 5% of them (at least one window) held out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace pretrain {

class Text {
 public:
  // A window is what one sequence needs: its context and the byte after it.
  Text(const std::filesystem::path& path, std::size_t window) : window_(window) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    if (!file) throw std::runtime_error("cannot read " + path.string());
    if (bytes_.size() < 2 * window)
      throw std::runtime_error(path.string() + " has " + std::to_string(bytes_.size()) +
                               " bytes: too short, training and validation need " + std::to_string(window) +
                               " each (--context and one more)");
    held_out_ = std::max(window, bytes_.size() / 20);
  }

  std::span<const std::uint8_t> training() const { return std::span(bytes_).first(bytes_.size() - held_out_); }
  std::span<const std::uint8_t> validation() const { return std::span(bytes_).last(held_out_); }

  // `count` windows at random places of the training bytes, one after the other.
  std::vector<std::uint8_t> sample(std::size_t count, std::mt19937_64& random) const {
    std::vector<std::uint8_t> windows;
    for (std::size_t i = 0; i < count; ++i) append(windows, training(), random() % (training().size() - window_ + 1));
    return windows;
  }

  // At most `count` windows, spread evenly over the validation bytes without overlap; those of one rank.
  std::vector<std::uint8_t> validation_windows(std::size_t count, int rank, int ranks) const {
    const std::size_t fitting = std::min(count, validation().size() / window_);
    const std::size_t stride = validation().size() / fitting;
    std::vector<std::uint8_t> windows;
    for (auto i = static_cast<std::size_t>(rank); i < fitting; i += static_cast<std::size_t>(ranks))
      append(windows, validation(), i * stride);
    return windows;
  }

 private:
  void append(std::vector<std::uint8_t>& windows, std::span<const std::uint8_t> from, std::size_t begin) const {
    const auto window = from.subspan(begin, window_);
    windows.insert(windows.end(), window.begin(), window.end());
  }

  std::vector<std::uint8_t> bytes_;
  std::size_t window_, held_out_ = 0;
};

}  // namespace pretrain
