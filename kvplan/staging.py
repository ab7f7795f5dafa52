"""Staging: reads in two legs, for pairs of engines whose layouts leave only short runs between them.

Leg 1 reads a source's long runs into its mirror, in memory of the destination that the caller set aside; it is an
ordinary plan. Leg 2 puts the bytes in order by strided copies, at home.

- S12: both legs together write what a direct plan would, and nothing besides but the staging region: the same cells of
  the same sources, exact positions. What leg 1 reads beyond the need never leaves the staging region.
- S13: a request goes in *chunks*, one for each window of positions that has any; the nth brings each state group's nth
  state as well. Chunks use the halves of all pools in turn, so that one can be read while the one before is put in
  order; what is read into a half has to wait until what was there before is in order.
- S14: of a source's blocks a chunk reads those that hold a position which the destination wants there, and no others.
- S15: whatever is wrong with a request is an error before there is any chunk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Final

import attrs
import numpy as np

from kvplan.align import cycle, local_index, period, position_of, repeated, slots
from kvplan.axes import Ints, distinct
from kvplan.bind import Range, Tokens, range_of, wanted
from kvplan.blocks import Blocks
from kvplan.cells import Cell
from kvplan.errors import KVPlanError
from kvplan.mirrors import Groups, Mirror, mirror, pools, sides
from kvplan.plan import SIDES, TransferPlan, plan_reads, shares
from kvplan.reading import ID_END, count, name
from kvplan.rearrange import Copy, Lane, lanes
from kvplan.specs import ReadSpec
from kvplan.views import TOKEN, Group, Region
from kvplan.windows import fit
from kvplan.workers import Worker

Spans = Mapping[str, Range]
"""A range of positions, or of states, by group of the destination."""

Tables = Mapping[str, Blocks]

MAX_LISTED: Final = 1 << 20
"""At most about so many positions are gone through to count what is read beyond the need."""


@attrs.frozen(eq=False, repr=False)
class Chunk:
    """A part of a request: first all ``specs`` are carried out, one for each plan of reads, then all ``copies``.

    ``tokens`` are its ranges by group of the destination, those by which a direct plan would move the same. The specs
    write to one ``half`` of each pool, 0 or 1, and the copies read there.
    """

    tokens: Spans
    specs: tuple[ReadSpec, ...]
    copies: tuple[Copy, ...]
    half: int

    def __repr__(self) -> str:
        read, copied = (sum(part.num_bytes for part in side) for side in (self.specs, self.copies))
        return f"<Chunk of {dict(self.tokens)}: {count(read, 'byte')} read, {copied} put in order, half {self.half}>"


@attrs.frozen(eq=False, repr=False)
class StagedPlan:
    """What a destination reads in two legs, for any request.

    ``direct`` is the plan that does it in one. ``reads`` has a plan for each source that serves; its local worker is
    the source's mirror under the destination's key, with the destination's regions. ``lanes`` say how each mirror is
    put in order. ``num_positions`` is how many a window has. ``excess`` says, by group of the destination, how many
    bytes are read beyond the need for each that is needed.
    """

    direct: TransferPlan
    reads: tuple[TransferPlan, ...]
    mirrors: tuple[Mirror, ...]
    lanes: tuple[tuple[Lane, ...], ...]
    num_positions: int
    excess: Mapping[str, float]

    def bind(self, *, local: Tables, remote: Tables, tokens: Tokens = None) -> Iterator[Chunk]:
        """What one request moves, chunk by chunk. Takes what :meth:`TransferPlan.bind` takes and raises what it does.

        A chunk's copies may only begin when its specs have been carried out; and the specs of the chunk after the next
        one, which has the same half, when these copies have been.
        """
        self.direct.check(local=local, remote=remote, tokens=tokens)
        parts = list(self._parts(local, tokens))
        if any(plan.pairs[0].remote_table.num_ids > ID_END for plan in self.reads):
            deque(self._chunks(parts, local, remote), maxlen=0)  # raises where an id that is needed does not fit
        return self._chunks(parts, local, remote)

    @cached_property
    def _groups(self) -> Mapping[str, Group]:
        """The destination's groups that anything moves to."""
        return {lane.groups[0].name: lane.groups[0] for lanes in self.lanes for lane in lanes}

    def _parts(self, local: Tables, tokens: Tokens) -> Iterator[Spans]:
        """The ranges of each chunk, rule S13."""
        windows: dict[int, dict[str, Range]] = {}
        states: dict[int, dict[str, Range]] = {}
        size = self.num_positions
        for key, group in self._groups.items():
            table = local[key]
            low, high = wanted(group, table, range_of(tokens, group), SIDES[0])
            if group.tokens_per_block is None:
                kept = table.ordinals[(low <= table.ordinals) & (table.ordinals < high)]
                for turn, at in enumerate(kept.tolist()):
                    states.setdefault(turn, {})[key] = at, at + 1
            else:
                for turn in _turns(group, table, low, high, size):
                    windows.setdefault(turn, {})[key] = max(low, turn * size), min(high, (turn + 1) * size)
        idle, nothing = dict.fromkeys(self._groups, (0, 0)), dict[str, Range]()
        in_order = [windows[turn] for turn in sorted(windows)]
        for some, others in zip_longest(in_order, states.values(), fillvalue=nothing):
            yield {**idle, **some, **others}

    def _chunks(self, parts: Iterable[Spans], local: Tables, remote: Tables) -> Iterator[Chunk]:
        half = 0
        for part in parts:
            legs = [
                _leg(plan, staged, lanes, part, half, (local, remote))
                for plan, staged, lanes in zip(self.reads, self.mirrors, self.lanes, strict=True)
            ]
            copies = tuple([copy for _, found in legs for copy in found])
            if copies:
                yield Chunk(part, tuple([spec for spec, _ in legs]), copies, half)
                half = 1 - half

    def __repr__(self) -> str:
        sources, at_once = count(len(self.reads), "source"), count(self.num_positions, "position")
        return f"<StagedPlan {self.direct.local.label}: {sources}, {at_once} at a time>"


def stage(
    local: Worker,
    remotes: Iterable[Worker],
    *,
    staging: str,
    whole: bool = False,
    not_transferred: Iterable[str] = (),
    replicas: int = 1,
) -> StagedPlan:
    """The plan by which ``local`` reads from ``remotes`` through its region ``staging``, and puts in order at home.

    No view of ``local`` may have bytes of that region. With ``whole``, all that a source's views hold along an axis is
    read where any of it is needed: more bytes, in longer runs. Other arguments are those of :func:`plan_reads`.

    >>> from kvplan import Blocks, Model, Region
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (decode,), (prefill,) = (model.engine(name, num_blocks=99, layout=layout)
    ...                          for name, layout in (("decode", "LBHNC"), ("prefill", "LBNHC")))
    >>> local = attrs.evolve(decode, regions=(*decode.regions, Region("staging", 1 << 50, 8 << 20)))
    >>> staged = stage(local, [prefill], staging="staging")
    >>> staged
    <StagedPlan decode/0: 1 source, 144 positions at a time>
    >>> tables = {"local": {"attn": Blocks(range(20, 32))}, "remote": {"attn": Blocks(range(7, 19))}}
    >>> for chunk in staged.bind(**tables, tokens=(10, 190)):
    ...     print([spec.num_descriptors for spec in chunk.specs], chunk)
    [28] <Chunk of {'attn': (10, 144)}: 3842048 bytes read, 3842048 put in order, half 0>
    [28] <Chunk of {'attn': (144, 190)}: 1318912 bytes read, 1318912 put in order, half 1>
    >>> [spec.num_descriptors for spec in staged.direct.bind(**tables, tokens=(10, 190))]
    [9772]

    Raises what :func:`plan_reads` does; ``NAME`` for a region that ``local`` has not, ``OVERLAP`` for one that its
    views have bytes of, and ``MEMORY`` for one that has not room for two blocks of each group.
    """
    region = _region(local, name(staging, "staging"))
    direct = plan_reads(local, remotes, not_transferred=not_transferred, replicas=replicas)
    served = [(source, share) for _, source, share in shares([local], direct.remotes, direct.not_transferred, replicas)]
    needed = [pools(source, share, whole) for source, share in served]
    demands = [
        (groups[1], pool.block_bytes) for staged in needed for groups, frames in staged.items() for pool in frames
    ]
    fitted = fit(demands, region.size_bytes)
    places = iter(fitted.places)
    mirrors = [
        mirror(local, source, region.name, staged, places) for (source, _), staged in zip(served, needed, strict=True)
    ]
    both = list(zip(served, mirrors, strict=True))
    return StagedPlan(
        direct=direct,
        reads=tuple([plan_reads(staged.under(local), [source]) for (source, _), staged in both]),
        mirrors=tuple(mirrors),
        lanes=tuple([lanes(local, staged, share) for (_, share), staged in both]),
        num_positions=fitted.num_positions,
        excess=_excess([(share, staged) for (_, share), staged in both]),
    )


def _region(local: Worker, key: str) -> Region:
    """The staging region, after making sure that it is one."""
    regions = {region.name: region for region in local.regions}
    if key not in regions:
        raise KVPlanError(
            "NAME",
            f"stage in a region of {local.label}",
            expected=f"one of {', '.join(map(repr, regions)) or 'none'}",
            got=f"{key!r}",
            name=key,
        )
    region = regions[key]
    for view in local.views:
        other = regions[view.region]
        apart = (
            other.address + other.size_bytes <= region.address or region.address + region.size_bytes <= other.address
        )
        if not apart and (other.memory, other.device_id) == (region.memory, region.device_id):
            raise KVPlanError(
                "OVERLAP",
                f"stage in region {key!r} of {local.label}",
                expected="memory that no view has",
                got=f"view {view.name!r} in region {other.name!r}",
                region=key,
                view=view.name,
            )
    return region


def _turns(group: Group, table: Blocks, low: int, high: int, size: int) -> Iterable[int]:
    """The windows in which a destination has blocks for some of ``[low, high)``."""
    if low >= high:
        return ()
    if table.scattered is None:
        return range(low // size, (high - 1) // size + 1)
    start = position_of(group, table.scattered * slots(group))
    last = position_of(group, (table.scattered + 1) * slots(group) - 1)
    first, last = np.maximum(start, low) // size, np.minimum(last, high - 1) // size
    return {turn for begin, end in zip(first.tolist(), last.tolist(), strict=True) for turn in range(begin, end + 1)}


def _leg(
    plan: TransferPlan, staged: Mirror, lanes: Sequence[Lane], part: Spans, half: int, sides: tuple[Tables, Tables]
) -> tuple[ReadSpec, list[Copy]]:
    """What a part of a request reads from one source, and how it is put in order."""
    local, remote = sides
    tables: dict[str, Blocks] = {}
    spans: dict[str, Range] = {}
    copies: list[Copy] = []
    for (ours, theirs), group in staged.groups.items():
        low, high = part[ours.name]
        mine = [lane for lane in lanes if lane.groups[1] == group]
        positions = [lane.positions(local[ours.name], low, high) for lane in mine]
        ordinals = _ordinals(theirs, positions)
        first = half * staged.half_blocks[group.name]
        tables[group.name] = table = Blocks(np.arange(first, first + ordinals.size), ordinals=ordinals)
        spans[group.name] = (low, high) if ordinals.size else (0, 0)
        for lane, position in zip(mine, positions, strict=True):
            copies += lane.copies(position, low, high, (local[ours.name], table))
    names = {theirs.name for _, theirs in staged.groups}
    (spec,) = plan.bind(local=tables, remote={key: remote[key] for key in names}, tokens=spans)
    return spec, copies


def _ordinals(group: Group, positions: Iterable[Ints]) -> Ints:
    """The blocks of a source that hold any of some positions."""
    every = np.concatenate([*positions, np.zeros(0, np.int64)])
    return distinct(local_index(group, every) // slots(group)) if every.size else every


def _excess(served: Iterable[tuple[Sequence[Cell], Mirror]]) -> Mapping[str, float]:
    """For each group of a destination, the bytes read beyond the need, over those needed."""
    found: dict[str, list[float]] = {}
    for share, staged in served:
        for groups, group in staged.groups.items():
            cells = [cell for cell in share if tuple(side.group for side in sides(cell)) == groups]
            block_bytes = sum(view.block_bytes for view in staged.worker.views if view.group == group.name)
            needed, read = _counted(cells, groups, block_bytes)
            sums = found.setdefault(groups[0].name, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + needed, sums[1] + read
    return {key: read / needed - 1 for key, (needed, read) in found.items()}


def _counted(cells: Sequence[Cell], groups: Groups, block_bytes: int) -> tuple[float, float]:
    """Bytes needed and bytes read for each position, or for a state, between two groups."""
    every = math.lcm(cycle(groups[1]), *(cell.every for cell in cells))
    positions = every * min(period(*groups) // math.gcd(period(*groups), every), -(-MAX_LISTED // every))
    carried = [repeated(cell.parts[TOKEN].intervals[:, 0], cell.every, 0, positions) for cell in cells]
    needed = 0
    for cell, position in zip(cells, carried, strict=True):
        sizes = [part.size for axis, part in cell.parts.items() if axis != TOKEN]
        needed += len(cell.match.names) * sides(cell)[0].itemsize * math.prod(sizes) * position.size
    return needed / positions, block_bytes * _ordinals(groups[1], carried).size / positions
