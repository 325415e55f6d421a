"""A captured training step has the bits of the eager step: on a GPU by a CUDA graph, else by helpers/tape.py."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import adam

import moe_kernels as mk
from bench import captured
from bench.captured import WARM_UP, Training, batches, compare
from moe_kernels import nn as mnn
from moe_kernels import sizes
from tests.helpers.layers import EVERY, D, E, H, layer
from tests.helpers.tape import CaptureError, Tape, record
from tests.helpers.targets import INTERPRET, TARGETS
from tests.ptx import triton_launch


@pytest.fixture(autouse=True)
def _capturable(monkeypatch):
    """torch refuses AdamW(capturable=True) for tensors on the CPU, although it computes what it computes on a GPU."""
    supported = adam._get_capturable_supported_devices
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *given, **o: [*supported(*given, **o), "cpu"])
    monkeypatch.setattr(sizes, "has_values", lambda x: False)  # as on a GPU: plans keep the rows that are not in use


@pytest.mark.parametrize(("name", "dtype"), captured.checks())
def test_a_captured_step_is_the_eager_step(name, dtype):
    assert captured.captured(name, "cpu", dtype, "cpu", record) == "ok"


@pytest.mark.parametrize("name", captured.LAYERS)
def test_the_reference_cannot_be_captured(name):
    found = captured.captured(name, "reference", "float32", "cpu", record)
    assert found == "FAILED: the capture: CaptureError: tolist would make the host wait for the device"


def wide(gate):
    """The gate with larger weights, so that not every expert gets a weight above 0."""
    for name, each in gate.named_parameters():
        if name in ("split_weight", "code.weight"):
            each.data.mul_(100)
    return gate


GPU_TARGETS = [each for each in TARGETS if each.backend != "cpu"]
SMALL = {
    "token choice": lambda: mnn.TopKGate(16, 4, 2, order="softmax_topk", noise="vmoe", importance=0.01, load=0.01),
    "capacity": lambda: mnn.TopKGate(16, 4, 2, balance=0.01, z=0.001),
    "expert choice": lambda: mnn.SoftmaxGate(16, 4),
    "tree gate": lambda: wide(mnn.TreeGate(16, 4, trees=2, entropy=0.01)),
}
POLICIES = {
    "token choice": mnn.TokenChoice(),
    "capacity": mnn.TokenChoice(1.0, priority="max"),
    "expert choice": mnn.ExpertChoice(2.0),
    "tree gate": mnn.NonzeroWeights(),
}


def launched(name: str, dtype: torch.dtype, device: str, capture) -> str:
    """The verdict on a small layer after two replays: the second starts from what the first one wrote."""
    made = mnn.MoE(SMALL[name](), mnn.ExpertMLP(4, 16, 16), POLICIES[name]).to(device, dtype)
    return compare(made, batches(24, 16, device, dtype)[: WARM_UP + 2], capture)


@pytest.mark.skipif(INTERPRET, reason="Triton's interpreter makes no launches that the tape could record")
@pytest.mark.parametrize("dtype", captured.DTYPES.values(), ids=captured.DTYPES)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "target", [each for each in TARGETS if each.backend != "cpu"], indirect=True, ids=lambda target: target.id
)
def test_the_launches_of_a_step_can_be_replayed(target, name, dtype):
    """Without a GPU a replay repeats the launches of kernels, with the arguments of the recording."""
    capture = partial(record, launches=True) if target.executed else captured.cuda_graph
    with mk.use_backend(target.backend):
        found = launched(name, dtype, target.device, capture)
    missing = target.backend == "cuda" and (dtype == torch.float32 or name == "expert choice")
    assert found.startswith("not run: ") if missing else found == "ok"


@pytest.mark.skipif(INTERPRET or torch.cuda.is_available(), reason="executes PTX for sm_90 on the CPU")
def test_launches_with_tensor_descriptors_can_be_replayed():
    pytest.importorskip("triton", reason="Triton is not installed")
    with triton_launch.capability(90), mk.use_backend("triton"):
        assert launched("capacity", torch.bfloat16, "cpu", partial(record, launches=True)) == "ok"


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-2, capturable=True, **options)


def compared(made: nn.Module, optimizer=adamw) -> str:
    """The verdict on a layer of D features."""
    return compare(made, batches(64, D, "cpu", torch.float32), record, optimizer)


def test_the_optimizer_of_a_gpu_can_be_captured():
    assert compared(layer(EVERY["topk"]()), partial(adamw, foreach=True)) == "ok"


class WithIds(nn.Module):
    """Calls a layer with ids that depend on the tokens."""

    def __init__(self, made: mnn.MoE) -> None:
        super().__init__()
        self.layer = made

    def forward(self, x):
        return self.layer(x, (x[:, 0] > 0).long())


class Coin(mnn.CompetitionGate):
    """Competes in every step if its rate is 1, else in none. The real coin is tossed on the host in every step."""

    def _draw_competition(self):
        return self.rate == 1


def competition(rate):
    return Coin(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H), rate=rate)


GATES = {name: make for name, make in EVERY.items() if name not in ("competition", "permuted")} | {
    "random": lambda: mnn.RandomGate(64),
    "competition, always": lambda: competition(1.0),
    "competition, never": lambda: competition(0.0),
    "permuted, hard": lambda: mnn.PermutedGate(EVERY["topk"](), mnn.LocalSearch(E, 1)),
}
DENSE = {"softmax": mnn.ExpertChoice(1.5)} | dict.fromkeys(
    ("tree", "tree, route", "dselect", "permuted, hard"), mnn.NonzeroWeights()
)


@pytest.mark.parametrize("name", GATES)
def test_a_step_with_any_gate_can_be_captured(name):
    assert compared(WithIds(layer(wide(GATES[name]()), DENSE.get(name)))) == "ok"


@pytest.mark.parametrize(
    ("gate", "policy"),
    [("vmoe", mnn.TokenChoice(1.05, group=16, multiple_of=4)), ("softmax", mnn.PriorityRouting(2.0))],
)
def test_a_step_with_other_policies_can_be_captured(gate, policy):
    assert compared(layer(EVERY[gate](), policy, expert_dropout=0.1, pass_through=True)) == "ok"


class Tasks(nn.Module):
    """The sum of the outputs for two tasks."""

    def __init__(self) -> None:
        super().__init__()
        gates = [wide(mnn.TreeGate(D, E, 2)), mnn.TopKGate(D, E, 2)]
        self.layer = mnn.MultiGateMoE(gates, mnn.ExpertLayer(E, D, D), mnn.LocalSearch(E, 1))

    def forward(self, x):
        out = self.layer(x)
        return replace(out, y=out.y[0] + out.y[1])


def test_a_step_with_several_tasks_can_be_captured():
    assert compared(Tasks()) == "ok"


def test_a_learning_rate_in_a_tensor_may_change_between_replays():
    given = batches(32, D, "cpu", torch.float32)
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), capturable=True)  # noqa: E731
    eager = Training(layer(mnn.TopKGate(D, E, 2)), optimizer)
    graphed = Training(copy.deepcopy(eager.layer), optimizer, tuple(map(torch.empty_like, given[0])))
    eager.warm_up(given[:WARM_UP])
    replay = record(partial(graphed.warm_up, given[:WARM_UP]), graphed.step)
    for step, batch in enumerate(given[WARM_UP:]):
        for training in (eager, graphed):
            training.optimizer.param_groups[0]["lr"].fill_(1e-2 / (step + 2))
        eager.take_step(batch, step)
        graphed.prepare(batch, step)
        replay()
        assert captured.difference(graphed.state(), eager.state()) == ""


# Planted defects.


class Reads(mnn.TopKGate):
    """Reads values of the tokens on the host, in the way that it is given."""

    def __init__(self, read) -> None:
        super().__init__(D, E, 2)
        self.read = read

    def forward(self, x, ids=None):
        self.read(x)
        return super().forward(x, ids)


READS = {
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool((x > 0).any()),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "tolist": lambda x: x[0].tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: (x > 0).nonzero(),
    "mask": lambda x: x[x > 0],
    "masked assignment": lambda x: x.clone().index_put_((x > 0,), x.new_zeros(())),
    "unique": lambda x: (x > 0).unique(),
    "repeats": lambda x: x.repeat_interleave((x[:, 0] > 0).long(), 0),
    "other device": lambda x: x.to("meta"),
    "from the host": lambda x: torch.tensor([1.0, 2.0], device=x.device),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_step_that_waits_is_refused(read):
    found = compared(layer(Reads(read)))
    assert found.startswith("FAILED: the capture: CaptureError: ")
    assert " would " in found


def test_a_gradient_that_waits_is_refused():
    def product(gate, x, ids=None):
        return (gate.linear.weight.exp().prod(-1).sum() * 0).backward()

    found = compared(layer(Reads(partial(product, mnn.TopKGate(D, E, 2)))))
    assert "aten::item in ProdBackward1 would make the host wait" in found


class Kept:
    """A policy that plans once."""

    plan = None

    def __call__(self, gate, training):
        self.plan = self.plan or mk.make_plan(gate.experts, E)
        return self.plan, gate.weights


def test_a_routing_that_is_kept_proves_nothing():
    found = compared(layer(mnn.TopKGate(D, E, 2), Kept()))
    assert found == "FAILED: step 1 has the routing of the step before, so equal bits prove nothing"


def test_tokens_that_only_swap_their_experts_prove_nothing():
    """A graph that kept the counts of its capture, so the rows of every expert, would pass otherwise."""
    kept = captured.Routing.of(mk.make_plan(torch.tensor([[0], [1], [1]]), E))
    swapped = captured.Routing.of(mk.make_plan(torch.tensor([[1], [0], [1]]), E))
    moved = captured.Routing.of(mk.make_plan(torch.tensor([[1], [0], [0]]), E))
    assert not swapped.changed(kept)
    assert not kept.changed(kept)
    assert moved.changed(kept)


@pytest.mark.parametrize(("step", "value"), [(1, "inf"), (3, "nan")])
def test_a_loss_that_is_not_finite_proves_nothing(step, value):
    given = batches(64, D, "cpu", torch.float32)
    given[WARM_UP + step - 1][1][0, 0] = float(value)
    found = compare(layer(mnn.TopKGate(D, E, 2)), given, record, adamw)
    assert found == f"FAILED: the loss of step {step} is {value}, so equal bits prove nothing"


def test_the_first_tensor_that_differs_is_named():
    one, nan = torch.tensor([1.0, 0.0]), torch.full((2,), float("nan"))
    assert captured.difference({"a": one, "b": nan}, {"b": nan.clone(), "a": one.clone()}) == ""
    assert captured.difference({"a": one, "b": one}, {"a": one}) == "b exists only in the captured training"
    assert captured.difference({"a": one}, {"a": one, "b": one}) == "b exists only in the eager training"
    for other in (-one, torch.tensor([1.0, -0.0]), one[:1], one.view(torch.int32), one.view(2, 1)):
        assert captured.difference({"a": one, "b": one}, {"a": one, "b": other}) == "b differs"


class ByAddress(mnn.TopKGate):
    """Chooses experts once for each tensor that it gets."""

    def __init__(self) -> None:
        super().__init__(D, E, 2)
        self.chosen = {}

    def forward(self, x, ids=None):
        found = super().forward(x, ids)
        return replace(found, experts=self.chosen.setdefault(x.data_ptr(), found.experts))


def test_a_routing_that_is_kept_for_a_buffer_is_found():
    assert compared(layer(ByAddress())).endswith(" differs before the first replay")


class Narrowing(mnn.TreeGate):
    """Its smooth step becomes narrower with every call."""

    def forward(self, x, ids=None):
        self.gamma *= 0.9
        return super().forward(x, ids)


def test_a_schedule_in_python_is_found():
    """The capture has the number of the first step."""
    found = compared(layer(wide(Narrowing(D, E, 2)), mnn.NonzeroWeights()))
    assert found.startswith("FAILED: ")
    assert found.endswith("differs in step 2")


class Replacing(torch.optim.Optimizer):
    """Momentum in a new tensor after every step."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for each in self.param_groups[0]["params"]:
            state = self.state[each]
            state["momentum"] = 0.9 * state.get("momentum", 0) + each.grad
            each.sub_(state["momentum"])


def test_a_state_that_is_replaced_is_found():
    """Every replay would start from the momentum of the warm-up. The state after a capture is undefined already."""
    found = compared(layer(mnn.TopKGate(D, E, 2)), Replacing)
    assert found == "FAILED: momentum of gate.linear.weight differs before the first replay"


def test_a_parameter_that_is_replaced_is_found():
    class Moving(Replacing):
        @torch.no_grad()
        def step(self):
            for each in self.param_groups[0]["params"]:
                each.data = each - each.grad

    found = compared(layer(mnn.TopKGate(D, E, 2)), Moving)
    assert found == "FAILED: gate.linear.weight differs before the first replay"


def test_a_step_that_does_not_repeat_is_found():
    class Restless(mnn.TopKGate):
        draws = torch.Generator().manual_seed(0)

        def forward(self, x, ids=None):
            return super().forward(x + torch.randn(x.shape, generator=self.draws), ids)

        def __deepcopy__(self, memo):
            made = Restless(D, E, 2)
            made.load_state_dict(self.state_dict())
            return made

    assert compared(layer(Restless(D, E, 2))).endswith(" before the first replay")


def test_a_buffer_of_the_copy_alone_is_found():
    class Copied(mnn.TopKGate):
        def __deepcopy__(self, memo):
            made = Copied(D, E, 2)
            made.load_state_dict(self.state_dict())
            made.register_buffer("more", torch.zeros(()))
            return made

    found = compared(layer(Copied(D, E, 2)))
    assert found == "FAILED: gate.more exists only in the captured training before the first replay"


# The tape itself.


def test_a_replay_computes_with_the_memory_of_the_recording():
    x, total = torch.ones(3), torch.zeros(3)

    def step() -> Tensor:
        y = x * 2
        view = y[1:]
        view += 1  # writes to y
        total.add_(y)
        torch.sub(y, 1, out=found[0])
        torch._foreach_add_([total, found[0]], 1.0)
        found.append(y)

    found = [torch.zeros(3)]
    tape = Tape()
    with tape.recording():
        step()
    tape.rewind()
    assert total.tolist() == found[0].tolist() == [0, 0, 0]
    assert found[1].isnan().all()
    for value in (1.0, 5.0):
        x.fill_(value)
        before = total.clone()
        tape.replay()
        assert found[1].tolist() == [2 * value, 2 * value + 1, 2 * value + 1]
        assert torch.equal(total, before + found[1] + 1)
        assert torch.equal(found[0], found[1])


def test_a_recording_draws_no_numbers():
    torch.manual_seed(0)
    expected = torch.randn(2, 4)
    x = torch.zeros(4)
    torch.manual_seed(0)
    replay = record(lambda: None, lambda: x.copy_(torch.randn(4)))
    for each in expected:
        replay()
        assert torch.equal(x, each)


def test_a_tape_refuses_to_follow_new_memory():
    with Tape().recording(), pytest.raises(NotImplementedError, match="set_"):
        torch.zeros(3).set_(torch.zeros(4))


def test_reading_is_allowed_outside_of_a_recording():
    with contextlib.suppress(CaptureError), Tape().recording():
        torch.zeros(3).tolist()
    assert torch.zeros(3).tolist() == [0, 0, 0]
