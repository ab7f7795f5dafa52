"""Building blocks of known bugs: plans, notices and costs with one fault, and small workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvplan import Axis, Blocks, Group, MeshPlan, ReadSpec, Region, TransferPlan, View, Worker
from kvplan.describe.worker import Key
from kvplan.plan import Table
from tests.edits import EditedPlan, edited_specs
from tests.known_bugs.known_bug import VERIFIED
from tests.small import DIM, HEAD_BYTES, axes


def asking(local: Mapping[str, Blocks], remote: Mapping[str, Blocks], tokens: Any = None) -> dict[str, Any]:
    """The arguments of ``bind`` and ``verify``."""
    return {"local": local, "remote": remote, "tokens": tokens}


def moving(plan: TransferPlan, other: TransferPlan | None = None, **request: Any) -> EditedPlan:
    """``plan`` with the specs that ``other``, or the plan itself, makes of another request.

    Verifying it with the true request shows the effect of wrong tables or ranges, or of an ``other`` plan for workers
    that are described wrongly.
    """
    return edited_specs(plan, *(other or plan).bind(**request))


def by_hand(spec: ReadSpec, local: npt.ArrayLike, remote: npt.ArrayLike) -> ReadSpec:
    """``spec`` with other descriptors, (n, 3): address, length, device. Each has an id in a table of its own."""
    ours, theirs = _table(spec.local_table, local), _table(spec.remote_table, remote)
    ids = ours.first.astype(np.int32), theirs.first.astype(np.int32)
    return ReadSpec(spec.operation, spec.local, spec.remote, ours, theirs, *ids)


def _table(table: Table, ranges: npt.ArrayLike) -> Table:
    """A row for each range. Each has a region of its own, so that none are coalesced."""
    address, length, device = np.asarray(ranges, np.uint64).T
    numbers = np.arange(address.size)
    rows = np.stack([address, length, device, length, np.ones_like(length)], axis=1)
    regions: Any = tuple(  # a Region would refuse ranges beyond the address space
        SimpleNamespace(address=at, size_bytes=length, device_id=device) for at, length, device in rows[:, :3].tolist()
    )
    return Table(regions, numbers, rows, numbers)


def worker_of(name: str, groups: Sequence[Group], views: Sequence[View], rank: int = 0) -> Worker:
    """A worker with one region for each region name of its views, as large as these need."""
    sizes: dict[str, int] = {}
    for view in views:
        size = max(view.end_bytes, view.num_blocks * view.block_stride_bytes)
        sizes[view.region] = max(size, sizes.get(view.region, 0))
    regions = [Region(key, (rank + 1 << 44) + (i << 36), size) for i, (key, size) in enumerate(sizes.items())]
    return Worker(name, rank, regions, groups, views)


def grouped(name: str, blocks: int = 100, **groups: int | None) -> Worker:
    """A worker with one layer for each group: of so many tokens in a block and two heads, or ``None`` for states.

    >>> print(grouped("decode", full=4, window=16, state=None))
    decode/0: 3 views of 3 tensors in 3 regions, 3 groups
    """
    views = []
    for i, (key, tokens) in enumerate(groups.items()):
        dims = (Axis("dim", 0, DIM, DIM, 2),) if tokens is None else axes((0, 2, 2), tokens)
        page = 2 * DIM if tokens is None else 2 * HEAD_BYTES * tokens
        views.append(View(f"layers.{i}", key, key, "bfloat16", dims, blocks, page))
    return worker_of(name, [Group(key, tokens) for key, tokens in groups.items()], views)


def awaited(mesh: MeshPlan) -> dict[Key, tuple[Key, ...]]:
    """The workers that each worker hears from when a request is done: those with rows for it."""
    heard: dict[Key, list[Key]] = {}
    for local, remote in notified(mesh):
        heard.setdefault(remote, []).append(local)
    return {key: tuple(others) for key, others in heard.items()}


def notified(mesh: MeshPlan) -> list[tuple[Key, Key]]:
    """Each notice: its sender and its receiver."""
    return [(plan.local.key, pair.remote) for plan in mesh.plans for pair in plan.pairs if pair.group_pairs]


def completed(awaited: Mapping[Key, Iterable[Key]], sent: Iterable[tuple[Key, Key]]) -> str:
    """Whether each worker receives one notice from each worker that it awaits, and no other.

    ``sent`` are notices: the sender by its content, and the receiver.

    >>> completed({("prefill", 0): [("decode", 0)]}, [])
    'completions'
    """
    expected = Counter((other, worker) for worker, others in awaited.items() for other in others)
    return VERIFIED if expected == Counter(sent) else "completions"


def cost(number: int, *, too_many: int, enough: int) -> str:
    """Whether a number of descriptors is the ``too_many`` of the fault, or ``enough``.

    >>> cost(128, too_many=128, enough=2), cost(2, too_many=128, enough=2), cost(3, too_many=128, enough=2)
    ('cost', 'verified', '3 descriptors')
    """
    return {too_many: "cost", enough: VERIFIED}.get(number, f"{number} descriptors")
