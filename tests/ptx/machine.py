"""Decodes PTX text (cached on disk), and runs one launch in the executor, on memory of this process."""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from . import build, decode, records
from .decode import Kernel
from .extents import merged
from .text import parse

SHARED_LIMIT = 163 * 1024  # bytes of shared memory that a block can have on an A100
# Largest memory range of a tensor (large strides may span terabytes) in which sectors and conflicting accesses are
# recorded.
MAX_COUNTED_BYTES = 2**30
FINDINGS = 12  # at most so many different errors of a launch are described


class PtxError(AssertionError):
    """A launch did something that is undefined on a GPU or that makes results depend on the order of execution, or it
    could not be executed."""


@dataclass
class Settings:
    """seed: of the order of execution (0: fixed order); its upper 16 bits also seed the errors that .approx
    and div.full instructions add to their results (0: none).

    step_limit: most instructions in a launch, counted by warps.
    """

    seed: int = 0
    step_limit: int = 2_000_000_000


@functools.cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(build.executor()))
    loaded.ptx_operations.restype = ctypes.c_char_p
    sizes = tuple(loaded.ptx_size(k) for k in range(len(records.SIZES)))
    assert sizes == records.SIZES, f"sizes of structures: executor {sizes}, records.py {records.SIZES}"
    return loaded


@functools.cache
def operations() -> dict[str, int]:
    return {name: index for index, name in enumerate(library().ptx_operations().decode().split())}


_DECODER = ("text.py", "forms.py", "forms_sm90.py")


@functools.cache
def _decoder_digest() -> str:
    sources = (Path(each.__file__ or "").read_text() for each in (decode, records))
    return build.digest(__name__, *sources, *((build.HERE / name).read_text() for name in _DECODER), *operations())


def kernel(text: str, name: str, keep: bool = True) -> Kernel:
    """The decoded kernel `name` of a PTX module; with `keep` it is cached on disk."""
    key = build.digest(_decoder_digest(), name, text)
    file = build.cache_folder() / "decoded" / f"{key}.pickle"
    if keep and file.exists():
        return pickle.loads(file.read_bytes())
    (entry,) = parse(text, name)
    decoded = decode.decode(entry, operations())
    decoded.key = key
    if not keep:
        return decoded
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(decoded))
    part.rename(file)
    return decoded


@dataclass
class Extent:
    """Bytes that a kernel may access. read, written: 1 for each 32-byte sector that was read or written; empty for more
    than MAX_COUNTED_BYTES."""

    start: int
    size: int
    read: np.ndarray = field(init=False)
    written: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        sectors = ((self.start + self.size) >> 5) - (self.start >> 5) + 1
        if self.size > MAX_COUNTED_BYTES:
            sectors = 0
        self.read, self.written = np.zeros(sectors, np.uint8), np.zeros(sectors, np.uint8)


def extents(tensors: Iterable[torch.Tensor]) -> list[Extent]:
    return [Extent(*each) for each in merged(tensors)]


@dataclass
class Result:
    kernel: Kernel
    grid: tuple[int, ...]
    threads: int  # of a block
    shared: int  # bytes of shared memory of a block
    counters: np.ndarray  # one element for each record (decoded instruction), and an unused last one
    steps: int  # instructions, counted by warps
    blocks: int  # number of blocks that ran
    barriers: int  # arrivals of warps at barriers of the block
    errors: int
    findings: list[str]  # descriptions of the first FINDINGS different errors
    extents: list[Extent]
    seconds: float

    @property
    def bytes_read(self) -> int:
        return 32 * sum(int(each.read.sum()) for each in self.extents)

    @property
    def bytes_written(self) -> int:
        return 32 * sum(int(each.written.sum()) for each in self.extents)


def _three(sizes: Sequence[int]) -> list[int]:
    return [*map(int, sizes), 1, 1, 1][:3]


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


def _sectors(array: np.ndarray) -> int | None:
    return _address(array) if array.size else None


def _program(kernel: Kernel) -> records.Program:
    cached = getattr(kernel, "_program", None)
    if cached is None:
        constants = np.frombuffer(kernel.constants or b"\0", np.uint8)
        program = records.Program(
            _address(kernel.records),
            len(kernel.records),
            _address(kernel.operands),
            _address(constants),
            len(kernel.constants),
            kernel.register_bytes,
            (ctypes.c_uint32 * 16)(*kernel.special),
            kernel.shared_grain,
            kernel.global_grain,
            kernel.parameter_bytes,
            max(len(kernel.shared), 1),
        )
        cached = kernel._program = (program, constants)  # type: ignore[attr-defined]
    return cached[0]


def run(
    kernel: Kernel,
    grid: Sequence[int],
    block: Sequence[int],
    shared: int,
    parameters: bytes,
    extents: list[Extent],
    settings: Settings,
) -> Result:
    """Executes one launch; `check` raises the errors in its result. shared: bytes of shared memory of a block,
    static and dynamic."""
    least = kernel.parameter_bytes
    assert len(parameters) >= least, f"{kernel.name}: expected at least {least} parameter bytes, got {len(parameters)}"
    counters = np.zeros(len(kernel.records) + 1, records.COUNTERS)
    findings = (records.Finding * FINDINGS)()
    ranges = (records.Range * max(len(extents), 1))(
        *((each.start, each.start + each.size, *map(_sectors, (each.read, each.written))) for each in extents)
    )
    total = shared + kernel.shared_gaps
    named = kernel.shared or [("shared memory", 0, shared)]
    variables = (records.Variable * len(named))(
        *((begin, begin + size if size else total, name.encode()[:55]) for name, begin, size in named)
    )
    request = records.Request(
        grid=(ctypes.c_uint32 * 3)(*_three(grid)),
        block=(ctypes.c_uint32 * 3)(*_three(block)),
        shared_bytes=total,
        seed=settings.seed,
        range_count=len(extents),
        finding_limit=FINDINGS,
        step_limit=settings.step_limit,
        parameters=ctypes.cast(ctypes.c_char_p(parameters), ctypes.c_void_p).value,
        ranges=ctypes.addressof(ranges),
        counters=_address(counters),
        findings=ctypes.addressof(findings),
        variables=ctypes.addressof(variables),
    )
    program = _program(kernel)
    began = time.perf_counter()
    library().ptx_run(ctypes.byref(program), ctypes.byref(request))
    seconds = time.perf_counter() - began
    threads = int(np.prod(_three(block)))
    return Result(
        kernel,
        tuple(grid),
        threads,
        shared,
        counters,
        request.steps,
        request.blocks,
        request.barriers,
        request.errors,
        [_message(kernel, each) for each in findings[: request.finding_count]],
        extents,
        seconds,
    )


def _message(kernel: Kernel, finding: records.Finding) -> str:
    block = ",".join(map(str, finding.block))
    lane = f" lane {finding.lane}" if finding.lane < 32 else ""
    times = f" ({finding.times} times)" if finding.times > 1 else ""
    what = finding.text.decode(errors="replace")
    what = re.sub(r"\(instruction (\d+)\)", lambda m: f"at {kernel.where(int(m[1]))}", what)
    return f"{kernel.where(finding.pc)}\n    block ({block}) warp {finding.warp}{lane}: {what}{times}"


def check(result: Result) -> None:
    if result.errors:
        messages = "\n".join(result.findings)
        raise PtxError(f"{result.errors} errors in {result.kernel.title}, grid {result.grid}:\n{messages}")
