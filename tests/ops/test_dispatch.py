"""dispatch: rows against the definition, gradients against sums in float64."""

from __future__ import annotations

import math

import pytest
import torch

import moe_kernels as mk
from tests.helpers.inputs import far_apart, framed, padded, shifted
from tests.helpers.plans import dense, plans

OP = "dispatch"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", plans())
def test_rows_are_tokens_and_gradients_their_sums(target, kind, dtype):
    plan = plans(target.device)[kind]
    for dim in (0, 1, 40, 64) if target.interpreted else (0, 1, 40, 64, 130, 513):
        x = torch.randn(plan.num_tokens, dim, device=target.device).to(dtype).requires_grad_()
        rows = mk.dispatch(x, plan, backend=target.backend)
        assert torch.equal(rows.cpu(), mk.dispatch(x, plan, backend="reference").cpu())
        grad = torch.randn_like(rows)
        used = int(plan.expert_offsets[-1])
        grad[used:] = math.nan  # unused rows must have no effect
        (dx,) = torch.autograd.grad(rows, x, grad)
        one_hot = dense(plan).sum(-1)
        exact = torch.einsum("rt,rd->td", one_hot, grad.cpu().double().nan_to_num(0.0))
        size = torch.einsum("rt,rd->td", one_hot, grad.cpu().double().nan_to_num(0.0).abs())
        assert dx.dtype == dtype
        eps = torch.finfo(dtype).eps
        assert ((dx.cpu().double() - exact).abs() <= eps * exact.abs() + 4 * 2.0**-24 * size).all()


def test_rows_carry_every_bit_pattern(target):
    plan = mk.make_plan(torch.tensor([[0], [1], [0]], device=target.device), 2, backend="reference")
    x = torch.tensor([[math.nan, math.inf], [-0.0, 1e-41], [-math.inf, 3e38]], device=target.device)
    rows = mk.dispatch(x, plan, backend=target.backend)
    assert torch.equal(rows.view(torch.int32), x[[0, 2, 1]].view(torch.int32))


def test_views_are_read_in_place(target):
    plan = plans(target.device)["dropped"]
    base = torch.randn(46, 50, device=target.device)
    views = [base[:23, 3:40], base[::2, 1:], base[:, :23].t(), base[:1].expand(23, -1), base[::2, ::2]]
    for view in (*views, padded(base[:23, :48]), shifted(base[:23, :48])):
        view = view.detach().requires_grad_()
        rows = mk.dispatch(view, plan, backend=target.backend)
        assert torch.equal(rows, mk.dispatch(view, plan, backend="reference"))
        (dx,) = torch.autograd.grad(rows.sum(), view)  # the gradient's strides are 0
        expected = (plan.slot_row >= 0).sum(1, keepdim=True).float().expand_as(view)
        assert torch.equal(dx, expected)


@pytest.mark.parametrize("kind", ["unused rows", "dropped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_and_what_lies_around_them(target, kind, dtype):
    """x and the gradient are surrounded by NaN, which must have no effect."""
    plan = plans(target.device)[kind]
    for dim in (3, 300, 4100) if target.interpreted else (3, 300, 2500, 4100, 9000):
        x = framed(torch.randn(plan.num_tokens, dim, device=target.device).to(dtype)).requires_grad_()
        rows = mk.dispatch(x, plan, backend=target.backend)
        assert torch.equal(rows, mk.dispatch(x, plan, backend="reference"))
        grad = framed(torch.randn_like(rows))
        (dx,) = torch.autograd.grad(rows, x, grad)
        expected = mk.combine(grad.float(), plan, backend="reference")
        torch.testing.assert_close(dx.float(), expected, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_far_apart(target, dtype):
    plan = plans(target.device)["dropped"]
    x = torch.randn(23, 24, device=target.device).to(dtype)
    got = mk.dispatch(far_apart(x), plan, backend=target.backend)
    assert torch.equal(got, mk.dispatch(x, plan, backend="reference"))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["dropped", "unused rows", "expert choice", "no room"])
def test_derivatives_in_float64(backend, kind):
    plan = plans()[kind]
    x = torch.randn(23, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mk.dispatch(x, plan, backend=backend) ** 2, (x,))
    assert torch.autograd.gradgradcheck(lambda x: mk.dispatch(x, plan, backend=backend) ** 2, (x,))


def test_large_outputs_and_threads():
    experts = torch.randint(0, 8, (4000, 4))
    plan = mk.make_plan(experts, 8, capacity=1900)
    x = torch.randn(4000, 512)
    expected = mk.dispatch(x, plan, backend="reference")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(mk.dispatch(x, plan, backend="cpu"), expected)
            for part in (slice(3, None), slice(280)):
                assert torch.equal(mk.dispatch(x[:, part], plan, backend="cpu"), expected[:, part])
    finally:
        torch.set_num_threads(before)


def test_bad_input_is_named():
    plan = plans()["dropped"]
    for x, error, words in (
        (torch.randn(22, 4), ValueError, r"x must have 23 rows, the tokens of the plan; got shape \(22, 4\)"),
        (torch.randn(23), ValueError, r"x must be \(T, D\), got shape \(23,\)"),
        (torch.randn(23, 4).long(), TypeError, "x must have dtype"),
        (torch.randn(23, 4, device="meta"), ValueError, "x must be on the device of the plan, cpu; got meta"),
    ):
        with pytest.raises(error, match=f"^dispatch: {words}"):
            mk.dispatch(x, plan)
