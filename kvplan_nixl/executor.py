"""NixlExecutor: moves the bytes of one worker's specs through NIXL.

The executor computes nothing. It registers the worker's regions, hands a plan's rows to NIXL as
strided descriptors, and indexes them by a spec's ids. It follows the rules of
:mod:`kvplan.executor` and these:

- nixl.N1: An envelope makes a remote worker known. A plan is prepared only if its remote workers
  equal those of the envelopes. A restarted process has a new agent name, so transfers meant for the
  old process never reach it.
- nixl.N2: NIXL can release a running transfer or remove its remote agent, but neither stops bytes
  under way. So the executor does neither while a transfer runs. A cancelled transfer runs until
  NIXL reports DONE or an error, also where its remote worker is disconnected by force. Only
  :meth:`NixlExecutor.close` ends running transfers. An error ends a transfer only if UCX stops
  writing after it. With its own copies on one host (CMA, :mod:`kvplan_nixl.cma`) it does not, so
  where it may have used these, a transfer that has failed stays RUNNING until the process of its
  remote worker has ended.
- nixl.N3: Handles are freed in this order: transfers, prepared rows, remote agents, registered
  memory, the agent. After :meth:`NixlExecutor.close` nothing of NIXL is left, whatever transfers
  and errors the caller keeps.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

import attrs

from kvplan import Executor, KVPlanError, ReadSpec, Status, Transfer, TransferPlan, Worker
from kvplan.describe import Key, check_memory
from kvplan.executor import check_local, not_connected, not_planned_for, still_running, unprepared
from kvplan.plan import Pair, Table
from kvplan.protocol import SharedKey
from kvplan.support import having, instance, members, seconds
from kvplan_nixl import cma
from kvplan_nixl.agent import LOCAL, Agent, Handle, MemoryRange
from kvplan_nixl.backends import UCX, Backends, checked_backends
from kvplan_nixl.envelope import Envelope, agent_prefix
from kvplan_nixl.events import Peer, Watch
from kvplan_nixl.serving.host_key import AnyKey

PAUSE_S: Final = 50e-6
"""The pause between two polls of :func:`settle`."""


@attrs.define(eq=False, repr=False)
class NixlTransfer(Transfer):
    """A transfer with NIXL's handle, which is None where no byte moves."""

    is_cancelled: bool = False
    handle: Handle | None = None
    peer: _Peer | None = None
    watch: Watch = attrs.field(factory=Watch)


@attrs.frozen(eq=False)
class PreparedRows:
    """The rows of both tables of a pair, ``local`` and ``remote``, as NIXL has them."""

    local_table: Table
    local: Handle
    remote: Handle


@attrs.define(eq=False)
class _Peer:
    """A remote worker.

    ``attached`` is its registered memory where it is in this process, ``lost`` why it is gone,
    ``rows`` what NIXL has of it by its tables, and ``held`` its transfers that have a handle.
    """

    worker: Worker
    agent: str
    attached: tuple[MemoryRange, ...] | None = None
    lost: KVPlanError | None = None
    rows: WeakKeyDictionary[Table, PreparedRows] = attrs.field(factory=WeakKeyDictionary)
    held: set[NixlTransfer] = attrs.field(factory=set)

    def is_connected_by(self, envelope: Envelope) -> bool:
        """Return whether an envelope is that of the process that is connected."""
        is_same_process = self.agent == envelope.agent and self.worker == envelope.worker
        return is_same_process and self.lost is None


class NixlExecutor:
    """The :class:`~kvplan.Executor` of one worker, with its own NIXL agent.

    ``backends`` are NIXL's backends by name, in order of preference, each with its options: ``UCX``
    for DRAM and VRAM, followed by ``POSIX`` for files. The worker's regions stay registered until
    the executor is closed, so use it as a context manager, from one thread at a time. Envelopes are
    authenticated by ``key``, which all engines share: by default the one of this host's engines.

    Raises ``BACKEND`` for a backend that is missing or refuses the worker's memory.

    >>> import numpy as np
    >>> from kvplan import Axis, Blocks, Group, View, Worker, plan_reads, region_of
    >>> def worker(engine, cache):
    ...     region = region_of(cache)
    ...     axes = (Axis("token", 0, 4, 4, 2), Axis("dim", 0, 2, 2, 1))
    ...     view = View("mla", "attn", region, "uint8", axes, num_blocks=10, block_stride_bytes=8)
    ...     return Worker(engine, 0, (region,), (Group("attn", 4),), (view,))
    >>> caches = np.arange(80, dtype=np.uint8), np.zeros(80, np.uint8)
    >>> source, local = worker("prefill", caches[0]), worker("decode", caches[1])
    >>> with NixlExecutor(source) as prefill, NixlExecutor(local) as decode:
    ...     plan = plan_reads(local, [decode.connect(prefill.envelope())])
    ...     decode.prepare(plan)
    ...     tables = {"local": {"attn": Blocks([7])}, "remote": {"attn": Blocks([3])}}
    ...     (spec,) = plan.bind(**tables, tokens=(1, 3))
    ...     transfer = decode.start(spec, "request 1")
    ...     settle(decode, [transfer], timeout_s=10)
    True
    >>> transfer.status, caches[1][56:64].tolist()
    (<Status.DONE: 'done'>, [0, 0, 26, 27, 28, 29, 0, 0])
    """

    def __init__(
        self,
        worker: Worker,
        backends: Backends = UCX,
        *,
        key: AnyKey = None,
    ) -> None:
        self.worker = instance(Worker, worker, "worker")
        # a worker that connects to none needs no key of the host either
        self._key = None if key is None else SharedKey.of(key)
        check_memory(worker.regions, f"register the memory of {worker.label}")
        self._process = cma.Process.current()
        named_process = "" if self._process is None else f"{self._process}."
        agent_name = f"{agent_prefix(worker)}{named_process}{uuid.uuid4().hex}"
        options = checked_backends(backends)
        self._uses_cma = "UCX" in options and cma.is_enabled(options["UCX"], os.environ)
        self._agent = Agent(agent_name, options)
        try:
            self._agent.register(worker.regions)
        except KVPlanError:
            self._agent.close()
            raise
        self._peers: dict[Key, _Peer] = {}
        # peers that were disconnected, as long as they have transfers
        self._disconnected: set[_Peer] = set()
        self._local: WeakValueDictionary[tuple[str, str, bytes], Handle] = WeakValueDictionary()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def envelope(self) -> bytes:
        """Return the envelope of this worker, for :meth:`connect` of a remote worker's executor."""
        metadata = self._agent.metadata()
        return Envelope(self.worker, self._agent.name, metadata, self._handles()).pack(self._key)

    def _handles(self) -> bytes:
        """Return what lets processes of this host map the worker's memory: nothing here."""
        return b""

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The remote workers that are connected or lost.

        A worker that dies is lost when a transfer fails.
        """
        return tuple(Peer(peer.worker, peer.lost) for peer in self._peers.values())

    def connect(self, envelope: bytes) -> Worker:
        """Connect to a remote worker by its envelope, and return the worker, to plan with.

        With the backends :data:`UCX` it does not wait for the worker. Without an answer,
        transfers fail with ``PEER``, or this call does, if NIXL notices first; NIXL 1.5.1 then
        refuses that envelope for good, so one of both processes has to start again. The envelope of
        a connected worker changes nothing. A worker whose connection was lost is replaced.

        Raises ``PEER`` for an unusable envelope or where another process is connected as that
        worker, and what :func:`kvplan.decode` raises for a bad offer.
        """
        opened = Envelope.unpack(envelope, self._key)
        peer = self._peers.get(opened.worker.key)
        if peer is not None and peer.is_connected_by(opened):
            return peer.worker
        self._replace_lost(opened.worker)
        self._agent.load(opened.agent, opened.metadata)
        peer = _Peer(opened.worker, opened.agent)
        self._open_memory(peer, opened.handles)
        self._peers[peer.worker.key] = peer
        return opened.worker

    def _open_memory(self, peer: _Peer, handles: bytes) -> None:
        """Map the memory of a peer that connects, if handles tell where it is: not here."""

    def attach(self, worker: Worker) -> None:
        """Connect to a worker of this process, such as that of a file."""
        self._replace_lost(instance(Worker, worker, "worker"))
        check_memory(worker.regions, f"register the memory of {worker.label}")
        memory = self._agent.register(worker.regions)
        self._peers[worker.key] = _Peer(worker, self._agent.name, attached=memory)

    def disconnect(self, worker: Worker, *, force: bool = False) -> None:
        """Disconnect a remote worker, so that another process can connect under its name.

        With ``force`` its running transfers are cancelled. They stay RUNNING, and their blocks must
        not be used, until NIXL reports their end, rule nixl.N2. Otherwise raises ``TRANSFER`` while
        a transfer runs. Raises ``PEER`` if the worker is not connected.
        """
        peer = self._peers.get(instance(Worker, worker, "worker").key)
        instance(bool, force, "force")
        if peer is None:
            raise not_connected(worker.key)
        # a transfer that still runs keeps its peer loaded in NIXL, rule nixl.N2
        for transfer in tuple(peer.held):
            if self.poll(transfer).is_settled:
                self.release(transfer)
            elif force:
                self.cancel(transfer)
            else:
                raise still_running(transfer.request, f"disconnect {worker.label}")
        del self._peers[worker.key]
        self._disconnected.add(peer)
        self._drop_disconnected()

    def prepare(self, plan: TransferPlan) -> None:
        """Hand the rows of a plan to NIXL, except those that NIXL already has.

        Raises ``PEER`` where a worker that exchanges bytes is not connected or differs from the
        plan's; ``BACKEND`` where memory is not registered or no backend moves between its kinds;
        ``MEMORY`` where the rows of one side are in several kinds of memory.
        """
        check_local(plan, self.worker)
        check_memory(self.worker.regions, f"prepare a plan of {self.worker.label}")
        for pair, remote in zip(plan.pairs, plan.remotes, strict=True):
            # a pair that exchanges no bytes needs no connection
            if not len(pair.local_table.rows):
                continue
            peer = self._peers.get(remote.key)
            if peer is None or peer.worker != remote:
                raise not_planned_for(remote, None if peer is None else peer.worker, "remote")
            # rows live as long as the plan's table
            if pair.remote_table not in peer.rows:
                peer.rows[pair.remote_table] = self._prepared(plan, pair, peer)

    def _prepared(self, plan: TransferPlan, pair: Pair, peer: _Peer) -> PreparedRows:
        local_kind = memory_kind_of(pair.local_table)
        remote_kind = memory_kind_of(pair.remote_table)
        # NIXL needs the rows of both sides with the backend that moves bytes between them
        backend = self._agent.backend_for(local_kind, remote_kind)
        remote_rows = self._agent.prepare(peer.agent, remote_kind, pair.remote_table.rows, backend)
        local_rows = self._prepared_local(local_kind, pair.local_table, backend)
        return PreparedRows(pair.local_table, local_rows, remote_rows)

    def _prepared_local(self, kind: str, table: Table, backend: str) -> Handle:
        """Return the rows of a local table. Equal tables of several remote workers share them."""
        key = (backend, kind, hashlib.sha256(table.rows.tobytes()).digest())
        handle = self._local.get(key)
        if handle is None:
            handle = self._agent.prepare(LOCAL, kind, table.rows, backend)
            self._local[key] = handle
        return handle

    def start(self, spec: ReadSpec, request: str) -> NixlTransfer:
        """Start to move the bytes of a spec, in the background.

        Raises ``PEER`` where the worker is not connected, ``TRANSFER`` where the plan is not
        prepared; ``TYPE`` or ``NAME`` for what can name no request.
        """
        transfer = NixlTransfer(spec, request)
        if not len(spec.local_table.rows):
            self._end(transfer)
            return transfer
        peer = self._peers.get(spec.remote)
        if peer is None:
            raise not_connected(spec.remote)
        # another plan may have an equal remote table, with other rows of this worker
        rows = peer.rows.get(spec.remote_table)
        if rows is None or rows.local_table is not spec.local_table:
            raise unprepared(spec)
        transfer.peer = peer
        if peer.lost is not None:
            # a copy, which the caller may raise
            self._end(transfer, peer.lost.with_hint(peer.lost.hint))
            return transfer
        # a transfer of no ids, or one that NIXL carries out while it posts, is done at once
        try:
            if not spec.num_ids or self._post(transfer, peer, rows):
                self._finish(transfer)
            else:
                transfer.watch.posted(transfer)
        except KVPlanError as error:
            self._fail(transfer, peer, error)
        return transfer

    def _post(self, transfer: NixlTransfer, peer: _Peer, rows: PreparedRows) -> bool:
        """Make and post a transfer, and return whether it is done."""
        spec = transfer.spec
        transfer.handle = self._agent.make(
            spec.operation, rows.local, rows.remote, spec.local_ids, spec.remote_ids
        )
        peer.held.add(transfer)
        transfer.watch.made()
        return self._agent.post(transfer.handle)

    def _finish(self, transfer: NixlTransfer) -> None:
        # NIXL forgets its figures with the handle
        if transfer.handle is not None:
            transfer.num_descriptors = self._agent.num_descriptors(transfer.handle)
        self._end(transfer)

    def _fail(self, transfer: NixlTransfer, peer: _Peer, error: KVPlanError) -> None:
        """Settle a transfer with an error, or hold it while copies of it may go on (nixl.N2)."""
        # without a handle nothing was posted
        if transfer.handle is None or not self._may_be_copied(transfer.spec, peer):
            self._end(transfer, error)
            return
        error.__traceback__ = None  # its frames refer to this transfer
        transfer.error = error
        if error.code == "PEER":
            self._lose(peer, error)

    def _may_be_copied(self, spec: ReadSpec, peer: _Peer) -> bool:
        """Return whether UCX may move the bytes of a spec by CMA."""
        if not self._uses_cma or peer.attached is not None:
            return False
        processes = (self._process, cma.Process.of_agent(peer.agent))
        kinds = {memory_kind_of(spec.local_table), memory_kind_of(spec.remote_table)}
        return kinds == {"DRAM"} and cma.may_copy(*processes)

    def _end_held(self, transfer: NixlTransfer, peer: _Peer) -> None:
        """Settle a transfer that has failed, if the process of its peer has ended."""
        process = cma.Process.of_agent(peer.agent)
        # a number means nothing to a process that does not know its own namespace
        if process is None or self._process is None or not process.has_ended():
            return
        with suppress(KVPlanError):
            self._agent.fence()
        self._end(transfer, transfer.error)

    def _end(self, transfer: NixlTransfer, error: KVPlanError | None = None) -> None:
        """Set the final status of a transfer, which has ended, or failed with an error."""
        ended = Status.DONE if error is None else Status.FAILED
        transfer.status = Status.CANCELLED if transfer.is_cancelled else ended
        transfer.error = error
        if error is not None:
            error.__traceback__ = None  # its frames refer to this transfer
            if error.code == "PEER" and transfer.peer is not None:
                self._lose(transfer.peer, error)
        transfer.watch.settled(transfer)

    def _lose(self, peer: _Peer, error: KVPlanError) -> None:
        """Remember the first error by which the connection to a peer was lost."""
        if peer.lost is None:
            peer.lost = error.with_hint(error.hint)

    def poll(self, transfer: Transfer) -> Status:
        """Update and return the status of a transfer, without waiting.

        UCX may copy bytes that have arrived.
        """
        status = instance(Transfer, transfer, "transfer").status
        if status is Status.RUNNING and isinstance(transfer, NixlTransfer):
            assert transfer.peer is not None
            if transfer.error is not None:
                self._end_held(transfer, transfer.peer)
                return transfer.status
            try:
                if self._has_moved(transfer):
                    self._finish(transfer)
            except KVPlanError as error:
                self._fail(transfer, transfer.peer, error)
        return transfer.status

    def _has_moved(self, transfer: NixlTransfer) -> bool:
        """Return whether all bytes of a running transfer have moved. Raises if it has failed."""
        assert transfer.handle is not None
        return self._agent.is_done(transfer.handle)

    def backend_of(self, transfer: Transfer) -> str:
        """Return the backend that NIXL chose for a transfer that is not released.

        It is empty where no byte moves.
        """
        instance(Transfer, transfer, "transfer")
        handle = transfer.handle if isinstance(transfer, NixlTransfer) else None
        return "" if handle is None else self._agent.backend_of(handle)

    def cancel(self, transfer: Transfer) -> None:
        """Cancel a running transfer. It settles when NIXL reports its end, rule nixl.N2."""
        status = instance(Transfer, transfer, "transfer").status
        if status is Status.RUNNING and isinstance(transfer, NixlTransfer):
            transfer.is_cancelled = True

    def release(self, transfer: Transfer) -> None:
        """Free NIXL's handle of a settled transfer. Raises ``TRANSFER`` for a running one."""
        if not instance(Transfer, transfer, "transfer").status.is_settled:
            raise still_running(transfer.request, "release a transfer")
        if isinstance(transfer, NixlTransfer):
            self._drop(transfer)

    def _drop(self, transfer: NixlTransfer) -> None:
        """Free the handle of a transfer, and its peer if that was disconnected meanwhile."""
        handle = transfer.handle
        peer = transfer.peer
        transfer.handle = None
        transfer.peer = None
        if handle is not None and peer is not None:
            peer.held.discard(transfer)
            try:
                self._agent.free(handle)
            finally:
                self._drop_disconnected()

    def discard_messages(self) -> None:
        """Discard the messages that other agents have sent. Call this in each step of an engine."""
        with suppress(KVPlanError):
            self._agent.discard_messages()

    def close(self) -> None:
        """Free everything in the order of rule nixl.N3.

        Running transfers become CANCELLED and touch no more bytes.
        """
        # peers are freed with the agent, after all transfers: none is left for a transfer to free
        peers = {*self._peers.values(), *self._disconnected}
        self._peers = {}
        self._disconnected.clear()
        for peer in peers:
            for transfer in tuple(peer.held):
                with suppress(
                    KVPlanError
                ):  # a handle that NIXL refuses to free ends with its agent
                    self._drop(transfer)
                if not transfer.status.is_settled:
                    transfer.is_cancelled = True
                    self._end(transfer)
        self._agent.close()

    def _drop_disconnected(self) -> None:
        """Free the peers that were disconnected and have no transfer any more."""
        for peer in tuple(self._disconnected):
            if peer.held:
                continue
            self._disconnected.remove(peer)
            # prepared rows are freed before the remote agent or its memory, rule nixl.N3
            peer.rows.clear()
            if peer.attached is None:
                self._agent.unload(peer.agent)
            else:
                self._agent.deregister(peer.attached)

    def _replace_lost(self, worker: Worker) -> None:
        """Refuse a worker that is connected, and disconnect one whose connection was lost."""
        peer = self._peers.get(worker.key)
        if peer is not None and peer.lost is not None:
            self.disconnect(peer.worker, force=True)
        elif peer is not None:
            raise _is_connected(
                worker, "another process that is connected as that worker", "disconnect it first"
            )
        elif worker.key == self.worker.key:
            raise _is_connected(worker, "this worker")

    def __repr__(self) -> str:
        transfers = sum(len(peer.held) for peer in (*self._peers.values(), *self._disconnected))
        return (
            f"<NixlExecutor {self.worker.label}: {len(self._peers)} peers, {transfers} transfers>"
        )


def memory_kind_of(table: Table) -> str:
    """Return the kind of memory of all rows of a table. Raises ``MEMORY`` if there are several."""
    # one element for each row: the index of its region
    region_indices = set(table.region.tolist())
    kinds: list[str] = sorted({table.regions[index].memory for index in region_indices})
    if len(kinds) > 1:
        raise KVPlanError(
            "MEMORY",
            "prepare a plan",
            expected="one kind of memory on each side of a pair",
            got=" and ".join(kinds),
            hint="make one plan for each kind, with not_transferred",
            kinds=tuple(kinds),
        )
    return kinds[0]


def _is_connected(worker: Worker, got: str, hint: str = "") -> KVPlanError:
    return KVPlanError(
        "PEER",
        f"connect {worker.label}",
        expected="a worker that is not connected",
        got=got,
        hint=hint,
        worker=worker.label,
    )


def settle(executor: Executor, transfers: Iterable[Transfer], timeout_s: float) -> bool:
    """Poll transfers until all are settled, and return whether all are.

    Wait for at most ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + seconds(timeout_s, "timeout_s")
    having("poll", executor, "executor", "an Executor")
    running: Sequence[Transfer] = members(Transfer, transfers, "transfers")
    while running := [transfer for transfer in running if not executor.poll(transfer).is_settled]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(PAUSE_S)
    return True
