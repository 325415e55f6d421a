"""Texts, one token a byte: Tiny Shakespeare, WikiText, enwik8, text8, or another .txt file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels.papers.data.files import Tensors, as_bytes, read

HUNDRED_MILLION = 100_000_000  # bytes of enwik8 and of text8

_WHOLE = re.compile(r"(enwik8|text8)(\.zip|\.gz)?|tiny_?shakespeare\.txt(\.gz)?")
_PART = re.compile(r"(?P<set>wiki(?:text)?[-\d]*)[._](?P<part>train|valid|test)\.(?P<kind>tokens|raw|txt)(?:\.gz)?")


@dataclass(frozen=True)
class Text(Tensors):
    """Three parts of a text, uint8 (n,): indices into `vocabulary`, the bytes that occur in the text."""

    name: str
    train_tokens: Tensor
    valid_tokens: Tensor
    test_tokens: Tensor
    vocabulary: bytes

    def windows(self, part: str, length: int) -> Tensor:
        """uint8 (n, length + 1), n = (tokens - 1) // length, a view: adjacent pieces, each with the token after it."""
        tokens: Tensor = getattr(self, f"{part}_tokens")
        if len(tokens) <= length:
            raise ValueError(f"data: {self.name}: expected more than {length} bytes of {part} text, got {len(tokens)}")
        return tokens.unfold(0, length + 1, length)

    def __str__(self) -> str:
        sizes = " / ".join(str(len(t)) for t in (self.train_tokens, self.valid_tokens, self.test_tokens))
        return f"{self.name}: {sizes} bytes to train, validate and test, {len(self.vocabulary)} different ones"


def find(file: Path) -> tuple[str, Path] | None:
    """By the file's name: ("text", file), or ("text in parts", folder/set*.kind) for one file of several, or None."""
    if _WHOLE.fullmatch(file.name):
        return "text", file
    if match := _PART.fullmatch(file.name):
        return "text in parts", file.parent / _pattern(match)
    return None


def _pattern(part: re.Match[str]) -> str:
    return f"{part['set']}*.{part['kind']}"


def load(file: Path) -> Text:
    """A text in one file: 90 % of its bytes to train, then 5 % to validate and 5 % to test, as usual for enwik8."""
    content, name = read(file), file.name.partition(".")[0]
    if name in ("enwik8", "text8") and len(content) != HUNDRED_MILLION:
        raise ValueError(f"data: {file}: expected the {HUNDRED_MILLION} bytes of {name}, got {len(content)}")
    if len(content) < 100:
        raise ValueError(f"data: {file}: expected at least 100 bytes of text, got {len(content)}")
    first, second = len(content) * 90 // 100, len(content) * 95 // 100
    return _text(name, [content[:first], content[first:second], content[second:]])


def load_parts(place: Path) -> Text:
    """A text whose parts are files: test, and train or valid or both. place: folder/set*.kind, as `find` returns it.

    Without a training file the validation file is the training set, the validation set is empty, and the name says so.
    """
    matches = ((file, _PART.fullmatch(file.name)) for file in sorted(place.parent.iterdir()))
    files = {match["part"]: file for file, match in matches if match and _pattern(match) == place.name}
    if "test" not in files or len(files) < 2:
        missing = ", ".join(part for part in ("train", "valid", "test") if part not in files)
        raise ValueError(
            f"data: expected {place.name} with test, and with train or valid, in {place.parent}; no {missing}"
        )
    parts, name = {part: read(file) for part, file in files.items()}, place.name.partition("*")[0]
    for part in ("train" if "train" in files else "valid", "test"):
        if not parts[part]:
            raise ValueError(f"data: {files[part]}: expected text, got an empty file")
    if "train" not in parts:
        parts, name = parts | {"train": parts["valid"], "valid": b""}, f"{name} (trained on its validation text)"
    return _text(name, [parts["train"], parts.get("valid", b""), parts["test"]])


def _text(name: str, parts: list[bytes]) -> Text:
    tokens = [as_bytes(part).long() for part in parts]
    vocabulary = torch.stack([part.bincount(minlength=256) for part in tokens]).sum(0).nonzero().flatten()
    index = torch.zeros(256, dtype=torch.uint8)
    index[vocabulary] = torch.arange(len(vocabulary), dtype=torch.uint8)
    train, valid, test = (index[part] for part in tokens)
    return Text(name, train, valid, test, bytes(vocabulary.tolist()))
