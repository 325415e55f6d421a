"""python -m moe_kernels: its output, and its exit status for correct and for wrong kernels."""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_kernels as mk
from moe_kernels import backends, info, verify
from moe_kernels.__main__ import main
from moe_kernels.backends import cpu
from moe_kernels.ops import grouped_gemm, kwta, plan, topk_gate
from tests.helpers.planted import plant

CPU_ONLY = ["verify", "--backend", "cpu", "--small"]


def unsupported(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Makes `word` unsupported: a backend, or an operation on every backend."""
    original = backends.unsupported
    monkeypatch.setattr(
        backends, "unsupported", lambda *args: "no such device" if word in args[:2] else original(*args)
    )


def test_info_names_the_machine_and_every_operation_on_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"torch        {torch.__version__}" in text
    assert info.cpu_model() in text
    assert cpu.module.isas[cpu.isa] in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["operation"] == list(backends.NAMES)
    assert rows["kwta"][:2] == ["cpu", "cpu"]
    assert max(map(len, text.splitlines())) <= info.WIDTH


def test_info_lists_operations_in_another_operations_file() -> None:
    listed = info.operations()
    assert {"make_plan", "plan_expert_choice", "plan_priority", "tree_gate", "tree_route"} <= set(listed)
    assert set(verify.OPERATIONS) <= set(listed)
    for op in listed:
        assert backends.missing("reference", op) is None
    text = info.describe()
    assert re.search(r"^harden +cpu +no +no +no$", text, re.MULTILINE)
    assert "a definition alone, without kernels: harden, smooth_step" in text
    assert re.search(r"^cuda does not implement: .*\bplan_priority\b", text, re.MULTILINE)


def test_the_header_of_a_wide_table_wraps() -> None:
    assert info.table(("a b", "c"), [("1", "2")]).splitlines() == ["a b  c", "---  -", "1    2"]
    wide = info.table([f"a long name {i}" for i in range(10)], [range(10)]).splitlines()
    assert max(map(len, wide)) <= info.WIDTH
    assert wide[0].split() == ["a"] * 10
    assert wide[-3].split() == [str(i) for i in range(10)]  # the header's last line
    assert wide[-1].split() == [str(i) for i in range(10)]


def test_info_says_why_a_backend_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported(monkeypatch, "triton")
    assert info.placement("kwta", "triton") == (None, "no such device")
    assert "no such device" in info.describe()


def test_info_names_a_missing_extension_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moe_kernels._cuda", None)
    monkeypatch.delattr("moe_kernels._cuda", raising=False)
    name, text = info.extensions()[-1]
    assert name == "_cuda"
    assert text.startswith("not built: ")
    assert "moe_kernels._cuda" in text
    assert "/" not in text


def test_a_closed_pipe_gives_no_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "moe_kernels", "info"], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_table_prints_on_an_ascii_terminal(tmp_path, monkeypatch) -> None:
    words = ("train", "--width", "8", "--steps", "1", "--check-steps", "0", "--json", str(tmp_path / "run.json"))
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["moe_kernels", *words])
    monkeypatch.delitem(sys.modules, "moe_kernels.__main__")  # which runpy warns of
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("moe_kernels", run_name="__main__")
    assert ended.value.code == 0
    terminal.flush()
    assert b"Mean ? standard deviation over the seeds" in terminal.buffer.getvalue()
    assert (tmp_path / "run.json").is_file()


def test_verify_passes_correct_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CPU_ONLY, "--op", "kwta"]) == 0
    text = capsys.readouterr().out
    assert "4 ok, 0 failed, 0 not run" in text
    assert "float64" in text


@pytest.mark.parametrize(
    ("kernel", "output"), [("kwta_fwd", "y"), ("kwta_mask", "mask"), ("kwta_bwd", "gradient")], ids=str
)
def test_verify_fails_and_names_the_output_of_a_wrong_kernel(monkeypatch, capsys, kernel: str, output: str) -> None:
    def one_wrong(original: Callable[..., Any], *args: object) -> object:
        found = original(*args)
        out = found[0] if isinstance(found, tuple) else found
        out[-1, -1] = not out[-1, -1] if out.dtype == torch.bool else out[-1, -1] + 1
        return found

    plant(monkeypatch, kernel, one_wrong)
    assert main([*CPU_ONLY, "--op", "kwta"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text
    assert f"worst: {output}" in text


def test_verify_finds_an_unwritten_element(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_the_last(original, x, *args):
        y, bits = original(x, *args)
        fresh = x.new_empty(x.shape)
        fresh.view(-1)[:-1] = y.view(-1)[:-1]
        return fresh, bits

    plant(monkeypatch, "kwta_fwd", all_but_the_last)
    assert main([*CPU_ONLY, "--op", "kwta"]) == 1


def test_verify_reports_a_kernel_that_raises(monkeypatch, capsys) -> None:
    def broken(*args):
        raise RuntimeError("out of luck")

    plant(monkeypatch, "kwta_mask", broken)
    assert main([*CPU_ONLY, "--op", "kwta"]) == 1
    assert "RuntimeError: out of luck" in capsys.readouterr().out


def test_verify_reports_an_error_raised_in_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports a kernel's error in calls after the launch, such as those of the comparison."""

    def fail(*args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(verify, "_errors", fail)
    row = verify.check("kwta", "cpu", torch.float32, "cpu", small=True)
    assert (row.verdict, row.cases) == ("FAILED", 1)
    assert row.note.endswith("RuntimeError: CUDA error: an illegal memory access was encountered")


def test_verify_lists_a_backend_that_cannot_run_with_its_reason(monkeypatch, capsys) -> None:
    monkeypatch.setattr(backends, "unsupported", lambda *args: "no such device")
    assert main(["verify", "--op", "kwta"]) == 0
    text = capsys.readouterr().out
    assert "no such device" in text
    assert "0 ok, 0 failed, 3 not run" in text


def test_only_the_forbidden_cases_of_sinkhorn_have_forbidden_entries() -> None:
    for name, inputs in verify.cases("sinkhorn", small=True):
        assert inputs["scores"].isneginf().any() == name.startswith("forbidden"), name


def test_verify_fails_if_a_requested_backend_cannot_run(monkeypatch, capsys) -> None:
    unsupported(monkeypatch, "cuda")
    for requested in (["cuda"], ["cpu", "cuda"]):
        words = [word for name in requested for word in ("--backend", name)]
        assert main(["verify", "--op", "kwta", "--small", *words]) == 2
        printed = capsys.readouterr()
        assert "1 not run" in printed.out
        assert printed.err == "verify: cuda cannot run: no such device\n"


def test_verify_passes_a_backend_that_lacks_one_of_the_operations(monkeypatch, capsys) -> None:
    unsupported(monkeypatch, "dispatch")
    assert main([*CPU_ONLY, "--op", "dispatch", "--op", "kwta"]) == 0
    assert capsys.readouterr().err == ""


def test_a_failure_is_status_1_whatever_else_could_not_run(monkeypatch) -> None:
    plant(monkeypatch, "kwta_fwd", lambda original, x, *args: original(x + 1, *args))
    unsupported(monkeypatch, "cuda")
    assert main([*CPU_ONLY, "--op", "kwta", "--backend", "cuda"]) == 1


@pytest.mark.parametrize(("option", "known"), [("--op", "kwta"), ("--backend", "cpu, triton, cuda")])
def test_unknown_names_are_errors_that_list_the_known_ones(capsys, option: str, known: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["verify", option, "nonsense"])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "'nonsense'" in message
    assert known in message


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"moe_kernels {mk.__version__}\n"


def test_verify_takes_the_names_of_the_readme_s_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CPU_ONLY, "--op", "plan", "--op", "make_plan"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+) +cpu ", printed, re.MULTILINE) == ["make_plan"] * 4  # a row for each dtype


def test_train_gets_its_arguments_from_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    train = SimpleNamespace(
        add_arguments=lambda parser, words: parser.add_argument("--epochs", type=int),
        run=lambda args: seen.append(args) or 7,
    )
    monkeypatch.setitem(sys.modules, "moe_kernels.papers.train", train)
    assert main(["train", "--epochs", "3"]) == 7
    assert seen[0].epochs == 3


def test_error_is_relative_to_the_largest_magnitude() -> None:
    truth = torch.tensor([1.0, -4.0])
    assert verify.relative_error(torch.tensor([1.5, -4.0]), truth) == 0.125
    for wrong in (math.nan, math.inf):
        assert verify.relative_error(torch.tensor([wrong, -4.0]), truth.double() * 1e307) == math.inf
    assert verify.relative_error(torch.tensor([math.inf, 2.0]), torch.tensor([math.inf, 2.0])) == 0
    assert verify.relative_error(torch.empty(0), torch.empty(0)) == 0


@pytest.mark.parametrize(("off", "verdict"), [(0.9, "ok"), (1.1, "FAILED")])
def test_a_computed_output_may_be_off_by_twice_the_reference_and_the_floor(monkeypatch, off, verdict) -> None:
    # The float32 reference is off by 1/8 of the largest value. Allowed: twice this error, plus a floor of one epsilon.
    allowed = 2 / 8 + torch.finfo(torch.float32).eps

    def run(inputs, backend):
        x = inputs["x"]
        return {"y": x * (1 + (allowed * off if backend == "cpu" else 1 / 8 if x.dtype == torch.float32 else 0))}

    case = verify.Case("ones", {"x": torch.ones(4)})
    operation = verify.Operation(lambda *args: iter([case]), run, exact=frozenset(), floor=1)
    monkeypatch.setitem(verify.OPERATIONS, "scale", operation)
    row = verify.check("scale", "cpu", torch.float32, "cpu")
    assert row.verdict == verdict
    assert row.allowed == pytest.approx(allowed, rel=1e-6)
    assert row.error == pytest.approx(allowed * off, rel=1e-6)


def test_cases_have_special_values_and_all_options() -> None:
    cases = [case.inputs for case in verify.cases("kwta")]
    assert any(case["x"].isnan().any() for case in cases)
    assert any((case["x"] == math.inf).any() for case in cases)
    assert any((case["x"].abs() < torch.finfo(torch.float32).smallest_normal).any() for case in cases)
    assert any((case["x"].signbit() & (case["x"] == 0)).any() for case in cases)
    assert any(case["x"].stride(-1) != 1 for case in cases)
    assert any(case["values"] is not None for case in cases)
    assert {case["ties"] for case in cases} == {"index", "strict", "all"}
    assert all({0, 1, n // 2, n} == {case["k"] for case in cases if case["x"].shape[-1] == n} for n in (31, 16400))
    assert all(
        case.inputs["x"].shape[0] <= 4 and case.inputs["x"].shape[1] <= 512 for case in verify.cases("kwta", small=True)
    )


OPTIONS = {
    ("topk_gate", "order"): set(topk_gate.ORDERS),
    ("topk_gate", "scores"): set(topk_gate.SCORES),
    ("make_plan", "order"): set(plan.ORDERS),
    ("kwta", "ties"): set(kwta.TIES),
    ("grouped_gemm", "activation"): {None, *grouped_gemm.ACTIVATIONS},
    ("expert_mlp", "activation"): {None, *grouped_gemm.ACTIVATIONS},
}


@pytest.mark.parametrize(("op", "option"), OPTIONS)
def test_cases_have_every_value_of_an_option_and_say_which(op: str, option: str) -> None:
    cases = [(case.name, case.inputs[option]) for case in verify.cases(op) if option in case.inputs]
    assert {value for _, value in cases} == OPTIONS[op, option]
    if option == "order":
        assert all(value in name for name, value in cases)


@pytest.mark.parametrize("op", ["grouped_gemm", "expert_mlp", "expert_norms"])
def test_the_experts_of_make_bench_agree_with_the_reference(op: str) -> None:
    row = verify.check(op, "cpu", torch.float32, "cpu", small=False)
    assert row.verdict == "ok", row.note


@pytest.mark.parametrize(
    ("x", "verdict"),
    [([3.0], "ok"), ([1000.0], "FAILED"), ([], "FAILED")],  # the square of 1000 overflows float16
    ids=["finite", "the reference overflows", "no cases"],
)
def test_a_verification_that_could_show_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, x: list[float], verdict: str
) -> None:
    def run(inputs: dict[str, Any], backend: str) -> dict[str, torch.Tensor]:
        return {"y": inputs["x"].square()}

    cases = [("a case", {"x": torch.tensor([each], dtype=torch.float16)}) for each in x]
    operation = verify.Operation(lambda *args: iter(cases), run, frozenset(), 1.0)
    monkeypatch.setitem(verify.OPERATIONS, "square", operation)
    assert verify.check("square", "cpu", torch.float16, "cpu").verdict == verdict
