"""Expert norms: the norm of every expert's output for every token; the outputs are not stored.

    h_te = act(x_t W_in_e + b_in_e),   y_te = h_te W_out_e + b_out_e,   s_te = ||y_te||
    dy_te = ds_te y_te / s_te (0 where s_te = 0),   and from there as a two-layer network

Experts are computed in groups, with a row for each token and each expert of the group. The kernel squares and sums the
second product's accumulators, so that a forward holds the group's hidden layers and the (T, E) norms, never the
(T, E, Dout) outputs.
Saved for backward: x, the norms and the parameters. Backward computes a group's hidden layers and outputs again, then
runs the backward of an expert MLP with gate weights ds / s and the gradient y.
"""

from __future__ import annotations

from torch import Tensor

import python_ref.expert_norms as reference
from moe_kernels import backends, library
from moe_kernels.ops._checks import FLOATING, check_rank, check_tensor
from moe_kernels.ops.expert_mlp import check_parameters


def expert_norms(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    *,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    activation: str | None = "relu",
    backend: str | None = None,
) -> Tensor:
    """The l2 norm of every expert's output for every token: (T, D) -> (T, E).

    Args:
        x: (T, D), float32, bfloat16 or float16 (float64 on "reference" and "cpu"). Rows may have any stride.
        w_in: (E, D, H), or (E, D, 2 H) for a gated activation, in the dtype of x; any strides (see grouped_gemm).
        w_out: (E, H, Dout) in the dtype of x.
        b_in, b_out: (E, H or 2 H) and (E, Dout) in the dtype of x, or None.
        activation: as in grouped_gemm, but not "swiglu_clamped".
        backend: "reference", "cpu", "triton" or "cuda"; None chooses (see moe_kernels.explain).

    Returns:
        s (T, E) in the dtype of x. The hidden layer is rounded to that dtype. Outputs, squares and their sum stay in
        float32 (float64 stays) until the root, except outputs of large experts on a CPU with bfloat16 products.

    Gradient: to x, the weights and the biases; zero where a norm is zero, or is computed as zero because its squares
    underflow (outputs below about 1e-23 in float32). Once differentiable. Elements in memory, with W = H or 2 H columns
    of w_in and groups of G experts: T (E + G H) forward, T (E + G (D + 2 W + 2 H + Dout)) and the gradients of the
    parameters backward. G is 1 on a CPU. On a GPU it is the largest number with T G max(D, W, Dout) up to 2^27, at
    least 1; if all experts fit, 2 kernels of ours run forward and 7 backward, whatever E is, besides torch's. FLOPs
    (torch's counter): 2 T E (D W + H Dout) forward, three times that backward, of that a third for recomputation.

    Raises:
        TypeError: a tensor of another dtype, or a torch.func transform.
        ValueError: shapes or devices that do not fit, an unknown activation, a gated one with an odd W.
        BackendError: the named backend cannot run this.

    Source: paper 004 (CompeteSMoE), the competition mechanism.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> w_in = torch.stack([torch.eye(2), 2 * torch.eye(2)])
        >>> w_out = torch.tensor([[[3.0, 4.0], [3.0, 4.0]]]).expand(2, 2, 2)
        >>> mk.expert_norms(x, w_in, w_out)
        tensor([[ 5., 10.],
                [ 5., 10.]])
    """
    check_tensor("expert_norms", "x", x, FLOATING)
    check_rank("expert_norms", "x", x, "(T, D)")
    if activation == library.CLAMPED:
        raise ValueError(f"expert_norms: activation must be one of grouped_gemm's other ones; got {activation!r}")
    check_parameters("expert_norms", x, None, w_in, w_out, b_in, b_out, activation)
    chosen = backends.choose("expert_norms", backend, x)
    if chosen == "reference":
        return reference.expert_norms(x, w_in, w_out, b_in=b_in, b_out=b_out, activation=activation)
    return library.ops.expert_norms_fwd(x, w_in, w_out, b_in, b_out, activation or "", chosen).to(x.dtype)
