"""Offers: how workers describe themselves to their peers, and how a peer's message is read.

A message is JSON: every language and every person can read it, its integers are exact, and reading
it runs no code. It is small because equal values are written once. From an offer of two layers:

>>> import json
>>> from kvplan import Axis, Group, Region, View, Worker, encode
>>> axes = (Axis("token", 0, 16, 16, 1152), Axis("dim", 0, 576, 576, 2))
>>> regions = [Region(f"kv.{i}", (4 + i) << 40, 100 * 18432) for i in (0, 1)]
>>> fields = ("bfloat16", axes, 100, 18432)
>>> views = [View(f"layers.{i}.mla", "mla", f"kv.{i}", *fields) for i in (0, 1)]
>>> offer = json.loads(encode(Worker("decode", 0, regions, [Group("mla", 16)], views)))
>>> print(offer["stems"], offer["regions"], offer["views"], sep="\\n")
[{'before': 'kv.', 'after': ''}, {'before': 'layers.', 'after': '.mla'}]
{'stem': [0, 0], 'number': [0, 1], 'memory': [0, 0], 'address': [4398046511104, 5497558138880]}
{'stem': [1, 1], 'number': [0, 1], 'layout': [0, 0], 'region': [0, 1], 'offset_bytes': [0, 0]}

A message from a peer is untrusted. Whatever its bytes are, reading it results in a worker or a
:class:`kvplan.handshake.PeerError`, in limited time and memory:

- handshake.P1: nothing grows beyond what the message spells out; :mod:`kvplan.handshake.messages`
  and :mod:`kvplan.handshake.schema` have the limits. Only names expand, from a stem and a number.
- handshake.P2: regions, groups, axes, views and the worker are made by their own constructors, so a
  peer's description passes the same checks as one's own.
- handshake.P3: a problem hides no other problem that is independent of it. Problems that follow
  from another one are not listed.
- handshake.P4: the path of a problem is a path of the message. Columns are lists, so the path of a
  view's offset is ``views.offset_bytes[7]``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import attrs

from kvplan._checks import INT64_END, name, wrong_type
from kvplan._text import count, join, split
from kvplan.describe.axes import Axis
from kvplan.describe.views import Context, Geometry, Group, Region, View
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.handshake.messages import BAD, MAX_BYTES, MODEL_KEY, VERSION, Findings, Problem, parse
from kvplan.handshake.schema import (
    GROUP,
    MEMORY,
    MODEL,
    OFFER,
    REGIONS,
    STEM,
    VIEWS,
    Columns,
    validate,
)

Value = TypeVar("Value", bound=Hashable)


def encode(worker: Worker) -> bytes:
    """Return the offer of a worker: a message from which :func:`kvplan.decode` makes an equal one.

    The message is ASCII and has one form only, so equal workers have equal messages. Raises
    ``RANGE`` for a worker that exceeds the limits of a message, ``TYPE`` for anything but a worker.

    >>> from kvplan import Worker, decode, encode
    >>> encode(Worker("decode", 3, (), (), ()))[:42]
    b'{"kvplan":1,"engine_id":"decode","rank":3,'
    >>> decode(encode(Worker("decode", 3, (), (), ())))
    <Worker decode/3: 0 views of 0 tensors in 0 regions, 0 groups>
    """
    # what is written passes the checks that a reader makes
    fields = _fields(worker)
    findings = Findings()
    validate(OFFER, fields, "", findings)
    action = f"encode worker {worker.label}"
    extensions = json.loads(worker.extensions)
    if MODEL_KEY in extensions:
        expected = "extensions without kvplan's own"
        raise KVPlanError("NAME", action, expected=expected, got=f"{MODEL_KEY!r}")
    validate(MODEL, worker.model, f"extensions.{MODEL_KEY}", findings)
    if worker.model:
        extensions = {MODEL_KEY: worker.model, **extensions}
    if extensions:
        fields["extensions"] = extensions
    message = _json({"kvplan": VERSION, **fields})
    if extensions:
        # a reader checks these by the limits of all messages
        parse(message, findings)
    if findings.first:
        expected = findings.first.expected
        path = findings.problems[0].path
        raise KVPlanError("RANGE", action, expected=expected, got=findings.first.got, hint=path)
    if len(message) > MAX_BYTES:
        expected = f"at most {MAX_BYTES} bytes"
        raise KVPlanError("RANGE", action, expected=expected, got=f"{len(message)}")
    return message


def fingerprint(worker: Worker) -> str:
    """Return the geometry of a worker as 64 hexadecimal digits.

    It is equal for workers that store the same things the same way. It covers, in order: the model,
    if known; the groups; the size and memory kind of each region; and of each view its tensor,
    dtype, axes, block count and stride, its group and region, and its offset. It does not cover
    engine id, rank, extensions, and the name, address and device of a region. So it stays equal
    when a worker restarts at other addresses. It is the SHA-256 of a JSON text, and may change with
    the version of the format.

    >>> from kvplan import Region, Worker
    >>> from kvplan.handshake import fingerprint
    >>> before = fingerprint(Worker("decode", 3, [Region("kv", 1 << 40, 4096)], (), ()))
    >>> before == fingerprint(Worker("decode-2", 0, [Region("pool", 1 << 44, 4096)], (), ()))
    True
    >>> before == fingerprint(Worker("decode", 3, [Region("kv", 1 << 40, 8192)], (), ()))
    False
    """
    fields = _fields(worker)
    views = fields["views"]
    geometry = {
        "kvplan": VERSION,
        **({"model": worker.model} if worker.model else {}),
        "groups": fields["groups"],
        "layouts": fields["layouts"],
        "regions": [(region.memory, region.size_bytes) for region in worker.regions],
        "tensors": [view.name for view in worker.views],
        **{key: views[key] for key in ("layout", "region", "offset_bytes")},
    }
    return hashlib.sha256(_json(geometry)).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _fields(worker: Worker) -> dict[str, Any]:
    """Return the message of a worker as plain data, without its version."""
    if not isinstance(worker, Worker):
        raise wrong_type("a worker", "a Worker", worker)
    # each different value, and its index in the list that has it once
    stems: dict[tuple[str, str], int] = {}
    memories: dict[tuple[str, int, int], int] = {}
    group_indices = {group.name: index for index, group in enumerate(worker.groups)}
    regions = list[tuple[Any, ...]]()
    for region in worker.regions:
        before, number, after = split(region.name)
        stem = _index_of((before, after), stems)
        memory = _index_of((region.memory, region.device_id, region.size_bytes), memories)
        regions.append((stem, number, memory, region.address))
    views = list[tuple[Any, ...]]()
    offsets = worker.region_offsets.tolist()
    for view, layout, offset in zip(worker.views, worker.geometry_of, offsets, strict=True):
        before, number, after = split(view.name)
        views.append((_index_of((before, after), stems), number, layout, *offset))
    return {
        "engine_id": worker.engine_id,
        "rank": worker.rank,
        "groups": [_group_fields(group) for group in worker.groups],
        "layouts": [
            _layout_fields(layout, group_indices[layout.group.name]) for layout in worker.geometries
        ],
        "memories": [dict(zip(MEMORY.fields, memory, strict=True)) for memory in memories],
        "stems": [dict(zip(STEM.fields, stem, strict=True)) for stem in stems],
        "regions": _by_column(REGIONS, regions),
        "views": _by_column(VIEWS, views),
    }


def _index_of(value: Value, indices: dict[Value, int]) -> int:
    """Return the index of a value, which gets the next one if it has none yet."""
    return indices.setdefault(value, len(indices))


def _group_fields(group: Group) -> dict[str, Any]:
    """Return the fields of a group, without those of its default value."""
    fields = attrs.asdict(group)
    for key, default in GROUP.defaults.items():
        if fields[key] == default:
            del fields[key]
    return fields


def _layout_fields(layout: Geometry, group_index: int) -> dict[str, Any]:
    return {
        "group": group_index,
        "dtype": layout.dtype,
        "num_blocks": layout.num_blocks,
        "block_stride_bytes": layout.block_stride_bytes,
        "axes": [attrs.asdict(axis) for axis in layout.axes],
    }


def _by_column(node: Columns, rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return the rows of a table as lists of one length, one for each key of its node."""
    columns: dict[str, list[Any]] = {}
    for column, key in enumerate(node.fields):
        columns[key] = [row[column] for row in rows]
    return columns


def decode(data: bytes) -> Worker:
    """Return the worker that a message of :func:`kvplan.encode` offers.

    Raises a :class:`kvplan.PeerError` for bytes that are not an offer, and ``TYPE``, as a plain
    KVPlanError, for anything but bytes.

    >>> from kvplan import PeerError, Region, Worker, decode, encode
    >>> offer = encode(Worker("prefill", 3, [Region("kv", 1 << 40, 4096)], (), ()))
    >>> print(decode(offer))
    prefill/3: 0 views of 0 tensors in 1 region, 0 groups
    >>> try:
    ...     decode(offer.replace(b"4096", b"-1"))
    ... except PeerError as error:
    ...     print(f"{error.problems[0].path}: expected {error.expected}, got {error.got}")
    memories[0].size_bytes: expected an integer in [0, 9223372036854775808), got -1
    """
    findings = Findings()
    worker = _read_worker(data, findings)
    if findings.first:
        raise findings.error
    assert isinstance(worker, Worker)
    return worker


def problems(data: bytes) -> tuple[Problem, ...]:
    """Return everything for which :func:`decode` refuses a message, up to a hundred problems.

    There are none for an offer. Raises ``TYPE`` for anything but bytes.

    >>> from kvplan import problems
    >>> for problem in problems(b'{"kvplan": 1, "engine_id": 7, "rank": true}')[-2:]:
    ...     print(problem)
    engine_id: TYPE: cannot read engine_id: expected a string, got 7
    rank: TYPE: cannot read rank: expected an integer, got True
    """
    findings = Findings()
    _read_worker(data, findings)
    return findings.problems


class _LayoutTemplate(NamedTuple):
    """A view of a layout, under the name of its path, and the view's group."""

    view: View
    group: Group


@attrs.frozen
class _PeerView:
    """A view with its region and group, and the message's indices of the view and its memory."""

    index: int
    memory: int
    view: View
    region: Region
    group: Group


def _read_worker(data: bytes, findings: Findings) -> Any:
    """Return the worker of a message; BAD, or one without bad values, if there are problems."""
    message = parse(data, findings)
    if message is BAD:
        return BAD
    extensions = message.pop("extensions")
    fields = validate(OFFER, message, "", findings)
    model = extensions.pop(MODEL_KEY, "")
    model = validate(MODEL, model, f"extensions.{MODEL_KEY}", findings)
    # messages name the worker, also where its engine id or rank is bad
    engine_id = "offer" if fields["engine_id"] is BAD else fields["engine_id"]
    rank = 0 if fields["rank"] is BAD else fields["rank"]
    offer = _PeerOffer(fields, (engine_id, rank), findings)
    # the entries of a list refer by index to those of the lists before it, bad ones included
    groups = _make_all(fields["groups"], offer.group)
    memories = _make_all(fields["memories"], offer.memory)
    regions = _make_all(fields["regions"], partial(offer.region, memories))
    layouts = _make_all(fields["layouts"], partial(offer.layout, groups))
    views = _make_all(fields["views"], partial(offer.view, regions, layouts))
    # problems in some values hide none in how the others fit together, rule handshake.P3
    return offer.worker(
        _without_bad(regions),
        _without_bad(groups),
        _without_bad(views),
        "" if model is BAD else model,
        extensions,
    )


def _make_all(values: Any, make: Callable[[int, Any], Any]) -> Any:
    """Return the result of ``make`` for each index and value; BAD if the list is."""
    return BAD if values is BAD else [make(index, value) for index, value in enumerate(values)]


def _without_bad(values: Any) -> tuple[Any, ...]:
    return () if values is BAD else tuple(value for value in values if value is not BAD)


@attrs.frozen(eq=False)
class _PeerOffer:
    """A message as its schema describes it, whose values become objects in order.

    Each method makes one object, or returns BAD if a value that it needs is. ``key`` is what
    messages call the worker.
    """

    fields: Mapping[str, Any]
    key: Key
    findings: Findings

    def group(self, index: int, group: Any) -> Any:
        """Return a group."""
        if group is BAD or group["context"] is BAD:
            return BAD
        path = f"groups[{index}]"
        context = self.findings.attempt(f"{path}.context", Context, *group["context"].values())
        arguments = (group["name"], group["tokens_per_block"], context, group["tokens_per_slot"])
        return self.findings.attempt(path, Group, *arguments)

    def memory(self, index: int, memory: Any) -> Any:
        """Return a region with the size and memory of those that refer to it.

        Name and address come from each of them.
        """
        if memory is BAD:
            return BAD
        # checked once under the name of its path, at address 0, not again for each region
        path = f"memories[{index}]"
        arguments = (memory["size_bytes"], memory["memory"], memory["device_id"])
        return self.findings.attempt(path, Region, path, 0, *arguments)

    def region(self, memories: Any, index: int, row: tuple[Any, ...]) -> Any:
        """Return the region of a row."""
        stem, number, memory, address = row
        region_name = self._name(stem, number, f"regions.stem[{index}]")
        template = self._entry(memories, memory, f"regions.memory[{index}]")
        if template is BAD:
            return BAD
        arguments = (template.size_bytes, template.memory, template.device_id)
        path = f"regions.address[{index}]"
        return self.findings.attempt(path, Region, region_name, address, *arguments)

    def layout(self, groups: Any, index: int, layout: Any) -> Any:
        """Return a template for the views of a layout.

        It is checked here once, not again for each view that has the layout.
        """
        if layout is BAD or layout["axes"] is BAD:
            return BAD
        path = f"layouts[{index}]"
        axes = []
        for nth, axis in enumerate(layout["axes"]):
            fields = (BAD,) if axis is BAD else axis.values()
            axes.append(self.findings.attempt(f"{path}.axes[{nth}]", Axis, *fields))
        group = self._entry(groups, layout["group"], f"{path}.group")
        if group is BAD or BAD in axes:
            return BAD
        blocks = (layout["num_blocks"], layout["block_stride_bytes"])
        arguments = (path, group, path, layout["dtype"], tuple(axes), *blocks)
        view = self.findings.attempt(path, View, *arguments)
        if view is BAD:
            return BAD
        # a worker of the view alone, in a region as large as can be
        region = Region(path, 0, INT64_END - 1)
        worker = self.findings.attempt(path, Worker, *self.key, [region], [group], [view])
        return BAD if worker is BAD else _LayoutTemplate(view, group)

    def view(self, regions: Any, layouts: Any, index: int, row: tuple[Any, ...]) -> Any:
        """Return the view of a row, with its region and group."""
        stem, number, layout_index, region_index, offset_bytes = row
        view_name = self._name(stem, number, f"views.stem[{index}]")
        template = self._entry(layouts, layout_index, f"views.layout[{index}]")
        region = self._entry(regions, region_index, f"views.region[{index}]")
        if BAD in (view_name, template, region, offset_bytes):
            return BAD
        # views of one memory may share a problem: a size that all of them leave
        _, _, memory, _ = self.fields["regions"][region_index]
        view = template.view.at(view_name, region, offset_bytes)
        return _PeerView(index, memory, view, region, template.group)

    def worker(
        self,
        regions: Sequence[Region],
        groups: Sequence[Group],
        views: Sequence[_PeerView],
        model: str,
        extensions: dict[str, Any],
    ) -> Any:
        """Return the worker, or find what in it does not fit together."""
        try:
            all_views = tuple([each.view for each in views])
            return Worker(*self.key, regions, groups, all_views, model, extensions)
        except KVPlanError as error:
            # a worker of regions alone, then of groups alone, then of each view alone
            num_problems = self.findings.count
            self.findings.attempt("regions", Worker, *self.key, regions, (), ())
            self.findings.attempt("groups", Worker, *self.key, (), groups, ())
            by_memory: dict[int, list[_PeerView]] = {}
            for each in views:
                by_memory.setdefault(each.memory, []).append(each)
            for same_memory in by_memory.values():
                self._check_inside(same_memory)
            # none of them alone is at fault
            if self.findings.count == num_problems:
                self.findings.add("views", error)
            return BAD

    def _check_inside(self, views: Sequence[_PeerView]) -> None:
        """Find views that leave their regions, all of one memory and size.

        If that size is too small, only say so.
        """
        outside = [each for each in views if each.view.end_bytes > each.region.size_bytes]
        if not outside:
            return
        # the offsets are at fault, or the size
        if not _is_too_small(outside, views):
            for each in outside:
                path = f"views.offset_bytes[{each.index}]"
                arguments = ([each.region], [each.group], [each.view])
                self.findings.attempt(path, Worker, *self.key, *arguments)
            return
        # the view that ends last says which size would be enough
        last = max(outside, key=lambda each: each.view.end_bytes)
        size_bytes = last.region.size_bytes
        end_bytes = last.view.end_bytes
        blocks = count(last.view.num_blocks, "block")
        error = KVPlanError(
            "BOUNDS",
            "fit views",
            expected=f"at least {end_bytes} bytes, the end of view {last.view.name!r} of {blocks}",
            got=f"{size_bytes}",
            size_bytes=size_bytes,
            end_bytes=end_bytes,
        )
        self.findings.add(f"memories[{last.memory}].size_bytes", error)

    def _name(self, stem_index: Any, number: Any, path: str) -> Any:
        stem = self._entry(self.fields["stems"], stem_index, path)
        if stem is BAD or number is BAD or BAD in stem.values():
            return BAD
        # a name is checked when it is whole: the stem may be empty
        full_name = join(stem["before"], number, stem["after"])
        return self.findings.attempt(path, name, full_name, "the name of a stem and a number")

    def _entry(self, values: Any, index: Any, path: str) -> Any:
        """Return the value of a list to which the message refers by its index."""
        if values is BAD or index is BAD:
            return BAD
        if index < len(values):
            return values[index]
        expected = f"an index below {len(values)}"
        self.findings.add(
            path,
            KVPlanError(
                "RANGE", "look up an index", expected=expected, got=f"{index}", value=index
            ),
        )
        return BAD


def _is_too_small(outside: Sequence[_PeerView], views: Sequence[_PeerView]) -> bool:
    """Return whether the size of the regions is at fault, not the offsets of the views outside.

    No offset could help if a view is longer than its region. If several views leave all regions,
    the size is suspect.
    """
    most_bytes = max(each.view.end_bytes - each.view.offset_bytes for each in outside)
    if most_bytes > outside[0].region.size_bytes:
        return True
    left_regions = {each.region.name for each in outside}
    return len(outside) > 1 and left_regions == {each.region.name for each in views}
