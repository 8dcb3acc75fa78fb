// Threads that stay awake through one call. Waking a thread for each product of a decoder takes
// longer than many of the products; a crew enters torch's pool once, and from then on its helpers
// wait spinning for ranges of whatever the master runs next.
//
// Nothing depends on how many threads the pool really gives, or when: the first to arrive is the
// master, the others help. The master takes ranges as well and waits only for those that a helper
// has taken, so a helper that comes late, or never, is not missed.
#pragma once

#include <atomic>
#include <cstdint>

#include "eecore/cpu.h"

namespace eecore::cpu {

class Crew {
 public:
  // What a range should read to be worth handing over: two exchanges of a cache line between cores.
  static constexpr int64_t kBytesPerRange = 1 << 15;

  explicit Crew(int num_threads) : num_threads_(num_threads) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // The crew as the master's kernels see it.
  Parallel parallel() { return {num_threads_, kBytesPerRange, &Crew::run, this}; }

  // True for the first caller.
  bool becomes_master() { return !has_master_.exchange(true, std::memory_order_relaxed); }
  // Takes ranges until the crew is dismissed.
  void help() noexcept;
  void dismiss() noexcept { offer_.store(kDismissed, std::memory_order_release); }

 private:
  // One call of a kernel's parallel_for, cut into ranges.
  struct Job {
    RangeFn body;
    void* context;
    int64_t begin, end, range_size, num_ranges;
  };
  // An offer is the number of the job and, in the low half, how many of its ranges nobody has taken
  // yet. As both change together, a range is never taken for that of another job.
  static constexpr uint64_t kNextJob = uint64_t{1} << 32;
  static constexpr uint64_t kLeft = kNextJob - 1;
  static constexpr uint64_t kDismissed = ~kLeft;

  static void run(void* crew, int64_t begin, int64_t end, int64_t grain, RangeFn body,
                  void* context);
  // Runs a range of the offered job, if any is left.
  bool take_range(uint64_t offer);

  // Written by different threads, so each in a cache line (and its neighbour's prefetch) of its
  // own.
  alignas(128) std::atomic<uint64_t> offer_{0};
  alignas(128) std::atomic<int64_t> num_helped_{0};  // ranges of the job that helpers have finished
  alignas(128) Job job_{};  // written by the master while no range of it is out
  int num_threads_;
  std::atomic<bool> has_master_{false};
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
        if (!crew.becomes_master()) return crew.help();
        struct Dismissal {
          Crew& crew;
          ~Dismissal() { crew.dismiss(); }
        } dismissal{crew};
        work(crew.parallel());
      },
      &call);
}

}  // namespace eecore::cpu
