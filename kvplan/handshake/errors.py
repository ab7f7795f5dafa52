"""Findings: what is wrong with a message of a peer, each problem with its path, and the error that carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import attrs

from kvplan._text import count
from kvplan.errors import KVPlanError

Made = TypeVar("Made")

MAX_PROBLEMS: Final = 100
"""How many problems are told: a message of one fault in each of its parts is not worth more lines."""

BAD: Final = object()
"""Stands for a part of a message that has a problem; what needs that part is not looked at."""


@attrs.frozen
class Problem:
    """One thing wrong with a message: where, a code of :data:`kvplan.errors.CODES`, and in words.

    ``path`` leads from the message to the part: ``layouts[3].axes[0].stride_bytes``, or ``views.offset_bytes[7]`` for
    the offset of the eighth view. It is empty for the message as a whole.

    >>> print(Problem("layouts[3].axes[0].start", "TYPE", "cannot read start: expected an integer, got None"))
    layouts[3].axes[0].start: TYPE: cannot read start: expected an integer, got None
    """

    path: str
    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.path or 'message'}: {self.code}: {self.text}"


class PeerError(KVPlanError):
    """A message of a peer that was refused: the peer's mistake, where a plain KVPlanError is the caller's own.

    ``problems`` holds all that is wrong. ``code``, ``str(error)`` and the other parts tell the first one.
    """

    problems: tuple[Problem, ...]

    def __init__(self, problems: Sequence[Problem], first: KVPlanError) -> None:
        path, more = problems[0].path, len(problems) - 1
        others = f"and {count(more, 'more problem')}" if more else ""
        super().__init__(
            first.code,
            first.action + (f" at {path}" if path else ""),
            expected=first.expected,
            got=first.got,
            hint="; ".join(filter(None, (first.hint, others))),
            **first.details,
        )
        self.problems = tuple(problems)
        self._first = first

    def __reduce__(self) -> tuple[Any, ...]:
        return PeerError, (self.problems, self._first)


class Findings:
    """Collects problems, :data:`MAX_PROBLEMS` at most, and counts the rest."""

    def __init__(self) -> None:
        self.count: int = 0
        self._problems: list[Problem] = []
        self.first: KVPlanError | None = None

    def add(self, path: str, error: KVPlanError) -> None:
        """Keeps one more problem: that ``error`` was raised for the part of the message at ``path``."""
        self.count += 1
        self.first = self.first or error
        if self.count <= MAX_PROBLEMS:
            self._problems.append(Problem(path, error.code, str(error).removeprefix(f"{error.code}: ")))

    def attempt(self, path: str, make: Callable[..., Made], *parts: Any) -> Made | Any:
        """``make(*parts)``; :data:`BAD` where a part is bad already, or where making fails: that is a problem."""
        if BAD in parts:
            return BAD
        try:
            return make(*parts)
        except KVPlanError as error:
            self.add(path, error)
            return BAD

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems in the order found; where there are too many, the last one says how many are left out."""
        left_out = self.count - len(self._problems)
        more = [Problem("", "MESSAGE", f"{left_out} more problems are left out")] if left_out else []
        return (*self._problems, *more)

    @property
    def error(self) -> PeerError:
        """The problems as an error; there must be one."""
        assert self.first
        return PeerError(self.problems, self.first)
