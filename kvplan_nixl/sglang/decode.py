"""One request on decode: it waits until prefill has published it, then reads it."""

from __future__ import annotations

import ctypes
import math
import time
from base64 import b64decode
from typing import Any

from sglang.srt.disaggregation.base import BaseKVReceiver, KVPoll
from sglang.srt.disaggregation.base.conn import KVTransferDestination

from kvplan import KVPlanError
from kvplan.connector import Handoff, Read, attended
from kvplan_nixl.sglang.manager import Manager
from kvplan_nixl.sglang.prefill import tables_of


class Receiver(BaseKVReceiver):
    """A request of one rank. All ranks ask for it and read their part; the first one tells prefill when all are done.

    SGLang allocates the request's pages when it leaves ``Bootstrapping``, which is when prefill has computed it.
    ``num_tokens``, the length of the prompt, is set from outside.
    """

    num_tokens: int

    require_staging = False

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        assert bootstrap_room is not None
        self.kv_mgr = mgr
        self._address, self._room = bootstrap_addr, bootstrap_room
        self._entry: dict[str, Any] = {}
        self._handoff: Handoff | None = None
        self._row = -1
        self._stop = math.inf
        self._is_aborted = False
        self.conclude_state: Any = None
        self._error: Exception = RuntimeError("aborted")

    def init(self, prefill_dp_rank: int) -> None:
        self._stop = time.monotonic() + self.kv_mgr.timeout_s
        self.kv_mgr.rooms.want(self._room, self._address)

    def poll(self) -> Any:
        if self.conclude_state is None:
            try:
                return self._poll()
            except Exception as error:  # whatever it is, this request fails, and no others
                self._error, self.conclude_state = error, KVPoll.Failed
        return self.conclude_state

    def _poll(self) -> Any:
        manager, name = self.kv_mgr, f"{self._room}"
        if self._handoff is None:
            entry = manager.rooms.take(self._room)
            if entry is None:
                if time.monotonic() > self._stop:
                    expected = f"prefill to compute it within {manager.timeout_s:g} s"
                    raise KVPlanError("PEER", f"read request {name}", expected=expected, got="nothing")
                return KVPoll.Bootstrapping
            self._entry, self._handoff = entry, Handoff.of_params(entry.get("handoff"))
            if self._handoff.num_tokens != self.num_tokens:
                expected, got = f"{self.num_tokens} positions", f"{self._handoff.num_tokens} computed"
                raise KVPlanError("TOKENS", f"read request {name}", expected=expected, got=got)
        if self._row < 0:
            return KVPoll.WaitingForInput
        manager.poll()
        if name not in manager.ended:
            return KVPoll.Transferring
        error = manager.ended.pop(name)
        if error is not None or self._is_aborted:
            raise error or self._error
        self._write_metadata()
        self.conclude_state = KVPoll.Success
        return self.conclude_state

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
    ) -> None:
        """Read what prefill has computed into these pages, from the end of the prefix that is cached here."""
        assert self._handoff is not None
        assert aux_index is not None
        self._row = aux_index
        manager, handoff = self.kv_mgr, self._handoff
        start, stop = decode_prefix_len or 0, handoff.num_tokens
        manager.under_way.add(f"{self._room}")
        local = tables_of(manager, kv_indices.tolist(), start, stop, state_indices or [])
        manager.reads.begin(
            Read(
                request=f"{self._room}",
                source=handoff.source,
                local=local,
                remote=handoff.blocks,
                tokens={name: attended(start, stop, window) for name, window in manager.windows.items()},
                deadline=handoff.deadline,
            )
        )

    def _write_metadata(self) -> None:
        """Write the first token, and what belongs to it, where SGLang looks for them."""
        args, metadata = self.kv_mgr.kv_args, self.kv_mgr.metadata
        if "token" in self._entry:
            for address, size in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True):
                ctypes.memset(address + self._row * size, 0, size)
            metadata.output_ids[self._row, 0] = self._entry["token"]
            metadata.bootstrap_room[self._row, 0] = self._room
            return
        rows = [b64decode(row) for row in self._entry["metadata"]]
        sizes = [len(row) for row in rows]
        if sizes != args.aux_item_lens:
            action = f"read the first token of request {self._room}"
            raise KVPlanError("SIZE", action, expected=f"rows of {args.aux_item_lens} bytes", got=f"{sizes}")
        for address, row in zip(args.aux_data_ptrs, rows, strict=True):
            ctypes.memmove(address + self._row * len(row), row, len(row))

    @property
    def abort_notified(self) -> bool:
        """Whether bytes of the request may still move, so that its pages must stay."""
        return f"{self._room}" in self.kv_mgr.under_way

    bootstrap_infos = ()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Prefill writes nothing."""

    def abort(self) -> None:
        """Give the request up; while it is read, when its bytes have moved."""
        self._is_aborted = True
        if not self.abort_notified:
            self.conclude_state = KVPoll.Failed

    def clear(self) -> None:
        self.kv_mgr.rooms.forget(self._room)
        self.kv_mgr.ended.pop(f"{self._room}", None)
        if self._handoff is not None and self.kv_mgr.is_first:
            self.kv_mgr.done.put(self._handoff.source, self._handoff.request)
            self._handoff = None

    def failure_exception(self) -> None:
        raise self._error
