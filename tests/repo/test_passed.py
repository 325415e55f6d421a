"""How many files of the package a call passes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from tests.helpers import forked

ROOT = Path(__file__).resolve().parents[2]


def test_a_call_passes_few_files() -> None:
    most: list[dict[str, int]] = [{"kwta": 8, "nn.MoE": 22}, {"nn.MoE": 24}]
    if importlib.util.find_spec("triton") is None:
        del most[1]  # which is for Triton's interpreter
    programs = [
        f"import os; os.environ['TRITON_INTERPRET'] = '{interpret}'\nfrom tests.helpers import passed; passed.main()"
        for interpret in range(len(most))
    ]
    for printed, allowed in zip(forked.outputs("import torch", programs, cwd=ROOT), most, strict=True):
        counts = {name: int(count) for name, count in re.findall(r"^([\w.]+) .*: (\d+) files$", printed, re.MULTILINE)}
        assert counts.keys() == allowed.keys(), printed
        assert all(count <= allowed[name] for name, count in counts.items()), printed
