// The expert MLP in one call: makes the routing plan if none is given, then calls grouped_gemm_fwd twice and
// combine_fwd.

#include "ops.h"

#include "groups.h"
#include "moe/cpu/indices.h"
#include "moe/cpu/plan_rows.h"

namespace moe {
namespace MOE_ISA {
namespace {

template <class Index>
bool read_choices(const void* experts, int64_t count, int64_t num_experts, int32_t* to) {
  const auto* id = static_cast<const Index*>(experts);
  bool fit = true;
  for (int64_t i = 0; i < count; ++i) {
    fit &= id[i] >= -1;
    to[i] = id[i] < num_experts ? int32_t(id[i]) : -1;
  }
  return fit;
}

}  // namespace

// Returns 1 if an index in row_token or row_choice is out of range, if expert_offsets does not ascend from 0 to at most num_rows, or if slot_row does not name each row in use
// once, at its token in row_token and its choice in row_choice (unless it is null), except rows of token -1; else 0.
int check_plan(const int32_t* expert_offsets, const int32_t* row_token, const int32_t* row_choice,
               const int32_t* slot_row, int64_t tokens, int64_t k, int64_t num_rows, int64_t num_experts,
               int /*threads*/) {
  const Groups groups{expert_offsets, num_experts};
  if (!within(row_token, num_rows, tokens) || !within(row_choice, num_rows, k)) return 1;
  return !groups.fit(num_rows) || !names_each_row(slot_row, row_token, row_choice, tokens, k, groups.used(), num_rows, true);
}

// Returns 1 if check_plan or grouped_gemm_fwd refuses the given plan, or if no plan is given and an expert is below
// -1. Else returns 0.
int expert_mlp_fwd(int dtype, const void* x, int64_t x_stride, const void* weights, const void* w_in,
                   int64_t in_stride_e, int64_t in_stride_k, int64_t in_stride_j, const void* b_in, const void* w_out,
                   int64_t out_stride_e, int64_t out_stride_k, int64_t out_stride_j, const void* b_out, int activation,
                   const int32_t* expert_offsets, const int32_t* row_token, const int32_t* slot_row, int index_size,
                   const void* experts, int32_t* scratch, void* pre, void* activated, void* rows, void* y,
                   int64_t tokens, int64_t k, int64_t num_rows, int64_t num_experts, int64_t din, int64_t width,
                   int64_t hidden_dim, int64_t dout, int by_dots, int threads) {
  if (index_size > 0) {  // no plan is given (experts != nullptr would not tell: an empty tensor's address is null)
    const auto take = [&](int64_t count) { return (scratch += count) - count; };
    int32_t *const choices = take(num_rows), *const counts = take(k * num_experts),
                   *const offsets = take(num_experts + 1);
    int32_t *const token = take(num_rows), *const choice = take(num_rows), *const slot = take(num_rows);
    int32_t *const requested = take(num_experts), *const kept = take(num_experts), *const dropped = take(1);
    const auto read = index_size == 8 ? read_choices<int64_t> : read_choices<int32_t>;
    if (!read(experts, num_rows, num_experts, choices)) return 1;
    make_plan_fwd(4, choices, nullptr, nullptr, counts, 1, offsets, token, choice, slot, requested, kept, dropped,
                  tokens, k, num_experts, num_rows, num_rows, 1, 1);
    expert_offsets = offsets, row_token = token, slot_row = slot;
  } else if (check_plan(expert_offsets, row_token, nullptr, slot_row, tokens, k, num_rows, num_experts, threads)) {
    return 1;
  }
  const int refused = grouped_gemm_fwd(dtype, x, x_stride, row_token, w_in, in_stride_e, in_stride_k, in_stride_j,
                                       nullptr, dtype, expert_offsets, num_experts, din, width, by_dots, b_in,
                                       activation, activated, pre, num_rows, tokens, threads);
  if (refused) return 1;
  grouped_gemm_fwd(dtype, activated, hidden_dim, nullptr, w_out, out_stride_e, out_stride_k, out_stride_j, nullptr,
                   dtype, expert_offsets, num_experts, hidden_dim, dout, by_dots, b_out, 0, rows, nullptr, num_rows,
                   num_rows, threads);
  return combine_fwd(dtype, rows, dout, weights, slot_row, y, tokens, k, num_rows, dout, threads);
}

}  // namespace MOE_ISA
}  // namespace moe
