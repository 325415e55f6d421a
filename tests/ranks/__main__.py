from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import moe_kernels.nn.parallel  # noqa: F401 before the fork, so that ranks start at once

LIMIT = 200  # seconds for a check; a collective waits half of it


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that was not written reads as NaN
    for line in sys.stdin:
        module, check, ranks, *words = line.split()
        imported = importlib.import_module(f"tests.ranks.{module}")
        with tempfile.TemporaryDirectory() as folder:
            children = {
                _fork(imported, check, words, rank, int(ranks), Path(folder)): rank for rank in range(int(ranks))
            }
            _wait(children, time.monotonic() + LIMIT)
            errors = {path.name: path.read_text() for path in sorted(Path(folder).glob("[0-9]*"))}
        print(json.dumps(errors), flush=True)


def _fork(module: object, check: str, words: list[str], rank: int, ranks: int, folder: Path) -> int:
    """The process of one rank. An error goes to the file folder/rank."""
    child = os.fork()
    if child:
        return child
    error = folder / str(rank)
    error.write_text("ended without an error")
    try:
        torch.manual_seed(0)
        if getattr(module, "STARTS_ITSELF", False):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        else:
            store, limit = dist.FileStore(str(folder / "store"), ranks), datetime.timedelta(seconds=LIMIT / 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        getattr(module, check)(*words)
        if dist.is_initialized():
            dist.barrier()
        error.unlink()
    except BaseException:
        error.write_text(traceback.format_exc())
    os._exit(0)


def _wait(children: dict[int, int], until: float) -> None:
    """Waits until all have ended; kills those that are too late."""
    while children:
        child, _ = os.waitpid(-1, os.WNOHANG)
        children.pop(child, None)
        if not child:
            time.sleep(0.005)
        if time.monotonic() > until:
            for each in children:
                os.kill(each, 9)
            until = float("inf")


main()
