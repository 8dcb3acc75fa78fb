// The machine that the emulated kernels run on: the threads of a block are fibers of one host
// thread, visited in a seeded random order between the points where they wait for each other.
//
// A fault in a kernel ends the launch with an exception that names the kernel, the block and the
// thread; README.md lists the faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

namespace emulator {

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

// Properties of the emulated device. Few multiprocessors, so that persistent kernels loop.
constexpr int kNumMultiprocessors = 3;
constexpr size_t kStaticSharedBytes = 48 * 1024;
constexpr size_t kMaxDynamicSharedBytes = 227 * 1024;
constexpr int kMaxThreads = 1024;  // of a block
int capability();

// Numbers of the running thread, within its warp and within its block.
int lane();
int thread_number();

// Ends the launch; the message follows the kernel, block and thread. Called in a fiber.
[[noreturn]] void fail(const std::string& message);

// __syncthreads.
void come_to_barrier(const std::source_location& site);

// An exchange between the lanes of a mask: each lane gives `bytes` (at most kMaxGift) and gets the
// gifts of all 32 lanes, one after the other, once all lanes of the mask have arrived.
// `orders_memory` is true of __syncwarp alone.
constexpr int kMaxGift = 32;
void gather(unsigned mask, const char* what, const void* gift, size_t bytes, void* gifts,
            bool orders_memory, const std::source_location& site);
// The same for a value of a type.
template <typename T>
struct Gathered {
  T of[32];
  Gathered(unsigned mask, const char* what, const T& gift, const std::source_location& site) {
    static_assert(sizeof(T) <= kMaxGift);
    gather(mask, what, &gift, sizeof gift, of, false, site);
  }
};

// Shared memory of the running block, by byte offset into it.
uint32_t static_shared(const void* key, size_t bytes);  // where this block keeps the array of `key`
uint32_t dynamic_shared_begin();
uint32_t dynamic_shared_end();
unsigned char* read_shared(uint32_t offset, size_t bytes);   // checks, marks as read
unsigned char* write_shared(uint32_t offset, size_t bytes);  // checks, marks as written
// The same for an atomic, which does not conflict with other atomics.
unsigned char* change_shared(uint32_t offset, size_t bytes);

// cp.async: the data lands at the wait, or at any moment before.
void start_copy(uint32_t to, const void* from, size_t bytes, size_t zeros);
void close_copy_group();
void wait_for_copies(int pending_groups);
// How many began before their thread waited for the kernel ahead, since the last call.
uint64_t early_copies();

// griddepcontrol.wait.
void waited_for_previous_kernel();

struct LaunchConfig {
  std::string kernel;
  Index3 grid, block;
  size_t dynamic_shared_bytes = 0;
  bool starts_early = false;
};
void launch(const LaunchConfig& config, const std::function<void()>& body);

// Keeps the names of kernels launched from here on, until kept_names().
void keep_names();
std::string kept_names();  // a line each

// Seeds the orders in which blocks and threads are visited; EECORE_EMULATOR_SEED at the start.
void set_seed(uint64_t seed);
uint64_t seed();

}  // namespace emulator

// Indices of the running thread, under the names that kernels know.
extern emulator::Index3 threadIdx, blockIdx, blockDim, gridDim;
