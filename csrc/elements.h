// The place of a tensor's elements in memory: what an op writes must share no byte with any other
// argument.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>

namespace eecore {

class Elements {
 public:
  static constexpr int kMaxDims = 5;

  Elements() = default;
  // The elements of a tensor of at most kMaxDims dimensions.
  explicit Elements(const torch::stable::Tensor& tensor);

  bool empty() const { return begin_ == end_; }
  // Whether the elements are in the tensor's memory, each at a multiple of its size.
  bool have_memory(const torch::stable::Tensor& tensor) const;
  // Whether no two elements share a byte. Strides that do not enclose one another count as shared.
  bool are_apart() const;
  // Whether no element shares a byte with one of `other`: all are before or after those of `other`,
  // or in different columns of common rows. Anything else counts as shared.
  bool are_apart_from(const Elements& other) const;
  // Whether the elements are the same ones, in the same order.
  bool are(const Elements& other) const;

 private:
  // In bytes; only dimensions of sizes above 1.
  struct Step {
    int64_t count, stride;
  };
  // The width of the elements modulo `row`: from the first byte of the first to the last byte of
  // the last.
  int64_t width_within(int64_t row) const;
  bool in_other_columns(const Elements& other, int64_t row) const;

  uintptr_t begin_ = 0, end_ = 0;
  int64_t element_size_ = 1;
  int num_steps_ = 0;
  std::array<Step, kMaxDims> steps_;
};

}  // namespace eecore
