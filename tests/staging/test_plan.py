"""Staging: reads in two legs, chunk by chunk (S12 to S15)."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import (
    Axis,
    Blocks,
    FakeMemory,
    Group,
    KVPlanError,
    Model,
    Region,
    View,
    Worker,
    certify,
    plan_reads,
    verify,
)
from kvplan.staging import excess as module
from kvplan.staging.plan import StagedPlan, stage
from tests.small import engine
from tests.staged import (
    NAME,
    carry_out,
    cells,
    descriptors,
    ends_of_ids,
    labelled,
    last_id_refused,
    refused_as_direct,
    staged,
    with_staging,
)

TABLES = {"local": {"attn": Blocks([7, 3, 5, 0, 9])}, "remote": {"attn": Blocks([2, 8, 4, 6, 1])}}
ONE_BLOCK = 2 * 2 * 256
"""Both halves of one block of 4 tokens and 4 heads, of both layers."""


def request(tokens: Any = (0, 20), **tables: Any) -> dict[str, Any]:
    return {**TABLES, **tables, "tokens": tokens}


def states(name: str, heads: tuple[int, int], blocks: int = 6) -> Worker:
    """A worker that has some of 4 heads of a token tensor, in blocks of 2, and of a state."""
    some = heads[1] - heads[0]
    axes = [Axis("head", *heads, 4, 8), Axis("dim", 0, 8, 8, 1)]
    paged = [*axes, Axis("token", 0, 2, 2, 8 * some)]
    return Worker(
        name,
        0,
        [Region("kv", 1 << 40, 16 * some * blocks), Region("ssm", 1 << 41, 8 * some * blocks)],
        [Group("attn", 2), Group("state")],
        [
            View("attn", "attn", "kv", "uint8", paged, blocks, 16 * some),
            View("ssm", "state", "ssm", "uint8", axes, blocks, 8 * some),
        ],
    )


def ranges(plan: StagedPlan, **given: Any) -> list[tuple[Any, ...]]:
    """The ranges of each chunk, as values in order of groups."""
    return [tuple(chunk.tokens.values()) for chunk in plan.bind(**given)]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [5 * ONE_BLOCK, 2 * ONE_BLOCK, ONE_BLOCK])
@pytest.mark.parametrize("tokens", [(0, 20), (3, 18), (9, 10), (4, 4)])
def test_two_legs_write_what_a_direct_plan_writes(whole: bool, size: int, tokens: tuple[int, int]) -> None:
    """S12: the destination's memory is the same in the end, and that of the sources as it was."""
    (_, local), sources = engine("decode", tp=2, order="NH"), engine("prefill")
    plan = staged(local, sources, size, whole=whole)
    local = plan.direct.local
    with FakeMemory([local, *sources]) as one, FakeMemory([local, *sources]) as other:
        for memory in (one, other):
            labelled(memory, sources)
        for spec in plan.direct.bind(**request(tokens)):
            one.execute(spec)
        carry_out(plan, other, request(tokens))
        for worker in (local, *sources):
            wanted, found = cells(one, worker), cells(other, worker)
            assert all(np.array_equal(wanted[name], found[name]) for name in wanted if name != NAME)
        assert cells(other, local)["kv.0"].any() == (tokens != (4, 4))


def test_each_leg_is_verified_by_itself() -> None:
    """S12: leg 1 as a plan of reads into the mirror, leg 2 as copies of the mirror into the destination."""
    (_, local), sources = engine("decode", tp=2, order="NH", tokens=6), engine("prefill")
    plan = staged(local, sources)
    (mirror,), (read,) = plan.mirrors, plan.transfers
    (chunk,) = plan.bind(**request((5, 18)))
    assert certify(read).complete
    mirrored = {"attn<-attn": Blocks([0, 1, 2, 3], first=1)}
    report = verify(read, local=mirrored, remote=TABLES["remote"], tokens=(5, 18))
    assert report.ok, str(report)
    assert report.num_bytes == chunk.specs[0].num_bytes
    again = plan_reads(plan.direct.local, [mirror.worker])
    copies = [np.concatenate(side) for side in zip(*(copy.ranges() for copy in chunk.copies), strict=True)]
    report = verify(
        again,
        local=TABLES["local"],
        remote=mirrored,
        tokens=(5, 18),
        copies={(local.key, sources[0].key): (copies[0], copies[1])},
    )
    assert report.ok, str(report)
    assert report.num_bytes == sum(copy.num_bytes for copy in chunk.copies) == 13 * 2 * 2 * 16


def test_reads_are_plans_of_the_destination() -> None:
    """S12: one for each source that serves, between the destination and that source."""
    local, sources = engine("decode", tp=2, order="NH")[1], engine("prefill", tp=4)
    plan = staged(local, sources)
    assert [(read.local.key, read.remotes) for read in plan.transfers] == [
        (("decode", 1), (sources[2],)),
        (("decode", 1), (sources[3],)),
    ]
    assert {read.local.regions for read in plan.transfers} == {plan.direct.local.regions}
    assert repr(plan) == "<StagedPlan decode/1: 2 sources, 8192 positions at a time>"


def test_chunks_are_windows_in_turns_of_halves() -> None:
    """S13: windows from multiples of their length on, cut to the request, the halves in turn."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    plan = staged(local, sources, 2 * ONE_BLOCK)
    chunks = list(plan.bind(**request((1, 18))))
    assert plan.num_positions == 8
    assert [dict(chunk.tokens) for chunk in chunks] == [{"attn": (1, 8)}, {"attn": (8, 16)}, {"attn": (16, 18)}]
    assert [chunk.half for chunk in chunks] == [0, 1, 0]
    first, second, third = (_bytes(chunk.specs[0].descriptors()[0]) for chunk in chunks)
    assert first.isdisjoint(second)
    assert third.isdisjoint(second)
    assert not third.isdisjoint(first)
    assert repr(chunks[2]) == "<Chunk of {'attn': (16, 18)}: 256 bytes read, 256 put in order, half 0>"


def test_a_chunk_is_what_a_direct_plan_moves_for_its_ranges() -> None:
    """S13: the same bytes of the destination, for each chunk."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    plan = staged(local, sources, 2 * ONE_BLOCK)
    for chunk in plan.bind(**request((3, 18))):
        written = np.concatenate([copy.ranges()[0] for copy in chunk.copies])
        direct = plan.direct.bind(**request(chunk.tokens))[0].descriptors()[0]
        assert _bytes(written) == _bytes(direct)


def _bytes(rows: Any) -> set[int]:
    return {at for start, length, _ in rows.tolist() for at in range(start, start + length)}


def test_groups_have_ranges_of_their_own() -> None:
    """S13: a chunk has of each group what the group's range has of the window, and nothing of others."""
    local, source = _two_groups("decode", "ht"), _two_groups("prefill", "th")
    blocks = {"a": Blocks(range(5)), "b": Blocks(range(5))}
    plan = staged(local, [source], 512)
    assert plan.num_positions == 8
    found = ranges(plan, local=blocks, remote=blocks, tokens={"a": (0, 18), "b": (11, 17)})
    assert found == [((0, 8), (0, 0)), ((8, 16), (11, 16)), ((16, 18), (16, 17))]


def _two_groups(name: str, order: str) -> Worker:
    strides = {"ht": (32, 8), "th": (8, 16)}[order]
    axes = [Axis("head", 0, 2, 2, strides[0]), Axis("token", 0, 4, 4, strides[1]), Axis("dim", 0, 8, 8, 1)]
    return Worker(
        name,
        0,
        [Region(group, 1 << 40 + i, 320) for i, group in enumerate("ab")],
        [Group("a", 4), Group("b", 4)],
        [View(group, group, group, "uint8", axes, 5, 64) for group in "ab"],
    )


def test_states_come_one_with_each_chunk() -> None:
    """S13: the first chunk has the first state; where there are more than windows, they have chunks of their own."""
    plan = staged(states("decode", (1, 3)), [states("prefill", (0, 4))], 128)
    assert plan.num_positions == 2
    blocks = {"attn": Blocks([3, 1]), "state": Blocks([4, 0, 2], ordinals=[10, 11, 30])}
    assert ranges(plan, local=blocks, remote=blocks, tokens=(1, 3)) == [
        ((1, 2), (10, 11)),
        ((2, 3), (11, 12)),
        ((0, 0), (30, 31)),
    ]
    wanted = {"attn": (1, 3), "state": (11, 31)}
    assert ranges(plan, local=blocks, remote=blocks, tokens=wanted) == [((1, 2), (11, 12)), ((2, 3), (30, 31))]
    alone = {"attn": (0, 0), "state": (10, 11)}
    assert ranges(plan, local=blocks, remote=blocks, tokens=alone) == [((0, 0), (10, 11))]


def test_positions_of_other_ranks_make_no_chunk() -> None:
    """S13: a window in which the destination holds nothing is left out, and no half is skipped."""
    local, sources = engine("decode", order="NH", contexts=(3, 8))[1], engine("prefill")
    plan = staged(local, sources, 2 * ONE_BLOCK)
    chunks = list(plan.bind(**request((0, 20))))
    assert [(dict(chunk.tokens)["attn"], chunk.half) for chunk in chunks] == [((8, 16), 0)]


def test_blocks_of_which_nothing_is_wanted_are_not_read() -> None:
    """S14: of a destination with gaps, and of a source that has not got the rest."""
    (local,), sources = engine("decode", order="NH", tokens=8), engine("prefill")
    plan = staged(local, sources, ONE_BLOCK)
    sparse = Blocks([6, 9], ordinals=[0, 40])
    theirs = Blocks([2, 8, 4, 6], ordinals=[0, 1, 80, 81])
    chunks = list(plan.bind(local={"attn": sparse}, remote={"attn": theirs}, tokens=(2, 325)))
    assert [dict(chunk.tokens)["attn"] for chunk in chunks] == [(2, 4), (4, 8), (320, 324), (324, 325)]
    assert [chunk.specs[0].num_bytes for chunk in chunks] == [count * 2 * 64 for count in (2, 4, 4, 1)]


def test_blocks_of_other_ranks_are_not_read() -> None:
    """S14: where whole blocks of a source are of other context ranks, those are left out, and are no excess."""
    local, sources = engine("decode", order="NH", contexts=(2, 4))[1], engine("prefill", tokens=4)
    plan = staged(local, sources)
    (chunk,) = plan.bind(**request((0, 20)))
    assert chunk.specs[0].num_bytes == 2 * 4 * 2 * 64
    assert plan.excess == {"attn": 0.0}
    assert staged(local, engine("prefill", tokens=8)).excess == {"attn": 1.0}


def test_another_group_of_a_source_is_not_read() -> None:
    """S12: where it has a head that lies between two that are needed, and the mirror has it as excess."""

    def views(*held: tuple[str, str, int, int]) -> list[View]:
        return [
            View(
                "t",
                group,
                region,
                "uint8",
                [
                    Axis("token", 0, 2, 2, 8 * (stop - start)),
                    Axis("head", start, stop, 4, 8),
                    Axis("dim", 0, 8, 8, 1),
                ],
                10,
                16 * (stop - start),
            )
            for group, region, start, stop in held
        ]

    regions = [Region("x", 1 << 40, 640), Region("y", 1 << 41, 640)]
    source = Worker("p", 0, regions, [Group("b", 2), Group("a", 2)], views(("b", "x", 1, 2), ("a", "y", 0, 4)))
    local = Worker("d", 0, regions, [Group("a", 2)], views(("a", "x", 0, 1), ("a", "y", 3, 4)))
    plan, tables = staged(local, [source]), {"a": Blocks([3, 4])}
    (direct,) = plan.direct.bind(local=tables, remote=tables, tokens=(0, 4))
    (chunk,) = plan.bind(local=tables, remote=tables, tokens=(0, 4))
    assert sum(copy.num_bytes for copy in chunk.copies) == direct.num_bytes == 64
    assert chunk.specs[0].num_bytes == 128
    assert plan.excess == {"a": 1.0}


def test_a_prefix_that_the_destination_has_is_left_out() -> None:
    """S12: tables that begin at a later block, of any ordinal on either side."""
    (local,), sources = engine("decode", order="NH", tokens=6), engine("prefill")
    plan = staged(local, sources)
    tables: dict[str, Any] = {
        "local": {"attn": Blocks([7, 3], first=2)},
        "remote": {"attn": Blocks([5, 6, 1], first=3)},
    }
    (chunk,) = plan.bind(**tables, tokens=(13, 22))
    assert sum(copy.num_bytes for copy in chunk.copies) == 9 * 2 * 64
    (whole,) = plan.bind(**{**tables, "remote": {"attn": Blocks(range(9))}})
    assert dict(whole.tokens) == {"attn": (12, 24)}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("NAME", request(local={"other": Blocks([1])})),
    ("BLOCKS", request(local={})),
    ("BLOCKS", request(remote={})),
    ("BLOCKS", request(local={"attn": Blocks([1, 1])}, tokens=(0, 4))),
    ("BLOCKS", request(local={"attn": Blocks([10])}, tokens=(0, 4))),
    ("BLOCKS", request(tokens=(0, 21))),
    ("BLOCKS", request(remote={"attn": Blocks([2, 8, 4])})),
    ("BLOCKS", request(remote={"attn": Blocks([2, 0, 4, 6, 1], null=0)})),
    ("TOKENS", request(tokens=(4, 3))),
    ("RANGE", request(tokens=(-1, 3))),
    ("TYPE", request(tokens=5)),
    ("NAME", request(tokens={"other": (0, 1)})),
    ("TYPE", request(local=3)),
]


@pytest.mark.parametrize("code, wrong", BAD)
def test_a_bad_request_is_refused_as_a_direct_one_is(code: str, wrong: dict[str, Any]) -> None:
    """S15: the same error, before there is a chunk."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    refused_as_direct(staged(local, sources, 2 * ONE_BLOCK), wrong, code)


def test_an_id_that_does_not_fit_is_refused_before_there_is_a_chunk() -> None:
    """S15: of a source with more descriptors than ids, some can be read and others not."""
    local, source = ends_of_ids()
    last_id_refused(staged(local, [source], 2 * 32))


@pytest.mark.parametrize("whole, excess", [(False, 0.0), (True, 1.0)])
def test_excess_is_what_is_read_beyond_the_need(whole: bool, excess: float) -> None:
    """Of half of the heads, twice the bytes where all heads are read; and so a request's bytes are."""
    plan = staged(engine("decode", tp=2, order="NH")[0], engine("prefill"), whole=whole)
    assert plan.excess == {"attn": excess}
    assert sum(descriptors(plan, request())) == (1 + excess) * 20 * 2 * 2 * 16


def test_excess_is_counted_by_group() -> None:
    """Of states as of tokens, each of its own."""
    plan = staged(states("decode", (1, 3)), [states("prefill", (0, 4))], whole=True)
    assert plan.excess == {"attn": 1.0, "state": 1.0}


def test_excess_of_long_periods_is_counted_on_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the period, no more positions than a limit are gone through."""
    local, sources = engine("decode", order="NH", tokens=7, contexts=(2, 5))[0], engine("prefill", tokens=9)
    exact = staged(local, sources).excess["attn"]
    monkeypatch.setattr(module, "MAX_LISTED", 200)
    assert staged(local, sources).excess["attn"] == pytest.approx(exact, rel=0.05)


def test_what_is_not_transferred_is_not_staged() -> None:
    """Where nothing is left, there are no reads and no chunks, whatever the request."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    plan = staged(local, sources, not_transferred=["layers.1"])
    assert {view.name for mirror in plan.mirrors for view in mirror.worker.views} == {"layers.0"}
    nothing = staged(local, sources, 1, not_transferred=["layers.0", "layers.1"])
    assert (nothing.transfers, nothing.mirrors, nothing.excess, list(nothing.bind(**request()))) == ((), (), {}, [])


def test_replicas_take_a_share_each() -> None:
    """Sources that hold the same bytes serve as many tensors each, as they do a direct plan."""
    (local,), sources = engine("decode", order="NH", heads=1), engine("prefill", tp=2, heads=1)
    plan = staged(local, sources, replicas=2)
    assert [[view.name for view in mirror.worker.views] for mirror in plan.mirrors] == [["layers.0"], ["layers.1"]]


def test_a_region_that_is_not_there_is_refused() -> None:
    """NAME tells which there are."""
    (local,), sources = engine("decode"), engine("prefill")
    with pytest.raises(KVPlanError) as refused:
        stage(local, sources, staging="spare")
    assert str(refused.value) == (
        "NAME: cannot stage in a region of decode/0: expected one of 'kv.0', 'kv.1', got 'spare'"
    )
    with pytest.raises(KVPlanError, match="TYPE: cannot read staging"):
        stage(local, sources, staging=local.regions[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_memory_that_views_have_is_no_staging_region(shift: int) -> None:
    """OVERLAP, also where another region has the same addresses; not on another device."""
    (local,), sources = engine("decode"), engine("prefill")
    with pytest.raises(KVPlanError, match=r"OVERLAP: .* got view 'layers.0' in region 'kv.0'"):
        stage(local, sources, staging="kv.0")
    first = local.regions[0]
    over = Region("spare", first.address + shift * (first.size_bytes - 1), first.size_bytes)
    with pytest.raises(KVPlanError, match="OVERLAP"):
        stage(attrs.evolve(local, regions=(*local.regions, over)), sources, staging="spare")
    apart = attrs.evolve(over, address=first.address + shift * first.size_bytes, device_id=int(shift == 0))
    assert stage(attrs.evolve(local, regions=(*local.regions, apart)), sources, staging="spare").transfers


def test_a_region_without_room_is_refused() -> None:
    """MEMORY, with what is needed at least; just that is enough."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    with pytest.raises(KVPlanError) as refused:
        staged(local, sources, ONE_BLOCK - 1)
    assert refused.value.code == "MEMORY"
    assert staged(local, sources, refused.value.details["needed_bytes"]).num_positions == 4


def test_long_runs_are_why() -> None:
    """Heads of tokens become tokens of heads: of a real model, a descriptor for each block and layer, not each row."""
    model = Model.shipped("qwen3-0.6b")
    local, sources = (
        model.engine("d", 2, layout="LBHNC", num_blocks=9)[0],
        model.engine("p", layout="LBNHC", num_blocks=9),
    )
    tables: dict[str, Any] = {"local": {"attn": Blocks([1, 4, 2])}, "remote": {"attn": Blocks([5, 3, 8])}}
    found = [
        len(descriptors(staged(local, sources, 1 << 25, whole=whole), {**tables, "tokens": (0, 48)}))
        for whole in (False, True)
    ]
    (direct,) = plan_reads(with_staging(local), sources).bind(**tables, tokens=(0, 48))
    assert [direct.num_descriptors, *found] == [28 * 3 * 64, 28 * 3 * 16, 28 * 3]
