"""COMET trees' data sets of ratings beside MovieLens: Jester and Books (BookCrossing), from their published files."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels.papers.data.files import read
from moe_kernels.papers.data.ratings import Ratings, with_unseen

BOOKS = "BX-Book-Ratings.csv"
JESTER = "jester_ratings.dat"
LEAST = 5  # fewest records of a user, and of a book, in the set that load_books returns


def find(file: Path) -> tuple[str, Path] | None:
    """(kind, file) of the set, or None if the file belongs to neither set."""
    if file.name == JESTER:
        return "Jester", file
    return ("Books", file) if file.name == BOOKS else None


def load_jester(file: Path) -> Ratings:
    """jester_ratings.dat: user, joke and rating from -10 to 10, separated by blanks or tabs; ids from 1.

    For every rating a row is added with a random joke that the user did not rate, with 0 as `watched` and rating. A
    fixed random tenth of all rows is the test set. Users who rated 90 % of the jokes or more are left out: they have
    too few unrated jokes to draw from. Recipes treat a rating of exactly 0 as missing.
    """
    lines = [line.split() for line in read(file).splitlines() if line.strip()]
    try:
        rows = torch.tensor([[float(cell) for cell in line] for line in lines], dtype=torch.float64)
    except ValueError as error:
        raise ValueError(f"data: {file}: expected user, joke and rating in every line: {error}") from error
    if rows.dim() != 2 or rows.shape[1] != 3:
        raise ValueError(f"data: {file}: expected lines of user, joke and rating; got an array {tuple(rows.shape)}")
    right = (rows[:, 2].abs() <= 10) & (rows[:, :2] >= 1).all(1)  # False for NaN
    if not right.all():
        raise ValueError(
            f"data: {file}: expected user and joke from 1 and a rating from -10 to 10 in every line; "
            f"got {rows[~right][0].tolist()}"
        )
    user, joke = (_numbered(rows[:, column].long()) for column in (0, 1))
    jokes = int(joke.max()) + 1
    few = torch.bincount(user) < 0.9 * jokes
    kept = few[user]
    if not kept.any():
        raise ValueError(
            f"data: {file}: expected users who rated fewer than 90 % of the {jokes} jokes; no user of {len(few)} did"
        )
    return with_unseen(file, "jester", _numbered(user[kept]), joke[kept], rows[kept, 2].float())


def load_books(file: Path) -> Ratings:
    """BX-Book-Ratings.csv of BookCrossing: "User-ID";"ISBN";"Book-Rating", a rating from 1 to 10, 0 for none given.

    As in COMET trees, users and books with fewer than 5 records are removed until every user and book has at least 5.
    For every record a row is added with a random book without a record of this user, watched 0 and rating 0. A fixed
    random tenth of all rows is the test set.
    """
    text = read(file).decode("latin-1")
    try:
        rows = list(csv.reader(io.StringIO(text), delimiter=";" if ";" in text[:200] else ",", escapechar="\\"))
    except csv.Error as error:
        raise ValueError(f"data: {file}: expected a user, a book and a rating in every line: {error}") from error
    header = [name.strip() for name in rows[0]] if rows else []
    if header != ["User-ID", "ISBN", "Book-Rating"]:
        raise ValueError(f"data: {file}: expected the header User-ID, ISBN, Book-Rating, got {header}")
    try:
        found = [(int(user), isbn.strip(), int(rating)) for user, isbn, rating in rows[1:]]
    except ValueError as error:
        raise ValueError(f"data: {file}: expected a user, a book and a rating in every line: {error}") from error
    wrong = next((row for row in found if not 0 <= row[2] <= 10), None)
    if wrong is not None:
        raise ValueError(f"data: {file}: expected ratings from 0 to 10; got {wrong}")
    users = {user: number for number, user in enumerate(sorted({user for user, _, _ in found}))}
    books = {isbn: number for number, isbn in enumerate(dict.fromkeys(isbn for _, isbn, _ in found))}
    user = torch.tensor([users[each] for each, _, _ in found])
    book = torch.tensor([books[isbn] for _, isbn, _ in found])
    rating = torch.tensor([float(each) for _, _, each in found])
    while len(user):
        kept = (torch.bincount(user)[user] >= LEAST) & (torch.bincount(book)[book] >= LEAST)
        if kept.all():
            break
        user, book, rating = user[kept], book[kept], rating[kept]
    if not len(user):
        raise ValueError(f"data: {file}: expected users and books with at least {LEAST} records each; found none")
    return with_unseen(file, "books", _numbered(user), _numbered(book), rating)


def _numbered(ids: Tensor) -> Tensor:
    """The ids, renumbered from 0 without gaps."""
    return ids.unique(return_inverse=True)[1]
