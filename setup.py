"""Builds csrc/ into moe_kernels._cpu and, if find_nvcc finds nvcc, moe_kernels._cuda.

Environment variables: MOE_KERNELS_CUDA=0|1|auto, TORCH_CUDA_ARCH_LIST (default "8.0;9.0+PTX;10.0;12.0"; capabilities
below 8.0 or unknown to nvcc are left out), MAX_JOBS, CUDA_HOME, CXX, CI (warnings are errors unless it is empty, 0 or
false).
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
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


def find_nvcc() -> Path | None:
    """nvcc in CUDA_HOME if that is set, else on the PATH; None if MOE_KERNELS_CUDA is 0.

    If nvcc is missing or can compile for no capability in TORCH_CUDA_ARCH_LIST: None for auto, an error for 1.
    """
    wanted = os.environ.get("MOE_KERNELS_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"MOE_KERNELS_CUDA must be 0, 1 or auto; got {wanted!r}")
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if wanted == "1" and found is None:
        raise SystemExit(
            "MOE_KERNELS_CUDA=1 needs nvcc: put it on the PATH or set CUDA_HOME, or build with MOE_KERNELS_CUDA=0"
        )
    if wanted == "0" or found is None:
        print(f"moe_kernels: building without CUDA ({'MOE_KERNELS_CUDA=0' if wanted == '0' else 'no nvcc found'})")
        return None
    if not architectures(Path(found)):
        if wanted == "1":
            raise SystemExit(
                "MOE_KERNELS_CUDA=1: nvcc can compile for no capability in TORCH_CUDA_ARCH_LIST; list one that it knows"
            )
        print("moe_kernels: building without CUDA (nvcc can compile for no capability in TORCH_CUDA_ARCH_LIST)")
        return None
    return Path(found)


def toolkit(nvcc: Path) -> Path:
    """The CUDA toolkit's folder, as nvcc reports it: nvcc may be a link or a script in another folder."""
    report = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", report, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else nvcc.resolve().parent.parent


def architectures(nvcc: Path) -> list[str]:
    """The capabilities of TORCH_CUDA_ARCH_LIST that can be compiled, such as ["8.0", "9.0+PTX"].

    Prints a note for each one left out: below 8.0, as the kernels use instructions of 8.0, or unknown to nvcc.
    """
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHITECTURES)
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    kept = []
    for arch in filter(None, wanted.replace(" ", ";").split(";")):
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", arch)
        if match is None:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST must list capabilities such as 8.0;9.0+PTX; got {arch!r}")
        reason = "the kernels need 8.0" if int(match[1]) < 8 else f"{nvcc} does not know it"
        if int(match[1]) >= 8 and f"compute_{match[1]}{match[2]}" in known:
            kept.append(arch)
        else:
            print(f"moe_kernels: no code for capability {arch}: {reason}")
    return kept


def gencode(arch: str) -> str:
    """nvcc's option for a capability. Code for 9.0 is made from the PTX of 8.0, which the tests execute."""
    number = arch.removesuffix("+PTX").replace(".", "")
    virtual = "80" if number == "90" else number
    codes = [f"sm_{number}"] + ([f"compute_{virtual}"] if arch.endswith("+PTX") else [])
    return f"-gencode=arch=compute_{virtual},code=[{','.join(codes)}]"


class NinjaBuild(build_ext):
    """Writes build.ninja for the requested modules and runs ninja."""

    def build_extensions(self) -> None:
        self.remove_stale()
        temp = Path(self.build_temp).resolve()
        temp.mkdir(parents=True, exist_ok=True)
        lines = self.rules()
        for extension in self.extensions:
            lines += self.cuda(temp) if extension.name.endswith("_cuda") else self.cpu(temp)
        (temp / "build.ninja").write_text("\n".join(lines) + "\n")
        jobs = os.environ.get("MAX_JOBS")
        program = Path(ninja.BIN_DIR) / "ninja"
        subprocess.run([program, "--quiet", "-C", temp, *(["-j", jobs] if jobs else [])], check=True)

    def remove_stale(self) -> None:
        """Removes modules of earlier builds that this build does not make: they would be packaged too."""
        requested = {Path(self.get_ext_fullpath(extension.name)).name for extension in self.extensions}
        folders = {Path(self.build_lib) / "moe_kernels", Path(self.get_ext_fullpath("moe_kernels._cpu")).parent}
        for folder in folders:
            for module in [*folder.glob("_cpu*.so"), *folder.glob("_cuda*.so")]:
                if module.name not in requested:
                    module.unlink()

    def rules(self) -> list[str]:
        include = f"-I{CSRC}/include -I{pybind11.get_include()} -I{sysconfig.get_paths()['include']}"
        return [
            f"cxx = {os.environ.get('CXX', 'g++')}",
            f"cxxflags = {CXXFLAGS} {include}",
            "rule cxx",
            "  command = $cxx $cxxflags $flags -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            "  command = $cxx -shared -fopenmp $in $libs -o $out",
        ]

    def cpu(self, temp: Path) -> list[str]:
        objects, lines = [], []
        for source in sorted((CSRC / "cpu").glob("*.cpp")):
            for isa, march in {"": ""}.items() if source.stem == "module" else ISAS.items():
                out = temp / f"cpu.{source.stem}.{isa or 'module'}.o"
                lines += [f"build {out}: cxx {source}", f"  flags = {march} {f'-DMOE_ISA={isa}' if isa else ''}"]
                objects.append(str(out))
        return [*lines, *self.link("moe_kernels._cpu", objects, "")]

    def cuda(self, temp: Path) -> list[str]:
        nvcc = find_nvcc()
        assert nvcc is not None
        home, archs = toolkit(nvcc), architectures(nvcc)
        library = home / ("lib64" if (home / "lib64").exists() else "lib")
        flags = f"{NVCCFLAGS} {' '.join(map(gencode, archs))} -I{CSRC}/include"
        lines = [
            "rule nvcc",
            f"  command = {nvcc} {flags} -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]
        module = temp / "cuda.module.o"
        flags = f"""-isystem {home}/include -DMOE_CUDA_ARCHITECTURES='"{";".join(archs)}"'"""
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


modules = ["moe_kernels._cpu"]
if not {"sdist", "egg_info", "dist_info"} & set(sys.argv) and find_nvcc():
    modules.append("moe_kernels._cuda")

setup(
    ext_modules=[Extension(name, sources=[]) for name in modules],
    cmdclass={"build_ext": NinjaBuild},
)
