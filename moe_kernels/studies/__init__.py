"""python -m moe_kernels study NAME: experiments of the papers that compare no trained models.

studies/<name>.py holds `class <Name>(Study)`, a frozen dataclass. Its fields are the options of the command line, as of
a recipe; `run` prints its table, and writes rows (CSV) and a picture to the folder of --out.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import io
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from moe_kernels.recipes import option
from moe_kernels.train import add_field, checkpoint, within

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Study:
    """Options of every study."""

    SIDES: ClassVar[tuple[str, ...]] = ()

    seed: int = option(0, "of everything random", low=0)
    threads: int = option(1, "of the CPU", low=1)

    def run(self, out: Path | None) -> None:
        """Does the work; prints a table, and writes to `out` where it is given."""
        raise NotImplementedError

    def print_title(self) -> None:
        """One line that says what is run, with which options."""
        values = ", ".join(f"{name} {_spelled(value)}" for name, value in dataclasses.asdict(self).items())
        print(f"{type(self).__module__.rpartition('.')[2]}: {values}\n")


def names() -> list[str]:
    """Every study of the package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def find(name: str) -> type[Study]:
    """The study class of studies/<name>.py; ValueError where there is none."""
    if name not in names():
        raise ValueError(f"there is no study {name!r}; there are {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    (study,) = (
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Study) and each.__module__ == module.__name__
    )
    return study


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> None:
    """Declares the options of the study that `words`, the command line after "study", begins with."""
    name = words[0] if words and not words[0].startswith("-") else names()[0]
    try:
        study = find(name)
    except ValueError as error:
        parser.error(str(error))
    parser.description = f"{sys.modules[study.__module__].__doc__}\nStudies: {', '.join(names())}."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("study", choices=names(), help="first of all; its options are its own")
    for field in dataclasses.fields(study):
        add_field(parser, field, study.SIDES)
    parser.add_argument("--out", type=Path, help="folder for rows and picture (default: none written)")


def run(args: argparse.Namespace) -> int:
    """0; 2 if it cannot start."""
    kind = find(args.study)
    values: dict[str, Any] = {field.name: getattr(args, field.name) for field in dataclasses.fields(kind)}
    several: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    study = kind(**values | several)
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


def write_rows(path: Path, rows: Rows) -> None:
    """Rows with the same names as CSV."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    checkpoint.write(path, buffer.getvalue())


def _spelled(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


__all__ = ["Rows", "Study", "add_arguments", "find", "names", "option", "run", "within", "write_rows"]
