"""Parameters and buffers of layers: creation, dtypes, averages and state dicts."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from moe_kernels import nn as mnn
from tests.helpers.layers import EVERY

D, E, H, T, IDS = 6, 4, 5, 12, 9


def makers():
    """Name -> constructor of a module, with options device and dtype."""

    def local(**options):
        return mnn.LocalSearch(E, 5, **options)

    def competing(**options):
        router, experts = mnn.TopKGate(D, E, 2, **options), mnn.ExpertMLP(E, D, H, **options)
        return mnn.MoE(mnn.CompetitionGate(router, experts), experts)

    return {name: make for name, make in EVERY.items() if name not in ("random", "competition")} | {
        "local search": local,
        "mlp": lambda **o: mnn.ExpertMLP(E, D, H, **o),
        "layer": lambda **o: mnn.ExpertLayer(E, D, H, **o),
        "comet": lambda **o: mnn.CometFFN(D, H, **o),
        "competition": competing,
        "tasks": lambda **o: mnn.MultiGateMoE([mnn.TreeGate(D, E, **o)], mnn.ExpertLayer(E, D, H, **o), local(**o)),
    }


every = pytest.mark.parametrize("name", makers())


@every
def test_meta_then_to_empty_then_reset_is_the_constructor(name):
    make = makers()[name]
    torch.manual_seed(0)
    expected = make().state_dict()
    for whole in (True, False):
        with torch.device("meta"):
            made = make()
        made.to_empty(device="cpu")
        for each in itertools.chain(made.parameters(), made.buffers()):
            each.detach().fill_(torch.nan if each.is_floating_point() else -(2**31))
        torch.manual_seed(0)
        if whole:
            made.reset_parameters()
            found = made.state_dict()
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True)
            continue
        for each in made.modules():
            if hasattr(each, "reset_parameters"):
                each.reset_parameters()
        for key, value in made.state_dict().items():
            if isinstance(value, torch.Tensor) and not key.endswith("distance"):
                assert value.isfinite().all(), key
                assert bool(value.any()) == bool(expected[key].any()), key


@every
def test_modules_are_made_where_and_as_asked(name):
    made = makers()[name](device="meta", dtype=torch.float64)
    for key, value in itertools.chain(made.named_parameters(), made.named_buffers()):
        assert value.is_meta, key
        assert value.dtype == torch.float64 or not value.is_floating_point(), key


@pytest.mark.parametrize("narrow", ["bfloat16", "half", "to"])
def test_routers_stay_in_float32(narrow):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(D, D), mnn.MoE(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H)))
    router = copy.deepcopy(model[1].gate.linear)
    found = model.to(torch.bfloat16) if narrow == "to" else getattr(model, narrow)()
    dtype = torch.float16 if narrow == "half" else torch.bfloat16
    assert found[0].weight.dtype == found[1].experts.w_in.dtype == dtype
    assert torch.equal(found[1].gate.linear.weight, router.weight)
    x = torch.randn(T, D, dtype=dtype)
    out = found[1](x)
    assert out.y.dtype == dtype
    assert out.gates[0].weights.dtype == torch.float32
    chosen = router(x.float()).topk(2)
    assert torch.equal(out.gates[0].experts.long(), chosen.indices)
    torch.testing.assert_close(out.gates[0].weights, chosen.values.softmax(-1))
    assert model.double()[1].gate.linear.weight.dtype == torch.float64


def test_a_router_that_is_to_be_narrow_is():
    model = mnn.MoE(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H))
    model.gate.keep_float32 = False
    assert {each.dtype for each in model.bfloat16().parameters()} == {torch.bfloat16}
    assert mnn.TopKGate(D, E, 2, dtype=torch.bfloat16).linear.weight.dtype == torch.bfloat16
    search = mnn.MultiGateMoE([mnn.SoftmaxGate(D, E)], mnn.ExpertLayer(E, D, H), mnn.LocalSearch(E, 4)).half().search
    assert {each.dtype for each in (search.scores, search.soft)} == {torch.float32}
    moved = mnn.SoftmaxGate(D, E).to("meta", torch.bfloat16).linear.weight
    assert (moved.dtype, moved.device.type) == (torch.float32, "meta")


def averages(model):
    ema = get_ema_multi_avg_fn(0.9)
    return [AveragedModel(model, use_buffers=True), AveragedModel(model, multi_avg_fn=ema, use_buffers=True)]


def test_the_average_of_permutations_is_a_permutation():
    """The mean of permutations need not be one, so `source` is computed again from the mean of `assigned`."""
    pytest.importorskip("scipy", reason="hardening needs scipy")
    torch.manual_seed(0)
    model = mnn.MoE(mnn.PermutedGate(mnn.SoftmaxGate(D, 8), mnn.LocalSearch(8, 6)), mnn.ExpertMLP(8, D, H))
    copies, x = averages(model), torch.randn(T, D)
    for step in range(30):
        with torch.no_grad():
            model.gate.search.scores.copy_(torch.randn(1, 8, 8))
            model.gate.gate.linear.bias.normal_()
        model(x)
        for each in copies:
            each.update_parameters(model)
            if step % 3 == 0:
                each.eval()(x)
                assert each.module.gate.search.source[0].sort().values.tolist() == list(range(8))
    assert model.gate.search.source[0].tolist() != list(range(8))
    for _ in range(50):  # the search has ended: the average converges to its permutation
        copies[1].update_parameters(model)
    copies[1].eval()(x)
    assert torch.equal(copies[1].module.gate.search.source, model.gate.search.source)
    torch.testing.assert_close(copies[1](x).y, model.eval()(x).y, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_a_loaded_average_of_permutations_is_hardened(training, compiled):
    """A state dict of a model average has the mean of `assigned` and a `source` that is no permutation."""
    pytest.importorskip("scipy", reason="hardening needs scipy")
    torch._dynamo.reset()
    searches, gates = [mnn.LocalSearch(4, 2, bound=1.0) for _ in range(2)], torch.rand(5, 4).softmax(-1)
    for search, columns in zip(searches, ([1, 3, 0, 2], [2, 0, 1, 3]), strict=True):
        with torch.no_grad():
            search.scores[0] = torch.eye(4)[columns]
        search(gates), search(gates)
    average = AveragedModel(searches[0], use_buffers=True)
    for search in (searches[0], searches[1], searches[1]):
        average.update_parameters(search)
    expected = torch.empty_like(gates)
    expected[:, [2, 0, 1, 3]] = gates
    loaded = mnn.LocalSearch(4, 2).train(training)
    for state in (average.module.state_dict(), {"assigned": searches[1].assigned}):
        loaded.load_state_dict(searches[0].state_dict())
        loaded.load_state_dict(state, strict=False)
        call = torch.compile(loaded, backend="eager") if compiled else loaded
        torch.testing.assert_close(call(gates)[0], expected)


def test_a_loaded_permutation_needs_no_graph_break():
    pytest.importorskip("scipy", reason="hardening needs scipy")
    torch._dynamo.reset()
    search, loaded, gates = mnn.LocalSearch(4, 2), mnn.LocalSearch(4, 2), torch.rand(5, 4).softmax(-1)
    search(gates), search(gates)
    loaded.load_state_dict(search.state_dict())
    compiled = torch.compile(loaded.eval(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(gates)[0], search.eval()(gates)[0])


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.9999])
@pytest.mark.parametrize("kind", ["hash", "manual"])
def test_an_averaged_table_is_the_table(kind, decay):
    """A floating-point average of equal integers may be just below them, and must not be truncated."""
    gate = mnn.HashGate(500, 64) if kind == "hash" else mnn.ManualGate(range(64))
    gate.load_state_dict(gate.state_dict())
    copies = [AveragedModel(gate, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True), *averages(gate)]
    for each in copies:
        for _ in range(5):
            each.update_parameters(gate)
        assert torch.equal(each.module.table, gate.table)
        ids = torch.arange(len(gate.table))
        assert torch.equal(each(torch.zeros(len(ids), 1), ids).experts, gate(torch.zeros(len(ids), 1), ids).experts)


def test_state_dicts_of_before_with_tables_load():
    for gate, name in ((mnn.HashGate(IDS, E), "table"), (mnn.ManualGate([2, 0, 1]), "assignment")):
        table = gate.table.flip(0)
        torch.nn.Sequential(gate).load_state_dict({f"0.{name}": table})
        assert torch.equal(gate.table, table)


@pytest.mark.parametrize("taken", [0, 3, 9])
def test_a_search_of_an_older_state_dict_is_read(taken):
    pytest.importorskip("scipy", reason="hardening needs scipy")
    gates, search, other = torch.rand(4, 5).softmax(-1), mnn.LocalSearch(5, 6), mnn.LocalSearch(5, 6)
    for _ in range(taken):
        search(gates)
    state = search.state_dict()
    del state["assigned"]
    other.load_state_dict(state)
    if taken != 3:  # a permutation, not the soft matrix of a search that goes on
        assert torch.equal(other.assigned, torch.eye(5)[other.source[0].long()].T[None].to(other.assigned.dtype))
    assert torch.equal(other.eval()(gates)[0], search.eval()(gates)[0])


def test_codes_are_there_after_to_empty_and_a_state_dict():
    """The codes (`bits`) are not in the state dict."""
    torch.manual_seed(0)
    gate, x = mnn.DSelectKGate(D, 3, 2).eval(), torch.randn(T, D)
    with torch.device("meta"):
        made = mnn.DSelectKGate(D, 3, 2).eval()
    made.to_empty(device="cpu").load_state_dict(gate.state_dict())
    assert torch.equal(made(x).gates, gate(x).gates)
    bits = [[(expert >> place) & 1 for place in (1, 0)] for expert in range(3)]
    assert made.bits.int().tolist() == bits


def with_state():
    """Modules whose state is no parameter, each changed, and a function that reads the state."""
    experts = mnn.ExpertMLP(E, D, 5)
    stable, staged = mnn.StableGate(D, E, IDS), mnn.StagedGate(mnn.SoftmaxGate(D, E), mnn.TopKGate(D, E, 1))
    competing = mnn.MoE(mnn.CompetitionGate(mnn.TopKGate(D, E, 2), experts, rate=1.0), experts)
    stable.begin_stage_two()
    staged.stage = 2
    competing(torch.randn(T, D))
    return {
        "stable": (stable, lambda each: each.stage),
        "staged": (staged, lambda each: each.stage),
        "competition": (competing, lambda each: each.gate.steps),
        "hash": (mnn.HashGate(IDS, E), lambda each: each.table.tolist()),
        "manual": (mnn.ManualGate([3, 0, 1, 2]), lambda each: each.table.tolist()),
    }


def search_with_state():
    pytest.importorskip("scipy", reason="hardening needs scipy")
    search = mnn.LocalSearch(E, 5)
    search(torch.rand(3, E))
    return search, lambda each: each.step


@pytest.mark.parametrize("name", ["stable", "staged", "competition", "hash", "manual", "local search"])
def test_every_state_is_a_tensor_that_files_of_tensors_hold(name, tmp_path):
    """safetensors, save_pretrained and offloading take tensors alone."""
    made, read = search_with_state() if name == "local search" else with_state()[name]
    state = made.state_dict()
    assert all(isinstance(each, torch.Tensor) for each in state.values())
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    again = copy.deepcopy(made)
    safetensors.save_model(made, str(tmp_path / "model.safetensors"))
    for each in again.modules():
        if hasattr(each, "stage"):
            each.stage = 1
        if isinstance(each, mnn.CompetitionGate):
            each.steps = 0
        if isinstance(each, mnn.LocalSearch):
            each.step = 0
        if hasattr(each, "codes"):
            each.reset_parameters(torch.Generator().manual_seed(3))
    safetensors.load_model(again, str(tmp_path / "model.safetensors"))
    assert read(again) == read(made)


@pytest.mark.parametrize("name", ["stable", "staged", "competition"])
def test_states_that_were_saved_as_numbers_load(name):
    made, read = with_state()[name]
    state = made.state_dict()
    (key,) = (each for each in state if each.endswith("_extra_state"))
    made.load_state_dict(state | {key: 7})
    assert read(made) == 7


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY)
def test_gates_are_float32_where_the_default_dtype_is_16_bit(name, narrow):
    """Of torch.set_default_dtype, as in Fabric's bf16-true; a constructor's dtype is obeyed."""
    if name == "permuted":
        pytest.importorskip("scipy", reason="hardening needs scipy")
    before = torch.get_default_dtype()
    torch.set_default_dtype(narrow)
    try:
        gate = EVERY[name]()
        floating = [each for each in (*gate.parameters(), *gate.buffers()) if each.is_floating_point()]
        assert all(each.dtype == torch.float32 for each in floating)
        if floating and name not in ("competition", "random"):
            made = EVERY[name](dtype=narrow)
            assert all(each.dtype == narrow for each in made.parameters())
    finally:
        torch.set_default_dtype(before)
