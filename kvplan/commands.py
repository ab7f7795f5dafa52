"""The commands of the command line. Needs the ``cli`` extra; :mod:`kvplan.cli` says so where it is missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import metadata
from typing import Final

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvplan import demo, matrix, reading
from kvplan.advice import advise
from kvplan.errors import KVPlanError
from kvplan.explain import explain, size
from kvplan.mesh import plan_mesh
from kvplan.names import fold, intervals
from kvplan.options import POOL, about_two_engines, echo_json, json_option, model_argument, plain_console
from kvplan.showing import show_command
from kvplan.sides import MAX_TOKENS, Side, count, load, token_range
from kvplan.trials import Request, Trial, lengths_of, memory_needed, undrafted

WIDE: Final = 120
"""Columns that the demo's whole table takes. A narrower terminal gets less of it, a pipe or a file all."""

COLUMNS: Final = ("model", "prefill", "decode", "workers", "descriptors", "of bytes", "moved", "verified")

INTRODUCTION: Final = """\
One request of {tokens} tokens moves from a prefill engine to a decode engine of
another shape, on each line below: kvplan plans the pair, binds scattered blocks,
and copies the byte ranges in fake memory.

Verified means that every byte of the decode workers' blocks was checked by its
coordinates. Each byte of the request is the one that belongs there and was
written once, and no other byte was written.
"""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status: 0 done, 1 bytes differ, 2 refused."""
    try:
        return kvplan.main(list(arguments), prog_name="kvplan", standalone_mode=False) or 0
    except KVPlanError as error:
        return _refuse(error, arguments)
    except click.ClickException as error:
        said = " ".join(error.format_message().split()).rstrip(".")
        return _refuse(
            KVPlanError("NAME", "read the command line", expected="what 'kvplan --help' shows", got=said), arguments
        )
    except MemoryError:
        return _refuse(
            KVPlanError("MEMORY", "carry out the transfer", expected="memory for it", got="none left"), arguments
        )
    except (click.Abort, KeyboardInterrupt):
        return 130


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


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
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

    MODEL is a shipped name in lower case, such as llama-3.1-8b, or the path of a config.json.
    Exit status: 0 verified, 1 bytes differ, 2 refused.
    """
    source, destination = Side.parse(src, "--src"), Side.parse(dst, "--dst")
    start, stop = token_range(tokens, "--tokens")
    request = Request.of(load(model, bits), source, destination, (start, stop))
    _check_memory(request)
    trial = Trial.of(request)
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


@kvplan.command("explain", short_help="Tell what both engines keep where, and what a plan registers.")
@about_two_engines
def explain_command(model: str, src: str, dst: str, bits: str | None) -> int:
    """Tell what both engines keep where, and which rows a plan registers.

    MODEL is a shipped name in lower case, such as llama-3.1-8b, or the path of a config.json.
    """
    sides = {"src": Side.parse(src, "--src"), "dst": Side.parse(dst, "--dst")}
    geometry = load(model, bits)
    engines = {key: side.engine(geometry, key, side.blocks or POOL) for key, side in sides.items()}
    for key, side in sides.items():
        click.echo(f"{key}, {side}: {reading.count(len(engines[key]), 'worker')}, the first is")
        click.echo(explain(engines[key][0]) + "\n")
    drafted = undrafted(engines["dst"], engines["src"])
    click.echo(explain(plan_mesh(engines["dst"], engines["src"], not_transferred=drafted)))
    return 0


kvplan.add_command(show_command)


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
    advice = advise(load(model, bits), source, destination, number)
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
    Exit status: 0 every line verified or refused with a reason, 1 bytes differ, 2 refused.
    """
    whole = load(model)
    few = matrix.shortened(whole)
    cells = list(matrix.cells(few, _check_memory))
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


@kvplan.command("demo", short_help="Move a request between engines that differ, and check every byte.")
def demo_command() -> int:
    """Move one request between pairs of engines that differ, on real model geometry, and check every byte."""
    start, stop = demo.TOKENS
    terminal = Console().is_terminal
    console = Console() if terminal else Console(width=WIDE)
    console.print(INTRODUCTION.format(tokens=f"{stop - start:,}"), soft_wrap=True)
    columns = COLUMNS if console.width >= WIDE else [key for key in COLUMNS if key not in ("workers", "moved")]
    table = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False)
    for key in columns:
        sides = key in ("prefill", "decode")
        table.add_column(key, justify="left" if sides or key == "model" else "right", no_wrap=not sides)
    all_ok = True
    with Live(table, console=console, auto_refresh=False) if terminal else nullcontext() as live:
        for case, trial in demo.trials():
            row = _row(case, trial)
            table.add_row(*(row[key] for key in columns))
            all_ok = all_ok and trial.report.ok
            if live:
                live.refresh()
    if not terminal:
        console.print(table)
    return 0 if all_ok else 1


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
