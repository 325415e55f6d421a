"""CIFAR-10 and CIFAR-100, as Python pickles or as binary records (https://www.cs.toronto.edu/~kriz/cifar.html)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels.papers.data.files import as_bytes, read, tensor, unpickle
from moe_kernels.papers.data.images import Images, from_bytes

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
SHAPE = (3, 32, 32)

_TEN = re.compile(r"(data_batch_[1-5]|test_batch)(\.bin)?")
_HUNDRED = re.compile(r"(train|test)(\.bin)?")


@dataclass(frozen=True)
class _Kind:
    name: str
    batches: tuple[str, ...]  # the last one is the test set
    label_bytes: int  # number of bytes before the pixels of a binary record; the last of them is the label
    label_key: bytes  # of a Python batch
    classes: tuple[str, ...]


_KINDS = {
    "CIFAR-10": _Kind("cifar10", CIFAR10_BATCHES, 1, b"labels", CIFAR10_CLASSES),
    "CIFAR-100": _Kind("cifar100", ("train", "test"), 2, b"fine_labels", tuple(map(str, range(100)))),
}


def find(file: Path) -> tuple[str, Path] | None:
    """(kind, place) of the file's set, or None. place: folder/*.bin or folder/*; * is a batch's name."""
    if match := _TEN.fullmatch(file.name):
        return "CIFAR-10", file.parent / f"*{match[2] or ''}"
    # Other data sets have a file "train" too; the file of class names identifies CIFAR-100.
    match = _HUNDRED.fullmatch(file.name)
    if match and (file.parent / ("fine_label_names.txt" if match[2] else "meta")).is_file():
        return "CIFAR-100", file.parent / f"*{match[2] or ''}"
    return None


def load(kind: str, place: Path) -> Images:
    layout = _KINDS[kind]
    files = [place.parent / (name + place.suffix) for name in layout.batches]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        number = {2: "two", 6: "six"}[len(files)]
        raise ValueError(f"data: expected {number} {kind} batches in {place.parent}; {', '.join(missing)} missing")
    batches = [_binary(file, layout) if place.suffix else _python(file, kind, layout) for file in files]
    train_x, train_y = (torch.cat(column) for column in zip(*batches[:-1], strict=True))
    return from_bytes(layout.name, [train_x, train_y, *batches[-1]], layout.classes, SHAPE)


def _binary(file: Path, kind: _Kind) -> tuple[Tensor, Tensor]:
    content, record = read(file), kind.label_bytes + prod(SHAPE)
    if not content or len(content) % record:
        raise ValueError(f"data: {file}: expected records of {record} bytes, at least one; got {len(content)} bytes")
    records = as_bytes(content).view(-1, record)
    return records[:, kind.label_bytes :], records[:, kind.label_bytes - 1]


def _python(file: Path, name: str, kind: _Kind) -> tuple[Tensor, Tensor]:
    try:
        batch = unpickle(read(file))
        x, y = tensor(batch[b"data"]), torch.tensor(batch[kind.label_key])
    except Exception as error:  # Unpickler raises many kinds of errors for damaged pickles
        keys = f"data, {kind.label_key.decode()}"
        raise ValueError(
            f"data: {file}: expected a {name} Python batch ({keys}); {type(error).__name__}: {error}"
        ) from error
    if y.dim() != 1 or y.dtype != torch.int64 or len(y) == 0 or x.shape != (len(y), prod(SHAPE)):
        raise ValueError(
            f"data: {file}: expected data uint8 (n, {prod(SHAPE)}) and {kind.label_key.decode()} int64 (n,), n > 0; "
            f"got data {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}"
        )
    return x, y
