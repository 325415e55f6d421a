// Activations and their derivatives (definition: python_ref/grouped_gemm.py).
#pragma once

#include <cmath>

#include "moe/cpu/exp.h"

namespace moe {
namespace MOE_ISA {

// The same codes as in moe_kernels/backends/native/activation.py.
enum class Activation : int { none = 0, relu = 1, gelu = 2, silu = 3, tanh = 4, swiglu = 5, geglu = 6 };

constexpr bool is_gated(Activation act) { return act == Activation::swiglu || act == Activation::geglu; }

template <class T>
struct Sloped {
  T value, slope;
};

// erf(x) as x P(x^2) / Q(x^2), the rational approximation of Eigen and XLA. The error is at most 8 units in the last
// place for |x| >= 1e-36. The result is exactly +-1 for |x| >= 4.
inline float erf(float x) {
  const float bounded = x < -4.0f ? -4.0f : x > 4.0f ? 4.0f : x, s = bounded * bounded;
  float p = -2.72614225801306e-10f;
  p = p * s + 2.77068142495902e-08f;
  p = p * s - 2.10102402082508e-06f;
  p = p * s - 5.69250639462346e-05f;
  p = p * s - 7.34990630326855e-04f;
  p = p * s - 2.95459980854025e-03f;
  p = p * s - 1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * s - 2.13374055278905e-04f;
  q = q * s - 1.68282697438203e-03f;
  q = q * s - 7.37332916720468e-03f;
  q = q * s - 1.42647390514189e-02f;
  return bounded * p / q;
}

inline double erf(double x) { return std::erf(x); }

// tanh(x) as x P(x^2) / Q(x^2), fitted for the least relative error: at most 7 units in the last place. The result is
// exactly +-1 for |x| >= 8.2728.
inline float tanh(float x) {
  const float bounded = x < -8.27271175f ? -8.27271175f : x > 8.27271175f ? 8.27271175f : x, s = bounded * bounded;
  float p = 1.47124828e-8f;
  p = p * s + 2.15560285e-5f;
  p = p * s + 3.55212763e-3f;
  p = p * s + 1.34283930e-1f;
  p = p * s + 1.0f;
  float q = 8.32170883e-7f;
  q = q * s + 3.37873615e-4f;
  q = q * s + 2.60912962e-2f;
  q = q * s + 4.67617154e-1f;
  q = q * s + 1.0f;
  const float y = bounded * p / q;
  return y < -1.0f ? -1.0f : y > 1.0f ? 1.0f : y;  // rounding may give |y| > 1
}

inline double tanh(double x) { return std::tanh(x); }

// act(x). For a gated activation x is the gate, and the linear part is not applied. relu returns NaN for NaN.
template <Activation act, class T>
inline T value_of(T x) {
  if constexpr (act == Activation::relu) return x < 0 ? T(0) : x;
  if constexpr (act == Activation::gelu || act == Activation::geglu)
    return T(0.5) * x * (T(1) + erf(x * T(0.70710678118654752)));
  if constexpr (act == Activation::silu || act == Activation::swiglu) return x / (T(1) + exp(-x));
  if constexpr (act == Activation::tanh) return tanh(x);
  return x;
}

template <Activation act, class T>
inline Sloped<T> sloped(T x) {
  if constexpr (act == Activation::relu) return {x < 0 ? T(0) : x, x <= 0 ? T(0) : T(1)};
  if constexpr (act == Activation::gelu || act == Activation::geglu) {
    const T below = T(0.5) * (T(1) + erf(x * T(0.70710678118654752)));
    return {x * below, below + x * exp(T(-0.5) * x * x) * T(0.39894228040143268)};
  }
  if constexpr (act == Activation::silu || act == Activation::swiglu) {
    const T gate = T(1) / (T(1) + exp(-x));
    return {x * gate, gate + x * gate * (T(1) - gate)};
  }
  if constexpr (act == Activation::tanh) {
    const T y = tanh(x);
    return {y, T(1) - y * y};
  }
  return {x, T(1)};
}

// Functions that apply an activation to `count` elements of a row. value: out = act(pre), times `up` (the linear parts)
// if gated. slope: from `grad`, the gradient to out, computes dpre and, if gated, dup, the gradients to pre and to up.
// An output may be the same array as any input.
template <class T>
struct ActivationRow {
  bool gated;
  void (*value)(T* out, const T* pre, const T* up, int64_t count);
  void (*slope)(T* dpre, T* dup, const T* grad, const T* pre, const T* up, int64_t count);
};

template <Activation act, class T>
void value_row(T* out, const T* pre, const T* up, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) out[j] = is_gated(act) ? value_of<act>(pre[j]) * up[j] : value_of<act>(pre[j]);
}

template <Activation act, class T>
void slope_row(T* dpre, T* dup, const T* grad, const T* pre, const T* up, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    const auto y = sloped<act>(pre[j]);
    const T g = grad[j];
    if constexpr (is_gated(act)) {
      dpre[j] = g * y.slope * up[j];
      dup[j] = g * y.value;
    } else {
      dpre[j] = g * y.slope;
    }
  }
}

template <class T>
inline ActivationRow<T> activation_of(int activation) {
  switch (Activation(activation)) {
#define MOE_CASE(act)   \
  case Activation::act: \
    return {is_gated(Activation::act), value_row<Activation::act, T>, slope_row<Activation::act, T>};
    MOE_CASE(none)
    MOE_CASE(relu)
    MOE_CASE(gelu)
    MOE_CASE(silu)
    MOE_CASE(tanh)
    MOE_CASE(swiglu)
    MOE_CASE(geglu)
#undef MOE_CASE
  }
  return {};
}

}  // namespace MOE_ISA
}  // namespace moe
