"""``kvplan demo``: requests between engines that differ, one line each. Needs the ``cli`` extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvplan._text import size
from kvplan.cli import demo
from kvplan.cli.bars import Progress, bar
from kvplan.cli.options import echo_json, json_option
from kvplan.cli.trials import Trial

Tried = tuple[demo.Case, Trial]

WIDE: Final = 120
"""Columns that the whole table takes. A narrower terminal gets less of it, a pipe or a file all."""

COLUMNS: Final = ("model", "prefill", "decode", "workers", "descriptors", "of bytes", "moved", "verified")

INTRODUCTION: Final = """\
One request of {tokens} tokens moves from a prefill engine to a decode engine of
another shape, on each line below: kvplan plans the pair, binds scattered blocks,
and copies the byte ranges in fake memory.

Verified means that every byte of the decode workers' blocks was checked by its
coordinates. Each byte of the request is the one that belongs there and was
written once, and no other byte was written.
"""


@click.command("demo", short_help="Move a request between engines that differ, and check every byte.")
@json_option
def demo_command(as_json: bool) -> int:
    """Move one request between pairs of engines that differ, on real model geometry, and check every byte.

    \b
    kvplan demo
    """
    tried = _collect() if as_json else _print()
    if as_json:
        cases = [{"model": case.model, **trial.to_json()} for case, trial in tried]
        echo_json({"tokens": list(demo.TOKENS), "cases": cases})
    return 0 if all(trial.report.ok for _, trial in tried) else 1


def _collect() -> list[Tried]:
    with bar("demo") as progress:
        return list(demo.trials(progress))


def _print() -> list[Tried]:
    """Move the requests, in a table that grows where it is seen to."""
    start, stop = demo.TOKENS
    terminal = Console().is_terminal
    console = Console() if terminal else Console(width=WIDE)
    console.print(INTRODUCTION.format(tokens=f"{stop - start:,}"), soft_wrap=True)
    columns = COLUMNS if console.width >= WIDE else [key for key in COLUMNS if key not in ("workers", "moved")]
    table = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False)
    for key in columns:
        sides = key in ("prefill", "decode")
        table.add_column(key, justify="left" if sides or key == "model" else "right", no_wrap=not sides)
    tried = []
    with _growing(table, console) if terminal else bar("demo") as progress:
        for case, trial in demo.trials(progress):
            row = _row(case, trial)
            table.add_row(*(row[key] for key in columns))
            tried.append((case, trial))
    if not terminal:
        console.print(table)
    return tried


@contextmanager
def _growing(table: Table, console: Console) -> Iterator[Progress]:
    """The table on a terminal, drawn anew with each progress."""
    with Live(table, console=console, auto_refresh=False) as live:
        yield lambda share: live.refresh()


def _row(case: demo.Case, trial: Trial) -> dict[str, str | Text]:
    """One line of the demo, by column."""
    report = trial.report
    lengths = sorted({length for pair in trial.pairs for length in pair.lengths})
    return {
        "model": case.model,
        "prefill": _words(case.src),
        "decode": _words(case.dst),
        "workers": f"{len(trial.request.sources)} -> {len(trial.request.destinations)}",
        "descriptors": f"{report.num_descriptors:,}",
        "of bytes": "-".join(dict.fromkeys((f"{lengths[0]:,}", f"{lengths[-1]:,}"))),
        "moved": size(report.num_bytes),
        "verified": Text("yes", style="green") if report.ok else Text(f"NO: {report.failures[0][0]}", style="bold red"),
    }


def _words(side: str) -> str:
    """A side in fewer letters, for a column of a table."""
    return side.replace("layout=", "").replace(",", " ")
