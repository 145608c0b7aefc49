// Tensor level of attention; kernels/attention_backends.py has the formulas.

#pragma once

#include <cmath>

#include "ops.h"
#include "qk_norm_rope3d.h"

namespace cogfast {

inline Tensor with_dense_rows(const Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

template <class T>
auto attention_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse) {
  const float scale = 1 / std::sqrt(static_cast<float>(q.size(3)));
  const bool multiplies_bfloat16 = !std::is_same_v<T, float> && COGFAST_CPU::multiplies_bfloat16();
  return COGFAST_CPU::Attention<T>{
      q.size(1), q.size(2), q.size(3), scale, multiplies_bfloat16,
      heads<T>(q), heads<T>(k), heads<T>(v), pointer<T>(out), pointer<float>(lse)};
}

inline std::tuple<Tensor, Tensor> attention(const Tensor& q_, const Tensor& k_, const Tensor& v_) {
  const Tensor q = with_dense_rows(q_), k = with_dense_rows(k_), v = with_dense_rows(v_);
  Tensor out = at::empty(q.sizes(), q.options()), lse = empty_float({q.size(0), q.size(2), q.size(1)});
  for_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    const auto x = attention_of<T>(q, k, v, out, lse);
    const int64_t blocks = COGFAST_CPU::attention_blocks(q.size(1), x.multiplies_bfloat16);
    at::parallel_for(0, q.size(0) * q.size(2) * blocks, 1, [&](int64_t begin, int64_t end) {
      COGFAST_RUN(attention, x, begin, end);
    });
  });
  return {out, lse};
}

inline std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout_, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& out, const Tensor& lse) {
  const Tensor q = with_dense_rows(q_), k = with_dense_rows(k_), v = with_dense_rows(v_), dout = with_dense_rows(dout_);
  Tensor dq = at::empty(q.sizes(), q.options()), dk = at::empty_like(dq), dv = at::empty_like(dq);
  for_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    const auto forward = attention_of<T>(q, k, v, out, lse);
    const COGFAST_CPU::AttentionBackward<T> x{forward, heads<T>(dout), pointer<T>(dq), pointer<T>(dk), pointer<T>(dv)};
    at::parallel_for(0, q.size(0) * q.size(2), 1, [&](int64_t begin, int64_t end) {
      COGFAST_RUN(attention_backward, x, begin, end);
    });
  });
  return {dq, dk, dv};
}

}  // namespace cogfast
