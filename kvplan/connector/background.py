"""Work in the background, on threads that end when nothing is left to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import attrs

from kvplan.connector.system import SYSTEM, System


@attrs.frozen(eq=False)
class _BackgroundTask:
    """A function to call, and the future that gets its value or its error."""

    run: Callable[[], Any]
    future: Future[Any] = attrs.field(factory=Future)


class Background:
    """Calls functions in the order in which they come, at most ``max_threads`` at a time.

    >>> background = Background("kvplan example", 1)
    >>> background.begin(lambda: 6 * 7).result()
    42
    """

    def __init__(self, name: str, max_threads: int, system: System = SYSTEM) -> None:
        self._name = name
        self._max_threads = max_threads
        self._system = system
        self._lock = system.condition()
        self._waiting: deque[_BackgroundTask] = deque()
        self._num_threads = 0

    def begin(self, run: Callable[[], Any]) -> Future[Any]:
        """Call a function when a thread is free. The future gets what it returns or raises."""
        task = _BackgroundTask(run)
        with self._lock:
            self._waiting.append(task)
            if self._num_threads < self._max_threads:
                self._num_threads += 1
                self._system.start(self._name, self._run)
        return task.future

    def _run(self) -> None:
        """Call the functions that wait, until there are none."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                task = self._waiting.popleft()
            try:
                value = task.run()
            except Exception as error:
                task.future.set_exception(error)
            else:
                task.future.set_result(value)
