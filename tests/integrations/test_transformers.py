"""Experts implementation "moe_kernels" against "eager" in small random models of the package transformers."""

from __future__ import annotations

import inspect
import itertools
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from moe_kernels.ops._define import operators
from tests.helpers.layers import Operators

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0}
CONFIGS = {
    "mixtral": {
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
    },
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 8},
    "olmoe": {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},  # square gate_up_proj: 2 * 16 = 32
    "deepseek_v3": {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {"intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "nemotron_h": {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_groups": 1,
        "head_dim": 8,
        "layers_block_type": ["attention", "moe", "attention", "moe"],
        "num_hidden_layers": 4,
    },
}


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Imports transformers, which is slow, at the first test, not at collection."""
    global transformers, moe, mk_transformers
    import transformers
    from transformers.integrations import moe

    from moe_kernels.integrations import transformers as mk_transformers

    mk_transformers.register()


def model_of(kind: str, dtype: torch.dtype = torch.float32, **more: object) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | LAYERS | CONFIGS[kind] | more))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():  # initial weights are small, and initial biases of experts are 0
        for parameter in model.parameters():
            if parameter.dim() != 1:
                parameter.normal_(std=0.2)
    return model


def ids() -> torch.Tensor:
    return torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, implementation: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | None]]:
    model.set_experts_implementation(implementation)
    model.zero_grad()
    out = model(ids(), labels=ids())
    out.loss.backward()
    return out.loss.detach(), out.logits.detach(), {name: each.grad for name, each in model.named_parameters()}


@pytest.fixture
def calls(monkeypatch):
    """Names of the classes that called the experts implementation "counted", which calls moe_kernels."""
    count = []

    def counted(*args):
        count.append(type(args[0]).__name__)
        return mk_transformers.experts_forward(*args)

    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "counted", counted)
    return count


@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_logits_and_gradients_are_those_of_eager(kind, calls):
    model = model_of(kind)
    loss, logits, expected = step(model, "eager")
    ours, our_logits, gradients = step(model, "counted")
    assert calls, "no class called the experts implementation"
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(our_logits, logits, rtol=1e-5, atol=1e-5)
    for name, grad in expected.items():
        found = gradients[name]
        assert (found is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(found, grad, rtol=1e-4, atol=2e-6 * grad.abs().max().item() + 1e-7, msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_bfloat16_is_as_near_to_float32_as_eager(kind):
    exact = model_of(kind)
    narrow = model_of(kind, torch.bfloat16)
    narrow.load_state_dict(exact.state_dict())
    exact.load_state_dict(narrow.state_dict())  # both have the rounded weights
    _, wanted, wanted_grads = step(exact, "eager")
    _, eager, eager_grads = step(narrow, "eager")
    _, ours, our_grads = step(narrow, "moe_kernels")
    far = (eager.float() - wanted).norm()
    assert (ours.float() - wanted).norm() <= 1.5 * far + 1e-3
    for name, grad in wanted_grads.items():
        if grad is None or "experts" not in name:
            continue
        error = (our_grads[name].float() - grad).norm()
        assert error <= 1.5 * (eager_grads[name].float() - grad).norm() + 0.02 * grad.norm() + 1e-4, name


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_autocast_narrows_the_experts_as_eager_does(kind):
    model = model_of(kind)
    _, wanted, _ = step(model, "eager")
    with torch.autocast("cpu", torch.bfloat16):
        _, eager, _ = step(model, "eager")
        _, ours, gradients = step(model, "moe_kernels")
    assert (ours - wanted).norm() <= 1.5 * (eager - wanted).norm() + 1e-3
    assert all(grad is None or grad.dtype == torch.float32 for grad in gradients.values())


def experts_of(kind: str) -> nn.Module:
    return next(each for each in model_of(kind).modules() if hasattr(each, "is_transposed")).requires_grad_(False)


def routing(num_tokens: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(2))
    weights, experts = scores.topk(2, dim=-1)
    return experts, weights


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_hidden_states_and_gate_weights_of_other_dtypes(dtypes):
    hidden_dtype, weight_dtype = dtypes
    experts = experts_of("mixtral").to(torch.bfloat16)
    x = torch.randn(10, 32).to(hidden_dtype)
    chosen, weights = routing(10, 4)
    y = mk_transformers.experts_forward(experts, x, chosen, weights.to(weight_dtype))
    assert y.dtype == hidden_dtype
    exact = mk_transformers.experts_forward(experts.float(), x.bfloat16().float(), chosen, weights.to(weight_dtype))
    torch.testing.assert_close(y.float(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
def test_an_id_of_num_experts_means_no_expert(kind):
    experts = experts_of(kind)
    chosen, weights = routing(10, 4)
    x = torch.randn(10, 32)
    weights.requires_grad_()
    gone = torch.rand(10, 2) < 0.4
    gone[0] = True
    y = mk_transformers.experts_forward(experts, x, chosen.masked_fill(gone, 4), weights)
    expected = mk_transformers.experts_forward(experts, x, chosen, weights.masked_fill(gone, 0.0))
    torch.testing.assert_close(y, expected)
    assert (y[0] == 0).all()
    (grad,) = torch.autograd.grad(y.square().sum(), weights)
    assert (grad[gone] == 0).all()
    assert (grad[~gone] != 0).all()


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_no_tokens(kind):
    chosen, weights = routing(0, 4)
    assert mk_transformers.experts_forward(experts_of(kind), torch.randn(0, 32), chosen, weights).shape == (0, 32)


@pytest.mark.parametrize("tokens", [0, 1, 3, 6000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_gradients_one_operator_gives_the_same_bits(tokens, dtype):
    experts = experts_of("mixtral").to(dtype)
    chosen, weights = routing(tokens, 4)
    chosen, x = chosen.masked_fill(torch.rand(tokens, 2) < 0.2, 4), torch.randn(tokens, 32, dtype=dtype)
    chosen[:1, 1] = 2**32 + 1  # no expert, although its lower 32 bits are 1
    with Operators() as seen, torch.no_grad():
        y = mk_transformers.experts_forward(experts, x, chosen, weights)
    with Operators() as also_seen:
        expected = mk_transformers.experts_forward(experts, x.requires_grad_(), chosen, weights)
    assert seen.names == ["expert_mlp_of_choices"]
    assert also_seen.names == ["make_plan_fwd", "expert_mlp_fwd"]
    assert torch.equal(y, expected)
    with pytest.raises(RuntimeError, match="expert_mlp_of_choices: it has no gradient"):
        operators.expert_mlp_of_choices(
            x.float(), weights, torch.rand(4, 32, 8), torch.rand(4, 8, 32), None, None, chosen, "gelu", "cpu"
        )


@pytest.mark.parametrize("wrong", ["expert", "low", "ids", "rank", "weights", "tokens", "num_experts", "tangent"])
def test_without_gradients_errors_are_those_with_them(wrong):
    experts, x = experts_of("mixtral"), torch.randn(10, 32)
    chosen, weights = routing(10, 4)
    chosen = {"expert": chosen - 2, "low": chosen - 2**32, "ids": chosen.float(), "rank": chosen[0]}.get(wrong, chosen)
    weights = weights[:, :1] if wrong == "weights" else weights
    experts.num_experts = 5 if wrong == "num_experts" else 4
    messages = []
    for differentiated in (False, True):
        given = (x[:9] if wrong == "tokens" else x).detach().requires_grad_(differentiated)
        with forward_ad.dual_level():
            given = forward_ad.make_dual(given, torch.ones_like(given)) if wrong == "tangent" else given
            with pytest.raises((TypeError, ValueError)) as caught:
                mk_transformers.experts_forward(experts, given, chosen, weights)
        # Without gradients one operator plans and computes; it gives its own name instead of make_plan's.
        messages.append((type(caught.value), str(caught.value).replace("expert_mlp_of_choices: ", "make_plan: ")))
    assert messages[0] == messages[1]


def made_experts(transposed: bool, bias: bool, gate: bool, norm: bool, act: nn.Module) -> nn.Module:
    """Experts of transformers with these flags, and with a loop as their own forward."""
    flags = {"has_post_expert_norm": norm} if norm else {}

    @moe.use_experts_implementation(is_transposed=transposed, has_bias=bias, has_gate=gate, **flags)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            wide, self.num_experts, self.act_fn = (20 if gate else 10), 3, act
            up, down = ((3, 8, wide), (3, 10, 8)) if transposed else ((3, wide, 8), (3, 8, 10))
            name = "gate_up_proj" if gate else "up_proj"
            self.register_parameter(name, nn.Parameter(torch.randn(up)))
            self.down_proj = nn.Parameter(torch.randn(down))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(3, wide)))
                self.down_proj_bias = nn.Parameter(torch.randn(3, 8))
            if norm:
                self.post_expert_norm = nn.RMSNorm(8)

        def forward(self, x, chosen, weights):
            out = torch.zeros_like(x)
            first = self.gate_up_proj if gate else self.up_proj
            for t, k in ((t, k) for t in range(len(x)) for k in range(chosen.shape[1])):
                e = chosen[t, k]
                pre = x[t] @ (first[e] if transposed else first[e].t())
                if bias:
                    pre = pre + (self.gate_up_proj_bias if gate else self.up_proj_bias)[e]
                hidden = self._apply_gate(pre) if gate else self.act_fn(pre)
                row = hidden @ (self.down_proj[e] if transposed else self.down_proj[e].t())
                if bias:
                    row = row + self.down_proj_bias[e]
                out[t] += weights[t, k] * (self.post_expert_norm(row) if norm else row)
            return out

    return Experts(transformers.MixtralConfig(experts_implementation="eager"))


def test_every_flag_of_the_decorator():
    norms = "has_post_expert_norm" in inspect.signature(moe.use_experts_implementation).parameters
    torch.manual_seed(0)
    chosen, weights = routing(7, 3)
    for flags in itertools.product(*[(False, True)] * 3, (False, True) if norms else (False,)):
        experts, x = made_experts(*flags, nn.SiLU()), torch.randn(7, 8, requires_grad=True)
        leaves = [x, *experts.parameters()]
        experts.config._experts_implementation = "eager"
        want = experts(x, chosen, weights)
        experts.config._experts_implementation = "moe_kernels"
        got = experts(x, chosen, weights)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=str(flags))
        for a, b in zip(
            torch.autograd.grad(got.square().sum(), leaves),
            torch.autograd.grad(want.square().sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=str(flags))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("act", ["relu", "silu", "gelu", "gelu_new", "tanh"])
def test_every_activation_is_that_of_the_module(act, gate):
    """With and without the fused kernel, on arguments from about -9 to 9."""
    from transformers.activations import ACT2FN

    torch.manual_seed(0)
    experts = made_experts(False, False, gate, False, ACT2FN[act]).requires_grad_(False)
    (chosen, weights), x = routing(7, 3), torch.randn(7, 8)
    want = experts(x, chosen, weights)
    experts.config._experts_implementation = "moe_kernels"
    with Operators() as seen:
        torch.testing.assert_close(experts(x, chosen, weights), want, rtol=1e-4, atol=1e-4)
    fused = act in (("silu", "gelu") if gate else ("relu", "silu", "gelu", "tanh"))
    assert ("expert_mlp_of_choices" in seen.names) == fused


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
def test_experts_without_the_flag_of_a_norm_have_no_norm(kind):
    experts, x = experts_of(kind), torch.randn(10, 32)
    chosen, weights = routing(10, 4)
    experts.config._experts_implementation = "eager"
    expected = experts(x, chosen, weights)
    vars(experts).pop("has_post_expert_norm", None)  # transformers 5.17 has no such flag
    with Operators() as seen:
        found = mk_transformers.experts_forward(experts, x, chosen, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ("expert_mlp_of_choices" in seen.names) == (kind == "mixtral")


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
def test_a_whole_model_compiles_without_a_break(kind):
    model = model_of(kind, num_hidden_layers=CONFIGS[kind].get("num_hidden_layers", 1)).eval()
    model.set_experts_implementation("moe_kernels")
    expected = model(ids()).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids()).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_generation_gives_the_tokens_of_eager(kind):
    model = model_of(kind, output_router_logits=False).eval()  # transformers 5.17 cannot generate with them
    options = {"max_new_tokens": 6, "do_sample": False}
    model.set_experts_implementation("eager")
    expected = model.generate(ids(), **options)
    model.set_experts_implementation("moe_kernels")
    assert torch.equal(model.generate(ids(), **options), expected)


def test_unsupported_experts_are_errors_with_their_name():
    experts = experts_of("mixtral")
    chosen, weights = routing(10, 4)
    x = torch.randn(10, 32)
    quantized = experts.to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"MixtralExperts: gate_up_proj has dtype torch\.float8_e4m3fn"):
        mk_transformers.experts_forward(quantized, x, chosen, weights)
    del experts.gate_up_proj
    with pytest.raises(TypeError, match="MixtralExperts: expected a tensor gate_up_proj, found NoneType"):
        mk_transformers.experts_forward(experts, x, chosen, weights)


def test_the_gate_of_gpt_oss_is_recognised_by_its_values():
    assert mk_transformers._is_clamped(type(experts_of("gpt_oss")))

    class Other:
        def _apply_gate(self, pre):
            return pre[..., ::2].clamp(max=self.limit) * pre[..., 1::2]

    class ClampedAboveAlone:
        def _apply_gate(self, pre):
            gate, up = pre[..., ::2].clamp(max=self.limit), pre[..., 1::2].clamp(max=self.limit)
            return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    class Own(type(experts_of("gpt_oss"))):
        _apply_gate = Other._apply_gate

    class Same(type(experts_of("gpt_oss"))):
        pass

    assert mk_transformers._is_clamped(Same)
    for kind in (Other, ClampedAboveAlone, Own):
        assert not mk_transformers._is_clamped(kind)
    assert not mk_transformers._is_clamped(type(experts_of("deepseek_v3")))


def test_an_old_version_is_an_error_that_names_both_versions(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.5.4")
    with pytest.raises(ImportError, match=r"needs transformers 5\.8\.1 or later, found 5\.5\.4: pip install"):
        runpy.run_path(mk_transformers.__file__)
    bound = re.search(r'"transformers>=([\d.]+)"', Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    assert bound.group(1) == "5.8.1"


def test_registering_a_used_name_is_an_error():
    mk_transformers.register()  # registering again has no effect
    assert moe.ALL_EXPERTS_FUNCTIONS["moe_kernels"] is mk_transformers.experts_forward
    for name in ("grouped_mm", "eager"):
        with pytest.raises(ValueError, match=f"another experts implementation called '{name}'"):
            mk_transformers.register(name)


@pytest.mark.parametrize("policy", ["keeps all", "batch priority"])
def test_a_router_of_a_gate_and_a_policy_routes_as_the_layer_of_experts_does(policy):
    from moe_kernels.nn import ExpertMLP, MoE, TopKGate
    from moe_kernels.nn.policies import TokenChoice

    chosen = TokenChoice() if policy == "keeps all" else TokenChoice(0.5, priority="max")
    experts, gate = experts_of("mixtral"), TopKGate(32, 4, 2)
    layer = MoE(gate, ExpertMLP(4, 32, 48, activation="swiglu", bias=False), chosen)
    with torch.no_grad():
        layer.experts.w_in.copy_(experts.gate_up_proj.mT)
        layer.experts.w_out.copy_(experts.down_proj.mT)
    x = torch.randn(2, 10, 32)
    router = mk_transformers.Router(gate, chosen)
    logits, weights, index = router(x)
    y = mk_transformers.experts_forward(experts, x.flatten(0, 1), index, weights)
    torch.testing.assert_close(y.view_as(x), layer(x).y)
    torch.testing.assert_close(logits.softmax(-1), gate(x.flatten(0, 1)).gates)
    assert ((index == 4).any()) == (policy == "batch priority")


def test_a_router_drops_and_adds_losses_in_training_alone():
    from moe_kernels.nn import TopKGate
    from moe_kernels.nn.policies import TokenChoice

    x = torch.randn(12, 32)
    router = mk_transformers.Router(TopKGate(32, 4, 2, balance=0.1), TokenChoice(0.5, factor_eval=None))
    for training in (True, False, True):
        _, weights, index = router.train(training)(x)
        plan, expected = TokenChoice(0.5 if training else None)(router.gate(x), training)
        assert torch.equal(index == 4, plan.slot_row < 0)
        assert torch.equal(weights, expected)
        assert bool((index == 4).any()) == bool(router.loss > 0) == training
    one_expert = torch.ones(12, 32)  # by default nothing is dropped
    assert (mk_transformers.Router(router.gate)(one_expert)[2] < 4).all()


@pytest.mark.parametrize("implementation", ["eager", "moe_kernels"])
def test_a_model_with_tree_gates_for_routers_trains(implementation):
    from moe_kernels.nn import TreeGate
    from moe_kernels.nn.policies import NonzeroWeights

    model = model_of("mixtral", output_router_logits=False)
    model.set_experts_implementation(implementation)
    routers = []
    for layer in model.model.layers:
        layer.mlp.gate = mk_transformers.Router(TreeGate(32, 4, trees=2, gamma=4.0, entropy=0.01), NonzeroWeights())
        routers.append(layer.mlp.gate)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(ids(), labels=ids()).loss
        assert all(router.loss.requires_grad for router in routers)
        (loss + sum(router.loss for router in routers)).backward()
        assert all(router.gate.split_weight.grad.abs().sum() > 0 for router in routers)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_gates_of_zero_leave_the_gradient_of_router_logits_finite():
    from moe_kernels.nn import TopKGate

    router = mk_transformers.Router(TopKGate(32, 4, 2))
    logits, _, _ = router(torch.randn(10, 32))
    assert ((logits.softmax(-1) < 1e-30).sum(-1) == 2).all()
    logits.square().sum().backward()
    assert all(each.grad.isfinite().all() for each in router.parameters())


def test_the_block_of_a_router_compiles_alone():
    from moe_kernels.nn import TopKGate

    model = model_of("mixtral", output_router_logits=False, num_hidden_layers=1).eval()
    model.set_experts_implementation("moe_kernels")
    block = model.model.layers[0].mlp
    block.gate = mk_transformers.Router(TopKGate(32, 4, 2))
    expected = model(ids()).logits
    block.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-4, atol=1e-4)


def test_experts_that_do_not_run_fused_read_gate_weights_in_float32():
    experts, third = experts_of("nemotron_h").to(torch.bfloat16), torch.tensor(1 / 3)
    weights = torch.stack([third, -third.bfloat16().float()]).expand(10, 2)  # in bfloat16 the two would cancel
    with Operators() as seen:
        y = mk_transformers.experts_forward(experts, torch.randn(10, 32), torch.ones(10, 2, dtype=torch.int64), weights)
    assert "combine_fwd" in seen.names
    assert (y != 0).any()


def test_a_trace_without_gradients_can_be_differentiated_later():
    experts = experts_of("mixtral")
    x, index = torch.randn(5, 32), torch.randint(0, 4, (5, 2))
    weights = torch.rand(5, 2)

    def call(x):
        return mk_transformers.experts_forward(experts, x, index, weights)

    with torch.no_grad():
        traced = torch.jit.trace(call, x)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    traced(found).sum().backward()
    call(expected).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
