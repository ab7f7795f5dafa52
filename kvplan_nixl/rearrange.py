"""TorchCopier: puts staged bytes in order by torch, in main memory or on a GPU.

A copy is a few operations of torch, whatever the request: tensors of the widest word that divides all offsets, strided
over the copy's boxes. Which boxes those are is said by index tensors, or by strides alone where boxes are evenly apart,
as they mostly are in a staging region. That takes half the time, since nothing is gathered before it is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from kvplan.axes import Ints
from kvplan.errors import KVPlanError
from kvplan.rearrange import Copy, Side
from kvplan.spacing import grid, tables
from kvplan.views import Region

WORDS: Final = {16: "complex128", 8: "int64", 4: "int32", 2: "int16", 1: "uint8"}
"""Types of torch by their bytes. What is copied is bits, whatever numbers they would be."""


@attrs.frozen(eq=False)
class Boxes:
    """Boxes that are evenly apart along each dimension: those that ``index`` says, or all where it is empty."""

    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    offset_bytes: int = 0
    index: tuple[torch.Tensor, ...] = ()


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
        known: dict[Any, list[tuple[Boxes, Boxes]]] = {}
        for copy in copies:
            # copies between several layers have their indices in common
            sides = copy.destination, copy.source
            key = tuple((*map(id, side.index), *side.shape, *side.strides_bytes) for side in sides)
            if key not in known:
                known[key] = list(self._parts(*sides))
            for into, out_of in known[key]:
                written, read = self._strided(copy, (into, out_of))
                if out_of.index:
                    read = read[out_of.index]
                if into.index:
                    written[into.index] = read
                else:
                    written.copy_(read)

    def _parts(self, destination: Side, source: Side) -> Iterator[tuple[Boxes, Boxes]]:
        """The entries of a copy, as tables of boxes that are evenly apart on the source's side, if they can be."""
        into, out_of = destination.offsets, source.offsets
        for entries in tables(out_of):
            yield self._boxes(destination, into, entries), self._boxes(source, out_of, entries)

    def _boxes(self, side: Side, at: Ints, entries: Ints) -> Boxes:
        even = grid(at[entries])
        if even is not None:
            return Boxes(even.shape, even.strides_bytes, even.offset_bytes)
        several = [i for i, extent in enumerate(side.shape) if extent > 1]
        return Boxes(
            tuple([side.shape[i] for i in several]),
            tuple([side.strides_bytes[i] for i in several]),
            index=tuple([self._tensor(side.index[i][entries]) for i in several]),
        )

    def _tensor(self, index: Ints) -> torch.Tensor:
        made = torch.tensor(index)
        return made if self._stream is None else made.pin_memory().to(self._device, non_blocking=True)

    def _strided(self, copy: Copy, boxes: tuple[Boxes, Boxes]) -> list[torch.Tensor]:
        """Both sides' boxes as tensors of the widest word that fits."""
        found = [
            (
                self._memory(side.region),
                (*box.shape, *copy.extents),
                (*box.strides_bytes, *side.inner_bytes),
                side.region.address + side.offset_bytes + box.offset_bytes,
            )
            for side, box in zip((copy.destination, copy.source), boxes, strict=True)
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
