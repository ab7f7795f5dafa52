"""Offers: how a worker describes itself to its peers, as a message, and a fingerprint of its geometry.

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
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import attrs

from kvplan._checks import wrong_type
from kvplan._text import split
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.handshake.messages import MAX_BYTES, MODEL, VERSION, Findings, parse
from kvplan.handshake.schema import MEMORY, OFFER, REGIONS, STEM, VIEWS, Columns, read


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
    message = _json({"kvplan": VERSION, **offer} | ({"extensions": extensions} if extensions else {}))
    if extensions:
        parse(message, found)
    if found.first:
        expected, got, path = found.first.expected, found.first.got, found.problems[0].path
    elif len(message) > MAX_BYTES:
        expected, got, path = f"at most {MAX_BYTES} bytes", f"{len(message)}", ""
    else:
        return message
    raise KVPlanError("RANGE", f"encode worker {worker.label}", expected=expected, got=got, hint=path)


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
        (*stem_and_number(region.name), memory(region.memory, region.device_id, region.size_bytes), region.address)
        for region in worker.regions
    ]
    views = [
        (*stem_and_number(view.name), layout, *place)
        for view, layout, place in zip(worker.views, worker.geometry_of, worker.places.tolist(), strict=True)
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
