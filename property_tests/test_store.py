"""Stores: any writer, any reader, any page, any prefix; the right bytes, and never a wrong hit."""

from __future__ import annotations

from hypothesis import event, given
from hypothesis import strategies as st

from kvplan.testing.strategies import Case, cases
from kvplan_nixl.serving.store import MemoryBackend
from property_tests import fewer
from property_tests.stored import (
    DESTINATION_STATE,
    NUM_PASSES,
    SOURCE_STATE,
    Labels,
    StoredEngine,
    page_tokens,
)

SMALL_PAGES = cases().filter(lambda case: page_tokens(case, 1) <= 12)
"""Pages are at most 24 tokens long, since the oracle looks at each byte."""


@fewer(8)
@given(SMALL_PAGES, st.integers(1, 2), st.integers(0, 3), st.integers(0, 9), st.integers(1, 5))
def test_what_is_shared_is_loaded_and_nothing_else(case: Case, times: int, pages: int, rest: int, step: int) -> None:
    """A reader loads the longest prefix that it shares with what was saved, if all that it needs was saved."""
    size = page_tokens(case, times)
    num_shared = min(pages * size + rest, 3 * size)
    prompts = [7] * num_shared + [8] * (3 * size - num_shared), [7] * num_shared + [9] * (3 * size - num_shared)
    destination, source = case.designs
    labels = Labels()
    for byte in range(NUM_PASSES):
        backend = MemoryBackend()
        writer = StoredEngine.of(source, 3 * size, SOURCE_STATE, backend, size)
        # states are saved after the second page
        writer.save(prompts[0], 2 * size, labels, byte)
        reader = StoredEngine.of(destination, 3 * size, DESTINATION_STATE, backend, size)
        stop = reader.load(prompts[1], step)
        assert stop == expected(case, reader, min(num_shared, 2 * size), size, step)
        assert [fault for worker in reader.workers for fault in worker.wrong(stop, labels, byte)] == []
    event("hit" if stop else "miss")


def expected(case: Case, reader: StoredEngine, num_shared: int, size: int, step: int) -> int:
    """The length of the prefix that a reader must find."""
    held = {view.name for worker in case.sources for view in worker.views}
    needed = {view.name for stored in reader.workers for view in stored.worker.views}
    if not needed:
        return 3 * size // step * step
    if not needed <= held:
        return 0
    groups = [group for stored in reader.workers for group in stored.client.groups]
    num_whole = num_shared // size * size
    if any(group.is_state for group in groups):
        return num_whole if num_whole == 2 * size and num_whole % step == 0 else 0
    return num_whole // step * step
