"""Prefill: a request's pages are pinned when they are computed, until decode has read them.

A prompt that SGLang computes in chunks is published several times, as far as it is computed: decode
reads a chunk while the next one is computed. An :class:`~kvplan.protocol.exporter.Exporter` in each
rank decides what is published and until when pages stay.
"""

from __future__ import annotations

import ctypes
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base import BaseKVSender, KVPoll
from sglang.srt.disaggregation.base.conn import KVTransferMetric
from sglang.srt.runtime_context import get_serving
from sglang.srt.utils.network import get_local_ip_auto

from kvplan import KVPlanError
from kvplan.protocol import Exporter, Handoff, Leases, Listener, Source, System
from kvplan.protocol.system import RETRY_S, TOKEN_BYTES, Background
from kvplan.support import at_most
from kvplan_nixl.serving.access import is_loopback
from kvplan_nixl.settings import Settings
from kvplan_nixl.sglang.bootstrap import publish, withdraw
from kvplan_nixl.sglang.changes import WEIGHTS
from kvplan_nixl.sglang.prompt import prompt_of
from kvplan_nixl.sglang.rank import Rank, RankMemory, logger

MAX_PUBLISHERS: Final = 64
"""Bootstrap servers in which requests are published at a time."""

MAX_COUNTED_ROOMS: Final = 1 << 14
"""Rooms whose requests are counted: as many as a bootstrap server keeps."""


class PrefillRank(Rank):
    """A rank of prefill. The engine's first one serves the offers of all ranks, and has the leases.

    All ranks of the engine make theirs at once, since each calls ``gather``, which returns the
    values of all.
    """

    def __init__(
        self,
        memory: RankMemory,
        gather: Callable[[Any], list[Any]],
        settings: Settings,
        system: System,
    ) -> None:
        super().__init__(memory, system)
        executor = memory.executor
        # Readers get the offers of all ranks from the first one. Ranks of context parallelism have
        # one cache, but nothing says when the others have computed what the first one hands over.
        envelope = executor.envelope() if memory.cp_rank == 0 else b""
        offers: list[bytes] = [offer for offer in gather(envelope) if offer]
        leases = Leases(system, lease_s=settings.lease_s, max_lease_s=settings.max_lease_s)
        self.listener: Listener | None = None
        if memory.is_first:
            engine_id = memory.info.engine_id
            host = settings.host or _default_host()
            self.listener = Listener(
                engine_id,
                host,
                offers,
                leases,
                port=settings.port,
                bind=settings.bind or host,
                system=system,
            )
        sources: list[Source] = gather(self.listener and self.listener.source)
        self.exporter = Exporter(
            sources[0], leases, memory.groups, early_tokens=settings.early_tokens
        )
        # of the rooms of all stages
        owners: list[str] = gather(system.token_hex(TOKEN_BYTES))
        self.owner = owners[0]
        # by the address of a bootstrap server, while there are requests that name it
        self._publishers: WeakValueDictionary[str, Background] = WeakValueDictionary()
        self._num_attempts: OrderedDict[int, int] = OrderedDict()

    def next_attempt(self, room: int) -> int:
        """Count the requests that have come in a room, of which one may come again under its id.

        All ranks get the same requests in one order, so the number is equal in all stages.
        """
        number = self._num_attempts.pop(room, 0) + 1
        self._num_attempts[room] = number
        if len(self._num_attempts) > MAX_COUNTED_ROOMS:
            self._num_attempts.popitem(last=False)
        return number

    def publisher_of(self, address: str) -> Background:
        """Return what publishes requests in a bootstrap server, one after the other.

        Each server has a queue, since requests name their server, and one may not answer. Raises
        ``NAME`` for a server that no operator has allowed, and ``RANGE`` for too many at a time.
        """
        publisher = self._publishers.get(address)
        if publisher is None:
            self.system.check_server(address)
            number = len(self._publishers) + 1
            at_most(MAX_PUBLISHERS, number, "bootstrap servers at a time", f"publish at {address}")
            publisher = Background("publish requests", 1, self.system)
            self._publishers[address] = publisher
        return publisher

    def is_written(self, room: int) -> bool:
        """Decode reads, and writes nothing here."""
        return False

    def _note_ended(self) -> None:
        """Take the requests that decode has read, or that no reader has claimed in time."""
        ended = self.exporter.step()
        for request in ended.released:
            self.ended[request] = ended.late.get(request)
        if ended.num_stale:
            message = "%d renewals came after their lease expired; the requests fail"
            logger.error(message, ended.num_stale)


def _default_host() -> str:
    """Return where SGLang itself listens: on loopback, or at this machine's address."""
    host: str = get_serving().host
    return host if is_loopback(host) else get_local_ip_auto()


class Sender(BaseKVSender):
    """A request of one rank, which collects its pages.

    The first rank of each pipeline stage publishes the stage's pages. The first one of all has the
    lease and waits until they are read, and SGLang frees no stage's pages before.
    """

    req: Any
    """SGLang's request, which is set from outside."""

    _early_send_wait_event: Any = None
    """What SGLang sets where the forward pass that computes a chunk may still run: pages of a
    prefix that another request computes, before the first chunk of this one. Later chunks wait for
    it too, which takes no time: it is over by then."""

    def __init__(
        self,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self._rank: PrefillRank = mgr.rank
        self._address = bootstrap_addr
        self._room = bootstrap_room
        self._name = self._rank.name_of(bootstrap_room)
        self._number = self._rank.next_attempt(bootstrap_room)
        self._pages: list[int] = []
        self._num_tokens = 0
        self._is_sent = False
        self._is_aborted = False
        self._may_be_published = False
        self._num_published = 0
        self._result: Any = None
        self._error: Exception = RuntimeError("aborted")
        self._has_room = False
        try:
            self._publisher = self._rank.publisher_of(bootstrap_addr)
            self._rank.exporter.open(self._name, f"{bootstrap_room}")
            self._has_room = True
        except KVPlanError as error:
            self._error = error
            self._result = KVPoll.Failed

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Take the number of pages to come, and the index of the request's row of metadata."""
        self._num_pages = num_kv_indices
        self._row_index: Any = aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Return whether :meth:`send` wants a chunk: also the last one, whose states matter."""
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None
    ) -> None:
        """Collect pages, and publish the request: with the last ones, the whole of it."""
        assert num_kv_tokens is not None
        if not self._has_room:
            return
        self._pages += kv_indices.tolist()
        self._num_tokens += num_kv_tokens
        rank = self._rank
        memory = rank.memory
        self._is_sent = len(self._pages) >= self._num_pages
        # Other ranks are done when the first one says that readers are.
        if self._is_sent and rank.listener is None:
            self._result = KVPoll.Success
        if not memory.is_first_of_stage:
            return
        if not self._is_sent:
            self._publish_early(self._early_send_wait_event)
            return
        num_tokens = self._num_tokens
        handoff = rank.exporter.finish(
            self._name,
            num_tokens,
            memory.block_tables(self._pages, 0, num_tokens, state_indices or []),
            partial(prompt_of, self.req),
            weights_version=WEIGHTS.version,
        )
        if handoff is None:
            # decode is done with it
            self._result = KVPoll.Success
            return
        entry = self._entry(handoff)
        entry["metadata"] = [b64encode(row).decode() for row in self._metadata()]
        until = rank.system.monotonic() + rank.exporter.leases.lease_s
        self._publisher.submit(partial(self._publish_until, until, entry))

    def _publish_early(self, wait_event: Any) -> None:
        """Publish the pages that are computed, when ``wait_event`` says that they are."""
        rank = self._rank
        handoff = rank.exporter.publish(
            self._name,
            self._num_tokens,
            partial(rank.memory.token_tables, [*self._pages]),
            partial(prompt_of, self.req),
            weights_version=WEIGHTS.version,
        )
        if handoff is None:
            return
        self._num_published = num_tokens = handoff.num_tokens
        # now, since weights may have changed when it is published
        entry = self._entry(handoff)

        async def publish_pages() -> None:
            if wait_event is not None:
                await self._rank.system.work(wait_event.synchronize)
            # more may be published by now, or the request may have ended
            if not self._has_room or self._is_sent or self._num_published > num_tokens:
                return
            await self._publish(entry)

        self._publisher.submit(publish_pages)

    def _entry(self, handoff: Handoff) -> dict[str, Any]:
        """Return what decode has to know of this stage's layers."""
        return {"handoff": handoff.params(self._rank.memory.key), "attempt": self._attempt}

    @property
    def _attempt(self) -> str:
        """The name of this request in its room, equal in all stages."""
        return f"{self.req.rid} {self._number}"

    def _metadata(self) -> list[bytes]:
        """Return the request's first token and what belongs to it, as SGLang keeps them."""
        rows = self._rank.memory.metadata_rows(self._row_index)
        return [ctypes.string_at(row.address, row.num_bytes) for row in rows]

    async def _publish_until(self, until: float, entry: Any) -> None:
        """Publish the request; if that fails, again and again while its pages are kept."""
        system = self._rank.system
        if not self._has_room or system.monotonic() >= until or await self._publish(entry):
            return

        async def publish_again() -> None:
            await system.sleep(RETRY_S)
            self._publisher.submit(partial(self._publish_until, until, entry))

        # the server may refuse this request alone, so others are published meanwhile
        system.start("kvplan publish again", publish_again)

    async def _publish(self, entry: Any) -> bool:
        """Publish an entry, and return whether that was possible."""
        memory = self._rank.memory
        # the answer may be lost
        self._may_be_published = True
        try:
            await publish(
                self._address,
                self._room,
                entry,
                memory.stage,
                memory.num_stages,
                owner=self._rank.owner,
                system=self._rank.system,
            )
        except KVPlanError as error:
            logger.warning("request %s: KV is not published yet: %s", self._room, error)
            return False
        return True

    async def _withdraw(self) -> None:
        """Withdraw what was published, since no reader needs it; else it is kept a while."""
        memory = self._rank.memory
        if not self._may_be_published:
            return
        try:
            await withdraw(
                self._address,
                self._room,
                self._rank.owner,
                memory.stage,
                memory.num_stages,
                attempt=self._attempt,
                system=self._rank.system,
            )
        except KVPlanError as error:
            logger.warning("request %s: its published KV is not withdrawn: %s", self._room, error)

    def poll(self) -> Any:
        """Return the state of the request, a value of KVPoll."""
        if self._result is None and self._is_sent:
            self._rank.poll()
            if self._name in self._rank.ended:
                error = self._rank.ended.pop(self._name)
                self._error = error or self._error
                self._result = KVPoll.Failed if error or self._is_aborted else KVPoll.Success
        if self._result is not None:
            return self._result
        return KVPoll.Transferring if self._is_sent else KVPoll.WaitingForInput

    poll_pp_consensus = poll

    def abort(self) -> None:
        """Give the request up; once it is published, when its reader is done.

        SGLang may forget one that is not sent, and call nothing more.
        """
        self._is_aborted = True
        if not self._is_sent:
            self._result = KVPoll.Failed
            self.clear()

    def clear(self) -> None:
        """Let another request have the room."""
        if not self._has_room:
            return
        self._has_room = False
        self._rank.exporter.abort(self._name)
        self._rank.ended.pop(self._name, None)
        if self._rank.memory.is_first_of_stage:
            # after the request is published
            self._publisher.submit(self._withdraw)

    def failure_exception(self) -> None:
        """Raise the reason why the request has failed, and clear it, which SGLang does not."""
        self.clear()
        raise self._error

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()
