// Linux's permission to use matrix tiles, which a process asks for before it first uses them.
#pragma once

#include <cerrno>
#include <cstdio>

namespace eecore::cpu {

// Whether `request`, which returns 0 or sets errno, is granted. Linux checks the alternate signal
// stacks of all threads, and grants or refuses the permission for the whole process: where such a
// stack is the reason, `log` says so. stack_bytes: what the frame of a signal takes with tiles.
template <typename Request>
bool permits_tiles(const Request& request, unsigned long stack_bytes, std::FILE* log) {
  if (request() == 0) return true;
  if (errno == ENOSPC) {
    std::fprintf(log,
                 "eecore: runs avx512_bf16 kernels instead of amx: expected alternate signal "
                 "stacks (sigaltstack) of at least %lu bytes in all threads, got a smaller one\n",
                 stack_bytes);
  }
  return false;
}

}  // namespace eecore::cpu
