// embed_tokens on the CPU: rows that are copied, int8 rows times their scale, or rows of a packed
// weight; if there are many rows, threads share them.
#include "panel_rows.h"
#include "scratch.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// The product is rounded to float32, then to out's dtype.
template <typename Element>
void scale_row(const int8_t* weight, float scale, Element* out, int64_t hidden_size) {
  for (int64_t i = 0; i < hidden_size; ++i) {
    from_float(static_cast<float>(weight[i]) * scale, out + i);
  }
}

// Unpacks a row of a packed weight; row: [hidden_size].
void unpack_into(const EmbedTokensParams& params, int64_t token, float* row, char* out) {
  const RowPlace place = row_place(params.table[token]);
  unpack_row(static_cast<const uint8_t*>(params.weight) + place.offset, place, row);
  if (params.dtype == DType::kFloat32) {
    copy_bytes(out, row, params.row_bytes);
    return;
  }
  BFloat16* rounded = reinterpret_cast<BFloat16*>(out);
  for (int64_t i = 0; i < params.hidden_size; ++i) from_float(row[i], rounded + i);
}

// out: [hidden_size], multiplied and rounded again.
template <typename T>
void multiply_row(float multiplier, int64_t hidden_size, T* out) {
  const Vec factor = broadcast(multiplier);
  for (int64_t i = 0; i < hidden_size; i += kWidth) {
    const int64_t lanes = min_of(hidden_size - i, kWidth);
    store_partial(out + i, load_partial(out + i, lanes) * factor, lanes);
  }
}

// The token of a row; -1: the row is left as it is.
int64_t token_of(const EmbedTokensParams& params, int64_t row) {
  const int32_t source = params.sources == nullptr ? -1 : params.sources[row];
  return source < 0 ? params.token_ids[row] : max_of(params.previous[source], 0);
}

void embed_row(const EmbedTokensParams& params, int64_t row, int64_t token, float* unpacked) {
  char* out = static_cast<char*>(params.out) + row * params.out_stride;
  if (params.table != nullptr) return unpack_into(params, token, unpacked, out);
  const char* weight = static_cast<const char*>(params.weight) + token * params.weight_stride;
  if (params.scale == nullptr) {
    copy_bytes(out, weight, params.row_bytes);
    return;
  }
  const int8_t* whole = reinterpret_cast<const int8_t*>(weight);
  const float scale = params.scale[token];
  if (params.dtype == DType::kFloat32) {
    scale_row(whole, scale, reinterpret_cast<float*>(out), params.hidden_size);
  } else {
    scale_row(whole, scale, reinterpret_cast<BFloat16*>(out), params.hidden_size);
  }
}

}  // namespace

void run_embed_tokens(const EmbedTokensParams& params, const Parallel& parallel) {
  const int64_t grain = parallel.bytes_per_range / max_of(params.row_bytes, 1) + 1;
  parallel_for(parallel, params.num_tokens, grain, [&](int64_t begin, int64_t end) {
    const Scratch<float> unpacked(params.table ? params.hidden_size : 0);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = token_of(params, row);
      if (token < 0) continue;
      embed_row(params, row, token, unpacked.data());
      if (params.multiplier == 1.0f) continue;
      char* out = static_cast<char*>(params.out) + row * params.out_stride;
      if (params.dtype == DType::kFloat32) {
        multiply_row(params.multiplier, params.hidden_size, reinterpret_cast<float*>(out));
      } else {
        multiply_row(params.multiplier, params.hidden_size, reinterpret_cast<BFloat16*>(out));
      }
    }
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
