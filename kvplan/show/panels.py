"""Panels: all that a plan moves of each kind of layer, read off its own tables.

A request is bound to the plan, its descriptors are cut where a page or a box of either side ends, and each cut is told
by the coordinates that the views of its own side give it. So both ends of a copy are found apart, from addresses.
Without block tables the request is a sample (:mod:`kvplan.show.samples`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints
from kvplan._text import split
from kvplan.describe.views import Group
from kvplan.describe.worker import Worker
from kvplan.plan.align import before, slots
from kvplan.plan.transfer import TransferPlan
from kvplan.show.bands import Box
from kvplan.show.copies import Copy, End, Panel
from kvplan.show.pages import Page, pages
from kvplan.show.samples import Request, part, sample


def panels(plan: TransferPlan, request: Request | None = None) -> tuple[Panel, ...]:
    """What a plan moves, a panel for each kind of layer, in order of the local worker's views.

    Layers are of one kind if their pages are equal and the same remotes move as much of each. Raises what
    :meth:`TransferPlan.bind` does, and ``RANGE`` for a page of too many pieces.
    """
    kept, far = pages(plan.local), [pages(worker) for worker in plan.remotes]
    kinds: dict[Any, tuple[_Binding, list[_Parts]]] = {}
    for group in plan.local.groups:
        bound = sample(plan, group, far) if request is None else part(plan, group, request)
        if bound is not None:
            binding = _Binding(plan, group, bound, far, request is None)
            for parts in _layers([page for page in kept if page.group == group.name]):
                kinds.setdefault(binding.kind(parts), (binding, []))[1].append(parts)
    return tuple(binding.panel(alike) for binding, alike in kinds.values() if binding.moves_any(alike[0]))


def _layers(kept: Sequence[Page]) -> list[_Parts]:
    """The pages of each layer."""
    layers: dict[Any, _Parts] = {}
    for page in kept:
        for i in range(len(page.places)):
            one = _layer(page, i)
            layers.setdefault(_layer_of(one), []).append(one)
    return list(layers.values())


@attrs.frozen
class _Moves:
    """The descriptors of one pair: region index, offset and length on the local side; remote address and device."""

    region: Ints
    offset: Ints
    length: Ints
    address: npt.NDArray[np.uint64]
    device: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, worker: Worker, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64]) -> _Moves:
        region, offset = np.full(len(local), -1), np.zeros(len(local), np.int64)
        for i, one in enumerate(worker.regions):
            inside = (local[:, 0] >= one.address) & (local[:, 2] == one.device_id) & (region < 0)
            inside &= local[:, 0] - np.uint64(one.address) < one.size_bytes
            region[inside], offset[inside] = i, (local[inside, 0] - np.uint64(one.address)).astype(np.int64)
        order = np.lexsort((offset, region))
        length = local[:, 1].astype(np.int64)
        return cls(region[order], offset[order], length[order], remote[order, 0], remote[order, 2])

    def moved(self, region: int, spans: Ints) -> int:
        """How many bytes of some spans of a region they move."""
        low, high = np.searchsorted(self.region, [region, region + 1])
        start, length = self.offset[low:high], self.length[low:high]
        below = np.append(0, np.cumsum(length))

        def covered(at: Ints) -> Ints:
            i = np.searchsorted(start, at, "right") - 1
            inside: Ints = below[i] + np.minimum(at - start[i], length[i])
            return np.where(i < 0, 0, inside)

        return int((covered(spans[:, 1]) - covered(spans[:, 0])).sum()) if high > low else 0

    def cut(self, region: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
        """What they move of bytes of a region: start, stop, remote address and device, and length of the whole."""
        low = int(np.searchsorted(self.region, region))
        high = int(np.searchsorted(self.region, region + 1))
        i = low + max(int(np.searchsorted(self.offset[low:high], start, "right")) - 1, 0)
        while i < high and self.offset[i] < stop:
            offset, length = int(self.offset[i]), int(self.length[i])
            first, last = max(start, offset), min(stop, offset + length)
            if first < last:
                yield first, last, int(self.address[i]) + first - offset, int(self.device[i]), length
            i += 1


_Parts = list[Page]
"""The pages of one layer."""


class _Binding:
    """A request of one group, bound, and where its blocks are."""

    def __init__(
        self, plan: TransferPlan, group: Group, request: Request, far: Sequence[Sequence[Page]], sampled: bool
    ) -> None:
        self.plan, self.group, self.far, self.sampled = plan, group, far, sampled
        local, remote, tokens = request
        assert isinstance(tokens, Mapping)
        self.tokens = tokens[group.name]
        specs = plan.bind(local=local, remote=remote, tokens=tokens)
        self.moves = [_Moves.of(plan.local, *spec.descriptors()) for spec in specs]
        self.local, self.remote = local[group.name], remote

    def kind(self, parts: _Parts) -> Any:
        """What the pages of a layer are, and how much each remote moves of them."""
        shapes = tuple((page.bands, page.size_bytes, page.rest_bytes, page.block_stride_bytes) for page in parts)
        return shapes, self.group.tokens_per_block, self.tokens, tuple(map(self._moved, parts))

    def moves_any(self, parts: _Parts) -> bool:
        """Whether anything moves of the pages of a layer."""
        return any(any(self._moved(page)) for page in parts)

    def panel(self, alike: Sequence[_Parts]) -> Panel:
        """The panel of equal layers."""
        names = (name for parts in alike for page in parts for name in page.tensors)
        return Panel(
            tensors=tuple(dict.fromkeys(names)),
            num_layers=len(alike),
            tokens=None if self.group.tokens_per_block is None else self.tokens,
            copies=tuple(copy for page in alike[0] for copy in self._copies(page)),
            sampled=self.sampled,
        )

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """The local blocks that the request concerns: ordinal and id."""
        size = slots(self.group)
        low, high = self.tokens
        if self.group.tokens_per_block is not None:
            low, high = before(self.group, low) // size, -(-before(self.group, high) // size)
        for ordinal, block in zip(self.local.ordinals.tolist(), self.local.ids.tolist(), strict=True):
            if low <= ordinal < high:
                yield ordinal, block

    def _moved(self, page: Page) -> tuple[int, ...]:
        """The bytes that each remote moves of a page."""
        (region, offset), step = page.places[0], page.block_stride_bytes
        spans = [page.spans + offset + block * step for _, block in self._blocks()]
        return tuple(sum(moves.moved(region, each) for each in spans) for moves in self.moves)

    def _copies(self, page: Page) -> Iterator[Copy]:
        """The copies of a page of one layer, in order of blocks, then of remotes."""
        region, offset = page.places[0]
        for ordinal, block in self._blocks():
            base = offset + block * page.block_stride_bytes
            for index, moves in enumerate(self.moves):
                remotes = [far for far in self._remote_pages(index) if _layer_of(far) == _layer_of(page)]
                for low, high in (page.spans + base).tolist():
                    for start, stop, address, device, run in moves.cut(region, low, high):
                        for at, far, length in self._ends(index, remotes, address, stop - start, device):
                            for mine, theirs in _paired((page, far.page), (start - base, at), length):
                                ours = End(self.plan.local, page, ordinal, block, mine)
                                yield Copy(ours, attrs.evolve(far, box=theirs), index, run)
                            start += length

    def _remote_pages(self, index: int) -> Iterator[Page]:
        """The pages of a remote, of one layer each."""
        return (_layer(page, i) for page in self.far[index] for i in range(len(page.places)))

    def _ends(
        self, index: int, remotes: Sequence[Page], address: int, length: int, device: int
    ) -> Iterator[tuple[int, End, int]]:
        """Bytes of a remote in pieces of one block each: where in the page they begin, an end there, and the length."""
        while length:
            (at, end, room), *_ = self._blocks_at(index, remotes, address, device)
            taken = min(room, length)
            yield at, end, taken
            address, length = address + taken, length - taken

    def _blocks_at(
        self, index: int, remotes: Sequence[Page], address: int, device: int
    ) -> Iterator[tuple[int, End, int]]:
        """The block of the request that a remote keeps at an address, and how many bytes follow there without a gap."""
        worker = self.plan.remotes[index]
        for page in remotes:
            region, table = worker.regions[page.places[0][0]], self.remote.get(page.group)
            if table is None or region.device_id != device:
                continue
            at = address - region.address - page.places[0][1] - table.ids * page.block_stride_bytes
            for i in np.flatnonzero((at >= 0) & (at < page.size_bytes)).tolist():
                offset = int(at[i])
                span = int(np.searchsorted(page.spans[:, 0], offset, "right")) - 1
                if span >= 0 and offset < page.spans[span, 1]:
                    ordinal, block = int(table.ordinals[i]), int(table.ids[i])
                    room = int(page.spans[span, 1]) - offset
                    yield offset, End(worker, page, ordinal, block, Box(offset, offset + room, ())), room


def _paired(sides: tuple[Page, Page], starts: tuple[int, int], length: int) -> Iterator[tuple[Box, Box]]:
    """``length`` bytes that two pages have in common, from a start in each, cut into boxes of both."""
    whole = [tuple(page.boxes(start, start + length)) for page, start in zip(sides, starts, strict=True)]
    if len(whole[0]) == len(whole[1]) == 1:
        yield whole[0][0], whole[1][0]
        return
    cuts, found = [0, length], set[int]()
    while found != set(cuts):
        cuts, found = sorted(found | set(cuts)), set()
        for page, start in zip(sides, starts, strict=True):
            for low, high in itertools.pairwise(cuts):
                for box in page.boxes(start + low, start + high):
                    found |= {box.start - start, box.stop - start}
    for low, high in itertools.pairwise(cuts):
        (ours,), (theirs,) = (page.boxes(at + low, at + high) for page, at in zip(sides, starts, strict=True))
        yield ours, theirs


def _layer_of(page: Page) -> tuple[str, int | None]:
    return split(page.tensors[0])[:2]


def _layer(page: Page, i: int) -> Page:
    """The page of one layer of several."""
    views = len(page.views)
    return attrs.evolve(page, tensors=page.tensors[i * views : (i + 1) * views], places=page.places[i : i + 1])
