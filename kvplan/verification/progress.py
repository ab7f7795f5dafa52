"""Progress: how much of something long is done, as a share from 0 to 1, told to whoever shows it.

>>> shares = []
>>> for number in (0, 1):
...     for letter in told("ab", part(shares.append, number, 2)):
...         pass
>>> shares
[0.25, 0.5, 0.75, 1.0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Progress = Callable[[float], object]
"""What is called, now and then, with the share that is done."""

Item = TypeVar("Item")


def untold(share: float) -> None:
    """Tells nobody."""


def part(progress: Progress, number: int, of: int) -> Progress:
    """The progress of one of several equal parts, by its number from 0."""
    return lambda share: progress((number + share) / of)


def told(items: Sequence[Item], progress: Progress) -> Iterator[Item]:
    """The items, one after the other; when the next one is asked for, the one before is done."""
    for done, item in enumerate(items, 1):
        yield item
        progress(done / len(items))
