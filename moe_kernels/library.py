"""What torch knows of the operations: schemas, fakes (shapes without data) and FLOP formulas.

torch.compile, opcheck and torch.utils.flop_counter all read these. An operation is one schema, one implementation that
hands over to the backend named in its last argument, and one fake. Autograd stands in ops/<op>.py.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_kernels import backends

_library = torch.library.Library("moe_kernels", "DEF")

# What is defined below, to be called by ops/<op>.py: ops.kwta_fwd(...) is torch.ops.moe_kernels.kwta_fwd(...), sooner.
ops = SimpleNamespace()


def _define(schema: str, implementation, fake, flops) -> None:
    name = schema[: schema.index("(")]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_kernels::{name}", fake, lib=_library)
    register_flop_formula(getattr(torch.ops.moe_kernels, name))(flops)
    registered = getattr(torch.ops.moe_kernels, name).default

    def call(*args):
        # Past the dispatcher, which takes 7 us, unless somebody listens there: a compiler, a FLOP counter, a fake mode.
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return registered(*args)
        return implementation(*args)

    setattr(ops, name, call)


def rows(x: Tensor) -> Tensor:
    """x (R, N) with a contiguous last dimension, copied only if it has none."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


GATED = ("swiglu", "geglu")  # activations that halve the columns


def matrices(weight: Tensor) -> Tensor:
    """weight (E, M, N) with a contiguous last or middle dimension, copied only if it has neither."""
    return weight if weight.stride(-1) == 1 or weight.stride(-2) == 1 else weight.contiguous()


def words(n: int) -> int:
    """int32 words that hold a packed mask of n elements."""
    return (n + 31) // 32


def _kwta_fwd(x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool, backend: str):
    return backends.load(backend, "kwta").kwta_fwd(x, values, k, ties, save_bits)


def _kwta_fwd_fake(x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool, backend: str):
    bits = x.new_empty((x.shape[0], words(x.shape[1]) if save_bits else 0), dtype=torch.int32)
    return x.new_empty(x.shape), bits


def _kwta_bwd(grad: Tensor, bits: Tensor, backend: str) -> Tensor:
    return backends.load(backend, "kwta").kwta_bwd(rows(grad), bits)


def _kwta_mask(x: Tensor, k: int, ties: str, backend: str) -> Tensor:
    return backends.load(backend, "kwta").kwta_mask(x, k, ties)


def _none(*args, **kwargs) -> int:
    return 0


def _one_per_element(x_shape, *args, out_shape=None, **kwargs) -> int:
    return x_shape[0] * x_shape[1]


_define(
    "kwta_fwd(Tensor x, Tensor? values, SymInt k, str ties, bool save_bits, str backend) -> (Tensor, Tensor)",
    _kwta_fwd,
    _kwta_fwd_fake,
    _one_per_element,
)
_define(
    "kwta_bwd(Tensor grad, Tensor bits, str backend) -> Tensor",
    _kwta_bwd,
    lambda grad, bits, backend: grad.new_empty(grad.shape),
    _one_per_element,
)
_define(
    "kwta_mask(Tensor x, SymInt k, str ties, str backend) -> Tensor",
    _kwta_mask,
    lambda x, k, ties, backend: x.new_empty(x.shape, dtype=torch.bool),
    _none,
)


def refuse_unknown_experts(experts: Tensor, num_experts: int) -> None:
    """ValueError for an id outside [-1, E) on the CPU; a GPU would have to be waited for, and counts it as -1."""
    if experts.device.type != "cpu" or experts.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(experts))
    if low < -1 or high >= num_experts:
        raise ValueError(f"make_plan: experts must be from -1 (none) to {num_experts - 1}; got {low} to {high}")


def plan_rows(num_tokens: int, k: int, num_experts: int, capacity: int | None) -> int:
    """R: rows that a plan makes room for, known without looking at the choices."""
    return num_tokens * k if capacity is None else torch.sym_min(num_tokens * k, num_experts * capacity)


def _make_plan(
    experts: Tensor, num_experts: int, capacity: int | None, priority: Tensor | None, order: str, backend: str
):
    refuse_unknown_experts(experts, num_experts)
    return backends.load(backend, "plan").make_plan_fwd(experts, num_experts, capacity, priority, order)


def _plan_fake(x: Tensor, num_tokens: int, k: int, num_experts: int, rows: int) -> tuple[Tensor, ...]:
    shapes = ((num_experts + 1,), (rows,), (rows,), (num_tokens, k), (num_experts,), (num_experts,), ())
    return tuple(x.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _make_plan_fake(experts: Tensor, num_experts: int, capacity: int | None, priority: Tensor | None, order, backend):
    num_tokens, k = experts.shape
    return _plan_fake(experts, num_tokens, k, num_experts, plan_rows(num_tokens, k, num_experts, capacity))


def _plan_expert_choice_fake(scores: Tensor, capacity: int, backend: str):
    num_tokens, num_experts = scores.shape
    rows = plan_rows(num_tokens, num_experts, num_experts, capacity)
    return _plan_fake(scores, num_tokens, num_experts, num_experts, rows)


def _plan_priority_fake(scores: Tensor, capacity: int, backend: str):
    num_tokens, num_experts = scores.shape
    arrays = _plan_fake(scores, num_tokens, 1, num_experts, plan_rows(num_tokens, 1, num_experts, capacity))
    return *arrays, scores.new_empty((num_tokens, 1), dtype=torch.int32)


_PLAN = ", ".join(["Tensor"] * 7)  # expert_offsets, row_token, row_choice, slot_row, requested, kept, dropped

_define(
    "make_plan_fwd(Tensor experts, SymInt num_experts, SymInt? capacity, Tensor? priority, str order, str backend) -> "
    f"({_PLAN})",
    _make_plan,
    _make_plan_fake,
    _none,
)
_define(
    f"plan_expert_choice_fwd(Tensor scores, SymInt capacity, str backend) -> ({_PLAN})",
    lambda scores, capacity, backend: backends.load(backend, "plan").plan_expert_choice_fwd(scores, capacity),
    _plan_expert_choice_fake,
    _none,
)
_define(
    f"plan_priority_fwd(Tensor scores, SymInt capacity, str backend) -> ({_PLAN}, Tensor)",
    lambda scores, capacity, backend: backends.load(backend, "plan").plan_priority_fwd(scores, capacity),
    _plan_priority_fake,
    _none,
)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a kernel computes in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _topk_gate_fwd(logits: Tensor, k: int, order: str, backend: str):
    return backends.load(backend, "topk_gate").topk_gate_fwd(logits, k, order)


def _topk_gate_fwd_fake(logits: Tensor, k: int, order: str, backend: str):
    num_tokens = logits.shape[0]
    weights = logits.new_empty((num_tokens, k), dtype=wide(logits.dtype))
    return weights, weights.new_empty((num_tokens, k), dtype=torch.int32), weights.new_empty(num_tokens)


def _topk_gate_bwd(
    grad: Tensor,
    weights: Tensor,
    experts: Tensor,
    logits: Tensor | None,
    log_sum: Tensor,
    num_experts: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    kernels = backends.load(backend, "topk_gate")
    return kernels.topk_gate_bwd(grad, weights, experts, logits, log_sum, num_experts, dtype)


def _topk_gate_bwd_fake(grad, weights, experts, logits, log_sum, num_experts, dtype, backend) -> Tensor:
    return grad.new_empty((grad.shape[0], num_experts), dtype=dtype)


_define(
    "topk_gate_fwd(Tensor logits, SymInt k, str order, str backend) -> (Tensor, Tensor, Tensor)",
    _topk_gate_fwd,
    _topk_gate_fwd_fake,
    _none,
)
_define(
    "topk_gate_bwd(Tensor grad, Tensor weights, Tensor experts, Tensor? logits, Tensor log_sum, SymInt num_experts, "
    "ScalarType dtype, str backend) -> Tensor",
    _topk_gate_bwd,
    _topk_gate_bwd_fake,
    _none,
)


def _dispatch(x: Tensor, row_token: Tensor, slot_row: Tensor, expert_offsets: Tensor, backend: str) -> Tensor:
    return backends.load(backend, "dispatch").dispatch_fwd(x, row_token, slot_row, expert_offsets)


def _combine_fwd(rows: Tensor, weights: Tensor | None, slot_row: Tensor, backend: str) -> Tensor:
    return backends.load(backend, "combine").combine_fwd(rows, weights, slot_row)


def _combine_bwd(grad: Tensor, rows: Tensor, weights: Tensor, row_token, slot_row, expert_offsets, row_choice, backend):
    kernels = backends.load(backend, "combine")
    return kernels.combine_bwd(grad, rows, weights, row_token, slot_row, expert_offsets, row_choice)


_define(
    "dispatch_fwd(Tensor x, Tensor row_token, Tensor slot_row, Tensor expert_offsets, str backend) -> Tensor",
    _dispatch,
    lambda x, row_token, *rest: x.new_empty((row_token.shape[0], x.shape[1])),
    _none,
)
_define(
    "combine_fwd(Tensor rows, Tensor? weights, Tensor slot_row, str backend) -> Tensor",
    _combine_fwd,
    lambda rows, weights, slot_row, backend: rows.new_empty((slot_row.shape[0], rows.shape[1])),
    lambda rows, weights, *rest, out_shape=None, **kwargs: (1 if weights is None else 2) * rows[0] * rows[1],
)
_define(
    "combine_bwd(Tensor grad, Tensor rows, Tensor weights, Tensor row_token, Tensor slot_row, Tensor expert_offsets, "
    "Tensor row_choice, str backend) -> (Tensor, Tensor)",
    _combine_bwd,
    lambda grad, rows, weights, *rest: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
    lambda grad, rows, *rest, out_shape=None, **kwargs: 3 * rows[0] * rows[1],
)


def _sinkhorn_fwd(scores: Tensor, taus: list[float], backend: str) -> Tensor:
    return backends.load(backend, "sinkhorn").sinkhorn_fwd(scores, taus)


def _sinkhorn_bwd(grad: Tensor, scores: Tensor, taus: list[float], backend: str) -> Tensor:
    return backends.load(backend, "sinkhorn").sinkhorn_bwd(grad, scores, taus)


_define(
    "sinkhorn_fwd(Tensor scores, float[] taus, str backend) -> Tensor",
    _sinkhorn_fwd,
    lambda scores, taus, backend: scores.new_empty(scores.shape),
    lambda scores, taus, *rest, out_shape=None, **kwargs: 4 * len(taus) * scores[0] * scores[1] * scores[2],
)
_define(
    "sinkhorn_bwd(Tensor grad, Tensor scores, float[] taus, str backend) -> Tensor",
    _sinkhorn_bwd,
    lambda grad, scores, taus, backend: scores.new_empty(scores.shape),
    lambda grad, scores, taus, *rest, out_shape=None, **kwargs: 12 * len(taus) * scores[0] * scores[1] * scores[2],
)


def _sinkhorn_sums_fwd(
    scores: Tensor, taus: list[float], rows: Tensor, columns: Tensor, tolerance: float, backend: str
) -> Tensor:
    return backends.load(backend, "sinkhorn").sinkhorn_sums_fwd(scores, taus, rows, columns, tolerance)


def _sinkhorn_sums_bwd(
    grad: Tensor, scores: Tensor, taus: list[float], rows: Tensor, columns: Tensor, tolerance: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return backends.load(backend, "sinkhorn").sinkhorn_sums_bwd(grad, scores, taus, rows, columns, tolerance)


_define(
    "sinkhorn_sums_fwd(Tensor scores, float[] taus, Tensor rows, Tensor columns, float tolerance, str backend) -> "
    "Tensor",
    _sinkhorn_sums_fwd,
    lambda scores, *rest: scores.new_empty(scores.shape),
    lambda scores, taus, *rest, out_shape=None, **kwargs: 4 * len(taus) * scores[0] * scores[1] * scores[2],
)
_define(
    "sinkhorn_sums_bwd(Tensor grad, Tensor scores, float[] taus, Tensor rows, Tensor columns, float tolerance, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    _sinkhorn_sums_bwd,
    lambda grad, scores, taus, rows, columns, *rest: tuple(x.new_empty(x.shape) for x in (scores, rows, columns)),
    lambda grad, scores, taus, *rest, out_shape=None, **kwargs: 12 * len(taus) * scores[0] * scores[1] * scores[2],
)


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (T, P), weight (K, N, P), bias (K, N) -> (T, K, N)"""
    flat = torch.nn.functional.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return flat.view(x.shape[0], weight.shape[0], weight.shape[1])


def _tree_gate_fwd(
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    split_bias: Tensor | None,
    leaf_bias: Tensor | None,
    gamma: float,
    mode: str,
    backend: str,
):
    kernels = backends.load(backend, "tree_gate")
    fits = getattr(kernels, "tree_gate_fits", None)
    if fits is not None and fits(x, split_weight, leaf_weight):
        return kernels.tree_gate_fused_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, mode)
    logits = _products(x, split_weight, split_bias), _products(x, leaf_weight, leaf_bias)
    return *kernels.tree_gate_fwd(*logits, gamma, mode), *logits


def _tree_gate_fwd_fake(x, split_weight, leaf_weight, *rest):
    num_tokens, (num_trees, num_experts, _) = x.shape[0], leaf_weight.shape
    gates = x.new_empty((num_tokens, num_experts), dtype=wide(x.dtype))
    leaf_logits = x.new_empty((num_tokens, num_trees, num_experts))
    split_logits = x.new_empty((num_tokens, num_trees, num_experts - 1))
    return gates, gates.new_empty(leaf_logits.shape), split_logits, leaf_logits


def _tree_gate_bwd(
    grad_gates: Tensor,
    grad_leaf_probs: Tensor | None,
    split_logits: Tensor,
    leaf_logits: Tensor,
    gamma: float,
    mode: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    kernels = backends.load(backend, "tree_gate")
    return kernels.tree_gate_bwd(grad_gates, grad_leaf_probs, split_logits, leaf_logits, gamma, mode)


def _tree_route_fwd(
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    split_bias: Tensor | None,
    leaf_bias: Tensor | None,
    gamma: float,
    backend: str,
):
    kernels = backends.load(backend, "tree_route")
    return kernels.tree_route_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma)


def _tree_route_fwd_fake(x, split_weight, *rest):
    shape = x.shape[0], split_weight.shape[0]
    dtypes = (wide(x.dtype), torch.int32, torch.int32, torch.bool)
    return tuple(x.new_empty(shape, dtype=dtype) for dtype in dtypes)


def _tree_gate_flops(x, split_weight, leaf_weight, *rest, **kwargs) -> int:
    num_trees, num_experts, dim = leaf_weight
    return 2 * x[0] * dim * num_trees * (2 * num_experts - 1)


def _tree_route_flops(x, split_weight, leaf_weight, *rest, **kwargs) -> int:
    num_trees, num_experts, dim = leaf_weight
    return 2 * x[0] * dim * num_trees * ((num_experts - 1).bit_length() + 1)


_TREE = "Tensor x, Tensor split_weight, Tensor leaf_weight, Tensor? split_bias, Tensor? leaf_bias, float gamma"

_define(
    f"tree_gate_fwd({_TREE}, str mode, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _tree_gate_fwd,
    _tree_gate_fwd_fake,
    _tree_gate_flops,
)
_define(
    "tree_gate_bwd(Tensor grad_gates, Tensor? grad_leaf_probs, Tensor split_logits, Tensor leaf_logits, float gamma, "
    "str mode, str backend) -> (Tensor, Tensor)",
    _tree_gate_bwd,
    lambda grad_gates, grad_leaf_probs, *logits_and_rest: tuple(map(torch.empty_like, logits_and_rest[:2])),
    _none,
)
_define(
    f"tree_route_fwd({_TREE}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _tree_route_fwd,
    _tree_route_fwd_fake,
    _tree_route_flops,
)


def refuse_bad_rows(expert_offsets: Tensor, rows: Tensor, row_token: Tensor | None) -> None:
    """ValueError for offsets that fall or exceed R, or tokens outside [-1, T), on the CPU; for a GPU one would wait."""
    if expert_offsets.device.type != "cpu":
        return
    num_rows = rows.shape[0] if row_token is None else row_token.shape[0]
    bounds = expert_offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > num_rows or any(first > last for first, last in pairwise(bounds)):
        raise ValueError(f"grouped_gemm: expert_offsets must rise from 0 to at most R = {num_rows}; got {bounds}")
    if row_token is None or num_rows == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(row_token))
    if low < -1 or high >= rows.shape[0]:
        raise ValueError(f"grouped_gemm: row_token must be from -1 (zeros) to {rows.shape[0] - 1}; got {low} to {high}")


def _kernels(backend: str):
    return backends.load(backend, "grouped_gemm")


def _num_rows(x: Tensor, token: Tensor | None) -> int:
    return (x if token is None else token).shape[0]


def _grouped_gemm_fwd(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    bias: Tensor | None,
    activation: str,
    keep_pre: bool,
    backend: str,
):
    refuse_bad_rows(expert_offsets, x, row_token)
    bias = None if bias is None else rows(bias)
    return _kernels(backend).grouped_gemm_fwd(
        rows(x), matrices(weight), expert_offsets, row_token, bias, activation, keep_pre
    )


def _grouped_gemm_fwd_fake(x, weight, expert_offsets, row_token, bias, activation, keep_pre, backend):
    num_rows, dout = _num_rows(x, row_token), weight.shape[2]
    out = x.new_empty((num_rows, dout // 2 if activation in GATED else dout))
    return out, x.new_empty((num_rows if keep_pre else 0, dout))


def _product_flops(x, weight, row_token) -> int:
    return 2 * (x if row_token is None else row_token)[0] * weight[1] * weight[2]


def _grouped_gemm_bwd_weight(x, grad, expert_offsets, x_token, grad_token, with_bias: bool, backend: str):
    return _kernels(backend).grouped_gemm_bwd_weight(
        rows(x), rows(grad), expert_offsets, x_token, grad_token, with_bias
    )


def _grouped_gemm_bwd_weight_fake(x, grad, expert_offsets, x_token, grad_token, with_bias, backend):
    num_experts, dout = expert_offsets.shape[0] - 1, grad.shape[1]
    dweight = x.new_empty((num_experts, x.shape[1], dout))
    return dweight, x.new_empty((num_experts if with_bias else 0, dout))


def _expert_mlp_bwd_hidden(
    grad: Tensor,
    w_out: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor,
    row_weight: Tensor,
    pre: Tensor,
    activation: str,
    backend: str,
):
    return _kernels(backend).expert_mlp_bwd_hidden(
        rows(grad), matrices(w_out), expert_offsets, row_token, row_weight, pre, activation
    )


def _expert_mlp_bwd_hidden_fake(grad, w_out, expert_offsets, row_token, row_weight, pre, activation, backend):
    weighted = pre.new_empty((pre.shape[0], w_out.shape[1]))
    return pre.new_empty(pre.shape), weighted, row_weight.new_empty(row_weight.shape)


def _grouped_gemm_norms(x: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    bias = None if bias is None else rows(bias)
    return _kernels(backend).grouped_gemm_norms(rows(x), matrices(weight), expert_offsets, bias)


_define(
    "grouped_gemm_fwd(Tensor x, Tensor weight, Tensor expert_offsets, Tensor? row_token, Tensor? bias, str activation, "
    "bool keep_pre, str backend) -> (Tensor, Tensor)",
    _grouped_gemm_fwd,
    _grouped_gemm_fwd_fake,
    lambda x, weight, offsets, row_token, *rest, out_shape=None, **kwargs: _product_flops(x, weight, row_token),
)
_define(
    "grouped_gemm_bwd_weight(Tensor x, Tensor grad, Tensor expert_offsets, Tensor? x_token, Tensor? grad_token, "
    "bool with_bias, str backend) -> (Tensor, Tensor)",
    _grouped_gemm_bwd_weight,
    _grouped_gemm_bwd_weight_fake,
    lambda x, grad, offsets, x_token, *rest, out_shape=None, **kwargs: _product_flops(x, (0, x[1], grad[1]), x_token),
)
_define(
    "activation_bwd(Tensor grad, Tensor pre, str activation, str backend) -> Tensor",
    lambda grad, pre, activation, backend: _kernels(backend).activation_bwd(rows(grad), pre, activation),
    lambda grad, pre, activation, backend: pre.new_empty(pre.shape),
    _none,
)
_define(
    "expert_mlp_bwd_hidden(Tensor grad, Tensor w_out, Tensor expert_offsets, Tensor row_token, Tensor row_weight, "
    "Tensor pre, str activation, str backend) -> (Tensor, Tensor, Tensor)",
    _expert_mlp_bwd_hidden,
    _expert_mlp_bwd_hidden_fake,
    lambda grad, w_out, offsets, row_token, *rest, out_shape=None, **kwargs: _product_flops(grad, w_out, row_token),
)
_define(
    "grouped_gemm_norms(Tensor x, Tensor weight, Tensor expert_offsets, Tensor? bias, str backend) -> Tensor",
    _grouped_gemm_norms,
    lambda x, weight, expert_offsets, bias, backend: x.new_empty(x.shape[0], dtype=wide(x.dtype)),
    lambda x, weight, *rest, out_shape=None, **kwargs: _product_flops(x, weight, None),
)
