"""The numbers on which the bench measures and counts operations, at small shapes."""

from __future__ import annotations

import torch

from bench import counting, registry
from bench.entry import Shape, label
from tests.helpers.stored import input_line

LARGEST = {"T": 6, "D": 8, "H": 8, "P": 8, "E": 16, "K": 4, "R": 3, "N": 40, "B": 2, "n": 3}


def smaller(shape: Shape) -> Shape:
    return {name: min(value, LARGEST[name]) if name in LARGEST else value for name, value in shape.items()}


def test_inputs_of_every_entry(stored) -> None:
    found = [(op, entry, entry.complete(entry.shapes["quick"][0], "cpu")) for op, entry in registry.ENTRIES.items()]
    found += [(f"counted {case.operation}", case.entry, case.shape) for case in counting.cases()]
    lines = []
    for op, entry, full in found:
        shape = smaller(full)
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            inputs = entry.inputs(shape, dtype, "cpu")
            trained = [name for name in inputs if getattr(inputs[name], "requires_grad", False)]
            shown = " ".join(input_line(*each) for each in inputs.items())
            lines.append(f"{op} {label(shape)}, for {' '.join(trained)}: {shown}")
    stored("bench_inputs", "\n".join(dict.fromkeys(lines)), tolerance=2e-3)
