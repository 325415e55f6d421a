"""Hash gates: an id's expert is fixed before training (a baseline of COMET trees; also in MoEBERT's code)."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from moe_kernels.nn.gates.table import TableGate
from moe_kernels.ops._checks import FLOATING, INDEX, check_int, check_tensor


class HashGate(TableGate):
    """The expert of id i is table[i], its weight 1.

    Args:
        num_ids: ids are 0 .. num_ids - 1: users, or tokens of a vocabulary.
        num_experts: E.
        frequencies: (num_ids,), the number of occurrences of each id, or None. None: every id gets a random expert.
            Otherwise ids are visited in descending frequency, and each gets the expert with the smallest sum of
            frequencies so far (ties: the lower id or expert first); ids of frequency 0 get random experts.
        generator: draws the random experts, on the CPU; None is torch's own generator.

    Input: ids (T,), int32 or int64. Output: sparse, K = 1; weights in the dtype of x and without a gradient. `table`
    (num_ids,) is the expert of every id.

    Source: COMET trees, section 5.1 ("Hash-r"); MoEBERT's hash-random and hash-balance.

    Example:
        >>> gate = HashGate(num_ids=100, num_experts=4)
        >>> ids = torch.tensor([7, 7, 3])
        >>> gate(torch.randn(3, 16), ids).experts.flatten() == gate.table[ids]
        tensor([True, True, True])
    """

    def __init__(
        self,
        num_ids: int,
        num_experts: int,
        *,
        frequencies: Tensor | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        num_ids = check_int("HashGate", "num_ids", num_ids, 1, 2**31 - 1, "ids")
        super().__init__(num_experts, num_ids, device=device)
        if frequencies is not None:
            check_tensor("HashGate", "frequencies", frequencies, (*INDEX, *FLOATING))
            if frequencies.shape != (num_ids,):
                raise ValueError(f"HashGate: frequencies must be ({num_ids},), got shape {tuple(frequencies.shape)}")
            if not ((frequencies >= 0) & (frequencies < torch.inf)).all():
                low, high = frequencies.min().item(), frequencies.max().item()
                raise ValueError(f"HashGate: frequencies must be finite and at least 0, got {low} to {high}")
            frequencies = frequencies.cpu()
        self.frequencies = frequencies
        self.reset_parameters(generator)

    def draw(self, generator: torch.Generator | None) -> Tensor:
        size = (len(self.codes),)
        table = torch.randint(self.num_experts, size, dtype=torch.int32, generator=generator, device="cpu")
        if self.frequencies is not None:
            _balance(table, self.frequencies, self.num_experts)
        return table

    def extra_repr(self) -> str:
        return f"num_ids={len(self.codes)}, num_experts={self.num_experts}"


def _balance(table: Tensor, frequencies: Tensor, num_experts: int) -> None:
    """Writes into `table` the experts of the ids of positive frequency (see HashGate)."""
    loads = [(frequencies.new_zeros(()).item(), expert) for expert in range(num_experts)]
    for index in frequencies.sort(descending=True, stable=True).indices.tolist():
        if frequencies[index] == 0:
            return
        load, expert = loads[0]
        table[index] = expert
        heapq.heapreplace(loads, (load + frequencies[index].item(), expert))
