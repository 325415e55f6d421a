"""Tests of kwta (k-winner-take-all)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.ops._define import operators
from moe_kernels.verify import threads
from tests.helpers.inputs import far_apart, framed, padded, shifted
from tests.helpers.kwta import DTYPES, INF, NAN, TIES, same_bits, special
from tests.helpers.targets import TARGETS, Target, reason_to_skip, running


def winners(row: list[float], k: int, ties: str) -> list[bool]:
    """The definition, element by element, with Python's floats."""
    rank = [(math.isnan(v), 0.0 if math.isnan(v) else v) for v in row]
    if ties == "index":
        best = sorted(range(len(row)), key=lambda i: (rank[i], -i), reverse=True)[:k]
        return [i in best for i in range(len(row))]
    at_least = [sum(other >= own for other in rank) for own in rank]
    above = [sum(other > own for other in rank) for own in rank]
    return [count <= k if ties == "strict" else more < k for count, more in zip(at_least, above, strict=True)]


ROWS = {
    "normal": torch.randn,
    "negative": lambda n: torch.randn(n) - 200,  # zeros read behind the row would be the largest
    "small integers": lambda n: torch.randint(-2, 3, (n,)).float(),
    "constant": lambda n: torch.full((n,), 0.3),
    "relu": lambda n: torch.randn(n).relu(),
    "sorted": lambda n: torch.arange(n).float() - n / 2,
    "lognormal": lambda n: (4 * torch.randn(n)).exp(),
    "one outlier": lambda n: torch.cat([torch.randn(max(n - 1, 0)), torch.tensor([3e38])]),
    "huge": lambda n: torch.randn(n) * 1e38,
    "subnormal": lambda n: torch.randn(n) * 1e-41,  # float32: if comparisons flushed subnormals, all would tie
    "special": special,
    "all NaN": lambda n: torch.full((n,), NAN),
    "masked": lambda n: torch.randn(n).masked_fill(torch.rand(n) < 0.7, -INF),
}


def ks(n: int) -> list[int]:
    return sorted({0, 1, n // 10, n // 2, n - 1, n})


def shapes(target: Target, dtype: torch.dtype, ties: str) -> list[tuple[int, int]]:
    """(n, k) to test; few if GPU kernels run on CPU tensors. A word of the packed mask has 32 elements."""
    if not target.executed:
        return [(n, k) for n in (1, 2, 31, 32, 33, 100, 512) for k in ks(n)]
    found = [(33, 16), (33, 3), (33, 33), (33, 0)]
    if target.backend == "cuda":
        return [*found, (1, 1), (64, 21)]
    # Triton compiles two kernels for each length. Those of float16 differ from bfloat16's only in conversions.
    if dtype == torch.float16:
        return found
    return found + {"index": [(1, 1)], "strict" if dtype == torch.float32 else "all": [(64, 21)]}.get(ties, [])


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_reference_is_the_definition(dtype, ties):
    for make, n in itertools.product(ROWS.values(), (1, 31, 32, 100)):
        row = make(n).to(dtype)
        for k in ks(n):
            expected = winners(row.tolist(), k, ties)
            assert mk.kwta_mask(row, k, ties=ties, backend="reference").tolist() == expected


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ROWS)
def test_mask_and_values_are_the_reference_bit_for_bit(target, kind, dtype, ties):
    for n, k in shapes(target, dtype, ties):
        x = torch.stack([ROWS[kind](n) for _ in range(2)]).to(dtype).to(target.device)
        values = torch.stack([special(n) for _ in range(2)]).to(dtype).to(target.device)
        mask = mk.kwta_mask(x, k, ties=ties, backend="reference")
        assert torch.equal(mk.kwta_mask(x, k, ties=ties, backend=target.backend), mask), (n, k)
        expected = mk.kwta(x, k, values=values, ties=ties, backend="reference")
        assert same_bits(mk.kwta(x, k, values=values, ties=ties, backend=target.backend), expected), (n, k)


@pytest.mark.parametrize("n", [1000, 1024, 1025, 4096, 5000, 16384, 32768, 33000])
def test_long_rows(target, n):
    kinds = ("normal", "special") if target.interpreted else tuple(ROWS)
    for dtype in (torch.float32, torch.bfloat16):
        writes_mask = (n // 1000 + (dtype == torch.float32)) % 2  # of the two kernels that Triton would compile
        x = torch.stack([ROWS[kind](n) for kind in kinds]).to(dtype).to(target.device)
        for k in (n // 10,) if target.executed else (n // 10, n // 2, n - 1):
            if not target.compiles or writes_mask:
                expected = mk.kwta_mask(x, k, backend="reference")
                assert torch.equal(mk.kwta_mask(x, k, backend=target.backend), expected)
            if not target.compiles or not writes_mask:
                assert same_bits(mk.kwta(x, k, backend=target.backend), mk.kwta(x, k, backend="reference"))


def test_a_thousand_rows_agree_between_cpu_and_cuda():
    gpu = next(target for target in TARGETS if target.backend == "cuda")
    reason = reason_to_skip(gpu)
    if reason is not None:
        pytest.skip(reason)
    counts = dict.fromkeys((1, 31, 32, 33, 100, 1000, 1024, 1025), 110) | {4096: 48, 5000: 48, 16384: 24}
    assert sum(counts.values()) == 1000
    kinds = list(ROWS.values())
    for n, count in counts.items():
        x = torch.stack([kinds[i % len(kinds)](n) for i in range(count)])
        for ties, k in zip(TIES, (n // 2, n // 10, n - n // 10), strict=True):
            expected = mk.kwta_mask(x, k, ties=ties, backend="cpu")
            with running(gpu):
                got = mk.kwta_mask(x.to(gpu.device), k, ties=ties, backend="cuda").cpu()
            assert torch.equal(got, expected), (n, k, ties)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=16), min_size=1, max_size=70), st.data())
def test_any_row_on_the_cpu(row, data):
    k = data.draw(st.integers(0, len(row)))
    ties = data.draw(st.sampled_from(TIES))
    dtype = data.draw(st.sampled_from([*DTYPES, torch.float64]))
    x = torch.tensor(row, dtype=dtype)
    assert mk.kwta_mask(x, k, ties=ties, backend="cpu").tolist() == winners(x.tolist(), k, ties)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_goes_to_winners_alone(target, dtype):
    x = torch.randint(-3, 4, (2, 3, 29)).to(dtype).to(target.device).requires_grad_()
    values = torch.randn_like(x).requires_grad_()
    grad = torch.full_like(x, NAN)  # a product with the mask would be NaN
    mask = mk.kwta_mask(x, 13, backend="reference")
    grad[mask] = torch.randn_like(grad)[mask]
    expected = torch.where(mask, grad, 0)
    if not (target.compiles and dtype == torch.float16):  # in Triton the same code as with bfloat16
        (dx,) = torch.autograd.grad(mk.kwta(x, 13, backend=target.backend), x, grad)
        assert same_bits(dx, expected)
    dx, dvalues = torch.autograd.grad(
        mk.kwta(x, 13, values=values, backend=target.backend), (x, values), grad, allow_unused=True
    )
    assert dx is None
    assert same_bits(dvalues, expected)


def test_gradient_of_a_sum_whose_gradient_has_stride_zero(target):
    x = torch.randn(3, 40, device=target.device, requires_grad=True)
    mk.kwta(x, 7, backend=target.backend).sum().backward()
    assert torch.equal(x.grad, mk.kwta_mask(x, 7, backend="reference").float())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_first_and_second_derivatives_in_float64(backend):
    x = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
    values = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)

    def squared(x, values):
        return mk.kwta(x, 4, backend=backend) ** 2 + mk.kwta(x.detach(), 4, values=values, backend=backend) ** 3

    assert torch.autograd.gradcheck(squared, (x, values))
    assert torch.autograd.gradgradcheck(squared, (x, values))


def test_backward_keeps_one_bit_an_element_and_no_copy_of_x():
    x = torch.randn(64, 1000, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        mk.kwta(x, 100, backend="cpu")
    assert [(t.dtype, tuple(t.shape)) for t in saved] == [(torch.int32, (64, 32))]


def test_views_are_read_in_place_and_not_written(target):
    base = torch.randn(4, 50, device=target.device)
    for view in (base[:, 3:47], base[::2, 5:], base.t().contiguous().t(), base[1], base.expand(3, 4, 50), base[:, ::2]):
        for k in (0, 5, view.shape[-1]):
            expected = mk.kwta(view.clone(), k, backend="reference")
            assert same_bits(mk.kwta(view, k, backend=target.backend), expected)
    frame = torch.full((6, 50), 7.0, device=target.device)
    before = frame.clone()
    mk.kwta(frame[1:5, 2:48], 9, backend=target.backend)
    assert torch.equal(frame, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ties", TIES)
def test_what_lies_around_the_rows_is_not_read(target, ties, dtype):
    """x, values and gradient first lie among NaN, which kwta ranks highest, then in rows 2^30 elements apart."""
    shapes = ((5, 2), (33, 7), (64, 30), (300, 30))
    if target.executed:
        shapes = shapes[TIES.index(ties) :: 3]
    if target.compiles and dtype == torch.bfloat16:
        shapes = shapes[:1]  # longer rows among NaN: test_kwta_edges.py
    for n, k in shapes:
        x, values, grad = (torch.randn(20, n, device=target.device).to(dtype) for _ in range(3))
        mask = mk.kwta_mask(x, k, ties=ties, backend="reference")
        for place in (framed, far_apart):
            leaf = place(values).requires_grad_()
            assert torch.equal(mk.kwta_mask(place(x), k, ties=ties, backend=target.backend), mask)
            y = mk.kwta(place(x), k, values=leaf, ties=ties, backend=target.backend)
            assert same_bits(y.detach(), torch.where(mask, values, 0))
            (dvalues,) = torch.autograd.grad(y, leaf, place(grad))
            assert same_bits(dvalues, torch.where(mask, grad, 0))


@pytest.mark.parametrize("place", [padded, shifted])
def test_rows_that_start_anywhere(target, place):
    """The start or the stride of one of x, values and gradient rules out accesses of 16 bytes."""
    x, values, grad = (torch.randn(5, 64, device=target.device) for _ in range(3))
    mask = mk.kwta_mask(x, 30, backend="reference")
    for moved in range(3):
        given = [place(each) if moved == i else each.clone() for i, each in enumerate((x, values, grad))]
        y = mk.kwta(given[0], 30, values=given[1].requires_grad_(), backend=target.backend)
        assert same_bits(y.detach(), torch.where(mask, values, 0))
        assert same_bits(torch.autograd.grad(y, given[1], given[2])[0], torch.where(mask, grad, 0))


def test_values_that_begin_where_x_begins(target):
    x = torch.randn(5, 64, device=target.device)
    for values in (x, x[:1].expand(5, 64)):
        y = mk.kwta(x, 30, values=values, backend=target.backend)
        assert same_bits(y, torch.where(mk.kwta_mask(x, 30, backend="reference"), values, 0))


def test_mask_of_rows_that_start_half_a_vector_apart(target):
    x = torch.randn(5, 68, device=target.device).bfloat16()
    for view in (x[:, :64], x.flatten()[4:324].view(5, 64)):
        mask = mk.kwta_mask(view, 30, backend=target.backend)
        assert torch.equal(mask, mk.kwta_mask(view, 30, backend="reference"))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4), (1,), (2, 1, 3, 5)])
def test_empty_and_many_dimensions(target, shape):
    x = torch.randn(shape, device=target.device, requires_grad=True)
    for k in {0, min(2, shape[-1]), shape[-1]}:
        y = mk.kwta(x, k, backend=target.backend)
        assert same_bits(y.detach(), mk.kwta(x, k, backend="reference").detach())
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.shape == x.shape
        assert mk.kwta_mask(x, k, backend=target.backend).shape == x.shape


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # 2 GiB
    row = torch.randn(16384).bfloat16()
    x = row.expand(2**17 + 1, -1)
    assert x.numel() > 2**31
    mask = mk.kwta_mask(x, 100, backend="cpu")
    expected = mk.kwta_mask(row, 100, backend="reference")
    for i in (0, 2**16, 2**17 - 1, 2**17):
        assert torch.equal(mask[i], expected)


def test_results_do_not_depend_on_threads():
    x = torch.randn(100, 777)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(mk.kwta(x, 99, backend="cpu"))
    assert all(torch.equal(results[0], other) for other in results)


def test_k_from_fraction_reads_the_decimal():
    assert mk.k_from_fraction(0.29, 100) == 29  # truncating the float product gives 28
    assert mk.k_from_fraction(0.1, 5) == 1
    assert mk.k_from_fraction(1.0, 7) == 7
    assert mk.k_from_fraction("0.7", 10) == 7
    assert all(mk.k_from_fraction(i / 100, 100) == i for i in range(1, 101))
    for p in (0, 1.5, -0.1, NAN):
        with pytest.raises(ValueError, match="k_from_fraction"):
            mk.k_from_fraction(p, 10)
    with pytest.raises(ValueError, match="k_from_fraction"):
        mk.k_from_fraction(0.5, 0)
    with pytest.raises(TypeError, match="k_from_fraction: p must be a number"):
        mk.k_from_fraction(True, 10)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: mk.kwta(x, 6), ValueError, "k must be from 0 to 5 .* got 6"),
        (lambda x: mk.kwta(x, -1), ValueError, "k must be from 0 to 5 .* got -1"),
        (lambda x: mk.kwta(x, 2.0), TypeError, "k must be an int, got float"),
        (lambda x: mk.kwta(x, True), TypeError, "k must be an int, got bool"),
        (lambda x: mk.kwta(x.long(), 2), TypeError, "x must have dtype float32, .* got int64"),
        (lambda x: mk.kwta([1.0], 1), TypeError, "x must be a Tensor, got list"),
        (lambda x: mk.kwta(x[0, 0], 0), ValueError, "at least one dimension"),
        (lambda x: mk.kwta(x, 2, ties="first"), ValueError, "ties must be one of 'index', .* got 'first'"),
        (lambda x: mk.kwta(x, 2, values=x[:1]), ValueError, r"values must have the shape of x, \(2, 5\); got \(1, 5\)"),
        (lambda x: mk.kwta(x, 2, values=x.half()), TypeError, "values must have the dtype of x, float32; got float16"),
        (lambda x: mk.kwta(x, 2, values=x.to("meta")), ValueError, "values must be on the device of x, cpu; got meta"),
        (lambda x: mk.kwta(x.to_sparse(), 2), TypeError, "strided"),
        (lambda x: torch.func.grad(lambda row: mk.kwta(row, 2).sum())(x), TypeError, "torch.func transforms"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=f"^kwta.*{words}"):
        call(torch.randn(2, 5))


@pytest.mark.parametrize("ties", TIES)
def test_bits_are_the_packed_mask_and_keep_what_it_keeps(target, ties):
    x = torch.randn(2, 3, 70, device=target.device).round(decimals=1)
    y, bits = mk.kwta_bits(x, 33, ties=ties, backend=target.backend)
    mask = mk.kwta_mask(x, 33, ties=ties, backend="reference")
    words = [[sum(int(m) << i for i, m in enumerate(row[w : w + 32])) for w in (0, 32, 64)] for row in mask.view(6, 70)]
    assert [[word % 2**32 for word in row] for row in bits.view(6, 3).tolist()] == words
    assert same_bits(y, torch.where(mask, x, 0))
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(2, 3, 70, device=target.device).to(dtype).requires_grad_()
        kept = mk.kwta_apply(values, bits, backend=target.backend)
        assert same_bits(kept.detach(), torch.where(mask, values.detach(), 0))
        (gradient,) = torch.autograd.grad(kept, values, torch.ones_like(kept))
        assert torch.equal(gradient, mask.to(dtype))


def test_bits_of_another_shape_or_dtype_are_refused():
    values = torch.randn(4, 70)
    with pytest.raises(ValueError, match=r"kwta_apply: bits must be \(4, 3\).*got \(4, 2\)"):
        mk.kwta_apply(values, torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="kwta_apply: values must have at least one dimension"):
        mk.kwta_apply(values[0, 0], torch.zeros(1, dtype=torch.int32))
    with pytest.raises(TypeError, match="kwta_apply: bits must have dtype int32"):
        mk.kwta_apply(values, torch.zeros(4, 3))


def test_a_row_longer_than_a_grid_covers_at_once(target):
    if target.backend != "cuda":
        pytest.skip("only the CUDA kernel limits the number of blocks")
    n = 2**24 + 1
    grad = torch.ones(1, n + 1, dtype=torch.bfloat16, device=target.device)[:, 1:]
    bits = torch.full((1, -(-n // 32)), 0x55555555, dtype=torch.int32, device=target.device)
    dx = backends.load("cuda", "kwta").kwta_bwd(grad, bits)
    assert torch.equal(dx[0, ::2], grad[0, ::2])
    assert not dx[0, 1::2].any()


@pytest.mark.parametrize("ties", TIES)
def test_none_and_all_win_rows_of_one_sign(target, ties):
    x = torch.randn(3, 33).abs()
    x[1], x[2] = -x[1], 0
    for dtype in (torch.float32, torch.bfloat16):
        values = x.to(dtype).to(target.device)
        other = values.clone() if target.compiles else None  # Triton has compiled the kernel that reads `values`
        assert not mk.kwta(values, 0, values=other, ties=ties, backend=target.backend).any()
        assert same_bits(mk.kwta(values, 33, values=other, ties=ties, backend=target.backend), values)


@pytest.mark.parametrize("ties", TIES)
def test_a_mask_that_was_not_kept_is_the_same_one_in_backward(ties):
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0]], requires_grad=True)
    y, _ = operators.kwta_fwd(x, None, 3, ties, False, "cpu")
    y.sum().backward()
    assert torch.equal(x.grad[0] != 0, mk.kwta_mask(x[0], 3, ties=ties))
