"""GPU kernels that get a stale plan, whose values nobody checked, write nothing outside their results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moe_kernels as mk
from moe_kernels import sizes
from tests.helpers.plans import plans

OP = "dispatch"


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(sizes, "is_checked", lambda index: False)


@pytest.mark.parametrize("row", [10**6, 2**31 - 1, -(2**31)])
def test_a_row_past_the_last_one_is_no_row_of_dispatch(target, unchecked, row):
    if target.backend == "cpu":
        pytest.skip("the C++ kernel refuses such a plan")
    plan = plans(target.device)["dropped"]
    x = torch.randn(plan.num_tokens, 40, device=target.device)
    right = mk.dispatch(x, plan, backend="reference")
    lost = plan.slot_row[plan.slot_row >= 0][0].item()
    stale = torch.where(plan.slot_row == lost, row, plan.slot_row).int()
    found = mk.dispatch(x, replace(plan, slot_row=stale), backend=target.backend)
    others = torch.arange(plan.num_rows) != lost
    assert torch.equal(found[others], right[others])


@pytest.mark.parametrize("last", [10**6, 2**31 - 1])
def test_offsets_past_the_last_row_write_no_further_row(target, unchecked, last):
    if target.backend == "cpu":
        pytest.skip("the C++ kernel refuses such offsets")
    plan = plans(target.device)["dropped"]
    x = torch.randn(plan.num_tokens, 32, device=target.device).bfloat16()
    weight = torch.randn(plan.num_experts, 32, 16, device=target.device).bfloat16()
    stale = plan.expert_offsets.clone()
    stale[-1] = last
    mk.dispatch(x, replace(plan, expert_offsets=stale), backend=target.backend)
    rows = torch.randn(plan.num_rows, 32, device=target.device).bfloat16()
    found = mk.grouped_gemm(rows, weight, stale, backend=target.backend)
    first = int(plan.expert_offsets[-2])
    expected = mk.grouped_gemm(rows, weight, plan.expert_offsets, backend="reference")
    torch.testing.assert_close(found[:first], expected[:first])
