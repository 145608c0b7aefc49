// LayerNorm of query and key heads and their rotation. kernels/qk_norm_rope3d.py has the formulas.

#include <cmath>

#include "kernels.h"
#include "rows.h"

namespace cogfast::CPU_CAPABILITY {
namespace {

using at::vec::fmadd;
using at::vec::fnmadd;

// Swaps the entries of every pair.
inline Vec swap_neighbours(Vec value) {
#ifdef CPU_CAPABILITY_AVX512
  return _mm512_permute_ps(value, 0xB1);
#else
  return _mm256_permute_ps(value, 0xB1);
#endif
}

// Calls body(width, has_norm). The compiler knows has_norm, and the head width if it is 64.
template <class Body>
inline void specialise(const QkNormRope3d& op, const Body& body) {
  const auto with_norm = [&](auto width) {
    if (op.has_norm) return body(width, std::true_type{});
    body(width, std::false_type{});
  };
  if (op.width == 64) return with_norm(std::integral_constant<int64_t, 64>{});
  with_norm(op.width);
}

// Copies cosines and sines of a token into angles [2, D]; returns false if the token is not rotated.
inline bool find_angles(const QkNormRope3d& op, int64_t width, int64_t token, float* angles) {
  const int64_t video = token - op.num_text;
  if (!op.angles || video < 0) return false;
  const int64_t time = width / 4, space = width / 8 * 3;  // entries rotated by time, and by row or column
  const int64_t columns = op.t * time + op.h * space, size = columns + op.w * space;
  const float* table = op.angles;
  for (int i = 0; i < 2; ++i, table += size, angles += width) {
    std::memcpy(angles, table + video / (op.h * op.w) * time, time * sizeof(float));
    const float* row = table + op.t * time + video / op.w % op.h * space;
    std::memcpy(angles + time, row, space * sizeof(float));
    std::memcpy(angles + time + space, table + columns + video % op.w * space, space * sizeof(float));
  }
  return true;
}

// Computes mean and 1 / sqrt(variance + eps) of x [width].
template <class T>
inline void find_moments(const T* x, int64_t width, float eps, float& mean, float& rstd) {
  Vec total(0.f), squares(0.f);
  for_each_vector(width, [&](int64_t i, auto count) { total = total + load(x + i, count); });
  mean = sum(total) / width;
  for_each_vector(width, [&](int64_t i, auto count) {
    const Vec centred = keep(load(x + i, count) - Vec(mean), count);
    squares = fmadd(centred, centred, squares);
  });
  rstd = 1 / std::sqrt(sum(squares) / width + eps);
}

}  // namespace

template <class T>
void qk_norm_rope3d(
    const QkNormRope3d& op, const Heads<T>* inputs, T* const* outputs, float* angles, int64_t begin, int64_t end) {
  specialise(op, [&](auto width, auto has_norm) {
    const float *cos = angles, *sin = angles + width;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t sample = row / op.num_tokens, token = row % op.num_tokens;
      const auto write = [&](auto is_rotated) {
        for (int part = 0; part < 2; ++part) {
          const auto [weight, bias] = op.norm[part];
          const auto [data, stride_b, stride_s, stride_h] = inputs[part];
          const T* x = data + sample * stride_b + token * stride_s;
          T* y = outputs[part] + row * op.num_heads * width;
          for (int64_t head = 0; head < op.num_heads; ++head, x += stride_h, y += width) {
            float mean = 0, rstd = 1;
            if (has_norm) find_moments(x, width, op.eps, mean, rstd);
            for_each_vector(width, [&](int64_t i, auto count) {
              Vec value = load(x + i, count);
              if (has_norm)
                value = fmadd((value - Vec(mean)) * Vec(rstd), load(weight + i, count), load(bias + i, count));
              if (is_rotated)
                value = fmadd(value, load(cos + i, count), swap_neighbours(value) * load(sin + i, count));
              store(y + i, value, count);
            });
          }
        }
      };
      find_angles(op, width, token, angles) ? write(std::true_type{}) : write(std::false_type{});
    }
  });
}

template <class T>
void qk_norm_rope3d_backward(
    const QkNormRope3d& op, const Heads<T>* gradients, const Heads<T>* inputs, T* dqkv, float* sums,
    float* angles, int64_t begin, int64_t end) {
  specialise(op, [&](auto width, auto has_norm) {
    const float *cos = angles, *sin = angles + width;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t sample = row / op.num_tokens, token = row % op.num_tokens;
      T* dx = dqkv + row * 3 * op.num_heads * width;
      const auto write = [&](auto is_rotated) {
        for (int part = 0; part < 2; ++part) {
          const float* weight = op.norm[part].weight;
          const auto [d_data, d_stride_b, d_stride_s, d_stride_h] = gradients[part];
          const auto [x_data, x_stride_b, x_stride_s, x_stride_h] = inputs[part];
          const T* d = d_data + sample * d_stride_b + token * d_stride_s;
          const T* x = x_data + sample * x_stride_b + token * x_stride_s;
          float *dweight = sums + 2 * part * width, *dbias = dweight + width;
          for (int64_t head = 0; head < op.num_heads; ++head) {
            // The gradient of n: the inverse rotation is by the negative angle.
            const auto normed_gradient = [&](int64_t i, auto count) {
              const Vec g = load(d + i, count);
              if (!is_rotated) return g;
              return fnmadd(swap_neighbours(g), load(sin + i, count), g * load(cos + i, count));
            };
            if (has_norm) {
              float mean, rstd;
              find_moments(x, width, op.eps, mean, rstd);
              Vec total(0.f), product(0.f);
              for_each_vector(width, [&](int64_t i, auto count) {
                const Vec g = normed_gradient(i, count) * load(weight + i, count);
                total = total + g;
                product = fmadd(g, (load(x + i, count) - Vec(mean)) * Vec(rstd), product);
              });
              const Vec mean_g(sum(total) / width), mean_product(sum(product) / width);
              for_each_vector(width, [&](int64_t i, auto count) {
                const Vec g = normed_gradient(i, count);
                const Vec xhat = (load(x + i, count) - Vec(mean)) * Vec(rstd);
                const Vec centred = g * load(weight + i, count) - mean_g;
                store(dx + i, Vec(rstd) * fnmadd(xhat, mean_product, centred), count);
                if (!sums) return;
                add_to(dweight + i, g * xhat, count);
                add_to(dbias + i, g, count);
              });
            } else {
              for_each_vector(
                  width, [&](int64_t i, auto count) { store(dx + i, normed_gradient(i, count), count); });
            }
            d += d_stride_h, x += x_stride_h, dx += width;
          }
        }
      };
      find_angles(op, width, token, angles) ? write(std::true_type{}) : write(std::false_type{});
      const auto [data, stride_b, stride_s, stride_h] = gradients[2];
      const T* dv = data + sample * stride_b + token * stride_s;
      for (int64_t head = 0; head < op.num_heads; ++head, dv += stride_h, dx += width)
        std::memcpy(dx, dv, width * sizeof(T));
    }
  });
}

template void qk_norm_rope3d(const QkNormRope3d&, const Heads<float>*, float* const*, float*, int64_t, int64_t);
template void qk_norm_rope3d(
    const QkNormRope3d&, const Heads<at::BFloat16>*, at::BFloat16* const*, float*, int64_t, int64_t);
template void qk_norm_rope3d_backward(
    const QkNormRope3d&, const Heads<float>*, const Heads<float>*, float*, float*, float*, int64_t, int64_t);
template void qk_norm_rope3d_backward(
    const QkNormRope3d&, const Heads<at::BFloat16>*, const Heads<at::BFloat16>*, at::BFloat16*, float*, float*,
    int64_t, int64_t);

}  // namespace cogfast::CPU_CAPABILITY
