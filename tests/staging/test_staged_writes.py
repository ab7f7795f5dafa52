"""Staged writes: a source puts in order at home, in a mirror of each destination, and writes long runs (S12 to S15)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Axis, Blocks, Context, Group, KVPlanError, Model, Region, View, Worker, certify, plan_writes, verify
from kvplan.staging.plan import Chunk, StagedPlan, stage_writes
from tests.small import HEAD_BYTES, engine, padded, worker
from tests.staged import (
    NAME,
    descriptors,
    ends_of_ids,
    last_id_refused,
    refused_as_direct,
    staged_writes,
    with_staging,
    written,
)
from tests.staging.test_plan import states

ONE_BLOCK = 2 * 2 * 256
"""Both halves of one block of 4 tokens and 4 heads, of both layers."""


def request(tokens: Any = (0, 20), **tables: Any) -> dict[str, Any]:
    given = {"local": {"attn": Blocks([2, 8, 4, 6, 1])}, "remote": {"attn": Blocks([7, 3, 5, 0, 9])}}
    return {**given, **tables, "tokens": tokens}


def ranges(plan: StagedPlan, **given: Any) -> list[tuple[Any, ...]]:
    """The ranges of each chunk, as values in order of groups."""
    return [tuple(chunk.tokens.values()) for chunk in plan.bind(**given)]


def bytes_of(rows: Any) -> set[tuple[int, int]]:
    return {(device, at) for start, length, device in rows.tolist() for at in range(start, start + length)}


def filled(chunk: Chunk) -> set[tuple[int, int]]:
    """The bytes of the staging region that a chunk's copies write."""
    return set().union(*(bytes_of(copy.ranges()[0]) for copy in chunk.copies))


def emptied(chunk: Chunk) -> set[tuple[int, int]]:
    """The bytes of the staging region that a chunk's specs read."""
    return set().union(*(bytes_of(spec.descriptors()[0]) for spec in chunk.specs))


PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"order": "NH"}),
    ({"tp": 2}, {"order": "NH"}),
    ({}, {"tp": 2, "order": "NH"}),
    ({"tp": 3, "heads": 6}, {"tp": 2, "heads": 6, "order": "NH"}),
    ({"tp": 4, "heads": 2}, {"tp": 2, "heads": 2, "order": "NH"}),
    ({"heads": 1}, {"tp": 2, "heads": 1, "order": "NH"}),
    ({"tokens": 6}, {"tokens": 4}),
    ({}, {"contexts": (2, 1)}),
    ({"contexts": (2, 1)}, {"order": "NH"}),
    ({"contexts": (2, 3), "tokens": 3}, {"contexts": (3, 2), "tokens": 6, "order": "NH"}),
    ({"contexts": (2, 4), "tp": 2}, {"tokens": 8, "contexts": (2, 1), "order": "NH"}),
]


@pytest.mark.parametrize("theirs, ours", PAIRS)
@pytest.mark.parametrize("size", [1 << 16, 8 * ONE_BLOCK])
@pytest.mark.parametrize("tokens", [(0, 20), (3, 17), (9, 10)])
def test_two_legs_write_what_a_direct_plan_writes(
    theirs: dict[str, Any], ours: dict[str, Any], size: int, tokens: tuple[int, int]
) -> None:
    """S12: the memory of all destinations is the same in the end, and that of the sources as it was."""
    plenty: dict[str, Any] = {"local": {"attn": Blocks([2, 8, 4, 6, 1, 9, 0])}}
    plenty["remote"] = {"attn": Blocks([7, 3, 5, 0, 9, 1, 2])}
    written(engine("prefill", **theirs), engine("decode", **ours), request(tokens, **plenty), size)


@pytest.mark.parametrize("tokens", [(0, 20), (3, 17)])
def test_transfers_of_all_writers_are_proved_together(tokens: tuple[int, int]) -> None:
    """S12: from the mirrors of a destination every byte of it arrives, once, also where several have parts of a block.

    What they move is verified as well: each is an ordinary plan.
    """
    destinations = engine("decode", order="NH", tokens=6)
    plans = staged_writes(engine("prefill", tp=2, contexts=(2, 1)), destinations)
    proof = certify(transfer for plan in plans for transfer in plan.transfers)
    assert proof.complete
    assert proof.num_bytes == 6 * 2 * 4 * HEAD_BYTES
    for plan in plans:
        (transfer,) = plan.transfers
        assert (transfer.operation, transfer.local.key, transfer.remotes) == (
            "WRITE",
            plan.direct.local.key,
            destinations,
        )
        assert transfer.local.regions == plan.direct.local.regions
        report = verify(
            transfer,
            local={"attn<-attn": Blocks(range(4))},
            remote=request()["remote"],
            tokens={"attn<-attn": tokens},
        )
        assert report.ok, str(report)


def test_a_destination_of_the_same_group_names_is_mirrored_as_it_is_paged() -> None:
    """S1: the mirror has the destination's blocks and turns, under its key, and only what this source brings it."""
    destinations = engine("decode", tp=2, order="NH", tokens=6, contexts=(2, 3))
    plan = staged_writes(engine("prefill", tp=4), destinations)[3]
    assert [mirror.worker.key for mirror in plan.mirrors] == [("decode", 2), ("decode", 3)]
    assert [mirror.worker.groups for mirror in plan.mirrors] == [
        (Group("attn<-attn", 6, Context(turn, 2, 3)),) for turn in (0, 1)
    ]
    heads = {
        (a.start, a.stop) for mirror in plan.mirrors for v in mirror.worker.views for a in v.axes if a.name == "head"
    }
    assert heads == {(3, 4)}


def test_what_a_destination_keeps_in_one_run_is_written_in_one() -> None:
    """S3: of all heads of a block, or of the half that a rank has, a descriptor for each layer and block."""
    for tp in (1, 2):
        destinations = engine("decode", tp=tp, order="NH")
        (plan,) = staged_writes(engine("prefill"), destinations[:1])
        assert descriptors(plan, request()) == 10 * [4 * 4 * HEAD_BYTES // tp]
        (direct,) = plan.direct.bind(**request())
        assert direct.num_descriptors == 10 * 16 // tp


def test_turns_of_a_context_are_written_in_one_run() -> None:
    """S1: where a destination has each nth token, its slots are its own tokens, and so are those of its mirror."""
    destinations = engine("decode", contexts=(4, 1))
    (plan,) = staged_writes(engine("prefill"), destinations)
    some = request((0, 16), remote={"attn": Blocks([3])})
    assert descriptors(plan, some) == 4 * 2 * [4 * 4 * HEAD_BYTES]
    assert plan.excess == {"attn": 0.0}
    assert sum(spec.num_descriptors for spec in plan.direct.bind(**some)) == 2 * 4 * 16


@pytest.mark.parametrize("run", [1, 2])
def test_of_a_block_of_several_writers_each_writes_its_own_tokens(run: int) -> None:
    """S12: a mirror has room for all tokens of a block, of which only those that this source has are written."""
    (destination,) = engine("decode", tokens=8)
    for rank, plan in enumerate(staged_writes(engine("prefill", contexts=(2, run)), [destination])):
        (chunk,) = plan.bind(**request((0, 8), remote={"attn": Blocks([3])}))
        wrote = bytes_of(chunk.specs[0].descriptors()[1])
        positions = [position for position in range(8) if position // run % 2 == rank]
        assert wrote == {
            (0, region.address + 3 * 512 + head * 128 + position * HEAD_BYTES + byte)
            for region in destination.regions
            for head in range(4)
            for position in positions
            for byte in range(HEAD_BYTES)
        }
        assert emptied(chunk) == filled(chunk)


def test_copies_fill_a_half_that_specs_empty() -> None:
    """S13: windows in turns of halves; each chunk's specs read just what its copies have written."""
    (plan,) = staged_writes(engine("prefill"), engine("decode", order="NH"), 2 * ONE_BLOCK)
    chunks = list(plan.bind(**request((1, 18))))
    assert plan.operation == "WRITE"
    assert {chunk.operation for chunk in chunks} == {"WRITE"}
    assert [dict(chunk.tokens) for chunk in chunks] == [{"attn": (1, 8)}, {"attn": (8, 16)}, {"attn": (16, 18)}]
    assert [chunk.half for chunk in chunks] == [0, 1, 0]
    first, second, third = map(filled, chunks)
    assert [emptied(chunk) for chunk in chunks] == [first, second, third]
    assert first.isdisjoint(second)
    assert second.isdisjoint(third)
    assert not third.isdisjoint(first)
    assert repr(chunks[2]) == "<Chunk of {'attn': (16, 18)}: 256 bytes put in order, 256 written, half 0>"
    assert repr(plan) == "<StagedPlan prefill/0: 1 destination, 8 positions at a time>"


def test_a_chunk_is_what_a_direct_plan_moves_for_its_ranges() -> None:
    """S13: the same bytes of each destination, for each chunk."""
    (plan,) = staged_writes(engine("prefill"), engine("decode", tp=2, order="NH"), 2 * ONE_BLOCK)
    chunks = list(plan.bind(**request((3, 18))))
    assert len(chunks) == 3
    for chunk in chunks:
        direct = plan.direct.bind(**request(chunk.tokens))
        assert [spec.remote for spec in chunk.specs] == [spec.remote for spec in direct]
        for ours, theirs in zip(chunk.specs, direct, strict=True):
            assert bytes_of(ours.descriptors()[1]) == bytes_of(theirs.descriptors()[1])


def regrouped(source: Worker, *groups: Group) -> Worker:
    """A worker whose views are in groups of their own."""
    views = [attrs.evolve(view, group=group) for view, group in zip(source.views, groups, strict=True)]
    return attrs.evolve(source, groups=groups, views=views)


def test_groups_of_destinations_want_what_their_own_blocks_hold() -> None:
    """S13: where a destination has two groups for one of the source, each gets its blocks, in common windows."""
    (source,), (destination,) = engine("prefill"), engine("decode", order="NH")
    destination = regrouped(destination, Group("a", 4), Group("b", 4))
    tables: dict[str, Any] = {"remote": {"a": Blocks([7, 3, 5]), "b": Blocks([0, 9, 1], first=1)}}
    (plan,) = written([source], [destination], request(None, **tables), 2 * ONE_BLOCK)
    assert ranges(plan, **request(None, **tables)) == [((0, 8),), ((8, 16),)]
    assert ranges(plan, **request((5, 11), **tables)) == [((5, 8),), ((8, 11),)]


def test_ranges_are_those_of_the_sources_groups() -> None:
    """S13: where a destination has one group for two of the source, either may have a range of its own."""
    (source,), (destination,) = engine("prefill"), engine("decode", order="NH")
    source = regrouped(source, Group("a", 4), Group("b", 4))
    tables: dict[str, Any] = {"local": {"a": Blocks([7, 3, 5, 6, 1]), "b": Blocks([0, 9], first=1)}}
    asked = request({"a": (2, 17), "b": (5, 11)}, **tables)
    (plan,) = written([source], [destination], asked, 2 * ONE_BLOCK)
    assert ranges(plan, **asked) == [((2, 8), (5, 8)), ((8, 16), (8, 11)), ((16, 17), (0, 0))]


def test_states_come_one_with_each_chunk() -> None:
    """S13: states are counted by local group, whatever groups of destinations they go to."""
    source, destination = states("prefill", (0, 4)), states("decode", (1, 3))
    blocks = {"attn": Blocks([3, 1]), "state": Blocks([4, 0, 2], ordinals=[10, 11, 30])}
    for tokens, expected in (
        ((1, 3), [((1, 2), (10, 11)), ((2, 3), (11, 12)), ((0, 0), (30, 31))]),
        ({"attn": (1, 3), "state": (11, 31)}, [((1, 2), (11, 12)), ((2, 3), (30, 31))]),
        ({"attn": (0, 0), "state": (10, 11)}, [((0, 0), (10, 11))]),
    ):
        asked = {"local": blocks, "remote": blocks, "tokens": tokens}
        (plan,) = written([source], [destination], asked, 128)
        assert ranges(plan, **asked) == expected


def test_states_of_two_groups_meet_by_ordinal() -> None:
    """S13: a state that one of a destination's groups lacks is a chunk's state for the other."""
    source, two = states("prefill", (0, 4)), states("decode", (0, 4))
    views = [attrs.evolve(source.views[1], name=name, offset_bytes=32 * 6 * i) for i, name in enumerate("ab")]
    regions = [attrs.evolve(source.regions[1], size_bytes=2 * 32 * 6)]
    source = Worker("prefill", 0, regions, [Group("s")], [attrs.evolve(view, group="s") for view in views])
    groups = [Group("a"), Group("b")]
    two = Worker(
        "decode",
        0,
        regions,
        groups,
        [attrs.evolve(view, group=g, axes=view.axes[::-1]) for view, g in zip(views, groups, strict=True)],
    )
    asked: dict[str, Any] = {
        "local": {"s": Blocks([4, 0, 2], ordinals=[3, 4, 8])},
        "remote": {"a": Blocks([1, 2], ordinals=[3, 4]), "b": Blocks([5, 0], ordinals=[4, 8])},
    }
    (plan,) = written([source], [two], asked)
    assert ranges(plan, **asked) == [((3, 4),), ((4, 5),), ((8, 9),)]
    assert [chunk.specs[0].num_bytes for chunk in plan.bind(**asked)] == [32, 64, 32]


@pytest.mark.parametrize("null", [False, True])
def test_blocks_that_a_destination_lacks_are_not_written(null: bool) -> None:
    """S14: nor is the rest of a source asked for."""
    sources, destinations = engine("prefill"), engine("decode", order="NH", tokens=8)
    local = {"attn": Blocks([2, 8, 4, 6], ordinals=[0, 1, 80, 81])}
    remote = {"attn": Blocks([6, 9], ordinals=[0, 40])}
    if null:
        remote = {"attn": Blocks([6, *39 * [3], 9], null=3)}
    asked = request((2, 325), local=local, remote=remote)
    (plan,) = written(sources, destinations, asked, 2 * ONE_BLOCK)
    assert ranges(plan, **asked) == [((2, 8),), ((320, 325),)]
    assert [chunk.specs[0].num_bytes for chunk in plan.bind(**asked)] == [count * 2 * 64 for count in (6, 5)]


def test_a_prefix_that_the_destination_has_is_left_out() -> None:
    """S12: tables that begin at a later block, of any ordinal on either side."""
    tables: dict[str, Any] = {
        "local": {"attn": Blocks([5, 6, 1], first=3)},
        "remote": {"attn": Blocks([7, 3], first=2)},
    }
    (plan,) = written(engine("prefill"), engine("decode", order="NH", tokens=6), request((13, 22), **tables))
    (chunk,) = plan.bind(**request((13, 22), **tables))
    assert sum(copy.num_bytes for copy in chunk.copies) == chunk.specs[0].num_bytes == 9 * 2 * 64
    (whole,) = plan.bind(**request(None, **{**tables, "local": {"attn": Blocks(range(9))}}))
    assert dict(whole.tokens) == {"attn": (12, 24)}


def test_views_of_both_sides_have_numbers_of_their_own() -> None:
    """S2: where a destination lists its layers the other way round, and has one more in between."""
    (source,), (destination,) = engine("prefill", layers=3), engine("decode", order="NH", layers=3)
    destination = attrs.evolve(destination, views=destination.views[::-1])
    (plan,) = written([source], [destination], request((1, 16)), not_transferred=["layers.1"])
    assert sorted(view.name for view in plan.mirrors[0].worker.views) == ["layers.0", "layers.2"]
    stages = [
        attrs.evolve(source, rank=rank, views=views) for rank, views in enumerate((source.views[1:], source.views[:1]))
    ]
    written(stages, [destination], request((1, 16)))


def test_views_of_one_shape_are_mirrored_in_blocks_of_several_sizes() -> None:
    """S3: of two layers that a destination keeps alike, one has scales behind it in its pool, the other has not."""
    (source,), (destination,) = engine("prefill"), engine("decode", order="NH")
    (plan,) = written([padded(source)], [padded(destination)], request((1, 18)))
    steps = {view.name: view.block_stride_bytes for view in plan.mirrors[0].worker.views}
    assert steps == {"layers.0": 256, "layers.1": 264, "scales": 264}


def test_digits_of_an_axis_are_mirrored() -> None:
    """S2: of a destination with heads in two digits, two of each source, and of tokens in kernel blocks."""
    digits = [
        Axis("head", 0, 2, 2, 256),
        Axis("head", 0, 2, 2, 16),
        Axis("token", 0, 2, 2, 128),
        Axis("token", 0, 4, 4, 32),
        Axis("dim", 0, 8, 8, 1),
    ]
    destination = Worker(
        "decode",
        0,
        [Region("kv", 1 << 40, 5120)],
        [Group("attn", 8)],
        [View("a", "attn", "kv", "uint8", digits, 10, 512)],
    )
    sources = [
        Worker(
            "prefill",
            rank,
            [Region("kv", 1 << 40, 640)],
            [Group("attn", 4)],
            [
                View(
                    "a",
                    "attn",
                    "kv",
                    "uint8",
                    [Axis("token", 0, 4, 4, 16), Axis("head", 2 * rank, 2 * rank + 2, 4, 8), Axis("dim", 0, 8, 8, 1)],
                    10,
                    64,
                )
            ],
        )
        for rank in (0, 1)
    ]
    plans = written(sources, [destination], request((1, 19)))
    assert [[axis.extent for axis in plan.mirrors[0].worker.views[0].axes] for plan in plans] == 2 * [[2, 2, 2, 4, 8]]


@pytest.mark.parametrize("replicas, layers", [(1, [["layers.0", "layers.1"], []]), (2, [["layers.0"], ["layers.1"]])])
def test_writers_of_the_same_bytes_take_a_share_each(replicas: int, layers: list[list[str]]) -> None:
    """S12: who serves is what direct plans say; who does not has no mirror, and no chunks."""
    sources, destinations = engine("prefill", tp=2, heads=1), engine("decode", order="NH", heads=1)
    plans = written(sources, destinations, request(), replicas=replicas)
    assert [[view.name for mirror in plan.mirrors for view in mirror.worker.views] for plan in plans] == layers
    assert [len(list(plan.bind(**request()))) for plan in plans] == [int(bool(names)) for names in layers]


def test_what_is_not_transferred_is_not_staged() -> None:
    """S12: nor does the destination have to be mirrored for it."""
    (plan,) = written(engine("prefill"), engine("decode", order="NH"), request(), not_transferred=["layers.1"])
    assert {view.name for mirror in plan.mirrors for view in mirror.worker.views} == {"layers.0"}
    assert plan.transfers[0].not_transferred == ("layers.1",)


def test_arguments_may_be_iterators() -> None:
    """Remotes and siblings are gone through once."""
    sources, destinations = engine("prefill", tp=2), engine("decode", order="NH")
    plan = stage_writes(with_staging(sources[0]), iter(destinations), iter(sources[1:]), staging=NAME)
    assert (plan.direct.remotes, plan.direct.siblings) == (destinations, sources[1:])
    assert [transfer.siblings for transfer in plan.transfers] == [sources[1:]]


BAD: list[tuple[str, dict[str, Any]]] = [
    ("NAME", request(local={"other": Blocks([1])})),
    ("BLOCKS", request(local={})),
    ("BLOCKS", request(remote={})),
    ("BLOCKS", request(remote={"attn": Blocks([1, 1])}, tokens=(0, 4))),
    ("BLOCKS", request(remote={"attn": Blocks([10])}, tokens=(0, 4))),
    ("BLOCKS", request(tokens=(0, 21))),
    ("BLOCKS", request(local={"attn": Blocks([2, 8, 4])})),
    ("BLOCKS", request(local={"attn": Blocks([2, 0, 4, 6, 1], null=0)})),
    ("BLOCKS", request(None, local={"attn": Blocks([2, 8, 4])})),
    ("TOKENS", request(tokens=(4, 3))),
    ("TYPE", request(tokens=5)),
    ("NAME", request(tokens={"other": (0, 1)})),
]


@pytest.mark.parametrize("code, wrong", BAD)
def test_a_bad_request_is_refused_as_a_direct_one_is(code: str, wrong: dict[str, Any]) -> None:
    """S15: the same error, before there is a chunk."""
    (plan,) = staged_writes(engine("prefill"), engine("decode", order="NH"), 2 * ONE_BLOCK)
    refused_as_direct(plan, wrong, code)


def test_an_id_that_does_not_fit_is_refused_before_there_is_a_chunk() -> None:
    """S15: of a destination with more descriptors than ids, some can be written and others not."""
    source, destination = ends_of_ids()
    (plan,) = staged_writes([source], [destination], 2 * 32)
    last_id_refused(plan)


def test_regions_are_refused_as_for_reads() -> None:
    """NAME, OVERLAP and MEMORY; what is needed at least is enough."""
    (source,), destinations = engine("prefill"), engine("decode", tp=2, order="NH")
    for code, region in (("NAME", "spare"), ("OVERLAP", "kv.0")):
        with pytest.raises(KVPlanError, match=code):
            stage_writes(source, destinations, staging=region)
    with pytest.raises(KVPlanError) as refused:
        staged_writes([source], destinations, ONE_BLOCK - 1)
    assert refused.value.code == "MEMORY"
    (plan,) = staged_writes([source], destinations, refused.value.details["needed_bytes"])
    assert plan.num_positions == 4


def test_runs_do_not_go_on_where_others_hold_the_same() -> None:
    """S11: positions that another source has as well are copied apart, and written in one run all the same."""
    (destination,) = engine("decode", order="NH")
    contexts = Context(), Context(1, 2, 1)
    sources = [worker("prefill", rank, 0, 1, 4, 4, "HN", 2, 10, each) for rank, each in enumerate(contexts)]
    first, second = written(sources, [destination], request((1, 16)))
    assert [(lane.every, lane.carried.tolist(), lane.run) for lane in first.lanes[0]] == [(2, [0], 1), (2, [1], 1)]
    assert descriptors(first, request((4, 8))) == 2 * [4 * 4 * HEAD_BYTES]
    assert second.transfers == ()


@pytest.mark.parametrize(
    "theirs, ours, tokens, expected",
    [
        ({"layout": "LBNHC"}, {"tp": 2, "layout": "LBHNC"}, 48, 2 * 28 * 3),
        ({"layout": "LBHNC"}, {"layout": "LBHNC", "tokens_per_block": 64}, 128, 28 * 2),
        ({"layout": "LBNHC"}, {"layout": "BLHNC"}, 48, 3),
    ],
)
def test_long_runs_are_why(theirs: dict[str, Any], ours: dict[str, Any], tokens: int, expected: int) -> None:
    """Of a real model, a descriptor for each block and layer, or for all layers where a destination keeps them so."""
    model = Model.shipped("qwen3-0.6b")
    sources, destinations = model.engine("p", num_blocks=9, **theirs), model.engine("d", num_blocks=9, **ours)
    (plan,) = staged_writes(sources, destinations, 1 << 26)
    blocks = [5, 3, 8, 0, 7, 1, 6, 2]
    size = destinations[0].groups[0].tokens_per_block or 1
    some: dict[str, Any] = {
        "local": {"attn": Blocks(blocks[: tokens // 16])},
        "remote": {"attn": Blocks(blocks[: tokens // size])},
    }
    lengths = descriptors(plan, {**some, "tokens": (0, tokens)})
    assert len(lengths) == expected
    direct = plan_writes(sources[0], destinations).bind(**some, tokens=(0, tokens))
    assert sum(lengths) == sum(spec.num_bytes for spec in direct)
    assert sum(spec.num_descriptors for spec in direct) > 4 * expected


def test_no_two_elements_of_a_mirror_share_a_byte() -> None:
    """So that a strided tensor may be written: over all blocks and slots of the mirror."""
    model = Model.shipped("qwen2.5-1.5b")
    (plan,) = staged_writes(
        model.engine("p", num_blocks=9, layout="BLNHC"),
        model.engine("d", num_blocks=9, layout="LHBNC", tokens_per_block=32),
        1 << 22,
    )
    tables: dict[str, Any] = {"local": {"attn": Blocks([5, 3, 1, 8, 2])}, "remote": {"attn": Blocks([2, 0, 1])}}
    for chunk in plan.bind(**tables, tokens=(5, 70)):
        for copy in chunk.copies:
            side = copy.destination
            at = np.array([offset for _, offset in side.origins])
            strides: Sequence[int] = (*side.strides_bytes, *side.inner_bytes)
            for extent, stride in zip((*side.shape, *copy.extents), strides, strict=True):
                at = np.add.outer(at, np.arange(extent) * stride).reshape(-1)
            assert (np.diff(np.sort(at)) >= copy.length_bytes).all()
            assert at.max() + copy.length_bytes <= 1 << 22
