// scaled_forward and scaled_backward (sinkhorn_scaled.h) for packed matrices with n = 4, with unrolled loops. A call
// computes two Parts of a group (sinkhorn_stage.h).
#pragma once

#include "sinkhorn_scaled.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int kSmall = 4;  // the n of this file

// k, u and v (see sinkhorn_scaled.h) of parts `first` and `first + 1` of a group.
template <int n, class Wide, class T>
struct Small {
  using Each = Part<true, Wide, T>;
  using Forms = moe::MOE_ISA::Forms<Stage<true, Wide>::group>;
  static constexpr int parts = 2, w = kLanes<T>;

  const Each part[parts];
  T k[parts][n * n * w];
  Vec<T> u[n][parts], v[n][parts];

  Small(const Stage<true, Wide>& scores, int64_t first, const Forms& forms, Form one, Form other)
      : part{{scores, first, forms, one, other}, {scores, first + 1, forms, one, other}} {}

  bool wanted() const { return part[0].wanted || part[1].wanted; }
  Vec<T> at(int i, int j, int p) const { return load(k[p] + (i * n + j) * w); }

  void start(double inv_tau) {
    for (int p = 0; p < parts; ++p) exponentials(part[p], n, n, inv_tau, k[p]);
    each_of(n, [&](int j, int p) { v[j][p] = broadcast(T(1)); });
  }
  void rows() {
    inverses(u, [&](int i, int j, int p) { return at(i, j, p) * v[j][p]; });
  }
  void columns() {
    inverses(v, [&](int j, int i, int p) { return at(i, j, p) * u[i][p]; });
  }

  // of[i][p] = 1 / sum over j of term(i, j, p). In double, the inverses of two sums come from one reciprocal, that of
  // their product. kDoubleRange bounds the sums, so that the product is a normal number.
  template <class Term>
  static void inverses(Vec<T> (&of)[n][parts], Term term) {
    each_of(n / 2, [&](int half, int p) {
      const int i = 2 * half;
      const Vec<T> sum = sum_of([&](int j) { return term(i, j, p); });
      const Vec<T> next_sum = sum_of([&](int j) { return term(i + 1, j, p); });
      if constexpr (sizeof(T) == 4) {
        of[i][p] = reciprocal(sum), of[i + 1][p] = reciprocal(next_sum);
      } else {
        const Vec<T> both = sizeof(Wide) == 4 ? reciprocal_for_float(sum * next_sum) : reciprocal(sum * next_sum);
        of[i][p] = next_sum * both, of[i + 1][p] = sum * both;
      }
    });
  }
  template <class Term>
  static Vec<T> sum_of(Term term) {
    static_assert(n == 4);
    return term(0) + term(1) + term(2) + term(3);
  }

  template <class Work>
  static void each_of(int count, Work work) {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i)
#pragma GCC unroll 2
      for (int p = 0; p < parts; ++p) work(i, p);
  }
};

template <int n, class T, class Wide, class Forms>
void small_forward(const Stage<true, Wide>& scores, int64_t first, const Forms& forms, Form form, int64_t iterations,
                   double inv_tau) {
  Small<n, Wide, T> s(scores, first, forms, form, form);
  if (!s.wanted()) return;
  s.start(inv_tau);
  for (int64_t t = 0; t < iterations; ++t) s.rows(), s.columns();
  for (int i = 0; i < n; ++i)
    s.each_of(n, [&](int j, int p) { s.part[p].put(i, j, s.at(i, j, p) * s.u[i][p] * s.v[j][p]); });
}

// As scaled_backward, but df is multiplied by u before the loop: only the first iteration back has a df other than 0.
template <int n, class Wide, class Forms>
void small_backward(const Stage<true, Wide>& scores, int64_t first, const Forms& forms, int64_t iterations,
                    double inv_tau, const Stage<true, Wide>& grad, Arena arena) {
  using State = Small<n, Wide, double>;
  using V = Vec<double>;
  constexpr int parts = State::parts, w = kLanes<double>;
  State s(scores, first, forms, Form::scaled_float, Form::scaled_double);
  if (!s.wanted()) return;
  s.start(inv_tau);
  // (parts, iterations, 2, n) vectors: v before each iteration, and the u that it computes.
  double* const history = arena.take<double>(parts * iterations * 2 * n * w);
  const auto saved = [&](int64_t t, int which, int i, int p) {
    return history + (((p * iterations + t) * 2 + which) * n + i) * w;
  };
  for (int64_t t = 0; t < iterations; ++t) {
    s.each_of(n, [&](int j, int p) { store(saved(t, 0, j, p), s.v[j][p]); });
    s.rows(), s.columns();
    s.each_of(n, [&](int i, int p) { store(saved(t, 1, i, p), s.u[i][p]); });
  }
  for (int p = 0; p < parts; ++p) {
    V h[n][n], df[n] = {}, dg[n] = {};
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j) {
        h[i][j] = s.u[i][p] * s.v[j][p] * s.part[p].at(grad, i, j);
        const V weight = s.at(i, j, p) * h[i][j];
        df[i] -= weight, dg[j] -= weight;
      }
    V y[n];
#pragma GCC unroll 4
    for (int j = 0; j < n; ++j) y[j] = dg[j] * s.v[j][p], df[j] *= s.u[j][p];
    for (int64_t t = iterations; t-- > 0;) {
      // before: v before iteration t. y_here: y of iteration t; `y` becomes y of iteration t - 1.
      V before[n], x[n], y_here[n];
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j) before[j] = load(saved(t, 0, j, p)), y_here[j] = y[j];
#pragma GCC unroll 4
      for (int i = 0; i < n; ++i) {
        const V u = load(saved(t, 1, i, p));
        x[i] = df[i] - u * u * State::sum_of([&](int j) { return s.at(i, j, p) * y[j]; });
        df[i] = V{};
      }
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j)
        y[j] = -State::sum_of([&](int i) { return s.at(i, j, p) * x[i]; }) * (before[j] * before[j]);
#pragma GCC unroll 4
      for (int i = 0; i < n; ++i) {
        const V u = load(saved(t, 1, i, p));
#pragma GCC unroll 4
        for (int j = 0; j < n; ++j) {
          h[i][j] += u * y_here[j];
          h[i][j] += x[i] * before[j];
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j) s.part[p].put(i, j, s.at(i, j, p) * h[i][j] * inv_tau);
  }
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
