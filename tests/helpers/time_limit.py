"""Ends the process of a test that pytest-timeout cannot end.

pytest-timeout sends a signal, and Python handles a signal only between two of its own instructions. If a kernel in C++
never returns, faulthandler's watchdog thread, which needs no GIL, ends the process. pytest-xdist then reports a failed
test and starts another worker; without pytest-xdist the whole run ends with status 1.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest
from pytest_timeout import get_env_settings

STDERR = pytest.StashKey[int]()


def seconds(item: pytest.Item) -> float:
    """The limit of a test: its mark, or pytest-timeout's option, environment variable or setting."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    return float(get_env_settings(item.config).timeout or 0)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # pytest later replaces file descriptor 2 to capture output


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    limit = seconds(item)
    if limit > 0:  # later than pytest-timeout, whose message is better
        faulthandler.dump_traceback_later(1.25 * limit + 1, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    faulthandler.cancel_dump_traceback_later()
