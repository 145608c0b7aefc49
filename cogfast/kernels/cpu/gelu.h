// Tensor level of gelu; kernels/gelu.py has the formulas.

#pragma once

#include "ops.h"

namespace cogfast {

inline Tensor gelu(const Tensor& x_, const OptionalTensor& bias_) {
  const Tensor x = x_.contiguous(), bias = contiguous(bias_);
  Tensor y = at::empty_like(x);
  const int64_t n = x.size(-1), rows = n ? x.numel() / n : 0;
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    at::parallel_for(0, rows, grain(n), [&](int64_t begin, int64_t end) {
      COGFAST_RUN(gelu, pointer<T>(x), pointer<T>(bias), pointer<T>(y), n, begin, end);
    });
  });
  return y;
}

inline std::tuple<Tensor, Tensor> gelu_backward(
    const Tensor& dy_, const Tensor& x_, const OptionalTensor& bias_, bool needs_dbias) {
  const Tensor dy = dy_.contiguous(), x = x_.contiguous(), bias = contiguous(bias_);
  Tensor dx = at::empty_like(x);
  const int64_t n = x.size(-1), rows = n ? x.numel() / n : 0;
  const Blocks blocks(rows);
  Tensor partial = needs_dbias ? at::zeros({blocks.count, n}, at::kFloat) : Tensor();
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    blocks.parallel(n, [&](int64_t block, int64_t begin, int64_t end) {
      float* sums = needs_dbias ? pointer<float>(partial) + block * n : nullptr;
      COGFAST_RUN(
          gelu_backward, pointer<T>(dy), pointer<T>(x), pointer<T>(bias), pointer<T>(dx), sums, n, begin, end);
    });
  });
  Tensor dbias = at::zeros({needs_dbias ? n : 0}, at::kFloat);  // no rows: no blocks to sum
  if (needs_dbias) sum_blocks(partial, pointer<float>(dbias));
  return {dx, dbias.to(x.scalar_type())};
}

}  // namespace cogfast
