"""Eviction in the background: engines keep a store within limits together, and nobody reads a torn page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvplan import Blocks, KVPlanError
from kvplan_nixl.serving.store import (
    Backend,
    BackgroundEviction,
    Evicted,
    FileBackend,
    Limits,
    MemoryBackend,
    open_backend,
)
from tests.store.engines import QWEN, EngineWithStore

BLOCKS = {"attn": Blocks([3, 9, 5, 1, 7, 30])}
IDS = BLOCKS["attn"].ids.tolist()
LOOK_S = 0.01


def prompt(number: int) -> range:
    """One of several prompts without a common prefix."""
    return range(1000 * number, 1000 * number + 100)


def num_bytes(backend: Backend) -> int:
    """The bytes of a store."""
    return sum(entry.num_bytes for entry in backend.entries())


def within(seconds: float, is_so: Callable[[], bool]) -> bool:
    """Whether something becomes so in time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


@pytest.mark.parametrize("kind, num_prompts", [("files", 12), ("S3", 6)])
def test_engines_keep_a_store_within_limits_together(
    kind: str, num_prompts: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Three of them evict while two save and one loads: each load that does not fail has the right bytes."""
    location = f"{tmp_path}/kv" if kind == "files" else request.getfixturevalue("bucket")
    backend = open_backend(location)
    writer = EngineWithStore.of(QWEN, backend, seed=5)
    writer.save(prompt(0), BLOCKS, 96)
    contents = writer.caches[0].contents(IDS)
    prompt_bytes = num_bytes(backend)
    most_bytes = 3 * prompt_bytes
    limits = Limits(max_bytes=most_bytes)
    reports: list[Evicted | KVPlanError] = []
    evictions = [BackgroundEviction(open_backend(location), limits, reports.append, look_s=LOOK_S) for _ in range(3)]
    faults: list[BaseException] = []
    loads: list[int] = []

    def write(first: int) -> None:
        own = EngineWithStore.of(QWEN, open_backend(location), seed=5)
        for number in range(first, num_prompts, 2):
            own.save(prompt(number), BLOCKS, 96)
            client = own.caches[0].client
            client.use(client.chain(prompt(number)), 96)
            assert not client.faults

    def read() -> None:
        for number in [*range(num_prompts), *range(num_prompts)]:
            own = EngineWithStore.of(QWEN, open_backend(location))
            stop = own.find(prompt(number))
            try:
                own.load(prompt(number), BLOCKS, stop)
            except KVPlanError as error:
                assert error.code == "PAGE", error
                continue
            ids = IDS[: stop // 16]
            loads.append(stop)
            assert own.caches[0].contents(ids) == writer.caches[0].contents(ids)

    def run(work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            faults.append(error)

    work = [(write, 0), (write, 1), (read,)]
    threads = [threading.Thread(target=run, args=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # a tenth is kept free
    assert within(60, lambda: num_bytes(backend) <= 0.9 * most_bytes)
    for eviction in evictions:
        eviction.close()
    assert faults == []
    assert any(loads)
    # a look that has just deleted files reports a little later
    num_evicted = (num_prompts - 3) * 6
    assert within(60, lambda: sum(report.num_pages for report in reports if isinstance(report, Evicted)) >= num_evicted)
    assert all(isinstance(report, Evicted) for report in reports)
    assert num_bytes(backend) > 0
    assert writer.caches[0].contents(IDS) == contents


def test_a_store_that_is_gone_is_looked_at_again(tmp_path: Path) -> None:
    """A backend that fails is reported, and its pages are evicted when it is back. Closed is closed."""
    folder, away = tmp_path / "kv", tmp_path / "away"
    writer = EngineWithStore.of(QWEN, FileBackend(folder), seed=5)
    writer.save(prompt(0), BLOCKS, 96)
    folder.rename(away)
    reports: list[Evicted | KVPlanError] = []
    eviction = BackgroundEviction(FileBackend(away), Limits(max_age_s=0.0), reports.append, look_s=LOOK_S)
    away.rename(folder)
    assert within(60, lambda: any(isinstance(report, KVPlanError) for report in reports))
    folder.rename(away)
    assert within(60, lambda: num_bytes(FileBackend(away)) == 0)
    eviction.close()
    time.sleep(5 * LOOK_S)
    num_reports = len(reports)
    time.sleep(5 * LOOK_S)
    assert len(reports) == num_reports


class LongList(MemoryBackend):
    """A store that takes 0.1 s of a clock to list."""

    now_s = 0.0

    def entries(self, faults: list[str] | None = None) -> Any:
        self.now_s += 0.1
        return super().entries(faults)


def test_a_large_store_is_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking takes a twentieth of the time at most: 0.1 s in 2 s."""
    backend, has_ended = LongList(), threading.Event()
    pauses_s: list[float] = []

    class Closed(threading.Event):
        """The end of an eviction, which comes when it has looked twice."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses_s.append(timeout)
            if len(pauses_s) == 3:
                has_ended.set()
            return len(pauses_s) == 3

    names = SimpleNamespace(Event=Closed, Thread=threading.Thread)
    monkeypatch.setattr("kvplan_nixl.serving.store.eviction.threading", names)
    clocks = SimpleNamespace(monotonic=lambda: backend.now_s, time=time.time)
    monkeypatch.setattr("kvplan_nixl.serving.store.eviction.time", clocks)
    reports: list[Evicted | KVPlanError] = []
    BackgroundEviction(backend, Limits(max_bytes=1), reports.append, look_s=LOOK_S)
    assert has_ended.wait(60)
    assert len(reports) == 2
    assert LOOK_S / 2 <= pauses_s[0] <= LOOK_S
    assert [1.0 <= pause_s <= 2.001 for pause_s in pauses_s[1:]] == [True, True]
