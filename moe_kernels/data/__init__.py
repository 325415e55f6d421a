"""Small image sets for the experiments, from the files in which they are published.

`load` takes "digits", or a path to files that the user has; it downloads nothing. Every set comes out alike: images
as float32 (n, C * H * W), channels first, in [-1, 1] (2 * pixel / largest - 1, the public COMET code's
Normalize(0.5, 0.5)); labels as int64 (n,).
"""

from __future__ import annotations

import gzip
import importlib
import io
import pickle
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_SHAPE = (3, 32, 32)
CIFAR10_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
DIGITS_SEED = 0  # of the split into training and test images

_IDX_NAME = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
_CIFAR_NAME = re.compile(r"(data_batch_[1-5]|test_batch)(\.bin)?")


@dataclass(frozen=True)
class Images:
    """Images float32 (n, C * H * W) in [-1, 1], labels int64 (n,) into `classes`; image_shape is (C, H, W)."""

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

    def to(self, device: torch.device | str) -> Images:
        names = ("train_x", "train_y", "test_x", "test_y")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def __str__(self) -> str:
        return f"{self.name}: {len(self.train_y)} training and {len(self.test_y)} test images {self.image_shape}"


Dataset = Images


def load(name_or_path: str | Path) -> Images:
    """The data set of that name, or in those files.

    Args:
        name_or_path:
            "digits"    scikit-learn's 1,797 images of 8 x 8; a fixed random fifth of them is the test set
            a folder    with exactly one of these sets; where it holds several, the error lists them:
                MNIST       train-images-idx3-ubyte and its three companions, plain or .gz (Fashion-MNIST, too)
                CIFAR-10    data_batch_1.bin .. data_batch_5.bin and test_batch.bin, or the Python batches, the same
                            names without .bin; the folder's cifar-10-batches-bin and -py are looked into
                JPEG        *.npz with jpeg (uint8, the files one after another), offsets (n + 1), labels (n),
                            is_test (n), classes (names)
            a file      any file of a set stands for its set, whatever else its folder holds

    Raises:
        ValueError: no such path, no set or several sets there, or a file that is not what its name says.
        ImportError: scikit-learn, numpy or Pillow is missing.
    """
    if str(name_or_path) == "digits":
        return _digits()
    path = Path(name_or_path).expanduser()
    expected = "MNIST as IDX files, CIFAR-10 as batches, or an .npz of JPEGs"
    if not path.exists():
        raise ValueError(f"data: expected 'digits' or a path to {expected}; there is no {path}")
    found = _sets(path)
    if len(found) != 1:
        listed = "".join(f"\n  {kind}: {file}" for (kind, _), file in found.items())
        raise ValueError(
            f"data: {path} holds {len(found)} sets, and one is wanted; name one of these files:{listed}"
            if found
            else f"data: expected {expected} in {path}; found none"
        )
    ((kind, place),) = found
    return {"MNIST": _mnist, "CIFAR-10": _cifar10, "JPEG": _jpeg}[kind](place)


def _sets(path: Path) -> dict[tuple[str, Path], Path]:
    """(kind, where the set is) -> one of its files, for every set at `path`, a file or a folder."""
    files = [path]
    if path.is_dir():
        folders = [path, path / "cifar-10-batches-bin", path / "cifar-10-batches-py"]
        files = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir()) if file.is_file()]
    found: dict[tuple[str, Path], Path] = {}
    for file in files:
        if _IDX_NAME.fullmatch(file.name):
            found.setdefault(("MNIST", file.parent), file)
        elif match := _CIFAR_NAME.fullmatch(file.name):
            # Both spellings side by side are two copies of a set; the suffix tells them apart.
            found.setdefault(("CIFAR-10", file.parent / f"*{match[2] or ''}"), file)
        elif file.suffix == ".npz" and (file == path or _has_jpegs(file)):
            found[("JPEG", file)] = file
    return found


def _has_jpegs(file: Path) -> bool:
    return zipfile.is_zipfile(file) and "jpeg.npy" in zipfile.ZipFile(file).namelist()


def _digits() -> Images:
    bunch = _need("sklearn.datasets", "scikit-learn").load_digits()
    x = torch.tensor(bunch.data, dtype=torch.float32).div_(8).sub_(1)  # pixels are 0 to 16
    y = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(DIGITS_SEED))
    train, test = order[: len(y) * 4 // 5], order[len(y) * 4 // 5 :]
    return Images("digits", x[train], y[train], x[test], y[test], tuple(map(str, range(10))), (1, 8, 8))


def _mnist(folder: Path) -> Images:
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
    classes = tuple(map(str, range(int(labels["train"].max()) + 1)))
    parts = [tensor for part in images for tensor in (images[part], labels[part])]
    return _dataset("mnist", parts, classes, (1, *shape))


def _idx(folder: Path, part: str, what: str, rank: int) -> Tensor:
    """The unsigned bytes of an IDX file: two zero bytes, 8, the rank, the sizes as big-endian int32, the data."""
    files = [
        file
        for file in sorted(folder.iterdir())
        if (m := _IDX_NAME.fullmatch(file.name)) and m.group(1, 2) == (part, what)
    ]
    if not files:
        raise ValueError(f"data: expected {part}-{what}-idx{rank}-ubyte or its .gz in {folder}; found neither")
    content = _read(files[0])
    header = bytes((0, 0, 8, rank))
    if content[:4] != header or len(content) < 4 + 4 * rank:
        raise ValueError(f"data: {files[0]}: expected an IDX header {header.hex(' ')}, got {content[:4].hex(' ')}")
    sizes = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    if len(content) != 4 + 4 * rank + prod(sizes) or prod(sizes) == 0:
        raise ValueError(
            f"data: {files[0]}: expected {prod(sizes)} bytes of data for sizes {sizes}, at least one; "
            f"got {len(content) - 4 - 4 * rank}"
        )
    return _bytes(content[4 + 4 * rank :]).view(sizes)


def _cifar10(place: Path) -> Images:
    """`place` is folder/*.bin for the binary batches, folder/* for the Python ones."""
    files = [place.parent / (name + place.suffix) for name in CIFAR10_BATCHES]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"data: expected six CIFAR-10 batches in {place.parent}; {', '.join(missing)} missing")
    batches = [_cifar_binary(file) if place.suffix else _cifar_python(file) for file in files]
    train_x, train_y = (torch.cat(column) for column in zip(*batches[:-1], strict=True))
    return _dataset("cifar10", [train_x, train_y, *batches[-1]], CIFAR10_CLASSES, CIFAR10_SHAPE)


def _cifar_binary(file: Path) -> tuple[Tensor, Tensor]:
    content, record = _read(file), 1 + prod(CIFAR10_SHAPE)
    if not content or len(content) % record:
        raise ValueError(f"data: {file}: expected records of {record} bytes, at least one; got {len(content)} bytes")
    records = _bytes(content).view(-1, record)
    return records[:, 1:], records[:, 0]


def _cifar_python(file: Path) -> tuple[Tensor, Tensor]:
    numpy = _need("numpy", "numpy")
    try:
        batch = _PlainUnpickler(io.BytesIO(_read(file)), encoding="bytes").load()
        x, y = torch.from_numpy(numpy.array(batch[b"data"])), torch.tensor(batch[b"labels"])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"data: {file}: expected a CIFAR-10 Python batch (data, labels); {error}") from error
    if x.dtype != torch.uint8 or x.shape != (len(y), prod(CIFAR10_SHAPE)) or len(y) == 0:
        raise ValueError(f"data: {file}: expected data uint8 ({len(y)}, 3072); got {x.dtype} {tuple(x.shape)}")
    return x, y


class _PlainUnpickler(pickle.Unpickler):
    """Arrays of numbers in plain containers, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(importlib.import_module("numpy"), name)
        if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
            numpy = importlib.import_module("numpy")
            return lambda kind, shape, code: numpy.ndarray(shape, numpy.uint8)  # __setstate__ fills it
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode(encoding)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which such a batch has no use for")


def _jpeg(file: Path) -> Images:
    numpy, image = _need("numpy", "numpy"), _need("PIL.Image", "Pillow")
    keys = ("jpeg", "offsets", "labels", "is_test", "classes")
    try:
        with numpy.load(file, allow_pickle=False) as archive:
            missing = [key for key in keys if key not in archive]
            if missing:
                raise ValueError(f"it has no {', '.join(missing)}")
            jpeg, offsets, labels, is_test, classes = (archive[key] for key in keys)
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"data: {file}: expected an .npz with {', '.join(keys)}; {error}") from error
    n = len(labels)
    if (
        offsets.shape != (n + 1,)
        or is_test.shape != (n,)
        or (offsets[1:] < offsets[:-1]).any()
        or offsets[-1] != len(jpeg)
    ):
        raise ValueError(
            f"data: {file}: expected {n + 1} ascending offsets that end at {len(jpeg)} and {n} flags is_test; "
            f"got {offsets.shape} and {is_test.shape}"
        )
    test = torch.from_numpy(is_test).bool()
    if test.all() or not test.any():
        raise ValueError(f"data: {file}: expected training and test images; got {int(test.sum())} test images of {n}")
    content = jpeg.tobytes()
    pixels: Tensor | None = None
    for i in range(n):
        try:
            picture = image.open(io.BytesIO(content[offsets[i] : offsets[i + 1]]), formats=("JPEG",)).convert("RGB")
        except OSError as error:
            raise ValueError(f"data: {file}: image {i} is not a JPEG: {error}") from error
        if pixels is None:
            pixels = torch.empty((n, picture.height, picture.width, 3), dtype=torch.uint8)
        if (picture.height, picture.width) != tuple(pixels.shape[1:3]):
            raise ValueError(
                f"data: {file}: expected images of one size, {tuple(pixels.shape[1:3])}; "
                f"got {(picture.height, picture.width)} for image {i}"
            )
        pixels[i] = _bytes(picture.tobytes()).view(pixels.shape[1:])
    assert pixels is not None  # n >= 2: there are training and test images
    x, y = pixels.movedim(3, 1), torch.from_numpy(labels.astype("int64"))
    return _dataset(
        file.stem, [x[~test], y[~test], x[test], y[test]], tuple(map(str, classes)), (3, *pixels.shape[1:3])
    )


def _dataset(name: str, parts: list[Tensor], classes: tuple[str, ...], image_shape: tuple[int, ...]) -> Images:
    """From bytes: train_x, train_y, test_x, test_y."""
    for y in parts[1::2]:
        if int(y.min()) < 0 or int(y.max()) >= len(classes):
            raise ValueError(
                f"data: {name}: expected labels from 0 to {len(classes) - 1}; got {int(y.min())} to {int(y.max())}"
            )
    train_x, test_x = (x.reshape(len(x), -1).float().div_(127.5).sub_(1) for x in parts[::2])
    train_y, test_y = (y.long() for y in parts[1::2])
    height, width = image_shape[1:]
    return Images(name, train_x, train_y, test_x, test_y, classes, (image_shape[0], height, width))


def _read(file: Path) -> bytes:
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"data: {file}: expected a whole gzip file; {error}") from error


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"data: this set needs {package}: pip install moe_kernels[bench] ({error})") from error
