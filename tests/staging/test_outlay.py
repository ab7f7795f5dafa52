"""Outlays: what two legs take, counted without block tables, is what bound requests take."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvplan import Blocks, KVPlanError
from kvplan.staging.plan import StagedPlan
from tests.small import engine
from tests.staged import staged, staged_writes
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


def compare(plan: StagedPlan, tokens: int) -> None:
    """Count, and bind scattered blocks."""
    found = plan.cost(tokens)
    request: dict[str, Any] = {"local": SCATTERED, "remote": SCATTERED, "tokens": (0, tokens)}
    chunks = list(plan.bind(**request))
    specs = [spec for chunk in chunks for spec in chunk.specs]
    lengths = Counter(length for spec in specs for length in spec.descriptors()[0][:, 1].tolist())
    assert found.transfers.lengths == lengths
    assert [*found.transfers.lengths] == sorted(lengths)
    assert found.transfers.num_ids == sum(spec.local_ids.size for spec in specs)
    assert found.transfers.num_bytes == sum(spec.num_bytes for spec in specs)
    assert found.direct.num_descriptors == sum(spec.num_descriptors for spec in plan.direct.bind(**request))
    assert found.num_chunks == len(chunks)
    assert found.num_copies >= sum(copy.num_origins for chunk in chunks for copy in chunk.copies)


@pytest.mark.parametrize("tokens", [1, 5, 24, 47])
@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_reads_take_what_is_counted(ours: dict[str, Any], theirs: dict[str, Any], tokens: int) -> None:
    """Also where blocks of sources are left out, of which nothing is needed, and where the last one is not full."""
    local, sources = engine("decode", blocks=40, **ours)[0], engine("prefill", blocks=40, **theirs)
    for whole in (False, True):
        compare(staged(local, sources, whole=whole), tokens)


@pytest.mark.parametrize("tokens", [5, 24, 47])
@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_writes_take_what_is_counted(ours: dict[str, Any], theirs: dict[str, Any], tokens: int) -> None:
    """For each source, to all destinations."""
    for plan in staged_writes(engine("prefill", blocks=40, **theirs), engine("decode", blocks=40, **ours)):
        compare(plan, tokens)
        assert plan.cost(tokens).excess == 0


def test_chunks_and_copies_are_counted_by_windows() -> None:
    """Two blocks at a time, and in each window one copy of each layer; two where a run is cut."""
    (local,), sources = engine("decode", blocks=40, order="NH"), engine("prefill", blocks=40)
    plan = staged(local, sources, 2 * 2 * 2 * 256)
    assert plan.num_positions == 8
    assert [(found.num_chunks, found.num_copies) for found in map(plan.cost, (8, 9, 24))] == [(1, 2), (2, 8), (3, 6)]
    assert plan.cost(8).staging_bytes == 2 * 2 * 2 * 256
    assert plan.cost().direct.tokens == 4


def test_states_are_counted_once() -> None:
    """Of whatever number of tokens, and none is left out."""
    for whole, size in ((False, 16), (True, 32)):
        plan = staged(states("decode", (1, 3)), [states("prefill", (0, 4))], whole=whole)
        assert [plan.cost(tokens).transfers.num_bytes for tokens in (0, 1, 2)] == [size, 2 * size, 3 * size]


def test_a_plan_that_moves_nothing_takes_nothing() -> None:
    """No chunks, and no excess."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    found = staged(local, sources, not_transferred=["layers.0", "layers.1"]).cost(4)
    assert (found.transfers.num_bytes, found.num_chunks, found.num_copies, found.staging_bytes) == (0, 0, 0, 0)
    assert found.excess == 0
    assert str(found) == (
        "4 tokens in one leg: nothing\n4 tokens in two legs: nothing\n"
        "  at home: at most 0 copies in 0 chunks, in 0 bytes of staging memory"
    )


def test_what_is_too_much_to_count_is_refused() -> None:
    """RANGE, as of a direct plan; TYPE for no number."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    plan = staged(local, sources)
    for code, tokens in (("RANGE", -1), ("TYPE", "8")):
        with pytest.raises(KVPlanError) as refused:
            plan.cost(tokens)  # type: ignore[arg-type]
        assert refused.value.code == code


def test_an_outlay_is_one_short_line() -> None:
    """Outlays print as how many descriptors two legs take, for how many of one."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    assert repr(staged(local, sources).cost(8)) == "<Outlay of 8 tokens: 4 descriptors for 64>"
