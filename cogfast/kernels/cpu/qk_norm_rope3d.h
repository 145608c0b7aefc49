// Tensor level of qk_norm_rope3d; kernels/qk_norm_rope3d.py has the formulas.

#pragma once

#include <array>
#include <vector>

#include <ATen/ops/ones.h>

#include "ops.h"

namespace cogfast {

// Strides of x [B, S, H, D], whose last dim must be dense.
template <class T>
Heads<T> heads(const Tensor& x) {
  return {pointer<const T>(x), x.stride(0), x.stride(1), x.stride(2)};
}

// The arguments that the kernels share, with the tensors that they point into.
struct QkArguments {
  std::array<Tensor, 4> affine;  // weight and bias of q, then of k
  std::vector<float> angles;
  QkNormRope3d op;

  QkArguments(
      const Tensor& qkv, const std::array<OptionalTensor, 4>& parameters, const OptionalTensor& table,
      const OptionalTensor& order, int64_t num_text, int64_t t, int64_t h, int64_t w, bool has_norm, double eps) {
    const int64_t width = qkv.size(4);
    op = {qkv.size(1), qkv.size(3), width, has_norm, static_cast<float>(eps), {}, nullptr, num_text, t, h, w, nullptr};
    for (int i = 0; has_norm && i < 4; ++i) {
      const bool is_bias = i % 2;
      const Tensor& p = affine[i] =
          parameters[i] ? contiguous_float(parameters[i]) : is_bias ? at::zeros({width}) : at::ones({width});
      (is_bias ? op.norm[i / 2].bias : op.norm[i / 2].weight) = pointer<const float>(p);
    }
    if (!table) return;
    if (order) op.order = pointer<const int>(*order);
    const int64_t count = table->size(1);
    angles.resize(4 * count);
    const float* values = pointer<const float>(*table);
    for (int64_t i = 0; i < count; ++i) {
      const float cos = values[i], sin = values[count + i];
      angles[2 * i] = angles[2 * i + 1] = cos;
      angles[2 * (count + i)] = -sin;
      angles[2 * (count + i) + 1] = sin;
    }
    op.angles = angles.data();
  }
};

inline std::tuple<Tensor, Tensor> qk_norm_rope3d(
    const Tensor& qkv, const OptionalTensor& q_weight, const OptionalTensor& q_bias,
    const OptionalTensor& k_weight, const OptionalTensor& k_bias, const OptionalTensor& table,
    const OptionalTensor& order, int64_t num_text, int64_t t, int64_t h, int64_t w, bool has_norm, double eps) {
  const int64_t num_rows = qkv.size(0) * qkv.size(1), num_heads = qkv.size(3), width = qkv.size(4);
  Tensor q = at::empty({qkv.size(0), qkv.size(1), num_heads, width}, qkv.options()), k = at::empty_like(q);
  const QkArguments arguments(
      qkv, {q_weight, q_bias, k_weight, k_bias}, table, order, num_text, t, h, w, has_norm, eps);
  for_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    const Heads<T> inputs[] = {heads<T>(qkv.select(2, 0)), heads<T>(qkv.select(2, 1))};
    T* const outputs[] = {pointer<T>(q), pointer<T>(k)};
    at::parallel_for(0, num_rows, grain(2 * num_heads * width), [&](int64_t begin, int64_t end) {
      std::vector<float> angles(2 * width);
      COGFAST_RUN(qk_norm_rope3d, arguments.op, inputs, outputs, angles.data(), begin, end);
    });
  });
  return {q, k};
}

inline std::tuple<Tensor, Tensor> qk_norm_rope3d_backward(
    const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& qkv, const OptionalTensor& q_weight,
    const OptionalTensor& k_weight, const OptionalTensor& table, const OptionalTensor& order, int64_t num_text,
    int64_t t, int64_t h, int64_t w, bool has_norm, double eps, bool needs_sums) {
  const int64_t num_rows = qkv.size(0) * qkv.size(1), num_heads = qkv.size(3), width = qkv.size(4);
  Tensor dqkv = at::empty(qkv.sizes(), qkv.options());
  const QkArguments arguments(
      qkv, {q_weight, std::nullopt, k_weight, std::nullopt}, table, order, num_text, t, h, w, has_norm, eps);
  std::array<Tensor, 3> gradients = {dq, dk, dv};
  for (Tensor& x : gradients)
    if (x.stride(3) != 1) x = x.contiguous();
  const Blocks blocks(num_rows);
  Tensor partial = needs_sums ? at::zeros({blocks.count, 4 * width}, at::kFloat) : Tensor();
  for_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    const Heads<T> inputs[] = {heads<T>(qkv.select(2, 0)), heads<T>(qkv.select(2, 1))};
    const Heads<T> given[] = {heads<T>(gradients[0]), heads<T>(gradients[1]), heads<T>(gradients[2])};
    blocks.parallel(3 * num_heads * width, [&](int64_t block, int64_t begin, int64_t end) {
      float* sums = needs_sums ? pointer<float>(partial) + block * 4 * width : nullptr;
      std::vector<float> angles(2 * width);
      COGFAST_RUN(
          qk_norm_rope3d_backward, arguments.op, given, inputs, pointer<T>(dqkv), sums, angles.data(), begin, end);
    });
  });
  Tensor sums = at::zeros({needs_sums ? 4 : 0, width}, at::kFloat);
  if (needs_sums) sum_blocks(partial, pointer<float>(sums));
  return {dqkv, sums};
}

}  // namespace cogfast
