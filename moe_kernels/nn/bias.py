"""Balance without a loss: a bias of the choice that follows each expert's load."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_kernels.ops._checks import check_module
from moe_kernels.ops._loads import count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BalanceBias(nn.Module):
    """Base of gates with `balance_rate`: buffers balance_bias (E,) and loads (E,), both float32.

    loads: the requests of each expert, before drops, in all forwards of training since the last update.
    """

    balance_rate: float | None
    balance_bias: Tensor
    loads: Tensor

    def add_balance(self, num_experts: int, rate: float | None, device: torch.device | str | None) -> None:
        self.balance_rate = rate
        if rate is not None:
            zeros = partial(torch.zeros, num_experts, dtype=torch.float32, device=device)
            self.register_buffer("balance_bias", zeros())
            self.register_buffer("loads", zeros())
            # A copy of `loads` that is no buffer: DistributedDataParallel replaces buffers by those of rank 0 before
            # each forward, and count_requests then goes on from the copy.
            self.counted = zeros()

    def clear_balance(self) -> None:
        if self.balance_rate is not None:
            for each in (self.balance_bias, self.loads, self.counted):
                each.zero_()

    def count_loads(self, experts: Tensor) -> None:
        """experts (T, K) int32; -1 does not count, and in evaluation none does. Needs a balance_rate."""
        if self.training:
            count(self.loads, self.counted, experts)
        elif _several():  # loads may be those of rank 0
            count(self.loads, self.counted, experts[:0])

    def update_bias(self, reduce: ProcessGroup | None = None, recentre: bool = False) -> None:
        """As `update_biases`, for this gate alone."""
        _update([self], reduce, recentre)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if getattr(self, "balance_rate", None) is None:
            return super()._apply(fn, recurse)
        kept = {name: _moved(fn, getattr(self, name)) for name in ("balance_bias", "loads", "counted")}
        super()._apply(fn, recurse)
        for name, each in kept.items():
            setattr(self, name, each)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if getattr(self, "balance_rate", None) is not None:
            self.counted = self.loads.detach().clone()


def _moved(fn: Any, tensor: Tensor) -> Tensor:
    """fn(tensor), which stays float32 if fn changes dtypes."""
    result = fn(tensor)
    return result if result.dtype == torch.float32 else tensor.to(result.device)


def update_biases(model: nn.Module, reduce: ProcessGroup | None = None, recentre: bool = False) -> None:
    """Moves the balance_bias of every gate with a balance_rate towards equal loads, and sets the loads to zero.

        load = loads, summed over the processes;  change_e = rate * sign(mean of load - load_e)
        balance_bias += change                    or, recentred, change - mean of change

    Call it once a step, before optimizer.step(): all forwards since the last call count, those of all micro-batches.

        optimizer.register_step_pre_hook(lambda *_: nn.update_biases(model))

    Args:
        model: the model, also wrapped or compiled. Gates without a balance_rate are left as they are.
        reduce: process group whose loads are summed, in one all-reduce; None: the default group if torch.distributed
            is initialised, else this process alone. Every process of the group must call it.
        recentre: whether the sum of the biases stays as it is, as torchtitan does. Choices depend on differences of
            biases alone, so this changes none but by rounding.

    Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1, with the sign rule of DeepSeek-V3 (rate 0.001 there).

    Example:
        >>> gate = TopKGate(16, 4, 1, scores="sigmoid", balance_rate=0.001)
        >>> gate(torch.ones(3, 16)).experts.flatten().tolist() == 3 * [gate.loads.argmax().item()]
        True
        >>> update_biases(gate)
        >>> gate.balance_bias.sort().values, gate.loads
        (tensor([-0.0010,  0.0010,  0.0010,  0.0010]), tensor([0., 0., 0., 0.]))
    """
    check_module("update_biases", "model", model, nn.Module)
    gates = [each for each in model.modules() if isinstance(each, BalanceBias) and each.balance_rate is not None]
    _update(gates, reduce, recentre)


def _several() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@torch.no_grad()
def _update(gates: Iterable[BalanceBias], reduce: ProcessGroup | None, recentre: bool) -> None:
    gates = list(gates)
    without = [type(gate).__name__ for gate in gates if gate.balance_rate is None]
    if without:
        raise ValueError(f"update_bias: {without[0]} has no balance_rate; pass balance_rate=0.001 when it is made")
    if not gates:
        return
    loads = torch.cat([gate.loads for gate in gates])
    if _several():
        torch.distributed.all_reduce(loads, group=reduce)
    for gate, load in zip(gates, loads.split([gate.loads.shape[0] for gate in gates]), strict=True):
        change = gate.balance_rate * (load.mean() - load).sign()
        gate.balance_bias += change - change.mean() if recentre else change
        gate.loads.zero_()
        gate.counted.zero_()
