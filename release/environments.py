"""Virtual environments of several Pythons, and what pip would install into them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "release"  # environments and files that are made on the way
TORCH = "torch=={}".format(
    re.findall(r"^torch==(\S+)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)[0]
)  # the version that the tests run on


class Failed(Exception):
    """A command failed. The message has the command and the end of its output."""


def say(text: str) -> None:
    print(text, flush=True)


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """The output of a command.

    Raises:
        Failed: its exit status is not 0.
    """
    settings = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})}
    settings.pop("PYTHONPATH", None)
    done = subprocess.run([*map(str, command)], cwd=cwd, env=settings, capture_output=True, text=True)
    if done.returncode != 0:
        shown = " ".join(Path(each).name if isinstance(each, Path) else each for each in command)
        raise Failed(f"{shown}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def find_python(version: str) -> Path | None:
    """A Python of version "3.12": this one, python3.12 on the PATH, or the newest of pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    installed = sorted(pyenv.glob(f"{version}.*/bin/python"), key=lambda path: _numbers(path.parent.parent.name))
    on_path = shutil.which(f"python{version}")
    for each in [Path(sys.executable), *([Path(on_path)] if on_path else []), *reversed(installed)]:
        asked = [str(each), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return each
    return None


def _numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]


class Package(NamedTuple):
    """What pip would install, and the address of its file."""

    name: str
    version: str
    file: str


class Environment:
    """A virtual environment, made anew."""

    def __init__(self, folder: Path, python: Path | str = sys.executable) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "venv", folder)
        self.python = folder / "bin" / "python"

    def pip(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        return run(self.python, "-m", "pip", *arguments, cwd=cwd, env={"MOE_KERNELS_CUDA": "0"})

    def install(self, *packages: str | Path) -> None:
        self.pip("install", "--quiet", *packages)

    def resolve(self, *packages: str) -> list[Package]:
        """What pip would download and install for `packages`, with all that they need. Nothing is downloaded.

        Raises:
            Failed: pip finds no such version for this Python.
        """
        wanted = ("install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--report", "-")
        report = json.loads(self.pip(*wanted, *packages))
        return [
            Package(each["metadata"]["name"], each["metadata"]["version"], each["download_info"]["url"])
            for each in report["install"]
        ]


def cuda_packages(found: Iterable[Package]) -> list[str]:
    """Names of the packages with CUDA's libraries, which a torch built for CPUs does not need."""
    return sorted(each.name for each in found if each.name.startswith(("nvidia-", "cuda-")))
