"""Loops in machine code as nvdisasm and cuobjdump print it."""

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


def hot_loop(code: list[Instruction]) -> int:
    """Instructions of the longest innermost loop of a kernel, 0 if it has none.

    A branch back makes a loop if its target dominates it: every path to the branch leads through the target. The loop's
    blocks are those on a path from the target to the branch. Code behind the kernel's end, which BRA.DIV jumps to,
    branches back too, but makes no loop.
    """
    blocks, successors = _graph(code)
    loops: dict[int, int] = {}  # blocks of a loop, as bits, by its first one
    above = _dominators(successors)
    for block, targets in enumerate(successors):
        for target in targets:
            if above[block] >> target & 1:
                loops[target] = loops.get(target, 0) | _reaching(block, target, successors)
    inner = [each for head, each in loops.items() if not any(each >> other & 1 for other in loops if other != head)]
    sizes = [sum(blocks[k] for k in range(len(blocks)) if each >> k & 1) for each in inner]
    return max(sizes, default=0)


def _graph(code: list[Instruction]) -> tuple[list[int], list[list[int]]]:
    """Instructions of each basic block, and the blocks that may follow it."""
    place = {each.address: k for k, each in enumerate(code)}
    goes = {k: _target(each, place) for k, each in enumerate(code) if each.name.startswith(("BRA", "EXIT", "RET"))}
    starts = {0, *(k + 1 for k in goes), *(target for target in goes.values() if target is not None)}
    bounds = [*sorted(starts - {len(code)}), len(code)]
    block = {start: number for number, start in enumerate(bounds[:-1])}
    successors = []
    for _, end in pairwise(bounds):
        last, target = code[end - 1], goes.get(end - 1)
        follows = [block[target]] if target is not None else []
        # `BRA P1, 0x40` and `BRA.DIV ~URZ, 0x40` depend on a condition as well.
        if (end - 1 not in goes or last.guard or "," in last.operands) and end < len(code):
            follows.append(block[end])
        successors.append(follows)
    reached = _reached(successors)  # not functions that are called, nor the endless branch that pads the code
    successors = [targets if reached >> each & 1 else [] for each, targets in enumerate(successors)]
    return [end - start for start, end in pairwise(bounds)], successors


def _target(each: Instruction, place: dict[int, int]) -> int | None:
    """The index of the instruction that a branch jumps to; None if it is no branch."""
    found = re.search(r"0x([0-9a-f]+)\s*$", each.operands)
    return place.get(int(found[1], 16)) if found and each.name.startswith("BRA") else None


def _reached(successors: list[list[int]]) -> int:
    """The blocks that a path from the first one reaches, as bits."""
    found, open_ = 1, [0]
    while open_:
        for target in successors[open_.pop()]:
            if not found >> target & 1:
                found |= 1 << target
                open_.append(target)
    return found


def _dominators(successors: list[list[int]]) -> list[int]:
    """The dominators of each block, as bits: the blocks that every path from the start to it visits, and itself."""
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
    """The blocks from which `block` is reached without passing `head`, and both, as bits."""
    found, size = 1 << head | 1 << block, 0
    while size != found:
        size = found
        for each, targets in enumerate(successors):
            if any(found >> target & 1 and target != head for target in targets):
                found |= 1 << each
    return found
