"""Writes files completely or not at all, and reads checkpoints without running code that they contain."""

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
    """Replaces the file atomically: after an interruption, `path` is the old file or the new one."""
    with _atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def try_place(path: Path) -> None:
    """Raises OSError if `path` is a folder, or if no file can be made in its folder, which is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    part = path.with_name(f"{path.name}.part")
    part.touch()
    part.unlink()


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes `state`, tensors in plain containers, and the version, completely or not at all."""
    save_tensors(path, {"version": VERSION, **state})


def save_tensors(path: Path, state: Mapping[str, Any]) -> None:
    """Writes `state`, such as a state dict, completely or not at all; its direct tensor values become CPU tensors."""
    plain = {key: value.detach().cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    with _atomic(path) as file:
        torch.save(plain, file)


def load(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """The state that `save` wrote, on the CPU.

    Raises:
        ValueError: as `read`; or another version, or a missing key.
    """
    state = read(path)
    if state.get("version") != VERSION or any(key not in state for key in keys):
        missing = "".join(f", no {key}" for key in keys if key not in state)
        raise ValueError(
            f"{path} is no checkpoint of this program: expected version {VERSION} with {', '.join(keys)}; "
            f"got version {state.get('version')}{missing}"
        )
    return state


def read(path: Path) -> dict[str, Any]:
    """A dict that `save` or `save_tensors` wrote, on the CPU. It may hold only what torch.load with weights_only reads.

    Raises:
        ValueError: no such file, a damaged file, other contents, or no dict.
    """
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(state, dict):
            return state
        raise ValueError(f"expected a dict, got {type(state).__name__}")
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} is no whole checkpoint of tensors and plain containers: {first}") from error


@contextmanager
def _atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file to write. At the end of the block it replaces `path`; an OSError in the block names `path`."""
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
