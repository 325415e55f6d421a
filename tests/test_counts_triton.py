"""How many instructions the Triton kernels execute, counted in their PTX for sm_80, against what an A100 could issue
while its memory moves the bytes: a prediction of which of the two bounds a kernel, not a measurement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TARGETS, reason_to_skip
from ptx import counters, session

TRITON = next(target for target in TARGETS if target.backend == "triton")
REASON = reason_to_skip(TRITON) or ("" if TRITON.executed and not TRITON.interpreted else "no PTX is executed here")
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

# A100: 108 SMs with 4 schedulers at 1.41 GHz; 1.94 TB/s. Static SASS / PTX is 1.3 for integer code (facts of kwta).
ISSUE, MEMORY, FACTOR = 108 * 4 * 1.41e9, 1.94e12, 1.3


def counted(case: Any, *arguments: Any) -> list[int]:
    """Instructions of warps of every launch of a function of this file."""
    with session.recorded() as found:
        case(*arguments)
    return [counters.count(each)["warp_instructions"] for each in found]


def predicted(instructions: int, moved: float) -> float:
    """Issue time over the time that `moved` bytes take."""
    return FACTOR * instructions / ISSUE / (moved / MEMORY)


def kwta(dtype: str, n: int) -> None:
    from moe_kernels.backends.triton import kwta

    x = torch.randn(32, n).to(getattr(torch, dtype))
    y, bits = kwta.kwta_fwd(x, None, n // 10, "index", True)
    kwta.kwta_bwd(y, bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n", [4096, 4095, 20000])  # rows of 4095 start inside 16-byte vectors
def test_kwta_is_bound_by_memory(n, dtype):
    forward, backward = counted(kwta, dtype, n)
    moved = 32 * n * (2 * getattr(torch, dtype).itemsize + 1 / 8)
    # 20000 elements of 16 bits take the registers of 32768.
    assert predicted(forward, moved) <= (1.2 if n == 20000 and dtype != "float32" else 1), forward
    assert predicted(backward, moved) <= 0.4, backward


def test_rows_of_a_multiple_of_8_take_no_more_instructions():
    # Triton specialises for multiples of 16 only: rows of 1000 were read two bytes at a time.
    (odd, odd_bwd), (even, even_bwd) = counted(kwta, "bfloat16", 1000), counted(kwta, "bfloat16", 1024)
    assert odd <= 1.05 * even
    assert odd_bwd <= 1.05 * even_bwd


def rows(dtype: str, dim: int) -> None:
    from moe_kernels.backends.triton import combine, dispatch

    x, row = torch.randn(64, dim).to(getattr(torch, dtype)), torch.arange(128, dtype=torch.int32)
    slot_row, offsets, weights = row.view(64, 2), torch.tensor([0, 128], dtype=torch.int32), torch.rand(64, 2)
    routed = dispatch.dispatch_fwd(x, row // 2, slot_row, offsets)
    combine.combine_fwd(routed, weights, slot_row)
    combine.combine_bwd(x, routed, weights, row // 2, slot_row, offsets, row % 2)


def test_rows_of_a_multiple_of_8_move_16_bytes_at_a_time():
    # Rows of 1000 took 2.4 times the instructions of rows of 1024 in dispatch, 1.6 in combine, 1.5 in its backward.
    for odd, even in zip(counted(rows, "bfloat16", 1000), counted(rows, "bfloat16", 1024), strict=True):
        assert odd <= 1.1 * even, (odd, even)


def sum_rows(tokens: int) -> None:
    from moe_kernels.backends.triton import grouped_gemm

    row_token = torch.randint(0, tokens, (2 * tokens,), dtype=torch.int32)
    grouped_gemm.grouped_gemm_sum_rows(torch.randn(2 * tokens, 64), row_token, tokens)


def test_token_sums_are_linear_in_the_rows():
    # A token that looked through all rows for its own would take four times the instructions.
    small, large = (sum(counted(sum_rows, tokens)) for tokens in (256, 512))
    assert large <= 2.2 * small, (small, large)


def topk_gate(dtype: str) -> None:
    from moe_kernels.backends.triton import topk_gate

    logits = torch.randn(64, 128).to(getattr(torch, dtype))
    weights, experts = topk_gate.topk_gate_fwd(logits, 8, "topk_softmax")
    topk_gate.topk_gate_bwd(weights, weights, experts, None, 128, logits.dtype)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 250), ("bfloat16", 220)])
def test_topk_gate_sorts_fours_and_finds_a_choice_in_one_or_two_reductions(dtype, most):
    """Instructions of a token at E = 128, K = 8: 344 and 264 where each choice looked at every logit."""
    assert counted(topk_gate, dtype)[0] <= most * 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_topk_gate_backward_writes_the_chosen_over_the_rest(dtype):
    """Instructions of a token at E = 128, K = 8: 551 and 558 where each choice went through the row."""
    assert counted(topk_gate, dtype)[1] <= 40 * 64


def plan() -> None:
    from moe_kernels.backends.triton import plan

    experts = torch.randint(0, 128, (32768, 8), dtype=torch.int32)
    plan.make_plan_fwd(experts, 128, None, None, "token")


def test_a_plan_takes_three_launches_and_three_million_instructions():
    found = counted(plan)
    assert len(found) == 3, found
    assert FACTOR * sum(found) <= 3e6, found
