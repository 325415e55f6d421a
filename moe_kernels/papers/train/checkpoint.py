"""Writes files completely or not at all, and reads checkpoints without running code that they contain."""

from __future__ import annotations

import errno
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
    file, part = _temporary(path)
    os.close(file)
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
    version = state.get("version")
    if not isinstance(version, int) or version != VERSION or any(key not in state for key in keys):
        missing = "".join(f", no {key}" for key in keys if key not in state)
        raise ValueError(
            f"{path} is no checkpoint of this program: expected version {VERSION} with {', '.join(keys)}; "
            f"got version {version}{missing}"
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
        _check_zip(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(state, dict):
            return state
        raise ValueError(f"expected a dict, got {type(state).__name__}")
    except Exception as error:  # a damaged file makes torch.load raise errors of any kind
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is no whole checkpoint of tensors and plain containers: {first}") from error


def _check_zip(path: Path) -> None:
    """Raises an error if the file is damaged in a way that torch.load does not notice."""
    with zipfile.ZipFile(path) as file:
        damaged = file.testzip()  # compares checksums
        folders = [each.filename for each in file.infolist() if each.external_attr & 0x10]  # torch would not read these
    if damaged is not None or folders:
        raise ValueError(f"{damaged or folders[0]} is damaged")


def remove_temporary(folder: Path) -> None:
    """Removes what a killed run left of a checkpoint or model in `folder`. No other run may be writing there."""
    for name in ("checkpoint.pt", "model-*"):
        for part in folder.glob(f"{name}.????????.part"):
            part.unlink(missing_ok=True)


@contextmanager
def _atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file to write. At the end of the block it replaces `path`. After an error it is gone; an OSError names `path`.

    A full disk is an OSError too where torch.save hides that error behind a RuntimeError.
    """
    part = None
    try:
        number, part = _temporary(path)
        with open(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        if part is not None:
            with suppress(OSError):
                part.unlink()
        cause = _os_error(error)
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror or str(cause), str(path)) from error


def _temporary(path: Path) -> tuple[int, Path]:
    """A new file beside `path`, open for writing, with the permissions that open() gives to a new file."""
    number, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    mask = os.umask(0o077)  # a mask can be read only by setting another
    os.umask(mask)
    with suppress(PermissionError):  # of a file system with the same permissions for all files
        os.fchmod(number, 0o666 & ~mask)
    return number, Path(name)


def _os_error(error: BaseException | None) -> OSError | None:
    """The error itself if it is an OSError, or the one in whose handling this RuntimeError was raised."""
    while isinstance(error, RuntimeError):
        error = error.__context__
    return error if isinstance(error, OSError) else None
