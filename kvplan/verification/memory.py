"""FakeMemory: arenas at the workers' own addresses, to carry out a plan on one machine with no network.

Addresses are virtual, and memory is taken only where it is touched. There is a *cell* for each byte address: cells
of one byte hold data, wider cells hold a label that tells every byte of a request from every other.

Rules of a copy, all checked before a cell changes:

- X1: both sides list equally many ranges, of equal lengths in order.
- X2: a range has at least one byte and lies in one region of its worker and device, without wrapping at 2**64.
- X3: each copy adds to the record of what was read and written, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvplan._checks import integer
from kvplan.describe.views import View
from kvplan.describe.worker import Key, Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.verification.arenas import Arenas, Cells, Ints, Words

if TYPE_CHECKING:
    from kvplan.plan.specs import ReadSpec

LABEL_BYTES: Final = (1, 2, 4, 8)
CHUNK_CELLS: Final = 1 << 22
"""A copy holds at most this many cells outside the arenas."""


def expand(rows: npt.ArrayLike, ids: npt.ArrayLike) -> Words:
    """The ranges that descriptor ``ids`` name in ``rows``: (n, 3) uint64 of address, length, device.

    ``rows`` is (n, 5) uint64 of address, length, device, stride, count; ids number the elements of all rows
    consecutively, as NIXL does for strided descriptors. Raises ``RANGE`` for an id that no row has.

    >>> rows = [(4096, 16, 0, 64, 10), (8192, 32, 0, 32, 5)]
    >>> expand(rows, [9, 10, 12]).tolist()
    [[4672, 16, 0], [8192, 32, 0], [8256, 32, 0]]
    """
    table = np.asarray(rows, np.uint64).reshape(-1, 5)
    index = np.asarray(ids, np.int64)
    counts = table[:, 4].astype(np.int64)
    ends = np.cumsum(counts)
    total = int(counts.sum())
    unknown = index[(index < 0) | (index >= total)]
    if unknown.size:
        got = int(unknown[0])
        raise KVPlanError("RANGE", "expand descriptor ids", expected=f"ids in [0, {total})", got=f"{got}", value=got)
    row = np.searchsorted(ends, index, side="right")
    element = (index - (ends - counts)[row]).astype(np.uint64)
    return np.stack([table[row, 0] + element * table[row, 3], table[row, 1], table[row, 2]], axis=1)


class FakeMemory:
    """Memory of several workers, at their own addresses.

    ``label_bytes`` is the width of a cell: 1 for bytes of data; 2, 4 or 8 for a label per byte address. Cells
    start as 0. Where ``poison`` is not 0, a copy writes it in place of a 0, so that what was copied
    from nowhere can be told from what was never written.

    Raises ``WORKER`` for two workers of one engine and rank, and ``MEMORY`` where an arena, when first
    touched, is more than the system can map. Use it as a context manager, or :meth:`close` it, to give
    the memory back.

    >>> from kvplan import Axis, Group, Region, View, Worker
    >>> def worker(engine, address):
    ...     axes = (Axis("token", 0, 4, 4, 2), Axis("dim", 0, 2, 2, 1))
    ...     view = View("mla", "attn", "kv", "uint8", axes, 10, 8)
    ...     return Worker(engine, 0, (Region("kv", address, 80),), (Group("attn", 4),), (view,))
    >>> with FakeMemory([worker("prefill", 1 << 44), worker("decode", (1 << 64) - 80)]) as memory:
    ...     memory.write(("prefill", 0), (1 << 44) + 8, b"kv cache")
    ...     memory.move(("prefill", 0), ("decode", 0), [((1 << 44) + 8, 8, 0)], [((1 << 64) - 8, 8, 0)])
    ...     bytes(memory.read(("decode", 0), (1 << 64) - 5, 5))
    b'cache'
    """

    def __init__(self, workers: Iterable[Worker], *, label_bytes: int = 1, poison: int = 0) -> None:
        if integer(label_bytes, "label_bytes") not in LABEL_BYTES:
            raise KVPlanError(
                "RANGE",
                "make fake memory",
                expected=f"label_bytes of {LABEL_BYTES}",
                got=f"{label_bytes}",
                value=label_bytes,
            )
        self.dtype: Final[np.dtype[np.unsignedinteger[Any]]] = np.dtype(f"u{label_bytes}")
        self.poison: Final = integer(poison, "poison", high=1 << 8 * label_bytes)
        self._arenas: dict[Key, Arenas] = {}
        self._record: dict[tuple[str, Key], list[Words]] = {}
        for worker in workers:
            self._add(worker)

    def _add(self, worker: Worker) -> None:
        key = worker.key
        if key in self._arenas:
            raise KVPlanError(
                "WORKER",
                "make fake memory",
                expected="each worker once",
                got=f"{worker.label} twice",
                worker=worker.label,
            )
        self._arenas[key] = Arenas(worker, self.dtype)

    def __enter__(self) -> FakeMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; an array that :meth:`array` handed out keeps its own arena alive."""
        for arenas in self._arenas.values():
            arenas.close()

    def read(self, worker: Worker | Key, address: int, length: int, device_id: int | None = None) -> Cells:
        """A copy of ``length`` cells from ``address`` on.

        ``device_id`` may be left out where only one device of the worker has the address. Raises ``BOUNDS``
        unless one region holds all of them.
        """
        return self._slice(worker, address, length, device_id).copy()

    def write(self, worker: Worker | Key, address: int, values: npt.ArrayLike, device_id: int | None = None) -> None:
        """Set the cells from ``address`` on to ``values``: bytes, or one integer per cell. Not recorded."""
        given = np.frombuffer(values, np.uint8) if isinstance(values, bytes | bytearray) else np.asarray(values)
        self._slice(worker, address, given.size, device_id)[:] = given.reshape(-1)

    def array(self, worker: Worker | Key, view: View) -> Cells:
        """The cells of ``view``, not copied: shape (num_blocks, extent of each axis in order, itemsize).

        Element ``[block, i, j, ..., byte]`` is the cell of the view's formula for those coordinates, counted
        from each axis's start. Raises ``BOUNDS`` for a view that leaves its region.
        """
        key = self._worker(worker)
        region = next((region for region in self._arenas[key].worker.regions if region.name == view.region), None)
        if region is None or view.end_bytes > region.size_bytes:
            raise KVPlanError(
                "BOUNDS",
                f"place view {view.name!r} in fake memory of {label_of(key)}",
                expected=f"a region {view.region!r} of at least {view.end_bytes} bytes",
                got="none" if region is None else f"{region.size_bytes} bytes",
                region=view.region,
            )
        cells = self._slice(key, region.address, region.size_bytes, region.device_id)
        strides = (view.block_stride_bytes, *(axis.stride_bytes for axis in view.axes), 1)
        return np.lib.stride_tricks.as_strided(
            cells[view.offset_bytes :],
            (view.num_blocks, *(axis.extent for axis in view.axes), view.itemsize),
            tuple(stride * self.dtype.itemsize for stride in strides),
        )

    def execute(self, spec: ReadSpec, *, by_ids: bool = False) -> None:
        """Move the bytes of ``spec``: remote to local where it is a READ, local to remote where it is a WRITE.

        By its coalesced descriptors, or ``by_ids``, each id expanded from its row. Raises ``BOUNDS`` for a
        range outside the regions and ``SIZE`` for two ranges of different lengths, before anything moves.
        """
        if by_ids:
            local = expand(spec.local_table.rows, spec.local_ids)
            remote = expand(spec.remote_table.rows, spec.remote_ids)
        else:
            local, remote = spec.descriptors()
        if spec.operation == "WRITE":
            self.move(spec.local, spec.remote, local, remote)
        else:
            self.move(spec.remote, spec.local, remote, local)

    def move(
        self, source: Worker | Key, destination: Worker | Key, reads: npt.ArrayLike, writes: npt.ArrayLike
    ) -> None:
        """Copy ``reads`` of ``source`` to ``writes`` of ``destination``, both (n, 3): address, length, device."""
        read_key, write_key = self._worker(source), self._worker(destination)
        read = np.array(reads, np.uint64).reshape(-1, 3)
        write = np.array(writes, np.uint64).reshape(-1, 3)
        if len(read) != len(write) or not np.array_equal(read[:, 1], write[:, 1]):
            raise KVPlanError(
                "SIZE",
                f"copy from {label_of(read_key)} to {label_of(write_key)}",
                expected="ranges of equal lengths on both sides",
                got=f"{len(read)} of {int(read[:, 1].sum())} bytes and {len(write)} of {int(write[:, 1].sum())}",
                reads=len(read),
                writes=len(write),
            )
        read_arena, read_cell = self._arenas[read_key].place(read)
        write_arena, write_cell = self._arenas[write_key].place(write)
        for same in _classes(read_arena, write_arena, read[:, 1]):
            length = int(read[same[0], 1])
            cells = self._arenas[read_key].cells(int(read_arena[same[0]]))
            into = self._arenas[write_key].cells(int(write_arena[same[0]]))
            for some, offset, part in _chunks(same, length):
                copied = _windows(cells, part)[read_cell[some] + offset]
                if self.poison:
                    copied[copied == 0] = self.poison
                _windows(into, part)[write_cell[some] + offset] = copied
        self._record.setdefault(("read", read_key), []).append(read)
        self._record.setdefault(("write", write_key), []).append(write)

    def reads(self, worker: Worker | Key) -> Words:
        """What copies have read from ``worker``, in order: (n, 3) uint64 of address, length, device."""
        return self._recorded("read", worker)

    def writes(self, worker: Worker | Key) -> Words:
        """What copies have written to ``worker``, in order: (n, 3) uint64 of address, length, device."""
        return self._recorded("write", worker)

    def _recorded(self, what: str, worker: Worker | Key) -> Words:
        return np.concatenate([np.empty((0, 3), np.uint64), *self._record.get((what, self._worker(worker)), ())])

    def _worker(self, worker: Worker | Key) -> Key:
        key = worker.key if isinstance(worker, Worker) else worker
        if key not in self._arenas:
            raise KVPlanError(
                "WORKER",
                "use fake memory",
                expected=f"a worker of {', '.join(map(label_of, self._arenas)) or 'an empty list'}",
                got=label_of(key),
                worker=key,
            )
        return key

    def _slice(self, worker: Worker | Key, address: int, length: int, device_id: int | None) -> Cells:
        key = self._worker(worker)
        address, length = integer(address, "address", high=1 << 64), integer(length, "length", low=1)
        if device_id is None:
            regions = self._arenas[key].worker.regions
            holders = {r.device_id for r in regions if r.address <= address < r.address + r.size_bytes}
            device_id = holders.pop() if len(holders) == 1 else 0
        arena, cell = self._arenas[key].place(np.array([(address, length, device_id)], np.uint64))
        return self._arenas[key].cells(int(arena[0]))[int(cell[0]) : int(cell[0]) + length]


def _classes(*keys: npt.NDArray[Any]) -> Iterator[Ints]:
    """Indices of equal keys, class by class, ascending in each."""
    order = np.lexsort(keys)
    if order.size:
        changes = [key[order][1:] != key[order][:-1] for key in keys]
        yield from np.split(order, np.flatnonzero(np.logical_or.reduce(changes)) + 1)


def _chunks(indices: Ints, length: int) -> Iterator[tuple[Ints, int, int]]:
    """Cut ``indices`` of copies of ``length`` cells into ``(indices, offset, length)`` of bounded size."""
    step = max(1, CHUNK_CELLS // length)
    for low in range(0, indices.size, step):
        for offset in range(0, length, CHUNK_CELLS):
            yield indices[low : low + step], offset, min(CHUNK_CELLS, length - offset)


def _windows(cells: Cells, length: int) -> Cells:
    """All windows of ``length`` cells, so that indexing them copies whole runs."""
    shape, stride = (cells.size - length + 1, length), cells.itemsize
    return np.lib.stride_tricks.as_strided(cells, shape, (stride, stride))
