"""Tails: what a destination's blocks hold behind the range of a request."""

from __future__ import annotations

import pytest

from kvplan import Blocks, KVPlanError, plan_reads, tails
from tests.describe.test_blocks import states
from tests.small import HEAD_BYTES, engine


def addresses(ranges):
    """Every byte of some ranges, each of which it has once."""
    every = [at for start, length, _ in ranges.tolist() for at in range(start, start + length)]
    assert len(set(every)) == len(every)
    return set(every)


@pytest.mark.parametrize("order", ["HN", "NH"])
@pytest.mark.parametrize("stop", [1, 4, 10, 16])
def test_what_is_written_and_the_tail_are_all_of_the_blocks(order, stop):
    """Tail and written bytes share nothing, and together they are the request's blocks, lookahead block included."""
    (mine,), (other,) = engine("d", order=order), engine("p", tokens=6)
    blocks = {"attn": Blocks([7, 2, 9, 4])}
    (spec,) = plan_reads(mine, [other]).bind(local=blocks, remote={"attn": Blocks([1, 2, 3])}, tokens=(0, stop))
    written = addresses(spec.descriptors()[0])
    found = tails(mine, blocks, (0, stop))
    tail = set().union(*(addresses(ranges) for ranges in found.values()))
    assert list(found) == ["layers.0", "layers.1"]
    assert not written & tail
    assert len(written | tail) == 4 * 2 * 4 * 4 * HEAD_BYTES
    assert len(tail) == (16 - stop) * 2 * 4 * HEAD_BYTES


def test_runs_of_a_tail_are_joined():
    """Token-major blocks that follow each other have one run a layer; head-major ones one a head."""
    blocks = {"attn": Blocks([5, 6])}
    (tokens,), (heads,) = engine("d", order="NH"), engine("d", order="HN")
    assert tails(tokens, blocks, (0, 3))["layers.1"].shape == (1, 3)
    assert tails(heads, blocks, (0, 3))["layers.1"].tolist()[0][1] == HEAD_BYTES
    assert tails(heads, blocks, (0, 8))["layers.0"].shape == (0, 3)


def test_a_tail_under_a_context_counts_the_rank_s_own_slots():
    """Of positions 0 to 8, rank 0 of two holds five, rank 1 four; each has two blocks of four slots."""
    for worker, held in zip(engine("d", contexts=(2, 1)), (5, 4), strict=True):
        found = tails(worker, {"attn": Blocks([0, 3])}, (0, 9))
        assert sum(len(addresses(ranges)) for ranges in found.values()) == (8 - held) * 2 * 4 * HEAD_BYTES


def test_groups_without_a_table_or_a_range_have_no_tail():
    """All that such a group lists was moved, or nothing of it is the request's."""
    (mine,) = engine("d")
    assert tails(mine, {"attn": Blocks([1])}, None) == {}
    assert tails(mine, {}, (0, 3)) == {}
    state = states("d", 4)
    assert tails(state, {"ssm": Blocks([1, 2])}, (0, 9)) == {}
    assert tails(state, {"ssm": Blocks([1, 2])}, {"ssm": (0, 1)})["layers.0.ssm"].tolist() == [[(1 << 40) + 64, 32, 0]]


def test_a_source_need_not_have_the_tail():
    """The source's blocks may end where the range does; the destination's tail is behind it all the same."""
    (mine,), (other,) = engine("d", tokens=12), engine("p", tokens=4)
    (spec,) = plan_reads(mine, [other]).bind(
        local={"attn": Blocks([3])}, remote={"attn": Blocks([8, 6])}, tokens=(0, 7)
    )
    assert spec.num_bytes == 7 * 2 * 4 * HEAD_BYTES
    assert len(addresses(tails(mine, {"attn": Blocks([3])}, (0, 7))["layers.0"])) == 5 * 4 * HEAD_BYTES


@pytest.mark.parametrize(
    ("blocks", "tokens", "message"),
    [
        ({"attn": Blocks([10])}, (0, 1), "block ids below 10"),
        ({"attn": Blocks([1, 1])}, (0, 1), "each destination block once"),
        ({"atn": Blocks([1])}, (0, 1), "a group of 'attn', got 'atn'"),
        ({"attn": [1]}, (0, 1), "expected Blocks"),
        ({"attn": Blocks([1])}, (2, 1), "start <= stop"),
        ({"attn": Blocks([1])}, {"atn": (0, 1)}, "a group of 'attn', got 'atn'"),
    ],
)
def test_a_bad_request_is_refused(blocks, tokens, message):
    """Block tables and ranges are checked as bind checks them."""
    with pytest.raises(KVPlanError, match=message):
        tails(engine("d")[0], blocks, tokens)
