"""topk_gate: choices, weights, gradients and errors."""

from __future__ import annotations

import math

import pytest
import torch

import moe_kernels as mk
from tests.helpers.inputs import far_apart, framed, padded, shifted
from tests.helpers.targets import Target

OP = "topk_gate"
ORDERS = ("topk_softmax", "softmax_topk")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = math.inf, math.nan


def masked(t: int, e: int) -> torch.Tensor:
    """About half of the experts are forbidden; in row 0 all but expert 0."""
    forbidden = torch.rand(t, e) < 0.5
    forbidden[:1] = torch.arange(e) > 0
    return torch.randn(t, e).masked_fill(forbidden, -INF)


ROWS = {
    "normal": lambda t, e: torch.randn(t, e),
    "ties": lambda t, e: torch.randint(-1, 2, (t, e)).float(),
    "constant": lambda t, e: torch.full((t, e), 0.25),
    "large": lambda t, e: 100 * torch.randn(t, e),
    "zeros of both signs": lambda t, e: torch.tensor([0.0, -0.0])[torch.randint(2, (t, e))],
    "masked": masked,
    # A zero read past the end of a row would be the largest logit, or the smallest one.
    "far below zero": lambda t, e: torch.randn(t, e) - 200,
    "far above zero": lambda t, e: torch.randn(t, e) + 200,
    "a row of -inf": lambda t, e: torch.randn(t, e).index_fill(0, torch.arange(t)[-1:], -INF),
    "special": lambda t, e: torch.tensor([NAN, INF, -INF, 0.0, 1.0])[torch.randint(5, (t, e))],
    "subnormal": lambda t, e: 1e-39 * torch.randn(t, e),
}


def sizes(target: Target) -> tuple[tuple[int, int], ...]:
    """Pairs (T, E)."""
    return ((3, 1), (3, 33), (3, 36)) if target.executed else ((0, 5), (3, 1), (5, 32), (9, 33))


def gate_and_gradient(logits, k, order, grad, backend, place=torch.clone):
    logits = place(logits).requires_grad_()
    weights, experts = mk.topk_gate(logits, k, order=order, backend=backend)
    (dlogits,) = torch.autograd.grad(weights, logits, grad.to(weights.dtype))
    return weights.detach(), experts, dlogits


def assert_near(got, same_dtype, exact, floor: float) -> None:
    """Errors against float64 may be twice the reference's largest one in the same dtype, plus `floor`."""
    finite = exact.isfinite()
    assert torch.equal(got.isfinite(), finite)
    got, same_dtype, exact = got[finite].double(), same_dtype[finite].double(), exact[finite]
    if exact.numel():
        allowed = 2 * (same_dtype - exact).abs().max() + floor
        assert (got - exact).abs().max() <= allowed


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ROWS)
def test_choices_weights_and_gradients(target, kind, dtype, order):
    floor = (8 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps
    if target.compiles and (dtype, order) in zip(DTYPES[1:], ORDERS, strict=True):
        pytest.skip("Triton's gate computes in float32: each 16-bit dtype is tested with one order, float32 with both")
    for tokens, num_experts in sizes(target):
        logits = ROWS[kind](tokens, num_experts).to(dtype).to(target.device)
        for k in sorted({1, min(3, num_experts), num_experts}):
            grad = torch.randn(tokens, k, device=target.device).to(dtype)
            got = gate_and_gradient(logits, k, order, grad, target.backend)
            same = gate_and_gradient(logits, k, order, grad, "reference")
            exact = gate_and_gradient(logits.double(), k, order, grad, "reference")
            assert got[1].dtype == torch.int32
            assert torch.equal(got[1], exact[1]), (num_experts, k)
            assert got[0].dtype == got[2].dtype == dtype
            assert not got[0][exact[0] == 0].any()
            assert_near(got[0], same[0], exact[0], floor)
            assert_near(got[2], same[2], exact[2], floor * max(1.0, float(grad.abs().max())) if grad.numel() else floor)


# (T, E, K)
MANY = ((9, 8, 3), (19, 40, 32), (9, 140, 33), (2, 600, 300), (3, 260, 3), (2, 1040, 5))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["ties", "constant", "far below zero", "special"])
def test_many_experts_choices_and_tokens(target, kind, order):
    for tokens, num_experts, k in MANY[ORDERS.index(order) :: 2] if target.compiles else MANY:
        logits = ROWS[kind](tokens, num_experts).to(target.device)
        grad = torch.randn(k, tokens, device=target.device).t()  # not contiguous in the last dimension
        got = gate_and_gradient(logits, k, order, grad, target.backend)
        exact = gate_and_gradient(logits.double(), k, order, grad, "reference")
        assert torch.equal(got[1], exact[1]), (num_experts, k)
        torch.testing.assert_close(got[0].double(), exact[0], rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(got[2].double(), exact[2], rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fill", [NAN, INF, 1e30])
def test_what_lies_around_the_logits_is_not_read(target, fill, order):
    for tokens, num_experts, k in ((5, 3, 2), (9, 33, 5), (3, 200, 7)):
        logits = torch.randn(tokens, num_experts, device=target.device) - 5
        grad = torch.randn(tokens, k, device=target.device)
        got = gate_and_gradient(logits, k, order, grad, target.backend, place=lambda each: framed(each, fill))
        expected = gate_and_gradient(logits, k, order, grad, "reference")
        assert torch.equal(got[1], expected[1])
        torch.testing.assert_close((got[0], got[2]), (expected[0], expected[2]))


@pytest.mark.parametrize("order", ORDERS)
def test_rows_far_apart(target, order):
    logits, grad = torch.randn(5, 20, device=target.device), torch.randn(5, 3, device=target.device)
    got = gate_and_gradient(logits, 3, order, grad, target.backend, place=far_apart)
    expected = gate_and_gradient(logits, 3, order, grad, "reference")
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close((got[0], got[2]), (expected[0], expected[2]))


def test_by_hand(target):
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]], device=target.device).log()
    weights, experts = mk.topk_gate(logits, 3, backend=target.backend)
    assert experts.tolist() == [[1, 3, 2]]  # equal logits: the lower index first
    torch.testing.assert_close(weights.cpu(), torch.tensor([[3 / 8, 3 / 8, 2 / 8]]))
    weights, experts = mk.topk_gate(logits, 3, order="softmax_topk", backend=target.backend)
    assert experts.tolist() == [[1, 3, 2]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[3 / 9, 3 / 9, 2 / 9]]))  # not renormalised


def test_noise_moves_the_choice_and_takes_a_gradient(target):
    logits = torch.randn(5, 8, device=target.device, requires_grad=True)
    noise = torch.randn(5, 8, device=target.device, requires_grad=True)
    for order in ORDERS:
        weights, experts = mk.topk_gate(logits, 2, order=order, noise=noise, backend=target.backend)
        expected, chosen = mk.topk_gate(logits + noise, 2, order=order, backend="reference")
        assert torch.equal(experts, chosen)
        torch.testing.assert_close(weights, expected)
        dlogits, dnoise = torch.autograd.grad(weights.square().sum(), (logits, noise))
        assert torch.equal(dlogits, dnoise)
        torch.testing.assert_close(dlogits, torch.autograd.grad(expected.square().sum(), logits)[0])


def test_views_are_read_in_place(target):
    base = torch.randn(6, 20, device=target.device)
    for view in (base[:, 3:17], base[::2], base.t(), base[:1].expand(4, -1), padded(base), shifted(base)):
        for order in ORDERS:
            view = view.detach().requires_grad_()
            weights, experts = mk.topk_gate(view, 3, order=order, backend=target.backend)
            expected, chosen = mk.topk_gate(view, 3, order=order, backend="reference")
            assert torch.equal(experts, chosen)
            torch.testing.assert_close(weights, expected)
            (got,) = torch.autograd.grad(weights.square().sum(), view)
            torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), view)[0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_derivative_in_float64(backend, order):
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: mk.topk_gate(z, 3, order=order, backend=backend)[0], (logits,))


def test_many_tokens_many_choices_and_threads():
    before = torch.get_num_threads()
    try:
        for tokens, num_experts, k in (
            (3000, 64, 2),
            (3000, 128, 8),
            (50, 1000, 30),
            (50, 1024, 300),
            (50, 1024, 1024),
        ):
            logits = torch.randn(tokens, num_experts)
            expected, chosen = mk.topk_gate(logits, k, backend="reference")
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                weights, experts = mk.topk_gate(logits, k, backend="cpu")
                assert torch.equal(experts, chosen)
                torch.testing.assert_close(weights, expected)
    finally:
        torch.set_num_threads(before)


X = torch.randn(2, 5)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: mk.topk_gate(X, 6), ValueError, "k must be from 0 to 5 .* got 6"),
        (lambda: mk.topk_gate(X, 1.0), TypeError, "k must be an int, got float"),
        (lambda: mk.topk_gate(X[0], 1), ValueError, r"logits must be \(T, E\), got shape \(5,\)"),
        (lambda: mk.topk_gate(X.long(), 1), TypeError, "logits must have dtype"),
        (lambda: mk.topk_gate(X, 1, order="top"), ValueError, "order must be one of 'topk_softmax', 'softmax_topk'"),
        (lambda: mk.topk_gate(X, 1, noise=X[:1]), ValueError, "noise must have the shape of logits"),
        (lambda: mk.topk_gate(X, 1, noise=X.half()), TypeError, "noise must have the dtype of logits"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=f"^topk_gate: .*{words}"):
        call()


@pytest.mark.parametrize("order", ORDERS)
def test_gradient_at_large_logits(target, order):
    """A backward that read a saved logsumexp would fail: 1e8 + log 2 is 1e8 in float32."""
    for size in (1e3, 1e5, 1e8):
        logits = torch.tensor([[size, size, 0.0], [size, 0.5 * size, size]], device=target.device)
        grad = torch.tensor([[1.0], [1.0]], device=target.device)
        _, _, got = gate_and_gradient(logits, 1, order, grad, target.backend)
        _, _, exact = gate_and_gradient(logits.double(), 1, order, grad, "reference")
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("order", ORDERS)
def test_an_infinite_gradient_is_where_the_references_is(target, order):
    logits, grad = torch.randn(3, 9, device=target.device), torch.randn(3, 2, device=target.device)
    grad[1, 0] = INF
    found = [gate_and_gradient(logits, 2, order, grad, name)[2] for name in (target.backend, "reference")]
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("order", ORDERS)
def test_gradient_of_no_choice_is_the_references(target, order):
    logits = torch.tensor([[NAN, 1.0], [0.0, 1.0]], device=target.device)
    grad = torch.empty(2, 0, device=target.device)
    found = [gate_and_gradient(logits, 0, order, grad, name)[2] for name in (target.backend, "reference")]
    torch.testing.assert_close(*found, equal_nan=True)
