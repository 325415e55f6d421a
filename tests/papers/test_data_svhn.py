"""The loaders of SVHN and of MNIST with SVHN (COMET trees), on small files that these tests write."""

import io
import re
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from moe_kernels.papers import data
from tests.helpers.mnist import write_mnist


def write_svhn(folder, *parts, **changed):
    io = pytest.importorskip("scipy.io", reason="scipy is not installed")
    draw, written = np.random.default_rng(1), {}
    for part in parts:
        n = {"train": 30, "extra": 50, "test": 20}[part]
        x, y = draw.integers(0, 256, (32, 32, 3, n), dtype=np.uint8), (np.arange(n)[:, None] % 10 + 1).astype(np.uint8)
        written[part] = {"X": x, "y": y} | changed
        io.savemat(folder / f"{part}_32x32.mat", written[part])
    return written


def pixels(x):
    """Images in [-1, 1] as bytes from 0 to 255."""
    return ((x + 1) * 127.5).round().byte()


def test_svhn_from_its_files(tmp_path):
    written = write_svhn(tmp_path, "train", "test")
    found = data.load(tmp_path)
    assert str(found) == "svhn: 30 training and 20 test images (3, 32, 32)"
    assert found.classes[int(found.test_y[9])] == "0"  # the file has label 10 for the digit 0
    assert found.test_y[:3].tolist() == [1, 2, 3]
    image = pixels(found.test_x[7]).view(3, 32, 32)
    assert image[2, 5, 11] == written["test"]["X"][5, 11, 2, 7]
    extra = write_svhn(tmp_path, "extra")["extra"]
    found = data.load(tmp_path / "test_32x32.mat")
    assert len(found.train_y) == 80
    assert pixels(found.train_x[30]).view(3, 32, 32)[0, 1, 2] == extra["X"][1, 2, 0, 0]


def test_mnist_and_svhn_in_one_folder_are_mixed(tmp_path):
    (mnist_x, _), _ = write_mnist(tmp_path, 12, 4, (28, 28)).values()
    svhn = write_svhn(tmp_path, "train", "extra", "test")
    found = data.load(tmp_path)
    count = round(100 * 75_000 / 630_420)  # the paper tests on 75,000 of SVHN's 630,420 images; here SVHN has 100
    assert found.name == "digits of MNIST and SVHN"
    assert (len(found.train_y), len(found.test_y)) == (12 + 100 - count, 4 + count)
    framed = pixels(found.train_x[3]).view(3, 32, 32)
    assert all(torch.equal(each[2:-2, 2:-2], torch.from_numpy(mnist_x[3])) for each in framed)
    assert framed[:, [0, 1, -2, -1]].eq(0).all()
    every = torch.cat([pixels(found.train_x[12:]), pixels(found.test_x[4:])])
    labels = torch.cat([found.train_y[12:], found.test_y[4:]])
    known = {
        part["X"][..., i].transpose(2, 0, 1).tobytes(): int(part["y"][i, 0]) % 10
        for part in svhn.values()
        for i in range(part["X"].shape[-1])
    }
    assert {x.numpy().tobytes(): int(y) for x, y in zip(every, labels, strict=True)} == known
    assert data.load(tmp_path / "train_32x32.mat").name == "svhn"
    assert data.load(tmp_path / "train-images-idx3-ubyte").name == "mnist"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"X": np.zeros((32, 32, 1, 30), np.uint8)}, "expected X uint8 (32, 32, 3, n)"),
        ({"y": np.ones((29, 1), np.uint8)}, "and n numbers y"),
        ({"y": np.full((30, 1), 11, np.uint8)}, "expected y from 1 to 10, got 11 to 11"),
        ({"y": np.zeros((30, 1), np.uint8)}, "expected y from 1 to 10, got 0 to 0"),
    ],
)
def test_a_wrong_svhn_file_is_an_error(tmp_path, changed, message):
    write_svhn(tmp_path, "test")
    with pytest.raises(ValueError, match=r"no train_32x32\.mat"):
        data.load(tmp_path)
    write_svhn(tmp_path, "train", **changed)
    with pytest.raises(ValueError, match=re.escape(message)):
        data.load(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "found"),
    [({"X": np.zeros((32, 32, 3, 1), np.uint8)}, "X"), ({"y": np.ones((1, 1))}, "y"), ({"z": np.ones(1)}, "neither")],
    ids=["X", "y", "z"],
)
def test_an_svhn_file_has_images_and_labels(tmp_path, arrays, found):
    write_svhn(tmp_path, "train")
    pytest.importorskip("scipy.io").savemat(tmp_path / "test_32x32.mat", arrays)
    with pytest.raises(ValueError, match=rf"^data: {tmp_path}/test_32x32\.mat: expected X and y, got {found}$"):
        data.load(tmp_path)


@pytest.mark.parametrize("shape", [(28, 27), (27, 28)], ids=str)
def test_images_of_mnist_are_mixed_in_their_own_size_alone(tmp_path, shape):
    write_mnist(tmp_path, 12, 4, shape)
    write_svhn(tmp_path, "train", "test")
    message = f"data: expected MNIST's images of 28 x 28 in {tmp_path}, got {shape}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        data.load(tmp_path)


def test_pictures_that_are_no_jpegs_are_refused(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    whole = {}
    for kind in ("JPEG", "PNG", "BMP"):
        image.new("RGB", (4, 4)).save(buffer := io.BytesIO(), kind)
        whole[kind] = buffer.getvalue()
    for kind in whole:
        parts = [whole["JPEG"], whole[kind]]
        np.savez(
            tmp_path / "pictures.npz",
            jpeg=np.frombuffer(b"".join(parts), np.uint8),
            offsets=np.cumsum([0, *map(len, parts)]),
            labels=np.zeros(2, np.uint8),
            is_test=np.arange(2, dtype=np.uint8),
            classes=np.array(["none"]),
        )
        message = rf"^data: {tmp_path}/pictures\.npz: image 1 is not a JPEG: cannot identify image file"
        with nullcontext() if kind == "JPEG" else pytest.raises(ValueError, match=message):
            data.load(tmp_path / "pictures.npz")


def test_scipy_is_named_where_it_is_missing(tmp_path, monkeypatch):
    for part in ("train", "test"):
        (tmp_path / f"{part}_32x32.mat").touch()
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    message = r"^data: \.mat files need scipy: pip install moe_kernels\[assignment\]$"
    with pytest.raises(ImportError, match=message):
        data.load(tmp_path)
