// Threads that stay awake through one call. Waking a thread for each product of a decoder takes
// longer than many of the products; a crew enters torch's pool once, and from then on its helpers
// spin until the master has ranges of its next job for them.
//
// Each thread has a share of a job's ranges, adjacent ones, and takes them one by one without
// touching any other thread's cache line; when its share is empty it takes ranges of other shares.
// So nothing depends on how many threads the pool really gives, or when: the first to arrive is the
// master, the rest help, and the running threads take the share of a helper that is late or never
// starts. The master waits only for ranges that a helper has taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "eecore/cpu.h"

namespace eecore::cpu {

class Crew {
 public:
  // Bytes that a range should read to be worth handing over: that costs two exchanges of a cache
  // line.
  static constexpr int64_t kBytesPerRange = 1 << 15;

  explicit Crew(int num_threads) : shares_(static_cast<size_t>(num_threads)) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // The crew as a Parallel for the master's kernels.
  Parallel parallel() {
    return {static_cast<int>(shares_.size()), kBytesPerRange, &Crew::run, this};
  }

  // The caller's index among the threads; the master has the first one.
  static constexpr size_t kMaster = 0;
  size_t arrive() { return num_arrived_.fetch_add(1, std::memory_order_relaxed); }
  // Takes ranges until the crew is dismissed.
  void help(size_t thread) noexcept;
  void dismiss() noexcept { offer_.store(kDismissed, std::memory_order_release); }

 private:
  // One call of a kernel's parallel_for, cut into ranges.
  struct Job {
    RangeFn body;
    void* context;
    int64_t begin, end, range_size;
  };
  // The job's number is in the high half, a number of ranges in the low half.
  static constexpr uint64_t kNextJob = uint64_t{1} << 32;
  static constexpr uint64_t kRanges = kNextJob - 1;
  static constexpr uint64_t kDismissed = ~kRanges;

  // The state of one thread. Fields that different threads write or wait for have a cache line (and
  // its neighbour's prefetch) of their own.
  struct Share {
    // Ranges of the share that have been taken, by its thread or another one. If the number belongs
    // to an earlier job, none is taken.
    alignas(128) std::atomic<uint64_t> taken{0};
    // Ranges of any share that the thread has finished. If it belongs to an earlier job: none.
    alignas(128) std::atomic<uint64_t> finished{0};
  };

  static void run(void* crew, int64_t begin, int64_t end, int64_t grain, RangeFn body,
                  void* context);
  // Runs ranges of the offered job while there are any; returns how many it ran.
  uint64_t work(size_t thread, uint64_t offer);
  // Takes the next range of a share; false if there is none, or the job is over.
  static bool take(Share& share, uint64_t offer, uint64_t size, uint64_t* range);
  // The first range of a thread's share; the last thread's share ends with the job's last range.
  uint64_t first_range(size_t thread, uint64_t num_ranges) const {
    const uint64_t threads = shares_.size();
    return (num_ranges * thread + threads - 1) / threads;
  }
  void run_range(uint64_t range) const;
  // The number of ranges of the offered job that helpers have finished.
  uint64_t num_helped(uint64_t offer) const;

  // The offer and the job. A thread that has taken a range may read the job, which does not change
  // until that range is finished. A helper that waits for the offer sees the job through the same
  // exchange.
  alignas(128) std::atomic<uint64_t> offer_{0};
  Job job_{};
  alignas(128) std::vector<Share> shares_;
  std::atomic<size_t> num_arrived_{0};
};

// Calls work(parallel) and keeps the threads of `pool` awake until it returns.
template <typename Work>
void with_crew(const Parallel& pool, const Work& work) {
  if (pool.num_threads <= 1) return work(pool);
  struct Call {
    Crew crew;
    const Work& work;
  } call{Crew(pool.num_threads), work};
  pool.run(
      pool.pool, 0, pool.num_threads, 1,
      [](int64_t, int64_t, void* context) {
        auto& [crew, work] = *static_cast<Call*>(context);
        const size_t thread = crew.arrive();
        if (thread != Crew::kMaster) return crew.help(thread);
        struct Dismissal {
          Crew& crew;
          ~Dismissal() { crew.dismiss(); }
        } dismissal{crew};
        work(crew.parallel());
      },
      &call);
}

}  // namespace eecore::cpu
