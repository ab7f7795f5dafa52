"""Block tables: their two forms, gaps, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from kvplan import Axis, Blocks, Group, KVPlanError, Region, View, Worker, plan_reads, plan_writes, verify
from tests.small import engine

STATES = (Axis("head", 0, 4, 4, 8), Axis("dim", 0, 4, 4, 2))


def states(name, blocks):
    """A worker with one state of 32 bytes a block."""
    view = View("layers.0.ssm", "ssm", "ssm", "bfloat16", STATES, blocks, 32)
    return Worker(name, 0, [Region("ssm", 1 << 40, 32 * blocks)], [Group("ssm")], [view])


def moved(plan, local, remote, tokens=None):
    """The ids that the only spec of a request moves, after verification."""
    request = {"local": {"attn": local}, "remote": {"attn": remote}, "tokens": tokens}
    report = verify(plan, **request)
    assert report.ok, report
    (spec,) = plan.bind(**request)
    return spec


@pytest.mark.parametrize(
    "text",
    [
        "Blocks([3, 1, 2], first=4)",
        "Blocks([], first=7)",
        "Blocks([0, 0, 5, 0, 6, 0], first=2, null=0)",
        "Blocks([9, 9], null=9)",
        "Blocks([5, 9], ordinals=[1024, 2048])",
    ],
)
def test_the_repr_makes_the_same_table_and_so_does_a_pickle(text):
    """All that a table says is in its repr."""
    blocks = eval(text)
    assert repr(blocks) == text
    copy = pickle.loads(pickle.dumps(blocks))
    assert repr(copy) == text
    assert not copy.ids.flags.writeable
    assert (copy.listed, copy.first, copy.stop) == (blocks.listed, blocks.first, blocks.stop)


def test_null_entries_are_no_blocks():
    """What is left of a table with nulls at its ends is consecutive; its listing still has them."""
    blocks = Blocks([0, 0, 7, 3, 0], null=0)
    assert blocks.ids.tolist() == [7, 3]
    assert blocks.ordinals.tolist() == [2, 3]
    assert (blocks.first, blocks.stop, blocks.listed, blocks.has_gaps) == (2, 4, (0, 5), True)
    assert not Blocks([7, 3], null=0).has_gaps


def test_a_window_moves_the_blocks_that_both_sides_kept():
    """One range for the whole prompt: nothing moves to null blocks, though the source has older ones."""
    (mine,), (other,) = engine("d"), engine("p")
    spec = moved(plan_reads(mine, [other]), Blocks([0, 0, 7, 3], null=0), Blocks([4, 5, 6, 8]), (0, 14))
    assert spec.num_bytes == 6 * 2 * 4 * 16  # positions 8 to 13, 2 layers of 4 heads of 16 bytes


def test_a_null_block_of_the_source_is_never_read():
    """A destination that wants what the source's window has left gets an error, not what is in the null block."""
    (mine,), (other,) = engine("d"), engine("p")
    plan = plan_reads(mine, [other])
    with pytest.raises(KVPlanError, match=r"expected blocks \[1, 4\) of the request to be listed, got \[2, 4\)"):
        plan.bind(
            local={"attn": Blocks([0, 9, 7, 3], null=0)}, remote={"attn": Blocks([0, 0, 5, 6], null=0)}, tokens=(0, 16)
        )


def test_windows_of_unequal_blocks_meet_at_the_position_where_the_window_begins():
    """Blocks of 4 that begin at position 8 fill blocks of 12 that begin at 0, from the window's first position on."""
    (mine,), (other,) = engine("d", tokens=12), engine("p", tokens=4)
    spec = moved(plan_reads(mine, [other]), Blocks([6, 2]), Blocks([0, 0, 5, 6, 1], null=0), (9, 20))
    assert spec.num_bytes == 11 * 2 * 4 * 16


def test_a_gap_in_the_middle_of_a_table():
    """Blocks pair by ordinal around a gap, with blocks of other sizes and contexts on the other side."""
    (mine,) = engine("d", tokens=4)
    sources = engine("p", tokens=6, contexts=(2, 3))
    plan = plan_reads(mine, sources)
    request: dict[str, Any] = {
        "local": {"attn": Blocks([7, 0, 0, 3, 0, 9], first=1, null=0)},
        "remote": {"attn": Blocks([4, 2, 8])},
        "tokens": (5, 27),
    }
    report = verify(plan, **request)
    assert report.ok, report
    assert report.num_bytes == (3 + 4 + 3) * 2 * 4 * 16  # positions 5-7, 16-19 and 24-26


def test_a_gap_of_the_source_is_named():
    """A block that the destination wants and the source does not have."""
    (mine,), (other,) = engine("d"), engine("p")
    plan = plan_reads(mine, [other])
    with pytest.raises(KVPlanError, match="every block that the other side has, got none for block 1 of the request"):
        plan.bind(local={"attn": Blocks([1, 2, 3])}, remote={"attn": Blocks([5, 0, 6], null=0)}, tokens=(0, 12))
    assert moved(plan, Blocks([1, 0, 3], null=0), Blocks([5, 0, 6], null=0), (0, 12)).num_descriptors == 4


def test_a_range_beyond_a_table_with_gaps_is_refused():
    """Null blocks are named one by one; blocks that the table does not speak of are an error as ever."""
    (mine,), (other,) = engine("d"), engine("p")
    plan = plan_reads(mine, [other])
    with pytest.raises(KVPlanError, match=r"expected blocks \[0, 3\) of the request to be listed, got \[0, 2\)"):
        plan.bind(local={"attn": Blocks([0, 7], null=0)}, remote={"attn": Blocks([4, 5, 6])}, tokens=(0, 9))


@pytest.mark.parametrize("at", [0, 5, 9, 99])
def test_an_empty_range_needs_no_block(at):
    """Zero positions are none to list, also at a gap and beyond a table with gaps."""
    (mine,), (other,) = engine("d"), engine("p")
    spec = moved(plan_reads(mine, [other]), Blocks([0, 7], null=0), Blocks([4, 5, 6]), (at, at))
    assert spec.local_ids.size == spec.remote_ids.size == 0


def test_states_pair_by_the_positions_at_which_they_were_kept():
    """Of the checkpoints of both sides, those move that the destination lists; in whole, whatever the range."""
    plan = plan_reads(states("d", 10), [states("p", 20)])
    ours, theirs = Blocks([3, 8], ordinals=[4096, 1024]), Blocks([11, 12, 13], ordinals=[1024, 2048, 4096])
    for tokens in (None, (0, 3000)):  # a range for all token groups is none for states
        (spec,) = plan.bind(local={"ssm": ours}, remote={"ssm": theirs}, tokens=tokens)
        assert spec.local_ids.tolist() == [8, 3]
        assert spec.remote_ids.tolist() == [11, 13]
        assert verify(plan, local={"ssm": ours}, remote={"ssm": theirs}, tokens=tokens).ok
    (spec,) = plan.bind(local={"ssm": ours}, remote={"ssm": theirs}, tokens={"ssm": (4096, 4097)})
    assert spec.local_ids.tolist() == [3]


def test_the_last_state_alone_pairs_with_the_last_of_a_table():
    """A destination that keeps one state takes the one that it names, from the middle of the source's table."""
    plan = plan_reads(states("d", 10), [states("p", 20)])
    (spec,) = plan.bind(local={"ssm": Blocks([5], first=2)}, remote={"ssm": Blocks([0, 17, 4], null=0)})
    assert (spec.local_ids.tolist(), spec.remote_ids.tolist()) == ([5], [4])


def test_writes_have_gaps_where_the_destination_has_them():
    """The gaps that count are the destination's, whichever side plans."""
    (mine,), (other,) = engine("p"), engine("d")
    spec = moved(plan_writes(mine, [other]), Blocks([4, 5, 6]), Blocks([0, 9, 2], null=0), (0, 12))
    assert spec.num_bytes == 8 * 2 * 4 * 16


def test_ordinals_far_apart_cost_what_their_number_costs():
    """Two states at the ends of the position space need no list of what is between them."""
    far = (1 << 48) - 1
    plan = plan_reads(states("d", 10), [states("p", 20)])
    tables = {"ssm": Blocks([3, 8], ordinals=[0, far])}, {"ssm": Blocks([1, 2], ordinals=[0, far])}
    (spec,) = plan.bind(local=tables[0], remote=tables[1])
    assert np.array_equal([spec.local_ids, spec.remote_ids], [[3, 8], [1, 2]])


@pytest.mark.parametrize("ordinals", [[], [0], [0, 1], [1]])
def test_ordinals_that_end_before_the_range_are_refused(ordinals):
    """A range beyond the last ordinal would move in part, unless the table says that the blocks there are gaps."""
    (mine,), (other,) = engine("d"), engine("p")
    plan, theirs, ids = plan_reads(mine, [other]), Blocks([4, 5, 6]), range(len(ordinals))
    expected = rf"expected blocks \[0, 3\) of the request to be listed, got \[0, {max(ordinals, default=-1) + 1}\)"
    with pytest.raises(KVPlanError, match=f"BLOCKS: cannot bind local group 'attn': {expected}"):
        moved(plan, Blocks(ids, ordinals=ordinals), theirs, (0, 12))
    spec = moved(plan, Blocks(ids, ordinals=ordinals, listed=(0, 3)), theirs, (0, 12))
    assert spec.num_bytes == len(ordinals) * 4 * 2 * 4 * 16
    assert moved(plan, Blocks([7], ordinals=[2]), theirs, (0, 12)).num_bytes  # what a window has passed


@pytest.mark.parametrize("listed", [(1, 9), (0, 5), (9, 3), (0, 1, 2), 7, (0, 1 << 49), (False, 9)])
def test_what_a_table_covers_has_all_its_ordinals(listed):
    """``listed`` is a range around the ordinals."""
    with pytest.raises(KVPlanError, match=r"(BLOCKS|TYPE|RANGE): cannot read (a block table|listed of Blocks)"):
        Blocks([7, 8], ordinals=[0, 5], listed=listed)
    with pytest.raises(KVPlanError, match="expected listed together with ordinals only"):
        Blocks([7, 8], listed=(0, 9))


@pytest.mark.parametrize(
    "values", [np.ma.array([1, 2], mask=[False, True]), [True, 2], [[1], [2, 3]], np.ones(2, bool)]
)
def test_entries_that_are_no_ids_are_refused(values):
    """A masked entry, or a bool among integers, is no block id."""
    with pytest.raises(KVPlanError, match="TYPE: cannot read a block table: expected a flat sequence of integers"):
        Blocks(values)


def test_tensors_that_are_no_numbers_in_host_memory_are_refused():
    """Tensors of torch that numpy cannot read end in a TYPE error, not in the framework's own."""
    torch = pytest.importorskip("torch")
    indices = torch.ones(3).to_sparse()
    for values in (torch.empty(2, dtype=torch.int64, device="meta"), indices, torch.ones(2, dtype=torch.bfloat16)):
        with pytest.raises(KVPlanError, match="TYPE: cannot read a block table: expected a flat sequence of integers"):
            Blocks(values)
    assert Blocks(torch.tensor([3, 1])).ids.tolist() == [3, 1]
