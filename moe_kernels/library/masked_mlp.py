"""An MLP under known masks as one operator, and its gradients as another. Only backend "cpu" has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import python_ref.masked_mlp as reference
from moe_kernels import backends
from moe_kernels.library._define import (
    contiguous,
    define,
    define_check,
    gradient_like,
    is_checked,
    ops,
    refuse_outside,
    refused,
)
from python_ref.masked_mlp import ACTIVATIONS

# The derivative of these follows from their value, so a_l is not kept.
_IN_PLACE = ("relu", "tanh")

# For the other activations: da_l from the gradient of f(a_l) and from a_l.
_SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward.default,
    "silu": torch.ops.aten.silu_backward.default,
    "softplus": lambda grad, a: torch.ops.aten.softplus_backward.default(grad, a, 1, 20),
    "mish": torch.ops.aten.mish_backward.default,
}


def refuse_bad_samples(samples: Tensor | None, num_samples: int) -> None:
    """ValueError for samples outside [0, S), if they are checked (is_checked)."""
    if samples is not None and is_checked(samples):
        refuse_outside("masked_mlp: samples", samples, 0, num_samples)


define_check("refuse_bad_samples(Tensor samples, SymInt num_samples)", refuse_bad_samples)


def layer_by_layer(x, weights, biases, bits, samples, activation, apply) -> Tensor:
    """The same MLP from operators that are differentiable twice. apply: masks values by bits."""
    if samples is not None and bits:
        ops.refuse_bad_samples(samples, len(bits[0]))
        bits = [mask.index_select(0, samples.flatten()).view(*samples.shape, mask.shape[-1]) for mask in bits]
    return reference.masked_mlp(x, weights, biases, bits, activation=activation, apply=apply)


def _mlp_fwd(x, weights, biases, biased, bits, samples, activation, keep) -> tuple[Tensor, list[Tensor]]:
    """y, and if kept for backward x_1 .. x_{L-1} and, unless the activation is in place, a_1 .. a_{L-1}.

    biases: of the layers that are `biased`, as register_autograd takes no list with None in it.
    """
    every = _every(contiguous(*biases), biased)
    bits, (samples,) = contiguous(*bits), contiguous(samples)
    mask_ = backends.load("cpu", "masked_mlp").masked_mlp_fwd
    in_place, inner, pre = activation in _IN_PLACE, [], []
    adds = in_place and x.itemsize > 2  # a product of narrow type would be rounded before its bias and after it
    for weight, bias, mask in zip(weights, every, bits, strict=False):
        x = x.mm(weight.t()) if adds else F.linear(x, weight, bias)
        if not in_place:
            pre.append(x)
            x = ACTIVATIONS[activation](x)
        if not x.is_contiguous():
            x = x.contiguous()
        mask_(x, bias if adds else None, mask, samples, activation if in_place else "")
        inner.append(x)
    return F.linear(x, weights[-1], every[-1]), [*inner, *pre] if keep else []


def _every(biases: Sequence[Any], biased: Sequence[bool]) -> list[Any]:
    """One entry for each layer: the next of `biases` if the layer is `biased`, else None."""
    left = iter(biases)
    return [next(left) if each else None for each in biased]


def _fwd_fake(x, weights, biases, biased, bits, samples, activation, keep):
    inner = [x.new_empty((x.shape[0], weight.shape[0])) for weight in weights[:-1]]
    kept = [] if not keep else inner if activation in _IN_PLACE else [*inner, *map(torch.empty_like, inner)]
    return x.new_empty((x.shape[0], weights[-1].shape[0])), kept


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    x, weights, biases, ctx.biased, bits, samples, ctx.activation, ctx.kept = inputs
    ctx.mark_non_differentiable(*output[1])
    given = samples, *bits, *biases
    # Tensors of inference mode cannot be saved for backward; changes of them are not noticed.
    ctx.unsaved = [each if each is not None and each.is_inference() else None for each in given]
    saved = (None if unsaved is not None else each for each, unsaved in zip(given, ctx.unsaved, strict=True))
    ctx.depth = len(bits)
    ctx.save_for_backward(x, *weights, *output[1], *saved)


def _backward(ctx: Any, grad: Tensor, _: list[Tensor]) -> tuple[Any, ...]:
    saved, count, depth = ctx.saved_tensors, len(ctx.unsaved), ctx.depth
    given = [each if kept is None else kept for each, kept in zip(saved[-count:], ctx.unsaved, strict=True)]
    samples, bits, biases = given[0], given[1 : depth + 1], given[depth + 1 :]
    x, *rest = saved[:-count]
    weights, kept = rest[: depth + 1], rest[depth + 1 :]
    wanted = [needed for each in ctx.needs_input_grad[:3] for needed in (each if isinstance(each, list) else [each])]
    tensors = x, weights, biases, ctx.biased, bits, samples
    if torch.is_grad_enabled():
        found: Any = _differentiable_backward(grad, *tensors, ctx.activation, wanted)
    else:
        if not ctx.kept:
            _, kept = ops.masked_mlp_fwd(*tensors, ctx.activation, True)
        found = ops.masked_mlp_bwd(grad, *tensors, kept, ctx.activation, wanted)
        found = [each if needed else None for each, needed in zip(found, wanted, strict=True)]
    return found[0], found[1 : depth + 2], found[depth + 2 :], None, [None] * depth, None, None, None


def _differentiable_backward(
    grad, x, weights, biases, biased, bits, samples, activation, wanted
) -> list[Tensor | None]:
    every = _every(biases, biased)
    y = layer_by_layer(x, weights, every, bits, samples, activation, lambda v, mask: ops.kwta_bwd(v, mask, "cpu"))
    sources: Any = [each for each, needed in zip((x, *weights, *biases), wanted, strict=True) if needed]
    found = iter(torch.autograd.grad(y, sources, grad, create_graph=True))
    return [next(found) if needed else None for needed in wanted]


def _mlp_bwd(grad, x, weights, biases, biased, bits, samples, kept, activation, wanted) -> list[Tensor]:
    mask_ = backends.load("cpu", "masked_mlp").masked_mlp_bwd
    depth, in_place = len(bits), activation in _IN_PLACE
    inner, pre = [x, *kept[:depth]], kept[depth:]
    to_x, to_weights = wanted[0], wanted[1 : depth + 2]
    bits, (samples,) = contiguous(*bits), contiguous(samples)
    dweights, dbiases = [x.new_empty(0) for _ in weights], [x.new_empty(0) for _ in weights]
    for layer in range(depth, -1, -1):
        if layer == depth:
            dbias = grad.sum(0)
        else:
            if not in_place:
                grad = _SLOPES[activation](grad, pre[layer])
            value = inner[layer + 1].contiguous() if in_place else None
            grad = grad.contiguous()
            dbias = mask_(grad, value, bits[layer], samples, activation if in_place else "")
        # Before dW, in autograd's order: in the other order the allocator returned memory to the system and took it
        # again, with 80 to 150 page faults a step at 1000 neurons.
        dx = grad.mm(weights[layer]) if layer or to_x else x.new_empty(0)
        if to_weights[layer]:
            dweights[layer] = grad.t().mm(inner[layer])
        dbiases[layer] = dbias
        grad = dx
    needed = zip([each for each, has in zip(dbiases, biased, strict=True) if has], wanted[depth + 2 :], strict=True)
    return [grad, *dweights, *(each if to_bias else x.new_empty(0) for each, to_bias in needed)]


def _bwd_fake(grad, x, weights, biases, biased, bits, samples, kept, activation, wanted):
    given = zip((x, *weights, *biases), wanted, strict=True)
    return [gradient_like(each, needed) for each, needed in given]


def _masked(x, weights) -> int:
    return x[0] * sum(weight[0] for weight in weights[:-1])


def _products(x, weights) -> int:
    return 2 * x[0] * sum(weight[0] * weight[1] for weight in weights)


def _bwd_flops(grad, x, weights, biases, biased, bits, samples, kept, activation, wanted, *rest, **kwargs) -> int:
    to_weights = zip(weights, wanted[1:], strict=False)
    first = 0 if wanted[0] else _products(x, weights[:1])
    return _products(x, weights) - first + _products(x, [w for w, needed in to_weights if needed]) + _masked(x, weights)


_TENSORS = "Tensor x, Tensor[] weights, Tensor[] biases, bool[] biased, Tensor[] bits, Tensor? samples"

define(
    f"masked_mlp_fwd({_TENSORS}, str activation, bool keep) -> (Tensor, Tensor[])",
    _mlp_fwd,
    _fwd_fake,
    lambda x, weights, *rest, out_shape=None, **kwargs: _products(x, weights) + _masked(x, weights),
    save=_save,
    backward=_backward,
)
define(
    f"masked_mlp_bwd(Tensor grad, {_TENSORS}, Tensor[] kept, str activation, bool[] wanted) -> Tensor[]",
    _mlp_bwd,
    _bwd_fake,
    _bwd_flops,
    backward=refused("masked_mlp"),  # _backward calls it only where nothing is recorded
)
