"""tree_route: chosen experts, their weights, and statistics."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import moe_kernels as mk
from tests.helpers.inputs import behind_one, far_apart, framed, padded, shifted
from tests.helpers.targets import on_every_target
from tests.helpers.tree_gate import DTYPES, NAN, drawn, identity, shapes

target = on_every_target("tree_route")


def test_route_is_the_gate_of_saturated_trees(target):
    for size in shapes(target):
        for dtype in (torch.float32,) if target.executed else DTYPES:
            arguments = {name: each.to(dtype) for name, each in drawn(*size, device=target.device).items()}
            tokens, _, trees, experts = size
            weights, chosen, found = mk.tree_route(**arguments, gamma=1e-6, statistics=True, backend=target.backend)
            gates, probs = mk.tree_gate(**arguments, gamma=1e-6, backend="reference")
            certain = ~found.unsaturated.any(-1)
            assert certain.sum() >= tokens * 0.9
            assert weights.dtype == dtype
            assert chosen.dtype == found.visited.dtype == torch.int32
            assert found.unsaturated.dtype == torch.bool
            assert weights.shape == chosen.shape == found.visited.shape == (tokens, trees)
            dense = torch.zeros_like(gates).scatter_add_(1, chosen.clamp(min=0).long(), weights)
            allowed = 0.03 if dtype != torch.float32 else 1e-5  # bfloat16 numbers from 4 to 8 are multiples of 1/32
            torch.testing.assert_close(dense[certain], gates[certain], atol=allowed, rtol=allowed)
            depth = math.ceil(math.log2(experts))
            shallow = 2**depth - experts  # number of leaves one level up, on the right
            path = depth - (probs.argmax(-1) >= experts - shallow).int() * (shallow > 0)
            assert torch.equal(found.visited[certain].long(), path[certain].long())


def test_route_keeps_the_likeliest_leaf(target):
    for size in shapes(target):
        arguments = drawn(*size, device=target.device)
        weights, chosen, found = mk.tree_route(**arguments, gamma=3.0, statistics=True, backend=target.backend)
        expected, experts, least = mk.tree_route(**arguments, gamma=3.0, statistics=True, backend="reference")
        assert torch.equal(chosen, experts)
        torch.testing.assert_close(weights, expected)
        assert torch.equal(found.unsaturated, least.unsaturated)
        assert (found.visited >= least.visited).all()
        assert (found.visited <= size[3] - 1).all()
        _, probs = mk.tree_gate(**arguments, gamma=3.0, backend="reference")
        kept = torch.where(chosen < 0, probs.argmax(-1), chosen.long())  # -1: an earlier tree chose this expert
        assert torch.equal(probs.gather(-1, kept[..., None])[..., 0], probs.amax(-1))
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[:, 0]))


def test_route_by_hand(target):
    """Three trees of four experts: the first and the last choose expert 2. Then one tree, whose leaves are equally
    likely."""
    split = torch.tensor([[[-9.0, 0.0, 9.0], [9.0, 9.0, 0.0], [-9.0, 0.0, 9.0]]], device=target.device)
    leaf = torch.tensor([[[0.0, 0.0, 1.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]]], device=target.device)
    weights, chosen, found = mk.tree_route(**identity(split, leaf), gamma=1.0, statistics=True, backend=target.backend)
    assert chosen.tolist() == [[2, 0, -1]]
    assert found.visited.tolist() == [[2, 2, 2]]
    assert not found.unsaturated.any()
    total = math.exp(1.0) + math.exp(2.0) + math.exp(0.5)
    expected = [(math.exp(1.0) + math.exp(0.5)) / total, math.exp(2.0) / total, 0.0]
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-6)
    arguments = identity(split[:, :1] * 0, leaf[:, :1])
    weights, chosen, found = mk.tree_route(**arguments, gamma=1.0, statistics=True, backend=target.backend)
    assert (weights.tolist(), chosen.tolist()) == ([[1.0]], [[0]])  # the left-most leaf
    assert found.unsaturated.tolist() == [[True]]
    assert len(mk.tree_route(**arguments, gamma=1.0, backend=target.backend)) == 2


def test_the_left_most_of_equal_leaves_although_another_is_met_first(target):
    """Leaves 0 and 16 have the largest probability, 27/32 * 5/32. A search in descending probability may meet leaf 16
    first, as node 2, above it, is likelier than node 1, above leaf 0."""
    nodes = torch.zeros(31)
    nodes[0], nodes[1], nodes[2] = -0.25, 0.25, -0.25
    for subtree in (3, 5):
        first, count = subtree, 1
        while first < 31:
            nodes[first : first + count] = 9.0
            first, count = 2 * first + 1, 2 * count
    zeros, bias = torch.zeros(1, 32, 1, device=target.device), nodes[None].to(target.device)
    x = torch.ones(1, 1, device=target.device)
    _, chosen = mk.tree_route(x, zeros[:, 1:], zeros, split_bias=bias, gamma=1.0, backend=target.backend)
    assert chosen.tolist() == [[0]]


def test_route_shows_nan(target):
    arguments = drawn(4, 4, 2, 6, device=target.device)
    arguments["x"][1, 2] = NAN
    arguments["leaf_bias"][1, 5] = NAN
    arguments["split_bias"][:, 0] = 50.0
    arguments["split_bias"][:, 2] = NAN  # node 2 is right of the root, which goes left: no effect
    got = mk.tree_route(**arguments, gamma=1.0, backend=target.backend)
    expected = mk.tree_route(**arguments, gamma=1.0, backend="reference")
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[0], expected[0], equal_nan=True)
    assert got[0][1, 0].isnan()
    assert got[1][1].tolist() == [0, -1]  # a NaN goes left
    assert got[0][[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("experts", [2, 3, 4, 5])
def test_every_combination_of_nodes(target, experts):
    """Among the combinations are ties of leaves, and NaN nodes as likely as the best leaf."""
    values = (0.0, 0.2, 9.0, -9.0, NAN) if experts < 5 else (0.0, 9.0, -9.0, NAN)
    leaf = torch.randn(1, experts)
    for nodes in itertools.product(values, repeat=experts - 1):
        arguments = {
            "x": torch.ones(1, 1),
            "split_weight": torch.zeros(1, experts - 1, 1),
            "leaf_weight": leaf[..., None].clone(),
            "split_bias": torch.tensor([nodes]),
        }
        arguments = {name: each.to(target.device) for name, each in arguments.items()}
        found = [
            mk.tree_route(**arguments, gamma=1.0, statistics=True, backend=each)
            for each in (target.backend, "reference")
        ]
        (weights, chosen, statistics), (expected, experts_of, least) = found
        assert torch.equal(chosen, experts_of), nodes
        torch.testing.assert_close(weights, expected, equal_nan=True, msg=str(nodes))
        assert torch.equal(statistics.unsaturated, least.unsaturated), nodes
        assert (least.visited <= statistics.visited).all(), nodes


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("sign", [1, -1])
def test_leaves_that_only_float64_tells_apart(backend, sign):
    """Where the smooth step is 1/2 its slope is 1.5: 1e-11 beside it the likelier leaf has 1e-11 more."""
    nodes = torch.tensor([[0.0, 1e-11 * sign, -9.0, 9.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
    for split, best in ((nodes, None), (1e-11 * sign * torch.ones(1, 1, dtype=torch.float64), int(sign < 0))):
        experts = split.shape[1] + 1
        given = {
            "x": torch.ones(1, 1, dtype=torch.float64),
            "split_weight": torch.zeros(1, experts - 1, 1, dtype=torch.float64),
            "leaf_weight": torch.zeros(1, experts, 1, dtype=torch.float64),
            "split_bias": split,
        }
        _, chosen = mk.tree_route(**given, gamma=1.0, backend=backend)[:2]
        probs = mk.tree_gate(**given, gamma=1.0, backend="reference")[1]
        assert chosen.item() == probs[0, 0].argmax().item()
        assert best is None or chosen.item() == best


SIZES = [(9, 5, 1, 6), (3, 150, 9, 5), (5, 70, 2, 6), (300, 3, 1, 4), (2, 264, 3, 7), (2, 3, 70, 40)]
LONG = [(2, 1100, 2, 3), (2, 1280, 1, 3)]  # more elements than Triton keeps in registers


@pytest.mark.parametrize("sizes", [*SIZES, *LONG], ids=str)
def test_sums_of_any_length_and_tokens_of_several_blocks(target, sizes):
    if target.interpreted and sizes[0] * sizes[2] > 100:
        pytest.skip("many tokens or trees, interpreted in four minutes")
    arguments = drawn(*sizes, device=target.device)
    arguments["leaf_bias"] -= 200.0
    expected = mk.tree_route(**arguments, gamma=1.0, backend="reference")
    places = [("x", place) for place in (torch.clone, framed, padded, shifted, far_apart)]
    of_trees = [(name, place) for name in arguments if name != "x" for place in (behind_one, padded)]
    # For each tensor that starts one element later Triton compiles a kernel: it does so for one tensor of each sizes.
    moved = ("split_weight", "x", "leaf_weight", "split_bias", "leaf_bias")[[*SIZES, *LONG].index(sizes) % 5]
    for name, place in (*places, *of_trees):
        if target.compiles and place in (shifted, behind_one) and name != moved:
            continue
        got = mk.tree_route(**arguments | {name: place(arguments[name])}, gamma=1.0, backend=target.backend)
        assert torch.equal(got[1], expected[1])
        torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-5)
    arguments = {name: each.bfloat16() for name, each in arguments.items()}
    expected, got = (
        mk.tree_route(**arguments | {"x": place(arguments["x"])}, gamma=1.0, backend=target.backend)
        for place in (torch.clone, padded)
    )
    assert all(map(torch.equal, got, expected))


def test_a_node_whose_smaller_share_rounding_hides_is_not_saturated(target):
    """In float32 1 - 3e-10 rounds to 1, so the best leaf is as likely as its parent."""
    split = torch.tensor([[[0.49999]], [[9.0]]], device=target.device)
    arguments = identity(split, torch.zeros(2, 1, 2, device=target.device))
    for backend in (target.backend, "reference"):
        weights, chosen, found = mk.tree_route(**arguments, gamma=1.0, statistics=True, backend=backend)
        assert (weights.tolist(), chosen.tolist()) == ([[1.0], [1.0]], [[0], [0]])
        assert found.unsaturated.tolist() == [[True], [False]]


def test_nan_in_one_of_several_trees(target):
    for tree in range(3):
        arguments = drawn(2, 4, 3, 5, device=target.device)
        arguments["leaf_bias"][tree] = NAN
        weights, chosen = mk.tree_route(**arguments, gamma=1.0, backend=target.backend)
        expected, experts = mk.tree_route(**arguments, gamma=1.0, backend="reference")
        assert torch.equal(chosen, experts)
        torch.testing.assert_close(weights, expected, equal_nan=True)


def test_logits_are_rounded_as_a_matrix_product_is(target):
    """257 rounds to 256 in bfloat16, so two trees have the same logit."""
    arguments = {
        "x": torch.ones(1, 2),
        "split_weight": torch.tensor([[[8.0, 1.0]], [[-8.0, -1.0]]]),
        "leaf_weight": torch.tensor([[[256.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [256.0, 0.0]]]),
    }
    arguments = {name: each.to(target.device, torch.bfloat16) for name, each in arguments.items()}
    for backend in (target.backend, "reference"):
        weights, chosen = mk.tree_route(**arguments, gamma=1.0, backend=backend)
        assert (weights.tolist(), chosen.tolist()) == ([[0.5, 0.5]], [[0, 1]])


def test_of_tokens_without_elements_the_biases_decide(target):
    arguments = drawn(3, 0, 2, 5, device=target.device)
    got, expected = (mk.tree_route(**arguments, gamma=1.0, backend=each) for each in (target.backend, "reference"))
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[0], expected[0])


def test_a_nan_is_likelier_than_one_met_after_it(target):
    """One NaN node has probability 0.56, more than the best leaf with 0.44, so the weight is NaN. The
    other NaN node has 0.28."""
    split = torch.tensor([[[0.04, NAN, 9.0, 0.0, 9.0, 9.0, 9.0, NAN]]], device=target.device)
    arguments = identity(split, torch.zeros(1, 1, 9, device=target.device))
    for backend in (target.backend, "reference"):
        weights, chosen = mk.tree_route(**arguments, gamma=1.0, backend=backend)
        assert weights.isnan().all()
        assert chosen.tolist() == [[5]]


def test_routes_have_no_gradient():
    arguments = {name: each.requires_grad_() for name, each in drawn(3, 4, 2, 5).items()}
    for backend in (None, "reference"):
        weights, experts = mk.tree_route(**arguments, gamma=1.0, backend=backend)
        assert not weights.requires_grad
        assert not experts.requires_grad
