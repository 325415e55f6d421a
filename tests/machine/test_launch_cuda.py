"""Tests of how CUDA kernels are launched."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pybind11
import pytest
import torch

import moe_kernels as mk
import python_ref.tree_gate as tree_reference
from tests.helpers.targets import nvcc_or_skip
from tests.ptx import cuda_launch, toolkit
from tests.ptx.machine import PtxError

ROOT = Path(__file__).parents[2]
SM_86 = 99 * 1024  # bytes of shared memory that a block may have on sm_86

PROBE = """
#include "moe/cuda/launch.cuh"
__global__ void probe_kernel(int) {}
extern "C" int probe_launch(size_t bytes) { return moe::launch(probe_kernel, 1, 32, bytes, nullptr, 0); }
extern "C" long probe_limit() { return moe::shared_memory_limit(); }
"""

# A stub of the CUDA runtime; like the real one, it keeps the last error. Device attribute 97 is the shared memory that
# a block may opt in to.
RUNTIME = """
#include <cstddef>
struct Dim3 { unsigned x, y, z; };
static int last, set_error, set_calls, limit;
extern "C" {
void runtime_set(int attribute_error, int bytes) { set_error = attribute_error, limit = bytes, last = set_calls = 0; }
int runtime_set_calls() { return set_calls; }
void** __cudaRegisterFatBinary(void*) { static void* x; return &x; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
unsigned __cudaPushCallConfiguration(Dim3, Dim3, size_t, void*) { return 0; }
int __cudaPopCallConfiguration(Dim3*, Dim3*, size_t*, void*) { return 0; }
int __cudaGetKernel(void** kernel, const void* host) { *kernel = const_cast<void*>(host); return 0; }
int cudaLaunchKernel(const void*, Dim3, Dim3, void**, size_t, void*) { return 0; }
int __cudaLaunchKernel(const void*, Dim3, Dim3, void**, size_t, void*) { return 0; }
int cudaGetLastError() { const int error = last; last = 0; return error; }
int cudaFuncSetAttribute(const void*, int, int) { set_calls++; return last = set_error; }
int cudaGetDevice(int* device) { *device = 0; return last = limit ? 0 : 100; }
int cudaDeviceGetAttribute(int* value, int attribute, int) { *value = attribute == 97 ? limit : 0; return 0; }
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    nvcc, folder = nvcc_or_skip(), tmp_path_factory.mktemp("launch")
    (folder / "probe.cu").write_text(PROBE)
    (folder / "runtime.cpp").write_text(RUNTIME)
    options = ["-std=c++17", "-arch=sm_80", f"-I{ROOT}/csrc/include", "-shared", "-Xcompiler=-fPIC", "-cudart=none"]
    options += ["-Xlinker", "-Bsymbolic"]  # not the CUDA runtime that torch may have loaded
    sources = [str(folder / name) for name in ("probe.cu", "runtime.cpp")]
    subprocess.run([nvcc, *options, *sources, "-o", str(folder / "probe.so")], check=True)
    library = ctypes.CDLL(str(folder / "probe.so"))
    library.probe_launch.argtypes = [ctypes.c_size_t]
    library.probe_limit.restype = ctypes.c_long
    return library


def test_a_failed_launch_leaves_no_error_for_the_next(probe):
    probe.runtime_set(1, SM_86)
    assert probe.probe_launch(100 * 1024) == 1
    assert probe.probe_launch(0) == 0


def test_static_shared_memory_counts_towards_the_48_kb_that_need_no_opt_in(probe):
    probe.runtime_set(0, SM_86)
    assert probe.probe_launch(32 * 1024) == 0
    assert probe.runtime_set_calls() == 0
    assert probe.probe_launch(47 * 1024) == 0  # above 32 KB: launch allows for 16 KB of static memory
    assert probe.runtime_set_calls() == 1


def test_the_limit_of_shared_memory_is_the_devices(probe):
    probe.runtime_set(0, SM_86)
    assert probe.probe_limit() == SM_86
    probe.runtime_set(0, 0)  # no device
    assert probe.probe_limit() == 48 * 1024
    assert probe.probe_launch(0) == 0


NO_NVCC = cuda_launch.unavailable()
needs_the_executor = pytest.mark.skipif(NO_NVCC is not None, reason=f"PTX: {NO_NVCC}")


@needs_the_executor
@pytest.mark.parametrize("num_experts", [3169, 4096])
def test_tree_gate_fits_99_kb(num_experts):
    generator = torch.Generator().manual_seed(0)
    x, split, leaf = (
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((5, 3), (1, num_experts - 1, 3), (1, num_experts, 3))
    )
    grad = torch.randn(5, num_experts)
    with cuda_launch.use(), cuda_launch.device(SM_86, minor=6):
        gates, _ = mk.tree_gate(x, split, leaf, gamma=4.0, backend="cuda")
        got = torch.autograd.grad(gates, (x, split, leaf), grad)
    expected, _ = tree_reference.tree_gate(x, split, leaf, gamma=4.0)
    torch.testing.assert_close(gates, expected)
    torch.testing.assert_close(got, torch.autograd.grad(expected, (x, split, leaf), grad), rtol=1e-4, atol=1e-5)


@needs_the_executor
def test_static_shared_memory_counts_towards_the_limit_of_a_block():
    """For 1024 experts plan_rank_kernel takes 40 KB of dynamic shared memory, and some static memory."""
    experts = torch.zeros(4, 1, dtype=torch.int64)
    with cuda_launch.use():
        with cuda_launch.device(40 * 1024), pytest.raises(PtxError, match=r"static and dynamic; a block has 40960"):
            mk.make_plan(experts, 1024, backend="cuda")
        with cuda_launch.device(41 * 1024):
            mk.make_plan(experts, 1024, backend="cuda")


def test_other_threads_run_while_a_launch_waits(tmp_path):
    """Compiles module.cpp with a single launcher, which sleeps 0.3 s like a launch into a full queue."""
    kit = toolkit.find()
    if kit.missing:
        pytest.skip(kit.missing)
    (tmp_path / "module.cpp").write_text((ROOT / "csrc/cuda/module.cpp").read_text())
    (tmp_path / "ops.h").write_text("""
        #include <driver_types.h>
        #include <unistd.h>
        namespace moe { inline cudaError_t wait(int64_t us) { usleep(us); return cudaSuccess; } }
        #define MOE_CUDA_OPS(X) X(wait)""")
    (tmp_path / "runtime.cpp").write_text("""
        #include <cuda_runtime_api.h>
        const char* cudaGetErrorString(cudaError_t) { return ""; }
        cudaError_t cudaDriverGetVersion(int*) { return cudaSuccess; }""")
    include = [f"-I{ROOT}/csrc/include", f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    include += [f"-I{each}" for each in kit.include]
    options = ["-std=c++17", "-O0", "-shared", "-fPIC", '-DMOE_CUDA_ARCHITECTURES="8.0"', *include]
    sources = [str(tmp_path / name) for name in ("module.cpp", "runtime.cpp")]
    subprocess.run(["g++", *options, *sources, "-o", str(tmp_path / "_cuda.so")], check=True)
    code = """
        import threading, _cuda
        waiting = threading.Thread(target=_cuda.wait, args=(300_000,))
        waiting.start()
        turns = 0
        while waiting.is_alive():
            turns += 1
        print(turns)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True)
    assert int(done.stdout) > 1000, done.stderr
