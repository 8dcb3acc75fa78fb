#include "crew.h"

#include <algorithm>
#include <thread>

namespace eecore::cpu {
namespace {

// Ranges per thread, so that a thread that is slower, or was late, leaves its share to the others.
constexpr int64_t kRangesPerThread = 4;

// One round of waiting: short ones first, then the core is offered to whoever else wants it.
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

bool Crew::take_range(uint64_t offer) {
  while ((offer & kLeft) != 0) {
    // The job is safe to read once a range of it is taken: until that is finished it stays.
    if (!offer_.compare_exchange_weak(offer, offer - 1, std::memory_order_acquire)) continue;
    const int64_t range = job_.num_ranges - static_cast<int64_t>(offer & kLeft);
    const int64_t begin = job_.begin + range * job_.range_size;
    job_.body(begin, std::min(begin + job_.range_size, job_.end), job_.context);
    return true;
  }
  return false;
}

void Crew::help() noexcept {
  Waiting waiting;
  while (true) {
    const uint64_t offer = offer_.load(std::memory_order_acquire);
    if (offer == kDismissed) return;
    if (take_range(offer)) {
      num_helped_.fetch_add(1, std::memory_order_release);
      waiting = {};
    } else {
      waiting.wait();
    }
  }
}

void Crew::run(void* pool, int64_t begin, int64_t end, int64_t grain, RangeFn body, void* context) {
  Crew& crew = *static_cast<Crew*>(pool);
  const int64_t grains = (end - begin + grain - 1) / grain;
  const int64_t most_ranges = crew.num_threads_ * kRangesPerThread;
  const int64_t range_size = (grains + most_ranges - 1) / most_ranges * grain;
  const int64_t num_ranges = (end - begin + range_size - 1) / range_size;

  // Nobody reads the job or counts now: every range of the one before is finished.
  crew.job_ = {body, context, begin, end, range_size, num_ranges};
  crew.num_helped_.store(0, std::memory_order_relaxed);
  const uint64_t last = crew.offer_.load(std::memory_order_relaxed);
  crew.offer_.store((last & ~kLeft) + kNextJob + static_cast<uint64_t>(num_ranges),
                    std::memory_order_release);

  int64_t own = 0;
  while (crew.take_range(crew.offer_.load(std::memory_order_relaxed))) ++own;
  Waiting waiting;
  while (crew.num_helped_.load(std::memory_order_acquire) < num_ranges - own) waiting.wait();
}

}  // namespace eecore::cpu
