"""The comparison with peers' planners, where the peers are absent."""

from __future__ import annotations

import functools

import attrs
import numpy as np
import pytest

from benchmarks import side_by_side
from benchmarks.peers import environment, kvplan_rows, table
from benchmarks.peers.cases import CASES, Case, Request, World, moves
from benchmarks.peers.rows import BIND, FLOOR, OF_BLOCKS, Figure, Refusal, Row, Section, measure

SECTION = Section(
    "a case",
    "vLLM",
    8,
    1 << 20,
    640,
    (
        Figure(FLOOR, "ids", 640, [10e-6, 90e-6, 9e-6], [11e-6]),
        Figure(BIND, "ids", 640, [20e-6, 180e-6, 18e-6], [25e-6], "a note"),
        Figure(OF_BLOCKS, "ids", 640, [12e-6], [13e-6]),
        Figure("kvplan bind", "ids", 640, [21e-6], [26e-6], "another note"),
        Figure("kvplan bind and descriptors", "ranges", 640, [100e-6, 101e-6, 99e-6], [120e-6], "a note"),
        Figure("vLLM NIXL, _compute_desc_ids", "ids", 640, [16e-6], [17e-6]),
        Figure("vLLM NIXL, _read_blocks_for_req", "ids", 640, [30e-6, 270e-6, 27e-6], [31e-6]),
    ),
    (Refusal("vLLM Mooncake", "why not"),),
)


world_of = functools.cache(World.of)


@pytest.fixture(autouse=True)
def _without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_there", lambda: False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_floor_makes_the_ids_that_bind_makes(case: Case) -> None:
    """In every case."""
    world, request = world_of(case), Request.of(case, 16)
    floor, specs = kvplan_rows.Floor(world, request), kvplan_rows.bound(world.plan, request)
    for spec, (local, remote) in zip(specs, floor.reused(), strict=True):
        assert np.array_equal(local.reshape(-1), spec.local_ids)
        assert np.array_equal(remote.reshape(-1), spec.remote_ids)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_request_is_all_of_the_decode_worker(case: Case) -> None:
    """It has every slot of the blocks in all layers: K and V of its heads, 128 values of 2 bytes."""
    world, request = world_of(case), Request.of(case, 16)
    num_bytes = sum(spec.num_bytes for spec in kvplan_rows.bound(world.plan, request))
    assert num_bytes == 16 * 16 * 80 * (8 // case.destination.tp) * 2 * 128 * 2


def test_blocks_are_in_runs() -> None:
    """In a case with runs of 8, 8 blocks are consecutive on both sides, and the next ones are not."""
    (case,) = (case for case in CASES if case.run == 8 and case.peers == "vLLM")
    request = Request.of(case, 64)
    for ids in (request.source, request.destination):
        first = np.array(ids).reshape(8, 8)
        assert (np.diff(first, axis=1) == 1).all()
        assert (first[1:, 0] != first[:-1, -1] + 1).any()
        assert len(set(ids)) == 64


def test_moves_joins_contiguous_copies() -> None:
    """Descriptors of the same copies are equal afterwards, and others differ."""
    whole, halves = [([0], [64], [8])], [([4], [68], [4]), ([0], [64], [4])]
    apart = [([4], [64], [4]), ([0], [68], [4])]
    assert all(map(np.array_equal, moves(whole), moves(halves)))
    assert len(moves(apart)[0]) == 2


def test_every_row_has_a_time_for_every_round() -> None:
    """All rows have the same number of rounds, each with a time above 0."""
    rows = [Row(name, "ids", lambda: sum(range(100)), lambda made: made) for name in "ab"]
    times = measure(rows, 0.0)
    assert [len(found) for row in times for found in row] == [5, 5, 5, 5]
    assert min(min(found) for row in times for found in row) > 0


def test_a_row_that_moves_other_bytes_is_an_error() -> None:
    """A function with other copies than kvplan's raises an error."""
    row = Row("other", "ranges", lambda: [([0], [64], [8])], len, lambda made: made)
    assert side_by_side.checked(row, moves([([0], [64], [8])])) == 1
    with pytest.raises(RuntimeError, match="other moves other bytes"):
        side_by_side.checked(row, moves([([0], [72], [8])]))


def test_a_ratio_is_of_times_of_the_same_rounds() -> None:
    """The ratio compares times of the same round, and ignores rounds that only one function had."""
    assert Figure("a", "ids", 1, [2.0, 60.0], []).over(Figure("b", "ids", 1, [1.0, 30.0, 7.0, 7.0], [])) == 2.0


def test_lines_have_ratios_to_what_makes_the_same() -> None:
    """Ids over the floor and over bind, ranges over bind with its descriptors."""
    ratios = {line[0]: line[-2:] for line in table.lines(SECTION)}
    assert ratios["vLLM NIXL, _read_blocks_for_req"] == ("3.00x", "1.50x")
    assert ratios["kvplan bind and descriptors"] == ("", "1.00x")


@pytest.mark.parametrize(("output", "count"), [("ids", 639), ("ranges", 79)])
def test_a_peer_with_fewer_descriptors_is_an_error(output: str, count: int) -> None:
    """The request has 640 ids, and 80 ranges once neighbouring blocks are one."""
    (case,) = (case for case in CASES if case.run == 8 and case.peers == "vLLM")
    world, request = world_of(case), Request.of(case, 8)
    rows = [Row("other", output, lambda: count + 1, lambda made: made)]
    assert side_by_side.section(world, request, rows, 0.0).figures
    with pytest.raises(RuntimeError, match=f"other makes {count} {output}, fewer than kvplan"):
        side_by_side.section(world, request, [attrs.evolve(rows[0], call=lambda: count)], 0.0)


def test_markdown_has_a_table_notes_and_the_caption() -> None:
    """Rows have as many cells as the head, and each note appears once, with the functions that it is about."""
    text = table.markdown([SECTION], "a caption")
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {9}
    assert f"- {BIND}; kvplan bind and descriptors: a note." in text
    assert "another note" in text
    assert "- vLLM Mooncake refuses 'a case': why not" in text
    assert text.endswith("\n\na caption")


def test_without_peers_there_are_our_rows_and_a_line_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs without peers on one small request."""
    arguments = ["--blocks", "8", "--case", "BLHNC", "--seconds", "0"]
    assert side_by_side.main(arguments) == 0
    shown = capsys.readouterr()
    assert f"| {BIND} |" in shown.out
    assert "vLLM" not in shown.out
    assert shown.err.startswith("no peers here, so their rows are missing: `python -m benchmarks.peers")
