"""The report: ledger, results and predictions, as Markdown and as one HTML page that has pictures too."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from bench import ledger, predict
from bench.compare import KEY
from bench.report import FIGURE_HEADER, figure_cells, operations
from bench.tables import markdown

HOW_TO_READ = """\
Times are medians of interleaved runs, with the 10th and 90th percentile. `!` marks a 90th percentile over twice the
10th: the machine was busy. On one CPU thread, the time in which the thread waited for a core is subtracted. *Ceiling*:
the least time as a share of the time taken. The least time is the larger of two: for the least bytes (each pass reads
its inputs once and writes its outputs once) at the speed of a copy, and for the FLOPs at that of a matrix product, both
measured in the same run. If inputs are in a cache, the share can pass 100%. *memcpy*: the time divided by that of a
copy that moves the least bytes. Last column: how many times as fast as each peer, on the same inputs in the same run.
On a busy CPU only ratios hold."""
CAPTIONS = {
    "roofline": "The speed of every call under the limits (roofs) of the same run. The sloped roof is the bandwidth "
    "of a copy, the flat ones are matrix products by dtype. The distance of a point below its roof is the possible "
    "gain. Left plot: operations without FLOPs; the line is the bandwidth of a copy.",
    "peers": "How many times as fast as each peer. The bar is the range over the shapes, the stroke the median. Left "
    "of the line at 1 the peer is faster.",
    "scaling": "Time against the size that varies. The dotted black line, called floor, is the least time. If another "
    "line is steeper, its time grows faster than the work.",
    "load": "Number of choices that each expert gets, for each kind of routing. The line is the mean.",
}
PNG = "data:image/png;base64,"
STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 13px; margin: 1em 0 }
th, td { border: 1px solid #ddd; padding: 0.2em 0.6em; text-align: left }
th { background: #f4f4f4 } tr:nth-child(even) { background: #fafafa } img { max-width: 100% }"""


@ledger.settled()
def write(results: list[ledger.Result], folder: Path, root: Path = ledger.ROOT) -> tuple[Path, Path]:
    """Writes report.md and report.html, which has pictures too."""
    from bench import plot  # imports matplotlib, which takes half a second

    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "report.md", folder / "report.html"
    paths[0].write_text(document(results, root=root))
    paths[1].write_text(page(document(results, {result["device"]: plot.draw(result) for result in results}, root)))
    return paths


def page(text: str) -> str:
    """The HTML page of a Markdown text."""
    pictures = re.findall(f"{PNG}[^)]+", text)
    for number, picture in enumerate(pictures):  # the renderer takes a second for a link of a megabyte
        text = text.replace(picture, f"picture-{number}.png", 1)
    body = MarkdownIt("commonmark").enable("table").render(text)
    for number, picture in enumerate(pictures):
        body = body.replace(f"picture-{number}.png", picture, 1)
    head = f'<meta charset="utf-8"><title>moe_kernels, measured</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>\n{body}</body></html>\n"


def document(
    results: list[ledger.Result], pictures: dict[str, dict[str, bytes]] | None = None, root: Path = ledger.ROOT
) -> str:
    """The whole report in Markdown. pictures: for each device, PNGs by the keys of CAPTIONS, written into the text."""
    parts = ["# moe_kernels, measured", "## Ledger", operations(results, root)]
    if not results:
        parts.append("Nothing was measured yet; `python -m bench run` measures.")
    for result in results:
        parts += _device(result, (pictures or {}).get(result["device"], {}), root)
    parts += predict.section(results, root, {entry["operation"] for result in results for entry in result["entries"]})
    return "\n\n".join(parts) + "\n"


def _device(result: ledger.Result, pictures: dict[str, bytes], root: Path) -> list[str]:
    facts, entries = result["machine"], result["entries"]
    gpus = ", ".join(gpu["name"] for gpu in facts["gpus"]) or "none, so GPU kernels were not run"
    parts = [
        f"## {result['device']}, {result['date']}",
        f"CPU {facts['cpu']}, {facts['cores']} cores, {facts['isa']}. GPU: {gpus} (driver {facts['driver']}). "
        f"Python {facts['python']}, torch {facts['torch']}, Triton {facts['triton']}.",
    ]
    stale = ledger.stale(result, root)
    if stale:
        parts.append(f"**Stale**, because their sources changed since they ran: {', '.join(stale)}.")
    for name, png in pictures.items():
        parts += [f"![{name}]({PNG}{base64.b64encode(png).decode()})", CAPTIONS[name]]
    figures = [figure for entry in entries for figure in entry["figures"]]
    if figures:
        rows = [figure_cells(each, ledger.is_stale(entry, root)) for entry in entries for each in entry["figures"]]
        parts += ["### Figures", HOW_TO_READ, markdown(FIGURE_HEADER, rows)]
    curves = [row for entry in entries for row in _growth(entry)]
    if curves:
        parts += ["### Growth", markdown(_GROWTH, curves)]
    parts += ["### Ceilings of this machine", markdown(("setting", "what", "reached"), _ceilings(result["ceilings"]))]
    for title, columns in (("Memory", _MEMORY), ("Clocks, power, energy", _TELEMETRY)):
        # A row for each figure that has the key of the last column; the other keys may be missing.
        found = [[_cell(each.get(key, "")) for key in (*KEY, *columns)] for each in figures if [*columns][-1] in each]
        if found:
            parts += [f"### {title}", markdown((*KEY, *columns.values()), found)]
    parts += ["### Verified against the definition", markdown(_VERDICT, [_verdict(each, root) for each in entries])]
    if result.get("suite"):
        parts.append("Test suite: " + "; ".join(f"{name} {word}" for name, word in result["suite"].items()))
    if result["not_measured"]:
        lines = _grouped(result["not_measured"])
        parts += ["### Not run, and remarks", "\n".join(f"* {line}" for line in lines)]
    return parts


def _grouped(lines: list[str]) -> list[str]:
    """The lines; those of jobs for which there was no time are one line for each operation, with their number."""
    late: dict[str, int] = {}
    others = []
    for line in lines:
        if line.endswith(OUT_OF_TIME):
            op = line.partition(" ")[0]
            late[op] = late.get(op, 0) + 1
        else:
            others.append(line)
    return [*others, *(f"{op}: no time for {count} {'calls' if count > 1 else 'call'}" for op, count in late.items())]


OUT_OF_TIME = ": out of time"
_VERDICT = ("operation", "backend", "dtype", "device", "cases", "worst error", "allowed", "verdict", "checks")
_GROWTH = ("operation", "backend", "dtype", "setting", "first", "last", "time", "work", "first ceiling", "last ceiling")
_MEMORY = {"peak_mib": "MiB at the peak of a training step, beyond its inputs", "peers_peak_mib": "peers"}
_TELEMETRY = {"launch_us": "host us a call", "joules_per_call": "J a call", "watts": "W", "celsius": "C"}
_TELEMETRY |= {"memory_mhz": "memory MHz", "throttled": "throttled by", "sm_mhz": "SM MHz"}


def _verdict(entry: dict[str, Any], root: Path) -> tuple[str, ...]:
    keys = ("operation", "backend", "dtype", "device", "cases", "error", "allowed", "verdict")
    checks = ", ".join(f"{name}: {word}" for name, word in entry["checks"].items())
    cells = [f"{entry[key]:.3g}" if isinstance(entry[key], float) else str(entry[key]) for key in keys]
    cells[-1] += " (stale)" * ledger.is_stale(entry, root)
    return (*cells, checks)


def _ceilings(ceilings: dict[str, dict[str, float]]) -> list[tuple[str, str, str]]:
    rows = []
    for setting, limits in ceilings.items():
        for name, value in limits.items():
            words, unit = ("copy", "GB/s") if name == "copy" else (f"{name} product", "GFLOP/s")
            rows.append((setting, words, f"{value:.4g} {unit}"))
    return rows


def _growth(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each setting: growth of the time and of the work from the first to the last shape of the curve."""
    rows = []
    for setting in dict.fromkeys(each["setting"] for each in entry.get("curves", [])):
        curve = [each for each in entry["curves"] if each["setting"] == setting]
        first, last = curve[0], curve[-1]
        # 100 times the least time of each shape: the ratio is the growth of the work.
        floors = [each["us"] * each["ceiling_percent"] for each in (first, last)]
        key = (entry["operation"], entry["backend"], first["dtype"], setting)
        growth = (f"x{last['us'] / first['us']:.3g}", f"x{floors[1] / floors[0]:.3g}")
        reached = (f"{each['ceiling_percent']:.0f}%" for each in (first, last))
        rows.append((*key, first["shape"], last["shape"], *growth, *reached))
    return rows


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
