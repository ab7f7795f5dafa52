"""Lines: any value of kvplan in one line, such as a log has, and the words that longer texts have in common with it.

>>> from kvplan import Blocks, Region
>>> print(line(Region("kv", 4096, 512)), line(Blocks([4, 9], first=3)), sep="\\n")
region kv: 512 bytes at 0x1000, DRAM 0
blocks [3, 5) of a request: ids 4, 9
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvplan._text import count, fold, intervals, size, sizes
from kvplan.bridges.assembly import Seat
from kvplan.describe.axes import Axis
from kvplan.describe.blocks import Blocks
from kvplan.describe.views import Context, Group, Region, View
from kvplan.describe.worker import Key, Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.handshake.comparison import Comparison, Difference
from kvplan.handshake.errors import Problem
from kvplan.models.model import Model
from kvplan.plan.cost import Cost, PairCost
from kvplan.plan.mesh import Completions, MeshPlan
from kvplan.plan.rows import Table
from kvplan.plan.specs import Pair, ReadSpec
from kvplan.plan.transfer import TransferPlan
from kvplan.show.pictures import Picture
from kvplan.staging import Choice, Chunk, Copy, Option, Rates, StagedCost, StagedPlan
from kvplan.verification.certificate import Certificate
from kvplan.verification.report import Report, Tail

WIDTH: Final = 120
"""Characters of a line that fits a terminal."""

SHOWN: Final = 8
"""Of more block ids than this, only the last is told beside them."""


def line(value: object) -> str:
    """A value in one line, however long. Raises ``TYPE`` for anything that is not a value of kvplan."""
    match value:
        case Worker() | Model() | Problem() | Tail():
            return str(value)
        case KVPlanError():
            return " ".join(str(value).split())
        case Region():
            return f"region {value}"
        case Axis():
            return f"axis {value}"
        case Group():
            return group_line(value)
        case Context():
            return f"context: {_turns(value) or 'one worker'}"
        case Seat():
            turns = _turns(value.context)
            return f"seat {value.engine_id}/{value.rank}: rank {value.tp_rank} of tp {value.tp}" + (
                turns and f", {turns}"
            )
        case View():
            return views_line([value])
        case Blocks():
            return _blocks(value)
        case _:
            return _of_plans(value)


def _of_plans(value: object) -> str:
    """A plan, or what is made of one, in one line."""
    match value:
        case TransferPlan():
            moving = [pair.local_table for pair in value.pairs if pair.layouts]
            return f"{plan_title(value)}: {_totals(moving)}"
        case MeshPlan():
            moving = [pair.local_table for plan in value.plans for pair in plan.pairs if pair.layouts]
            return f"{mesh_title(value)}, {count(len(moving), 'pair')} with bytes to move: {_totals(moving)}"
        case Pair():
            return f"pair with {label_of(value.remote)}: {_table(value.local_table, 'local row')}"
        case Table():
            return f"table: {_table(value, 'row')}"
        case ReadSpec():
            return _spec(value)
        case StagedPlan():
            return staged_title(value)
        case Chunk():
            return _chunk(value)
        case Copy():
            return repr(value)[1:-1].replace("Copy", "copy", 1)
        case Completions():
            return f"completions: sends to {_labels(value.sends)}; awaits {_labels(value.awaits)}"
        case Certificate():
            proved = f"{count(value.num_bytes, 'byte')} of each period, in {count(value.num_parts, 'part')}"
            return f"certificate: {proved}, {'complete' if value.complete else 'without those of other writers'}"
        case _:
            return _of_findings(value)


def _of_findings(value: object) -> str:
    """What was counted or found, in one line."""
    match value:
        case Cost() | Comparison():
            return str(value).splitlines()[0]
        case Rates():
            return f"rates: {value.measured}"
        case Choice() | Option():
            return str(value).splitlines()[0]
        case StagedCost():
            return str(value).splitlines()[1]
        case PairCost():
            moved = f"{count(value.num_bytes, 'byte')} in {count(value.num_descriptors, 'descriptor')}"
            told = f"{moved} of {sizes(min(value.lengths), max(value.lengths))}" if value.lengths else "nothing"
            return f"{label_of(value.local)} and {label_of(value.remote)}: {told}"
        case Report():
            codes = ", ".join(dict.fromkeys(code for code, _ in value.failures))
            return str(value).splitlines()[0] + (codes and f": {codes}")
        case Difference():
            effect = f"{value.effect} {value.code}".strip()
            return f"{value.field} of {value.where}: {value.local} and {value.remote}, {effect}"
        case Picture():
            return f"picture: {value.title}"
        case _:
            raise KVPlanError("TYPE", "explain a value", expected="a value of kvplan", got=f"{type(value).__name__}")


def fit(text: str) -> Iterator[str]:
    """Text in lines of at most :data:`WIDTH` characters; those that go on with one are indented by four more.

    They are broken after a comma, else between words, else anywhere.

    >>> [len(text) for text in fit("  " + 50 * "word ")]
    [116, 120, 26]
    """
    for left in text.splitlines():
        indent = min(len(left) - len(left.lstrip()), WIDTH // 4) + 4
        while len(left) > WIDTH:
            comma, space = left.rfind(", ", WIDTH // 2, WIDTH), left.rfind(" ", indent + 1, WIDTH + 1)
            stop = comma + 1 if comma > 0 else space if space > 0 else WIDTH
            yield left[:stop].rstrip()
            left = " " * indent + left[stop:].lstrip()
        yield left


def cut(text: str) -> str:
    """One line of at most :data:`WIDTH` characters, of which dots take the place of the rest.

    >>> cut("word"), len(cut(50 * "word"))
    ('word', 120)
    """
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def group_line(group: Group) -> str:
    """A group: what a block of it holds."""
    if group.tokens_per_block is None:
        return f"group {group.name}: one state a block"
    turns = _turns(group.context)
    return f"group {group.name}: {count(group.tokens_per_block, 'token')} a block" + (turns and f", {turns}")


def views_line(views: Sequence[View], where: str = "") -> str:
    """Views of one geometry; ``where`` says in what part of which region."""
    first = views[0]
    names = fold(view.name for view in views)
    held = f"{first.block_bytes} bytes in each of {count(first.num_blocks, 'block')}, step {first.block_stride_bytes}"
    return f"view{'s' * (len(views) > 1)} {names} in group {first.group}{where}: {first.dtype}, {held}"


def plan_title(plan: TransferPlan) -> str:
    """How many of its remote workers a plan's worker reads from or writes to: those that have bytes to move."""
    verb = "reads from" if plan.operation == "READ" else "writes to"
    moving = sum(1 for pair in plan.pairs if pair.layouts)
    return f"{plan.local.label} {verb} {moving} of {count(len(plan.remotes), 'worker')}"


def staged_title(plan: StagedPlan) -> str:
    """How many workers a plan moves bytes from or to, and how many positions of each at a time."""
    return f"{plan_title(plan.direct)} in two legs: {count(plan.num_positions, 'position')} at a time"


def mesh_title(mesh: MeshPlan) -> str:
    """How many plans and workers there are."""
    return f"{count(len(mesh.plans), 'plan')} of {count(len(mesh.completions), 'worker')}"


def arrow(operation: str) -> str:
    """Which way bytes go, seen from the local worker on the left."""
    return "<-" if operation == "READ" else "->"


def _turns(context: Context) -> str:
    """Which positions a worker holds; empty where it holds all."""
    if context.size == 1:
        return ""
    turn = count(context.interleave_tokens, "position")
    return f"worker {context.rank} of {context.size} in turns of {turn}"


def _blocks(blocks: Blocks) -> str:
    some = ", ".join(map(str, blocks.ids[:SHOWN].tolist())) or "none"
    more = f", ... {blocks.ids[-1]}" if blocks.ids.size > SHOWN else ""
    which = "blocks" if blocks.scattered is None else f"{blocks.ids.size} of blocks"
    return f"{which} [{blocks.first}, {blocks.stop}) of a request: ids {some}{more}"


def _totals(tables: Sequence[Table]) -> str:
    ids, rows = sum(table.num_ids for table in tables), sum(len(table.rows) for table in tables)
    return f"{count(ids, 'id')} in {count(rows, 'local row')}"


def _table(table: Table, row: str) -> str:
    lengths = table.rows[:, 1].tolist()
    if not lengths:
        return "nothing"
    return f"{count(table.num_ids, 'id')} in {count(len(lengths), row)} of {sizes(min(lengths), max(lengths))}"


def _spec(spec: ReadSpec) -> str:
    ours, _ = spec.descriptors()
    ends = f"{label_of(spec.local)} {arrow(spec.operation)} {label_of(spec.remote)}"
    if not len(ours):
        return f"{ends}: nothing"
    lengths = sizes(int(ours[:, 1].min()), int(ours[:, 1].max()))
    return f"{ends}: {size(spec.num_bytes)} in {count(len(ours), 'descriptor')} of {lengths}"


def _chunk(chunk: Chunk) -> str:
    ranges = ", ".join(f"{name} [{start}, {stop})" for name, (start, stop) in chunk.tokens.items())
    moved, copied = (size(sum(part.num_bytes for part in side)) for side in (chunk.specs, chunk.copies))
    reads = chunk.operation == "READ"
    done = f"{moved} read, {copied} put in order" if reads else f"{copied} put in order, {moved} written"
    return f"chunk of {ranges}: {done}"


def _labels(keys: Iterable[Key]) -> str:
    """Workers, those of one engine together."""
    ranks: dict[str, list[int]] = {}
    for engine_id, rank in keys:
        ranks.setdefault(engine_id, []).append(rank)
    return ", ".join(f"{engine_id}/{intervals(found)}" for engine_id, found in ranks.items()) or "nobody"
