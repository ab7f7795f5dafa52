"""Decode: a request waits until prefill has published it, and then its pages are read.

Prefill may publish a prompt in chunks; each is read while the next is computed. An
:class:`~kvplan.protocol.importer.Importer` in each rank decides what is read, and when.
"""

from __future__ import annotations

import ctypes
import math
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from sglang.srt.disaggregation.base import BaseKVReceiver, KVPoll
from sglang.srt.disaggregation.base.conn import KVTransferDestination

from kvplan import KVPlanError
from kvplan.protocol import Claims, Importer, ImportState, Rooms, System
from kvplan.protocol.system import TOKEN_BYTES
from kvplan.staging import Copier
from kvplan.support import integer, members
from kvplan_nixl.reads import make_reads, pipeline_of
from kvplan_nixl.settings import Settings
from kvplan_nixl.sglang.changes import WEIGHTS
from kvplan_nixl.sglang.prompt import prompt_of
from kvplan_nixl.sglang.rank import Rank, RankMemory, logger

TOKEN_END: Final = 1 << 31
"""SGLang keeps tokens in 32 bits."""


class DecodeRank(Rank):
    """A rank of decode: its requests, and its reads. The first rank claims leases for all.

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
        self.metadata = queue.metadata_buffers
        self._scheduler = queue.scheduler
        self.claims = Claims(logger, system, settings.max_peers)
        self.importer = Importer(
            memory.groups,
            # SGLang clears receivers when those of all ranks have ended
            self.claims if memory.is_first else None,
            system.token_hex(TOKEN_BYTES),
            memory.key,
            rooms=Rooms(
                logger,
                memory.key,
                system,
                timeout_s=timeout_s,
                max_servers=settings.max_peers,
            ),
            weights=lambda: WEIGHTS.version,
        )
        self.reads = make_reads(
            memory.executor,
            self.claims,
            logger,
            key=memory.key,
            system=system,
            pipeline=pipeline_of(memory.executor, copier, settings.measured_rates()),
            handshakes=settings.handshakes(),
        )
        self._open_rooms: set[int] = set()
        # the rooms of requests that workers read, by name
        self._rooms_read: dict[str, int] = {}
        # Pages of an aborted request stay until its read has ended, however late.
        queue.transfer_queue.enable_deferred_kv_release = True
        queue.transfer_queue.deferred_kv_release_timeout = math.inf

    def is_written(self, room: int) -> bool:
        """Return whether bytes may still move into the pages of a room's request."""
        return any(
            self.reads.is_moving(name) for name, read in self._rooms_read.items() if read == room
        )

    def forward_event(self) -> Any:
        """Return an event of the forwards that SGLang has launched; None without streams.

        With its overlap schedule, a request that ended with the last batch is also in the one under
        way, which writes one more position of it: into pages that another request may have by now.
        """
        record = getattr(getattr(self._scheduler, "forward_stream", None), "record_event", None)
        return None if record is None else record()

    def open_room(self, room: int) -> None:
        """Refuse a room that another request has now. Raises ``NAME``.

        SGLang gives one room to all children of a request with ``n`` > 1, and asks by room whether
        pages may be freed.
        """
        if room in self._open_rooms:
            raise KVPlanError(
                "NAME",
                f"open room {room}",
                expected="a room of its own for each request",
                got="one in use",
                hint="ask for n = 1",
            )
        self._open_rooms.add(room)

    def close_room(self, room: int) -> None:
        """Free a room for another request."""
        self._open_rooms.discard(room)

    def begin_read(self, name: str, room: int) -> None:
        """Start to read a request that has pages, if prefill has published some of it."""
        self._rooms_read[name] = room
        self._start_reads()

    def give_up(self, name: str) -> None:
        """Read no more of a request."""
        self.importer.finish(name)
        self._start_reads()

    def forget(self, name: str) -> None:
        """Forget a request that SGLang has done with, when none of its bytes can move."""
        self.give_up(name)
        if name in self._rooms_read:
            self._note_ended()
        self.ended.pop(name, None)
        self.importer.end(name)

    def _start_reads(self) -> None:
        for partial_read in self.importer.step():
            self.reads.submit(partial_read)

    def _note_ended(self) -> None:
        """Take the reads that have ended, and those that have failed while bytes may move."""
        self._start_reads()
        errors = {result.request: result.error for result in self.reads.poll()}
        for name in errors:
            self._rooms_read.pop(name, None)
        for name, error in {**errors, **self.reads.late()}.items():
            # SGLang has dropped the request
            if self.importer.look(name) is not ImportState.ENDED:
                self.ended[name] = error


class Receiver(BaseKVReceiver):
    """A request of one rank. All ranks ask for it, and each reads its shard.

    SGLang allocates the request's pages when it leaves ``Bootstrapping``, which is when prefill has
    published some of it, or all.
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
        self._row_index = -1
        self._is_aborted = False
        self.conclude_state: Any = None
        self._error: Exception = RuntimeError("aborted")
        self._has_room = False
        # the event after which no forward writes into the pages, and the read that waits for it
        self._next_read: tuple[Any, Callable[[], None]] | None = None

    def init(self, prefill_dp_rank: int) -> None:
        """Ask for the room, unless the request is refused."""
        if self.conclude_state is not None:
            return
        try:
            self._rank.open_room(self._room)
        except KVPlanError as error:
            self._fail(error)
            return
        self._has_room = True
        self._rank.importer.ask(
            self._name,
            f"{self._room}",
            self._address,
            partial(prompt_of, self.req),
            len(self.req.origin_input_ids),
        )

    def refuse_rebootstrap(self) -> None:
        """Fail a request whose prompt and answer so far prefill would have to compute again."""
        action = f"read request {self._room} again"
        expected = "a request that was not retracted for new weights"
        self._fail(KVPlanError("PROMPT", action, expected=expected, got="one that was"))

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.conclude_state = KVPoll.Failed
        self._rank.give_up(self._name)

    def poll(self) -> Any:
        """Return the state of the request, a value of KVPoll."""
        if self.conclude_state is None:
            try:
                return self._advance()
            except Exception as error:  # only this request fails
                self._fail(error)
        return self.conclude_state

    def _advance(self) -> Any:
        """Continue the request, and return its state. Raises the reason why it fails."""
        rank = self._rank
        rank.poll()
        self._begin_read()
        if self._name in rank.ended:
            error = rank.ended.pop(self._name)
            if error is not None or self._is_aborted:
                raise error or self._error
            self._write_metadata(rank.importer.entry_of(self._name))
            self.conclude_state = KVPoll.Success
            return self.conclude_state
        state = rank.importer.look(self._name)
        if state is ImportState.REFUSED and (error := rank.importer.error_of(self._name)):
            raise error
        if state is ImportState.ASKING:
            return KVPoll.Bootstrapping
        # SGLang allocates pages now, and calls send_metadata.
        return KVPoll.WaitingForInput if state is ImportState.CLAIMED else KVPoll.Transferring

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
        self._row_index = aux_index
        rank = self._rank
        first, stop = decode_prefix_len or 0, len(self.req.origin_input_ids)
        try:
            pages = rank.memory.block_tables(kv_indices.tolist(), first, stop, state_indices or [])
            num_tokens = rank.importer.count(self._name, first, stop)
            assert num_tokens is not None
            self._next_read = (
                rank.forward_event(),
                partial(rank.importer.read, self._name, pages, num_tokens),
            )
            self._begin_read()
        except KVPlanError as error:
            self._fail(error)

    def _begin_read(self) -> None:
        """Start to read, once no earlier forward can write into the pages."""
        if self._next_read is None:
            return
        event, begin = self._next_read
        if event is None or event.query():
            self._next_read = None
            begin()
            self._rank.begin_read(self._name, self._room)

    def _write_metadata(self, entry: Mapping[str, Any]) -> None:
        """Write the first token, and what belongs to it, where SGLang looks for them."""
        rank = self._rank
        rows = rank.memory.metadata_rows(self._row_index)
        # Another engine's prefill knows the token alone; the rows may be an earlier request's.
        if "token" in entry:
            token = integer(entry["token"], "token of a room", high=TOKEN_END)
            for row in rows:
                ctypes.memset(row.address, 0, row.num_bytes)
            rank.metadata.output_ids[self._row_index, 0] = token
            rank.metadata.bootstrap_room[self._row_index, 0] = self._room
            return
        contents = _contents(members(str, entry.get("metadata", ()), "metadata of a room"))
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
        return self._rank.reads.is_moving(self._name)

    bootstrap_infos = ()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """SGLang calls this for metadata; prefill writes nothing, so nothing is sent."""

    def abort(self) -> None:
        """Give the request up; while it is read, when its bytes have moved."""
        self._is_aborted = True
        self._rank.give_up(self._name)
        if not self.abort_notified:
            self.conclude_state = KVPoll.Failed

    def clear(self) -> None:
        """Free the room for another request, and end the claim on the lease."""
        rank = self._rank
        if self._has_room:
            rank.close_room(self._room)
            self._has_room = False
        rank.forget(self._name)

    def failure_exception(self) -> None:
        """Raise the reason why the request has failed."""
        raise self._error


def _contents(texts: Sequence[str]) -> list[bytes]:
    """Return the rows of metadata in an entry, which nothing signs. Raises ``MESSAGE``."""
    try:
        return [b64decode(text, validate=True) for text in texts]
    except ValueError as error:
        action = "read metadata of a room"
        raise KVPlanError("MESSAGE", action, expected="rows in base64", got=f"{error}") from None
