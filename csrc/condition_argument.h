// The condition of an IF node that an op decides, for callers that capture the op's stream.
#pragma once

#include "backend.h"

namespace eecore {

inline GraphCondition condition_of(const Checker& check, [[maybe_unused]] const Tensor& tensor,
                                   std::optional<int64_t> condition) {
  if (!condition.has_value()) return {};
#ifdef EECORE_BACKEND_CUDA
  check.require(cuda::is_captured(current_stream(tensor)),
                "condition: expected None on a stream that is not captured, got ", *condition);
#else
  check.require(false, "condition: expected None on the CPU, got ", *condition);
#endif
  return {static_cast<uint64_t>(*condition), true};
}

}  // namespace eecore
