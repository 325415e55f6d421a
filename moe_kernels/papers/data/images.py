"""Reads image sets into `Images`: scikit-learn's digits, MNIST in the IDX format, an .npz of JPEGs."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_kernels.papers.data.files import LIMIT, Tensors, as_bytes, import_optional, read

DIGITS_SEED = 0  # draws the split into training and test images
LARGEST = 1024  # most pixels on a side of a JPEG, since a small file can declare a huge picture

IDX_NAME = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")


@dataclass(frozen=True)
class Images(Tensors):
    """Images float32 (n, C * H * W) in [-1, 1], labels int64 (n,), indices into `classes`; image_shape is (C, H, W)."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        return self.train_x, self.train_y

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        return self.test_x, self.test_y

    def __str__(self) -> str:
        return f"{self.name}: {len(self.train_y)} training and {len(self.test_y)} test images {self.image_shape}"


def digits() -> Images:
    bunch = import_optional("sklearn.datasets", "scikit-learn").load_digits()
    x = torch.tensor(bunch.data, dtype=torch.float32).div_(8).sub_(1)  # pixels are 0 to 16
    y = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(DIGITS_SEED))
    train, test = order[: len(y) * 4 // 5], order[len(y) * 4 // 5 :]
    return Images("digits", x[train], y[train], x[test], y[test], tuple(map(str, range(10))), (1, 8, 8))


def mnist(folder: Path) -> Images:
    parts = mnist_bytes(folder)
    classes = tuple(map(str, range(10)))  # files of Fashion-MNIST have the same names, so its classes get numbers too
    return from_bytes("mnist", parts, classes, (1, *parts[0].shape[1:]))


def mnist_bytes(folder: Path) -> list[Tensor]:
    """uint8: images (n, height, width) and labels (n,) of the training set, then of the test set."""
    images = {part: _idx(folder, part, "images", 3) for part in ("train", "t10k")}
    labels = {part: _idx(folder, part, "labels", 1) for part in ("train", "t10k")}
    for part in images:
        if len(images[part]) != len(labels[part]):
            raise ValueError(
                f"data: expected as many {part} labels as images in {folder}; "
                f"got {len(labels[part])} labels, {len(images[part])} images"
            )
    shape = tuple(images["train"].shape[1:])
    if tuple(images["t10k"].shape[1:]) != shape:
        raise ValueError(f"data: expected t10k images of {shape} as in train, got {tuple(images['t10k'].shape[1:])}")
    return [tensor for part in images for tensor in (images[part], labels[part])]


def _idx(folder: Path, part: str, what: str, rank: int) -> Tensor:
    """The data of an IDX file, uint8. The file: bytes 0, 0, 8 and the rank; big-endian uint32 sizes; the data."""
    files = [
        file
        for file in sorted(folder.iterdir())
        if (m := IDX_NAME.fullmatch(file.name)) and m.group(1, 2) == (part, what)
    ]
    if not files:
        raise ValueError(f"data: expected {part}-{what}-idx{rank}-ubyte or its .gz in {folder}; found neither")
    content = read(files[0])
    header = bytes((0, 0, 8, rank))
    if content[:4] != header or len(content) < 4 + 4 * rank:
        raise ValueError(
            f"data: {files[0]}: expected an IDX header {header.hex(' ')} and {rank} sizes of 4 bytes; "
            f"got {len(content)} bytes, the first are {content[:4].hex(' ')}"
        )
    sizes = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    if len(content) != 4 + 4 * rank + prod(sizes) or prod(sizes) == 0:
        raise ValueError(
            f"data: {files[0]}: expected {prod(sizes)} bytes of data for sizes {sizes}, at least one; "
            f"got {len(content) - 4 - 4 * rank}"
        )
    return as_bytes(content[4 + 4 * rank :]).view(sizes)


def jpegs(file: Path) -> Images:
    arrays = _arrays(file, {"jpeg": "u", "offsets": "iu", "labels": "iu", "is_test": "biuf", "classes": "U"})
    jpeg, offsets, labels, is_test, classes = arrays.values()
    n = len(labels)
    if (
        offsets.shape != (n + 1,)
        or is_test.shape != (n,)
        or jpeg.dtype != "uint8"
        or offsets[0] != 0
        or (offsets[1:] < offsets[:-1]).any()
        or offsets[-1] != len(jpeg)
    ):
        raise ValueError(
            f"data: {file}: expected jpeg uint8, {n + 1} ascending offsets from 0 to {len(jpeg)}, {n} flags is_test; "
            f"got jpeg {jpeg.dtype}, offsets {offsets.shape} {str(offsets)[:60]}, is_test {is_test.shape}"
        )
    test = torch.from_numpy(is_test.astype(bool))
    if test.all() or not test.any():
        raise ValueError(f"data: {file}: expected training and test images; got {int(test.sum())} test images of {n}")
    x, y = _decode(file, jpeg.tobytes(), offsets.tolist()), torch.from_numpy(labels.astype("int64"))
    return from_bytes(file.stem, [x[~test], y[~test], x[test], y[test]], tuple(classes.tolist()), tuple(x.shape[1:]))


def _arrays(file: Path, kinds: dict[str, str]) -> dict[str, Any]:
    """name -> one-dimensional array of an .npz. kinds: name -> allowed letters of dtype.kind. Nothing is unpickled."""
    numpy = import_optional("numpy", "numpy")
    try:
        with zipfile.ZipFile(file) as archive:
            if sum(member.file_size for member in archive.infolist()) > LIMIT:
                raise ValueError(f"it unpacks to more than {LIMIT} bytes")
        with numpy.load(file, allow_pickle=False) as archive:
            missing = [key for key in kinds if key not in archive]
            if missing:
                raise ValueError(f"it has no {', '.join(missing)}")
            found = {key: archive[key] for key in kinds}
        for key, array in found.items():
            if array.ndim != 1 or array.dtype.kind not in kinds[key]:
                raise ValueError(f"its {key} is {array.dtype} {array.shape}, not (n,) of a dtype of kind {kinds[key]}")
    except Exception as error:  # zipfile and numpy raise many kinds of errors for damaged files
        raise ValueError(f"data: {file}: expected an .npz with {', '.join(kinds)}; {error}") from error
    return found


def _decode(file: Path, content: bytes, offsets: list[int]) -> Tensor:
    """uint8 (n, 3, height, width): image i is the JPEG content[offsets[i] : offsets[i + 1]]. All must have one size."""
    image = import_optional("PIL.Image", "Pillow")
    count, pixels = len(offsets) - 1, torch.empty(0, dtype=torch.uint8)
    for i in range(count):
        try:
            picture = image.open(io.BytesIO(content[offsets[i] : offsets[i + 1]]), formats=("JPEG",))
            size = picture.height, picture.width
            if i == 0 and max(size) <= LARGEST and count * prod(size) * 3 <= LIMIT:
                pixels = torch.empty((count, *size, 3), dtype=torch.uint8)
            fits = size == tuple(pixels.shape[1:3])
            if fits:
                pixels[i] = as_bytes(picture.convert("RGB").tobytes()).view(pixels.shape[1:])
        except Exception as error:  # Pillow raises many kinds of errors for damaged pictures
            raise ValueError(f"data: {file}: image {i} is not a JPEG: {error}") from error
        if not fits:
            expected = tuple(pixels.shape[1:3]) or f"at most {LARGEST} x {LARGEST} and {LIMIT} bytes in all"
            size_text = f"{size} for image {i}" + f", {count * prod(size) * 3} bytes in all" * (i == 0)
            raise ValueError(f"data: {file}: expected images of one size, {expected}; got {size_text}")
    return pixels.movedim(3, 1)


def from_bytes(name: str, parts: list[Tensor], classes: tuple[str, ...], image_shape: tuple[int, ...]) -> Images:
    """Images from parts train_x, train_y, test_x, test_y: pixels uint8, and labels of any integer dtype.

    ValueError if a label is not from 0 to len(classes) - 1.
    """
    for y in parts[1::2]:
        if int(y.min()) < 0 or int(y.max()) >= len(classes):
            raise ValueError(
                f"data: {name}: expected labels from 0 to {len(classes) - 1}; got {int(y.min())} to {int(y.max())}"
            )
    train_x, test_x = (x.reshape(len(x), -1).float().div_(127.5).sub_(1) for x in parts[::2])
    train_y, test_y = (y.long() for y in parts[1::2])
    height, width = image_shape[1:]
    return Images(name, train_x, train_y, test_x, test_y, classes, (image_shape[0], height, width))
