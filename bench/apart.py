"""Runs calls in another process, which a faulty kernel may lose.

After a kernel that writes out of bounds or never ends, every later GPU call of its process fails or waits. That process
is killed, and the next call starts a new one.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from moe_kernels.verify import said


class Lost(RuntimeError):
    """The process ended during the call, or was killed because of it."""


class Apart:
    """Another process: apart(function, *args, seconds=...) returns function(*args) computed there, all pickled.

    A call that raises nothing but leaves the GPU unusable raises Lost too: its result cannot be trusted.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()

    def __call__(self, function: Callable[..., Any], *args: Any, seconds: float = math.inf) -> Any:
        pipe = self._pipe or self._start()
        try:
            pipe.send((function, args))
            if not pipe.poll(None if seconds == math.inf else max(seconds, 0)):
                raise Lost(f"did not end within {seconds:.0f} s")
            result, raised, broken = pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(1)
            status = self._process.exitcode
            self._end()
            raise Lost(f"its process ended with status {status}") from None
        except BaseException:
            self._end()
            raise
        if broken:
            self._end()
            raise Lost(raised or broken)
        if raised:
            raise RuntimeError(raised)
        return result

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")  # CUDA does not work in a fork of a process that has used it
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        return self._pipe

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    broken = ""
    while not broken:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        result, raised = None, ""
        try:
            result = function(*args)
        except Exception as error:
            raised = said(error)
        broken = unusable()
        pipe.send((result, raised, broken))


def unusable() -> str:
    """The GPU's error if it accepts no more work from this process, else an empty string."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return said(error)
    return ""
