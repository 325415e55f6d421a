// Sinkhorn's iteration with potentials in double, and its backward pass.
#pragma once

#include "sinkhorn_tile.cuh"

namespace moe {
namespace {

// y = exp(x), computed in the type of y.
__device__ __forceinline__ void exponential(double x, float& y) { y = expf(static_cast<float>(x)); }
__device__ __forceinline__ void exponential(double x, double& y) { y = exp(x); }

// P = exp((S - f - g) / tau) with potentials in two parts: f = row_anchor + tau row_log, and g likewise. row_anchor is
// the maximum of S - g over the row, row_log = log(sum of exp((S - g - row_anchor) / tau) / prescribed sum); both are 0
// if all scores of the row are -inf. The parts are stored apart because 1 / tau would magnify the rounding error of
// their sum.
// T: the type of the exponentials, and of each thread's sums of them.
template <class T, class Team>
struct Potentials {
  const Sums& sums;
  double row_anchor[Team::kTileRows], row_log[Team::kTileRows], f[Team::kTileRows] = {};
  double column_anchor[Team::kTileColumns] = {}, column_log[Team::kTileColumns] = {}, g[Team::kTileColumns] = {};

  __device__ explicit Potentials(const Sums& sums) : sums(sums) {}

  // Does one iteration and returns true. But if the row sums before the call (in the first call also the column sums)
  // are within a tolerance >= 0, returns false and keeps f, g and the parts of g. A row's sum before the call is its
  // prescribed sum times exp((new f - old f) / tau).
  __device__ bool iterate(Team& team, const typename Team::Tile& scores, double tau, bool first) {
    double before[Team::kTileRows];
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) before[a] = f[a];
    rows(team, scores, tau);
    if (sums.tolerance >= 0) {
      double off = first ? columns_error(team, scores, tau) : 0.0;
#pragma unroll
      for (int a = 0; a < Team::kTileRows; a++)
        off = Max()(off, sums.row_error(exp((f[a] - before[a]) / tau), team.row + a));
      if (team.largest(off) <= sums.tolerance) {
#pragma unroll
        for (int a = 0; a < Team::kTileRows; a++) f[a] = before[a];
        return false;
      }
    }
    columns(team, scores, tau);
    return true;
  }

  __device__ void rows(Team& team, const typename Team::Tile& scores, double tau) {
    const double inv_tau = 1 / tau;
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      double most = scores[a][0] - g[0];
#pragma unroll
      for (int b = 1; b < Team::kTileColumns; b++) most = Max()(most, scores[a][b] - g[b]);
      row_anchor[a] = finite(team.along_row(most, Max()));
      T total = 0;
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) total += share(((scores[a][b] - g[b]) - row_anchor[a]) * inv_tau);
      row_log[a] = log_of(sums.per_row(team.along_row(static_cast<double>(total), Add()), team.row + a));
      f[a] = row_anchor[a] + tau * row_log[a];
    }
  }

  __device__ void columns(Team& team, const typename Team::Tile& scores, double tau) {
    const double inv_tau = 1 / tau;
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      column_anchor[b] = scores[0][b] - f[0];
#pragma unroll
      for (int a = 1; a < Team::kTileRows; a++) column_anchor[b] = Max()(column_anchor[b], scores[a][b] - f[a]);
    }
    team.along_columns(column_anchor, Max());
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      column_anchor[b] = finite(column_anchor[b]);
      T total = 0;
#pragma unroll
      for (int a = 0; a < Team::kTileRows; a++) total += share(((scores[a][b] - f[a]) - column_anchor[b]) * inv_tau);
      column_log[b] = static_cast<double>(total);
    }
    team.along_columns(column_log, Add());
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      column_log[b] = log_of(sums.per_column(column_log[b], team.column + b));
      g[b] = column_anchor[b] + tau * column_log[b];
    }
  }

  // rows_normalised: an element of P after rows(), with the g that rows() used. columns_normalised: after columns().
  __device__ T rows_normalised(float score, int a, int b, double inv_tau) const {
    return share(((score - g[b]) - row_anchor[a]) * inv_tau - row_log[a]);
  }
  __device__ T columns_normalised(float score, int a, int b, double inv_tau) const {
    return share(((score - f[a]) - column_anchor[b]) * inv_tau - column_log[b]);
  }

  __device__ static double log_of(double total) { return total > 0 ? log(total) : 0.0; }

 private:
  // The largest error of the column sums of exp(scores / tau) over this thread's columns with a score above -inf.
  __device__ double columns_error(Team& team, const typename Team::Tile& scores, double tau) const {
    double total[Team::kTileColumns] = {}, off = 0;
    float high[Team::kTileColumns];
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      high[b] = -infinity();
#pragma unroll
      for (int a = 0; a < Team::kTileRows; a++) {
        high[b] = Max()(high[b], scores[a][b]);
        total[b] += exp(scores[a][b] / tau);
      }
    }
    team.along_columns(total, Add());
    team.along_columns(high, Max());
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      if (high[b] > -infinity()) off = Max()(off, sums.column_error(total[b], team.column + b));
    }
    return off;
  }

  __device__ static T share(double x) {
    T y;
    exponential(x, y);
    return y;
  }
};

template <class Team>
__device__ void log_backward(Team& team, typename Team::Tile& tile, const typename Team::Tile& grad,
                             const History<Team>& history, const Temperatures& cooling, const Sums& sums) {
  Potentials<double, Team> s(sums);
  int64_t iterations = 0;
  while (iterations < cooling.iterations() && s.iterate(team, tile, cooling(iterations), iterations == 0)) {
    history.put(iterations, 0, s.column_anchor), history.put(iterations, 1, s.column_log);
    iterations++;
  }
  team.sync();
  double ds[Team::kTileRows][Team::kTileColumns], df[Team::kTileRows], dg[Team::kTileColumns] = {};
  const double last_inv_tau = 1 / cooling(cooling.iterations() - 1);
#pragma unroll
  for (int a = 0; a < Team::kTileRows; a++) {
    df[a] = 0;
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      ds[a][b] = s.columns_normalised(tile[a][b], a, b, last_inv_tau) * grad[a][b];
      df[a] -= ds[a][b], dg[b] -= ds[a][b];
    }
    df[a] = team.along_row(df[a], Add());
  }
  team.along_columns(dg, Add());
  for (int64_t t = iterations - 1; t >= 0; t--) {
    const double tau = cooling(t), inv_tau = 1 / tau, tau_ratio = tau * last_inv_tau;
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      dg[b] = sums.per_column(dg[b], team.column + b);
      if (team.row == 0) sums.subtract_column(team.column + b, dg[b] * tau_ratio);
      s.column_anchor[b] = history.get(t, 0, b), s.column_log[b] = history.get(t, 1, b);
      s.g[b] = t > 0 ? history.get(t - 1, 0, b) + cooling(t - 1) * history.get(t - 1, 1, b) : 0.0;
    }
    s.rows(team, tile, tau);
    double next[Team::kTileColumns] = {};
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      double total = 0;
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) {
        const double change = s.columns_normalised(tile[a][b], a, b, inv_tau) * dg[b];
        ds[a][b] += change, total += change;
      }
      const double d = sums.per_row(df[a] - team.along_row(total, Add()), team.row + a);
      if (team.column == 0) sums.subtract_row(team.row + a, d * tau_ratio);
      df[a] = 0;
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) {
        const double change = s.rows_normalised(tile[a][b], a, b, inv_tau) * d;
        ds[a][b] += change, next[b] -= change;
      }
    }
    team.along_columns(next, Add());
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) dg[b] = next[b];
  }
#pragma unroll
  for (int a = 0; a < Team::kTileRows; a++) {
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) tile[a][b] = static_cast<float>(ds[a][b] * last_inv_tau);
  }
}

}  // namespace
}  // namespace moe
