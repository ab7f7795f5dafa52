"""explain: any value of kvplan as a few lines of plain text, equal layers told once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvplan.axes import Axis
from kvplan.blocks import Blocks
from kvplan.cost import Cost
from kvplan.errors import KVPlanError
from kvplan.mesh import MeshPlan
from kvplan.names import fold, intervals
from kvplan.plan import Pair, TransferPlan
from kvplan.reading import count
from kvplan.report import Report
from kvplan.specs import ReadSpec
from kvplan.tables import Table
from kvplan.views import Context, Group, Region, View
from kvplan.workers import Worker, label_of


def explain(value: object) -> str:
    """What ``value`` is, for a person: a value of kvplan as plain text, without a line break at the end.

    A worker's regions and views are folded where they differ by name and place alone. A plan has one line for
    each remote worker that moves bytes. Raises ``TYPE`` for anything that is not a value of kvplan.

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
    >>> print(explain(plan_reads(decode, [worker("prefill", 4, rank) for rank in range(4)])))
    decode/1 reads from 4 workers
      <- prefill/2: 12936 ids in 2 rows of 8192 bytes and 2 rows of 256 bytes
      <- prefill/3: 12936 ids in 2 rows of 8192 bytes and 2 rows of 256 bytes
    """
    return "\n".join(_lines(value))


def _lines(value: object) -> Iterator[str]:
    match value:
        case Worker():
            yield from _worker(value)
        case TransferPlan():
            yield from _plan(value)
        case MeshPlan():
            yield from _mesh(value)
        case View():
            yield from _views([value])
        case Region():
            yield f"region {value}"
        case Axis():
            yield f"axis {value}"
        case Group():
            yield _group(value)
        case Context():
            yield f"context: {_context(value) or 'one worker'}"
        case Blocks():
            yield f"blocks [{value.first}, {value.first + value.ids.size}) of a request: ids {_some(value.ids)}"
        case Pair():
            yield f"pair with {label_of(value.remote)}: {_table(value.local_table)}"
        case Table():
            yield f"table: {_table(value)}"
        case ReadSpec():
            yield _spec(value)
        case Report() | Cost() | KVPlanError():
            yield str(value)
        case _:
            raise KVPlanError("TYPE", "explain a value", expected="a value of kvplan", got=f"{type(value).__name__}")


def size(number: int) -> str:
    """Bytes, exact below 10 KiB, else to four digits in the binary unit that suits.

    >>> size(8192), size(1 << 16), size(5_000_000_000)
    ('8192 bytes', '64 KiB', '4.657 GiB')
    """
    if number < 10 << 10:
        return count(number, "byte")
    power = min((number.bit_length() - 1) // 10, 5)
    return f"{number / (1 << 10 * power):.4g} {'KMGTP'[power - 1]}iB"


def sizes(low: int, high: int) -> str:
    """The sizes from ``low`` to ``high`` bytes.

    >>> sizes(256, 256), sizes(256, 8192)
    ('256 bytes', '256 bytes to 8192 bytes')
    """
    return size(low) if low == high else f"{size(low)} to {size(high)}"


def _some(ids: npt.NDArray[np.integer[Any]]) -> str:
    shown = ", ".join(map(str, ids[:8].tolist()))
    return shown + (f", ... {ids[-1]}" if ids.size > 8 else "")


def _alike(values: Iterable[Any], key: Callable[[Any], Hashable]) -> list[list[Any]]:
    """The values in lists of equal key, in order of appearance."""
    lists: dict[Hashable, list[Any]] = {}
    for value in values:
        lists.setdefault(key(value), []).append(value)
    return list(lists.values())


def _worker(worker: Worker) -> Iterator[str]:
    yield str(worker)
    for group in worker.groups:
        yield f"  {_group(group)}"
    for regions in _alike(worker.regions, lambda region: (region.size_bytes, region.memory, region.device_id)):
        first, several = regions[0], len(regions) > 1
        names = fold(region.name for region in regions)
        where = f"{first.memory} {first.device_id}, {'the first at' if several else 'at'} {first.address:#x}"
        yield f"  region{'s' * several} {names}: {size(first.size_bytes)}{' each' * several}, {where}"
    for views in _alike(worker.views, lambda v: (v.group, v.dtype, v.axes, v.num_blocks, v.block_stride_bytes)):
        yield from (f"  {line}" for line in _views(views))


def _views(views: list[View]) -> Iterator[str]:
    """Views of one geometry."""
    first = views[0]
    names = fold(view.name for view in views)
    held = f"{first.block_bytes} bytes in each of {count(first.num_blocks, 'block')}, step {first.block_stride_bytes}"
    yield f"view{'s' * (len(views) > 1)} {names} in group {first.group}: {first.dtype}, {held}"
    for axis in first.axes:
        yield f"  {axis}"


def _group(group: Group) -> str:
    if group.tokens_per_block is None:
        return f"group {group.name}: one state a block"
    spread = _context(group.context)
    return f"group {group.name}: {count(group.tokens_per_block, 'token')} a block" + (spread and f", {spread}")


def _context(context: Context) -> str:
    if context.size == 1:
        return ""
    turn = count(context.interleave_tokens, "position")
    return f"worker {context.rank} of {context.size} in turns of {turn}"


def _table(table: Table) -> str:
    """How many ids, in which rows: rows of one length together, the longest first."""
    lengths, times = np.unique(table.rows[:, 1], return_counts=True)
    rows = [f"{count(n, 'row')} of {size(b)}" for b, n in zip(lengths.tolist(), times.tolist(), strict=True)]
    return f"{count(table.num_ids, 'id')} in {' and '.join(rows[::-1])}" if rows else "nothing"


def _plan(plan: TransferPlan) -> Iterator[str]:
    reads = plan.operation == "READ"
    yield f"{plan.local.label} {'reads from' if reads else 'writes to'} {count(len(plan.remotes), 'worker')}"
    for pair in plan.pairs:
        if pair.local_table.num_ids:
            yield f"  {'<-' if reads else '->'} {label_of(pair.remote)}: {_table(pair.local_table)}"


def _mesh(mesh: MeshPlan) -> Iterator[str]:
    yield f"{count(len(mesh.plans), 'plan')} of {count(len(mesh.completions), 'worker')}"
    for plan in mesh.plans:
        yield from (f"  {line}" for line in _plan(plan))
    known = {plan.local.key for plan in mesh.plans}
    waiting = [(key, len(each.awaits)) for key, each in mesh.completions.items() if key not in known]
    for waits in _alike(waiting, lambda item: (item[0][0], item[1])):
        (engine, _), times = waits[0]
        yield f"  {engine}/{intervals(rank for (_, rank), _ in waits)} awaits {count(times, 'completion')}"


def _spec(spec: ReadSpec) -> str:
    ours, _ = spec.descriptors()
    arrow = "<-" if spec.operation == "READ" else "->"
    ends = f"{label_of(spec.local)} {arrow} {label_of(spec.remote)}"
    if not len(ours):
        return f"{ends}: nothing"
    lengths = sizes(int(ours[:, 1].min()), int(ours[:, 1].max()))
    return f"{ends}: {size(spec.num_bytes)} in {count(len(ours), 'descriptor')} of {lengths}"
