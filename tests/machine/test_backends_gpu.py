"""The choice of a backend for CUDA tensors by compute capability, driver and sizes. No test needs a GPU."""

from __future__ import annotations

import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_kernels as mk
import python_ref.tree_gate as tree_reference
from moe_kernels import backends
from moe_kernels.backends import _gpu, cuda
from tests.helpers.targets import TARGETS, reason_to_skip, running

BUILT = "8.0;9.0+PTX"


def reason_against(capability, driver=13000, architectures=BUILT, built_with=13000):
    return _gpu.unsupported(f"cuda:{capability}", architectures, built_with, driver)


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
def test_code_runs_where_its_machine_code_or_its_ptx_does(capability):
    assert reason_against(capability) is None


def test_a_gpu_older_than_the_code_is_refused():
    assert reason_against("7.5") == "it was built for capability 8.0;9.0+PTX; this GPU has 7.5"
    assert reason_against("9.0", architectures="8.0") == "it was built for capability 8.0; this GPU has 9.0"
    assert reason_against("8.0", architectures="8.6") == "it was built for capability 8.6; this GPU has 8.0"
    assert reason_against("8.0", architectures="8.6+PTX") == "it was built for capability 8.6+PTX; this GPU has 8.0"
    assert reason_against("10.0", architectures="9.0a") == "it was built for capability 9.0a; this GPU has 10.0"
    assert reason_against("9.0", architectures="9.0a") is None


def test_a_driver_older_than_the_toolkit_is_refused():
    message = "it was built with CUDA 13.0; the driver offers 12.8: update the driver"
    assert reason_against("8.0", driver=12080) == message
    assert reason_against("9.0", driver=12040, built_with=12080) is None  # any driver for CUDA 12 runs it
    message = "a driver for CUDA 12.8 must compile the PTX, not one for 12.4: update it"
    assert reason_against("10.0", driver=12040, built_with=12080) == message


@pytest.fixture
def gpu(monkeypatch):
    """A mock of a GPU and of the CUDA module, without kernels. Tests set the capability of the GPU, the version of its
    driver, and which of the backends "cuda" and "triton" is there."""
    state = types.SimpleNamespace(capability=(8, 0), backend="cuda")
    module = types.SimpleNamespace(architectures=BUILT, runtime_version=13000, driver_version=lambda: state.driver)
    state.driver = 13000
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: state.capability)
    monkeypatch.setattr(cuda, "module", module)
    monkeypatch.setattr(backends, "unsupported", _alone(state, backends.unsupported))
    backends.reconsider()
    yield state
    backends.reconsider()


def _alone(state, unsupported):
    return lambda name, *rest: "not here" if name in {"cuda", "triton"} - {state.backend} else unsupported(name, *rest)


def on_gpu(*shape, dtype=torch.float32):
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(torch.cuda, "is_available", lambda: False)  # else a torch with CUDA looks for a driver
        return torch.empty(shape, dtype=dtype, device="cuda")


def test_the_choice_follows_the_capability(gpu):
    x = on_gpu(4, 8)
    assert backends.choose("kwta", None, x) == "cuda"
    gpu.capability = (7, 5)
    with pytest.warns(UserWarning, match="kwta: no kernel can run on these CUDA tensors"):
        assert backends.choose("kwta", None, x) == "reference"
    with pytest.raises(mk.BackendError, match=r"this GPU has 7\.5"):
        backends.choose("kwta", "cuda", x)
    gpu.capability = (9, 0)
    assert backends.choose("kwta", None, x) == "cuda"


@pytest.mark.parametrize(
    ("op", "capability", "expected"),
    [
        ("grouped_gemm", (8, 0), "cuda"),
        ("grouped_gemm", (9, 0), "triton"),
        ("grouped_gemm", (12, 0), "cuda"),
        ("expert_mlp", (8, 6), "cuda"),
        ("expert_norms", (9, 0), "triton"),
        ("topk_gate", (8, 0), "triton"),
        ("tree_gate", (9, 0), "triton"),
        ("tree_route", (8, 0), "triton"),
        ("kwta", (9, 0), "cuda"),
        ("make_plan", (8, 0), "cuda"),
        ("sinkhorn", (8, 0), "cuda"),
    ],
)
def test_where_both_backends_run_the_table_decides(monkeypatch, op, capability, expected):
    monkeypatch.setattr(backends, "target_of", lambda device, index: "cuda:{}.{}".format(*capability))
    monkeypatch.setattr(backends, "unsupported", lambda name, *rest: "no CPU" if name == "cpu" else None)
    monkeypatch.setattr(backends, "_limits", lambda *given: ())
    backends.reconsider()
    more = (on_gpu(1, 7, 16),) if op.startswith("tree_") else ()
    assert backends.choose(op, None, on_gpu(4, 16, dtype=torch.bfloat16), *more) == expected
    backends.reconsider()


def test_a_product_of_rows_that_cuda_would_copy_takes_triton(monkeypatch):
    here = {"cuda", "triton", "reference"}
    monkeypatch.setattr(backends, "target_of", lambda device, index: "cuda:8.0")
    monkeypatch.setattr(backends, "unsupported", lambda name, *rest: None if name in here else "not here")
    for rows, columns, expected in ((16, 24, "cuda"), (12, 24, "triton"), (16, 20, "triton")):
        backends.reconsider()
        given = on_gpu(4, rows, dtype=torch.bfloat16), on_gpu(2, rows, columns, dtype=torch.bfloat16)
        assert backends.choose("grouped_gemm", None, *given) == expected
        assert backends.choose("grouped_gemm", "cuda", *given) == "cuda"
        here.discard("triton")
        backends.reconsider()
        assert backends.choose("grouped_gemm", None, *given) == "cuda"
        here.add("triton")
    backends.reconsider()


def test_the_table_names_operations_and_backends_once():
    assert all(
        each.first in ("cuda", "triton") and not backends.missing("reference", each.op) for each in backends.PREFERRED
    )
    assert len({(each.op, each.major) for each in backends.PREFERRED}) == len(backends.PREFERRED)


def test_an_old_driver_is_explained(gpu, capsys):
    gpu.driver = 12080
    backends._warn_reference.cache_clear()
    with pytest.warns(UserWarning, match="the reference does"):
        mk.explain("kwta", on_gpu(4, 8), 2)
    assert "the driver offers 12.8" in capsys.readouterr().out


SIZES = [  # operation, function of n that makes its tensors, backend, smallest n that the kernel does not take
    ("sinkhorn", lambda n: (on_gpu(2, n, n),), "cuda", 65),
    ("sinkhorn", lambda n: (on_gpu(2, n, n),), "triton", 1025),
    ("topk_gate", lambda n: (on_gpu(3, n),), "triton", 16385),
    ("tree_gate", lambda n: (on_gpu(3, 4), on_gpu(1, n - 1, 4)), "cuda", 4097),
    ("tree_gate", lambda n: (on_gpu(3, 4), on_gpu(1, n - 1, 4)), "triton", 4097),
    ("tree_route", lambda n: (on_gpu(3, 4), on_gpu(n, 3, 4)), "cuda", 1025),
    ("tree_route", lambda n: (on_gpu(3, 4), on_gpu(n, 3, 4)), "triton", 1025),
]


@pytest.mark.parametrize(("op", "tensors", "backend", "size"), SIZES, ids=[f"{each[0]}-{each[2]}" for each in SIZES])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_sizes_that_a_kernel_cannot_take_fall_back_with_a_warning(
    gpu, op, tensors, backend, size, capability, monkeypatch
):
    if backend == "triton":
        if reason := backends.missing("triton", op):
            pytest.skip(reason)
        from moe_kernels.backends import triton

        monkeypatch.setattr(triton, "device_type", "cuda")  # without a GPU, tests/ptx sets it to "cpu"
    gpu.capability, gpu.backend = capability, backend
    backends._warn_reference.cache_clear()
    assert backends.choose(op, None, *tensors(size - 1)) == backend
    with pytest.warns(UserWarning, match=f"{op}: no kernel can run"):
        assert backends.choose(op, None, *tensors(size)) == "reference"
    error = rf"{op}: backend '{backend}' .*: it takes \w up to {size - 1}, not {size}"
    with pytest.raises(mk.BackendError, match=error):
        backends.choose(op, backend, *tensors(size))
    found = {each.backend: each.reason for each in mk.explain(op, *tensors(size))}
    assert found[backend].endswith(f"up to {size - 1}, not {size}")


@pytest.mark.parametrize("target", [each for each in TARGETS if each.backend == "cuda"], ids=lambda each: each.id)
def test_a_size_that_no_kernel_takes_is_computed_by_the_reference(target, monkeypatch):
    if reason := reason_to_skip(target, "tree_gate"):
        pytest.skip(reason)
    monkeypatch.setitem(backends.AUTOMATIC, "cpu", ("cuda", "reference"))
    with running(target):
        x, split, leaf = (torch.randn(shape, device=target.device) for shape in ((2, 3), (1, 4096, 3), (1, 4097, 3)))
        gates, _ = mk.tree_gate(x, split, leaf, gamma=1.0)
        expected, _ = tree_reference.tree_gate(x, split, leaf, gamma=1.0)
        torch.testing.assert_close(gates, expected)
