"""Reads and writes bench/results, and derives the ledger: the state of every operation on every backend.

A result is the JSON of one machine. It has an entry for each operation, backend and dtype that ran: the verdict of the
verification, the measured figures, and a hash of the sources without their comments.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from moe_kernels._source import python_code
from moe_kernels.backends import ALIASES, NAMES, file_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
EXECUTED = Path("bench/results/ptx/executed.json")  # below the root of a checkout
GPU_BACKENDS = ("triton", "cuda")

Result = dict[str, Any]

FIGURES = ("figures", "curves")  # the lists of figures in an entry

# Keys of a figure -> keys of its entry that have the same values. Files hold these values in the entry alone.
SHARED = {"op": "operation", "backend": "backend", "dtype": "dtype"}

# Patterns of the files with a backend's kernels; {op} is the name of the operation or of its file (file_of). If no file
# matches, the backend does not implement the operation.
_KERNELS = {
    "reference": "python_ref/{op}.py",
    "cpu": "csrc/cpu/{op}*.cpp",
    "triton": "moe_kernels/backends/triton/{op}.py",
    "cuda": "csrc/cuda/{op}*.cu",
}

# Matches the names of operations that a file in moe_kernels/ops imports or calls.
_CALLED = re.compile(r"^from moe_kernels\.ops\.(\w+) import|\boperators\.(\w+)_(?:fwd|bwd)\(", re.MULTILINE)

# Matches a file's includes and its imports of modules of backends and cases. ops.h is left out: it declares every
# operation, so each new operation would make results of other operations stale.
_INCLUDED = re.compile(
    r'^#include "(?!ops\.h")(.+)"|^from moe_kernels\.((?:backends|cases)[.\w]*) import (.+)|'
    r'^\w+ = Path\(__file__\)\.with_name\("(.+)"\)',
    re.MULTILINE,
)


def operations(root: Path = ROOT) -> list[str]:
    return sorted(path.stem for path in (root / "moe_kernels" / "ops").glob("[!_]*.py"))


def _files(name: str, pattern: str, root: Path) -> list[Path]:
    """The files of an operation by a pattern with its name; kwta_linear.cpp is not one of kwta's."""
    others = tuple(each for each in operations(root) if each.startswith(f"{name}_"))
    return [path for path in root.glob(pattern.format(op=name)) if not path.stem.startswith(others)]


def _kernels(op: str, backend: str, root: Path) -> list[Path]:
    return [path for name in {op, file_of(backend, op)} for path in _files(name, _KERNELS[backend], root)]


def implemented(op: str, backend: str, root: Path = ROOT) -> bool:
    return bool(_kernels(op, backend, root))


def sources(op: str, backend: str, root: Path = ROOT) -> list[Path]:
    """The files whose changes make a result of this operation and backend stale:

    * the operation's files in moe_kernels/ops and, with its inputs and least bytes, in moe_kernels/cases;
    * the files of its kernels, and of the kernels of the operations that it calls (_CALLED);
    * for C++ and CUDA, the files of these operations in backends/native (for cpu without *_cuda.py, for cuda without
      *_cpu.py); if they import another operation's file from there, also the kernels of that operation;
    * the headers (without ops.h) that the kernels include, and the modules below moe_kernels/backends and
      moe_kernels/cases that these files import, directly or through others, with the data beside them that these name.
    """
    names = {each for name in (op, *_called(op, root)) for each in (name, file_of(backend, name))}
    native, other = root / "moe_kernels/backends/native", "_cuda" if backend == "cpu" else "_cpu"
    left = [path for name in names for path in _files(name, _KERNELS[backend], root)]
    if backend in ("cpu", "cuda"):
        left += [path for name in names for path in _files(name, "moe_kernels/backends/native/{op}*.py", root)]
    left += root.glob(f"moe_kernels/cases/{file_of('reference', op)}.py")
    found = {root / "moe_kernels" / "ops" / f"{file_of('reference', op)}.py"}
    while left:
        path = left.pop()
        if path in found or (path.parent == native and path.stem.endswith(other)):
            continue
        found.add(path)
        if path.parent == native:
            left += _files(path.stem.removesuffix(f"_{backend}"), _KERNELS[backend], root)
        for header, module, imported, data in _included(path.read_text()):
            folder = root / f"moe_kernels/{module.replace('.', '/')}"
            # backends/__init__.py changes no kernel.
            stems = re.findall(r"\w+", imported) + ["__init__"] * ("." in module)
            places = [folder.with_suffix(".py"), *(folder / f"{stem}.py" for stem in stems)]
            if data:
                places = [path.parent / data]
            if header:
                places = [path.parent / header, root / "csrc/include" / header]
            left += [place for place in places if place.is_file() and place not in found]
    return sorted(found)


@cache
def _included(text: str) -> list[tuple[str, str, str, str]]:
    return _INCLUDED.findall(text)


def _called(op: str, root: Path) -> set[str]:
    path = root / "moe_kernels" / "ops" / f"{file_of('reference', op)}.py"
    found = _CALLED.findall(path.read_text()) if path.is_file() else []
    return {name for groups in found for name in groups} & set(operations(root))


_digests: dict[tuple[str, str, Path], str] | None = None


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Inside the block no source changes, so each digest is computed once. A report asks for some 2000."""
    global _digests
    before = _digests
    _digests = {} if before is None else before
    try:
        yield
    finally:
        _digests = before


def digest(op: str, backend: str, root: Path = ROOT) -> str:
    known = {} if _digests is None else _digests
    if (op, backend, root) not in known:
        known[op, backend, root] = _digest(op, backend, root)
    return known[op, backend, root]


def _digest(op: str, backend: str, root: Path) -> str:
    found = hashlib.sha256()
    for path in sources(op, backend, root):
        code = _code(path.suffix, path.read_text())
        found.update(f"{path.relative_to(root).as_posix()} {len(code)}\n{code}".encode())
    return found.hexdigest()


@cache  # of each version of a file, since a run asks for every kernel's digest, and kernels share files
def _code(suffix: str, text: str) -> str:
    """The text of a file without what leaves results fresh."""
    if suffix == ".json":
        return text
    return (python_code if suffix == ".py" else _cpp_code)(text)


def _cpp_code(text: str) -> str:
    """A C++ file without // comments, and without blanks and line breaks except between words and at directives."""
    lines = re.sub(r"//.*|\\\n", " ", text).splitlines()
    code = " ".join(f"\n{line}\n" if line.startswith("#") else line for line in lines)
    return re.sub(r"[ \t]+(?=\W)|(?<=\W)[ \t]+", "", code)


def free_path(folder: Path, name: str, suffix: str) -> Path:
    """A new empty file of this run: "NVIDIA H200" -> "nvidia-h200-20261128T0123Z.json". Later runs get other names."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + f"-{datetime.now(timezone.utc):%Y%m%dT%H%MZ}"
    for count in itertools.count(1):
        path = folder / f"{stem}{f'-{count}' if count > 1 else ''}{suffix}"
        with contextlib.suppress(FileExistsError), path.open("x"):
            return path
    raise AssertionError


def write(result: Result, path: Path) -> None:
    """Writes a result. A run that is cut off meanwhile leaves the file as it was."""
    part = path.with_suffix(".part")
    part.write_text(compact(result))
    part.replace(path)


def compact(result: Result) -> str:
    """A result as JSON with four significant digits of each float; every figure has a line of its own."""
    rounded = json.loads(json.dumps(result), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    entries = rounded.pop("entries")
    facts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in rounded.items()]
    return "{\n" + ",\n".join([*facts, ' "entries": ' + _lines(map(_entry_lines, entries))]) + "\n}\n"


def _entry_lines(entry: dict[str, Any]) -> str:
    facts = json.dumps({key: value for key, value in entry.items() if key not in (*FIGURES, "date")})
    figures = [f"{json.dumps(name)}: {_lines(_figure_line(each) for each in entry.get(name, []))}" for name in FIGURES]
    return ", ".join([facts[:-1], *figures]) + "}"


def _figure_line(figure: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in figure.items() if key not in SHARED})


def _lines(lines: Iterable[str]) -> str:
    found = list(lines)
    return "[\n" + ",\n".join(found) + "\n]" if found else "[]"


def load(path: Path) -> Result:
    """The result in a file that `write` wrote. Each figure gets the values of SHARED from its entry, each entry the
    date of the run."""
    result: Result = json.loads(path.read_text())
    for entry in result["entries"]:
        entry["date"] = result["date"]
        shared = {key: entry[name] for key, name in SHARED.items()}
        for name in FIGURES:
            entry[name] = [shared | each for each in entry.get(name, [])]
    return result


def time_of(result: Result) -> str:
    """When a run began, as text that sorts; results of earlier versions have the date alone."""
    return str(result.get("started", result["date"]))


def is_stale(entry: dict[str, Any], root: Path = ROOT) -> bool:
    return entry["sources"] != digest(entry["operation"], entry["backend"], root)


@settled()
def stale(result: Result, root: Path = ROOT) -> list[str]:
    """The operations and backends of a result whose sources have changed since, each as in "kwta cuda"."""
    return sorted({f"{each['operation']} {each['backend']}" for each in result["entries"] if is_stale(each, root)})


def state(op: str, backend: str, results: Iterable[Result], root: Path = ROOT) -> str:
    """The state of one operation and backend, from the newest result that has both if there is one."""
    if not implemented(op, backend, root):
        return "-"
    if backend == "reference":
        return "the definition"
    for result in sorted(results, key=time_of, reverse=True):
        entries = [each for each in result["entries"] if _is_result_of(each, op, backend)]
        if not entries:
            continue
        date = min(each.get("date", result["date"]) for each in entries)
        if any(is_stale(each, root) for each in entries):
            return f"stale: sources changed since {date}"
        verdict = "verified" if all(passed(each) for each in entries) else "FAILED"
        device = result["device"] if entries[0]["device"] == "cuda" else result["machine"]["cpu"]
        return f"{verdict} {date} on {device}"
    return executed(op, backend, root) if backend in GPU_BACKENDS else "tested on every change"


def executed(op: str, backend: str, root: Path = ROOT) -> str:
    """State of a kernel that no GPU has run: the date when its PTX, executed on a CPU, agreed with the definition.

    Operations that share a file (file_of) share the oldest of their dates; if one of them is stale, all are. The state
    of an operation that was not executed is "never run on a GPU".
    """
    path = root / EXECUTED
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    same = [name for name in known if file_of("reference", name) == file_of("reference", op) and backend in known[name]]
    if backend not in known.get(ALIASES.get(op, op), {}):
        return "never run on a GPU"
    date = min(known[name][backend]["date"] for name in same)
    if any(known[name][backend]["sources"] != digest(name, backend, root) for name in same):
        return f"stale: sources changed since PTX executed {date}"
    return f"PTX executed {date}"


def write_executed(
    found: dict[str, dict[str, dict[str, str]]], kernels: Sequence[str] = GPU_BACKENDS, root: Path = ROOT
) -> None:
    """Stores the operations and backends whose PTX agreed with the definition (`counting.verified`).

    kernels: the backends that were executed. Of these, what `found` lacks is no longer stored for its operations.
    """
    path = root / EXECUTED
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    for op, now in found.items():
        known[op] = {backend: each for backend, each in known.get(op, {}).items() if backend not in kernels} | now
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def passed(entry: dict[str, Any]) -> bool:
    """Whether the kernel agrees with the definition and no check failed. A check that could not run has not failed."""
    return entry["verdict"] == "ok" and not any(word.startswith("FAILED") for word in entry["checks"].values())


def _is_result_of(entry: dict[str, Any], op: str, backend: str) -> bool:
    # Results of GPU kernels that ran on a CPU do not count.
    on_gpu = entry["device"] == "cuda" or backend not in GPU_BACKENDS
    same = file_of("reference", entry["operation"]) == file_of("reference", op)
    return same and entry["backend"] == backend and on_gpu


@settled()
def states(results: Iterable[Result], root: Path = ROOT) -> dict[str, dict[str, str]]:
    """The whole ledger: operation -> backend -> state."""
    kept = list(results)
    return {op: {backend: state(op, backend, kept, root) for backend in NAMES} for op in operations(root)}
