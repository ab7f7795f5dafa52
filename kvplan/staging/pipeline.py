"""Pipelines: carry out staged requests, one chunk between workers while another is copied.

A :class:`Pipeline` has a staging region, an :class:`~kvplan.Executor` for transfers and a
:class:`Copier` for local copies. It takes requests of any plans that stage in this region, such as
one for each remote engine. A chunk of a ``READ`` is transferred and then copied, one of a ``WRITE``
the other way round.

- staging.D1: chunks go through the staging region in the order in which their requests were
  submitted, and alternate between the buffer slots, also from one request to the next. Requests
  wait; none fails because there are many.
- staging.D2: a buffer slot is refilled only when all transfers of its previous chunk are settled,
  and its copies are done. Each plan has its buffer slots elsewhere in the region, so a chunk of
  another plan waits until this holds of both slots.
- staging.D3: the second step of a chunk begins when all of the first step is done; never if a
  transfer or copy has failed.
- staging.D4: each peer is notified once, under the request's name, when all chunks of the request
  have been transferred, and never otherwise, unless the caller wants no notices. Notices need no
  buffer slot: a request of no bytes may be done before earlier requests.
- staging.D5: when a request fails, or the caller cancels it, its transfers are cancelled and no
  more of it begins. It is settled when its transfers are, and the copies that had begun are done.
  Only its own blocks may have been written. A transfer that cannot be stopped holds its buffer slot
  until it ends.
- staging.D6: what fails under way becomes the request's ``error``, never an exception, and affects
  no other request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import WeakValueDictionary

import attrs

from kvplan._checks import having, instance, name
from kvplan._text import count
from kvplan.describe.blocks import Tokens
from kvplan.errors import KVPlanError
from kvplan.executor import Executor, Status, Transfer, request_name, still_running
from kvplan.plan.specs import ReadSpec
from kvplan.staging.copies import Copy
from kvplan.staging.plan import BlockTables, Chunk, StagedPlan


class Copier(Protocol):
    """Carries out the copies of one worker. Not for several threads at once."""

    def begin(self, copies: Sequence[Copy]) -> Any:
        """Begin copies, no two of which write the same bytes, and return a ticket for :meth:`done`.

        Raises only :class:`~kvplan.KVPlanError`; then nothing is being copied.
        """

    def done(self, ticket: Any) -> bool:
        """Return whether copies are done, without waiting.

        Raises :class:`~kvplan.KVPlanError` if they have failed.
        """


@attrs.define(eq=False, repr=False)
class StagedTransfer:
    """A request in a pipeline.

    ``status`` is the result of the last poll; ``error`` is set if that is FAILED, or if a transfer
    of the request has failed whose bytes may still move. When the request is settled, nothing
    touches its blocks any more; if it is DONE, all their bytes are in place.
    ``num_bytes`` counts the bytes of chunks that have begun, as a direct plan would move them, and
    ``num_descriptors`` those of transfers that are done.
    """

    request: str = attrs.field(converter=request_name)
    status: Status = Status.RUNNING
    error: KVPlanError | None = None
    num_bytes: int = 0
    num_descriptors: int = 0

    def __repr__(self) -> str:
        return f"<StagedTransfer {self.request!r} {self.status.value}>"


@attrs.define(eq=False)
class _StagedRequest:
    """A request of a plan: ``chunks`` still to be made, None when all are, and how it will end.

    ``notifies`` says whether its peers are still to be notified.
    """

    transfer: StagedTransfer
    plan: StagedPlan
    chunks: Iterator[Chunk] | None
    notifies: bool
    ends: Status = Status.DONE
    error: KVPlanError | None = None

    @property
    def is_stopped(self) -> bool:
        return self.ends is not Status.DONE


@attrs.define(eq=False)
class _Work:
    """A chunk under way in a buffer slot, or the notices of a request, which need none."""

    request: _StagedRequest
    slot: int | None
    steps: Iterator[None] = attrs.field(init=False)
    transfers: list[Transfer] = attrs.field(factory=list)
    has_moved: bool = False


class _PendingChunk(NamedTuple):
    """A chunk that is made and waits for its buffer slot, and its request."""

    request: _StagedRequest
    chunk: Chunk


def _in_turn(request: _StagedRequest, steps: Iterable[Iterator[None]]) -> Iterator[None]:
    """Take steps by rule staging.D3: each begins when the one before is done, if nothing has
    failed.
    """
    for step in steps:
        if not request.is_stopped:
            for _ in step:
                yield


class Pipeline:
    """Moves requests through a staging region of the executor's worker, which nothing else uses.

    Raises ``MEMORY`` where another pipeline of the executor has the staging region, as long as
    anything refers to that pipeline. Not for several threads at once.

    >>> import attrs
    >>> from kvplan import Blocks, Model, Region
    >>> from kvplan.staging import stage
    >>> from kvplan.testing import FakeCopier, FakeNetwork
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (decode,), (prefill,) = (model.engine(name, num_blocks=99, layout=layout)
    ...                          for name, layout in (("decode", "LBHNC"), ("prefill", "LBNHC")))
    >>> local = attrs.evolve(decode, regions=(*decode.regions, Region("staging", 1 << 50, 8 << 20)))
    >>> network = FakeNetwork([prefill, local])
    >>> copier = FakeCopier(network.memory, local.key)
    >>> pipeline = Pipeline(network.executor(local), "staging", copier)
    >>> staged = stage(local, [prefill], staging="staging")
    >>> pipeline.prepare(staged)  # once per remote engine
    >>> local_table, remote_table = Blocks(range(20, 32)), Blocks(range(7, 19))
    >>> tables = {"local": {"attn": local_table}, "remote": {"attn": remote_table}}
    >>> pipeline.submit(staged, "request 1", **tables, tokens=(10, 190))
    <StagedTransfer 'request 1' running>
    >>> pipeline.poll()  # once in each step of an engine
    (<StagedTransfer 'request 1' done>,)
    >>> network.executor(prefill).notices()
    (Notice(engine_id='decode', rank=0, request='request 1', attempt=0,
            status=<Status.DONE: 'done'>),)
    """

    _by_region: ClassVar[WeakValueDictionary[tuple[int, str], Pipeline]] = WeakValueDictionary()
    """The pipeline of a staging region, by the identity of its executor and the region's name."""

    def __init__(self, executor: Executor, staging: str, copier: Copier) -> None:
        self._executor = having("prepare", executor, "executor", "an Executor")
        self._copier = having("begin", copier, "copier", "a Copier")
        self.staging: str = name(staging, "staging")
        self.num_chunks = 0
        """Chunks that have begun."""
        self._requests: dict[StagedTransfer, _StagedRequest] = {}
        self._next: _PendingChunk | None = None
        self._under_way: list[_Work] = []
        # the first chunk goes to slot 0
        self._last_slot = 1
        if self._by_region.setdefault((id(executor), staging), self) is not self:
            raise KVPlanError(
                "MEMORY",
                f"make a pipeline of {staging!r}",
                expected="a staging region of its own",
                got="that of another pipeline",
                hint="submit requests of all plans to one pipeline, or delete the other first",
            )

    def prepare(self, plan: StagedPlan) -> None:
        """Prepare the plan's transfers, once. Raises what :meth:`Executor.prepare` does."""
        for transfer in instance(StagedPlan, plan, "plan").transfers:
            self._executor.prepare(transfer)

    def submit(
        self,
        plan: StagedPlan,
        request: str,
        *,
        local: BlockTables,
        remote: BlockTables,
        tokens: Tokens = None,
        notify: bool = True,
    ) -> StagedTransfer:
        """Begin a request of a plan, or queue it.

        With ``notify``, each peer gets a notice when all bytes have moved.

        Takes and raises what :meth:`StagedPlan.bind` does, before anything is queued; raises
        ``MEMORY`` for a plan that stages in another region. The request owns its blocks until it is
        settled. Blocks that a writer sends must be filled by now; on a GPU,
        :class:`kvplan_nixl.rearrange.TorchCopier` waits for what torch's present stream does. Ids
        are made chunk by chunk.
        """
        transfer = StagedTransfer(request)
        notifies = instance(bool, notify, "notify")
        if instance(StagedPlan, plan, "plan").staging != self.staging:
            raise KVPlanError(
                "MEMORY",
                f"submit request {request!r}",
                expected=f"a plan that stages in {self.staging!r}",
                got=f"one in {plan.staging!r}",
            )
        slots = self._slots()
        chunks = plan.bind(local=local, remote=remote, tokens=tokens, buffer_slots=slots)
        self._requests[transfer] = _StagedRequest(transfer, plan, chunks, notifies)
        self._begin_chunks()
        return transfer

    def poll(self) -> tuple[StagedTransfer, ...]:
        """Continue without waiting, and return the requests that are now settled.

        Takes a step or two in each buffer slot.
        """
        # chunks that end free slots for the next ones, and requests without further chunks notify
        self._advance_all(in_slots=True)
        self._begin_chunks()
        self._notify()
        self._advance_all(in_slots=False)
        settled = list[StagedTransfer]()
        # nothing of a settled request is left to do, and no peer of a request that is done waits
        busy = self._busy()
        for request in [*self._requests.values()]:
            if request not in busy and (request.is_stopped or not request.notifies):
                request.transfer.status = request.ends
                request.transfer.error = request.error
                del self._requests[request.transfer]
                settled.append(request.transfer)
        return tuple(settled)

    def cancel(self, transfer: StagedTransfer) -> None:
        """Ask a running request to stop. It is CANCELLED when nothing of it is under way."""
        if instance(StagedTransfer, transfer, "transfer") in self._requests:
            self._stop(self._requests[transfer], Status.CANCELLED)

    def release(self, transfer: StagedTransfer) -> None:
        """Check that a request is settled: then it holds nothing.

        Raises ``TRANSFER`` for one that is running.
        """
        if not instance(StagedTransfer, transfer, "transfer").status.is_settled:
            raise still_running(transfer.request, "release a staged transfer")

    def _slots(self) -> Iterator[int]:
        """Yield for each chunk that is made the slot that did not begin last."""
        while True:
            yield 1 - self._last_slot

    def _busy(self, but_moved: bool = False) -> set[_StagedRequest]:
        """Return the requests with chunks to be made or carried out.

        With ``but_moved``, leave out those whose transfers have all moved.
        """
        busy = {request for request in self._requests.values() if request.chunks is not None}
        if self._next is not None:
            busy.add(self._next.request)
        for work in self._under_way:
            if not (but_moved and work.has_moved):
                busy.add(work.request)
        return busy

    def _begin_chunks(self) -> None:
        """Begin chunks by rules staging.D1 and staging.D2. One more than can begin is made, while
        bytes move.
        """
        while (following := self._following()) is not None and self._may_begin(following):
            request, chunk = following
            self._next = None
            self._last_slot = chunk.buffer_slot
            self.num_chunks += 1
            request.transfer.num_bytes += sum(copy.num_bytes for copy in chunk.copies)
            # a peer that exchanges nothing of this chunk needs no transfer
            specs = [spec for spec in chunk.specs if spec.local_ids.size]
            self._begin(_Work(request, chunk.buffer_slot), specs, chunk.copies)

    def _may_begin(self, following: _PendingChunk) -> bool:
        """Return whether a chunk's buffer slot is free, and the other one is not another plan's."""
        for work in self._under_way:
            # notices need no buffer slot
            if work.slot is None:
                continue
            is_same_plan = work.request.plan is following.request.plan
            if work.slot == following.chunk.buffer_slot or not is_same_plan:
                return False
        return True

    def _following(self) -> _PendingChunk | None:
        """Return the chunk to begin next, made if need be."""
        for request in self._requests.values():
            while self._next is None and request.chunks is not None:
                self._make_chunk(request, request.chunks)
        return self._next

    def _make_chunk(self, request: _StagedRequest, chunks: Iterator[Chunk]) -> None:
        """Make the next chunk of a request, if there is one."""
        try:
            chunk = next(chunks, None)
        except KVPlanError as error:
            self._stop(request, Status.FAILED, error)
            return
        if chunk is None:
            request.chunks = None
        else:
            self._next = _PendingChunk(request, chunk)

    def _notify(self) -> None:
        """Notify the peers of requests whose chunks have all been transferred (staging.D4)."""
        # a peer may reuse its blocks when all is transferred, while the last chunk is still copied
        unmoved = self._busy(but_moved=True)
        for request in self._requests.values():
            if request.notifies and request not in unmoved and not request.is_stopped:
                request.notifies = False
                self._begin(_Work(request, slot=None), request.plan.closing)

    def _begin(self, work: _Work, specs: Iterable[ReadSpec], copies: Sequence[Copy] = ()) -> None:
        """Begin some work, and take its first step. A ``READ`` copies last, a ``WRITE`` first."""
        # the first step fills the buffer slot, and the second one empties it
        steps = [self._transfer(work, specs)]
        if copies:
            copying = self._copy(work, copies)
            steps.insert(1 if work.request.plan.operation == "READ" else 0, copying)
        work.steps = _in_turn(work.request, steps)
        self._under_way.append(work)
        if not self._advance(work):
            self._under_way.remove(work)

    def _advance_all(self, in_slots: bool) -> None:
        """Continue what is under way in buffer slots, or the notices, and keep what is not over."""
        unfinished = []
        for work in self._under_way:
            is_in_slot = work.slot is not None
            if is_in_slot != in_slots or self._advance(work):
                unfinished.append(work)
        self._under_way = unfinished

    def _advance(self, work: _Work) -> bool:
        """Continue some work by one step, and return whether anything of it is left."""
        try:
            next(work.steps)
        except StopIteration:
            return False
        return True

    def _transfer(self, work: _Work, specs: Iterable[ReadSpec]) -> Iterator[None]:
        """Start transfers, and wait until they are settled."""
        self._start(work, specs)
        is_running = True
        while is_running:
            yield
            is_running = self._poll_transfers(work)
        self._release_transfers(work)
        work.has_moved = True

    def _start(self, work: _Work, specs: Iterable[ReadSpec]) -> None:
        """Start the transfers of specs. Those of a chunk notify nobody."""
        request = work.request.transfer.request
        notify = work.slot is None
        try:
            for spec in specs:
                work.transfers.append(self._executor.start(spec, request, notify=notify))
        except KVPlanError as error:
            self._stop(work.request, Status.FAILED, error)

    def _poll_transfers(self, work: _Work) -> bool:
        """Poll all transfers, and return whether one is still running."""
        for transfer in work.transfers:
            status = self._executor.poll(transfer)
            if status.is_settled and status is not Status.DONE:
                self._stop(work.request, status, transfer.error)
            elif status is Status.RUNNING and transfer.error is not None:
                work.request.transfer.error = transfer.error
                self._stop(work.request, Status.FAILED, transfer.error)
        return not all(transfer.status.is_settled for transfer in work.transfers)

    def _release_transfers(self, work: _Work) -> None:
        """Release all transfers, which are settled."""
        while work.transfers:
            transfer = work.transfers.pop()
            work.request.transfer.num_descriptors += transfer.num_descriptors
            try:
                self._executor.release(transfer)
            except KVPlanError as error:
                self._stop(work.request, Status.FAILED, error)

    def _copy(self, work: _Work, copies: Sequence[Copy]) -> Iterator[None]:
        """Begin copies, and wait until they are done."""
        try:
            ticket = self._copier.begin(copies)
            while not self._copier.done(ticket):
                yield
        except KVPlanError as error:
            self._stop(work.request, Status.FAILED, error)

    def _stop(
        self,
        request: _StagedRequest,
        ends: Status,
        error: KVPlanError | None = None,
    ) -> None:
        """Stop a request by rule staging.D5. The first reason to stop is how it ends."""
        if error is not None:
            # its frames refer to this pipeline, which would keep its staging region
            error.__traceback__ = None
        if not request.is_stopped:
            request.ends = ends
            request.error = error
            request.chunks = None
        if self._next is not None and self._next.request is request:
            self._next = None
        for work in self._under_way:
            if work.request is request:
                for transfer in work.transfers:
                    self._executor.cancel(transfer)

    def __repr__(self) -> str:
        return f"<Pipeline of {self.staging!r}: {count(len(self._requests), 'request')}>"
