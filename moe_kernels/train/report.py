"""What a run leaves behind: log.csv, result.json, a table and a picture."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_kernels import info
from moe_kernels.train.checkpoint import write
from moe_kernels.train.loop import Row
from moe_kernels.train.plotting import plotting, save


@dataclass
class History:
    """The evaluations of one side with one seed; `stage` is "tune" or "final"."""

    side: str
    seed: int
    lr: float
    stage: str
    rows: list[Row]
    flops: float = math.nan  # of evaluating one sample
    setup_seconds: float = 0.0
    parameters: int = 0


@dataclass
class Summary:
    """One side over its seeds: mean and spread (the standard deviation of the sample) of what its last rows say."""

    side: str
    lr: float
    metric: tuple[float, float]
    curve: tuple[float, float]  # the metric's mean over all evaluations but the first: who learns faster is higher
    loss: tuple[float, float]
    seconds: float  # a step, median over seeds and evaluations
    flops: float
    routing: dict[str, float] = field(default_factory=dict)


def summarise(histories: Sequence[History], metric: str) -> list[Summary]:
    """A summary a side, of the final runs."""
    found = []
    for side in dict.fromkeys(each.side for each in histories):
        mine = [each for each in histories if each.side == side and each.stage == "final"]
        last = [each.rows[-1] for each in mine]
        trained = [[row[f"test {metric}"] for row in each.rows[1:] or each.rows] for each in mine]
        seconds = sorted(row["seconds"] for each in mine for row in each.rows[1:]) or [math.nan]
        found.append(
            Summary(
                side,
                mine[0].lr,
                _mean_and_spread([row[f"test {metric}"] for row in last]),
                _mean_and_spread([sum(curve) / len(curve) for curve in trained]),
                _mean_and_spread([row["loss"] for row in last]),
                seconds[len(seconds) // 2],
                mine[0].flops,
                {name: _mean_and_spread([row[name] for row in last])[0] for name in ROUTING if name in last[0]},
            )
        )
    return found


ROUTING = ("experts", "least load", "most load", "dead", "entropy")


def table(summaries: Sequence[Summary], metric: str) -> str:
    """The table at the end of a run."""
    header = ("side", "lr", metric, "its mean over the run", "training loss", *ROUTING, "MFLOPs/sample", "ms/step")
    rows = [
        (
            each.side,
            f"{each.lr:g}",
            _with_spread(each.metric),
            _with_spread(each.curve),
            _with_spread(each.loss),
            *(_short(each.routing.get(name, math.nan)) for name in ROUTING),
            f"{each.flops / 1e6:.3f}",
            f"{each.seconds * 1e3:.2f}",
        )
        for each in summaries
    ]
    return info.table(header, rows)


def log(histories: Sequence[History]) -> str:
    """Every evaluation of every run, as CSV."""
    columns = list(dict.fromkeys(name for each in histories for row in each.rows for name in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["side", "seed", "stage", "lr", *columns])
    for each in histories:
        for row in each.rows:
            writer.writerow([each.side, each.seed, each.stage, each.lr, *(row.get(column, "") for column in columns)])
    return buffer.getvalue()


def write_json(path: Path, result: dict[str, Any]) -> None:
    """JSON has no NaN and no infinity: they become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(_finite(result), indent=1) + "\n")


def picture(path: Path, histories: Sequence[History], metric: str, title: str) -> bool:
    """The metric and the training loss of every side by step, with the range of the seeds. False without matplotlib."""
    pyplot = plotting()
    if pyplot is None:
        return False
    canvas, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    final = [each for each in histories if each.stage == "final"]
    for axis, name in zip(axes, (f"test {metric}", "loss"), strict=True):
        for number, side in enumerate(dict.fromkeys(each.side for each in final)):
            runs = [each.rows for each in final if each.side == side]
            columns = [[rows[i][name] for rows in runs] for i in range(min(map(len, runs)))]
            steps = [row["step"] for row in runs[0]][: len(columns)]
            look = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}  # ten colours
            axis.plot(steps, [sum(column) / len(column) for column in columns], label=side, **look)
            axis.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=look["color"], alpha=0.2)
        axis.set(xlabel="step", ylabel=name.replace("loss", "training loss"))
    axes[0].legend(fontsize="small")
    canvas.suptitle(title)
    save(canvas, path)
    return True


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _with_spread(pair: tuple[float, float]) -> str:
    mean, spread = pair
    return f"{mean:.4f}" if math.isnan(spread) else f"{mean:.4f} ± {spread:.4f}"


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
