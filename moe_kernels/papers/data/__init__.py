"""Data sets from files (those of the papers, other images and other texts), and scikit-learn's digits.

Nothing is downloaded, and no file can run code: the reader of pickles accepts only arrays of bytes, numbers, strings
and plain containers.

`load` returns one of four kinds:
    Images: float32 (n, C * H * W), channels first, in [-1, 1], and labels int64 (n,). A pixel becomes
        2 * pixel / largest - 1, as by Normalize(0.5, 0.5) in the public COMET code; largest is 255, for digits 16.
    Text: uint8 indices into the bytes of its vocabulary.
    Table: x and y, float32.
    Ratings: columns user, movie, watched and rating.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_kernels.papers.data import cifar, images, jester_books, ratings, sarcos, svhn, text
from moe_kernels.papers.data.cifar import CIFAR10_BATCHES, CIFAR10_CLASSES
from moe_kernels.papers.data.images import Images
from moe_kernels.papers.data.ratings import Ratings
from moe_kernels.papers.data.sarcos import Table
from moe_kernels.papers.data.text import Text

Dataset = Images | Text | Ratings | Table

__all__ = [
    "CIFAR10_BATCHES",
    "CIFAR10_CLASSES",
    "Dataset",
    "Images",
    "Ratings",
    "Table",
    "Text",
    "blank",
    "describe",
    "load",
]

_LOADERS: dict[str, Callable[[Path], Dataset]] = {
    "MNIST": images.mnist,
    "CIFAR-10": lambda place: cifar.load("CIFAR-10", place),
    "CIFAR-100": lambda place: cifar.load("CIFAR-100", place),
    "SVHN": svhn.load,
    "MNIST and SVHN": svhn.load_with_mnist,
    "JPEG": images.jpegs,
    "text": text.load,
    "text in parts": text.load_parts,
    "SARCOS": sarcos.load,
    "Jester": jester_books.load_jester,
    "Books": jester_books.load_books,
    "MovieLens": ratings.load_published,
    "MovieLens, prepared": ratings.load_prepared,
}
_KINDS = (cifar, svhn, ratings, jester_books, sarcos, text)
_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar-100-binary", "cifar-100-python", "ml-1m")
_EXPECTED = (
    "MNIST as IDX files, CIFAR as batches, SVHN as train_32x32.mat and test_32x32.mat, an .npz of JPEGs, MovieLens as "
    "ratings.dat or movielens_*.csv, Jester as jester_ratings.dat, Books as BX-Book-Ratings.csv, SARCOS as "
    "sarcos_inv.mat and sarcos_inv_test.mat, or text (tiny_shakespeare.txt, wikitext, enwik8, text8)"
)


def load(name_or_path: str | Path) -> Dataset:
    """The data set with that name, or at that path.

    Args:
        name_or_path:
            "digits"    scikit-learn's 1,797 images of 8 x 8; 360 of them, a fixed random choice, are the test set
            a folder    with exactly one of these sets; if it has several, the error lists them:
                MNIST       train-images-idx3-ubyte and the three other files, plain or .gz (also Fashion-MNIST)
                CIFAR-10    data_batch_1.bin .. data_batch_5.bin and test_batch.bin, or the Python batches, the same
                            names without .bin; also in the folder's cifar-10-batches-bin and -py
                CIFAR-100   train.bin, test.bin and fine_label_names.txt, or train, test and meta; fine labels; also in
                            the folder's cifar-100-binary and -python
                SVHN        train_32x32.mat and test_32x32.mat; optionally extra_32x32.mat, more training images
                MNIST and SVHN, if both are in the folder, become one set as in COMET trees: see svhn.load_with_mnist
                JPEG        *.npz with jpeg (uint8, the files one after another), offsets (n + 1), labels (n),
                            is_test (n), classes (names)
                MovieLens   ratings.dat of MovieLens-1M, also in ml-1m; or COMET trees' movielens_val.csv (or
                            movielens_train.csv) and movielens_test.csv, plain or .gz
                Jester      jester_ratings.dat;   Books  BX-Book-Ratings.csv of BookCrossing
                SARCOS      sarcos_inv.mat and sarcos_inv_test.mat
                text        tiny_shakespeare.txt or its .gz; enwik8 or text8, plain, .gz or .zip; the files of wikitext
            a file      if it has samples of a set above: that set, whatever else is in the folder; any other .txt or
                        .txt.gz: a text: 90 % for training, 5 % for validation, 5 % for the test

    Raises:
        ValueError: there is no such path, no set or several sets there, or a file does not contain what its name says.
        ImportError: a package is missing: scikit-learn (digits), scipy (SVHN, SARCOS), numpy or Pillow (JPEG).
        OSError: a file cannot be read.
    """
    if str(name_or_path) == "digits":
        return images.digits()
    path = Path(os.path.expanduser(name_or_path))  # Path.expanduser raises for an unknown user
    if not path.exists():
        raise ValueError(f"data: expected 'digits' or a path to {_EXPECTED}; there is no {path}")
    found = _sets(path)
    if found.keys() == {("MNIST", path), ("SVHN", path)}:
        found = {("MNIST and SVHN", path): path}
    if len(found) != 1:
        listed = "".join(f"\n  {kind}: {file}" for (kind, _), file in found.items())
        raise ValueError(
            f"data: {path} holds {len(found)} sets, expected one; name one of these files:{listed}"
            if found
            else f"data: expected {_EXPECTED} in {path}; found none"
        )
    ((kind, place),) = found
    return _LOADERS[kind](place)


def describe(data: Dataset) -> dict[str, Any]:
    """The properties of a data set from which `blank` makes one without its samples, as values that JSON has.

    "kind", "name", and for Images the classes and the shape, for Text the vocabulary, for Table the numbers of inputs
    and outputs, for Ratings the numbers of users and movies.
    """
    properties: dict[str, Any] = {"kind": type(data).__name__, "name": data.name}
    if isinstance(data, Images):
        return properties | {"classes": list(data.classes), "image_shape": list(data.image_shape)}
    if isinstance(data, Text):
        return properties | {"vocabulary": list(data.vocabulary)}
    if isinstance(data, Table):
        return properties | {"inputs": data.train[0].shape[1], "outputs": data.train[1].shape[1]}
    return properties | {"num_users": data.num_users, "num_movies": data.num_movies}


def blank(properties: dict[str, Any], length: int) -> Dataset:
    """A data set with the properties that `describe` returned: a row of zeros in each part (Text: `length` zeros)."""
    kind, name = properties["kind"], properties["name"]
    if kind == "Images":
        shape = tuple(properties["image_shape"])
        x, y = torch.zeros(1, math.prod(shape)), torch.zeros(1, dtype=torch.long)
        return Images(name, x, y, x, y, tuple(properties["classes"]), shape)
    if kind == "Text":
        tokens = torch.zeros(length, dtype=torch.uint8)
        return Text(name, tokens, tokens, tokens, bytes(properties["vocabulary"]))
    if kind == "Table":
        row = torch.zeros(1, properties["inputs"]), torch.zeros(1, properties["outputs"])
        return Table(name, row, row)
    ids, zero = torch.zeros(1, dtype=torch.long), torch.zeros(1)
    rows = (ids, ids, zero, zero)
    return Ratings(name, rows, rows, properties["num_users"], properties["num_movies"])


def _sets(path: Path) -> dict[tuple[str, Path], Path]:
    """(kind, place) -> one of the set's files, for every set at `path`; _LOADERS[kind](place) loads the set."""
    files = [path]
    if path.is_dir():
        folders = [path, *(path / name for name in _FOLDERS)]
        files = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir()) if file.is_file()]
    found: dict[tuple[str, Path], Path] = {}
    for file in files:
        if images.IDX_NAME.fullmatch(file.name):
            found.setdefault(("MNIST", file.parent), file)
        elif key := next(filter(None, (kind.find(file) for kind in _KINDS)), None):
            found.setdefault(key, file)
        elif file.suffix == ".npz" and (file == path or _has_jpegs(file)):
            found[("JPEG", file)] = file
        elif file == path and file.name.endswith((".txt", ".txt.gz")):
            found[("text", file)] = file
    return found


def _has_jpegs(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return "jpeg.npy" in archive.namelist()
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile):
        return False
