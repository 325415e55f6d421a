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
    for (int p = 0; p < parts; ++p) exponentials(part(p), inv_tau, k[p]);
    each_of(n, [&](int j, int p) { v[j][p] = broadcast(T(1)); });
  }
  // u = 1 / (k v)
  void rows() {
    each_of(n, [&](int i, int p) {
      Vec<T> total = at(i, 0, p) * v[0][p];
#pragma GCC unroll 4
      for (int j = 1; j < n; ++j) total += at(i, j, p) * v[j][p];
      u[i][p] = reciprocal(total);
    });
  }
  // v = 1 / (k' u)
  void columns() {
    each_of(n, [&](int j, int p) {
      Vec<T> total = at(0, j, p) * u[0][p];
#pragma GCC unroll 4
      for (int i = 1; i < n; ++i) total += at(i, j, p) * u[i][p];
      v[j][p] = reciprocal(total);
    });
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

// As scaled_backward.
template <int n, class Wide>
void small_backward(const Stage<true, Wide>& scores, const Form* form, int64_t iterations, double inv_tau,
                    const Stage<true, Wide>& grad, const Stage<true, Wide>& out, Arena arena) {
  using State = Small<n, Wide, double>;
  using V = Vec<double>;
  constexpr int parts = State::parts;
  State s(scores, form, Form::scaled_float, Form::scaled_double);
  if (!s.wanted()) return;
  s.start(inv_tau);
  // v before iteration t and u after it: (R, 2, n, parts).
  constexpr int64_t vectors = n * parts;
  double* const history = arena.take<double>(iterations * 2 * vectors * kLanes<double>);
  const auto place = [&](int64_t t, int which, int i, int p) {
    return history + ((2 * t + which) * vectors + i * parts + p) * kLanes<double>;
  };
  for (int64_t t = 0; t < iterations; ++t) {
    s.each_of(n, [&](int j, int p) { store(place(t, 0, j, p), s.v[j][p]); });
    s.rows(), s.columns();
    s.each_of(n, [&](int i, int p) { store(place(t, 1, i, p), s.u[i][p]); });
  }
  V h[n][n][parts], df[n][parts] = {}, dg[n][parts] = {};
  for (int i = 0; i < n; ++i)
    s.each_of(n, [&](int j, int p) {
      h[i][j][p] = s.u[i][p] * s.v[j][p] * s.part(p).at(grad, i, j);
      const V weight = s.at(i, j, p) * h[i][j][p];
      df[i][p] -= weight, dg[j][p] -= weight;
    });
  for (int64_t t = iterations; t-- > 0;) {
    V y[n][parts], before[n][parts];
    s.each_of(n, [&](int j, int p) {
      y[j][p] = dg[j][p] * s.v[j][p], before[j][p] = load(place(t, 0, j, p)), dg[j][p] = V{};
    });
    s.each_of(n, [&](int i, int p) {
      V total = s.at(i, 0, p) * y[0][p];
#pragma GCC unroll 4
      for (int j = 1; j < n; ++j) total += s.at(i, j, p) * y[j][p];
      const V share = load(place(t, 1, i, p)), x = share * (df[i][p] - share * total);
      df[i][p] = V{};
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j) {
        h[i][j][p] += share * y[j][p] + x * before[j][p];
        dg[j][p] -= s.at(i, j, p) * x;
      }
    });
    s.each_of(n, [&](int j, int p) { s.v[j][p] = before[j][p], dg[j][p] *= before[j][p]; });
  }
  for (int i = 0; i < n; ++i)
    s.each_of(n, [&](int j, int p) { s.part(p).put(out, i, j, s.at(i, j, p) * h[i][j][p] * inv_tau); });
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
