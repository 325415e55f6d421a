"""Faults for tests: wrong CPU kernels, and interrupted training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import pytest

from moe_kernels.backends import cpu
from moe_kernels.papers import train
from moe_kernels.papers.train.loop import Run


def plant(monkeypatch: pytest.MonkeyPatch, kernel: str, wrong: Callable[..., object]) -> None:
    """Replaces a CPU kernel: its calls become wrong(original, *arguments)."""
    monkeypatch.setattr(cpu, kernel, partial(wrong, getattr(cpu, kernel)))


def interrupt(args: argparse.Namespace, steps: int) -> None:
    """Runs `train` and interrupts it after `steps` steps, counted over all networks that it trains."""
    take_step, steps_taken = Run.take_step, []

    def take_or_stop(run: Run) -> object:
        steps_taken.append(run)
        if len(steps_taken) > steps:
            raise KeyboardInterrupt
        return take_step(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "take_step", take_or_stop)
        assert train.run(args) == 130  # the status after Ctrl-C


def interrupted(parse: Callable[[str], argparse.Namespace], steps: int) -> list[list]:
    """Runs `train` twice: once to the end, and once interrupted after `steps` steps, then resumed.

    parse: makes the arguments of `train` from the name of the output folder. Returns, for each of the two trainings and
    each of its networks, a list of (loss, test bits) of the evaluations.
    """
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
