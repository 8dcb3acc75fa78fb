// Activations at the tensor boundary, by the name that callers give.
#pragma once

#include "check.h"

namespace eecore {

struct NamedActivation {
  const char* name;
  Activation activation;
};

// The activation of a name, which must be one of those that the op supports.
inline Activation activation_of(const Checker& check, const std::string& name,
                                std::initializer_list<NamedActivation> known) {
  std::string names;
  for (const NamedActivation& one : known) {
    if (name == one.name) return one.activation;
    names += (names.empty() ? "" : " or ") + std::string(one.name);
  }
  check.fail("activation: expected " + names + ", got " + name);
}

}  // namespace eecore
