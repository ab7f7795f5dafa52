"""explain: any value of kvplan as plain text, in one line, in a few lines with equal layers folded, or row by row."""

from __future__ import annotations

import functools
import operator
import textwrap
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np

from kvplan._checks import integer, is_one_of
from kvplan._text import WIDTH, count, fold, intervals, shown, size, sizes
from kvplan.describe.blocks import Blocks
from kvplan.describe.views import Group, View
from kvplan.describe.worker import Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.handshake.messages import PeerError
from kvplan.plan.align import slots
from kvplan.plan.mesh import MeshPlan
from kvplan.plan.rows import Table
from kvplan.plan.specs import Pair, ReadSpec
from kvplan.plan.transfer import TransferPlan
from kvplan.staging.plan import StagedPlan
from kvplan.verification.verifier import Report

Detail = Literal["line", "workers", "rows"]

DETAILS: Final[tuple[Detail, ...]] = ("line", "workers", "rows")

MAX_IDS: Final = 8
"""Of more block ids than this, a line has the first and the last."""


def explain(value: object, *, detail: Detail = "workers", width: int = WIDTH) -> str:
    """A value of kvplan as plain text, without a line break at the end.

    ``detail`` says how much text:

    - ``line``: one line of at most ``width`` characters, for a log. What is longer is cut.
    - ``workers``: a few lines of at most ``width`` characters, the first of which is that line. Regions and views of a
      worker are folded where they differ in name and place only. A plan has a line for each remote worker that moves
      bytes.
    - ``rows``: every region and view of a worker, every row of a plan's tables, every descriptor of a spec. Nothing is
      folded, cut or left out.

    Other values, such as a cost, are their own ``str``, and its first line. Raises ``TYPE`` for anything that is not a
    value of kvplan, ``NAME`` for another ``detail``, and ``RANGE`` for a ``width`` below 40.

    >>> from kvplan import Axis, Group, Region, View, Worker, explain, plan_reads
    >>> def worker(engine, tp, rank):
    ...     heads = 8 // tp
    ...     axes = (Axis("head", rank * heads, rank * heads + heads, 8, 4096),
    ...             Axis("token", 0, 16, 16, 256), Axis("dim", 0, 128, 128, 2))
    ...     size = heads * 4096
    ...     return Worker(engine, rank, [Region(f"kv.{i}", (rank + 1 << 40) + (i << 30), 100 * size) for i in (0, 1)],
    ...                   [Group("attn", 16)],
    ...                   [View(f"layers.{i}.k", "attn", f"kv.{i}", "bfloat16", axes, 100, size) for i in (0, 1)])
    >>> decode = worker("decode", 2, 1)
    >>> print(explain(decode))
    decode/1: 2 views of 2 tensors in 2 regions, 1 group
      group attn: 16 tokens per block
      regions kv.0-1: 1.562 MiB each, DRAM 0, the first at 0x20000000000
      views layers.0-1.k in group attn: bfloat16, 16384 bytes in each of 100 blocks, stride 16384
        head [4, 8) of 8 stride 4096
        token [0, 16) of 16 stride 256
        dim [0, 128) of 128 stride 2
    >>> plan = plan_reads(decode, [worker("prefill", 4, rank) for rank in range(4)])
    >>> print(explain(plan))
    decode/1 reads from 2 of 4 workers: 25872 ids in 8 local rows
      <- prefill/2: 12936 ids in 2 local rows of 8192 bytes, 2 of 256 bytes
      <- prefill/3: 12936 ids in 2 local rows of 8192 bytes, 2 of 256 bytes
    >>> print(explain(plan.pairs[2].remote_table, detail="rows"))
    table: 6600 ids in 2 rows of 8192 bytes, 2 of 256 bytes
               ids        address  length  device  stride  count  region
          [0, 100)  0x30000000000    8192       0    8192    100  kv.0
        [100, 200)  0x30040000000    8192       0    8192    100  kv.1
       [200, 3400)  0x30000000000     256       0     256   3200  kv.0
      [3400, 6600)  0x30040000000     256       0     256   3200  kv.1
    """
    if not is_one_of(detail, DETAILS):
        raise KVPlanError("NAME", "explain a value", expected=f"detail in {', '.join(DETAILS)}", got=shown(detail))
    lines, width = _lines(value, detail == "rows"), integer(width, "width of an explanation", low=40)
    if detail == "line":
        line = next(lines)
        return line if len(line) <= width else f"{line[: width - 3]}..."
    return "\n".join(lines if detail == "rows" else [part for line in lines for part in fit(line, width)])


def fit(line: str, width: int = WIDTH) -> list[str]:
    """A line in lines of at most ``width`` characters, each after the first indented by four more.

    >>> [len(text) for text in fit("  " + 50 * "word ")]
    [116, 120, 25]
    """
    indent = " " * (min(len(line) - len(line.lstrip()), width // 4) + 4)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)


@functools.singledispatch
def _lines(value: object, rows: bool) -> Iterator[str]:
    """The lines of a value, with all ``rows`` or folded. The first says what it is."""
    if not type(value).__module__.startswith("kvplan."):
        hint = "an engine is a tuple of workers: explain(engine[0])" if isinstance(value, tuple) else ""
        raise KVPlanError("TYPE", "explain a value", expected="a value of kvplan", got=type(value).__name__, hint=hint)
    yield from str(value).splitlines()


@_lines.register
def _worker(worker: Worker, rows: bool) -> Iterator[str]:
    yield str(worker)
    for group in worker.groups:
        yield from _indented(_group(group, rows))
    for regions in _equal(worker.regions, None if rows else operator.attrgetter("size_bytes", "memory", "device_id")):
        first, several = regions[0], len(regions) > 1
        names, held = (
            fold(one.name for one in regions),
            count(first.size_bytes, "byte") if rows else size(first.size_bytes),
        )
        where = f"{first.memory} {first.device_id}, {'the first at' if several else 'at'} {first.address:#x}"
        yield f"  region{'s' * several} {names}: {held}{' each' * several}, {where}"
    shape = operator.attrgetter("group", "dtype", "axes", "num_blocks", "block_stride_bytes")
    for views in _equal(worker.views, None if rows else shape):
        yield from _indented(_views(views, rows))


@_lines.register
def _group(group: Group, rows: bool) -> Iterator[str]:
    held = "one state" if group.tokens_per_block is None else count(group.tokens_per_block, "token")
    context, interleave = group.context, count(group.context.interleave_tokens, "position")
    shared = f", context rank {context.rank} of {context.size}, interleaved by {interleave}" if context.size > 1 else ""
    yield f"group {group.name}: {held} per block{shared}"


@_lines.register
def _view(view: View, rows: bool) -> Iterator[str]:
    return _views([view], rows)


def _views(views: Sequence[View], rows: bool) -> Iterator[str]:
    """Views that differ in name and place only."""
    first = views[0]
    where = f" at byte {first.offset_bytes} of region {first.region}" if rows else ""
    held = f"{first.block_bytes} bytes in each of {count(first.num_blocks, 'block')}, stride {first.block_stride_bytes}"
    name = f"view{'s' * (len(views) > 1)} {fold(view.name for view in views)}"
    yield f"{name} in group {first.group}{where}: {first.dtype}, {held}"
    yield from _indented(map(str, first.axes))


@_lines.register
def _blocks(blocks: Blocks, rows: bool) -> Iterator[str]:
    some = ", ".join(map(str, blocks.ids[:MAX_IDS].tolist())) or "none"
    more = f", ... {blocks.ids[-1]}" if blocks.ids.size > MAX_IDS else ""
    which = "blocks" if blocks.scattered is None else f"{blocks.ids.size} of blocks"
    times = int(np.count_nonzero(blocks.ids == blocks.twice))
    again = f"; id {blocks.twice} {times} times" if times else ""
    yield f"{which} [{blocks.first}, {blocks.stop}) of a request: ids {some}{more}{again}"
    if rows:
        for ordinal, block in zip(blocks.ordinals.tolist(), blocks.ids.tolist(), strict=True):
            yield f"  block {ordinal} of the request: id {block}"


@_lines.register
def _plan(plan: TransferPlan, rows: bool) -> Iterator[str]:
    pairs = [pair for pair in plan.pairs if pair.local_table.num_ids]
    yield f"{_ends(plan)}: {_totals(pairs)}"
    for pair in plan.pairs if rows else pairs:
        yield from _indented(_pair(pair, rows, f"{_arrow(plan.operation)} {label_of(pair.remote)}"))
    every = [groups for pair in pairs for groups in pair.group_pairs if not all(one.joined for one in groups.tokens)]
    near = 0 if plan.operation == "READ" else 1
    for name in dict.fromkeys(each.groups[near].name for each in every if min(map(slots, each.groups)) > 1):
        yield f"  group {name}: tokens move one by one; see advise for layouts, choose for staging, with longer runs"


def _ends(plan: TransferPlan) -> str:
    """Which worker reads from or writes to how many of the others."""
    moving = sum(pair.local_table.num_ids > 0 for pair in plan.pairs)
    verb = "reads from" if plan.operation == "READ" else "writes to"
    return f"{plan.local.label} {verb} {moving} of {count(len(plan.remotes), 'worker')}"


def _arrow(operation: str) -> str:
    """Which way bytes go, with the local worker on the left."""
    return "<-" if operation == "READ" else "->"


def _totals(pairs: Iterable[Pair]) -> str:
    tables = [pair.local_table for pair in pairs]
    ids, number = sum(table.num_ids for table in tables), sum(len(table.rows) for table in tables)
    return f"{count(ids, 'id')} in {count(number, 'local row')}"


@_lines.register
def _pair(pair: Pair, rows: bool, title: str = "") -> Iterator[str]:
    yield f"{title or f'pair with {label_of(pair.remote)}'}: {_in_rows(pair.local_table, 'local row')}"
    for side, table in (("local", pair.local_table), ("remote", pair.remote_table)):
        if rows and table.num_ids:
            yield f"  {side} rows"
            yield from _indented(_columns(table), 4)


@_lines.register
def _table(table: Table, rows: bool) -> Iterator[str]:
    yield f"table: {_in_rows(table, 'row')}"
    if rows:
        yield from _indented(_columns(table))


def _in_rows(table: Table, row: str) -> str:
    """How many ids there are in how many rows, rows of one length together, the longest first."""
    lengths, numbers = np.unique(table.rows[:, 1], return_counts=True)
    found = [(number, size(length)) for length, number in zip(lengths.tolist(), numbers.tolist(), strict=True)][::-1]
    texts = [f"{count(number, row) if i == 0 else number} of {length}" for i, (number, length) in enumerate(found)]
    return f"{count(table.num_ids, 'id')} in {', '.join(texts)}" if texts else "nothing"


def rows_of(table: Table) -> Iterator[dict[str, Any]]:
    """The rows of a table as ``Table.rows`` has them, each with its ids ``[first_id, stop_id)`` and its region."""
    for first, region, row in zip(table.first.tolist(), table.region.tolist(), table.rows.tolist(), strict=True):
        numbers = dict(zip(("address", "length", "device", "stride", "count"), row, strict=True))
        name = table.regions[region].name
        yield {"first_id": first, "stop_id": first + numbers["count"], **numbers, "region": name}


def _columns(table: Table) -> Iterator[str]:
    """Every row of a table, below heads."""
    rows = [
        (f"[{row['first_id']}, {row['stop_id']})", f"{row['address']:#x}", *map(str, [*row.values()][3:]))
        for row in rows_of(table)
    ]
    return _aligned([("ids", "address", "length", "device", "stride", "count", "region"), *rows])


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Words in columns, the last one to the left and others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for *words, last in lines:
        yield "  ".join([*(word.rjust(width) for word, width in zip(words, widths, strict=False)), last])


@_lines.register
def _mesh(mesh: MeshPlan, rows: bool) -> Iterator[str]:
    pairs = [pair for plan in mesh.plans for pair in plan.pairs if pair.local_table.num_ids]
    engines = f"{count(len(mesh.plans), 'plan')} for {count(len(mesh.completions), 'worker')}"
    yield f"{engines}, {count(len(pairs), 'pair')} with bytes to move: {_totals(pairs)}"
    for plan in mesh.plans:
        yield from _indented(_plan(plan, rows))
    if rows:
        for key, each in mesh.completions.items():
            sends, awaits = (", ".join(map(label_of, keys)) or "nobody" for keys in (each.sends, each.awaits))
            yield f"  {label_of(key)} sends completions to {sends}, awaits those of {awaits}"
        return
    planned = {plan.local.key for plan in mesh.plans}
    awaited = [(*key, len(each.awaits)) for key, each in mesh.completions.items() if key not in planned]
    for workers in _equal(awaited, operator.itemgetter(0, 2)):
        (engine, _, number), several = workers[0], len(workers) > 1
        ranks = intervals(rank for _, rank, _ in workers)
        yield f"  {engine}/{ranks}{': each awaits' if several else ' awaits'} {count(number, 'completion')}"


@_lines.register
def _spec(spec: ReadSpec, rows: bool) -> Iterator[str]:
    near, far = spec.descriptors()
    local, remote = label_of(spec.local), label_of(spec.remote)
    ends, lengths = f"{local} {_arrow(spec.operation)} {remote}", near[:, 1].tolist()
    if not lengths:
        yield f"{ends}: nothing"
        return
    number = count(len(lengths), "descriptor")
    yield f"{ends}: {size(spec.num_bytes)} in {number} of {sizes(min(lengths), max(lengths))}"
    if rows:
        both = zip(near.tolist(), far.tolist(), strict=True)
        found = [(f"{n}", f"{device}", f"{a:#x}", f"{other}", f"{b:#x}") for (a, n, device), (b, _, other) in both]
        heads = ("length", "device", f"address of {local}", "device", f"address of {remote}")
        yield from _indented(_aligned([heads, *found]))


@_lines.register
def _staged(plan: StagedPlan, rows: bool) -> Iterator[str]:
    yield f"{_ends(plan.direct)} in two steps, through a staging buffer"
    yield from _indented(str(plan.cost()).splitlines())


@_lines.register
def _report(report: Report, rows: bool) -> Iterator[str]:
    yield from str(report).splitlines()
    if rows:
        yield from (f"  not written: {tail}" for tail in report.tails)


@_lines.register
def _peer_error(error: PeerError, rows: bool) -> Iterator[str]:
    yield " ".join(str(error).split())
    yield from _indented(map(str, error.problems))


def _equal(values: Iterable[Any], key: Callable[[Any], Hashable] | None) -> list[list[Any]]:
    """The values in lists of equal ``key``, in order of appearance; each by itself if there is no key."""
    lists: dict[Hashable, list[Any]] = {}
    for i, value in enumerate(values):
        lists.setdefault(i if key is None else key(value), []).append(value)
    return list(lists.values())


def _indented(lines: Iterable[str], by: int = 2) -> Iterator[str]:
    return (" " * by + text for text in lines)
