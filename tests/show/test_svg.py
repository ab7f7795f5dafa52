"""SVG: well formed, small, the same each time, coloured by worker, and true to the formula of views."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from xml.etree import ElementTree

import numpy as np
import pytest

from kvplan import Axis, Group, Model, ReadSpec, Region, View, Worker, plan_reads, plan_writes
from kvplan.plan import Table
from kvplan.plan.bind import Ids
from kvplan.show import Picture, show
from kvplan.show.pages import pages
from kvplan.show.panels import panels
from kvplan.show.samples import sample
from kvplan.show.sheets import LETTER
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


def titles(picture: Picture) -> list[str]:
    """What the ribbons of a picture tell."""
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
    told = titles(show(plan))
    assert told
    for text in told:
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
        request = sample(plan, group, [pages(worker) for worker in plan.remotes])
        assert request
        for spec in plan.bind(local=request[0], remote=request[1], tokens=request[2]):
            found = {copy.local.address: copy for copy in copies if copy.remote.worker.key == spec.remote}
            starts = np.array(sorted(found), np.uint64)
            for i in random.permutation(spec.local_ids.size)[:2000].tolist():
                ours, theirs = (address(table, int(ids[i])) for table, ids in sides(spec))
                at = int(np.searchsorted(starts, np.uint64(ours), "right")) - 1
                copy = found[int(starts[at])] if at >= 0 else None
                if copy and ours < copy.local.address + copy.num_bytes:
                    assert theirs - copy.remote.address == ours - copy.local.address
                    checked += 1
    assert checked


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
    """Each copy that is shown is told three times: by its ribbon, and by its bytes above and below."""
    root = ElementTree.fromstring(show(PLANS[name]).svg)
    told = Counter(title.text for title in root.iterfind(f".//{SVG}title") if "descriptor of" in (title.text or ""))
    assert told
    assert set(told.values()) == {3}


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
    """Names of workers that do not fit beside each other stand below, and all of them inside the picture."""
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
    """Where a page has more tensors than there is room for leaves, each is told once, as one leaf."""
    region = Region("ssm", 4096, 1 << 20)
    axes = (Axis("head", 0, 2, 2, 16), Axis("dim", 0, 2, 2, 8))
    views = [View(f"layers.0.part{i}", "g", region, "float64", axes, 4, 8192, 32 * i) for i in range(30)]
    root = ElementTree.fromstring(show(Worker("e", 0, [region], [Group("g")], views)).svg)
    _, *leaves, rest = [title.text for title in root.iter(f"{SVG}title")]
    assert leaves == [f"tensor part{i}, head 0-1\n32 bytes at byte {32 * i} of a page" for i in range(30)]
    assert rest == "7232 bytes at byte 960 of a page"


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
    assert f"{evil}: position [0, 4), {evil} [0, 8) of 8" in titles(picture)[0]
    assert evil in [text.text for text in root.iter(f"{SVG}text")]


def test_the_style_has_both_schemes_and_no_script() -> None:
    """Colours are variables with values for light and dark, and there is nothing to run or to fetch."""
    svg = show(engine("decode")[0]).svg
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"<script|\bon\w+=|href|@import|url\(http", svg)
