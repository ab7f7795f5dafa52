"""Messages and handoffs of which one field breaks its format, and some at the limits of it.

They are written from what the pages of the protocol say and share no code with its parsers, which
must refuse the former and take the latter. Each is well formed otherwise, and signed: only the
check of that field can refuse it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

BAD_NAMES: Final[tuple[Any, ...]] = ("", "two\nlines", 7, None, ())
"""What is no name: a name is a string that can be printed, and is not empty."""

BAD_NUMBERS: Final = (-1, 1 << 70, "1", 0.5, None, True)
"""What counts nothing."""

LONG_NAME: Final = "x" * 1024
"""A lease or a reader of as many bytes as one may have."""

LONG_NAME_UTF8: Final = "é" * 512

PORT_END: Final = 1 << 16
MAX_ROOMS: Final = 1024
MAX_ROOM_CHARACTERS: Final = 128
MAX_VERSION_CHARACTERS: Final = 32
MAX_PREFIXES: Final = 16
MAX_STAGES: Final = 256

Breach = tuple[str, bytes, bool]
"""A path, the message that is sent there, and whether it keeps its format all the same."""


def _claims(draw: random.Random, start: str) -> Breach:
    """A message of claims on leases that there are not."""
    bad_pairs = (
        *(("lease", name) for name in BAD_NAMES),
        *((name, "reader") for name in BAD_NAMES),
        *(("lease",), ("lease", "reader", "more"), (f"{LONG_NAME}x", "reader")),
        *(("lease", f"{LONG_NAME}x"), (f"{LONG_NAME_UTF8}é", "reader"), "lr", 7),
    )
    bad: dict[str, tuple[Any, ...]] = {
        "start": BAD_NAMES,
        "claims": (7, "lr", None, *([pair] for pair in bad_pairs)),
        "done": (7, "lr", None, *([pair] for pair in bad_pairs)),
        "asks": (7, "lease", None, [7], [None], [["lease"]]),
    }
    good: dict[str, tuple[Any, ...]] = {
        "claims": ([], [(LONG_NAME, LONG_NAME_UTF8)], [("lease", "reader")]),
        "done": ([], [(LONG_NAME, LONG_NAME_UTF8)], [("lease", "reader")]),
        "asks": ([], ["lease"]),
    }
    is_right = draw.random() < 0.3
    fields = good if is_right else bad
    field = draw.choice(sorted(fields))
    message: Any = {"start": start, field: draw.choice(fields[field])}
    if not is_right and draw.random() < 0.1:
        message = draw.choice(({}, [], 7, None, "start"))
    return "/claims", json.dumps(message).encode(), is_right


def _digests(draw: random.Random, start: str) -> Breach:
    """A request for digests, of which none is of a lease that the engine knows."""
    bad: dict[str, tuple[Any, ...]] = {
        "start": (7, None, "another start"),
        "lease": (*BAD_NAMES, "lease"),
        "tokens": (7, [], None, *({"attn": span} for span in (7, [1], [1, 2, 3], [-1, 2], "01"))),
    }
    message: Any = {"start": start, "lease": "lease", "tokens": {"attn": [0, 4]}}
    field = draw.choice(sorted(bad))
    message[field] = draw.choice(bad[field])
    # it has ended, as those of another start
    is_right = message[field] in ("lease", "another start")
    if draw.random() < 0.1:
        return "/digests", json.dumps(draw.choice(([], 7, None))).encode(), False
    return "/digests", json.dumps(message).encode(), is_right


def _ask(draw: random.Random) -> Breach:
    """A question about rooms, all of which have numbers, as those of SGLang have."""
    longest = "7" * MAX_ROOM_CHARACTERS
    good: tuple[Any, ...] = (
        *({}, {longest: ""}, {"7": "x" * MAX_VERSION_CHARACTERS}),
        {f"{7 * 10**9 + number}": "" for number in range(MAX_ROOMS)},
    )
    bad: tuple[Any, ...] = (
        *([], 7, None, "7", {f"{longest}7": ""}, {"7": "x" * (MAX_VERSION_CHARACTERS + 1)}),
        *({"7": version} for version in BAD_NAMES[2:]),
        {f"{7 * 10**9 + number}": "" for number in range(MAX_ROOMS + 1)},
    )
    if draw.random() < 0.2:
        return f"/ask/{draw.choice(('-1', 'nan', 'x', ''))}/", b"{}", False
    is_right = draw.random() < 0.3
    return "/ask/0/", json.dumps(draw.choice(good if is_right else bad)).encode(), is_right


def _publish(draw: random.Random, path: str) -> Breach:
    """An entry of a room that SGLang's prefill publishes, or withdraws, under a wrong name."""
    _, action, *segments = path.split("/")
    # the room, the stage, the number of stages, the attempt and the owner
    bad: dict[int, tuple[str, ...]] = {
        0: ("-1", "x", "", f"{1 << 64}"),
        1: ("-1", "x", segments[2]),
        2: ("0", "-1", f"{MAX_STAGES + 1}", "x"),
        **dict.fromkeys(range(3, len(segments)), ("", "x" * 31, "x" * 33)),
    }
    index = draw.choice(sorted(bad))
    segments[index] = draw.choice(bad[index])
    return "/".join(("", action, *segments)), b"{}", False


def breach_of(path: str, sent: bytes, draw: random.Random) -> Breach | None:
    """Return a message that breaks the format of the one that was sent, or is at a limit of it."""
    if path.startswith(("/publish/", "/withdraw/")):
        return _publish(draw, path)
    if path.startswith("/ask/"):
        return _ask(draw)
    if path not in ("/claims", "/digests"):
        return None
    start = json.loads(sent)["start"]
    kinds: tuple[Callable[[], Breach], ...] = (
        *(lambda: _claims(draw, start), lambda: _claims(draw, start)),
        *(lambda: _digests(draw, start), lambda: _ask(draw)),
    )
    return draw.choice(kinds)()


def bad_handoff(
    params: Mapping[str, Any], draw: random.Random, *, sign: Callable[[str, bytes], str]
) -> Mapping[str, Any]:
    """Return a handoff's parameters with one field that breaks its format, signed all the same."""
    tables = params["remote_block_ids"]
    group = draw.choice(sorted(tables))
    bad_ids = (["x"], [-2], [1 << 31], [None], "0", 7)
    bad_tables = (
        *(7, None, "01", [0], [0, [1], 2], *([0, ids] for ids in bad_ids)),
        *([first, [1]] for first in BAD_NUMBERS),
        *([first, [-1, 1]] for first in BAD_NUMBERS),
    )
    length = params["remote_num_tokens"]
    bad_prefixes = (
        *([], [1], [1, "x", "x"], [length + 1, "x"]),
        *([number, "x"] for number in BAD_NUMBERS),
        *([1, digest] for digest in BAD_NAMES),
    )
    bad: dict[str, tuple[Any, ...]] = {
        **{f"remote_{name}": BAD_NAMES for name in ("engine_id", "start", "host", "prompt")},
        "remote_lease": (*BAD_NAMES, f"{LONG_NAME}x"),
        "remote_port": (*BAD_NUMBERS, PORT_END),
        "remote_num_tokens": BAD_NUMBERS,
        "remote_block_ids": (
            *(7, None, [tables], {**tables, "": tables[group]}),
            *({**tables, group: table} for table in bad_tables),
        ),
        "remote_kept": (
            *(7, None, [], {"no group of it": 0}, {"": 0}),
            *({group: position} for position in BAD_NUMBERS),
        ),
        "remote_prefixes": (
            *(7, None, "xx", [7], ["1x"], [[1, "x"]] * (MAX_PREFIXES + 1)),
            *([prefix] for prefix in bad_prefixes),
        ),
        "remote_weights_version": (7, None, [], "two\nlines"),
    }
    field = draw.choice(sorted(bad))
    changed = {**params, field: draw.choice(bad[field])}
    signed = {key: changed[key] for key in bad}
    if draw.random() < 0.1:
        del changed[field]
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    return {**changed, "remote_signature": sign("handoff", text.encode())}
