"""How times, ceilings and memory are taken: numbers of samples, warm-up, and what is left as it was."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
from bench import timing, tracing


class Clock:
    """A clock that advances by what calls spend."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def spending(self, *seconds: float) -> Callable[[], float]:
        """A call that spends these seconds in turn, then the last of them again and again."""
        turns = iter(seconds)

        def call() -> float:
            self.calls += 1
            spent = next(turns, seconds[-1])
            self.now += spent
            return spent

        return call


@pytest.mark.parametrize(
    ("seconds", "budget", "rounds"),
    [
        (1.0, 7.5, 8),  # the eighth begins within the budget
        (1.0, 8.0, 9),  # so does one that begins at its end
        (1.0, 0.0, 3),  # far over the budget
        (1.0, 0.4, 5),  # ten times the budget are not yet over after three
        (1.0, 0.3, 4),  # exactly ten times are not over either
        (0.0, 1.0, 400),
    ],
)
def test_a_call_has_as_many_samples_as_fit_but_some_at_least(seconds: float, budget: float, rounds: int) -> None:
    clock = Clock()
    found = timing.interleave({"one": clock.spending(seconds)}, budget, clock)
    assert found["one"].count == clock.calls == rounds


def test_a_sample_is_the_median_with_the_first_and_the_last_tenth() -> None:
    """Of 0 to 40, and of 0 to 4, where the tenths are the least and the most."""
    assert timing.Sample.of([float(n * 7 % 41) for n in range(41)]) == timing.Sample(20.0, 4.0, 36.0, 41)
    assert timing.Sample.of([4.0, 1.0, 3.0, 0.0, 2.0]) == timing.Sample(2.0, 0.0, 4.0, 5)
    assert timing.Sample.of([3.0, 1.0]) == timing.Sample(2.0, 1.0, 3.0, 2)


def test_samples_stay_with_their_call() -> None:
    clock = Clock()
    found = timing.interleave({"one": clock.spending(1.0, 2.0, 6.0), "two": clock.spending(0.5)}, 0.0, clock)
    assert found == {"one": timing.Sample(2.0, 1.0, 6.0, 3), "two": timing.Sample(0.5, 0.5, 0.5, 3)}


@pytest.mark.parametrize(
    ("seconds", "warm_up", "repeats"),
    [
        ((9e-2, 1e-4), 2, 2),  # the first call compiles: the second is the estimate
        ((1e-4, 1.4e-4), 2, 1),
        ((1e-4, 1.2e-4), 2, 2),
        ((1e-1, 1e-4), 1, 1),  # a long call is made once, and not again to warm up
        ((3.0,), 1, 1),
    ],
)
def test_a_sample_repeats_a_short_call_for_200_microseconds(seconds, warm_up: int, repeats: int) -> None:
    clock = Clock()
    sample = timing._sampler(clock.spending(*seconds), clock)
    assert clock.calls == warm_up
    assert sample() == pytest.approx(seconds[-1])
    assert clock.calls == warm_up + repeats


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_time_is_taken(enabled: bool) -> None:
    before, seen, clock = gc.isenabled(), list[bool](), Clock()
    spend = clock.spending(1.0)
    try:
        (gc.enable if enabled else gc.disable)()
        timing.time_cpu({"call": lambda: seen.append(gc.isenabled()) or spend()}, 0.0, clock)
        assert (set(seen), gc.isenabled()) == ({False}, enabled)
        with pytest.raises(KeyError), timing.no_garbage_collection():
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(("threads", "undisturbed"), [(1, True), (2, False)])
def test_waiting_for_a_core_is_left_out_on_one_thread_alone(monkeypatch, threads: int, undisturbed: bool) -> None:
    clock = Clock()

    @contextmanager
    def undisturbed_clock():
        yield clock

    monkeypatch.setattr(timing, "undisturbed_clock", undisturbed_clock)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = timing.time_cpu({"call": clock.spending(3.0)}, 0.0)["call"]
    assert (found.median == 3.0) == undisturbed


def test_the_undisturbed_clock_subtracts_the_nanoseconds_in_the_queue(monkeypatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(timing.os, "open", lambda path, flags: {"/proc/thread-self/schedstat": 77}[path])
    monkeypatch.setattr(timing.os, "pread", lambda file, count, offset: b"9000000000 2500000000 7\n")
    monkeypatch.setattr(timing.os, "close", closed.append)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 10.0)
    with timing.undisturbed_clock() as clock:
        assert clock() == 7.5
        assert closed == []
    assert closed == [77]

    def missing(path, flags):
        raise FileNotFoundError(path)

    monkeypatch.setattr(timing.os, "open", missing)
    with timing.undisturbed_clock() as clock:
        assert clock() == 10.0
    assert closed == [77]


def test_samplers_call_on_the_first_inputs_on_a_cpu(monkeypatch) -> None:
    given: list[tuple[str, int]] = []
    calls = {name: lambda inputs, name=name: given.append((name, inputs)) for name in ("one", "two")}
    monkeypatch.setattr(timing, "launchers", lambda *given: pytest.fail("on a CPU there are no graphs"))
    with timing.samplers(calls, [7, 8], "cpu") as found:
        assert found["two"]() > 0
    assert set(given) == {("one", 7), ("two", 7)}


def test_samplers_launch_all_sets_on_a_gpu(monkeypatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(timing, "host_sync_error", lambda call: "waits" if call.func is calls["waits"] else "")
    monkeypatch.setattr(timing, "_graph", lambda call, sets: f"graph of {len(sets)}")
    monkeypatch.setattr(timing, "_between_events", lambda launch: 6.0 if launch == "graph of 3" else len(launch()))
    calls = {"captured": lambda inputs: pytest.fail("not in a graph"), "waits": given.append}
    with timing.samplers(calls, [7, 8, 9], "cuda") as found:
        assert {name: sample() for name, sample in found.items()} == {"captured": 2.0, "waits": 1.0}
    assert given == [7, 8, 9]


def test_a_call_that_waits_for_the_gpu_is_told_by_its_second_call(monkeypatch) -> None:
    modes, called = [], []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert timing.host_sync_error(lambda: called.append(list(modes))) == ""
    assert (called, modes) == ([[], ["error"]], ["error", "default"])

    def waits() -> None:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing operation\nmore")

    assert timing.host_sync_error(waits) == "called a synchronizing operation"
    assert modes[-1] == "default"


def test_a_graph_is_warmed_up_on_a_stream_and_captures_a_call_on_every_set(monkeypatch) -> None:
    order: list[object] = []

    @contextmanager
    def block(name):
        order.append(f"{name}:")
        yield
        order.append(f"end of {name}")

    def stream(name):
        return SimpleNamespace(name=name, wait_stream=lambda other: order.append(f"{name} waits for {other.name}"))

    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda given: block(given.name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: "replayed"))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: block("graph"))
    found = timing.launchers({"eager": order.append, "captured": order.append}, [7, 8], {"eager"})
    warm_up = ["side waits for main", "side:", 7, 7, "end of side", "main waits for side", "wait"]
    assert order == [*warm_up, "graph:", 7, 8, "end of graph"]
    assert found["captured"]() == "replayed"
    assert len(order) == 11
    found["eager"]()
    assert order[11:] == [7, 8]


def test_events_are_recorded_while_the_gpu_is_kept_busy(monkeypatch) -> None:
    """So that the host's time to launch is not in between."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 8.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    assert timing._seconds(lambda: order.append("launch"), 4) == pytest.approx(2e-3)
    assert order == ["sleep", "event", "launch", "event", "wait"]


@pytest.mark.parametrize(
    ("taken", "budget", "calls"),
    [((1.0, 2.0, 9.0), 0.0, 3), ((0.25,) * 9, 1.0, 4), ((0.25,) * 9, 1.1, 5), ((1.0,) * 90, 1e9, 50)],
)
def test_launching_is_timed_up_to_50_times_but_3_at_least(monkeypatch, taken, budget: float, calls: int) -> None:
    """Waiting for the GPU is no part of it."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock))
    waiting = Clock()
    monkeypatch.setattr(torch.cuda, "synchronize", waiting.spending(1.0))
    found = timing.launch_seconds(clock.spending(*taken), budget)
    assert found == sorted(taken[:calls])[calls // 2]
    assert clock.calls == waiting.calls == calls


@pytest.mark.parametrize(("device", "size", "side"), [("cpu", 2**23, 1024), ("cuda", 2**29, 8192)])
def test_a_ceiling_is_of_a_copy_or_product_of_fixed_size(monkeypatch, device: str, size: int, side: int) -> None:
    """Products of 1024 rows on a CPU: of 8192 they would take minutes."""
    taken, products = [], []
    empty = torch.empty

    def sample(calls, *given):
        taken.append((list(calls), given[-2:]))
        return {name: timing.Sample(2.0, 1.0, 9.0, 3) for name in calls}

    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype, device="meta"))
    monkeypatch.setattr(timing, "_product", lambda *given: products.append(given) or (lambda _: None))
    monkeypatch.setattr(timing, "launchers", lambda calls, sets: calls | {"sets": sets})
    monkeypatch.setattr(timing, "time_gpu", sample)
    monkeypatch.setattr(timing, "time_cpu", sample)
    if device == "cuda":
        monkeypatch.setattr(timing, "time_gpu", lambda calls, *given: sample(calls, calls.pop("sets"), *given))
    found = timing.ceilings(device, [torch.float32, torch.float16], 0.75)
    dtypes = [torch.float32, torch.float16] if device == "cuda" else [torch.float32]
    names = ["float32", "float16"][: len(dtypes)]
    assert products == [(side, dtype, device) for dtype in dtypes]
    assert found == pytest.approx({"copy": size / 1e9} | dict.fromkeys(names, side**3 / 1e9))
    if device == "cuda":
        assert taken == [(["copy", *names], (2, 0.75))]
    else:
        assert [each for each, _ in taken] == [["copy", *names]]


def test_the_product_of_a_ceiling_is_square_and_of_its_dtype(monkeypatch) -> None:
    given = []
    monkeypatch.setattr(torch, "mm", lambda a, b, *, out: given.extend((a, b, out)))
    timing._product(4, torch.bfloat16, "cpu")(None)
    assert [(tuple(each.shape), each.dtype) for each in given] == [((4, 4), torch.bfloat16)] * 3
    assert len({each.data_ptr() for each in given}) == 3


def test_output_to_stderr_is_discarded_while_a_call_is_traced_and_no_longer(capfd) -> None:
    count = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0

    def raises() -> None:
        os.write(2, b"of the profiler")
        raise KeyError

    with pytest.raises(KeyError), tracing.traced("cpu"):
        raises()
    os.write(2, b"of the bench")
    assert capfd.readouterr().err == "of the bench"
    if count:
        assert len(os.listdir("/proc/self/fd")) == count


def test_a_call_without_memory_has_a_peak_of_nothing() -> None:
    assert tracing.peak_bytes(lambda: None, "cpu") == 0


def test_the_peak_on_a_gpu_is_what_a_call_adds(monkeypatch) -> None:
    held, order = {"now": 300, "peak": 900}, []

    def call() -> None:
        order.append("call")
        held["peak"] = held["now"] + 250

    def reset() -> None:
        order.append("reset")
        held["peak"] = held["now"]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["peak"])
    assert tracing.peak_bytes(call, "cuda") == 250
    assert order == ["wait", "reset", "call", "wait"]
