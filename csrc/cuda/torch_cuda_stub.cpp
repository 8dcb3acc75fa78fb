// A link-time substitute for libtorch_cuda, for machines with nvcc but only the CPU build of torch:
// eecore._cuda then names libtorch_cuda.so as a dependency, and a CUDA build of torch provides it.
#include <cstdint>

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t, void**) { return 1; }
