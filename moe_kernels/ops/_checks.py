"""Argument checks shared by the operations and layers; `op` is the name of the caller in the error message."""

import operator
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from math import inf, isfinite
from numbers import Real
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor  # torch has no public predicates
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from moe_kernels import backends
from moe_kernels.plan import RoutingPlan
from moe_kernels.sizes import check_shapes

HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
FLOATING = (*HALF_AND_SINGLE, torch.float64)
INDEX = (torch.int32, torch.int64)
INT32_MAX = 2**31 - 1
FLOAT32_MAX = torch.finfo(torch.float32).max


def check_tensor(op: str, name: str, tensor: object, dtypes: tuple[torch.dtype, ...], *, batched: bool = False) -> None:
    """Raises TypeError unless `tensor` is a strided Tensor of one of `dtypes`; outside torch.compile also if it has a
    forward-mode tangent or is inside a torch.func transform. With `batched` vmap is allowed."""
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
        raise TypeError(f"{op}: torch.func transforms of this kind are not supported; got a wrapped {name}")
    # Outside dual_level no tensor has a tangent; unpack_dual takes 1 us to say so.
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise TypeError(f"{op}: forward-mode derivatives are not supported; got a {name} with a tangent")


def check_plan(op: str, plan: object) -> None:
    """Raises unless `plan` is a RoutingPlan with the dtypes, shapes, strides and devices that its docstring states.

    Values are not checked here. Under torch.compile only the type of `plan` is checked.
    """
    if not isinstance(plan, RoutingPlan):
        raise TypeError(f"{op}: plan must be a RoutingPlan, got {type(plan).__name__}")
    if is_compiling():  # each check would add a guard to the graph, some of them on the number of tokens
        return
    check_tensor(op, "plan.row_token", plan.row_token, (torch.int32,))
    check_tensor(op, "plan.slot_row", plan.slot_row, (torch.int32,))
    check_rank(op, "plan.slot_row", plan.slot_row, "(T, K)")
    check_shapes(op, plan)


def check_rank(op: str, name: str, tensor: object, shape: str) -> None:
    """Raises unless `tensor` is a Tensor with as many dimensions as `shape` names, such as "(T, D)"."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{op}: {name} must be {shape}, got shape {tuple(tensor.shape)}")


def check_square(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2]:
        raise ValueError(f"{op}: {name} must be (..., n, n), got shape {tuple(tensor.shape)}")


def check_first(op: str, name: str, tensor: Tensor, size: int, meaning: str, device: torch.device) -> None:
    """Raises ValueError unless tensor.shape[0] is `size`, explained by `meaning`, and tensor.device is `device`."""
    if tensor.shape[0] != size:
        raise ValueError(f"{op}: {name} must have {size} rows, the {meaning}; got shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on the device of the plan, {device}; got {tensor.device}")


def check_like(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
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
    """Raises unless `tensor` has that shape (named `letters` in messages) and the dtype and device of `other`."""
    check_tensor(op, name, tensor, (other.dtype,))
    assert isinstance(tensor, Tensor)
    if tensor.shape != shape or tensor.device != other.device:
        raise ValueError(
            f"{op}: {name} must be {letters} = {tuple(shape)} on the device of {other_name}, {other.device}; "
            f"got {tuple(tensor.shape)} on {tensor.device}"
        )


def check_int(op: str, name: str, value: object, low: int, high: int, meaning: str) -> int:
    """`value` as an int (or SymInt) within [low, high]; bools and tensors are refused."""
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        number: Any = value  # operator.index would specialise a SymInt to a constant
    elif isinstance(value, bool | Tensor) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    else:
        number = operator.index(value)
    if not low <= number <= high:
        raise ValueError(f"{op}: {name} must be from {low} to {high} ({meaning}), got {number}")
    return number


def check_positive(op: str, name: str, value: object) -> float:
    """`value` as a float; raises unless it is finite and above 0."""
    number = _number(op, name, value)
    if not 0 < number < inf:  # torch.compile cannot trace isfinite
        raise ValueError(f"{op}: {name} must be above 0 and finite, got {number}")
    return number


def check_number(
    op: str, name: str, value: object, low: float = -inf, high: float = inf, meaning: str = "a coefficient"
) -> float:
    """`value` as a float; raises unless it is finite and within [low, high]."""
    number = _number(op, name, value)
    if not (low <= number <= high and abs(number) < inf):
        limits = f"from {low:g} to {high:g}" if isfinite(high) else "finite" + f" and at least {low:g}" * isfinite(low)
        raise ValueError(f"{op}: {name} must be {limits} ({meaning}), got {number}")
    return number


def _number(op: str, name: str, value: object) -> float:
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{op}: {name} must be finite in float64, got a larger {type(value).__name__}") from None


def check_size(op: str, name: str, value: object) -> int:
    """`value` as an int from 0 to 2^31 - 1, the size of a parameter's dimension."""
    return check_int(op, name, value, 0, 2**31 - 1, "features")


def check_backend(op: str, backend: str | None) -> str | None:
    """`backend`; raises unless it is None or the name of a backend. Whether the backend can run is not checked."""
    check_choice(op, "backend", backend, (None, *backends.NAMES))
    return backend


def check_module(op: str, name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{op}: {name} must be a {kind.__name__}, got {type(value).__name__}")


def check_decimal(op: str, name: str, value: object) -> Fraction:
    """`value` (a number or string) as the exact value of its text str(value): the float 0.29 becomes 29 / 100."""
    if not isinstance(value, Real | Decimal | str) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a number or a string that holds one, got {type(value).__name__}")
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{op}: {name} must be a finite number, got {value!r}") from error


@backends.constant
def check_factor(op: str, name: str, value: object) -> tuple[int, int]:
    """`value`, which must be at least 0, as (numerator, denominator): torch.compile can trace ints but not Fraction."""
    exact = check_decimal(op, name, value)
    if exact < 0:
        raise ValueError(f"{op}: {name} must be at least 0, got {value!r}")
    return exact.as_integer_ratio()


def check_choice(op: str, name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Checks of operators' arguments, before a kernel gets their addresses: exported and compiled programs call operators
# without the public functions and their checks. `op` is the operator's name and `name` the argument's, both as in its
# schema. `like` is a tensor whose device the argument must share.


def floating(op: str, name: str, tensor: Tensor, rank: int) -> torch.Size:
    """The shape of `tensor`; raises unless it has `rank` dimensions and a floating-point dtype that kernels take."""
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{op}: {name} must be float32, bfloat16, float16 or float64; got {tensor.dtype}")
    return shape_of(op, name, tensor, rank)


def shape_of(op: str, name: str, tensor: Tensor, rank: int) -> torch.Size:
    """The shape of `tensor`; raises unless it has `rank` dimensions."""
    shape = tensor.shape
    if len(shape) != rank:
        raise ValueError(f"{op}: {name} must have {rank} dimensions, got shape {tuple(shape)}")
    return shape


def expect(op: str, name: str, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> None:
    """Raises unless `tensor` is None or has this shape and dtype and the device of `like`."""
    if tensor is None:
        return
    if tensor.dtype is not dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}".replace("torch.", ""))
    if tensor.shape != shape or tensor.get_device() != like.get_device():  # a third of the time of .device
        raise ValueError(
            f"{op}: {name} must be {tuple(shape)} on {like.device}; got {tuple(tensor.shape)} on {tensor.device}"
        )


def integer(op: str, name: str, value: int, low: int, high: int = INT32_MAX) -> None:
    if not low <= value <= high:
        raise ValueError(f"{op}: {name} must be from {low} to {high}, got {value}")


def positive(op: str, name: str, value: float) -> None:
    if not 0 < value < inf:
        raise ValueError(f"{op}: {name} must be above 0 and finite, got {value}")


def finite(op: str, name: str, value: float) -> None:
    """Raises unless `value` is finite in float32, in which kernels multiply by it."""
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError(f"{op}: {name} must be finite in float32, got {value}")


def one_of(op: str, name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def flags(op: str, name: str, values: Sequence[bool], count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{op}: {name} must hold {count} bools, one for each gradient; got {len(values)}")


def check_arrays(op: str, like: Tensor, slot_row, num_rows, row_token=None, expert_offsets=None) -> None:
    """Raises unless the arrays of a plan are int32, (T, K), (num_rows,) and (E + 1,), on the device of `like`."""
    tokens, k = shape_of(op, "slot_row", slot_row, 2)
    expect(op, "slot_row", slot_row, (tokens, k), torch.int32, like)
    integer(op, "num_rows", num_rows, 0)
    expect(op, "row_token", row_token, (num_rows,), torch.int32, like)
    if expert_offsets is not None:
        check_offsets(op, expert_offsets, like)


def check_offsets(op: str, expert_offsets: Tensor, like: Tensor) -> int:
    """E; raises unless expert_offsets is (E + 1,) int32, on the device of `like`."""
    (count,) = shape_of(op, "expert_offsets", expert_offsets, 1)
    expect(op, "expert_offsets", expert_offsets, (max(count, 1),), torch.int32, like)
    return count - 1
