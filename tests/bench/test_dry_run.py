"""Dry runs of `python -m bench gpu` with a stand-in for the GPU (tests/helpers/standin)."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from bench import ledger, merging
from bench.registry import ENTRIES
from moe_kernels.verify import OPERATIONS, dtype_name
from tests.helpers.standin.gpu import NAME

FAULTS = "topk_gate_fwd triton crash,sinkhorn_fwd cuda hang,kwta_fwd triton wrong,combine_fwd cuda late"
DTYPES = ("float32", "bfloat16", "float16")

# By kernel in bfloat16, what its entry must say.
NAMED = {
    ("topk_gate", "triton"): r"its process ended with status -6 in normal 2 x 7, k=1, .*: Fatal Python error: Aborted",
    ("sinkhorn", "cuda"): r"normal 3 x 3 x 3, R=3, tau=1 did not end within 10 s",
    ("kwta", "triton"): r"worst: y of .*, on the CPU too",
    ("combine", "cuda"): r"combine T=48 .* training, cuda: its process ended with status -6",
}
USES_COMBINE = ("dispatch", "expert_mlp", "expert_norms")  # in their gradients, on the backend where it crashes


def start(out: Path, *arguments: str, faults: str = "") -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "tests.helpers.standin.run",
        "gpu",
        "--minutes",
        "9",
        "--out",
        str(out),
        *arguments,
    ]
    environment = {**os.environ, "STANDIN_FAULTS": faults, "COLUMNS": "200"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ledger.ROOT, env=environment, **pipes)  # type: ignore[call-overload]


def written(out: Path) -> list[ledger.Result]:
    return [ledger.load(path) for path in sorted(out.glob("*.json"))]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> tuple[Path, str]:
    """The folder and the output of a run with all FAULTS."""
    out = tmp_path_factory.mktemp("faulty")
    with start(out, "--quick", faults=FAULTS) as run:
        printed, _ = run.communicate(timeout=280)
    assert run.returncode == 1, printed
    return out, printed


def test_each_fault_is_named_and_the_rest_goes_on(faulty: tuple[Path, str]) -> None:
    out, printed = faulty
    (result,) = written(out)
    entries = {(each["operation"], each["backend"], each["dtype"]): each for each in result["entries"]}
    kernels = {(op, backend) for op in OPERATIONS for backend in ("triton", "cuda")}
    assert {key for key in entries if key[2] != "float64"} == {(*kernel, name) for kernel in kernels for name in DTYPES}
    for kernel, said in NAMED.items():
        entry = entries[(*kernel, "bfloat16")]
        assert entry["verdict"] == "FAILED"
        assert re.search(said, entry["note"]), entry["note"]
        assert re.search(rf"FAILED .*{said}", printed)
    wrong = {key for key, entry in entries.items() if entry["verdict"] != "ok"}
    assert wrong - {(*kernel, "bfloat16") for kernel in NAMED} <= {(op, "cuda", "bfloat16") for op in USES_COMBINE}
    unmeasured = {key for key, entry in entries.items() if not entry["figures"]}
    assert unmeasured - wrong == {key for key in entries if key[2] not in measured_dtypes(key[0])} - wrong
    steps = {name: word for name, word in result["suite"].items() if name.startswith("captured step of ")}
    assert len(steps) == 16
    # A gate stays in float32, and experts of an MLP use neither kwta nor sinkhorn: here only combine's fault shows.
    if torch.version.cuda is None:  # a torch with CUDA asks the driver, which is not there, for more than is replaced
        assert {name for name, word in steps.items() if word != "ok"} == {name for name in steps if "cuda, bf" in name}
    assert all(figure["watts"] and figure["launch_us"] for entry in entries.values() for figure in entry["figures"])


def test_a_run_leaves_at_most_six_files_and_a_report_that_names_each_failure(faulty: tuple[Path, str]) -> None:
    out, _ = faulty
    (result,) = out.glob("stand-in-gpu-*.json")
    names = {"report.html", "report.md", result.name, result.with_suffix(".failures.log").name}
    assert {path.name for path in out.iterdir()} == names
    text = (out / "report.md").read_text()
    assert f"## {NAME}" in text
    for op, backend in NAMED:
        assert re.search(rf"\| {op} \| {backend} \| bfloat16 \| cuda \| .* \| FAILED", text)
    (log,) = out.glob("*.log")
    assert "==== sinkhorn cuda bfloat16, part" in log.read_text()
    assert "standin/kernels.py" in log.read_text()  # where the hanging process was


def measured_dtypes(op: str) -> set[str]:
    dtypes = {dtype_name(dtype) for dtype in ENTRIES[op].dtypes} if op in ENTRIES else set()
    return dtypes - {"float16"}  # which `bench gpu` does not measure


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_what_a_run_knew_when_it_was_cut_off_reads_back(tmp_path: Path, how: signal.Signals) -> None:
    enough = random.randrange(1, 40)  # verdicts; a run has 80, and measures for some seconds after the last
    with start(tmp_path, "--quick") as run:
        while run.poll() is None and sum(len(result["entries"]) for result in written_so_far(tmp_path)) < enough:
            time.sleep(0.05)
        time.sleep(random.random())
        run.send_signal(how)
        printed, _ = run.communicate(timeout=150)  # the report's pictures take half a minute, on a busy machine more
    if run.returncode == 0:
        pytest.skip("the run had ended before the signal came: a busy machine writes results late")
    assert run.returncode == (-how if how == signal.SIGKILL else 130), printed
    (result,) = written(tmp_path)
    assert len(result["entries"]) >= enough
    assert {entry["verdict"] for entry in result["entries"]} == {"ok"}
    assert (tmp_path / "report.html").exists() == (how == signal.SIGINT)


def written_so_far(out: Path) -> list[ledger.Result]:
    """As `written`, while a run may be about to write its first result."""
    return [ledger.load(path) for path in out.glob("*.json") if path.stat().st_size]


def test_a_later_run_keeps_the_earlier_one_and_the_report_has_both(tmp_path: Path) -> None:
    for arguments in (("--op", "kwta", "--backend", "cuda", "--no-figures"), ("--op", "kwta,dispatch", "--quick")):
        with start(tmp_path, "--no-proof", *arguments) as run:
            printed, _ = run.communicate(timeout=280)
        assert run.returncode == 0, printed
    first, _ = sorted(written(tmp_path), key=ledger.time_of)
    assert {entry["operation"] for entry in first["entries"]} == {"kwta"}
    assert not any(entry["figures"] for entry in first["entries"])
    (both,) = merging.read(tmp_path)
    entries = {(each["operation"], each["backend"], each["dtype"]): each for each in both["entries"]}
    assert len(entries) == 12
    kwta = entries["kwta", "cuda", "float32"]
    assert kwta["checks"]["repeatable"] == kwta["checks"]["no host sync"] == "ok"  # of the first run; --quick has none
    assert kwta["figures"]  # of the second
    assert "repeatable: ok" in (tmp_path / "report.md").read_text()
