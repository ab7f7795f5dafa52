"""Digests of a request's cache in a worker's tensors, in main memory or on a GPU.

:mod:`kvplan.protocol.digest` defines them, and compares those of two engines.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
import torch

from kvplan import (
    Axis,
    Blocks,
    Context,
    Group,
    KVPlanError,
    Region,
    View,
    Worker,
    region_of,
    view_of,
)
from kvplan.describe import TOKEN, Tokens
from kvplan.protocol.digest import (
    DIVIDED,
    WORD_BYTES,
    BlockPositions,
    Residues,
    TensorDigests,
    divided_axes,
    keys,
    packed_axis,
    parts_of,
    positions_by_group,
    to_json,
)
from kvplan.support import Ints, instance, members
from kvplan_nixl.digest_kernel import DigestKernel, ViewWork, WordTable
from kvplan_nixl.kernel import has_triton
from kvplan_nixl.rearrange import Memory, MemoryAddress, memories_of

__all__ = ["WorkerDigests"]

CHUNK_BYTES: Final = {"cpu": 1 << 20, "cuda": 32 << 20}
"""Bytes of words in work at a time, by type of device, or of one block if that has more.

A processor's cache holds them, and they fill a GPU.
"""


class WorkerDigests:
    """The digests of requests' caches on one worker, with all prepared that no request decides.

    ``memories`` hold the worker's regions. ``divided`` are the axes that workers of either engine
    divide. A tensor is prepared when its group is digested first: its words, its parts, and where
    it is in the memories.

    All work of a request is queued on torch's present stream before the first wait for it. On a GPU
    with Triton it is one launch of :mod:`kvplan_nixl.digest_kernel` for each width of words.
    Otherwise torch adds up, with temporary memory of twice :data:`CHUNK_BYTES`, or nine times one
    block if that is more.

    >>> from kvplan import Group, region_of, view_of
    >>> from kvplan.protocol.digest import mismatch
    >>> from kvplan_nixl.rearrange import memories_of
    >>> def digests(cache, axes, table):
    ...     region = region_of(cache)
    ...     group = Group("attn", cache.shape[axes.split().index("token")])
    ...     view = view_of(cache, axes, name="layers.0", group="attn", region=region)
    ...     worker = Worker("engine", 0, [region], [group], [view])
    ...     return WorkerDigests(worker, memories_of([cache])).of({"attn": Blocks(table)}, (0, 8))
    >>> source = torch.randn(2, 4, 3, 16)  # 2 blocks of 4 tokens, 3 heads
    >>> copied = source[[1, 0]].reshape(1, 8, 3, 16).transpose(1, 2).contiguous()
    >>> expected = digests(source, "block token head dim", [1, 0])
    >>> print(mismatch([expected], [digests(copied, "block head token dim", [0])]))
    None
    >>> copied[0, 2, 5, 7] += 0.001
    >>> error = mismatch([expected], [digests(copied, "block head token dim", [0])])
    >>> error.code, error.action
    ('TRANSFER', 'use layers.0 head 2')
    """

    def __init__(
        self, worker: Worker, memories: Iterable[Memory], *, divided: Iterable[str] = DIVIDED
    ) -> None:
        self._worker = instance(Worker, worker, "worker of digests")
        self._memories = members(Memory, memories, "memories of digests")
        self._divided = members(str, divided, "divided axes")
        self._regions = {region.name: region for region in worker.regions}
        # views of equal geometry share their words, if these are as wide
        self._words_of_geometry: dict[tuple[int, int], ViewWords] = {}
        self._layouts: dict[tuple[ViewWords, ...], PartLayout] = {}
        self._views_of: dict[tuple[str, str], list[tuple[View, int]]] = {}
        for view, geometry_number in zip(worker.views, worker.geometry_of, strict=True):
            views = self._views_of.setdefault((view.group, view.name), [])
            views.append((view, geometry_number))
        self._tensors: dict[tuple[str, str], PlacedTensor] = {}

    def of(
        self, blocks: Mapping[str, Blocks], tokens: Tokens, *, within: Context | None = None
    ) -> dict[str, Any]:
        """Return the digests of a request, as plain values for JSON.

        ``blocks`` and ``tokens`` are as ``bind`` takes them, for the groups to digest; what of a
        block is outside the range does not count. Readers that spread positions over workers
        compare their digests together, or a source makes some for each of their contexts:
        ``within``. Raises what ``bind`` does for its arguments, ``MEMORY`` for a region in none of
        the memories.
        """
        instance(Mapping, blocks, "block tables")
        context = Context() if within is None else instance(Context, within, "within")
        positions = positions_by_group(self._worker, blocks, tokens, context)
        tensors = [self._prepared(*key) for key in self._views_of if key[0] in blocks]
        views = [
            PlacedView(words, address, positions[tensor.group])
            for tensor in tensors
            for words, address in zip(tensor.layout.words, tensor.addresses, strict=True)
        ]
        return to_json(_digests(tensors, _sums(views), positions))

    def _prepared(self, group: str, name: str) -> PlacedTensor:
        key = (group, name)
        if key not in self._tensors:
            words = []
            addresses = []
            for view, geometry_number in self._views_of[key]:
                address = _address(self._memories, self._regions[view.region], view)
                word_bytes = _word_bytes(view, self._divided, address)
                words_key = (geometry_number, word_bytes)
                if words_key not in self._words_of_geometry:
                    made = ViewWords.of(view, self._divided, word_bytes)
                    self._words_of_geometry[words_key] = made
                words.append(self._words_of_geometry[words_key])
                addresses.append(address)
            layout_key = tuple(words)
            if layout_key not in self._layouts:
                self._layouts[layout_key] = PartLayout.of(layout_key)
            layout = self._layouts[layout_key]
            self._tensors[key] = PlacedTensor(name, group, layout, tuple(addresses))
        return self._tensors[key]


def _address(memories: Iterable[Memory], region: Region, view: View) -> MemoryAddress:
    """Return the address at which a view of a region begins."""
    for memory in memories:
        if memory.has(region):
            return MemoryAddress(memory, memory.offset_of(region) + view.offset_bytes)
    raise KVPlanError(
        "MEMORY",
        f"digest region {region.name!r}",
        expected="memory of a tensor that the region lies in",
        got="none",
        region=region.name,
    )


def _word_bytes(view: View, divided: Sequence[str], address: MemoryAddress) -> int:
    """Return the widest word, up to 8 bytes, that the view's elements can be read in.

    It is as wide as several elements where the packed axis is contiguous, or as part of one.
    """
    start = (address.memory.address, address.offset_bytes)
    steps = [axis.stride_bytes for axis in view.axes if axis.extent > 1]
    if view.num_blocks > 1:
        steps.append(view.block_stride_bytes)
    packed = _contiguous_axis(view, divided)
    if packed is None:
        return math.gcd(view.itemsize, *start, *steps)
    # elements along the packed axis may be read together, from its first one on
    steps.remove(view.itemsize)
    bounds = packed.start * view.itemsize, packed.stop * view.itemsize
    return math.gcd(WORD_BYTES, *start, *bounds, *steps)


def _contiguous_axis(view: View, divided: Sequence[str]) -> Axis | None:
    """Return the packed axis of a view, if it is one digit whose elements follow each other."""
    digits = [axis for axis in view.axes if axis.name == packed_axis(view.sizes, divided)]
    if len(digits) == 1 and digits[0].extent > 1 and digits[0].stride_bytes == view.itemsize:
        return digits[0]
    return None


@attrs.frozen(eq=False)
class ViewWords:
    """The words of the blocks of views with equal geometries, and their weights.

    ``extents`` and ``strides_bytes`` have one entry for each dimension of a block, by descending
    stride. The arrays have as many dimensions, of extent 1 where a value does not depend on one:
    ``slots`` the slot of a word, ``weights`` the factor that it is multiplied by, ``parts`` the
    part that it is in, and ``coverage``, in the shape of ``parts``, the sum of rule digest.D5 over
    the other axes.
    """

    num_blocks: int
    block_stride_bytes: int
    word_bytes: int
    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    divided: Mapping[str, int]
    slots: Ints
    weights: Residues
    parts: Ints
    coverage: Residues

    @classmethod
    def of(cls, view: View, divided: Sequence[str], word_bytes: int) -> ViewWords:
        """Return the words of a view that fit its address."""
        order = sorted(view.axes, key=lambda axis: -axis.stride_bytes)
        extents = [axis.extent for axis in order]
        strides = [axis.stride_bytes for axis in order]
        contiguous = _contiguous_axis(view, divided)
        if contiguous is None:
            # one more dimension has the words of an element
            word_dimension = len(order)
            extents.append(view.itemsize // word_bytes)
            strides.append(word_bytes)
        else:
            # the dimension of the packed axis has words instead of elements
            word_dimension = order.index(contiguous)
            extents[word_dimension] = contiguous.extent * view.itemsize // word_bytes
            strides[word_dimension] = word_bytes
        sizes = {axis: size for axis, size in view.sizes.items() if size > 1}
        coordinates = {}
        for axis in (*sizes, TOKEN):
            coordinates[axis] = _coordinates(view, order, axis, len(extents))
        # where each word begins, in bytes: along the packed axis, or else in its element
        packed = packed_axis(sizes, divided)
        word_offsets = np.arange(extents[word_dimension]) * word_bytes
        first_bytes = _along(word_offsets, word_dimension, len(extents))
        if contiguous is not None:
            first_bytes = first_bytes + contiguous.start * view.itemsize
        elif packed is not None:
            first_bytes = first_bytes + coordinates[packed] * view.itemsize
        # rule digest.D2: 8 bytes in a row share the key of the packed axis
        weights = np.uint64(1) << (first_bytes % WORD_BYTES * 8).astype(np.uint64)
        if packed is not None:
            weights = weights * keys(packed, first_bytes // WORD_BYTES)
        parts = np.zeros((1,) * len(extents), np.int64)
        coverage = np.ones(parts.shape, np.uint64)
        divided_sizes = divided_axes(sizes, divided)
        for axis in sorted(sizes.keys() - {TOKEN}):
            axis_keys = keys(axis, coordinates[axis])
            if axis != packed:
                weights = weights * axis_keys
            if axis in divided_sizes:
                # a part has an equal share of the coordinates along each divided axis
                num_parts = parts_of(divided_sizes[axis])
                share = divided_sizes[axis] // num_parts
                parts = parts * num_parts + coordinates[axis] // share
                coverage = coverage * axis_keys
            else:
                coverage = coverage * axis_keys.sum(dtype=np.uint64)
        return cls(
            num_blocks=view.num_blocks,
            block_stride_bytes=view.block_stride_bytes,
            word_bytes=word_bytes,
            extents=tuple(extents),
            strides_bytes=tuple(strides),
            divided=divided_sizes,
            slots=coordinates[TOKEN],
            weights=weights,
            parts=parts,
            coverage=coverage,
        )

    @cached_property
    def table(self) -> WordTable:
        """The words of a block as the kernel takes them."""
        return WordTable.of(self.extents, self.strides_bytes, self.weights, self.slots, self.parts)

    def digests(
        self, address: MemoryAddress, positions: BlockPositions, arrays: DeviceArrays
    ) -> torch.Tensor:
        """Return the sums of a view that begins at an address, in the shape of ``parts``."""
        size = self.word_bytes
        words = address.memory.words(size)
        strides = [stride // size for stride in (self.block_stride_bytes, *self.strides_bytes)]
        shape = (self.num_blocks, *self.extents)
        blocks = words.as_strided(shape, strides, address.offset_bytes // size)
        ids = arrays.on(words.device, positions.ids)
        position_keys = arrays.on(words.device, positions.keys)
        weights = arrays.on(words.device, self.weights)
        slots = arrays.on(words.device, self.slots)
        sums = torch.zeros(self.parts.shape, dtype=torch.int64, device=words.device)
        # words are added up over the dimensions inside slots and parts, and then over slots;
        # dimension 0 of products is that of blocks
        without_parts = [i + 1 for i, extent in enumerate(self.parts.shape) if extent == 1]
        inside_slots = [i for i in without_parts if self.slots.shape[i - 1] == 1]
        bytes_of_block = WORD_BYTES * math.prod(self.extents)
        blocks_at_a_time = max(1, CHUNK_BYTES[words.device.type] // bytes_of_block)
        for first in range(0, ids.numel(), blocks_at_a_time):
            chunk = slice(first, first + blocks_at_a_time)
            products = blocks.index_select(0, ids[chunk])
            if size < WORD_BYTES:
                products = products.to(torch.int64).bitwise_and_((1 << 8 * size) - 1)
            products.mul_(weights)
            if inside_slots:  # without any, torch would add up all
                products = products.sum(inside_slots, keepdim=True)
            slot_keys = position_keys[chunk].index_select(1, slots.reshape(-1))
            products *= slot_keys.view(-1, *slots.shape)
            sums += products.sum([0, *without_parts], keepdim=True)[0]
        return sums


class PlacedView(NamedTuple):
    """The words of a view, where it is in memory, and the blocks of a request in it."""

    words: ViewWords
    address: MemoryAddress
    positions: BlockPositions


def _sums(views: Sequence[PlacedView]) -> Residues:
    """Return the sums of all views, one after another, of each in the order of its parts."""
    if not views:
        return np.empty(0, np.uint64)
    (device,) = {view.address.memory.device for view in views}
    kernel = kernel_on(device)
    sums = _sums_by_torch(views) if kernel is None else _sums_by(kernel, views)
    return np.asarray(sums.cpu().numpy().view(np.uint64))


def _sums_by_torch(views: Sequence[PlacedView]) -> torch.Tensor:
    arrays = DeviceArrays()
    sums = [view.words.digests(view.address, view.positions, arrays) for view in views]
    return torch.cat([each.reshape(-1) for each in sums])


def _sums_by(kernel: DigestKernel, views: Sequence[PlacedView]) -> torch.Tensor:
    work = []
    for words, address, positions in views:
        stride = words.block_stride_bytes
        num_parts = words.parts.size
        work.append(
            ViewWork(words.table, words.word_bytes, address.value, stride, positions, num_parts)
        )
    return kernel.sums(work)


@cache
def kernel_on(device: torch.device) -> DigestKernel | None:
    """Return the kernel of a device, and None where torch adds up.

    It does so on CPUs, without Triton, and where the kernel's sums of a trial are not torch's.
    """
    if not (has_triton and device.type == "cuda"):
        return None
    kernel = DigestKernel(device)
    try:
        is_right = try_out(kernel, device)
    except Exception as error:  # of Triton's compiler, or of CUDA
        logging.getLogger(__name__).warning("digests are computed by torch: %s", error)
        return None
    if not is_right:
        logging.getLogger(__name__).warning("digests are computed by torch: the kernel's differ")
    return kernel if is_right else None


def try_out(kernel: DigestKernel, device: torch.device | str) -> bool:
    """Return whether the sums of a few blocks are those of torch."""
    cells = (torch.arange(2048) ** 2 // 7).to(torch.uint8).to(device).view(8, 4, 4, 16)
    group = Group("trial", 4)
    region = region_of(cells)
    view = view_of(cells, "block token head dim", name="a", group=group.name, region=region)
    (memory,) = memories_of([cells])
    positions = BlockPositions.of(group, Blocks([5, 0, 3]), (1, 11), Context())
    address = MemoryAddress(memory, memory.offset_of(region))
    words = [ViewWords.of(view, DIVIDED, word_bytes) for word_bytes in (8, 1)]
    views = [PlacedView(each, address, positions) for each in words]
    return bool(torch.equal(_sums_by_torch(views), _sums_by(kernel, views)))


class DeviceArrays:
    """Copies of arrays on a device, each made once. Unsigned integers become signed ones."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Any, torch.Tensor]] = {}

    def on(self, device: torch.device, array: Any) -> torch.Tensor:
        """Return an array on a device; all calls are for one device."""
        if id(array) not in self._tensors:
            signed = array.view(np.int64) if array.dtype == np.uint64 else array
            # the array is kept beside its copy, so that no other array gets its id
            self._tensors[id(array)] = (array, torch.tensor(signed, device=device))
        return self._tensors[id(array)][1]


def _along(values: Ints, dimension: int, dimensions: int) -> Ints:
    """Return values along one of several dimensions; the others have extent 1."""
    shape = [1] * dimensions
    shape[dimension] = values.size
    return values.reshape(shape)


def _coordinates(view: View, order: Sequence[Axis], axis: str, dimensions: int) -> Ints:
    """Return the coordinate along a named axis of each element of a block, digits together."""
    coordinates = np.zeros((1,) * dimensions, np.int64)
    finer = 1
    for digit in reversed(view.axes):
        if digit.name == axis:
            steps = np.arange(digit.start, digit.stop, dtype=np.int64) * finer
            # `index` finds the first of two equal digits, which is right: both have extent 1
            coordinates = coordinates + _along(steps, order.index(digit), dimensions)
            finer *= digit.size
    return coordinates


@attrs.frozen(eq=False)
class PartLayout:
    """The parts of a tensor, of which several views may hold boxes, in the order of their sums.

    ``parts`` are their numbers, ascending, and ``coverage`` that of each. ``indices`` has the index
    of the part of each sum, ``None`` where sums are in the order of parts, one for each.
    """

    words: tuple[ViewWords, ...]
    parts: Ints
    coverage: Residues
    indices: Ints | None

    @classmethod
    def of(cls, words: tuple[ViewWords, ...]) -> PartLayout:
        """Return the parts of a tensor whose views have these words."""
        numbers = np.concatenate([each.parts.reshape(-1) for each in words])
        coverages = np.concatenate([each.coverage.reshape(-1) for each in words])
        parts, indices = np.unique(numbers, return_inverse=True)
        coverage = np.zeros(parts.size, np.uint64)
        np.add.at(coverage, indices, coverages)
        is_in_order = np.array_equal(parts, numbers)
        return cls(words, parts, coverage, None if is_in_order else indices)

    def digests(self, sums: Residues) -> Residues:
        """Return the digest of each part: boxes of one part are added up, rule digest.D4."""
        if self.indices is None:
            return sums
        digests = np.zeros(self.parts.size, np.uint64)
        np.add.at(digests, self.indices, sums)
        return digests

    @property
    def num_sums(self) -> int:
        """How many sums there are, of all views."""
        return self.parts.size if self.indices is None else self.indices.size


class PlacedTensor(NamedTuple):
    """A tensor in its group: its parts, and where each of its views is."""

    name: str
    group: str
    layout: PartLayout
    addresses: tuple[MemoryAddress, ...]


def _digests(
    tensors: Sequence[PlacedTensor], sums: Residues, positions: Mapping[str, BlockPositions]
) -> Iterator[TensorDigests]:
    """Yield the digests of each tensor, by the sums of all their views."""
    start = 0
    for name, group, layout, _ in tensors:
        stop = start + layout.num_sums
        digests = layout.digests(sums[start:stop])
        start = stop
        axes = layout.words[0].divided
        held = positions[group].positions
        yield TensorDigests(name, held, axes, layout.parts, layout.coverage, digests)
