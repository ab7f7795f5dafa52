"""Threads of a simulation: the product's own, of which one runs at a time, by the virtual clock of its host.

A module that starts threads gets :data:`THREADING`, :data:`TIME`, a :class:`VirtualPool` and a :class:`VirtualQueue` in
place of Python's. A thread gives the turn back where it waits, or where the simulation lets something take time
(:meth:`World.pause`), so a seed is one order of all that happens. A thread that waits without a timeout is no task of
the simulation's loop: idle threads keep no fleet from ending. When a host dies, its threads end where they wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from kvplan.testing.simulation.network import Host
from kvplan.testing.simulation.scenario import HEALED_S
from kvplan.testing.simulation.tasks import FOREVER, Task

EPOCH_S = 1.7e9


class EndOfThread(BaseException):
    """Ends a thread whose host has died."""


class World:
    """The threads of one fleet, the one that runs, and the host on whose behalf the simulation itself calls."""

    def __init__(self) -> None:
        self.threads: list[VirtualThread] = []
        self.running: VirtualThread | None = None
        self._host: Host | None = None

    @property
    def host(self) -> Host | None:
        """The host whose code runs, ``None`` outside of fleets."""
        return self.running.host if self.running is not None else self._host

    @contextmanager
    def on(self, host: Host) -> Iterator[None]:
        """Let threads that start here belong to a host."""
        self._host, before = host, self._host
        try:
            yield
        finally:
            self._host = before

    def pause(self, duration_s: float) -> None:
        """Let a thread wait, and others go on. What the simulation itself calls does not wait."""
        if self.running is not None:
            self.running.wait(lambda: False, duration_s)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait in a thread until a condition holds, and return whether it does."""
        if self.running is not None:
            self.running.wait(condition, FOREVER if timeout_s is None else timeout_s)
        return condition()

    def notify(self) -> None:
        """Wake the threads whose conditions hold now."""
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        for thread in self.threads:
            thread.wake()

    def end(self) -> None:
        """End all threads."""
        for thread in self.threads:
            thread.end()
        self.threads.clear()


WORLD = World()


class VirtualThread:
    """A thread of a host in a simulation."""

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", daemon: bool = True
    ) -> None:
        assert WORLD.host is not None
        self.host = WORLD.host
        # the thread that has started it, or the one that has started that
        self.root: VirtualThread = self if WORLD.running is None else WORLD.running.root
        self._name = name
        self._run = lambda: target(*args)
        self._thread: threading.Thread | None = None
        self._task: Task | None = None
        # each is released by one side, and acquired by the other
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._condition: Callable[[], bool] | None = None
        self._wait_s = 0.0
        self._is_ending = False
        self._is_started = self._is_over = False
        self._error: BaseException | None = None

    def start(self) -> None:
        """Run from the next event of the simulation on."""
        self._is_started = True
        WORLD.threads.append(self)
        self._begin_task()

    def is_alive(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._is_started and not self._is_over

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        WORLD.wait_for(lambda: not self.is_alive(), timeout)

    def wait(self, condition: Callable[[], bool], duration_s: float) -> None:
        """Give the turn back, as the thread that runs, until a condition holds or some time has passed."""
        now = self.host.monotonic
        until_s = now() + duration_s
        while not condition() and (left_s := until_s - now()) > 1e-9:
            if self._is_ending:
                raise EndOfThread
            self._condition, self._wait_s = condition, left_s
            self._back.release()
            self._go.acquire()
        if self._is_ending:
            raise EndOfThread

    def wake(self) -> None:
        """Let it look at its condition, if that holds."""
        if self._condition is None or self.host.is_dead or not self._condition():
            return
        self._condition = None
        if self._task is None:
            self._begin_task()
        else:
            self.host.loop.wake(self._task)

    def end(self) -> None:
        """End it where it waits."""
        self._is_ending = True
        if self._thread is None:
            self._is_over = True
        elif not self._is_over:
            self._resume()

    def _begin_task(self) -> None:
        self._task = self.host.loop.start(self.host, self._name, self._drive, 0.0)

    async def _drive(self) -> None:
        """Let the thread run until it waits without a timeout, or ends."""
        try:
            # a frozen host goes on later
            await self.host.wait(0.0)
            self._resume()
            while not self._is_over and self._wait_s < FOREVER:
                await self.host.wait(self._wait_s)
                self._resume()
        except GeneratorExit:
            self.end()
            raise
        self._task = None
        if self._error is not None:
            raise self._error

    def _resume(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._call, daemon=True)
            self._thread.start()
        before, WORLD.running = WORLD.running, self
        self._condition = None
        self._go.release()
        self._back.acquire()
        WORLD.running = before
        if self._is_over:
            WORLD.notify()

    def _call(self) -> None:
        self._go.acquire()
        try:
            self._run()
        except EndOfThread:
            pass
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._back.release()


class VirtualLock:
    """A lock between threads. Only threads hold it while others run."""

    def __init__(self) -> None:
        self._is_held = False
        self._num_waiting = 0

    def __enter__(self) -> None:
        self._num_waiting += 1
        assert WORLD.wait_for(lambda: not self._is_held)
        self._num_waiting -= 1
        self._is_held = True

    def __exit__(self, *error: object) -> None:
        self._is_held = False
        if self._num_waiting:
            WORLD.notify()


class VirtualQueue:
    """A queue, as ``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items = deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)
        WORLD.notify()

    def get(self) -> Any:
        WORLD.wait_for(lambda: bool(self._items))
        return self._items.popleft()


class VirtualEvent:
    """An event. When faults are over, whoever waits a while for one waits for ever: nothing more is evicted."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        WORLD.notify()

    def wait(self, timeout: float | None = None) -> bool:
        assert WORLD.host is not None
        until_s = _monotonic() + (FOREVER if timeout is None else timeout)
        while not self._is_set and (left_s := until_s - _monotonic()) > 1e-6:
            is_over = WORLD.host.loop.now > HEALED_S
            WORLD.wait_for(lambda: self._is_set, None if is_over else min(left_s, 5.0))
        return self._is_set


class VirtualPool:
    """A pool of threads, as ``concurrent.futures.ThreadPoolExecutor``: a thread ends when nothing waits."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._max_workers = max_workers
        self._name = thread_name_prefix
        self._waiting = deque[tuple[Future[Any], Callable[[], Any]]]()
        self._num_running = 0

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = Future[Any]()
        self._waiting.append((future, lambda: call(*arguments)))
        if self._num_running < self._max_workers:
            self._num_running += 1
            VirtualThread(self._work, name=self._name).start()
        return future

    def _work(self) -> None:
        while self._waiting:
            future, call = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)
            WORLD.notify()
        self._num_running -= 1

    def map(self, call: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(call, item) for item in items]
        try:
            for future in futures:
                WORLD.wait_for(future.done)
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._waiting.clear()
        if wait:
            WORLD.wait_for(lambda: not self._num_running)

    def __enter__(self) -> VirtualPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def _monotonic() -> float:
    return time.monotonic() if WORLD.host is None else WORLD.host.monotonic()


def _time() -> float:
    return time.time() if WORLD.host is None else EPOCH_S + WORLD.host.loop.now


THREADING = SimpleNamespace(Thread=VirtualThread, Lock=VirtualLock, Event=VirtualEvent)
TIME = SimpleNamespace(monotonic=_monotonic, time=_time)
