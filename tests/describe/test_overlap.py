"""Which views share bytes, against sets of bytes."""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvplan import Axis, Group, KVPlanError, Region, View, Worker
from kvplan.describe import _overlap as overlap
from kvplan.describe._overlap import Shared, describe_overlap, overlaps
from tests.bytes_of import element_bytes, small_views

Pairs = set[frozenset[str]]


def named(views: list[View]) -> list[View]:
    """The views, each with a name of its own."""
    return [attrs.evolve(view, name=f"v{i}") for i, view in enumerate(views)]


def found(views: list[View]) -> Pairs:
    """The pairs that ``overlaps`` gives, by name."""
    return {frozenset((a.view.name, b.view.name)) for a, b in overlaps(views)}


def step_unlike(views: list[View]) -> bool:
    """Whether blocks of some views are further apart than those of others."""
    return len({view.block_stride_bytes for view in views if view.num_blocks > 1}) > 1


def meet(views: list[View]) -> bool:
    """Whether each pair found meets where it says: its byte is one of the block of either view."""
    return all(first.byte == second.byte and all(map(holds, (first, second))) for first, second in overlaps(views))


def holds(shared: Shared) -> bool:
    """Whether the block of a view has the byte."""
    start = shared.view.offset_bytes + shared.block * shared.view.block_stride_bytes
    alone = attrs.evolve(shared.view, num_blocks=1, offset_bytes=start)
    inside = 0 <= shared.block < shared.view.num_blocks
    return inside and any(low <= shared.byte < high for low, high in intervals(alone))


def sharing(views: list[View]) -> Pairs:
    """The pairs whose sets of bytes have a byte in common."""
    held = {view.name: set(element_bytes(view)) for view in views}
    return {frozenset(pair) for pair in itertools.combinations(held, 2) if held[pair[0]] & held[pair[1]]}


@given(st.lists(small_views(), min_size=2, max_size=4).map(named))
def test_pairs_are_those_that_share_a_byte(views: list[View]) -> None:
    """Of any views, exactly those with a byte in common are found; only views of different strides are refused."""
    expected = sharing(views)
    event(f"{len(expected)} pairs share")
    try:
        assert found(views) == expected
        assert meet(views)
    except KVPlanError as error:
        assert error.code == "OVERLAP"
        assert step_unlike([view for view in views if view.name in (error.details["first"], error.details["second"])])


@given(st.lists(small_views(), min_size=2, max_size=4), st.integers(40, 90), st.integers(2, 4))
def test_views_of_one_pool_are_compared_within_it(views: list[View], step: int, blocks: int) -> None:
    """The same for views that step alike, as those of one pool do."""
    pool = [attrs.evolve(view, num_blocks=blocks, block_stride_bytes=step + 100) for view in named(views)]
    assert found(pool) == sharing(pool)
    assert meet(pool)


def intervals(view: View) -> list[tuple[int, int]]:
    """The bytes of each element of each block, as an interval."""
    starts = [view.offset_bytes + block * view.block_stride_bytes for block in range(view.num_blocks)]
    for axis in view.axes:
        starts = [start + i * axis.stride_bytes for start in starts for i in range(axis.extent)]
    return [(start, start + view.itemsize) for start in starts]


def large(view_end: int = 1 << 63) -> st.SearchStrategy[View]:
    """Views of a few elements whose offsets and strides are near powers of two up to 2**62, ending below 2**63."""
    near = st.builds(lambda power, more: max(0, (1 << power) + more), st.integers(59, 62), st.integers(-9, 9))
    offset = st.one_of(st.integers(0, 9), near, st.builds(lambda a, b: a + b, near, near))
    axis = st.builds(lambda extent, stride: (Axis("a", 0, extent, extent, stride),), st.integers(1, 3), near)

    def view(blocks: int, step: int, offset: int, axes: tuple[Axis, ...], dtype: str) -> View | None:
        try:
            return View("v", "g", "r", dtype, axes, blocks, step, offset)
        except KVPlanError:
            return None

    dtypes = st.sampled_from(["uint8", "float64"])
    made = st.builds(view, st.integers(1, 4), near, offset, st.one_of(st.just(()), axis), dtypes)
    return made.filter(lambda v: v is not None and v.end_bytes < view_end)  # type: ignore[return-value]


@given(st.lists(large(), min_size=2, max_size=3).map(named))
def test_large_offsets_are_exact(views: list[View]) -> None:
    """Strides and offsets as large as a region can have them neither wrap nor lose a bit."""
    pairs = {
        frozenset((a.name, b.name))
        for a, b in itertools.combinations(views, 2)
        if any(i < stop and start < j for i, j in intervals(a) for start, stop in intervals(b))
    }
    event(f"{len(pairs)} pairs share")
    try:
        assert found(views) == pairs
        assert meet(views)
    except KVPlanError:
        assert step_unlike(views)


def test_twice_a_residue_is_exact() -> None:
    """A last byte that meets the first of the next block is found where their sum is more than 63 bits hold."""
    step = (1 << 62) + (1 << 61)
    pool, one = View("a", "g", "r", "uint8", (), 2, step), View("b", "g", "r", "float64", (), 1, 0, step - 7)
    assert found([pool, one]) == {frozenset("ab")}
    assert found([pool, attrs.evolve(one, offset_bytes=step - 8)]) == set()


def test_interleaved_views_are_apart() -> None:
    """K and V side by side in every block share no byte, however many blocks there are."""
    k = View("k", "g", "r", "uint8", (Axis("dim", 0, 8, 8, 1),), 1 << 39, 16)
    v = attrs.evolve(k, name="v", offset_bytes=8)
    assert found([k, v]) == set()
    assert found([k, attrs.evolve(v, offset_bytes=7)]) == {frozenset("kv")}


def test_the_far_end_of_a_pool_is_looked_at() -> None:
    """Two views that meet in the last of many blocks only are found."""
    pool = View("a", "g", "r", "uint8", (), 1 << 39, 2)
    last = View("b", "g", "r", "uint8", (), 1, 0, pool.end_bytes - 1)
    assert found([pool, last]) == {frozenset("ab")}
    assert found([pool, attrs.evolve(last, offset_bytes=last.offset_bytes - 1)]) == set()


def test_one_view_is_never_compared() -> None:
    """A single view has nothing to overlap with, and no limit of runs."""
    axes = (Axis("a", 0, 1 << 21, 1 << 21, 2),)
    assert found([View("v", "g", "r", "uint8", axes, 1, 0)]) == set()
    assert found([]) == set()


def test_too_many_runs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of all views that share regions count together, before any list of them is made."""
    view = View("v", "g", "r", "uint8", (Axis("a", 0, 8, 8, 4),), 1, 0)
    views = [attrs.evolve(view, name=f"v{i}", offset_bytes=i) for i in range(4)]
    alone = [attrs.evolve(view, region="s")]
    monkeypatch.setattr(overlap, "MAX_STRIDED_RUNS", 24)
    assert list(overlaps(views[:3], alone)) == []
    for pools in ([views], [views[:2], views[2:]]):
        with pytest.raises(KVPlanError, match=r"^RANGE: .*'v3': expected at most 24 runs in the blocks .* got 32"):
            list(overlaps(*pools))


def test_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another stride leaves a small common step, pairs are compared one by one, up to a limit for all pools."""
    odd = View("odd", "g", "r", "uint8", (), 3, 998, 1)
    views = [odd, *(View(f"v{i}", "g", "r", "uint8", (), 2, 1000, 2 * i) for i in range(5))]
    assert found(views) == set()
    monkeypatch.setattr(overlap, "MAX_PAIRS", 9)
    for pools in ([views], [views[:5], views[:5]]):
        with pytest.raises(KVPlanError, match=r"^RANGE: .* expected at most 9 pairs of runs to compare, got 10"):
            list(overlaps(*pools))


def test_views_of_different_strides_lie_apart() -> None:
    """They may follow each other, but their blocks may not lie between each other unless a common step says so."""
    first = View("a", "g", "r", "uint8", (), 1 << 39, 3)
    second = View("b", "g", "r", "uint8", (), 1 << 39, 5, first.end_bytes)
    assert found([first, second]) == set()
    between = attrs.evolve(second, offset_bytes=first.end_bytes - 2)
    message = "expected the block stride of view 'a', whose blocks lie between its own, 3, got 5"
    with pytest.raises(KVPlanError, match=rf"^OVERLAP: cannot place view 'b': {message}$"):
        found([first, between])
    even = attrs.evolve(first, block_stride_bytes=4)
    odd = attrs.evolve(second, block_stride_bytes=6, offset_bytes=1)
    assert found([even, odd]) == set()


@pytest.mark.parametrize("blocks", [3, 1 << 39])
def test_a_layer_that_steps_by_a_page_meets_the_next_block(blocks: int) -> None:
    """Layers a page apart in pools a page apart: block 0 of the second is block 1 of the first, and is reported so."""
    first = View("layers.0", "g", "kv", "uint8", (Axis("dim", 0, 8, 8, 1),), blocks, 8)
    second = attrs.evolve(first, name="layers.1", offset_bytes=8)
    (pair,) = overlaps([first, second])
    assert describe_overlap(*pair) == "byte 8 of region 'kv': block 0 of 'layers.1' and block 1 of 'layers.0'"


def test_views_of_one_name_are_told_apart() -> None:
    """K and V of one tensor are describe by their regions, or by their offsets where they share one."""
    k = View("attn", "g", "k", "uint8", (Axis("kv", 0, 1, 2, 0), Axis("dim", 0, 8, 8, 1)), 4, 8)
    pair, *_ = overlaps([k, attrs.evolve(k, offset_bytes=20)])
    assert (
        describe_overlap(*pair)
        == "byte 20 of region 'k': block 0 of 'attn' from offset 20 and block 2 of 'attn' from offset 0"
    )
    (pair,) = overlaps([k, attrs.evolve(k, region="v")], apart={"v": 8})
    assert (
        describe_overlap(*pair)
        == "byte 0 of region 'v', block 0 of 'attn', which is byte 8 of region 'k', block 1 of 'attn'"
    )


@pytest.mark.parametrize("offset, shared", [(5, False), (6, True), (7, False), (9, False)])
def test_regions_that_span_all_of_memory_are_exact(offset: int, shared: bool) -> None:
    """Views in regions that overlap in a chain are compared by address, up to the last byte there is."""
    half = 1 << 63
    regions = [Region("low", 0, half - 1), Region("high", half - 2, half - 1), Region("top", 2 * half - 10, 10)]
    views = [View("a", "g", "high", "uint8", (), 1, 0, half - 2), View("b", "g", "top", "uint8", (), 1, 0, offset)]
    if shared:
        with pytest.raises(KVPlanError, match=r"^OVERLAP: .*, got byte 6 of region 'top', block 0 of 'b', which is"):
            Worker("w", 0, regions, [Group("g")], views)
    else:
        assert Worker("w", 0, regions, [Group("g")], views).tensors.keys() == {"a", "b"}
