// eecore._C: importing it loads the schemas and the CPU kernels, and functions that are not ops.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "backend.h"
#include "cpu/run.h"
#include "tape.h"

namespace py = pybind11;

namespace {

// The seconds that one call of `work` takes, without the interpreter's lock.
template <typename Work>
double seconds(const Work& work) {
  py::gil_scoped_release release;
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Bytes per second of one read of a float32 buffer on torch's threads.
double read_rate(uintptr_t data, int64_t num_floats) {
  float sink = 0.0f;
  const eecore::cpu::ReadCeilingParams params{reinterpret_cast<const float*>(data),
                                              num_floats / 1024 * 1024, &sink};
  const double time =
      seconds([&] { eecore::cpu::run_read_ceiling(params, eecore::torch_parallel()); });
  return 4.0 * static_cast<double>(params.num_floats) / time;
}

eecore::cpu::Product product_of(const std::string& numbers) {
  if (numbers == "float32") return eecore::cpu::Product::kFloat32;
  if (numbers == "bfloat16") return eecore::cpu::Product::kBFloat16;
  if (numbers == "int8") return eecore::cpu::Product::kInt8;
  throw std::invalid_argument("numbers: expected float32, bfloat16 or int8, got " + numbers);
}

// Operations per second of independent multiply-adds on torch's threads.
double multiply_rate(const std::string& numbers, int64_t steps) {
  float sink = 0.0f;
  double operations = 0.0;
  const eecore::cpu::MultiplyCeilingParams params{steps, product_of(numbers), &operations, &sink};
  const double time =
      seconds([&] { eecore::cpu::run_multiply_ceiling(params, eecore::torch_parallel()); });
  return operations / time;
}

eecore::BlockFormat block_format(const std::string& name) {
  for (int i = 0; i < eecore::kNumBlockFormats; ++i) {
    if (name == eecore::kBlockTraits[i].name) return static_cast<eecore::BlockFormat>(i);
  }
  throw std::invalid_argument("format: expected a block format, got " + name);
}

// Bytes of a packed weight.
int64_t packed_bytes(const std::string& format, int64_t num_rows, int64_t columns) {
  const eecore::BlockFormat kind = block_format(format);
  const int64_t block = eecore::traits_of(kind).columns;
  if (num_rows < 0 || columns <= 0 || columns > eecore::kMaxPackedColumns || columns % block != 0) {
    throw std::invalid_argument(format + ": expected rows of whole blocks of " +
                                std::to_string(block) + " columns, got " +
                                std::to_string(num_rows) + " rows of " + std::to_string(columns));
  }
  const int64_t num_panels = (num_rows + eecore::kPanelRows - 1) / eecore::kPanelRows;
  return num_panels * eecore::planes_of(kind, columns).bytes;
}

// Bytes of a row in a file; throws if blocks do not fill a row.
int64_t row_bytes(const std::string& format, int64_t columns) {
  packed_bytes(format, 1, columns);  // throws where its blocks do not fill a row
  const eecore::BlockTraits& traits = eecore::traits_of(block_format(format));
  return columns / traits.columns * traits.bytes;
}

// Columns that num_bytes of whole blocks hold; for fewer bytes than a block, the columns of one
// block, so that a later check finds the bytes wrong.
int64_t block_columns(const std::string& format, int64_t num_bytes) {
  const eecore::BlockTraits& traits = eecore::traits_of(block_format(format));
  return std::max<int64_t>(num_bytes / traits.bytes, 1) * traits.columns;
}

// Asks the system for pages of 2 MiB in the memory from `address` on, which must not have been
// written yet. Without them everything works, more slowly.
void ask_for_huge_pages(uintptr_t address, uint64_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uint64_t kPage = 2 << 20;
  const uint64_t begin = (address + kPage - 1) / kPage * kPage;
  const uint64_t end = (address + num_bytes) / kPage * kPage;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  static_cast<void>(address);
  static_cast<void>(num_bytes);
#endif
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

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
      const auto capability = static_cast<eecore::cpu::Capability>(i);
      if (can_run(capability)) names.emplace_back(capability_name(capability));
    }
    return names;
  });
  module.def("cpu_capability", [] {
    return std::string(eecore::cpu::capability_name(eecore::cpu::active_capability()));
  });
  module.def("set_cpu_capability",
             [](const std::string& name) { eecore::cpu::set_capability(name.c_str()); });
  module.def("packed_bytes", &packed_bytes, py::arg("format"), py::arg("num_rows"),
             py::arg("columns"));
  module.def("row_bytes", &row_bytes, py::arg("format"), py::arg("columns"));
  module.def("block_columns", &block_columns, py::arg("format"), py::arg("num_bytes"));
  module.def("ask_for_huge_pages", &ask_for_huge_pages, py::arg("address"), py::arg("num_bytes"));
  using eecore::Tape;
  py::class_<Tape>(module, "Tape")
      .def(py::init<>())
      .def("begin", &Tape::begin)
      .def("end", &Tape::end)
      .def("cancel", &Tape::cancel)
      .def(
          "read_rows",
          [](Tape& tape, uintptr_t num_tokens, uintptr_t num_seqs) {
            const Tape::RowsRead outer = tape.read_rows(
                {pointer<const int32_t>(num_tokens), pointer<const int32_t>(num_seqs)});
            return std::pair(reinterpret_cast<uintptr_t>(outer.num_tokens),
                             reinterpret_cast<uintptr_t>(outer.num_seqs));
          },
          py::arg("num_tokens"), py::arg("num_seqs"))
      .def(
          "open_jump",
          [](Tape& tape, uintptr_t flag) { return tape.open_jump(pointer<const uint8_t>(flag)); },
          py::arg("flag"))
      .def("close_jump", &Tape::close_jump, py::arg("opened"))
      .def(
          "replay", [](Tape& tape) { tape.replay(eecore::torch_parallel()); },
          py::call_guard<py::gil_scoped_release>())
      .def("trace",
           [](Tape& tape) {
             std::vector<eecore::CallTrace> trace;
             {
               py::gil_scoped_release release;
               tape.replay(eecore::torch_parallel(), &trace);
             }
             std::vector<py::tuple> calls;
             for (const auto& call : trace) {
               calls.push_back(py::make_tuple(call.op, call.num_tokens, call.num_seqs,
                                              call.begin_layer, call.end_layer, call.seconds));
             }
             return calls;
           })
      .def("__len__", &Tape::num_calls);
  module.def("read_rate", &read_rate, py::arg("data"), py::arg("num_floats"));
  module.def("multiply_rate", &multiply_rate, py::arg("numbers"), py::arg("steps"));
}
