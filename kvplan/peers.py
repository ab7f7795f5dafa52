"""Peers: the worker that a peer's message offers, or every problem of the message.

Whatever the bytes, the outcome is a worker or a :class:`~kvplan.findings.PeerError`, in bounded time and memory:

- P1: nothing is made larger than the message says in its own length; :mod:`kvplan.schema` and
  :mod:`kvplan.messages` have the limits. Nothing is expanded but names, of a stem and a number.
- P2: regions, groups, axes, views and the worker are made by their constructors, which check them: a description
  from a peer is held to what one's own is.
- P3: a problem does not hide another one that does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvplan.axes import Axis
from kvplan.errors import KVPlanError
from kvplan.findings import BAD, Findings, Problem
from kvplan.messages import parse
from kvplan.names import join
from kvplan.reading import INT64_END
from kvplan.schema import OFFER, read
from kvplan.views import Context, Group, Region, View
from kvplan.workers import Worker


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
    """A view with what it is placed in, and its row in the message."""

    row: int
    view: View
    region: Region
    group: Group


def _worker(data: bytes, found: Findings) -> Any:
    offer = found.attempt("", read, OFFER, parse(data, found), "", found)
    if offer is BAD:
        return BAD
    engine_id, rank = offer["engine_id"], offer["rank"]
    owner = ("offer" if engine_id is BAD else engine_id, 0 if rank is BAD else rank)
    groups = [_group(group, f"groups[{i}]", found) for i, group in _each(offer["groups"])]
    regions = _regions(offer, found)
    layouts = [_layout(layout, f"layouts[{i}]", owner, groups, found) for i, layout in _each(offer["layouts"])]
    views = _views(offer, regions, layouts, found)
    good_regions, good_groups = (tuple(part for part in parts if part is not BAD) for parts in (regions, groups))
    return _whole(owner, good_regions, good_groups, views, found)


def _each(values: Any) -> enumerate[Any]:
    return enumerate(() if values is BAD else values)


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


def _regions(offer: Any, found: Findings) -> list[Any]:
    memories = []
    for i, fields in _each(offer["memories"]):
        path = f"memories[{i}]"
        parts = (BAD,) if fields is BAD else (fields["size_bytes"], fields["memory"], fields["device_id"])
        memories.append(found.attempt(path, Region, path, 0, *parts))
    regions = []
    for i, (stem, number, memory, address) in _each(offer["regions"]):
        name = _name(offer["stems"], stem, number, f"regions.stem[{i}]", found)
        like = _pick(memories, memory, f"regions.memory[{i}]", found)
        regions.append(found.attempt(f"regions[{i}]", _region, like, name, address))
    return regions


def _region(like: Region, name: str, address: int) -> Region:
    return attrs.evolve(like, name=name, address=address)


def _name(stems: Any, stem: Any, number: Any, path: str, found: Findings) -> Any:
    parts = _pick(stems, stem, path, found)
    if parts is BAD or number is BAD or BAD in parts.values():
        return BAD
    return join(parts["before"], number, parts["after"])


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


def _views(offer: Any, regions: Sequence[Any], layouts: Sequence[Any], found: Findings) -> list[_Placed]:
    placed = []
    for i, (stem, number, layout, region, offset) in _each(offer["views"]):
        name = _name(offer["stems"], stem, number, f"views.stem[{i}]", found)
        like = _pick(layouts, layout, f"views.layout[{i}]", found)
        place = _pick(regions, region, f"views.region[{i}]", found)
        view = found.attempt(f"views[{i}]", _view, like, name, place, offset)
        if view is not BAD:
            placed.append(_Placed(i, view, place, like[1]))
    return placed


def _view(like: tuple[View, Group], name: str, region: Region, offset_bytes: int) -> View:
    return attrs.evolve(like[0], name=name, region=region, offset_bytes=offset_bytes)


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
        for placed in views if error.code == "BOUNDS" else ():
            alone = ([placed.region], [placed.group], [placed.view])
            found.attempt(f"views[{placed.row}]", Worker, *owner, *alone)
        if found.count == before:
            found.add("views", error)
        return BAD
