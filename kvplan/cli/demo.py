"""The ``demo`` command: a request moves between engines that differ, for each of some models."""

from __future__ import annotations

from typing import Final

import click

from kvplan._text import size
from kvplan.cli.console import echo_json, progress
from kvplan.cli.model_files import load
from kvplan.cli.options import json_option
from kvplan.cli.trials import PlacedRequest, Trial, lengths_of
from kvplan.models.options import EngineOptions

DEMO_TOKENS: Final = (0, 100)

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
    # neither 2 nor 3 divides the other
    ("layers=8,kv_heads=12,head_dim=128", "tp=2", "tp=3"),
)
"""Models, each with the options of a prefill engine (source) and a decode engine (destination)."""

HEADS: Final = (
    *("model", "prefill (source)", "decode (destination)"),
    *("descriptors", "of bytes", "moved", "verified"),
)

INTRODUCTION: Final = f"""\
Each line moves one request of {DEMO_TOKENS[1]} tokens from a prefill engine (source) to a decode
engine (destination) with different sizes or layouts. kvplan plans the pair, binds scattered blocks,
and copies the byte ranges in fake memory. "yes" means that each byte of the request was written
once with the right value, and that no other byte was written.
"""


@click.command("demo")
@json_option
def demo_command(as_json: bool) -> int:
    """Move a request between engines that differ, check every byte.

    \b
    kvplan demo
    """
    if not as_json:
        click.echo(INTRODUCTION)
    rows: list[tuple[str, ...]] = [HEADS]
    trials = []
    for model, src, dst in progress(EXAMPLES, "demo"):
        source, destination = EngineOptions.parse(src, "src"), EngineOptions.parse(dst, "dst")
        trial = Trial.of(PlacedRequest.of(load(model), source, destination, DEMO_TOKENS))
        trials.append(trial)
        lengths = lengths_of(trial.pairs)
        rows.append(
            (
                # no real model has 12 KV heads
                "12 KV heads" if "=" in model else model,
                # options without what all of them have, so that a line stays short
                *(text.replace("layout=", "").replace(",", " ") for text in (src, dst)),
                f"{trial.report.num_descriptors:,}",
                # one number if all descriptors are equally long
                "-".join(dict.fromkeys((f"{lengths[0]:,}", f"{lengths[-1]:,}"))),
                size(trial.report.num_bytes),
                "yes" if trial.report.ok else f"NO: {trial.report.failures[0][0]}",
            )
        )
    if as_json:
        cases = []
        for (model, *_), trial in zip(EXAMPLES, trials, strict=True):
            cases.append({"model": model, **trial.to_json()})
        echo_json({"tokens": list(DEMO_TOKENS), "cases": cases})
    else:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
            cells += [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
            click.echo("  ".join(cells))
    return 0 if all(trial.report.ok for trial in trials) else 1
