"""Assembles a Worker from tensors that an engine has allocated, and a model that names their axes.

A tensor has an address, a shape and strides. The model has the names of the tensors, and the part
of each axis that a rank holds. Each bridge walks through an engine's objects and passes both to an
:class:`Assembly`, one block table after another. Every contradiction between them is an error with
both values.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeVar, cast

import attrs

from kvplan import _checks
from kvplan._checks import INT64_END, check_fields, instance, integer
from kvplan._text import brief_repr, shown
from kvplan.describe.axes import Axis
from kvplan.describe.tensors import Device, MemoryOwner, device_of, view_of
from kvplan.describe.views import ITEMSIZE, TOKEN, Context, Group, Region, View, dtype_name
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.models.layouts import STEP, Layout, LocalTensor, Page
from kvplan.models.model import Model, NamedLayer
from kvplan.models.parallel import MAX_RANKS, RankShard
from kvplan.models.pools import place_pool
from kvplan.models.tensors import STATE, Layer, Tensor

CONTENT: Final = "content"
"""The dimension of a pattern that has all axes of a tensor that the pattern does not name."""

ATTENTION: Final = "attn"
INDEX: Final = "index"
"""Pools of a layer's attention cache, and of its indexer."""


Reader = TypeVar("Reader", bound=Callable[..., Any])


@attrs.frozen
class RankInfo:
    """The rank that an engine's objects belong to, which they do not know themselves.

    ``rank`` counts all workers of the engine. ``tp_rank`` of ``tp`` decides which heads the worker
    holds, ``context`` which positions. With data-parallel attention, ``tp`` is 1. Raises ``TYPE``
    or ``RANGE`` for a bad number.
    """

    engine_id: str
    rank: int = 0
    tp_rank: int = 0
    tp: int = 1
    context: Context = attrs.field(factory=Context)

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "a rank", _checks.name, "engine_id")
        check_fields(self, "a rank", integer, "rank")
        instance(Context, self.context, "context of a rank")
        check_fields(self, "a rank", integer, "tp", low=1, high=MAX_RANKS)
        check_fields(self, "a rank", integer, "tp_rank", high=self.tp)


def contradiction(code: str, action: str, expected: object, got: object) -> KVPlanError:
    """Return the error for a fact of an engine that contradicts the model, or another fact.

    Its details are both facts.
    """
    return KVPlanError(
        code, action, expected=f"{expected}", got=f"{got}", wanted=expected, found=got
    )


def reads_engine(release: str) -> Callable[[Reader], Reader]:
    """Decorate a function that reads the objects of a ``release``: others are a ``TYPE`` error."""

    def decorate(read: Reader) -> Reader:
        @functools.wraps(read)
        def checked(*objects: Any, **options: Any) -> Any:
            try:
                return read(*objects, **options)
            except KVPlanError:
                raise
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                action = f"read the objects of {release}"
                expected = "objects with the attributes of that release"
                got = f"{type(error).__name__}: {error}"
                raise KVPlanError("TYPE", action, expected=expected, got=got) from error

        return cast(Reader, checked)

    return decorate


@attrs.frozen
class ObservedModel:
    """The cached tensors of a running engine, read off its own objects: no model type is needed.

    ``layers`` has the engine's key of each layer, a name or a number. Bridges take it, or a
    :class:`~kvplan.Model`, which says the same from a configuration. ``name`` is whose cache it is,
    as in :class:`~kvplan.Worker`.
    """

    name: Mapping[str, Any] | str
    layers: Mapping[Hashable, NamedLayer]
    dtype: str = "uint8"

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str):
            instance(Mapping, self.name, "name of a model")
        for layer in instance(Mapping, self.layers, "layers of an engine").values():
            instance(NamedLayer, layer, "layer of an engine")

    def named_layer(self, key: Hashable) -> NamedLayer:
        """Return a layer by its key. Raises ``NAME``."""
        layer = self.layers.get(key) if isinstance(key, Hashable) else None
        if layer is None:
            raise contradiction("NAME", "place a layer", "a layer of the engine", shown(key))
        return layer


def total_heads(action: str, local: int, tp: int, total: int | None, hint: str) -> int:
    """Return the KV heads of a layer on all ranks together, of which a rank has ``local``.

    Several heads are a share of their own. One head may be one of fewer heads than ranks: then
    ``total`` says how many there are, since the engine's objects do not. Raises ``SIZE`` where they
    are not known, or cannot be so many.
    """
    if local > 1 or tp == 1:
        return local * tp
    if total is None or not 0 < total <= tp:
        expected = f"1 to {tp} KV heads in all, of which each rank has one"
        got = "an unknown number" if total is None else total
        raise contradiction("SIZE", action, expected, got).with_hint(hint)
    return total


def rank_prefix(info: RankInfo) -> str:
    """Return the beginning of names of tensors that ranks divide in an unknown way.

    It names the rank, so such a tensor moves between equal ranks of equally large engines.
    """
    return "" if info.tp == 1 else f"tp{info.tp}.{info.tp_rank}."


def unknown_states(prefix: str, shapes: Iterable[Sequence[int]], dtypes: Iterable[Any]) -> Layer:
    """Return recurrent states whose axes are not known: one tensor for each, of its shape."""
    tensors = []
    for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        axes = tuple((f"dim{index}", size) for index, size in enumerate(shape))
        kind = f"{prefix}state.{number}"
        state = Tensor(kind, STATE, axes, paged=False, dtype=dtype_name(dtype), pool=STATE)
        tensors.append(state)
    return tuple(tensors)


class MemoryInterval(NamedTuple):
    """The addresses ``[start, stop)`` of a device."""

    device: Device
    start: int
    stop: int


class PlacedView(NamedTuple):
    """A view whose offset is an address of its device, and the owner of the memory there."""

    device: Device
    view: View
    owner: MemoryOwner


@attrs.define
class Assembly:
    """A worker under construction.

    For each block table :meth:`begin_group`, then :meth:`add`; :meth:`finish` last.
    ``allocations`` are the memory that the engine's objects know of.
    """

    model: Model | ObservedModel
    info: RankInfo
    groups: list[Group] = attrs.field(factory=list, init=False)
    views: list[PlacedView] = attrs.field(factory=list, init=False)
    allocations: set[MemoryInterval] = attrs.field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.model, ObservedModel):
            instance(Model, self.model, "model")
        instance(RankInfo, self.info, "info")

    def begin_group(
        self,
        layer: Hashable,
        tokens: int | None,
        *,
        spread: bool = True,
        tokens_per_slot: int = 1,
    ) -> None:
        """Begin a block table with ``tokens`` slots per block (None: states).

        It has the name of the group of ``layer``. Its positions are those of the rank's context, or
        all of them if they are not ``spread``. A slot has ``tokens_per_slot`` positions.
        """
        _, tensors = self._layer(layer, tokens)
        name = tensors[0].group
        used_names = {group.name for group in self.groups}
        # The first block table of a name has no number.
        names = [name, *(f"{name}.{number}" for number in range(1, len(used_names) + 1))]
        unused_names = (name for name in names if name not in used_names)
        context = self.info.context if spread and tokens is not None else Context()
        self.groups.append(Group(next(unused_names), tokens, context, tokens_per_slot))

    def pages(self, layer: Hashable, kernel_blocks: int = 1) -> dict[str, Page]:
        """Return what a block of the current group stores of a layer, by pool.

        With ``kernel_blocks``, what one of so many equal parts of a block does.
        """
        group = self.groups[-1]
        prefix, tensors = self._layer(layer, group.tokens_per_block)
        num_slots = group.num_slots // kernel_blocks
        blocks = dict.fromkeys((tensor.group for tensor in tensors), num_slots)
        part = RankShard(self.info.tp_rank, self.info.tp, blocks, self.model.dtype)
        return {page.name.removeprefix(prefix): page for _, page in part.pages(tensors, prefix)}

    def attention(self, layer: Hashable, *allowed_pools: str) -> LocalTensor:
        """Return K and V of a layer, or its latent.

        Raises ``LAYOUT`` if the layer has other pools too, except ``allowed_pools``.
        """
        pages = self.pages(layer)
        unexpected_pools = sorted(pages.keys() - {ATTENTION, *allowed_pools})
        if unexpected_pools or ATTENTION not in pages:
            action = f"read the cache of layer {layer}"
            raise contradiction(
                "LAYOUT", action, "K and V, or a latent", ", ".join(unexpected_pools)
            )
        ((tensor,),) = pages[ATTENTION].sections
        return tensor

    def index(self, layer: Hashable) -> Page:
        """Return what a layer's indexer stores. Raises ``LAYOUT`` if the model has no indexer."""
        pages = self.pages(layer)
        if INDEX not in pages:
            action = f"read the cache of layer {layer}"
            raise contradiction("LAYOUT", action, f"no indexer in {self.model.name}", "one")
        return pages[INDEX]

    def _layer(self, layer: Hashable, tokens: int | None) -> NamedLayer:
        """Return the prefix of a layer's names, and its tensors with tokens or with states."""
        prefix, cached = self.model.named_layer(layer)
        paged = tokens is not None
        tensors = tuple(tensor for tensor in cached if tensor.paged == paged)
        if not tensors:
            action = f"place {prefix}* of {self.model.name}"
            expected = f"a layer that caches {'tokens' if paged else 'states'}"
            got = ", ".join(tensor.kind for tensor in cached) or "nothing"
            raise contradiction("GROUP", action, expected, got)
        for tensor in tensors:
            if tensor.scale_of is not None:
                action = f"place {prefix}{tensor.kind}"
                raise contradiction("LAYOUT", action, "a cache without scales", tensor.scale_of)
        return NamedLayer(prefix, tensors)

    def add(
        self, memory: Any, pattern: str, tensor: LocalTensor, *, kernel_blocks: int = 1
    ) -> None:
        """Add the view of ``tensor`` in ``memory``, whose dimensions ``pattern`` names.

        The dimension ``content`` holds all axes that the pattern does not name, in their order. A
        dimension of length 1 may have a name that the tensor lacks. ``kernel_blocks`` consecutive
        blocks of the memory are one block. Raises ``SIZE`` if lengths differ or kernel blocks are
        left over, ``DTYPE`` if element types differ.
        """
        raw = view_at_addresses(memory, pattern, tensor.name, self.groups[-1])
        num_blocks, num_left = divmod(raw.num_blocks, kernel_blocks)
        if num_left:
            action = f"join the kernel blocks of {tensor.name!r}"
            got = f"{raw.num_blocks} kernel blocks"
            raise contradiction("SIZE", action, f"a multiple of {kernel_blocks}", got)
        check_dtype(tensor, raw.dtype)
        view = attrs.evolve(
            raw,
            axes=_axes(raw, tensor, kernel_blocks),
            dtype=tensor.dtype,
            num_blocks=num_blocks,
            block_stride_bytes=raw.block_stride_bytes * kernel_blocks,
        )
        self.views.append(PlacedView(device_of(memory), view, _owner_of(memory)))

    def add_page(
        self, memory: Any, page: Page, conv: str = "DS", *, kernel_blocks: int = 1
    ) -> None:
        """Add the views of all tensors of ``page``, which each block of ``memory`` stores densely.

        Blocks are its first dimension; each ``kernel_blocks`` of them are one block. Raises
        ``SIZE`` if they have more bytes or fewer, ``STRIDE`` if the bytes of a block have gaps.
        """
        raw = blocks_at_addresses(memory, page.name, self.groups[-1])
        # The page in a pool of one block has the offsets that it has in every block.
        placed_views, region_bytes = place_pool(Layout(conv=conv), page.name, [page], 1)
        page_bytes = region_bytes[page.name]
        # The bytes that a block spans are more than it has if there are gaps between them.
        blocks_before_last = (raw.num_blocks - 1) * raw.block_stride_bytes
        spanned_bytes = raw.end_bytes - raw.offset_bytes - blocks_before_last
        for code, block_bytes in (("SIZE", raw.block_bytes), ("STRIDE", spanned_bytes)):
            if block_bytes != page_bytes:
                action = f"read page {page.name!r}"
                expected = f"blocks of {page_bytes} bytes"
                raise contradiction(code, action, expected, f"{block_bytes} bytes")
        owner = _owner_of(memory)
        joined: tuple[Axis, ...] = ()
        if kernel_blocks > 1:
            joined = (Axis(TOKEN, 0, kernel_blocks, kernel_blocks, raw.block_stride_bytes),)
        # Each tensor of the page is a view with the blocks of the memory.
        for placed in placed_views:
            view = attrs.evolve(
                raw,
                name=placed.name,
                dtype=placed.dtype,
                axes=(*joined, *placed.axes),
                offset_bytes=raw.offset_bytes + placed.offset_bytes,
                num_blocks=raw.num_blocks // kernel_blocks,
                block_stride_bytes=raw.block_stride_bytes * kernel_blocks,
            )
            self.views.append(PlacedView(device_of(memory), view, owner))

    def finish(self) -> Worker:
        """Return the worker.

        Its regions are the allocations and the memory that views span outside them.
        """
        intervals = [
            MemoryInterval(device, view.offset_bytes, view.end_bytes)
            for device, view, _ in self.views
        ]
        intervals = _joined([*self.allocations, *intervals])
        # the owners of each interval's memory, each once
        owners: list[dict[Any, MemoryOwner]] = [{} for _ in intervals]
        placed_views = []
        for device, view, owner in self.views:
            # The region of a view is the last one that starts before the view ends.
            index = bisect_right(intervals, (device, view.end_bytes)) - 1
            owners[index].setdefault((owner.address, owner.size_bytes), owner)
            offset_bytes = view.offset_bytes - intervals[index].start
            placed_views.append(attrs.evolve(view, region=f"kv.{index}", offset_bytes=offset_bytes))
        regions = []
        for index, (device, start, stop) in enumerate(intervals):
            kept = tuple(owners[index].values())
            regions.append(Region(f"kv.{index}", start, stop - start, *device, owners=kept))
        info = self.info
        return Worker(
            info.engine_id, info.rank, regions, self.groups, placed_views, self.model.name
        )


def _owner_of(memory: Any) -> MemoryOwner:
    """Return the owner of the memory of a tensor, or of what :func:`strided_memory` returns."""
    return MemoryOwner.of(getattr(memory, "origin", memory))


def _joined(intervals: Iterable[MemoryInterval]) -> list[MemoryInterval]:
    """Return intervals in ascending order, those that overlap joined to one."""
    # Intervals are sorted by device and start, so each can only overlap the last one.
    joined: list[MemoryInterval] = []
    for interval in sorted(intervals):
        last = joined[-1] if joined else None
        if last is not None and last.device == interval.device and interval.start < last.stop:
            joined[-1] = last._replace(stop=max(interval.stop, last.stop))
        else:
            joined.append(interval)
    return joined


def _axes(raw: View, tensor: LocalTensor, kernel_blocks: int) -> tuple[Axis, ...]:
    """Return the axes of ``tensor`` with the strides of ``raw``.

    ``raw`` is a view of the same bytes with the names of a pattern.
    """
    tensor_axes = {axis.name: axis for axis in tensor.axes}
    named = {axis.name for axis in raw.axes}
    # The axes that the pattern does not name are the content of a slot.
    content = [axis for axis in tensor.axes if axis.name not in named and axis.name != TOKEN]
    axes: list[Axis] = []
    # Blocks that are joined, or slots that are blocks, step from block to block.
    if kernel_blocks > 1 or TOKEN in tensor_axes.keys() - named:
        axes.append(Axis(TOKEN, 0, kernel_blocks, kernel_blocks, raw.block_stride_bytes))
    for axis in raw.axes:
        if axis.name == CONTENT:
            names = "*".join(content_axis.name for content_axis in content)
            _check_extent(tensor, names, _extent(content), axis.extent)
            strides = dense_strides([axis.extent for axis in content], axis.stride_bytes)
            for content_axis, stride in zip(content, strides, strict=True):
                axes.append(attrs.evolve(content_axis, stride_bytes=stride))
        elif axis.name in tensor_axes or axis.extent > 1:
            axes.append(axis)
    if CONTENT not in named:
        axes += content
    # The digits of an axis have as many coordinates together as the tensor has.
    for name in dict.fromkeys((*tensor_axes, *(axis.name for axis in axes))):
        extent = tensor_axes[name].extent if name in tensor_axes else 1
        _check_extent(tensor, name, extent, _extent(axis for axis in axes if axis.name == name))
    return tuple(_with_part(axis, tensor_axes[axis.name]) for axis in axes)


def _with_part(axis: Axis, tensor_axis: Axis) -> Axis:
    """Return an axis with the part that the tensor has of it, unless it is one of its digits."""
    if axis.extent != tensor_axis.extent:
        return axis
    return attrs.evolve(tensor_axis, stride_bytes=axis.stride_bytes)


def _check_extent(tensor: LocalTensor, axis_name: str, expected: int, got: int) -> None:
    if expected != got:
        action = f"read axis {axis_name!r} of tensor {tensor.name!r}"
        raise contradiction("SIZE", action, f"{expected} coordinates", got)


def _extent(axes: Iterable[Axis]) -> int:
    return math.prod(axis.extent for axis in axes)


def check_dtype(tensor: LocalTensor, dtype: Any) -> None:
    """Raise ``DTYPE`` unless a dtype is the tensor's own, or plain bytes if that has one byte."""
    found = dtype_name(dtype)
    are_bytes = found in ("uint8", "int8") and ITEMSIZE[tensor.dtype] == 1
    if found != tensor.dtype and not are_bytes:
        raise contradiction("DTYPE", f"read tensor {tensor.name!r}", tensor.dtype, found)


def dense_strides(shape: Sequence[int], size_bytes: int) -> list[int]:
    """Return the strides of dimensions without gaps around elements of ``size_bytes``.

    >>> dense_strides([3, 4, 5], 2)
    [40, 10, 2]
    """
    return [size_bytes * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def strided_memory(
    memory: Any, dtype: str, address: int, shape: Sequence[int], strides: Sequence[int]
) -> Any:
    """Return a tensor at an address in ``memory``, with strides in bytes."""
    return SimpleNamespace(
        origin=getattr(memory, "origin", memory),
        shape=tuple(shape),
        strides=tuple(strides),
        dtype=dtype,
        device=getattr(memory, "device", "cpu"),
        __array_interface__={"data": (address, False)},
    )


def view_at_addresses(memory: Any, pattern: str, name: str, group: Group | str) -> View:
    """Return a view of ``memory`` in a region of all its device, so that offsets are addresses."""
    region = Region("everywhere", 0, INT64_END - 1, *device_of(memory))
    return view_of(memory, pattern, name=name, group=group, region=region)


def blocks_at_addresses(memory: Any, name: str, group: Group | str) -> View:
    """Return a view of ``memory`` whose dimensions are blocks, ``dim1``, ``dim2`` and so on."""
    dims = [f"dim{number}" for number in range(1, len(memory.shape))]
    return view_at_addresses(memory, " ".join(["block", *dims]), name, group)


def conv_order(
    sections: Sequence[Sequence[LocalTensor]],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[Any],
) -> str:
    """Return the order of a layer's states: steps inside channels (``DS``) or outside (``SD``).

    Each section has one shape and dtype. That of a convolution has the channels of all its tensors;
    that of any other has the axes of its one tensor. Raises ``SIZE`` or ``DTYPE`` if they are not
    those of the sections.

    >>> axes = (Axis("channel", 0, 96, 96, 0), Axis("step", 0, 3, 3, 0))
    >>> tensor = LocalTensor("layers.0.conv.x", "state", "bfloat16", axes)
    >>> conv_order([[tensor]], [(3, 96)], ["torch.bfloat16"])
    'SD'
    """
    if not len(sections) == len(shapes) == len(dtypes):
        action = f"read the states of {sections[0][0].name!r}"
        raise contradiction("SIZE", action, f"{len(sections)} states", len(shapes))
    order = "DS"
    for section, shape, dtype in zip(sections, shapes, dtypes, strict=True):
        # All tensors of a section have its dtype; a convolution has the channels of all of them.
        first = section[0]
        for tensor in section:
            check_dtype(tensor, dtype)
        extents = tuple(axis.extent for axis in first.axes)
        if first.has(STEP):
            extents = (sum(tensor.axes[0].extent for tensor in section), extents[1])
            if tuple(shape) == extents[::-1]:
                order = "SD"
                continue
        if tuple(shape) != extents:
            action = f"read the state of {first.name!r}"
            hint = "steps of drafts after the state's own are padding: describe the state in a View"
            error = contradiction("SIZE", action, f"shape {extents}", tuple(shape))
            raise error.with_hint(hint)
    return order
