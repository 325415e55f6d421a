"""`Ratings`, a kind of data set, and MovieLens: who watched which movie, and the rating (two tasks of COMET trees)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels.papers.data.files import Tensors, integers, read

HEADER = b"user,movie,watched,rating"
MAX_IDS = 1_000_000  # limit of users, and of movies, in MovieLens: the largest id sets the size of an embedding
SEED = 0  # draws the unwatched items and the test rows of ratings.dat, Jester and Books

_PREPARED = re.compile(r"movielens_(train|val|test)\.csv(\.gz)?")


@dataclass(frozen=True)
class Ratings(Tensors):
    """train and test are (user, movie, watched, rating), each (n,): ids int64, watched (0 or 1) and rating float32.

    Ratings of MovieLens are from 1 to 5, those of Books from 1 to 10, those of Jester from -10 to 10. A row without a
    rating has 0. In Books and Jester, "movies" are books and jokes.
    """

    name: str
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    num_users: int
    num_movies: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.train[0])} training and {len(self.test[0])} test rows, {self.num_users} users, "
            f"{self.num_movies} movies"
        )


def find(file: Path) -> tuple[str, Path] | None:
    """(kind, place) of the file's set, or None. place: ratings.dat or folder/movielens_*."""
    if file.name == "ratings.dat":
        return "MovieLens", file
    return ("MovieLens, prepared", file.parent / "movielens_*") if _PREPARED.fullmatch(file.name) else None


def load_prepared(place: Path) -> Ratings:
    """The CSVs by the authors of COMET trees; without movielens_train.csv the validation rows train: see `name`."""
    files = {m[1]: f for f in sorted(place.parent.glob(place.name)) if (m := _PREPARED.fullmatch(f.name))}
    training = "train" if "train" in files else "val"
    missing = [f"movielens_{part}.csv" for part in (training, "test") if part not in files]
    if missing:
        raise ValueError(
            f"data: expected MovieLens as movielens_val.csv and _test.csv in {place.parent}; there is no {missing[0]}"
        )
    name = "movielens" if training == "train" else "movielens (trained on its validation rows)"
    return _ratings(name, *(_prepared(files[part]) for part in (training, "test")))


def _prepared(file: Path) -> Tensor:
    lines = read(file).splitlines()
    if not lines or lines[0] != HEADER:
        raise ValueError(f"data: {file}: expected the header {HEADER.decode()}, got {(lines or [b''])[0][:60]!r}")
    rows = integers(file, lines[1:], b",", 4, 2)
    watched, rating = rows[:, 2], rows[:, 3]
    wrong = (watched < 0) | (watched > 1) | (rating < watched) | (rating > 5 * watched)
    return _checked(file, rows, wrong, 2, 0, "watched 1 and a rating from 1 to 5, or watched 0 and rating 0")


def load_published(file: Path) -> Ratings:
    """GroupLens' ratings.dat of MovieLens-1M: UserID::MovieID::Rating::Timestamp, ids from 1.

    Prepared as in COMET trees: for every rating a row is added with a random movie that the user did not rate, watched
    0 and rating 0. A fixed random tenth of all rows is the test set.
    """
    rows = integers(file, read(file).splitlines(), b"::", 4, 1)
    rows[:, :2] -= 1
    rows = _checked(file, rows, (rows[:, 2] < 1) | (rows[:, 2] > 5), 1, 1, "a rating from 1 to 5, a timestamp")
    return with_unseen(file, "movielens-1m", rows[:, 0], rows[:, 1], rows[:, 2].float())


def with_unseen(file: Path, name: str, user: Tensor, movie: Tensor, rating: Tensor) -> Ratings:
    """For every row, adds one with a random item that its user did not rate, watched 0 and rating 0. Ids are from 0.

    A fixed random tenth of all rows is the test set.
    """
    generator = torch.Generator().manual_seed(SEED)
    unwatched = _draw_unwatched(file, user, movie, generator)
    order = torch.randperm(2 * len(user), generator=generator)
    ones, zeros = torch.ones_like(rating), torch.zeros_like(rating)
    columns = ((user, user), (movie, unwatched), (ones, zeros), (rating, zeros))
    shuffled = [torch.cat(each)[order] for each in columns]
    tenth = max(len(order) // 10, 1)
    train, test = (tuple(each[part] for each in shuffled) for part in (slice(tenth, None), slice(tenth)))
    return Ratings(name, train, test, int(user.max()) + 1, int(shuffled[1].max()) + 1)


def _draw_unwatched(file: Path, user: Tensor, movie: Tensor, generator: torch.Generator) -> Tensor:
    """For every row a random movie that its user has not rated; ValueError if 200 draws find none for some row."""
    movies = int(movie.max()) + 1
    watched = (user * movies + movie).unique()
    found = torch.empty_like(movie)
    open_rows = torch.arange(len(user))
    for _ in range(200):
        found[open_rows] = torch.randint(movies, (len(open_rows),), generator=generator)
        open_rows = open_rows[torch.isin(user[open_rows] * movies + found[open_rows], watched)]
        if len(open_rows) == 0:
            return found
    count = int((user == user[open_rows[0]]).sum())
    raise ValueError(
        f"data: {file}: expected users with enough items unrated to draw some; one user has {count} ratings, "
        f"and there are {movies} items"
    )


def _checked(file: Path, rows: Tensor, wrong: Tensor, first_line: int, first_id: int, rest: str) -> Tensor:
    """The rows; ValueError if there are none, any is `wrong`, or an id is not in [0, MAX_IDS).

    For the message: first_line is the number of the first row's line, first_id the id in the file that is 0 in `rows`,
    and rest says what is expected after the ids.
    """
    expected = f"rows of a user and a movie from {first_id} to {MAX_IDS - 1 + first_id}, {rest}"
    if len(rows) == 0:
        raise ValueError(f"data: {file}: expected {expected}; got none")
    wrong = wrong | (rows[:, :2] < 0).any(1) | (rows[:, :2] >= MAX_IDS).any(1)
    if wrong.any():
        number = int(wrong.nonzero()[0])
        got = (rows[number, :2] + first_id).tolist() + rows[number, 2:].tolist()
        raise ValueError(f"data: {file}, line {number + first_line}: expected {expected}; got {got}")
    return rows


def _ratings(name: str, train: Tensor, test: Tensor) -> Ratings:
    sizes = torch.cat([train, test])[:, :2].amax(0) + 1
    parts = [(rows[:, 0], rows[:, 1], rows[:, 2].float(), rows[:, 3].float()) for rows in (train, test)]
    return Ratings(name, parts[0], parts[1], int(sizes[0]), int(sizes[1]))
