"""Runs calls in another process, since a faulty kernel may make the GPU unusable for its process.

After an illegal memory access later GPU calls of the process fail; after a kernel that does not end they hang. The
process is then killed, and the next call starts a new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench import processes
from moe_kernels.verify import error_text


class WorkerLost(RuntimeError):
    """The process ended during the call, or was killed because the call took too long or left the GPU unusable."""


class Worker:
    """Another process: worker(function, *args, seconds=...) returns function(*args), computed there.

    Function, arguments and result are pickled. An error of the function is raised as a RuntimeError. WorkerLost is
    raised if the process is lost or the GPU is unusable after the call, even if the function returned a result.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()

    def __call__(self, function: Callable[..., Any], *args: Any, seconds: float = math.inf) -> Any:
        pipe = self._pipe or self._start()
        try:
            pipe.send((function, args))
            if not pipe.poll(None if seconds == math.inf else max(seconds, 0)):
                raise WorkerLost(f"did not end within {seconds:.3g} s")
            result, raised, gpu_error = pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(1)
            status = self._process.exitcode
            self._end()
            raise WorkerLost(f"its process ended with status {status}") from None
        except BaseException:
            self._end()
            raise
        if gpu_error:
            self._end()
            raise WorkerLost(raised or gpu_error)
        if raised:
            raise RuntimeError(raised)
        return result

    def _start(self) -> Connection:
        context = processes.context()
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_pipe,), daemon=True)
        self._process.start()
        child_pipe.close()
        return self._pipe

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    gpu_error = ""
    while not gpu_error:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        result, raised = None, ""
        try:
            result = function(*args)
        except Exception as error:
            raised = error_text(error)
        gpu_error = unusable()
        pipe.send((result, raised, gpu_error))


def unusable() -> str:
    """The error if the GPU takes no more work from this process, else an empty string."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return error_text(error)
    return ""
