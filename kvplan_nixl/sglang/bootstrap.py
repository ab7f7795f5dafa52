"""What prefill has computed for a room, where decode asks for it: SGLang's bootstrap server.

A room is the number that a request has in both engines. ``POST /ROOM`` stores an entry, a JSON object; ``GET
/ROOM,ROOM`` returns those that are there, by room. An entry has a ``handoff``, the parameters of a
:class:`~kvplan.connector.Handoff`, and either the ``metadata`` that SGLang's prefill sends or the first ``token`` of
the answer, which is all that another engine's prefill knows.

Each pipeline stage of SGLang's prefill has block tables of its own, and posts an entry with them: ``POST
/ROOM/STAGE/STAGES``, with its index and the number of all. The room is there when they all are, with all block tables.
Entries with another ``attempt`` are of another request in the same room, so no stage of one is joined with the other's.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from logging import Logger
from typing import Any, Final

from kvplan import KVPlanError
from kvplan.connector.http import exchange, serve

MAX_ROOMS: Final = 1 << 14
"""Entries that a server keeps, the newest ones."""

BY_GROUP: Final = ("remote_block_ids", "remote_kept")
"""The parameters of a handoff in which each stage has groups of its own."""

MAX_ATTEMPTS: Final = 4
"""Entries of one room that a server keeps, the newest ones: a request may be computed again under its room."""

Stages = dict[tuple[int, int], Any]
"""Entries by stage and number of stages."""

TIMEOUT_S: Final = 3.0

ASK_S: Final = 0.01
"""Seconds between two questions to a bootstrap server, each for all rooms that are wanted of it."""

RETRY_S: Final = 1.0
"""Seconds after which a server that gave no answer is asked again."""


class BootstrapServer:
    """Keeps the entries of the newest rooms. Raises ``PEER`` where it can't listen.

    >>> server = BootstrapServer("127.0.0.1", 0)
    >>> publish(server.address, 7, {"token": 42})
    >>> ask(server.address, [6, 7])
    {7: {'token': 42}}
    >>> server.close()
    """

    def __init__(self, host: str, port: int) -> None:
        rooms: OrderedDict[str, OrderedDict[str, Stages]] = OrderedDict()  # by room and attempt
        lock = threading.Lock()

        def get(path: str) -> Any:
            with lock:
                entries = {
                    room: _newest(rooms.get(room, OrderedDict())) for room in path[1:].split(",")
                }
            return {room: entry for room, entry in entries.items() if entry is not None}

        def post(path: str, entry: Any) -> Any:
            room, *part = path[1:].split("/")
            stage, stages = map(int, part or (0, 1))
            match entry:
                case {"handoff": {"remote_block_ids": dict(), "remote_kept": dict()}} if (
                    0 <= stage < stages
                ):
                    pass
                case dict() if (stage, stages) == (0, 1):
                    pass
                case _:
                    return None
            with lock:
                attempts = rooms.setdefault(room, OrderedDict())
                attempt = attempts.setdefault(f"{entry.get('attempt')}", {})
                if attempt.setdefault((stage, stages), entry) != entry:
                    attempt.clear()  # it has been computed again
                    attempt[stage, stages] = entry
                while len(attempts) > MAX_ATTEMPTS:
                    attempts.popitem(last=False)
                rooms.move_to_end(room)
                while len(rooms) > MAX_ROOMS:
                    rooms.popitem(last=False)
            return {}

        self._server = serve(host, port, get=get, post=post)
        self.address: str = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _newest(attempts: OrderedDict[str, Stages]) -> Any:
    """Return the entry of the newest attempt that all stages have published, None where there is none."""
    entries = map(_joined, reversed(attempts.values()))
    return next((entry for entry in entries if entry is not None), None)


def _joined(entries: Stages) -> Any:
    """The first stage's entry, with the block tables of all; None until all stages of a room have published."""
    if {stages for _, stages in entries} != {len(entries)}:
        return None
    first, *others = (entries[stage] for stage in sorted(entries))
    if not others:
        return first
    handoff = dict(first["handoff"])
    for key in BY_GROUP:
        handoff[key] = dict(handoff[key])
        for entry in others:
            handoff[key].update(entry["handoff"][key])
    return {**first, "handoff": handoff}


def publish(
    address: str, room: int, entry: Mapping[str, Any], stage: int = 0, stages: int = 1
) -> None:
    """Store the entry of a room, or that of one of ``stages``, in the bootstrap server at an address. Raises
    ``PEER``.
    """
    exchange(
        f"the bootstrap server at {address}",
        address,
        None,
        f"/{room}/{stage}/{stages}",
        TIMEOUT_S,
        entry,
    )


def ask(address: str, rooms: Iterable[int]) -> dict[int, Any]:
    """The entries of rooms that the bootstrap server at an address has. Raises ``PEER``, ``MESSAGE``."""
    peer = f"the bootstrap server at {address}"
    answer = exchange(peer, address, None, "/" + ",".join(map(str, rooms)), TIMEOUT_S)
    try:
        return {int(room): entry for room, entry in json.loads(answer).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise KVPlanError(
            "MESSAGE", f"ask {peer}", expected="entries by room", got=f"{error!r}"
        ) from None


class Rooms:
    """Asks bootstrap servers about rooms, on a thread for each server."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._wanted: dict[str, set[int]] = {}  # rooms by the server that is asked
        self._found: dict[int, Any] = {}

    def want(self, room: int, address: str) -> None:
        """Ask for a room until it is found or forgotten."""
        with self._lock:
            if address not in self._wanted:
                self._wanted[address] = set()
                threading.Thread(
                    target=self._run, args=(address,), name="kvplan rooms", daemon=True
                ).start()
            self._wanted[address].add(room)

    def take(self, room: int) -> Any:
        """The entry of a room, once; None while there is none."""
        with self._lock:
            return self._found.pop(room, None)

    def forget(self, room: int) -> None:
        """Ask for a room no more."""
        with self._lock:
            for rooms in self._wanted.values():
                rooms.discard(room)
            self._found.pop(room, None)

    def _run(self, address: str) -> None:
        while True:
            with self._lock:
                rooms = self._wanted[address]
                if not rooms:
                    del self._wanted[address]
                    return
                asked = sorted(rooms)
            try:
                found = ask(address, asked)
            except KVPlanError as error:
                self._logger.warning("%s", error)
                time.sleep(RETRY_S)
                continue
            with self._lock:
                self._found |= {room: entry for room, entry in found.items() if room in rooms}
                rooms.difference_update(found)
            time.sleep(ASK_S)
