"""Triton without a GPU: Triton compiles the kernels for sm_80, or inside capability(90) for sm_90, and the executor
runs their PTX.

Triton's JITFunction.run does everything up to the launch, with `Driver` below. Compilations stop at PTX.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from . import build, machine
from .build import lock
from .decode import Kernel
from .machine import extents
from .session import launch, session
from .tensor_map import encode
from .text import entry_names


class Gpu(NamedTuple):
    capability: int
    shared: int  # bytes that a block can have
    multiprocessors: int


# 80: an A100, but with the smaller shared memory of sm_86, which also runs sm_80 code. 90: an H100.
GPUS = {80: Gpu(80, 99 * 1024, 108), 90: Gpu(90, 227 * 1024, 132)}
_gpu = GPUS[80]


@contextlib.contextmanager
def capability(which: int) -> Iterator[None]:
    """Inside the block, launches see the GPU GPUS[which], and Triton's grouped products run the inner loop for it."""
    from moe_kernels.backends.triton import _grouped_configs

    global _gpu
    before, loop, _gpu = _gpu, _grouped_configs.loop, GPUS[which]
    _grouped_configs.loop = lambda device: which
    try:
        yield
    finally:
        _gpu, _grouped_configs.loop = before, loop


class Launcher:
    """Triton creates a Launcher for each compiled kernel and calls it for each launch."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.source, self.metadata = src, metadata
        self.arguments = [(index, kind) for index, kind in enumerate(src.signature.values()) if kind != "constexpr"]

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        _, _, _, _, *values = rest  # packed metadata, launch metadata, two hooks
        tensors: list[torch.Tensor] = []
        packed: list[bytes] = []
        maps = iter(self.metadata.tensordesc_meta or ())
        for index, kind in self.arguments:
            if kind.startswith("tensordesc"):
                tensors.append(values[index].base)
                packed += _descriptor(values[index], next(maps))
            else:
                packed.append(self.scalar(values[index], kind, tensors))
        if x * y * z:
            threads = (32 * self.metadata.num_warps,)
            kernel = self.kernel(function)
            parameters = bytearray(kernel.parameter_bytes)  # Triton appends pointers to scratch memory, unused here
            message = f"{kernel.name}: {len(packed)} arguments for {len(kernel.parameters)} parameters"
            assert len(packed) <= len(kernel.parameters), message
            for (offset, size), value in zip(kernel.parameters, packed, strict=False):
                assert len(value) == size, f"{kernel.name}: {len(value)} bytes for a parameter of {size}"
                parameters[offset : offset + size] = value
            backend = "triton" if _gpu.capability == 80 else f"triton sm_{_gpu.capability}"
            launch(backend, kernel, (x, y, z), threads, self.metadata.shared, bytes(parameters), extents(tensors))

    def scalar(self, value: Any, kind: str, tensors: list[torch.Tensor]) -> bytes:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            value = value.data_ptr()
        form = _FORMS.get(kind, "Q" if kind.startswith("*") else "")
        if not form:
            raise TypeError(f"{self.metadata.name}: expected types {', '.join(_FORMS)} or pointers; got {kind}")
        return struct.pack(f"<{form}", value)

    def kernel(self, text: str) -> Kernel:
        if _gpu.capability == 90 and release() < (3, 8):
            text = _WAIT.sub(r"\g<0>\n\tfence.proxy.async;", text)
        return decoded(text) if session.edit is None else decoded(session.edit(text), keep=False)


def release() -> tuple[int, ...]:
    """Triton's version, such as (3, 9)."""
    return tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))


# Triton before 3.8 puts no fence.proxy.async between cp.async and the wgmma that read what it copies. So that the
# executor checks the rest of what it compiles, Launcher adds them.
_WAIT = re.compile(r"cp\.async\.wait_group\s+\d+;")

_FORMS = {"i1": "?", "fp32": "f", "fp64": "d", "i8": "b", "u8": "B", "i16": "h", "u16": "H"}
_FORMS |= {"i32": "i", "u32": "I", "i64": "q", "u64": "Q"}


def _descriptor(tensor: Any, compiled: dict[str, Any]) -> list[bytes]:
    """The parameters of a TensorDescriptor: a tensor map with the box that the compiler chose, sizes, strides."""
    assert tensor.padding == "zero"
    assert not compiled.get("is_im2col")  # Triton 3.6 has no such key
    address, box = tensor.base.data_ptr(), compiled["block_size"]
    described = encode(address, compiled["elem_size"], tensor.shape, tensor.strides, box, compiled["swizzle"])
    sizes = [struct.pack("<i", size) for size in tensor.shape]
    return [described, *sizes, *(struct.pack("<q", stride) for stride in tensor.strides)]


@functools.lru_cache(maxsize=4096)
def decoded(text: str, keep: bool = True) -> Kernel:
    (name,) = entry_names(text)
    return machine.kernel(text, name, keep)


class Utilities:
    """Replaces Triton's functions of the CUDA driver. A kernel's binary is here its PTX."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, str, int, int, int]:
        return 1, kernel.decode(), 0, 0, 1024  # module, function, registers, spills, limit of threads in a block

    def unload_module(self, module: int) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": _gpu.shared, "multiprocessor_count": _gpu.multiprocessors}


class Driver:
    utils, launcher_cls = Utilities(), Launcher

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", _gpu.capability, 32)

    def get_current_device(self) -> int:
        return list(GPUS).index(_gpu.capability)  # a number for each GPU, since Triton caches kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def verified(name: str, stage: Any) -> Any:
    """The stage of a compilation, with the verifier that _without_verifier takes from its passes after the last."""

    def run(module: Any, metadata: Any) -> Any:
        made = stage(module, metadata)
        if not module.verify():
            raise RuntimeError(f"{name}: after Triton's passes the program is not valid")
        return made

    return run


def stop_at_ptx(*arguments: Any) -> tuple[str, str] | None:
    """Hook of Triton. Without arguments it returns parts of the cache's key, else it replaces the last stage of a
    compilation, which would make machine code, and verifies the program after each of MLIR's."""
    if not arguments:
        return "PTX is the binary", "PTX is the binary"
    _, stages, *_ = arguments
    for name in ("ttir", "ttgir", "llir"):
        stages[name] = verified(name, stages[name])
    stages["cubin"] = lambda text, metadata: text.encode()
    return None


def _locked_compile(compile: Any) -> Any:
    """Wraps `compile` in a file lock, so that one process compiles a kernel and the others find it in the cache."""

    def locked(source: Any, target: Any = None, options: Any = None, **rest: Any) -> Any:
        key = build.digest(source.hash(), target, sorted((options or {}).items(), key=str))
        with lock(build.cache_folder() / "locks" / key):
            return compile(source, target=target, options=options, **rest)

    return locked


def _without_verifier() -> None:
    """MLIR no longer verifies the program after each of some 65 passes, which takes a third of a compilation's time.

    Triton has no option for it, but exports MLIR's PassManager::enableVerifier. Its objects, since Triton 3.9 those of
    nanobind, have the offset of the C++ object after Python's header. The PTX is the same.
    """
    from triton._C import libtriton

    made = libtriton.ir.pass_manager
    if type(made).__module__ != "nanobind":
        return
    enable = ctypes.CDLL(libtriton.__file__)["_ZN4mlir11PassManager14enableVerifierEb"]
    enable.argtypes = [ctypes.c_void_p, ctypes.c_bool]

    def unverified(context: Any) -> Any:
        manager = made(context)
        place = id(manager)
        enable(place + ctypes.c_int32.from_address(place + object.__basicsize__).value, False)
        return manager

    libtriton.ir.pass_manager = unverified


@functools.cache
def share_compilations() -> None:
    """From here on compilations of this process stop at PTX, and processes share the compiled kernels."""
    import triton
    import triton.compiler

    _without_verifier()
    triton.knobs.cache.dir = str(build.cache_folder() / "triton")
    triton.knobs.compilation.store_binary_only = True  # not the 270 KB of other forms of a kernel
    triton.knobs.runtime.add_stages_inspection_hook = stop_at_ptx
    triton.compiler.compile = _locked_compile(triton.compiler.compile)


@functools.cache
def install() -> None:
    """From here on this process runs Triton's launches on the executor."""
    share_compilations()
    import triton

    import moe_kernels.backends.triton as kernels

    # Otherwise functions decorated while a test has set TRITON_INTERPRET would be interpreted, and compiled kernels
    # could not call them.
    triton.knobs.runtime.interpret = False
    triton.runtime.driver.set_active(Driver())
    kernels.device_type = "cpu"
