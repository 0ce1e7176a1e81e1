// Numbers as people read them.
#pragma once

#include <cmath>
#include <cstdio>
#include <string>

namespace pretrain {

inline std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

inline std::string bytes_text(double bytes) {
  if (bytes < 1e3) return fixed(bytes, 0) + " B";
  if (bytes < 1e6) return fixed(bytes / 1e3, 1) + " kB";
  if (bytes < 1e9) return fixed(bytes / 1e6, 2) + " MB";
  return fixed(bytes / 1e9, 2) + " GB";
}

inline std::string duration_text(double seconds) {
  const long whole = std::lround(seconds);
  char text[64];
  std::snprintf(text, sizeof text, "%ld:%02ld", whole / 60, whole % 60);
  return text;
}

}  // namespace pretrain
