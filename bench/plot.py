"""Pictures of one run: rooflines, ratios to peers, scaling curves and the load of the experts."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator

from bench.ledger import Result

MARKERS = {"float32": "o", "bfloat16": "s", "float16": "^"}
FILLED: dict[str, Any] = {"forward": "full", "backward": "left", "training": "none"}


def draw(result: Result) -> dict[str, bytes]:
    """For each picture that has data, its PNG."""
    figures = _all(result, "figures")
    drawn = {
        "roofline": _roofline(result, figures) if figures else None,
        "peers": _peers([each for each in figures if each["peers"]]),
        "scaling": _scaling(_all(result, "curves")),
        "load": _load(result["loads"]) if result.get("loads") and _routed(figures) else None,
    }
    found = {}
    for picture, canvas in drawn.items():
        if canvas is not None:
            file = io.BytesIO()
            canvas.savefig(file, format="png", dpi=100)
            found[picture] = file.getvalue()
            plt.close(canvas)
    return found


def speedups(result: Result) -> bytes:
    """An SVG: for each operation and direction how many times as fast as the fastest PyTorch code, least to most over
    shapes and dtypes, in the first setting of each entry (on a CPU one thread)."""
    spans: dict[str, dict[str, list[float]]] = {}
    for entry in result["entries"]:
        first = [each for each in entry["figures"] if each["setting"] == entry["figures"][0]["setting"]]
        for each in first:
            ratios = [ratio for name, ratio in each["peers"].items() if name.startswith("torch")]
            if ratios:
                spans.setdefault(each["op"], {}).setdefault(each["direction"], []).append(min(ratios))
    order = sorted(spans, key=lambda op: max(max(each) for each in spans[op].values()))
    with plt.rc_context({"svg.hashsalt": "moe_kernels", "svg.fonttype": "none", "font.size": 9}):
        canvas, axis = plt.subplots(figsize=(8, 0.6 + 0.34 * len(order)), layout="constrained")
        for row, op in enumerate(order):
            for shift, (direction, color) in zip((0.17, -0.17), (("forward", "C0"), ("training", "C1")), strict=True):
                if found := spans[op].get(direction):
                    axis.plot([min(found), max(found)], [row + shift] * 2, color=color, linewidth=5)
                    axis.plot(sorted(found)[len(found) // 2], row + shift, "|", color="black", markersize=5)
        axis.axvline(1, color="black", linewidth=1)
        axis.set(xscale="log", yticks=range(len(order)), xlabel="times as fast as the fastest PyTorch code")
        axis.set_yticklabels(order)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.grid(axis="x", alpha=0.3)
        handles = [plt.Line2D([], [], color=color, linewidth=5) for color in ("C0", "C1")]
        axis.legend(handles, ["forward", "training"], loc="lower right", fontsize="small")
        setting = next(entry["figures"][0]["setting"] for entry in result["entries"] if entry["figures"])
        axis.set_title(f"measured on {result['device']}, {setting}, {result['date']}", fontsize="small")
        file = io.BytesIO()
        canvas.savefig(file, format="svg", metadata={"Date": None})
        plt.close(canvas)
    return file.getvalue()


def _all(result: Result, which: str) -> list[dict[str, Any]]:
    return [figure for entry in result["entries"] for figure in entry.get(which, [])]


def _routed(figures: list[dict[str, Any]]) -> bool:
    return any("routing" in each["sizes"] for each in figures)


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _colors(figures: list[dict[str, Any]]) -> dict[str, Any]:
    return {op: plt.get_cmap("Paired")(index % 12) for index, op in enumerate(_unique(each["op"] for each in figures))}


def _roofline(result: Result, figures: list[dict[str, Any]]) -> Canvas:
    """For each setting (GPU or number of threads): left GB/s of calls without FLOPs, right GFLOP/s of the others."""
    settings = _unique(each["setting"] for each in figures)
    canvas, axes = plt.subplots(
        len(settings), 2, figsize=(11, 4.2 * len(settings)), width_ratios=(1, 3), squeeze=False, layout="constrained"
    )
    colors = _colors(figures)
    for (left, right), setting in zip(axes, settings, strict=True):
        limits = result["ceilings"][setting]
        selected = [each for each in figures if each["setting"] == setting]
        counted = [each for each in selected if each["flops"]]
        _roofs(right, limits, [each["flops"] / each["least_bytes"] for each in counted] or [1.0])
        for each in counted:
            _point(right, each["flops"] / each["least_bytes"], each["gflop_per_s"], each, colors)
        moving = [each for each in selected if not each["flops"]]
        names = _unique(each["op"] for each in moving)
        for each in moving:
            _point(left, names.index(each["op"]), each["gb_per_s"], each, colors)
        left.set_visible(bool(moving))
        left.axhline(limits["copy"], color="black", linewidth=1)
        left.set(xticks=range(len(names)), xticklabels=names, title="no FLOPs", ylabel="GB/s", yscale="log")
        left.tick_params(axis="x", rotation=20)
        right.set(title=setting, ylabel="GFLOP/s", xlabel="FLOPs per byte (least bytes)", xscale="log", yscale="log")
        right.grid(alpha=0.3)
    looks = {op: {"color": color} for op, color in colors.items()}
    looks |= {dtype: {"marker": MARKERS.get(dtype, "x")} for dtype in _unique(each["dtype"] for each in figures)}
    looks |= {name: {"fillstyle": FILLED[name]} for name in _unique(each["direction"] for each in figures)}
    common = {"color": "gray", "marker": "o", "linestyle": ""}
    handles = [plt.Line2D([], [], label=name, **(common | look)) for name, look in looks.items()]
    canvas.legend(handles=handles, loc="outside lower center", ncols=6, fontsize="small")
    canvas.suptitle(f"{result['device']}, {result['date']}: measured, under ceilings of the same run")
    return canvas


def _roofs(axis: Axes, limits: dict[str, float], intensities: list[float]) -> None:
    low, high = min(intensities) / 4, max(*intensities, *(limits[name] / limits["copy"] for name in limits)) * 4
    for name, limit in limits.items():
        if name != "copy":
            ridge = limit / limits["copy"]
            axis.plot([low, ridge, high], [low * limits["copy"], limit, limit], color="black", linewidth=1)
            axis.annotate(f"{name} product", (high, limit), ha="right", va="bottom", fontsize="small")
    axis.annotate("copy", (low, low * limits["copy"]), va="bottom", fontsize="small")


def _point(axis: Axes, x: float, y: float, figure: dict[str, Any], colors: dict[str, Any]) -> None:
    axis.plot(
        x, y, MARKERS.get(figure["dtype"], "x"), color=colors[figure["op"]], fillstyle=FILLED[figure["direction"]]
    )


def _peers(figures: list[dict[str, Any]]) -> Canvas | None:
    """A bar for each measured call and peer: how many times as fast, from least to most over the shapes."""
    bars: dict[tuple[str, str], list[float]] = {}
    for each in figures:
        for peer, ratio in each["peers"].items():
            line = f"{each['op']} {each['backend']} {each['dtype']} {each['direction']}, {each['setting']}"
            bars.setdefault((line, peer), []).append(ratio)
    if not bars:
        return None
    canvas, axis = plt.subplots(figsize=(11, 1.2 + 0.2 * len(bars)), layout="constrained")
    colors = {peer: plt.get_cmap("tab20")(i % 20) for i, peer in enumerate(_unique(peer for _, peer in bars))}
    labelled = set[str]()
    for row, ((_, peer), ratios) in enumerate(bars.items()):
        label = None if peer in labelled else f"over {peer}"
        labelled.add(peer)
        axis.plot([min(ratios), max(ratios)], [row, row], color=colors[peer], linewidth=5, label=label)
        axis.plot(sorted(ratios)[len(ratios) // 2], row, "|", color="black")
    axis.axvline(1, color="black", linewidth=1)
    axis.set(xscale="log", xlabel="times as fast", yticks=range(len(bars)), ylim=(len(bars), -1))
    axis.set_yticklabels([line for line, _ in bars], fontsize="x-small")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.grid(axis="x", alpha=0.3)
    canvas.legend(loc="outside lower center", ncols=3, fontsize="small")
    return canvas


def _scaling(curves: list[dict[str, Any]]) -> Canvas | None:
    """Curves of time against the size that varies: of backends, of peers, and of the least time at the ceilings."""
    names = _unique((each["op"], each["setting"]) for each in curves)
    if not names:
        return None
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    size = (3.8 * columns, 3.2 * rows)
    canvas, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, (op, setting) in zip(axes.flat, names, strict=False):
        selected = [each for each in curves if (each["op"], each["setting"]) == (op, setting)]
        name = varying(selected)
        for backend in _unique(each["backend"] for each in selected):
            line = [each for each in selected if each["backend"] == backend]
            sizes = [each["sizes"][name] for each in line]
            axis.plot(sizes, [each["us"] for each in line], "o-", label=backend)
        # Peers and floor are drawn from the last backend's figures alone.
        for peer in dict.fromkeys(name for each in line for name in each["peers"]):
            axis.plot(sizes, [each["us"] * each["peers"].get(peer, float("nan")) for each in line], ".--", label=peer)
        floors = [each["us"] * each["ceiling_percent"] / 100 for each in line]
        axis.plot(sizes, floors, ":", color="black", label="floor")
        axis.set(xscale="log", yscale="log", xlabel=name, ylabel="us", title=f"{op} {selected[0]['dtype']}, {setting}")
        axis.legend(fontsize="x-small")
    return canvas


def varying(curve: list[dict[str, Any]]) -> str:
    """The name of the first size that varies along a curve; the name of the first size if none varies."""
    sizes = [each["sizes"] for each in curve]
    return next((name for name in sizes[0] if len({str(each[name]) for each in sizes}) > 1), next(iter(sizes[0])))


def _load(loads: dict[str, Any]) -> Canvas:
    kinds = loads["tokens"]
    canvas, axes = plt.subplots(1, len(kinds), figsize=(11, 2.6), sharey=True, squeeze=False, layout="constrained")
    for axis, (kind, tokens) in zip(axes[0], kinds.items(), strict=True):
        mean = sum(tokens) / len(tokens)
        axis.bar(range(len(tokens)), tokens, width=1.0)
        axis.axhline(mean, color="black", linewidth=1)
        idle = tokens.count(0)
        axis.set(title=f"{kind}: busiest {tokens[0] / mean:.1f} x the mean, {idle} idle", xlabel="expert")
        axis.title.set_fontsize("medium")
    axes[0][0].set_ylabel("choices")
    canvas.suptitle(loads["shape"], fontsize="medium")
    return canvas
