"""python -m moe_kernels study NAME: experiments of the papers, or on their claims, for which `train` is not enough.

studies/<name>.py defines one subclass of Study, a frozen dataclass. Its fields are the options of the command line.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from moe_kernels.papers import data, recipes, sources
from moe_kernels.papers.recipes import option
from moe_kernels.papers.train import add_field, checkpoint, given, settings

Rows = Sequence[Mapping[str, Any]]
Kind = TypeVar("Kind", bound=data.Dataset)


@dataclasses.dataclass(frozen=True)
class Study:
    SIDES: ClassVar[tuple[str, ...]] = ()

    seed: int = option(0, "seed of all random numbers", low=0)
    threads: int = option(1, "threads of the CPU", low=1)

    def run(self, out: Path | None) -> None:
        """Runs the experiment, prints a table, and writes files to `out` unless it is None."""
        raise NotImplementedError

    def load(self, path: str, kind: type[Kind]) -> Kind:
        """The data set at `path`; ValueError if it is of another kind."""
        found = data.load(path)
        if not isinstance(found, kind):
            raise ValueError(f"{self.name} needs {kind.__name__}, but {path} has {found.name}")
        return found

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def write_rows(self, out: Path, rows: Rows) -> None:
        """Writes rows, which have the same columns, to NAME.csv in `out`, with the hash of the study's code."""
        made = {"sources": sources.digest("studies", self.name)}
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, [*rows[0], *made], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **made} for row in rows)
        checkpoint.write(out / f"{self.name}.csv", buffer.getvalue())

    def print_title(self) -> None:
        print(f"{self.name}: {settings(dataclasses.asdict(self))}\n")


def names() -> list[str]:
    return recipes.names(__path__)


def find(name: str) -> type[Study]:
    """The study class of studies/<name>.py; ValueError for an unknown name."""
    return recipes.find_class(__name__, "study", name, Study)


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> None:
    """Declares the options of the study that is the first of `words`, the command line after "study".

    If there is no word, or the first is an option such as --help, the study is the first of `names`.
    """
    name = words[0] if words and not words[0].startswith("-") else names()[0]
    try:
        study = find(name)
    except ValueError as error:
        parser.error(str(error))
    parser.description = f"{sys.modules[study.__module__].__doc__}\nStudies: {', '.join(names())}."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("study", choices=names(), help="name of the study; options come after it")
    for field in dataclasses.fields(study):
        add_field(parser, field, study.SIDES)
    parser.add_argument("--out", type=Path, help="folder for rows and picture (default: none written)")


def run(args: argparse.Namespace) -> int:
    """Runs a study; returns the exit status: 0, or 2 if an option or a file is wrong or a package is missing."""
    study = find(args.study)(**given(find(args.study), args))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(study.threads)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
        study.print_title()
        study.run(args.out)
    except (ValueError, ImportError, OSError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    finally:
        torch.set_num_threads(threads)
    return 0


def line_of(row: Mapping[str, Any]) -> str:
    """The row in one line, without the values that are NaN."""
    return ", ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if v == v)


__all__ = ["Rows", "Study", "add_arguments", "find", "line_of", "names", "option", "run"]
