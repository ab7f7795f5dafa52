"""The commands about a pair of engines (verify, explain, show), and check-offer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import attrs
import click

from kvplan._text import count, fold, intervals, size
from kvplan.cli.console import echo_json, print_lines, terminal_width, wrapped
from kvplan.cli.options import (
    EngineCommand,
    Engines,
    engine_options,
    json_option,
    support_lines,
    token_range,
)
from kvplan.cli.trials import PlacedRequest, Trial, described, destination_drafts, sampled
from kvplan.describe import Worker
from kvplan.describe.worker import label_of
from kvplan.display import explain, show
from kvplan.display.explanation import rows_of
from kvplan.errors import KVPlanError
from kvplan.handshake import PeerError, Problem, compare, decode, encode, fingerprint
from kvplan.handshake.messages import MAX_BYTES
from kvplan.models.options import read_decimal
from kvplan.models.values import MAX_LAYERS
from kvplan.plan import TransferPlan, plan_mesh, plan_reads


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
    engines: Engines,
    tokens: tuple[int, int],
    layers: str | None,
    as_json: bool,
) -> int:
    """Plan a transfer, run it in fake memory, check every byte.

    Layers with a window move its positions alone, as in a connector. If a side names an engine, the
    last lines say whether that engine supports it, by its rules of sizes and layouts.

    \b
    kvplan verify qwen3-0.6b --src tp=4 --dst tp=2,block=64 --tokens 37:1000
    kvplan verify --src 'vllm serve Qwen/Qwen3-8B -tp 4' --dst vllm,tp=2

    Exit status: 0 verified, 1 bytes differ, 2 refused.
    """
    model = engines.model
    start, stop = tokens
    title = f"{engines}, positions [{start}, {stop})"
    moved = {}
    unsupported = engines.unsupported()
    if layers is not None:
        num_layers = len(model.layers)
        model = sampled(model, read_decimal(layers, "--layers", 1, MAX_LAYERS))
        title += f", {len(model.layers)} of {num_layers} layers"
        moved = {"layers": {"moved": len(model.layers), "of": num_layers}}
    trial = Trial.of(PlacedRequest.of(model, engines.src, engines.dst, tokens))
    if as_json:
        document = {"model": engines.name, "tokens": list(tokens), **moved, **trial.to_json()}
        echo_json(document | {"unsupported": unsupported})
    else:
        print_lines([*engines.heading(title), *_moved_lines(trial)])
        report = trial.report
        click.secho(str(report), fg="green" if report.ok else "red")
        print_lines(support_lines(unsupported))
    return 0 if trial.report.ok else 1


def _moved_lines(trial: Trial) -> Iterator[str]:
    """Yield a line for each destination worker, and for what does not move."""
    for worker in trial.request.destinations:
        # pairs of workers that share no bytes have no lengths
        pairs = [pair for pair in trial.pairs if pair.local == worker.key and pair.lengths]
        moved = "nothing"
        if pairs:
            num_bytes = size(sum(pair.num_bytes for pair in pairs))
            ranks = intervals(pair.remote[1] for pair in pairs)
            moved = f"{num_bytes} from src/{ranks}, {described(pairs)}"
        yield f"  {worker.label} reads {moved}"
    for group, (first, stop) in trial.request.windows.items():
        yield f"  group {group} moves positions [{first}, {stop}): its window"
    if skipped := trial.request.not_transferred:
        yield f"  not transferred: {fold(skipped)} (no source has it)"


@click.command("explain", cls=EngineCommand)
@engine_options
@click.option(
    "--detail",
    type=click.Choice(["line", "workers", "rows"]),
    default="workers",
    show_default=True,
    help=(
        "line: one line per engine; workers: one worker of each engine, and a line per pair; "
        "rows: everything."
    ),
)
@json_option
def explain_command(
    engines: Engines,
    detail: Literal["line", "workers", "rows"],
    as_json: bool,
) -> int:
    """Describe both engines' memory and a plan's rows.

    With --json: each worker's offer, and each row.

    \b
    kvplan explain llama-3.1-8b --src tp=4 --dst tp=2,block=64 --detail line
    """
    sources, destinations = engines.workers()
    drafts = destination_drafts(destinations, sources)
    mesh = plan_mesh(destinations, sources, not_transferred=drafts)
    if as_json:
        offers = {"src": _offers_json(sources), "dst": _offers_json(destinations)}
        echo_json(
            engines.to_json() | {"offers": offers, "plans": list(map(_plan_json, mesh.plans))}
        )
        return 0
    width = terminal_width()
    print_lines(engines.heading())
    sides = (
        ("source", engines.src, sources),
        ("destination", engines.dst, destinations),
    )
    for role, options, workers in sides:
        title = f"{role}, {options}: {count(len(workers), 'worker')}"
        # of an engine the first worker, unless every row is asked for
        explained = workers
        if detail != "rows":
            title += ", the first:"
            explained = workers[:1]
        print_lines(wrapped([title]))
        for worker in explained:
            print_lines(explain(worker, detail=detail, width=width).splitlines())
        if detail != "line":
            print_lines([""])
    print_lines(explain(mesh, detail=detail, width=width).splitlines())
    return 0


def _offers_json(workers: Sequence[Worker]) -> list[Any]:
    return [json.loads(encode(worker)) for worker in workers]


def _plan_json(plan: TransferPlan) -> dict[str, Any]:
    pairs = []
    for pair in plan.pairs:
        rows = {"local": [*rows_of(pair.local_table)], "remote": [*rows_of(pair.remote_table)]}
        pairs.append({"remote": label_of(pair.remote), "rows": rows})
    return {
        "worker": plan.local.label,
        "operation": plan.operation,
        "not_transferred": plan.not_transferred,
        "pairs": pairs,
    }


@click.command("show", cls=EngineCommand)
@engine_options
@click.option(
    "--rank", default="0", show_default=True, help="The destination worker whose plan is drawn."
)
def show_command(engines: Engines, rank: str) -> int:
    """Draw both engines' blocks, and which bytes go where.

    Rows are axes, from the slowest in memory to the fastest; columns are bytes. Source and
    destination bytes of one copy have the same letter.

    \b
    kvplan show llama-3.1-8b --src tp=4,layout=LBNHC --dst tp=2
    """
    sources, destinations = engines.workers()
    local = destinations[read_decimal(rank, "--rank", 0, len(destinations))]
    plan = plan_reads(local, sources, not_transferred=destination_drafts([local], sources))
    pairs = zip(plan.remotes, plan.pairs, strict=True)
    sending = [remote for remote, pair in pairs if pair.local_table.num_ids]
    width = terminal_width()
    print_lines(engines.heading())
    # a block of the first source that sends bytes, one of the destination, and the plan
    for subject in (*sending[:1], local, plan):
        print_lines(["", explain(subject, detail="line", width=width), ""])
        click.echo(show(subject, width=width))
    return 0


@click.command("check-offer")
@click.argument("file")
@click.argument("file2", required=False)
@json_option
def check_offer_command(file: str, file2: str | None, as_json: bool) -> int:
    """Describe a worker's offer, or list everything wrong with it.

    An offer is the message that kvplan.encode makes of a worker. With FILE2, compare the worker in
    FILE, a destination, with the one in FILE2, its source, and list the differences that no plan
    can bridge. - reads stdin.

    \b
    kvplan check-offer offer.json
    kvplan check-offer decode.json prefill.json

    Exit status: 0 valid, 2 an invalid offer or a difference that is refused.
    """
    # stdin can be read once
    paths = [file] if file2 is None else [file, file2]
    if paths.count("-") > 1:
        raise KVPlanError(
            "NAME", "read offers", expected="stdin for one of them", got="stdin for both"
        )
    offers = list(map(_OfferText.read, paths))
    workers = [offer.worker for offer in offers if offer.worker is not None]
    # an invalid offer cannot be compared; its problems are printed instead
    comparison = compare(workers[0], workers[1]) if len(workers) == 2 else None
    if as_json:
        document = None
        if comparison is not None:
            document = {"ok": comparison.ok, **attrs.asdict(comparison)}
        echo_json({"offers": [offer.to_json() for offer in offers], "comparison": document})
    elif comparison is not None:
        print_lines(str(comparison).splitlines())
    else:
        for offer in offers:
            print_lines(offer.lines())
    is_valid = len(workers) == len(paths) and (comparison is None or comparison.ok)
    return 0 if is_valid else 2


@attrs.frozen
class _OfferText:
    """A text that should be an offer: the name of its file, and the worker, or the problems."""

    name: str
    worker: Worker | None = None
    problems: tuple[Problem, ...] = ()

    @classmethod
    def read(cls, path: str) -> _OfferText:
        """Read a file, or stdin. Raises ``NAME`` if it cannot be read."""
        name = click.format_filename(path)
        try:
            # one byte more than a message may have shows that it is too long
            with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            expected = "a file that can be read, or -"
            got = f"{path!r}: {reason}"
            raise KVPlanError("NAME", "read an offer", expected=expected, got=got) from None
        if len(data) > MAX_BYTES:
            message = f"cannot read a message: expected at most {MAX_BYTES} bytes, got more"
            return cls(name, problems=(Problem("", "MESSAGE", message),))
        try:
            return cls(name, decode(data))
        except PeerError as error:
            return cls(name, problems=error.problems)

    def lines(self) -> list[str]:
        """Return a description of the worker, or all problems."""
        if self.worker is None:
            return [f"{self.name}: refused", *(f"  {problem}" for problem in self.problems)]
        description = explain(self.worker, width=terminal_width()).splitlines()
        return [*description, f"  fingerprint {fingerprint(self.worker)}"]

    def to_json(self) -> dict[str, Any]:
        worker = self.worker
        if worker is None:
            return {"file": self.name, "ok": False, "problems": self.problems}
        return {
            "file": self.name,
            "ok": True,
            "problems": [],
            "engine_id": worker.engine_id,
            "rank": worker.rank,
            "fingerprint": fingerprint(worker),
            "groups": worker.groups,
            "regions": len(worker.regions),
            "tensors": len(worker.tensors),
            "views": len(worker.views),
        }


COMMANDS: Final = (verify_command, explain_command, show_command, check_offer_command)
