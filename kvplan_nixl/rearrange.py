"""TorchCopier: puts staged bytes in order by torch, in main memory or on a GPU.

A copy is an operation of torch for each of its origins, or a few, whatever the request: between tensors of the widest
word that divides all offsets, whose rows are boxes. Where boxes of one side follow each other by a stride, as they
mostly do in a staging region, the other side's are selected or written by an index in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from kvplan._arrays import Ints
from kvplan.describe.views import Region
from kvplan.errors import KVPlanError
from kvplan.staging.rearrange import Copy
from kvplan.staging.spacing import Rows, paired

WORDS: Final = {16: "complex128", 8: "int64", 4: "int32", 2: "int16", 1: "uint8"}
"""Types of torch by their bytes. What is copied is bits, whatever numbers they would be."""


class Memory:
    """All of the storage that a tensor is in."""

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
        """Its words of so many bytes."""
        if size not in self._words:
            whole = self._bytes[: self.size_bytes // size * size]
            self._words[size] = whole.view(getattr(torch, WORDS[size]))
        return self._words[size]


class TorchCopier:
    """The :class:`~kvplan.staging.pipeline.Copier` of a worker whose regions are tensors, all on one device.

    ``tensors`` has for each region, by name, a tensor in its memory: caches, and the staging region. In main memory
    bytes are copied when copies begin. On a GPU copies run on a stream of their own, for which no other stream waits.

    Raises ``MEMORY`` for tensors on several devices.

    >>> import numpy as np
    >>> from kvplan import region_of
    >>> from kvplan.staging.rearrange import Side
    >>> cache, staging = torch.zeros(4, 8, dtype=torch.int16), torch.arange(32, dtype=torch.int16)
    >>> into, out_of = (Side(((region_of(tensor, name), 0),), (4,), (16,), (np.array(blocks),), ())
    ...                 for tensor, name, blocks in ((cache, "kv", [3, 0]), (staging, "staging", [0, 1])))
    >>> copier = TorchCopier({"kv": cache, "staging": staging})
    >>> copier.done(copier.begin([Copy(into, out_of, (), 16)]))
    True
    >>> cache[:, :4].tolist()
    [[8, 9, 10, 11], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3]]
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) != 1:
            raise KVPlanError(
                "MEMORY",
                "put bytes in order by torch",
                expected="tensors on one device",
                got=" and ".join(sorted(map(str, devices))) or "no tensor",
            )
        (self._device,) = devices
        self._memories = {name: Memory(tensor) for name, tensor in tensors.items()}
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def begin(self, copies: Sequence[Copy]) -> Any:
        """Begin copies. Raises ``MEMORY`` for a region that no tensor is in, and for what torch refuses."""
        if self._stream is None:
            return self._checked(copies)
        with torch.cuda.stream(self._stream):
            try:
                self._checked(copies)
            except KVPlanError:
                self._stream.synchronize()
                raise
            return self._stream.record_event()

    def done(self, ticket: Any) -> bool:
        """Whether copies are done. Raises ``MEMORY`` where they have failed."""
        try:
            return ticket is None or bool(ticket.query())
        except RuntimeError as error:
            raise _refused(error) from None

    def _checked(self, copies: Iterable[Copy]) -> None:
        try:
            for copy in copies:
                self._copy(copy)
        except RuntimeError as error:
            raise _refused(error) from None

    def _copy(self, copy: Copy) -> None:
        for rows in paired(copy.destination.offsets, copy.source.offsets):
            into, out_of = (self._tensor(side.index) for side in rows)
            for written, read in zip(*self._strided(copy, rows), strict=True):
                if into is not None:
                    written.index_copy_(0, into, read if out_of is None else read.index_select(0, out_of))
                elif out_of is not None:
                    torch.index_select(read, 0, out_of, out=written)
                else:
                    written.copy_(read)

    def _tensor(self, index: Ints | None) -> torch.Tensor | None:
        if index is None:
            return None
        made = torch.tensor(index)
        return made if self._stream is None else made.pin_memory().to(self._device, non_blocking=True)

    def _strided(self, copy: Copy, rows: tuple[Rows, Rows]) -> list[list[torch.Tensor]]:
        """Both sides' boxes, from each origin on, as tensors of the widest word that fits all."""
        sides = copy.destination, copy.source
        places = [
            [self._place(region, offset + row.offset_bytes) for region, offset in side.origins]
            for side, row in zip(sides, rows, strict=True)
        ]
        strides = [(row.stride_bytes, *side.inner_bytes) for side, row in zip(sides, rows, strict=True)]
        numbers = [number for found in places for memory, at in found for number in (memory.address, at)]
        word = math.gcd(max(WORDS), copy.length_bytes, *strides[0], *strides[1], *numbers)
        shape = *copy.extents, copy.length_bytes // word
        return [
            [
                memory.words(word).as_strided((row.count, *shape), (*[each // word for each in stride], 1), at // word)
                for memory, at in found
            ]
            for found, row, stride in zip(places, rows, strides, strict=True)
        ]

    def _place(self, region: Region, offset: int) -> tuple[Memory, int]:
        """The memory that a region is in, and how far into that an offset of it lies."""
        memory = self._memories.get(region.name)
        if memory is None or not memory.has(region):
            raise KVPlanError(
                "MEMORY",
                f"put bytes of region {region.name!r} in order by torch",
                expected="a tensor in that memory",
                got="none" if memory is None else "one in other memory",
                region=region.name,
            )
        return memory, region.address - memory.address + offset


def _refused(error: RuntimeError) -> KVPlanError:
    said = " ".join(str(error).split())
    return KVPlanError("MEMORY", "put bytes in order by torch", expected="copies within memory", got=f"{said} of torch")
