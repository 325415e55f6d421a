"""The tree gate on the CPU with mostly saturated nodes: unneeded products are skipped, results stay right."""

from __future__ import annotations

import math

import pytest
import torch

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.backends import cpu
from moe_kernels.backends.native import tree_gate_products_cpu
from moe_kernels.ops._define import operators
from moe_kernels.ops.tree_gate import products, products_gradients
from moe_kernels.sizes import compute_dtype
from moe_kernels.verify import relative_error, threads
from tests.helpers.inputs import padded
from tests.helpers.tree_gate import DTYPES, drawn, gate_and_gradients

GAMMA = 0.1  # saturates 93 % of the nodes of `drawn`: a child gets about half of its node's tokens

pytestmark = pytest.mark.skipif(
    bool(backends.missing("cpu", "tree_gate")), reason=str(backends.missing("cpu", "tree_gate"))
)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Sets the assumed costs of skipping to 0, so that products are skipped at these small sizes too."""
    monkeypatch.setattr(tree_gate_products_cpu, "PACKING", 0)
    monkeypatch.setattr(tree_gate_products_cpu, "OVERHEAD", 0)


def passes_over(arguments: dict, gamma: float) -> bool:
    """Whether leaf products were skipped, which leaves their pre-activations 0."""
    given = (arguments.get(name) for name in ("x", "split_weight", "leaf_weight", "split_bias", "leaf_bias"))
    _, leaf_probs, _, leaf_logits = operators.tree_gate_fwd(*given, gamma, "", "cpu")
    left_out = leaf_logits == 0
    assert not leaf_probs[left_out].any()
    return bool(left_out.any())


# (tokens, dim, trees, experts). A tree has branches, subtrees of at most 31 nodes and leaves: products are skipped for
# whole branches.
SIZES = ((150, 5, 1, 33), (300, 37, 3, 48), (515, 33, 2, 64), (130, 70, 1, 257), (120, 8, 1, 1024))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_products_are_those_that_tokens_reach(dtype, bias):
    """Pre-activations and gradients are near the exact products. Pre-activations that were skipped change no bit of
    gates and leaf probabilities if they are filled in."""
    for tokens, dim, trees, experts in SIZES:
        given = {name: each.to(dtype) for name, each in drawn(tokens, dim, trees, experts, bias=bias).items()}
        if bias:
            given["split_bias"][0, :2] += 0.5
        assert passes_over(given, GAMMA)
        x, weights = given["x"], (given["split_weight"], given["leaf_weight"])
        biases = given.get("split_bias"), given.get("leaf_bias")
        gates, probs, *logits = operators.tree_gate_fwd(x, *weights, *biases, GAMMA, "", "cpu")
        filled = []
        for each, weight, shift in zip(logits, weights, biases, strict=True):
            assert each.dtype == dtype
            made = each != 0
            assert 0 < made.sum() < made.numel()
            exact, sizes = (
                products(*(None if of is None else sign(of.double()) for of in (x, weight, shift)))
                for sign in (torch.clone, torch.abs)
            )
            assert_rounded(each[made], exact[made], sizes[made], dim + 1, experts)
            filled.append(torch.where(made, each, exact.to(dtype)))
        for got, same in zip(
            (gates, probs), backends.load("cpu", "tree_gate").tree_gate_fwd(*filled, GAMMA, ""), strict=True
        ):
            assert torch.equal(got, same), experts
        grads = operators.tree_gate_bwd(torch.randn_like(gates), torch.randn_like(probs), *logits, GAMMA, "", "cpu")
        got = operators.tree_gate_logits_bwd(*grads, logits[0], x, *weights, GAMMA, [True] * 3, "cpu")
        exact, sizes = ([torch.empty_like(each, dtype=torch.float64) for each in (x, *weights)] for _ in range(2))
        for sign, results in ((torch.clone, exact), (torch.abs, sizes)):
            products_gradients(*(sign(each.double()) for each in (*grads, x, *weights)), results)
        for each, expected, size, terms in zip(got, exact, sizes, (2 * trees * experts, tokens, tokens), strict=True):
            assert each.dtype == dtype
            assert_rounded(each, expected, size, terms, experts)


def assert_rounded(got, exact, sizes, terms: int, what: object) -> None:
    """Allows one rounding to got's dtype plus 2 * terms roundings of `sizes`, the sums of the terms' magnitudes, in the
    compute dtype. The factor 2 is for float64, where `exact` has such roundings too.
    """
    info = torch.finfo(got.dtype)
    rounding = info.eps / 2 * exact.abs().clamp(min=info.smallest_normal)  # subnormal numbers are evenly spaced
    summing = 2 * terms * torch.finfo(compute_dtype(got.dtype)).eps / 2 * sizes
    assert ((got.double() - exact).abs() <= 1.01 * rounding + summing).all(), what


def test_gates_and_gradients_are_those_of_all_products():
    """In float64, because nodes close to saturation magnify the rounding errors of their products."""
    for tokens, dim, trees, experts in SIZES:
        arguments = {name: each.double() for name, each in drawn(tokens, dim, trees, experts).items()}
        grads = torch.randn(tokens, experts), torch.randn(tokens, trees, experts)
        got, expected = (gate_and_gradients(arguments, grads, each, gamma=GAMMA) for each in ("cpu", "reference"))
        for name, each in got.items():
            assert relative_error(each, expected[name]) <= 1e-10, (experts, name)


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
    monkeypatch.setattr(tree_gate_products_cpu, "PACKING", 40)
    assert not passes_over(arguments, GAMMA)


def test_tokens_that_were_not_asked_first():
    """Every fourth token is sampled. Sampled tokens saturate most nodes; the others reach all leaves."""
    arguments = drawn(1024, 16, 2, 64, bias=False)
    arguments["x"][torch.arange(1024) % 4 != 0] *= 1e-3
    assert not passes_over(arguments, GAMMA)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("name", ["x", "split_weight", "leaf_weight", "split_bias", "leaf_bias"])
def test_a_product_that_could_be_nan_is_made(name, value):
    """The value is the last element of x, or of a weight or bias in the last branch, which not all tokens reach."""
    arguments = drawn(200, 20, 2, 64, bias="bias" in name)
    assert passes_over(arguments, GAMMA)
    arguments[name][(-1,) * arguments[name].dim()] = value
    found = [mk.tree_gate(**arguments, gamma=GAMMA, backend=each) for each in ("cpu", "reference")]
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got.isnan(), expected.isnan())


def test_same_bits_whatever_the_threads_and_strides():
    """Gradients to nodes above the branches are set to 0, because the order of the sums with them may depend on the
    number of threads."""
    arguments = drawn(700, 40, 3, 64)
    assert passes_over(arguments, GAMMA)
    above = tree_gate_products_cpu._nodes_above(arguments["leaf_weight"])
    grads = torch.randn(700, 64), torch.randn(700, 3, 64)
    strided = {name: torch.stack([each, each], -1)[..., 0] for name, each in arguments.items()}
    strided["x"] = padded(arguments["x"])
    found = []
    for count, given in ((1, arguments), (2, arguments), (3, arguments), (1, strided)):
        x, split_weight, leaf_weight, split_bias, leaf_bias = given.values()
        with threads(count):
            outs = operators.tree_gate_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, GAMMA, "", "cpu")
            dsplit, dleaf = operators.tree_gate_bwd(*grads, *outs[2:], GAMMA, "", "cpu")
            dsplit[:, :, :above] = 0
            logits = outs[2] if given is arguments else torch.stack([outs[2], outs[2]], -1)[..., 0]
            into = dsplit, dleaf, logits, x, split_weight, leaf_weight, GAMMA, [True] * 3, "cpu"
            found.append([*outs, *operators.tree_gate_logits_bwd(*into)])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_who_reaches_a_branch_is_read_where_it_stands():
    """Backward passes a strided view of the pre-activations; a token that _reached missed would get no gradient."""
    top = torch.randn(90, 2, 63)[:, :, :3]
    strided, own = (tree_gate_products_cpu._reached(cpu, each, GAMMA, 1.0) for each in (top, top.contiguous()))
    assert torch.equal(strided.offsets, own.offsets)
    reached = int(own.offsets[-1])
    assert torch.equal(strided.token[:reached], own.token[:reached])


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 10.0])
def test_gradients_are_finite_at_every_scale(gamma):
    for scale in (1e-6, 1.0, 1e6):
        arguments = drawn(200, 20, 2, 64)
        arguments["x"] *= scale
        grads = torch.randn(200, 64), torch.randn(200, 2, 64)
        for name, each in gate_and_gradients(arguments, grads, "cpu", gamma=gamma).items():
            assert each.isfinite().all(), (scale, name)
