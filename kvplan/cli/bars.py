"""Bars: how far a long command is, on a terminal. Needs the ``cli`` extra."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from rich import progress
from rich.console import Console

Progress = Callable[[float], object]
Item = TypeVar("Item")

PER_SECOND: Final = 5
"""How often a bar is drawn anew."""


def untold(share: float) -> None:
    """Tells nobody."""


def part(progress: Progress, number: int, of: int) -> Progress:
    """The progress of one of several equal parts, by its number from 0."""
    return lambda share: progress((number + share) / of)


def told(items: Sequence[Item], progress: Progress) -> Iterator[Item]:
    """The items, one after the other; when the next one is asked for, the one before is done."""
    for done, item in enumerate(items, 1):
        yield item
        progress(done / len(items))


@contextmanager
def bar(what: str) -> Iterator[Progress]:
    """A bar on stderr that is gone when all is done; what it gives is told how much is done, from 0 to 1.

    Nothing is drawn where stderr is no terminal. The console leaves colour out where NO_COLOR says so.
    """
    console = Console(stderr=True)
    shown = progress.Progress(
        console=console,
        transient=True,
        refresh_per_second=PER_SECOND,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not (sys.stderr.isatty() and console.is_terminal),
    )
    with shown:
        task = shown.add_task(what, total=1.0)
        yield lambda share: shown.update(task, completed=share)
