"""`--size` of bench run, profile and predict."""

from __future__ import annotations

import json
import os
import sys

import pytest
import typer

from bench import counting, ledger, measure, predict, predict_command
from bench.console import sizes
from bench.registry import ENTRIES
from moe_kernels.verify import Row
from tests.helpers.bench import run


def test_sizes_are_numbers_by_name():
    assert sizes("T=4096,p=0.1") == {"T": 4096, "p": 0.1}
    assert list(map(type, sizes("T=4096,p=0.1,tau=2.0,B=1e3,n=2.5").values())) == [int, float, float, int, float]
    assert sizes(None) == sizes("") == {}
    for wrong in ("T", "T=", "=4", "T=many", "T=-1", "T=0"):
        with pytest.raises(typer.BadParameter, match="--size must be NAME=NUMBER"):
            sizes(wrong)


def test_operations_are_measured_at_the_given_sizes():
    rows = [Row(op, "cpu", "float32", "cpu", 1, 0.0, 0.0, "ok", "") for op in ("kwta", "sinkhorn", "dispatch")]
    jobs, _ = measure.plan(rows, measure.Request(dtypes=("float32",), size={"R": 64, "N": 1000}, curves=False))
    assert {(job.op, job.shape.get("N")) for job in jobs} == {("kwta", 1000), ("sinkhorn", None)}  # R: iterations
    assert all(job.shape["R"] == 64 for job in jobs)


@pytest.mark.parametrize("op", ENTRIES)
def test_the_sizes_of_a_shape_are_measured_as_they_are_given(op):
    entry = ENTRIES[op]
    for shape in (each for shapes in entry.shapes.values() for each in shapes):
        assert {**entry.complete(shape, "cuda"), **shape} == entry.complete(shape, "cuda")


@pytest.mark.parametrize("op", ["kwta", "expert_mlp", "tree_gate"])
def test_a_prediction_scales_with_its_sizes(op):
    made = next(each for each in predict.predict(predict.GPUS["A100"]) if each.count["operation"] == op)
    first = made.count["shape"].split("=")[0]
    value = int(made.count["shape"].split()[0].split("=")[1])
    (same,) = predict.resized(made, {first: value}, predict.GPUS["A100"])
    assert same.us == pytest.approx(made.us)
    (twice,) = predict.resized(made, {first: 2 * value}, predict.GPUS["A100"])
    assert made.us < twice.us <= 2.001 * made.us  # weights are read once
    assert twice.count["shape"].startswith(f"{first}={2 * value}")
    assert predict.resized(made, {"nothing": 1}, predict.GPUS["A100"]) == []
    assert counting.read()  # the counts themselves have not changed


def test_predict_scales_what_it_prints_and_writes(tmp_path):
    path = tmp_path / "calls.json"
    found = {}
    for size in ((), ("--size", "N=8192")):
        done = run("predict", "--op", "kwta", "--json", path, *size)
        assert done.exit_code == 0, done.output
        found[size] = json.loads(path.read_text())
    before, after = found.values()
    assert [each["sizes"] for each in after] == [each["sizes"] | {"N": 8192} for each in before]
    for one, two in zip(before, after, strict=True):
        assert two["least_bytes"] == pytest.approx(one["least_bytes"] * 8192 / one["sizes"]["N"], rel=0.05)


@pytest.mark.parametrize("every", [False, True])
def test_predict_prints_every_launch_if_all_are_asked_for(every, monkeypatch):
    tables = []
    monkeypatch.setattr(predict_command, "print_table", lambda *given, **named: tables.append(given))
    done = run("predict", "--op", "kwta", *["--all"] * every)
    assert done.exit_code == 0, done.output
    ((_, header, rows),) = tables
    assert header == (predict.HEADER if every else predict.CALLS)
    assert ("call" in {row[5] for row in rows}) == every
    assert ("Least times from counts, not from a clock." in done.output) == every
    assert ("Least times; --all prints every launch" in done.output) != every


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        (("--op", "kwta,sinkhorn", "--backend", "cuda"), {("kwta", "cuda"), ("sinkhorn", "cuda")}),
        (("--op", "dispatch"), {("dispatch", "triton"), ("dispatch", "cuda")}),
        (("--op", "combine", "--backend", "triton", "--size", "T=64"), {("combine", "triton")}),
        (("--op", "expert_mlp,kwta", "--backend", "triton"), {("expert_mlp", "triton"), ("kwta", "triton")}),
    ],
)
def test_the_chosen_kernels_alone_are_predicted(options, pairs, tmp_path):
    path = tmp_path / "calls.json"
    done = run("predict", "--gpu", "H100", *options, "--json", path)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert {(each["operation"], each["backend"]) for each in found} == pairs
    wanted = [
        each
        for each in predict.predict(predict.GPUS["H100"])
        if (each.count["operation"], each.count["backend"]) in pairs
    ]
    if "--size" not in options:
        assert found == [predict.record(each, predict.GPUS["H100"]) for each in wanted]
    said = "expert_mlp is counted with gelu. Others: python -m bench layer --activation swiglu --predict-only"
    assert (said in " ".join(done.output.split())) == ("expert_mlp,kwta" in options)


def test_a_gpu_has_the_given_figures_in_place_of_its_own():
    known = predict.GPUS["H100"]
    assert predict_command._gpu("H100", None, None, None, ()) == known
    short = predict_command._gpu(known.name.split()[-1], 10, None, 2.5, ("bfloat16=7", "new=3"))
    assert short.tflops == known.tflops | {"bfloat16": 7.0, "new": 3.0}
    assert (short.multiprocessors, short.ghz, short.gb_per_s, short.name) == (10, known.ghz, 2.5, known.name)
    new = predict_command._gpu("mine", 1, 2.0, 3.0, ("tf32=4",))
    assert (new.name, new.multiprocessors, new.ghz, new.gb_per_s, new.tflops) == ("mine", 1, 2.0, 3.0, {"tf32": 4.0})
    for given in (
        (None, 2.0, 3.0, ("tf32=4",)),
        (1, None, 3.0, ("tf32=4",)),
        (1, 2.0, None, ("tf32=4",)),
        (1, 2.0, 3.0, ()),
    ):
        for name in ("mine", ""):
            with pytest.raises(typer.BadParameter, match="give all of --sms, --ghz, --gb-per-s and --tflops"):
                predict_command._gpu(name, *given)


@pytest.fixture
def executor_at(monkeypatch, tmp_path):
    """A checkout with an executor of PTX, on a machine with Triton and without nvcc."""
    pytest.importorskip("triton")
    from tests.ptx import cuda_launch, session, triton_launch  # noqa: F401 not while find_spec is replaced

    monkeypatch.setattr(cuda_launch, "unavailable", lambda: "no nvcc")
    (tmp_path / "tests" / "ptx" / "executor").mkdir(parents=True)
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(counting.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    return tmp_path


def problem() -> str:
    with pytest.raises(counting.NoExecutor) as raised, counting.executor():
        pytest.fail("there is no nvcc")
    return str(raised.value).rpartition(", but ")[2].rpartition("csrc/cuda: ")[2]


@pytest.mark.parametrize(
    ("imported", "interpreted", "said"),
    [
        (True, "1", "Triton was imported with TRITON_INTERPRET=1: set it to 0"),
        (True, "0", "no nvcc"),
        (True, None, "no nvcc"),
        (False, "1", "no nvcc"),  # it is imported without interpreter
    ],
)
def test_what_counting_lacks_is_named(executor_at, monkeypatch, imported, interpreted, said):
    if interpreted is None:
        monkeypatch.delenv("TRITON_INTERPRET")
    else:
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    if imported:
        monkeypatch.setitem(sys.modules, "triton", sys.modules.get("triton"))
    else:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert problem() == said
    assert os.environ["TRITON_INTERPRET"] == ("1" if "set it" in said else "0")
    monkeypatch.setattr(counting.importlib.util, "find_spec", lambda name: None)
    assert problem() == "Triton is not installed"
    (executor_at / "tests" / "ptx" / "executor").rmdir()
    assert problem().endswith("it needs a checkout of the sources")
