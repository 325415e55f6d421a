"""Compiles every Triton configuration for a GPU that need not be here and prints what it became, as JSON.

A process of its own: a kernel that was decorated for the interpreter cannot be compiled.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import moe_kernels.backends.triton as kernels

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def configurations():
    for module in pkgutil.iter_modules(kernels.__path__):
        found = importlib.import_module(f"{kernels.__name__}.{module.name}")
        yield from getattr(found, "configurations", list)()


def compiled(each: kernels.Configuration, capability: int) -> dict:
    types = {**each.types, **dict.fromkeys(each.constants, "constexpr")}
    # torch's allocator aligns to 16 bytes and more.
    aligned = [name for name, kind in each.types.items() if kind.startswith("*") or name in each.divisible]
    names = each.kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = {"num_warps": each.num_warps, "num_stages": each.num_stages}
    source = ASTSource(each.kernel, {name: types[name] for name in names}, each.constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = run("cuobjdump", "--dump-resource-usage", file.name)
        code = run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, _, local = map(int, found.groups())
    mnemonics = sorted(set(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", code, re.MULTILINE)))
    return {
        "registers": registers,
        "shared": built.metadata.shared,
        "spilled": stack + local,
        "instructions": mnemonics,
    }


def run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    capability = int(sys.argv[1])
    print(
        json.dumps(
            {each.name: compiled(each, capability) for each in configurations() if capability in each.capabilities}
        )
    )
