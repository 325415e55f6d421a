"""The host executor of CUDA sources (tests/simt): it catches planted bugs, passes their corrected twins, and lays out
fragments as the PTX manual says; kWTA gives the right bits on it. test_simt_kernels.py has the other operations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import pytest
import simt
import torch
from ptx import cuda_launch, session

pytestmark = pytest.mark.skipif(simt.unavailable() is not None, reason=f"simt: {simt.unavailable()}")

ROOT = Path(__file__).resolve().parents[1]
SEEDS = range(8)
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def planted(build: str = "fast", seed: int = 0) -> simt.Module:
    """The kernels of simt/planted, each call in a process of its own: a bug may smash the heap."""
    return simt.Module(build, seed, isolated=True, unit=simt.PLANTED)


def right_histogram(module: simt.Module, bug: int) -> bool:
    x = torch.arange(1000, dtype=torch.int32) * 7 % 64
    counts = torch.full((64,), -1, dtype=torch.int32)
    with module.buffers(x, counts):
        module.histogram(bug, x.data_ptr(), counts.data_ptr(), 1000, 0)
    return torch.equal(counts, torch.bincount(x, minlength=64).int())


def right_row_sum(module: simt.Module, bug: int) -> bool:
    x = torch.arange(3 * 128, dtype=torch.float32).view(3, 128) % 11
    y = torch.full((3,), -1.0)
    with module.buffers(x, y):
        module.row_sum(bug, x.data_ptr(), y.data_ptr(), 3, 0)
    return torch.equal(y, x.sum(1))


def right_rotate(module: simt.Module, bug: int) -> bool:
    x = torch.arange(2 * 24, dtype=torch.float32).view(2, 24)
    y = torch.full_like(x, -1)
    with module.buffers(x, y):
        module.rotate(bug, x.data_ptr(), y.data_ptr(), 2, 24, 0)
    return torch.equal(y, x.roll(-1, 1))


def right_pipeline(module: simt.Module, bug: int) -> bool:
    n = 7 * 256 - 3
    x = (torch.arange(n) % 13).float()
    y = torch.full((256,), -1.0)
    with module.buffers(x, y):
        module.pipeline(bug, x.data_ptr(), y.data_ptr(), n, 0)
    tiles = torch.nn.functional.pad(x, (0, 3)).view(7, 256)
    return torch.equal(y, tiles.flip(1).sum(0))


def right_load_rows(module: simt.Module, bug: int) -> bool:
    return all(torch.equal(*ldmatrix(module, bug, count, flip)) for count in (1, 2, 4) for flip in (False, True))


# The bugs of simt/planted/ops.h: what runs them, how it is noticed in which build. "wrong": a wrong result (or an
# error) with at least one seed; otherwise a part of the message, with every seed that is tried.
ALL, ONE = tuple(SEEDS), (2,)
Right = Callable[[simt.Module, int], bool]
BUGS: dict[str, tuple[int, Right, list[tuple[str, tuple[int, ...], str]]]] = {
    "no barrier after zeroing": (1, right_histogram, [("fast", ALL, "wrong")]),
    "no barrier before reading": (2, right_histogram, [("fast", ALL, "wrong")]),
    "spin": (21, right_histogram, [("fast", (0,), "no end after")]),
    "no barrier after warp sums": (4, right_row_sum, [("fast", ALL, "wrong")]),
    "divergent barrier": (5, right_row_sum, [("fast", ALL, r"96 of 128 threads wait in __syncthreads at barriers")]),
    "return before barrier": (6, right_row_sum, [("fast", ALL, "127 of 128 threads wait.*1 have returned")]),
    "two barriers": (7, right_row_sum, [("fast", ALL, "two different barriers")]),
    "two blocks, one word": (8, right_row_sum, [("fast", ALL, "wrong")]),
    "no syncwarp": (9, right_rotate, [("fast", ALL, "wrong")]),
    "lane skips a collective": (10, right_rotate, [("fast", ALL, r"lane 5, which returned|same rendezvous")]),
    "lane returned": (11, right_rotate, [("fast", ALL, "names lane 5, which returned")]),
    "shuffle from outside": (12, right_rotate, [("fast", ALL, r"reads lane \d+, which its mask leaves out at warps")]),
    "shared overrun": (13, right_rotate, [("asan", ONE, r"heap-buffer-overflow[\s\S]*warps.cu:")]),
    "global overrun": (14, right_rotate, [("asan", ONE, r"heap-buffer-overflow[\s\S]*warps.cu:")]),
    "wait one too few": (15, right_pipeline, [("fast", ALL, "wrong")]),
    "no barrier after wait": (16, right_pipeline, [("fast", ALL, "wrong")]),
    "no barrier before reuse": (17, right_pipeline, [("fast", ALL, "wrong")]),
    "copy past the end": (18, right_pipeline, [("asan", ONE, r"heap-buffer-overflow[\s\S]*tensor.cu:")]),
    "copy pending at return": (19, right_pipeline, [("fast", ALL, "returns with 1 cp.async pending")]),
    "misaligned row": (20, right_load_rows, [("fast", ALL, "ldmatrix row at a misaligned address")]),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    bug, right, ways = BUGS[name]
    for build, seeds, expected in ways:
        if expected == "wrong":
            caught = 0
            for seed in seeds:
                try:
                    caught += not right(planted(build, seed), bug)
                except RuntimeError:
                    caught += 1
            assert caught > 0, build
        else:
            for seed in seeds:
                with pytest.raises(RuntimeError, match=f"(?s){expected}"):
                    right(planted(build, seed), bug)


@pytest.mark.parametrize("right", [right_histogram, right_row_sum, right_rotate, right_pipeline, right_load_rows])
def test_corrected_twin_passes(right: Right) -> None:
    for build, seeds in (("fast", ALL), ("asan", ONE)):
        for seed in seeds:
            assert right(planted(build, seed), 0), (build, seed)


def test_executor_is_usable_after_an_error() -> None:
    module = simt.Module(seed=2, unit=simt.PLANTED)
    with pytest.raises(RuntimeError, match=r"row_sum: .*__syncthreads"):
        right_row_sum(module, 5)
    assert right_row_sum(module, 0)
    with pytest.raises(RuntimeError, match=r"row_sum: grid of \(0, 1, 1\) blocks"):
        module.row_sum(0, 0, 0, 0, 0)
    with pytest.raises(RuntimeError, match="4 arguments, 5 expected"):
        module.row_sum(0, 0, 0, 0)
    assert right_row_sum(module, 0)


def test_sanitized_call_sees_announced_buffers_only() -> None:
    x, y = torch.ones(1, 128), torch.zeros(1)
    module = simt.Module("asan", unit=simt.PLANTED)
    with module.buffers(x), pytest.raises(RuntimeError, match="none of the announced buffers"):
        module.row_sum(0, x.data_ptr(), y.data_ptr(), 1, 0)
    wide = torch.ones(2, 200)[:, :128]  # a strided view: its last row ends at element 328
    with module.buffers(wide, y), pytest.raises(RuntimeError, match="heap-buffer-overflow"):
        module.row_sum(0, wide.data_ptr() + 4 * 201, y.data_ptr(), 1, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives_of_half_warps(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 10, (32,), generator=generator, dtype=torch.int32)
    y = torch.full((32, 8), -1, dtype=torch.int32)
    simt.Module(seed=seed, unit=simt.PLANTED).collectives(x.data_ptr(), y.data_ptr(), 0)
    for lane in range(32):
        start = lane & 16
        half = x[start : start + 16].tolist()
        i = lane - start
        ballot = sum((v & 1) << (start + j) for j, v in enumerate(half))
        match = sum((v == half[i]) << (start + j) for j, v in enumerate(half))
        expected = [
            sum(half),
            ballot,
            half[i - 3] if i >= 3 else half[i],
            half[i + 3] if i < 13 else half[i],
            half[i ^ 5],
            match,
            max(half),
            2 * (7 in half) + 1,
        ]
        assert [v & 0xFFFFFFFF for v in y[lane].tolist()] == expected, lane


# The probes of the layouts run where the executor does and, where there is a GPU, on it: build and device.
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
PLACES = pytest.mark.parametrize("build", ["fast", pytest.param("cuda", marks=NO_GPU)])
DEVICES = {"fast": "cpu", "cuda": "cuda"}


def ldmatrix(
    module: simt.Module, bug: int, count: int, transposed: bool, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ldmatrix gives, and what the PTX manual says: lane 4 r + c holds elements 2 c and 2 c + 1 of row r."""
    x = torch.arange(count * 64, dtype=torch.int16, device=device).view(count, 8, 8)
    fragments = torch.zeros(32, count, dtype=torch.int32, device=device)
    with module.buffers(x, fragments):
        module.load_rows(bug, count, transposed, x.data_ptr(), fragments.data_ptr(), 0)
    matrices = x.transpose(1, 2) if transposed else x
    expected = matrices.reshape(count, 32, 2).transpose(0, 1)
    return fragments.view(torch.int16).view(32, count, 2), expected


@PLACES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_layout(count: int, transposed: bool, build: str) -> None:
    got, expected = ldmatrix(simt.Module(build, unit=simt.PLANTED), 0, count, transposed, DEVICES[build])
    assert torch.equal(got, expected)


# PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": where element i of a lane's fragment stands.
# There groupID = lane >> 2 and threadID_in_group = lane % 4.
def a_place(lane: int, i: int) -> tuple[int, int]:
    row = lane >> 2 if i < 2 or 4 <= i < 6 else (lane >> 2) + 8
    column = (lane % 4) * 2 + (i & 1) if i < 4 else (lane % 4) * 2 + (i & 1) + 8
    return row, column


def b_place(lane: int, i: int) -> tuple[int, int]:
    row = (lane % 4) * 2 + (i & 1) if i < 2 else (lane % 4) * 2 + (i & 1) + 8
    return row, lane >> 2


def c_place(lane: int, i: int) -> tuple[int, int]:
    row = lane >> 2 if i < 2 else (lane >> 2) + 8
    return row, (lane % 4) * 2 + (i & 1)


def multiply(build: str, dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a (blocks, 32, 8), b (blocks, 32, 4) and c (blocks, 32, 4) as fragments; the product as fragments."""
    device = DEVICES[build]
    a, b, c = a.to(device, dtype).contiguous(), b.to(device, dtype).contiguous(), c.to(device, copy=True)
    module = simt.Module(build, unit=simt.PLANTED)
    module.multiply(DTYPE_CODES[dtype], a.data_ptr(), b.data_ptr(), c.data_ptr(), a.shape[0], 0)
    return c.cpu()


Place = Callable[[int, int], tuple[int, int]]


def as_matrix(fragments: torch.Tensor, place: Place, shape: tuple[int, int]) -> torch.Tensor:
    matrix = torch.full((fragments.shape[0], *shape), torch.nan)
    for lane in range(32):
        for i in range(fragments.shape[2]):
            row, column = place(lane, i)
            matrix[:, row, column] = fragments[:, lane, i]
    return matrix


def numbered(place: Place, elements: int) -> torch.Tensor:
    """The fragments of a matrix whose element (row, column) is 10 row + column, exact in 16 bits."""
    places = [[place(lane, i) for i in range(elements)] for lane in range(32)]
    return torch.tensor([[10 * row + column for row, column in lane] for lane in places])


@PLACES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mma_layout_one_hot(dtype: torch.dtype, build: str) -> None:
    """Each element of each lane's fragment of A, then of B, alone: it meets one row or column of the other matrix."""
    numbered_b = numbered(b_place, 4)
    one_hot = torch.eye(256).view(256, 32, 8)
    got = multiply(build, dtype, one_hot, numbered_b.expand(256, 32, 4), torch.zeros(256, 32, 4))
    c = as_matrix(got, c_place, (16, 8))
    for index in range(256):
        row, k = a_place(index // 8, index % 8)
        expected = torch.zeros(16, 8)
        expected[row] = 10 * k + torch.arange(8)
        assert torch.equal(c[index], expected), index

    numbered_a = numbered(a_place, 8)
    one_hot = torch.eye(128).view(128, 32, 4)
    got = multiply(build, dtype, numbered_a.expand(128, 32, 8), one_hot, torch.zeros(128, 32, 4))
    c = as_matrix(got, c_place, (16, 8))
    for index in range(128):
        k, column = b_place(index // 4, index % 4)
        expected = torch.zeros(16, 8)
        expected[:, column] = 10 * torch.arange(16) + k
        assert torch.equal(c[index], expected), index


@PLACES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mma_product(dtype: torch.dtype, build: str) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-8, 9, shape, generator=generator).float()  # noqa: E731 (sums stay exact)
    a, b, c = draw(4, 32, 8), draw(4, 32, 4), draw(4, 32, 4)
    expected = as_matrix(a, a_place, (16, 16)) @ as_matrix(b, b_place, (16, 8)) + as_matrix(c, c_place, (16, 8))
    assert torch.equal(as_matrix(multiply(build, dtype, a, b, c), c_place, (16, 8)), expected)


def test_ptx_and_shared_memory_stand_in_the_headers_alone() -> None:
    sources = [*(ROOT / "csrc").rglob("*.cu*"), *(ROOT / "tests").rglob("*.cu")]
    assert sources
    for file in sources:
        if file.parent == ROOT / "csrc" / "include" / "moe":
            continue
        text = re.sub(r"//.*", "", file.read_text())
        assert not re.search(r"\basm\b", text), f"{file}: PTX belongs in csrc/include/moe"
        assert "__shared__" not in text, f"{file}: use SHARED or DYNAMIC_SHARED of moe/shared.cuh"


# k-winner-take-all

TIES = {"index": 0, "strict": 1, "all": 2}
SENTINEL = 0x5A


def winners(x: torch.Tensor, k: int, ties: str) -> torch.Tensor:
    """The definition, by sorting in float64: NaN above +inf, all NaN equal, zeros equal."""
    v = x.double()
    v = torch.where(v.isnan(), torch.inf, torch.where(v == torch.inf, 1e300, v))
    if ties == "index":
        order = v.sort(dim=1, descending=True, stable=True).indices
        return torch.zeros_like(v, dtype=torch.bool).scatter_(1, order[:, :k], True)
    ascending = v.sort(dim=1).values
    if ties == "strict":
        return v.shape[1] - torch.searchsorted(ascending, v) <= k
    return v >= ascending[:, v.shape[1] - k, None] if k else torch.zeros_like(v, dtype=torch.bool)


def packed(mask: torch.Tensor) -> torch.Tensor:
    rows, n = mask.shape
    words = torch.nn.functional.pad(mask, (0, -n % 32)).view(rows, -1, 32).long()
    return (words << torch.arange(32)).sum(2).to(torch.int32)


def as_ints(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def with_row_gap(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same rows `gap` elements apart, starting one row gap after an aligned address."""
    rows, n = x.shape
    return torch.full((rows, n + gap), torch.nan, dtype=x.dtype)[:, gap:].copy_(x) if gap else x


def check_kwta(module: simt.Module, x: torch.Tensor, k: int, ties: str, values: torch.Tensor | None = None) -> None:
    rows, n = x.shape
    y = torch.empty(rows, n, dtype=x.dtype)
    bits = torch.empty(rows, -(-n // 32), dtype=torch.int32)
    mask = torch.empty(rows, n, dtype=torch.bool)
    for each in (y, bits, mask):
        each.view(torch.uint8).fill_(SENTINEL)
    z = NormalDist().inv_cdf(1 - k / n) if 0 < k < n else 0.0
    tensors = [x, y, bits, mask] + ([] if values is None else [values])
    with module.buffers(*tensors):
        module.kwta_fwd(
            DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0),
            0 if values is None else values.data_ptr(), 0 if values is None else values.stride(0),
            y.data_ptr(), bits.data_ptr(), mask.data_ptr(), rows, n, k, TIES[ties], z, 0,
        )  # fmt: skip
    expected = winners(x, k, ties)
    assert torch.equal(mask, expected)
    assert torch.equal(bits, packed(expected))
    source = as_ints((x if values is None else values).contiguous())
    assert torch.equal(as_ints(y), torch.where(expected, source, 0))

    grad = torch.randn(rows, n).to(x.dtype)
    grad[~expected] = torch.nan
    dx = torch.full_like(grad, 3)
    with module.buffers(grad, bits, dx):
        module.kwta_bwd(grad.element_size(), grad.data_ptr(), n, bits.data_ptr(), dx.data_ptr(), rows, n, 0)
    assert torch.equal(as_ints(dx), torch.where(expected, as_ints(grad), 0))


def rows_of_all_kinds(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random rows, and those that a search for a threshold finds hard."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, n, generator=generator)
    kinds = [normal[0], normal[1].relu(), torch.full((n,), 1.5), (normal[2] > 0).float(), normal[3].sort().values]
    kinds += [normal[0] / (normal[1].abs() + 1e-6), normal[2] * 1e-41, (normal[3] * 2).round()]
    mixed = normal[1].clone()
    specials = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, -0.0, 1e-42, -1e-42])
    places = torch.randint(0, 2 * n, (n,), generator=generator) % (3 * len(specials))
    mixed = torch.where(places < len(specials), specials[places % len(specials)], mixed)
    kinds += [mixed, torch.full((n,), -torch.nan), torch.full((n,), torch.inf), -mixed.nan_to_num(0.0).abs()]
    return torch.stack(kinds).to(dtype)


LENGTHS = [1, 31, 32, 33, 100, 1000, 1024, 1025, 4096, 5000, 16384, 20000]

NO_NVCC = cuda_launch.unavailable()
on_ptx = pytest.mark.skipif(NO_NVCC is not None, reason=f"PTX: {NO_NVCC}")


@on_ptx
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
@pytest.mark.parametrize("n", LENGTHS)
def test_kwta(n: int, dtype: torch.dtype) -> None:
    module = cuda_launch.module()
    x = rows_of_all_kinds(n, dtype, seed=n)
    for ties in TIES:
        for k in sorted({0, 1, n // 10, n // 2, n - 1, n} if n <= 5000 else {1, n // 2}):
            check_kwta(module, x, k, ties)


@on_ptx
@pytest.mark.parametrize("seed", SEEDS)
def test_kwta_in_any_order_of_warps(seed: int) -> None:
    with session.seed(seed):
        for n in (33, 256, 1000, 1500, 2048, 17000):
            for dtype in DTYPE_CODES:
                check_kwta(cuda_launch.module(), rows_of_all_kinds(n, dtype, seed)[:9], n // 3, "index")


@on_ptx
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
@pytest.mark.parametrize("gap", [0, 1, 2, 8])
def test_kwta_of_views_and_values(gap: int, dtype: torch.dtype) -> None:
    for n in (96, 101, 1030):
        x = with_row_gap(rows_of_all_kinds(n, dtype, seed=1), gap)
        values = with_row_gap(torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(dtype), 0)
        check_kwta(cuda_launch.module(), x, n // 4, "index", values)
        check_kwta(cuda_launch.module(), x, n // 4, "strict")


@pytest.mark.parametrize(("n", "gap"), [(31, 0), (64, 8), (300, 0), (1100, 1), (1280, 0)])
def test_kwta_under_address_sanitizer(n: int, gap: int) -> None:
    for dtype in DTYPE_CODES:
        x = with_row_gap(rows_of_all_kinds(n, dtype, seed=3), gap)
        check_kwta(simt.Module("asan", seed=4), x, n // 4, "index")
        check_kwta(simt.Module("asan", seed=4), x[:1], n // 4, "all", x[1:2])


def test_kwta_slow_path_under_address_sanitizer() -> None:
    check_kwta(simt.Module("asan", seed=5), rows_of_all_kinds(16401, torch.bfloat16, 4)[7:9], 5000, "index")


@on_ptx
def test_kwta_refuses_and_empties() -> None:
    module = cuda_launch.module()
    module.kwta_fwd(0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 2, 0, 0.0, 0)
    module.kwta_fwd(0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0.0, 0)
    module.kwta_bwd(4, 0, 0, 0, 0, 0, 5, 0)
    for arguments in ((0, 6, 0), (3, 2, 0), (0, 2, 3), (0, -1, 0)):  # dtype, k, ties
        dtype, k, ties = arguments
        with pytest.raises(RuntimeError, match="kwta_fwd: CUDA error 1"):
            module.kwta_fwd(dtype, 0, 5, 0, 0, 0, 0, 0, 1, 5, k, ties, 0.0, 0)
