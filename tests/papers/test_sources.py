"""Hashes of the code of recipes' and studies' results."""

from __future__ import annotations

import csv
import shutil

import pytest

from moe_kernels.papers import recipes, sources, studies, train


@pytest.fixture
def copied(tmp_path):
    """A folder with a copy of moe_kernels/papers; `digest(kind, name, copied)` hashes it."""
    shutil.copytree(sources.ROOT / "moe_kernels/papers", tmp_path / "moe_kernels/papers")
    return tmp_path


def edit(root, module, old, new):
    path = root / "moe_kernels/papers" / module
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("module", "old", "new", "stale"),
    [
        ("recipes/movielens.py", "eps=1e-7", "eps=1e-6", ["movielens"]),
        ("models/mmoe.py", "weight, -0.05", "weight, -0.06", ["movielens"]),
        ("models/transformer.py", "import torch", "import math\nimport torch", ["competesmoe", "vmoe"]),
        ("train/loop.py", "zero_grad()", "zero_grad(False)", ["competesmoe", "movielens", "vmoe"]),
        ("train/comparison.py", "n // 10", "n // 9", ["competesmoe", "movielens", "vmoe"]),
        ("recipes/__init__.py", '"learning rate"', '"rate"', ["competesmoe", "movielens", "vmoe"]),
        ("recipes/movielens.py", "# hash: both", "# both", []),
        ("recipes/vmoe.py", "are small, for", "were small, for", []),
        ("train/report.py", "import csv", "import csv\nimport json", []),
        ("studies/search.py", "import math", "import json\nimport math", []),
    ],
)
def test_a_change_of_code_makes_those_results_stale_that_it_can_change(copied, module, old, new, stale):
    names = ("competesmoe", "movielens", "vmoe")
    before = {name: sources.digest("recipes", name, copied) for name in names}
    assert before == {name: sources.digest("recipes", name) for name in names}
    edit(copied, module, old, new)
    assert [name for name in names if sources.digest("recipes", name, copied) != before[name]] == stale


def test_a_study_has_the_hash_of_its_module_and_of_what_it_imports(copied):
    before = sources.digest("studies", "permutation", copied)
    edit(copied, "studies/search.py", "import math", "import json\nimport math")
    assert sources.digest("studies", "permutation", copied) == before
    edit(copied, "recipes/movielens.py", "eps=1e-7", "eps=1e-6")
    assert sources.digest("studies", "permutation", copied) != before


def test_every_recipe_and_study_has_a_hash_of_its_own():
    found = [sources.digest("recipes", name) for name in recipes.names()]
    found += [sources.digest("studies", name) for name in studies.names()]
    assert len(set(found)) == len(found)
    assert {len(each) for each in found} == {12}


def test_the_log_says_of_which_code_it_is(arguments, tmp_path, monkeypatch, capsys):
    small = ("--check-steps", "0", "--epochs", "1", "--out", str(tmp_path))
    assert train.run(arguments(*small)) == 0
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["sources"] for row in rows} == {sources.digest("recipes", "comet")}
    monkeypatch.setattr(sources, "digest", lambda kind, name: "0123456789ab")
    assert train.run(arguments(*small, "--resume")) == 2
    assert "belongs to a run with sources" in capsys.readouterr().err
