"""An MLP under known masks: products, activations and masks of all layers as one function.

    a_l = W_l x_{l-1} + b_l,   x_l = m_l * f(a_l),   l = 1 .. L-1;   y = W_L x_{L-1} + b_L     (paper 000, eqs. 7 and 8)
    da_l = m_l * f'(a_l) * dx_l,   dW_l = da_l^T x_{l-1},   db_l = sum of da_l,   dx_{l-1} = da_l W_l

One node in autograd's graph instead of three per layer, because with batches of 32 a call costs more than the mask
that it applies. Bias, relu or tanh, and mask are one call, in place. With `samples`, masks are read from the bits of
all samples: gathering the bits of a batch took 0.4 % of an epoch. Saved for backward: the inputs, x_1 .. x_{L-1} and
a_1 .. a_{L-1}; not a for relu and tanh, whose slopes follow from x.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

import python_ref.masked_mlp as reference
from moe_kernels import backends, library
from moe_kernels.ops._checks import FLOATING, INDEX, check_choice, check_tensor
from moe_kernels.ops.kwta import check_bits, kwta_apply
from python_ref.masked_mlp import ACTIVATIONS


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
        samples: (...), int64 or int32: the sample of every row of x, if bits hold the masks of S samples,
            (S, ceil(N_l / 32)). None: bits have a row for every row of x.
        backend: for the masks, "reference", "cpu", "triton" or "cuda"; None chooses (see moe_kernels.explain).

    A masked neuron is +0 and passes no gradient on, even if its pre-activation or its gradient is NaN or infinite.
    Gradient: to x, weights and biases. Twice differentiable. Layers run one by one in second derivatives, in
    torch.compile, on other backends than "cpu", and under autocast (in its dtype).
    FLOPs (torch's counter): the products, and one for each element masked, forward and backward.

    Raises:
        TypeError: x is no tensor of those dtypes, bits are not int32, or a torch.func transform.
        ValueError: counts of weights, biases and bits that do not fit, bits or samples of another shape or device, an
            unknown activation; on the CPU, samples outside [0, S).
        RuntimeError: what torch.nn.functional.linear refuses.
        BackendError: the backend asked for by name cannot run this.

    Source: paper 000 (COMET), eqs. 7 and 8.

    Example:
        >>> from moe_kernels.ops.masked_mlp import masked_mlp
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> weights, biases = [torch.eye(2), torch.ones(1, 2)], [None, None]
        >>> _, bits = mk.kwta_bits(torch.tensor([[0.0, 1.0]]), 1)  # the second hidden neuron wins
        >>> masked_mlp(x, weights, biases, [bits], activation="relu")
        tensor([[2.]])
    """
    _check(x, weights, biases, bits, samples, activation)
    chosen = backends.choose("masked_mlp", backend, x)
    one = partial(kwta_apply, backend=backend) if chosen != "reference" else reference.kwta_apply
    if chosen != "cpu" or torch.is_autocast_enabled("cpu") or not _uniform(x, weights, biases):
        return library.masked_mlp.layer_by_layer(x, weights, biases, bits, samples, activation, one)
    *leading, n = x.shape
    rows = x if x.dim() == 2 else x.reshape(prod(leading), n)
    if samples is None:
        flat = [mask.reshape(len(rows), mask.shape[-1]) for mask in bits]
    else:
        flat, samples = list(bits), samples.reshape(len(rows)).long()
    given = (*weights, *biases, x)
    keep = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
    present, biased = [bias for bias in biases if bias is not None], [bias is not None for bias in biases]
    y, _ = library.ops.masked_mlp_fwd(rows, list(weights), present, biased, flat, samples, activation, keep)
    return y if x.dim() == 2 else y.view(*leading, len(weights[-1]))


def _check(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    bits: Sequence[Tensor],
    samples: Tensor | None,
    activation: str,
) -> None:
    check_tensor("masked_mlp", "x", x, FLOATING)
    check_choice("masked_mlp", "activation", activation, tuple(ACTIVATIONS))
    if not len(weights) == len(biases) == len(bits) + 1:
        raise ValueError(
            "masked_mlp: weights and biases must be one of each layer and bits of each but the last; "
            f"got {len(weights)}, {len(biases)} and {len(bits)}"
        )
    for weight in weights:
        check_tensor("masked_mlp", "weights", weight, FLOATING)
    if samples is not None:
        _check_samples(x, bits, samples)
    for mask, weight in zip(bits, weights, strict=False):
        of_one = mask if samples is None else mask[:1]
        rows = x.shape[:-1] if samples is None else of_one.shape[:1]
        check_bits("masked_mlp", of_one, (*rows, len(weight)), x.device)


def _uniform(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Whether every bias has the dtype and device of x and an element for each row of its weight."""
    return all(
        bias is None or (bias.device == x.device and bias.dtype == x.dtype and bias.shape == weight.shape[:1])
        for bias, weight in zip(biases, weights, strict=True)
    )


def _check_samples(x: Tensor, bits: Sequence[Tensor], samples: Tensor) -> None:
    """`samples` has an index for every row of x, and bits have the same samples in every layer."""
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
