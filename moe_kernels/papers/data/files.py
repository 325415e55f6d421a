"""Reads files of unknown origin: returns the whole content, or raises an error with the reason.

No file can run code. `read` limits the size of the content, `matlab` does not.
"""

from __future__ import annotations

import gzip
import importlib
import io
import pickle
import pickletools
import re
import zipfile
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

GZIP = b"\x1f\x8b"
LIMIT = 1 << 31  # most bytes of a file and of what it unpacks to

Kind = TypeVar("Kind", bound="Tensors")


class Tensors:
    """Base of the data sets: frozen dataclasses whose fields may be tensors or tuples of tensors."""

    def to(self: Kind, device: torch.device | str) -> Kind:
        """A copy with all tensors on that device."""
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), dict(vars(self)))
        return replace(self, **moved)  # type: ignore[type-var]


def read(file: Path) -> bytes:
    """The content of a file; for a .gz or a .zip with one file in it, the unpacked content.

    Raises:
        ValueError: a damaged archive, a .zip of no or several files, a gzip file not called .gz, more than LIMIT bytes.
        OSError: the file cannot be opened.
    """
    with file.open("rb") as opened:
        try:
            if file.suffix == ".gz":
                content = gzip.GzipFile(fileobj=opened).read(LIMIT + 1)
            elif file.suffix == ".zip":
                with zipfile.ZipFile(opened) as archive:
                    if len(archive.namelist()) != 1:
                        raise ValueError(f"it has {len(archive.namelist())} files")
                    content = archive.open(archive.namelist()[0]).read(LIMIT + 1)
            else:
                content = opened.read(LIMIT + 1)
        except Exception as error:  # gzip and zipfile raise many kinds of errors for damaged files
            kind = {".gz": "gzip file", ".zip": "zip file with one file in it"}.get(file.suffix, "file")
            raise ValueError(f"data: {file}: expected a whole {kind}; {error}") from error
    if content[:2] == GZIP and file.suffix != ".gz":  # no data set's file begins with these bytes
        raise ValueError(f"data: {file}: a gzip file must have a name that ends in .gz; rename it to {file.name}.gz")
    if len(content) > LIMIT:
        raise ValueError(f"data: {file}: expected at most {LIMIT} bytes, got more")
    return content


def as_bytes(content: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def integers(file: Path, lines: list[bytes], separator: bytes, columns: int, first_line: int) -> Tensor:
    """Lines of whole numbers as int64 (len(lines), columns). first_line: number of the first line, for errors."""
    content = separator.join(lines)
    others = content.translate(None, b"-0123456789" + separator)  # such as blanks, "+" and "_", which int() accepts
    if not others and all(line.count(separator) == columns - 1 for line in lines):
        try:
            cells = list(map(int, content.split(separator))) if lines else []
            return torch.tensor(cells, dtype=torch.int64).view(-1, columns)
        except (ValueError, OverflowError, RuntimeError):
            pass  # the loop below finds the line
    for number, line in enumerate(lines, first_line):
        if not re.fullmatch(rb"-?\d{1,18}(%s-?\d{1,18}){%d}" % (separator, columns - 1), line):
            raise ValueError(
                f"data: {file}, line {number}: expected {columns} whole numbers of at most 18 digits, separated by "
                f"{separator.decode()!r}; got {line[:60]!r}"
            )
    raise ValueError(f"data: {file}: cannot read its {len(lines)} lines as {columns} whole numbers each")


def import_optional(module: str, package: str) -> Any:
    """The module; if it is missing, an ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"data: this set needs {package}: pip install moe_kernels[bench] ({error})") from error


def matlab(file: Path, *names: str) -> dict[str, Any]:
    """name -> array of a .mat file, for those of `names` that the file has; also scipy's entries about the file."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ImportError("data: .mat files need scipy: pip install moe_kernels[assignment]") from error
    try:
        return loadmat(file, variable_names=list(names))
    except Exception as error:  # scipy raises many kinds of errors for damaged files
        raise ValueError(f"data: {file} is no MATLAB file that scipy can read: {error}") from error


def unpickle(content: bytes) -> Any:
    """The content of a pickle: plain containers, numbers, strings, and arrays of bytes, which `tensor` converts.

    Raises:
        pickle.UnpicklingError: the pickle holds anything else.
        Exception: errors of many kinds if `content` is no pickle.
    """
    for count, (opcode, number, _) in enumerate(pickletools.genops(content)):
        # Unpickler allocates memory in proportion to the largest memo index, which a few bytes can set to 2^31.
        if "PUT" in opcode.name and isinstance(number, int) and number > count:
            raise pickle.UnpicklingError(
                f"its memo index is {number} after {count} operations; expected at most {count}"
            )
    return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()


class _Dtype:
    """Replaces numpy.dtype; stores the code, such as "u1"."""

    def __init__(self, code: Any, *flags: Any) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Ignores byte order and fields, which arrays of bytes do not have."""


class _Array:
    """Replaces numpy.ndarray, which would allocate whatever size the pickle names; stores only bytes of the pickle."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, self.fortran, content = state
        if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "|u1") or not isinstance(content, bytes):
            raise pickle.UnpicklingError("it holds an array that is not of bytes")
        self.shape = tuple(int(size) for size in shape)
        if any(size < 0 for size in self.shape) or prod(self.shape) != len(content):
            raise pickle.UnpicklingError(f"it holds an array {self.shape} with {len(content)} bytes")
        self.content = content

    def tensor(self) -> Tensor:
        if self.fortran:
            order = range(len(self.shape) - 1, -1, -1)
            return as_bytes(self.content).view(self.shape[::-1]).permute(*order).contiguous()
        return as_bytes(self.content).view(self.shape)


def tensor(found: Any) -> Tensor:
    """An array of `unpickle` as a tensor; TypeError for anything else."""
    if not isinstance(found, _Array):
        raise TypeError(f"expected an array, got {type(found).__name__}")
    if not hasattr(found, "content"):
        raise TypeError("expected an array with contents, got one without")
    return found.tensor()


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return _Array
        if (module, name) == ("numpy", "dtype"):
            return _Dtype
        if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
            return lambda kind, shape, code: _Array()  # __setstate__ fills it
        if (module, name) == ("_codecs", "encode"):  # in protocol 2, Python 3 writes bytes as this call
            return _latin1
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which a batch of images does not need")


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes bytes in {encoding!r}")
    return text.encode("latin-1")
