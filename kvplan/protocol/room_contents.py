"""The contents of rooms: entries of requests whose prompt is computed as a whole or up to a token.

An entry is a JSON object with a ``handoff``, the parameters of a
:class:`~kvplan.protocol.Handoff`. An entry of a whole prompt also has one of the
:data:`WHOLE_KEYS`; an entry without is *partial*, and more entries follow. A server
keeps entries as texts, one for each pipeline stage, and gives each content of a room a new version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from kvplan._checks import at_most, instance, members, name, seconds
from kvplan._text import brief_repr
from kvplan.describe.blocks import Blocks
from kvplan.errors import KVPlanError
from kvplan.protocol.handoff import Handoff
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.system import ANSWER_S, MAX_ANSWER_BYTES, TOKEN_BYTES, LongPolls, System

__all__ = [
    "ENTRY_BYTES",
    "MAX_QUESTION_BYTES",
    "MAX_ROOM_CHARACTERS",
    "RoomPolls",
    "RoomTexts",
    "is_partial",
    "poll_rooms",
]

MAX_ASKED: Final = 1 << 10
"""Rooms in one question."""

MAX_ROOM_CHARACTERS: Final = 1 << 7
"""The length of a room's name."""

MAX_QUESTION_BYTES: Final = MAX_ASKED << 10
"""The length of a question. In JSON a character has at most 6 bytes; a version has 32."""

WAIT_S: Final = 10.0
"""Seconds for which a server holds a question about rooms of which there is nothing new."""

MAX_WAITING: Final = 1 << 9
"""Questions that a server holds at a time. One more is answered at once."""

ENTRY_BYTES: Final = 500
"""The memory that a server needs for an entry, its text not counted, and a little more."""

WHOLE_KEYS: Final = ("metadata", "token", "error", "is_whole")
"""Keys of which an entry of a whole prompt has one."""


@attrs.frozen
class RoomTexts:
    """The content of a room in its server: a version, and the texts of its entries."""

    version: str
    texts: Sequence[str]

    __repr__ = brief_repr


@attrs.frozen
class RoomContent:
    """The entry of a room, and the version by which it is known."""

    version: str
    entry: Mapping[str, Any]

    __repr__ = brief_repr


class RoomPolls:
    """Answers polls of rooms: at once if there is something new, or else when there is.

    ``content_of`` returns the content of a room, None of one that has none. Each answer names the
    ``start`` of its server, so that readers notice a restart, which has lost the rooms. A reader
    that knows another start is answered at once.
    """

    def __init__(self, content_of: Callable[[str], RoomTexts | None], system: System) -> None:
        self._content_of = content_of
        self._system: System = instance(System, system, "system")
        self._start = system.token_hex(TOKEN_BYTES)
        self._polls = LongPolls(system)

    def note_change(self, room: str) -> None:
        """Answer the questions that wait for a room. Any thread may call this."""
        self._polls.wake(room)

    async def answer(self, question: bytes, wait_s: str = "0", start: str = "") -> bytes:
        """Answer :func:`poll_rooms`, after ``wait_s`` seconds if nothing changes."""
        held_s = min(WAIT_S, seconds(float(wait_s), "wait_s"))
        if start not in ("", self._start):
            held_s = 0.0
        seen = _read_question(question)
        news = await self._polls.hold(seen, lambda: self._news(seen) or None, held_s, MAX_WAITING)
        return json.dumps({"start": self._start, "rooms": news or {}}).encode()

    def _news(self, seen: Mapping[str, str]) -> dict[str, tuple[str, Sequence[str]]]:
        """The contents that a reader has not seen, as many as fit an answer."""
        news = dict[str, tuple[str, Sequence[str]]]()
        num_bytes = 0
        # in the order of the question, so that what is left out comes with the next question
        for room, version in seen.items():
            content = self._content_of(room)
            if content is None or content.version == version:
                continue
            # twice, as strings in JSON
            num_bytes += 2 * sum(map(len, content.texts)) + ENTRY_BYTES
            if num_bytes > MAX_ANSWER_BYTES:
                break
            news[room] = content.version, content.texts
        return news


def _read_question(question: bytes) -> dict[str, str]:
    """Return the rooms of a question, and the version of each that was seen.

    The server keeps them while it waits, so that they are few and short. Raises ``TYPE`` and
    ``RANGE``.
    """
    seen: dict[str, str] = instance(
        dict, json.loads(instance(bytes, question, "question")), "rooms"
    )
    action = "answer about rooms"
    at_most(MAX_ASKED, len(seen), "rooms", action)
    for room, version in seen.items():
        at_most(MAX_ROOM_CHARACTERS, len(room), "characters of a room's name", action)
        num_characters = len(instance(str, version, "version of a room"))
        at_most(2 * TOKEN_BYTES, num_characters, "characters of a version", action)
    return seen


class RoomStore:
    """The entries of an engine's own rooms. One thread writes, and coroutines answer.

    >>> from kvplan_nixl.serving import Driver
    >>> driver = Driver()
    >>> store = RoomStore(driver)
    >>> store.put("transfer 1", {"handoff": {}})
    >>> store.withdraw("transfer 1")
    >>> driver.run(store.polls.answer(b'{"transfer 1": ""}'))[-12:]
    b'"rooms": {}}'
    """

    def __init__(self, system: System) -> None:
        self._system: System = instance(System, system, "system")
        self._contents: dict[str, RoomTexts] = {}
        self.polls: RoomPolls = RoomPolls(self._contents.get, system)

    def put(self, room: str, entry: Mapping[str, Any]) -> None:
        """Publish an entry, which replaces the room's earlier one."""
        text = json.dumps(instance(Mapping, entry, "entry of a room"))
        # in one step, since coroutines answer meanwhile
        self._contents[name(room, "room")] = RoomTexts(self._system.token_hex(TOKEN_BYTES), [text])
        self.polls.note_change(room)

    def withdraw(self, room: str) -> None:
        """Withdraw the entry of a room, if it has one."""
        self._contents.pop(name(room, "room"), None)


@attrs.frozen
class RoomNews:
    """The contents of rooms that have changed, from one start of their server."""

    start: str
    contents: Mapping[str, RoomContent]

    __repr__ = brief_repr


async def poll_rooms(
    address: str,
    versions: Mapping[str, str],
    *,
    wait_s: float = 0.0,
    start: str = "",
    key: SharedKey,
    system: System,
) -> RoomNews:
    """Ask for the contents of rooms that have changed since their ``versions`` were seen.

    The server holds the question until some have, for ``wait_s`` seconds, unless it has restarted
    since the ``start`` that has answered before. Raises ``PEER`` and ``MESSAGE``.
    """
    for room in instance(Mapping, versions, "versions of rooms"):
        num_characters = len(name(room, "room"))
        at_most(MAX_ROOM_CHARACTERS, num_characters, "characters of a room's name", "ask for it")
    peer = f"the server of rooms at {name(address, 'address of a server')}"
    question = json.dumps(dict(versions)).encode()
    path = f"/ask/{wait_s:g}/{start}"
    answer = await system.exchange(peer, address, path, wait_s + ANSWER_S, question)
    try:
        fields = json.loads(answer)
        contents = dict[str, RoomContent]()
        for room, (version, texts) in fields["rooms"].items():
            contents[room] = RoomContent(f"{version}", _merged(room, texts, key))
        return RoomNews(_start(fields["start"]), contents)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        expected = "entries by room"
        raise KVPlanError(
            "MESSAGE", f"ask {address}", expected=expected, got=f"{error!r}"
        ) from None


def _start(text: Any) -> str:
    """Return the start of a server, which the path of a question can have. Raises ValueError."""
    if not (isinstance(text, str) and text.isascii() and text.isalnum()):
        raise ValueError("a start that is no token")
    return text


def _merged(room: str, texts: Sequence[str], key: SharedKey) -> Mapping[str, Any]:
    """Return the entry of the stage that has computed least, with the block tables of all stages.

    Its ``leases`` are those of all stages. An entry that cannot be read has no handoff, but an
    ``error`` that says why.
    """
    try:
        # untrusted
        entries = [_checked(json.loads(text)) for text in texts]
        if len(entries) == 1:
            return entries[0]
        handoffs = [Handoff.of_params(entry.get("handoff", {}), key) for entry in entries]
    except (ValueError, RecursionError) as error:
        return {"error": f"room {room}: {error}"}
    # each stage has different groups
    blocks = dict[str, Blocks]()
    kept = dict[str, int]()
    for handoff in handoffs:
        blocks.update(handoff.blocks)
        kept.update(handoff.kept)
    # of those that have computed all, the first one, whose lease is claimed
    progress = [
        (handoff.num_tokens, not is_partial(entry))
        for handoff, entry in zip(handoffs, entries, strict=True)
    ]
    slowest = progress.index(min(progress))
    merged = attrs.evolve(
        handoffs[slowest],
        source=handoffs[0].source,
        lease=handoffs[0].lease,
        blocks=blocks,
        kept=kept,
    )
    leases = [handoff.lease for handoff in handoffs]
    return {**entries[slowest], "handoff": merged.params(key), "leases": leases}


def is_partial(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is of the beginning of a prompt, so that another entry follows."""
    return instance(Mapping, entry, "entry of a room").keys().isdisjoint(WHOLE_KEYS)


def _checked(entry: Any) -> Mapping[str, Any]:
    """Return an entry, which must be an object. Raises ValueError."""
    if not isinstance(entry, dict):
        raise ValueError("an entry that is no object")
    return entry


@attrs.frozen
class Published:
    """What prefill has published of a request: the beginning of its prompt, or the whole.

    ``leases`` are those of all pipeline stages.
    """

    handoff: Handoff
    leases: tuple[str, ...]
    is_whole: bool
    entry: Mapping[str, Any]

    __repr__ = brief_repr

    @classmethod
    def of_entry(
        cls, room: str, entry: Mapping[str, Any], key: SharedKey, earlier: Published | None = None
    ) -> Published:
        """Read the entry of a room, of which the ``earlier`` one was read.

        Raises ``MESSAGE`` for one that says why there is none, ``LEASE`` for one under other
        leases, and what :meth:`Handoff.of_params` raises.

        >>> from kvplan.protocol import Source
        >>> key = SharedKey.of(b"a secret of all engines")
        >>> source = Source("prefill", "a1", "10.0.0.1", 5600)
        >>> partial = {"handoff": Handoff(source, "lease 1", 40, "8f2c", {}).params(key)}
        >>> earlier = Published.of_entry("7", partial, key)
        >>> again = {"handoff": Handoff(source, "lease 2", 40, "8f2c", {}).params(key)}
        >>> Published.of_entry("7", again, key, earlier)
        Traceback (most recent call last):
        kvplan.errors.KVPlanError: LEASE: cannot read request 7:
        expected more of what was published under 'lease 1', got 'lease 2'
        (prefill has given it up, and computed it again)
        """
        if "error" in instance(Mapping, entry, "entry of a room"):
            action = f"read what room {room} has"
            expected = "an entry of each stage"
            raise KVPlanError("MESSAGE", action, expected=expected, got=f"{entry['error']}")
        handoff = Handoff.of_params(entry.get("handoff", {}), key)
        others = members(str, entry.get("leases", ()), "leases of a room")
        leases = (handoff.lease, *(name(lease, "lease of a room") for lease in others))
        if earlier is not None and earlier.leases != leases:
            action = f"read request {room}"
            expected = f"more of what was published under {earlier.leases[0]!r}"
            hint = "prefill has given it up, and computed it again"
            raise KVPlanError("LEASE", action, expected=expected, got=f"{leases[0]!r}", hint=hint)
        return cls(handoff, leases, not is_partial(entry), entry)
