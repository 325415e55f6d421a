"""Prints figures of the machine code of the launches of triton_calls.py as JSON: registers, spills, shared memory, the
length of the longest innermost loop, names of the kernel's instructions. Triton compiles the kernels without a GPU.

Standard input is a JSON object: by capability of a GPU, "80" or "90", a list of digests (see `origin`). Launches with
these digests get no figures. test_machine_code_triton.py runs this file in a process of its own, because a kernel that
was decorated for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.compiler
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from tests.helpers import sass
from tests.helpers.triton_calls import calls
from tests.helpers.triton_launches import recorded
from tests.ptx import build, triton_launch

PRODUCTS = re.compile(r"(grouped_gemm|expert_mlp|tree_gate_fused).* b?float16: ")
READERS = ("ahead_of_time.py", "sass.py", "../machine/test_machine_code_triton.py")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def launches(capability: int) -> dict[str, dict[str, Any]]:
    """By kernel, dtype and call: the launches that need a compilation which no earlier launch needed.

    For sm_90 only the first of these for each kernel, but all for 16-bit matrix products, which can use wgmma there.
    """
    named: dict[str, dict[str, Any]] = {}
    # No launch depends on random numbers, whose draws take as long as everything else here.
    with recorded(capability) as found, patch.object(torch, "randn", _zeros):
        for call in calls():
            torch.manual_seed(0)
            before = len(found)
            call.run()
            for each in found[before:]:
                kernel = each["kernel"].strip("_")
                again = any(other.startswith(f"{kernel} ") for other in named)
                kernel += f" {str(call.dtype).removeprefix('torch.')}: "
                name = kernel + str(call)
                if each["compiles"] and (capability == 80 or not again or PRODUCTS.match(kernel)):
                    named[name + f", {sum(other.startswith(name) for other in named) + 1}" * (name in named)] = each
    return named


def _zeros(*size: Any, generator: Any = None, **rest: Any) -> torch.Tensor:
    return torch.zeros(*size, **rest)


def check_ones(source: ASTSource, capability: int) -> None:
    """Checks that Triton can translate the kernel if every integer argument that Triton specialises is 1.

    Triton then replaces the argument by a constant, which has no methods and cannot be assigned to in a loop.
    """
    signature, constants = dict(source.signature), dict(source.constants)
    for index, (name, kind) in enumerate(source.signature.items()):
        if kind in ("i32", "i64") and not source.fn.params[index].do_not_specialize:
            signature[name], constants[(index,)] = "constexpr", 1
    target, context = GPUTarget("cuda", capability, 32), ir.context()
    backend = make_backend(target)
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    generated = options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    attributes = {path: value for path, value in source.attrs.items() if path not in constants}
    ASTSource(source.fn, signature, constants, attributes).make_ir(target, *generated)


def origin(launch: dict[str, Any], backend: Any) -> str:
    """A digest of what determines a launch's figures: Triton, the launch's options and source, the files in READERS."""
    options = backend.parse_options(dict(launch["options"])).hash()
    readers = ((Path(__file__).parent / name).read_text() for name in READERS)
    return build.digest(triton.__version__, backend.hash(), options, launch["source"].hash(), *readers)


def assembled(ptx: str, launch: dict[str, Any], backend: Any) -> tuple[dict[str, int], bytes]:
    """Registers and spilled bytes (stack and local memory) of a thread, and the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        cubin = backend.make_cubin(ptx, {}, backend.parse_options(dict(launch["options"])), backend.target.arch)
        file.write(cubin)
        file.flush()
        usage = run("cuobjdump", "--dump-resource-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, _, local = map(int, found.groups())
    return {"registers": registers, "spilled": stack + local}, code(cubin)


def code(cubin: bytes) -> bytes:
    """The machine code of an ELF file: its sections .text.*, concatenated."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<2I4Q", cubin, table + size * i) for i in range(count)]
    found = b""
    for name, _, _, _, start, length in sections:
        if cubin.startswith(b".text.", sections[names][4] + name):
            found += cubin[start : start + length]
    assert found, "a cubin without code"
    return found


def instructions(codes: list[bytes], capability: int) -> list[list[sass.Instruction]]:
    """The instructions of each kernel, from one run of nvdisasm."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        text = run("nvdisasm", "--no-dataflow", "--binary", f"SM{capability}", file.name)
    ends, found = list(itertools.accumulate(map(len, codes))), [[] for _ in codes]
    for each in sass.instructions(text):
        found[bisect.bisect(ends, each.address)].append(each)
    return found


def run(tool: str, *arguments: str | Path) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def main(capability: int, known: set[str]) -> dict[str, dict[str, Any]]:
    """By name of the launch: its digest (`origin`) and, unless `known` has the digest, its figures."""
    here, target = launches(capability), GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    # Other kernels than those of products are the same program for each capability.
    checked = {each["kernel"]: each for name, each in here.items() if capability == 80 or PRODUCTS.match(name)}
    for each in checked.values():
        check_ones(each["source"], capability)
    found: dict[str, dict[str, Any]] = {}
    codes: dict[str, bytes] = {}
    for name, launch in here.items():
        found[name] = {"origin": origin(launch, backend)}
        if found[name]["origin"] not in known:
            built = triton.compiler.compile(launch["source"], target=target, options=launch["options"])
            usage, codes[name] = assembled(built.kernel.decode(), launch, backend)
            found[name] |= {**usage, "shared": built.metadata.shared}
    listings = instructions([*codes.values()], capability) if codes else []
    for name, listed in zip(codes, listings, strict=True):
        loop = sass.hot_loop(listed)
        spills = sum(each.name.startswith(("LDL", "STL")) for each in loop)
        found[name] |= {"loop": len(loop), "spills": spills, "instructions": sorted({each.name for each in listed})}
    return found


if __name__ == "__main__":
    gc.set_threshold(100_000, 20, 20)
    triton_launch.share_compilations()
    print(json.dumps({each: main(int(each), set(known)) for each, known in json.load(sys.stdin).items()}))
