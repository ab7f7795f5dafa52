"""Rooms: decode asks bootstrap servers for what prefill has computed of its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from logging import Logger
from typing import Any, Final

import attrs

from kvplan import KVPlanError
from kvplan._checks import at_most
from kvplan.connector import Access
from kvplan.connector.claims import MAX_SOURCES
from kvplan.connector.system import SYSTEM, System
from kvplan_nixl.sglang.bootstrap import MAX_ASKED, RETRY_S, RoomContent, ask_again

MAX_SERVERS: Final = MAX_SOURCES
"""Bootstrap servers that decode asks at a time, unless it says otherwise, each on a thread."""

ASK_S: Final = 0.01
"""Seconds between two questions to a bootstrap server about all rooms that are wanted of it."""


@attrs.define(eq=False)
class _WantedRoom:
    """A room that is asked for: what takes its entries, and the version that was taken last."""

    take: Callable[[Any], bool]
    version: str = ""


class Rooms:
    """Asks bootstrap servers about rooms, on a thread for each of at most ``max_servers``."""

    def __init__(
        self,
        logger: Logger,
        access: Access | None = None,
        max_servers: int = MAX_SERVERS,
        system: System = SYSTEM,
    ) -> None:
        self._logger = logger
        self._max_servers = max_servers
        self._access = access
        self._system = system
        self._lock = system.condition()
        # by the server that is asked
        self._wanted: dict[str, dict[int, _WantedRoom]] = {}

    def want(self, room: int, address: str, take: Callable[[Any], bool]) -> None:
        """Ask for a room until it has a whole entry, or is forgotten.

        ``take`` is called with each new entry, on the thread that has asked, and returns whether it
        is whole. It must not wait or raise. Raises ``RANGE`` if too many servers are asked.
        """
        with self._lock:
            if address not in self._wanted:
                action = f"ask {address}"
                number = len(self._wanted) + 1
                at_most(self._max_servers, number, "bootstrap servers at a time", action)
                self._wanted[address] = {}
                self._system.start("kvplan rooms", partial(self._run, address))
            self._wanted[address][room] = _WantedRoom(take)

    def forget(self, room: int) -> None:
        """Ask for a room no more. An entry of it is taken before that, or never."""
        with self._lock:
            for rooms in self._wanted.values():
                rooms.pop(room, None)

    def _run(self, address: str) -> None:
        """Ask a server for the rooms that are wanted of it, until there are none."""
        while True:
            with self._lock:
                if not self._wanted[address]:
                    del self._wanted[address]
                    return
                # the lock is not held while the server is asked
                wanted = self._wanted[address]
                asked = [(room, wanted[room].version) for room in sorted(wanted)]
            try:
                for start in range(0, len(asked), MAX_ASKED):
                    versions = dict(asked[start : start + MAX_ASKED])
                    contents = ask_again(address, versions, self._access, self._system)
                    self._take(address, contents)
            except KVPlanError as error:
                self._logger.warning("%s", error)
                self._system.sleep(RETRY_S)
            else:
                self._system.sleep(ASK_S)

    def _take(self, address: str, contents: Mapping[int, RoomContent]) -> None:
        """Give the entries of rooms to those that want them."""
        with self._lock:
            rooms = self._wanted[address]
            for room, content in contents.items():
                # A room that was forgotten meanwhile stays so.
                wanted = rooms.get(room)
                if wanted is None:
                    continue
                wanted.version = content.version
                if wanted.take(content.entry):
                    del rooms[room]
