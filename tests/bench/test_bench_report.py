"""python -m bench: its ledger, reports and comparisons. No result here depends on a measured time."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from bench import compare, document, ledger, merging, plot, report, summary
from bench.console import console, print_lines, print_table
from moe_kernels.backends import NAMES
from moe_kernels.verify import Row
from tests.helpers.bench import PEER, run
from tests.helpers.measured import result_of, saved


def test_ledger_states(tree: Path) -> None:
    state = partial(ledger.state, "kwta", root=tree)
    assert state("cuda", []) == "never run on a GPU"
    assert state("cpu", []) == "tested on every change"
    assert state("triton", []) == "-"
    result = result_of(tree, "cuda")
    assert state("cuda", [result]) == "verified 2026-01-02 on Some GPU"
    assert state("cuda", [result_of(tree, "cuda", verdict="FAILED")]) == "FAILED 2026-01-02 on Some GPU"
    bad_check = {"memcheck": "FAILED: status 9", "racecheck": "not run: not installed"}
    assert state("cuda", [result_of(tree, "cuda", checks=bad_check)]) == "FAILED 2026-01-02 on Some GPU"
    newer = result_of(tree, "cuda", date="2026-03-04")
    assert state("cuda", [result, newer]) == "verified 2026-03-04 on Some GPU"
    assert state("cpu", [result_of(tree, "cpu", gpu=False)]) == "verified 2026-01-02 on Some CPU"


@pytest.mark.parametrize(
    "source",
    [
        "csrc/cuda/kwta.cu",
        "csrc/cuda/here.h",
        "csrc/include/moe/cuda/warp.cuh",
        "moe_kernels/ops/kwta.py",
        "moe_kernels/backends/native/kwta.py",
        "moe_kernels/backends/native/kwta_cuda.py",
        "moe_kernels/backends/native/shared.py",
        "csrc/cuda/shared.cu",
    ],
)
def test_a_result_is_stale_once_a_source_changes(tree: Path, source: str) -> None:
    result = result_of(tree, "cuda")
    (tree / source).write_text("other = 1\n")
    assert ledger.state("kwta", "cuda", [result], tree) == "stale: sources changed since 2026-01-02"


def test_sources_of_another_backend_or_operation_leave_a_result_fresh(tree: Path) -> None:
    result = result_of(tree, "cuda")
    for name in ("csrc/cpu/kwta.cpp", "csrc/include/moe/other.cuh", "csrc/cuda/ops.h", "csrc/cuda/sinkhorn.cu"):
        (tree / name).write_text("int other;\n")
    (tree / "moe_kernels/backends/native/kwta_cpu.py").write_text("SMALL = 1\n")
    assert ledger.state("kwta", "cuda", [result], tree).startswith("verified")


@pytest.mark.parametrize(
    ("name", "text", "same", "other"),
    [
        (
            "csrc/cuda/here.h",
            "// old\n#define N 4\nint f(int a,\n      int b);  // two\n",
            "#define N 4  // four\n\nint f(int a, int b);\n",
            ["#define N 4 int f(int a, int b);\n", "#define N 4\nint f(inta, int b);\n"],
        ),
        (
            "moe_kernels/ops/kwta.py",
            '"""Old."""\ndef f(a):\n    """Old.\n\n    More.\n    """\n    return "# a"  # old\n',
            '# new\ndef f(a):\n\n    """New."""\n    return "# a"\n',
            ['def f(a):\n    return "# b"\n', 'def f(a):\n    "# a"\n    return\n'],
        ),
    ],
)
def test_comments_and_layout_leave_a_result_fresh(tree: Path, name: str, text: str, same: str, other: list[str]):
    (tree / name).write_text(text)
    result = result_of(tree, "cuda")
    (tree / name).write_text(same)
    assert ledger.state("kwta", "cuda", [result], tree).startswith("verified")
    for changed in other:
        (tree / name).write_text(changed)
        assert ledger.state("kwta", "cuda", [result], tree).startswith("stale")


def test_a_kernel_that_was_interpreted_has_not_run_on_a_gpu(tree: Path) -> None:
    interpreted = result_of(tree, "cuda", gpu=False)
    assert ledger.state("kwta", "cuda", [interpreted], tree) == "never run on a GPU"


def test_results_survive_writing_and_reading(tree: Path) -> None:
    result = result_of(tree, "cuda")
    path = saved(result, tree / "results")
    assert re.fullmatch(r"some-gpu-\d{8}T\d{4}Z\.json", path.name)
    result["entries"][0]["figures"][0]["us"] = 123500.0  # four significant digits are kept
    result["entries"][0]["date"] = result["date"]
    assert merging.read(tree / "results", tree) == [result]
    again = saved(result | {"date": "2026-01-03"}, tree / "results")  # never over an earlier run
    assert {ledger.load(each)["date"] for each in (path, again)} == {"2026-01-02", "2026-01-03"}


def test_runs_of_a_device_become_one_result(tree: Path) -> None:
    old, new = (result_of(tree, "cuda", date=f"2026-01-0{day}", note="") for day in (1, 2))
    (old_entry,), (new_entry,) = old["entries"], new["entries"]
    other_figure = old_entry["figures"][0] | {"shape": "another"}
    old_entry |= {"checks": {"memcheck": "ok", "racecheck": "FAILED: status 9"}, "cases": 9, "dtype": "float32"}
    old_entry["figures"].append(other_figure)
    new_entry |= {"checks": {"memcheck": "not run: out of time", "racecheck": "ok"}}
    new_entry["figures"][0]["us"] = 1.0
    for each in (old, new):
        each["entries"][0]["date"] = each["date"]
    bfloat16 = {**old_entry, "dtype": "bfloat16"}
    old["entries"].append(bfloat16)
    elsewhere = result_of(tree, "cpu", gpu=False)
    (cpu, gpu) = merging.merged([old, elsewhere, new], tree)
    assert cpu == elsewhere
    assert gpu["date"] == "2026-01-02"
    first, second = gpu["entries"]
    assert first["checks"] == {"memcheck": "ok", "racecheck": "ok"}  # the newest that was run
    assert first["figures"] == [new_entry["figures"][0], other_figure]
    assert second == bfloat16  # the later run did not have it
    assert ledger.state("kwta", "cuda", [gpu], tree) == "FAILED 2026-01-01 on Some GPU"
    bfloat16["checks"] = {}
    (_, gpu) = merging.merged([old, elsewhere, new], tree)
    assert ledger.state("kwta", "cuda", [gpu], tree) == "verified 2026-01-01 on Some GPU"  # the oldest of its dtypes


@pytest.mark.parametrize(("later_cases", "verdict"), [(8, "FAILED"), (9, "ok")])
def test_a_failure_stands_until_as_many_cases_pass(tree: Path, later_cases: int, verdict: str) -> None:
    failed = result_of(tree, "cuda", date="2026-01-01", verdict="FAILED", note="worst: y", cases=9)
    later = result_of(tree, "cuda", note="", cases=later_cases)
    for each in (failed, later):
        each["entries"][0]["date"] = each["date"]
    (found,) = merging.merged([later, failed], tree)
    assert found["entries"][0]["verdict"] == verdict


@pytest.mark.parametrize(("measured", "verdict"), [(False, "FAILED"), (True, "ok")])
def test_a_failure_while_measured_stands_until_it_is_measured(tree: Path, measured: bool, verdict: str) -> None:
    failed = result_of(tree, "cuda", date="2026-01-01", verdict="FAILED", note="one: why")  # in not_measured
    later = result_of(tree, "cuda", note="")
    failed["entries"][0]["figures"] = []
    if not measured:
        later["entries"][0]["figures"] = []
    failed["suite"] = {"pytest": "ok"}
    for each in (failed, later):
        each["entries"][0]["date"] = each["date"]
    (found,) = merging.merged([later, failed], tree)
    assert found["entries"][0]["verdict"] == verdict
    assert found["suite"] == {"pytest": "ok (2026-01-01)"}


def test_the_run_of_the_sources_as_they_are_counts(tree: Path) -> None:
    older, newer = (result_of(tree, "cuda", date=f"2026-01-0{day}", note="") for day in (1, 2))
    newer["entries"][0]["sources"] = "of a version that was not kept"
    (found,) = merging.merged([older, newer], tree)
    assert ledger.state("kwta", "cuda", [found], tree).startswith("verified")
    older["entries"][0]["sources"] = "of a version before it"
    (found,) = merging.merged([older, newer], tree)
    assert found["entries"][0]["sources"] == "of a version that was not kept"


def test_a_result_has_a_line_for_each_figure(tree: Path) -> None:
    result = result_of(tree, "cuda")
    few = ledger.compact(result).splitlines()
    result["entries"][0]["figures"] *= 10
    many = ledger.compact(result).splitlines()
    assert len(many) == len(few) + 9
    assert sum('"direction"' in line for line in many) == 10
    assert sum('"operation"' in line for line in many) == 1


def test_measured_has_one_row_an_operation(tree: Path) -> None:
    gpu = report.measured([result_of(tree, "cuda")], tree)
    assert "| `kwta` | cuda | 21, 87 % | - | - | - |" in gpu  # 87 %: the share of the ceiling, shown for a GPU
    result = result_of(tree, "cpu", gpu=False)
    figures = result["entries"][0]["figures"]
    figures += [figures[0] | {"direction": "training"}, figures[0] | {"setting": "3 threads", "peers": {PEER: 99.0}}]
    on_cpu = report.measured([result], tree)
    assert "| `kwta` | cpu | 21 | 21 | - | - |" in on_cpu
    assert "No GPU was there" in on_cpu


def test_measured_gives_the_range_over_shapes_against_the_fastest_of_torch(tree: Path) -> None:
    result = result_of(tree, "cpu", gpu=False)
    figures = result["entries"][0]["figures"]
    figures.append(figures[0] | {"shape": "another", "peers": {"torch other": 9.5, PEER: 12.0, "package": 2.0}})
    assert "| `kwta` | cpu | 9.5 to 21 | - |" in report.measured([result], tree)


def test_measured_lists_stale_kernels_without_figures(tree: Path) -> None:
    result = result_of(tree, "cuda")
    result["entries"] += result_of(tree, "cpu", gpu=False)["entries"]
    (tree / "csrc/cuda/kwta.cu").write_text("int changed;\n")
    text = report.measured([result], tree)
    assert "| `kwta` | cuda |" not in text
    assert "| `kwta` | cpu |" in text
    assert "Not shown, as sources changed since: kwta cuda." in text


def test_document_marks_stale_figures_and_has_several_devices(tree: Path) -> None:
    gpu, cpu = result_of(tree, "cuda"), result_of(tree, "cpu", gpu=False)
    gpu["entries"][0]["figures"][0] |= {"launch_us": 3.0, "sm_mhz": 1980.0, "watts": 640.0, "throttled": "power cap"}
    text = document.document([gpu, cpu], root=tree)
    assert "(stale)" not in text
    assert "| kwta | cuda | float32 | forward | R=4 N=100 p=0.5 | cuda | 3 |  | 640 |  |  | power cap | 1980 |" in text
    assert text.index("## Some GPU") < text.index("* one: why") < text.index("## Some CPU")
    (tree / "csrc/cuda/kwta.cu").write_text("int changed;\n")
    text = document.document([gpu, cpu], root=tree)
    assert "**Stale**, because their sources changed since they ran: kwta cuda." in text
    assert "| kwta (stale) | cuda |" in text
    assert "| kwta | cpu |" in text


def test_pictures_of_a_run_show_its_figures(tree: Path) -> None:
    result = result_of(tree, "cuda")
    (first,) = result["entries"][0]["figures"]
    moving = first | {"op": "dispatch", "flops": 0, "gb_per_s": 70.0, "peers": {PEER: 2.0}}
    again = first | {"shape": "another", "gflop_per_s": 5.0, "flops": 6400, "peers": {PEER: 3.0, "other": 0.5}}
    figures = [first, again, moving]
    left, right = plot._roofline(result, figures).axes
    roof, *points = (line.get_xydata().tolist() for line in right.lines)
    assert points == [[[400 / 3200, 1.0]], [[2.0, 5.0]]]
    assert roof[1] == [100 / 8, 100]  # the ceilings of copy and product meet
    assert all(y == pytest.approx(min(8 * x, 100)) for x, y in roof)
    assert left.lines[0].get_xydata().tolist() == [[0, 70.0]]
    assert left.lines[-1].get_ydata()[0] == 8

    (axis,) = plot._peers([first, again, again | {"peers": {PEER: 4.0}}]).axes
    spans = [line.get_xydata().tolist() for line in axis.lines[:-1]]
    assert spans == [[[3, 0], [21, 0]], [[4, 0]], [[0.5, 1], [0.5, 1]], [[0.5, 1]]]  # a range and its median

    sizes = [{"R": 4, "N": n, "p": 0.5} for n in (100, 400)]
    curve = [
        first | {"us": us, "sizes": each, "ceiling_percent": 50.0} for us, each in zip((8, 64), sizes, strict=True)
    ]
    (axis,) = plot._scaling(curve).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    assert lines == {
        "cuda": [[100, 8], [400, 64]],
        PEER: [[100, 8 * 21], [400, 64 * 21]],
        "floor": [[100, 4], [400, 32]],
    }
    loads = {"shape": "T=8", "tokens": {"uniform": [2, 2, 2, 2], "zipf": [6, 1, 1, 0]}}
    uniform, zipf = plot._load(loads).axes
    assert uniform.get_title() == "uniform: busiest 1.0 x the mean, 0 idle"
    assert zipf.get_title() == "zipf: busiest 3.0 x the mean, 1 idle"
    assert [bar.get_height() for bar in zipf.patches] == [6, 1, 1, 0]


@pytest.mark.parametrize(("curves", "hidden"), [(1, 0), (3, 0), (4, 2), (6, 0)])
def test_pictures_show_no_axes_without_data(tree: Path, curves: int, hidden: int) -> None:
    (figure,) = result_of(tree, "cuda")["entries"][0]["figures"]
    axes = plot._scaling([figure | {"op": f"op {number}"} for number in range(curves)]).axes
    assert [each.get_visible() for each in axes] == [True] * curves + [False] * hidden
    assert plot._scaling([]) is None
    assert plot._peers([]) is plot._peers([figure | {"peers": {}}]) is None


def test_the_picture_of_the_readme_shows_pytorch_and_the_first_setting_alone(tree: Path) -> None:
    result = result_of(tree, "cpu", gpu=False)
    (figures,) = (entry["figures"] for entry in result["entries"])
    figures[0]["peers"] |= {"torch other": 30.0}
    drawn = plot.speedups(result)
    figures[0]["peers"] |= {"package": 0.5}
    figures += [figures[0] | {"setting": "3 threads", "peers": {PEER: 99.0}}, figures[0] | {"peers": {"package": 7.0}}]
    assert plot.speedups(result) == drawn
    figures[0]["peers"][PEER] = 40.0  # now the other one is the fastest
    assert plot.speedups(result) != drawn


def test_results_without_figures_have_no_table(tree: Path) -> None:
    empty = result_of(tree, "cpu", gpu=False, figures=[])
    assert list(report.measured_tables([empty], tree)) == []
    assert report.measured([empty], tree) == "Nothing measured yet."
    assert [device for device, *_ in report.measured_tables([empty, result_of(tree, "cuda")], tree)] == ["Some GPU"]


def test_growth_of_time_and_of_work(tree: Path) -> None:
    """From 10 us at half of the ceiling to 90 us at a sixth: the least time grows from 5 to 15 us."""
    (entry,) = result_of(tree, "cuda")["entries"]
    (figure,) = entry["figures"]
    points = [("a", 10.0, 50.0), ("between", 1.0, 1.0), ("b", 90.0, 100 / 6)]
    entry["curves"] = [figure | {"shape": shape, "us": us, "ceiling_percent": c} for shape, us, c in points]
    entry["curves"].append(figure | {"setting": "other", "shape": "c"})
    found, other = document._growth(entry)
    assert found == ("kwta", "cuda", "float32", "cuda", "a", "b", "x9", "x3", "50%", "17%")
    assert other[3:8] == ("other", "c", "c", "x1", "x1")


def test_a_report_without_results_says_so(tmp_path: Path) -> None:
    text, html = document.write([], tmp_path)
    assert "Nothing was measured yet" in text.read_text()
    assert "<h1>" in html.read_text()


@pytest.mark.parametrize(("factor", "status"), [(1.1, 0), (0.5, 0), (2.0, 1)])
def test_compare_catches_a_kernel_made_slower(tree: Path, factor: float, status: int) -> None:
    before, after = result_of(tree, "cuda"), result_of(tree, "cuda")
    after["entries"][0]["figures"][0]["us"] *= factor
    done = run("compare", *(saved(each, tree / name) for name, each in (("old", before), ("new", after))))
    assert done.exit_code == status, done.output
    assert (f"x{factor:.2f}" in done.output) == (factor != 1.1)


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_file_that_is_no_result_is_named(tree: Path, command: str) -> None:
    other = tree / "other.json"
    other.write_text("{}")
    for path, words in ((tree / "none.json", "No such file"), (other, "is not a result")):
        done = run(command, path, *([path] if command == "compare" else []))
        said = " ".join(done.output.replace("│", " ").split())
        assert (done.exit_code, words in said) == (2, True), said


def test_compare_uses_memcpy_on_a_cpu_and_skips_figures_of_one_run(tree: Path) -> None:
    before, after = (result_of(tree, "cpu", gpu=False) for _ in range(2))
    figures = after["entries"][0]["figures"]
    figures.append(figures[0] | {"shape": "new"})
    figures[0] = figures[0] | {"us": 5.0, "over_memcpy": 3.0, "peers": {PEER: 7.0}}
    (change,) = compare.changes(before, after)
    assert (change.before, change.after, change.slowdown) == (1.5, 3.0, 2.0)


def test_results_of_two_devices_are_not_compared(tree: Path) -> None:
    gpu, cpu = (saved(result_of(tree, "cuda", gpu=gpu), tree / str(gpu)) for gpu in (True, False))
    done = run("compare", gpu, cpu)
    said = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2
    assert "expected two results of one device; got Some GPU and Some CPU" in said


def test_compare_ignores_a_change_of_memcpy_alone_on_a_cpu(tree: Path) -> None:
    before, after = (result_of(tree, "cpu", gpu=False) for _ in range(2))
    after["entries"][0]["figures"][0] |= {"over_memcpy": 3.0, "peers": {PEER: 20.0}}
    (change,) = compare.changes(before, after)
    assert change.slowdown == pytest.approx(21 / 20)


def test_compare_takes_the_quotient_that_changed_least_of_those_in_both_runs(tree: Path) -> None:
    before, after = (result_of(tree, "cpu", gpu=False) for _ in range(2))
    before["entries"][0]["figures"][0] |= {"over_memcpy": 2.0, "peers": {"old": 1.0, PEER: 4.0, "other": 9.0}}
    for ratios, slowdown in (({PEER: 3.2, "other": 12.0}, 1.25), ({PEER: 2.0, "other": 10.0}, 0.9)):
        after["entries"][0]["figures"][0] |= {"over_memcpy": 4.0, "peers": {"new": 1.0, **ratios}}
        (change,) = compare.changes(before, after)
        assert change.slowdown == pytest.approx(slowdown)


def test_figures_of_a_busy_machine_are_marked(tree: Path) -> None:
    result = result_of(tree, "cpu", gpu=False)
    figure = result["entries"][0]["figures"][0]
    assert not report.figure_cells(figure)[6].endswith("!")
    figure["high_us"] = 2.1 * figure["low_us"]
    assert report.figure_cells(figure)[6].endswith("!")


def test_the_table_of_the_readme_is_rewritten_and_goes_out_of_date(tree: Path) -> None:
    results = [result_of(tree, "cuda")]
    text = report.rendered("# Title\n<!-- operations:begin -->\nold\n<!-- operations:end -->\nend\n", results, tree)
    assert "\nold\n" not in text
    assert "| `kwta` | the definition |" not in text  # this tree has no reference
    assert "| verified 2026-01-02 on Some GPU: forward x 21 |" in text
    assert text.startswith("# Title\n")
    assert text.endswith("end\n")
    assert report.rendered(text, results, tree) == text
    (tree / "csrc/cuda/kwta.cu").write_text("int changed;\n")
    assert report.rendered(text, results, tree) != text


def test_a_state_is_not_shown_with_the_ratio_of_another_device(tree: Path) -> None:
    newer = result_of(tree, "cuda") | {"device": "Another GPU", "date": "2026-02-01"}
    newer["entries"][0]["figures"] = []
    table = report.operations([result_of(tree, "cuda"), newer], tree)
    assert "| verified 2026-02-01 on Another GPU |" in table


def test_the_table_says_what_a_backend_does_not_have() -> None:
    found = {(op, name): report.lacking(op, name) for op in ("plan", "tree_gate", "kwta") for name in NAMES}
    assert {key: said for key, said in found.items() if said} == {
        ("plan", "cuda"): "; no `plan_expert_choice`, `plan_priority`"
    }
    row = next(line for line in report.operations([]).splitlines() if line.startswith("| `plan`"))
    assert row.endswith("; no `plan_expert_choice`, `plan_priority` |")


def test_a_readme_without_markers_is_an_error(tree: Path) -> None:
    with pytest.raises(ValueError, match="operations:begin"):
        report.rendered("# Title\n", [], tree)


def test_readme_of_this_checkout_is_up_to_date() -> None:
    text = report.README.read_text()
    assert report.rendered(text, merging.read()) == text, "run python -m bench report --readme"


def test_a_summary_has_the_range_over_shapes_of_each_direction(tree: Path) -> None:
    result = result_of(tree, "cuda")
    (entry,) = result["entries"]
    (first,) = entry["figures"]
    other = {"shape": "another", "us": 5.0, "gb_per_s": 70.0, "ceiling_percent": 9.0, "over_memcpy": 4.0}
    entry["figures"].append(first | other | {"peers": {PEER: 2.0, "package": 3.0}})
    entry["figures"].append(first | {"direction": "training", "over_memcpy": 8.0, "high_us": 2.5})
    entry["figures"].append(first | {"direction": "backward"})  # left out beside training
    key = ("`kwta`", "cuda", "float32")
    forward = (*key, "forward", "2", "5 to 1.23e+05", "7 to 70", "9 to 87", "1.5 to 4", f"{PEER} 2 to 21, package 3")
    training = (*key, "training (busy machine)", "1", "1.23e+05", "7", "87", "8", f"{PEER} 21")
    assert report.summary(entry, gpu=True) == [forward, training]
    assert report.table([forward], gpu=True).splitlines()[2].count("|") == report.table([], gpu=True).count("|") / 2
    on_cpu = result_of(tree, "cpu", gpu=False)["entries"][0]
    on_cpu["figures"].append(on_cpu["figures"][0] | {"setting": "3 threads", "over_memcpy": 99.0})
    assert report.summary(on_cpu, gpu=False) == [
        ("`kwta`", "cpu", "float32", "forward, 2 threads", "1", "1.5", f"{PEER} 21")
    ]


def test_a_run_prints_one_line_for_each_operation_in_100_columns(tree: Path, monkeypatch) -> None:
    result = result_of(tree, "cpu", gpu=False)
    (entry,) = result["entries"]
    entry["note"] = ""
    training = entry["figures"][0] | {"direction": "training", "peers": {PEER: 0.5}, "ceiling_percent": 9.0}
    entry["figures"].append(training)
    entry["curves"] = [training] * 3
    result["entries"].append(
        entry | {"dtype": "bfloat16", "verdict": "FAILED", "note": "worst: y", "figures": [], "curves": []}
    )
    result["not_measured"] = ["kwta R=1 float32 forward, 1 thread: out of time", "peer pot of kwta: not installed"]
    assert summary.rows(result) == [("kwta", "cpu", "FAILED: bfloat16", "21", "0.5", "9 to 87")]
    assert summary.missing(result) == ["5 figures measured; jobs for which no time was left: 1"]
    rows = [Row("kwta", "cpu", "float32", "cpu", 3, 0.0, 0.0, "ok", "")]
    rows.append(replace(rows[0], dtype="bfloat16", verdict="FAILED", note="worst: y"))
    rows += [replace(rows[0], backend=name, verdict="not run", note="no GPU") for name in ("triton", "cuda")]
    lines = summary.verdicts(rows)
    assert lines[:2] == [
        "1 of 2 kernels (operation, backend, dtype) agree with the definition",
        "FAILED kwta cpu bfloat16: worst: y",
    ]
    assert len(lines) == 3
    assert lines[2].startswith("not run: cuda, triton: ")
    monkeypatch.setattr(console, "width", 100)
    longest = [("expert_norms", "triton", "ok", "10.3 to 21.4", "10.3 to 21.4", "10.3 to 21.4")]
    with console.capture() as printed:
        print_table("Ranges over shapes and dtypes", summary.HEADER, longest)
        print_lines(lines)
    output = printed.get().splitlines()
    assert max(map(len, output)) <= 100
    assert len(output) == 1 + 5 + 3  # title, a table of one row, three lines


@pytest.mark.parametrize("command", [("predict",), ("predict", "--gpu", "H100", "--op", "expert_mlp"), ("report",)])
def test_tables_of_a_terminal_have_100_columns(command: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(plot, "draw", lambda result: {})
    out = ("--out", tmp_path) if command == ("report",) else ()
    done = run(*command, *out)
    assert done.exit_code == 0
    lines = [line for line in done.output.splitlines() if str(tmp_path) not in line]
    assert len(lines) > 5
    assert max(map(len, lines)) <= 100
    assert not any("…" in line or "`" in line for line in lines)


def test_a_table_row_names_what_a_backend_lacks_of_what_another_has(monkeypatch) -> None:
    """smooth_step, a definition alone, is lacking nowhere, also where Triton is not installed."""
    original = report.missing
    monkeypatch.setattr(
        report, "missing", lambda name, op: "Triton is not installed" if name == "triton" else original(name, op)
    )
    assert not any("smooth_step" in report.lacking("tree_gate", name) for name in NAMES)


def test_sources_are_found_in_every_folder():
    found = {path.relative_to(ledger.ROOT).as_posix() for path in ledger.sources("tree_gate", "triton")}
    kernels = "moe_kernels/backends/triton/tree_gate.py"
    packages = {f"moe_kernels/backends/triton/{name}.py" for name in ("__init__", "_tree_route", "_tree_steps")}
    cases = {"moe_kernels/cases/tree_gate.py", "moe_kernels/cases/call.py"}
    native = "moe_kernels/backends/native/tree_gate.py"
    expected = packages | cases | {"moe_kernels/ops/tree_gate.py", kernels, native}
    assert expected <= found
    called = ledger.sources("grouped_gemm", "triton")  # multiplies in the mode batch_invariant
    assert found - expected < {path.relative_to(ledger.ROOT).as_posix() for path in called}
    assert ledger.ROOT / "moe_kernels/cases/routing.py" in ledger.sources("make_plan", "cpu")  # draws the experts
    assert ledger.ROOT / "moe_kernels/backends/_rows.py" in ledger.sources("grouped_gemm", "cuda")
    assert ledger.ROOT / "moe_kernels/backends/triton/__init__.py" in ledger.sources("kwta", "triton")
    assert ledger.ROOT / "csrc/cuda/combine.cu" in ledger.sources("expert_mlp", "cuda")
    assert ledger.ROOT / "csrc/cuda/combine.cu" in ledger.sources("dispatch", "cuda")  # for its gradient
    assert ledger.ROOT / "csrc/cuda/kwta.cu" not in ledger.sources("dispatch", "cuda")
    assert ledger.ROOT / "csrc/cpu/kwta_linear.cpp" not in ledger.sources("kwta", "cpu")
    assert ledger.ROOT / "csrc/cpu/kwta_linear.cpp" in ledger.sources("kwta_linear", "cpu")
