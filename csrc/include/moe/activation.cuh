// Activations of an expert's hidden units and their derivatives, in float32. Gated ones take two halves of a row:
// act(gate) * linear.
#pragma once

#include "moe/platform.cuh"

namespace moe {

// As moe_kernels/backends/native/grouped_gemm.py numbers them.
enum Activation : int { kIdentity, kRelu, kGelu, kSilu, kTanh, kSwiglu, kGeglu };

__host__ __device__ constexpr bool is_activation(int code) { return code >= kIdentity && code <= kGeglu; }
__host__ __device__ constexpr bool is_gated(int activation) { return activation >= kSwiglu; }

// A value and the derivative there; whoever needs one of them leaves the other to the optimiser.
struct Point {
  float value, slope;
};

// Calls work(curve) with the function from float to Point that `activation` applies, to the gate if it is gated.
template <class Work>
__device__ __forceinline__ void with_activation(int activation, Work work) {
  switch (activation) {
    case kRelu: return work([](float p) { return p <= 0.0f ? Point{0.0f, 0.0f} : Point{p, 1.0f}; });  // NaN stays
    case kGelu:
    case kGeglu:
      return work([](float p) {
        const float below = 0.5f * (1.0f + erff(p * 0.70710678f));        // the normal distribution up to p
        const float density = 0.39894228f * expf(-0.5f * p * p);
        return Point{p * below, below + p * density};
      });
    case kSilu:
    case kSwiglu:
      return work([](float p) {
        const float gate = 1.0f / (1.0f + expf(-p));
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
