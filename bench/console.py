"""Output of the bench's commands, and their options that take lists."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

WIDTH = 100  # columns of tables whose cells wrap
SILENT_SECONDS = 5  # between lines of progress in a file

console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 180  # without a terminal rich would take 80


def words(values: Iterable[str] | None) -> tuple[str, ...]:
    """The values of an option that may be repeated, and in which commas separate values."""
    return tuple(word for value in values or () for word in value.split(",") if word)


def known_words(option: str, words: tuple[str, ...], known: Iterable[str]) -> tuple[str, ...]:
    for word in words:
        if word not in known:
            raise typer.BadParameter(f"{option} must be one of {', '.join(known)}; got {word!r}")
    return words


def sizes(text: str | None) -> dict[str, int | float]:
    """The option --size, such as "T=4096,D=256": names and numbers."""
    found: dict[str, int | float] = {}
    for word in words([text or ""]):
        name, equals, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not name or not equals or number <= 0:
            raise typer.BadParameter(f"--size must be NAME=NUMBER, several with commas, such as T=4096; got {word!r}")
        found[name] = int(number) if number == int(number) and "." not in value else number
    return found


class _Beat:
    """Prints what goes on every few seconds, for output that is no terminal."""

    def __init__(self, text: str) -> None:
        self.text, self._began, self._ended = text, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)

    def __enter__(self) -> _Beat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def update(self, text: str) -> None:
        self.text = text

    def _print(self) -> None:
        while not self._ended.wait(SILENT_SECONDS):
            console.print(f"{self.text}; {time.monotonic() - self._began:.0f} s so far", highlight=False)


class Status(Protocol):
    def update(self, text: str) -> None: ...


def status(text: str) -> AbstractContextManager[Status]:
    """Says what goes on while the block runs: beside a spinner in a terminal, else at once and every few seconds."""
    if not console.is_terminal:
        console.print(text, highlight=False)
    return console.status(text) if console.is_terminal else _Beat(text)


class _Lines(Progress):
    """A progress whose state is printed every few seconds, for output that is no terminal."""

    def __init__(self) -> None:
        super().__init__(disable=True)
        self._beat = _Beat("beginning")

    def __enter__(self) -> _Lines:
        self._beat.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._beat.__exit__(*error)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        task = self.tasks[task_id]
        self._beat.update(f"{task.description}, {task.completed:g} of {task.total:g}")


def progress() -> Progress:
    return Progress(console=console, transient=True) if console.is_terminal else _Lines()


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def print_table(
    title: str, header: tuple[str, ...], rows: Iterable[Sequence[str]], *, width: int | None = None
) -> None:
    """width: columns of a table without borders, whose cells wrap."""
    table = Table(*header, title=title, title_justify="left", box=box.SIMPLE_HEAD if width else box.HEAVY_HEAD)
    table.padding = (0, 0, 0, 1) if width else table.padding
    for column in table.columns:
        column.overflow = "fold"  # rich would cut a long name
    for row in rows:
        table.add_row(*row)
    (console if width is None else Console(width=width, file=console.file)).print(table)
