"""More tests of sinkhorn, most of them with prescribed sums or a tolerance."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

import moe_kernels as mk
from tests.helpers.inputs import each_alone, far_apart, framed, padded, shifted
from tests.helpers.sinkhorn import oracle, taken
from tests.helpers.sinkhorn_sums import assert_same, both
from tests.helpers.targets import Target

OP = "sinkhorn"


def sizes(target: Target) -> tuple[int, ...]:
    """Values of n at which kernels keep a matrix in different places."""
    if target.compiles:
        return (3, 12, 40, 70)
    return tuple(dict.fromkeys(taken(target, n) for n in (3, 4, 7, 12, 30, 50, 70, 130)))


def uneven(n: int, total: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Prescribed sums of rows and of columns, each about `total`. All row sums add up to as much as all column sums."""
    rows, columns = (total * (1 + 0.2 * torch.rand(1, n)) for _ in range(2))
    return rows, columns * (rows.sum() / columns.sum())


@functools.cache
def telling(n: int, total: float) -> tuple[dict[str, torch.Tensor], float]:
    """Scores, sums and a tolerance. A kernel that wrongly compared sum / prescribed sum - 1 with the tolerance, not
    sum - prescribed sum, would give results that are off by more than rounding."""
    leaves = dict(zip(("scores", "rows", "columns"), (torch.randn(2, n, n), *uneven(n, total)), strict=True))

    def stopped(tolerance):
        given = {name: each.double() for name, each in leaves.items()}
        return mk.sinkhorn(iterations=9, tolerance=tolerance, backend="reference", **given)

    def difference(tolerance):
        return float((stopped(tolerance) - stopped(tolerance * total)).abs().max())

    tolerance = max((0.3**i * total for i in range(12)), key=difference)
    assert difference(tolerance) > 1e-4 * total, n
    return leaves, tolerance


@pytest.mark.parametrize("total", [8.0, 0.125])
def test_a_tolerance_is_of_sums_not_of_their_ratio(target, total):
    for n in sizes(target):
        leaves, tolerance = telling(n, total)
        grad = torch.randn(2, n, n)
        assert_same(both(target, leaves, grad, 9, tolerance=tolerance), (n, tolerance), atol=2e-6 * max(total, 1))


@pytest.mark.parametrize("wrong", ["columns", "rows", "neither"])
def test_what_is_near_before_the_first_iteration(target, wrong):
    """A matrix is not within the tolerance if its rows sum to one and its columns do not, or the reverse."""
    for n in sizes(target):
        scores = torch.full((2, n, n), -30.0)
        scores[:, :, 0] = 0
        if wrong == "rows":
            scores = scores.mT.contiguous()
        if wrong == "neither":
            scores.fill_(-math.log(n))
        leaves = {"scores": scores, "rows": torch.ones(2, n), "columns": torch.ones(2, n)}
        found = both(target, leaves, torch.randn(2, n, n), 3, tolerance=1e-3)
        assert_same(found, n)
        assert float((found[0][0] - 1 / n).abs().max()) < 1e-6


@pytest.mark.parametrize(("tau", "factor"), [(0.5, 1.0), (2.0, 4.0)])
def test_no_iteration_is_taken_of_what_is_near(target, tau, factor):
    """With factor 4 each sum of exp(scores / tau) is a quarter of the prescribed one and within the tolerance."""
    for n in sizes(target):
        p = torch.rand(2, n, n, dtype=torch.float64) + 0.1
        leaves = {"scores": p.log() * tau, "rows": factor * p.sum(-1), "columns": factor * p.sum(-2)}
        grad = torch.randn(2, n, n)
        tolerance = 1e-2 if factor == 1.0 else 0.8 * float(max(leaves["rows"].max(), leaves["columns"].max()))
        found = both(target, leaves, grad, 4, tau=tau, tolerance=tolerance)
        assert_same(found, n, atol=1e-4)
        torch.testing.assert_close(found[0][1].double(), grad * p / tau, rtol=1e-4, atol=1e-5)
        assert not found[0][2].any()
        assert not found[0][3].any()


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_sums_of_annealed_iterations(target, iterations):
    for n in sizes(target):
        scores, grad = torch.randn(2, 2, n, n)
        rows, columns = (torch.cat([uneven(n, total)[which] for total in (1.0, 3.0)]) for which in (0, 1))
        leaves = {"scores": scores, "rows": rows, "columns": columns}
        assert_same(both(target, leaves, grad, iterations, tau=0.5, anneal_from=2.0), (n, iterations), atol=1e-5)


# (n, batch)
BATCHES = ((1, 300), (3, 130), (4, 130), (7, 40), (12, 19), (16, 19), (30, 5), (40, 3), (64, 3))


@pytest.mark.parametrize("with_sums", [False, True], ids=["ones", "sums"])
def test_more_matrices_than_a_program_holds(target, with_sums):
    for n, batch in BATCHES:
        if target.compiles and n in (4, 16, 40):
            continue  # same tiles as 3, 12 and 64
        scores, grad = torch.randn(2, batch, n, n)
        scores[-1] *= 40  # a large range, for the kernels with logarithms
        leaves = {"scores": scores}
        if with_sums:
            leaves |= {"rows": torch.rand(batch, n) + 0.3, "columns": torch.rand(batch, n) + 0.3}
        assert_same(both(target, leaves, grad, 2), (n, batch), atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"tau": 0.3}, {"tau": 0.3, "anneal_from": 1.0}], ids=str)
def test_one_iteration(target, settings):
    for n in (2, *sizes(target)):
        scores, grad = torch.randn(2, 2, n, n)
        assert_same(both(target, {"scores": scores}, grad, 1, **settings), n, atol=1e-5)


@pytest.mark.parametrize("with_sums", [False, True], ids=["ones", "sums"])
def test_what_lies_around_the_matrices_is_not_read(target, with_sums):
    places = [framed, lambda x: far_apart(x, (2**30, x.shape[-1], 1))]
    places.append(lambda x: far_apart(x, (x.shape[1] * 2**30, 2**30, 1)))
    places.append(lambda x: far_apart(x, (x.shape[1] * 2**28, 2**28, 1)))  # n = 12: row 8 starts at element 2^31
    if target.backend == "cuda":
        places += [padded, shifted, lambda x: padded(x.flatten(1)).unflatten(1, x.shape[1:])]
    for n in (3, 12, taken(target, 70)) if target.executed else (3, 12, 40, taken(target, 70), taken(target, 130)):
        if target.compiles and (n == 3 or (with_sums and n == 70)):
            continue
        scores, grad = torch.randn(2, 3, n, n)
        leaves = {"scores": scores}
        if with_sums:
            leaves |= {"rows": torch.rand(3, n) + 0.3, "columns": torch.rand(3, n) + 0.3}
        for which, place in enumerate(places):
            assert_same(both(target, leaves, grad, 2, place), (n, which), atol=1e-5)
        if target.backend == "cuda":
            assert_same(both(target, leaves, grad, 2, place_grad=padded), n, atol=1e-5)


def test_sums_of_several_batch_dimensions_and_of_any_strides(target):
    scores, given = torch.randn(2, 3, 3, 3, device=target.device), torch.rand(2, 3, 3, device=target.device).double()
    rows, columns = padded(given + 0.3, 0.1), (given + 0.3).mT.contiguous().mT
    settings = {"iterations": 3, "backend": target.backend}
    got = mk.sinkhorn(scores, rows=rows, columns=columns, **settings)
    flat = (each.contiguous().flatten(0, 1) for each in (scores, rows, columns))
    expected = mk.sinkhorn(**dict(zip(("scores", "rows", "columns"), flat, strict=True)), **settings)
    assert torch.equal(got.flatten(0, 1), expected)
    mean = columns.mean((0, 1)).broadcast_to(columns.shape)
    for broadcast in (mean[0, 0], mean[0, :1]):
        one, other = (mk.sinkhorn(scores, rows=rows, columns=each, **settings) for each in (broadcast, mean))
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_sums_are_not_rounded_to_the_dtype_of_the_scores(backend):
    """bfloat16 rounds 259 to 260, which would give 260 / 5 = 52. The nearest bfloat16 of 259 / 5 is 51.75."""
    sums = torch.full((5,), 259.0)
    p = mk.sinkhorn(torch.zeros(5, 5, dtype=torch.bfloat16), 2, rows=sums, columns=sums, backend=backend)
    assert torch.equal(p, torch.full_like(p, 51.75))


def test_each_gradient_alone_is_the_same(target):
    for n in (3, 40):
        on = {"device": target.device}
        leaves = {"scores": torch.randn(2, n, n, **on), "noise": torch.randn(2, n, n, **on)}
        leaves |= {"rows": torch.rand(2, n, **on) + 0.3, "columns": torch.rand(2, n, **on) + 0.3}
        grad = torch.randn(2, n, n, **on)

        def call(scores, **given):
            return mk.sinkhorn(scores, 3, tau=0.7, backend=target.backend, **given)

        given = {name: each.clone().requires_grad_() for name, each in leaves.items()}
        together = torch.autograd.grad(call(**given), list(given.values()), grad)
        alone = each_alone(call, leaves, grad)
        assert all(torch.equal(one, alone[name]) for one, name in zip(together, leaves, strict=True))


def test_a_broken_matrix_is_nan_even_if_its_zeros_would_be_near(target):
    """Kernels may compute a matrix with a NaN as if all scores were 0: as exp(0) = 1, its sums are the prescribed n."""
    for n in (12, 64):
        scores = torch.zeros(2, n, n, device=target.device)
        scores[1, 3, 2] = math.nan
        leaf, sums = scores.requires_grad_(), torch.full((n,), float(n), device=target.device, requires_grad=True)
        p = mk.sinkhorn(leaf, 3, rows=sums, columns=sums.detach(), tolerance=0.1, backend=target.backend)
        (dscores,) = torch.autograd.grad(p, leaf, torch.ones_like(p))
        torch.testing.assert_close(p[0].detach(), torch.ones_like(p[0]))
        assert p[1].isnan().all()
        assert dscores[0].isfinite().all()
        assert dscores[1].isnan().all()


def test_gradients_of_sums_are_nan_of_a_broken_matrix_alone(target):
    scores = torch.randn(18, 3, 3, device=target.device)
    scores[1, 1, 2] = math.nan
    sums = [torch.ones(18, 3, device=target.device, requires_grad=True) for _ in range(2)]
    p = mk.sinkhorn(scores, 3, rows=sums[0], columns=sums[1], backend=target.backend)
    for each in torch.autograd.grad(p, sums, torch.randn_like(p)):
        assert each.isnan().all(1).nonzero().tolist() == [[1]]
        assert each.isnan().any(1).nonzero().tolist() == [[1]]


@pytest.mark.parametrize("tolerance", [None, 0.05])
def test_sums_and_tolerance_against_the_definition(target, tolerance):
    slow = target.compiles
    batch, small = (3, ((1, 2), (4, 6), (7, 3))) if slow else (5, ((1, 2), (4, 9), (7, 5), (17, 6)))
    large = ((40, 1), 0.02), ((taken(target, 70), 2), 1.0)
    for (n, iterations), tau in (*itertools.product(small, (1.0, 0.02)), *large):
        scores, grad = torch.randn(2, batch, n, n, device=target.device).unbind()
        scores[:, 0, n // 2 + 1 :] = -math.inf
        scores[1, :, -1] = -math.inf
        scores[2, -1, -1] = math.nan
        rows = torch.rand(batch, n, device=target.device) + 0.2
        columns = rows.mean(0).flip(0)
        results = []
        for backend, dtype in ((target.backend, torch.float32), ("reference", torch.float64)):
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in (scores, rows, columns)]
            sums = {"rows": leaves[1], "columns": leaves[2], "tolerance": tolerance}
            p = mk.sinkhorn(leaves[0], iterations, tau=tau, **sums, backend=backend)
            results.append((p.detach(), *torch.autograd.grad(p, leaves, grad.to(dtype))))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_gradients_of_any_size(target, size):
    """Near convergence the GPU's kernels compute in float32, relative to the size of the gradient."""
    for n, iterations in ((4, 5), (12, 40), (taken(target, 70), 12)):
        scores, grad = torch.randn(2, 2, n, n)
        leaf, double = scores.to(target.device).requires_grad_(), scores.double().requires_grad_()
        p = mk.sinkhorn(leaf, iterations, backend=target.backend)
        (got,) = torch.autograd.grad(p, leaf, (grad * size).to(target.device))
        (expected,) = torch.autograd.grad(oracle(double, iterations, 1.0), double, (grad * size).double())
        torch.testing.assert_close(got.cpu().double() / size, expected / size, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("coupling", [-6.0, -12.0])
def test_gradient_of_blocks_that_converge_slowly(target, coupling):
    """Blocks converge at once, their sums to each other slowly: small changes go on for many iterations. The float32
    gradient is the float64 one rounded."""
    for n, iterations in ((12, 60), (taken(target, 70), 20)):
        first = torch.arange(n) < n // 2
        scores = torch.randn(2, n, n) + coupling * (first[:, None] != first[None, :])
        grad = torch.randn(2, n, n)
        leaf, double = scores.to(target.device).requires_grad_(), scores.double().requires_grad_()
        p = mk.sinkhorn(leaf, iterations, backend=target.backend)
        (got,) = torch.autograd.grad(p, leaf, grad.to(target.device))
        (expected,) = torch.autograd.grad(oracle(double, iterations, 1.0), double, grad.double())
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-7, atol=1e-12)


def test_a_gradient_that_is_not_a_number_spreads_over_its_matrix(target):
    for n in (4, 12, taken(target, 70)):
        grad = torch.randn(2, n, n)
        grad[0, 1, 2] = math.nan
        scores = torch.randn(2, n, n)
        found = both(target, {"scores": scores}, grad, 12)
        assert torch.equal(found[0][1].isnan(), found[1][1].isnan())
        assert found[0][1].isnan().flatten(1).any(1).tolist() == [True, False]
