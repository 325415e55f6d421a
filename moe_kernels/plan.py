"""RoutingPlan: the row of every choice of every token, computed once on the device and used by all operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from moe_kernels._pytree import register


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """The row that each choice of each token gets among the rows of its expert.

    Every kept choice has one row. Rows of expert e are expert_offsets[e] to expert_offsets[e + 1] - 1, in the order in
    which make_plan visits choices, or by token (plan_expert_choice, plan_priority).
    Dropped choices have no row and cost nothing in later operations.

        num_tokens, num_experts        T, E
        expert_offsets (E + 1)         first row of every expert; the last entry is the number of rows in use
        row_token      (R)             the token in a row
        row_choice     (R)             which of the token's K choices the row is
        slot_row       (T, K)          the row of a choice; -1 for a dropped choice and for no choice
        requested      (E)             choices that name the expert; from plan_priority: tokens that score it highest
        kept           (E)             choices that became rows: kept_e = expert_offsets[e + 1] - expert_offsets[e]
        dropped        ()              sum of requested minus sum of kept

    Every array is int32, contiguous, without a gradient, and all are on one device. Operations refuse other arrays, and
    on the CPU also values of row_token, slot_row and expert_offsets out of range. They do not check that the arrays
    agree with each other, which is so after `make_plan`, `plan_expert_choice` and `plan_priority`.

    R is known without waiting for the device: R = min(T * K, E * capacity), or T * K without a capacity. Rows from
    expert_offsets[E] on are not in use and hold row_token = row_choice = -1; `dispatch` makes them zero and
    `grouped_gemm` keeps them zero. Shapes depend on T, K, E and capacity alone.

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
        >>> plan.row_choice.tolist()                       # token 3's first choice, token 0's second
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
        """K, the choices of a token."""
        return self.slot_row.shape[1]

    @property
    def num_rows(self) -> int:
        """R, the allocated rows; expert_offsets[E] of them are in use."""
        return self.row_token.shape[0]

    @property
    def dropped_share(self) -> Tensor:
        """Dropped choices as a share of those requested, a float32 scalar; 0 if no choice was requested."""
        return self.dropped / self.requested.sum().clamp(min=1)

    @property
    def imbalance(self) -> Tensor:
        """Requests of the busiest expert over the mean, a float32 scalar: 1 is balance, E collapse, 0 no requests."""
        return self.requested.max().long() * self.num_experts / self.requested.sum().clamp(min=1)

    @property
    def slot_expert(self) -> Tensor:
        """(T, K) int32: the expert that has a choice's row; -1 for a dropped choice and for no choice."""
        expert = torch.searchsorted(self.expert_offsets[1:], self.slot_row.clamp(min=0), right=True, out_int32=True)
        return torch.where(self.slot_row >= 0, expert, -1)

    @property
    def used(self) -> Tensor:
        """(T, E) bool: the experts that a token reached."""
        expert = torch.where(self.slot_row >= 0, self.slot_expert, self.num_experts).long()
        used = expert.new_zeros(self.num_tokens, self.num_experts + 1, dtype=torch.bool)
        return used.scatter(1, expert, True)[:, : self.num_experts]

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> RoutingPlan:
        """The plan with every array on that device; this plan itself if all are there already.

        non_blocking: as in Tensor.to. If True, the host does not wait for copies from pinned memory to a GPU.
        """
        moved = [each.to(device, non_blocking=non_blocking) for each in self._arrays()]
        same = all(new is old for new, old in zip(moved, self._arrays(), strict=True))
        return self if same else RoutingPlan(self.num_tokens, self.num_experts, *moved)

    def pin_memory(self) -> RoutingPlan:
        """The plan with every array in page-locked memory, as a DataLoader with pin_memory=True makes it."""
        return RoutingPlan(self.num_tokens, self.num_experts, *(each.pin_memory() for each in self._arrays()))

    def state_dict(self) -> dict[str, int | Tensor]:
        """The fields by name, a dict that torch.save writes and torch.load(weights_only=True) reads.

        torch.save(plan.state_dict(), file);  plan = RoutingPlan.from_state_dict(torch.load(file))
        """
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RoutingPlan:
        """The plan of a `state_dict`.

        Raises:
            ValueError: fields are missing or unknown.
            TypeError: num_tokens or num_experts is not an int, or an array is not an int32 tensor.
        """
        plan = cls.__new__(cls)
        plan.__setstate__(state)
        return plan

    def __getstate__(self) -> dict[str, int | Tensor]:
        return self.state_dict()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        # torch.load calls this too, with the contents of any file, so other names are refused. Operations check shapes.
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

    def _arrays(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, each.name) for each in fields(self)[2:])

    def to_padded(self, rows: Tensor, capacity: int) -> Tensor:
        """rows (R, D) -> (E, capacity, D): slot c of expert e, zeros where it is empty.

        Rows in slots from `capacity` on are left out. Differentiable.
        """
        self._check_rows("to_padded", rows, self.num_rows, 2)
        slot = torch.arange(capacity, device=rows.device, dtype=torch.int32)
        return _rows_or_zeros(rows, self.expert_offsets[:-1, None] + slot, slot < self.kept[:, None])

    def from_padded(self, padded: Tensor) -> Tensor:
        """padded (E, capacity, D) -> rows (R, D), the inverse of `to_padded`.

        Rows in slots from `capacity` on and rows not in use are zero. Differentiable.
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


def _rows_or_zeros(rows: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """rows[index] where valid, zeros elsewhere; where not valid, index may be out of range."""
    if rows.shape[0] == 0:
        return rows.sum(0).expand(*index.shape, -1)
    return torch.where(valid[..., None], rows[torch.where(valid, index, 0).long()], 0)


register(RoutingPlan)
torch.serialization.add_safe_globals([RoutingPlan])  # lets torch.load(weights_only=True) read a plan
