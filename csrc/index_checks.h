// Checks of the indices that a CPU kernel uses to address memory, made before anything is written.
// CUDA kernels read their indices on the device, without checks; nor are those of a call checked
// that a tape records, because its tensors hold no values yet.
#pragma once

#include <algorithm>
#include <string>

#include "check.h"
#ifndef EECORE_BACKEND_CUDA
#include "tape.h"
#endif

namespace eecore {

// Whether the tensors of this call already hold the values that its kernel will read.
inline bool holds_values() {
#ifdef EECORE_BACKEND_CUDA
  return false;
#else
  return Tape::recording() == nullptr;
#endif
}

// Every value must be in [begin, end).
template <typename Value>
void check_range(const Checker& check, const char* name, const Value* values, int64_t count,
                 int64_t begin, int64_t end) {
  if (!holds_values()) return;
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] >= begin && values[i] < end) continue;
    check.fail(std::string(name) + ": expected values in [" + std::to_string(begin) + ", " +
               std::to_string(end) + "), got " + std::to_string(values[i]) + " at row " +
               std::to_string(i));
  }
}

// Every token that is looked up must be in the vocabulary, or -1 if an earlier step made it, and
// every source must be -1 or in previous.
inline void check_tokens(const Checker& check, const EmbedTokensParams& params,
                         int64_t num_previous, int64_t vocab_size) {
  if (!holds_values()) return;
  const auto check_token = [&](const char* name, int64_t first, int64_t token, int64_t row) {
    check.require(token >= first && token < vocab_size, name, ": expected tokens in [", first,
                  ", vocab_size=", vocab_size, "), got ", token, " for row ", row);
  };
  if (params.sources != nullptr) {
    check_range(check, "sources", params.sources, params.num_tokens, -1, num_previous);
  }
  for (int64_t row = 0; row < params.num_tokens; ++row) {
    const int32_t source = params.sources == nullptr ? -1 : params.sources[row];
    if (source < 0) {
      check_token("token_ids", -1, params.token_ids[row], row);
    } else {
      check_token("previous", -1, params.previous[source], row);
    }
  }
}

// Every length, and every page-table entry that a query's keys need, must be valid. A sequence may
// have more queries than keys. The names are the call's.
inline void check_sequences(const Checker& check, const PagedAttentionParams& params,
                            const char* page_table = "page_table",
                            const char* seq_lens = "seq_lens") {
  if (!holds_values()) return;
  const auto require = [&](bool ok, int64_t got, int64_t seq, const auto&... expected) {
    check.require(ok, expected..., ", got ", got, " for sequence ", seq);
  };
  const int32_t* starts = params.query_start_loc;
  require(starts[0] == 0, starts[0], 0, "query_start_loc: expected to start at 0");
  const int64_t capacity = params.max_pages_per_seq * params.page_size;
  for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
    const int64_t num_queries = int64_t{starts[seq + 1]} - starts[seq];
    require(num_queries >= 0, starts[seq + 1], seq,
            "query_start_loc: expected ascending values, from ", starts[seq], " on");
    const int64_t length = params.seq_lens[seq];
    require(length >= 0 && length <= capacity, length, seq, seq_lens,
            ": expected values in [0, max_pages_per_seq * page_size=", capacity, "]");
    if (num_queries == 0 || length == 0) continue;
    const int64_t first_seen =
        params.sliding_window > 0 ? length - num_queries + 1 - params.sliding_window : 0;
    const int32_t* entries = params.page_table + seq * params.page_table_stride;
    for (int64_t page = std::max<int64_t>(first_seen, 0) / params.page_size;
         page * params.page_size < length; ++page) {
      require(entries[page] >= 0 && entries[page] < params.num_pages, entries[page], seq,
              page_table, ": expected entries in [0, num_pages=", params.num_pages, ") in column ",
              page);
    }
  }
  require(starts[params.num_seqs] == params.num_tokens, starts[params.num_seqs],
          params.num_seqs - 1,
          "query_start_loc: expected to end at num_tokens=", params.num_tokens);
}

// Every sequence must have at least as many positions as rows, and a state among those there are.
inline void check_texts(const Checker& check, const GatedDeltaParams& params, int64_t num_states) {
  if (!holds_values()) return;
  const int32_t* starts = params.query_start_loc;
  check.require(starts[0] == 0, "query_start_loc: expected to start at 0, got ", starts[0]);
  check.require(starts[params.num_seqs] == params.num_tokens,
                "query_start_loc: expected to end at num_tokens=", params.num_tokens, ", got ",
                starts[params.num_seqs]);
  for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
    const int64_t num_rows = int64_t{starts[seq + 1]} - starts[seq];
    const int64_t length = params.seq_lens[seq], number = params.states[seq * params.states_stride];
    check.require(num_rows >= 0, "query_start_loc: expected ascending values, from ", starts[seq],
                  " on, got ", starts[seq + 1], " for sequence ", seq);
    check.require(num_rows == 0 || length >= num_rows, "seq_lens: expected at least the ", num_rows,
                  " rows, got ", length, " for sequence ", seq);
    check.require(number >= 0 && number <= num_states,
                  "states: expected 0 for none, or a number up to num_states=", num_states,
                  ", got ", number, " for sequence ", seq);
  }
}

}  // namespace eecore
