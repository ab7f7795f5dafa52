"""Handoffs survive JSON, hostile ones are refused, and ranges hold what decode attends to."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Blocks, KVPlanError
from kvplan.protocol import CacheGroup, Handoff, Source
from kvplan.protocol.groups import WholeBlocks, whole_blocks
from kvplan.protocol.handoff import PARAMS, PURPOSE, SIGNATURE
from kvplan.protocol.keys import SharedKey
from tests.blocking import KEY

SOURCE = Source("prefill", "a1", "10.0.0.1", 5600)
HANDOFF = Handoff(
    SOURCE, "request 1 0", 40, "8f2c", {"group0": Blocks([12, 5, 31])}, {"group0": 16}, {30: "51aa", 20: "d104"}
)


@given(st.lists(st.one_of(st.just(0), st.integers(1, 1000)), max_size=12), st.integers(0, 5))
def test_tables_survive(ids: list[int], first: int) -> None:
    """The ordinals of all blocks that are not null, and their ids, are the same after JSON."""
    table = Blocks(ids, first, null=0)
    handoff = Handoff(SOURCE, "r", 40, "8f2c", {"g": table})
    read = Handoff.of_params(json.loads(json.dumps(handoff.params(KEY))), KEY).blocks["g"]
    expected = [(first + i, block) for i, block in enumerate(ids) if block]
    assert [*zip(read.ordinals.tolist(), read.ids.tolist(), strict=True)] == expected


def test_a_window_is_short() -> None:
    """Null blocks before a window are not listed, so a long request's handoff stays short."""
    params = Handoff(SOURCE, "r", 9, "8f2c", {"g": Blocks([0] * 1000 + [7, 0, 9], null=0)}).params(KEY)
    assert params["remote_block_ids"] == {"g": [1000, [7, -1, 9]]}


def test_a_prefix_may_be_the_whole() -> None:
    """Its length is one of the handoff's own positions, the last one included."""
    whole = Handoff(SOURCE, "r", 40, "8f2c", {}, prefixes={40: "51aa"})
    assert Handoff.of_params(whole.params(KEY), KEY) == whole


def test_all_else_survives() -> None:
    """Every field but the tables is equal after JSON, and other parameters are ignored."""
    read = Handoff.of_params(json.loads(json.dumps({**HANDOFF.params(KEY), "do_remote_prefill": True})), KEY)
    assert (read.source, read.lease, read.num_tokens, read.prompt) == (SOURCE, "request 1 0", 40, "8f2c")
    assert (read.kept, read.prefixes) == ({"group0": 16}, {30: "51aa", 20: "d104"})


def test_equal_handoffs_have_one_signature() -> None:
    """In all processes, where sets have other orders: one engine signs, and another one compares."""
    assert (
        HANDOFF.params(SharedKey.of(b"a secret of all engines"))["remote_signature"]
        == "a9356fbb50a78fae4a152aba950e155e0ee97ad20ef2958eec762ffe3e637dc3"
    )


def test_another_prompt_is_refused() -> None:
    """A handoff serves the prompt that it was computed of, and no other."""
    HANDOFF.check_prompt("8f2c")
    with pytest.raises(KVPlanError, match=r"PROMPT: cannot read 'request 1 0' .* digest 8f2c, got one of digest aa"):
        HANDOFF.check_prompt("aa")


@pytest.mark.parametrize(
    ("digests", "num_shared"),
    [({40: "8f2c"}, 40), ({30: "51aa", 20: "d104"}, 30), ({20: "d104"}, 20), ({40: "d104", 30: "8f2c"}, None)],
)
def test_the_longest_shared_prefix_is_read(digests: dict[int, str], num_shared: int | None) -> None:
    """A prompt that begins with fewer of the computed tokens shares those; without any it is another prompt."""
    digest_of = defaultdict(lambda: "-", digests).__getitem__
    if num_shared is None:
        with pytest.raises(KVPlanError, match=r"PROMPT: .* digest 8f2c, got one of digest d104"):
            HANDOFF.count_shared(digest_of)
    else:
        assert HANDOFF.count_shared(digest_of) == num_shared


@pytest.mark.parametrize("key", PARAMS)
def test_a_handoff_lacks_nothing(key: str) -> None:
    """Every key is needed."""
    params = HANDOFF.params(KEY)
    del params[key]
    with pytest.raises(KVPlanError, match=f"KEY: .*'{key}'"):
        Handoff.of_params(params, KEY)


def signed(params: Any) -> Any:
    """Parameters as an engine with the key would sign them."""
    try:
        signature = KEY.sign(
            PURPOSE, json.dumps({key: params[key] for key in PARAMS}, sort_keys=True, separators=(",", ":")).encode()
        )
    except (TypeError, ValueError, KeyError, RecursionError):
        return params
    return {**params, SIGNATURE: signature}


WRONG: list[tuple[str, Any, str]] = [
    ("remote_host", "", "NAME"),
    ("remote_engine_id", None, "TYPE"),
    ("remote_start", 7, "TYPE"),
    ("remote_port", 1 << 16, "RANGE"),
    ("remote_port", True, "TYPE"),
    ("remote_lease", ["r"], "TYPE"),
    ("remote_lease", "two\nlines", "NAME"),
    ("remote_num_tokens", -1, "RANGE"),
    ("remote_prompt", None, "TYPE"),
    ("remote_prompt", "", "NAME"),
    ("remote_kept", [], "TYPE"),
    ("remote_kept", {"g": -1}, "RANGE"),
    ("remote_kept", {"of no table": 1}, "NAME"),
    ("remote_kept", {"g": 1.5}, "TYPE"),
    ("remote_kept", {"": 1}, "NAME"),
    ("remote_prefixes", {"30": "51aa"}, "TYPE"),
    ("remote_prefixes", [[30]], "TYPE"),
    ("remote_prefixes", [[41, "51aa"]], "RANGE"),
    ("remote_prefixes", [[30, ""]], "NAME"),
    ("remote_prefixes", [[30, "51aa"]] * 17, "RANGE"),
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
    """Parameters come with a request, and those that were not signed are not read; others are untrusted data too."""
    with pytest.raises(KVPlanError) as caught:
        Handoff.of_params(signed({**HANDOFF.params(KEY), key: value}), KEY)
    assert caught.value.code == code
    with pytest.raises(KVPlanError, match="MESSAGE: cannot read a handoff"):
        Handoff.of_params({**HANDOFF.params(KEY), key: value}, KEY)


@given(st.integers(0, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_exactly_what_is_attended_to_moves(start: int, length: int, window: int | None) -> None:
    """A position moves if the token at the stop, which decode computes, or a later one attends to it."""
    stop = start + length
    low = min(max(start, CacheGroup.of_window(16, window).attended(stop)), stop)
    tokens = range(stop, stop + 60)
    seen = [p for p in range(start, stop) if window is None or any(p > token - window for token in tokens)]
    assert [*range(low, stop)] == seen


@given(
    stop=st.integers(1, 200),
    num_cached_blocks=st.integers(0, 5),
    window=st.integers(1, 80),
    size=st.sampled_from([1, 4, 16, 48]),
    source_size=st.sampled_from([1, 4, 16, 48]),
    extra=st.integers(0, 20),
)
def test_whole_blocks_hold_what_a_prefix_cache_keeps(
    stop: int, num_cached_blocks: int, window: int, size: int, source_size: int, extra: int
) -> None:
    """All that is attended to is read, nothing that is cached, and each block from ``first_whole`` on as a whole."""
    first = min(num_cached_blocks * size, stop // size * size)
    low = max(0, stop - window + 1)  # what the token at ``stop`` attends to
    listed = low // size * size  # engines free whole blocks
    kept = max(0, low - extra) // source_size * source_size
    whole = whole_blocks((first, stop), low, size, listed, kept)
    read = set(range(whole.start, whole.stop))
    assert set(range(max(first, low), stop)) <= read
    assert read <= set(range(max(first, listed, kept), stop))
    blocks = range(-(-max(first, listed) // size), stop // size)  # those that fill up, and are listed here
    cached = [block for block in blocks if block * size >= whole.first_whole]
    assert set(range(min(cached, default=0) * size, (max(cached, default=-1) + 1) * size)) <= read
    if kept <= max(first, listed):
        assert len(cached) == len(blocks)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [(0, (32, 100, 32)), (32, (32, 100, 32)), (36, (36, 100, 64)), (37, (37, 100, 64)), (38, None), (128, None)],
)
def test_positions_that_a_source_lacks(kept: int, expected: tuple[int, int, int] | None) -> None:
    """A block of which the source has a part is read in part and named; a position of the window has to be there."""
    if expected is None:
        with pytest.raises(KVPlanError, match=f"BLOCKS: .* positions from 37 on, got those from {kept} on"):
            whole_blocks((0, 100), 37, 32, 32, kept)
    else:
        assert whole_blocks((0, 100), 37, 32, 32, kept) == WholeBlocks(*expected)


@pytest.mark.parametrize(
    ("group", "attended", "first_kept"),
    [
        ("attn", 37, 0),
        ("swa", 37, 16),
        ("chunked", 70, 64),
        ("another", 37, 16),
        ("another", 70, 64),
        ("another", 9, 0),
    ],
)
def test_the_first_position_that_is_kept_for_a_group(group: str, attended: int, first_kept: int) -> None:
    """That of its name, or of any group that has all that is attended to. A table without one is kept from 0 on."""
    tables = {name: Blocks([1]) for name in ("attn", "swa", "chunked")}
    handoff = Handoff(SOURCE, "r", 100, "8f2c", tables, kept={"swa": 16, "chunked": 64})
    assert handoff.first_kept(group, attended) == first_kept


def test_nothing_attended_to_needs_nothing() -> None:
    """After the last token of an attention chunk, nothing of it is read, whatever the source has freed."""
    assert whole_blocks((0, 64), 64, 16, 64, 64) == WholeBlocks(64, 64, 64)
