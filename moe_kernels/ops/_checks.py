"""Checks that every operation shares. A message names the operation, what was expected and what came."""

import operator
from collections.abc import Callable, Hashable
from decimal import Decimal
from fractions import Fraction
from functools import wraps
from math import inf, isfinite
from numbers import Real
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor  # torch has no public predicates
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable as _once_differentiable
from torch.compiler import is_compiling

from moe_kernels import backends
from moe_kernels.backends._look import look
from moe_kernels.plan import RoutingPlan

HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
FLOATING = (*HALF_AND_SINGLE, torch.float64)
INDEX = (torch.int32, torch.int64)


def remembered(
    check: Callable[..., Any], words: tuple, tensors: tuple[Tensor | None, ...]
) -> tuple[Any, dict[Hashable, Any] | None]:
    """check(*words, *tensors), made once for tensors of one look, and what is kept for that look (library.launch).

    A look is dtype, shape, strides and device; checks see no more, and choose a backend. Where somebody traces, or a
    tensor has none, such as one of a class of its own, nothing is remembered or kept.
    """
    if is_compiling() or _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return check(*words, *tensors), None
    seen = look(*tensors)
    if seen is None:
        return check(*words, *tensors), None
    key = check, words, backends.asked(None), torch.get_num_threads(), seen
    try:
        known = backends.remembered.get(key)
    except TypeError:  # a word without a hash, which the check refuses
        known = None
    if known is not None:
        return known
    found: tuple[Any, dict[Hashable, Any]] = check(*words, *tensors), {}
    if len(backends.remembered) >= 4096:  # some MB, should no shape come again
        backends.remembered.clear()
    backends.remembered[key] = found
    return found


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of that name, but a second derivative is refused wherever it is asked for, and nothing is done
    where no gradient's own is recorded (17 us, a busy core).

    torch's leaves out what the saved tensors contribute, without a word, where gradients arrive as constants, such as
    that of a sum, or are asked for by torch.autograd.grad.
    """
    traced = _once_differentiable(backward)
    op = backward.__module__.rpartition(".")[2]

    @wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if is_compiling():
            return traced(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        sources = [each for each in (*grads, *ctx.saved_tensors) if each is not None and each.requires_grad]
        return _Once.apply(op, found, *sources or [torch.empty(0, requires_grad=True)])

    return once


def apply_untraced(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply for calls that nobody traces: past torch's own, which looks for what functorch wrapped.

    4 us less, and 10 where caches are cold.
    """
    above: Any = super(torch.autograd.Function, function)
    return above.apply


class _Once(torch.autograd.Function):
    """The gradients that were found, of which there are none to their sources."""

    @staticmethod
    def forward(ctx: Any, op: str, found: tuple[Tensor | None, ...], *sources: Tensor) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{ctx.op}: kernels are once_differentiable; backend='reference' has second derivatives")


def check_tensor(op: str, name: str, tensor: object, dtypes: tuple[torch.dtype, ...], *, batched: bool = False) -> None:
    """`tensor` is a strided Tensor of one of `dtypes`, without a tangent, and no torch.func transform wraps it.

    batched: torch.vmap may.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        expected = ", ".join(_short(dtype) for dtype in dtypes)
        raise TypeError(f"{op}: {name} must have dtype {expected}; got {_short(tensor.dtype)}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: {name} must be a strided tensor, got layout {tensor.layout}")
    if is_compiling():
        return
    if is_functorch_wrapped_tensor(tensor) and not (batched and is_batchedtensor(tensor)):
        raise TypeError(f"{op}: torch.func transforms (vmap, grad, jvp) are not supported; got a wrapped {name}")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise TypeError(f"{op}: forward-mode derivatives are not supported; got a {name} with a tangent")


def check_plan(op: str, plan: object) -> None:
    """`plan` is a RoutingPlan whose arrays have the dtype, shape, layout and device that it promises.

    What stands in them is for those to look at who read it. 2 us once a plan, which remembers it.
    """
    if not isinstance(plan, RoutingPlan):
        raise TypeError(f"{op}: plan must be a RoutingPlan, got {type(plan).__name__}")
    traced = is_compiling()
    if not traced and "_checked" in plan.__dict__:
        return
    arrays = (
        plan.expert_offsets,
        plan.row_token,
        plan.row_choice,
        plan.slot_row,
        plan.requested,
        plan.kept,
        plan.dropped,
    )
    remembered(_check_arrays, (op, plan.num_tokens, plan.num_experts), arrays)
    if not traced:
        plan.__dict__["_checked"] = True  # no field: who replaces an array makes a plan without it


def _check_arrays(
    op: str,
    num_tokens: int,
    num_experts: int,
    expert_offsets: Tensor,
    row_token: Tensor,
    row_choice: Tensor,
    slot_row: Tensor,
    requested: Tensor,
    kept: Tensor,
    dropped: Tensor,
) -> None:
    # Kernels take sizes from some arrays and read others by them.
    check_tensor(op, "plan.row_token", row_token, (torch.int32,))
    check_tensor(op, "plan.slot_row", slot_row, (torch.int32,))
    check_rank(op, "plan.slot_row", slot_row, "(T, K)")
    device, rows = row_token.device, (row_token.numel(),)
    for name, array, letters, shape in (
        ("slot_row", slot_row, "(T, K)", (num_tokens, slot_row.shape[1])),
        ("expert_offsets", expert_offsets, "(E + 1,)", (num_experts + 1,)),
        ("row_token", row_token, "(R,)", rows),
        ("row_choice", row_choice, "(R,)", rows),
        ("requested", requested, "(E,)", (num_experts,)),
        ("kept", kept, "(E,)", (num_experts,)),
        ("dropped", dropped, "()", ()),
    ):
        if not isinstance(array, Tensor) or array.dtype is not torch.int32:
            check_tensor(op, f"plan.{name}", array, (torch.int32,))
        if array.shape != shape or not array.is_contiguous() or array.device != device:
            raise ValueError(
                f"{op}: plan.{name} must be {letters} = {shape}, contiguous, on {device}; "
                f"got {tuple(array.shape)} with strides {array.stride()} on {array.device}"
            )
    if rows[0] > slot_row.numel():
        raise ValueError(f"{op}: plan must have at most T K = {slot_row.numel()} rows, got {rows[0]}")


def check_rank(op: str, name: str, tensor: object, shape: str) -> None:
    """`tensor` is a Tensor with as many dimensions as `shape` has letters, such as "(T, D)"."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{op}: {name} must be {shape}, got shape {tuple(tensor.shape)}")


def check_square(op: str, name: str, tensor: Tensor) -> None:
    """`tensor` is a batch of square matrices, (..., n, n)."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2]:
        raise ValueError(f"{op}: {name} must be (..., n, n), got shape {tuple(tensor.shape)}")


def check_first(op: str, name: str, tensor: Tensor, size: int, meaning: str, device: torch.device) -> None:
    """The first dimension of `tensor` has that size, and it is on that device."""
    if tensor.shape[0] != size:
        raise ValueError(f"{op}: {name} must have {size} rows, the {meaning}; got shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on the device of the plan, {device}; got {tensor.device}")


def check_like(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """`tensor` has the shape, dtype and device of `other`."""
    if tensor.dtype != other.dtype:
        raise TypeError(
            f"{op}: {name} must have the dtype of {other_name}, {_short(other.dtype)}; got {_short(tensor.dtype)}"
        )
    if tensor.device != other.device:
        raise ValueError(f"{op}: {name} must be on the device of {other_name}, {other.device}; got {tensor.device}")
    if tensor.shape != other.shape:
        raise ValueError(
            f"{op}: {name} must have the shape of {other_name}, {tuple(other.shape)}; got {tuple(tensor.shape)}"
        )


def check_fits(
    op: str, name: str, tensor: object, shape: tuple[int, ...], letters: str, other_name: str, other: Tensor
) -> None:
    """`tensor` has that shape, spelled in `letters`, and the dtype and device of `other`."""
    check_tensor(op, name, tensor, (other.dtype,))
    assert isinstance(tensor, Tensor)
    if tensor.shape != shape or tensor.device != other.device:
        raise ValueError(
            f"{op}: {name} must be {letters} = {tuple(shape)} on the device of {other_name}, {other.device}; "
            f"got {tuple(tensor.shape)} on {tensor.device}"
        )


def check_int(op: str, name: str, value: object, low: int, high: int, meaning: str) -> int:
    """`value` as an int within [low, high]."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, bool | Tensor) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    else:
        number = operator.index(value)
    if not low <= number <= high:
        raise ValueError(f"{op}: {name} must be from {low} to {high} ({meaning}), got {number}")
    return number


def check_positive(op: str, name: str, value: object) -> float:
    """`value` as a float, finite and above zero."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    number = float(value)
    if not 0 < number < inf:  # torch.compile follows no isfinite
        raise ValueError(f"{op}: {name} must be above 0 and finite, got {number}")
    return number


def check_number(
    op: str, name: str, value: object, low: float = -inf, high: float = inf, meaning: str = "a coefficient"
) -> float:
    """`value` as a float, finite and within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    number = float(value)
    if not (low <= number <= high and abs(number) < inf):
        limits = f"from {low:g} to {high:g}" if isfinite(high) else "finite" + f" and at least {low:g}" * isfinite(low)
        raise ValueError(f"{op}: {name} must be {limits} ({meaning}), got {number}")
    return number


def check_size(op: str, name: str, value: object) -> int:
    """`value` as an int that a dimension of a parameter may have."""
    return check_int(op, name, value, 0, 2**31 - 1, "features")


def check_backend(op: str, backend: str | None) -> str | None:
    """`backend` is the name of one, or None, which leaves the choice; whether it can run is asked of every call."""
    check_choice(op, "backend", backend, (None, *backends.NAMES))
    return backend


def check_module(op: str, name: str, value: object, kind: type) -> None:
    """`value` is a module of that kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{op}: {name} must be a {kind.__name__}, got {type(value).__name__}")


def check_decimal(op: str, name: str, value: object) -> Fraction:
    """`value`, a number or how one is spelled, as what it prints as: the float 0.29 as 29 / 100."""
    if not isinstance(value, Real | Decimal | str) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a number or a string that holds one, got {type(value).__name__}")
    try:
        return Fraction(str(value))
    except ValueError as error:
        raise ValueError(f"{op}: {name} must be a finite number, got {value!r}") from error


@torch.compiler.assume_constant_result
def check_factor(op: str, name: str, value: object) -> tuple[int, int]:
    """`value`, at least 0, as numerator and denominator: whole numbers are what torch.compile follows."""
    exact = check_decimal(op, name, value)
    if exact < 0:
        raise ValueError(f"{op}: {name} must be at least 0, got {value!r}")
    return exact.as_integer_ratio()


def check_choice(op: str, name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """`value` is one of the words `choices`."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
