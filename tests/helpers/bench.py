"""A command line of the bench, a shape, a row of verify and the name of a peer, for tests of the bench."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

import bench.__main__ as command
from bench import registry
from moe_kernels.verify import Row

ENTRY = registry.ENTRIES["kwta"]
SHAPE: registry.Shape = {"R": 4, "N": 100, "p": 0.5}


ROW = Row("kwta", "cpu", "float32", "cpu", 1, 0.0, 0.0, "ok", "")


PEER = "torch topk+scatter+mul"


def run(*arguments: object) -> Result:
    """`python -m bench ARGUMENTS`."""
    return CliRunner().invoke(command.app, list(map(str, arguments)))
