"""Runs the command `moe_kernels train` or a tutorial on several ranks, as under torchrun. `port` is a free TCP port."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch

from moe_kernels.__main__ import main
from moe_kernels.papers import sources, train
from moe_kernels.papers.data import load
from moe_kernels.papers.train import checkpoint, lock, ranks
from tests.helpers.small_sets import images, ratings

OWN_PROCESS_GROUP = True
SMALL = {
    "competesmoe": "--dim 16 --hidden 12 --depth 2 --heads 2 --length 12 --experts 4 --batch-size 6 --rate 0.5",
    "vmoe": "--dim 16 --depth 2 --moe-layers 1 --heads 2 --hidden 12 --experts 4 --data corners --batch-size 16",
    "movielens": "--experts 4 --search-epochs 1 --dropout 0.1 --data tastes --batch-size 15",
}
SMALL_SETS = {"corners": images, "tastes": ratings}

# Runs with these options differ only by rounding between one process and several ranks.
PLAIN = ["--sides", "compete", "--depth", "1", "--steps", "6", "--every", "2", "--model-dropout", "0"]


def before_fork() -> None:
    """Reads the sources of the recipes, of which a run stores a hash: .25 s in every rank otherwise."""
    for recipe in SMALL:
        sources.digest("recipes", recipe)


def _command(port: str, recipe: str, *words: Any) -> tuple[int, str, str]:
    """Runs the command; returns its exit status, its output and its error messages on this rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    train.load = lambda name: SMALL_SETS[name]() if name in SMALL_SETS else load(name)
    train.picture = lambda *given: False
    out, errors = io.StringIO(), io.StringIO()
    common = ["--device", "cpu", "--threads", "1", "--check-steps", "2"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(["train", recipe, *common, *SMALL[recipe].split(), *map(str, words)])
    return status, out.getvalue(), errors.getvalue()


def agrees(port: str, recipe: str, *words: str) -> None:
    """The steps of the ranks together agree with those of one process on backend "reference"; only rank 0 prints."""
    status, out, errors = _command(port, recipe, "--steps", 2, "--expert-parallel", os.environ["WORLD_SIZE"], *words)
    assert status == 0, errors + out
    if os.environ["RANK"] != "0":
        assert out == ""
        return
    assert out.count("ranks with the reference: passed, 2 steps") == len(words[words.index("--sides") + 1 :]), out


def stops(port: str, out: str, data: str) -> None:
    """If rank 0 raises at step 3, rank 1 ends with a message that contains the path of rank 0's checkpoint."""
    rank = os.environ["RANK"]
    if rank == "0":
        original = ranks.ParallelRun.differentiate

        def differentiate(run: Any, batch: Any) -> Any:
            if run.step == 3:
                raise InterruptedError
            return original(run, batch)

        ranks.ParallelRun.differentiate = differentiate
    words = ["--data", data, "--out", out, *["--expert-parallel", "2", "--check-steps", "0", "--rank-timeout", "20"]]
    status, _, errors = _command(port, "competesmoe", *words, *PLAIN)
    if rank == "0":
        assert status == 2  # InterruptedError is an OSError
        return
    assert status == 3
    assert "train: rank 1: another rank failed or did not answer in time" in errors
    assert f"--resume continues from {out}/checkpoint.pt" in errors


def whole(port: str, out: str, data: str) -> None:
    status, _, errors = _command(port, "competesmoe", "--data", data, "--out", out, "--check-steps", 0, *PLAIN)
    assert status == 0, errors


def goes_on(port: str, out: str, data: str, whole: str) -> None:
    """Resumes from the checkpoint of 2 ranks in `out`; the figures agree with those of one process in `whole`."""
    size = os.environ["WORLD_SIZE"]
    resumed = ["--out", out, "--resume", *(("--expert-parallel", size) if size != "1" else ())]
    status, _, errors = _command(port, "competesmoe", "--data", data, "--check-steps", 0, *PLAIN, *resumed)
    assert status == 0, errors
    if os.environ["RANK"] != "0":
        return
    found, expected = (json.loads((Path(each) / "result.json").read_text()) for each in (out, whole))
    for a, b in zip(found["runs"][0]["rows"], expected["runs"][0]["rows"], strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"seconds", "competition time"}:
            if isinstance(a[name], float):
                assert abs(a[name] - b[name]) <= 1e-5 * max(1, abs(b[name])), (name, a, b)
    flops, least = (each["runs"][0]["flops"] for each in (found, expected))
    # On several ranks an expert's owner calls combine once more (nn/parallel.py); its FLOPs count too.
    assert least <= flops <= 1.01 * least, (flops, least)
    torch.load(Path(out) / "model-compete-0.pt", weights_only=True)


def hangs(port: str, data: str, ended: str) -> None:
    """Rank 1 hangs until rank 0 has ended by its time limit of 2 s; then rank 1 ends too, both with status 3."""
    started = time.monotonic()

    def wait(*given: Any) -> None:
        while not Path(ended).exists() and time.monotonic() - started < 60:
            time.sleep(0.05)

    if os.environ["RANK"] == "1":
        ranks.average_gradients = wait
    words = ["--data", data, *["--expert-parallel", "2", "--check-steps", "0", "--rank-timeout", "2"], *PLAIN]
    status, _, errors = _command(port, "competesmoe", *words)
    assert status == 3
    if os.environ["RANK"] == "0":
        assert "did not answer in time" in errors
        assert time.monotonic() - started < 60
        Path(ended).touch()


def full_disk(port: str, out: str, data: str) -> None:
    """Rank 0's disk fills up with its second checkpoint: both ranks end with status 2, and the first one remains."""
    rank, make, made = os.environ["RANK"], checkpoint._temporary, []

    def temporary(path: Path) -> tuple[int, Path]:
        number, part = make(path)
        made.append(path.name)
        if made.count("checkpoint.pt") < 2:
            return number, part
        os.close(number)
        return os.open("/dev/full", os.O_WRONLY), part

    checkpoint._temporary = temporary
    started = time.monotonic()
    words = ["--data", data, "--out", out, "--expert-parallel", 2, "--check-steps", 0, "--rank-timeout", 60, *PLAIN]
    status, _, errors = _command(port, "competesmoe", *words)
    assert status == 2, errors
    assert time.monotonic() - started < 50
    failed = "" if rank == "0" else "rank 0 failed: "
    assert errors.endswith(f"train: rank {rank}: {failed}[Errno 28] No space left on device: '{out}/checkpoint.pt'\n")
    assert made == (["checkpoint.pt", "log.csv", "checkpoint.pt"] if rank == "0" else [])
    if rank == "0":
        assert sorted(each.name for each in Path(out).iterdir()) == ["checkpoint.pt", "log.csv"]
        (live,) = torch.load(f"{out}/checkpoint.pt", weights_only=True)["live"].values()
        assert live["step"] == 2


def locked(port: str, out: str, data: str) -> None:
    """Another run holds the lock of the folder: both ranks end with status 2, and nothing is written."""
    rank = os.environ["RANK"]
    words = ["--data", data, "--out", out, "--expert-parallel", 2, "--rank-timeout", 60, *PLAIN]
    with lock.hold(Path(out)) if rank == "0" else contextlib.nullcontext():
        status, printed, errors = _command(port, "competesmoe", *words)
        assert status == 2, errors
        assert printed == ""
        failed = "" if rank == "0" else "rank 0 failed: "
        assert f"train: rank {rank}: {failed}another run is writing to {out}: process " in errors
        if rank == "0":
            assert [each.name for each in Path(out).iterdir()] == ["train.lock"]


def missing(port: str, data: str) -> None:
    if os.environ["RANK"] == "1":
        return
    words = ["--data", data, *["--expert-parallel", "2", "--rank-timeout", "2"], *PLAIN]
    status, _, errors = _command(port, "competesmoe", *words)
    assert status == 3
    assert "train: rank 0: another rank failed or did not answer in time" in errors


def refused(port: str, data: str) -> None:
    words = ["--data", data, *PLAIN]
    status, _, errors = _command(port, "competesmoe", *words, "--expert-parallel", 3)
    assert status == 2
    assert "--expert-parallel must divide the number of ranks, 2; got 3" in errors
    status, _, errors = _command(port, "competesmoe", *words, "--expert-parallel", 2, "--experts", 5)
    assert status == 2
    assert "ExpertParallel: 2 ranks must divide the experts, got 5" in errors
    status, _, errors = _command(port, "competesmoe", *words)
    assert status == 2
    assert "add --expert-parallel N" in errors
    del os.environ["RANK"]
    status, _, errors = _command(port, "competesmoe", *words, "--expert-parallel", 2)
    assert status == 2
    assert "--expert-parallel needs torchrun" in errors


def tutorial(port: str, page: str, folder: str) -> None:
    """Runs the Python code of a tutorial (the file `page`) as under torchrun; only rank 0 prints its three losses."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.chdir(folder)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", Path(page).read_text(), re.MULTILINE | re.DOTALL))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, page, "exec"), {"__name__": "__main__"})
    assert (out.getvalue().count("loss") == 3) == (os.environ["RANK"] == "0")
