// The scaled form for matrices of n x n with n known when this is compiled: loops unroll, vectors stay in registers, and
// all matrices of a group advance together, so that their latencies overlap.
#pragma once

#include "sinkhorn_scaled.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int kSmall = 4;

// k, u and v of a group's matrices, in one or two parts.
template <int n, class Wide, class T>
struct Small {
  using Each = Part<true, Wide, T>;
  static constexpr int parts = Each::parts, w = kLanes<T>;
  static_assert(parts <= 2);

  const Each first, last;
  T k[parts][n * n * w];
  Vec<T> u[n][parts], v[n][parts];

  Small(const Stage<true, Wide>& scores, const Form* form, Form one, Form other)
      : first(scores, 0, form, one, other), last(scores, parts - 1, form, one, other) {}

  bool wanted() const { return first.wanted || last.wanted; }
  const Each& part(int p) const { return p == 0 ? first : last; }
  Vec<T> at(int i, int j, int p) const { return load(k[p] + (i * n + j) * w); }

  void start(double inv_tau) {
    for (int p = 0; p < parts; ++p) exponentials(part(p), n, n, inv_tau, k[p]);
    each_of(n, [&](int j, int p) { v[j][p] = broadcast(T(1)); });
  }
  // u = 1 / (k v)
  void rows() {
    inverses(u, [&](int i, int j, int p) { return at(i, j, p) * v[j][p]; });
  }
  // v = 1 / (k' u)
  void columns() {
    inverses(v, [&](int j, int i, int p) { return at(i, j, p) * u[i][p]; });
  }

  // of sum_j term(i, j). In double two at a time: the range leaves room for their product, whose reciprocal gives both.
  template <class Term>
  static void inverses(Vec<T> (&of)[n][parts], Term term) {
    each_of(n / 2, [&](int half, int p) {
      const int i = 2 * half;
      const Vec<T> one = sum_of([&](int j) { return term(i, j, p); });
      const Vec<T> other = sum_of([&](int j) { return term(i + 1, j, p); });
      if constexpr (parts == 1) {
        of[i][p] = reciprocal(one), of[i + 1][p] = reciprocal(other);
      } else {
        const Vec<T> both = reciprocal(one * other);
        of[i][p] = other * both, of[i + 1][p] = one * both;
      }
    });
  }
  // In two halves where there is one part: then latency counts, and otherwise the number of instructions.
  template <class Term>
  static Vec<T> sum_of(Term term) {
    static_assert(n == 4);
    if constexpr (parts == 1) return (term(0) + term(1)) + (term(2) + term(3));
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

template <int n, class T, class Wide>
void small_forward(const Stage<true, Wide>& scores, const Form* form, Form wanted, int64_t iterations, double inv_tau,
                   const Stage<true, Wide>& out) {
  Small<n, Wide, T> s(scores, form, wanted, wanted);
  if (!s.wanted()) return;
  s.start(inv_tau);
  for (int64_t t = 0; t < iterations; ++t) s.rows(), s.columns();
  for (int i = 0; i < n; ++i)
    s.each_of(n, [&](int j, int p) { s.part(p).put(out, i, j, s.at(i, j, p) * s.u[i][p] * s.v[j][p]); });
}

// As scaled_backward. Forwards all parts advance together, backwards one after the other, with h in registers.
template <int n, class Wide>
void small_backward(const Stage<true, Wide>& scores, const Form* form, int64_t iterations, double inv_tau,
                    const Stage<true, Wide>& grad, const Stage<true, Wide>& out, Arena arena) {
  using State = Small<n, Wide, double>;
  using V = Vec<double>;
  constexpr int parts = State::parts, w = kLanes<double>;
  State s(scores, form, Form::scaled_float, Form::scaled_double);
  if (!s.wanted()) return;
  s.start(inv_tau);
  // v before iteration t and u after it: (parts, R, 2, n).
  double* const history = arena.take<double>(parts * iterations * 2 * n * w);
  const auto place = [&](int64_t t, int which, int i, int p) {
    return history + (((p * iterations + t) * 2 + which) * n + i) * w;
  };
  for (int64_t t = 0; t < iterations; ++t) {
    s.each_of(n, [&](int j, int p) { store(place(t, 0, j, p), s.v[j][p]); });
    s.rows(), s.columns();
    s.each_of(n, [&](int i, int p) { store(place(t, 1, i, p), s.u[i][p]); });
  }
  for (int p = 0; p < parts; ++p) {
    V h[n][n], df[n] = {}, dg[n] = {};
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j) {
        h[i][j] = s.u[i][p] * s.v[j][p] * s.part(p).at(grad, i, j);
        const V weight = s.at(i, j, p) * h[i][j];
        df[i] -= weight, dg[j] -= weight;
      }
    V y[n];
#pragma GCC unroll 4
    for (int j = 0; j < n; ++j) y[j] = dg[j] * s.v[j][p], df[j] *= s.u[j][p];
    for (int64_t t = iterations; t-- > 0;) {
      V before[n], change[n] = {};
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j) before[j] = load(place(t, 0, j, p));
#pragma GCC unroll 4
      for (int i = 0; i < n; ++i) {
        V total = s.at(i, 0, p) * y[0];
#pragma GCC unroll 4
        for (int j = 1; j < n; ++j) total += s.at(i, j, p) * y[j];
        const V share = load(place(t, 1, i, p)), x = df[i] - share * share * total;
        df[i] = V{};
#pragma GCC unroll 4
        for (int j = 0; j < n; ++j) {
          h[i][j] += share * y[j];  // two multiply-adds, which in one expression would be three instructions
          h[i][j] += x * before[j];
          change[j] -= s.at(i, j, p) * x;
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j) y[j] = change[j] * (before[j] * before[j]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j) s.part(p).put(out, i, j, s.at(i, j, p) * h[i][j] * inv_tau);
  }
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
