// eecore._cuda: importing it registers the CUDA kernels with the schemas of eecore._C.
#include <pybind11/pybind11.h>

#include "captured_graph.h"
#include "conditional_body.h"

namespace py = pybind11;
using eecore::cuda::CapturedGraph;
using eecore::cuda::ConditionalBody;
using eecore::cuda::Stream;

namespace {

// A stream as given by torch.cuda.
Stream stream_of(uintptr_t handle, int device) { return {reinterpret_cast<void*>(handle), device}; }

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "CUDA kernels of eecore";
  py::class_<CapturedGraph>(module, "CapturedGraph")
      .def(py::init([](uintptr_t stream, int device) {
             return std::make_unique<CapturedGraph>(stream_of(stream, device));
           }),
           py::arg("stream"), py::arg("device"))
      .def("end", &CapturedGraph::end)
      .def(
          "launch",
          [](const CapturedGraph& graph, uintptr_t stream, int device) {
            graph.launch(stream_of(stream, device));
          },
          py::arg("stream"), py::arg("device"));
  // A handle of 64 bits, because ops take integers.
  module.def(
      "make_condition",
      [](uintptr_t stream, int device) {
        return static_cast<int64_t>(eecore::cuda::make_condition(stream_of(stream, device)));
      },
      py::arg("stream"), py::arg("device"));
  py::class_<ConditionalBody>(module, "ConditionalBody")
      .def(py::init([](uintptr_t stream, int device, uintptr_t flag, bool when) {
             return std::make_unique<ConditionalBody>(stream_of(stream, device),
                                                      reinterpret_cast<const uint8_t*>(flag), when);
           }),
           py::arg("stream"), py::arg("device"), py::arg("flag"), py::arg("when"))
      .def(py::init([](uintptr_t stream, int device, int64_t condition) {
             return std::make_unique<ConditionalBody>(stream_of(stream, device),
                                                      static_cast<uint64_t>(condition));
           }),
           py::arg("stream"), py::arg("device"), py::arg("condition"))
      .def("end", &ConditionalBody::end);
}
