"""Routers made of those of transformers (Router.of), and the loss of a Router alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_kernels.nn import TopKGate

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
SIZES |= {
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 0,
}
GROUPED = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
FEW = {"num_experts": 4, "num_experts_per_tok": 2}
# Kind of model, and words that tell two of a kind apart -> sizes.
ROUTERS = {
    "deepseek_v3": GROUPED,
    "deepseek_v3, weights as they are": GROUPED | {"norm_topk_prob": False},
    "glm4_moe": GROUPED | {"n_group": 1, "topk_group": 1},
    "qwen3_moe": FEW | {"head_dim": 8, "norm_topk_prob": True},
    "olmoe": FEW | {"norm_topk_prob": False},
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Imports transformers, which is slow, at the first test, not at collection."""
    global transformers, mk_transformers
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from moe_kernels.integrations import transformers as mk_transformers


def own_router(kind: str) -> nn.Module:
    """The router of a small random model."""
    config = transformers.AutoConfig.for_model(kind.partition(",")[0], **(SIZES | ROUTERS[kind]))
    return transformers.AutoModel.from_config(config).layers[0].mlp.gate


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_router_made_of_transformers_own_chooses_and_weighs_as_it(kind):
    own = own_router(kind)
    torch.manual_seed(1)
    torch.nn.init.normal_(own.weight)
    if hasattr(own, "e_score_correction_bias"):
        own.e_score_correction_bias.normal_()
        own.routed_scaling_factor = 2.5
    made, x = mk_transformers.Router.of(own), torch.randn(50, 32)
    _, weights, index = made(x)
    _, expected, chosen = own(x)
    order, expected_order = index.argsort(1), chosen.argsort(1)
    assert torch.equal(index.gather(1, order), chosen.gather(1, expected_order))
    torch.testing.assert_close(weights.gather(1, order), expected.gather(1, expected_order))


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_moe"])
def test_options_come_before_what_a_router_of_transformers_says(kind):
    own = own_router(kind)
    given = {"scale": 7.0, "balance_rate": 0.25} if kind == "deepseek_v3" else {"order": "softmax_topk"}
    made, plain = mk_transformers.Router.of(own, **given).gate, mk_transformers.Router.of(own).gate
    assert {each: getattr(made, each) for each in given} == given
    assert all(getattr(plain, each) != value for each, value in given.items())


def test_a_router_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"Router.of: expected a router of transformers .* got Linear"):
        mk_transformers.Router.of(nn.Linear(4, 4))


def test_the_loss_of_a_forward_without_gradients_is_that_forward_s_alone():
    router, x = mk_transformers.Router(TopKGate(32, 4, 2, balance=0.1)), torch.randn(10, 32)
    with torch.no_grad():
        router(x)
        assert router.loss > 0
    with pytest.raises(RuntimeError, match="the last forward ran with gradients disabled"):
        router.loss  # noqa: B018
    _, weights, _ = router(x)
    (router.loss + weights.sum()).backward()
    assert router.gate.linear.weight.grad.any()
