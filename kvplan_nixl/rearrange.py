"""Bytes of torch tensors, in main memory or on a GPU: local copies of staged requests (TorchCopier), and zeros.

A copy is one operation of torch for each of its origins, or a few, whatever the request: between tensors of the widest
word that divides all offsets, whose rows are boxes. Boxes of a staging buffer mostly follow each other by one stride;
then the boxes of the other side are selected or written by an index in one pass.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import attrs
import numpy as np
import torch

from kvplan._arrays import Ints, listed
from kvplan._checks import having, members, wrong_type
from kvplan.describe import Region, Worker, region_of
from kvplan.errors import KVPlanError
from kvplan.plan.rows import Descriptors
from kvplan.staging import Copy

WORDS: Final = {16: "complex128", 8: "int64", 4: "int32", 2: "int16", 1: "uint8"}
"""Types of torch by their bytes. Copies move bits, whatever numbers these would be."""

MAX_STRIPS: Final = 4
"""The most strips that a table of offsets is cut into; beyond that one list of indices takes fewer launches."""

STAGING: Final = "staging"
"""The name of the staging region that :func:`with_staging` makes."""


class Memory:
    """The storage that a tensor is in."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address: int = storage.data_ptr()
        self.size_bytes: int = storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._words: dict[int, torch.Tensor] = {}

    def has(self, region: Region) -> bool:
        """Whether a region lies in it."""
        return 0 <= region.address - self.address <= self.size_bytes - region.size_bytes

    def words(self, size: int) -> torch.Tensor:
        """The storage as words of ``size`` bytes."""
        if size not in self._words:
            whole = self._bytes[: self.size_bytes // size * size]
            self._words[size] = whole.view(getattr(torch, WORDS[size]))
        return self._words[size]


def memories_of(tensors: Iterable[torch.Tensor]) -> tuple[Memory, ...]:
    """The memory of tensors, each storage once."""
    return tuple(
        {tensor.untyped_storage().data_ptr(): Memory(tensor) for tensor in tensors}.values()
    )


def set_zero(memories: Iterable[Memory], descriptors: Descriptors) -> None:
    """Set all bytes of descriptors, (n, 3) of address, length and device, to zero. Those in no memory stay.

    Some engines ask for it, with the :func:`~kvplan.tails` of a request that has been read: their kernels multiply the
    slots after a request's last token by 0, and 0 times NaN is NaN.

    >>> cache = torch.ones(4, 3, dtype=torch.uint8)
    >>> rows = [[cache.data_ptr() + 2, 3, 0], [cache.data_ptr() + 9, 1, 0]]
    >>> set_zero(memories_of([cache]), np.array(rows, np.uint64))
    >>> cache.tolist()
    [[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 1, 1]]
    """
    for memory in memories:
        start = descriptors[:, 0].astype(np.int64) - memory.address
        inside = (start >= 0) & (start < memory.size_bytes)
        if inside.any():
            stop = start[inside] + descriptors[inside, 1].astype(np.int64)
            index = listed(np.stack([start[inside], stop], axis=1))  # of each byte in the storage
            words = memory.words(1)
            words.index_fill_(0, torch.from_numpy(index).to(words.device), 0)


class TorchCopier:
    """The :class:`~kvplan.staging.Copier` of a worker whose regions are tensors, all on one device.

    ``tensors`` has a tensor in the memory of each region, by name: caches, and the staging region. In main memory
    bytes are copied when copies begin. On a GPU copies run on a stream of their own. It waits for what is in torch's
    present stream when copies begin, and no other stream waits for it. Begin no copies while a thread captures a CUDA
    graph; those that are under way are not done before the capture of this thread ends. Not for several threads at
    once.

    Raises ``MEMORY`` for tensors on several devices, and for those without memory.

    >>> import numpy as np
    >>> from kvplan import region_of
    >>> from kvplan.staging.copies import CopySide
    >>> cache, staging = torch.zeros(4, 8, dtype=torch.int16), torch.arange(32, dtype=torch.int16)
    >>> into, out_of = (CopySide(((region_of(tensor, name), 0),), np.array(offsets), ())
    ...                 for tensor, name, offsets in ((cache, "kv", [48, 0]), (staging, "staging", [0, 16])))
    >>> copier = TorchCopier({"kv": cache, "staging": staging})
    >>> copier.done(copier.begin([Copy(into, out_of, (), 16)]))
    True
    >>> cache[:, :4].tolist()
    [[8, 9, 10, 11], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3]]
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(tensors, Mapping):
            raise wrong_type("tensors of a copier", "a mapping of tensors by region", tensors)
        devices = {
            tensor.device
            for tensor in members(torch.Tensor, tensors.values(), "tensors of a copier")
        }
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
        """Begin copies. Raises ``MEMORY`` for a region that no tensor is in, and for what torch refuses."""
        if self._stream is None:
            return self._checked(copies)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                self._checked(copies)
            except KVPlanError:
                self._stream.synchronize()
                raise
            return self._stream.record_event()

    def done(self, ticket: Any) -> bool:
        """Whether copies are done. Raises ``MEMORY`` where they have failed."""
        if ticket is None:
            return True
        if (
            self._stream is not None and torch.cuda.is_current_stream_capturing()
        ):  # CUDA allows no query of an event meanwhile
            return False
        try:
            return bool(
                having("query", ticket, "ticket of copies", "one that begin returned").query()
            )
        except RuntimeError as error:
            raise _refused(error) from None

    def _checked(self, copies: Iterable[Copy]) -> None:
        try:
            for copy in members(Copy, copies, "copies"):
                self._copy(copy)
        except RuntimeError as error:
            raise _refused(error) from None

    def _copy(self, copy: Copy) -> None:
        for rows in paired(copy.destination.offsets, copy.source.offsets):
            into, out_of = (self._tensor(side.index) for side in rows)
            for written, read in zip(*self._strided(copy, rows), strict=True):
                if into is not None:
                    written.index_copy_(
                        0, into, read if out_of is None else read.index_select(0, out_of)
                    )
                elif out_of is not None:
                    torch.index_select(read, 0, out_of, out=written)
                else:
                    written.copy_(read)

    def _tensor(self, index: Ints | None) -> torch.Tensor | None:
        if index is None:
            return None
        made = torch.tensor(
            index
        )  # torch keeps pinned memory, and uses it again when the copy from it is done
        return (
            made if self._stream is None else made.pin_memory().to(self._device, non_blocking=True)
        )

    def _strided(self, copy: Copy, rows: tuple[BoxRows, BoxRows]) -> list[list[torch.Tensor]]:
        """Both sides' boxes, from each origin on, as tensors of the widest word that fits all."""
        sides = copy.destination, copy.source
        places = [
            [self._place(region, offset + row.offset_bytes) for region, offset in side.origins]
            for side, row in zip(sides, rows, strict=True)
        ]
        strides = [
            (row.stride_bytes, *side.strides_bytes) for side, row in zip(sides, rows, strict=True)
        ]
        numbers = [
            number for found in places for memory, at in found for number in (memory.address, at)
        ]
        word = math.gcd(max(WORDS), copy.length_bytes, *strides[0], *strides[1], *numbers)
        shape = *copy.extents, copy.length_bytes // word
        return [
            [
                memory.words(word).as_strided(
                    (row.count, *shape), (*[each // word for each in stride], 1), at // word
                )
                for memory, at in found
            ]
            for found, row, stride in zip(places, rows, strides, strict=True)
        ]

    def _place(self, region: Region, offset: int) -> tuple[Memory, int]:
        """The memory that a region is in, and how far into it an offset of the region lies."""
        memory = self._memories.get(region.name)
        if memory is None or not memory.has(region):
            raise KVPlanError(
                "MEMORY",
                f"rearrange bytes of region {region.name!r} by torch",
                expected="a tensor in that memory",
                got="none" if memory is None else "one in other memory",
                region=region.name,
            )
        return memory, region.address - memory.address + offset


def _refused(error: RuntimeError) -> KVPlanError:
    text = " ".join(str(error).split())
    return KVPlanError(
        "MEMORY",
        "rearrange bytes by torch",
        expected="copies within memory",
        got=f"{text} of torch",
    )


def with_staging(worker: Worker, num_bytes: int) -> tuple[Worker, TorchCopier | None]:
    """A worker with a staging region of so many bytes on its device, and the copier between its regions, if any.

    The copier keeps the staging memory, but not the worker's own regions.

    >>> cache = torch.arange(32, dtype=torch.uint8)
    >>> worker, copier = with_staging(Worker("decode", 0, [region_of(cache)], [], []), 1 << 20)
    >>> [(region.name, region.size_bytes) for region in worker.regions]
    [('kv', 32), ('staging', 1048576)]
    """
    if not num_bytes:
        return worker, None
    tensors = {region.name: tensor_at(region) for region in worker.regions}
    device = next(iter(tensors.values())).device
    tensors[STAGING] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    regions = (*worker.regions, region_of(tensors[STAGING], STAGING))
    return attrs.evolve(worker, regions=regions), TorchCopier(tensors)


def tensor_at(region: Region) -> torch.Tensor:
    """The bytes of a region, whose memory something else keeps."""
    if region.memory == "DRAM":
        return torch.frombuffer(
            (ctypes.c_uint8 * region.size_bytes).from_address(region.address), dtype=torch.uint8
        )
    shared = {
        "shape": (region.size_bytes,),
        "typestr": "|u1",
        "data": (region.address, False),
        "version": 3,
    }
    found = torch.as_tensor(
        SimpleNamespace(__cuda_array_interface__=shared), device=f"cuda:{region.device_id}"
    )
    if found.data_ptr() != region.address:  # torch has copied the bytes to another device
        raise KVPlanError(
            "MEMORY", f"share region {region.name!r}", expected=f"{region.address:#x}", got="a copy"
        )
    return found


@attrs.frozen(eq=False)
class BoxRows:
    """Boxes as rows of a strided tensor, one row for each stride: those in ``index``, or all where it is ``None``."""

    count: int
    stride_bytes: int
    offset_bytes: int
    index: Ints | None

    @classmethod
    def of(cls, at: Ints) -> BoxRows:
        """Boxes that begin at these offsets, in this order.

        >>> BoxRows.of(np.array([32, 8, 24]))
        BoxRows(count=4, stride_bytes=8, offset_bytes=8, index=array([3, 0, 2]))
        """
        first = int(at.min())
        stride = int(np.gcd.reduce(at - first))
        if is_even(at):
            return cls(at.size, stride, first, None)
        index = (at - first) // stride
        return cls(int(index.max()) + 1, stride, first, index)


def paired(into: Ints, out_of: Ints) -> list[tuple[BoxRows, BoxRows]]:
    """The boxes of both sides, in as few parts as have no index on at least one side.

    >>> [(there.index, here.index) for there, here in paired(np.array([32, 8, 24]), np.array([0, 4, 8]))]
    [(array([3, 0, 2]), None)]
    """
    parts = min(
        (list(strips(at)) for at in (into, out_of)),
        key=lambda parts: (
            sum(not (is_even(into[part]) or is_even(out_of[part])) for part in parts),
            len(parts),
        ),
    )
    return [(BoxRows.of(into[part]), BoxRows.of(out_of[part])) for part in parts]


def is_even(at: Ints) -> bool:
    """Whether one stride that is not negative leads from each offset to the next.

    >>> is_even(np.array([3, 11, 19])), is_even(np.array([3, 11, 20])), is_even(np.array([19, 11, 3]))
    (True, False, False)
    """
    steps = np.diff(at)
    return not steps.size or bool(steps[0] >= 0 and (steps == steps[0]).all())


def strips(at: Ints) -> Iterator[Ints]:
    """The indices of a list of offsets, in strips of one stride where a table has few, otherwise table by table.

    >>> [part.tolist() for part in strips(np.array([103, 111, 119, 203, 211, 219, 303]))]
    [[0, 1, 2], [3, 4, 5], [6]]
    """
    for table in tables(at):
        fewer = min(table, table.T, key=len)
        yield from fewer if len(fewer) <= MAX_STRIPS else [table.reshape(-1)]


def tables(at: Ints) -> Iterator[Ints]:
    """The indices of a list of offsets, as tables whose rows have one stride, and whose columns have one.

    A few offsets may come before the first row, as where a request begins within a block; the last table has those
    that follow no stride.

    >>> [part.tolist() for part in tables(np.array([103, 111, 203, 211, 303]))]
    [[[0, 1], [2, 3]], [[4]]]
    """
    numbers, start = np.arange(at.size), 0
    while start < at.size:
        rest = at[start:]
        # second differences: the first one that is not 0 is where the stride changes, at the end of a row
        turns = np.flatnonzero(np.diff(rest, 2))
        columns = int(turns[0]) + 2 if turns.size else rest.size
        rows = _even_rows(rest[: rest.size // columns * columns].reshape(-1, columns))
        if 2 * rows * columns < rest.size:
            rows, columns = 1, rest.size if start else columns
        stop = start + rows * columns
        yield numbers[start:stop].reshape(rows, columns)
        start = stop


def _even_rows(table: Ints) -> int:
    """How many rows, from the first on, are at the same distance from the one before."""
    step = table[min(1, len(table) - 1), 0] - table[0, 0]
    uneven = np.flatnonzero(
        (table != np.add.outer(np.arange(len(table)) * step, table[0])).any(axis=1)
    )
    return int(uneven[0]) if uneven.size else len(table)
