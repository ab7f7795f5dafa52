"""One request on prefill: its pages are lent when it is computed, until decode has read them."""

from __future__ import annotations

import ctypes
import time
import uuid
from base64 import b64encode
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base import BaseKVSender, KVPoll
from sglang.srt.disaggregation.base.conn import KVTransferMetric

from kvplan import Blocks, KVPlanError
from kvplan.connector import Handoff
from kvplan_nixl.sglang.bootstrap import RETRY_S, publish
from kvplan_nixl.sglang.manager import Manager, logger
from kvplan_nixl.sglang.prompt import prompt_of


class Sender(BaseKVSender):
    """All ranks collect the pages of a request. The first one of each pipeline stage publishes them; the first one of
    all waits until they are read, and SGLang frees no stage's pages before.
    """

    req: Any
    """SGLang's request, which is set from outside."""

    def __init__(
        self,
        mgr: Manager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self._address, self._room = bootstrap_addr, bootstrap_room
        self._name = f"{bootstrap_room} {uuid.uuid4().hex}"  # a room may be used again
        self._pages: list[int] = []
        self._num_tokens = 0
        self._is_sent = self._is_aborted = False
        self._result: Any = None
        self._error: Exception = RuntimeError("aborted")

        try:
            mgr.open_room(bootstrap_room)
        except KVPlanError as error:
            self._error = error
            self._result = KVPoll.Failed
        self._is_refused = self._result is not None

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._num_pages = num_kv_indices
        self._row = aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None
    ) -> None:
        assert num_kv_tokens is not None
        self._pages += kv_indices.tolist()
        self._num_tokens += num_kv_tokens
        if len(self._pages) < self._num_pages:
            return
        self._is_sent = True
        manager = self.kv_mgr
        lease = self._name  # of another rank, which waits for the readers
        if manager.listener is None:
            self._result = KVPoll.Success
        else:
            lease = manager.leases.grant(self._name)
        if manager.is_first_of_stage:
            num_tokens = self._num_tokens
            tables = tables_of(manager, self._pages, 0, num_tokens, state_indices or [])
            size = manager.kv_args.page_size
            kept = {group: tables[group].first * size for group in manager.windows}
            prompt = prompt_of(self.req, num_tokens)
            handoff = Handoff(manager.source, lease, num_tokens, prompt, tables, kept)
            entry = {
                "handoff": handoff.params(),
                "metadata": [b64encode(row).decode() for row in self._metadata()],
                "attempt": self.req.rid,  # equal in all stages
            }
            manager.publisher.submit(
                self._publish, entry, time.monotonic() + manager.leases.lease_s
            )

    def _metadata(self) -> list[bytes]:
        """The request's row of each buffer in which SGLang keeps the first token and what belongs to it."""
        args = self.kv_mgr.kv_args
        rows = zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
        return [ctypes.string_at(address + self._row * size, size) for address, size in rows]

    def _publish(self, entry: Any, until: float) -> None:
        """Publish the request, again and again while its pages are kept."""
        while time.monotonic() < until:
            try:
                publish(self._address, self._room, entry, self.kv_mgr.stage, self.kv_mgr.num_stages)
            except KVPlanError as error:
                logger.warning("request %s is not published yet: %s", self._room, error)
                time.sleep(RETRY_S)
            else:
                return

    def poll(self) -> Any:
        if self._result is None and self._is_sent:
            self.kv_mgr.poll()
            if self._name in self.kv_mgr.ended:
                error = self.kv_mgr.ended.pop(self._name)
                self._error = error or self._error
                self._result = KVPoll.Failed if error or self._is_aborted else KVPoll.Success
        if self._result is not None:
            return self._result
        return KVPoll.Transferring if self._is_sent else KVPoll.WaitingForInput

    poll_pp_consensus = poll

    def abort(self) -> None:
        """Give the request up; once it is published, when its reader is done."""
        self._is_aborted = True
        if not self._is_sent:
            self._result = KVPoll.Failed

    def clear(self) -> None:
        if not self._is_refused:
            self.kv_mgr.close_room(self._room)

    def failure_exception(self) -> None:
        raise self._error

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()


def tables_of(
    manager: Manager, pages: list[int], first: int, num_tokens: int, states: list[Any]
) -> dict[str, Blocks]:
    """Block tables by group: the pages from position ``first`` on, and what SGLang lists of each of its states."""
    size = manager.kv_args.page_size
    tables = {manager.groups[0]: Blocks(pages, first // size)}
    for group, kind, ids in zip(
        manager.groups[1:], manager.kv_args.state_types, states, strict=True
    ):
        ids = np.asarray(ids).tolist()
        # A window ends with the last page of the prompt.
        tables[group] = Blocks(ids, -(-num_tokens // size) - len(ids) if kind.value == "swa" else 0)
    return tables
