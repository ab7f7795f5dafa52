"""Rows: the text of values whose parts are many, with every part on a line of its own and nothing folded.

>>> from kvplan import Model, plan_reads
>>> decode, prefill = (Model.shipped("falcon-mamba-7b").engine(name, num_blocks=9)[0] for name in ("decode", "prefill"))
>>> plan = plan_reads(decode, [prefill])
>>> for text in list(table(plan.pairs[0].local_table))[:3]:
...     print(text)
       ids            address  length  device  stride  count  region
    [0, 9)  0x81f000000000000  573440       0  573440      9  layers.0.state
   [9, 18)  0x81f000000800000  573440       0  573440      9  layers.1.state
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._text import count
from kvplan.describe.blocks import Blocks
from kvplan.describe.views import View
from kvplan.describe.worker import Key, Worker, label_of
from kvplan.plan.cost import Cost
from kvplan.plan.mesh import MeshPlan
from kvplan.plan.rows import Table
from kvplan.plan.specs import Pair, ReadSpec
from kvplan.plan.transfer import TransferPlan
from kvplan.show.lines import arrow, group_line, line, mesh_title, plan_title, views_line
from kvplan.verification.report import Report


@attrs.frozen
class Row:
    """A row of a table: the ids of its descriptors are ``[first_id, stop_id)``, the rest is as in ``Table.rows``."""

    first_id: int
    stop_id: int
    address: int
    length: int
    device: int
    stride: int
    count: int
    region: str


def rows_of(of: Table) -> Iterator[Row]:
    """The rows of a table, in order of their ids."""
    for first, region, row in zip(of.first.tolist(), of.region.tolist(), of.rows.tolist(), strict=True):
        address, length, device, stride, descriptors = row
        name = of.regions[region].name
        yield Row(first, first + descriptors, address, length, device, stride, descriptors, name)


def columns(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of words below their heads: in columns to the right, the last one to the left.

    >>> print(*columns(("id", "name"), [("9", "a"), ("10", "b")]), sep="\\n")
    id  name
     9  a
    10  b
    """
    every = [heads, *lines]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    for words in every:
        *others, last = words
        yield "  ".join([*(word.rjust(width) for word, width in zip(others, widths, strict=False)), last])


def table(of: Table) -> Iterator[str]:
    """Every row of a table, below heads."""
    heads = ("ids", "address", "length", "device", "stride", "count", "region")
    yield from columns(heads, [_words(row) for row in rows_of(of)])


def _words(row: Row) -> tuple[str, ...]:
    ids, address = f"[{row.first_id}, {row.stop_id})", f"{row.address:#x}"
    return ids, address, f"{row.length}", f"{row.device}", f"{row.stride}", f"{row.count}", row.region


def _table(of: Table) -> Iterator[str]:
    yield line(of)
    yield from _indented(table(of))


def _pair(pair: Pair, title: str = "") -> Iterator[str]:
    if not len(pair.local_table.rows):
        yield f"{title or f'pair with {label_of(pair.remote)}'}: nothing"
        return
    yield title or f"pair with {label_of(pair.remote)}"
    for side, of in (("local", pair.local_table), ("remote", pair.remote_table)):
        yield f"  {side} rows"
        yield from _indented(table(of), 4)


def _plan(plan: TransferPlan) -> Iterator[str]:
    yield plan_title(plan)
    for pair in plan.pairs:
        yield from _indented(_pair(pair, f"{arrow(plan.operation)} {label_of(pair.remote)}"))


def _mesh(mesh: MeshPlan) -> Iterator[str]:
    yield mesh_title(mesh)
    for plan in mesh.plans:
        yield from _indented(_plan(plan))
    for key, each in mesh.completions.items():
        yield f"  {label_of(key)} sends completions to {_labels(each.sends)}, awaits those of {_labels(each.awaits)}"


def _labels(keys: Iterable[Key]) -> str:
    return ", ".join(map(label_of, keys)) or "nobody"


def _worker(worker: Worker) -> Iterator[str]:
    yield str(worker)
    for group in worker.groups:
        yield f"  {group_line(group)}"
    for region in worker.regions:
        yield f"  {line(region)}"
    for view in worker.views:
        yield from _indented(_view(view))


def _view(view: View) -> Iterator[str]:
    yield views_line([view], f" at byte {view.offset_bytes} of region {view.region}")
    for axis in view.axes:
        yield f"  {axis}"


def _spec(spec: ReadSpec) -> Iterator[str]:
    yield line(spec)
    ours, theirs = (side.tolist() for side in spec.descriptors())
    lines = (
        (f"{length}", f"{device}", f"{near:#x}", f"{far_device}", f"{far:#x}")
        for (near, length, device), (far, _, far_device) in zip(ours, theirs, strict=True)
    )
    heads = ("length", "device", f"address of {label_of(spec.local)}", "device", f"address of {label_of(spec.remote)}")
    yield from _indented(columns(heads, lines) if ours else ())


def _cost(cost: Cost) -> Iterator[str]:
    yield line(cost)
    for pair in cost.pairs:
        rows = f"{pair.local_rows} and {count(pair.remote_rows, 'row')}"
        yield f"  {label_of(pair.local)} {arrow(cost.operation)} {label_of(pair.remote)}: {rows}"
        for length, times in pair.lengths.items():
            yield f"    {count(times, 'descriptor')} of {count(length, 'byte')}"


def _report(report: Report) -> Iterator[str]:
    yield from str(report).splitlines()
    for tail in report.tails:
        yield f"  left alone: {tail}"


def _blocks(blocks: Blocks) -> Iterator[str]:
    yield line(blocks)
    for ordinal, block in zip(blocks.ordinals.tolist(), blocks.ids.tolist(), strict=True):
        yield f"  block {ordinal} of the request: id {block}"


def _indented(lines: Iterable[str], by: int = 2) -> Iterator[str]:
    return (" " * by + text for text in lines)


ROWS: Final[Mapping[type, Callable[[Any], Iterator[str]]]] = MappingProxyType(
    {
        Blocks: _blocks,
        Cost: _cost,
        MeshPlan: _mesh,
        Pair: _pair,
        ReadSpec: _spec,
        Report: _report,
        Table: _table,
        TransferPlan: _plan,
        View: _view,
        Worker: _worker,
    }
)
"""The functions that tell every row, by the class of what they tell."""
