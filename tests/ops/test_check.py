"""With MOE_KERNELS_CHECK=1 indices of GPU tensors too are checked before a kernel uses them as addresses."""

from __future__ import annotations

import pytest
import torch

from moe_kernels import backends
from moe_kernels.ops.combine import combine_fwd
from moe_kernels.ops.dispatch import dispatch_fwd
from moe_kernels.ops.grouped_gemm import grouped_gemm_fwd
from moe_kernels.sizes import refuse_bad_groups, refuse_bad_rows


class OnGpu(torch.Tensor):
    """A CPU tensor whose is_cpu is False, as a GPU tensor's is."""

    is_cpu = property(lambda self: False)


def on_gpu(*values):
    return torch.tensor(values, dtype=torch.int32).as_subclass(OnGpu)


X = torch.zeros(2, 4)
# By words of the expected error: a call that checks indices, one of them out of range.
STALE = {
    "row_token": lambda: refuse_bad_rows("dispatch", on_gpu(0, 1), 2, on_gpu(0, 2), on_gpu(0, 2)),
    "slot_row": lambda: refuse_bad_rows("combine", on_gpu(0, 2), 2),
    "plan.expert_offsets must rise": lambda: refuse_bad_rows("dispatch", on_gpu(0, 1), 2, on_gpu(0, 1), on_gpu(0, 3)),
    "each of the 2 rows": lambda: refuse_bad_rows("dispatch", on_gpu(0, 0)[:, None], 2, on_gpu(0, 1), on_gpu(0, 2)),
    "must agree": lambda: refuse_bad_rows("dispatch", on_gpu(0, 1)[:, None], 2, on_gpu(1, 0), on_gpu(0, 2)),
    "grouped_gemm: expert_offsets must rise": lambda: refuse_bad_groups(on_gpu(0, 5), X, None),
    "from -1": lambda: refuse_bad_groups(on_gpu(0, 2), X, on_gpu(0, 7)),
}


@pytest.mark.parametrize("said", STALE)
def test_a_stale_plan_is_an_error_on_a_gpu_if_checks_are_on(said, monkeypatch):
    monkeypatch.delenv("MOE_KERNELS_CHECK", raising=False)
    STALE[said]()  # the check is off: on a GPU the host would have to wait for the values
    monkeypatch.setenv("MOE_KERNELS_CHECK", "0")
    STALE[said]()
    monkeypatch.setenv("MOE_KERNELS_CHECK", "1")
    with pytest.raises(ValueError, match=said):
        STALE[said]()


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_the_check_comes_before_the_kernel(backend, monkeypatch):
    monkeypatch.setenv("MOE_KERNELS_CHECK", "1")
    monkeypatch.setattr(backends, "load", lambda *_: pytest.fail("a kernel was called"))
    with pytest.raises(ValueError, match=r"dispatch: plan\.row_token"):
        dispatch_fwd(X, on_gpu(0, 2), on_gpu(0, 1)[:, None], on_gpu(0, 2), backend)
    with pytest.raises(ValueError, match=r"combine: plan\.slot_row"):
        combine_fwd(X, None, on_gpu(0, 5)[:, None], backend)
    with pytest.raises(ValueError, match="grouped_gemm: expert_offsets"):
        grouped_gemm_fwd(X, torch.zeros(1, 4, 4), on_gpu(0, 5), None, None, "", False, backend)
