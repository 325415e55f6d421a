"""Files in the format of MNIST."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def write_mnist(folder: Path, train=6, test=4, shape=(3, 2), zipped=False) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng, written = np.random.default_rng(0), {}
    for part, n in (("train", train), ("t10k", test)):
        x, y = rng.integers(0, 256, (n, *shape), dtype=np.uint8), (np.arange(n) % 10).astype(np.uint8)
        written[part] = (x, y)
        for name, array in ((f"{part}-images-idx3-ubyte", x), (f"{part}-labels-idx1-ubyte", y)):
            content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
            (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(content) if zipped else content)
    return written
