// Attention in blocks whose scores stay in the second-level cache. kernels/attention_backends.py has the formulas.
//
// E is the type of the factors of products: bfloat16 where the processor multiplies such numbers, by oneDNN, else
// float32. All sums are float32. Columns are padded to whole tiles, with zeros, so that no product has a tail there.

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <limits>
#include <memory>
#include <new>

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>

#include "kernels.h"
#include "rows.h"

namespace cogfast::CPU_CAPABILITY {
namespace {

using at::BFloat16;
using at::vec::fmadd;
namespace blas = at::native::cpublas;

// A product in float32 is computed in tiles of TILE_ROWS x TILE_COLUMNS sums, which fill the vector registers.
constexpr int VECTORS = 2, TILE_COLUMNS = VECTORS * LANES, TILE_ROWS = LANES == 8 ? 6 : 12;

// Queries and keys of a block. Products in bfloat16 are short: larger blocks make fewer.
template <class E>
struct Block {
  static constexpr bool IS_FLOAT = std::is_same_v<E, float>;
  static constexpr int64_t QUERIES = IS_FLOAT ? 96 : 128, KEYS_FORWARD = IS_FLOAT ? 192 : 512;
  static constexpr int64_t KEYS_BACKWARD = IS_FLOAT ? 12 * LANES : 256;
};

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory of n elements, aligned for vectors.
template <class E>
class Buffer {
 public:
  explicit Buffer(int64_t n) : data(static_cast<E*>(std::aligned_alloc(64, round_up(n * sizeof(E), 64)))) {
    if (!data) throw std::bad_alloc();
  }
  operator E*() const { return data.get(); }

 private:
  struct Free {
    void operator()(E* p) const { std::free(p); }
  };
  std::unique_ptr<E, Free> data;
};

// c [ROWS, TILE_COLUMNS] = (ADDS: +=) a b.
template <bool ADDS, int ROWS>
inline void multiply_tile(
    int64_t depth, const float* a, int64_t a_row, const float* b, int64_t b_row, float* c, int64_t c_row) {
  Vec sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) sums[m][n] = ADDS ? Vec::loadu(c + m * c_row + n * LANES) : Vec(0.f);
  for (int64_t k = 0; k < depth; ++k, ++a, b += b_row) {
    Vec columns[VECTORS];
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) columns[n] = Vec::loadu(b + n * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const Vec value(a[m * a_row]);
#pragma GCC unroll 16
      for (int n = 0; n < VECTORS; ++n) sums[m][n] = fmadd(value, columns[n], sums[m][n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; ++n) sums[m][n].store(c + m * c_row + n * LANES);
}

// c [rows, columns] = (ADDS: +=) a [rows, depth] b [depth, columns]; the numbers after each are its strides of rows.
template <bool ADDS, int ROWS = TILE_ROWS>
void multiply(
    int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
    int64_t c_row) {
  const int64_t whole = rows / ROWS * ROWS;
  for (int64_t n = 0; n < columns; n += TILE_COLUMNS)
    for (int64_t m = 0; m < whole; m += ROWS)
      multiply_tile<ADDS, ROWS>(depth, a + m * a_row, a_row, b + n, b_row, c + m * c_row + n, c_row);
  if constexpr (ROWS > 1)
    if (whole < rows)
      multiply<ADDS, (ROWS > 4 ? 4 : 1)>(rows - whole, columns, depth, a + whole * a_row, a_row, b, b_row, c + whole * c_row, c_row);
}

#ifdef __AVX512BF16__  // library.py sets it for this processor
constexpr bool HAS_BFLOAT16 = true;
inline void store_factor(BFloat16* p, Vec value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(value));
}
#else
constexpr bool HAS_BFLOAT16 = false;
#endif
inline void store_factor(float* p, Vec value) { value.store(p); }

// The same for b [depth / 2, columns, 2], which is pairs of rows.
template <bool ADDS>
void multiply(
    int64_t rows, int64_t columns, int64_t depth, const BFloat16* a, int64_t a_row, const BFloat16* b, int64_t b_row,
    float* c, int64_t c_row) {
  blas::brgemm(rows, columns, depth, a_row, b_row, c_row, ADDS, a, b, c, /*is_vnni=*/true);
}

// to [columns, to_row] = the transpose of x [rows, columns].
template <class E>
void transpose(const E* x, int64_t x_row, int64_t rows, int64_t columns, E* to, int64_t to_row) {
  for (int64_t i = 0; i < rows; i += 16)
    for (int64_t j = 0; j < columns; j += 16)
      at::vec::transpose_mxn<E>(
          x + i * x_row + j, x_row, to + j * to_row + i, to_row, std::min<int64_t>(16, rows - i),
          std::min<int64_t>(16, columns - j));
}

// The right factor x [rows, columns] of a product, in memory of that size or in place; rows are even.
const float* right_factor(const float* x, int64_t, int64_t, float*) { return x; }

const BFloat16* right_factor(const BFloat16* x, int64_t rows, int64_t columns, BFloat16* memory) {
  for (int64_t row = 0; row < rows; row += 2) {
    const auto* upper = reinterpret_cast<const uint16_t*>(x + row * columns);
    auto* to = reinterpret_cast<uint32_t*>(memory + row * columns);
    for (int64_t i = 0; i < columns; ++i) to[i] = upper[i] | static_cast<uint32_t>(upper[columns + i]) << 16;
  }
  return memory;
}

// The right factor x^T of x [rows, width]: words of one float or of two bfloat16 change places.
template <class E>
void transposed_right_factor(const E* x, int64_t rows, int64_t width, E* to) {
  const int64_t words = width * sizeof(E) / sizeof(float);
  transpose(reinterpret_cast<const float*>(x), words, rows, words, reinterpret_cast<float*>(to), rows);
}

// to [padded_rows, padded_width] = rows of a head, then zeros.
template <class T, class E>
void copy_rows(const T* x, int64_t stride, int64_t rows, int64_t width, E* to, int64_t padded_rows, int64_t padded_width) {
  for (int64_t row = 0; row < padded_rows; ++row, to += padded_width) {
    std::fill_n(to, row < rows && width == padded_width ? 0 : padded_width, E(0.f));
    if (row >= rows) continue;
    if constexpr (std::is_same_v<T, E>)
      std::copy_n(x + row * stride, width, to);
    else
      for_each_vector(width, [&](int64_t i, auto count) { store(to + i, load(x + row * stride + i, count), count); });
  }
}

template <class T>
const T* rows_of(const Heads<T>& x, int64_t sample, int64_t head, int64_t row) {
  return x.data + sample * x.stride_b + head * x.stride_h + row * x.stride_s;
}

float largest(const float* x, int64_t n) {
  Vec most = Vec::loadu(x);
  for (int64_t i = LANES; i < n; i += LANES) most = at::vec::maximum(most, Vec::loadu(x + i));
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, most);
}

template <class E, class T>
void forward(const Attention<T>& x, int64_t begin, int64_t end) {
  constexpr int64_t QUERIES = Block<E>::QUERIES, KEYS = Block<E>::KEYS_FORWARD;
  const int64_t S = x.num_tokens, D = x.width, width = round_up(D, TILE_COLUMNS);
  const int64_t blocks = attention_blocks(S, x.multiplies_bfloat16), padded = round_up(S, TILE_COLUMNS);
  const Buffer<E> k(padded * width), v(padded * width), q(QUERIES * width), copy(KEYS * width), rounded(QUERIES * KEYS);
  const Buffer<float> out(QUERIES * width), scores(QUERIES * KEYS);
  int64_t packed = -1;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t head = task / blocks, sample = head / x.num_heads, h = head % x.num_heads;
    if (head != packed) {
      for (int64_t at = 0; at < S; at += KEYS) {
        const int64_t count = std::min(KEYS, S - at), columns = round_up(count, TILE_COLUMNS);
        copy_rows(rows_of(x.k, sample, h, at), x.k.stride_s, count, D, +copy, columns, width);
        transposed_right_factor(+copy, columns, width, k + at * width);
        E* to = Block<E>::IS_FLOAT ? v + at * width : +copy;
        copy_rows(rows_of(x.v, sample, h, at), x.v.stride_s, count, D, to, columns, width);
        right_factor(to, columns, width, v + at * width);
      }
      packed = head;
    }
    const int64_t first = task % blocks * QUERIES, rows = std::min(QUERIES, S - first);
    copy_rows(rows_of(x.q, sample, h, first), x.q.stride_s, rows, D, +q, rows, width);
    float most[QUERIES], total[QUERIES] = {};
    std::fill_n(most, QUERIES, -FLT_MAX);  // not infinite: all scores of a block may be
    for (int64_t at = 0; at < S; at += KEYS) {
      const int64_t count = std::min(KEYS, S - at), columns = round_up(count, TILE_COLUMNS);
      multiply<false>(rows, columns, width, +q, width, k + at * width, columns, +scores, columns);
      E* p = Block<E>::IS_FLOAT ? reinterpret_cast<E*>(+scores) : +rounded;
      for (int64_t row = 0; row < rows; ++row) {
        float* s = scores + row * columns;
        std::fill(s + count, s + columns, -std::numeric_limits<float>::infinity());
        const float old = most[row], now = std::max(old, largest(s, columns) * x.scale);
        Vec sums(0.f);
        for (int64_t i = 0; i < columns; i += LANES) {
          const Vec weight = exp(Vec::loadu(s + i) * Vec(x.scale) - Vec(now));
          store_factor(p + row * columns + i, weight);
          sums = sums + weight;
        }
        const float kept = std::exp(old - now);
        total[row] = total[row] * kept + sum(sums);
        most[row] = now;
        if (at > 0 && kept != 1.f)
          for (int64_t i = 0; i < width; i += LANES) (Vec::loadu(out + row * width + i) * Vec(kept)).store(out + row * width + i);
      }
      const E* values = v + at * width;
      if (at > 0)
        multiply<true>(rows, width, columns, p, columns, values, width, +out, width);
      else
        multiply<false>(rows, width, columns, p, columns, values, width, +out, width);
    }
    for (int64_t row = 0; row < rows; ++row) {
      T* to = x.out + ((sample * S + first + row) * x.num_heads + h) * D;
      if (most[row] == -FLT_MAX) total[row] = std::numeric_limits<float>::quiet_NaN();  // there is no score
      for_each_vector(D, [&](int64_t i, auto count) { store(to + i, load(out + row * width + i, count) * Vec(1.f / total[row]), count); });
      x.lse[head * S + first + row] = most[row] + std::log(total[row]);
    }
  }
}

// Scores have the keys in rows: P^T and dS^T are left factors of dV and dK, and dS^T the right one of dQ^T.
template <class E, class T>
void backward(const AttentionBackward<T>& x, int64_t begin, int64_t end) {
  constexpr int64_t QUERIES = Block<E>::QUERIES, KEYS = Block<E>::KEYS_BACKWARD;
  const Attention<T>& f = x.forward;
  const int64_t S = f.num_tokens, D = f.width, width = round_up(D, TILE_COLUMNS), queries = round_up(S, TILE_COLUMNS);
  const Buffer<E> q(queries * width), q_columns(queries * width), dout(queries * width), dout_columns(queries * width);
  const Buffer<E> k(KEYS * width), k_columns(KEYS * width), v(KEYS * width), copy(QUERIES * width);
  const Buffer<E> p_rounded(KEYS * QUERIES), ds_rounded(KEYS * QUERIES), ds_memory(KEYS * QUERIES);
  const Buffer<float> scores(KEYS * QUERIES), dscores(KEYS * QUERIES), dk(KEYS * width), dv(KEYS * width);
  const Buffer<float> dq(queries * width), lse(queries), delta(queries), dq_rows(QUERIES * width);
  E* p = Block<E>::IS_FLOAT ? reinterpret_cast<E*>(+scores) : +p_rounded;
  E* ds = Block<E>::IS_FLOAT ? reinterpret_cast<E*>(+dscores) : +ds_rounded;
  // The rows of a block of queries as both right factors.
  const auto pack = [&](const Heads<T>& from, int64_t sample, int64_t h, int64_t first, int64_t columns, E* rows, E* transposed) {
    E* to = Block<E>::IS_FLOAT ? rows + first * width : +copy;
    copy_rows(rows_of(from, sample, h, first), from.stride_s, std::min(columns, S - first), D, to, columns, width);
    right_factor(to, columns, width, rows + first * width);
    transposed_right_factor(to, columns, width, transposed + first * width);
  };
  for (int64_t head = begin; head < end; ++head) {
    const int64_t sample = head / f.num_heads, h = head % f.num_heads;
    for (int64_t first = 0; first < queries; first += QUERIES) {
      const int64_t columns = std::min(QUERIES, queries - first);
      pack(f.q, sample, h, first, columns, q, q_columns);
      pack(x.dout, sample, h, first, columns, dout, dout_columns);
    }
    std::fill_n(+dq, queries * width, 0.f);
    std::fill_n(+lse, queries, 0.f);
    std::fill_n(+delta, queries, 0.f);
    std::copy_n(f.lse + head * S, S, +lse);
    for (int64_t row = 0; row < S; ++row) {
      const T *out = f.out + ((sample * S + row) * f.num_heads + h) * D, *gradient = rows_of(x.dout, sample, h, row);
      Vec sums(0.f);
      for_each_vector(D, [&](int64_t i, auto count) { sums = fmadd(load(gradient + i, count), load(out + i, count), sums); });
      delta[row] = sum(sums);
    }
    for (int64_t at = 0; at < S; at += KEYS) {
      const int64_t count = std::min(KEYS, S - at), even = round_up(count, 2);
      copy_rows(rows_of(f.v, sample, h, at), f.v.stride_s, count, D, +v, count, width);
      copy_rows(rows_of(f.k, sample, h, at), f.k.stride_s, count, D, +k, even, width);
      transpose(+k, width, even, width, +k_columns, even);
      std::fill_n(+dk, count * width, 0.f);
      std::fill_n(+dv, count * width, 0.f);
      for (int64_t first = 0; first < queries; first += QUERIES) {
        const int64_t columns = std::min(QUERIES, queries - first), offset = first * width;
        multiply<false>(count, columns, width, +k, width, q_columns + offset, columns, +scores, columns);
        multiply<false>(count, columns, width, +v, width, dout_columns + offset, columns, +dscores, columns);
        for (int64_t row = 0; row < count * columns; row += columns)
          for (int64_t i = 0; i < columns; i += LANES) {
            const Vec log_sum = Vec::loadu(lse + first + i), mean = Vec::loadu(delta + first + i);
            const Vec weight = exp(Vec::loadu(scores + row + i) * Vec(f.scale) - log_sum);
            const Vec gradient = weight * (Vec::loadu(dscores + row + i) - mean);
            store_factor(p + row + i, weight);
            store_factor(ds + row + i, gradient);
          }
        std::fill_n(ds + count * columns, (even - count) * columns, E(0.f));
        multiply<true>(count, width, columns, p, columns, dout + offset, width, +dv, width);
        multiply<true>(count, width, columns, ds, columns, q + offset, width, +dk, width);
        multiply<true>(width, columns, even, +k_columns, even, right_factor(ds, even, columns, ds_memory), columns, dq + offset, columns);
      }
      for (int64_t row = 0; row < count; ++row) {
        const int64_t to = ((sample * S + at + row) * f.num_heads + h) * D;
        for_each_vector(D, [&](int64_t i, auto n) {
          store(x.dk + to + i, load(dk + row * width + i, n) * Vec(f.scale), n);
          store(x.dv + to + i, load(dv + row * width + i, n), n);
        });
      }
    }
    for (int64_t first = 0; first < S; first += QUERIES) {
      const int64_t columns = std::min(QUERIES, queries - first);
      transpose<float>(dq + first * width, columns, width, columns, dq_rows, width);
      for (int64_t row = 0; row < std::min(columns, S - first); ++row) {
        T* to = x.dq + ((sample * S + first + row) * f.num_heads + h) * D;
        for_each_vector(D, [&](int64_t i, auto n) { store(to + i, load(dq_rows + row * width + i, n) * Vec(f.scale), n); });
      }
    }
  }
}

// Whether oneDNN multiplies bfloat16 here: not if it was built without, or if the environment hides instructions.
bool has_brgemm() {
  const BFloat16 a[32] = {}, b[32] = {};
  float c[16];
  try {
    blas::brgemm(1, 16, 2, 2, 16, 16, false, a, b, c, /*is_vnni=*/true);
  } catch (const std::exception&) {
    return false;
  }
  blas::brgemm_release();
  return true;
}

}  // namespace

bool multiplies_bfloat16() {
  if (!HAS_BFLOAT16 || !at::globalContext().userEnabledMkldnn()) return false;
  // Without AMX such products take 0.6 times the time of float32's on AMD's processors, and 1.4 times on Intel's.
  static const bool is_faster = blas::could_pack(at::kBFloat16) || (__builtin_cpu_is("amd") && has_brgemm());
  return is_faster;
}

int64_t attention_blocks(int64_t num_tokens, bool multiplies_bfloat16) {
  const int64_t queries = multiplies_bfloat16 ? Block<BFloat16>::QUERIES : Block<float>::QUERIES;
  return (num_tokens + queries - 1) / queries;
}

template <class T>
void attention(const Attention<T>& x, int64_t begin, int64_t end) {
  if constexpr (HAS_BFLOAT16 && std::is_same_v<T, BFloat16>)
    if (x.multiplies_bfloat16) {
      forward<BFloat16>(x, begin, end);
      return blas::brgemm_release();
    }
  forward<float>(x, begin, end);
}

template <class T>
void attention_backward(const AttentionBackward<T>& x, int64_t begin, int64_t end) {
  if constexpr (HAS_BFLOAT16 && std::is_same_v<T, BFloat16>)
    if (x.forward.multiplies_bfloat16) {
      backward<BFloat16>(x, begin, end);
      return blas::brgemm_release();
    }
  backward<float>(x, begin, end);
}

template void attention(const Attention<float>&, int64_t, int64_t);
template void attention(const Attention<BFloat16>&, int64_t, int64_t);
template void attention_backward(const AttentionBackward<float>&, int64_t, int64_t);
template void attention_backward(const AttentionBackward<BFloat16>&, int64_t, int64_t);

}  // namespace cogfast::CPU_CAPABILITY
