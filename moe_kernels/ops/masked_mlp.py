"""An MLP under known masks: products, activations and masks of all layers as one function.

    a_l = W_l x_{l-1} + b_l,   x_l = m_l * f(a_l),   l = 1 .. L-1;   y = W_L x_{L-1} + b_L     (paper 000, eqs. 7 and 8)
    da_l = m_l * f'(a_l) * dx_l,   dW_l = da_l^T x_{l-1},   db_l = sum of da_l,   dx_{l-1} = da_l W_l

One node in autograd's graph instead of three a layer, since in a batch of 32 it costs more to call what applies a mask
than to apply it. Bias, relu or tanh, and mask are one call, in place; masks are read from their bits, and where those
of all samples are kept: gathering a batch's took 0.4 % of an epoch. Saved for backward: what was given,
x_1 .. x_{L-1} and, but for relu and tanh, whose slopes follow from their values, a_1 .. a_{L-1}.
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
from torch.compiler import is_compiling

import python_ref.masked_mlp as reference
from moe_kernels import backends
from moe_kernels.library.kwta import refuse_bad_samples
from moe_kernels.ops._checks import FLOATING, INDEX, apply_untraced, check_choice, check_tensor, remembered
from moe_kernels.ops.kwta import check_bits, kwta_apply
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
    samples: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """x_0 through L linear layers, the L-1 hidden ones activated and masked: (..., N_0) -> (..., N_L).

    Args:
        x: (..., N_0), float32, bfloat16 or float16 (float64 on "reference" and "cpu").
        weights, biases: L of each, (N_l, N_{l-1}) and (N_l) or None, as torch.nn.functional.linear takes them.
        bits: the masks m_1 .. m_{L-1} as kwta_bits packs them, int32 (..., ceil(N_l / 32)). Bits past N_l are ignored.
        activation: f, a name in ACTIVATIONS.
        samples: (...), int64 or int32, where bits are those of S samples, (S, ceil(N_l / 32)): which of them a row of x
            is. A batch's masks are then read where those of all samples are kept.
        backend: of the masks: "reference", "cpu", "triton" or "cuda"; None chooses (see moe_kernels.explain).

    A neuron that does not answer is +0 and hands no gradient on, even where its pre-activation or the gradient that
    reaches it is NaN or infinite. Gradient: to x, weights and biases. Twice differentiable; the second time, as under
    autocast (whose dtype the products and masks then have), in torch.compile and on other backends than "cpu", the
    layers run one by one.
    FLOPs (torch's counter): those of the products, and one an element masked, in either direction.

    Raises:
        TypeError: x is no tensor of those dtypes, bits are not int32, or a torch.func transform.
        ValueError: counts of weights, biases and bits that do not fit, bits or samples of another shape or device, an
            unknown activation; on the CPU, samples outside [0, S).
        RuntimeError: what torch.nn.functional.linear refuses.
        BackendError: the backend asked for by name cannot run this.

    Source: paper 000 (COMET), eqs. 7 and 8.
    """
    words = activation, backend, len(biases), len(bits)
    (chosen, fused, as_it_is), ready = remembered(_check, words, (x, *weights, *bits, *biases, samples))
    # ready is None for a compiler; a FLOP counter and a fake mode listen as well.
    if not fused or ready is None or _len_torch_dispatch_stack() or torch.is_autocast_enabled("cpu"):
        return _layer_by_layer(x, weights, biases, _own(bits, samples), activation, chosen)
    hidden = ready.get("hidden")
    if hidden is None:
        hidden = ready["hidden"] = _hidden(x, weights, bits, activation)
    apply = _apply if torch.is_grad_enabled() else _forward
    if as_it_is:
        return apply(x, activation, bits, samples, hidden, *weights, *biases)
    *leading, n = x.shape
    rows = x.reshape(prod(leading), n)
    if samples is None:
        flat = [mask.reshape(len(rows), mask.shape[-1]).contiguous() for mask in bits]
    else:
        flat, samples = [mask.contiguous() for mask in bits], samples.reshape(len(rows)).long().contiguous()
    return apply(rows, activation, flat, samples, hidden, *weights, *biases).view(*leading, len(weights[-1]))


def _check(
    activation: str, backend: str | None, num_biases: int, num_bits: int, x: Tensor, *tensors: Any
) -> tuple[str, bool, bool]:
    """The backend, whether that is _MaskedMLP, and whether x, the bits and the samples are as that takes them.

    tensors: weights, bits, biases, samples.
    """
    check_tensor("masked_mlp", "x", x, FLOATING)
    check_choice("masked_mlp", "activation", activation, tuple(ACTIVATIONS))
    *layers, samples = tensors
    num_weights = len(layers) - num_bits - num_biases
    if not num_weights == num_biases == num_bits + 1:
        raise ValueError(
            "masked_mlp: weights and biases must be one of each layer and bits of each but the last; "
            f"got {num_weights}, {num_biases} and {num_bits}"
        )
    bits, biases = layers[num_weights : num_weights + num_bits], layers[num_weights + num_bits :]
    for weight in layers[:num_weights]:
        check_tensor("masked_mlp", "weights", weight, FLOATING)
    if samples is not None:
        _check_samples(x, bits, samples)
    for mask, weight in zip(bits, layers, strict=False):
        of_one = mask if samples is None else mask[:1]
        rows = x.shape[:-1] if samples is None else of_one.shape[:1]
        check_bits("masked_mlp", of_one, (*rows, len(weight)), x.device)
    chosen = backends.choose("masked_mlp", backend, x)
    fits = all(
        bias is None
        or (bias.is_cpu and bias.dtype == x.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous())
        for bias, weight in zip(biases, layers, strict=False)
    )
    in_order = samples is None or (samples.dtype == torch.int64 and samples.is_contiguous())
    as_it_is = x.dim() == 2 and in_order and all(mask.is_contiguous() for mask in bits)
    return chosen, chosen == "cpu" and fits, as_it_is


def _check_samples(x: Tensor, bits: Sequence[Tensor], samples: Tensor) -> None:
    """`samples` says of every row of x which one it is, and bits are of the same samples in every layer."""
    check_tensor("masked_mlp", "samples", samples, INDEX)
    if samples.shape != x.shape[:-1] or samples.device != x.device:
        raise ValueError(
            f"masked_mlp: samples must be {tuple(x.shape[:-1])} on {x.device}, as x is {tuple(x.shape)}; "
            f"got {tuple(samples.shape)} on {samples.device}"
        )
    if len({mask.shape[:-1] for mask in bits}) > 1 or any(mask.dim() != 2 for mask in bits):
        raise ValueError(
            "masked_mlp: bits must be (S, ceil(N_l / 32)) of the same samples in every layer; "
            f"got {', '.join(str(tuple(mask.shape)) for mask in bits)}"
        )


def _own(bits: Sequence[Tensor], samples: Tensor | None) -> Sequence[Tensor]:
    """The masks of every row."""
    if samples is None or not bits:
        return bits
    if not is_compiling():
        refuse_bad_samples(samples, len(bits[0]))
    return [mask.index_select(0, samples.flatten()).view(*samples.shape, mask.shape[-1]) for mask in bits]


def _hidden(x: Tensor, weights: Sequence[Tensor], bits: Sequence[Tensor], activation: str) -> Any:
    """Hidden layers like these but for their products, forward and back (backends/native/masked_mlp.py)."""
    widths, num_samples = [len(weight) for weight in weights[:-1]], len(bits[0]) if bits else 0
    size = prod(x.shape[:-1]), num_samples, widths
    return backends.load("cpu", "masked_mlp").masked_mlp_ready(
        x.dtype, *size, activation if activation in _IN_PLACE else ""
    )


def _layer_by_layer(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    bits: Sequence[Tensor],
    activation: str,
    backend: str,
) -> Tensor:
    apply = reference.kwta_apply if backend == "reference" else partial(kwta_apply, backend=backend)
    return reference.masked_mlp(x, weights, biases, bits, activation=activation, apply=apply)


def _forward(
    x: Tensor,
    activation: str,
    bits: Sequence[Tensor],
    samples: Tensor | None,
    hidden: Any,
    *parameters: Any,
    inner: list[Tensor] | None = None,
    pre: list[Tensor] | None = None,
) -> Tensor:
    """hidden: of `_hidden`. parameters: L weights, then L biases. Every x_l is added to `inner`, and to `pre` every a_l
    that is not activated in place."""
    depth, in_place, fwd_ = len(bits), activation in _IN_PLACE, hidden[0]
    adds = in_place and x.itemsize > 2  # a product of narrow type would be rounded before its bias and after it
    weights, biases = parameters[: depth + 1], parameters[depth + 1 :]
    for layer in range(depth):
        x = x.mm(weights[layer].t()) if adds else F.linear(x, weights[layer], biases[layer])
        if not in_place:
            if pre is not None:
                pre.append(x)
            x = ACTIVATIONS[activation](x)
        fwd_(x, biases[layer] if adds else None, bits[layer], samples, layer)
        if inner is not None:
            inner.append(x)
    return F.linear(x, weights[depth], biases[depth])


class _MaskedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        activation: str,
        bits: Sequence[Tensor],
        samples: Tensor | None,
        hidden: Any,
        *parameters: Any,
    ) -> Tensor:
        inner: list[Tensor] = [x]
        pre: list[Tensor] = []
        y = _forward(x, activation, bits, samples, hidden, *parameters, inner=inner, pre=pre)
        depth = len(bits)
        given = samples, *bits, *parameters[depth + 1 :]
        # Tensors of inference mode cannot be saved, and are not noticed where they change.
        ctx.unsaved = [each if each is not None and each.is_inference() else None for each in given]
        ctx.save_for_backward(
            *parameters[: depth + 1],
            *inner,
            *pre,
            *(each if kept is None else None for each, kept in zip(given, ctx.unsaved, strict=True)),
        )
        ctx.activation, ctx.depth, ctx.hidden = activation, depth, hidden
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, grad)
        saved, samples, bits, _ = _saved(ctx)
        activation, depth, (_, bwd_) = ctx.activation, ctx.depth, ctx.hidden
        to_x, _, _, _, _, *needed = ctx.needs_input_grad
        dparameters: list[Tensor | None] = [None] * len(needed)
        for layer in range(depth, -1, -1):
            if layer == depth:
                dbias = grad.sum(0) if needed[-1] else None
            elif activation in _IN_PLACE:
                dbias = bwd_(grad, saved[depth + 2 + layer], bits[layer], samples, layer)
            else:
                grad = _SLOPES[activation](grad, saved[2 * depth + 2 + layer])
                dbias = bwd_(grad, None, bits[layer], samples, layer)
            # Before dW, as autograd has it: the other way round the allocator gave memory back to the system and took
            # it again, 80 to 150 page faults a step at 1000 neurons.
            dx = grad.mm(saved[layer]) if layer or to_x else None
            if needed[layer]:
                dparameters[layer] = grad.t().mm(saved[depth + 1 + layer])
            if needed[depth + 1 + layer]:
                dparameters[depth + 1 + layer] = dbias
            grad = dx
        return grad, *[None] * 4, *dparameters


_apply = apply_untraced(_MaskedMLP)


def _saved(ctx: Any) -> tuple[Sequence[Tensor], Tensor | None, Sequence[Tensor], Sequence[Tensor | None]]:
    """L weights, x_0 .. x_{L-1} and a_1 .. a_{L-1} where those were kept; samples; bits; biases."""
    saved, count, depth = ctx.saved_tensors, len(ctx.unsaved), ctx.depth
    given = [each if kept is None else kept for each, kept in zip(saved[-count:], ctx.unsaved, strict=True)]
    return saved[:-count], given[0], given[1 : depth + 1], given[depth + 1 :]


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved, samples, bits, biases = _saved(ctx)
    *weights, x = saved[: ctx.depth + 2]
    y = _layer_by_layer(x, weights, biases, _own(bits, samples), ctx.activation, "cpu")
    given = (x, *[None] * 4, *weights, *biases)
    wanted: Any = [each for each, needed in zip(given, ctx.needs_input_grad, strict=True) if needed]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
