"""What commands print: lines, JSON documents, a progress bar."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import attrs
import click

from kvplan._text import WIDTH
from kvplan.display.explanation import wrap_line

T = TypeVar("T")


def _plain(value: Any) -> Any:
    return attrs.asdict(value) if attrs.has(type(value)) else str(value)


def echo_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document. A frozen value becomes an object of its fields."""
    click.echo(json.dumps(document, indent=2, default=_plain))


def terminal_width() -> int:
    """Return the characters in a line of the terminal, at least 40; 120 where there is none."""
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, 40)


def wrapped(lines: Iterable[str]) -> list[str]:
    """Return lines of which none is wider than the terminal."""
    return [row for line in lines for row in wrap_line(line, terminal_width())]


def print_lines(lines: Iterable[str]) -> None:
    """Print lines; those without indent are headings, which are bold on a terminal."""
    for line in lines:
        click.echo(click.style(line, bold=True) if line[:1].strip() else line)


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """Yield items, with a progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    with click.progressbar(items, label=label, file=sys.stderr) as bar:
        yield from bar
