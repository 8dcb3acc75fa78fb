// Finds accesses to global memory that nothing orders, while a test asks for it: by threads of a
// block, by blocks of a launch, by launches that may overlap.
//
// The order of visits does not matter: each access is held against those before it that do not have
// to happen before it. So launches and blocks still run one after the other.
//
// Within a block barriers order. Between the blocks of a launch it takes a fence, an atomic, an
// atomic of the same address after it, and a fence again. Kernels ahead in the stream have ended
// when a kernel starts, unless it is launched to start early. Then it starts when every block of
// the kernel ahead has triggered or ended, and knows of no more ended kernels than these blocks
// did; from its wait on it knows that the kernel ahead has ended, and the kernels that it waited
// for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct LaunchConfig;

extern bool checks_races;

// Marks a function whose own accesses are not checked.
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread"), noinline))

// Checks accesses of the running thread; `place` is the place in the code.
enum class Touch { kRead, kWrite, kAtomic };
void check_global(Touch touch, const void* address, size_t bytes, const void* place);
void check_fence();
void let_next_kernel_start();

// Parts of launch(), called one after the other.
void begin_checked_launch(const LaunchConfig& config);
void begin_checked_block(int64_t number);
void end_checked_block(bool waited);

// Checks what is launched from here on; what was launched before has ended.
void check_races(bool on);
// Records a foreign kernel on the stream: it starts when the kernels ahead have ended, and has
// ended when the next one starts.
void launch_foreign();
// How many accesses have been checked since checking began.
uint64_t num_checked();

}  // namespace emulator
