# ruff: noqa: N802  # the names of CUDA's functions
"""Which memory other processes can map, with a stand-in for CUDA's driver.

What the driver itself does, no test here can see.
"""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import pytest

from kvplan import KVPlanError, Region, Worker
from kvplan_nixl.cma import Process
from kvplan_nixl.doctor import State, Trial, mapping_finding
from kvplan_nixl.mapping import NO_HANDLE, CudaMapper, allocator_notes, cuda_mapper, unmapped_note

BASE, SIZE, ELSEWHERE = 1 << 40, 1 << 20, 1 << 44
OTHER = Process(1, 1, 1, "boot")


class Driver:
    """CUDA's functions for one allocation, and a peer's, as ctypes calls them."""

    def __init__(self, *, capable: int = 1, opens: int = 0) -> None:
        self.capable = capable
        self.opens = opens
        self.calls: list[str] = []

    def cuPointerGetAttribute(self, value: Any, attribute: int, address: ctypes.c_uint64) -> int:
        assert attribute == 10
        if not BASE <= address.value < BASE + SIZE:
            return 1
        value._obj.value = self.capable
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: ctypes.c_uint64) -> int:
        base._obj.value, size._obj.value = BASE, SIZE
        return 0

    def cuIpcGetMemHandle(self, handle: Any, base: ctypes.c_uint64) -> int:
        assert base.value == BASE
        handle._obj.value = b"handle"
        return 0

    def cuIpcOpenMemHandle_v2(self, pointer: Any, handle: Any, flags: int) -> int:
        assert flags == 1
        assert bytes(handle)[:6] == b"handle"
        assert len(bytes(handle)) == 64
        self.calls.append("open")
        pointer._obj.value = ELSEWHERE
        return self.opens

    def cuIpcCloseMemHandle(self, pointer: ctypes.c_uint64) -> int:
        assert pointer.value == ELSEWHERE
        self.calls.append("close")
        return 0


def vram(name: str, offset: int = 0) -> Region:
    return Region(name, BASE + offset, 4096, "VRAM", 0)


def test_regions_of_one_allocation_are_mapped_once() -> None:
    """Each region is at its offset; the allocation is unmapped with the last of them."""
    driver = Driver()
    mapper = CudaMapper(driver)
    handles = [mapper.export(vram(name, offset)) for name, offset in (("kv", 0), ("staging", 8192))]
    kv, staging = (mapper.open(handle, OTHER) for handle in handles)
    assert (kv.address, kv.size_bytes) == (ELSEWHERE, SIZE)
    assert (staging.address, staging.size_bytes) == (ELSEWHERE + 8192, SIZE - 8192)
    kv.close()
    assert driver.calls == ["open"]
    staging.close()
    assert driver.calls == ["open", "close"]


def test_memory_of_this_process_is_taken_as_it_is() -> None:
    """CUDA opens no handle in the process that made it."""
    mapper = CudaMapper(Driver())
    process = Process.current()
    assert process is not None
    assert mapper.open(mapper.export(vram("kv", 4096)), process).address == BASE + 4096


@pytest.mark.parametrize("handle", [b"", b"x" * 87, b"x" * 89])
def test_what_is_no_handle(handle: bytes) -> None:
    with pytest.raises(KVPlanError, match="MEMORY"):
        CudaMapper(Driver()).open(handle, OTHER)


def test_an_error_of_the_driver() -> None:
    """It has CUDA's number, and nothing is mapped."""
    mapper = CudaMapper(Driver(opens=201))
    with pytest.raises(KVPlanError, match="error 201 of cuIpcOpenMemHandle_v2"):
        mapper.open(mapper.export(vram("kv")), OTHER)


def test_memory_without_a_handle_is_named_at_the_start() -> None:
    """All regions with one reason are in one line; there is none where all can be mapped."""
    worker = Worker("prefill", 0, (vram("kv"), vram("staging", 8192)), (), ())
    assert unmapped_note(worker, CudaMapper(Driver())) == ""
    note = unmapped_note(worker, CudaMapper(Driver(capable=0)))
    assert f"prefill/0 that peers on this host cannot map (kv, staging: {NO_HANDLE})" in note
    unknown = attrs.evolve(worker, regions=(Region("kv", 4096, 64, "VRAM", 0),))
    assert "unknown to CUDA" in unmapped_note(unknown, CudaMapper(Driver()))
    assert CudaMapper(Driver()).why_not(Region("kv", 4096, 64)) == "not memory of a GPU"


def test_workers_without_a_gpu_have_no_mapper() -> None:
    assert cuda_mapper(Worker("prefill", 0, (), (), ())) is None
    assert cuda_mapper(Worker("prefill", 0, (Region("kv", 4096, 64),), (), ())) is None


def trial(**told: Any) -> Trial:
    return Trial((told,), "", "")


def test_the_doctor_says_what_can_be_mapped() -> None:
    """A line says how engines of a host copy, or why they cannot, and which settings lead there."""
    right = trial(error="", reason="", has_triton=True)
    assert (mapping_finding({}, right).state, mapping_finding({}, right).advice) == (State.RIGHT, "")
    assert "by torch's operations" in mapping_finding({}, trial(error="", reason="", has_triton=False)).text
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}
    line = mapping_finding(environment, trial(error="", reason=NO_HANDLE, has_triton=True))
    assert line.state is State.NOTE
    assert NO_HANDLE in line.text
    assert "PYTORCH_CUDA_ALLOC_CONF has expandable_segments" in line.text
    assert mapping_finding({}, trial(error="no driver")).state is State.WRONG


def test_settings_that_matter() -> None:
    assert [*allocator_notes({})] == []
    assert [*allocator_notes({"NIXL_UCX_SGL_ENABLE": "1"})] == [
        "NIXL_UCX_SGL_ENABLE changes NIXL's writes alone, and kvplan's connectors read"
    ]
