"""Searches of a store in threads, so that vLLM's scheduler does not wait for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

import attrs
from vllm.logger import init_logger

from kvplan import KVPlanError, Worker
from kvplan.protocol.page_keys import Chain
from kvplan.protocol.prefix_search import Attended
from kvplan_nixl.serving.store import Backend, StoreReader, find
from kvplan_nixl.serving.store.stalls import PAUSE_S

logger = init_logger(f"vllm.{__name__}")

NUM_THREADS: Final = 4

AT_HAND_S: Final = 0.002
"""A store at hand answers within this time, so that the request is loaded in the same step."""


@attrs.frozen
class _Search:
    """A search for the pages of a request after its first ``start`` positions."""

    start: int
    began_s: float
    stop: Future[int]


class StoreSearches:
    """Searches prefixes that all workers of an engine can load, one for each request.

    A search that takes longer than ``timeout_s`` is given up, and has found nothing; then no other
    one begins for a while.
    """

    def __init__(
        self,
        backend: Backend,
        workers: Sequence[Worker],
        tokens_per_page: int,
        attended: Mapping[str, Attended],
        timeout_s: float,
    ) -> None:
        # all threads share these readers, so each reads a shard's description once
        self._readers = []
        for worker in workers:
            # the scheduler names groups of two units where layers decide which one they have
            names = [group.name for group in worker.groups if group.name in attended]
            own = {name: attended[name] for name in names}
            size = tokens_per_page
            reader = StoreReader(backend, worker, tokens_per_page=size, attended=own)
            self._readers.append(reader)
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvplan store search")
        self._searches: dict[str, _Search] = {}
        self._paused_until_s = 0.0

    def find(self, request: str, chain: Chain, start: int) -> int | None:
        """Return the end of a request's prefix, ``start`` if there is none, ``None`` so far."""
        try:
            return self._look(request, chain, start)
        except KVPlanError as error:
            logger.warning("request %r: nothing is loaded: %s", request, error)
        except Exception:  # whatever it is, the request goes on without the store
            logger.exception("request %r: the store has failed", request)
        return start

    def _look(self, request: str, chain: Chain, start: int) -> int | None:
        search = self._searches.get(request)
        if search is None and time.monotonic() < self._paused_until_s:
            return start
        # an engine may have forgotten positions that it had at first
        if search is None or start < search.start:
            stop = self._threads.submit(self._find, chain, start)
            search = _Search(start, time.monotonic(), stop)
            self._searches[request] = search
            wait([stop], AT_HAND_S)
        if not search.stop.done():
            if time.monotonic() - search.began_s < self._timeout_s:
                return None
            self._paused_until_s = time.monotonic() + PAUSE_S
            logger.warning("request %r: nothing is loaded: the store is too slow", request)
            return start
        return search.stop.result()

    def forget(self, request: str) -> None:
        """Forget a request, whose blocks are allocated or which has ended."""
        search = self._searches.pop(request, None)
        if search is not None:
            search.stop.cancel()

    def close(self) -> None:
        """Start no further search."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self, chain: Chain, start: int) -> int:
        # a search without a waiting request ends, so that its thread is free
        until_s = time.monotonic() + self._timeout_s
        return find(self._readers, chain, start=start, until_s=until_s)
