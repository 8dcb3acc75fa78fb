// Threads that stay awake through one call. Waking a thread for each product of a decoder takes
// longer than many of the products; a crew enters torch's pool once, and from then on its helpers
// wait spinning for ranges of whatever the master runs next.
//
// Each thread has a share of a job's ranges, side by side, and takes one after the other without
// any other thread's cache line; once it has none it takes those of others. So nothing depends on
// how many threads the pool really gives, or when: the first to arrive is the master, the others
// help, and the share of a helper that comes late, or never, is taken by whoever is there. The
// master waits only for ranges that a helper has taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "eecore/cpu.h"

namespace eecore::cpu {

class Crew {
 public:
  // What a range should read to be worth handing over: two exchanges of a cache line between cores.
  static constexpr int64_t kBytesPerRange = 1 << 15;

  explicit Crew(int num_threads) : shares_(static_cast<size_t>(num_threads)) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // The crew as the master's kernels see it.
  Parallel parallel() {
    return {static_cast<int>(shares_.size()), kBytesPerRange, &Crew::run, this};
  }

  // The caller's place among the threads; the first one is the master's.
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
  // A job's number in the high half, and a number of ranges in the low one.
  static constexpr uint64_t kNextJob = uint64_t{1} << 32;
  static constexpr uint64_t kRanges = kNextJob - 1;
  static constexpr uint64_t kDismissed = ~kRanges;

  // What one thread does of the jobs. What is written by different threads, or waited for by
  // others, lies in a cache line (and its neighbour's prefetch) of its own.
  struct Share {
    // Ranges of the share that are taken, by its thread or by another. It may be of a job before:
    // then none is.
    alignas(128) std::atomic<uint64_t> taken{0};
    // Ranges of any share that its thread has finished. Of a job before: none.
    alignas(128) std::atomic<uint64_t> finished{0};
  };

  static void run(void* crew, int64_t begin, int64_t end, int64_t grain, RangeFn body,
                  void* context);
  // Runs ranges of the offered job for as long as there are any; how many there were.
  uint64_t work(size_t thread, uint64_t offer);
  // Takes the next range of a share; false if there is none, or the job is over.
  static bool take(Share& share, uint64_t offer, uint64_t size, uint64_t* range);
  // The first range of a thread's share; those of the last thread end with the job's last.
  uint64_t first_range(size_t thread, uint64_t num_ranges) const {
    const uint64_t threads = shares_.size();
    return (num_ranges * thread + threads - 1) / threads;
  }
  void run_range(uint64_t range) const;
  // Ranges of the offered job that helpers have finished.
  uint64_t num_helped(uint64_t offer) const;

  // The offer, and the job: safe to read once a range of it is taken, since it stays until that is
  // finished. A helper that waits for the offer has the job by the same exchange.
  alignas(128) std::atomic<uint64_t> offer_{0};
  Job job_{};
  alignas(128) std::vector<Share> shares_;
  std::atomic<size_t> num_arrived_{0};
};

// Calls work(parallel) with the threads of `pool` awake until it returns.
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
