"""Results as Markdown tables, for the README, the documentation and the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import ledger
from bench.tables import markdown, microseconds
from moe_kernels.backends import ALIASES, FILES, KERNELS, NAMES, missing

README = ledger.ROOT / "README.md"

UNSTEADY = 2.0  # a figure is marked if its 90th percentile is over twice the 10th
DIRECTIONS = "forward", "training"
COLUMNS = tuple((dtype, direction) for dtype in ("float32", "bfloat16") for direction in DIRECTIONS)
GPU_COLUMNS = {"us": "us", "gb_per_s": "GB/s", "ceiling_percent": "% of ceiling"}


def operations(results: list[ledger.Result], root: Path = ledger.ROOT) -> str:
    """`operation_rows` as a Markdown table."""
    return markdown(OPERATIONS, operation_rows(results, root))


OPERATIONS = ("operation", *NAMES)


def operation_rows(results: list[ledger.Result], root: Path = ledger.ROOT) -> list[Sequence[str]]:
    """A row for each operation: the state of each backend, and how many times as fast as PyTorch it is."""
    return [
        (
            f"`{op}`",
            *(state + _ratios(op, each, results, root) + lacking(op, each) for each, state in by_backend.items()),
        )
        for op, by_backend in ledger.states(results, root).items()
    ]


def lacking(op: str, backend: str) -> str:
    """Such as "; no `plan_priority`": the operations of the row `op` that this backend does not implement but another
    one does. A backend that is not installed is taken to have them."""

    def has(backend: str, name: str) -> bool:
        return missing(backend, name) != f"{backend} does not implement {name}"

    names = [name for name, file in FILES.items() if file == op and not has(backend, name)]
    found = [f"`{name}`" for name in names if any(missing(other, name) is None for other in KERNELS)]
    return f"; no {', '.join(found)}" if found else ""


def _ratios(op: str, backend: str, results: list[ledger.Result], root: Path) -> str:
    """Such as ": forward x 1.2 to 3, training x 2": `against_torch` in the newest result that has this kernel."""
    key = ALIASES.get(op, op), backend
    for result in sorted(results, key=lambda each: each["date"], reverse=True):
        entries = [each for each in result["entries"] if (each["operation"], each["backend"]) == key]
        figures = [figure for each in entries if not ledger.is_stale(each, root) for figure in _first_setting(each)]
        ranges = {name: against_torch([each for each in figures if each["direction"] == name]) for name in DIRECTIONS}
        words = [f"{name} x {found}" for name, found in ranges.items() if found]
        if entries:
            return ": " + ", ".join(words) if words else ""
    return ""


def _first_setting(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures in the setting of the first one: on a GPU all, on a CPU those with the first number of threads."""
    return [each for each in entry["figures"] if each["setting"] == entry["figures"][0]["setting"]]


def measured(results: list[ledger.Result], root: Path = ledger.ROOT) -> str:
    """The parts of `measured_tables` as Markdown."""
    parts = []
    for device, title, rows, note in measured_tables(results, root):
        parts += [f"**{device}**{title}", *[markdown(MEASURED, rows)] * bool(rows), *[note] * bool(note)]
    return "\n\n".join(parts) or NOTHING


MEASURED = ("operation", "backend", *(" ".join(column) for column in COLUMNS))
NOTHING = "Nothing measured yet."


def measured_tables(
    results: list[ledger.Result], root: Path = ledger.ROOT
) -> Iterator[tuple[str, str, list[Sequence[str]], str]]:
    """For each device its name, the rest of a title, rows under MEASURED, and a line on what is stale or "".

    A cell has the range of `against_torch` over the shapes and, on a GPU, of the percentage of the ceiling. On a CPU
    only figures with the first measured number of threads are shown.
    """
    for result in results:
        if not any(entry["figures"] for entry in result["entries"]):
            continue
        note = "" if result["gpu"] else " No GPU was there; ratios only."
        fresh = [entry for entry in result["entries"] if not ledger.is_stale(entry, root)]
        stale = ledger.stale(result, root)
        missing = f"Not shown, as sources changed since: {', '.join(stale)}." if stale else ""
        title = f", {result['date']}: times as fast as PyTorch.{note}"
        yield result["device"], title, _device_rows(fresh), missing


def _device_rows(entries: list[dict[str, Any]]) -> list[Sequence[str]]:
    rows: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for entry in entries:
        for column in COLUMNS:
            found = [each for each in _first_setting(entry) if (entry["dtype"], each["direction"]) == column]
            cell = against_torch(found)
            if cell and found[0]["setting"] == "cuda":
                cell += f", {span([each['ceiling_percent'] for each in found])} %"
            if cell:
                rows.setdefault((f"`{entry['operation']}`", entry["backend"]), {})[column] = cell
    return [(*key, *(cells.get(column, "-") for column in COLUMNS)) for key, cells in rows.items()]


def against_torch(figures: list[dict[str, Any]]) -> str:
    """How many times as fast as the fastest peer whose name begins with "torch"; a range over the figures.

    Empty if no figure has such a peer.
    """
    torch_ratios = [[ratio for name, ratio in each["peers"].items() if name.startswith("torch")] for each in figures]
    ratios = [min(found) for found in torch_ratios if found]
    return span(ratios) if ratios else ""


def table(rows: list[Sequence[str]], gpu: bool) -> str:
    """The rows from `summary`, as a Markdown table."""
    gpu_columns = GPU_COLUMNS.values() if gpu else ()
    columns = "operation", "backend", "dtype", "direction", "shapes"
    return markdown((*columns, *gpu_columns, "x memcpy's time", "x as fast as"), rows)


def summary(entry: dict[str, Any], gpu: bool) -> list[Sequence[str]]:
    """A row for each direction of an entry, without backward if training was measured; cells are ranges over shapes."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    directions = {figure["direction"] for figure in entry["figures"]}
    for figure in _first_setting(entry):
        if figure["direction"] != "backward" or "training" not in directions:
            groups.setdefault((figure["direction"], figure["setting"]), []).append(figure)
    rows: list[Sequence[str]] = []
    for (direction, setting), figures in groups.items():
        ratios: dict[str, list[float]] = {}
        for name, ratio in (peer for each in figures for peer in each["peers"].items()):
            ratios.setdefault(name, []).append(ratio)
        peers = ", ".join(f"{name} {span(values)}" for name, values in ratios.items())
        on_gpu = setting == "cuda"
        numbers = [span([each[key] for each in figures]) if on_gpu else "" for key in GPU_COLUMNS] if gpu else []
        numbers.append(span([each["over_memcpy"] for each in figures]))
        where = ("" if on_gpu else f", {setting}") + (" (busy machine)" if any(map(unsteady, figures)) else "")
        key = f"`{entry['operation']}`", entry["backend"], entry["dtype"], direction + where
        rows.append((*key, str(len(figures)), *numbers, peers))
    return rows


def span(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


FIGURE_HEADER = (
    "operation", "backend", "dtype", "direction", "shape", "setting",
    "us (10% to 90%)", "GB/s", "ceiling", "memcpy", "as fast as",
)  # fmt: skip


def figure_cells(figure: dict[str, Any], stale: bool = False) -> tuple[str, ...]:
    """A figure as text for a table, in the order of FIGURE_HEADER."""
    busy = " !" if unsteady(figure) else ""
    spread = (
        f"{microseconds(figure['us'])} ({microseconds(figure['low_us'])} to {microseconds(figure['high_us'])}){busy}"
    )
    peers = ", ".join(f"{name} x{ratio:.3g}" for name, ratio in figure["peers"].items())
    return (
        figure["op"] + " (stale)" * stale,
        *(figure[key] for key in ("backend", "dtype", "direction", "shape", "setting")),
        spread,
        f"{figure['gb_per_s']:.3g}",
        f"{figure['ceiling_percent']:.0f}%",
        f"x{figure['over_memcpy']:.2f}",
        peers,
    )


def unsteady(figure: dict[str, Any]) -> bool:
    """Whether the samples of a figure differ so much that the machine was busy."""
    return figure["high_us"] > UNSTEADY * figure["low_us"]


def rendered(text: str, results: list[ledger.Result], root: Path = ledger.ROOT) -> str:
    """The text of a README with its table of operations updated.

    Raises:
        ValueError: the table's markers are missing.
    """
    begin, end = "<!-- operations:begin -->\n", "<!-- operations:end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"README has no section between {begin.strip()} and {end}")
    return f"{before}{begin}{operations(results, root)}\n{end}{after}"
