"""The command `python -m bench layer`."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench import layer, measure, predict, report
from bench.console import WIDTH, console, status
from bench.layer_models import MODELS, ROUTERS, Sizes, of_model
from bench.shapes import ROUTINGS
from moe_kernels import info
from moe_kernels.info import placement
from moe_kernels.ops.grouped_gemm import ACTIVATIONS
from moe_kernels.verify import KERNELS, dtype_name

BUSY = 0.1  # of the cores: above it other programs disturb the figures

Size = Annotated[int | None, typer.Option(min=1)]


def layer_command(
    tokens: Size = None,
    dim: Size = None,
    hidden: Size = None,
    experts: Size = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Experts of a token.")] = None,
    model: Annotated[
        str | None, typer.Option(help=f"Sizes of {', '.join(MODELS)}, or of a transformers config.json.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    activation: Annotated[str | None, typer.Option(help=", ".join(ACTIVATIONS))] = None,
    capacity: Annotated[float | None, typer.Option(min=0, help="Capacity factor. Default: nothing is dropped.")] = None,
    routing: Annotated[str, typer.Option(help=", ".join(ROUTINGS))] = "uniform",
    router: Annotated[str | None, typer.Option(help=", ".join(ROUTERS))] = None,
    backend: Annotated[str | None, typer.Option(help=f"{', '.join(KERNELS)}. Default: the automatic choice.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's number.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Sampling time of each line.")] = 0.5,
    predict_only: Annotated[bool, typer.Option("--predict-only", help="Measure nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for layer.json and the roofline, layer.png.")] = None,
) -> None:
    """Measures a layer of experts and each of its kernels at your sizes, beside PyTorch, with predictions for GPUs.

    Sizes that are not given are those of --model, or 2048 tokens, dim 256, hidden 512, 16 experts, 2 a token. If the
    layer does not fit into memory, or with --predict-only, only the predictions are printed.
    """
    given: dict[str, Any] = {"tokens": tokens, "dim": dim, "hidden": hidden, "experts": experts, "k": k}
    given |= {"activation": activation, "router": router}
    setting = _setting(given, model, dtype, routing, capacity, backend, threads)
    fits = not predict_only and setting.fits()
    _describe(setting, fits)
    if not fits and not predict_only:
        console.print(f"[yellow]Only predicted: measuring would take about {setting.bytes / 2**30:.0f} GiB.")
    limits = _ceilings(setting) if fits else {}
    gpus = _gpus()
    rows: list[layer.Row] = []
    began, used = time.monotonic(), _used_by_others()
    count = len(layer.jobs(setting))
    with status("measuring" if fits else "predicting: half a minute") as shown:
        for row in layer.run(setting, limits, seconds, gpus):
            rows.append(row)
            passed = f"{len(rows)} of {count} lines in {time.monotonic() - began:.0f} s"
            shown.update(f"{passed}; last: {row.step}, {row.direction}")
            if not console.is_terminal and fits:
                console.print(f"{row.direction} {row.step}: {_us(row)} us", highlight=False)
    busy = (_used_by_others() - used) / (time.monotonic() - began) / (os.cpu_count() or 1) if fits else 0.0
    for direction in layer.DIRECTIONS:
        _print(setting, [row for row in rows if row.direction == direction], gpus, limits)
    if busy > BUSY:
        text = f"Other programs used {100 * busy:.0f} % of the cores meanwhile: run again when the machine is quiet."
        console.print(text, highlight=False, width=WIDTH)
    _legend(setting, limits, rows)
    _remarks(rows)
    if out is not None:
        _write(out, setting, rows, limits)
    if any(row.figure is None for row in rows) and fits:
        raise typer.Exit(1)


def _setting(
    given: dict[str, Any],
    model: str | None,
    dtype: str | None,
    routing: str,
    capacity: float | None,
    backend: str | None,
    threads: int | None,
) -> layer.Setting:
    try:
        base = of_model(model) if model else Sizes()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    sizes = replace(base, **{name: value for name, value in given.items() if value is not None})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    for option, value, known in (
        ("--dtype", dtype, ("float32", "bfloat16", "float16")),
        ("--activation", sizes.activation, ACTIVATIONS),
        ("--routing", routing, ROUTINGS),
        ("--router", sizes.router, ROUTERS),
        ("--backend", backend, (None, *KERNELS)),
    ):
        if value not in known:
            raise typer.BadParameter(f"{option} must be one of {', '.join(filter(None, known))}; got {value!r}")
    if sizes.k > sizes.experts:
        raise typer.BadParameter(f"--k must be at most --experts = {sizes.experts}; got {sizes.k}")
    if backend and not _runs(backend, device, dtype):
        raise typer.BadParameter(f"--backend {backend} cannot run here; python -m moe_kernels info says why")
    count = 1 if device == "cuda" else threads or torch.get_num_threads()
    return layer.Setting(sizes, getattr(torch, dtype), device, backend, routing, capacity, count)


def _runs(backend: str, device: str, dtype: str) -> bool:
    """Whether the backend's kernels run on the device itself, and not on Triton's interpreter."""
    place = placement("expert_mlp", backend, getattr(torch, dtype))
    return place.device == device and (device == "cuda" or backend == "cpu")


def _gpus() -> list[predict.Gpu]:
    """The GPU of this machine if its data are known, else those of the report."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return [gpu for gpu in predict.GPUS.values() if gpu.name in name] or [
        predict.GPUS[each] for each in predict.REPORTED
    ]


def _used_by_others() -> float:
    """Seconds of the cores that other processes have used since the machine started; 0 if the system does not say."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, words)
    own = os.times()
    all_seconds = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return all_seconds - own.user - own.system - own.children_user - own.children_system


def _describe(setting: layer.Setting, measured: bool) -> None:
    facts, each = info.machine(), setting.sizes
    threads = f"{setting.threads} thread{'s' * (setting.threads > 1)}"
    where = torch.cuda.get_device_name() if setting.device == "cuda" else f"{facts['cpu']}, {threads}"
    if measured:
        console.print(f"{where}; torch {facts['torch']}, Triton {facts['triton']}", highlight=False)
    limit = "" if setting.capacity is None else f", capacity {setting.capacity}"
    console.print(
        f"T {each.tokens} tokens, D {each.dim}, H {each.hidden}, E {each.experts} experts, K {each.k}{limit}; "
        f"{each.activation}, {dtype_name(setting.dtype if measured else layer.predicted_dtype(setting))}, "
        f"{setting.routing} routing, {each.router}",
        highlight=False,
    )


def _ceilings(setting: layer.Setting) -> measure.Ceilings:
    limits = measure.ceilings(list(layer.jobs(setting)))
    name, dtype = measure.setting(setting.device, setting.threads), dtype_name(setting.dtype)
    product = limits[name].get(dtype)
    speed = f", a product {product:.0f} GFLOP/s in {dtype}" if product else ""
    console.print(f"ceilings measured now: a copy {limits[name]['copy']:.1f} GB/s{speed}", highlight=False)
    return limits


def _print(
    setting: layer.Setting, rows: Iterable[layer.Row], gpus: list[predict.Gpu], limits: measure.Ceilings
) -> None:
    rows = list(rows)
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        title=rows[0].direction + ", us" * (not limits),
        title_justify="left",
    )
    columns = [*(_measured(setting, rows[0].direction) if limits else ()), *(f"{gpu.name}*" for gpu in gpus)]
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = _cells(setting, row, gpus) if limits else {}
        cells |= {f"{gpu.name}*": _number(row.predicted[gpu.name][0]) for gpu in gpus}
        table.add_row(row.step, *(cells.get(name, "") for name in columns))
    wide = Console(width=WIDTH, file=console.file)  # in a narrower terminal rich would cut the cells
    wide.print(table)
    wide.print()


def _measured(setting: layer.Setting, direction: str) -> list[str]:
    on_gpu = setting.device == "cuda"
    names = ["us", "Mtok/s", "GFLOP", "TFLOP/s" if on_gpu else "GFLOP/s", "GB/s", "% ceil"]
    return [*names, *["% sheet", "kernels"] * on_gpu, *["MiB"] * (direction == "training"), "x best", "x eager"]


def _cells(setting: layer.Setting, row: layer.Row, gpus: list[predict.Gpu]) -> dict[str, str]:
    """The measured columns of a row by name."""
    found = row.figure
    if found is None:
        return {"us": "-"}
    cells = {
        "us": _number(found["us"]) + "!" * report.unsteady(found),
        "Mtok/s": _number(setting.sizes.tokens / found["us"]),
        "GB/s": _number(found["gb_per_s"]),
        "% ceil": f"{found['ceiling_percent']:.0f}",
    }
    if row.flops:
        rate = found["gflop_per_s"]
        cells |= {"GFLOP": _number(row.flops / 1e9), "GFLOP/s": _number(rate), "TFLOP/s": _number(rate / 1000)}
    if "peak_mib" in found:
        cells["MiB"] = _number(found["peak_mib"])
    if setting.device == "cuda":
        known = [gpu for gpu in gpus if gpu.name in torch.cuda.get_device_name()]
        cells["% sheet"] = f"{_sheet_percent(known[0], row, setting):.0f}" if known else "-"
        cells["kernels"] = str(found["launches"])
    peers = found["peers"]
    if peers:
        eager = next((ratio for name, ratio in peers.items() if "loop" in name), next(iter(peers.values())))
        cells |= {"x best": _number(min(peers.values())), "x eager": _number(eager)}
    return cells


def _sheet_percent(gpu: predict.Gpu, row: layer.Row, setting: layer.Setting) -> float:
    """The least time by the data sheet's bandwidth and peak, in percent of the time taken."""
    least = max(row.least_bytes / (gpu.gb_per_s * 1e9), row.flops / gpu.peak(dtype_name(setting.dtype)))
    return 100e6 * least / row.figure["us"] if row.figure else 0.0


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _us(row: layer.Row) -> str:
    return _number(row.figure["us"]) if row.figure else "not measured"


def _legend(setting: layer.Setting, limits: measure.Ceilings, rows: list[layer.Row]) -> None:
    lines = [
        "* predicted, not measured: least us by counted instructions, bytes and FLOPs"
        + (", in bfloat16." if setting.dtype == torch.float32 else ".")
    ]
    steps = "up, down: grouped_gemm. expert_mlp: up, down and combine in one call. layer: nn.MoE and its router."
    if not limits:
        lines = [steps, *lines]
    else:
        lines = [
            steps,
            "GB/s counts the least bytes. % ceil: the least time at the ceilings, of the time taken; above 100 if",
            "the inputs stay in a cache, or if a kernel beats torch's copy or product, which are the ceilings.",
            "x best, x eager: times as fast as the best PyTorch code here, and as a loop over the experts.",
            *lines,
        ]
    if any(row.figure and report.unsteady(row.figure) for row in rows):
        lines.insert(0, f"!: the samples differ by over {report.UNSTEADY:g} times: the machine was busy; run again.")
    slow = [row.product for row in rows if row.product]
    if slow:
        speed = f"{slow[0]:.2g} GFLOP/s in {dtype_name(setting.dtype)}"
        why = f"torch's product does {speed} on this CPU, so that a call would take over {layer.PEER_SECONDS:g} s"
        lines.insert(0, f"PyTorch was left out of {len(slow)} lines: {why}.")
    for line in lines:
        console.print(line, highlight=False, width=WIDTH)


def _remarks(rows: Iterable[layer.Row]) -> None:
    for line in dict.fromkeys(line for row in rows for line in row.remarks if row.figure is None):
        console.print(f"not measured: {line}", soft_wrap=True, highlight=False)


def _write(out: Path, setting: layer.Setting, rows: list[layer.Row], limits: measure.Ceilings) -> None:
    from bench import plot  # imports matplotlib

    out.mkdir(parents=True, exist_ok=True)
    facts = {key: value for key, value in dataclasses.asdict(setting).items() if key not in ("fake", "dtype")}
    facts |= {"dtype": dtype_name(setting.dtype), "machine": info.machine(), "ceilings": limits}
    path = out / "layer.json"
    path.write_text(json.dumps(facts | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n")
    console.print(f"figures {path}", soft_wrap=True)
    figures = [row.figure for row in rows if row.figure]
    if figures:
        result = {"device": facts["machine"]["cpu"], "date": time.strftime("%Y-%m-%d"), "ceilings": limits}
        if setting.device == "cuda":
            result["device"] = torch.cuda.get_device_name()
        picture = out / "layer.png"
        picture.write_bytes(plot.draw({**result, "entries": [{"figures": figures}]})["roofline"])
        console.print(f"roofline {picture}", soft_wrap=True)
