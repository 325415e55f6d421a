"""Which experts of transformers' models one expert_mlp computes, and the logits that a Router records."""

from __future__ import annotations

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")
from transformers.activations import GELUActivation
from transformers.integrations.moe import _default_apply_gate

from moe_kernels.integrations import transformers as mk_transformers
from moe_kernels.nn import TopKGate


class Gated:
    """Experts whose gate, activation and flags a test sets."""

    _apply_gate = _default_apply_gate

    def __init__(self, **given: object) -> None:
        self.__dict__.update({"has_gate": True, "is_concatenated": True, "act_fn": nn.SiLU()} | given)


class Clamped(Gated):
    """As in gpt_oss."""

    def _apply_gate(self, pre: torch.Tensor) -> torch.Tensor:
        gate, up = pre[..., ::2].clamp(max=self.limit), pre[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class Other(Gated):
    def _apply_gate(self, pre: torch.Tensor) -> torch.Tensor:
        return pre[..., ::2] * pre[..., 1::2]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Gated(), {"activation": "swiglu"}),
        (Gated(act_fn=GELUActivation()), {"activation": "geglu"}),
        (Gated(act_fn=nn.ReLU()), None),
        (Gated(act_fn=nn.Mish()), None),
        (Gated(is_concatenated=False), None),
        (Gated(has_post_expert_norm=True), None),
        (Gated(has_gate=False), {"activation": "silu"}),
        (Gated(has_gate=False, act_fn=nn.ReLU(), is_concatenated=False), {"activation": "relu"}),
        (Gated(has_gate=False, act_fn=nn.Mish()), None),
        (
            Clamped(alpha=1.25, limit=7.0, is_concatenated=False),
            {"activation": "swiglu_clamped", "alpha": 1.25, "limit": 7.0},
        ),
        (Clamped(alpha=1.25, limit=7.0), None),
        (Clamped(alpha=1.25, limit=7.0, has_gate=False), {"activation": "silu"}),
        (Other(is_concatenated=False), None),
        (Other(), None),
    ],
)
def test_activations_that_expert_mlp_has_are_fused(module: Gated, expected: dict[str, object] | None) -> None:
    assert mk_transformers._fused_activation(module) == expected


def test_a_router_records_the_logits_of_a_gate_that_has_them_for_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else, as for a gate whose logits are of another shape, the logarithms of the gates."""
    from moe_kernels.integrations import _router

    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(_router, "_recorded", lambda: recorded)
    x = torch.randn(5, 8)
    router = mk_transformers.Router(TopKGate(8, 4, 2))
    logits, _, _ = router(x)
    assert len(recorded) == 1
    assert torch.equal(recorded[0], router.gate._logits(x))
    assert not torch.equal(recorded[0], logits)
    of_experts = recorded[0]
    for other in (torch.zeros(5, 3), None):
        answers = iter([of_experts, other])  # for the choice, then for the record
        monkeypatch.setattr(router.gate, "_logits", lambda *given, answers=answers, **named: next(answers))
        logits, _, _ = router(x)
        assert torch.equal(recorded[-1], logits)
    assert len(recorded) == 3
