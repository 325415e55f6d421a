"""The results of a comparison: text of log.csv, JSON files, tables and a picture.

A comparison trains several models or methods, its sides, on the same data.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_kernels import info
from moe_kernels.papers.train.checkpoint import write
from moe_kernels.papers.train.plotting import write_picture
from moe_kernels.papers.train.statistics import Row, routing_columns

MOST_PAIRED = 8  # sides of which every two are compared


@dataclass
class History:
    """The evaluations of a run; `stage` is "tune" or "final", or in log.csv "running" until the run ends."""

    side: str
    seed: int
    lr: float
    stage: str
    rows: list[Row]
    flops: float = math.nan  # FLOPs of a prediction for one sample
    setup_seconds: float = 0.0
    parameters: int = 0
    flops_known: float = math.nan  # `flops`, less the routing that stored masks save (recipe comet, --keep-masks)
    unit: str = "experts"  # what the routing counts: "experts" or "neurons"
    chosen: int = -1  # index of the row to report
    terms: list[Row] = field(default_factory=list)  # for every row: means of the regularisers since the row before

    @property
    def result(self) -> Row:
        return self.rows[self.chosen]


@dataclass
class Summary:
    """One side over its seeds. Pairs are mean and spread (sample standard deviation) over the seeds."""

    side: str
    lr: float
    metric: tuple[float, float]
    curve: tuple[float, float]  # mean of the metric over all evaluations
    loss: tuple[float, float]  # training loss of the task, without regularisers
    seconds: float  # of a step: mean between two evaluations; of these means the median over evaluations and seeds
    flops: float  # of a prediction for one sample
    routing: dict[str, float] = field(default_factory=dict)
    flops_known: float = math.nan  # as in History
    unit: str = "experts"
    regularisers: dict[str, float] = field(default_factory=dict)  # means over the seeds
    parameters: int = 0
    further: dict[str, tuple[float, float]] = field(default_factory=dict)  # of the columns asked for, where they exist


def summarise(histories: Sequence[History], metric: str, columns: Sequence[str] = ()) -> list[Summary]:
    """columns: further columns of the rows, for `Summary.further`."""
    found = []
    for side in dict.fromkeys(each.side for each in histories):
        runs = [each for each in histories if each.side == side and each.stage == "final"]
        chosen = [each.result for each in runs]
        terms = [each.terms[each.chosen] for each in runs if each.terms]
        curves = [[row[f"test {metric}"] for row in each.rows] for each in runs]
        seconds = sorted(row["seconds"] for each in runs for row in each.rows)
        found.append(
            Summary(
                side,
                runs[0].lr,
                mean_and_spread([row[f"test {metric}"] for row in chosen]),
                mean_and_spread([sum(curve) / len(curve) for curve in curves]),
                mean_and_spread([task_loss(row) for row in chosen]),
                seconds[len(seconds) // 2],
                runs[0].flops,
                {
                    name: mean_and_spread([row.get(name, math.nan) for row in chosen])[0]
                    for name in (*routing_columns(runs[0].unit), *(each for each in chosen[0] if _of_a_layer(each)))
                    if name in chosen[0]
                },
                runs[0].flops_known,
                runs[0].unit,
                {
                    name: mean_and_spread([row.get(name, math.nan) for row in terms])[0]
                    for name in dict.fromkeys(name for row in terms for name in row)
                },
                runs[0].parameters,
                {
                    name: mean_and_spread([row.get(name, math.nan) for row in chosen])
                    for name in columns
                    if any(name in row for row in chosen)
                },
            )
        )
    return found


def _of_a_layer(name: str) -> bool:
    return name.startswith("entropy ")


def task_loss(row: Row) -> float:
    return row.get("task", row.get("text", row["loss"]))


def tables(summaries: Sequence[Summary], metric: str, batch_size: int) -> str:
    """Tables with a row for each side: metric, training loss and time; further columns, if any; routing and costs.

    batch_size: samples of a step. Training counts as three times the FLOPs of a prediction.
    """
    units = {each.unit for each in summaries if each.routing}
    # Sides that count the same unit have it in the header. Otherwise ("") it stands after each number.
    unit = units.pop() if len(units) == 1 else ""
    stored = any(each.flops_known != each.flops and not math.isnan(each.flops_known) for each in summaries)
    by_layer = list(dict.fromkeys(name for each in summaries for name in each.routing if _of_a_layer(name)))
    further = list(dict.fromkeys(name for each in summaries for name in each.further))
    learned, costs = [], []
    for each in summaries:
        numbers = (with_spread(pair) for pair in (each.metric, each.curve, each.loss))
        rate = batch_size / each.seconds
        speeds = f"{each.seconds * 1e3:.2f}", f"{rate:.0f}", f"{3e-9 * rate * each.flops:.3g}"
        learned.append((each.side, f"{each.lr:g}", *numbers, *speeds))
        routing = (
            _short(each.routing.get(name, math.nan))
            + f" {each.unit}" * (not unit and name in each.routing and name.endswith(each.unit))
            for name in routing_columns(each.unit)
        )
        flops = (f"{count / 1e6:.3f}" for count in (each.flops, *[each.flops_known] * stored))
        entropies = (_short(each.routing.get(name, math.nan)) for name in by_layer)
        costs.append((each.side, *routing, *entropies, each.parameters, *flops))
    routed = routing_columns(unit) if unit else ("used", "least load", "most load", "dead", "entropy")
    header = ("side", "lr", metric, "its mean over the run", "task's training loss", "ms/step", "samples/s", "GFLOP/s")
    below = ("side", *routed, *by_layer, "parameters", "MFLOPs/sample", *["with kept masks"] * stored)
    rows = [
        (each.side, *(with_spread(each.further.get(name, (math.nan, math.nan))) for name in further))
        for each in summaries
    ]
    between = info.table(("side", *(name.removeprefix("test ") for name in further)), rows)
    return "\n\n".join([info.table(header, learned), *[between] * bool(further), info.table(below, costs)])


def legend(summaries: Sequence[Summary]) -> str:
    """The meaning of columns of `tables`, and the regularisers of each side that has some."""
    lines = [
        "Mean ± standard deviation over the seeds. experts, neurons or used: how many of them a test sample",
        "or token uses on average; load: share of the samples or tokens that use an expert or neuron; dead:",
        "number that none uses; entropy of the routers in nats. FLOPs of one prediction, by torch's counter;",
        "ms/step is a median; GFLOP/s counts a step as three predictions a sample.",
    ]
    for each in summaries:
        if each.regularisers:
            named = ", ".join(f"{name} {value:.4g}" for name, value in each.regularisers.items())
            lines.append(textwrap.fill(f"Added to the task's loss of {each.side}: {named}.", info.WIDTH))
    return "\n".join(lines)


def log(histories: Sequence[History], sources: str = "") -> str:
    """CSV with a line for each evaluation. sources: the hash of the code (papers.sources), the last column."""
    lines = [
        (each, row | {f"loss: {name}": value for name, value in terms.items()})
        for each in histories
        for row, terms in itertools.zip_longest(each.rows, each.terms, fillvalue=dict[str, float]())
    ]
    columns = list(dict.fromkeys(name for _, row in lines for name in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["side", "seed", "stage", "lr", *columns, "sources"])
    for each, row in lines:
        values = (row.get(column, "") for column in columns)
        writer.writerow([each.side, each.seed, each.stage, each.lr, *values, sources])
    return buffer.getvalue()


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes JSON; NaN and infinities, which JSON does not have, become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(_finite(result), indent=1) + "\n")


def picture(path: Path, histories: Sequence[History], metric: str, title: str) -> bool:
    """Draws the metric and the training loss by step: for each side the mean over its seeds, and a band of their range.

    Returns False, and draws nothing, without matplotlib.
    """
    final = [each for each in histories if each.stage == "final"]
    has_task_loss = any(name in row for each in final for row in each.rows for name in ("task", "text"))
    training = "training loss of the task" if has_task_loss else "training loss"
    regularisers = dict.fromkeys(name for each in final for row in each.terms for name in row)

    def draw(axes: Any) -> None:
        for axis, name in zip(axes[0], (f"test {metric}", training), strict=True):
            for number, side in enumerate(dict.fromkeys(each.side for each in final)):
                runs = [each.rows for each in final if each.side == side]
                columns = [
                    [task_loss(rows[i]) if name == training else rows[i][name] for rows in runs]
                    for i in range(min(map(len, runs)))
                ]
                steps = [row["step"] for row in runs[0]][: len(columns)]
                colour, line = f"C{number % 10}", ("-", "--", ":", "-.")[number // 10 % 4]
                means = [sum(column) / len(column) for column in columns]
                axis.plot(steps, means, label=side, color=colour, linestyle=line, marker=".")
                axis.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.2)
            axis.set(xlabel="step", ylabel=name)
        if regularisers:
            axes[0, 1].set_title(f"also trained: {', '.join(regularisers)}", fontsize="small")
        canvas, labelled = axes[0, 0].figure, axes[0, 0].get_legend_handles_labels()
        canvas.legend(*labelled, loc="outside lower center", ncols=min(len(labelled[0]), 5))
        canvas.suptitle(title)

    return write_picture(path, draw, columns=2, figsize=(11, 5))


def differences(histories: Sequence[History], metric: str) -> str:
    """A table with the paired difference of the metric of each two sides over the seeds that both have.

    With more than MOST_PAIRED sides, only of the others from the first. "" with fewer than two such seeds.
    """
    found: dict[str, dict[int, float]] = {}
    for each in histories:
        if each.stage == "final":
            found.setdefault(each.side, {})[each.seed] = each.result[f"test {metric}"]
    names = list(found)
    pairs = itertools.combinations(names, 2) if len(names) <= MOST_PAIRED else ((names[0], each) for each in names[1:])
    rows = []
    for one, other in pairs:
        both = sorted(found[one].keys() & found[other].keys())
        if len(both) > 1:
            mean, spread, p = paired([found[other][seed] - found[one][seed] for seed in both])
            rows.append((f"{other} - {one}", len(both), with_spread((mean, spread)), f"{p:.2g}"))
    return info.table((f"difference in {metric}", "seeds", "mean ± spread", "p, paired t-test"), rows) if rows else ""


def paired(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean and spread of at least two differences, and the two-sided p of Student's t-test that their mean is 0.

    With n differences t = mean / (spread / sqrt(n)). For the whole number n - 1 of degrees of freedom the probability
    is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4). Equal differences other than 0 have p = 0.
    """
    mean, spread = mean_and_spread(differences)
    freedom = len(differences) - 1
    if spread == 0 or math.isnan(mean):
        return mean, spread, math.nan if math.isnan(mean) else float(mean == 0)
    theta = math.atan(abs(mean) / spread * math.sqrt(len(differences) / freedom))
    term, total = (math.cos(theta) if freedom % 2 else 1.0), 0.0
    for power in range(
        1 + freedom % 2, freedom, 2
    ):  # cos^1, cos^3 .. with 1, 2/3 ..; or cos^0, cos^2 .. with 1, 1/2 ..
        total += term
        term *= power / (power + 1) * math.cos(theta) ** 2
    inside = 2 / math.pi * (theta + math.sin(theta) * total) if freedom % 2 else math.sin(theta) * total
    return mean, spread, max(1 - inside, 0.0)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the sample standard deviation (NaN for a single value)."""
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else math.nan


def with_spread(pair: tuple[float, float]) -> str:
    """ "mean ± spread", the mean alone if there is no spread, or "-" if the mean is NaN."""
    mean, spread = pair
    if math.isnan(mean):
        return "-"
    return f"{mean:.4f}" if math.isnan(spread) else f"{mean:.4f} ± {spread:.4f}"


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
