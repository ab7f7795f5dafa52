"""Copies of a plan by address: what a kernel needs to move a request without a list of its ids.

The planner numbers descriptors so that the id of a run is ``base + step * block id + slot term``
(rule plan.T3 of :mod:`kvplan.plan.rows`), and a row places its ids at a constant stride. So the
address of a run is such a sum as well, in bytes: the *origin* of the run in block 0, plus the bytes
from block to block times the block id, plus what the slot adds. :class:`PairCopy` turns the ids of
a pair of workers into these sums once, and keeps them on the device. A request then brings its
block tables and, for each series of runs, the numbers of the first and the last occurrence in its
range. The kernel (:mod:`kvplan_nixl.kernel`) computes the rest:

- staging.K1: Occurrence ``n`` of a series begins at position ``starts[n % starts] + n // starts *
  period``.
- staging.K2: On each side that position has a local index, a block ordinal and a slot (rules
  plan.A1 and plan.A2), and the block table has the block id of the ordinal; -1 is a gap, to which
  nothing moves.
- staging.K3: A copy moves words of 16, 8, 4, 2 or 1 bytes: the widest that divides the length, and
  every origin, block step and slot term of both sides. It is chosen when a plan is prepared.

A spec whose ids are listed moves too: a row is a series whose "blocks" are ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, read_only
from kvplan.describe.blocks import Blocks, Tokens, check_listed
from kvplan.describe.views import Group, Region
from kvplan.describe.worker import Key
from kvplan.plan.align import count_below, cycle, local_index
from kvplan.plan.series import GroupPair, RunSeries, TablePair, TokenSeries
from kvplan.plan.specs import ReadSpec
from kvplan.plan.tables import Table
from kvplan.plan.transfer import Requested, TransferPlan
from kvplan.staging.copies import Copy, CopySide

__all__ = [
    "NO_ENTRIES",
    "TILE_BYTES",
    "BoundCopy",
    "CopyPlan",
    "Field",
    "Launch",
    "PairCopy",
    "RowTables",
    "copy_of_boxes",
    "copy_of_spec",
]

RowTables = tuple[Table, Table]
"""Tables of the rows of a pair, the destination's first."""

WIDEST: Final = 16
"""Bytes of the widest word."""

TILE_BYTES: Final = 8192
"""Bytes that a program of the kernel moves at a time."""

MIN_WIDTH_BYTES: Final = 128
"""The least contiguous bytes of a tile: a line of a GPU's cache, where runs are that long."""

MAX_IDLE: Final = 1 / 8
"""A tile of long rows may leave this share of its words unused, at the ends of runs."""

INT32_END: Final = 1 << 31


class Field(IntEnum):
    """The numbers of an entry: one series of runs in one range of a request.

    The first eight are of both sides, then eight are the destination's, and eight the source's.
    """

    FIRST = 0
    COUNT = 1
    RUNS = 2
    ELEMENTS = 3
    NUM_STARTS = 4
    STARTS = 5
    PERIOD = 6
    DESTINATION = 8
    SOURCE = 16
    END = 24


class SideField(IntEnum):
    """The numbers of one side of an entry. Offsets are into the arrays of a plan."""

    CYCLE = 0
    INTERLEAVE = 1
    SLOTS = 2
    TABLE = 3
    TERMS = 4
    BY_SLOT = 5
    ORIGINS = 6
    STEP = 7


SIDES: Final = (Field.DESTINATION, Field.SOURCE)
TO_TABLE: Final = int(Field.DESTINATION + SideField.TABLE)
FROM_TABLE: Final = int(Field.SOURCE + SideField.TABLE)
NO_ENTRIES: Final = np.zeros((0, Field.END), np.int64)


class Launch(NamedTuple):
    """What a compiled kernel depends on: entries that are equal in it share a launch.

    ``word`` is in bytes, ``width`` the elements of a tile's row. ``is_long`` asks for integers of
    64 bits, ``has_context`` for the arithmetic of context parallelism.
    """

    word: int
    width: int
    is_long: bool
    has_context: bool

    @property
    def element(self) -> int:
        """Bytes of an element: words of 16 bytes are two of 8, as no device has such integers."""
        return min(self.word, 8)


@attrs.frozen(eq=False)
class Entry:
    """Runs of one length that lie alike: all that is known of them before a request.

    ``origins`` (2, runs) are addresses, ``terms`` what starts or slots add in bytes, both sides.
    ``header`` has the numbers of an entry, but those of a request.
    """

    launch: Launch
    length: int
    starts: Ints
    period: int
    groups: tuple[Group, Group]
    terms: tuple[Ints, Ints]
    by_slot: bool
    steps: tuple[int, int]
    origins: npt.NDArray[np.uint64]
    regions: tuple[Ints, Ints]
    header: Ints = attrs.field(factory=lambda: np.zeros(Field.END, np.int64))

    def arrays(self) -> Iterator[tuple[int, Ints]]:
        """Yield what the device keeps, each with the field of the header that says where it is."""
        yield Field.STARTS, self.starts
        for side, field in enumerate(SIDES):
            yield field + SideField.TERMS, self.terms[side]
            yield field + SideField.ORIGINS, self.origins[side].view(np.int64)

    def fill_header(self) -> None:
        """Write the numbers that no request changes."""
        header = self.header
        header[Field.RUNS] = self.origins.shape[1]
        header[Field.ELEMENTS] = self.length // self.launch.element
        header[Field.NUM_STARTS] = self.starts.size
        header[Field.PERIOD] = self.period
        for side, field in enumerate(SIDES):
            group = self.groups[side]
            alone = group.context.size == 1
            header[field + SideField.CYCLE] = 1 if alone else cycle(group)
            header[field + SideField.INTERLEAVE] = 1 if alone else group.interleave_slots
            header[field + SideField.SLOTS] = group.num_slots
            header[field + SideField.BY_SLOT] = self.by_slot
            header[field + SideField.STEP] = self.steps[side]

    def position(self, number: Ints) -> Ints:
        """Return the positions of occurrences, rule staging.K1."""
        return self.starts[number % self.starts.size] + number // self.starts.size * self.period


def _entries(
    pair: GroupPair, series: RunSeries | TokenSeries, tables: RowTables
) -> Iterator[Entry]:
    """Yield the entries of a series: its runs, in the planner's order, where they lie alike."""
    by_slot = isinstance(series, TokenSeries)
    if isinstance(series, TokenSeries):
        terms = series.slot_terms
    else:
        terms = (_terms_of(series.blocks[0]), _terms_of(series.blocks[1]))
    # one row for each run, one column for each slot term: where the run begins, in block 0
    address, row = [], []
    for side, table in enumerate(tables):
        ids = series.base[side].astype(np.int64) + np.asarray(terms[side], np.int64)
        side_row = table.row_of(ids.reshape(-1)).reshape(ids.shape)
        stride = table.rows[:, 3].astype(np.int64)
        offset = (ids - table.first[side_row]) * stride[side_row]
        address.append(table.rows[side_row, 0] + offset.astype(np.uint64))
        row.append(side_row[:, 0])
    length = tables[0].rows[row[0], 1].astype(np.int64)
    steps = []
    for side, table in enumerate(tables):
        steps.append(series.step[side] * table.rows[row[side], 3].astype(np.int64))
    term_bytes = [(values - values[:, :1]).view(np.int64) for values in address]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for run in range(length.size):
        key = (
            int(length[run]),
            (int(steps[0][run]), int(steps[1][run])),
            (term_bytes[0][run].tobytes(), term_bytes[1][run].tobytes()),
        )
        alike.setdefault(key, []).append(run)
    for (run_length, run_steps, _), runs in alike.items():
        origins = np.stack([values[runs, 0] for values in address])
        yield _entry(
            length=run_length,
            starts=series.starts,
            period=series.period,
            groups=pair.groups,
            num_blocks=pair.num_blocks,
            terms=(term_bytes[0][runs[0]], term_bytes[1][runs[0]]),
            by_slot=by_slot,
            steps=run_steps,
            origins=origins,
            regions=(tables[0].region[row[0][runs]], tables[1].region[row[1][runs]]),
        )


def _terms_of(blocks: Any) -> Ints:
    """Return what each start adds to ids on one side."""
    none = np.zeros(blocks.ordinal.size, np.int64)
    return none if blocks.slot_terms is None else np.asarray(blocks.slot_terms)


def _entry(*, num_blocks: tuple[int, int], **values: Any) -> Entry:
    """Return an entry, with the words of rule staging.K3 and the shape of its tiles."""
    steps = [step for step, blocks in zip(values["steps"], num_blocks, strict=True) if blocks > 1]
    word = word_bytes(values["length"], values["origins"], values["terms"], steps)
    groups = values["groups"]
    cycles = [cycle(group) for group in groups]
    launch = Launch(
        word=word,
        width=width_of(values["length"], word),
        is_long=max(values["period"], *cycles) >= INT32_END,
        has_context=any(group.context.size > 1 for group in groups),
    )
    entry = Entry(launch=launch, **values)
    entry.fill_header()
    return entry


def word_bytes(
    length: int, origins: npt.NDArray[np.uint64], terms: Iterable[Ints], steps: Iterable[int]
) -> int:
    """Return the bytes of the widest word that divides all that leads to a run, and the run.

    >>> addresses = np.array([[4096, 8192], [256, 512]], np.uint64)
    >>> none = np.zeros(1, np.int64)
    >>> word_bytes(656, addresses, [none, none], [656 * 64, 656 * 16])
    16
    >>> word_bytes(656, addresses + np.uint64(4), [none, none], [656 * 64, 656 * 16])
    4
    """
    # the lowest bit that any of the numbers has
    bits = np.bitwise_or.reduce(origins, axis=None).item() | length | WIDEST
    for side_terms in terms:
        bits |= int(np.bitwise_or.reduce(side_terms, axis=None)) if side_terms.size else 0
    for step in steps:
        bits |= step
    return int(bits & -bits)


def width_of(length: int, word: int, tile_bytes: int = TILE_BYTES) -> int:
    """Return the elements in a row of a tile, a power of 2.

    Rows are as long as runs allow, without leaving too many words of a tile unused.

    >>> [width_of(length, 16) * 8 for length in (16, 128, 656, 768, 8192, 65536)]
    [16, 128, 128, 256, 8192, 8192]
    """
    element = min(word, 8)
    width = max(tile_bytes // element, word // element)
    least = max(min(MIN_WIDTH_BYTES // element, width), word // element)
    elements = length // element
    while width > least and -(-elements // width) * width > elements * (1 + MAX_IDLE):
        width //= 2
    while width > word // element and width >= 2 * elements:
        width //= 2
    return width


class LaunchEntries(NamedTuple):
    """The entries of one series that share a launch, and their headers, (n, 24).

    ``num_items`` are the rows of tiles that an occurrence has of the entry that has most, and
    ``turn`` the positions in which all starts occur once.
    """

    launch: Launch
    entries: tuple[Entry, ...]
    headers: Ints
    num_items: int
    turn: int

    @classmethod
    def of(cls, launch: Launch, entries: Iterable[Entry]) -> LaunchEntries:
        """Return the entries of a launch, after all arrays have their places."""
        members = tuple(entries)
        headers = np.stack([entry.header for entry in members])
        chunks = -(-headers[:, Field.ELEMENTS] // launch.width)
        num_items = int((headers[:, Field.RUNS] * chunks).max())
        return cls(launch, members, headers, num_items, members[0].period)

    def launch_of(self, end: int, num_starts: int) -> Launch:
        """Return the launch of occurrences before ``end``; large numbers need 64 bits."""
        largest = max((end // num_starts + 1) * self.turn, 2 * self.num_items * end + TILE_BYTES)
        return self.launch if largest < INT32_END else self.launch._replace(is_long=True)


Bound = tuple[LaunchEntries, int, int, int, int]
"""Entries of a launch, first occurrence, number of them, and places of both sides' tables."""


@attrs.frozen(eq=False)
class PairCopy:
    """The copies between two workers, for any request: ``parts`` by series, and their ``arrays``.

    ``arrays`` is one int64 array, for a device to keep. ``regions`` are those of both sides, which
    entries refer to.
    """

    parts: Mapping[int, tuple[LaunchEntries, ...]]
    arrays: Ints
    regions: tuple[Sequence[Region], Sequence[Region]]

    @classmethod
    def of(cls, group_pairs: Sequence[GroupPair], tables: RowTables) -> PairCopy:
        """Return the copies of a pair whose tables are where this process has both sides."""
        entries: dict[int, list[Entry]] = {}
        for pair in group_pairs:
            every: tuple[RunSeries | TokenSeries, ...] = (*pair.runs, *pair.tokens)
            for series in every:
                entries[id(series)] = list(_entries(pair, series, tables))
        arrays = laid_out([entry for each in entries.values() for entry in each])
        regions = tables[0].regions, tables[1].regions
        return cls({key: _parts(each) for key, each in entries.items()}, arrays, regions)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """All launches that requests may need."""
        launches = (part.launch for parts in self.parts.values() for part in parts)
        return tuple(dict.fromkeys(launches))

    def bind(self, requested: Iterable[Requested]) -> BoundCopy:
        """Return the copies of one request. Raises ``BLOCKS`` for blocks that a table lacks."""
        tables = JoinedTables()
        bound: dict[Launch, list[Bound]] = {}
        for pair, sides, (start, stop), _ in requested:
            places: tuple[int, int] | None = None
            for series, (low, high) in pair.moves(start, stop):
                first = count_below(series.starts, series.period, low)
                end = count_below(series.starts, series.period, high)
                if first >= end:
                    continue
                _check_blocks(series, sides, (first, end), (low, high))
                if places is None:
                    places = tables.place(sides[0].blocks), tables.place(sides[1].blocks)
                num_starts = series.starts.size
                for part in self.parts[id(series)]:
                    of_launch = bound.setdefault(part.launch_of(end, num_starts), [])
                    of_launch.append((part, first, end - first, places[0], places[1]))
        return BoundCopy.of(self, bound, tables)


def _parts(entries: Iterable[Entry]) -> tuple[LaunchEntries, ...]:
    """Return the entries of a series by their launches."""
    by_launch: dict[Launch, list[Entry]] = {}
    for entry in entries:
        by_launch.setdefault(entry.launch, []).append(entry)
    return tuple([LaunchEntries.of(launch, members) for launch, members in by_launch.items()])


def laid_out(entries: Sequence[Entry]) -> Ints:
    """Return all arrays of entries one after another, and write into headers where each begins."""
    places: dict[bytes, int] = {}
    arrays: list[Ints] = []
    size = 0
    for entry in entries:
        for field, array in entry.arrays():
            values = np.ascontiguousarray(array, np.int64)
            # layers share starts and terms
            place = places.setdefault(values.tobytes(), size)
            if place == size:
                arrays.append(values)
                size += values.size
            entry.header[field] = place
    return read_only(np.concatenate(arrays)) if arrays else np.zeros(1, np.int64)


def _check_blocks(
    series: RunSeries | TokenSeries,
    sides: TablePair,
    numbers: tuple[int, int],
    positions: tuple[int, int],
) -> None:
    """Raise ``BLOCKS`` unless the tables have the blocks of all occurrences that move."""
    destination, source = sides
    if destination.blocks.scattered is not None or source.blocks.scattered is not None:
        series.look_up(sides, *positions)
        return
    first, end = numbers
    starts = series.starts
    turn, start = divmod(first, starts.size)
    low = turn * series.period + starts.item(start)
    turn, start = divmod(end - 1, starts.size)
    high = turn * series.period + starts.item(start)
    for group, blocks, name in sides:
        num_slots = group.num_slots
        lowest = local_index(group, low) // num_slots
        highest = local_index(group, high) // num_slots
        if lowest < blocks.first or highest >= blocks.stop:
            check_listed(group.name, lowest, highest + 1, blocks.first, blocks.stop, name)


class JoinedTables:
    """The block tables of a request as one array of int32, each once."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.int32]] = []
        self._places: dict[int, int] = {}
        self._size = 0

    def place(self, blocks: Blocks) -> int:
        """Return where ordinal 0 of a table would be. Gaps between its blocks are -1."""
        place = self._places.get(id(blocks))
        if place is None:
            ids = blocks.ids
            if blocks.scattered is not None:
                ids = np.full(blocks.stop - blocks.first, -1, np.int32)
                ids[blocks.scattered - blocks.first] = blocks.ids
            place = self.add(ids) - blocks.first
            self._places[id(blocks)] = place
        return place

    def add(self, ids: npt.NDArray[np.int32]) -> int:
        """Append ids, and return where they begin."""
        start = self._size
        self._parts.append(ids)
        self._size += ids.size
        return start

    def array(self) -> npt.NDArray[np.int32]:
        """Return all tables."""
        return np.concatenate(self._parts) if self._parts else np.zeros(1, np.int32)


@attrs.frozen(eq=False)
class BoundCopy:
    """The copies of one request between two workers.

    ``launches`` has the rows of ``numbers``, (n, 24) int64, of each launch. ``tables`` has block
    ids of both sides.
    """

    pair: PairCopy
    entries: tuple[Entry, ...]
    launches: tuple[tuple[Launch, slice], ...]
    numbers: Ints
    tables: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls, pair: PairCopy, bound: Mapping[Launch, list[Bound]], tables: JoinedTables
    ) -> BoundCopy:
        """Return copies, in order of their launches."""
        launches: list[tuple[Launch, slice]] = []
        entries: list[Entry] = []
        rows: list[Ints] = []
        for launch, parts in bound.items():
            start = len(entries)
            for part, first, count, to_table, from_table in parts:
                numbers = part.headers.copy()
                numbers[:, Field.FIRST] = first
                numbers[:, Field.COUNT] = count
                numbers[:, TO_TABLE] = to_table
                numbers[:, FROM_TABLE] = from_table
                rows.append(numbers)
                entries += part.entries
            launches.append((launch, slice(start, len(entries))))
        if len(rows) != 1:
            rows = [np.concatenate([NO_ENTRIES, *rows])]
        return cls(pair, tuple(entries), tuple(launches), rows[0], tables.array())

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs, those of gaps included."""
        lengths = [entry.length for entry in self.entries]
        pieces = self.numbers[:, Field.COUNT] * self.numbers[:, Field.RUNS]
        return int(pieces @ np.array(lengths, np.int64)) if lengths else 0

    @property
    def num_runs(self) -> int:
        """All runs, those of gaps included."""
        return int((self.numbers[:, Field.COUNT] * self.numbers[:, Field.RUNS]).sum())

    @property
    def has_gaps(self) -> bool:
        """Some runs may go to gaps, and do not move."""
        return bool(self.tables.min() < 0)

    def message(self) -> Ints:
        """Return all that a device needs to know of the request: entries, then block tables.

        It is one int64 array. Tables are int32, two in an element.
        """
        size = self.numbers.size
        message = np.empty(size + (self.tables.size + 1) // 2, np.int64)
        message[:size] = self.numbers.reshape(-1)
        message[size:].view(np.int32)[: self.tables.size] = self.tables
        return message

    def copies(self) -> Iterator[Copy]:
        """Yield the same copies for torch, which takes each run as one strided tensor.

        The arithmetic is that of the kernel, on the host: for devices without Triton.
        """
        for entry, numbers in zip(self.entries, self.numbers, strict=True):
            number = np.arange(numbers[Field.COUNT]) + numbers[Field.FIRST]
            position = entry.position(number)
            offsets = []
            is_listed = np.ones(number.size, bool)
            for side, field in enumerate(SIDES):
                group = entry.groups[side]
                ordinal, slot = np.divmod(local_index(group, position), group.num_slots)
                block = self.tables[numbers[field + SideField.TABLE] + ordinal].astype(np.int64)
                is_listed &= block >= 0
                term = slot if entry.by_slot else number % entry.starts.size
                offsets.append(block * entry.steps[side] + entry.terms[side][term])
            if not is_listed.any():
                continue
            sides = []
            for side, regions in enumerate(self.pair.regions):
                origins = []
                for region, address in zip(entry.regions[side], entry.origins[side], strict=True):
                    at = regions[region]
                    origins.append((at, int(address) - at.address))
                sides.append(CopySide(tuple(origins), offsets[side][is_listed], ()))
            yield Copy(sides[0], sides[1], (), entry.length)


class CopyPlan:
    """The copies of a plan: prepared once for each peer, bound once for each request.

    >>> from kvplan import Model, plan_reads
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (decode,), (prefill,) = (model.engine(name, num_blocks=9) for name in "dp")
    >>> copies = CopyPlan(plan_reads(decode, [prefill]))
    >>> tables = {"attn": Blocks([3, 7])}
    >>> (bound,) = copies.bind(local=tables, remote=tables, tokens=(0, 32)).values()
    >>> bound.num_bytes, [launch.word for launch, _ in bound.launches]
    (917504, [16])
    """

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self.pairs: dict[Key, tuple[tuple[GroupPair, ...], PairCopy]] = {}
        for pair in plan.pairs:
            if pair.group_pairs:
                tables = plan.direction.by_role(pair.local_table, pair.remote_table)
                self.pairs[pair.remote] = (pair.group_pairs, PairCopy.of(pair.group_pairs, tables))

    def bind(
        self, *, local: Mapping[str, Blocks], remote: Mapping[str, Blocks], tokens: Tokens = None
    ) -> dict[Key, BoundCopy]:
        """Return the copies of a request with each remote worker. Raises what the plan's does."""
        requested = self.plan.requested(local=local, remote=remote, tokens=tokens)
        bound = {}
        for remote_key, (group_pairs, copy) in self.pairs.items():
            bound[remote_key] = copy.bind(requested[group_pairs])
        return bound


ONE_ID: Final = Group("ids", 1)
"""The group of copies whose block ids are given one by one."""

NO_TERM: Final = read_only(np.zeros(1, np.int64))


AtIds = tuple[Entry, int, tuple[int, int]]
"""Runs at each of some ids, how many ids, and where those of both sides begin in the tables."""


def _entry_of_ids(
    length: int,
    steps: tuple[int, int],
    origins: npt.NDArray[np.uint64],
    regions: tuple[Ints, Ints],
) -> Entry:
    """Return runs at ids, as a series of blocks: an id adds ``steps`` bytes to each origin."""
    return _entry(
        length=length,
        starts=NO_TERM,
        period=1,
        groups=(ONE_ID, ONE_ID),
        num_blocks=(2, 2),
        terms=(NO_TERM, NO_TERM),
        by_slot=False,
        steps=steps,
        origins=origins,
        regions=regions,
    )


def _bound_at_ids(
    found: Sequence[AtIds],
    regions: tuple[Sequence[Region], Sequence[Region]],
    tables: JoinedTables,
) -> BoundCopy:
    """Return the copies of runs at ids that tables list."""
    pair = PairCopy({}, laid_out([entry for entry, _, _ in found]), regions)
    bound: dict[Launch, list[Bound]] = {}
    for entry, num_ids, places in found:
        part = LaunchEntries.of(entry.launch, [entry])
        bound.setdefault(part.launch_of(num_ids, 1), []).append((part, 0, num_ids, *places))
    return BoundCopy.of(pair, bound, tables)


def copy_of_spec(spec: ReadSpec, tables: RowTables, is_read: bool) -> BoundCopy:
    """Return the copies of a spec whose ids are listed. A row of ids is a series of blocks."""
    found: list[AtIds] = []
    blocks = JoinedTables()
    for local, remote in spec._sums():
        sides = (local, remote) if is_read else (remote, local)
        address, stride, region, places = [], [], [], []
        for ids, table in zip(sides, tables, strict=True):
            lowest = int(ids.along.min())
            first = ids.first[:, 0].astype(np.int64) + lowest
            row = table.row_of(first)
            side_stride = table.rows[row, 3].astype(np.int64)
            offset = (first - table.first[row]) * side_stride
            address.append(table.rows[row, 0] + offset.astype(np.uint64))
            stride.append(side_stride)
            region.append(table.region[row])
            places.append(blocks.add((ids.along[0] - lowest).astype(np.int32)))
            length = table.rows[row, 1].astype(np.int64)
        columns = np.stack([length, *stride])
        for one in np.unique(columns, axis=1).T.tolist():
            runs = np.flatnonzero((one == columns.T).all(axis=1))
            entry = _entry_of_ids(
                length=one[0],
                steps=(one[1], one[2]),
                origins=np.stack([values[runs] for values in address]),
                regions=(region[0][runs], region[1][runs]),
            )
            found.append((entry, sides[0].along.size, (places[0], places[1])))
    return _bound_at_ids(found, (tables[0].regions, tables[1].regions), blocks)


def copy_of_boxes(copies: Iterable[Copy]) -> BoundCopy:
    """Return local copies, such as those out of a staging buffer, as the kernel takes them.

    Each run of a box is a run at each of the box's offsets, which become ids: multiples of what
    divides the steps between them.

    >>> cache, staging = Region("kv", 4096, 64), Region("staging", 8192, 64)
    >>> into = CopySide(((cache, 0),), np.array([48, 0]), (16,))
    >>> out_of = CopySide(((staging, 0),), np.array([0, 32]), (16,))
    >>> bound = copy_of_boxes([Copy(into, out_of, (2,), 8)])
    >>> bound.num_runs, bound.num_bytes, bound.tables
    (4, 32, array([1, 0, 0, 1], dtype=int32))
    """
    found: list[AtIds] = []
    tables = JoinedTables()
    regions: tuple[list[Region], list[Region]] = ([], [])
    for copy in copies:
        sides = copy.destination, copy.source
        ids = [_offset_ids(side.offsets) for side in sides]
        # ids that are too large for a table are runs of their own
        are_runs = any(each.max(initial=0) >= INT32_END for each, _ in ids)
        num_ids = 1 if are_runs else sides[0].offsets.size
        origins, region_of_run, places, steps = [], [], [], []
        for side, known, (side_ids, step) in zip(sides, regions, ids, strict=True):
            if are_runs:
                side_ids, offsets = NO_TERM, side.offsets
            else:
                offsets = side.offsets.min(keepdims=True)
            for extent, stride in zip(copy.extents, side.strides_bytes, strict=True):
                offsets = np.add.outer(offsets, np.arange(extent) * stride).reshape(-1)
            addresses = np.array([region.address + at for region, at in side.origins], np.uint64)
            origins.append(np.add.outer(addresses, offsets.astype(np.uint64)).reshape(-1))
            numbers = np.arange(len(known), len(known) + len(side.origins))
            known.extend(region for region, _ in side.origins)
            region_of_run.append(np.repeat(numbers, offsets.size))
            places.append(tables.add(side_ids.astype(np.int32)))
            steps.append(step)
        entry = _entry_of_ids(
            length=copy.length_bytes,
            steps=(steps[0], steps[1]),
            origins=np.stack(origins),
            regions=(region_of_run[0], region_of_run[1]),
        )
        found.append((entry, num_ids, (places[0], places[1])))
    return _bound_at_ids(found, regions, tables)


def _offset_ids(offsets: Ints) -> tuple[Ints, int]:
    """Return offsets behind the lowest one as multiples of a step, and the step."""
    behind = offsets - offsets.min()
    step = int(np.gcd.reduce(behind))
    return (behind // step if step else behind), step
