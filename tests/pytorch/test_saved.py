"""An exported program that was saved before the operators moved to moe_kernels/ops still loads and runs."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.saved.program import SAVED, Program, inputs


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.13 wrote the file; older ones cannot read its schema")
def test_a_program_saved_before_the_move_gives_the_same_bits() -> None:
    program = torch.export.load(SAVED)
    names = {str(node.target).split(".")[1] for node in program.graph.nodes if "moe_kernels" in str(node.target)}
    assert len(names) == 9, names
    for found, expected in zip(program.module()(*inputs()), Program()(*inputs()), strict=True):
        assert torch.equal(found, expected)
