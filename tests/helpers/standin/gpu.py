"""torch.cuda and NVML without a GPU."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

NAME = "Stand-in GPU"

# With so small an L2 the bench makes few sets of inputs.
PROPERTIES = SimpleNamespace(
    name=NAME, total_memory=2**36, major=9, minor=0, multi_processor_count=132, L2_cache_size=1024, uuid=None
)


class OnCpu(TorchFunctionMode):
    """Puts tensors onto the CPU that are asked for on "cuda"."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: _device(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        return function(*(map(_device, args) if function is torch.Tensor.to else args), **given)


def _device(value: Any) -> Any:
    return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return (end.seconds - self.seconds) * 1e3


class Stream:
    def wait_stream(self, other: Any) -> None: ...


class Graph:
    """A replay takes as long as what was captured, at most 1 ms, and computes nothing."""

    seconds = 0.0

    def replay(self) -> None:
        time.sleep(min(self.seconds, 1e-3))


class graph:
    def __init__(self, captured: Graph) -> None:
        self.captured = captured

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.captured.seconds = time.perf_counter() - self.began


def _nothing(*arguments: object, **named: object) -> None: ...


def install() -> None:
    """From here on this process has a GPU, as far as torch.cuda and NVML tell it."""
    replaced = dict.fromkeys(("synchronize", "empty_cache", "set_sync_debug_mode", "_sleep"), _nothing)
    replaced |= {"reset_peak_memory_stats": _nothing}
    values = {"is_available": True, "is_initialized": True, "device_count": 1, "get_device_capability": (9, 0)}
    values |= {"get_device_properties": PROPERTIES, "get_device_name": NAME, "current_stream": Stream()}
    values |= {"memory_allocated": 0, "max_memory_allocated": 2**20}
    replaced |= {name: mock.Mock(return_value=value) for name, value in values.items()}
    replaced |= {"Event": Event, "Stream": Stream, "CUDAGraph": Graph, "graph": graph, "stream": nullcontext}
    for name, each in replaced.items():
        setattr(torch.cuda, name, each)
    names = ("nvmlDeviceGetHandleByIndex", "nvmlInit", "nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage")
    names += ("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksThrottleReasons")
    sensors = {name: lambda *arguments: 4 for name in (*names, "nvmlDeviceGetTotalEnergyConsumption")}
    constants = {"NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0, "NVMLError": RuntimeError}
    sys.modules["pynvml"] = SimpleNamespace(**sensors, **constants)  # type: ignore[assignment]
    OnCpu().__enter__()
