#include "tape.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu/crew.h"

namespace eecore {
namespace {

thread_local Tape* recorder = nullptr;

// Sets the counts to the number at `rows`, at most `most`, and returns it.
template <typename Counts>
int64_t set(const Counts& counts, const int32_t* rows, int64_t most) {
  const int64_t wanted = std::clamp<int64_t>(*rows, 0, most);
  for (int64_t* count : counts) {
    if (count != nullptr) *count = wanted;
  }
  return wanted;
}

}  // namespace

Tape* Tape::recording() noexcept { return recorder; }

void Tape::begin() {
  if (recorder != nullptr) throw std::runtime_error("tape: this thread is already recording");
  if (is_recording_) throw std::runtime_error("tape: another thread is recording it");
  if (!steps_.empty())
    throw std::runtime_error("tape: expected to be recorded once, got a second time");
  recorder = this;
  is_recording_ = true;
  rows_ = {};
}

void Tape::end() {
  require_recording();
  recorder = nullptr;
  is_recording_ = false;
}

void Tape::cancel() noexcept {
  if (recorder == this) recorder = nullptr;
  is_recording_ = false;
  steps_.clear();
  num_calls_ = 0;
}

void Tape::require_recording() const {
  if (recorder != this) throw std::runtime_error("tape: expected to record on this thread");
}

Tape::RowsRead Tape::read_rows(RowsRead rows) {
  require_recording();
  return std::exchange(rows_, rows);
}

int64_t Tape::open_jump(const uint8_t* flag) {
  require_recording();
  Step jump;
  jump.flag = flag;
  steps_.push_back(std::move(jump));
  return static_cast<int64_t>(steps_.size()) - 1;
}

void Tape::close_jump(int64_t opened) {
  require_recording();
  steps_.at(static_cast<size_t>(opened)).target = steps_.size();
}

void Tape::add(const char* op, std::unique_ptr<Call> call) {
  call->op = op;
  if (call->counts.tokens[0] != nullptr) call->most_tokens = *call->counts.tokens[0];
  if (call->counts.seqs[0] != nullptr) call->most_seqs = *call->counts.seqs[0];
  Step step;
  step.call = std::move(call);
  step.rows = rows_;
  steps_.push_back(std::move(step));
  ++num_calls_;
}

void Tape::replay(const cpu::Parallel& pool, std::vector<CallTrace>* trace) {
  if (recorder != nullptr || is_recording_) {
    throw std::runtime_error("tape: expected no replay during a recording");
  }
  cpu::with_crew(pool, [&](const cpu::Parallel& crew) { run_steps(crew, trace); });
}

void Tape::run_traced(Call& call, const cpu::Parallel& parallel, std::vector<CallTrace>* trace) {
  const auto count = [](const int64_t* rows) { return rows == nullptr ? -1 : *rows; };
  const auto started = std::chrono::steady_clock::now();
  call.run(parallel);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
  const DecoderLayersParams* layers = call.layers();
  trace->push_back({call.op, count(call.counts.tokens[0]), count(call.counts.seqs[0]),
                    layers == nullptr ? 0 : layers->begin_layer,
                    layers == nullptr ? 0 : layers->end_layer, took.count()});
}

void Tape::run_steps(const cpu::Parallel& parallel, std::vector<CallTrace>* trace) {
  for (size_t next = 0; next < steps_.size();) {
    const Step& step = steps_[next++];
    if (step.flag != nullptr) {
      if (*step.flag != 0) next = step.target;
      continue;
    }
    Call& call = *step.call;
    if (step.rows.num_tokens != nullptr && call.counts.tokens[0] != nullptr) {
      set(call.counts.seqs, step.rows.num_seqs, call.most_seqs);
      const bool none = set(call.counts.tokens, step.rows.num_tokens, call.most_tokens) == 0;
      if (none && !call.counts.runs_empty) continue;
    }
    if (trace == nullptr) {
      call.run(parallel);
    } else {
      run_traced(call, parallel, trace);
    }
  }
}

}  // namespace eecore
