"""Columns of routing in tables of sides that count experts, neurons or nothing."""

import math

from moe_kernels.papers.train import report

COUNTED = {"least load": 0.25, "most load": 0.5}


def costs(*sides):
    """The header and the lines of the last table; sides: name, unit, number used or None."""
    found = []
    for name, unit, used in sides:
        routing = {} if used is None else {unit: used, **COUNTED, f"dead {unit}": 1.0}
        found.append(report.Summary(name, 0.1, (1, 0), (1, 0), (1, 0), 0.5, 2e6, routing, math.nan, unit, parameters=7))
    lines = report.tables(found, "accuracy", 16).split("\n\n")[-1].splitlines()
    return [" ".join(line.split()) for line in lines if not set(line) <= set("- ")]


def test_sides_that_count_one_unit_have_it_in_the_header():
    for unit in ("experts", "neurons"):
        assert costs(("a", unit, 3.0), ("b", "experts", None)) == [
            f"side {unit} least load most load dead {unit} entropy parameters MFLOPs/sample",
            "a 3 0.25 0.5 1 - 7 2.000",
            "b - - - - - 7 2.000",
        ]


def test_sides_that_count_several_units_have_them_at_the_numbers():
    assert costs(("a", "experts", 3.0), ("b", "neurons", 24.0), ("c", "experts", None)) == [
        "side used least load most load dead entropy parameters MFLOPs/sample",
        "a 3 experts 0.25 0.5 1 experts - 7 2.000",
        "b 24 neurons 0.25 0.5 1 neurons - 7 2.000",
        "c - - - - - 7 2.000",
    ]
