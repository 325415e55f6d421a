// Sinkhorn's iteration on potentials f of rows and g of columns, in double: P = exp((score - f - g) / tau). For each
// row, f = anchor + tau log_sum with anchor = max(score - g) and log_sum = log(sum of exp((score - g - anchor) / tau)).
// For each column, g follows from f in the same way. If sums are prescribed, the sum in log_sum is divided by the
// prescribed sum of the row or column. Anchor and log_sum are stored separately, because 1 / tau would magnify the
// rounding error of anchor + tau log_sum.
#pragma once

#include <algorithm>
#include <limits>

#include "moe/common/cooling.h"
#include "sinkhorn_stage.h"

namespace moe {
namespace MOE_ISA {
namespace {

// summand(x) is 0 for x below this; exp(-64) is 1.6e-28.
constexpr double kNegligible = -64;

// exp(x), or exactly 0 if x < kNegligible. Callers skip a vector if all its lanes are below kNegligible. In other
// vectors such a lane gives 0 too. If packed, each lane holds another matrix, and no result depends on the other lanes.
inline Vec<double> summand(Vec<double> x) { return x < kNegligible ? Vec<double>{} : exp(x); }

// *log_sum = log(total). If total is 0 (all scores of a row or column are -inf), *anchor and *log_sum become 0. If total
// is infinite (the prescribed sum is 0), *log_sum is infinite, where log would give 709.
inline void take_log(Vec<double>* anchor, Vec<double>* log_sum, Vec<double> total) {
  const Vec<double> infinity = broadcast(std::numeric_limits<double>::infinity());
  const auto empty = total == 0.0;
  *anchor = empty ? Vec<double>{} : *anchor;
  *log_sum = empty ? Vec<double>{} : total == infinity ? infinity : log(empty ? broadcast(1.0) : total);
}

// x / sum, or 0 where the sum is 0: a row or column with the prescribed sum 0 has zeros alone, and passes no gradient.
inline Vec<double> share_of(Vec<double> x, Vec<double> sum) { return sum == 0.0 ? Vec<double>{} : x / sum; }

// `most`, or 0 if it is not above the lowest finite double: a maximum of -inf becomes 0.
inline Vec<double> finite(Vec<double> most) {
  return most > -std::numeric_limits<double>::max() ? most : Vec<double>{};
}

template <bool packed>
struct Sums {
  RowValues<packed, double> rows, drows;
  double *columns, *dcolumns;
  double tolerance;  // negative: none

  Sums(int64_t n, int64_t width, double tolerance, Arena* arena)
      : rows(RowValues<packed, double>::take(n, arena)), drows(RowValues<packed, double>::take(n, arena)),
        columns(arena->take<double>(width)), dcolumns(arena->take<double>(width)), tolerance(tolerance) {
    const int64_t count = packed ? width : n;
    std::fill(rows.data, rows.data + count, 1.0), std::fill(drows.data, drows.data + count, 0.0);
    std::fill(columns, columns + width, 1.0), std::fill(dcolumns, dcolumns + width, 0.0);
  }
  void read(const double* from_rows, const double* from_columns, int64_t n, int64_t lane) const {
    for (int64_t i = 0; i < n; ++i) rows.data[at(i, lane)] = from_rows[i], columns[at(i, lane)] = from_columns[i];
  }
  void write(double* to_rows, double* to_columns, int64_t n, int64_t lane, bool broken) const {
    for (int64_t i = 0; i < n; ++i) {
      to_rows[i] = broken ? std::numeric_limits<double>::quiet_NaN() : drows.data[at(i, lane)];
      to_columns[i] = broken ? std::numeric_limits<double>::quiet_NaN() : dcolumns[at(i, lane)];
    }
  }

 private:
  static int64_t at(int64_t i, int64_t lane) { return packed ? i * kLanes<double> + lane : i; }
};

// The potentials after an iteration, f of rows (n) and g of columns (width), with their anchors and log_sums. `updated`
// is 1 in the lanes of matrices that the iteration updated, and 0 in those of matrices within the tolerance.
template <bool packed>
struct Potentials {
  RowValues<packed, double> row_anchor, row_log, f;
  double *column_anchor, *column_log, *g, *updated;

  Potentials(int64_t n, int64_t width, Arena arena)
      : row_anchor(RowValues<packed, double>::take(n, &arena)), row_log(RowValues<packed, double>::take(n, &arena)),
        f(RowValues<packed, double>::take(n, &arena)), column_anchor(arena.take<double>(width)),
        column_log(arena.take<double>(width)), g(arena.take<double>(width)),
        updated(arena.take<double>(kLanes<double>)) {}

  static int64_t bytes(int64_t n, int64_t width) {
    return 3 * (round_up(8 * n * (packed ? kLanes<double> : 1), 64) + round_up(8 * width, 64)) + 64;
  }

  void clear(int64_t n, int64_t width) const {
    for (const auto& each : {row_anchor, row_log, f}) std::fill(each.data, each.data + (packed ? width : n), 0.0);
    for (double* each : {column_anchor, column_log, g}) std::fill(each, each + width, 0.0);
    store(updated, broadcast(1.0));
  }
  void restore(const Potentials& before, int64_t n, int64_t width) const {
    const auto updates = load(updated) != 0.0;
    for (int64_t i = 0; i < n; ++i) {
      row_anchor.set(i, updates ? row_anchor[i] : before.row_anchor[i]);
      row_log.set(i, updates ? row_log[i] : before.row_log[i]);
      f.set(i, updates ? f[i] : before.f[i]);
    }
    for (int64_t j = 0; j < width; j += kLanes<double>) {
      store(column_anchor + j, updates ? load(column_anchor + j) : load(before.column_anchor + j));
      store(column_log + j, updates ? load(column_log + j) : load(before.column_log + j));
      store(g + j, updates ? load(g + j) : load(before.g + j));
    }
  }

  // Logarithms of the matrix elements in vector j of row i: after the row step of an iteration (g_before: g before the
  // iteration), and after its column step.
  Vec<double> log_rows_normalised(Vec<double> score, const double* g_before, int64_t i, int64_t j,
                                  double inv_tau) const {
    return ((score - load(g_before + j * kLanes<double>)) - row_anchor[i]) * inv_tau - row_log[i];
  }
  Vec<double> log_columns_normalised(Vec<double> score, int64_t i, int64_t j, double inv_tau) const {
    const int64_t at = j * kLanes<double>;
    return ((score - f[i]) - load(column_anchor + at)) * inv_tau - load(column_log + at);
  }
};

// Largest |column sum of exp(score / tau) - prescribed sum| of a matrix. Columns of scores that are all
// -inf are left out.
template <bool packed, class Wide>
Vec<double> columns_error(const Part<packed, Wide, double>& part, double inv_tau, const Sums<packed>& sums) {
  Vec<double> most{};
  for (int64_t j = 0; j < part.blocks; ++j) {
    Vec<double> total{}, high = broadcast(-std::numeric_limits<double>::infinity());
    for (int64_t i = 0; i < part.n; ++i) {
      const Vec<double> x = part.score(i, j) * inv_tau;
      high = max(high, x), total += exp(x < 700.0 ? x : broadcast(700.0));
    }
    const Vec<double> off = total - load(sums.columns + j * kLanes<double>);
    most = max(most, high < -std::numeric_limits<double>::max() ? Vec<double>{} : max(off, -off));
  }
  return row_max<packed, double>(most);
}

// Sets p.updated: 1 if the previous iteration (if any) updated the matrix, and a sum was off by more than the tolerance
// before this iteration; else 0. Before it a row sum was the prescribed sum times exp((f - old f) / tau), as the
// iteration made it the prescribed one (with a tolerance, tau is constant). Column sums can be off only before the
// first iteration, since an iteration ends with the columns.
template <bool packed, class Wide>
void decide_update(const Part<packed, Wide, double>& part, double tau, const Potentials<packed>& before,
                   const Potentials<packed>& p, const Sums<packed>& sums, bool first) {
  const double inv_tau = 1 / tau;
  Vec<double> most = first ? columns_error(part, inv_tau, sums) : Vec<double>{};
  for (int64_t i = 0; i < part.n; ++i) {
    const Vec<double> x = (p.row_anchor[i] - before.row_anchor[i]) * inv_tau + (p.row_log[i] - before.row_log[i]);
    const Vec<double> off = sums.rows[i] * (exp(x < 700.0 ? x : broadcast(700.0)) - 1.0);
    most = max(most, max(off, -off));
  }
  store(p.updated, load(before.updated) != 0.0 && most > sums.tolerance ? broadcast(1.0) : Vec<double>{});
}

// One iteration: f from g, then g from f. If `sums` is null, all sums are 1.
template <bool packed, class Wide>
void iterate(const Part<packed, Wide, double>& part, double tau, const Potentials<packed>& before,
             const Potentials<packed>& p, const Sums<packed>* sums, bool first) {
  constexpr int w = kLanes<double>;
  const double inv_tau = 1 / tau, *const g_before = before.g;
  const Vec<double> lowest = broadcast(-std::numeric_limits<double>::infinity());
  for (int64_t i = 0; i < part.n; ++i) {
    Vec<double> most = lowest, total{}, log_sum;
    for (int64_t j = 0; j < part.blocks; ++j) most = max(most, part.score(i, j) - load(g_before + j * w));
    most = finite(row_max<packed, double>(most));
    for (int64_t j = 0; j < part.blocks; ++j) {
      const Vec<double> x = ((part.score(i, j) - load(g_before + j * w)) - most) * inv_tau;
      if (any_from(x, kNegligible)) total += summand(x);
    }
    total = row_sum<packed, double>(total);
    take_log(&most, &log_sum, sums == nullptr ? total : total / sums->rows[i]);
    p.row_anchor.set(i, most), p.row_log.set(i, log_sum), p.f.set(i, most + tau * log_sum);
  }
  for (int64_t j = 0; j < part.blocks; ++j)
    store(p.column_anchor + j * w, lowest), store(p.column_log + j * w, Vec<double>{});
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
      if (any_from(x, kNegligible)) store(p.column_log + j * w, load(p.column_log + j * w) + summand(x));
    }
  }
  for (int64_t j = 0; j < part.blocks; ++j) {
    Vec<double> anchor = load(p.column_anchor + j * w), log_sum;
    const Vec<double> total = load(p.column_log + j * w);
    take_log(&anchor, &log_sum, sums == nullptr ? total : total / load(sums->columns + j * w));
    store(p.column_anchor + j * w, anchor), store(p.column_log + j * w, log_sum);
    store(p.g + j * w, anchor + tau * log_sum);
  }
  store(p.updated, broadcast(1.0));
  if (sums != nullptr && sums->tolerance >= 0) {
    decide_update(part, tau, before, p, *sums, first);
    p.restore(before, part.n, part.width());
  }
}

// Stops early after an iteration that updated no matrix. Returns the number of iterations done.
// state(t): the Potentials after iteration t; t = -1: before the first.
template <bool packed, class Wide, class State>
int64_t iterate_all(const Part<packed, Wide, double>& part, const Cooling& taus, const Sums<packed>* sums,
                    State state) {
  state(-1).clear(part.n, part.width());
  int64_t t = 0;
  for (; t < taus.iterations() && any_from(load(state(t - 1).updated), 1.0); ++t)
    iterate(part, taus(t), state(t - 1), state(t), sums, t == 0);
  return t;
}

template <bool packed, class Wide>
void log_forward(const Part<packed, Wide, double>& part, const Cooling& taus, const Sums<packed>* sums, Arena arena) {
  if (!part.wanted) return;
  const auto state = [&](int64_t t) {  // two buffers, used alternately
    return Potentials<packed>(part.n, part.width(),
                              arena.after((t & 1) * Potentials<packed>::bytes(part.n, part.width())));
  };
  const Potentials<packed> p = state(iterate_all(part, taus, sums, state) - 1);
  const double inv_tau = 1 / taus(taus.iterations() - 1);
  for (int64_t i = 0; i < part.n; ++i)
    for (int64_t j = 0; j < part.blocks; ++j) {
      const Vec<double> value = exp(p.log_columns_normalised(part.score(i, j), i, j, inv_tau));
      part.put(i, j, value);
    }
}

template <bool packed, class Wide>
void log_backward(const Part<packed, Wide, double>& part, const Cooling& taus, const Sums<packed>* sums,
                  const Stage<packed, Wide>& grad, Arena arena) {
  if (!part.wanted) return;
  constexpr int w = kLanes<double>;
  const int64_t n = part.n, blocks = part.blocks, width = part.width();
  double *ds = arena.take<double>(n * width), *dg = arena.take<double>(width), *next = arena.take<double>(width);
  const auto df = RowValues<packed, double>::take(n, &arena);
  const auto state = [&](int64_t t) {
    return Potentials<packed>(n, width, arena.after((t + 1) * Potentials<packed>::bytes(n, width)));
  };
  const int64_t iterations = iterate_all(part, taus, sums, state);

  const double last_inv_tau = 1 / taus(taus.iterations() - 1);
  const Potentials<packed> last = state(iterations - 1);
  std::fill(dg, dg + width, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    Vec<double> total{};
    for (int64_t j = 0; j < blocks; ++j) {
      const Vec<double> p = exp(last.log_columns_normalised(part.score(i, j), i, j, last_inv_tau));
      const Vec<double> weight = p * part.at(grad, i, j);
      store(ds + i * width + j * w, weight);
      store(dg + j * w, load(dg + j * w) - weight);
      total -= weight;
    }
    df.set(i, row_sum<packed, double>(total));
  }
  for (int64_t t = iterations; t-- > 0; std::swap(dg, next)) {
    const Potentials<packed> p = state(t);
    const double *before = state(t - 1).g, inv_tau = 1 / taus(t);
    // Gradients of prescribed sums: f has the term -tau_t log(row sum), and df is the gradient of f / (last tau). So a
    // row sum's gradient is -df (tau_t / last tau) / (row sum), with df of this iteration; likewise for columns.
    const double tau_ratio = taus(t) * last_inv_tau;
    const auto updates = load(p.updated) != 0.0;
    // A matrix that iteration t did not update keeps df and dg. Its dg is copied to `next`, the dg for t - 1.
    std::fill(next, next + width, 0.0);
    for (int64_t j = 0; sums != nullptr && j < width; j += w) {
      const Vec<double> all = load(dg + j), share = updates ? share_of(all, load(sums->columns + j)) : Vec<double>{};
      store(next + j, updates ? Vec<double>{} : all), store(dg + j, share);
      store(sums->dcolumns + j, load(sums->dcolumns + j) - share * tau_ratio);
    }
    for (int64_t i = 0; i < n; ++i) {
      double* row = ds + i * width;
      Vec<double> total{};
      for (int64_t j = 0; j < blocks; ++j) {
        const Vec<double> x = p.log_columns_normalised(part.score(i, j), i, j, inv_tau);
        if (!any_from(x, kNegligible)) continue;
        const Vec<double> change = summand(x) * load(dg + j * w);
        store(row + j * w, load(row + j * w) + change);
        total += change;
      }
      Vec<double> d = df[i] - row_sum<packed, double>(total);
      df.set(i, updates ? Vec<double>{} : d);
      if (sums != nullptr) {
        d = updates ? share_of(d, sums->rows[i]) : Vec<double>{};
        sums->drows.set(i, sums->drows[i] - d * tau_ratio);
      }
      for (int64_t j = 0; j < blocks; ++j) {
        const Vec<double> x = p.log_rows_normalised(part.score(i, j), before, i, j, inv_tau);
        if (!any_from(x, kNegligible)) continue;
        const Vec<double> change = summand(x) * d;
        store(row + j * w, load(row + j * w) + change);
        store(next + j * w, load(next + j * w) - change);
      }
    }
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < blocks; ++j)
      part.put(i, j, load(ds + i * width + j * w) * last_inv_tau);
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
