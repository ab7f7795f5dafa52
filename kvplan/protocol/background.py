"""Work in the background: coroutines that run in the order in which they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kvplan.protocol.system import Pending, System, pend

if TYPE_CHECKING:
    from logging import Logger

__all__ = ["Background"]

T = TypeVar("T")


class Background:
    """Runs coroutine functions in the order in which they come, at most ``max_running`` at a time.

    ``name`` says what they do, such as ``"fetch digests"``.
    """

    def __init__(self, name: str, max_running: int, logger: Logger, system: System) -> None:
        self._name = name
        self._max_running = max_running
        self._logger = logger
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
            await pend(pending, run(), self._name, self._logger)
