"""Chooses the executor's operation and the size of each operand for a PTX instruction."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from . import forms_sm90
from .text import SIZES, split

if TYPE_CHECKING:
    from .decode import Decoder


def _vector(text: str) -> list[str]:
    return split(text[1:-1]) if text.startswith("{") else [text]


def _floating(kind: str) -> bool:
    return kind in ("f32", "f64")


def plain(d: Decoder, parts: list[str], args: list[str]) -> None:
    """Decodes an instruction that is not in FORMS. It computes each lane alone; its opcode ends with a type."""
    base, kind = parts[0], parts[-1]
    if kind not in SIZES:
        raise d.unsupported()
    size = SIZES[kind]
    modifiers = [each for each in parts[1:-1] if each != "rn"]
    if base in ("and", "or", "xor", "not", "shl", "popc", "clz", "brev"):
        spelled = kind if kind == "pred" else f"b{8 * size}"
    elif base == "shr":
        spelled = kind if kind[0] == "s" else f"u{8 * size}"
    else:
        spelled = kind
    name = ".".join([base, *modifiers, spelled])
    result = 2 * size if "wide" in modifiers else 4 if base in ("popc", "clz") else size
    sizes = [result] + [size] * (len(args) - 1)
    if base in ("shl", "shr"):
        sizes[2] = 4
    elif base == "mad" and "wide" in modifiers:
        sizes[3] = result
    elif base == "bfe":
        sizes[2:] = [4, 4]
    d.emit(name, [d.operand(arg, n, _floating(kind)) for arg, n in zip(args, sizes, strict=True)])


def _mov(d: Decoder, parts: list[str], args: list[str]) -> None:
    kind, (to, value) = parts[-1], args
    size = SIZES[kind]
    if to.startswith("{") or value.startswith("{"):
        halves = _vector(to if to.startswith("{") else value)
        if len(halves) != 2:
            raise d.unsupported()
        lanes = [d.operand(each, size // 2) for each in halves]
        if to.startswith("{"):
            d.emit(f"unpack.b{8 * size}", [*lanes, d.operand(value, size)])
        else:
            d.emit(f"pack.b{8 * size}", [d.operand(to, size), *lanes])
    elif kind == "pred":
        literal = re.fullmatch(r"-?\d+", value)
        d.emit("mov.pred", [d.operand(to, 0), d.constant(-bool(int(value)), 0) if literal else d.operand(value, 0)])
    else:
        d.emit(f"mov.b{8 * size}", [d.operand(to, size), d.operand(value, size, _floating(kind))])


def _cvta(d: Decoder, parts: list[str], args: list[str]) -> None:
    if parts[1] == "param":
        d.emit("cvta.param", [d.operand(each, 8) for each in args])
        return
    d.emit("mov.b64", [d.operand(each, 8) for each in args])  # here a generic address equals that in its state space


def _cvt(d: Decoder, parts: list[str], args: list[str]) -> None:
    modifiers = [each for each in parts[1:] if each not in ("rn", "ftz")]
    *how, to, source = modifiers
    name = ".".join(["cvt", *how, to, source])
    operands = []
    for index, arg in enumerate(args):
        kind = to if index == 0 else source
        size = max(SIZES[kind], 2)
        width = d.width(arg) or size
        if width == size:
            operands.append(d.operand(arg, size, _floating(kind)))
        elif width < size or kind[0] not in ("su" if index == 0 else "sub"):
            raise d.unsupported("widths")
        elif index:  # the lower bits of a wider source register
            narrow = d.temporary(size)
            d.emit(f"cvt.{kind}.u{8 * width}", [narrow, d.operand(arg, width)])
            operands.append(narrow)
        else:  # a wider destination, to which the result is extended below
            narrow = d.temporary(size)
            operands.append(narrow)
    d.emit(name, operands)
    if (d.width(args[0]) or 0) > max(SIZES[to], 2):
        d.emit(f"cvt.{to[0]}{8 * (d.width(args[0]) or 0)}.{to}", [d.operand(args[0], 8), operands[0]])


def _setp(d: Decoder, parts: list[str], args: list[str]) -> None:
    compare, kind = parts[1], parts[-1]
    if kind in ("f16x2", "bf16x2") and "|" in args[0]:
        halves = [[d.temporary(2), d.temporary(2)] for _ in args[1:]]
        for pair, each in zip(halves, args[1:], strict=True):
            d.emit("unpack.b32", [*pair, d.operand(each, 4)])
        for to, x, y in zip(args[0].split("|"), *halves, strict=True):
            d.emit(f"setp.{compare}.{kind[:-2]}", [d.operand(to, 0), x, y])
        return
    if len(parts) != 3 or "|" in args[0] or len(args) != 3:
        raise d.unsupported()
    compare = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(compare, compare)
    spelled = f"u{kind[1:]}" if re.fullmatch(r"b\d+", kind) else kind
    values = [d.operand(each, SIZES[kind], _floating(kind)) for each in args[1:]]
    d.emit(f"setp.{compare}.{spelled}", [d.operand(args[0], 0), *values])


def _selp(d: Decoder, parts: list[str], args: list[str]) -> None:
    size = SIZES[parts[-1]]
    values = [d.operand(each, size, _floating(parts[-1])) for each in args[:3]]
    d.emit(f"selp.b{8 * size}", [*values, d.operand(args[3], 0)])


def _space(d: Decoder, parts: list[str]) -> str:
    for each in parts:
        if each.split("::")[0] in ("global", "shared", "param"):
            return each.split("::")[0]
    raise d.unsupported("the state space")


def _memory(parts: list[str]) -> tuple[int, str]:
    """Number of elements of a load or store, and their type."""
    return next((int(each[1]) for each in parts if re.fullmatch(r"v\d", each)), 1), parts[-1]


def _ld(d: Decoder, parts: list[str], args: list[str]) -> None:
    space, (elements, kind) = _space(d, parts), _memory(parts)
    to, size = _vector(args[0]), SIZES[kind]
    width = max([d.width(each) or 0 for each in to])
    where, offset, address = d.address(args[1])
    operands = [d.operand(each, width) for each in to]
    fields = {"size": size, "width": width, "elements": elements, "flag": int(kind[0] == "s")}
    d.emit(f"ld.{space}", [*operands, where], **fields, immediate=offset, address=address)


def _st(d: Decoder, parts: list[str], args: list[str]) -> None:
    space, (elements, kind) = _space(d, parts), _memory(parts)
    values, size = _vector(args[1]), SIZES[kind]
    width = max([d.width(each) or 0 for each in values]) or max(size, 4)
    where, offset, address = d.address(args[0])
    operands = [d.operand(each, width, _floating(kind)) for each in values]
    fields = {"size": size, "width": width, "elements": elements}
    d.emit(f"st.{space}", [where, *operands], **fields, immediate=offset, address=address)


def _atom(d: Decoder, parts: list[str], args: list[str]) -> None:
    space, kind = _space(d, parts), parts[-1]
    how = next((each for each in parts[1:] if each in ("add", "max", "min", "or", "and", "exch")), None)
    if how is None or len(args) != 3:
        raise d.unsupported()
    size, ordering = SIZES[kind], int(bool({"acq_rel", "release", "acquire"} & set(parts)))
    where, offset, address = d.address(args[1])
    operands = [d.operand(args[0], size), where, d.operand(args[2], size)]
    d.emit(f"atom.{space}.{how}.{kind}", operands, flag=ordering, immediate=offset, address=address)


def _cp(d: Decoder, parts: list[str], args: list[str]) -> None:
    if parts[1] != "async":
        raise d.unsupported()
    if parts[2] == "bulk":
        forms_sm90.bulk_copy(d, parts, args)
    elif parts[2] == "commit_group":
        d.emit("cp.async.commit_group", [])
    elif parts[2] == "wait_group":
        d.emit("cp.async.wait_group", [], immediate=int(args[0], 0))
    elif parts[2] == "wait_all":
        d.emit("cp.async.commit_group", [])
        d.emit("cp.async.wait_group", [])
    elif parts[2] in ("ca", "cg"):
        to, offset, _ = d.address(args[0])
        source, second, _ = d.address(args[1])
        read = [d.operand(each, 4) for each in args[3:]]
        fields = {"size": int(args[2], 0), "flag": len(read), "immediate": offset, "second": second}
        d.emit("cp.async", [to, source, *read], **fields)
    else:
        raise d.unsupported()


def _bar(d: Decoder, parts: list[str], args: list[str]) -> None:
    if parts[1:] == ["warp", "sync"]:
        d.emit("bar.warp.sync", [d.operand(args[0], 4)])
    elif parts[1] == "sync":
        d.emit("bar.sync", [], immediate=int(args[0]), second=int(args[1]) if len(args) > 1 else 0)
    elif parts[1] == "red":
        kind = parts[-1]
        to, number, *count, source = args
        operands = [d.operand(to, SIZES[kind]), d.operand(source, 0)]
        second = int(count[0]) if count else 0
        d.emit(".".join(["bar", *parts[1:]]), operands, immediate=int(number), second=second)
    else:
        raise d.unsupported()


def _barrier(d: Decoder, parts: list[str], args: list[str]) -> None:
    _bar(d, ["bar", *(each for each in parts[1:] if each not in ("cta", "aligned"))], args)


def _shfl(d: Decoder, parts: list[str], args: list[str]) -> None:
    to, _, inside = args[0].partition("|")
    flag = d.operand(inside, 0) if inside else d.constant(0, 0)
    sources = [d.operand(each, 4) for each in args[1:]]
    d.emit(".".join(parts), [d.operand(to, 4), flag, *sources], flag=int(bool(inside)))


def _all_words(d: Decoder, parts: list[str], args: list[str]) -> None:
    d.emit(".".join(parts), [d.operand(each, 4) for each in args])


def _vote(d: Decoder, parts: list[str], args: list[str]) -> None:
    size = 4 if "ballot" in parts else 0
    d.emit(".".join(parts), [d.operand(args[0], size), d.operand(args[1], 0), d.operand(args[2], 4)])


def _ldmatrix(d: Decoder, parts: list[str], args: list[str]) -> None:
    to = _vector(args[0])
    where, offset, address = d.address(args[1])
    fields = {"elements": len(to), "flag": int("trans" in parts), "immediate": offset, "address": address}
    d.emit("ldmatrix", [*(d.operand(each, 4) for each in to), where], **fields)


def _mma(d: Decoder, parts: list[str], args: list[str]) -> None:
    if parts[4:6] != ["row", "col"] or parts[6] != "f32" or parts[9] != "f32":
        raise d.unsupported()
    operands = [d.operand(each, 4, True) for group in args for each in _vector(group)]
    d.emit(f"mma.{parts[3]}.{parts[7]}", operands)


def _bra(d: Decoder, parts: list[str], args: list[str]) -> None:
    d.emit("bra", [], target=args[0])


def _ret(d: Decoder, parts: list[str], args: list[str]) -> None:
    d.emit("ret", [])


def _fence(d: Decoder, parts: list[str], args: list[str]) -> None:
    if "proxy" not in parts:
        d.emit("nop", [])  # no effect: the executor runs blocks one after the other, and stores immediately
    elif parts[1:] in (["proxy", "async"], ["proxy", "async", "shared::cta"]):
        d.emit("fence.proxy.async", [])
    else:
        raise d.unsupported()


def _trap(d: Decoder, parts: list[str], args: list[str]) -> None:
    d.emit("trap", [])


FORMS = {
    "mov": _mov,
    "cvta": _cvta,
    "cvt": _cvt,
    "setp": _setp,
    "selp": _selp,
    "ld": _ld,
    "st": _st,
    "atom": _atom,
    "cp": _cp,
    "bar": _bar,
    "barrier": _barrier,
    "shfl": _shfl,
    "redux": _all_words,
    "match": _all_words,
    "activemask": _all_words,
    "dp4a": _all_words,
    "bfi": _all_words,
    "prmt": _all_words,
    "vote": _vote,
    "ldmatrix": _ldmatrix,
    "mma": _mma,
    "bra": _bra,
    "ret": _ret,
    "exit": _ret,
    "membar": _fence,
    "fence": _fence,
    "trap": _trap,
    **forms_sm90.FORMS,
}
