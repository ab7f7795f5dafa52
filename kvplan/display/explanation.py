"""explain: any value of kvplan as plain text, in one line, in a few lines, or row by row."""

from __future__ import annotations

import functools
import itertools
import operator
import textwrap
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np

from kvplan._checks import integer, is_one_of
from kvplan._text import WIDTH, count, fold, shown, size, sizes
from kvplan.budget import Budget
from kvplan.describe.blocks import Blocks
from kvplan.describe.views import Group, Region, View
from kvplan.describe.worker import Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.handshake.messages import PeerError
from kvplan.plan.mesh import MeshPlan
from kvplan.plan.specs import DIRECTIONS, Pair, ReadSpec
from kvplan.plan.tables import Table
from kvplan.plan.transfer import TransferPlan
from kvplan.staging.plan import StagedPlan
from kvplan.verification.report import PROMISES, Report

Detail = Literal["line", "workers", "rows"]

DETAILS: Final[tuple[Detail, ...]] = ("line", "workers", "rows")

TABLE_HEADS: Final = ("ids", "address", "length", "device", "stride", "count", "region")

ROW_BYTES: Final = 1500
"""Estimated cost of the text of a row."""

MAX_IDS_SHOWN: Final = 8
"""Of more block ids than this, a line has the first and the last."""


def explain(value: object, *, detail: Detail = "workers", width: int = WIDTH) -> str:
    """Return a value of kvplan as plain text, without a line break at the end.

    ``detail`` says how much text:

    - ``line``: one line of at most ``width`` characters, for a log. What is longer is cut.
    - ``workers``: a few lines of at most ``width`` characters, the first of which is that line.
      Regions and views of a worker are folded where they differ in name and address only. A plan
      has a line for each remote worker that moves bytes.
    - ``rows``: every region and view of a worker, every row of a plan's tables, every descriptor of
      a spec. Nothing is folded, cut or left out.

    Other values, such as a cost, are their own ``str``, and its first line. Raises ``TYPE`` for
    anything that is not a value of kvplan, ``NAME`` for another ``detail``, and ``RANGE`` for a
    ``width`` below 40.

    >>> from kvplan import Axis, Group, Region, View, Worker, explain, plan_reads
    >>> def worker(engine, tp, rank):
    ...     heads = 8 // tp
    ...     size = heads * 4096
    ...     axes = (Axis("head", rank * heads, rank * heads + heads, 8, 4096),
    ...             Axis("token", 0, 16, 16, 256), Axis("dim", 0, 128, 128, 2))
    ...     regions, views = [], []
    ...     for i in (0, 1):
    ...         regions.append(Region(f"kv.{i}", (rank + 1 << 40) + (i << 30), 100 * size))
    ...         name = f"layers.{i}.k"
    ...         views.append(View(name, "attn", f"kv.{i}", "bfloat16", axes, 100, size))
    ...     return Worker(engine, rank, regions, [Group("attn", 16)], views)
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
        expected = f"detail in {', '.join(DETAILS)}"
        raise KVPlanError("NAME", "explain a value", expected=expected, got=shown(detail))
    lines = _lines(value, detail == "rows")
    width = integer(width, "width of an explanation", low=40)
    if detail == "line":
        line = next(lines)
        return line if len(line) <= width else f"{line[: width - 3]}..."
    if detail == "workers":
        lines = itertools.chain.from_iterable(wrap_line(line, width) for line in lines)
    return "\n".join(lines)


def wrap_line(line: str, width: int = WIDTH) -> list[str]:
    """Return a line in lines of at most ``width`` characters, the later ones indented by four more.

    >>> [len(text) for text in wrap_line("  " + 50 * "word ")]
    [116, 120, 25]
    """
    indent = " " * (min(len(line) - len(line.lstrip()), width // 4) + 4)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)


@functools.singledispatch
def _lines(value: object, rows: bool) -> Iterator[str]:
    """Yield the lines of a value, with all ``rows`` or folded. The first is its summary."""
    if not type(value).__module__.startswith("kvplan."):
        is_engine = isinstance(value, tuple)
        raise KVPlanError(
            "TYPE",
            "explain a value",
            expected="a value of kvplan",
            got=type(value).__name__,
            hint="an engine is a tuple of workers: explain(engine[0])" if is_engine else "",
        )
    yield from str(value).splitlines()


@_lines.register
def _worker(worker: Worker, rows: bool) -> Iterator[str]:
    yield str(worker)
    for group in worker.groups:
        yield from _indented(_group(group, rows))
    # Folded, regions are one line if they differ in name and address only; so are views.
    region_key = operator.attrgetter("size_bytes", "memory", "device_id")
    for regions in _equal(worker.regions, None if rows else region_key):
        yield f"  {_regions(regions, rows)}"
    view_key = operator.attrgetter("group", "dtype", "axes", "num_blocks", "block_stride_bytes")
    for views in _equal(worker.views, None if rows else view_key):
        yield from _indented(_views(views, rows))


def _regions(regions: Sequence[Region], rows: bool) -> str:
    """Return in words regions that differ in name and address only."""
    first = regions[0]
    names = fold(region.name for region in regions)
    num_bytes = count(first.size_bytes, "byte") if rows else size(first.size_bytes)
    device = f"{first.memory} {first.device_id}"
    if len(regions) > 1:
        return f"regions {names}: {num_bytes} each, {device}, the first at {first.address:#x}"
    return f"region {names}: {num_bytes}, {device}, at {first.address:#x}"


@_lines.register
def _group(group: Group, rows: bool) -> Iterator[str]:
    tokens = group.tokens_per_block
    content = "one state" if tokens is None else count(tokens, "token")
    if group.tokens_per_slot > 1:
        content = f"{count(group.num_slots, 'value')} of {group.tokens_per_slot} tokens each"
    context = ""
    if group.context.size > 1:
        interleave = count(group.context.interleave_tokens, "position")
        rank = f"context rank {group.context.rank} of {group.context.size}"
        context = f", {rank}, interleaved by {interleave}"
    yield f"group {group.name}: {content} per block{context}"


@_lines.register
def _view(view: View, rows: bool) -> Iterator[str]:
    return _views([view], rows)


def _views(views: Sequence[View], rows: bool) -> Iterator[str]:
    """Yield in words views that differ in name and address only."""
    first = views[0]
    place = f" at byte {first.offset_bytes} of region {first.region}" if rows else ""
    title = f"view{'s' * (len(views) > 1)} {fold(view.name for view in views)}"
    blocks = f"each of {count(first.num_blocks, 'block')}, stride {first.block_stride_bytes}"
    content = f"{first.dtype}, {first.block_bytes} bytes in {blocks}"
    yield f"{title} in group {first.group}{place}: {content}"
    yield from _indented(map(str, first.axes))


@_lines.register
def _blocks(blocks: Blocks, rows: bool) -> Iterator[str]:
    ids = ", ".join(map(str, blocks.ids[:MAX_IDS_SHOWN].tolist())) or "none"
    if blocks.ids.size > MAX_IDS_SHOWN:
        ids += f", ... {blocks.ids[-1]}"
    # `twice` is None in a table without repeats: no id equals it.
    num_repeats = int(np.count_nonzero(blocks.ids == blocks.twice))
    if num_repeats:
        ids += f"; id {blocks.twice} {num_repeats} times"
    title = "blocks" if blocks.scattered is None else f"{blocks.ids.size} of blocks"
    yield f"{title} [{blocks.first}, {blocks.stop}) of a request: ids {ids}"
    if rows:
        for ordinal, block in zip(blocks.ordinals.tolist(), blocks.ids.tolist(), strict=True):
            yield f"  block {ordinal} of the request: id {block}"


@_lines.register
def _plan(plan: TransferPlan, rows: bool) -> Iterator[str]:
    pairs = [pair for pair in plan.pairs if pair.local_table.num_ids]
    yield f"{_ends(plan)}: {_totals(pairs)}"
    for pair in plan.pairs if rows else pairs:
        yield from _indented(_pair(pair, rows, f"{plan.direction.arrow} {label_of(pair.remote)}"))
    hint = "see 'kvplan advise' for layouts, choose for staging, with longer runs"
    for name in _groups_by_token(plan, pairs):
        yield f"  group {name}: tokens move one by one; {hint}"


def _groups_by_token(plan: TransferPlan, pairs: Iterable[Pair]) -> dict[str, None]:
    """Return the local groups of several tokens per block whose tokens move one by one."""
    local = plan.direction.local
    names: dict[str, None] = {}
    for pair in pairs:
        for ids in pair.group_pairs:
            # Tokens that no longer run covers move one by one in every request.
            is_joined = all(tokens.only_at_cuts for tokens in ids.tokens)
            if not is_joined and min(group.num_slots for group in ids.groups) > 1:
                names[ids.groups[local].name] = None
    return names


def _ends(plan: TransferPlan) -> str:
    """Return in words which worker reads from or writes to how many others."""
    num_moving = sum(pair.local_table.num_ids > 0 for pair in plan.pairs)
    verb = "reads from" if plan.operation == "READ" else "writes to"
    return f"{plan.local.label} {verb} {num_moving} of {count(len(plan.remotes), 'worker')}"


def _totals(pairs: Iterable[Pair]) -> str:
    tables = [pair.local_table for pair in pairs]
    num_ids = sum(table.num_ids for table in tables)
    num_rows = sum(len(table.rows) for table in tables)
    return f"{count(num_ids, 'id')} in {count(num_rows, 'local row')}"


@_lines.register
def _pair(pair: Pair, rows: bool, title: str = "") -> Iterator[str]:
    title = title or f"pair with {label_of(pair.remote)}"
    yield f"{title}: {_in_rows(pair.local_table, 'local row')}"
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
    """Return in words the number of ids and of rows of each length, the longest first."""
    # Ascending lengths, each with its number of rows.
    lengths, numbers = np.unique(table.rows[:, 1], return_counts=True)
    texts: list[str] = []
    for length, number in zip(lengths[::-1].tolist(), numbers[::-1].tolist(), strict=True):
        num_rows = number if texts else count(number, row)
        texts.append(f"{num_rows} of {size(length)}")
    return f"{count(table.num_ids, 'id')} in {', '.join(texts)}" if texts else "nothing"


def rows_of(table: Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, each with its ids ``[first_id, stop_id)`` and its region."""
    fields = ("address", "length", "device", "stride", "count")
    columns = table.first.tolist(), table.region.tolist(), table.rows.tolist()
    for first_id, region_index, row in zip(*columns, strict=True):
        numbers = dict(zip(fields, row, strict=True))
        ids = {"first_id": first_id, "stop_id": first_id + numbers["count"]}
        yield {**ids, **numbers, "region": table.regions[region_index].name}


def _columns(table: Table) -> Iterator[str]:
    """Yield every row of a table, below heads."""
    Budget().spend(len(table.rows), "rows", ROW_BYTES, "explain a table")
    lines: list[Sequence[str]] = [TABLE_HEADS]
    for row in rows_of(table):
        ids = f"[{row['first_id']}, {row['stop_id']})"
        numbers = [str(row[head]) for head in TABLE_HEADS[2:]]
        lines.append([ids, f"{row['address']:#x}", *numbers])
    return _aligned(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield words in columns, the last one to the left and the rest to the right."""
    # A width for each column of words.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for *words, last in lines:
        cells = [word.rjust(width) for word, width in zip(words, widths, strict=False)]
        yield "  ".join([*cells, last])


@_lines.register
def _mesh(mesh: MeshPlan, rows: bool) -> Iterator[str]:
    pairs = [pair for plan in mesh.plans for pair in plan.pairs if pair.local_table.num_ids]
    engines = f"{count(len(mesh.plans), 'plan')} for {count(mesh.num_workers, 'worker')}"
    yield f"{engines}, {count(len(pairs), 'pair')} with bytes to move: {_totals(pairs)}"
    for plan in mesh.plans:
        yield from _indented(_plan(plan, rows))


@_lines.register
def _spec(spec: ReadSpec, rows: bool) -> Iterator[str]:
    local, remote = spec.descriptors()
    local_label = label_of(spec.local)
    remote_label = label_of(spec.remote)
    ends = f"{local_label} {DIRECTIONS[spec.operation].arrow} {remote_label}"
    lengths = local[:, 1].tolist()
    if not lengths:
        yield f"{ends}: nothing"
        return
    number = count(len(lengths), "descriptor")
    yield f"{ends}: {size(spec.num_bytes)} in {number} of {sizes(min(lengths), max(lengths))}"
    if rows:
        remote_address = f"address of {remote_label}"
        lines = [["length", "device", f"address of {local_label}", "device", remote_address]]
        for local_range, remote_range in zip(local.tolist(), remote.tolist(), strict=True):
            address, length, device = local_range
            remote_start, _, remote_device = remote_range
            ends_of_copy = f"{device}", f"{address:#x}", f"{remote_device}", f"{remote_start:#x}"
            lines.append([f"{length}", *ends_of_copy])
        yield from _indented(_aligned(lines))


@_lines.register
def _staged(plan: StagedPlan, rows: bool) -> Iterator[str]:
    yield f"{_ends(plan.direct)} in two steps, through a staging buffer"
    yield from _indented(str(plan.cost()).splitlines())


@_lines.register
def _report(report: Report, rows: bool) -> Iterator[str]:
    yield from str(report).splitlines()
    if rows:
        yield from (f"  checked {code}: {PROMISES[code]}" for code in report.checked)
        yield from (f"  not written: {tail}" for tail in report.tails)


@_lines.register
def _peer_error(error: PeerError, rows: bool) -> Iterator[str]:
    yield " ".join(str(error).split())
    yield from _indented(map(str, error.problems))


def _equal(values: Iterable[Any], key: Callable[[Any], Hashable] | None) -> list[list[Any]]:
    """Return values in lists of equal ``key``, in order of appearance; one by one without a key."""
    lists: dict[Hashable, list[Any]] = {}
    for i, value in enumerate(values):
        lists.setdefault(i if key is None else key(value), []).append(value)
    return list(lists.values())


def _indented(lines: Iterable[str], by: int = 2) -> Iterator[str]:
    return (" " * by + text for text in lines)
