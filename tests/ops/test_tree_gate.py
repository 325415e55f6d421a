"""tree_gate: values, gradients and errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.ops._define import operators
from tests.helpers.targets import on_every_target
from tests.helpers.tree_gate import (
    DTYPES,
    INF,
    NAN,
    PARITIES,
    D,
    assert_near,
    drawn,
    gate_and_gradients,
    identity,
    products_and_tree_in_one_kernel,
    references,
    shapes,
    unsupported,
)
from tests.ptx import session

target = on_every_target("tree_gate")


def step(t: float, gamma: float) -> float:
    u = min(max(t / gamma + 0.5, 0.0), 1.0)
    return u * u * (3 - 2 * u)


def leaves(split: list[float], gamma: float, node: int = 0, prob: float = 1.0) -> list[float]:
    """Leaf probabilities from left to right, in Python's floats. `node` has children 2 node + 1 and 2 node + 2."""
    if node >= len(split):
        return [prob]
    h = step(split[node], gamma)
    return leaves(split, gamma, 2 * node + 1, prob * h) + leaves(split, gamma, 2 * node + 2, prob * (1 - h))


def gates_by_hand(split: list[list[float]], leaf: list[list[float]], gamma: float, weigh=lambda p: p) -> list[float]:
    """Eq. 3 of COMET trees for one token, in Python's floats. weigh(p) replaces p, as in a parity mode."""
    masses = [
        [weigh(p) * math.exp(a) for p, a in zip(leaves(s, gamma), row, strict=True)]
        for s, row in zip(split, leaf, strict=True)
    ]
    total = sum(map(sum, masses))
    return [sum(column) / total for column in zip(*masses, strict=True)]


def test_leaves_are_the_experts_from_left_to_right(target):
    """Saturated nodes lead token i to leaf i alone. Then gate i is exactly 1, also with errors of PTX's .approx
    instructions, which session.seed draws."""
    for experts in range(2, 18):
        split = torch.zeros(experts, 1, experts - 1)
        ids = []
        for node, row in zip(walk(0, experts), split[:, 0], strict=True):
            ids.append(node)
            while node:
                parent = (node - 1) // 2
                row[parent] = 9.0 if node == 2 * parent + 1 else -9.0
                node = parent
        if experts == 5:
            assert ids == [7, 8, 4, 5, 6]
        arguments = identity(split.to(target.device), torch.randn(experts, 1, experts, device=target.device))
        with session.seed(experts):
            gates, probs = mk.tree_gate(**arguments, gamma=1.0, backend=target.backend)
        assert torch.equal(gates.cpu(), torch.eye(experts))
        assert torch.equal(probs[:, 0].cpu(), torch.eye(experts))


def walk(node: int, experts: int) -> list[int]:
    """Heap ids of the leaves at or below `node`, from left to right."""
    if node >= experts - 1:
        return [node]
    return walk(2 * node + 1, experts) + walk(2 * node + 2, experts)


# Pre-activations of two trees of five experts. At gamma = 1, two nodes of SATURATED's first tree are saturated.
PLAIN = [[0.1, -0.2, 0.3, 0.0], [-0.4, 0.25, 0.05, -0.1]]
SATURATED = [[0.6, -0.2, 0.3, -0.5], [-0.4, 0.25, 0.05, -0.1]]
LEAF = [[0.5, -1.0, 2.0, 0.0, 1.5], [1.0, 0.3, -0.7, 0.9, -0.2]]


def test_five_experts_by_hand(target):
    dtype = torch.float64 if target.backend in ("reference", "cpu") else torch.float32
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    cases = [(split[:trees], LEAF[:trees]) for split in (PLAIN, SATURATED) for trees in (1, 2)]
    weighers = {
        None: lambda p: p,
        "tf": lambda p: p + 1e-8 if p > 0 else 0.0,
        "bert": lambda p: p + 1e-6 if p >= 1e-5 else 0.0,
    }
    for (split, leaf), parity in itertools.product(cases, PARITIES):
        if target.compiles and len(split) == 1 and parity is not None:
            continue  # test_tree_gate_edges.py has one tree with a parity mode, to save compilations
        arguments = identity(*(torch.tensor([each], dtype=dtype, device=target.device) for each in (split, leaf)))
        gates, probs = mk.tree_gate(**arguments, gamma=1.0, parity=parity, backend=target.backend)
        expected = torch.tensor(gates_by_hand(split, leaf, 1.0, weighers[parity]), dtype=torch.float64)
        assert (gates[0].cpu().double() - expected).abs().max() < tolerance
        by_hand = torch.tensor([leaves(each, 1.0) for each in split], dtype=torch.float64)
        assert (probs[0].cpu().double() - by_hand).abs().max() < tolerance
    # The last case: in SATURATED's first tree the root goes left, and node 3 goes right.
    h = step(-0.2, 1.0)
    assert probs[0, 0].tolist() == pytest.approx([0, h, 1 - h, 0, 0], abs=tolerance)
    assert probs[0, 0][[0, 3, 4]].eq(0).all()


@pytest.mark.parametrize("parity", PARITIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_and_gradients(target, dtype, parity):
    floor = (1 if dtype.itemsize == 2 else 8) * torch.finfo(dtype).eps
    if reason := unsupported(target, parity):
        assert parity in reason
        pytest.skip(reason)
    sizes = shapes(target)
    if target.compiles:
        if parity is not None and dtype != torch.float32:
            pytest.skip("kernels use the constants of a parity mode in float32, whatever the dtype")
        # In 16 bits also test_products_and_tree_in_one_kernel, of up to 64 experts.
        sizes = {torch.float32: sizes, torch.bfloat16: sizes[1:2], torch.float16: sizes[0:1]}[dtype]
    for size in sizes if parity is None else sizes[1::6]:
        arguments = {name: each.to(dtype) for name, each in drawn(*size, device=target.device).items()}
        tokens, _, trees, experts = size
        grads = tuple(
            torch.randn(shape, device=target.device) for shape in ((tokens, experts), (tokens, trees, experts))
        )
        settings = {"gamma": 0.7, "parity": parity}
        got = gate_and_gradients(arguments, grads, target.backend, **settings)
        same = references(arguments, grads, **settings)
        wide = {name: each.double() for name, each in arguments.items()}
        exact = gate_and_gradients(wide, grads, "reference", **settings)
        for name, each in got.items():
            assert each.dtype == dtype
            # Gradients may err more: they are sums of terms of both signs.
            output = name in ("gates", "leaf_probs")
            of_dtype = [reference[name] for reference in same]
            assert_near(each, of_dtype, exact[name], floor if output else 3 * floor, (size, name))
        # A cast to float16 turns probabilities below 3e-8 into 0.
        if dtype != torch.float16:
            assert torch.equal(got["leaf_probs"] == 0, same[0]["leaf_probs"] == 0)


def test_one_output_at_a_time(target):
    arguments = drawn(4, 6, 2, 6, device=target.device)
    for index in range(2):
        found = []
        for backend in (target.backend, "reference"):
            leaf = {name: each.clone().requires_grad_() for name, each in arguments.items()}
            output = mk.tree_gate(**leaf, gamma=1.0, backend=backend)[index]
            loss = (output * (output + 1e-6).log()).sum()
            found.append(torch.autograd.grad(loss, list(leaf.values()), allow_unused=True, materialize_grads=True))
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_gradients_are_finite_at_every_scale(target):
    scales = (1e-6, 1.0, 1e6) if target.executed else (1e-6, 1e-3, 1e-1, 1.0, 10.0, 1e3, 1e6)
    for of_split, of_leaf, gamma in itertools.product(scales, scales, (1e-3, 0.1, 10.0)):
        if target.executed and of_split != of_leaf:
            continue
        arguments = drawn(6, 4, 2, 7 if target.executed else 23, device=target.device)
        arguments["split_weight"] *= of_split
        arguments["leaf_weight"] *= of_leaf
        for name in ("x", "split_weight"):
            scaled = arguments | {name: arguments[name] * of_split}
            grads = torch.randn(6, scaled["leaf_weight"].shape[1]), torch.randn(6, *scaled["leaf_weight"].shape[:2])
            grads = tuple(each.to(target.device) for each in grads)
            for output, each in gate_and_gradients(scaled, grads, target.backend, gamma=gamma).items():
                assert each.isfinite().all(), (of_split, of_leaf, gamma, name, output)


def test_next_to_the_clamp_with_everything_at_stake(target):
    """Nodes are as near to saturation as float32 allows, and the leaf that is hardly reached has by far the largest
    logit: an overflow times 0 would be NaN."""
    edge = torch.nextafter(torch.tensor(-0.5), torch.tensor(0.0)).item()
    for experts in (2, 4, 8):  # leaf 0 has probability 3e-15, 7e-30, 2e-44
        split = torch.full((2, 1, experts - 1), edge, device=target.device)
        leaf = torch.zeros(2, 1, experts, device=target.device)
        leaf[0, 0, 0], leaf[1, 0, 0] = 300.0, 1e6
        grads = torch.randn(2, experts, device=target.device), torch.randn(2, 1, experts, device=target.device)
        found = gate_and_gradients(identity(split, leaf), grads, target.backend, gamma=1.0)
        for name, each in found.items():
            assert each.isfinite().all(), (experts, name)
        # The softmax leaves out leaves whose probability is below the smallest normal number, 1.2e-38.
        assert found["gates"][:, 0].tolist() == [1.0, 1.0] if experts < 8 else [0.0, 0.0]


def test_saturated_nodes_get_no_gradient_and_leaves_out_of_reach_do_not_count(target):
    split = torch.tensor([[[0.8, 0.1, -0.5]], [[0.5, -3.0, 0.2]]], device=target.device)  # tokens 0 and 1, one tree
    leaf = torch.tensor([[[0.3, -0.2, 900.0, 800.0]], [[INF, 0.4, NAN, -INF]]], device=target.device)
    # Biases hold the logits, for one token at a time: a product of a one-hot x with NaN would be NaN for all tokens.
    for token in range(2):
        weights = {"split_weight": torch.zeros(1, 3, 2), "leaf_weight": torch.zeros(1, 4, 2)}
        arguments = {"x": torch.zeros(1, 2)} | weights
        arguments = {name: each.to(target.device) for name, each in arguments.items()}
        arguments |= {"split_bias": split[token], "leaf_bias": leaf[token]}
        grads = torch.tensor([[1.0, 2.0, -3.0, 4.0]]), torch.tensor([[[1.0, -2.0, 3.0, 5.0]]])
        found = gate_and_gradients(arguments, tuple(g.to(target.device) for g in grads), target.backend, gamma=1.0)
        gates, to_split, to_leaf = (found[name].cpu() for name in ("gates", "split_bias", "leaf_bias"))
        if token == 0:
            h = step(0.1, 1.0)
            q = h * math.exp(0.3) / (h * math.exp(0.3) + (1 - h) * math.exp(-0.2))
            torch.testing.assert_close(gates, torch.tensor([[q, 1 - q, 0.0, 0.0]]))
            torch.testing.assert_close(to_leaf[0], q * (1 - q) * torch.tensor([-1.0, 1.0, 0.0, 0.0]))
            slope = 6 * 0.6 * 0.4
            # The loss q + 2 * (1 - q) + h - 2 * (1 - h) has the derivative 3 - dq/dh with respect to h.
            expected = slope * (-q * (1 - q) / (h * (1 - h)) + 3)
            torch.testing.assert_close(to_split[0], torch.tensor([0.0, expected, 0.0]))
        else:
            assert gates.tolist() == [[0.0, 1.0, 0.0, 0.0]]  # leaf 0 has an infinite logit and probability 0
            assert not to_leaf.any()
            assert not to_split.any()


@pytest.mark.parametrize("experts", [5, 64])
def test_gpu_kernels_round_their_results(target, experts):
    if target.backend not in ("triton", "cuda"):
        pytest.skip("only GPU kernels round; C++ kernels return float32, which torch rounds")
    given = [each.bfloat16() for each in drawn(8, 16, 1, experts, device=target.device).values()]
    gates, leaf_probs, *_ = operators.tree_gate_fwd(*given, 1.0, "", target.backend)
    assert (gates.dtype, leaf_probs.dtype) == (torch.bfloat16, torch.bfloat16)


def test_views_are_read(target):
    arguments = drawn(6, 8, 2, 5, device=target.device)
    shaped = {name: torch.stack([each, each], -1)[..., 0] for name, each in arguments.items()}  # last stride 2
    grads = torch.randn(5, 6, device=target.device).t(), torch.randn(5, 2, 6, device=target.device).permute(2, 1, 0)
    plain = gate_and_gradients(arguments, grads, target.backend, gamma=1.0)
    for name, each in gate_and_gradients(shaped, grads, target.backend, gamma=1.0).items():
        torch.testing.assert_close(each, plain[name])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("parity", PARITIES)
def test_derivative_in_float64(backend, parity):
    if backends.missing(backend, "tree_gate"):
        pytest.skip(str(backends.missing(backend, "tree_gate")))
    for experts in (5,) if parity else (2, 11):
        arguments = {name: each.double() for name, each in drawn(2, 3, 2, experts).items()}
        names, values = list(arguments), [each.requires_grad_() for each in arguments.values()]

        def gate(*each, names=names):
            return mk.tree_gate(**dict(zip(names, each, strict=True)), gamma=2.0, parity=parity, backend=backend)

        assert torch.autograd.gradcheck(gate, values)


def test_same_bits_whatever_the_threads():
    if backends.missing("cpu", "tree_gate"):
        pytest.skip(str(backends.missing("cpu", "tree_gate")))
    torch.manual_seed(3)
    split, leaf, grad = torch.randn(700, 2, 63), torch.randn(700, 2, 64), torch.randn(700, 64)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            kernels = backends.load("cpu", "tree_gate")
            found.append(
                (*kernels.tree_gate_fwd(split, leaf, 1.0, ""), *kernels.tree_gate_bwd(grad, None, split, leaf, 1.0, ""))
            )
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_opcheck(backend):
    if backends.missing(backend, "tree_gate"):
        pytest.skip(str(backends.missing(backend, "tree_gate")))
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    ops, arguments = torch.ops.moe_kernels, [each.bfloat16() for each in drawn(3, 4, 2, 5, device=device).values()]
    opcheck(ops.tree_gate_fwd.default, (*arguments, 1.0, "", backend))
    gates, probs, *logits = ops.tree_gate_fwd(*arguments, 1.0, "", backend)
    for grad in (probs, None):
        opcheck(ops.tree_gate_bwd.default, (gates, grad, *logits, 1.0, "", backend))
    if not backends.missing(backend, "tree_route"):
        opcheck(ops.tree_route_fwd.default, (*arguments, 1.0, backend))


@pytest.mark.slow
def test_compiles_whole_forward_and_backward():
    if backends.missing("cpu", "tree_gate"):
        pytest.skip(str(backends.missing("cpu", "tree_gate")))

    def loss(arguments):
        gates, probs = mk.tree_gate(**arguments, gamma=1.0)
        return gates[:, 0].sum() - (probs * (probs + 1e-6).log()).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5):
        arguments = {name: each.requires_grad_() for name, each in drawn(tokens, 4, 2, 5).items()}
        expected = torch.autograd.grad(loss(arguments), list(arguments.values()))
        for got, want in zip(torch.autograd.grad(compiled(arguments), list(arguments.values())), expected, strict=True):
            torch.testing.assert_close(got, want)


def test_flops_are_those_of_the_products():
    tokens, dim, trees, experts = 7, 3, 2, 5
    arguments = {name: each.requires_grad_() for name, each in drawn(tokens, dim, trees, experts).items()}
    forward = 2 * tokens * dim * trees * (2 * experts - 1)
    for backend in ("reference", "cpu"):
        if backends.missing(backend, "tree_gate"):
            continue
        with FlopCounterMode(display=False) as counter:
            gates, _ = mk.tree_gate(**arguments, gamma=1.0, backend=backend)
            assert counter.get_total_flops() == forward
            gates[:, 0].sum().backward()
        assert counter.get_total_flops() == 3 * forward


def test_autocast_does_not_reach_in():
    arguments = drawn(3, 4, 2, 5)
    plain = mk.tree_gate(**arguments, gamma=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, plain, mk.tree_gate(**arguments, gamma=1.0)))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"gamma": 0.0}, ValueError, "gamma must be above 0 and finite, got 0.0"),
        ({"gamma": INF}, ValueError, "gamma must be above 0 and finite, got inf"),
        (
            {"gamma": 1e300},
            ValueError,
            r"gamma must be above 0 and finite in float32, .* to 8.507e\+37 .*; got 1e\+300",
        ),
        ({"gamma": 1e-40}, ValueError, "gamma must be above 0 and finite in float32, from 1.175e-38 .* got 1e-40"),
        ({"gamma": "1"}, TypeError, "gamma must be a number, got str"),
        ({"x": D["x"][0]}, ValueError, r"x must be \(T, P\), got shape \(4,\)"),
        ({"x": D["x"].long()}, TypeError, "x must have dtype"),
        ({"x": D["x"].double()}, TypeError, "split_weight must have dtype float64; got float32"),
        ({"split_weight": D["split_weight"][0]}, ValueError, r"split_weight must be \(K, E-1, P\), got"),
        ({"split_weight": D["split_weight"][:, :0]}, ValueError, "E >= 2 experts"),
        ({"split_weight": D["split_weight"][:0]}, ValueError, "K >= 1 trees"),
        ({"split_weight": D["split_weight"][:, :, 1:]}, ValueError, "P = 4 as x has"),
        ({"leaf_weight": D["leaf_weight"][:, 1:]}, ValueError, r"leaf_weight must be \(K, E, P\) = \(2, 5, 4\) on"),
        (
            {"split_bias": D["split_bias"][0]},
            ValueError,
            r"split_bias must be \(K, E-1\) = \(2, 4\) on .*; got \(4,\)",
        ),
        ({"leaf_bias": D["leaf_bias"].half()}, TypeError, "leaf_bias must have dtype float32; got float16"),
        ({"leaf_weight": [1.0]}, TypeError, "leaf_weight must be a Tensor, got list"),
    ],
)
@pytest.mark.parametrize("op", [mk.tree_gate, mk.tree_route], ids=lambda op: op.__name__)
def test_bad_input_is_named(op, change, error, words):
    with pytest.raises(error, match=f"^{op.__name__}: .*{words}"):
        op(**{**D, "gamma": 1.0, **change})


def test_unknown_parity_and_bad_steps_are_named():
    with pytest.raises(ValueError, match="tree_gate: parity must be one of None, 'tf', 'bert'; got 'comet'"):
        mk.tree_gate(**D, gamma=1.0, parity="comet")
    with pytest.raises(ValueError, match="smooth_step: gamma must be above 0"):
        mk.smooth_step(D["x"], -1.0)
    with pytest.raises(TypeError, match="smooth_step: t must have dtype"):
        mk.smooth_step(D["x"].long(), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_products_and_tree_in_one_kernel(dtype):
    products_and_tree_in_one_kernel(dtype)
