"""SVHN, house numbers in the cropped format; and its mixture with MNIST (COMET trees, supplement S1.1)."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.papers.data.files import matlab
from moe_kernels.papers.data.images import Images, from_bytes, mnist_bytes

PARTS = ("train", "extra", "test")
SHAPE = (3, 32, 32)
CLASSES = tuple(map(str, range(10)))
TEST_SHARE = 75_000 / 630_420  # share of SVHN's images on which COMET trees tests
SEED = 0  # draws the test images of load_with_mnist


def find(file: Path) -> tuple[str, Path] | None:
    """("SVHN", folder), or None if the file is not of this set."""
    return ("SVHN", file.parent) if file.name in (f"{part}_32x32.mat" for part in PARTS) else None


def load(place: Path) -> Images:
    """train_32x32.mat (73,257 images), extra_32x32.mat (531,131 more to train on, optional), test_32x32.mat (26,032).

    Each has X uint8 (32, 32, 3, n) and y (n, 1); y = 10 is the digit 0.
    """
    parts = _parts(place)
    test = parts.pop("test")
    train = [torch.cat(each) for each in zip(*parts.values(), strict=True)]
    return from_bytes("svhn", [*train, *test], CLASSES, SHAPE)


def load_with_mnist(place: Path) -> Images:
    """MNIST and SVHN as one set, as COMET trees mixes them.

    The test set is MNIST's test images and a fixed random 11.9 % of the images in all of SVHN's files: 75,000 images if
    extra_32x32.mat is there. The paper does not say how it makes the sizes equal: here MNIST's images get a black frame
    of 2 pixels and three equal channels.
    """
    x, y = (torch.cat(each) for each in zip(*_parts(place).values(), strict=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED))
    count = round(TEST_SHARE * len(y))
    test, train = order[:count], order[count:]
    grey = mnist_bytes(place)
    if grey[0].shape[1:] != (28, 28):
        raise ValueError(f"data: expected MNIST's images of 28 x 28 in {place}, got {tuple(grey[0].shape[1:])}")
    framed = [F.pad(each, (2, 2, 2, 2))[:, None].expand(-1, 3, -1, -1) for each in grey[::2]]
    train_x, test_x = (torch.cat([a, x[rows]]) for a, rows in zip(framed, (train, test), strict=True))
    train_y, test_y = (torch.cat([a.long(), y[rows]]) for a, rows in zip(grey[1::2], (train, test), strict=True))
    return from_bytes("digits of MNIST and SVHN", [train_x, train_y, test_x, test_y], CLASSES, SHAPE)


def _parts(place: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """part -> images uint8 (n, 3, 32, 32) and labels int64 (n,) below 10."""
    files = {part: place / f"{part}_32x32.mat" for part in PARTS}
    missing = [file.name for part, file in files.items() if part != "extra" and not file.is_file()]
    if missing:
        raise ValueError(f"data: expected SVHN as train_32x32.mat and test_32x32.mat in {place}; no {missing[0]}")
    return {part: _read(file) for part, file in files.items() if file.is_file()}


def _read(file: Path) -> tuple[Tensor, Tensor]:
    found = matlab(file, "X", "y")
    if "X" not in found or "y" not in found:
        raise ValueError(
            f"data: {file}: expected X and y, got {'X' if 'X' in found else 'y' if 'y' in found else 'neither'}"
        )
    x, y = found["X"], found["y"]
    n = x.shape[-1]
    if x.shape != (32, 32, 3, n) or x.dtype != "uint8" or y.size != n or not n or y.dtype.kind not in "iuf":
        raise ValueError(
            f"data: {file}: expected X uint8 (32, 32, 3, n), n > 0, and n numbers y; got {x.dtype} {x.shape} and "
            f"{y.dtype} {y.shape}"
        )
    labels = torch.from_numpy(y.reshape(-1).astype("int64"))
    if labels.min() < 1 or labels.max() > 10:
        raise ValueError(f"data: {file}: expected y from 1 to 10, got {int(labels.min())} to {int(labels.max())}")
    return torch.from_numpy(x).permute(3, 2, 0, 1), labels % 10
