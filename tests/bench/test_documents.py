"""The cells and lines of the report, of the README's table and of a run's summary, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from bench import document, ledger, plot, report, summary
from bench.tables import markdown, microseconds
from moe_kernels.verify import DISPUTED, Row
from tests.helpers.bench import PEER
from tests.helpers.measured import result_of


def figure_of(result: ledger.Result) -> dict[str, Any]:
    (entry,) = result["entries"]
    (figure,) = entry["figures"]
    return figure


def test_the_fastest_pytorch_code_of_each_call_counts() -> None:
    figures = [{"peers": peers} for peers in ({"package": 0.1}, {"torch a": 3.0, "torch b": 2.0, "a torch": 0.5}, {})]
    assert report.against_torch(figures) == "2"
    assert report.against_torch([*figures, {"peers": {"torch a": 12.345}}]) == "2 to 12.3"
    assert report.against_torch(figures[::2]) == report.against_torch([]) == ""


def test_a_range_whose_ends_look_alike_is_one_number() -> None:
    assert report.span([1.0004, 0.9996]) == "1"
    assert report.span([30.0, 2.0, 100.4]) == "2 to 100"


@pytest.mark.parametrize(("high", "busy"), [(4.0, False), (4.01, True)])
def test_a_busy_machine_more_than_doubles_the_tenths(tree: Path, high: float, busy: bool) -> None:
    result = result_of(tree, "cuda")
    figure = figure_of(result) | {"us": 3.0, "low_us": 2.0, "high_us": high, "peers": {PEER: 21.04, "other": 0.5}}
    assert report.unsteady(figure) == busy
    assert report.figure_cells(figure, stale=busy) == (
        "kwta" + " (stale)" * busy, "cuda", "float32", "forward", "R=4 N=100 p=0.5", "cuda",
        f"3 (2 to {high:.3g}){' !' * busy}", "7", "87%", "x1.50", f"{PEER} x21, other x0.5",
    )  # fmt: skip
    assert len(report.FIGURE_HEADER) == 11


def test_the_table_of_operations_has_the_ratios_of_the_newest_result(tree: Path) -> None:
    old, new = result_of(tree, "cuda"), result_of(tree, "cuda", date="2026-03-04")
    figure_of(new)["peers"] = {PEER: 0.5}
    new["entries"][0]["figures"].append(figure_of(old) | {"direction": "training", "peers": {PEER: 7.0}})
    cell = "verified 2026-03-04 on Some GPU: forward x 0.5, training x 7"
    for results in ([old, new], [new, old]):
        assert f"| {cell} |" in report.operations(results, tree)
    cpu = result_of(tree, "cpu", gpu=False, date="2026-05-06")  # another backend of the operation
    assert f"| {cell} |" in report.operations([cpu, new, old], tree)


def test_the_ratios_of_a_stale_kernel_are_left_out(tree: Path) -> None:
    result = result_of(tree, "cuda")
    fresh, stale = result["entries"][0], result["entries"][0] | {"dtype": "bfloat16", "sources": "before"}
    stale["figures"] = [figure_of(result) | {"peers": {PEER: 99.0}}]
    result["entries"] = [stale, fresh]
    assert report._ratios("kwta", "cuda", [result], tree) == ": forward x 21"
    result["entries"] = [stale]
    assert report._ratios("kwta", "cuda", [result], tree) == ""
    assert report._ratios("kwta", "cpu", [result], tree) == ""


def test_measured_tables_have_the_devices_and_what_is_stale_alone(tree: Path) -> None:
    result = result_of(tree, "cuda")
    bfloat16 = result["entries"][0] | {"dtype": "bfloat16"}
    first = figure_of(result)
    bfloat16["figures"] = [first | {"direction": "training", "peers": {PEER: each}} for each in (3.0, 2.0)]
    bfloat16["figures"][0]["ceiling_percent"] = 9.0
    result["entries"].append(bfloat16)
    result["entries"].append(bfloat16 | {"backend": "triton", "sources": "before"})
    ((device, title, rows, missing),) = report.measured_tables([result], tree)
    assert (device, title) == ("Some GPU", ", 2026-01-02: times as fast as PyTorch.")
    assert rows == [("`kwta`", "cuda", "21, 87 %", "-", "-", "2 to 3, 9 to 87 %")]
    assert missing == "Not shown, as sources changed since: kwta triton."
    assert list(report.MEASURED[2:]) == [
        "float32 forward", "float32 training", "bfloat16 forward", "bfloat16 training",
    ]  # fmt: skip
    ((_, title, _, missing),) = report.measured_tables([result_of(tree, "cpu", gpu=False)], tree)
    assert (title.partition("PyTorch")[2], missing) == (". No GPU was there; ratios only.", "")


def section(text: str, title: str) -> list[str]:
    """The rows of the table under a title; empty if there is none."""
    _, found, rest = text.partition(f"### {title}\n\n")
    return rest.partition("\n\n")[0].splitlines()[2:] if found else []


def test_memory_and_sensors_are_shown_where_they_were_read(tree: Path) -> None:
    result = result_of(tree, "cuda")
    figure, key = figure_of(result), "kwta | cuda | float32 | forward | R=4 N=100 p=0.5 | cuda"
    assert section(document.document([result], root=tree), "Clocks, power, energy") == []
    figure |= {"launch_us": 3.0, "throttled": ""}
    assert section(document.document([result], root=tree), "Clocks, power, energy") == []  # no sensor was read
    del figure["throttled"]
    figure |= {"sm_mhz": 1980.0, "joules_per_call": 0.00123456}
    (row,) = section(document.document([result], root=tree), "Clocks, power, energy")
    assert row == f"| {key} | 3 | 0.001235 |  |  |  |  | 1980 |"
    assert section(document.document([result], root=tree), "Memory") == []
    figure |= {"peak_mib": 3.5, "peers_peak_mib": {PEER: 7.25, "other": 12345.6}}
    (row,) = section(document.document([result], root=tree), "Memory")
    assert row == f"| {key} | 3.5 | {PEER} 7.25, other 1.235e+04 |"


def test_verdicts_and_ceilings_are_shown_with_units(tree: Path) -> None:
    result = result_of(tree, "cuda", error=0.00123456, checks={"memcheck": "ok", "racecheck": "FAILED: 9"})
    result["ceilings"] = {"cuda": {"copy": 4012.34, "bfloat16": 700.0}, "1 thread": {"float32": 12.0}}
    result["suite"] = {"pytest": "ok", "a step": "FAILED: bits"}
    text = document.document([result], root=tree)
    row = "| kwta | cuda | float32 | cuda | 3 | 0.00123 | 0 | ok | memcheck: ok, racecheck: FAILED: 9 |"
    assert section(text, "Verified against the definition") == [row]
    assert section(text, "Ceilings of this machine") == [
        "| cuda | copy | 4012 GB/s |",
        "| cuda | bfloat16 product | 700 GFLOP/s |",
        "| 1 thread | float32 product | 12 GFLOP/s |",
    ]
    assert "\n\nTest suite: pytest ok; a step FAILED: bits\n\n" in text
    result["entries"][0]["sources"] = "before"
    assert section(document.document([result], root=tree), "Verified against the definition") == [
        row.replace("| ok |", "| ok (stale) |")
    ]


def test_parts_without_content_have_no_title(tree: Path) -> None:
    result = result_of(tree, "cuda", figures=[])
    titles = ["Ceilings of this machine", "Verified against the definition", "Not run, and remarks"]
    for lines in (["one: why"], []):
        result["not_measured"] = lines
        text = document.document([result], root=tree)
        assert [line[4:] for line in text.splitlines() if line.startswith("### ")] == titles[: 2 + len(lines)]
    assert "Test suite" not in text
    assert "**Stale**" not in text


def test_calls_without_time_are_one_line_for_each_operation() -> None:
    lines = ["kwta R=1, cuda: out of time", "peer pot of kwta: out of time, perhaps", "sinkhorn B=1, cuda: out of time"]
    lines += ["kwta R=2, cuda: out of time", "one: why"]
    assert document._grouped(lines) == [
        "peer pot of kwta: out of time, perhaps",
        "one: why",
        "kwta: no time for 2 calls",
        "sinkhorn: no time for 1 call",
    ]
    assert document._grouped([]) == []


def test_the_page_has_every_picture_in_its_place(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = result_of(tree, "cuda"), result_of(tree, "cpu", gpu=False)
    drawn = {"Some GPU": {"roofline": b"one", "load": b"two"}, "Some CPU": {"peers": b"three"}}
    monkeypatch.setattr(plot, "draw", lambda result: drawn[result["device"]])
    text, html = document.write([gpu, cpu], tree / "new" / "folder", tree)
    assert (text.name, html.name) == ("report.md", "report.html")
    assert "data:image" not in text.read_text()
    page = html.read_text()
    places = [page.index(f'<img src="data:image/png;base64,{each}" alt=') for each in ("b25l", "dHdv", "dGhyZWU=")]
    captions = [page.index(document.CAPTIONS[name][:20]) for name in ("roofline", "load", "peers")]
    assert sorted([*places, *captions]) == [each for pair in zip(places, captions, strict=True) for each in pair]
    assert "picture-" not in page
    assert "<table>" in page


def test_the_picture_of_the_readme_has_the_fastest_operation_on_top(tree: Path, monkeypatch) -> None:
    """Bars from least to most, forward above training, with a stroke at the median."""
    ratios = {
        ("kwta", "forward"): (8.0, 2.0, 3.0), ("kwta", "training"): (50.0,),
        ("sinkhorn", "forward"): (10.0,), ("sinkhorn", "training"): (20.0, 15.0),
    }  # fmt: skip
    result = result_of(tree, "cpu", gpu=False)
    first = figure_of(result)
    result["entries"][0]["figures"] = [
        first | {"op": op, "direction": direction, "peers": {"torch slow": 60.0, PEER: each, "package": 1.0}}
        for (op, direction), values in ratios.items()
        for each in values
    ]
    closed, close = list[Any](), plot.plt.close
    monkeypatch.setattr(plot.plt, "close", lambda canvas: closed.append(canvas) or close(canvas))
    plot.speedups(result)
    (axis,) = closed.pop().axes
    assert [each.get_text() for each in axis.get_yticklabels()] == ["sinkhorn", "kwta"]
    spans = [line.get_xydata().tolist() for line in axis.lines[:-1]]
    assert spans == [
        [[10, 0.17], [10, 0.17]], [[10, 0.17]], [[15, -0.17], [20, -0.17]], [[20, -0.17]],
        [[2, 1.17], [8, 1.17]], [[3, 1.17]], [[50, 0.83], [50, 0.83]], [[50, 0.83]],
    ]  # fmt: skip
    assert axis.lines[-1].get_xdata() == [1, 1]
    assert [line.get_color() for line in axis.lines[:3:2]] == [line.get_color() for line in axis.legend_.get_lines()]
    assert [each.get_text() for each in axis.legend_.get_texts()] == ["forward", "training"]
    assert axis.get_title() == "measured on Some CPU, 2 threads, 2026-01-02"


def test_cells_hold_no_bars_and_times_three_digits() -> None:
    assert markdown(("a", "b"), [("x|y", 1), ("", "|")]) == "| a | b |\n| --- | --- |\n| x/y | 1 |\n|  | / |"
    assert [microseconds(each) for each in (0.012345, 9.996, 99.94, 100.4, 123456.7)] == [
        "0.0123", "10", "99.9", "100", "123457",
    ]  # fmt: skip


def rows_of(*changes: tuple[str, str, str, str]) -> list[Row]:
    return [Row(op, backend, "float32", "cpu", 3, 0.0, 0.0, verdict, note) for op, backend, verdict, note in changes]


@pytest.mark.parametrize(("cuda", "cpu_ran"), [(False, True), (True, True), (False, False)])
def test_backends_that_ran_nothing_are_named_with_the_reason(monkeypatch, cuda: bool, cpu_ran: bool) -> None:
    why = "no GPU that torch can use" if cpu_ran and not cuda else "the report says why"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    rows = rows_of(("kwta", "triton", "not run", "a"), ("kwta", "cuda", "not run", "b"), ("a", "cuda", "not run", "c"))
    rows += rows_of(("kwta", "cpu", "ok" if cpu_ran else "not run", f"{DISPUTED} one"), ("kwta", "other", "ok", ""))
    idle = "cuda, triton" if cpu_ran else "cpu, cuda, triton"
    assert summary.verdicts(rows) == [
        f"{1 + cpu_ran} of {1 + cpu_ran} kernels (operation, backend, dtype) agree with the definition",
        *[f"kwta cpu float32 {DISPUTED} one"] * cpu_ran,
        f"not run: {idle}: {why}",
    ]


def test_nothing_is_said_of_backends_if_each_ran_something() -> None:
    rows = rows_of(("kwta", "cpu", "ok", ""), ("kwta", "cuda", "FAILED", "worst: y"), ("a", "cpu", "not run", "c"))
    assert summary.verdicts(rows) == [
        "1 of 2 kernels (operation, backend, dtype) agree with the definition",
        "FAILED kwta cuda float32: worst: y",
    ]
    assert summary.verdicts([]) == ["0 of 0 kernels (operation, backend, dtype) agree with the definition"]


def test_a_summary_has_the_kernels_of_the_first_setting(tree: Path) -> None:
    result = result_of(tree, "cpu", gpu=False)
    first = figure_of(result)
    (entry,) = result["entries"]
    entry["figures"].append(first | {"direction": "training", "peers": {"package": 9.0}, "ceiling_percent": 10.0})
    entry["figures"].append(first | {"setting": "3 threads", "peers": {PEER: 99.0}, "ceiling_percent": 1.0})
    result["entries"].append(entry | {"backend": "triton", "figures": []})
    wrong = {"dtype": "bfloat16", "figures": [first | {"peers": {PEER: 2.0}}], "checks": {"repeatable": "FAILED: y"}}
    result["entries"].append(entry | wrong)
    assert summary.rows(result) == [
        ("kwta", "cpu", "FAILED: bfloat16", "2 to 21", "-", "10 to 87"), ("kwta", "triton", "ok", "-", "-", "-"),
    ]  # fmt: skip


def test_what_failed_while_measured_is_named_and_what_is_missing_counted(tree: Path) -> None:
    result = result_of(tree, "cuda", note="kwta: raised", verdict="FAILED")
    (entry,) = result["entries"]
    result["entries"].append(entry | {"note": "worst: y", "curves": entry["figures"] * 2})
    result["not_measured"] = ["kwta: raised", "a: out of time, b", "peer: not installed"]
    assert summary.missing(result) == ["FAILED kwta: raised"]
    result["not_measured"] += ["kwta R=1: out of time"] * 2
    assert summary.missing(result) == [
        "FAILED kwta: raised", "4 figures measured; jobs for which no time was left: 2",
    ]  # fmt: skip
