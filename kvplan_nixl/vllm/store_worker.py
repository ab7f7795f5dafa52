"""The connector to a store in a worker of vLLM: a thread loads and saves while steps run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Final

import attrs
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvplan import Blocks, KVPlanError, encode
from kvplan.describe import Range, model_text
from kvplan_nixl.executor import NixlExecutor
from kvplan_nixl.identity import short_model
from kvplan_nixl.mover import NixlMover
from kvplan_nixl.serving.store import MemoryMover, Mover, StallGuard, StoreClient, open_backend
from kvplan_nixl.vllm.description import worker_of
from kvplan_nixl.vllm.engine_hooks import WorkerAdapters
from kvplan_nixl.vllm.store_scheduler import (
    KvplanStoreMetadata,
    KvplanStoreWorkerMetadata,
    StoreJob,
)
from kvplan_nixl.vllm.store_settings import VllmStoreSettings

logger = init_logger(f"vllm.{__name__}")

SAVE_WAIT_S: Final = 5.0
"""A request that has waited so long is not saved: its blocks are needed."""


class StoreWorker:
    """Loads and saves what the scheduler says, and reports the requests that have ended."""

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        settings: VllmStoreSettings,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._facts = facts
        self.adapters = WorkerAdapters()
        self._config = config
        self._cache = cache
        self._settings = settings
        self._executors: list[NixlExecutor] = []
        self._has_sent_offer = False
        self._lock = threading.Lock()
        self._results = KVConnectorTransferResults()
        # requests that wait do not wait for those that are saved
        self._loads = _Lane("load", self._load)
        self._saves = _Lane("save", self._save)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the worker's caches, and begin to work."""
        worker = worker_of(self._config, self._cache, kv_caches, self._settings)
        # every file of the store repeats the model
        self._worker = attrs.evolve(worker, model=short_model(self._facts))
        # a pipeline stage may lack some groups
        self._groups = {view.group for view in self._worker.views}
        for lane in (self._loads, self._saves):
            lane.start(StallGuard(self._client, stall_s=self._settings.stall_s))
        logger.info("%s uses the store in %s", self._worker, self._settings.folder)

    def _client(self) -> StoreClient:
        # memory of the host is copied without NIXL, which would copy it too
        mover: Mover = MemoryMover()
        if any(region.memory != "DRAM" for region in self._worker.regions):
            # a client that hangs keeps its executor, so each has its own
            executor = NixlExecutor(self._worker, self._settings.backends)
            self._executors.append(executor)
            mover = NixlMover(executor)
        return StoreClient(
            open_backend(self._settings.folder),
            self._worker,
            mover=mover,
            tokens_per_page=self._settings.tokens_per_page,
            buffer_bytes=self._settings.buffer_bytes,
        )

    def take_report(self) -> KvplanStoreWorkerMetadata | None:
        """Return the offer of the worker once, for the scheduler, and changes of adapters."""
        changes = self.adapters.take()
        adapters = [changes] if changes else []
        if self._has_sent_offer:
            return KvplanStoreWorkerMetadata(adapters=adapters) if changes else None
        self._has_sent_offer = True
        model = model_text(self._facts)
        return KvplanStoreWorkerMetadata([encode(self._worker)], [model], adapters)

    def start_step(self, step: KvplanStoreMetadata) -> None:
        """Queue the loads and saves of a step."""
        for job in step.loads:
            self._loads.put(job)
        for job in step.saves:
            self._saves.put(job)

    def _load(self, guard: StallGuard[StoreClient], job: StoreJob, _: float) -> None:
        has_failed = False
        try:
            guard.call(lambda client: client.load(job.chain, *self._held(job)))
        except KVPlanError as error:
            logger.warning(
                "request %r: recomputed, since the store cannot load it: %s",
                job.request,
                error,
            )
            has_failed = True
        except Exception:  # whatever it is, the request goes on without the store
            logger.exception("request %r: the store has failed", job.request)
            has_failed = True
        with self._lock:
            self._results.finished_recving.add(job.request)
            if has_failed:
                self._results.failed_recving.add(job.request)
        # the request need not wait for what follows
        if not has_failed:
            guard.call(lambda client: client.use(job.chain, job.stop))

    def _save(self, guard: StallGuard[StoreClient], job: StoreJob, waited_s: float) -> None:
        try:
            if waited_s > SAVE_WAIT_S:
                logger.warning("request %r: KV is not stored: the store is too slow", job.request)
                return
            num_saved = guard.call(lambda client: client.save(job.chain, *self._held(job)))
            logger.debug("request %r: stored %d new pages", job.request, num_saved)
        finally:
            with self._lock:
                self._results.finished_sending.add(job.request)
        guard.call(lambda client: client.use(job.chain, job.stop))
        if job.is_pinned is not None:
            keep = StoreClient.pin if job.is_pinned else StoreClient.unpin
            guard.call(lambda client: keep(client, job.chain, job.pin_stop, job.pin_owner))

    def _held(self, job: StoreJob) -> tuple[dict[str, Blocks], dict[str, Range]]:
        """Return the tables and the positions of the groups that the worker has."""
        tables = {group: job.tables[group] for group in job.tables.keys() & self._groups}
        positions = {group: job.positions[group] for group in job.positions.keys() & self._groups}
        return tables, positions

    def results(self) -> KVConnectorTransferResults:
        """Return the requests that have ended since the last step."""
        with self._lock:
            results = self._results
            self._results = KVConnectorTransferResults()
        return results

    def close(self) -> None:
        """End the threads. No byte moves afterwards."""
        for lane in (self._loads, self._saves):
            lane.close()
        for executor in self._executors:
            executor.close()


class _Lane:
    """A thread that carries out jobs of one kind, in the order in which they come.

    ``carry_out`` gets the guard of a client, the job, and the seconds for which that has waited.
    """

    def __init__(
        self, kind: str, carry_out: Callable[[StallGuard[StoreClient], StoreJob, float], None]
    ) -> None:
        self._kind = kind
        self._carry_out = carry_out
        self._jobs: SimpleQueue[tuple[StoreJob, float] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self, guard: StallGuard[StoreClient]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(guard,), name=f"kvplan store {self._kind}", daemon=True
        )
        self._thread.start()

    def put(self, job: StoreJob) -> None:
        self._jobs.put((job, time.monotonic()))

    def close(self) -> None:
        """End the thread, after the job that is under way."""
        self._is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self, guard: StallGuard[StoreClient]) -> None:
        while (waiting := self._jobs.get()) is not None and not self._is_closed:
            job, came_s = waiting
            try:
                self._carry_out(guard, job, time.monotonic() - came_s)
            except KVPlanError as error:
                logger.warning("request %r: the store has failed: %s", job.request, error)
            except Exception:  # whatever it is, the thread goes on
                logger.exception("request %r: the store has failed", job.request)
