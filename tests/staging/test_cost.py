"""Staged costs: what is counted without block tables is what bound requests take."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvplan import Blocks
from tests.small import engine
from tests.staged import ONE_BLOCK, plans_of, staged
from tests.staging.test_plan import states

SCATTERED = {"attn": Blocks([block * 7 % 40 for block in range(0, 40, 2)])}

PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"order": "NH"}, {}),
    ({"order": "NH", "tp": 2}, {"tokens": 6}),
    ({"order": "NH", "tokens": 6}, {"tp": 2, "contexts": (2, 3)}),
    ({"order": "NH", "contexts": (2, 4)}, {}),
    ({"order": "NH", "contexts": (2, 8)}, {"tokens": 6}),
    ({"order": "NH", "contexts": (3, 2), "tokens": 3}, {"contexts": (2, 1), "tp": 2}),
]


@pytest.mark.parametrize("tokens", [1, 5, 24, 47])
@pytest.mark.parametrize("way", ["exact", "whole"])
@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_requests_take_what_is_counted(ours: dict[str, Any], theirs: dict[str, Any], way: str, tokens: int) -> None:
    """Also where blocks of sources are left out that nothing is needed of, and where the last one is not full."""
    options: dict[str, Any] = {"whole": True} if way == "whole" else {}
    sources, destinations = engine("prefill", blocks=40, **theirs), engine("decode", blocks=40, **ours)
    for plan in plans_of(sources, destinations, 1 << 20, **options):
        found = plan.cost(tokens)
        request: dict[str, Any] = {"local": SCATTERED, "remote": SCATTERED, "tokens": (0, tokens)}
        chunks = list(plan.bind(**request))
        specs = [spec for chunk in chunks for spec in chunk.specs]
        lengths = Counter(length for spec in specs for length in spec.descriptors()[0][:, 1].tolist())
        moved = sum(spec.num_bytes for spec in specs)
        needed = sum(spec.num_bytes for spec in plan.direct.bind(**request))
        assert found.transfers.lengths == lengths
        assert [*found.transfers.lengths] == sorted(lengths)
        assert found.transfers.num_ids == sum(spec.local_ids.size for spec in specs)
        assert found.transfers.num_bytes == moved
        assert found.read_amplification == (moved / needed if needed else 1)
        assert found.direct.num_descriptors == sum(spec.num_descriptors for spec in plan.direct.bind(**request))
        assert found.num_chunks == max(len(chunks), 1)
        assert found.num_copies >= sum(copy.num_origins for chunk in chunks for copy in chunk.copies)


def test_chunks_and_copies_are_counted_by_windows() -> None:
    """Two blocks at a time, and in each window one copy of each layer; two where a run is cut."""
    (local,), sources = engine("decode", blocks=40, order="NH"), engine("prefill", blocks=40)
    plan = staged(local, sources, 2 * ONE_BLOCK)
    assert plan.num_positions == 8
    assert [(found.num_chunks, found.num_copies) for found in map(plan.cost, (8, 9, 24))] == [(1, 2), (2, 8), (3, 6)]
    assert plan.cost(8).staging_bytes == 2 * ONE_BLOCK
    assert plan.cost().direct.tokens == 4


def test_states_are_counted_once() -> None:
    """For any number of tokens, also none; ``whole`` amplifies reads of states as of tokens."""
    for whole, size in ((False, 16), (True, 32)):
        plan = staged(states("decode", (1, 3)), [states("prefill", (0, 4))], whole=whole)
        found = [plan.cost(tokens) for tokens in (0, 1, 2)]
        assert [each.transfers.num_bytes for each in found] == [size, 2 * size, 3 * size]
        assert {each.read_amplification for each in found} == {size / 16}


def test_a_plan_that_moves_nothing_takes_nothing() -> None:
    """No chunks, and no amplification."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    found = staged(local, sources, not_transferred=["layers.0", "layers.1"]).cost(4)
    assert (found.transfers.num_bytes, found.num_chunks, found.num_copies, found.staging_bytes) == (0, 0, 0, 0)
    assert found.read_amplification == 1
    assert str(found) == (
        "4 tokens directly: no bytes\n4 tokens staged: no bytes\n"
        "  at most 0 local copies in 0 chunks, 0 bytes of staging memory"
    )


def test_a_cost_prints_both_ways() -> None:
    """Descriptors and bytes of either way, copies, chunks, memory and, where there is any, amplification."""
    plan = staged(engine("decode", tp=2, order="NH")[0], engine("prefill"), whole=True)
    assert repr(plan.cost(8)) == "<StagedCost of 8 tokens: 4 descriptors, 32 directly>"
    assert str(plan.cost(8)) == (
        "8 tokens directly: 512 bytes in 32 descriptors of 16 bytes\n"
        "8 tokens staged: 1024 bytes in 4 descriptors of 256 bytes\n"
        "  at most 2 local copies in 1 chunk, 1048576 bytes of staging memory\n"
        "  read amplification: 2 bytes read for each byte needed"
    )
