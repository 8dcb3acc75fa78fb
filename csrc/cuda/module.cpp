// eecore._cuda: importing it registers the CUDA kernels with the schemas of eecore._C.
#include <pybind11/pybind11.h>

#include "conditional_body.h"

namespace py = pybind11;
using eecore::cuda::ConditionalBody;

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "CUDA kernels of eecore";
  // Device pointers and streams come and go as integers, as torch.cuda gives them.
  py::class_<ConditionalBody>(module, "ConditionalBody")
      .def(py::init([](uintptr_t stream, int device, uintptr_t flag, bool when) {
             return std::make_unique<ConditionalBody>(
                 eecore::cuda::Stream{reinterpret_cast<void*>(stream), device},
                 reinterpret_cast<const uint8_t*>(flag), when);
           }),
           py::arg("stream"), py::arg("device"), py::arg("flag"), py::arg("when"))
      .def_property_readonly("stream",
                             [](const ConditionalBody& body) {
                               return reinterpret_cast<uintptr_t>(body.body_stream().handle);
                             })
      .def("end", &ConditionalBody::end);
}
