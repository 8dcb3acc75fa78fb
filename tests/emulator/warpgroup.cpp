#include "emulator/warpgroup.h"

#include <cstring>
#include <deque>
#include <vector>

#include "emulator/order.h"

namespace emulator {
namespace {

// ---- Descriptors ----

constexpr uint32_t kAddressMask = 0x3ffff;
constexpr uint64_t kReservedBits = 0xc000c000ull | 0x3ull << 46 | 1ull << 48 | 0x3ffull << 52;

// A matrix b[16, columns] in shared memory, decoded.
struct Matrix {
  uint32_t start, leading, stride, base_offset;
  uint32_t column_bytes, next_bytes;  // from a column to the next, from 8 of its elements to 8 more
  uint32_t phases;                    // of the swizzle, less one

  explicit Matrix(uint64_t descriptor) {
    const auto field = [&](int bit) {
      return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4;
    };
    start = field(0);
    leading = field(16);
    stride = field(32);
    base_offset = static_cast<uint32_t>(descriptor >> 49 & 7);
    const uint32_t sizes[4] = {16, 128, 64, 32};
    column_bytes = sizes[descriptor >> 62];
    next_bytes = column_bytes == 16 ? leading : 16;
    phases = column_bytes / 16 - 1;
  }

  // Where 8 elements of a column are: the first or the second 8.
  uint32_t offset_of(int column, int half) const {
    uint32_t address = start + static_cast<uint32_t>(column / 8) * stride +
                       static_cast<uint32_t>(column % 8) * column_bytes +
                       static_cast<uint32_t>(half) * next_bytes;
    address ^= (((address >> 7) - base_offset) & phases) << 4;
    address &= kAddressMask;
    const uint32_t dynamic_bytes = dynamic_shared_end() - dynamic_shared_begin();
    return address < dynamic_bytes
               ? dynamic_shared_begin() + address
               : dynamic_shared_begin() - kStaticSharedBytes + address - dynamic_bytes;
  }
};

// ---- State of the running block ----

struct Started {
  WgmmaProduct product;
  uint32_t parts[4][4];  // of A, of the four lanes that share this thread's rows
  bool landed;
};
struct OfThread {
  uint32_t fences = 0;
  std::vector<std::vector<Started>> groups;  // under way, the last one open
};
std::vector<OfThread> threads;

// What the warps of a warpgroup came to, in order, and how much of it each of them.
struct Call {
  const char* what;
  std::source_location site;
  uint64_t matrix;
  int num_tiles, warp;
};
struct Warpgroup {
  std::deque<Call> calls;  // those that some warp has still to come to
  size_t num_gone = 0;     // calls ahead of them
  size_t came[4] = {};
};
std::vector<Warpgroup> warpgroups;
int num_threads_of_block = 0;

std::string text(const Call& call) {
  const std::string file = call.site.file_name();
  return std::string(call.what) + " at " + file.substr(file.rfind('/') + 1) + ":" +
         std::to_string(call.site.line());
}

OfThread& me() { return threads[thread_number()]; }

// All lanes of the warp have come to a call, which the warps of its warpgroup have to agree on.
void come_to(const Call& call) {
  const int warp = thread_number() / 32;
  if ((warp / 4 + 1) * 128 > num_threads_of_block) {
    fail(text(call) + ": expected a block of whole warpgroups of 128 threads, got one of " +
         std::to_string(num_threads_of_block));
  }
  if (lane() != 0) return;
  Warpgroup& group = warpgroups[warp / 4];
  const size_t number = group.came[warp % 4]++;
  if (number == group.num_gone + group.calls.size()) {
    group.calls.push_back(call);
  } else {
    const Call& other = group.calls[number - group.num_gone];
    if (std::strcmp(call.what, other.what) != 0 || call.site.line() != other.site.line() ||
        call.matrix != other.matrix || call.num_tiles != other.num_tiles) {
      fail("divergent warpgroup: it comes to " + text(call) + ", warp " +
           std::to_string(other.warp) + " to " + text(other) +
           (call.matrix == other.matrix ? "" : " with another matrix"));
    }
  }
  while (!group.calls.empty()) {
    for (const size_t came : group.came) {
      if (came == group.num_gone) return;
    }
    group.calls.pop_front();
    ++group.num_gone;
  }
}

void come_to_all(const char* what, const std::source_location& site) {
  gather(0xffffffffu, what, nullptr, 0, nullptr, false, site);
  come_to({what, site, 0, 0, thread_number() / 32});
}

// The lane's share of what its warp reads: columns lane, lane + 32..
template <typename Body>
void for_own_columns(const WgmmaProduct& product, const Body& body) {
  const Matrix matrix(product.matrix);
  for (int column = lane(); column < 8 * product.num_tiles; column += 32) {
    for (int half = 0; half < 2; ++half) body(matrix.offset_of(column, half));
  }
}

void land(Started& started) {
  if (started.landed) return;
  started.landed = true;
  const WgmmaProduct& product = started.product;
  const Matrix matrix(product.matrix);
  const int pair = lane() % 4;
  for (int column = 0; column < 2 * product.num_tiles; ++column) {
    uint32_t b[2][4];
    const int n = column / 2, i = column % 2;
    for (int half = 0; half < 2; ++half) {
      std::memcpy(b[half], shared_bytes(matrix.offset_of(8 * n + 2 * pair + i, half), 16), 16);
    }
    for (int below = 0; below < 2; ++below) {
      float& sum = product.sums[4 * n + 2 * below + i];
      if (!product.adds) sum = 0.0f;
      for (int k = 0; k < 16; ++k) {
        const int high = k / 8, of_pair = k % 2;
        const uint32_t a = started.parts[k % 8 / 2][2 * high + below];
        sum += product.element(a, of_pair) * product.element(b[high][k % 8 / 2], of_pair);
      }
    }
  }
}

}  // namespace

WgmmaRegisters::~WgmmaRegisters() {
  if (under_way_ > 0) {
    fail("gives up registers of a wgmma that is under way: no wait for its group");
  }
}

void WgmmaRegisters::touch(bool is_write) {
  if (under_way_ > 0 && (is_write || is_sum_)) {
    fail(std::string(is_write ? "writes" : "reads") + (is_sum_ ? " sums" : " a part of A") +
         " of a wgmma that is under way: no wait for its group");
  }
  touched_after_ = me().fences;
}

void WgmmaRegisters::begin_product(bool is_sum) {
  if (me().fences == touched_after_) {
    fail(std::string("starts a wgmma with ") + (is_sum ? "sums" : "a part of A") +
         " that it has touched since its last wgmma_fence");
  }
  is_sum_ = is_sum;
  ++under_way_;
}

void start_product(const WgmmaProduct& product, const std::source_location& site) {
  if ((product.matrix & kReservedBits) != 0) {
    fail("starts a wgmma with a descriptor whose reserved bits are not 0");
  }
  struct Gift {
    uint64_t matrix;
    uint32_t part[4];
  } mine{product.matrix, {}};
  std::memcpy(mine.part, product.part, sizeof mine.part);
  product.sum_registers->begin_product(true);
  product.part_registers->begin_product(false);
  const Gathered<Gift> all(0xffffffffu, "wgmma", mine, site);
  for (const Gift& gift : all.of) {
    if (gift.matrix != product.matrix) {
      fail("divergent warp: its lanes start a wgmma with different descriptors");
    }
  }
  come_to({"wgmma", site, product.matrix, product.num_tiles, thread_number() / 32});
  for_own_columns(product, [](uint32_t offset) { begin_async_read(offset, 16, "wgmma"); });
  Started started{product, {}, false};
  for (int i = 0; i < 4; ++i) {
    std::memcpy(started.parts[i], all.of[lane() / 4 * 4 + i].part, sizeof started.parts[i]);
  }
  me().groups.back().push_back(started);
  if (coin()) {  // they land one after the other
    for (auto& group : me().groups) {
      for (Started& each : group) land(each);
    }
  }
}

void fence_wgmma(const std::source_location& site) {
  come_to_all("wgmma_fence", site);
  ++me().fences;
}

void commit_products(const std::source_location& site) {
  come_to_all("wgmma_commit", site);
  me().groups.emplace_back();
}

void wait_for_products(int pending_groups, const std::source_location& site) {
  come_to_all("wgmma_wait", site);
  auto& groups = me().groups;
  while (static_cast<int>(groups.size()) - 1 > pending_groups) {
    for (Started& started : groups.front()) {
      land(started);
      started.product.sum_registers->end_product();
      started.product.part_registers->end_product();
      for_own_columns(started.product, [](uint32_t offset) { end_async_read(offset, 16); });
    }
    groups.erase(groups.begin());
  }
}

uint32_t wgmma_address(uint32_t offset) {
  const uint32_t dynamic = dynamic_shared_begin();
  return offset >= dynamic
             ? offset - dynamic
             : dynamic_shared_end() - dynamic + (offset + kStaticSharedBytes - dynamic);
}

void begin_warpgroups(int num_threads) {
  num_threads_of_block = num_threads;
  threads.resize(kMaxThreads);
  for (int i = 0; i < num_threads; ++i) {
    threads[i].fences = 0;
    threads[i].groups.assign(1, {});
  }
  warpgroups.assign(num_threads / 128 + 1, {});
}

std::string end_warpgroups() {
  for (const Warpgroup& group : warpgroups) {
    if (group.calls.empty()) continue;
    const Call& call = group.calls.front();
    for (int warp = 0; warp < 4; ++warp) {
      if (group.came[warp] > group.num_gone) continue;
      const auto number = static_cast<int>(&group - warpgroups.data()) * 4 + warp;
      return "divergent warpgroup: warp " + std::to_string(call.warp) + " came to " + text(call) +
             ", warp " + std::to_string(number) + " has ended";
    }
  }
  return "";
}

}  // namespace emulator
