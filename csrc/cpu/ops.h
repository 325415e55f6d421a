// Every CPU operation, declared once per instruction set. csrc/cuda/ops.h describes the arguments of functions of the
// same name, with these differences:
//
// * The last argument is a number of threads, not a stream. `quantile` of kwta_fwd is called z in CUDA.
// * dtype may also be float64, and element_size 8. Arrays that are float32 in CUDA are float64 if dtype is float64.
// * gates and leaf_probs of the tree gate, and their gradients, are float64 if dtype is float64, else float32. gamma,
//   epsilon and least are double.
// * scratch has scratch_stride bytes for each thread. `counts` of make_plan_fwd is (chunks, K if by_choice else 1, E).
// * A function that returns int returns 1 if an index is out of range, else 0.
// * Functions of the grouped GEMM and the expert MLP take any dtype, and differ in some arguments.
// * kwta_linear_fwd is here alone: y (tokens, dout) = x (tokens, din) weight (dout, din)^T + bias where the bit of an
//   output is 1 in bits (tokens, ceil(dout / 32)), else +0. bias: or null.
#pragma once

#include <cstdint>

#include "moe/common/dtypes.h"

// clang-format off
#define MOE_CPU_OPS(X) X(kwta_fwd) X(kwta_bwd) X(kwta_linear_fwd) \
  X(topk_gate_fwd) X(topk_gate_bwd) X(make_plan_fwd) X(plan_expert_choice_fwd) X(plan_priority_fwd) \
  X(dispatch_fwd) X(combine_fwd) X(combine_bwd) \
  X(grouped_gemm_fwd) X(grouped_gemm_bwd_weight) X(grouped_gemm_sum_rows) X(grouped_gemm_norms) X(activation_bwd) \
  X(expert_mlp_bwd_hidden) X(check_plan) X(expert_mlp_fwd) \
  X(sinkhorn_fwd) X(sinkhorn_bwd) \
  X(tree_gate_fwd) X(tree_gate_bwd) X(expect_writes) X(tree_reach) X(tree_products_fwd) X(tree_products_bwd) \
  X(tree_route_fwd)
// clang-format on

// Products of rows with the weights (E, din, dout) of their experts: element (e, k, j) is weight[e * stride_e + k *
// stride_k + j * stride_j]; stride_k or stride_j is 1. by_torch: null, or these products as torch computed them, in
// by_torch_dtype; may be overwritten. by_dots: whether experts of few rows may be multiplied by dot products (dots.h).
#define MOE_GROUPED_GEMM_ARGS                                                                                       \
  int dtype, const void *x, int64_t x_stride, const int32_t *row_token, const void *weight, int64_t stride_e,        \
      int64_t stride_k, int64_t stride_j, void *by_torch, int by_torch_dtype, const int32_t *expert_offsets,        \
      int64_t num_experts, int64_t din, int64_t dout, int by_dots

// Products of x (tokens, dim) with the weights of a tree gate's nodes and leaves below the first `levels` levels of
// each tree. A token is multiplied only by the branches (subtrees, see tree_gate_products.cpp) that it reaches.
// offsets and token are results of tree_reach. Backward reads the gradients of the logits from split_logits and
// leaf_logits. dtype is float32 or float64; scratch_stride counts elements.
#define MOE_TREE_PRODUCTS_ARGS                                                                                       \
  int dtype, const void *x, int64_t x_stride, void *split_weight, void *leaf_weight, void *split_logits,             \
      void *leaf_logits, const int32_t *offsets, const int32_t *token, void *packed, void *scratch,                  \
      int64_t scratch_stride, int64_t tokens, int64_t dim, int64_t trees, int64_t experts, int64_t levels

#define MOE_DECLARE_CPU_OPS                                                                                           \
  void kwta_fwd(int dtype, const void* x, int64_t x_stride, const void* values, int64_t values_stride, void* y,       \
                int32_t* bits, uint8_t* mask, int64_t rows, int64_t n, int64_t k, int ties, float quantile,           \
                int threads);                                                                                         \
  void kwta_bwd(int element_size, const void* grad, int64_t grad_stride, const int32_t* bits, void* dx, int64_t rows, \
                int64_t n, int threads);                                                                              \
  void kwta_linear_fwd(int dtype, const void* x, int64_t x_stride, const void* weight, int64_t weight_stride,         \
                       const void* bias, const int32_t* bits, void* y, int64_t tokens, int64_t din, int64_t dout,     \
                       int threads);                                                                                  \
  int topk_gate_fwd(int dtype, const void* logits, int64_t stride, void* weights, int32_t* experts, void* scratch,    \
                    int64_t scratch_stride, int64_t tokens, int64_t num_experts, int64_t k, int rule,                 \
                    const void* bias, int64_t num_groups, int64_t kept_groups, int renormalise, double scale,         \
                    const void* forced, int forced_size, int threads);                                                \
  int topk_gate_bwd(int dtype, const void* grad, const void* weights, const int32_t* experts, const void* logits,     \
                    int64_t stride, void* dlogits, void* scratch, int64_t scratch_stride, int64_t tokens,             \
                    int64_t num_experts, int64_t k, int rule, int renormalise, double scale, int threads);            \
  int make_plan_fwd(int index_size, const void* experts, const int64_t* visit, const int32_t* limit, int32_t* counts, \
                    int64_t chunks, int32_t* expert_offsets, int32_t* row_token, int32_t* row_choice,                 \
                    int32_t* slot_row, int32_t* requested, int32_t* kept, int32_t* dropped, int64_t tokens,           \
                    int64_t k, int64_t num_experts, int64_t capacity, int64_t rows, int by_choice, int threads);      \
  void plan_expert_choice_fwd(int dtype, const void* scores, int64_t stride, void* keys, int32_t* expert_offsets,     \
                              int32_t* row_token, int32_t* row_choice, int32_t* slot_row, int32_t* requested,         \
                              int32_t* kept, int32_t* dropped, int64_t tokens, int64_t num_experts, int64_t capacity, \
                              const int32_t* limit, int64_t rows, int threads);                                       \
  void plan_priority_fwd(int dtype, const void* scores, int64_t stride, void* scratch, int32_t* experts,              \
                         int32_t* requested, int32_t* kept, int64_t tokens, int64_t num_experts, int64_t capacity,    \
                         const int32_t* limit, int threads);                                                          \
  int dispatch_fwd(int element_size, const void* x, int64_t x_stride, const int32_t* row_token,                       \
                   const int32_t* slot_row, const int32_t* expert_offsets, void* rows, int64_t tokens, int64_t k,     \
                   int64_t num_experts, int64_t num_rows, int64_t dim, int threads);                                  \
  int combine_fwd(int dtype, const void* rows, int64_t rows_stride, const void* weights, const int32_t* slot_row,     \
                  void* y, int64_t tokens, int64_t k, int64_t num_rows, int64_t dim, int threads);                    \
  int combine_bwd(int dtype, const void* grad, int64_t grad_stride, const void* rows, int64_t rows_stride,            \
                  const void* weights, const int32_t* slot_row, const int32_t* expert_offsets, void* drows,           \
                  void* dweights, int64_t tokens, int64_t k, int64_t num_experts, int64_t num_rows, int64_t dim,      \
                  int threads);                                                                                       \
  int grouped_gemm_fwd(MOE_GROUPED_GEMM_ARGS, const void* bias, int activation, void* out, void* pre, int64_t rows,   \
                       int64_t tokens, int threads);                                                                  \
  int grouped_gemm_bwd_weight(int dtype, const void* x, int64_t x_stride, const int32_t* x_token, int64_t x_rows,     \
                              const void* grad, int64_t grad_stride, const int32_t* grad_token, int64_t grad_rows,    \
                              const int32_t* expert_offsets, int64_t num_experts, const void* row_weight,             \
                              void* dweight, void* dbias, int64_t din, int64_t dout, int64_t rows, int threads);      \
  int grouped_gemm_sum_rows(int dtype, const void* rows, const int32_t* token, void* out, int64_t num_rows,          \
                             int64_t tokens, int64_t dim, int threads);                                               \
  void activation_bwd(int dtype, const void* grad, int64_t grad_stride, const void* pre, int activation, void* dpre,  \
                      int64_t rows, int64_t width, int threads);                                                      \
  int expert_mlp_bwd_hidden(MOE_GROUPED_GEMM_ARGS, const void* row_weight, const void* b_out, const void* pre,       \
                             int activation, void* dpre, void* weighted, void* drow_weight, int64_t rows,             \
                             int64_t tokens, int threads);                                                                            \
  int check_plan(const int32_t* expert_offsets, const int32_t* row_token, const int32_t* row_choice,                  \
                 const int32_t* slot_row, int64_t tokens, int64_t k, int64_t num_rows, int64_t num_experts,           \
                 int threads);                                                                                        \
  int expert_mlp_fwd(int dtype, const void* x, int64_t x_stride, const void* weights, const void* w_in,               \
                     int64_t in_stride_e, int64_t in_stride_k, int64_t in_stride_j, const void* b_in,                 \
                     const void* w_out, int64_t out_stride_e, int64_t out_stride_k, int64_t out_stride_j,             \
                     const void* b_out, int activation, const int32_t* expert_offsets, const int32_t* row_token,      \
                     const int32_t* slot_row, int index_size, const void* experts, int32_t* scratch, void* pre,       \
                     void* activated, void* rows, void* y, int64_t tokens, int64_t k, int64_t num_rows,               \
                     int64_t num_experts, int64_t din, int64_t width, int64_t hidden_dim, int64_t dout, int by_dots,  \
                     int threads);                                                                                    \
  int grouped_gemm_norms(MOE_GROUPED_GEMM_ARGS, const void* bias, void* out, void* kept, int64_t rows, int threads); \
  void sinkhorn_fwd(int dtype, const void* scores, int64_t stride_batch, int64_t stride_row, double first_tau,        \
                    double last_tau, int64_t iterations, void* p, void* scratch, int64_t scratch_stride,              \
                    int64_t batch, int64_t n, const double* rows, const double* columns, double tolerance,            \
                    int threads);                                                                                     \
  void sinkhorn_bwd(int dtype, const void* grad, int64_t grad_stride_batch, int64_t grad_stride_row,                  \
                    const void* scores, int64_t stride_batch, int64_t stride_row, double first_tau, double last_tau,  \
                    int64_t iterations, void* dscores, void* scratch, int64_t scratch_stride, int64_t batch,          \
                    int64_t n, const double* rows, const double* columns, double tolerance, double* drows,            \
                    double* dcolumns, int threads);                                                                   \
  void tree_gate_fwd(int dtype, const void* split_logits, const void* leaf_logits, void* gates, void* leaf_probs,     \
                     void* scratch, int64_t scratch_stride, int64_t tokens, int64_t trees, int64_t experts,           \
                     double gamma, double epsilon, double least, int threads);                                        \
  void tree_gate_bwd(int dtype, const void* grad_gates, const void* grad_leaf_probs, const void* split_logits,        \
                     const void* leaf_logits, void* dsplit, void* dleaf, void* scratch, int64_t scratch_stride,       \
                     int64_t tokens, int64_t trees, int64_t experts, double gamma, double epsilon, double least,      \
                     int threads);                                                                                    \
  void expect_writes(void* output, int64_t bytes, int threads);                                                       \
  void tree_reach(int dtype, const void* split_logits, int64_t stride_token, int64_t stride_tree, double gamma,       \
                  int64_t tokens, int64_t trees, int64_t levels, void* bits, int32_t* offsets, int32_t* token,       \
                  int threads);                                                                                       \
  void tree_products_fwd(MOE_TREE_PRODUCTS_ARGS, const void* split_bias, const void* leaf_bias, int threads);        \
  void tree_products_bwd(MOE_TREE_PRODUCTS_ARGS, void* dx, void* dsplit_weight, void* dleaf_weight, int threads);    \
  void tree_route_fwd(int dtype, const void* x, int64_t stride, const void* split_weight, const void* leaf_weight,   \
                      const void* split_bias, const void* leaf_bias, void* weights, int32_t* experts,                \
                      int32_t* visited, void* unsaturated, void* scratch, int64_t scratch_stride, int64_t tokens,    \
                      int64_t dim, int64_t trees, int64_t num_experts, double gamma, int threads);

namespace moe {
namespace base {
MOE_DECLARE_CPU_OPS
}
namespace avx2 {
MOE_DECLARE_CPU_OPS
}
namespace avx512 {
MOE_DECLARE_CPU_OPS
}
}  // namespace moe
