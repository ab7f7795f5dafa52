"""Staging: requests in two legs, for pairs of engines whose layouts leave only short runs between them.

A destination reads a source's long runs into its mirror, in memory of its own that the caller set aside, and then puts
the bytes in order by strided copies, at home. Or a source first puts what a destination needs in order in a mirror of
it, at home, and then writes long runs from there. Either way what goes between workers is an ordinary plan.

- S12: both legs together write what a direct plan would, and nothing besides but the staging region: the same cells of
  the same sources, exact positions. What is read beyond the need never leaves the staging region; what is written is
  never more than is needed.
- S13: a request goes in *chunks*, one for each window of positions that has any; the nth brings the nth state of each
  local state group as well. Chunks use the halves of all pools in turn, so that one can be on its way while the next is
  put in order; what is to fill a half has to wait until what was there before is out of it.
- S14: in a mirror a chunk has those of the peer's blocks that hold a position which moves then, and no others.
- S15: whatever is wrong with a request is an error before there is any chunk.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import attrs
import numpy as np

from kvplan._checks import ID_END
from kvplan._text import count
from kvplan.describe.blocks import Blocks, Range, Tokens
from kvplan.describe.views import Region
from kvplan.describe.worker import Worker
from kvplan.plan._arguments import checked_staging
from kvplan.plan.bind import range_of, wanted
from kvplan.plan.cells import Cell
from kvplan.plan.specs import ReadSpec
from kvplan.plan.transfer import SIDES, Known, TransferPlan, pair_of, plan_reads, plan_writes, shares
from kvplan.staging.excess import excess
from kvplan.staging.legs import at_home, on_the_way
from kvplan.staging.mirrors import Mirror, mirror, pools
from kvplan.staging.outlay import Outlay, outlay
from kvplan.staging.rearrange import Copy, Lane, lanes, ordinals
from kvplan.staging.windows import Spans, Tables, Wants, fit, windows

Served = tuple[Worker, Sequence[Cell]]
"""A peer, and the cells between it and the local worker."""


@attrs.frozen(eq=False, repr=False)
class Chunk:
    """A part of a request: ``specs``, one for each of the plan's transfers, and ``copies`` at home.

    Of a ``READ`` all specs are carried out first, then all copies; of a ``WRITE`` all copies first, then all specs.
    What comes first fills one ``half`` of each pool, 0 or 1, and what comes then empties it. ``tokens`` are the
    chunk's ranges by local group: a direct plan moves the same by them, where the destination has all their blocks.
    """

    tokens: Spans
    specs: tuple[ReadSpec, ...]
    copies: tuple[Copy, ...]
    half: int

    @property
    def operation(self) -> str:
        """``READ`` or ``WRITE``."""
        return self.specs[0].operation

    def __repr__(self) -> str:
        moved, copied = (sum(part.num_bytes for part in side) for side in (self.specs, self.copies))
        if self.operation == "READ":
            told = f"{count(moved, 'byte')} read, {copied} put in order"
        else:
            told = f"{count(copied, 'byte')} put in order, {moved} written"
        return f"<Chunk of {dict(self.tokens)}: {told}, half {self.half}>"


@attrs.frozen(eq=False, repr=False)
class StagedPlan:
    """What a worker moves in two legs, for any request.

    ``direct`` is the plan that does it in one. ``transfers`` has a plan for each remote worker that bytes move from or
    to; its local worker is the mirror of that one under the local worker's key, with all of its regions. ``lanes`` say
    how each mirror is emptied into local memory, or filled from there. ``num_positions`` is how many a window has.
    ``excess`` says, by group of the destination, how many bytes are moved beyond the need for each that is needed.
    """

    direct: TransferPlan
    transfers: tuple[TransferPlan, ...]
    mirrors: tuple[Mirror, ...]
    lanes: tuple[tuple[Lane, ...], ...]
    num_positions: int
    excess: Mapping[str, float]

    @property
    def operation(self) -> str:
        """``READ`` or ``WRITE``."""
        return self.direct.operation

    def bind(
        self, *, local: Tables, remote: Tables, tokens: Tokens = None, halves: Iterator[int] | None = None
    ) -> Iterator[Chunk]:
        """What one request moves, chunk by chunk. Takes what :meth:`TransferPlan.bind` takes and raises what it does.

        Of a chunk, copies may only begin when all specs have been carried out, or the other way round: see
        :class:`Chunk`. And the next chunk that has the same half may only begin then to fill it. ``halves`` gives each
        chunk its half when it is made; without it they take turns. Requests whose chunks go through one region by turns
        share one such iterator.
        """
        self.direct.check(local=local, remote=remote, tokens=tokens)
        tables = (local, remote) if self.operation == "READ" else (remote, local)
        wants = [self._wants(staged, tables[0], tokens) for staged in self.mirrors]
        parts = list(windows(wants, tables[0], self.num_positions, self._near))
        both = [
            table for plan in self.transfers for pair in plan.pairs for table in (pair.local_table, pair.remote_table)
        ]
        if any(table.num_ids > ID_END for table in both):
            # raises where an id that is needed does not fit
            deque(self._chunks(parts, wants, tables, itertools.repeat(0)), maxlen=0)
        return self._chunks(parts, wants, tables, itertools.cycle((0, 1)) if halves is None else halves)

    @cached_property
    def closing(self) -> tuple[ReadSpec, ...]:
        """A spec of no bytes for each transfer: carried out when all chunks are, it tells the remote worker so."""
        return tuple([spec for plan in self.transfers for spec in plan.idle.values()])

    @property
    def _near(self) -> int:
        """Whether the destination, 0, or the source, 1, is local."""
        return 0 if self.operation == "READ" else 1

    def _wants(self, staged: Mirror, tables: Tables, tokens: Tokens) -> Wants:
        """What destinations' groups want of sources' through a mirror; ``tables`` are the destination's."""
        near = self._near
        return {
            groups: wanted(groups[0], tables[groups[0].name], range_of(tokens, groups[near]), SIDES[near])
            for groups in staged.groups
        }

    def _chunks(
        self, parts: Iterable[Spans], wants: Iterable[Wants], tables: tuple[Tables, Tables], halves: Iterator[int]
    ) -> Iterator[Chunk]:
        half = None
        every = list(zip(self.transfers, self.mirrors, self.lanes, wants, strict=True))
        for part in parts:
            half = next(halves) if half is None else half
            legs = [self._leg(*each, part, half, tables) for each in every]
            copies = tuple([copy for _, found in legs for copy in found])
            if copies:
                yield Chunk(part, tuple([spec for spec, _ in legs]), copies, half)
                half = None

    def _leg(
        self,
        plan: TransferPlan,
        staged: Mirror,
        lanes: Sequence[Lane],
        wants: Wants,
        part: Spans,
        half: int,
        tables: tuple[Tables, Tables],
    ) -> tuple[ReadSpec, list[Copy]]:
        """What a part of a request moves between a mirror and its peer, and between it and the local worker."""
        far, mirrored, spans, copies = staged.side, dict[str, Blocks](), dict[str, Range](), list[Copy]()
        for groups, group in staged.groups.items():
            (start, stop), (low, high) = part[groups[1 - far].name], wants[groups]
            low, high = max(low, start), min(high, stop)
            mine = [lane for lane in lanes if lane.groups[far] == group]
            positions = [lane.positions(tables[0][groups[0].name], low, high) for lane in mine]
            blocks = ordinals(groups[far], positions)
            first = half * staged.half_blocks[group.name]
            mirrored[group.name] = table = Blocks(np.arange(first, first + blocks.size), ordinals=blocks)
            spans[group.name] = (low, high) if blocks.size else (0, 0)
            ends = [table if side == far else tables[side][groups[side].name] for side in (0, 1)]
            for lane, position in zip(mine, positions, strict=True):
                copies += lane.copies(position, low, high, (ends[0], ends[1]))
        remote = {groups[far].name: tables[far][groups[far].name] for groups in staged.groups}
        (spec,) = plan.bind(local=mirrored, remote=remote, tokens=spans)
        return spec, copies

    def cost(self, tokens: int | None = None) -> Outlay:
        """What a request of so many positions takes in two legs and in one, counted without block tables.

        ``None``: the fewest positions after which the direct plan repeats. Raises what :func:`kvplan.plan.cost.cost`
        does.
        """
        return outlay(self, tokens)

    def __repr__(self) -> str:
        peer = "source" if self.operation == "READ" else "destination"
        peers, at_once = count(len(self.transfers), peer), count(self.num_positions, "position")
        return f"<StagedPlan {self.direct.local.label}: {peers}, {at_once} at a time>"


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
    region = checked_staging(local, staging)
    direct = plan_reads(local, remotes, not_transferred=not_transferred, replicas=replicas)
    served = shares([local], direct.remotes, direct.not_transferred, replicas)
    return _staged(direct, region, [(source, share) for _, source, share in served], whole)


def stage_writes(
    local: Worker,
    remotes: Iterable[Worker],
    siblings: Iterable[Worker] = (),
    *,
    staging: str,
    not_transferred: Iterable[str] = (),
    replicas: int = 1,
) -> StagedPlan:
    """The plan by which ``local`` puts in order in its region ``staging`` what it then writes to ``remotes``.

    No view of ``local`` may have bytes of that region. Other arguments are those of :func:`plan_writes`. Each writer of
    an engine may do it in two legs or in one: they write the same.

    >>> from kvplan import Blocks, Model, Region
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (prefill,), decode = (model.engine(name, tp=tp, num_blocks=99, layout=layout)
    ...                       for name, tp, layout in (("prefill", 1, "LBNHC"), ("decode", 2, "LBHNC")))
    >>> local = attrs.evolve(prefill, regions=(*prefill.regions, Region("staging", 1 << 50, 8 << 20)))
    >>> staged = stage_writes(local, decode, staging="staging")
    >>> print(staged.cost(100))
    100 tokens in one leg: 2867200 bytes in 5600 descriptors of 512 bytes
    100 tokens in two legs: 2867200 bytes in 392 descriptors of 2048 bytes (56) and 8192 bytes (336)
      at home: at most 112 copies in 1 chunk, in 8257536 bytes of staging memory
    >>> tables = {"local": {"attn": Blocks(range(7, 19))}, "remote": {"attn": Blocks([5, 2, 8, 1, 30, 4, 12])}}
    >>> for chunk in staged.bind(**tables, tokens=(0, 100)):
    ...     print([spec.num_descriptors for spec in chunk.specs], chunk)
    [196, 196] <Chunk of {'attn': (0, 100)}: 2867200 bytes put in order, 2867200 written, half 0>

    Raises what :func:`plan_writes` does, and what :func:`stage` does of a staging region.
    """
    region = checked_staging(local, staging)
    direct = plan_writes(local, remotes, siblings, not_transferred=not_transferred, replicas=replicas)
    served = shares(direct.remotes, (local, *direct.siblings), direct.not_transferred, replicas)
    return _staged(direct, region, [(remote, share) for remote, source, share in served if source is local])


def _staged(direct: TransferPlan, region: Region, served: Sequence[Served], whole: bool = False) -> StagedPlan:
    """The plan with mirrors of those that a direct plan moves bytes from or to, in a region of its worker."""
    local, side = direct.local, 1 if direct.operation == "READ" else 0
    needed = [pools(peer, share, side, whole) for peer, share in served]
    demands = [
        (groups[side], pool.block_bytes) for staged in needed for groups, frames in staged.items() for pool in frames
    ]
    fitted = fit(demands, region.size_bytes)
    places = iter(fitted.places)
    mirrors = [
        mirror(local, peer, side, region.name, staged, places) for (peer, _), staged in zip(served, needed, strict=True)
    ]
    filled = [(staged, share) for (_, share), staged in zip(served, mirrors, strict=True)]
    return StagedPlan(
        direct=direct,
        transfers=tuple(_transfers(direct, served, mirrors)),
        mirrors=tuple(mirrors),
        lanes=tuple([lanes(local.regions, at_home(*both)) for both in filled]),
        num_positions=fitted.num_positions,
        excess=excess(filled),
    )


def _transfers(direct: TransferPlan, served: Iterable[Served], mirrors: Iterable[Mirror]) -> Iterator[TransferPlan]:
    """Between each mirror and its peer, what goes from worker to worker."""
    known = Known()
    for (peer, share), staged in zip(served, mirrors, strict=True):
        local = staged.under(direct.local)
        both, near = ((local, peer), 0) if direct.operation == "READ" else ((peer, local), 1)
        pair = pair_of(list(on_the_way(staged, peer, share)), both, near, known)
        yield TransferPlan(direct.operation, local, (peer,), direct.siblings, direct.not_transferred, (pair,))
