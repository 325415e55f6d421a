"""A small text, and the parsed command line of a small training run."""

from __future__ import annotations

import argparse

import pytest

from moe_kernels.papers import data, train
from moe_kernels.papers.data.text import load as load_text
from tests.helpers.small_sets import WORDS, blobs


@pytest.fixture(name="text")
def small_text(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(WORDS)
    return load_text(path)


@pytest.fixture(name="arguments")
def small_arguments(monkeypatch):
    """arguments(*words): the parsed command line of a small run of recipe comet on the CPU, with data set "blobs"."""
    monkeypatch.setattr(train, "load", lambda name: blobs() if name == "blobs" else data.load(name))
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)

    def parse(*words: str) -> argparse.Namespace:
        small = ["--data", "blobs", "--width", "24", "--device", "cpu", "--batch-size", "16", "--epochs", "3"]
        return parser.parse_args([*small, "--check-steps", "6", "--threads", "1", *words])

    return parse
