#include "emulator/warpgroup.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "emulator/order.h"

namespace emulator {
namespace {

// ---- Descriptors ----

constexpr uint32_t kAddressMask = 0x3ffff;
constexpr uint64_t kReservedBits = 0xc000c000ull | 0x3ull << 46 | 1ull << 48 | 0x3ffull << 52;

// A matrix b[16, columns] in shared memory, decoded; or a, whose rows are such columns.
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
    return offset_at(start + static_cast<uint32_t>(column / 8) * stride +
                     static_cast<uint32_t>(column % 8) * column_bytes +
                     static_cast<uint32_t>(half) * next_bytes);
  }

  // Of a transposed matrix with a swizzle of 128 bytes, where 8 columns of row k are.
  uint32_t offset_of_row(int k, int tile) const {
    return offset_at(
        start + static_cast<uint32_t>(k / 8) * stride + static_cast<uint32_t>(k % 8) * 128 +
        static_cast<uint32_t>(tile / 8) * leading + static_cast<uint32_t>(tile % 8) * 16);
  }

 private:
  uint32_t offset_at(uint32_t address) const {
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
  uint64_t a, b;
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
        call.a != other.a || call.b != other.b || call.num_tiles != other.num_tiles) {
      fail("divergent warpgroup: it comes to " + text(call) + ", warp " +
           std::to_string(other.warp) + " to " + text(other) +
           (call.a == other.a && call.b == other.b ? "" : " with another matrix"));
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
  come_to({what, site, 0, 0, 0, thread_number() / 32});
}

// The lane's share of the 16-byte pieces of shared memory that its warp reads.
template <typename Body>
void for_own_pieces(const WgmmaProduct& product, const Body& body) {
  const Matrix b(product.b);
  for (int i = lane(); i < 16 * product.num_tiles; i += 32) {
    body(product.is_transposed ? b.offset_of_row(i % 16, i / 16) : b.offset_of(i / 2, i % 2));
  }
  if (product.part_registers != nullptr) return;
  const Matrix a(product.a);
  for (int i = lane(); i < 2 * 64; i += 32) body(a.offset_of(i / 2, i % 2));
}

// The 16 elements of a column.
void load_column(const WgmmaProduct& product, const Matrix& matrix, int column, float (&out)[16]) {
  for (int half = 0; half < 2; ++half) {
    uint32_t pairs[4];
    std::memcpy(pairs, shared_bytes(matrix.offset_of(column, half), 16), 16);
    for (int k = 0; k < 8; ++k) out[8 * half + k] = product.element(pairs[k / 2], k % 2);
  }
}

void land(Started& started) {
  if (started.landed) return;
  started.landed = true;
  const WgmmaProduct& product = started.product;
  const int pair = lane() % 4;
  float a[2][16], b[16];  // two rows, and a column
  for (int below = 0; below < 2; ++below) {
    if (product.part_registers == nullptr) {
      const int row = thread_number() / 32 % 4 * 16 + lane() / 4 + 8 * below;
      load_column(product, Matrix(product.a), row, a[below]);
      continue;
    }
    for (int k = 0; k < 16; ++k) {
      a[below][k] = product.element(started.parts[k % 8 / 2][k / 8 * 2 + below], k % 2);
    }
  }
  const Matrix matrix(product.b);
  for (int n = 0; n < product.num_tiles; ++n) {
    for (int i = 0; i < 2; ++i) {
      if (product.is_transposed) {
        for (int k = 0; k < 16; ++k) {
          uint16_t bits;
          std::memcpy(&bits, shared_bytes(matrix.offset_of_row(k, n), 16) + 4 * pair + 2 * i, 2);
          b[k] = product.element(bits, 0);
        }
      } else {
        load_column(product, matrix, 8 * n + 2 * pair + i, b);
      }
      for (int below = 0; below < 2; ++below) {
        float& sum = product.sums[4 * n + 2 * below + i];
        if (!product.adds) sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += a[below][k] * b[k];
      }
    }
  }
}

// ---- Registers of each warp, and those that none has ----

std::vector<int> registers;
int free_registers = 0;
std::vector<int> waiting_for_registers;  // threads

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
  if (((product.a | product.b) & kReservedBits) != 0) {
    fail("starts a wgmma with a descriptor whose reserved bits are not 0");
  }
  if (product.is_transposed && product.b >> 62 != 1) {
    fail(
        "starts a wgmma with a transposed matrix: the emulator knows a swizzle of 128 bytes alone");
  }
  struct Gift {
    uint64_t a, b;
    uint32_t part[4];
  } mine{product.a, product.b, {}};
  product.sum_registers->begin_product(true);
  if (product.part_registers != nullptr) {
    std::memcpy(mine.part, product.part, sizeof mine.part);
    product.part_registers->begin_product(false);
  }
  const Gathered<Gift> all(0xffffffffu, "wgmma", mine, site);
  for (const Gift& gift : all.of) {
    if (gift.a != product.a || gift.b != product.b) {
      fail("divergent warp: its lanes start a wgmma with different descriptors");
    }
  }
  come_to({"wgmma", site, product.a, product.b, product.num_tiles, thread_number() / 32});
  for_own_pieces(product, [](uint32_t offset) { begin_async_read(offset, 16, "wgmma"); });
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
      if (started.product.part_registers != nullptr) started.product.part_registers->end_product();
      for_own_pieces(started.product, [](uint32_t offset) { end_async_read(offset, 16); });
    }
    groups.erase(groups.begin());
  }
}

void move_registers(int count, bool takes, const std::source_location& site) {
  const char* const what = takes ? "take_registers" : "give_registers";
  come_to_all(what, site);
  if (lane() == 0) {
    int& mine = registers[thread_number() / 32];
    if (takes ? count < mine : count > mine) {
      fail(std::string(what) + " to " + std::to_string(count) + ", of " + std::to_string(mine));
    }
    while (free_registers < 32 * (count - mine)) {
      waiting_for_registers.push_back(thread_number());
      await_wake(what, site);
    }
    free_registers -= 32 * (count - mine);
    mine = count;
    for (const int thread : std::exchange(waiting_for_registers, {})) wake(thread);
  }
  gather(0xffffffffu, what, nullptr, 0, nullptr, false, site);
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
  const auto of_block = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  registers.assign(kMaxWarps, std::min(256, 65536 / of_block / 8 * 8));
  free_registers = 0;
  waiting_for_registers.clear();
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
