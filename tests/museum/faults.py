"""What exhibits are made of: plans, messages and costs that go wrong in one way, and engines of a few groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvplan import Axis, Blocks, Group, MeshPlan, ReadSpec, Region, TransferPlan, View, Worker
from kvplan.describe.worker import Key
from kvplan.plan import Table
from tests.edits import EditedPlan, edited_specs
from tests.museum.exhibit import VERIFIED
from tests.small import DIM, HEAD_BYTES, axes


def asking(local: Mapping[str, Blocks], remote: Mapping[str, Blocks], tokens: Any = None) -> dict[str, Any]:
    """The arguments of ``bind`` and ``verify``."""
    return {"local": local, "remote": remote, "tokens": tokens}


def moving(plan: TransferPlan, other: TransferPlan | None = None, **request: Any) -> EditedPlan:
    """``plan``, but what moves is what ``other``, or the plan itself, makes of another request.

    Verified with the true request, it shows what becomes of a request that was bound with wrong tables or ranges;
    with a true plan and one for wrong workers, what becomes of a wrong description.
    """
    return edited_specs(plan, *(other or plan).bind(**request))


def by_hand(spec: ReadSpec, local: npt.ArrayLike, remote: npt.ArrayLike) -> ReadSpec:
    """``spec`` with other descriptors, (n, 3): address, length, device; one id for each, in tables of their own."""
    ours, theirs = _table(spec.local_table, local), _table(spec.remote_table, remote)
    ids = ours.first.astype(np.int32), theirs.first.astype(np.int32)
    return ReadSpec(spec.operation, spec.local, spec.remote, ours, theirs, *ids)


def _table(table: Table, ranges: npt.ArrayLike) -> Table:
    """A row for each range. Each counts as a region of its own, so that none are coalesced."""
    address, length, device = np.asarray(ranges, np.uint64).T
    numbers = np.arange(address.size)
    rows = np.stack([address, length, device, length, np.ones_like(length)], axis=1)
    regions: Any = tuple(  # as a Region, ranges that no memory has would be refused
        SimpleNamespace(address=at, size_bytes=length, device_id=device) for at, length, device in rows[:, :3].tolist()
    )
    return Table(regions, numbers, rows, numbers)


def grouped(name: str, blocks: int = 100, **groups: int | None) -> Worker:
    """A worker with one layer for each group: of so many tokens a block, two heads wide, or ``None`` for states.

    >>> print(grouped("decode", full=4, window=16, state=None))
    decode/0: 3 views of 3 tensors in 3 regions, 3 groups
    """
    return Worker(
        name,
        0,
        [Region(key, (i + 1) << 40, blocks * _page(tokens)) for i, (key, tokens) in enumerate(groups.items())],
        [Group(key, tokens) for key, tokens in groups.items()],
        [
            View(f"layers.{i}", key, key, "bfloat16", _axes(tokens), blocks, _page(tokens))
            for i, (key, tokens) in enumerate(groups.items())
        ],
    )


def _axes(tokens: int | None) -> tuple[Axis, ...]:
    return (Axis("dim", 0, DIM, DIM, 2),) if tokens is None else axes((0, 2, 2), tokens)


def _page(tokens: int | None) -> int:
    return 2 * DIM if tokens is None else 2 * HEAD_BYTES * tokens


def awaited(mesh: MeshPlan) -> dict[Key, tuple[Key, ...]]:
    """Whom each worker awaits."""
    return {key: each.awaits for key, each in mesh.completions.items()}


def told(mesh: MeshPlan) -> list[tuple[Key, Key]]:
    """Who tells whom."""
    return [(key, other) for key, each in mesh.completions.items() for other in each.sends]


def heard(awaited: Mapping[Key, Iterable[Key]], sent: Iterable[tuple[Key, Key]]) -> str:
    """Whether each worker hears of its requests' end from those that it awaits, once from each.

    ``sent`` are messages: from whom, as the message says, and to whom.

    >>> heard({("prefill", 0): [("decode", 0)]}, [])
    'completions'
    """
    expected = Counter((other, worker) for worker, others in awaited.items() for other in others)
    return VERIFIED if expected == Counter(sent) else "completions"


def cost(number: int, *, too_many: int, enough: int) -> str:
    """Whether a number of descriptors is the one that was too many, or that which is enough.

    >>> cost(128, too_many=128, enough=2), cost(2, too_many=128, enough=2), cost(3, too_many=128, enough=2)
    ('cost', 'verified', '3 descriptors')
    """
    return {too_many: "cost", enough: VERIFIED}.get(number, f"{number} descriptors")
