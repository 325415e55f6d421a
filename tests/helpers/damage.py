"""Damages files as disks and editors do, and fills disks."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """The bytes of a zip file with some of them changed, inserted, exchanged or left out, often in its headers."""
    data, size = bytearray(whole), len(whole)
    directory = whole.find(b"PK\1\2")
    kind = draw.choice(["bit", "bytes", "end", "swap", "directory", "pickle", "header", "zero", "insert", "delete"])
    place = draw.randrange(size)
    few = draw.choice([1, 1, 3, 50])
    if kind == "bit":
        data[place] ^= 1 << draw.randrange(8)
    elif kind in ("bytes", "directory", "pickle", "header"):
        pickle, header = whole.find(b"data.pkl"), whole.rfind(b"PK\3\4", 0, place + 4)
        low, high = {
            "bytes": (0, size),
            "directory": (directory, size),
            "pickle": (pickle, pickle + 3000),
            "header": (header, header + 60),
        }[kind]
        for _ in range(few):
            data[min(draw.randrange(low, high), size - 1)] = draw.randrange(256)
    elif kind == "end":
        del data[place:]
    elif kind == "swap":
        length = draw.choice([1, 16, 500, 3000])
        a, b = draw.randrange(size - length), draw.randrange(size - length)
        data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]
    elif kind == "zero":
        data[place : place + 100] = bytes(len(data[place : place + 100]))
    elif kind == "insert":
        data[place:place] = draw.randbytes(few)
    else:
        del data[place : place + few]
    return bytes(data)


def on_small_disk(folder: Path, kilobytes: int, words: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Runs `python -m moe_kernels words` with a file system of this size in memory mounted on `folder`.

    None if this user may mount none. Afterwards the files are in the folder "kept" beside `folder`.
    """
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    small = f"mount -t tmpfs -o size={kilobytes}k tmpfs {folder}"
    try:
        if subprocess.run([*mount, small], capture_output=True).returncode:
            return None
    except FileNotFoundError:
        return None
    script = f'{small} && "$@"; status=$?; cp -a {folder} {folder.parent / "kept"}; exit $status'
    command = [*mount, script, "sh", sys.executable, "-m", "moe_kernels", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
