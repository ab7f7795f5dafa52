"""SGLang's bootstrap server: it keeps what prefill has computed for a room, until decode asks.

A room is the number that a request has in both engines. ``POST /ROOM`` stores an entry, a JSON
object; ``GET /ROOM,ROOM`` returns the entries of those rooms that have one, by room. An entry has a
``handoff``, the parameters of a :class:`~kvplan.connector.Handoff`, and either the ``metadata``
that SGLang's prefill sends or the first ``token`` of the answer, which is all that another engine's
prefill knows.

Each pipeline stage of SGLang's prefill has block tables of its own, and posts an entry with them:
``POST /ROOM/STAGE/STAGES``, with its index and the number of all. The room has an entry, with all
block tables, once all stages have posted theirs. Entries with another ``attempt`` are of another
request in the same room, so no stage of one is merged with the other's.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from logging import Logger
from typing import Any, Final

from kvplan import KVPlanError
from kvplan.connector.http import exchange, start_server

MAX_ROOMS: Final = 1 << 14
"""Rooms that a server keeps, the newest ones."""

MAX_ATTEMPTS: Final = 4
"""Attempts of one room that a server keeps, the newest ones: a request may be computed again."""

BY_GROUP: Final = ("remote_block_ids", "remote_kept")
"""The parameters of a handoff in which each stage has groups of its own."""

StageEntries = dict[tuple[int, int], Any]
"""Entries by stage and number of stages."""

TIMEOUT_S: Final = 3.0
"""Seconds within which a bootstrap server must answer."""

ASK_S: Final = 0.01
"""Seconds between two questions to a bootstrap server, each for all rooms that are wanted of it."""

RETRY_S: Final = 1.0
"""Seconds after which a server that gave no answer is asked again."""


class BootstrapServer:
    """Keeps the entries of the newest rooms. Raises ``PEER`` if it cannot listen.

    >>> server = BootstrapServer("127.0.0.1", 0)
    >>> publish(server.address, 7, {"token": 42})
    >>> ask(server.address, [6, 7])
    {7: {'token': 42}}
    >>> server.close()
    """

    def __init__(self, host: str, port: int) -> None:
        self._lock = threading.Lock()
        # entries by room and by attempt, the newest last
        self._rooms: OrderedDict[str, OrderedDict[str, StageEntries]] = OrderedDict()
        self._server = start_server(host, port, get=self._get, post=self._post)
        self.address: str = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _get(self, path: str) -> Any:
        entries = {}
        with self._lock:
            for room in path[1:].split(","):
                entry = _newest_entry(self._rooms.get(room, OrderedDict()))
                if entry is not None:
                    entries[room] = entry
        return entries

    def _post(self, path: str, entry: Any) -> Any:
        room, *part = path[1:].split("/")
        stage, stages = map(int, part or (0, 1))
        if not _is_entry(entry, stage, stages):
            return None
        with self._lock:
            attempts = self._rooms.setdefault(room, OrderedDict())
            entries = attempts.setdefault(f"{entry.get('attempt')}", {})
            # A stage that posts another entry has computed the attempt again, and so will others.
            if entries.setdefault((stage, stages), entry) != entry:
                entries.clear()
                entries[stage, stages] = entry
            while len(attempts) > MAX_ATTEMPTS:
                attempts.popitem(last=False)
            self._rooms.move_to_end(room)
            while len(self._rooms) > MAX_ROOMS:
                self._rooms.popitem(last=False)
        return {}


def _is_entry(entry: Any, stage: int, stages: int) -> bool:
    """Return whether a stage may post an entry: several stages post what can be merged."""
    match entry:
        case {"handoff": {"remote_block_ids": dict(), "remote_kept": dict()}}:
            return 0 <= stage < stages
        case dict():
            return (stage, stages) == (0, 1)
    return False


def _newest_entry(attempts: OrderedDict[str, StageEntries]) -> Any:
    """Return the entry of the newest attempt that all stages have posted, None without one."""
    for entries in reversed(attempts.values()):
        merged = _merge_stages(entries)
        if merged is not None:
            return merged
    return None


def _merge_stages(entries: StageEntries) -> Any:
    """Return the first stage's entry with the block tables of all, None while one lacks."""
    numbers_of_stages = {stages for _, stages in entries}
    if numbers_of_stages != {len(entries)}:
        return None
    merged, *later_entries = (entries[stage] for stage in sorted(entries))
    if not later_entries:
        return merged
    handoff = dict(merged["handoff"])
    for key in BY_GROUP:
        handoff[key] = dict(handoff[key])
        for entry in later_entries:
            handoff[key].update(entry["handoff"][key])
    return {**merged, "handoff": handoff}


def publish(
    address: str, room: int, entry: Mapping[str, Any], stage: int = 0, stages: int = 1
) -> None:
    """Store the entry of a room, or of one stage of ``stages``, in the bootstrap server there.

    Raises ``PEER``.
    """
    peer = f"the bootstrap server at {address}"
    exchange(peer, address, None, f"/{room}/{stage}/{stages}", TIMEOUT_S, entry)


def ask(address: str, rooms: Iterable[int]) -> dict[int, Any]:
    """Return the entries of rooms that a bootstrap server has. Raises ``PEER``, ``MESSAGE``."""
    peer = f"the bootstrap server at {address}"
    answer = exchange(peer, address, None, "/" + ",".join(map(str, rooms)), TIMEOUT_S)
    try:
        return {int(room): entry for room, entry in json.loads(answer).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        expected = "entries by room"
        raise KVPlanError("MESSAGE", f"ask {peer}", expected=expected, got=f"{error!r}") from None


class Rooms:
    """Asks bootstrap servers about rooms, on a thread for each server."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        # rooms by the server that is asked, each with what takes its entry
        self._wanted: dict[str, dict[int, Callable[[Any], None]]] = {}

    def want(self, room: int, address: str, take: Callable[[Any], None]) -> None:
        """Ask for a room until it has an entry, or is forgotten.

        ``take`` is called with the entry, on the thread that has asked. It must not wait or raise.
        """
        with self._lock:
            if address not in self._wanted:
                self._wanted[address] = {}
                threading.Thread(
                    target=self._run, args=(address,), name="kvplan rooms", daemon=True
                ).start()
            self._wanted[address][room] = take

    def forget(self, room: int) -> None:
        """Ask for a room no more. Its entry is taken before that, or never."""
        with self._lock:
            for rooms in self._wanted.values():
                rooms.pop(room, None)

    def _run(self, address: str) -> None:
        """Ask a server for the rooms that are wanted of it, until there are none."""
        while True:
            with self._lock:
                rooms = self._wanted[address]
                if not rooms:
                    del self._wanted[address]
                    return
                asked = sorted(rooms)
            try:
                entries = ask(address, asked)
            except KVPlanError as error:
                self._logger.warning("%s", error)
                time.sleep(RETRY_S)
                continue
            with self._lock:
                for room, entry in entries.items():
                    take = rooms.pop(room, None)
                    # A room that was forgotten meanwhile stays so.
                    if take is not None:
                        take(entry)
            time.sleep(ASK_S)
