"""The tree gate's kernels and the descent under the sanitizers, and their PTX in every order of warps. Their values on
all backends are tested in test_tree_gate.py."""

from __future__ import annotations

import pytest
import simt
import torch
from ptx import cuda_launch

import moe_kernels as mk

MISSING = simt.unavailable() or cuda_launch.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"simt: {MISSING}")

SEEDS = range(8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# (tokens, dim, trees, experts): lanes of a warp past the last token, 16-byte pieces and single elements, more trees
# than warps in a block, more experts than lanes, leaves without an expert on one lane and on several.
SHAPES = [(5, 8, 2, 3), (3, 13, 1, 8), (2, 16, 3, 37), (1, 24, 10, 5), (9, 8, 2, 24), (3, 8, 1, 72)]


def arguments(tokens: int, dim: int, trees: int, experts: int) -> dict[str, torch.Tensor]:
    """Multiples of 1/8, so that sums of products are exact in any order; about half of the nodes are saturated."""
    shapes = {"x": (tokens, dim), "split_weight": (trees, experts - 1, dim), "leaf_weight": (trees, experts, dim)}
    shapes |= {"split_bias": (trees, experts - 1), "leaf_bias": (trees, experts)}
    return {name: torch.randint(-4, 5, shape) / 8 for name, shape in shapes.items()}


def check_gate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Gates, leaf probabilities and gradients, no further from float64 than twice what the reference in dtype is."""
    given = arguments(*shape)
    results = {}
    for backend, wide in (("reference", torch.float64), ("reference", dtype), ("cuda", dtype)):
        leaf = {name: each.to(wide).requires_grad_() for name, each in given.items()}
        outputs = mk.tree_gate(**leaf, gamma=1.0, backend=backend)
        grads = [torch.linspace(-1, 1, each.numel()).view(each.shape).to(wide) for each in outputs]
        found = [*outputs, *torch.autograd.grad(outputs, list(leaf.values()), grads)]
        results[backend, wide] = [each.detach() for each in found]
    for exact, same, got in zip(*results.values(), strict=True):
        error, allowed = ((each.double() - exact).abs().max() for each in (got, same))
        assert error <= 2 * allowed + 8 * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max())), (shape, dtype)


def check_route(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = {name: each.to(dtype) for name, each in arguments(*shape).items()}
    for gamma in (0.25, 4.0):
        expected, experts, least = mk.tree_route(**given, gamma=gamma, statistics=True, backend="reference")
        weights, chosen, found = mk.tree_route(**given, gamma=gamma, statistics=True, backend="cuda")
        assert torch.equal(chosen, experts)
        assert torch.equal(found.unsaturated, least.unsaturated)
        assert (found.visited >= least.visited).all()
        torch.testing.assert_close(weights, expected, rtol=8 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_in_any_order_of_warps(seed: int) -> None:
    with cuda_launch.use(seed):
        for index, shape in enumerate(SHAPES):
            check_gate(shape, DTYPES[(index + seed) % 3])
            check_route(shape, DTYPES[(index + seed) % 3])


def test_under_sanitizers() -> None:
    with simt.use():
        for index, shape in enumerate(SHAPES):
            check_gate(shape, DTYPES[index % 3])
            check_route(shape, DTYPES[index % 3])


def test_rows_of_views_are_routed() -> None:
    given = arguments(6, 24, 2, 5)
    with simt.use():
        for gap in (1, 4, 8):
            x = torch.cat([torch.full((6, gap), torch.nan), given["x"]], 1)[:, gap:]
            _, experts = mk.tree_route(**given, gamma=1.0, backend="reference")
            assert torch.equal(mk.tree_route(**given | {"x": x}, gamma=1.0, backend="cuda")[1], experts)


def test_launchers_refuse() -> None:
    module = cuda_launch.module()
    # tokens, trees, experts
    for dtype, *sizes in ((0, -1, 1, 2), (0, 1, 0, 2), (0, 1, 1, 1), (0, 1, 1, 4097), (3, 1, 1, 2)):
        with pytest.raises(RuntimeError, match="tree_gate_fwd: CUDA error 1"):
            module.tree_gate_fwd(dtype, *[0] * 6, *sizes, 1.0, 0.0, 0.0, 0)
        with pytest.raises(RuntimeError, match="tree_gate_bwd: CUDA error 1"):
            module.tree_gate_bwd(dtype, *[0] * 8, *sizes, 1.0, 0.0, 0.0, 0)
    # tokens, dim, trees, experts
    for dtype, *sizes in ((0, -1, 1, 1, 2), (0, 1, -1, 1, 2), (0, 1, 1, 1025, 2), (0, 1, 1, 1, 1), (3, 1, 1, 1, 2)):
        with pytest.raises(RuntimeError, match="tree_route_fwd: CUDA error 1"):
            module.tree_route_fwd(dtype, 0, 1, *[0] * 10, *sizes, 1.0, 0)
