// Gated residual, LayerNorm and modulation, one row after another; a row stays in the first-level cache.
// kernels/adaptive_layernorm.py has the formulas.

#include <cmath>
#include <vector>

#include "kernels.h"
#include "rows.h"

namespace cogfast::CPU_CAPABILITY {

using at::vec::fmadd;

template <class T>
void adaptive_layernorm(const NormForward<T>& x, int64_t begin, int64_t end) {
  const int64_t M = x.M;
  std::vector<float> row_buffer(M);
  float* h = row_buffer.data();
  for (int64_t row = begin; row < end; ++row) {
    const int64_t vectors = (row / x.S * 2 + (row % x.S < x.num_text)) * M;
    const T* hidden = x.hidden + row * M;
    Vec total(0.f);
    if (x.branch) {
      const T* branch = x.branch + row * M;
      const float* gate = x.gate + vectors;
      T* out = x.out + row * M;
      for_each_vector(M, [&](int64_t i, auto count) {
        Vec y = load(branch + i, count);
        if (x.branch_bias) y = y + load(x.branch_bias + i, count);
        store(out + i, fmadd(load(gate + i, count), y, load(hidden + i, count)), count);
        // Norm what was rounded, since backward reads that.
        const Vec value = load(out + i, count);
        store(h + i, value, count);
        total = total + value;
      });
    } else {
      for_each_vector(M, [&](int64_t i, auto count) {
        const Vec value = load(hidden + i, count);
        store(h + i, value, count);
        total = total + value;
      });
    }
    if (!x.factor) continue;
    const float mean = sum(total) / M;
    Vec squares(0.f);
    for_each_vector(M, [&](int64_t i, auto count) {
      const Vec centred = keep(load(h + i, count) - Vec(mean), count);
      squares = fmadd(centred, centred, squares);
    });
    const float rstd = 1.f / std::sqrt(sum(squares) / M + x.eps);
    const float *factor = x.factor + vectors, *summand = x.summand + vectors;
    T* n = x.n + row * M;
    for_each_vector(M, [&](int64_t i, auto count) {
      const Vec xhat = (load(h + i, count) - Vec(mean)) * Vec(rstd);
      store(n + i, fmadd(xhat, load(factor + i, count), load(summand + i, count)), count);
    });
    x.mean[row] = mean;
    x.rstd[row] = rstd;
  }
}

namespace {

// Computes dh and what follows from it for one vector of a row.
template <bool HAS_GATE_SUM, bool HAS_BRANCH_SUM, class T, class Count>
inline void residual_backward(
    const NormBackward<T>& x, Vec dh, const float* gate, float* sums, int64_t at, int64_t i, Count count) {
  store(x.dbranch + at + i, dh * load(gate + i, count), count);
  if constexpr (HAS_GATE_SUM) {
    float* g = sums + 2 * x.M + i;
    store(g, fmadd(dh, load(x.branch + at + i, count), load(g, count)), count);
  }
  if constexpr (HAS_BRANCH_SUM) add_to(sums + 3 * x.M + i, dh, count);
}

template <bool HAS_NORM_SUMS, bool HAS_RESIDUAL, bool HAS_GATE_SUM, bool HAS_BRANCH_SUM, class T>
void backward_rows(
    const NormBackward<T>& x, const float* factor, const float* gate, float* sums, int64_t begin, int64_t end) {
  const int64_t M = x.M;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * M;
    if (!x.dn) {
      for_each_vector(M, [&](int64_t i, auto count) {
        const Vec dh = load(x.dout + at + i, count);
        if constexpr (HAS_RESIDUAL)
          residual_backward<HAS_GATE_SUM, HAS_BRANCH_SUM>(x, dh, gate, sums, at, i, count);
      });
      continue;
    }
    const Vec mean(x.mean[row]), rstd(x.rstd[row]);
    Vec dx_total(0.f), product_total(0.f);
    for_each_vector(M, [&](int64_t i, auto count) {
      const Vec dn = load(x.dn + at + i, count);
      const Vec xhat = (load(x.out + at + i, count) - mean) * rstd;
      const Vec dx = dn * load(factor + i, count);  // 0 beyond the row's end
      dx_total = dx_total + dx;
      product_total = fmadd(dx, xhat, product_total);
      if constexpr (HAS_NORM_SUMS) {
        store(sums + i, fmadd(dn, xhat, load(sums + i, count)), count);
        add_to(sums + M + i, dn, count);
      }
    });
    const Vec dx_mean(sum(dx_total) / M), product_mean(sum(product_total) / M);
    for_each_vector(M, [&](int64_t i, auto count) {
      const Vec xhat = (load(x.out + at + i, count) - mean) * rstd;
      const Vec dx = load(x.dn + at + i, count) * load(factor + i, count);
      Vec dh = rstd * (dx - fmadd(xhat, product_mean, dx_mean));
      if (x.dout) dh = dh + load(x.dout + at + i, count);
      store(x.dhidden + at + i, dh, count);
      if constexpr (HAS_RESIDUAL)
        residual_backward<HAS_GATE_SUM, HAS_BRANCH_SUM>(x, dh, gate, sums, at, i, count);
    });
  }
}

// Calls body with `flag` as a type whose value the compiler knows.
template <class Body>
void with_constant(bool flag, const Body& body) {
  if (flag)
    body(std::true_type{});
  else
    body(std::false_type{});
}

}  // namespace

template <class T>
void adaptive_layernorm_backward(
    const NormBackward<T>& x, const float* factor, const float* gate, bool has_norm_sums, bool has_branch_sum,
    float* sums, int64_t begin, int64_t end) {
  with_constant(has_norm_sums, [&](auto norm_sums) {
    if (!x.dbranch)
      return backward_rows<norm_sums, false, false, false>(x, factor, gate, sums, begin, end);
    with_constant(x.branch != nullptr, [&](auto gate_sum) {
      with_constant(has_branch_sum, [&](auto branch_sum) {
        backward_rows<norm_sums, true, gate_sum, branch_sum>(x, factor, gate, sums, begin, end);
      });
    });
  });
}

template void adaptive_layernorm(const NormForward<float>&, int64_t, int64_t);
template void adaptive_layernorm(const NormForward<at::BFloat16>&, int64_t, int64_t);
template void adaptive_layernorm_backward(
    const NormBackward<float>&, const float*, const float*, bool, bool, float*, int64_t, int64_t);
template void adaptive_layernorm_backward(
    const NormBackward<at::BFloat16>&, const float*, const float*, bool, bool, float*, int64_t, int64_t);

}  // namespace cogfast::CPU_CAPABILITY
