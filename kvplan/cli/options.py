"""Options: the words that commands have in common. Needs the ``cli`` extra."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import click
from rich.console import Console
from rich.text import Text

from kvplan.cli.sides import BITS
from kvplan.models.layouts import LETTERS, ORDERS

POOL: Final = 4096
"""Blocks of an engine that is only explained or shown, where a side doesn't say."""

Command = TypeVar("Command", bound=Callable[..., Any])

SIDE: Final = (
    "a comma list of tp, pp, dcp, pcp, interleave, block (or auto), blocks, kernel, pad (numbers), "
    f"layout ({', '.join(ORDERS)}: the order in memory, {LETTERS}; vLLM's NHD is LBNHC, HND is LBHNC), "
    "kv (content: K and V of a head side by side; axis: K, then V, inside block and layer; split: in regions of their "
    "own), conv (DS, SD), scales (inline, page, region), stages (layers of each, 10+22), shared, spread "
    "(1 or 0) and draft (a shipped model). Left out: tp=1,block=16,layout=LBHNC,kv=content"
)
model_argument = click.argument("model")
src_option = click.option("--src", default="", metavar="SIDE", help=f"The engine that has the request: {SIDE}.")
dst_option = click.option("--dst", default="", metavar="SIDE", help="The engine that needs it, in the same words.")
bits_option = click.option(
    "--bits",
    type=click.Choice([str(bits) for bits in BITS]),
    help="Quantize K and V: to 8 bits with a scale for each head of a token, or to 4 with one for each 16 values.",
)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def about_two_engines(command: Command) -> Command:
    """A model and two engines of it: what most commands are asked about."""
    for option in (bits_option, dst_option, src_option, model_argument):
        command = option(command)
    return command


def echo_json(document: Mapping[str, Any]) -> None:
    """Write one JSON document."""
    click.echo(json.dumps(document, indent=2, default=str))


def plain_console(**options: Any) -> Console:
    """Text as it stands: no markup, no wrapping. Rich leaves colour out where NO_COLOR says so, and in a pipe."""
    return Console(markup=False, highlight=False, soft_wrap=True, **options)


def print_lines(lines: Iterable[str]) -> None:
    """Lines of which those that are not indented are heads, which stand out on a terminal."""
    console = plain_console()
    for line in lines:
        console.print(Text(line, style="bold" if line[:1].strip() else ""))
