"""Pictures: texts that a person can check by hand; SVG that is well formed, deterministic and true to the views."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from xml.etree import ElementTree

import numpy as np
import pytest

from kvplan import Axis, Group, Model, ReadSpec, Region, TransferPlan, View, Worker, plan_reads, plan_writes
from kvplan.plan import Table
from kvplan.plan.bind import Ids
from kvplan.show import Picture, show
from kvplan.show import diagram as module
from kvplan.show.blockmap import Interval, block_maps
from kvplan.show.copies import CopyEnd, Panel, excerpt, panels
from kvplan.show.diagram import Column, Diagram, map_diagrams, panel_diagrams
from kvplan.show.svg import LETTER
from tests.small import engine

SVG = "{http://www.w3.org/2000/svg}"
LLAMA = Model.shipped("llama-3.1-8b")

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

WHAT = re.compile(r"(\w+) (?:\[(\d+), (\d+)\)|(\d+)\.\.(\d+))")
END = re.compile(r"(?:from|to) (\S+?)(?: block (\d+))?, block id (\d+), region (.+) \+ (\d+)$")


def hovers(picture: Picture) -> list[str]:
    """The hover texts of a picture's ribbons."""
    root = ElementTree.fromstring(picture.svg)
    return [title.text or "" for title in root.iterfind(f".//{SVG}path/{SVG}title")]


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
def test_what_ribbons_tell_is_true(name: str) -> None:
    """The first element of each ribbon is, on both sides, where the formula of views has its coordinates."""
    plan = PLANS[name]
    workers = {worker.label: worker for worker in (plan.local, *plan.remotes)}
    texts = hovers(show(plan))
    assert texts
    for text in texts:
        what, source, destination, _ = text.split("\n")
        for one in what.split("; "):
            tensor, _, axes = one.partition(": ")
            first = {axis: int(start or low) for axis, start, _, low, _ in WHAT.findall(axes)}
            sizes = [int(stop) - int(start) for _, start, stop, low, _ in WHAT.findall(axes) if not low]
            apart = [range(int(low), int(high) + 1) for *_, low, high in WHAT.findall(axes) if low]
            sizes += [sum(position in CONTEXT for position in span) for span in apart]
            assert f"{math.prod(sizes) * (4 if tensor.endswith('ssm') else 2)} bytes from " in source
            for end in (source, destination):
                found = END.search(end)
                assert found
                worker, ordinal, block, region, offset = found.groups()
                expected = offset_of(workers[worker], tensor, region, first, int(block))
                assert expected == (int(offset), None if ordinal is None else int(ordinal))


@pytest.mark.parametrize("name", PLANS)
def test_descriptors_of_the_plan_are_copies_of_the_picture(name: str) -> None:
    """Ids of a bound request, taken at random, move bytes that the panels say go from there to there."""
    plan, random = PLANS[name], np.random.default_rng(7)
    copies = [copy for panel in panels(plan) for copy in panel.copies]
    checked = 0
    for group in plan.local.groups:
        request = excerpt(plan, group, [block_maps(worker) for worker in (plan.local, *plan.remotes)], None)
        assert request
        for spec in plan.bind(**request):
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


def start(end: CopyEnd) -> int:
    """The address of a copy on one side."""
    return next(region.address for region in end.worker.regions if region.name == end.region) + end.region_offset


def sides(spec: ReadSpec) -> tuple[tuple[Table, Ids], tuple[Table, Ids]]:
    return (spec.local_table, spec.local_ids), (spec.remote_table, spec.remote_ids)


def address(table: Table, number: int) -> int:
    """The address of a descriptor, by the meaning of rows."""
    row = int(table.row_of(np.array([number], np.int32))[0])
    start, _, _, stride, _ = table.rows[row].tolist()
    return int(start + (number - table.first[row]) * stride)


def test_ribbons_have_the_colour_of_their_worker() -> None:
    """All ribbons of one remote worker are of one colour, those of others of another, as the legend says."""
    root = ElementTree.fromstring(show(PLANS["transposed"]).svg)
    colours = Counter(
        (path.get("class"), label)
        for path in root.iterfind(f".//{SVG}path")
        for label in re.findall(r"from (\S+) ", path.findtext(f"{SVG}title") or "")
    )
    assert {key for key, _ in colours.items()} == {("c0", "prefill/2"), ("c1", "prefill/3")}
    assert len(set(colours.values())) == 1
    elements = list(root)
    legend = {
        text.text: rect.get("class")
        for rect, text in itertools.pairwise(elements)
        if rect.tag == f"{SVG}rect" and text.tag == f"{SVG}text"
    }
    assert {("c0", "prefill/2"), ("c1", "prefill/3")} <= {(kind, label) for label, kind in legend.items()}


@pytest.mark.parametrize("name", PLANS)
def test_both_sides_show_the_same_copies(name: str) -> None:
    """Each copy has its hover text three times: on its ribbon, and on its bytes above and below."""
    root = ElementTree.fromstring(show(PLANS[name]).svg)
    texts = Counter(title.text for title in root.iterfind(f".//{SVG}title") if "descriptor of" in (title.text or ""))
    assert texts
    assert set(texts.values()) == {3}


def test_the_slowest_axes_are_at_the_edges() -> None:
    """Above are the source's axes from the slowest down to the bytes, below the destination's the other way round."""
    root = ElementTree.fromstring(show(PLANS["transposed"]).svg)
    axes = [(float(text.get("y", "0")), text.text) for text in root.iterfind(f".//{SVG}text[@class='axis']")]
    above = ["worker", "block", "position", "head", "byte"]
    below = ["byte", "position", "head", "block", "worker"]
    assert [text for _, text in sorted(axes)] == [*above, "↓", *below]
    cells = root.findall(f"{SVG}g[@class='cell']")
    for cell, pick, label in zip(cells, (min, max), ("prefill/2", "decode/1"), strict=True):
        texts = [(float(text.get("y", "0")), text.text or "") for text in cell.iterfind(f"{SVG}text")]
        edge = pick(y for y, _ in texts)
        assert label in [text for y, text in texts if y == edge]


@pytest.mark.parametrize("name", PLANS)
def test_a_ribbon_connects_both_ends_of_its_copy(name: str) -> None:
    """Above and below, a ribbon is as wide as the bytes that have the same hover text, and touches them."""
    root = ElementTree.fromstring(show(PLANS[name]).svg)
    bytes_of: dict[str, list[tuple[float, float]]] = {}
    for group in root.iter(f"{SVG}g"):
        if (title := group.findtext(f"{SVG}title")) and (rect := group.find(f"{SVG}rect")) is not None:
            x, width = (float(rect.get(key, "0")) for key in ("x", "width"))
            bytes_of.setdefault(title, []).append((x, x + width))
    ribbons = list(root.iterfind(f".//{SVG}path"))
    assert ribbons
    for ribbon in ribbons:
        numbers = [float(found) for found in re.findall(r"-?[\d.]+", ribbon.get("d", ""))]
        (a, b), (c, d) = bytes_of[ribbon.findtext(f"{SVG}title") or ""]
        assert [numbers[0], numbers[-2], numbers[6], numbers[8]] == pytest.approx([a, b, c, d], abs=0.2)


def test_a_large_model_is_a_small_picture() -> None:
    """All 80 layers of a model of 70 billion are one panel, whatever the layouts are."""
    model = Model.shipped("llama-3.1-70b")
    for layouts in (("LBHNC", "LBHNC"), ("LBNHC", "BLHNC"), ("BHLNC", "LHBNC")):
        sources, locals_ = (
            model.engine(name, tp=tp, layout=layout) for name, tp, layout in zip("sd", (8, 4), layouts, strict=True)
        )
        svg = show(plan_reads(locals_[0], sources)).svg
        assert len(svg) < 200_000
        assert sum(1 for _ in ElementTree.fromstring(svg).iter()) < 2000
        assert svg.count("layers.0-79.attn") == 1


def test_pictures_are_deterministic() -> None:
    """Equal values have equal pictures."""
    made = [plan_reads(engine("decode")[0], engine("prefill", tp=2)) for _ in range(2)]
    assert show(made[0]) == show(made[1])


def test_cells_stay_inside_the_picture() -> None:
    """Every rectangle and every ribbon lies inside the picture, and neighbours in one row do not overlap."""
    for plan in PLANS.values():
        root = ElementTree.fromstring(show(plan).svg)
        width, height = float(root.get("width", "0")), float(root.get("height", "0"))
        rows: dict[float, list[tuple[float, float]]] = {}
        for rect in root.iterfind(f".//{SVG}g[@class='cell']/{SVG}rect"):
            if "tint" in (rect.get("class") or ""):
                continue
            x, y, w, h = (float(rect.get(key, "0")) for key in ("x", "y", "width", "height"))
            assert 0 <= x < x + w <= width + 0.1
            assert 0 <= y < y + h <= height
            rows.setdefault(y, []).append((x, x + w))
        for spans in rows.values():
            for (_, stop), (start, _) in itertools.pairwise(sorted(spans)):
                assert stop <= start + 0.2


def test_a_long_legend_has_several_lines() -> None:
    """Names of workers that do not fit in a line go on below, all of them inside the picture."""
    sources = engine("a-prefill-engine-of-a-long-name", tp=16, heads=16)
    root = ElementTree.fromstring(show(plan_reads(engine("decode", heads=16)[0], sources)).svg)
    names = {source.label for source in sources}
    legend = [text for text in root.findall(f"{SVG}text") if text.text in names]
    assert {text.text for text in legend} == names
    assert len({text.get("y") for text in legend}) > 1
    assert len({(text.get("x"), text.get("y")) for text in legend}) == len(names)
    ends = [float(text.get("x", "0")) + len(text.text or "") * LETTER for text in legend]
    assert max(ends) <= float(root.get("width", "0"))


def test_a_page_of_many_tensors_shows_them_all() -> None:
    """Where a block has more tensors than there is room for columns, each is one column."""
    region = Region("ssm", 4096, 1 << 20)
    axes = (Axis("head", 0, 2, 2, 16), Axis("dim", 0, 2, 2, 8))
    views = [View(f"layers.0.part{i}", "g", region, "float64", axes, 4, 8192, 32 * i) for i in range(30)]
    root = ElementTree.fromstring(show(Worker("e", 0, [region], [Group("g")], views)).svg)
    _, *leaves, rest = [title.text for title in root.iter(f"{SVG}title")]
    assert leaves == [f"tensor part{i}, head 0-1\n32 bytes at byte {32 * i} of the block" for i in range(30)]
    assert rest == "7232 bytes at byte 960 of the block"


def test_hostile_names_are_text() -> None:
    """Names with markup in them come out as they are, in well-formed XML."""
    evil = '<script>alert("x")</script>&amp;]]>'

    def worker(name: str) -> Worker:
        axes = (Axis("token", 0, 4, 4, 16), Axis(evil, 0, 8, 8, 2))
        region = Region(evil, 4096, 640)
        return Worker(name, 0, [region], [Group(evil, 4)], [View(evil, evil, evil, "float16", axes, 10, 64)])

    picture = show(plan_reads(worker("d" + evil), [worker("s" + evil)]), about=evil)
    root = ElementTree.fromstring(picture.svg)
    assert not list(root.iter(f"{SVG}script"))
    assert f"{evil}: position [0, 4), {evil} [0, 8) of 8" in hovers(picture)[0]
    assert evil in [text.text for text in root.iter(f"{SVG}text")]


def test_the_style_has_both_schemes_and_no_script() -> None:
    """Colours are variables with values for light and dark, and there is nothing to run or to fetch."""
    svg = show(engine("decode")[0]).svg
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"<script|\bon\w+=|href|@import|url\(http", svg)


def parts(number: int, step_bytes: int) -> Worker:
    """A state of so many tensors of 2 heads of 16 bytes, with room for more."""
    region = Region("ssm", 4096, 1 << 20)
    axes = (Axis("head", 0, 2, 2, 16), Axis("dim", 0, 2, 2, 8))
    views = [View(f"layers.0.part{i}", "g", region, "float64", axes, 4, 8192, step_bytes * i) for i in range(number)]
    return Worker("e", 0, [region], [Group("g")], views)


def drawn(value: Worker | TransferPlan, width: int = 120) -> str:
    """A drawing without the lines above and the legend below."""
    drawing, *_ = show(value, width=width).text.split("\n\n░")
    return "\n".join(drawing.splitlines()[2:])


def text(drawing: str) -> str:
    """A drawing without its indentation."""
    return "\n".join(line.strip() for line in drawing.strip().splitlines())


def test_heads_outside_tokens() -> None:
    """Head by head, token by token, K before V: a head of one token is 16 bytes, easy to check by hand."""
    assert drawn(engine("e", tp=2)[0]) == text("""
        head  │ 0                                     │ 1                                     │
        token │ 0       │ 1       │ 2       │ 3       │ 0       │ 1       │ 2       │ 3       │
        kv    │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │
        byte  │ 0  │ 8  │ 16 │ 24 │ 32 │ 40 │ 48 │ 56 │ 64 │ 72 │ 80 │ 88 │ 96 │ 104│ 112│ 120│
    """)


def test_tokens_outside_heads() -> None:
    """The other order has the rows exchanged."""
    assert drawn(engine("e", tp=2, tokens=2, order="NH")[0]) == text("""
        token │ 0                 │ 1                 │
        head  │ 0       │ 1       │ 0       │ 1       │
        kv    │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │
        byte  │ 0  │ 8  │ 16 │ 24 │ 32 │ 40 │ 48 │ 56 │
    """)


def test_what_does_not_belong_to_the_page_is_hatched() -> None:
    """Between heads outside blocks are other blocks, and behind a padded page is its pad."""
    assert drawn(LLAMA.engine("e", tp=4, layout="LHBNC", num_blocks=10)[1], 100) == text("""
        head  │ 2                                  │ ░   │ 3                                            │
        token │ 0       │ 1       │ ···│ 15        │     │ 0           │ 1           │ ···│ 15          │
        kv    │ K  │ V  │ K  │ V  │    │ K   │ V   │     │ K    │ V    │ K    │ V    │    │ K    │ V    │
        byte  │ 0  │ 256│ 512│ 768│    │ 7680│ 7936│ 8192│ 81920│ 82176│ 82432│ 82688│    │ 89600│ 89856│
    """)
    assert drawn(Model.shipped("deepseek-v3").engine("e", pad=64, num_blocks=10)[0]) == text("""
        token │ 0  │ 1   │ 2   │ ···│ 15   │ ░    │
        byte  │ 0  │ 1152│ 2304│    │ 17280│ 18432│
    """)


def test_what_lies_between_tensors_is_hatched() -> None:
    """Tensors of a page that are aligned have bytes of nobody between them."""
    assert drawn(parts(2, step_bytes=40)) == text("""
        tensor │ part0   │ ░  │ part1   │ ░  │
        head   │ 0  │ 1  │    │ 0  │ 1  │    │
        byte   │ 0  │ 16 │ 32 │ 40 │ 56 │ 72 │
    """)


def test_a_tensor_of_one_axis_is_whole() -> None:
    """What has no axis but its elements is drawn as all of them."""
    region = Region("ssm", 4096, 4096)
    view = View("layers.0.state", "g", region, "float32", (Axis("dim", 0, 8, 8, 4),), 4, 32)
    assert drawn(Worker("e", 0, [region], [Group("g")], [view])) == text("""
        dim  │ 0-7│
        byte │ 0  │
    """)


def test_a_page_of_many_tensors_is_drawn_in_parts() -> None:
    """Where even the coarsest drawing is too wide, it goes on below, each part with its rows."""
    assert drawn(parts(14, step_bytes=32), 100) == text("""
        tensor │ part0│ part1│ part2│ part3│ part4│ part5│ part6│ part7│ part8│ part9│ part10│ part11│
        head   │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1   │ 0-1   │
        byte   │ 0    │ 32   │ 64   │ 96   │ 128  │ 160  │ 192  │ 224  │ 256  │ 288  │ 320   │ 352   │

        tensor │ part12│ part13│ ░  │
        head   │ 0-1   │ 0-1   │    │
        byte   │ 384   │ 416   │ 448│
    """)


def test_a_plan_shows_both_sides_and_which_bytes_are_the_same() -> None:
    """Two sources with tokens outside heads, two blocks each, and a destination with heads outside tokens."""
    plan = plan_reads(engine("decode")[0], engine("prefill", tp=2, tokens=2, order="NH"))
    assert show(plan).text == text("""
        layers.0-1
        positions [0, 4) of one of 2 equal layers: 256 bytes in 16 copies of 16 bytes
        worker   │ prefill/0                             │ prefill/1                             │
        block    │ 0                 │ 1                 │ 0                 │ 1                 │
        position │ 0       │ 1       │ 2       │ 3       │ 0       │ 1       │ 2       │ 3       │
        head     │ 0  │ 1  │ 0  │ 1  │ 0  │ 1  │ 0  │ 1  │ 2  │ 3  │ 2  │ 3  │ 2  │ 3  │ 2  │ 3  │
        byte     │ 0  │ 16 │ 32 │ 48 │ 0  │ 16 │ 32 │ 48 │ 0  │ 16 │ 32 │ 48 │ 0  │ 16 │ 32 │ 48 │
        copy     │ a  │ e  │ b  │ f  │ c  │ g  │ d  │ h  │ i  │ m  │ j  │ n  │ k  │ o  │ l  │ p  │

        copy     │ a  │ b  │ c  │ d  │ e  │ f  │ g  │ h  │ i  │ j  │ k  │ l  │ m  │ n  │ o  │ p  │
        byte     │ 0  │ 16 │ 32 │ 48 │ 64 │ 80 │ 96 │ 112│ 128│ 144│ 160│ 176│ 192│ 208│ 224│ 240│
        position │ 0  │ 1  │ 2  │ 3  │ 0  │ 1  │ 2  │ 3  │ 0  │ 1  │ 2  │ 3  │ 0  │ 1  │ 2  │ 3  │
        head     │ 0                 │ 1                 │ 2                 │ 3                 │
        block    │ 0                                                                             │
        worker   │ decode/0                                                                      │
    """)


def test_a_writer_is_above() -> None:
    """Bytes go from above to below, whoever moves them."""
    drawing = drawn(plan_writes(engine("prefill")[0], engine("decode", tp=2)))
    workers = [line for line in drawing.splitlines() if line.startswith("worker")]
    assert [line.split("│")[1].strip() for line in workers] == ["prefill/0", "decode/0"]


def test_bytes_that_are_not_copied_have_coordinates() -> None:
    """A destination of one head takes half a page, and the other half says which head it is."""
    plan = plan_reads(engine("decode", tp=4)[1], engine("prefill", tp=2))
    assert drawn(plan).splitlines()[2:5] == [
        "head   │ 0  │ 1   │",
        "byte   │ 0  │ 64  │",
        "copy   │ ░  │ a   │",
    ]


def test_long_names_of_what_is_not_copied_are_hatched() -> None:
    """A tensor that is not copied has its name if that is short."""
    region = Region("ssm", 4096, 4096)
    for name, shown in (("bias", "bias"), ("convolution", "░")):
        views = [
            View(f"layers.0.{kind}", "g", region, "float32", (Axis("dim", 0, 8, 8, 4),), 4, 64, at)
            for kind, at in (("ssm", 0), (name, 32))
        ]
        ours, theirs = (Worker(engine_id, 0, [region], [Group("g")], views) for engine_id in "dp")
        plan = plan_reads(ours, [theirs], not_transferred=[f"layers.0.{name}"])
        row = next(line for line in drawn(plan).splitlines() if line.startswith("tensor"))
        assert [cell.strip() for cell in row.split("│")[1:-1]] == ["ssm", shown]


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


def test_both_halves_of_a_cache_are_opened() -> None:
    """Where K and V are far apart, the first, the second and the last token of both are shown, with all heads."""
    assert show(halves("e", 0, 3, 16, 10)).text == text("""
        layers.0.attn
        1024 bytes in each of 10 blocks of group attn, stride 512
        kv    │ K                                          │ ░  │ V                                                  │
        token │ 0       │ 1       │ 2       │ ···│ 15      │    │ 0         │ 1         │ 2         │ ···│ 15        │
        head  │ 0  │ 1  │ 0  │ 1  │ 0  │ 1  │    │ 0  │ 1  │    │ 0   │ 1   │ 0   │ 1   │ 0   │ 1   │    │ 0   │ 1   │
        byte  │ 0  │ 16 │ 32 │ 48 │ 64 │ 80 │    │ 480│ 496│ 512│ 5120│ 5136│ 5152│ 5168│ 5184│ 5200│    │ 5600│ 5616│

        ░ padding, or other groups' bytes
    """)


def test_a_plan_of_halves_shows_both_ends_of_the_request() -> None:
    """The first, second and last position are shown of K and V, and so are both blocks that the source has of them."""
    plan = plan_reads(halves("decode", 0, 2, 32, 10), [halves("prefill", rank, 3, 16, 20) for rank in range(3)])
    assert show(plan).text == text("""
        layers.0.attn
        positions [0, 32): 3072 bytes in 128 copies of 16 bytes to 32 bytes
        worker   │ prefill/0                                        │
        block    │ 0                          │ ···│ 1              │
        kv       │ K       │ ···│ V           │    │ K  │ ···│ V    │
        position │ 0  │ 1  │    │ 0    │ 1    │    │ 31 │    │ 31   │
        byte     │ 0  │ 32 │    │ 10240│ 10272│    │ 480│    │ 10720│
        copy     │ a  │ b  │    │ d    │ e    │    │ c  │    │ f    │

        worker   │ prefill/1                                                           │
        block    │ 0                                      │ ···│ 1                     │
        kv       │ K            │ ···│ V                  │    │ K  │ ···│ V           │
        position │ 0       │ 1  │    │ 0           │ 1    │    │ 31 │    │ 31          │
        head     │ 2  │ 3  │ 2  │    │ 2    │ 3    │ 2    │    │ 2  │    │ 2    │ 3    │
        byte     │ 0  │ 16 │ 32 │    │ 10240│ 10256│ 10272│    │ 480│    │ 10720│ 10736│
        copy     │ g  │ ░  │ h  │    │ j    │ ░    │ k    │    │ i  │    │ l    │ ░    │

        copy     │ a  │ g  │ b  │ h  │    │ c   │ i   │ ░   │ d    │ j    │ e    │ k    │    │ f    │ l    │
        byte     │ 0  │ 32 │ 48 │ 80 │    │ 1488│ 1520│ 1536│ 15360│ 15392│ 15408│ 15440│    │ 16848│ 16880│
        head     │ 0-1│ 2  │ 0-1│ 2  │    │ 0-1 │ 2   │     │ 0-1  │ 2    │ 0-1  │ 2    │    │ 0-1  │ 2    │
        position │ 0       │ 1       │ ···│ 31        │     │ 0           │ 1           │ ···│ 31          │
        kv       │ K                                  │ ░   │ V                                            │
        block    │ 0                                                                                       │
        worker   │ decode/0                                                                                │

        ░ not moved
    """)


def test_hatching_has_one_legend() -> None:
    """The legend is below all drawings, if any of them is hatched."""
    text = show(plan_reads(engine("decode", tp=4)[1], engine("prefill", tp=2))).text
    assert text.endswith("\n\n░ not moved")
    assert text.count("not moved") == 1
    assert "░" not in show(plan_reads(engine("decode")[0], engine("prefill"))).text
    assert show(parts(2, step_bytes=40)).text.endswith("\n\n░ padding, or other groups' bytes")
    assert "░" not in show(engine("e")[0]).text


def test_a_part_ends_where_the_coarsest_axis_goes_on() -> None:
    """A drawing that is too wide is cut between workers rather than within one, if not much of the line is lost."""
    plan = plan_reads(engine("decode")[0], engine("prefill", tp=2, tokens=2, order="NH"))
    rows = [line.split("│")[1:-1] for line in drawn(plan, 60).splitlines() if line.startswith("worker")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["prefill/0"],
        ["prefill/1"],
        ["decode/0"],
        ["decode/0"],
    ]


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
    drawings = [show(value, width=columns).text for value in (local, plan_reads(local, sources))]
    rows = [line for drawing in drawings for line in drawing.splitlines() if "│" in line]
    assert max(map(len, rows)) <= columns


def test_one_part_more_is_not_folded() -> None:
    """Of five parts none is folded, since a fold would be as wide; of six the fourth and the fifth are."""
    assert drawn(engine("e", tp=4, tokens=5)[0]).splitlines()[1] == (
        "token │ 0       │ 1       │ 2       │ 3       │ 4       │"
    )
    assert (
        drawn(engine("e", tp=4, tokens=6)[0]).splitlines()[1] == "token │ 0       │ 1       │ 2       │ ···│ 5       │"
    )


@pytest.mark.parametrize(
    "layout, expected",
    [
        (
            "LBNHC",
            """
            token │ 0                 │ 1                     │ 2                     │ ···│ 15                        │
            head  │ 2       │ 3       │ 2         │ 3         │ 2         │ 3         │    │ 2           │ 3           │
            kv    │ K  │ V  │ K  │ V  │ K   │ V   │ K   │ V   │ K   │ V   │ K   │ V   │    │ K    │ V    │ K    │ V    │
            byte  │ 0  │ 256│ 512│ 768│ 1024│ 1280│ 1536│ 1792│ 2048│ 2304│ 2560│ 2816│    │ 15360│ 15616│ 15872│ 16128│
            """,
        ),
        (
            "BLHNC",
            """
            layer │ 0                                   │ 1    │ 2    │ ···│ 31    │
            head  │ 2                             │ 3   │      │      │    │       │
            token │ 0       │ 1  │ 2   │ ···│ 15  │     │      │      │    │       │
            kv    │ K  │ V  │    │     │    │     │     │      │      │    │       │
            byte  │ 0  │ 256│ 512│ 1024│    │ 7680│ 8192│ 16384│ 32768│    │ 507904│
            """,
        ),
    ],
)
def test_what_repeats_is_folded(layout: str, expected: str) -> None:
    """The first parts of an axis and the last are shown; where each is too much to open, the first is opened."""
    assert drawn(LLAMA.engine("e", tp=4, layout=layout)[1]) == text(expected)


def panel() -> Panel:
    """A transpose: 64 positions of 4 heads, from two sources with blocks of 16."""
    sources = LLAMA.engine("p", tp=4, layout="LBNHC", num_blocks=30)
    (found,) = panels(plan_reads(LLAMA.engine("d", tp=2, tokens_per_block=64, num_blocks=9)[0], sources))
    return found


def positions(diagram: Diagram) -> list[str]:
    return [str(column.path[-1]) for column in diagram.columns if column.fill == "bytes"]


def test_few_copies_are_all_shown() -> None:
    """Where there are no more copies than asked for, nothing is folded."""
    (found,) = panels(plan_reads(engine("d")[0], engine("p", tp=2, tokens=2)))
    assert {column.fill for diagram in next(panel_diagrams(found)) for column in diagram.columns} == {"bytes"}


def test_both_ends_and_changes_are_shown() -> None:
    """Of many positions, the ends are shown, and those on both sides of the first change of blocks."""
    _, local = next(panel_diagrams(panel()))
    assert positions(local) == ["0", "1", "15", "16", "63"] * 4


def test_both_diagrams_show_the_same_copies() -> None:
    """The copies of one side are those of the other, fewer and fewer, and no more than asked for."""
    for most, diagrams in zip(range(20, 11, -1), panel_diagrams(panel()), strict=True):
        shown = [sorted(c.copy for c in diagram.columns if c.copy is not None) for diagram in diagrams]
        assert shown[0] == shown[1]
        assert most // 2 < len(shown[0]) <= most


def test_every_axis_keeps_an_interval() -> None:
    """However few are asked for, one copy of each tensor is shown."""
    values, ranked = module._values(panel().copies)
    assert len(module._chosen(values, ranked, 1)) == 1


def column(*names: str, fill: str = "bytes") -> Column:
    return Column(fill, tuple(Interval("axis", 0, 1, name) for name in names), 0, 1)  # type: ignore[arg-type]


def spans(diagram: Diagram) -> list[tuple[int, int, int, int, str]]:
    return [(one.row, one.rows, one.first, one.last, diagram.text(one)) for one in diagram.headers]


def test_headers_span_what_is_inside_them() -> None:
    """A header spans all columns that share its interval and those before it."""
    diagram = Diagram.of([column("a", "x"), column("a", "y"), column("b", "y")])
    assert spans(diagram) == [
        (0, 1, 0, 1, "a"),
        (0, 1, 2, 2, "b"),
        (1, 1, 0, 0, "x"),
        (1, 1, 1, 1, "y"),
        (1, 1, 2, 2, "y"),
    ]


def test_a_short_path_reaches_down() -> None:
    """A column with a shorter path than others has its last header in all rows that are left."""
    diagram = Diagram.of([column("a", "x"), column("b")])
    assert (0, 2, 1, 1, "b") in spans(diagram)


def test_a_fold_is_below_what_its_neighbours_share() -> None:
    """What is folded inside one part is below it, beside the parts that are shown."""
    diagram = Diagram.of([column("a", "x"), column("a", fill="fold"), column("a", "z")])
    assert spans(diagram)[0] == (0, 1, 0, 2, "a")
    assert (1, 1, 1, 1, "") in spans(diagram)


def test_folds_side_by_side_are_one() -> None:
    """Two neighbours that are folded are one, where what they share ends."""
    made = Diagram.of([column("a", "x"), column("a", fill="fold"), column("b", fill="fold"), column("b", "z")])
    assert [(one.fill, len(one.path)) for one in made.columns] == [("bytes", 2), ("fold", 0), ("bytes", 2)]


def test_a_row_of_one_axis_is_named() -> None:
    """A row is named after its axis; where it has several, each header names its own."""
    one, two = Interval("head", 4, 5), Interval("token", 0, 1)
    diagram = Diagram.of([Column("bytes", (one, two), 0, 1), Column("bytes", (one, one), 1, 2)])
    assert diagram.axes == ("head", "")
    assert [diagram.text(header) for header in diagram.headers] == ["4", "token 0", "head 4"]


def test_the_columns_of_a_block_are_all_its_bytes() -> None:
    """Opened in any way, the columns of a block follow each other from its first byte to its last."""
    for worker in (
        LLAMA.engine("e", tp=4, layout="LHBNC", num_blocks=9)[1],
        Model.shipped("granite-4.0-h-tiny").engine("e")[0],
    ):
        for one in block_maps(worker):
            for (diagram,) in map_diagrams(one):
                columns = diagram.columns
                assert columns[0].start == 0
                assert columns[-1].stop == one.size_bytes + one.rest_bytes
                assert all(before.stop == after.start for before, after in itertools.pairwise(columns))
