"""Reads the machine code that nvdisasm or cuobjdump prints, and finds its loops."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)([^;\n]*)", re.MULTILINE)


class Instruction(NamedTuple):
    address: int
    guard: str
    name: str
    operands: str


def instructions(text: str) -> list[Instruction]:
    return [Instruction(int(address, 16), *rest) for address, *rest in LINE.findall(text)]


PRODUCT = re.compile(r"HG?MMA")


def hot_loop(code: list[Instruction]) -> list[Instruction]:
    """The instructions of the loop in which a kernel spends its time, none if the kernel has no loop.

    That is the smallest loop with matrix instructions: loops within it wait for copies, and longer innermost loops
    store the sums. In kernels without matrix instructions in a loop it is the longest innermost loop.

    A branch makes a loop if its target dominates it: every path from the kernel's start to the branch visits the
    target. The loop has the blocks on the paths from the target to the branch. A jump to code after the kernel's end
    (BRA.DIV) and back makes no loop.
    """
    bounds, successors = _graph(code)
    loops: dict[int, int] = {}  # by the first block of a loop: the bit set of its blocks
    above = _dominators(successors)
    for block, targets in enumerate(successors):
        for target in targets:
            if above[block] >> target & 1:
                loops[target] = loops.get(target, 0) | _reaching(block, target, successors)
    products = sum(
        1 << block
        for block, (start, end) in enumerate(pairwise(bounds))
        if any(PRODUCT.match(each.name) for each in code[start:end])
    )

    def inside(loop: int) -> list[Instruction]:
        parts = (code[start:end] for block, (start, end) in enumerate(pairwise(bounds)) if loop >> block & 1)
        return [each for part in parts for each in part]

    multiplying = [inside(each) for each in loops.values() if each & products]
    if multiplying:
        return min(multiplying, key=len)
    inner = [each for head, each in loops.items() if not any(each >> other & 1 for other in loops if other != head)]
    return max(map(inside, inner), key=len, default=[])


def _graph(code: list[Instruction]) -> tuple[list[int], list[list[int]]]:
    """The first instruction of each basic block and the end of the last, and for each the blocks that may follow it."""
    place = {each.address: k for k, each in enumerate(code)}
    goes = {k: _target(each, place) for k, each in enumerate(code) if each.name.startswith(("BRA", "EXIT", "RET"))}
    starts = {0, *(k + 1 for k in goes), *(target for target in goes.values() if target is not None)}
    bounds = [*sorted(starts - {len(code)}), len(code)]
    block = {start: number for number, start in enumerate(bounds[:-1])}
    successors = []
    for _, end in pairwise(bounds):
        last, target = code[end - 1], goes.get(end - 1)
        follows = [block[target]] if target is not None else []
        # `BRA P1, 0x40` and `BRA.DIV ~URZ, 0x40` are conditional although they have no guard.
        if (end - 1 not in goes or last.guard or "," in last.operands) and end < len(code):
            follows.append(block[end])
        successors.append(follows)
    # Blocks that cannot be reached from the first (padding, called functions) get no successors, so they make no loops.
    reached = _reached(successors)
    successors = [targets if reached >> each & 1 else [] for each, targets in enumerate(successors)]
    return bounds, successors


def _target(each: Instruction, place: dict[int, int]) -> int | None:
    """The index of the instruction to which a BRA jumps; None for other instructions and for targets not in `place`."""
    found = re.search(r"0x([0-9a-f]+)\s*$", each.operands)
    return place.get(int(found[1], 16)) if found and each.name.startswith("BRA") else None


def _reached(successors: list[list[int]]) -> int:
    """The bit set of the blocks that a path from the first block reaches."""
    found, open_ = 1, [0]
    while open_:
        for target in successors[open_.pop()]:
            if not found >> target & 1:
                found |= 1 << target
                open_.append(target)
    return found


def _dominators(successors: list[list[int]]) -> list[int]:
    """For each block the bit set of its dominators: itself and the blocks that all paths from the start to it visit."""
    before: list[list[int]] = [[] for _ in successors]
    for block, targets in enumerate(successors):
        for target in targets:
            before[target].append(block)
    above = [1] + [(1 << len(successors)) - 1] * (len(successors) - 1)
    changed = True
    while changed:
        changed = False
        for block in range(1, len(successors)):
            common = (1 << len(successors)) - 1
            for each in before[block]:
                common &= above[each]
            found = common | 1 << block
            changed, above[block] = changed or found != above[block], found
    return above


def _reaching(block: int, head: int, successors: list[list[int]]) -> int:
    """The bit set of `head`, `block`, and the blocks from which a path leads to `block` without visiting `head`."""
    found, size = 1 << head | 1 << block, 0
    while size != found:
        size = found
        for each, targets in enumerate(successors):
            if any(found >> target & 1 and target != head for target in targets):
                found |= 1 << each
    return found
