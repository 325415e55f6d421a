"""Routers in models of transformers: padding, losses, copies, recomputation and saved models."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

from moe_kernels.nn import ExpertChoice, StableGate, TokenChoice, TopKGate, TreeGate
from moe_kernels.nn.policies import NonzeroWeights

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0}
QWEN = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
MIXTRAL = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
REAL = (5, 9, 7)  # tokens of the samples
LONGEST = 9


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Imports transformers, which is slow, at the first test, not at collection."""
    global transformers, mk_transformers
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from moe_kernels.integrations import transformers as mk_transformers

    mk_transformers.register()


def gate(**options) -> TopKGate:
    return TopKGate(32, 4, 2, **({"balance": 1.0, "z": 0.1, "importance": 0.1} | options))


def model_of(kind: str = "qwen3_moe", make=gate, policy=None, layers: int = 2, masked: bool = True) -> nn.Module:
    torch.manual_seed(0)
    more = {"qwen3_moe": QWEN, "mixtral": MIXTRAL}[kind]
    config = transformers.AutoConfig.for_model(kind, **(SIZES | LAYERS | more | {"num_hidden_layers": layers}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for layer in model.model.layers:
        layer.mlp.gate = mk_transformers.Router(make(), policy)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() != 1:
                parameter.normal_(std=0.2)
    model.set_experts_implementation("moe_kernels")
    return mk_transformers.use_attention_mask(model) if masked else model


def routers(model: nn.Module) -> list:
    return [each for each in model.modules() if isinstance(each, mk_transformers.Router)]


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, attention mask and positions (B, S) of samples of different lengths."""
    tokens = torch.randint(1, 64, (len(REAL), LONGEST), generator=torch.Generator().manual_seed(2))
    place, length = torch.arange(LONGEST).expand(len(REAL), -1), torch.tensor(REAL)[:, None]
    mask = place >= LONGEST - length if side == "left" else place < length
    return torch.where(mask, tokens, 0), mask.long(), (mask.cumsum(1) - 1).clamp(min=0)


class Packed(nn.Module):
    """A Router that is called with the real tokens alone, and scatters the results: what a mask must equal."""

    def __init__(self, router, mask: torch.Tensor) -> None:
        super().__init__()
        self.router, self.real = router, mask.bool().flatten()

    def forward(self, x):
        logits, weights, index = self.router(x[self.real])
        wide = [x.new_zeros(len(x), each.shape[1]).to(each.dtype) for each in (logits, weights, index)]
        wide[2].fill_(4)
        return tuple(
            zero.index_put((self.real.nonzero()[:, 0],), each)
            for zero, each in zip(wide, (logits, weights, index), strict=True)
        )


def results(model: nn.Module, tokens, mask, positions) -> dict[str, torch.Tensor]:
    out = model(tokens, attention_mask=mask, position_ids=positions)
    loss = mk_transformers.router_loss(model)
    real = mask.bool()
    model.zero_grad()
    (out.logits[real].square().mean() + loss).backward()
    found = {name.replace("gate.router.", "gate."): each.grad for name, each in model.named_parameters()}
    return {"logits": out.logits[real].detach(), "loss": loss.detach()} | {
        n: g for n, g in found.items() if g is not None
    }


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "policy", [None, TokenChoice(0.75), TokenChoice(1.0, priority="max"), ExpertChoice(1.0)], ids=repr
)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_padding_reaches_routers(kind, policy, side):
    """Outputs, balance losses and gradients are those of Routers that see the real tokens alone."""
    model, given = model_of(kind, policy=policy), padded(side)
    got = results(model, *given)
    packed = model_of(kind, policy=policy, masked=False)
    for layer in packed.model.layers:
        layer.mlp.gate = Packed(layer.mlp.gate, given[1])
    want = results(packed, *given)
    assert got.keys() == want.keys()
    for name, each in want.items():
        torch.testing.assert_close(got[name], each, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("training", [True, False])
def test_the_mask_of_a_forward_is_for_it_alone(training):
    model, (tokens, mask, positions) = model_of().train(training), padded("right")
    block, x = model.model.layers[0].mlp, torch.randn(1, 5, 32)
    alone = block(x)
    model(tokens, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(block(x), alone)

    def interrupt(*given):
        raise RuntimeError("stop")

    with model.model.layers[1].register_forward_pre_hook(interrupt), pytest.raises(RuntimeError):
        model(tokens, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(block(x), alone)


def test_a_mask_may_be_given_by_its_place():
    """Of Qwen3MoeForCausalLM's forward attention_mask is the second argument."""
    model, (tokens, mask, positions) = model_of().eval(), padded("left")
    expected = model(tokens, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(model(tokens, mask, positions).logits, expected)
    seen = []
    routers(model)[0].register_forward_pre_hook(lambda module, given: seen.append(module._mask))
    model(tokens, mask, positions)
    assert torch.equal(seen[0], mask.bool())


def test_any_number_but_0_marks_a_real_token():
    """As numbers of packed documents do."""
    model, (tokens, mask, positions), found = model_of(), padded("right"), []
    for values in (mask, mask * torch.tensor([1, 2, 3])[:, None]):
        out = model(tokens, attention_mask=values, position_ids=positions)
        found.append((out.logits, mk_transformers.router_loss(model)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_sample_with_padding_is_the_sample(side):
    model = model_of(policy=TokenChoice(0.75))
    tokens, mask, positions = (each[:1] for each in padded(side))
    real = mask.bool()
    with_padding = model(tokens, attention_mask=mask, position_ids=positions).logits[real]
    loss = mk_transformers.router_loss(model)
    alone = model(tokens[real][None]).logits[0]
    torch.testing.assert_close(with_padding, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, mk_transformers.router_loss(model), rtol=1e-4, atol=1e-5)
    without = model_of(policy=TokenChoice(0.75), masked=False)
    out = without(tokens, attention_mask=mask, position_ids=positions)
    assert abs(mk_transformers.router_loss(without) - loss) > 1e-3  # padding would count
    assert out.logits.shape == (1, LONGEST, 64)


@pytest.mark.parametrize("reentrant", [False, True])
def test_masks_under_gradient_checkpointing(reentrant):
    """Two forwards before the backwards, with other masks: each repeated forward takes its own."""
    plain, again = model_of(policy=TokenChoice(0.75)), model_of(policy=TokenChoice(0.75))
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        again.enable_input_require_grads()
    found = []
    for model in plain, again:
        model.train()
        outs = []
        for side in "left", "right":
            tokens, mask, positions = padded(side)
            out = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False)
            loss = out.logits[mask.bool()].square().mean()
            outs.append(loss if reentrant else loss + mk_transformers.router_loss(model))
        for each in outs:
            each.backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    for name, gradient in found[0].items():
        other = found[1][name]
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-5)


def test_a_loss_without_gradient_is_an_error():
    model = model_of().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    out = model(*padded("left")[:1], use_cache=False)
    with pytest.raises(RuntimeError, match=r"Router: the loss has no gradient.*'use_reentrant': False"):
        mk_transformers.router_loss(model)
    out.logits.sum().backward()
    with torch.no_grad():
        model(*padded("left")[:1])
        assert mk_transformers.router_loss(model) > 0


def test_generation_with_padding_is_that_of_the_samples():
    model = model_of(policy=TokenChoice(0.75, order="token")).eval()
    tokens, mask, _ = padded("left")
    options = {"max_new_tokens": 4, "do_sample": False}
    one, one_mask = tokens[:1], mask[:1]
    got = model.generate(one, attention_mask=one_mask, **options)[:, LONGEST:]
    want = model.generate(one[one_mask.bool()][None], **options)[:, REAL[0] :]
    assert torch.equal(got, want)


def test_a_compiled_model_takes_masks():
    torch.compiler.reset()
    model = model_of(policy=TokenChoice(0.75), layers=1).eval()
    tokens, mask, positions = padded("left")
    expected = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        got = compiled(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    assert all(router._mask is None for router in routers(model))


def test_wrong_masks_are_named():
    model, (tokens, mask, _) = model_of(), padded("left")
    with pytest.raises(ValueError, match=r"use_attention_mask: attention_mask must be \(B, S\).*got \(3, 1, 9, 9\)"):
        model(tokens, attention_mask=torch.ones(3, 1, 9, 9))
    assert model(tokens).logits.isfinite().all()  # the hooks leave no mask behind
    for name in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        with pytest.raises(ValueError, match=rf"'{name}' runs one for every token; call .*\('moe_kernels'\)"):
            model(tokens, attention_mask=mask)
    with pytest.raises(ValueError, match="use_attention_mask: the model has no Router"):
        mk_transformers.use_attention_mask(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Linear\.forward has no argument attention_mask"):
        mk_transformers.use_attention_mask(_with_router())
    router = mk_transformers.Router(gate())
    with pytest.raises(TypeError, match="Router: mask must have dtype bool"):
        router(torch.randn(3, 9, 32), mask)
    logits, weights, index = router(torch.randn(3, 9, 32), mask.bool())
    real = mask.bool().flatten()
    assert (index[~real] == 4).all()
    assert (weights[~real] == 0).all()
    assert (index[real] < 4).all()
    assert logits.isfinite().all()


def _with_router() -> nn.Module:
    made = nn.Linear(2, 2)
    made.router = mk_transformers.Router(gate())
    return made


# --- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [False, True], ids=["freed", "output held"])
def test_models_with_routers_are_copied_and_saved_after_a_step(held):
    model, tokens = model_of().train(), padded("left")[0]
    out = model(tokens, labels=tokens)
    (out.loss + mk_transformers.router_loss(model)).backward()
    if not held:
        del out
    again = copy.deepcopy(model)
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in again, loaded:
        torch.testing.assert_close(other.eval()(tokens).logits, model.eval()(tokens).logits)
        assert all(router.loss is not None for router in routers(other))


@pytest.mark.parametrize("make", [gate, lambda: StableGate(32, 4, 64)], ids=["topk", "stable"])
def test_a_router_keeps_no_activations(make):
    """The loss of StableGate depends on its weights: the loss must not keep itself alive."""
    router, x = mk_transformers.Router(make()).train(), torch.randn(6, 32, requires_grad=True).tanh()
    kept = weakref.ref(x)
    if isinstance(router.gate, StableGate):
        forward = router.gate.forward
        router.gate.forward = lambda x, ids=None: forward(x, torch.arange(6))
    out = router(x)
    del x
    gc.collect()
    assert router.loss.requires_grad
    loss = router.loss
    assert kept() is not None
    del out
    assert router.loss is loss
    del loss
    gc.collect()
    assert kept() is None
    assert router.loss is None


def test_the_loss_of_routers_without_a_forward_is_an_error():
    model = model_of()
    with pytest.raises(RuntimeError, match="router_loss: a Router has no loss, as it has run no forward"):
        mk_transformers.router_loss(model)
    out = model(torch.arange(6)[None])  # holds the losses
    assert mk_transformers.router_loss(model) > 0
    routers = [each for each in model.modules() if isinstance(each, mk_transformers.Router)]
    assert len(routers) > 1
    routers[-1]._loss = None  # as of a Router that has run no forward
    assert out is not None
    with pytest.raises(RuntimeError, match="router_loss: a Router has no loss"):
        mk_transformers.router_loss(model)
    with pytest.raises(ValueError, match="router_loss: the model has no Router"):
        mk_transformers.router_loss(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="micro_batches must be at least 1"):
        mk_transformers.router_loss(model, 0)


def balance_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [router.gate.linear.weight.grad.clone() for router in routers(model)]


@pytest.mark.parametrize("divided", ["by what runs backward", "by the items of the batch"])
def test_the_balance_gradient_does_not_depend_on_the_number_of_micro_batches(divided):
    """Equal micro-batches, so that their losses are equal: 1, 2 and 4 of them give one gradient."""
    found = []
    for count in 1, 2, 4:
        model, tokens = model_of().train(), padded("left")[0]
        for _ in range(count):
            out = model(tokens)
            if divided == "by what runs backward":
                ((out.logits.sum() * 0 + mk_transformers.router_loss(model)) / count).backward()
            else:
                (out.logits.sum() * 0 + mk_transformers.router_loss(model, count)).backward()
        found.append(balance_gradients(model))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two)


def trainer_class():
    """The Trainer of docs/tutorials/transformers.md."""

    class RouterTrainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            summed = (self.model_accepts_loss_kwargs and num_items_in_batch is not None) or self.compute_loss_func
            count = self.current_gradient_accumulation_steps if summed and model.training else 1
            loss = loss + mk_transformers.router_loss(model, count)
            return (loss, outputs) if return_outputs else loss

    return RouterTrainer


@pytest.mark.parametrize("takes_items", [True, False])
def test_a_trainer_gives_one_balance_gradient_for_every_number_of_micro_batches(takes_items, tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    found = []
    for count in 1, 2, 4:
        model, tokens = model_of().train(), padded("left")[0][1]
        data = [{"input_ids": tokens, "labels": torch.full_like(tokens, 1)} for _ in range(4)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4 // count,
            gradient_accumulation_steps=count,
            max_steps=1,
            learning_rate=0.0,
            max_grad_norm=0.0,
            optim="sgd",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        )
        seen: list[list[torch.Tensor]] = []

        class Keep(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, seen=seen, **rest):
                seen.append(balance_gradients(model))

        trainer = trainer_class()(model=model, args=arguments, train_dataset=data, callbacks=[Keep()])
        trainer.model_accepts_loss_kwargs = takes_items
        trainer.train()
        found.append(seen[0])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


# --- router logits and saved models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_output_router_logits_gives_the_models_own_balance_loss(kind):
    """The logits of a TopKGate are those of the model's own router, with gradients; also the loss."""
    more = {"qwen3_moe": QWEN | {"norm_topk_prob": True}, "mixtral": MIXTRAL}[kind]
    own_config = transformers.AutoConfig.for_model(kind, **(SIZES | LAYERS | more))
    own, model = transformers.AutoModelForCausalLM.from_config(own_config), model_of(kind, lambda: gate(bias=False))
    with torch.no_grad():
        for theirs, layer in zip(own.model.layers, model.model.layers, strict=True):
            layer.mlp.gate.gate.linear.weight.copy_(theirs.mlp.gate.weight)
            layer.load_state_dict({n: p for n, p in theirs.state_dict().items() if "mlp.gate" not in n}, strict=False)
        model.model.embed_tokens.load_state_dict(own.model.embed_tokens.state_dict())
        model.model.norm.load_state_dict(own.model.norm.state_dict())
        model.lm_head.load_state_dict(own.lm_head.state_dict())
    tokens, mask, positions = padded("left")
    options = {"attention_mask": mask, "position_ids": positions, "output_router_logits": True, "labels": tokens}
    theirs, ours = own.eval()(tokens, **options), model.eval()(tokens, **options)
    assert len(ours.router_logits) == 2
    real = mask.bool().flatten()
    for one, other in zip(ours.router_logits, theirs.router_logits, strict=True):
        torch.testing.assert_close(one.view(len(real), -1)[real], other.view(len(real), -1)[real], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss, rtol=1e-3, atol=1e-4)
    (gradient,) = torch.autograd.grad(ours.aux_loss, [routers(model)[0].gate.linear.weight])
    assert gradient.abs().sum() > 0


def test_output_router_logits_of_a_gate_without_logits():
    model = model_of(make=lambda: TreeGate(32, 4, 2), policy=NonzeroWeights()).eval()
    out = model(padded("right")[0], output_router_logits=True)
    assert [each.shape for each in out.router_logits] == [(27, 4)] * 2
    assert out.aux_loss.isfinite()


def test_a_subclass_that_builds_routers_reloads_exactly(tmp_path):
    """Plain from_pretrained builds the model's own routers; docs/tutorials/transformers.md says so."""

    class WithRouters(transformers.Qwen3MoeForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp.gate = mk_transformers.Router(gate())
            mk_transformers.use_attention_mask(self)
            self.set_experts_implementation("moe_kernels")

    torch.manual_seed(0)
    model = WithRouters(transformers.AutoConfig.for_model("qwen3_moe", **(SIZES | LAYERS | QWEN))).eval()
    model.save_pretrained(tmp_path)
    again, report = WithRouters.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens, mask, _ = padded("left")
    assert torch.equal(again.eval()(tokens, attention_mask=mask).logits, model(tokens, attention_mask=mask).logits)


def test_classes_that_wrappers_make_for_a_forward_are_not_kept():
    """PEFT gives the experts of gpt_oss a new class in each forward."""
    sizes = SIZES | LAYERS | {"num_hidden_layers": 1, "intermediate_size": 40, "head_dim": 8}
    config = transformers.AutoConfig.for_model("gpt_oss", **sizes, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("moe_kernels")
    experts, tokens, made = model.model.layers[0].mlp.experts, padded("right")[0], []
    own = type(experts)
    expected = model(tokens).logits
    for _ in range(3):
        experts.__class__ = type("Wrapped", (own,), {})
        made.append(weakref.ref(type(experts)))
        torch.testing.assert_close(model(tokens).logits, expected)
        experts.__class__ = own
    gc.collect()
    assert [each() for each in made] == [None] * 3


def test_routes_of_a_model_are_recorded_and_replayed():
    from moe_kernels.nn import record_routing, replay_routing

    model = model_of()
    ids = torch.randint(1, 64, (2, 7))
    with record_routing(model) as routes:
        first = model(ids).logits
    assert sorted(routes) == [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    assert routes["model.layers.0.mlp.gate"].shape == (14, 2)
    with replay_routing(model, {name: each.flip(1) for name, each in routes.items()}):
        torch.testing.assert_close(model(ids).logits, first)
    with replay_routing(model, {name: (each + 1) % 4 for name, each in routes.items()}):
        assert not torch.allclose(model(ids).logits, first)
