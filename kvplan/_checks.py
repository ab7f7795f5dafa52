"""Checks of values that callers give: exact integers, names, sequences of one type."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

from kvplan._text import shown
from kvplan.errors import KVPlanError

Kind = TypeVar("Kind")

INT64_END: Final = 1 << 63

ID_END: Final = 1 << 31
"""Block ids and descriptor ids are below this, so that they fit int32."""


def integer(value: Any, what: str, low: int = 0, high: int = INT64_END) -> int:
    """``value`` as an exact ``int`` in ``[low, high)``; bools and floats are not integers.

    >>> integer(np.uint64(7), "count")
    7
    """
    if type(value) is int and low <= value < high:
        return value
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise wrong_type(what, "an integer", value)
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong_type(what, "an integer", value) from None
    if not low <= number < high:
        raise KVPlanError(
            "RANGE", f"read {what}", expected=f"an integer in [{low}, {high})", got=shown(number), value=number
        )
    return number


def interval(value: Any, what: str, high: int) -> tuple[int, int]:
    """``value`` as two exact integers ``(start, stop)`` in ``[0, high)``, in any order.

    >>> interval([3, np.int64(7)], "a range of tokens", 100)
    (3, 7)
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise wrong_type(what, "(start, stop)", value)
    start, stop = (integer(each, what, high=high) for each in value)
    return start, stop


def at_most(limit: int, number: int, unit: str, what: str, **details: Any) -> None:
    """Refuse to list more than ``limit`` of something, with ``RANGE``: a small offer must not claim much memory.

    >>> at_most(8, 9, "cells", "plan for d/0")
    Traceback (most recent call last):
    kvplan.errors.KVPlanError: RANGE: cannot plan for d/0: expected at most 8 cells, got 9
    """
    if number > limit:
        raise KVPlanError("RANGE", what, expected=f"at most {limit} {unit}", got=f"{number}", value=number, **details)


def name(value: Any, what: str) -> str:
    """``value`` as a ``str`` that is not empty and can be printed on one line.

    >>> name("layers.0.attn", "name of a view")
    'layers.0.attn'
    """
    if not isinstance(value, str):
        raise wrong_type(what, "a string", value)
    if not value or not value.isprintable():
        raise KVPlanError(
            "NAME", f"read {what}", expected="a non-empty string of printable characters", got=shown(value), value=value
        )
    return str.__str__(value)


def members(kind: type[Kind], values: Any, what: str) -> tuple[Kind, ...]:
    """``values`` as a tuple, all of type ``kind``.

    >>> members(int, [1, 2], "sizes")
    (1, 2)
    """
    try:
        made = tuple(values)  # a tuple stays itself, so that equal layers can share one
    except TypeError:
        raise wrong_type(what, f"a sequence of {kind.__name__} values", values) from None
    for item in made:
        if not isinstance(item, kind):
            raise wrong_type(what, f"{kind.__name__} values only", item)
    return made


def wrong_type(what: str, expected: str, got: Any) -> KVPlanError:
    """The error for a value of the wrong type. It keeps the printed form only: the value itself may be anything."""
    return KVPlanError("TYPE", f"read {what}", expected=expected, got=shown(got), value=shown(got))


def settle(owner: Any, kind: str, check: Callable[..., Any], *fields: str, **limits: int) -> None:
    """Replace fields of a frozen value under construction by what :func:`integer` or :func:`name` makes of them."""
    for field in fields:
        object.__setattr__(owner, field, check(getattr(owner, field), f"{field} of {kind}", **limits))
