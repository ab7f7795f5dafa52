"""compare: every difference by field, and which of them no plan bridges."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from kvplan import (
    Axis,
    Context,
    Group,
    KVPlanError,
    Model,
    Region,
    View,
    Worker,
    compare,
    contacts,
    plan_reads,
    plan_writes,
)
from kvplan.handshake import Difference
from tests.small import engine

MINE, OTHER = engine("decode")[0], engine("prefill")[0]


def with_views(worker: Worker, **changes) -> Worker:
    """The worker, with fields of all views changed."""
    return attrs.evolve(worker, views=[attrs.evolve(view, **changes) for view in worker.views])


def with_axis(worker: Worker, which: str, **changes) -> Worker:
    """The worker, with an axis of all views changed."""
    axes = [attrs.evolve(axis, **(changes if axis.name == which else {})) for axis in worker.views[0].axes]
    return with_views(worker, axes=axes)


def rows_of(local: Worker, remote: Worker) -> list[tuple[str, str, str, str]]:
    """Field, both values and effect of each difference."""
    return [(d.field, d.local, d.remote, d.effect) for d in compare(local, remote).differences]


def states(worker: Worker) -> Worker:
    """The worker's tensors as states, without their token axis."""
    axes = [axis for axis in worker.views[0].axes if axis.name != "token"]
    views = [attrs.evolve(view, group="ssm", axes=axes) for view in worker.views]
    return attrs.evolve(worker, groups=[Group("ssm")], views=views)


def moved(worker: Worker) -> Worker:
    """The worker in other memory: each region a byte longer, in VRAM of device 2."""
    regions = [attrs.evolve(r, size_bytes=r.size_bytes + 1, memory="VRAM", device_id=2) for r in worker.regions]
    return attrs.evolve(worker, regions=regions)


def test_equal_workers_have_no_difference():
    """Engine, rank, addresses and names of regions are not differences."""
    regions = [attrs.evolve(r, name=f"at.{r.address}", address=r.address + 5) for r in OTHER.regions]
    views = [attrs.evolve(view, region=region) for view, region in zip(OTHER.views, regions, strict=True)]
    comparison = compare(MINE, attrs.evolve(OTHER, rank=7, regions=regions, views=views))
    assert comparison.ok
    assert comparison.differences == ()
    assert str(comparison) == "decode/0 and prefill/7: 0 differences, none refused"


REFUSED = {
    "GROUP": (states(OTHER), ("group kind", "tokens", "states")),
    "DTYPE": (with_views(OTHER, dtype="float16"), ("dtype", "bfloat16", "float16")),
    "AXES": (with_axis(OTHER, "dim", name="channel"), ("axes", "dim head kv", "channel head kv")),
    "SIZE": (with_axis(OTHER, "head", size=8), ("size of head", "4", "8")),
    "TENSOR": (attrs.evolve(OTHER, views=OTHER.views[:1]), ("tensor", "present", "missing")),
}


@pytest.mark.parametrize("code, remote, difference", [(code, *row) for code, row in REFUSED.items()], ids=REFUSED)
def test_what_is_refused_is_what_planning_refuses(code, remote, difference):
    """Each field that must not differ comes first, with the code that plan_reads raises, and both values."""
    comparison = compare(MINE, remote)
    first = comparison.differences[0]
    assert not comparison.ok
    assert (first.field, first.local, first.remote) == difference
    assert (first.effect, first.code) == ("refused", code)
    with pytest.raises(KVPlanError, match=f"^{code}: "):
        plan_reads(MINE, [remote])


SHARDS = "shard of head", "all", "[2, 4) of 4"
BLOCKS = "2 of 2560 bytes", "2 of 1792 bytes"
STEP = with_views(engine("prefill", blocks=9)[0], num_blocks=8, block_stride_bytes=280)
ORDERS = "head 64, token 16, kv 8, dim 2", "token 64, head 16, kv 8, dim 2"
TURNS = "rank 0 of 1, interleave 1", "rank 1 of 2, interleave 3"
GROUP = attrs.evolve(OTHER, groups=[Group("kv", 4)], views=[attrs.evolve(view, group="kv") for view in OTHER.views])
PLANNED = {
    "shard": (engine("prefill", tp=2)[1], [SHARDS, "block stride", "regions"]),
    "block": (engine("prefill", tokens=6)[0], [("tokens per block", "4", "6"), "block stride", "strides", "regions"]),
    "blocks": (engine("prefill", blocks=7)[0], [("blocks", "10", "7"), ("regions", *BLOCKS)]),
    "step": (STEP, ["blocks", ("block stride", "256", "280"), "regions"]),
    "order": (engine("prefill", order="NH")[0], [("strides", *ORDERS)]),
    "turns": (engine("prefill", contexts=(2, 3))[1], [("context", *TURNS)]),
    "group": (GROUP, [("group", "attn", "kv")]),
    "memory": (moved(OTHER), [("memory", "DRAM 0", "VRAM 2"), ("regions", "2 of 2560 bytes", "2 of 2561 bytes")]),
}


@pytest.mark.parametrize("remote, expected", PLANNED.values(), ids=PLANNED)
def test_planned_differences_are_listed(remote, expected):
    """Fields that may differ are listed with both values, and planning succeeds."""
    rows = rows_of(MINE, remote)
    assert [row[3] for row in rows] == ["planned"] * len(expected)
    for row, value in zip(rows, expected, strict=True):
        assert value in (row[0], row[:3])
    assert compare(MINE, remote).ok
    assert plan_reads(MINE, [*engine("more", layers=2), remote])


def test_a_tensor_that_only_the_source_has_is_not_moved():
    """Its effect is `not moved`: it is listed before planned differences, and counted in the title."""
    comparison = compare(with_views(MINE, num_blocks=8), engine("prefill", layers=4)[0])
    assert comparison.ok
    assert comparison.not_moved == ("layers.2", "layers.3")
    first, *others = comparison.differences
    assert first == Difference("tensor", "layers.2-3", "missing", "present", "not moved")
    assert {each.effect for each in others} == {"planned"}
    assert str(comparison).startswith("decode/0 and prefill/0: 3 differences, none refused, 2 tensors not moved\n")


def test_a_misspelt_name_is_listed_on_both_sides():
    """A misspelt tensor is refused at the destination, and the tensor that it should match is not moved."""
    named = [attrs.evolve(view, name=view.name.replace("layers.1", "layer.1")) for view in OTHER.views]
    comparison = compare(MINE, attrs.evolve(OTHER, views=named))
    assert [(d.where, d.effect, d.code) for d in comparison.differences] == [
        ("layers.1", "refused", "TENSOR"),
        ("layer.1", "not moved", ""),
    ]
    assert str(comparison).splitlines()[0].endswith(": 2 differences, 1 refused, 1 tensor not moved")


def test_layers_with_one_difference_share_a_line():
    """Tensors that differ in the same way share a line, folded by their number."""
    local, remote = (engine(name, layers=12, heads=heads)[0] for name, heads in (("decode", 4), ("prefill", 4)))
    views = [attrs.evolve(view, dtype="float16") if i != 5 else view for i, view in enumerate(remote.views)]
    (difference,) = compare(local, attrs.evolve(remote, views=views)).differences
    assert difference == Difference("dtype", "layers.0-4,6-11", "bfloat16", "float16", "refused", "DTYPE")


def test_tensors_that_are_not_transferred_do_not_count():
    """Tensors that are not transferred are not compared, on either side."""
    draft = engine("prefill", layers=3)[0]
    assert compare(draft, MINE, not_transferred=("layers.2",)).ok
    assert [d.field for d in compare(draft, MINE, ("layers.2",)).differences] == ["regions"]
    assert compare(MINE, draft, not_transferred=("layers.2",)).not_moved == ()


def test_a_tensor_that_neither_worker_has_cannot_be_left_out():
    """A misspelt name would compare the tensor that was meant, without a word."""
    with pytest.raises(
        KVPlanError, match=r"^NAME: cannot leave out a tensor: .* got 'layer.1' \(did you mean 'layers.1'"
    ):
        compare(engine("prefill")[0], MINE, not_transferred=("layer.1",))


def parted(*dtypes: str) -> Worker:
    """A worker with K and V in views of different dtypes."""
    views = [
        View("kv", "g", "r", dtype, (Axis("kv", i, i + 1, 2, 0), Axis("dim", 0, 4, 4, 4)), 5, 16, i * 80)
        for i, dtype in enumerate(dtypes)
    ]
    return Worker("p", 0, [Region("r", 0, 160)], [Group("g")], views)


def test_views_of_one_tensor_that_differ_are_refused():
    """Both sides have K and V in the same two dtypes, but a plan would have to pair each with each."""
    mixed = parted("bfloat16", "float16")
    equal = attrs.evolve(mixed, engine_id="q")
    assert rows_of(mixed, equal) == [("dtype", "bfloat16 and float16", "bfloat16 and float16", "refused")]
    with pytest.raises(KVPlanError, match=r"^DTYPE: "):
        plan_reads(mixed, [equal])


def test_shards_of_several_views_are_listed_together():
    """K and V in two views on one side and in one on the other is a planned difference of parts."""
    axes = (Axis("kv", 0, 2, 2, 16), Axis("dim", 0, 4, 4, 4))
    joined = Worker("p", 0, [Region("r", 0, 160)], [Group("g")], [View("kv", "g", "r", "uint8", axes, 5, 32)])
    rows = rows_of(joined, parted("uint8", "uint8"))
    assert rows[0] == ("shard of kv", "all", "[0, 1) of 2 and [1, 2) of 2", "planned")


def test_digits_of_a_part_are_listed():
    """A shard of an axis in two digits is written with both."""
    axes = (Axis("head", 2, 4, 4, 16), Axis("head", 0, 2, 2, 8), Axis("dim", 0, 4, 4, 2))
    digits = Worker("p", 0, [Region("r", 0, 64)], [Group("g")], [View("x", "g", "r", "uint8", axes, 2, 32)])
    whole = with_views(digits, axes=(attrs.evolve(axes[0], start=0), *axes[1:]), num_blocks=1)
    assert rows_of(whole, digits)[0] == ("shard of head", "all", "[2, 4) of 4 x [0, 2) of 2", "planned")


def test_a_comparison_reads_as_a_table():
    """The text has a title with the number refused, and a line for each difference under the names of both sides."""
    model = Model.shipped("llama-3.1-8b")
    local = model.engine("decode", tp=8, layout="LBNHC", kv="split", tokens_per_block=16, num_blocks=10)[3]
    remote = model.engine("prefill", tp=4, layout="BLHNC", tokens_per_block=64, num_blocks=30)[1]
    assert str(compare(local, remote)) == (Path(__file__).parents[1] / "golden" / "comparison.txt").read_text().rstrip()


def test_regions_of_several_sizes_are_listed_by_their_bounds():
    """Regions are summarised by their number, the smallest and the largest size."""
    empty = Worker("p", 0, (), (), ())
    several = Worker("p", 0, [Region(f"{size}", size * 10, size) for size in (7, 3, 5)], (), ())
    assert rows_of(empty, several) == [("regions", "0 of 0 bytes", "3 of 3 to 7 bytes", "planned")]


@pytest.mark.parametrize("sides", [(MINE, None), ("p/0", MINE)])
def test_only_workers_compare(sides):
    """Anything but a worker raises TYPE."""
    with pytest.raises(KVPlanError, match=r"^TYPE: cannot read a side of a comparison: expected a Worker, got "):
        compare(*sides)


def test_contexts_of_one_worker_are_equal():
    """A context of size 1 has one form, whatever interleave it was described with."""
    spelled = attrs.evolve(OTHER, groups=[Group("attn", 4, Context(0, 1, 8))])
    assert compare(MINE, spelled).differences == ()


def test_another_model_is_refused() -> None:
    """Two models may store the same tensors; only their names tell, if both are known."""
    mistral, llama = (Model.shipped(name).engine(name, num_blocks=9)[0] for name in ("mistral-7b", "llama-3.1-8b"))
    (found,) = compare(mistral, llama).differences
    assert found == Difference("model", "worker", "mistral-7b", "llama-3.1-8b", "refused", "MODEL")
    for plan in (plan_reads, plan_writes):
        with pytest.raises(KVPlanError, match=r"^MODEL: "):
            plan(mistral, [llama])
    with pytest.raises(KVPlanError, match=r"^MODEL: "):
        contacts([mistral], [llama])
    assert not compare(attrs.evolve(mistral, model=""), llama).differences


def test_facts_that_differ_are_named() -> None:
    """Each fact of a model has a row of its own, the first sixteen; those that are equal have none."""
    (worker,) = Model.shipped("llama-3.1-8b").engine("d", num_blocks=9)
    local = attrs.evolve(worker, model={"weights": "5f1a", "config.rope_theta": 10000, "quantization": "fp8"})
    remote = attrs.evolve(worker, model={"weights": "5f1a", "config.rope_theta": 500000})
    assert compare(local, remote).differences == (
        Difference("model: config.rope_theta", "worker", "10000", "500000", "refused", "MODEL"),
        Difference("model: quantization", "worker", '"fp8"', "none", "refused", "MODEL"),
    )
    remote = attrs.evolve(worker, model={f"fact{i:03}": i for i in range(100)})
    found = compare(attrs.evolve(worker, model={"weights": "5f1a"}), remote).differences
    assert len(found) == 17
    assert found[-1].field == "model: 85 more facts"
    # a name beside facts
    (named,) = compare(attrs.evolve(worker, model="llama"), local).differences
    assert (named.field, named.local) == ("model", "llama")


def test_a_plan_is_not_reused_for_another_model() -> None:
    """An engine of the same geometry replaces the remotes only if it runs their model."""
    (ours,), (same,), (other,) = (engine(name) for name in ("decode", "p1", "p2"))
    plan = plan_reads(ours, [same])
    with pytest.raises(KVPlanError, match=r"^WORKER: cannot replace p1/0"):
        plan.with_remotes([attrs.evolve(other, model="b")])


@pytest.mark.parametrize(("heads", "codes"), [((0, 1, 1), set()), ((0, 1, 4), {"SIZE", "AXES"})])
def test_an_axis_of_size_1_is_as_good_as_none_but_has_a_size(heads, codes):
    """It differs from the same axis of another size, as planning says; without the axis nothing is refused."""
    (local,), (remote,) = engine("d", heads=1), engine("p", heads=1)
    other = with_axis(remote, "head", **dict(zip(("start", "stop", "size"), heads, strict=True)))
    assert {difference.code for difference in compare(local, other).differences} - {""} == codes
    without = with_views(remote, axes=[axis for axis in remote.views[0].axes if axis.name != "head"])
    assert compare(local, without).ok
    assert plan_reads(local, [without]).pairs
    if codes:
        with pytest.raises(KVPlanError, match="SIZE"):
            plan_reads(local, [other])
