"""Reads clocks, power, temperature, throttling and energy of the GPU from NVML, while a kernel is repeated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

PERIOD_SECONDS = 0.02
_THROTTLING = {  # bits of NVML's throttle reasons; 0x1, an idle GPU, is left out
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}


def missing() -> str:
    """The reason why NVML cannot be used; empty if it can."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        _handle(pynvml)
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    return ""


def watch(launch: Callable[[], object], calls: int, seconds: float) -> dict[str, Any]:
    """Reads the sensors while `launch` is repeated for `seconds`; empty if NVML or a sensor (except energy) is missing.

    calls: number of calls of the kernel in one launch. Returns medians of clocks in MHz, power in W and temperature in
    degrees Celsius, all throttle reasons seen and, if the GPU counts its energy, mean joules of a call.
    """
    if missing():
        return {}
    import pynvml

    handle, seen, launched = _handle(pynvml), list[dict[str, Any]](), 0
    torch.cuda.synchronize()
    before, start = _millijoules(pynvml, handle), time.perf_counter()
    while not seen or time.perf_counter() - start < seconds:
        due = time.perf_counter() + PERIOD_SECONDS
        while time.perf_counter() < due:
            launch()
            launched += calls
            torch.cuda.synchronize()
        try:
            seen.append(_reading(pynvml, handle))
        except pynvml.NVMLError:  # a virtual machine may hide its GPU's sensors
            return {}
    after = _millijoules(pynvml, handle)
    found = {name: statistics.median(each[name] for each in seen) for name in seen[0] if name != "throttled"}
    found["throttled"] = ", ".join(sorted({word for each in seen for word in each["throttled"]}))
    if before is not None and after is not None:
        found["joules_per_call"] = (after - before) / 1e3 / launched
    return found


def _handle(pynvml: Any) -> Any:
    """NVML's handle of torch's GPU 0: by uuid if torch knows it, since NVML may number the GPUs differently."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None) if torch.cuda.is_available() else None
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)


def _reading(pynvml: Any, handle: Any) -> dict[str, Any]:
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "throttled": [word for bit, word in _THROTTLING.items() if reasons & bit],
    }


def _millijoules(pynvml: Any, handle: Any) -> int | None:
    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
