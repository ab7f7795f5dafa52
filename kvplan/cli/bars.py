"""Bars: how far a long command is, on a terminal. Needs the ``cli`` extra."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich import progress
from rich.console import Console

from kvplan.verification.progress import Progress

PER_SECOND: Final = 5
"""How often a bar is drawn anew."""


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
