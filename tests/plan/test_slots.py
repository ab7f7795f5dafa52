"""Slots of several tokens: a scale for each block, a compressed row for a few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import (
    Axis,
    Blocks,
    Context,
    Group,
    KVPlanError,
    Region,
    TransferPlan,
    View,
    Worker,
    certify,
    decode,
    encode,
    explain,
    plan_mesh,
    plan_reads,
    tails,
    verify,
)
from kvplan.handshake import compare
from kvplan.protocol.page_shards import shards_of
from kvplan.staging import stage
from kvplan.verification import FakeMemory

DIM = 8


def quantized(name: str, tokens_per_block: int, tokens_per_scale: int, rank: int = 0, size: int = 1) -> Worker:
    """FP8 values of each token, and a float32 scale for every ``tokens_per_scale``, in 20 blocks."""
    context = Context(rank, size, 16) if size > 1 else Context()
    groups = [
        Group("attn", tokens_per_block, context),
        Group("scales", tokens_per_block, context, tokens_per_slot=tokens_per_scale),
    ]
    num_slots = groups[1].num_slots
    values = (Axis("token", 0, tokens_per_block, tokens_per_block, DIM), Axis("dim", 0, DIM, DIM, 1))
    scales = (Axis("token", 0, num_slots, num_slots, 4),)
    views = [
        View("layers.0", "attn", "values", "float8_e4m3fn", values, 20, tokens_per_block * DIM),
        View("layers.0.scale", "scales", "scales", "float32", scales, 20, num_slots * 4),
    ]
    address = (1 + rank) << 40
    regions = [
        Region("values", address, 20 * tokens_per_block * DIM),
        Region("scales", address + (1 << 30), 80 * num_slots),
    ]
    return Worker(name, rank, regions, groups, views)


def both(blocks: Blocks) -> dict[str, Blocks]:
    """One table for values and scales, which are in the same blocks."""
    return {"attn": blocks, "scales": blocks}


@pytest.mark.parametrize("tokens", [(0, 64), (0, 40), (16, 50), (32, 33), (48, 48), None])
@pytest.mark.parametrize("sizes", [(16, 16), (64, 16), (16, 64), (48, 32), (32, 48)])
def test_scales_of_equal_units_move_with_their_tokens(sizes: tuple[int, int], tokens: Any) -> None:
    """A scale for 16 tokens goes to the scale of the same 16 tokens, whatever the blocks are."""
    plan = plan_reads(quantized("d", sizes[0], 16), [quantized("p", sizes[1], 16)])
    num_blocks = [-(-(tokens[1] if tokens else 192) // size) for size in sizes]
    tables = [
        both(Blocks(np.random.default_rng(size).permutation(20)[:n])) for size, n in zip(sizes, num_blocks, strict=True)
    ]
    request: dict[str, Any] = {"local": tables[0], "remote": tables[1], "tokens": tokens}
    report = verify(plan, **request)
    assert report.ok, str(report)
    start, stop = tokens or (0, 192)
    num_scales = -(-stop // 16) - start // 16 if start < stop else 0
    assert report.num_bytes == (stop - start) * DIM + num_scales * 4
    assert certify(plan).complete


def test_a_scale_is_that_of_its_tokens() -> None:
    """Bytes, not labels: positions 32 to 47 have the scale that they have at the source."""
    local, remote = quantized("d", 64, 16), quantized("p", 16, 16)
    with FakeMemory([local, remote]) as memory:
        region = remote.regions[1]
        memory.write(remote, region.address, np.arange(20, dtype=np.float32).view(np.uint8), 0)
        (spec,) = plan_reads(local, [remote]).bind(
            local=both(Blocks([3])), remote=both(Blocks([9, 4, 7, 1])), tokens=(16, 64)
        )
        memory.execute(spec)
        scales = memory.read(local, local.regions[1].address, 80 * 4, 0).view(np.float32)
        assert scales[12:16].tolist() == [0, 4, 7, 1]


@pytest.mark.parametrize(
    ("units", "kinds"),
    [
        ((64, 16), "64 tokens.* 16 tokens"),
        ((16, 1), "16 tokens .*a token group"),
        ((1, 16), "a token group .*16 tokens"),
    ],
)
def test_scales_of_unequal_units_are_refused(units: tuple[int, int], kinds: str) -> None:
    """One scale for 64 tokens is none of those for 16: values would have to be quantized again."""
    with pytest.raises(
        KVPlanError, match=rf"^GROUP: .* 'layers.0.scale': .*{kinds}.*\(a value of several tokens cannot"
    ):
        plan_reads(quantized("d", 64, units[0]), [quantized("p", 64, units[1])])
    (difference,) = (
        found
        for found in compare(quantized("d", 64, units[0]), quantized("p", 64, units[1])).differences
        if found.field == "group kind"
    )
    assert difference.code == "GROUP"


def as_state(worker: Worker) -> Worker:
    """The worker with its scales described as states."""
    views = [attrs.evolve(view, axes=()) if view.group == "scales" else view for view in worker.views]
    return attrs.evolve(worker, groups=[worker.groups[0], Group("scales")], views=views)


def test_a_scale_for_each_block_is_no_state() -> None:
    """As states, scales of unequal blocks would pair by ordinal: without a range of their own they are refused."""
    plan = plan_reads(as_state(quantized("d", 64, 64)), [as_state(quantized("p", 16, 16))])
    with pytest.raises(KVPlanError, match=r"^BLOCKS: cannot bind remote group 'scales': expected blocks \[0, 1\)"):
        plan.bind(local=both(Blocks([3])), remote=both(Blocks([9, 4, 7, 1])), tokens=(0, 64))
    with pytest.raises(KVPlanError, match=r"^GROUP: .* a state group .* a group of one value for 16 tokens"):
        plan_reads(as_state(quantized("d", 64, 64)), [quantized("p", 16, 16)])


def test_a_range_that_begins_inside_a_slot_is_refused() -> None:
    """The scale of positions 32 to 47 would replace the one by which 32 to 39 were quantized here."""
    plan = plan_reads(quantized("d", 16, 16), [quantized("p", 16, 16)])
    tables = both(Blocks(range(4)))
    with pytest.raises(KVPlanError, match=r"^TOKENS: cannot bind tokens of group 'scales': .* multiple of 16,"):
        plan.bind(local=tables, remote=tables, tokens=(40, 64))
    apart = {"attn": (40, 64), "scales": (32, 64)}
    assert verify(plan, local=tables, remote=tables, tokens=apart).ok


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tokens_per_block": 24}, "tokens_per_block to be a multiple of tokens_per_slot 16, got 24"),
        ({"tokens_per_block": None}, "got a state group"),
        ({"tokens_per_block": 32, "context": Context(0, 2, 8)}, "interleave_tokens to be a multiple of .* 16, got 8"),
    ],
)
def test_a_slot_is_in_one_block_on_one_rank(arguments: Mapping[str, Any], text: str) -> None:
    """GROUP: neither a block nor a turn of the context ends inside a slot."""
    with pytest.raises(KVPlanError, match=f"^GROUP: cannot describe group 'scales': expected .*{text}"):
        Group("scales", **arguments, tokens_per_slot=16)
    with pytest.raises(KVPlanError, match=r"^RANGE"):
        Group("scales", 16, tokens_per_slot=0)


def test_a_token_axis_of_one_slot_of_several_tokens_may_be_left_out() -> None:
    """One value for each block is an array of blocks; of one value for each token, the axis says so."""
    region = Region("scales", 1 << 40, 80)
    view = View("scale", "scales", "scales", "float32", (), 20, 4)
    worker = Worker("d", 0, [region], [Group("scales", 16, tokens_per_slot=16)], [view])
    other = attrs.evolve(quantized("p", 64, 16), engine_id="p")
    renamed = [attrs.evolve(view, name="scale") for view in other.views if view.group == "scales"]
    assert certify(plan_reads(worker, [attrs.evolve(other, views=renamed)])).complete
    with pytest.raises(KVPlanError, match=r"^SIZE: .* a token axis of 1 slots"):
        attrs.evolve(worker, groups=[Group("scales", 1)])


def test_contexts_share_whole_slots() -> None:
    """Two ranks that take 16 positions in turn take one scale in turn."""
    destinations = [quantized("d", 32, 16, rank, 2) for rank in range(2)]
    mesh = plan_mesh(destinations, [quantized("p", 64, 16)])
    assert certify(mesh).complete
    report = verify(mesh, local=both(Blocks([5, 2])), remote=both(Blocks([7, 1])), tokens=(0, 100))
    assert report.ok, str(report)
    assert report.num_bytes == 100 * DIM + 7 * 4


def test_offers_carry_slots_and_leave_out_what_is_usual() -> None:
    """An offer without the key is one of slots of a token each, as before."""
    worker = quantized("d", 64, 16)
    assert decode(encode(worker)) == worker
    assert encode(worker).count(b"tokens_per_slot") == 1
    assert "4 values of 16 tokens each per block" in str(explain(worker))


def test_scales_are_staged_counted_and_have_tails() -> None:
    """In two steps, in costs, and behind a request's end."""
    local, remote = quantized("d", 64, 16), quantized("p", 16, 16)
    staging = Region("staging", 1 << 50, 1 << 14)
    staged = stage(attrs.evolve(local, regions=(*local.regions, staging)), [remote], staging="staging")
    request: dict[str, Any] = {
        "local": both(Blocks([3, 8])),
        "remote": both(Blocks([9, 4, 7, 1, 2, 6])),
        "tokens": (16, 90),
    }
    chunks = list(staged.bind(**request))
    plan: TransferPlan = plan_reads(local, [remote])
    direct = sum(spec.num_bytes for spec in plan.bind(**request))
    assert sum(copy.num_bytes for chunk in chunks for copy in chunk.copies) == direct == 74 * DIM + 5 * 4
    assert plan.cost(90).num_bytes == 90 * DIM + 6 * 4
    assert plan.cost().tokens == 64
    (tail,) = tails(local, {"scales": Blocks([3, 8])}, (0, 90))["layers.0.scale"].tolist()
    assert tail == [local.regions[1].address + 8 * 16 + 8, 8, 0]


def test_a_page_of_a_store_has_whole_values() -> None:
    """Four scales of 16 tokens each, and their 64 tokens. LAYOUT: a value of tokens of two pages."""
    worker = attrs.evolve(quantized("p", 64, 16), model="m")
    by_unit = {shard.group.tokens_per_slot: shard for shard in shards_of(worker, 64)}
    assert {unit: (shard.tokens_per_page, shard.num_bytes) for unit, shard in by_unit.items()} == {
        1: (64, 64 * DIM),
        16: (64, 4 * 4),
    }
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .* 'scales': expected tokens_per_page divided by 16, .* got 24$"):
        shards_of(worker, 24)


def test_other_tokens_per_slot_are_no_proof() -> None:
    """PROOF, or SIZE: ids of a group that the worker does not have, or a worker whose views have other slots."""
    plan = plan_reads(quantized("d", 64, 16), [quantized("p", 64, 16)])
    (pair,) = plan.pairs
    changed = []
    for ids in pair.group_pairs:
        local, remote = (attrs.evolve(group, tokens_per_slot=8) for group in ids.groups)
        changed.append(attrs.evolve(ids, groups=(local, remote)))
    with pytest.raises(KVPlanError, match=r"^PROOF: .* expected groups in the form"):
        certify(attrs.evolve(plan, pairs=(attrs.evolve(pair, group_pairs=tuple(changed)),)))
    with pytest.raises(KVPlanError, match=r"^SIZE: .* a token axis of 8 slots .* got a token axis of 64 slots"):
        attrs.evolve(plan.local, groups=[attrs.evolve(group, tokens_per_slot=8) for group in plan.local.groups])
