"""``kvplan explain``: what both engines keep where, and what a plan registers. Needs the ``cli`` extra."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from kvplan._text import count
from kvplan.cli.options import POOL, about_two_engines, echo_json, json_option, print_lines
from kvplan.cli.sides import Side, load
from kvplan.cli.trials import undrafted
from kvplan.describe.worker import Worker, label_of
from kvplan.handshake.encoding import encode
from kvplan.plan.mesh import MeshPlan, plan_mesh
from kvplan.plan.specs import Pair
from kvplan.plan.transfer import TransferPlan
from kvplan.show.explanation import DETAILS, Detail, explained, fit, rows_of

Engine = tuple[Worker, ...]


@click.command("explain", short_help="Tell what both engines keep where, and what a plan registers.")
@about_two_engines
@click.option(
    "--detail",
    type=click.Choice(DETAILS),
    default="workers",
    show_default=True,
    help="How much text: a line for each side, a worker of each side and a line for each pair, or every row of all.",
)
@json_option
def explain_command(model: str, src: str, dst: str, bits: str | None, detail: Detail, as_json: bool) -> int:
    """Tell what both engines keep where, and which rows a plan registers.

    With --json, of whatever detail: each worker as the offer that it makes its peers, each row, and who tells whom
    that a request is done.

    \b
    kvplan explain llama-3.1-8b --src tp=4 --dst tp=2,block=64 --detail line

    MODEL is a shipped name in lower case, such as llama-3.1-8b, or the path of a config.json.
    """
    sides = {"src": Side.parse(src, "--src"), "dst": Side.parse(dst, "--dst")}
    geometry = load(model, bits)
    engines = {key: side.engine(geometry, key, side.blocks or POOL) for key, side in sides.items()}
    mesh = plan_mesh(engines["dst"], engines["src"], not_transferred=undrafted(engines["dst"], engines["src"]))
    if as_json:
        words = {"model": model, **{key: str(side) for key, side in sides.items()}}
        echo_json({**words, **_engines_json(engines), **_mesh_json(mesh)})
        return 0
    for key, side in sides.items():
        print_lines(_engine_lines(f"{key}, {side}", engines[key], detail))
    print_lines(explained(mesh, detail))
    return 0


def _engine_lines(title: str, engine: Engine, detail: Detail) -> Iterator[str]:
    """All of an engine's workers row by row, or the first of them."""
    rows = detail == "rows"
    yield from fit(f"{title}: {count(len(engine), 'worker')}{'' if rows else ', the first is'}")
    for worker in engine if rows else engine[:1]:
        yield from explained(worker, detail)
    if detail != "line":
        yield ""


def _engines_json(engines: Mapping[str, Engine]) -> dict[str, Any]:
    return {"offers": {key: [json.loads(encode(worker)) for worker in engine] for key, engine in engines.items()}}


def _mesh_json(mesh: MeshPlan) -> dict[str, Any]:
    """Every row of every plan, and the completions of every worker."""
    completions = {
        label_of(key): {"sends": [*map(label_of, each.sends)], "awaits": [*map(label_of, each.awaits)]}
        for key, each in mesh.completions.items()
    }
    return {"plans": [_plan_json(plan) for plan in mesh.plans], "completions": completions}


def _plan_json(plan: TransferPlan) -> dict[str, Any]:
    return {
        "worker": plan.local.label,
        "operation": plan.operation,
        "not_transferred": list(plan.not_transferred),
        "pairs": [_pair_json(pair) for pair in plan.pairs],
    }


def _pair_json(pair: Pair) -> dict[str, Any]:
    tables = {"local": pair.local_table, "remote": pair.remote_table}
    rows = {side: [*rows_of(table)] for side, table in tables.items()}
    return {"remote": label_of(pair.remote), "rows": rows}
