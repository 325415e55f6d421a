"""Compiles every Triton configuration for a GPU that need not be here and prints what it became, as JSON.

A process of its own: a kernel that was decorated for the interpreter cannot be compiled.
"""

from __future__ import annotations

import bisect
import importlib
import itertools
import json
import os
import pkgutil
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

import moe_kernels.backends.triton as kernels

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def configurations():
    for module in pkgutil.iter_modules(kernels.__path__):
        found = importlib.import_module(f"{kernels.__name__}.{module.name}")
        yield from getattr(found, "configurations", list)()


def source(each: kernels.Configuration, ones: tuple[str, ...] = ()) -> ASTSource:
    constants = each.constants | dict.fromkeys(ones, 1)
    types = {**each.types, **dict.fromkeys(constants, "constexpr")}
    # torch's allocator aligns to 16 bytes and more.
    aligned = [name for name, kind in each.types.items() if kind.startswith("*") or name in each.divisible]
    names = each.kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in ones}
    return ASTSource(each.kernel, {name: types[name] for name in names}, constants, attributes)


def flags(each: kernels.Configuration) -> list[bool | str]:
    """The constants that make another kernel of it, and not one of another size."""
    return [value for value in each.constants.values() if isinstance(value, bool | str)]


def check_ones(each: kernels.Configuration, capability: int) -> None:
    """A launch makes constants of the integers that are 1, which have no methods and cannot be assigned to in loops:
    with every integer 1 the kernel still becomes Triton's intermediate language."""
    target, context = GPUTarget("cuda", capability, 32), ir.context()
    backend = make_backend(target)
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    generated = options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    source(each, tuple(name for name, kind in each.types.items() if kind in ("i32", "i64"))).make_ir(target, *generated)


def compiled(each: kernels.Configuration, capability: int) -> tuple[dict[str, int], bytes]:
    """Registers, bytes of shared memory and of spills; and the machine code."""
    options = {"num_warps": each.num_warps, "num_stages": each.num_stages, "enable_fp_fusion": False}
    built = triton.compile(source(each), target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = run("cuobjdump", "--dump-resource-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, _, local = map(int, found.groups())
    return {"registers": registers, "shared": built.metadata.shared, "spilled": stack + local}, code(built.asm["cubin"])


def code(cubin: bytes) -> bytes:
    """The sections of an ELF file that hold machine code."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<2I4Q", cubin, table + size * i) for i in range(count)]
    found = b""
    for name, _, _, _, start, length in sections:
        if cubin.startswith(b".text.", sections[names][4] + name):
            found += cubin[start : start + length]
    assert found, "a cubin without code"
    return found


def instructions(codes: list[bytes], capability: int) -> list[list[str]]:
    """The mnemonics of each, sorted. One run of nvdisasm, which takes 0.4 s to start, for all of them."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        text = run("nvdisasm", "--no-dataflow", "--binary", f"SM{capability}", file.name)
    line = r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)"
    ends, found = list(itertools.accumulate(map(len, codes))), [set() for _ in codes]
    for address, mnemonic in re.findall(line, text, re.MULTILINE):
        found[bisect.bisect(ends, int(address, 16))].add(mnemonic)
    return [sorted(each) for each in found]


def run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    capability = int(sys.argv[1])
    here = [each for each in configurations() if capability in each.capabilities]
    for each in {(each.kernel, *map(str, flags(each))): each for each in here}.values():
        check_ones(each, capability)
    resources, codes = zip(*(compiled(each, capability) for each in here), strict=True)
    found = zip(here, resources, instructions(codes, capability), strict=True)
    print(json.dumps({each.name: has | {"instructions": used} for each, has, used in found}))
