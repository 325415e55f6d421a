"""Gates by the definition of tree_gate: drawn arguments, gradients, shapes for each target."""

from __future__ import annotations

import math

import pytest
import torch

import moe_kernels as mk
from moe_kernels import backends
from tests.helpers.targets import TARGETS, Target, reason_to_skip

INF, NAN = math.inf, math.nan


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


PARITIES = (None, "tf", "bert")


def drawn(tokens: int, dim: int, trees: int, experts: int, *, bias: bool = True, device: str = "cpu") -> dict:
    """Arguments of a gate; at gamma = 1 about 40 % of the nodes are saturated."""
    shapes = {"x": (tokens, dim), "split_weight": (trees, experts - 1, dim), "leaf_weight": (trees, experts, dim)}
    shapes |= {"split_bias": (trees, experts - 1), "leaf_bias": (trees, experts)} if bias else {}
    found = {name: torch.randn(shape) for name, shape in shapes.items()}
    for name in ("split_weight", "split_bias"):
        if name in found:
            found[name] *= 0.6 / math.sqrt(dim + 1)
    return {name: each.to(device) for name, each in found.items()}


def identity(split: torch.Tensor, leaf: torch.Tensor) -> dict:
    """Arguments of K trees with the pre-activations `split` (T, K, E-1) and `leaf` (T, K, E); x is the identity."""
    eye = torch.eye(split.shape[0], dtype=split.dtype, device=split.device)
    return {"x": eye, "split_weight": split.permute(1, 2, 0), "leaf_weight": leaf.permute(1, 2, 0)}


def gate_and_gradients(arguments: dict, grads: tuple, backend: str, **settings) -> dict[str, torch.Tensor]:
    leaf = {name: each.detach().requires_grad_() for name, each in arguments.items()}
    outputs = mk.tree_gate(**leaf, **settings, backend=backend)
    given = [grad.to(each.dtype) for grad, each in zip(grads, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(leaf.values()), given)
    return dict(zip(("gates", "leaf_probs", *leaf), (*(each.detach() for each in outputs), *gradients), strict=True))


def shapes(target: Target) -> tuple[tuple[int, int, int, int], ...]:
    """Tuples (tokens, dim, trees, experts)."""
    if target.executed:
        few = ((3, 5, 1, 2), (70, 8, 2, 5), (2, 8, 3, 16), (19, 4, 1, 40), (9, 4, 2, 80), (40, 4, 2, 64))
        own = ((19, 4, 1, 33), (9, 4, 2, 32), (5, 4, 1, 128), (3, 4, 2, 256), (3, 4, 1, 512), (2, 4, 1, 1024))
        between = ((5, 4, 1, 12), (3, 4, 2, 136), (2, 4, 1, 260), (2, 4, 1, 264), (2, 4, 1, 520), (2, 4, 2, 528))
        return (*few, *own, (2, 4, 1, 8), *between) if target.backend == "cuda" else few
    small = [(9, 12, 1 + experts % 3, experts) for experts in range(2, 18)]
    return (*small, (0, 4, 2, 3), (1, 1, 1, 2), (40, 32, 2, 64), (37, 16, 8, 31), (20, 24, 4, 256), (3, 64, 1, 1000))


def unsupported(target: Target, parity: str | None) -> str | None:
    """The error with which the target's backend refuses a parity mode; None if it takes the mode."""
    try:
        mk.tree_gate(**drawn(1, 2, 1, 3, device=target.device), gamma=1.0, parity=parity, backend=target.backend)
    except mk.BackendError as error:
        return str(error)
    return None


D = drawn(2, 4, 2, 5)


COLUMNS = ("x", "split_weight", "leaf_weight")  # products sum over the last dimension of these


def references(arguments: dict, grads: tuple, **settings) -> list[dict[str, torch.Tensor]]:
    """gate_and_gradients of the reference with four orders of the columns of x and the weights. If a node is
    nearly saturated, the errors of two orders may differ greatly."""
    found = []
    for _ in range(4):
        order = torch.randperm(arguments["x"].shape[1], device=arguments["x"].device) if found else slice(None)
        back = order.argsort() if found else order
        turned = {name: each if "bias" in name else each[..., order] for name, each in arguments.items()}
        results = gate_and_gradients(turned, grads, "reference", **settings)
        found.append({name: results[name][..., back] if name in COLUMNS else results[name] for name in results})
    return found


def assert_near(got: torch.Tensor, same_dtype: list[torch.Tensor], exact: torch.Tensor, floor: float, what: object):
    """`got` may differ from `exact` by twice as much as `same_dtype`, plus `floor` times max(1, largest |exact|)."""
    assert got.isfinite().all(), what
    if exact.numel():
        size = max(1.0, float(exact.abs().max()))
        allowed = 2 * max(float((same.double() - exact).abs().max()) for same in same_dtype) + floor * size
        assert float((got.double() - exact).abs().max()) <= allowed, what


def products_and_tree_in_one_kernel(dtype, few=False):
    """Triton's fused forward kernel for one tree of up to 64 experts; few: 64 alone, and 5 with NaN."""
    target = next(each for each in TARGETS if each.id == "triton")
    if reason := reason_to_skip(target, "tree_gate"):
        pytest.skip(reason)
    kernels = backends.load("triton", "tree_gate")
    floor = (1 if dtype.itemsize == 2 else 8) * torch.finfo(dtype).eps
    sizes = ((70, 32, 2, ()), (3, 80, 5, ("split_bias",)), (65, 16, 64, ("leaf_bias",)))
    if dtype != torch.bfloat16:
        sizes = ((3, 80, 5, ("split_bias", "leaf_bias")),)  # the kernel of the NaN below
    for tokens, dim, experts, biases in sizes[-1:] if few else sizes:
        arguments = drawn(tokens, dim, 1, experts, device=target.device)
        kept = ("x", "split_weight", "leaf_weight", *biases)
        arguments = {name: arguments[name].to(dtype) for name in kept}
        assert kernels.tree_gate_fits(*(arguments[name] for name in kept[:3]))
        grads = (
            torch.randn(tokens, experts, device=target.device),
            torch.randn(tokens, 1, experts, device=target.device),
        )
        wide = {name: each.double() for name, each in arguments.items()}
        got = gate_and_gradients(arguments, grads, "triton", gamma=1.0)
        same = references(arguments, grads, gamma=1.0)
        exact = gate_and_gradients(wide, grads, "reference", gamma=1.0)
        for name, each in got.items():
            assert_near(each, [reference[name] for reference in same], exact[name], floor, (experts, name))
    # A read past the end of token 0 in x, or of leaf 3, would find a NaN.
    arguments = {name: each.to(dtype) for name, each in drawn(3, 80, 1, 5, device=target.device).items()}
    arguments["split_bias"][:, 0] = 50.0
    arguments["x"][1, 0] = arguments["leaf_weight"][0, 4, 0] = NAN  # leaf 4 is right of the root, which goes left
    gates, _ = mk.tree_gate(**arguments, gamma=1.0, backend="triton")
    assert gates.isfinite().all(1).tolist() == [True, False, True]
    apart = {name: torch.stack([each, each], -1)[..., 0] for name, each in arguments.items()}  # last stride 2
    again, _ = mk.tree_gate(**apart, gamma=1.0, backend="triton")
    torch.testing.assert_close(again, gates, rtol=0, atol=0, equal_nan=True)
    for kind, dim, trees, experts in ((dtype, 24, 1, 8), (dtype, 32, 2, 8), (dtype, 32, 1, 65), (DTYPES[0], 32, 1, 8)):
        leaf_weight = torch.zeros(trees, experts, dim, dtype=kind)
        assert not kernels.tree_gate_fits(leaf_weight[0], leaf_weight[:, 1:], leaf_weight)
