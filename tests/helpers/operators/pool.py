"""Runs functions in forked processes. If a function crashes or does not return, the next process goes on after it."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import resource
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

Task = Callable[[], "str | None"]

PATIENCE = 10.0  # how many times its processor time a task may take on a machine with other work
# Modules that a task may import; loaded before a fork, they are not loaded in each process.
LAZY = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "scipy.optimize", "moe_kernels.backends.triton")
START = 60.0  # seconds that a process may take before its first task
ROOM = 4 * 2**30  # bytes that a process may add to its address space


@dataclass
class _Process:
    """A process that runs `tasks`, those numbers in it that are left, and what it wrote last."""

    left: list[int]
    process: int = 0
    pipe: int = -1
    current: int | None = None
    since: float = 0.0
    used: float = 0.0  # processor time before the current task
    unread: bytes = b""
    found: dict[int, str | None] = field(default_factory=dict)

    def start(self, tasks: Sequence[Task]) -> None:
        self.pipe, write = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            status = 1
            try:
                os.close(self.pipe)
                _work(tasks, self.left, write)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        self.current, self.since, self.unread = None, time.monotonic(), b""

    def read(self) -> bool:
        """Takes in what the process wrote; False if it has ended."""
        data = os.read(self.pipe, 1 << 16)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            number, self.used, *found = json.loads(line)
            self.since = time.monotonic()
            if found:
                self.found[number], self.current = found[0], None
                self.left.remove(number)
            else:
                self.current = number
        return bool(data)

    def stalled(self, seconds: float) -> bool:
        """Whether the current task took `seconds` of processor time, or far more of real time."""
        waited = time.monotonic() - self.since
        if self.current is None:
            return waited > START
        return waited > seconds and (waited > PATIENCE * seconds or _used(self.process) - self.used > seconds)

    def end(self, stalled: bool, seconds: float) -> None:
        """Collects an ended or stalled process. Its current task, if any, gets the outcome."""
        if stalled:
            os.kill(self.process, signal.SIGKILL)
        os.close(self.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        if self.current is None and self.left:
            raise RuntimeError(f"a process of the pool ended between two tasks, with status {status}")
        if self.current is not None:
            ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            self.found[self.current] = f"no return within {seconds:g} s" if stalled else f"crash: {ended}"
            self.left.remove(self.current)


def run(tasks: Sequence[Task], seconds: float = 10.0, processes: int = 1) -> list[str | None]:
    """What each task returned. "crash: ..." if its process ended, "no return ..." after `seconds` of processor time."""
    for name in LAZY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    found: dict[int, str | None] = {}
    with selectors.DefaultSelector() as ready:

        def start(process: _Process) -> None:
            process.start(tasks)
            ready.register(process.pipe, selectors.EVENT_READ, process)

        for rank in range(min(processes, len(tasks))):
            start(_Process(list(range(rank, len(tasks), processes))))
        while ready.get_map():
            events = {key.data.process for key, _ in ready.select(0.2)}
            for process in [key.data for key in ready.get_map().values()]:
                alive = process.read() if process.process in events else True
                stalled = alive and process.stalled(seconds)
                if alive and not stalled:
                    continue
                ready.unregister(process.pipe)
                process.end(stalled, seconds)
                if process.left:
                    start(process)
                else:
                    found |= process.found
    return [found[number] for number in range(len(tasks))]


def _used(process: int) -> float:
    """Seconds of processor time that a process has used."""
    *_, user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _work(tasks: Sequence[Task], numbers: Sequence[int], write: int) -> None:
    """Runs tasks in this process. Before a task it writes the task's number and the processor time used so far; after
    it these two and the outcome."""
    faulthandler.disable()
    for name in (signal.SIGALRM, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with contextlib.suppress(ValueError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.set_num_threads(1)  # the threads of the process that forked are not in this one
    for number in list(numbers):
        os.write(write, json.dumps([number, time.process_time()]).encode() + b"\n")
        try:
            found = tasks[number]()
        except BaseException as error:
            found = f"the test itself raised {type(error).__name__}: {error}"
        os.write(write, json.dumps([number, time.process_time(), found]).encode() + b"\n")
