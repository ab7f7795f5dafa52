"""Exhibits: known faults of KV cache transfers, each rebuilt, caught, and planned correctly.

An exhibit is a test. Its docstring is the fault in one sentence. It returns two looks: the faulty one must be caught as
the exhibit says, and kvplan's own must be verified. `docs/museum.md` lists all exhibits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, cast

import attrs

from kvplan import KVPlanError
from kvplan.verification import PROMISES, Report

Look = Callable[[], Report | tuple[Report, ...] | str]
"""Returns reports or a word for its result, or raises a KVPlanError."""

VERIFIED: Final = "verified"
ACCEPTED: Final = "accepted"


@attrs.frozen
class Exhibit:
    """A row of the page. ``number`` is the letter of a family and a number, such as D3.

    ``reference`` is public, GitHub threads as ``owner/repository#number``.
    """

    number: str
    bug: str
    reference: str
    caught_by: str


def exhibit(number: str, reference: str, caught_by: str) -> Callable[[Callable[[], tuple[Look, Look]]], Any]:
    """Make a test of a function that returns a faulty look and a right one.

    ``caught_by`` is the :func:`outcome` of the faulty one.
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
    """:func:`exhibit` for a valid case that was refused or failed: its one look must be verified."""

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
    """The result of a look, in a line.

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
