"""The system that a connector runs on: its clock, its threads and its network.

Everything in :mod:`kvplan.connector` that waits, looks at a clock or talks to another engine takes
a :class:`System`, by default :data:`SYSTEM`, which is this machine.
:mod:`kvplan.testing.simulation` has systems whose clocks, threads and networks are virtual.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from secrets import token_hex
from types import TracebackType
from typing import Final, Protocol

import attrs

from kvplan._checks import having, instance, integer, seconds
from kvplan._text import brief_repr
from kvplan.connector.access import Access
from kvplan.connector.http import Route, Server, exchange

MAX_TOKEN_BYTES: Final = 1 << 10
"""The length of a random token."""


class Condition(Protocol):
    """The part of :class:`threading.Condition` that connectors use."""

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Let go of the lock until somebody notifies, at most for a time in seconds."""

    def notify_all(self) -> None:
        """Wake all threads that wait."""


class Listening(Protocol):
    """A server that listens at a port."""

    @property
    def port(self) -> int:
        """The port that the server listens at."""

    def close(self) -> None:
        """Stop listening."""


@attrs.frozen
class System:
    """This machine: its monotonic clock, its threads, its sockets and its random numbers."""

    __repr__ = brief_repr

    def monotonic(self) -> float:
        """Return the seconds of a clock that never goes back."""
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        """Wait for a time in seconds."""
        time.sleep(seconds(duration_s, "duration_s"))

    def token_hex(self, num_bytes: int) -> str:
        """Return random bytes in hexadecimal, which nobody can guess."""
        return token_hex(integer(num_bytes, "bytes of a token", high=MAX_TOKEN_BYTES + 1))

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Run a function on a thread that does not keep a process from ending."""
        having("__call__", run, "run of a thread", "a function")
        instance(str, name, "name of a thread")
        threading.Thread(target=run, name=name, daemon=True).start()

    def condition(self) -> Condition:
        """Return a condition with a lock of its own."""
        return threading.Condition()

    def serve(
        self,
        address: str,
        port: int,
        routes: Mapping[str, Route],
        access: Access,
        announced: str = "",
    ) -> Listening:
        """Answer questions as :class:`~kvplan.connector.http.Server` does. Raises ``PEER``."""
        return Server(address, port, routes, access, announced)

    def exchange(
        self,
        peer: str,
        address: str,
        path: str,
        timeout_s: float,
        access: Access,
        sent: bytes | None = None,
    ) -> bytes:
        """Return the answer of a peer, as :func:`kvplan.connector.http.exchange` does."""
        return exchange(peer, address, path, timeout_s, access, sent)


SYSTEM: Final = System()
"""This machine."""
