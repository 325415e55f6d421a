"""Expert norms: the norm of every expert's output for every token.

    h_te = act(x_t W_in_e + b_in_e),   y_te = h_te W_out_e + b_out_e,   s_te = ||y_te||
    dy_te = ds_te y_te / s_te,   0 where s_te = 0

Kernels compute experts in groups, with a row for each token and each expert of a group. Saved for backward: x, the
norms and the parameters. Backward computes hidden layers and outputs of a group again. The gradients are those of an
expert MLP with gate weights ds / s and the output gradient y.
"""

from __future__ import annotations

from torch import Tensor

import python_ref.expert_norms as reference
from moe_kernels import backends, library
from moe_kernels.ops._autocast import without_autocast
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
        w_in: (E, D, H), or (E, D, 2 H) for a gated activation, in the dtype of x; any strides.
        w_out: (E, H, Dout) in the dtype of x.
        b_in, b_out: (E, H or 2 H) and (E, Dout) in the dtype of x, or None.
        activation: as in grouped_gemm, but not "swiglu_clamped".
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Returns:
        s (T, E) in the dtype of x. The hidden layer is rounded to that dtype. Outputs and sums of squares are in
        float32 (float64 stays), but a CPU with AMX rounds outputs of large bfloat16 experts to bfloat16.

    Gradient: to x, the weights and the biases; zero where a norm is zero, or is computed as zero because its squares
    underflow (outputs below about 3e-23 in float32). Kernels are once differentiable.

    Cost of kernels with W = H or 2 H columns of w_in. G experts are computed at a time, 1 on a CPU. On a GPU G is the
    largest number up to E with T G max(D, W, Dout) up to 2^27, but at least 1. Tensors with a row for each token and
    each of G experts have, all together, up to T G H elements forward and T G (D + 2 W + 2 H + Dout) backward. FLOPs
    (torch's counter): 2 T E (D W + H Dout) forward, and three times as many backward if all gradients are needed, a
    third of them for recomputation.

    Raises:
        TypeError: a tensor has another dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: shapes or devices that do not fit, an unknown activation, "swiglu_clamped", or an odd W with a
            gated activation.
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
        raise ValueError(f"expert_norms: activation must be one that grouped_gemm takes, but not {activation!r}")
    check_parameters("expert_norms", x, None, w_in, w_out, b_in, b_out, activation)
    chosen = backends.choose("expert_norms", backend, x)
    if chosen == "reference":
        with without_autocast(x.device.type):
            return reference.expert_norms(x, w_in, w_out, b_in=b_in, b_out=b_out, activation=activation)
    return library.ops.expert_norms_fwd(x, w_in, w_out, b_in, b_out, activation or "", chosen).to(x.dtype)
