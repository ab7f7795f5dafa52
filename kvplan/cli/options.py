"""What the commands have in common: arguments and options, JSON output, consoles and the progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import click
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from kvplan.cli.sides import BITS, EngineOptions

WIDTH: Final = 120
"""Columns of output that is not printed on a terminal."""

Command = TypeVar("Command", bound=Callable[..., Any])


class EngineCommand(click.Command):
    """A command that takes :func:`engine_options`: its help ends with what MODEL and the keys of an engine mean."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the end of the help."""
        formatter.write_paragraph()
        formatter.write_text("MODEL is a shipped name such as llama-3.1-8b, or the path of a config.json.")
        with formatter.section("Keys of --src and --dst"):
            formatter.write_dl([(field.name, field.metadata["about"]) for field in attrs.fields(EngineOptions)])


model_argument = click.argument("model")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_engine = partial(
    click.option,
    default="",
    metavar="KEY=VALUE,...",
    callback=lambda context, option, text: EngineOptions.parse(text, option.opts[0]),
)


def engine_options(command: Command) -> Command:
    """The arguments of a command about two engines that run one model: MODEL, ``--src``, ``--dst`` and ``--bits``."""
    bits_help = "Quantize K and V: 8 has a scale for each head of a token, 4 has one for each 16 values (NVFP4)."
    command = click.option("--bits", type=click.Choice([str(bits) for bits in BITS]), help=bits_help)(command)
    command = _engine("--dst", help="The decode engine (destination).")(command)
    return model_argument(_engine("--src", help="The prefill engine (source).")(command))


def _plain(value: Any) -> Any:
    return attrs.asdict(value) if attrs.has(type(value)) else str(value)


def echo_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document. A frozen value becomes an object of its fields."""
    click.echo(json.dumps(document, indent=2, default=_plain))


def plain_console() -> Console:
    """A console for stdout that neither wraps text nor reads markup. In a pipe, or with NO_COLOR, it has no colour."""
    return Console(markup=False, highlight=False, soft_wrap=True)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines; those without indent are headings, which are bold on a terminal."""
    console = plain_console()
    for line in lines:
        console.print(Text(line, style="bold" if line[:1].strip() else ""))


def progress_bar(disable: bool = False) -> Progress:
    """A progress bar on stderr, which is erased at the end. It is only drawn if stderr is a terminal."""
    console = Console(stderr=True)
    hidden = disable or not (sys.stderr.isatty() and console.is_terminal)
    return Progress(console=console, transient=True, redirect_stdout=False, redirect_stderr=False, disable=hidden)
