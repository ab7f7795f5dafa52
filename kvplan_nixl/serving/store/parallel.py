"""Calls of a backend that do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, TypeVar

FILES_AT_ONCE: Final = 2
"""Files that are read, digested, copied and written at once, even of a backend at hand."""

Argument = TypeVar("Argument")
Returned = TypeVar("Returned")


def in_parallel(
    call: Callable[[Argument], Returned], items: Sequence[Argument], at_once: int
) -> list[Returned]:
    """Return the answers of a call for each item, of which up to ``at_once`` are under way.

    All calls have ended when it returns or raises. It raises the first error, in order of the
    items, and begins no further call after one.

    >>> in_parallel(str.upper, ["a", "b"], 2)
    ['A', 'B']
    """
    num_threads = min(at_once, len(items))
    if num_threads <= 1:
        return [call(item) for item in items]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="kvplan store") as pool:
        return list(pool.map(call, items))


def in_batches(
    call: Callable[[Argument], Returned], items: Iterable[Argument], at_once: int
) -> Iterator[Returned]:
    """Yield the answers for items of which there may be many: ``at_once`` of them are in memory.

    >>> list(in_batches(str.upper, "abc", 2))
    ['A', 'B', 'C']
    """
    remaining = iter(items)
    while batch := list(islice(remaining, at_once)):
        yield from in_parallel(call, batch, at_once)
