"""The gate of COMET trees: K soft trees over the experts, which train together with the experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moe_kernels.backends import is_batch_invariant
from moe_kernels.nn._mask import real_rows
from moe_kernels.nn._parameters import empty_parameter, router_dtype, uniform_
from moe_kernels.nn.gates.gate import Gate, GateOutput, masked_records, real_choices
from moe_kernels.nn.losses import tree_entropy
from moe_kernels.ops._checks import check_backend, check_choice, check_int, check_number, check_positive
from moe_kernels.ops.tree_gate import PARITIES, tree_gate, tree_route


class TreeGate(Gate):
    """gates = tree_gate(x), with K soft trees.

    Args:
        dim, num_experts, trees: P, E >= 2, K.
        gamma: width of the smooth step.
        entropy: coefficient lambda of nn.tree_entropy, which drives each tree to a single expert a token.
        bias: whether nodes and leaves have biases, as in the authors' TensorFlow code; the paper prints none.
        parity: as in tree_gate.
        route: whether evaluation uses tree_route if every tree is saturated for every token. Its results equal those
            of tree_gate within rounding but have no gradient. The check makes the host wait for a GPU. On the meta
            device, in torch.compile and in torch.export tree_gate runs in any case.
        generator: draws the parameters; None is torch's own generator.
        backend: as in tree_gate.

    Output: dense, gates (T, E); after tree_route sparse, at most one expert a tree. losses: "entropy" in training, if
    its coefficient is not 0. statistics: "experts_per_sample", the mean over tokens of the number of gates of at least
    1e-5; after tree_route also "nodes_visited", the mean number of nodes visited in a tree. Parameters: split_weight
    (K, E-1, P) ~ U(-gamma/100, gamma/100), leaf_weight (K, E, P) and leaf_bias (K, E) ~ U(-0.05, 0.05), split_bias
    (K, E-1) = 0. Gradient: to x and the parameters.

    Source: COMET trees, section 3, and the published code (initialisation, entropy, statistic).

    Example:
        >>> gate = TreeGate(16, 8, trees=2, entropy=0.1)
        >>> out = gate(torch.randn(32, 16))
        >>> out.gates.shape, list(out.losses), gate.split_weight.shape
        (torch.Size([32, 8]), ['entropy'], torch.Size([2, 7, 16]))
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = router_dtype(dtype)
        super().__init__(num_experts, fewest=2, dim=dim)
        trees = check_int("TreeGate", "trees", trees, 1, 2**31 - 1, "trees")
        check_choice("TreeGate", "parity", parity, PARITIES)
        self.gamma = check_positive("TreeGate", "gamma", gamma)
        self.entropy = check_number("TreeGate", "entropy", entropy)
        self.parity, self.route, self.backend = parity, route, check_backend("TreeGate", backend)
        self.split_weight = empty_parameter(trees, num_experts - 1, dim, device=device, dtype=dtype)
        self.leaf_weight = empty_parameter(trees, num_experts, dim, device=device, dtype=dtype)
        self.split_bias = empty_parameter(trees, num_experts - 1, device=device, dtype=dtype) if bias else None
        self.leaf_bias = empty_parameter(trees, num_experts, device=device, dtype=dtype) if bias else None
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        uniform_(self.split_weight, self.gamma / 100, generator)
        if self.split_bias is not None:
            torch.nn.init.zeros_(self.split_bias)
        uniform_(self.leaf_weight, 0.05, generator)
        uniform_(self.leaf_bias, 0.05, generator)

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        x, ids = self.real(x, ids, mask)
        x = x.to(self.split_weight.dtype)
        has_values = not x.is_meta and not is_compiling()
        # tree_route runs if all tokens allow it: in the mode batch_invariant the others must not decide.
        may_route = self.route and not self.training and has_values and not is_batch_invariant()
        if may_route and (routed := self._routed(x, mask)) is not None:
            return routed
        gates, leaf_probs = self._dense(x)
        losses = (
            {"entropy": self.entropy * tree_entropy(leaf_probs, mask=mask)} if self.training and self.entropy else {}
        )
        return GateOutput.of_gates(gates, losses, {"experts_per_sample": gates.detach()}, mask)

    @torch.no_grad()
    def router_probs(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        return self._dense(x.to(self.split_weight.dtype))[0]

    def _arguments(self) -> dict[str, Any]:
        """The arguments that tree_gate and tree_route share."""
        names = ("split_weight", "leaf_weight", "gamma", "split_bias", "leaf_bias", "backend")
        return {name: getattr(self, name) for name in names}

    def _dense(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return tree_gate(x, **self._arguments(), parity=self.parity)

    def _routed(self, x: Tensor, mask: Tensor | None) -> GateOutput | None:
        """The output of tree_route; None if any tree is unsaturated for any token."""
        # mypy: tree_route may return two values, but with statistics=True it returns three.
        weights, experts, found = tree_route(x, **self._arguments(), statistics=True)  # type: ignore[misc]
        if bool(real_rows(found.unsaturated, mask).any()):
            return None
        records = masked_records({"experts_per_sample": weights.detach(), "nodes_visited": found.visited}, mask)
        return GateOutput(*real_choices(weights, experts, mask), self.num_experts, records=records)

    def extra_repr(self) -> str:
        trees, nodes, dim = self.split_weight.shape
        return f"dim={dim}, num_experts={nodes + 1}, trees={trees}, gamma={self.gamma:g}, entropy={self.entropy:g}"
