"""The driver: one event loop for all that a process says to other engines.

It is the :class:`~kvplan.protocol.system.System` of real engines. The protocol's coroutines, its
questions to other engines and its servers share the loop, which runs on one daemon thread of the
process; what computes for long has a second thread. An engine's own threads only start coroutines
and look at outcomes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import SimpleQueue
from secrets import token_hex
from typing import Any, Final, TypeVar

from kvplan.protocol import System
from kvplan.protocol.system import Route, Signal
from kvplan.protocol.system import Server as Listening
from kvplan.support import having, instance, integer, name, seconds
from kvplan_nixl.serving.access import Access
from kvplan_nixl.serving.client import Client
from kvplan_nixl.serving.http import Server

LOGGER: Final = logging.getLogger("kvplan_nixl")

MAX_TOKEN_BYTES: Final = 1 << 10
"""The length of a random token."""

T = TypeVar("T")


class _Process:
    """The event loop and the computing thread of a process, and the coroutines that run."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.client = Client()
        self._tasks = set[asyncio.Task[None]]()
        self._work = SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]]()
        # daemons, so that a process can end while a coroutine hangs
        for target, label in (
            (self.loop.run_forever, "kvplan driver"),
            (self._compute, "kvplan work"),
        ):
            threading.Thread(target=target, name=label, daemon=True).start()

    async def work(self, function: Callable[[], T]) -> T:
        outcome: asyncio.Future[T] = self.loop.create_future()
        self._work.put((function, outcome))
        return await outcome

    def _compute(self) -> None:
        while True:
            function, outcome = self._work.get()
            try:
                end = partial(_resolve, outcome, function())
            except Exception as error:
                end = partial(_fail, outcome, error)
            self.loop.call_soon_threadsafe(end)

    def start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def begin() -> None:
            task = self.loop.create_task(run(), name=name)
            # the loop has only weak references to tasks
            self._tasks.add(task)
            task.add_done_callback(self._end)

        self.loop.call_soon_threadsafe(begin)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOGGER.error("%s ended unexpectedly", task.get_name(), exc_info=task.exception())


def _resolve(outcome: asyncio.Future[Any], value: Any) -> None:
    # who waits for it may have been cancelled
    if not outcome.done():
        outcome.set_result(value)


def _fail(outcome: asyncio.Future[Any], error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)


_LOCK: Final = threading.Lock()
_PROCESSES: Final[list[_Process]] = []


def _process() -> _Process:
    """The loop of this process. A fork makes its own, since it inherits no threads."""
    with _LOCK:
        if not _PROCESSES or _PROCESSES[0].pid != os.getpid():
            _PROCESSES[:] = [_Process()]
        return _PROCESSES[0]


class _LoopSignal:
    """A signal that an engine's thread sets for a coroutine on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float | None = None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()


class Driver(System):
    """This machine, as an engine with an ``access`` uses it; by default that of this host's key.

    >>> driver = Driver(Access(key=b"a secret of all engines"))
    >>> routes = {"POST /twice": Route(lambda body: 2 * body, max_bytes=8)}
    >>> server = driver.serve("127.0.0.1", 0, routes)
    >>> driver.run(driver.exchange("a server", f"127.0.0.1:{server.port}", "/twice", 10, b"ab"))
    b'abab'
    >>> server.close()
    """

    def __init__(self, access: Access | None = None) -> None:
        self.access: Access = Access() if access is None else instance(Access, access, "access")

    def __repr__(self) -> str:
        return f"Driver({self.access!r})"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine on the loop, and return its value. Not to be called on the loop."""
        return self.submit(coroutine).result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop, for another thread, which may cancel it."""
        return asyncio.run_coroutine_threadsafe(coroutine, _process().loop)

    def monotonic(self) -> float:
        return time.monotonic()

    def token_hex(self, num_bytes: int) -> str:
        return token_hex(integer(num_bytes, "bytes of a token", high=MAX_TOKEN_BYTES + 1))

    def lock(self) -> AbstractContextManager[object]:
        return threading.Lock()

    def signal(self) -> Signal:
        return _LoopSignal(_process().loop)

    def start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        having("__call__", run, "run of a coroutine", "a coroutine function")
        _process().start(instance(str, name, "name of a coroutine"), run)

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(seconds(duration_s, "duration_s"))

    async def work(self, function: Callable[[], T]) -> T:
        return await _process().work(function)

    async def exchange(
        self, peer: str, address: str, path: str, timeout_s: float, sent: bytes | None = None
    ) -> bytes:
        client = _process().client
        return await client.exchange(peer, address, path, timeout_s, self.access, sent)

    async def unless(self, signal: Signal, coroutine: Coroutine[Any, Any, T]) -> T | None:
        task, change = asyncio.ensure_future(coroutine), asyncio.ensure_future(signal.wait())
        try:
            await asyncio.wait((task, change), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            change.cancel()

    def check_server(self, address: str) -> None:
        self.access.check_server(name(address, "address of a server"))

    def serve(
        self, host: str, port: int, routes: Mapping[str, Route], announced: str = ""
    ) -> Listening:
        return Server(host, port, routes, self.access, _process().loop, announced)
