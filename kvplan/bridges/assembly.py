"""Assembly: a Worker from tensors that exist already, and a model that says what they hold.

A tensor and a model know half of a view each. The tensor has an address, a shape and strides; the model has names, and
the part of every axis that a rank holds (:class:`kvplan.models.shares.Share`). An :class:`Assembly` joins the two, view
by view. Where they contradict each other, the error has both values.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import attrs

from kvplan._checks import INT64_END, integer, settle
from kvplan.describe.axes import Axis
from kvplan.describe.tensors import Device, device_of, view_of
from kvplan.describe.views import ITEMSIZE, TOKEN, Context, Group, Region, View
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.models.layouts import STEP, Held, Layout, Page, Strip
from kvplan.models.model import Model
from kvplan.models.parallel import MAX_RANKS
from kvplan.models.pools import place
from kvplan.models.shares import Share
from kvplan.models.tensors import Layer

CONTENT: Final = "content"
"""In a pattern, the dimension that holds all axes of a tensor which the pattern does not name, in their order."""

ATTENTION: Final = "attn"
INDEX: Final = "index"
"""Pools of a layer's attention cache, and of its indexer."""


@attrs.frozen
class Seat:
    """Which worker of an engine some objects belong to: what they do not say of themselves.

    ``rank`` is the worker's among all of its engine; ``tp_rank`` of ``tp`` says which heads it holds, and ``context``
    which positions. Where attention is data-parallel, ``tp`` is 1. Raises ``TYPE`` or ``RANGE`` for a bad number.

    >>> Seat("prefill", rank=5, tp_rank=1, tp=4).tp
    4
    """

    engine_id: str
    rank: int = 0
    tp_rank: int = 0
    tp: int = 1
    context: Context = attrs.field(factory=Context)

    def __attrs_post_init__(self) -> None:
        settle(self, "a seat", integer, "tp", low=1, high=MAX_RANKS)
        settle(self, "a seat", integer, "tp_rank", high=self.tp)


def differ(code: str, action: str, expected: object, got: object) -> KVPlanError:
    """The error for a fact of an engine that contradicts the model, or another fact; its details are the two.

    >>> print(differ("SIZE", "read axis 'head' of tensor 'layers.0.attn'", 4, 8))
    SIZE: cannot read axis 'head' of tensor 'layers.0.attn': expected 4, got 8
    """
    return KVPlanError(code, action, expected=f"{expected}", got=f"{got}", wanted=expected, found=got)


@attrs.define
class Assembly:
    """A worker in the making: block table after block table, :meth:`put` what each layer keeps, then :meth:`finish`.

    >>> import numpy as np
    >>> from kvplan import Model
    >>> made = Assembly(Model.shipped("qwen3-0.6b").with_dtypes("float16"), Seat("decode", tp_rank=1, tp=2))
    >>> made.table(layer=7, tokens=16)
    >>> ((held,),) = made.pages(7)["attn"].strips
    >>> made.put(np.zeros((100, 16, 4, 256), np.float16), "block token head content", held)
    >>> print(*made.finish().views[0].axes, sep="; ")
    token [0, 16) of 16 step 2048; head [4, 8) of 8 step 512; kv [0, 2) of 2 step 256; dim [0, 128) of 128 step 2
    """

    model: Model
    seat: Seat
    groups: list[Group] = attrs.field(factory=list, init=False)
    views: list[tuple[Device, View]] = attrs.field(factory=list, init=False)
    allocations: set[tuple[Device, int, int]] = attrs.field(factory=set, init=False)

    def table(self, layer: int, tokens: int | None, *, spread: bool = True) -> None:
        """Begin a block table of ``tokens`` slots a block, or None for states, named after the group of ``layer``.

        Its positions are those of the seat's context, unless they are not ``spread``.
        """
        _, tensors = self._layer(layer, tokens)
        base, taken = tensors[0].group, {group.name for group in self.groups}
        names = (f"{base}.{i}" if i else base for i in range(len(taken) + 1))
        context = self.seat.context if spread and tokens is not None else Context()
        self.groups.append(Group(next(name for name in names if name not in taken), tokens, context))

    def pages(self, layer: int) -> dict[str, Page]:
        """What a block of the current table keeps of a layer, by pool."""
        tokens = self.groups[-1].tokens_per_block
        prefix, tensors = self._layer(layer, tokens)
        blocks = dict.fromkeys((tensor.group for tensor in tensors), tokens or 1)
        share = Share(self.seat.tp_rank, self.seat.tp, blocks, self.model.dtype)
        return {page.name.removeprefix(prefix): page for _, page in share.pages(tensors, prefix)}

    def attention(self, layer: int, *beside: str) -> Held:
        """K and V of a layer, or its latent. Raises ``LAYOUT`` where it keeps more than this and pools ``beside``."""
        pages = self.pages(layer)
        more = sorted(pages.keys() - {ATTENTION, *beside})
        if more or ATTENTION not in pages:
            raise differ("LAYOUT", f"read the cache of layer {layer}", "K and V, or a latent", ", ".join(more))
        ((held,),) = pages[ATTENTION].strips
        return held

    def index(self, layer: int) -> Page:
        """What a layer's indexer keeps. Raises ``LAYOUT`` where the model has none."""
        pages = self.pages(layer)
        if INDEX not in pages:
            raise differ("LAYOUT", f"read the cache of layer {layer}", f"no indexer in {self.model.name}", "one")
        return pages[INDEX]

    def _layer(self, number: int, tokens: int | None) -> tuple[str, Layer]:
        """A layer's prefix, and its tensors in a table of tokens or of states. Layers behind the own are drafts."""
        own, drafts = self.model.layers, self.model.drafts
        if not 0 <= number < len(own) + len(drafts):
            known = f"one of {len(own)} layers and {len(drafts)} draft layers of {self.model.name}"
            raise differ("NAME", "place a layer", known, f"layer {number}")
        is_own = number < len(own)
        prefix = f"layers.{number}." if is_own else f"draft.{number - len(own)}."
        layer = own[number] if is_own else drafts[number - len(own)]
        tensors = tuple(tensor for tensor in layer if tensor.paged == (tokens is not None))
        if not tensors:
            kind = "states" if tokens is None else "tokens"
            kept = ", ".join(tensor.kind for tensor in layer) or "nothing"
            raise differ("GROUP", f"place {prefix}* of {self.model.name}", f"a layer that keeps {kind}", kept)
        scale = next((tensor for tensor in tensors if tensor.scale_of is not None), None)
        if scale is not None:
            raise differ("LAYOUT", f"place {prefix}{scale.kind}", "a cache with no tensors of scales", scale.scale_of)
        return prefix, tensors

    def put(self, tensor: Any, pattern: str, held: Held, *, join: int = 1) -> None:
        """Add the view of what is ``held`` in ``tensor``, whose dimensions ``pattern`` names.

        The dimension ``content`` holds all axes that have no name in the pattern; a dimension of length 1 may have a
        name that is not held. Each ``join`` neighbouring blocks of the tensor are one block, whose outermost digit of
        slots they are. Raises ``SIZE`` where lengths differ, ``DTYPE`` where element types do.
        """
        raw = view_of(tensor, pattern, name=held.name, group=self.groups[-1], region=everywhere(tensor))
        check_dtype(held, raw.dtype)
        axes, stride, blocks = _fitted(raw, held, join), raw.block_stride_bytes * join, raw.num_blocks // join
        view = attrs.evolve(raw, axes=axes, dtype=held.dtype, num_blocks=blocks, block_stride_bytes=stride)
        self.views.append((device_of(tensor), view))

    def put_page(self, tensor: Any, page: Page, conv: str = "DS") -> None:
        """Add views of all that ``page`` holds, which follow each other in each block of ``tensor``.

        Blocks are its first dimension. Raises ``SIZE`` where they have more bytes or fewer, ``STRIDE`` where these are
        not dense.
        """
        digits = " ".join(f"digit{i}" for i in range(1, len(tensor.shape)))
        raw = view_of(tensor, f"block {digits}", name=page.name, group=self.groups[-1], region=everywhere(tensor))
        placed, sizes = place(Layout(conv=conv), page.name, [page], 1)
        span = raw.end_bytes - raw.offset_bytes - (raw.num_blocks - 1) * raw.block_stride_bytes
        for code, size in (("SIZE", raw.block_bytes), ("STRIDE", span)):
            if size != sizes[page.name]:
                raise differ(code, f"read page {page.name!r}", f"blocks of {sizes[page.name]} bytes", f"{size} bytes")
        for view in placed:
            at, axes = raw.offset_bytes + view.offset_bytes, view.axes
            made = View(view.name, raw.group, raw.region, view.dtype, axes, raw.num_blocks, raw.block_stride_bytes, at)
            self.views.append((device_of(tensor), made))

    def finish(self) -> Worker:
        """The worker. Its regions are the allocations, and what views span outside them; those that overlap are one."""
        spans = [(device, view.offset_bytes, view.end_bytes) for device, view in self.views]
        joined: list[tuple[Device, int, int]] = []
        for device, start, stop in sorted([*self.allocations, *spans]):
            if joined and joined[-1][0] == device and start < joined[-1][2]:
                joined[-1] = device, joined[-1][1], max(stop, joined[-1][2])
            else:
                joined.append((device, start, stop))
        regions = [Region(f"kv.{i}", start, stop - start, *device) for i, (device, start, stop) in enumerate(joined)]
        views = [
            _settled(view, regions[bisect_right(joined, (device, view.end_bytes)) - 1]) for device, view in self.views
        ]
        return Worker(self.seat.engine_id, self.seat.rank, regions, self.groups, views)


def _fitted(raw: View, held: Held, join: int) -> tuple[Axis, ...]:
    """The axes that are held, with the strides of a view that names them otherwise and knows no parts."""
    own = {axis.name: axis for axis in held.axes}
    named = {axis.name for axis in raw.axes}
    inner = [axis for axis in held.axes if axis.name not in named and axis.name != TOKEN]
    axes = [Axis(TOKEN, 0, join, join, raw.block_stride_bytes)] if join > 1 or TOKEN in own.keys() - named else []
    for axis in raw.axes:
        if axis.name == CONTENT:
            _check_size(held, "*".join(inside.name for inside in inner), _extent(inner), axis.extent)
            axes += _nested(inner, axis.stride_bytes)
        elif axis.name in own or axis.extent > 1:
            axes.append(axis)
    if CONTENT not in named:
        axes += inner
    for name in dict.fromkeys((*own, *(axis.name for axis in axes))):
        wanted = own[name].extent if name in own else 1
        _check_size(held, name, wanted, _extent(axis for axis in axes if axis.name == name))
    return tuple(
        attrs.evolve(own[axis.name], stride_bytes=axis.stride_bytes) if axis.extent == own[axis.name].extent else axis
        for axis in axes
    )


def _check_size(held: Held, name: str, wanted: int, found: int) -> None:
    if wanted != found:
        raise differ("SIZE", f"read axis {name!r} of tensor {held.name!r}", f"{wanted} coordinates", found)


def _extent(axes: Iterable[Axis]) -> int:
    return math.prod(axis.extent for axis in axes)


def _nested(axes: Sequence[Axis], step: int) -> Iterator[Axis]:
    """The axes one inside the other, the last with ``step`` bytes between neighbours."""
    for i, axis in enumerate(axes):
        yield attrs.evolve(axis, stride_bytes=step * _extent(axes[i + 1 :]))


def _settled(view: View, region: Region) -> View:
    return attrs.evolve(view, region=region.name, offset_bytes=view.offset_bytes - region.address)


def check_dtype(held: Held, given: Any) -> None:
    """Raises ``DTYPE`` unless ``given`` is the dtype of what is held, or plain bytes where that is of one byte."""
    found = str(given).removeprefix("torch.")
    plain = found in ("uint8", "int8") and ITEMSIZE[held.dtype] == 1
    if found != held.dtype and not plain:
        raise differ("DTYPE", f"read tensor {held.name!r}", held.dtype, found)


def everywhere(tensor: Any) -> Region:
    """All of the memory that a tensor is in, so that offsets in it are addresses.

    >>> import numpy as np
    >>> print(everywhere(np.zeros(4)))
    everywhere: 9223372036854775807 bytes at 0x0, DRAM 0
    """
    return Region("everywhere", 0, INT64_END - 1, *device_of(tensor))


def conv_order(strips: Sequence[Strip], shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> str:
    """Whether states with these shapes have steps inside channels (``DS``) or outside (``SD``).

    There is one shape and dtype for each strip: a convolution's, whose channels are all its tensors', or any other's,
    whose shape is that of its axes. Raises ``SIZE`` or ``DTYPE`` where they are not those of what is held.

    >>> x = Held("layers.0.conv.x", "state", "bfloat16", (Axis("channel", 0, 96, 96, 0), Axis("step", 0, 3, 3, 0)))
    >>> conv_order([[x]], [(3, 96)], ["torch.bfloat16"])
    'SD'
    """
    if not len(strips) == len(shapes) == len(dtypes):
        raise differ("SIZE", f"read the states of {strips[0][0].name!r}", f"{len(strips)} states", len(shapes))
    order = "DS"
    for strip, shape, dtype in zip(strips, shapes, dtypes, strict=True):
        for held in strip:
            check_dtype(held, dtype)
        extents = tuple(axis.extent for axis in strip[0].axes)
        if any(axis.name == STEP for axis in strip[0].axes):
            extents = (sum(held.axes[0].extent for held in strip), extents[1])
            if tuple(shape) == extents[::-1]:
                order = "SD"
                continue
        if tuple(shape) != extents:
            raise differ("SIZE", f"read the state of {strip[0].name!r}", f"shape {extents}", tuple(shape))
    return order
