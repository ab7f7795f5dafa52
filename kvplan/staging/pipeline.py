"""Pipelines: carry out staged requests, one chunk between workers while another is copied.

A :class:`Pipeline` has a staging region, an :class:`~kvplan.Executor` for transfers and a
:class:`Copier` for local copies. It takes requests of any plans that stage in this region, such as
one for each remote engine. A chunk is transferred into staging blocks, and then copied into place.

- staging.D1: chunks begin in the order in which their requests were submitted, as many as there are
  free staging blocks for, of one request or of several. Requests wait; none fails because there are
  many, and none overtakes another.
- staging.D2: staging blocks are free again only when all transfers of their chunk are settled, and
  its copies are done. Plans of equal layouts share blocks, such as those of like engines. A plan of
  another layout has its blocks elsewhere in the region, so its chunks wait until all blocks are
  free.
- staging.D3: the copies of a chunk begin when all its transfers are done; never if one has failed.
- staging.D4: when a request fails, or the caller cancels it, its transfers are cancelled and no
  more of it begins. It is settled when its transfers are, and the copies that had begun are done.
  Only its own blocks may have been written. A transfer that cannot be stopped holds its staging
  blocks until it ends.
- staging.D5: what fails under way becomes the request's ``error``, never an exception, and affects
  no other request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import attrs

from kvplan._checks import having, instance, name
from kvplan._text import count
from kvplan.describe.blocks import Tokens
from kvplan.errors import KVPlanError
from kvplan.executor import Executor, Status, Transfer, still_running
from kvplan.staging.choice import Rates
from kvplan.staging.copies import Copy
from kvplan.staging.plan import BlockTables, Chunk, FreeBlocks, StagedPlan, StagedRequest


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

    request: str
    status: Status = Status.RUNNING
    error: KVPlanError | None = None
    num_bytes: int = 0
    num_descriptors: int = 0

    def __attrs_post_init__(self) -> None:
        name(self.request, "name of a request")

    def __repr__(self) -> str:
        return f"<StagedTransfer {self.request!r} {self.status.value}>"


@attrs.define(eq=False)
class _Queued:
    """A request of a pipeline: chunks still to be made, None when all are, and how it will end."""

    transfer: StagedTransfer
    plan: StagedPlan
    chunks: StagedRequest | None
    ends: Status = Status.DONE
    error: KVPlanError | None = None

    @property
    def is_stopped(self) -> bool:
        return self.ends is not Status.DONE


@attrs.define(eq=False)
class _Work:
    """A chunk under way."""

    request: _Queued
    chunk: Chunk
    steps: Iterator[None] = attrs.field(init=False)
    transfers: list[Transfer] = attrs.field(factory=list)


class Pipeline:
    """Moves requests through a staging region of the executor's worker, which nothing else uses.

    Readers choose by ``rates`` whether it is faster than reads without it, by default by those of
    the worker's memory.

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
    """

    _by_region: ClassVar[WeakValueDictionary[tuple[int, str], Pipeline]] = WeakValueDictionary()
    """The pipeline of a staging region, by the identity of its executor and the region's name."""

    def __init__(
        self, executor: Executor, staging: str, copier: Copier, rates: Rates | None = None
    ) -> None:
        self._executor = having("prepare", executor, "executor", "an Executor")
        self._copier = having("begin", copier, "copier", "a Copier")
        self.staging: str = name(staging, "staging")
        self.rates: Rates | None = None if rates is None else instance(Rates, rates, "rates")
        self.num_chunks = 0
        """Chunks that have begun."""
        self._requests: dict[StagedTransfer, _Queued] = {}
        self._under_way: list[_Work] = []
        self._free = FreeBlocks(())
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
    ) -> StagedTransfer:
        """Begin a request of a plan, or queue it.

        Takes and raises what :meth:`StagedPlan.bind` does, before anything is queued; raises
        ``MEMORY`` for a plan that stages in another region. The request owns its blocks until it is
        settled. Ids are made chunk by chunk.
        """
        transfer = StagedTransfer(request)
        if instance(StagedPlan, plan, "plan").staging != self.staging:
            raise KVPlanError(
                "MEMORY",
                f"submit request {request!r}",
                expected=f"a plan that stages in {self.staging!r}",
                got=f"one in {plan.staging!r}",
            )
        chunks = plan.requested(local=local, remote=remote, tokens=tokens)
        self._requests[transfer] = _Queued(transfer, plan, chunks)
        self._begin_chunks()
        return transfer

    def poll(self) -> tuple[StagedTransfer, ...]:
        """Continue without waiting, and return the requests that are now settled.

        Takes a step or two of each chunk.
        """
        self._under_way = [work for work in self._under_way if self._advance(work)]
        # chunks that have ended leave their blocks to the next ones
        self._begin_chunks()
        settled = list[StagedTransfer]()
        busy = self._busy()
        for request in [*self._requests.values()]:
            if request not in busy:
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

    def _busy(self) -> set[_Queued]:
        """Return the requests with chunks to be made or carried out."""
        busy = {request for request in self._requests.values() if request.chunks is not None}
        return busy.union(work.request for work in self._under_way)

    def _begin_chunks(self) -> None:
        """Begin the chunks that there is room for, by rules staging.D1 and staging.D2."""
        for request in [*self._requests.values()]:
            while request.chunks is not None:
                if not self._begin_chunk(request, request.chunks):
                    return

    def _begin_chunk(self, request: _Queued, chunks: StagedRequest) -> bool:
        """Begin the next chunk of a request, if there is one. Return whether there was room."""
        if self._free.layout != request.plan.layout:
            if self._under_way:
                return False
            self._free = FreeBlocks(request.plan.layout)
        try:
            chunk = chunks.next_chunk(self._free)
        except KVPlanError as error:
            self._stop(request, Status.FAILED, error)
            return True
        if not chunks.ranges:
            request.chunks = None
        if chunk is None:
            return request.chunks is None
        self.num_chunks += 1
        request.transfer.num_bytes += sum(copy.num_bytes for copy in chunk.copies)
        work = _Work(request, chunk)
        work.steps = self._steps(work)
        self._under_way.append(work)
        if not self._advance(work):
            self._under_way.remove(work)
        return True

    def _advance(self, work: _Work) -> bool:
        """Continue some work by one step, and return whether anything of it is left."""
        try:
            next(work.steps)
        except StopIteration:
            self._free.give_back(work.chunk.blocks)
            return False
        return True

    def _steps(self, work: _Work) -> Iterator[None]:
        """Carry out a chunk by rule staging.D3: read into its blocks, then copy into place."""
        request = work.request.transfer.request
        try:
            for spec in work.chunk.specs:
                # a peer that exchanges nothing of this chunk needs no transfer
                if spec.local_ids.size:
                    work.transfers.append(self._executor.start(spec, request))
        except KVPlanError as error:
            self._stop(work.request, Status.FAILED, error)
        # the executor has not polled them yet
        is_running = True
        while is_running:
            yield
            is_running = self._poll_transfers(work)
        self._release_transfers(work)
        if work.request.is_stopped:
            return
        try:
            ticket = self._copier.begin(work.chunk.copies)
            while not self._copier.done(ticket):
                yield
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

    def _stop(
        self,
        request: _Queued,
        ends: Status,
        error: KVPlanError | None = None,
    ) -> None:
        """Stop a request by rule staging.D4. The first reason to stop is how it ends."""
        if error is not None:
            # its frames refer to this pipeline, which would keep its staging region
            error.__traceback__ = None
        if not request.is_stopped:
            request.ends = ends
            request.error = error
            request.chunks = None
        for work in self._under_way:
            if work.request is request:
                for transfer in work.transfers:
                    self._executor.cancel(transfer)

    def __repr__(self) -> str:
        return f"<Pipeline of {self.staging!r}: {count(len(self._requests), 'request')}>"
