"""Bind (B): turns the block tables of a request into descriptor ids.

Every request pays for binding, so binding knows no geometry any more: it slices a block table,
multiplies it by a step, and adds what each run has in block 0. Two runs in the blocks 7 and 3::

    base     step * block ids       ids
    [[0],  +  1 * [[7, 3]]     =   [[ 7,  3],
     [9]]                           [16, 12]]

- plan.B1: Blocks pair by position. The ordinal of a block in the request determines its positions,
  not its index in a list.
- plan.B2: Exactly the positions of the range move. Runs inside the range move whole; what the range
  cuts off at its two ends moves token by token.
- plan.B3: An id is ``base + step * block id + slot term``: one broadcast addition for all runs of a
  series. The ids of one run follow the positions, so neighbouring blocks get neighbouring ids.
- plan.B4: Everything wrong with the tables or the range is an error before any id is computed.
- plan.B5: Pairs whose rows differ only in where they begin share their ids, computed once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvplan._arrays import Ints, read_only
from kvplan._checks import ID_END, at_most, interval
from kvplan._text import few, shown
from kvplan.describe.blocks import POSITION_END, Blocks, Range, Tokens, check_listed
from kvplan.describe.views import Group
from kvplan.errors import KVPlanError
from kvplan.plan.align import before, in_slots, of_rank, position_of, reach
from kvplan.plan.series import BothBlocks, GroupPair, Ids, Series, SideTable, TablePair

MAX_IDS: Final = 1 << 28
"""The most ids of one request with one remote worker: 2 GiB for both sides."""

UNBUFFERED: Final = 256
"""Occurrences from which additions are faster without numpy's buffers: by 1.2 at 256, by 3 at
2,000.

Numpy copies broadcast rows into buffers of 8,192 elements, unless three of them exceed one."""


class Workspace:
    """Reusable memory for ids, for loops that bind many requests.

    Fresh memory costs more than computing the ids, because the system maps every page anew. Specs
    that were bound with a workspace are valid until the next ``bind`` with it, so threads must not
    share one.

    >>> from kvplan import Blocks, Model, Workspace, plan_reads
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (decode,), (prefill,) = (model.engine(name, num_blocks=9) for name in "dp")
    >>> plan, workspace = plan_reads(decode, [prefill]), Workspace()
    >>> for block in (3, 4):
    ...     tables = {"attn": Blocks([block])}
    ...     (spec,) = plan.bind(local=tables, remote=tables, workspace=workspace)
    ...     print(spec.local_ids[:3])
    [ 3 12 21]
    [ 4 13 22]
    """

    def __init__(self) -> None:
        self._ids = np.empty(0, np.int32)
        self._num_used = 0

    def clear(self) -> None:
        """Free all memory for the next request, and grow it to the most that one has needed."""
        if self._num_used > self._ids.size:
            self._ids = np.empty(self._num_used, np.int32)
        self._num_used = 0

    def take(self, num_ids: int) -> Ids:
        """Return memory for the ids of both sides, (2, num_ids) int32.

        It is newly allocated if the workspace is too small.
        """
        start = self._num_used
        self._num_used += 2 * num_ids
        if self._num_used > self._ids.size:
            return np.empty((2, num_ids), np.int32)
        return self._ids[start : self._num_used].reshape(2, num_ids)


class Terms(NamedTuple):
    """Ids of both sides as sums, destination first.

    ``base`` (2, runs, 1) are the ids of the runs in block 0, ``added`` (2, 1, occurrences) what
    each occurrence of the runs in the request adds to them.
    """

    base: Ids | Ints
    added: Ids | Ints

    @property
    def shape(self) -> tuple[int, int]:
        """The number of runs and of their occurrences."""
        return self.base.shape[1], self.added.shape[2]

    def narrow(self) -> Terms:
        """Return the terms as int32. Raises ``INT`` if an id does not fit 31 bits."""
        last = int((self.base.max(axis=1) + self.added.max(axis=2)).max())
        if last >= ID_END:
            raise KVPlanError(
                "INT",
                "number the descriptors of a request",
                expected=f"ids below {ID_END}",
                got=f"{last}",
                hint="a smaller pool, or fewer tensors per plan, has fewer ids",
                id=last,
            )
        return Terms(self.base.astype(np.int32), self.added.astype(np.int32))


Shapes = tuple[tuple[int, int], ...]


def check_names(group_names: Collection[str], names: Iterable[str], subject: str) -> None:
    """Raise ``NAME`` for a name that no group has."""
    for name in names:
        if name not in group_names:
            known_names = few([repr(group) for group in sorted(group_names)], ", ")
            raise KVPlanError(
                "NAME",
                f"bind a {subject}",
                expected=f"a group of {known_names or 'none'}",
                got=shown(name),
                group=name,
            )


def range_of(tokens: Tokens, group: Group) -> Range | None:
    """Return the checked range of a local group; ``None`` if the request gives it none.

    It counts tokens or states, or the values of slots that have several tokens.
    """
    if not isinstance(tokens, tuple) and isinstance(tokens, Mapping):
        token_range = tokens.get(group.name)
    else:
        token_range = None if group.is_state else tokens
    if token_range is None:
        return None
    start, stop = interval(token_range, "a range of tokens", POSITION_END)
    if start > stop:
        got = f"[{start}, {stop})"
        raise KVPlanError(
            "TOKENS", "bind tokens", expected="start <= stop", got=got, tokens=(start, stop)
        )
    return in_slots(group, (start, stop))


def wanted(group: Group, table: Blocks, token_range: Range | None, side: str) -> Range:
    """Return the positions to move to a destination's blocks.

    They are those of the range, reduced to its blocks if the table has gaps or there is no range.
    """
    if token_range is not None and not table.has_gaps:
        return token_range
    low, high = reach(group, table.first, table.stop - table.first)
    if token_range is None:
        _check_positions(group, high, side)
        return low, high
    start, stop = token_range
    # The blocks that the range needs must be listed, whether they are gaps or not.
    first_slot = before(group, start)
    end_slot = before(group, stop)
    if first_slot < end_slot:
        first_block = first_slot // group.num_slots
        end_block = -(-end_slot // group.num_slots)
        check_listed(group.name, first_block, end_block, *table.listed, side)
    return max(low, start), min(high, stop)


def _check_positions(group: Group, end: int, side: str) -> None:
    """Raise ``BLOCKS`` for a table whose positions, before ``end``, are not all counted."""
    if end > POSITION_END:
        raise KVPlanError(
            "BLOCKS",
            f"bind {side} group {group.name!r}",
            expected=f"blocks of positions below {POSITION_END}",
            got=f"positions up to {end}",
            group=group.name,
            side=side,
        )


def check_same_request(destination: SideTable, source: SideTable) -> None:
    """Raise ``BLOCKS`` where a source lists blocks behind all positions of a destination's table.

    Without a range, both tables list the same request. If a source lists more of it, one of the two
    counts blocks of another size than its group has, and the bytes would be wrong. A destination's
    table with gaps says by itself which blocks it wants.
    """
    blocks = destination.blocks
    if blocks.has_gaps or not blocks.ids.size:
        return
    # Of all workers in a context, the last holds the last positions and the first the most blocks.
    last = of_rank(destination.group, destination.group.context.size - 1)
    end = position_of(last, blocks.stop * last.num_slots - 1) + 1
    first = of_rank(source.group, 0)
    end_block = -(-before(first, end) // first.num_slots)
    if source.blocks.stop > max(end_block, source.blocks.first):
        raise KVPlanError(
            "BLOCKS",
            f"bind {source.side} group {source.group.name!r}",
            expected=f"blocks [{source.blocks.first}, {end_block}) of the request, "
            f"as {destination.side} group {destination.group.name!r} has positions below {end}",
            got=f"[{source.blocks.first}, {source.blocks.stop})",
            hint="do both tables count blocks of their group's size? A range says which blocks "
            "of longer tables move",
            group=source.group.name,
            side=source.side,
            listed=source.blocks.listed,
            needed=(source.blocks.first, end_block),
        )


def terms(pair: GroupPair, tables: TablePair, tokens: Range) -> Iterator[Terms]:
    """Yield the ids of one pair of groups: for each series, in each range in which it moves."""
    for series, (start, stop) in pair.moves(*tokens):
        blocks = series.look_up(tables, start, stop)
        if blocks is not None:
            yield Terms(series.base, _added(series, blocks))


def _added(series: Series, blocks: BothBlocks) -> Ids | Ints:
    """Return ``step * block id + slot term`` of every occurrence, (2, 1, occurrences)."""
    block_ids, slot_terms = blocks[0]
    num_occurrences = block_ids.size if slot_terms is None else slot_terms.size
    added = np.empty((2, 1, num_occurrences), series.base.dtype)
    for side, (block_ids, slot_terms) in enumerate(blocks):
        added[side] = block_ids  # one block for each occurrence, or one for all of them
        if series.step[side] != 1:
            added[side] *= series.step[side]
        if slot_terms is not None:
            added[side] += slot_terms
    return added


def add_terms(all_terms: Sequence[Terms], workspace: Workspace | None) -> tuple[Ids, Shapes]:
    """Return all ids, (2, n) int32, and the shape of each of the terms: one addition for each.

    Raises ``INT`` if an id does not fit 31 bits.
    """
    shapes = tuple([each.shape for each in all_terms])
    num_ids = sum([num_runs * num_occurrences for num_runs, num_occurrences in shapes])
    at_most(MAX_IDS, num_ids, "ids with one worker", "bind a request")
    ids = np.empty((2, num_ids), np.int32) if workspace is None else workspace.take(num_ids)
    is_long = any(num_occurrences >= UNBUFFERED for _, num_occurrences in shapes)
    buffer_size = np.setbufsize(16) if is_long else None
    try:
        start = 0
        for each, (num_runs, num_occurrences) in zip(all_terms, shapes, strict=True):
            if each.base.itemsize > ids.itemsize:
                each = each.narrow()
            stop = start + num_runs * num_occurrences
            sums = ids[:, start:stop].reshape(2, num_runs, num_occurrences)
            np.add(each.base, each.added, sums)
            start = stop
    finally:
        if buffer_size is not None:
            np.setbufsize(buffer_size)
    return read_only(ids), shapes
