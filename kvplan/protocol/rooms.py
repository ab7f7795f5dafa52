"""Rooms: decode asks for what prefill has computed of its requests.

Both engines know a request by the name of its room before prefill has computed it: by the number
that SGLang gives it, or by the transfer id that a router of vLLM gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplan._checks import at_most, having, instance, integer, name, seconds
from kvplan.errors import KVPlanError
from kvplan.protocol.claims import MAX_SOURCES
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.room_contents import MAX_ASKED, RoomContent, ask_again
from kvplan.protocol.system import System

if TYPE_CHECKING:
    from logging import Logger

MAX_SERVERS: Final = MAX_SOURCES
"""Servers that decode asks at a time, unless it says otherwise."""

ASK_S: Final = 0.01
"""Seconds between two questions to a server about all rooms that are wanted of it, by default."""

RETRY_S: Final = 1.0
"""Seconds after which a server that gave no answer is asked again."""


@attrs.define(eq=False)
class _WantedRoom:
    """A room that a reader asks for: what takes its entries, and the version that it took last."""

    room: str
    take: Callable[[Any], bool]
    version: str = ""


class Rooms:
    """Asks at most ``max_servers`` servers about rooms.

    A server is asked every ``ask_s`` while something is wanted of it. Handoffs are signed with
    ``key``.
    """

    def __init__(
        self,
        logger: Logger,
        key: SharedKey,
        system: System,
        *,
        max_servers: int = MAX_SERVERS,
        ask_s: float = ASK_S,
    ) -> None:
        self._logger: Logger = having("warning", logger, "logger", "a logger")
        self._max_servers: int = integer(max_servers, "max_servers")
        self._key = instance(SharedKey, key, "key of rooms")
        self._ask_s: float = seconds(ask_s, "ask_s")
        self._system = instance(System, system, "system")
        self._lock = system.lock()
        # by the server that is asked, and by reader
        self._wanted: dict[str, dict[str, _WantedRoom]] = {}

    def want(self, reader: str, room: str, address: str, take: Callable[[Any], bool]) -> None:
        """Ask for a room until it has a whole entry, or its reader is forgotten.

        ``take`` is called with each new entry, beside the engine's thread, and returns whether it
        is whole. It must not wait or raise. Raises ``RANGE`` if too many servers are asked, and
        ``NAME`` for one that no operator has allowed, since requests name it.
        """
        wanted = _WantedRoom(name(room, "room"), having("__call__", take, "take", "a function"))
        self._system.check_server(name(address, "address of a server"))
        with self._lock:
            if address not in self._wanted:
                action = f"ask {address}"
                number = len(self._wanted) + 1
                at_most(self._max_servers, number, "servers of rooms at a time", action)
                self._wanted[address] = {}
                self._system.start("kvplan rooms", partial(self._run, address))
            self._wanted[address][name(reader, "reader")] = wanted

    def forget(self, reader: str) -> None:
        """Ask for a reader no more. An entry of its room is taken before that, or never."""
        with self._lock:
            for readers in self._wanted.values():
                readers.pop(name(reader, "reader"), None)

    async def _run(self, address: str) -> None:
        """Ask a server for the rooms that are wanted of it, until there are none."""
        while True:
            with self._lock:
                if not self._wanted[address]:
                    del self._wanted[address]
                    return
                # the lock is not held while the server is asked
                asked = sorted(self._versions(address).items())
            try:
                for start in range(0, len(asked), MAX_ASKED):
                    versions = dict(asked[start : start + MAX_ASKED])
                    contents = await ask_again(
                        address, versions, key=self._key, system=self._system
                    )
                    self._take(address, contents)
            except KVPlanError as error:
                self._logger.warning("%s", error)
                await self._system.sleep(RETRY_S)
            else:
                await self._system.sleep(self._ask_s)

    def _versions(self, address: str) -> dict[str, str]:
        """Return the version of each room that all its readers have seen, none if they differ."""
        # a reader that has come later wants what others have seen
        versions = dict[str, str]()
        for wanted in self._wanted[address].values():
            version = versions.setdefault(wanted.room, wanted.version)
            if version != wanted.version:
                versions[wanted.room] = ""
        return versions

    def _take(self, address: str, contents: Mapping[str, RoomContent]) -> None:
        """Give the entries of rooms to those that want them."""
        if not contents:
            return
        with self._lock:
            # A reader that was forgotten meanwhile stays so.
            readers = self._wanted[address]
            for reader, wanted in [*readers.items()]:
                content = contents.get(wanted.room)
                if content is None or content.version == wanted.version:
                    continue
                wanted.version = content.version
                if wanted.take(content.entry):
                    del readers[reader]
