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

// Place of a row of [B, S]: its sample, its token, and the frame, row and column of a video token.
struct Place {
  int64_t sample, token, frame, row, column;

  Place(const QkNormRope3d& op, int64_t index) : sample(index / op.num_tokens), token(index % op.num_tokens) {
    find(op);
  }

  void find(const QkNormRope3d& op) {
    int64_t video = std::max<int64_t>(token - op.num_text, 0);
    if (op.order && token >= op.num_text) video = op.order[video];
    frame = video / (op.h * op.w), row = video / op.w % op.h, column = video % op.w;
  }

  // Goes to the next row. Divisions would take a fourth of the time of a row with four heads.
  void advance(const QkNormRope3d& op) {
    if (++token == op.num_tokens) {
      ++sample;
      token = frame = row = column = 0;
      if (op.order) find(op);  // without text the first row is a video token
    } else if (op.order) {
      find(op);
    } else if (token > op.num_text && ++column == op.w) {
      column = 0;
      if (++row == op.h) row = 0, ++frame;
    }
  }
};

// Copies cosines and sines of a token into angles [2, D]; returns false if the token is not rotated.
inline bool find_angles(const QkNormRope3d& op, int64_t width, const Place& place, float* angles) {
  if (!op.angles || place.token < op.num_text) return false;
  const int64_t time = width / 4, space = width / 8 * 3;  // entries rotated by time, and by row or column
  const int64_t rows = op.t * time, columns = rows + op.h * space, size = columns + op.w * space;
  const float* table = op.angles;
  for (int i = 0; i < 2; ++i, table += size, angles += width) {
    std::memcpy(angles, table + place.frame * time, time * sizeof(float));
    std::memcpy(angles + time, table + rows + place.row * space, space * sizeof(float));
    std::memcpy(angles + time + space, table + columns + place.column * space, space * sizeof(float));
  }
  return true;
}

// The first head of a token.
template <class T>
inline const T* head_of(const Heads<T>& x, const Place& place) {
  return x.data + place.sample * x.stride_b + place.token * x.stride_s;
}

// Asks for x [width] before it is read: heads of one token may be far apart.
template <class T>
inline void prefetch(const T* x, int64_t width) {
  for (int64_t i = 0; i < width; i += 64 / sizeof(T)) __builtin_prefetch(x + i);
}

// Calls body(n) for groups of n heads: n is N while that many are left, and 1 at the end. The sums over a head
// are chains of dependent instructions; those of several heads overlap.
template <int N, class Body>
inline void for_each_group(int64_t num_heads, const Body& body) {
  int64_t head = 0;
  for (; head + N <= num_heads; head += N) body(std::integral_constant<int, N>{});
  for (; head < num_heads; ++head) body(std::integral_constant<int, 1>{});
}

// Computes mean and 1 / sqrt(variance + eps) of N heads x [width].
template <int N, class T>
inline void find_moments(
    const T* x, int64_t stride, int64_t width, float eps, float (&mean)[N], float (&rstd)[N]) {
  Vec total[N], squares[N];
  for (int j = 0; j < N; ++j) total[j] = squares[j] = Vec(0.f);
  for_each_vector(width, [&](int64_t i, auto count) {
    for (int j = 0; j < N; ++j) total[j] = total[j] + load(x + j * stride + i, count);
  });
  for (int j = 0; j < N; ++j) mean[j] = sum(total[j]) / width;
  for_each_vector(width, [&](int64_t i, auto count) {
    for (int j = 0; j < N; ++j) {
      const Vec centred = keep(load(x + j * stride + i, count) - Vec(mean[j]), count);
      squares[j] = fmadd(centred, centred, squares[j]);
    }
  });
  // A loop of its own, so that the compiler makes one division and one root of N.
  for (int j = 0; j < N; ++j) rstd[j] = sum(squares[j]) / width + eps;
  for (int j = 0; j < N; ++j) rstd[j] = 1 / std::sqrt(rstd[j]);
}

}  // namespace

template <class T>
void qk_norm_rope3d(
    const QkNormRope3d& op, const Heads<T>* inputs, T* const* outputs, float* angles, int64_t begin, int64_t end) {
  specialise(op, [&](auto width, auto has_norm) {
    const float *cos = angles, *sin = angles + width;
    Place place(op, begin);
    for (int64_t row = begin; row < end; ++row, place.advance(op)) {
      const auto write = [&](auto is_rotated) {
        for (int part = 0; part < 2; ++part) {
          const float *weight = op.norm[part].weight, *bias = op.norm[part].bias;
          const int64_t stride = inputs[part].stride_h;
          const T* x = head_of(inputs[part], place);
          T* y = outputs[part] + row * op.num_heads * width;
          for_each_group<4>(op.num_heads, [&](auto size) {
            constexpr int N = decltype(size)::value;
            float mean[N], rstd[N];
            if (has_norm) find_moments<N>(x, stride, width, op.eps, mean, rstd);
            for (int j = 0; j < N; ++j, x += stride, y += width) {
              for_each_vector(width, [&](int64_t i, auto count) {
                Vec n = load(x + i, count);
                if (has_norm)
                  n = fmadd((n - Vec(mean[j])) * Vec(rstd[j]), load(weight + i, count), load(bias + i, count));
                if (is_rotated) n = fmadd(n, load(cos + i, count), swap_neighbours(n) * load(sin + i, count));
                store(y + i, n, count);
              });
            }
          });
        }
      };
      find_angles(op, width, place, angles) ? write(std::true_type{}) : write(std::false_type{});
    }
  });
}

template <class T>
void qk_norm_rope3d_backward(
    const QkNormRope3d& op, const Heads<T>* gradients, const Heads<T>* inputs, T* dqkv, float* sums,
    float* angles, int64_t begin, int64_t end) {
  specialise(op, [&](auto width, auto has_norm) {
    const float *cos = angles, *sin = angles + width;
    Place place(op, begin);
    for (int64_t row = begin; row < end; ++row, place.advance(op)) {
      T* dx = dqkv + row * 3 * op.num_heads * width;
      const auto write = [&](auto is_rotated) {
        for (int part = 0; part < 2; ++part) {
          const float* weight = op.norm[part].weight;
          const int64_t d_stride = gradients[part].stride_h, x_stride = inputs[part].stride_h;
          const int64_t d_next = gradients[part].stride_s, x_next = inputs[part].stride_s;
          const T *d = head_of(gradients[part], place), *x = head_of(inputs[part], place);
          float *dweight = sums + 2 * part * width, *dbias = dweight + width;
          for_each_group<2>(op.num_heads, [&](auto size) {
            constexpr int N = decltype(size)::value;
            // The gradient of n: the inverse rotation is by the negative angle.
            const auto normed_gradient = [&](int j, int64_t i, auto count) {
              const Vec g = load(d + j * d_stride + i, count);
              if (!is_rotated) return g;
              return fnmadd(swap_neighbours(g), load(sin + i, count), g * load(cos + i, count));
            };
            for (int j = 0; j < N; ++j) {
              prefetch(d + j * d_stride + d_next, width);
              prefetch(x + j * x_stride + x_next, width);
            }
            if (has_norm) {
              float mean[N], rstd[N], mean_g[N], mean_product[N];
              find_moments<N>(x, x_stride, width, op.eps, mean, rstd);
              const auto xhat = [&](int j, int64_t i, auto count) {
                return (load(x + j * x_stride + i, count) - Vec(mean[j])) * Vec(rstd[j]);
              };
              Vec total[N], product[N];
              for (int j = 0; j < N; ++j) total[j] = product[j] = Vec(0.f);
              for_each_vector(width, [&](int64_t i, auto count) {
                for (int j = 0; j < N; ++j) {
                  const Vec g = normed_gradient(j, i, count) * load(weight + i, count);
                  total[j] = total[j] + g;
                  product[j] = fmadd(g, xhat(j, i, count), product[j]);
                }
              });
              for (int j = 0; j < N; ++j)
                mean_g[j] = sum(total[j]) / width, mean_product[j] = sum(product[j]) / width;
              for_each_vector(width, [&](int64_t i, auto count) {
                Vec dweight_i(0.f), dbias_i(0.f);
                for (int j = 0; j < N; ++j) {
                  const Vec g = normed_gradient(j, i, count), xhat_i = xhat(j, i, count);
                  const Vec centred = g * load(weight + i, count) - Vec(mean_g[j]);
                  const Vec value = Vec(rstd[j]) * fnmadd(xhat_i, Vec(mean_product[j]), centred);
                  store(dx + j * width + i, value, count);
                  dweight_i = fmadd(g, xhat_i, dweight_i);
                  dbias_i = dbias_i + g;
                }
                if (!sums) return;
                add_to(dweight + i, dweight_i, count);
                add_to(dbias + i, dbias_i, count);
              });
            } else {
              for_each_vector(width, [&](int64_t i, auto count) {
                for (int j = 0; j < N; ++j) store(dx + j * width + i, normed_gradient(j, i, count), count);
              });
            }
            d += N * d_stride, x += N * x_stride, dx += N * width;
          });
        }
      };
      find_angles(op, width, place, angles) ? write(std::true_type{}) : write(std::false_type{});
      const T* dv = head_of(gradients[2], place);
      for (int64_t head = 0; head < op.num_heads; ++head, dv += gradients[2].stride_h, dx += width) {
        prefetch(dv + gradients[2].stride_s, width);
        std::memcpy(dx, dv, width * sizeof(T));
      }
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
