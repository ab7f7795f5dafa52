"""The schema of an offer as plain data: which keys a message of version 1 has, and how large each part may be.

A schema consists of *nodes*. :func:`read` checks a value that was read from JSON against a node and returns only what
the schema names; everything else is a problem with its path. It checks shapes and types. What the numbers mean is
checked by the values that are built from them.

>>> found = Findings()
>>> read(AXIS, {"name": "head", "start": 0, "stop": True, "size": 8, "step": 4}, "axes[0]", found)["start"]
0
>>> print(*found.problems, sep="\\n")
axes[0].step: KEY: cannot read a mapping: expected keys name, start, stop, size, stride_bytes, got 'step'
axes[0].stride_bytes: KEY: cannot read a mapping: expected a key 'stride_bytes', got none
axes[0].stop: TYPE: cannot read stop: expected an integer, got True
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import INT64_END, integer, name, wrong_type
from kvplan._text import shown
from kvplan.describe.views import ADDRESS_END
from kvplan.errors import KVPlanError
from kvplan.handshake.messages import BAD, Findings

MAX_NAME: Final = 256
"""Characters of a text. Together with the number of rows, it limits the memory that names take."""

MAX_ROWS: Final = 4096
"""Regions of a worker, and views: twenty times those of a model of 100 layers that stores K and V separately."""

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
    """A string of at most :data:`MAX_NAME` printable characters."""

    or_empty: bool = False


@attrs.frozen
class ListOf:
    """A list of at most ``most`` items."""

    item: Node
    most: int


def _frozen(fields: Mapping[str, Node]) -> Mapping[str, Node]:
    return MappingProxyType(dict(fields))


@attrs.frozen
class Record:
    """A mapping with exactly these keys."""

    fields: Mapping[str, Node] = attrs.field(converter=_frozen)


@attrs.frozen
class Columns:
    """A mapping of lists of one length, at most ``most``, one for each of these keys. It is read as a list of rows."""

    fields: Mapping[str, Node] = attrs.field(converter=_frozen)
    most: int


Node = Integer | Text | ListOf | Record | Columns

INDEX: Final = Integer()
NUMBER: Final = Integer(or_null=True)
AXIS: Final = Record(
    {"name": Text(), "start": INDEX, "stop": INDEX, "size": INDEX, "stride_bytes": INDEX}
)
CONTEXT: Final = Record({"rank": INDEX, "size": INDEX, "interleave_tokens": INDEX})
GROUP: Final = Record({"name": Text(), "tokens_per_block": NUMBER, "context": CONTEXT})
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


def read(node: Node, value: Any, path: str, found: Findings) -> Any:
    """``value`` as ``node`` describes it, with :data:`~kvplan.handshake.messages.BAD` in place of each bad part."""
    match node:
        case Integer():
            if (type(value) is int and 0 <= value < node.high) or (value is None and node.or_null):
                return value
            return found.attempt(path, integer, value, _key(path), 0, node.high)
        case Text():
            return found.attempt(path, _text, value, _key(path), node.or_empty)
        case ListOf():
            return _many(node, value, path, found)
        case Record():
            return _record(node.fields, value, path, found)
        case _:
            return _columns(node, value, path, found)


def _key(path: str) -> str:
    return path.rpartition(".")[2]


def _text(value: Any, what: str, or_empty: bool) -> str:
    if isinstance(value, str) and len(value) > MAX_NAME:
        expected = f"at most {MAX_NAME} characters"
        raise KVPlanError(
            "RANGE", f"read {what}", expected=expected, got=f"{len(value)}", value=len(value)
        )
    return "" if or_empty and value == "" else name(value, what)


def _many(node: ListOf, value: Any, path: str, found: Findings) -> Any:
    if not isinstance(value, list):
        found.add(path, wrong_type(_key(path), "a list", value))
        return BAD
    if len(value) > node.most:
        expected = f"at most {node.most} items"
        found.add(
            path, KVPlanError("RANGE", f"read {_key(path)}", expected=expected, got=f"{len(value)}")
        )
        return BAD
    item = node.item
    if isinstance(item, Integer) and all(
        type(each) is int and 0 <= each < item.high for each in value
    ):
        return value  # no problem in a column of thousands: do not make a path for each item
    return [read(item, each, f"{path}[{i}]", found) for i, each in enumerate(value)]


def _record(fields: Mapping[str, Node], value: Any, path: str, found: Findings) -> Any:
    if not isinstance(value, dict):
        found.add(path, wrong_type(_key(path) or "an offer", "a mapping", value))
        return BAD
    dot = path and f"{path}."
    expected = f"keys {', '.join(fields)}"
    for key in [key for key in value if key not in fields]:
        got = shown(key)
        found.add(
            dot + got.strip("'"), KVPlanError("KEY", "read a mapping", expected=expected, got=got)
        )
    for key in [key for key in fields if key not in value]:
        found.add(
            f"{dot}{key}",
            KVPlanError("KEY", "read a mapping", expected=f"a key {key!r}", got="none"),
        )
    return {
        key: read(node, value[key], f"{dot}{key}", found) if key in value else BAD
        for key, node in fields.items()
    }


def _columns(node: Columns, value: Any, path: str, found: Findings) -> Any:
    record = _record(
        {key: ListOf(item, node.most) for key, item in node.fields.items()}, value, path, found
    )
    if record is BAD or BAD in record.values():
        return BAD
    lengths = {key: len(column) for key, column in record.items()}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{key} of {length}" for key, length in lengths.items())
        found.add(
            path,
            KVPlanError("SIZE", f"read {_key(path)}", expected="columns of one length", got=got),
        )
        return BAD
    return list(zip(*record.values(), strict=True))
