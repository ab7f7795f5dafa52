"""Messages: bytes from a peer, read as JSON within fixed limits of time and memory.

The rules for every version of the format, checked before memory is allocated:

- at most :data:`MAX_BYTES` of UTF-8, with at most :data:`MAX_STRINGS` strings and
  :data:`MAX_CONTAINERS` lists and mappings, nested at most :data:`MAX_DEPTH` deep;
- JSON by RFC 8259: no NaN and no Infinity; also no key twice in a mapping, and no integer of more
  than 20 digits;
- a mapping, whose key ``kvplan`` is the version. If the version is unknown, nothing else is
  checked;
- the key ``extensions``, if present, is a mapping of anything. A reader passes on extensions that
  it does not know.

JSON builds no objects and runs no code: the result consists of mappings, lists, strings and
numbers. All that is wrong with a message is a list of problems with their paths, and
:class:`PeerError` carries them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final, NoReturn, TypeVar

import attrs

from kvplan._checks import instance, members, wrong_type
from kvplan._text import brief_repr, count, shown
from kvplan.errors import KVPlanError

Outcome = TypeVar("Outcome")

VERSION: Final = 1
"""The version of the format. A message of any other version is refused without reading the rest."""

MAX_BYTES: Final = 1 << 20
"""Length of a message: over 100 times the offer of a worker of 80 layers."""

MAX_DEPTH: Final = 16
"""Nesting of lists and mappings: an offer has five levels, extensions may have more."""

MAX_CONTAINERS: Final = 1 << 15
"""Lists and mappings in a message: an empty one takes two bytes there, and thirty times that in
memory."""

MAX_STRINGS: Final = 1 << 17
"""Strings in a message, including keys: a short one takes three bytes there, and twenty times that
in memory."""

MAX_DIGITS: Final = 20
"""Digits of an integer, as many as 2**64 has.

The time to read an integer grows with their square.
"""

MAX_REAL: Final = 32
"""Characters of any other number, a few more than the shortest form of a double has."""

MODEL_KEY: Final = "kvplan/model"
"""The extension that says which model a worker runs."""

NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))

MAX_PROBLEMS: Final = 100
"""The number of problems that are listed. The others are only counted."""

BAD: Final = object()
"""Stands for a value of a message that has a problem; nothing is built from it."""


@attrs.frozen
class Problem:
    """One thing wrong with a message: its path, a code of :data:`~kvplan.errors.CODES`, a text.

    ``path`` leads from the message to the value: ``layouts[3].axes[0].stride_bytes``, or
    ``views.offset_bytes[7]`` for the offset of the eighth view. It is empty for the message as a
    whole.

    >>> text = "cannot read start: expected an integer, got None"
    >>> print(Problem("layouts[3].axes[0].start", "TYPE", text))
    layouts[3].axes[0].start: TYPE: cannot read start: expected an integer, got None
    """

    path: str
    code: str
    text: str

    __repr__ = brief_repr

    def __str__(self) -> str:
        return f"{self.path or 'message'}: {self.code}: {self.text}"


class PeerError(KVPlanError):
    """A peer's message was refused.

    The peer made the mistake; a plain KVPlanError is a mistake of the caller. ``problems`` lists
    everything that is wrong; ``code``, ``str(error)`` and the other fields describe the first one.
    """

    problems: tuple[Problem, ...]

    def __init__(self, problems: Sequence[Problem], first: KVPlanError) -> None:
        problems = members(Problem, problems, "problems of a message")
        if not problems:
            raise wrong_type("problems of a message", "at least one", problems)
        instance(KVPlanError, first, "first problem of a message")
        path = problems[0].path
        num_unnamed = len(problems) - 1
        unnamed = f"and {count(num_unnamed, 'more problem')}" if num_unnamed else ""
        super().__init__(
            first.code,
            f"{first.action} at {path}" if path else first.action,
            expected=first.expected,
            got=first.got,
            hint="; ".join(filter(None, (first.hint, unnamed))),
            **first.details,
        )
        self.problems = tuple(problems)
        self._first = first

    def with_hint(self, hint: str) -> PeerError:
        """Return the same error with another hint for the first problem."""
        return PeerError(self.problems, self._first.with_hint(hint))

    def in_file(self, path: str) -> PeerError:
        """Return the same error, about a file that was read."""
        return PeerError(self.problems, self._first.in_file(path))

    def with_details(self, **details: Any) -> PeerError:
        """Return the same error with more details. Those that it has stay as they are."""
        return PeerError(self.problems, self._first.with_details(**details))

    def __reduce__(self) -> tuple[Any, ...]:
        return PeerError, (self.problems, self._first)


class Findings:
    """Collects the problems of one message: lists :data:`MAX_PROBLEMS`, and counts the others."""

    def __init__(self) -> None:
        self.count: int = 0
        self._problems: list[Problem] = []
        self.first: KVPlanError | None = None

    def add(self, path: str, error: KVPlanError) -> None:
        """Add the problem that ``error`` was raised for the value at ``path`` of the message."""
        self.count += 1
        self.first = self.first or error
        # a message of a million bad values must not become a million texts
        if self.count <= MAX_PROBLEMS:
            text = str(error).removeprefix(f"{error.code}: ")
            self._problems.append(Problem(path, error.code, text))

    def attempt(self, path: str, make: Callable[..., Outcome], *arguments: Any) -> Outcome | Any:
        """Return ``make(*arguments)``.

        It is :data:`BAD` if an argument is, or if ``make`` raises, which adds a problem.
        """
        if BAD in arguments:
            return BAD
        try:
            return make(*arguments)
        except KVPlanError as error:
            self.add(path, error)
            return BAD

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems in the order found.

        If there are too many, the last one says how many are not listed.
        """
        num_unlisted = self.count - len(self._problems)
        if not num_unlisted:
            return tuple(self._problems)
        text = f"{count(num_unlisted, 'more problem')} not listed"
        return (*self._problems, Problem("", "MESSAGE", text))

    @property
    def error(self) -> PeerError:
        """The problems as an error; there must be one."""
        assert self.first
        return PeerError(self.problems, self.first)


def parse(data: bytes, findings: Findings) -> Any:
    """Return the mapping in a message of this version; BAD if there is none.

    It is without ``kvplan``, and with ``extensions``.

    >>> findings = Findings()
    >>> parse(b'{"kvplan": 1, "rank": 3}', findings)
    {'rank': 3, 'extensions': {}}
    >>> _ = parse(b'{"kvplan": 7, "rank": -1}', findings)
    >>> print(*findings.problems)
    kvplan: VERSION: cannot read a message: expected version 1, got 7
    """
    if not isinstance(data, bytes):
        raise wrong_type("a message", "bytes", data)
    # The version comes first: nothing else of another version is read.
    message = findings.attempt("", _load, data)
    message = findings.attempt("kvplan", _of_this_version, message)
    return findings.attempt("extensions", _with_extensions, message)


def _refused(code: str, expected: str, got: str) -> KVPlanError:
    return KVPlanError(code, "read a message", expected=expected, got=got)


def _load(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise _refused("MESSAGE", f"at most {MAX_BYTES} bytes", f"{len(data)}")
    # counted before JSON is read: each string and container that it makes takes memory
    _check_counts(data)
    try:
        message = DECODER.decode(data.decode())
    except UnicodeDecodeError as error:
        got = f"byte {data[error.start]:#x} at {error.start}"
        raise _refused("MESSAGE", "UTF-8", got) from None
    except json.JSONDecodeError as error:
        got = f"{error.msg.removesuffix(' at')} at character {error.pos}"
        raise _refused("MESSAGE", "JSON", got) from None
    if not isinstance(message, dict):
        raise wrong_type("a message", "a mapping", message)
    return message


def _check_counts(data: bytes) -> None:
    """Count quotes, and brackets outside strings.

    If JSON would count otherwise, it meets an error before that.
    """
    num_strings = data.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise _refused("MESSAGE", f"at most {MAX_STRINGS} strings", f"{num_strings}")
    # without escapes, every second text between quotes is outside a string
    outside = data.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
    brackets = b"".join(outside).translate(None, NOT_BRACKETS)
    num_containers = brackets.count(b"[") + brackets.count(b"{")
    if num_containers > MAX_CONTAINERS:
        expected = f"at most {MAX_CONTAINERS} lists and mappings"
        raise _refused("MESSAGE", expected, f"{num_containers}")
    # one element for each bracket: how deep the text behind it is nested
    depths = accumulate(1 if bracket in b"[{" else -1 for bracket in brackets)
    depth = max(depths, default=0)
    if depth > MAX_DEPTH:
        raise _refused("MESSAGE", f"lists and mappings at most {MAX_DEPTH} deep", f"{depth}")


def _of_this_version(message: dict[str, Any]) -> dict[str, Any]:
    # True equals 1, but is no version
    version = message.pop("kvplan", None)
    if type(version) is not int or version != VERSION:
        raise _refused("VERSION", f"version {VERSION}", shown(version))
    return message


def _with_extensions(message: dict[str, Any]) -> dict[str, Any]:
    extensions = message.setdefault("extensions", {})
    if not isinstance(extensions, dict):
        raise wrong_type("extensions", "a mapping", extensions)
    # JSON can spell half of a surrogate pair, which no UTF-8 can pass on
    try:
        json.dumps(extensions, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _refused("MESSAGE", "Unicode characters", "half of a surrogate pair") from None
    return message


def _mapping(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    # of two equal keys JSON keeps the last, and says nothing
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        # the first key that comes a second time
        unread_keys = set(mapping)
        for key, _ in pairs:
            if key not in unread_keys:
                raise _refused("KEY", "each key of a mapping once", f"{shown(key)} twice")
            unread_keys.remove(key)
    return mapping


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _refused("RANGE", f"integers of at most {MAX_DIGITS} digits", f"one of {len(digits)}")
    return int(digits)


def _real(text: str) -> float:
    if len(text) > MAX_REAL or math.isinf(number := float(text)):
        expected = f"numbers of at most {MAX_REAL} characters, below 1.8e308"
        raise _refused("RANGE", expected, shown(text))
    return number


def _constant(text: str) -> NoReturn:
    raise _refused("MESSAGE", "JSON", text)


DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_mapping, parse_int=_integer, parse_float=_real, parse_constant=_constant
)
