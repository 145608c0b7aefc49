// Tensor level of adaptive_layernorm; kernels/adaptive_layernorm.py has the formulas.

#pragma once

#include <array>
#include <vector>

#include "ops.h"

namespace cogfast {

// Returns weight (1 + scale) and, given a shift, bias (1 + scale) + shift: [B, 2, M] float32.
inline std::tuple<Tensor, Tensor> modulation_of(
    const Tensor& weight, const Tensor& bias, const Tensor& shift, const Tensor& scale) {
  const int64_t M = scale.size(-1), total = scale.numel();
  Tensor factor = at::empty_like(scale), summand = shift.defined() ? at::empty_like(scale) : Tensor();
  const float *s = pointer<float>(scale), *t = pointer<float>(shift);
  const float *w = pointer<float>(weight), *b = pointer<float>(bias);
  float *f = pointer<float>(factor), *c = pointer<float>(summand);
  for (int64_t first = 0; first < total; first += M) {
    for (int64_t i = 0; i < M; ++i) {
      const float one_plus = 1.f + s[first + i];
      f[first + i] = w ? w[i] * one_plus : one_plus;
      if (c) c[first + i] = b ? b[i] * one_plus + t[first + i] : t[first + i];
    }
  }
  return {factor, summand};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> adaptive_layernorm(
    const Tensor& hidden_, const OptionalTensor& branch_, const OptionalTensor& branch_bias_,
    const OptionalTensor& gate_, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& shift, const OptionalTensor& scale, int64_t num_text, double eps) {
  const Tensor hidden = hidden_.contiguous(), branch = contiguous(branch_);
  const Tensor branch_bias = contiguous_float(branch_bias_), gate = contiguous_float(gate_);
  const int64_t B = hidden.size(0), S = hidden.size(1), M = hidden.size(2);
  const bool has_norm = scale.has_value();
  Tensor factor, summand;
  if (has_norm)
    std::tie(factor, summand) = modulation_of(
        contiguous_float(weight), contiguous_float(bias), contiguous_float(shift), contiguous_float(scale));
  // An op cannot return None: an output that is not computed has shape [0].
  Tensor out = branch.defined() ? at::empty_like(hidden) : at::empty({0}, hidden.options());
  Tensor n = has_norm ? at::empty_like(hidden) : at::empty({0}, hidden.options());
  Tensor mean = has_norm ? empty_float({B, S}) : empty_float({0});
  Tensor rstd = has_norm ? empty_float({B, S}) : empty_float({0});
  for_dtype(hidden, [&](auto zero) {
    using T = decltype(zero);
    auto run = [&](auto arguments) {
      arguments.S = S, arguments.M = M, arguments.num_text = num_text, arguments.eps = eps;
      arguments.hidden = pointer<T>(hidden), arguments.branch = pointer<T>(branch);
      arguments.branch_bias = pointer<float>(branch_bias), arguments.gate = pointer<float>(gate);
      arguments.factor = pointer<float>(factor), arguments.summand = pointer<float>(summand);
      arguments.out = pointer<T>(out), arguments.n = pointer<T>(n);
      arguments.mean = pointer<float>(mean), arguments.rstd = pointer<float>(rstd);
      at::parallel_for(0, B * S, grain(M), [&](int64_t begin, int64_t end) {
        adaptive_layernorm(arguments, begin, end);
      });
    };
    run(COGFAST_CPU::NormForward<T>{});
  });
  return {out, n, mean, rstd};
}

// Rows [begin, end) of the whole tensor, all of them text (1) or video (0) of one sample.
struct SegmentBlock {
  int64_t sample, segment, begin, end;
};

// As Blocks, but no block has rows of two samples, or of text and video.
inline std::vector<SegmentBlock> segment_blocks(int64_t B, int64_t S, int64_t num_text) {
  const int64_t size = Blocks(B * S).size;
  std::vector<SegmentBlock> blocks;
  for (int64_t sample = 0; sample < B; ++sample) {
    for (int64_t segment : {1, 0}) {
      const int64_t first = sample * S + (segment ? 0 : num_text);
      const int64_t last = sample * S + (segment ? num_text : S);
      for (int64_t begin = first; begin < last; begin += size)
        blocks.push_back({sample, segment, begin, std::min(last, begin + size)});
    }
  }
  return blocks;
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> adaptive_layernorm_backward(
    const OptionalTensor& dn_, const OptionalTensor& dout_, const OptionalTensor& out_,
    const OptionalTensor& mean_, const OptionalTensor& rstd_, const OptionalTensor& weight_,
    const OptionalTensor& bias_, const OptionalTensor& scale_, const OptionalTensor& branch_,
    const OptionalTensor& branch_bias_, const OptionalTensor& gate_, int64_t num_text, bool has_norm_sums,
    bool has_branch_sum) {
  const Tensor dn = contiguous(dn_), dout = contiguous(dout_), out = contiguous(out_);
  const Tensor mean = contiguous_float(mean_), rstd = contiguous_float(rstd_);
  const Tensor weight = contiguous_float(weight_), bias = contiguous_float(bias_);
  const Tensor scale = contiguous_float(scale_), branch = contiguous(branch_);
  const Tensor branch_bias = contiguous_float(branch_bias_), gate = contiguous_float(gate_);
  const Tensor rows = dn.defined() ? dn : dout;
  const int64_t B = rows.size(0), S = rows.size(1), M = rows.size(2);
  const bool has_norm = dn.defined(), has_residual = gate.defined(), has_gate_sum = branch.defined();
  Tensor factor;
  if (has_norm) factor = std::get<0>(modulation_of(weight, bias, Tensor(), scale));
  Tensor dhidden = has_norm ? at::empty_like(rows) : at::empty({0}, rows.options());
  Tensor dbranch = has_residual ? at::empty_like(rows) : at::empty({0}, rows.options());

  const auto blocks = segment_blocks(B, S, num_text);
  const int64_t count = blocks.size();
  const bool has_sums = has_norm_sums || has_branch_sum || has_gate_sum;
  Tensor partial = has_sums ? at::zeros({count, 4, M}, at::kFloat) : Tensor();
  for_dtype(rows, [&](auto zero) {
    using T = decltype(zero);
    auto run = [&](auto arguments) {
      arguments.M = M, arguments.dn = pointer<T>(dn), arguments.dout = pointer<T>(dout);
      arguments.out = pointer<T>(out), arguments.branch = pointer<T>(branch);
      arguments.mean = pointer<float>(mean), arguments.rstd = pointer<float>(rstd);
      arguments.dhidden = has_norm ? pointer<T>(dhidden) : nullptr;
      arguments.dbranch = has_residual ? pointer<T>(dbranch) : nullptr;
      at::parallel_for(0, count, grain(M * Blocks(B * S).size), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          const SegmentBlock& block = blocks[i];
          const int64_t vectors = (block.sample * 2 + block.segment) * M;
          adaptive_layernorm_backward(
              arguments, has_norm ? pointer<float>(factor) + vectors : nullptr,
              has_residual ? pointer<float>(gate) + vectors : nullptr, has_norm_sums, has_branch_sum,
              has_sums ? pointer<float>(partial) + i * 4 * M : nullptr, block.begin, block.end);
        }
      });
    };
    run(COGFAST_CPU::NormBackward<T>{});
  });

  auto vector = [](bool is_needed, const Tensor& like) { return is_needed ? at::zeros_like(like) : Tensor(); };
  Tensor dgate = vector(has_gate_sum, gate), dbranch_bias = vector(has_branch_sum, branch_bias);
  const bool has_affine_sums = has_norm_sums && weight.defined();
  Tensor dweight = vector(has_affine_sums, weight), dbias = vector(has_affine_sums, bias);
  Tensor dshift = vector(has_norm_sums, scale), dscale = vector(has_norm_sums, scale);
  if (has_sums) {
    const float *w = pointer<float>(weight), *b = pointer<float>(bias), *s = pointer<float>(scale);
    const float *g = pointer<float>(gate), *y_bias = pointer<float>(branch_bias);
    float *to_gate = pointer<float>(dgate), *to_branch_bias = pointer<float>(dbranch_bias);
    float *to_weight = pointer<float>(dweight), *to_bias = pointer<float>(dbias);
    float *to_shift = pointer<float>(dshift), *to_scale = pointer<float>(dscale);
    // Every block adds what is linear in its sums, in the order of the blocks; threads take columns.
    at::parallel_for(0, M, grain(4 * count), [&](int64_t begin, int64_t end) {
      for (int64_t block = 0; block < count; ++block) {
        const int64_t vectors = (blocks[block].sample * 2 + blocks[block].segment) * M;
        const float *A = pointer<float>(partial) + block * 4 * M, *B = A + M, *G = B + M, *C = G + M;
        for (int64_t i = begin; has_norm_sums && i < end; ++i) {
          to_shift[vectors + i] += B[i];
          to_scale[vectors + i] += w ? w[i] * A[i] + b[i] * B[i] : A[i];
        }
        for (int64_t i = begin; has_affine_sums && i < end; ++i) {
          to_weight[i] += (1.f + s[vectors + i]) * A[i];
          to_bias[i] += (1.f + s[vectors + i]) * B[i];
        }
        for (int64_t i = begin; has_gate_sum && i < end; ++i)
          to_gate[vectors + i] += has_branch_sum ? G[i] + y_bias[i] * C[i] : G[i];
        for (int64_t i = begin; has_branch_sum && i < end; ++i)
          to_branch_bias[i] += g[vectors + i] * C[i];
      }
    });
  }
  // An op cannot return None: a gradient that is not computed has shape [0].
  auto as = [&](const Tensor& x, const OptionalTensor& like) {
    return x.defined() ? x.to(like->scalar_type()) : at::empty({0}, rows.options());
  };
  return {dhidden,         dbranch,          as(dbranch_bias, branch_bias_), as(dgate, gate_), as(dweight, weight_),
          as(dbias, bias_), as(dshift, scale_), as(dscale, scale_)};
}

}  // namespace cogfast
