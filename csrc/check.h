// Shape, dtype, device and stride checks at the tensor boundary. One Checker per call binds named
// sizes at their first use and holds every later tensor to them.
//
//   Checker check("accept_mask");
//   check(confidence, "confidence", kFloat32, {"num_seqs"});
//   check(thresholds, "thresholds", kFloat32, {"num_seqs"});
//   check.written(status, "status", kBool, {"num_seqs"});
//   params.num_seqs = check["num_seqs"];
//
// The memory of a tensor that is written must not overlap with that of any other tensor of the
// call. A failed check throws "accept_mask: thresholds: expected float32 [num_seqs=4], got float32
// [3]".
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "eecore/params.h"
#include "elements.h"

namespace eecore {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The element types that a tensor may have. kCache: float8 (e4m3), the types of kModel, or bfloat16
// for a float32 model on the CPU.
enum class Accept : uint8_t {
  kFloat32,
  kUint8,
  kInt8,
  kInt32,
  kInt64,
  kBool,
  kModel,
  kModelOrFloat32,
  kCache
};

// "float32", "int64", ...
const char* dtype_name(ScalarType type);

// A size of an expected shape: a name to bind or match, or a number.
struct Dim {
  Dim(const char* name) : name(name) {}  // NOLINT: implicit, so that shapes read as lists
  Dim(int64_t size) : size(size) {}      // NOLINT
  Dim(int size) : size(size) {}          // NOLINT
  const char* name = nullptr;
  int64_t size = -1;
};

class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  // Checks a tensor that the op reads: its dtype, shape and device, and unit-stride contiguity of
  // its last `contiguous_dims` dimensions (all of them by default).
  void operator()(const Tensor& tensor, const char* name, Accept accept,
                  std::initializer_list<Dim> shape, int contiguous_dims = 8);

  // The same for an optional tensor; returns whether it is given.
  bool operator()(const std::optional<Tensor>& tensor, const char* name, Accept accept,
                  std::initializer_list<Dim> shape, int contiguous_dims = 8) {
    if (tensor.has_value()) (*this)(*tensor, name, accept, shape, contiguous_dims);
    return tensor.has_value();
  }

  // Also checks that no two elements share memory, for a tensor of which the op reads every row in
  // any case.
  void apart(const Tensor& tensor, const char* name, Accept accept,
             std::initializer_list<Dim> shape, int contiguous_dims = 8);

  // Checks a tensor that the op writes: its elements share no memory with each other or with any
  // other tensor of the call, except that it may be the tensor `over`, which has been checked.
  void written(const Tensor& tensor, const char* name, Accept accept,
               std::initializer_list<Dim> shape, int contiguous_dims = 8,
               const char* over = nullptr);
  bool written(const std::optional<Tensor>& tensor, const char* name, Accept accept,
               std::initializer_list<Dim> shape, int contiguous_dims = 8) {
    if (tensor.has_value()) written(*tensor, name, accept, shape, contiguous_dims);
    return tensor.has_value();
  }

  // Checks a weight [..., num_rows, n] with contiguous rows that do not overlap: kModel, or with a
  // `scale` int8, and the scale float32 [..., num_rows]. Returns the scale's data, or null.
  const float* weight(const Tensor& tensor, const char* name, std::initializer_list<Dim> shape,
                      const std::optional<Tensor>& scale, const char* scale_name,
                      std::initializer_list<Dim> scale_shape);

  // Binds a size that is not a dimension of any tensor, for example "num_drafts + num_seqs".
  void bind(const char* dim_name, int64_t size);

  int64_t operator[](const char* dim_name) const;
  bool has(const char* dim_name) const { return find(dim_name) != nullptr; }

  // The strides of a cache [..., num_pages, page_size, num_kv_heads, head_dim] of fewer than 2^31
  // slots. Along a dimension of size 1 the stride is 0, so that an odd one does not make the cache
  // look misaligned.
  CacheStrides cache_strides(const Tensor& cache, const char* name) const;

  // The dtype shared by every tensor checked with Accept::kModel.
  DType dtype() const;

  // Requires all of some optional tensors, or none; returns whether they are given.
  struct Optional {
    const char* name;
    const std::optional<Tensor>& tensor;
  };
  bool all_or_none(std::initializer_list<Optional> tensors) const;

  // The names of those that are given, "q_scale, k_scale".
  static std::string given(std::initializer_list<Optional> tensors);

  // Throws "<op>: <message>" unless `ok`. Only then is the message put together from its parts,
  // texts and numbers.
  template <typename... Parts>
  void require(bool ok, const Parts&... parts) const {
    if (ok) [[likely]]
      return;
    std::string message;
    (append(message, parts), ...);
    fail(message);
  }
  [[noreturn]] void fail(const std::string& message) const;

 private:
  struct Binding {
    const char* name;
    int64_t size;
  };
  struct Given {
    const char* name;
    Elements elements;
    bool is_written;
  };
  static void append(std::string& message, const char* text) { message += text; }
  template <typename Number>
  static void append(std::string& message, Number number) {
    message += std::to_string(number);
  }
  const Binding* find(const char* name) const;
  // Adds a tensor that has been checked except for its memory, and returns its elements.
  const Elements& give(const Tensor& tensor, const char* name, bool is_written, const char* over);
  void require_apart(const Tensor& tensor, const char* name, const Elements& elements) const;
  void check_form(const Tensor& tensor, const char* name, Accept accept,
                  const std::initializer_list<Dim>& shape, int contiguous_dims);
  [[noreturn]] void mismatch(const Tensor& tensor, const char* name, Accept accept,
                             const std::initializer_list<Dim>& shape) const;

  const char* op_;
  std::array<Binding, 16> bindings_{};
  int num_bindings_ = 0;
  std::array<Given, 56> given_;
  int num_given_ = 0;
  bool has_device_ = false;
  int32_t device_type_ = 0, device_index_ = 0;
  bool has_dtype_ = false;
  ScalarType model_dtype_{};
};

// The data of an optional tensor, or null.
template <typename T = void>
T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

}  // namespace eecore
