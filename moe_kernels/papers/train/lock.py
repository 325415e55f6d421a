"""A lock on the folder of a run, so that no two runs write their files there."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

NAME = "train.lock"
UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # by a file system without locks


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`, which is created if missing. Its file says who holds it, and goes at the end.

    The system itself releases the lock of a process that ends, so that a run that was killed leaves none.

    Raises:
        ValueError: another run holds the lock; the message says which.
        OSError: the folder or the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    file = _acquire(path)
    try:
        _sign(file, path)
        yield
    finally:
        with suppress(OSError):
            if _is_at(file, path):
                path.unlink()
        with suppress(OSError):  # of a full disk, a second time
            file.close()


def _acquire(path: Path) -> IO[str]:
    while True:
        file = path.open("a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise ValueError(_refusal(file, path.parent)) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                file.close()
                raise OSError(error.errno, error.strerror, str(path)) from error
            print(f"train: {path}: {error.strerror}; start no second run in this folder", file=sys.stderr)
            return file
        if _is_at(file, path):
            return file
        file.close()  # its holder ended, and removed it, after it was opened here


def _refusal(file: IO[str], folder: Path) -> str:
    file.seek(0)
    holder = file.readline().strip() or "a process that has just started"
    return f"another run is writing to {folder}: {holder}; wait for its end or stop it, or give another --out"


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sign(file: IO[str], path: Path) -> None:
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, started {datetime.now().astimezone():%F %T %Z}\n")
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
