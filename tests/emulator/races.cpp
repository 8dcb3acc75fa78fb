#include "emulator/races.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/order.h"

namespace emulator {

bool checks_races = false;

namespace {

// ---- The state of a piece of global memory ----

constexpr uint32_t kManyBlocks = 0xffffffff;

// The threads that touched it: one thread of a block of a launch, or several.
struct Access {
  uint32_t launch = 0, block = 0, time = 0;  // no launch is 0
  uint16_t thread = kNobody;
  bool is_atomic = false;
};

struct Cell {
  Access write, read;        // the last write, and the reads since
  uint32_t read_before = 0;  // the last launch that read it, before that of `read`
};

// Pages hold cells of as many bytes as all accesses so far have been multiples of.
constexpr uintptr_t kPageBytes = 4096;
constexpr uint32_t kMaxGranule = 16;
struct Page {
  uint32_t granule = kMaxGranule;
  std::vector<Cell> cells{kPageBytes / kMaxGranule};

  void refine(uint32_t wanted) {
    std::vector<Cell> finer(kPageBytes / wanted);
    for (size_t i = 0; i < finer.size(); ++i) finer[i] = cells[i * wanted / granule];
    cells = std::move(finer);
    granule = wanted;
  }
};

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uintptr_t last_page_number = 0;
Page* last_page = nullptr;
uint64_t num_checked_so_far = 0;

Page& page_of(uintptr_t address) {
  const uintptr_t number = address / kPageBytes;
  if (last_page == nullptr || number != last_page_number) {
    auto& page = pages[number];
    if (page == nullptr) page = std::make_unique<Page>();
    last_page_number = number;
    last_page = page.get();
  }
  return *last_page;
}

// Where all that is known is of launches that have ended.
constexpr size_t kManyPages = 10000;
void forget() {
  pages.clear();
  last_page = nullptr;
}

// ---- Launches: numbered from 1 on ----

uint32_t launch_number = 0;
std::vector<std::string> names{""};  // of each
uint32_t known_at_start = 0;         // the last launch of which the blocks know then that it ended
uint32_t next_knows = 0;             // what the next one knows so far, if it starts early

uint32_t known() { return knows_of_previous_kernel() ? launch_number - 1 : known_at_start; }

// ---- Blocks of the running launch ----

// A thread's knowledge of its block when it reached a fence.
struct Release {
  uint32_t block;
  Knowledge knowledge;
};
using Releases = std::vector<std::shared_ptr<const Release>>;

// A thread's knowledge of other blocks, from a time on.
struct Acquisition {
  uint16_t thread;
  uint32_t time;
  Releases releases;
};

std::unordered_map<uintptr_t, Releases> released;  // by atomics of an address
uint32_t block_number = 0;
bool has_let_next_start = false;
std::vector<Acquisition> acquired;        // by the running block
std::array<Releases, kMaxThreads> found;  // by atomics of a thread, with no fence after them yet
std::array<Releases, kMaxThreads> to_release;  // with the next atomic of a thread

// Whether an access by another block of this launch has happened for the running thread.
bool is_acquired(const Access& access) {
  return std::any_of(acquired.begin(), acquired.end(), [&](const Acquisition& each) {
    return happened(each.thread, each.time) &&
           std::any_of(each.releases.begin(), each.releases.end(), [&](const auto& release) {
             return release->block == access.block &&
                    happened_for(release->knowledge, access.thread, access.time);
           });
  });
}

bool is_ordered(const Access& access) {
  if (access.launch == 0) return true;
  if (access.launch != launch_number) return access.launch <= known();
  if (access.block == block_number) return happened(access.thread, access.time);
  return access.block != kManyBlocks && is_acquired(access);
}

// ---- Messages about faults ----

const char* verb(Touch touch) {
  return touch == Touch::kRead ? "reads" : touch == Touch::kWrite ? "writes" : "changes";
}

[[noreturn]] void complain(Touch touch, uintptr_t at, const char* did, const Access& access,
                           const void* place) {
  std::ostringstream text;
  text << verb(touch) << " global memory";
  Dl_info info;
  if (dladdr(place, &info) != 0) {
    text << " (0x" << std::hex
         << static_cast<const char*>(place) - static_cast<const char*>(info.dli_fbase) << std::dec
         << " of the library)";
  }
  text << " that ";
  if (access.launch != launch_number) {
    const uint32_t ahead = launch_number - access.launch;
    text << names[access.launch] << ", " << ahead << (ahead == 1 ? " kernel" : " kernels")
         << " ahead, " << did << ", which need not have ended";
  } else if (access.block == block_number) {
    text << name_of(access.thread) << " " << did << " with no barrier between";
  } else {
    text << (access.block == kManyBlocks ? "several blocks "
                                         : "block " + std::to_string(access.block) + " ")
         << did << " with no order between: fence, atomic, atomic, fence";
  }
  text << " (address 0x" << std::hex << at << ")";
  fail(text.str());
}

void check_ordered(Touch touch, uintptr_t at, const char* did, const Access& access,
                   const void* place) {
  if (!is_ordered(access)) complain(touch, at, did, access, place);
}

// ---- The check ----

// `access` joined with one of the running thread: the latter alone where it comes after.
Access with_mine(const Access& access, bool is_atomic) {
  Access mine{launch_number, block_number, now(), static_cast<uint16_t>(thread_number()),
              is_atomic};
  if (access.launch != launch_number || is_ordered(access)) return mine;
  if (access.block == block_number) {
    mine.thread = joined(access.thread, access.time);
  } else {
    mine.block = kManyBlocks;
  }
  return mine;
}

void check_cell(Touch touch, Cell& cell, uintptr_t at, const void* place) {
  const bool both_atomic =
      touch == Touch::kAtomic && cell.write.is_atomic && cell.write.launch == launch_number;
  if (!both_atomic) check_ordered(touch, at, "wrote", cell.write, place);
  if (touch == Touch::kRead) {
    if (cell.read.launch != launch_number) cell.read_before = cell.read.launch;
    cell.read = with_mine(cell.read, false);
    return;
  }
  check_ordered(touch, at, "read", cell.read, place);
  if (cell.read_before > known()) {
    Access earlier;
    earlier.launch = cell.read_before;
    complain(touch, at, "read", earlier, place);
  }
  cell.write = with_mine(both_atomic ? cell.write : Access{}, touch == Touch::kAtomic);
  cell.read = {};
  cell.read_before = 0;
}

// This library's own variables: threadIdx and the like.
bool is_ours(uintptr_t at) {
  static const std::pair<uintptr_t, uintptr_t> range = [] {
    std::pair<uintptr_t, uintptr_t> found_range{0, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* out) {
          uintptr_t begin = ~uintptr_t{0}, end = 0;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& segment = info->dlpi_phdr[i];
            if (segment.p_type != PT_LOAD) continue;
            begin = std::min<uintptr_t>(begin, info->dlpi_addr + segment.p_vaddr);
            end = std::max<uintptr_t>(end, info->dlpi_addr + segment.p_vaddr + segment.p_memsz);
          }
          const auto mine = reinterpret_cast<uintptr_t>(&checks_races);
          if (mine < begin || mine >= end) return 0;
          *static_cast<std::pair<uintptr_t, uintptr_t>*>(out) = {begin, end};
          return 1;
        },
        &found_range);
    return found_range;
  }();
  return at >= range.first && at < range.second;
}

}  // namespace

void check_global(Touch touch, const void* address, size_t bytes, const void* place) {
  auto at = reinterpret_cast<uintptr_t>(address);
  if (bytes == 0 || is_own_memory(address) || !is_in_kernel() || is_ours(at)) return;
  ++num_checked_so_far;
  const uint32_t granule = std::min<uint32_t>(
      1u << std::countr_zero(static_cast<uint32_t>(at | bytes | kMaxGranule)), kMaxGranule);
  for (const uintptr_t end = at + bytes; at < end;) {
    Page& page = page_of(at);
    if (granule < page.granule) page.refine(granule);
    const uintptr_t end_here = std::min(end, (at / kPageBytes + 1) * kPageBytes);
    for (; at < end_here; at += page.granule) {
      check_cell(touch, page.cells[at % kPageBytes / page.granule], at, place);
    }
  }
  if (touch != Touch::kAtomic) return;
  Releases& here = released[reinterpret_cast<uintptr_t>(address)];
  const int me = thread_number();
  found[me].insert(found[me].end(), here.begin(), here.end());
  here.insert(here.end(), to_release[me].begin(), to_release[me].end());
}

void check_fence() {
  const int me = thread_number();
  pass_time();
  if (!found[me].empty()) {
    acquired.push_back({static_cast<uint16_t>(me), now(), std::exchange(found[me], {})});
  }
  to_release[me] = {std::make_shared<const Release>(Release{block_number, knowledge()})};
  for (const Acquisition& each : acquired) {
    if (!happened(each.thread, each.time)) continue;
    to_release[me].insert(to_release[me].end(), each.releases.begin(), each.releases.end());
  }
}

void let_next_kernel_start() {
  if (std::exchange(has_let_next_start, true)) return;
  next_knows = std::min(next_knows, known());
}

void begin_checked_launch(const LaunchConfig& config) {
  ++launch_number;
  if (!config.starts_early && pages.size() > kManyPages) forget();
  names.push_back(config.kernel);
  known_at_start = config.starts_early ? next_knows : launch_number - 1;
  next_knows = launch_number;
  released.clear();
}

void begin_checked_block(int64_t number) {
  block_number = static_cast<uint32_t>(number);
  has_let_next_start = false;
  acquired.clear();
  found.fill({});
  to_release.fill({});
}

void end_checked_block(bool waited) {
  if (!has_let_next_start) {
    next_knows = std::min(next_knows, waited ? launch_number - 1 : known_at_start);
  }
}

void check_races(bool on) {
  checks_races = on;
  num_checked_so_far = 0;
  forget();
  launch_number = 0;
  names.assign(1, "");
  next_knows = 0;
}

void launch_foreign() {
  ++launch_number;
  names.emplace_back();
  next_knows = launch_number;
  if (pages.size() > kManyPages) forget();
}

uint64_t num_checked() { return num_checked_so_far; }

}  // namespace emulator

// ---- The hooks of g++ -fsanitize=thread for every access; its own library is not linked ----

#define EMULATOR_SEEN(name, touch, bytes) \
  extern "C" __attribute__((visibility("hidden"))) void __tsan_##name(const void* address) { \
    if (emulator::checks_races && !emulator::is_own_memory(address)) { \
      emulator::check_global(touch, address, bytes, __builtin_return_address(0)); \
    } \
  }
#define EMULATOR_SEEN_OF(bytes) \
  EMULATOR_SEEN(read##bytes, emulator::Touch::kRead, bytes) \
  EMULATOR_SEEN(write##bytes, emulator::Touch::kWrite, bytes) \
  EMULATOR_SEEN(unaligned_read##bytes, emulator::Touch::kRead, bytes) \
  EMULATOR_SEEN(unaligned_write##bytes, emulator::Touch::kWrite, bytes) \
  EMULATOR_SEEN(volatile_read##bytes, emulator::Touch::kRead, bytes) \
  EMULATOR_SEEN(volatile_write##bytes, emulator::Touch::kWrite, bytes)
EMULATOR_SEEN_OF(1)
EMULATOR_SEEN_OF(2)
EMULATOR_SEEN_OF(4)
EMULATOR_SEEN_OF(8)
EMULATOR_SEEN_OF(16)

#define EMULATOR_SEEN_RANGE(name, touch) \
  extern "C" __attribute__((visibility("hidden"))) void __tsan_##name(const void* address, \
                                                                      size_t bytes) { \
    if (emulator::checks_races) { \
      emulator::check_global(touch, address, bytes, __builtin_return_address(0)); \
    } \
  }
EMULATOR_SEEN_RANGE(read_range, emulator::Touch::kRead)
EMULATOR_SEEN_RANGE(write_range, emulator::Touch::kWrite)

#define EMULATOR_IGNORED(name, ...) \
  extern "C" __attribute__((visibility("hidden"))) void __tsan_##name(__VA_ARGS__) {}
EMULATOR_IGNORED(init)
EMULATOR_IGNORED(func_entry, void*)
EMULATOR_IGNORED(func_exit)
EMULATOR_IGNORED(vptr_read, void*)
EMULATOR_IGNORED(vptr_update, void*, void*)

// Called by the launching code: whether a static variable has its value yet.
extern "C" __attribute__((visibility("hidden"))) uint8_t
__tsan_atomic8_load(const volatile uint8_t* address, int order) {
  static_cast<void>(order);
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
