"""``kvplan show``: pictures of both engines' blocks and of what moves between them. Needs the ``cli`` extra."""

from __future__ import annotations

import re
import shutil
from typing import Any, Final

import click
from rich.text import Text

from kvplan.cli.options import POOL, about_two_engines, echo_json, plain_console
from kvplan.cli.sides import Side, count, load
from kvplan.cli.trials import undrafted
from kvplan.plan.transfer import TransferPlan, plan_reads
from kvplan.show.copies import BoxCopy, CopyEnd, Panel, panels
from kvplan.show.pictures import show
from kvplan.show.text import WIDTH

STYLES: Final = ("bright_blue", "yellow", "green", "magenta", "cyan", "red")
"""Styles of remote workers, in turns."""


@click.command("show", short_help="Draw both engines' blocks, and which bytes go where.")
@about_two_engines
@click.option("--rank", default="0", show_default=True, help="The destination worker whose plan is drawn.")
@click.option(
    "--svg",
    "path",
    metavar="FILE",
    help="Write a picture of the plan there, and draw nothing here. FILE ends in .svg, or in .txt for the text.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: every copy of what is drawn.")
def show_command(model: str, src: str, dst: str, bits: str | None, rank: str, path: str | None, as_json: bool) -> int:
    """Draw what one block of MODEL's cache looks like on both engines, and which bytes go where.

    Rows are axes, from the slowest in memory to the fastest, and columns are bytes. Letters say which bytes are copied
    to which.

    \b
    kvplan show llama-3.1-8b --src tp=4,layout=LBNHC --dst tp=2,block=64,layout=BLHNC --svg plan.svg

    MODEL is a shipped name in lower case, such as llama-3.1-8b, or the path of a config.json.
    """
    sides = {"src": Side.parse(src, "--src"), "dst": Side.parse(dst, "--dst")}
    geometry = load(model, bits)
    sources, destinations = (side.engine(geometry, key, side.blocks or POOL) for key, side in sides.items())
    local = destinations[count(rank, "--rank", 0, len(destinations))]
    plan = plan_reads(local, sources, not_transferred=undrafted(destinations, sources))
    words = f"{model}, {sides['src']} -> {sides['dst']}"
    if path is not None:
        picture = show(plan, about=words)
        picture.save(path)
    if as_json:
        told = {"model": model, **{key: str(side) for key, side in sides.items()}, "worker": local.label}
        echo_json(told | {"panels": [_panel_json(panel) for panel in panels(plan)]})
    elif path is not None:
        click.echo(f"wrote {click.format_filename(path)}: {picture.title}")
    else:
        click.echo(words)
        _print(plan)
    return 0


def _print(plan: TransferPlan) -> None:
    """The blocks of one source that sends something and of the destination, then what goes where."""
    moving = [remote for remote, pair in zip(plan.remotes, plan.pairs, strict=True) if pair.layouts]
    console = plain_console()
    width = shutil.get_terminal_size((WIDTH, 24)).columns  # of a terminal, or of what COLUMNS says
    for value in (*moving[:1], plan.local, plan):
        picture = show(value, width=width)
        text = Text(f"\n{picture.title}\n\n", style="bold")
        text.append(Text(picture.text, style="not bold"))
        text.highlight_regex(r"[│░]|···", "dim")
        for i, worker in enumerate(moving):
            text.highlight_regex(rf"{re.escape(worker.label)}(?!\d)", STYLES[i % len(STYLES)])
        console.print(text)


def _panel_json(panel: Panel) -> dict[str, Any]:
    """A panel as plain data, with every copy."""
    return {
        "tensors": list(panel.tensors),
        "layers": panel.num_layers,
        "tokens": panel.tokens,
        "copies": [_copy_json(copy) for copy in panel.copies],
    }


def _copy_json(copy: BoxCopy) -> dict[str, Any]:
    return {
        "what": copy.local.coordinates,
        "bytes": copy.num_bytes,
        "descriptor_bytes": copy.run_bytes,
        "src": _end_json(copy.remote),
        "dst": _end_json(copy.local),
    }


def _end_json(end: CopyEnd) -> dict[str, Any]:
    return {
        "worker": end.worker.label,
        "block": end.ordinal,
        "block_id": end.block,
        "region": end.region,
        "offset": end.region_offset,
    }
