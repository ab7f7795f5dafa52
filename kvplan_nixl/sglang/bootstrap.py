"""SGLang's bootstrap server: it keeps what prefill has computed for a room, until decode asks.

A room is the number that a request has in both engines. Prefill publishes an entry there,
a JSON object: a ``handoff``, the parameters of a :class:`~kvplan.protocol.Handoff`, and either the
``metadata`` that SGLang's prefill sends or the first ``token`` of the answer, which is all that
another engine's prefill knows. An entry without either is of the beginning of a prompt, and another
one follows. The entry is withdrawn when the request has been read.

- bootstrap.B1: The server reads no entry. It keeps them as text, for a time, and in bounded memory:
  when it is full, a new one is refused, and no other is evicted.
- bootstrap.B2: A room belongs to who published there first, its owner. Nothing else can publish or
  withdraw there.
- bootstrap.B3: Each pipeline stage of SGLang's prefill has block tables of its own, and publishes
  an entry with them. The room has an entry, with all block tables, once all stages have published
  theirs. Entries with another ``attempt`` are of another request in the same room, so no stage of
  one is merged with the other's, also where it came again under its id. A stage may publish again,
  when it has computed more: what all stages have computed is what the room's entry has.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from kvplan import KVPlanError
from kvplan.protocol import Leases, SharedKey, System
from kvplan.protocol.room_contents import (
    ENTRY_BYTES,
    MAX_QUESTION_BYTES,
    RoomPolls,
    RoomTexts,
    is_partial,
    poll_rooms,
)
from kvplan.protocol.system import ANSWER_S, MAX_ANSWER_BYTES, TOKEN_BYTES, Route
from kvplan.support import at_most, integer

__all__ = ["BootstrapServer", "ask", "publish"]

MAX_ROOMS: Final = 1 << 14
"""Rooms that a server keeps."""

MAX_KEPT_BYTES: Final = 1 << 30
"""The entries that a server keeps: those of 16,384 prompts of 8K tokens in pages of 1."""

MAX_ENTRY_BYTES: Final = MAX_ANSWER_BYTES * 3 // 8
"""The entries of a room's stages together. As strings in JSON they may be twice as long."""

ROOM_BYTES: Final = 1000
ATTEMPT_BYTES: Final = 200
"""The memory of a room and one of its attempts, entries not counted, and a little more."""

MAX_ATTEMPTS: Final = 4
"""Attempts of one room that a server keeps, the newest ones: a request may be computed again."""

MAX_STAGES: Final = 1 << 8

ROOM_END: Final = 1 << 64


@attrs.frozen
class Stage:
    """A pipeline stage of a room's request: its index, the number of stages, and the attempt."""

    room: int
    index: int = 0
    number: int = 1
    attempt: str = ""

    def path(self, action: str, *names: str) -> str:
        """Return the path at which the stage's entry is published or withdrawn."""
        room = [f"{self.room}", f"{self.index}", f"{self.number}", _hashed(self.attempt)]
        return "/".join(["", action, *room, *names])

    @classmethod
    def of_path(cls, room: str, index: str, number: str, attempt: str) -> Stage:
        """Read the segments of a path. Raises ValueError for what is no stage."""
        num_stages = integer(int(number), "number of stages", low=1, high=MAX_STAGES + 1)
        return cls(
            integer(int(room), "room", high=ROOM_END),
            integer(int(index), "index of a stage", high=num_stages),
            num_stages,
            _token(attempt),
        )


def _hashed(text: str) -> str:
    """Return a name of a text that a path can have."""
    return hashlib.blake2b(text.encode(), digest_size=TOKEN_BYTES).hexdigest()


def _token(text: str) -> str:
    """Return a name in a path, which has the length of a hashed one. Raises ValueError."""
    if len(text) != 2 * TOKEN_BYTES:
        raise ValueError(f"a name that is not of {2 * TOKEN_BYTES} characters")
    return text


@attrs.define(eq=False)
class _Room:
    """The texts of a room's entries by attempt, the newest last, and by stage.

    ``version`` is a new name whenever somebody publishes.
    """

    owner: str
    expires_at: float = 0.0
    version: str = ""
    attempts: OrderedDict[str, dict[Stage, str]] = attrs.field(factory=OrderedDict)

    def newest(self) -> list[str]:
        """Return the entries of all stages of the newest attempt that has them, none without."""
        for entries in reversed(self.attempts.values()):
            stages = sorted(entries, key=lambda stage: stage.index)
            if {stage.number for stage in stages} == {len(stages)}:
                return [entries[stage] for stage in stages]
        return []

    @property
    def num_bytes(self) -> int:
        """The memory that the room needs, none without entries."""
        return _room_bytes(self.attempts)


def _room_bytes(attempts: Mapping[str, Mapping[Stage, str]]) -> int:
    num_bytes = sum(ATTEMPT_BYTES + _num_bytes(entries) for entries in attempts.values())
    return num_bytes + ROOM_BYTES if attempts else 0


def _num_bytes(entries: Mapping[Stage, str]) -> int:
    return sum(len(text) + ENTRY_BYTES for text in entries.values())


class BootstrapServer:
    """Keeps the entries of rooms for ``keep_s`` seconds. Raises ``PEER`` if it cannot listen.

    >>> from kvplan_nixl.serving import Driver
    >>> system = Driver()
    >>> server = BootstrapServer("127.0.0.1", 0, system=system)
    >>> owner = system.run(publish(server.address, 7, {"token": 42}, system=system))
    >>> system.run(ask(server.address, [6, 7], key=system.access.key, system=system))
    {7: {'token': 42}}
    >>> system.run(withdraw(server.address, 7, owner, system=system))
    >>> system.run(ask(server.address, [7], key=system.access.key, system=system))
    {}
    >>> server.close()
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        system: System,
        keep_s: float = 2 * Leases.DEFAULT_S,
    ) -> None:
        self._keep_s = keep_s
        self._system = system
        # Used where the server answers, and nowhere else. The oldest room is the first one.
        self._rooms: OrderedDict[int, _Room] = OrderedDict()
        self._num_bytes = 0
        self._polls = RoomPolls(self._content_of, system)
        routes = {
            "POST /publish": Route(self._publish, MAX_ENTRY_BYTES, num_segments=5),
            "POST /withdraw": Route(self._withdraw, num_segments=5),
            "POST /ask": Route(self._polls.answer, MAX_QUESTION_BYTES, num_segments=2),
        }
        self._server = system.serve(host, port, routes)
        self.address: str = f"{host}:{self._server.port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def _publish(self, body: bytes, *segments: str) -> bytes:
        *of_stage, owner = segments
        # the path has everything that the server needs to know
        stage = Stage.of_path(*of_stage)
        # in ASCII, of which each character takes a byte of memory
        text = body.decode("ascii")
        self._expire()
        # a room without entries is made, and kept only if the entry is
        room = self._room(stage.room, owner)
        entries = {**room.attempts.get(stage.attempt, {}), stage: text}
        # All limits are checked before anything changes.
        num_bytes = _num_bytes(entries)
        at_most(MAX_ENTRY_BYTES, num_bytes, "bytes of a room's stages", "publish")
        # an attempt that is published again stays as old as it was
        attempts = room.attempts | {stage.attempt: entries}
        while len(attempts) > MAX_ATTEMPTS:
            attempts.popitem(last=False)
        total = self._num_bytes - room.num_bytes + _room_bytes(attempts)
        at_most(MAX_KEPT_BYTES, total, "bytes of all rooms", "publish")
        self._num_bytes = total
        room.attempts = attempts
        room.expires_at = self._system.monotonic() + self._keep_s
        room.version = self._system.token_hex(TOKEN_BYTES)
        self._rooms[stage.room] = room
        self._rooms.move_to_end(stage.room)
        self._polls.note_change(f"{stage.room}")
        return b""

    def _room(self, number: int, owner: str) -> _Room:
        """Return the room of an owner, which may be new. Raises ``NAME`` and ``RANGE``."""
        _token(owner)
        room = self._rooms.get(number)
        if room is None:
            at_most(MAX_ROOMS, len(self._rooms) + 1, "rooms", "publish")
            return _Room(owner)
        if room.owner != owner:
            expected = "the owner of the room"
            raise KVPlanError("NAME", f"use room {number}", expected=expected, got="another one")
        return room

    def _withdraw(self, _: bytes, *segments: str) -> bytes:
        *of_stage, owner = segments
        stage = Stage.of_path(*of_stage)
        room = self._room(stage.room, owner)
        self._num_bytes -= room.num_bytes
        entries = room.attempts.get(stage.attempt, {})
        # what was withdrawn before, or is too old, is gone already
        entries.pop(stage, None)
        if not entries:
            room.attempts.pop(stage.attempt, None)
        self._num_bytes += room.num_bytes
        # an empty room is anybody's
        if not room.attempts:
            self._rooms.pop(stage.room, None)
        return b""

    def _content_of(self, number: str) -> RoomTexts | None:
        """Return the entries of all stages of a room, None if there are none."""
        self._expire()
        room = self._rooms.get(int(number))
        newest = [] if room is None else room.newest()
        return RoomTexts(room.version, newest) if room is not None and newest else None

    def _expire(self) -> None:
        """Forget the rooms that were kept for long enough."""
        now = self._system.monotonic()
        while self._rooms:
            number, room = next(iter(self._rooms.items()))
            if now < room.expires_at:
                return
            self._num_bytes -= room.num_bytes
            del self._rooms[number]


async def publish(
    address: str,
    room: int,
    entry: Mapping[str, Any],
    stage: int = 0,
    stages: int = 1,
    *,
    owner: str = "",
    system: System,
) -> str:
    """Publish the entry of a room, or of one stage of ``stages``, in the bootstrap server there.

    Returns its owner, for :func:`withdraw`: that of a room's other stages, or a new one. Raises
    ``PEER``.
    """
    owner = owner or system.token_hex(TOKEN_BYTES)
    published = Stage(room, stage, stages, f"{entry.get('attempt')}")
    body = json.dumps(entry).encode()
    await _post(address, published.path("publish", owner), body, system)
    return owner


async def withdraw(
    address: str,
    room: int,
    owner: str,
    stage: int = 0,
    stages: int = 1,
    *,
    attempt: str | None = None,
    system: System,
) -> None:
    """Withdraw what an owner has published. Raises ``PEER``."""
    withdrawn = Stage(room, stage, stages, f"{attempt}")
    await _post(address, withdrawn.path("withdraw", owner), b"", system)


async def ask(
    address: str, rooms: Iterable[int], *, key: SharedKey, system: System
) -> dict[int, Mapping[str, Any]]:
    """Return the entries of whole prompts that rooms have, of at most :data:`MAX_ASKED` rooms.

    Raises ``PEER`` and ``MESSAGE``.
    """
    names = map(str, rooms)
    answer = await poll_rooms(address, dict.fromkeys(names, ""), key=key, system=system)
    entries = {int(room): content.entry for room, content in answer.contents.items()}
    return {room: entry for room, entry in entries.items() if not is_partial(entry)}


async def _post(address: str, path: str, body: bytes, system: System) -> None:
    await system.exchange(f"the bootstrap server at {address}", address, path, ANSWER_S, body)
