"""python -m moe_kernels.papers.results FILE ...: the figures of stored results, recomputed from every evaluation.

A file is the log.csv of `train --out`, or several of them joined (--join), under the name NAME.csv or NAME-WHAT.csv;
NAME is the recipe or study. For each side of a recipe it prints mean and spread over the seeds of every column, at the
evaluation that the recipe reports, and the paired differences of the sides, with Student's p. --columns A B compares
two columns of the same side and seed instead. --picture draws the curves over values of an option that evaluations
alone use, else a panel of learning curves for each combination of swept values.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_kernels import info
from moe_kernels.papers import recipes, sources
from moe_kernels.papers.train import checkpoint
from moe_kernels.papers.train.grids import grid_picture
from moe_kernels.papers.train.plotting import write_picture
from moe_kernels.papers.train.report import History, differences, mean_and_spread, paired, with_spread

FOLDER = sources.ROOT / "bench" / "results" / "recipes"

# Columns of a log that say of which run and moment a line is, or how fast the machine was.
PLACES = ("side", "seed", "stage", "lr", "step", "epoch", "seconds", "sources")
DRAWN = ("step", "epoch")  # of these, what pictures need
TIMES = {"seconds", "competition time", "sources"}  # what differs in a repetition
CURVE = re.compile(r"test (\w+) (.+) at ([\d.]+)")


def recipe_of(path: Path) -> str:
    """The recipe or study that a file is named after."""
    return path.stem.partition("-")[0]


def state(path: Path) -> str:
    """Whether the code of a result is the present one: "fresh", or why not."""
    name = recipe_of(path)
    kind = "recipes" if name in recipes.names() else "studies"
    found = [line.get("sources", "") for line in _lines(path)[1]]
    now = sources.digest(kind, name)
    old = [each for each in found if each != now]
    if not old:
        return "fresh"
    if not any(found):
        return "made before results had a hash of their code"
    return f"stale: {len(old)} of {len(found)} evaluations are of other code"


def states(folder: Path = FOLDER) -> list[tuple[str, str]]:
    """(name, state) of every file."""
    return [(path.name, state(path)) for path in sorted(folder.glob("*.csv"))]


def read(path: Path) -> list[History]:
    """The final runs of a recipe's file. The chosen evaluation is the best by the recipe's metric on the validation
    part, if the file has it, else the last."""
    recipe = recipes.find(recipe_of(path))
    sign, valid = 1 if recipe.HIGHER_IS_BETTER else -1, f"valid {recipe.METRIC}"
    runs: dict[tuple[str, str], History] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["stage"] == "final":
                key = line["side"], line["seed"]
                run = runs.setdefault(key, History(key[0], int(key[1]), float(line["lr"]), "final", []))
                kept = (name for name in line if line[name] and (name in DRAWN or name not in PLACES))
                run.rows.append({name: float(line[name]) for name in kept})
                run.terms.append({})
    for run in runs.values():
        scores = [sign * row[valid] for row in run.rows if valid in row]
        run.chosen = scores.index(max(scores)) if len(scores) == len(run.rows) else len(run.rows) - 1
    return list(runs.values())


def table(histories: Sequence[History]) -> str:
    """Mean and spread over the seeds of every column, a row each, for every side."""
    sides = list(dict.fromkeys(each.side for each in histories))
    names = [name for name in dict.fromkeys(name for each in histories for name in each.result) if name not in DRAWN]
    rows = []
    for name in names:
        values = ([each.result.get(name, math.nan) for each in histories if each.side == side] for side in sides)
        rows.append((name, *(with_spread(mean_and_spread(each)) for each in values)))
    counts = (str(sum(each.side == side for each in histories)) for side in sides)
    return info.table(("", *sides), [("seeds", *counts), *rows])


def between_columns(histories: Sequence[History], first: str, second: str) -> str:
    """The paired difference of two columns of the same runs, a row for each side that has both."""
    rows = []
    for side in dict.fromkeys(each.side for each in histories):
        runs = [each.result for each in histories if each.side == side and {first, second} <= each.result.keys()]
        if len(runs) > 1:
            mean, spread, p = paired([row[first] - row[second] for row in runs])
            rows.append((side, len(runs), with_spread((mean, spread)), f"{p:.2g}"))
    return info.table((f"{first} - {second}", "seeds", "mean ± spread", "p, paired t-test"), rows)


def curves(histories: Sequence[History]) -> dict[str, list[tuple[float, float, float]]]:
    """Side and title -> points (value, mean, spread) of the columns "test MEASURE TITLE at VALUE"."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for side in dict.fromkeys(each.side for each in histories):
        runs = [each.result for each in histories if each.side == side]
        for name in runs[0]:
            if match := CURVE.fullmatch(name):
                point = float(match[3]), *mean_and_spread([row[name] for row in runs])
                found.setdefault(f"{side}, {match[2]}", []).append(point)
    return {label: sorted(points) for label, points in found.items()}


def draw(path: Path, histories: Sequence[History], title: str) -> bool:
    """Draws `curves`, with bars of the spread; False without matplotlib, or if there are none."""
    lines = curves(histories)

    def draw_lines(axes: Any) -> None:
        for label, points in lines.items():
            at, means, spreads = zip(*points, strict=True)
            axes[0, 0].errorbar(
                at, means, yerr=[0 if math.isnan(each) else each for each in spreads], marker="o", label=label
            )
        axes[0, 0].set(xlabel="value in evaluation", title=title)
        axes[0, 0].legend(fontsize="small")

    return bool(lines) and write_picture(path, draw_lines, figsize=(6.5, 4.5))


def join(paths: Sequence[Path], out: Path) -> None:
    """Writes the lines of several logs into one file; a later log replaces runs of the same side, seed and stage."""
    runs: dict[tuple[str, ...], list[dict[str, str]]] = {}
    columns: dict[str, None] = {}
    for path in paths:
        found, lines = _lines(path)
        columns |= dict.fromkeys(found)
        keys = [_place(line)[:-1] for line in lines]
        for key in dict.fromkeys(keys):
            runs[key] = [line for line, own in zip(lines, keys, strict=True) if own == key]
    order = [*(name for name in columns if name != "sources"), *(["sources"] if "sources" in columns else [])]
    _write(out, order, [line for lines in runs.values() for line in lines])


def renew(path: Path, logs: Sequence[Path]) -> int:
    """Gives runs of a file the hash of the present code, which made the logs: shorter repetitions of these runs.

    Every line of a repetition must have, for the same side, seed, stage and step, the numbers that the file has, to the
    last digit (but not times): the training is deterministic, so the change of the code has not changed its meaning up
    to there. Runs without a repetition keep their hash. Returns the number of renewed lines.

    Raises:
        ValueError: a number differs, or a log is not of the present code, or has a line that the file lacks.
    """
    now = sources.digest("recipes", recipe_of(path))
    columns, stored = _lines(path)
    places = {_place(line): line for line in stored}
    repeated = set()
    for log in logs:
        for line in _lines(log)[1]:
            known = places.get(_place(line))
            if line.get("sources") != now or known is None:
                why = "is not of the present code" if known else f"is not in {path.name}"
                raise ValueError(f"{log}: step {line['step']} of {line['side']}, seed {line['seed']}, {why}")
            for name in line.keys() - TIMES:
                if line[name] != (known.get(name) or ""):
                    differ = f"{known.get(name)!r} in {path.name}, {line[name]!r} now"
                    raise ValueError(
                        f"{log}: {name} of {line['side']}, seed {line['seed']}, step {line['step']}: {differ}"
                    )
            repeated.add(_place(line)[:-1])
    renewed = [line for line in stored if _place(line)[:-1] in repeated]
    for line in renewed:
        line["sources"] = now
    order = [*(name for name in columns if name != "sources"), "sources"]
    _write(path, order, stored)
    return len(renewed)


def _place(line: dict[str, str]) -> tuple[str, ...]:
    return tuple(line[name] for name in ("side", "seed", "stage", "lr", "step"))


def _lines(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the lines of a file."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        lines = list(reader)
    return list(reader.fieldnames or ()), lines


def _write(path: Path, columns: Sequence[str], lines: Sequence[dict[str, str]]) -> None:
    rows = [[line.get(name) or "" for name in columns] for line in lines]
    checkpoint.write(path, "\n".join(",".join(row) for row in [columns, *rows]) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m moe_kernels.papers.results", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help=f"files of results (default: all of {FOLDER.name})")
    parser.add_argument("--measure", help="measure to compare between sides (default: the recipe's metric)")
    parser.add_argument("--columns", nargs=2, metavar=("A", "B"), help="two columns to compare within each side")
    parser.add_argument("--picture", type=Path, help="file for a picture")
    parser.add_argument("--join", type=Path, metavar="FILE", help="write the lines of all files to this one")
    parser.add_argument(
        "--renew", nargs="+", type=Path, metavar="LOG", help="logs of shorter repetitions: the one file gets their hash"
    )
    args = parser.parse_args(words)
    try:
        if args.renew:
            (path,) = args.files
            print(f"{path.name}: {renew(path, args.renew)} evaluations are of the present code; {state(path)}")
            return 0
        if args.join:
            join(args.files, args.join)
            return 0
        for path in args.files or sorted(FOLDER.glob("*.csv")):
            print(f"{path.name}: {state(path)}\n")
            if recipe_of(path) in recipes.names():
                histories = read(path)
                print(f"{table(histories)}\n")
                measure = args.measure or recipes.find(recipe_of(path)).METRIC
                compared = (
                    between_columns(histories, *args.columns) if args.columns else differences(histories, measure)
                )
                print(f"{compared}\n")
                if args.picture and not draw(args.picture, histories, path.stem):
                    grid_picture(args.picture, histories, measure, path.stem)
    except (OSError, ValueError, KeyError) as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
