"""`--size` of bench run, profile and predict."""

from __future__ import annotations

import json

import pytest
import typer

from bench import counting, measure, predict, predict_command
from bench.console import sizes
from bench.registry import ENTRIES
from moe_kernels.verify import Row
from tests.helpers.bench import run


def test_sizes_are_numbers_by_name():
    assert sizes("T=4096,p=0.1") == {"T": 4096, "p": 0.1}
    assert sizes(None) == {}
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
