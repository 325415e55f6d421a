"""Triton backend: kernels, and functions that launch them.

Each file without a leading underscore serves one or more operations. Its functions *_supports return None if the
kernels take a device and dtype, else the reason why not; functions *_limits return the largest sizes that kernels take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy
import torch
import triton

# Device type of the tensors that kernels take. tests/ptx sets "cpu", since it executes compiled kernels on the host.
device_type = "cuda"


def unsupported(device: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """None if kernels that take `dtypes` can run on this device with this dtype, else the reason why not."""
    device = device.partition(":")[0]  # "cuda:8.0" -> "cuda"
    if device != device_type and not triton.knobs.runtime.interpret:
        return f"it runs on cuda tensors, not on {device} ones (TRITON_INTERPRET=1 interprets it there, slowly)"
    if triton.knobs.runtime.interpret and (reason := _interpreter_fails()) is not None:
        return reason
    if dtype not in dtypes:
        return f"it takes {', '.join(str(each).removeprefix('torch.') for each in dtypes)}, not {dtype}"
    return None


def _interpreter_fails() -> str | None:
    """Why Triton's interpreter fails, or None. Before 3.7 it uses arrays as loop bounds, which numpy 2.4 refuses."""
    if _release(triton.__version__) >= (3, 7) or _release(numpy.__version__) < (2, 4):
        return None
    return f"the interpreter of Triton {triton.__version__} takes numpy below 2.4, not {numpy.__version__}"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """Launches a kernel that is compiled without fusing products and sums (tl.fma still fuses).

    LLVM would fuse a product with the first addition of a sum over lanes. Each lane would then add its own unrounded
    product and the rounded product of another lane, so lanes that share a sum would get different last bits.
    """
    kernel[grid](*arguments, enable_fp_fusion=False, **named)


def on_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: during a call the GPU of the first argument is current, since Triton launches on the current GPU."""

    @wraps(launcher)
    def wrapper(x: torch.Tensor, *rest: Any) -> Any:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return launcher(x, *rest)
        with torch.cuda.device(x.get_device()):
            return launcher(x, *rest)

    return wrapper


def patterns(x: torch.Tensor) -> torch.Tensor:
    """A view of x as integers of the same width."""
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)
