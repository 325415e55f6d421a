"""Builds csrc/ into moe_kernels._cpu and, if plan_cuda says so, moe_kernels._cuda.

Environment variables: MOE_KERNELS_CUDA=0|1|auto, TORCH_CUDA_ARCH_LIST (capabilities below 8.0 or unknown to nvcc are
left out), MAX_JOBS, CUDA_HOME, CXX, CI (warnings are errors unless it is empty, 0 or false).
"""

import functools
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import ninja
import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
X86 = platform.machine() in ("x86_64", "AMD64")

# Every csrc/cpu/*.cpp except module.cpp is compiled once per instruction set, into a namespace of that name. -mno-mmx:
# gcc 12 moves vectors of 8 bytes through MMX registers without resetting the x87 state, and a later long double is NaN.
ISAS = {"base": ""}
if X86:
    ISAS = {
        "base": "-mno-mmx",
        "avx2": "-mno-mmx -march=x86-64-v3",
        "avx512": "-mno-mmx -march=x86-64-v4 -mprefer-vector-width=512",
    }

# Machine code for capabilities 8.x, 9.x, 10.x and 12.x; PTX for all other capabilities above 8.0.
DEFAULT_ARCHITECTURES = "8.0;9.0+PTX;10.0;12.0"

# -fno-trapping-math and -fno-math-errno let loops with comparisons and sqrt vectorise; neither changes a result.
CXXFLAGS = "-O3 -std=c++17 -fPIC -fvisibility=hidden -g0 -Wall -Wextra -fopenmp -fno-trapping-math -fno-math-errno"
NVCCFLAGS = "-O3 -std=c++17 -Xcompiler -fPIC,-fvisibility=hidden"

# Warnings are errors in CI. Elsewhere a newer compiler with more warnings must not stop a build.
if os.environ.get("CI", "").lower() not in ("", "0", "false"):
    CXXFLAGS += " -Werror"
    NVCCFLAGS += " -Werror all-warnings"

MAX_JOBS = os.environ.get("MAX_JOBS")
if MAX_JOBS and not re.fullmatch("0*[1-9][0-9]*", MAX_JOBS):
    raise SystemExit(f"MAX_JOBS must be a number of parallel jobs, such as 4; got {MAX_JOBS!r}")


def say(text: str) -> None:
    """Prints a line that --quiet does not hide, before any output of the compilers."""
    print(f"moe_kernels: {text}", flush=True)


@functools.cache
def plan_cuda() -> tuple[Path, list[str]] | None:
    """nvcc and the capabilities to compile for, such as ["8.0", "9.0+PTX"]; None to build C++ alone. Says which.

    The capabilities are those in TORCH_CUDA_ARCH_LIST, else of the visible GPUs. Without either, MOE_KERNELS_CUDA=auto
    builds C++ alone and 1 compiles for DEFAULT_ARCHITECTURES. Without nvcc, auto builds C++ alone and 1 is an error.
    """
    wanted = os.environ.get("MOE_KERNELS_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"MOE_KERNELS_CUDA must be 0, 1 or auto; got {wanted!r}")
    if wanted == "0":
        say("building C++ alone: MOE_KERNELS_CUDA=0")
        return None
    nvcc = find_nvcc()
    if wanted == "1" and nvcc is None:
        raise SystemExit(
            "MOE_KERNELS_CUDA=1 needs nvcc: put it on the PATH or set CUDA_HOME, or build with MOE_KERNELS_CUDA=0"
        )
    listed = [each for each in re.split("[; ]", os.environ.get("TORCH_CUDA_ARCH_LIST", "")) if each]
    # Run by its path: importing moe_kernels needs torch.
    look = runpy.run_path(str(ROOT / "moe_kernels" / "_visible_gpus.py"))["look"]
    visible, no_gpu = ([], "") if listed else look()
    missing = [f"no GPU is visible: {no_gpu}"] if no_gpu else []
    missing += [] if nvcc else ["there is no nvcc on the PATH or in CUDA_HOME"]
    if nvcc and (wanted == "1" or not missing):
        if listed:
            archs, source = supported(nvcc, listed), "in TORCH_CUDA_ARCH_LIST"
        elif visible:
            archs, source = supported(nvcc, [runs_on(each, nvcc) for each in visible]), "of a visible GPU"
        else:
            archs, source = supported(nvcc, DEFAULT_ARCHITECTURES.split(";")), "by default, as no GPU is visible"
        if archs:
            say(f"building C++ and CUDA, for capability {', '.join(archs)} ({source})")
            return nvcc, archs
        missing = [f"nvcc can compile for no capability {source}"]
        if wanted == "1":
            raise SystemExit(f"MOE_KERNELS_CUDA=1: {missing[0]}; list one of 8.0 or above in TORCH_CUDA_ARCH_LIST")
    say(
        f"building C++ alone: {'; '.join(missing)}. To build CUDA for a machine elsewhere, such as one with an H100: "
        'put nvcc on the PATH and set MOE_KERNELS_CUDA=1 TORCH_CUDA_ARCH_LIST="9.0"'
    )
    return None


def find_nvcc() -> Path | None:
    """nvcc in CUDA_HOME if that is set, else on the PATH."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    return Path(found) if found else None


def toolkit(nvcc: Path) -> Path:
    """The CUDA toolkit's folder, as nvcc reports it: nvcc may be a link or a script in another folder."""
    report = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", report, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else nvcc.resolve().parent.parent


@functools.cache
def known(nvcc: Path) -> list[tuple[int, int]]:
    """The capabilities from 8.0 on for which nvcc can compile: the kernels use instructions of 8.0."""
    lines = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    found = [re.fullmatch(r"compute_(\d+)(\d)", each) for each in lines]
    return sorted((int(each[1]), int(each[2])) for each in found if each and int(each[1]) >= 8)


def runs_on(capability: str, nvcc: Path) -> str:
    """What to compile for a GPU of `capability`: that; if nvcc does not know it, the nearest lower one that runs there.

    Machine code runs on later capabilities of its major; on other majors only PTX does.
    """
    major, minor = (int(each) for each in capability.split("."))
    lower = [each for each in known(nvcc) if each <= (major, minor)]
    if not lower or lower[-1] == (major, minor):
        return capability
    nearest = f"{lower[-1][0]}.{lower[-1][1]}" + ("" if lower[-1][0] == major else "+PTX")
    say(f"{nvcc} does not know capability {capability} of a visible GPU: compiling for {nearest}, which runs there")
    return nearest


def supported(nvcc: Path, wanted: list[str]) -> list[str]:
    """Those of the capabilities `wanted` that can be compiled. Says why each other one is left out."""
    kept = []
    for arch in dict.fromkeys(wanted):
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", arch)
        if match is None:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST must list capabilities such as 8.0;9.0+PTX; got {arch!r}")
        if (int(match[1]), int(match[2])) in known(nvcc):
            kept.append(arch)
        else:
            reason = "the kernels need 8.0" if int(match[1]) < 8 else f"{nvcc} does not know it"
            say(f"no code for capability {arch}: {reason}")
    return [each for each in kept if f"{each}+PTX" not in kept]


def gencode(arch: str) -> str:
    """nvcc's option for a capability. Code for 9.0 is made from the PTX of 8.0, which the tests execute."""
    number = arch.removesuffix("+PTX").replace(".", "")
    virtual = "80" if number == "90" else number
    codes = [f"sm_{number}"] + ([f"compute_{virtual}"] if arch.endswith("+PTX") else [])
    return f"-gencode=arch=compute_{virtual},code=[{','.join(codes)}]"


class NinjaBuild(build_ext):
    """Writes build.ninja for the requested modules and runs ninja."""

    def run(self) -> None:
        self.remove_stale()  # here, as setuptools hides self.inplace from build_extensions
        super().run()

    def remove_stale(self) -> None:
        """Removes modules of earlier builds that this build does not make.

        A wheel would contain all of those in build_lib. A build in place makes no wheel: it removes those that this
        Python would import, and leaves other Pythons theirs.
        """
        made = {Path(self.get_ext_filename(extension.name)).name for extension in self.extensions}
        folders = [Path(self.build_lib) / "moe_kernels"]
        if self.inplace:
            folders.append(Path(self.get_ext_fullpath("moe_kernels._cpu")).parent)
        for folder in folders:
            for module in [*folder.glob("_cpu.*so"), *folder.glob("_cuda.*so")]:
                imported = module.name.removeprefix(module.name.split(".")[0]) in EXTENSION_SUFFIXES
                if module.name not in made and (imported or not self.inplace):
                    say(f"removing {module.name} of an earlier build, which this build does not make")
                    module.unlink()

    def build_extensions(self) -> None:
        temp = Path(self.build_temp).resolve()
        temp.mkdir(parents=True, exist_ok=True)
        lines = self.rules()
        for extension in self.extensions:
            lines += self.cuda(temp) if extension.name.endswith("_cuda") else self.cpu(temp)
        (temp / "build.ninja").write_text("\n".join(lines) + "\n")
        program = Path(ninja.BIN_DIR) / "ninja"
        options = ["--quiet"] * (not self.verbose) + (["-j", MAX_JOBS] if MAX_JOBS else [])
        subprocess.run([program, *options, "-C", temp], check=True)

    def rules(self) -> list[str]:
        # Only modules read headers of Python: several Pythons can share the kernels' object files (release/dist.py).
        return [
            f"cxx = {os.environ.get('CXX', 'g++')}",
            f"cxxflags = {CXXFLAGS} -I{CSRC}/include",
            f"python = -I{pybind11.get_include()} -I{sysconfig.get_paths()['include']}",
            "rule cxx",
            "  command = $cxx $cxxflags $flags -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compiling $in $flags",
            "rule link",
            "  command = $cxx -shared -fopenmp $in $libs -o $out",
            "  description = linking $out",
        ]

    def cpu(self, temp: Path) -> list[str]:
        objects, lines = [], []
        for source in sorted((CSRC / "cpu").glob("*.cpp")):
            for isa, march in {"": ""}.items() if source.stem == "module" else ISAS.items():
                out = temp / f"cpu.{source.stem}.{isa or 'module'}.o"
                lines += [f"build {out}: cxx {source}", f"  flags = {march} {f'-DMOE_ISA={isa}' if isa else '$python'}"]
                objects.append(str(out))
        return [*lines, *self.link("moe_kernels._cpu", objects, "")]

    def cuda(self, temp: Path) -> list[str]:
        plan = plan_cuda()
        assert plan is not None
        nvcc, archs = plan
        home = toolkit(nvcc)
        library = home / ("lib64" if (home / "lib64").exists() else "lib")
        jobs = int(MAX_JOBS or (os.cpu_count() or 1) + 2)  # by default as many as ninja runs
        threads = min(len(archs), jobs)
        side_by_side = f"--threads {threads} " if threads > 1 else ""
        flags = f"{NVCCFLAGS} {side_by_side}{' '.join(map(gencode, archs))} -I{CSRC}/include"
        lines = [
            "pool nvcc",  # each nvcc runs `threads` compilers of 300 MB: together no more than `jobs`
            f"  depth = {jobs // threads}",
            "rule nvcc",
            "  pool = nvcc",
            f"  command = {nvcc} {flags} -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compiling $in",
        ]
        module = temp / "cuda.module.o"
        flags = f"""$python -isystem {home}/include -DMOE_CUDA_ARCHITECTURES='"{";".join(archs)}"'"""
        lines += [f"build {module}: cxx {CSRC}/cuda/module.cpp", f"  flags = {flags}"]
        objects = [str(module)]
        for source in sorted((CSRC / "cuda").glob("*.cu")):
            out = temp / f"cuda.{source.stem}.o"
            lines.append(f"build {out}: nvcc {source}")
            objects.append(str(out))
        # cudart is linked statically, so that the module can be imported without the CUDA toolkit.
        libs = f"-L{library} -lcudart_static -ldl -lrt -lpthread"
        return [*lines, *self.link("moe_kernels._cuda", objects, libs)]

    def link(self, name: str, objects: list[str], libs: str) -> list[str]:
        out = Path(self.get_ext_fullpath(name)).resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        return [f"build {out}: link {' '.join(objects)}", f"  libs = {libs}"]


def readable_elsewhere(readme: str) -> str:
    """README.md for a package index: links into the checkout lead nowhere there, and become names of files."""
    readme = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]+\)\n+(\*.*?\*\n+)?", "", readme, flags=re.MULTILINE | re.DOTALL)

    def name(link: re.Match[str]) -> str:
        text, file = link[1], link[2].partition("#")[0]
        return text if file in text else f"{text} (`{file}`)"

    return re.sub(r"\[([^]]+)\]\((?!https?:|#)([^)]+)\)", name, readme)


modules = ["moe_kernels._cpu"]
if not {"sdist", "egg_info", "dist_info"} & set(sys.argv) and plan_cuda():
    modules.append("moe_kernels._cuda")

setup(
    long_description=readable_elsewhere((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    ext_modules=[Extension(name, sources=[]) for name in modules],
    cmdclass={"build_ext": NinjaBuild},
)
