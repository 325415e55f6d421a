"""Checks the machine code of the CUDA kernels for sm_80 and sm_90, both compiled from PTX for sm_80. Only kernels in
SPILLED spill registers to local memory, and the code has the instructions in INSTRUCTIONS. A kernel's numbers of
registers, bytes of static shared memory and instructions of the hot loop are at most those of machine_code_cuda.json.

The tests run ptxas only for a source whose digest (`origin`) differs from that in the table.

After a change of kernels, this file or sass.py:  python -m tests.machine.test_machine_code_cuda --update
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import sass
from tests.ptx import build, cuda_launch, toolkit
from tests.ptx.text import code_of

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("machine_code_cuda.json")
ARCHITECTURES = ("sm_80", "sm_90")
# Most bytes of the stack. Sinkhorn's logarithmic backward of n = 5 to 8 has loops of 5000 instructions, and runs only
# for matrices that the scaled form cannot take.
SPILLED = {("sinkhorn_log_bwd_kernel<Team<2, 2, 4, 4> >", "sm_90"): 32}
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
KIT = toolkit.find()
MISSING = KIT.no_nvcc or KIT.no_cuobjdump

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=f"machine code: {MISSING}"),
    pytest.mark.timeout(900),  # ptxas may have to compile all kernels of a source
]

# Pattern of kernel names -> patterns of instructions that the code of these kernels must have.
INSTRUCTIONS = {
    r"kwta_(warp|block|bwd)_kernel<.*>": [r"LDG\.E\.128", r"STG\.E\.EF\.128"],
    r"kwta_(block_kernel<.*|warp_kernel<.*, 32)>": [r"REDUX"],
    r"kwta_warp_kernel<.*, (2|4|8|16)>": [r"SHFL\.BFLY"],
    r"kwta_(warp|block)_kernel<.*, false, \d+, \d+>": [r"VOTE"],  # false: rows are not whole, aligned 16-byte vectors
    r"kwta_(warp|block)_kernel<__(nv_bfloat16|half), .*>": [r"IDP\.4A", r"PRMT"],
    r"topk_gate_kernel<.*>": [r"REDUX", r"MUFU\.EX2"],
    r"topk_gate_scored_kernel<.*>": [r"REDUX", r"MUFU\.EX2"],
    r"plan_(count|rank)_kernel<.*>": [r"ATOMS\.POPC\.INC"],
    r"plan_rank_kernel<.*>": [r"MATCH\.ANY"],
    r"dispatch_kernel<uint4>": [r"LDG\.E\.128", r"STG\.E\.EF\.128"],
    r"combine_(bwd_)?kernel<.*, uint4>": [r"LDG\.E\.128", r"STG\.E\.EF\.128", r"FFMA"],
    r"sinkhorn_kernel<.*>": [r"LDG\.E\.128", r"STG\.E\.128", r"FFMA", r"MUFU\.EX2", r"MUFU\.RCP"],
    r"sinkhorn_log_kernel<.*>": [r"LDG\.E\.128", r"STG\.E\.128", r"DFMA", r"MUFU\.EX2"],
    r"sinkhorn_(log_)?bwd_kernel.*": [r"DFMA"],
    r"grouped_gemm_(wgrad_)?kernel<.*>": [
        r"HMMA\.16816\.F32",
        r"LDSM\.16\.M88\.4|LDSM\.16\.MT88\.4",
        r"LDGSTS\.E\.BYPASS\..*128",
    ],
    r"grouped_gemm_kernel<.*, (Activate|Hidden)<.*> >|grouped_gemm_wgrad_kernel<.*>": [r"STG\.E\.128"],
    r"token_sums_kernel<.*, uint4>": [r"LDG\.E\.128", r"STG\.E\.EF\.128", r"FADD"],
    r"tree_gate_(bwd_)?kernel<.*>": [r"SHFL\.BFLY", r"MUFU\.EX2", r"STS"],
    r"tree_gate_warp_bwd_kernel<.*>": [r"SHFL\.IDX", r"MUFU\.EX2"],
    r"tree_gate_lanes_kernel<.*>": [r"MUFU\.EX2", r"FMNMX\.NAN", r"LDG\.E\.128", r"STG\.E\.EF\.128"],
    r"tree_route_kernel<.*, uint4>": [r"LDG\.E\.128", r"SHFL\.BFLY", r"FFMA"],
}

Codes = dict[str, dict[str, Any]]  # name of a kernel -> its figures


@functools.cache
def nvcc_version() -> str:
    text = subprocess.run([str(KIT.nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V([\d.]+)", text)
    assert found, text
    return found[1]


def ptx_of(source: Path) -> Path:
    """The PTX of a .cu file for sm_80, which tests/ptx executes."""
    return cuda_launch.build(source.relative_to(ROOT)).with_suffix(".ptx")


def readable(symbols: list[str]) -> list[str]:
    """The demangled names without namespaces and parameters, such as kwta_block_kernel<float, true, 32, 512>."""
    text = subprocess.run(["c++filt", *symbols], capture_output=True, text=True, check=True).stdout
    shorter = {
        r"moe::|\(anonymous namespace\)::|\(int\)|^void ": "",
        "unsigned int": "uint32_t",
        "unsigned short": "uint16_t",
    }
    names = text.splitlines()
    for long, short in shorter.items():
        names = [re.sub(long, short, name) for name in names]
    return [name.split("(")[0] for name in names]


def dumped(code: Path, option: str) -> str:
    return subprocess.run([str(KIT.cuobjdump), option, str(code)], capture_output=True, text=True, check=True).stdout


def resources(code: Path) -> Codes:
    text = dumped(code, "--dump-resource-usage")
    rows = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert rows, text
    names = readable([row[0] for row in rows])
    keys = ("registers", "stack", "shared", "local")
    return {name: dict(zip(keys, map(int, row[1:]), strict=True)) for name, row in zip(names, rows, strict=True)}


def instructions(code: Path) -> Codes:
    parts = re.split(r"Function : (\S+)", dumped(code, "-sass"))[1:]
    found = dict(zip(readable(parts[::2]), map(sass.instructions, parts[1::2]), strict=True))
    return {
        name: {"loop": len(sass.hot_loop(each)), "codes": sorted({one.name for one in each})}
        for name, each in found.items()
    }


@functools.cache
def kernels(source: Path, architecture: str) -> Codes:
    """Registers, bytes of memory and instructions of the kernels of one source."""
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernels.cubin"
        options = ["-O3", f"-arch={architecture}", "-Werror", "all-warnings", "-cubin"]
        build.run([str(KIT.nvcc), *options, str(ptx_of(source)), "-o", str(code)])
        used, held = resources(code), instructions(code)
    assert sorted(used) == sorted(held)
    return {name: used[name] | held[name] for name in sorted(used)}


def table() -> dict[str, Any]:
    """The version of nvcc; for each source its digest (`origin`) and, for each architecture, its kernels' `row`s."""
    return json.loads(TABLE.read_text())


def origin(source: Path) -> str:
    readers = (Path(__file__).read_text(), Path(sass.__file__).read_text())
    return build.digest(nvcc_version(), *readers, code_of(ptx_of(source).read_text()))


def row(each: dict[str, Any]) -> list[int]:
    return [each["registers"], each["shared"], each["loop"]]


def check(source: Path, architecture: str) -> None:
    """Checks spills, shared memory and required instructions of all kernels of a source."""
    most = re.search(r"kStaticSharedBytes = (\d+) \* 1024", (ROOT / "csrc/include/moe/cuda/launch.cuh").read_text())
    assert most is not None
    for name, each in kernels(source, architecture).items():
        codes = each["codes"]
        allowed = SPILLED.get((name, architecture), 0)
        assert each["stack"] + each["local"] <= allowed, f"{name} spills: {each}"
        assert allowed or not any(code.startswith(("LDL", "STL")) for code in codes), name
        # A kernel with more static shared memory could exceed 48 KiB without the opt-in of launch.cuh.
        assert each["shared"] <= int(most[1]) * 1024, f"{name}: {each}"
        for pattern, wanted in INSTRUCTIONS.items():
            for instruction in wanted if re.fullmatch(pattern, name) else ():
                assert any(re.match(instruction, code) for code in codes), f"{name}: no {instruction}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda each: each.name)
def test_machine_code(source: Path, architecture: str) -> None:
    expected = table()[source.name]
    if expected["origin"] == origin(source):
        return
    check(source, architecture)
    if table()["nvcc"] != nvcc_version():
        pytest.skip(f"the table was made with nvcc {table()['nvcc']}, this is {nvcc_version()}")
    update = "python -m tests.machine.test_machine_code_cuda --update"
    got, allowed = kernels(source, architecture), expected[architecture]
    assert sorted(got) == sorted(allowed), f"kernels differ from those of the table: {update}"
    over = {
        name: f"{row(each)} allowed {allowed[name]}"
        for name, each in got.items()
        if any(have > may for have, may in zip(row(each), allowed[name], strict=True))
    }
    assert not over, f"registers, shared bytes, longest inner loop: {over}; to accept them: {update}"


def test_the_table_is_of_these_sources_and_every_pattern_is_of_a_kernel() -> None:
    files = {name: each for name, each in table().items() if name != "nvcc"}
    assert sorted(files) == [source.name for source in SOURCES]
    names = [name for each in files.values() for name in each["sm_80"]]
    assert not [pattern for pattern in INSTRUCTIONS if not any(re.fullmatch(pattern, name) for name in names)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda each: each.name)
def test_nothing_is_warned_of(source: Path) -> None:
    """nvcc compiles the source to PTX without a warning."""
    assert ptx_of(source).with_suffix(".warnings").read_text() == ""


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(__doc__)
    if MISSING:
        sys.exit(MISSING)
    found: dict[str, Any] = {"nvcc": nvcc_version()}
    for source in SOURCES:
        found[source.name] = {"origin": origin(source)}
        for architecture in ARCHITECTURES:
            check(source, architecture)
            found[source.name][architecture] = {name: row(each) for name, each in kernels(source, architecture).items()}
    text = json.dumps(found, indent=1)
    TABLE.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n")
