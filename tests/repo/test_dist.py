"""What make dist accepts as a wheel, and how it calls the compiled module without torch."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moe_kernels.backends import cpu
from release import dist
from release.environments import Failed, Package, cuda_packages, find_python

ROOT = Path(__file__).parents[2]
GOOD = {"moe_kernels/_cpu.so": 9, "moe_kernels-0.2.0.dist-info/licenses/LICENSE": 9}


def wheel(folder: Path, files: dict[str, int], name: str = "moe_kernels-0.2.0-cp311-cp311-manylinux_2_34_x86_64.whl"):
    with zipfile.ZipFile(folder / name, "w") as packed:
        for file, size in files.items():
            packed.writestr(file, bytes(size))
    return folder / name


def test_a_wheel_holds_one_compiled_module_and_the_licence(tmp_path: Path) -> None:
    dist.check_contents(wheel(tmp_path, GOOD))


@pytest.mark.parametrize(
    ("files", "name", "expected"),
    [
        ({**GOOD, "moe_kernels/_cuda.so": 9}, "m-manylinux_2_34_x86_64.whl", "moe_kernels/_cpu alone"),
        ({**GOOD, "moe_kernels.libs/libgomp-1.so.1.0.0": 9}, "m-manylinux_2_34_x86_64.whl", "moe_kernels/_cpu alone"),
        ({"moe_kernels/_cpu.so": 9}, "m-manylinux_2_34_x86_64.whl", "expected the licence"),
        (GOOD, "m-linux_x86_64.whl", "a tag manylinux"),
        ({**GOOD, "moe_kernels/large": 3_000_000}, "m-manylinux_2_34_x86_64.whl", "less than 3000000 bytes"),
    ],
)
def test_another_wheel_is_refused(tmp_path: Path, files: dict[str, int], name: str, expected: str) -> None:
    with pytest.raises(Failed, match=expected):
        dist.check_contents(wheel(tmp_path, files, name))


def test_the_module_runs_without_torch() -> None:
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['', sys.argv[1]]; "
    code += "runpy.run_path('release/call_module.py', run_name='__main__')"
    command = [sys.executable, "-c", code, Path(cpu.module.__file__).parent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == list(cpu.module.isas), done.stderr


def test_this_python_is_found() -> None:
    assert find_python(f"{sys.version_info[0]}.{sys.version_info[1]}") == Path(sys.executable)
    assert find_python("3.99") is None


def test_a_torch_with_cuda_is_told_from_one_without() -> None:
    found = [Package(name, "1", "") for name in ("torch", "sympy", "nvidia-cublas", "cuda-toolkit")]
    assert cuda_packages(found) == ["cuda-toolkit", "nvidia-cublas"]
    assert cuda_packages(found[:2]) == []


def test_the_readme_has_programs_to_try() -> None:
    assert "mk.explain(" in dist.programs()[0]
