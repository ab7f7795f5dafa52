"""Stalls: a call that hangs is given up, and moves no byte afterwards; a slow one goes on.

What a guard waits for is not measured by a clock here, which runs on when the machine does something else: its periods
end when the store hangs, or when a step was made (:class:`Timed`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvplan import KVPlanError
from kvplan_nixl.serving.store import MemoryBackend, StallGuard, StoreClient
from kvplan_nixl.serving.store.backends import FileBytes
from kvplan_nixl.serving.store.parallel import FILES_AT_ONCE
from tests.blocking import wait_until
from tests.store.engines import BLOCKS, PAGE, PROMPT, QWEN, EngineWithStore, saved

STALL_S = 0.2
PAGE_BYTES = 8 << 10
"""The bytes of a page, so that a buffer has one of them."""

PAGE_FILES = 4
"""A page has one for each head."""


class HangingBackend(MemoryBackend):
    """A store whose files hang after ``hangs_after`` of them until it is told to answer, or come one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_answering = threading.Event()
        self.num_calls = 0
        self.num_hanging = 0
        self._lock = threading.Lock()
        self.hangs_after: float = float("inf")
        self.is_slow = False
        self._next = threading.Semaphore(0)
        self._num_waiting = 0
        self.is_search_hanging = False

    def let_one_go(self) -> None:
        """Answer one of the calls that wait, if any does."""
        with self._lock:
            is_any = self._num_waiting > 0
            self._num_waiting -= is_any
        if is_any:
            self._next.release()

    def _hang(self) -> None:
        with self._lock:
            self.num_hanging += not self.is_answering.is_set()
        assert self.is_answering.wait(60)

    def _wait(self) -> None:
        with self._lock:
            self.num_calls += 1
            is_hanging = self.num_calls > self.hangs_after
            self._num_waiting += self.is_slow
        if self.is_slow:
            assert self._next.acquire(timeout=60)
        if is_hanging:
            self._hang()

    def files(self, page: str) -> tuple[str, ...]:
        if self.is_search_hanging:
            self._hang()
        return super().files(page)

    def touch(self, pages: Sequence[str], used_s: float, first_page: int = 0) -> None:
        for _ in pages:
            self._wait()
        super().touch(pages, used_s, first_page)

    def put(self, name: str, chunks: Sequence[FileBytes]) -> bool:
        self._wait()
        return super().put(name, chunks)

    def open(self, name: str) -> Any:
        # headers come at once
        self._wait()
        return super().open(name)


class Timed:
    """Gives guards threads whose periods end when a store hangs, or when something in it has changed.

    A guard waits for its call by ``Thread.join`` with a limit of ``stall_s``. Such a join ends here when the call has
    ended, when ``num_files`` more of the store's files hang, or when the call has made a step: ``num_steps`` tells how
    many steps its client has made. A slow store answers one call after the other meanwhile.
    """

    def __init__(self, backend: HangingBackend, num_files: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_periods = 0
        self.limits_s: set[float] = set()
        self.num_steps = lambda: 0
        timed = self

        class Thread(threading.Thread):
            def start(self) -> None:
                self.hangs_at = backend.num_hanging + num_files
                super().start()

            def join(self, timeout: float | None = None) -> None:
                if timeout is None:
                    super().join()
                    return
                timed.limits_s.add(timeout)
                timed.num_periods += 1
                before = timed.num_steps()

                def is_over() -> bool:
                    backend.let_one_go()
                    has_changed = timed.num_steps() != before or backend.num_hanging >= self.hangs_at
                    return has_changed or not self.is_alive()

                wait_until(is_over)

        monkeypatch.setattr("kvplan_nixl.serving.store.stalls.threading", SimpleNamespace(Thread=Thread))


class Guarded:
    """An engine with a store, whose client is guarded."""

    def __init__(self, backend: HangingBackend, seed: int = 0, pause_s: float = 0.0) -> None:
        self.engine = EngineWithStore.of(QWEN, backend, seed)
        (self.cache,) = self.engine.caches
        self.clients: list[StoreClient] = []
        self.backend = backend
        self.guard = StallGuard(self.make_client, stall_s=STALL_S, pause_s=pause_s)

    def make_client(self) -> StoreClient:
        client = StoreClient(self.backend, self.cache.worker, tokens_per_page=PAGE, buffer_bytes=PAGE_BYTES)
        self.clients.append(client)
        return client

    def load(self) -> None:
        self.guard.call(lambda client: client.load(client.chain(PROMPT), BLOCKS, client.needs(0, 96)))

    def save(self) -> int:
        return self.guard.call(lambda client: client.save(client.chain(PROMPT), BLOCKS, client.needs(0, 96)))

    def contents(self) -> dict[str, bytes]:
        return self.cache.contents(BLOCKS["attn"].ids.tolist())

    def settle(self) -> None:
        """Let calls that hang go on to their end."""
        self.backend.is_answering.set()
        for call in self.guard._hanging:
            call.thread.join()


@pytest.fixture
def backend() -> HangingBackend:
    return HangingBackend()


@pytest.fixture(autouse=True)
def timed(backend: HangingBackend, monkeypatch: pytest.MonkeyPatch) -> Timed:
    """A store hangs when it answers for none of the files that a client reads or writes at once."""
    return Timed(backend, FILES_AT_ONCE, monkeypatch)


def test_a_long_prefix_may_take_long_to_use(
    backend: HangingBackend, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some pages at a time are noted as used, or pinned, so the call goes on; the last ones are evicted first."""
    monkeypatch.setattr("kvplan_nixl.serving.store.client.PAGES_AT_ONCE", 2)
    saved(backend)
    user = Guarded(backend)
    timed.num_steps = lambda: sum(client.num_steps for client in user.clients)
    backend.is_slow = True
    for action in (StoreClient.use, StoreClient.pin):
        timed.num_periods = 0
        user.guard.call(lambda client, action=action: action(client, client.chain(PROMPT), 96))  # type: ignore[misc]
        assert timed.num_periods > 2
    assert len(user.clients) == 1
    (client,) = user.clients
    times = {entry.name.split("/")[1]: entry.used_s for entry in backend.entries() if not entry.name.endswith("pin")}
    in_order = [times[key] for key in client.chain(PROMPT).keys[:6]]
    assert in_order == sorted(in_order, reverse=True)
    assert len({*in_order}) == 6


def test_no_byte_of_a_load_that_stalls_lands_later(backend: HangingBackend) -> None:
    """What answers late is read into a buffer that nobody uses, and the next client loads all of it."""
    writer = saved(backend)
    reader = Guarded(backend)
    backend.hangs_after = backend.num_calls + 2 * PAGE_FILES
    with pytest.raises(KVPlanError, match=r"^BACKEND: cannot use a store: expected an answer, got nothing for 0.2 s"):
        reader.load()
    before = reader.contents()
    assert any(map(any, before.values()))
    reader.settle()
    assert reader.contents() == before
    reader.load()
    assert len(reader.clients) == 2
    assert reader.contents() == writer.caches[0].contents(BLOCKS["attn"].ids.tolist())


def test_a_save_that_stalls_takes_nothing_from_blocks_later(backend: HangingBackend) -> None:
    """Another request may have them by then: the pages that were read before are saved, and no others."""
    writer = Guarded(backend, seed=5)
    before = writer.contents()
    backend.hangs_after = 2 * PAGE_FILES
    with pytest.raises(KVPlanError, match=r"^BACKEND: "):
        writer.save()
    for memory in writer.cache.memory.values():
        memory[:] = 77
    writer.settle()
    reader = EngineWithStore.of(QWEN, backend)
    stop = reader.find(PROMPT)
    assert stop == 3 * PAGE
    reader.load(PROMPT, BLOCKS, stop)
    loaded = reader.caches[0].contents(BLOCKS["attn"].ids.tolist()[:3])
    assert loaded == {name: data[: len(data) // 2] for name, data in before.items()}


def test_a_slow_store_is_waited_for(backend: HangingBackend, timed: Timed) -> None:
    """As long as pages move, however long all of them take."""
    writer = saved(backend)
    reader = Guarded(backend)
    timed.num_steps = lambda: sum(client.num_steps for client in reader.clients)
    backend.is_slow = True
    reader.load()
    assert timed.num_periods > 2
    assert timed.limits_s == {STALL_S}
    assert len(reader.clients) == 1
    assert reader.contents() == writer.caches[0].contents(BLOCKS["attn"].ids.tolist())


def test_nothing_is_asked_for_a_while(backend: HangingBackend) -> None:
    """Requests that come one after the other do not all wait."""
    saved(backend)
    reader = Guarded(backend, pause_s=60.0)
    backend.hangs_after = 0
    with pytest.raises(KVPlanError, match="got nothing for"):
        reader.load()
    num_calls = backend.num_calls
    with pytest.raises(KVPlanError, match=r"^BACKEND: cannot use a store: expected an answer, got none a moment ago"):
        reader.load()
    assert backend.num_calls == num_calls
    reader.settle()


def test_few_calls_hang_at_a_time(backend: HangingBackend) -> None:
    """Each has a thread and a buffer. When they have ended, others begin."""
    saved(backend)
    reader = Guarded(backend)
    backend.hangs_after = 0
    for _ in range(4):
        with pytest.raises(KVPlanError, match="got nothing for"):
            reader.load()
    with pytest.raises(KVPlanError, match="got 4 calls that hang"):
        reader.load()
    reader.settle()
    reader.load()


def test_errors_are_those_of_the_call(backend: HangingBackend) -> None:
    """The client stays."""
    reader = Guarded(backend)
    with pytest.raises(KVPlanError, match=r"^PAGE: cannot load page"):
        reader.load()
    with pytest.raises(ZeroDivisionError):
        reader.guard.call(lambda client: client.tokens_per_page // 0)
    assert len(reader.clients) == 1
    for bad in ((7, STALL_S), (reader.make_client, "a while")):
        with pytest.raises(KVPlanError, match=r"^TYPE: "):
            StallGuard(bad[0], stall_s=bad[1])  # type: ignore[type-var, arg-type]
