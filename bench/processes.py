"""Processes that may crash or hang: each call has one of its own, with what it prints in a file.

They are forks of a process that has imported the bench and has never used a GPU (a fork of one that did cannot use
it), so that a process starts in a tenth of a second; imports take five.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Imported before the forks; a missing one is ignored. None may use a GPU while it is imported. torch imports
# torch._dynamo in the first call of an operator.
PRELOADED = ("bench.measure", "bench.verifying", "torch._dynamo", "triton", "moe_kernels.backends.triton")


class Ended(NamedTuple):
    """How a call ended. status: the exit status of its process, -N for signal N, or None if its time was over."""

    status: int | None
    printed: str


@cache
def context() -> Any:
    """multiprocessing's context for the forks; for new interpreters if a fork cannot use the GPU here."""
    # torch then asks NVML whether there is a GPU, so that a module may ask while it is imported.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(list(PRELOADED))
    if torch.cuda.is_available():
        tried = forks.Process(target=_use_gpu)
        tried.start()
        tried.join(60)
        if tried.exitcode != 0:
            tried.kill()
            print("a forked process cannot use the GPU here: each process imports anew", file=sys.stderr)
            return multiprocessing.get_context("spawn")
    return forks


def _use_gpu() -> None:
    torch.zeros(1, device="cuda").sum().item()


class Calls:
    """Makes calls in processes of their own, from any thread. On exit it ends those that still run."""

    def __init__(self) -> None:
        self._running: set[Any] = set()
        self._closed = False
        # A start also asks all earlier processes for their status, which can be read only once.
        self._lock = threading.Lock()

    def __enter__(self) -> Calls:
        context()
        return self

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)

    def __call__(self, function: Callable[..., object], *args: Any, seconds: float) -> Ended:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "printed"
            path.touch()
            process = context().Process(target=_printing, args=(str(path), function, args))
            with self._lock:
                if self._closed:
                    return Ended(None, "")
                process.start()
                self._running.add(process)
            if not wait([process.sentinel], seconds):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)  # it prints where it is
                wait([process.sentinel], 0.5)
            with self._lock:
                status = process.exitcode
                _kill(process)
                self._running.discard(process)
            return Ended(status, path.read_text(errors="replace"))


def _kill(process: Any) -> None:
    """Ends a process, and those that it has started, such as compilers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(2)  # one that the driver holds ends later, or never


def _printing(path: str, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.setsid()  # a process group of its own, for _kill
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    # Line by line: buffered output would be lost if a signal ended the process.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    function(*args)
