"""An MLP under known masks: products, activations and masks of all layers as one function.

    a_l = W_l x_{l-1} + b_l,   x_l = m_l * f(a_l),   l = 1 .. L-1;   y = W_L x_{L-1} + b_L     (paper 000, eqs. 7 and 8)
    da_l = m_l * f'(a_l) * dx_l,   dW_l = da_l^T x_{l-1},   db_l = sum of da_l,   dx_{l-1} = da_l W_l

One node in autograd's graph instead of three a layer, since in a batch of 32 it costs more to call what applies a mask
than to apply it. Bias, relu or tanh, and mask are one call, in place; masks are read from their bits. Saved for
backward: what was given, x_1 .. x_{L-1} and, but for relu and tanh, whose slopes follow from their values,
a_1 .. a_{L-1}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

import python_ref.masked_mlp as reference
from moe_kernels import backends
from moe_kernels.ops._checks import FLOATING, check_choice, check_tensor, remembered
from moe_kernels.ops.kwta import kwta_apply
from python_ref.masked_mlp import ACTIVATIONS

_aten = torch.ops.aten

# Their slope follows from their value, so a_l is not kept.
_IN_PLACE = ("relu", "tanh")

# da_l from the gradient of f(a_l) and a_l, of the others.
_SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": _aten.gelu_backward.default,
    "silu": _aten.silu_backward.default,
    "softplus": lambda grad, a: _aten.softplus_backward.default(grad, a, 1, 20),
    "mish": _aten.mish_backward.default,
}


def masked_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    bits: Sequence[Tensor],
    *,
    activation: str,
    backend: str | None = None,
) -> Tensor:
    """x_0 through L linear layers, the L-1 hidden ones activated and masked: (..., N_0) -> (..., N_L).

    Args:
        x: (..., N_0), float32, bfloat16 or float16 (float64 on "reference" and "cpu").
        weights, biases: L of each, (N_l, N_{l-1}) and (N_l) or None, as torch.nn.functional.linear takes them.
        bits: the masks m_1 .. m_{L-1} as kwta_bits packs them, int32 (..., ceil(N_l / 32)). Bits past N_l are ignored.
        activation: f, a name in ACTIVATIONS.
        backend: of the masks: "reference", "cpu", "triton" or "cuda"; None chooses (see moe_kernels.explain).

    A neuron that does not answer is +0 and hands no gradient on, even where its pre-activation or the gradient that
    reaches it is NaN or infinite. Gradient: to x, weights and biases. Twice differentiable; the second time, as under
    autocast (whose dtype the products and masks then have), in torch.compile and on other backends than "cpu", the
    layers run one by one.
    FLOPs (torch's counter): those of the products, and one an element masked, in either direction.

    Raises:
        TypeError: x is no tensor of those dtypes, bits are not int32, or a torch.func transform.
        ValueError: counts of weights, biases and bits that do not fit, bits of another shape or device, an unknown
            activation.
        RuntimeError: what torch.nn.functional.linear refuses.
        BackendError: the backend asked for by name cannot run this.

    Source: paper 000 (COMET), eqs. 7 and 8.
    """
    words = activation, backend, len(biases), len(bits)
    (chosen, fused, as_it_is), ready = remembered(_check, words, (x, *weights, *bits, *biases))
    if chosen == "reference":
        return reference.masked_mlp(x, weights, biases, bits, activation=activation)
    # ready is None for a compiler; a FLOP counter and a fake mode listen as well.
    if not fused or ready is None or _len_torch_dispatch_stack() or torch.is_autocast_enabled("cpu"):
        return _layer_by_layer(x, weights, biases, bits, activation, chosen)
    hidden = ready.get("hidden")
    if hidden is None:
        hidden = ready["hidden"] = _hidden(x, weights, activation)
    # Past Function.apply, which looks for what functorch wrapped: 4 us, and 10 in a training step with its cold caches.
    apply = super(torch.autograd.Function, _MaskedMLP).apply if torch.is_grad_enabled() else _forward
    if as_it_is:
        return apply(x, activation, bits, hidden, *weights, *biases)
    *leading, n = x.shape
    rows = x.reshape(prod(leading), n)
    flat = [mask.reshape(len(rows), mask.shape[-1]).contiguous() for mask in bits]
    return apply(rows, activation, flat, hidden, *weights, *biases).view(*leading, len(weights[-1]))


def _check(
    activation: str, backend: str | None, num_biases: int, num_bits: int, x: Tensor, *tensors: Any
) -> tuple[str, bool, bool]:
    """The backend, whether that is _MaskedMLP, and whether x and the bits are as that takes them.

    tensors: weights, bits, biases.
    """
    check_tensor("masked_mlp", "x", x, FLOATING)
    check_choice("masked_mlp", "activation", activation, tuple(ACTIVATIONS))
    num_weights = len(tensors) - num_bits - num_biases
    if not num_weights == num_biases == num_bits + 1:
        raise ValueError(
            "masked_mlp: weights and biases must be one of each layer and bits of each but the last; "
            f"got {num_weights}, {num_biases} and {num_bits}"
        )
    bits, biases = tensors[num_weights : num_weights + num_bits], tensors[num_weights + num_bits :]
    for mask, weight in zip(bits, tensors, strict=False):
        kwta_apply(x.new_empty(*x.shape[:-1], len(weight)), mask, backend="reference")  # says what is wrong with bits
    chosen = backends.choose("masked_mlp", backend, x)
    fits = all(
        bias is None
        or (bias.is_cpu and bias.dtype == x.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous())
        for bias, weight in zip(biases, tensors, strict=False)
    )
    return chosen, chosen == "cpu" and fits, x.dim() == 2 and all(mask.is_contiguous() for mask in bits)


def _hidden(x: Tensor, weights: Sequence[Tensor], activation: str) -> Any:
    """Hidden layers like these but for their products, forward and back (backends/native/masked_mlp.py)."""
    inside = activation if activation in _IN_PLACE else ""
    widths = [len(weight) for weight in weights[:-1]]
    return backends.load("cpu", "masked_mlp").masked_mlp_ready(x.dtype, prod(x.shape[:-1]), widths, inside)


def _layer_by_layer(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    bits: Sequence[Tensor],
    activation: str,
    backend: str,
) -> Tensor:
    apply = partial(kwta_apply, backend=backend)
    return reference.masked_mlp(x, weights, biases, bits, activation=activation, apply=apply)


def _forward(
    x: Tensor,
    activation: str,
    bits: Sequence[Tensor],
    hidden: Any,
    *parameters: Any,
    keep: Callable[[Tensor | None, Tensor], None] | None = None,
) -> Tensor:
    """hidden: of `_hidden`. parameters: L weights, then L biases. keep(a_l, x_l): of every layer; no a_l in place."""
    depth, in_place, fwd_ = len(bits), activation in _IN_PLACE, hidden[0]
    adds = in_place and x.itemsize > 2  # a product of narrow type would be rounded before its bias and after it
    weights, biases = parameters[: depth + 1], parameters[depth + 1 :]
    for layer in range(depth):
        x = x.mm(weights[layer].t()) if adds else F.linear(x, weights[layer], biases[layer])
        pre = None if in_place else x
        if not in_place:
            x = ACTIVATIONS[activation](x)
        fwd_(x, biases[layer] if adds else None, bits[layer], layer)
        if keep is not None:
            keep(pre, x)
    return F.linear(x, weights[depth], biases[depth])


class _MaskedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, bits: Sequence[Tensor], hidden: Any, *parameters: Any) -> Tensor:
        inner, pre, depth = [x], [], len(bits)

        def keep(a: Tensor | None, x: Tensor) -> None:
            inner.append(x)
            if a is not None:
                pre.append(a)

        y = _forward(x, activation, bits, hidden, *parameters, keep=keep)
        ctx.save_for_backward(*parameters[: depth + 1], *inner, *pre)
        ctx.activation, ctx.bits, ctx.hidden, ctx.biases = activation, bits, hidden, parameters[depth + 1 :]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, grad)
        saved, bits, activation = ctx.saved_tensors, ctx.bits, ctx.activation
        to_x, _, _, _, *needed = ctx.needs_input_grad
        depth, (_, bwd_) = len(bits), ctx.hidden
        dparameters: list[Tensor | None] = [None] * len(needed)
        for layer in range(depth, -1, -1):
            if layer == depth:
                dbias = grad.sum(0) if needed[-1] else None
            elif activation in _IN_PLACE:
                dbias = bwd_(grad, saved[depth + 2 + layer], bits[layer], layer)
            else:
                grad = _SLOPES[activation](grad, saved[2 * depth + 2 + layer])
                dbias = bwd_(grad, None, bits[layer], layer)
            # Before dW, as autograd has it: the other way round the allocator gave memory back to the system and took
            # it again, 80 to 150 page faults a step at 1000 neurons.
            dx = grad.mm(saved[layer]) if layer or to_x else None
            if needed[layer]:
                dparameters[layer] = grad.t().mm(saved[depth + 1 + layer])
            if needed[depth + 1 + layer]:
                dparameters[depth + 1 + layer] = dbias
            grad = dx
        return grad, None, None, None, *dparameters


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    depth = len(ctx.bits)
    *weights, x = ctx.saved_tensors[: depth + 2]
    y = _layer_by_layer(x, weights, ctx.biases, ctx.bits, ctx.activation, "cpu")
    given = (x, None, None, None, *weights, *ctx.biases)
    wanted = [each for each, needed in zip(given, ctx.needs_input_grad, strict=True) if needed]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
