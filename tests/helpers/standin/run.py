"""`python -m bench` with the stand-in. Its processes import this module too, and so get the same stand-in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.helpers.standin import gpu, kernels

gpu.install()
kernels.install()

from torch.optim import adam

import bench.__main__ as command
from bench import captured, processes, registry, timing, verifying
from bench.entry import Entry, Shape
from moe_kernels import sizes
from tests.helpers import tape

LARGEST = {"T": 48, "D": 16, "H": 16, "P": 16, "E": 4, "K": 2, "R": 8, "N": 64, "B": 4, "n": 8}


def smaller(shape: Shape) -> Shape:
    return {name: min(value, LARGEST[name]) if name in LARGEST else value for name, value in shape.items()}


def small(entry: Entry) -> Entry:
    """The entry with one shape in each set, and two in the set "scaling", that a CPU computes in no time."""
    shapes: dict[str, list[Any]] = {name: [smaller(found[0])] for name, found in entry.shapes.items() if found}
    if "scaling" in shapes:
        shapes["scaling"].append(entry.shapes["scaling"][0])
    return replace(entry, shapes=shapes, complete=lambda shape, device: smaller(entry.complete(shape, device)))


registry.ENTRIES.update({op: small(entry) for op, entry in registry.ENTRIES.items()})
timing.ceilings = lambda device, dtypes: {"copy": 3000.0, "float32": 5e4, "bfloat16": 8e5}
captured.cuda_graph = tape.record
sizes.has_values = lambda x: False  # tensors on the CPU stand for those on a GPU
adam._get_capturable_supported_devices = lambda *given, **named: ["cpu"]
verifying.PROCESS_SECONDS, verifying.HUNG_SECONDS = 20.0, 10.0
processes.PRELOADED += ("bench.__main__",)  # which each process imports for this module

if __name__ == "__main__":
    begin = command.Run
    command.Run = lambda out, request, seconds, until: begin(out, request, 0.01, until)
    command.app()
