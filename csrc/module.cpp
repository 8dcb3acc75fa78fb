// eecore._C: importing it loads the schemas and the CPU kernels; what is not an op is bound here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "cpu/run.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, module) {
  module.doc() = "CPU kernels and schemas of eecore";
  module.def("build_info", [] {
    py::dict info;
    info["version"] = EECORE_VERSION;
    info["compiler"] = EECORE_COMPILER;
    info["built_with_torch"] = EECORE_TORCH_VERSION;
    info["cuda"] = py::bool_(EECORE_WITH_CUDA);
    info["cuda_architectures"] = EECORE_CUDA_ARCHITECTURES;
    info["cuda_note"] = EECORE_CUDA_NOTE;
    return info;
  });
  module.def("cpu_capabilities", [] {
    std::vector<std::string> names;
    for (int i = 0; i <= static_cast<int>(eecore::cpu::best_capability()); ++i) {
      names.emplace_back(eecore::cpu::capability_name(static_cast<eecore::cpu::Capability>(i)));
    }
    return names;
  });
  module.def("cpu_capability", [] {
    return std::string(eecore::cpu::capability_name(eecore::cpu::active_capability()));
  });
  module.def("set_cpu_capability",
             [](const std::string& name) { eecore::cpu::set_capability(name.c_str()); });
}
