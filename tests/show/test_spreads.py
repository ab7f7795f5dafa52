"""Spreads and grids: what is folded, the same on both sides, and which cells stand over which leaves."""

from __future__ import annotations

import itertools

import pytest

from kvplan import Model, plan_reads
from kvplan.show.bands import Step
from kvplan.show.copies import Panel
from kvplan.show.grids import Grid, Leaf, merged, opened
from kvplan.show.pages import Page, pages
from kvplan.show.panels import panels
from kvplan.show.spreads import Spread
from tests.small import engine

LLAMA = Model.shipped("llama-3.1-8b")
PAGE: Page = pages(engine("e")[0])[0]


def panel() -> Panel:
    """A transpose: 64 positions of 4 heads, from two sources with blocks of 16."""
    sources = LLAMA.engine("p", tp=4, layout="LBNHC", num_blocks=30)
    (found,) = panels(plan_reads(LLAMA.engine("d", tp=2, tokens_per_block=64, num_blocks=9)[0], sources))
    return found


def positions(grid: Grid) -> list[str]:
    return [str(leaf.steps[-1]) for leaf in grid.leaves if leaf.kind == "bytes"]


def test_few_copies_are_all_shown() -> None:
    """Where there are no more copies than asked for, nothing is folded."""
    (found,) = panels(plan_reads(engine("d")[0], engine("p", tp=2, tokens=2)))
    local, remote = Spread.of(found).sides(16)
    assert {leaf.kind for grid in (local, remote) for leaf in grid.leaves} == {"bytes"}


def test_both_ends_and_changes_are_kept() -> None:
    """Of many positions, the ends are shown, and those on both sides of the first change of blocks."""
    local, _ = Spread.of(panel()).sides(20)
    assert positions(local) == ["0", "1", "15", "16", "63"] * 4


@pytest.mark.parametrize("most", [4, 8, 12, 16, 20, 40])
def test_both_sides_show_the_same_copies(most: int) -> None:
    """The copies of one side are those of the other, in the order of its own bytes, and no more than asked for."""
    found = panel()
    spread = Spread.of(found)
    local, remote = spread.sides(most)
    shown = [sorted(leaf.copy for leaf in grid.leaves if leaf.copy is not None) for grid in (local, remote)]
    assert shown[0] == shown[1] == sorted(spread.chosen(most))
    assert 0 < len(shown[0]) <= most


def test_every_axis_keeps_a_value() -> None:
    """However few are asked for, one copy of each tensor is shown."""
    assert len(Spread.of(panel()).chosen(1)) == 1


def leaf(*names: str, kind: str = "bytes") -> Leaf:
    return Leaf(kind, tuple(Step("axis", 0, 1, name) for name in names), 0, 1, PAGE)  # type: ignore[arg-type]


def spans(grid: Grid) -> list[tuple[int, int, int, int, str]]:
    return [(cell.row, cell.rows, cell.first, cell.last, grid.text(cell)) for cell in grid.cells]


def test_cells_span_what_is_inside_them() -> None:
    """A cell stands over all leaves that share its step and those before it."""
    grid = Grid.of([leaf("a", "x"), leaf("a", "y"), leaf("b", "y")])
    assert spans(grid) == [
        (0, 1, 0, 1, "a"),
        (0, 1, 2, 2, "b"),
        (1, 1, 0, 0, "x"),
        (1, 1, 1, 1, "y"),
        (1, 1, 2, 2, "y"),
    ]


def test_a_short_path_reaches_down() -> None:
    """A leaf of fewer steps than others has its last cell in all rows that are left."""
    grid = Grid.of([leaf("a", "x"), leaf("b")])
    assert (0, 2, 1, 1, "b") in spans(grid)


def test_a_fold_stands_where_its_neighbours_part() -> None:
    """What is folded inside one part stands under it, beside the parts that are shown."""
    grid = Grid.of([leaf("a", "x"), leaf("a", kind="fold"), leaf("a", "z")])
    assert spans(grid)[0] == (0, 1, 0, 2, "a")
    assert (1, 1, 1, 1, "") in spans(grid)


def test_folds_side_by_side_are_one() -> None:
    """Two neighbours that are folded are one, where what they share ends."""
    made = merged([leaf("a", "x"), leaf("a", kind="fold"), leaf("b", kind="fold"), leaf("b", "z")])
    assert [(one.kind, len(one.steps)) for one in made] == [("bytes", 2), ("fold", 0), ("bytes", 2)]


def test_a_row_of_one_axis_is_named() -> None:
    """A row is named after its axis; where it has several, each cell says its own."""
    one, two = Step("head", 4, 5), Step("token", 0, 1)
    grid = Grid.of([Leaf("bytes", (one, two), 0, 1, PAGE), Leaf("bytes", (one, one), 1, 2, PAGE)])
    assert grid.axes == ("head", "")
    assert [grid.text(cell) for cell in grid.cells] == ["4", "token 0", "head 4"]


def test_the_leaves_of_a_page_are_all_its_bytes() -> None:
    """Opened in any way, the leaves of a page follow each other from its first byte to its last."""
    for worker in (
        LLAMA.engine("e", tp=4, layout="LHBNC", num_blocks=9)[1],
        Model.shipped("granite-4.0-h-tiny").engine("e")[0],
    ):
        for page in pages(worker):
            for keep in (1, 2, 3, 4):
                for every in (True, False):
                    leaves = opened(page, keep, every)
                    assert leaves[0].start == 0
                    assert leaves[-1].stop == page.size_bytes + page.rest_bytes
                    assert all(before.stop == after.start for before, after in itertools.pairwise(leaves))
