"""Kernels compiled for an absent GPU are those that launches on such a GPU look up in Triton's folder."""

from __future__ import annotations

import doctest
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.helpers import forked
from tests.helpers.layers import LAYERS, found
from tests.helpers.targets import HAS_GPU, INTERPRET
from tests.ptx import build as ptx

pytest.importorskip("triton", reason="Triton is not installed")

import moe_kernels as mk
from moe_kernels import backends, precompile
from moe_kernels.__main__ import main

ROOT = Path(__file__).resolve().parents[2]

compiles = pytest.mark.skipif(INTERPRET, reason="Triton's interpreter compiles no kernel")
runs = pytest.mark.skipif(
    bool(HAS_GPU or INTERPRET or ptx.unavailable()), reason="Triton's kernels do not run in the executor of PTX"
)


COMPILED = [  # operation, dtype, capability, and launches that then find nothing
    ("dispatch", "float32", 80, None),
    ("grouped_gemm", "bfloat16", 90, ("bfloat16", 80)),  # with tensor descriptors
]


def printed(folder: Path, programs: list[str]) -> list[str]:
    """Output of programs in a new Python with this folder as Triton's. The tests' settings of Triton do not apply."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    shared = "from moe_kernels import precompile\nfrom moe_kernels.__main__ import main"
    return forked.outputs(shared, programs, cwd=ROOT, env=environment)


def test_launches_find_what_was_compiled(tmp_path):
    """One process compiles. Another runs the commands again, which find all themselves, and then launches."""
    commands = [
        f"compile --target cuda:{capability} --op {op} --dtype {dtype} --small --jobs".split()
        for op, dtype, capability, _ in COMPILED
    ]
    summary = re.compile(r"cuda:(\d+): (\d+) kernels: (\d+) compiled, (\d+) already there, 0 failed; \d+ s; (.*)\n")
    run = "from moe_kernels.__main__ import main\nassert not main({})"
    firsts = printed(tmp_path, [run.format([*words, "2"]) for words in commands])
    programs = []
    for (op, dtype, capability, other), words in zip(COMPILED, commands, strict=True):
        launched = [(op, dtype, capability)] + ([(op, *other)] if other else [])
        programs.append(f"""
from __future__ import annotations
import json, torch
from moe_kernels.__main__ import main
{inspect.getsource(launch_cases)}
assert not main({[*words, "1"]})
print(json.dumps([launch_cases(*each) for each in {launched}]))
""")
    for made, text, again in zip(COMPILED, firsts, printed(tmp_path, programs), strict=True):
        first = summary.fullmatch(text)
        assert first, text
        assert first[1] == str(made[2])
        assert int(first[2]) == int(first[3]) > 3
        assert first[5] == str(tmp_path)
        *lines, line = again.splitlines(keepends=True)
        found = summary.fullmatch("".join(lines))
        assert found, again
        assert found[2] == found[4] == first[2]
        got, *missed = json.loads(line)
        assert not got["error"]
        assert got["hits"] == int(first[2])
        assert got["launches"] >= got["hits"]
        assert all(each == {"hits": 0, "launches": 0, "error": "a kernel is not in the folder"} for each in missed)
        assert len(missed) == (made[3] is not None)


def launch_cases(op: str, dtype: str, capability: int) -> dict[str, Any]:
    """Launches the small cases of an operation through Triton's own JITFunction.run on a GPU that does nothing.

    Returns how many kernels Triton found in its folder and how many launches reached the GPU, until one needed a
    compilation ("error").
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    import moe_kernels.backends.triton as kernels
    from moe_kernels import verify
    from moe_kernels.backends.triton import _grouped_configs

    hits, launches = [], []

    class Gpu:
        class utils:
            load_binary = staticmethod(lambda name, code, shared, device: (1, name, 0, 0, 1024))
            unload_module = staticmethod(lambda module: None)
            get_device_properties = staticmethod(lambda device: {"max_shared_mem": 227 * 1024})

        launcher_cls = staticmethod(lambda source, metadata: lambda *arguments: launches.append(metadata.name))
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_current_device = staticmethod(lambda: capability)  # Triton keeps compiled kernels by the device's number
        get_current_stream = staticmethod(lambda device: 0)

    def add_stages(*arguments: Any) -> None:
        raise RuntimeError("a kernel is not in the folder")

    CUDABackend.add_stages = add_stages
    knobs.compilation.listener = lambda **made: hits.append(made["cache_hit"])
    driver.set_active(Gpu())
    kernels.device_type = "cpu"
    _grouped_configs.loop = lambda device: capability
    error = ""
    try:
        for case in verify.cases(op, getattr(torch, dtype), small=True):
            verify.OPERATIONS[op].run(case.inputs, "triton")
    except RuntimeError as raised:
        error = str(raised)
    return {"hits": sum(hits), "launches": len(launches), "error": error}


@runs
@pytest.mark.parametrize("name", ["topk", "expert choice", "nonzero", "swiglu", "competition", "tasks"])
@pytest.mark.parametrize("tokens", [9, 64])
def test_a_layer_launches_what_was_recorded(name, tokens, monkeypatch):
    """Outputs are zeros while recording; when kernels run, their outputs lead to the same launches."""
    from triton.runtime import jit

    monkeypatch.setitem(backends.AUTOMATIC, "cpu", ("triton", "cpu", "reference"))
    layer, looked_up, key_of = LAYERS[name](), set(), jit.compute_cache_key
    with precompile.recording("cuda:80") as launches:
        found(layer, layer.parameters(), tokens)

    def compute_cache_key(*arguments):
        looked_up.add(key_of(*arguments))
        return key_of(*arguments)

    monkeypatch.setattr(jit, "compute_cache_key", compute_cache_key)
    torch.manual_seed(0)
    layer = LAYERS[name]()
    found(layer, layer.parameters(), tokens)
    assert looked_up == {launch["key"] for launch in launches}
    assert len(looked_up) > 5


@compiles
def test_a_recording_restores_what_it_changed():
    from triton.runtime import driver

    import moe_kernels.backends.triton as kernels

    def state() -> tuple[Any, ...]:
        choice = backends.choose("kwta", None, torch.ones(1))
        return driver._active, kernels.device_type, backends.AUTOMATIC, "new_empty" in vars(torch.Tensor), choice

    def fail() -> None:
        with precompile.recording("cuda:90"):
            assert backends.choose("kwta", None, torch.ones(1)) == "triton"
            raise ZeroDivisionError

    before = state()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert state() == before


@compiles
@pytest.mark.parametrize("name", precompile.TARGETS)
def test_grouped_products_run_the_inner_loop_of_the_target(name):
    with precompile.recording(name) as launches:
        from moe_kernels.backends.triton import _grouped_configs

        assert _grouped_configs.loop(torch.device("cuda")) == (90 if name == "cuda:90" else 80)
    assert not launches


@compiles
def test_a_kernel_that_cannot_be_compiled_is_reported(capsys):
    launch = precompile.cases("cuda:80", ["dispatch"], ["float32"], small=True)[0]
    bad = [launch | {"options": launch["options"] | {"num_warps": warps}} for warps in (3, 5)]
    calls = []
    summary = precompile.fill_cache([*bad, *bad], jobs=2, progress=lambda *counts: calls.append(counts))
    assert summary.failures == 2 * ["_dispatch_fwd: AssertionError: num_warps must be a power of 2"]
    assert (summary.compiled, summary.present) == (0, 0)
    assert calls == [(1, 2), (2, 2)]
    with patch.object(precompile, "fill_cache", return_value=summary):
        assert main(["compile", "--target", "cuda:80", "--op", "dispatch", "--dtype", "float32", "--small"]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("cuda:80: 2 kernels: 0 compiled, 0 already there, 2 failed; ")
    assert printed.err.splitlines() == [f"compile: {failure}" for failure in summary.failures]


@compiles
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "cuda:91"], r"target must be one of cuda:80 \(A100\), .*; got 'cuda:91'"),
        (["--target", "cuda:80", "--op", "gemm"], r"operation must be one of kwta, .*; got 'gemm'"),
        (["--target", "cuda:80", "--dtype", "fp16"], r"dtype must be one of float32, .*; got 'fp16'"),
        (
            ["--target", "cuda:80", "--op", "kwta", "--dtype", "float64"],
            "nothing to compile for kwta: it takes fl",
        ),
        (["--target", "cuda:80", "--op", "dispatch", "--jobs", "0"], "jobs must be at least 1; got 0"),
    ],
)
def test_a_wrong_command_line_names_what_was_expected(words, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["compile", *words, "--small"])
    assert raised.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_command_needs_triton_and_its_compiler(monkeypatch, capsys):
    words = ["compile", "--target", "cuda:80"]
    monkeypatch.setattr(precompile.knobs.runtime, "interpret", True)
    with pytest.raises(SystemExit):
        main(words)
    assert "TRITON_INTERPRET=1 is set" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "moe_kernels.precompile")
    with pytest.raises(SystemExit):
        main(words)
    assert "needs Triton, which is not installed" in capsys.readouterr().err


@compiles
def test_a_launch_that_asks_for_more_of_the_gpu_says_so():
    with pytest.raises(AttributeError, match="a launch reads 'utils' of the GPU"):
        _ = precompile.NoDevice(80).utils


@compiles
def test_the_example_of_the_guide_records_a_step(monkeypatch):
    page = (ROOT / "docs" / "guide" / "backends.md").read_text()
    (program,) = re.findall(r"^```\{code-block\} python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    filled = []
    monkeypatch.setattr(precompile, "fill_cache", lambda launches, jobs: filled.extend(launches))
    exec(program, {})
    assert {"_topk_gate_fwd", "_plan_rank", "_grouped_gemm_fwd", "_grouped_gemm_bwd_weight"} <= {
        launch["kernel"] for launch in filled
    }


@compiles
def test_the_example_of_a_recording_prints_the_output_shown():
    names = {"mk": mk, "torch": torch}
    example = doctest.DocTestParser().get_doctest(precompile.recording.__doc__, names, "recording", None, None)
    assert example.examples
    assert not doctest.DocTestRunner().run(example).failed
