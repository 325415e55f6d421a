"""Faults planted for a test: wrong CPU kernels, and trainings that are interrupted."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import pytest

from moe_kernels import train
from moe_kernels.backends import cpu
from moe_kernels.train.loop import Run


def plant(monkeypatch: pytest.MonkeyPatch, kernel: str, wrong: Callable[..., object]) -> None:
    """Replaces a CPU kernel: its calls become wrong(kernel, *arguments)."""
    monkeypatch.setattr(cpu, kernel, partial(wrong, getattr(cpu, kernel)))


def interrupt(args: argparse.Namespace, steps: int) -> None:
    """Runs `train`, with an interruption after so many steps of all its runs together."""
    right, taken = Run.take_step, []

    def stops(run: Run) -> object:
        taken.append(run)
        if len(taken) > steps:
            raise KeyboardInterrupt
        return right(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "take_step", stops)
        assert train.run(args) == 130


def interrupted(parse: Callable[[str], argparse.Namespace], steps: int) -> list[list]:
    """(loss, bits) of every evaluation of two runs: one whole, and one interrupted after so many steps and resumed."""
    found = []
    for name in ("whole", "broken"):
        args = parse(name)
        if name == "broken":
            interrupt(args, steps)
            args.resume = True
        assert train.run(args) == 0
        report = json.loads((args.out / "result.json").read_text())
        found.append([[(row["loss"], row["test bits"]) for row in run["rows"]] for run in report["runs"]])
    return found
