"""Text for messages and reports: counts, sizes, wrong values, and lists of numbered names.

>>> print(fold(["layers.0.attn", "layers.1.attn", "layers.3.attn", "draft"]))
layers.0-1,3.attn, draft
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Final

import attrs
import numpy as np

WIDTH: Final = 120
"""Characters in a line, unless a terminal or the caller gives another number."""

MAX_REPR: Final = 200
"""Characters of a repr: one line of a debugger, or of a failed test."""

MAX_VALUE: Final = 40
"""Characters of a value in a repr that would be too long with all of it."""

FEW: Final = 16
"""Texts that :func:`few` writes out unless it is told otherwise."""

NUMBERED_NAME: Final = re.compile(r"([^0-9]*)(0|[1-9][0-9]{0,17})(?![0-9])(.*)", re.DOTALL)


def split(name: str) -> tuple[str, int | None, str]:
    """Return the text before the first number of a name, the number, and the text after it.

    A number with leading zeros or more than 18 digits counts as text.

    >>> split("layers.7.attn.k"), split("draft"), split("layers.07")
    (('layers.', 7, '.attn.k'), ('draft', None, ''), ('layers.07', None, ''))
    """
    match = NUMBERED_NAME.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else (name, None, "")


def join(before: str, number: int | None, after: str) -> str:
    """Return the name that :func:`split` splits.

    >>> join("layers.", 7, ".attn.k"), join("draft", None, "")
    ('layers.7.attn.k', 'draft')
    """
    return f"{before}{'' if number is None else number}{after}"


def fold(names: Iterable[str]) -> str:
    """Return the names that differ only in their first number as one name with all numbers.

    >>> fold(f"layers.{i}.attn" for i in range(80))
    'layers.0-79.attn'
    """
    numbers_of: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = split(name)
        numbers = numbers_of.setdefault((before, after), [])
        if number is not None:
            numbers.append(number)
    return ", ".join(
        f"{before}{intervals(numbers)}{after}" for (before, after), numbers in numbers_of.items()
    )


def intervals(numbers: Iterable[int]) -> str:
    """Return numbers in ascending order, runs of consecutive ones as intervals.

    >>> intervals([0, 1, 2, 3, 5])
    '0-3,5'
    """
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def meant(name: str, known_names: Iterable[str]) -> str:
    """Return a hint for an unknown name: up to three known ones close to it, or an empty string.

    >>> meant("Llama-3.1-8B", ["llama-3.1-8b", "llama-3.1-70b"])
    "did you mean 'llama-3.1-8b'?"
    >>> meant("tpp", ["tp", "pp", "block"]), meant("x", [])
    ("did you mean 'tp' or 'pp'?", '')
    """
    lower_name = name.lower()
    names = tuple(known_names)
    in_other_case = [lower_name] if lower_name in names else []
    close_names = in_other_case or difflib.get_close_matches(lower_name, names)
    if not close_names:
        return ""
    *all_but_last, last = map(repr, close_names)
    choices = f"{', '.join(all_but_last)} or {last}" if all_but_last else last
    return f"did you mean {choices}?"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it needs one.

    >>> count(1, "byte"), count(2, "byte"), count(2, "copy"), count(2, "box")
    ('1 byte', '2 bytes', '2 copies', '2 boxes')
    """
    if number == 1:
        return f"{number} {noun}"
    if noun.endswith("y"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith('x') else 's'}"


def few(texts: Sequence[str], between: str, most: int = FEW, number: int | None = None) -> str:
    """Return texts in one line: the first sixteen, or ``most``, and the number of the others.

    ``number`` is how many there are in all, where only the first ones are given.

    >>> few(["a", "b"], "; "), few([str(n) for n in range(20)], " ")
    ('a; b', '0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 and 4 more')
    """
    line = between.join(texts[:most])
    num_others = (len(texts) if number is None else number) - most
    return f"{line} and {num_others} more" if num_others > 0 else line


def shown(value: Any) -> str:
    """Return a value of the wrong type as messages show it: short and on one line.

    >>> print(shown(None), shown(np.float64(2)), shown((1, 2)), shown(np.arange(3)), sep=", ")
    None, 2.0, a tuple of 2, a value of type ndarray
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:80]}..."
    if isinstance(value, type):
        return f"the type {value.__name__}"
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"


def brief_repr(self: Any) -> str:
    """Return the repr of an attrs class, its long values in brief where it would be too long.

    >>> import attrs
    >>> @attrs.frozen
    ... class Pool:
    ...     name: str
    ...     ids: tuple[int, ...]
    ...     __repr__ = brief_repr
    >>> Pool("kv", (1, 2)), Pool("kv", tuple(range(1000)))
    (Pool(name='kv', ids=(1, 2)), Pool(name='kv', ids=<tuple of 1000>))
    """
    fields = [field.name for field in attrs.fields(type(self)) if field.repr]
    values = {name: _brief(getattr(self, name), MAX_REPR) for name in fields}
    text = _of_fields(self, values)
    if len(text) > MAX_REPR:
        text = _of_fields(self, {name: _brief(getattr(self, name), MAX_VALUE) for name in fields})
    return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 4]}...)"


def _of_fields(value: Any, texts: Mapping[str, str]) -> str:
    fields = ", ".join(f"{name}={text}" for name, text in texts.items())
    return f"{type(value).__name__}({fields})"


def _brief(value: Any, most: int) -> str:
    """Return the repr of a value, or what it is if that has more than ``most`` characters."""
    kind = type(value).__name__
    if isinstance(value, str | bytes):
        return repr(value) if len(value) < most else f"{value[:most]!r}..."
    size = len(value) if isinstance(value, Sized) else 0
    if size <= FEW and len(text := repr(value)) <= most:
        return text
    return f"<{kind} of {size}>" if isinstance(value, Sized) else f"<{kind}>"


def plain(value: Any) -> str:
    """Return a value as the details of an error have it: text as it is, others as :func:`shown`.

    >>> plain(np.str_("NHD")), plain([1, 2])
    ('NHD', 'a list of 2')
    """
    return str(value) if isinstance(value, str) else shown(value)


def size(number: int) -> str:
    """Return a number of bytes: exact below 10 KiB, else in a binary unit with four digits.

    >>> size(8192), size(1 << 16), size(5_000_000_000)
    ('8192 bytes', '64 KiB', '4.657 GiB')
    """
    if number < 10 << 10:
        return count(number, "byte")
    power = min((number.bit_length() - 1) // 10, 5)
    return f"{number / (1 << 10 * power):.4g} {'KMGTP'[power - 1]}iB"


def sizes(low: int, high: int) -> str:
    """Return a range of sizes in bytes, or one size where both ends are equal.

    >>> sizes(256, 256), sizes(256, 8192)
    ('256 bytes', '256 bytes to 8192 bytes')
    """
    return size(low) if low == high else f"{size(low)} to {size(high)}"
