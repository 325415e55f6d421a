"""Turns PTX statements into records, the executor's form of instructions. Every register and constant gets an offset in
the memory that holds a warp's registers."""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from typing import Any

import numpy as np

from .records import RECORD
from .text import SIZES, Entry, Statement, Unsupported, split

SPECIAL = [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
SPECIAL += ["%laneid", "%warpid", "%lanemask_lt", "%lanemask_le"]

_GUARD = re.compile(r"@(!?)(\S+)\s+")
_REGISTER = re.compile(r"(%?[A-Za-z_$]+)\d+$")
_ADDRESS = re.compile(r"(.*?)\s*(?:\+\s*(-?\w+))?$", re.S)


@dataclass
class Kernel:
    """One decoded kernel (PTX calls a kernel an entry)."""

    name: str
    key: str  # a hash of the PTX module, the name and the decoder
    records: np.ndarray
    operands: np.ndarray
    constants: bytes
    register_bytes: int
    special: list[int]  # offsets of the registers in SPECIAL
    shared_grain: int  # bytes of the smallest element of ld.shared and st.shared, at most 4
    global_grain: int  # bytes of the smallest element of st.global, at most 4
    parameters: list[tuple[int, int]]  # offset, bytes
    parameter_bytes: int
    static_shared: int
    shared_gaps: int  # bytes of the gaps that the executor has between shared variables
    shared: list[tuple[str, int, int]]  # name, offset with the gaps and bytes (0: dynamic) of each shared variable
    max_threads: int | None
    texts: list[str]  # the PTX instruction of every record
    lines: list[int]  # the PTX line of every record
    sources: list[tuple[int, ...]]  # Statement.source of every record
    files: dict[int, str]

    @property
    def title(self) -> str:
        return demangled(self.name)

    def where(self, pc: int) -> str:
        """Kernel, PTX line, source line and text of record `pc`; only the kernel if there is no such record."""
        if pc >= len(self.texts):
            return self.title
        text = re.sub(r"\{(%\w+),[^}]{90,},\s*(%\w+)\}", r"{\1, ..., \2}", self.texts[pc])  # shortens lists
        return f"{self.title}, PTX line {self.lines[pc]}, {self.source(pc)}: {text}"

    def source(self, pc: int) -> str:
        """Source file and line of record `pc`; for an inlined function also those of the call."""
        found = []
        for file, line in zip(self.sources[pc][::2], self.sources[pc][1::2], strict=True):
            path = self.files.get(file, "")
            found.append(f"{path.rsplit('/', 1)[-1]}:{line}")
        return " in ".join(found) if self.sources[pc][1] else "no source line"


@functools.cache
def _filtered(name: str) -> str:
    tool = shutil.which("c++filt")
    if not name.startswith("_Z") or not tool:
        return name
    return subprocess.run([tool, name], capture_output=True, text=True).stdout.strip()


@functools.cache
def demangled(name: str) -> str:
    text = _filtered(name)
    if text == name:
        return name
    text = re.sub(r"moe::|\(anonymous namespace\)::|_GLOBAL__N__\w+::|^void ", "", text)
    depth = 0
    for at, each in enumerate(text):  # the parameters begin at the first parenthesis outside of <>
        depth += (each == "<") - (each == ">")
        if each == "(" and not depth:
            return text[:at]
    return text


def slot(size: int) -> int:
    """Bytes of a register of 32 lanes with `size` bytes each; size 0 is a predicate, with one bit for each lane. At
    least 64, as the executor has one 64-bit mask of undefined lanes for every 64 bytes of registers."""
    return max(32 * size, 64)


def number(text: str, floating: int) -> int:
    """The bits of a literal. floating: bytes of the operand if it is a float, else 0. A float literal is converted to
    the size of a float operand of 4 or 8 bytes."""
    kind = text[:2]
    if kind in ("0f", "0F"):
        bits = int(text[2:], 16)
        if floating != 8:
            return bits
        return int.from_bytes(struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]), "little")
    if kind in ("0d", "0D"):
        bits = int(text[2:], 16)
        if floating != 4:
            return bits
        return int.from_bytes(struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0]), "little")
    text = text.rstrip("U")
    return int(text, 8 if re.fullmatch(r"-?0\d+", text) else 0)


class Decoder:
    """Turns the statements of one kernel into records; forms.py has the function for each opcode."""

    def __init__(self, entry: Entry, operations: dict[str, int]) -> None:
        self.entry, self.operations = entry, operations
        self.rows: list[dict[str, Any]] = []
        self.origins: list[Statement] = []
        self.operands: list[int] = []
        self.constants = bytearray()
        self._constants: dict[tuple[int, int], int] = {}
        self._places: dict[str, tuple[int, int]] = {}  # register -> offset after the constants, bytes of a lane
        self._bytes = 0
        for name in SPECIAL:
            self._declare(name, 4)

    def _declare(self, name: str, size: int) -> int:
        self._places[name] = self._bytes, size
        self._bytes += slot(size)
        return self._places[name][0]

    def place(self, name: str) -> tuple[int, int] | None:
        """A register's entry in _places; None if the name is not a register."""
        name = self.statement.names.get(name, name)
        known = self._places.get(name)
        if known is None:
            m = _REGISTER.match(name)
            kind = self.entry.registers.get(name) or (m and self.entry.registers.get(f"{m[1]}<"))
            if not kind:
                return None
            self._declare(name, max(SIZES[kind], 2) if kind != "pred" else 0)
            known = self._places[name]
        return known

    def constant(self, value: int, size: int) -> int:
        """The operand of a value that is the same in every lane. It is ~offset; `kernel` replaces it by the offset."""
        value &= (1 << (8 * max(size, 4))) - 1
        key = value, slot(size)
        if key not in self._constants:
            self._constants[key] = ~len(self.constants)
            lane = value.to_bytes(max(size, 4), "little")[: size or 4]
            self.constants += lane * (slot(size) // len(lane))
        return self._constants[key]

    def operand(self, text: str, size: int, floating: bool = False) -> int:
        """The operand for a register, literal, variable or parameter. `_`, an unused result, gets a register that
        nothing reads."""
        place = self.place(text)
        if place is not None:
            return place[0]
        if text == "_":
            sink = self._places.get(f"sink {size}")
            return sink[0] if sink else self._declare(f"sink {size}", size)
        shared = re.match(r"([\w$]+)(?:\+(\d+))?$", text)
        if shared and shared[1] in self.entry.shared:
            return self.constant(self.entry.shared[shared[1]][0] + int(shared[2] or 0), size)
        if text in self.entry.parameters:
            return self.constant(self.entry.parameters[text][0], size)
        if text == "WARP_SZ":
            return self.constant(32, size)
        if text in ("true", "false"):
            return self.constant(-(text == "true"), size)
        try:
            return self.constant(number(text, size if floating else 0), size)
        except ValueError:
            raise self.unsupported(f"operand {text}") from None

    def width(self, text: str) -> int | None:
        place = self.place(text)
        return place and place[1]

    def address(self, text: str) -> tuple[int, int, int]:
        """For an address [base + offset]: operand of the base (register or constant 0), offset, bytes of the base."""
        m = _ADDRESS.match(text.strip()[1:-1].strip())
        assert m
        base, offset = m[1].strip(), int(m[2], 0) if m[2] else 0
        place = self.place(base)
        if place is not None:
            return place[0], offset, place[1]
        if base in self.entry.shared:
            return self.constant(0, 4), self.entry.shared[base][0] + offset, 4
        if base in self.entry.parameters:
            return self.constant(0, 4), self.entry.parameters[base][0] + offset, 4
        try:
            return self.constant(0, 4), int(base, 0) + offset, 4
        except ValueError:
            raise self.unsupported(f"address {text}") from None

    def temporary(self, size: int) -> int:
        return self._declare(f"temporary {len(self._places)}", size)

    def unsupported(self, what: str = "") -> Unsupported:
        reason = f" ({what})" if what else ""
        return Unsupported(f"{self.entry.name}, PTX line {self.statement.line}: {self.statement.text}{reason}")

    def emit(self, name: str, operands: list[int], **fields: Any) -> None:
        if name not in self.operations:
            raise self.unsupported(f"no operation {name}")
        self.rows.append(
            {
                "op": self.operations[name],
                "count": len(operands),
                "guard": self.guard,
                "negated": self.negated,
                "operands": len(self.operands),
                "target": -1,
                **fields,
            }
        )
        self.operands += operands
        self.origins.append(self.statement)

    def add(self, statement: Statement, forms: dict[str, Any], plain: Any) -> None:
        self.statement = statement
        text, self.guard, self.negated = statement.text, -1, 0
        if text[0] == "@":
            m = _GUARD.match(text)
            place = m and self.place(m[2])
            if not m or not place:
                raise self.unsupported("guard")
            self.guard, self.negated = place[0], int(bool(m[1]))
            text = text[m.end() :]
        opcode, _, rest = text.partition(" ")
        parts = opcode.split(".")
        forms.get(parts[0], plain)(self, parts, split(rest.strip()))

    def kernel(self, starts: list[int]) -> Kernel:
        """The kernel with final offsets; constants are before the registers. starts: by statement, its first record."""
        entry, base = self.entry, -(-len(self.constants) // 64) * 64
        for row, origin in zip(self.rows, self.origins, strict=True):
            if isinstance(row["target"], str):
                row["target"] = starts[entry.target(origin, row["target"])]
            if row["guard"] >= 0:
                row["guard"] += base
        records = np.zeros(len(self.rows), RECORD)
        for name in RECORD.names or ():
            records[name] = [row.get(name, 0) for row in self.rows]
        operands = np.array([*self.operands, 0], np.int64)
        operands = np.where(operands < 0, ~operands, operands + base).astype(np.uint32)

        def grain(*names: str) -> int:
            ops = [self.operations[name] for name in names]
            return min([4, *(row["size"] for row in self.rows if row["op"] in ops)])

        return Kernel(
            name=entry.name,
            key="",
            records=records,
            operands=operands,
            constants=bytes(self.constants).ljust(base, b"\0"),
            register_bytes=base + self._bytes,
            special=[base + self._places[name][0] for name in SPECIAL],
            shared_grain=grain("ld.shared", "st.shared"),
            global_grain=grain("st.global"),
            parameters=list(entry.parameters.values()),
            parameter_bytes=entry.parameter_bytes,
            static_shared=entry.static_shared,
            shared_gaps=entry.shared_gaps,
            shared=[(_filtered(name).rsplit("::")[-1], *place) for name, place in entry.shared.items()],
            max_threads=entry.max_threads,
            texts=[each.text for each in self.origins],
            lines=[each.line for each in self.origins],
            sources=[each.source for each in self.origins],
            files=entry.files,
        )


def decode(entry: Entry, operations: dict[str, int]) -> Kernel:
    from .forms import FORMS, plain
    from .forms_sm90 import unfenced

    decoder, starts = Decoder(entry, operations), []
    for statement in entry.statements:
        starts.append(len(decoder.rows))  # index of its first record; a statement can become several records
        decoder.add(statement, FORMS, plain)
    starts.append(len(decoder.rows))
    for index in unfenced(entry):
        decoder.rows[starts[index]]["flag"] = 1
    return decoder.kernel(starts)
