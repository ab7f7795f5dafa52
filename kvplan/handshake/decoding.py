"""Decoding: the worker that a peer's message offers, or every problem of the message.

Whatever the bytes are, the result is a worker or a :class:`~kvplan.handshake.messages.PeerError`, in limited time and
memory:

- P1: nothing grows beyond what the message spells out; :mod:`kvplan.handshake.messages` and
  :mod:`kvplan.handshake.schema` have the limits. Only names expand, from a stem and a number.
- P2: regions, groups, axes, views and the worker are made by their own constructors, so a peer's description passes the
  same checks as one's own.
- P3: a problem hides no other problem that is independent of it. Problems that follow from another one are not listed.
- P4: the path of a problem is a path of the message. Columns are lists, so the path of a view's offset is
  ``views.offset_bytes[7]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from kvplan._checks import INT64_END, name
from kvplan._text import count, join
from kvplan.describe.axes import Axis
from kvplan.describe.views import Context, Group, Region, View
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.handshake.messages import BAD, MODEL, Findings, Problem, parse
from kvplan.handshake.schema import OFFER, Text, read


def decode(data: bytes) -> Worker:
    """The worker that a message of :func:`kvplan.encode` offers.

    Raises a :class:`kvplan.PeerError` for bytes that are not an offer, and ``TYPE``, as a plain KVPlanError, for
    anything but bytes.

    >>> from kvplan import PeerError, Region, Worker, decode, encode
    >>> offer = encode(Worker("prefill", 3, [Region("kv", 1 << 40, 4096)], (), ()))
    >>> print(decode(offer))
    prefill/3: 0 views of 0 tensors in 1 region, 0 groups
    >>> try:
    ...     decode(offer.replace(b"4096", b"-1"))
    ... except PeerError as error:
    ...     print(error)
    RANGE: cannot read size_bytes at memories[0].size_bytes: expected an integer in [0, 9223372036854775808), got -1
    """
    found = Findings()
    worker = _worker(data, found)
    if found.first:
        raise found.error
    assert isinstance(worker, Worker)
    return worker


def problems(data: bytes) -> tuple[Problem, ...]:
    """Everything for which :func:`decode` refuses a message, up to a hundred problems; empty for an offer.

    Raises ``TYPE`` for anything but bytes.

    >>> from kvplan import problems
    >>> for problem in problems(b'{"kvplan": 1, "engine_id": "", "rank": true}')[-2:]:
    ...     print(problem)
    engine_id: NAME: cannot read engine_id: expected a non-empty string of printable characters, got ''
    rank: TYPE: cannot read rank: expected an integer, got True
    """
    found = Findings()
    _worker(data, found)
    return found.problems


@attrs.frozen
class _Placed:
    """A view with its region and group, and where the message has them: the view's row, the region's memory."""

    row: int
    memory: int
    view: View
    region: Region
    group: Group


def _worker(data: bytes, found: Findings) -> Any:
    message = parse(data, found)
    if message is BAD:
        return BAD
    extensions = message.pop("extensions")
    offer = found.attempt("", read, OFFER, message, "", found)
    model = read(Text(or_empty=True), extensions.pop(MODEL, ""), f"extensions.{MODEL}", found)
    if offer is BAD:
        return BAD
    engine_id, rank = offer["engine_id"], offer["rank"]
    key = ("offer" if engine_id is BAD else engine_id, 0 if rank is BAD else rank)  # for messages, even if bad
    groups = _each(offer["groups"], lambda i, group: _group(group, f"groups[{i}]", found))
    memories = _each(offer["memories"], lambda i, memory: _memory(memory, f"memories[{i}]", found))
    regions = _each(offer["regions"], lambda i, row: _region(offer["stems"], memories, i, row, found))
    layouts = _each(offer["layouts"], lambda i, layout: _layout(layout, f"layouts[{i}]", key, groups, found))
    views = _each(offer["views"], lambda i, row: _view(offer, regions, layouts, i, row, found))
    besides = "" if model is BAD else model, extensions
    return _whole(key, _good(regions), _good(groups), _good(views), besides, found)


def _each(values: Any, make: Callable[[int, Any], Any]) -> Any:
    """What ``make`` makes of each index and value; BAD if the list is."""
    return BAD if values is BAD else [make(i, value) for i, value in enumerate(values)]


def _good(values: Any) -> tuple[Any, ...]:
    return () if values is BAD else tuple(value for value in values if value is not BAD)


def _pick(values: Any, index: Any, path: str, found: Findings) -> Any:
    """The value that the message refers to by its index."""
    if values is BAD or index is BAD:
        return BAD
    if index < len(values):
        return values[index]
    expected = f"less than {len(values)}"
    found.add(path, KVPlanError("RANGE", "look up an index", expected=expected, got=f"{index}", value=index))
    return BAD


def _group(fields: Any, path: str, found: Findings) -> Any:
    if fields is BAD or fields["context"] is BAD:
        return BAD
    context = found.attempt(f"{path}.context", Context, *fields["context"].values())
    return found.attempt(path, Group, fields["name"], fields["tokens_per_block"], context)


def _memory(fields: Any, path: str, found: Findings) -> Any:
    """A region with the size and memory of those that refer to it; name and address come from each of them."""
    parts = (BAD,) if fields is BAD else (fields["size_bytes"], fields["memory"], fields["device_id"])
    return found.attempt(path, Region, path, 0, *parts)


def _region(stems: Any, memories: Any, i: int, row: tuple[Any, ...], found: Findings) -> Any:
    stem, number, memory, address = row
    full_name = _name(stems, stem, number, f"regions.stem[{i}]", found)
    template = _pick(memories, memory, f"regions.memory[{i}]", found)
    parts = (BAD,) if template is BAD else (template.size_bytes, template.memory, template.device_id)
    return found.attempt(f"regions.address[{i}]", Region, full_name, address, *parts)


def _name(stems: Any, stem: Any, number: Any, path: str, found: Findings) -> Any:
    parts = _pick(stems, stem, path, found)
    if parts is BAD or number is BAD or BAD in parts.values():
        return BAD
    return found.attempt(path, name, join(parts["before"], number, parts["after"]), "the name of a stem and a number")


def _layout(fields: Any, path: str, key: Key, groups: Any, found: Findings) -> Any:
    """A view of this layout and its group. Checked here once, not again for each view that has the layout."""
    if fields is BAD or fields["axes"] is BAD:
        return BAD
    axes = [
        BAD if axis is BAD else found.attempt(f"{path}.axes[{i}]", Axis, *axis.values())
        for i, axis in enumerate(fields["axes"])
    ]
    group = _pick(groups, fields["group"], f"{path}.group", found)
    if group is BAD or BAD in axes:
        return BAD
    blocks = (fields["num_blocks"], fields["block_stride_bytes"])
    view = found.attempt(path, View, path, group, path, fields["dtype"], tuple(axes), *blocks)
    region = Region(path, 0, INT64_END - 1)
    worker = BAD if view is BAD else found.attempt(path, Worker, *key, [region], [group], [view])
    return BAD if worker is BAD else (view, group)


def _view(offer: Any, regions: Any, layouts: Any, i: int, row: tuple[Any, ...], found: Findings) -> Any:
    stem, number, layout, region, offset = row
    full_name = _name(offer["stems"], stem, number, f"views.stem[{i}]", found)
    template = _pick(layouts, layout, f"views.layout[{i}]", found)
    place = _pick(regions, region, f"views.region[{i}]", found)
    if BAD in (full_name, template, place, offset):
        return BAD
    view = template[0].at(full_name, place, offset)
    return _Placed(i, offer["regions"][region][2], view, place, template[1])


def _whole(
    key: Key,
    regions: Sequence[Region],
    groups: Sequence[Group],
    views: Sequence[_Placed],
    besides: tuple[Any, Any],
    found: Findings,
) -> Any:
    """The worker. If its parts do not fit together, finds which ones do not."""
    try:
        return Worker(*key, regions, groups, tuple(placed.view for placed in views), *besides)
    except KVPlanError as error:
        before = found.count
        found.attempt("regions", Worker, *key, regions, (), ())
        found.attempt("groups", Worker, *key, (), groups, ())
        by_memory: dict[int, list[_Placed]] = {}
        for placed in views:
            by_memory.setdefault(placed.memory, []).append(placed)
        for some in by_memory.values():
            _check_inside(key, some, found)
        if found.count == before:
            found.add("views", error)
        return BAD


def _check_inside(key: Key, views: Sequence[_Placed], found: Findings) -> None:
    """Find views that leave their regions, all of one memory and size; if that size is too small, only say so."""
    over = [placed for placed in views if placed.view.end_bytes > placed.region.size_bytes]
    if not over:
        return
    # No offset could help if a view is longer than its region. If several leave all regions, the size is suspect.
    last = max(over, key=lambda placed: placed.view.end_bytes)
    size, end = last.region.size_bytes, last.view.end_bytes
    if any(placed.view.end_bytes - placed.view.offset_bytes > size for placed in over) or (
        len(over) > 1 and {placed.region.name for placed in over} == {placed.region.name for placed in views}
    ):
        expected = f"at least {end} bytes, the end of view {last.view.name!r} of {count(last.view.num_blocks, 'block')}"
        error = KVPlanError("BOUNDS", "fit views", expected=expected, got=f"{size}", size_bytes=size, end_bytes=end)
        found.add(f"memories[{last.memory}].size_bytes", error)
        return
    for placed in over:
        path = f"views.offset_bytes[{placed.row}]"
        found.attempt(path, Worker, *key, [placed.region], [placed.group], [placed.view])
