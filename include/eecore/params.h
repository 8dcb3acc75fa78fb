// One plain struct per op: the arguments of its kernel, without torch or Python.
//
// Strides are in elements. A pointer that says "may be null" switches a feature off. Slots number
// the rows of one layer's cache: slot = page * page_size + offset. Layers count from 0, exit layer
// E means "the first E layers have run".
//
// Each struct is followed by a `row_counts`: which of its numbers count rows. A recorded call is
// replayed with the numbers of rows of the replay; an op without row_counts cannot be recorded.
#pragma once

#include <cstdint>

#include "eecore/packed_weight.h"

namespace eecore {

enum class DType : int8_t { kFloat32, kBFloat16, kFloat16 };

// The activation of a gated layer's gate, or of a plain layer's output.
enum class Activation : int8_t { kNone, kSilu, kGeluTanh, kRelu };

// Bytes of an element.
constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr int64_t kMaxHeadDim = 512;           // of append_kv
constexpr int64_t kMaxAttentionHeadDim = 256;  // of paged_attention and decoder_layers

// The numbers of a struct that count rows; unused entries are null.
struct RowCounts {
  int64_t* tokens[4];
  int64_t* seqs[2];
  bool runs_empty = false;  // also runs without tokens: it writes how many there are
};
template <typename Params>
RowCounts row_counts(Params& params) = delete;

// What a kernel decides for an IF node after it in the CUDA graph that captures both. Not set:
// there is no such node, or another kernel decides.
struct GraphCondition {
  uint64_t handle;
  bool is_set;
};

// Sticky acceptance of rows at one exit point, and the list of rows that go on.
struct AcceptMaskParams {
  const float* confidence;  // [num_seqs]
  const float* thresholds;  // [num_seqs]; >= 1 never accepts
  uint8_t* status;          // [num_seqs], 0 or 1, sticky
  int32_t* exit_layer;      // [num_seqs], written where a row is accepted for the first time
  int32_t* survivors;       // [num_seqs], rows not accepted in ascending order, then -1
  int32_t* num_survivors;   // [1]
  uint8_t* all_accepted;    // [1]
  int64_t num_seqs;
  int32_t layer;  // the number of layers that have run
};
inline RowCounts row_counts(AcceptMaskParams& p) { return {{&p.num_seqs}, {}}; }

// Measures rows after a layer and lets rows exit there: what an exiting row needs later is kept,
// and the row is masked from then on. Active row i is row[i] of the num_rows.
struct ExitRowsParams {
  const void* hidden;       // [num_active, hidden_size], row stride hidden_stride
  const float* confidence;  // [num_asked]; may be null: no row is measured
  const int64_t* token;     // [num_asked]; may be null, with top_logit and logsumexp
  const float* top_logit;   // [num_asked]
  const float* logsumexp;   // [num_asked]
  const float* thresholds;  // [num_rows]; inf: the row is not measured; >= 1 never accepts
  const int32_t* asked;   // [num_asked], the active rows that are measured; may be null: 0, 1, ...
  const int32_t* row;     // [num_active]
  int64_t* slot_mapping;  // [num_active]; -1 where a row exits
  int32_t* seq_lens;      // [num_active]; 1 where a row exits
  const int32_t* exit_after;  // [num_rows], layers after which a row exits, accepted or not
  const uint8_t* together;    // [num_rows]: the row exits only once all such rows are accepted
  const uint8_t* fills;       // [num_rows]: the layers that it skips are filled
  const int32_t* kind;      // [num_rows], how the row's token is made; kFromLogits: not by the head
  uint8_t* accepted;        // [num_rows], 0 or 1, sticky
  uint8_t* exited;          // [num_rows], 0 or 1: the row has exited, here or earlier
  int32_t* exit_layer;      // [num_rows]
  int32_t* fill_from;       // [num_rows], written where a row that fills exits
  int32_t* measured_at;     // [num_rows], the layer of final_confidence
  float* final_confidence;  // [num_rows]
  int64_t* final_token;     // [num_rows]
  float* final_logprob;     // [num_rows], of final_token
  int32_t* token_at;        // [num_rows], the layer of final_token
  int32_t* pending;         // [num_rows], what is left to do for the token of a row that has exited
  void* final_hidden;       // [num_rows, hidden_size], row stride final_hidden_stride
  uint8_t* all_exited;      // [1]
  int64_t num_active, num_asked, num_rows;
  int64_t row_bytes;                           // of hidden_size elements
  int64_t hidden_stride, final_hidden_stride;  // in bytes
  int32_t layer;                               // the number of layers that have run
  bool decide;                                 // false: rows are measured, and none exits
  bool cumulative;  // confidence: the probability of exiting here and not earlier. Thresholds are
                    // compared with 1 - prod(1 - c) over the confidences c measured for the row
  GraphCondition condition;  // holds if any row goes on
};
inline RowCounts row_counts(ExitRowsParams& p) { return {{&p.num_active}, {&p.num_asked}, true}; }

// The ExitRowsParams::kind of a row whose token is made from logits, and its ::pending once it has
// exited. ::pending of any other row: 0 if the head has run on the state that the row exited with,
// else 1.
constexpr int32_t kFromLogits = 2;

// Copies what the head gives for some rows to the outputs of all rows.
struct PlaceHeadParams {
  const float* confidence;     // [num_selected]
  const int64_t* token;        // [num_selected]
  const float* logsumexp;      // [num_selected]
  const float* top_logit;      // [num_selected]
  const int32_t* index;        // [num_selected], into the num_rows; may be null: 0, 1, ...
  const int32_t* kind;         // [num_rows]; may be null: of any kind
  const int32_t* measured_at;  // [num_rows]; may be null: every confidence is written
  const int32_t* exit_layer;   // [num_rows]; where it equals measured_at, the confidence is kept
  const int64_t* vocabulary;   // [vocab_size], the token of each row of a cut head; may be null
  int64_t* out_token;          // [num_rows]
  float* out_confidence;       // [num_rows]
  float* out_logprob;          // [num_rows]
  int64_t num_selected;
  int32_t wanted;       // only rows of this kind are written
  bool as_probability;  // the confidence is the token's probability
};
inline RowCounts row_counts(PlaceHeadParams& p) { return {{&p.num_selected}, {}}; }

// Final norm + LM head + gap of the two largest probabilities + argmax, logits never in memory.
struct ExitConfidenceSoftmaxParams {
  const void* hidden;            // [num_seqs, hidden_size], row stride hidden_stride
  const void* norm_weight;       // [hidden_size]; may be null: hidden is normed already
  const void* lm_head;           // [vocab_size, hidden_size], row stride lm_head_stride
  const float* lm_head_scale;    // [vocab_size]; may be null, else the head is int8 times this
  const int64_t* lm_head_table;  // [vocab_size]; may be null, else the head is packed
  float* confidence;             // [num_seqs]
  int64_t* token;                // [num_seqs], the lowest index among equal maxima
  float* logsumexp;              // [num_seqs]; may be null
  float* top_logit;              // [num_seqs]; may be null
  int64_t num_seqs, hidden_size, vocab_size;
  int64_t hidden_stride, lm_head_stride;
  float eps;
  float multiplier = 1.0f;  // of the logits
  float soft_cap;           // c: multiplied logits l become c * tanh(l / c); 0: no cap
  ExitRowsParams exit;      // CUDA only, of the measured rows; all_exited null: no row exits
  PlaceHeadParams place;    // CUDA only, of the measured rows; out_token null: nothing is placed
  DType dtype;
  void* workspace;  // CUDA only, [exit_confidence_softmax_workspace bytes]; may be null on the CPU
};
inline RowCounts row_counts(ExitConfidenceSoftmaxParams& p) { return {{&p.num_seqs}, {}}; }

// Cosine of the hidden states of two consecutive layers, per row; a zero vector has confidence 0.
struct ExitConfidenceCosineParams {
  const void* previous;  // [num_seqs, hidden_size], row stride previous_stride
  const void* hidden;    // [num_seqs, hidden_size], row stride hidden_stride
  float* confidence;     // [num_seqs]
  int64_t num_seqs, hidden_size;
  int64_t previous_stride, hidden_stride;
  AcceptMaskParams accept;  // of these confidences; num_survivors null: no row is accepted
  ExitRowsParams exit;      // CUDA only, with these confidences; all_exited null: no row exits
  DType dtype;
};
inline RowCounts row_counts(ExitConfidenceCosineParams& p) { return {{&p.num_seqs}, {}}; }

// softmax(.)[1] of a linear classifier, or one with a ReLU hidden layer, on the un-normed state.
struct ExitConfidenceMlpParams {
  const void* hidden;    // [num_seqs, hidden_size], row stride hidden_stride
  const float* weight1;  // [inner_size, hidden_size]; inner_size is 2 when weight2 is null
  const float* bias1;    // [inner_size]; may be null
  const float* weight2;  // [2, inner_size]; may be null: one linear layer
  const float* bias2;    // [2]; may be null
  float* confidence;     // [num_seqs]
  int64_t num_seqs, hidden_size, inner_size;
  int64_t hidden_stride;
  AcceptMaskParams accept;  // of these confidences; num_survivors null: no row is accepted
  ExitRowsParams exit;      // CUDA only, with these confidences; all_exited null: no row exits
  DType dtype;
  void* workspace;  // CUDA only; may be null where exit_confidence_mlp_workspace is 0
};
inline RowCounts row_counts(ExitConfidenceMlpParams& p) { return {{&p.num_seqs}, {}}; }

// Rows of an embedding table, by token.
struct EmbedTokensParams {
  const int64_t* token_ids;  // [num_tokens]; -1: the row of out is left as it is
  const int64_t* previous;   // [num_previous]; may be null, with sources; -1 is embedded as 0
  const int32_t* sources;    // [num_tokens], index of the token in previous; -1: it is in token_ids
  const void* weight;        // [vocab_size, hidden_size], row stride weight_stride
  const float* scale;        // [vocab_size]; may be null, else the weight is int8 times this
  const int64_t* table;      // [vocab_size]; may be null, else the weight is packed
  void* out;                 // [num_tokens, hidden_size], row stride out_stride
  int64_t num_tokens, hidden_size, row_bytes;  // row_bytes: of a row of out
  int64_t weight_stride, out_stride;           // in bytes
  float multiplier = 1.0f;  // of the rows, applied after they are rounded to dtype
  DType dtype;              // of out
};
inline RowCounts row_counts(EmbedTokensParams& p) { return {{&p.num_tokens}, {}}; }

// Selects the active rows that a part of a program is for: their indices and states.
struct SelectRowsParams {
  const void* hidden;       // [num_active, hidden_size], row stride hidden_stride
  const int32_t* row;       // [num_active]; may be null: row i is row i
  const int32_t* kind;      // [num_rows]; may be null: of any kind
  const float* thresholds;  // [num_rows]; inf: is not selected; may be null
  const uint8_t* accepted;  // [num_rows]; 1: is not selected; may be null
  int32_t* index;           // [num_active], the active rows selected, ascending
  int32_t* count;           // [1], number of rows selected
  void* states;             // [num_active, hidden_size], row stride states_stride; may be hidden
  int64_t num_active, row_bytes;         // row_bytes: of hidden_size elements
  int64_t hidden_stride, states_stride;  // in bytes
  int32_t wanted;                        // the kind of row to select
};
inline RowCounts row_counts(SelectRowsParams& p) { return {{&p.num_active}, {}, true}; }

// Moves the active rows that stay up into the places of rows that exit.
struct CompactRowsParams {
  const uint8_t* done;        // [num_rows]
  int32_t* row;               // [num_active], of the num_rows
  int64_t* positions;         // [num_active]
  int64_t* slot_mapping;      // [num_active]
  int32_t* seq_lens;          // [num_active]
  int32_t* page_table;        // [num_active, max_pages], row stride page_table_stride
  int32_t* left;              // [1], number of rows that stay
  int64_t* token_ids;         // [num_active]; may be null
  int32_t* cross_page_table;  // [num_active, max_cross_pages], row stride
                              // cross_page_table_stride; may be null
  int32_t* cross_seq_lens;    // [num_active]; may be null
  void* hidden;               // [num_active, hidden_size], row stride hidden_stride; may be null
  int64_t num_active, max_pages, max_cross_pages;
  int64_t row_bytes;  // of hidden_size elements
  int64_t page_table_stride, cross_page_table_stride;
  int64_t hidden_stride;  // in bytes
};
inline RowCounts row_counts(CompactRowsParams& p) { return {{&p.num_active}, {}}; }

// The start of a round of self-speculation: the first token of each row and how far the row may
// draft. Rows without a round, including padding, have a draft limit of -1.
struct BeginRoundParams {
  const int64_t* token_ids;      // [num_rows], the last token of each row's text
  const int64_t* start;          // [num_rows], the position of that token
  const int64_t* tokens_left;    // [num_rows]
  const int64_t* max_drafts;     // [num_rows]; -1: padding
  const int32_t* page_table;     // [num_rows, max_pages], row stride page_table_stride
  const int32_t* sources;        // [num_rows], index into next_*; -1, or null: uses token_ids etc.
  const int64_t* next_token;     // [num_ended]; null when sources is
  const int64_t* next_position;  // [num_ended]; null when sources is
  const int64_t* next_left;      // [num_ended]; null when sources is
  const int64_t* drafts;         // [num_rows, num_steps]; may be null: no row is given drafts
  const int64_t* num_given;      // [num_rows], -1: the row drafts for itself, or continues with
                                 // the drafts of ahead_tokens; null when drafts is
  const int64_t* ahead_tokens;   // [num_ended, ahead_steps + 1], a first token, then drafts after
                                 // it, for rows that continue from that token; may be null: no such
                                 // drafts
  const float* ahead_probabilities;  // [num_ended, ahead_steps]; null when ahead_tokens is
  const int64_t* num_ahead;          // [num_ended]; null when ahead_tokens is
  const float* thresholds;  // [num_rows]; such drafts end before the first one below this; null
                            // when ahead_tokens is
  int64_t* first_position;  // [num_rows]
  int64_t* left;            // [num_rows]
  int64_t* round_slots;     // [num_rows, num_steps + 1]; -1 after the last slot that may be used
  int64_t* tokens;  // [num_rows, num_steps + 1]: the first token, then the drafts that are given
  int64_t* num_drafted;       // [num_rows]
  int64_t* most;              // [num_rows], draft limit of the row, -1..num_steps
  uint8_t* done;              // [num_rows], 0 or 1
  uint8_t* all_done;          // [1]
  int32_t* row;               // [num_rows]; every row is active
  int64_t* active_token_ids;  // [num_rows]
  int64_t* positions;         // [num_rows]
  int64_t* slot_mapping;      // [num_rows]; -1 where a row drafts nothing
  int32_t* seq_lens;          // [num_rows]; 1 where a row drafts nothing
  int64_t num_rows, num_steps, ahead_steps, max_pages, page_table_stride, page_size;
  int64_t own_key;           // 1: seq_lens count the row's own key; 0: only the keys before it
  GraphCondition condition;  // holds if any row drafts
};
inline RowCounts row_counts(BeginRoundParams& p) { return {{&p.num_rows}, {}, true}; }

// Appends one drafted token to each active row that drafts, and sets up the row's next step.
struct AppendDraftsParams {
  const void* hidden;          // [num_active, hidden_size], row stride hidden_stride; may be null
  const int64_t* token;        // [num_active]
  const float* confidence;     // [num_active]
  const float* thresholds;     // [num_rows]
  const int64_t* stop_tokens;  // [num_rows, num_stop_tokens], padded with -1
  const int64_t* most;         // [num_rows], draft limit of the row
  const int64_t* round_slots;  // [num_rows, num_steps + 1]
  const int32_t* row;          // [num_active], the row that each token belongs to
  void* states;                // [num_rows, num_steps + 1, hidden_size]; null when hidden is
  int64_t* tokens;             // [num_rows, num_steps + 1]: the round's first token, then drafts
  float* confidences;          // [num_rows, num_steps]
  int64_t* num_drafted;        // [num_rows]
  uint8_t* done;               // [num_rows], 0 or 1: the row drafts no more
  uint8_t* all_done;           // [1]: no active row drafts any more
  int64_t* active_token_ids;   // [num_active], the last token so far
  int64_t* positions;          // [num_active], the position of that token
  int64_t* slot_mapping;  // [num_active], the slot of that token; -1 where a row drafts no more
  int32_t* seq_lens;      // [num_active], keys up to that token; 1 where a row drafts no more
  int64_t num_active, row_bytes, num_steps, num_stop_tokens;  // row_bytes: of hidden_size elements
  int64_t hidden_stride, states_row_stride, states_step_stride;  // in bytes
  int64_t step;                                                  // drafts before this one
  int64_t own_key;           // 1: seq_lens include the row's own key; 0: they are not changed
  GraphCondition condition;  // holds if any row drafts another token
};
inline RowCounts row_counts(AppendDraftsParams& p) { return {{&p.num_active}, {}, true}; }

// The rows of a verification: each row's last token, and, ragged, all tokens of its round.
struct BeginVerificationParams {
  const int64_t* first_position;  // [num_rows]
  const int64_t* round_slots;     // [num_rows, num_steps + 1]
  const int64_t* tokens;          // [num_rows, num_steps + 1]
  const int64_t* num_drafted;     // [num_rows], 0..num_steps
  const int64_t* most;            // [num_rows]; -1: the row has no round, and nothing to verify
  int64_t* last_tokens;           // [num_rows]
  int64_t* last_positions;        // [num_rows]
  int64_t* last_slots;            // [num_rows]; -1 without a round
  int32_t* last_seq_lens;         // [num_rows]; 1 without a round
  int64_t* token_ids;             // [max_tokens]
  int64_t* positions;             // [max_tokens]
  int64_t* slot_mapping;          // [max_tokens]; -1 from num_tokens on
  int32_t* sequence;              // [max_tokens], the row that each token belongs to
  int32_t* seq_lens;              // [num_rows]; 0 without a round
  int32_t* query_start_loc;       // [num_rows + 1]
  int32_t* num_tokens;            // [1]
  int64_t num_rows, num_steps, max_tokens;
};
inline RowCounts row_counts(BeginVerificationParams& p) { return {{&p.num_rows}, {}, true}; }

// Gathers the states of the drafted tokens, and of each row's last one, as the ragged rows of a
// verification.
struct GatherStatesParams {
  const void* states;              // [num_seqs, width, hidden_size]
  const void* last;                // [num_seqs, hidden_size], row stride last_stride
  const int32_t* sequence;         // [max_tokens], of each ragged row
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* num_tokens;       // [1]
  void* out;  // [max_tokens, hidden_size], row stride out_stride; on CUDA zeros from num_tokens on
  int64_t num_seqs, max_tokens, row_bytes;        // row_bytes: of hidden_size elements
  int64_t states_row_stride, states_step_stride;  // in bytes
  int64_t last_stride, out_stride;                // in bytes
};
inline RowCounts row_counts(GatherStatesParams& p) { return {{&p.max_tokens}, {&p.num_seqs}}; }

// The accepted prefix of each row's drafts, and where the row's text continues.
struct AcceptRoundParams {
  const int64_t* tokens;           // [num_rows, num_steps + 1]
  const int64_t* num_drafted;      // [num_rows], 0..num_steps
  const int64_t* most;             // [num_rows]; -1: the row has no round
  const int64_t* first_position;   // [num_rows]
  const int64_t* left;             // [num_rows]
  const int32_t* query_start_loc;  // [num_rows + 1], of the ragged rows
  const int64_t* target;           // [max_tokens], the full model's token at each ragged row
  const uint8_t* sampled;          // [num_rows]; may be null: all rows are greedy
  const float* draft_probs;        // [num_rows * num_steps, vocab_size]; null when sampled is
  const float* target_probs;       // [max_tokens, vocab_size]; null when sampled is
  const float* uniform;  // [max_tokens, 2] in [0, 1): to accept the draft, to draw its replacement;
                         // null when sampled is
  int64_t* next_token;   // [num_rows]; -1 when no token has a positive probability
  int64_t* next_position;  // [num_rows]
  int64_t* next_left;      // [num_rows]
  int64_t* num_accepted;   // [num_rows]
  int64_t* last_row;       // [num_rows], the ragged row before next_token, 0 without a
                           // round; may be null
  int64_t num_rows, num_steps, vocab_size;
};
inline RowCounts row_counts(AcceptRoundParams& p) { return {{&p.num_rows}, {}}; }

// Elements from one page, slot or kv head of a layer's cache to the next, in any order and with any
// gaps. The elements of a head are contiguous.
struct CacheStrides {
  int64_t page, slot, head;
};

// The element type of a cache. In float8 (e4m3) a key or value is the stored number times its
// scale.
struct CacheFormat {
  const float* key_scales;    // [num_kv_heads]; may be null: 1
  const float* value_scales;  // [num_kv_heads]; may be null: 1
  bool is_float8;             // else there are no scales, and the cache holds the model's dtype, or
  bool is_bfloat16;           // bfloat16 for a float32 model, only on the CPU
};

// Norms and rotates the heads of q in place, norms and rotates those of k, and writes k and v to
// their slots.
struct AppendKvParams {
  void* q;                      // [num_tokens, num_q_heads, head_dim]; may be null
  const void* k;                // [num_tokens, num_kv_heads, head_dim]
  const void* v;                // [num_tokens, num_kv_heads, head_dim]
  void* k_cache;                // [num_pages, page_size, num_kv_heads, head_dim]
  void* v_cache;                // [num_pages, page_size, num_kv_heads, head_dim]
  const int64_t* slot_mapping;  // [num_tokens]; -1 writes nothing
  const int64_t* positions;     // [num_tokens]; may be null: no rotary
  const float* cos_sin;         // [max_position, rotary_dim]: cosines, then sines; may be null
  const float* q_cos_sin;       // for queries alone, same layout; may be null: cos_sin
  const void* q_norm_weight;    // [head_dim], or of all heads; may be null
  const void* k_norm_weight;    // [head_dim], or of all heads; may be null
  int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, rotary_dim, page_size;
  int64_t q_token_stride, q_head_stride;
  int64_t k_token_stride, k_head_stride;
  int64_t v_token_stride, v_head_stride;
  CacheStrides k_cache_strides, v_cache_strides;
  CacheFormat cache_format;
  bool norms_all_q, norms_all_k;  // one norm over all heads of a token, with a weight for all
  bool constant_places;  // CUDA only: no work that may still be running writes slot_mapping or
                         // positions
  float eps;
  DType dtype;
};
inline RowCounts row_counts(AppendKvParams& p) { return {{&p.num_tokens}, {}}; }

// T5's buckets of relative positions r = key position - query position. Of the num_sided buckets of
// one side the first half hold one distance each; the rest grow wider up to max_distance, and the
// last also holds every larger distance. The distance is -r, with 0 for keys ahead; if
// bidirectional it is |r|, and keys ahead (r > 0) use buckets num_sided .. 2 * num_sided - 1.
constexpr int kMaxSidedBuckets = 128;
struct PositionBuckets {
  int32_t num_sided;                 // 2..kMaxSidedBuckets
  int32_t starts[kMaxSidedBuckets];  // smallest distance of each bucket of a side, ascending
  bool bidirectional;
};

// Ragged queries against the paged cache; query i of n of a sequence of length s is at s - n + i.
struct PagedAttentionParams {
  const void* q;                   // [num_tokens, num_q_heads, head_dim]
  const void* k_cache;             // [num_pages, page_size, num_kv_heads, head_dim]
  const void* v_cache;             // [num_pages, page_size, num_kv_heads, head_dim]
  const int32_t* page_table;       // [num_seqs, max_pages_per_seq], row stride page_table_stride
  const int32_t* seq_lens;         // [num_seqs], keys in the cache, this call's included
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const float* position_bias;  // [num_buckets, num_q_heads], added to scaled scores; may be null
  void* out;                   // [num_tokens, num_q_heads, head_dim]
  int32_t* arrivals;           // CUDA only, [num_arrivals], 0 before and after; may be null
  PositionBuckets buckets;     // of position_bias
  int64_t num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim;
  int64_t num_pages, page_size, page_table_stride, num_arrivals;
  int64_t q_token_stride, q_head_stride;
  int64_t out_token_stride, out_head_stride;
  CacheStrides k_cache_strides, v_cache_strides;
  CacheFormat cache_format;
  int64_t sliding_window;    // keys that a query sees, its own included; 0: all
  int64_t fixed_split_size;  // keys per split; 0: chosen from the shape of the call
  int64_t max_pages_per_seq;
  float scale;
  float soft_cap;  // c: scaled scores s become c * tanh(s / c); 0: no cap
  bool causal;
  bool constant_places;  // CUDA only: no work that may still be running writes page_table,
                         // seq_lens, query_start_loc, the cache's scales, or keys and values of
                         // positions before a sequence's queries
  DType dtype;
  void* workspace;  // CUDA only, [paged_attention_workspace bytes]; may be null on the CPU
};
inline RowCounts row_counts(PagedAttentionParams& p) { return {{&p.num_tokens}, {&p.num_seqs}}; }

// A gated convolution over the last positions of a sequence, feature by feature. Each row's
// u = B * x goes to its slot; out = C * (the sum of weight[k] * u of the position num_taps - 1 - k
// before the row's own), where u of a position before the text is 0. Rows of a sequence are its
// last positions, as in paged attention. Without a weight only u is written, of rows whose
// exit_layer is at most `layer`.
struct ShortConvParams {
  const void* bcx;                 // [num_tokens, 3 * hidden_size], row stride bcx_stride: B, C, x
  void* state;                     // [num_pages, page_size, hidden_size]
  const int64_t* slot_mapping;     // [num_tokens]; -1 writes nothing
  const void* weight;              // [num_taps, hidden_size], oldest position first; may be null
  const int32_t* page_table;       // [num_seqs, max_pages_per_seq], row stride page_table_stride
  const int32_t* seq_lens;         // [num_seqs], positions, this call's included
  const int32_t* query_start_loc;  // [num_seqs + 1]; null without a weight, as the two before it
  const int32_t* exit_layer;       // [num_tokens]; null with a weight
  void* out;                       // [num_tokens, hidden_size], row stride out_stride, or null
  int64_t num_tokens, num_seqs, hidden_size, num_taps;
  int64_t page_size, page_table_stride, bcx_stride, out_stride;
  int64_t layer;
  bool narrow_state;  // bfloat16 for a float32 model, only on the CPU
  DType dtype;
};
inline RowCounts row_counts(ShortConvParams& p) { return {{&p.num_tokens}, {&p.num_seqs}}; }

// A gated delta rule over the positions of each sequence. (Yang et al. 2024, eq. 10.)
// The state of a sequence is in the entry `number - 1` of the three caches: S after the first
// applied[entry] positions, and the rows of the positions after it, position p at p % num_kept.
struct GatedDeltaParams {
  const void* qkvz;  // [num_tokens, conv_size + value_size], row stride qkvz_stride: q, k, v, z
  const void* ba;    // [num_tokens, 2 * num_value_heads], row stride ba_stride: b, a
  float* state;      // [num_states, num_value_heads, num_tiles, key_dim, kDeltaTile]: feature
                     // tile * kDeltaTile + i of the values; 0 beyond value_dim
  void* rows;        // [num_states, num_kept, conv_size + 2 * num_value_heads]: q, k, v, b, a
  int32_t* applied;  // [num_states, num_key_heads], positions in S of the values of a key head
  const int32_t* states;  // [num_seqs, 2], row stride states_stride: the number of the state, 0 for
                          // none: the text begins with the call and nothing is kept; and how many
                          // positions of the text are certain
  const void* taps;       // [num_taps, conv_size], oldest position first
  const float* log_rate;  // [num_value_heads], A_log
  const float* dt_bias;   // [num_value_heads]
  const void* norm;       // [value_dim]
  const int32_t* seq_lens;         // [num_seqs], positions, this call's included
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int64_t* slot_mapping;     // [num_tokens]; may be null. -1 in a text's first row: the text
                                   // is one without a state
  const int32_t* exit_layer;       // [num_tokens], with `layer`, without out; else null
  void* out;                       // [num_tokens, value_size], row stride out_stride, or null
  int64_t num_tokens, num_seqs, num_key_heads, num_value_heads, key_dim, value_dim, num_taps;
  int64_t num_kept, qkvz_stride, ba_stride, states_stride, out_stride;
  int64_t layer;
  bool has_tiled_heads;  // value head v belongs to key head v % num_key_heads, else to key head
                         // v / (num_value_heads / num_key_heads)
  float eps;
  DType dtype;
};
// Columns of S that lie side by side.
constexpr int64_t kDeltaTile = 32;
// Limits of the sizes: of key_dim and value_dim, and of num_taps.
constexpr int64_t kMaxDeltaDim = 256;
constexpr int64_t kMaxDeltaTaps = 8;
inline RowCounts row_counts(GatedDeltaParams& p) { return {{&p.num_tokens}, {&p.num_seqs}}; }

// out = x * sigmoid(gate), head by head.
struct SigmoidGateParams {
  const void* x;     // [num_tokens, num_heads, head_dim], contiguous
  const void* gate;  // [num_tokens, num_heads, head_dim], strides gate_*_stride
  void* out;         // [num_tokens, num_heads, head_dim], contiguous; may be x
  int64_t num_tokens, num_heads, head_dim;
  int64_t gate_token_stride, gate_head_stride;
  DType dtype;
};
inline RowCounts row_counts(SigmoidGateParams& p) { return {{&p.num_tokens}, {}}; }

// Takes one state per row through norm, K/V projection, k-norm and rotary of every layer >=
// exit_layer[row].
struct KvFillParams {
  const void* hidden;          // [num_tokens, hidden_size], row stride hidden_stride
  const int32_t* exit_layer;   // [num_tokens], 0 or more
  const void* norm_weight;     // [num_layers, hidden_size]; may be null: states are not normed
  const void* kv_weight;       // [num_layers, 2 * num_kv_heads * head_dim, hidden_size]
  const float* kv_scale;       // [num_layers, 2 * num_kv_heads * head_dim]; may be null, else the
                               // weight is int8 times this
  const int64_t* kv_table;     // [num_layers, 2 * num_kv_heads * head_dim]; may be null, else the
                               // weight is packed
  const void* kv_bias;         // [num_layers, 2 * num_kv_heads * head_dim]; may be null
  const void* k_norm_weight;   // [num_layers, head_dim], or of all heads; may be null
  const int64_t* positions;    // [num_tokens]; may be null: no rotary
  const float* cos_sin;        // [max_position, rotary_dim]: cosines, then sines; may be null
  const int32_t* layer_ropes;  // [num_layers, 2]: which of the tables in cos_sin a layer's queries
                               // use, then its keys; may be null: there is one table
  void* k_cache;               // [num_layers, num_pages, page_size, num_kv_heads, head_dim]
  void* v_cache;               // [num_layers, num_pages, page_size, num_kv_heads, head_dim]
  const int32_t* layer_numbers;  // [num_layers], ascending: what exit_layer calls the layers; may
                                 // be null: 0, 1, ...
  const int64_t* slot_mapping;   // [num_tokens]; -1 writes nothing
  int64_t num_tokens, num_layers, hidden_size, num_kv_heads, head_dim, rotary_dim, page_size;
  int64_t loop_slots;   // from a slot of a looped model's loop to that of the next; 0: no loops
  int64_t num_slots;    // of all loops
  int64_t first_layer;  // CUDA only: the first layer of the loop that is filled, through all loops
  int64_t slot_offset;  // CUDA only: of that loop
  int64_t hidden_stride;
  int64_t norm_layer_stride, weight_layer_stride, weight_row_stride;
  int64_t scale_layer_stride, table_layer_stride, bias_layer_stride;
  int64_t k_norm_layer_stride;
  int64_t rope_stride;  // from one table to the next
  int64_t k_cache_layer_stride, v_cache_layer_stride;
  CacheStrides k_cache_strides, v_cache_strides;  // of a layer
  CacheFormat cache_format;                       // of layer 0; the scales of later layers follow
  bool norms_all_k;                               // normed over all heads of a token at once
  float eps;
  DType dtype;
  void* workspace;  // CUDA only, [kv_fill_workspace bytes]; may be null on the CPU
};
inline RowCounts row_counts(KvFillParams& p) { return {{&p.num_tokens}, {}}; }

// out = soft_cap(multiplier * (norm(x) weight^T + bias)) + residual; for few rows of x the weight
// is read once.
struct SkinnyLinearParams {
  const void* x;                // [num_tokens, in_features], row stride x_stride
  const void* norm_weight;      // [in_features]; may be null: x is not normed
  const void* weight;           // [out_features, in_features], row stride weight_stride
  const float* weight_scale;    // [out_features]; may be null, else the weight is int8 times this
  const int64_t* weight_table;  // [out_features]; may be null, else the weight is packed
  const void* bias;             // [out_features]; may be null
  const void* residual;  // [num_tokens, out_features], row stride residual_stride; may be null,
                         // may be out itself
  void* out;             // [num_tokens, out_features], row stride out_stride; see wide_out
  int64_t num_tokens, in_features, out_features;
  int64_t x_stride, weight_stride, residual_stride, out_stride;
  float eps;
  float multiplier = 1.0f;  // of the product with its bias
  float soft_cap;           // c: the scaled product y becomes c * tanh(y / c); 0: no cap
  Activation activation;    // of the product with its bias, before the residual: kNone or kRelu
  bool constant_weight;     // no work that may still be running writes the weight
  bool wide_out;            // out is float32 whatever the dtype, and nothing is rounded to dtype
  AppendKvParams append;    // CUDA only, of heads in out; slot_mapping null: nothing is appended
  DType dtype;
  void* workspace;  // CUDA only, [skinny_linear_workspace bytes]; may be null on the CPU
};
inline RowCounts row_counts(SkinnyLinearParams& p) { return {{&p.num_tokens}, {}}; }

// out = residual + multiplier * norm(x): adds a sublayer's normed output to the residual stream.
struct AddNormedParams {
  const void* x;            // [num_tokens, hidden_size], row stride x_stride
  const void* norm_weight;  // [hidden_size]
  const void* residual;     // [num_tokens, hidden_size], row stride residual_stride; may be null
  void* out;                // [num_tokens, hidden_size], row stride out_stride; may be residual
  int64_t num_tokens, hidden_size;
  int64_t x_stride, residual_stride, out_stride;
  float eps;
  float multiplier = 1.0f;
  DType dtype;
};
inline RowCounts row_counts(AddNormedParams& p) { return {{&p.num_tokens}, {}}; }

// out = activation(gate) * up of the two halves of norm(x) weight^T + bias.
struct SkinnyGatedLinearParams {
  const void* x;            // [num_tokens, in_features], row stride x_stride
  const void* norm_weight;  // [in_features]; may be null: x is not normed
  const void* weight;  // [2 * inner_size, in_features], row stride weight_stride: gate, then up
  const float* weight_scale;    // [2 * inner_size]; may be null, else the weight is int8 times this
  const int64_t* weight_table;  // [2 * inner_size]; may be null, else the weight is packed
  const void* bias;             // [2 * inner_size]; may be null
  void* out;                    // [num_tokens, inner_size], row stride out_stride
  int64_t num_tokens, in_features, inner_size;
  int64_t x_stride, weight_stride, out_stride;
  float eps;
  Activation activation;  // kSilu or kGeluTanh
  bool constant_weight;   // no work that may still be running writes the weight
  DType dtype;
  void* workspace;  // CUDA only, [skinny_gated_linear_workspace bytes]; may be null on the CPU
};
inline RowCounts row_counts(SkinnyGatedLinearParams& p) { return {{&p.num_tokens}, {}}; }

// A linear layer, stacked over the layers of a decoder.
struct StackedLinear {
  const void* weight;  // [num_layers, out_features, in_features], strides layer_stride, row_stride
  const float*
      scale;  // [num_layers, out_features]; may be null, else the weight is int8 times this
  const int64_t* table;  // [num_layers, out_features], row stride table_stride; may be null, else
                         // the weight is packed
  const void* bias;      // [num_layers, out_features]; may be null
  int64_t in_features, out_features;
  int64_t layer_stride, row_stride, table_stride;
};

// Layers [begin_layer, end_layer) of a decoder. Each adds to the rows the output of attention over
// their normed states, then, where there is an encoder, of attention over its keys and values, then
// of the MLP.
struct DecoderLayersParams {
  const void* hidden;          // [num_tokens, hidden_size], row stride hidden_stride
  const void* attention_norm;  // [num_layers, hidden_size]; may be null: states are not normed
  const void* q_norm;          // [num_layers, head_dim], or of all heads; may be null
  const void* k_norm;          // [num_layers, head_dim], or of all heads; may be null
  const void* mlp_norm;        // [num_layers, hidden_size]; may be null: states are not normed
  const void*
      attention_post_norm;    // [num_layers, hidden_size], norm of attention's output; may be null
  const void* mlp_post_norm;  // [num_layers, hidden_size], norm of the MLP's output; may be null
  StackedLinear qkv;          // outputs the heads of q, then of k, then of v
  StackedLinear o;            // reads the heads of q
  const void* cross_norm;     // [num_layers, hidden_size]; null: no cross attention
  StackedLinear cross_q;      // outputs the heads of q
  StackedLinear cross_o;      // reads the heads of q
  StackedLinear gate_up;      // outputs gate, then up; with kRelu the inner features alone
  StackedLinear down;         // reads activation(gate) * up; with kRelu relu(inner)
  Activation activation;      // kSilu, kGeluTanh, or kRelu: an MLP that is not gated
  AppendKvParams append;      // of layer 0, without q, k, v and their norms
  PagedAttentionParams attend;    // of layer 0, without q, out and the sliding window
  PagedAttentionParams cross;     // of layer 0, without q and out
  const int32_t* layer_ropes;     // [num_layers, 2], as in KvFillParams; may be null
  const int32_t* sliding_window;  // [num_layers], keys that a query sees; 0, or null: all
  const uint8_t* skip_attention;  // [num_layers], 0 or 1; may be null: none is skipped
  const uint8_t* skip_mlp;        // [num_layers], 0 or 1; may be null: none is skipped
  void* out;                      // [num_tokens, hidden_size], row stride out_stride; may be hidden
  int64_t begin_layer, end_layer;
  int64_t num_tokens, hidden_size;
  int64_t hidden_stride, out_stride;
  int64_t k_cache_layer_stride, v_cache_layer_stride;
  int64_t q_norm_size, k_norm_size;  // of a layer
  int64_t rope_stride;               // from one table to the next
  float eps;
  float residual_multiplier = 1.0f;  // of the outputs of attention and of the MLP
  DType dtype;
};
inline RowCounts row_counts(DecoderLayersParams& p) {
  return {{&p.num_tokens, &p.append.num_tokens, &p.attend.num_tokens, &p.cross.num_tokens},
          {&p.attend.num_seqs, &p.cross.num_seqs}};
}

// Converts a weight of floats into the blocks of a GGUF file.
struct QuantiseWeightParams {
  const void* weight;  // [num_rows, columns], row stride weight_stride
  uint8_t* blocks;     // [num_rows, blocks of `columns` numbers], row stride blocks_stride
  int64_t num_rows, columns, weight_stride, blocks_stride;
  BlockFormat format;
  DType dtype;
};
inline RowCounts row_counts(QuantiseWeightParams&) { return {}; }

// Packs a weight from the blocks of a GGUF file into panels, and says where each row is.
struct PackWeightParams {
  const uint8_t* blocks;  // [num_rows, blocks of `columns` numbers], row stride blocks_stride
  uint8_t* packed;        // [from offset on, planes_of(format, columns).bytes for each panel]
  int64_t* table;         // [num_rows]
  int64_t num_rows, columns, blocks_stride;
  int64_t offset;  // in packed, a multiple of 64
  BlockFormat format;
};
inline RowCounts row_counts(PackWeightParams&) { return {}; }

// Unpacks rows of a packed weight to float32.
struct UnpackWeightParams {
  const uint8_t* packed;
  const int64_t* table;  // [num_rows]
  float* out;            // [num_rows, columns], row stride out_stride
  int64_t num_rows, columns, out_stride;
};
inline RowCounts row_counts(UnpackWeightParams&) { return {}; }

// A token for each row of logits: drawn from the distribution that its request asks for, or the
// most probable one. A row of logits j writes row w = index[j] of the outputs, for request r =
// row[w].
struct SampleTokensParams {
  const void* logits;               // [num_rows, vocab_size], row stride logits_stride
  const float* temperature;         // [num_requests]; 0: the most probable token
  const int32_t* top_k;             // [num_requests]; 0: off
  const float* top_p;               // [num_requests]; 1: off
  const float* min_p;               // [num_requests]; 0: off
  const float* repetition_penalty;  // [num_requests]; 1: off
  const int64_t* seed;              // [num_requests]
  const int64_t* seen;              // [num_requests, num_seen]; ids outside the vocabulary: nothing
  const float* presence_penalty;    // [num_requests]; may be null: off
  const float* frequency_penalty;   // [num_requests]; may be null: off
  const int64_t* generated;  // [num_requests, num_generated], each id as often as it was generated;
                             // may be null
  const int64_t* bias_ids;   // [num_requests, num_bias], none twice; may be null
  const float* bias;         // [num_requests, num_bias]; null when bias_ids is
  const int32_t* allowed;  // [num_requests, num_masks, ceil(vocab_size / 32)]: bit id % 32 of word
                           // id / 32 of mask position - first_position, or of mask 0 without
                           // first_position; positions without a mask allow all tokens; may be null
  const int64_t* positions;     // [num_outputs], the position of the token before the drawn one
  const int32_t* index;         // [num_rows]; may be null: j
  const int32_t* row;           // [num_outputs]; may be null: w
  const int32_t* kind;          // [num_requests]; may be null, else only kind `wanted` is handled
  const int64_t* round_tokens;  // [num_requests, round_width]; may be null, else tokens 1 up to the
                                // position also count as seen and generated
  const int64_t* first_position;  // [num_requests], the position of round_tokens[0]; may be null
                                  // without round_tokens
  int64_t* token;                 // [num_outputs]; -1 where no token has a positive probability
  float* confidence;              // [num_outputs]
  float* logprob;                 // [num_outputs]
  float* logsumexp;               // [num_outputs]
  float* probs;         // [num_probs, vocab_size], row w, or r * probs_by_step + position -
                        // first_position where probs_by_step > 0; may be null
  float* uniform;       // [num_outputs, 2], in [0, 1); may be null
  int64_t* top_ids;     // [num_outputs, num_top], -1 beyond the vocabulary's size; may be null
  float* top_logprobs;  // [num_outputs, num_top], -infinity there; null when top_ids is
  int64_t num_rows, vocab_size, num_seen, num_generated, num_bias, num_masks;
  int64_t round_width, num_top, probs_by_step;
  int64_t logits_stride;
  int32_t wanted;
  uint32_t purpose;     // identifies the random number that draws the token
  bool as_probability;  // confidence: of the chosen token; else the gap of the two largest
  DType dtype;
  void* workspace;  // CUDA only, [sample_tokens_workspace bytes]; may be null on the CPU
};
inline RowCounts row_counts(SampleTokensParams& p) { return {{&p.num_rows}, {}}; }

// Top-p drops a token once the tokens before it have this share of top_p: sums of float32
// probabilities that should equal top_p may miss it by less than the remainder.
constexpr double kTopPShare = 1.0 - 1e-6;
// The purpose of the random numbers in `uniform`.
constexpr uint32_t kAcceptancePurpose = 2;

// Longest accepted prefix of each sequence's drafts, and the token after it.
// Sequence s holds drafts draft_start_loc[s]..draft_start_loc[s+1]-1 and, with its extra position,
// target rows draft_start_loc[s]+s..draft_start_loc[s+1]+s.
struct SpeculativeAcceptParams {
  const int64_t* draft_tokens;     // [num_drafts]
  const int32_t* draft_start_loc;  // [num_seqs + 1]
  const int64_t* target_tokens;    // [num_drafts + num_seqs], greedy; null when sampling
  const float* draft_probs;        // [num_drafts, vocab_size]; null when greedy
  const float* target_probs;       // [num_drafts + num_seqs, vocab_size]; null when greedy
  const float* uniform;            // [num_drafts + num_seqs] in [0, 1); null when greedy
  int32_t* num_accepted;           // [num_seqs]
  int64_t* next_token;             // [num_seqs]; -1 when no token has a positive probability
  int64_t num_seqs, num_drafts, vocab_size;
};
inline RowCounts row_counts(SpeculativeAcceptParams&) { return {}; }

}  // namespace eecore

// The list of all ops, from which their kernels are declared, chosen and defined.
#define EECORE_FOR_EACH_OP(X) \
  X(accept_mask, AcceptMaskParams) \
  X(accept_round, AcceptRoundParams) \
  X(add_normed, AddNormedParams) \
  X(append_drafts, AppendDraftsParams) \
  X(append_kv, AppendKvParams) \
  X(begin_round, BeginRoundParams) \
  X(begin_verification, BeginVerificationParams) \
  X(compact_rows, CompactRowsParams) \
  X(decoder_layers, DecoderLayersParams) \
  X(embed_tokens, EmbedTokensParams) \
  X(exit_confidence_cosine, ExitConfidenceCosineParams) \
  X(exit_confidence_mlp, ExitConfidenceMlpParams) \
  X(exit_confidence_softmax, ExitConfidenceSoftmaxParams) \
  X(exit_rows, ExitRowsParams) \
  X(gated_delta, GatedDeltaParams) \
  X(gather_states, GatherStatesParams) \
  X(kv_fill, KvFillParams) \
  X(pack_weight, PackWeightParams) \
  X(paged_attention, PagedAttentionParams) \
  X(place_head, PlaceHeadParams) \
  X(quantise_weight, QuantiseWeightParams) \
  X(sample_tokens, SampleTokensParams) \
  X(select_rows, SelectRowsParams) \
  X(short_conv, ShortConvParams) \
  X(sigmoid_gate, SigmoidGateParams) \
  X(skinny_gated_linear, SkinnyGatedLinearParams) \
  X(skinny_linear, SkinnyLinearParams) \
  X(speculative_accept, SpeculativeAcceptParams) \
  X(unpack_weight, UnpackWeightParams)
