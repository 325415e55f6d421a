"""Triton kernels, one file per operation: kernels, launchers, f_supports and f_limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy
import torch
import triton

# tests/ptx, which executes the compiled kernels on the host, sets this to "cpu".
device_type = "cuda"


def unsupported(device: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """None if Triton kernels for `dtypes` run on tensors of this device type and dtype, or the reason."""
    device = device.partition(":")[0]  # without the capability
    if device != device_type and not triton.knobs.runtime.interpret:
        return f"it runs on cuda tensors, not on {device} ones (TRITON_INTERPRET=1 interprets it there, slowly)"
    if triton.knobs.runtime.interpret and (reason := _interpreter_fails()) is not None:
        return reason
    if dtype not in dtypes:
        return f"it takes {', '.join(str(each).removeprefix('torch.') for each in dtypes)}, not {dtype}"
    return None


def _interpreter_fails() -> str | None:
    """Why Triton's interpreter fails, or None: Triton 3.6 takes an array as a loop bound, which numpy 2.4 refuses."""
    if _release(triton.__version__) >= (3, 7) or _release(numpy.__version__) < (2, 4):
        return None
    return f"the interpreter of Triton {triton.__version__} takes numpy below 2.4, not {numpy.__version__}"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """Launches a kernel; products and sums are fused only where it calls tl.fma.

    LLVM would also fuse a product with the first step of a sum over lanes. Each lane would then round its own product
    differently, and copies of the sum in several lanes would differ in their last bits.
    """
    kernel[grid](*arguments, enable_fp_fusion=False, **named)


def on_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """`launcher` with the GPU of its first tensor made current, since Triton launches on the current GPU."""

    @wraps(launcher)
    def wrapper(x: torch.Tensor, *rest: Any) -> Any:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return launcher(x, *rest)
        with torch.cuda.device(x.get_device()):
            return launcher(x, *rest)

    return wrapper


def patterns(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns of x as integers of its width."""
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)
