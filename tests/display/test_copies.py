"""Copies: every byte that a plan copies, from its own descriptors, with the same coordinates on both sides."""

from __future__ import annotations

import attrs

from kvplan import Group, Model, TransferPlan, Worker, plan_reads, plan_writes
from kvplan.display.copies import BoxCopy, Panel, panels, positions_in
from tests.small import engine

LLAMA = Model.shipped("llama-3.1-8b")
GRANITE = Model.shipped("granite-4.0-h-tiny")


def lines(copy: BoxCopy) -> tuple[str, str, str]:
    """A copy's bytes, its remote end and its local end, in short."""
    ends = [f"{end.worker.label}:{end.ordinal} {end.intervals['position']}" for end in (copy.remote, copy.local)]
    return f"{copy.num_bytes}", ends[0], ends[1]


def places(copy: BoxCopy) -> list[tuple[object, ...]]:
    """Where both ends are, but for the addresses of regions."""
    return [
        (end.worker.label, end.region, end.ordinal, end.block, end.start, end.stop, end.tensor, *end.intervals.values())
        for end in (copy.local, copy.remote)
    ]


def only(plan: TransferPlan) -> Panel:
    (panel,) = panels(plan)
    return panel


def test_an_example_is_as_long_as_both_sides_take_to_repeat() -> None:
    """Blocks of 48 and of 32 tokens meet after 96 positions; what is too long to repeat is cut to two blocks."""
    (source,), (local,) = engine("prefill", tokens=48), engine("decode", tokens=32)
    assert only(plan_reads(local, [source])).tokens == (0, 96)
    (source,) = engine("prefill", tokens=37)
    assert only(plan_reads(local, [source])).tokens == (0, 64)


def test_an_example_fits_small_pools() -> None:
    """Where a pool has too few blocks, the example is as long as they hold."""
    (source,), (local,) = engine("prefill", tokens=4, blocks=2), engine("decode", tokens=32)
    assert only(plan_reads(local, [source])).tokens == (0, 8)


def test_an_example_has_every_byte_once() -> None:
    """The copies of a panel are all the bytes of the example's positions, each once."""
    panel = only(plan_reads(LLAMA.engine("d", tp=2)[1], LLAMA.engine("p", tp=4, layout="LBNHC", tokens_per_block=64)))
    assert panel.tokens == (0, 64)
    assert sum(copy.num_bytes for copy in panel.copies) == 64 * 4 * 512
    starts = {(copy.local.block, copy.local.start) for copy in panel.copies}
    assert len(starts) == len(panel.copies) == 256


def test_positions_are_those_of_the_request() -> None:
    """Slots are printed as positions, whatever block or context they are in."""
    sources, (local,) = engine("prefill", heads=1, contexts=(2, 1)), engine("decode", heads=1, tokens=8)
    panel = only(plan_reads(local, sources))
    assert panel.tokens == (0, 8)
    assert [lines(copy)[1:] for copy in panel.copies[:2]] == [
        ("prefill/0:0 0", "decode/0:0 0"),
        ("prefill/0:0 2", "decode/0:0 2"),
    ]
    blocks = {
        copy.remote.worker.rank: str(positions_in(copy.remote.layer.group, copy.remote.ordinal))
        for copy in panel.copies
    }
    assert blocks == {0: "0..6", 1: "1..7"}


def test_a_run_over_layers_is_drawn_for_one() -> None:
    """Where one descriptor moves all layers of a block, a copy is one layer's part of it."""
    plan = plan_reads(LLAMA.engine("d", layout="BLHNC")[0], LLAMA.engine("p", layout="BLHNC"))
    (copy,) = only(plan).copies
    assert copy.num_bytes == 65536


def test_addresses_may_be_the_last_of_all() -> None:
    """Regions of a worker may end where 64 bits end; what is copied does not change."""
    (low,), sources = engine("decode"), engine("prefill", tp=2)
    end = max(region.address + region.size_bytes for region in low.regions)
    regions = [attrs.evolve(region, address=region.address + 2**64 - end) for region in low.regions]
    high = attrs.evolve(low, regions=regions)
    panel = only(plan_reads(high, sources))
    ends = [places(copy) for copy in only(plan_reads(low, sources)).copies]
    assert [places(copy) for copy in panel.copies] == ends


def test_layers_of_different_sources_are_panels_apart() -> None:
    """Pipeline stages that hold different layers have panels of their own, with their number of layers."""
    found = panels(plan_reads(LLAMA.engine("d")[0], LLAMA.engine("p", layers_per_stage=[10, 22])))
    assert [(panel.num_layers, panel.copies[0].remote.worker.label) for panel in found] == [(10, "p/0"), (22, "p/1")]
    assert found[1].copies[0].local.tensor == "layers.10.attn"


def test_equal_layers_of_several_groups_are_one_panel() -> None:
    """Groups of a hybrid model that share their memory have one panel where their layers are equal."""
    model = GRANITE.grouped()
    engines = [model.engine(name, tp=2, shared=True, num_blocks=9) for name in "dp"]
    found = panels(plan_reads(engines[0][1], engines[1]))
    assert [panel.num_layers for panel in found] == [36, 4]
    assert [panel.tokens for panel in found] == [None, (0, 16)]
    assert found[0].facts == "one state of one of 36 equal layers: 778.5 KiB in 4 copies of 768 bytes to 768 KiB"


def test_a_writer_is_the_source() -> None:
    """Of a plan of writes, the local end is the source's; only its own share is shown."""
    sources, locals_ = engine("prefill", tp=2), engine("decode", tokens=8)
    panel = only(plan_writes(sources[1], locals_, sources[:1]))
    assert {copy.local.worker.label for copy in panel.copies} == {"prefill/1"}
    local, remote = places(panel.copies[0])
    assert local[:6] == ("prefill/1", "kv.0", 0, 0, 0, 64)
    assert remote[:6] == ("decode/0", "kv.0", 0, 0, 256, 320)
    for end in (local, remote):
        assert sorted(map(str, end[6:])) == ["0-3", "0-3", "2", "KV", "layers.0"]


def test_what_moves_nothing_is_not_shown() -> None:
    """Tensors that are not transferred have no panel."""
    source = engine("prefill")
    assert panels(plan_reads(engine("decode")[0], source, not_transferred=["layers.0", "layers.1"])) == ()


def test_a_group_that_no_remote_has_is_not_shown() -> None:
    """Of a local group whose tensors are not transferred, and which no remote has, there is nothing to show or bind."""
    (local,), sources = engine("decode"), engine("prefill")
    views = [*local.views, attrs.evolve(local.views[0], name="draft.0", group="draft", offset_bytes=2560)]
    regions = [attrs.evolve(region, size_bytes=2 * region.size_bytes) for region in local.regions]
    both = attrs.evolve(local, regions=regions, groups=[Group("draft", 4), *local.groups], views=views)
    plan = plan_reads(both, sources, not_transferred=["draft.0"])
    assert only(plan).tensors == ("layers.0", "layers.1")


def test_equal_addresses_of_two_devices_are_not_confused() -> None:
    """Regions at one address of several devices: a copy is found on the device that its descriptor names."""
    sources, (local,) = LLAMA.engine("p", kv="split", num_blocks=9), LLAMA.engine("d", num_blocks=9)
    regions = [attrs.evolve(region, address=1 << 40, device_id=i) for i, region in enumerate(sources[0].regions)]
    panel = only(plan_reads(local, [attrs.evolve(sources[0], regions=regions)]))
    assert {(str(copy.remote.intervals["kv"]), copy.remote.region) for copy in panel.copies} == {
        ("K", "layers.0.attn.k"),
        ("V", "layers.0.attn.v"),
    }


def test_groups_that_share_memory_are_not_confused() -> None:
    """Of remote groups over each other, a copy is in the one that has its tensor, whatever the block ids are."""
    (worker,) = engine("prefill")
    views = [worker.views[0], attrs.evolve(worker.views[1], group="other", region="kv.0")]
    source = Worker("prefill", 0, worker.regions, [*worker.groups, Group("other", 4)], views)
    panel = only(plan_reads(engine("decode")[0], [source]))
    assert panel.num_layers == 2
    assert {end.tensor for copy in panel.copies for end in (copy.local, copy.remote)} == {"layers.0"}
    assert {copy.remote.layer.group.name for copy in panel.copies} == {"attn"}


def test_a_stage_without_a_layer_of_a_group_is_shown() -> None:
    """A pipeline stage has all groups, and the picture of its plan the layers that it has."""
    stages, sources = GRANITE.engine("d", pp=40, num_blocks=9), GRANITE.engine("p", num_blocks=9)
    kinds = [[panel.tokens for panel in panels(plan_reads(stage, sources))] for stage in stages[4:7]]
    assert kinds == [[None], [(0, 16)], [None]]
