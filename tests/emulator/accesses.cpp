#include "emulator/accesses.h"

#include <sstream>
#include <vector>

#include "emulator/machine.h"

namespace emulator {

bool counts_accesses = false;

namespace {

constexpr size_t kGranule = 2;  // bytes, the smallest element

struct Watched {
  std::string name;
  const unsigned char* begin;
  size_t bytes;
  std::vector<bool> seen;  // granules
  uint64_t total = 0, distinct = 0;
};

struct Launch {
  LaunchConfig config;
  std::vector<Watched> watched;
};

std::vector<Watched> watched;
std::vector<Launch> launches;

}  // namespace

void count_global(const void* address, size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(address);
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

void begin_counted_launch(const LaunchConfig& config) { launches.push_back({config, watched}); }

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
         << "\",\"grid\":[" << each.config.grid.x << "," << each.config.grid.y << "],\"watched\":{";
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
