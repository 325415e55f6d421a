"""Compiles Triton kernels for a GPU that is elsewhere, into the folder in which Triton looks before it compiles.

Inside `recording` launches of Triton kernels take CPU tensors. Triton binds their arguments as for the named GPU, but
nothing is compiled or run. `fill_cache` then compiles what was launched, under the key that the same launch on that GPU
looks up. Triton's key holds the kernel's source, its argument types, constants and options, the compute capability, the
versions of Triton and ptxas and some environment variables, but nothing else of the GPU.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch

try:
    import triton.compiler
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("moe_kernels.precompile needs Triton, which is not installed", name=error.name) from error

import moe_kernels.backends.triton as kernels
from moe_kernels import backends, sizes, verify
from moe_kernels.backends.triton import _grouped_configs

# Examples of GPUs by target: "cuda:" and the compute capability without its point.
TARGETS = {
    "cuda:80": "A100",
    "cuda:86": "A10, RTX 3090",
    "cuda:89": "L4, L40S, RTX 4090",
    "cuda:90": "H100, H200",
    "cuda:100": "B200",
    "cuda:103": "B300",
    "cuda:120": "RTX 5090",
}

_devices = itertools.count(1000)


class Launch(TypedDict):
    """A launch of a Triton kernel, without its tensors.

    kernel: name. grid: programs along each axis; empty if the launch gave a function. key: Triton's key of the compiled
    kernel within a process. compiles: whether kernel and key are new in the block. source, options: what Triton would
    compile for target.
    """

    kernel: str
    grid: list[int]
    key: str
    compiles: bool
    source: Any
    options: dict[str, Any]
    target: Any


class Summary(NamedTuple):
    """What `fill_cache` did: numbers of kernels, reasons of failures by kernel, seconds, and Triton's folder."""

    compiled: int
    present: int
    failures: list[str]
    seconds: float
    folder: str

    def __str__(self) -> str:
        total = self.compiled + self.present + len(self.failures)
        counts = f"{self.compiled} compiled, {self.present} already there, {len(self.failures)} failed"
        return f"{total} kernels: {counts}; {self.seconds:.0f} s; {self.folder}"


@dataclass(frozen=True)
class NoDevice:
    """Driver of an absent GPU. Every instance has a new device number, as Triton keeps compiled kernels by device."""

    capability: int
    number: int = field(default_factory=lambda: next(_devices))

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a launch reads {name!r} of the GPU; of an absent GPU only the capability is known")


@contextlib.contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Yields a list, to which each launch of a Triton kernel in the block adds an entry.

    In the block operations on CPU tensors choose backend "triton" before others, also in layers and backward passes. No
    Triton kernel runs: their outputs are zeros. Only one thread may record at a time.

    Args:
        target: a name in TARGETS, such as "cuda:90".

    Raises:
        ValueError: an unknown target.
        BackendError: TRITON_INTERPRET=1 is set.

    Example:
        >>> from moe_kernels import precompile
        >>> with precompile.recording("cuda:90") as launches:
        ...     y = mk.kwta(torch.randn(4, 64), 8)
        >>> [launch["kernel"] for launch in launches]
        ['_kwta_fwd']
    """
    if target not in TARGETS:
        known = ", ".join(f"{name} ({examples})" for name, examples in TARGETS.items())
        raise ValueError(f"target must be one of {known}; got {target!r}")
    if knobs.runtime.interpret:
        raise backends.BackendError("TRITON_INTERPRET=1 is set, and Triton's interpreter compiles no kernel: unset it")
    order = backends.AUTOMATIC | {"cpu": ("triton", *backends.AUTOMATIC["cpu"])}
    with (
        _replaced(backends, "AUTOMATIC", order),
        record_launches(int(target.removeprefix("cuda:"))) as launches,
    ):
        yield launches


@contextlib.contextmanager
def record_launches(capability: int) -> Iterator[list[Launch]]:
    """As `recording` for a GPU of this capability, such as 90, but the automatic choice of backends stays."""
    launches: list[Launch] = []
    loop = _loop(capability)
    with contextlib.ExitStack() as changed:
        for owner, name, value in (
            (driver, "_active", NoDevice(capability)),
            (kernels, "device_type", "cpu"),
            (_grouped_configs, "loop", lambda device: loop),
            (torch.Tensor, "new_empty", torch.Tensor.new_zeros),  # zeros are valid indices of experts and rows
            (sizes, "is_checked", lambda index: False),  # as on a GPU: plans of zeros do not agree with themselves
            (sizes, "has_values", lambda x: False),  # as on a GPU: plans keep the rows that are not in use
            *_recorders(launches),
        ):
            changed.enter_context(_replaced(owner, name, value))
        changed.callback(backends.reconsider)
        backends.reconsider()
        yield launches


def _loop(capability: int) -> int:
    """The inner loop of grouped products that a GPU of this capability runs."""
    rule = inspect.unwrap(_grouped_configs.loop)
    with _replaced(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10)):
        return rule(torch.device("cuda"))


def _recorders(launches: list[Launch]) -> list[tuple[Any, str, Any]]:
    """Replacements of two methods of JITFunction: `run`, which launches, and `_do_compile`, which it calls."""
    known: set[tuple[str, str]] = set()
    programs: list[int] = []
    run = JITFunction.run

    def record(self: Any, *arguments: Any, grid: Any, **named: Any) -> None:
        nonlocal programs
        programs = [] if callable(grid) else list(grid)
        run(self, *arguments, grid=grid, **named)

    def keep(
        self: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attributes: Any, *_: Any
    ) -> None:  # run launches nothing if it gets None
        this = (self.fn.__qualname__, str(key))
        launches.append(
            Launch(
                kernel=self.fn.__name__,
                grid=programs,
                key=this[1],
                compiles=this not in known,
                source=ASTSource(self, signature, constants, attributes),
                options=dict(vars(options)),
                target=driver.active.get_current_target(),
            )
        )
        known.add(this)

    return [(JITFunction, "run", record), (JITFunction, "_do_compile", keep)]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside the block the attribute `name` of `owner` is `value`."""
    inherited = object()
    before = vars(owner).get(name, inherited)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def cases(target: str, ops: Iterable[str] = (), dtypes: Iterable[str] = (), *, small: bool = False) -> list[Launch]:
    """The launches that `python -m moe_kernels verify` makes on a GPU.

    Args:
        target: as for `recording`.
        ops: names of operations; empty for all.
        dtypes: names such as "bfloat16"; empty for all.
        small: only cases with small inputs.

    Raises:
        ValueError: an unknown target, operation or dtype, or operations without a Triton kernel in these dtypes.
    """
    named = {verify.dtype_name(dtype): dtype for dtype in verify.DTYPES}
    ops, dtypes = tuple(ops) or tuple(verify.OPERATIONS), tuple(dtypes) or tuple(named)
    if unknown := [dtype for dtype in dtypes if dtype not in named]:
        raise ValueError(f"dtype must be one of {', '.join(named)}; got {unknown[0]!r}")
    with recording(target) as launches, verify.threads(1):
        for op, dtype in itertools.product(ops, dtypes):
            inputs = verify.cases(op, named[dtype], small=small)
            if (reason := backends.unsupported("triton", op, "cpu", named[dtype])) is None:
                for case in inputs:
                    verify.OPERATIONS[op].run(case.inputs, "triton")
    if not launches:
        raise ValueError(f"nothing to compile for {', '.join(ops)}: {reason}")
    return launches


def fill_cache(
    launches: Iterable[Launch], jobs: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Summary:
    """Compiles what was recorded into Triton's folder: TRITON_CACHE_DIR, or else ~/.triton/cache.

    Args:
        launches: lists that `recording` yielded, for one or more targets.
        jobs: number of processes that compile; None for one per core.
        progress: called with the number of kernels that are done and of all kernels, after each kernel.

    Raises:
        ValueError: jobs is below 1.
    """
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    start, present, failures = time.monotonic(), 0, []
    work = {(str(each["target"]), each["source"].hash(), str(each["options"])): each for each in launches}
    # A forked process has the sources, which cannot be pickled. It runs no operation of torch.
    fork, jobs = multiprocessing.get_context("fork"), min(jobs, len(work) or 1)
    with ProcessPoolExecutor(jobs, mp_context=fork, initializer=_start, initargs=(list(work.values()),)) as pool:
        try:
            for done, future in enumerate(as_completed(pool.submit(_compile, index) for index in range(len(work))), 1):
                hit, failure = future.result()
                present += hit
                failures += [failure] if failure else []
                if progress is not None:
                    progress(done, len(work))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    compiled = len(work) - present - len(failures)
    return Summary(compiled, present, failures, time.monotonic() - start, knobs.cache.dir)


_work: list[Launch] = []


def _start(work: list[Launch]) -> None:
    global _work
    _work = work
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # a compilation makes many objects that live long


def _compile(index: int) -> tuple[bool, str]:
    """Whether the kernel was in the folder already, and the error if it cannot be compiled, else ""."""
    launch, hits = _work[index], []
    driver.set_active(NoDevice(launch["target"].arch))
    knobs.compilation.listener = lambda **made: hits.append(made["cache_hit"])
    try:
        triton.compiler.compile(launch["source"], target=launch["target"], options=launch["options"])
    except Exception as error:
        return False, f"{launch['kernel']}: {verify.error_text(error)}"
    return hits == [True], ""
