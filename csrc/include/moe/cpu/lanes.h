// Vectors as wide as the translation unit's instruction set allows (GCC's vector extension), and their exp and log.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moe {
namespace MOE_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T, int bytes = kVectorBytes>
struct VecOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

template <class T>
inline Vec<T> load(const T* from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class T>
inline void store(T* to, Vec<T> v) {
  std::memcpy(to, &v, sizeof v);
}

template <class T>
inline Vec<T> broadcast(T x) {
  return x - Vec<T>{};  // x + 0 would turn -0 into 0
}

// load_as and store_as convert between a Vec<T> and as many elements of type U as it has lanes.
template <class T, class U>
inline Vec<T> load_as(const U* from) {
  typename VecOf<U, kVectorBytes / sizeof(T) * sizeof(U)>::type v;
  std::memcpy(&v, from, sizeof v);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 8 && sizeof(U) == 4) return _mm512_maskz_cvtps_pd(0xff, v);
#endif
  return __builtin_convertvector(v, Vec<T>);
}

template <class T, class U>
inline void store_as(U* to, Vec<T> v) {
  using Target = typename VecOf<U, kVectorBytes / sizeof(T) * sizeof(U)>::type;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 8 && sizeof(U) == 4) return _mm256_storeu_ps(to, _mm512_maskz_cvtpd_ps(0xff, v));
#endif
  const Target narrow = __builtin_convertvector(v, Target);
  std::memcpy(to, &narrow, sizeof narrow);
}

template <class V>
inline V max(V a, V b) {
  return a > b ? a : b;
}

template <int step, class V, size_t... lane>
inline V swapped(V v, std::index_sequence<lane...>) {
  return __builtin_shufflevector(v, v, int(lane ^ step)...);
}

// A step of transpose: swaps lane i of `upper` and lane i - step of `lower`, for each i in which the bit `step` is set.
template <int step, class V, size_t... lane>
inline void exchange(V& upper, V& lower, std::index_sequence<lane...>) {
  constexpr int count = sizeof...(lane);
  const V first = __builtin_shufflevector(upper, lower, int(lane & step ? count + lane - step : lane)...);
  lower = __builtin_shufflevector(upper, lower, int(lane & step ? count + lane : lane + step)...);
  upper = first;
}

template <class V, int lanes, int step = lanes / 2>
inline void transpose(V (&rows)[lanes]) {
  if constexpr (step > 0) {
    for (int r = 0; r < lanes; ++r)
      if (!(r & step)) exchange<step>(rows[r], rows[r + step], std::make_index_sequence<lanes>());
    transpose<V, lanes, step / 2>(rows);
  }
}

// Alternates the lanes of a and b, taken from their lower halves (half = 0) or upper halves (half = 1).
template <int half, class V, size_t... lane>
inline V zipped(V a, V b, std::index_sequence<lane...>) {
  constexpr int count = sizeof...(lane);
  return __builtin_shufflevector(a, b, int(half * count / 2 + lane / 2 + lane % 2 * count)...);
}

// The even lanes (odd = 0) or the odd lanes (odd = 1) of a, then those of b.
template <int odd, class V, size_t... lane>
inline V unzipped(V a, V b, std::index_sequence<lane...>) {
  return __builtin_shufflevector(a, b, int(2 * lane + odd)...);
}

// Reduces all lanes by `combine`; every lane of the returned vector has the result.
template <class T, int step = kLanes<T> / 2, class Combine>
inline Vec<T> across(Vec<T> v, Combine combine) {
  if constexpr (step == 0) {
    return v;
  } else {
    return across<T, step / 2>(combine(v, swapped<step>(v, std::make_index_sequence<kLanes<T>>())), combine);
  }
}

// Whether any lane is NaN, or is at least `limit`.
inline bool any_from(Vec<double> v, double limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_pd_mask(v, _mm512_set1_pd(limit), _CMP_NLT_UQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_pd(_mm256_cmp_pd(v, _mm256_set1_pd(limit), _CMP_NLT_UQ)) != 0;
#else
  bool any = false;
  for (int i = 0; i < kLanes<double>; ++i) any |= !(v[i] < limit);
  return any;
#endif
}

// 1 / x of normal x, with an error of at most a unit in the last place.
inline Vec<float> reciprocal(Vec<float> x) {
#if defined(__AVX512F__)
  const Vec<float> y = _mm512_maskz_rcp14_ps(0xffff, x);
  return y + y * (1.0f - x * y);
#else
  return 1.0f / x;
#endif
}

inline Vec<double> reciprocal(Vec<double> x) {
#if defined(__AVX512F__)
  Vec<double> y = _mm512_maskz_rcp14_pd(0xff, x);
  y = y + y * (1.0 - x * y);
  return y + y * (1.0 - x * y);
#else
  return 1.0 / x;
#endif
}

// exp(x) for |x| <= 708 with an error of at most 4 units in the last place, and NaN for NaN. For other x the result has
// no meaning. Without AVX-512, x = n log 2 + r, and exp(r) is a Taylor polynomial up to r^12. With AVX-512,
// x = n log(2) / 16 + r, a table has 2^(j / 16) for the low four bits j of n, and the polynomial ends with r^7.
inline Vec<double> exp_within_range(Vec<double> x) {
#if defined(__AVX512F__)
  constexpr double steps = 16;
  // Entry j: the bits of 2^(j / 16), minus j << 48. Adding n << 48 puts j << 48 back, and n / 16 into the exponent.
  constexpr Vec<int64_t> lower = {0x3ff0000000000000, 0x3fefb5586cf9890f, 0x3fef72b83c7d517b, 0x3fef387a6e756238,
                                  0x3fef06fe0a31b715, 0x3feedea64c123422, 0x3feebfdad5362a27, 0x3feeab07dd485429};
  constexpr Vec<int64_t> upper = {0x3feea09e667f3bcd, 0x3feea11473eb0187, 0x3feeace5422aa0db, 0x3feec49182a3f090,
                                  0x3feee89f995ad3ad, 0x3fef199bdd85529c, 0x3fef5818dcfba487, 0x3fefa4afa2a490da};
#else
  constexpr double steps = 1;
#endif
  const Vec<double> shifted = x * (steps * 1.4426950408889634) + 0x1.8p52;  // its low bits are those of n
  const Vec<double> n = shifted - 0x1.8p52;
  const Vec<double> r = (x - n * (0x1.62e42fee00000p-1 / steps)) - n * (0x1.a39ef35793c76p-33 / steps);
  const Vec<double> r2 = r * r, r4 = r2 * r2;
  const Vec<double> low = (1.0 + r) + r2 * (0.5 + r * (1.0 / 6));
  const Vec<double> middle = (1.0 / 24 + r * (1.0 / 120)) + r2 * (1.0 / 720 + r * (1.0 / 5040));
#if defined(__AVX512F__)
  const auto power = (Vec<int64_t>)_mm512_permutex2var_epi64((__m512i)lower, (__m512i)shifted, (__m512i)upper);
  return (low + r4 * middle) * (Vec<double>)(power + ((Vec<int64_t>)shifted << 48));
#else
  const Vec<double> high = (1.0 / 40320 + r * (1.0 / 362880)) + r2 * (1.0 / 3628800 + r * (1.0 / 39916800));
  const Vec<double> p = low + r4 * (middle + r4 * (high + r4 * (1.0 / 479001600)));
  const Vec<uint64_t> power = ((Vec<uint64_t>)shifted << 52) + (uint64_t(1023) << 52);
  return p * (Vec<double>)power;
#endif
}

// exp(x) for x <= 708, with 0 for x < -708 and NaN for NaN.
inline Vec<double> exp(Vec<double> x) {
  const Vec<double> y = exp_within_range(x < -708.0 ? broadcast(-708.0) : x);
  return x < -708.0 ? Vec<double>{} : y;
}

// exp((a - b) * each) in float with an error of at most 2 units in the last place, for (a - b) * each from -80 to 80
// and `each` from 1e-30 to 1e30. With d = a - b, the result is 2^n exp(r) with r = (d - n log(2) / each + lost) * each.
// exp(r) is a Taylor polynomial up to r^7. `lost` is the rounding error of d. log(2) / each is split into high + low;
// `high` has so few bits that n * high is exact.
struct ExpOfDifference {
  float scale, steps, high, low;

  explicit ExpOfDifference(double each) : scale(float(each)), steps(float(each * 1.4426950408889634)) {
    const double unit = 0.6931471805599453 / each;
    uint32_t bits;
    high = float(unit);
    std::memcpy(&bits, &high, sizeof bits);
    bits &= 0xfffff000;
    std::memcpy(&high, &bits, sizeof bits);
    low = float(unit - high);
  }
  Vec<float> operator()(Vec<float> a, Vec<float> b) const {
    const Vec<float> d = a - b, back = d - a, lost = (a - (d - back)) - (b + back);
    const Vec<float> shifted = d * steps + 0x1.8p23f;  // its low bits are those of n
    const Vec<float> n = shifted - 0x1.8p23f;
    const Vec<float> r = (((d - n * high) - n * low) + lost) * scale;
    Vec<float> p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Vec<uint32_t> power = ((Vec<uint32_t>)shifted << 23) + (uint32_t(127) << 23);
    return p * (Vec<float>)power;
  }
};

// log(x) of positive normal x. x = 2^e m with m in [sqrt(1/2), sqrt(2)), and log m = 2 artanh((m - 1) / (m + 1)).
inline Vec<double> log(Vec<double> x) {
  const Vec<int64_t> bits = (Vec<int64_t>)x;
  const Vec<int64_t> e = (bits - 0x3fe6a09e667f3bcd) >> 52;
  const Vec<double> m = (Vec<double>)(bits - (e << 52)), exponent = __builtin_convertvector(e, Vec<double>);
  const Vec<double> t = (m - 1.0) / (m + 1.0), t2 = t * t;
  Vec<double> p = t2 * (1.0 / 21) + 1.0 / 19;
  p = p * t2 + 1.0 / 17;
  p = p * t2 + 1.0 / 15;
  p = p * t2 + 1.0 / 13;
  p = p * t2 + 1.0 / 11;
  p = p * t2 + 1.0 / 9;
  p = p * t2 + 1.0 / 7;
  p = p * t2 + 1.0 / 5;
  p = p * t2 + 1.0 / 3;
  return exponent * 0x1.62e42fee00000p-1 + (2.0 * t + (2.0 * t * t2 * p + exponent * 0x1.a39ef35793c76p-33));
}

}  // namespace MOE_ISA
}  // namespace moe
