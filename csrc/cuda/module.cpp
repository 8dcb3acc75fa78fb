// eecore._cuda: importing it registers the CUDA kernels with the schemas of eecore._C.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_cuda, module) { module.doc() = "CUDA kernels of eecore"; }
