"""One request in parts: chunks, several sources, both directions, verified together."""

import attrs
import pytest

from kvplan import (
    Blocks,
    KVPlanError,
    Region,
    certify,
    plan_mesh,
    plan_reads,
    plan_writes,
    verify,
    verify_together,
)
from kvplan.staging import stage
from tests.small import engine

TOKEN_BYTES = 2 * 4 * 16  # 2 layers of 4 heads


def part(plan, local, remote, tokens):
    """A part of a request in the only group."""
    return plan, {"local": {"attn": local}, "remote": {"attn": remote}, "tokens": tokens}


def codes(report):
    """The promises that do not hold."""
    return [code for code, _ in report.failures]


def two_sources(spans):
    """A destination that reads some positions from an engine with blocks of 6, and some from one with blocks of 8."""
    tables = Blocks([8, 6]), Blocks([5, 1], first=1)
    (mine,) = engine("d")
    old, new = engine("p0", tp=2, tokens=6), engine("p1", tokens=8, order="NH")
    plans = [plan_reads(mine, source) for source in (old, new)]
    table = Blocks([3, 9, 4, 7, 1, 5])
    return [part(plan, table, theirs, span) for plan, theirs, span in zip(plans, tables, spans, strict=True)]


def test_a_request_from_two_engines_is_verified_as_one():
    """Each part is right, nothing is written twice, and together they cover the request."""
    report = verify_together(two_sources([(0, 10), (10, 24)]), tokens=(0, 24))
    assert report.ok, report
    assert report.num_bytes == 24 * TOKEN_BYTES


@pytest.mark.parametrize("tokens", [(0, 26), {"attn": (0, 26)}])
def test_positions_that_no_part_has_a_block_for_are_counted(tokens):
    """A range beyond all tables breaks COVER for each tensor: with the number of positions, and the first."""
    report = verify_together(two_sources([(0, 10), (10, 24)]), tokens=tokens)
    assert report.failures == tuple(
        ("COVER", f"at d/0: 2 positions of layers.{i} without a block, first: 24") for i in (0, 1)
    )


def test_a_part_beyond_the_range_writes_what_is_not_the_request_s():
    """A part that writes beyond the range breaks OWN."""
    assert codes(verify_together(two_sources([(0, 10), (10, 24)]), tokens=(0, 20))) == ["OWN"]


@pytest.mark.parametrize("turn", [0, 1])
def test_chunks_of_a_prompt_are_verified_as_one(turn):
    """Chunks that each list their own blocks, bound one after another, read or written, fill the request once."""
    (mine,), (other,) = engine("d"), engine("p", tokens=8)
    plan = plan_reads(mine, [other]) if not turn else plan_writes(other, [mine])
    chunks = [
        ((0, 7), Blocks([3, 9]), Blocks([2])),
        ((7, 13), Blocks([9, 4, 7], first=1), Blocks([2, 6])),
        ((13, 19), Blocks([7, 1], first=3), Blocks([6, 8], first=1)),
    ]
    parts = [part(plan, *((ours, theirs) if not turn else (theirs, ours)), span) for span, ours, theirs in chunks]
    report = verify_together(parts, tokens=(0, 19))
    assert report.ok, report
    assert report.num_bytes == 19 * TOKEN_BYTES
    assert codes(verify_together(parts[:2], tokens=(0, 13))) == []
    assert codes(verify_together(parts[:2], tokens=(0, 19))) == ["COVER"] * 3


def test_a_part_needs_its_own_tensors_only():
    """Layers from different engines, each with its own range, need only the range of their part."""
    (mine,), first, second = engine("d"), engine("p0", tp=2), engine("p1", tokens=6)
    table = Blocks([3, 9, 4])
    parts = [
        part(plan_reads(mine, first, not_transferred=["layers.1"]), table, Blocks([8, 6, 2]), (0, 8)),
        part(plan_reads(mine, second, not_transferred=["layers.0"]), table, Blocks([5, 1]), (3, 12)),
    ]
    report = verify_together(parts)
    assert report.ok, report
    assert report.num_bytes == (8 + 9) * TOKEN_BYTES // 2
    assert codes(verify_together(parts, tokens=(0, 12))) == ["COVER"]


def test_parts_must_agree_on_the_destination_s_blocks():
    """Two different blocks for one ordinal are refused."""
    (mine,), (other,) = engine("d"), engine("p")
    plan = plan_reads(mine, [other])
    parts = [part(plan, Blocks([3]), Blocks([1]), (0, 2)), part(plan, Blocks([4]), Blocks([1]), (2, 4))]
    with pytest.raises(
        KVPlanError, match=r"BLOCKS: .* expected one block 0 of the request in group 'attn', got 3 and 4"
    ):
        verify_together(parts)


def test_a_part_of_a_wrong_position_is_found():
    """Each source is labelled by its own block table, so copies from other blocks are wrong bytes."""
    parts = two_sources([(0, 10), (10, 24)])
    plan, request = parts[1]

    class Shifted:
        """The plan, bound with blocks of the source in the wrong order."""

        def __getattr__(self, name):
            return getattr(plan, name)

        def bind(self, **given):
            return plan.bind(**{**given, "remote": {"attn": Blocks([1, 5], first=1)}})

    assert codes(verify_together([parts[0], (Shifted(), request)], tokens=(0, 24))) == ["VALUE"]


def test_both_directions_are_verified_together():
    """A prompt is read from one engine and the answer is written back: both directions are verified together."""
    prefill, decode = engine("p", tp=2, tokens=6), engine("d")
    there = part(plan_mesh(decode, prefill), Blocks([3, 9, 4]), Blocks([8, 6]), (0, 11))
    back = part(plan_mesh(prefill, decode), Blocks([8, 6, 2, 4]), Blocks([3, 9, 4, 7, 1]), (11, 20))
    report = verify_together([there, back])
    assert report.ok, report
    assert (report.num_workers, report.num_bytes) == (3, 20 * TOKEN_BYTES)


def test_a_range_of_no_group_is_refused():
    """A misspelt name would leave out what the parts have to cover together."""
    (plan,) = plan_mesh(engine("d"), engine("p")).plans
    request = part(plan, Blocks([3]), Blocks([8]), (0, 3))
    with pytest.raises(
        KVPlanError, match=r"^NAME: cannot verify a token range: expected a group of 'attn', got 'attm'$"
    ):
        verify_together([request], tokens={"attm": (0, 3)})


def test_a_part_takes_the_arguments_of_bind():
    """An unknown argument raises TypeError."""
    (plan,) = plan_mesh(engine("d"), engine("p")).plans
    with pytest.raises(TypeError, match="token"):
        verify_together([(plan, {"local": {}, "remote": {}, "token": (0, 1)})])


@pytest.mark.parametrize("check", [certify, lambda plans: verify(plans, local={}, remote={})])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_plan_in_two_steps_is_no_plan_to_check(check, as_list):
    """TYPE: the message names the plans that can be checked in its place."""
    (mine,), (other,) = engine("d", order="NH"), engine("p")
    regions = (*mine.regions, Region("staging", 1 << 60, 1 << 20))
    staged = stage(attrs.evolve(mine, regions=regions), [other], staging="staging")
    with pytest.raises(KVPlanError, match=r"^TYPE: .* got a value of type StagedPlan \(its \.direct moves"):
        check([staged] if as_list else staged)
    assert certify(staged.direct).complete


def test_a_plan_without_a_pair_is_not_verified():
    """WORKER: each remote worker has a pair, whose descriptors are what verify carries out."""
    plan = plan_reads(engine("d")[0], engine("p", tp=2))
    tables = {"attn": Blocks([1])}
    with pytest.raises(KVPlanError, match=r"^WORKER: cannot verify .* each of p/0, p/1, got pairs with p/0$"):
        verify(attrs.evolve(plan, pairs=plan.pairs[:1]), local=tables, remote=tables)
