"""Predicts the cost of experts across processes: bytes that ranks send, and the time of a layer for given links.

If the number of rows from each rank to each other rank is known, the bytes are exact:
tests/helpers/ranks/traffic.py compares them with the bytes that the collectives send.

Assumptions of the times:
    * every rank has T tokens with K choices each, so T K rows; the experts' shares of them are uniform or follow Zipf's
      law;
    * experts are placed in the order of their share, the busiest on rank 0, which is the worst placement;
    * a rank has a link to the other ranks of its node and a link to other nodes; both work at the same time, and each
      sends and receives at the same time;
    * an all-to-all takes as long as its slowest rank, plus a latency; it does not overlap with the products;
    * products run at a constant speed, and take twice as long in backward as in forward; gates, plans, dispatch and
      combine take no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COUNT = 4  # bytes of an int32: ranks send each other numbers of rows or tokens


@dataclass(frozen=True)
class Traffic:
    """For each rank, the bytes that it sends to all other ranks in forward and in backward."""

    sent_forward: list[int]
    sent_backward: list[int]


def exchange_bytes(rows: Tensor, dim: int, out: int, width: int, num_experts: int) -> Traffic:
    """Bytes that each rank sends for one layer.

    Forward sends the rows and their number for each expert to the experts' ranks, which send the outputs back.
    Backward sends the gradients of the outputs to the experts' ranks, which send the gradients of the rows back.

    rows (n, n): rows[s, d] is the number of rows from rank s to rank d. dim, out: lengths of a row and of its output.
    width: bytes of an element.
    """
    away = rows.long() * (1 - torch.eye(rows.shape[0], dtype=torch.int64, device=rows.device))
    leave, arrive = away.sum(1), away.sum(0)
    counts = COUNT * (num_experts - num_experts // rows.shape[0])
    forward = width * (leave * dim + arrive * out) + counts
    return Traffic(forward.tolist(), (width * (leave * out + arrive * dim)).tolist())


def norm_bytes(ranks: int, tokens: int, dim: int, num_experts: int, width: int) -> int:
    """Bytes that a rank sends in forward for the experts' norms under `ExpertParallel()`.

    A rank sends to every other rank the number of its tokens, its tokens, and the norms that its experts computed for
    the other rank's tokens. tokens: number on every rank. dim: length of a token. width: bytes of an element.
    """
    return (ranks - 1) * (COUNT + tokens * dim * width + tokens * (num_experts // ranks) * width)


@dataclass(frozen=True)
class Machine:
    """Ranks and their links.

    node: number of ranks in a node. inside, outside: bytes a second of a rank's link within its node and to other
    nodes, in each direction. latency: seconds of an all-to-all without data. flops: FLOP/s of the products on a rank.
    """

    ranks: int
    node: int = 8
    inside: float = 450e9
    outside: float = 50e9
    latency: float = 20e-6
    flops: float = 400e12


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one layer, forward and backward together.

    exchange, experts: seconds of the all-to-alls and of the products. imbalance: rows of the busiest rank / mean.
    """

    exchange: float
    experts: float
    imbalance: float
    sent: int  # the most bytes that a rank sends

    @property
    def total(self) -> float:
        return self.exchange + self.experts


def shares(num_experts: int, skew: float) -> Tensor:
    """(E,): each expert's share of the rows, by Zipf's law with exponent `skew`; exponent 0 is uniform."""
    weights = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -skew
    return weights / weights.sum()


def layer_cost(machine: Machine, tokens: int, dim: int, hidden: int, choices: int, share: Tensor, width: int) -> Cost:
    """The cost of a layer of experts with weights (D, 2 H) and (H, D) and `tokens` tokens on each rank.

    choices: K. share (E,): each expert's share of the rows. width: bytes of an element.
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
