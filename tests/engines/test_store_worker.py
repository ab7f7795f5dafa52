"""The worker of vLLM's connector to a store, beside a store that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvplan_nixl.serving.store import Limits, StoreClient, evict
from kvplan_nixl.vllm.store_scheduler import KvplanStoreMetadata, StoreJob
from kvplan_nixl.vllm.store_searches import StoreSearches
from kvplan_nixl.vllm.store_settings import VllmStoreSettings
from kvplan_nixl.vllm.store_worker import StoreWorker
from tests.blocking import wait_until
from tests.store.engines import BLOCKS, PAGE, PROMPT, QWEN, EngineWithStore, saved
from tests.store.test_stalls import HangingBackend

STALL_S = 0.2
OTHER_PROMPT = range(1000, 1100)


def job_of(name: str, client: StoreClient, prompt: range = PROMPT) -> StoreJob:
    """What is done for a request whose first pages are stored, or are to be."""
    return StoreJob(name, client.chain(prompt), dict(BLOCKS), {"attn": (0, 64)}, 64)


@pytest.fixture
def backend() -> HangingBackend:
    """A store with six pages of the prompt."""
    backend = HangingBackend()
    saved(backend)
    return backend


def test_a_search_for_a_worker_that_lacks_a_group(backend: HangingBackend) -> None:
    """A scheduler names a group of tokens and one of whole blocks where layers decide which of both they have."""
    (cache,) = EngineWithStore.of(QWEN, backend).caches
    attended = {"attn": lambda stop: max(0, stop - 20), "attn.block": lambda stop: 0}
    searches = StoreSearches(backend, [cache.worker], PAGE, attended, timeout_s=30)
    stop = wait_until(lambda: searches.find("r", cache.client.chain(PROMPT), 0))
    searches.close()
    assert stop == 96


@pytest.fixture
def begun(backend: HangingBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Any]:
    """Makes a worker that has begun, and its cache."""

    def begin() -> tuple[StoreWorker, EngineWithStore]:
        engine = EngineWithStore.of(QWEN, backend)
        monkeypatch.setattr("kvplan_nixl.vllm.store_worker.worker_of", lambda *_: engine.caches[0].worker)
        monkeypatch.setattr("kvplan_nixl.vllm.store_worker.open_backend", lambda _: backend)
        monkeypatch.setattr("kvplan_nixl.vllm.store_worker.short_model", lambda _: QWEN.name)
        nothing: Any = None
        settings = VllmStoreSettings(folder=str(tmp_path), tokens_per_page=PAGE, stall_s=STALL_S)
        worker = StoreWorker(nothing, nothing, settings)
        worker.register({})
        return worker, engine

    return begin


def results_of(worker: StoreWorker, *requests: str) -> KVConnectorTransferResults:
    """The results of all steps, until these requests have ended."""
    ended = KVConnectorTransferResults()
    deadline = time.monotonic() + 30
    while not ended.finished_recving | ended.finished_sending >= {*requests}:
        assert time.monotonic() < deadline
        results = worker.results()
        ended.finished_recving |= results.finished_recving
        ended.finished_sending |= results.finished_sending
        ended.failed_recving |= results.failed_recving
        time.sleep(0.005)
    return ended


def test_a_load_from_a_store_that_hangs_fails(backend: HangingBackend, begun: Callable[[], Any]) -> None:
    """The request is computed, another one at once, and what comes later lands nowhere."""
    worker, engine = begun()
    (cache,) = engine.caches
    backend.hangs_after = backend.num_calls
    worker.start_step(KvplanStoreMetadata(loads=[job_of("r", cache.client)]))
    assert results_of(worker, "r").failed_recving == {"r"}
    num_calls = backend.num_calls
    worker.start_step(KvplanStoreMetadata(loads=[job_of("s", cache.client)]))
    assert results_of(worker, "s").failed_recving == {"s"}
    assert backend.num_calls == num_calls
    backend.is_answering.set()
    worker.close()
    assert not any(memory.any() for memory in cache.memory.values())


def test_what_waits_is_left_out_in_the_end(backend: HangingBackend, begun: Callable[[], Any]) -> None:
    """An engine that stops waits for the job under way alone."""
    worker, engine = begun()
    (cache,) = engine.caches
    backend.is_slow = True
    num_calls = backend.num_calls
    worker.start_step(KvplanStoreMetadata(loads=[job_of(f"request {number}", cache.client) for number in range(9)]))
    wait_until(lambda: backend.num_calls > num_calls)
    closing = threading.Thread(target=worker.close)
    closing.start()

    def is_closed() -> bool:
        backend.let_one_go()
        return not closing.is_alive()

    wait_until(is_closed)
    assert worker.results().finished_recving == {"request 0"}


def test_a_request_pins_its_prompt(backend: HangingBackend, begun: Callable[[], Any]) -> None:
    """The pages of its answer may be evicted, and those of its prompt once another request says so."""
    worker, engine = begun()
    (cache,) = engine.caches
    job = job_of("r", cache.client, OTHER_PROMPT)
    for is_pinned, num_left in ((True, 48 // PAGE), (None, 48 // PAGE), (False, 0)):
        worker.start_step(KvplanStoreMetadata(saves=[attrs.evolve(job, is_pinned=is_pinned, pin_stop=48 + PAGE // 2)]))
        results_of(worker, "r")
        # what follows the results of a save comes before the next one
        worker.start_step(KvplanStoreMetadata(saves=[attrs.evolve(job, request="next")]))
        results_of(worker, "next")
        evict(backend, Limits(max_bytes=0), now_s=time.time())
        assert cache.client.find(job.chain) == num_left * PAGE
    worker.close()


def test_a_load_does_not_wait_for_a_save(
    backend: HangingBackend, begun: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is given up when the store has not answered for a while."""
    worker, engine = begun()
    (cache,) = engine.caches
    put = backend.put
    is_put = []

    def hang(*arguments: Any) -> None:
        is_put.append(True)
        backend.is_answering.wait(30)
        put(*arguments)

    monkeypatch.setattr(backend, "put", hang)
    worker.start_step(KvplanStoreMetadata(saves=[job_of("saved", cache.client, OTHER_PROMPT)]))
    wait_until(lambda: is_put)
    worker.start_step(KvplanStoreMetadata(loads=[job_of("loaded", cache.client)]))
    first = results_of(worker, "loaded")
    assert (first.finished_sending, first.failed_recving) == (set(), set())
    assert results_of(worker, "saved").finished_sending == {"saved"}
    backend.is_answering.set()
    worker.close()
