"""Staged plans: requests in two steps, chunk by chunk, in both directions (S12 to S15)."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import (
    Axis,
    Blocks,
    Group,
    KVPlanError,
    Model,
    Region,
    View,
    Worker,
    certify,
    plan_reads,
    plan_writes,
    verify,
)
from kvplan.staging import Chunk, StagedPlan, stage, stage_writes
from tests.small import HEAD_BYTES, engine
from tests.staged import (
    NAME,
    ONE_BLOCK,
    OPERATIONS,
    Request,
    bytes_of,
    descriptors,
    plans_of,
    request_of,
    same_as_direct,
    staged,
    staged_writes,
    with_staging,
)

OURS, THEIRS = Blocks([7, 3, 5, 0, 9]), Blocks([2, 8, 4, 6, 1])
"""The blocks of the destination and of the source, of 4 tokens each."""

both_ways = pytest.mark.parametrize("operation", OPERATIONS)


def request(operation: str, tokens: Any = (0, 20)) -> Request:
    return request_of(operation, OURS, THEIRS, tokens)


def simple(operation: str, size: int = 1 << 20, **options: Any) -> StagedPlan:
    """A head-major source and a token-major destination, of one worker each."""
    (plan,) = plans_of(operation, engine("prefill"), engine("decode", order="NH"), size, **options)
    return plan


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


def regrouped(worker: Worker, *names: str) -> Worker:
    """A worker whose views are in groups of their own."""
    views = [attrs.evolve(view, group=name) for view, name in zip(worker.views, names, strict=True)]
    groups = [attrs.evolve(worker.groups[0], name=name) for name in names]
    return attrs.evolve(worker, groups=groups, views=views)


def ranges(plan: StagedPlan, given: Request) -> list[tuple[Any, ...]]:
    """The ranges of each chunk, as values in order of groups."""
    return [tuple(chunk.tokens.values()) for chunk in plan.bind(**given)]


def copied(chunk: Chunk, side: int) -> set[tuple[int, int]]:
    """The bytes that a chunk's copies write, 0, or read, 1."""
    return bytes_of(*(copy.ranges()[side] for copy in chunk.copies))


def moved(chunk: Chunk, side: int) -> set[tuple[int, int]]:
    """The local bytes, 0, or the remote ones, 1, of a chunk's specs."""
    return bytes_of(*(spec.descriptors()[side] for spec in chunk.specs))


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
@pytest.mark.parametrize("way", ["exact", "whole", "write"])
@pytest.mark.parametrize(
    "size, tokens",
    [(64, (0, 20)), (8, (0, 20)), (8, (3, 17)), (64, (9, 10)), (64, (4, 4))],
)
def test_both_steps_write_what_a_direct_plan_writes(
    theirs: dict[str, Any], ours: dict[str, Any], way: str, size: int, tokens: tuple[int, int]
) -> None:
    """S12: the memory of all destinations is the same in the end, and that of the sources is unchanged."""
    options: dict[str, Any] = {"whole": True} if way == "whole" else {}
    operation = "WRITE" if way == "write" else "READ"
    plans = plans_of(operation, engine("prefill", **theirs), engine("decode", **ours), size * ONE_BLOCK, **options)
    blocks = Blocks([7, 3, 5, 0, 9, 1, 2]), Blocks([2, 8, 4, 6, 1, 9, 0])
    same_as_direct(plans, request_of(operation, *blocks, tokens), moves=tokens != (4, 4))


def test_each_step_of_a_read_is_verified_by_itself() -> None:
    """S12: the first as a plan of reads into the buffer, the second as copies of the buffer into the destination."""
    (_, local), sources = engine("decode", tp=2, order="NH", tokens=6), engine("prefill")
    plan = staged(local, sources)
    (peer,) = plan.peers
    (chunk,) = plan.bind(**request("READ", (5, 18)))
    assert certify(peer.transfer).complete
    buffered = {"attn<-attn": Blocks([0, 1, 2, 3], first=1)}
    report = verify(peer.transfer, local=buffered, remote={"attn": THEIRS}, tokens=(5, 18))
    assert report.ok, str(report)
    assert report.num_bytes == chunk.specs[0].num_bytes
    again = plan_reads(plan.direct.local, [peer.buffer.worker])
    copies = [np.concatenate(side) for side in zip(*(copy.ranges() for copy in chunk.copies), strict=True)]
    report = verify(
        again,
        local={"attn": OURS},
        remote=buffered,
        tokens=(5, 18),
        copies={(local.key, sources[0].key): (copies[0], copies[1])},
    )
    assert report.ok, str(report)
    assert report.num_bytes == sum(copy.num_bytes for copy in chunk.copies) == 13 * 2 * 2 * 16


@pytest.mark.parametrize("tokens", [(0, 20), (3, 17)])
def test_transfers_of_all_writers_are_proved_together(tokens: tuple[int, int]) -> None:
    """S12: from the buffers for a destination every byte of it arrives once, also where several fill one block."""
    plans = staged_writes(engine("prefill", tp=2, contexts=(2, 1)), engine("decode", order="NH", tokens=6))
    proof = certify(transfer for plan in plans for transfer in plan.transfers)
    assert proof.complete
    assert proof.num_bytes == 6 * 2 * 4 * HEAD_BYTES
    for plan in plans:
        (transfer,) = plan.transfers
        buffered = {"attn<-attn": Blocks(range(4))}
        report = verify(transfer, local=buffered, remote={"attn": OURS}, tokens={"attn<-attn": tokens})
        assert report.ok, str(report)


@both_ways
def test_transfers_are_plans_of_the_local_worker(operation: str) -> None:
    """S12: one with each peer that bytes move from or to, of all regions of the local worker."""
    shards = (4, 2) if operation == "READ" else (2, 4)
    plan = plans_of(operation, engine(str(shards[0]), shards[0]), engine(str(shards[1]), shards[1]), 1 << 20)[1]
    assert [(each.operation, each.local.key, each.remotes) for each in plan.transfers] == [
        (operation, ("2", 1), (plan.direct.remotes[rank],)) for rank in (2, 3)
    ]
    assert {each.local.regions for each in plan.transfers} == {plan.direct.local.regions}
    peers = "sources" if operation == "READ" else "destinations"
    assert repr(plan) == f"<StagedPlan 2/1: 2 {peers}, 8192 positions at a time>"


@both_ways
def test_chunks_alternate_between_buffer_slots(operation: str) -> None:
    """S13: windows begin at multiples of their length and are cut to the request; the second step empties a slot."""
    plan = simple(operation, 2 * ONE_BLOCK)
    chunks = list(plan.bind(**request(operation, (1, 18))))
    assert plan.num_positions == 8
    assert {plan.operation, *(chunk.operation for chunk in chunks)} == {operation}
    assert [dict(chunk.tokens) for chunk in chunks] == [{"attn": (1, 8)}, {"attn": (8, 16)}, {"attn": (16, 18)}]
    assert [chunk.buffer_slot for chunk in chunks] == [0, 1, 0]
    reads = operation == "READ"
    first, second, third = (moved(chunk, 0) for chunk in chunks)
    assert [copied(chunk, int(reads)) for chunk in chunks] == [first, second, third]
    assert first.isdisjoint(second)
    assert third.isdisjoint(second)
    assert not third.isdisjoint(first)
    steps = "256 bytes read, 256 copied into place" if reads else "256 bytes rearranged, 256 written"
    assert repr(chunks[2]) == f"<Chunk of {{'attn': (16, 18)}}: {steps}, buffer slot 0>"


@both_ways
def test_a_chunk_is_what_a_direct_plan_moves_for_its_ranges(operation: str) -> None:
    """S13: the same bytes of each destination, for each chunk."""
    plan, *_ = plans_of(operation, engine("prefill"), engine("decode", tp=2, order="NH"), 2 * ONE_BLOCK)
    chunks = list(plan.bind(**request(operation, (3, 18))))
    assert len(chunks) == (2 if operation == "READ" else 3)
    for chunk in chunks:
        direct = plan.direct.bind(**request(operation, chunk.tokens))
        assert [spec.remote for spec in chunk.specs] == [spec.remote for spec in direct]
        if operation == "READ":
            assert copied(chunk, 0) == bytes_of(direct[0].descriptors()[0])
        else:
            for ours, theirs in zip(chunk.specs, direct, strict=True):
                assert bytes_of(ours.descriptors()[1]) == bytes_of(theirs.descriptors()[1])


@pytest.mark.parametrize("run", [1, 2])
def test_each_writer_of_a_block_writes_its_own_tokens(run: int) -> None:
    """S12: a buffer has room for all tokens of a block; a source writes only those that it has."""
    (destination,) = engine("decode", tokens=8)
    for rank, plan in enumerate(staged_writes(engine("prefill", contexts=(2, run)), [destination])):
        (chunk,) = plan.bind(**request_of("WRITE", Blocks([3]), THEIRS, (0, 8)))
        assert moved(chunk, 1) == {
            (0, region.address + 3 * 512 + head * 128 + position * HEAD_BYTES + byte)
            for region in destination.regions
            for head in range(4)
            for position in range(8)
            if position // run % 2 == rank
            for byte in range(HEAD_BYTES)
        }
        assert moved(chunk, 0) == copied(chunk, 0)


def test_groups_have_ranges_of_their_own() -> None:
    """S13: a chunk has of each group what the group's range has of the window."""
    local, source = (regrouped(worker, "a", "b") for worker in (*engine("decode", order="NH"), *engine("prefill")))
    blocks = {"a": Blocks(range(5)), "b": Blocks(range(5))}
    given = request_of("READ", blocks, blocks, {"a": (0, 18), "b": (11, 17)})
    plan = staged(local, [source], 2 * ONE_BLOCK)
    assert ranges(plan, given) == [((0, 8), (0, 0)), ((8, 16), (11, 16)), ((16, 18), (16, 17))]
    same_as_direct([plan], given)


def test_groups_of_destinations_want_what_their_own_blocks_hold() -> None:
    """S13: where a destination has two groups for one of the source, both get their blocks, in common windows."""
    (plan,) = staged_writes(engine("prefill"), [regrouped(engine("decode", order="NH")[0], "a", "b")], 2 * ONE_BLOCK)
    ours = {"a": Blocks([7, 3, 5]), "b": Blocks([0, 9, 1], first=1)}
    for tokens, expected in ((None, [((0, 8),), ((8, 16),)]), ((5, 11), [((5, 8),), ((8, 11),)])):
        given = request_of("WRITE", ours, THEIRS, tokens)
        assert ranges(plan, given) == expected
        same_as_direct([plan], given)


def test_ranges_are_those_of_the_sources_groups() -> None:
    """S13: where a destination has one group for two of the writing source, either may have a range of its own."""
    (plan,) = staged_writes([regrouped(engine("prefill")[0], "a", "b")], engine("decode", order="NH"), 2 * ONE_BLOCK)
    theirs = {"a": Blocks([7, 3, 5, 6, 1]), "b": Blocks([0, 9], first=1)}
    given = request_of("WRITE", OURS, theirs, {"a": (2, 17), "b": (5, 11)})
    assert ranges(plan, given) == [((2, 8), (5, 8)), ((8, 16), (8, 11)), ((16, 17), (0, 0))]
    same_as_direct([plan], given)


@both_ways
@pytest.mark.parametrize(
    "tokens, expected",
    [
        ((1, 3), [((1, 2), (10, 11)), ((2, 3), (11, 12)), ((0, 0), (30, 31))]),
        ({"attn": (1, 3), "state": (11, 31)}, [((1, 2), (11, 12)), ((2, 3), (30, 31))]),
        ({"attn": (0, 0), "state": (10, 11)}, [((0, 0), (10, 11))]),
    ],
)
def test_chunk_n_carries_the_nth_state(operation: str, tokens: Any, expected: list[tuple[Any, ...]]) -> None:
    """S13: where there are more states than windows, they have chunks of their own."""
    (plan,) = plans_of(operation, [states("prefill", (0, 4))], [states("decode", (1, 3))], 128)
    blocks = {"attn": Blocks([3, 1]), "state": Blocks([4, 0, 2], ordinals=[10, 11, 30])}
    given = request_of(operation, blocks, blocks, tokens)
    assert plan.num_positions == 2
    assert ranges(plan, given) == expected
    same_as_direct([plan], given)


def test_states_of_two_groups_meet_by_ordinal() -> None:
    """S13: a state that one of a destination's groups lacks is a chunk's state for the other."""
    source, two = states("prefill", (0, 4)), states("decode", (0, 4))
    views = [attrs.evolve(source.views[1], name=name, offset_bytes=32 * 6 * i) for i, name in enumerate("ab")]
    regions = [attrs.evolve(source.regions[1], size_bytes=2 * 32 * 6)]
    source = Worker("prefill", 0, regions, [Group("s")], [attrs.evolve(view, group="s") for view in views])
    views = [attrs.evolve(view, group=view.name, axes=view.axes[::-1]) for view in views]
    two = Worker("decode", 0, regions, [Group("a"), Group("b")], views)
    ours = {"a": Blocks([1, 2], ordinals=[3, 4]), "b": Blocks([5, 0], ordinals=[4, 8])}
    given = request_of("WRITE", ours, {"s": Blocks([4, 0, 2], ordinals=[3, 4, 8])})
    (plan,) = staged_writes([source], [two])
    assert ranges(plan, given) == [((3, 4),), ((4, 5),), ((8, 9),)]
    assert [chunk.specs[0].num_bytes for chunk in plan.bind(**given)] == [32, 64, 32]
    same_as_direct([plan], given)


def test_positions_of_other_ranks_make_no_chunk() -> None:
    """S13: a window in which the destination holds nothing is left out, and no buffer slot is skipped."""
    local, sources = engine("decode", order="NH", contexts=(3, 8))[1], engine("prefill")
    plan = staged(local, sources, 2 * ONE_BLOCK)
    chunks = list(plan.bind(**request("READ")))
    assert [(dict(chunk.tokens)["attn"], chunk.buffer_slot) for chunk in chunks] == [((8, 16), 0)]


@both_ways
@pytest.mark.parametrize("null", [False, True])
def test_blocks_that_a_destination_lacks_are_not_moved(operation: str, null: bool) -> None:
    """S14: of a destination with gaps, and of a source that lacks the rest; in windows of one block, and of all."""
    ours = Blocks([6, *39 * [3], 9], null=3) if null else Blocks([6, 9], ordinals=[0, 40])
    given = request_of(operation, ours, Blocks([2, 8, 4, 6], ordinals=[0, 1, 80, 81]), (2, 325))
    by_block, at_once = [((2, 8), 6 * 2 * 64), ((320, 325), 5 * 2 * 64)], [((2, 325), 11 * 2 * 64)]
    for size, expected in ((2 * ONE_BLOCK, by_block), (1 << 18, at_once)):
        (plan,) = plans_of(operation, engine("prefill"), engine("decode", order="NH", tokens=8), size)
        assert [(chunk.tokens["attn"], chunk.specs[0].num_bytes) for chunk in plan.bind(**given)] == expected
        same_as_direct([plan], given)


def test_blocks_of_other_ranks_are_not_read() -> None:
    """S14: where whole blocks of a source are of other context ranks, those are left out."""
    local, sources = engine("decode", order="NH", contexts=(2, 4))[1], engine("prefill", tokens=4)
    plan = staged(local, sources)
    (chunk,) = plan.bind(**request("READ"))
    assert chunk.specs[0].num_bytes == 2 * 4 * 2 * 64
    assert plan.cost(16).read_amplification == 1
    assert staged(local, engine("prefill", tokens=8)).cost(16).read_amplification == 2


def test_another_group_of_a_source_is_not_read() -> None:
    """S12: where it has a head that lies between two that are needed, so that the buffer has it too."""

    def views(*held: tuple[str, str, int, int]) -> list[View]:
        found = []
        for group, region, start, stop in held:
            token, head = Axis("token", 0, 2, 2, 8 * (stop - start)), Axis("head", start, stop, 4, 8)
            axes = [token, head, Axis("dim", 0, 8, 8, 1)]
            found.append(View("t", group, region, "uint8", axes, 10, 16 * (stop - start)))
        return found

    regions = [Region("x", 1 << 40, 640), Region("y", 1 << 41, 640)]
    source = Worker("p", 0, regions, [Group("b", 2), Group("a", 2)], views(("b", "x", 1, 2), ("a", "y", 0, 4)))
    local = Worker("d", 0, regions, [Group("a", 2)], views(("a", "x", 0, 1), ("a", "y", 3, 4)))
    plan, tables = staged(local, [source]), {"a": Blocks([3, 4])}
    given = request_of("READ", tables, tables, (0, 4))
    (direct,), (chunk,) = plan.direct.bind(**given), plan.bind(**given)
    assert sum(copy.num_bytes for copy in chunk.copies) == direct.num_bytes == 64
    assert chunk.specs[0].num_bytes == 128
    same_as_direct([plan], given)


@both_ways
def test_a_prefix_that_the_destination_has_is_left_out(operation: str) -> None:
    """S12: tables that begin at a later block, of any ordinal on either side."""
    (plan,) = plans_of(operation, engine("prefill"), engine("decode", order="NH", tokens=6), 1 << 20)
    ours = Blocks([7, 3], first=2)
    given = request_of(operation, ours, Blocks([5, 6, 1], first=3), (13, 22))
    (chunk,) = plan.bind(**given)
    assert sum(copy.num_bytes for copy in chunk.copies) == 9 * 2 * 64
    same_as_direct([plan], given)
    (whole,) = plan.bind(**request_of(operation, ours, Blocks(range(9))))
    assert dict(whole.tokens) == {"attn": (12, 24)}


BAD: list[tuple[str, tuple[Any, Any, Any]]] = [
    ("NAME", ({"other": Blocks([1])}, THEIRS, (0, 4))),
    ("NAME", (OURS, {"other": Blocks([1])}, (0, 4))),
    ("NAME", (OURS, THEIRS, {"other": (0, 1)})),
    ("BLOCKS", ({}, THEIRS, (0, 20))),
    ("BLOCKS", (OURS, {}, (0, 20))),
    ("BLOCKS", (Blocks([1, 1]), THEIRS, (0, 4))),
    ("BLOCKS", (Blocks([10]), THEIRS, (0, 4))),
    ("BLOCKS", (OURS, THEIRS, (0, 21))),
    ("BLOCKS", (OURS, Blocks([2, 8, 4]), (0, 20))),
    ("BLOCKS", (OURS, Blocks([2, 8, 4]), None)),
    ("BLOCKS", (OURS, Blocks([2, 0, 4, 6, 1], null=0), (0, 20))),
    ("TOKENS", (OURS, THEIRS, (4, 3))),
    ("RANGE", (OURS, THEIRS, (-1, 3))),
    ("TYPE", (OURS, THEIRS, 5)),
]


@both_ways
@pytest.mark.parametrize("code, given", BAD)
def test_a_bad_request_is_refused_as_a_direct_one_is(operation: str, code: str, given: tuple[Any, Any, Any]) -> None:
    """S15: with the same error, before there is a chunk."""
    plan, wrong = simple(operation, 2 * ONE_BLOCK), request_of(operation, *given)
    with pytest.raises(KVPlanError) as direct:
        plan.direct.bind(**wrong)
    with pytest.raises(KVPlanError) as refused:
        plan.bind(**wrong)
    assert refused.value.code == code
    assert str(refused.value) == str(direct.value)
    with pytest.raises(KVPlanError, match="TYPE"):
        plan.bind(**{**wrong, "local": 3})


@both_ways
def test_an_id_that_does_not_fit_is_refused_before_there_is_a_chunk(operation: str) -> None:
    """S15: of a peer with more descriptors than ids, some blocks can be moved and others not."""
    group, axes = [Group("attn", 4)], [Axis("token", 0, 4, 4, 8), Axis("head", 0, 2, 2, 4), Axis("dim", 0, 4, 4, 1)]
    swapped = [attrs.evolve(axes[0], stride_bytes=4), attrs.evolve(axes[1], stride_bytes=16), axes[2]]
    small = Worker("small", 0, [Region("kv", 0, 320)], group, [View("a", "attn", "kv", "uint8", swapped, 10, 32)])
    view = View("a", "attn", "kv", "uint8", axes, 1 << 30, 32)
    large = Worker("large", 0, [Region("kv", 0, 1 << 36)], group, [view])
    source, destination = (large, small) if operation == "READ" else (small, large)
    (plan,) = plans_of(operation, [source], [destination], 2 * 32)
    tables: dict[str, Any] = {"local": {"attn": Blocks([1, 2])}, "tokens": (0, 7)}
    assert len(list(plan.bind(**tables, remote={"attn": Blocks([5, 9])}))) == 2
    with pytest.raises(KVPlanError) as refused:
        plan.bind(**tables, remote={"attn": Blocks([5, (1 << 30) - 1])})
    assert refused.value.code == "INT"


@both_ways
def test_what_is_not_transferred_is_not_staged(operation: str) -> None:
    """S12: where nothing is left, there are no transfers and no chunks, whatever the request."""
    plan = simple(operation, not_transferred=["layers.1"])
    assert {view.name for peer in plan.peers for view in peer.buffer.worker.views} == {"layers.0"}
    assert plan.transfers[0].not_transferred == ("layers.1",)
    same_as_direct([plan], request(operation))
    nothing = simple(operation, 1, not_transferred=["layers.0", "layers.1"])
    assert (nothing.peers, nothing.transfers, list(nothing.bind(**request(operation)))) == ((), (), [])


@both_ways
def test_sources_that_do_not_serve_have_no_buffer(operation: str) -> None:
    """S12: direct plans decide which sources serve; a source that does not serve has no buffer and no chunks."""
    sources, destinations = engine("prefill", tp=2, heads=1), engine("decode", order="NH", heads=1)
    plans = plans_of(operation, sources, destinations, 1 << 20)
    layers = [[view.name for view in peer.buffer.worker.views] for plan in plans for peer in plan.peers]
    assert layers == [["layers.0", "layers.1"]]
    assert sum(len(list(plan.bind(**request(operation)))) for plan in plans) == 1
    same_as_direct(plans, request(operation))


def test_arguments_may_be_iterators() -> None:
    """Remotes and siblings are gone through once."""
    sources, destinations = engine("prefill", tp=2), engine("decode", order="NH")
    plan = stage_writes(with_staging(sources[0]), iter(destinations), iter(sources[1:]), staging=NAME)
    assert (plan.direct.remotes, plan.direct.siblings) == (destinations, sources[1:])
    assert [transfer.siblings for transfer in plan.transfers] == [sources[1:]]


@pytest.mark.parametrize("make", [stage, stage_writes])
def test_an_unknown_region_is_refused(make: Any) -> None:
    """NAME, with the regions that there are; TYPE for no name."""
    (local,), remotes = engine("local"), engine("remote")
    with pytest.raises(KVPlanError) as refused:
        make(local, remotes, staging="spare")
    assert (
        str(refused.value) == "NAME: cannot stage in a region of local/0: expected one of 'kv.0', 'kv.1', got 'spare'"
    )
    with pytest.raises(KVPlanError, match="TYPE: cannot read staging"):
        make(local, remotes, staging=local.regions[0])


@pytest.mark.parametrize("make", [stage, stage_writes])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_memory_of_views_is_no_staging_region(make: Any, shift: int) -> None:
    """OVERLAP, also where another region has the same addresses; not on another device."""
    (local,), remotes = engine("local"), engine("remote")
    with pytest.raises(KVPlanError, match=r"OVERLAP: .* got view 'layers.0' in region 'kv.0'"):
        make(local, remotes, staging="kv.0")
    first = local.regions[0]
    over = Region("spare", first.address + shift * (first.size_bytes - 1), first.size_bytes)
    with pytest.raises(KVPlanError, match="OVERLAP"):
        make(attrs.evolve(local, regions=(*local.regions, over)), remotes, staging="spare")
    apart = attrs.evolve(over, address=first.address + shift * first.size_bytes, device_id=int(shift == 0))
    assert make(attrs.evolve(local, regions=(*local.regions, apart)), remotes, staging="spare").transfers


@both_ways
def test_a_region_without_room_is_refused(operation: str) -> None:
    """MEMORY, with the bytes that are needed; these are enough."""
    with pytest.raises(KVPlanError) as refused:
        simple(operation, ONE_BLOCK - 1)
    assert refused.value.code == "MEMORY"
    assert simple(operation, refused.value.details["needed_bytes"]).num_positions == 4


@pytest.mark.parametrize(
    "way, theirs, ours, tokens, expected",
    [
        ("exact", {"layout": "LBNHC"}, {"tp": 2, "layout": "LBHNC"}, 48, 28 * 3 * 16),
        ("whole", {"layout": "LBNHC"}, {"tp": 2, "layout": "LBHNC"}, 48, 28 * 3),
        ("write", {"layout": "LBNHC"}, {"tp": 2, "layout": "LBHNC"}, 48, 2 * 28 * 3),
        ("write", {"layout": "LBHNC"}, {"layout": "LBHNC", "tokens_per_block": 64}, 128, 28 * 2),
        ("write", {"layout": "LBNHC"}, {"layout": "BLHNC"}, 48, 3),
    ],
)
def test_long_runs_are_why(way: str, theirs: dict[str, Any], ours: dict[str, Any], tokens: int, expected: int) -> None:
    """Of a real model, a descriptor for each block and layer or so, where a direct plan has many more."""
    model = Model.shipped("qwen3-0.6b")
    sources, destinations = model.engine("p", num_blocks=9, **theirs), model.engine("d", num_blocks=9, **ours)
    options: dict[str, Any] = {"whole": True} if way == "whole" else {}
    operation = "WRITE" if way == "write" else "READ"
    (plan, *_) = plans_of(operation, sources, destinations, 1 << 26, **options)
    blocks, size = [5, 3, 8, 0, 7, 1, 6, 2], destinations[0].groups[0].tokens_per_block or 1
    given = request_of(operation, Blocks(blocks[: tokens // size]), Blocks(blocks[: tokens // 16]), (0, tokens))
    lengths = descriptors(plan, given)
    assert len(lengths) == expected
    direct = plan_writes(sources[0], destinations) if way == "write" else plan_reads(destinations[0], sources)
    specs = direct.bind(**given)
    assert sum(lengths) == (2 if way == "whole" else 1) * sum(spec.num_bytes for spec in specs)
    assert sum(spec.num_descriptors for spec in specs) > (3.9 if way == "exact" else 4) * expected
