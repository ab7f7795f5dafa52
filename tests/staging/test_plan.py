"""Staged plans: requests in two steps, chunk by chunk (staging.S12 to staging.S15)."""

from __future__ import annotations

from typing import Any

import attrs
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
    plan_reads,
)
from kvplan.staging import Chunk, StagedPlan, stage
from tests.small import engine
from tests.staged import (
    NAME,
    ONE_BLOCK,
    Request,
    bytes_of,
    descriptors,
    plans_of,
    request_of,
    same_as_direct,
    staged,
    with_staging,
)

OURS, THEIRS = Blocks([7, 3, 5, 0, 9]), Blocks([2, 8, 4, 6, 1])
"""The blocks of the destination and of the source, of 4 tokens each."""


def request(tokens: Any = (0, 20)) -> Request:
    return request_of(OURS, THEIRS, tokens)


def simple(size: int = 1 << 20, **options: Any) -> StagedPlan:
    """A head-major source and a token-major destination, of one worker each."""
    (plan,) = plans_of(engine("prefill"), engine("decode", order="NH"), size, **options)
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
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "size, tokens",
    [(64, (0, 20)), (8, (0, 20)), (8, (3, 17)), (64, (9, 10)), (64, (4, 4))],
)
def test_both_steps_write_what_a_direct_plan_writes(
    theirs: dict[str, Any], ours: dict[str, Any], whole: bool, size: int, tokens: tuple[int, int]
) -> None:
    """staging.S12: the memory of all destinations is the same in the end, and that of the sources is unchanged."""
    plans = plans_of(engine("prefill", **theirs), engine("decode", **ours), size * ONE_BLOCK, whole=whole)
    blocks = Blocks([7, 3, 5, 0, 9, 1, 2]), Blocks([2, 8, 4, 6, 1, 9, 0])
    same_as_direct(plans, request_of(*blocks, tokens), moves=tokens != (4, 4))


def test_transfers_are_plans_of_the_local_worker() -> None:
    """staging.S12: one with each peer that bytes move from, of all regions of the local worker."""
    plan = plans_of(engine("4", 4), engine("2", 2), 1 << 20)[1]
    assert [(each.operation, each.local.key, each.remotes) for each in plan.transfers] == [
        ("READ", ("2", 1), (plan.direct.remotes[rank],)) for rank in (2, 3)
    ]
    assert {each.local.regions for each in plan.transfers} == {plan.direct.local.regions}
    assert repr(plan) == "<StagedPlan 2/1: 2 sources, 8192 positions at a time>"


def test_chunks_take_the_lowest_free_blocks() -> None:
    """staging.S13: windows begin at multiples of their length and are cut to the request; the second step empties
    blocks, which are free for the chunk after the next.
    """
    plan = simple(2 * ONE_BLOCK)
    chunks = list(plan.bind(**request((1, 18))))
    assert plan.num_positions == 8
    assert [dict(chunk.tokens) for chunk in chunks] == [{"attn": (1, 8)}, {"attn": (8, 16)}, {"attn": (16, 18)}]
    assert [[ids.tolist() for ids in chunk.blocks] for chunk in chunks] == [[[0, 1]], [[2, 3]], [[0]]]
    first, second, third = (moved(chunk, 0) for chunk in chunks)
    assert [copied(chunk, 1) for chunk in chunks] == [first, second, third]
    assert first.isdisjoint(second)
    assert third.isdisjoint(second)
    assert not third.isdisjoint(first)
    steps = "256 bytes read, 256 copied into place"
    assert repr(chunks[2]) == f"<Chunk of {{'attn': (16, 18)}}: {steps}, 1 staging block>"


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ((1, 3), [((1, 2), (10, 11)), ((2, 3), (11, 12)), ((0, 0), (30, 31))]),
        ({"attn": (1, 3), "state": (11, 31)}, [((1, 2), (11, 12)), ((2, 3), (30, 31))]),
        ({"attn": (0, 0), "state": (10, 11)}, [((0, 0), (10, 11))]),
    ],
)
def test_chunk_n_carries_the_nth_state(tokens: Any, expected: list[tuple[Any, ...]]) -> None:
    """staging.S13: where there are more states than windows, they have chunks of their own."""
    (plan,) = plans_of([states("prefill", (0, 4))], [states("decode", (1, 3))], 128)
    blocks = {"attn": Blocks([3, 1]), "state": Blocks([4, 0, 2], ordinals=[10, 11, 30])}
    given = request_of(blocks, blocks, tokens)
    assert plan.num_positions == 2
    assert ranges(plan, given) == expected
    same_as_direct([plan], given)


def test_positions_of_other_ranks_make_no_chunk() -> None:
    """staging.S13: a window in which the destination holds nothing is left out, and takes no blocks."""
    local, sources = engine("decode", order="NH", contexts=(3, 8))[1], engine("prefill")
    plan = staged(local, sources, 2 * ONE_BLOCK)
    chunks = list(plan.bind(**request()))
    assert [(dict(chunk.tokens)["attn"], chunk.blocks[0].tolist()) for chunk in chunks] == [((8, 16), [0, 1])]


@pytest.mark.parametrize("null", [False, True])
def test_blocks_that_a_destination_lacks_are_not_moved(null: bool) -> None:
    """staging.S14: of a destination with gaps, and of a source that lacks the rest; in windows of one block, and of
    all.
    """
    ours = Blocks([6, *39 * [3], 9], null=3) if null else Blocks([6, 9], ordinals=[0, 40])
    given = request_of(ours, Blocks([2, 8, 4, 6], ordinals=[0, 1, 80, 81]), (2, 325))
    by_block, at_once = [((2, 8), 6 * 2 * 64), ((320, 325), 5 * 2 * 64)], [((2, 325), 11 * 2 * 64)]
    for size, expected in ((2 * ONE_BLOCK, by_block), (1 << 18, at_once)):
        (plan,) = plans_of(engine("prefill"), engine("decode", order="NH", tokens=8), size)
        assert [(chunk.tokens["attn"], chunk.specs[0].num_bytes) for chunk in plan.bind(**given)] == expected
        same_as_direct([plan], given)


def test_blocks_of_other_ranks_are_not_read() -> None:
    """staging.S14: where whole blocks of a source are of other context ranks, those are left out."""
    local, sources = engine("decode", order="NH", contexts=(2, 4))[1], engine("prefill", tokens=4)
    plan = staged(local, sources)
    (chunk,) = plan.bind(**request())
    assert chunk.specs[0].num_bytes == 2 * 4 * 2 * 64
    assert plan.cost(16).read_amplification == 1
    assert staged(local, engine("prefill", tokens=8)).cost(16).read_amplification == 2


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


@pytest.mark.parametrize("code, given", BAD)
def test_a_bad_request_is_refused_as_a_direct_one_is(code: str, given: tuple[Any, Any, Any]) -> None:
    """staging.S15: with the same error, before there is a chunk."""
    plan, wrong = simple(2 * ONE_BLOCK), request_of(*given)
    with pytest.raises(KVPlanError) as direct:
        plan.direct.bind(**wrong)
    with pytest.raises(KVPlanError) as refused:
        plan.bind(**wrong)
    assert refused.value.code == code
    assert str(refused.value) == str(direct.value)
    with pytest.raises(KVPlanError, match="TYPE"):
        plan.bind(**{**wrong, "local": 3})


def test_an_id_that_does_not_fit_is_refused_before_there_is_a_chunk() -> None:
    """staging.S15: of a peer with more descriptors than ids, some blocks can be moved and others not."""
    group, axes = [Group("attn", 4)], [Axis("token", 0, 4, 4, 8), Axis("head", 0, 2, 2, 4), Axis("dim", 0, 4, 4, 1)]
    swapped = [attrs.evolve(axes[0], stride_bytes=4), attrs.evolve(axes[1], stride_bytes=16), axes[2]]
    small = Worker("small", 0, [Region("kv", 0, 320)], group, [View("a", "attn", "kv", "uint8", swapped, 10, 32)])
    view = View("a", "attn", "kv", "uint8", axes, 1 << 30, 32)
    large = Worker("large", 0, [Region("kv", 0, 1 << 36)], group, [view])
    (plan,) = plans_of([large], [small], 2 * 32)
    tables: dict[str, Any] = {"local": {"attn": Blocks([1, 2])}, "tokens": (0, 7)}
    assert len(list(plan.bind(**tables, remote={"attn": Blocks([5, 9])}))) == 2
    with pytest.raises(KVPlanError) as refused:
        plan.bind(**tables, remote={"attn": Blocks([5, (1 << 30) - 1])})
    assert refused.value.code == "INT"


def test_what_is_not_transferred_is_not_staged() -> None:
    """staging.S12: where nothing is left, there are no transfers and no chunks, whatever the request."""
    plan = simple(not_transferred=["layers.1"])
    assert {view.name for peer in plan.peers for view in peer.buffer.worker.views} == {"layers.0"}
    assert plan.transfers[0].not_transferred == ("layers.1",)
    same_as_direct([plan], request())
    nothing = simple(1, not_transferred=["layers.0", "layers.1"])
    assert (nothing.peers, nothing.transfers, list(nothing.bind(**request()))) == ((), (), [])


def test_sources_that_do_not_serve_have_no_buffer() -> None:
    """staging.S12: direct plans decide which sources serve; one that does not has no buffer and no chunks."""
    sources, destinations = engine("prefill", tp=2, heads=1), engine("decode", order="NH", heads=1)
    plans = plans_of(sources, destinations, 1 << 20)
    layers = [[view.name for view in peer.buffer.worker.views] for plan in plans for peer in plan.peers]
    assert layers == [["layers.0", "layers.1"]]
    assert sum(len(list(plan.bind(**request()))) for plan in plans) == 1
    same_as_direct(plans, request())


def test_arguments_may_be_iterators() -> None:
    """Remotes are gone through once."""
    sources, (local,) = engine("prefill", tp=2), engine("decode", order="NH")
    plan = stage(with_staging(local), iter(sources), staging=NAME)
    assert (plan.direct.remotes, len(plan.transfers)) == (sources, 2)


def test_an_unknown_region_is_refused() -> None:
    """NAME, with the regions that there are; TYPE for no name."""
    (local,), remotes = engine("local"), engine("remote")
    with pytest.raises(KVPlanError) as refused:
        stage(local, remotes, staging="spare")
    assert (
        str(refused.value)
        == "NAME: cannot stage in a region of local/0: expected one of the regions kv.0-1, got 'spare'"
    )
    with pytest.raises(KVPlanError, match="TYPE: cannot read staging"):
        stage(local, remotes, staging=local.regions[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_memory_of_views_is_no_staging_region(shift: int) -> None:
    """OVERLAP, also where another region has the same addresses; not on another device."""
    (local,), remotes = engine("local"), engine("remote")
    with pytest.raises(KVPlanError, match=r"OVERLAP: .* got view 'layers.0' in region 'kv.0'"):
        stage(local, remotes, staging="kv.0")
    first = local.regions[0]
    over = Region("spare", first.address + shift * (first.size_bytes - 1), first.size_bytes)
    with pytest.raises(KVPlanError, match="OVERLAP"):
        stage(attrs.evolve(local, regions=(*local.regions, over)), remotes, staging="spare")
    apart = attrs.evolve(over, address=first.address + shift * first.size_bytes, device_id=int(shift == 0))
    assert stage(attrs.evolve(local, regions=(*local.regions, apart)), remotes, staging="spare").transfers


def test_a_region_without_room_is_refused() -> None:
    """MEMORY, with the bytes that are needed; these are enough."""
    with pytest.raises(KVPlanError) as refused:
        simple(ONE_BLOCK - 1)
    assert refused.value.code == "MEMORY"
    assert simple(refused.value.details["needed_bytes"]).num_positions == 4


@pytest.mark.parametrize("whole, expected", [(False, 28 * 3 * 16), (True, 28 * 3)])
def test_long_runs_are_why(whole: bool, expected: int) -> None:
    """Of a real model, a descriptor for each block and layer or so, where a direct plan has many more."""
    model = Model.shipped("qwen3-0.6b")
    sources = model.engine("p", num_blocks=9, layout="LBNHC")
    destinations = model.engine("d", num_blocks=9, tp=2, layout="LBHNC")
    (plan, _) = plans_of(sources, destinations, 1 << 26, whole=whole)
    given = request_of(Blocks([5, 3, 8]), Blocks([5, 3, 8]), (0, 48))
    lengths = descriptors(plan, given)
    assert len(lengths) == expected
    specs = plan_reads(destinations[0], sources).bind(**given)
    assert sum(lengths) == (2 if whole else 1) * sum(spec.num_bytes for spec in specs)
    assert sum(spec.num_descriptors for spec in specs) > (4 if whole else 3.9) * expected
