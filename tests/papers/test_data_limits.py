"""Loaders of data sets at their limits: sizes of files, names that look alike, headers, parts and offsets."""

import gzip
import re
import struct
import zipfile

import numpy as np
import pytest
import torch

from moe_kernels.papers.data import cifar, files, images, load, ratings
from moe_kernels.papers.data.images import Images
from tests.helpers.mnist import write_mnist

HEADER = "user,movie,watched,rating\n"


@pytest.mark.parametrize("name", ["plain", "packed.gz", "packed.zip"])
@pytest.mark.parametrize("size", [0, 99, 100, 101, 300])
def test_a_file_has_at_most_the_limit(tmp_path, monkeypatch, name, size):
    monkeypatch.setattr(files, "LIMIT", 100)
    path, content = tmp_path / name, b"abcdef" * 50
    content = content[:size]
    if name.endswith(".zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("inside", content)
    else:
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    if size <= 100:
        assert files.read(path) == content
        return
    with pytest.raises(ValueError, match=f"^data: {path}: expected at most 100 bytes, got more$"):
        files.read(path)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("train", "test"), None),
        (("train.bin", "test.bin"), None),
        (("train", "test", "fine_label_names.txt"), None),
        (("train.bin", "test.bin", "meta"), None),
        (("train", "meta"), "*"),
        (("train.bin", "fine_label_names.txt"), "*.bin"),
        (("data_batch_1",), "*"),
        (("test_batch.bin",), "*.bin"),
        (("data_batch_6",), None),
        (("data_batch_0.bin",), None),
        (("train.binary", "fine_label_names.txt"), None),
    ],
    ids=str,
)
def test_which_files_are_batches_of_cifar(tmp_path, names, kind):
    """Other data sets have files "train" and "test" too; the file of class names is that of CIFAR-100."""
    for name in names:
        (tmp_path / name).write_bytes(b"")
    number = "CIFAR-10" if "_batch" in names[0] else "CIFAR-100"
    assert cifar.find(tmp_path / names[0]) == (None if kind is None else (number, tmp_path / kind))
    if kind is None:
        with pytest.raises(ValueError, match=r"; found none$"):
            load(tmp_path)


def test_a_binary_record_of_cifar_100_has_its_fine_label_last(tmp_path):
    (tmp_path / "fine_label_names.txt").touch()
    pixels = bytes(range(256)) * 12
    (tmp_path / "train.bin").write_bytes(b"".join(bytes([3, y]) + pixels for y in (99, 0)))
    (tmp_path / "test.bin").write_bytes(bytes([3, 42]) + pixels[::-1])
    found = load(tmp_path)
    assert (found.train_y.tolist(), found.test_y.tolist()) == ([99, 0], [42])
    torch.testing.assert_close((found.train_x + 1) * 127.5, torch.tensor(list(pixels)).float().expand(2, -1))
    assert found.classes == tuple(map(str, range(100)))
    for content in (b"", bytes(3073)):
        (tmp_path / "test.bin").write_bytes(content)
        message = f"expected records of 3074 bytes, at least one; got {len(content)} bytes"
        with pytest.raises(ValueError, match=rf"^data: {tmp_path}/test\.bin: {message}$"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "data", "message"),
    [
        ((0,), b"", "expected 0 bytes of data for sizes (0,), at least one; got 0"),
        ((3,), b"", "expected 3 bytes of data for sizes (3,), at least one; got 0"),
        ((3,), b"abcd", "expected 3 bytes of data for sizes (3,), at least one; got 4"),
    ],
)
def test_a_header_of_mnist_without_the_data_is_an_error(tmp_path, sizes, data, message):
    write_mnist(tmp_path)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    path.write_bytes(bytes([0, 0, 8, 1]) + struct.pack(">I", *sizes) + data)
    with pytest.raises(ValueError, match=f"^{re.escape(f'data: {path}: {message}')}$"):
        load(tmp_path)


def test_the_smallest_mnist(tmp_path):
    for part, pixel, label in (("train", 255, 9), ("t10k", 51, 0)):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(
            bytes([0, 0, 8, 3]) + struct.pack(">3I", 1, 1, 1) + bytes([pixel])
        )
        (tmp_path / f"{part}-labels.idx1-ubyte").write_bytes(
            bytes([0, 0, 8, 1]) + struct.pack(">I", 1) + bytes([label])
        )
    found = load(tmp_path)
    assert (found.train_x.tolist(), found.train_y.tolist(), found.test_y.tolist()) == ([[1.0]], [9], [0])
    assert found.test_x.item() == pytest.approx(51 / 127.5 - 1)


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"offsets": [0, 2, 2, 6]}, True),  # an empty file, which Pillow refuses later
        ({"offsets": [0, 2, 4, 5]}, False),
        ({"offsets": [0, 2, 4, 7]}, False),
        ({"offsets": [1, 2, 4, 6]}, False),
        ({"offsets": [0, 4, 2, 6]}, False),
        ({"offsets": [0, 2, 6]}, False),
        ({"offsets": [0, 2, 4, 6, 6]}, False),
        ({"is_test": [0, 1]}, False),
        ({"is_test": [0, 1, 1, 0]}, False),
        ({"jpeg": np.zeros(6, np.uint16)}, False),
    ],
    ids=str,
)
def test_the_arrays_of_jpegs_fit_together(tmp_path, monkeypatch, changes, right):
    arrays = {"jpeg": np.zeros(6, np.uint8), "offsets": [0, 2, 4, 6], "labels": [0, 1, 0], "is_test": [0, 1, 0]}
    arrays |= {"classes": ["a", "b"]} | changes
    np.savez(tmp_path / "set.npz", **{name: np.asarray(each) for name, each in arrays.items()})
    cut = []

    def decode(file, content, offsets):
        cut.append((content, offsets))
        return torch.zeros(3, 3, 2, 4, dtype=torch.uint8)

    monkeypatch.setattr(images, "_decode", decode)
    if right:
        found = load(tmp_path / "set.npz")
        assert (found.train_y.tolist(), found.test_y.tolist(), found.image_shape) == ([0, 0], [1], (3, 2, 4))
        assert cut == [(bytes(6), arrays["offsets"])]
        return
    with pytest.raises(ValueError, match=r"expected jpeg uint8, 4 ascending offsets from 0 to 6, 3 flags is_test; got"):
        load(tmp_path / "set.npz")
    assert cut == []


@pytest.mark.parametrize("flags", [[0, 0, 0], [1, 1, 1]])
def test_jpegs_are_of_both_parts(tmp_path, flags):
    arrays = {"jpeg": np.zeros(6, np.uint8), "offsets": [0, 2, 4, 6], "labels": [0, 1, 0], "is_test": flags}
    np.savez(tmp_path / "set.npz", classes=["a", "b"], **{name: np.asarray(each) for name, each in arrays.items()})
    with pytest.raises(ValueError, match=f"expected training and test images; got {sum(flags)} test images of 3$"):
        load(tmp_path / "set.npz")


def test_the_labels_of_images_are_classes():
    def make(*labels):
        x, y = torch.zeros(len(labels), 2, dtype=torch.uint8), torch.tensor(labels)
        return images.from_bytes("set", [x, y, x, y], ("a", "b", "c"), (1, 1, 2))

    assert isinstance(make(0, 2, 1), Images)
    for wrong in ((-1, 0), (0, 3)):
        message = f"data: set: expected labels from 0 to 2; got {min(wrong)} to {max(wrong)}"
        with pytest.raises(ValueError, match=f"^{message}$"):
            make(*wrong)


@pytest.mark.parametrize("backwards", [False, True])
def test_of_a_plain_and_a_packed_file_of_ratings_the_packed_one_counts(tmp_path, monkeypatch, backwards):
    (tmp_path / "movielens_test.csv").write_text(f"{HEADER}1,1,1,1\n")
    (tmp_path / "movielens_train.csv").write_text(f"{HEADER}2,2,1,2\n")
    (tmp_path / "movielens_train.csv.gz").write_bytes(gzip.compress(f"{HEADER}3,3,1,3\n".encode()))
    (tmp_path / "movielens_val.csv").write_text(f"{HEADER}4,4,1,4\n")
    folder = type(tmp_path)
    listed = sorted(tmp_path.glob("movielens_*"), reverse=backwards)
    monkeypatch.setattr(folder, "glob", lambda path, pattern: iter(listed))
    found = ratings.load_prepared(tmp_path / "movielens_*")
    assert ([each.tolist() for each in found.train], found.name) == ([[3], [3], [1.0], [3.0]], "movielens")


@pytest.mark.parametrize(
    ("row", "right"),
    [
        ("0,0,0,0", True),
        ("999999,999999,1,5", True),
        ("0,0,1,1", True),
        ("1000000,0,1,1", False),
        ("0,-1,1,1", False),
        ("-1,0,1,1", False),
        ("0,0,1,0", False),
        ("0,0,1,6", False),
        ("0,0,0,1", False),
        ("0,0,2,2", False),
        ("0,0,-1,-1", False),
    ],
)
def test_the_limits_of_a_prepared_row(tmp_path, row, right):
    (tmp_path / "movielens_test.csv").write_text(f"{HEADER}7,1,1,5\n")
    (tmp_path / "movielens_val.csv").write_text(f"{HEADER}1,2,1,3\n{row}\n")
    if right:
        assert [each[1].item() for each in load(tmp_path).train] == [float(each) for each in row.split(",")]
        return
    numbers = ", ".join(row.split(","))
    with pytest.raises(ValueError, match=rf"movielens_val\.csv, line 3: expected rows of .*; got \[{numbers}\]$"):
        load(tmp_path)


def test_a_fixed_tenth_of_published_ratings_tests():
    """At least one row; the order and the movies not watched come from one generator."""
    user, movie = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 3, 1, 2, 5])
    stars = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    found = ratings.with_unseen(None, "few", user, movie, stars)
    generator = torch.Generator().manual_seed(0)
    unseen = ratings._draw_unwatched(None, user, movie, generator)
    order = torch.randperm(10, generator=generator)
    rows = list(zip(user.tolist() * 2, [*movie.tolist(), *unseen.tolist()], [1.0] * 5 + [0.0] * 5, strict=True))
    expected = [(*rows[i], (stars.tolist() + [0.0] * 5)[i]) for i in order.tolist()]
    columns = [torch.cat(pair).tolist() for pair in zip(found.test, found.train, strict=True)]
    assert list(zip(*columns, strict=True)) == expected
    assert [len(part[0]) for part in (found.test, found.train)] == [1, 9]
    assert (found.num_users, found.num_movies) == (3, 6)
    one = ratings.with_unseen(None, "two", torch.tensor([0, 1]), torch.tensor([0, 1]), torch.ones(2))
    assert [len(part[0]) for part in (one.test, one.train)] == [1, 3]


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        (("train", "valid"), "test"),
        (("test",), "train, valid"),
        (("train",), "valid, test"),
        (("train", "test"), None),
        (("valid", "test"), None),
        (("train", "valid", "test"), None),
    ],
    ids=str,
)
def test_a_text_in_parts_has_a_test_and_another_part(tmp_path, parts, missing):
    for part in parts:
        (tmp_path / f"wiki.{part}.tokens").write_text(part)
    if missing is None:
        found = load(tmp_path)
        read = [found.train_tokens, found.valid_tokens, found.test_tokens]
        texts = [bytes(found.vocabulary[i] for i in part.tolist()).decode() for part in read]
        assert texts == [parts[0], "valid" if len(parts) == 3 else "", "test"]
        assert ("trained on its validation text" in found.name) == (parts[0] == "valid")
        return
    message = f"data: expected wiki*.tokens with test, and with train or valid, in {tmp_path}; no {missing}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(tmp_path)


@pytest.mark.parametrize(("size", "sizes"), [(100, (90, 5, 5)), (119, (107, 6, 6)), (139, (125, 7, 7))])
def test_the_parts_of_a_text_in_one_file(tmp_path, size, sizes):
    (tmp_path / "notes.txt").write_bytes((bytes(range(97, 107)) * 20)[:size])
    found = load(tmp_path / "notes.txt")
    assert tuple(map(len, (found.train_tokens, found.valid_tokens, found.test_tokens))) == sizes
    assert found.test_tokens[-1] == (size - 1) % 10
