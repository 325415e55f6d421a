"""The tree gate of paper 001 (COMET's): K soft trees over the experts, learned with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_kernels.nn.gates.gate import Gate, GateOutput
from moe_kernels.nn.losses import tree_entropy
from moe_kernels.ops._checks import check_backend, check_choice, check_int, check_number, check_positive
from moe_kernels.ops.tree_gate import PARITIES, tree_gate, tree_route


class TreeGate(Gate):
    """gates = tree_gate(x) over K trees.

    Args:
        dim: P. num_experts: E >= 2. trees: K. gamma: width of the smooth step.
        entropy: coefficient lambda of nn.tree_entropy, which drives the trees to one expert each.
        bias: nodes and leaves have one, as in the authors' TensorFlow code; the paper prints none.
        parity: of tree_gate; tree_route, which has none, weighs a saturated tree's one leaf by 1 all the same.
        route: evaluation goes by tree_route where every tree of the batch is saturated, which waits for a GPU, and by
            the dense gate where one is not, or on the meta device: the same gate either way. Which it is, the host
            decides, and torch.compile breaks its graph there.
        generator: draws the parameters; None is torch's own. backend: of the operations.

    Output: dense, gates (T, E); sparse, one expert a tree, where it was routed. losses: "entropy" in training.
    statistics: "experts_per_sample", the mean number of gates of at least 1e-5; routed also "nodes_visited", the mean
    of a tree. Parameters: split_weight (K, E-1, P) ~ U(-gamma/100, gamma/100), leaf_weight (K, E, P) and leaf_bias
    (K, E) ~ U(-0.05, 0.05), split_bias (K, E-1) = 0. Gradient: to x and the parameters.

    Source: paper 001, section 3, and the published code (initialisation, entropy, statistic).
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        trees: int = 1,
        *,
        gamma: float = 1.0,
        entropy: float = 0.0,
        bias: bool = True,
        parity: str | None = None,
        route: bool = False,
        generator: torch.Generator | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(num_experts, fewest=2, dim=dim)
        trees = check_int("TreeGate", "trees", trees, 1, 2**31 - 1, "trees")
        check_choice("TreeGate", "parity", parity, PARITIES)
        self.gamma = check_positive("TreeGate", "gamma", gamma)
        self.entropy = check_number("TreeGate", "entropy", entropy)
        self.parity, self.route, self.backend = parity, route, check_backend("TreeGate", backend)
        self.split_weight = nn.Parameter(torch.empty(trees, num_experts - 1, dim))
        self.leaf_weight = nn.Parameter(torch.empty(trees, num_experts, dim))
        self.split_bias = nn.Parameter(torch.zeros(trees, num_experts - 1)) if bias else None
        self.leaf_bias = nn.Parameter(torch.empty(trees, num_experts)) if bias else None
        with torch.no_grad():
            self.split_weight.uniform_(-self.gamma / 100, self.gamma / 100, generator=generator)
            for leaf in (self.leaf_weight, self.leaf_bias) if self.leaf_bias is not None else (self.leaf_weight,):
                leaf.uniform_(-0.05, 0.05, generator=generator)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> GateOutput:
        x = x.to(self.split_weight.dtype)
        if self.route and not self.training and not x.is_meta and (routed := self._routed(x)) is not None:
            return routed
        gates, leaf_probs = tree_gate(
            x,
            self.split_weight,
            self.leaf_weight,
            gamma=self.gamma,
            split_bias=self.split_bias,
            leaf_bias=self.leaf_bias,
            parity=self.parity,
            backend=self.backend,
        )
        losses = {"entropy": self.entropy * tree_entropy(leaf_probs)} if self.training and self.entropy else {}
        return GateOutput.of_gates(gates, losses, {"experts_per_sample": gates.detach()})

    def _routed(self, x: Tensor) -> GateOutput | None:
        """What tree_route finds, or None where it is not the dense gate."""
        weights, experts, found = tree_route(  # type: ignore[misc]  # three of them, with statistics
            x,
            self.split_weight,
            self.leaf_weight,
            gamma=self.gamma,
            split_bias=self.split_bias,
            leaf_bias=self.leaf_bias,
            statistics=True,
            backend=self.backend,
        )
        if bool(found.unsaturated.any()):
            return None
        records = {"experts_per_sample": weights.detach(), "nodes_visited": found.visited}
        return GateOutput(weights, experts, self.num_experts, records=records)

    def extra_repr(self) -> str:
        trees, nodes, dim = self.split_weight.shape
        return f"dim={dim}, num_experts={nodes + 1}, trees={trees}, gamma={self.gamma:g}, entropy={self.entropy:g}"
