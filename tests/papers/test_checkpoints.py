"""Files of `papers.train`: whole or absent, also on a full disk; the lock of their folder; damaged checkpoints."""

import copy
import errno
import json
import os
import random
import re
import resource
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

from moe_kernels.__main__ import main
from moe_kernels.papers import train
from moe_kernels.papers.train import checkpoint, contents, lock, plotting
from moe_kernels.papers.train.comparison import Comparison
from tests.helpers.damage import damaged, on_small_disk
from tests.helpers.small_sets import WORDS

FULL = "No space left on device"


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def no_space(*given: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def stop_after(monkeypatch: pytest.MonkeyPatch, saves: int) -> None:
    """Training is interrupted when it has written this number of checkpoints."""
    save, written = Comparison._save, []

    def save_and_stop(comparison: Comparison) -> None:
        save(comparison)
        written.append(comparison)
        if len(written) == saves:
            raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "_save", save_and_stop)


def test_a_checkpoint_is_whole_or_absent(monkeypatch, tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"x": torch.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match=r"disk is full.*checkpoint\.pt'"):
            checkpoint.save(path, {"x": torch.zeros(3)})
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(path, {"x": torch.zeros(3)})
    assert names(tmp_path) == [path.name]
    assert checkpoint.load(path, ("x",))["x"].tolist() == [1, 1, 1]


def test_temporary_names_are_drawn_in_the_folder_of_the_file(monkeypatch, tmp_path):
    drawn, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda part, path: drawn.append(Path(part)) or replace(part, path))
    for content in ("one", "two"):
        checkpoint.write(tmp_path / "log.csv", content)
    assert len(set(drawn)) == 2
    assert all(re.fullmatch(r"log\.csv\.\w{8}\.part", each.name) and each.parent == tmp_path for each in drawn)
    assert (tmp_path / "log.csv").read_text() == "two"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_open(tmp_path, mask):
    before = os.umask(mask)
    try:
        (tmp_path / "opened").write_text("")
        checkpoint.write(tmp_path / "written", "")
        assert os.umask(mask) == mask  # it was read and is as before
    finally:
        os.umask(before)
    opened, written = (stat.S_IMODE((tmp_path / each).stat().st_mode) for each in ("opened", "written"))
    assert written == opened == 0o666 & ~mask


@contextmanager
def full_device(monkeypatch):
    """Temporary files are made as usual, but what is written goes to /dev/full."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    make = checkpoint._temporary

    def temporary(path):
        number, part = make(path)
        os.close(number)
        return os.open("/dev/full", os.O_WRONLY), part

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_temporary", temporary)
        yield


def test_a_full_disk_is_an_oserror(monkeypatch, tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"x": torch.ones(3)})
    for size in (1, 300_000):  # written in flush, and in torch.save
        with full_device(monkeypatch), pytest.raises(OSError, match=f"{FULL}: '{path}'") as raised:
            checkpoint.save(path, {"x": torch.ones(size)})
        assert raised.value.errno == errno.ENOSPC
    assert names(tmp_path) == [path.name]
    assert checkpoint.load(path, ("x",))["x"].tolist() == [1, 1, 1]


def test_a_file_that_cannot_grow_is_an_oserror(tmp_path):
    """torch.save raises RuntimeError if only some of its writes fail. Another RuntimeError remains one."""
    path, kinds = tmp_path / "checkpoint.pt", set()
    states = [{str(number): torch.ones(size) for number in range(count)} for count, size in ((1, 10**5), (5000, 1))]
    checkpoint.save(path, {"x": torch.ones(3)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1_000, 20_000, 300_000):
        for state in states:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            try:
                with pytest.raises(OSError, match=f"File too large: '{path}'") as raised:
                    checkpoint.save(path, state)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            kinds.add(type(raised.value.__cause__))
            assert names(tmp_path) == [path.name]
    assert RuntimeError in kinds
    with pytest.raises(RuntimeError, match="no error of a disk"), checkpoint._atomic(path):
        raise RuntimeError("no error of a disk")
    assert names(tmp_path) == [path.name]
    assert checkpoint.load(path, ("x",))["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("place", ["fsync", "replace", "mkstemp"])
@pytest.mark.parametrize("file", ["checkpoint.pt", "log.csv", "model-comet-0.pt", "model-comet-0.json", "result.json"])
def test_a_run_on_a_full_disk_keeps_the_last_checkpoint(arguments, monkeypatch, capsys, tmp_path, place, file):
    words = ["--check-steps", "0", "--every", "1", "--sides", "comet", "--steps", "3", "--out", str(tmp_path)]
    module = checkpoint.tempfile if place == "mkstemp" else os
    original, temporary, seen = getattr(module, place), checkpoint._temporary, []

    def count(path):
        seen.append(path.name)
        return temporary(path)

    def fail(*given, **named):
        if seen[-1] == file and seen.count("checkpoint.pt") >= 2:
            no_space()
        return original(*given, **named)

    monkeypatch.setattr(checkpoint, "_temporary", count)
    monkeypatch.setattr(module, place, fail)
    assert train.run(arguments(*words)) == 2
    printed = capsys.readouterr().err
    assert printed == f"train: [Errno {errno.ENOSPC}] {FULL}: '{tmp_path / file}'\n"
    assert not [name for name in names(tmp_path) if name.endswith((".part", ".lock"))]
    checkpoint.load(tmp_path / "checkpoint.pt", ("settings", "done", "live"))
    monkeypatch.undo()


@pytest.mark.slow
def test_a_run_on_a_small_disk_ends_and_goes_on_elsewhere(monkeypatch, capsys, tmp_path):
    """The disk has room for one checkpoint and a half."""
    (tmp_path / "words.txt").write_text(WORDS)
    size = "--dim 32 --hidden 64 --depth 2 --heads 2 --length 12 --experts 4 --batch-size 6 --steps 6 --every 2"
    command = ["train", "competesmoe", "--sides", "smoe", "--data", str(tmp_path / "words.txt"), *size.split()]
    command += ["--device", "cpu", "--threads", "1", "--check-steps", "0"]
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert main([*command, "--out", str(tmp_path / "part")]) == 130
    kilobytes = (tmp_path / "part" / "checkpoint.pt").stat().st_size // 1024
    (small := tmp_path / "small").mkdir()
    ended = on_small_disk(small, kilobytes * 3 // 2, [*command, "--out", str(small / "run")])
    if ended is None:
        pytest.skip("this user may not mount a file system")
    kept = tmp_path / "kept" / "run"
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == f"train: [Errno {errno.ENOSPC}] {FULL}: '{small / 'run' / 'checkpoint.pt'}'\n"
    assert names(kept) == ["checkpoint.pt", "log.csv"]
    (live,) = checkpoint.load(kept / "checkpoint.pt", ("live",))["live"].values()
    assert live["step"] == 2
    for folder in (kept, tmp_path / "part"):
        assert main([*command, "--out", str(folder), "--resume"]) == 0
    found, expected = (json.loads((each / "result.json").read_text())["runs"] for each in (kept, tmp_path / "part"))
    for one, other in zip(found[0]["rows"], expected[0]["rows"], strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_a_picture_is_whole_or_absent(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "plot.png"
    assert plotting.write_picture(path, lambda axes: axes[0, 0].plot([1, 2]))
    old = path.read_bytes()
    assert old.startswith(b"\x89PNG")
    with full_device(monkeypatch), pytest.raises(OSError, match=f"{FULL}: '{path}'"):
        plotting.write_picture(path, lambda axes: axes[0, 0].plot([1, 3]))
    assert names(tmp_path) == [path.name]
    assert path.read_bytes() == old


HOLDER = """
import runpy, sys, time, pathlib
with runpy.run_path(sys.argv[1])["hold"](pathlib.Path(sys.argv[2])):
    print(flush=True)
    time.sleep(100)
"""


def test_a_second_run_in_a_folder_is_told_who_holds_it(arguments, capsys, tmp_path):
    words = ["--check-steps", "0", "--steps", "1", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", HOLDER, lock.__file__, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline()
            expected = rf"another run is writing to {tmp_path}/run: process {holder.pid} on \S+, started 20\d\d-.*; "
            for more in ([], ["--resume"]):
                assert train.run(arguments(*words, *more)) == 2
                printed = capsys.readouterr()
                assert printed.out == ""
                assert re.fullmatch(
                    rf"train: {expected}wait for its end or stop it, or give another --out\n", printed.err
                )
                assert names(tmp_path / "run") == ["train.lock"]
        finally:
            holder.send_signal(signal.SIGKILL)
    assert names(tmp_path / "run") == ["train.lock"]  # its file is left, but not its lock
    (tmp_path / "run" / "checkpoint.pt.abcd1234.part").touch()  # as a killed run leaves it
    assert train.run(arguments(*words)) == 0
    assert not [name for name in names(tmp_path / "run") if name.endswith((".lock", ".part"))]


def test_a_lock_is_held_once_and_goes_at_the_end(tmp_path):
    for _ in range(2):
        with lock.hold(tmp_path):
            for _ in range(2):
                with pytest.raises(ValueError, match=f"process {os.getpid()} on"), lock.hold(tmp_path):
                    pass
            assert names(tmp_path) == ["train.lock"]
            (tmp_path / "train.lock").write_text("")
            with pytest.raises(ValueError, match=": a process that has just started; wait"), lock.hold(tmp_path):
                pass
        assert names(tmp_path) == []
    with lock.hold(tmp_path):
        (tmp_path / "train.lock").unlink()  # by hand
        with lock.hold(tmp_path):
            assert names(tmp_path) == ["train.lock"]


def test_a_lock_whose_holder_ends_meanwhile_is_taken_in_a_new_file(monkeypatch, tmp_path):
    """The file that was opened is removed before it is locked."""
    flock, calls = lock.fcntl.flock, []

    def remove_first(file, flags):
        if not calls:
            (tmp_path / "train.lock").unlink()
        calls.append(file)
        flock(file, flags)

    monkeypatch.setattr(lock.fcntl, "flock", remove_first)
    with lock.hold(tmp_path):
        assert len(calls) == 2
        with pytest.raises(ValueError, match="another run"), lock.hold(tmp_path):
            pass


def test_locks_of_bad_file_systems(monkeypatch, capsys, tmp_path):
    files = []

    def fail(number):
        def flock(file, flags):
            files.append(file)
            raise OSError(number, os.strerror(number))

        return flock

    monkeypatch.setattr(lock.fcntl, "flock", fail(errno.EOPNOTSUPP))
    with lock.hold(tmp_path):
        pass
    assert "not supported; start no second run in this folder" in capsys.readouterr().err
    for number in (errno.EIO, errno.ENOSPC):
        monkeypatch.setattr(lock.fcntl, "flock", fail(number))
        with pytest.raises(OSError, match=r"train\.lock") as raised, lock.hold(tmp_path):
            pass
        assert raised.value.errno == number
    assert [file.closed for file in files] == [True] * 3
    monkeypatch.undo()
    monkeypatch.setattr(lock.os, "getpid", lambda: no_space())
    (tmp_path / "train.lock").unlink(missing_ok=True)
    with pytest.raises(OSError, match=f"{FULL}.*train.lock"), lock.hold(tmp_path):
        pass
    assert names(tmp_path) == []


class Exploit:
    def __reduce__(self):
        return os.getpid, ()


def test_damaged_hostile_or_mismatched_checkpoints_are_errors(arguments, capsys, tmp_path):
    words = ["--check-steps", "0", "--epochs", "1", "--out", str(tmp_path)]
    assert train.run(arguments(*words, "--resume")) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    assert train.run(arguments(*words)) == 0
    assert train.run(arguments(*words, "--lr", "0.5", "--resume")) == 2
    assert "belongs to a run with lr 0.01, not 0.5" in capsys.readouterr().err
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    torch.save(
        {"version": checkpoint.VERSION, "settings": Exploit(), "done": {}, "live": {}}, hostile := tmp_path / "h"
    )
    for content in (whole[: len(whole) // 2], b"", b"nonsense", hostile.read_bytes()):
        path.write_bytes(content)
        assert train.run(arguments(*words, "--resume")) == 2
        assert "is no whole checkpoint of tensors and plain containers" in capsys.readouterr().err
    for some in ({}, {"settings": {}, "done": {}}):
        torch.save({"version": checkpoint.VERSION} | some, path)
        assert train.run(arguments(*words, "--resume")) == 2
        assert "is no checkpoint of this program" in capsys.readouterr().err
    path.write_bytes(whole)
    state = torch.load(path, weights_only=True)
    for changed in ({"settings": 3}, {"done": [1]}, {"done": {"standard, seed 0": {"shape": 1}}}, {"live": 5}):
        torch.save(state | changed, path)
        assert train.run(arguments(*words, "--resume")) == 2
        assert f"{path} does not fit, its " in capsys.readouterr().err


LOST = object()
ROW = {"step": 3, "epoch": 1.0, "loss": 1.0, "seconds": 1.0, "test accuracy": 0.5, "valid accuracy": 0.5}
WRONG = [
    ("step", 99, "must be from 0 to 6, got 99"),
    ("step", "one", r"step must be a number below 2\^63, got str"),
    ("step", torch.tensor(3), "step must be a number .* got Tensor"),
    ("model", {}, "loading state_dict"),
    ("model/output.bias", torch.zeros(4), r"output.bias must be float32 \(3,\), got float32 \(4,\)"),
    ("model/output.bias", torch.zeros(3).double(), r"output.bias must be float32 \(3,\), got float64 \(3,\)"),
    ("best/output.bias", [0.0], "output.bias must be a tensor, got list"),
    ("random", {"cpu": torch.zeros(3)}, "RNG state|ByteTensor"),
    ("rows", 3, "rows must be a list of dicts"),
    ("rows/0", {"step": 3}, "a row has no epoch, loss, seconds, test accuracy, valid accuracy"),
    ("rows/0", ROW | {"loss": "low"}, "rows must have numbers by name, got 'loss': str"),
    ("terms", [{}, {}], "terms must have 1 entries as rows has, got 2"),
    ("terms", [], "terms must have 1 entries as rows has, got 0"),
    ("terms", LOST, "terms"),
    ("unit", "heads", "unit must be experts or neurons, got heads"),
    ("optimiser/state", {99: {}}, "state of unknown parameters 99"),
    ("optimiser/state/0", {}, "state of parameter 0 must have momentum_buffer; got"),
    ("optimiser/state/0/momentum_buffer", torch.zeros(1), r"parameter 0, momentum_buffer must be float32 \(\d+, "),
    ("optimiser/param_groups", [], "param_groups must have 1 entries, got 0"),
    ("optimiser/param_groups/0/momentum", 0.5, "param_groups have other momentum"),
    ("optimiser/param_groups/0/lr", 10**400, r"lr must be a number below 2\^63"),
    ("optimiser/param_groups/0/initial_lr", LOST, "param_groups have no initial_lr"),
]


def replace(state: dict, path: str, value: object) -> None:
    """Replaces an entry of nested dicts and lists. path: keys with "/" between them."""
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    for key in keys:
        state = state[key]
    if value is LOST:
        del state[last]
    else:
        state[last] = value


def test_the_state_of_each_parameter_is_checked():
    """Also behind one that never had a gradient, of which an optimiser keeps nothing."""
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 3, 4)]
    optimiser = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for each in weights[1:]:
        each.grad = torch.ones_like(each)
    optimiser.step()
    state = optimiser.state_dict()
    assert set(state["state"]) == {1, 2}
    contents.check_optimiser(optimiser, state)
    for number in (1, 2):
        with pytest.raises(
            ValueError, match=rf"state of parameter {number}, momentum_buffer must be float32 \({number + 2},"
        ):
            contents.check_optimiser(
                optimiser, state | {"state": state["state"] | {number: {"momentum_buffer": torch.zeros(5)}}}
            )
    (group,) = state["param_groups"]
    changed = group | {"momentum": 0.5, "dampening": 1, "maximize": True, "nesterov": True, "weight_decay": 1}
    message = "^param_groups have other dampening, maximize, momentum, nesterov, weight_decay$"
    with pytest.raises(ValueError, match=message):
        contents.check_optimiser(optimiser, state | {"param_groups": [changed]})


def test_a_mismatched_unfinished_run_is_an_error(arguments, capsys, tmp_path, monkeypatch):
    words = ["--check-steps", "0", "--epochs", "2", "--choose", "best", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert train.run(arguments(*words)) == 130
    path = tmp_path / "checkpoint.pt"
    whole, key = torch.load(path, weights_only=True), "standard, seed 0"
    for place, value, message in WRONG:
        state = copy.deepcopy(whole)
        replace(state["live"][key], place, value)
        torch.save(state, path)
        assert train.run(arguments(*words, "--resume")) == 2, place
        assert re.search(f"{path} does not fit, {key}: .*({message})", capsys.readouterr().err), place


WRONG_FINISHED = [
    ("side", "moe", "has side moe, seed 0"),
    ("stage", "over", "stage over"),
    ("seed", 5, "has side standard, seed 5"),
    ("lr", "high", "lr must be a number .* got str"),
    ("rows", [], "terms must have 0 entries"),
    ("rows", [[]], "rows must be a list of dicts"),
    ("rows", [{"step": 3}], "a row has no epoch, loss, seconds, test accuracy"),
    ("chosen", 4, "has no row 4"),
    ("parameters", 1.5, "parameters must be int, got float"),
    ("shape", 1, "shape"),
]


def test_a_mismatched_finished_run_is_an_error(arguments, capsys, tmp_path):
    words = ["--check-steps", "0", "--epochs", "1", "--out", str(tmp_path)]
    assert train.run(arguments(*words)) == 0
    path = tmp_path / "checkpoint.pt"
    whole, key = torch.load(path, weights_only=True), "standard, seed 0"
    for place, value, message in WRONG_FINISHED:
        state = copy.deepcopy(whole)
        replace(state["done"][key], place, value)
        torch.save(state, path)
        assert train.run(arguments(*words, "--resume")) == 2, place
        assert re.search(f"{path} does not fit, its runs: .*({message})", capsys.readouterr().err), place


def test_the_check_of_the_result_folder_changes_no_file(tmp_path):
    (tmp_path / "run.json").write_text("old")
    checkpoint.try_place(tmp_path / "run.json")
    checkpoint.try_place(tmp_path / "new" / "run.json")
    assert [(file.name, file.is_dir()) for file in sorted(tmp_path.iterdir())] == [("new", True), ("run.json", False)]
    assert (tmp_path / "run.json").read_text() == "old"


def assert_same(found: object, expected: object) -> None:
    leaves, shape = tree_flatten(found)
    others, other_shape = tree_flatten(expected)
    assert shape == other_shape
    for one, other in zip(leaves, others, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other or (one != one and other != other)  # both may be NaN


def test_damaged_checkpoints_are_valueerrors_that_name_the_file(arguments, monkeypatch, tmp_path):
    """Never another error, nor other numbers than those that were saved."""
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert train.run(arguments("--check-steps", "0", "--out", str(tmp_path))) == 130
    whole, path = (tmp_path / "checkpoint.pt").read_bytes(), tmp_path / "damaged.pt"
    expected, draw, loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True), random.Random(0), 0
    for number in range(600):
        path.write_bytes(damaged(whole, draw))
        try:
            found = checkpoint.load(path, ("settings", "done", "live"))
        except ValueError as error:
            assert str(path) in str(error), number  # noqa: PT017
        else:
            loaded += 1
            assert_same(found, expected)
    assert loaded < 150


@pytest.mark.parametrize("content", [[1], torch.ones(2), None, {}, {"x": 1}], ids=lambda each: type(each).__name__)
def test_a_checkpoint_is_a_dict(tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    if isinstance(content, dict):
        assert checkpoint.read(path).keys() == content.keys()
        return
    message = f"{path} is no whole checkpoint of tensors and plain containers: expected a dict, got"
    with pytest.raises(ValueError, match=f"^{message} {type(content).__name__}$"):
        checkpoint.read(path)


def test_a_model_of_a_missing_package_says_so(monkeypatch, tmp_path):
    """Not that its files are damaged."""
    description = {"recipe": "moebert", "options": {"bert": str(tmp_path)}, "seed": 0, "steps": 1, "step": 1}
    description |= {"data": {"kind": "Text", "name": "words", "vocabulary": [97]}}
    checkpoint.save_tensors(tmp_path / "model-hash-0.pt", {})
    (tmp_path / "model-hash-0.json").write_text(json.dumps(description))
    monkeypatch.delitem(sys.modules, "moe_kernels.integrations.bert", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r"^moe_kernels\.integrations\.bert needs transformers 5: pip install 'transformers>=5\.8\.1'; importing"
    with pytest.raises(ImportError, match=message):
        train.load_model(tmp_path / "model-hash-0.pt")
