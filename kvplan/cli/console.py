"""What commands print: lines, JSON documents, a progress bar."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import click
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from kvplan._text import WIDTH
from kvplan.display.explanation import wrap_line


def _plain(value: Any) -> Any:
    return attrs.asdict(value) if attrs.has(type(value)) else str(value)


def echo_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document. A frozen value becomes an object of its fields."""
    click.echo(json.dumps(document, indent=2, default=_plain))


def plain_console() -> Console:
    """Return a console for stdout that reads no markup.

    It wraps and colours text on a terminal alone.
    """
    return Console(markup=False, highlight=False, soft_wrap=not sys.stdout.isatty())


def terminal_width() -> int:
    """Return the characters in a line of the terminal, at least 40; 120 where there is none."""
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, 40)


def wrapped(lines: Iterable[str]) -> list[str]:
    """Return lines of which none is wider than the terminal."""
    return [row for line in lines for row in wrap_line(line, terminal_width())]


def print_lines(lines: Iterable[str]) -> None:
    """Print lines; those without indent are headings, which are bold on a terminal."""
    console = plain_console()
    for line in lines:
        console.print(Text(line, style="bold" if line[:1].strip() else ""))


def progress_bar(disable: bool = False) -> Progress:
    """Return a progress bar on stderr, which is erased at the end.

    It is only drawn if stderr is a terminal.
    """
    console = Console(stderr=True)
    # FORCE_COLOR lets rich take a pipe for a terminal
    hidden = disable or not (sys.stderr.isatty() and console.is_terminal)
    return Progress(
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=hidden,
    )
