"""The commands of `python -m bench`, except layer and predict, which are in layer_command.py and predict_command.py."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench import compare, document, exchange_model, ledger, measure, merging, report, tiles
from bench import profile as profiling
from bench import transformers as models
from bench.console import WIDTH, console, print_lines, print_table, sizes, status
from bench.console import known_words as _known
from bench.console import words as _words
from bench.entry import DIRECTIONS
from bench.exchange_model import Machine
from bench.layer_command import layer_command
from bench.peers import known as every_peer
from bench.predict_command import predict_command
from bench.registry import ENTRIES
from bench.runs import Run
from bench.shapes import ROUTINGS
from moe_kernels import info
from moe_kernels.backends import BackendError
from moe_kernels.verify import KERNELS, OPERATIONS, idle

app = typer.Typer(
    help="Times the operations beside other implementations (peers) and the machine's limits; writes the results.",
    add_completion=False,
    no_args_is_help=True,
)
app.command("layer")(layer_command)
app.command("predict")(predict_command)

OUT = ledger.ROOT / "bench" / "out"
DRAWING = "drawing the report's pictures: up to half a minute"


class Shapes(str, Enum):
    quick = "quick"
    papers = "papers"
    llm = "llm"


SEVERAL = "Repeat the option, or separate values with commas. Default: all."
DTYPES = ("float32", "bfloat16", "float16")
Ops = Annotated[list[str] | None, typer.Option("--op", help=f"Operations. {SEVERAL}")]
Backends = Annotated[list[str] | None, typer.Option("--backend", help=f"{', '.join(KERNELS)}. {SEVERAL}")]
Dtypes = Annotated[list[str], typer.Option("--dtype", help=f"To measure: {', '.join(DTYPES)}; several with commas.")]
Routings = Annotated[list[str] | None, typer.Option("--routing", help=f"{', '.join(ROUTINGS)}. {SEVERAL}")]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peers", help=f"Parts of the peers' names, such as torch or pot; none: no peers. {SEVERAL}"),
]
Curves = Annotated[bool, typer.Option(help="Also measure every operation at several values of one size.")]
Threads = Annotated[
    list[int] | None,
    typer.Option("--threads", help="CPU threads; repeat the option for several. Default: 1 and torch's number."),
]
Seconds = Annotated[float, typer.Option("--seconds", help="Sampling time of one measurement; slow calls take more.")]
SizeOf = Annotated[
    str | None,
    typer.Option("--size", help="Sizes instead of a set's, such as T=4096,D=256; others are those of its first shape."),
]
ShapeSet = Annotated[Shapes, typer.Option("--shapes", help="The set of shapes.")]


@app.command("run")
def run_command(
    op: Ops = None,
    shapes: ShapeSet = Shapes.quick,
    routing: Routings = None,
    backend: Backends = None,
    peers: Peers = None,
    dtype: Dtypes = ["float32", "bfloat16"],  # noqa: B006 typer does not change the list
    threads: Threads = None,
    seconds: Seconds = 0.4,
    curves: Curves = True,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Time to verify and measure; measuring gets at least a third of it.")
    ] = None,
    size: SizeOf = None,
    out: Annotated[Path, typer.Option(help="Where result and report go.")] = OUT,
) -> None:
    """Verifies the kernels that run here, measures correct ones; writes a result, report.md and report.html.

    With --minutes the operations take turns, and the report lists what there was no time to measure. The status is 1 if
    a kernel is wrong, and 2 if a given --backend cannot run here.
    """
    until = time.monotonic() + 60 * (minutes or math.inf)
    request = _request(shapes, routing, peers, dtype, threads, curves and not size)
    ops, kernels = _operations(op), _backends(backend)  # before a run begins a file
    run = _begin(out, replace(request, size=sizes(size)), seconds, until)
    run.verify(ops, kernels)
    _exit_if_idle(run, backend)
    run.until = max(until, time.monotonic() + 60 * (minutes or math.inf) / 3)
    run.measure()
    with status(DRAWING):
        paths = document.write([run.result()], out)
    run.print_paths(paths)
    _exit_if_failed(run)


@app.command("verify")
def verify_command(
    op: Ops = None,
    backend: Backends = None,
    dtype: Dtypes = ["float32", "bfloat16", "float16"],  # noqa: B006 typer does not change the list
    shapes: ShapeSet = Shapes.quick,
    seconds: Seconds = 0.4,
    out: Annotated[Path, typer.Option(help="Where the result goes.")] = ledger.RESULTS,
) -> None:
    """Verifies kernels, checks that repeated calls give the same bits, and measures.

    On a GPU it also checks that the host does not wait, and runs the test suite and compute-sanitizer. Writes a
    result, by default into bench/results, which `report`, README.md and the documentation are made from.
    """
    ops, kernels = _operations(op), _backends(backend)
    run = _begin(out, _request(shapes, None, None, dtype, None, True), seconds)
    if not torch.cuda.is_available():
        console.print("No GPU here: no kernel of Triton or CUDA is checked on a GPU.")
    run.verify(ops, kernels)
    _exit_if_idle(run, backend)
    run.check_on_cpu()
    run.measure()
    run.prove(True)
    run.print_checks()
    run.print_paths()
    _exit_if_failed(run)


@app.command("gpu")
def gpu_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer shapes and cases, no repeated calls, no proof; in four minutes.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Time to verify, measure and check. Default: 8.5, with --quick 4.")
    ] = None,
    op: Ops = None,
    backend: Backends = None,
    figures: Annotated[bool, typer.Option(help="Measure.")] = True,
    proof: Annotated[
        bool | None, typer.Option(help="Run the test suite and compute-sanitizer. Default: unless --quick.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where result and report go.")] = ledger.RESULTS,
) -> None:
    """Verifies and measures the GPU kernels; writes a result of its own, and the report of all results in --out.

    Within bench/results it also updates the table of README.md. The report lists what there was no time to measure.
    Needs a GPU.
    """
    if not torch.cuda.is_available():
        console.print("No GPU that torch can use: `python -m bench run` measures the CPU.")
        raise typer.Exit(2)
    until = time.monotonic() + 60 * (minutes or (4 if quick else 8.5))  # without the build and the report
    request = _request(Shapes.quick if quick else Shapes.papers, None, None, ["float32,bfloat16"], [1], not quick)
    ops, kernels = _operations(op), _backends(backend) or tuple(reversed(ledger.GPU_BACKENDS))
    run = _begin(out, replace(request, first="aims"), 0.2 if quick else 0.4, until)
    proof = not quick if proof is None else proof
    try:
        run.verify(ops, kernels, quick, 0.5)
        if figures:
            run.measure(0.6 if proof else 1.0)
        run.prove(proof)
        run.print_checks()
    finally:
        run.write()
        paths = document.write(merging.read(out), out)
        if out.resolve() == ledger.RESULTS:
            report.README.write_text(report.rendered(report.README.read_text(), merging.read()))
        run.print_paths(paths)
    _exit_if_failed(run)


@app.command("profile")
def profile_command(
    op: Annotated[str, typer.Option("--op", help="The operation.")],
    backend: Annotated[str | None, typer.Option("--backend", help="Default: the first that runs here.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help=", ".join(DTYPES))] = "float32",
    direction: Annotated[str, typer.Option("--direction", help=", ".join(DIRECTIONS))] = "training",
    shapes: ShapeSet = Shapes.quick,
    shape: Annotated[int, typer.Option("--shape", min=0, help="Index of the shape in its set.")] = 0,
    size: SizeOf = None,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads.")] = 1,
    tools: Annotated[bool, typer.Option(help="On a GPU also run Nsight Compute and proton, if installed.")] = True,
    out: Annotated[Path, typer.Option(help="Where the trace goes.")] = OUT,
) -> None:
    """Traces a call; prints each kernel's share of the time, and its time as a multiple of the call's least time."""
    _known("--op", (op,), ENTRIES)
    _known("--dtype", (dtype,), DTYPES)
    _known("--direction", (direction,), DIRECTIONS)
    job, reason = profiling.job_of(op, backend, dtype, direction, shapes.value, shape, threads)
    if job is None:
        raise typer.BadParameter(reason)
    if size:
        job = replace(job, shape=(measure.sized([job.shape], sizes(size)) or [job.shape])[0])
    found = profiling.profile(job, out)
    lines = []
    for each in found.lines:
        launches = "-" if each.launches is None else f"{each.launches:g}"
        lines.append((each.name, launches, f"{each.us:.3g}", f"{each.share:.0%}", f"x{each.floors:.2f}"))
    print_table(str(job), ("kernel", "launches a call", "us", "share", "floors"), lines)
    console.print(
        f"the floor is {found.floor_us:.4g} us, {found.floor_us / found.us:.0%} of the {found.us:.4g} us of the call"
    )
    console.print(f"trace {found.trace}", soft_wrap=True)
    if tools:
        same_options = [f"--op={op}", f"--backend={job.backends[0]}", f"--dtype={dtype}", f"--direction={direction}"]
        same_options += [
            f"--shapes={shapes.value}",
            f"--shape={shape}",
            *([f"--size={size}"] if size else []),
            f"--threads={threads}",
            f"--out={out}",
        ]
        for name, word in profiling.tools(job, same_options, out).items():
            console.print(f"{name}: {word}", soft_wrap=True)


@app.command("tiles")
def tiles_command(
    out: Annotated[Path, typer.Option(help="Where the file of tiles goes, with its figures beside it.")] = OUT,
) -> None:
    """Times candidate tiles of Triton's grouped products, for minutes, and writes the fastest. Needs a GPU.

    MOE_KERNELS_TILES names such a file to every process that is to take these tiles.
    """
    if not torch.cuda.is_available():
        console.print("No GPU that torch can use.")
        raise typer.Exit(2)
    device, found = torch.cuda.get_device_name(), list[tiles.Trial]()
    path = ledger.free_path(out, f"tiles-{device}", ".json")
    for each in tiles.sweep():
        if isinstance(each, str):
            console.print(f"failed: {each}", soft_wrap=True)
            continue
        found += each
        tiles.write(path, device, found)
        path.with_suffix(".csv").write_text("".join(f"{','.join(map(str, trial))}\n" for trial in found))
        rows = [(trial.kernel, trial.size_class, str(trial.tiles), f"{trial.ms:.4g}") for trial in each]
        print_table("", ("kernel", "class", "tiles", "ms of an expert MLP"), rows)
    console.print(f"tiles {path}: MOE_KERNELS_TILES={path}", soft_wrap=True)


@app.command("transformers")
def transformers_command(
    seconds: Annotated[float, typer.Option("--seconds", help="Sampling time of each shape and mode.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Where transformers-<UTC date and time>.csv goes.")] = OUT,
) -> None:
    """Times experts of transformers in prefill, decode and training, with our kernels and transformers' own.

    Each figure is written as soon as it is measured. The status is 1 if our kernels failed on a shape.
    """
    reason = models.missing()
    if reason:
        console.print(reason, soft_wrap=True)
        raise typer.Exit(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine, path = models.machine(device), models.new_file(out)
    console.print(f"{machine[0]}, transformers {machine[1]}, torch {machine[2]}; figures go to {path}", soft_wrap=True)
    found = []
    with status("measuring"):
        for figure in models.run(seconds, device):
            models.append(path, figure, machine)
            console.print(models.line(figure), highlight=False, markup=False, width=WIDTH)
            found.append(figure)
    cells = list(map(models.cells, found))
    print_table(f"experts of transformers, {device}", models.HEADER[: len(cells[0])], cells)
    raise typer.Exit(1 if any(figure["us"] is None for figure in found) else 0)


@app.command("report")
def report_command(
    results: Annotated[list[Path] | None, typer.Argument(help="JSON files. Default: those of bench/results.")] = None,
    out: Annotated[Path, typer.Option(help="Where report.md and report.html go.")] = OUT,
    readme: Annotated[bool, typer.Option("--readme", help="Only update README.md, from bench/results.")] = False,
) -> None:
    """Writes report.md and report.html; prints the ledger and ratios to PyTorch. With --readme: updates README.md."""
    if readme:
        from bench import plot  # imports matplotlib

        found = merging.read()
        report.README.write_text(report.rendered(report.README.read_text(), found))
        measured = [each for each in found if any(entry["figures"] for entry in each["entries"])]
        if measured:  # one of a GPU before one of a CPU
            newest = max(measured, key=lambda each: (bool(each["gpu"]), each["date"]))
            (ledger.ROOT / "docs" / "measured.svg").write_bytes(plot.speedups(newest))
        print("README.md and docs/measured.svg rewritten")
        return
    found = merging.merged(map(_result, results)) if results else merging.read()
    with status(DRAWING):
        text, html = document.write(found, out)
    print_table("", report.OPERATIONS, _plain(report.operation_rows(found)), width=WIDTH)
    for device, title, rows, missing in report.measured_tables(found):
        print_table(f"{device}{title}", report.MEASURED, _plain(rows), width=WIDTH)
        print_lines([missing] if missing else [])
    print_lines([f"report {text}, with pictures {html}"])


def _plain(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """Cells of Markdown as text for a terminal."""
    return [[cell.replace("`", "") for cell in row] for row in rows]


@app.command("compare")
def compare_command(
    before: Annotated[Path, typer.Argument(help="A result: the JSON of an earlier run.")],
    after: Annotated[Path, typer.Argument(help="A result of a later run on the same device.")],
    tolerance: Annotated[float, typer.Option(help="Allowed change; 0.2 allows 1.2 times as long.")] = 0.2,
) -> None:
    """Lists the calls that became slower or faster beyond the tolerance; the status is 1 if any became slower."""
    old, new = map(_result, (before, after))
    if old["device"] != new["device"]:
        raise typer.BadParameter(f"expected two results of one device; got {old['device']} and {new['device']}")
    found = compare.changes(old, new)
    notable = [each for each in found if not 1 / (1 + tolerance) <= each.slowdown <= 1 + tolerance]
    rows = [(*each.figure, f"{each.before:.3g}", f"{each.after:.3g}", f"x{each.slowdown:.2f}") for each in notable]
    print_table(f"{len(notable)} of {len(found)} figures changed", (*compare.KEY, "before", "after", "takes"), rows)
    raise typer.Exit(1 if any(each.slowdown > 1 for each in notable) else 0)


def _result(path: Path) -> ledger.Result:
    try:
        return ledger.load(path)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise typer.BadParameter(f"{path} is not a result: expected the JSON that `bench run` writes") from None


def _describe_machine() -> None:
    facts = info.machine()
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in facts["gpus"]) or "none"
    console.print(f"CPU {facts['cpu']}, {facts['cores']} cores, {facts['isa']}; GPU {gpus}; driver {facts['driver']}")
    console.print(f"Python {facts['python']}, torch {facts['torch']}, Triton {facts['triton']}")


def _request(
    shapes: Shapes,
    routing: list[str] | None,
    peers: list[str] | None,
    dtype: list[str],
    threads: list[int] | None,
    curves: bool,
) -> measure.Request:
    wanted = _words(peers)
    names = sorted(every_peer(ENTRIES))
    for part in wanted:
        if part != "none" and not any(part.lower() in name.lower() for name in names):
            raise typer.BadParameter(f"--peers must be none or part of one of {', '.join(names)}; got {part!r}")
    return measure.Request(
        shapes=shapes.value,
        dtypes=_known("--dtype", _words(dtype), DTYPES),
        threads=tuple(threads or sorted({1, torch.get_num_threads()})),
        routings=_known("--routing", _words(routing), ROUTINGS) or ROUTINGS,
        peers=None if not wanted else tuple(part for part in wanted if part != "none"),
        curves=curves,
    )


def _operations(op: list[str] | None) -> tuple[str, ...]:
    return _known("--op", _words(op), OPERATIONS)


def _backends(backend: list[str] | None) -> tuple[str, ...]:
    return _known("--backend", _words(backend), KERNELS)


def _begin(out: Path, request: measure.Request, seconds: float, until: float = math.inf) -> Run:
    _describe_machine()
    return Run(out, request, seconds, until)


def _exit_if_idle(run: Run, backends: list[str] | None) -> None:
    """Exits with status 2 if a backend in `backends` ran nothing: an empty table would look like a result."""
    why = idle(_words(backends), list(run.rows))
    if why:
        run.path.unlink()
        console.print(why, soft_wrap=True)
        raise typer.Exit(2)


def _exit_if_failed(run: Run) -> None:
    if run.failed:
        raise typer.Exit(1)


@app.command("exchange")
def exchange_command(
    ranks: Annotated[list[int], typer.Option(min=1, help="Numbers of processes.")] = [1, 2, 4],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="Time for each number of ranks; 0: only predict.")] = 10.0,
    size: Annotated[
        str, typer.Option(help="To measure: tokens of all ranks, model and hidden width, experts, choices.")
    ] = ("2048,256,512,16,2"),
    predict: Annotated[list[int], typer.Option(min=1, help="Numbers of ranks to predict.")] = [8, 64, 256],  # noqa: B006
    model: Annotated[str, typer.Option(help="To predict: tokens of a rank; rest as --size.")] = "8192,2048,768,256,8",
    skew: Annotated[float, typer.Option(help="Exponent of Zipf's law for the skewed router.")] = 0.5,
    node: Annotated[int, typer.Option(min=1, help="Ranks of a node.")] = 8,
    inside: Annotated[float, typer.Option(help="GB/s between a rank and its node, in each direction.")] = 450.0,
    outside: Annotated[float, typer.Option(help="GB/s between a rank and other nodes, in each direction.")] = 50.0,
    latency: Annotated[float, typer.Option(help="Microseconds of an empty all-to-all.")] = 20.0,
    tflops: Annotated[float, typer.Option(help="TFLOP/s of the experts' products on a rank.")] = 400.0,
) -> None:
    """Measures a layer of experts across processes of this machine, and predicts the time of one on other machines."""
    from bench import exchange  # imports torch.distributed.tensor, which no other command needs

    try:
        measured, modelled = (exchange.Size(*map(int, each.split(","))) for each in (size, model))
    except (TypeError, ValueError):
        raise typer.BadParameter(f"--size and --model must be up to five integers, got {size} and {model}") from None
    lines = [line for n in ranks if seconds for line in exchange.run(n, measured, seconds)]
    if lines:
        rows = []
        for each in lines:
            moved = f"{each.sent / 1e6:.2f}", "-" if each.predicted is None else f"{each.predicted / 1e6:.2f}"
            rows.append((f"{each.ranks}", each.contender, f"{each.forward:.4f}", f"{each.training:.4f}", *moved))
        header = ("ranks", "", "forward s", "training s", "MB sent by rank 0", "MB predicted")
        print_table(f"Measured, {measured}, float32, gloo, one thread a rank", header, rows)
    machines = [Machine(n, node, inside * 1e9, outside * 1e9, latency * 1e-6, tflops * 1e12) for n in predict]
    columns = ("ranks", "router", "most rows / mean", "exchange ms", "experts ms", "exchange", "most MB sent")
    print_table(
        f"Predicted, {modelled} a rank, bfloat16, training", columns, exchange.predictions(modelled, machines, skew, 2)
    )
    console.print(exchange_model.__doc__, soft_wrap=True)


def main() -> None:
    try:
        app()
    except BackendError as error:  # a backend that the command needs is not built
        console.print(f"bench: {error}", soft_wrap=True, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
