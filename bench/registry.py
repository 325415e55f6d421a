"""All benchmarks: an Entry for each measured operation, with shapes, inputs, calls, least bytes and peers."""

from __future__ import annotations

from bench import experts, kwta, routing, sinkhorn, tree_gate
from bench.entry import Calls, Entry, Inputs, Shape, label

__all__ = ["ENTRIES", "Calls", "Entry", "Inputs", "Shape", "label"]

ENTRIES: dict[str, Entry] = {
    **kwta.ENTRIES,
    **routing.ENTRIES,
    **experts.ENTRIES,
    **sinkhorn.ENTRIES,
    **tree_gate.ENTRIES,
}
