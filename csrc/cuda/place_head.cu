// place_head on CUDA: one thread per row.
#include "eecore/place_head.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_place_head(const PlaceHeadParams& params, Stream stream) {
  const int64_t blocks = (params.num_selected + kPlaceHeadThreads - 1) / kPlaceHeadThreads;
  launch("place_head", place_head_kernel,
         {dim3(static_cast<unsigned>(blocks)), dim3(kPlaceHeadThreads), 0, Launch::kAfterPrevious},
         stream, params);
}

}  // namespace eecore::cuda
