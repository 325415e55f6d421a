"""The bench of transformers' experts."""

from __future__ import annotations

import csv
import itertools

import pytest
import torch
from typer.testing import CliRunner

from bench import __main__ as command
from bench import timing
from bench import transformers as models

SMALL = {"T": 12, "D": 16, "H": 8, "E": 4, "K": 2}
MODES = ["prefill", "training", *["decode"] * len(models.DECODED)]


@pytest.fixture
def small(monkeypatch):
    """One small shape."""
    monkeypatch.setattr(models, "SHAPES", {"small": (torch.float32, SMALL)})


@pytest.fixture
def broken(monkeypatch):
    """A function that makes an implementation raise at its calls from the nth on, if they have 4 or more tokens."""
    from transformers.integrations import moe

    from moe_kernels.integrations import transformers as mk_transformers

    mk_transformers.register(models.OURS)

    def apply(name: str, first: int = 1) -> None:
        works, count = moe.ALL_EXPERTS_FUNCTIONS[name], itertools.count(1)

        def raises(module, x, *rest):
            if len(x) >= 4 and next(count) >= first:
                raise RuntimeError(f"CUDA out of memory in {name}\nsecond line")
            return works(module, x, *rest)

        monkeypatch.setitem(moe.ExpertsInterface._global_mapping, name, raises)
        monkeypatch.setattr(mk_transformers, "register", lambda name: None)

    return apply


def bench(out) -> tuple[int, list[dict[str, str]]]:
    """Exit status of the command, and the lines of its file."""
    done = CliRunner().invoke(command.app, ["transformers", "--seconds", "0.02", "--out", str(out)])
    (path,) = out.iterdir()
    return done.exit_code, read(path)


def read(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, strict=True))


@pytest.mark.parametrize("mode", ["prefill", "training"])
def test_ours_and_the_peers_compute_the_same(mode):
    calls, left_out = models._calls(SMALL, torch.float32, "cpu", mode)
    assert set(calls) == {models.OURS, *models.PEERS}
    assert left_out == {}
    expected = calls[models.OURS]()
    assert expected.requires_grad == (mode == "training")
    for name, call in calls.items():
        torch.testing.assert_close(call(), expected, msg=name)


def test_a_figure_for_every_shape_and_mode(small, tmp_path):
    status, lines = bench(tmp_path)
    assert status == 0
    assert [line["mode"] for line in lines] == MODES
    assert [line["shape"].split()[0] for line in lines[2:]] == [f"T={tokens}" for tokens in models.DECODED]
    for line in lines:
        assert all(float(line[name]) > 0 for name in ("us", *models.RATIOS))
        assert line["not measured"] == ""
        assert line["torch"] == torch.__version__


def test_a_figure_has_microseconds_and_ratios(small, monkeypatch):
    seconds = {models.OURS: 2e-3, "eager": 6e-3, "batched_mm": 1e-3, "grouped_mm": 3e-3}
    samples = {name: timing.Sample(each, 0.0, 1.0, 9) for name, each in seconds.items()}
    monkeypatch.setattr(timing, "time_cpu", lambda calls, budget: {name: samples[name] for name in calls})
    figure = next(models.run(0.1, "cpu"))
    assert figure["us"] == pytest.approx(2000)
    assert figure["peers"] == pytest.approx({"eager": 3, "batched_mm": 0.5, "grouped_mm": 1.5})
    assert models.cells(figure)[4:] == ("2000.0", "3", "0.5", "1.5")


@pytest.mark.parametrize("mode", ["prefill", "training"])
def test_a_token_has_weights_of_sum_one_for_its_experts(mode, monkeypatch):
    """In training every leaf gets a gradient anew."""
    from transformers.integrations import moe

    seen = []

    def recorded(module, x, experts, weights):
        seen.append((x, experts, weights, [each.grad for each in (x, weights, *module.parameters())]))
        return x * weights.sum() + sum(each.sum() for each in module.parameters())

    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "eager_of_test", recorded)
    monkeypatch.setattr(models, "PEERS", ("eager_of_test",))
    calls, _ = models._calls(SMALL, torch.float64, "cpu", mode)
    for _ in range(2):
        calls["eager_of_test"]()
    x, experts, weights, grads = seen[-1]
    assert (x.shape, experts.shape, weights.shape) == ((12, 16), (12, 2), (12, 2))
    torch.testing.assert_close(weights.sum(-1), torch.ones(12, dtype=torch.float64), rtol=1e-6, atol=0)
    assert (weights[:, 0] >= weights[:, 1]).all()
    assert (weights > 0).all()
    assert (experts[:, 0] != experts[:, 1]).all()
    assert all(each is None for each in grads)
    assert all((each.grad is not None) == (mode == "training") for each in (x, weights))


def test_shapes_of_large_models_are_for_gpus():
    on_cpu, on_gpu = (list(models.jobs(device)) for device in ("cpu", "cuda"))
    assert {name for name, *_ in on_cpu} == set(models.SHAPES)
    assert {name for name, *_ in on_gpu} == {*models.SHAPES, *models.GPU_SHAPES}
    assert [mode for name, mode, *_ in on_gpu if name in models.GPU_SHAPES] == MODES * len(models.GPU_SHAPES)


def test_a_peer_that_would_copy_too_many_weights_is_left_out(monkeypatch):
    monkeypatch.setattr(models, "MAX_COPIED_BYTES", 1)
    calls, left_out = models._calls(SMALL, torch.float32, "cpu", "prefill")
    assert "batched_mm" not in calls
    assert left_out == {"batched_mm": "would copy 3.69e-05 GB of weights, limit 1e-09 GB"}


@pytest.mark.parametrize("first", [1, 3], ids=["at once", "later"])
def test_a_peer_that_raises_is_left_out_with_its_reason(first, small, broken, tmp_path):
    broken("grouped_mm", first)
    status, lines = bench(tmp_path)
    assert status == 0
    assert lines[0]["x as fast as grouped_mm"] == "-"
    assert lines[0]["not measured"] == "no grouped_mm: RuntimeError: CUDA out of memory in grouped_mm"
    assert all(float(lines[0][f"x as fast as {peer}"]) > 0 for peer in ("eager", "batched_mm"))
    assert float(lines[2]["x as fast as grouped_mm"]) > 0  # one token


def test_a_shape_on_which_our_kernels_raise_is_a_line_and_the_status_is_1(small, broken, tmp_path):
    broken(models.OURS)
    status, lines = bench(tmp_path)
    assert status == 1
    assert [line["mode"] for line in lines] == MODES
    assert lines[0]["us"] == "failed"
    assert lines[0]["not measured"] == "no moe_kernels: RuntimeError: CUDA out of memory in moe_kernels"
    assert float(lines[2]["us"]) > 0  # one token


def test_inputs_that_do_not_fit_are_a_line_and_the_status_is_1(small, monkeypatch, tmp_path):
    monkeypatch.setitem(models.SHAPES, "huge", (torch.float32, {**SMALL, "D": 2**40}))
    monkeypatch.setattr(models, "SHAPES", dict(reversed(models.SHAPES.items())))
    status, lines = bench(tmp_path)
    assert status == 1
    assert [line["us"] == "failed" for line in lines] == [True] * len(MODES) + [False] * len(MODES)
    assert lines[0]["not measured"].startswith("no moe_kernels: RuntimeError: ")


def test_on_a_gpu_a_kernel_that_fails_while_the_host_runs_ahead_is_its_peers(monkeypatch):
    launched = []

    def synchronize():
        if launched[-1] == "eager":
            raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(timing, "time_gpu", lambda calls, per_launch, budget: dict.fromkeys(calls, per_launch))
    calls = {name: (lambda name=name: launched.append(name)) for name in ("eager", "grouped_mm", models.OURS)}
    left_out: dict[str, str] = {}
    assert models._samples(calls, 0.1, "cuda", left_out) == {"grouped_mm": 1, models.OURS: 1}
    assert left_out == {"eager": "RuntimeError: CUDA error: misaligned address"}


def test_a_run_that_is_cut_off_leaves_the_lines_that_it_measured(small, monkeypatch, tmp_path):
    figures, seen = models.run, []

    def cut_off(*given):
        for figure in itertools.islice(figures(*given), 3):
            yield figure
            (path,) = tmp_path.iterdir()
            seen.append(len(read(path)))  # before the next figure is measured
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "run", cut_off)
    status, lines = bench(tmp_path)
    assert status not in (0, 1)
    assert seen == [1, 2, 3]
    assert [line["mode"] for line in lines] == MODES[:3]
    assert all(float(line["us"]) > 0 for line in lines)


def test_files_of_the_same_minute_have_different_names(tmp_path):
    paths = [models.new_file(tmp_path) for _ in range(3)]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    figure = {"name": "a, b", "mode": "decode", "shape": "T=1", "dtype": "float32", "us": 1.0, "peers": {}}
    models.append(paths[1], {**figure, "left_out": {"eager": 'KeyError: "x", y'}}, ("CPU", "5", "2"))
    assert [len(read(path)) for path in paths] == [0, 1, 0]
    (line,) = read(paths[1])
    assert (line["experts"], line["not measured"]) == ("a, b", 'no eager: KeyError: "x", y')
    assert paths[0].read_text() == ",".join(models.HEADER) + "\n"


def test_two_runs_in_one_folder_leave_two_files(small, tmp_path):
    _, first = bench(tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    assert CliRunner().invoke(command.app, ["transformers", "--seconds", "0.02", "--out", str(tmp_path)]).exit_code == 0
    assert path.read_bytes() == content
    (other,) = set(tmp_path.iterdir()) - {path}
    assert len(read(other)) == len(first) == len(MODES)


def test_a_version_that_is_too_old_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "missing", lambda: "needs transformers 5.8.1 or later, found 5.5.4")
    done = CliRunner().invoke(command.app, ["transformers", "--out", str(tmp_path / "out")])
    assert (done.exit_code, done.output) == (2, "needs transformers 5.8.1 or later, found 5.5.4\n")
    assert not (tmp_path / "out").exists()
