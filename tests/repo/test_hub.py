"""make hub: the layout of a kernel for the Hugging Face Hub, loaded by the library kernels."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from release import hub

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from pathlib import Path
import torch, kernels
import moe_kernels

torch.manual_seed(0)
folder = Path(sys.argv[1])
copies = [kernels.get_local_kernel(folder, backend="cpu"), kernels.get_local_kernel(folder / "build/torch-cuda")]
x, weights = torch.randn(7, 16), torch.rand(7, 2)
choices = torch.randint(0, 2, (7, 2))
w_in, w_out = torch.randn(2, 16, 32), torch.randn(2, 32, 16)

def run(mk, backend):
    leaves = [each.clone().requires_grad_() for each in (x, w_in, w_out, weights)]
    plan = mk.make_plan(choices, 2, backend=backend)
    y = mk.expert_mlp(leaves[0], plan, leaves[1], leaves[2], weights=leaves[3], backend=backend)
    y.sum().backward()
    return [y, *(each.grad for each in leaves)]

from torch.utils.flop_counter import FlopCounterMode

expected = run(moe_kernels, "reference")
counted, found = [], [run(copies[0], "triton")]
for mk in (*copies, moe_kernels):
    with FlopCounterMode(display=False) as counter:
        found.append(run(mk, "triton"))
    counted.append(counter.get_total_flops())
for each in found:
    for got, wanted in zip(each, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
assert counted[0] > 0 and len(set(counted)) == 1, counted
for mk in copies:
    assert hasattr(getattr(torch.ops, mk.__name__), "expert_mlp_fwd"), mk.__name__
    assert mk.__file__.startswith(str(folder)), mk.__file__
    assert mk.expert_mlp.__module__.startswith(mk.__name__)
    layer = mk.nn.MoE(mk.nn.TopKGate(16, 4, 2), mk.nn.ExpertMLP(4, 16, 32))
    assert type(layer(x).plan) is mk.RoutingPlan is not moe_kernels.RoutingPlan
    assert {each.backend: each.available for each in mk.explain("kwta", x)}["cpu"] is False
assert len({mk.__name__ for mk in (*copies, moe_kernels)}) == 3
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "project"
    hub.write(out)
    return out


def test_the_library_loads_copies_beside_the_package_and_they_run_an_expert_mlp(project: Path) -> None:
    pytest.importorskip("kernels")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # the project is compared with its digests
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(project)], env=environment, capture_output=True, text=True, cwd=project
    )
    assert done.returncode == 0, done.stderr


def test_a_copy_imports_nothing_by_the_name_of_the_package(project: Path) -> None:
    files = list(project.rglob("*.py"))
    assert len(files) > 200
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not {name.partition(".")[0] for name in names} & {"moe_kernels", "python_ref"}, path


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_the_metadata_of_a_build_has_a_digest_of_each_file(project: Path, backend: str) -> None:
    build = project / "build" / f"torch-{backend}"
    metadata = json.loads((build / "metadata.json").read_text())
    files = {path.relative_to(build).as_posix(): path for path in build.rglob("*") if path.is_file()}
    del files["metadata.json"]
    wanted = {
        name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode() for name, path in files.items()
    }
    assert metadata["digest"] == {"algorithm": "sha256", "files": wanted}
    assert (metadata["name"], metadata["backend"]["type"]) == ("moe-kernels", backend)
    assert metadata["id"].isidentifier()


def test_a_changed_file_gives_another_name(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "LAYERS", hub.LAYERS + "# another version\n")
    hub.write(tmp_path / "other")
    first, other = (
        json.loads((each / "build/torch-cpu/metadata.json").read_text()) for each in (project, tmp_path / "other")
    )
    assert first["id"] != other["id"]


def test_a_project_for_kernel_builder(project: Path) -> None:
    assert {path.name for path in project.iterdir()} == {
        "build", "build.toml", "CARD.md", "flake.nix", "LICENSE", "README.md", "torch-ext",
    }  # fmt: skip
    assert not (project / "torch-ext/moe_kernels/_ops.py").exists()  # kernel-builder makes it
    assert 'name = "moe-kernels"' in (project / "build.toml").read_text()


@pytest.mark.parametrize(
    ("text", "depth", "expected"),
    [
        ("from moe_kernels import ops\n", 0, "from . import ops\n"),
        ("from moe_kernels.ops.kwta import kwta\n", 2, "from ...ops.kwta import kwta\n"),
        ("    from python_ref.kwta import kwta as other\n", 1, "    from ..python_ref.kwta import kwta as other\n"),
        ("import python_ref.kwta as reference\n", 1, "from ..python_ref import kwta as reference\n"),
        ("from moe_kernels import _checkout, x\n_checkout.warn_if_hiding()\n", 0, "from . import x\n"),
        ('"""from moe_kernels import ops"""\nimport torch\n', 0, '"""from moe_kernels import ops"""\nimport torch\n'),
    ],
)
def test_imports_become_relative(text: str, depth: int, expected: str) -> None:
    source = f"if True:\n{text}" if text.startswith(" ") else text
    assert hub.relative(source, depth).removeprefix("if True:\n") == expected


def test_an_import_that_cannot_be_relative_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 'import moe_kernels\.ops'"):
        hub.relative("import moe_kernels.ops\n", 1)
