"""Messages of up to 1 MiB, made to cost as much time or memory as possible, or to raise another error than PeerError.

``python -m tests.hostile`` reads all of them and prints, as JSON, by how many bytes the process grew, and for each the
seconds of processor time and the first problem's code.
"""

from __future__ import annotations

import functools
import itertools
import json
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvplan import decode, problems
from kvplan.handshake.messages import MAX_BYTES, MAX_CONTAINERS, MAX_STRINGS
from kvplan.handshake.schema import MAX_AXES, MAX_LAYOUTS, MAX_ROWS

Layout = dict[str, Any]


def filled(unit: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    """A message of the maximum length that repeats one unit."""
    return before + unit * ((MAX_BYTES - len(before) - len(after)) // len(unit)) + after


def extension(unit: bytes, before: bytes = b"[", after: bytes = b"0]") -> bytes:
    """The same as an extension, which is read and then ignored."""
    return filled(unit, b'{"kvplan":1,"extensions":{"x":' + before, after + b"}}")


def extended(items: bytes) -> bytes:
    """A message with a list as an extension."""
    return b'{"kvplan":1,"extensions":{"x":[' + items + b"0]}}"


def axis(name: str, extent: int, stride: int) -> dict[str, Any]:
    """A whole axis."""
    return {"name": name, "start": 0, "stop": extent, "size": extent, "stride_bytes": stride}


def layout(axes: Iterable[Mapping[str, Any]], num_blocks: int = 1, step: int = 0) -> Layout:
    """A layout of one group, of bytes."""
    return {
        "group": 0,
        "dtype": "uint8",
        "num_blocks": num_blocks,
        "block_stride_bytes": step,
        "axes": [axis("token", 4, 1), *axes],
    }


def offer(
    layouts: Sequence[Layout],
    views: Sequence[tuple[int, int, int]],
    size_bytes: int = 1 << 62,
    addresses: Sequence[int] = (0,),
    before: str = "v",
) -> bytes:
    """An offer of views, each (layout, region, offset), in regions of one size at some addresses."""
    regions, rows = len(addresses), len(views)
    message = {
        "kvplan": 1,
        "engine_id": "p",
        "rank": 0,
        "groups": [
            {"name": "g", "tokens_per_block": 4, "context": {"rank": 0, "size": 1, "interleave_tokens": 1}},
        ],
        "layouts": layouts,
        "memories": [{"memory": "DRAM", "device_id": 0, "size_bytes": size_bytes}],
        "stems": [{"before": before, "after": ""}],
        "regions": {
            "stem": [0] * regions,
            "number": list(range(regions)),
            "memory": [0] * regions,
            "address": list(addresses),
        },
        "views": {
            "stem": [0] * rows,
            "number": list(range(rows)),
            "layout": [view[0] for view in views],
            "region": [view[1] for view in views],
            "offset_bytes": [view[2] for view in views],
        },
    }
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()


def texts() -> dict[str, bytes]:
    """Messages that are expensive to read as JSON."""
    smile = "\N{GRINNING FACE}".encode()
    return {
        "lists in lists": b"[" * MAX_BYTES,
        "mappings in mappings": filled(b'{"":'),
        "empty lists": extension(b"[],"),
        "too many small mappings": extension(b'{"":0},'),
        "small mappings": extended(b'{"":0},' * (MAX_CONTAINERS - 3)),
        "quotes": b'"' * MAX_BYTES,
        "strings": extension(b'"abcde",'),
        "strings of wide characters": extension(b'"a' + smile + b'",'),
        "one wide string": extension(b"a", b'"' + smile, b'"'),
        "escaped quotes": extended(b'"' + rb"\"" * (2 * MAX_STRINGS - 99) + b'",'),
        "escaped characters": extension(rb"\u00e9", b'"', b'"'),
        "backslashes": b"\\" * MAX_BYTES,
        "a long integer": filled(b"9", b'{"kvplan":', b"}"),
        "integers": extension(b"98765432109876543210,"),
        "a long fraction": filled(b"9", b'{"kvplan":0.', b"}"),
        "a long exponent": filled(b"9", b'{"kvplan":1e', b"}"),
        "another version": filled(b"9,", b'{"kvplan":2,"x":[', b"0]}"),
        "fractions": extension(b"1e5,"),
        "one key many times": extended(b"{" + b'"a":1,' * (MAX_STRINGS - 9) + b'"b":1},'),
        "many keys": b'{"kvplan":1' + b"".join(b',"%x":0' % i for i in range(100_000)) + b"}",
        "long keys": b'{"kvplan":1' + b"".join(b',"%04x%s":0' % (i, b"k" * 1000) for i in range(1000)) + b"}",
        "one byte too many": b" " * (MAX_BYTES + 1),
    }


def descriptions() -> dict[str, bytes]:
    """Messages that are expensive when workers are checked."""
    wide = layout((axis(f"a{i}", 2, 4 << i) for i in range(MAX_AXES - 1)), 2, 1 << 17)
    gaps = [axis("x", 1 << 17, 8)]
    every = range(MAX_ROWS)
    return {
        "views of many axes": offer([wide], [(0, 0, i << 18) for i in every]),
        "the same, in regions that overlap": offer([wide], [(0, i, i << 18) for i in every], 1 << 50, every),
        "many layouts": offer(
            [layout([axis("x", 2, 8)], 2, 16 + i) for i in range(MAX_LAYOUTS)],
            [(i % MAX_LAYOUTS, 0, i << 12) for i in every],
        ),
        "views that leave their region": offer([wide], [(0, 0, 9) for _ in every], 8),
        "many runs": offer([layout(gaps)], [(0, 0, 0), (0, 0, 4)]),
        "many runs that step unlike": offer(
            [layout(gaps, 4, 1 << 20), layout(gaps, 4, (1 << 20) + 4)], [(0, 0, 0), (1, 0, 4)]
        ),
        "too many runs": offer([layout([axis("x", 1 << 40, 8)])], [(0, 0, 0), (0, 0, 4)]),
        "many regions of runs": offer(
            [layout([axis("x", 64, 8)])],
            [(0, i // 2, i % 2 * 4) for i in every],
            1 << 20,
            [i << 20 for i in range(MAX_ROWS // 2)],
        ),
        "views that all step unlike": offer(
            [layout([], 2, 1_000_000 + i) for i in range(MAX_LAYOUTS)], [(i, 0, 4 * i) for i in range(MAX_LAYOUTS)]
        ),
        "views side by side": offer([layout([], 1 << 30, 1 << 20)], [(0, 0, 4 * i) for i in every]),
        "long names": offer([layout([])], [(0, 0, 4 * i) for i in every], before="\N{GRINNING FACE}" * 255),
        "bad columns": offer([], [(-1, -1, -1) for _ in every], addresses=[-1] * MAX_ROWS),
        "columns too long": offer([], [(0, 0, 0)] * 90_000),
    }


def inputs() -> dict[str, bytes]:
    """All messages, by name."""
    return {**texts(), **descriptions()}


def _event(events: Iterator[int], *_: object) -> None:
    next(events)


def main() -> None:
    """Read each message and print what it cost."""
    messages = inputs()
    decode(offer([layout([], 2, 8)], [(0, 0, 0), (0, 0, 4)]))  # whatever the first one loads and keeps
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken: dict[str, Any] = {}
    for name, data in messages.items():
        events = itertools.count()
        sys.setprofile(functools.partial(_event, events))  # one for each function called, and one for its end
        found = problems(data)
        sys.setprofile(None)
        taken[name] = {"calls": next(events) // 2, "code": found[0].code if found else ""}
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    json.dump({"grown_bytes": grown, "taken": taken}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
