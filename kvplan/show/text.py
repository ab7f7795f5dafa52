"""explain: any value of kvplan as plain text, in a line, in a few lines with equal layers told once, or row by row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final, Literal

import numpy as np

from kvplan._text import count, fold, intervals, shown, size
from kvplan.describe.views import View
from kvplan.describe.worker import Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.handshake.comparison import Comparison
from kvplan.handshake.errors import PeerError
from kvplan.plan.cost import Cost
from kvplan.plan.mesh import MeshPlan
from kvplan.plan.rows import Table
from kvplan.plan.specs import Pair
from kvplan.plan.transfer import TransferPlan
from kvplan.show.lines import arrow, cut, fit, group_line, line, mesh_title, plan_title, staged_title, views_line
from kvplan.show.rows import ROWS
from kvplan.staging import Choice, StagedCost, StagedPlan
from kvplan.verification.report import Report

Detail = Literal["line", "workers", "rows"]

DETAILS: Final[tuple[Detail, ...]] = ("line", "workers", "rows")
"""How much can be told, the least first."""


def explain(value: object, *, detail: Detail = "workers") -> str:
    """What ``value`` is, for a person: a value of kvplan as plain text, without a line break at the end.

    ``detail`` says how much is told:

    - ``line``: one line of at most 120 characters, for a log. What is longer is cut.
    - ``workers``: a few lines, of at most 120 characters. A worker's regions and views are folded where they differ by
      name and place alone. A plan has one line for each remote worker that moves bytes.
    - ``rows``: every region and view of a worker, every row of a plan's tables, every descriptor of a spec. Nothing is
      folded, cut or left out.

    Small values are a line each way. Raises ``TYPE`` for anything that is not a value of kvplan, and ``NAME`` for
    another ``detail``.

    >>> from kvplan import Axis, Context, Group, Region, View, Worker, explain, plan_reads
    >>> print(explain(Group("attn", 16, Context(rank=1, size=2, interleave_tokens=4))))
    group attn: 16 tokens a block, worker 1 of 2 in turns of 4 positions
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
      group attn: 16 tokens a block
      regions kv.0-1: 1.562 MiB each, DRAM 0, the first at 0x20000000000
      views layers.0-1.k in group attn: bfloat16, 16384 bytes in each of 100 blocks, step 16384
        head [4, 8) of 8 step 4096
        token [0, 16) of 16 step 256
        dim [0, 128) of 128 step 2
    >>> plan = plan_reads(decode, [worker("prefill", 4, rank) for rank in range(4)])
    >>> print(explain(plan, detail="line"))
    decode/1 reads from 2 of 4 workers: 25872 ids in 8 local rows
    >>> print(explain(plan))
    decode/1 reads from 2 of 4 workers
      <- prefill/2: 12936 ids in 2 local rows of 8192 bytes and 2 of 256 bytes
      <- prefill/3: 12936 ids in 2 local rows of 8192 bytes and 2 of 256 bytes
    >>> print(explain(plan.pairs[2], detail="rows"))
    pair with prefill/2
      local rows
                   ids        address  length  device  stride  count  region
              [0, 100)  0x20000000000    8192       0   16384    100  kv.0
            [100, 200)  0x20040000000    8192       0   16384    100  kv.1
           [200, 6568)  0x20000000000     256       0     256   6368  kv.0
         [6568, 12936)  0x20040000000     256       0     256   6368  kv.1
      remote rows
                  ids        address  length  device  stride  count  region
             [0, 100)  0x30000000000    8192       0    8192    100  kv.0
           [100, 200)  0x30040000000    8192       0    8192    100  kv.1
          [200, 3400)  0x30000000000     256       0     256   3200  kv.0
         [3400, 6600)  0x30040000000     256       0     256   3200  kv.1
    """
    return "\n".join(explained(value, detail))


def explained(value: object, detail: Detail) -> Iterator[str]:
    """The lines of :func:`explain`, one after the other: there may be many of them."""
    if detail == "line":
        yield cut(line(value))
    elif detail == "workers":
        for text in _folded(value):
            yield from fit(text)
    elif detail == "rows":
        yield from ROWS.get(type(value), _folded)(value)
    else:
        raise KVPlanError("NAME", "explain a value", expected=f"detail in {', '.join(DETAILS)}", got=shown(detail))


def _folded(value: object) -> Iterator[str]:
    match value:
        case Worker():
            yield from _worker(value)
        case TransferPlan():
            yield from _plan(value)
        case MeshPlan():
            yield from _mesh(value)
        case StagedPlan():
            yield from (staged_title(value), *(f"  {text}" for text in str(value.cost()).splitlines()))
        case View():
            yield from _views([value])
        case Pair():
            yield f"pair with {label_of(value.remote)}: {_table(value.local_table, 'local row')}"
        case Table():
            yield f"table: {_table(value, 'row')}"
        case Report() | Cost() | StagedCost() | Choice() | Comparison():
            yield str(value)
        case PeerError():
            yield from (line(value), *(f"  {problem}" for problem in value.problems))
        case _:
            yield line(value)


def _alike(values: Iterable[Any], key: Callable[[Any], Hashable]) -> list[list[Any]]:
    """The values in lists of equal key, in order of appearance."""
    lists: dict[Hashable, list[Any]] = {}
    for value in values:
        lists.setdefault(key(value), []).append(value)
    return list(lists.values())


def _worker(worker: Worker) -> Iterator[str]:
    yield str(worker)
    for group in worker.groups:
        yield f"  {group_line(group)}"
    for regions in _alike(worker.regions, lambda region: (region.size_bytes, region.memory, region.device_id)):
        first, several = regions[0], len(regions) > 1
        names = fold(region.name for region in regions)
        where = f"{first.memory} {first.device_id}, {'the first at' if several else 'at'} {first.address:#x}"
        yield f"  region{'s' * several} {names}: {size(first.size_bytes)}{' each' * several}, {where}"
    for views in _alike(worker.views, lambda v: (v.group, v.dtype, v.axes, v.num_blocks, v.block_stride_bytes)):
        yield from (f"  {text}" for text in _views(views))


def _views(views: list[View]) -> Iterator[str]:
    """Views of one geometry."""
    yield views_line(views)
    for axis in views[0].axes:
        yield f"  {axis}"


def _table(table: Table, row: str) -> str:
    """How many ids, in which rows, called ``row``: rows of one length together, the longest first."""
    lengths, times = np.unique(table.rows[:, 1], return_counts=True)
    found = [*zip(lengths.tolist(), times.tolist(), strict=True)][::-1]
    if not found:
        return "nothing"
    (longest, number), *shorter = found
    told = [f"{count(number, row)} of {size(longest)}", *(f"{number} of {size(length)}" for length, number in shorter)]
    *others, last = told
    return f"{count(table.num_ids, 'id')} in {' and '.join(filter(None, (', '.join(others), last)))}"


def _plan(plan: TransferPlan) -> Iterator[str]:
    yield plan_title(plan)
    for pair in plan.pairs:
        if pair.local_table.num_ids:
            told = _table(pair.local_table, "local row")
            yield f"  {arrow(plan.operation)} {label_of(pair.remote)}: {told}"


def _mesh(mesh: MeshPlan) -> Iterator[str]:
    yield mesh_title(mesh)
    for plan in mesh.plans:
        yield from (f"  {text}" for text in _plan(plan))
    known = {plan.local.key for plan in mesh.plans}
    waiting = [(key, len(each.awaits)) for key, each in mesh.completions.items() if key not in known]
    for waits in _alike(waiting, lambda item: (item[0][0], item[1])):
        (engine, _), times = waits[0]
        each = ": each awaits" if len(waits) > 1 else " awaits"
        yield f"  {engine}/{intervals(rank for (_, rank), _ in waits)}{each} {count(times, 'completion')}"
