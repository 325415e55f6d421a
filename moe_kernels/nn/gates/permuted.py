"""A gate with a learned permutation of its experts: the "+" of COMET+ and Hash-r+ (COMET trees) for a single gate."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.nn._mask import call_with_mask
from moe_kernels.nn.gates.gate import Gate, GateOutput
from moe_kernels.nn.local_search import LocalSearch
from moe_kernels.ops._checks import check_module


class PermutedGate(Gate):
    """The gates (T, E) of `gate`, permuted by `search`. If tasks share experts, pass `search` to MultiGateMoE instead.

    Output: dense. In training, while the search learns a soft permutation, any expert may have a nonzero weight. Later,
    and in evaluation, a token has as many nonzero weights as `gate` gave it; with the policy NonzeroWeights only these
    experts run.
    losses: those of `gate` and, in training, "permutation". A forward in training is a step of `search`.
    router_probs: those of `gate`, permuted as its gates are; in stage one of training with the S of the last step.

    Example:
        >>> gate = PermutedGate(TreeGate(16, 4), LocalSearch(4, steps=100))
        >>> out = gate(torch.randn(8, 16))
        >>> out.gates.shape, list(out.losses)
        (torch.Size([8, 4]), ['permutation'])
    """

    def __init__(self, gate: Gate, search: LocalSearch) -> None:
        check_module("PermutedGate", "gate", gate, Gate)
        check_module("PermutedGate", "search", search, LocalSearch)
        super().__init__(gate.num_experts)
        if search.source.shape != (1, gate.num_experts):
            count, experts = search.source.shape
            raise ValueError(
                f"PermutedGate: expected a search of one permutation of {gate.num_experts} experts, got {count} of "
                f"{experts}"
            )
        self.gate, self.search = gate, search

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        output = call_with_mask("PermutedGate", self.gate, x, ids, mask=mask)
        gates, regulariser = self.search(output.gates)  # a call of the module, so that its hooks run
        losses = {"permutation": regulariser} if self.training else {}
        return GateOutput.of_gates(gates, output.losses | losses, output.records, mask)

    @torch.no_grad()
    def router_probs(self, x: Tensor, ids: Tensor | None = None) -> Tensor | None:
        probs = self.gate.router_probs(x, ids)
        if probs is None or probs.shape[1] != self.num_experts:  # those of EnsembleGate are for a member's experts
            return probs
        search = self.search
        in_stage_one = search.training and not search.hardened  # permutation() would be a step
        return search.permute(probs, search.soft if in_stage_one else search.permutation())
