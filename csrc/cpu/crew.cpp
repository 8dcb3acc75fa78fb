#include "crew.h"

#include <algorithm>
#include <thread>

namespace eecore::cpu {
namespace {

// Ranges per thread, so that a slow or late thread leaves some of its share to other threads.
constexpr int64_t kRangesPerThread = 4;

// One wait: short pauses first, then the core is yielded to other threads.
class Waiting {
 public:
  void wait() {
    if (++rounds_ > kSpins) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  static constexpr int kSpins = 2000;
  int rounds_ = 0;
};

}  // namespace

bool Crew::take(Share& share, uint64_t offer, uint64_t size, uint64_t* range) {
  const uint64_t job = offer & ~kRanges;
  uint64_t taken = share.taken.load(std::memory_order_relaxed);
  while (true) {
    if (taken > job + kRanges) return false;  // of a later job
    const uint64_t count = taken < job ? 0 : taken - job;
    if (count == size) return false;
    if (share.taken.compare_exchange_weak(taken, job + count + 1, std::memory_order_relaxed)) {
      *range = count;
      return true;
    }
  }
}

void Crew::run_range(uint64_t range) const {
  const int64_t begin = job_.begin + static_cast<int64_t>(range) * job_.range_size;
  job_.body(begin, std::min(begin + job_.range_size, job_.end), job_.context);
}

uint64_t Crew::work(size_t thread, uint64_t offer) {
  const uint64_t job = offer & ~kRanges, num_ranges = offer & kRanges;
  const size_t threads = shares_.size();
  uint64_t count = 0;
  for (size_t i = 0; i < threads; ++i) {
    const size_t owner = thread + i < threads ? thread + i : thread + i - threads;
    const uint64_t first = first_range(owner, num_ranges);
    const uint64_t size = first_range(owner + 1, num_ranges) - first;
    for (uint64_t range = 0; take(shares_[owner], offer, size, &range); ++count) {
      run_range(first + range);
      // A range of another thread's share is reported at once; the thread's own ranges are reported
      // together, when all are finished.
      if (i > 0) shares_[thread].finished.store(job + count + 1, std::memory_order_release);
    }
    if (i == 0 && count > 0) {
      shares_[thread].finished.store(job + count, std::memory_order_release);
    }
  }
  return count;
}

void Crew::help(size_t thread) noexcept {
  if (thread >= shares_.size()) return;
  Waiting waiting;
  uint64_t done = 0;  // the last offer that has no ranges left
  while (true) {
    const uint64_t offer = offer_.load(std::memory_order_acquire);
    if (offer == kDismissed) return;
    if (offer == done) {
      waiting.wait();
      continue;
    }
    if (work(thread, offer) > 0) waiting = {};
    done = offer;
  }
}

uint64_t Crew::num_helped(uint64_t offer) const {
  const uint64_t job = offer & ~kRanges;
  uint64_t count = 0;
  for (size_t thread = kMaster + 1; thread < shares_.size(); ++thread) {
    const uint64_t finished = shares_[thread].finished.load(std::memory_order_acquire);
    if (finished >= job) count += finished - job;
  }
  return count;
}

void Crew::run(void* pool, int64_t begin, int64_t end, int64_t grain, RangeFn body, void* context) {
  Crew& crew = *static_cast<Crew*>(pool);
  const int64_t grains = (end - begin + grain - 1) / grain;
  const int64_t most_ranges = static_cast<int64_t>(crew.shares_.size()) * kRangesPerThread;
  const int64_t range_size = (grains + most_ranges - 1) / most_ranges * grain;
  const auto num_ranges = static_cast<uint64_t>((end - begin + range_size - 1) / range_size);

  // No thread reads the job now: every range of the previous job is finished.
  crew.job_ = {body, context, begin, end, range_size};
  const uint64_t last = crew.offer_.load(std::memory_order_relaxed);
  const uint64_t offer = (last & ~kRanges) + kNextJob + num_ranges;
  crew.offer_.store(offer, std::memory_order_release);

  const uint64_t own = crew.work(kMaster, offer);
  Waiting waiting;
  while (crew.num_helped(offer) < num_ranges - own) waiting.wait();
}

}  // namespace eecore::cpu
