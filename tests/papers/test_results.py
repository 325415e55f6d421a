"""python -m moe_kernels.papers.results: figures and states of stored results."""

from __future__ import annotations

import argparse
import csv
import itertools
import re

import pytest

from moe_kernels.papers import recipes, results, sources, studies, train
from moe_kernels.papers.train import grids, plotting, report

OLD = "0123456789ab"


def write(path, *lines):
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(line.split(",") for line in lines)
    return path


def log_of(folder, name, *lines, now="sources"):
    columns = f"side,seed,stage,lr,step,epoch,loss,valid bits,test bits,entropy 1,seconds,{now}"
    return write(folder / name, columns, *lines)


def test_the_state_of_a_file(tmp_path):
    now = sources.digest("recipes", "manual")
    head = "side,seed,stage,test accuracy"
    (tmp_path / "all").mkdir()
    made = {
        "manual.csv": write(tmp_path / "all" / "manual.csv", head, "a,0,final,1"),
        "manual-other.csv": write(
            tmp_path / "all" / "manual-other.csv", f"{head},sources", f"a,0,final,1,{OLD}", f"b,0,final,1,{now}"
        ),
        "manual-part.csv": write(
            tmp_path / "all" / "manual-part.csv", f"{head},sources", "a,0,final,1,", f"b,0,final,1,{now}"
        ),
        "manual-third.csv": write(tmp_path / "all" / "manual-third.csv", f"{head},sources", f"a,0,final,1,{now}"),
        "search.csv": write(tmp_path / "all" / "search.csv", f"side,sources\na,{sources.digest('studies', 'search')}"),
    }
    assert results.states(tmp_path / "all") == [
        ("manual-other.csv", "stale: 1 of 2 evaluations are of other code"),
        ("manual-part.csv", "stale: 1 of 2 evaluations are of other code"),
        ("manual-third.csv", "fresh"),
        ("manual.csv", "made before results had a hash of their code"),
        ("search.csv", results.state(made["search.csv"])),
    ]


def test_every_stored_result_is_named_after_a_recipe_or_study():
    files = sorted(results.FOLDER.glob("*.csv"))
    assert files
    assert {results.recipe_of(path) for path in files} <= {*recipes.names(), *studies.names()}


def test_figures_by_hand(tmp_path, capsys):
    """The best evaluation by the validation bits counts: of smoe with seed 0 the first."""
    path = log_of(
        tmp_path,
        "competesmoe-small.csv",
        f"smoe,0,final,0.1,1,1,2,3.0,3.5,1,0.1,{OLD}",
        f"smoe,0,final,0.1,2,2,1,3.1,3.0,2,0.1,{OLD}",
        f"smoe,1,final,0.1,1,1,2,4.0,5.0,5,0.1,{OLD}",
        f"smoe,1,final,0.1,2,2,1,3.9,4.5,3,0.1,{OLD}",
        f"smoe,0,tune,0.1,2,2,1,1.0,1.0,1,0.1,{OLD}",
        f"smoe seed 2,2,running,0.1,1,1,2,9.0,9.0,1,0.1,{OLD}",
        f"fixed,0,final,0.1,2,2,1,3.0,3.6,1,0.1,{OLD}",
        f"fixed,1,final,0.1,2,2,1,3.0,4.9,1,0.1,{OLD}",
    )
    assert results.main([str(path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "competesmoe-small.csv: stale: 8 of 8 evaluations are of other code"
    assert "smoe fixed" in lines  # the header, without the run that had not ended
    assert "test bits 4.0000 ± 0.7071 4.2500 ± 0.9192" in lines
    assert "entropy 1 2.0000 ± 1.4142 1.0000 ± 0.0000" in lines
    assert "fixed - smoe 2 0.2500 ± 0.2121 0.34" in lines
    assert results.main([str(path), "--columns", "test bits", "valid bits"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "smoe 2 0.5500 ± 0.0707 0.058" in lines  # 0.5 and 0.6: t = 11 with one degree of freedom
    some = [(("smoe", 3.0, 3.5), ("smoe", 4.0, 5.0), ("fixed", 1.0, 2.0)), (("none", 1.0, None), ("none", 2.0, None))]
    runs = [
        report.History(side, 0, 0.1, "final", [{"one": one} | ({} if two is None else {"two": two})])
        for side, one, two in itertools.chain(*some)
    ]
    lines = [" ".join(line.split()) for line in results.between_columns(runs, "one", "two").splitlines()]
    assert lines[0] == "one - two seeds mean ± spread p, paired t-test"
    assert lines[2:] == ["smoe 2 -0.7500 ± 0.3536 0.2"]  # sides with two runs that have both columns


def test_curves_over_an_option_of_evaluations(tmp_path, stored, pictures):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    head = "side,seed,stage,lr,step,test accuracy,test accuracy by weight at 0.3,test accuracy by weight at 0.05"
    path = write(
        tmp_path / "vmoe.csv",
        head,
        "vmoe,0,final,1,1,0.5,,",
        "vmoe,0,final,1,2,0.6,0.4,0.1",
        "vmoe,1,final,1,2,0.6,0.2,0.1",
    )
    found = results.curves(results.read(path))
    assert list(found) == ["vmoe, by weight"]
    assert [point[:2] for point in found["vmoe, by weight"]] == [(0.05, 0.1), (0.3, pytest.approx(0.3))]
    assert results.main([str(path), "--picture", str(tmp_path / "curve.png")]) == 0
    assert (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG"
    more = "vmoe,{0},final,1,3,0.6,{1},{2}\nsoftmax,{0},final,1,3,0.{0},0.{0}5,0.2"
    path.write_text("\n".join([head, *(more.format(seed, 0.2 + seed / 10, seed / 20) for seed in (2, 4))]))
    (tmp_path / "vmoe-one.csv").write_text(f"{head}\nvmoe,0,final,1,2,0.6,0.4,0.1\n")
    for each in (path, tmp_path / "vmoe-one.csv"):
        assert results.main([str(each), "--picture", str(tmp_path / "curve.png")]) == 0
    stored("results_curves", "\n".join(pictures[1:]), tolerance=1e-6)


def test_logs_join_run_by_run(tmp_path, capsys):
    first = log_of(tmp_path, "one.csv", f"a,0,final,0.1,1,1,2,3,3,1,1,{OLD}", f"a,0,final,0.1,2,1,2,3,4,1,1,{OLD}")
    more = f"side,seed,stage,lr,step,test more,sources\na,1,final,0.1,1,7,{OLD}\na,0,final,0.1,1,8,{OLD}\n"
    (tmp_path / "two.csv").write_text(more)
    out = tmp_path / "manual.csv"
    assert results.main([str(first), str(tmp_path / "two.csv"), "--join", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-2:] == ["test more", "sources"]
    assert [(row["side"], row["seed"], row["test more"], row["test bits"]) for row in rows] == [
        ("a", "0", "8", ""),  # the later log's run of this side and seed, with a single line, replaces the two
        ("a", "1", "7", ""),
    ]
    old = write(tmp_path / "old.csv", "side,seed,stage,lr,step,test more", "a,1,tune,0.1,1,2", "b,1,final,0.1,1,3")
    results.join([tmp_path / "two.csv", old], out)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-1] == "sources"
    assert [(row["side"], row["seed"], row["stage"], row["test more"], row["sources"]) for row in rows] == [
        ("a", "1", "final", "7", OLD),
        ("a", "0", "final", "8", OLD),
        ("a", "1", "tune", "2", ""),
        ("b", "1", "final", "3", ""),
    ]
    results.join([old], out)
    assert out.read_text() == old.read_text()
    assert results.main([str(tmp_path / "none.csv")]) == 2
    assert "results: " in capsys.readouterr().err


def test_all_files_are_shown_in_the_order_of_their_names(tmp_path, monkeypatch, capsys):
    named = ["search", "manual-b", "permutation", "manual", "utilisation", "manual-c"]
    for name in named:
        write(tmp_path / f"{name}.csv", "side,seed,stage,lr,step,loss,test accuracy", "a,0,final,1,1,1,0.5")
    (tmp_path / "manual.txt").touch()
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(type(tmp_path), "glob", lambda folder, pattern: [folder / f"{name}.csv" for name in named])
    assert results.main([]) == 0
    shown = re.findall(r"^([\w-]+\.csv): ", capsys.readouterr().out, re.MULTILINE)
    assert shown == [
        f"{name}.csv" for name in ("manual-b", "manual-c", "manual", "permutation", "search", "utilisation")
    ]


def test_a_grid_has_a_panel_for_each_width_and_keep_fraction(tmp_path, monkeypatch):
    to_hex = pytest.importorskip("matplotlib.colors", reason="matplotlib is not installed").to_hex
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda canvas, path: drawn.append(canvas))
    lines = ["side,seed,stage,lr,step,epoch,loss,test accuracy"]
    for number, (width, keep) in enumerate(((100, 0.5), (1000, 0.5), (100, 0.9), (1000, 0.9))):
        for side, more in (("standard", 0), ("comet", 10)):
            for seed in (0, 2):
                rows = (
                    f"{side} {width} keep={keep},{seed},final,1,{4 * i},{i},1,{number + more + seed + i}"
                    for i in (0, 1)
                )
                lines += rows
    path = write(tmp_path / "comet_width.csv", *lines)
    assert results.main([str(path), "--picture", str(tmp_path / "grid.png")]) == 0
    write(path, *(line for line in lines if not line.startswith("standard 1000 keep=0.9")))
    assert results.main([str(path), "--picture", str(tmp_path / "grid.png")]) == 0
    last = drawn[1].axes[3]
    assert [(line.get_label(), line.get_color()) for line in last.lines] == [("comet", "C1")]
    (band,) = last.collections
    assert to_hex(band.get_facecolor()[0]) == to_hex("C1")
    assert [text.get_text() for text in drawn[1].legends[0].get_texts()] == ["standard", "comet"]
    runs = [report.History(side, 0, 0.1, "final", []) for side in ("comet", "comet 8")]
    for some in (runs[:1], runs, []):
        assert not grids.grid_picture(tmp_path / "grid.png", some, "accuracy", "none")
    axes = drawn[0].axes
    assert [axis.get_title() for axis in axes] == [
        "width 100, keep 0.5", "width 1000, keep 0.5", "width 100, keep 0.9", "width 1000, keep 0.9",
    ]  # fmt: skip
    for number, axis in enumerate(axes):
        assert [line.get_label() for line in axis.lines] == ["standard", "comet"]
        assert axis.lines[1].get_xydata().tolist() == [[0, number + 11], [1, number + 12]]  # seeds 0 and 2: + 1
        for more, line, band in zip((0, 10), axis.lines, axis.collections, strict=True):
            corners = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
            assert corners == {(at, number + more + at + seed) for at in (0, 1) for seed in (0, 2)}
            assert to_hex(band.get_facecolor()[0]) == to_hex(line.get_color())


def test_a_repetition_renews_a_result_only_if_every_number_is_equal(tmp_path, capsys):
    now = sources.digest("recipes", "competesmoe")
    stored = [
        f"smoe,0,final,0.1,1,1,2,3.0,3.5,1,0.1,{OLD}",
        f"smoe,0,final,0.1,2,2,1,3.1,3.0,2,0.1,{OLD}",
        f"smoe,1,final,0.1,1,1,2,4.0,5.0,5,0.1,{OLD}",
    ]
    path = log_of(tmp_path, "competesmoe.csv", *stored)
    again = log_of(tmp_path, "again.csv", f"smoe,0,final,0.1,1,1,2,3.0,3.5,1,0.7,{now}")  # in other time
    for line, message in (
        (f"smoe,0,final,0.1,1,1,2,3.0,3.50001,1,0.7,{now}", "test bits of smoe, seed 0, step 1: '3.5' in"),
        (f"smoe,0,final,0.1,1,1,2,3.0,3.5,1,0.7,{OLD}", "step 1 of smoe, seed 0, is not of the present code"),
        (f"smoe,2,final,0.1,1,1,2,3.0,3.5,1,0.7,{now}", "step 1 of smoe, seed 2, is not in competesmoe.csv"),
    ):
        wrong = log_of(tmp_path, "wrong.csv", line)
        assert results.main([str(path), "--renew", str(again), str(wrong)]) == 2
        assert message in capsys.readouterr().err
        assert results.state(path) == "stale: 3 of 3 evaluations are of other code"
    more = write(
        tmp_path / "more.csv",
        "side,seed,stage,lr,step,epoch,loss,valid bits,test bits,entropy 1,new,seconds,sources",
        f"smoe,0,final,0.1,1,1,2,3.0,3.5,1,0.5,0.7,{now}",
    )
    assert results.main([str(path), "--renew", str(more)]) == 2
    assert "more.csv: new of smoe, seed 0, step 1: None in competesmoe.csv, '0.5' now" in capsys.readouterr().err
    more.write_text(more.read_text().replace(",0.5,0.7,", ",,0.7,"))  # a column that this side lacks
    assert results.main([str(path), "--renew", str(more)]) == 0
    capsys.readouterr()
    path.write_text(path.read_text().replace(now, OLD))
    assert results.main([str(path), "--renew", str(again)]) == 0
    assert "2 evaluations are of the present code; stale: 1 of 3" in capsys.readouterr().out
    with path.open() as file:
        assert [row["sources"] for row in csv.DictReader(file)] == [now, now, OLD]


def commands():
    """The commands of the page of results, each as its words."""
    page = (sources.ROOT / "docs/guide/results.md").read_text()
    return [found.split() for found in re.findall(r"^\* `((?:train|study) [^`]+)`", page, re.MULTILINE)]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_command_of_a_row_is_one_of_this_program(words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    (train if words[0] == "train" else studies).add_arguments(parser, words[1:])
    args = parser.parse_args(words[1:])
    kind = recipes.find(args.recipe) if words[0] == "train" else studies.find(args.study)
    assert kind(**train.given(kind, args))


def test_every_row_has_a_command_and_every_stored_file_a_row():
    page = (sources.ROOT / "docs/guide/results.md").read_text()
    rows = re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert len(rows) >= 8
    assert [title for title, text in rows if not re.search(r"^\* `(train|study) ", text, re.MULTILINE)] == []
    named = {words[1] for words in commands()}
    assert {results.recipe_of(path) for path in results.FOLDER.glob("*.csv")} == named
