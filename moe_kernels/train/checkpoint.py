"""Files that are whole or absent, and checkpoints that cannot run code."""

from __future__ import annotations

import errno
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

VERSION = 1


def write(path: Path, content: bytes | str) -> None:
    """Replaces the file in one piece: whoever reads, and whatever interrupts, finds the old one or the new one."""
    with _whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def try_place(path: Path) -> None:
    """OSError where `write` could not write, for who would else hear of it hours later; what is there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    part = path.with_name(f"{path.name}.part")
    part.touch()
    part.unlink()


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes tensors in plain containers, whole or not at all."""
    save_tensors(path, {"version": VERSION, **state})


def save_tensors(path: Path, state: Mapping[str, Any]) -> None:
    """Writes `state` as it is, a state dict for example, its tensors on the CPU, whole or not at all."""
    plain = {key: value.detach().cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    with _whole(path) as file:
        torch.save(plain, file)


def load(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """What `save` wrote, on the CPU.

    Raises:
        ValueError: as `read`, and for a file of another version or without `keys`.
    """
    state = read(path)
    if state.get("version") != VERSION or any(key not in state for key in keys):
        raise ValueError(f"{path} is no checkpoint of this program (version {VERSION}, with {', '.join(keys)})")
    return state


def read(path: Path) -> dict[str, Any]:
    """A dict that `save` or `save_tensors` wrote, on the CPU: tensors and plain containers alone (weights_only).

    Raises:
        ValueError: no such file, a damaged one, one that asks for anything else, or no dict.
    """
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        KeyError,
        zipfile.BadZipFile,
    ) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} is no whole checkpoint of tensors and plain containers: {first}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} is no whole checkpoint of tensors and plain containers: {type(state).__name__}")
    return state


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` once it is on the disk; an error of writing names that."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
