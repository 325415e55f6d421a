"""The build and its wheels."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from ptx import cuda_launch

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.timeout(900)  # for compiling csrc/cuda


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources, a torch that cannot be imported, and compilers that skip most of the work."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("csrc", "moe_kernels", "python_ref"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "no_torch").mkdir()
    (folder / "no_torch" / "torch.py").write_text("raise ImportError('the build must not import torch')\n")
    compiler = os.environ.get("CXX", "g++")
    touch = 'for each; do test "$last" = -o && touch "$each"; last=$each; done; true'
    # reading_cxx only preprocesses (-E), which needs every included file. It does not link: it makes empty files.
    write_program(folder / "reading_cxx", f'case " $* " in *" -c "*) exec {compiler} "$@" -E;; esac\n{touch}')
    # cuda_cxx compiles csrc/cuda/module.cpp and links the CUDA module. Its other outputs are empty files.
    write_program(folder / "cuda_cxx", f'case "$*" in */csrc/cuda/*|*/_cuda*) exec {compiler} "$@" -O0;; esac\n{touch}')
    return folder


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def build(checkout: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python in the checkout. By default the compiler is reading_cxx, as these tests call no CPU kernel."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "MOE_KERNELS_CUDA")}
    reading = {"CXX": str(checkout / "reading_cxx")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=checkout,
        env={**kept, **reading, "PYTHONPATH": str(checkout / "no_torch"), **environment},
        capture_output=True,
        text=True,
    )


def wheel(checkout: Path, source: Path, **environment: str) -> set[str]:
    """The names of the files in a wheel of `source`, which pip builds without isolation or network."""
    out = checkout / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    pip = ("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(out), str(source))
    done = build(checkout, *pip, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


def test_a_stale_module_is_not_in_the_wheel(checkout):
    for folder in (checkout / "moe_kernels", checkout / "build" / "lib.linux-x86_64-cpython-311" / "moe_kernels"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_cuda.cpython-311-x86_64-linux-gnu.so").write_text("left by an earlier build")
    names = wheel(checkout, checkout, MOE_KERNELS_CUDA="0")
    assert any(name.startswith("moe_kernels/_cpu.") for name in names)
    assert not any("_cuda" in name and name.endswith(".so") for name in names)
    assert {"moe_kernels/ops/kwta.py", "python_ref/kwta.py"} <= names


def test_a_source_distribution_has_all_files_of_the_build(checkout):
    (checkout / "tests").mkdir()
    # By default setuptools packs tests/test*.py, but no conftest.py.
    (checkout / "tests" / "test_alone.py").write_text("import conftest\n")
    done = build(checkout, "setup.py", "-q", "sdist", "-d", "dist")
    assert done.returncode == 0, done.stderr
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        assert not [name for name in packed.getnames() if "/tests" in name]
    names = wheel(checkout, archive, MOE_KERNELS_CUDA="0")
    assert any(name.startswith("moe_kernels/_cpu.") for name in names)


def test_asking_for_cuda_without_nvcc_is_an_error(checkout, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    done = build(checkout, "setup.py", "build_ext", MOE_KERNELS_CUDA="1", PATH=str(tools))
    assert done.returncode != 0
    assert "MOE_KERNELS_CUDA=1 needs nvcc" in done.stderr
    done = build(checkout, "setup.py", "build_ext", MOE_KERNELS_CUDA="yes")
    assert "MOE_KERNELS_CUDA must be 0, 1 or auto; got 'yes'" in done.stderr


def test_warnings_are_errors_only_in_ci(checkout):
    for ci, strict in (("true", True), ("", False)):
        done = build(checkout, "setup.py", "build_ext", MOE_KERNELS_CUDA="0", CXX="/bin/false", CI=ci)
        assert done.returncode != 0  # the compiler fails; only the rules of ninja are checked
        (rules,) = (checkout / "build").glob("temp*/build.ninja")
        assert ("-Werror" in rules.read_text()) == strict


def test_a_bad_architecture_is_an_error(checkout):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this machine")
    done = build(checkout, "setup.py", "build_ext", MOE_KERNELS_CUDA="1", TORCH_CUDA_ARCH_LIST="ampere")
    assert done.returncode != 0
    assert "TORCH_CUDA_ARCH_LIST must list capabilities such as 8.0;9.0+PTX; got 'ampere'" in done.stderr


def fake_nvcc(folder: Path, *known: str) -> Path:
    """A toolkit's folder with an nvcc that lists the architectures `known` and compiles nothing."""
    (folder / "bin").mkdir(parents=True)
    write_program(folder / "bin" / "nvcc", f'[ "$1" = --list-gpu-arch ] && printf "%s\\n" {" ".join(known)}; exit 0')
    return folder


def test_unsupported_architectures_are_dropped_with_a_note(checkout, tmp_path):
    home = fake_nvcc(tmp_path, "compute_75", "compute_80", "compute_90")
    quick = {"CUDA_HOME": str(home), "CXX": "/bin/false"}
    done = build(checkout, "setup.py", "build_ext", TORCH_CUDA_ARCH_LIST="7.0;7.5;8.0 9.0+PTX;15.0", **quick)
    (rules,) = (checkout / "build").glob("temp*/build.ninja")
    assert "arch=compute_80,code=[sm_80] -gencode=arch=compute_80,code=[sm_90,compute_80] -I" in rules.read_text()
    for arch in ("7.0", "7.5"):
        assert f"moe_kernels: no code for capability {arch}: the kernels need 8.0" in done.stdout
    assert f"moe_kernels: no code for capability 15.0: {home}/bin/nvcc does not know it" in done.stdout
    build(checkout, "setup.py", "build_ext", **quick)
    assert re.findall(r"code=\[sm_(\d+)", rules.read_text()) == ["80", "90"]


def test_without_a_supported_architecture_cuda_is_built_only_on_request(checkout, tmp_path):
    home = fake_nvcc(tmp_path, "compute_75", "compute_80")
    wanted = {"CUDA_HOME": str(home), "CXX": "/bin/false", "TORCH_CUDA_ARCH_LIST": "7.5"}
    done = build(checkout, "setup.py", "build_ext", **wanted)
    assert "building without CUDA (nvcc can compile for no capability in TORCH_CUDA_ARCH_LIST)" in done.stdout
    (rules,) = (checkout / "build").glob("temp*/build.ninja")
    assert "nvcc" not in rules.read_text()
    done = build(checkout, "setup.py", "build_ext", MOE_KERNELS_CUDA="1", **wanted)
    assert done.returncode != 0
    assert "MOE_KERNELS_CUDA=1: nvcc can compile for no capability in TORCH_CUDA_ARCH_LIST" in done.stderr


def compiled_nvcc(home: Path, real: str) -> Path:
    """A toolkit's folder with an nvcc that records its options, checks them with --dryrun, and copies the objects that
    tests/ptx compiled. It compiles only dispatch.cu."""
    for name, made in cuda_launch.compiled().objects.items():
        if name != "dispatch.cu":
            shutil.copy(made, home / f"{name}.o")
    (home / "bin").mkdir()
    write_program(
        home / "bin" / "nvcc",
        f"""case " $* " in *" -c "*.cu*) ;; *) exec {real} "$@";; esac
        echo "$*" >> {home}/options
        for each; do case "$last" in -c) source=$each;; -o) out=$each;; esac; last=$each; done
        made={home}/$(basename "$source").o
        test -e "$made" || exec {real} "$@"
        {real} --dryrun "$@" 2> /dev/null && cp "$made" "$out" """,
    )
    return home


def test_the_cuda_module_imports_without_a_gpu(checkout, tmp_path):
    if (real := shutil.which("nvcc")) is None:
        pytest.skip("no nvcc on this machine")
    home = compiled_nvcc(tmp_path, real)
    wanted = {"MOE_KERNELS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "8.0", "CUDA_HOME": str(home)}
    wanted["CXX"] = str(checkout / "cuda_cxx")
    done = build(checkout, "setup.py", "-q", "build_ext", "--inplace", **wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    options = (home / "options").read_text().splitlines()
    assert len(options) == len(list((ROOT / "csrc" / "cuda").glob("*.cu")))
    expected = re.escape(" ".join(cuda_launch.PRODUCT)) + r"( -Werror all-warnings)?"
    expected += r" -gencode=arch=compute_80,code=\[sm_80\] -I\S+ -MMD -MF \S+ -c \S+ -o \S+"
    assert [each for each in options if not re.fullmatch(expected, each)] == []
    # Not _cuda*.so, which also matches the file that test_a_stale_module_is_not_in_the_wheel leaves here.
    module = checkout / "moe_kernels" / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    needed = subprocess.run(["ldd", module], capture_output=True, text=True, check=True).stdout
    assert "cudart" not in needed
    code = (
        "import importlib.util as u; "
        f"s = u.spec_from_file_location('_cuda', {str(module)!r}); m = u.module_from_spec(s); s.loader.exec_module(m); "
        "print(m.architectures, m.runtime_version >= 12000)"
    )
    done = build(checkout, "-c", code)
    assert done.stdout.split() == ["8.0", "True"], done.stderr


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump, of binutils, is not installed")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86 has MMX registers")
def test_no_kernel_touches_an_mmx_register():
    """After MMX code without the instruction emms, long double arithmetic in the same thread may give NaN."""
    cpu = pytest.importorskip("moe_kernels._cpu")
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", cpu.__file__], capture_output=True, text=True, check=True
    )
    assert "vmovups" in code.stdout
    assert [line for line in code.stdout.splitlines() if "%mm" in line] == []
