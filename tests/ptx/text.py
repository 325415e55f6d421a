"""Parses PTX text into entries (PTX's word for kernels): declarations, and instructions with line numbers."""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

SIZES = {"pred": 0}  # type -> bytes per lane; 0 for a predicate, which has one bit
for _bits in (8, 16, 32, 64):
    SIZES |= {f"{_letter}{_bits}": _bits // 8 for _letter in "bus"}
SIZES |= {"f16": 2, "bf16": 2, "f32": 4, "tf32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4}


class Unsupported(Exception):
    """The PTX has something that the parser, the decoder or the executor does not support."""


@dataclass
class Statement:
    text: str
    line: int  # number of the line in the PTX, from 1
    source: tuple[int, ...]  # file number and line of the last .loc with a line > 0; if inlined, also of the call
    names: dict[str, str]  # registers that an inner scope declares: name -> unique name
    scopes: tuple[int, ...] = ()  # numbers of the inner scopes around it, the outermost first


@dataclass
class Entry:
    name: str
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> offset, bytes
    parameter_bytes: int = 0
    registers: dict[str, str] = field(default_factory=dict)  # name -> type; "%r<" -> type of %r0, %r1 and so on
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> offset, bytes; 0 bytes: dynamic
    static_shared: int = 0  # bytes without the gaps
    shared_gaps: int = 0  # bytes of the gaps between shared variables
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # name (inner scope: name@number) -> index of a statement
    files: dict[int, str] = field(default_factory=dict)
    max_threads: int | None = None

    def target(self, statement: Statement, label: str) -> int:
        """Index of the statement that a branch goes to. If several scopes have the label, the innermost one counts."""
        inner = (f"{label}@{scope}" for scope in reversed(statement.scopes))
        return self.labels[next((name for name in inner if name in self.labels), label)]


# Between two shared variables the executor has a gap, as large as the larger of them and at least so many bytes; an
# access to it is an error. Gaps grow by multiples of this, which keep swizzles of addresses and bank conflicts.
GAP = 1024

_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(\[\d*\])?")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr[\w\s.]*?)?\s+([\w$]+)(?:\[(\d+)\])?$")
_TOKEN = re.compile(
    r"\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)(?:[^\n]*inlined_at\s+(?P<outer>\d+\s+\d+))?[^\n]*"
    r"|\.(?:file|pragma)[^\n]*"
    r"|(?P<label>[$\w.]+):(?!:)"
    r"|(?P<brace>[{}])"
    r"|(?P<statement>[^\s;{}][^;]*);"
    r"|;"
)


def split(text: str) -> list[str]:
    """The operands in `text`: its parts between commas outside of {}, [] and ()."""
    if "{" not in text and "[" not in text and "(" not in text:
        return [each.strip() for each in text.split(",")] if text else []
    found, depth, start = [], 0, 0
    for at, each in enumerate(text):
        if each in "{[(":
            depth += 1
        elif each in "}])":
            depth -= 1
        elif each == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*found, last] if last else found


def without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def code_of(text: str) -> str:
    """The text without parts that do not change machine code: comments, debug information, nvcc's hashes in names."""
    text = without_comments(text.split("\t.section\t.debug")[0])
    text = re.sub(r"(_GLOBAL__N__|_INTERNAL_)[0-9a-f]{8}(_\d+_\w+?_cu_)[0-9a-f]{8}", r"\1\2", text)
    debug = re.compile(r"\s*(\.loc\b|\.file\b|\$L__(tmp|func_begin|func_end|info_string)\w*:|$)")
    return "\n".join(line for line in text.splitlines() if not debug.match(line))


def entry_names(text: str) -> list[str]:
    return re.findall(r"\.entry\s+([\w$]+)", without_comments(text))


def parse(text: str, only: str | None = None) -> list[Entry]:
    """The entries of a module, or only the one named `only`."""
    files = {int(number): path for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    text = without_comments(text)
    lines = [m.start() for m in re.finditer("\n", text)]
    outside: dict[str, tuple[int, int]] = {}
    found, end = [], 0
    bodies = []
    for m in _ENTRY.finditer(text):
        if m.start() < end:
            continue
        outside |= {s[3]: (int(s[1]), _bytes(s)) for s in _SHARED.finditer(text, end, m.start())}
        end = _closing(text, m.end())
        if only in (None, m[1]):
            bodies.append((m, end))
    for m, end in bodies:
        entry = Entry(m[1], files=files)
        _parameters(entry, m[2])
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", m[3])
        if threads:
            entry.max_threads = int(threads[1]) * int(threads[2] or 1) * int(threads[3] or 1)
        _body(entry, text, m.end(), end - 1, lines)
        _place(entry, text[m.end() : end], outside)
        found.append(entry)
    return found


def _closing(text: str, start: int) -> int:
    """Position after the brace that closes the one just before `start`."""
    depth = 1
    for m in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if m[0] == "{" else -1
        if not depth:
            return m.end()
    raise Unsupported("an opening brace has no closing brace")


def _parameters(entry: Entry, text: str) -> None:
    for each in split(text):
        m = _PARAMETER.match(each)
        if not m:
            raise Unsupported(f"{entry.name}: the parameter {each} is not supported")
        size = SIZES[m[2]] * int(m[4] or 1)
        align = max(int(m[1] or 1), SIZES[m[2]])
        entry.parameter_bytes = -(-entry.parameter_bytes // align) * align
        entry.parameters[m[3]] = entry.parameter_bytes, size
        entry.parameter_bytes += size


def _body(entry: Entry, text: str, start: int, end: int, lines: list[int]) -> None:
    scopes: list[dict[str, str]] = [{}]
    numbers: tuple[int, ...] = ()
    opened = 0
    names: dict[str, str] = {}
    source: tuple[int, ...] = (0, 0)
    for m in _TOKEN.finditer(text, start, end):
        kind = m.lastgroup
        if kind == "statement":
            statement = m["statement"]
            if statement[0] != ".":
                line = bisect.bisect(lines, m.start()) + 1
                entry.statements.append(Statement(" ".join(statement.split()), line, source, names, numbers))
            elif statement.startswith(".reg"):
                _registers(entry, statement, scopes)
                names = {k: v for scope in scopes for k, v in scope.items()}
            elif ".shared" in statement:
                s = _SHARED.search(statement)
                if s is None:
                    raise Unsupported(f"{entry.name}: the declaration {statement} is not supported")
                _reserve(entry, s[3], int(s[1]), _bytes(s))
            else:
                raise Unsupported(f"{entry.name}: the declaration {statement} is not supported")
        elif kind == "label":
            label = f"{m['label']}@{numbers[-1]}" if numbers else m["label"]
            entry.labels[label] = len(entry.statements)
        elif kind == "brace":
            if m[0] == "{":
                opened += 1
                numbers = (*numbers, opened)
                scopes.append({})
            else:
                numbers = numbers[:-1]
                scopes.pop()
            names = {k: v for scope in scopes for k, v in scope.items()}
        elif m["line"] and m["line"] != "0":
            source = int(m["file"]), int(m["line"]), *map(int, (m["outer"] or "").split())


def _registers(entry: Entry, text: str, scopes: list[dict[str, str]]) -> None:
    m = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
    if not m or m[1] not in SIZES:
        raise Unsupported(f"{entry.name}: the declaration {text} is not supported")
    for name in m[2].split(","):
        name = name.strip()
        if "<" in name:
            entry.registers[name[: name.index("<") + 1]] = m[1]
            continue
        unique = name if len(scopes) == 1 else f"{name}@{len(entry.registers)}"
        if len(scopes) > 1:
            scopes[-1][name] = unique
        entry.registers[unique] = m[1]


def _bytes(shared: re.Match[str]) -> int:
    """Bytes of a shared variable; 0 for name[], which is dynamic."""
    count = 1 if shared[4] is None else int(shared[4][1:-1] or 0)
    return SIZES[shared[2]] * count


def _reserve(entry: Entry, name: str, align: int, size: int) -> None:
    entry.static_shared = -(-entry.static_shared // align) * align
    if entry.shared:
        offset, last = list(entry.shared.values())[-1]
        least = max(GAP, last, size) if last or size else 0  # all dynamic variables begin at one address
        missing = offset + last + least - (entry.static_shared + entry.shared_gaps)
        entry.shared_gaps += -(-max(missing, 0) // GAP) * GAP
    entry.shared[name] = entry.static_shared + entry.shared_gaps, size
    entry.static_shared += size


def _place(entry: Entry, body: str, outside: dict[str, tuple[int, int]]) -> None:
    """Gives offsets to the module's shared variables that the body uses; dynamic ones, of size 0, come last."""
    used = [name for name in outside if name not in entry.shared and re.search(rf"{re.escape(name)}(?![\w$])", body)]
    for name in sorted(used, key=lambda name: not outside[name][1]):
        _reserve(entry, name, *outside[name])
