"""tree_gate with extreme inputs and with views."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.ops.tree_gate import tree_gate_fwd
from tests.helpers.inputs import behind_one, each_alone, far_apart, framed
from tests.helpers.targets import REFERENCE, Target, on_every_target
from tests.helpers.tree_gate import PARITIES, D, drawn, gate_and_gradients, identity, unsupported

INF, NAN = math.inf, math.nan

target = on_every_target("tree_gate")


def assert_agrees(target: Target, arguments: dict[str, torch.Tensor], parity: str | None) -> None:
    """Outputs and gradients are near the definition's, for random gradients to gates and leaf probabilities."""
    tokens, (trees, experts, _) = arguments["x"].shape[0], arguments["leaf_weight"].shape
    grads = torch.randn(tokens, experts), torch.randn(tokens, trees, experts)
    grads = tuple(each.to(target.device) for each in grads)
    got, expected = (
        gate_and_gradients(arguments, grads, each, gamma=1.0, parity=parity) for each in (target.backend, "reference")
    )
    for name, each in got.items():
        torch.testing.assert_close(each, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("parity", PARITIES)
@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_leaf_logits_far_from_zero(target, shift, parity):
    """Padding must not enter the largest logit: with logits near -200, a 0 would make every exponential 0."""
    if reason := unsupported(target, parity):
        pytest.skip(reason)
    sizes = ((3, 2, 3), (5, 1, 6), (3, 1, 33), (3, 2, 12))
    if target.compiles:
        sizes = ((3, 2, 5), (5, 2, 6), (3, 1, 40), (3, 2, 12))
        sizes = sizes if parity is None else sizes[parity == "tf" :: 2]
    for tokens, trees, experts in sizes:
        arguments = drawn(tokens, 4, trees, experts, device=target.device)
        arguments["leaf_bias"] += shift
        arguments["split_bias"][:, 0] += 1.0  # most roots are then saturated
        assert_agrees(target, arguments, parity)


@pytest.mark.parametrize("parity", PARITIES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_node_or_leaf_that_is_not_finite(target, value, parity):
    if reason := unsupported(target, parity):
        pytest.skip(reason)
    sizes = (3, 6, 12) if target.backend == "cuda" else (3, 6)
    for experts, of_root in itertools.product(sizes, (0.1, 50.0, -50.0)):
        for name, column in [("split_bias", i) for i in range(experts - 1)] + [
            ("leaf_bias", i) for i in range(experts)
        ]:
            arguments = drawn(2, 4, 2, experts, device=target.device)
            arguments["split_bias"][:, 0] = of_root
            arguments[name][column % 2, column] = value
            found = [
                mk.tree_gate(**arguments, gamma=1.0, parity=parity, backend=each)
                for each in (target.backend, "reference")
            ]
            for got, expected in zip(*found, strict=True):
                torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda m, at=(name, column): f"{at}: {m}")


@pytest.mark.parametrize("parity", PARITIES)
def test_a_tree_whose_leaves_are_all_forbidden(target, parity):
    """The largest logit of such a tree is -inf, which must not make gates and gradients of the other tree NaN."""
    if reason := unsupported(target, parity):
        pytest.skip(reason)
    sizes = (6,) if target.compiles or target.interpreted else (6, 12, 33)
    for experts, forbidden in itertools.product(sizes, (0, 1)):
        arguments = drawn(3, 4, 2, experts, device=target.device)
        arguments["leaf_bias"][forbidden] = -INF
        assert_agrees(target, arguments, parity)


@pytest.mark.parametrize(("parity", "probabilities"), [(None, (1e-14, 1e-12, 1e-4)), ("tf", (3e-9, 3e-8, 1e-6))])
def test_leaves_hardly_reached(target, parity, probabilities):
    hardly_reached(target, parity, probabilities)


def test_leaves_on_either_side_of_the_least_probability(target):
    """parity="bert" adds 1e-6 to probabilities from 1e-5 on, and leaves out smaller ones."""
    hardly_reached(target, "bert", (0.9e-5, 1.1e-5, 3.7e-5, 1e-3))


def hardly_reached(target: Target, parity: str | None, probabilities: tuple[float, ...]) -> None:
    """Token i reaches node 1 with a probability of about p = probabilities[i]; a leaf below it has the logit -log p."""
    if reason := unsupported(target, parity):
        pytest.skip(reason)
    distance = torch.tensor(probabilities, dtype=torch.float64).div(3).sqrt()
    # With 32 leaves, 0 to 7 lie below node 3, 8 to 15 below node 4 and 16 to 31 below node 2. All nodes but 0 and 1
    # send every token to the left, so only 0, 8 and 16 are reached. The other leaves have the largest logits.
    for experts in (3,) if target.compiles else (3, 32):
        split = torch.full((len(probabilities), 1, experts - 1), 9.0)
        split[:, 0, 0], split[:, 0, 1] = distance - 0.5, 0.2  # S(distance - 0.5) ~ 3 * distance^2 = p
        leaf = torch.full((len(probabilities), 1, experts), 1000.0)
        reached = [0, 1, 2] if experts == 3 else [0, 8, 16]
        leaf[:, 0, reached] = torch.stack([0 * distance, -torch.tensor(probabilities).log(), 0 * distance], -1).float()
        arguments = identity(split.to(target.device), leaf.to(target.device))
        grads = torch.randn(len(probabilities), experts), torch.randn(len(probabilities), 1, experts)
        got = gate_and_gradients(
            arguments, tuple(g.to(target.device) for g in grads), target.backend, gamma=1.0, parity=parity
        )
        wide = {name: each.double().cpu() for name, each in arguments.items()}
        exact = gate_and_gradients(wide, grads, "reference", gamma=1.0, parity=parity)
        for name in ("gates", "split_weight", "leaf_weight"):
            torch.testing.assert_close(got[name].cpu().double(), exact[name], rtol=2e-4, atol=1e-6)


def test_a_leaf_of_subnormal_probability_counts_as_1e_8(target):
    """parity="tf" adds 1e-8 to every probability above 0, and leaves out only leaves of probability 0."""
    if reason := unsupported(target, "tf"):
        pytest.skip(reason)
    split, leaf = torch.full((1, 1, 7), -0.5), torch.zeros(1, 1, 8)
    split[..., [0, 1, 3]], leaf[..., 0] = -0.49999994, 20.0  # three nodes go left with probability 1e-14
    arguments = identity(split.to(target.device), leaf.to(target.device))
    gates, leaf_probs = mk.tree_gate(**arguments, gamma=1.0, parity="tf", backend=target.backend)
    expected, _ = mk.tree_gate(**arguments, gamma=1.0, parity="tf", backend="reference")
    assert 0 < leaf_probs[0, 0, 0] < torch.finfo(torch.float32).tiny
    torch.testing.assert_close(gates, expected)


@pytest.mark.parametrize("depth", [4, 5])
def test_leaves_of_the_least_probability_that_counts(target, depth):
    """Two leaves with equal logits, each reached with probability 2.8e-38, and no others: both gates are one half. The
    softmax divides by their sum, 5.6e-38. A large gradient that is divided first overflows; a small one that is
    multiplied by the probability first underflows, and digits are lost."""
    if target is REFERENCE:
        pytest.skip("autograd overflows in the definition")
    if depth == 5 and target.executed and target.backend == "triton":
        pytest.skip("depth 5 is for CUDA, which has another kernel for 32 leaves; Triton would compile again")
    split, leaf = torch.zeros(1, 1, 2**depth - 1), torch.full((1, 1, 2**depth), -1000.0)
    split[..., [0, 1, 3]] = 12 * 2.0**-25 - 0.5  # three nodes go left with probability 3.8e-13
    split[..., 7] = 9.0 if depth == 5 else 0.0
    leaf[..., :2] = 0.0
    here = identity(split.to(target.device), leaf.to(target.device))
    # GPU kernels sum probability * gradient before they divide: with gradients of 1e-5 these products underflow.
    for size in (100.0, 1e-5) if target.backend == "cpu" else (100.0,):
        grads = torch.zeros(1, 2**depth), torch.zeros(leaf.shape)
        grads[0][0, :2] = size * torch.tensor([1.0, -0.5])
        got = gate_and_gradients(here, tuple(each.to(target.device) for each in grads), target.backend, gamma=1.0)
        exact = gate_and_gradients(identity(split.double(), leaf.double()), grads, "reference", gamma=1.0)
        assert exact["leaf_weight"].flatten()[:2].tolist() == pytest.approx([0.375 * size, -0.375 * size])
        for name in ("gates", "split_weight", "leaf_weight"):
            torch.testing.assert_close(got[name].cpu().double(), exact[name], rtol=1e-4, atol=1e-6 * size)


def test_each_gradient_alone_is_the_same(target):
    arguments = drawn(5, 4, 2, 6, device=target.device)
    grads = torch.randn(5, 6, device=target.device), torch.randn(5, 2, 6, device=target.device)
    every = gate_and_gradients(arguments, grads, target.backend, gamma=1.0)

    def both(**given):
        gates, probs = mk.tree_gate(**given, gamma=1.0, backend=target.backend)
        return torch.cat([gates.flatten(), probs.flatten()])

    alone = each_alone(both, arguments, torch.cat([each.flatten() for each in grads]))
    for name, each in alone.items():
        torch.testing.assert_close(each, every[name], msg=name)


def test_what_lies_around_the_inputs_is_not_read(target):
    arguments = drawn(5, 8, 2, 6, device=target.device)
    grads = torch.randn(5, 6, device=target.device), torch.randn(5, 2, 6, device=target.device)
    plain = gate_and_gradients(arguments, grads, "reference", gamma=1.0)
    around = {name: framed(each) for name, each in arguments.items()}
    apart = arguments | {"x": far_apart(arguments["x"])}
    for given in (around, apart):
        for name, each in gate_and_gradients(given, tuple(map(framed, grads)), target.backend, gamma=1.0).items():
            torch.testing.assert_close(each, plain[name], rtol=1e-4, atol=1e-5, msg=name)


def test_gradients_that_start_anywhere(target):
    if target.backend == "triton":
        pytest.skip("Triton compiles another kernel for another alignment")
    arguments = drawn(5, 4, 1, 128, device=target.device)
    grads = torch.randn(5, 128, device=target.device), torch.randn(5, 1, 128, device=target.device)
    plain = gate_and_gradients(arguments, grads, target.backend, gamma=1.0)
    for moved in ((behind_one(grads[0]), grads[1]), (grads[0], behind_one(grads[1]))):
        for name, each in gate_and_gradients(arguments, moved, target.backend, gamma=1.0).items():
            torch.testing.assert_close(each, plain[name], msg=name)


def test_nan_stays_with_its_token(target):
    arguments = drawn(3, 4, 2, 6, device=target.device)
    arguments["x"][1, 2] = NAN
    for backend in (target.backend, "reference"):
        gates, _ = mk.tree_gate(**arguments, gamma=1.0, backend=backend)
        assert gates[1].isnan().all()
        assert gates[[0, 2]].isfinite().all()


def test_nan_in_a_node_far_above_its_leaves(target):
    """Kernels for large trees compute the upper levels apart from the lower ones."""
    for column in (0, 2, 12, 40):  # nodes of the first, second, fourth and sixth level
        arguments = drawn(2, 4, 2, 64, device=target.device)
        arguments["split_bias"][1, column] = NAN
        found = [mk.tree_gate(**arguments, gamma=1.0, backend=each) for each in (target.backend, "reference")]
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, equal_nan=True, msg=str(column))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_narrowest_and_the_widest_step(target, dtype):
    if dtype == torch.float64 and target.backend not in ("cpu", "reference"):
        pytest.skip("kernels for GPUs do not take float64")
    arguments = {name: each.to(target.device, dtype) for name, each in D.items()}
    for gamma in (torch.finfo(dtype).tiny, 1 / torch.finfo(dtype).tiny):
        for op in (mk.tree_gate, mk.tree_route):
            if backends.unsupported(target.backend, op.__name__, target.device, dtype):
                continue
            found = op(**arguments, gamma=gamma, backend=target.backend)
            for got, expected in zip(found, op(**arguments, gamma=gamma, backend="reference"), strict=True):
                assert got.isfinite().all()
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_float32_are_those_of_torch(dtype, monkeypatch):
    """With Triton, torch.mm computes float32 products, so that torch's settings decide about TF32. In bfloat16, one
    fused kernel computes the products and gates of this tree."""
    pytest.importorskip("triton", reason="Triton is not installed")
    made = []
    kernels = SimpleNamespace(
        tree_gate_fits=backends.load("triton", "tree_gate").tree_gate_fits,
        tree_gate_fused_fwd=lambda *given: "fused",
        tree_gate_fwd=lambda split_logits, leaf_logits, gamma, mode: ("gates", "leaves"),
    )
    monkeypatch.setattr(backends, "load", lambda *given: kernels)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out=None: made.append((a.dtype, b.dtype)) or mm(a, b))
    x, split, leaf = (torch.randn(shape).to(dtype) for shape in ((3, 64), (1, 63, 64), (1, 64, 64)))
    found = tree_gate_fwd(x, split, leaf, None, None, 1.0, "", "triton")
    if dtype == torch.bfloat16:
        assert found == "fused"
        return
    assert made == 2 * [(torch.float32, torch.float32)]
    assert torch.equal(found[3], mm(x, leaf[0].t())[:, None])


@pytest.mark.parametrize("gamma", [1.0, 1.7, 5.8])
def test_the_smaller_share_of_a_node_is_as_exact_as_the_larger_one(target, gamma):
    """Up to the clamp on either side, where it is 0: not one less the larger share. Of 1.7 and 5.8 the product of
    gamma and 1 / gamma is not 1 in float32."""
    half = torch.tensor(gamma).item() / 2
    far = torch.tensor([half * (1 - 2.0**-place) for place in range(1, 18)] + [half, half * 1.5])
    t = torch.cat([far, -far])
    given = {"x": t[:, None], "split_weight": torch.ones(1, 1, 1), "leaf_weight": torch.zeros(1, 2, 1)}
    _, probs = mk.tree_gate(
        **{name: each.to(target.device) for name, each in given.items()}, gamma=gamma, backend=target.backend
    )
    wide = {name: each.double() for name, each in given.items()}
    _, expected = mk.tree_gate(**wide, gamma=torch.tensor(gamma).item(), backend="reference")
    probs, expected = probs.cpu().double(), expected.clone()
    clamped = t.abs() >= half
    assert ((probs == 0) == (clamped[:, None, None] & (expected < 0.5))).all()
    torch.testing.assert_close(probs[~clamped], expected[~clamped], rtol=1e-4, atol=0)


@pytest.mark.parametrize("trees", [1, 2, 4])
def test_the_gate_of_the_only_expert_in_reach_is_1(target, trees):
    """On GPUs exactly, for any logit of that leaf: they divide a sum by itself. Others multiply by its reciprocal."""
    tokens, expert = 150, 2
    given = {"x": torch.linspace(-3, 3, tokens)[:, None], "leaf_weight": torch.randn(trees, 4, 1)}
    given |= {"split_weight": torch.zeros(trees, 3, 1), "leaf_bias": torch.randn(trees, 4)}
    given["split_bias"] = torch.tensor([[-9.0, 0.1, 9.0]]).repeat(trees, 1)  # right, then left
    given = {name: each.to(target.device) for name, each in given.items()}
    gates, _ = mk.tree_gate(**given, gamma=1.0, backend=target.backend)
    exact = target.backend in ("triton", "cuda")
    expected = torch.eye(4)[expert].expand(tokens, 4)
    torch.testing.assert_close(gates.cpu(), expected, atol=0, rtol=0 if exact else 2.0**-22)
