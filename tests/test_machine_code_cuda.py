"""Machine code of the CUDA kernels, as nvcc makes it for sm_80 and sm_90: it compiles without a warning, nothing spills
to local memory, registers, shared memory and the instructions of the longest inner loop stay within
machine_code_cuda.json, and the instructions that a kernel's speed rests on are there.

After a change that means to cost registers:  python tests/test_machine_code_cuda.py --update
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sass
from ptx import cuda_launch
from simt import build, toolkit

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("machine_code_cuda.json")
ARCHITECTURES = ("sm_80", "sm_90")
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
KIT = toolkit.find()
MISSING = KIT.no_nvcc or KIT.no_cuobjdump

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=f"machine code: {MISSING}"),
    pytest.mark.timeout(900),  # it compiles every kernel
]

# Kernels whose name matches, and what their code must hold.
INSTRUCTIONS = {
    r"kwta_(warp|block|bwd)_kernel<.*>": [r"LDG\.E\.128", r"STG\.E\.EF\.128"],
    r"kwta_(block_kernel<.*|warp_kernel<.*, 32)>": [r"REDUX"],
    r"kwta_warp_kernel<.*, (2|4|8|16)>": [r"SHFL\.BFLY"],  # several rows a warp
    r"kwta_(warp|block)_kernel<.*, false, \d+, \d+>": [r"VOTE"],  # flags of the edges
    r"kwta_(warp|block)_kernel<__(nv_bfloat16|half), .*>": [r"IDP\.4A", r"PRMT"],
    r"topk_gate_kernel<.*>": [r"REDUX", r"MUFU\.EX2"],
    r"plan_(count|rank)_kernel<.*>": [r"ATOMS\.POPC\.INC"],  # one atomic a warp and expert, not one a request
    r"plan_rank_kernel<.*>": [r"MATCH\.ANY"],
    r"dispatch_kernel<uint4>": [r"LDG\.E\.128", r"STG\.E\.EF\.128"],
    r"combine_(bwd_)?kernel<.*, uint4>": [r"LDG\.E\.128", r"STG\.E\.EF\.128", r"FFMA"],
    r"sinkhorn_kernel<.*>": [r"LDG\.E\.128", r"STG\.E\.128", r"FFMA", r"MUFU\.EX2", r"MUFU\.RCP"],
    r"sinkhorn_log_kernel<.*>": [r"LDG\.E\.128", r"STG\.E\.128", r"DFMA", r"MUFU\.EX2"],
    r"sinkhorn_((streamed|log)_)?bwd_kernel.*": [r"DFMA"],
    r"grouped_gemm_(wgrad_)?kernel<.*>": [r"HMMA\.16816\.F32", r"LDSM\.16\.M88\.4|LDSM\.16\.MT88\.4"],
    r"grouped_gemm_(wgrad_)?kernel<.*, Tile<[\d, ]*, 16>.*>": [r"LDGSTS\.E\.BYPASS\..*128"],
    r"grouped_gemm_(wgrad_)?kernel<.*, Tile<[\d, ]*, 4>.*>": [r"LDGSTS\.E\..*ZFILL"],
    r"grouped_gemm_kernel<.*, (Activate|Hidden)<.*> >|grouped_gemm_wgrad_kernel<.*>": [r"STG\.E\.128"],
    r"token_sums_kernel<.*, uint4>": [r"LDG\.E\.128", r"STG\.E\.EF\.128", r"FADD"],
    r"tree_gate_(bwd_)?kernel<.*>": [r"SHFL\.BFLY", r"MUFU\.EX2", r"STS"],
    r"tree_gate_warp_bwd_kernel<.*>": [r"SHFL\.IDX", r"MUFU\.EX2"],
    r"tree_gate_lanes_kernel<.*>": [r"MUFU\.EX2", r"FMNMX\.NAN", r"LDG\.E\.128", r"STG\.E\.EF\.128"],
    r"tree_route_kernel<.*, uint4>": [r"LDG\.E\.128", r"SHFL\.BFLY", r"FFMA"],
}

Codes = dict[str, dict[str, Any]]  # by kernel


@functools.cache
def nvcc_release() -> str:
    text = subprocess.run([str(KIT.nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", text)
    assert found, text
    return found[1]


def ptx_of(source: Path) -> Path:
    """The PTX that tests/ptx executes, of which setup.py has machine code made for both."""
    return cuda_launch.build(source.relative_to(ROOT)).with_suffix(".ptx")


@functools.cache
def cubin(source: Path, architecture: str) -> Path:
    """The compiled kernels of one source, kept by the hash of what went in."""
    options = ["-O3", f"-arch={architecture}", "-Werror", "all-warnings", "-cubin"]
    ptx = ptx_of(source)
    key = build.digest(nvcc_release(), *options, ptx.read_text())
    target = build.cache_folder().parent / "cubin" / f"{source.stem}-{architecture}-{key}.cubin"
    with build.lock(target.with_suffix(".lock")):
        if not target.exists():
            part = target.with_suffix(".part")
            build.run([str(KIT.nvcc), *options, str(ptx), "-o", str(part)])
            part.rename(target)
    return target


def readable(symbols: list[str]) -> list[str]:
    """kwta_block_kernel<float, 4, 32, 512> for what the linker calls it."""
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
        name: {"loop": sass.hot_loop(each), "codes": sorted({one.name for one in each})} for name, each in found.items()
    }


@functools.cache
def kernels(source: Path, architecture: str) -> Codes:
    """What the kernels of one source use and hold, kept beside the cubin: reading all listings takes 20 s."""
    code = cubin(source, architecture)
    readers = (Path(__file__).read_text(), Path(sass.__file__).read_text())
    target = code.with_name(f"{code.stem}-{build.digest(*readers)}.json")
    with build.lock(target.with_suffix(".lock")):
        if not target.exists():
            used, held = resources(code), instructions(code)
            assert sorted(used) == sorted(held)
            part = target.with_suffix(".part")
            part.write_text(json.dumps({name: used[name] | held[name] for name in used}))
            part.rename(target)
    return json.loads(target.read_text())


def table() -> dict[str, dict[str, list[int]]]:
    """By architecture and kernel: registers, bytes of shared memory, and instructions of the longest inner loop."""
    return json.loads(TABLE.read_text())


def measured(architecture: str) -> dict[str, list[int]]:
    found = {}
    for source in SOURCES:
        for name, each in kernels(source, architecture).items():
            found[name] = [each["registers"], each["shared"], each["loop"]]
    return dict(sorted(found.items()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda each: each.name)
def test_nothing_spills(source: Path, architecture: str) -> None:
    for name, each in kernels(source, architecture).items():
        assert each["stack"] + each["local"] == 0, f"{name}: {each}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda each: each.name)
def test_static_shared_memory_leaves_room_without_an_opt_in(source: Path, architecture: str) -> None:
    """launch.cuh opts in for dynamic shared memory from 48 KiB - kStaticSharedBytes on."""
    most = re.search(r"kStaticSharedBytes = (\d+) \* 1024", (ROOT / "csrc/include/moe/launch.cuh").read_text())
    assert most is not None
    for name, each in kernels(source, architecture).items():
        assert each["shared"] <= int(most[1]) * 1024, f"{name}: {each}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_shared_memory_and_loops(architecture: str) -> None:
    expected, got = table(), measured(architecture)
    if expected["nvcc"] != nvcc_release():
        pytest.skip(f"the table was made with nvcc {expected['nvcc']}, this is {nvcc_release()}")
    update = "python tests/test_machine_code_cuda.py --update"
    assert sorted(got) == sorted(expected[architecture]), f"kernels came or went: {update}"
    over = {
        name: f"{got[name]} allowed {allowed}"
        for name, allowed in expected[architecture].items()
        if any(have > may for have, may in zip(got[name], allowed, strict=True))
    }
    assert not over, f"registers, shared bytes, longest inner loop: {over}; if that is meant: {update}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_instructions(architecture: str) -> None:
    matched = set()
    for source in SOURCES:
        for name, each in kernels(source, architecture).items():
            codes = each["codes"]
            assert not any(code.startswith(("LDL", "STL")) for code in codes), name
            for pattern, wanted in INSTRUCTIONS.items():
                if not re.fullmatch(pattern, name):
                    continue
                matched.add(pattern)
                for instruction in wanted:
                    assert any(re.match(instruction, code) for code in codes), f"{name}: no {instruction}"
    assert matched == set(INSTRUCTIONS), "a pattern matches no kernel"


@pytest.mark.parametrize("source", SOURCES, ids=lambda each: each.name)
def test_nothing_is_warned_of(source: Path) -> None:
    """For sm_80 on the way to PTX; all other steps stop at a warning."""
    assert ptx_of(source).with_suffix(".warnings").read_text() == ""
    cubin(source, "sm_80")


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(__doc__)
    if MISSING:
        sys.exit(MISSING)
    text = json.dumps({"nvcc": nvcc_release(), **{each: measured(each) for each in ARCHITECTURES}}, indent=1)
    TABLE.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n")
