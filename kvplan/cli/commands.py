"""The commands of the command line. Needs the ``cli`` extra; :mod:`kvplan.cli` says so where it is missing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Final

import click
from rich.text import Text

from kvplan._text import fold, intervals, size
from kvplan.cli import matrix
from kvplan.cli.advice import advise
from kvplan.cli.bars import bar
from kvplan.cli.checking import check_offer_command
from kvplan.cli.demonstrating import demo_command
from kvplan.cli.explaining import explain_command
from kvplan.cli.options import about_two_engines, echo_json, json_option, model_argument, plain_console
from kvplan.cli.showing import show_command
from kvplan.cli.sides import MAX_TOKENS, Side, count, load, token_range
from kvplan.cli.trials import Request, Trial, lengths_of, memory_needed
from kvplan.errors import KVPlanError
from kvplan.models.model import Model

INTERRUPTED: Final = 130
UNREAD: Final = 141

ENDING: Final = f"""\
\b
Exit status:
  0    done, and verified where that was asked
  1    bytes differ
  2    refused: what was asked for, or an offer
  {INTERRUPTED}  interrupted
  {UNREAD}  nobody reads what is printed

Shipped models: {", ".join(Model.names())}.
"""
"""What ends the help: exit statuses, and the models that have a name."""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status, as :data:`ENDING` tells them."""
    try:
        return kvplan.main(list(arguments), prog_name="kvplan", standalone_mode=False) or 0
    except KVPlanError as error:
        return _refuse(error, arguments)
    except click.ClickException as error:
        return _refuse(_misread(error), arguments)
    except MemoryError:
        return _refuse(
            KVPlanError("MEMORY", "carry out the transfer", expected="memory for it", got="none left"), arguments
        )
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit:  # what click and rich make of a pipe that was closed
        return UNREAD


def _misread(error: click.ClickException) -> KVPlanError:
    """What click says, in kvplan's grammar: the first word dropped where it says no more, a question as a hint."""
    said, _, question = " ".join(error.format_message().split()).partition("Did you mean")
    got = re.sub("^(No such|Got) ", "", said).strip(" .(")
    got = re.sub("^Missing ", "no ", got)
    context = error.ctx if isinstance(error, click.UsageError) else None
    shows = f"what '{context.command_path if context else 'kvplan'} --help' shows"
    hint = f"did you mean{question.strip(').')}" if question else ""
    return KVPlanError("NAME", "read the command line", expected=shows, got=got[:1].lower() + got[1:], hint=hint)


def _refuse(error: KVPlanError, arguments: Sequence[str]) -> int:
    click.echo(" ".join(str(error).splitlines()), err=True)
    if "--json" in arguments:
        message = str(error).partition(": ")[2]
        echo_json({"code": error.code, "message": message, "details": dict(error.details)})
    return 2


def _version() -> str:
    try:
        return metadata.version("kvplan")
    except metadata.PackageNotFoundError:
        return "not installed"


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True, epilog=ENDING)
@click.version_option(_version())
@click.pass_context
def kvplan(context: click.Context) -> int:
    """Plans that move a request's KV cache between engines of any layout, verified byte for byte."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0


@kvplan.command("verify", short_help="Plan a transfer, move it in fake memory, check every byte.")
@about_two_engines
@click.option("--tokens", default="1000", metavar="[START:]STOP", show_default=True, help="The positions that move.")
@json_option
def verify_command(model: str, src: str, dst: str, bits: str | None, tokens: str, as_json: bool) -> int:
    """Plan MODEL's cache from one engine to another, move it in fake memory, check every byte.

    \b
    kvplan verify qwen3-0.6b --src tp=4 --dst tp=2,block=64,layout=BLHNC --tokens 37:1000

    MODEL is a shipped name in lower case, such as llama-3.1-8b, or the path of a config.json.
    Exit status: 0 verified, 1 bytes differ, 2 refused.
    """
    source, destination = Side.parse(src, "--src"), Side.parse(dst, "--dst")
    start, stop = token_range(tokens, "--tokens")
    request = Request.of(load(model, bits), source, destination, (start, stop))
    _check_memory(request)
    with bar("verify") as progress:
        trial = Trial.of(request, progress)
    if as_json:
        echo_json({"model": model, "tokens": [start, stop], **trial.to_json()})
    else:
        _print_trial(f"{model}, {source} -> {destination}, positions [{start}, {stop})", trial)
    return 0 if trial.report.ok else 1


def _check_memory(request: Request) -> None:
    """Refuse what this machine can't hold, before it stalls."""
    needed, there = memory_needed(request), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise KVPlanError(
            "MEMORY",
            "carry out the transfer",
            expected=f"at most {there} bytes of memory for its labels, what this machine has",
            got=f"{needed}",
            hint="fewer tokens, or more destination workers",
            needed=needed,
        )


def _print_trial(title: str, trial: Trial) -> None:
    """A title, a line for each destination worker, and the report."""
    console = plain_console()
    console.print(title)
    for worker in trial.request.destinations:
        pairs = [pair for pair in trial.pairs if pair.local == worker.key and pair.lengths]
        ranks = intervals(pair.remote[1] for pair in pairs)
        moved, number = sum(pair.num_bytes for pair in pairs), sum(pair.num_descriptors for pair in pairs)
        told = f"{size(moved)} from src/{ranks}, {number:,} descriptors of {lengths_of(pairs)}" if pairs else "nothing"
        console.print(f"  {worker.label} reads {told}")
    if skipped := trial.request.not_transferred:
        console.print(f"  not transferred: {fold(skipped)}, which no source has")
    console.print(Text(str(trial.report), style="green" if trial.report.ok else "bold red"))


for command in (check_offer_command, demo_command, explain_command, show_command):
    kvplan.add_command(command)


@kvplan.command("advise", short_help="Tell which changes would move a request in fewer descriptors.")
@about_two_engines
@click.option("--tokens", default="1000", show_default=True, help="How many positions the request has.")
@json_option
def advise_command(model: str, src: str, dst: str, bits: str | None, tokens: str, as_json: bool) -> int:
    """Tell which changes of either engine would move a request of MODEL in fewer descriptors.

    Changes of layout, kv form, block size and convolution are planned, each of one side alone, then pairs of them.
    Blocks are taken to be scattered. A line has the descriptors of all workers, how many times fewer that is than
    now, the length of those that move most bytes, and the rows that are registered.

    \b
    kvplan advise llama-3.1-8b --src tp=4,layout=LBNHC --dst tp=2,block=64

    MODEL is a shipped name in lower case, such as llama-3.1-8b, or the path of a config.json.
    """
    source, destination = Side.parse(src, "--src"), Side.parse(dst, "--dst")
    number = count(tokens, "--tokens", 1, MAX_TOKENS + 1)
    with bar("advise") as progress:
        advice = advise(load(model, bits), source, destination, number, progress)
    if as_json:
        sides = {"src": str(source), "dst": str(destination)}
        echo_json({"model": model, "tokens": number, **sides, **advice.to_json()})
    else:
        click.echo(f"{model}, {source} -> {destination}, {number} tokens in scattered blocks")
        click.echo(advice)
    return 0


@kvplan.command("matrix", short_help="Tell which differences between engines a model's cache moves across.")
@model_argument
@json_option
def matrix_command(model: str, as_json: bool) -> int:
    """Tell which differences between engines MODEL's cache moves across, each decided by verifying it.

    MODEL is a shipped name in lower case, such as llama-3.1-8b, or the path of a config.json. A few of its layers
    of each kind move, between engines that differ in one thing. The table is Markdown.

    \b
    kvplan matrix granite-4.0-h-tiny

    Exit status: 0 every line verified or refused with a reason, 1 bytes differ, 2 refused.
    """
    whole = load(model)
    few = matrix.shortened(whole)
    with bar("matrix") as progress:
        cells = list(matrix.cells(few, _check_memory, progress))
    if as_json:
        layers = {"moved": len(few.layers), "of": len(whole.layers)}
        decided = [cell.to_json() for cell in cells]
        echo_json({"model": model, "layers": layers, "tokens": list(matrix.TOKENS), "cells": decided})
    else:
        start, stop = matrix.TOKENS
        layers_told = f"{len(few.layers)} of {len(whole.layers)} layers"
        click.echo(f"{model}, {layers_told}, positions [{start}, {stop}):\n")
        click.echo("\n".join(matrix.markdown(cells)))
    return 1 if any(cell.verdict == "wrong" for cell in cells) else 0
