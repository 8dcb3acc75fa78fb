#include "emulator/accesses.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <sstream>
#include <unordered_map>
#include <vector>

#include "emulator/machine.h"

namespace emulator {

bool counts_accesses = false;

namespace {

constexpr size_t kGranule = 2;  // bytes, the smallest element
constexpr size_t kSector = 32;
constexpr int kNumBanks = 32, kBankBytes = 4;

struct Watched {
  std::string name;
  const unsigned char* begin;
  size_t bytes;
  std::vector<bool> seen;  // granules
  uint64_t total = 0, distinct = 0;
};

// Simultaneous accesses of the lanes of a warp.
struct Instruction {
  uint32_t lanes = 0, bytes = 0;
  std::array<uint64_t, 32> at{};
};

// The accesses of a block, by warp and place.
using Places = std::map<std::pair<int, const void*>, std::vector<Instruction>>;

// The number of accesses of each thread at a place.
using Counts = std::unordered_map<const void*, uint32_t>;

// Bytes that a thread copies by cp.async; those that it fills with zeros count too.
struct Copies {
  struct Wait {
    uint64_t landed, in_flight;
  };
  uint64_t started = 0, landed = 0;
  std::vector<Wait> waits;
};

struct Launch {
  LaunchConfig config;
  std::vector<Watched> watched;
  uint64_t sectors = 0, least_sectors = 0;
  int bank_ways = 0;
  std::string bank_place;
  uint64_t in_flight = 0, drained = 0;
};

std::vector<Watched> watched;
std::vector<Launch> launches;
Places global_places, shared_places;
std::vector<Counts> global_counts, shared_counts;  // of each thread
std::vector<Copies> copies;                        // of each thread

void note(Places& places, std::vector<Counts>& counts, const void* place, uint64_t at,
          size_t bytes) {
  const int thread = thread_number();
  if (counts.size() <= static_cast<size_t>(thread)) counts.resize(thread + 1);
  const uint32_t n = counts[thread][place]++;
  std::vector<Instruction>& made = places[{thread / 32, place}];
  if (made.size() <= n) made.resize(n + 1);
  made[n].lanes |= 1u << thread % 32;
  made[n].bytes = static_cast<uint32_t>(bytes);
  made[n].at[thread % 32] = at;
}

void count_sectors(const Instruction& made, Launch& launch) {
  std::set<uint64_t> sectors, granules;
  for (int lane = 0; lane < 32; ++lane) {
    if ((made.lanes >> lane & 1u) == 0) continue;
    for (uint64_t at = made.at[lane]; at < made.at[lane] + made.bytes; at += kGranule) {
      sectors.insert(at / kSector);
      granules.insert(at / kGranule);
    }
  }
  launch.sectors += sectors.size();
  launch.least_sectors += (granules.size() * kGranule + kSector - 1) / kSector;
}

// The most words of one bank that lanes ask for together: all lanes 4 bytes each, half of them 8,
// a quarter of them 16.
int bank_ways(const Instruction& made) {
  const int together = made.bytes <= 4 ? 32 : made.bytes <= 8 ? 16 : 8;
  int most = 0;
  for (int first = 0; first < 32; first += together) {
    std::array<std::set<uint64_t>, kNumBanks> words;
    for (int lane = first; lane < first + together; ++lane) {
      if ((made.lanes >> lane & 1u) == 0) continue;
      for (uint64_t at = made.at[lane]; at < made.at[lane] + made.bytes; at += kGranule) {
        words[at / kBankBytes % kNumBanks].insert(at / kBankBytes);
      }
    }
    for (const auto& of_bank : words) most = std::max(most, static_cast<int>(of_bank.size()));
  }
  return most;
}

// The most bytes that a block has in flight when its threads wait, and the most by which another
// wait has less than that, or than what is still to be copied if that is less.
void count_in_flight(Launch& launch) {
  uint64_t in_flight = 0, drained = 0;
  for (const Copies& of_thread : copies) {
    uint64_t most = 0, missing = 0;
    for (const auto& wait : of_thread.waits) most = std::max(most, wait.in_flight);
    for (const auto& wait : of_thread.waits) {
      const uint64_t wanted = std::min(most, of_thread.started - wait.landed);
      missing = std::max(missing, wanted - wait.in_flight);
    }
    in_flight += most;
    drained += missing;
  }
  launch.in_flight = std::max(launch.in_flight, in_flight);
  launch.drained = std::max(launch.drained, drained);
}

Copies& copies_of_thread() {
  const size_t thread = static_cast<size_t>(thread_number());
  if (copies.size() <= thread) copies.resize(thread + 1);
  return copies[thread];
}

// A place in the library, for addr2line, and the accesses of its lanes there.
std::string described(const void* place, const Instruction& made) {
  std::ostringstream text;
  Dl_info info;
  if (dladdr(place, &info) != 0) {
    text << std::hex << "0x"
         << static_cast<const char*>(place) - static_cast<const char*>(info.dli_fbase) << std::dec;
  }
  text << ": " << made.bytes << " bytes at";
  for (int lane = 0; lane < 32; ++lane) {
    if ((made.lanes >> lane & 1u) != 0) text << " " << made.at[lane];
  }
  return text.str();
}

}  // namespace

void count_global(const void* address, size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(address);
  note(global_places, global_counts, __builtin_return_address(0),
       reinterpret_cast<uintptr_t>(address), bytes);
  for (Watched& each : launches.back().watched) {
    if (begin < each.begin || begin + bytes > each.begin + each.bytes) continue;
    each.total += bytes;
    for (size_t i = 0; i < bytes; i += kGranule) {
      const size_t granule = static_cast<size_t>(begin - each.begin + i) / kGranule;
      if (!each.seen[granule]) each.distinct += kGranule;
      each.seen[granule] = true;
    }
  }
}

void count_shared(uint32_t offset, size_t bytes) {
  note(shared_places, shared_counts, __builtin_return_address(0), offset, bytes);
}

void count_copy(size_t bytes) { copies_of_thread().started += bytes; }

void count_wait() {
  Copies& mine = copies_of_thread();
  mine.waits.push_back({mine.landed, mine.started - mine.landed});
}

void count_landed(size_t bytes) { copies_of_thread().landed += bytes; }

void begin_counted_launch(const LaunchConfig& config) {
  launches.emplace_back();
  launches.back().config = config;
  launches.back().watched = watched;
}

void end_counted_block() {
  Launch& launch = launches.back();
  for (const auto& [key, made] : global_places) {
    for (const Instruction& each : made) count_sectors(each, launch);
  }
  for (const auto& [key, made] : shared_places) {
    for (const Instruction& each : made) {
      const int ways = bank_ways(each);
      if (ways <= launch.bank_ways) continue;
      launch.bank_ways = ways;
      launch.bank_place = described(key.second, each);
    }
  }
  count_in_flight(launch);
  copies.clear();
  global_places.clear();
  shared_places.clear();
  global_counts.clear();
  shared_counts.clear();
}

void end_counted_launch() {
  for (Watched& each : launches.back().watched) each.seen.clear();
}

void count_accesses(bool on) {
  counts_accesses = on;
  launches.clear();
  watched.clear();
}

void watch(const std::string& name, const void* begin, size_t bytes) {
  watched.push_back({name, static_cast<const unsigned char*>(begin), bytes,
                     std::vector<bool>((bytes + kGranule - 1) / kGranule)});
}

std::string counted_launches() {
  std::ostringstream text;
  text << "[";
  for (const Launch& each : launches) {
    text << (&each == launches.data() ? "" : ",") << "{\"kernel\":\"" << each.config.kernel
         << "\",\"grid\":[" << each.config.grid.x << "," << each.config.grid.y
         << "],\"starts_early\":" << (each.config.starts_early ? "true" : "false")
         << ",\"sectors\":" << each.sectors << ",\"least_sectors\":" << each.least_sectors
         << ",\"in_flight\":" << each.in_flight << ",\"drained\":" << each.drained
         << ",\"bank_ways\":" << each.bank_ways << ",\"bank_place\":\"" << each.bank_place
         << "\",\"watched\":{";
    for (const Watched& seen : each.watched) {
      text << (&seen == each.watched.data() ? "" : ",") << "\"" << seen.name << "\":[" << seen.total
           << "," << seen.distinct << "]";
    }
    text << "}}";
  }
  text << "]";
  return text.str();
}

}  // namespace emulator
