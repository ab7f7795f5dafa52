"""Pictures: drawings that a person can check by hand, and copies that are true to the views."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from kvplan import Axis, Group, Model, ReadSpec, Region, TransferPlan, View, Worker, plan_reads, plan_writes
from kvplan.display import show
from kvplan.display.blocks import Interval, layers_of
from kvplan.display.copies import CopyEnd, Panel, example, panels
from kvplan.display.diagram import Column, Diagram, block_drawing, panel_drawing
from kvplan.plan import Table
from kvplan.plan.series import Ids
from tests.pages import failed_examples
from tests.small import engine  # noqa: F401  of drawings.txt

DRAWINGS = Path(__file__).with_name("drawings.txt")
LLAMA, DEEPSEEK = Model.shipped("llama-3.1-8b"), Model.shipped("deepseek-v3")

PLANS = {
    "transposed": plan_reads(
        LLAMA.engine("decode", tp=2, layout="BLHNC", tokens_per_block=64, num_blocks=9)[1],
        LLAMA.engine("prefill", tp=4, layout="LBNHC", num_blocks=30),
    ),
    "contexts": plan_reads(
        LLAMA.engine("decode", tp=16, dcp=2, num_blocks=9)[5], LLAMA.engine("prefill", pcp=2, dcp=2, num_blocks=9)
    ),
    "split and kernel blocks": plan_reads(
        LLAMA.engine("decode", kv="split", tokens_per_block=48, num_blocks=9)[0],
        LLAMA.engine("prefill", tp=3, kv="axis", tokens_per_block=32, kernel_tokens=16, num_blocks=9),
    ),
    "heads outside blocks": plan_reads(
        LLAMA.engine("decode", tp=2, tokens_per_block=32, num_blocks=9)[1],
        LLAMA.engine("prefill", layout="LHBNC", num_blocks=9),
    ),
    "writes": plan_writes(LLAMA.engine("prefill", num_blocks=9)[0], LLAMA.engine("decode", tp=3, num_blocks=9)),
    "states": plan_reads(
        Model.shipped("granite-4.0-h-tiny").engine("decode", tp=2, num_blocks=9)[1],
        Model.shipped("granite-4.0-h-tiny").engine("prefill", tp=3, num_blocks=9),
    ),
}

CONTEXT = PLANS["contexts"].local.groups[0].context


def stand(group: Group, position: int) -> tuple[int, int]:
    """The block and the slot of a position, by counting."""
    held = sum(other in group.context for other in range(position))
    assert position in group.context
    return divmod(held, group.tokens_per_block or 1)


def offset_of(
    worker: Worker, name: str, region: str, coordinates: Mapping[str, int], block: int
) -> tuple[int, int | None]:
    """The offset in a region of one element of a block, by the formula of views; and the block's ordinal."""
    for view in (view for view in worker.views if (view.name, view.region) == (name, region)):
        group = next(group for group in worker.groups if group.name == view.group)
        ordinal, here = None, dict(coordinates)
        if "position" in here:
            ordinal, here["token"] = stand(group, here.pop("position"))
        at, inside = view.offset_bytes + block * view.block_stride_bytes, True
        for axis in reversed(view.axes):
            here[axis.name], digit = divmod(here[axis.name], axis.size)
            inside = inside and axis.start <= digit < axis.stop
            at += (digit - axis.start) * axis.stride_bytes
        if inside:
            return at, ordinal
    raise AssertionError(f"{name} is not in {region}")


@pytest.mark.parametrize("name", PLANS)
def test_both_ends_of_a_copy_are_where_its_coordinates_say(name: str) -> None:
    """The first element of each copy is, on both sides, where the formula of views has its coordinates."""
    copies = [copy for panel in panels(PLANS[name]) for copy in panel.copies]
    assert copies
    for copy in copies:
        for end in (copy.local, copy.remote):
            first = {axis: interval.start for axis, interval in coordinates(end).items()}
            sizes = [
                sum(position in CONTEXT for position in range(each.start, each.stop))
                if each.has_gaps
                else each.stop - each.start
                for each in coordinates(end).values()
            ]
            assert math.prod(sizes) * (4 if end.tensor.endswith("ssm") else 2) == copy.num_bytes
            found = offset_of(end.worker, end.tensor, end.region, first, end.block)
            ordinal = None if end.layer.group.is_state else end.ordinal
            assert found == (start(end) - region_start(end), ordinal)
        assert coordinates(copy.local) == coordinates(copy.remote)


@pytest.mark.parametrize("name", PLANS)
def test_descriptors_of_the_plan_are_copies_of_the_picture(name: str) -> None:
    """Ids of a bound request, taken at random, move bytes that the panels say go from there to there."""
    plan, random = PLANS[name], np.random.default_rng(7)
    copies = [copy for panel in panels(plan) for copy in panel.copies]
    checked = 0
    for group in plan.local.groups:
        for spec in plan.bind(**example(plan, group)):
            found = {start(copy.local): copy for copy in copies if copy.remote.worker.key == spec.remote}
            starts = np.array(sorted(found), np.uint64)
            for i in random.permutation(spec.local_ids.size)[:2000].tolist():
                ours, theirs = (address(table, int(ids[i])) for table, ids in sides(spec))
                at = int(np.searchsorted(starts, np.uint64(ours), "right")) - 1
                copy = found[int(starts[at])] if at >= 0 else None
                if copy and ours < start(copy.local) + copy.num_bytes:
                    assert theirs - start(copy.remote) == ours - start(copy.local)
                    checked += 1
    assert checked


def coordinates(end: CopyEnd) -> dict[str, Interval]:
    """The interval of each axis of the tensor, whole ones too."""
    view = end.layer.views[end.view]
    whole = {axis: Interval(axis, 0, size) for axis, size in view.sizes.items() if axis != "token"}
    return whole | {axis: interval for axis, interval in end.intervals.items() if axis in (*view.sizes, "position")}


def region_start(end: CopyEnd) -> int:
    return next(region.address for region in end.worker.regions if region.name == end.region)


def start(end: CopyEnd) -> int:
    """The address of a copy on one side."""
    return region_start(end) + end.layer.offset + end.block * end.layer.block_stride_bytes + end.start


def sides(spec: ReadSpec) -> tuple[tuple[Table, Ids], tuple[Table, Ids]]:
    return (spec.local_table, spec.local_ids), (spec.remote_table, spec.remote_ids)


def address(table: Table, number: int) -> int:
    """The address of a descriptor, by the meaning of rows."""
    row = int(table.row_of(np.array([number], np.int32))[0])
    start, _, _, stride, _ = table.rows[row].tolist()
    return int(start + (number - table.first[row]) * stride)


def test_a_large_model_is_a_small_picture() -> None:
    """All 80 layers of a model of 70 billion are one panel, whatever the layouts are."""
    model = Model.shipped("llama-3.1-70b")
    for layouts in (("LBHNC", "LBHNC"), ("LBNHC", "BLHNC"), ("BHLNC", "LHBNC")):
        sources, locals_ = (
            model.engine(name, tp=tp, layout=layout) for name, tp, layout in zip("sd", (8, 4), layouts, strict=True)
        )
        drawing = show(plan_reads(locals_[0], sources))
        assert len(drawing.splitlines()) < 40
        assert drawing.count("layers.0-79.attn") == 1


def parts(number: int, step_bytes: int) -> Worker:
    """A state of so many tensors of 2 heads of 16 bytes, with room for more."""
    region = Region("ssm", 4096, 1 << 20)
    axes = (Axis("head", 0, 2, 2, 16), Axis("dim", 0, 2, 2, 8))
    views = [View(f"layers.0.part{i}", "g", region, "float64", axes, 4, 8192, step_bytes * i) for i in range(number)]
    return Worker("e", 0, [region], [Group("g")], views)


def states(engine_id: str = "e", **offsets: int) -> Worker:
    """A state of tensors of 32 bytes, each at its offset."""
    region, axes = Region("ssm", 4096, 4096), (Axis("dim", 0, 8, 8, 4),)
    views = [View(f"layers.0.{key}", "g", region, "float32", axes, 4, 64, at) for key, at in offsets.items()]
    return Worker(engine_id, 0, [region], [Group("g")], views)


def drawn(value: Worker | TransferPlan, width: int = 120) -> None:
    """Print a drawing without the lines above and the legend below."""
    drawing, _, _ = show(value, width=width).rpartition("\n\n")
    print(*itertools.dropwhile(lambda line: "│" not in line, drawing.splitlines()), sep="\n")


def test_drawings_are_as_written_down() -> None:
    """The drawings beside this file, made by hand, are what is drawn."""
    assert failed_examples(DRAWINGS, globals()) == 0


def halves(engine_id: str, rank: int, tp: int, tokens: int, num_blocks: int) -> Worker:
    """A cache of shape (2, blocks, tokens, heads, dim): all K in one half of the region, all V in the other."""
    heads, row = 6 // tp, 6 // tp * 16
    half = num_blocks * tokens * row
    axes = (
        Axis("kv", 0, 2, 2, half),
        Axis("token", 0, tokens, tokens, row),
        Axis("head", rank * heads, rank * heads + heads, 6, 16),
        Axis("dim", 0, 8, 8, 2),
    )
    region = Region("kv", (rank + 1) << 40, 2 * half)
    view = View("layers.0.attn", "attn", region, "bfloat16", axes, num_blocks, tokens * row)
    return Worker(engine_id, rank, [region], [Group("attn", tokens)], [view])


@pytest.mark.parametrize(
    "name", ["llama-3.1-70b", "deepseek-v3.2", "granite-4.0-h-tiny", "qwen3-next-80b", "gemma-4-31b"]
)
@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC"])
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_drawings_are_narrow(name: str, layout: str, columns: int) -> None:
    """Whatever the model and the layout, no line of a drawing is too wide, but for the names above it."""
    model = Model.shipped(name)
    sources = model.engine("prefill", tp=3, num_blocks=9)
    (local,) = model.engine("decode", layout=layout, tokens_per_block=64, num_blocks=9)
    drawings = [show(value, width=columns) for value in (local, plan_reads(local, sources))]
    rows = [line for drawing in drawings for line in drawing.splitlines() if "│" in line]
    assert max(map(len, rows)) <= columns


def panel() -> Panel:
    """A transpose: 64 positions of 4 heads, from two sources with blocks of 16."""
    sources = LLAMA.engine("p", tp=4, layout="LBNHC", num_blocks=30)
    (found,) = panels(plan_reads(LLAMA.engine("d", tp=2, tokens_per_block=64, num_blocks=9)[0], sources))
    return found


def test_both_diagrams_show_the_same_copies() -> None:
    """The copies of one side are those of the other, fewer and fewer, and no more than asked for."""
    for most, diagrams in zip(range(20, 11, -1), panel_drawing(panel()).choices, strict=True):
        shown = [sorted(c.copy for c in diagram.columns if c.copy is not None) for diagram in diagrams]
        assert shown[0] == shown[1]
        assert most // 2 < len(shown[0]) <= most


def column(*labels: str, fill: str = "bytes") -> Column:
    return Column(fill, labels, 0)  # type: ignore[arg-type]


def headers(*columns: Column) -> list[list[tuple[int, int, str, str]]]:
    """The headers of each of two rows."""
    return [[*Diagram(("a", "b"), columns).headers(row)] for row in (0, 1)]


def test_headers_span_what_is_inside_them() -> None:
    """A header spans all columns that share its label and those before it."""
    above, below = headers(column("a", "x"), column("a", "y"), column("b", "y"))
    assert [each[:2] for each in above] == [(0, 1), (2, 2)]
    assert [each[3] for each in below] == ["x", "y", "y"]


def test_a_fold_is_below_what_its_neighbours_share() -> None:
    """What is left out inside one part is below it, beside the parts that are shown."""
    above, below = headers(column("a", "x"), column("a", fill="fold"), column("a", "z"))
    assert above == [(0, 2, "bytes", "a")]
    assert below[1] == (1, 1, "fold", "")


def test_the_columns_of_a_block_follow_each_other() -> None:
    """With however many columns, those of a block ascend from its first byte."""
    for worker in (
        LLAMA.engine("e", tp=4, layout="LHBNC", num_blocks=9)[1],
        Model.shipped("granite-4.0-h-tiny").engine("e")[0],
    ):
        for layer in layers_of(worker):
            for (diagram,) in block_drawing("", "", [layer]).choices:
                columns = diagram.columns
                assert columns[0].start == 0
                assert all(before.start < after.start for before, after in itertools.pairwise(columns))
