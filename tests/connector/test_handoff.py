"""Handoffs survive JSON, hostile ones are refused, and ranges hold what decode attends to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Blocks, KVPlanError
from kvplan.connector import Handoff, Source, attended

SOURCE = Source("prefill", "a1", "10.0.0.1", 5600)
HANDOFF = Handoff(SOURCE, "request 1", 40, 1234.5, {"group0": Blocks([12, 5, 31])})


@given(st.lists(st.one_of(st.just(0), st.integers(1, 1000)), max_size=12), st.integers(0, 5))
def test_tables_survive(ids: list[int], first: int) -> None:
    """The ordinals of all blocks that are not null, and their ids, are the same after JSON."""
    table = Blocks(ids, first, null=0)
    handoff = Handoff(SOURCE, "r", 40, 1.0, {"g": table})
    read = Handoff.of_params(json.loads(json.dumps(handoff.params()))).blocks["g"]
    expected = [(first + i, block) for i, block in enumerate(ids) if block]
    assert [*zip(read.ordinals.tolist(), read.ids.tolist(), strict=True)] == expected


def test_a_window_is_short() -> None:
    """Null blocks before a window are not listed, so a long request's handoff stays short."""
    params = Handoff(SOURCE, "r", 9, 1.0, {"g": Blocks([0] * 1000 + [7, 0, 9], null=0)}).params()
    assert params["remote_block_ids"] == {"g": [1000, [7, -1, 9]]}


def test_all_else_survives() -> None:
    """Every field but the tables is equal after JSON, and other parameters are ignored."""
    read = Handoff.of_params(json.loads(json.dumps({**HANDOFF.params(), "do_remote_prefill": True})))
    assert (read.source, read.request, read.num_tokens, read.deadline) == (SOURCE, "request 1", 40, 1234.5)


@pytest.mark.parametrize("key", HANDOFF.params())
def test_a_handoff_lacks_nothing(key: str) -> None:
    """Every key is needed."""
    params = HANDOFF.params()
    del params[key]
    with pytest.raises(KVPlanError, match=f"KEY: .*'{key}'"):
        Handoff.of_params(params)


WRONG: list[tuple[str, Any, str]] = [
    ("remote_host", "", "NAME"),
    ("remote_engine_id", None, "TYPE"),
    ("remote_start", 7, "TYPE"),
    ("remote_port", 1 << 16, "RANGE"),
    ("remote_port", True, "TYPE"),
    ("remote_request_id", ["r"], "TYPE"),
    ("remote_num_tokens", -1, "RANGE"),
    ("remote_deadline", "soon", "TYPE"),
    ("remote_deadline", float("nan"), "RANGE"),
    ("remote_deadline", True, "TYPE"),
    ("remote_block_ids", [[1, 2]], "TYPE"),
    ("remote_block_ids", {"": [0, [1]]}, "NAME"),
    ("remote_block_ids", {"g": [1, 2, 3]}, "TYPE"),
    ("remote_block_ids", {"g": [0, [1.5]]}, "TYPE"),
    ("remote_block_ids", {"g": [0, [-2]]}, "BLOCKS"),
    ("remote_block_ids", {"g": [-1, [-1, 3]]}, "RANGE"),
    ("remote_block_ids", {"g": [0, [1 << 40]]}, "BLOCKS"),
    ("remote_block_ids", {"g": [0, [1] * ((1 << 22) + 1)]}, "RANGE"),
]


@pytest.mark.parametrize(("key", "value", "code"), WRONG, ids=[f"{key} {i}" for i, (key, _, _) in enumerate(WRONG)])
def test_a_strangers_values_are_refused(key: str, value: Any, code: str) -> None:
    """Parameters come with a request, so they are read as untrusted data."""
    with pytest.raises(KVPlanError) as caught:
        Handoff.of_params({**HANDOFF.params(), key: value})
    assert caught.value.code == code


@given(st.integers(0, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_exactly_what_is_attended_to_moves(start: int, length: int, window: int | None) -> None:
    """A position moves if the token at the stop, which decode computes, or a later one attends to it."""
    stop = start + length
    low, high = attended(start, stop, window)
    tokens = range(stop, stop + 60)
    seen = [p for p in range(start, stop) if window is None or any(p > token - window for token in tokens)]
    assert [*range(low, high)] == seen
