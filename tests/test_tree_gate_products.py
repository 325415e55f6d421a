"""The tree gate on the CPU where saturated nodes turn most tokens away: products are passed over, nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from test_tree_gate import DTYPES, assert_near, drawn, gate_and_gradients
from torch.library import opcheck

import moe_kernels as mk
from moe_kernels import backends, library
from moe_kernels.backends.native import tree_gate_products
from moe_kernels.library.tree_gate import products, products_gradients

GAMMA = 0.1  # 87 % of the nodes that `drawn` makes are saturated: a level halves the tokens that come

pytestmark = pytest.mark.skipif(
    bool(backends.missing("cpu", "tree_gate")), reason=str(backends.missing("cpu", "tree_gate"))
)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """What passing over costs beside products is counted as nothing, so that a hundred tokens of few columns do."""
    monkeypatch.setattr(tree_gate_products, "PACKING", 0)
    monkeypatch.setattr(tree_gate_products, "OVERHEAD", 0)


def passes_over(arguments: dict, gamma: float) -> bool:
    """Whether some leaf's pre-activation was left out: it is 0 where the dense product is not."""
    given = (arguments.get(name) for name in ("x", "split_weight", "leaf_weight", "split_bias", "leaf_bias"))
    _, leaf_probs, _, leaf_logits = library.ops.tree_gate_fwd(*given, gamma, "", "cpu")
    left_out = leaf_logits == 0
    assert not leaf_probs[left_out].any()
    return bool(left_out.any())


# (T, P, K, E): full and ragged last levels, tiles of tokens and panels that are not filled, up to the most branches.
SIZES = ((150, 5, 1, 33), (300, 37, 3, 48), (515, 33, 2, 64), (130, 70, 1, 257), (120, 8, 1, 1024))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gates_and_gradients_are_those_of_all_products(dtype, bias):
    floor = 8 * torch.finfo(dtype).eps
    for tokens, dim, trees, experts in SIZES:
        arguments = {name: each.to(dtype) for name, each in drawn(tokens, dim, trees, experts, bias=bias).items()}
        assert passes_over(arguments, GAMMA)
        grads = torch.randn(tokens, experts), torch.randn(tokens, trees, experts)
        wide = {name: each.double() for name, each in arguments.items()}
        got = gate_and_gradients(arguments, grads, "cpu", gamma=GAMMA)
        same = gate_and_gradients(arguments, grads, "reference", gamma=GAMMA)
        exact = gate_and_gradients(wide, grads, "reference", gamma=GAMMA)
        for name, each in got.items():
            output = name in ("gates", "leaf_probs")
            assert_near(each, same[name], exact[name], floor if output else 3 * floor, (experts, name))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_products_of_16_bits(dtype):
    """What a token reaches is the product rounded once, and so are the gradients, of pre-activations as they are.

    Gates are not compared: a rounding of 16 bits moves a node across the clamp, and its token with it.
    """
    rounding = torch.finfo(dtype).eps / 2
    for tokens, dim, trees, experts in SIZES:
        given = {name: each.to(dtype) for name, each in drawn(tokens, dim, trees, experts).items()}
        assert passes_over(given, GAMMA)
        x, weights = given["x"], (given["split_weight"], given["leaf_weight"])
        biases = given["split_bias"], given["leaf_bias"]
        gates, probs, *logits = library.ops.tree_gate_fwd(x, *weights, *biases, GAMMA, "", "cpu")
        for each, weight, bias in zip(logits, weights, biases, strict=True):
            exact = products(x.double(), weight.double(), bias.double())
            assert each.dtype == dtype
            made = each != 0
            error = (each.double() - exact).abs()
            assert (error <= 1.01 * rounding * exact.abs() + 1e-6)[made].all(), experts
            assert 0 < made.sum() < made.numel()
        grads = library.ops.tree_gate_bwd(torch.randn_like(gates), torch.randn_like(probs), *logits, GAMMA, "", "cpu")
        got = library.ops.tree_gate_logits_bwd(*grads, logits[0], x, *weights, GAMMA, [True] * 3, "cpu")
        exact = [torch.empty_like(each, dtype=torch.float64) for each in (x, *weights)]
        products_gradients(*(each.double() for each in (*grads, x, *weights)), exact)
        for each, expected in zip(got, exact, strict=True):
            assert each.dtype == dtype
            allowed = 1.01 * rounding * expected.abs() + 1e-5 * expected.abs().max()
            assert ((each.double() - expected).abs() <= allowed).all(), experts


def test_more_experts_than_branches_fit_a_word():
    arguments = drawn(200, 8, 1, 1100)
    assert not passes_over(arguments, GAMMA)


def test_each_gradient_alone_is_the_same():
    arguments = drawn(200, 20, 2, 64)
    assert passes_over(arguments, GAMMA)
    grads = torch.randn(200, 64), torch.randn(200, 2, 64)
    every = gate_and_gradients(arguments, grads, "cpu", gamma=GAMMA)
    for name in arguments:
        leaf = {key: each.clone().requires_grad_(key == name) for key, each in arguments.items()}
        (alone,) = torch.autograd.grad(mk.tree_gate(**leaf, gamma=GAMMA, backend="cpu"), leaf[name], grads)
        assert torch.equal(alone, every[name]), name


def test_nothing_is_passed_over_where_it_does_not_pay(monkeypatch):
    arguments = drawn(300, 16, 2, 64)
    assert passes_over(arguments, GAMMA)
    assert not passes_over(arguments, 10.0)
    monkeypatch.setattr(tree_gate_products, "PACKING", 40)
    assert not passes_over(arguments, GAMMA)


def test_tokens_that_were_not_asked_first():
    """Every fourth token, which is asked first, is turned away by all nodes, and the others by none."""
    arguments = drawn(1024, 16, 2, 64, bias=False)
    arguments["x"][torch.arange(1024) % 4 != 0] *= 1e-3
    assert not passes_over(arguments, GAMMA)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("name", ["x", "split_weight", "leaf_weight"])
def test_a_product_that_could_be_nan_is_made(name, value):
    arguments = drawn(200, 20, 2, 64, bias=False)
    assert passes_over(arguments, GAMMA)
    arguments[name][-1, ..., -1] = value
    found = [mk.tree_gate(**arguments, gamma=GAMMA, backend=each) for each in ("cpu", "reference")]
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got.isnan(), expected.isnan())


def test_same_bits_whatever_the_threads_and_strides():
    arguments = drawn(700, 40, 3, 64)
    assert passes_over(arguments, GAMMA)
    grads = torch.randn(700, 64), torch.randn(700, 3, 64)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gate_and_gradients(arguments, grads, "cpu", gamma=GAMMA))
    finally:
        torch.set_num_threads(before)
    strided = {name: torch.stack([each, each], -1)[..., 0] for name, each in arguments.items()}
    found.append(gate_and_gradients(strided, grads, "cpu", gamma=GAMMA))
    for others in found[1:]:
        for name, each in found[0].items():
            assert torch.equal(each, others[name]), name


@pytest.mark.parametrize("wants", [[True, True, True], [False, True, False]])
def test_opcheck(wants):
    x, split_weight, leaf_weight = (
        drawn(200, 4, 2, 64, bias=False)[name] for name in ("x", "split_weight", "leaf_weight")
    )
    _, _, *logits = library.ops.tree_gate_fwd(x, split_weight, leaf_weight, None, None, GAMMA, "", "cpu")
    grads = [torch.randn_like(each) for each in logits]
    given = (*grads, logits[0], x, split_weight, leaf_weight, GAMMA, wants, "cpu")
    opcheck(torch.ops.moe_kernels.tree_gate_logits_bwd.default, given)


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 10.0])
def test_gradients_are_finite_at_every_scale(gamma):
    for scale in (1e-6, 1.0, 1e6):
        arguments = drawn(200, 20, 2, 64)
        arguments["x"] *= scale
        grads = torch.randn(200, 64), torch.randn(200, 2, 64)
        for name, each in gate_and_gradients(arguments, grads, "cpu", gamma=gamma).items():
            assert each.isfinite().all(), (scale, name)
