"""The loaders of SVHN, MNIST with SVHN, MultiMNIST and CelebA (COMET trees), on small files that these tests write."""

import re
import sys

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


def test_multi_mnist_lays_two_images_over_each_other(tmp_path):
    (pool, _), (x, y) = write_mnist(tmp_path, 60, 10, (6, 6)).values()
    found = data.multi_mnist(tmp_path)
    assert str(found) == (
        "multimnist: 100 training, 20 validation and 20 test images (1, 14, 14), 2 tasks of 10 classes"
    )
    x, y = torch.from_numpy(x), torch.from_numpy(y)  # the test set, whose image i has label i
    for image, (first, second) in zip(found.test[0], found.test[1].tolist(), strict=True):
        assert first != second
        canvas = torch.zeros(14, 14, dtype=torch.int16)
        canvas[:6, :6] += x[first]
        canvas[8:, 8:] += x[second]
        assert torch.equal(image.view(14, 14), canvas.clamp(max=255).byte())
    assert sorted(found.test[1][:, 0].tolist()) == sorted(y.tolist() * 2)
    top_left = [{each.view(14, 14)[:6, :6].numpy().tobytes() for each in x} for x, _ in (found.train, found.valid)]
    assert not top_left[0] & top_left[1]
    assert top_left[0] | top_left[1] == {each.tobytes() for each in pool}
    assert torch.equal(data.multi_mnist(tmp_path).train[0], found.train[0])
    assert not torch.equal(data.multi_mnist(tmp_path, seed=1).train[0], found.train[0])


def test_multi_mnist_sums_ink_where_images_overlap(tmp_path):
    write_mnist(tmp_path, 3, 2, (12, 12))
    with pytest.raises(ValueError, match=r"expected 2 or more images in every part .*, got 2, 1, 2"):
        data.multi_mnist(tmp_path)
    _, (x, _) = write_mnist(tmp_path, 12, 2, (12, 12)).values()
    found = data.multi_mnist(tmp_path).test
    image, (first, second) = found[0][0].view(20, 20), found[1][0].tolist()
    overlap = x[first][8:, 8:].astype(int) + x[second][:4, :4]
    assert image[8:12, 8:12].tolist() == np.minimum(overlap, 255).tolist()
    assert overlap.max() > 255


ATTRIBUTES = {"000001.jpg": (1, -1), "000002.jpg": (-1, -1), "000003.jpg": (1, 1), "000004.jpg": (-1, 1)}


def write_celeba(folder):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    (folder / "img_align_celeba").mkdir()
    for number, name in enumerate(ATTRIBUTES):
        colour = np.array([60 * number, 200, 90], dtype=np.uint8)
        picture = image.fromarray(np.broadcast_to(colour, (218, 178, 3)).copy())
        picture.save(folder / "img_align_celeba" / name, "JPEG", quality=95)
    lines = [f"{name}  {a} {b}" for name, (a, b) in ATTRIBUTES.items()]
    (folder / "list_attr_celeba.txt").write_text("\n".join(["4", "Smiling Young ", *lines]) + "\n")
    parts = zip(ATTRIBUTES, (0, 0, 1, 2), strict=True)
    (folder / "list_eval_partition.txt").write_text("".join(f"{name} {part}\n" for name, part in parts))


def test_celeba_from_its_files(tmp_path):
    write_celeba(tmp_path)
    found = data.celeba(tmp_path)
    assert str(found) == "celeba: 2 training, 1 validation and 1 test images (3, 112, 112), 2 tasks of 2 classes"
    assert found.tasks == ("Smiling", "Young")
    assert [part[1].tolist() for part in (found.train, found.valid, found.test)] == [
        [[1, 0], [0, 0]],
        [[1, 1]],
        [[0, 1]],
    ]
    colours = found.test[0].view(3, -1).float().mean(1)
    torch.testing.assert_close(colours, torch.tensor([180.0, 200.0, 90.0]), atol=3, rtol=0)
    assert data.celeba(tmp_path, size=8).train[0].shape == (2, 3 * 8 * 8)
    assert found.to("cpu").tasks == found.tasks


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("list_attr_celeba.txt", None, "there is no"),
        ("list_attr_celeba.txt", "1\nSmiling Young\n000001.jpg 1 1\n", "expected as many images in both lists"),
        ("list_eval_partition.txt", "000001.jpg 0\n" * 4, "expected image 000002.jpg and a part from 0 to 2"),
        ("list_eval_partition.txt", "".join(f"{name} 7\n" for name in ATTRIBUTES), "a part from 0 to 2, got"),
        (
            "list_eval_partition.txt",
            "".join(f"{name} 0\n" for name in ATTRIBUTES),
            "images of all three parts .*; none of 1, 2",
        ),
        ("list_eval_partition.txt", "\n\n\n\n", "none empty; got 4 lines, 4 of them empty"),
        ("img_align_celeba/000003.jpg", "none", r"000003.jpg is no JPEG"),
        ("img_align_celeba/000003.jpg", None, r"000003.jpg is no JPEG"),
    ],
)
def test_a_wrong_celeba_folder_is_an_error(tmp_path, file, content, message):
    write_celeba(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        data.celeba(tmp_path)


def test_celeba_names_the_package_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=re.escape("data: this set needs Pillow: pip install moe_kernels[bench]")):
        data.celeba(tmp_path)
