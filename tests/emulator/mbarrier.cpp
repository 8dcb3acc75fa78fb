#include "emulator/mbarrier.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "emulator/order.h"

// ---- Maps of tensors ----

namespace {

constexpr uint64_t kIsMap = 0x656d756c6d617000;
constexpr int kMaxRank = 4;

// The opaque part of a CUtensorMap.
struct TensorMap {
  uint64_t mark;  // kIsMap
  const unsigned char* data;
  uint8_t rank, element_bytes, is_swizzled;
  std::array<uint16_t, kMaxRank> box;
  std::array<int64_t, kMaxRank> sizes, strides;  // strides: bytes
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

}  // namespace

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const int element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT16 ? 2 : 1;
  const bool is_swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (rank < 1 || rank > kMaxRank || data == nullptr ||
      reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap made{kIsMap,
                 static_cast<const unsigned char*>(data),
                 static_cast<uint8_t>(rank),
                 static_cast<uint8_t>(element_bytes),
                 is_swizzled,
                 {},
                 {},
                 {}};
  for (cuuint32_t i = 0; i < rank; ++i) {
    const uint64_t stride = i == 0 ? element_bytes : strides[i - 1];
    const bool is_sound = sizes[i] >= 1 && sizes[i] <= uint64_t{1} << 32 && box[i] >= 1 &&
                          box[i] <= 256 && element_strides[i] == 1 &&
                          (i == 0 || (stride % 16 == 0 && stride < uint64_t{1} << 40));
    if (!is_sound) return CUDA_ERROR_INVALID_VALUE;
    made.box[i] = static_cast<uint16_t>(box[i]);
    made.sizes[i] = static_cast<int64_t>(sizes[i]);
    made.strides[i] = static_cast<int64_t>(stride);
  }
  const cuuint32_t row_bytes = box[0] * element_bytes;
  if (row_bytes % 16 != 0 || (is_swizzled && row_bytes > 128)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map->opaque, &made, sizeof made);
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool is_known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = is_known ? reinterpret_cast<void*>(cuTensorMapEncodeTiled) : nullptr;
  *found = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

namespace emulator {
namespace {

using Copy = std::vector<CopiedPiece>;
constexpr int kPieceBytes = 16;

struct Mbarrier {
  int number = 0, count = 0;
  int maker = 0;                  // the thread that initialised it
  uint32_t made = 0, fenced = 0;  // when, and when that thread called fence_mbarriers
  // The current phase: arrivals and bytes that it lacks.
  uint32_t phase = 0;
  int arrivals = 0;
  int64_t bytes = 0;
  // Of each warp the lanes that have arrived, and the last times: of an arrival, and of the last
  // __syncwarp or barrier before one.
  struct Arrived {
    int lanes = 0;
    uint32_t last = 0, synced = 0;
  };
  std::map<int, Arrived> arrived;
  WaitedFor told{};                   // what the threads that arrived know
  std::vector<Copy> started, landed;  // copies; those that landed in the current phase
  std::vector<Copy> unseen;  // of phases that have ended, but for which no thread has waited
  WaitedFor known{};         // what phases that have ended tell
  std::vector<std::pair<int, uint32_t>> waiting;  // threads, and the parity of their phase
};
std::map<uint32_t, Mbarrier> mbarriers;

uint16_t name_of_copies(const Mbarrier& barrier) {
  return static_cast<uint16_t>(kMbarrier | barrier.number);
}

void end_phase_if_complete(Mbarrier& barrier) {
  if (barrier.arrivals != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.arrivals = barrier.count;
  join(barrier.known, std::exchange(barrier.told, {}));
  // Lanes that are not all of their warp tell of what it did before it last synchronised.
  for (const auto& [warp, arrived] : barrier.arrived) {
    const uint32_t time = arrived.lanes == lanes_of_warp(warp) ? arrived.last : arrived.synced;
    barrier.known[warp] = std::max(barrier.known[warp], time);
  }
  barrier.arrived.clear();
  std::move(barrier.landed.begin(), barrier.landed.end(), std::back_inserter(barrier.unseen));
  barrier.landed.clear();
  std::erase_if(barrier.waiting, [&](const std::pair<int, uint32_t>& waiter) {
    if ((barrier.phase & 1) == waiter.second) return false;
    wake(waiter.first);
    return true;
  });
}

void land_all(Mbarrier& barrier) {
  for (Copy& copy : std::exchange(barrier.started, {})) {
    for (const CopiedPiece& piece : copy) {
      unsigned char* const to = shared_bytes(piece.to, kPieceBytes);
      std::memset(to, 0, kPieceBytes);
      if (piece.from != nullptr) {
        std::memcpy(to + piece.begin, piece.from, piece.end - piece.begin);
      }
      barrier.bytes -= kPieceBytes;
    }
    barrier.landed.push_back(std::move(copy));
    end_phase_if_complete(barrier);
  }
}

// An mbarrier that the running thread knows to be initialised.
Mbarrier& known_mbarrier(uint32_t offset) {
  const auto found = mbarriers.find(offset);
  if (found == mbarriers.end()) {
    fail("uses " + where(offset) + " as an mbarrier, which no thread has initialised");
  }
  if (!happened(static_cast<uint16_t>(found->second.maker), found->second.made)) {
    fail("uses the mbarrier at " + where(offset) + ", which thread " +
         std::to_string(found->second.maker) + " initialised with no barrier between");
  }
  return found->second;
}

}  // namespace

void init_mbarrier(uint32_t offset, int count) {
  if (count < 1 || count >= 1 << 20) {
    fail("initialises an mbarrier of " + std::to_string(count) +
         " arrivals: expected 1 to 1048575");
  }
  if (mbarriers.size() >= kMaxMbarriers) fail("initialises over 64 mbarriers");
  make_mbarrier(offset);
  Mbarrier barrier;
  barrier.number = static_cast<int>(mbarriers.size());
  barrier.count = count;
  barrier.maker = thread_number();
  barrier.made = now();
  barrier.arrivals = count;
  mbarriers.emplace(offset, std::move(barrier));
}

void fence_mbarriers() {
  for (auto& [offset, barrier] : mbarriers) {
    if (barrier.maker == thread_number() && barrier.fenced == 0) barrier.fenced = now();
  }
}

void arrive_at_mbarrier(uint32_t offset, int bytes) {
  Mbarrier& barrier = known_mbarrier(offset);
  if (bytes < 0 || bytes >= 1 << 20) {
    fail("expects " + std::to_string(bytes) + " bytes at an mbarrier: expected 0 to 1048575");
  }
  if (barrier.arrivals == 0) {
    fail("arrives at the mbarrier at " + where(offset) + " more often than its phase has " +
         std::to_string(barrier.count) + " arrivals: it lacks " + std::to_string(barrier.bytes) +
         " bytes alone");
  }
  pass_time();
  auto& arrived = barrier.arrived[thread_number() / 32];
  ++arrived.lanes;
  arrived.last = now();
  arrived.synced = std::max(arrived.synced, synced());
  join(barrier.told, waited_for());
  --barrier.arrivals;
  barrier.bytes += bytes;
  end_phase_if_complete(barrier);
  if (!barrier.waiting.empty()) land_all(barrier);
}

void wait_at_mbarrier(uint32_t offset, uint32_t parity, const std::source_location& site) {
  Mbarrier& barrier = known_mbarrier(offset);
  if (parity > 1) fail("waits for a phase of parity " + std::to_string(parity));
  land_all(barrier);
  if ((barrier.phase & 1) == parity) {
    barrier.waiting.emplace_back(thread_number(), parity);
    await_wake("mbarrier_wait", site);
  }
  for (const Copy& copy : std::exchange(barrier.unseen, {})) {
    for (const CopiedPiece& piece : copy) {
      end_async_write(piece.to, kPieceBytes, name_of_copies(barrier));
    }
  }
  pass_time();
  WaitedFor known = barrier.known;
  known[kMaxWarps + barrier.number] = now();
  learn(known);
}

void start_counted_copy(Copy pieces, uint32_t offset) {
  Mbarrier& barrier = known_mbarrier(offset);
  if (barrier.fenced == 0 || !happened(static_cast<uint16_t>(barrier.maker), barrier.fenced)) {
    fail("starts a copy for the mbarrier at " + where(offset) +
         ", after whose initialisation no fence_mbarrier_init came");
  }
  for (const CopiedPiece& piece : pieces) {
    note_copy(piece.from, piece.end - piece.begin, __builtin_return_address(0));
    begin_async_write(piece.to, kPieceBytes, name_of_copies(barrier));
  }
  barrier.started.push_back(std::move(pieces));
  if (coin() || !barrier.waiting.empty()) land_all(barrier);
}

std::vector<CopiedPiece> pieces_of_box(uint32_t to, const void* map, const int* at, int rank) {
  TensorMap tensor;
  std::memcpy(&tensor, map, sizeof tensor);
  if (tensor.mark != kIsMap) fail("copies by a map that cuTensorMapEncodeTiled has not made");
  if (tensor.rank != rank) {
    fail("copies at " + std::to_string(rank) + " coordinates by a map of " +
         std::to_string(tensor.rank) + " dimensions");
  }
  const uint32_t alignment = tensor.is_swizzled != 0 ? 1024 : 128;
  if (to < dynamic_shared_begin() || (to - dynamic_shared_begin()) % alignment != 0) {
    fail("copies a box to " + where(to) + ": expected a multiple of " + std::to_string(alignment) +
         " of dynamic shared memory");
  }
  const int64_t size = tensor.element_bytes, of_piece = kPieceBytes / size;  // elements
  int64_t num_rows = 1;
  for (int i = 1; i < rank; ++i) num_rows *= tensor.box[i];
  Copy pieces;
  for (int64_t row = 0; row < num_rows; ++row) {
    const unsigned char* from = tensor.data;
    bool is_inside = true;
    for (int64_t i = 1, rest = row; i < rank; ++i) {
      const int64_t coordinate = at[i] + rest % tensor.box[i];
      rest /= tensor.box[i];
      is_inside &= coordinate >= 0 && coordinate < tensor.sizes[i];
      if (is_inside) from += coordinate * tensor.strides[i];
    }
    for (int64_t element = 0; element < tensor.box[0]; element += of_piece) {
      int64_t place = (row * tensor.box[0] + element) * size;
      if (tensor.is_swizzled != 0) place ^= (place >> 7 & 7) << 4;
      const int64_t first = at[0] + element;  // in the tensor
      const int64_t begin = std::clamp<int64_t>(-first, 0, of_piece);
      const int64_t end = std::clamp<int64_t>(tensor.sizes[0] - first, begin, of_piece);
      CopiedPiece piece{to + static_cast<uint32_t>(place), nullptr, 0, 0};
      if (is_inside && begin < end) {
        piece.from = from + (first + begin) * size;
        piece.begin = static_cast<uint32_t>(begin * size);
        piece.end = static_cast<uint32_t>(end * size);
      }
      pieces.push_back(piece);
    }
  }
  return pieces;
}

void begin_mbarriers() { mbarriers.clear(); }

std::string end_mbarriers() {
  for (const auto& [offset, barrier] : mbarriers) {
    if (barrier.started.empty() && barrier.landed.empty() && barrier.unseen.empty()) continue;
    return "ends while a copy is under way: no thread has waited for the phase of the mbarrier "
           "at " +
           where(offset) + " that counts it";
  }
  return "";
}

std::string lacks_of_mbarriers() {
  std::string lacks;
  for (const auto& [offset, barrier] : mbarriers) {
    if (barrier.waiting.empty()) continue;
    lacks += ", the mbarrier at " + where(offset) + " lacks " + std::to_string(barrier.arrivals) +
             " of " + std::to_string(barrier.count) + " arrivals and " +
             std::to_string(barrier.bytes) + " bytes";
  }
  return lacks;
}

}  // namespace emulator
