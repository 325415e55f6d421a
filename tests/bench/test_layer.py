"""`python -m bench layer`: the layer that it measures, its FLOPs and predictions, its table and files."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from bench import __main__ as command
from bench import layer, layer_command, measure, predict
from bench.console import console
from bench.layer_models import MODELS, Sizes, of_model
from bench.layer_peers import LAYERS
from moe_kernels import backends

SMALL = Sizes(tokens=24, dim=16, hidden=32, experts=4, k=2)


def setting(**changes) -> layer.Setting:
    sizes = replace(SMALL, **{name: value for name, value in changes.items() if hasattr(SMALL, name)})
    rest = {name: value for name, value in changes.items() if not hasattr(SMALL, name)}
    return layer.Setting(sizes, torch.float32, "cpu", "cpu", **rest)


@pytest.mark.parametrize("router", ["topk_softmax", "sigmoid"])
def test_every_step_is_measured_on_the_named_backend(router, monkeypatch):
    """An operator takes its backend's name; a step that left it out would take the first one, "cpu"."""
    each = replace(setting(router=router, groups=(2, 1)), backend="reference")
    original = backends.load
    asked = []
    monkeypatch.setattr(backends, "load", lambda name, op: asked.append(name) or original(name, op))
    for job in layer.jobs(each):
        asked.clear()
        job.entry.kernel("reference")[job.direction](job.entry.inputs(job.shape, job.dtype, "cpu"))
        assert "cpu" not in asked, job


@pytest.mark.parametrize("peer", LAYERS)
@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu"},
        {"activation": "swiglu", "bias": False, "router": "softmax_topk"},
        {"activation": "swiglu_clamped", "routing": "zipf"},
        {"factor": 1.0, "routing": "adversarial"},
        {"router": "sigmoid", "groups": (2, 1)},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_the_layer_is_the_eager_one(peer, changes):
    each = setting(**changes)
    module, x = layer.module(each), torch.randn(24, 16)
    expected = LAYERS[peer](module, x, each.capacity)
    torch.testing.assert_close(module(x), expected)
    if each.factor is not None:
        assert not torch.allclose(expected, LAYERS[peer](module, x, None))  # something was dropped


@pytest.mark.parametrize(("router", "factor"), [("topk_softmax", 1.25), ("sigmoid", 1.25), ("topk_softmax", 0.5)])
@pytest.mark.parametrize("step", layer.steps(setting()))
def test_peers_of_a_step_compute_the_step(step, router, factor):
    each = setting(factor=factor, routing="zipf", activation="swiglu", router=router)
    entry = layer.steps(each)[step]
    inputs = entry.inputs(each.shape, each.dtype, "cpu")
    for direction in entry.directions:
        expected = entry.kernel("cpu")[direction](inputs)
        for name, peer in entry.peers.items():
            found = peer[direction](inputs)
            pairs = zip(found, expected, strict=True) if direction == "training" else [(found, expected)]
            for got, right in pairs:
                torch.testing.assert_close(got, right, msg=name)


def test_flops_are_those_of_torchs_counter():
    each = setting()
    for step, entry in layer.steps(each).items():
        for direction in entry.directions:
            with FlopCounterMode(display=False) as counter:
                entry.kernel("cpu")[direction](entry.inputs(each.shape, each.dtype, "cpu"))
            assert layer.flops(each, step, direction) == counter.get_total_flops()
    rows = 24 * 2
    assert layer.flops(each, "up", "forward") == 2 * rows * 16 * 32
    assert layer.flops(each, "layer", "forward") == 2 * 24 * 16 * 4 + 2 * 2 * rows * 16 * 32 + 2 * rows * 16


@pytest.mark.parametrize("gpu", predict.GPUS.values(), ids=lambda gpu: gpu.name)
def test_no_prediction_is_below_what_physics_allows(gpu):
    each = replace(setting(), sizes=replace(MODELS["Qwen3-30B"], tokens=4096), dtype=torch.bfloat16)
    for row in layer.run(each, {}, 0.0, [gpu]):
        us, bound = row.predicted[gpu.name]
        if row.flops > row.least_bytes:
            assert us >= (1 - 1e-9) * 1e6 * row.flops / gpu.peak("bfloat16")
        assert bound in predict.BOUNDS
        if row.step not in ("expert_mlp", "layer"):
            assert us >= (1 - 1e-9) * 1e6 * row.least_bytes / (gpu.gb_per_s * 1e9)


def run(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(command.app, ["layer", *options])
    return done.exit_code, done.output


def test_the_command_prints_tables_of_100_columns_and_writes_what_it_measured(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(console, "width", 100)
    sizes = ("--tokens", "24", "--dim", "16", "--hidden", "32", "--experts", "4", "--k", "2", "--threads", "1")
    status, output = run(*sizes, "--seconds", "0.01", "--routing", "zipf", "--capacity", "1.5", "--out", str(tmp_path))
    assert status == 0, output
    head, _, tables = output.partition("\nforward  ")
    busy = ("Other programs", "!:")
    lines = [line for line in (head.splitlines()[1], *tables.splitlines()) if not line.startswith(busy)]
    shown = re.sub("─+", "─", "\n".join(lines)).replace("!", "").replace(str(tmp_path), "FOLDER")
    stored("bench_layer_measured", shown, tolerance=math.inf)
    assert max(map(len, tables.partition("figures ")[0].splitlines())) <= 100
    for words in ("x eager", "% ceil", "A100*", "H100*", "predicted, not measured", "make_plan", "training"):
        assert words in tables
    saved = json.loads((tmp_path / "layer.json").read_text())
    assert (saved["sizes"]["tokens"], saved["routing"]) == (24, "zipf")
    assert {row["step"] for row in saved["rows"]} == set(layer.steps(setting()))
    assert all(row["figure"]["us"] > 0 and row["predicted"]["A100"][0] > 0 for row in saved["rows"])
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def test_a_backend_that_only_an_interpreter_runs_is_refused(monkeypatch):
    place = layer_command.placement("expert_mlp", "cpu", torch.float32)
    assert place.device == "cpu"
    monkeypatch.setattr(layer_command, "placement", lambda *given: place)
    status, output = run("--backend", "triton", "--predict-only")
    assert status == 2
    assert "--backend triton cannot run here" in " ".join(output.replace("│", " ").split())


def test_what_does_not_fit_is_only_predicted(monkeypatch):
    monkeypatch.setattr(layer.Setting, "fits", lambda self: False)
    status, output = run("--model", "DeepSeek-V3")
    assert status == 0
    assert "Only predicted" in output
    assert "x eager" not in output


def test_nothing_is_measured_if_only_predictions_are_wanted(monkeypatch, stored):
    monkeypatch.setattr(layer.measure, "run", None)
    monkeypatch.setattr(layer.measure, "ceilings", None)
    monkeypatch.setattr(console, "width", 100)
    status, output = run("--predict-only")
    assert status == 0
    stored("bench_layer_predicted", output, tolerance=math.inf)  # the numbers change with the kernels
    assert "x eager" not in output
    assert "A100*" in output


def test_the_widest_cells_fit_into_the_table(capsys):
    peers = {"torch loop over the experts": 1234.5, "torch bmm": 0.0123}
    figure = {"us": 48410199, "gb_per_s": 0.0123, "ceiling_percent": 912.0, "gflop_per_s": 0.0123, "peak_mib": 12345.6}
    figure |= {"low_us": 1.0, "high_us": 48410199.0}
    predicted = dict.fromkeys(predict.REPORTED, (186599.0, "tensor"))
    row = layer.Row("expert_mlp", "training", 1.7e13, 1, figure | {"peers": peers}, predicted)
    layer_command._print(setting(), [row], [predict.GPUS[name] for name in predict.REPORTED], {"cpu": {}})
    printed = capsys.readouterr().out
    assert "…" not in printed
    for cell in ("48410199!", "0.0123", "912", "12346", "1234", "186599"):
        assert cell in printed
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize(
    ("dtype", "speed", "work", "left_out"),
    [
        (torch.bfloat16, 0.5, 1.1e9, True),
        (torch.bfloat16, 0.5, 0.9e9, False),  # under two seconds
        (torch.bfloat16, 200.0, 1e12, False),  # slow because there is much to do
        (torch.float16, None, 1.1e9, True),  # torch's product was not measured
    ],
)
def test_pytorch_is_left_out_where_its_product_is_hopeless(dtype, speed, work, left_out, monkeypatch, capsys):
    chosen = replace(setting(), dtype=dtype, threads=2)
    limits = {"2 threads": {"copy": 9.0} | ({} if speed is None else {"bfloat16": speed})}
    asked = []
    monkeypatch.setattr(layer, "flops", lambda *args: work)
    monkeypatch.setattr(measure, "run", lambda jobs, limits, seconds, peers: asked.append(peers) or [measure.Found()])
    rows = list(layer.run(chosen, limits, 0.1, []))
    assert set(asked) == {() if left_out else ("torch",)}
    layer_command._legend(chosen, limits, rows)
    assert ("PyTorch was left out" in capsys.readouterr().out) == left_out


@pytest.mark.parametrize(("device", "speed"), [("cpu", 0.5), ("cuda", 0.0)])
def test_pytorch_is_left_out_on_cpus_alone(device, speed):
    limits = {name: {"copy": 9.0, "bfloat16": 0.5} for name in ("1 thread", "cuda")}
    chosen = replace(setting(), dtype=torch.bfloat16, device=device)
    assert layer._slow_product(chosen, limits, 1e15) == speed


@pytest.mark.parametrize("missing", [False, True])
def test_a_line_that_was_not_measured_gives_status_1_and_its_reason_once(missing, monkeypatch):
    figure = {"us": 10.0, "low_us": 10.0, "high_us": 11.0, "gb_per_s": 1.0, "ceiling_percent": 1.0, "peers": {}}
    predicted = dict.fromkeys(predict.REPORTED, (5.0, "DRAM"))
    rows = [
        layer.Row("combine", direction, 0, 1, None if missing else figure, predicted, ["no room for combine"])
        for direction in layer.DIRECTIONS
    ]
    monkeypatch.setattr(layer, "run", lambda *given: iter(rows))
    monkeypatch.setattr(layer_command, "_ceilings", lambda setting: {"1 thread": {"copy": 9.0}})
    monkeypatch.setattr(layer_command, "_used_by_others", lambda: 0.0)
    monkeypatch.setattr(console, "width", 100)
    status, output = run("--threads", "1")
    assert status == missing
    assert output.count("not measured: no room for combine") == missing
    assert (re.search(r"forward combine: (.*) us\n", output)[1] == "not measured") == missing
    cells = [line.split()[1] for line in output.splitlines() if line.startswith("combine ")]
    assert cells == ["-" if missing else "10"] * 2


def test_time_that_others_used_is_all_time_at_work_but_our_own(monkeypatch):
    """81 ticks of user, nice, system, irq, softirq and steal count; those in which a core is idle or waits do not."""
    monkeypatch.setattr(Path, "read_text", lambda path: "cpu  10 20 30 4000 5000 6 7 8 900 900\ncpu0 1 1 1 1\n")
    monkeypatch.setattr(layer_command.os, "sysconf", lambda name: {"SC_CLK_TCK": 10}[name])
    own = SimpleNamespace(user=1.0, system=0.5, children_user=0.25, children_system=0.125)
    monkeypatch.setattr(layer_command.os, "times", lambda: own)
    assert layer_command._used_by_others() == pytest.approx(8.1 - 1.875)

    def unreadable(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert layer_command._used_by_others() == 0.0


@pytest.mark.parametrize(("high_us", "busy"), [(19.0, False), (21.0, True)])
def test_a_busy_machine_is_named(high_us, busy, capsys):
    figure = {"us": 10.0, "low_us": 10.0, "high_us": high_us, "gb_per_s": 1.0, "ceiling_percent": 1.0, "peers": {}}
    row = layer.Row("make_plan", "forward", 0, 1, figure)
    layer_command._legend(setting(), {"cpu": {}}, [row])
    assert ("the machine was busy" in capsys.readouterr().out) == busy
    assert layer_command._cells(setting(), row, [])["us"] == "10!"[: 2 + busy]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "int8"), "--dtype must be one of float32"),
        (("--k", "17"), "--k must be at most --experts = 16"),
        (("--model", "nobody"), "--model must be one of OLMoE"),
        (("--routing", "lucky"), "--routing must be one of uniform"),
        (("--backend", "cuda"), "--backend cuda cannot run here"),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_wrong_options_are_named(options, words):
    status, output = run(*options)
    assert status == 2
    assert words in " ".join(output.replace("│", " ").split())


def test_every_expert_may_be_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = layer_command._setting({"k": 4, "experts": 4, "dim": None}, None, "float16", "zipf", 1.5, None, 3)
    assert chosen == layer.Setting(replace(Sizes(), k=4, experts=4), torch.float16, "cpu", None, "zipf", 1.5, 3)


def test_sizes_of_a_configuration_file(tmp_path):
    path = tmp_path / "config.json"
    config = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    path.write_text(json.dumps(config))
    assert of_model(str(tmp_path)) == Sizes(8192, 64, 32, 8, 2, "swiglu", "topk_softmax", False)
    wrong = {"[": "is no JSON", "{}": "must give dim as a positive int", "[]": "must hold a JSON object"}
    for text, words in wrong.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            of_model(str(path))


@pytest.mark.parametrize(
    ("changes", "router", "groups"),
    [
        ({}, "topk_softmax", None),
        ({"norm_topk_prob": True}, "topk_softmax", None),
        ({"norm_topk_prob": False}, "softmax_topk", None),
        ({"scoring_func": "softmax"}, "topk_softmax", None),
        ({"scoring_func": "sigmoid"}, "sigmoid", (1, 1)),
        ({"scoring_func": "sigmoid", "topk_group": 4}, "sigmoid", (1, 4)),
        ({"n_group": 8}, "sigmoid", (8, 1)),
        ({"n_group": 8, "topk_group": 4, "norm_topk_prob": False}, "sigmoid", (8, 4)),
    ],
    ids=str,
)
def test_the_router_of_a_configuration_file(tmp_path, changes, router, groups):
    config = {"d_model": 64, "moe_intermediate_size": 32, "intermediate_size": 99, "num_local_experts": 8, "top_k": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config | changes, "hidden_size": 7}))
    found = of_model(str(tmp_path / "config.json"))
    assert (found.router, found.groups) == (router, groups)
    assert (found.dim, found.hidden, found.experts, found.k, found.tokens) == (64, 32, 8, 2, 8192)


@pytest.mark.parametrize(
    ("changes", "activation", "bias"),
    [
        ({"hidden_act": "relu"}, "relu", False),
        ({"hidden_act": "gelu"}, "geglu", False),
        ({"swiglu_limit": 7.0}, "swiglu_clamped", True),
        ({"model_type": "gpt_oss", "hidden_act": "silu"}, "swiglu_clamped", True),
        ({"hidden_act": "tanh"}, None, None),
        ({"num_experts": True}, None, None),
        ({"num_experts": 0}, None, None),
        ({"num_experts": None, "moe_num_experts": 8}, "swiglu", False),
    ],
    ids=str,
)
def test_the_activation_of_a_configuration_file(tmp_path, changes, activation, bias):
    config = {"hidden_size": 64, "ffn_dim": 32, "num_experts": 8, "num_experts_per_tok": 2} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    if activation is None:
        with pytest.raises(ValueError, match=r"hidden_act 'tanh', not one of silu|must give experts as a positive int"):
            of_model(str(tmp_path))
    else:
        found = of_model(str(tmp_path))
        assert (found.activation, found.bias, found.experts) == (activation, bias, 8)


@pytest.mark.parametrize(
    ("place", "backend", "device", "runs"),
    [
        ("cuda", "triton", "cuda", True),
        ("cuda", "cuda", "cuda", True),
        ("cpu", "cpu", "cpu", True),
        ("cpu", "triton", "cpu", False),  # interpreted
        ("cpu", "cpu", "cuda", False),
        ("cuda", "cpu", "cpu", False),
        (None, "cpu", "cpu", False),
    ],
)
def test_a_backend_runs_on_the_device_itself(monkeypatch, place, backend, device, runs):
    monkeypatch.setattr(layer_command, "placement", lambda *given: SimpleNamespace(device=place))
    assert layer_command._runs(backend, device, "float32") == runs


FIGURE = {
    "us": 20.0,
    "low_us": 19.0,
    "high_us": 21.0,
    "gb_per_s": 123.4,
    "ceiling_percent": 45.6,
    "gflop_per_s": 5000.0,
}


def test_cells_of_a_line_by_hand(monkeypatch):
    """24 tokens in 20 us are 1.2 million a second."""
    peers = {"torch bmm": 2.5, "torch loop over the experts": 40.0, "torch grouped": 0.5}
    row = layer.Row("up", "training", 100_000_000, 1, FIGURE | {"peers": peers, "peak_mib": 3.25})
    cells = layer_command._cells(setting(), row, [])
    rates = {"GFLOP": "0.1", "GFLOP/s": "5000", "TFLOP/s": "5"}
    assert cells == rates | {
        "us": "20", "Mtok/s": "1.2", "GB/s": "123", "% ceil": "46", "MiB": "3.25", "x best": "0.5", "x eager": "40",
    }  # fmt: skip
    other = layer.Row("combine", "forward", 0, 1, FIGURE | {"peers": {"torch index_add": 3.0, "torch other": 7.0}})
    assert layer_command._cells(setting(), other, []) == {
        "us": "20", "Mtok/s": "1.2", "GB/s": "123", "% ceil": "46", "x best": "3", "x eager": "3",
    }  # fmt: skip
    assert layer_command._cells(setting(), replace(other, figure=None), []) == {"us": "-"}


@pytest.mark.parametrize(("least_bytes", "flops", "percent"), [(4e6, 1e3, "10"), (1.0, 12.48e8, "20")])
def test_the_share_of_a_data_sheet_is_of_its_bandwidth_or_peak(monkeypatch, least_bytes, flops, percent):
    """20 us on a GPU of 2000 GB/s and 312 TFLOP/s: 4 MB take 2 us, 1.248 GFLOP take 4."""
    gpu = replace(predict.GPUS["A100"], name="Some GPU", gb_per_s=2000, tflops={"bfloat16": 312.0, "tf32": 1.0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Some GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = replace(setting(), dtype=torch.bfloat16, device="cuda")
    row = layer.Row("up", "forward", flops, least_bytes, FIGURE | {"peers": {}, "launches": 3})
    found = layer_command._cells(chosen, row, [predict.GPUS["H100"], gpu])
    assert (found["% sheet"], found["kernels"]) == (percent, "3")
    assert layer_command._cells(chosen, row, [])["% sheet"] == "-"
    assert layer_command._sheet_percent(gpu, replace(row, figure=None), chosen) == 0.0
    monkeypatch.setattr(predict, "GPUS", {"here": gpu, "A100": predict.GPUS["A100"], "H100": predict.GPUS["H100"]})
    assert layer_command._gpus() == [gpu]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "unheard")
    assert [each.name for each in layer_command._gpus()] == [predict.GPUS[name].name for name in predict.REPORTED]


def test_numbers_have_three_digits_and_columns_are_those_of_the_device():
    numbers = (0.01234, 9.996, 99.94, 99.96, 100.4, 123456.7)
    assert list(map(layer_command._number, numbers)) == ["0.0123", "10", "99.9", "100", "100", "123457"]
    common = ["us", "Mtok/s", "GFLOP"], ["GB/s", "% ceil"]
    assert layer_command._measured(setting(), "forward") == [*common[0], "GFLOP/s", *common[1], "x best", "x eager"]
    on_gpu = [*common[0], "TFLOP/s", *common[1], "% sheet", "kernels", "MiB", "x best", "x eager"]
    assert layer_command._measured(replace(setting(), device="cuda"), "training") == on_gpu


@pytest.mark.parametrize(("terminal", "fits", "lines"), [(False, True, 2), (True, True, 0), (False, False, 0)])
def test_a_pipe_shows_each_line_as_it_is_measured(monkeypatch, terminal, fits, lines):
    """A terminal shows a spinner."""
    predicted = dict.fromkeys(predict.REPORTED, (5.0, "DRAM"))
    rows = [layer.Row("combine", each, 0, 1, FIGURE | {"peers": {}}, predicted) for each in layer.DIRECTIONS]
    monkeypatch.setattr(layer, "run", lambda *given: iter(rows))
    monkeypatch.setattr(layer_command, "_ceilings", lambda setting: {"1 thread": {"copy": 9.0}})
    monkeypatch.setattr(layer.Setting, "fits", lambda self: fits)
    monkeypatch.setattr(layer_command, "status", lambda text: nullcontext(SimpleNamespace(update=lambda text: None)))
    monkeypatch.setattr(console, "_force_terminal", terminal)
    status, output = run("--threads", "1")
    assert status == 0, output
    assert output.count(" combine: 20 us\n") == lines


@pytest.mark.parametrize(("used", "said"), [(0.79, None), (0.81, "used 10 % of"), (3.2, "used 40 % of")])
def test_other_programs_that_used_over_a_tenth_of_the_cores_are_named(monkeypatch, used, said):
    """Two seconds on four cores."""
    row = partial(layer.Row, "combine", flops=0, least_bytes=1, figure=FIGURE | {"peers": {}})
    rows = [row(direction=each, predicted=dict.fromkeys(predict.REPORTED, (5.0, "DRAM"))) for each in layer.DIRECTIONS]
    counted = iter([50.0, 50.0 + used])
    clock = SimpleNamespace(now=7.0)

    def measured(*given):
        yield from rows
        clock.now += 2.0

    monkeypatch.setattr(layer, "run", measured)
    monkeypatch.setattr(layer_command, "_ceilings", lambda setting: {"1 thread": {"copy": 9.0}})
    monkeypatch.setattr(layer_command, "_used_by_others", lambda: next(counted))
    monkeypatch.setattr(layer_command, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(layer_command.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(console, "width", 100)
    status, output = run("--threads", "1")
    assert status == 0, output
    text = f"Other programs {said} the cores meanwhile: run again when the machine is quiet."
    assert (text in " ".join(output.split())) == (said is not None)
    assert ("Other programs" in output) == (said is not None)
    assert output.count("\nforward combine: 20 us\n") == 1
