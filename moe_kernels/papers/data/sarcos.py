"""SARCOS, the inverse dynamics of a robot's arm: the regression of COMET fixed routing (appendix A.5)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels.papers.data.files import Tensors, matlab

NAMES = {"train": ("sarcos_inv.mat", "sarcos_inv"), "test": ("sarcos_inv_test.mat", "sarcos_inv_test")}
INPUTS, OUTPUTS = 21, 7


@dataclass(frozen=True)
class Table(Tensors):
    """A regression: train and test are (x, y), float32 (n, inputs) and (n, outputs).

    Columns are scaled so that those of the training set have mean 0 and variance 1 (a constant column: variance 0).
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def __str__(self) -> str:
        (x, y), (test, _) = self.train, self.test
        return f"{self.name}: {len(x)} training and {len(test)} test rows of {x.shape[1]} inputs, {y.shape[1]} outputs"


def find(file: Path) -> tuple[str, Path] | None:
    """("SARCOS", folder), or None if the file is not of this set."""
    return ("SARCOS", file.parent) if file.name in (name for name, _ in NAMES.values()) else None


def load(place: Path) -> Table:
    """sarcos_inv.mat (44,484 rows) and sarcos_inv_test.mat (4,449) in `place`.

    Columns: 7 positions, 7 velocities and 7 accelerations are the inputs, 7 torques the outputs.
    """
    train, test = (_read(place / name, key) for name, key in NAMES.values())
    mean, spread = train.mean(0), train.std(0, unbiased=False)
    parts = []
    for rows in (train, test):
        scaled = ((rows - mean) / torch.where(spread == 0, 1, spread)).float()
        parts.append((scaled[:, :INPUTS].contiguous(), scaled[:, INPUTS:].contiguous()))
    return Table("sarcos", parts[0], parts[1])


def _read(file: Path, key: str) -> Tensor:
    if not file.exists():
        raise ValueError(f"data: expected SARCOS as sarcos_inv.mat and sarcos_inv_test.mat; there is no {file}")
    rows = matlab(file, key).get(key)
    if rows is None or rows.ndim != 2 or rows.shape[1] != INPUTS + OUTPUTS or not len(rows) or rows.dtype.kind != "f":
        shape = "nothing" if rows is None else f"{rows.dtype} {rows.shape}"
        raise ValueError(
            f"data: {file}: expected {key} to be floating point (n, {INPUTS + OUTPUTS}), n > 0; got {shape}"
        )
    found = torch.from_numpy(rows.astype("float64"))
    if not found.isfinite().all():
        raise ValueError(f"data: {file}: expected finite numbers in {key}; got {found[~found.isfinite()][0].item()}")
    return found
