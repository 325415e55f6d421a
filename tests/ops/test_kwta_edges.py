"""kwta (k-winner-take-all) of rows that start or end inside a 16-byte vector."""

from __future__ import annotations

import math

import pytest
import torch

import moe_kernels as mk
from tests.helpers.kwta import DTYPES, TIES, same_bits
from tests.helpers.kwta_edges import OUTPUTS, PLACES, ROWS, check, placed, rows_of
from tests.helpers.targets import Target

# Lengths of rows. A 16-byte vector has 4 elements of float32, 8 of a 16-bit dtype; a word of the packed mask has 32.
SMALL = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 29, 31, 32, 33, 39, 45, 61, 63, 64, 65, 70)
LARGE = (100, 127, 1001, 4095, 4097, 20001, 32771)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_rows_anywhere(target: Target, sizes: tuple[int, ...], place: str, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and (sizes is LARGE or place != "each tensor otherwise"):
        pytest.skip("float16 rows are read in the same vectors as bfloat16 rows: one place and short rows are enough")
    if target.compiles:
        if dtype == torch.float16:
            pytest.skip("Triton's float16 code differs only in how it converts elements, which test_kwta.py tests")
        place_and_dtype = 2 * list(PLACES).index(place) + (dtype == torch.bfloat16)
        sizes = sizes[place_and_dtype::8] if sizes is SMALL else sizes[place_and_dtype // 2 :: 4]
    for i, n in enumerate(sizes):
        outputs = (OUTPUTS[(i + list(PLACES).index(place)) % 3],) if target.compiles else OUTPUTS
        ruled = (*LARGE, 29, 45, 61) if dtype == torch.float32 or target.backend != "triton" else LARGE
        ties = TIES[n % 3] if n in ruled else "index"
        parts = (rows_of(n), rows_of(n), torch.randn(ROWS, n))
        x, values, grad = (
            placed(part.to(dtype), *where).to(target.device) for part, where in zip(parts, PLACES[place], strict=True)
        )
        ks = sorted({n // 3, n - 1})
        if target.backend == "cuda" and target.executed and n > 10000:  # slow: each k in two of the places
            ks = ks[list(PLACES).index(place) % 2 :][:1]
        for k in ks:
            check(target, x, k, ties, values, grad, outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [13, 29, 45, 4095])
def test_the_first_ties_win(target: Target, n: int, dtype: torch.dtype) -> None:
    if target.compiles and dtype == torch.float16 and n != 45:
        pytest.skip("Triton's float16 code differs from bfloat16 only in how it converts elements")
    x = torch.full((ROWS, n), 0.5, dtype=dtype, device=target.device)
    x[1::2, n // 2] = 0.25
    for k in range(n) if n < 100 else (1, 3, 7, 8, 9, 2000, n - 8, n - 7, n - 1):
        expected = torch.zeros(ROWS, n, dtype=torch.bool, device=target.device)
        expected[:, :k] = True
        if k > n // 2:
            expected[1::2, n // 2] = False
            expected[1::2, k] = True
        # Triton compiles a kernel for each: it writes bits of these rows, and masks of the others.
        if not target.compiles or n in (29, 4095):
            assert torch.equal(mk.kwta_bits(x, k, backend=target.backend)[0], torch.where(expected, x, 0)), k
        if not target.compiles or n not in (29, 4095):
            assert torch.equal(mk.kwta_mask(x, k, backend=target.backend), expected), k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [300, 20001])
def test_neighbours_stay_as_they_are(target: Target, n: int, dtype: torch.dtype) -> None:
    """Kernels may take another path for a row with NaN. The results of other rows must not change."""
    x = torch.randn(5, n).to(dtype).to(target.device)
    x[1], x[3, -1], x[3, 0] = math.nan, math.nan, math.inf
    for k in (1, n // 2):
        mask = mk.kwta_mask(x, k, backend="reference")
        y, bits = mk.kwta_bits(x, k, backend=target.backend)
        assert same_bits(y, torch.where(mask, x, 0))
        assert same_bits(mk.kwta_apply(x, bits, backend=target.backend), y)
