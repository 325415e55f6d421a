"""The build and its wheels."""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from tests.ptx import cuda_launch

ROOT = Path(__file__).parents[2]
PACKED = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md")  # what a build reads besides sources

pytestmark = pytest.mark.timeout(900)  # for compiling csrc/cuda


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources, a torch that cannot be imported, and compilers that skip most of the work."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("csrc", "moe_kernels", "python_ref"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in (*PACKED, "Makefile", "requirements-dev.txt"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "no_torch").mkdir()
    (folder / "no_torch" / "torch.py").write_text("raise ImportError('the build must not import torch')\n")
    compiler = os.environ.get("CXX", "g++")
    touch = 'for each; do test "$last" = -o && touch "$each"; last=$each; done; true'
    write_program(folder / "idle_cxx", touch)  # makes empty files
    # reading_cxx only preprocesses (-E), which needs every included file: those of the base instruction set, which the
    # others include too. It does not link: it makes empty files.
    reads = f'case " $* " in *-DMOE_ISA=avx*) ;; *" -c "*) exec {compiler} "$@" -E;; esac'
    write_program(folder / "reading_cxx", f"{reads}\n{touch}")
    # cuda_cxx compiles csrc/cuda/module.cpp and links the CUDA module. Its other outputs are empty files.
    write_program(folder / "cuda_cxx", f'case "$*" in */csrc/cuda/*|*/_cuda*) exec {compiler} "$@" -O0;; esac\n{touch}')
    return folder


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def without_settings() -> dict[str, str]:
    """The environment without what changes a build or a run of make."""
    settings = ["CUDA_HOME", "MOE_KERNELS_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "CUDA_VISIBLE_DEVICES"]
    settings += ["MAKEFLAGS", "MAKELEVEL", "MFLAGS", "VENV", "QUICK", "OUT"]
    return {name: value for name, value in os.environ.items() if name not in settings}


def build(checkout: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python in the checkout. By default no GPU is visible and the compiler is reading_cxx, as these tests call no
    CPU kernel."""
    reading = {"CXX": str(checkout / "reading_cxx"), "PYTHONPATH": str(checkout / "no_torch")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=checkout,
        env={**without_settings(), **reading, "CUDA_VISIBLE_DEVICES": "", **environment},
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


def rules_of(checkout: Path) -> str:
    (rules,) = (checkout / "build").glob("temp*/build.ninja")
    return rules.read_text()


SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
OTHER = ".cpython-312-x86_64-linux-gnu.so" if "312" not in SUFFIX else ".cpython-311-x86_64-linux-gnu.so"


def leave_modules(folder: Path, *suffixes: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in suffixes:
        for name in ("_cpu", "_cuda"):
            (folder / f"{name}{suffix}").write_text("left by an earlier build")


def test_a_stale_module_is_not_in_the_wheel(checkout):
    idle = {"MOE_KERNELS_CUDA": "0", "CXX": str(checkout / "idle_cxx")}
    build(checkout, "setup.py", "build_ext", **idle)
    (built,) = (checkout / "build").glob("lib*/moe_kernels")
    for folder in (checkout / "moe_kernels", built):
        leave_modules(folder, SUFFIX, OTHER, ".so")
    names = wheel(checkout, checkout, **idle)
    assert [name for name in names if name.endswith(".so")] == [f"moe_kernels/_cpu{SUFFIX}"]
    assert {"moe_kernels/ops/kwta.py", "python_ref/kwta.py"} <= names


def test_a_build_in_place_leaves_the_modules_of_other_pythons(checkout):
    leave_modules(checkout / "moe_kernels", SUFFIX, OTHER, ".so")
    idle = {"MOE_KERNELS_CUDA": "0", "CXX": str(checkout / "idle_cxx")}
    done = build(checkout, "setup.py", "build_ext", "--inplace", **idle)
    assert done.returncode == 0, done.stderr
    left = sorted(path.name for path in (checkout / "moe_kernels").glob("*.so"))
    # Modules that this Python would import and this build did not make are gone.
    assert left == sorted([f"_cpu{SUFFIX}", f"_cpu{OTHER}", f"_cuda{OTHER}"])


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


def test_the_metadata_have_what_an_index_shows(checkout, tmp_path):
    done = build(checkout, "setup.py", "-q", "dist_info", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.dist-info/METADATA")
    metadata = email.message_from_string(file.read_text())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Author"] == "The moe_kernels authors"
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
    assert "Sinkhorn" in metadata["Keywords"]
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    readme = metadata.get_payload()
    assert "## First lines" in readme
    # Links into the checkout lead nowhere on an index.
    assert [each for each in re.findall(r"\]\(([^)]*)\)", readme) if not each.startswith(("https://", "#"))] == []
    assert "(`CONTRIBUTING.md`)" not in readme
    assert "CONTRIBUTING.md says what a change needs" in readme
    assert "[How]" not in readme
    assert "How (`docs/guide/proof.md`)." in readme


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
        assert ("-Werror" in rules_of(checkout)) == strict


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
    assert "arch=compute_80,code=[sm_80] -gencode=arch=compute_80,code=[sm_90,compute_80] -I" in rules_of(checkout)
    for arch in ("7.0", "7.5"):
        assert f"moe_kernels: no code for capability {arch}: the kernels need 8.0" in done.stdout
    assert f"moe_kernels: no code for capability 15.0: {home}/bin/nvcc does not know it" in done.stdout
    done = build(checkout, "setup.py", "build_ext", MOE_KERNELS_CUDA="1", **quick)
    assert re.findall(r"code=\[sm_(\d+)", rules_of(checkout)) == ["80", "90"]
    assert "CUDA, for capability 8.0, 9.0+PTX (by default, as no GPU is visible)" in done.stdout


def test_without_a_supported_architecture_cuda_is_built_only_on_request(checkout, tmp_path):
    home = fake_nvcc(tmp_path, "compute_75", "compute_80")
    wanted = {"CUDA_HOME": str(home), "CXX": "/bin/false", "TORCH_CUDA_ARCH_LIST": "7.5"}
    done = build(checkout, "setup.py", "build_ext", **wanted)
    assert "building C++ alone: nvcc can compile for no capability in TORCH_CUDA_ARCH_LIST. " in done.stdout
    assert "nvcc" not in rules_of(checkout)
    done = build(checkout, "setup.py", "build_ext", MOE_KERNELS_CUDA="1", **wanted)
    assert done.returncode != 0
    assert "MOE_KERNELS_CUDA=1: nvcc can compile for no capability in TORCH_CUDA_ARCH_LIST" in done.stderr


DRIVER = """
static const int capabilities[][2] = {%s};
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int* count) { *count = sizeof capabilities / sizeof *capabilities; return 0; }
int cuDeviceGet(int* device, int index) { *device = 100 + index; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  *value = capabilities[device - 100][which - 75];
  return 0;
}
"""


def fake_driver(folder: Path, *capabilities: str) -> dict[str, str]:
    """The environment of a program to which the CUDA driver shows GPUs of these capabilities."""
    source = folder / "driver.c"
    source.write_text(DRIVER % ", ".join("{" + each.replace(".", ", ") + "}" for each in capabilities))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return {"LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


def compiled_for(checkout: Path) -> list[str]:
    """The architectures of nvcc's options in build.ninja, such as ["sm_80", "sm_90,compute_80"]."""
    return re.findall(r"code=\[(\S+)\]", rules_of(checkout))


def test_cuda_is_built_for_the_visible_gpus(checkout, tmp_path):
    quick = {"CUDA_HOME": str(fake_nvcc(tmp_path, "compute_80", "compute_86", "compute_90")), "CXX": "/bin/false"}
    gpus = fake_driver(tmp_path, "9.0", "8.6", "9.0", "7.5")
    for wanted in ("auto", "1"):
        done = build(checkout, "setup.py", "--quiet", "build_ext", MOE_KERNELS_CUDA=wanted, **quick, **gpus)
        assert compiled_for(checkout) == ["sm_86", "sm_90"]
        assert "moe_kernels: building C++ and CUDA, for capability 8.6, 9.0 (of a visible GPU)" in done.stdout
        assert done.stdout.count("moe_kernels: no code for capability 7.5: the kernels need 8.0") == 1
    build(checkout, "setup.py", "build_ext", TORCH_CUDA_ARCH_LIST="8.0", **quick, **gpus)
    assert compiled_for(checkout) == ["sm_80"]
    build(checkout, "setup.py", "build_ext", MOE_KERNELS_CUDA="0", **quick, **gpus)
    assert "nvcc" not in rules_of(checkout)


def test_a_gpu_that_nvcc_does_not_know_gets_code_that_runs_on_it(checkout, tmp_path):
    home = fake_nvcc(tmp_path, "compute_75", "compute_80", "compute_86", "compute_90", "compute_90a", "compute_100")
    quick = {"CUDA_HOME": str(home), "CXX": "/bin/false"}
    for shown, codes in (("8.9", ["sm_86"]), ("10.3", ["sm_100"]), ("12.1", ["sm_100,compute_100"])):
        done = build(checkout, "setup.py", "build_ext", **quick, **fake_driver(tmp_path, shown))
        assert compiled_for(checkout) == codes
        assert f"nvcc does not know capability {shown} of a visible GPU: compiling for " in done.stdout
    old = fake_driver(tmp_path, "7.5")
    done = build(checkout, "setup.py", "build_ext", **quick, **old)
    assert "building C++ alone: nvcc can compile for no capability of a visible GPU. " in done.stdout
    assert "nvcc" not in rules_of(checkout)
    done = build(checkout, "setup.py", "build_ext", MOE_KERNELS_CUDA="1", **quick, **old)
    assert "MOE_KERNELS_CUDA=1: nvcc can compile for no capability of a visible GPU; list one of" in done.stderr


def test_without_a_gpu_one_line_says_how_to_build_for_one_elsewhere(checkout, tmp_path):
    quick = {"CUDA_HOME": str(fake_nvcc(tmp_path, "compute_80", "compute_90")), "CXX": "/bin/false"}
    (tmp_path / "none").mkdir()
    for home, why in (
        (quick, "no GPU is visible: "),
        ({**quick, "CUDA_HOME": "/none"}, "there is no nvcc on the PATH"),
    ):
        done = build(checkout, "setup.py", "--quiet", "build_ext", **home)
        (line,) = (each for each in done.stdout.splitlines() if each.startswith("moe_kernels: "))
        assert line.startswith("moe_kernels: building C++ alone: no GPU is visible: ")
        assert why in line
        assert 'MOE_KERNELS_CUDA=1 TORCH_CUDA_ARCH_LIST="9.0"' in line
        assert "nvcc" not in rules_of(checkout)
    build(checkout, "setup.py", "build_ext", MOE_KERNELS_CUDA="1", TORCH_CUDA_ARCH_LIST="9.0", **quick)
    assert compiled_for(checkout) == ["sm_90"]


def test_architectures_of_a_file_compile_side_by_side(checkout, tmp_path):
    quick = {"CUDA_HOME": str(fake_nvcc(tmp_path, "compute_80", "compute_90")), "CXX": "/bin/false"}
    for archs, jobs, options, depth in (
        ("8.0;9.0", "8", "--threads 2 -gencode", "4"),
        ("8.0;9.0", "1", "-fvisibility=hidden -gencode", "1"),
        ("9.0", "8", "-fvisibility=hidden -gencode", "8"),
    ):
        build(checkout, "setup.py", "build_ext", TORCH_CUDA_ARCH_LIST=archs, MAX_JOBS=jobs, CI="", **quick)
        assert options in rules_of(checkout)
        assert ("--threads" in rules_of(checkout)) == ("--threads" in options)
        assert re.search(r"^pool nvcc\n  depth = (\d+)$", rules_of(checkout), re.MULTILINE)[1] == depth
    done = build(checkout, "setup.py", "build_ext", MAX_JOBS="many")
    assert "MAX_JOBS must be a number of parallel jobs, such as 4; got 'many'" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gpu_looks_for_a_gpu_before_it_installs_anything(checkout, tmp_path):
    def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
        environment = {**without_settings(), **environment}
        return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)

    make = ("make", "gpu", f"PYTHON={sys.executable}")
    commands = run(*make, "-n", "QUICK=1", "OUT=results").stdout.splitlines()
    assert commands[0] == f"{sys.executable} moe_kernels/_visible_gpus.py"
    assert commands[-1].endswith("-m bench gpu --quick --out results")
    for options in ([], ["-j4"], ["VENV=0"]):
        start = time.monotonic()
        done = run(*make, *options, CUDA_VISIBLE_DEVICES="")
        assert time.monotonic() - start < 10
        assert done.returncode == 2
        assert re.search(
            r"^no GPU that the CUDA driver shows; `make bench` measures the CPU\n\(.*\)$", done.stderr, re.M
        )
        assert "setup.py" not in done.stdout
        assert not (checkout / ".venv").exists()
    found = run(sys.executable, "-S", "moe_kernels/_visible_gpus.py", **fake_driver(tmp_path, "10.3", "9.0", "9.0"))
    assert (found.returncode, found.stdout) == (0, "9.0\n10.3\n")


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
    module = checkout / "moe_kernels" / f"_cuda{SUFFIX}"
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
