from __future__ import annotations

import datetime
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

# Modules that only some checks need are imported before the ranks are forked, and so once and not by every rank.
import scipy.optimize  # noqa: F401
import torch
import torch._functorch.aot_autograd
import torch.distributed as dist

from tests.helpers.ranks import bias, command, exact, layers, refusals, traffic, training, wrapped

LIMIT = 200  # seconds for a check
MODULES = {
    each.__name__.rpartition(".")[2]: each
    for each in (bias, command, exact, layers, refusals, traffic, training, wrapped)
}
FORK = multiprocessing.get_context("fork")


class Group:
    """`size` ranks, which run checks.

    distributed: if True, the ranks share a process group and run checks one after another until a check fails. Else
    they run one check, which makes the process group itself from RANK and WORLD_SIZE, as a program under torchrun does.
    """

    def __init__(self, size: int, distributed: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        store = Path(self.folder.name) / "store" if distributed else None
        self.pipes, self.processes = [], []
        for rank in range(size):
            pipe, end = FORK.Pipe()
            process = FORK.Process(target=_serve, args=(end, rank, size, store), daemon=True)
            process.start()
            end.close()  # so that the pipe closes when the rank ends
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, module: str, check: str, arguments: list[str]) -> dict[int, str]:
        for pipe in self.pipes:
            pipe.send((module, check, arguments))
        rank_of = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        errors = dict.fromkeys(rank_of.values(), f"gave no result within {LIMIT} s")
        until = time.monotonic() + LIMIT
        while rank_of and (ready := wait(list(rank_of), max(0, until - time.monotonic()))):
            for pipe in ready:
                rank = rank_of.pop(pipe)  # type: ignore[call-overload]
                try:
                    errors[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    errors[rank] = "ended without a result"
        return {rank: error for rank, error in errors.items() if error}

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, store: Path | None) -> None:
    """Runs checks as one rank until a check fails. Then the process ends, so that the other ranks' collectives fail."""
    if store is None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    error = ""
    while not error:
        module, check, arguments = pipe.recv()
        try:
            if store is not None and not dist.is_initialized():
                limit = datetime.timedelta(seconds=LIMIT / 2)
                dist.init_process_group(
                    "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=limit
                )
            torch.manual_seed(0)
            getattr(MODULES[module], check)(*arguments)
            if store is not None:
                dist.barrier()
        except BaseException:
            error = traceback.format_exc()
        pipe.send(error)


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then fills tensors with NaN
    gc.freeze()  # garbage collection would write to pages that the ranks share, and so copy them
    groups: dict[int, Group] = {}
    for line in sys.stdin:
        module, check, ranks, *arguments = line.split()
        distributed = not getattr(MODULES[module], "OWN_PROCESS_GROUP", False)
        if not distributed:
            MODULES[module].before_fork()
        group = groups.pop(int(ranks), None) if distributed else None
        group = group or Group(int(ranks), distributed)
        errors = group.run(module, check, arguments)
        if distributed and not errors:
            groups[int(ranks)] = group
        else:
            group.end()
        print(json.dumps(errors), flush=True)
    for group in groups.values():
        group.end()
    os._exit(0)  # libraries would print messages at a normal exit


main()
