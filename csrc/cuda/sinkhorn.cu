// Sinkhorn's iteration on scores S (definition: python_ref/sinkhorn.py; backward: ops/sinkhorn.py). A matrix stays in
// the registers of 1 to 256 threads, so n is at most 64. There are two forms:
// * scaled: k = exp((S - row maximum) / tau) is computed once and scaled by vectors, P = diag(u) k diag(v). Possible
//   only with one tau, rows of small range, no prescribed sums and no tolerance.
// * logarithmic: P = exp((S - f - g) / tau) with potentials f of rows and g of columns, in double. Always possible.
//
// Each form is a kernel of its own. With one tau and no prescribed sums the scaled kernel runs first, and flags the
// matrices that it leaves to the logarithmic kernel.
#include "moe/cuda/launch.cuh"
#include "ops.h"
#include "sinkhorn_log.cuh"
#include "sinkhorn_scaled.cuh"
#include "sinkhorn_tile.cuh"

namespace moe {
namespace {

// Whether each matrix needs the logarithmic form.
struct Flags {
  int* each;  // (B); null: all matrices need the logarithmic form

  __device__ void put(int64_t matrix, bool flag) const { each[matrix] = flag; }
  __device__ bool logarithmic(int64_t matrix) const { return each == nullptr || each[matrix] != 0; }
};

template <class Team>
__device__ void fill(typename Team::Tile& tile, float value) {
#pragma unroll
  for (int a = 0; a < Team::kTileRows; a++) {
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) tile[a][b] = value;
  }
}

template <class Team>
__device__ Form flag_form(const Team& team, const Form form, const Flags& flags) {
  if (team.row == 0 && team.column == 0) flags.put(team.matrix, form == Form::logarithmic);
  return form;
}

template <class Team>
__global__ void __launch_bounds__(Team::kBlock, 1)
    sinkhorn_kernel(Matrices scores,  // (B, n, n)
                    void* p,          // (B, n, n)
                    bool vectorized, Temperatures cooling, Flags flags, int64_t batch, int n) {
  __shared__ double exchange[Team::kExchange];
  Team team(exchange);
  if (team.matrix >= batch) return;
  typename Team::Tile tile;
  team.read(scores, vectorized, n, -infinity(), tile);
  double range;
  const Form form = flag_form(team, team.form(tile, n, cooling, kFloatRange, range), flags);
  if (form == Form::logarithmic) return;
  if (form == Form::broken) {
    fill<Team>(tile, NAN);
  } else {
    Scaled<float, Team> s(team, tile, cooling.inverse_of_last);
    for (int64_t t = 0; t < cooling.iterations() && s.iterate(team);) t++;
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) tile[a][b] = s.k[a][b] * s.u[a] * s.v[b];
    }
  }
  team.write(p, scores.dtype, vectorized, n, tile);
}

template <class Team>
__global__ void __launch_bounds__(Team::kBlock, 1)
    sinkhorn_log_kernel(Matrices scores,  // (B, n, n)
                        void* p,          // (B, n, n)
                        bool vectorized, Temperatures cooling, Flags flags, Sums all, int64_t batch, int n) {
  __shared__ double exchange[Team::kExchange];
  Team team(exchange);
  if (team.matrix >= batch || !flags.logarithmic(team.matrix)) return;
  typename Team::Tile tile;
  team.read(scores, vectorized, n, -infinity(), tile);
  const Sums sums = all.of(team.matrix, n);
  double range;
  if (team.form(tile, n, cooling, 0, range) == Form::broken) {
    fill<Team>(tile, NAN);
  } else {
    Potentials<float, Team> s(sums);
    for (int64_t t = 0; t < cooling.iterations() && s.iterate(team, tile, cooling(t), t == 0);) t++;
    const double inv_tau = 1 / cooling(cooling.iterations() - 1);
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
#pragma unroll
      for (int b = 0; b < Team::kTileColumns; b++) tile[a][b] = s.columns_normalised(tile[a][b], a, b, inv_tau);
    }
  }
  team.write(p, scores.dtype, vectorized, n, tile);
}

template <class Team>
__global__ void __launch_bounds__(Team::kBlock, 1)
    sinkhorn_bwd_kernel(Matrices grad,    // (B, n, n)
                        Matrices scores,  // (B, n, n)
                        void* dscores,    // (B, n, n)
                        double* history,  // (iterations, 2, B, n) or (iterations, 2, n, B): History
                        bool vectorized, Temperatures cooling, Flags flags, int64_t batch, int n) {
  __shared__ double exchange[Team::kExchange];
  Team team(exchange);
  if (team.matrix >= batch) return;
  typename Team::Tile tile, dp;
  team.read(scores, vectorized, n, -infinity(), tile);
  double range;
  const Form form = flag_form(team, team.form(tile, n, cooling, kDoubleRange, range), flags);
  if (form == Form::logarithmic) return;
  if (form == Form::broken) {
    fill<Team>(tile, NAN);
  } else {
    team.read(grad, vectorized, n, 0.0f, dp);
    scaled_backward(team, tile, dp, History<Team>(history, team, batch, n), cooling, range < kFloatRange);
  }
  team.write(dscores, scores.dtype, vectorized, n, tile);
}

template <class Team>
__global__ void __launch_bounds__(Team::kBlock, 1)
    sinkhorn_log_bwd_kernel(Matrices grad,    // (B, n, n)
                            Matrices scores,  // (B, n, n)
                            void* dscores,    // (B, n, n)
                            double* history,  // as above
                            bool vectorized, Temperatures cooling, Flags flags, Sums all, int64_t batch,
                            int n) {
  __shared__ double exchange[Team::kExchange];
  Team team(exchange);
  if (team.matrix >= batch || !flags.logarithmic(team.matrix)) return;
  typename Team::Tile tile, dp;
  team.read(scores, vectorized, n, -infinity(), tile);
  team.read(grad, vectorized, n, 0.0f, dp);
  const Sums sums = all.of(team.matrix, n);
  double range;
  const bool broken = team.form(tile, n, cooling, 0, range) == Form::broken;
  const double none = broken ? NAN : 0.0;
  for (int b = 0; team.row == 0 && b < Team::kTileColumns; b++) sums.init_column(team.column + b, none);
  for (int a = 0; team.column == 0 && a < Team::kTileRows; a++) sums.init_row(team.row + a, none);
  if (broken) {
    fill<Team>(tile, NAN);
  } else {
    log_backward(team, tile, dp, History<Team>(history, team, batch, n), cooling, sums);
  }
  team.write(dscores, scores.dtype, vectorized, n, tile);
}

using Thread = Team<1, 1, 4, 4>;      // n <= 4
using Quad = Team<2, 2, 4, 4>;        // n <= 8
using HalfWarp = Team<4, 4, 4, 4>;    // n <= 16
using Warp = Team<8, 4, 4, 8>;        // n <= 32, forward
using WarpGroup = Team<16, 8, 4, 8>;  // n <= 64, forward
using TwoWarps = Team<8, 8, 4, 4>;    // n <= 32, backward
using WholeBlock = Team<16, 16, 4, 4>;  // n <= 64, backward

// The flags are behind `history_bytes` for each matrix.
Flags flags_of(void* scratch, int64_t history_bytes, int64_t batch, const Temperatures& cooling, const Sums& sums) {
  const bool scaled = sums.rows == nullptr && cooling.scalable();
  return {scaled ? reinterpret_cast<int*>(static_cast<char*>(scratch) + history_bytes * batch) : nullptr};
}

template <class Team>
cudaError_t launch_resident(const Matrices& scores, void* p, const Temperatures& cooling, const Flags& flags,
                            const Sums& sums, int64_t batch, int64_t n, cudaStream_t stream) {
  const bool vectorized = scores.in_vectors(n) && is_aligned(p, 16);
  const int size = static_cast<int>(n);
  if (flags.each != nullptr) {
    const cudaError_t error = launch(sinkhorn_kernel<Team>, Team::blocks(batch), Team::kBlock, 0, stream, scores, p,
                                     vectorized, cooling, flags, batch, size);
    if (error != cudaSuccess) return error;
  }
  return launch(sinkhorn_log_kernel<Team>, Team::blocks(batch), Team::kBlock, 0, stream, scores, p, vectorized, cooling,
                flags, sums, batch, size);
}

template <class Team>
cudaError_t launch_resident_bwd(const Matrices& grad, const Matrices& scores, void* dscores, double* history,
                                const Temperatures& cooling, const Flags& flags, const Sums& sums, int64_t batch,
                                int64_t n, cudaStream_t stream) {
  const bool vectorized = grad.in_vectors(n) && scores.in_vectors(n) && is_aligned(dscores, 16);
  const int size = static_cast<int>(n);
  if (flags.each != nullptr) {
    const cudaError_t error = launch(sinkhorn_bwd_kernel<Team>, Team::blocks(batch), Team::kBlock, 0, stream, grad,
                                     scores, dscores, history, vectorized, cooling, flags, batch, size);
    if (error != cudaSuccess) return error;
  }
  return launch(sinkhorn_log_bwd_kernel<Team>, Team::blocks(batch), Team::kBlock, 0, stream, grad, scores, dscores,
                history, vectorized, cooling, flags, sums, batch, size);
}

bool plausible(int dtype, int64_t iterations, int64_t batch, int64_t n) {
  return (dtype == float32 || dtype == bfloat16 || dtype == float16) && iterations > 0 && batch >= 0 &&
         batch <= INT32_MAX && n >= 0 && n <= WholeBlock::kN;
}

// Whether a matrix has as many bytes of scratch memory as ops.h says.
bool fits(int64_t scratch_stride) { return scratch_stride >= 8 && scratch_stride % 8 == 0; }
bool fits_bwd(int64_t scratch_stride, int64_t iterations, int64_t n) {
  return fits(scratch_stride) && (scratch_stride / 8 - 1) / (2 * n) >= iterations;
}

}  // namespace

cudaError_t sinkhorn_fwd(int dtype, const void* scores, int64_t stride_batch, int64_t stride_row, double first_tau,
                         double last_tau, int64_t iterations, void* p, void* scratch, int64_t scratch_stride,
                         int64_t batch, int64_t n, const double* rows, const double* columns, double tolerance,
                         cudaStream_t stream) {
  if (!plausible(dtype, iterations, batch, n)) return cudaErrorInvalidValue;
  if (batch == 0 || n == 0) return cudaSuccess;
  if (!fits(scratch_stride)) return cudaErrorInvalidValue;
  const Matrices from{scores, stride_batch, stride_row, dtype};
  const Temperatures cooling(first_tau, last_tau, iterations);
  Sums sums{};
  sums.rows = rows, sums.columns = columns, sums.tolerance = tolerance;
  const auto resident = n <= Thread::kN      ? launch_resident<Thread>
                        : n <= Quad::kN      ? launch_resident<Quad>
                        : n <= HalfWarp::kN  ? launch_resident<HalfWarp>
                        : n <= Warp::kN      ? launch_resident<Warp>
                                             : launch_resident<WarpGroup>;
  return resident(from, p, cooling, flags_of(scratch, 0, batch, cooling, sums), sums, batch, n, stream);
}

cudaError_t sinkhorn_bwd(int dtype, const void* grad, int64_t grad_stride_batch, int64_t grad_stride_row,
                         const void* scores, int64_t stride_batch, int64_t stride_row, double first_tau,
                         double last_tau, int64_t iterations, void* dscores, void* scratch, int64_t scratch_stride,
                         int64_t batch, int64_t n, const double* rows, const double* columns, double tolerance,
                         double* drows, double* dcolumns, cudaStream_t stream) {
  if (!plausible(dtype, iterations, batch, n)) return cudaErrorInvalidValue;
  if (batch == 0 || n == 0) return cudaSuccess;
  if (!fits_bwd(scratch_stride, iterations, n)) return cudaErrorInvalidValue;
  const Matrices dp{grad, grad_stride_batch, grad_stride_row, dtype}, from{scores, stride_batch, stride_row, dtype};
  const Temperatures cooling(first_tau, last_tau, iterations);
  Sums sums{};
  sums.rows = rows, sums.columns = columns, sums.tolerance = tolerance;
  sums.drows = drows, sums.dcolumns = dcolumns;
  double* const history = static_cast<double*>(scratch);
  const auto resident = n <= Thread::kN     ? launch_resident_bwd<Thread>
                        : n <= Quad::kN     ? launch_resident_bwd<Quad>
                        : n <= HalfWarp::kN ? launch_resident_bwd<HalfWarp>
                        : n <= TwoWarps::kN ? launch_resident_bwd<TwoWarps>
                                            : launch_resident_bwd<WholeBlock>;
  const Flags flags = flags_of(scratch, 16 * n * iterations, batch, cooling, sums);
  return resident(dp, from, dscores, history, cooling, flags, sums, batch, n, stream);
}

}  // namespace moe
