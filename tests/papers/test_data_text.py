"""The loaders of texts, on small files that these tests write."""

import gzip
import zipfile

import pytest
import torch

from moe_kernels.papers.data import files, load


def test_text_is_bytes_split_nine_to_one(tmp_path):
    content = ("To be, or not to be" * 20).encode()[:200]
    (tmp_path / "tiny_shakespeare.txt.gz").write_bytes(gzip.compress(content))
    found = load(tmp_path)
    assert (found.name, found.vocabulary) == ("tiny_shakespeare", bytes(sorted(set(content))))
    parts = [found.train_tokens, found.valid_tokens, found.test_tokens]
    assert [len(part) for part in parts] == [180, 10, 10]
    assert bytes(found.vocabulary[i] for part in parts for i in part.tolist()) == content
    windows = found.windows("train", 16)
    assert windows.shape == (11, 17)
    assert torch.equal(windows[3], found.train_tokens[48:65])
    with pytest.raises(ValueError, match="expected more than 10 bytes of test text, got 10"):
        found.windows("test", 10)


def test_missing_parts_of_a_text_are_listed(tmp_path):
    (tmp_path / "wiki.valid.tokens").write_bytes(b"abc" * 9)
    with pytest.raises(ValueError, match="no train, test"):
        load(tmp_path)
    (tmp_path / "wiki.test.tokens").write_bytes(b"cab" * 3)
    found = load(tmp_path)
    assert (len(found.train_tokens), len(found.valid_tokens), len(found.test_tokens)) == (27, 0, 9)
    assert "trained on its validation text" in found.name
    (tmp_path / "wiki.train.tokens").write_bytes(b"d" * 50)
    assert load(tmp_path).train_tokens.tolist() == [3] * 50


@pytest.mark.parametrize("empty", ["train", "valid", "test"])
def test_an_empty_part_of_a_text_is_an_error_with_its_file(tmp_path, empty):
    for part in {"train": "train", "valid": "valid", "test": "train"}[empty], "test":
        (tmp_path / f"wiki.{part}.tokens").write_bytes(b"" if part == empty else b"abc")
    with pytest.raises(ValueError, match=rf"wiki\.{empty}\.tokens: expected text, got an empty file"):
        load(tmp_path)


def test_sets_of_text_beside_each_other_are_not_mixed(tmp_path):
    for number, (name, kind) in enumerate([("wiki.", "tokens"), ("wiki.", "raw"), ("wikitext2_", "txt")]):
        for part in ("train", "valid", "test"):
            (tmp_path / f"{name}{part}.{kind}").write_bytes(bytes([97 + number]) * 9)
    with pytest.raises(ValueError, match="holds 3 sets"):
        load(tmp_path)
    for file, letter in (("wiki.test.tokens", b"a"), ("wiki.train.raw", b"b"), ("wikitext2_valid.txt", b"c")):
        assert load(tmp_path / file).vocabulary == letter


def test_a_truncated_enwik8_is_an_error(tmp_path):
    (tmp_path / "enwik8").write_bytes(b"<mediawiki" * 100)
    with pytest.raises(ValueError, match="expected the 100000000 bytes of enwik8, got 1000"):
        load(tmp_path)
    with zipfile.ZipFile(tmp_path / "text8.zip", "w") as archive:
        archive.writestr("text8", b"a" * 200)
    with pytest.raises(ValueError, match="bytes of text8, got 200"):
        load(tmp_path / "text8.zip")


def test_an_archive_over_the_size_limit_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LIMIT", 1000)
    (tmp_path / "tiny_shakespeare.txt.gz").write_bytes(gzip.compress(bytes(5000)))
    with pytest.raises(ValueError, match="expected at most 1000 bytes, got more"):
        load(tmp_path)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_archive_has_one_file(tmp_path, count):
    path = tmp_path / "text8.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            archive.writestr(f"text{number}", b"abc")
    if count == 1:
        assert files.read(path) == b"abc"
        return
    message = rf"^data: {path}: expected a whole zip file with one file in it; it has {count} files$"
    with pytest.raises(ValueError, match=message):
        files.read(path)
