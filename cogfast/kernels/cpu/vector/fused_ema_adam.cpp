// Adam and the EMA of the weights in one pass, 8-bit moments, and the gradient's norm.
// kernels/fused_ema_adam.py and moment_codes.py have the formulas.

#include <bit>

#include <c10/util/Half.h>

#include "kernels.h"
#include "rows.h"

namespace cogfast::CPU_CAPABILITY {
namespace {

// The processor's own prefetching stops at the end of a page and does not keep up with five streams. These
// distances, in elements, gave the best times on a Xeon; beyond the end of a tensor a prefetch does nothing.
constexpr int64_t AHEAD = 256, AHEAD_OF_SUM = 512;

// A code has 3 bits of the mantissa: the upper bits of a float32.
constexpr int SHIFT = 20;
constexpr uint32_t BELOW = (1U << SHIFT) - 1;

// Codes count from the float32 whose upper bits are `base`.
int32_t base_of(int32_t largest, int32_t levels) { return std::max(largest - levels, 0); }

uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffU; }

int16_t largest_code(const float* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, magnitude(x[i]));
  return static_cast<int16_t>((most + BELOW) >> SHIFT);
}

}  // namespace

// The other kernels take no float16.
inline Vec load(const at::Half* p, Full) {
  Vec value;
  at::vec::load_fp32_from_fp16(p, value);
  return value;
}

inline void store(at::Half* p, Vec value, Full) {
  const auto rounded = at::vec::cvtfp32_fp16(value);
  std::memcpy(p, &rounded, sizeof(rounded));
}

template <class P, class G, class C>
void ema_adam(
    P* p, const G* g, float* m, float* v, float* shadow, C* copy, int64_t n, const AdamFactors& factors) {
  const Vec scale(factors.gradient_scale), l2(factors.l2), minus_decay(-factors.decay);
  const Vec one_minus_beta1(factors.one_minus_beta1), one_minus_beta2(factors.one_minus_beta2);
  const Vec beta2(factors.beta2), minus_step_size(-factors.step_size), root_factor(factors.root_factor);
  const Vec eps(factors.eps), ema_weight(factors.ema_weight);
  for_each_vector(n, [&](int64_t i, auto count) {
    __builtin_prefetch(p + i + AHEAD);
    __builtin_prefetch(g + i + AHEAD);
    __builtin_prefetch(m + i + AHEAD);
    __builtin_prefetch(v + i + AHEAD);
    if (shadow) __builtin_prefetch(shadow + i + AHEAD);
    const Vec old_p = load(p + i, count), old_m = load(m + i, count);
    Vec grad = load(g + i, count) * scale;
    if (factors.l2 != 0) grad = at::vec::fmadd(l2, old_p, grad);
    const Vec new_m = at::vec::fmadd(one_minus_beta1, grad - old_m, old_m);
    const Vec new_v = at::vec::fmadd(one_minus_beta2 * grad, grad, beta2 * load(v + i, count));
    const Vec denominator = at::vec::fmadd(new_v.sqrt(), root_factor, eps);
    const Vec decayed = at::vec::fmadd(minus_decay, old_p, old_p);
    const Vec new_p = at::vec::fmadd(minus_step_size, new_m / denominator, decayed);
    store(m + i, new_m, count);
    store(v + i, new_v, count);
    store(p + i, new_p, count);
    if (shadow) {
      const Vec old_shadow = load(shadow + i, count);
      store(shadow + i, at::vec::fmadd(ema_weight, new_p - old_shadow, old_shadow), count);
    }
    if (copy) store(copy + i, new_p, count);
  });
}

// The compiler vectorizes the loops over elements.
void decode_moments(const MomentCodes& codes, float* m, float* v, int64_t n) {
  const int32_t base_m = base_of(*codes.largest_m, 127), base_v = base_of(*codes.largest_v, 255);
  for (int64_t i = 0; i < n; ++i) {
    const int32_t c = codes.m[i], level = c & 127;
    const int32_t bits = (level ? level + base_m : 0) << SHIFT;
    m[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) | static_cast<uint32_t>(c >> 7) << 31);
  }
  for (int64_t i = 0; i < n; ++i) {
    const int32_t c = codes.v[i];
    v[i] = std::bit_cast<float>((c ? c + base_v : 0) << SHIFT);
  }
}

void encode_moments(
    const float* m, const float* v, const MomentCodes& codes, int64_t n, uint32_t seed, uint32_t first) {
  *codes.largest_m = largest_code(m, n);
  *codes.largest_v = largest_code(v, n);
  const int32_t base_m = base_of(*codes.largest_m, 127), base_v = base_of(*codes.largest_v, 255);
  const float smallest = std::bit_cast<float>((base_m + 1) << SHIFT);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t random = scramble((first + static_cast<uint32_t>(i)) ^ seed);
    const uint32_t low = random & 0xffff, bits = magnitude(m[i]), sign = std::bit_cast<uint32_t>(m[i]) >> 31;
    const int32_t level = static_cast<int32_t>((bits + (low << 4)) >> SHIFT) - base_m;
    const bool is_kept = static_cast<float>(static_cast<int32_t>(low)) * smallest < std::bit_cast<float>(bits) * 65536.f;
    codes.m[i] = static_cast<uint8_t>((level < 1 ? is_kept : level) | sign << 7);
    const uint32_t bits_v = magnitude(v[i]);
    const int32_t level_v = static_cast<int32_t>((bits_v + (random >> 16 << 4)) >> SHIFT) - base_v;
    codes.v[i] = static_cast<uint8_t>(level_v < 1 ? bits_v > 0 : level_v);
  }
}

void average(float* shadow, const float* p, float weight, int64_t n) {
  for_each_vector(n, [&](int64_t i, auto count) {
    const Vec old = load(shadow + i, count);
    store(shadow + i, at::vec::fmadd(Vec(weight), load(p + i, count) - old, old), count);
  });
}

// The squares are float64: those of float32 overflow from 1.8e19 on. The compiler vectorizes the inner loop.
// Two halves at once keep more reads under way than one stream does.
template <class T>
double sum_of_squares(const T* x, int64_t n) {
  constexpr int WIDTH = 16;
  const auto square = [](T value) { return static_cast<double>(value) * static_cast<double>(value); };
  double sums[2][WIDTH] = {};
  const int64_t half = n / 2 / WIDTH * WIDTH;
  for (int64_t i = 0; i < half; i += WIDTH) {
    // Near the end of a half, the same half of the next piece.
    const int64_t ahead = i + AHEAD_OF_SUM < half ? i + AHEAD_OF_SUM : i + AHEAD_OF_SUM + n - half;
    for (int part = 0; part < 2; ++part) {
      const T* values = x + part * half;
      __builtin_prefetch(values + ahead);
      for (int lane = 0; lane < WIDTH; ++lane) sums[part][lane] += square(values[i + lane]);
    }
  }
  double total = 0;
  for (int64_t i = 2 * half; i < n; ++i) total += square(x[i]);
  for (int lane = 0; lane < WIDTH; ++lane) total += sums[0][lane] + sums[1][lane];
  return total;
}

#define INSTANTIATE(P, G, C) \
  template void ema_adam(P*, const G*, float*, float*, float*, C*, int64_t, const AdamFactors&);
#define INSTANTIATE_COPIES(P, G) \
  INSTANTIATE(P, G, float) INSTANTIATE(P, G, at::BFloat16) INSTANTIATE(P, G, at::Half)
#define INSTANTIATE_GRADS(P) \
  INSTANTIATE_COPIES(P, float) INSTANTIATE_COPIES(P, at::BFloat16) INSTANTIATE_COPIES(P, at::Half)
INSTANTIATE_GRADS(float)
INSTANTIATE_GRADS(at::BFloat16)
INSTANTIATE_GRADS(at::Half)
#undef INSTANTIATE_GRADS
#undef INSTANTIATE_COPIES
#undef INSTANTIATE

template double sum_of_squares(const float*, int64_t);
template double sum_of_squares(const at::BFloat16*, int64_t);

}  // namespace cogfast::CPU_CAPABILITY
