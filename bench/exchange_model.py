"""Predicts the cost of experts across processes: bytes that ranks send, and the time of a layer for given links.

Bytes are exact: tests/ranks/traffic.py compares them with what the collectives move. Times are predictions.

Assumptions of the times:
    * every rank has T tokens with K choices each; the experts' shares of the rows are uniform or follow Zipf's law;
    * experts are placed in the order of their share, the busiest on rank 0, which is the worst placement;
    * a rank sends and receives at the same time; its two links, `inside` the node (bytes a second) and `outside` to
      other nodes, work at the same time too;
    * an all-to-all takes as long as its slowest rank, plus `latency`; it does not overlap with the products;
    * products run at `flops` whatever their size, and backward has twice as many as forward; gates, plans, dispatch and
      combine are left out, since one process has them too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COUNT = 4  # bytes of an int32


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends to others."""

    sent_forward: list[int]
    sent_backward: list[int]


def exchange_bytes(rows: Tensor, dim: int, out: int, width: int, num_experts: int) -> Traffic:
    """Bytes that each rank sends for one layer.

    rows (n, n): rows[s, d] is the number of rows from rank s to rank d. dim, out: D and Dout. width: bytes of an
    element.

    Forward sends the numbers of rows and the rows to the owners of the experts, and the outputs back. Backward sends
    the gradients of the outputs to the owners, and the gradients of the rows back.
    """
    away = rows.long() * (1 - torch.eye(rows.shape[0], dtype=torch.int64, device=rows.device))
    leave, arrive = away.sum(1), away.sum(0)
    counts = COUNT * (num_experts - num_experts // rows.shape[0])
    forward = width * (leave * dim + arrive * out) + counts
    return Traffic(forward.tolist(), (width * (leave * out + arrive * dim)).tolist())


def norm_bytes(ranks: int, tokens: int, dim: int, num_experts: int, width: int) -> int:
    """Bytes that a rank sends for `ExpertParallel.norms`, with `tokens` tokens of its own on every rank.

    It sends every other rank the number of its tokens, the tokens, and its experts' norms for that rank's tokens.
    """
    return (ranks - 1) * (COUNT + tokens * dim * width + tokens * (num_experts // ranks) * width)


@dataclass(frozen=True)
class Machine:
    """Ranks and their links.

    node: number of ranks in a node. inside, outside: bytes a second that a rank sends, and as many that it receives,
    within its node and to other nodes. latency: seconds of an all-to-all without data. flops: FLOP/s of each rank.
    """

    ranks: int
    node: int = 8
    inside: float = 450e9
    outside: float = 50e9
    latency: float = 20e-6
    flops: float = 400e12


@dataclass(frozen=True)
class Cost:
    """Predicted seconds of one layer, forward plus backward. imbalance: rows of the busiest rank over the mean."""

    exchange: float
    experts: float
    imbalance: float
    sent: int  # bytes, of the rank that sends most

    @property
    def total(self) -> float:
        return self.exchange + self.experts


def shares(num_experts: int, skew: float) -> Tensor:
    """(E,): each expert's share of the rows by Zipf's law with exponent `skew`; 0 is uniform."""
    weights = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -skew
    return weights / weights.sum()


def layer_cost(machine: Machine, tokens: int, dim: int, hidden: int, choices: int, share: Tensor, width: int) -> Cost:
    """The cost of a layer with `tokens` tokens on each rank; experts with a gated activation, weights (D, 2 H), (H, D).

    share (E,): each expert's share of the rows. width: bytes of an element.
    """
    n, experts = machine.ranks, share.numel()
    if experts % n:
        raise ValueError(f"layer_cost: {n} ranks must divide the experts, got {experts}")
    rows = (tokens * choices * share.view(n, -1).sum(1)).round().long().expand(n, n)
    traffic = exchange_bytes(rows, dim, dim, width, experts)
    sending, returning = (_all_to_all(machine, each * dim * width) for each in (rows, rows.T))
    counts = _all_to_all(machine, torch.full((n, n), COUNT * experts // n))
    busiest = int(rows.sum(0).max())
    products = 2 * busiest * dim * hidden * 3 / machine.flops
    exchange = counts + 2 * (sending + returning) if n > 1 else 0.0
    sent = max(a + b for a, b in zip(traffic.sent_forward, traffic.sent_backward, strict=True))
    return Cost(exchange, 3 * products, busiest / (tokens * choices), sent)


def _all_to_all(machine: Machine, sizes: Tensor) -> float:
    """Seconds of an all-to-all. sizes (n, n): sizes[s, d] bytes go from rank s to rank d."""
    node = torch.arange(machine.ranks) // machine.node
    own = torch.eye(machine.ranks, dtype=torch.bool)
    near = torch.where((node[:, None] == node) & ~own, sizes, 0)
    far = torch.where(node[:, None] != node, sizes, 0)
    slowest = max(
        max(near.sum(way).max().item() / machine.inside, far.sum(way).max().item() / machine.outside) for way in (0, 1)
    )
    return slowest + machine.latency
