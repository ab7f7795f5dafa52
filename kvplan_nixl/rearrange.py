"""TorchCopier: puts staged bytes in order by torch, in main memory or on a GPU.

A copy is a few operations of torch, whatever the request: between tensors of the widest word that divides all offsets,
whose rows are boxes. Where boxes of one side follow each other by a stride, as they mostly do in a staging region, the
other side's are selected or written by an index in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from kvplan.axes import Ints
from kvplan.errors import KVPlanError
from kvplan.rearrange import Copy
from kvplan.spacing import even, strips
from kvplan.views import Region

WORDS: Final = {16: "complex128", 8: "int64", 4: "int32", 2: "int16", 1: "uint8"}
"""Types of torch by their bytes. What is copied is bits, whatever numbers they would be."""


@attrs.frozen(eq=False)
class Rows:
    """Boxes of a side, one for each stride: those that ``index`` says, or all in a row where it is ``None``."""

    count: int
    stride_bytes: int
    offset_bytes: int
    index: torch.Tensor | None


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
    """The :class:`~kvplan.pipeline.Copier` of a worker whose regions are tensors, all on one device.

    ``tensors`` has for each region, by name, a tensor in its memory: caches, and the staging region. In main memory
    bytes are copied when copies begin. On a GPU copies run on a stream of their own, for which no other stream waits.

    Raises ``MEMORY`` for tensors on several devices.

    >>> import numpy as np
    >>> from kvplan import region_of
    >>> from kvplan.rearrange import Side
    >>> cache, staging = torch.zeros(4, 8, dtype=torch.int16), torch.arange(32, dtype=torch.int16)
    >>> into, out_of = (Side(region_of(tensor, name), 0, (4,), (16,), (np.array(blocks),), ())
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

    def _checked(self, copies: Sequence[Copy]) -> None:
        try:
            self._copy(copies)
        except RuntimeError as error:
            raise _refused(error) from None

    def _copy(self, copies: Sequence[Copy]) -> None:
        known: dict[Any, list[tuple[Rows, Rows]]] = {}
        for copy in copies:
            # copies between several layers have their indices in common
            sides = copy.destination, copy.source
            key = tuple((*map(id, side.index), *side.strides_bytes) for side in sides)
            if key not in known:
                known[key] = list(self._parts(*(side.offsets for side in sides)))
            for into, out_of in known[key]:
                written, read = self._strided(copy, (into, out_of))
                if into.index is not None:
                    read = read if out_of.index is None else read.index_select(0, out_of.index)
                    written.index_copy_(0, into.index, read)
                elif out_of.index is not None:
                    torch.index_select(read, 0, out_of.index, out=written)
                else:
                    written.copy_(read)

    def _parts(self, into: Ints, out_of: Ints) -> Iterator[tuple[Rows, Rows]]:
        """The boxes of a copy, as few times as they can be copied without indices on at least one side."""
        parts = min(
            (list(strips(at)) for at in (into, out_of)),
            key=lambda parts: (sum(not (even(into[part]) or even(out_of[part])) for part in parts), len(parts)),
        )
        for part in parts:
            yield self._rows(into[part]), self._rows(out_of[part])

    def _rows(self, at: Ints) -> Rows:
        """Boxes that begin at these offsets, in this order."""
        first = int(at.min())
        stride = int(np.gcd.reduce(at - first))
        if even(at):
            return Rows(at.size, stride, first, None)
        index = (at - first) // stride
        return Rows(int(index.max()) + 1, stride, first, self._tensor(index))

    def _tensor(self, index: Ints) -> torch.Tensor:
        made = torch.tensor(index)
        return made if self._stream is None else made.pin_memory().to(self._device, non_blocking=True)

    def _strided(self, copy: Copy, rows: tuple[Rows, Rows]) -> list[torch.Tensor]:
        """Both sides' boxes as tensors of the widest word that fits."""
        found = [
            (
                self._memory(side.region),
                (row.count, *copy.extents),
                (row.stride_bytes, *side.inner_bytes),
                side.region.address + side.offset_bytes + row.offset_bytes,
            )
            for side, row in zip((copy.destination, copy.source), rows, strict=True)
        ]
        numbers = [number for memory, _, strides, at in found for number in (*strides, at, memory.address)]
        word = math.gcd(max(WORDS), copy.length_bytes, *numbers)
        return [
            memory.words(word).as_strided(
                (*shape, copy.length_bytes // word),
                (*[stride // word for stride in strides], 1),
                (at - memory.address) // word,
            )
            for memory, shape, strides, at in found
        ]

    def _memory(self, region: Region) -> Memory:
        """The memory that a region is in."""
        memory = self._memories.get(region.name)
        if memory is None or not memory.has(region):
            raise KVPlanError(
                "MEMORY",
                f"put bytes of region {region.name!r} in order by torch",
                expected="a tensor in that memory",
                got="none" if memory is None else "one in other memory",
                region=region.name,
            )
        return memory


def _refused(error: RuntimeError) -> KVPlanError:
    said = " ".join(str(error).split())
    return KVPlanError("MEMORY", "put bytes in order by torch", expected="copies within memory", got=f"{said} of torch")
