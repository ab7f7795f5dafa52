"""Both sides of a transfer, drawn together: two engines of any layout, their block tables and a request.

Small integers choose, and 0 is always the plainest choice, so that a failure shrinks to plain layouts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping

import attrs
import numpy as np
from hypothesis import strategies as st

from kvplan import Axis, Blocks, Context, Group, Region, View, Worker

Span = tuple[int, int]
Spans = dict[str, Span | None]

SHAPES = sorted(
    (s for s in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2)) if math.prod(s) <= 6),
    key=lambda s: (math.prod(s), s),
)
"""Tensor, context and pipeline parallel sizes."""

DTYPES = ("uint8", "bfloat16", "uint8", "float32")


@attrs.frozen
class Logical:
    """A tensor that both engines keep: axes other than token, and whether it is paged by tokens."""

    name: str
    paged: bool
    sizes: Mapping[str, int]
    dtype: str


@attrs.frozen
class Side:
    """How one engine keeps the tensors. Numbers are choices, decoded where they are used."""

    engine_id: str
    group_names: Mapping[bool, str]
    tp: int
    cp: int
    pp: int
    interleave: int
    slots: int
    digits: bool
    packing: int
    split: int
    orders: tuple[int, ...]
    pads: tuple[int, ...]
    gap: int
    base: int
    devices: int
    extra_blocks: int
    first_stage: int

    def context(self, rank: int) -> Context:
        """The context of a context-parallel rank."""
        return Context(rank, self.cp, self.interleave)


@attrs.frozen
class Case:
    """Two engines and a request. ``spans`` has a range, or None for all, for each kind of group: paged, or states."""

    destinations: tuple[Worker, ...]
    sources: tuple[Worker, ...]
    local: Mapping[str, Blocks]
    remote: Mapping[str, Blocks]
    spans: Mapping[bool, Span | None]
    names: tuple[Mapping[bool, str], Mapping[bool, str]]
    tensors: Mapping[str, bool]
    as_one_range: bool

    def tokens(self, side: int) -> Span | dict[str, Span] | None:
        """The range of the request as bind takes it where ``side``, 0 destination and 1 source, is local."""
        if self.as_one_range:
            return self.spans[True]
        return {self.names[side][paged]: span for paged, span in self.spans.items() if span is not None}

    @property
    def by_tensor(self) -> Spans:
        """The range of each tensor."""
        return {name: self.spans[paged] for name, paged in self.tensors.items()}


def key(worker: Worker) -> tuple[str, int]:
    """How specs name a worker."""
    return (worker.engine_id, worker.rank)


def only(given: Mapping[str, Blocks], workers: Iterable[Worker]) -> dict[str, Blocks]:
    """The block tables of the groups that some of the workers have."""
    known = {group.name for worker in workers for group in worker.groups}
    return {name: blocks for name, blocks in given.items() if name in known}


def ranges_of(tokens: Span | dict[str, Span] | None, worker: Worker) -> Span | dict[str, Span] | None:
    """The token ranges of the groups that a worker has."""
    if isinstance(tokens, dict):
        return {name: span for name, span in tokens.items() if name in {group.name for group in worker.groups}}
    return tokens


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any pair of engines that can serve each other, and any request."""
    tensors = tuple(draw(_logical(i)) for i in range(draw(st.integers(1, 3))))
    kinds = sorted({tensor.paged for tensor in tensors}, reverse=True)
    sides = (draw(_side("decode", len(tensors))), draw(_side("prefill", len(tensors))))
    start = {paged: draw(st.integers(0, 7 if paged else 1)) for paged in kinds}
    spans: dict[bool, Span | None] = {
        paged: (at, at + draw(st.integers(0, 9 if paged else 2))) for paged, at in start.items()
    }
    tables: list[dict[str, Blocks]] = [{}, {}]
    for paged in kinds:
        span = spans[paged]
        assert span is not None
        for i, side in enumerate(sides):
            blocks = draw(_table(side, paged, span))
            tables[i][side.group_names[paged]] = blocks
            if i == 0 and draw(st.integers(0, 3)) == 3:
                spans[paged] = None
                span = _reach(side, paged, blocks)
    as_one_range = spans.get(False) is None and draw(st.booleans())
    workers = [
        tuple(_worker(side, tensors, table, *at) for at in itertools.product(*map(range, (side.pp, side.cp, side.tp))))
        for side, table in zip(sides, tables, strict=True)
    ]
    return Case(
        destinations=workers[0],
        sources=workers[1],
        local=tables[0],
        remote=tables[1],
        spans=spans,
        names=(sides[0].group_names, sides[1].group_names),
        tensors={tensor.name: tensor.paged for tensor in tensors},
        as_one_range=as_one_range and True in kinds,
    )


@st.composite
def _logical(draw: st.DrawFn, index: int) -> Logical:
    sizes = {"dim": draw(st.sampled_from((1, 2, 4, 3)))}
    if draw(st.booleans()):
        sizes["head"] = draw(st.integers(1, 6))
    if draw(st.booleans()):
        sizes["kv"] = 2
    return Logical(f"layers.{index}", draw(st.integers(0, 4)) < 4, sizes, draw(st.sampled_from(DTYPES)))


@st.composite
def _side(draw: st.DrawFn, engine_id: str, tensors: int) -> Side:
    tp, cp, pp = SHAPES[draw(st.integers(0, len(SHAPES) - 1))]
    few = st.integers(0, 3)
    return Side(
        engine_id=engine_id,
        group_names=draw(st.sampled_from(({True: "attn", False: "state"}, {True: f"{engine_id}.kv", False: "ssm"}))),
        tp=tp,
        cp=cp,
        pp=pp,
        interleave=draw(st.integers(1, 3)) if cp > 1 else 1,
        slots=draw(st.integers(1, 6)),
        digits=draw(st.booleans()),
        packing=draw(st.integers(0, 2)),
        split=draw(st.integers(0, 2)),
        orders=tuple(draw(st.integers(0, 719)) for _ in range(tensors)),
        pads=tuple(draw(st.integers(0, 80)) for _ in range(tensors)),
        gap=draw(st.integers(0, 1)),
        base=draw(few),
        devices=draw(st.integers(0, 1)),
        extra_blocks=draw(few),
        first_stage=draw(st.integers(0, 1)),
    )


def _held(side: Side, paged: bool, rank: int, end: int) -> list[int]:
    """The positions below ``end`` that a context-parallel rank holds; every rank holds every state."""
    return [position for position in range(end) if not paged or position in side.context(rank)]


@st.composite
def _table(draw: st.DrawFn, side: Side, paged: bool, span: Span) -> Blocks:
    """A block table that covers a span of positions on every rank, with a block more at either end perhaps."""
    slots, ordinals = side.slots if paged else 1, set()
    for rank in range(side.cp):
        held = _held(side, paged, rank, span[1])
        ordinals |= {local // slots for local, position in enumerate(held) if position >= span[0]}
    first = max(0, min(ordinals, default=draw(st.integers(0, 2))) - draw(st.integers(0, 1)))
    count = max(ordinals, default=first - 1) + 1 - first + draw(st.integers(0, 1))
    seed = draw(st.integers(0, 999))
    pool = range(count + side.extra_blocks)
    return Blocks(random.Random(seed).sample(pool, count) if seed else list(pool)[:count], first)


def _reach(side: Side, paged: bool, blocks: Blocks) -> Span:
    """The positions between the first and the last that listed blocks hold on any rank."""
    slots = side.slots if paged else 1
    low, high = blocks.first * slots, (blocks.first + len(blocks.ids)) * slots
    reached: set[int] = set()
    for rank in range(side.cp):
        reached |= set(_held(side, paged, rank, (high + side.interleave) * side.cp)[low:high])
    return (min(reached), max(reached) + 1) if reached else (0, 0)


def _worker(
    side: Side, tensors: Iterable[Logical], tables: Mapping[str, Blocks], stage: int, context: int, rank: int
) -> Worker:
    """One worker: its parts of the tensors of its stage, each view in its own order, packed into regions."""
    number = (stage * side.cp + context) * side.tp + rank
    ends: dict[str, int] = {}
    placed: list[tuple[Logical, str, str, list[Axis], int, int, int]] = []
    used: dict[str, Group] = {}
    for index, tensor in enumerate(tensors):
        if (index + side.first_stage) % side.pp != stage:
            continue
        group = side.group_names[tensor.paged]
        slots = side.slots if tensor.paged else None
        used[group] = Group(group, slots, side.context(context) if tensor.paged else Context())
        ids = tables[group].ids.tolist()
        blocks = max(ids, default=0) + 1 + side.extra_blocks * (1 + number % 2)
        for part, axes in enumerate(_parts(side, tensor, rank)):
            made, step, length = _strides(side, index, tensor, axes, blocks)
            region = f"{group}.{index}.{part}" if side.packing == 0 else group
            placed.append((tensor, group, region, made, blocks, step, ends.get(region, 0)))
            ends[region] = ends.get(region, 0) + length + side.gap * 3
    views = [
        View(
            tensor.name, group, region, tensor.dtype, axes, blocks, ends[region] if side.packing == 2 else step, offset
        )
        for tensor, group, region, axes, blocks, step, offset in placed
    ]
    ends = {view.region: max(other.end_bytes for other in views if other.region == view.region) for view in views}
    return Worker(side.engine_id, number, _regions(side, ends, number), used.values(), views)


def _parts(side: Side, tensor: Logical, rank: int) -> list[list[Axis]]:
    """The box of a tensor that a rank holds, in one view or split in two; strides are yet to come."""
    axes = [Axis(name, 0, size, size, 0) for name, size in tensor.sizes.items() if name != "head"]
    if "head" in tensor.sizes:
        heads = tensor.sizes["head"]
        axes.append(Axis("head", rank * heads // side.tp, -(-(rank + 1) * heads // side.tp), heads, 0))
    along = ("", "kv", "head")[side.split]
    for i, axis in enumerate(axes):
        if axis.name == along and axis.extent > 1:
            middle = axis.start + 1
            cuts = [(axis.start, middle), (middle, axis.stop)]
            return [[*axes[:i], attrs.evolve(axis, start=a, stop=b), *axes[i + 1 :]] for a, b in cuts]
    return [axes]


def _strides(side: Side, index: int, tensor: Logical, axes: Iterable[Axis], blocks: int) -> tuple[list[Axis], int, int]:
    """Axes with strides nested in an order and with pads of choice, the block's stride, and the bytes of it all.

    Where views interleave within a block, the block's stride is yet to come, and the bytes are those of one block.
    """
    digits = [digit for axis in axes for digit in _digits(axis.name, axis, side.digits)]
    if tensor.paged:
        digits += _digits("token", Axis("token", 0, side.slots, side.slots, 0), side.digits)
    sizes = [digit.extent for digit in digits] + ([] if side.packing == 2 else [blocks])
    order = list(range(len(sizes)))
    choice, pads, stride = side.orders[index], side.pads[index], [0] * (len(digits) + 1)
    span = np.dtype({"bfloat16": "u2"}.get(tensor.dtype, tensor.dtype)).itemsize
    while order:
        choice, at = divmod(choice, len(order))
        pads, pad = divmod(pads, 3)
        dim = order.pop(at)
        if sizes[dim] > 1:
            stride[dim] = span + pad
            span += (sizes[dim] - 1) * stride[dim]
    return [attrs.evolve(digit, stride_bytes=s) for digit, s in zip(digits, stride, strict=False)], stride[-1], span


def _digits(name: str, axis: Axis, wanted: bool) -> list[Axis]:
    """A whole axis of even size as two digits, where wanted."""
    if not wanted or axis.extent != axis.size or axis.size < 4 or axis.size % 2:
        return [axis]
    return [Axis(name, 0, axis.size // 2, axis.size // 2, 0), Axis(name, 0, 2, 2, 0)]


def _regions(side: Side, ends: Mapping[str, int], rank: int) -> list[Region]:
    """Regions of the bytes used, one after another: at the bottom of memory, around 2**63, or up to 2**64."""
    sizes = {name: end + side.gap * 5 for name, end in ends.items()}
    total = sum(sizes.values())
    at = (4096, (1 << 44) + rank * 4096, (1 << 63) - total // 2, (1 << 64) - total)[side.base]
    regions = []
    for name, size in sizes.items():
        regions.append(Region(name, at, size, device_id=side.devices * (rank % 3)))
        at += size
    return regions
