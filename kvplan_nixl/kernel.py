"""The copy kernel: one Triton function that moves a request by its plan, and what launches it.

A program moves tiles of :data:`~kvplan.staging.copy_plan.TILE_BYTES`: rows of words, each row a
part of one run. It takes every n-th tile of every entry, n being the number of programs, which is
the limit on how much of a GPU a copy uses beside running requests. Addresses are computed in the
kernel by rules staging.K1 and staging.K2 of :mod:`kvplan.staging.copy_plan`. Triton's interpreter
runs the same function on a CPU, where tests compare its bytes with fake memory; nothing but tests
uses it there.
"""

# Triton reads the annotations of a kernel as values, so this module has no postponed ones.
# Constants of a kernel are written in capitals.
# ruff: noqa: N803, N806
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch

from kvplan import KVPlanError, Worker, region_of
from kvplan.staging import Copier, Copy, CopySide
from kvplan.staging.copy_plan import (
    NO_ENTRIES,
    TILE_BYTES,
    BoundCopy,
    Field,
    Launch,
    PairCopy,
    copy_of_boxes,
)
from kvplan.support import Ints
from kvplan_nixl.rearrange import STAGING, TorchCopier, tensor_at

__all__ = ["KernelCopies"]

NUM_WARPS: Final = 8

MAX_ELEMENTS: Final = 2048
"""Elements of a tile: words below 4 bytes have smaller tiles, so that code stays short."""

PROGRAMS_PER_MULTIPROCESSOR: Final = 4
"""Programs that a copy may use for each multiprocessor. Not measured on a GPU yet."""

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs brings none
    triton = None

has_triton: Final = triton is not None

if has_triton:

    def copy_runs(  # type: ignore[no-untyped-def]
        arrays,
        entries,
        tables,
        num_entries,
        ELEMENT: tl.constexpr,
        PER_WORD: tl.constexpr,
        WIDTH: tl.constexpr,
        ROWS: tl.constexpr,
        INDEX: tl.constexpr,
        HAS_CONTEXT: tl.constexpr,
    ):
        """Move the runs of entries, of which :class:`~kvplan.staging.copy_plan.Field` says how.

        ``PER_WORD`` elements make a word, to which all addresses and lengths are aligned.
        """
        programs = tl.num_programs(0).to(INDEX)
        first_tile = tl.program_id(0).to(INDEX)
        row = tl.arange(0, ROWS)
        column = tl.arange(0, WIDTH)
        ALIGNMENT: tl.constexpr = PER_WORD * (ELEMENT.primitive_bitwidth // 8)
        for number in range(num_entries):
            entry = entries + number * 24
            first = tl.load(entry + 0).to(INDEX)
            count = tl.load(entry + 1).to(INDEX)
            runs = tl.load(entry + 2).to(INDEX)
            elements = tl.multiple_of(tl.load(entry + 3).to(INDEX), PER_WORD)
            num_starts = tl.load(entry + 4).to(INDEX)
            starts = arrays + tl.load(entry + 5)
            period = tl.load(entry + 6).to(INDEX)
            to_slots = tl.load(entry + 10).to(INDEX)
            to_table = tables + tl.load(entry + 11)
            to_terms = arrays + tl.load(entry + 12)
            by_slot = tl.load(entry + 13).to(INDEX)
            to_origins = arrays + tl.load(entry + 14)
            to_step = tl.load(entry + 15)
            from_slots = tl.load(entry + 18).to(INDEX)
            from_table = tables + tl.load(entry + 19)
            from_terms = arrays + tl.load(entry + 20)
            from_origins = arrays + tl.load(entry + 22)
            from_step = tl.load(entry + 23)
            chunks = (elements + (WIDTH - 1)) // WIDTH
            items = runs * count * chunks
            tiles = (items + (ROWS - 1)) // ROWS
            for tile in range(first_tile, tiles, programs):
                item = tile * ROWS + row
                is_item = item < items
                piece = item // chunks
                offset = (item - piece * chunks) * WIDTH
                run = piece // count
                # where the run occurs, rule staging.K1
                occurrence = first + piece - run * count
                turn = occurrence // num_starts
                start = occurrence - turn * num_starts
                position = turn * period + tl.load(starts + start, mask=is_item, other=0).to(INDEX)
                # its block and slot on each side, rule staging.K2
                to_index = position
                from_index = position
                if HAS_CONTEXT:
                    to_cycle = tl.load(entry + 8).to(INDEX)
                    to_interleave = tl.load(entry + 9).to(INDEX)
                    from_cycle = tl.load(entry + 16).to(INDEX)
                    from_interleave = tl.load(entry + 17).to(INDEX)
                    to_index = position // to_cycle * to_interleave + position % to_interleave
                    from_index = (
                        position // from_cycle * from_interleave + position % from_interleave
                    )
                to_ordinal = to_index // to_slots
                from_ordinal = from_index // from_slots
                to_term = tl.where(by_slot != 0, to_index - to_ordinal * to_slots, start)
                from_term = tl.where(by_slot != 0, from_index - from_ordinal * from_slots, start)
                to_block = tl.load(to_table + to_ordinal, mask=is_item, other=-1).to(tl.int64)
                from_block = tl.load(from_table + from_ordinal, mask=is_item, other=-1).to(tl.int64)
                is_listed = is_item & (to_block >= 0)
                to_address = tl.load(to_origins + run, mask=is_listed, other=0)
                to_address += to_block * to_step
                to_address += tl.load(to_terms + to_term, mask=is_listed, other=0)
                from_address = tl.load(from_origins + run, mask=is_listed, other=0)
                from_address += from_block * from_step
                from_address += tl.load(from_terms + from_term, mask=is_listed, other=0)
                to_row = to_address.to(tl.pointer_type(ELEMENT), bitcast=True)
                from_row = from_address.to(tl.pointer_type(ELEMENT), bitcast=True)
                # without these, loads and stores are of single elements
                to_row = tl.multiple_of(to_row, ALIGNMENT)
                from_row = tl.multiple_of(from_row, ALIGNMENT)
                at = offset[:, None] + column[None, :]
                is_inside = is_listed[:, None] & (at < elements)
                words = tl.load(from_row[:, None] + at, mask=is_inside)
                tl.store(to_row[:, None] + at, words, mask=is_inside)
            # the next entry's tiles go on where these end
            first_tile = (first_tile + programs - tiles % programs) % programs

    ELEMENTS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

    @cache
    def compiled() -> Any:
        """Return the kernel for a GPU. Triton compiles it once for each :class:`Launch`."""
        return triton.jit(copy_runs, do_not_specialize=["num_entries"])


def constants(launch: Launch, tile_bytes: int = TILE_BYTES) -> dict[str, Any]:
    """Return what a launch fixes of the kernel."""
    return {
        "ELEMENT": ELEMENTS[launch.element],
        "PER_WORD": launch.word // launch.element,
        "WIDTH": launch.width,
        "ROWS": rows_of(launch, tile_bytes),
        "INDEX": tl.int64 if launch.is_long else tl.int32,
        "HAS_CONTEXT": launch.has_context,
    }


def rows_of(launch: Launch, tile_bytes: int = TILE_BYTES) -> int:
    """Return the rows of a tile. Tiles of narrow words have fewer bytes."""
    elements = min(tile_bytes // launch.element, MAX_ELEMENTS)
    return max(1, elements // launch.width)


class Copies(Protocol):
    """What moves the bytes of a :class:`BoundCopy` on one device."""

    def prepare(self, pair: PairCopy) -> None:
        """Prepare for the copies between two workers. Raises ``MEMORY`` if it cannot."""

    def begin(self, bound: BoundCopy) -> Any:
        """Begin copies, and return a ticket for :meth:`done`."""

    def done(self, ticket: Any) -> bool:
        """Return whether copies are done. Raises ``MEMORY`` if they have failed."""

    def wait(self) -> None:
        """Wait until no copy that has begun touches memory."""


class KernelCopies:
    """Copies by the kernel, on a stream of their own.

    They wait for what is in torch's present stream when they begin, and no other stream waits for
    them. At most ``programs`` programs of 8 warps run at once, by default
    :data:`PROGRAMS_PER_MULTIPROCESSOR` for each multiprocessor of the GPU: a lower number leaves
    more of it to running requests. Not for several threads at once.

    ``kernel`` is the compiled kernel, or Triton's interpreter of it on a CPU, for tests.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        programs: int | None = None,
        tile_bytes: int = TILE_BYTES,
        kernel: Any = None,
    ) -> None:
        self._device = torch.device(device)
        self._tile_bytes = tile_bytes
        self._kernel = compiled() if kernel is None else kernel
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
            properties = torch.cuda.get_device_properties(self._device)
            programs = programs or PROGRAMS_PER_MULTIPROCESSOR * properties.multi_processor_count
        self._programs = programs or 1
        # what the device keeps of each pair of workers
        self._arrays: WeakKeyDictionary[PairCopy, torch.Tensor] = WeakKeyDictionary()

    def prepare(self, pair: PairCopy) -> None:
        """Compile the kernel for all launches of a pair, and put its arrays on the device.

        So no request waits for a compiler, and a device that cannot run the kernel shows it before
        any request. Raises ``MEMORY``.
        """
        nothing = tuple((launch, slice(0, 0)) for launch in pair.launches)
        self.begin(BoundCopy(pair, (), nothing, NO_ENTRIES, np.zeros(1, np.int32)))

    def begin(self, bound: BoundCopy) -> Any:
        """Begin copies, and return a ticket for :meth:`done`."""
        if self._stream is None:
            self._launch(bound)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                self._launch(bound)
            except Exception as error:
                # nothing is being copied when an error is raised
                self.wait()
                raise failed(error) from None
            return self._stream.record_event()

    def _launch(self, bound: BoundCopy) -> None:
        """Launch the kernel once for each kind of launch."""
        arrays = self._arrays.get(bound.pair)
        if arrays is None:
            arrays = self._arrays[bound.pair] = self._on_device(bound.pair.arrays)
        words = self._on_device(bound.message())
        size = bound.numbers.size
        tables = words[size:].view(torch.int32)
        for launch, rows in bound.launches:
            of_launch = bound.numbers[rows]
            tiles = num_tiles(launch, of_launch, rows_of(launch, self._tile_bytes))
            entries = words[rows.start * Field.END : rows.stop * Field.END]
            self._kernel[(max(1, min(tiles, self._programs)),)](
                arrays,
                entries,
                tables,
                len(of_launch),
                **constants(launch, self._tile_bytes),
                num_warps=NUM_WARPS,
            )

    def _on_device(self, array: Ints) -> torch.Tensor:
        host = torch.tensor(array)
        if self._stream is None:
            return host
        # torch keeps pinned memory, and uses it again when the copy from it is done
        return host.pin_memory().to(self._device, non_blocking=True)

    def done(self, ticket: Any) -> bool:
        """Return whether copies are done. Raises ``MEMORY`` if they have failed."""
        if ticket is None:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            return bool(ticket.query())
        except RuntimeError as error:
            raise failed(error) from None

    def wait(self) -> None:
        """Wait until no copy that has begun touches memory."""
        if self._stream is not None:
            with suppress(RuntimeError):  # of a copy that has failed, which touches none
                self._stream.synchronize()


class TorchCopies:
    """The same copies by torch's operations, for devices without Triton: one or two for each run.

    ``tensors`` has the memory of all regions of both sides, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._copier = TorchCopier(tensors)
        self._last: Any = None

    def prepare(self, pair: PairCopy) -> None:
        """Do nothing: torch compiles nothing."""

    def begin(self, bound: BoundCopy) -> Any:
        """Begin copies, and return a ticket for :meth:`done`."""
        self._last = self._copier.begin(list(bound.copies()))
        return self._last

    def done(self, ticket: Any) -> bool:
        """Return whether copies are done. Raises ``MEMORY`` if they have failed."""
        return self._copier.done(ticket)

    def wait(self) -> None:
        """Wait until no copy that has begun touches memory."""
        if self._last is not None:
            with suppress(RuntimeError):
                self._last.synchronize()


class KernelCopier:
    """The :class:`~kvplan.staging.Copier` of a worker on a GPU: a chunk's copies in a few launches.

    ``tensors`` has the memory of each region, which this object keeps.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], copies: KernelCopies) -> None:
        self._tensors = tensors
        self._copies = copies

    def begin(self, copies: Sequence[Copy]) -> Any:
        """Begin copies, and return a ticket for :meth:`done`. Raises ``MEMORY``."""
        return self._copies.begin(copy_of_boxes(copies))

    def done(self, ticket: Any) -> bool:
        """Return whether copies are done. Raises ``MEMORY`` if they have failed."""
        return self._copies.done(ticket)


def copier_of(tensors: Mapping[str, torch.Tensor]) -> Copier:
    """Return what carries a worker's local copies out, given the memory of each of its regions.

    On a GPU it is the kernel, if Triton is there and :func:`try_out` finds its bytes right,
    otherwise torch. Raises what :class:`~kvplan_nixl.rearrange.TorchCopier` does.
    """
    by_torch = TorchCopier(tensors)
    device = next(iter(tensors.values())).device
    if not (has_triton and device.type == "cuda"):
        return by_torch
    copies = KernelCopies(device)
    try:
        try_out(copies, device)
    except KVPlanError as error:
        logging.getLogger(__name__).warning("staged reads are copied by torch: %s", error)
        return by_torch
    return KernelCopier(tensors, copies)


def try_out(copies: KernelCopies, device: torch.device | str) -> None:
    """Copy some runs of wide and of narrow words. Raises ``MEMORY`` if a byte is wrong.

    So a device on which the kernel fails shows it before any request.
    """
    source = torch.arange(4096, dtype=torch.int32).to(torch.uint8)
    memory = [source.to(device), torch.zeros_like(source, device=device)]
    regions = [region_of(tensor) for tensor in memory]
    offsets = (0, 1024), (1024, 0)  # of two boxes, at the source and at the destination
    for length in (64, 3):
        sides = [
            CopySide(((region, 0),), np.array(each), (stride,))
            for region, each, stride in zip(regions, offsets, (128, 256), strict=True)
        ]
        ticket = copies.begin(copy_of_boxes([Copy(sides[1], sides[0], (4,), length)]))
        while not copies.done(ticket):
            pass
        expected = torch.zeros_like(source)
        for read, write in zip(*offsets, strict=True):
            for run in range(4):
                start, stop = read + 128 * run, read + 128 * run + length
                expected[write + 256 * run :][:length] = source[start:stop]
        if not torch.equal(memory[1].cpu(), expected):
            raise failed(RuntimeError(f"wrong bytes in runs of {length}"))
        memory[1].zero_()


def with_staging(worker: Worker, num_bytes: int) -> tuple[Worker, Copier | None]:
    """Return a worker with a staging region on its device, and the copier between its regions.

    Where ``num_bytes`` is 0, return the worker itself, and no copier. The copier keeps the staging
    memory, but not the worker's own regions.

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
    return attrs.evolve(worker, regions=regions), copier_of(tensors)


def num_tiles(launch: Launch, numbers: Ints, rows: int) -> int:
    """Return the tiles of all entries of a launch."""
    chunks = -(-numbers[:, Field.ELEMENTS] // launch.width)
    items = numbers[:, Field.RUNS] * numbers[:, Field.COUNT] * chunks
    return int((-(-items // rows)).sum())


def failed(error: Exception) -> KVPlanError:
    """Return the error of copies that have failed on their device."""
    text = " ".join(str(error).split())
    return KVPlanError(
        "MEMORY",
        "copy by a kernel",
        expected="copies within memory",
        got=f"{type(error).__name__}: {text}",
    )
