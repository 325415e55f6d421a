"""What a release states about itself: version, date, licence, and the commands that its checks run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import moe_kernels as mk

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_version_and_its_date_are_the_same_everywhere() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == mk.__version__
    first, second = re.findall(r"^## (.*)$", read("CHANGELOG.md"), re.MULTILINE)[:2]
    assert first == "Unreleased"
    assert second == f"{mk.__version__}, {citation['date-released']}"


def test_the_licence_is_the_same_everywhere() -> None:
    assert re.search(r'^license = "Apache-2.0"$', read("pyproject.toml"), re.MULTILINE)
    assert yaml.safe_load(read("CITATION.cff"))["license"] == "Apache-2.0"
    text = read("LICENSE")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_workflow_runs_targets_of_make_that_exist() -> None:
    (job,) = yaml.safe_load(read(".github/workflows/checks.yml"))["jobs"].values()
    assert job["steps"][-1]["run"] == 'make "$TARGET" PYTHON=python'
    targets = job["strategy"]["matrix"]["target"]
    assert targets == ["lint", "quick", "test"]
    known = subprocess.run(["make", "-n", *targets, "VENV=0"], cwd=ROOT, capture_output=True, text=True)
    assert known.returncode == 0, known.stderr


@pytest.mark.parametrize("name", ["ruff"])
def test_a_hook_has_the_version_that_make_lint_uses(name: str) -> None:
    (hooks,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert f"{name}=={hooks['rev'].removeprefix('v')}\n" in read("requirements-dev.txt")


def test_an_issue_asks_for_the_machine() -> None:
    form = yaml.safe_load(read(".github/ISSUE_TEMPLATE/problem.yml"))
    required = {each["id"] for each in form["body"] if each.get("validations", {}).get("required")}
    assert "info" in required
    assert "python -m moe_kernels info" in form["body"][0]["attributes"]["label"]
