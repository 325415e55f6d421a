"""make matrix: tests in new environments with other versions of torch and Triton than those of make test.

An environment has the versions of requirements-dev.txt but those of torch and Triton. A torch with CUDA's libraries is
left out if it would have to be downloaded (3 GB), unless --download is given. Prints a table; --write puts it into
docs/guide/releases.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from release.environments import ROOT, TORCH, WORK, Environment, Failed, cuda_packages, find_python, say

# Versions of torch, and of Triton to go with them. Those of requirements-dev.txt are left to make test.
PAIRS = (
    ("2.13.0", "3.8.0"),
    ("2.13.0", "3.7.1"),
    ("2.13.0", "3.6.0"),
    ("2.14.1", "3.8.0"),
    ("2.12.1", "3.7.1"),
    ("2.11.0", "3.6.0"),
)
# Every kernel of Triton, compiled and executed on the CPU; make quick, and what torch does with the operators.
TRITON = ["make", "test", "PYTEST=tests/ops tests/machine/test_verify_triton.py -k triton"]
TORCH_TOO = [["make", "quick"], ["make", "test", "PYTEST=tests/pytorch"]]
PAGE = ROOT / "docs" / "guide" / "releases.md"
TABLE = re.compile(r"(?<=<!-- matrix:begin -->\n).*(?=<!-- matrix:end -->)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m release.matrix", description=__doc__)
    parser.add_argument("--pair", action="append", metavar="TORCH,TRITON", help="default: all of PAIRS in this file")
    parser.add_argument("--python", default="3.11", metavar="3.N", help="default: 3.11")
    parser.add_argument("--download", action="store_true", help="download a torch with CUDA's libraries too")
    parser.add_argument("--write", action="store_true", help="put the table into docs/guide/releases.md")
    arguments = parser.parse_args()
    pairs = [tuple(each.split(",")) for each in arguments.pair] if arguments.pair else list(PAIRS)
    if any(len(pair) != 2 for pair in pairs):
        parser.error(f"--pair takes two versions, such as 2.13.0,3.9.0; got {', '.join(arguments.pair)}")
    python = find_python(arguments.python)
    if python is None:
        parser.error(f"--python: there is no python{arguments.python} on the PATH or of pyenv")
    lines = ["| torch | Triton | Python | result |", "|---|---|---|---|"]
    for torch, triton in pairs:
        result = try_pair(torch, triton, python, arguments.download)
        say(f"torch {torch}, Triton {triton}: {result}")
        lines.append(f"| {torch} | {triton} | {arguments.python} | {result} |")
    table = f"Tested on {datetime.now(timezone.utc):%Y-%m-%d}, on a CPU:\n\n" + "\n".join(lines) + "\n"
    say(f"\n{table}")
    if arguments.write:
        PAGE.write_text(TABLE.sub(lambda old: table, PAGE.read_text()))
    return 1 if "| failed" in table else 0


def try_pair(torch: str, triton: str, python: Path, download: bool) -> str:
    """Makes an environment, compiles in place, runs tests, and removes the environment. What came of it."""
    folder = WORK / f"torch-{torch}-triton-{triton}"
    environment = Environment(folder, python)
    try:
        found = environment.resolve(f"torch=={torch}")
        on_disk = any(each.name == "torch" and each.file.startswith("file:") for each in found)
        if cuda_packages(found) and not (on_disk or download):
            return "not tested: pip offers only a build with CUDA's libraries (3 GB)"
        say(f"torch {torch}, Triton {triton}: installing")
        requirements = folder / "requirements.txt"
        requirements.write_text(with_versions((ROOT / "requirements-dev.txt").read_text(), triton))
        environment.install(f"torch=={torch}")
        environment.install("--no-deps", f"triton=={triton}")  # a torch with CUDA's libraries asks for one Triton alone
        environment.install("--requirement", requirements)
        say(f"torch {torch}, Triton {triton}: testing")
        return run_tests(environment, [TRITON] if f"torch=={torch}" == TORCH else [TRITON, *TORCH_TOO])
    except Failed as error:
        return f"failed before the tests: {str(error).strip().splitlines()[-1]}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_versions(requirements: str, triton: str) -> str:
    """The lines of requirements-dev.txt that tests need, without torch, and with another Triton.

    Triton's interpreter before 3.7 takes numpy below 2.4.
    """
    needless = ("torch", "triton", "ruff", "mypy", "check-jsonschema", "sphinx", "furo", "myst", "matplotlib")
    lines = [each for each in requirements.splitlines() if not each.startswith(needless)]
    if triton < "3.7":
        lines = [re.sub(r"^numpy==.*", "numpy==2.3.5", each) for each in lines]
    return "\n".join(lines) + "\n"


def run_tests(environment: Environment, commands: list[list[str]]) -> str:
    """Runs the commands in the checkout, which they build in place. The closing lines of pytest."""
    closing: list[str] = []
    settings = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    settings["MOE_KERNELS_CUDA"] = "0"
    for command in commands:
        with (WORK / "matrix.log").open("a+") as log:
            log.write(f"\n{environment.python.parent.parent.name}: {' '.join(command)}\n")
            log.flush()
            start = log.seek(0, 2)
            with_python = [*command, "VENV=0", f"PYTHON={environment.python}"]
            done = subprocess.run(with_python, cwd=ROOT, env=settings, stdout=log, stderr=subprocess.STDOUT)
            log.seek(start)
            found = re.findall(r"^=* ?((?:\d+ \w+, )*\d+ passed.*) in [\d.]+s", log.read(), re.MULTILINE)
        closing += found[-1:]
        if done.returncode != 0:
            failed = " ".join(command).replace("PYTEST=", "")
            return f"failed: `{failed}`: {closing[-1] if found else f'see {WORK.name}/matrix.log'}"
    return f"passed: {'; '.join(closing)}"


if __name__ == "__main__":
    sys.exit(main())
