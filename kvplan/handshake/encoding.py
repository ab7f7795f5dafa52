"""Offers: what a worker tells its peers of itself, as a message; and a fingerprint of its geometry.

A message is JSON: the standard library reads it, so does every language and every person; its integers are exact;
it can build no objects and run no code. It is small since what is alike is told once. Of an offer of two layers:

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
from collections.abc import Hashable, Sequence
from typing import Any

import attrs

from kvplan._checks import wrong_type
from kvplan._text import split
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.handshake.errors import Findings
from kvplan.handshake.messages import MAX_BYTES
from kvplan.handshake.schema import OFFER, REGIONS, VERSION, VIEWS, Table, read

Places = dict[Any, int]
"""Different values, and where each stands in a list of them."""


def encode(worker: Worker) -> bytes:
    """The offer of a worker: a message that :func:`kvplan.decode` makes an equal worker of.

    ASCII, and in one form only, so that equal workers have equal messages. Raises ``RANGE`` where the worker has
    more of something than a message may, ``TYPE`` for what is no worker.

    >>> from kvplan import Worker, decode, encode
    >>> encode(Worker("decode", 3, (), (), ()))[:42]
    b'{"kvplan":1,"engine_id":"decode","rank":3,'
    >>> decode(encode(Worker("decode", 3, (), (), ())))
    Worker(engine_id='decode', rank=3, regions=(), groups=())
    """
    offer = _offer(worker)
    found = Findings()
    read(OFFER, offer, "", found)
    if found.first:
        raise _too_much(worker, found.first.expected, found.first.got, found.problems[0].path)
    message = _json({"kvplan": VERSION, **offer})
    if len(message) > MAX_BYTES:
        raise _too_much(worker, f"at most {MAX_BYTES} bytes", f"{len(message)}", "")
    return message


def fingerprint(worker: Worker) -> str:
    """The geometry of a worker as 64 hexadecimal digits: equal for workers that keep the same things in the same way.

    In it, in their order: the groups; the size and memory kind of each region; and of each view its tensor, dtype,
    axes, block count and stride, which of the groups and regions it has, and its offset. Not in it: engine id, rank,
    and each region's name, address and device. So it stays as it is where a worker comes back at other addresses.
    It is the SHA-256 of a JSON text, and may change with the version of the format.

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
        **{key: offer[key] for key in ("groups", "layouts")},
        "regions": [(region.memory, region.size_bytes) for region in worker.regions],
        "tensors": [view.name for view in worker.views],
        **{key: offer["views"][key] for key in ("layout", "region", "offset_bytes")},
    }
    return hashlib.sha256(_json(geometry)).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _too_much(worker: Worker, expected: str, got: str, path: str) -> KVPlanError:
    return KVPlanError("RANGE", f"encode worker {worker.label}", expected=expected, got=got, hint=path)


def _offer(worker: Worker) -> dict[str, Any]:
    """The message of a worker as plain data, without its version."""
    if not isinstance(worker, Worker):
        raise wrong_type("a worker", "a Worker", worker)
    stems: Places = {}
    memories: Places = {}
    regions = [
        (
            *_stem(stems, region.name),
            _at(memories, (region.memory, region.device_id, region.size_bytes)),
            region.address,
        )
        for region in worker.regions
    ]
    views = [
        (*_stem(stems, view.name), layout, *place)
        for view, layout, place in zip(worker.views, worker.geometry_of, worker.places.tolist(), strict=True)
    ]
    groups = {group: i for i, group in enumerate(worker.groups)}
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
        "memories": [dict(zip(("memory", "device_id", "size_bytes"), memory, strict=True)) for memory in memories],
        "stems": [dict(zip(("before", "after"), stem, strict=True)) for stem in stems],
        "regions": _columns(REGIONS, regions),
        "views": _columns(VIEWS, views),
    }


def _at(places: Places, value: Hashable) -> int:
    return places.setdefault(value, len(places))


def _stem(stems: Places, name: str) -> tuple[int, int | None]:
    before, number, after = split(name)
    return _at(stems, (before, after)), number


def _columns(table: Table, rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {key: [row[i] for row in rows] for i, key in enumerate(table.columns)}
