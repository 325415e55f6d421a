"""pytest's closing lines on PTX: what was executed and what was not. The workers of pytest-xdist send theirs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from . import build, coverage, cuda_launch
from .session import session

SM_90 = "triton sm_90"
DATA = pytest.StashKey[dict[str, Any]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    mine = coverage.gather(_ptx())
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ptx"] = mine
    else:
        coverage.merge(session.config.stash.setdefault(DATA, {}), mine)


def _ptx() -> Any:
    return session


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    if "ptx" in output:
        coverage.merge(node.config.stash.setdefault(DATA, {}), output["ptx"])


def known_kernels() -> list[str]:
    """Every kernel of the package, by backend; those that make products for sm_90 as well."""
    import importlib
    import pkgutil

    import moe_kernels.backends.triton as kernels

    found = []
    for module in pkgutil.iter_modules(kernels.__path__):
        members = vars(importlib.import_module(f"{kernels.__name__}.{module.name}")).values()
        entries = [each for each in members if type(each).__name__ == "JITFunction" and _is_entry(each)]
        products = [each for each in entries if re.search(r"\b(tl\.dot|product)\(", each.src)]
        found += [f"triton {each.fn.__name__}" for each in entries]
        found += [f"{SM_90} {each.fn.__name__}" for each in products]
    if cuda_launch.unavailable() is None:
        for name in cuda_launch.texts(cuda_launch.KERNELS):
            title = cuda_launch.demangled(name).partition("<")[0].rsplit("::", 1)[-1]
            found.append(f"cuda {title}")
    return sorted(set(found))


def _is_entry(function: Any) -> bool:
    """Entries take pointers and return nothing; the others are called by them."""
    source = function.src if isinstance(function.src, str) else ""
    return any("_ptr" in name for name in function.arg_names) and not re.search(r"^\s+return[ \t]+\S", source, re.M)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    data = config.stash.get(DATA, {})
    if not data.get("launches"):
        return
    hopper = [each for name, each in data["kernels"].items() if name.startswith(f"{SM_90} ")]
    specialisations, hopper_specialisations = (
        sum(len(each["specialisations"]) for each in some) for some in (data["kernels"].values(), hopper)
    )
    places = [len(each["lines"]) for each in data["kernels"].values()]
    missed = coverage.missed(data)
    text = coverage.report(data)
    terminalreporter.section("compiled PTX, executed on the CPU")
    terminalreporter.write_line(
        f"{data['launches']} launches of {len(data['kernels']) - len(hopper)} kernels in {specialisations} "
        f"specialisations: {data['steps'] / 1e6:.1f} million instructions of warps in {data['seconds']:.1f} s"
    )
    terminalreporter.write_line(
        f"of these for sm_90: {sum(each['launches'] for each in hopper)} launches of {len(hopper)} kernels in "
        f"{hopper_specialisations} specialisations"
    )
    terminalreporter.write_line(f"source lines never executed: {sum(map(len, missed.values()))} of {sum(places)}")
    file = build.cache_folder() / "coverage.txt"
    file.write_text(text + "\n")
    terminalreporter.write_line(f"listed in {file}")
    if config.getoption("keyword") or config.getoption("markexpr") or config.args != config.getini("testpaths"):
        return  # a part of the suite leaves most of it out
    for line in coverage.never_launched(data, known_kernels()):
        terminalreporter.write_line(f"never launched: {line}")
    for line in coverage.waits_missed(data):
        terminalreporter.write_line(f"never executed: {line}")
