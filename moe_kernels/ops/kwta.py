"""k-winner-take-all: keeps the k largest elements of every row.

    m_i = 1 if x_i is among the k largest of its row, else 0     (COMET fixed routing, eq. 3)
    y   = m * values   (or m * x)                                 (COMET fixed routing, eqs. 6 and 8)

x, values, y are (..., N). m is a constant to autograd: dL/dvalues = m * dL/dy, and x gets no gradient through m.
Kernels save m for backward, packed to one bit an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor

import python_ref.kwta as reference
from moe_kernels import backends
from moe_kernels.ops import _checks
from moe_kernels.ops._checks import FLOATING, check_choice, check_decimal, check_int, check_like, check_tensor
from moe_kernels.ops._define import define, no_flops, operators
from moe_kernels.sizes import contiguous_rows, words
from python_ref.kwta import pack_bits, unpack_bits  # noqa: F401 public: the layout of the bits

TIES = ("index", "strict", "all")


def check_bits(op: str, bits: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Raises unless `bits` has the dtype, shape and device of packed masks of values of `shape`."""
    check_tensor(op, "bits", bits, (torch.int32,), batched=True)
    expected = (*shape[:-1], words(shape[-1]))
    if bits.shape != expected or bits.device != device:
        raise ValueError(
            f"{op}: bits must be {expected} on {device}, for values {tuple(shape)}; "
            f"got {tuple(bits.shape)} on {bits.device}"
        )


def _check(op: str, x: Tensor, k: int, ties: str) -> int:
    check_tensor(op, "x", x, FLOATING, batched=True)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension (..., N), got a scalar")
    check_choice(op, "ties", ties, TIES)
    return check_int(op, "k", k, 0, x.shape[-1], "winners among the N elements of a row")


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _check_fwd(op: str, x: Tensor, values: Tensor | None, k: int, ties: str, *rest: Any) -> None:
    shape = _checks.floating(op, "x", x, 2)
    _checks.expect(op, "values", values, shape, x.dtype, x)
    _checks.integer(op, "k", k, 0, shape[1])
    _checks.one_of(op, "ties", ties, TIES)


def kwta_fwd(
    x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool, backend: str
) -> tuple[Tensor, Tensor]:
    values = None if values is None else contiguous_rows(values)
    return backends.load(backend, "kwta").kwta_fwd(contiguous_rows(x), values, k, ties, save_bits)


def _fwd_fake(x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool, backend: str):
    bits = x.new_empty((x.shape[0], words(x.shape[1]) if save_bits else 0), dtype=torch.int32)
    return x.new_empty(x.shape), bits


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, values, ctx.k, ctx.ties, saved, ctx.backend = inputs
    ctx.through_values = values is not None
    ctx.save_for_backward(output[1] if saved else None, None if saved else x)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    bits, x = ctx.saved_tensors
    if bits is None:
        _, bits = operators.kwta_fwd(x.detach(), None, ctx.k, ctx.ties, True, ctx.backend)
    masked = operators.kwta_bwd(grad, bits, ctx.backend)
    return (None, masked, *[None] * 4) if ctx.through_values else (masked, *[None] * 5)


def _check_bwd(op: str, grad: Tensor, bits: Tensor, backend: str) -> None:
    rows, n = _checks.floating(op, "grad", grad, 2)
    _checks.expect(op, "bits", bits, (rows, words(n)), torch.int32, grad)


def kwta_bwd(grad: Tensor, bits: Tensor, backend: str) -> Tensor:
    return backends.load(backend, "kwta").kwta_bwd(contiguous_rows(grad), bits.contiguous())


def _save_bits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bits, ctx.backend = inputs
    ctx.save_for_backward(bits)


def _masked(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """kwta_bwd multiplies grad by the mask, and so does its gradient."""
    (bits,) = ctx.saved_tensors
    return operators.kwta_bwd(grad, bits, ctx.backend), None, None


def _mask(x: Tensor, k: int, ties: str, backend: str) -> Tensor:
    return backends.load(backend, "kwta").kwta_mask(contiguous_rows(x), k, ties)


def _one_per_element(x_shape, *args, out_shape=None, **kwargs) -> int:
    return x_shape[0] * x_shape[1]


define(
    "kwta_fwd(Tensor x, Tensor? values, SymInt k, str ties, bool save_bits, str backend) -> (Tensor, Tensor)",
    kwta_fwd,
    _fwd_fake,
    _one_per_element,
    check=_check_fwd,
    save=_save,
    backward=_backward,
    batched=(0, 1),
)
define(
    "kwta_bwd(Tensor grad, Tensor bits, str backend) -> Tensor",
    kwta_bwd,
    lambda grad, bits, backend: grad.new_empty(grad.shape),
    _one_per_element,
    check=_check_bwd,
    save=_save_bits,
    backward=_masked,
    batched=(0, 1),
)
define(
    "kwta_mask(Tensor x, SymInt k, str ties, str backend) -> Tensor",
    _mask,
    lambda x, k, ties, backend: x.new_empty(x.shape, dtype=torch.bool),
    no_flops,
    check=lambda op, x, k, ties, backend: _check_fwd(op, x, None, k, ties),
    batched=(0,),
)


def kwta(x: Tensor, k: int, *, values: Tensor | None = None, ties: str = "index", backend: str | None = None) -> Tensor:
    """Keeps the k largest elements of every row of x, or those elements of `values`, and zeroes the rest.

        y_i = values_i if x_i wins in its row else 0

    Args:
        x: (..., N), float32, bfloat16 or float16 (float64 on "reference" and "cpu"). Rows may have any stride; x is
            copied if its last dimension is not contiguous or its leading dimensions do not merge into one stride.
        k: winners per row, from 0 (y is zero) to N (y is a copy).
        values: the tensor to mask, like x in shape, dtype and device. None: x itself.
        ties: which elements equal to the k-th largest win if more than k elements are at least as large. "index": those
            with the lowest indices, so that exactly k win. "strict": none of them (eq. 3: x_i wins if at most k
            elements are >= x_i), so that a constant row keeps nothing if k < N. "all": all of them.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Order of values: -0.0 equals 0.0, subnormal numbers do not, NaN ranks above +inf and equals every NaN. A kept value
    is copied bit for bit; every other element of y is +0. All backends select the same elements.

    Gradient: to values (or x) where x wins, zero elsewhere; none to x through the selection. Differentiable any number
    of times. Autocast: runs in the dtype of its inputs. torch.vmap is supported. FLOPs of kernels (torch's counter):
    one an element, forward and backward, for the product with the mask; comparisons are not counted.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or forward-mode AD or a torch.func transform
            other than vmap is used.
        ValueError: k outside [0, N], values of another shape or device, unknown tie rule, x without dimensions.
        BackendError: the named backend cannot run this.

    Source: COMET fixed routing, eqs. 3 to 8.

    Example:
        >>> x = torch.tensor([[3.0, 1.0, 2.0, 2.0], [0.0, 5.0, 4.0, 1.0]])
        >>> mk.kwta(x, 2)
        tensor([[3., 0., 2., 0.],
                [0., 5., 4., 0.]])
        >>> mk.kwta(x, 2, ties="strict")[0]  # two elements 2.0, room for one: neither wins
        tensor([3., 0., 0., 0.])
    """
    k = _check("kwta", x, k, ties)
    if values is not None:
        check_tensor("kwta", "values", values, FLOATING, batched=True)
        check_like("kwta", "values", values, "x", x)
    chosen = backends.choose("kwta", backend, x)
    if chosen == "reference":
        return reference.kwta(x, k, values=values, ties=ties)
    rows, value_rows = _rows(x), None if values is None else _rows(values)
    source = rows if value_rows is None else value_rows
    save_bits = torch.is_grad_enabled() and source.requires_grad
    y, _ = operators.kwta_fwd(rows, value_rows, k, ties, save_bits, chosen)
    return y if x.dim() == 2 else y.view(x.shape)


def kwta_mask(x: Tensor, k: int, *, ties: str = "index", backend: str | None = None) -> Tensor:
    """True where x (..., N) is among the k largest of its row: the mask of `kwta`, as bool (..., N).

    Arguments, order of values, tie rules and errors are those of `kwta`. Not differentiable.

    Example:
        >>> mk.kwta_mask(torch.tensor([3.0, 1.0, 2.0, 2.0]), 2)
        tensor([ True, False,  True, False])
    """
    k = _check("kwta_mask", x, k, ties)
    chosen = backends.choose("kwta", backend, x)
    if chosen == "reference":
        return reference.kwta_mask(x.detach(), k, ties=ties)
    return operators.kwta_mask(_rows(x.detach()), k, ties, chosen).view(x.shape)


def kwta_bits(x: Tensor, k: int, *, ties: str = "index", backend: str | None = None) -> tuple[Tensor, Tensor]:
    """`kwta` of x and its mask as bits (kernels select once): y (..., N), bits int32 (..., ceil(N / 32)).

    Bit i of word w is element 32 w + i; bits past N are 0. `kwta_apply` applies the bits, for example if one mask is
    used for several tensors. Arguments, order of values, tie rules and errors are those of `kwta`. Not differentiable.

    Example:
        >>> y, bits = mk.kwta_bits(torch.tensor([3.0, 1.0, 2.0, 2.0]), 2)
        >>> bits  # elements 0 and 2: 2^0 + 2^2
        tensor([5], dtype=torch.int32)
    """
    k = _check("kwta_bits", x, k, ties)
    chosen = backends.choose("kwta", backend, x)
    if chosen == "reference":
        return reference.kwta_bits(x, k, ties=ties)
    y, bits = operators.kwta_fwd(_rows(x.detach()), None, k, ties, True, chosen)
    return y.view(x.shape), bits.view(*x.shape[:-1], bits.shape[-1])


def kwta_apply(values: Tensor, bits: Tensor, *, backend: str | None = None) -> Tensor:
    """Keeps the elements of `values` whose bit is set and zeroes the rest.

    Args:
        values: (..., N), of a dtype that `kwta` takes; it may differ from the dtype of the x given to `kwta_bits`.
        bits: int32 (..., ceil(N / 32)) from `kwta_bits`, with the leading dimensions and device of values. Bits past N
            are ignored.
        backend: as in `kwta`.

    A kept value is copied bit for bit; every other element is +0. Gradient: to values where kept. Differentiable any
    number of times.

    Raises:
        TypeError: a tensor has another dtype or layout, or forward-mode AD or a torch.func transform other than vmap is
            used.
        ValueError: bits of another shape or device, or values without dimensions.
        BackendError: the named backend cannot run this.

    Example:
        >>> _, bits = mk.kwta_bits(torch.tensor([3.0, 1.0, 2.0, 2.0]), 2)
        >>> mk.kwta_apply(torch.tensor([10.0, 20.0, 30.0, 40.0]), bits)
        tensor([10.,  0., 30.,  0.])
    """
    check_tensor("kwta_apply", "values", values, FLOATING, batched=True)
    if values.dim() == 0:
        raise ValueError("kwta_apply: values must have at least one dimension (..., N), got a scalar")
    check_bits("kwta_apply", bits, values.shape, values.device)
    chosen = backends.choose("kwta", backend, values)
    if chosen == "reference":
        return reference.kwta_apply(values, bits)
    if values.dim() == 2:
        return operators.kwta_bwd(values, bits, chosen)
    bits = bits.reshape(prod(bits.shape[:-1]), bits.shape[-1])
    return operators.kwta_bwd(_rows(values), bits, chosen).view(values.shape)


def k_from_fraction(p: float | str | Decimal | Fraction, n: int) -> int:
    """The number of winners k of a row of n elements if the fraction p of them is kept: max(1, floor(p * n)).

    p is read as the decimal that it prints as: in binary floats 0.29 * 100 is 28.999..., whose floor is 28, not 29.

    Raises:
        ValueError: p outside (0, 1], a string that holds no number, or n < 1.
        TypeError: n is not an int, or p is not a number or a string.

    Example:
        >>> mk.k_from_fraction(0.29, 100)
        29
    """
    n = check_int("k_from_fraction", "n", n, 1, 2**63 - 1, "elements of a row")
    keep = check_decimal("k_from_fraction", "p", p)
    if not 0 < keep <= 1:
        raise ValueError(f"k_from_fraction: p must be a keep fraction in (0, 1], got {p!r}")
    return max(1, int(keep * n))
