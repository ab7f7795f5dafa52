"""Exhibits: faults that transfers of KV caches are known to have had, each rebuilt, caught, and planned right.

An exhibit is a test. Its docstring is the fault in one sentence; it returns two ways to look at it: what the fault did
must be caught as the exhibit says, and what kvplan does in the same place must be verified. `docs/museum.md` is made
of what all exhibits say.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, cast

import attrs

from kvplan import KVPlanError, Report
from kvplan.verification.report import PROMISES

Look = Callable[[], Report | tuple[Report, ...] | str]
"""Makes reports, or says in a word what it saw, or raises a KVPlanError."""

VERIFIED: Final = "verified"
ACCEPTED: Final = "accepted"


@attrs.frozen
class Exhibit:
    """What the page says of a fault: ``number`` is a letter for its family and a number, such as D3.

    ``reference`` is public, GitHub threads as ``owner/repository#number``.
    """

    number: str
    bug: str
    reference: str
    caught_by: str


def exhibit(number: str, reference: str, caught_by: str) -> Callable[[Callable[[], tuple[Look, Look]]], Any]:
    """Makes a test of a function that returns how to look at the wrong thing, and at the right one.

    ``caught_by`` is what :func:`outcome` has to say of the wrong one.
    """

    def decorate(show: Callable[[], tuple[Look, Look]]) -> Any:
        @functools.wraps(show)
        def test() -> None:
            wrong, right = show()
            check(wrong, caught_by)
            check(right, VERIFIED)

        cast(Any, test).exhibit = _exhibit(show, number, reference, caught_by)
        return test

    return decorate


def accepted(number: str, reference: str) -> Callable[[Callable[[], Look]], Any]:
    """:func:`exhibit` for what is valid and was refused, or failed: there is nothing to catch, it is to be verified."""

    def decorate(show: Callable[[], Look]) -> Any:
        @functools.wraps(show)
        def test() -> None:
            check(show(), VERIFIED)

        cast(Any, test).exhibit = _exhibit(show, number, reference, ACCEPTED)
        return test

    return decorate


def _exhibit(show: Callable[[], Any], number: str, reference: str, caught_by: str) -> Exhibit:
    return Exhibit(number, " ".join((inspect.getdoc(show) or "").split()), reference, caught_by)


def check(look: Look, expected: str) -> None:
    seen = outcome(look)
    assert seen == expected, f"{seen}, in place of {expected}"


def outcome(look: Look) -> str:
    """What becomes of a look, in a line.

    >>> def refused():
    ...     raise KVPlanError("BLOCKS", "bind", expected="a block", got="none")
    >>> outcome(refused), outcome(lambda: "completions")
    ('refused: BLOCKS', 'completions')
    >>> outcome(lambda: Report(8, 1, 1, ("VALUE",), (("VALUE", "at decode/0: 1 byte wrong"),)))
    'verify: VALUE'
    >>> outcome(lambda: Report(8, 1, 1, ("VALUE",)))
    'verified in part: VALUE'
    >>> outcome(lambda: Report(0, 0, 1, tuple(PROMISES)))
    'nothing moved'
    """
    try:
        seen = look()
    except KVPlanError as error:
        return f"refused: {error.code}"
    if isinstance(seen, str):
        return seen
    reports = seen if isinstance(seen, tuple) else (seen,)
    broken = {code for report in reports for code, _ in report.failures}
    if broken:
        return f"verify: {', '.join(code for code in PROMISES if code in broken)}"
    checked = [code for code in PROMISES if all(code in report.checked for report in reports)]
    if len(checked) < len(PROMISES):
        return f"verified in part: {', '.join(checked)}"
    return VERIFIED if all(report.num_bytes for report in reports) else "nothing moved"
