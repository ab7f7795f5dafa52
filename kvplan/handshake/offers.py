"""Offers: how a worker describes itself to its peers, as a message, and how a peer's message, untrusted data, is read.

A message is JSON: every language and every person can read it, its integers are exact, and reading it runs no code. It
is small because equal parts are written once. From an offer of two layers:

>>> import json
>>> from kvplan import Axis, Group, Region, View, Worker, encode
>>> axes = (Axis("token", 0, 16, 16, 1152), Axis("dim", 0, 576, 576, 2))
>>> worker = Worker("decode", 0, [Region(f"kv.{i}", (4 + i) << 40, 100 * 18432) for i in (0, 1)], [Group("mla", 16)],
...                 [View(f"layers.{i}.mla", "mla", f"kv.{i}", "bfloat16", axes, 100, 18432) for i in (0, 1)])
>>> offer = json.loads(encode(worker))
>>> print(offer["stems"], offer["regions"], offer["views"], sep="\\n")
[{'before': 'kv.', 'after': ''}, {'before': 'layers.', 'after': '.mla'}]
{'stem': [0, 0], 'number': [0, 1], 'memory': [0, 0], 'address': [4398046511104, 5497558138880]}
{'stem': [1, 1], 'number': [0, 1], 'layout': [0, 0], 'region': [0, 1], 'offset_bytes': [0, 0]}

Whatever the bytes of a message are, reading it results in a worker or a :class:`kvplan.handshake.PeerError`, in limited
time and memory:

- P1: nothing grows beyond what the message spells out; :mod:`kvplan.handshake.messages` and
  :mod:`kvplan.handshake.schema` have the limits. Only names expand, from a stem and a number.
- P2: regions, groups, axes, views and the worker are made by their own constructors, so a peer's description passes the
  same checks as one's own.
- P3: a problem hides no other problem that is independent of it. Problems that follow from another one are not listed.
- P4: the path of a problem is a path of the message. Columns are lists, so the path of a view's offset is
  ``views.offset_bytes[7]``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from kvplan._checks import INT64_END, name, wrong_type
from kvplan._text import count, join, split
from kvplan.describe.axes import Axis
from kvplan.describe.views import Context, Group, Region, View
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.handshake.messages import BAD, MAX_BYTES, MODEL, VERSION, Findings, Problem, parse
from kvplan.handshake.schema import MEMORY, OFFER, REGIONS, STEM, VIEWS, Columns, Text, read


def encode(worker: Worker) -> bytes:
    """The offer of a worker: a message from which :func:`kvplan.decode` makes an equal worker.

    The message is ASCII and has one form only, so equal workers have equal messages. Raises ``RANGE`` for a worker that
    exceeds the limits of a message, ``TYPE`` for anything but a worker.

    >>> from kvplan import Worker, decode, encode
    >>> encode(Worker("decode", 3, (), (), ()))[:42]
    b'{"kvplan":1,"engine_id":"decode","rank":3,'
    >>> decode(encode(Worker("decode", 3, (), (), ())))
    <Worker decode/3: 0 views of 0 tensors in 0 regions, 0 groups>
    """
    offer, found = _offer(worker), Findings()
    read(OFFER, offer, "", found)
    extensions = json.loads(worker.extensions)
    if MODEL in extensions:
        expected, got = "extensions without kvplan's own", f"{MODEL!r}"
        raise KVPlanError("NAME", f"encode worker {worker.label}", expected=expected, got=got)
    if worker.model:
        extensions = {MODEL: worker.model, **extensions}
    message = _json(
        {"kvplan": VERSION, **offer} | ({"extensions": extensions} if extensions else {})
    )
    if extensions:
        parse(message, found)
    if found.first:
        expected, got, path = found.first.expected, found.first.got, found.problems[0].path
    elif len(message) > MAX_BYTES:
        expected, got, path = f"at most {MAX_BYTES} bytes", f"{len(message)}", ""
    else:
        return message
    raise KVPlanError(
        "RANGE", f"encode worker {worker.label}", expected=expected, got=got, hint=path
    )


def fingerprint(worker: Worker) -> str:
    """The geometry of a worker as 64 hexadecimal digits: equal for workers that store the same things the same way.

    It covers, in order: the model, if known; the groups; the size and memory kind of each region; and of each view its
    tensor, dtype, axes, block count and stride, its group and region, and its offset. It does not cover engine id,
    rank, extensions, and the name, address and device of a region. So it stays equal when a worker restarts at other
    addresses. It is the SHA-256 of a JSON text, and may change with the version of the format.

    >>> from kvplan import Region, Worker
    >>> from kvplan.handshake import fingerprint
    >>> before = Worker("decode", 3, [Region("kv", 1 << 40, 4096)], (), ())
    >>> fingerprint(before) == fingerprint(Worker("decode-2", 0, [Region("pool", 1 << 44, 4096)], (), ()))
    True
    >>> fingerprint(before) == fingerprint(Worker("decode", 3, [Region("kv", 1 << 40, 8192)], (), ()))
    False
    """
    offer = _offer(worker)
    geometry = {
        "kvplan": VERSION,
        **({"model": worker.model} if worker.model else {}),
        **{key: offer[key] for key in ("groups", "layouts")},
        "regions": [(region.memory, region.size_bytes) for region in worker.regions],
        "tensors": [view.name for view in worker.views],
        **{key: offer["views"][key] for key in ("layout", "region", "offset_bytes")},
    }
    return hashlib.sha256(_json(geometry)).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _offer(worker: Worker) -> dict[str, Any]:
    """The message of a worker as plain data, without its version."""
    if not isinstance(worker, Worker):
        raise wrong_type("a worker", "a Worker", worker)
    # Each different value, and its index in the list that has it once.
    stems: dict[tuple[str, str], int] = {}
    memories: dict[tuple[str, int, int], int] = {}
    groups = {group: i for i, group in enumerate(worker.groups)}

    def stem_and_number(name: str) -> tuple[int, int | None]:
        before, number, after = split(name)
        return stems.setdefault((before, after), len(stems)), number

    def memory(*parts: Any) -> int:
        return memories.setdefault(parts, len(memories))

    regions = [
        (
            *stem_and_number(region.name),
            memory(region.memory, region.device_id, region.size_bytes),
            region.address,
        )
        for region in worker.regions
    ]
    views = [
        (*stem_and_number(view.name), layout, *place)
        for view, layout, place in zip(
            worker.views, worker.geometry_of, worker.places.tolist(), strict=True
        )
    ]
    return {
        "engine_id": worker.engine_id,
        "rank": worker.rank,
        "groups": [attrs.asdict(group) for group in worker.groups],
        "layouts": [
            {
                "group": groups[layout.group],
                "dtype": layout.dtype,
                "num_blocks": layout.num_blocks,
                "block_stride_bytes": layout.block_stride_bytes,
                "axes": [attrs.asdict(axis) for axis in layout.axes],
            }
            for layout in worker.geometries
        ],
        "memories": [dict(zip(MEMORY.fields, parts, strict=True)) for parts in memories],
        "stems": [dict(zip(STEM.fields, parts, strict=True)) for parts in stems],
        "regions": _by_column(REGIONS, regions),
        "views": _by_column(VIEWS, views),
    }


def _by_column(node: Columns, rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {key: [row[i] for row in rows] for i, key in enumerate(node.fields)}


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
    key = (
        "offer" if engine_id is BAD else engine_id,
        0 if rank is BAD else rank,
    )  # for messages, even if bad
    groups = _each(offer["groups"], lambda i, group: _group(group, f"groups[{i}]", found))
    memories = _each(offer["memories"], lambda i, memory: _memory(memory, f"memories[{i}]", found))
    regions = _each(
        offer["regions"], lambda i, row: _region(offer["stems"], memories, i, row, found)
    )
    layouts = _each(
        offer["layouts"], lambda i, layout: _layout(layout, f"layouts[{i}]", key, groups, found)
    )
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
    found.add(
        path,
        KVPlanError("RANGE", "look up an index", expected=expected, got=f"{index}", value=index),
    )
    return BAD


def _group(fields: Any, path: str, found: Findings) -> Any:
    if fields is BAD or fields["context"] is BAD:
        return BAD
    context = found.attempt(f"{path}.context", Context, *fields["context"].values())
    return found.attempt(path, Group, fields["name"], fields["tokens_per_block"], context)


def _memory(fields: Any, path: str, found: Findings) -> Any:
    """A region with the size and memory of those that refer to it; name and address come from each of them."""
    parts = (
        (BAD,) if fields is BAD else (fields["size_bytes"], fields["memory"], fields["device_id"])
    )
    return found.attempt(path, Region, path, 0, *parts)


def _region(stems: Any, memories: Any, i: int, row: tuple[Any, ...], found: Findings) -> Any:
    stem, number, memory, address = row
    full_name = _name(stems, stem, number, f"regions.stem[{i}]", found)
    template = _pick(memories, memory, f"regions.memory[{i}]", found)
    parts = (
        (BAD,) if template is BAD else (template.size_bytes, template.memory, template.device_id)
    )
    return found.attempt(f"regions.address[{i}]", Region, full_name, address, *parts)


def _name(stems: Any, stem: Any, number: Any, path: str, found: Findings) -> Any:
    parts = _pick(stems, stem, path, found)
    if parts is BAD or number is BAD or BAD in parts.values():
        return BAD
    return found.attempt(
        path, name, join(parts["before"], number, parts["after"]), "the name of a stem and a number"
    )


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


def _view(
    offer: Any, regions: Any, layouts: Any, i: int, row: tuple[Any, ...], found: Findings
) -> Any:
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
        len(over) > 1
        and {placed.region.name for placed in over} == {placed.region.name for placed in views}
    ):
        expected = f"at least {end} bytes, the end of view {last.view.name!r} of {count(last.view.num_blocks, 'block')}"
        error = KVPlanError(
            "BOUNDS", "fit views", expected=expected, got=f"{size}", size_bytes=size, end_bytes=end
        )
        found.add(f"memories[{last.memory}].size_bytes", error)
        return
    for placed in over:
        path = f"views.offset_bytes[{placed.row}]"
        found.attempt(path, Worker, *key, [placed.region], [placed.group], [placed.view])
