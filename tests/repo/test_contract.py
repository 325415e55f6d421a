"""Rules for the whole package."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.backends import cuda

ROOT = Path(__file__).parents[2]


def test_a_requested_backend_never_falls_back():
    x = torch.randn(2, 5, dtype=torch.float64)
    # With a GPU, Triton refuses CPU tensors. In tests without a GPU it takes CPU tensors, but not float64.
    with pytest.raises(mk.BackendError, match=r"kwta: backend 'triton' cannot run here: .*(float64|not on cpu ones)"):
        mk.kwta(x, 2, backend="triton")
    with mk.use_backend("cuda"), pytest.raises(mk.BackendError, match="kwta: backend 'cuda' cannot run here"):
        mk.kwta(x, 2)
    with pytest.raises(ValueError, match="backend must be one of"):
        mk.kwta(x, 2, backend="gpu")
    with pytest.raises(ValueError, match="backend must be one of"), mk.use_backend("gpu"):
        pass


def test_explain_names_the_requested_backend(capsys):
    mk.explain("kwta", torch.randn(3))
    assert "requested" not in capsys.readouterr().out
    with mk.use_backend("reference"):
        mk.explain("kwta", torch.randn(3))
    printed = capsys.readouterr().out
    assert printed.startswith("kwta: backend, available, reason; reference was requested\n-> reference")


def test_explain_of_an_unknown_operation_is_an_error():
    with pytest.raises(ValueError, match=r"explain: op must be one that .* got 'kwtaa'"):
        mk.explain("kwtaa", torch.randn(3))


def test_wrong_argument_types_are_errors_with_their_name():
    x, weight = torch.randn(3, 4), torch.randn(2, 4, 4)
    plan = mk.make_plan(torch.tensor([[0], [1], [1]]), 2)
    for op, call in {
        "dispatch": lambda: mk.dispatch(x, None),
        "combine": lambda: mk.combine(x, None),
        "expert_mlp": lambda: mk.expert_mlp(x, None, weight, weight, weights=None),
    }.items():
        with pytest.raises(TypeError, match=f"{op}: plan must be a RoutingPlan, got NoneType"):
            call()
    for match, call in {
        "grouped_gemm: weight must be a Tensor": lambda: mk.grouped_gemm(x, None, plan.expert_offsets),
        "expert_mlp: w_in must be a Tensor": lambda: mk.expert_mlp(x, plan, None, weight, weights=None),
        "expert_norms: w_out must be a Tensor": lambda: mk.expert_norms(x, weight, None),
        "k_from_fraction: p must be a number": lambda: mk.k_from_fraction(None, 4),
        "expert_capacity: factor must be a number": lambda: mk.expert_capacity(4, 1, 2, None),
    }.items():
        with pytest.raises(TypeError, match=match):
            call()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_forward_mode_tangent_is_an_error(backend):
    x, weight, offsets = torch.randn(3, 4), torch.randn(1, 4, 4), torch.tensor([0, 3])
    mk.grouped_gemm(x, weight, offsets, backend=backend)
    with forward_ad.dual_level():
        for op, call in {
            "kwta": lambda x: mk.kwta(x, 2, backend=backend),
            "topk_gate": lambda x: mk.topk_gate(x, 2, backend=backend),
            "grouped_gemm": lambda x: mk.grouped_gemm(x, weight, offsets, backend=backend),
            "sinkhorn": lambda x: mk.sinkhorn(x[:, :3], 2, backend=backend),
        }.items():
            with pytest.raises(TypeError, match=f"{op}: forward-mode derivatives are not supported"):
                call(forward_ad.make_dual(x, x))
            call(x)


def test_the_most_local_choice_of_a_backend_wins(monkeypatch):
    x = torch.randn(3)
    assert backends.choose("kwta", None, x) == "cpu"
    monkeypatch.setenv("MOE_KERNELS_BACKEND", "reference")
    assert backends.choose("kwta", None, x) == "reference"
    monkeypatch.setenv("MOE_KERNELS_BACKEND", "")  # as if it were not set
    assert backends.choose("kwta", None, x) == "cpu"
    monkeypatch.setenv("MOE_KERNELS_BACKEND", "reference")
    with mk.use_backend("cpu"):
        assert backends.choose("kwta", None, x) == "cpu"
        with mk.use_backend("reference"):
            assert backends.choose("kwta", None, x) == "reference"
        assert backends.choose("kwta", "reference", x) == "reference"
        assert backends.choose("kwta", None, x) == "cpu"


def test_explain_says_why(capsys):
    found = mk.explain("kwta", torch.randn(2, 5, dtype=torch.float64), 2)
    by_name = {candidate.backend: candidate for candidate in found}
    assert by_name["cpu"].available
    assert re.search("float64|not on cpu ones|Triton", by_name["triton"].reason)
    assert "-> cpu" in capsys.readouterr().out


def test_available_backends():
    assert {"reference", "cpu"} <= set(mk.available_backends("kwta"))
    assert mk.available_backends("no_such_op") == []


def test_compiles_whole_forward_and_backward():
    def layer(c, a, k):
        return mk.kwta(c, k, values=torch.tanh(a)).sum(-1)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows, n in ((4, 33), (5, 70)):
        c, a = torch.randn(rows, n), torch.randn(rows, n, requires_grad=True)
        expected = torch.autograd.grad(layer(c, a, 7).square().sum(), a)[0]
        got = torch.autograd.grad(compiled(c, a, 7).square().sum(), a)[0]
        torch.testing.assert_close(got, expected)


def test_autocast_casts_nothing():
    x = torch.randn(4, 50)
    with torch.autocast("cpu", torch.bfloat16):
        assert mk.kwta(x, 5).dtype == torch.float32
        assert mk.kwta(x.bfloat16(), 5).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_autocast_rounds_no_product(backend):
    plan = mk.make_plan(torch.zeros(20, 1, dtype=torch.int64), 1)
    x, w_in, w_out = torch.randn(20, 700), torch.randn(1, 700, 700), torch.randn(1, 700, 700)

    def run(autocast: bool) -> list[torch.Tensor]:
        weight = w_in.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = mk.grouped_gemm(x, weight, torch.tensor([0, 20]), backend=backend)
            if backend != "reference":  # the backward of the definition is torch's, which follows autocast
                out.backward(x)
            mlp = mk.expert_mlp(x, plan, w_in, w_out, weights=None, backend=backend)
            return [out, mlp, mk.expert_norms(x, w_in, w_out, backend=backend), weight.grad]

    for got, want in zip(run(True), run(False), strict=True):
        assert got is None or torch.equal(got, want)


def test_a_narrower_instruction_set_can_be_requested():
    code = "from moe_kernels.backends import cpu; print(cpu.isa)"
    environment = {**os.environ, "MOE_KERNELS_CPU_ISA": "base"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "0"


@pytest.fixture
def current(monkeypatch) -> list[int]:
    """A list with the number of the current GPU, which mocks of torch.cuda.device and current_device set and read."""
    numbers = [0]

    @contextlib.contextmanager
    def device(which):  # a number or a torch.device
        numbers[0], before = getattr(which, "index", which), numbers[0]
        yield
        numbers[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: numbers[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    return numbers


def test_triton_launches_on_the_device_of_its_tensors(current):
    kernels, used = pytest.importorskip("moe_kernels.backends.triton", reason="Triton is not installed"), []
    launcher = kernels.on_device(lambda x: used.append(current[0]))
    for index in (0, 1):
        launcher(SimpleNamespace(is_cuda=True, get_device=lambda index=index: index))
    launcher(torch.ones(1))
    assert used == [0, 1, 0]

    for file in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{file.name}")
        for name, launcher in inspect.getmembers(module, inspect.isfunction):
            if re.search(r"[a-z]_(fwd|mask|bwd|bwd_weight|bwd_hidden|norms)$", name) and not name.startswith("_"):
                assert hasattr(launcher, "__wrapped__"), f"{file.name}.{name} launches on whatever device is current"


def test_cuda_launches_on_the_device_of_its_tensors_and_its_current_stream(current, monkeypatch):
    launches = []
    module = SimpleNamespace(kernel=lambda *arguments: launches.append((current[0], *arguments)))
    monkeypatch.setattr(cuda, "module", module)
    monkeypatch.setattr(cuda, "device_type", "cuda")

    def current_stream(device=None):
        return SimpleNamespace(cuda_stream=100 + (current[0] if device is None else device.index))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    for index in (0, 1):
        cuda.call("kernel", SimpleNamespace(device=torch.device("cuda", index)), 7)
    assert launches == [(0, 7, 100), (1, 7, 101)]
    assert current == [0]


def test_addresses_are_taken_in_one_place():
    package = ROOT / "moe_kernels"
    takers = {path.name for path in package.rglob("*.py") if re.search(r"\bdata_ptr\(", path.read_text())}
    assert takers == {"_addresses.py", "sizes.py"}  # sizes.py: `aligned`


def test_no_conflict_markers_are_left():
    """Python, ruff and mypy accept conflict markers inside a docstring."""
    for folder in ("moe_kernels", "python_ref", "csrc", "bench", "tests", "docs"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".cpp", ".cu", ".h", ".cuh", ".md"):
                assert not re.search(r"^(<{7}|>{7}) ", path.read_text(), re.MULTILINE), path


# The rooms of the house from the ground up. A module imports from its own room and from rooms before it.
ROOMS = (
    ("python_ref",),
    (
        "moe_kernels._checkout",
        "moe_kernels._names",
        "moe_kernels._numpy",
        "moe_kernels._pytree",
        "moe_kernels._version",
        "moe_kernels._visible_gpus",
        "moe_kernels.sizes",
    ),
    ("moe_kernels.plan", "moe_kernels.backends"),
    ("moe_kernels.ops",),
    ("moe_kernels",),  # the names that users import
    ("moe_kernels.nn",),
    ("moe_kernels.integrations",),
    ("moe_kernels.info", "moe_kernels.cases"),
    ("moe_kernels.verify",),
    ("moe_kernels.precompile",),
    ("moe_kernels.papers",),
    ("moe_kernels.__main__", "bench"),
)


def rank_of(module: str) -> int:
    places = {name: rank for rank, names in enumerate(ROOMS) for name in names}
    return places[module] if module in places else rank_of(module.rpartition(".")[0])


def imports() -> dict[str, set[str]]:
    """For each module of ROOMS the modules of ROOMS that its text imports, inside functions too."""
    files = [path for root in ("moe_kernels", "python_ref", "bench") for path in (ROOT / root).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: relative import"
                given = [f"{node.module}.{alias.name}" for alias in node.names]
                found[name] |= {each if each in names else str(node.module) for each in given}
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
        found[name] &= names.keys() - {name}
    return found


def test_imports_run_down():
    upwards = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in sorted(others)
        if rank_of(other) > rank_of(name) or (rank_of(other) == rank_of(name) and roots_differ(name, other))
    ]
    assert upwards == []


def roots_differ(name: str, other: str) -> bool:
    """Whether two modules of one rank are in different rooms."""
    rooms = [max((room for room in ROOMS[rank_of(each)] if each.startswith(room)), key=len) for each in (name, other)]
    return rooms[0] != rooms[1]


def test_no_imports_go_in_a_circle():
    tuple(TopologicalSorter(imports()).static_order())  # raises CycleError
