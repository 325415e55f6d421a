"""Twenty orders of blocks, warps and equal stores, each with other errors of .approx instructions: bits stay."""

from __future__ import annotations

import pytest
import torch
from ptx import session
from test_ptx_planted import gate, gemm, kwta, on, pytestmark  # noqa: F401

SEEDS = range(1, 21)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_bits_stay(backend):
    with on(backend):
        for call in (kwta, gemm):  # nothing approximate reaches their results
            expected = call(backend)
            for seed in SEEDS:
                with session.seed(seed):
                    got = call(backend)
                assert torch.equal(got.nan_to_num(1e9), expected.nan_to_num(1e9)), (call.__name__, seed)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_approximate_errors_stay_within_tolerance(backend):
    with on(backend):
        expected = gate(backend)
        for seed in SEEDS:
            with session.seed(seed):
                got, again = gate(backend), gate(backend)
            assert torch.equal(got, again), seed
            torch.testing.assert_close(got, expected, rtol=4e-6, atol=1e-7)
