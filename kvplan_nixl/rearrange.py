"""Bytes of torch tensors: local copies of staged requests (TorchCopier), and zeros.

Tensors are in main memory or on a GPU. A copy is one operation of torch for each of its origins,
between tensors of the widest word that divides all offsets, whose rows are boxes. Boxes of a
staging buffer mostly follow each other by one stride; then the boxes of the other side are selected
or written by an index in one pass. Where neither side has one stride, boxes are selected and then
written, in main memory some at a time.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
import torch

from kvplan import KVPlanError, Region
from kvplan.plan import Descriptors
from kvplan.staging import Copy, CopySide
from kvplan.support import Ints, having, integers_in, members, wrong_type

__all__ = ["TorchCopier"]

WORDS: Final = {16: "complex128", 8: "int64", 4: "int32", 2: "int16", 1: "uint8"}
"""Types of torch by their bytes. Copies move bits, whatever numbers these would be."""

CHUNK_BYTES: Final = 1 << 18
"""Bytes that a processor collects before it spreads them: its cache holds them."""

STAGING: Final = "staging"
"""The name of the staging region that :func:`~kvplan_nixl.kernel.with_staging` makes."""


class Memory:
    """The storage that a tensor is in."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address: int = storage.data_ptr()
        self.size_bytes: int = storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.device = tensor.device
        self._words: dict[int, torch.Tensor] = {}

    def has(self, region: Region) -> bool:
        """Return whether a region lies in it."""
        return 0 <= self.offset_of(region) <= self.size_bytes - region.size_bytes

    def offset_of(self, region: Region) -> int:
        """Return how far into the storage a region begins, in bytes."""
        return region.address - self.address

    def words(self, size: int) -> torch.Tensor:
        """Return the storage as words of ``size`` bytes, without what is left at its end."""
        if size not in self._words:
            whole = self._bytes[: self.size_bytes // size * size]
            self._words[size] = whole.view(getattr(torch, WORDS[size]))
        return self._words[size]


def memories_of(tensors: Iterable[torch.Tensor]) -> tuple[Memory, ...]:
    """Return the memory of tensors, each storage once."""
    memories = {tensor.untyped_storage().data_ptr(): Memory(tensor) for tensor in tensors}
    return tuple(memories.values())


def set_zero(memories: Iterable[Memory], descriptors: Descriptors) -> None:
    """Set all bytes of descriptors, (n, 3) of address, length and device, to zero.

    Those in no memory stay. Some engines ask for it, with the :func:`~kvplan.tails` of a request
    that has been read: their kernels multiply the slots after a request's last token by 0, and 0
    times NaN is NaN.

    >>> cache = torch.ones(4, 3, dtype=torch.uint8)
    >>> rows = [[cache.data_ptr() + 2, 3, 0], [cache.data_ptr() + 9, 1, 0]]
    >>> set_zero(memories_of([cache]), np.array(rows, np.uint64))
    >>> cache.tolist()
    [[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 1, 1]]
    """
    for memory in memories:
        # one element for each descriptor: where it begins in the storage
        starts = descriptors[:, 0].astype(np.int64) - memory.address
        is_inside = (starts >= 0) & (starts < memory.size_bytes)
        if is_inside.any():
            starts = starts[is_inside]
            stops = starts + descriptors[is_inside, 1].astype(np.int64)
            byte_indices = torch.from_numpy(integers_in(np.stack([starts, stops], axis=1)))
            words = memory.words(1)
            words.index_fill_(0, byte_indices.to(words.device), 0)


class MemoryAddress(NamedTuple):
    """An address in a memory, as bytes from its beginning."""

    memory: Memory
    offset_bytes: int

    @property
    def value(self) -> int:
        """The address as an integer."""
        return self.memory.address + self.offset_bytes


class TorchCopier:
    """The :class:`~kvplan.staging.Copier` of a worker whose regions are tensors, all on one device.

    ``tensors`` has a tensor in the memory of each region, by name: caches, and the staging region.
    In main memory bytes are copied when copies begin. On a GPU copies run on a stream of their own.
    It waits for what is in torch's present stream when copies begin, and no other stream waits for
    it. Begin no copies while a thread captures a CUDA graph; those that are under way are not done
    before the capture of this thread ends. Not for several threads at once.

    Raises ``MEMORY`` for tensors on several devices, and for those without memory.

    >>> import numpy as np
    >>> from kvplan import region_of
    >>> cache, staging = torch.zeros(4, 8, dtype=torch.int16), torch.arange(32, dtype=torch.int16)
    >>> into = CopySide(((region_of(cache, "kv"), 0),), np.array([48, 0]), ())
    >>> out_of = CopySide(((region_of(staging, "staging"), 0),), np.array([0, 16]), ())
    >>> copier = TorchCopier({"kv": cache, "staging": staging})
    >>> copier.done(copier.begin([Copy(into, out_of, (), 16)]))
    True
    >>> cache[:, :4].tolist()
    [[8, 9, 10, 11], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3]]
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(tensors, Mapping):
            raise wrong_type("tensors of a copier", "a mapping of tensors by region", tensors)
        checked = members(torch.Tensor, tensors.values(), "tensors of a copier")
        devices = {tensor.device for tensor in checked}
        if len(devices) != 1:
            raise KVPlanError(
                "MEMORY",
                "rearrange bytes by torch",
                expected="tensors on one device",
                got=" and ".join(sorted(map(str, devices))) or "no tensor",
            )
        (self._device,) = devices
        try:
            self._memories = {name: Memory(tensor) for name, tensor in tensors.items()}
        except RuntimeError as error:  # of a sparse tensor
            raise _refused(error) from None
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def begin(self, copies: Sequence[Copy]) -> Any:
        """Begin copies, and return a ticket for :meth:`done`.

        Raises ``MEMORY`` for a region that no tensor is in, and for what torch refuses.
        """
        if self._stream is None:
            self._copy_all(copies)
            return None
        # copies read what the present stream writes
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                self._copy_all(copies)
            except KVPlanError:
                # nothing is being copied when an error is raised
                self._stream.synchronize()
                raise
            return self._stream.record_event()

    def done(self, ticket: Any) -> bool:
        """Return whether copies are done. Raises ``MEMORY`` if they have failed."""
        if ticket is None:
            return True
        # CUDA allows no query of an event while a graph is captured
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            return False
        try:
            event = having("query", ticket, "ticket of copies", "one that begin returned")
            return bool(event.query())
        except RuntimeError as error:
            raise _refused(error) from None

    def _copy_all(self, copies: Iterable[Copy]) -> None:
        """Carry copies out, or queue them on torch's present stream."""
        try:
            for copy in members(Copy, copies, "copies"):
                self._copy(copy)
        except RuntimeError as error:
            raise _refused(error) from None

    def _copy(self, copy: Copy) -> None:
        """Carry one copy out."""
        destination_rows = BoxRows.of(copy.destination.offsets)
        source_rows = BoxRows.of(copy.source.offsets)
        destination_index = self._on_device(destination_rows.index)
        source_index = self._on_device(source_rows.index)
        destinations, sources = self._boxes(copy, destination_rows, source_rows)
        for destination, source in zip(destinations, sources, strict=True):
            _copy_boxes(destination, destination_index, source, source_index)

    def _on_device(self, index: Ints | None) -> torch.Tensor | None:
        """Return an index on the device of the tensors, if there is one."""
        if index is None:
            return None
        host_index = torch.tensor(index)
        if self._stream is None:
            return host_index
        # torch keeps pinned memory, and uses it again when the copy from it is done
        return host_index.pin_memory().to(self._device, non_blocking=True)

    def _boxes(
        self, copy: Copy, destination_rows: BoxRows, source_rows: BoxRows
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return both sides' boxes behind each origin, as tensors of the widest word that fits."""
        destinations = self._addresses(copy.destination, destination_rows)
        sources = self._addresses(copy.source, source_rows)
        # a word divides whatever leads to a run of bytes, and the run
        steps = [destination_rows.stride_bytes, *copy.destination.strides_bytes]
        steps += [source_rows.stride_bytes, *copy.source.strides_bytes]
        for memory, offset in (*destinations, *sources):
            steps += [memory.address, offset]
        word_bytes = math.gcd(max(WORDS), copy.length_bytes, *steps)
        return (
            _strided(copy, copy.destination, destination_rows, destinations, word_bytes),
            _strided(copy, copy.source, source_rows, sources, word_bytes),
        )

    def _addresses(self, side: CopySide, rows: BoxRows) -> list[MemoryAddress]:
        """Return the first box behind each origin of one side."""
        return [
            self._address(region, offset + rows.offset_bytes) for region, offset in side.origins
        ]

    def _address(self, region: Region, offset: int) -> MemoryAddress:
        """Return the address of an offset of a region."""
        memory = self._memories.get(region.name)
        if memory is None or not memory.has(region):
            raise KVPlanError(
                "MEMORY",
                f"rearrange bytes of region {region.name!r} by torch",
                expected="a tensor in that memory",
                got="none" if memory is None else "one in other memory",
                region=region.name,
            )
        return MemoryAddress(memory, memory.offset_of(region) + offset)


def _strided(
    copy: Copy, side: CopySide, rows: BoxRows, addresses: Iterable[MemoryAddress], word_bytes: int
) -> list[torch.Tensor]:
    """Return the boxes at each address of one side: (rows, extents of the copy, words of a run)."""
    shape = (rows.count, *copy.extents, copy.length_bytes // word_bytes)
    strides = [stride // word_bytes for stride in (rows.stride_bytes, *side.strides_bytes)]
    strides.append(1)
    tensors = list[torch.Tensor]()
    for memory, offset in addresses:
        words = memory.words(word_bytes)
        tensors.append(words.as_strided(shape, strides, offset // word_bytes))
    return tensors


def _copy_boxes(
    destination: torch.Tensor,
    destination_index: torch.Tensor | None,
    source: torch.Tensor,
    source_index: torch.Tensor | None,
) -> None:
    """Copy the indexed boxes of a tensor to those of another one, all where there is no index."""
    if destination_index is not None and source_index is not None:
        at_a_time = len(source_index)
        if source.device.type == "cpu":
            at_a_time = max(1, CHUNK_BYTES // (source[0].numel() * source.element_size()))
        parts = zip(destination_index.split(at_a_time), source_index.split(at_a_time), strict=True)
        for to_rows, from_rows in parts:
            destination.index_copy_(0, to_rows, source.index_select(0, from_rows))
    elif destination_index is not None:
        destination.index_copy_(0, destination_index, source)
    elif source_index is not None:
        torch.index_select(source, 0, source_index, out=destination)
    else:
        destination.copy_(source)


def _refused(error: RuntimeError) -> KVPlanError:
    text = " ".join(str(error).split())
    return KVPlanError(
        "MEMORY",
        "rearrange bytes by torch",
        expected="copies within memory",
        got=f"{text} of torch",
    )


def tensor_at(region: Region) -> torch.Tensor:
    """Return the bytes of a region, whose memory something else keeps."""
    if region.memory == "DRAM":
        array = (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
        return torch.frombuffer(array, dtype=torch.uint8)
    # by this interface torch takes memory of a GPU as it is
    interface = {
        "shape": (region.size_bytes,),
        "typestr": "|u1",
        "data": (region.address, False),
        "version": 3,
    }
    memory = SimpleNamespace(__cuda_array_interface__=interface)
    tensor = torch.as_tensor(memory, device=f"cuda:{region.device_id}")
    if tensor.data_ptr() != region.address:  # torch has copied the bytes to another device
        raise KVPlanError(
            "MEMORY", f"share region {region.name!r}", expected=f"{region.address:#x}", got="a copy"
        )
    return tensor


@attrs.frozen(eq=False)
class BoxRows:
    """Boxes as rows of a strided tensor, one row for each stride.

    They are the rows in ``index``, or all where it is ``None``.
    """

    count: int
    stride_bytes: int
    offset_bytes: int
    index: Ints | None

    @classmethod
    def of(cls, offsets: Ints) -> BoxRows:
        """Return the rows of boxes that begin at these offsets, in this order.

        >>> BoxRows.of(np.array([32, 8, 24]))
        BoxRows(count=4, stride_bytes=8, offset_bytes=8, index=array([3, 0, 2]))
        """
        first = int(offsets.min())
        stride = int(np.gcd.reduce(offsets - first))
        if is_even(offsets):
            return cls(offsets.size, stride, first, None)
        # the tensor has rows that no box begins at, and the index leaves these out
        index = (offsets - first) // stride
        return cls(int(index.max()) + 1, stride, first, index)


def is_even(offsets: Ints) -> bool:
    """Return whether one stride that is not negative leads from each offset to the next.

    >>> is_even(np.array([3, 11, 19])), is_even(np.array([3, 11, 20])), is_even(np.array([19, 11]))
    (True, False, False)
    """
    steps = np.diff(offsets)
    return not steps.size or bool(steps[0] >= 0 and (steps == steps[0]).all())
