"""Shards: what one file of a page holds, described as a worker of a single block.

A page has the cache of some consecutive positions, and what the token after them needs besides:
states, and windows. It is stored in shards. Each describes itself:

- store.Q1: A shard has one group, of ``tokens``, of a ``window`` or of ``states``, one region
  ``page`` at address 0 of memory kind ``FILE``, and one block. Its worker is ``page/0``, and names
  the model.
- store.Q2: Shards end where the worker that wrote them ends, and where equal shares of a divided
  axis end: engines of TP 1, 2, 4 and 8 write the same eight shards of 8 heads. What is not divided,
  such as latents, is a shard of its own, which all ranks write alike.
- store.Q3: Within a shard, tensors follow each other in the order of the writer's views. A tensor
  has its divided axis outermost, then its other axes in the writer's order; states keep the
  writer's order. Readers rely on none of this: they plan from the description.
- store.Q4: A shard is named by the first 32 hexadecimal digits of the SHA-256 of its description.
- store.Q5: A group whose worker keeps a window of fewer positions than a page has (an extension of
  the worker, :mod:`kvplan.protocol.retention`) stores a shard of ``window``: the last positions of
  the page, as few as contain the window and divide the page. A window of as many positions as a
  page, or more, stores ``tokens``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs

from kvplan._checks import instance, integer
from kvplan._text import brief_repr
from kvplan.describe.axes import Axis
from kvplan.describe.blocks import Range
from kvplan.describe.model import model_values
from kvplan.describe.views import ITEMSIZE, TOKEN, Geometry, Group, Region, View
from kvplan.describe.worker import Worker, key_of
from kvplan.errors import KVPlanError
from kvplan.handshake import decode, encode
from kvplan.protocol.retention import windows_kept

__all__ = [
    "NAME_DIGITS",
    "STATES",
    "TOKENS",
    "StoredShard",
    "shards_of",
]

TOKENS: Final = "tokens"
WINDOW: Final = "window"
STATES: Final = "states"
REGION: Final = "page"
ENGINE: Final = "page"

DIVIDED: Final = ("head", "channel")
"""The axes that tensor-parallel workers divide."""

SHARES: Final = 8
"""The most equal shares of a divided axis that are shards of their own."""

NAME_DIGITS: Final = 32


@attrs.frozen
class StoredShard:
    """A shard of a page, described as a worker of one block. Raises ``PAGE`` for other workers."""

    worker: Worker

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        worker = instance(Worker, self.worker, "worker of a shard")
        # a description is untrusted: any writer of the store may have made it
        regions = [(region.name, region.address, region.memory) for region in worker.regions]
        groups = [group.name for group in worker.groups]
        is_page = regions == [(REGION, 0, "FILE")] and len(groups) == 1 and bool(worker.model)
        kind = worker.groups[0].tokens_per_block if groups else None
        if not is_page or groups[0] not in ((STATES,) if kind is None else (TOKENS, WINDOW)):
            raise _not_a_shard(f"regions {regions} and groups {groups}")
        if worker.key != (ENGINE, 0) or {view.num_blocks for view in worker.views} != {1}:
            raise _not_a_shard(f"worker {worker.label}, or other than one block")

    @classmethod
    def of_offer(cls, offer: bytes) -> StoredShard:
        """Return the shard that a file describes. Raises ``PAGE``, or what decoding raises."""
        return cls(decode(offer))

    @cached_property
    def offer(self) -> bytes:
        """The description, as files have it."""
        return encode(self.worker)

    @cached_property
    def name(self) -> str:
        """The name of the shard's files, rule store.Q4."""
        return name_of(self.offer)

    @property
    def num_bytes(self) -> int:
        """The bytes of the shard in one page."""
        return self.worker.regions[0].size_bytes

    @property
    def group(self) -> Group:
        """The one group, of tokens or of states."""
        return self.worker.groups[0]

    @property
    def num_tokens(self) -> int | None:
        """The last positions of a page that it has, on all ranks of a context; None of states."""
        in_block = self.group.tokens_per_block
        return None if in_block is None else in_block * self.group.context.size

    @property
    def tokens_per_page(self) -> int | None:
        """Positions in a page; None where the shard does not say: of states, and of a window."""
        return self.num_tokens if self.group.name == TOKENS else None

    def misfit(self, worker: Worker) -> str:
        """Return why a worker must not read this shard, or an empty text if it may.

        >>> from kvplan import Model
        >>> models = Model.shipped("qwen3-0.6b"), Model.shipped("qwen3-0.6b").with_dtypes("float16")
        >>> (first,), (second,) = (model.engine("d", num_blocks=9) for model in models)
        >>> shard, *_ = shards_of(first, 64)
        >>> shard.misfit(first)
        ''
        >>> print(shard.misfit(second))
        layers.0.attn is bfloat16 [dim 128, head 8, kv 2], not float16 [dim 128, head 8, kv 2]
        """
        if self.worker.model != instance(Worker, worker, "worker of a reader").model:
            own, other = model_values(self.worker.model, worker.model)
            return f"it is of {own}, not {other}"
        own_facts = _facts_of(worker)
        # a tensor that the worker lacks is of another stage, and does no harm
        for name, facts in self._facts.items():
            if own_facts.get(name, facts) != facts:
                return f"{name} is {facts}, not {own_facts[name]}"
        return ""

    @cached_property
    def _facts(self) -> Mapping[str, str]:
        return _facts_of(self.worker)

    def placed(self, key: tuple[str, int], region: Region, num_pages: int) -> Worker:
        """Return a worker whose blocks are ``num_pages`` such pages, one after another."""
        engine_id, rank = key_of(key, "pages of a store")
        num_pages = integer(num_pages, "pages of a store", low=1)
        views = []
        for view in self.worker.views:
            # pages follow each other without a gap; a single one has no stride
            stride = self.num_bytes if num_pages > 1 else 0
            moved = attrs.evolve(view, num_blocks=num_pages, block_stride_bytes=stride)
            views.append(moved.at(view.name, region, view.offset_bytes))
        return Worker(engine_id, rank, [region], self.worker.groups, views, self.worker.model)

    def in_file(self, key: tuple[str, int], descriptor: int, offset_bytes: int) -> Worker:
        """Return the worker of one such page in an open file, from byte ``offset_bytes`` on.

        An executor that moves files reads it directly, without a check of its digest.
        """
        region = Region(REGION, offset_bytes, self.num_bytes, "FILE", descriptor)
        return self.placed(key, region, 1)


def name_of(offer: bytes) -> str:
    """Return the name of the shard that a description describes, rule store.Q4."""
    return hashlib.sha256(offer).hexdigest()[:NAME_DIGITS]


def _facts_of(worker: Worker) -> dict[str, str]:
    """Return what has to be equal on both sides of each tensor: its dtype, and sizes of axes."""
    facts = []
    for geometry in worker.geometries:
        # the token axes of a page and of a block differ; plans match them
        sizes = [f"{axis} {size}" for axis, size in sorted(geometry.sizes.items()) if axis != TOKEN]
        facts.append(f"{geometry.dtype} [{', '.join(sizes)}]" if sizes else geometry.dtype)
    names = [view.name for view in worker.views]
    return {name: facts[index] for name, index in zip(names, worker.geometry_of, strict=True)}


def _not_a_shard(got: str) -> KVPlanError:
    expected = "one block of tokens or of states in a region 'page'"
    return KVPlanError("PAGE", "read the description of a shard", expected=expected, got=got)


@attrs.frozen
class _HeldBox:
    """The box of a tensor that a worker holds: an interval of each axis, outermost first."""

    dtype: str
    sizes: Mapping[str, int]
    intervals: Mapping[str, Range]

    @property
    def num_elements(self) -> int:
        """The elements of the box at one position."""
        return math.prod(stop - start for start, stop in self.intervals.values())


def shards_of(
    worker: Worker, tokens_per_page: int, *, shares: int = SHARES
) -> tuple[StoredShard, ...]:
    """Return the shards that a worker writes of each page, rules store.Q1 to store.Q3.

    ``shares`` divides heads, or channels, into at most so many shards: a reader of one share reads
    no others. Raises ``MODEL`` for a worker that does not name its model, ``LAYOUT`` where its
    context, or a value of several tokens, does not divide a page, or a view is not one box.

    >>> from kvplan import Model
    >>> model = Model.shipped("qwen3-0.6b")
    >>> shards = [shards_of(worker, 64) for worker in model.engine("p", tp=2, num_blocks=9)]
    >>> [len(rank_shards) for rank_shards in shards], shards[0][0].num_bytes
    ([4, 4], 917504)
    >>> (whole,) = model.engine("d", num_blocks=9)
    >>> [shard.name for shard in shards_of(whole, 64)] == [shard.name for shard in sum(shards, ())]
    True
    """
    if not instance(Worker, worker, "worker of a store").model:
        raise KVPlanError(
            "MODEL",
            f"store pages of {worker.label}",
            expected="a worker that names its model",
            got="none",
            hint="the name says which weights: kvplan_nixl.serving.fingerprint",
        )
    num_tokens = integer(tokens_per_page, "tokens_per_page", low=1)
    most_shares = integer(shares, "shares", low=1)
    shards: list[StoredShard] = []
    windows = windows_kept(worker)
    for group in worker.groups:
        page_group = _page_group(group, num_tokens, windows.get(group.name, 0))
        # the boxes of all tensors, by the share in which they begin
        by_share: dict[int | None, list[tuple[str, _HeldBox]]] = {}
        for name, box in _held_boxes(worker, group):
            for share, cut in _cut(box, most_shares):
                by_share.setdefault(share, []).append((name, cut))
        # what is not divided comes first
        order = sorted(by_share, key=lambda share: -1 if share is None else share)
        shards += [_shard(worker.model, page_group, by_share[share]) for share in order]
    return tuple(shards)


def _page_group(group: Group, num_tokens: int, window: int) -> Group:
    """Return the group of a page, as a context-parallel rank has it, rules store.Q1 and store.Q5.

    ``window`` is the number of positions that the group keeps, 0 if it keeps all.
    """
    if group.is_state:
        return Group(STATES)
    context, per_slot = group.context, group.tokens_per_slot
    # no value is of tokens of two pages, and each rank has the same number of turns in every page
    divisors = {
        per_slot: f"divided by {per_slot}, the tokens of a value",
        context.size * context.interleave_tokens: f"that {context.size} ranks share evenly, "
        f"{context.interleave_tokens} in turn",
    }
    for divisor, reason in divisors.items():
        if num_tokens % divisor:
            action = f"store pages of group {group.name!r}"
            expected = f"tokens_per_page {reason}"
            raise KVPlanError("LAYOUT", action, expected=expected, got=f"{num_tokens}")
    kind, kept = TOKENS, num_tokens
    if 0 < window < num_tokens:
        unit = math.lcm(*divisors)
        fits = (size for size in range(unit, num_tokens + 1, unit) if num_tokens % size == 0)
        kept = next(size for size in fits if size >= window)
        kind = TOKENS if kept == num_tokens else WINDOW
    return Group(kind, kept // context.size, context, per_slot)


def _held_boxes(worker: Worker, group: Group) -> Iterator[tuple[str, _HeldBox]]:
    """Yield what a worker holds of each tensor of a group. Views that make one box are joined."""
    boxes: dict[str, list[_HeldBox]] = {}
    for view, index in zip(worker.views, worker.geometry_of, strict=True):
        if view.group == group.name:
            boxes.setdefault(view.name, []).append(_box(view, worker.geometries[index]))
    for name, held in boxes.items():
        for box in _joined(held):
            yield name, box


def _box(view: View, geometry: Geometry) -> _HeldBox:
    """Return the box of a view; its axes are in the order of their outermost digits' strides."""
    strides: dict[str, int] = {}
    for axis in view.axes:
        if axis.name in geometry.sizes and axis.name != TOKEN:
            strides[axis.name] = max(axis.stride_bytes, strides.get(axis.name, 0))
    order = sorted(strides, key=lambda name: -strides[name])
    # the digits of one axis, such as kernel blocks, are one interval together
    intervals = {}
    for name in order:
        covered = geometry.segments[name].covered
        if len(covered) != 1:
            raise KVPlanError(
                "LAYOUT",
                f"store view {view.name!r}",
                expected=f"one interval of axis {name!r}",
                got=f"{len(covered)}",
            )
        intervals[name] = covered[0]
    sizes = {name: geometry.sizes[name] for name in order}
    return _HeldBox(geometry.dtype, sizes, intervals)


def _joined(boxes: Sequence[_HeldBox]) -> Sequence[_HeldBox]:
    """Return one box in place of several that fill it, such as K and V in two regions."""
    first = boxes[0]
    if len(boxes) == 1 or {*map(_kind, boxes)} != {_kind(first)}:
        return boxes
    # the smallest box around them
    hull = {}
    for name in first.intervals:
        sides = [box.intervals[name] for box in boxes]
        hull[name] = min(start for start, _ in sides), max(stop for _, stop in sides)
    # the axes along which the boxes differ are outside the others, as their regions are
    order = sorted(hull, key=lambda name: hull[name] == first.intervals[name])
    joined = attrs.evolve(first, intervals={name: hull[name] for name in order})
    is_full = sum(box.num_elements for box in boxes) == joined.num_elements
    return [joined] if is_full else boxes


def _kind(box: _HeldBox) -> tuple[Any, ...]:
    return box.dtype, frozenset(box.sizes.items())


def _cut(box: _HeldBox, most_shares: int) -> Iterator[tuple[int | None, _HeldBox]]:
    """Yield a box cut into equal shares of its divided axis, each with its share."""
    axis = next((axis for axis in DIVIDED if axis in box.intervals), None)
    if axis is None:
        yield None, box
        return
    # tensors of other sizes have fewer shares, each numbered as where it begins
    size = box.sizes[axis]
    num_shares = math.gcd(size, most_shares)
    share_size = size // num_shares
    start, stop = box.intervals[axis]
    for share in range(start // share_size, -(-stop // share_size)):
        # a rank of many may hold less than a share
        low = max(start, share * share_size)
        high = min(stop, (share + 1) * share_size)
        cut = attrs.evolve(box, intervals={**box.intervals, axis: (low, high)})
        yield share * most_shares // num_shares, cut


def _shard(model: str, group: Group, boxes: Iterable[tuple[str, _HeldBox]]) -> StoredShard:
    """Return the shard with the boxes one after another."""
    views = []
    offset = 0
    for name, box in boxes:
        extents = {axis: stop - start for axis, (start, stop) in box.intervals.items()}
        order = list(extents)
        if not group.is_state:
            divided = [axis for axis in order if axis in DIVIDED]
            order = [*divided, TOKEN, *(axis for axis in order if axis not in DIVIDED)]
            extents[TOKEN] = group.num_slots
        # from the innermost axis outwards
        axes = []
        stride = ITEMSIZE[box.dtype]
        for axis in reversed(order):
            start, stop = box.intervals.get(axis, (0, extents[axis]))
            axes.append(Axis(axis, start, stop, box.sizes.get(axis, stop), stride))
            stride *= extents[axis]
        views.append(View(name, group, REGION, box.dtype, axes[::-1], 1, 0, offset))
        offset += stride
    region = Region(REGION, 0, offset, "FILE")
    return StoredShard(Worker(ENGINE, 0, [region], [group], views, model))
