"""What the protocol asks of the machine that it runs on.

The protocol between engines opens no socket, starts no thread and looks at no clock. It consists of
plain objects that an engine's own thread calls, and coroutines for what has to wait: an answer from
another engine, a time, the end of a long computation. Both reach the world through a
:class:`System` alone. ``kvplan_nixl.serving`` has the real one, which runs all coroutines of a
process on one event loop; :mod:`kvplan.testing.simulation` has virtual ones, whose clocks and
networks obey a seed.

Engines call from their threads while coroutines run, so what both touch is guarded by a
:meth:`System.lock`. Nothing waits while it holds one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, Protocol, TypeVar

import attrs

from kvplan._text import brief_repr
from kvplan.errors import KVPlanError

__all__ = [
    "ANSWER_S",
    "MAX_ANSWER_BYTES",
    "PORT_END",
    "RETRY_S",
    "TOKEN_BYTES",
    "Background",
    "Pending",
    "Route",
    "Server",
    "Signal",
    "System",
]

T = TypeVar("T")

ANSWER_S: Final = 3.0
"""Seconds for which a reader waits for an answer about leases, digests or rooms."""

MAX_ANSWER_BYTES: Final = 1 << 24
"""The length of an answer: the offers of over a hundred workers."""

RETRY_S: Final = 1.0
"""Seconds after which something is asked or sent again that got no answer."""

TOKEN_BYTES: Final = 16
"""The length of random names, too long for two of them to be equal."""

PORT_END: Final = 1 << 16
"""Ports of a server are below this."""


class Pending(Generic[T]):
    """The outcome of something under way: a value, or an error, once it is ``done``.

    >>> pending = Pending[int]()
    >>> pending.done, pending.resolve(42), pending.done, pending.result()
    (False, None, True, 42)
    """

    def __init__(self) -> None:
        self.done = False
        self.error: KVPlanError | None = None
        self._value: T | None = None

    def resolve(self, value: T) -> None:
        """Set the value."""
        self._value = value
        # last, since another thread may look at any time
        self.done = True

    def fail(self, error: KVPlanError) -> None:
        """Set the error."""
        self.error = error
        self.done = True

    def result(self) -> T:
        """Return the value, or raise the error, of what is ``done``."""
        assert self.done
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]


class Signal(Protocol):
    """Wakes a coroutine that waits for a change."""

    def set(self) -> None:
        """Wake the coroutine that waits, or the next one to wait. Any thread may call this."""

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the signal was set, at most for a time in seconds, and clear it."""


class Server(Protocol):
    """A server that listens at a port."""

    @property
    def port(self) -> int:
        """The port that the server listens at."""

    def close(self) -> None:
        """Stop listening."""


@attrs.frozen
class Route:
    """What a server does at one path: ``answer`` gets a body of at most ``max_bytes``.

    It also gets the ``num_segments`` of the path that follow the route's own. It raises
    :class:`~kvplan.KVPlanError` for what it refuses. It must not block; a coroutine function may
    await, and is cancelled where the peer hangs up.
    """

    answer: Callable[..., bytes | Coroutine[Any, Any, bytes]]
    max_bytes: int = 0
    num_segments: int = 0

    __repr__ = brief_repr


class System(ABC):
    """A machine as an engine's protocol uses it."""

    @abstractmethod
    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""

    @abstractmethod
    def token_hex(self, num_bytes: int) -> str:
        """Random bytes in hexadecimal, which cannot be guessed."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[object]:
        """A new lock between an engine's thread and coroutines."""

    @abstractmethod
    def signal(self) -> Signal:
        """A new signal."""

    @abstractmethod
    def start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine. Any thread may call this; it does not wait.

        ``run`` handles its errors: one that it raises is a fault, for the log. The process may end
        before the coroutine does.
        """

    @abstractmethod
    async def sleep(self, duration_s: float) -> None:
        """Wait for a time in seconds."""

    @abstractmethod
    async def work(self, function: Callable[[], T]) -> T:
        """Call a function that computes for long on a worker thread, one function at a time."""

    @abstractmethod
    async def exchange(
        self, peer: str, address: str, path: str, timeout_s: float, sent: bytes | None = None
    ) -> bytes:
        """Return the answer of ``peer`` at ``host:port`` to GET, or to POST if something is sent.

        The whole answer comes within ``timeout_s`` seconds. Raises ``PEER``.
        """

    @abstractmethod
    async def unless(self, signal: Signal, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """Return the value of a coroutine, or cancel it and return None if the signal is set."""

    @abstractmethod
    def check_server(self, address: str) -> None:
        """Refuse a ``host:port`` that a request names, but no operator. Raises ``NAME``."""

    @abstractmethod
    def serve(
        self, host: str, port: int, routes: Mapping[str, Route], announced: str = ""
    ) -> Server:
        """Answer at ``port`` of ``host``, or at a free port if that is 0. Raises ``PEER``.

        Each of the ``routes`` has a method and a path, such as ``POST /claims``. Questions may name
        ``announced`` in place of ``host``.
        """


async def pend(pending: Pending[T], awaitable: Awaitable[T], action: str, **details: Any) -> None:
    """Await something, and let its outcome be that of ``pending``, whatever it raises.

    An unexpected exception becomes ``PEER``, which fails what waits for this. It is raised again.
    """
    try:
        pending.resolve(await awaitable)
    except KVPlanError as error:
        pending.fail(error)
    except Exception as error:
        error.add_note(f"cannot {action}")
        hint = "the log has the traceback of this error, which is a fault of kvplan"
        got = repr(error)
        details["error"] = type(error).__name__
        pending.fail(KVPlanError("PEER", action, expected="a value", got=got, hint=hint, **details))
        raise


class Background:
    """Runs coroutine functions in the order in which they come, at most ``max_running`` at a time.

    ``name`` says what they do, such as ``"fetch digests"``.
    """

    def __init__(self, name: str, max_running: int, system: System) -> None:
        self._name = name
        self._max_running = max_running
        self._system = system
        self._lock = system.lock()
        self._waiting: deque[tuple[Callable[[], Awaitable[Any]], Pending[Any]]] = deque()
        self._num_running = 0

    def submit(self, run: Callable[[], Awaitable[T]]) -> Pending[T]:
        """Run a coroutine function when it is its turn. Any thread may call this."""
        pending = Pending[T]()
        with self._lock:
            self._waiting.append((run, pending))
            if self._num_running < self._max_running:
                self._num_running += 1
                self._system.start(f"kvplan {self._name}", self._run)
        return pending

    async def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_running -= 1
                    return
                run, pending = self._waiting.popleft()
            try:
                await pend(pending, run(), self._name)
            except Exception:
                # the others go on
                self._system.start(f"kvplan {self._name}", self._run)
                raise


class LongPolls:
    """Requests that a server holds until it can answer them, or for a time.

    A reader that asked again and again would learn of the answer later, and cost more.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._lock = system.lock()
        # by what may change: the signals of the requests that wait for it, in their order
        self._waiting: dict[Hashable, dict[Signal, None]] = {}
        self._num_waiting = 0

    def wake(self, key: Hashable) -> None:
        """Look again for the requests that wait for a key to change. Any thread may call this."""
        with self._lock:
            for signal in self._waiting.pop(key, ()):
                signal.set()

    async def hold(
        self, keys: Collection[Hashable], look: Callable[[], T | None], wait_s: float, most: int
    ) -> T | None:
        """Return what ``look`` returns, once that is not None or ``wait_s`` seconds are over.

        It looks again when one of the ``keys`` has changed. Of more than ``most`` requests at a
        time, each of which keeps a connection, the last ones do not wait.
        """
        until = self._system.monotonic() + wait_s
        signal = self._system.signal()
        with self._lock:
            waits = self._num_waiting < most
            self._num_waiting += 1
        try:
            while True:
                # before each look, so that no change is missed; a change takes the entry
                with self._lock:
                    for key in keys:
                        self._waiting.setdefault(key, {})[signal] = None
                answer = look()
                left_s = until - self._system.monotonic()
                if answer is not None or not waits or left_s <= 0:
                    return answer
                await signal.wait(left_s)
        finally:
            with self._lock:
                self._num_waiting -= 1
                for key in keys:
                    signals = self._waiting.get(key, {})
                    signals.pop(signal, None)
                    if not signals:
                        self._waiting.pop(key, None)
