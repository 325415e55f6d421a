"""The grouped GEMM kernels under the sanitizers, and their PTX in every order of warps and on every tile. Their values
on all backends are tested in test_grouped_gemm.py, test_expert_mlp.py and test_expert_norms.py."""

from __future__ import annotations

import itertools

import pytest
import simt
import torch
from ptx import cuda_launch
from torch import Tensor

from moe_kernels.backends import cuda
from moe_kernels.backends.native.grouped_gemm_cuda import ACTIVATIONS
from moe_kernels.library import GATED
from python_ref.grouped_gemm import activate

MISSING = simt.unavailable() or cuda_launch.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"simt: {MISSING}")

SEEDS = range(8)
DTYPES = (torch.bfloat16, torch.float16)

# Rows of each expert, and unused rows after them. From 64 rows an expert on, tiles of 128 x 128.
Shape = tuple[tuple[int, ...], int]
FEW: Shape = ((5, 0, 40, 3), 2)
MANY: Shape = ((70, 0), 60)


def offsets_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def matrix(rows: int, columns: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    return (torch.randn(rows, columns + gap) / 4).to(dtype)[:, gap:]


def weights(experts: int, din: int, dout: int, dtype: torch.dtype, transposed: bool = False) -> Tensor:
    shape = (experts, dout, din) if transposed else (experts, din, dout)
    weight = (torch.randn(shape) / 4).to(dtype)
    return weight.transpose(1, 2) if transposed else weight


def tokens(num_rows: int, used: int, num_tokens: int) -> Tensor:
    """A token for every row, none for a few and for unused ones."""
    token = torch.randint(num_tokens, (num_rows,), dtype=torch.int32)
    token[1::7] = -1
    token[used:] = -1
    return token


def gathered(x: Tensor, token: Tensor | None) -> Tensor:
    x = x.double()
    return x if token is None else torch.where((token >= 0)[:, None], x[token.clamp(min=0).long()], 0.0)


def expert_of(offsets: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())


def products(x: Tensor, weight: Tensor, offsets: Tensor, token: Tensor | None, bias: Tensor | None) -> Tensor:
    """x W + b in float64, of the rows in use."""
    expert = expert_of(offsets)
    pre = torch.einsum("rd,rdh->rh", gathered(x, token)[: len(expert)], weight.double()[expert])
    return pre if bias is None else pre + bias.double()[expert]


def close(got: Tensor, exact: Tensor, used: int) -> None:
    """One rounding and float32 sums of |terms| below 16; zeros in unused rows."""
    eps = torch.finfo(got.dtype).eps
    assert ((got[:used].double() - exact).abs() <= eps * exact.abs() + 2e-5).all()
    assert not got[used:].any()


def check_fwd(
    shape: Shape,
    din: int,
    dout: int,
    activation: str = "",
    dtype: torch.dtype = torch.bfloat16,
    gap: int = 0,
    gather: bool = False,
    transposed: bool = False,
    twice: bool = True,
) -> None:
    counts, spare = shape
    offsets, num_rows = offsets_of(counts), sum(counts) + spare
    used = sum(counts)
    token = tokens(num_rows, used, 9) if gather else None
    x = matrix(9 if gather else num_rows, din, dtype, gap)
    weight, bias = weights(len(counts), din, dout, dtype, transposed), matrix(len(counts), dout, dtype, gap)
    if not gather:
        x[used:] = torch.nan
    out, pre = cuda.grouped_gemm_fwd(x, weight, offsets, token, bias, activation, True)
    exact = products(x, weight, offsets, token, bias)
    close(pre, exact, used)
    close(out, activate(exact, activation or None), used)
    if not twice:
        return
    again, none = cuda.grouped_gemm_fwd(x, weight, offsets, token, bias, activation, False)
    assert torch.equal(again, out)
    assert none.shape == (0, dout)


def check_bwd_weight(
    shape: Shape,
    din: int,
    dout: int,
    dtype: torch.dtype = torch.bfloat16,
    gap: int = 0,
    gather: str = "",
) -> None:
    counts, spare = shape
    offsets, num_rows, used = offsets_of(counts), sum(counts) + spare, sum(counts)
    lists = {name: tokens(num_rows, used, 9) if name in gather else None for name in ("x", "grad")}
    x, grad = (
        matrix(num_rows if lists[name] is None else 9, width, dtype, gap)
        for name, width in (("x", din), ("grad", dout))
    )
    for name, each in (("x", x), ("grad", grad)):
        if lists[name] is None:
            each[used:] = torch.nan
    row_weight = torch.rand(num_rows) if gather == "grad" else None
    dweight, dbias = cuda.grouped_gemm_bwd_weight(x, grad, offsets, lists["x"], lists["grad"], True, row_weight)
    of_expert = torch.nn.functional.one_hot(expert_of(offsets), len(counts)).double()
    rows, grads = gathered(x, lists["x"])[:used], gathered(grad, lists["grad"])[:used]
    close(dweight.flatten(1), torch.einsum("re,ri,rj->eij", of_expert, rows, grads).flatten(1), len(counts))
    weight = torch.ones(used) if row_weight is None else row_weight[:used]
    close(dbias, torch.einsum("r,re,rj->ej", weight.double(), of_expert, grads), len(counts))


def check_hidden(
    shape: Shape, dim: int, hidden: int, activation: str, dtype: torch.dtype = torch.bfloat16, twice: bool = True
) -> None:
    counts, spare = shape
    offsets, num_rows, used = offsets_of(counts), sum(counts) + spare, sum(counts)
    token = tokens(num_rows, used, 9)
    grad, w_out, row_weight = matrix(9, dim, dtype), weights(len(counts), hidden, dim, dtype), torch.rand(num_rows)
    pre = matrix(num_rows, 2 * hidden if activation in GATED else hidden, dtype) * 4
    pre[used:], row_weight[used:] = torch.nan, torch.nan
    given, b_out = (grad, w_out, offsets, token, row_weight, pre, activation), matrix(len(counts), dim, dtype)
    dpre, weighted, biased = cuda.expert_mlp_bwd_hidden(*given, b_out)
    a = products(grad, w_out.transpose(1, 2), offsets, token, None)
    leaf, weight = pre[:used].double().requires_grad_(), row_weight[:used].double()
    h = activate(leaf, activation or None)
    (exact,) = torch.autograd.grad(h, leaf, weight[:, None] * a)
    close(dpre, exact, used)
    close(weighted, weight[:, None] * h.detach(), used)
    share = gathered(grad, token)[:used] * b_out.double()[expert_of(offsets)]
    close(biased[:, None], (h.detach() * a).sum(1, keepdim=True) + share.sum(1, keepdim=True), used)
    if not twice:
        return
    *same, dweight = cuda.expert_mlp_bwd_hidden(*given)
    assert all(torch.equal(one, other) for one, other in zip(same, (dpre, weighted), strict=True))
    close(dweight[:, None], (h.detach() * a).sum(1, keepdim=True), used)


def check_norms(shape: Shape, din: int, dout: int, transposed: bool = False) -> None:
    counts, spare = shape
    offsets, num_rows, used = offsets_of(counts), sum(counts) + spare, sum(counts)
    rows, weight = matrix(num_rows, din, torch.float16), weights(len(counts), din, dout, torch.float16, transposed)
    bias = matrix(len(counts), dout, torch.float16)
    rows[used:] = torch.nan
    got = cuda.grouped_gemm_norms(rows, weight, offsets, bias)
    exact = products(rows, weight, offsets, None, bias).square().sum(1)
    torch.testing.assert_close(got[:used].double(), exact, rtol=1e-5, atol=1e-5)
    assert not got[used:].any()


def check_sum_rows(
    token: Tensor, num_tokens: int, dim: int, dtype: torch.dtype, gap: int = 0, after: int = 0, twice: bool = True
) -> None:
    """Bit for bit the sums of a loop in float32, and of integers those of float64; NaN in unused rows."""
    there = token >= 0
    view = matrix(len(token), dim + after, dtype, gap)[:, :dim]
    for rows in (view, torch.randint(-4, 5, (len(token), dim)).to(dtype))[not twice :]:
        rows[~there] = torch.nan
        expected = torch.zeros(num_tokens, dim)
        for row, to in zip(rows[there].float(), token[there].tolist(), strict=True):
            expected[to] += row
        got = cuda.grouped_gemm_sum_rows(rows, token, num_tokens)
        assert torch.equal(got, expected.to(dtype))
    exact = torch.zeros(num_tokens, dim, dtype=torch.float64).index_add(0, token[there].long(), rows[there].double())
    assert torch.equal(got, exact.to(dtype))


# (rows, tokens, dim): 16 bytes at a time in one pass of 256 threads or in two, or else one element.
SUMS = [(23, 9, 72), (11, 3, 577), (7, 3, 2072), (40, 300, 8), (3, 2, 1)]


def check_everything(dtype: torch.dtype, twice: bool = True) -> None:
    """Both tiles, both layouts of weights, and rows that start anywhere; `twice`: with and without what is optional."""
    for shape in (FEW, MANY):
        # Of K = 64 four turns, of 32 seven: a ring of 4 stages.
        check_fwd(shape, 200, 136, "geglu", dtype, gather=True, twice=twice)
        check_fwd(shape, 136, 72, "gelu", dtype, gather=True, transposed=True, twice=twice)
        check_hidden(shape, 72, 40, "swiglu", dtype, twice)
        check_norms(shape, 24, 136, transposed=True)
    check_fwd(FEW, 37, 27, "tanh", dtype, gather=True, twice=twice)
    check_fwd(FEW, 37, 26, "swiglu", dtype, transposed=True, twice=twice)
    check_hidden(FEW, 13, 135, "relu", dtype, twice)
    check_norms(FEW, 13, 135)
    check_bwd_weight(MANY, 136, 72, dtype, gather="x")
    check_bwd_weight(FEW, 13, 67, dtype, gather="grad")


@pytest.mark.parametrize("seed", SEEDS)
def test_in_any_order_of_warps(seed: int) -> None:
    with cuda_launch.use(seed):
        check_everything(DTYPES[seed % 2])


@pytest.mark.parametrize("build", ["asan", "tsan"])
def test_under_sanitizers(build: str) -> None:
    """A thread costs the thread sanitizer 0.2 ms: what is optional is there, and not left out in a second call."""
    with simt.use(build, seed=2):
        check_everything(torch.bfloat16, twice=build == "asan")


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_in_any_order_of_warps(seed: int) -> None:
    """Tokens of no row, of few and of most of the rows."""
    with cuda_launch.use(seed):
        for (num_rows, num_tokens, dim), dtype in itertools.product(SUMS, (torch.float32, *DTYPES)):
            token = tokens(num_rows, num_rows - 1, num_tokens)
            check_sum_rows(token, num_tokens, dim, dtype)
            check_sum_rows(token.clamp(max=0), num_tokens, dim, dtype)


@pytest.mark.parametrize("build", ["asan", "tsan"])
def test_sums_under_sanitizers(build: str) -> None:
    with simt.use(build, seed=3):
        for (num_rows, num_tokens, dim), dtype in zip(SUMS, (torch.float32, *DTYPES), strict=False):
            check_sum_rows(tokens(num_rows, num_rows - 1, num_tokens), num_tokens, dim, dtype, twice=build == "asan")


@pytest.mark.parametrize("count", [1, 3, 4, 5, 32, 33, 1000])
def test_a_token_of_many_rows(count: int) -> None:
    """Whole turns of four rows and others, between tokens of no row and of one."""
    token = torch.tensor([4, *[2] * count, -1, 0], dtype=torch.int32)
    with cuda_launch.use(5):
        check_sum_rows(token, 6, 24, torch.float32)
        check_sum_rows(token.flip(0), 6, 13, torch.float16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    with cuda_launch.use(3):
        check_fwd(FEW, 24, 40, activation, torch.float16)
        check_hidden(FEW, 24, 40, activation, torch.float16)
        for hidden in (40, 13):
            pre = (torch.randn(9, hidden * (1 + (activation in GATED))) * 3).half()
            grad = torch.randn(9, hidden).half()
            leaf = pre.double().requires_grad_()
            (exact,) = torch.autograd.grad(activate(leaf, activation or None), leaf, grad.double())
            close(cuda.activation_bwd(grad, pre, activation), exact, 9)


@pytest.mark.parametrize("gap", [1, 2, 8])
def test_views_and_poison(gap: int) -> None:
    with simt.use("asan", seed=1):
        check_fwd(FEW, 24, 40, "gelu", gap=gap)
        check_bwd_weight(FEW, 24, 40, gap=gap)
        for before, after in ((gap, 0), (0, gap), (gap, 8 - gap)):  # what is not aligned: both, the stride, the address
            check_sum_rows(tokens(17, 15, 6), 6, 24, torch.bfloat16, before, after)
            check_sum_rows(tokens(17, 15, 6), 6, 24, torch.float32, before, after)


def test_gradients_of_many_small_experts() -> None:
    counts = tuple(torch.randint(4, (220,)).tolist())  # 220 blocks: enough for tiles of 128 x 128
    with cuda_launch.use(4):
        check_bwd_weight((counts, 3), 24, 136, gather="x grad")


@pytest.mark.parametrize("num_experts", [1, 31, 32, 33, 1030])
def test_experts_are_found(num_experts: int) -> None:
    """All rows at the end, at the start, with one expert, and spread: what a search by 32 probes may miss."""
    for kind in range(4):
        counts = [0] * num_experts
        for row in range(40):
            counts[(-1 - row % 3, row % 3, num_experts // 2, row * 7)[kind] % num_experts] += 1
        with cuda_launch.use(kind):
            check_fwd((tuple(counts), kind), 8, 8)


def test_nothing_to_multiply() -> None:
    with cuda_launch.use():
        check_fwd(((0, 0), 5), 16, 16, "gelu")
        check_fwd(((0, 0), 0), 16, 16)
        check_fwd(((3, 2), 1), 0, 16, "silu")  # of no columns: the activation of the bias
        check_fwd(((3, 2), 1), 16, 0)
        check_bwd_weight(((0, 0), 0), 16, 16)
        check_bwd_weight(((3, 0), 2), 0, 16)
        check_bwd_weight(((3, 0), 2), 16, 0)
        check_hidden(((3, 0), 2), 16, 0, "relu")
        check_norms(((3, 0), 2), 16, 0)
        for num_rows, num_tokens, dim in ((0, 3, 16), (0, 0, 16), (3, 3, 0)):
            check_sum_rows(tokens(num_rows, num_rows, max(num_tokens, 1)), num_tokens, dim, torch.bfloat16)
        check_sum_rows(torch.full((3,), -1, dtype=torch.int32), 0, 16, torch.bfloat16)
        check_sum_rows(torch.full((3,), -1, dtype=torch.int32), 5, 16, torch.bfloat16)


def test_rows_beyond_the_reach_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # 4 GB that are never touched
    base = torch.empty(2**31 + 4096, dtype=torch.bfloat16)
    rows = base.as_strided((2, 24), (2**31, 1))
    wide = base[64:].as_strided((2, 24, 16), (2**31, 16, 1))
    x, weight, offsets = matrix(2, 24, torch.bfloat16), weights(2, 24, 16, torch.bfloat16), offsets_of((1, 1))
    rows.copy_(x)
    wide.copy_(weight)
    with cuda_launch.use():
        expected = cuda.grouped_gemm_fwd(x, weight, offsets, None, None, "", False)[0]
        assert torch.equal(cuda.grouped_gemm_fwd(rows, wide, offsets, None, None, "", False)[0], expected)
        gradients = [cuda.grouped_gemm_bwd_weight(each, x, offsets, None, None, False)[0] for each in (x, rows)]
        assert torch.equal(*gradients)
        token = torch.tensor([1, 1], dtype=torch.int32)
        for first in (0, 1):  # 2^28 vectors and 2^31 elements from row to row
            assert torch.equal(*(cuda.grouped_gemm_sum_rows(each[:, first:], token, 2) for each in (x, rows)))


def test_launchers_refuse() -> None:
    module = cuda_launch.module()
    plain = [0, 0, 0, 0, 0, 0, 0, 0]  # x, strides, lists and weights

    def fwd(dtype: int = 1, activation: int = 0, rows: int = 1, experts: int = 1, din: int = 8, dout: int = 8) -> None:
        module.grouped_gemm_fwd(dtype, *plain, 0, 0, activation, 0, 0, rows, experts, din, dout, 0)

    for wrong in (
        {"dtype": 0}, {"dtype": 3}, {"activation": 7}, {"activation": -1}, {"activation": 5, "dout": 7},
        {"rows": -1}, {"rows": 2**31}, {"experts": 0}, {"din": -1}, {"dout": 2**31}, {"rows": 2**31 - 1, "dout": 2**30},
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="grouped_gemm_fwd: CUDA error 1"):
            fwd(**wrong)
    with pytest.raises(RuntimeError, match="grouped_gemm_bwd_weight: CUDA error 1"):
        module.grouped_gemm_bwd_weight(0, *[0] * 10, 1, 1, 8, 8, 0)
    with pytest.raises(RuntimeError, match="expert_mlp_bwd_hidden: CUDA error 1"):
        module.expert_mlp_bwd_hidden(1, *[0] * 12, 7, 0, 0, 0, 1, 1, 8, 8, 0)
    with pytest.raises(RuntimeError, match="grouped_gemm_norms: CUDA error 1"):
        module.grouped_gemm_norms(1, *[0] * 10, 1, 0, 8, 8, 0)
    for dtype, num_tokens, dim in ((3, 1, 8), (0, -1, 8), (0, 2**31, 8), (0, 1, -1), (0, 1, 2**30 + 1)):
        with pytest.raises(RuntimeError, match="grouped_gemm_sum_rows: CUDA error 1"):
            module.grouped_gemm_sum_rows(dtype, 0, 8, 0, 0, 0, num_tokens, dim, 0)
    with pytest.raises(RuntimeError, match="activation_bwd: CUDA error 1"):
        module.activation_bwd(1, 0, 0, 0, 9, 0, 1, 8, 0)
