"""combine: the weighted sum of each token's rows, and both gradients, against a dense one-hot einsum in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels as mk
from tests.helpers.inputs import each_alone, far_apart, framed, padded, shifted
from tests.helpers.plans import dense, plans

OP = "combine"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def einsum(rows, weights, one_hot):
    return torch.einsum("rtk,tk,rd->td", one_hot, weights, rows)


def bound(exact, size, dtype):
    """The allowed error: eps |exact| + 64 * 2^-24 size + the smallest subnormal. size: sum of the terms' magnitudes."""
    eps = torch.finfo(dtype).eps
    subnormal = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return eps * exact.abs() + 64 * 2.0**-24 * size + subnormal


def results(backend, plan, rows, weights, grad):
    leaves = [each.detach().requires_grad_() for each in (rows, weights)]
    y = mk.combine(leaves[0], plan, leaves[1], backend=backend)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", plans())
def test_sums_and_gradients_are_the_dense_einsum(target, kind, dtype):
    plan = plans(target.device)[kind]
    one_hot, used = dense(plan), int(plan.expert_offsets[-1])
    dims = (0, 1, 40) if target.interpreted else (0, 1, 40, 256, 513)
    if target.compiles and dtype != torch.float32:
        dims = (513,) if dtype == torch.bfloat16 else (256,)
    for dim in dims:
        rows = torch.randn(plan.num_rows, dim, device=target.device).to(dtype)
        weights = torch.randn(plan.num_tokens, plan.num_choices, device=target.device).to(dtype)
        grad = torch.randn(plan.num_tokens, dim, device=target.device).to(dtype)
        exact_rows, exact_weights = rows.cpu().double().requires_grad_(), weights.cpu().double().requires_grad_()
        expected = einsum(exact_rows, exact_weights, one_hot)
        wanted = torch.autograd.grad(expected, (exact_rows, exact_weights), grad.cpu().double())
        sizes = (
            einsum(exact_rows.abs(), exact_weights.abs(), one_hot).detach(),
            torch.zeros_like(wanted[0]),
            torch.einsum("rtk,rd,td->tk", one_hot, exact_rows.abs(), grad.cpu().double().abs()).detach(),
        )
        rows[used:] = math.nan  # unused rows and weights of dropped choices must have no effect
        weights = weights.masked_fill(plan.slot_row < 0, math.nan)
        rows, weights = rows.requires_grad_(), weights.requires_grad_()
        y = mk.combine(rows, plan, weights, backend=target.backend)
        drows, dweights = torch.autograd.grad(y, (rows, weights), grad)
        assert y.dtype == drows.dtype == dweights.dtype == dtype
        for got, exact, size in zip((y, drows, dweights), (expected.detach(), *wanted), sizes, strict=True):
            assert ((got.cpu().double() - exact).abs() <= bound(exact, size, dtype)).all()


@pytest.mark.parametrize("kind", plans())
def test_without_weights_it_is_the_plain_sum(target, kind):
    plan = plans(target.device)[kind]
    rows = torch.randn(plan.num_rows, 33, device=target.device, requires_grad=True)
    ones = torch.ones(plan.slot_row.shape, device=target.device)
    y = mk.combine(rows, plan, backend=target.backend)
    torch.testing.assert_close(y, mk.combine(rows, plan, ones, backend="reference"))
    grad = torch.randn_like(y)
    (drows,) = torch.autograd.grad(y, rows, grad)
    assert torch.equal(drows, mk.dispatch(grad, plan, backend="reference"))


def test_more_choices_than_a_warp_has_lanes(target):
    on = target.device
    experts = torch.rand(5, 80, device=on).argsort(1)[:, :70]
    plan = mk.make_plan(experts, 80, backend="reference")
    given = (torch.randn(shape, device=on) for shape in ((plan.num_rows, 300), (5, 70), (5, 300)))
    rows, weights, grad = given
    found = (results(backend, plan, rows, weights, grad) for backend in (target.backend, "reference"))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_float32_gates_weigh_bfloat16_rows(target):
    plan = plans(target.device)["dropped"]
    rows = torch.randn(plan.num_rows, 40, device=target.device).bfloat16().requires_grad_()
    weights = torch.rand(plan.slot_row.shape, device=target.device, requires_grad=True)
    y = mk.combine(rows, plan, weights, backend=target.backend)
    expected = mk.combine(rows.double(), plan, weights.double(), backend="reference")
    torch.testing.assert_close(y.double(), expected, rtol=2.0**-7, atol=1e-5)
    drows, dweights = torch.autograd.grad(y.float().square().sum(), (rows, weights))
    assert (drows.dtype, dweights.dtype) == (torch.bfloat16, torch.float32)


def test_gates_and_their_gradients_are_not_rounded_to_the_rows_dtype(target):
    """bfloat16 rounds 1 + 2^-9 to 1 and 1 + 2^-8 + 2^-10 to 1 + 2^-7, and cannot represent (1 + 2^-7)^2."""
    plan = mk.make_plan(torch.tensor([[0, 1]], device=target.device), 2, backend="reference")
    rows = torch.full((2, 1), 1 + 2**-7, dtype=torch.bfloat16, device=target.device, requires_grad=True)
    weights = torch.tensor([[1 + 2**-9, -1.0]], device=target.device, requires_grad=True)
    y = mk.combine(rows, plan, weights, backend=target.backend)
    assert y.tolist() == [[(1 + 2**-7) * 2**-9]]
    assert torch.autograd.grad(y, weights, rows[:1].detach())[0].tolist() == [[(1 + 2**-7) ** 2] * 2]
    y = mk.combine(rows, plan, weights.detach() * 0 + (1 + 2**-8 + 2**-10), backend=target.backend)
    assert torch.autograd.grad(y, rows, torch.full_like(y, 1.75))[0].tolist() == [[1.7578125]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_halfway_between_two_numbers_become_the_even_one(target, dtype):
    if target.interpreted and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16")
    plan = mk.make_plan(torch.zeros(1, 2, dtype=torch.int32, device=target.device), 1, backend="reference")
    large = 2 / torch.finfo(dtype).eps  # the next larger number of this dtype is large + 2
    rows = torch.tensor([[large, -large] * 20, [1.0, -1.0, 3.0, -3.0] * 10], device=target.device).to(dtype)
    y = mk.combine(rows, plan, backend=target.backend)
    assert y.tolist() == [[large, -large, large + 4, -large - 4] * 10]


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("kind", ["one token dropped", "dropped", "unused rows", "expert choice"])
def test_what_no_kept_row_meets_changes_nothing(target, kind, value):
    """NaN or infinity has no effect in weights of dropped choices, in gradients of tokens with no kept choice, in
    unused rows, or in the memory around rows and gradients. In a kept row it reaches the result, even with weight 0."""
    one = mk.make_plan(torch.tensor([[0], [0]], device=target.device), 1, capacity=1, backend="reference")
    plan = {"one token dropped": one, **plans(target.device)}[kind]
    dropped, used = plan.slot_row < 0, int(plan.expert_offsets[-1])
    for dim in (1, 5, 40, 300):
        rows, grad = torch.randn(plan.num_rows, dim), torch.randn(plan.num_tokens, dim)
        weights = torch.randn(plan.slot_row.shape)
        rows, grad, weights = (each.to(target.device) for each in (rows, grad, weights))
        found = []
        for fill, backend in ((value, target.backend), (0.0, "reference")):
            filled = rows.clone()
            filled[used:] = fill
            given = framed(grad.masked_fill(dropped.all(1, keepdim=True), fill), fill)
            found.append(results(backend, plan, framed(filled, fill), weights.masked_fill(dropped, fill), given))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
        every = torch.full_like(grad, value)
        _, drows, dweights = results(target.backend, plan, rows, weights, every)
        assert not dweights[dropped].any()
        assert not drows[used:].any()
        filled, zeros = torch.full_like(rows, value), torch.zeros_like(weights)
        y, drows, _ = results(target.backend, plan, filled, zeros, every)
        assert y[~dropped.all(1)].isnan().all()
        assert drows[:used].isnan().all()


@pytest.mark.parametrize("kind", ["unused rows", "dropped"])
def test_many_programs_with_one_that_is_not_full(target, kind):
    plan, on = plans(target.device)[kind], target.device
    for dim in (300, 4100) if target.interpreted else (300, 2500, 4100, 9000):
        rows, weights = torch.randn(plan.num_rows, dim, device=on), torch.rand(23, 3, device=on)
        grad = torch.randn(dim, plan.num_tokens, device=on).t()  # its last dimension is not contiguous
        found = (
            (*results(backend, plan, rows, weights, grad), mk.dispatch(grad, plan, backend=backend))
            for backend in (target.backend, "reference")
        )
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_each_gradient_alone_is_the_same(target):
    plan = plans(target.device)["unused rows"]
    leaves = {
        "rows": torch.randn(plan.num_rows, 40, device=target.device),
        "weights": torch.rand(plan.slot_row.shape, device=target.device),
    }
    grad = torch.randn(plan.num_tokens, 40, device=target.device)

    def call(rows, weights):
        return mk.combine(rows, plan, weights, backend=target.backend)

    _, *together = results(target.backend, plan, *leaves.values(), grad)
    alone = each_alone(call, leaves, grad)
    assert all(torch.equal(one, alone[name]) for one, name in zip(together, leaves, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_far_apart(target, dtype):
    plan = plans(target.device)["dropped"]
    rows, grad = (torch.randn(n, 24, device=target.device).to(dtype) for n in (plan.num_rows, plan.num_tokens))
    weights = torch.rand(plan.slot_row.shape, device=target.device)
    got = results(target.backend, plan, far_apart(rows), weights, far_apart(grad))
    rounding = 2.0**-6 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, results("reference", plan, rows, weights, grad), rtol=rounding, atol=rounding)


def test_rows_whose_distance_fits_32_bits_only_in_vectors(target):
    plan = mk.make_plan(torch.tensor([[0, 1], [1, -1]], device=target.device), 2, backend="reference")
    rows, grad = (torch.randn(n, 24, device=target.device).bfloat16() for n in (plan.num_rows, 2))
    weights, strides = torch.rand(2, 2, device=target.device), (2**31, 1)
    got = results(target.backend, plan, far_apart(rows, strides), weights, far_apart(grad, strides))
    torch.testing.assert_close(got, results("reference", plan, rows, weights, grad), rtol=2.0**-6, atol=2.0**-6)


def test_views_are_read_in_place(target):
    plan = plans(target.device)["unused rows"]
    base = torch.randn(plan.num_rows, 50, device=target.device)
    weights, one = torch.rand(3, 23, device=target.device).t(), torch.ones((), device=target.device)
    for view in (base[:, 3:40], base[:, ::2], base[:1].expand(plan.num_rows, -1)):
        grad = one.expand(plan.num_tokens, view.shape[1])  # all strides are 0, as in the gradient of y.sum()
        found = (results(backend, plan, view, weights, grad) for backend in (target.backend, "reference"))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("place", [padded, shifted])
def test_rows_that_start_anywhere(target, place):
    """The rows or the gradient, never both, have a start or a stride that rules out accesses of 16 bytes."""
    plan = plans(target.device)["unused rows"]
    given = {"rows": torch.randn(plan.num_rows, 48), "grad": torch.randn(plan.num_tokens, 48)}
    given = {name: each.to(target.device) for name, each in given.items()}
    weights, found = torch.rand(plan.slot_row.shape, device=target.device), []
    for moved in (None, *given):
        here = given if moved is None else given | {moved: place(given[moved])}
        found.append(results(target.backend, plan, here["rows"], weights, here["grad"]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_number_of_16_bits(target, dtype):
    """Each token has one choice, without a weight or with 1/3. The product is rounded once, also if it is subnormal."""
    rows = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 64).to(target.device)
    plan = mk.make_plan(torch.zeros(1024, 1, dtype=torch.int32, device=target.device), 1, backend="reference")
    third = torch.full((1024, 1), 1 / 3, device=target.device)
    for weights, expected in ((None, rows), (third, (rows.float() * third).to(dtype))):
        y = mk.combine(rows, plan, weights, backend=target.backend)
        # Triton's interpreter truncates when it converts to bfloat16.
        if not (target.interpreted and dtype == torch.bfloat16):
            torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["dropped", "unused rows", "expert choice", "no room"])
def test_derivatives_in_float64(backend, kind):
    plan = plans()[kind]
    rows = torch.randn(plan.num_rows, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(plan.slot_row.shape, dtype=torch.float64, requires_grad=True)
    args = (rows, weights)
    assert torch.autograd.gradcheck(lambda r, w: mk.combine(r, plan, w, backend=backend), args)
    assert torch.autograd.gradgradcheck(lambda r, w: mk.combine(r, plan, w, backend=backend), args)
    assert torch.autograd.gradgradcheck(lambda r: mk.combine(r**2, plan, backend=backend), (rows,))


def test_results_do_not_depend_on_threads():
    plan = mk.make_plan(torch.randint(0, 8, (3000, 3)), 8, capacity=900)
    rows, weights = torch.randn(plan.num_rows, 70, requires_grad=True), torch.rand(3000, 3, requires_grad=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = mk.combine(rows, plan, weights, backend="cpu")
            found.append((y, *torch.autograd.grad(y.square().sum(), (rows, weights))))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_flops_are_counted():
    plan = plans()["everything"]
    rows, weights = torch.randn(69, 10, requires_grad=True), torch.rand(23, 3, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        mk.combine(rows, plan, weights, backend="cpu").sum().backward()
    assert counter.get_total_flops() == (2 + 3) * 69 * 10


def test_bad_input_is_named():
    plan = plans()["dropped"]
    rows, weights = torch.randn(plan.num_rows, 4), torch.rand(23, 3)
    for args, error, words in (
        ((rows[1:], plan), ValueError, "rows must have 20 rows, the rows of the plan"),
        ((rows[0], plan), ValueError, r"rows must be \(R, D\)"),
        ((rows, plan, weights[:, :2]), ValueError, r"weights must be \(T, K\) like plan.slot_row, \(23, 3\)"),
        ((rows, plan, weights[1:]), ValueError, "weights must have 23 rows, the tokens of the plan"),
        ((rows, plan, weights.long()), TypeError, "weights must have dtype"),
    ):
        with pytest.raises(error, match=f"^combine: {words}"):
            mk.combine(*args)
