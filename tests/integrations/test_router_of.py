"""Routers made of those of transformers (Router.of), and a Router alone: its loss and its part of a mask."""

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


class Alone(nn.Module):
    """A model that is a Router, called as models of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = mk_transformers.Router(TopKGate(32, 4, 2))

    def forward(self, x, attention_mask=None):
        return self.router(x)


@pytest.mark.parametrize("columns", [9, 12])
def test_the_last_columns_of_a_mask_are_of_the_tokens_of_the_forward(columns):
    """Earlier columns are of tokens in a cache."""
    model, x = mk_transformers.use_attention_mask(Alone()), torch.randn(3, 9, 32)
    mask = torch.arange(3 * columns).view(3, columns) % 4 > 0
    _, weights, index = model(x, attention_mask=mask)
    _, expected, chosen = model.router(x, mask[:, -9:])
    assert torch.equal(index, chosen)
    assert torch.equal(weights, expected)
    assert torch.equal((index < 4).all(1), mask[:, -9:].flatten())


@pytest.mark.parametrize("shape", [(3, 8), (2, 14), (0, 9)], ids=str)
def test_a_mask_that_does_not_fit_the_tokens_is_refused(shape):
    model = mk_transformers.use_attention_mask(Alone())
    message = (
        rf"^Router: attention_mask must have a row for each sample and a column for each token, the last ones of this "
        rf"forward; got \({shape[0]}, {shape[1]}\) for 27 tokens$"
    )
    with pytest.raises(ValueError, match=message):
        model(torch.randn(3, 9, 32), attention_mask=torch.ones(shape))


def test_asking_for_masks_again_changes_nothing():
    model = Alone()
    for _ in range(2):
        assert mk_transformers.use_attention_mask(model) is model
        assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == (1, 1)


def test_a_router_records_nothing_where_transformers_collects_nothing(monkeypatch):
    router, x = mk_transformers.Router(TopKGate(32, 4, 2)), torch.randn(10, 32)
    expected = router(x)
    monkeypatch.setattr("moe_kernels.integrations._router._active_collector", None)
    assert all(torch.equal(one, two) for one, two in zip(router(x), expected, strict=True))
