"""Decode: a request waits until prefill has published it, and then its pages are read.

Prefill may publish a part of a prompt first, which is read while the rest is computed. One read
follows the other. Positions that were read count only if the whole prompt is published under the
same leases: then no page of it was another request's meanwhile.
"""

from __future__ import annotations

import ctypes
import math
from base64 import b64decode
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import attrs
from sglang.srt.disaggregation.base import BaseKVReceiver, KVPoll
from sglang.srt.disaggregation.base.conn import KVTransferDestination

from kvplan import KVPlanError
from kvplan.describe.blocks import Range
from kvplan.protocol import Claims, Handoff, Read, Reads, attended, send_claims, whole_blocks
from kvplan.protocol.room_contents import Published
from kvplan.protocol.rooms import Rooms
from kvplan.protocol.system import System
from kvplan.staging import Copier
from kvplan_nixl.reads import make_reads
from kvplan_nixl.settings import Settings
from kvplan_nixl.sglang.changes import WEIGHTS
from kvplan_nixl.sglang.prompt import prompt_of
from kvplan_nixl.sglang.rank import Rank, RankMemory, logger

SHORT_PROMPT: Final = (
    "vLLM leaves the last token of a prompt to decode, if the model has windows or states, and "
    "SGLang does not compute it: set whole_prompt in the kv_transfer_params of vLLM's request"
)
"""What to do about a prompt without its last position."""


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
        system: System,
    ) -> None:
        super().__init__(memory, system)
        self.timeout_s = timeout_s
        self.metadata = queue.metadata_buffers
        send = partial(send_claims, system=system)
        self.claims = Claims(logger, send, system, settings.max_peers)
        self.reads: Reads = make_reads(
            memory.executor,
            self.claims,
            logger,
            key=memory.key,
            system=system,
            copier=copier,
            timeout_s=settings.handshake_timeout_s,
            budget_bytes=settings.budget_bytes,
            rates=settings.measured_rates(),
        )
        self.rooms = Rooms(logger, memory.key, system, max_servers=settings.max_peers)
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


@attrs.frozen
class Pages:
    """A request's pages on decode: those from position ``start`` on, and those of its states."""

    pages: list[int]
    states: list[Any]
    start: int


class Receiver(BaseKVReceiver):
    """A request of one rank. All ranks ask for it and read their part of it.

    SGLang allocates the request's pages when it leaves ``Bootstrapping``, which is when prefill has
    published it, in part or as a whole. The first rank claims the lease then, and until all ranks
    are done. It does so on the thread that has asked: SGLang polls no receiver while it is paused
    or resumes requests that it has retracted, and leases would end meanwhile.
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
        self._published: Published | None = None
        self._pages: Pages | None = None
        self._num_read = 0  # positions that are read, or in the cached prefix
        self._reading_stop = 0  # where the read under way ends
        self._is_complete = False  # whether that is the whole prompt's end
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
            self._rank.rooms.want(self._name, f"{self._room}", self._address, self._take)
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
        rank.poll()
        if self._name in rank.ended:
            error = rank.ended.pop(self._name)
            if error is not None:
                raise error
            self._num_read = self._reading_stop
        if self._name in rank.under_way:
            return KVPoll.Transferring
        if self._refusal is not None:
            raise self._refusal
        published = self._published
        if published is None:
            self._check_time()
            return KVPoll.Bootstrapping
        # SGLang allocates pages now, and calls send_metadata.
        if self._pages is None:
            return KVPoll.WaitingForInput
        if self._is_aborted:
            raise self._error
        if self._is_complete:
            self._write_metadata(published.entry)
            self.conclude_state = KVPoll.Success
            return self.conclude_state
        self._read_on(published, self._pages)
        return KVPoll.Transferring

    def _check_time(self) -> None:
        """Raise ``PEER`` if prefill has not computed the request in time."""
        if self._rank.system.monotonic() > self._stop:
            action = f"read request {self._room}"
            expected = f"prefill to compute it within {self._rank.timeout_s:g} s"
            raise KVPlanError("PEER", action, expected=expected, got="nothing")

    def _take(self, entry: Any) -> bool:
        """Take what prefill has published, or the reason why this request fails.

        Returns whether nothing more is to come.
        """
        try:
            published = self._claim(entry)
        except Exception as error:  # whatever it is, this request fails, and no others
            self._refusal = error
            return True
        self._stop = self._rank.system.monotonic() + self._rank.timeout_s
        self._published = published
        return published.is_whole

    def _claim(self, entry: Any) -> Published:
        """Return what prefill has published, if it is of this prompt, and claim its lease."""
        key = self._rank.memory.key
        earlier = self._published
        published = Published.of_entry(f"{self._room}", entry, key, earlier)
        handoff = published.handoff
        num_tokens = len(self.req.origin_input_ids)
        has_all = published.is_whole
        is_right = handoff.num_tokens == num_tokens if has_all else handoff.num_tokens < num_tokens
        if not is_right:
            quantity = "" if has_all else "less than "
            expected = f"{quantity}{num_tokens} positions"
            got = f"{handoff.num_tokens} computed, {'with' if has_all else 'without'} a first token"
            hint = ""
            if has_all and handoff.num_tokens == num_tokens - 1:
                hint = SHORT_PROMPT
            raise KVPlanError(
                "TOKENS", f"read request {self._room}", expected=expected, got=got, hint=hint
            )
        handoff.check_weights(WEIGHTS.version)
        handoff.check_prompt(prompt_of(self.req, handoff.num_tokens))
        # One claim serves all ranks: SGLang clears receivers when those of all ranks have ended.
        if earlier is None and self._rank.memory.is_first:
            self._rank.claims.begin(handoff.source, handoff.lease, self._name)
        return published

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
    ) -> None:
        """Read into these pages what prefill has computed, from the end of the cached prefix on."""
        assert aux_index is not None
        published = self._published
        assert published is not None
        self._row_index = aux_index
        self._num_read = decode_prefix_len or 0
        self._pages = Pages(kv_indices.tolist(), state_indices or [], self._num_read)
        try:
            self._read_on(published, self._pages)
        except KVPlanError as error:
            self._fail(error)

    def _read_on(self, published: Published, pages: Pages) -> None:
        """Begin to read what prefill has computed, from the end of what is read on."""
        rank = self._rank
        handoff = published.handoff
        page_size = rank.memory.args.page_size
        if published.is_whole:
            stop = handoff.num_tokens
            self._is_complete = True
            read = self._read_whole(handoff, pages)
        else:
            # a page that is not full comes with the next part
            stop = handoff.num_tokens // page_size * page_size
            if stop <= self._num_read:
                self._check_more(handoff)
                return
            read = self._read_tokens(handoff, pages, stop)
        self._reading_stop = stop
        # From now on the pages stay until the read has ended.
        rank.under_way[self._name] = self._room
        rank.reads.begin(read)

    def _check_more(self, handoff: Handoff) -> None:
        """Raise the reason why prefill will not publish more, if there is one."""
        self._check_time()
        refusal = self._rank.claims.refusal(handoff.source, handoff.lease, self._name)
        if refusal is not None:
            raise refusal

    def _read_tokens(self, handoff: Handoff, pages: Pages, stop: int) -> Read:
        """Return the next part of the positions, without windows and states."""
        memory = self._rank.memory
        return Read(
            request=self._name,
            source=handoff.source,
            lease=handoff.lease,
            local=memory.token_tables(pages.pages, pages.start),
            remote=handoff.blocks,
            tokens={memory.token_group: (self._num_read, stop)},
        )

    def _read_whole(self, handoff: Handoff, pages: Pages) -> Read:
        """Return the positions that are not read yet, with all windows and states.

        Each group reads whole pages, as far as prefill has them.
        """
        memory = self._rank.memory
        stop = handoff.num_tokens
        local = memory.block_tables(pages.pages, pages.start, stop, pages.states)
        tokens = dict[str, Range]()
        for group, window in memory.windows.items():
            # a window was not read before
            start = pages.start if window else self._num_read
            first_attended, _ = attended(start, stop, window)
            whole = whole_blocks(
                (start, stop),
                first_attended,
                memory.args.page_size,
                listed=local[group].first * memory.args.page_size,
                kept=handoff.first_kept(group, first_attended),
            )
            tokens[group] = (whole.start, whole.stop)
        return Read(
            request=self._name,
            source=handoff.source,
            lease=handoff.lease,
            local=local,
            remote=handoff.blocks,
            tokens=tokens,
        )

    def _write_metadata(self, entry: Mapping[str, Any]) -> None:
        """Write the first token, and what belongs to it, where SGLang looks for them."""
        rank = self._rank
        rows = rank.memory.metadata_rows(self._row_index)
        # Another engine's prefill knows the token alone; the rows may be an earlier request's.
        if "token" in entry:
            for row in rows:
                ctypes.memset(row.address, 0, row.num_bytes)
            rank.metadata.output_ids[self._row_index, 0] = entry["token"]
            rank.metadata.bootstrap_room[self._row_index, 0] = self._room
            return
        contents = [b64decode(text) for text in entry["metadata"]]
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
            rank.rooms.forget(self._name)
            rank.close_room(self._room)
            self._has_room = False
        rank.ended.pop(self._name, None)
        if self._published is not None and rank.memory.is_first:
            handoff = self._published.handoff
            rank.claims.end(handoff.source, handoff.lease, self._name)
            self._published = None

    def failure_exception(self) -> None:
        """Raise the reason why the request has failed."""
        raise self._error
