"""The search for the longest prefix of a prompt that all workers of an engine can read.

A prefix can be read up to a position if every page from the first one that a group attends to
serves the group, and, for states, if the states after exactly that position are stored. The search
asks for no page twice, and takes time linear in the pages, in any order of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

__all__ = ["Attended", "PageNeeds", "longest_prefix"]

Attended = Callable[[int], int]
"""Returns the first position to which the token at a position, or a later one, attends."""


@attrs.frozen(eq=False)
class PageNeeds:
    """Groups that need the same pages of every prefix, and whether a page has what they read of it.

    ``attended`` is ``None`` for groups that attend to all positions.
    """

    is_state: bool
    attended: Attended | None
    serves: Callable[[int], bool]


def longest_prefix(
    needs: Sequence[PageNeeds], tokens_per_page: int, start: int, stop: int, step: int
) -> int:
    """Return the longest prefix up to ``stop``, a multiple of ``step``, or ``start``."""
    states = [each for each in needs if each.is_state]
    windows = [
        _Windows(each.attended, each.serves, tokens_per_page, start)
        for each in needs
        if each.attended is not None and not each.is_state
    ]
    end = stop
    for each in needs:
        if not each.is_state and each.attended is None:
            end = min(end, _first_gap(each, tokens_per_page, start, stop))
    end = end // step * step
    while end > start:
        # a state is that after the last position of a page
        if states and end % tokens_per_page:
            end = end // tokens_per_page * tokens_per_page // step * step
            continue
        page = end // tokens_per_page - 1
        if all(each.serves(page) for each in states) and all(each.serve(end) for each in windows):
            return end
        end -= step
    return start


def _first_gap(needs: PageNeeds, tokens_per_page: int, start: int, stop: int) -> int:
    """Return where the pages end that follow each other from ``start`` on."""
    for page in range(start // tokens_per_page, -(-stop // tokens_per_page)):
        if not needs.serves(page):
            return page * tokens_per_page
    return stop


class _Windows:
    """The windows of some groups before the ends of prefixes, from the longest prefix on.

    No page is asked for twice: ``_whole`` are pages that serve the groups, from the lowest one that
    was asked for on, and ``_missing`` is the last page that did not.
    """

    def __init__(
        self, attended: Attended, serves: Callable[[int], bool], tokens_per_page: int, start: int
    ) -> None:
        self._attended = attended
        self._serves = serves
        self._size = tokens_per_page
        self._start = start
        self._whole = range(0)
        self._missing = -1

    def serve(self, end: int) -> bool:
        """Return whether all pages of the windows before an end are there."""
        low = min(max(self._start, self._attended(end)), end)
        if low == end:
            return True
        first, stop = low // self._size, -(-end // self._size)
        if first <= self._missing < stop:
            return False
        if stop - 1 not in self._whole:
            self._whole = range(stop, stop)
        while self._whole.start > first:
            page = self._whole.start - 1
            if not self._serves(page):
                self._missing = page
                return False
            self._whole = range(page, self._whole.stop)
        return True
