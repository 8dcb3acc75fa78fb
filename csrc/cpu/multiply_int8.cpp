// Products of int8 weights, compiled once for all ops.
#include "skinny_gemm.h"

namespace eecore::cpu::EECORE_CAPABILITY {

void multiply_int8(const Int8Product& product) {
#if defined(EECORE_HANDS_OVER)
  switch (active_capability()) {
    case Capability::kAvxVnni:
      return avx_vnni::multiply_int8(product);
    case Capability::kAvxVnniModel:
      return avx_vnni_model::multiply_int8(product);
    default:
      break;
  }
#endif
  const WeightRows<Int8> w{product.w, product.w_stride, product.scales};
  multiply<Int8>(Unit<Int8>(product.num_batch), w, product.num_rows, product.x, product.x_stride,
                 product.num_batch, product.columns, product.next, product.out, product.out_stride);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
