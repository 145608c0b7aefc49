// Attention in blocks whose scores stay in the second-level cache. kernels/attention_backends.py has the formulas.
//
// Blocks are copied to float32 with rows and columns of zeros up to whole tiles, so that no product has a tail.

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "kernels.h"
#include "rows.h"

namespace cogfast::CPU_CAPABILITY {
namespace {

using at::vec::fmadd;

// A product is computed in tiles of TILE_ROWS x TILE_COLUMNS sums, which fill the vector registers.
constexpr int VECTORS = 2, TILE_COLUMNS = VECTORS * LANES, TILE_ROWS = LANES == 8 ? 6 : 12;
constexpr int64_t QUERIES = 96, KEYS_FORWARD = 192, KEYS_BACKWARD = 96;  // of a block; whole tiles

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;

Buffer allocate(int64_t n) {
  Buffer buffer(static_cast<float*>(std::aligned_alloc(64, round_up(n * sizeof(float), 64))));
  if (!buffer) throw std::bad_alloc();
  return buffer;
}

// c [TILE_ROWS, TILE_COLUMNS] = (ADDS: +=) the sum over k of a[m * a_row + k * a_step] b[k * b_row + n].
template <bool ADDS>
inline void multiply_tile(
    int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, float* c, int64_t c_row) {
  Vec sums[TILE_ROWS][VECTORS];
#pragma GCC unroll 16
  for (int m = 0; m < TILE_ROWS; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) sums[m][n] = ADDS ? Vec::loadu(c + m * c_row + n * LANES) : Vec(0.f);
  for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_row) {
    Vec columns[VECTORS];
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) columns[n] = Vec::loadu(b + n * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < TILE_ROWS; ++m) {
      const Vec value(a[m * a_row]);
#pragma GCC unroll 16
      for (int n = 0; n < VECTORS; ++n) sums[m][n] = fmadd(value, columns[n], sums[m][n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < TILE_ROWS; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) sums[m][n].store(c + m * c_row + n * LANES);
}

// A matrix as multiply reads it: the columns of a tile are `panel` numbers after those of the one before.
struct Columns {
  const float* data;
  int64_t row, panel;
};

// c [rows, columns] = (ADDS: +=) a b, for whole tiles.
template <bool ADDS>
void multiply(
    int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row, int64_t a_step, Columns b, float* c,
    int64_t c_row) {
  for (int64_t n = 0; n < columns; n += TILE_COLUMNS, b.data += b.panel)
    for (int64_t m = 0; m < rows; m += TILE_ROWS)
      multiply_tile<ADDS>(depth, a + m * a_row, a_row, a_step, b.data, b.row, c + m * c_row + n, c_row);
}

// to [padded_rows, padded_width] = factor times rows of a head, then zeros.
template <class T>
void copy_rows(
    const T* x, int64_t stride, int64_t rows, int64_t width, float factor, float* to, int64_t padded_rows,
    int64_t padded_width) {
  for (int64_t row = 0; row < padded_rows; ++row, to += padded_width) {
    std::fill_n(to, row < rows && width == padded_width ? 0 : padded_width, 0.f);
    if (row < rows)
      for_each_vector(width, [&](int64_t i, auto count) { store(to + i, load(x + row * stride + i, count) * Vec(factor), count); });
  }
}

// to, columns of the transpose of x [rows, width] in panels.
void transpose(const float* x, int64_t rows, int64_t width, float* to) {
  for (int64_t row = 0; row < rows; row += TILE_COLUMNS, to += width * TILE_COLUMNS)
    for (int64_t i = 0; i < width; ++i)
      for (int j = 0; j < TILE_COLUMNS; ++j) to[i * TILE_COLUMNS + j] = x[(row + j) * width + i];
}

template <class T>
const T* head_of(const Heads<T>& x, int64_t sample, int64_t head) {
  return x.data + sample * x.stride_b + head * x.stride_h;
}

float largest(const float* x, int64_t n) {
  Vec most = Vec::loadu(x);
  for (int64_t i = LANES; i < n; i += LANES) most = at::vec::maximum(most, Vec::loadu(x + i));
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, most);
}

}  // namespace

int64_t attention_blocks(int64_t num_tokens) { return (num_tokens + QUERIES - 1) / QUERIES; }

template <class T>
void attention(const Attention<T>& x, int64_t begin, int64_t end) {
  const int64_t S = x.num_tokens, D = x.width, width = round_up(D, TILE_COLUMNS);
  const int64_t blocks = attention_blocks(S), keys = round_up(S, TILE_COLUMNS);
  const Buffer k_buffer = allocate(keys * width), v_buffer = allocate(keys * width);
  const Buffer q_buffer = allocate(QUERIES * width), out_buffer = allocate(QUERIES * width);
  const Buffer score_buffer = allocate(QUERIES * KEYS_FORWARD), copy_buffer = allocate(KEYS_FORWARD * width);
  float *k = k_buffer.get(), *v = v_buffer.get(), *q = q_buffer.get(), *out = out_buffer.get();
  float *scores = score_buffer.get(), *copy = copy_buffer.get();
  int64_t packed = -1;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t head = task / blocks, sample = head / x.num_heads, h = head % x.num_heads;
    if (head != packed) {
      for (int64_t at = 0; at < keys; at += KEYS_FORWARD) {
        const int64_t rows = std::min(KEYS_FORWARD, S - at), padded = round_up(rows, TILE_COLUMNS);
        copy_rows(head_of(x.k, sample, h) + at * x.k.stride_s, x.k.stride_s, rows, D, 1.f, copy, padded, width);
        transpose(copy, padded, width, k + at * width);
        copy_rows(head_of(x.v, sample, h) + at * x.v.stride_s, x.v.stride_s, rows, D, 1.f, v + at * width, padded, width);
      }
      packed = head;
    }
    const int64_t first = task % blocks * QUERIES, rows = std::min(QUERIES, S - first);
    const int64_t padded = round_up(rows, TILE_ROWS);
    copy_rows(head_of(x.q, sample, h) + first * x.q.stride_s, x.q.stride_s, rows, D, x.scale, q, padded, width);
    std::fill_n(out, padded * width, 0.f);
    float most[QUERIES], total[QUERIES] = {};
    std::fill_n(most, QUERIES, -std::numeric_limits<float>::infinity());
    for (int64_t at = 0; at < S; at += KEYS_FORWARD) {
      const int64_t count = std::min(KEYS_FORWARD, S - at), columns = round_up(count, TILE_COLUMNS);
      multiply<false>(padded, columns, width, q, width, 1, {k + at * width, TILE_COLUMNS, width * TILE_COLUMNS}, scores, KEYS_FORWARD);
      for (int64_t row = 0; row < rows; ++row) {
        float* s = scores + row * KEYS_FORWARD;
        std::fill(s + count, s + columns, -std::numeric_limits<float>::infinity());
        const float old = most[row], now = std::max(old, largest(s, columns));
        Vec sums(0.f);
        for (int64_t i = 0; i < columns; i += LANES) {
          const Vec p = exp(Vec::loadu(s + i) - Vec(now));
          p.store(s + i);
          sums = sums + p;
        }
        const float kept = at > 0 ? std::exp(old - now) : 0.f;
        total[row] = total[row] * kept + sum(sums);
        most[row] = now;
        if (kept != 1.f)
          for (int64_t i = 0; i < width; i += LANES) (Vec::loadu(out + row * width + i) * Vec(kept)).store(out + row * width + i);
      }
      multiply<true>(padded, width, columns, scores, KEYS_FORWARD, 1, {v + at * width, width, TILE_COLUMNS}, out, width);
    }
    for (int64_t row = 0; row < rows; ++row) {
      T* to = x.out + ((sample * S + first + row) * x.num_heads + h) * D;
      for_each_vector(D, [&](int64_t i, auto count) { store(to + i, load(out + row * width + i, count) * Vec(1.f / total[row]), count); });
      x.lse[head * S + first + row] = most[row] + std::log(total[row]);
    }
  }
}

template <class T>
void attention_backward(const AttentionBackward<T>& x, int64_t begin, int64_t end) {
  const Attention<T>& f = x.forward;
  const int64_t S = f.num_tokens, D = f.width, width = round_up(D, TILE_COLUMNS), queries = round_up(S, TILE_ROWS);
  const Buffer q_buffer = allocate(queries * width), dout_buffer = allocate(queries * width), dq_buffer = allocate(queries * width);
  const Buffer row_buffer = allocate(2 * queries), block_buffer = allocate(5 * KEYS_BACKWARD * width);
  const Buffer score_buffer = allocate(2 * QUERIES * KEYS_BACKWARD);
  float *q = q_buffer.get(), *dout = dout_buffer.get(), *dq = dq_buffer.get(), *lse = row_buffer.get(), *delta = lse + queries;
  float *k = block_buffer.get(), *k_columns = k + KEYS_BACKWARD * width, *v_columns = k_columns + KEYS_BACKWARD * width;
  float *dk = v_columns + KEYS_BACKWARD * width, *dv = dk + KEYS_BACKWARD * width;
  float *p = score_buffer.get(), *ds = p + QUERIES * KEYS_BACKWARD;
  for (int64_t head = begin; head < end; ++head) {
    const int64_t sample = head / f.num_heads, h = head % f.num_heads;
    copy_rows(head_of(f.q, sample, h), f.q.stride_s, S, D, f.scale, q, queries, width);
    copy_rows(head_of(x.dout, sample, h), x.dout.stride_s, S, D, 1.f, dout, queries, width);
    std::fill_n(dq, queries * width, 0.f);
    std::fill_n(lse, 2 * queries, 0.f);
    std::copy_n(f.lse + head * S, S, lse);
    for (int64_t row = 0; row < S; ++row) {
      const T* out = f.out + ((sample * S + row) * f.num_heads + h) * D;
      Vec sums(0.f);
      for_each_vector(D, [&](int64_t i, auto count) { sums = fmadd(load(dout + row * width + i, count), load(out + i, count), sums); });
      delta[row] = sum(sums);
    }
    for (int64_t at = 0; at < S; at += KEYS_BACKWARD) {
      const int64_t count = std::min(KEYS_BACKWARD, S - at);
      const int64_t columns = round_up(count, TILE_COLUMNS), key_rows = round_up(count, TILE_ROWS);
      copy_rows(head_of(f.v, sample, h) + at * f.v.stride_s, f.v.stride_s, count, D, 1.f, k, columns, width);
      transpose(k, columns, width, v_columns);
      copy_rows(head_of(f.k, sample, h) + at * f.k.stride_s, f.k.stride_s, count, D, 1.f, k, columns, width);
      transpose(k, columns, width, k_columns);
      std::fill_n(dk, 2 * KEYS_BACKWARD * width, 0.f);
      for (int64_t first = 0; first < queries; first += QUERIES) {
        const int64_t rows = std::min(QUERIES, queries - first);
        const float *q_rows = q + first * width, *dout_rows = dout + first * width;
        const Columns of_k{k_columns, TILE_COLUMNS, width * TILE_COLUMNS}, of_v{v_columns, TILE_COLUMNS, width * TILE_COLUMNS};
        multiply<false>(rows, columns, width, q_rows, width, 1, of_k, p, KEYS_BACKWARD);
        multiply<false>(rows, columns, width, dout_rows, width, 1, of_v, ds, KEYS_BACKWARD);
        for (int64_t row = 0; row < rows; ++row) {
          const Vec log_sum(lse[first + row]), mean(delta[first + row]);
          for (int64_t i = row * KEYS_BACKWARD; i < row * KEYS_BACKWARD + columns; i += LANES) {
            const Vec weight = exp(Vec::loadu(p + i) - log_sum);
            weight.store(p + i);
            (weight * (Vec::loadu(ds + i) - mean)).store(ds + i);
          }
        }
        multiply<true>(key_rows, width, rows, p, 1, KEYS_BACKWARD, {dout_rows, width, TILE_COLUMNS}, dv, width);
        multiply<true>(key_rows, width, rows, ds, 1, KEYS_BACKWARD, {q_rows, width, TILE_COLUMNS}, dk, width);
        multiply<true>(rows, width, count, ds, KEYS_BACKWARD, 1, {k, width, TILE_COLUMNS}, dq + first * width, width);
      }
      for (int64_t row = 0; row < count; ++row) {
        const int64_t to = ((sample * S + at + row) * f.num_heads + h) * D;
        for_each_vector(D, [&](int64_t i, auto n) {
          store(x.dk + to + i, load(dk + row * width + i, n), n);
          store(x.dv + to + i, load(dv + row * width + i, n), n);
        });
      }
    }
    for (int64_t row = 0; row < S; ++row) {
      const int64_t to = ((sample * S + row) * f.num_heads + h) * D;
      for_each_vector(D, [&](int64_t i, auto n) { store(x.dq + to + i, load(dq + row * width + i, n) * Vec(f.scale), n); });
    }
  }
}

template void attention(const Attention<float>&, int64_t, int64_t);
template void attention(const Attention<at::BFloat16>&, int64_t, int64_t);
template void attention_backward(const AttentionBackward<float>&, int64_t, int64_t);
template void attention_backward(const AttentionBackward<at::BFloat16>&, int64_t, int64_t);

}  // namespace cogfast::CPU_CAPABILITY
