// share_kv: copies keys and values of a looped model's skipped layers from those of another loop.
#include "backend.h"
#include "index_checks.h"

namespace eecore {
namespace {

void share_kv(const Tensor& exit_layer, Tensor k_cache, Tensor v_cache, const Tensor& slot_mapping,
              int64_t loop_layers, bool from_last) {
  Checker check("share_kv");
  check(exit_layer, "exit_layer", Accept::kInt32, {"num_tokens"});
  check(slot_mapping, "slot_mapping", Accept::kInt64, {"num_tokens"});
  for (const auto& [cache, name] : {std::pair(&k_cache, "k_cache"), {&v_cache, "v_cache"}}) {
    check.written(*cache, name, Accept::kCache,
                  {"num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim"}, 1);
  }
  const ScalarType type = k_cache.scalar_type();
  check.require(type == v_cache.scalar_type(), "v_cache: expected the dtype of k_cache, ",
                dtype_name(type), ", got ", dtype_name(v_cache.scalar_type()));
  const int64_t num_layers = check["num_layers"];
  check.require(loop_layers >= 1 && num_layers % loop_layers == 0,
                "loop_layers: expected a divisor of num_layers=", num_layers, ", got ",
                loop_layers);
  const int64_t element = type == ScalarType::Float8_e4m3fn ? 1 : type == ScalarType::Float ? 4 : 2;
  const auto in_bytes = [&](const Tensor& cache, const char* name) {
    const CacheStrides strides = check.cache_strides(cache, name);
    return CacheStrides{strides.page * element, strides.slot * element, strides.head * element};
  };

  ShareKvParams params{};
  params.exit_layer = data<const int32_t>(exit_layer);
  params.slot_mapping = data<const int64_t>(slot_mapping);
  params.k_cache = data<void>(k_cache);
  params.v_cache = data<void>(v_cache);
  params.num_tokens = check["num_tokens"];
  params.num_layers = num_layers;
  params.loop_layers = loop_layers;
  params.num_kv_heads = check["num_kv_heads"];
  params.page_size = check["page_size"];
  params.head_bytes = check["head_dim"] * element;
  params.k_cache_layer_stride = k_cache.stride(0) * element;
  params.v_cache_layer_stride = v_cache.stride(0) * element;
  params.k_cache_strides = in_bytes(k_cache, "k_cache");
  params.v_cache_strides = in_bytes(v_cache, "v_cache");
  params.from_last = from_last;
  check.require(params.head_bytes % 2 == 0, "k_cache: expected heads of an even number of bytes, ",
                "got ", params.head_bytes);
#ifndef EECORE_BACKEND_CUDA
  check_range(check, "exit_layer", params.exit_layer, params.num_tokens, 0, num_layers + 1);
  check_range(check, "slot_mapping", params.slot_mapping, params.num_tokens, -1,
              check["num_pages"] * params.page_size);
#endif
  EECORE_RUN(share_kv, params, k_cache);
}

EECORE_OP(share_kv,
          "Tensor exit_layer, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
          "int loop_layers, bool from_last")

}  // namespace
}  // namespace eecore
