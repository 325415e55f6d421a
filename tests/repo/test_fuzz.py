"""The fuzzer in tests/fuzz."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moe_kernels as mk
from tests.fuzz import __main__ as program
from tests.fuzz import check, command, operators
from tests.fuzz.operations import OPERATIONS, drawn

ROOT = Path(__file__).parents[2]


def test_random_calls_agree_with_the_definition():
    words = ["--cases", "800", "--minutes", "5", "--processes", "1", "--seed", "1"]
    run = [sys.executable, "-m", "tests.fuzz", *words]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "800 cases, 0 failures" in done.stdout, done.stdout
    assert "--case" not in done.stdout
    assert all(re.search(rf"\d {name}\b", done.stdout) for name in OPERATIONS), done.stdout


def test_an_unknown_operation_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz", "--op", "plan"])
    with pytest.raises(SystemExit) as raised:
        program.main()
    assert raised.value.code == 2
    assert re.search("--op must be one of kwta, .*; got plan", capsys.readouterr().err)


def test_every_operation_is_fuzzed():
    public = {name for name in mk.__all__ if name.islower() and callable(getattr(mk, name))}
    not_operations = {"available_backends", "batch_invariant", "explain", "use_backend"}
    covered_by_others = {"kwta_apply", "kwta_bits", "kwta_mask", "smooth_step", "expert_capacity", "k_from_fraction"}
    assert public - not_operations - covered_by_others <= set(OPERATIONS)


def test_a_case_is_reproducible():
    for name in OPERATIONS:
        one, other = (drawn(random.Random(5), [name], check.names()) for _ in range(2))
        assert one == other == json.loads(json.dumps(one))
        built = [OPERATIONS[name].build(one) for _ in range(2)]
        for a, b in zip(*(each.values() for each in built), strict=True):
            if isinstance(a, torch.Tensor):
                assert torch.equal(a.nan_to_num(), b.nan_to_num())
                assert a.stride() == b.stride()


def test_a_planted_fault_is_found_and_minimised(monkeypatch):
    kwta = check.VERIFIED["kwta"]

    def wrong(inputs, backend):
        found = kwta.run(inputs, backend)
        right = backend == "reference" or inputs["k"] < 3 or inputs["x"].shape[-1] < 9
        return found if right else found | {"y": found["y"] + 1}

    monkeypatch.setitem(check.VERIFIED, "kwta", replace(kwta, run=wrong))
    draw, found = random.Random(3), None
    while found is None:
        spec = drawn(draw, ["kwta"], ["cpu base"])
        found = spec if check.failure(spec) else None
    text = check.report(found)
    assert re.match(r"kwta on cpu base: d?\w+: \d+ of \d+ elements differ", text)
    assert "TRITON_INTERPRET" not in text
    assert command({"on": "triton"}) == """TRITON_INTERPRET=1 python -m tests.fuzz --case '{"on": "triton"}'"""
    small = json.loads(text.split("--case ")[1].strip("'"))
    assert (small["rows"], small["n"], small["k"], small["batch"], small["values"]) == (1, 9, 3, False, False)
    assert {value for key, value in small.items() if key.endswith(".layout")} == {"contiguous"}
    monkeypatch.undo()
    assert check.failure(small) is None


def test_a_crash_is_reported_with_its_case(tmp_path):
    script = tmp_path / "run.py"
    planted = "import os; from tests.fuzz import check; check.failure = lambda spec: os.abort()"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); {planted}; from tests.fuzz.__main__ import main; main()"
    )
    options = ["--cases", "5", "--minutes", "2", "--processes", "1", "--seed", "1", "--failures", "2"]
    run, popen = [], subprocess.Popen

    def started(command, **more):
        run.append(command)
        return popen([sys.executable, script, *command[3:]], **more)

    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program.subprocess, "Popen", started)
        patch.setattr(sys, "argv", ["fuzz", *options])
        patch.setattr("builtins.print", lambda *parts, **more: printed.append(" ".join(map(str, parts))))
        status = program.main()
    assert status == 1
    assert len(run) == 2
    assert any("ended the process with -6" in line for line in printed)
    assert any('--case \'{"op":' in line for line in printed)


def test_a_case_of_an_operator_is_repeated_by_its_command(monkeypatch, capsys):
    draw = random.Random(4)
    given = [operators.two(draw, ["kwta_bwd", "expert_mlp_fwd"]) for _ in range(20)]
    assert len({case.operator for case in given}) == 2
    for case in given:
        words = shlex.split(operators.command(case))
        spec = json.loads(words[words.index("--case") + 1])
        assert operators.case_of(spec) == case
        case.call()
    one = json.dumps(dataclasses.asdict(dataclasses.replace(given[0], changes=())))
    monkeypatch.setattr(sys, "argv", ["fuzz", "--case", one])
    monkeypatch.setattr(check, "set_up_process", lambda: None)  # this process has other tests
    assert program.main() == 0
    assert capsys.readouterr().out == "correct\n"
