#include "check.h"

#include <cstring>
#include <stdexcept>

namespace eecore {

const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return "an unsupported dtype";
  }
}

namespace {

// Whether a model's cache may have this dtype instead of the model's.
bool is_narrow_cache(ScalarType type, [[maybe_unused]] ScalarType model) {
#ifndef EECORE_BACKEND_CUDA
  if (type == ScalarType::BFloat16 && model == ScalarType::Float) return true;
#endif
  return type == ScalarType::Float8_e4m3fn;
}

bool dtype_matches(ScalarType type, Accept accept) {
  switch (accept) {
    case Accept::kFloat32:
      return type == ScalarType::Float;
    case Accept::kUint8:
      return type == ScalarType::Byte;
    case Accept::kInt8:
      return type == ScalarType::Char;
    case Accept::kInt32:
      return type == ScalarType::Int;
    case Accept::kInt64:
      return type == ScalarType::Long;
    case Accept::kBool:
      return type == ScalarType::Bool;
    case Accept::kModel:
    case Accept::kModelOrFloat32:
      return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
    case Accept::kCache:
      return type == ScalarType::Float8_e4m3fn || dtype_matches(type, Accept::kModel);
  }
  return false;
}

const char* accept_name(Accept accept) {
  switch (accept) {
    case Accept::kFloat32:
      return "float32";
    case Accept::kUint8:
      return "uint8";
    case Accept::kInt8:
      return "int8";
    case Accept::kInt32:
      return "int32";
    case Accept::kInt64:
      return "int64";
    case Accept::kBool:
      return "bool";
    case Accept::kModel:
    case Accept::kModelOrFloat32:
      return "float32, bfloat16 or (CUDA) float16";
    case Accept::kCache:
      return "float8_e4m3fn, float32, bfloat16 or (CUDA) float16";
  }
  return "";
}

std::string list_text(torch::headeronly::IntHeaderOnlyArrayRef numbers) {
  std::string text;
  for (const int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "[" + text + "]";
}

// The text of a device, "cpu" or "cuda:0".
std::string device_text(int32_t type, int32_t index) {
  if (type == static_cast<int32_t>(torch::headeronly::DeviceType::CPU)) return "cpu";
  if (type == static_cast<int32_t>(torch::headeronly::DeviceType::CUDA)) {
    return "cuda:" + std::to_string(index);
  }
  return "device type " + std::to_string(type);
}

}  // namespace

void Checker::fail(const std::string& message) const {
  throw std::runtime_error(std::string(op_) + ": " + message);
}

const Checker::Binding* Checker::find(const char* name) const {
  for (int i = 0; i < num_bindings_; ++i) {
    if (std::strcmp(bindings_[i].name, name) == 0) return &bindings_[i];
  }
  return nullptr;
}

void Checker::bind(const char* dim_name, int64_t size) {
  if (num_bindings_ == static_cast<int>(bindings_.size())) fail("too many named sizes");
  bindings_[num_bindings_++] = {dim_name, size};
}

int64_t Checker::operator[](const char* dim_name) const {
  const Binding* binding = find(dim_name);
  if (binding == nullptr) fail(std::string(dim_name) + ": size read before a tensor bound it");
  return binding->size;
}

CacheStrides Checker::cache_strides(const Tensor& cache, const char* name) const {
  const int64_t axis = cache.dim() - 4, num_slots = cache.size(axis) * cache.size(axis + 1);
  require(num_slots <= INT32_MAX, name, ": expected at most ", INT32_MAX,
          " slots (num_pages * page_size), got ", num_slots);
  const auto stride = [&](int64_t i) { return cache.size(i) > 1 ? cache.stride(i) : 0; };
  return {stride(axis), stride(axis + 1), stride(axis + 2)};
}

const float* Checker::weight(const Tensor& tensor, const char* name,
                             std::initializer_list<Dim> shape, const std::optional<Tensor>& scale,
                             const char* scale_name, std::initializer_list<Dim> scale_shape) {
  if (!scale.has_value()) {
    apart(tensor, name, Accept::kModel, shape, 1);
    return nullptr;
  }
  apart(tensor, name, Accept::kInt8, shape, 1);
  (*this)(*scale, scale_name, Accept::kFloat32, scale_shape, 1);
  return data<const float>(*scale);
}

std::string Checker::given(std::initializer_list<Optional> tensors) {
  std::string names;
  for (const Optional& each : tensors) {
    if (each.tensor) names += (names.empty() ? "" : ", ") + std::string(each.name);
  }
  return names;
}

bool Checker::all_or_none(std::initializer_list<Optional> tensors) const {
  const Optional* missing = nullptr;
  size_t num_missing = 0;
  std::string names;
  for (const Optional& each : tensors) num_missing += !each.tensor;
  if (num_missing == 0 || num_missing == tensors.size()) [[likely]]
    return num_missing == 0;
  for (const Optional& each : tensors) {
    if (missing == nullptr && !each.tensor) missing = &each;
    names += (names.empty() ? "" : ", ") + std::string(each.name);
  }
  fail(std::string(missing->name) + ": expected all or none of " + names + ", got " +
       given(tensors));
}

DType Checker::dtype() const {
  if (model_dtype_ == ScalarType::Float) return DType::kFloat32;
  if (model_dtype_ == ScalarType::BFloat16) return DType::kBFloat16;
  return DType::kFloat16;
}

void Checker::mismatch(const Tensor& tensor, const char* name, Accept accept,
                       const std::initializer_list<Dim>& shape) const {
  const bool is_cache = accept == Accept::kCache, is_wide = accept == Accept::kModelOrFloat32;
  const bool bound = (accept == Accept::kModel || is_cache || is_wide) && has_dtype_;
  std::string expected = bound ? dtype_name(model_dtype_) : accept_name(accept);
  if (bound && is_cache) {
    const bool takes_both = is_narrow_cache(ScalarType::BFloat16, model_dtype_);
    expected += takes_both ? ", bfloat16 or float8_e4m3fn" : " or float8_e4m3fn";
  }
  if (bound && is_wide && model_dtype_ != ScalarType::Float) expected += " or float32";
  expected += " [";
  bool first = true;
  for (const Dim& dim : shape) {
    if (!first) expected += ", ";
    first = false;
    if (dim.name == nullptr) {
      expected += std::to_string(dim.size);
      continue;
    }
    expected += dim.name;
    if (const Binding* binding = find(dim.name)) {
      expected.append("=").append(std::to_string(binding->size));
    }
  }
  fail(std::string(name) + ": expected " + expected + "], got " + dtype_name(tensor.scalar_type()) +
       " " + list_text(tensor.sizes()));
}

const Elements& Checker::give(const Tensor& tensor, const char* name, bool is_written,
                              const char* over) {
  if (num_given_ == static_cast<int>(given_.size())) fail("too many tensors");
  Given& given = given_[static_cast<size_t>(num_given_)];
  given = {name, Elements(tensor), is_written};
  require(given.elements.have_memory(tensor), name,
          ": expected aligned elements inside the tensor's memory, got ",
          list_text(tensor.sizes()).c_str(), " outside it or misaligned");
  for (int i = 0; i < num_given_; ++i) {
    const Given& other = given_[static_cast<size_t>(i)];
    if (!is_written && !other.is_written) continue;
    if (given.elements.are_apart_from(other.elements)) [[likely]]
      continue;
    const bool may_be = over != nullptr && std::strcmp(over, other.name) == 0;
    if (may_be && given.elements.are(other.elements)) continue;
    fail(std::string(name) + ": expected memory apart from " + other.name +
         (may_be ? ", or all of it" : "") + ", got an overlap");
  }
  ++num_given_;
  return given.elements;
}

void Checker::require_apart(const Tensor& tensor, const char* name,
                            const Elements& elements) const {
  if (elements.are_apart()) [[likely]]
    return;
  fail(std::string(name) + ": expected elements that do not overlap, got strides " +
       list_text(tensor.strides()) + " of " + list_text(tensor.sizes()));
}

void Checker::operator()(const Tensor& tensor, const char* name, Accept accept,
                         std::initializer_list<Dim> shape, int contiguous_dims) {
  check_form(tensor, name, accept, shape, contiguous_dims);
  give(tensor, name, false, nullptr);
}

void Checker::apart(const Tensor& tensor, const char* name, Accept accept,
                    std::initializer_list<Dim> shape, int contiguous_dims) {
  check_form(tensor, name, accept, shape, contiguous_dims);
  require_apart(tensor, name, give(tensor, name, false, nullptr));
}

void Checker::written(const Tensor& tensor, const char* name, Accept accept,
                      std::initializer_list<Dim> shape, int contiguous_dims, const char* over) {
  check_form(tensor, name, accept, shape, contiguous_dims);
  require_apart(tensor, name, give(tensor, name, true, over));
}

void Checker::check_form(const Tensor& tensor, const char* name, Accept accept,
                         const std::initializer_list<Dim>& shape, int contiguous_dims) {
  // Type and shape; sizes are bound only once the whole shape fits.
  const int64_t rank = static_cast<int64_t>(shape.size());
  const ScalarType type = tensor.scalar_type();
  bool ok = tensor.dim() == rank && dtype_matches(type, accept);
  const bool is_narrow =
      accept == Accept::kCache &&
      (type == ScalarType::Float8_e4m3fn || (has_dtype_ && is_narrow_cache(type, model_dtype_)));
  const bool is_model = accept == Accept::kModel || (accept == Accept::kCache && !is_narrow) ||
                        (accept == Accept::kModelOrFloat32 && type != ScalarType::Float);
  if (is_model && has_dtype_ && type != model_dtype_) ok = false;
  int64_t axis = 0;
  bool is_empty = false;
  for (const Dim& dim : shape) {
    if (!ok) break;
    const int64_t size = tensor.size(axis++);
    is_empty |= size == 0;
    // The product of two sizes must fit in 64 bits; packed bytes are not a factor of one.
    if (size > INT32_MAX && accept != Accept::kUint8) {
      fail(std::string(name) + ": expected sizes of at most " + std::to_string(INT32_MAX) +
           ", got " + list_text(tensor.sizes()));
    }
    if (dim.name == nullptr) {
      ok = size == dim.size;
    } else if (const Binding* binding = find(dim.name)) {
      ok = size == binding->size;
    }
  }
  if (!ok) mismatch(tensor, name, accept, shape);

  // One device for all tensors of the call.
  const int32_t device_type = static_cast<int32_t>(tensor.device().type());
  const int32_t device_index = tensor.get_device_index();
  if (!has_device_) {
    has_device_ = true;
    device_type_ = device_type;
    device_index_ = device_index;
  } else if (device_type != device_type_ || device_index != device_index_) {
    fail(std::string(name) + ": expected a tensor on " + device_text(device_type_, device_index_) +
         ", got one on " + device_text(device_type, device_index));
  }
  if (is_model && !has_dtype_) {
#ifndef EECORE_BACKEND_CUDA
    if (type == ScalarType::Half &&
        device_type == static_cast<int32_t>(torch::headeronly::DeviceType::CPU)) {
      fail(std::string(name) + ": expected float32 or bfloat16 on the CPU, got float16");
    }
#endif
    has_dtype_ = true;
    model_dtype_ = type;
  }

  // Unit-stride contiguity of the trailing dimensions.
  int64_t expected_stride = 1;
  for (int64_t i = rank - 1; i >= 0 && i >= rank - contiguous_dims && !is_empty; --i) {
    if (tensor.size(i) != 1 && tensor.stride(i) != expected_stride) {
      const int64_t inner = contiguous_dims < rank ? contiguous_dims : rank;
      fail(std::string(name) + ": expected the last " + std::to_string(inner) +
           " dimension(s) contiguous, got stride " + std::to_string(tensor.stride(i)) +
           " instead of " + std::to_string(expected_stride) + " in dimension " + std::to_string(i) +
           " of " + list_text(tensor.sizes()));
    }
    expected_stride *= tensor.size(i);
  }

  axis = 0;
  for (const Dim& dim : shape) {
    const int64_t size = tensor.size(axis++);
    if (dim.name == nullptr || find(dim.name) != nullptr) continue;
    bind(dim.name, size);
  }
}

}  // namespace eecore
