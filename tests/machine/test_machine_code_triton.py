"""Checks the machine code of the Triton kernels for sm_80 and sm_90, as the calls of triton_calls.py launch them. Only
kernels in SPILLED and KNOWN spill registers. The code has the instructions in INSTRUCTIONS and PRODUCTS. The numbers of
registers, bytes of shared memory and instructions of the longest inner loop are at most those of
machine_code_triton.json.

The tests compile only launches whose digest (`origin` in ahead_of_time.py) is not in this table.

After a change of kernels, calls, this file, ahead_of_time.py or sass.py:
    python -m tests.machine.test_machine_code_triton --update
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("machine_code_triton.json")
CAPABILITIES = (80, 90)
COLUMNS = ("registers", "shared", "loop", "origin")
SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024}  # bytes per block; at 80 the limit of sm_86, which also runs this code

# Pattern of kernel, dtype and call -> patterns of instructions that the code must have. Rows of EVEN elements are
# multiples of 16 bytes.
EVEN = r"(512|4096|16384)"
INSTRUCTIONS = {
    r"kwta_fwd.*": [r"LDG\.E"],
    r"kwta_fwd_packed .*": [r"LDG\.E\.128", r"STG\.E\.128"],
    r"kwta_bwd .*": [r"LDG\.E", r"STG\.E"],
    rf"kwta_bwd .* N={EVEN} .*": [r"LDG\.E\.128", r"STG\.E\.128"],
    r"(dispatch|combine)_.*": [r"LDG\.E", r"STG\.E"],
    r"token_sums .* D=(64|2048) .*": [r"LDG\.E\.128", r"STG\.E\.128"],
    r"topk_gate_.*": [r"LDG\.E", r"STG\.E"],
    r"(scaled|resident|streamed)_.*": [r"LDG\.E", r"STG\.E", r"DFMA"],
    r"(grouped_gemm|expert_mlp|activation)_.*": [r"LDG", r"STG\.E"],
    r"plan_.*": [r"LDG\.E", r"STG\.E"],
    r"tree_gate_(fwd|bwd) .*": [r"LDG\.E", r"STG\.E", r"MUFU\.EX2"],
    r"tree_gate_fused .*": [r"HG?MMA", r"LDGSTS\.E\.BYPASS\.128", r"BAR\.SYNC", r"MUFU\.EX2"],
}

# As INSTRUCTIONS, but the code must not have them: loads of single elements, instead of 16 bytes at a time.
UNWANTED = {
    rf"kwta_fwd_packed .* N={EVEN} .*": [r"LDG\.E\.U16"],
    rf"kwta_fwd float32: .* N={EVEN} .*": [r"LDG\.E$"],
}

# As INSTRUCTIONS, by architecture, for products in 16 bits. sm_80: cp.async and mma.sync. sm_90: wgmma with TMA, and
# with cp.async for the weight gradient. SIXTEEN leaves out calls with a size of 50 or 70: such rows do not all start at
# multiples of 16 bytes.
SIXTEEN = r"b?float16: (?!.*=(50|70) ).*"
PRODUCTS = {
    80: {rf"(grouped_gemm|expert_mlp)_\w+ {SIXTEEN}": [r"HMMA\.16816", r"LDGSTS.*\.128", r"LDSM"]},
    90: {
        rf"(grouped_gemm_fwd|expert_mlp_bwd_hidden) {SIXTEEN}": [r"HGMMA", r"UTMALDG\.3D"],
        rf"grouped_gemm_bwd_weight {SIXTEEN}": [r"HGMMA", r"LDGSTS.*\.128"],
    },
}

# Most bytes that a launch may spill if Triton's version is not the table's.
SPILLED = {
    r"resident_fwd bfloat16: .* n=16 .*": 8,
    r"streamed_fwd .* n=1024 .*": 8,
    r"combine_bwd bfloat16: .* D=8192 .*": 8,
    r"plan_rank .*: plan_priority .*": 8,
}


# Most bytes that a launch may spill under every version of Triton.
KNOWN = {
    r"grouped_gemm_fwd float32: expert_mlp gated forward .* H=50 .*": 112,
    r"plan_match float32: plan_priority .*": 32,
    r"scaled_bwd float32: sinkhorn training .* n=16 .*": 8,
    r"scaled_streamed_fwd float32: .*": 8,
    r"tree_gate_fused bfloat16: tree_gate forward T=128 P=768 .*": 16,
}

# As KNOWN, but not in the loop of products.
EPILOGUE = {
    r"expert_mlp_bwd_hidden bfloat16: expert_(mlp|norms) training .*": 48,
    r"expert_mlp_bwd_hidden bfloat16: expert_mlp gated training .*": 312,
}


def row(each: dict[str, Any]) -> list[Any]:
    return [each[column] for column in COLUMNS]


def measured(known: dict[str, list[str]]) -> dict[str, dict[str, dict]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.ahead_of_time"]
    done = subprocess.run(command, input=json.dumps(known), capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(got: dict[str, dict], capability: int, spills: bool = True) -> dict[str, int]:
    """Checks shared memory, instructions and, with `spills`, spills. Returns the bytes of the launches that spill."""
    spilled = {name: each["spilled"] for name, each in got.items() if each["spilled"]}
    for name, size in spilled.items() if spills else ():
        allowed = [most for pattern, most in (SPILLED | KNOWN | EPILOGUE).items() if re.fullmatch(pattern, name)]
        assert size <= max(allowed, default=0), f"spilled bytes: {spilled}"
        outside = any(re.fullmatch(pattern, name) for pattern in EPILOGUE)
        assert not (outside and got[name]["spills"]), f"spills in the loop of products: {name}"
    assert not {name: each["shared"] for name, each in got.items() if each["shared"] > SHARED_LIMIT[capability]}
    for name, each in got.items():
        for pattern, wanted in (INSTRUCTIONS | PRODUCTS[capability]).items():
            for instruction in wanted if re.fullmatch(pattern, name) else ():
                assert any(re.match(instruction, code) for code in each["instructions"]), f"{name}: no {instruction}"
        for pattern, unwanted in UNWANTED.items():
            if re.fullmatch(pattern, name):
                found = [code for code in each["instructions"] for one in unwanted if re.match(one, code)]
                assert not found, f"{name}: {found}"
    return spilled


@pytest.fixture(scope="module")
def made():
    table = json.loads(TABLE.read_text())
    return measured({str(each): [origin for *_, origin in table[str(each)].values()] for each in CAPABILITIES})


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_launch(capability, made):
    table = json.loads(TABLE.read_text())
    rows, update = table[str(capability)], "python -m tests.machine.test_machine_code_triton --update"
    got = made[str(capability)]
    for pattern in (*INSTRUCTIONS, *PRODUCTS[capability], *UNWANTED):
        assert any(re.fullmatch(pattern, name) for name in got), f"no launch matches {pattern}"
    changed = {name: each for name, each in got.items() if each["origin"] != rows.get(name, [None])[-1]}
    # A renamed launch has the origin of its old row, so it was not compiled and has no "loop".
    assert not [name for name, each in changed.items() if "loop" not in each], f"rows were renamed: {update}"
    same = table["triton"] == triton.__version__
    spilled = check(changed, capability, spills=same)
    if not same:
        pytest.skip(f"registers and spills are those of Triton {table['triton']}, this is {triton.__version__}")
    assert not [name for name in spilled if not any(re.fullmatch(pattern, name) for pattern in KNOWN | EPILOGUE)]
    assert sorted(got) == sorted(rows), f"launches differ from those of the table: {update}"
    over = {
        name: f"{row(each)} allowed {rows[name]}"
        for name, each in changed.items()
        if any(have > may for have, may in zip(row(each)[:3], rows[name][:3], strict=True))
    }
    assert not over, f"{', '.join(COLUMNS)}: {over}; to accept them: {update}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(__doc__)
    table: dict[str, object] = {"triton": triton.__version__}
    every = measured({str(capability): [] for capability in CAPABILITIES})
    for capability in CAPABILITIES:
        found = every[str(capability)]
        check(found, capability)
        table[str(capability)] = {name: row(each) for name, each in found.items()}
    text = json.dumps(table, indent=1)
    TABLE.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+),\s+(\S+)\s+\]", r"[\1, \2, \3, \4]", text) + "\n")
