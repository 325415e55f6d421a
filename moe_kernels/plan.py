"""RoutingPlan: which choices of the tokens get a row, and which row; computed once and used by several operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from moe_kernels._pytree import register
from moe_kernels.sizes import check_shapes


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """The assignment of the tokens' choices of experts to rows, grouped by expert.

    Every kept choice has one row; a dropped choice has none. Rows of expert e are expert_offsets[e] to
    expert_offsets[e + 1] - 1. They are in the order in which make_plan visits choices; after plan_expert_choice and
    plan_priority they are in token order.

        num_tokens, num_experts        T, E
        expert_offsets (E + 1)         first row of every expert; the last entry is the number of rows in use
        row_token      (R)             the token in a row
        row_choice     (R)             which of the token's K choices has the row
        slot_row       (T, K)          the row of a choice; -1 for a dropped choice and for no choice
        requested      (E)             requests to each expert; after plan_priority the number of tokens that score it
                                       highest, after plan_expert_choice equal to kept
        kept           (E)             choices that became rows: kept_e = expert_offsets[e + 1] - expert_offsets[e]
        dropped        ()              sum of requested minus sum of kept

    All arrays are int32, contiguous, without a gradient and on one device. Operations refuse other arrays. On the CPU
    operations refuse values out of range, and `dispatch`, `combine`'s backward and `expert_mlp` refuse arrays that do
    not agree with each other; on a GPU only with MOE_KERNELS_CHECK=1. A loaded or copied plan is checked whole.

    R = min(T * K, E * capacity), or T * K without a capacity: the host knows it without waiting for the device. Rows
    from expert_offsets[E] on are unused and have row_token = row_choice = -1; `dispatch` and `grouped_gemm` write zeros
    to them. Shapes depend only on T, K, E and capacity. In eager mode on the CPU NonzeroWeights, MultiGateMoE and
    GlobalPolicy cut off the unused rows, so that R is the number of rows in use.

    Four tokens, two choices each, two experts with room for two:

        >>> from moe_kernels import make_plan
        >>> experts = torch.tensor([[0, 1], [0, 1], [0, 1], [1, 0]])
        >>> plan = make_plan(experts, 2, capacity=2)       # first choices 0 0 0 1, then second choices 1 1 1 0
        >>> plan.requested.tolist(), plan.kept.tolist(), plan.dropped.item()
        ([4, 4], [2, 2], 4)
        >>> plan.expert_offsets.tolist()                   # rows 0 and 1 are expert 0's, rows 2 and 3 expert 1's
        [0, 2, 4]
        >>> plan.row_token.tolist()                        # expert 0: tokens 0, 1 (2 came third); expert 1: 3, then 0
        [0, 1, 3, 0]
        >>> plan.row_choice.tolist()                       # rows 0 to 2: first choices; row 3: a second choice
        [0, 0, 0, 1]
        >>> plan.slot_row.tolist()
        [[0, 3], [1, -1], [-1, -1], [2, -1]]
    """

    num_tokens: int
    num_experts: int
    expert_offsets: Tensor
    row_token: Tensor
    row_choice: Tensor
    slot_row: Tensor
    requested: Tensor
    kept: Tensor
    dropped: Tensor

    @property
    def num_choices(self) -> int:
        """K, the number of choices of a token."""
        return self.slot_row.shape[1]

    @property
    def num_rows(self) -> int:
        """R, the number of allocated rows. expert_offsets[E] rows are in use."""
        return self.row_token.shape[0]

    @property
    def dropped_share(self) -> Tensor:
        """The share of the requests that were dropped, a scalar in torch's default dtype; 0 without requests."""
        return self.dropped / self.requested.sum().clamp(min=1)

    @property
    def imbalance(self) -> Tensor:
        """The largest number of requests to an expert over the experts' mean, a scalar in torch's default dtype.

        It is 1 if all experts have equally many requests, E if one expert has all requests, and 0 without requests.
        """
        return self.requested.max().long() * self.num_experts / self.requested.sum().clamp(min=1)

    @property
    def slot_expert(self) -> Tensor:
        """(T, K) int32: the expert of a kept choice; -1 for a dropped choice and for no choice."""
        expert = torch.searchsorted(self.expert_offsets[1:], self.slot_row.clamp(min=0), right=True, out_int32=True)
        return torch.where(self.slot_row >= 0, expert, -1)

    @property
    def used(self) -> Tensor:
        """(T, E) bool: whether a token has a row of an expert."""
        expert = torch.where(self.slot_row >= 0, self.slot_expert, self.num_experts).long()
        used = expert.new_zeros(self.num_tokens, self.num_experts + 1, dtype=torch.bool)
        return used.scatter(1, expert, True)[:, : self.num_experts]

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> RoutingPlan:
        """The plan with every array on `device`; this plan itself if all arrays are there already.

        non_blocking: as for Tensor.to. If True, the host does not wait for copies from pinned memory to a GPU.
        """
        moved = [each.to(device, non_blocking=non_blocking) for each in self._arrays()]
        same = all(new is old for new, old in zip(moved, self._arrays(), strict=True))
        return self if same else RoutingPlan(self.num_tokens, self.num_experts, *moved)

    def pin_memory(self) -> RoutingPlan:
        """The plan with every array in page-locked memory, as a DataLoader with pin_memory=True makes it."""
        return RoutingPlan(self.num_tokens, self.num_experts, *(each.pin_memory() for each in self._arrays()))

    def state_dict(self) -> dict[str, int | Tensor]:
        """The fields by name, a dict for torch.save and torch.load(weights_only=True).

        torch.save(plan.state_dict(), file);  plan = RoutingPlan.from_state_dict(torch.load(file))
        """
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RoutingPlan:
        """The plan with the fields of a `state_dict`.

        Raises:
            ValueError: fields are missing or unknown, shapes or devices do not fit, values are out of range, or arrays
                do not agree with each other.
            TypeError: num_tokens or num_experts is not an int, or an array is not an int32 tensor.
        """
        plan = cls.__new__(cls)
        plan.__setstate__(state)
        return plan

    def __getstate__(self) -> dict[str, int | Tensor]:
        return self.state_dict()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        # torch.load calls this with the contents of any file.
        names = [each.name for each in fields(self)]
        if sorted(state) != sorted(names):
            raise ValueError(f"RoutingPlan: expected the fields {', '.join(names)}; got {', '.join(state)}")
        for name, value in state.items():
            expected = "an int" if name in ("num_tokens", "num_experts") else "an int32 tensor"
            tensor = isinstance(value, Tensor) and value.dtype == torch.int32
            if not (type(value) is int if expected == "an int" else tensor):
                got = getattr(value, "dtype", type(value).__name__)
                raise TypeError(f"RoutingPlan: {name} must be {expected}, got {got}")
            object.__setattr__(self, name, value)
        check_shapes("RoutingPlan", self)
        if not any(each.is_meta or isinstance(each, FakeTensor) for each in self._arrays()):
            _check_values(self)

    def _arrays(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, each.name) for each in fields(self)[2:])

    def to_padded(self, rows: Tensor, capacity: int) -> Tensor:
        """rows (R, D) -> (E, capacity, D): the first `capacity` rows of every expert, then zeros. Differentiable."""
        self._check_rows("to_padded", rows, self.num_rows, 2)
        slot = torch.arange(capacity, device=rows.device, dtype=torch.int32)
        return _rows_or_zeros(rows, self.expert_offsets[:-1, None] + slot, slot < self.kept[:, None])

    def from_padded(self, padded: Tensor) -> Tensor:
        """padded (E, capacity, D) -> rows (R, D), the inverse of `to_padded`. Differentiable.

        An expert's rows after the first `capacity` are zero, and so are unused rows.
        """
        self._check_rows("from_padded", padded, self.num_experts, 3)
        capacity = padded.shape[1]
        row = torch.arange(self.num_rows, device=padded.device, dtype=torch.int32)
        expert = torch.searchsorted(self.expert_offsets[1:], row, right=True).clamp(max=self.num_experts - 1)
        slot = row - self.expert_offsets[expert]
        return _rows_or_zeros(padded.flatten(0, 1), expert * capacity + slot, (slot < capacity) & (self.row_token >= 0))

    def _check_rows(self, name: str, rows: Tensor, first: int, rank: int) -> None:
        if rows.dim() != rank or rows.shape[0] != first:
            raise ValueError(f"{name}: expected {rank} dimensions, the first of size {first}; got {tuple(rows.shape)}")


def _check_values(plan: RoutingPlan) -> None:
    """Raises unless the arrays agree with each other, as those of `make_plan` do. Waits for a GPU."""
    offsets, k = plan.expert_offsets.long(), plan.num_choices
    bounds = offsets.tolist()
    used = bounds[-1]
    token, choice, slots = plan.row_token.long(), plan.row_choice.long(), plan.slot_row.flatten().long()
    row = torch.arange(plan.num_rows, device=token.device)
    in_use = row < used
    for holds, expected in (
        (
            bounds[0] == 0 and bounds == sorted(bounds) and used <= plan.num_rows,
            f"expert_offsets must rise from 0 to at most R = {plan.num_rows}",
        ),
        (torch.equal(plan.kept.long(), offsets.diff()), "kept must be the differences of expert_offsets"),
        (bool((plan.requested >= plan.kept).all()), "requested must be at least kept"),
        (
            int(plan.dropped) == int(plan.requested.long().sum()) - used,
            "dropped must be the sum of requested minus that of kept",
        ),
        (
            bool(torch.where(in_use, (token >= 0) & (token < plan.num_tokens), token == -1).all()),
            f"row_token must be from 0 to {plan.num_tokens - 1} in rows in use, and -1 in others",
        ),
        (
            bool(torch.where(in_use, (choice >= 0) & (choice < k), choice == -1).all()),
            f"row_choice must be from 0 to {k - 1} in rows in use, and -1 in others",
        ),
        (
            bool(((slots >= -1) & (slots < used)).all()) and int((slots >= 0).sum()) == used,
            "slot_row must name each row in use once, and be -1 elsewhere",
        ),
    ):
        if not holds:
            raise ValueError(f"RoutingPlan: {expected}; this plan was not saved by moe_kernels, or changed since")
    if not torch.equal(slots[(token * k + choice)[:used]], row[:used]):
        raise ValueError("RoutingPlan: slot_row[row_token[r], row_choice[r]] must be r for every row r in use")


def _rows_or_zeros(rows: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """rows[index] where `valid`, else zeros. Where not `valid`, `index` may be out of range."""
    if rows.shape[0] == 0:
        return rows.sum(0).expand(*index.shape, -1)
    return torch.where(valid[..., None], rows[torch.where(valid, index, 0).long()], 0)


register(RoutingPlan)
torch.serialization.add_safe_globals([RoutingPlan])  # lets torch.load(weights_only=True) read a plan
