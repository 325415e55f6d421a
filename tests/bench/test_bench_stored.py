"""What the bench measures, predicts, prints and draws, whole, against the files of tests/stored."""

from __future__ import annotations

import inspect
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from bench import __main__ as command
from bench import (
    counting,
    document,
    layer,
    layer_models,
    ledger,
    measure,
    merging,
    plot,
    predict,
    registry,
    report,
    runs,
    summary,
)
from bench.console import console
from bench.entry import label
from moe_kernels.verify import Row, dtype_name
from tests.helpers.bench import run
from tests.helpers.measured import counted, measured, saved


def test_all_that_is_measured(stored) -> None:
    lines = []
    for op, entry in registry.ENTRIES.items():
        lines += [f"{op}: {' '.join(entry.directions)}; {' '.join(map(dtype_name, entry.dtypes))}"]
        lines += [f"  leaves {' '.join(entry.leaves)}; gradient {entry.grad}; peers {', '.join(entry.peers)}"]
        for name, shapes in entry.shapes.items():
            for device in ("cpu", "cuda"):
                lines += [f"  {name} {device}: {label(entry.complete(each, device))}" for each in shapes]
        for dtype in entry.dtypes:
            shape = entry.complete(entry.shapes["quick"][0], "cpu")
            sizes = (f"{each} {entry.least_bytes(shape, dtype, each)}" for each in entry.directions)
            lines.append(f"  least bytes {dtype_name(dtype)}: {', '.join(sizes)}")
    stored("bench_entries", "\n".join(lines))


def test_all_that_is_counted(stored) -> None:
    lines = [
        f"{case.operation} {label(case.shape)} at {label(case.counted_shape)}, by {' '.join(case.units)}: "
        f"{' '.join(map(dtype_name, case.dtypes))}; {' '.join(case.directions)}; {' '.join(case.backends)}; "
        f"fixed {case.fixed!r}, torch {case.torch_products}, {case.capabilities}, x{case.scale():g}"
        for case in counting.cases()
    ]
    stored("bench_counted", "\n".join(lines))


def test_the_options_of_every_command(stored) -> None:
    lines = []
    for each in command.app.registered_commands:
        lines.append(f"{each.name}: {inspect.getdoc(each.callback)}")
        hints = get_type_hints(each.callback, include_extras=True)
        for name, parameter in inspect.signature(each.callback).parameters.items():
            (said,) = hints[name].__metadata__
            default = str(parameter.default).replace(str(ledger.ROOT), "ROOT")
            lines.append(f"  {name} = {default} {said.param_decls} {said.min} {said.max}: {said.help}")
    stored("bench_options", "\n".join(lines))


def test_what_an_exchange_would_take(stored) -> None:
    pytest.importorskip("torch.distributed")
    from bench import exchange
    from bench.exchange_model import Machine

    sizes = exchange.Size(), exchange.Size(4096, 1024, 512, 64, 8)
    machines = [Machine(1), Machine(8), Machine(16), Machine(16, 4, 1e11, 2e10, 1e-3, 1e14)]
    rows = [row for size in sizes for row in exchange.predictions(size, machines, 1.2, 2)]
    stored("bench_exchange", "\n".join(" | ".join(row) for row in rows), tolerance=1e-6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_jobs_in_their_order(stored, device: str) -> None:
    """The two requests of `bench gpu` and `make bench`."""
    backends = ("cpu",) if device == "cpu" else ("triton", "cuda")
    rows = [
        Row(op, backend, dtype, device, 3, 0.0, 0.0, "ok", "")
        for op in registry.ENTRIES for backend in backends for dtype in ("float32", "bfloat16")
    ]  # fmt: skip
    first = measure.Request(threads=(1, 2))
    second = measure.Request("llm", first="aims", routings=("zipf",), curves=False)
    lines = []
    for request in (first, second):
        jobs, left_out = measure.plan(rows, request)
        lines += [f"{job} by {' '.join(job.backends)}{' curve' * job.curve}" for job in measure.round_robin(jobs)]
        lines += left_out
    stored(f"bench_jobs_{device}", "\n".join(lines))


def test_the_steps_of_a_layer(stored) -> None:
    lines = [f"{name}: {asdict(sizes)}" for name, sizes in layer_models.MODELS.items()]
    for router, activation, factor in (("softmax_topk", "gelu", None), ("sigmoid", "swiglu", 1.25)):
        sizes = layer_models.Sizes(
            256, 64, 96, 8, 2, activation, router, groups=(4, 2) if router == "sigmoid" else None
        )
        setting = layer.Setting(sizes, torch.bfloat16, "cpu", factor=factor)
        lines.append(f"{label(setting.shape)}: {setting.bytes} bytes, {setting.capacity}")
        for job in layer.jobs(setting):
            least = job.entry.least_bytes(job.shape, job.dtype, job.direction)
            flops = layer.flops(setting, job.op, job.direction)
            lines.append(f"  {job} by {job.backends}: {flops} FLOPs, {least} bytes, peers {list(job.entry.peers)}")
    stored("bench_layer", "\n".join(lines))


GPUS = list(predict.GPUS.values())


@pytest.fixture(autouse=True)
def _sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of a kernel's sources is its name: these tests hold when kernels change."""
    monkeypatch.setattr(ledger, "digest", lambda op, backend, root=None: f"{op} {backend}")


def test_predictions(stored, tree: Path) -> None:
    counted(tree)
    lines = [predict.figures(gpu) for gpu in GPUS]
    for gpu in GPUS:
        made = predict.predict(gpu, [measured(tree, gpu=True)], tree)
        lines += [json.dumps(predict.record(each, gpu)) for each in made]
        lines += [" | ".join(row) for row in predict.rows(made)]
        lines += [" | ".join(row) for row in predict.calls(made)]
        bigger = [new for each in made for new in predict.resized(each, {"R": 64, "T": 999}, gpu)]
        lines += [json.dumps(predict.record(each, gpu)) for each in bigger]
        lines += [predict.short(made)]
        lines += [
            str(predict.at(gpu, op, "bfloat16", "forward", 1e8, 3e9, tree)) for op in ("kwta", "grouped_gemm", "x")
        ]
    lines += predict.section([], tree, {"kwta"})
    stored("bench_predictions", "\n".join(lines), tolerance=1e-6)


def test_a_report_and_its_pictures(stored, tree: Path, pictures: list[str]) -> None:
    counted(tree)
    results = [measured(tree, gpu) for gpu in (False, True)]
    stored("bench_report", document.document(results, root=tree), tolerance=1e-6)
    for result in results:
        assert list(plot.draw(result)) == ["roofline", "peers", "scaling", "load"]
        assert plot.speedups(result).startswith(b"<?xml")
    stored("bench_pictures", "\n".join(pictures), tolerance=1e-3)
    lines = [report.measured(results, tree), report.operations(results, tree)]
    lines += [" | ".join(row) for result in results for row in summary.rows(result)]
    lines += [line for result in results for line in summary.missing(result)]
    stored("bench_summary", "\n".join(lines), tolerance=1e-6)


def test_the_commands_report_and_verify_print(stored, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 100)
    rows_of = report.operation_rows
    monkeypatch.setattr(report, "operation_rows", lambda results, root=None: rows_of(results, tree))
    monkeypatch.setattr(plot, "draw", lambda result: {})  # which test_a_report_and_its_pictures checks
    paths = [saved(measured(tree, gpu), tree / "results") for gpu in (False, True)]
    done = run("report", *paths, "--out", tree)
    assert done.exit_code == 0, done.output
    lines = [done.output]
    with console.capture() as printed:
        told = runs.Run(tree / "new", measure.Request(), 0.1, time.monotonic() + 100)
        rows = [Row("kwta", each, "float32", "cuda", 3, 0.0, 0.0, "ok", "") for each in ("triton", "cuda")]
        told.rows = {
            rows[0]: {"repeatable": "ok", "memcheck": "not run: no tool"},
            rows[1]: {"repeatable": "FAILED: y"},
        }
        told.sanitized, told.suite = {("kwta", "cuda"): {"memcheck": "not run: no tool"}}, {"pytest": "ok"}
        told.print_checks()
    lines.append(printed.get())
    stored("bench_printed", "\n".join(lines).replace(str(tree), "FOLDER"), tolerance=1e-6)


def test_a_comparison_of_two_results(stored, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 120)
    lines = []
    for gpu in (False, True):
        before, after = measured(tree, gpu), measured(tree, gpu)
        for index, entry in enumerate(after["entries"]):
            for figure in entry["figures"]:
                figure["us"] *= 1 + index / 4
                figure["over_memcpy"] *= 1 + index / 4
                figure["peers"] = {name: ratio / (1 + index / 3) for name, ratio in figure["peers"].items()}
        done = run("compare", *(saved(each, tree / name) for name, each in (("old", before), ("new", after))))
        assert done.exit_code == 1
        lines.append(done.output.replace(str(tree), "FOLDER"))
        (both,) = merging.merged([before, after | {"date": "2026-02-03", "suite": {}, "ceilings": {}}], tree)
        for entry in both.pop("entries"):
            figures, curves = entry.pop("figures"), entry.pop("curves")
            times = " ".join(f"{each['us']:g}" for each in (*figures, *curves))
            lines.append(f"{json.dumps(entry)}: {times}")
        lines.append(json.dumps(both))
    stored("bench_comparison", "\n".join(lines), tolerance=1e-6)
