// Sinkhorn's iteration on the CPU (definition: python_ref/sinkhorn.py; backward: the equations of ops/sinkhorn.py).
//
// Matrices up to kPacked lie across vector lanes, one a lane; a larger one has its rows along them. Each matrix takes the
// cheapest of three forms that its range allows, whatever its neighbours are: exp(S / tau) once and then scaled by
// vectors, in float or in double; or potentials in units of scores, in double, and exp of differences every time.
// A potential is kept as an anchor, the largest of what is summed, and the logarithm of the sum after it: added up at
// once they would lose to rounding what 1 / tau then makes large.

#include "ops.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "moe/cooling.h"
#include "moe/lanes.h"
#include "sinkhorn_stage.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kPacked = 16;
constexpr double kNegligible = -64;  // exp of this times 1 / tau = 1e7 is below 1e-20 of what it is added to

// One part of a stage, that is kLanes<T> of its matrices or its only one, in the arithmetic T.
template <bool packed, class Wide, class T>
struct Part {
  const Stage<packed, Wide>& scores;
  int64_t part, n, blocks;
  const Form* form;

  static constexpr int64_t parts = packed ? Stage<packed, Wide>::group / kLanes<T> : 1;

  Part(const Stage<packed, Wide>& scores, int64_t part, const Form* form)
      : scores(scores), part(part), n(scores.n), blocks(packed ? scores.n : scores.row / kLanes<T>),
        form(form + part * kLanes<T>) {}

  int64_t width() const { return blocks * kLanes<T>; }
  bool wanted(Form any, Form other) const {
    for (int l = 0; l < (packed ? kLanes<T> : 1); ++l)
      if (form[l] == any || form[l] == other) return true;
    return false;
  }

  Vec<double> score(int64_t i, int64_t j) const { return at(scores, i, j); }
  Vec<double> at(const Stage<packed, Wide>& stage, int64_t i, int64_t j) const {
    return load_as<double>(stage.template block<double>(i, j, part));
  }

  // Only into the lanes whose matrices have this form.
  void put(const Stage<packed, Wide>& out, int64_t i, int64_t j, Vec<T> value, Form any, Form other) const {
    Wide* to = out.template block<T>(i, j, part);
    Wide lanes[kLanes<T>];
    store_as<T>(lanes, value);
    if constexpr (packed) {
      for (int l = 0; l < kLanes<T>; ++l) to[l] = form[l] == any || form[l] == other ? lanes[l] : to[l];
    } else {
      std::memcpy(to, lanes, sizeof lanes);
    }
  }
};

// k = exp((S - row maximum) / tau), (n, width). The exponents are taken in double: float's are off by 60 units.
template <bool packed, class Wide, class T>
void exponentials(const Part<packed, Wide, T>& part, double inv_tau, T* k) {
  constexpr int halves = kLanes<T> / kLanes<double>;
  const Part<packed, Wide, double> doubles(part.scores, 0, part.form);
  const auto block = [&](int64_t i, int64_t j, int half) {
    const Wide* from = part.scores.template block<T>(i, j, part.part) + half * kLanes<double>;
    return load_as<double>(from);
  };
  for (int64_t i = 0; i < part.n; ++i) {
    Vec<double> most[halves];
    for (int h = 0; h < halves; ++h) most[h] = block(i, 0, h);
    for (int64_t j = 1; j < part.blocks; ++j)
      for (int h = 0; h < halves; ++h) most[h] = max(most[h], block(i, j, h));
    if constexpr (!packed) {
      for (int h = 1; h < halves; ++h) most[0] = max(most[0], most[h]);
      for (int h = halves; h-- > 0;) most[h] = row_max<packed, double>(most[0]);
    }
    for (int64_t j = 0; j < part.blocks; ++j)
      for (int h = 0; h < halves; ++h)
        store_as<double>(k + (i * part.blocks + j) * kLanes<T> + h * kLanes<double>, exp((block(i, j, h) - most[h]) * inv_tau));
  }
}

// Calls work(first row, how many rows) on blocks of four rows, whose loads and sums overlap, and then row by row.
template <class Work>
void in_blocks(int64_t n, Work work) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) work(i, std::integral_constant<int, 4>());
  for (; i < n; ++i) work(i, std::integral_constant<int, 1>());
}

// u = 1 / (k v), next = 1 / (k' u)
template <bool packed, class T>
void scale(const T* k, int64_t n, int64_t blocks, const T* v, Rows<packed, T> u, T* next) {
  constexpr int w = kLanes<T>;
  const int64_t width = blocks * w;
  std::fill(next, next + width, T(0));
  in_blocks(n, [&](int64_t i, auto rows) {
    const T* row = k + i * width;
    Vec<T> total[rows] = {}, share[rows];
    for (int64_t j = 0; j < width; j += w)
      for (int r = 0; r < rows; ++r) total[r] += load(row + r * width + j) * load(v + j);
    for (int r = 0; r < rows; ++r) u.set(i + r, share[r] = reciprocal(row_sum<packed, T>(total[r])));
    for (int64_t j = 0; j < width; j += w) {
      Vec<T> sum = load(next + j);
      for (int r = 0; r < rows; ++r) sum += load(row + r * width + j) * share[r];
      store(next + j, sum);
    }
  });
  for (int64_t j = 0; j < width; j += w) {
    const Vec<T> total = load(next + j);
    store(next + j, total == T(0) ? Vec<T>{} : reciprocal(total));  // a padding column stays zero
  }
}

template <bool packed, class Wide, class T>
void scaled_forward(const Part<packed, Wide, T>& part, int64_t iterations, double inv_tau, Form form,
                    const Stage<packed, Wide>& out, Arena arena) {
  if (!part.wanted(form, form)) return;
  constexpr int w = kLanes<T>;
  T* k = arena.take<T>(part.n * part.width());
  T *v = arena.take<T>(part.width()), *next = arena.take<T>(part.width());
  const auto u = Rows<packed, T>::take(part.n, &arena);
  exponentials(part, inv_tau, k);
  std::fill(v, v + part.width(), T(1));
  for (int64_t t = 0; t < iterations; ++t, std::swap(v, next)) scale<packed>(k, part.n, part.blocks, v, u, next);
  for (int64_t i = 0; i < part.n; ++i)
    for (int64_t j = 0; j < part.blocks; ++j) {
      const Vec<T> p = load(k + (i * part.blocks + j) * w) * u[i] * load(v + j * w);
      part.put(out, i, j, p, form, form);
    }
}

template <bool packed, class Wide>
void scaled_backward(const Part<packed, Wide, double>& part, int64_t iterations, double inv_tau,
                     const Stage<packed, Wide>& grad, const Stage<packed, Wide>& out, Arena arena) {
  if (!part.wanted(Form::scaled_float, Form::scaled_double)) return;
  constexpr int w = kLanes<double>;
  const int64_t n = part.n, blocks = part.blocks, width = part.width(), rows = packed ? n * w : n;
  double *k = arena.take<double>(n * width), *h = arena.take<double>(n * width);
  double *u = arena.take<double>(iterations * rows), *v = arena.take<double>((iterations + 1) * width);
  double *dg = arena.take<double>(width), *y = arena.take<double>(width);
  const auto df = Rows<packed, double>::take(n, &arena);
  exponentials(part, inv_tau, k);
  std::fill(v, v + width, 1.0);
  for (int64_t t = 0; t < iterations; ++t)
    scale<packed>(k, n, blocks, v + t * width, {u + t * rows}, v + (t + 1) * width);

  // dS = k * h / tau; both potentials' gradients start from dP, and then run back through the iterations.
  const Rows<packed, double> last{u + (iterations - 1) * rows};
  std::fill(dg, dg + width, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    Vec<double> total{};
    for (int64_t j = 0; j < blocks; ++j) {
      const Vec<double> scale = last[i] * load(v + iterations * width + j * w);
      const Vec<double> share = scale * part.at(grad, i, j), weight = load(k + i * width + j * w) * share;
      store(h + i * width + j * w, share);
      store(dg + j * w, load(dg + j * w) - weight);
      total -= weight;
    }
    df.set(i, row_sum<packed, double>(total));
  }
  for (int64_t t = iterations; t-- > 0;) {
    const double* before = v + t * width;
    const Rows<packed, double> shares{u + t * rows};
    for (int64_t j = 0; j < blocks; ++j) store(y + j * w, load(dg + j * w) * load(before + width + j * w));
    std::fill(dg, dg + width, 0.0);
    in_blocks(n, [&](int64_t i, auto rows) {
      const double* row = k + i * width;
      double* sum = h + i * width;
      Vec<double> total[rows] = {}, share[rows], x[rows];
      for (int64_t j = 0; j < width; j += w)
        for (int r = 0; r < rows; ++r) total[r] += load(row + r * width + j) * load(y + j);
      for (int r = 0; r < rows; ++r) {
        share[r] = shares[i + r], x[r] = share[r] * (df[i + r] - share[r] * row_sum<packed, double>(total[r]));
        df.set(i + r, Vec<double>{});
      }
      for (int64_t j = 0; j < width; j += w) {
        Vec<double> change = load(dg + j);
        for (int r = 0; r < rows; ++r) {
          change -= load(row + r * width + j) * x[r];
          store(sum + r * width + j, load(sum + r * width + j) + share[r] * load(y + j) + x[r] * load(before + j));
        }
        store(dg + j, change);
      }
    });
    for (int64_t j = 0; j < blocks; ++j) store(dg + j * w, load(dg + j * w) * load(before + j * w));
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < blocks; ++j)
      part.put(out, i, j, load(k + i * width + j * w) * load(h + i * width + j * w) * inv_tau, Form::scaled_float, Form::scaled_double);
}

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
  if (!part.wanted(Form::logarithmic, Form::logarithmic)) return;
  const Potentials<packed> p(part.n, part.width(), arena);
  std::fill(p.g, p.g + part.width(), 0.0);
  for (int64_t t = 0; t < iterations; ++t) iterate(part, taus(t), p.g, p);
  const double inv_tau = 1 / taus(iterations - 1);
  for (int64_t i = 0; i < part.n; ++i)
    for (int64_t j = 0; j < part.blocks; ++j) {
      const Vec<double> value = exp(p.columns_normal(part.score(i, j), i, j, inv_tau));
      part.put(out, i, j, value, Form::logarithmic, Form::logarithmic);
    }
}

template <bool packed, class Wide>
void log_backward(const Part<packed, Wide, double>& part, int64_t iterations, const Cooling& taus,
                  const Stage<packed, Wide>& grad, const Stage<packed, Wide>& out, Arena arena) {
  if (!part.wanted(Form::logarithmic, Form::logarithmic)) return;
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
      part.put(out, i, j, load(ds + i * width + j * w) * last_inv_tau, Form::logarithmic, Form::logarithmic);
}

struct Call {
  const void* scores;
  int64_t stride_batch, stride_row;
  const void* grad;  // null: forward
  int64_t grad_stride_batch, grad_stride_row;
  void* out;  // contiguous
  int64_t batch, n;
  Cooling taus;
  char* scratch;
  int64_t scratch_stride;
};

template <class F, bool packed>
void work(const Call& c, int64_t first, int64_t end, char* scratch) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  using Staged = Stage<packed, Wide>;
  Arena arena(scratch);
  const Staged scores(c.n, &arena), out(c.n, &arena), grad(c.grad == nullptr ? 0 : c.n, &arena);
  const bool one_tau = c.taus.constant();
  const double inv_tau = 1 / c.taus(0);
  for (int64_t m = first * Staged::group; m < std::min(end * Staged::group, c.batch); m += Staged::group) {
    const int64_t count = std::min(Staged::group, c.batch - m);
    Form form[Staged::group];
    scores.template read<F>(static_cast<const Key*>(c.scores) + m * c.stride_batch, c.stride_batch, c.stride_row, count);
    scores.classify(inv_tau, one_tau, form);
    scores.pad(-std::numeric_limits<Wide>::infinity());
    if (c.grad != nullptr) {
      const auto* from = static_cast<const Key*>(c.grad) + m * c.grad_stride_batch;
      grad.template read<F>(from, c.grad_stride_batch, c.grad_stride_row, count);
      grad.pad(Wide(0));
    }
    if constexpr (sizeof(Wide) == 4) {
      const Part<packed, Wide, float> part(scores, 0, form);
      if (c.grad == nullptr) scaled_forward(part, c.taus.iterations(), inv_tau, Form::scaled_float, out, arena);
    }
    for (int64_t h = 0; h < Part<packed, Wide, double>::parts; ++h) {
      const Part<packed, Wide, double> part(scores, h, form);
      if (c.grad == nullptr) {
        scaled_forward(part, c.taus.iterations(), inv_tau, Form::scaled_double, out, arena);
        log_forward(part, c.taus.iterations(), c.taus, out, arena);
      } else {
        scaled_backward(part, c.taus.iterations(), inv_tau, grad, out, arena);
        log_backward(part, c.taus.iterations(), c.taus, grad, out, arena);
      }
    }
    out.template write<F>(static_cast<Key*>(c.out) + m * c.n * c.n, count, form);
  }
}

template <class F, bool packed>
void run(const Call& c, int threads) {
  const int64_t groups = (c.batch + Stage<packed, typename F::Wide>::group - 1) / Stage<packed, typename F::Wide>::group;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t worker = 0; worker < threads; ++worker)
    work<F, packed>(c, worker * groups / threads, (worker + 1) * groups / threads, c.scratch + worker * c.scratch_stride);
}

void run(int dtype, const Call& c, int threads) {
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    c.n <= kPacked ? run<F, true>(c, threads) : run<F, false>(c, threads);
  });
}

}  // namespace

void sinkhorn_fwd(int dtype, const void* scores, int64_t stride_batch, int64_t stride_row, double first_tau,
                  double last_tau, int64_t iterations, void* p, void* scratch, int64_t scratch_stride, int64_t batch,
                  int64_t n, int threads) {
  run(dtype, {scores, stride_batch, stride_row, nullptr, 0, 0, p, batch, n, {first_tau, last_tau, iterations},
              static_cast<char*>(scratch), scratch_stride}, threads);
}

void sinkhorn_bwd(int dtype, const void* grad, int64_t grad_stride_batch, int64_t grad_stride_row, const void* scores,
                  int64_t stride_batch, int64_t stride_row, double first_tau, double last_tau, int64_t iterations,
                  void* dscores, void* scratch, int64_t scratch_stride, int64_t batch, int64_t n, int threads) {
  run(dtype, {scores, stride_batch, stride_row, grad, grad_stride_batch, grad_stride_row, dscores, batch, n,
              {first_tau, last_tau, iterations}, static_cast<char*>(scratch), scratch_stride}, threads);
}

}  // namespace MOE_ISA
}  // namespace moe
