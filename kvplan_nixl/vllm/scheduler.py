"""The connector's part in vLLM's scheduler: which requests are read, and whose blocks stay for a reader."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from kvplan import Blocks, KVPlanError
from kvplan.connector import Handoff, Leases, Listener, Notifier, Read, attended
from kvplan_nixl.vllm.description import groups_of, is_state, window_of
from kvplan_nixl.vllm.metadata import KvplanMetadata

logger = init_logger(f"vllm.{__name__}")

LEASE_S: Final = 300.0
"""Seconds for which prefill keeps the blocks of a request that nobody has read."""

NULL: Final = 0
"""The id of vLLM's null block."""


class Scheduler:
    """Prefill and decode in one: a request's ``kv_transfer_params`` say which of them an engine is for it.

    Decode computes the last token of a prompt itself, so it reads the positions before. Where a sliding window or a
    state would have passed them, prefill stops one token short of the prompt.
    """

    def __init__(self, config: VllmConfig, cache: KVCacheConfig) -> None:
        assert config.kv_transfer_config is not None
        self._transfer = config.kv_transfer_config
        self._port_offset = config.parallel_config.data_parallel_index
        self._groups = groups_of(cache)
        self._windows = {name: window_of(cache.kv_cache_groups[i]) for name, i in self._groups.items()}
        self._states = {name for name, i in self._groups.items() if is_state(cache.kv_cache_groups[i])}
        self._stops_short = bool(self._states) or any(self._windows.values())
        self._to_block_end = not cache.needs_kv_cache_zeroing  # else what follows the last position must stay zero
        self._lease_s = float(self._transfer.get_from_extra_config("lease_s", LEASE_S))
        self._listener: Listener | None = None
        self._leases = Leases()
        self._done = Notifier(logger)
        self._computed: dict[str, int] = {}  # positions that decode has cached, by request
        self._reading: dict[str, Handoff] = {}
        self._step = KvplanMetadata()

    def serve(self, envelopes: Sequence[bytes]) -> None:
        """Serve the envelopes of all workers to engines that read from this one, if it is a producer."""
        if not self._transfer.is_kv_producer:
            return
        host = str(self._transfer.get_from_extra_config("host", get_ip()))
        port = int(self._transfer.get_from_extra_config("port", 0))
        assert self._transfer.engine_id is not None
        self._listener = Listener(self._transfer.engine_id, host, envelopes, port and port + self._port_offset)
        logger.info("%s serves the offers of %d workers", self._listener.source, len(envelopes))

    def close(self) -> None:
        """Stop serving."""
        self._done.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def add(self, request: Request) -> None:
        """Shorten the prompt of a request that prefill computes, by the token that decode computes itself."""
        params = request.kv_transfer_params or {}
        if not (self._stops_short and params.get("do_remote_decode")) or request.num_prompt_tokens < 2:
            return
        if request.prompt_token_ids is None:  # embeddings
            assert request.prompt_embeds is not None
            request.prompt_embeds = request.prompt_embeds[:-1]
        else:
            del request.prompt_token_ids[-1]
        del request._all_token_ids[-1]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1

    def count(self, request: Request, num_computed: int) -> int:
        """How many positions decode reads of a request of which it has cached the first ``num_computed``."""
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0
        self._computed[request.request_id] = num_computed
        return max(0, int(request.num_prompt_tokens) - 1 - num_computed)

    def allocate(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Read ``num_tokens`` positions of a request into its blocks. A request is read once."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        start = self._computed.pop(request.request_id, 0)
        if num_tokens == 0:
            self._let_go(params)
            return
        try:
            self._read(request.request_id, Handoff.of_params(params), blocks.get_block_ids(), start, start + num_tokens)
        except KVPlanError as error:
            self._step.refused[request.request_id] = error

    def _read(self, request: str, handoff: Handoff, ids: Sequence[Sequence[int]], start: int, stop: int) -> None:
        self._reading[request] = handoff
        if stop > handoff.num_tokens or (self._states and stop != handoff.num_tokens):
            expected = f"{'exactly' if self._states else 'at least'} {stop} positions"
            got = f"{handoff.num_tokens} computed by {handoff.source}"
            raise KVPlanError("TOKENS", f"read request {request!r}", expected=expected, got=got)
        tokens = {
            name: attended(start, stop, window) for name, window in self._windows.items() if name not in self._states
        }
        read = Read(
            request=request,
            source=handoff.source,
            local=self._tables(ids),
            remote=handoff.blocks,
            tokens=tokens,
            deadline=handoff.deadline,
            to_block_end=self._to_block_end,
        )
        self._step.reads.append(read)

    def _tables(self, ids: Sequence[Sequence[int]]) -> dict[str, Blocks]:
        """Block tables by group. Of states only the last one counts, which is that of the last token computed."""
        listed = {name: [*ids[i]] for name, i in self._groups.items()}
        return {
            name: Blocks(blocks[-1:] if name in self._states else blocks, null=NULL) for name, blocks in listed.items()
        }

    def _let_go(self, params: Mapping[str, Any]) -> None:
        """Tell prefill that a request is not read."""
        try:
            handoff = Handoff.of_params(params)
        except KVPlanError as error:
            logger.warning("no request is let go: %s", error)
        else:
            self._done.put(handoff.source, handoff.request)

    def received(self, requests: set[str]) -> None:
        """All workers have ended the reads of these requests."""
        for request in requests:
            handoff = self._reading.pop(request, None)
            if handoff is not None:
                self._done.put(handoff.source, handoff.request)

    def finish(self, request: Request, ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """The parameters with which decode can read a finished request, whose blocks stay; None where none can."""
        params = request.kv_transfer_params or {}
        self._computed.pop(request.request_id, None)
        if params.get("do_remote_prefill"):  # aborted before it was read
            params["do_remote_prefill"] = False
            self._let_go(params)
        done = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not (params.get("do_remote_decode") and done and self._listener is not None and any(ids)):
            return None
        until = time.monotonic() + self._lease_s
        self._leases.grant(request.request_id, until)
        tables = self._tables(ids)
        handoff = Handoff(self._listener.source, request.request_id, request.num_computed_tokens, until, tables)
        return {"do_remote_prefill": True, "do_remote_decode": False, **handoff.params()}

    def take_step(self) -> KvplanMetadata:
        """What the workers have to know in this step."""
        if self._listener is not None:
            self._leases.end(self._listener.done())
        done, late = self._leases.ended(time.monotonic())
        if late:
            logger.warning("nobody has read these requests within %g s: %s", self._lease_s, ", ".join(late))
        step, self._step = self._step, KvplanMetadata()
        step.released.update(done, late)
        return step
