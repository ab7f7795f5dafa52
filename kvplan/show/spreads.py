"""Spreads: the copies of a panel as grids of both sides, few enough to draw, the same ones on both.

Of each axis some values are kept: both ends, and where the remote worker or a block changes. What is between them is
folded. Bytes that no copy moves are told as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from kvplan.show.bands import TENSOR, Step
from kvplan.show.copies import Copy, End, Panel
from kvplan.show.grids import BLOCK, REGION, WORKER, Grid, Leaf, common, merged
from kvplan.show.pages import Page

MOST_VALUES: Final = 8
"""Of an axis of more values than this, some are folded."""

Value = tuple[int, int]
"""An interval of an axis that copies have."""

Lane = tuple[tuple[Step, ...], Sequence[tuple[int, End]]]
"""The steps to the page of one block, and its copies by ascending bytes, each with its number."""


@attrs.frozen
class Spread:
    """The copies of a panel, by what they are and where: of each its value on each axis, and both sides' lanes.

    ``ranked`` has the values of each axis, those first that say most.
    """

    values: Sequence[Mapping[Any, Value]]
    ranked: Mapping[Any, Sequence[Value]]
    lanes: tuple[Sequence[Lane], Sequence[Lane]]

    @classmethod
    def of(cls, panel: Panel) -> Spread:
        """The spread of a panel's copies."""
        values = [_values(copy) for copy in panel.copies]
        ends = [copy.local for copy in panel.copies], [copy.remote for copy in panel.copies]
        lanes = (_lanes(ends[0], panel.sampled), _lanes(ends[1], panel.sampled))
        return cls(values, _ranked(panel.copies, values), lanes)

    def sides(self, most: int) -> tuple[Grid, Grid]:
        """The local and the remote side, about ``most`` copies shown."""
        shown = self.chosen(most)
        made = [merged(leaf for prefix, ends in lanes for leaf in _lane(prefix, ends, shown)) for lanes in self.lanes]
        return Grid.of(made[0]), Grid.of(made[1])

    def chosen(self, most: int) -> frozenset[int]:
        """The numbers of the copies to show. Axes of many values lose most."""
        shown = list(range(len(self.values)))
        keep = {key: len(order) for key, order in self.ranked.items()}
        if len(shown) > most:
            keep = {key: min(number, MOST_VALUES) for key, number in keep.items()}
        while True:
            taken = {key: frozenset(order[: keep[key]]) for key, order in self.ranked.items()}
            shown = [i for i in shown if all(value in taken[key] for key, value in self.values[i].items())]
            longest = max(keep, key=lambda key: (min(keep[key], 3), len(self.ranked[key])))
            if len(shown) <= most or keep[longest] == 1:
                return frozenset(shown)
            keep[longest] -= 1


def _values(copy: Copy) -> dict[Any, Value]:
    """The interval of a copy on each axis, by its tensors and the name of the axis."""
    steps = copy.local.steps
    tensors = tuple(step.name for step in steps if step.axis == TENSOR)
    found = {(tensors, step.axis): (step.start, step.stop) for step in steps if step.axis != TENSOR}
    return found | {(tensors, BLOCK): (copy.local.ordinal, copy.local.ordinal + 1)}


def _ranked(copies: Sequence[Copy], values: Sequence[Mapping[Any, Value]]) -> dict[Any, Sequence[Value]]:
    around: dict[Any, dict[Value, set[Any]]] = {}
    for copy, mine in zip(copies, values, strict=True):
        where = copy.remote_index, copy.remote.page.places, copy.remote.ordinal, copy.local.ordinal
        for key, value in mine.items():
            around.setdefault(key, {}).setdefault(value, set()).add(where)
    return {key: _by_weight(sorted(found), found) for key, found in around.items()}


def _by_weight(order: Sequence[Value], around: Mapping[Value, set[Any]]) -> list[Value]:
    """Values of an axis: both ends, the second, both sides of the first and last change of what is around, the rest."""
    changes = [i for i in range(1, len(order)) if around[order[i]] != around[order[i - 1]]]
    first = [0, len(order) - 1, min(1, len(order) - 1)]
    first += [at for i in (changes[:1] + changes[-1:]) for at in (i, i - 1)]
    return [order[i] for i in dict.fromkeys([*first, *range(len(order))])]


def _lanes(ends: Sequence[End], sampled: bool) -> list[Lane]:
    """The pages of blocks, by worker, region and ordinal."""
    found: dict[Any, list[tuple[int, End]]] = {}
    for i, end in enumerate(ends):
        found.setdefault((end.worker.key, end.page.places, end.ordinal), []).append((i, end))
    several = len({key[:2] for key in found}) > len({key[0] for key in found})
    ordered = [sorted(found[key], key=lambda each: each[1].box.start) for key in sorted(found)]
    return [(_prefix(inside[0][1], several, sampled), inside) for inside in ordered]


def _prefix(end: End, several: bool, sampled: bool) -> tuple[Step, ...]:
    """The steps to the page of an end: its region among ``several`` of a worker, its id where not ``sampled``."""
    steps = [Step(WORKER, 0, 1, end.worker.label)]
    if several:
        steps.append(Step(REGION, 0, 1, end.region))
    if end.group.tokens_per_block is not None:
        name = "" if sampled else f"{end.ordinal} (id {end.block})"
        steps.append(Step(BLOCK, end.ordinal, end.ordinal + 1, name, f"positions {end.positions}"))
    return tuple(steps)


def _lane(prefix: tuple[Step, ...], ends: Sequence[tuple[int, End]], shown: frozenset[int]) -> Iterator[Leaf]:
    """The leaves of one page: the copies that are shown, and what lies between them."""
    page = ends[0][1].page
    at, steps, folded = 0, prefix, False
    if not any(i in shown for i, _ in ends):
        yield Leaf("fold", prefix[:1], 0, page.size_bytes, page)
        return
    for i, end in ends:
        if i not in shown:
            folded = True
            continue
        path = (*prefix, *end.steps)
        yield from _between(page, end, at, end.box.start, prefix, common(steps, path), folded)
        yield Leaf("bytes", path, end.box.start, end.box.stop, page, i)
        at, steps, folded = end.box.stop, path, False
    yield from _between(page, end, at, page.size_bytes + page.rest_bytes, prefix, prefix, folded)


def _between(
    page: Page, end: End, start: int, stop: int, prefix: tuple[Step, ...], around: tuple[Step, ...], folded: bool
) -> Iterator[Leaf]:
    """What lies between two copies: more of them, or bytes that do not move, with their steps if they are one box."""
    if folded:
        yield Leaf("fold", around, start, stop, page)
    elif start < stop:
        boxes = tuple(page.boxes(start, stop))
        if len(boxes) == 1 and boxes[0].stop - boxes[0].start == stop - start:
            around = (*prefix, *attrs.evolve(end, box=boxes[0]).steps)
        yield Leaf("rest", around, start, stop, page)
