"""CompeteSMoE's gate: in some training steps experts compete, and the router learns to predict winners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.nn._compile import on_the_host
from moe_kernels.nn._distributed import attach_unused
from moe_kernels.nn._invariance import refuse_random
from moe_kernels.nn._recompute import is_recomputing
from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.gates.gate import Gate, GateOutput
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

    Autocast: norms are computed in autocast's dtype, then converted to the dtype of the experts' parameters. The router
    computes in the dtype of its own parameters.

    losses: "router" on competition steps, those of the router on other training steps. statistics: "competed" (), 0 or
    1, and on competition steps "agreement" (), the share of the k winners that the router also chooses.

    State: `steps` counts training calls, except those that a checkpoint repeats in the backward pass. State dicts hold
    it. For a repeated forward, the draw of `coin` and a `rate` that is a function are those of the last step; so each
    backward must precede the next forward.

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
        self.steps, self._competed = 0, False

    def forward(self, x: Tensor, ids: Tensor | None = None) -> GateOutput:
        if self.training:
            refuse_random("CompetitionGate", "training")
        if self.training and self._draw_competition():
            return self._compete(x)
        routed = self.router(x, ids)
        return replace(routed, records=routed.records | {"competed": x.new_zeros(())})

    def _logits(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.router._logits(x, ids)

    @on_the_host("CompetitionGate: the host draws whether experts compete")
    def _draw_competition(self) -> bool:
        """Draws whether this step is a competition, and counts the step."""
        repeated = is_recomputing()  # if so, the checkpoint has restored torch's own generator, but not `coin`
        if repeated and self.coin is not None:
            return self._competed
        step = self.steps - repeated
        rate = self.rate(step) if callable(self.rate) else self.rate
        self._competed = torch.rand((), generator=self.coin, device="cpu").item() < rate
        self.steps = step + 1
        return self._competed

    def _compete(self, x: Tensor) -> GateOutput:
        (experts,) = self._experts
        k = self.router.k
        norms = experts(x, None, None, part="norms")
        weights, winners = topk_gate(norms if self.through_norms else norms.detach(), k, backend=self.router.backend)
        # The router's input is a constant here, since the loss trains only the router (eqs. 4 and 5).
        logits = self._logits(x.detach())
        router_weights, chosen = topk_gate(logits, k, backend=self.router.backend)
        loss = competition_loss((router_weights, chosen), (weights, winners), self.num_experts)
        weights = attach_unused(weights, self.router.parameters())
        agreement = (chosen[:, :, None] == winners[:, None, :]).any(-1)
        records = {"competed": x.new_ones(()), "agreement": agreement}
        return GateOutput(weights, winners, self.num_experts, False, {"router": self.alpha * loss}, records)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, alpha={self.alpha:g}, through_norms={self.through_norms}"

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = int(state)
