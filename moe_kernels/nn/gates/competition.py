"""CompeteSMoE's gate: in some training steps experts compete, and the router learns to predict winners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.nn._compile import on_the_host
from moe_kernels.nn._distributed import attach_unused
from moe_kernels.nn._invariance import refuse_random
from moe_kernels.nn._mask import call_with_mask
from moe_kernels.nn._recompute import Remembered, is_recomputing
from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.gates.gate import Gate, GateOutput, masked_records, real_choices
from moe_kernels.nn.gates.topk import TopKGate
from moe_kernels.nn.losses import competition_loss
from moe_kernels.ops._checks import check_number
from moe_kernels.ops.topk_gate import topk_gate


class CompetitionGate(Gate):
    """k experts a token, chosen by a router or, on a competition step, by the l2 norms of all experts' outputs.

        s_C,i = ||expert_i(x)||     s_R = router logits without noise
        competition step: weights, experts = topk_gate(s_C, k), loss alpha * MSE(softmax(TopK(s_R)), softmax(TopK(s_C)))
        any other step, and evaluation: the output of the router

    Args:
        router: a TopKGate.
        experts: the ExpertMLP of the same layer; not a submodule of this gate, since the layer owns it.
        rate: lambda, the probability of a competition step in training: a number, or a function of the step, which
            counts from 0. Every gate draws for itself.
        alpha: coefficient of the router's loss, as in the published code; eq. 5 multiplies the task's loss instead.
        through_norms: True: the output's gradient reaches the experts through their outputs and through the gate
            weights, a softmax of the norms, as in the published code. False: through the outputs alone. The target of
            the router's loss is a constant in both cases.
        coin: a CPU generator that draws whether a step is a competition; None is torch's own generator. The draw is on
            the host and waits for no device; in training torch.compile breaks its graph there.

    Cost of a competition step: forward that of all experts for all tokens, for the norms; backward twice that of the k
    winners, through their outputs and through their norms (see expert_norms: winners).

    Autocast: norms are computed in autocast's dtype, then converted to the dtype of the experts' parameters. The router
    computes in the dtype of its own parameters.

    losses: "router" on competition steps, those of the router on other training steps. statistics: "competed" (), 0 or
    1, and on competition steps "agreement" (), the share of the k winners that the router also chooses.

    State: `steps` counts training calls, except those that a checkpoint repeats in the backward pass. State dicts hold
    it. A repeated forward competes if the forward that it repeats did; RuntimeError if torch's checkpoint does not say
    which one that is and several forwards ran before the backward.

    Source: CompeteSMoE, sections 3.1 to 3.3, eqs. 3 to 5.

    Example:
        >>> experts = ExpertMLP(4, 16, 32)
        >>> layer = MoE(CompetitionGate(TopKGate(16, 4, 2), experts, rate=1.0), experts)
        >>> out = layer(torch.randn(8, 16))
        >>> list(out.losses), out.statistics["competed"]
        (['router'], tensor(1.))
    """

    def __init__(
        self,
        router: TopKGate,
        experts: ExpertMLP,
        *,
        rate: float | Callable[[int], float] = 0.05,
        alpha: float = 1.0,
        through_norms: bool = True,
        coin: torch.Generator | None = None,
    ) -> None:
        if not isinstance(router, TopKGate) or not isinstance(experts, ExpertMLP):
            got = f"{type(router).__name__} and {type(experts).__name__}"
            raise TypeError(f"CompetitionGate: expected router to be a TopKGate and experts an ExpertMLP, got {got}")
        super().__init__(router.num_experts)
        if experts.num_experts != router.num_experts:
            count = experts.num_experts
            got = router.num_experts
            raise ValueError(f"CompetitionGate: router must have as many experts as `experts`, {count}; got {got}")
        self.rate = rate if callable(rate) else check_number("CompetitionGate", "rate", rate, 0, 1, "a chance")
        self.router, self.alpha = router, check_number("CompetitionGate", "alpha", alpha)
        self.through_norms, self.coin = through_norms, coin
        self._experts = (experts,)  # a tuple, so that the experts are no submodule
        self.steps, self._draws = 0, Remembered()

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        if self.training:
            refuse_random("CompetitionGate", "training")
        if self.training and self._draw_competition():
            return self._compete(self.real(x, None, mask)[0], mask)
        routed = call_with_mask("CompetitionGate", self.router, x, ids, mask=mask)
        return replace(routed, records=routed.records | {"competed": x.new_zeros(())})

    def _logits(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.router._logits(x, ids)

    @on_the_host("CompetitionGate: the host draws whether experts compete")
    def _draw_competition(self) -> bool:
        """Draws whether this step is a competition, and counts the step."""
        if is_recomputing() and self.coin is None:
            torch.rand((), device="cpu")  # so that later draws of the repeated forward are those of the first one
        return self._draws.take("CompetitionGate", self._next_draw)

    def _next_draw(self) -> bool:
        rate = self.rate(self.steps) if callable(self.rate) else self.rate
        self.steps += 1
        return torch.rand((), generator=self.coin, device="cpu").item() < rate

    def _compete(self, x: Tensor, mask: Tensor | None) -> GateOutput:
        (experts,) = self._experts
        k = self.router.k
        # Only the weights of k winners depend on norms, so only these have a gradient.
        norms = experts(x, None, None, part="norms", winners=k)
        weights, winners = topk_gate(norms if self.through_norms else norms.detach(), k, backend=self.router.backend)
        # The router's input is a constant here, since the loss trains only the router (eqs. 4 and 5).
        logits = self._logits(x.detach())
        router_weights, chosen = topk_gate(logits, k, backend=self.router.backend)
        loss = competition_loss((router_weights, chosen), (weights, winners), self.num_experts, mask)
        weights = attach_unused(weights, self.router.parameters())
        agreement = (chosen[:, :, None] == winners[:, None, :]).any(-1)
        records = masked_records({"competed": x.new_ones(()), "agreement": agreement}, mask)
        weights, winners = real_choices(weights, winners, mask)
        return GateOutput(weights, winners, self.num_experts, False, {"router": self.alpha * loss}, records)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, alpha={self.alpha:g}, through_norms={self.through_norms}"

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.steps, device="cpu")

    def set_extra_state(self, state: Tensor | int) -> None:
        self.steps = int(state)
