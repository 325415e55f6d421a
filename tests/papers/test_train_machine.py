"""What a training asks of the machine: threads, memory, the lock of its folder, pictures."""

import re
import resource
import sys

import pytest
import torch

from moe_kernels.papers import train
from moe_kernels.papers.train import lock, plotting
from tests.helpers.small_sets import blobs


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        (("--data", "digits"), 1),
        (("--data", "blobs"), 2),
        (("--data", "digits", "--threads", "2"), 2),
        (("--data", "blobs", "--threads", "1"), 1),
    ],
)
def test_digits_train_on_one_thread_and_other_data_on_all(arguments, monkeypatch, capsys, words, threads):
    monkeypatch.setattr(train, "load", lambda name: blobs())
    args, before = arguments("--epochs", "0", "--check-steps", "0", *words), torch.get_num_threads()
    args.threads = args.threads if "--threads" in words else None
    try:
        torch.set_num_threads(2)
        assert train.run(args) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert f"cpu, {threads} thread(s)" in capsys.readouterr().out


def test_the_peak_memory_is_that_of_the_process():
    least = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = re.fullmatch(r"\npeak memory: (\d+) MiB of the process", train._peak_memory(torch.device("cpu")))
    assert least - 1 <= int(found[1]) <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 + 1


def test_the_locked_folder_is_made_with_those_above_it(tmp_path):
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        with lock.hold(folder):
            assert [each.name for each in folder.iterdir()] == ["train.lock"]
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_name_of_a_picture_says_its_format(tmp_path, name, start):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    shapes = []
    assert plotting.write_picture(tmp_path / name, lambda axes: shapes.append(axes.shape), 2, 3, figsize=(2, 1))
    assert (tmp_path / name).read_bytes().startswith(start)
    assert shapes == [(2, 3)]


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(plotting.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plotting.write_picture(tmp_path / "a.png", lambda axes: pytest.fail("draws")) is False
    assert list(tmp_path.iterdir()) == []
