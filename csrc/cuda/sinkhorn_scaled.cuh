// Sinkhorn's iteration by scaling k = exp((S - row maximum) / tau), and its backward pass.
//
// From n = 9 on the scaled form may stop early:
// * Forward: when an iteration changes no bit of v, since later ones would not either.
// * Backward: A is the matrix after an iteration's row step, B after its column step; df and dg are the gradients to
//   -log u and -log v (ops/sinkhorn.py). Rows of A and columns of B sum to one, so sum |dg| never grows. An iteration
//   adds B_ij dg_j + A_ij df_i to tau dS_ij, at most 2 sum |dg| in absolute value. With t iterations left, the loop
//   stops if t sum |dg| <= 2^-45 sum |P * dP|: the t iterations would add less than 6e-14 sum |P * dP| to tau dS_ij.
// The scaled backward pass is in double, because the terms of a gradient can cancel. Double is slow on many GPUs, so from
// n = 9 on, with ranges for which float has normal numbers, it continues in float where that suffices:
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

struct Inverse {
  template <class T>
  __device__ T operator()(T total) const {
    return total > T(0) ? reciprocal(total) : T(0);
  }
};

// P = diag(u) k diag(v) with k = exp((S - row maximum) / tau). Padding has k = 0 and, after an iteration, u = v = 0.
template <class T, class Team>
struct Scaled {
  T k[Team::kTileRows][Team::kTileColumns], u[Team::kTileRows], v[Team::kTileColumns];

  template <class Other>
  __device__ explicit Scaled(const Scaled<Other, Team>& other) {
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) v[b] = static_cast<T>(other.v[b]);
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      u[a] = static_cast<T>(other.u[a]);
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) k[a][b] = static_cast<T>(other.k[a][b]);
    }
  }
  __device__ Scaled(Team& team, const typename Team::Tile& scores, double inv_tau) {
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      float most = -infinity();
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) most = fmaxf(most, scores[a][b]);
      const double anchor = finite(team.along_row(most, Max()));
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) exponential((scores[a][b] - anchor) * inv_tau, k[a][b]);
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
    float change[Team::kTileColumns];
    do {
      double before[Team::kTileColumns];
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) before[b] = s.v[b];
      const bool changed = s.iterate(team);
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++)
        change[b] = s.v[b] > 0 ? static_cast<float>(s.v[b] - before[b]) / static_cast<float>(s.v[b]) : 0.0f;
      history.put_rows(t, s.u), history.put(t, 1, s.v);
      t++;
      if (!changed) return t - 1;
    } while (t < iterations && !(tame && !team.any_above(change, kSmallChange / float(iterations - t + 16))));
    const Scaled<float, Team> f(s);
    for (; t < iterations && team.any_above(change, kLastBit); t++) {
      float row_change[Team::kTileRows];
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) change[b] *= f.v[b];
      f.times_columns(team, change, row_change);
#pragma unroll
      for (int a = 0; a < Team::kTileRows; a++) {
        row_change[a] *= -f.u[a];
        s.u[a] = fma(s.u[a], double(row_change[a]), s.u[a]);
        row_change[a] *= f.u[a];
      }
      f.times_rows(team, row_change, change);
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) {
        change[b] *= -f.v[b];
        s.v[b] = fma(s.v[b], double(change[b]), s.v[b]);
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
      f.v[b] = t > 0 ? static_cast<float>(history.get(min(t - 1, last), 1, b)) : 1.0f;
    }
    f.times_columns(team, y, x);
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      f.u[a] = static_cast<float>(history.get_row(min(t, last), a));
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
    for (int b = 0; b < Team::kTileColumns; b++) wide_h[a][b] = fma(double(h[a][b]), whole, wide_h[a][b]);
  }
}

// `tile` holds scores and receives dscores.
template <class Team>
__device__ void scaled_backward(Team& team, typename Team::Tile& tile, const typename Team::Tile& grad,
                                const History<Team>& history, const Cooling& cooling, bool tame) {
  const double inv_tau = 1 / cooling(0);
  const int64_t iterations = cooling.iterations();
  Scaled<double, Team> s(team, tile, inv_tau);
  const int64_t last = solve(team, s, history, iterations, tame);
  team.sync();
  // h is the gradient to k, df and dg are those to -log u and -log v. An iteration computes u = 1 / (k w) from the
  // previous v, here called w, and then v = 1 / (k^T u). Its backward pass, where * is element by element: y = dg * v,
  // x = u * (df - u * (k y)), h += u y^T + x w^T, df = 0, dg = -w * (k^T x). At the end dS = k * h / tau.
  double h[Team::kTileRows][Team::kTileColumns], df[Team::kTileRows], dg[Team::kTileColumns] = {}, whole = 0;
#pragma unroll
  for (int a = 0; a < Team::kTileRows; a++) {
    df[a] = 0;
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      h[a][b] = s.u[a] * s.v[b] * grad[a][b];
      const double weight = s.k[a][b] * h[a][b];
      df[a] -= weight, dg[b] -= weight;
      if constexpr (Team::kEarly) whole += fabs(weight);
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
      s.v[b] = t > 0 ? history.get(min(t - 1, last), 1, b) : 1.0;
    }
    if constexpr (!Team::kEarly) s.rows(team);
    s.times_columns(team, y, x);
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      if constexpr (Team::kEarly) s.u[a] = history.get_row(min(t, last), a);
      x[a] = s.u[a] * fma(-s.u[a], x[a], df[a]);
      df[a] = 0;
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) h[a][b] = fma(s.u[a], y[b], fma(x[a], s.v[b], h[a][b]));
    }
    s.times_rows(team, x, dg);
    float left = 0;
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      dg[b] *= -s.v[b];
      if constexpr (Team::kEarly) left += fabsf(static_cast<float>(dg[b] * inv_whole));
    }
    if constexpr (Team::kEarly) {
      const float share = team.along_row(left, Add()) * float(t) * (tame ? 0.25f * float(t) + 1 : 1.0f);
      if (!(share <= enough)) continue;  // also if it is NaN
      if (tame) short_backward(team, s, history, t - 1, last, dg, whole, h);
      break;
    }
  }
#pragma unroll
  for (int a = 0; a < Team::kTileRows; a++) {
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) tile[a][b] = static_cast<float>(s.k[a][b] * h[a][b] * inv_tau);
  }
}

}  // namespace
}  // namespace moe
