"""Checks of values that callers give: exact integers, names, sequences of one type."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import numpy as np

from kvplan._text import shown
from kvplan.errors import KVPlanError

Kind = TypeVar("Kind")

INT64_END: Final = 1 << 63

ID_END: Final = 1 << 31
"""Block ids and descriptor ids are below this, so that they fit int32."""


SECONDS_END: Final = 9e9
"""Times are below this: the system takes no longer ones."""


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
    except (TypeError, RuntimeError):  # of an array of several numbers, of a tensor without any
        raise wrong_type(what, "an integer", value) from None
    if not low <= number < high:
        raise KVPlanError(
            "RANGE",
            f"read {what}",
            expected=f"an integer in [{low}, {high})",
            got=shown(number),
            value=number,
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
        raise KVPlanError(
            "RANGE",
            what,
            expected=f"at most {limit} {unit}",
            got=f"{number}",
            value=number,
            **details,
        )


def name(value: Any, what: str) -> str:
    """``value`` as a ``str`` that is not empty and can be printed on one line.

    >>> name("layers.0.attn", "name of a view")
    'layers.0.attn'
    """
    if not isinstance(value, str):
        raise wrong_type(what, "a string", value)
    if not value or not value.isprintable():
        raise KVPlanError(
            "NAME",
            f"read {what}",
            expected="a non-empty string of printable characters",
            got=shown(value),
            value=value,
        )
    return str.__str__(value)


def members(kind: type[Kind], values: Any, what: str) -> tuple[Kind, ...]:
    """``values`` as a tuple, all of type ``kind``.

    >>> members(int, [1, 2], "sizes")
    (1, 2)
    """
    try:
        if isinstance(values, str | bytes):
            raise TypeError
        made = tuple(values)  # a tuple stays itself, so that equal layers can share one
    except TypeError:
        raise wrong_type(what, f"a sequence of {kind.__name__} values", values) from None
    for item in made:
        if not isinstance(item, kind):
            raise wrong_type(what, f"{kind.__name__} values only", item)
    return made


def instance(kind: Any, value: Kind, what: str) -> Kind:
    """``value``, which must be of type ``kind``.

    >>> instance(str, "READ", "operation")
    'READ'
    """
    if not isinstance(value, kind):
        raise wrong_type(what, f"a value of type {kind.__name__}", value)
    return value


def having(attribute: str, value: Any, what: str, expected: str) -> Any:
    """``value``, which must have an attribute: for values of a room that the caller does not import."""
    if isinstance(value, type) or not hasattr(value, attribute):
        raise wrong_type(what, expected, value)
    return value


def seconds(value: Any, what: str) -> float:
    """``value`` as a number of seconds, from 0 to :data:`SECONDS_END`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(what, "a number of seconds", value)
    if not 0 <= value < SECONDS_END:
        raise KVPlanError(
            "RANGE", f"read {what}", expected=f"seconds in [0, {SECONDS_END:g})", got=shown(value)
        )
    return float(value)


def is_one_of(value: Any, known: Iterable[str]) -> bool:
    """Whether ``value`` is one of the ``known`` strings; anything may be asked about, also what has no hash.

    >>> is_one_of("READ", ["READ", "WRITE"]), is_one_of([], ["READ", "WRITE"])
    (True, False)
    """
    return isinstance(value, str) and value in known


def wrong_type(what: str, expected: str, got: Any) -> KVPlanError:
    """The error for a value of the wrong type. It keeps the printed form only: the value itself may be anything."""
    return KVPlanError("TYPE", f"read {what}", expected=expected, got=shown(got), value=shown(got))


def settle(owner: Any, kind: str, check: Callable[..., Any], *fields: str, **limits: int) -> None:
    """Replace fields of a frozen value under construction by what :func:`integer` or :func:`name` makes of them."""
    for field in fields:
        object.__setattr__(
            owner, field, check(getattr(owner, field), f"{field} of {kind}", **limits)
        )
