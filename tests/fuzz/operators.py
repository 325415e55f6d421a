"""python -m tests.fuzz --operators: calls of the registered operators with wrong arguments (tests/helpers/operators).

Half of the calls are honest calls with one changed argument, until all changes were made for every dtype, instruction
set and form of a product, in an order drawn from the seed. The others have two changed arguments. Every call runs in a
process that may crash.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
import time
from collections import Counter

from moe_kernels.backends import cpu
from tests.helpers.operators import pool
from tests.helpers.operators.cases import OPERATORS, Case, cases, pair

DTYPES = ("float32", "bfloat16", "float16", "float64")
BATCH = 2000


def run(minutes: float, processes: int, seed: int, most: int, only: list[str]) -> int:
    """Runs for `minutes`, but at most until `most` faults are found. Returns the exit status."""
    draw, end = random.Random(seed), time.monotonic() + 60 * minutes
    names = only or sorted(OPERATORS)
    waiting = [each for name in names for dtype in DTYPES for form in forms(name) for each in cases(name, dtype, form)]
    draw.shuffle(waiting)
    every, ran, faults = len(waiting), Counter[str](), 0
    while time.monotonic() < end and faults < most:
        batch, waiting = waiting[: BATCH // 2], waiting[BATCH // 2 :]
        batch += [two(draw, names) for _ in range(BATCH - len(batch))]
        found = pool.run([each.fault for each in batch], processes=processes)
        ran.update(each.operator for each in batch)
        for case, fault in zip(batch, found, strict=True):
            if fault is not None and faults < most:
                faults += 1
                print(f"{case}: {fault}\n  {command(case)}", flush=True)
    print(f"{ran.total()} calls of operators, {faults} faults; {every - len(waiting)} of {every} single changes")
    return 1 if faults else 0


def forms(name: str) -> tuple[str, ...]:
    """The forms in which an operator computes (see Case)."""
    return (*cpu.module.isas, "torch") if OPERATORS[name].reordered else cpu.module.isas


def two(draw: random.Random, names: list[str]) -> Case:
    name = draw.choice(names)
    return pair(draw, name, draw.choice(DTYPES), draw.choice(forms(name)))


def command(case: Case) -> str:
    return f"python -m tests.fuzz --case {shlex.quote(json.dumps(dataclasses.asdict(case)))}"


def repeat(spec: dict) -> str | None:
    """The fault of a case, in a process that may crash."""
    return pool.run([case_of(spec).fault])[0]


def case_of(spec: dict) -> Case:
    """The case of the JSON object in a command."""
    return Case(**spec | {"changes": tuple(map(tuple, spec["changes"]))})
