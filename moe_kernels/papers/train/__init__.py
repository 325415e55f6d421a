"""python -m moe_kernels train RECIPE: trains the sides of a comparison, prints a table and writes files to --out.

A side is one of the models that the recipe compares. First the agreement check takes `check_steps` training steps on
the chosen backend and the same steps on the reference. Then, if `tune` has several learning rates, each side gets the
best one. Then every side trains with every seed. Sides train in turns: each up to its next evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

import torch

from moe_kernels import backends, info
from moe_kernels.papers import recipes
from moe_kernels.papers.data import load
from moe_kernels.papers.recipes import Recipe
from moe_kernels.papers.train import checkpoint
from moe_kernels.papers.train.agreement import Agreement, check_agreement, print_agreement
from moe_kernels.papers.train.comparison import Comparison, call
from moe_kernels.papers.train.grids import grid_picture
from moe_kernels.papers.train.lock import hold
from moe_kernels.papers.train.loop import Run
from moe_kernels.papers.train.report import differences, legend, picture, summarise, tables, write_json
from moe_kernels.papers.train.sweeps import pivot, sweep_picture
from moe_kernels.papers.train.trained import Trained, load_model

__all__ = ["Trained", "add_arguments", "add_field", "check_agreement", "load_model", "run", "within"]

if TYPE_CHECKING:
    from moe_kernels.papers.train.ranks import Ranks

DEFAULT = "comet"


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> None:
    """Declares the options of `run`.

    words: the command line after "train". Its first word is the recipe (default: DEFAULT); options differ by recipe.
    """
    name = words[0] if words and not words[0].startswith("-") else DEFAULT
    try:
        recipe = recipes.find(name)
    except ValueError as error:
        parser.error(str(error))
    module = sys.modules[recipe.__module__]
    described = [fill(" ".join(each.split()), info.WIDTH) for each in (module.__doc__ or "").split("\n\n")]
    lines = "\n".join(_line_of(each) for each in recipes.names())
    described += [f"Recipes (default: {DEFAULT}; train NAME --help has the options of each):", lines]
    parser.description = "\n\n".join(described)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    def check_recipe(text: str) -> str:
        if text != name:
            raise argparse.ArgumentTypeError(f"{text!r} must come before the options, as each recipe has its own")
        return text

    parser.add_argument(
        "recipe", nargs="?", type=check_recipe, default=name, help="name of the recipe, before its options"
    )
    for field in dataclasses.fields(recipe):
        add_field(parser, field, recipe.SIDES)
    positive_int = within(int, 1)
    parser.add_argument("--seeds", type=positive_int, default=1, help="number of seeds of each side (default: 1)")
    parser.add_argument("--every", type=within(int, 0), default=0, help="steps between evaluations (default: an epoch)")
    parser.add_argument(
        "--out", type=Path, help="folder for models, log, checkpoint, result and picture (default: none written)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument(
        "--backend", choices=backends.NAMES, help="backend of all operations (default: chosen automatically)"
    )
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.add_argument(
        "--threads",
        type=positive_int,
        help="threads of the CPU (default: torch's; 1 for digits, whose steps are too short for more)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for all numbers of the result")
    parser.add_argument(
        "--expert-parallel",
        type=positive_int,
        metavar="N",
        help="ranks of torchrun that share one copy of the experts, a divisor of all ranks (default: one process)",
    )
    parser.add_argument(
        "--rank-timeout",
        type=within(float, 1),
        metavar="S",
        help="seconds that a rank waits for the others before it fails (default: torch's)",
    )


def _line_of(name: str) -> str:
    """The first sentence of a recipe's file."""
    text = " ".join((sys.modules[recipes.find(name).__module__].__doc__ or "").split("\n\n")[0].split())
    return f"  {name:<14} {shorten(text, info.WIDTH - 17, placeholder=' ...')}"


def run(args: argparse.Namespace) -> int:
    """Runs the agreement check and the training, prints the table, and returns the exit status.

    0: success; 1: backend and reference disagree; 2: the run cannot start, or a file cannot be read or written; 3: a
    rank failed or did not answer in time; 130: interrupted in training.
    """
    threads, flushed = torch.get_num_threads(), _flushes_denormals()
    comparison = None
    with ExitStack() as stack:
        try:
            if args.backend:
                stack.enter_context(backends.use_backend(args.backend))
            if args.resume and args.out is None:
                raise ValueError("--resume needs --out, the folder of the checkpoint")
            if args.json:
                checkpoint.try_place(args.json)
            kind = recipes.find(args.recipe)
            recipe: Recipe = kind(**given(kind, args))
            device = _device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
            ranks = _ranks(args, device, stack)
            backend = backends.choose("kwta", None, torch.empty(0, device=device))
            if not args.data:
                (field,) = (each for each in dataclasses.fields(recipe) if each.name == "data")
                raise ValueError(f"{args.recipe} needs --data: {field.metadata['help']}")
            data = load(args.data)
            if not isinstance(data, recipe.ACCEPTS):
                raise ValueError(f"{args.recipe} needs {recipe.ACCEPTS.__name__}, but {args.data} has {data.name}")
            torch.set_num_threads(args.threads or (1 if args.data == "digits" else threads))
            # Entries of local search's soft permutation fall to 1e-40; CPUs are slow at such denormal numbers.
            torch.set_flush_denormal(True)
            splits = recipe.splits(data.to(device))
            make, on_first = (Run, call) if ranks is None else (ranks.run, ranks.on_first)
            if args.out:
                on_first(lambda: _enter_folder(args.out, stack))
            comparison = Comparison(recipe, splits, args.seeds, args.every, args.out, make, on_first)
            if args.resume:
                comparison.resume()
            if ranks is not None:
                ranks.wait()
            return _run(args, comparison, backend, ranks)
        except (ValueError, ImportError, OSError, backends.BackendError) as error:
            print(f"train: {_rank(args)}{error}", file=sys.stderr)
            return 2
        except RuntimeError as error:
            if not args.expert_parallel:
                raise
            traceback.print_exc()
            saved = args.out if comparison and comparison.saved else None
            print(f"train: {_rank(args)}{_rank_failure(saved, error)}", file=sys.stderr)
            return 3
        finally:
            torch.set_num_threads(threads)
            torch.set_flush_denormal(flushed)


def _ranks(args: argparse.Namespace, device: torch.device, stack: ExitStack) -> Ranks | None:
    """The ranks of a training under torchrun (only rank 0 prints); None in one process."""
    if not args.expert_parallel:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                "torchrun started several ranks: add --expert-parallel N, the number of ranks that share the experts"
            )
        return None
    init_ranks = importlib.import_module("moe_kernels.papers.train.ranks").init_ranks
    ranks = stack.enter_context(init_ranks(args.expert_parallel, device.type, args.rank_timeout))
    if ranks.rank:
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))  # noqa: SIM115
        args.json = None
    return ranks


def _enter_folder(folder: Path, stack: ExitStack) -> None:
    """Locks the folder until the end of `stack`, and removes what a killed run left there."""
    stack.enter_context(hold(folder))
    checkpoint.remove_temporary(folder)


def _rank(args: argparse.Namespace) -> str:
    """The beginning of a message: "rank N: " with --expert-parallel, else nothing."""
    return f"rank {os.environ.get('RANK', '?')}: " if args.expert_parallel else ""


def _rank_failure(out: Path | None, error: RuntimeError) -> str:
    """A message: why this rank ends, and how to continue if there is a checkpoint in `out`."""
    first = str(error).partition("\n")[0]
    hint = f"; --resume continues from {out / 'checkpoint.pt'}" if out else ""
    return f"another rank failed or did not answer in time, or this one did: {first}{hint}"


def _device(name: str) -> torch.device:
    """The torch device; ValueError if it is unknown, missing here, or cannot compute, such as meta."""
    try:
        torch.zeros((), device=name).item()  # fails on the meta device
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: torch was built without CUDA
        raise ValueError(f"--device {name}: {str(error).partition(chr(10))[0]}") from error


def _flushes_denormals() -> bool:
    """Whether torch flushes denormal numbers to zero. torch has no function that tells, so one is multiplied."""
    return (torch.tensor(1e-40) * 1).item() == 0


def _run(args: argparse.Namespace, comparison: Comparison, backend: str, ranks: Ranks | None) -> int:
    recipe, data = comparison.recipe, comparison.data
    scale = ("epochs", "steps", "rows", "eval_rows", "data")
    options = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in scale}
    print(fill(f"{args.recipe}: {settings(options)}", info.WIDTH, subsequent_indent="  "))
    print(fill(_scale(comparison), info.WIDTH, subsequent_indent="  "))
    several = "" if ranks is None else f", {ranks.size} ranks; {args.expert_parallel} share the experts"
    print(f"{comparison.device.type}, {torch.get_num_threads()} thread(s), backend {backend}{several}\n")
    agreements = _check(comparison, backend, ranks)
    try:
        with _progress(comparison.total_steps) as tick:
            comparison.train(tick, print)
    except KeyboardInterrupt:
        if comparison.saved:
            print(f"interrupted; --resume continues from {comparison.checkpoint}")
        else:
            print("interrupted; nothing was saved yet" if args.out else "interrupted")
        return 130
    histories = comparison.histories()
    summaries = summarise(histories, recipe.METRIC, recipe.columns())
    print(f"\n{tables(summaries, recipe.METRIC, recipe.batch_size)}")
    print(_peak_memory(comparison.data.train[0].device))
    print(legend(summaries))
    for further in (differences(histories, recipe.METRIC), pivot(recipe, summaries)):
        if further:
            print(f"\n{further}")
    status = 0 if all(each.passed for each in agreements.values()) else 1
    result = {
        "recipe": args.recipe,
        "sources": comparison.sources,
        "settings": dataclasses.asdict(recipe),
        "data": str(data.source),
        "machine": info.machine(),
        "threads": torch.get_num_threads(),
        "backend": backend,
        "agreement": {
            name: {"passed": each.passed, "steps": [dataclasses.asdict(step) for step in each.steps]}
            for name, each in agreements.items()
        },
        "summary": [dataclasses.asdict(each) for each in summaries],
        "runs": [dataclasses.asdict(each) for each in histories],
        "status": status,
    }
    title = f"{args.recipe} on {data.source.name}"

    def write() -> None:
        if args.out:
            write_json(args.out / "result.json", result)
            drawn = picture(args.out / "plot.png", histories, recipe.METRIC, title)
            sweep_picture(args.out / "sweep.png", recipe, summaries, title)
            grid_picture(args.out / "grid.png", histories, recipe.METRIC, title)
            missing = "" if drawn else "; no picture: pip install moe_kernels[bench]"
            print(f"models, log, checkpoint, result{' and picture' * drawn} in {args.out}{missing}")
        if args.json:  # last, so that the folder is complete even if this cannot be written
            write_json(args.json, result)

    comparison.on_first(write)
    return status


def _peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"\npeak memory: {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB of tensors on the GPU"
    return f"\npeak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB of the process"


def _check(comparison: Comparison, backend: str, ranks: Ranks | None) -> dict[str, Agreement]:
    """Checks the agreement of every variant with one process on the reference; returns the results by variant."""
    recipe, found = comparison.recipe, {}
    if ranks is None and backend == "reference":
        print("agreement: nothing to compare, since the backend is the reference itself\n")
        return {}
    for name, variant in comparison.variants.items() if recipe.check_steps else ():
        if ranks is not None:
            found[name] = ranks.check(variant, comparison.data)
        else:
            found[name] = check_agreement(*comparison.pair(variant), recipe.check_steps)
        print_agreement(name, found[name], backend + ("" if ranks is None else f" and {ranks.size} ranks"))
    return found


def given(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """The values of a dataclass's fields from the command line.

    An option that takes several values becomes a tuple, but a swept option with a single value becomes that value.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = getattr(args, field.name)
        several = isinstance(value, list) and not (field.metadata["sweep"] and len(value) == 1)
        values[field.name] = tuple(value) if several else value[0] if isinstance(value, list) else value
    return values


def settings(options: Mapping[str, Any]) -> str:
    """Options and their values in one line, without options that are an empty tuple."""
    pairs = options.items()
    return ", ".join(f"{k} {' '.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in pairs if v != ())


def _scale(comparison: Comparison) -> str:
    recipe, data = comparison.recipe, comparison.data
    train, test = len(data.train[0]), len(data.test[0])
    epoch = math.ceil(train / recipe.batch_size)
    steps = recipe.steps or recipe.epochs * epoch
    # --rows may take only some of the rows of a set of ratings.
    all_train = len(data.source.train[0]) if hasattr(data.source, "num_users") else train
    all_test = comparison.test_samples
    parts = [f"{train} training samples" + (f" of {all_train}" if all_train > train else "")]
    if data.valid is not None:
        parts.append(f"{len(data.valid[0])} validation samples")
    parts.append(f"{test} test samples" + (f" of {all_test}" if all_test > test else ""))
    length = f"{steps} steps of {recipe.batch_size}" + (f" ({steps / epoch:.3g} epochs)" if steps else "")
    return f"{data.source.name}: {', '.join(parts)}; {length} a side and seed"


def add_field(parser: argparse.ArgumentParser, field: dataclasses.Field, sides: tuple[str, ...]) -> None:
    """Declares the command line option of a field made by recipes.option."""
    name = f"--{field.name.replace('_', '-')}"
    default: Any = field.default
    several = isinstance(default, tuple)
    shown = " ".join(map(str, default)) if several else default
    text = f"{field.metadata['help']} (default: {'none' if shown == '' else shown})".replace("%", "%%")
    if isinstance(default, bool):
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=text)
        return
    kind: Any = type(default[0]) if several and default else float if several else type(default)
    if kind is not str:
        kind = within(kind, *(field.metadata[end] for end in ("low", "high")))
    choices = sides if field.name == "sides" else field.metadata["choices"]
    nargs = "+" if several or field.metadata["sweep"] else None
    text += "; several values are compared" * field.metadata["sweep"]
    listed = choices and len(",".join(choices)) > 20  # too long for the line of usage
    metavar = field.name.upper() if listed else None
    text = f"of {', '.join(choices)}; {text}" if listed else text
    parser.add_argument(name, type=kind, default=default, choices=choices, nargs=nargs, help=text, metavar=metavar)


def within(kind: type, low: float | None, high: float | None = None) -> Callable[[str], Any]:
    """A type for argparse: finite numbers of type `kind` from low to high; None: no limit."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not -math.inf < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be finite, got {text}")
        if low is not None and value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"must be at most {high}, got {text}")
        return value

    parse.__name__ = kind.__name__  # for argparse's "invalid int value"
    return parse


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    """A progress bar in a terminal if rich is installed, else nothing."""
    if not (sys.stdout.isatty() and importlib.util.find_spec("rich")):
        yield lambda: None
        return
    with importlib.import_module("rich.progress").Progress(transient=True) as bar:
        task = bar.add_task("training", total=steps)
        yield lambda: bar.advance(task)
