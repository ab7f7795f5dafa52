"""FakeMemory: what a copy moves, records and refuses."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import Axis, Blocks, Group, KVPlanError, Region, View, Worker, plan_reads, plan_writes
from kvplan.verification import FakeMemory
from kvplan.verification.memory import expand
from tests.small import engine

AT = 1 << 44


TOP = 1 << 64


def regions_of(*regions: Region) -> Worker:
    return Worker("a", 0, regions, [], [])


def plain(engine_id: str, address: int = AT, size: int = 256, device_id: int = 0) -> Worker:
    return Worker(engine_id, 0, [Region("kv", address, size, device_id=device_id)], [], [])


def test_a_copy_moves_bytes() -> None:
    """Ranges are copied pairwise, in any order."""
    with FakeMemory([plain("a"), plain("b", (1 << 64) - 256)]) as fake:
        fake.write(("a", 0), AT, bytes(range(256)))
        top = (1 << 64) - 256
        fake.move(("a", 0), ("b", 0), [(AT + 8, 4, 0), (AT, 2, 0)], [(top + 252, 4, 0), (top + 1, 2, 0)])
        assert bytes(fake.read(("b", 0), top, 4)) == b"\0\0\1\0"
        assert bytes(fake.read(("b", 0), top + 252, 4)) == bytes([8, 9, 10, 11])


def test_long_ranges_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range longer than the working memory arrives whole, and so do many short ones."""
    monkeypatch.setattr("kvplan.verification.memory.CHUNK_CELLS", 10)
    with FakeMemory([plain("a"), plain("b")]) as fake:
        fake.write(("a", 0), AT, bytes(range(256)))
        fake.move(("a", 0), ("b", 0), [(AT + 7, 101, 0)], [(AT, 101, 0)])
        assert bytes(fake.read(("b", 0), AT, 102)) == bytes([*range(7, 108), 0])
        singles = [(AT + 2 * i, 1, 0) for i in range(30)]
        fake.move(("a", 0), ("b", 0), singles, singles[::-1])
        assert fake.read(("b", 0), AT, 60)[::2].tolist() == list(range(58, -2, -2))


def test_writes_are_recorded_in_order() -> None:
    """The ranges that copies write are recorded by worker."""
    with FakeMemory([plain("a"), plain("b")]) as fake:
        fake.move(("a", 0), ("b", 0), [(AT, 4, 0)], [(AT + 9, 4, 0)])
        fake.move(("a", 0), ("b", 0), [(AT + 4, 1, 0)], [(AT, 1, 0)])
        assert fake.writes(("b", 0)).tolist() == [[AT + 9, 4, 0], [AT, 1, 0]]
        assert fake.writes(("a", 0)).shape == (0, 3)


def test_a_copy_that_leaves_its_region_moves_nothing() -> None:
    """BOUNDS comes before the first byte, even for the last range."""
    with FakeMemory([plain("a"), plain("b")]) as fake:
        fake.write(("a", 0), AT, b"\1\1")
        with pytest.raises(KVPlanError, match=r"^BOUNDS: "):
            fake.move(("a", 0), ("b", 0), [(AT, 1, 0), (AT + 1, 1, 0)], [(AT, 1, 0), (AT + 256, 1, 0)])
        assert fake.read(("b", 0), AT, 1).tolist() == [0]
        assert not len(fake.writes(("b", 0)))


@pytest.mark.parametrize("reads", [[(AT, 2, 0)], [(AT, 1, 0), (AT, 1, 0)]], ids=["length", "number"])
def test_unpaired_ranges_are_refused(reads: list[tuple[int, int, int]]) -> None:
    """Ranges must pair, with equal lengths."""
    with FakeMemory([plain("a"), plain("b")]) as fake, pytest.raises(KVPlanError, match=r"^SIZE: "):
        fake.move(("a", 0), ("b", 0), reads, [(AT, 1, 0)])


def test_labels_are_wide_and_poison_marks_what_came_from_nowhere() -> None:
    """Cells of four bytes hold a label per address; an unfilled one arrives as poison."""
    with FakeMemory([plain("a"), plain("b")], label_bytes=4, poison=99) as fake:
        fake.write(("a", 0), AT, [1 << 30, 0, 5])
        fake.move(("a", 0), ("b", 0), [(AT, 3, 0)], [(AT, 3, 0)])
        assert fake.read(("b", 0), AT, 4).tolist() == [1 << 30, 99, 5, 0]


def test_poison_must_fit_a_cell() -> None:
    """A poison wider than the cells is refused."""
    with pytest.raises(KVPlanError, match=r"^RANGE"):
        FakeMemory([], label_bytes=2, poison=1 << 16)


def test_cells_have_a_width_of_an_integer() -> None:
    """A cell of three bytes is refused."""
    with pytest.raises(KVPlanError, match=r"^RANGE: .* got 3$"):
        FakeMemory([], label_bytes=3)


def test_an_array_is_the_view() -> None:
    """Element [block, axes in order, byte] of the array is the cell at the address of the view's formula."""
    axes = (Axis("head", 4, 6, 8, 3), Axis("token", 0, 4, 4, 6), Axis("dim", 0, 1, 1, 0))
    view = View("layers.0", "attn", "kv", "bfloat16", axes, 5, 30, 7)
    worker = Worker("a", 0, [Region("kv", AT, 256)], [Group("attn", 4)], [view])
    with FakeMemory([worker]) as fake:
        fake.array(worker, view)[3, 1, 2, 0, 1] = 42
        assert fake.read(worker, AT + 7 + 3 * 30 + 1 * 3 + 2 * 6 + 1, 1).tolist() == [42]
        assert fake.array(worker, view).shape == (5, 2, 4, 1, 2)


@pytest.mark.parametrize(("region", "blocks"), [("other", 2), ("kv", 99)])
def test_an_array_outside_its_region_is_refused(region: str, blocks: int) -> None:
    """A view of another worker is checked before it is placed."""
    view = View("layers.0", "attn", region, "uint8", (Axis("token", 0, 4, 4, 1),), blocks, 4)
    with FakeMemory([plain("a")]) as fake, pytest.raises(KVPlanError, match=r"^BOUNDS: "):
        fake.array(("a", 0), view)


def test_the_device_may_be_left_out_where_it_is_clear() -> None:
    """The device may be left out if only one has the address."""
    with FakeMemory([plain("a", device_id=5)]) as fake:
        fake.write(("a", 0), AT, b"\7")
        assert fake.read(("a", 0), AT, 1, device_id=5).tolist() == [7]
        with pytest.raises(KVPlanError, match=r"^BOUNDS"):
            fake.read(("a", 0), AT, 1, device_id=0)


def test_a_worker_stands_in_memory_once() -> None:
    """Two workers of one engine and rank are refused."""
    with pytest.raises(KVPlanError, match=r"^WORKER: .* got a/0 twice$"):
        FakeMemory([plain("a"), plain("a")])


def test_an_unknown_worker_is_refused() -> None:
    """Only the workers of the memory can be read."""
    with FakeMemory([plain("a")]) as fake, pytest.raises(KVPlanError, match=r"^WORKER: .* a worker of a/0, got b/0$"):
        fake.read(("b", 0), AT, 1)


def test_closed_memory_refuses() -> None:
    """Memory cannot be touched after the context ends."""
    with FakeMemory([plain("a")]) as fake:
        fake.write(("a", 0), AT, b"\1")
    with pytest.raises(KVPlanError, match=r"^MEMORY"):
        fake.read(("a", 0), AT, 1)


def test_neighbouring_regions_share_no_cell() -> None:
    """What is written to the end of one region is not in the next one, and a range across both is in neither."""
    with FakeMemory([regions_of(Region("a", 4096, 64), Region("b", 4160, 32))]) as fake:
        fake.write(("a", 0), 4096, bytes([1] * 64))
        assert not fake.read(("a", 0), 4160, 32).any()
        with pytest.raises(KVPlanError, match=r"^BOUNDS: .* got 2 bytes at 0x103f on device 0$"):
            fake.read(("a", 0), 4159, 2)


def test_regions_that_overlap_share_their_cells() -> None:
    """Bytes that are registered several times are the same cells in every region."""
    pool = regions_of(Region("pool", 4096, 64), Region("view", 4112, 16), Region("beyond", 4150, 50))
    with FakeMemory([pool]) as fake:
        fake.write(("a", 0), 4096, bytes(range(64)))
        fake.write(("a", 0), 4160, bytes(range(64, 104)))
        assert bytes(fake.read(("a", 0), 4120, 8)) == bytes(range(24, 32))
        assert bytes(fake.read(("a", 0), 4130, 30)) == bytes(range(34, 64))
        assert bytes(fake.read(("a", 0), 4150, 50)) == bytes(range(54, 104))
        with pytest.raises(KVPlanError, match=r"^BOUNDS"):
            fake.read(("a", 0), 4149, 50)


def test_devices_have_addresses_of_their_own() -> None:
    """One address on two devices is two cells."""
    with FakeMemory([regions_of(Region("a", 4096, 64), Region("b", 4096, 64, device_id=3))]) as fake:
        fake.write(("a", 0), 4096, b"\1", device_id=3)
        fake.write(("a", 0), 4097, b"\2", device_id=0)
        assert [bytes(fake.read(("a", 0), 4096, 2, device)) for device in (0, 3)] == [b"\0\2", b"\1\0"]


def test_the_last_byte_of_memory_has_a_cell() -> None:
    """Addresses up to 2**64 - 1 are exact."""
    with FakeMemory([regions_of(Region("low", 0, 8), Region("top", TOP - 64, 64))]) as fake:
        fake.write(("a", 0), TOP - 1, b"\7")
        assert bytes(fake.read(("a", 0), TOP - 64, 64)) == bytes([0] * 63 + [7])


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
    """Every way to leave a region is BOUNDS; the error has the range, and nothing was copied."""
    small = regions_of(Region("a", 4096, 64))
    large = Worker("b", 0, [Region("b", 0, 1 << 62)], [], [])
    with FakeMemory([small, large]) as fake, pytest.raises(KVPlanError) as caught:
        fake.move(small, large, [(4096, 64, 0), wrong], [(0, 64, 0), (64, wrong[1], 0)])
    assert caught.value.code == "BOUNDS"
    assert (caught.value.details["address"], caught.value.details["length"], caught.value.details["device"]) == wrong


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_more_than_the_system_can_map_is_an_error(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """2**62 cells are MEMORY when one is touched, however memory is mapped; where they can be, cells are zeros."""
    monkeypatch.setattr("sys.platform", platform)
    with FakeMemory([plain("a")]) as fake:
        assert not fake.read(("a", 0), AT, 256).any()
    with (
        FakeMemory([regions_of(Region("a", 0, 1 << 62))]) as fake,
        pytest.raises(KVPlanError, match=r"^MEMORY: cannot map the regions of a/0 as fake memory"),
    ):
        fake.read(("a", 0), 0, 1)


def test_gigabytes_that_nobody_touches_cost_nothing() -> None:
    """A region of 64 GiB is mapped at once, and only the touched cell's page is taken."""
    with FakeMemory([regions_of(Region("a", 0, 1 << 36))]) as fake:
        fake.write(("a", 0), 1 << 35, b"\7")
        assert fake.read(("a", 0), (1 << 35) - 1, 3).tolist() == [0, 7, 0]


def test_expand_walks_rows_of_any_stride() -> None:
    """Ids count the elements of all rows; a row of no elements has none."""
    rows = [(100, 8, 1, 16, 2), (500, 8, 2, 8, 0), (900, 4, 3, 100, 3)]
    assert expand(rows, [4, 0, 1, 2]).tolist() == [[1100, 4, 3], [100, 8, 1], [116, 8, 1], [900, 4, 3]]
    assert expand([], []).shape == (0, 3)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_expand_refuses_ids_of_no_row(wrong: int) -> None:
    """An id outside the rows is RANGE."""
    with pytest.raises(KVPlanError, match=rf"^RANGE: .*\[0, 5\), got {wrong}$"):
        expand([(100, 8, 1, 16, 2), (900, 4, 3, 100, 3)], [0, wrong])


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_plan_carried_out_moves_the_cache(operation: str) -> None:
    """Real bytes of a source of two heads arrive, head by head, in the other axis order and other blocks."""
    (source,), (destination, _) = (
        engine("prefill", heads=2, layers=1),
        engine("decode", 2, heads=2, order="NH", layers=1),
    )
    ours, theirs = {"attn": Blocks([3, 1])}, {"attn": Blocks([8, 2])}
    if operation == "READ":
        (spec,) = plan_reads(destination, [source]).bind(local=ours, remote=theirs, tokens=(1, 7))
    else:
        (spec,) = plan_writes(source, [destination]).bind(local=theirs, remote=ours, tokens=(1, 7))
    with FakeMemory([source, destination]) as fake:
        held = fake.array(source, source.views[0])
        held[...] = np.random.default_rng(0).integers(1, 256, held.shape)
        fake.execute(spec)
        got = fake.array(destination, destination.views[0])
        for position in range(8):
            block, slot = divmod(position, 4)
            expected = held[(8, 2)[block], :, 0, slot] * np.uint8(1 <= position < 7)
            assert np.array_equal(got[(3, 1)[block], :, 0, slot], expected)
        assert np.count_nonzero(got) == 6 * 16
