"""Which GPUs the CUDA driver shows, asked without torch.

setup.py and `make gpu` run this file by its path, before anything is installed. As a program it prints the compute
capabilities, one a line; without a GPU it says why, and the status is 2.
"""

from __future__ import annotations

import ctypes
import os
import sys

# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h
MAJOR, MINOR = 75, 76


def capabilities() -> list[str]:
    """The distinct compute capabilities of the visible GPUs in rising order, such as ["8.6", "9.0"]."""
    return look()[0]


def look() -> tuple[list[str], str]:
    """`capabilities()`, and if there are none the reason. The driver heeds CUDA_VISIBLE_DEVICES."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return [], f"no CUDA driver ({error})"
    found = set()
    try:
        _call(driver, "cuInit", 0)
        for index in range(_read(driver, "cuDeviceGetCount")):
            device = _read(driver, "cuDeviceGet", index)
            found.add(tuple(_read(driver, "cuDeviceGetAttribute", each, device) for each in (MAJOR, MINOR)))
        reason = "the CUDA driver counts 0 GPUs"
    except (RuntimeError, AttributeError) as error:  # AttributeError: a library without one of these functions
        found, reason = set(), str(error)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        reason += f", with CUDA_VISIBLE_DEVICES={chosen!r}"
    return [f"{major}.{minor}" for major, minor in sorted(found)], "" if found else reason


def _read(driver: ctypes.CDLL, name: str, *arguments: int) -> int:
    """The number that a function of the driver writes to its first argument."""
    value = ctypes.c_int()
    _call(driver, name, ctypes.byref(value), *arguments)
    return value.value


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(driver, name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name} of the CUDA driver: {(text.value or b'?').decode()} (error {status})")


def main() -> int:
    found, reason = look()
    if found:
        print("\n".join(found))
        return 0
    print(f"no GPU that the CUDA driver shows; `make bench` measures the CPU\n({reason})", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
