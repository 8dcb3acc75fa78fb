#include "emulator/machine.h"

#include <emulator/accesses.h>
#include <emulator/order.h>
#include <emulator/races.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves the registers that a call preserves on the stack, and goes on where `to` was left.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
  .text
  .type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulator_switch, .-emulator_switch
)");
#else
#include <ucontext.h>
#endif

emulator::Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

// ---- Fibers ----

struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* stack = nullptr;  // lowest address; null for the host's own
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;
};

Context host;  // where the scheduler runs

void arrive([[maybe_unused]] Context& here) {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(here.fake_stack, &bottom, &bytes);
  if (&here != &host) {
    host.stack = const_cast<void*>(bottom);
    host.stack_bytes = bytes;
  }
#endif
}

void switch_context(Context& from, Context& to) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
#if defined(__x86_64__)
  emulator_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
  arrive(from);
}

void prepare(Context& context, void (*entry)()) {
  context.fake_stack = nullptr;
#if defined(__x86_64__)
  auto* top = reinterpret_cast<uint64_t*>(static_cast<char*>(context.stack) + kStackBytes);
  *--top = 0;                                // what the entry would return to
  *--top = 0;                                // keeps the stack as a call would leave it
  *top = reinterpret_cast<uint64_t>(entry);  // on a 16-byte boundary
  for (int i = 0; i < 6; ++i) *--top = 0;    // the six saved registers
  context.stack_pointer = top;
#else
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = context.stack;
  context.context.uc_stack.ss_size = kStackBytes;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
#endif
}

// ---- State of the running block ----

struct Copy {
  uint32_t to;
  const void* from;
  size_t bytes, zeros;
  bool landed;
};

struct Thread {
  Context context;
  Index3 index;
  int number = 0;
  bool ended = false;
  const char* waits_for = nullptr;  // "__syncthreads", "__shfl_xor_sync", ...
  std::source_location site;
  std::vector<std::vector<Copy>> groups;  // cp.async groups under way, the last one open
  uint32_t synced = 0;                    // last __syncwarp or __syncthreads
  bool waited = false;                    // for the kernel ahead
};

// Of the lanes of a warp, one after the other.
using Gifts = std::array<unsigned char, 32 * kMaxGift>;

// A collective operation of a warp that not all lanes have come to.
struct Meeting {
  unsigned mask = 0, arrived = 0;
  const char* what = nullptr;
  std::source_location site;
  size_t bytes = 0;
  Gifts gifts;
  std::array<void*, 32> takers;  // where each lane wants all gifts
};

// What is known of two bytes of shared memory, the smallest element.
constexpr uint32_t kGranule = 2;
struct Shadow {
  enum State : uint8_t { kNeverWritten, kWritten, kPending };
  uint32_t write_time = 0, read_time = 0;
  uint16_t writer = kNobody, reader = kNobody;  // a thread, or a name of several
  State state = kNeverWritten;
  bool by_atomics = false;  // the last writes
  bool operator==(const Shadow&) const = default;
};

struct Block {
  LaunchConfig config;
  const std::function<void()>* body = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;
  int num_threads = 0, num_ended = 0;
  std::vector<int> ready;
  Thread* running = nullptr;
  // Threads that wait in __syncthreads, the first of them there.
  std::vector<int> at_barrier;
  std::source_location barrier_site;
  // Warps.
  std::vector<std::vector<Meeting>> meetings;  // of each warp
  // Time passes with every synchronisation.
  uint32_t now = 1, last_barrier = 0;  // of all threads
  // Shared memory: static arrays first, then dynamic memory.
  std::vector<unsigned char> shared;
  std::vector<Shadow> shadow;
  std::map<const void*, uint32_t> static_arrays;
  uint32_t static_used = 0;
  bool waited = false;
  uint16_t first_to_wait = kNobody;  // for the kernel ahead
  uint32_t first_wait = 0;
  std::string error;
};

Block block;
std::mt19937_64 random_source;
uint64_t seed_in_use = 0;
uint64_t launches = 0;
uint64_t early_copies_started = 0;
bool keeps_names = false;
std::string names_kept;
std::mutex one_launch;

std::string text(const Index3& i) {
  return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

std::string text(const std::source_location& site) {
  const std::string file = site.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line());
}

std::string where(uint32_t offset) {
  return offset >= kStaticSharedBytes
             ? "byte " + std::to_string(offset - kStaticSharedBytes) + " of dynamic shared memory"
             : "byte " + std::to_string(offset) + " of static shared memory";
}

bool same_text(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

bool same_place(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && same_text(a.file_name(), b.file_name());
}

void yield() { switch_context(block.running->context, host); }

void make_ready(int number) {
  block.threads[number]->waits_for = nullptr;
  block.ready.push_back(number);
}

void thread_main() {
  arrive(block.running->context);
  (*block.body)();
  Thread& thread = *block.running;
  wait_for_copies(0);
  thread.ended = true;
  ++block.num_ended;
  yield();
  std::abort();  // an ended thread is not resumed
}

void finish_barrier() {
  block.last_barrier = ++block.now;
  for (const int number : block.at_barrier) {
    block.threads[number]->synced = block.now;
    make_ready(number);
  }
  block.at_barrier.clear();
}

// Whether what `thread` did at `time` comes before what a thread of warp `warp` does that last
// synchronised at `synced`, with no barrier of the block since; `synced_of` gives when a thread of
// its warp last has.
template <typename SyncedOf>
inline bool comes_before(uint16_t thread, uint32_t time, int warp, uint32_t synced,
                         const SyncedOf& synced_of) {
  if (thread == kManyWarps || time >= synced) return false;
  if ((thread & kManyLanes) != 0) return (thread & ~kManyLanes) == warp;
  return thread / 32 == warp && time < synced_of(thread);
}

uint16_t warp_of(uint16_t name) {
  return (name & kManyLanes) != 0 ? name & ~kManyLanes : name / 32;
}

// Two threads, as narrowly as one name tells.
uint16_t both(uint16_t thread, uint16_t me) {
  const bool is_same_warp = thread != kManyWarps && warp_of(thread) == warp_of(me);
  return is_same_warp ? static_cast<uint16_t>(kManyLanes | warp_of(me)) : kManyWarps;
}

void check_write(const Shadow& shadow, uint32_t offset, const char* how) {
  const auto complain = [&](const char* did, uint16_t who) {
    fail(std::string(how) + " " + where(offset) + ", which " + name_of(who) + " " + did +
         " with no barrier between");
  };
  if (shadow.state == Shadow::kPending && shadow.writer != block.running->number) {
    complain("is filling by cp.async", shadow.writer);
  }
  if (shadow.state != Shadow::kNeverWritten && !happened(shadow.writer, shadow.write_time)) {
    complain("wrote", shadow.writer);
  }
  if (!happened(shadow.reader, shadow.read_time)) complain("read", shadow.reader);
}

void mark_written(Shadow& shadow, Shadow::State state) {
  shadow.state = state;
  shadow.by_atomics = false;
  shadow.writer = static_cast<uint16_t>(block.running->number);
  shadow.write_time = block.now;
  shadow.reader = kNobody;
}

// Adds a read by the running thread to those that need not have happened.
void mark_read(Shadow& shadow) {
  shadow.reader = joined(shadow.reader, shadow.read_time);
  shadow.read_time = block.now;
}

// What the running thread reads there has been written, and it knows.
void check_read(const Shadow& shadow, uint32_t offset, const char* how) {
  const auto complain = [&](const std::string& why) {
    fail(std::string(how) + " " + where(offset) + ", " + why);
  };
  if (shadow.state == Shadow::kNeverWritten) complain("which no thread has written");
  if (shadow.state == Shadow::kPending) {
    complain("into which a cp.async of " + name_of(shadow.writer) +
             " is under way: no wait for its group");
  }
  if (!happened(shadow.writer, shadow.write_time)) {
    complain("which " + name_of(shadow.writer) + " wrote with no barrier between");
  }
}

void check_bounds(uint32_t offset, size_t bytes) {
  if (offset + bytes > kStaticSharedBytes + block.config.dynamic_shared_bytes) {
    fail("touches " + where(offset) + ", past its end");
  }
}

void land(const Copy& copy) {
  std::memcpy(block.shared.data() + copy.to, copy.from, copy.bytes);
  std::memset(block.shared.data() + copy.to + copy.bytes, 0, copy.zeros);
}

// No element of these bytes of shared memory has been written.
void reset_shared(size_t begin, size_t end) {
  std::fill(block.shared.data() + begin, block.shared.data() + end, 0xff);
  std::fill(block.shadow.data() + begin / kGranule,
            block.shadow.data() + (end + kGranule - 1) / kGranule, Shadow{});
}

void run_block() {
  block.ready.clear();
  block.at_barrier.clear();
  block.num_ended = 0;
  block.now = 1;
  block.last_barrier = 0;
  block.static_arrays.clear();
  block.static_used = 0;
  block.waited = false;
  block.first_to_wait = kNobody;
  reset_shared(kStaticSharedBytes, block.shared.size());  // static arrays: where they are made
  const Index3& shape = block.config.block;
  for (int number = 0; number < block.num_threads; ++number) {
    Thread& thread = *block.threads[number];
    const auto n = static_cast<unsigned>(number);
    thread.index = {n % shape.x, n / shape.x % shape.y, n / shape.x / shape.y};
    thread.number = number;
    thread.ended = false;
    thread.waits_for = nullptr;
    thread.groups.assign(1, {});
    thread.synced = 0;
    thread.waited = false;
    prepare(thread.context, thread_main);
    block.ready.push_back(number);
  }
  for (auto& of_warp : block.meetings) of_warp.clear();

  while (block.error.empty() && !block.ready.empty()) {
    const size_t picked = (random_source() >> 32) * block.ready.size() >> 32;
    std::swap(block.ready[picked], block.ready.back());
    block.running = block.threads[block.ready.back()].get();
    own_memory.stack = reinterpret_cast<uintptr_t>(block.running->context.stack);
    block.ready.pop_back();
    threadIdx = block.running->index;
    switch_context(host, block.running->context);
  }
  block.running = nullptr;
  if (!block.error.empty() || block.num_ended == block.num_threads) return;

  // Nobody can go on: who waits for whom?
  std::string waiting, missing;
  for (int number = 0; number < block.num_threads; ++number) {
    const Thread& thread = *block.threads[number];
    if (thread.ended) {
      if (missing.empty()) missing = ", and thread " + std::to_string(number) + " has ended";
    } else if (waiting.find(text(thread.site)) == std::string::npos) {
      waiting += (waiting.empty() ? "" : ", ") + std::string("thread ") + std::to_string(number) +
                 " waits in " + thread.waits_for + " at " + text(thread.site);
    }
  }
  block.error = "divergent barrier: " + waiting + missing;
}

}  // namespace

int capability() {
  const char* wanted = std::getenv("EECORE_EMULATOR_CAPABILITY");
  return wanted != nullptr ? std::atoi(wanted) : 90;
}

int lane() { return block.running->number % 32; }
int thread_number() { return block.running->number; }

// ---- Who knows of whom: emulator/order.h ----

bool happened(uint16_t thread, uint32_t time) {
  const Thread& me = *block.running;
  if (thread == me.number || thread == kNobody || time < block.last_barrier) return true;
  return comes_before(thread, time, me.number / 32, me.synced,
                      [](uint16_t other) { return block.threads[other]->synced; });
}

Knowledge knowledge() {
  const Thread& me = *block.running;
  Knowledge known{me.number, block.now, block.last_barrier, me.synced, {}};
  for (int l = 0; l < 32; ++l) {
    const int number = me.number / 32 * 32 + l;
    if (number < block.num_threads) known.synced_lanes[l] = block.threads[number]->synced;
  }
  return known;
}

bool happened_for(const Knowledge& known, uint16_t thread, uint32_t time) {
  if (time < known.last_barrier) return true;
  if (thread == known.thread) return time < known.now;
  return comes_before(thread, time, known.thread / 32, known.synced,
                      [&](uint16_t other) { return known.synced_lanes[other % 32]; });
}

uint16_t joined(uint16_t thread, uint32_t time) {
  const auto me = static_cast<uint16_t>(block.running->number);
  return happened(thread, time) ? me : both(thread, me);
}

uint32_t now() { return block.now; }
void pass_time() { ++block.now; }

std::string name_of(uint16_t thread) {
  if (thread == kManyWarps) return "threads of several warps";
  if ((thread & kManyLanes) != 0) return "lanes of warp " + std::to_string(thread & ~kManyLanes);
  return "thread " + std::to_string(thread);
}

bool knows_of_previous_kernel() {
  Thread& me = *block.running;
  if (!me.waited && block.first_to_wait != kNobody) {
    me.waited = happened(block.first_to_wait, block.first_wait);
  }
  return me.waited;
}

bool is_in_kernel() { return block.running != nullptr; }

OwnMemory own_memory;

void fail(const std::string& message) {
  block.error = "thread " + text(block.running->index) + " " + message;
  yield();
  std::abort();  // a failed thread is not resumed
}

void come_to_barrier(const std::source_location& site) {
  if (!block.at_barrier.empty() && !same_place(site, block.barrier_site)) {
    fail("divergent barrier: it comes to __syncthreads at " + text(site) + ", thread " +
         std::to_string(block.at_barrier.front()) + " waits in that at " +
         text(block.barrier_site));
  }
  Thread& me = *block.running;
  block.barrier_site = site;
  block.at_barrier.push_back(me.number);
  me.waits_for = "__syncthreads";
  me.site = site;
  if (static_cast<int>(block.at_barrier.size()) == block.num_threads) finish_barrier();
  yield();
}

void gather(unsigned mask, const char* what, const void* gift, size_t bytes, void* gifts,
            bool orders_memory, const std::source_location& site) {
  Thread& me = *block.running;
  const int warp = me.number / 32;
  const unsigned bit = 1u << (me.number % 32);
  if ((mask & bit) == 0)
    fail(std::string(what) + " at " + text(site) + " without itself in the mask");
  auto& meetings = block.meetings[warp];
  size_t at = 0;
  while (at < meetings.size() && (meetings[at].mask & mask) == 0) ++at;
  if (at == meetings.size()) {
    meetings.emplace_back();
    meetings[at].mask = mask;
    meetings[at].what = what;
    meetings[at].site = site;
    meetings[at].bytes = bytes;
  }
  Meeting& meeting = meetings[at];
  const bool same = meeting.mask == mask && meeting.bytes == bytes &&
                    same_text(meeting.what, what) && same_place(meeting.site, site);
  if (!same) {
    fail("divergent warp: it comes to " + std::string(what) + " at " + text(site) +
         ", lanes of its warp wait in " + meeting.what + " at " + text(meeting.site));
  }
  meeting.arrived |= bit;
  meeting.takers[me.number % 32] = gifts;
  if (bytes > 0) std::memcpy(&meeting.gifts[me.number % 32 * bytes], gift, bytes);
  me.waits_for = what;
  me.site = site;
  if (meeting.arrived == meeting.mask) {
    if (orders_memory) ++block.now;
    for (int l = 0; l < 32; ++l) {
      if ((mask >> l & 1u) == 0) continue;
      const int number = warp * 32 + l;
      if (orders_memory) block.threads[number]->synced = block.now;
      if (bytes > 0) std::memcpy(meeting.takers[l], meeting.gifts.data(), 32 * bytes);
      make_ready(number);
    }
    meetings.erase(meetings.begin() + static_cast<std::ptrdiff_t>(at));
  }
  yield();
}

uint32_t static_shared(const void* key, size_t bytes) {
  const auto known = block.static_arrays.find(key);
  if (known != block.static_arrays.end()) return known->second;
  const uint32_t begin = block.static_used;
  block.static_used += static_cast<uint32_t>((bytes + 15) / 16 * 16);
  if (block.static_used > kStaticSharedBytes) fail("asks for over 48 KB of static shared memory");
  block.static_arrays[key] = begin;
  reset_shared(begin, block.static_used);
  return begin;
}

uint32_t dynamic_shared_begin() { return kStaticSharedBytes; }
uint32_t dynamic_shared_end() {
  return dynamic_shared_begin() + static_cast<uint32_t>(block.config.dynamic_shared_bytes);
}

// Calls `touch` for what is known of each piece of an access. Of neighbours mostly the same is
// known: they are not asked again.
template <typename Do>
inline void for_each_piece(uint32_t offset, size_t bytes, const Do& touch) {
  Shadow before, after;
  bool is_first = true;
  for (uint32_t at = offset / kGranule; at * kGranule < offset + bytes; ++at) {
    Shadow& shadow = block.shadow[at];
    if (is_first || !(shadow == before)) {
      before = shadow;
      touch(shadow, at * kGranule);
      after = shadow;
      is_first = false;
    } else {
      shadow = after;
    }
  }
}

unsigned char* read_shared(uint32_t offset, size_t bytes) {
  check_bounds(offset, bytes);
  for_each_piece(offset, bytes, [](Shadow& shadow, uint32_t at) {
    check_read(shadow, at, "reads");
    mark_read(shadow);
  });
  return block.shared.data() + offset;
}

unsigned char* write_shared(uint32_t offset, size_t bytes) {
  check_bounds(offset, bytes);
  for_each_piece(offset, bytes, [](Shadow& shadow, uint32_t at) {
    check_write(shadow, at, "writes");
    if (shadow.state == Shadow::kPending) {
      fail("writes " + where(at) + ", into which its own cp.async is under way");
    }
    mark_written(shadow, Shadow::kWritten);
  });
  return block.shared.data() + offset;
}

unsigned char* change_shared(uint32_t offset, size_t bytes) {
  check_bounds(offset, bytes);
  for (uint32_t at = offset / kGranule; at * kGranule < offset + bytes; ++at) {
    Shadow& shadow = block.shadow[at];
    if (shadow.state == Shadow::kNeverWritten) {
      fail("changes " + where(at * kGranule) + ", which no thread has written");
    }
    // Other atomics that nothing orders are no conflict, but all have to be over for what is.
    const uint16_t writer = joined(shadow.writer, shadow.write_time);
    if (shadow.by_atomics) shadow.writer = kNobody;
    check_write(shadow, at * kGranule, "changes");
    mark_written(shadow, Shadow::kWritten);
    shadow.writer = writer;
    shadow.by_atomics = true;
  }
  return block.shared.data() + offset;
}

void start_copy(uint32_t to, const void* from, size_t bytes, size_t zeros) {
  check_bounds(to, bytes + zeros);
  if (block.config.starts_early && !block.running->waited) ++early_copies_started;
  if (checks_races && bytes > 0) {
    check_global(Touch::kRead, from, bytes, __builtin_return_address(0));
  }
  for (uint32_t at = to / kGranule; at * kGranule < to + bytes + zeros; ++at) {
    check_write(block.shadow[at], at * kGranule, "starts a cp.async into");
    mark_written(block.shadow[at], Shadow::kPending);
  }
  Copy copy{to, from, bytes, zeros, random_source() % 2 == 0};  // landed or not, as the seed has it
  if (copy.landed) land(copy);
  block.running->groups.back().push_back(copy);
}

void close_copy_group() { block.running->groups.emplace_back(); }

void wait_for_copies(int pending_groups) {
  auto& groups = block.running->groups;
  // The open group is not waited for, but by an end of the thread.
  while (static_cast<int>(groups.size()) - 1 > pending_groups) {
    for (const Copy& copy : groups.front()) {
      if (!copy.landed) land(copy);
      for (uint32_t at = copy.to / kGranule; at * kGranule < copy.to + copy.bytes + copy.zeros;
           ++at) {
        block.shadow[at].state = Shadow::kWritten;
        block.shadow[at].write_time = block.now;
      }
    }
    groups.erase(groups.begin());
  }
}

void waited_for_previous_kernel() {
  if (!block.waited) {
    block.first_to_wait = static_cast<uint16_t>(block.running->number);
    block.first_wait = block.now;
  }
  block.waited = block.running->waited = true;
}

uint64_t early_copies() { return std::exchange(early_copies_started, 0); }

void keep_names() {
  keeps_names = true;
  names_kept.clear();
}

std::string kept_names() {
  keeps_names = false;
  return names_kept;
}

void set_seed(uint64_t seed) {
  seed_in_use = seed;
  launches = 0;
}

uint64_t seed() { return seed_in_use; }

void launch(const LaunchConfig& config, const std::function<void()>& body) {
  const std::lock_guard guard(one_launch);
  const int64_t num_threads = int64_t{config.block.x} * config.block.y * config.block.z;
  const int64_t num_blocks = int64_t{config.grid.x} * config.grid.y * config.grid.z;
  const auto refuse = [&](const std::string& why) {
    throw std::runtime_error("emulated kernel " + config.kernel + ": " + why);
  };
  if (num_threads < 1 || num_threads > kMaxThreads) {
    refuse("expected a block of 1 to 1024 threads, got " + std::to_string(num_threads));
  }
  if (config.grid.y > 65535 || config.grid.z > 65535 || config.grid.x > 0x7fffffffu) {
    refuse("expected a grid of at most 2147483647 x 65535 x 65535 blocks, got " +
           text(config.grid));
  }
  if (keeps_names) names_kept += config.kernel + "\n";
  block.config = config;
  blockDim = config.block;
  gridDim = config.grid;
  block.body = &body;
  block.num_threads = static_cast<int>(num_threads);
  block.error.clear();
  while (block.threads.size() < static_cast<size_t>(block.num_threads)) {
    auto thread = std::make_unique<Thread>();
    thread->context.stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (thread->context.stack == MAP_FAILED) refuse("no memory for the stacks of its threads");
    thread->context.stack_bytes = kStackBytes;
    block.threads.push_back(std::move(thread));
  }
  block.meetings.resize(kMaxThreads / 32);
  const size_t shared_bytes = (kStaticSharedBytes + config.dynamic_shared_bytes + 15) / 16 * 16;
  block.shared.resize(shared_bytes);
  block.shadow.resize((shared_bytes + kGranule - 1) / kGranule);
  own_memory.shared = reinterpret_cast<uintptr_t>(block.shared.data());
  own_memory.shared_bytes = shared_bytes;

  random_source.seed(seed_in_use * 1000003 + launches++);
  std::vector<int64_t> order(num_blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_source);
  bool waited = false;
  if (counts_accesses) begin_counted_launch(config);
  if (checks_races) begin_checked_launch(config);
  for (const int64_t number : order) {
    const auto n = static_cast<uint64_t>(number);
    blockIdx = {static_cast<unsigned>(n % config.grid.x),
                static_cast<unsigned>(n / config.grid.x % config.grid.y),
                static_cast<unsigned>(n / config.grid.x / config.grid.y)};
    if (checks_races) begin_checked_block(number);
    run_block();
    if (checks_races) end_checked_block(block.waited);
    waited |= block.waited;
    if (!block.error.empty()) {
      refuse("block " + text(blockIdx) + ": " + block.error + " (seed " +
             std::to_string(seed_in_use) + ", launch " + std::to_string(launches - 1) + ")");
    }
  }
  if (config.starts_early && !waited) {
    refuse("launched to start early, but no block waits for the kernel before it");
  }
}

namespace {
const bool seeded = [] {
  const char* wanted = std::getenv("EECORE_EMULATOR_SEED");
  if (wanted != nullptr) set_seed(std::strtoull(wanted, nullptr, 10));
  return true;
}();
}  // namespace

}  // namespace emulator
