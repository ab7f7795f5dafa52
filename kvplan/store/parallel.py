"""Calls of a backend that do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def in_parallel(
    call: Callable[[Item], Answer], items: Sequence[Item], at_once: int
) -> list[Answer]:
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
