"""What is wrong with a message of a peer: problems with their paths, and the error that carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import attrs

from kvplan._text import count
from kvplan.errors import KVPlanError

Made = TypeVar("Made")

MAX_PROBLEMS: Final = 100
"""The number of problems that are listed. The others are only counted."""

BAD: Final = object()
"""Takes the place of a part of a message that has a problem. Whatever needs that part is skipped."""


@attrs.frozen
class Problem:
    """One thing wrong with a message: its path, a code of :data:`kvplan.errors.CODES`, and the text.

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
    """A peer's message was refused. The peer made the mistake; a plain KVPlanError is a mistake of the caller.

    ``problems`` lists everything that is wrong; ``code``, ``str(error)`` and the other fields describe the first one.
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
        self.problems, self._first = tuple(problems), first

    def __reduce__(self) -> tuple[Any, ...]:
        return PeerError, (self.problems, self._first)


class Findings:
    """Collects the problems of one message, :data:`MAX_PROBLEMS` at most, and counts the rest."""

    def __init__(self) -> None:
        self.count: int = 0
        self._problems: list[Problem] = []
        self.first: KVPlanError | None = None

    def add(self, path: str, error: KVPlanError) -> None:
        """Add the problem that ``error`` was raised for the part of the message at ``path``."""
        self.count += 1
        self.first = self.first or error
        if self.count <= MAX_PROBLEMS:
            self._problems.append(Problem(path, error.code, str(error).removeprefix(f"{error.code}: ")))

    def attempt(self, path: str, make: Callable[..., Made], *parts: Any) -> Made | Any:
        """``make(*parts)``. :data:`BAD` if one of the parts is, or if ``make`` raises, which adds a problem."""
        if BAD in parts:
            return BAD
        try:
            return make(*parts)
        except KVPlanError as error:
            self.add(path, error)
            return BAD

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems in the order found. If there are too many, the last one says how many are not listed."""
        rest = self.count - len(self._problems)
        more = [Problem("", "MESSAGE", f"{count(rest, 'more problem')} not listed")] if rest else []
        return (*self._problems, *more)

    @property
    def error(self) -> PeerError:
        """The problems as an error; there must be one."""
        assert self.first
        return PeerError(self.problems, self.first)
