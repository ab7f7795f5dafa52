"""The schema of an offer as plain data: the keys of a message, and the bounds of each value.

A schema consists of *nodes*. :func:`validate` checks a value that was read from JSON against a node
and returns only what the schema names; everything else is a problem with its path. It checks shapes
and types. The meaning of the numbers is checked by the objects that are built from them.

>>> findings = Findings()
>>> context = {"rank": 0, "size": True, "step": 4}
>>> validate(CONTEXT, context, "context", findings)["rank"]
0
>>> print(*findings.problems, sep="\\n")
context.step: KEY: cannot read a mapping: expected keys rank, size, interleave_tokens, got 'step'
context.interleave_tokens: KEY: cannot read a mapping: expected a key 'interleave_tokens', got none
context.size: TYPE: cannot read size: expected an integer, got True
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import INT64_END, integer, name, wrong_type
from kvplan._text import shown
from kvplan.describe.model import MAX_MODEL
from kvplan.describe.views import ADDRESS_END
from kvplan.errors import KVPlanError
from kvplan.handshake.messages import BAD, Findings

MAX_NAME: Final = 256
"""Characters of a text. Together with the number of rows, it limits the memory that names take."""

MAX_ROWS: Final = 4096
"""Regions of a worker, and views.

A model of 100 layers that stores K and V separately has a twentieth of them.
"""

MAX_LAYOUTS: Final = 1024
"""Different geometries among the views of a worker: one or a few for each kind of layer."""

MAX_GROUPS: Final = 256
"""Block tables of a worker."""

MAX_AXES: Final = 16
"""Axes of a view: four in most caches, twice as many in digits."""


@attrs.frozen
class Integer:
    """An integer in ``[0, high)``, or null if ``or_null``."""

    high: int = INT64_END
    or_null: bool = False


@attrs.frozen
class Text:
    """A string of at most ``max_length`` printable characters."""

    or_empty: bool = False
    max_length: int = MAX_NAME


@attrs.frozen
class ListOf:
    """A list of at most ``max_length`` items."""

    item: Node
    max_length: int


def _frozen(fields: Mapping[str, Node]) -> Mapping[str, Node]:
    return MappingProxyType(dict(fields))


@attrs.frozen
class Record:
    """A mapping with exactly these keys, of which those with ``defaults`` may be left out."""

    fields: Mapping[str, Node] = attrs.field(converter=_frozen)
    defaults: Mapping[str, int] = MappingProxyType({})


@attrs.frozen
class Columns:
    """A mapping of lists of one length, at most ``max_length``, one for each of these keys.

    It is read as a list of rows.
    """

    fields: Mapping[str, Node] = attrs.field(converter=_frozen)
    max_length: int


Node = Integer | Text | ListOf | Record | Columns

INDEX: Final = Integer()
NUMBER: Final = Integer(or_null=True)
AXIS: Final = Record(
    {"name": Text(), "start": INDEX, "stop": INDEX, "size": INDEX, "stride_bytes": INDEX}
)
CONTEXT: Final = Record({"rank": INDEX, "size": INDEX, "interleave_tokens": INDEX})
GROUP: Final = Record(
    {"name": Text(), "tokens_per_block": NUMBER, "context": CONTEXT, "tokens_per_slot": INDEX},
    defaults=MappingProxyType({"tokens_per_slot": 1}),
)
LAYOUT: Final = Record(
    {
        "group": INDEX,
        "dtype": Text(),
        "num_blocks": INDEX,
        "block_stride_bytes": INDEX,
        "axes": ListOf(AXIS, MAX_AXES),
    }
)
MEMORY: Final = Record({"memory": Text(), "device_id": INDEX, "size_bytes": INDEX})
MODEL: Final = Text(or_empty=True, max_length=MAX_MODEL)
"""The model's text, which is one of the extensions."""

STEM: Final = Record({"before": Text(or_empty=True), "after": Text(or_empty=True)})
REGIONS: Final = Columns(
    {"stem": INDEX, "number": NUMBER, "memory": INDEX, "address": Integer(ADDRESS_END)}, MAX_ROWS
)
VIEWS: Final = Columns(
    {"stem": INDEX, "number": NUMBER, "layout": INDEX, "region": INDEX, "offset_bytes": INDEX},
    MAX_ROWS,
)
OFFER: Final = Record(
    {
        "engine_id": Text(),
        "rank": INDEX,
        "groups": ListOf(GROUP, MAX_GROUPS),
        "layouts": ListOf(LAYOUT, MAX_LAYOUTS),
        "memories": ListOf(MEMORY, MAX_ROWS),
        "stems": ListOf(STEM, 2 * MAX_ROWS),
        "regions": REGIONS,
        "views": VIEWS,
    }
)
"""An offer without its version and its extensions, in the order of a message."""


def validate(node: Node, value: Any, path: str, findings: Findings) -> Any:
    """Return ``value`` as ``node`` describes it.

    Bad values become :data:`~kvplan.handshake.messages.BAD`.
    """
    match node:
        case Integer():
            # True is an int of Python, and no integer of a message
            if (type(value) is int and 0 <= value < node.high) or (value is None and node.or_null):
                return value
            return findings.attempt(path, integer, value, _last_key(path), 0, node.high)
        case Text():
            return findings.attempt(path, _text, value, _last_key(path), node)
        case ListOf():
            return _items(node, value, path, findings)
        case Record():
            return _record(node, value, path, findings)
        case _:
            return _rows(node, value, path, findings)


def _last_key(path: str) -> str:
    return path.rpartition(".")[2]


def _text(value: Any, subject: str, node: Text) -> str:
    if isinstance(value, str) and len(value) > node.max_length:
        expected = f"at most {node.max_length} characters"
        got = f"{len(value)}"
        raise KVPlanError("RANGE", f"read {subject}", expected=expected, got=got, value=len(value))
    return "" if node.or_empty and value == "" else name(value, subject)


def _items(node: ListOf, value: Any, path: str, findings: Findings) -> Any:
    subject = _last_key(path)
    if not isinstance(value, list):
        findings.add(path, wrong_type(subject, "a list", value))
        return BAD
    if len(value) > node.max_length:
        expected = f"at most {node.max_length} items"
        got = f"{len(value)}"
        findings.add(path, KVPlanError("RANGE", f"read {subject}", expected=expected, got=got))
        return BAD
    # a column of thousands without a problem: no path is made for each item
    if isinstance(node.item, Integer):
        high = node.item.high
        if all(type(item) is int and 0 <= item < high for item in value):
            return value
    return [
        validate(node.item, item, f"{path}[{index}]", findings) for index, item in enumerate(value)
    ]


def _record(node: Record, value: Any, path: str, findings: Findings) -> Any:
    """Return the values of a mapping, BAD for each that it lacks."""
    fields = node.fields
    if not isinstance(value, dict):
        findings.add(path, wrong_type(_last_key(path) or "an offer", "a mapping", value))
        return BAD
    # most offers leave these out
    value = {**node.defaults, **value}
    prefix = f"{path}." if path else ""
    # unknown keys first, then missing ones, then what is wrong with the values
    for key in value:
        if key not in fields:
            expected = f"keys {', '.join(fields)}"
            got = shown(key)
            error = KVPlanError("KEY", "read a mapping", expected=expected, got=got)
            findings.add(prefix + got.strip("'"), error)
    for key in fields:
        if key not in value:
            expected = f"a key {key!r}"
            error = KVPlanError("KEY", "read a mapping", expected=expected, got="none")
            findings.add(prefix + key, error)
    record = {}
    for key, field in fields.items():
        is_present = key in value
        record[key] = validate(field, value[key], prefix + key, findings) if is_present else BAD
    return record


def _rows(node: Columns, value: Any, path: str, findings: Findings) -> Any:
    # each key has a list; the n-th items of all lists are the n-th row
    lists = {key: ListOf(item, node.max_length) for key, item in node.fields.items()}
    columns = _record(Record(lists), value, path, findings)
    if columns is BAD or BAD in columns.values():
        return BAD
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        subject = _last_key(path)
        got = ", ".join(f"{key} of {length}" for key, length in lengths.items())
        error = KVPlanError("SIZE", f"read {subject}", expected="columns of one length", got=got)
        findings.add(path, error)
        return BAD
    return list(zip(*columns.values(), strict=True))
