// Sinkhorn's iteration by scaling k = exp((S - row maximum) / tau), and its backward pass.
//
// From n = 9 on the scaled form may stop early:
// * Forward: when an iteration changes no bit of v, since later ones would not either.
// * Backward: A is the matrix after an iteration's row step, B after its column step; df and dg are the gradients to
//   -log u and -log v (ops/sinkhorn.py). Rows of A and columns of B sum to one, so sum |dg| never grows. An iteration
//   adds B_ij dg_j + A_ij df_i to tau dS_ij, at most 2 sum |dg| in absolute value. With t iterations left, the loop
//   stops if t sum |dg| <= 2^-45 sum |P * dP|: the t iterations would add less than 6e-14 sum |P * dP| to tau dS_ij.
// The scaled backward pass is in double, because the terms of a gradient can cancel. Double is slow on many GPUs, so
// conversions and comparisons are in integers where they are many, and from n = 9 on, with ranges for which float has
// normal numbers, it continues in float where that suffices:
// * u and v: an iteration that changes v by the factors 1 + c_j is followed by one that changes u by 1 / (1 + a_i),
//   a = A c, and v by 1 / (1 + b_j), b = -B^T a. Float computes them with errors of some 2^-24 |c|, and 1 - a is
//   1 / (1 + a) up to a^2. With |c_j| (t + 16) <= 2^-21 and t iterations left, row sums of A and column sums of B are
//   then 1 up to some 2^-45. If no |c_j| is above 2^-53, later iterations have the same u and v.
// * Gradients: errors of 2^-24 in each of the t iterations left add up to at most t (t + 4) / 4 sum |dg| 2^-22 in
//   tau dS_ij. Where t (t + 4) / 4 sum |dg| <= 2^-22 sum |P * dP|, they are at most 2^-44 sum |P * dP|.
#pragma once

#include "moe/cuda/special.cuh"
#include "sinkhorn_tile.cuh"

namespace moe {
namespace {

// Scaled, in float and in double, needs each row of scores / tau to have a range (maximum - minimum) below this.
constexpr float kFloatRange = 60, kDoubleRange = 300;
// Bounds at which the backward pass continues in float or stops (above).
constexpr float kSmallChange = 0x1p-21f, kLastBit = 0x1p-53f, kSmallShare = 0x1p-22f, kNegligible = 0x1p-45f;

// x as double, in integer instructions: a conversion takes as long as two additions of double. Some 2^-127 if x is
// subnormal or zero, and 2^128 if x is infinite, with its sign.
__device__ __forceinline__ double to_double(float x) {
  const int bits = __float_as_int(x);
  return __hiloint2double(((bits >> 3) & 0x8fffffff) + (896 << 20), bits << 29);
}

// x as float, converted once: in a loop nvcc may else convert it anew at each use.
__device__ __forceinline__ float converted(double x) {
  float y = static_cast<float>(x);
  asm volatile("" : "+f"(y));
  return y;
}

// Whether x > 0 and normal, for x >= 0.
__device__ __forceinline__ bool is_positive(float x) { return x > 0; }
__device__ __forceinline__ bool is_positive(double x) { return __double2hiint(x) >= 1 << 20; }

struct Inverse {
  template <class T>
  __device__ T operator()(T total) const {
    return is_positive(total) ? reciprocal(total) : T(0);
  }
};

// exp((score - anchor) / tau) for score <= anchor; 0 for -inf.
template <class T>
struct Exponential;

template <>
struct Exponential<double> {
  double inv_tau;

  __device__ explicit Exponential(double inv_tau) : inv_tau(inv_tau) {}
  __device__ double operator()(float score, float anchor) const { return exp((to_double(score) - anchor) * inv_tau); }
};

// Without float64, of which many GPUs do 1 / 64 as much. 1 / tau is high + low, and `rest` is what x lacks.
template <>
struct Exponential<float> {
  float high, low;

  __device__ explicit Exponential(double inv_tau) : high(inv_tau), low(inv_tau - double(high)) {}
  __device__ float operator()(float score, float anchor) const {
    const float below = score - anchor, x = below * high;
    const float rest = fmaxf(fmaf(below, low, fmaf(below, high, -x)), -1.0f);  // NaN if x is -inf: then -1
    const float y = expf(x);
    return fmaf(y, rest, y);
  }
};

// P = diag(u) k diag(v) with k = exp((S - row maximum) / tau). Padding has k = 0 and, after an iteration, u = v = 0.
template <class T, class Team>
struct Scaled {
  T k[Team::kTileRows][Team::kTileColumns], u[Team::kTileRows], v[Team::kTileColumns];

  template <class Wide>
  __device__ explicit Scaled(const Scaled<Wide, Team>& other) {
    static_assert(sizeof(T) < sizeof(Wide));
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) v[b] = converted(other.v[b]);
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      u[a] = converted(other.u[a]);
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) k[a][b] = converted(other.k[a][b]);
    }
  }
  __device__ Scaled(Team& team, const typename Team::Tile& scores, double inv_tau) {
    const Exponential<T> share(inv_tau);
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      float most = -infinity();
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) most = fmaxf(most, scores[a][b]);
      const float anchor = finite(team.along_row(most, Max()));
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) k[a][b] = share(scores[a][b], anchor);
    }
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) v[b] = T(1);
  }

  // One iteration. Returns whether it changed v; always true without Team::kEarly.
  __device__ bool iterate(Team& team) {
    T before[Team::kTileColumns];
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) before[b] = v[b];
    rows(team), columns(team);
    if constexpr (!Team::kEarly) return true;
    bool changed = false;
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) changed |= v[b] != before[b];
    return team.any(changed);
  }

  // u = 1 / (k v)
  __device__ void rows(Team& team) { times_columns(team, v, u, Inverse()); }

  // v = 1 / (k^T u)
  __device__ void columns(Team& team) { times_rows(team, u, v, Inverse()); }

  // y = finish(k x) and y = finish(k^T x); x and y are different.
  template <class Finish = Same>
  __device__ void times_columns(Team& team, const T (&x)[Team::kTileColumns], T (&y)[Team::kTileRows],
                                Finish finish = {}) const {
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      T total = k[a][0] * x[0];
#pragma unroll
      for (int b = 1; b < Team::kTileColumns; b++) total = fma(k[a][b], x[b], total);
      y[a] = total;
    }
    team.sum_rows(y, finish);
  }
  template <class Finish = Same>
  __device__ void times_rows(Team& team, const T (&x)[Team::kTileRows], T (&y)[Team::kTileColumns],
                             Finish finish = {}) const {
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      T total = k[0][b] * x[0];
#pragma unroll
      for (int a = 1; a < Team::kTileRows; a++) total = fma(k[a][b], x[a], total);
      y[b] = total;
    }
    team.sum_columns(y, finish);
  }
};

// Computes and saves u and v of all iterations that change them. Returns the last of these.
template <class Team>
__device__ int64_t solve(Team& team, Scaled<double, Team>& s, const History<Team>& history, int64_t iterations,
                         bool tame) {
  int64_t t = 0;
  if constexpr (!Team::kEarly) {
    for (; t < iterations; t++) s.iterate(team), history.put(t, 1, s.v);
    return iterations - 1;
  } else {
    double before[Team::kTileColumns];
    for (bool more = true; t < iterations && more; t++) {
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) before[b] = s.v[b];
      s.rows(team), s.columns(team);
      history.put_rows(t, s.u), history.put(t, 1, s.v);
      // In units of the last place v has changed by at least 2^52 times the relative change, and at most twice that.
      const int64_t small = tame ? static_cast<int64_t>(kSmallChange * 0x1p52f / float(iterations - t + 15)) : 0;
      more = false;
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) {
        const int64_t units = __double_as_longlong(s.v[b]) - __double_as_longlong(before[b]);
        more |= static_cast<uint64_t>(units + small) > static_cast<uint64_t>(2 * small);
      }
      more = team.any(more);
    }
    if (!tame) return t - 1;
    const Scaled<float, Team> f(s);
    float change[Team::kTileColumns];
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++)
      change[b] = f.v[b] > 0 ? static_cast<float>(s.v[b] - before[b]) / f.v[b] : 0.0f;
    for (; t < iterations && team.any_above(change, kLastBit); t++) {
      float row_change[Team::kTileRows];
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) change[b] *= f.v[b];
      f.times_columns(team, change, row_change);
#pragma unroll
      for (int a = 0; a < Team::kTileRows; a++) {
        row_change[a] *= -f.u[a];
        s.u[a] = fma(s.u[a], to_double(row_change[a]), s.u[a]);
        row_change[a] *= f.u[a];
      }
      f.times_rows(team, row_change, change);
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) {
        change[b] *= -f.v[b];
        s.v[b] = fma(s.v[b], to_double(change[b]), s.v[b]);
      }
      history.put_rows(t, s.u), history.put(t, 1, s.v);
    }
    return t - 1;
  }
}

// The iterations t, t - 1, ... 0 of the backward pass in float: adds to h. dg: before them. whole: sum |P * dP|.
template <class Team>
__device__ void short_backward(Team& team, const Scaled<double, Team>& s, const History<Team>& history, int64_t t,
                               int64_t last, const double (&wide_dg)[Team::kTileColumns], double whole,
                               double (&wide_h)[Team::kTileRows][Team::kTileColumns]) {
  Scaled<float, Team> f(s);
  const double inv_whole = whole > 0 ? 1 / whole : 0.0;
  float h[Team::kTileRows][Team::kTileColumns] = {}, dg[Team::kTileColumns], left = 0;  // divided by `whole`
#pragma unroll
  for (int b = 0; b < Team::kTileColumns; b++) dg[b] = static_cast<float>(wide_dg[b] * inv_whole), left += fabsf(dg[b]);
  for (; t >= 0 && team.along_row(left, Add()) * (t + 1) > kNegligible; t--) {
    float y[Team::kTileColumns], x[Team::kTileRows];
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      y[b] = dg[b] * f.v[b];
      if (t <= last) f.v[b] = t > 0 ? static_cast<float>(history.get(t - 1, 1, b)) : 1.0f;
    }
    f.times_columns(team, y, x);
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      if (t < last) f.u[a] = static_cast<float>(history.get_row(t, a));
      x[a] *= -f.u[a], x[a] *= f.u[a];
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) h[a][b] = fmaf(f.u[a], y[b], fmaf(x[a], f.v[b], h[a][b]));
    }
    f.times_rows(team, x, dg);
    left = 0;
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) dg[b] *= -f.v[b], left += fabsf(dg[b]);
  }
#pragma unroll
  for (int a = 0; a < Team::kTileRows; a++) {
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) wide_h[a][b] = fma(to_double(h[a][b]), whole, wide_h[a][b]);
  }
}

// `tile` holds scores and receives dscores.
template <class Team>
__device__ void scaled_backward(Team& team, typename Team::Tile& tile, const typename Team::Tile& grad,
                                const History<Team>& history, const Temperatures& cooling, bool tame) {
  const double inv_tau = cooling.inverse_of_last;
  const int64_t iterations = cooling.iterations();
  Scaled<double, Team> s(team, tile, inv_tau);
  const int64_t last = solve(team, s, history, iterations, tame);
  team.sync();
  // h is the gradient to k, df and dg are those to -log u and -log v. An iteration computes u = 1 / (k w) from the
  // previous v, here called w, and then v = 1 / (k^T u). Its backward pass, where * is element by element: y = dg * v,
  // x = u * (df - u * (k y)), h += u y^T + x w^T, df = 0, dg = -w * (k^T x). At the end dS = k * h; all of them are
  // divided by tau from the beginning.
  double h[Team::kTileRows][Team::kTileColumns], df[Team::kTileRows], dg[Team::kTileColumns] = {}, whole = 0;
#pragma unroll
  for (int a = 0; a < Team::kTileRows; a++) {
    df[a] = 0;
    const double from_u = s.u[a] * inv_tau;
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      h[a][b] = from_u * s.v[b] * grad[a][b];
      df[a] = fma(-s.k[a][b], h[a][b], df[a]), dg[b] = fma(-s.k[a][b], h[a][b], dg[b]);
      if constexpr (Team::kEarly) whole = fma(s.k[a][b], fabs(h[a][b]), whole);
    }
  }
  team.sum_rows(df, Same());
  team.sum_columns(dg, Same());
  if constexpr (Team::kEarly) whole = team.sum(whole);
  const double inv_whole = whole == 0 ? 0.0 : 1 / whole;  // NaN stays NaN
  const float enough = tame ? kSmallShare : kNegligible;
  for (int64_t t = iterations - 1; t >= 0; t--) {
    double y[Team::kTileColumns], x[Team::kTileRows];
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      y[b] = dg[b] * s.v[b];
      if (!Team::kEarly || t <= last) s.v[b] = t > 0 ? history.get(t - 1, 1, b) : 1.0;
    }
    if constexpr (!Team::kEarly) s.rows(team);
    s.times_columns(team, y, x);
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      if (Team::kEarly && t < last) s.u[a] = history.get_row(t, a);
      x[a] = s.u[a] * fma(-s.u[a], x[a], df[a]);
      df[a] = 0;
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) h[a][b] = fma(s.u[a], y[b], fma(x[a], s.v[b], h[a][b]));
    }
    s.times_rows(team, x, dg);
    double left = 0;
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      dg[b] *= -s.v[b];
      if constexpr (Team::kEarly) left += fabs(dg[b]);
    }
    if constexpr (Team::kEarly) {
      const float all = team.along_row(static_cast<float>(left * inv_whole), Add());
      const float share = all * float(t) * (tame ? 0.25f * float(t) + 1 : 1.0f);
      if (!(share <= enough)) continue;  // also if it is NaN
      if (tame) short_backward(team, s, history, t - 1, last, dg, whole, h);
      break;
    }
  }
#pragma unroll
  for (int a = 0; a < Team::kTileRows; a++) {
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) tile[a][b] = static_cast<float>(s.k[a][b] * h[a][b]);
  }
}

}  // namespace
}  // namespace moe
