"""The loaders of SARCOS, Jester and Books, on small files that these tests write in the published formats."""

from __future__ import annotations

import re

import pytest
import torch

from moe_kernels.papers import data


def mat(folder, **changed):
    """Writes the two files of SARCOS, with few rows of 21 inputs and 7 torques, and returns their arrays by name."""
    io = pytest.importorskip("scipy.io", reason="scipy is not installed")
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    draw = numpy.random.default_rng(0)
    rows = {name: draw.normal(3, 2, (count, 28)) for name, count in (("sarcos_inv", 60), ("sarcos_inv_test", 20))}
    rows |= changed
    for name, content in rows.items():
        io.savemat(folder / f"{name}.mat", {name: content})
    return rows


def test_sarcos_from_its_two_files(tmp_path):
    rows = mat(tmp_path)
    found = data.load(tmp_path)
    assert str(found) == "sarcos: 60 training and 20 test rows of 21 inputs, 7 outputs"
    train = torch.from_numpy(rows["sarcos_inv"])
    mean, spread = train.mean(0), train.std(0, unbiased=False)
    expected = (torch.from_numpy(rows["sarcos_inv_test"]) - mean) / spread
    torch.testing.assert_close(torch.cat(found.test, 1).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(data.load(tmp_path / "sarcos_inv_test.mat").train[0], found.train[0])


def test_columns_of_sarcos_are_scaled_if_they_vary(tmp_path):
    rows = mat(tmp_path)
    for part in rows.values():
        part[:, 3], part[:, 27] = 5, (part[:, 27] > 3) * 2  # constant; of variance below 1
    rows["sarcos_inv"][:, 4] = [1.0, -1.0] * 30  # of mean 0 and variance 1
    rows["sarcos_inv_test"][0, 3] = 7
    mat(tmp_path, **rows)
    found = data.load(tmp_path)
    x, y = found.train
    assert not x[:, 3].any()
    assert found.test[0][:, 3].tolist() == [2.0] + [0.0] * 19
    assert x[:, 4].tolist() == [1.0, -1.0] * 30
    torch.testing.assert_close(y[:, 6].std(unbiased=False), torch.tensor(1.0))
    assert (x.shape, y.shape) == ((60, 21), (60, 7))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sarcos_inv", [[1.0] * 27], "expected sarcos_inv to be floating point (n, 28), n > 0; got float64 (1, 27)"),
        ("sarcos_inv", [[float("nan")] * 28], "expected finite numbers in sarcos_inv; got nan"),
        ("sarcos_inv", [["a"] * 28], "expected sarcos_inv to be floating point (n, 28)"),
    ],
)
def test_a_wrong_sarcos_file_is_an_error(tmp_path, name, content, message):
    mat(tmp_path, **{name: content})
    with pytest.raises(ValueError, match=re.escape(message)):
        data.load(tmp_path)
    (tmp_path / f"{name}.mat").write_bytes(b"MATLAB")
    with pytest.raises(ValueError, match="is no MATLAB file"):
        data.load(tmp_path)
    (tmp_path / f"{name}.mat").unlink()
    with pytest.raises(ValueError, match=r"expected SARCOS as sarcos_inv\.mat and sarcos_inv_test\.mat; there is no"):
        data.load(tmp_path / "sarcos_inv_test.mat")


def pairs(found):
    """The rating of every row by (user, item, watched)."""
    columns = [torch.cat(each).tolist() for each in zip(found.train, found.test, strict=True)]
    return {(u, m, w): r for u, m, w, r in zip(*columns, strict=True)}


def test_jester_from_its_file(tmp_path):
    """For each rating the loader adds a joke that the user did not rate. It leaves out users who rated 90 % of the
    jokes or more."""
    rated = {(user, joke): (user * joke) % 20 - 10 + 0.25 for user in (1, 2, 5) for joke in range(user, 20, 2)}
    rated |= {(7, joke): 2.0 for joke in range(1, 18)}
    most = {(3, joke): 1.0 for joke in range(1, 21)} | {(9, joke): 1.0 for joke in range(1, 19)}  # 20 and 18 of 20
    lines = [f"{user}\t\t{joke}\t\t{rating}" for (user, joke), rating in (rated | most).items()]
    (tmp_path / "jester_ratings.dat").write_text("\n".join(lines) + "\n")
    found = data.load(tmp_path)
    assert (found.name, found.num_users) == ("jester", 4)
    (tmp_path / "jester_ratings.dat").write_text("\n\n" + " \n".join(lines))
    assert pairs(data.load(tmp_path)) == pairs(found)
    every = pairs(found)
    users = {1: 0, 2: 1, 5: 2, 7: 3}
    for (user, joke), rating in rated.items():
        assert every[users[user], joke - 1, 1.0] == rating
    unseen = [(user, joke) for user, joke, watched in every if not watched]
    assert all((user, joke, 1.0) not in every and every[user, joke, 0.0] == 0 for user, joke in unseen)
    assert len(found.train[0]) + len(found.test[0]) == 2 * len(rated)
    for line, message in {
        "1\t\t2\t\t11.0": r"a rating from -10 to 10 in every line; got \[1.0, 2.0, 11.0\]",
        "1\t\t2\t\tnan": "a rating from -10 to 10",
        "0\t\t2\t\t1.0": r"user and joke from 1 and .*; got \[0.0, 2.0, 1.0\]",
        "1\t\t2\t\tx": "joke and rating in every line: could not convert string to float: b'x'$",
        "1\t\t2\t\t3\n1\t\t2": r"joke and rating in every line: expected sequence of length 3 at dim 1 \(got 2\)$",
        "1\t\t2": r"user, joke and rating; got an array \(1, 2\)",
        "": r"user, joke and rating; got an array \(0,\)",
        "1\t\t1\t\t5.0": "fewer than 90 % of the 1 jokes; no user of 1 did",
    }.items():
        (tmp_path / "jester_ratings.dat").write_text(line)
        with pytest.raises(ValueError, match=message):
            data.load(tmp_path)


def test_books_from_its_file(tmp_path):
    """The loader removes users and books with fewer than five records, until all that are left have five or more."""
    lines = ['"User-ID";"ISBN";"Book-Rating"']
    lines += [f'"{user}";"04{book}X";"{(user + book) % 11}"' for user in range(10, 17) for book in range(6)]
    lines += [f'"99";"rare{book}";"5"' for book in range(9)]  # the loader removes these books, and so user 99
    lines += [f'"98";"{book}";"5"' for book in ("040X", "041X", "042X", "043X", "rare0")]  # and then user 98
    lines += ['"10";"once\\";too";"5"']
    (tmp_path / "BX-Book-Ratings.csv").write_bytes("\n".join(lines).encode("latin-1"))
    with pytest.raises(ValueError, match="one user has 6 ratings, and there are 6 items"):
        data.load(tmp_path)  # every user left has read every book left
    lines += [f'"{user}";"05{book}";"7"' for user in range(20, 26) for book in range(6)]
    (tmp_path / "BX-Book-Ratings.csv").write_bytes("\n".join(lines).encode("latin-1"))
    found = data.load(tmp_path)
    assert (found.name, found.num_users, found.num_movies) == ("books", 13, 12)
    text = "\n".join(lines).replace('"12"', '"-12"').replace('"13"', '"1000000000000"')  # user ids: any whole numbers
    (tmp_path / "BX-Book-Ratings.csv").write_bytes(text.encode("latin-1"))
    assert data.load(tmp_path).num_users == 13
    every = pairs(found)
    assert every[0, 0, 1.0] == 10
    assert every[1, 0, 1.0] == 0  # the user read the book, but gave no rating
    assert sum(watched for _, _, watched in every) == 7 * 6 + 6 * 6
    (tmp_path / "BX-Book-Ratings.csv").write_text("x" * 200_000)  # longer than csv's limit of a field
    with pytest.raises(ValueError, match=r"BX-Book-Ratings\.csv: expected a user, a book and a rating"):
        data.load(tmp_path)
    (tmp_path / "BX-Book-Ratings.csv").write_text("User;Book\n")
    with pytest.raises(ValueError, match="expected the header User-ID, ISBN, Book-Rating"):
        data.load(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("7;04X;5;6", r"a user, a book and a rating in every line: too many values to unpack \(expected 3.*\)"),
        ("7;04X", r"a user, a book and a rating in every line: not enough values to unpack \(expected 3, got 2\)"),
        ("x;04X;5", r"a user, a book and a rating in every line: invalid literal for int\(\) with base 10: 'x'"),
        ("7;04X;5.5", r"a user, a book and a rating in every line: invalid literal for int\(\) with base 10: '5.5'"),
        ("7; 04X;11", r"ratings from 0 to 10; got \(7, '04X', 11\)"),
        ("7;04X;-1", r"ratings from 0 to 10; got \(7, '04X', -1\)"),
    ],
)
def test_a_wrong_line_of_books_is_an_error(tmp_path, line, message):
    path = tmp_path / "BX-Book-Ratings.csv"
    path.write_text(f"User-ID;ISBN;Book-Rating\n7;01X;0\n7;02X;10\n{line}\n")
    with pytest.raises(ValueError, match=f"^data: {path}: expected {message}$"):
        data.load(tmp_path)


@pytest.mark.parametrize(
    ("users", "books", "message"),
    [
        (0, 0, "expected users and books with at least 5 records each; found none"),
        (4, 5, "expected users and books with at least 5 records each; found none"),
        (5, 4, "expected users and books with at least 5 records each; found none"),
        (5, 5, ".* one user has 5 ratings, and there are 5 items.*"),
    ],
)
def test_users_and_books_have_five_records(tmp_path, users, books, message):
    lines = [f"{user};0{book}X;10" for user in range(users) for book in range(books)]
    (tmp_path / "BX-Book-Ratings.csv").write_text("\n".join(["User-ID;ISBN;Book-Rating", *lines]))
    with pytest.raises(ValueError, match=f"^data: {tmp_path}/BX-Book-Ratings.csv: {message}$"):
        data.load(tmp_path)


def test_a_blank_set_has_a_row_of_zeros_in_each_part():
    ids = torch.arange(4)
    pictures, numbers = torch.ones(4, 6), torch.ones(4)
    sets = {
        data.Images("one", pictures, ids, pictures[:2], ids[:2], ("a", "b", "c", "d"), (1, 3, 2)): (1, 6),
        data.Table("two", (torch.ones(4, 5), torch.ones(4, 2)), (torch.ones(3, 5), torch.ones(3, 2))): (1, 5),
        data.Ratings("three", (ids, ids, numbers, numbers), (ids, ids, numbers, numbers), 7, 9): (1,),
        data.Text("four", ids.byte(), ids.byte(), ids.byte(), b"abcd"): (5,),
    }
    for given, shape in sets.items():
        found = data.blank(data.describe(given), 5)
        assert type(found) is type(given)
        assert data.describe(found) == data.describe(given)
        for name, value in vars(found).items():
            parts = value if isinstance(value, tuple) and name in ("train", "test") else (value,)
            others = getattr(given, name) if len(parts) > 1 else (getattr(given, name),)
            for part, other in zip(parts, others, strict=True):
                if not isinstance(part, torch.Tensor):
                    assert part == other
                    continue
                assert not part.any()
                assert (len(part), part.dtype, part.shape[1:]) == (shape[0], other.dtype, other.shape[1:])
