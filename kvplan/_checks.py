"""Checks of values that callers give: exact integers, names, sequences of one type.

Each check returns the value in its exact type, or raises a KVPlanError. ``subject`` is the noun by
which its message calls the value: "cannot read {subject}".
"""

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


def integer(value: Any, subject: str, low: int = 0, high: int = INT64_END) -> int:
    """Return ``value`` as an exact ``int`` in ``[low, high)``; no bool or float is an integer.

    >>> integer(np.uint64(7), "count")
    7
    """
    if type(value) is int and low <= value < high:
        return value
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise wrong_type(subject, "an integer", value)
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # of an array of several numbers, of a tensor without any
        raise wrong_type(subject, "an integer", value) from None
    if not low <= number < high:
        raise KVPlanError(
            "RANGE",
            f"read {subject}",
            expected=f"an integer in [{low}, {high})",
            got=shown(number),
            value=number,
        )
    return number


def interval(value: Any, subject: str, high: int) -> tuple[int, int]:
    """Return ``value`` as two exact integers ``(start, stop)`` in ``[0, high)``, in any order.

    >>> interval([3, np.int64(7)], "a range of tokens", 100)
    (3, 7)
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise wrong_type(subject, "(start, stop)", value)
    start, stop = value
    return integer(start, subject, high=high), integer(stop, subject, high=high)


def at_most(limit: int, number: int, unit: str, action: str, **details: Any) -> None:
    """Raise ``RANGE`` for more than ``limit`` units, as a small offer must not claim much memory.

    >>> at_most(8, 9, "cells", "plan for d/0")
    Traceback (most recent call last):
    kvplan.errors.KVPlanError: RANGE: cannot plan for d/0: expected at most 8 cells, got 9
    """
    if number > limit:
        raise KVPlanError(
            "RANGE",
            action,
            expected=f"at most {limit} {unit}",
            got=f"{number}",
            value=number,
            **details,
        )


def name(value: Any, subject: str) -> str:
    """Return ``value`` as a ``str`` that is not empty and can be printed on one line.

    >>> name("layers.0.attn", "name of a view")
    'layers.0.attn'
    """
    if not isinstance(value, str):
        raise wrong_type(subject, "a string", value)
    if not value or not value.isprintable():
        raise KVPlanError(
            "NAME",
            f"read {subject}",
            expected="a non-empty string of printable characters",
            got=shown(value),
            value=value,
        )
    return str.__str__(value)


def members(kind: type[Kind], values: Any, subject: str) -> tuple[Kind, ...]:
    """Return ``values`` as a tuple, all of type ``kind``.

    >>> members(int, [1, 2], "sizes")
    (1, 2)
    """
    try:
        if isinstance(values, str | bytes):
            raise TypeError
        items = tuple(values)  # a tuple stays itself, so that equal layers can share it
    except TypeError:
        raise wrong_type(subject, f"a sequence of {kind.__name__} values", values) from None
    for item in items:
        if not isinstance(item, kind):
            raise wrong_type(subject, f"{kind.__name__} values only", item)
    return items


def instance(kind: Any, value: Kind, subject: str) -> Kind:
    """Return ``value``, which must be of type ``kind``.

    >>> instance(str, "READ", "operation")
    'READ'
    """
    if not isinstance(value, kind):
        raise wrong_type(subject, f"a value of type {kind.__name__}", value)
    return value


def having(attribute: str, value: Any, subject: str, expected: str) -> Any:
    """Return ``value``, which must have an attribute.

    It may be of a package that the caller does not import.
    """
    if isinstance(value, type) or not hasattr(value, attribute):
        raise wrong_type(subject, expected, value)
    return value


def seconds(value: Any, subject: str) -> float:
    """Return ``value`` as a number of seconds, from 0 to :data:`SECONDS_END`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(subject, "a number of seconds", value)
    if not 0 <= value < SECONDS_END:
        expected = f"seconds in [0, {SECONDS_END:g})"
        raise KVPlanError("RANGE", f"read {subject}", expected=expected, got=shown(value))
    return float(value)


def is_one_of(value: Any, names: Iterable[str]) -> bool:
    """Return whether ``value`` is a string among ``names``; it may be anything, even unhashable.

    >>> is_one_of("READ", ["READ", "WRITE"]), is_one_of([], ["READ", "WRITE"])
    (True, False)
    """
    return isinstance(value, str) and value in names


def wrong_type(subject: str, expected: str, got: Any) -> KVPlanError:
    """Return the error for a value of the wrong type, with its printed form only.

    The value itself may be anything.
    """
    text = shown(got)
    return KVPlanError("TYPE", f"read {subject}", expected=expected, got=text, value=text)


def check_fields(
    owner: Any, kind: str, check: Callable[..., Any], *fields: str, **limits: int
) -> None:
    """Replace fields of a frozen value under construction by what a check returns for them.

    ``check`` is :func:`integer` or :func:`name`; ``kind`` is what messages call the owner.
    """
    for field in fields:
        checked = check(getattr(owner, field), f"{field} of {kind}", **limits)
        object.__setattr__(owner, field, checked)
