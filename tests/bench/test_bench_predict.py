"""python -m bench predict, and states of the ledger."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from bench import counting, document, ledger, predict, registry
from tests.helpers.bench import run
from tests.ptx.summary import triton_kernels

ROOT = Path(__file__).resolve().parents[2]
GPU = predict.Gpu("Some GPU", 100, 1.0, 1000, {"bfloat16": 200})


def launched(**changes) -> dict:
    counts = {"kernel": "k", "warp_instructions": 400, "bytes_read": 600, "bytes_written": 400, "tensor_flops": 0}
    return counts | changes


def counted(*launches: dict, **changes) -> dict:
    facts = {"operation": "kwta", "backend": "cuda", "dtype": "bfloat16", "direction": "forward", "shape": "R=8 N=4"}
    facts |= {"counted_shape": "R=4 N=4", "grows": 1000.0, "bytes_grow": 500.0, "elements": 16, "date": "2026-11-23"}
    return facts | {"sources": "", "launches": list(launches)} | changes


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout whose only operation is kwta, in CUDA."""
    for name in ("csrc/cuda/kwta.cu", "moe_kernels/ops/kwta.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(f'NAME = "{name}"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("launch", "us", "factor", "bound"),
    [
        # 1000 bytes x bytes_grow / 1 TB/s; 400 instructions x grows x factor 1.3 / (100 SMs x 4 a cycle x 1 GHz)
        (launched(), (0.5, 1.3, 0.0), 1.3, "issue"),
        (launched(bytes_read=4600), (2.5, 1.3, 0.0), 1.3, "DRAM"),
        (launched(bytes_grow=1000.0), (1.0, 1.3, 0.0), 1.3, "issue"),  # the launch's own bytes_grow
        # Kernels with matrix instructions have factor 0.9; 1e6 FLOPs x grows / 200 TFLOP/s.
        (launched(tensor_flops=10**6), (0.5, 0.9, 5.0), 0.9, "tensor"),
    ],
)
def test_a_launch_takes_the_longest_of_three_times(launch, us, factor, bound):
    found = predict.launch(launch, counted(launch), GPU)
    assert found.us == pytest.approx(us)
    assert (found.factor, found.bound, found.least) == (factor, bound, pytest.approx(max(us)))


def test_a_call_takes_the_sum_and_shows_a_measurement_beside_it(tree):
    each = counted(launched(), launched(bytes_read=4600))
    counting.write([each], tree)
    (found,) = predict.predict(GPU, (), tree)
    assert found.us == pytest.approx(1.3 + 2.5)
    assert found.bound == "DRAM"
    assert found.instructions_per_element == 32 * 800 / 16
    assert found.measured_over_predicted is None
    figure = {"op": "kwta", "us": 7.6} | {key: each[key] for key in ("backend", "dtype", "direction", "shape")}
    result = {"gpu": True, "device": "NVIDIA Some GPU 80GB", "entries": [{"figures": [figure]}]}
    assert predict.predict(GPU, [result], tree)[0].measured_over_predicted == pytest.approx(2.0)
    for other in ({"device": "NVIDIA Some GPUX"}, {"gpu": False}):
        assert predict.predict(GPU, [result | other], tree)[0].measured_over_predicted is None
    table = predict.rows([found])
    assert [row[5] for row in table] == ["k", "k", "all"]
    assert all("(stale)" in row[0] for row in table)  # counted from other sources
    assert all("predicted" in name for name in predict.HEADER if " us" in name or name == "us")


def test_rows_of_launches_and_their_sum_by_hand():
    """Two launches: DRAM takes 0.5 and 9.5 us, instructions 1.3 and 6.5 us, products nothing."""
    launches = [launched(kernel="a"), launched(kernel="b", bytes_read=18600, warp_instructions=2000)]
    each = counted(*launches)
    made = predict.Prediction(each, tuple(predict.launch(one, each, GPU) for one in launches), False, 1.5)
    key = ("kwta", "cuda", "bfloat16", "forward", "R=8 N=4")
    a, b, every = predict.rows([made])
    # 32 threads a warp instruction, 16 elements: 400 and 2000 instructions at the counted shape.
    assert a == (*key, "a", "800.0", "1.3", "0.5", "1.3", "0", "1.3", "issue", "")
    assert b == (*key, "b", "4000.0", "1.3", "9.5", "6.5", "0", "9.5", "DRAM", "")
    assert every == (*key, "all", "4800.0", "", "10", "7.8", "0", "10.8", "DRAM", "1.50")
    (alone,) = predict.rows([predict.Prediction(counted(launches[0]), made.launches[:1], True, 2.0)])
    assert (alone[0], alone[-1]) == ("kwta (stale)", "2.00")
    several = (*made.launches[:1] * 3, made.launches[1])
    assert predict.Prediction(each, several, False).bound == "DRAM"  # most launches are bound by issue, 3.9 us of 13.4


def test_counts_grow_by_the_named_sizes_and_bytes_by_the_least_bytes():
    kwta = registry.ENTRIES["kwta"]
    case = counting.Case("kwta", kwta, {"R": 8192, "N": 100, "p": 0.1}, {"R": 64}, ("R",))
    assert case.counted_shape == {"R": 64, "N": 100, "p": 0.1}
    assert case.scale() == case.bytes_scale(torch.float32, "training") == 128
    own = replace(case, shape={"R": 8192, "N": 4096, "p": 0.1}, small={"R": 64, "N": 128}, own_bytes=True)
    assert own.scale() == own.bytes_scale(torch.float32, "forward") == 128
    assert replace(own, own_bytes=False).bytes_scale(torch.float32, "forward") == 128 * 32
    full = {"T": 1024, "D": 8, "H": 4, "E": 16, "K": 4}
    experts = counting.Case("expert_mlp", registry.ENTRIES["expert_mlp"], full, {"T": 64, "K": 2, "E": 2}, ("T", "K"))
    assert experts.scale() == 16 * 2
    least = [2 * tokens * 8 + 2 * count * 8 * 4 + tokens * k for tokens, count, k in ((1024, 16, 4), (64, 2, 2))]
    assert experts.bytes_scale(torch.float32, "forward") == pytest.approx(least[0] / least[1])


def test_a_gpu_without_a_peak_is_named():
    launch = launched(tensor_flops=1)
    with pytest.raises(ValueError, match="bench predict: Some GPU has no TFLOP/s for tf32, only bfloat16"):
        predict.launch(launch, counted(launch, dtype="float32"), GPU)


def kernels() -> dict[str, set[str]]:
    """By backend: the names of all its kernels."""
    names = {name.strip("_") for name in triton_kernels()}
    files = [*(ROOT / "csrc" / "cuda").iterdir(), *(ROOT / "csrc" / "include" / "moe").iterdir()]
    sources = "".join(path.read_text() for path in files if path.suffix in (".cu", ".cuh", ".h"))
    found = re.findall(r"__global__[^;{]*?\b(\w+_kernel)\b\s*\(", sources)
    return {"triton": names, "cuda": set(found)}


@pytest.mark.parametrize("backend", ledger.GPU_BACKENDS)
def test_every_gpu_kernel_was_counted(backend):
    counts = [each for each in counting.read() if each["backend"] == backend]
    assert kernels()[backend] <= {launch["kernel"] for each in counts for launch in each["launches"]}
    for gpu in predict.GPUS.values():
        for each in predict.predict(gpu):
            assert all(launch.least > 0 for launch in each.launches)


def test_gpus_are_known_or_given_by_their_figures():
    found = run("predict", "--gpu", "mine", "--sms", 10)
    assert found.exit_code == 2
    assert "--ghz" in found.output
    figures = ["--sms", "10", "--ghz", "1", "--gb-per-s", "100", "--tflops", "bfloat16=10,tf32=5,float16=10"]
    found = run("predict", "--gpu", "mine", *figures, "--op", "kwta")
    assert found.exit_code == 0, found.output
    assert "PREDICTED, not measured: mine: 10 multiprocessors at 1 GHz, 100 GB/s" in found.output
    assert run("predict", "--op", "sort").exit_code == 2
    found = run("predict", "--tflops", "312")
    assert "--tflops must be DTYPE=NUMBER, got 312" in found.output


def test_counting_without_a_checkout_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    found = run("predict", "--count")
    assert found.exit_code == 2
    assert "it needs a checkout of the sources" in " ".join(found.output.split())


def test_the_report_and_the_documentation_call_it_predicted():
    text = document.document([])
    assert "## Predicted, not measured" in text
    assert "### Predicted for A100: 108 multiprocessors at 1.41 GHz" in text
    short = predict.short(predict.predict(predict.GPUS["A100"]))
    assert "predicted us on an A100" in short
    (row,) = re.findall(r"\| `kwta` \| bfloat16 \| [^|]+ \| ([\d.]+) DRAM \| ([\d.]+) DRAM \|", short)
    assert len(row) == 2  # triton and cuda


def test_executed_ptx_is_a_state_between_never_run_and_verified(tree):
    assert ledger.state("kwta", "cuda", [], tree) == "never run on a GPU"
    found = {"kwta": {"cuda": {"date": "2026-11-23", "sources": ledger.digest("kwta", "cuda", tree)}}}
    ledger.write_executed(found, root=tree)
    assert ledger.state("kwta", "cuda", [], tree) == "PTX executed 2026-11-23"
    ledger.write_executed({"kwta": {"triton": {}}}, ("triton",), tree)  # other backends stay
    ledger.write_executed({"kwta": {}}, ("triton",), tree)
    assert "triton" not in json.loads((tree / ledger.EXECUTED).read_text())["kwta"]
    ledger.write_executed({"kwta_mask": {"triton": found["kwta"]["cuda"]}}, root=tree)  # other operations stay
    assert ledger.state("kwta", "cuda", [], tree) == "PTX executed 2026-11-23"
    # In Triton only kwta_mask was executed, another operation of kwta.py.
    assert ledger.executed("kwta", "triton", tree) == "never run on a GPU"
    entry = {"operation": "kwta", "backend": "cuda", "device": "cuda", "verdict": "ok", "checks": {}}
    entry["sources"] = ledger.digest("kwta", "cuda", tree)
    result = {"date": "2026-11-24", "device": "Some GPU", "entries": [entry]}
    assert ledger.state("kwta", "cuda", [result], tree) == "verified 2026-11-24 on Some GPU"
    (tree / "csrc/cuda/kwta.cu").write_text("int changed;\n")
    assert ledger.state("kwta", "cuda", [], tree) == "stale: sources changed since PTX executed 2026-11-23"
