#pragma once

#if !defined(__cplusplus) || (__cplusplus < 202002L && !(defined(_MSVC_LANG) && _MSVC_LANG >= 202002L))
#error "scape needs C++20: compile with -std=c++20 or newer"
#endif

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace scape::inline v0 {

/// A failure that the caller could not have prevented: a collective that timed out, ranks that disagree, a rank that
/// left, a call of CUDA, NCCL or MPI that failed. Wrong arguments throw std::invalid_argument instead.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws std::invalid_argument "ARGUMENT is VALUE: REQUIREMENT" unless `holds`. Called before anything is changed; the
/// text, the requirement's parts in a row, is put together only where it is thrown.
template <class Value, class... Requirement>
void expects(bool holds, std::string_view argument, const Value& value, const Requirement&... requirement) {
  if (holds) return;
  std::ostringstream text;
  text << argument << " is " << value << ": ";
  (text << ... << requirement);
  throw std::invalid_argument(text.str());
}

}  // namespace scape::inline v0
