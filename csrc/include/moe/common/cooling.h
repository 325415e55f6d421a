// The temperature of each Sinkhorn iteration. Plain C++: the CPU kernels and the CUDA kernels include this.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define MOE_HOST_DEVICE __host__ __device__
#else
#define MOE_HOST_DEVICE
#endif

namespace moe {
namespace {  // the CPU kernels are compiled for several instruction sets, and each needs its own copy

// Temperatures change geometrically from `first` to `last`; the last iteration has exactly `last`. The temperature of
// iteration t (from 0) is computed from t, not from the temperature before, so that forward and backward pass use the
// same bits.
class Cooling {
 public:
  Cooling(double first, double last, int64_t iterations)
      : last_(last), step_(iterations > 1 ? std::log2(first / last) / double(iterations - 1) : 0.0),
        iterations_(iterations) {}
  MOE_HOST_DEVICE double operator()(int64_t t) const { return last_ * exp2(step_ * double(iterations_ - 1 - t)); }
  MOE_HOST_DEVICE int64_t iterations() const { return iterations_; }
  MOE_HOST_DEVICE bool constant() const { return step_ == 0; }

 private:
  double last_, step_;
  int64_t iterations_;
};

}  // namespace
}  // namespace moe
