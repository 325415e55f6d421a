// Sinkhorn's iteration on potentials in units of scores, in double, taking exp of differences every time. A potential is
// kept as an anchor, the largest of what is summed, and the logarithm of the sum after it: added up at once they would
// lose to rounding what 1 / tau then makes large.
#pragma once

#include <algorithm>
#include <limits>

#include "moe/cooling.h"
#include "sinkhorn_stage.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr double kNegligible = -64;  // exp of this times 1 / tau = 1e7 is below 1e-20 of what it is added to

// The logarithm of a sum after its largest summand; nothing to sum gives an anchor of 0 and a logarithm of 0.
inline void finish(Vec<double>* anchor, Vec<double>* log_sum, Vec<double> total) {
  const auto empty = total == 0.0;
  *anchor = empty ? Vec<double>{} : *anchor;
  *log_sum = empty ? Vec<double>{} : log(empty ? broadcast(1.0) : total);
}

inline Vec<double> finite(Vec<double> most) { return most > -std::numeric_limits<double>::max() ? most : Vec<double>{}; }

// Both potentials after an iteration: f = anchor + tau * log of a row's sum (n), g likewise of a column (width).
template <bool packed>
struct Potentials {
  Rows<packed, double> row_anchor, row_log, f;
  double *column_anchor, *column_log, *g;

  Potentials(int64_t n, int64_t width, Arena arena)
      : row_anchor(Rows<packed, double>::take(n, &arena)), row_log(Rows<packed, double>::take(n, &arena)),
        f(Rows<packed, double>::take(n, &arena)), column_anchor(arena.take<double>(width)),
        column_log(arena.take<double>(width)), g(arena.take<double>(width)) {}

  static int64_t bytes(int64_t n, int64_t width) {
    return 3 * (round_up(8 * n * (packed ? kLanes<double> : 1), 64) + round_up(8 * width, 64));
  }

  // log of the matrix with its rows normalised, given the column potential before; then of it with columns normalised.
  Vec<double> rows_normal(Vec<double> score, const double* g_before, int64_t i, int64_t j, double inv_tau) const {
    return ((score - load(g_before + j * kLanes<double>)) - row_anchor[i]) * inv_tau - row_log[i];
  }
  Vec<double> columns_normal(Vec<double> score, int64_t i, int64_t j, double inv_tau) const {
    const int64_t at = j * kLanes<double>;
    return ((score - f[i]) - load(column_anchor + at)) * inv_tau - load(column_log + at);
  }
};

template <bool packed, class Wide>
void iterate(const Part<packed, Wide, double>& part, double tau, const double* g_before, const Potentials<packed>& p) {
  constexpr int w = kLanes<double>;
  const double inv_tau = 1 / tau;
  const Vec<double> lowest = broadcast(-std::numeric_limits<double>::infinity());
  for (int64_t i = 0; i < part.n; ++i) {
    Vec<double> most = lowest, total{}, log_sum;
    for (int64_t j = 0; j < part.blocks; ++j) most = max(most, part.score(i, j) - load(g_before + j * w));
    most = finite(row_max<packed, double>(most));
    for (int64_t j = 0; j < part.blocks; ++j) {
      const Vec<double> x = ((part.score(i, j) - load(g_before + j * w)) - most) * inv_tau;
      if (any_from(x, kNegligible)) total += exp(x);
    }
    finish(&most, &log_sum, row_sum<packed, double>(total));
    p.row_anchor.set(i, most), p.row_log.set(i, log_sum), p.f.set(i, most + tau * log_sum);
  }
  for (int64_t j = 0; j < part.blocks; ++j) store(p.column_anchor + j * w, lowest), store(p.column_log + j * w, Vec<double>{});
  for (int64_t i = 0; i < part.n; ++i) {
    const Vec<double> f = p.f[i];
    for (int64_t j = 0; j < part.blocks; ++j)
      store(p.column_anchor + j * w, max(load(p.column_anchor + j * w), part.score(i, j) - f));
  }
  for (int64_t j = 0; j < part.blocks; ++j) store(p.column_anchor + j * w, finite(load(p.column_anchor + j * w)));
  for (int64_t i = 0; i < part.n; ++i) {
    const Vec<double> f = p.f[i];
    for (int64_t j = 0; j < part.blocks; ++j) {
      const Vec<double> x = ((part.score(i, j) - f) - load(p.column_anchor + j * w)) * inv_tau;
      if (any_from(x, kNegligible)) store(p.column_log + j * w, load(p.column_log + j * w) + exp(x));
    }
  }
  for (int64_t j = 0; j < part.blocks; ++j) {
    Vec<double> anchor = load(p.column_anchor + j * w), log_sum;
    finish(&anchor, &log_sum, load(p.column_log + j * w));
    store(p.column_anchor + j * w, anchor), store(p.column_log + j * w, log_sum);
    store(p.g + j * w, anchor + tau * log_sum);
  }
}

template <bool packed, class Wide>
void log_forward(const Part<packed, Wide, double>& part, int64_t iterations, const Cooling& taus,
                 const Stage<packed, Wide>& out, Arena arena) {
  if (!part.wanted) return;
  const Potentials<packed> p(part.n, part.width(), arena);
  std::fill(p.g, p.g + part.width(), 0.0);
  for (int64_t t = 0; t < iterations; ++t) iterate(part, taus(t), p.g, p);
  const double inv_tau = 1 / taus(iterations - 1);
  for (int64_t i = 0; i < part.n; ++i)
    for (int64_t j = 0; j < part.blocks; ++j) {
      const Vec<double> value = exp(p.columns_normal(part.score(i, j), i, j, inv_tau));
      part.put(out, i, j, value);
    }
}

template <bool packed, class Wide>
void log_backward(const Part<packed, Wide, double>& part, int64_t iterations, const Cooling& taus,
                  const Stage<packed, Wide>& grad, const Stage<packed, Wide>& out, Arena arena) {
  if (!part.wanted) return;
  constexpr int w = kLanes<double>;
  const int64_t n = part.n, blocks = part.blocks, width = part.width();
  double *ds = arena.take<double>(n * width), *dg = arena.take<double>(width), *next = arena.take<double>(width);
  double* start = arena.take<double>(width);
  const auto df = Rows<packed, double>::take(n, &arena);
  const auto state = [&](int64_t t) { return Potentials<packed>(n, width, arena.after(t * Potentials<packed>::bytes(n, width))); };
  const auto g_before = [&](int64_t t) { return t == 0 ? start : state(t - 1).g; };
  std::fill(start, start + width, 0.0);
  for (int64_t t = 0; t < iterations; ++t) iterate(part, taus(t), g_before(t), state(t));

  const double last_inv_tau = 1 / taus(iterations - 1);
  const Potentials<packed> last = state(iterations - 1);
  std::fill(dg, dg + width, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    Vec<double> total{};
    for (int64_t j = 0; j < blocks; ++j) {
      const Vec<double> p = exp(last.columns_normal(part.score(i, j), i, j, last_inv_tau));
      const Vec<double> weight = p * part.at(grad, i, j);
      store(ds + i * width + j * w, weight);
      store(dg + j * w, load(dg + j * w) - weight);
      total -= weight;
    }
    df.set(i, row_sum<packed, double>(total));
  }
  for (int64_t t = iterations; t-- > 0; std::swap(dg, next)) {
    const Potentials<packed> p = state(t);
    const double *before = g_before(t), inv_tau = 1 / taus(t);
    std::fill(next, next + width, 0.0);
    for (int64_t i = 0; i < n; ++i) {
      double* row = ds + i * width;
      Vec<double> total{};
      for (int64_t j = 0; j < blocks; ++j) {
        const Vec<double> x = p.columns_normal(part.score(i, j), i, j, inv_tau);
        if (!any_from(x, kNegligible)) continue;
        const Vec<double> change = exp(x) * load(dg + j * w);
        store(row + j * w, load(row + j * w) + change);
        total += change;
      }
      const Vec<double> d = df[i] - row_sum<packed, double>(total);
      df.set(i, Vec<double>{});
      for (int64_t j = 0; j < blocks; ++j) {
        const Vec<double> x = p.rows_normal(part.score(i, j), before, i, j, inv_tau);
        if (!any_from(x, kNegligible)) continue;
        const Vec<double> change = exp(x) * d;
        store(row + j * w, load(row + j * w) + change);
        store(next + j * w, load(next + j * w) - change);
      }
    }
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < blocks; ++j)
      part.put(out, i, j, load(ds + i * width + j * w) * last_inv_tau);
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
