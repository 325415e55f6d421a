"""What the instructions of an executed launch occupy: the pipes of a multiprocessor, and the loop of its products."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

# The first pattern that matches an opcode names its pipe and its results on it. Not listed: what ptxas turns into few
# instructions or none (moves, parameters, halves of 64-bit values), memory, and instructions of PRODUCT.
PIPES = (
    (r"mov|cvta|prmt|\S+\.b64|cvt\.u64\.u32|cvt\.u32\.u64|(abs|neg)\.f64|selp\.f64", "", 0),
    (r"(ld|st|atom|red|cp|bar|mbarrier|barrier|fence|membar|bra|ret|exit|wgmma|mma|ldmatrix|stmatrix)\b", "", 0),
    (r"rcp\.approx\S*\.f64", "special", 1),
    (r"(rcp|div|sqrt|rsqrt)\S*\.f64", "fp64", 10),  # Newton's steps after an estimate
    (r"cvt\S*\.f64", "fp64", 2),  # half the rate of an addition
    (r"\S+\.f64", "fp64", 1),  # comparisons and maxima too: DSETP
    (r"ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos|div\S*\.f32", "special", 1),
    (r"(add|sub|mul|fma|mad)\S*\.(f32|f16|bf16|f16x2|bf16x2)\b", "fp32", 1),
    (r"(mul|mad)\S*\.[su](16|32|64)", "fp32", 1),  # IMAD runs on the pipe of FFMA
    (r"shfl|redux|match", "shuffle", 1),
    (r"\S+\.pred|abs\.|neg\.", "", 0),
    (r"", "integer", 1),  # comparisons, minima, selections, logic, shifts, conversions
)
NAMES = ("fp32", "fp64", "integer", "special", "shuffle")
PRODUCT = re.compile(r"(wg)?mma\S*\.m(\d+)n(\d+)k(\d+)\.")


def pipe_of(opcode: str) -> tuple[str, int]:
    return next((pipe, results) for pattern, pipe, results in PIPES if re.match(pattern, opcode))


def _executed(result: Any, counter: str) -> Iterator[tuple[int, str, int]]:
    """The index, text and counter of each instruction that ran."""
    for index, (text, times) in enumerate(zip(result.kernel.texts, result.counters[counter], strict=False)):
        if times:
            yield index, re.sub(r"^@\S+\s+", "", text), int(times)


def lanes(result: Any) -> dict[str, int]:
    """Results of all threads on each pipe."""
    found = dict.fromkeys(NAMES, 0)
    for _, text, times in _executed(result, "lanes"):
        pipe, results = pipe_of(text)
        if pipe:
            found[pipe] += results * times
    return found


def tensor_flops(result: Any) -> int:
    """FLOPs of matrix instructions. Four warps run one wgmma together."""
    found = 0
    for _, text, times in _executed(result, "runs"):
        shape = PRODUCT.match(text)
        if shape:
            found += times * 2 * prod(map(int, shape.groups()[1:])) // (4 if shape[1] else 1)
    return found


def product_loop(result: Any) -> int:
    """Warp instructions that ran in the smallest loop around matrix instructions, 0 if there is none."""
    products = [index for index, text, _ in _executed(result, "runs") if PRODUCT.match(text)]
    targets, runs = result.kernel.records["target"], result.counters["runs"]
    branches = [index for index, text, _ in _executed(result, "runs") if text.startswith("bra")]
    loops = [(int(targets[end]), end) for end in branches if 0 <= targets[end] <= end]
    # ptxas moves the condition above products that follow it in the same block, so a product behind the branch counts.
    around = [(first, last) for first, last in loops if any(first <= each <= last for each in products)]
    if not around:
        return 0
    first, last = min(around, key=lambda loop: loop[1] - loop[0])
    return int(runs[first : last + 1].sum())
