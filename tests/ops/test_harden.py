"""harden against a search over all permutations, and without scipy."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch

import moe_kernels as mk

INF = math.inf


@pytest.mark.slow
def test_harden_is_the_best_assignment():
    pytest.importorskip("scipy", reason="scipy is not installed")
    for n in (1, 2, 5):
        soft = torch.randn(3, 2, n, n)
        columns = mk.harden(soft)
        assert columns.dtype == torch.int64
        assert columns.shape == (3, 2, n)
        for each, column in zip(soft.view(-1, n, n), columns.view(-1, n), strict=True):
            reached = {c: sum(each[i, c[i]].item() for i in range(n)) for c in itertools.permutations(range(n))}
            assert reached[tuple(column.tolist())] == pytest.approx(max(reached.values()))
    assert mk.harden(torch.zeros(4, 4)).sort().values.tolist() == [0, 1, 2, 3]
    assert mk.harden(torch.randn(0, 3, 3)).shape == (0, 3)
    assert mk.harden(torch.randn(2, 0, 0)).shape == (2, 0)
    forbidden = torch.tensor([[1.0, -INF], [9.0, 5.0]])
    assert mk.harden(forbidden.bfloat16()).tolist() == [0, 1]


def test_harden_without_scipy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"harden: .* pip install moe_kernels\[assignment\]"):
        mk.harden(torch.randn(3, 3))
