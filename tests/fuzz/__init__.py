"""The fuzzer: random calls of the operations, compared with the definitions.

Each call runs with one of this machine's CPU instruction sets or, with --interpreted F, for a fraction F of the calls,
in Triton's interpreter.

    python -m tests.fuzz --minutes 10 --processes 2
    python -m tests.fuzz --operators --processes 2           calls the operators with wrong arguments (operators.py)
    python -m tests.fuzz --case '{"op": "kwta", ...}'        repeats one case; every failure prints such a command

A case is a `Spec`: a dict of plain values that determines the call and its tensors. operations.py draws a random spec,
values.py makes the tensors, check.py runs the case, compares the outputs and minimises failing specs.
"""

from __future__ import annotations

import json
from typing import Any


def command(spec: dict[str, Any]) -> str:
    """The shell command that repeats a case."""
    interpreted = "TRITON_INTERPRET=1 " if spec.get("on") == "triton" else ""
    return f"{interpreted}python -m tests.fuzz --case '{json.dumps(spec)}'"
