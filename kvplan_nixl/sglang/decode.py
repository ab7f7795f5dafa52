"""One request on decode: it waits until prefill has published it, then reads it."""

from __future__ import annotations

import ctypes
import math
import time
import uuid
from base64 import b64decode
from typing import Any

from sglang.srt.disaggregation.base import BaseKVReceiver, KVPoll
from sglang.srt.disaggregation.base.conn import KVTransferDestination

from kvplan import Blocks, KVPlanError
from kvplan.connector import Handoff, Read, attended, whole_blocks
from kvplan_nixl.sglang.manager import Manager
from kvplan_nixl.sglang.prefill import tables_of
from kvplan_nixl.sglang.prompt import prompt_of


class Receiver(BaseKVReceiver):
    """A request of one rank. All ranks ask for it and read their part; the first one tells prefill when all are done.

    SGLang allocates the request's pages when it leaves ``Bootstrapping``, which is when prefill has computed it. The
    lease is claimed then, and until all ranks are done.
    """

    req: Any
    """SGLang's request, which is set from outside."""

    require_staging = False

    def __init__(
        self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        assert bootstrap_room is not None
        self.kv_mgr = mgr
        self._address, self._room = bootstrap_addr, bootstrap_room
        self._name = f"{bootstrap_room} {uuid.uuid4().hex}"  # a room may be used again
        self._entry: dict[str, Any] = {}
        self._handoff: Handoff | None = None
        self._row = -1
        self._stop = math.inf
        self._is_aborted = False
        self.conclude_state: Any = None
        self._error: Exception = RuntimeError("aborted")
        self._has_room = False

    def init(self, prefill_dp_rank: int) -> None:
        if self.conclude_state is not None:
            return
        try:
            self.kv_mgr.open_room(self._room)
        except KVPlanError as error:
            self._error = error
            self.conclude_state = KVPoll.Failed
            return
        self._has_room = True
        self._stop = time.monotonic() + self.kv_mgr.timeout_s
        self.kv_mgr.rooms.want(self._room, self._address)

    def refuse_rebootstrap(self) -> None:
        """Fail a request whose prompt and answer so far prefill would have to compute again."""
        action = f"read request {self._room} again"
        expected = "a request that was not retracted for new weights"
        self._error = KVPlanError("PROMPT", action, expected=expected, got="one that was")
        self.conclude_state = KVPoll.Failed

    def poll(self) -> Any:
        if self.conclude_state is None:
            try:
                return self._poll()
            except Exception as error:  # whatever it is, this request fails, and no others
                self._error, self.conclude_state = error, KVPoll.Failed
        return self.conclude_state

    def _poll(self) -> Any:
        manager = self.kv_mgr
        if self._handoff is None:
            entry = manager.rooms.take(self._room)
            if entry is None:
                if time.monotonic() > self._stop:
                    expected = f"prefill to compute it within {manager.timeout_s:g} s"
                    raise KVPlanError(
                        "PEER", f"read request {self._room}", expected=expected, got="nothing"
                    )
                return KVPoll.Bootstrapping
            self._claim(entry)
        if self._row < 0:
            return KVPoll.WaitingForInput
        manager.poll()
        if self._name not in manager.ended:
            return KVPoll.Transferring
        error = manager.ended.pop(self._name)
        if error is not None or self._is_aborted:
            raise error or self._error
        self._write_metadata()
        self.conclude_state = KVPoll.Success
        return self.conclude_state

    def _claim(self, entry: Any) -> None:
        """Take what prefill has published, if it is of this prompt, and claim its lease."""
        handoff = Handoff.of_params(entry.get("handoff"))
        num_tokens = len(self.req.origin_input_ids)
        if handoff.num_tokens != num_tokens:
            expected = f"{num_tokens} positions"
            got = f"{handoff.num_tokens} computed"
            raise KVPlanError("TOKENS", f"read request {self._room}", expected=expected, got=got)
        handoff.check_prompt(prompt_of(self.req, num_tokens))
        if self.kv_mgr.is_first:
            self.kv_mgr.claims.begin(handoff.source, handoff.lease, self._name)
        self._entry = entry
        self._handoff = handoff

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
        manager.under_way[self._name] = self._room
        local = tables_of(manager, kv_indices.tolist(), start, stop, state_indices or [])
        manager.reads.begin(
            Read(
                request=self._name,
                source=handoff.source,
                lease=handoff.lease,
                local=local,
                remote=handoff.blocks,
                tokens={
                    group: self._positions(group, (start, stop), local[group])
                    for group in manager.windows
                },
            )
        )

    def _positions(self, group: str, tokens: tuple[int, int], blocks: Blocks) -> tuple[int, int]:
        """Return the positions of a group that are read: all of its pages, as far as prefill has kept them."""
        assert self._handoff is not None
        manager, kept = self.kv_mgr, self._handoff.kept.get(group, 0)
        size = manager.kv_args.page_size
        needed, _ = attended(*tokens, manager.windows[group])
        whole = whole_blocks(tokens, needed, size, blocks.first * size, kept)
        return whole.start, whole.stop

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
            raise KVPlanError(
                "SIZE", action, expected=f"rows of {args.aux_item_lens} bytes", got=f"{sizes}"
            )
        for address, row in zip(args.aux_data_ptrs, rows, strict=True):
            ctypes.memmove(address + self._row * len(row), row, len(row))

    @property
    def abort_notified(self) -> bool:
        """Whether bytes of the request may still move, so that its pages must stay."""
        return self._name in self.kv_mgr.under_way

    bootstrap_infos = ()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Prefill writes nothing."""

    def abort(self) -> None:
        """Give the request up; while it is read, when its bytes have moved."""
        self._is_aborted = True
        if not self.abort_notified:
            self.conclude_state = KVPoll.Failed

    def clear(self) -> None:
        if self._has_room:
            self.kv_mgr.rooms.forget(self._room)
            self.kv_mgr.close_room(self._room)
            self._has_room = False
        self.kv_mgr.ended.pop(self._name, None)
        if self._handoff is not None and self.kv_mgr.is_first:
            self.kv_mgr.claims.end(self._handoff.source, self._handoff.lease, self._name)
            self._handoff = None

    def failure_exception(self) -> None:
        raise self._error
