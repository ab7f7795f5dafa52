"""Rooms: decode asks for what prefill has computed of its requests.

Both engines know a request by the name of its room before prefill has computed it: by the number
that SGLang gives it, or by the transfer id that a router of vLLM gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplan._checks import at_most, having, instance, integer, name, seconds
from kvplan.errors import KVPlanError
from kvplan.protocol.claims import MAX_SOURCES
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.room_contents import MAX_ASKED, WAIT_S, RoomsAnswer, ask_again
from kvplan.protocol.system import RETRY_S, Signal, System

if TYPE_CHECKING:
    from logging import Logger

MAX_SERVERS: Final = MAX_SOURCES
"""Servers that decode asks at a time, unless it says otherwise."""

TIMEOUT_S: Final = 300.0
"""Seconds that prefill has for each entry of a room, by default."""

ASK_S: Final = 0.01
"""Seconds between an answer and the next question to a server, by default."""


@attrs.define(eq=False)
class _WantedRoom:
    """A room that a reader asks for: what takes its entries, and the version that it took last.

    ``start`` is that of the server which has answered first. Prefill has time for another entry
    ``until`` then.
    """

    room: str
    take: Callable[[Any], bool]
    until: float
    version: str = ""
    start: str = ""


class Rooms:
    """Asks at most ``max_servers`` servers about rooms.

    A server is asked again ``ask_s`` after it has answered, and holds a question until there is
    something new. A room whose server has restarted gets an entry with an ``error``, since its
    prefill has restarted too. Prefill has ``timeout_s`` for each entry. Handoffs are signed with
    ``key``.
    """

    def __init__(
        self,
        logger: Logger,
        key: SharedKey,
        system: System,
        *,
        timeout_s: float = TIMEOUT_S,
        max_servers: int = MAX_SERVERS,
        ask_s: float = ASK_S,
    ) -> None:
        self._logger: Logger = having("warning", logger, "logger", "a logger")
        self._timeout_s: float = seconds(timeout_s, "timeout_s")
        self._max_servers: int = integer(max_servers, "max_servers")
        self._key = instance(SharedKey, key, "key of rooms")
        self._ask_s: float = seconds(ask_s, "ask_s")
        self._system = instance(System, system, "system")
        self._lock = system.lock()
        # by reader, until it is forgotten
        self._rooms: dict[str, _WantedRoom] = {}
        # by the server that is asked, and by reader, until the whole entry has come
        self._wanted: dict[str, dict[str, _WantedRoom]] = {}
        self._changes: dict[str, Signal] = {}

    def want(self, reader: str, room: str, address: str, take: Callable[[Any], bool]) -> None:
        """Ask for a room until it has a whole entry, or its reader is forgotten.

        ``take`` is called with each new entry, on the event loop's thread, and returns whether it
        is whole. It must not wait or raise. Raises ``RANGE`` if too many servers are asked, and
        ``NAME`` for one that no operator has allowed, since requests name it.
        """
        until = self._system.monotonic() + self._timeout_s
        having("__call__", take, "take", "a function")
        wanted = _WantedRoom(name(room, "room"), take, until)
        self._system.check_server(name(address, "address of a server"))
        with self._lock:
            if address not in self._wanted:
                action = f"ask {address}"
                number = len(self._wanted) + 1
                at_most(self._max_servers, number, "servers of rooms at a time", action)
                self._wanted[address] = {}
                self._changes[address] = self._system.signal()
                self._system.start("kvplan rooms", partial(self._run, address))
            else:
                self._changes[address].set()
            self._wanted[address][name(reader, "reader")] = wanted
            self._rooms[reader] = wanted

    def silence(self, reader: str) -> KVPlanError | None:
        """Return an error if the room of a reader has got no entry in time, None if it has."""
        with self._lock:
            wanted = self._rooms.get(name(reader, "reader"))
        if wanted is None or self._system.monotonic() <= wanted.until:
            return None
        action = f"read request {wanted.room}"
        expected = f"prefill to compute it within {self._timeout_s:g} s"
        return KVPlanError("PEER", action, expected=expected, got="nothing")

    def forget(self, reader: str) -> None:
        """Ask for a reader no more. An entry of its room is taken before that, or never."""
        with self._lock:
            self._rooms.pop(name(reader, "reader"), None)
            for address, readers in self._wanted.items():
                if readers.pop(reader, None) is not None and not readers:
                    self._changes[address].set()

    async def _run(self, address: str) -> None:
        """Ask a server for the rooms that are wanted of it, until there are none."""
        changed = self._changes[address]
        while True:
            with self._lock:
                wanted = [*self._wanted[address].values()]
                if not wanted:
                    del self._wanted[address], self._changes[address]
                    return
                asked = sorted(self._versions(address).items())
            # a server that is asked for more has to answer each part at once
            wait_s = WAIT_S if len(asked) <= MAX_ASKED else 0.0
            try:
                for start in range(0, len(asked), MAX_ASKED):
                    question = ask_again(
                        address,
                        dict(asked[start : start + MAX_ASKED]),
                        wait_s=wait_s,
                        key=self._key,
                        system=self._system,
                    )
                    answer = await self._system.unless(changed, question)
                    # another room is wanted meanwhile, which is asked for with the others
                    if answer is None:
                        break
                    self._take(address, wanted, answer)
                else:
                    await self._system.sleep(self._ask_s)
            except KVPlanError as error:
                self._logger.warning("%s", error)
                await self._system.sleep(RETRY_S)

    def _versions(self, address: str) -> dict[str, str]:
        """Return the version of each room that all its readers have seen, none if they differ."""
        # a reader that has come later wants what others have seen
        versions = dict[str, str]()
        for wanted in self._wanted[address].values():
            version = versions.setdefault(wanted.room, wanted.version)
            if version != wanted.version:
                versions[wanted.room] = ""
        return versions

    def _take(self, address: str, asked: Sequence[_WantedRoom], answer: RoomsAnswer) -> None:
        """Give the entries of rooms to those that want them."""
        with self._lock:
            for wanted in asked:
                wanted.start = wanted.start or answer.start
            # A reader that was forgotten meanwhile stays so.
            readers = self._wanted[address]
            for reader, wanted in [*readers.items()]:
                if wanted.start not in ("", answer.start):
                    wanted.take({"error": "its server has restarted, and lost what it had"})
                    del readers[reader]
                    continue
                content = answer.contents.get(wanted.room)
                if content is None or content.version == wanted.version:
                    continue
                wanted.version = content.version
                wanted.until = self._system.monotonic() + self._timeout_s
                if wanted.take(content.entry):
                    del readers[reader]
