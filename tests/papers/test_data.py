"""The loaders of data sets."""

import gzip
import io
import os
import pickle
import re
import struct
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_kernels.papers.data import CIFAR10_BATCHES, CIFAR10_CLASSES, files, images, load
from tests.helpers.mnist import write_mnist

SHARED = Path(os.environ.get("MOE_KERNELS_DATA", Path(__file__).parents[2] / "data"))


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not in {SHARED}")
    return path


def cifar_batches() -> list[tuple[list[int], np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.integers(0, 10, 2).tolist(), rng.integers(0, 256, (2, 3072), dtype=np.uint8)) for _ in CIFAR10_BATCHES]


def write_cifar_binary(folder: Path):
    batches = cifar_batches()
    for name, (labels, pixels) in zip(CIFAR10_BATCHES, batches, strict=True):
        records = b"".join(bytes([y]) + x.tobytes() for y, x in zip(labels, pixels, strict=True))
        (folder / f"{name}.bin").write_bytes(records)
    return batches


def write_jpegs(file: Path, **changes) -> np.ndarray:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    colours = np.array([[250, 10, 10], [10, 250, 10], [10, 10, 250], [128, 128, 128]], dtype=np.uint8)
    files = []
    for colour in colours:
        image.fromarray(np.broadcast_to(colour, (8, 16, 3)).copy()).save(buffer := io.BytesIO(), "JPEG", quality=95)
        files.append(buffer.getvalue())
    arrays = {
        "jpeg": np.frombuffer(b"".join(files), dtype=np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": np.array([0, 1, 2, 1], dtype=np.uint8),
        "is_test": np.array([0, 1, 0, 0], dtype=np.uint8),
        "classes": np.array(["red", "green", "blue"]),
    } | changes
    np.savez(file, **{key: value for key, value in arrays.items() if value is not None})
    return colours


def scaled(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((pixels.reshape(len(pixels), -1) / 255 * 2 - 1).astype(np.float32))


def test_the_split_of_digits_is_fixed():
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    a, b = load("digits"), load("digits")
    assert (a.name, a.image_shape, len(a.classes)) == ("digits", (1, 8, 8), 10)
    assert a.train_x.shape == (1437, 64)
    assert a.test_x.shape == (360, 64)
    assert torch.equal(a.train_x, b.train_x)
    assert torch.equal(a.test_y, b.test_y)
    bunch = datasets.load_digits()
    original = sorted(zip((bunch.data / 8 - 1).tolist(), bunch.target.tolist(), strict=True))
    together = zip(torch.cat([a.train_x, a.test_x]).tolist(), torch.cat([a.train_y, a.test_y]).tolist(), strict=True)
    assert sorted(together) == original


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_folder(tmp_path, zipped):
    written = write_mnist(tmp_path, zipped=zipped)
    for path in (tmp_path, next(tmp_path.iterdir())):
        data = load(path)
        assert (data.name, data.image_shape, data.classes) == ("mnist", (1, 3, 2), tuple("0123456789"))
        for x, y, part in ((data.train_x, data.train_y, "train"), (data.test_x, data.test_y, "t10k")):
            torch.testing.assert_close(x, scaled(written[part][0]), rtol=0, atol=1e-6)
            assert y.dtype == torch.int64
            assert y.tolist() == written[part][1].tolist()


def test_pixels_span_exactly_minus_one_to_one(tmp_path):
    write_mnist(tmp_path)
    content = bytes([0, 0, 8, 3]) + struct.pack(">3I", 4, 3, 2) + bytes([0, 255] * 12)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(content)
    assert load(tmp_path).test_x.unique().tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("subfolder", ["", "cifar-10-batches-bin"])
def test_cifar10_binary_batches(tmp_path, subfolder):
    folder = tmp_path / subfolder
    folder.mkdir(exist_ok=True)
    batches = write_cifar_binary(folder)
    check_cifar(load(tmp_path), batches)


def check_cifar(data, batches):
    assert (data.name, data.image_shape, data.classes) == ("cifar10", (3, 32, 32), CIFAR10_CLASSES)
    torch.testing.assert_close(data.train_x, scaled(np.concatenate([x for _, x in batches[:5]])), rtol=0, atol=1e-6)
    torch.testing.assert_close(data.test_x, scaled(batches[5][1]), rtol=0, atol=1e-6)
    assert data.train_y.tolist() == [label for y, _ in batches[:5] for label in y]
    assert data.test_y.tolist() == batches[5][0]


def test_cifar10_python_batches_of_both_pythons(tmp_path):
    batches = cifar_batches()
    for i, (name, (labels, pixels)) in enumerate(zip(CIFAR10_BATCHES, batches, strict=True)):
        (tmp_path / name).write_bytes(
            python2_batch(labels, pixels) if i % 2 else pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2)
        )
    check_cifar(load(tmp_path), batches)


def python2_batch(labels: list[int], pixels: np.ndarray) -> bytes:
    """A batch as Python 2 pickled it: with byte strings, and with the old name numpy.core.multiarray."""

    def text(s: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(s)) + s

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + text(b"b") + b"tR"
        b"(K\x01" + b"K\x02M" + struct.pack("<H", 3072) + b"\x86"
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89" + text(pixels.tobytes()) + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([y]) for y in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


class Exploit:
    def __reduce__(self):
        return os.getpid, ()


def test_a_python_batch_cannot_run_code(tmp_path):
    write = pickle.dumps({b"data": Exploit(), b"labels": [1]}, protocol=2)
    for name in CIFAR10_BATCHES:
        (tmp_path / name).write_bytes(write)
    with pytest.raises(ValueError, match=r"data_batch_1: expected a CIFAR-10 Python batch.*contains \w+\.getpid"):
        load(tmp_path)


def reduced(shape: int, dtype: bytes, state: bytes) -> bytes:
    """A pickled batch: its array is made with `shape` elements, then gets the shape (1, 3072), `dtype` and the data
    `state`."""
    return (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
        + b"J" + struct.pack("<i", shape) + b"\x85U\x01btR(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\n(U"
        + bytes([len(dtype)]) + dtype + b"K\x00K\x01tR\x89" + state + b"tbU\x06labels](K\x01eu."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (reduced(0, b"O8", b"]"), "array that is not of bytes"),
        (reduced(2**31 - 1, b"u1", b"U\x03abc"), "array .1, 3072. with 3 bytes"),  # must not allocate 2 GiB
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "its memo index is 2147483647"),
        (b"\x80\x02" + b"(" * 3 + b"cbuiltins\neval\n.", "contains builtins.eval"),
        (pickle.dumps({b"data": [1, 2], b"labels": [1]}), "expected an array, got list"),
        (pickle.dumps([1]), "TypeError: "),
        (
            pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": 5}, protocol=2),
            r"expected data uint8 \(n, 3072\) and labels int64 \(n,\), n > 0; got data .* torch.int64 \(\)",
        ),
        *(
            (
                pickle.dumps({b"data": np.zeros(shape, np.uint8), b"labels": [0, 1]}, protocol=2),
                rf"got data {re.escape(str(shape))} and torch.int64 \(2,\)$",
            )
            for shape in ((2, 3071), (1, 3072), (6144,))
        ),
        (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00none\x86R.", "encodes bytes in 'none'"),
        (
            b"\x80\x02}(U\x04datacnumpy\nndarray\n)RU\x06labels](K\x01eu.",
            r"labels\); TypeError: expected an array with contents, got one without$",
        ),
    ],
)
def test_hostile_pickles_are_errors_and_allocate_nothing(tmp_path, batch, message):
    for name in CIFAR10_BATCHES:
        (tmp_path / name).write_bytes(batch)
    with pytest.raises(ValueError, match=rf"data_batch_1.*{message}"):
        load(tmp_path)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=str)
def test_pickled_arrays_of_either_order_are_read(shape):
    rows = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    for array in (rows, np.asfortranarray(rows)):
        found = files.tensor(files.unpickle(pickle.dumps(array, protocol=2)))
        assert found.tolist() == rows.tolist()
        assert found.is_contiguous()


def test_cifar100_in_both_formats(tmp_path):
    rng = np.random.default_rng(2)
    batches = {
        part: (rng.integers(0, 100, 3), rng.integers(0, 256, (3, 3072), dtype=np.uint8)) for part in ("train", "test")
    }
    binary, python = tmp_path / "bin", tmp_path / "python" / "cifar-100-python"
    binary.mkdir()
    python.mkdir(parents=True)
    (binary / "fine_label_names.txt").write_text("")
    (python / "meta").write_bytes(b"")
    for part, (labels, pixels) in batches.items():
        records = b"".join(bytes([7, y]) + x.tobytes() for y, x in zip(labels.tolist(), pixels, strict=True))
        (binary / f"{part}.bin").write_bytes(records)
        batch = {b"data": pixels, b"fine_labels": labels.tolist(), b"coarse_labels": [7] * 3}
        (python / part).write_bytes(pickle.dumps(batch, protocol=2))
    for path in (binary, python.parent, python / "train"):
        found = load(path)
        assert (found.name, len(found.classes)) == ("cifar100", 100)
        assert found.train_y.tolist() == batches["train"][0].tolist()
        torch.testing.assert_close(found.test_x, scaled(batches["test"][1]), rtol=0, atol=1e-6)


def test_npz_of_jpegs(tmp_path):
    colours = write_jpegs(tmp_path / "flags.npz")
    data = load(tmp_path / "flags.npz")
    assert (data.name, data.image_shape, data.classes) == ("flags", (3, 8, 16), ("red", "green", "blue"))
    expected = scaled(colours.repeat(8 * 16, axis=1))
    torch.testing.assert_close(data.train_x, expected[[0, 2, 3]], rtol=0, atol=0.05)  # JPEG is lossy
    torch.testing.assert_close(data.test_x, expected[[1]], rtol=0, atol=0.05)
    assert (data.train_y.tolist(), data.test_y.tolist()) == ([0, 2, 1], [1])


def test_a_folder_with_several_sets_is_an_error_and_a_file_is_not(tmp_path):
    write_mnist(tmp_path)
    write_cifar_binary(tmp_path)
    write_jpegs(tmp_path / "flags.npz")
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    with pytest.raises(ValueError, match="holds 3 sets") as caught:
        load(tmp_path)
    named = re.findall(r"(MNIST|CIFAR-10|JPEG): (.*)", str(caught.value))
    assert {kind: load(file).name for kind, file in named} == {"MNIST": "mnist", "CIFAR-10": "cifar10", "JPEG": "flags"}


def test_paths_without_a_set_are_errors(tmp_path):
    with pytest.raises(ValueError, match="expected 'digits' or a path to MNIST"):
        load(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"expected MNIST as IDX files.*; found none"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"notes.txt: expected at least 100 bytes of text, got 1"):
        load(tmp_path / "notes.txt")


def damage(folder: Path, name: str, change) -> None:
    (folder / name).write_bytes(change((folder / name).read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "train-images-idx3-ubyte",
            lambda b: b"\x00\x00\x0d" + b[3:],
            "expected an IDX header 00 00 08 03 and 3 sizes of 4 bytes; got .* bytes, the first are 00 00 0d 03",
        ),
        ("train-images-idx3-ubyte", lambda b: b[:-1], "expected 36 bytes of data .*got 35"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:3], "expected an IDX header"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:7], "1 sizes of 4 bytes; got 7 bytes"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:4] + struct.pack(">I", 3) + b[8:-1], "3 labels, 4 images"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", "expected labels from 0 to 9; got 0 to 10"),
        ("train-labels-idx1-ubyte", lambda b: b[:-1] + b"\xff", "expected labels from 0 to 9; got 0 to 255"),
    ],
)
def test_damaged_mnist_is_an_error(tmp_path, name, change, message):
    write_mnist(tmp_path)
    damage(tmp_path, name, change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_images_of_both_parts_of_mnist_have_one_size(tmp_path):
    write_mnist(tmp_path)
    content = bytes([0, 0, 8, 3]) + struct.pack(">3I", 4, 2, 3) + bytes(24)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=r"^data: expected t10k images of \(3, 2\) as in train, got \(2, 3\)$"):
        load(tmp_path)


def test_incomplete_sets_are_errors(tmp_path):
    write_mnist(tmp_path, zipped=True)
    damage(tmp_path, "train-images-idx3-ubyte.gz", lambda b: b[:-9])
    with pytest.raises(ValueError, match="expected a whole gzip file"):
        load(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(ValueError, match=r"expected train-images-idx3-ubyte or its \.gz"):
        load(tmp_path)


def test_damaged_cifar_is_an_error(tmp_path):
    write_cifar_binary(tmp_path)
    damage(tmp_path, "data_batch_2.bin", lambda b: b[:-1])
    with pytest.raises(ValueError, match=r"data_batch_2.bin: expected records of 3073 bytes"):
        load(tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(ValueError, match=r"six CIFAR-10 batches.*data_batch_2.bin missing"):
        load(tmp_path)
    (folder := tmp_path / "hundred").mkdir()
    (folder / "meta").touch()
    (folder / "train").touch()
    with pytest.raises(ValueError, match=rf"^data: expected two CIFAR-100 batches in {folder}; test missing$"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": None}, "it has no classes"),
        ({"offsets": np.array([0, 1])}, "5 ascending offsets .* got jpeg uint8, offsets .2,. "),
        ({"offsets": np.array([1, 2, 4, 6, 8]), "jpeg": np.zeros(8, np.uint8)}, r"to 8, .* \[1 2 4 6 8\], is_test"),
        ({"offsets": np.array([0, 4, 2, 6, 8]), "jpeg": np.zeros(8, np.uint8)}, r"to 8, .* \[0 4 2 6 8\], is_test"),
        ({"offsets": np.array([0, 2, 4, 6, 7]), "jpeg": np.zeros(8, np.uint8)}, r"to 8, .* \[0 2 4 6 7\], is_test"),
        ({"is_test": np.array([0, 1, 0])}, r"offsets from 0 to .*, 4 flags is_test; got .*, is_test \(3,\)$"),
        ({"jpeg": np.zeros(8, np.uint16)}, "expected jpeg uint8, .* got jpeg uint16"),
        ({"labels": np.zeros(4)}, r"its labels is float64 \(4,\), not \(n,\) of a dtype of kind iu"),
        ({"is_test": np.zeros(4)}, "expected training and test images"),
        ({"labels": np.array([0, 1, 2, 3])}, "expected labels from 0 to 2; got 0 to 3"),
        ({"jpeg": np.zeros(8, np.uint8), "offsets": np.array([0, 2, 4, 6, 8])}, "image 0 is not a JPEG"),
        ({"classes": np.array([b"red", b"green", b"blue"])}, r"its classes is \|S5"),
    ],
)
def test_damaged_npz_is_an_error(tmp_path, changes, message):
    write_jpegs(tmp_path / "flags.npz", **changes)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "flags.npz")


def test_arrays_of_another_byte_order_are_read(tmp_path):
    write_jpegs(tmp_path / "flags.npz", labels=np.array([0, 1, 2, 1], ">i4"), is_test=np.array([0, 1, 0, 0], ">i4"))
    data = load(tmp_path)
    assert (data.train_y.tolist(), data.test_y.tolist()) == ([0, 2, 1], [1])


def test_images_over_the_memory_limit_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "LIMIT", 4 * 8 * 16 * 3 - 1)
    write_jpegs(tmp_path / "flags.npz")
    monkeypatch.setattr(images, "_arrays", lambda file, kinds: {key: np.load(file)[key] for key in kinds})
    with pytest.raises(ValueError, match=r"at most 1024 x 1024 and 1535 bytes in all; got \(8, 16\) for image 0"):
        load(tmp_path / "flags.npz")


@pytest.mark.parametrize("over", [0, 1])
def test_an_npz_over_the_limit_is_an_error(tmp_path, monkeypatch, over):
    write_jpegs(tmp_path / "flags.npz")
    with zipfile.ZipFile(tmp_path / "flags.npz") as archive:
        limit = sum(each.file_size for each in archive.infolist()) - over
    monkeypatch.setattr(images, "LIMIT", limit)
    message = f"with jpeg, offsets, labels, is_test, classes; it unpacks to more than {limit} bytes"
    refused = pytest.raises(ValueError, match=rf"^data: {tmp_path}/flags\.npz: expected an \.npz {message}$")
    with refused if over else nullcontext():
        load(tmp_path / "flags.npz")


def damaged_zip(method: int, start: int, rubbish: bytes) -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", method) as archive:
        archive.writestr("text8", bytes(range(256)) * 50)
    content = bytearray(buffer.getvalue())
    content[start : start + len(rubbish)] = rubbish
    return bytes(content)


@pytest.mark.parametrize(
    "content",
    [
        damaged_zip(zipfile.ZIP_BZIP2, 45, bytes(30)),
        damaged_zip(zipfile.ZIP_LZMA, 50, bytes(30)),
        damaged_zip(zipfile.ZIP_STORED, -65, b"\x01"),  # sets the flag "encrypted" in the archive's directory
        damaged_zip(zipfile.ZIP_STORED, -6, bytes(4)),  # sets the offset of the directory to 0
    ],
    ids=["bzip2", "lzma", "encrypted", "moved"],
)
def test_a_damaged_archive_names_its_file(tmp_path, content):
    (tmp_path / "text8.zip").write_bytes(content)
    with pytest.raises(ValueError, match=r"data: .*text8\.zip: expected a whole zip file"):
        load(tmp_path)
    (tmp_path / "broken.npz").write_bytes(content)
    (tmp_path / "text8.zip").unlink()
    with pytest.raises(ValueError, match=r"data: .*broken\.npz: expected an \.npz with jpeg"):
        load(tmp_path / "broken.npz")
    with pytest.raises(ValueError, match="found none"):
        load(tmp_path)


def test_a_gzip_file_with_a_plain_name_is_an_error(tmp_path):
    (tmp_path / "tiny_shakespeare.txt").write_bytes(gzip.compress(bytes(np.random.default_rng(0).bytes(500))))
    with pytest.raises(ValueError, match=r"a name that ends in \.gz; rename it to tiny_shakespeare\.txt\.gz"):
        load(tmp_path)


def test_an_unknown_home_folder_is_an_error():
    with pytest.raises(ValueError, match="there is no ~nobody-of-that-name/x"):
        load("~nobody-of-that-name/x")


def test_prepared_ratings(tmp_path):
    (tmp_path / "movielens_val.csv").write_text("user,movie,watched,rating\n3,5,1,4\n0,9,0,0\n")
    with pytest.raises(ValueError, match=r"no movielens_test\.csv"):
        load(tmp_path)
    (tmp_path / "movielens_test.csv.gz").write_bytes(gzip.compress(b"user,movie,watched,rating\n7,1,1,5\n"))
    found = load(tmp_path)
    assert [t.tolist() for t in found.train] == [[3, 0], [5, 9], [1, 0], [4, 0]]
    assert [t.tolist() for t in found.test] == [[7], [1], [1], [5]]
    assert (found.num_users, found.num_movies) == (8, 10)
    assert "trained on its validation rows" in found.name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("user,film\n", "expected the header user,movie,watched,rating, got b'user,film'"),
        ("user,movie,watched,rating\n1,2,1,3\n1,2,x,3\n", "line 3: expected 4 whole numbers"),
        ("user,movie,watched,rating\n1,2,1\n", "line 2: expected 4 whole numbers"),
        ("user,movie,watched,rating\n1,2,1,99999999999999999999\n", "line 2: expected 4 whole numbers of at most 18"),
        ("user,movie,watched,rating\n1,2,1,3\n1,1_0,1,3\n", "line 3: expected 4 whole numbers"),
        ("user,movie,watched,rating\n1, 2,1,3\n", "line 2: expected 4 whole numbers"),
        ("user,movie,watched,rating\n1,2,1,3\n1,2,0,3\n", r"line 3: expected rows of a user .*; got \[1, 2, 0, 3\]"),
        ("user,movie,watched,rating\n1,1000000,1,3\n", "line 2: expected rows of a user and a movie from 0 to 999999"),
        ("user,movie,watched,rating\n", "got none"),
    ],
)
def test_damaged_ratings_are_errors(tmp_path, content, message):
    (tmp_path / "movielens_test.csv").write_text("user,movie,watched,rating\n7,1,1,5\n")
    (tmp_path / "movielens_val.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_published_ratings_get_as_many_movies_that_were_not_watched(tmp_path):
    rng = np.random.default_rng(0)
    watched = {(u, m) for u, m in rng.integers(1, [8, 40], (80, 2)).tolist()} | {(7, 41)}
    lines = [f"{u}::{m}::{1 + (u + m) % 5}::97830{i:04d}\n" for i, (u, m) in enumerate(sorted(watched))]
    (tmp_path / "ratings.dat").write_text("".join(lines))
    found, again = load(tmp_path), load(tmp_path / "ratings.dat")
    rows = [torch.cat(pair).tolist() for pair in zip(found.train, found.test, strict=True)]
    assert rows == [torch.cat(pair).tolist() for pair in zip(again.train, again.test, strict=True)]
    every = list(zip(*rows, strict=True))
    positive = {(u + 1, m + 1, r) for u, m, w, r in every if w}
    assert positive == {(u, m, 1 + (u + m) % 5) for u, m in watched}
    negative = [(u + 1, m + 1) for u, m, w, r in every if not w and r == 0]
    assert len(every) == 2 * len(watched) == 2 * len(negative)
    assert watched.isdisjoint(negative)
    assert len(found.test[0]) == 2 * len(watched) // 10


@pytest.mark.parametrize("rating", [0, 6])
def test_a_damaged_line_of_published_ratings_is_named(tmp_path, rating):
    (tmp_path / "ratings.dat").write_text(f"3::4::1::978\n3::5::5::978\n7::2::{rating}::978\n")
    message = rf"ratings\.dat, line 3: expected .* a rating from 1 to 5, a timestamp; got \[7, 2, {rating}, 978\]"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("missing", ["sklearn.datasets", "PIL.Image"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, missing):
    write_jpegs(tmp_path / "flags.npz")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install moe_kernels\[bench\]"):
        load("digits" if missing.startswith("sklearn") else tmp_path / "flags.npz")


def test_importing_the_loaders_and_the_run_needs_torch_alone():
    others = "{'sklearn', 'PIL', 'matplotlib', 'rich'}"
    code = f"import sys, moe_kernels.papers.train; print(sorted({others} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_published_mnist():
    data = load(shared("t10k-images-idx3-ubyte.gz"))
    assert (data.train_x.shape, data.test_x.shape) == ((60000, 784), (10000, 784))
    counts = torch.cat([data.train_y, data.test_y]).bincount().tolist()
    assert counts == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]  # images of each digit


def test_published_cifar10_jpegs():
    data = load(shared("cifar10_jpeg_25k.npz"))
    assert (data.train_x.shape, data.test_x.shape, data.classes) == ((20000, 3072), (5000, 3072), CIFAR10_CLASSES)
    assert data.train_y.bincount().tolist() == [2000] * 10
    # The mean colour of CIFAR-10's training images, relative to white.
    mean = (data.train_x.view(-1, 3, 1024).mean((0, 2)) + 1) / 2
    torch.testing.assert_close(mean, torch.tensor([0.491, 0.482, 0.447]), rtol=0, atol=0.01)
