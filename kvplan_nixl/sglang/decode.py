"""Decode: a request waits until prefill has published it, and then its pages are read."""

from __future__ import annotations

import ctypes
import math
from base64 import b64decode
from collections.abc import Mapping
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base import BaseKVReceiver, KVPoll
from sglang.srt.disaggregation.base.conn import KVTransferDestination

from kvplan import Blocks, KVPlanError
from kvplan.connector import Claims, Handoff, Read, Reads, attended, send_claims, whole_blocks
from kvplan.connector.system import SYSTEM, System
from kvplan.describe.blocks import Range
from kvplan.staging import Copier
from kvplan_nixl.reads import make_reads
from kvplan_nixl.settings import Settings
from kvplan_nixl.sglang.bootstrap import Rooms
from kvplan_nixl.sglang.prompt import prompt_of
from kvplan_nixl.sglang.rank import Rank, RankMemory, logger


class DecodeRank(Rank):
    """A rank of decode: the rooms that it waits for, the leases that it claims, and its reads.

    ``queue`` is SGLang's queue of requests. A request waits ``timeout_s`` for prefill.
    """

    def __init__(
        self,
        memory: RankMemory,
        queue: Any,
        copier: Copier | None,
        settings: Settings,
        timeout_s: float,
        system: System = SYSTEM,
    ) -> None:
        super().__init__(memory, system)
        self.timeout_s = timeout_s
        self.metadata = queue.metadata_buffers
        send = partial(send_claims, access=memory.access, system=system)
        self.claims = Claims(logger, send, system, settings.max_peers)
        self.reads: Reads = make_reads(
            memory.executor,
            self.claims,
            logger,
            access=memory.access,
            copier=copier,
            timeout_s=settings.handshake_timeout_s,
            budget_bytes=settings.budget_bytes,
            system=system,
        )
        self.rooms = Rooms(logger, memory.access, settings.max_peers, system)
        self.under_way: dict[str, int] = {}  # the rooms of requests whose bytes may move
        # Pages of an aborted request stay until its read has ended, however late.
        queue.transfer_queue.enable_deferred_kv_release = True
        queue.transfer_queue.deferred_kv_release_timeout = math.inf

    def is_written(self, room: int) -> bool:
        """Return whether bytes may still move into the pages of a room's request."""
        return room in self.under_way.values()

    def _note_ended(self) -> None:
        """Take the reads that have ended, and those that have failed while bytes may move."""
        for result in self.reads.poll():
            self.under_way.pop(result.request, None)
            self.ended[result.request] = result.error
        self.ended.update(self.reads.late())


class Receiver(BaseKVReceiver):
    """A request of one rank. All ranks ask for it and read their part of it.

    SGLang allocates the request's pages when it leaves ``Bootstrapping``, which is when prefill has
    computed it. The first rank claims the lease then, and until all ranks are done. It does so on
    the thread that has asked: SGLang polls no receiver while it is paused or resumes requests that
    it has retracted, and leases would end meanwhile.
    """

    req: Any
    """SGLang's request, which is set from outside."""

    require_staging = False

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        assert bootstrap_room is not None
        self.kv_mgr = mgr
        self._rank: DecodeRank = mgr.rank
        self._address = bootstrap_addr
        self._room = bootstrap_room
        self._name = self._rank.name_of(bootstrap_room)
        self._entry: Mapping[str, Any] = {}
        self._handoff: Handoff | None = None
        self._row_index = -1
        self._stop = math.inf
        self._is_aborted = False
        self.conclude_state: Any = None
        self._error: Exception = RuntimeError("aborted")
        self._has_room = False
        self._refusal: Exception | None = None  # of what prefill has published

    def init(self, prefill_dp_rank: int) -> None:
        """Ask for the room, unless the request is refused."""
        if self.conclude_state is not None:
            return
        try:
            self._rank.open_room(self._room)
            self._has_room = True
            self._stop = self._rank.system.monotonic() + self._rank.timeout_s
            self._rank.rooms.want(self._room, self._address, self._take)
        except KVPlanError as error:
            self._fail(error)

    def refuse_rebootstrap(self) -> None:
        """Fail a request whose prompt and answer so far prefill would have to compute again."""
        action = f"read request {self._room} again"
        expected = "a request that was not retracted for new weights"
        self._fail(KVPlanError("PROMPT", action, expected=expected, got="one that was"))

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.conclude_state = KVPoll.Failed

    def poll(self) -> Any:
        """Return the state of the request, a value of KVPoll."""
        if self.conclude_state is None:
            try:
                return self._advance()
            except Exception as error:  # whatever it is, this request fails, and no others
                self._fail(error)
        return self.conclude_state

    def _advance(self) -> Any:
        """Continue the request, and return its state. Raises the reason why it fails."""
        rank = self._rank
        if self._handoff is None:
            if self._refusal is not None:
                raise self._refusal
            self._check_time()
            return KVPoll.Bootstrapping
        # SGLang allocates pages now, and calls send_metadata.
        if self._row_index < 0:
            return KVPoll.WaitingForInput
        rank.poll()
        if self._name not in rank.ended:
            return KVPoll.Transferring
        error = rank.ended.pop(self._name)
        if error is not None or self._is_aborted:
            raise error or self._error
        self._write_metadata()
        self.conclude_state = KVPoll.Success
        return self.conclude_state

    def _check_time(self) -> None:
        """Raise ``PEER`` if prefill has not computed the request in time."""
        if self._rank.system.monotonic() > self._stop:
            action = f"read request {self._room}"
            expected = f"prefill to compute it within {self._rank.timeout_s:g} s"
            raise KVPlanError("PEER", action, expected=expected, got="nothing")

    def _take(self, entry: Any) -> None:
        """Take what prefill has published, or the reason why this request fails."""
        try:
            self._claim(entry)
        except Exception as error:  # whatever it is, this request fails, and no others
            self._refusal = error

    def _claim(self, entry: Any) -> None:
        """Take what prefill has published, if it is of this prompt, and claim its lease."""
        if "error" in entry:
            action = f"read what room {self._room} has"
            expected = "an entry of each stage"
            raise KVPlanError("MESSAGE", action, expected=expected, got=f"{entry['error']}")
        handoff = Handoff.of_params(entry.get("handoff"), self._rank.memory.access.key)
        num_tokens = len(self.req.origin_input_ids)
        if handoff.num_tokens != num_tokens:
            expected = f"{num_tokens} positions"
            got = f"{handoff.num_tokens} computed"
            raise KVPlanError("TOKENS", f"read request {self._room}", expected=expected, got=got)
        handoff.check_prompt(prompt_of(self.req, num_tokens))
        # One claim serves all ranks: SGLang clears receivers when those of all ranks have ended.
        if self._rank.memory.is_first:
            self._rank.claims.begin(handoff.source, handoff.lease, self._name)
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
        """Read into these pages what prefill has computed, from the end of the cached prefix on."""
        handoff = self._handoff
        assert handoff is not None
        assert aux_index is not None
        self._row_index = aux_index
        start = decode_prefix_len or 0
        try:
            read = self._read(handoff, kv_indices.tolist(), state_indices or [], start)
        except KVPlanError as error:
            self._fail(error)
            return
        # From now on the pages stay until the read has ended.
        self._rank.under_way[self._name] = self._room
        self._rank.reads.begin(read)

    def _read(self, handoff: Handoff, pages: list[int], states: list[int], start: int) -> Read:
        """Return what is read into these pages, from position ``start`` on."""
        memory = self._rank.memory
        stop = handoff.num_tokens
        local = memory.block_tables(pages, start, stop, states)
        tokens = dict[str, Range]()
        for group, window in memory.windows.items():
            kept = handoff.kept.get(group, 0)
            tokens[group] = self._positions((start, stop), window, local[group], kept)
        return Read(
            request=self._name,
            source=handoff.source,
            lease=handoff.lease,
            local=local,
            remote=handoff.blocks,
            tokens=tokens,
        )

    def _positions(self, tokens: Range, window: int | None, blocks: Blocks, kept: int) -> Range:
        """Return the positions of a group that are read: whole pages, as far as prefill has them.

        Prefill has ``kept`` positions from there on.
        """
        page_size = self._rank.memory.args.page_size
        first_attended, _ = attended(*tokens, window)
        first_listed = blocks.first * page_size
        whole = whole_blocks(tokens, first_attended, page_size, first_listed, kept)
        return whole.start, whole.stop

    def _write_metadata(self) -> None:
        """Write the first token, and what belongs to it, where SGLang looks for them."""
        rank = self._rank
        rows = rank.memory.metadata_rows(self._row_index)
        # Another engine's prefill knows the token alone; the rows may be an earlier request's.
        if "token" in self._entry:
            for row in rows:
                ctypes.memset(row.address, 0, row.num_bytes)
            rank.metadata.output_ids[self._row_index, 0] = self._entry["token"]
            rank.metadata.bootstrap_room[self._row_index, 0] = self._room
            return
        contents = [b64decode(text) for text in self._entry["metadata"]]
        sizes = [len(content) for content in contents]
        row_sizes = [row.num_bytes for row in rows]
        if sizes != row_sizes:
            action = f"read the first token of request {self._room}"
            expected = f"rows of {row_sizes} bytes"
            raise KVPlanError("SIZE", action, expected=expected, got=f"{sizes}")
        for row, content in zip(rows, contents, strict=True):
            ctypes.memmove(row.address, content, row.num_bytes)

    @property
    def abort_notified(self) -> bool:
        """Bytes of the request may still move, so that its pages must stay."""
        return self._name in self._rank.under_way

    bootstrap_infos = ()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Notify nobody: prefill writes nothing."""

    def abort(self) -> None:
        """Give the request up; while it is read, when its bytes have moved."""
        self._is_aborted = True
        if not self.abort_notified:
            self.conclude_state = KVPoll.Failed

    def clear(self) -> None:
        """Let another request have the room, and end the claim on the lease."""
        rank = self._rank
        if self._has_room:
            rank.rooms.forget(self._room)
            rank.close_room(self._room)
            self._has_room = False
        rank.ended.pop(self._name, None)
        if self._handoff is not None and rank.memory.is_first:
            rank.claims.end(self._handoff.source, self._handoff.lease, self._name)
            self._handoff = None

    def failure_exception(self) -> None:
        """Raise the reason why the request has failed."""
        raise self._error
