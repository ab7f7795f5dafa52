"""Pictures: texts that a person can check by hand; SVG that is well formed, deterministic and true to the views."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from kvplan import Axis, Group, Model, ReadSpec, Region, TransferPlan, View, Worker, plan_reads, plan_writes
from kvplan.display import Picture, show
from kvplan.display.blocks import layers_of
from kvplan.display.copies import CopyEnd, Panel, example, panels
from kvplan.display.diagram import Column, Diagram, block_drawing, panel_drawing
from kvplan.display.svg import DIGIT, LETTER, PANEL_LETTER
from kvplan.plan import Table
from kvplan.plan.series import Ids
from tests.pages import failed_examples
from tests.small import engine

DRAWINGS = Path(__file__).with_name("drawings.txt")
SVG = "{http://www.w3.org/2000/svg}"
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


@pytest.mark.parametrize("name", [*PLANS, "nemotron"])
def test_texts_fit_where_they_stand(name: str) -> None:
    """Numbers of bytes are within their cell, titles within the picture, and facts beside or below their title."""
    model = Model.shipped("nemotron-3-nano-30b-a3b")
    sides = model.engine("decode", num_blocks=9)[0], model.engine("prefill", tp=2, num_blocks=9)
    root = ElementTree.fromstring(show(plan_reads(*sides) if name == "nemotron" else PLANS[name]).svg)
    for group in root.iterfind(f"{SVG}g"):
        box, number = group.find(f"{SVG}rect"), group.find(f"{SVG}text[@class='byte']")
        if box is not None and number is not None:
            pixels = int(re.sub("[^0-9]", "", number.get("style", "11")))
            assert len(number.text or "") * pixels * DIGIT <= float(box.get("width", "0"))
    titles = {title.get("y"): title for title in root.iterfind(f"{SVG}text[@class='panel']")}
    assert titles
    for facts in root.iterfind(f"{SVG}text[@class='faint end']"):
        title = titles.get(facts.get("y"))
        left = float(facts.get("x", "0")) - len(facts.text or "") * LETTER
        assert left > (0 if title is None else len(title.text or "") * PANEL_LETTER)


def test_long_titles_have_several_lines() -> None:
    """They end after a comma or a space, and lose nothing."""
    sources = engine("a-prefill-engine-of-a-long-name", tp=16, heads=16)
    about = "between engines, " * 20
    root = ElementTree.fromstring(show(plan_reads(engine("decode", heads=16)[0], sources), about=about).svg)
    lines = [text.text or "" for text in root.iterfind(f"{SVG}text[@class='faint']")]
    words = [line for line in lines if line.startswith("between")]
    assert len(words) > 1
    assert "".join(words) == about
    assert max(map(len, words)) * LETTER < float(root.get("width", "0"))
    places = [float(text.get("y", "0")) for text in root.iterfind(f"{SVG}text[@class='faint']")]
    assert places == sorted(places)


def test_a_page_of_many_tensors_shows_them_all() -> None:
    """Where a block has more tensors than there is room for columns, each has one column."""
    region = Region("ssm", 4096, 1 << 20)
    axes = (Axis("head", 0, 2, 2, 16), Axis("dim", 0, 2, 2, 8))
    views = [View(f"layers.0.part{i}", "g", region, "float64", axes, 4, 8192, 32 * i) for i in range(30)]
    root = ElementTree.fromstring(show(Worker("e", 0, [region], [Group("g")], views)).svg)
    found = [title.text or "" for title in root.iter(f"{SVG}title")]
    leaves = [text for text in found if text.startswith("tensor")]
    assert leaves == [f"tensor part{i}, head 0, dim 0-1\n16 bytes at byte {32 * i} of the block" for i in range(30)]


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


def states(engine_id: str = "e", **offsets: int) -> Worker:
    """A state of tensors of 32 bytes, each at its offset."""
    region, axes = Region("ssm", 4096, 4096), (Axis("dim", 0, 8, 8, 4),)
    views = [View(f"layers.0.{key}", "g", region, "float32", axes, 4, 64, at) for key, at in offsets.items()]
    return Worker(engine_id, 0, [region], [Group("g")], views)


def drawn(value: Worker | TransferPlan, width: int = 120) -> None:
    """Print a drawing without the lines above and the legend below."""
    drawing, _, _ = show(value, width=width).text.rpartition("\n\n")
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
    drawings = [show(value, width=columns).text for value in (local, plan_reads(local, sources))]
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
    return Column(fill, labels, 0, 1)  # type: ignore[arg-type]


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


def test_the_columns_of_a_block_are_all_its_bytes() -> None:
    """With however many columns, those of a block follow each other from its first byte to its last."""
    for worker in (
        LLAMA.engine("e", tp=4, layout="LHBNC", num_blocks=9)[1],
        Model.shipped("granite-4.0-h-tiny").engine("e")[0],
    ):
        for layer in layers_of(worker):
            for (diagram,) in block_drawing("", "", [layer]).choices:
                columns = diagram.columns
                assert columns[0].start == 0
                assert columns[-1].stop == layer.size_bytes + layer.rest_bytes
                assert all(before.stop == after.start for before, after in itertools.pairwise(columns))
