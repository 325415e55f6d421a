"""What operators and backends share: sizes and dtypes of results, layouts that kernels take, checks of index arrays,
and whether sums need an order that does not depend on other rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

GATED: tuple[str, ...] = ("swiglu", "geglu")  # activations that halve the number of columns, computed in kernels
CLAMPED = "swiglu_clamped"  # also halves the number of columns, but PyTorch computes it
CHECK = "MOE_KERNELS_CHECK"


def words(n: int) -> int:
    """Number of int32 words of a packed mask of n elements."""
    return (n + 31) // 32


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which most kernels compute: float64 for float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


def smaller(a: int, b: int) -> int:
    """min(a, b). For symbolic sizes torch.compile adds no guard on which of them is smaller."""
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return torch.sym_min(a, b)
    return min(a, b)  # torch.compile of torch 2.11 refuses sym_min of two constants


def larger(a: int, b: int) -> int:
    """max(a, b), as `smaller`."""
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return torch.sym_max(a, b)
    return max(a, b)


def plan_rows(num_tokens: int, k: int, num_experts: int, capacity: int | None) -> int:
    """R, the number of allocated rows of a plan."""
    return num_tokens * k if capacity is None else smaller(num_tokens * k, num_experts * capacity)


def all_rows(x: Tensor) -> Tensor:
    """expert_offsets of a single expert that has all rows of x."""
    return torch.arange(2, device=x.device, dtype=torch.int32) * x.shape[0]


def contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def contiguous_matrices(weight: Tensor) -> Tensor:
    return weight if weight.stride(-1) == 1 or weight.stride(-2) == 1 else weight.contiguous()


def contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors, contiguous. In backward, hooks on saved tensors may have changed their strides."""
    return tuple(None if each is None else each.contiguous() for each in tensors)


def aligned(tensor: Tensor, size: int) -> bool:
    """Whether the address of the tensor is a multiple of `size` bytes."""
    return tensor.data_ptr() % size == 0


def is_checked(index: Tensor) -> bool:
    """Whether to check the values of an index array before kernels use them as indices.

    True on the CPU. On a GPU True only if MOE_KERNELS_CHECK is set, and neither empty nor 0: a check waits for the GPU.
    """
    return index.is_cpu or os.environ.get(CHECK, "0") not in ("", "0")


def has_values(x: Tensor) -> bool:
    """Whether code outside operators may depend on the values of x: x is on the CPU, where reading waits for no device,
    and no graph is recorded, which would keep them for every input. Tensors of other classes, as FakeTensor, have none.

    Call it as sizes.has_values, which precompile replaces: it runs on the CPU what will run on a GPU.
    """
    recorded = is_compiling() or torch.jit.is_tracing()
    return type(x) is Tensor and x.is_cpu and not recorded and torch._C._get_dispatch_mode(_PROXY) is None


_PROXY = torch._C._TorchDispatchModeKey.PROXY  # the mode in which make_fx records


def check_shapes(op: str, plan: Any) -> None:
    """Raises unless the arrays of a RoutingPlan have the dtypes, shapes, strides and devices that it states."""
    slot_row, num_experts, device = plan.slot_row, plan.num_experts, plan.row_token.device
    row_shape = (plan.row_token.numel(),)
    for name, array, letters, shape in (
        ("slot_row", slot_row, "(T, K)", (plan.num_tokens, slot_row.shape[-1] if slot_row.dim() else 1)),
        ("expert_offsets", plan.expert_offsets, "(E + 1,)", (num_experts + 1,)),
        ("row_token", plan.row_token, "(R,)", row_shape),
        ("row_choice", plan.row_choice, "(R,)", row_shape),
        ("requested", plan.requested, "(E,)", (num_experts,)),
        ("kept", plan.kept, "(E,)", (num_experts,)),
        ("dropped", plan.dropped, "()", ()),
    ):
        if not isinstance(array, Tensor):
            raise TypeError(f"{op}: plan.{name} must be a Tensor, got {type(array).__name__}")
        if array.dtype is not torch.int32:
            raise TypeError(f"{op}: plan.{name} must have dtype int32; got {array.dtype}".replace("torch.", ""))
        if array.shape != shape or not array.is_contiguous() or array.device != device:
            raise ValueError(
                f"{op}: plan.{name} must be {letters} = {shape}, contiguous, on {device}; "
                f"got {tuple(array.shape)} with strides {array.stride()} on {array.device}"
            )
    if row_shape[0] > slot_row.numel():
        raise ValueError(f"{op}: plan must have at most T K = {slot_row.numel()} rows, got {row_shape[0]}")


def refuse_outside(what: str, index: Tensor, least: int, size: int, meaning: str = "") -> None:
    """Raises ValueError for values outside [least, size). `meaning` explains the value `least` in the message."""
    if index.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < least or high >= size:
        first = f"{least} ({meaning})" if meaning else f"{least}"
        raise ValueError(f"{what} must be from {first} to {size - 1}; got {low} to {high}")


def refuse_bad_choices(op: str, experts: Tensor, num_experts: int) -> None:
    """Raises ValueError for experts outside [0, E). Does nothing unless is_checked."""
    if is_checked(experts):
        refuse_outside(f"{op}: experts", experts, 0, num_experts)


def refuse_bad_forced(forced: Tensor, num_experts: int) -> None:
    """Raises ValueError for forced experts outside [-1, E) or twice in a row. Does nothing unless is_checked."""
    if not is_checked(forced):
        return
    refuse_outside("topk_gate: forced", forced, -1, num_experts, "free")
    ordered = forced.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if twice.any():
        row = int(twice.nonzero()[0])
        raise ValueError(
            f"topk_gate: forced must name no expert twice in a row; got {forced[row].tolist()} in row {row}"
        )


def refuse_bad_rows(op, slot_row, num_rows, row_token=None, expert_offsets=None) -> None:
    """Raises ValueError if row_token or slot_row has a value out of range, if expert_offsets does not rise from 0 to at
    most R, or if slot_row does not name each row in use once, at its token in row_token. For expert_mlp
    slot_row does not name rows in use whose row_token is -1.

    Does nothing unless is_checked(slot_row).
    """
    if not is_checked(slot_row):
        return
    num_tokens = slot_row.shape[0]
    if row_token is not None:
        refuse_outside(f"{op}: plan.row_token", row_token, -1, num_tokens, "no token")
    refuse_outside(f"{op}: plan.slot_row", slot_row, -1, num_rows, "no row")
    if expert_offsets is not None:
        _refuse_bad_offsets(f"{op}: plan.expert_offsets", expert_offsets, num_rows)
        rows, slots = torch.arange(int(expert_offsets[-1]), device=slot_row.device), slot_row[slot_row >= 0].long()
        if op == "expert_mlp":
            rows = rows[row_token[: len(rows)] >= 0]
        if not torch.equal(slots.sort().values, rows):
            raise ValueError(
                f"{op}: plan.slot_row must name each of the {len(rows)} rows in use once, and no other row"
            )
        if row_token is not None and not torch.equal(row_token[slots].long(), (slot_row >= 0).nonzero()[:, 0]):
            raise ValueError(f"{op}: plan.row_token and plan.slot_row must agree: row slot_row[t, k] is of token t")


def refuse_bad_plan(
    op: str,
    expert_offsets: Tensor,
    row_token: Tensor,
    row_choice: Tensor | None,
    slot_row: Tensor,
) -> None:
    """Raises ValueError as refuse_bad_rows, and if row_choice is out of range or does not agree with slot_row."""
    refuse_bad_rows(op, slot_row, row_token.shape[0], row_token, expert_offsets)
    if row_choice is None or not is_checked(slot_row):
        return
    refuse_outside(f"{op}: plan.row_choice", row_choice, -1, slot_row.shape[1], "no choice")
    token, choice = (slot_row >= 0).nonzero(as_tuple=True)
    if not torch.equal(row_choice[slot_row[token, choice].long()].long(), choice):
        raise ValueError(f"{op}: plan.row_choice and plan.slot_row must agree: row slot_row[t, k] is of choice k")


def _refuse_bad_offsets(what: str, expert_offsets: Tensor, num_rows: int) -> None:
    bounds = expert_offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > num_rows or bounds != sorted(bounds):
        raise ValueError(f"{what} must rise from 0 to at most R = {num_rows}; got {bounds}")


def refuse_bad_groups(expert_offsets: Tensor, rows: Tensor, row_token: Tensor | None) -> None:
    """Raises ValueError unless offsets start at 0, never fall and end at R or below, and tokens are in [-1, T).

    Does nothing unless is_checked.
    """
    if not is_checked(expert_offsets):
        return
    num_rows = rows.shape[0] if row_token is None else row_token.shape[0]
    _refuse_bad_offsets("grouped_gemm: expert_offsets", expert_offsets, num_rows)
    if row_token is not None:
        refuse_outside("grouped_gemm: row_token", row_token, -1, rows.shape[0], "zeros")


def refuse_unknown_experts(experts: Tensor, num_experts: int) -> None:
    """Raises ValueError for ids outside [-1, E) on the CPU. On a GPU, where a check would wait for the device, does
    nothing: there ids outside [0, E) count as -1."""
    if experts.device.type == "cpu":
        refuse_outside("make_plan: experts", experts, -1, num_experts, "none")


# Set while an operator runs that was called in the mode batch_invariant.
_fixed: ContextVar[bool] = ContextVar("moe_kernels_fixed_order", default=False)


@contextmanager
def fixed_order() -> Iterator[None]:
    """While a marked operator runs. Entered by ops._define."""
    token = _fixed.set(True)
    try:
        yield
    finally:
        _fixed.reset(token)


def is_fixed() -> bool:
    """Whether the operator that runs must add in an order that does not depend on its other rows."""
    return _fixed.get()


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """x.sum(dim), by adding halves of the dimension: elementwise additions, which give the same bits everywhere.

    torch's reductions choose an order by the sizes of all dimensions and by the number of threads. 16-bit elements are
    added in float32.
    """
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    sums = x.float() if narrow else x
    if sums.shape[dim] == 0:
        return x.sum(dim)
    while (size := sums.shape[dim]) > 1:
        half = size // 2
        added = sums.narrow(dim, 0, half) + sums.narrow(dim, half, half)
        sums = torch.cat([added, sums.narrow(dim, 2 * half, 1)], dim) if size % 2 else added
    return sums.squeeze(dim).to(x.dtype)


def sum_tiles(partial: Tensor, dim: int) -> Tensor:
    """partial.sum(dim), for the operator that runs: sums over the tiles of columns of a row."""
    return ordered_sum(partial, dim) if is_fixed() else partial.sum(dim)
