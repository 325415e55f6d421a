"""The clamped SwiGLU of gpt_oss, with gates in even columns, in grouped_gemm and expert_mlp."""

from __future__ import annotations

import math

import pytest
import torch

import moe_kernels as mk
from python_ref.grouped_gemm import activate

OP = "grouped_gemm"
E, DIN, H = 3, 8, 6
CONSTANTS = {"alpha": 1.3, "limit": 0.8}


def by_hand(pre: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The formula for one element at a time, with Python's floats."""
    rows = []
    for row in pre.tolist():
        pairs = [(min(gate, limit), min(max(up, -limit), limit)) for gate, up in zip(row[::2], row[1::2], strict=True)]
        rows.append([(up + 1) * gate / (1 + math.exp(-alpha * gate)) for gate, up in pairs])
    return torch.tensor(rows, dtype=torch.float64)


def by_torch(pre: torch.Tensor) -> torch.Tensor:
    return activate(pre, "swiglu_clamped", 1.7, 0.9)


def narrow(target) -> torch.dtype:
    return torch.bfloat16 if target.backend == "cuda" else torch.float32


def given(target, dtype):
    x = torch.randn(9, DIN).to(target.device, dtype).requires_grad_()
    weight = torch.randn(E, DIN, 2 * H).to(target.device, dtype).requires_grad_()
    bias = torch.randn(E, 2 * H).to(target.device, dtype).requires_grad_()
    offsets = torch.tensor([0, 2, 2, 8], dtype=torch.int32, device=target.device)  # the last row is unused
    return x, weight, bias, offsets


def test_values_are_the_formula(target):
    x, weight, bias, offsets = given(target, narrow(target))
    named = {"bias": bias, "backend": target.backend}
    pre = mk.grouped_gemm(x, weight, offsets, **named)
    out = mk.grouped_gemm(x, weight, offsets, activation="swiglu_clamped", **named, **CONSTANTS)
    assert out.shape == (9, H)
    off = 1e-6 if out.dtype == torch.float32 else 0.005
    torch.testing.assert_close(out.double().cpu(), by_hand(pre.detach().double(), **CONSTANTS), rtol=off, atol=off)
    assert (out[8] == 0).all()
    hits = pre.detach()[:8]
    assert (hits[:, ::2] > 0.8).any()
    assert (hits[:, 1::2] > 0.8).any()
    assert (hits[:, 1::2] < -0.8).any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_constants_are_those_of_gpt_oss_if_none_are_given(backend):
    pre = 9 * torch.randn(5, 8, dtype=torch.float64)
    named, eye = {"activation": "swiglu_clamped", "backend": backend}, torch.eye(8, dtype=torch.float64)[None]
    expected = by_hand(pre, 1.702, 7.0)
    torch.testing.assert_close(mk.grouped_gemm(pre, eye, torch.tensor([0, 5]), **named), expected)
    plan = mk.make_plan(torch.zeros(5, 1, dtype=torch.int32), 1)
    torch.testing.assert_close(mk.expert_mlp(pre, plan, eye, eye[:, :4, :4], weights=None, **named), expected)


@pytest.mark.parametrize("op", ["grouped_gemm", "expert_mlp"])
def test_gradients_are_the_definition_s(target, op):
    dtype = narrow(target)
    x, weight, bias, offsets = given(target, dtype)
    w_out = torch.randn(E, H, 5).to(target.device, dtype).requires_grad_()
    gate = torch.rand(9, 2).to(target.device).requires_grad_()
    plan = mk.make_plan(torch.randint(E, (9, 2), generator=torch.Generator().manual_seed(1)).to(target.device), E)
    leaves = [x, weight, bias] + ([w_out, gate] if op == "expert_mlp" else [])

    def gradients(backend):
        named = {"activation": "swiglu_clamped", "backend": backend, **CONSTANTS}
        if op == "expert_mlp":
            y = mk.expert_mlp(x, plan, weight, w_out, weights=gate, b_in=bias, **named)
        else:
            y = mk.grouped_gemm(x, weight, offsets, bias=bias, **named)
        return y, *torch.autograd.grad(y.float().square().sum(), leaves)

    off = 1e-4 if dtype == torch.float32 else 0.03
    for mine, its in zip(gradients(target.backend), gradients("reference"), strict=True):
        assert (mine - its).float().norm() <= off * its.float().norm()


@pytest.mark.slow
def test_the_operator_s_gradient_by_differences():
    pre = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    operator = torch.ops.moe_kernels.swiglu_clamped
    assert torch.autograd.gradcheck(lambda pre: operator(pre, 1.7, 0.9), pre)
    edges = torch.tensor([[0.9, -0.9, -0.9, 0.9, 0.9, 0.9]], dtype=torch.float64, requires_grad=True)
    found = [torch.autograd.grad(f(edges).sum(), edges)[0] for f in (lambda pre: operator(pre, 1.7, 0.9), by_torch)]
    torch.testing.assert_close(*found)  # a clamp passes gradients inside its bounds and at them
    torch.library.opcheck(operator, (torch.randn(4, 10, requires_grad=True), 1.7, 0.9))


def test_bad_use_is_refused_by_name():
    x, weight, offsets = torch.randn(4, 3), torch.randn(1, 3, 4), torch.tensor([0, 4])
    with pytest.raises(ValueError, match="grouped_gemm: limit must be above 0"):
        mk.grouped_gemm(x, weight, offsets, activation="swiglu_clamped", limit=0.0)
    with pytest.raises(ValueError, match="grouped_gemm: swiglu_clamped needs an even number of columns"):
        mk.grouped_gemm(x, weight[..., :3], offsets, activation="swiglu_clamped")
    with pytest.raises(ValueError, match="expert_norms: activation must be"):
        mk.expert_norms(x, weight, torch.randn(1, 2, 3), activation="swiglu_clamped")


def test_gradients_at_the_limits_are_those_of_clamp(target):
    """clamp passes the gradient of a number that equals a limit."""
    limit, alpha = 0.75, 1.25
    pairs = [(gate, up) for gate in (-1.0, 0.5, limit, 1.0) for up in (-1.0, -limit, 0.25, limit, 1.0)]
    weight = torch.tensor(pairs).flatten()[None, None].to(target.device, narrow(target)).requires_grad_()
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=target.device)
    named = {"activation": "swiglu_clamped", "alpha": alpha, "limit": limit, "backend": target.backend}
    out = mk.grouped_gemm(weight.new_ones(1, 1), weight, offsets, **named)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    gate, up = (each.double().requires_grad_() for each in torch.tensor(pairs).unbind(1))
    exact = (up.clamp(-limit, limit) + 1) * gate.clamp(max=limit) * torch.sigmoid(alpha * gate.clamp(max=limit))
    expected = torch.stack(torch.autograd.grad(exact.sum(), (gate, up)), 1).flatten()
    off = 1e-6 if weight.dtype == torch.float32 else 0.01
    torch.testing.assert_close(grad.flatten().double().cpu(), expected, rtol=off, atol=off)
