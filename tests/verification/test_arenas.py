"""Arenas: which cell stands for which virtual address."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import KVPlanError, Region, Worker
from kvplan.verification.arenas import Arenas

U1 = np.dtype("u1")
TOP = 1 << 64


def arenas(*regions: Region) -> Arenas:
    return Arenas(Worker("decode", 0, regions, (), ()), U1)


def ranges(*rows: tuple[int, int, int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.array(rows, np.uint64).reshape(-1, 3)


def test_each_region_is_an_arena_of_its_own() -> None:
    """Neighbouring regions share no cell."""
    made = arenas(Region("a", 4096, 64), Region("b", 4160, 32))
    arena, cell = made.place(ranges((4096, 64, 0), (4160, 32, 0), (4100, 1, 0)))
    assert arena.tolist() == [0, 1, 0]
    assert cell.tolist() == [0, 0, 4]
    assert [made.cells(0).size, made.cells(1).size] == [64, 32]


def test_regions_that_overlap_share_their_cells() -> None:
    """The same bytes registered twice are the same bytes."""
    made = arenas(Region("pool", 4096, 64), Region("view", 4112, 16), Region("beyond", 4150, 50))
    arena, cell = made.place(ranges((4120, 8, 0), (4150, 50, 0), (4130, 30, 0)))
    assert arena.tolist() == [0, 0, 0]
    assert cell.tolist() == [24, 54, 34]
    assert made.cells(0).size == 104


def test_devices_have_addresses_of_their_own() -> None:
    """One address on two devices is two cells."""
    made = arenas(Region("a", 4096, 64, device_id=0), Region("b", 4096, 64, device_id=3))
    arena, _ = made.place(ranges((4096, 1, 3), (4096, 1, 0)))
    assert arena.tolist() == [1, 0]


def test_the_last_byte_of_memory_has_a_cell() -> None:
    """Addresses up to 2**64 - 1 are exact."""
    arena, cell = arenas(Region("top", TOP - 64, 64)).place(ranges((TOP - 1, 1, 0), (TOP - 64, 64, 0)))
    assert arena.tolist() == [0, 0]
    assert cell.tolist() == [63, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        (4096, 65, 0),
        (4095, 1, 0),
        (4160, 1, 0),
        (4096, 1, 1),
        (4096, 0, 0),
        (4150, TOP - 4150, 0),
        (4159, TOP - 1, 0),
        (TOP - 1, 1, 0),
    ],
    ids=["too long", "before", "after", "device", "empty", "to the top", "wrapped", "far"],
)
def test_a_range_outside_one_region_is_refused(wrong: tuple[int, int, int]) -> None:
    """Every way to leave a region is BOUNDS, and the error has the range."""
    with pytest.raises(KVPlanError) as caught:
        arenas(Region("a", 4096, 64)).place(ranges((4096, 64, 0), wrong))
    assert caught.value.code == "BOUNDS"
    assert (caught.value.details["address"], caught.value.details["length"], caught.value.details["device"]) == wrong


def test_a_range_across_two_neighbouring_regions_is_refused() -> None:
    """What lies in two registrations lies in neither."""
    with pytest.raises(KVPlanError, match=r"^BOUNDS: .* got 2 bytes at 0x103f on device 0$"):
        arenas(Region("a", 4096, 64), Region("b", 4160, 64)).place(ranges((4159, 2, 0)))


def test_more_than_the_system_can_map_is_an_error() -> None:
    """An arena of 2**62 cells is MEMORY, when touched."""
    made = arenas(Region("a", 0, 1 << 62))
    with pytest.raises(KVPlanError, match=r"^MEMORY: cannot map an arena"):
        made.cells(0)


def test_arenas_are_made_on_other_systems_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is not mapped as Linux does it, cells are zeros all the same, and too many are MEMORY."""
    monkeypatch.setattr("sys.platform", "darwin")
    assert arenas(Region("a", 4096, 64)).cells(0).tolist() == [0] * 64
    with pytest.raises(KVPlanError, match=r"^MEMORY: cannot map an arena"):
        arenas(Region("a", 0, 1 << 62)).cells(0)


def test_gigabytes_that_nobody_touches_cost_nothing() -> None:
    """An arena of 64 GiB is made at once, and only the touched cell's page is taken."""
    cells = arenas(Region("a", 0, 1 << 36)).cells(0)
    cells[1 << 35] = 7
    assert cells[(1 << 35) - 1 : (1 << 35) + 2].tolist() == [0, 7, 0]


def test_closed_arenas_refuse() -> None:
    """After close there are no cells."""
    made = arenas(Region("a", 4096, 64))
    made.cells(0)
    made.close()
    with pytest.raises(KVPlanError, match=r"^MEMORY: .* got memory that was closed$"):
        made.cells(0)
