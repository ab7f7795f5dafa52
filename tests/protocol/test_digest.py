"""Digests of workers are compared part by part, whatever each of them holds."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Blocks, Context, Group, KVPlanError
from kvplan.describe.blocks import Range
from kvplan.protocol import digest as definition
from kvplan.protocol.digest import (
    DIVIDED,
    BlockPositions,
    Positions,
    TensorDigests,
    divided_axes,
    joined,
    keys,
    mismatch,
    packed_axis,
    parts_of,
    to_json,
)

ALL = Context()
HEADS = 4


def held(
    values: Any,
    span: Range = (0, 8),
    heads: Range = (0, HEADS),
    context: Context = ALL,
    within: Context = ALL,
    name: str = "layers.0",
    wide: int = 7,
) -> TensorDigests:
    """What a worker has of ``values``, (positions, heads) uint64; ``wide`` is its coverage."""
    positions = Positions(context, within, (span,))
    parts = np.arange(*heads)
    # One row for each position, one column for each head.
    token_keys = keys("token", positions.listed)[:, None]
    digests = (values[positions.listed][:, parts] * token_keys).sum(axis=0)
    coverage = np.full(parts.size, wide, np.uint64)
    return TensorDigests(name, positions, {"head": HEADS}, parts, coverage, digests)


def values() -> Any:
    """Eight positions of four heads."""
    return np.random.default_rng(1).integers(1, 1 << 63, (8, HEADS), np.uint64)


def checked(sources: list[TensorDigests], destinations: list[TensorDigests]) -> str:
    """The error of a comparison by way of JSON, each worker by itself."""
    offered = [json.loads(json.dumps(to_json([worker]))) for worker in sources]
    received = [json.loads(json.dumps(to_json([worker]))) for worker in destinations]
    return str(mismatch(offered, received))


@given(st.text(min_size=1), st.lists(st.integers(0, (1 << 48) - 1), min_size=1))
def test_keys_are_odd(axis: str, coordinates: list[int]) -> None:
    """An odd key loses no bit of what it multiplies."""
    assert (keys(axis, np.array(coordinates)) % 2 == 1).all()


def test_keys_differ() -> None:
    """Of a million coordinates of three axes no two have one key, and all bits vary."""
    axes = [keys(axis, np.arange(1 << 20)) for axis in ("token", "head", "dim")]
    numbers = np.sort(np.concatenate(axes))
    assert (numbers[1:] != numbers[:-1]).all()
    for bit in range(1, 64):
        share = (numbers >> np.uint64(bit) & np.uint64(1)).mean()
        assert 0.49 < share < 0.51


@pytest.mark.parametrize("size, ranks", [(8, 8), (40, 8), (48, 16), (3072, 6), (8192, 32), (10, 5)])
def test_equal_shares_are_made_of_parts(size: int, ranks: int) -> None:
    """The shares of so many ranks begin and end where parts do."""
    assert size // ranks % (size // parts_of(size)) == 0


def test_axes() -> None:
    """Axes of one coordinate do not count; the longest is packed, of equal ones the last name."""
    sizes = {"token": 512, "head": 8, "kv": 2, "key": 128, "value": 128, "channel": 1}
    assert divided_axes(sizes, DIVIDED) == {"head": 8}
    assert packed_axis(sizes, DIVIDED) == "value"
    assert packed_axis({"token": 16, "head": 8}, DIVIDED) is None


@given(
    st.integers(1, 5),
    st.integers(0, 3),
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
)
def test_positions_of_a_range(size: int, rank: int, span: list[int], spread: Any) -> None:
    """Keys stand in the slots of exactly the positions that both contexts and the range hold."""
    context = Context(rank % spread[0], *spread[:2])
    within = Context(rank % spread[2], *spread[2:])
    group = Group("attn", size, context)
    table = Blocks(range(41))
    paged = BlockPositions.of(group, table, (span[0], span[1]), within)
    expected = [at for at in range(*span) if at in context and at in within]
    assert paged.positions.listed.tolist() == expected
    assert sorted(paged.keys[paged.keys > 0]) == sorted(keys("token", np.array(expected, np.int64)))
    assert Positions.of_values(json.loads(json.dumps(paged.positions.values()))) == paged.positions
    # Slots before an ordinal have the positions of the ordinals before it.
    first = [sum(at in context for at in range(position)) // size for position in expected]
    assert paged.ids.tolist() == sorted({*first})


def test_gaps_have_no_positions() -> None:
    """Blocks that a window has left are no part of a digest, nor are ordinals without a state."""
    group = Group("swa", 4)
    paged = BlockPositions.of(group, Blocks([0, 0, 7, 3], null=0), (5, 14), ALL)
    assert (paged.ids.tolist(), paged.positions.slots) == ([7, 3], ((8, 14),))
    states = BlockPositions.of(Group("state"), Blocks([5, 9], ordinals=[2, 7]), None, ALL)
    assert (states.ids.tolist(), states.positions.slots) == ([5, 9], ((2, 3), (7, 8)))
    nothing = BlockPositions.of(group, Blocks([7]), (2, 2), ALL)
    assert (nothing.ids.size, nothing.positions.key) == (0, 0)


def test_equal_digests() -> None:
    """Heads may be divided, positions spread, ranges cut, replicas several: the sums are equal."""
    cache = values()
    whole = [held(cache)]
    halves = [held(cache, heads=(0, 2)), held(cache, heads=(2, 4))]
    overlapping = [held(cache, heads=(0, 3)), held(cache, heads=(1, 4))]
    spread = [held(cache, span=(0, 4), context=Context(rank, 2, 2)) for rank in range(2)]
    ranges = [held(cache, span=(0, 3)), held(cache, span=(3, 8))]
    filtered = [held(cache, within=Context(rank, 2, 1)) for rank in range(2)]
    both = [whole[0], whole[0], *halves, *overlapping, *spread]
    ways = (whole, halves, overlapping, spread, ranges, filtered, both)
    for sources, destinations in itertools.product(ways, ways[:-1]):
        assert checked(sources, destinations) == "None"
    odd_positions = held(cache, (0, 4), context=Context(1, 2))
    assert checked([held(cache, within=Context(1, 2))], [odd_positions]) == "None"
    assert checked(spread, [held(cache, (0, 2), context=Context(0, 2, 2))]).startswith("COVER")


def test_other_digests() -> None:
    """One changed element in any place is found, and told by tensor, head and both digests."""
    cache = values()
    changed = cache.copy()
    changed[5, 2] ^= np.uint64(1 << 63)
    digest = held(cache).digests[2]
    wrong = held(changed).digests[2]
    digests = f"expected the sources' digest {digest:016x}, got {wrong:016x}"
    expected = f"TRANSFER: cannot use layers.0 head 2: {digests}"
    spread = [held(cache, span=(0, 4), context=Context(rank, 2, 2)) for rank in range(2)]
    for sources in ([held(cache)], spread, [held(cache, heads=(0, 2)), held(cache, heads=(2, 4))]):
        assert checked(sources, [held(changed)]) == expected
        assert checked(sources, [held(cache), held(changed)]) == expected
        assert checked(sources, [held(cache, heads=(0, 2))]) == "None"


def test_either_of_unequal_replicas_is_right() -> None:
    """A destination has read one of them, and its plan knows which; a third value is wrong."""
    cache = values()
    replica = cache + np.uint64(1)
    sources = [held(cache), held(replica)]
    assert checked(sources, [held(cache)]) == checked(sources, [held(replica)]) == "None"
    assert checked(sources, [held(cache + np.uint64(2))]).startswith("TRANSFER")


def test_too_many_unequal_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices between replicas, of which there are more than can be tried, are refused."""
    monkeypatch.setattr(definition, "MAX_SUMS", 3)
    cache = values()
    spans = ((0, 4), (4, 8))
    sources = [held(cache + np.uint64(i), span) for span in spans for i in range(2)]
    with pytest.raises(KVPlanError, match=r"^RANGE: .* at most 3 choices between unequal replicas, got 4"):
        checked(sources, [held(cache + np.uint64(9))])


@pytest.mark.parametrize(
    "source",
    [
        held(values(), name="layers.1"),
        held(values(), heads=(0, 1)),
        held(values(), heads=(0, 0)),
        held(values(), span=(0, 7)),
        held(values(), span=(0, 4), context=Context(0, 2)),
        held(values(), wide=8),
    ],
)
def test_digests_of_other_elements(source: TensorDigests) -> None:
    """Where sources have digested other elements, nothing is said about the contents."""
    assert checked([source], [held(values())]).startswith("COVER: cannot compare digests of layers.0 head")


@pytest.mark.parametrize("sources", [[], [{"boxes": [], "digests": []}]])
def test_sources_that_say_nothing_are_not_equal(sources: list[Any]) -> None:
    """An answer without any digest is none of other elements: bytes that are lacking would pass for right ones."""
    assert str(mismatch(sources, [to_json([held(values())])])).startswith("TRANSFER: cannot compare digests")
    assert mismatch(sources, []) is None


def test_replicas_stand_once() -> None:
    """Joined, the digests of equal workers are as long as those of one."""
    whole, half = to_json([held(values())]), to_json([held(values(), heads=(0, 2))])
    assert joined([whole, whole]) == whole
    assert mismatch([joined([half, whole, half])], [whole]) is None
    assert len(joined([half, whole, half])["digests"]) == 2


BAD = [
    (lambda record: record.pop("boxes"), "KEY"),
    (lambda record: record.update(boxes=7), "TYPE"),
    (lambda record: record.update(digests=[[1, 2]]), "TYPE"),
    (lambda record: record["boxes"][0].pop(), "TYPE"),
    (lambda record: record["boxes"][0].__setitem__(0, [[0, 1, 1], [0, 1, 1], [[3, 1]]]), "TYPE"),
    (
        lambda record: record["boxes"][0].__setitem__(0, [[0, 1, 1], [0, 1, 1], [[0, 1 << 40]]]),
        "RANGE",
    ),
    (lambda record: record["boxes"][0].__setitem__(0, [[2, 1, 1], [0, 1, 1], []]), "RANGE"),
    (lambda record: record["boxes"][0].__setitem__(1, {"head": 0}), "RANGE"),
    (lambda record: record["boxes"][0].__setitem__(1, {"": 4}), "NAME"),
    (lambda record: record["boxes"][0].__setitem__(2, [3, 2, 1, 0]), "TYPE"),
    (lambda record: record["boxes"][0].__setitem__(2, [0, 1, 2, 1 << 70]), "RANGE"),
    (lambda record: record["boxes"][0].__setitem__(3, "?"), "TYPE"),
    (lambda record: record["boxes"][0].__setitem__(3, "AAAA"), "SIZE"),
    (lambda record: record["digests"][0].__setitem__(0, ""), "NAME"),
    (lambda record: record["digests"][0].__setitem__(1, 1), "RANGE"),
    (lambda record: record["digests"][0].__setitem__(2, b""), "TYPE"),
]


@pytest.mark.parametrize("change, code", BAD)
def test_bad_digests_are_refused(change: Any, code: str) -> None:
    """Whatever a stranger may write is refused by a code."""
    record = json.loads(json.dumps(to_json([held(values())])))
    change(record)
    with pytest.raises(KVPlanError) as caught:
        mismatch([record], [to_json([held(values())])])
    assert caught.value.code == code


def test_a_record_that_is_no_mapping_is_refused() -> None:
    """A list of digests is no record."""
    with pytest.raises(KVPlanError, match=r"^TYPE"):
        mismatch([[]], [])  # type: ignore[list-item]
