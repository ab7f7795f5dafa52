"""Both sides of a transfer, drawn together: two engines of any layout, their block tables and a request.

Small integers choose, and 0 is always the plainest choice, so that a failure shrinks to plain layouts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping
from typing import TypedDict

import attrs
from hypothesis import strategies as st

from kvplan import Axis, Blocks, Context, Group, Region, TransferPlan, View, Worker

Span = tuple[int, int]
Spans = dict[str, Span | None]
Part = tuple[str, int, int, int]
"""Name, start, stop and size of an axis."""

SHAPES = (
    *((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (1, 3, 1)),
    *((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (3, 2, 1), (2, 3, 1)),
)
"""Tensor, context and pipeline parallel sizes."""

INTERLEAVED, POOL = 2, 3
"""Packings beside 0, a region for each view, and 1, one for each group: views share blocks, by group or all of them."""

DTYPES = ("uint8", "bfloat16", "uint8", "float32")
ITEMSIZE = {"uint8": 1, "bfloat16": 2, "float32": 4}


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


class Request(TypedDict):
    """The arguments of bind."""

    local: dict[str, Blocks]
    remote: dict[str, Blocks]
    tokens: Span | dict[str, Span] | None


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

    def request(self, plan: TransferPlan) -> Request:
        """What ``plan`` binds: of the block tables and ranges, those of the groups that its workers have."""
        side = 0 if plan.operation == "READ" else 1
        given, tokens = (self.local, self.remote), self.tokens(side)
        own, theirs = _groups([plan.local]), _groups(plan.remotes)
        if isinstance(tokens, dict):
            tokens = {name: span for name, span in tokens.items() if name in own}
        return {
            "local": {name: blocks for name, blocks in given[side].items() if name in own},
            "remote": {name: blocks for name, blocks in given[1 - side].items() if name in theirs},
            "tokens": tokens,
        }

    @property
    def by_tensor(self) -> Spans:
        """The range of each tensor."""
        return {name: self.spans[paged] for name, paged in self.tensors.items()}


def key(worker: Worker) -> tuple[str, int]:
    """How specs name a worker."""
    return (worker.engine_id, worker.rank)


def _groups(workers: Iterable[Worker]) -> set[str]:
    return {group.name for worker in workers for group in worker.groups}


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
    for side, table in zip(sides, tables, strict=True):
        _part_pool(side, table)
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


def _digits_of(number: int, *radices: int) -> list[int]:
    """A number as mixed-radix digits, lowest first: several small choices in one draw."""
    digits = []
    for radix in radices:
        number, digit = divmod(number, radix)
        digits.append(digit)
    return digits


def _choices(*radices: int) -> st.SearchStrategy[list[int]]:
    return st.integers(0, math.prod(radices) - 1).map(lambda number: _digits_of(number, *radices))


@st.composite
def _logical(draw: st.DrawFn, index: int) -> Logical:
    dim, heads, kv, dtype, state = draw(_choices(4, 8, 2, 4, 4))
    sizes = {"dim": (1, 2, 4, 3)[dim]}
    if heads:
        sizes["head"] = max(heads - 1, 1)
    if kv:
        sizes["kv"] = 2
    return Logical(f"layers.{index}", state < 3, sizes, DTYPES[dtype])


@st.composite
def _side(draw: st.DrawFn, engine_id: str, tensors: int) -> Side:
    tp, cp, pp = SHAPES[draw(st.integers(0, len(SHAPES) - 1))]
    interleave, slots, digits, packing, split = draw(_choices(3, 6, 2, 4, 3))
    renamed, gap, base, devices, extra_blocks, first_stage = draw(_choices(2, 2, 4, 2, 4, 2))
    return Side(
        engine_id=engine_id,
        group_names={True: f"{engine_id}.kv", False: "ssm"} if renamed else {True: "attn", False: "state"},
        tp=tp,
        cp=cp,
        pp=pp,
        interleave=interleave + 1 if cp > 1 else 1,
        slots=slots + 1,
        digits=bool(digits),
        packing=packing,
        split=split,
        orders=tuple(draw(st.integers(0, 719)) for _ in range(tensors)),
        pads=tuple(draw(st.integers(0, 80)) for _ in range(tensors)),
        gap=gap,
        base=base,
        devices=devices,
        extra_blocks=extra_blocks,
        first_stage=first_stage,
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


def _part_pool(side: Side, tables: dict[str, Blocks]) -> None:
    """Where all groups of a side share one pool, no block is listed by two of them."""
    if side.packing == POOL and len(tables) == 2:
        paged, states = (side.group_names[kind] for kind in (True, False))
        beyond = int(tables[paged].ids.max(initial=-1)) + 1
        tables[states] = Blocks(tables[states].ids + beyond, tables[states].first)


def _worker(
    side: Side, tensors: Iterable[Logical], tables: Mapping[str, Blocks], stage: int, context: int, rank: int
) -> Worker:
    """One worker: its parts of the tensors of its stage, each view in its own order, packed into regions."""
    number = (stage * side.cp + context) * side.tp + rank
    ends: dict[tuple[str, str], int] = {}
    placed: list[tuple[Logical, str, str, list[Axis], int, int, int]] = []
    used: dict[str, Group] = {}
    for index, tensor in enumerate(tensors):
        if (index + side.first_stage) % side.pp != stage:
            continue
        group = side.group_names[tensor.paged]
        slots = side.slots if tensor.paged else None
        used[group] = Group(group, slots, side.context(context) if tensor.paged else Context())
        listed = tables.values() if side.packing == POOL else [tables[group]]
        blocks = max(int(table.ids.max(initial=0)) for table in listed) + 1 + side.extra_blocks * (1 + number % 2)
        for part, axes in enumerate(_parts(side, tensor, rank)):
            made, step, length = _strides(side, index, tensor, axes, blocks)
            region = (f"{group}.{index}.{part}", group, group, "pool")[side.packing]
            placed.append((tensor, group, region, made, blocks, step, ends.get((region, group), 0)))
            ends[region, group] = ends.get((region, group), 0) + length + side.gap * 3
    views = []
    for tensor, group, region, made, blocks, step, offset in placed:
        if side.packing in (INTERLEAVED, POOL):
            step = max(end for (name, _), end in ends.items() if name == region)
        views.append(View(tensor.name, group, region, tensor.dtype, made, blocks, step, offset))
    sizes = {view.region: max(other.end_bytes for other in views if other.region == view.region) for view in views}
    return Worker(side.engine_id, number, _regions(side, sizes, number), used.values(), views)


def _parts(side: Side, tensor: Logical, rank: int) -> list[list[Part]]:
    """The box of a tensor that a rank holds, in one view or split in two."""
    axes: list[Part] = [(name, 0, size, size) for name, size in tensor.sizes.items() if name != "head"]
    if "head" in tensor.sizes:
        heads = tensor.sizes["head"]
        axes.append(("head", rank * heads // side.tp, -(-(rank + 1) * heads // side.tp), heads))
    along = ("", "kv", "head")[side.split]
    for i, (name, start, stop, size) in enumerate(axes):
        if name == along and stop - start > 1:
            cuts = [(start, start + 1), (start + 1, stop)]
            return [[*axes[:i], (name, *cut, size), *axes[i + 1 :]] for cut in cuts]
    return [axes]


def _strides(side: Side, index: int, tensor: Logical, axes: Iterable[Part], blocks: int) -> tuple[list[Axis], int, int]:
    """Axes with strides nested in an order and with pads of choice, the block's stride, and the bytes of it all.

    Where views interleave within a block, the block's stride is yet to come, and the bytes are those of one block.
    """
    digits = [digit for axis in axes for digit in _split_digits(side, axis)]
    if tensor.paged:
        digits += _split_digits(side, ("token", 0, side.slots, side.slots))
    extents = [stop - start for _, start, stop, _ in digits] + ([] if side.packing in (INTERLEAVED, POOL) else [blocks])
    order = list(range(len(extents)))
    choice, pads, stride = side.orders[index], side.pads[index], [0] * (len(digits) + 1)
    span = ITEMSIZE[tensor.dtype]
    while order:
        choice, at = divmod(choice, len(order))
        pads, pad = divmod(pads, 3)
        dim = order.pop(at)
        if extents[dim] > 1:
            stride[dim] = span + pad
            span += (extents[dim] - 1) * stride[dim]
    return [Axis(*digit, step) for digit, step in zip(digits, stride, strict=False)], stride[-1], span


def _split_digits(side: Side, axis: Part) -> list[Part]:
    """A whole axis of even size as two digits, where the side has it so."""
    name, start, stop, size = axis
    if not side.digits or stop - start < size or size < 4 or size % 2:
        return [axis]
    return [(name, 0, size // 2, size // 2), (name, 0, 2, 2)]


def _regions(side: Side, used: Mapping[str, int], rank: int) -> list[Region]:
    """Regions of the bytes used, one after another: at the bottom of memory, around 2**63, or up to 2**64."""
    sizes = {name: size + side.gap * 5 for name, size in used.items()}
    total = sum(sizes.values())
    at = (4096, (1 << 44) + rank * 4096, (1 << 63) - total // 2, (1 << 64) - total)[side.base]
    regions = []
    for name, size in sizes.items():
        regions.append(Region(name, at, size, device_id=side.devices * (rank % 3)))
        at += size
    return regions
