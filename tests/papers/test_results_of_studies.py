"""Results of studies: their state, and the rows that a study of permutations tests on."""

import torch

from moe_kernels.papers import results
from moe_kernels.papers.data import Ratings
from moe_kernels.papers.studies import permutation
from moe_kernels.papers.train.loop import Run
from tests.helpers.small_sets import ratings


def test_a_result_of_a_study_has_a_state_but_no_table(tmp_path, capsys):
    (tmp_path / "permutation-few.csv").write_text("arm,seed,sources\nbest,0,abc\n")
    assert results.main([str(tmp_path / "permutation-few.csv")]) == 0
    assert capsys.readouterr().out == "permutation-few.csv: stale: 1 of 1 evaluations are of other code\n\n"


def test_a_study_of_permutations_tests_on_fifty_thousand_rows_at_most(monkeypatch):
    points, tested = ratings(), []

    class Finished(Run):
        def advance(self, to, tick=None):
            tested.append([len(each) for each in self.data.test])
            assert torch.equal(self.data.test[0], points_of(len(self.data.test[0])))
            self.rows.append({"test loss": 2.0, "test watched accuracy": 0.5})

    def points_of(count):
        return torch.arange(count) % 20

    monkeypatch.setattr(permutation, "Run", Finished)
    for rows, expected in ((49_999, 49_999), (50_000, 50_000), (50_001, 50_000)):
        test = (points_of(rows), torch.zeros(rows, dtype=torch.long), torch.ones(rows), torch.ones(rows))
        many = Ratings("many", points.train, test, 20, 30)
        permutation.Permutation(experts=4, rows=40)._arm(many, "never", -1, 0)
        assert tested.pop() == [expected] * 4
