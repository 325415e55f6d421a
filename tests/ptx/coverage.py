"""For each kernel the places in its sources that were executed and those that never were, over all test processes.

A place is a source line. A line of an inlined function is one place for each call, and each kind of barrier or wait
(WAITS) on a line is a place of its own. Every kernel counts its own places; `lines` counts a source line once.
"""

from __future__ import annotations

import re
from typing import Any

from .decode import Kernel
from .session import Session

WAITS = re.compile(r"bar\.sync|bar\.red|barrier|bar\.warp|cp\.async\.wait|cp\.async\.commit|mbarrier|wgmma\.wait")

Data = dict[str, Any]


def family(title: str) -> str:
    """A kernel's name without its namespaces and template arguments."""
    return title.partition("<")[0].rsplit("::", 1)[-1]


def places(kernel: Kernel) -> list[str]:
    """For each instruction its place: the source line, of an inlined function also the line of the call, and for a
    barrier or wait also the opcode."""
    found, named = [], {}  # few of a kernel's thousands of instructions differ in line or opcode
    for pc, text in enumerate(kernel.texts):
        words = text.split(maxsplit=2)
        opcode = words[text.startswith("@")]
        key = kernel.sources[pc], opcode
        if key not in named:
            named[key] = kernel.source(pc) + (f" {opcode}" if WAITS.match(opcode) else "")
        found.append(named[key])
    return found


def gather(session: Session) -> Data:
    """The coverage of this process, in plain containers, which pytest-xdist can send. places: place -> (how many of
    its instructions ran, how many it has)."""
    kernels: Data = {}
    for ran in session.ran.values():
        name = f"{ran.backend} {family(ran.kernel.title)}"
        entry = kernels.setdefault(name, {"launches": 0, "specialisations": [], "places": {}})
        entry["launches"] += ran.launches
        entry["specialisations"].append(ran.kernel.key)
        for place, runs in zip(places(ran.kernel), ran.counters["runs"], strict=False):
            executed, all_of_them = entry["places"].get(place, (0, 0))
            entry["places"][place] = executed + bool(runs), all_of_them + 1
    return {"launches": session.launches, "steps": session.steps, "seconds": session.seconds, "kernels": kernels}


def merge(into: Data, other: Data) -> Data:
    for name in ("launches", "steps", "seconds"):
        into[name] = into.get(name, 0) + other[name]
    kernels = into.setdefault("kernels", {})
    for name, entry in other["kernels"].items():
        total = kernels.setdefault(name, {"launches": 0, "specialisations": [], "places": {}})
        total["launches"] += entry["launches"]
        total["specialisations"] = sorted({*total["specialisations"], *entry["specialisations"]})
        for place, (executed, all_of_them) in entry["places"].items():
            before = total["places"].get(place, (0, 0))
            total["places"][place] = before[0] + executed, before[1] + all_of_them
    return into


def missed(data: Data) -> dict[str, list[str]]:
    """By kernel, the places that no specialisation executed."""
    return {
        name: [place for place, (executed, _) in sorted(entry["places"].items()) if not executed]
        for name, entry in sorted(data["kernels"].items())
    }


def lines(data: Data) -> dict[str, bool]:
    """For each source line, whether any instruction of it was executed in any kernel."""
    found: dict[str, bool] = {}
    for entry in data["kernels"].values():
        for place, (executed, _) in entry["places"].items():
            line = place.split(" ")[0]
            if line != "no":  # "no source line"
                found[line] = found.get(line, False) or bool(executed)
    return found


def waits_missed(data: Data) -> list[str]:
    parts = [(name, place.rpartition(" ")) for name, places in missed(data).items() for place in places]
    return [f"{name}: {opcode} at {source}" for name, (source, _, opcode) in parts if WAITS.match(opcode)]


def never_launched(data: Data, known: list[str]) -> list[str]:
    return sorted(set(known) - set(data["kernels"]))


def report(data: Data) -> str:
    found = []
    for name, places_missed in missed(data).items():
        entry = data["kernels"][name]
        found.append(
            f"{name}: {entry['launches']} launches, {len(entry['specialisations'])} specialisations, "
            f"{len(places_missed)} of {len(entry['places'])} places never executed"
        )
        found += [f"    {place}" for place in places_missed]
    return "\n".join(found)
