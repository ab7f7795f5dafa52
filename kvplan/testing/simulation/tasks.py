"""Tasks: the threads of a simulation, of which one runs at a time, by a virtual clock.

A task is a function on a thread of its own that gives the turn back whenever it waits: for time,
for a condition, or for an answer. So the order of all that happens is that of one heap of events,
and depends on nothing but the seed.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Final

import attrs

FOREVER: Final = float("inf")


class KilledError(BaseException):
    """Ends a task whose machine has died. Nothing catches it but the task's thread."""


@attrs.define(eq=False)
class Event:
    """Something that happens at a time, unless it is cancelled."""

    run: Callable[[], None] | None

    def cancel(self) -> None:
        """Let nothing happen."""
        self.run = None


@attrs.define(eq=False)
class Task:
    """A function that runs on a thread of the simulation, on behalf of ``owner``.

    While it waits, ``alarm`` is the event that ends the wait. It holds ``num_locks``, with which it
    must not wait.
    """

    name: str
    owner: object
    run: Callable[[], None]
    thread: TaskThread | None = None
    alarm: Event | None = None
    is_waiting: bool = False
    is_killed: bool = False
    is_woken: bool = False
    num_locks: int = 0
    error: BaseException | None = None


class TaskThread:
    """A thread that runs one task after another, and waits between them."""

    def __init__(self, idle: list[TaskThread]) -> None:
        self._idle = idle
        # both locks are held: each is let go to give the other side the turn
        self._turn = threading.Lock()
        self._turn.acquire()
        self._back = threading.Lock()
        self._back.acquire()
        self.task: Task | None = None
        self._thread = threading.Thread(target=self._run, name="kvplan simulation", daemon=True)
        self._thread.start()

    def give_turn(self) -> None:
        """Let the task run until it waits or ends. Called by the loop of events."""
        self._turn.release()
        self._back.acquire()

    def give_back(self) -> None:
        """Give the turn back and wait for the next one. Called by the task."""
        self._back.release()
        self._turn.acquire()

    def close(self) -> None:
        """End the thread, which has no task."""
        self.give_turn()
        self._thread.join()

    def _run(self) -> None:
        self._turn.acquire()
        while self.task is not None:
            task = self.task
            try:
                # a task that was killed before its first turn does nothing
                if not task.is_killed:
                    task.run()
            except KilledError:
                pass
            except BaseException as error:
                task.error = error
            # the thread is free before the loop has the turn again
            task.thread = None
            self.task = None
            self._idle.append(self)
            self.give_back()
        self._back.release()


class TaskLoop:
    """The events of a simulation in the order of their times, and its tasks.

    ``now`` is in seconds since the beginning. Tasks run on ``threads`` that are idle, and on new
    ones if there are too few; :meth:`close` leaves all of them idle.
    """

    def __init__(self, threads: list[TaskThread]) -> None:
        self.now = 0.0
        self.num_events = 0
        self.errors: list[BaseException] = []
        self._heap: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._idle = threads
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
            # it was cancelled
            if event.run is None:
                continue
            self.now = time_s
            self.num_events += 1
            event.run()
            return True
        return False

    def start(self, owner: object, name: str, run: Callable[[], None], delay_s: float) -> None:
        """Start a task after a delay."""
        task = Task(name, owner, run)
        self._tasks[task] = None
        self.at(self.now + delay_s, lambda: self._resume(task))

    def wait(self, duration_s: float) -> bool:
        """Wait in a task until it is woken, at most for a time. Return whether it was woken."""
        task = self.running()
        if task.num_locks:
            raise AssertionError("a thread waits and holds a lock")
        # from here on somebody may wake the task
        task.is_woken = False
        task.is_waiting = True
        if duration_s < FOREVER:
            task.alarm = self.at(self.now + duration_s, lambda: self._resume(task))
        # the loop goes on, and gives the turn back when the wait ends
        assert task.thread is not None
        task.thread.give_back()
        if task.is_killed:
            raise KilledError
        return task.is_woken

    def running(self) -> Task:
        """Return the task that runs. A step of an engine is none, and must not wait."""
        if self._running is None:
            raise AssertionError("the step of an engine waits")
        return self._running

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks that have not ended."""
        return len(self._tasks)

    @property
    def is_in_task(self) -> bool:
        """Return whether a task runs."""
        return self._running is not None

    def wake(self, task: Task) -> None:
        """Wake a task that waits, after all that happens now."""
        # a second call changes nothing
        if task.is_waiting and not task.is_woken:
            task.is_woken = True
            if task.alarm is not None:
                task.alarm.cancel()
            self.at(self.now, lambda: self._resume(task))

    def kill(self, owner: object) -> None:
        """End all tasks of an owner where they wait."""
        # a task ends where it waits, so each gets the turn once more
        for task in [*self._tasks]:
            if task.owner is owner:
                task.is_killed = True
                self._resume(task)

    def close(self) -> None:
        """End all tasks."""
        for task in [*self._tasks]:
            task.is_killed = True
            self._resume(task)

    def _resume(self, task: Task) -> None:
        # it has ended, and an event of it was late
        if task not in self._tasks:
            return
        if task.alarm is not None:
            task.alarm.cancel()
            task.alarm = None
        task.is_waiting = False
        # its first turn
        if task.thread is None:
            task.thread = self._idle.pop() if self._idle else TaskThread(self._idle)
            task.thread.task = task
        thread = task.thread
        # a task that dies gets the turn within that of another one
        outer = self._running
        self._running = task
        thread.give_turn()
        self._running = outer
        # it has ended
        if thread.task is None:
            del self._tasks[task]
            if task.error is not None:
                self.errors.append(task.error)
