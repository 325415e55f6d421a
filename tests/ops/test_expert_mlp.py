"""expert_mlp: values and gradients against a sum over the choices of each token that have a row, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.backends.native import grouped_gemm_cpu
from moe_kernels.ops._define import operators
from tests.helpers.expert_mlp import leaves_of
from tests.helpers.grouped_gemm import ACTS, DTYPES, finest, judged, results, skip_unsupported
from tests.helpers.plans import plans
from tests.helpers.targets import Target

OP = "expert_mlp"
KINDS = dict(zip(plans(), ("gelu", "swiglu", "relu", "silu", "geglu", "tanh", "gelu", "gelu"), strict=True))


def dense(plan, x, w_in, w_out, weights=None, b_in=None, b_out=None, activation="gelu"):
    """The outputs of every expert for every token, then for each token the sum over its choices that have a row."""
    pre = torch.einsum("td,edh->teh", x, w_in) + (0 if b_in is None else b_in)
    out = torch.einsum("teh,ehd->ted", ACTS[activation](pre), w_out) + (0 if b_out is None else b_out)
    y = 0 * out.sum(1) + (0 if weights is None else 0 * weights.sum())  # so that gradients exist if the plan is empty
    bounds = plan.expert_offsets.tolist()
    for row in range(bounds[-1]):
        expert = next(e for e in range(plan.num_experts) if bounds[e] <= row < bounds[e + 1])
        token, choice = int(plan.row_token[row]), int(plan.row_choice[row])
        weight = 1 if weights is None else weights[token, choice]
        y[token] = y[token] + weight * out[token, expert]
    return y


# float16 has only two cases, to save time.
CASES = [(kind, dtype) for kind in KINDS for dtype in (DTYPES if kind in ("everything", "dropped") else DTYPES[:2])]
# The cases that Triton runs without a GPU, to save compilations.
COMPILED = [(kind, DTYPES[i % 2]) for i, kind in enumerate(KINDS)] + [("everything", torch.bfloat16)]
COMPILED += [("dropped", torch.float16)]


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_values_and_gradients_are_the_dense_ones(target, kind, dtype):
    skip_unsupported(target, dtype, OP)
    if target.compiles and (kind, dtype) not in COMPILED:
        pytest.skip("Triton runs this plan and this activation in another dtype, to save compilations")
    plan, activation = plans(target.device)[kind], KINDS[kind]
    leaves = leaves_of(plan, dtype, target.device, activation, with_bias=kind != "dropped")
    leaves["weights"] = leaves["weights"].masked_fill(plan.slot_row < 0, math.nan)  # choices without a row
    got = judged(
        target,
        dtype,
        partial(mk.expert_mlp, plan=plan, activation=activation),
        partial(dense, plan, activation=activation),
        leaves,
        torch.randn(plan.num_tokens, 18).to(dtype),
        floor=2.0,  # epsilons: 1 for rounding results, 1 for rounding the hidden layer and intermediate gradients
    )
    assert not got["weights"][plan.slot_row < 0].any()


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_with_products_by_torch(kind, dtype, tiles, monkeypatch):
    """tiles: as if the CPU had AMX."""
    monkeypatch.setattr(grouped_gemm_cpu, "in_cpp", lambda *args: False)
    monkeypatch.setattr(grouped_gemm_cpu, "_in_tiles", lambda dtype: tiles and dtype is torch.bfloat16)
    test_values_and_gradients_are_the_dense_ones(Target("cpu", "cpu", "cpu"), kind, dtype)


@pytest.mark.parametrize("kind", ["everything", "dropped"])
def test_more_columns_than_are_taken_together(target, kind):
    dtype, plan, activation = finest(target, OP), plans(target.device)[kind], KINDS[kind]
    hidden, dout = (101, 91) if target.compiles else (301, 291)  # Triton takes 64 together
    leaves = leaves_of(plan, dtype, target.device, activation, hidden=hidden, dout=dout, with_bias=kind != "dropped")
    call, exact = partial(mk.expert_mlp, plan=plan, activation=activation), partial(dense, plan, activation=activation)
    judged(target, dtype, call, exact, leaves, torch.randn(plan.num_tokens, dout).to(dtype), floor=2.0)


@pytest.mark.parametrize("activation", ["gelu", "swiglu", None])
def test_without_gate_weights(target, activation):
    dtype = finest(target, OP)
    plan = plans(target.device)["unused rows"]
    leaves = leaves_of(plan, dtype, target.device, activation)
    del leaves["weights"]
    call = partial(mk.expert_mlp, plan=plan, weights=None, activation=activation)
    exact = partial(dense, plan, activation=activation)
    judged(target, dtype, call, exact, leaves, torch.randn(plan.num_tokens, 18), floor=2.0)


def test_gate_weights_are_not_rounded_for_the_bias(target):
    """For output gradients of 1 the gradient to b_out is the sum of the gate weights. bfloat16 rounds each to 1."""
    dtype = torch.bfloat16
    skip_unsupported(target, dtype, OP)
    tokens = 250 if target.interpreted else 4000
    plan = mk.make_plan(torch.zeros(tokens, 1, dtype=torch.int64, device=target.device), 2)
    leaves = leaves_of(plan, dtype, target.device, "relu")
    leaves["weights"] = torch.full((tokens, 1), 1 + 2**-9 + 2**-10, device=target.device)
    leaves["b_out"].requires_grad_()
    y = mk.expert_mlp(plan=plan, activation="relu", backend=target.backend, **leaves)
    (got,) = torch.autograd.grad(y, leaves["b_out"], torch.ones_like(y))
    assert (got[0] == torch.tensor(tokens * (1 + 2**-9 + 2**-10)).to(dtype)).all()
    assert not got[1].any()


def test_a_hidden_layer_that_was_not_kept_is_the_same_one_in_backward():
    """With keep = False forward does not return the pre-activation for backward, which then recomputes it."""
    plan = plans("cpu")["dropped"]
    leaves = leaves_of(plan, torch.float32, "cpu", "swiglu")
    given = [leaves[name].requires_grad_() for name in ("x", "weights", "w_in", "w_out", "b_in", "b_out")]
    arrays, offsets = (plan.expert_offsets, plan.row_token, plan.row_choice, plan.slot_row), plan.expert_offsets
    calls = {
        (0, 1, 2, 3, 4, 5): lambda keep: operators.expert_mlp_fwd(*given, *arrays, "swiglu", keep, "cpu"),
        (0, 2, 4): lambda keep: operators.grouped_gemm_fwd(
            given[0], given[2], offsets, plan.row_token, given[4], "swiglu", keep, "cpu"
        ),
    }
    for which, call in calls.items():
        leaf = [given[i] for i in which]
        found = [torch.autograd.grad(call(keep)[0].square().sum(), leaf) for keep in (True, False)]
        for got, kept in zip(*found, strict=True):
            torch.testing.assert_close(got, kept)


def test_weights_of_either_layout(target):
    """The gradients to transposed w_in and w_out have the strides of w_in and w_out."""
    dtype, plan = finest(target, OP), plans(target.device)["dropped"]
    leaves = leaves_of(plan, dtype, target.device, "gelu")
    other = leaves | {
        name: leaves[name].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for name in ("w_in", "w_out")
    }
    other["weights"] = leaves["weights"].t().contiguous().t()
    other = {name: each.requires_grad_() for name, each in other.items()}
    grad = torch.randn(plan.num_tokens, 18)
    expected = results(partial(mk.expert_mlp, plan=plan, backend=target.backend), leaves, grad)
    y = mk.expert_mlp(plan=plan, backend=target.backend, **other)
    got = dict(zip(other, torch.autograd.grad(y, list(other.values()), grad.to(y.device, dtype)), strict=True))
    for name, value in got.items():
        scale = float(expected[name].float().abs().max())
        torch.testing.assert_close(value, expected[name], rtol=0, atol=8 * torch.finfo(dtype).eps * scale)
    assert [got[name].stride() for name in ("w_in", "w_out")] == [other[name].stride() for name in ("w_in", "w_out")]


def test_without_hidden_units_the_gates_still_weigh_the_bias(target):
    dtype, plan = finest(target, OP), plans(target.device)["dropped"]
    leaves = leaves_of(plan, dtype, target.device, "relu", hidden=0, dout=10)  # sums of few terms
    grad = torch.randn(plan.num_tokens, 10)
    got, expected = (
        results(partial(mk.expert_mlp, plan=plan, backend=backend), leaves, grad)
        for backend in (target.backend, "reference")
    )
    assert expected["weights"].any()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=0.02, atol=0.02)


def test_an_infinite_gradient_of_one_token(target):
    """An infinity that is multiplied by a kernel's zero padding would give NaN."""
    plan, dtype = plans(target.device)["dropped"], finest(target, OP)
    leaves = {name: each.abs() for name, each in leaves_of(plan, dtype, target.device, "gelu").items()}
    grad, token = torch.zeros(plan.num_tokens, 18), int(plan.row_token[0])
    grad[token, 3] = math.inf
    got, expected = (
        results(partial(mk.expert_mlp, plan=plan, backend=backend), leaves, grad)
        for backend in (target.backend, "reference")
    )
    assert expected["weights"].isposinf().any()
    assert torch.equal(got["weights"].cpu(), expected["weights"].cpu())


def test_a_row_of_no_token_is_a_choice_without_weight(target):
    """A used row whose plan.row_token is -1 acts like a choice of weight 0, but the gradient to that weight is 0."""
    dtype, plan = finest(target, OP), plans(target.device)["dropped"]
    leaves, grad = leaves_of(plan, dtype, target.device, "gelu"), torch.randn(plan.num_tokens, 18)
    row = int(plan.expert_offsets[-1]) // 2
    choice = plan.row_token[row].long(), plan.row_choice[row].long()
    none, slots = plan.row_token.clone(), plan.slot_row.clone()
    none[row], slots[choice] = -1, -1
    leaves["weights"][choice] = 0
    got, expected = (
        results(partial(mk.expert_mlp, plan=made, backend=target.backend), leaves, grad)
        for made in (replace(plan, row_token=none, slot_row=slots), plan)
    )
    assert got["weights"][choice] == 0
    expected["weights"][choice] = 0
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_float32_gates_weigh_bfloat16_experts(target):
    plan = plans(target.device)["dropped"]
    leaves = leaves_of(plan, torch.bfloat16, target.device, "silu")
    leaves["weights"] = leaves["weights"].float().requires_grad_()
    y = mk.expert_mlp(plan=plan, activation="silu", backend=target.backend, **leaves)
    assert y.dtype == torch.bfloat16
    assert torch.autograd.grad(y.float().sum(), leaves["weights"])[0].dtype == torch.float32


def test_gates_and_their_gradients_are_not_rounded_to_the_experts_dtype(target):
    """bfloat16 rounds 1 + 2^-9 to 1 and 1 + 2^-8 + 2^-10 to 1 + 2^-7, and does not have the number (1 + 2^-7)^2."""
    plan = mk.make_plan(torch.tensor([[0, 1]], device=target.device), 2, backend="reference")
    x = torch.zeros(1, 16, dtype=torch.bfloat16, device=target.device)
    x[0, 0] = 1 + 2**-7
    x.requires_grad_()
    identity = torch.eye(16, dtype=torch.bfloat16, device=target.device).repeat(2, 1, 1)
    weights = torch.tensor([[1 + 2**-9, -1.0]], device=target.device, requires_grad=True)
    given = x, plan, identity, identity
    y = mk.expert_mlp(*given, weights=weights, activation="relu", backend=target.backend)
    assert y[0, 0] == (1 + 2**-7) * 2**-9
    assert torch.autograd.grad(y, weights, x.detach())[0].tolist() == [[(1 + 2**-7) ** 2] * 2]
    weights = torch.tensor([[1 + 2**-8 + 2**-10, 0.0]], device=target.device)
    y = mk.expert_mlp(*given, weights=weights, activation="relu", backend=target.backend)
    assert torch.autograd.grad(y, x, torch.full_like(y, 1.75))[0][0, 0] == 1.7578125


def test_little_is_saved():
    """Except for the arguments, forward saves only one floating-point tensor for backward: the pre-activation."""
    plan = mk.make_plan(torch.randint(0, 8, (100, 2)), 8)
    leaves = {name: each.requires_grad_() for name, each in leaves_of(plan, torch.float32, "cpu", "gelu").items()}
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        mk.expert_mlp(plan=plan, backend="cpu", **leaves)
    others = [each for each in saved if not any(each is leaf for leaf in leaves.values())]
    floats = [tuple(each.shape) for each in others if each.is_floating_point()]
    assert floats == [(plan.num_rows, 23)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["dropped", "unused rows", "expert choice", "no room"])
def test_derivatives_in_float64(backend, kind):
    plan, activation = plans()[kind], KINDS[kind] if KINDS[kind] != "relu" else "tanh"
    leaves = leaves_of(plan, torch.float64, "cpu", activation, dim=2, hidden=3, dout=2)
    names = list(leaves)

    def call(*given):
        return mk.expert_mlp(plan=plan, activation=activation, backend=backend, **dict(zip(names, given, strict=True)))

    assert torch.autograd.gradcheck(call, [each.requires_grad_() for each in leaves.values()])


def test_flops_are_counted():
    plan = plans()["everything"]
    leaves = {name: each.requires_grad_() for name, each in leaves_of(plan, torch.float32, "cpu", "gelu").items()}
    counted = []
    for frozen in ("", "weights", "w_out"):  # frozen: nothing; weights; weights and w_out
        if frozen:
            leaves[frozen].requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            mk.expert_mlp(plan=plan, backend="cpu", **leaves).sum().backward()
        counted.append(counter.get_total_flops())
    rows, products = plan.num_rows, 2 * plan.num_rows * (19 * 23 + 23 * 18)
    moving = 2 * rows * 18 + rows * 19  # combine in forward; in backward the sum over rows for the gradient to x
    bias = 2 * rows * 18  # for the gradient to b_out; the gate weights' gradient takes as many for its term with b_out
    least = 3 * products + moving + bias  # also if w_out is frozen: one kernel computes its gradient and b_out's
    assert counted == [least + bias, least, least]


def test_bad_input_is_named():
    plan = plans()["dropped"]
    good = leaves_of(plan, torch.float32, "cpu", "gelu", hidden=22)
    for change, error, words in (
        ({"x": good["x"][1:]}, ValueError, "x must have 23 rows, the tokens of the plan"),
        ({"w_in": good["w_in"][1:]}, ValueError, r"w_in must be \(E, D, H\) = \(5, 19, 22\)"),
        ({"w_out": good["w_out"][:, 1:]}, ValueError, r"w_out must be \(E, H, Dout\) = \(5, 22, 18\)"),
        ({"w_out": good["w_out"].double()}, TypeError, "w_out must have dtype float32; got float64"),
        ({"b_in": good["b_out"]}, ValueError, r"b_in must be \(E, H\) = \(5, 22\)"),
        ({"b_out": good["b_in"]}, ValueError, r"b_out must be \(E, Dout\) = \(5, 18\)"),
        ({"weights": good["weights"][:, 1:]}, ValueError, r"weights must be \(T, K\) like the choices"),
        ({"activation": "selu"}, ValueError, "activation must be None or one of"),
        ({"activation": "geglu"}, ValueError, r"w_out must be \(E, H, Dout\) = \(5, 11, 18\)"),
    ):
        for backend in ("cpu", "reference"):
            with pytest.raises(error, match=f"^expert_mlp: {words}"):
                mk.expert_mlp(plan=plan, backend=backend, **{**good, **change})
    with pytest.raises(mk.BackendError, match="expert_mlp: backend 'triton' cannot run here"):
        mk.expert_mlp(plan=plan, backend="triton", **{name: each.double() for name, each in good.items()})
    assert backends.missing("reference", OP) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_launch_gives_the_bits_of_three(kind, dtype, monkeypatch):
    plan, activation, found = plans("cpu")[kind], KINDS[kind], []
    leaves = {name: each.requires_grad_() for name, each in leaves_of(plan, dtype, "cpu", activation).items()}
    for most in (grouped_gemm_cpu.AT_ONCE, -1):  # -1: forward takes three C++ calls instead of one
        monkeypatch.setattr(grouped_gemm_cpu, "AT_ONCE", most)
        y = mk.expert_mlp(plan=plan, activation=activation, backend="cpu", **leaves)
        found.append((y, *torch.autograd.grad(y.float().square().sum(), leaves.values())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
