"""Assembles a Worker from tensors that an engine has allocated, and a model that says what they hold.

A tensor has an address, a shape and strides. The model has the names of the tensors, and the part of each axis that a
rank holds. Each bridge walks through an engine's objects and passes both to an :class:`Assembly`, one block table after
another. Every contradiction between them is an error with both values.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

import attrs

from kvplan import _checks
from kvplan._checks import INT64_END, instance, integer, settle
from kvplan.describe.axes import Axis
from kvplan.describe.tensors import Device, device_of, view_of
from kvplan.describe.views import ITEMSIZE, TOKEN, Context, Group, Region, View
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.models.layouts import STEP, Layout, LocalTensor, Page
from kvplan.models.model import Model
from kvplan.models.parallel import MAX_RANKS, RankPart
from kvplan.models.pools import place_pool
from kvplan.models.tensors import Layer

CONTENT: Final = "content"
"""In a pattern, the dimension with all axes of a tensor that the pattern does not name, in their order."""

ATTENTION: Final = "attn"
INDEX: Final = "index"
"""Pools of a layer's attention cache, and of its indexer."""


Bridge = TypeVar("Bridge", bound=Callable[..., Worker])


@attrs.frozen
class RankInfo:
    """The rank that an engine's objects belong to, which they do not know themselves.

    ``rank`` counts all workers of the engine. ``tp_rank`` of ``tp`` decides which heads the worker holds, ``context``
    which positions. With data-parallel attention, ``tp`` is 1. Raises ``TYPE`` or ``RANGE`` for a bad number.
    """

    engine_id: str
    rank: int = 0
    tp_rank: int = 0
    tp: int = 1
    context: Context = attrs.field(factory=Context)

    def __attrs_post_init__(self) -> None:
        settle(self, "a rank", _checks.name, "engine_id")
        settle(self, "a rank", integer, "rank")
        instance(Context, self.context, "context of a rank")
        settle(self, "a rank", integer, "tp", low=1, high=MAX_RANKS)
        settle(self, "a rank", integer, "tp_rank", high=self.tp)


def differ(code: str, action: str, expected: object, got: object) -> KVPlanError:
    """The error for a fact of an engine that contradicts the model, or another fact; its details are both facts."""
    return KVPlanError(
        code, action, expected=f"{expected}", got=f"{got}", wanted=expected, found=got
    )


def reads_engine(release: str) -> Callable[[Bridge], Bridge]:
    """Decorates a bridge: objects without the attributes that ``release`` of the engine has are a ``TYPE`` error."""

    def decorate(bridge: Bridge) -> Bridge:
        @functools.wraps(bridge)
        def read(model: Model, info: RankInfo, *objects: Any, **options: Any) -> Worker:
            instance(Model, model, "model")
            instance(RankInfo, info, "info")
            try:
                return bridge(model, info, *objects, **options)
            except KVPlanError:
                raise
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                got = f"{type(error).__name__}: {error}"
                raise KVPlanError(
                    "TYPE", f"read the objects of {release}", expected="those of it", got=got
                ) from error

        return cast(Bridge, read)

    return decorate


@attrs.define
class Assembly:
    """A worker under construction. For each block table :meth:`begin_group`, then :meth:`add`; :meth:`finish` last."""

    model: Model
    info: RankInfo
    groups: list[Group] = attrs.field(factory=list, init=False)
    views: list[tuple[Device, View]] = attrs.field(factory=list, init=False)
    allocations: set[tuple[Device, int, int]] = attrs.field(factory=set, init=False)

    def begin_group(self, layer: int, tokens: int | None, *, spread: bool = True) -> None:
        """Begins a block table with ``tokens`` slots per block (None: states), named after the group of ``layer``.

        Its positions are those of the rank's context, or all of them if they are not ``spread``.
        """
        _, tensors = self._layer(layer, tokens)
        base, taken = tensors[0].group, {group.name for group in self.groups}
        names = (f"{base}.{i}" if i else base for i in range(len(taken) + 1))
        context = self.info.context if spread and tokens is not None else Context()
        self.groups.append(
            Group(next(name for name in names if name not in taken), tokens, context)
        )

    def pages(self, layer: int) -> dict[str, Page]:
        """What a block of the current group stores of a layer, by pool."""
        tokens = self.groups[-1].tokens_per_block
        prefix, tensors = self._layer(layer, tokens)
        blocks = dict.fromkeys((tensor.group for tensor in tensors), tokens or 1)
        part = RankPart(self.info.tp_rank, self.info.tp, blocks, self.model.dtype)
        return {page.name.removeprefix(prefix): page for _, page in part.pages(tensors, prefix)}

    def attention(self, layer: int, *beside: str) -> LocalTensor:
        """K and V of a layer, or its latent. Raises ``LAYOUT`` if the layer has other pools too, except ``beside``."""
        pages = self.pages(layer)
        more = sorted(pages.keys() - {ATTENTION, *beside})
        if more or ATTENTION not in pages:
            raise differ(
                "LAYOUT",
                f"read the cache of layer {layer}",
                "K and V, or a latent",
                ", ".join(more),
            )
        ((tensor,),) = pages[ATTENTION].sections
        return tensor

    def index(self, layer: int) -> Page:
        """What a layer's indexer stores. Raises ``LAYOUT`` if the model has no indexer."""
        pages = self.pages(layer)
        if INDEX not in pages:
            raise differ(
                "LAYOUT",
                f"read the cache of layer {layer}",
                f"no indexer in {self.model.name}",
                "one",
            )
        return pages[INDEX]

    def _layer(self, number: int, tokens: int | None) -> tuple[str, Layer]:
        """The prefix of a layer's names, and its tensors with tokens or with states."""
        own, drafts = self.model.layers, self.model.drafts
        if not 0 <= number < len(own) + len(drafts):
            known = f"one of {len(own)} layers and {len(drafts)} draft layers of {self.model.name}"
            raise differ("NAME", "place a layer", known, f"layer {number}")
        prefix = f"layers.{number}." if number < len(own) else f"draft.{number - len(own)}."
        layer = (*own, *drafts)[number]
        tensors = tuple(tensor for tensor in layer if tensor.paged == (tokens is not None))
        if not tensors:
            kind = "states" if tokens is None else "tokens"
            cached = ", ".join(tensor.kind for tensor in layer) or "nothing"
            raise differ(
                "GROUP",
                f"place {prefix}* of {self.model.name}",
                f"a layer that caches {kind}",
                cached,
            )
        for tensor in tensors:
            if tensor.scale_of is not None:
                raise differ(
                    "LAYOUT",
                    f"place {prefix}{tensor.kind}",
                    "a cache without scales",
                    tensor.scale_of,
                )
        return prefix, tensors

    def add(self, memory: Any, pattern: str, tensor: LocalTensor, *, join: int = 1) -> None:
        """Adds the view of ``tensor`` in ``memory``, whose dimensions ``pattern`` names.

        The dimension ``content`` holds all axes that the pattern does not name. A dimension of length 1 may have a name
        that the tensor lacks. If ``join`` is more than 1, that many consecutive kernel blocks of the memory are one
        block. Raises ``SIZE`` if lengths differ or kernel blocks are left over, ``DTYPE`` if element types differ.
        """
        raw = view_of(
            memory, pattern, name=tensor.name, group=self.groups[-1], region=everywhere(memory)
        )
        if raw.num_blocks % join:
            what = f"join the kernel blocks of {tensor.name!r}"
            raise differ("SIZE", what, f"a multiple of {join}", f"{raw.num_blocks} kernel blocks")
        check_dtype(tensor, raw.dtype)
        axes, stride, blocks = (
            _axes(raw, tensor, join),
            raw.block_stride_bytes * join,
            raw.num_blocks // join,
        )
        view = attrs.evolve(
            raw, axes=axes, dtype=tensor.dtype, num_blocks=blocks, block_stride_bytes=stride
        )
        self.views.append((device_of(memory), view))

    def add_page(self, memory: Any, page: Page, conv: str = "DS") -> None:
        """Adds the views of all tensors of ``page``, which is stored densely in each block of ``memory``.

        Blocks are its first dimension. Raises ``SIZE`` if they have more bytes or fewer, ``STRIDE`` if the bytes of a
        block have gaps.
        """
        dims = " ".join(f"dim{i}" for i in range(1, len(memory.shape)))
        raw = view_of(
            memory,
            f"block {dims}",
            name=page.name,
            group=self.groups[-1],
            region=everywhere(memory),
        )
        placed, sizes = place_pool(Layout(conv=conv), page.name, [page], 1)
        span = raw.end_bytes - raw.offset_bytes - (raw.num_blocks - 1) * raw.block_stride_bytes
        for code, size in (("SIZE", raw.block_bytes), ("STRIDE", span)):
            if size != sizes[page.name]:
                raise differ(
                    code,
                    f"read page {page.name!r}",
                    f"blocks of {sizes[page.name]} bytes",
                    f"{size} bytes",
                )
        for view in placed:
            at = raw.offset_bytes + view.offset_bytes
            moved = attrs.evolve(
                raw, name=view.name, dtype=view.dtype, axes=view.axes, offset_bytes=at
            )
            self.views.append((device_of(memory), moved))

    def finish(self) -> Worker:
        """The worker. Its regions are the allocations and the memory that views span outside them."""
        spans = [(device, view.offset_bytes, view.end_bytes) for device, view in self.views]
        # Spans sorted by device and start: one that overlaps the span before is joined to it.
        joined: list[tuple[Device, int, int]] = []
        for device, start, stop in sorted([*self.allocations, *spans]):
            if joined and joined[-1][0] == device and start < joined[-1][2]:
                joined[-1] = device, joined[-1][1], max(stop, joined[-1][2])
            else:
                joined.append((device, start, stop))
        regions = [
            Region(f"kv.{i}", start, stop - start, *device)
            for i, (device, start, stop) in enumerate(joined)
        ]
        views = []
        for (
            device,
            view,
        ) in self.views:  # its region is the last one that starts before the view ends
            region = regions[bisect_right(joined, (device, view.end_bytes)) - 1]
            views.append(
                attrs.evolve(
                    view, region=region.name, offset_bytes=view.offset_bytes - region.address
                )
            )
        return Worker(
            self.info.engine_id, self.info.rank, regions, self.groups, views, self.model.name
        )


def _axes(raw: View, tensor: LocalTensor, join: int) -> tuple[Axis, ...]:
    """The axes of ``tensor`` with the strides of ``raw``, a view of the same bytes with the names of a pattern."""
    own = {axis.name: axis for axis in tensor.axes}
    named = {axis.name for axis in raw.axes}
    inner = [axis for axis in tensor.axes if axis.name not in named and axis.name != TOKEN]
    axes = (
        [Axis(TOKEN, 0, join, join, raw.block_stride_bytes)]
        if join > 1 or TOKEN in own.keys() - named
        else []
    )
    for axis in raw.axes:
        if axis.name == CONTENT:
            _check_size(
                tensor, "*".join(inside.name for inside in inner), _extent(inner), axis.extent
            )
            for i, inside in enumerate(inner):  # each steps over all axes after it
                axes.append(
                    attrs.evolve(inside, stride_bytes=axis.stride_bytes * _extent(inner[i + 1 :]))
                )
        elif axis.name in own or axis.extent > 1:
            axes.append(axis)
    if CONTENT not in named:
        axes += inner
    for name in dict.fromkeys((*own, *(axis.name for axis in axes))):
        wanted = own[name].extent if name in own else 1
        _check_size(tensor, name, wanted, _extent(axis for axis in axes if axis.name == name))
    return tuple(
        attrs.evolve(own[axis.name], stride_bytes=axis.stride_bytes)
        if axis.extent == own[axis.name].extent
        else axis
        for axis in axes
    )


def _check_size(tensor: LocalTensor, name: str, wanted: int, found: int) -> None:
    if wanted != found:
        raise differ(
            "SIZE", f"read axis {name!r} of tensor {tensor.name!r}", f"{wanted} coordinates", found
        )


def _extent(axes: Iterable[Axis]) -> int:
    return math.prod(axis.extent for axis in axes)


def check_dtype(tensor: LocalTensor, given: Any) -> None:
    """Raises ``DTYPE`` unless ``given`` is the dtype of the tensor, or plain bytes if that has one byte."""
    found = str(given).removeprefix("torch.")
    if found != tensor.dtype and not (found in ("uint8", "int8") and ITEMSIZE[tensor.dtype] == 1):
        raise differ("DTYPE", f"read tensor {tensor.name!r}", tensor.dtype, found)


def strided(
    memory: Any, dtype: str, address: int, shape: Sequence[int], strides: Sequence[int]
) -> Any:
    """A tensor at an address of the device of ``memory``, with strides in bytes."""
    return SimpleNamespace(
        shape=tuple(shape),
        strides=tuple(strides),
        dtype=dtype,
        device=getattr(memory, "device", "cpu"),
        __array_interface__={"data": (address, False)},
    )


def everywhere(memory: Any) -> Region:
    """All of the memory of a tensor's device, so that offsets in it are addresses."""
    return Region("everywhere", 0, INT64_END - 1, *device_of(memory))


def conv_order(
    sections: Sequence[Sequence[LocalTensor]],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[Any],
) -> str:
    """Whether a layer's states of these shapes have steps inside channels (``DS``) or outside (``SD``).

    Each section has one shape and dtype. That of a convolution has the channels of all its tensors; that of any other
    has the axes of its one tensor. Raises ``SIZE`` or ``DTYPE`` if they are not those of the sections.

    >>> axes = (Axis("channel", 0, 96, 96, 0), Axis("step", 0, 3, 3, 0))
    >>> conv_order([[LocalTensor("layers.0.conv.x", "state", "bfloat16", axes)]], [(3, 96)], ["torch.bfloat16"])
    'SD'
    """
    if not len(sections) == len(shapes) == len(dtypes):
        raise differ(
            "SIZE",
            f"read the states of {sections[0][0].name!r}",
            f"{len(sections)} states",
            len(shapes),
        )
    order = "DS"
    for section, shape, dtype in zip(sections, shapes, dtypes, strict=True):
        for tensor in section:
            check_dtype(tensor, dtype)
        extents = tuple(axis.extent for axis in section[0].axes)
        if any(axis.name == STEP for axis in section[0].axes):
            extents = (sum(tensor.axes[0].extent for tensor in section), extents[1])
            if tuple(shape) == extents[::-1]:
                order = "SD"
                continue
        if tuple(shape) != extents:
            hint = "steps of drafts after the state's own are padding: describe the state in a View"
            raise differ(
                "SIZE", f"read the state of {section[0].name!r}", f"shape {extents}", tuple(shape)
            ).with_hint(hint)
    return order
