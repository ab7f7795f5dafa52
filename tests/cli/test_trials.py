"""Trials: how a request is placed so that wrongly paired blocks move wrong bytes, and when it is refused."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvplan import Context, Group, KVPlanError, Model, Region, Worker, plan_mesh
from kvplan.cli.trials import (
    DESTINATION_SPREAD,
    SOURCE_SPREAD,
    PlacedRequest,
    Trial,
    blocks_needed,
    memory_needed,
    sampled,
    scattered,
)
from kvplan.models.options import EngineOptions

TINY = Model.from_config(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)


@given(st.integers(1, 300), st.sampled_from([SOURCE_SPREAD, DESTINATION_SPREAD]))
@example(pool=1, spread=SOURCE_SPREAD)
def test_scattered_ids_are_different_and_in_the_pool(pool: int, spread: float) -> None:
    """However many blocks of a pool are used, ids are distinct and in the pool."""
    ids = scattered(pool, pool, spread)
    assert sorted(ids.tolist()) == list(range(pool))


@pytest.mark.parametrize("spread", [SOURCE_SPREAD, DESTINATION_SPREAD])
def test_no_two_blocks_are_neighbours(spread: float) -> None:
    """Consecutive blocks of a request are never neighbours in the pool."""
    pools = range(10, 200)
    assert [pool for pool in pools if np.abs(np.diff(scattered(pool, pool, spread))).min() <= 1] == []


def test_the_two_engines_have_different_tables() -> None:
    """A request's block ids differ between the engines, so that using the wrong table moves wrong bytes."""
    request = PlacedRequest.of(TINY, EngineOptions(), EngineOptions(), (0, 1000))
    assert not np.any(request.local["attn"].ids == request.remote["attn"].ids)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("interleave", [1, 4, 7])
@pytest.mark.parametrize("stop", [0, 1, 5, 29, 64])
def test_needed_blocks_are_counted_position_by_position(size: int, interleave: int, stop: int) -> None:
    """A request needs as many blocks as the fullest context-parallel worker."""
    workers = [
        Worker("e", rank, [Region("kv", 0, 8)], [Group("attn", 4, Context(rank, size, interleave))], [])
        for rank in range(size)
    ]
    held = [sum(p in worker.groups[0].context for p in range(stop)) for worker in workers]
    assert blocks_needed(workers, stop) == {"attn": -(-max(held) // 4)}


def test_a_state_group_needs_one_block() -> None:
    """A state is one block, however long the request."""
    worker = Worker("e", 0, [Region("kv", 0, 8)], [Group("state")], [])
    assert blocks_needed([worker], 1000) == {"state": 1}


def test_given_blocks_are_the_pool() -> None:
    """The pool of an engine has the blocks that its options say."""
    request = PlacedRequest.of(TINY, EngineOptions(blocks=63), EngineOptions(blocks=70), (0, 1000))
    assert request.sources[0].views[0].num_blocks == request.src.blocks == 63
    assert request.destinations[0].views[0].num_blocks == request.dst.blocks == 70


def test_too_few_blocks_are_refused() -> None:
    """A pool that is too small is refused with the number of blocks that the request needs."""
    with pytest.raises(KVPlanError) as caught:
        PlacedRequest.of(TINY, EngineOptions(blocks=62), EngineOptions(), (0, 1000))
    assert caught.value.code == "BLOCKS"
    assert caught.value.details == {"needed": 63, "blocks": 62}


@pytest.mark.parametrize(
    "src", ["tp=2", "dcp=2,tp=4", "block=5,layout=BHLNC", "pp=2,kv=split", "pcp=2,dcp=2,interleave=3"]
)
@pytest.mark.parametrize("tokens", [(0, 33), (7, 30), (8, 8)])
def test_a_trial_moves_the_request_and_is_verified(src: str, tokens: tuple[int, int]) -> None:
    """Between engines that differ, exactly the bytes of the request's positions move."""
    trial = Trial.of(PlacedRequest.of(TINY, EngineOptions.parse(src, "--src"), EngineOptions(), tokens))
    assert trial.report.ok, str(trial.report)
    token_bytes = 2 * 2 * 2 * 16 * 2
    assert sum(pair.num_bytes for pair in trial.pairs) == (tokens[1] - tokens[0]) * token_bytes


@pytest.mark.parametrize(
    ("name", "tokens", "moved"),
    [
        ("gpt-oss-120b", (0, 20_000), {"swa": (19_872, 20_000), "attn": (0, 20_000)}),
        ("gpt-oss-120b", (19_900, 20_000), {"swa": (19_900, 20_000), "attn": (19_900, 20_000)}),
        ("gpt-oss-120b", (0, 140), {"swa": (0, 140), "attn": (0, 140)}),
        ("gpt-oss-120b", (0, 150), {"swa": (16, 150), "attn": (0, 150)}),
    ],
)
def test_layers_with_a_window_move_its_positions(
    name: str, tokens: tuple[int, int], moved: dict[str, tuple[int, int]]
) -> None:
    """Those that the last token attends to, from the start of a block; the destination has no blocks before them."""
    options = EngineOptions(tp=4)
    request = PlacedRequest.of(sampled(Model.shipped(name), 2), options, options, tokens)
    trial = Trial.of(request)
    assert request.tokens == moved
    assert trial.report.ok
    assert trial.report.num_bytes == sum(2 * 8 * 64 * 2 * (stop - start) for start, stop in moved.values())


def memory(request: PlacedRequest) -> int:
    return memory_needed(request, plan_mesh(request.destinations, request.sources))


def test_memory_is_that_of_what_moves() -> None:
    """Verification needs four bytes of label for each byte of the fullest worker, at both ends."""
    request = PlacedRequest.of(TINY, EngineOptions(), EngineOptions(tp=2, block=1 << 10), (100, 130))
    assert memory(request) == 2 * 4 * (30 * 2 * 2 * 16 * 2)


def test_a_state_needs_memory_for_all_of_it() -> None:
    """A state moves whole, whatever the range."""
    model = Model.shipped("falcon-mamba-7b")
    request = PlacedRequest.of(model, EngineOptions(), EngineOptions(), (0, 7))
    assert memory(request) == 2 * 4 * sum(view.block_bytes for view in request.destinations[0].views)


def test_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that needs more than the machine's memory is refused before anything moves; it may need all of it."""
    request = PlacedRequest.of(TINY, EngineOptions(), EngineOptions(), (0, 10))
    needed = memory(request)
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else needed)
    assert Trial.of(request).report.ok
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else needed - 1)
    with pytest.raises(KVPlanError, match=f"MEMORY: cannot carry out the transfer: .*, got {needed} "):
        Trial.of(request)


def test_groups_that_share_memory_have_different_blocks() -> None:
    """No block of a shared pool is in two groups' tables; a pool with too few blocks for all is refused."""
    model = Model.shipped("granite-4.0-h-tiny")
    request = PlacedRequest.of(model, EngineOptions(shared=True), EngineOptions(), (0, 100))
    ids = [int(i) for blocks in request.remote.values() for i in blocks.ids]
    assert len(request.remote) == 10
    assert len(ids) == len(set(ids)) == 9 + 7
    with pytest.raises(KVPlanError, match="at least 16 blocks, got 15"):
        PlacedRequest.of(model, EngineOptions(shared=True, blocks=15), EngineOptions(), (0, 100))


def test_a_draft_of_the_destination_alone_is_not_transferred() -> None:
    """Draft layers move if both engines have them, and not if only the destination has."""
    draft = EngineOptions(draft="qwen3-0.6b")
    assert len(PlacedRequest.of(TINY, EngineOptions(), draft, (0, 9)).not_transferred) == 28
    assert PlacedRequest.of(TINY, draft, draft, (0, 9)).not_transferred == ()
    trial = Trial.of(PlacedRequest.of(TINY, EngineOptions(), draft, (0, 9)))
    assert trial.report.ok
    assert trial.to_json()["not_transferred"][0] == "draft.0.attn"
