"""Decodes instructions of sm_90 into records: wgmma, bulk copies, mbarriers, elect and stmatrix."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .text import Entry, split

if TYPE_CHECKING:
    from .decode import Decoder

_PRODUCT = re.compile(r"wgmma\.mma_async\.\S+\s+\{([^}]*)\}")
_BRANCH = re.compile(r"(@\S+\s+)?bra(?:\.uni)?\s+(\S+)")


def _wgmma(d: Decoder, parts: list[str], args: list[str]) -> None:
    if parts[1] in ("fence", "commit_group", "wait_group") and parts[2:] == ["sync", "aligned"]:
        d.emit(f"wgmma.{parts[1]}", [], immediate=int(args[0]) if args else 0)
        return
    shape = re.fullmatch(r"m64n(\d+)(k\d+)", parts[4]) if len(parts) == 8 else None
    if not shape or parts[1:4] != ["mma_async", "sync", "aligned"] or parts[5] != "f32" or parts[6] != parts[7]:
        raise d.unsupported()
    registers, a, b, accumulate, *scales = args
    if scales[:2] != ["1", "1"]:
        raise d.unsupported("negated operands")
    operands = [d.operand(each, 4, True) for each in split(registers[1:-1])]
    in_registers = a.startswith("{")
    operands += [d.operand(each, 4) for each in split(a[1:-1])] if in_registers else [d.operand(a, 8)]
    operands += [d.operand(b, 8), d.operand(accumulate, 0)]
    by_columns, by_rows = map(int, [*["0"] * in_registers, *scales[2:], "0", "0"][:2])
    elements = by_columns + 2 * by_rows + 4 * in_registers
    d.emit(f"wgmma.m64{shape[2]}.{parts[6]}", operands, immediate=int(shape[1]), elements=elements)


def bulk_copy(d: Decoder, parts: list[str], args: list[str]) -> None:
    # Without clusters of blocks shared::cluster is the own block's memory.
    form = [["shared::cta", "shared::cluster"], ["global"], ["mbarrier::complete_tx::bytes"]]
    known = len(parts) == 8 and all(part in which for part, which in zip(parts[5:], form, strict=True))
    if not known or parts[3] != "tensor" or parts[4] not in ("1d", "2d", "3d", "4d", "5d"):
        raise d.unsupported()
    to, offset, _ = d.address(args[0])
    tensor, corner = split(args[1].strip()[1:-1])
    mbarrier, mbarrier_offset, _ = d.address(args[2])
    at = [d.operand(each, 4) for each in split(corner[1:-1])]
    if mbarrier_offset or len(at) != int(parts[4][0]):
        raise d.unsupported()
    operands = [to, d.operand(tensor, 8), mbarrier, *at]
    d.emit("cp.async.bulk.tensor", operands, immediate=offset, elements=len(at))


def _mbarrier(d: Decoder, parts: list[str], args: list[str]) -> None:
    name, kind = ".".join(parts[:-2]), parts[-2:]
    if kind not in (["shared::cta", "b64"], ["shared", "b64"]):  # the same: PTX's default is the own block's memory
        raise d.unsupported()
    at = 1 if name in ("mbarrier.try_wait.parity", "mbarrier.arrive.expect_tx") else 0
    where, offset, _ = d.address(args[at])
    rest = [d.operand(each, 4) for each in args[at + 1 :]]
    if name == "mbarrier.try_wait.parity" and len(rest) == 1:
        d.emit(name, [d.operand(args[0], 0), where, *rest], immediate=offset)
    elif len(rest) == (name != "mbarrier.inval") and (at == 0 or args[0] == "_"):
        d.emit(name, [where, *rest], immediate=offset)
    else:
        raise d.unsupported()


def _elect(d: Decoder, parts: list[str], args: list[str]) -> None:
    leader, _, leads = args[0].partition("|")
    d.emit("elect.sync", [d.operand(leader, 4), d.operand(leads, 0), d.operand(args[1], 4)])


def _stmatrix(d: Decoder, parts: list[str], args: list[str]) -> None:
    if parts[1:4] != ["sync", "aligned", "m8n8"] or parts[-1] != "b16":
        raise d.unsupported()
    where, offset, address = d.address(args[0])
    values = [d.operand(each, 4) for each in split(args[1][1:-1])]
    fields = {"elements": len(values), "flag": int("trans" in parts), "immediate": offset, "address": address}
    d.emit("stmatrix", [where, *values], **fields)


def unfenced(entry: Entry) -> set[int]:
    """Indices of the wgmma statements that lack a wgmma.fence: on some path to the wgmma there is none after the last
    access to its accumulators or, without such an access, after the kernel's start.

    Two wgmma on the same accumulators need no fence between them. A mov.b32 does not count as an access: if a wgmma
    continues the sums of another one, LLVM may copy these sums between the fence and the wgmma.
    """
    texts = [each.text for each in entry.statements]
    accumulators = {i: m[1] for i, text in enumerate(texts) if (m := _PRODUCT.search(text))}
    if not accumulators:
        return set()
    before: list[list[int]] = [[] for _ in range(len(texts) + 1)]  # by statement: those that can run just before it
    for i, statement in enumerate(entry.statements):
        branch = _BRANCH.match(statement.text)
        if branch:
            before[entry.target(statement, branch[2])].append(i)
        if not (branch and not branch[1]) and statement.text not in ("ret", "exit", "trap"):
            before[i + 1].append(i)
    return {i for i, registers in accumulators.items() if _reached(i, registers, texts, before)}


def _reached(product: int, registers: str, texts: list[str], before: list[list[int]]) -> bool:
    """Whether a search backwards from the wgmma `product` meets the kernel's start or an access to the wgmma's
    accumulators before it meets a fence. The search ends at other wgmma on the same accumulators."""
    names = set(split(registers))
    seen, pending = {product}, [product]
    while pending:
        here = pending.pop()
        if here == 0:
            return True
        for i in before[here]:
            if i in seen or texts[i].startswith("wgmma.fence"):
                continue
            seen.add(i)
            same = _PRODUCT.search(texts[i])
            if same and same[1] == registers:
                continue
            if not texts[i].startswith("mov.b32") and names & set(re.findall(r"%\w+", texts[i])):
                return True
            pending.append(i)
    return False


FORMS = {"wgmma": _wgmma, "mbarrier": _mbarrier, "elect": _elect, "stmatrix": _stmatrix}
