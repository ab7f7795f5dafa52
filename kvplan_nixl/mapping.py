"""Memory of one process mapped into another one, so that a peer on the same host can read it.

A :class:`Mapper` makes a handle of a region, which travels in the worker's envelope, and opens the
handles of others. :class:`CudaMapper` is that of NVIDIA's GPUs (CUDA IPC). It calls the driver by
ctypes, so it depends on no version of torch.

Memory of CUDA's virtual memory functions has no such handle: torch's expandable segments, and what
vLLM allocates for its sleep mode (cumem). UCX reads that memory too, hundreds of times slower, and
does not say so. So each region is asked when an engine starts, :func:`unmapped_note` says which
have no handle, and ``kvplan doctor`` looks at the settings that lead there.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import attrs

from kvplan import KVPlanError, Region, Worker
from kvplan.support import few
from kvplan_nixl.cma import Process

__all__ = ["CudaMapper"]

MAX_HANDLE_BYTES: Final = 512

NO_HANDLE: Final = "CUDA's virtual memory (expandable segments, cumem), which has no IPC handle"


@attrs.frozen(eq=False)
class Mapped:
    """Memory of a peer, from ``address`` on in this process. ``close`` unmaps it, once."""

    address: int
    size_bytes: int
    close: Callable[[], object]


class Mapper(Protocol):
    """Maps regions of one kind of memory."""

    kind: str
    """What tells handles apart from those of other mappers."""

    def why_not(self, region: Region) -> str:
        """Return why a region has no handle; empty if it has one."""

    def export(self, region: Region) -> bytes:
        """Return the handle of a region, at most :data:`MAX_HANDLE_BYTES` long."""

    def open(self, handle: bytes, process: Process) -> Mapped:
        """Map the memory of a handle from a process of this host. Raises ``MEMORY``."""


def unmapped_note(worker: Worker, mapper: Mapper) -> str:
    """Return a line about the regions that peers cannot map; empty if they can map all."""
    reasons: dict[str, list[str]] = {}
    for region in worker.regions:
        reason = mapper.why_not(region)
        if reason:
            reasons.setdefault(reason, []).append(region.name)
    if not reasons:
        return ""
    texts = [f"{few(names, ', ')}: {reason}" for reason, names in reasons.items()]
    return (
        f"memory of {worker.label} that peers on this host cannot map ({'; '.join(texts)}); they "
        "read it by UCX, which is far slower"
    )


class CudaMapper:
    """CUDA IPC: handles of whole allocations, with the region's offset in its allocation.

    A process maps an allocation once, however many regions are in it. Its own memory it takes as it
    is, since CUDA opens no handle in the process that made it. ``driver`` is libcuda, or a stand-in
    for tests. Not measured on a GPU yet.
    """

    kind = "cuda-ipc"

    def __init__(self, driver: Any = None) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
        # the address of each allocation that is mapped, and how often, by its handle
        self._opened: dict[bytes, list[int]] = {}

    def why_not(self, region: Region) -> str:
        if region.memory != "VRAM":
            return "not memory of a GPU"
        capable = ctypes.c_uint(0)
        if self._driver.cuPointerGetAttribute(
            ctypes.byref(capable), IPC_CAPABLE, ctypes.c_uint64(region.address)
        ):
            return "unknown to CUDA"
        return "" if capable.value else NO_HANDLE

    def export(self, region: Region) -> bytes:
        base, size = ctypes.c_uint64(0), ctypes.c_size_t(0)
        address = ctypes.c_uint64(region.address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        handle = (ctypes.c_char * IPC_BYTES)()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        offset = region.address - base.value
        return HANDLE.pack(region.address, offset, size.value, bytes(handle))

    def open(self, handle: bytes, process: Process) -> Mapped:
        try:
            address, offset, size, ipc = HANDLE.unpack(handle)
        except struct.error:
            raise _unusable(f"{HANDLE.size} bytes", f"{len(handle)}") from None
        if process == Process.current():
            return Mapped(address, size - offset, lambda: None)
        if ipc not in self._opened:
            pointer = ctypes.c_uint64(0)
            argument = IpcHandle.from_buffer_copy(ipc)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), argument, LAZY_PEER_ACCESS)
            self._opened[ipc] = [pointer.value, 0]
        self._opened[ipc][1] += 1
        return Mapped(self._opened[ipc][0] + offset, size - offset, lambda: self._close(ipc))

    def _close(self, ipc: bytes) -> None:
        opened = self._opened[ipc]
        opened[1] -= 1
        if not opened[1]:
            del self._opened[ipc]
            with suppress(KVPlanError):
                self._call("cuIpcCloseMemHandle", ctypes.c_uint64(opened[0]))

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result:
            raise _unusable("success", f"error {result} of {name}")


IPC_BYTES: Final = 64
HANDLE: Final = struct.Struct(f"<QQQ{IPC_BYTES}s")
"""The region's address, its offset in its allocation, the allocation's size and CUDA's handle."""

IPC_CAPABLE: Final = 10
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE."""

LAZY_PEER_ACCESS: Final = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class IpcHandle(ctypes.Structure):
    """CUDA's handle, which its functions take by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_BYTES),)


def cuda_mapper(worker: Worker) -> CudaMapper | None:
    """Return the mapper of a worker whose memory is that of a GPU, where CUDA's driver is."""
    if not worker.regions or any(region.memory != "VRAM" for region in worker.regions):
        return None
    try:
        return CudaMapper()
    except OSError:
        return None


def allocator_notes(environment: Mapping[str, str]) -> Iterable[str]:
    """Yield what the environment says about memory that peers cannot map, or read slowly.

    >>> [*allocator_notes({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})]
    ['PYTORCH_CUDA_ALLOC_CONF has expandable_segments: caches in them have no IPC handle']
    >>> [*allocator_notes({"PYTORCH_ALLOC_CONF": "expandable_segments:False"})]
    []
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        options = dict(
            option.strip().partition(":")[::2] for option in environment.get(name, "").split(",")
        )
        if options.get("expandable_segments", "").lower() == "true":
            yield f"{name} has expandable_segments: caches in them have no IPC handle"
    if environment.get("NIXL_UCX_SGL_ENABLE"):
        yield "NIXL_UCX_SGL_ENABLE changes NIXL's writes alone, and kvplan's connectors read"


def _unusable(expected: str, got: str) -> KVPlanError:
    return KVPlanError("MEMORY", "map memory of a peer", expected=expected, got=got)
