// A text argument of an op. torch's own conversion to std::string makes a string that is never
// deleted, 32 bytes a call.
#pragma once

#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>

namespace eecore {

struct Text : std::string {
  using std::string::string;
};

}  // namespace eecore

namespace torch::stable::detail {

template <>
struct ToImpl<eecore::Text> {
  static eecore::Text call(StableIValue value, uint64_t /*build*/, bool /*is_internal*/) {
    const StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* characters = nullptr;
    if (torch_string_length(handle, &length) != 0 || torch_string_c_str(handle, &characters) != 0) {
      throw std::runtime_error("expected a text from torch, got none");
    }
    eecore::Text text(characters, length);
    torch_delete_string(handle);
    return text;
  }
};

}  // namespace torch::stable::detail
