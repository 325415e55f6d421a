"""A plugin of pytest that adds to the summary how many launches the executor ran, and what never ran."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from . import build, coverage, cuda_launch
from .session import session as executed

SM_90 = "triton sm_90"
KERNELS = build.ROOT / "moe_kernels" / "backends" / "triton"
DATA = pytest.StashKey[dict[str, Any]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    of_process = coverage.gather(executed)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ptx"] = of_process
    else:
        coverage.merge(session.config.stash.setdefault(DATA, {}), of_process)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    if "ptx" in output:
        coverage.merge(node.config.stash.setdefault(DATA, {}), output["ptx"])


def known_kernels() -> list[str]:
    """Names of the package's kernels, such as "triton _kwta_fwd"; those in CUDA only if nvcc is usable here. A
    Triton kernel with a matrix product has a second name, such as "triton sm_90 _grouped_gemm_fwd"."""
    launched = triton_kernels()
    found = [f"triton {name}" for name in launched]
    found += [
        f"{SM_90} {name}" for name, source in launched.items() if re.search(r"\b(tl\.dot|multiply_tile)\(", source)
    ]
    if cuda_launch.unavailable() is None:
        found += [f"cuda {coverage.family(cuda_launch.demangled(name))}" for name in cuda_launch.texts()]
    return sorted(set(found))


def triton_kernels() -> dict[str, str]:
    """Name -> source of the Triton kernels: the jitted functions that no jitted function uses."""
    statements = [each for file in sorted(KERNELS.glob("*.py")) for each in ast.parse(file.read_text()).body]
    functions = [each for each in statements if isinstance(each, ast.FunctionDef)]
    jitted = [each for each in functions if any("triton.jit" in ast.unparse(one) for one in each.decorator_list)]
    named = {node.id for each in jitted for node in ast.walk(each) if isinstance(node, ast.Name)}
    return {each.name: ast.unparse(each) for each in jitted if each.name not in named}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    data = config.stash.get(DATA, {})
    if not data.get("launches"):
        return
    of_sm_90 = [each for name, each in data["kernels"].items() if name.startswith(f"{SM_90} ")]
    specialisations, sm_90_specialisations = (
        sum(len(each["specialisations"]) for each in some) for some in (data["kernels"].values(), of_sm_90)
    )
    places = [len(each["places"]) for each in data["kernels"].values()]
    missed, lines = coverage.missed(data), coverage.lines(data)
    text = coverage.report(data)
    terminalreporter.section("compiled PTX, executed on the CPU")
    kernels = {name.replace(SM_90, "triton") for name in data["kernels"]}  # a kernel for sm_80 and sm_90 counts once
    terminalreporter.write_line(
        f"{data['launches']} launches of {len(kernels)} kernels in {specialisations} specialisations: "
        f"{data['steps'] / 1e6:.1f} million warp instructions in {data['seconds']:.1f} s"
    )
    terminalreporter.write_line(
        f"of these for sm_90: {sum(each['launches'] for each in of_sm_90)} launches of {len(of_sm_90)} kernels in "
        f"{sm_90_specialisations} specialisations"
    )
    terminalreporter.write_line(
        f"source lines that no kernel executed: {len(lines) - sum(lines.values())} of {len(lines)}; places (lines, "
        f"calls and waits of each kernel) never executed: {sum(map(len, missed.values()))} of {sum(places)}"
    )
    file = build.cache_folder() / "coverage.txt"
    file.write_text(text + "\n")
    terminalreporter.write_line(f"listed in {file}")
    if config.getoption("keyword") or config.getoption("markexpr") or config.args != config.getini("testpaths"):
        return  # a selection of tests need not launch every kernel
    for line in coverage.never_launched(data, known_kernels()):
        terminalreporter.write_line(f"never launched: {line}")
    for line in coverage.waits_missed(data):
        terminalreporter.write_line(f"never executed: {line}")
