"""Decides whether a GPU and its driver can run code that nvcc compiled."""

from __future__ import annotations

import torch


def capability(target: str) -> tuple[int, int] | None:
    """The compute capability in `target`. If it has none: that of the current GPU, or None without a GPU."""
    if ":" not in target and not torch.cuda.is_available():
        return None
    if ":" not in target:
        return torch.cuda.get_device_capability()
    major, minor = target.split(":")[1].split(".")
    return int(major), int(minor)


def unsupported(target: str, architectures: str, built_with: int, driver: int) -> str | None:
    """Why code for `architectures`, such as "8.0;9.0+PTX", cannot run on the GPU of `target`.

    Returns None if it can run, or if `capability` returns None.

    Machine code for X.Y runs on capability X.Z with Z >= Y, if the driver's major CUDA version is at least that of the
    toolkit. A driver at least as new as the toolkit compiles PTX for X.Y on X.Y and all later capabilities. Code with a
    letter after the number, such as 9.0a, is accepted only on X.Y. built_with, driver: CUDA versions, 13000 for 13.0.
    """
    found = capability(target)
    if found is None:
        return None
    if driver // 1000 < built_with // 1000:
        return f"it was built with CUDA {version(built_with)}; the driver offers {version(driver)}: update the driver"
    only_ptx = False
    for each in architectures.split(";"):
        number, _, ptx = each.partition("+")
        major, minor = (int(part) for part in number.rstrip("af").split("."))
        same = found == (major, minor)
        if same or (number[-1] not in "af" and found[0] == major and found[1] >= minor):
            return None
        only_ptx = only_ptx or (bool(ptx) and number[-1] not in "af" and found >= (major, minor))
    if only_ptx and driver >= built_with:
        return None
    if only_ptx:
        return f"a driver for CUDA {version(built_with)} must compile the PTX, not one for {version(driver)}: update it"
    return f"it was built for capability {architectures}; this GPU has {found[0]}.{found[1]}"


def version(number: int) -> str:
    """A CUDA version as text: "13.0" for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"
