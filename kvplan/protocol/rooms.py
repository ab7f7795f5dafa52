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
from kvplan.protocol.room_contents import MAX_ASKED, WAIT_S, RoomNews, poll_rooms
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
class _Subscription:
    """A reader's subscription to a room, and the version of the last entry delivered.

    ``start`` is the incarnation of the server that answered first. Prefill has ``until`` then to
    publish another entry.
    """

    room: str
    deliver: Callable[[Any], bool]
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
        # by reader, until it unsubscribes
        self._by_reader: dict[str, _Subscription] = {}
        # by server and by reader, until the whole entry has come
        self._by_server: dict[str, dict[str, _Subscription]] = {}
        self._changes: dict[str, Signal] = {}

    def subscribe(
        self, reader: str, room: str, address: str, deliver: Callable[[Any], bool]
    ) -> None:
        """Poll a room until it has a whole entry, or the reader unsubscribes.

        ``deliver`` is called with each new entry, on the event loop's thread, and returns whether
        it is whole. It must not wait or raise. Raises ``RANGE`` for too many servers, and ``NAME``
        for one that no operator has allowed, since requests name it.
        """
        until = self._system.monotonic() + self._timeout_s
        having("__call__", deliver, "deliver", "a function")
        subscription = _Subscription(name(room, "room"), deliver, until)
        self._system.check_server(name(address, "address of a server"))
        with self._lock:
            if address not in self._by_server:
                action = f"ask {address}"
                number = len(self._by_server) + 1
                at_most(self._max_servers, number, "servers of rooms at a time", action)
                self._by_server[address] = {}
                self._changes[address] = self._system.signal()
                self._system.start("kvplan rooms", partial(self._run, address))
            else:
                self._changes[address].set()
            self._by_server[address][name(reader, "reader")] = subscription
            self._by_reader[reader] = subscription

    def silence(self, reader: str) -> KVPlanError | None:
        """Return an error if the room of a reader has got no entry in time, None if it has."""
        with self._lock:
            subscription = self._by_reader.get(name(reader, "reader"))
        if subscription is None or self._system.monotonic() <= subscription.until:
            return None
        action = f"read request {subscription.room}"
        expected = f"prefill to compute it within {self._timeout_s:g} s"
        return KVPlanError(
            "PEER", action, expected=expected, got="nothing", timeout_s=self._timeout_s
        )

    def unsubscribe(self, reader: str) -> None:
        """Stop polling for a reader. Nothing is delivered to it after this returns."""
        with self._lock:
            self._by_reader.pop(name(reader, "reader"), None)
            for address, readers in self._by_server.items():
                if readers.pop(reader, None) is not None and not readers:
                    self._changes[address].set()

    async def _run(self, address: str) -> None:
        """Poll a server for its subscriptions, until there are none."""
        changed = self._changes[address]
        while True:
            with self._lock:
                subscriptions = [*self._by_server[address].values()]
                if not subscriptions:
                    del self._by_server[address], self._changes[address]
                    return
                asked = sorted(self._versions(address).items())
                # all that have had an answer know the same start
                start = max(subscription.start for subscription in subscriptions)
            # too many rooms for one question: no question may hold up the next one
            wait_s = WAIT_S if len(asked) <= MAX_ASKED else 0.0
            try:
                for first in range(0, len(asked), MAX_ASKED):
                    question = poll_rooms(
                        address,
                        dict(asked[first : first + MAX_ASKED]),
                        wait_s=wait_s,
                        start=start,
                        key=self._key,
                        system=self._system,
                    )
                    answer = await self._system.unless(changed, question)
                    # a new subscription joins the next question
                    if answer is None:
                        break
                    self._deliver(address, subscriptions, answer)
                else:
                    await self._system.sleep(self._ask_s)
            except KVPlanError as error:
                self._logger.warning("%s", error)
                await self._system.sleep(RETRY_S)

    def _versions(self, address: str) -> dict[str, str]:
        """Return the version of each room that all its readers have seen, empty if they differ."""
        # a later reader still needs what earlier ones have seen
        versions = dict[str, str]()
        for subscription in self._by_server[address].values():
            version = versions.setdefault(subscription.room, subscription.version)
            if version != subscription.version:
                versions[subscription.room] = ""
        return versions

    def _deliver(self, address: str, asked: Sequence[_Subscription], answer: RoomNews) -> None:
        """Deliver new entries to the subscribed readers."""
        with self._lock:
            for subscription in asked:
                subscription.start = subscription.start or answer.start
            # A reader may have unsubscribed while the server was asked.
            readers = self._by_server[address]
            for reader, subscription in [*readers.items()]:
                if subscription.start not in ("", answer.start):
                    subscription.deliver(
                        {"error": "its server has restarted, and lost what it had"}
                    )
                    del readers[reader]
                    continue
                content = answer.contents.get(subscription.room)
                if content is None or content.version == subscription.version:
                    continue
                subscription.version = content.version
                subscription.until = self._system.monotonic() + self._timeout_s
                if subscription.deliver(content.entry):
                    del readers[reader]
