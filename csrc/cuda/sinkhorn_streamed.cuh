// Sinkhorn's iteration (sinkhorn.cu) for n > 64: a block takes one matrix. Every iteration reads it, or k in the scaled
// form, from memory.
#pragma once

#include <algorithm>

#include "moe/cuda/launch.cuh"
#include "sinkhorn_tile.cuh"

namespace moe {
namespace {

constexpr int kLargest = 1024;       // largest n
constexpr int kStreamThreads = 512;  // most threads of a block

class Streamed {
 public:
  static constexpr int kVectors = 6;  // f, g, anchor, logs, df and dg

  int n, warp, warps, lane;
  double *f, *g, *anchor, *logs, *df, *dg;  // (n)
  double* partial;                          // (warps, n)
  const Sums sums;

  __device__ Streamed(double* shared, const Matrices& scores, const Sums& all, int n)
      : n(n), warp(threadIdx.x / kWarpSize), warps(blockDim.x / kWarpSize), lane(threadIdx.x % kWarpSize), f(shared),
        g(f + n), anchor(g + n), logs(anchor + n), df(logs + n), dg(df + n), partial(dg + n),
        sums(all.of(blockIdx.x, n)), scores_(scores), start_(int64_t(blockIdx.x) * scores.stride_batch) {}

  // Shared memory for `partial` may limit the number of warps.
  static int threads(int64_t n) {
    const int64_t warps = shared_memory_limit() / (n * 8) - kVectors;
    return static_cast<int>(std::min<int64_t>(warps, kStreamThreads / kWarpSize)) * kWarpSize;
  }
  static int shared_bytes(int64_t n) { return static_cast<int>((kVectors + threads(n) / kWarpSize) * n * 8); }

  __device__ float score(int i, int j) const {
    return widened(scores_.data, scores_.dtype, start_ + i * scores_.stride_row + j);
  }

  template <class Each>
  __device__ void for_rows(Each each) const {
    for (int i = warp; i < n; i += warps) each(i);
  }
  template <class Each>
  __device__ void for_columns(Each each) const {
    for (int j = lane; j < n; j += kWarpSize) each(j);
  }
  template <class T>
  __device__ void clear(T* mine, T value) const {
    for_columns([&](int j) { mine[j] = value; });
  }

  // Combines the warps' partial values of each column j into `total`, calls each(j, total), and sets all partial values
  // to `next`.
  template <class T, class Combine, class Each>
  __device__ void collect(T* partials, Combine combine, T next, Each each) const {
    __syncthreads();
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
      T total = partials[j];
      partials[j] = next;
      for (int w = 1; w < warps; w++) {
        total = combine(total, partials[w * n + j]);
        partials[w * n + j] = next;
      }
      each(j, total);
    }
    __syncthreads();
  }

  template <class T, class Combine>
  __device__ T along_row(T value, Combine combine) const {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
    }
    return value;
  }

  __device__ Form form(const Cooling& cooling, double limit) const {
    int logarithmic = !cooling.constant(), broken = 0;
    for_rows([&](int i) {
      float high = -infinity(), negated_low = -infinity();
      for_columns([&](int j) {
        const float x = score(i, j);
        high = fmaxf(high, x), negated_low = fmaxf(negated_low, -x);
        broken |= !(x < infinity());
      });
      high = along_row(high, Max()), negated_low = along_row(negated_low, Max());
      logarithmic |= negated_low == infinity() || !((high + negated_low) / cooling(0) < limit);
    });
    if (__syncthreads_or(broken)) return Form::broken;
    return __syncthreads_or(logarithmic) ? Form::logarithmic : Form::scaled;
  }

  // Computes the potential of row i from g: most + tau log_sum. Exponentials are computed in the type T.
  template <class T>
  __device__ void row(int i, double inv_tau, double& most, double& log_sum) const {
    most = -infinity();
    for_columns([&](int j) { most = Max()(most, score(i, j) - g[j]); });
    most = finite(along_row(most, Max()));
    double total = 0;
    for_columns([&](int j) { total += share<T>(((score(i, j) - g[j]) - most) * inv_tau); });
    log_sum = log_of(sums.per_row(along_row(total, Add()), i));
  }

  __device__ void init() const {
    clear(partial + warp * n, -double(infinity()));
    for (int j = threadIdx.x; j < n; j += blockDim.x) f[j] = g[j] = anchor[j] = logs[j] = 0;
    __syncthreads();
  }

  // Does one iteration and returns true, or, if all sums are within the tolerance already, returns false and leaves f,
  // g, anchor and logs as they were (see Potentials::iterate). `partial` must be -inf before a call, and is -inf again
  // after a call that returns true.
  template <class T>
  __device__ bool iterate(double tau, bool first) const {
    const double inv_tau = 1 / tau;
    double *const mine = partial + warp * n, *const before = df;
    bool off = sums.tolerance >= 0 && first && columns_off(inv_tau);
    for_rows([&](int i) {
      double most, log_sum;
      row<T>(i, inv_tau, most, log_sum);
      const double potential = most + tau * log_sum;
      if (lane == 0) {
        off |= sums.tolerance >= 0 && sums.row_error(exp((potential - f[i]) * inv_tau), i) > sums.tolerance;
        before[i] = f[i], f[i] = potential;
      }
      for_columns([&](int j) { mine[j] = Max()(mine[j], score(i, j) - potential); });
    });
    if (sums.tolerance >= 0 && !__syncthreads_or(off)) {
      for (int i = threadIdx.x; i < n; i += blockDim.x) f[i] = before[i];
      __syncthreads();
      return false;
    }
    collect(partial, Max(), 0.0, [&](int j, double most) { anchor[j] = finite(most); });
    for_rows([&](int i) {
      for_columns([&](int j) { mine[j] += share<T>(((score(i, j) - f[i]) - anchor[j]) * inv_tau); });
    });
    collect(partial, Add(), -double(infinity()), [&](int j, double total) {
      logs[j] = log_of(sums.per_column(total, j));
      g[j] = anchor[j] + tau * logs[j];
    });
    return true;
  }

  template <class T>
  __device__ T columns_normalised(int i, int j, double inv_tau) const {
    return share<T>(((score(i, j) - f[i]) - anchor[j]) * inv_tau - logs[j]);
  }

  template <class T>
  __device__ static T share(double x) {
    T y;
    exponential(x, y);
    return y;
  }
  __device__ static double log_of(double total) { return total > 0 ? log(total) : 0.0; }

 private:
  // Whether one of this thread's columns of exp(scores / tau) has a sum outside the tolerance. Columns whose
  // scores are all -inf do not count.
  __device__ bool columns_off(double inv_tau) const {
    bool off = false;
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
      float high = -infinity();
      double total = 0;
      for (int i = 0; i < n; i++) high = fmaxf(high, score(i, j)), total += exp(score(i, j) * inv_tau);
      off |= high > -infinity() && sums.column_error(total, j) > sums.tolerance;
    }
    return off;
  }

  Matrices scores_;
  int64_t start_;
};

// The scaled form. k (n, n) is in global memory; each element is read only by the thread that wrote it.
__device__ void scaled_streamed(const Streamed& s, const Cooling& cooling, float* k, void* p, int dtype,
                                int64_t start) {
  float *const u = reinterpret_cast<float*>(s.f), *const v = reinterpret_cast<float*>(s.g);
  float *const partials = reinterpret_cast<float*>(s.partial), *const mine = partials + s.warp * s.n;
  const double inv_tau = 1 / cooling(0);
  s.for_rows([&](int i) {
    float most = -infinity();
    s.for_columns([&](int j) { most = fmaxf(most, s.score(i, j)); });
    const double anchor = s.along_row(most, Max());
    s.for_columns([&](int j) { exponential((s.score(i, j) - anchor) * inv_tau, k[int64_t(i) * s.n + j]); });
  });
  s.clear(mine, 0.0f);
  for (int j = threadIdx.x; j < s.n; j += blockDim.x) v[j] = 1.0f;
  __syncthreads();
  for (int64_t t = 0; t < cooling.iterations(); t++) {
    s.for_rows([&](int i) {
      const float* const row = k + int64_t(i) * s.n;
      float total = 0.0f;
      s.for_columns([&](int j) { total += row[j] * v[j]; });
      const float share = reciprocal(s.along_row(total, Add()));
      if (s.lane == 0) u[i] = share;
      s.for_columns([&](int j) { mine[j] += row[j] * share; });
    });
    bool changed = false;
    s.collect(partials, Add(), 0.0f, [&](int j, float total) {
      const float next = reciprocal(total);
      changed |= next != v[j], v[j] = next;
    });
    if (!__syncthreads_or(changed)) break;
  }
  s.for_rows([&](int i) {
    s.for_columns([&](int j) {
      const int64_t at = int64_t(i) * s.n + j;
      put(p, dtype, start + at, k[at] * u[i] * v[j]);
    });
  });
}

__global__ void __launch_bounds__(kStreamThreads, 1)
    sinkhorn_streamed_kernel(Matrices scores,  // (B, n, n)
                             void* p,          // (B, n, n)
                             float* k,         // (B, n, n): p if p is float32, else scratch
                             Cooling cooling, Sums sums, int n) {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  double* const shared = reinterpret_cast<double*>(dynamic_shared);
  const Streamed s(shared, scores, sums, n);
  const int64_t start = int64_t(blockIdx.x) * n * n;
  const Form form = s.form(cooling, sums.prescribed() ? 0 : kFloatRange);
  if (form == Form::scaled) return scaled_streamed(s, cooling, k + start, p, scores.dtype, start);
  if (form == Form::logarithmic) {
    s.init();
    for (int64_t t = 0; t < cooling.iterations() && s.iterate<float>(cooling(t), t == 0);) t++;
  }
  const double inv_tau = 1 / cooling(cooling.iterations() - 1);
  s.for_rows([&](int i) {
    s.for_columns([&](int j) {
      const float value = form == Form::broken ? NAN : s.columns_normalised<float>(i, j, inv_tau);
      put(p, scores.dtype, start + int64_t(i) * n + j, value);
    });
  });
}

__global__ void __launch_bounds__(kStreamThreads, 1)
    sinkhorn_streamed_bwd_kernel(Matrices grad,     // (B, n, n)
                                 Matrices scores,   // (B, n, n)
                                 void* dscores,     // (B, n, n)
                                 double* scratch,   // (B, stride): anchor and logs (iterations, 2, n), dS (n, n)
                                 int64_t stride, Cooling cooling, Sums sums, int n) {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  double* const shared = reinterpret_cast<double*>(dynamic_shared);
  const Streamed s(shared, scores, sums, n);
  const int64_t start = int64_t(blockIdx.x) * n * n;
  const bool broken = s.form(cooling, 0) == Form::broken;
  // The thread that sets an element of drows or dcolumns here also changes it below.
  s.for_rows([&](int i) {
    if (s.lane == 0) s.sums.init_row(i, broken ? NAN : 0.0);
  });
  for (int j = threadIdx.x; j < n; j += blockDim.x) s.sums.init_column(j, broken ? NAN : 0.0);
  if (broken) {
    s.for_rows(
        [&](int i) { s.for_columns([&](int j) { put(dscores, scores.dtype, start + int64_t(i) * n + j, NAN); }); });
    return;
  }
  double* const history = scratch + blockIdx.x * stride;
  double *const ds = history + 2 * cooling.iterations() * n, *const mine = s.partial + s.warp * n;
  s.init();
  int64_t iterations = 0;
  while (iterations < cooling.iterations() && s.iterate<double>(cooling(iterations), iterations == 0)) {
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
      history[2 * iterations * n + j] = s.anchor[j], history[(2 * iterations + 1) * n + j] = s.logs[j];
    }
    iterations++;
  }
  s.clear(mine, 0.0);
  const int64_t last = iterations - 1;
  const double last_inv_tau = 1 / cooling(cooling.iterations() - 1);
  s.for_rows([&](int i) {
    double total = 0;
    s.for_columns([&](int j) {
      const double dp = widened(grad.data, grad.dtype, blockIdx.x * grad.stride_batch + i * grad.stride_row + j);
      const double weight = s.columns_normalised<double>(i, j, last_inv_tau) * dp;
      ds[int64_t(i) * n + j] = weight;
      mine[j] -= weight;
      total -= weight;
    });
    total = s.along_row(total, Add());
    if (s.lane == 0) s.df[i] = total;
  });
  s.collect(s.partial, Add(), 0.0, [&](int j, double total) { s.dg[j] = total; });
  for (int64_t t = last; t >= 0; t--) {
    const double tau = cooling(t), inv_tau = 1 / tau, tau_ratio = tau * last_inv_tau;
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
      const double *const now = history + 2 * t * n + j, *const before = now - 2 * n;
      s.anchor[j] = now[0], s.logs[j] = now[n];
      s.g[j] = t == 0 ? 0.0 : before[0] + cooling(t - 1) * before[n];
      s.dg[j] = s.sums.per_column(s.dg[j], j);
      s.sums.subtract_column(j, s.dg[j] * tau_ratio);
    }
    __syncthreads();
    s.for_rows([&](int i) {
      double most, log_sum, total = 0;
      s.row<double>(i, inv_tau, most, log_sum);
      if (s.lane == 0) s.f[i] = most + tau * log_sum;
      __syncwarp();
      double* const row = ds + int64_t(i) * n;
      s.for_columns([&](int j) {
        const double change = s.columns_normalised<double>(i, j, inv_tau) * s.dg[j];
        row[j] += change;
        total += change;
      });
      const double d = s.sums.per_row((t == last ? s.df[i] : 0.0) - s.along_row(total, Add()), i);
      if (s.lane == 0) s.sums.subtract_row(i, d * tau_ratio);
      s.for_columns([&](int j) {
        const double change = Streamed::share<double>(((s.score(i, j) - s.g[j]) - most) * inv_tau - log_sum) * d;
        row[j] += change;
        mine[j] -= change;
      });
    });
    s.collect(s.partial, Add(), 0.0, [&](int j, double total) { s.dg[j] = total; });
  }
  s.for_rows([&](int i) {
    s.for_columns([&](int j) {
      const int64_t at = int64_t(i) * n + j;
      put(dscores, scores.dtype, start + at, static_cast<float>(ds[at] * last_inv_tau));
    });
  });
}

}  // namespace
}  // namespace moe
