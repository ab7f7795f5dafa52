"""The ``demo`` command: one request moves between pairs of engines that differ, on the geometry of real models."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvplan._text import WIDTH, size
from kvplan.cli.options import EngineOptions, echo_json, json_option, progress_bar
from kvplan.cli.trials import PlacedRequest, Trial, lengths_of
from kvplan.models import Model

TOKENS: Final = (0, 100)

TWELVE_HEADS: Final = "12 KV heads"
"""No real model: with 12 KV heads, 2 and 3 workers share heads although neither number divides the other."""


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
"""Models, each with the options of a prefill engine (source) and of a decode engine (destination)."""

ENGINES: Final = Path(".venv-engines")
"""The environment with vLLM that ``.ci/engines`` makes in a checkout."""

REAL_ENGINES: Final = f"""
The last line is for two real vLLM engines, too slow for this demo. To run it:
{ENGINES}/bin/python -m tests.engines --connector kvplan --pair "llama 32->64"
"""

WORDS: Final = ("model", "prefill (source)", "decode (destination)")
NUMBERS: Final = ("workers", "descriptors", "of bytes", "moved", "verified")

INTRODUCTION: Final = f"""\
Each line moves one request of {TOKENS[1] - TOKENS[0]} tokens from a prefill engine (source) to a
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
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 128}
    return Model.from_config(
        {"model_type": "llama", "hidden_size": 12 * 128, "num_hidden_layers": 8, **heads}
    )


def _columns(model: str, src: str, dst: str, trial: Trial) -> dict[str, str | Text]:
    """A line of the table, by column."""
    report, lengths = trial.report, lengths_of(trial.pairs)
    engines = (options.replace("layout=", "").replace(",", " ") for options in (src, dst))
    return {
        **dict(zip(WORDS, (model, *engines), strict=True)),
        "workers": f"{len(trial.request.sources)} -> {len(trial.request.destinations)}",
        "descriptors": f"{report.num_descriptors:,}",
        "of bytes": "-".join(dict.fromkeys((f"{lengths[0]:,}", f"{lengths[-1]:,}"))),
        "moved": size(report.num_bytes),
        "verified": Text("yes", style="green")
        if report.ok
        else Text(f"NO: {report.failures[0][0]}", style="bold red"),
    }


@click.command("demo")
@json_option
def demo_command(as_json: bool) -> int:
    """Move a request between engines that differ, check every byte.

    \b
    kvplan demo
    """
    is_terminal = Console().is_terminal
    console = Console(quiet=as_json, width=None if is_terminal else WIDTH)
    console.print(INTRODUCTION, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False)
    omitted = () if console.width >= WIDTH else ("workers", "moved")
    columns = [name for name in (*WORDS, *NUMBERS) if name not in omitted]
    for name in columns:
        table.add_column(
            name, justify="left" if name in WORDS else "right", no_wrap=name not in WORDS[1:]
        )
    trials = []
    with (
        progress_bar(disable=is_terminal and not as_json) as bar,
        Live(table, console=console, auto_refresh=False) as live,
    ):
        for model, src, dst in bar.track(EXAMPLES, description="demo"):
            engines = (
                EngineOptions.parse(src, "the demo's source"),
                EngineOptions.parse(dst, "the demo's destination"),
            )
            trials.append(Trial.of(PlacedRequest.of(_load(model), *engines, TOKENS)))
            row = _columns(model, src, dst, trials[-1])
            table.add_row(*(row[name] for name in columns))
            live.refresh()
        if ENGINES.exists():
            row = {
                **dict(zip(WORDS, ("llama in vLLM", "block=32", "block=64"), strict=True)),
                "verified": "not run",
            }
            table.add_row(*(row.get(name, "") for name in columns))
            live.refresh()
    if not is_terminal:
        console.print()  # ends the table's last line
    if ENGINES.exists():
        console.print(REAL_ENGINES, soft_wrap=True, highlight=False)
    if as_json:
        cases = [
            {"model": model, **trial.to_json()}
            for (model, *_), trial in zip(EXAMPLES, trials, strict=True)
        ]
        echo_json({"tokens": list(TOKENS), "cases": cases})
    return 0 if all(trial.report.ok for trial in trials) else 1
