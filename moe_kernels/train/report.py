"""What a run leaves behind: log.csv, result.json, a table and a picture."""

from __future__ import annotations

import csv
import io
import itertools
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
    flops_known: float = math.nan  # of a sample whose frozen masks were kept; as many as `flops` where none are
    unit: str = "experts"  # what the routing counts
    chosen: int = -1  # the row that counts
    terms: list[Row] = field(default_factory=list)  # beside every row: regularisers of the loss

    @property
    def result(self) -> Row:
        """The evaluation that counts."""
        return self.rows[self.chosen]


@dataclass
class Summary:
    """One side over its seeds: mean and spread (the standard deviation of the sample) of what its chosen rows say."""

    side: str
    lr: float
    metric: tuple[float, float]
    curve: tuple[float, float]  # the metric's mean over all evaluations: who learns faster is higher
    loss: tuple[float, float]  # of the task alone, in training
    seconds: float  # a step, median over seeds and evaluations
    flops: float
    routing: dict[str, float] = field(default_factory=dict)
    flops_known: float = math.nan  # with masks that were kept
    unit: str = "experts"
    regularisers: dict[str, float] = field(default_factory=dict)  # what was differentiated beside the task's loss
    parameters: int = 0


def summarise(histories: Sequence[History], metric: str) -> list[Summary]:
    """A summary a side, of the final runs."""
    found = []
    for side in dict.fromkeys(each.side for each in histories):
        mine = [each for each in histories if each.side == side and each.stage == "final"]
        last = [each.result for each in mine]
        terms = [each.terms[each.chosen] for each in mine if each.terms]
        trained = [[row[f"test {metric}"] for row in each.rows] for each in mine]
        seconds = sorted(row["seconds"] for each in mine for row in each.rows)
        found.append(
            Summary(
                side,
                mine[0].lr,
                _mean_and_spread([row[f"test {metric}"] for row in last]),
                _mean_and_spread([sum(curve) / len(curve) for curve in trained]),
                _mean_and_spread([task_loss(row) for row in last]),
                seconds[len(seconds) // 2],
                mine[0].flops,
                {name: _mean_and_spread([row[name] for row in last])[0] for name in ROUTING if name in last[0]},
                mine[0].flops_known,
                mine[0].unit,
                {
                    name: _mean_and_spread([row.get(name, math.nan) for row in terms])[0]
                    for name in dict.fromkeys(name for row in terms for name in row)
                },
                mine[0].parameters,
            )
        )
    return found


ROUTING = ("experts", "least load", "most load", "dead", "entropy")


def task_loss(row: Row) -> float:
    """The part of the training loss that the data judge, without regularisers."""
    return row.get("task", row.get("text", row["loss"]))


def table(summaries: Sequence[Summary], metric: str) -> str:
    """The table at the end of a run."""
    units = {each.unit for each in summaries if each.routing}
    unit = units.pop() if len(units) == 1 else ""  # else said in every row
    kept = any(each.flops_known != each.flops and not math.isnan(each.flops_known) for each in summaries)
    header = (
        *("side", "lr", metric, "its mean over the run", "task's training loss"),
        *(unit or "used", "least load", "most load", f"dead {unit}".strip(), "entropy"),
        *("MFLOPs/sample", *["with kept masks"] * kept, "ms/step"),
    )
    rows = [
        (
            each.side,
            f"{each.lr:g}",
            _with_spread(each.metric),
            _with_spread(each.curve),
            _with_spread(each.loss),
            *(
                _short(each.routing.get(name, math.nan))
                + (f" {each.unit}" if not unit and name in ("experts", "dead") and name in each.routing else "")
                for name in ROUTING
            ),
            f"{each.flops / 1e6:.3f}",
            *[f"{each.flops_known / 1e6:.3f}"] * kept,
            f"{each.seconds * 1e3:.2f}",
        )
        for each in summaries
    ]
    return info.table(header, rows)


def legend(summaries: Sequence[Summary]) -> str:
    """What the columns of `table` mean, and what was added to the task's loss."""
    lines = [
        "Mean ± spread over the seeds. Load: share of the test samples that use an expert or neuron; dead: those that",
        "none uses; entropy of the routers in nats. FLOPs of evaluating a sample, by torch's counter; a step's time is "
        "a median.",
    ]
    for each in summaries:
        if each.regularisers:
            named = ", ".join(f"{name} {value:.4g}" for name, value in each.regularisers.items())
            lines.append(f"Added to the task's loss of {each.side}: {named}.")
    return "\n".join(lines)


def log(histories: Sequence[History]) -> str:
    """Every evaluation of every run, as CSV."""
    lines = [
        (each, row | {f"loss: {name}": value for name, value in terms.items()})
        for each in histories
        for row, terms in itertools.zip_longest(each.rows, each.terms, fillvalue=dict[str, float]())
    ]
    columns = list(dict.fromkeys(name for _, row in lines for name in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["side", "seed", "stage", "lr", *columns])
    for each, row in lines:
        writer.writerow([each.side, each.seed, each.stage, each.lr, *(row.get(column, "") for column in columns)])
    return buffer.getvalue()


def write_json(path: Path, result: dict[str, Any]) -> None:
    """JSON has no NaN and no infinity: they become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(_finite(result), indent=1) + "\n")


def picture(path: Path, histories: Sequence[History], metric: str, title: str) -> bool:
    """The metric and the task's training loss of every side by step, with the range of the seeds. The regularisers that
    are trained besides are named below. False without matplotlib."""
    pyplot = plotting()
    if pyplot is None:
        return False
    canvas, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    final = [each for each in histories if each.stage == "final"]
    apart = any(name in row for each in final for row in each.rows for name in ("task", "text"))
    training = "training loss of the task" if apart else "training loss"
    for axis, name in zip(axes, (f"test {metric}", training), strict=True):
        for number, side in enumerate(dict.fromkeys(each.side for each in final)):
            runs = [each.rows for each in final if each.side == side]
            columns = [
                [task_loss(rows[i]) if name == training else rows[i][name] for rows in runs]
                for i in range(min(map(len, runs)))
            ]
            steps = [row["step"] for row in runs[0]][: len(columns)]
            look = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}  # ten colours
            axis.plot(steps, [sum(column) / len(column) for column in columns], label=side, **look)
            axis.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=look["color"], alpha=0.2)
        axis.set(xlabel="step", ylabel=name)
    rest = dict.fromkeys(name for each in final for row in each.terms for name in row)
    if rest:
        axes[1].set_title(f"trained besides: {', '.join(rest)}", fontsize="small")
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
