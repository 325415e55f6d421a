// Sinkhorn's iteration on the CPU (definition: python_ref/sinkhorn.py).
//
// Matrices of up to kPacked x kPacked elements are packed: each lane of a vector holds a different matrix. Of a larger
// matrix, a vector holds consecutive elements of a row. A thread copies some matrices at a time, as float or double, to
// its scratch memory (Stage: one matrix, or packed matrices for two vectors) and computes one vector of them after the
// other (Part).
//
// The iteration is written in three forms. Two scale the rows and columns of exp(scores / tau), in float and in double
// (sinkhorn_scaled.h). The third computes logarithms in double: instead of the scales u and v it has the potentials
// -tau log(u) and -tau log(v) (sinkhorn_log.h; equations in moe_kernels/ops/sinkhorn.py). The scaled forms are written
// for sums of one, a given number of iterations and one tau. So prescribed sums, a tolerance or a tau that changes take
// potentials. Otherwise each matrix takes the cheapest form that tau, the range and the type of its scores allow. The
// backward of both scaled forms is in double.

#include "ops.h"

#include <algorithm>
#include <limits>

#include "moe/common/cooling.h"
#include "sinkhorn_log.h"
#include "sinkhorn_scaled.h"
#include "sinkhorn_stage.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kPacked = 16;  // largest n of packed matrices

struct Call {
  const void* scores;
  int64_t stride_batch, stride_row;
  const void* grad;  // null in the forward pass
  int64_t grad_stride_batch, grad_stride_row;
  void* out;  // contiguous
  int64_t batch, n;
  Cooling taus;
  char* scratch;
  int64_t scratch_stride;
  struct {
    const double *rows, *columns;  // (batch, n) prescribed sums; null: ones, and no tolerance
    double tolerance;              // negative: none
    double *drows, *dcolumns;      // (batch, n) gradients
  } sums;
};

// Packed: calls each(matrix, lane) for each matrix in a vector of doubles. Matrix `first` is in lane 0, the next ones
// follow. Not packed: a vector holds elements of one matrix only, so calls each(first, 0).
template <bool packed, class Each>
void for_lanes(const Call& c, int64_t first, Each each) {
  for (int64_t l = 0; l < (packed ? kLanes<double> : 1) && first + l < c.batch; ++l) each(first + l, l);
}

template <bool packed>
Sums<packed> sums_of(const Call& c, int64_t first, int64_t width, Arena* arena) {
  const Sums<packed> sums(c.n, width, c.sums.tolerance, arena);
  for_lanes<packed>(c, first, [&](int64_t m, int64_t l) {
    sums.read(c.sums.rows + m * c.n, c.sums.columns + m * c.n, c.n, l);
  });
  return sums;
}

template <class T, bool packed, class Wide, class Forms>
void scaled_parts(const Stage<packed, Wide>& scores, const Forms& forms, Form form, const Cooling& taus, Arena arena) {
  using Each = Part<packed, Wide, T>;
  if (!forms.has(form)) return;
  for (int64_t h = 0; h < Each::parts; ++h)
    scaled_forward(Each(scores, h, forms, form, form), taus.iterations(), 1 / taus(0), arena);
}

template <bool packed, class Wide, class Forms>
void forward(const Stage<packed, Wide>& scores, const Forms& forms, const Cooling& taus, Arena arena) {
  if constexpr (sizeof(Wide) == 4) scaled_parts<float>(scores, forms, Form::scaled_float, taus, arena);
  scaled_parts<double>(scores, forms, Form::scaled_double, taus, arena);
  for (int64_t h = 0; forms.has(Form::logarithmic) && h < Part<packed, Wide, double>::parts; ++h) {
    const Part<packed, Wide, double> other(scores, h, forms, Form::logarithmic, Form::logarithmic);
    log_forward<packed, Wide>(other, taus, nullptr, arena);
  }
}

template <bool packed, class Wide, class Forms>
void backward(const Stage<packed, Wide>& scores, const Forms& forms, const Cooling& taus,
              const Stage<packed, Wide>& grad, Arena arena) {
  using Each = Part<packed, Wide, double>;
  for (int64_t h = 0; h < Each::parts; ++h) {
    const Each part(scores, h, forms, Form::scaled_float, Form::scaled_double);
    scaled_backward(part, taus.iterations(), 1 / taus(0), grad, arena);
    const Each other(scores, h, forms, Form::logarithmic, Form::logarithmic);
    log_backward<packed, Wide>(other, taus, nullptr, grad, arena);
  }
}

template <bool packed, class Wide, class Forms>
void with_sums(const Call& c, int64_t first, const Stage<packed, Wide>& scores, const Forms& forms,
               const Stage<packed, Wide>& grad, Arena arena) {
  for (int64_t h = 0; h < Part<packed, Wide, double>::parts; ++h, first += kLanes<double>) {
    const Part<packed, Wide, double> part(scores, h, forms, Form::logarithmic, Form::logarithmic);
    Arena rest = arena;
    const Sums<packed> sums = sums_of<packed>(c, first, part.width(), &rest);
    if (c.grad == nullptr) {
      log_forward(part, c.taus, &sums, rest);
      continue;
    }
    log_backward(part, c.taus, &sums, grad, rest);
    for_lanes<packed>(c, first, [&](int64_t m, int64_t l) {
      const bool broken = forms.each[h * kLanes<double> + l] == Form::broken;
      sums.write(c.sums.drows + m * c.n, c.sums.dcolumns + m * c.n, c.n, l, broken);
    });
  }
}

template <class F, bool packed>
void work(const Call& c, int64_t first, int64_t end, char* scratch) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  using Staged = Stage<packed, Wide>;
  Arena arena(scratch);
  const Staged scores(c.n, &arena), grad(c.grad == nullptr ? 0 : c.n, &arena);
  for (int64_t m = first * Staged::group; m < std::min(end * Staged::group, c.batch); m += Staged::group) {
    const int64_t count = std::min(Staged::group, c.batch - m);
    scores.template read<F>(static_cast<const Key*>(c.scores) + m * c.stride_batch, c.stride_batch, c.stride_row,
                            count);
    const auto forms = scores.classify(c.taus(0), c.sums.rows == nullptr && c.taus.constant(), count);
    scores.pad(-std::numeric_limits<Wide>::infinity());
    if (c.grad != nullptr) {
      const auto* from = static_cast<const Key*>(c.grad) + m * c.grad_stride_batch;
      grad.template read<F>(from, c.grad_stride_batch, c.grad_stride_row, count);
      grad.pad(Wide(0));
    }
    if (c.sums.rows != nullptr) {
      with_sums(c, m, scores, forms, grad, arena);
    } else if (c.grad == nullptr) {
      forward(scores, forms, c.taus, arena);
    } else {
      backward(scores, forms, c.taus, grad, arena);
    }
    scores.template write<F>(static_cast<Key*>(c.out) + m * c.n * c.n, count, forms);
  }
}

template <class F, bool packed>
void run(const Call& c, int threads) {
  const int64_t groups =
      (c.batch + Stage<packed, typename F::Wide>::group - 1) / Stage<packed, typename F::Wide>::group;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t worker = 0; worker < threads; ++worker)
    work<F, packed>(c, worker * groups / threads, (worker + 1) * groups / threads,
                    c.scratch + worker * c.scratch_stride);
}

void run(int dtype, const Call& c, int threads) {
  if (c.batch == 0 || c.n == 0) return;
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    c.n <= kPacked ? run<F, true>(c, threads) : run<F, false>(c, threads);
  });
}

}  // namespace

void sinkhorn_fwd(int dtype, const void* scores, int64_t stride_batch, int64_t stride_row, double first_tau,
                  double last_tau, int64_t iterations, void* p, void* scratch, int64_t scratch_stride, int64_t batch,
                  int64_t n, const double* rows, const double* columns, double tolerance, int threads) {
  run(dtype, {scores, stride_batch, stride_row, nullptr, 0, 0, p, batch, n, {first_tau, last_tau, iterations},
              static_cast<char*>(scratch), scratch_stride, {rows, columns, tolerance, nullptr, nullptr}}, threads);
}

void sinkhorn_bwd(int dtype, const void* grad, int64_t grad_stride_batch, int64_t grad_stride_row, const void* scores,
                  int64_t stride_batch, int64_t stride_row, double first_tau, double last_tau, int64_t iterations,
                  void* dscores, void* scratch, int64_t scratch_stride, int64_t batch, int64_t n, const double* rows,
                  const double* columns, double tolerance, double* drows, double* dcolumns, int threads) {
  run(dtype, {scores, stride_batch, stride_row, grad, grad_stride_batch, grad_stride_row, dscores, batch, n,
              {first_tau, last_tau, iterations}, static_cast<char*>(scratch), scratch_stride,
              {rows, columns, tolerance, drows, dcolumns}}, threads);
}

}  // namespace MOE_ISA
}  // namespace moe
