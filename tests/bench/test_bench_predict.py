"""python -m bench predict, and states of the ledger."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from bench import counting, document, ledger, pipes, predict, predict_command, registry
from bench.gpus import Gpu
from tests.helpers.bench import run
from tests.ptx.summary import triton_kernels

ROOT = Path(__file__).resolve().parents[2]
# Lanes: 4 of FP32, 2 of FP64 and integers, 1 of MUFU; 200 FLOPs of products a cycle and multiprocessor.
GPU = Gpu("Some GPU", 100, 1.0, 1000, {"bfloat16": 20}, fp32=4, fp64=2, integer=2, special=1, l2=10)
SCALE = 1000


def launched(**changes) -> dict:
    """The counts of a launch of 100 blocks at the full shape, where each count is SCALE times as large."""
    counts = dict.fromkeys(counting.GROWING, 0) | {"warp_instructions": 400, "bytes_read": 300, "bytes_written": 200}
    counts |= {"kernel": "k", "threads": 128, "shared_bytes": 1024} | changes
    full = {name: SCALE * counts[name] for name in counting.GROWING} | {"blocks": counts["blocks"] or 100}
    return counts | {"full": full}


def counted(*launches: dict, **changes) -> dict:
    facts = {"operation": "kwta", "backend": "cuda", "dtype": "bfloat16", "direction": "forward"}
    facts |= {"shape": "R=8 N=4 p=0.5", "counted_shape": "R=4 N=4 p=0.5", "capability": 80, "torch_products": False}
    return (
        facts | {"elements": 16, "flops": 32, "date": "2026-11-23", "sources": "", "launches": list(launches)} | changes
    )


def made(each: dict, stale: bool = False) -> predict.Prediction:
    return replace(predict.prediction(each, GPU, stale), floors={"DRAM": 0.0, "tensor": 0.0})


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
        # 500 bytes x 1000 / 1 TB/s; 400 instructions x 1000 x factor 1.3 / (100 SMs x 4 a cycle x 1 GHz)
        (launched(), {"DRAM": 0.5, "issue": 1.3}, 1.3, "issue"),
        (launched(bytes_read=2300), {"DRAM": 2.5, "issue": 1.3}, 1.3, "DRAM"),
        # 10 sectors of 32 bytes x 1000 / 10 GB/s
        (launched(sectors=10), {"DRAM": 0.5, "issue": 1.3, "L2": 32.0}, 1.3, "L2"),
        # Results x 1000 / (100 SMs x lanes x 1 GHz)
        (launched(fp32=4000), {"DRAM": 0.5, "issue": 1.3, "fp32": 10.0}, 1.3, "fp32"),
        (launched(fp64=4000), {"DRAM": 0.5, "issue": 1.3, "fp64": 20.0}, 1.3, "fp64"),
        (launched(integer=4000), {"DRAM": 0.5, "issue": 1.3, "integer": 20.0}, 1.3, "integer"),
        (launched(special=4000), {"DRAM": 0.5, "issue": 1.3, "special": 40.0}, 1.3, "special"),
        # 600 passes and 12,800 shuffled results, 32 a cycle
        (launched(passes=600, shuffle=12800), {"DRAM": 0.5, "issue": 1.3, "shared": 10.0}, 1.3, "shared"),
        # Kernels with matrix instructions have factor 0.9; 1e5 FLOPs x 1000 / 20 TFLOP/s.
        (launched(tensor_flops=10**5), {"DRAM": 0.5, "issue": 0.9, "tensor": 5.0}, 0.9, "tensor"),
        # 101 blocks on 100 multiprocessors take as long as 200; memory does not wait for the last of them.
        (launched(blocks=101), {"DRAM": 0.5, "issue": 1.3 * 200 / 101}, 1.3, "issue"),
        (launched(blocks=25), {"DRAM": 0.5, "issue": 1.3 * 4}, 1.3, "issue"),
    ],
)
def test_a_launch_takes_the_time_of_its_slowest_resource(launch, us, factor, bound):
    found = predict.launch(launch, counted(launch), GPU)
    assert found.us == pytest.approx(dict.fromkeys(predict.BOUNDS, 0.0) | us)
    assert (found.factor, found.bound, found.least) == (factor, bound, pytest.approx(max(us.values())))


def test_products_take_at_least_the_time_of_a_block_alone():
    """400 blocks of 4 warps, 4 for each multiprocessor, two side by side (256 registers x 128 threads)."""
    launch = launched(blocks=400, tensor_flops=10**5, warp_instructions=4000, loop_instructions=3000)
    assert predict.side_by_side(launch, GPU) == 2
    assert predict.side_by_side(launch | {"shared_bytes": 90 * 1024}, GPU) == 1
    assert predict.side_by_side(launch | {"threads": 256}, GPU) == 1
    # Each block takes a KB more than it asks for, of 164 KB.
    assert [predict.side_by_side(launch | {"shared_bytes": 81 * 1024 + more}, GPU) for more in (0, 1)] == [2, 1]
    found = predict.launch(launch, counted(launch), GPU)
    # The loop: 5 us of products or 0.9 x 3e6 instructions at 4 a cycle, in 4 rounds. Outside: two reads and
    # 0.9 x 1e6 instructions of 400 x 4 warps, 2 cycles each.
    loop, outside = max(1250, 0.9 * 3e6 / 4 / 400), 1000 + 0.9 * 1e6 / 1600 * 2
    a = loop / outside
    assert found.us["latency"] == pytest.approx(4 * loop / (1 - 1 / (1 + 2 * a + 2 * a * a)) / 1e3)
    alone = launch | {"threads": 256}  # one block
    assert predict.launch(alone, counted(alone), GPU).us["latency"] == pytest.approx(
        4 * (loop + 1000 + 0.9 * 1e6 / 3200 * 2) / 1e3
    )


def test_a_call_takes_the_sum_and_shows_a_measurement_beside_it(tree):
    each = counted(launched(), launched(bytes_read=4300))
    counting.write([each], tree)
    (found,) = predict.predict(GPU, (), tree)
    assert found.us == pytest.approx(1.3 + 4.5)
    assert found.bound == "DRAM"
    assert found.instructions_per_element == 32 * 800 / 16
    assert found.measured_over_predicted is None
    figure = {"op": "kwta", "us": 11.6} | {key: each[key] for key in ("backend", "dtype", "direction", "shape")}
    result = {"gpu": True, "device": "NVIDIA Some GPU 80GB", "entries": [{"figures": [figure]}]}
    assert predict.predict(GPU, [result], tree)[0].measured_over_predicted == pytest.approx(2.0)
    for other in ({"device": "NVIDIA Some GPUX"}, {"gpu": False}):
        assert predict.predict(GPU, [result | other], tree)[0].measured_over_predicted is None
    table = predict.rows([found])
    assert [row[5] for row in table] == ["k", "k", "call"]
    assert all("(stale)" in row[0] for row in table)  # counted from other sources
    assert all("predicted" in name for name in predict.HEADER if " us" in name or name == "us")


@pytest.mark.parametrize("pipe", ["tensor", "fp32"])
def test_torchs_own_products_are_added_at_the_peak_of_their_pipe(pipe):
    alone = replace(made(counted(launched(), torch_products=True)), floors={"DRAM": 3.0, "tensor": 0.0, pipe: 2.0})
    assert (alone.us, alone.bound) == (pytest.approx(1.3 + 2.0), pipe)
    assert replace(alone, floors=alone.floors | {"DRAM": 4.0}).bound == "DRAM"
    fused = launched(tensor_flops=10**5)  # its 5 us are the product's
    fused = replace(made(counted(fused, torch_products=True)), floors=alone.floors)
    assert (fused.us, fused.bound) == (pytest.approx(5.0), "tensor")


def test_rows_of_launches_and_their_sum_by_hand():
    """Two launches: DRAM takes 0.5 and 9.5 us, instructions 1.3 and 6.5 us, other resources nothing."""
    each = counted(launched(kernel="a"), launched(kernel="b", bytes_read=9300, warp_instructions=2000))
    a, b, every = predict.rows([replace(made(each), measured_over_predicted=1.5)])
    key = ("kwta", "cuda", "bfloat16", "forward", "R=8 N=4 p=0.5")
    times = {"a": ("0.5", "1.3"), "b": ("9.5", "6.5"), "call": ("10", "7.8")}
    shown = {
        name: tuple({"DRAM": dram, "issue": issue}.get(bound, "0") for bound in predict.BOUNDS)
        for name, (dram, issue) in times.items()
    }
    # 32 threads a warp instruction, 16 elements: 400 and 2000 instructions at the counted shape.
    assert a == (*key, "a", "800.0", "1.3", *shown["a"], "1.3", "issue", "")
    assert b == (*key, "b", "4000.0", "1.3", *shown["b"], "9.5", "DRAM", "")
    assert every == (*key, "call", "4800.0", "", *shown["call"], "10.8", "DRAM", "1.50")
    several = counted(*[launched()] * 3, launched(bytes_read=9300))
    assert made(several).bound == "DRAM"  # most launches are bound by issue, 3.9 us of 13.4


def test_a_part_of_a_count_grows_with_the_experts_and_the_rest_with_the_tokens():
    one = launched(bytes_read=700, tensor_flops=64)
    two = launched(bytes_read=800, tensor_flops=128)  # twice the tokens: 600 bytes of weights, 100 of rows
    full = counting._extrapolated(one, two, ratio=16, scale=256)
    assert full["bytes_read"] == 600 * 16 + 100 * 256
    assert full["tensor_flops"] == 64 * 256
    assert full["bytes_written"] == 200 * 16
    more = counting._extrapolated(one, two | {"bytes_read": 1500}, 16, 256)  # more than doubles: has no fixed part
    assert more["bytes_read"] == 700 * 256
    with pytest.raises(RuntimeError, match="bench predict: k and k are not the same launch"):
        counting._extrapolated(one, two | {"threads": 256}, 16, 256)


def test_a_count_is_extrapolated_from_two_calls(monkeypatch):
    """To 16 times as many experts and 256 times as many tokens."""
    rest = {"D": 4, "H": 6, "K": 2, "routing": "uniform"}
    shapes = {"T": 32, "E": 8, **rest}, {"T": 8192, "E": 128, **rest}
    case = counting.Case("expert_mlp", registry.ENTRIES["expert_mlp"], shapes[1], shapes[0], ("T",), fixed="E")
    found = {32: launched(bytes_read=700), 64: launched(bytes_read=800)}  # 600 of weights
    monkeypatch.setattr(counting, "_launches", lambda case, *rest: ([found[case.counted_shape["T"]]], 9))
    (launch,) = counting.count(case, "cuda", torch.bfloat16, "forward", None)["launches"]
    assert launch["full"]["bytes_read"] == 600 * 16 + 100 * 256
    (launch,) = counting.count(replace(case, fixed=""), "cuda", torch.bfloat16, "forward", None)["launches"]
    assert launch["full"]["bytes_read"] == 700 * 256


def test_instructions_by_pipe_and_the_loop_of_products_by_hand():
    """Two loops, one in the other; one with a product, and one that is behind the products of another."""
    listing = [  # text, target of a branch, runs of warps, lanes
        ("mov.u32 %r1, 0", -1, 4, 128),
        ("add.s32 %r1, %r1, 1", -1, 40, 1280),  # the outer loop begins
        ("fma.rn.f32 %f1, %f2, %f3, %f4", -1, 400, 12800),  # the inner loop begins
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}", -1, 400, 12800),
        ("@%p1 ex2.approx.f32 %f5, %f6", -1, 300, 9000),
        ("@%p1 bra $L2", 2, 400, 12800),
        ("div.rn.f64 %d1, %d2, %d3", -1, 40, 1000),
        ("@%p1 bra $L1", 1, 40, 1280),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}", -1, 8, 256),
        ("shfl.sync.bfly.b32 %r1, %r2", -1, 5, 160),  # a loop without a product
        ("bra $L9", 9, 5, 160),
        ("mul.lo.s32 %r1, %r1, 3", -1, 0, 0),  # never ran
        ("bra $L1", 1, 0, 0),
    ]
    texts, targets, runs, lanes = zip(*listing, strict=True)
    result = SimpleNamespace(
        kernel=SimpleNamespace(texts=texts, records={"target": np.array(targets)}),
        counters={"runs": np.array(runs), "lanes": np.array(lanes)},
    )
    found = {"fp32": 12800, "fp64": 10000, "integer": 1280, "special": 9000, "shuffle": 160}
    assert pipes.lanes(result) == found
    assert pipes.tensor_flops(result) == 400 * 2 * 16 * 8 * 16 + 8 * 2 * 64 * 128 * 16 // 4
    assert pipes.product_loop(result) == 400 + 400 + 300 + 400
    result.counters["runs"][3] = 0
    assert pipes.product_loop(result) == 0  # the wgmma is in no loop


OPCODES = {
    (
        "",
        0,
    ): "mov.u32 cvta.to.global.u64 prmt.b32 and.b64 cvt.u64.u32 cvt.u32.u64 abs.f64 neg.f64 selp.f64 ld.global.f64 "
    "st.shared.v4.f32 atom.global.add.f32 red.add.f64 cp.async.cg bar.sync mbarrier.init.b32 barrier.sync fence.proxy "
    "membar.gl bra ret exit wgmma.mma_async.sync mma.sync.aligned ldmatrix.sync stmatrix.sync and.pred abs.f32 neg.s32",
    ("special", 1): "rcp.approx.ftz.f64 ex2.approx.f32 lg2.approx.f32 rcp.rn.f32 rsqrt.approx.f32 sqrt.rn.f32 "
    "tanh.approx.f32 sin.approx.f32 cos.approx.f32 div.full.f32",
    ("fp64", 10): "rcp.rn.f64 div.rn.f64 sqrt.rn.f64 rsqrt.approx.f64",
    ("fp64", 2): "cvt.f64.f32 cvt.rn.f32.f64 cvt.rzi.s32.f64",
    ("fp64", 1): "add.f64 fma.rn.f64 max.f64 setp.lt.f64",
    (
        "fp32",
        1,
    ): "add.f32 sub.rn.f32 mul.f16 fma.rn.bf16x2 mad.rn.f32 add.f16x2 add.bf16 mul.lo.s32 mul.wide.u16 mad.hi.u64",
    ("shuffle", 1): "shfl.sync.bfly.b32 redux.sync.add.s32 match.any.sync.b32",
    ("integer", 1): "add.s32 sub.u64 setp.lt.s32 setp.gt.f32 max.f32 min.s32 selp.b32 shl.b32 div.u32 cvt.rn.f32.s32 "
    "cvt.rn.bf16x2.f32 popc.b32 brev.b32 lop3.b32",
}


@pytest.mark.parametrize(("pipe", "opcodes"), OPCODES.items(), ids=str)
def test_every_opcode_has_its_pipe(pipe, opcodes):
    for opcode in opcodes.split():
        assert pipes.pipe_of(f"{opcode} %r1, %rd2.b64, [%r3.f64]") == pipe, opcode


def test_counts_grow_by_the_named_sizes():
    case = counting.Case("kwta", registry.ENTRIES["kwta"], {"R": 8192, "N": 100, "p": 0.1}, {"R": 64}, ("R",))
    assert case.counted_shape == {"R": 64, "N": 100, "p": 0.1}
    assert case.scale() == 128
    assert case.twice.counted_shape == {"R": 128, "N": 100, "p": 0.1}


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


def test_stored_flops_are_those_of_the_calls() -> None:
    of_size = {"kwta": lambda R, N, p: R * N, "grouped_gemm": lambda T, D, H, E, K, **rest: 2 * T * K * D * H}
    counts = counting.read()
    for each in counts:
        sizes = predict.sizes_in(each["shape"])
        if each["operation"] in of_size:
            times = {"grouped_gemm forward": 1, "grouped_gemm training": 3, "kwta forward": 1, "kwta training": 2}
            factor = times[f"{each['operation']} {each['direction']}"]
            assert each["flops"] == factor * of_size[each["operation"]](**sizes), each["shape"]
    for op in {each["operation"] for each in counts}:
        each = min((each for each in counts if each["operation"] == op), key=lambda each: each["elements"])
        sizes, dtype = predict.sizes_in(each["shape"]), getattr(torch, each["dtype"])
        assert each["flops"] == counting.flops(op, sizes, dtype, each["direction"]), op


@pytest.mark.parametrize("gpu", predict.GPUS.values(), ids=lambda gpu: gpu.name)
def test_no_call_is_predicted_below_what_physics_allows(gpu):
    found = predict.predict(gpu)
    assert found
    for each in found:
        short = each.count["dtype"] in ("bfloat16", "float16")
        products = any(one.us["tensor"] for one in each.launches)
        peak = gpu.peak(each.count["dtype"]) if short or products else 2e9 * gpu.multiprocessors * gpu.ghz * gpu.fp32
        assert each.us >= (1 - 1e-9) * 1e6 * max(each.flops / peak, each.least_bytes / (gpu.gb_per_s * 1e9))
        assert each.us >= (1 - 1e-9) * sum(one.us["DRAM"] for one in each.launches)


def launches(op: str, backend: str, shape: str, direction: str = "training") -> dict[str, predict.Launch]:
    """Of the predicted call on an A100 whose shape begins like this: launches, by kernel."""
    for each in predict.predict(predict.GPUS["A100"], ops=(op,)):
        found = tuple(each.count[name] for name in ("backend", "direction"))
        if found == (backend, direction) and each.count["shape"].startswith(shape):
            return {one.kernel: one for one in each.launches}
    raise AssertionError(f"{op} {shape} was not counted")


def test_times_computed_by_hand():
    """On an A100. Eight choices' rows of 2048 in bfloat16 for 32768 tokens, in and out: 1.2 GB. 0.825 TFLOP of a
    weight's gradient. 65 GFLOP of float32 by three TF32 products, with 384 columns for 352."""
    rows = (32768 * 8 + 32768) * 2048 * 2
    for backend in ledger.GPU_BACKENDS:
        sums = launches("expert_mlp", backend, "T=32768 D=2048")
        combined = sums[{"triton": "combine_fwd", "cuda": "combine_kernel"}[backend]]
        assert combined.us["DRAM"] == pytest.approx(1e6 * rows / 1940e9, rel=0.01)
        weight = launches("grouped_gemm", backend, "T=32768 D=2048")
        (gradient,) = (one for name, one in weight.items() if "weight" in name or "wgrad" in name)
        assert gradient.us["tensor"] == pytest.approx(1e6 * 2 * 32768 * 8 * 2048 * 768 / 312e12, rel=0.01)
    product = launches("grouped_gemm", "triton", "T=32768 D=352", "forward")["grouped_gemm_fwd"]
    assert product.us["tensor"] == pytest.approx(1e6 * 3 * 2 * 32768 * 8 * 352 * 384 / 156e12, rel=0.05)


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


def test_only_the_backends_that_were_executed_are_written(monkeypatch):
    written = []
    monkeypatch.setattr(counting, "verified", lambda ops, kernels: {"kwta": {key: {} for key in kernels}})
    monkeypatch.setattr(ledger, "write_executed", lambda found, kernels=("all",): written.append((found, kernels)))
    done = run("predict", "--op", "kwta", "--backend", "triton", "--verify")
    assert done.exit_code == 0, done.output
    assert written == [({"kwta": {"triton": {}}}, ("triton",))]


def test_counts_of_other_operations_and_backends_stay(monkeypatch):
    def made(op, backend, date):
        return {"operation": op, "backend": backend, "dtype": "float32", "direction": "forward", "date": date}

    pairs = [(op, backend) for op in ("sinkhorn", "kwta") for backend in ledger.GPU_BACKENDS]
    written = []
    monkeypatch.setattr(counting, "read", lambda: [made(*pair, "old") for pair in pairs])
    monkeypatch.setattr(counting, "counted", lambda cases, backends: [made("kwta", each, "new") for each in backends])
    monkeypatch.setattr(counting, "write", lambda counts: written.extend(counts) or "counts.json")
    predict_command._count(("kwta",), ("cuda",))
    found = [(each["operation"], each["backend"], each["date"]) for each in written]
    assert sorted(found[:2]) == [("kwta", "cuda", "new"), ("kwta", "triton", "old")]
    assert sorted(found[2:]) == [("sinkhorn", "cuda", "old"), ("sinkhorn", "triton", "old")]


def test_a_case_has_the_entry_of_its_operation():
    of_others = {id(entry): op for op, entry in registry.ENTRIES.items()}
    assert {case.operation for case in counting.cases()} >= set(registry.ENTRIES)
    assert all(of_others.get(id(case.entry), case.operation) == case.operation for case in counting.cases())


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
