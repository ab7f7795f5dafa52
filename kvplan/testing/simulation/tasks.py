"""Tasks: the coroutines of a simulation, by a virtual clock.

A coroutine gives the turn back where it waits: for time, for a signal, or for an answer. So the
order of all that happens is that of one heap of events, and depends on nothing but the seed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final

import attrs

FOREVER: Final = float("inf")


class BrokenRuleError(BaseException):
    """A rule of the simulation does not hold: ``rule`` names it.

    It is no Exception, so a connector that goes on after errors of any kind does not catch it.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class BlockedError(Exception):
    """What a function waits for on a worker thread is not there yet."""


@attrs.define(eq=False)
class Event:
    """Something that happens at a time, unless it is cancelled."""

    run: Callable[[], None] | None

    def cancel(self) -> None:
        """Let nothing happen."""
        self.run = None


@attrs.define(eq=False)
class Task:
    """A coroutine that runs on behalf of ``owner``; ``alarm`` ends its wait."""

    name: str
    owner: object
    run: Callable[[], Coroutine[Any, Any, None]]
    coroutine: Coroutine[Any, Any, None] | None = None
    alarm: Event | None = None
    is_waiting: bool = False
    is_woken: bool = False


class _Turn:
    """Gives the turn back to the loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class TaskLoop:
    """The events of a simulation in the order of their times, and its tasks.

    ``now`` is in seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self.errors: list[BaseException] = []
        self._heap: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._tasks: dict[Task, None] = {}
        self._running: Task | None = None

    def at(self, time_s: float, run: Callable[[], None]) -> Event:
        """Let something happen at a time, or now if that has passed."""
        event = Event(run)
        # events of one time happen in the order in which they were made
        heapq.heappush(self._heap, (max(time_s, self.now), next(self._numbers), event))
        return event

    def advance(self, until_s: float) -> bool:
        """Let the next event happen, if it is not later than a time. Return whether there was."""
        while self._heap and self._heap[0][0] <= until_s:
            time_s, _, event = heapq.heappop(self._heap)
            if event.run is None:
                continue
            self.now = time_s
            self.num_events += 1
            event.run()
            return True
        return False

    def start(
        self,
        owner: object,
        name: str,
        run: Callable[[], Coroutine[Any, Any, None]],
        delay_s: float,
    ) -> Task:
        """Start a task after a delay."""
        task = Task(name, owner, run)
        self._tasks[task] = None
        self.at(self.now + delay_s, lambda: self._resume(task))
        return task

    async def wait(self, duration_s: float) -> bool:
        """Wait in a task until it is woken, at most for a time. Return whether it was woken."""
        task = self.running()
        task.is_woken = False
        task.is_waiting = True
        if duration_s < FOREVER:
            task.alarm = self.at(self.now + duration_s, lambda: self._resume(task))
        await _Turn()
        return task.is_woken

    def running(self) -> Task:
        """Return the task that runs."""
        assert self._running is not None
        return self._running

    @property
    def num_tasks(self) -> int:
        """The number of tasks that have not ended."""
        return len(self._tasks)

    def wake(self, task: Task) -> None:
        """Wake a task that waits, after all that happens now."""
        if task.is_waiting and not task.is_woken:
            task.is_woken = True
            if task.alarm is not None:
                task.alarm.cancel()
            self.at(self.now, lambda: self._resume(task))

    def kill(self, owner: object) -> None:
        """End all tasks of an owner where they wait."""
        for task in [*self._tasks]:
            if task.owner is owner:
                self.end(task)

    def end(self, task: Task) -> None:
        """End a task where it waits, or at its next wait if it runs."""
        self._tasks.pop(task, None)
        if task.coroutine is not None and task is not self._running:
            task.coroutine.close()

    def close(self) -> None:
        """End all tasks."""
        for task in [*self._tasks]:
            if task.coroutine is not None:
                task.coroutine.close()
        self._tasks.clear()

    def _resume(self, task: Task) -> None:
        # it was killed, or an event of it was late
        if task not in self._tasks:
            return
        if task.alarm is not None:
            task.alarm.cancel()
            task.alarm = None
        task.is_waiting = False
        if task.coroutine is None:
            task.coroutine = task.run()
        self._running = task
        try:
            task.coroutine.send(None)
        except StopIteration:
            self._tasks.pop(task, None)
        except Exception as error:
            self._tasks.pop(task, None)
            self.errors.append(error)
        finally:
            self._running = None
