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

# Before the fork, so that ranks need not import them.
import scipy.optimize  # noqa: F401
import torch
import torch._functorch.aot_autograd
import torch.distributed as dist

from tests.ranks import command, exact, layers, refusals, traffic, training, wrapped

LIMIT = 200  # seconds for a check; a collective waits half of it
MODULES = {
    each.__name__.rpartition(".")[2]: each for each in (command, exact, layers, refusals, traffic, training, wrapped)
}
FORK = multiprocessing.get_context("fork")


class Group:
    """n ranks. They take one check after another until one of them fails.

    distributed: False where each check makes its own process group, as under torchrun.
    """

    def __init__(self, size: int, distributed: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        store = Path(self.folder.name) / "store" if distributed else None
        self.pipes, self.processes = [], []
        for rank in range(size):
            pipe, end = FORK.Pipe()
            process = FORK.Process(target=_serve, args=(end, rank, size, store), daemon=True)
            process.start()
            end.close()  # a rank that ends then closes its pipe
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, module: str, check: str, words: list[str]) -> dict[int, str]:
        """The errors by rank."""
        for pipe in self.pipes:
            pipe.send((module, check, words))
        rank_of = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        errors, until = dict.fromkeys(rank_of.values(), "ended without an error, or too late"), time.monotonic() + LIMIT
        while rank_of and (ready := wait(list(rank_of), max(0, until - time.monotonic()))):
            for pipe in ready:
                rank = rank_of.pop(pipe)  # type: ignore[call-overload]
                try:
                    errors[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    continue
        return {rank: error for rank, error in errors.items() if error}

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, store: Path | None) -> None:
    """One rank. It ends after an error, so that the others do not wait for it."""
    if store is None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    error = ""
    while not error:
        module, check, words = pipe.recv()
        try:
            if store is not None and not dist.is_initialized():
                limit = datetime.timedelta(seconds=LIMIT / 2)
                dist.init_process_group(
                    "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=limit
                )
            torch.manual_seed(0)
            getattr(MODULES[module], check)(*words)
            if store is not None:
                dist.barrier()
        except BaseException:
            error = traceback.format_exc()
        pipe.send(error)


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that was not written reads as NaN
    gc.freeze()  # the collector would write to the memory that ranks share
    groups: dict[int, Group] = {}
    for line in sys.stdin:
        module, check, ranks, *words = line.split()
        distributed = not getattr(MODULES[module], "STARTS_ITSELF", False)
        group = groups.pop(int(ranks), None) if distributed else None
        group = group or Group(int(ranks), distributed)
        errors = group.run(module, check, words)
        if distributed and not errors:
            groups[int(ranks)] = group
        else:
            group.end()
        print(json.dumps(errors), flush=True)
    for group in groups.values():
        group.end()
    os._exit(0)  # without the messages of libraries at exit


main()
