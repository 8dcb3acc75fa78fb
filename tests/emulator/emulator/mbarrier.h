// mbarriers, and the copies that they count, which land at the wait for a phase or at any moment
// before it.
#pragma once

#include <emulator/machine.h>

#include <vector>

namespace emulator {

// An mbarrier is known by the offset of its 8 bytes in shared memory.
void init_mbarrier(uint32_t offset, int count);
void fence_mbarriers();
void arrive_at_mbarrier(uint32_t offset, int bytes);
void wait_at_mbarrier(uint32_t offset, uint32_t parity, const std::source_location& site);

// 16 bytes of a copy: zeros, but from byte `begin` to `end` those from `from` on.
struct CopiedPiece {
  uint32_t to;
  const unsigned char* from;
  uint32_t begin, end;
};
void start_counted_copy(std::vector<CopiedPiece> pieces, uint32_t barrier);

// The pieces of the box of a tensor at `rank` coordinates, the innermost first. `map` is a
// CUtensorMap that the emulated cuTensorMapEncodeTiled has made.
std::vector<CopiedPiece> pieces_of_box(uint32_t to, const void* map, const int* at, int rank);

// Called by run_block: at a block's start; at its end, for copies that no thread has waited for;
// and where no thread can go on, for what mbarriers lack.
void begin_mbarriers();
std::string end_mbarriers();
std::string lacks_of_mbarriers();

}  // namespace emulator
