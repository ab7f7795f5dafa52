"""Peers: the worker that a peer's message offers, or every problem of the message.

Whatever the bytes, the outcome is a worker or a :class:`~kvplan.handshake.errors.PeerError`, in bounded time and
memory:

- P1: nothing is made larger than the message says in its own length; :mod:`kvplan.handshake.schema` and
  :mod:`kvplan.handshake.messages` have the limits. Nothing is expanded but names, of a stem and a number.
- P2: regions, groups, axes, views and the worker are made by their constructors, which check them: a description
  from a peer is held to what one's own is.
- P3: a problem does not hide another one that does not depend on it. One that does depend on it is not told.
- P4: a problem's path is one of the message: columns are lists, so that of a view's offset is
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
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.handshake.errors import BAD, Findings, Problem
from kvplan.handshake.messages import parse
from kvplan.handshake.schema import OFFER, read


def decode(data: bytes) -> Worker:
    """The worker that a message of :func:`kvplan.encode` offers.

    Raises a :class:`kvplan.PeerError` for any bytes that are no offer; ``TYPE``, as a plain KVPlanError, for what is
    not bytes.

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
    """All that keeps :func:`decode` from reading a message, up to a hundred problems; none where it is an offer.

    Raises ``TYPE`` for what is not bytes.

    >>> from kvplan import problems
    >>> for problem in problems(b'{"kvplan": 1, "engine_id": "", "rank": true}')[-2:]:
    ...     print(problem)
    engine_id: NAME: cannot read engine_id: expected a non-empty string of printable characters, got ''
    rank: TYPE: cannot read rank: expected an integer, got True
    """
    found = Findings()
    _worker(data, found)
    return found.problems


Owner = tuple[str, int]
"""Engine id and rank, or others in place of bad ones, to name the worker in messages."""


@attrs.frozen
class _Placed:
    """A view with what it is placed in, and where the message has it: its row, and what its region is like."""

    row: int
    memory: int
    view: View
    region: Region
    group: Group


def _worker(data: bytes, found: Findings) -> Any:
    offer = found.attempt("", read, OFFER, parse(data, found), "", found)
    if offer is BAD:
        return BAD
    engine_id, rank = offer["engine_id"], offer["rank"]
    owner = ("offer" if engine_id is BAD else engine_id, 0 if rank is BAD else rank)
    groups = _each(offer["groups"], lambda i, group: _group(group, f"groups[{i}]", found))
    memories = _each(offer["memories"], lambda i, memory: _memory(memory, f"memories[{i}]", found))
    regions = _each(offer["regions"], lambda i, row: _region(offer["stems"], memories, i, row, found))
    layouts = _each(offer["layouts"], lambda i, layout: _layout(layout, f"layouts[{i}]", owner, groups, found))
    views = _each(offer["views"], lambda i, row: _view(offer, regions, layouts, i, row, found))
    return _whole(owner, _good(regions), _good(groups), _good(views), found)


def _each(values: Any, make: Callable[[int, Any], Any]) -> Any:
    """What is made of each value and its index; BAD where there is no list of them."""
    return BAD if values is BAD else [make(i, value) for i, value in enumerate(values)]


def _good(values: Any) -> tuple[Any, ...]:
    return () if values is BAD else tuple(value for value in values if value is not BAD)


def _pick(values: Any, index: Any, path: str, found: Findings) -> Any:
    """The value that the message refers to by its index."""
    if values is BAD or index is BAD:
        return BAD
    if index < len(values):
        return values[index]
    expected = f"an index below {len(values)}"
    found.add(path, KVPlanError("RANGE", "find what is referred to", expected=expected, got=f"{index}", value=index))
    return BAD


def _group(fields: Any, path: str, found: Findings) -> Any:
    if fields is BAD or fields["context"] is BAD:
        return BAD
    context = found.attempt(f"{path}.context", Context, *fields["context"].values())
    return found.attempt(path, Group, fields["name"], fields["tokens_per_block"], context)


def _memory(fields: Any, path: str, found: Findings) -> Any:
    """A region that is like those that name it, but for its name and address."""
    parts = (BAD,) if fields is BAD else (fields["size_bytes"], fields["memory"], fields["device_id"])
    return found.attempt(path, Region, path, 0, *parts)


def _region(stems: Any, memories: Any, i: int, row: tuple[Any, ...], found: Findings) -> Any:
    stem, number, memory, address = row
    called = _name(stems, stem, number, f"regions.stem[{i}]", found)
    like = _pick(memories, memory, f"regions.memory[{i}]", found)
    return found.attempt(f"regions.address[{i}]", _region_like, like, called, address)


def _region_like(like: Region, called: str, address: int) -> Region:
    return attrs.evolve(like, name=called, address=address)


def _name(stems: Any, stem: Any, number: Any, path: str, found: Findings) -> Any:
    parts = _pick(stems, stem, path, found)
    if parts is BAD or number is BAD or BAD in parts.values():
        return BAD
    return found.attempt(path, name, join(parts["before"], number, parts["after"]), "the name of a stem and a number")


def _layout(fields: Any, path: str, owner: Owner, groups: Any, found: Findings) -> Any:
    """A view of this layout, named as it, and its group: checked here, not again for each view that has the layout."""
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
    worker = BAD if view is BAD else found.attempt(path, Worker, *owner, [region], [group], [view])
    return BAD if worker is BAD else (view, group)


def _view(offer: Any, regions: Any, layouts: Any, i: int, row: tuple[Any, ...], found: Findings) -> Any:
    stem, number, layout, region, offset = row
    called = _name(offer["stems"], stem, number, f"views.stem[{i}]", found)
    like = _pick(layouts, layout, f"views.layout[{i}]", found)
    place = _pick(regions, region, f"views.region[{i}]", found)
    if BAD in (called, like, place, offset):
        return BAD
    view = attrs.evolve(like[0], name=called, region=place, offset_bytes=offset)
    return _Placed(i, offer["regions"][region][2], view, place, like[1])


def _whole(
    owner: Owner, regions: Sequence[Region], groups: Sequence[Group], views: Sequence[_Placed], found: Findings
) -> Any:
    """The worker; where its parts do not go together, which ones."""
    try:
        return Worker(*owner, regions, groups, tuple(placed.view for placed in views))
    except KVPlanError as error:
        before = found.count
        found.attempt("regions", Worker, *owner, regions, (), ())
        found.attempt("groups", Worker, *owner, (), groups, ())
        _leave(owner, views, found)
        if found.count == before:
            found.add("views", error)
        return BAD


def _leave(owner: Owner, views: Sequence[_Placed], found: Findings) -> None:
    """Tells which views leave their regions; where all regions of one size are too small, that alone."""
    of: dict[int, list[_Placed]] = {}
    for placed in views:
        of.setdefault(placed.memory, []).append(placed)
    for memory, held in of.items():
        over = [placed for placed in held if placed.view.end_bytes > placed.region.size_bytes]
        if _all_too_small(held, over):
            last = max(over, key=lambda placed: placed.view.end_bytes)
            found.add(f"memories[{memory}].size_bytes", _too_small(last))
            continue
        for placed in over:
            path = f"views.offset_bytes[{placed.row}]"
            found.attempt(path, Worker, *owner, [placed.region], [placed.group], [placed.view])


def _too_small(last: _Placed) -> KVPlanError:
    size, end, blocks = last.region.size_bytes, last.view.end_bytes, count(last.view.num_blocks, "block")
    expected = f"at least {end} bytes, where view {last.view.name!r} of {blocks} ends"
    return KVPlanError("BOUNDS", "hold views", expected=expected, got=f"{size}", size_bytes=size, end_bytes=end)


def _all_too_small(held: Sequence[_Placed], over: Sequence[_Placed]) -> bool:
    """Whether no offsets of the views that leave their regions could help, or several views leave all their regions."""
    if any(placed.view.end_bytes - placed.view.offset_bytes > placed.region.size_bytes for placed in over):
        return True
    return len(over) > 1 and {placed.region.name for placed in over} == {placed.region.name for placed in held}
