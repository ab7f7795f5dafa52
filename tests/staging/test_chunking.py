"""Chunking: how many positions of a request go through a staging region at a time (staging.S6 to staging.S8)."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import Context, Group, KVPlanError
from kvplan._arrays import distinct
from kvplan.plan.align import local_index
from kvplan.staging.buffers import ALIGNMENT, blocks_touched, fit

ATTN, WIDE, STATE = Group("attn", 16), Group("wide", 24), Group("state")
SPREAD = Group("attn", 4, Context(1, 3, 2))


def touched(group: Group, window: int, first: int) -> int:
    """The blocks that a window of positions touches, counted one by one."""
    position = np.arange(first, first + window)
    position = position[[int(p) in group.context for p in position]]
    return int(distinct(local_index(group, position) // (group.tokens_per_block or 1)).size) if position.size else 0


@pytest.mark.parametrize("group", [ATTN, SPREAD, Group("one", 1), Group("odd", 5, Context(0, 2, 7))])
@pytest.mark.parametrize("grain", [1, 2, 6, 8, 16, 24])
def test_as_many_blocks_as_some_window_touches(group: Group, grain: int) -> None:
    """No window that begins at a multiple of the grain touches more blocks; without contexts, some touches as many."""
    for window in range(grain, 6 * grain + 1, grain):
        most = max(touched(group, window, first) for first in range(0, 1000 * grain, grain)[:1000])
        assert most <= blocks_touched(group, window, grain)
        assert group.context.size > 1 or most == blocks_touched(group, window, grain)


def test_windows_are_whole_blocks_of_all_groups_where_they_fit() -> None:
    """staging.S6: of 16 and 24 tokens a block, windows are multiples of 48."""
    assert fit([(ATTN, 100), (WIDE, 100)], 2 * (3 + 2) * 100 + 60).num_positions == 48
    assert fit([(ATTN, 100), (WIDE, 100)], 9 * 2 * (3 + 2) * 100).num_positions % 48 == 0


def test_with_less_room_windows_are_whole_blocks_of_one_group() -> None:
    """staging.S6: multiples of 24 cut the blocks of 16 only."""
    fitted = fit([(ATTN, 100), (WIDE, 100)], 2 * (2 + 1) * 100 + 60)
    assert fitted.num_positions == 24
    assert [num_blocks for _, num_blocks in fitted.extents] == [4, 2]


def test_with_less_room_windows_divide_the_blocks_of_all() -> None:
    """staging.S6: with room for one block of each, multiples of 8 lie in one block of 16 and one of 24."""
    assert fit([(ATTN, 100), (WIDE, 100)], 2 * 2 * 100 + 60).num_positions == 8


def test_with_least_room_windows_are_what_fits() -> None:
    """staging.S6: where only single positions lie in one block of each, as few as that."""
    groups = [Group("attn", 16), Group("turns", 16, Context(0, 3, 5))]
    assert fit([(group, 100) for group in groups], 2 * 2 * 100 + 60).num_positions == 1


def test_there_is_room_for_two_windows_and_two_states() -> None:
    """staging.S7: extents do not overlap, and each has twice the blocks of a window."""
    demands = [(ATTN, 1000), (STATE, 77), (SPREAD, 10)]
    fitted = fit(demands, 100_000)
    end = 0
    for (group, size), (offset, num_blocks) in zip(demands, fitted.extents, strict=True):
        assert offset >= end
        assert offset % ALIGNMENT == 0
        assert num_blocks == 2 * (
            1 if group is STATE else blocks_touched(group, fitted.num_positions, fitted.num_positions)
        )
        end = offset + num_blocks * size
    assert end <= 100_000


def test_the_window_is_the_longest_that_fits() -> None:
    """staging.S8: with a byte less there is one block less."""
    assert [fit([(ATTN, 64)], 2 * 64 * count).num_positions for count in (1, 2, 9)] == [16, 32, 144]
    assert fit([(ATTN, 64)], 2 * 64 * 9 - 1).num_positions == 128


def test_there_is_room_for_the_states_of_usual_requests() -> None:
    """staging.S7: as many as there is room for requests of 1,024 positions, and all that fits of states alone."""
    fitted = fit([(ATTN, 1000), (STATE, 1000)], 1 << 20)
    assert fitted.num_positions // 1024 == 8
    assert fitted.extents[1].num_blocks == 2 * 8
    assert fit([(STATE, 50)], 10 * 50 + 49).extents[0].num_blocks == 10


def test_states_alone_have_one_window() -> None:
    """staging.S8: where nothing but states moves, or nothing at all, no range is cut."""
    assert fit([(STATE, 50)], 128).num_positions == fit([], 1).num_positions == 1 << 30


def test_too_small_a_region_is_refused_with_both_sizes() -> None:
    """MEMORY, with the bytes that are needed and those that the region has."""
    with pytest.raises(KVPlanError) as refused:
        fit([(ATTN, 100), (STATE, 1000)], 2255)
    assert str(refused.value) == (
        "MEMORY: cannot stage a request: expected a staging region of at least 2256 bytes, two blocks of each group, "
        "got 2255"
    )
    assert (refused.value.details["needed_bytes"], refused.value.details["size_bytes"]) == (2256, 2255)
    assert fit([(ATTN, 100), (STATE, 1000)], 2256).num_positions == 16
