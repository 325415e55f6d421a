// Activation functions and their derivatives, in float32. A gated activation (SwiGLU, GeGLU) is act(gate) * linear. A
// row of its pre-activations holds all gates, then all linear parts.
#pragma once

#include "moe/cuda/special.cuh"

namespace moe {

// The same codes as in moe_kernels/backends/native/activation.py.
enum Activation : int { kIdentity, kRelu, kGelu, kSilu, kTanh, kSwiglu, kGeglu };

__host__ __device__ constexpr bool is_activation(int code) { return code >= kIdentity && code <= kGeglu; }
__host__ __device__ constexpr bool is_gated(int activation) { return activation >= kSwiglu; }

struct Point {
  float value, slope;
};

// `below` is the standard normal distribution function at x, `density` its derivative. `tail`, the function at -|x|, is
// computed as P(t) e^(-x^2 / 2) with t = 1 / (1 + 0.29 |x|) and a fitted polynomial P. Without rounding errors, the
// relative error of `tail` is at most 8e-8 for |x| <= 13.
struct Normal {
  float below, density;

  __device__ explicit Normal(float x) {
    const float t = reciprocal(1.0f + 0.29f * fabsf(x)), bell = power_of_two(-0.72134752f * x * x);
    float p = 0.0391919046f * t - 0.192664613f;
    p = p * t + 0.306926813f;
    p = p * t - 0.153627184f;
    p = p * t + 0.188577959f;
    p = p * t + 0.0749879413f;
    p = p * t + 0.121498381f;
    p = p * t + 0.115081028f;
    p = p * t + 2.77463863e-5f;
    const float tail = p * bell;
    below = x < 0.0f ? tail : 1.0f - tail;
    density = 0.39894228f * bell;
  }
};

// Calls work(curve). The function curve(p) returns the Point of `activation` at p; if gated, p is the gate.
// The value of relu at NaN is NaN.
template <class Work>
__device__ __forceinline__ void with_activation(int activation, Work work) {
  switch (activation) {
    case kRelu: return work([](float p) { return p <= 0.0f ? Point{0.0f, 0.0f} : Point{p, 1.0f}; });
    case kGelu:
    case kGeglu:
      return work([](float p) {
        const Normal normal(p);
        return Point{p * normal.below, normal.below + p * normal.density};
      });
    case kSilu:
    case kSwiglu:
      return work([](float p) {
        const float gate = reciprocal(1.0f + power_of_two(-1.442695041f * p));
        return Point{p * gate, gate * (1.0f + p * (1.0f - gate))};
      });
    case kTanh:
      return work([](float p) {
        const float value = tanhf(p);
        return Point{value, 1.0f - value * value};
      });
    default: return work([](float p) { return Point{p, 1.0f}; });
  }
}

}  // namespace moe
