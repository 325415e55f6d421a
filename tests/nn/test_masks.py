"""A mask leaves real tokens what they would get without the masked ones: outputs, losses, statistics and gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_kernels as mk
from moe_kernels import nn as mnn
from moe_kernels.nn import _mask
from moe_kernels.nn.gates import gate as gates
from moe_kernels.nn.gates import topk
from tests.helpers.layers import EVERY, D, E, H, Operators, layer

MASK = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 0]).bool()
T, REAL, GROUP = len(MASK), int(MASK.sum()), 4
NAN = float("nan")
POLICIES = {
    "all": mnn.TokenChoice(),
    "capacity": mnn.TokenChoice(0.75),
    "token order": mnn.TokenChoice(0.75, order="token"),
    "batch priority": mnn.TokenChoice(1.05, priority="max", multiple_of=2),
    "a factor of many digits": mnn.TokenChoice(1 / 3),
    "nonzero": mnn.NonzeroWeights(),
    "expert choice": mnn.ExpertChoice(1.5),
    "expert choice, few": mnn.ExpertChoice(0.1),
    "expert choice, rounded up": mnn.ExpertChoice(1.0, multiple_of=2),
    "priority": mnn.PriorityRouting(),
    "priority, dropped": mnn.PriorityRouting(0.6),
}
# Policies with groups, and the same policies for the tokens of one group.
GROUPED = {
    "capacity": (mnn.TokenChoice(0.75, group=GROUP), mnn.TokenChoice(0.75)),
    "batch priority": (mnn.TokenChoice(1.0, priority="sum", group=GROUP), mnn.TokenChoice(1.0, priority="sum")),
    "expert choice": (mnn.ExpertChoice(1.5, group=GROUP), mnn.ExpertChoice(1.5)),
    "expert choice, unequal": (mnn.ExpertChoice(4.0, group=GROUP), mnn.ExpertChoice(4.0)),  # two or three rows
    "one group": (mnn.ExpertChoice(1.5, group=T), mnn.ExpertChoice(1.5)),
}


@pytest.fixture(params=["automatic", "reference"])
def backend(request):
    with mk.use_backend("reference") if request.param == "reference" else nullcontext():
        yield request.param


@pytest.fixture
def noise_of_tokens(monkeypatch):
    """Noise that depends on the token alone, so that it is the same in both batches."""

    def normal_like(x: torch.Tensor, generator=None) -> torch.Tensor:
        return (x.detach() * 9).sin()

    monkeypatch.setattr(gates, "normal_like", normal_like)
    monkeypatch.setattr(topk, "normal_like", normal_like)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """x (T, D) and ids (T,); masked tokens hold what no gate could use."""
    x, ids = torch.randn(T, D), torch.arange(T) % 2
    x[~MASK], ids[~MASK] = NAN, -100
    return x, ids


def run(made, x, ids, mask=None, **options):
    """The output, and the gradients to x and the parameters of a loss that uses y and the layer's losses."""
    made, x = copy.deepcopy(made), x.clone().requires_grad_()
    torch.manual_seed(3)
    out = made(x, ids, mask, **options) if mask is not None else made(x, ids, **options)
    ys = out.y if isinstance(out.y, tuple) else (out.y,)
    y = torch.cat(ys, -1)
    real = y if mask is None else torch.where(mask[..., None], y, 0)
    leaves = {"x": x} | {name: each for name, each in made.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(real.square().sum() + out.loss, list(leaves.values()), allow_unused=True)
    return out, y, dict(zip(leaves, found, strict=True))


def assert_close(got, want, name=""):
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6, msg=lambda text: f"{name}: {text}")


def assert_same(masked, alone):
    """Of two results of `run`: the second is that of the real tokens alone."""
    (out, y, found), (want, want_y, wanted) = masked, alone
    assert_close(y[MASK], want_y, "y")
    assert out.losses.keys() == want.losses.keys()
    for name, loss in want.losses.items():
        assert_close(out.losses[name], loss, name)
    assert out.statistics.keys() == want.statistics.keys()
    for name, statistic in want.statistics.items():
        got = out.statistics[name]
        assert_close(got[MASK] if got.shape[:1] == (T,) else got, statistic, name)
    for name in ("kept", "requested", "dropped"):
        assert torch.equal(getattr(out.plan, name), getattr(want.plan, name)), name
    for name, gradient in wanted.items():
        got = found[name]
        assert (got is None) == (gradient is None), name
        if gradient is not None:
            assert_close(got[MASK] if name == "x" else got, gradient, name)
    if wanted["x"] is not None:
        assert (found["x"][~MASK] == 0).all()
    for each in out.gates:
        assert (each.experts[~MASK] == -1).all()
        assert (each.weights[~MASK] == 0).all()
    assert (out.plan.slot_row[~MASK] == -1).all()


def check(name: str, policy, training: bool) -> None:
    made = layer(EVERY[name](), policy).train(training)
    x, ids = tokens()
    masked = run(made, x, ids, MASK)
    assert (masked[1][~MASK] == 0).all()
    assert_same(masked, run(made, x[MASK], ids[MASK]))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.usefixtures("noise_of_tokens")
def test_every_gate(name, training, backend):
    if name == "random" and not training:
        pytest.skip("evaluation draws an expert for each token; test_random_experts_of_masked_tokens has this gate")
    for policy in POLICIES.values():
        check(name, policy, training)


def test_random_experts_of_masked_tokens():
    out = mnn.RandomGate(E).eval()(torch.randn(T, D), mask=MASK)
    assert torch.equal(out.experts[:, 0] >= 0, MASK)
    assert torch.equal(out.weights[:, 0], MASK.float())


@pytest.mark.parametrize("policies", GROUPED.values(), ids=GROUPED)
def test_groups_have_the_capacities_of_their_real_tokens(policies, backend):
    grouped, alone = policies
    x, _ = tokens()
    made = layer(mnn.TopKGate(D, E, 2, order="softmax_topk"), grouped)
    out = made(x, mask=MASK)
    made.policy = alone
    size = grouped.group
    parts = [(x[start : start + size], MASK[start : start + size]) for start in range(0, T, size)]
    expected = [made(part[real]) for part, real in parts]
    assert_close(out.y[MASK], torch.cat([each.y for each in expected]))
    assert out.plan.kept.tolist() == sum(each.plan.kept for each in expected).tolist()
    assert int(out.plan.dropped) == sum(int(each.plan.dropped) for each in expected)


def test_a_smaller_last_group_keeps_the_capacity_of_a_whole_one():
    gate, x = mnn.TopKGate(D, E, 1), torch.randn(10, D)
    policy = mnn.TokenChoice(1.0, group=4)
    for mask in torch.ones(10).bool(), torch.arange(10) < 9:
        plan, _ = policy(gate(x, mask=mask), True, mask=mask)
        want, _ = policy(gate(x[mask]), True)
        assert torch.equal(plan.kept, want.kept)


@pytest.mark.parametrize("name", ["tasks", "one gate", "searched"])
def test_tasks_that_share_experts(name, backend):
    first = mnn.TreeGate(D, E, 2, entropy=0.1)
    others = {"tasks": mnn.TopKGate(D, E, 2, balance=0.1), "one gate": first, "searched": mnn.SoftmaxGate(D, E)}
    search = mnn.LocalSearch(E, 5) if name == "searched" else None
    made = mnn.MultiGateMoE([first, others[name]], mnn.ExpertLayer(E, D, 3), search)
    x, ids = tokens()
    assert_same(run(made, x, ids, MASK), run(made, x[MASK], ids[MASK]))


def test_pass_through_gives_masked_tokens_their_x(backend):
    x, ids = tokens()
    x = torch.where(MASK[:, None], x, 7.0)
    made = layer(mnn.TopKGate(D, E, 1, order="softmax_topk", balance=1.0), mnn.TokenChoice(0.75), pass_through=True)
    masked = run(made, x, ids, MASK)
    assert torch.equal(masked[1][~MASK], x[~MASK])
    assert_same(masked, run(made, x[MASK], ids[MASK]))


def test_expert_dropout_of_samples(backend):
    """Two samples of which both have real tokens draw the same experts with and without the padding."""
    made = layer(mnn.TopKGate(D, E, 2), expert_dropout=0.5)
    x, mask = torch.randn(2, 8, D), torch.tensor([0, 0, 1, 1, 1, 1, 1, 1]).bool().expand(2, 8)
    _, got, _ = run(made, x, None, mask)
    _, want, _ = run(made, x[:, 2:], None)
    assert_close(got[:, 2:], want)
    assert (got[:, :2] == 0).all()


def test_batches_of_masks_of_all_and_of_none(backend):
    for policy in POLICIES.values():
        made = layer(mnn.TopKGate(D, E, 2, balance=0.1, z=0.1), policy)
        x, ids = torch.randn(T, D), torch.arange(T) % 2
        every = torch.ones(T).bool()
        (out, y, found), (want, want_y, wanted) = run(made, x, ids, every), run(made, x, ids)
        assert_close(y, want_y)
        assert torch.equal(out.plan.slot_row, want.plan.slot_row)
        assert_close(out.loss, want.loss)
        for name, gradient in wanted.items():
            assert_close(found[name], gradient, name)
        out, y, found = run(made, x, ids, ~every)
        assert int(out.plan.kept.sum()) == int(out.plan.dropped) == int(out.plan.requested.sum()) == 0
        assert out.loss.item() == 0
        assert (y == 0).all()
        assert all(torch.isfinite(each).all() for each in out.statistics.values())
        assert all((each == 0).all() for each in found.values() if each is not None)


def test_leading_dimensions_and_layers_that_return_a_tensor(backend):
    made = layer(mnn.TopKGate(D, E, 2, balance=0.1), mnn.TokenChoice(1.0), output="tensor")
    x, _ = tokens()
    with mnn.collect_outputs() as outputs:
        y = made(x.view(2, 8, D), mask=MASK.view(2, 8))
        want = made(x[MASK])
    assert_close(y[MASK.view(2, 8)], want)
    assert_close(outputs[0].loss, outputs[1].loss)


@pytest.mark.parametrize("name", ["capacity", "batch priority", "expert choice", "priority", "nonzero"])
def test_a_masked_layer_compiles_whole(name):
    torch.compiler.reset()
    losses = {"balance": 0.1, "z": 0.1, "importance": 0.1} if name == "capacity" else {}  # they know no policy
    made = layer(mnn.TopKGate(D, E, 2, **losses), POLICIES[name])
    compiled = torch.compile(lambda x, mask: made(x, mask=mask), fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (T, 12, 10):
        x, _ = tokens()
        x, mask = x[:size], MASK[:size].clone()  # of a view torch would take the size of what it is a view of as fixed
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=size != T):
            got, want = compiled(leaf, mask), made(other, mask=mask)
        assert_close(got.y, want.y)
        assert_close(got.loss, want.loss)
        assert torch.equal(got.plan.kept, want.plan.kept)
        (got.y.square().sum() + got.loss).backward()
        (want.y.square().sum() + want.loss).backward()
        assert_close(leaf.grad, other.grad)


def test_a_masked_layer_exports():
    made = layer(mnn.TopKGate(D, E, 2), mnn.TokenChoice(0.75)).eval()
    count = torch.export.Dim("tokens", min=2, max=4096)
    x, _ = tokens()
    program = torch.export.export(made, (x, None, MASK), dynamic_shapes=({0: count}, None, {0: count}))
    for size in (T, 11):
        got, want = program.module()(x[:size], None, MASK[:size]), made(x[:size], None, MASK[:size])
        assert_close(got.y, want.y)


def test_the_host_does_not_read_the_mask():
    """On meta tensors every read of a value raises."""
    for policy in POLICIES.values():
        made = layer(mnn.TopKGate(D, E, 2, balance=0.1), policy).to("meta")
        out = made(torch.empty(T, D, device="meta"), mask=torch.empty(T, dtype=torch.bool, device="meta"))
        assert out.y.shape == (T, D)


def test_without_a_mask_nothing_runs_that_did_not():
    made, x = layer(mnn.TopKGate(D, E, 2), mnn.TokenChoice(1.0)), torch.randn(T, D)
    with Operators() as seen:
        made(x)
    assert seen.names.count("make_plan_fwd") == 1
    assert made(x).gates[0].experts.min() >= 0
    assert mnn.SoftmaxGate(D, E)(x).dense
    assert not mnn.SoftmaxGate(D, E)(x, mask=MASK).dense


class Own(mnn.Gate):
    """A gate whose call takes no mask, written before there were masks."""

    def forward(self, x, ids=None):
        return mnn.GateOutput(x.new_ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int32), E)


def test_a_gate_or_policy_without_a_mask_is_named():
    x, _ = tokens()
    experts = mnn.ExpertMLP(E, D, H)
    assert mnn.MoE(Own(E), experts)(torch.randn(3, D)).plan.kept.tolist() == [3, 0, 0, 0]
    for made, name in (
        (mnn.MoE(Own(E), experts), "MoE: Own does not take a mask"),
        (mnn.MoE(mnn.TopKGate(D, E, 1), experts, lambda gate, training: None), "MoE: function does not take a mask"),
        (mnn.MultiGateMoE([Own(E)], experts), "MultiGateMoE: Own does not take a mask"),
        (mnn.MoE(mnn.PermutedGate(Own(E), mnn.LocalSearch(E, 5)), experts), "PermutedGate: Own does not take"),
        (mnn.MoE(mnn.StagedGate(Own(E), mnn.TopKGate(D, E, 1)), experts), "StagedGate: Own does not take"),
    ):
        with pytest.raises(TypeError, match=name):
            made(x, mask=MASK)


def test_a_mask_of_another_kind_is_refused():
    x, _ = tokens()
    gate = mnn.TopKGate(D, E, 2)
    out = gate(x, mask=MASK)
    calls = {
        "MoE": lambda mask: mnn.MoE(gate, mnn.ExpertMLP(E, D, H))(x, mask=mask),
        "MultiGateMoE": lambda mask: mnn.MultiGateMoE([gate], mnn.ExpertMLP(E, D, H))(x, mask=mask),
        "TopKGate": lambda mask: gate(x, mask=mask),
        "RandomGate": lambda mask: mnn.RandomGate(E)(x, mask=mask),
    }
    for policy in (mnn.TokenChoice(1.0), mnn.NonzeroWeights(), mnn.ExpertChoice(), mnn.PriorityRouting()):
        calls[type(policy).__name__] = lambda mask, policy=policy: policy(out, True, mask=mask)
    names = ("importance_loss", "load_loss", "balance_loss", "router_z_loss", "inverse_cv", "competition_loss")
    probs = torch.rand(T, 4).softmax(-1)
    for name, loss in zip((*names, "symmetric_kl", "tree_entropy"), LOSSES.values(), strict=True):
        calls[name] = lambda mask, loss=loss: loss(probs, mask)
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"{name}: mask must have dtype bool.*got torch.int64: pass mask.bool\(\)"):
            call(MASK.long())
        with pytest.raises(ValueError, match=rf"{name}: mask must be \(16,\) on cpu, one for each token; got \(15,\)"):
            call(MASK[:-1])
        with pytest.raises(TypeError, match=f"{name}: mask must be a Tensor, got list"):
            call(MASK.tolist())


LOSSES = {
    "importance": lambda p, mask: mnn.importance_loss(p, mask=mask),
    "load": lambda p, mask: mnn.load_loss(p, p.roll(1, -1), 2, 0.3, mask=mask),
    "balance": lambda p, mask: mnn.balance_loss(p, torch.tensor([1, 2, 3, 4]), mask=mask),
    "z": lambda p, mask: mnn.router_z_loss(p, mask),
    "inverse cv": lambda p, mask: mnn.inverse_cv(p, mask=mask),
    "competition": lambda p, mask: mnn.competition_loss(
        (p[:, :2], torch.tensor([[0, 1]]).expand(len(p), 2)),
        (p[:, 2:], torch.tensor([[1, 3]]).expand(len(p), 2)),
        4,
        mask,
    ),
    "symmetric kl": lambda p, mask: mnn.symmetric_kl(p, p.roll(1, -1), mask),
    "entropy": lambda p, mask: mnn.tree_entropy(p[:, None], mask=mask),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_a_mask_is_that_of_the_real_tokens(name):
    p = torch.rand(T, 4, dtype=torch.float64).softmax(-1)
    leaf, alone = p.clone().requires_grad_(), p[MASK].clone().requires_grad_()
    got, want = LOSSES[name](leaf, MASK), LOSSES[name](alone, None)
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    torch.testing.assert_close(leaf.grad[MASK], alone.grad)
    assert (leaf.grad[~MASK] == 0).all()
    assert float(LOSSES[name](p, torch.zeros(T).bool())) == 0
    assert not torch.equal(want, LOSSES[name](p, None))  # masked tokens would change it


@pytest.mark.parametrize("loss", [mnn.batch_inverse_cv, mnn.batch_variation])
def test_losses_of_images_leave_out_masked_tokens_and_images(loss):
    p, mask = torch.rand(5, 3, E), torch.rand(5, 3) < 0.6
    mask[0], mask[1, 0], mask[2] = False, True, True
    kept = torch.where(mask[..., None], p, 0)[mask.any(1)]
    torch.testing.assert_close(loss(torch.where(mask[..., None], p, NAN), mask=mask), loss(kept))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_scaled_rounds_exactly(data):
    """Against fractions of Python, near and at integers, for numerators and denominators beyond int64."""
    denominator = data.draw(
        st.integers(1, 50) | st.integers(1, 10**17) | st.integers(1, 4096).map(lambda e: e * 10**16)
    )
    numerator = data.draw(st.integers(0, 3 * denominator) | st.sampled_from([denominator // 3, denominator // 3 + 1]))
    number = data.draw(st.integers(0, 99) | st.integers(0, 2**31 - 1))
    exact = Fraction(number * numerator, denominator)
    for up, want in ((True, -(-exact.numerator // exact.denominator)), (False, exact.numerator // exact.denominator)):
        assert int(_mask.scaled(torch.tensor(number), (numerator, denominator), up=up)) == want


@pytest.mark.parametrize("factor", [0, 0.1, 0.5, 1, 1.25, 1 / 3, 2 / 3, 4 / 3, 2.5])
@pytest.mark.parametrize("multiple_of", [None, 1, 4])
def test_rows_of_a_mask_are_the_rows_of_so_many_tokens(factor, multiple_of):
    """ExpertChoice's number of rows for a tensor of counts and for an int: the same rounding, half to even."""
    policy, counts = mnn.ExpertChoice(factor, multiple_of), torch.arange(200)
    for experts in (1, 4, 7):
        assert policy._real_rows(counts, experts).tolist() == [policy._rows(n, experts) for n in range(200)]
