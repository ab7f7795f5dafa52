"""Fake memory: carry out a plan's copies at the workers' own addresses, without a network.

Addresses are virtual: memory is allocated only for the pages that are touched. Every byte address
has a *cell*, an unsigned integer. Cells of one byte hold data; wider cells hold a label, which
differs for every byte of a request.

Rules of a copy, all checked before any cell changes:

- verify.X1: both sides list the same number of ranges, of equal lengths in order.
- verify.X2: every range has at least one byte and lies inside one region of its worker and
  device, without wrapping at 2**64.
- verify.X3: every copy is added to the record of what was written, in order.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvplan._checks import having, instance, integer, is_one_of, members, wrong_type
from kvplan._text import shown
from kvplan.describe.views import ADDRESS_END, Region, View
from kvplan.describe.worker import Key, Worker, key_of, label_of
from kvplan.errors import KVPlanError

if TYPE_CHECKING:
    from kvplan._arrays import Ints
    from kvplan.plan.specs import ReadSpec

Cells = npt.NDArray[np.unsignedinteger[Any]]
ByteRanges = npt.NDArray[np.uint64]
"""Ranges of bytes, (n, 3): address, length, device."""

LABEL_BYTES: Final = (1, 2, 4, 8)
CHUNK_CELLS: Final = 1 << 22
"""A copy uses at most this many cells of working memory."""


def expand(rows: npt.ArrayLike, ids: npt.ArrayLike) -> ByteRanges:
    """Return the range of each descriptor id, (n, 3) uint64: address, length, device.

    ``rows`` is (n, 5) uint64: address, length, device, stride, count. Ids number the elements of
    all rows consecutively, as NIXL does for strided descriptors. Raises ``RANGE`` for an id that no
    row has.

    >>> rows = [(4096, 16, 0, 64, 10), (8192, 32, 0, 32, 5)]
    >>> expand(rows, [9, 10, 12]).tolist()
    [[4672, 16, 0], [8192, 32, 0], [8256, 32, 0]]
    """
    table = np.asarray(rows, np.uint64).reshape(-1, 5)
    index = np.asarray(ids, np.int64)
    # Row r numbers its elements [id_ends[r] - counts[r], id_ends[r]).
    counts = table[:, 4].astype(np.int64)
    id_ends = np.cumsum(counts)  # the id after the last one of each row
    num_ids = int(counts.sum())
    unknown = index[(index < 0) | (index >= num_ids)]
    if unknown.size:
        first = int(unknown[0])
        raise KVPlanError(
            "RANGE",
            "expand descriptor ids",
            expected=f"ids in [0, {num_ids})",
            got=f"{first}",
            value=first,
        )
    # Of each id: its row, the first that ends after it, and its element in the row.
    row = np.searchsorted(id_ends, index, side="right")
    element = (index - (id_ends - counts)[row]).astype(np.uint64)
    address = table[row, 0] + element * table[row, 3]
    return np.stack([address, table[row, 1], table[row, 2]], axis=1)


def byte_ranges(values: Any, name: str, shortest: int = 0) -> ByteRanges:
    """Return rows of address, length and device in any form as an array, (n, 3).

    Every length is at least ``shortest``. Raises ``TYPE`` or ``RANGE``.
    """
    is_table = isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype.kind in "iu"
    if is_table and values.shape[1] == 3 and (values >= [0, shortest, 0]).all():
        return np.asarray(values, np.uint64)
    rows = []
    for row in values if np.iterable(values) else [values]:
        is_text = isinstance(row, str | bytes)
        is_flat = getattr(row, "ndim", 1) == 1 and hasattr(row, "__len__")
        if is_text or not is_flat or len(row) != 3:
            raise wrong_type(name, "rows of address, length and device", row)
        limits = zip(row, (0, shortest, 0), strict=True)
        rows.append([integer(number, name, low=low, high=ADDRESS_END) for number, low in limits])
    return np.array(rows, np.uint64).reshape(-1, 3)


class FakeMemory:
    """The memory of several workers, at their own addresses.

    ``label_bytes`` is the width of a cell: 1 for data; 2, 4 or 8 for a label per byte address. All
    cells start as 0. If ``poison`` is not 0, a copy writes it instead of every 0 that it reads, so
    that a byte copied from an unlabelled one differs from a byte that was never written.

    Raises ``WORKER`` for two workers of one engine and rank, and ``MEMORY`` when a region is
    touched that is larger than the system can map. Use it as a context manager, or call
    :meth:`close`, to free the memory. Not for several threads at once.

    >>> from kvplan import Axis, Group, Region, View, Worker
    >>> def worker(engine, address):
    ...     axes = (Axis("token", 0, 4, 4, 2), Axis("dim", 0, 2, 2, 1))
    ...     view = View("mla", "attn", "kv", "uint8", axes, 10, 8)
    ...     return Worker(engine, 0, (Region("kv", address, 80),), (Group("attn", 4),), (view,))
    >>> with FakeMemory([worker("prefill", 1 << 44), worker("decode", (1 << 64) - 80)]) as memory:
    ...     memory.write(("prefill", 0), (1 << 44) + 8, b"kv cache")
    ...     read = [((1 << 44) + 8, 8, 0)]
    ...     written = [((1 << 64) - 8, 8, 0)]
    ...     memory.move(("prefill", 0), ("decode", 0), read, written)
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
        self._cells: dict[Key, _WorkerCells] = {}
        self._record: dict[Key, list[ByteRanges]] = {}
        for worker in members(Worker, workers, "workers of fake memory"):
            if worker.key in self._cells:
                raise KVPlanError(
                    "WORKER",
                    "make fake memory",
                    expected="each worker once",
                    got=f"{worker.label} twice",
                    worker=worker.label,
                )
            self._cells[worker.key] = _WorkerCells(worker, self.dtype)

    def __enter__(self) -> FakeMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory. An array that :meth:`array` returned keeps its own cells."""
        for cells in self._cells.values():
            cells.close()

    def read(
        self,
        worker: Worker | Key,
        address: int,
        length: int,
        device_id: int | None = None,
    ) -> Cells:
        """Return a copy of the ``length`` cells that start at ``address``.

        ``device_id`` may be left out if only one device of the worker has the address. Raises
        ``BOUNDS`` unless one region holds all of them.
        """
        return self._slice(worker, address, length, device_id).copy()

    def write(
        self,
        worker: Worker | Key,
        address: int,
        values: npt.ArrayLike,
        device_id: int | None = None,
    ) -> None:
        """Set the cells that start at ``address`` to ``values``, without a record.

        Values are bytes, or one integer per cell.
        """
        try:
            cells = _numbers(values)
        except (TypeError, ValueError, RuntimeError):  # a tensor without numbers in host memory
            raise wrong_type("values of fake memory", "bytes, or integers", values) from None
        if cells.dtype.kind not in "iu" or not cells.size or hasattr(values, "mask"):
            raise wrong_type("values of fake memory", "bytes, or integers", values)
        for extreme in (cells.min(), cells.max()):
            integer(extreme, "a value of fake memory", high=1 << 8 * self.dtype.itemsize)
        self._slice(worker, address, cells.size, device_id)[:] = cells.reshape(-1)

    def region(self, worker: Worker | Key, view: View) -> Cells:
        """Return all cells of the region that ``view`` lies in, not copied.

        Raises ``BOUNDS`` for a view that leaves it.
        """
        key = self._key(worker)
        view = instance(View, view, "view")
        regions = self._cells[key].worker.regions
        region = next((region for region in regions if region.name == view.region), None)
        if region is None or view.end_bytes > region.size_bytes:
            raise KVPlanError(
                "BOUNDS",
                f"place view {view.name!r} in fake memory of {label_of(key)}",
                expected=f"a region {view.region!r} of at least {view.end_bytes} bytes",
                got="none" if region is None else f"{region.size_bytes} bytes",
                region=view.region,
            )
        return self._slice(key, region.address, region.size_bytes, region.device_id)

    def array(self, worker: Worker | Key, view: View) -> Cells:
        """Return the cells of ``view``, not copied: (num_blocks, extent of each axis, itemsize).

        Element ``[block, i, j, ..., byte]`` is the cell at the view's address for those
        coordinates, counted from the start of each axis. Raises ``BOUNDS`` for a view that leaves
        its region.
        """
        block_stride = instance(View, view, "view").block_stride_bytes
        strides = [block_stride, *(axis.stride_bytes for axis in view.axes), 1]
        return np.lib.stride_tricks.as_strided(
            self.region(worker, view)[view.offset_bytes :],
            (view.num_blocks, *(axis.extent for axis in view.axes), view.itemsize),
            tuple(stride * self.dtype.itemsize for stride in strides),
        )

    def execute(self, spec: ReadSpec) -> None:
        """Move the bytes of ``spec``, from remote to local for a READ, the other way for a WRITE.

        Raises ``NAME`` for another operation, ``BOUNDS`` for a range outside the regions and
        ``SIZE`` for two ranges of different lengths, before anything moves.
        """
        having("descriptors", spec, "spec", "a ReadSpec")
        if not is_one_of(spec.operation, ("READ", "WRITE")):
            expected = "operation READ or WRITE"
            raise KVPlanError("NAME", "execute", expected=expected, got=shown(spec.operation))
        local, remote = spec.descriptors()
        if spec.operation == "WRITE":
            self.move(spec.local, spec.remote, local, remote)
        else:
            self.move(spec.remote, spec.local, remote, local)

    def move(
        self,
        source: Worker | Key,
        destination: Worker | Key,
        reads: npt.ArrayLike,
        writes: npt.ArrayLike,
    ) -> None:
        """Copy ``reads`` of ``source`` to ``writes`` of ``destination``.

        Both are (n, 3): address, length, device.
        """
        read_key = self._key(source)
        write_key = self._key(destination)
        read = byte_ranges(reads, "reads")
        written = byte_ranges(writes, "writes")
        if len(read) != len(written) or not np.array_equal(read[:, 1], written[:, 1]):
            got_read = f"{len(read)} of {int(read[:, 1].sum())} bytes"
            got_written = f"{len(written)} of {int(written[:, 1].sum())}"
            raise KVPlanError(
                "SIZE",
                f"copy from {label_of(read_key)} to {label_of(write_key)}",
                expected="ranges of equal lengths on both sides",
                got=f"{got_read} and {got_written}",
                reads=len(read),
                writes=len(written),
            )
        first_read = self._cells[read_key].first_cells(read)
        first_written = self._cells[write_key].first_cells(written)
        # Copies of one length at a time: sorted by length, they are neighbours in their order.
        order = np.argsort(read[:, 1], kind="stable")
        lengths = read[order, 1]
        length_changes = np.flatnonzero(lengths[1:] != lengths[:-1]) + 1
        for copies in np.split(order, length_changes) if order.size else ():
            self._copy(
                self._cells[read_key].cells,
                self._cells[write_key].cells,
                first_read[copies],
                first_written[copies],
                int(read[copies[0], 1]),
            )
        self._record.setdefault(write_key, []).append(written)

    def _copy(
        self,
        source: Cells,
        destination: Cells,
        first_read: Ints,
        first_written: Ints,
        length: int,
    ) -> None:
        """Carry out copies of one length, given by their first cells, in chunks of CHUNK_CELLS."""
        copies_per_chunk = max(1, CHUNK_CELLS // length)
        for low in range(0, first_read.size, copies_per_chunk):
            chunk = slice(low, low + copies_per_chunk)
            for offset in range(0, length, CHUNK_CELLS):
                num_cells = min(CHUNK_CELLS, length - offset)
                # (copies, cells): row i has the copy's cells of this chunk, from its first cell on.
                copied = runs_of(source, num_cells)[first_read[chunk] + offset]
                if self.poison:
                    copied[copied == 0] = self.poison
                runs_of(destination, num_cells)[first_written[chunk] + offset] = copied

    def writes(self, worker: Worker | Key) -> ByteRanges:
        """Return the ranges that copies have written to ``worker``, in order.

        They are (n, 3) uint64: address, length, device.
        """
        record = self._record.get(self._key(worker), ())
        return np.concatenate([np.empty((0, 3), np.uint64), *record])

    def _key(self, worker: Worker | Key) -> Key:
        key = key_of(worker, "worker of fake memory")
        if key not in self._cells:
            workers = ", ".join(map(label_of, self._cells)) or "an empty list"
            raise KVPlanError(
                "WORKER",
                "use fake memory",
                expected=f"a worker of {workers}",
                got=label_of(key),
                worker=key,
            )
        return key

    def _slice(
        self,
        worker: Worker | Key,
        address: int,
        length: int,
        device_id: int | None,
    ) -> Cells:
        """Return some cells, not copied. Raises ``BOUNDS`` unless one region holds them all."""
        cells = self._cells[self._key(worker)]
        address = integer(address, "address", high=ADDRESS_END)
        length = integer(length, "length", low=1)
        if device_id is None:
            regions = cells.worker.regions
            # Without a device, the only one that has the address.
            holding = [region for region in regions if region.address <= address < region.end]
            devices = {region.device_id for region in holding}
            device_id = devices.pop() if len(devices) == 1 else 0
        device_id = integer(device_id, "device_id")
        first = int(cells.first_cells(np.array([(address, length, device_id)], np.uint64))[0])
        return cells.cells[first : first + length]


def _numbers(values: npt.ArrayLike) -> npt.NDArray[Any]:
    if isinstance(values, bytes | bytearray):
        return np.frombuffer(values, np.uint8)
    return np.asarray(values)


class _WorkerCells:
    """The cells of one worker, in one array that is mapped when it is first touched.

    All regions lie one behind another in it; regions of one device that overlap share their cells.
    """

    def __init__(self, worker: Worker, dtype: np.dtype[np.unsignedinteger[Any]]) -> None:
        self.worker = worker
        self.dtype = dtype
        self._size = 0
        self._closed = False
        self._cells: Cells | None = None
        self._devices: dict[int, npt.NDArray[np.uint64]] = {}
        for device in {region.device_id for region in worker.regions}:
            regions = [region for region in worker.regions if region.device_id == device]
            self._devices[device] = self._add(sorted(regions, key=lambda region: region.address))

    def _add(self, regions: list[Region]) -> npt.NDArray[np.uint64]:
        """Add cells for the regions of one device, given in order of address.

        Return one column per region, with three rows: its first byte, the last byte of any region
        up to it, and the address of which the first cell of all would be.
        """
        columns = []
        # `origin` is the address that cell 0 would have if overlapping regions went back to it.
        origin = 0
        reach = -1
        for region in regions:
            if region.address > reach:  # overlaps none of the regions before it
                origin = region.address - self._size
            reach = max(reach, region.end - 1)  # inclusive: 2**64 does not fit uint64
            self._size = reach + 1 - origin
            columns.append((region.address, reach, origin % ADDRESS_END))
        return np.array(columns, np.uint64).T

    def close(self) -> None:
        """Free the cells; a later touch raises ``MEMORY``."""
        self._cells = None
        self._closed = True

    def first_cells(self, ranges: ByteRanges) -> Ints:
        """Return the first cell of each range, (n,).

        Raises ``BOUNDS`` for the first range that breaks rule verify.X2.
        """
        inside = np.zeros(len(ranges), bool)
        cell = np.zeros(len(ranges), np.uint64)
        for device, (start, reach, origin) in self._devices.items():
            on_device = np.flatnonzero(ranges[:, 2] == device)
            address = ranges[on_device, 0]
            length = ranges[on_device, 1]
            # `region` is the last region that starts at or before each range. Some region holds the
            # range if its last byte is no further than the furthest byte of all regions up to that
            # one.
            region = np.searchsorted(start, address, side="right") - 1
            # `last` is before `address` if the range is empty or wraps.
            last = address + (length - np.uint64(1))
            inside[on_device] = (region >= 0) & (last >= address) & (last <= reach[region])
            cell[on_device] = address - origin[region]
        if not inside.all():
            first, num_bytes, device = ranges[int(np.argmin(inside))].tolist()
            raise KVPlanError(
                "BOUNDS",
                f"touch fake memory of {self.worker.label}",
                expected="every range inside one region",
                got=f"{num_bytes} bytes at {first:#x} on device {device}",
                worker=self.worker.label,
                address=first,
                length=num_bytes,
                device=device,
            )
        return cell.view(np.int64)

    @property
    def cells(self) -> Cells:
        """All cells, 0 at first.

        Raises ``MEMORY`` if they are closed, or more than the system can map.
        """
        if self._cells is None:
            if self._closed:
                got = "memory that was closed"
                raise KVPlanError("MEMORY", "touch fake memory", expected="open memory", got=got)
            self._cells = _mapped(self._size, self.dtype, self.worker)
        return self._cells


def _mapped(size: int, dtype: np.dtype[np.unsignedinteger[Any]], worker: Worker) -> Cells:
    """Return ``size`` cells of 0.

    On Linux they take memory only where they are touched, one small page at a time.
    """
    try:
        if not hasattr(mmap, "MAP_POPULATE"):  # not Linux
            return np.zeros(size, dtype)
        reserve_nothing = getattr(mmap, "MAP_NORESERVE", 0x4000)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve_nothing
        return np.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags=flags), dtype)
    except (OSError, OverflowError, MemoryError, ValueError):
        raise KVPlanError(
            "MEMORY",
            f"map the regions of {worker.label} as fake memory",
            expected="a size that the system can map",
            got=f"{size} cells of {dtype.itemsize} bytes",
            cells=size,
        ) from None


def runs_of(cells: Cells, length: int) -> Cells:
    """Return every run of ``length`` cells, not copied: ``[i]`` are the cells from ``i`` on."""
    num_runs = cells.size - length + 1
    strides = (cells.itemsize, cells.itemsize)
    return np.lib.stride_tricks.as_strided(cells, (num_runs, length), strides)
