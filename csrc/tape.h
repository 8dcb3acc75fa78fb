// The CPU calls of a program, recorded once and replayed by one call; the threads stay awake from
// the first kernel to the last.
//
// While a tape records on a thread, the ops called there are checked as usual, except for the
// values of their tensors, and are recorded instead of run. A replay reads and writes the memory of
// the recorded calls, so the caller has to keep it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "eecore/cpu.h"

namespace eecore {

template <typename Params>
using Kernel = void (*)(const Params& params, const cpu::Parallel& parallel);

// A call of a replay, for callers that ask what was run.
struct CallTrace {
  std::string op;
  int64_t num_tokens, num_seqs;    // its rows, -1 where it has no such count
  int64_t begin_layer, end_layer;  // of decoder_layers, else 0
  double seconds;
};

class Tape {
 public:
  Tape() = default;
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  // The tape that is recording on this thread, or null.
  static Tape* recording() noexcept;

  // From begin() to end(), or to cancel(), which discards the recording, this thread's calls are
  // recorded. A tape is recorded once.
  void begin();
  void end();
  void cancel() noexcept;

  // Where a call reads its number of rows, at most as many as it was recorded with. Null: as many
  // as that.
  struct RowsRead {
    const int32_t* num_tokens = nullptr;  // [1]
    const int32_t* num_seqs = nullptr;    // [1]; null with num_tokens
  };

  // Applies to the calls recorded from here on; returns the previous setting.
  RowsRead read_rows(RowsRead rows);

  // The calls recorded from here to close_jump(opened) are skipped where *flag is 1 at replay.
  int64_t open_jump(const uint8_t* flag);
  void close_jump(int64_t opened);

  // Copies the params, and keeps their pointers.
  template <typename Params>
  void add(const char* op, Kernel<Params> kernel, const Params& params) {
    add(op, std::make_unique<CallOf<Params>>(kernel, params));
  }

  // Replays of one tape must not overlap. Adds the calls that are run to `trace`, if given.
  void replay(const cpu::Parallel& pool, std::vector<CallTrace>* trace = nullptr);
  int64_t num_calls() const noexcept { return num_calls_; }

 private:
  struct Call {
    virtual ~Call() = default;
    virtual void run(const cpu::Parallel& parallel) const = 0;
    virtual const DecoderLayersParams* layers() const { return nullptr; }

    const char* op = "";
    RowCounts counts{};  // of the params
    int64_t most_tokens = 0, most_seqs = 0;
  };

  template <typename Params>
  struct CallOf final : Call {
    CallOf(Kernel<Params> kernel, const Params& params) : kernel(kernel), params(params) {
      counts = row_counts(this->params);
    }
    void run(const cpu::Parallel& parallel) const override { kernel(params, parallel); }
    const DecoderLayersParams* layers() const override {
      if constexpr (std::is_same_v<Params, DecoderLayersParams>) {
        return &params;
      } else {
        return nullptr;
      }
    }

    Kernel<Params> kernel;
    Params params;
  };

  // A call or, if there is a flag, a jump.
  struct Step {
    std::unique_ptr<Call> call;
    RowsRead rows;
    const uint8_t* flag = nullptr;  // [1]
    size_t target = 0;              // the step after the skipped ones
  };

  void add(const char* op, std::unique_ptr<Call> call);
  static void run_traced(Call& call, const cpu::Parallel& parallel, std::vector<CallTrace>* trace);
  void require_recording() const;
  void run_steps(const cpu::Parallel& parallel, std::vector<CallTrace>* trace);

  std::vector<Step> steps_;
  int64_t num_calls_ = 0;
  RowsRead rows_;
  bool is_recording_ = false;
};

}  // namespace eecore
