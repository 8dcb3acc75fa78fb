// The settings of EECORE_CUDA_TUNING. No CUDA: eecore._C has this file too, which tells Python.
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "launch.h"

namespace eecore::cuda {
namespace {

// Applies a setting "name=value".
void tune(std::string_view setting, Tuning& tuning) {
  const auto refuse = [&](const std::string& expected) {
    throw std::runtime_error("EECORE_CUDA_TUNING: expected " + expected + ", got " +
                             std::string(setting));
  };
  const size_t equals = std::min(setting.find('='), setting.size());
  const std::string_view name = setting.substr(0, equals);
  int value = -1;
  const char* const end = setting.data() + setting.size();
  const char* const begin = std::min(setting.data() + equals + 1, end);
  const auto parsed = std::from_chars(begin, end, value);
  const bool is_number = begin < end && parsed.ec == std::errc{} && parsed.ptr == end;
  bool is_known = false;
  std::string names;
  for_each_setting(tuning, [&](const char* known, auto& field, int least, int most) {
    names += (names.empty() ? "" : ", ") + std::string(known);
    if (name != known) return;
    is_known = true;
    if (!is_number || value < least || value > most) {
      refuse(std::string(name) + " of " + std::to_string(least) + " to " + std::to_string(most));
    }
    field = value;
  });
  if (!is_known) refuse("one of " + names);
}

}  // namespace

Tuning tuning() {
  Tuning tuning;
  const char* const said = std::getenv("EECORE_CUDA_TUNING");
  if (said == nullptr) return tuning;
  for (std::string_view left = said; !left.empty();) {
    const size_t comma = std::min(left.find(','), left.size());
    tune(left.substr(0, comma), tuning);
    left.remove_prefix(std::min(comma + 1, left.size()));
  }
  return tuning;
}

}  // namespace eecore::cuda
