// Vectors of float32 lanes over rows of float32 or bfloat16 values.
//
// All arithmetic is float32: a bfloat16 value is widened when it is read, and rounded to nearest even when
// it is written.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <ATen/cpu/vec/vec.h>
#include <ATen/cpu/vec/functional.h>  // after vec.h, which it needs
#include <c10/util/BFloat16.h>

// AVX2 or AVX512, so that the two builds of an inline function have different names.
namespace cogfast::CPU_CAPABILITY {

using Vec = at::vec::Vectorized<float>;
using IntVec = at::vec::Vectorized<int32_t>;
constexpr int LANES = Vec::size();
// The type of a full vector's count of lanes, known to the compiler. A row's tail has an int instead.
using Full = std::integral_constant<int, LANES>;

// Calls body(i, count) for a row of n values: i = 0, LANES, ...; count is Full{}, and an int at the tail.
template <class Body>
inline void for_each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) body(i, Full{});
  if (i < n) body(i, static_cast<int>(n - i));
}

inline Vec load(const float* p, Full) { return Vec::loadu(p); }
inline void store(float* p, Vec value, Full) { value.store(p); }

inline Vec load(const at::BFloat16* p, Full) {
  Vec value;
  at::vec::load_fp32_from_bf16(p, value);
  return value;
}

inline void store(at::BFloat16* p, Vec value, Full) {
  const auto rounded = at::vec::cvtfp32_bf16(value);
  std::memcpy(p, &rounded, sizeof(rounded));
}

// Lanes from `count` on are 0.
template <class T>
inline Vec load(const T* p, int count) {
  float lanes[LANES] = {};
  for (int i = 0; i < count; ++i) lanes[i] = static_cast<float>(p[i]);
  return Vec::loadu(lanes);
}

template <class T>
inline void store(T* p, Vec value, int count) {
  float lanes[LANES];
  value.store(lanes);
  for (int i = 0; i < count; ++i) p[i] = static_cast<T>(lanes[i]);
}

// Sets the lanes from `count` on to 0, so that sums leave them out.
inline Vec keep(Vec value, Full) { return value; }
inline Vec keep(Vec value, int count) { return Vec::set(Vec(0.f), value, count); }

// Sum of all lanes, always in the same order.
inline float sum(Vec value) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, value);
}

// p[0..count) += value
template <class Count>
inline void add_to(float* p, Vec value, Count count) {
  store(p, load(p, count) + value, count);
}

// exp within 1.5 units in the last place: 2^n e^f with |f| <= ln(2) / 2 and the polynomial of Cephes' expf
// for e^f. It is infinite from 88.4 on, 1.6e-38 below -87, and NaN for NaN.
inline Vec exp(Vec x) {
  x = at::vec::clamp(x, Vec(-87.f), Vec(89.f));
  const Vec n = (x * Vec(1.44269504088896341f)).round();
  Vec f = at::vec::fmadd(n, Vec(-0.693359375f), x);
  f = at::vec::fmadd(n, Vec(2.12194440e-4f), f);
  Vec p = Vec(1.9875691500e-4f);
  p = at::vec::fmadd(p, f, Vec(1.3981999507e-3f));
  p = at::vec::fmadd(p, f, Vec(8.3334519073e-3f));
  p = at::vec::fmadd(p, f, Vec(4.1665795894e-2f));
  p = at::vec::fmadd(p, f, Vec(1.6666665459e-1f));
  p = at::vec::fmadd(p, f, Vec(5.0000001201e-1f));
  p = at::vec::fmadd(p * f, f, f) + Vec(1.f);
  const IntVec exponent = at::vec::convert_to_int_of_same_size(n) + IntVec(127);
  return p * at::vec::cast<float>(exponent << IntVec(23));
}

}  // namespace cogfast::CPU_CAPABILITY
