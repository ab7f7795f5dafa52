"""Regression tests of known bugs of KV cache transfers: each is reproduced, caught, and planned correctly.

A known bug is a test. Its docstring is the bug in one sentence. It returns two outcomes: the faulty one must be caught
as the decorator says, and kvplan's own must be verified. `docs/known-bugs.md` lists all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, cast

import attrs

from kvplan import KVPlanError
from kvplan.verification import PROMISES, Report

Outcome = Callable[[], Report | tuple[Report, ...] | str]
"""Returns reports or a word for its result, or raises a KVPlanError."""

VERIFIED: Final = "verified"
ACCEPTED: Final = "accepted"


@attrs.frozen
class KnownBug:
    """A row of the page. ``number`` is the letter of a family and a number, such as D3.

    ``reference`` is public, GitHub threads as ``owner/repository#number``.
    """

    number: str
    bug: str
    reference: str
    caught_by: str


def known_bug(number: str, reference: str, caught_by: str) -> Callable[[Callable[[], tuple[Outcome, Outcome]]], Any]:
    """Make a test of a function that returns a faulty outcome and a right one.

    ``caught_by`` is the :func:`seen` of the faulty one.
    """

    def decorate(show: Callable[[], tuple[Outcome, Outcome]]) -> Any:
        @functools.wraps(show)
        def test() -> None:
            wrong, right = show()
            check(wrong, caught_by)
            check(right, VERIFIED)

        cast(Any, test).known_bug = _known_bug(show, number, reference, caught_by)
        return test

    return decorate


def accepted(number: str, reference: str) -> Callable[[Callable[[], Outcome]], Any]:
    """:func:`known_bug` for a valid case that was refused or failed: its one outcome must be verified."""

    def decorate(show: Callable[[], Outcome]) -> Any:
        @functools.wraps(show)
        def test() -> None:
            check(show(), VERIFIED)

        cast(Any, test).known_bug = _known_bug(show, number, reference, ACCEPTED)
        return test

    return decorate


def _known_bug(show: Callable[[], Any], number: str, reference: str, caught_by: str) -> KnownBug:
    return KnownBug(number, " ".join((inspect.getdoc(show) or "").split()), reference, caught_by)


def check(outcome: Outcome, expected: str) -> None:
    found = seen(outcome)
    assert found == expected, f"{found}, in place of {expected}"


def seen(outcome: Outcome) -> str:
    """An outcome in a line.

    >>> def refused():
    ...     raise KVPlanError("BLOCKS", "bind", expected="a block", got="none")
    >>> seen(refused), seen(lambda: "completions")
    ('refused: BLOCKS', 'completions')
    >>> seen(lambda: Report(8, 1, 1, ("VALUE",), (("VALUE", "at decode/0: 1 byte wrong"),)))
    'verify: VALUE'
    >>> seen(lambda: Report(8, 1, 1, ("VALUE",)))
    'verified in part: VALUE'
    >>> seen(lambda: Report(0, 0, 1, tuple(PROMISES)))
    'nothing moved'
    """
    try:
        result = outcome()
    except KVPlanError as error:
        return f"refused: {error.code}"
    if isinstance(result, str):
        return result
    reports = result if isinstance(result, tuple) else (result,)
    broken = {code for report in reports for code, _ in report.failures}
    if broken:
        return f"verify: {', '.join(code for code in PROMISES if code in broken)}"
    checked = [code for code in PROMISES if all(code in report.checked for report in reports)]
    if len(checked) < len(PROMISES):
        return f"verified in part: {', '.join(checked)}"
    return VERIFIED if all(report.num_bytes for report in reports) else "nothing moved"
