"""The ``demo`` command: a request moves between engines that differ, for each of some models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvplan._text import WIDTH, size
from kvplan.cli.console import echo_json, progress_bar
from kvplan.cli.options import EngineOptions, json_option
from kvplan.cli.trials import PlacedRequest, Trial, lengths_of
from kvplan.models import Model

DEMO_TOKENS: Final = (0, 100)

TWELVE_HEADS: Final = "12 KV heads"
"""No real model: 2 and 3 workers share 12 heads although neither number divides the other."""


EXAMPLES: Final = (
    ("llama-3.1-8b", "tp=2", "tp=8"),
    ("llama-3.1-8b", "tp=2,block=16", "tp=2,block=64"),
    ("llama-3.1-70b", "tp=16", "tp=4"),
    ("qwen3-0.6b", "tp=1,layout=LBNHC", "tp=2,layout=LBHNC"),
    ("qwen3-32b", "pp=2,tp=4,layout=LBNHC", "tp=8,block=64,layout=BLHNC"),
    ("qwen3-235b-a22b", "tp=8", "tp=2"),
    ("deepseek-v3", "tp=16,block=64", "tp=8,block=64"),
    ("deepseek-v3", "tp=8,block=64", "tp=8,dcp=8,block=64"),
    ("gemma-3-27b", "tp=2", "tp=4,block=64"),
    ("gemma-4-31b", "tp=8", "tp=4"),
    ("nemotron-h-8b", "tp=8", "tp=4,block=64"),
    ("falcon-mamba-7b", "tp=8", "tp=4"),
    (TWELVE_HEADS, "tp=2", "tp=3"),
)
"""Models, each with the options of a prefill engine (source) and a decode engine (destination)."""

ENGINES_PATH: Final = Path(".venv-engines")
"""The environment with vLLM that ``.ci/engines`` makes in a checkout."""

REAL_ENGINES: Final = f"""
The last line is for two real vLLM engines, too slow for this demo. To run it:
{ENGINES_PATH}/bin/python -m tests.engines --connector kvplan --pair "llama 32->64"
"""

TEXT_COLUMNS: Final = ("model", "prefill (source)", "decode (destination)")
NUMBER_COLUMNS: Final = ("workers", "descriptors", "of bytes", "moved", "verified")

LEAST_WIDTHS: Final = MappingProxyType(
    {"workers": WIDTH, "moved": WIDTH, "of bytes": 100, "descriptors": 70}
)
"""The width of a terminal from which on it shows a column."""

MAX_TEXT_WIDTH: Final = 81
"""The width of text, which reads better in lines that are not too long."""

NUM_TOKENS: Final = DEMO_TOKENS[1] - DEMO_TOKENS[0]

INTRODUCTION: Final = f"""\
Each line moves one request of {NUM_TOKENS} tokens from a prefill engine (source) to a
decode engine (destination) of another shape. kvplan plans the pair of engines,
binds scattered blocks, and copies the byte ranges in fake memory.

Verified means that every byte of the decode workers' blocks was checked by its
coordinates: each byte of the request is the right one and was written once, and
no other byte was written. deepseek-v3 caches MLA latents, gemma sliding windows,
nemotron-h and falcon-mamba the states of Mamba layers.
"""


def _load(model: str) -> Model:
    if model != TWELVE_HEADS:
        return Model.shipped(model)
    # a small Llama with as many query heads as KV heads
    config = {
        "model_type": "llama",
        "hidden_size": 12 * 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 128,
    }
    return Model.from_config(config)


def _try_example(model: str, src: str, dst: str) -> Trial:
    source = EngineOptions.parse(src, "the demo's source")
    destination = EngineOptions.parse(dst, "the demo's destination")
    return Trial.of(PlacedRequest.of(_load(model), source, destination, DEMO_TOKENS))


def _row(model: str, src: str, dst: str, trial: Trial) -> dict[str, str | Text]:
    """Return a line of the table, by column."""
    report = trial.report
    lengths = lengths_of(trial.pairs)
    # options stand without what all of them have, so that a line stays short
    row = _text_row(model, *(text.replace("layout=", "").replace(",", " ") for text in (src, dst)))
    row["workers"] = f"{len(trial.request.sources)} -> {len(trial.request.destinations)}"
    row["descriptors"] = f"{report.num_descriptors:,}"
    # one number if all descriptors are equally long
    row["of bytes"] = "-".join(dict.fromkeys((f"{lengths[0]:,}", f"{lengths[-1]:,}")))
    row["moved"] = size(report.num_bytes)
    row["verified"] = Text("yes", style="green")
    if not report.ok:
        row["verified"] = Text(f"NO: {report.failures[0][0]}", style="bold red")
    return row


def _text_row(*texts: str) -> dict[str, str | Text]:
    return dict(zip(TEXT_COLUMNS, texts, strict=True))


@click.command("demo")
@json_option
def demo_command(as_json: bool) -> int:
    """Move a request between engines that differ, check every byte.

    \b
    kvplan demo
    """
    is_terminal = Console().is_terminal
    console = Console(quiet=as_json, width=None if is_terminal else WIDTH)
    text_width = min(console.width, MAX_TEXT_WIDTH)
    introduction = click.wrap_text(INTRODUCTION, text_width, preserve_paragraphs=True)
    console.print(f"{introduction}\n", soft_wrap=True)
    # a narrow terminal has no room for all columns
    columns = [
        name
        for name in (*TEXT_COLUMNS, *NUMBER_COLUMNS)
        if console.width >= LEAST_WIDTHS.get(name, 0)
    ]
    table = _table(columns)
    trials = []
    with (
        progress_bar(disable=is_terminal and not as_json) as bar,
        Live(table, console=console, auto_refresh=False) as live,
    ):
        for model, src, dst in bar.track(EXAMPLES, description="demo"):
            trial = _try_example(model, src, dst)
            trials.append(trial)
            row = _row(model, src, dst, trial)
            table.add_row(*(row[name] for name in columns))
            live.refresh()
        # a checkout with real engines shows that they can run, too
        if ENGINES_PATH.exists():
            row = _text_row("llama in vLLM", "block=32", "block=64") | {"verified": "not run"}
            table.add_row(*(row.get(name, "") for name in columns))
            live.refresh()
    if not is_terminal:
        # ends the table's last line
        console.print()
    if ENGINES_PATH.exists():
        console.print(REAL_ENGINES, soft_wrap=True, highlight=False)
    if as_json:
        cases = []
        for (model, *_), trial in zip(EXAMPLES, trials, strict=True):
            cases.append({"model": model, **trial.to_json()})
        echo_json({"tokens": list(DEMO_TOKENS), "cases": cases})
    return 0 if all(trial.report.ok for trial in trials) else 1


def _table(columns: Sequence[str]) -> Table:
    """Return an empty table; numbers are on the right, and engines may wrap."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in TEXT_COLUMNS else "right"
        no_wrap = name not in TEXT_COLUMNS[1:]
        table.add_column(name, justify=justify, no_wrap=no_wrap, overflow="fold")
    return table
