"""Moves: what is copied from one worker to another, as byte ranges, whoever made them.

A plan's spec names its copies twice, by ids and by descriptors, and both must name the same bytes. Descriptors that
other code made come without ids.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from kvplan._checks import integer, wrong_type
from kvplan._text import count
from kvplan.describe.worker import Key, Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.verification.arenas import Words
from kvplan.verification.memory import expand

if TYPE_CHECKING:
    from kvplan.describe.blocks import Blocks
    from kvplan.plan.specs import ReadSpec

Tables = Mapping[str, "Blocks"]
Pair = tuple[Key, Key]
"""A local worker and a remote one."""

Ranges = tuple[Words, Words]
"""Equally long ranges of both sides, (n, 3) each: address, length, device."""

NONE: Final[Ranges] = (np.empty((0, 3), np.uint64), np.empty((0, 3), np.uint64))


@attrs.frozen(eq=False)
class Move:
    """Copies from a source, which has these block tables. ``way`` is who they say is read and who is written.

    ``fault`` says what is wrong with descriptor ids, if anything is.
    """

    source: Worker
    blocks: Tables
    way: Pair
    reads: Words
    writes: Words
    fault: str = ""

    @classmethod
    def of(cls, spec: ReadSpec, source: Worker, blocks: Tables) -> Move:
        """What a spec copies: nothing, where its ids are no pairs or no ids of its tables."""
        ranges, fault = NONE, ""
        if len(spec.local_ids) != len(spec.remote_ids):
            got = f"{count(len(spec.local_ids), 'local id')}, {len(spec.remote_ids)} remote ones"
            fault = f"{got} of the copy from {source.label} are no pairs"
        else:
            try:
                fault, ranges = _fault(spec, source), spec.descriptors()
            except KVPlanError as error:
                fault = str(error)
        return cls.between((spec.local, spec.remote), spec.operation, ranges, source, blocks, fault)

    @classmethod
    def between(
        cls, pair: Pair, operation: str, ranges: Ranges, source: Worker, blocks: Tables, fault: str = ""
    ) -> Move:
        """What local and remote ranges copy: a READ from remote to local, a WRITE from local to remote."""
        step = 1 if operation == "WRITE" else -1
        (read, written), (reads, writes) = pair[::step], ranges[::step]
        return cls(source, blocks, (read, written), reads, writes, fault)


def _fault(spec: ReadSpec, source: Worker) -> str:
    """In what way the ids of a spec name other bytes than its descriptors, if they do. Raises ``RANGE``."""
    single = (expand(spec.local_table.rows, spec.local_ids), expand(spec.remote_table.rows, spec.remote_ids))
    ranges = spec.descriptors()
    if np.array_equal(_joined(*ranges), _joined(*single)):
        return ""
    got = f"{count(len(spec.local_ids), 'id')} and {count(len(ranges[0]), 'descriptor')}"
    return f"{got} of the copy from {source.label} name different bytes"


def _joined(local: Words, remote: Words) -> Words:
    """Paired ranges in order of local address, joined where they continue each other on both sides."""
    pairs = np.concatenate([local, remote], axis=1)[np.lexsort((local[:, 0], local[:, 2]))]
    ends = pairs[:, [0, 3]] + pairs[:, [1, 4]]
    goes_on = (pairs[1:, [0, 3]] == ends[:-1]).all(1) & (pairs[1:, [2, 5]] == pairs[:-1, [2, 5]]).all(1)
    first = np.flatnonzero(np.r_[np.ones(min(len(pairs), 1), bool), ~goes_on])
    joined = pairs[first]
    if first.size:
        joined[:, [1, 4]] = np.add.reduceat(pairs[:, [1, 4]], first)
    return joined


def read_copies(copies: Any, pairs: Collection[Pair]) -> dict[Pair, Ranges]:
    """For each pair of workers what other code copies: local and remote ranges, in its order.

    Raises ``NAME`` for a pair that is not one of ``pairs``, ``SIZE`` where the sides are not equally long, ``TYPE``
    or ``RANGE`` for what is no range.

    >>> pair = (("decode", 0), ("prefill", 0))
    >>> local, remote = read_copies({pair: ([(4096, 64, 0)], [(8192, 64, 1)])}, [pair])[pair]
    >>> local.tolist(), remote.tolist()
    ([[4096, 64, 0]], [[8192, 64, 1]])
    """
    if not isinstance(copies, Mapping):
        raise wrong_type("copies", "a mapping of pairs of workers to descriptors", copies)
    return {_known(pair, pairs): _paired(pair, sides) for pair, sides in copies.items()}


def _known(pair: Any, pairs: Collection[Pair]) -> Pair:
    if pair in pairs:
        return pair  # type: ignore[no-any-return]
    raise KVPlanError(
        "NAME",
        "read copies",
        expected=f"the keys of a local and a remote worker, such as {next(iter(pairs), None)}",
        got=reprlib.repr(pair),
        hint="READ has destinations as local workers, WRITE has sources",
    )


def _paired(pair: Pair, sides: Any) -> Ranges:
    what = f"copies between {label_of(pair[0])} and {label_of(pair[1])}"
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise wrong_type(what, "(local descriptors, remote descriptors)", sides)
    local, remote = (
        _ranges(sides[0], f"local descriptors of {what}"),
        _ranges(sides[1], f"remote descriptors of {what}"),
    )
    if len(local) != len(remote):
        raise KVPlanError(
            "SIZE",
            f"read {what}",
            expected="as many local descriptors as remote ones",
            got=f"{len(local)} and {len(remote)}",
        )
    differ = np.flatnonzero(local[:, 1] != remote[:, 1])
    if differ.size:
        ours, theirs = (int(side[differ[0], 1]) for side in (local, remote))
        raise KVPlanError(
            "SIZE",
            f"read {what}",
            expected="paired descriptors of equal lengths",
            got=f"{ours} and {theirs} bytes in number {differ[0]}",
        )
    return local, remote


def _ranges(values: Any, what: str) -> Words:
    """Ranges in any form: rows of address, length and device, a length at least 1."""
    is_table = isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype.kind in "iu"
    if is_table and values.shape[1] == 3 and (values >= [0, 1, 0]).all():
        return np.asarray(values, np.uint64)
    rows = [_row(row, what) for row in (values if np.iterable(values) else [values])]
    return np.array(rows, np.uint64).reshape(-1, 3)


def _row(row: Any, what: str) -> list[int]:
    if isinstance(row, str | bytes) or not hasattr(row, "__len__") or len(row) != 3:
        raise wrong_type(what, "rows of address, length and device", row)
    return [integer(value, what, low=low, high=1 << 64) for value, low in zip(row, (0, 1, 0), strict=True)]
