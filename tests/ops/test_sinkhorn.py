"""sinkhorn: values, gradients and errors."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import torch

import moe_kernels as mk
from moe_kernels import backends
from tests.helpers.sinkhorn import oracle, taken
from tests.helpers.targets import TARGETS, Target, on_every_target, reason_to_skip, running

INF, NAN = math.inf, math.nan
TAUS = (1.0, 0.1, 1e-3, 1e-5, 1e-7)

target = on_every_target("sinkhorn")


@functools.cache
def drawn(n: int, iterations: int, tau: float, normal: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(n)
    scores = (torch.randn if normal else torch.rand)(3, n, n, generator=draw)
    return scores, oracle(scores, iterations, tau)


@functools.cache
def long_gradient(n: int, iterations: int, tau: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, dL/dp, and dL/dscores computed in numpy's long double."""
    if np.finfo(np.longdouble).eps > 2e-19:
        pytest.skip("numpy's long double is no wider than float64 here")
    draw = torch.Generator().manual_seed(n)
    scores, grad = (torch.randn(2, n, n, generator=draw) for _ in range(2))
    log_p, steps = scores.numpy().astype(np.longdouble) / np.longdouble(tau), []
    for axis in (-1, -2) * iterations:
        most = log_p.max(axis, keepdims=True)
        log_p = log_p - most - np.log(np.exp(log_p - most).sum(axis, keepdims=True))
        steps.append((log_p, axis))
    change = np.exp(log_p) * grad.numpy().astype(np.longdouble)
    for log_p, axis in reversed(steps):
        change = change - np.exp(log_p) * change.sum(axis, keepdims=True)
    return scores, grad, torch.from_numpy((change / np.longdouble(tau)).astype(np.float64))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.detach().double() - expected.detach()).abs().max()) if got.numel() else 0.0


def sizes(target: Target) -> tuple[tuple[int, int], ...]:
    """Pairs of n and the number of iterations."""
    if target.executed and target.backend == "cuda":
        return ((1, 3), (3, 5), (4, 20), (7, 30), (16, 40), (17, 3), (40, 2), (64, 2))
    if target.executed:
        return ((2, 2), (3, 4), (7, 3), (16, 40), (70, 2))
    large = () if target.backend in ("reference", "cuda") else ((129, 6), (256, 3))
    return ((1, 3), (2, 1), (3, 20), (4, 20), (7, 150), (16, 50), (17, 20), (33, 9), (64, 20), *large)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("normal", [True, False], ids=["normal", "uniform"])
def test_float64_at_every_temperature(target, tau, normal):
    for n, iterations in sizes(target):
        scores, expected = drawn(n, iterations, tau, normal)
        got = mk.sinkhorn(scores.to(target.device), iterations, tau=tau, backend=target.backend)
        assert error(got.cpu(), expected) < 1e-6, (n, iterations)


def test_small_scores_as_a_new_parameter_holds_them(target):
    """Scores are drawn from U(-0.05, 0.05), as in a new LocalSearch."""
    for tau, n in itertools.product((1e-2, 3e-3, 1e-3, 2e-4), (4, 16) if target.executed else (4, 16, 40)):
        scores = (torch.rand(4, n, n, device=target.device) - 0.5) / 10
        iterations = 5 if target.executed else 60
        got = mk.sinkhorn(scores, iterations, tau=tau, backend=target.backend)
        assert error(got, oracle(scores, iterations, tau)) < 1e-6, (tau, n)


@pytest.mark.parametrize("n", [16, 70])
def test_a_solve_goes_on_while_two_columns_change(target, n):
    """Two neighbouring columns, at another place in each matrix, still change; the others converge in one iteration."""
    n = taken(target, n)
    scores = torch.full((4, n, n), -40.0)
    scores.diagonal(dim1=1, dim2=2).zero_()
    for matrix, first in zip(scores, (0, 1, 2, n - 2), strict=True):
        matrix[first, first + 1], matrix[first + 1, first] = 0.0, -20.0
    p = mk.sinkhorn(scores.to(target.device), 20, backend=target.backend)
    assert error(p, oracle(scores.double(), 20, 1.0)) < 1e-6


@pytest.mark.parametrize("n", [4, 12, 70])
def test_rows_of_any_width(target, n):
    n = taken(target, n)
    widths = torch.tensor([50.0, 65.0, 95.0, 120.0, 290.0, 310.0, 740.0, 800.0, 3000.0])
    scores = torch.randn(len(widths), n, n)
    scores[:, :, 1] -= widths[:, None]
    grad, exact = torch.randn(len(widths), n, n), scores.double().requires_grad_()
    leaf = scores.to(target.device).requires_grad_()
    p = mk.sinkhorn(leaf, 3, backend=target.backend)
    expected = oracle(exact, 3, 1.0)
    (got,), (wanted,) = torch.autograd.grad(p, leaf, grad.to(p.device)), torch.autograd.grad(expected, exact, grad)
    assert error(p, expected) < 1e-6
    assert (got.cpu() - wanted).abs().max() < 1e-6


@pytest.mark.parametrize(("n", "iterations"), [(4, 3), (12, 40), (40, 2), (70, 1)])
def test_a_matrix_does_not_see_its_neighbours(target, n, iterations):
    n = taken(target, n)
    scales = torch.tensor([1.0, 1e4, 0.0, 90.0, 1e-3, 400.0, 1e7] * (1 if target.executed else 5))
    scores = torch.randn(len(scales), n, n) * scales[:, None, None]
    scores[1, 1, 0], scores[5, 2, 3] = NAN, INF
    scores[4, 0] = -INF
    scores[4, :, 1] = -INF
    scores = scores.to(target.device)
    grad = torch.randn_like(scores)

    def both(scores, grad):
        leaf = scores.clone().requires_grad_()
        p = mk.sinkhorn(leaf, iterations, backend=target.backend)
        return p.detach(), torch.autograd.grad(p, leaf, grad)[0]

    together = both(scores, grad)
    broken = together[0].isnan().flatten(1)
    assert broken.any(1).nonzero().tolist() == broken.all(1).nonzero().tolist() == [[1], [5]]
    assert together[1].isnan().flatten(1).any(1).nonzero().tolist() == [[1], [5]]
    for i in range(7):
        which = [i, i] if target.compiles else [i]
        alone = both(scores[which], grad[which])
        for whole, one in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[which], one, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tau", [1.0, 0.02, 1e-5])
def test_forbidden_pairs(target, tau):
    n = 5 if target.executed else 20
    scores = torch.randn(4, n, n).masked_fill(torch.rand(4, n, n) < 0.4, -INF)
    scores.diagonal(dim1=1, dim2=2).zero_()  # the identity is allowed
    scores[1, 2] = -INF
    scores[2, :, 0] = -INF
    scores[3] = -INF
    leaf = scores.to(target.device).requires_grad_()
    p = mk.sinkhorn(leaf, 9, tau=tau, backend=target.backend)
    (got,) = torch.autograd.grad(p, leaf, torch.ones_like(p).cumsum(-1))
    assert torch.equal(p[0].detach(), p[0].detach().masked_fill(scores[0].isinf().to(p.device), 0))
    assert error(p[0], oracle(leaf[0], 9, tau)) < 1e-6
    assert not p[1, 2].any()
    assert not p[2, :, 0].any()
    assert not p[3].any()
    assert got.isfinite().all()
    assert not got[scores.isinf().to(got.device)].any()
    torch.testing.assert_close(p[1:3].sum(-2), (p[1:3].sum(-2) > 0).float())  # columns with allowed pairs sum to one


def test_one_forbidden_row_among_tame_ones(target):
    """The range (maximum - minimum) of a forbidden row is -inf - -inf, which is NaN."""
    scores = torch.randn(2, 4, 4, device=target.device)
    scores[0, 1] = -INF
    p = mk.sinkhorn(scores, 3, backend=target.backend)
    assert error(p, mk.sinkhorn(scores.double(), 3, backend="reference")) < 1e-6
    assert not p[0, 1].any()


@pytest.mark.parametrize("below", [50.0, 150.0, 250.0, 330.0, 400.0, 550.0, 700.0])
def test_columns_far_below_the_others(target, below):
    for n in (4,) if target.executed else (4, 12, 20):
        scores = torch.randn(2, n, n)
        scores[:, :, : n // 2] -= below
        grad, (leaf, exact) = torch.randn(2, n, n), (scores.to(target.device), scores.double())
        leaf, exact = leaf.requires_grad_(), exact.requires_grad_()
        p, expected = mk.sinkhorn(leaf, 3, backend=target.backend), oracle(exact, 3, 1.0)
        torch.testing.assert_close(p.cpu(), expected.float())
        (got,) = torch.autograd.grad(p, leaf, grad.to(target.device))
        torch.testing.assert_close(got.cpu(), torch.autograd.grad(expected, exact, grad.double())[0].float())


@pytest.mark.parametrize("tau", TAUS)
def test_gradient_against_float64(target, tau):
    """`noise` is about the size of float64 roundings in terms that cancel."""
    for n, iterations in sizes(target):
        scores, grad, expected = long_gradient(n, iterations, tau)
        leaf = scores.to(target.device).requires_grad_()
        p = mk.sinkhorn(leaf, iterations, tau=tau, backend=target.backend)
        got = torch.autograd.grad(p, leaf, grad.to(target.device))[0].cpu()
        most_grad, most_score, most = (x.abs().amax((1, 2), keepdim=True) for x in (grad, scores, expected))
        noise = 4 * torch.finfo(torch.float64).eps / tau * (most_grad + most_score * most)
        allowed = 1e-7 * expected.abs() + 1e-12 + noise
        assert bool(((got - expected).abs() <= allowed).all()), (n, iterations)


def test_gradcheck_in_float64():
    scores = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    for options in ({"tau": 0.4}, {"tau": 0.4, "anneal_from": 2.0}):
        assert torch.autograd.gradcheck(
            lambda s, options=options: mk.sinkhorn(s, 5, backend="reference", **options), scores
        )
    assert torch.autograd.gradcheck(
        lambda s: mk.sinkhorn(s, 60, tau=1.0, gradient="implicit", backend="reference"), scores
    )


@pytest.mark.parametrize("settings", [{"tau": 1.0}, {"tau": 0.7}, {"tau": 0.7, "anneal_from": 0.72}], ids=str)
def test_implicit_gradient_at_the_fixed_point(target, settings):
    n, iterations, width = (3, 16, 0.2) if target.executed else (12, 200, 0.3)
    scores = (width * torch.randn(3, n, n, device=target.device)).requires_grad_()
    grad = torch.randn_like(scores)
    p = mk.sinkhorn(scores, iterations, **settings, gradient="implicit", backend=target.backend)
    (implicit,) = torch.autograd.grad(p, scores, grad)
    q = mk.sinkhorn(scores, iterations, **settings, backend=target.backend)
    (unrolled,) = torch.autograd.grad(q, scores, grad)
    assert torch.equal(p, q)
    torch.testing.assert_close(implicit, unrolled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_implicit_gradient_of_a_permutation_and_of_blocks(backend):
    blocks = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2))
    for scores, tau in ((torch.eye(4), 0.01), (torch.randn(5, 5) - 1000 * (1 - blocks), 1.0)):
        scores = scores.double().requires_grad_()
        grad = torch.randn_like(scores)
        found = [
            torch.autograd.grad(mk.sinkhorn(scores, 300, tau=tau, gradient=each, backend=backend), scores, grad)[0]
            for each in ("implicit", "unrolled")
        ]
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_second_derivative_at_the_fixed_point():
    scores = torch.randn(3, 3, dtype=torch.float64).mul(0.3).requires_grad_()
    grad, direction = torch.randn(2, 3, 3, dtype=torch.float64)
    second = []
    for gradient in ("implicit", "unrolled"):
        p = mk.sinkhorn(scores, 300, gradient=gradient, backend="reference")
        (first,) = torch.autograd.grad(p, scores, grad, create_graph=True)
        second += torch.autograd.grad(first, scores, direction)
    torch.testing.assert_close(*second, rtol=1e-7, atol=1e-9)


def test_implicit_gradient_refuses_what_has_not_converged(target):
    scores = torch.randn(2, 4, 4, device=target.device, requires_grad=True)
    with pytest.raises(ValueError, match=r"sinkhorn: gradient='implicit' holds at the fixed point.*one off by"):
        mk.sinkhorn(scores, 3, tau=0.05, gradient="implicit", backend=target.backend)
    broken = scores.detach().clone()
    broken[0, 0, 0] = NAN
    with pytest.raises(ValueError, match="off by inf"):
        mk.sinkhorn(broken.requires_grad_(), 3, gradient="implicit", backend=target.backend)


def test_annealing_reaches_the_assignment(target):
    pytest.importorskip("scipy", reason="scipy is not installed")
    n, iterations = (4, 30) if target.executed else (8, 60)
    scores = torch.randn(12, n, n, device=target.device)
    p = mk.sinkhorn(scores, iterations, tau=1e-7, anneal_from=1.0, backend=target.backend)
    columns = mk.harden(scores)
    assert torch.equal(p.round(), torch.nn.functional.one_hot(columns, n).to(p.dtype))
    expected = mk.sinkhorn(scores.double(), iterations, tau=1e-7, anneal_from=1.0, backend="reference")
    assert error(p, expected) < 1e-6


def test_gradient_of_annealed_iterations(target):
    n = 5
    scores = torch.randn(3, n, n, device=target.device)
    leaf, double = scores.clone().requires_grad_(), scores.double().requires_grad_()
    grad = torch.randn_like(scores)
    p = mk.sinkhorn(leaf, 6, tau=0.05, anneal_from=1.0, backend=target.backend)
    q = mk.sinkhorn(double, 6, tau=0.05, anneal_from=1.0, backend="reference")
    (got,) = torch.autograd.grad(p, leaf, grad)
    (expected,) = torch.autograd.grad(q, double, grad.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-9)
    plain, same = (
        mk.sinkhorn(scores, 6, tau=0.05, backend=target.backend, **hot) for hot in ({}, {"anneal_from": 0.05})
    )
    assert torch.equal(plain, same)


@pytest.mark.slow
def test_marginals_against_pot_and_gradcheck():
    ot = pytest.importorskip("ot", reason="POT is not installed")
    scores, rows = torch.randn(2, 5, 5, dtype=torch.float64), torch.rand(2, 5, dtype=torch.float64) + 0.2
    columns = torch.full((5,), 1 / 5, dtype=torch.float64)
    rows = rows / rows.sum(-1, keepdim=True)
    p = mk.sinkhorn(scores, 300, tau=0.5, rows=rows, columns=columns)
    for got, each, row in zip(p, scores, rows, strict=True):
        assert error(got, ot.sinkhorn(row, columns, -each, 0.5, numItermax=5000, stopThr=1e-14)) < 1e-9
    early = mk.sinkhorn(scores, 1, tau=0.05, rows=rows, columns=columns)
    torch.testing.assert_close(early.sum(-2), columns.expand(2, 5))  # columns are normalised last
    leaves = [x.requires_grad_() for x in (scores, rows, columns)]
    fixed = {"rows": rows.detach(), "columns": columns.detach(), "tau": 1.0, "gradient": "implicit"}
    for backend in ("reference", None):  # None: the CPU's kernel, if it is built
        unrolled = functools.partial(mk.sinkhorn, iterations=4, tau=0.4, backend=backend)
        assert torch.autograd.gradcheck(lambda s, r, c, f=unrolled: f(s, rows=r, columns=c), leaves)
        implicit = functools.partial(mk.sinkhorn, iterations=60, backend=backend, **fixed)
        assert torch.autograd.gradcheck(implicit, scores)


def test_noise_is_added(target):
    scores, noise = (torch.randn(2, 4, 4, device=target.device, requires_grad=True) for _ in range(2))
    p = mk.sinkhorn(scores, 3, tau=0.3, noise=noise, backend=target.backend)
    assert torch.equal(p, mk.sinkhorn(scores + noise, 3, tau=0.3, backend=target.backend))
    to_scores, to_noise = torch.autograd.grad(p.square().sum(), (scores, noise))
    assert to_scores.any()
    assert torch.equal(to_scores, to_noise)


def test_what_is_not_a_number_is_within_no_tolerance(target):
    """A matrix with a NaN becomes NaN; the other takes no iteration. Without the NaN neither would take one."""
    for n in (4, 40):
        leaf = torch.zeros(2, n, n, device=target.device)
        leaf[0, 1, 2] = NAN
        sums = torch.full((2, n), float(n), device=target.device).requires_grad_()
        p = mk.sinkhorn(leaf.requires_grad_(), 2, rows=sums, columns=sums, tolerance=0.1, backend=target.backend)
        grad = torch.randn_like(p)
        to_scores, to_sums = torch.autograd.grad(p, (leaf, sums), grad)
        assert p[0].isnan().all()
        assert to_scores[0].isnan().all()
        assert to_sums[0].isnan().all()
        assert torch.equal(p[1].detach(), torch.ones_like(p[1]))
        assert torch.equal(to_scores[1], grad[1])
        assert not to_sums[1].any()


@pytest.mark.parametrize(("n", "iterations", "tolerance"), [(6, 40, 1e-3), (70, 2, 0.1)])
def test_tolerance_stops_each_matrix_by_itself(target, n, iterations, tolerance):
    n = taken(target, n)
    wide = target.backend in ("reference", "cpu")
    scores = torch.randn(5, n, n, dtype=torch.float64) * torch.tensor([0.3, 1.0, 3.0, 8.0, 0.0])[:, None, None]
    scores[2, 1] = -INF  # the sum of a forbidden row does not count
    scores[4] = -INF  # needs no iteration: row 0 and column 0 are forbidden, the other sums are 1
    scores[4, 1:, 1:] = -math.log(n - 1)
    scores, grad = (x if wide else x.float() for x in (scores, torch.randn_like(scores)))
    counts = []
    for each in scores.double():
        p, count = each.exp(), 0
        while count < iterations and not all(
            ((p.sum(d) - 1).abs() * (p.sum(d) > 0)).amax() <= tolerance for d in (-1, -2)
        ):
            count += 1
            p = mk.sinkhorn(each, count, backend="reference")
        counts.append(count)
    assert len(set(counts)) > 3 - (n > 6), counts
    assert counts[4] == 0
    leaf = scores.to(target.device).requires_grad_()
    p = mk.sinkhorn(leaf, iterations, tolerance=tolerance, backend=target.backend)
    (got,) = torch.autograd.grad(p, leaf, grad.to(target.device))
    allowed = {"rtol": 0, "atol": 1e-12 if wide else 1e-6, "check_dtype": False, "check_device": False}
    for i, count in enumerate(counts):
        alone = scores[i].double().requires_grad_()
        q = mk.sinkhorn(alone, count, backend="reference")
        torch.testing.assert_close(p[i], q, **allowed)
        torch.testing.assert_close(got[i], torch.autograd.grad(q, alone, grad[i].double())[0], **allowed)


@pytest.mark.parametrize(("backend", "most"), [("triton", 1024), ("cuda", 64)])
def test_what_is_too_large_for_a_gpu_is_refused_by_name(backend, most):
    target = next(each for each in TARGETS if each.backend == backend)
    if reason := reason_to_skip(target, "sinkhorn"):
        pytest.skip(reason)
    error = f"backend '{backend}'.* n up to {most}, not {most + 1}"
    with running(target), pytest.raises(backends.BackendError, match=error):
        mk.sinkhorn(torch.zeros(most + 1, most + 1, device=target.device), 1, backend=backend)


@pytest.mark.parametrize(
    ("dtype", "n", "iterations"), [(torch.bfloat16, 5, 6), (torch.float16, 3, 6), (torch.bfloat16, 70, 2)], ids=str
)
def test_half_precision_is_the_float64_result_rounded(target, dtype, n, iterations):
    # Triton takes 7 s to compile for n = 5, which test_forbidden_pairs has in float32, and .5 s for n = 2.
    n = (n + 1) // 2 if target.compiles and n < 8 else taken(target, n)
    scores = torch.randn(3, n, n, device=target.device).to(dtype)
    leaf = scores.clone().requires_grad_()
    p = mk.sinkhorn(leaf, iterations, tau=1e-3, backend=target.backend)
    assert p.dtype == dtype
    unit = torch.finfo(dtype).eps
    assert error(p, oracle(scores, iterations, 1e-3)) <= unit * (1 if target.interpreted else 0.51)
    p = mk.sinkhorn(leaf, iterations, tau=0.5, backend=target.backend)
    (got,) = torch.autograd.grad(p, leaf, p.detach())
    double = scores.double().requires_grad_()
    (expected,) = torch.autograd.grad(oracle(double, iterations, 0.5), double, p.detach().double())
    torch.testing.assert_close(got.double(), expected, rtol=2 * unit, atol=1e-7)


def test_float64_on_the_cpu():
    if reason_to_skip(TARGETS[0], "sinkhorn"):
        pytest.skip(str(reason_to_skip(TARGETS[0], "sinkhorn")))
    for n, tau in itertools.product((3, 40), (1.0, 0.01, 1e-7)):
        scores = torch.randn(2, n, n, dtype=torch.float64, requires_grad=True)
        p = mk.sinkhorn(scores, 9, tau=tau, backend="cpu")
        assert error(p, oracle(scores, 9, tau)) < 1e-7
    scores = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: mk.sinkhorn(s, 5, tau=0.4, backend="cpu"), scores)
    assert torch.autograd.gradcheck(lambda s: mk.sinkhorn(s, 5, tau=0.4, anneal_from=1.0, backend="cpu"), scores)


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (0, 0), (1, 1), (2, 2, 3, 3)])
def test_empty_and_many_dimensions(target, shape):
    scores = torch.randn(shape, device=target.device, requires_grad=True)
    for iterations in (0, 2):
        p = mk.sinkhorn(scores, iterations, backend=target.backend)
        assert error(p, oracle(scores, iterations, 1.0)) < 1e-6
        assert torch.autograd.grad(p.sum(), scores)[0].shape == scores.shape


def test_one_element_that_is_forbidden(target):
    scores = torch.full((1, 1), -math.inf, device=target.device, requires_grad=True)
    p = mk.sinkhorn(scores, 2, backend=target.backend)
    (got,) = torch.autograd.grad(p.sum(), scores)
    assert p.item() == got.item() == 0.0


def test_views_are_read_in_place_and_nothing_else_is_written(target):
    base = torch.randn(4, 7, 9, device=target.device)
    views = [base[:, :5, 2:7], base[::2, :5, :5], base[:, :7, :7].mT, base[1, :5, :5].expand(3, 5, 5)]
    many, grads = torch.randn(2, 70, 5, 5, device=target.device)[:, ::2]
    for view, grad in (*((each, None) for each in views), (many, grads)):
        before, leaf = base.clone(), view.detach().requires_grad_()
        p = mk.sinkhorn(leaf, 3, backend=target.backend)
        assert error(p, oracle(view, 3, 1.0)) < 1e-6
        grad = p.detach().mT if grad is None else grad
        (got,) = torch.autograd.grad(p, leaf, grad)
        double = view.double().requires_grad_()
        (expected,) = torch.autograd.grad(oracle(double, 3, 1.0), double, grad.double())
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(base, before)


@pytest.mark.parametrize("tau", [1e-39, 1e39])
def test_temperatures_beyond_float32(target, tau):
    """Neither tau nor 1 / tau is a normal float32."""
    for n in (4, 5):
        p = mk.sinkhorn(torch.zeros(2, n, n, device=target.device), 3, tau=tau, backend=target.backend)
        torch.testing.assert_close(p, torch.full_like(p, 1 / n))


def test_results_do_not_depend_on_threads():
    scores = torch.randn(300, 12, 12) * torch.logspace(0, 4, 300)[:, None, None]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(mk.sinkhorn(scores, 9))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda s: mk.sinkhorn(s[0], 3), ValueError, r"sinkhorn: scores must be \(\.\.\., n, n\), got shape \(3,\)"),
        (lambda s: mk.sinkhorn(s[:2], 3), ValueError, r"sinkhorn: scores must be .* got shape \(2, 3\)"),
        (lambda s: mk.sinkhorn(s.long(), 3), TypeError, "sinkhorn: scores must have dtype .* got int64"),
        (lambda s: mk.sinkhorn([[1.0]], 3), TypeError, "sinkhorn: scores must be a Tensor, got list"),
        (lambda s: mk.sinkhorn(s, -1), ValueError, "sinkhorn: iterations must be from 0 .* got -1"),
        (lambda s: mk.sinkhorn(s, 2.0), TypeError, "sinkhorn: iterations must be an int, got float"),
        (lambda s: mk.sinkhorn(s, 2, tau=0), ValueError, "sinkhorn: tau must be above 0 .* got 0"),
        (lambda s: mk.sinkhorn(s, 2, tau=NAN), ValueError, "sinkhorn: tau must be above 0 .* got nan"),
        (lambda s: mk.sinkhorn(s, 2, tau=10**400), ValueError, "tau must be finite in float64, got a larger int"),
        (lambda s: mk.sinkhorn(s, 2, tau="1"), TypeError, "sinkhorn: tau must be a number, got str"),
        (lambda s: mk.sinkhorn(s, 2, anneal_from=0.5), ValueError, "sinkhorn: anneal_from must be at least tau = 1"),
        (lambda s: mk.sinkhorn(s, 2, gradient="exact"), ValueError, "sinkhorn: gradient must be one of 'unrolled'"),
        (lambda s: mk.sinkhorn(s, 2, noise=s[0]), ValueError, "sinkhorn: noise must have the shape of scores"),
        (
            lambda s: mk.sinkhorn(s, 2, rows=s[0, :2]),
            ValueError,
            r"sinkhorn: rows must broadcast to \(3,\) .* got \(2,\)",
        ),
        (lambda s: mk.sinkhorn(s, 2, columns=s[None, 0]), ValueError, "sinkhorn: columns must broadcast to"),
        (
            lambda s: mk.sinkhorn(s, 2, gradient="implicit", columns=s[0].clone().requires_grad_()),
            ValueError,
            "sinkhorn: gradient='implicit' computes no gradient for columns",
        ),
        (lambda s: mk.sinkhorn(s, 2, columns=[1.0]), TypeError, "sinkhorn: columns must be a Tensor, got list"),
        (lambda s: mk.sinkhorn(s, 2, tolerance=-1), ValueError, "sinkhorn: tolerance must be above 0 .* got -1"),
        (lambda s: mk.sinkhorn(s, 2, tolerance=0.1, anneal_from=2), ValueError, "sinkhorn: tolerance would stop .*"),
        (lambda s: torch.func.grad(lambda m: mk.sinkhorn(m, 2).sum())(s), TypeError, "sinkhorn: torch.func transforms"),
        (lambda s: mk.harden(s[0]), ValueError, r"harden: soft must be \(\.\.\., n, n\)"),
        (lambda s: mk.harden(s * NAN), ValueError, "harden: soft must hold neither NaN"),
        (lambda s: mk.harden(s - INF), ValueError, "harden: every permutation uses a forbidden pair"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.randn(3, 3))
