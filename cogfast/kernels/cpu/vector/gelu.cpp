// gelu of a linear's product and its bias, in one pass. kernels/gelu.py has the formulas.

#include "kernels.h"
#include "rows.h"

namespace cogfast::CPU_CAPABILITY {
namespace {

constexpr float LINEAR = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float CUBIC = 0.044715f * LINEAR;

// sigmoid(z) with z = u (LINEAR + CUBIC u^2), given the square of u.
inline Vec sigmoid_of(Vec u, Vec square) {
  const Vec z = u * at::vec::fmadd(Vec(CUBIC), square, Vec(LINEAR));
  return Vec(1.f) / (Vec(1.f) + exp(z.neg()));
}

}  // namespace

template <class T>
void gelu(const T* x, const T* bias, T* y, int64_t n, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    for_each_vector(n, [&](int64_t i, auto count) {
      Vec u = load(x + row * n + i, count);
      if (bias) u = u + load(bias + i, count);
      store(y + row * n + i, u * sigmoid_of(u, u * u), count);
    });
  }
}

template <class T>
void gelu_backward(
    const T* dy, const T* x, const T* bias, T* dx, float* dbias, int64_t n, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    for_each_vector(n, [&](int64_t i, auto count) {
      Vec u = load(x + row * n + i, count);
      if (bias) u = u + load(bias + i, count);
      // Beyond |u| = 100 s is 0 or 1 in any case; the bound keeps dz/du finite there.
      const Vec square = at::vec::clamp_max(u * u, Vec(1e4f));
      const Vec s = sigmoid_of(u, square);
      const Vec slope = at::vec::fmadd(Vec(3 * CUBIC), square, Vec(LINEAR));  // dz/du
      const Vec d = load(dy + row * n + i, count) * at::vec::fmadd(u * (s - s * s), slope, s);
      store(dx + row * n + i, d, count);
      if (dbias) add_to(dbias + i, d, count);
    });
  }
}

template void gelu(const float*, const float*, float*, int64_t, int64_t, int64_t);
template void gelu(const at::BFloat16*, const at::BFloat16*, at::BFloat16*, int64_t, int64_t, int64_t);
template void gelu_backward(
    const float*, const float*, const float*, float*, float*, int64_t, int64_t, int64_t);
template void gelu_backward(
    const at::BFloat16*, const at::BFloat16*, const at::BFloat16*, at::BFloat16*, float*, int64_t, int64_t,
    int64_t);

}  // namespace cogfast::CPU_CAPABILITY
