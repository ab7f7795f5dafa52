"""The commands about one pair of engines, verify, explain and show, and check-offer, which is about offers."""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal

import attrs
import click
from rich.text import Text

from kvplan._text import count, fold, intervals, size
from kvplan.cli.engines import lines, reasons
from kvplan.cli.options import (
    EngineCommand,
    Engines,
    echo_json,
    engine_options,
    json_option,
    plain_console,
    print_lines,
    progress_bar,
    read_decimal,
    terminal_width,
    token_range,
)
from kvplan.cli.trials import PlacedRequest, Trial, described, destination_drafts, sampled
from kvplan.describe import Worker
from kvplan.describe.worker import label_of
from kvplan.display import explain, show
from kvplan.display.copies import CopyEnd, panels
from kvplan.display.explanation import rows_of
from kvplan.errors import KVPlanError
from kvplan.handshake import PeerError, Problem, compare, decode, encode, fingerprint
from kvplan.handshake.messages import MAX_BYTES
from kvplan.models import Model
from kvplan.models.config import MAX_LAYERS
from kvplan.plan import Pair, TransferPlan, plan_mesh, plan_reads

STYLES: Final = ("bright_blue", "yellow", "green", "magenta", "cyan", "red")
"""Colours of source workers in a drawing; the seventh has the first again."""


@click.command("verify", cls=EngineCommand)
@engine_options
@click.option(
    "--tokens",
    default="1000",
    metavar="[START:]STOP",
    show_default=True,
    callback=lambda context, option, text: token_range(text, "--tokens"),
    help="Positions of the request that move.",
)
@click.option("--layers", metavar="N", help="Move only N layers, some of each kind.")
@json_option
def verify_command(
    given: Engines, tokens: tuple[int, int], layers: str | None, as_json: bool
) -> int:
    """Plan a transfer, run it in fake memory, check every byte.

    The last lines say whether vLLM and SGLang run such engines, by their rules of sizes and layouts.

    \b
    kvplan verify qwen3-0.6b --src tp=4 --dst tp=2,block=64 --tokens 37:1000

    Exit status: 0 verified, 1 bytes differ, 2 refused.
    """
    loaded, title, sides, moved = (
        given.model,
        f"{given}, positions [{tokens[0]}, {tokens[1]})",
        {},
        {},
    )
    if isinstance(loaded, Model):
        sides = {"src": reasons(loaded, given.src), "dst": reasons(loaded, given.dst)}
        if layers is not None:
            whole, loaded = loaded, sampled(loaded, read_decimal(layers, "--layers", 1, MAX_LAYERS))
            title += f", {len(loaded.layers)} of {len(whole.layers)} layers"
            moved = {"layers": {"moved": len(loaded.layers), "of": len(whole.layers)}}
    elif layers is not None:
        raise KVPlanError(
            "CONFIG", "move some layers of offers", expected="no --layers", got=layers
        )
    with progress_bar() as bar:
        bar.add_task("verify", total=None)
        trial = Trial.of(PlacedRequest.of(loaded, given.src, given.dst, tokens))
    if as_json:
        echo_json(
            {
                "model": given.name,
                "tokens": list(tokens),
                **moved,
                **trial.to_json(),
                "not_run_because": sides,
            }
        )
    else:
        _print_trial(title, trial)
        print_lines(lines(sides))
    return 0 if trial.report.ok else 1


def _print_trial(title: str, trial: Trial) -> None:
    """A title, a line for each destination worker, and the report."""
    console = plain_console()
    console.print(title)
    for worker in trial.request.destinations:
        pairs = [pair for pair in trial.pairs if pair.local == worker.key and pair.lengths]
        ranks, moved = (
            intervals(pair.remote[1] for pair in pairs),
            size(sum(pair.num_bytes for pair in pairs)),
        )
        what = f"{moved} from src/{ranks}, {described(pairs)}" if pairs else "nothing"
        console.print(f"  {worker.label} reads {what}")
    if skipped := trial.request.not_transferred:
        console.print(f"  not transferred: {fold(skipped)} (no source has it)")
    console.print(Text(str(trial.report), style="green" if trial.report.ok else "bold red"))


@click.command("explain", cls=EngineCommand)
@engine_options
@click.option(
    "--detail",
    type=click.Choice(["line", "workers", "rows"]),
    default="workers",
    show_default=True,
    help="line: one line per engine; workers: one worker of each engine, and a line per pair; rows: everything.",
)
@json_option
def explain_command(
    given: Engines, detail: Literal["line", "workers", "rows"], as_json: bool
) -> int:
    """Describe both engines' memory and a plan's rows.

    With --json: each worker's offer, each row, and the completions that each worker sends and awaits.

    \b
    kvplan explain llama-3.1-8b --src tp=4 --dst tp=2,block=64 --detail line
    """
    sources, destinations = given.workers()
    mesh = plan_mesh(
        destinations, sources, not_transferred=destination_drafts(destinations, sources)
    )
    if as_json:
        engines = {"src": sources, "dst": destinations}
        offers = {
            name: [json.loads(encode(worker)) for worker in engine]
            for name, engine in engines.items()
        }
        completions = {
            label_of(key): {
                "sends": [*map(label_of, each.sends)],
                "awaits": [*map(label_of, each.awaits)],
            }
            for key, each in mesh.completions.items()
        }
        plans = [
            {
                "worker": plan.local.label,
                "operation": plan.operation,
                "not_transferred": plan.not_transferred,
                "pairs": [
                    {"remote": label_of(pair.remote), "rows": _rows_json(pair)}
                    for pair in plan.pairs
                ],
            }
            for plan in mesh.plans
        ]
        echo_json(given.to_json() | {"offers": offers, "plans": plans, "completions": completions})
        return 0
    width = terminal_width()
    for role, side, engine in (
        ("source", given.src, sources),
        ("destination", given.dst, destinations),
    ):
        shown = engine if detail == "rows" else engine[:1]
        title = f"{role}, {side.title(given.model)}: {count(len(engine), 'worker')}"
        title += "" if detail == "rows" else ", the first:"
        print_lines(click.wrap_text(title, width, subsequent_indent="    ").splitlines())
        print_lines(
            line
            for worker in shown
            for line in explain(worker, detail=detail, width=width).splitlines()
        )
        print_lines([] if detail == "line" else [""])
    print_lines(explain(mesh, detail=detail, width=width).splitlines())
    return 0


def _rows_json(pair: Pair) -> dict[str, Any]:
    return {"local": [*rows_of(pair.local_table)], "remote": [*rows_of(pair.remote_table)]}


@click.command("show", cls=EngineCommand)
@engine_options
@click.option(
    "--rank", default="0", show_default=True, help="The destination worker whose plan is drawn."
)
@click.option(
    "--svg",
    "path",
    metavar="FILE",
    help="Write the drawing to FILE, as .svg or .txt, and print no drawing.",
)
@json_option
def show_command(given: Engines, rank: str, path: str | None, as_json: bool) -> int:
    """Draw both engines' blocks, and which bytes go where.

    Rows are axes, from the slowest in memory to the fastest; columns are bytes. Source and destination bytes of one
    copy have the same letter. With --json: every copy that is drawn.

    \b
    kvplan show llama-3.1-8b --src tp=4,layout=LBNHC --dst tp=2 --svg plan.svg
    """
    sources, destinations = given.workers()
    local = destinations[read_decimal(rank, "--rank", 0, len(destinations))]
    plan = plan_reads(local, sources, not_transferred=destination_drafts(destinations, sources))
    if path is not None:
        picture = show(plan, about=str(given))
        picture.save(path)
    if as_json:
        echo_json(given.to_json() | {"worker": local.label, "panels": _panels_json(plan)})
    elif path is not None:
        click.echo(f"wrote {click.format_filename(path)}: {picture.title}")
    else:
        click.echo(given)
        _draw(plan)
    return 0


def _draw(plan: TransferPlan) -> None:
    """A block of the first source that sends something, a block of the destination, and what moves between them."""
    moving = [
        remote
        for remote, pair in zip(plan.remotes, plan.pairs, strict=True)
        if pair.local_table.num_ids
    ]
    console = plain_console()
    width = terminal_width()
    for value in (*moving[:1], plan.local, plan):
        picture = show(value, width=width)
        text = Text(f"\n{picture.title}\n\n", style="bold")
        text.append(Text(picture.text, style="not bold"))
        text.highlight_regex(r"[│░]|···", "dim")
        for i, worker in enumerate(moving):
            text.highlight_regex(rf"{re.escape(worker.label)}(?!\d)", STYLES[i % len(STYLES)])
        console.print(text)


def _panels_json(plan: TransferPlan) -> list[dict[str, Any]]:
    """What is drawn of a plan as plain data: for each kind of layer, every copy."""
    return [
        {
            "tensors": panel.tensors,
            "layers": panel.num_layers,
            "tokens": panel.tokens,
            "copies": [
                {
                    "what": copy.local.coordinates,
                    "bytes": copy.num_bytes,
                    "descriptor_bytes": copy.run_bytes,
                    "src": _end_json(copy.remote),
                    "dst": _end_json(copy.local),
                }
                for copy in panel.copies
            ],
        }
        for panel in panels(plan)
    ]


def _end_json(end: CopyEnd) -> dict[str, Any]:
    return {
        "worker": end.worker.label,
        "block": end.ordinal,
        "block_id": end.block,
        "region": end.region,
        "offset": end.region_offset,
    }


@click.command("check-offer")
@click.argument("file")
@click.argument("file2", required=False)
@json_option
def check_offer_command(file: str, file2: str | None, as_json: bool) -> int:
    """Describe a worker's offer, or list everything wrong with it.

    An offer is the message that kvplan.encode makes of a worker. With FILE2, compare the worker in FILE, a destination,
    with the one in FILE2, its source, and list the differences that no plan can bridge. - reads stdin.

    \b
    kvplan check-offer offer.json
    kvplan check-offer decode.json prefill.json

    Exit status: 0 valid, 2 an invalid offer or a difference that is refused.
    """
    files = [file] if file2 is None else [file, file2]
    if files.count("-") > 1:
        raise KVPlanError("NAME", "read offers", expected="stdin for one of them", got="for both")
    offers = [(click.format_filename(path), _read_offer(path)) for path in files]
    workers = [offer for _, offer in offers if isinstance(offer, Worker)]
    comparison = compare(workers[0], workers[1]) if len(workers) == 2 else None
    if as_json:
        found = None if comparison is None else {"ok": comparison.ok, **attrs.asdict(comparison)}
        echo_json({"offers": [_offer_json(*offer) for offer in offers], "comparison": found})
    elif comparison is not None:
        print_lines(str(comparison).splitlines())
    else:
        for name, offer in offers:
            if isinstance(offer, Worker):
                print_lines(explain(offer, width=terminal_width()).splitlines())
                print_lines([f"  fingerprint {fingerprint(offer)}"])
            else:
                print_lines([f"{name}: refused", *(f"  {problem}" for problem in offer)])
    return 0 if len(workers) == len(files) and (comparison is None or comparison.ok) else 2


def _read_offer(path: str) -> Worker | tuple[Problem, ...]:
    """The worker that a file, or stdin, offers; or the problems of its text. Raises ``NAME`` if it can't be read."""
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        got = f"{path!r}: {(error.strerror if isinstance(error, OSError) else None) or error}"
        raise KVPlanError(
            "NAME", "read an offer", expected="a file that can be read, or -", got=got
        ) from None
    if len(data) > MAX_BYTES:
        return (
            Problem(
                "",
                "MESSAGE",
                f"cannot read a message: expected at most {MAX_BYTES} bytes, got more",
            ),
        )
    try:
        return decode(data)
    except PeerError as error:
        return error.problems


def _offer_json(name: str, offer: Worker | tuple[Problem, ...]) -> dict[str, Any]:
    if not isinstance(offer, Worker):
        return {"file": name, "ok": False, "problems": offer}
    return {
        "file": name,
        "ok": True,
        "problems": [],
        "engine_id": offer.engine_id,
        "rank": offer.rank,
        "fingerprint": fingerprint(offer),
        "groups": offer.groups,
        "regions": len(offer.regions),
        "tensors": len(offer.tensors),
        "views": len(offer.views),
    }


COMMANDS: Final = (verify_command, explain_command, show_command, check_offer_command)
