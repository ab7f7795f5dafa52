"""The connector to a store in a worker of vLLM: a thread loads and saves beside steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from queue import PriorityQueue
from typing import Final

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvplan import KVPlanError, encode
from kvplan.store import MemoryMover, Mover, StoreClient, open_backend
from kvplan_nixl.executor import NixlExecutor
from kvplan_nixl.mover import NixlMover
from kvplan_nixl.vllm.description import worker_of
from kvplan_nixl.vllm.store_scheduler import (
    KvplanStoreMetadata,
    KvplanStoreWorkerMetadata,
    StoreJob,
)
from kvplan_nixl.vllm.store_settings import VllmStoreSettings

logger = init_logger(f"vllm.{__name__}")

STOP: Final = 0
LOAD: Final = 1
SAVE: Final = 2
"""What the thread does first: it ends, it loads for requests that wait, it saves."""

SAVE_WAIT_S: Final = 5.0
"""A request that has waited so long is not saved: its blocks are needed."""


class StoreWorker:
    """Loads and saves what the scheduler says, and reports the requests that have ended."""

    def __init__(
        self, config: VllmConfig, cache: KVCacheConfig, settings: VllmStoreSettings
    ) -> None:
        self._config = config
        self._cache = cache
        self._settings = settings
        self._executor: NixlExecutor | None = None
        self._jobs: PriorityQueue[tuple[int, int, float, StoreJob | None]] = PriorityQueue()
        self._num_jobs = 0
        self._has_sent_offer = False
        self._lock = threading.Lock()
        self._results = KVConnectorTransferResults()
        self._thread = threading.Thread(target=self._run, name="kvplan store", daemon=True)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the worker's caches, and begin to work."""
        worker = worker_of(self._config, self._cache, kv_caches, self._settings)
        # memory of the host is copied without NIXL, which would copy it too
        mover: Mover = MemoryMover()
        if any(region.memory != "DRAM" for region in worker.regions):
            self._executor = NixlExecutor(worker, self._settings.backends)
            mover = NixlMover(self._executor)
        self._client = StoreClient(
            open_backend(self._settings.folder),
            worker,
            mover=mover,
            tokens_per_page=self._settings.tokens_per_page,
            buffer_bytes=self._settings.buffer_bytes,
        )
        self._thread.start()
        logger.info("%s keeps pages in %s", worker, self._settings.folder)

    def take_offer(self) -> KvplanStoreWorkerMetadata | None:
        """Return the offer of the worker once, for the scheduler."""
        if self._has_sent_offer:
            return None
        self._has_sent_offer = True
        return KvplanStoreWorkerMetadata([encode(self._client.worker)])

    def begin(self, step: KvplanStoreMetadata) -> None:
        """Take the work of a step."""
        for priority, jobs in ((LOAD, step.loads), (SAVE, step.saves)):
            for job in jobs:
                self._put(priority, job)

    def _put(self, priority: int, job: StoreJob | None) -> None:
        # jobs of one kind are done in the order in which they came
        self._num_jobs += 1
        self._jobs.put((priority, self._num_jobs, time.monotonic(), job))

    def _run(self) -> None:
        while True:
            priority, _, job_s, job = self._jobs.get()
            if job is None:
                return
            try:
                has_failed = not self._carry_out(priority, job, job_s)
            except Exception:  # whatever it is, the request goes on without the store
                logger.exception("the store has failed for request %r", job.request)
                has_failed = True
            with self._lock:
                ended = self._results
                requests = ended.finished_recving if priority == LOAD else ended.finished_sending
                requests.add(job.request)
                if has_failed and priority == LOAD:
                    ended.failed_recving.add(job.request)
            # the request need not wait for what follows
            if not has_failed:
                self._note_use(job)

    def _note_use(self, job: StoreJob) -> None:
        try:
            self._client.use(job.chain, job.stop)
        except Exception:  # whatever it is, the thread goes on
            logger.exception("the store has failed after request %r", job.request)

    def _carry_out(self, priority: int, job: StoreJob, job_s: float) -> bool:
        """Load, or save, what a job of a time says, and return whether it is done."""
        client = self._client
        # a pipeline stage may lack some groups
        groups = {group.name for group in client.groups}
        tables = {group: table for group, table in job.tables.items() if group in groups}
        positions = {group: span for group, span in job.positions.items() if group in groups}
        if priority == SAVE and time.monotonic() - job_s > SAVE_WAIT_S:
            logger.warning("request %r is not saved: the store is slow", job.request)
            return False
        if priority == SAVE:
            num_saved = client.save(job.chain, tables, positions)
            logger.debug("request %r: %d new pages", job.request, num_saved)
            return True
        try:
            client.load(job.chain, tables, positions)
        except KVPlanError as error:
            logger.warning("request %r is computed: %s", job.request, error)
            return False
        return True

    def results(self) -> KVConnectorTransferResults:
        """Return the requests that have ended since the last step."""
        with self._lock:
            results = self._results
            self._results = KVConnectorTransferResults()
        return results

    def close(self) -> None:
        """End the thread. No byte moves afterwards."""
        if self._thread.is_alive():
            self._put(STOP, None)
            self._thread.join()
        if self._executor is not None:
            self._executor.close()
