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
constexpr int kMaxThreads = 1024;  // of a block, and of all blocks of a cluster
int capability();

// Numbers of the running thread, within its warp and within its block; the blocks of a cluster run
// together, and their threads are numbered on.
int lane();
int thread_number();

// Ends the launch; the message follows the kernel, block and thread. Called in a fiber.
[[noreturn]] void fail(const std::string& message);

// Barrier `id` of 16; the one of __syncthreads is 0. With 0 threads all of the block reach it.
// One that does not wait has only arrived.
void come_to_barrier(int id, int num_threads, bool waits, const char* what,
                     const std::source_location& site);

// The barrier of all threads of a cluster.
void come_to_cluster_barrier(const std::source_location& site);

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
// The same place in block `rank` of the cluster, which must have begun and not ended.
uint32_t place_in_cluster(uint32_t offset, int rank);

// The async proxy's reads for `what`, by the running thread: from the start of one to its end
// no thread may write there. Threads that wrote there must have fenced since.
void begin_async_read(uint32_t offset, size_t bytes, const char* what);
void end_async_read(uint32_t offset, size_t bytes);
unsigned char* shared_bytes(uint32_t offset, size_t bytes);  // checks bounds alone
void fence_async_proxy();

// The async proxy's writes: from the start of one to the wait for it no thread may touch these
// bytes. Threads that wrote there must have fenced since. `name` is that of the writer (order.h).
void begin_async_write(uint32_t offset, size_t bytes, uint16_t name);
void end_async_write(uint32_t offset, size_t bytes, uint16_t name);
void make_mbarrier(uint32_t offset);  // of 8 bytes, which nothing else may touch from then on
std::string where(uint32_t offset);   // for messages

// The running thread waits until another one wakes it.
void await_wake(const char* what, const std::source_location& site);
void wake(int thread);

// Either, as the seed has it.
bool coin();

// cp.async: the data lands at the wait, or at any moment before.
void start_copy(uint32_t to, const void* from, size_t bytes, size_t zeros);
void close_copy_group();
void wait_for_copies(int pending_groups);
// A copy by any instruction begins.
void note_copy(const void* from, size_t bytes, const void* place);
// How many began before their thread waited for the kernel ahead, since the last call.
uint64_t early_copies();

// griddepcontrol.wait.
void waited_for_previous_kernel();

struct LaunchConfig {
  std::string kernel;
  Index3 grid, block;
  size_t dynamic_shared_bytes = 0;
  bool starts_early = false;
  unsigned cluster = 1;  // blocks of a cluster, adjacent in x
};
void launch(const LaunchConfig& config, const std::function<void()>& body);

// Keeps the names of kernels launched from here on, until kept_names().
void keep_names();
std::string kept_names();  // a line each

// The lane that elect_lane elects.
int elected_lane();

// Seeds the orders in which blocks and threads are visited; EECORE_EMULATOR_SEED at the start.
void set_seed(uint64_t seed);
uint64_t seed();

}  // namespace emulator

// Indices of the running thread, under the names that kernels know.
extern emulator::Index3 threadIdx, blockIdx, blockDim, gridDim;
