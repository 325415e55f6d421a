// Declares the launchers of csrc/cuda. A launcher starts its kernels on `stream`; it neither allocates memory nor waits
// until the kernels finish. It returns cudaErrorInvalidValue for sizes or codes that its kernels cannot take, else what
// CUDA returns. MOE_CUDA_OPS, at the end, lists the launchers for the Python module (module.cpp) and for the tests that
// run the kernels on the CPU (tests/ptx).
//
// `dtype` is float32, bfloat16 or float16, as a code of dtypes.h, unless a comment says otherwise. Sizes: T tokens,
// K choices of a token (tree gates: K trees), E experts, R rows of a plan, B matrices; D, Din, Dout, H and P features.
// Strides count elements from one row, token, expert or matrix to the next, unless a comment says otherwise.
//
// A routing plan gives a row to each choice that an expert keeps. Rows are sorted by expert: expert e has the rows from
// expert_offsets[e] to expert_offsets[e + 1] - 1. Rows from expert_offsets[E] on are not in use. row_token and
// row_choice are the token and the choice of a row, or -1 for a row not in use. slot_row is the row of a token's
// choice, or -1 for a choice without a row.
#pragma once

#include <driver_types.h>

#include <cstdint>

namespace moe {

// k-winner-take-all: y = values for the k largest elements of each row of x, else +0. NaN is larger than +inf.
cudaError_t kwta_fwd(int dtype,
                     const void* x,  // (rows, n), last dimension contiguous
                     int64_t x_stride,
                     const void* values,  // (rows, n), last dimension contiguous; nullptr: x
                     int64_t values_stride,
                     void* y,        // (rows, n) contiguous, or nullptr
                     int32_t* bits,  // (rows, ceil(n / 32)): bit i of word w is 1 if element 32 w + i wins; or nullptr
                     uint8_t* mask,  // (rows, n): 1 for winners, else 0; or nullptr
                     int64_t rows, int64_t n, int64_t k,
                     int ties,  // if more elements equal the k-th largest than can win: 0 the first win, 1 none, 2 all
                     // First guess of the threshold, in standard deviations above the mean. It changes no result.
                     // Best: the standard normal quantile of 1 - (k - 0.5) / n, or 0 if k is 0 or n.
                     float z,
                     cudaStream_t stream);

// dx = grad where the bit is 1, else +0, also where grad is NaN or infinite.
cudaError_t kwta_bwd(int element_size,      // 2 or 4 bytes
                     const void* grad,      // (rows, n), last dimension contiguous
                     int64_t grad_stride,
                     const int32_t* bits,   // (rows, ceil(n / 32))
                     void* dx,              // (rows, n) contiguous
                     int64_t rows, int64_t n, cudaStream_t stream);

// The experts of each token's k largest keys, in descending order, and their weights. NaN is larger than +inf. Of equal
// keys that of the lower expert index comes first. ops/topk_gate.py has the formulas.
cudaError_t topk_gate_fwd(int dtype,
                          const void* logits,  // (T, E), last dimension contiguous
                          int64_t stride,
                          void* weights,       // (T, K) float32
                          int32_t* experts,    // (T, K)
                          void* scratch,       // (T, E + num_groups) int32 if E > 256, unless only rule is given
                          int64_t scratch_stride,  // not used
                          int64_t tokens, int64_t num_experts, int64_t k,
                          int rule,  // softmax over the k chosen logits (0) or over all experts (1), or sigmoid (2)
                          const float* bias,       // (E), or nullptr
                          int64_t num_groups, int64_t kept_groups,  // 0, 0: no groups
                          int renormalise, double scale,
                          const void* forced,  // (T, K), or nullptr
                          int forced_size,     // bytes of an element of forced: 2, 4 or 8
                          cudaStream_t stream);

// rule: -1 if the weights are those of rule 0 (logits is nullptr) or 1, neither renormalised nor scaled, and chosen by
// logits. Otherwise weights is not read.
cudaError_t topk_gate_bwd(int dtype,
                          const void* grad,        // (T, K) float32
                          const void* weights,     // (T, K) float32
                          const int32_t* experts,  // (T, K), from 0 to E - 1
                          const void* logits,      // (T, E), or nullptr
                          int64_t stride,
                          void* dlogits,           // (T, E) contiguous
                          void* scratch, int64_t scratch_stride,  // not used
                          int64_t tokens, int64_t num_experts, int64_t k, int rule, int renormalise, double scale,
                          cudaStream_t stream);

// The routing plan. A request is a token's choice of an expert. An expert keeps its first `capacity` requests,
// and no more than its limit, in visiting order.
cudaError_t make_plan_fwd(int index_size,        // 4 or 8 bytes
                          const void* experts,   // (T, K) contiguous; an id outside [0, E) names no expert
                          const int64_t* visit,  // (T) tokens in visiting order, or nullptr: 0, 1, ...
                          const int32_t* limit,  // (E) the most rows of each expert, or nullptr
                          int32_t* counts,       // (chunks, E): scratch
                          int64_t chunks,        // 1 to 1024: parts of the T * K requests
                          int32_t* expert_offsets,  // (E + 1)
                          int32_t* row_token,       // (R)
                          int32_t* row_choice,      // (R)
                          int32_t* slot_row,        // (T, K)
                          int32_t* requested,       // (E): number of requests
                          int32_t* kept,            // (E): number of kept requests
                          int32_t* dropped,         // (): sum of requested - kept
                          int64_t tokens, int64_t k, int64_t num_experts, int64_t capacity,
                          int64_t rows,   // R = min(T * K, E * capacity)
                          int by_choice,  // visits all first choices, then all second ones, ...; else token by token
                          cudaStream_t stream);

// rows_r = x[row_token_r], zeros from row expert_offsets[E] on.
cudaError_t dispatch_fwd(int element_size,               // 2 or 4 bytes
                         const void* x,                  // (T, D), last dimension contiguous
                         int64_t x_stride,
                         const int32_t* row_token,       // (R), not read: slot_row says the same
                         const int32_t* slot_row,        // (T, K)
                         const int32_t* expert_offsets,  // (E + 1)
                         void* rows,                     // (R, D) contiguous
                         int64_t tokens, int64_t k, int64_t num_experts, int64_t num_rows, int64_t dim,
                         cudaStream_t stream);

// y_t = sum of weights_tk rows_r over the choices k with r = slot_row_tk >= 0, in float32 and in the order of k.
cudaError_t combine_fwd(int dtype,
                        const void* rows,         // (R, D), last dimension contiguous
                        int64_t rows_stride,
                        const void* weights,      // (T, K) float32, or nullptr: ones
                        const int32_t* slot_row,  // (T, K)
                        void* y,                  // (T, D) contiguous
                        int64_t tokens, int64_t k, int64_t num_rows, int64_t dim, cudaStream_t stream);

// With r = slot_row_tk: drows_r = weights_tk grad_t and dweights_tk = <rows_r, grad_t>; dweights_tk = 0 if r = -1.
// drows is zero from row expert_offsets[E] on.
cudaError_t combine_bwd(int dtype,
                        const void* grad,               // (T, D), last dimension contiguous
                        int64_t grad_stride,
                        const void* rows,               // (R, D), last dimension contiguous
                        int64_t rows_stride,
                        const void* weights,            // (T, K) float32
                        const int32_t* slot_row,        // (T, K)
                        const int32_t* expert_offsets,  // (E + 1)
                        void* drows,                    // (R, D) contiguous
                        void* dweights,                 // (T, K) float32
                        int64_t tokens, int64_t k, int64_t num_experts, int64_t num_rows, int64_t dim,
                        cudaStream_t stream);

// Sinkhorn's iteration (definition: python_ref/sinkhorn.py): normalises the rows, then the columns of exp(scores /
// tau), `iterations` > 0 times. tau falls geometrically from first_tau to last_tau, or is constant if they are equal.
// n is at most 64.
cudaError_t sinkhorn_fwd(int dtype,
                         const void* scores,  // (B, n, n), last dimension contiguous
                         int64_t stride_batch, int64_t stride_row, double first_tau, double last_tau,
                         int64_t iterations,
                         void* p,        // (B, n, n) contiguous
                         void* scratch,           // batch x scratch_stride bytes
                         int64_t scratch_stride,  // a multiple of 8, at least 8
                         int64_t batch, int64_t n,
                         const double* rows, const double* columns,  // (B, n): prescribed sums; or both nullptr: ones
                         // A matrix stops once its row and column sums are within this of the prescribed ones; rows
                         // and columns whose scores are all -inf do not count. Negative: no tolerance. It must be
                         // negative if no sums are prescribed.
                         double tolerance,
                         cudaStream_t stream);

cudaError_t sinkhorn_bwd(int dtype,
                         const void* grad,  // (B, n, n), last dimension contiguous
                         int64_t grad_stride_batch, int64_t grad_stride_row,
                         const void* scores,  // (B, n, n), last dimension contiguous
                         int64_t stride_batch, int64_t stride_row, double first_tau, double last_tau,
                         int64_t iterations,
                         void* dscores,  // (B, n, n) contiguous
                         void* scratch,           // batch x scratch_stride bytes
                         int64_t scratch_stride,  // a multiple of 8, at least 16 n iterations + 8
                         int64_t batch, int64_t n, const double* rows, const double* columns, double tolerance,
                         double* drows, double* dcolumns,  // (B, n), or nullptr without prescribed sums
                         cudaStream_t stream);

// The factors of grouped GEMMs: rows of x and of weight (contiguous along Dout, or along Din if transposed) must start
// and end at multiples of 16 bytes. If the activation is gated and the weight not transposed, so must both halves of a
// row of the weight. native/grouped_gemm_cuda.py copies what does not.

// out_r = act(x_r W_e + b_e) for the rows r of expert e, zeros from row expert_offsets[E] on. A gated activation is
// act(gate) * linear: the first half of a row of x W + b are gates, the second half linear parts.
cudaError_t grouped_gemm_fwd(int dtype,                  // bfloat16 or float16
                             const void* x,              // (R, Din), or (T, Din) with row_token; Din contiguous
                             int64_t x_stride,
                             const int32_t* row_token,  // (R), -1 for a row of zeros; or nullptr
                             const void* weight,         // (E, Din, Dout); Dout contiguous, or Din if transposed
                             int64_t expert_stride,
                             int64_t weight_stride,      // step along Din, or along Dout if transposed
                             int transposed,
                             const int32_t* expert_offsets,  // (E + 1)
                             const void* bias,           // (E, Dout), last dimension contiguous, or nullptr
                             int64_t bias_stride,
                             int activation,             // an Activation of moe/cuda/activation.cuh
                             void* out,                  // (R, Dout) contiguous; gated: (R, Dout / 2)
                             void* pre,                  // receives x W + b: (R, Dout) contiguous; or nullptr
                             int64_t num_rows, int64_t num_experts, int64_t din, int64_t dout, cudaStream_t stream);

// Over the rows r of expert e: dW_e = sum of x_r^T grad_r, db_e = sum of row_weight_r grad_r. Unless Din is 0, rows of
// x and grad must start and end at multiples of 16 bytes. For the second layer of an expert MLP, x is `weighted` of
// expert_mlp_bwd_hidden: dW_e includes row_weight already.
cudaError_t grouped_gemm_bwd_weight(int dtype,            // bfloat16 or float16
                                    const void* x,        // (R, Din), or (T, Din) with x_token
                                    int64_t x_stride,
                                    const int32_t* x_token,     // (R), -1 for a row of zeros; or nullptr
                                    const void* grad,           // (R, Dout), or (T, Dout) with grad_token
                                    int64_t grad_stride,
                                    const int32_t* grad_token,  // (R), -1 for a row of zeros; or nullptr
                                    const int32_t* expert_offsets,  // (E + 1)
                                    const float* row_weight,        // (R), or nullptr for ones
                                    void* dweight,        // (E, Din, Dout) contiguous
                                    void* dbias,          // (E, Dout) contiguous, or nullptr
                                    int64_t num_rows, int64_t num_experts, int64_t din, int64_t dout,
                                    cudaStream_t stream);

// out_t = sum of the rows of token t, in float32 and in the order of by_token.
cudaError_t grouped_gemm_sum_rows(int dtype,
                                  const void* rows,              // (R, D), last dimension contiguous
                                  int64_t rows_stride,
                                  const int32_t* by_token,       // (R): row numbers sorted by token
                                  const int32_t* token_offsets,  // (T + 1): where each token's rows start in by_token
                                  void* out,                     // (T, D) contiguous
                                  int64_t tokens, int64_t dim, cudaStream_t stream);

// dpre = grad act'(pre); for a gated activation, the gradients to gates and linear parts.
cudaError_t activation_bwd(int dtype,            // bfloat16 or float16
                           const void* grad,     // (R, H), last dimension contiguous
                           int64_t grad_stride,
                           const void* pre,      // (R, H) contiguous; gated: (R, 2 H)
                           int activation,
                           void* dpre,           // like pre
                           int64_t num_rows, int64_t hidden, cudaStream_t stream);

// The backward pass of an expert MLP down to its hidden units. For a row r of expert e with token t, let h = act(pre_r)
// and a = grad_t W_e. Then dpre_r is what activation_bwd computes from grad_r = row_weight_r a, weighted_r is
// row_weight_r h, and partial_ir is <h, a> over the columns c with floor(c / 128) = i, plus <b_out_e, grad_t> if i = 0.
// The gradient of row_weight_r is the sum of partial_ir over i. All three are zero from row expert_offsets[E] on.
cudaError_t expert_mlp_bwd_hidden(int dtype,                 // bfloat16 or float16
                                  const void* grad,          // (T, D), or (R, D) without row_token; D contiguous
                                  int64_t grad_stride,
                                  const int32_t* row_token,  // (R), -1 for a row of zeros; or nullptr
                                  const void* weight,        // (E, D, H) as in grouped_gemm_fwd
                                  int64_t expert_stride, int64_t weight_stride, int transposed,
                                  const int32_t* expert_offsets,  // (E + 1)
                                  const float* row_weight,   // (R)
                                  const void* b_out,         // (E, D), last dimension contiguous, or nullptr
                                  int64_t b_out_stride,
                                  const void* pre,           // (R, H) contiguous; gated: (R, 2 H)
                                  int activation,
                                  void* dpre,                // like pre
                                  void* weighted,            // (R, H)
                                  float* partial,            // (max(ceil(H / 128), 1), R)
                                  int64_t num_rows, int64_t num_experts, int64_t dim, int64_t hidden,
                                  cudaStream_t stream);

// partial_ir = sum of the squares of rows_r W_e + b_e over the columns c with floor(c / 128) = i, for the rows r of
// expert e; 0 from row expert_offsets[E] on.
cudaError_t grouped_gemm_norms(int dtype,            // bfloat16 or float16
                               const void* rows,     // (R, Din), last dimension contiguous
                               int64_t rows_stride,
                               const void* weight,   // (E, Din, Dout) as in grouped_gemm_fwd
                               int64_t expert_stride, int64_t weight_stride, int transposed,
                               const int32_t* expert_offsets,  // (E + 1)
                               const void* bias,     // (E, Dout), last dimension contiguous, or nullptr
                               int64_t bias_stride,
                               float* partial,       // (max(ceil(Dout / 128), 1), R)
                               int64_t num_rows, int64_t num_experts, int64_t din, int64_t dout, cudaStream_t stream);

// The tree gate after its matrix products. leaf_probs_tji is the product of the branch probabilities (smooth steps of
// width gamma of the split logits, see moe/cuda/tree.cuh) on the path to leaf i of tree j. The term of a leaf is
// (leaf_probs_tji + epsilon) exp(leaf_logits_tji), or 0 if leaf_probs_tji < least. gates_ti is the sum of the terms of
// leaf i over the trees j, divided by the sum of all terms of token t.
cudaError_t tree_gate_fwd(int dtype,
                          const void* split_logits,  // (T, K, E - 1) contiguous, nodes in heap order
                          const void* leaf_logits,   // (T, K, E) contiguous, leaves from left to right
                          void* gates,               // (T, E)
                          void* leaf_probs,          // (T, K, E)
                          void* scratch, int64_t scratch_stride,  // not used
                          int64_t tokens, int64_t num_trees, int64_t num_experts, float gamma, float epsilon,
                          float least, cudaStream_t stream);

cudaError_t tree_gate_bwd(int dtype,
                          const void* grad_gates,       // (T, E)
                          const void* grad_leaf_probs,  // (T, K, E), or nullptr: zeros
                          const void* split_logits,     // (T, K, E - 1) contiguous
                          const void* leaf_logits,      // (T, K, E) contiguous
                          void* dsplit,                 // (T, K, E - 1) contiguous
                          void* dleaf,                  // (T, K, E) contiguous
                          void* scratch, int64_t scratch_stride,  // not used
                          int64_t tokens, int64_t num_trees, int64_t num_experts, float gamma, float epsilon,
                          float least, cudaStream_t stream);

// Finds the likeliest leaf of each tree by a search from the root, and chooses its expert. The weights are a softmax of
// these leaves' logits, summed over the trees that choose the same expert.
cudaError_t tree_route_fwd(int dtype,
                           const void* x,             // (T, P), last dimension contiguous
                           int64_t x_stride,
                           const void* split_weight,  // (K, E - 1, P) contiguous, nodes in heap order
                           const void* leaf_weight,   // (K, E, P) contiguous, leaves from left to right
                           const void* split_bias,    // (K, E - 1), or nullptr
                           const void* leaf_bias,     // (K, E), or nullptr
                           void* weights,             // (T, K) float32; 0 if an earlier tree has the expert
                           int32_t* experts,          // (T, K); -1 if an earlier tree has the expert
                           int32_t* visited,          // (T, K): number of inner nodes whose weights were read
                           // (T, K): 1 if the search met an unsaturated node (split logit strictly between
                           // -gamma / 2 and gamma / 2) at least as likely as the chosen leaf, else 0. With 0 the leaf
                           // has probability 1.
                           uint8_t* unsaturated,
                           void* scratch, int64_t scratch_stride,  // not used
                           int64_t tokens, int64_t dim, int64_t num_trees, int64_t num_experts, float gamma,
                           cudaStream_t stream);

}  // namespace moe

#define MOE_CUDA_OPS(X) \
  X(kwta_fwd) X(kwta_bwd) X(topk_gate_fwd) X(topk_gate_bwd) \
  X(make_plan_fwd) X(dispatch_fwd) X(combine_fwd) X(combine_bwd) \
  X(sinkhorn_fwd) X(sinkhorn_bwd) \
  X(grouped_gemm_fwd) X(grouped_gemm_bwd_weight) X(grouped_gemm_sum_rows) X(grouped_gemm_norms) \
  X(activation_bwd) X(expert_mlp_bwd_hidden) \
  X(tree_gate_fwd) X(tree_gate_bwd) X(tree_route_fwd)
