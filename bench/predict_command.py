"""The command `python -m bench predict`."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bench import counting, ledger, merging, predict
from bench.console import WIDTH, console, known_words, print_lines, print_table, sizes, status, words

Several = Annotated[
    list[str] | None, typer.Option(help="Repeat the option, or separate values with commas. Default: all.")
]


def predict_command(
    gpu: Annotated[
        str, typer.Option(help=f"{', '.join(predict.GPUS)}, or any name with the data of the next four options.")
    ] = "A100",
    sms: Annotated[int | None, typer.Option("--sms", min=1, help="Number of multiprocessors.")] = None,
    ghz: Annotated[float | None, typer.Option("--ghz", help="Clock in GHz.")] = None,
    gb_per_s: Annotated[float | None, typer.Option("--gb-per-s", help="Bandwidth of the memory in GB/s.")] = None,
    tflops: Annotated[
        list[str] | None, typer.Option("--tflops", help="Dense peaks in TFLOP/s, such as bfloat16=312,tf32=156.")
    ] = None,
    op: Several = None,
    backend: Several = None,
    count: Annotated[bool, typer.Option("--count", help="Count again: execute the PTX, for minutes.")] = False,
    size: Annotated[
        str | None, typer.Option("--size", help="Sizes such as T=4096,D=256 instead of those of the counted call.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every launch, with its counts and each resource, in a wide table.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write every call to this file.")] = None,
    verified: Annotated[bool, typer.Option("--verify", help="Also verify the executed PTX, for the ledger.")] = False,
) -> None:
    """Predicts the least time of GPU kernels from counts of executed PTX; nothing is measured.

    Counts are stored in bench/results/ptx with the hash of the kernels' sources. --count and --verify execute PTX with
    tests/ptx: they need a checkout, Triton and nvcc.
    """
    ops, kernels = words(op), known_words("--backend", words(backend), ledger.GPU_BACKENDS) or ledger.GPU_BACKENDS
    known_words("--op", ops, {case.operation for case in counting.cases()})
    chosen = _gpu(gpu, sms, ghz, gb_per_s, words(tflops))
    try:
        if count:
            _count(ops, kernels)
        if verified:
            ledger.write_executed(counting.verified(ops, kernels), kernels)
    except counting.NoExecutor as error:
        console.print(str(error), soft_wrap=True)
        raise typer.Exit(2) from None
    with status("predicting: some seconds"):
        found = predict.predict(chosen, merging.read(), ops=ops)
    found = [each for each in found if each.count["backend"] in kernels]
    if size:
        wanted = sizes(size)
        known_words("--size", tuple(wanted), sorted({name for each in found for name in predict.sizes_of(each)}))
        found = [each for one in found for each in predict.resized(one, wanted, chosen)]
    if json_file:
        json_file.write_text(json.dumps([predict.record(each, chosen) for each in found], indent=1) + "\n")
    title = f"PREDICTED, not measured: {predict.figures(chosen)}"
    if every:
        print_table(title, predict.HEADER, predict.rows(found))
        console.print(predict.HOW)
        return
    print_lines(textwrap.wrap(title, WIDTH))
    print_table("", predict.CALLS, predict.calls(found), width=WIDTH)
    console.print("Least times; --all prints every launch, its counts and how they are made.")
    if any(each.count["operation"] == "expert_mlp" for each in found):
        console.print(
            "expert_mlp is counted with gelu. Others: python -m bench layer --activation swiglu --predict-only"
        )


def _gpu(name: str, sms: int | None, ghz: float | None, gb_per_s: float | None, tflops: tuple[str, ...]) -> predict.Gpu:
    """A known GPU, with the given values in place of its own, or a new one with these values."""
    base = next((gpu for known, gpu in predict.GPUS.items() if name and name in (known, known.split()[-1])), None)
    given = {"multiprocessors": sms, "ghz": ghz, "gb_per_s": gb_per_s}
    try:
        peaks = {key: float(value) for key, _, value in (each.partition("=") for each in tflops)}
    except ValueError:
        raise typer.BadParameter(f"--tflops must be DTYPE=NUMBER, got {', '.join(tflops)}") from None
    if base is None and (None in given.values() or not peaks):
        raise typer.BadParameter(
            f"--gpu {name} is not one of {', '.join(predict.GPUS)}: give all of --sms, --ghz, --gb-per-s and --tflops"
        )
    figures = {key: value for key, value in given.items() if value is not None}
    if base is None:
        return predict.Gpu(name, tflops=peaks, **figures)  # type: ignore[arg-type]
    return replace(base, tflops=base.tflops | peaks, **figures)  # type: ignore[arg-type]


def _count(ops: tuple[str, ...], backends: tuple[str, ...]) -> None:
    """Counts and stores the cases of these operations and backends; stored counts of others stay."""
    wanted = [case for case in counting.cases() if not ops or case.operation in ops]
    names = {case.operation for case in wanted}
    kept = [each for each in counting.read() if each["operation"] not in names or each["backend"] not in backends]
    for each in counting.counted(wanted, backends):
        console.print(f"counted {each['operation']} {each['backend']} {each['dtype']} {each['direction']}")
        kept.append(each)
    order = list(dict.fromkeys(case.operation for case in counting.cases()))
    kept.sort(key=lambda each: order.index(each["operation"]))
    console.print(f"counts {counting.write(kept)}", soft_wrap=True)
