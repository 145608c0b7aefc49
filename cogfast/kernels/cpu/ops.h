// What the ops share: access to tensors, choice of the instruction set, division of rows among threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "vector/kernels.h"

namespace cogfast {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Calls a kernel of vector/kernels.inc for the instruction set that library.py compiles: AVX2 or AVX512.
#define COGFAST_RUN(kernel, ...) ::cogfast::COGFAST_CPU::kernel(__VA_ARGS__)

// Calls body with a zero of the dtype of x: float or at::BFloat16.
template <class Body>
void for_dtype(const Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kFloat) return body(float{});
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "the CPU kernels take float32 and bfloat16, not ", x.dtype());
  body(at::BFloat16{});
}

// None becomes an undefined tensor.
inline Tensor contiguous(const OptionalTensor& x) { return x ? x->contiguous() : Tensor(); }

// Small vectors, such as a norm's weight, are read as float32 whatever their dtype.
inline Tensor contiguous_float(const OptionalTensor& x) {
  return x ? x->to(at::kFloat).contiguous() : Tensor();
}

// Null for an undefined tensor.
template <class T>
T* pointer(const Tensor& x) {
  return x.defined() ? static_cast<T*>(x.data_ptr()) : nullptr;
}

inline Tensor empty_float(at::IntArrayRef shape) { return at::empty(shape, at::kFloat); }

// Number of rows of `width` values that are worth a thread of their own.
inline int64_t grain(int64_t width) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width)); }

// Blocks of rows whose number depends on the shape alone, never on the number of threads. A sum over rows is
// taken within the blocks and then over the blocks in their order: any number of threads gives the same bits.
struct Blocks {
  int64_t rows, size, count;

  explicit Blocks(int64_t rows)
      : rows(rows), size(std::max<int64_t>(32, (rows + 63) / 64)), count((rows + size - 1) / size) {}

  // Calls body(block, first row, last row + 1) for all blocks; threads take blocks. width: values of a row.
  template <class Body>
  void parallel(int64_t width, const Body& body) const {
    at::parallel_for(0, count, grain(width * size), [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block)
        body(block, block * size, std::min(rows, (block + 1) * size));
    });
  }
};

// Sum over dim 0 of partial [count, n] float32, in order. Threads take columns.
inline void sum_blocks(const Tensor& partial, float* total) {
  const int64_t count = partial.size(0), n = count ? partial.numel() / count : 0;
  at::parallel_for(0, n, grain(count), [&](int64_t begin, int64_t end) {
    COGFAST_RUN(sum_blocks, pointer<float>(partial), count, n, total, begin, end);
  });
}

}  // namespace cogfast
