"""All fuzzed operations, and the drawing of a random case."""

from __future__ import annotations

import random

from tests.fuzz import experts, routing, rows
from tests.fuzz.values import Spec

OPERATIONS = rows.OPERATIONS | routing.OPERATIONS | experts.OPERATIONS


def drawn(draw: random.Random, names: list[str], backends: list[str]) -> Spec:
    """A random spec of one of the operations `names`, on one of the `backends`, such as "cpu avx2" or "triton"."""
    name = draw.choices(names, [OPERATIONS[each].weight for each in names])[0]
    operation = OPERATIONS[name]
    spec = {"op": name, "on": draw.choice(backends), "dtype": draw.choice(operation.dtypes)}
    return spec | {"seed": draw.getrandbits(31)} | operation.draw(draw)
