// Sinkhorn's iteration on k = exp(S / tau), computed once from the scores S. The result is P = diag(u) k diag(v); an
// iteration updates the vectors u and v. First the maximum of each row of S is subtracted, which changes u but not P.
#pragma once

#include <algorithm>
#include <type_traits>

#include "sinkhorn_stage.h"

namespace moe {
namespace MOE_ISA {
namespace {

// k = exp((S - row maximum) / tau), n rows of `blocks` vectors. If k is float, an exponent near -60 rounded to float would
// change k by up to 32 units in the last place. So the exponent is double or, in packed float matrices, a float whose
// rounding error is added again (ExpOfDifference).
template <bool packed, class Wide, class T>
inline void exponentials(const Part<packed, Wide, T>& part, int64_t n, int64_t blocks, double inv_tau, T* k) {
  if constexpr (packed && sizeof(T) == 4) {
    const ExpOfDifference exp_of(inv_tau);
    for (int64_t i = 0; i < n; ++i) {
      const auto score = [&](int64_t j) { return load(part.scores.template block<T>(i, j, part.part)); };
      Vec<T> most = score(0);
      for (int64_t j = 1; j < n; ++j) most = max(most, score(j));
      for (int64_t j = 0; j < n; ++j) store(k + (i * n + j) * kLanes<T>, exp_of(score(j), most));
    }
    return;
  }
  constexpr int double_vectors = kLanes<T> / kLanes<double>;
  const auto block = [&](int64_t i, int64_t j, int half) {
    const Wide* from = part.scores.template block<T>(i, j, part.part) + half * kLanes<double>;
    return load_as<double>(from);
  };
  for (int64_t i = 0; i < n; ++i) {
    Vec<double> most[double_vectors];
    for (int h = 0; h < double_vectors; ++h) most[h] = block(i, 0, h);
    for (int64_t j = 1; j < blocks; ++j)
      for (int h = 0; h < double_vectors; ++h) most[h] = max(most[h], block(i, j, h));
    if constexpr (!packed) {
      for (int h = 1; h < double_vectors; ++h) most[0] = max(most[0], most[h]);
      for (int h = double_vectors; h-- > 0;) most[h] = row_max<packed, double>(most[0]);
    }
    for (int64_t j = 0; j < blocks; ++j)
      for (int h = 0; h < double_vectors; ++h)
      {
        const Vec<double> x = (block(i, j, h) - most[h]) * inv_tau;  // -inf in padding, which packed matrices lack
        store_as<double>(k + (i * blocks + j) * kLanes<T> + h * kLanes<double>, packed ? exp_within_range(x) : exp(x));
      }
  }
}

// Calls work(first row, number of rows) for blocks of four rows, then for each remaining row.
template <class Work>
void in_blocks(int64_t n, Work work) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) work(i, std::integral_constant<int, 4>());
  for (; i < n; ++i) work(i, std::integral_constant<int, 1>());
}

// One iteration: u = 1 / (k v), then next = 1 / (k^T u), the new v.
template <bool packed, class T>
void scale(const T* k, int64_t n, int64_t blocks, const T* v, RowValues<packed, T> u, T* next) {
  constexpr int w = kLanes<T>;
  const int64_t width = blocks * w;
  std::fill(next, next + width, T(0));
  in_blocks(n, [&](int64_t i, auto rows) {
    const T* row = k + i * width;
    Vec<T> total[rows] = {}, u_i[rows];
    for (int64_t j = 0; j < width; j += w)
      for (int r = 0; r < rows; ++r) total[r] += load(row + r * width + j) * load(v + j);
    for (int r = 0; r < rows; ++r) u.set(i + r, u_i[r] = reciprocal(row_sum<packed, T>(total[r])));
    for (int64_t j = 0; j < width; j += w) {
      Vec<T> sum = load(next + j);
      for (int r = 0; r < rows; ++r) sum += load(row + r * width + j) * u_i[r];
      store(next + j, sum);
    }
  });
  for (int64_t j = 0; j < width; j += w) {
    const Vec<T> total = load(next + j);
    store(next + j, total == T(0) ? Vec<T>{} : reciprocal(total));  // k is 0 in a padding column, and v becomes 0
  }
}

template <bool packed, class Wide, class T>
void scaled_forward(const Part<packed, Wide, T>& part, int64_t iterations, double inv_tau, Arena arena) {
  if (!part.wanted) return;
  constexpr int w = kLanes<T>;
  T* k = arena.take<T>(part.n * part.width());
  T *v = arena.take<T>(part.width()), *next = arena.take<T>(part.width());
  const auto u = RowValues<packed, T>::take(part.n, &arena);
  exponentials(part, part.n, part.blocks, inv_tau, k);
  std::fill(v, v + part.width(), T(1));
  for (int64_t t = 0; t < iterations; ++t, std::swap(v, next)) scale<packed>(k, part.n, part.blocks, v, u, next);
  for (int64_t i = 0; i < part.n; ++i)
    for (int64_t j = 0; j < part.blocks; ++j) {
      const Vec<T> p = load(k + (i * part.blocks + j) * w) * u[i] * load(v + j * w);
      part.put(i, j, p);
    }
}

template <bool packed, class Wide>
void scaled_backward(const Part<packed, Wide, double>& part, int64_t iterations, double inv_tau,
                     const Stage<packed, Wide>& grad, Arena arena) {
  if (!part.wanted) return;
  constexpr int w = kLanes<double>;
  const int64_t n = part.n, blocks = part.blocks, width = part.width(), rows = packed ? n * w : n;
  double *k = arena.take<double>(n * width), *h = arena.take<double>(n * width);
  double *u = arena.take<double>(iterations * rows), *v = arena.take<double>((iterations + 1) * width);
  double *dg = arena.take<double>(width), *y = arena.take<double>(width);
  const auto df = RowValues<packed, double>::take(n, &arena);
  exponentials(part, part.n, part.blocks, inv_tau, k);
  std::fill(v, v + width, 1.0);
  for (int64_t t = 0; t < iterations; ++t)
    scale<packed>(k, n, blocks, v + t * width, {u + t * rows}, v + (t + 1) * width);

  // * multiplies element by element. h is the gradient with respect to k; df and dg are the gradients with respect to
  // -log u and -log v. P contains the u and v of the last iteration: at first h = u v^T * dP (`grad`), and df and dg
  // are minus the row and column sums of k * h. An iteration computed u from `before`, the v of the iteration before
  // it, and then v from u. The way back through it:
  //   y = dg * v,  x = u * (df - u * (k y)),  h += u y^T + x before^T,  dg = -before * (k^T x).
  // df is 0 after the first step back, since an earlier u affects P only through its v. At the end dS = k * h / tau.
  const RowValues<packed, double> last{u + (iterations - 1) * rows};
  std::fill(dg, dg + width, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    Vec<double> total{};
    for (int64_t j = 0; j < blocks; ++j) {
      const Vec<double> scale = last[i] * load(v + iterations * width + j * w);
      const Vec<double> h_ij = scale * part.at(grad, i, j), weight = load(k + i * width + j * w) * h_ij;
      store(h + i * width + j * w, h_ij);
      store(dg + j * w, load(dg + j * w) - weight);
      total -= weight;
    }
    df.set(i, row_sum<packed, double>(total));
  }
  for (int64_t t = iterations; t-- > 0;) {
    const double* before = v + t * width;
    const RowValues<packed, double> u_t{u + t * rows};
    for (int64_t j = 0; j < blocks; ++j) store(y + j * w, load(dg + j * w) * load(before + width + j * w));
    std::fill(dg, dg + width, 0.0);
    in_blocks(n, [&](int64_t i, auto rows) {
      const double* row = k + i * width;
      double* h_row = h + i * width;
      Vec<double> total[rows] = {}, u_i[rows], x[rows];
      for (int64_t j = 0; j < width; j += w)
        for (int r = 0; r < rows; ++r) total[r] += load(row + r * width + j) * load(y + j);
      for (int r = 0; r < rows; ++r) {
        u_i[r] = u_t[i + r], x[r] = u_i[r] * (df[i + r] - u_i[r] * row_sum<packed, double>(total[r]));
        df.set(i + r, Vec<double>{});
      }
      for (int64_t j = 0; j < width; j += w) {
        Vec<double> change = load(dg + j);
        for (int r = 0; r < rows; ++r) {
          change -= load(row + r * width + j) * x[r];
          store(h_row + r * width + j, load(h_row + r * width + j) + u_i[r] * load(y + j) + x[r] * load(before + j));
        }
        store(dg + j, change);
      }
    });
    for (int64_t j = 0; j < blocks; ++j) store(dg + j * w, load(dg + j * w) * load(before + j * w));
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < blocks; ++j)
      part.put(i, j, load(k + i * width + j * w) * load(h + i * width + j * w) * inv_tau);
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
