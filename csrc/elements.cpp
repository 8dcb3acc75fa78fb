#include "elements.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>

namespace eecore {

Elements::Elements(const torch::stable::Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  element_size_ = static_cast<int64_t>(tensor.element_size());
  begin_ = end_ = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return;
    if (sizes[i] == 1) continue;
    steps_[static_cast<size_t>(num_steps_++)] = {sizes[i], strides[i] * element_size_};
    last += (sizes[i] - 1) * strides[i] * element_size_;
  }
  end_ = begin_ + static_cast<uintptr_t>(last + element_size_);
}

bool Elements::have_memory(const torch::stable::Tensor& tensor) const {
  if (empty()) return true;
  int64_t bytes = 0;
  if (aoti_torch_get_storage_size(tensor.get(), &bytes) != 0) return false;
  const int64_t before = tensor.storage_offset() * element_size_;
  return begin_ != 0 && begin_ % static_cast<uintptr_t>(element_size_) == 0 &&
         before + static_cast<int64_t>(end_ - begin_) <= bytes;
}

bool Elements::are_apart() const {
  // From the smallest stride to the largest, each must step over the reach of the smaller ones.
  std::array<bool, kMaxDims> taken{};
  int64_t width = element_size_;
  for (int i = 0; i < num_steps_; ++i) {
    size_t next = kMaxDims;
    for (size_t j = 0; j < static_cast<size_t>(num_steps_); ++j) {
      if (!taken[j] && (next == kMaxDims || steps_[j].stride < steps_[next].stride)) next = j;
    }
    if (steps_[next].stride < width) return false;
    width += (steps_[next].count - 1) * steps_[next].stride;
    taken[next] = true;
  }
  return true;
}

int64_t Elements::width_within(int64_t row) const {
  int64_t width = element_size_;
  for (int i = 0; i < num_steps_; ++i) {
    const Step& step = steps_[static_cast<size_t>(i)];
    if (step.stride % row != 0) width += (step.count - 1) * step.stride;
  }
  return width;
}

bool Elements::in_other_columns(const Elements& other, int64_t row) const {
  const int64_t ahead = (static_cast<int64_t>(other.begin_) - static_cast<int64_t>(begin_)) % row;
  const int64_t column = ahead < 0 ? ahead + row : ahead;
  return width_within(row) <= column && column + other.width_within(row) <= row;
}

bool Elements::are_apart_from(const Elements& other) const {
  if (empty() || other.empty() || end_ <= other.begin_ || other.end_ <= begin_) return true;
  for (const Elements* each : {this, &other}) {
    for (int i = 0; i < each->num_steps_; ++i) {
      const int64_t row = each->steps_[static_cast<size_t>(i)].stride;
      if (row > 0 && in_other_columns(other, row)) return true;
    }
  }
  return false;
}

bool Elements::are(const Elements& other) const {
  return begin_ == other.begin_ && end_ == other.end_ && element_size_ == other.element_size_ &&
         num_steps_ == other.num_steps_ &&
         std::equal(steps_.begin(), steps_.begin() + num_steps_, other.steps_.begin(),
                    [](const Step& a, const Step& b) {
                      return a.count == b.count && a.stride == b.stride;
                    });
}

}  // namespace eecore
