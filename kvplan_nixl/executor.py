"""NixlExecutor: moves the bytes of one worker's specs through NIXL.

The executor computes nothing. It registers the worker's regions, hands a plan's rows to NIXL as strided descriptors,
and indexes them by a spec's ids. It follows the rules of :mod:`kvplan.executor` and these:

- N1: An envelope makes a remote worker known. A plan is prepared only if its remote workers equal those of the
  envelopes. A restarted process has a new agent name, so transfers meant for the old process never reach it.
- N2: NIXL can release a running transfer or remove its remote agent, but neither stops bytes under way. So the executor
  does neither while a transfer runs. A cancelled transfer runs until NIXL reports DONE or an error. Only
  :meth:`NixlExecutor.close` ends running transfers.
- N3: Handles are freed in this order: transfers, prepared rows, remote agents, registered memory, the agent.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import attrs

from kvplan import Executor, KVPlanError, Notice, ReadSpec, Status, Transfer, TransferPlan, Worker
from kvplan.describe.worker import Key, label_of
from kvplan.executor import check_local, not_planned_for, still_running, unprepared
from kvplan.plan import Table
from kvplan_nixl.agent import LOCAL, Agent, Prepared
from kvplan_nixl.envelope import Envelope
from kvplan_nixl.events import UNWATCHED, Listener, Unwatched, watch
from kvplan_nixl.notices import message, notice_of, opening
from kvplan_nixl.rows import Rows, kind_of

Backends = Mapping[str, Mapping[str, str]]

UCX: Final[Backends] = MappingProxyType({"UCX": MappingProxyType({})})
"""The default backends: UCX, as its environment variables configure it."""

PAUSE_S: Final = 50e-6
"""The pause between two polls of :func:`settle`."""


@attrs.define(eq=False, repr=False)
class NixlTransfer(Transfer):
    """A transfer with NIXL's handle, which is None where no byte moves."""

    is_cancelled: bool = False
    handle: Any = None
    watch: Unwatched = UNWATCHED


@attrs.define(eq=False)
class _Peer:
    """A remote worker. ``attached`` is its registered memory where it is in this process, ``lost`` why it is gone."""

    worker: Worker
    agent: str
    attached: tuple[Any, ...] | None = None
    lost: KVPlanError | None = None
    rows: WeakKeyDictionary[Table, Rows] = attrs.field(factory=WeakKeyDictionary)


class NixlExecutor:
    """The :class:`~kvplan.Executor` of one worker, with a NIXL agent of its own.

    ``backends`` are NIXL's backends by name, in order of preference, each with its options: ``UCX`` for DRAM and VRAM,
    followed by ``POSIX`` for files. The worker's regions stay registered until the executor is closed, so use it as a
    context manager, from one thread at a time. Without a ``progress_thread`` it serves its peers' transfers and
    messages only while it polls or reads notices. It calls ``on_event`` for each settled transfer.

    Raises ``BACKEND`` for a backend that is missing or refuses the worker's memory.

    >>> import numpy as np
    >>> from kvplan import Axis, Blocks, Group, View, Worker, plan_reads, region_of
    >>> def worker(engine, cache):
    ...     region = region_of(cache)
    ...     axes = (Axis("token", 0, 4, 4, 2), Axis("dim", 0, 2, 2, 1))
    ...     view = View("layers.0.mla", "attn", region, "uint8", axes, num_blocks=10, block_stride_bytes=8)
    ...     return Worker(engine, 0, (region,), (Group("attn", 4),), (view,))
    >>> caches = np.arange(80, dtype=np.uint8), np.zeros(80, np.uint8)
    >>> source, local = worker("prefill", caches[0]), worker("decode", caches[1])
    >>> with NixlExecutor(source) as prefill, NixlExecutor(local) as decode:
    ...     plan = plan_reads(local, [decode.connect(prefill.envelope())])
    ...     decode.prepare(plan)
    ...     (spec,) = plan.bind(local={"attn": Blocks([7])}, remote={"attn": Blocks([3])}, tokens=(1, 3))
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
        progress_thread: bool = True,
        on_event: Listener | None = None,
    ) -> None:
        self.worker = worker
        self._agent = Agent(f"{worker.label}/{uuid.uuid4().hex}", backends, progress_thread)
        self._registered: tuple[Any, ...] | None = self._agent.register(worker.regions)
        self._peers: dict[Key, _Peer] = {}
        self._local: WeakValueDictionary[tuple[str, str, bytes], Prepared] = WeakValueDictionary()
        self._open: set[NixlTransfer] = set()
        self._opening = opening(worker.key)
        self._on_event = on_event

    def __enter__(self) -> NixlExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def envelope(self) -> bytes:
        """The envelope of this worker, for :meth:`connect` of a remote worker's executor."""
        return Envelope(self.worker, self._agent.name, self._agent.metadata()).pack()

    def connect(self, envelope: bytes) -> Worker:
        """Connect to a remote worker by its envelope, and return the worker, to plan with.

        A worker whose connection was lost is replaced. NIXL connects before this returns; for an address where nobody
        answers that takes until TCP gives up, minutes. Raises ``PEER`` for an unusable envelope or a connected worker,
        and what :func:`kvplan.decode` raises for a bad offer.
        """
        opened = Envelope.unpack(envelope)
        self._make_room(opened.worker)
        self._agent.load(opened.agent, opened.metadata)
        self._peers[opened.worker.key] = _Peer(opened.worker, opened.agent)
        return opened.worker

    def attach(self, worker: Worker) -> None:
        """Connect to a worker of this process, such as that of a file. It receives no notices."""
        self._make_room(worker)
        registered = self._agent.register(worker.regions)
        self._peers[worker.key] = _Peer(worker, self._agent.name, attached=registered)

    def disconnect(self, worker: Worker) -> None:
        """Forget a remote worker. Raises ``PEER`` if it is not connected, ``TRANSFER`` while a transfer runs."""
        key = worker.key
        if key not in self._peers:
            raise _not_connected(key)
        for transfer in [transfer for transfer in self._open if transfer.spec.remote == key]:
            if not self.poll(transfer).is_settled:
                raise still_running(transfer.request, f"disconnect {worker.label}")
            self.release(transfer)
        peer = self._peers.pop(key)
        peer.rows.clear()
        self._forget(peer)

    def prepare(self, plan: TransferPlan) -> None:
        """Hand the rows of a plan to NIXL, except those that NIXL already has.

        Raises ``PEER`` where a worker that exchanges bytes is not connected or differs from the plan's; ``BACKEND``
        where memory is not registered or no backend moves between its kinds; ``MEMORY`` where the rows of one side are
        in several kinds of memory.
        """
        check_local(plan, self.worker)
        for pair, remote in zip(plan.pairs, plan.remotes, strict=True):
            if not len(pair.local_table.rows):
                continue
            peer = self._peers.get(remote.key)
            if peer is None or peer.worker != remote:
                raise not_planned_for(remote, None if peer is None else peer.worker, "remote")
            if pair.remote_table not in peer.rows:
                kinds = kind_of(pair.local_table), kind_of(pair.remote_table)
                backend = self._agent.backend_for(*kinds)
                remote_rows = self._agent.prepare(peer.agent, kinds[1], pair.remote_table.rows, backend)
                local_rows = self._prepare_local(kinds[0], pair.local_table, backend)
                peer.rows[pair.remote_table] = Rows(pair.local_table, local_rows, remote_rows)

    def _prepare_local(self, kind: str, table: Table, backend: str) -> Prepared:
        """The prepared rows of a local table. Equal tables of several remote workers share them."""
        key = (backend, kind, hashlib.sha256(table.rows.tobytes()).digest())
        prepared = self._local.get(key)
        if prepared is None:
            prepared = self._local[key] = self._agent.prepare(LOCAL, kind, table.rows, backend)
        return prepared

    def start(self, spec: ReadSpec, request: str, *, notify: bool = True) -> NixlTransfer:
        """Start to move the bytes of a spec. With ``notify``, the remote worker gets a notice when all have moved.

        Between two processes of one host UCX moves the bytes before this returns; between hosts they move in the
        background. Raises ``PEER`` where the worker is not connected, ``TRANSFER`` where the plan is not prepared.
        """
        transfer = NixlTransfer(spec, request, notifies=notify, watch=watch(self._on_event))
        if not len(spec.local_table.rows):
            self._settle(transfer)
            return transfer
        peer = self._peers.get(spec.remote)
        if peer is None:
            raise _not_connected(spec.remote)
        rows = peer.rows.get(spec.remote_table)
        if rows is None or rows.local_table is not spec.local_table:
            raise unprepared(spec)
        notice = message(self._opening, request) if notify and peer.attached is None else b""
        self._open.add(transfer)
        try:
            if peer.lost is not None:
                raise peer.lost
            if spec.local_ids.size:
                self._post(transfer, rows, notice)
            else:
                if notice:
                    self._agent.notify(peer.agent, notice)
                self._settle(transfer)
        except KVPlanError as error:
            self._settle(transfer, error)
        return transfer

    def _post(self, transfer: NixlTransfer, rows: Rows, notice: bytes) -> None:
        spec = transfer.spec
        ids = (spec.local_ids, spec.remote_ids)
        transfer.handle = self._agent.make(spec.operation, rows.local, rows.remote, ids, notice)
        transfer.watch.made()
        if self._agent.post(transfer.handle):
            self._settle(transfer)
        else:
            transfer.watch.posted(transfer)

    def _settle(self, transfer: NixlTransfer, error: KVPlanError | None = None) -> None:
        ended = Status.DONE if error is None else Status.FAILED
        transfer.status = Status.CANCELLED if transfer.is_cancelled else ended
        transfer.error = error
        if error is not None and error.code == "PEER":
            self._peers[transfer.spec.remote].lost = error
        transfer.watch.settled(transfer)

    def poll(self, transfer: Transfer) -> Status:
        """Update and return the status of a transfer, without waiting. UCX may copy bytes that have arrived."""
        if transfer.status is Status.RUNNING and isinstance(transfer, NixlTransfer):
            try:
                if self._agent.is_done(transfer.handle):
                    self._settle(transfer)
            except KVPlanError as error:
                self._settle(transfer, error)
        return transfer.status

    def backend_of(self, transfer: Transfer) -> str:
        """The backend that NIXL chose for a transfer that is not released; empty where no byte moves."""
        handle = transfer.handle if isinstance(transfer, NixlTransfer) else None
        return "" if handle is None else self._agent.backend_of(handle)

    def cancel(self, transfer: Transfer) -> None:
        """Cancel a running transfer. It settles when NIXL reports its end, rule N2."""
        if isinstance(transfer, NixlTransfer) and transfer.status is Status.RUNNING:
            transfer.is_cancelled = True

    def release(self, transfer: Transfer) -> None:
        """Free NIXL's handle of a settled transfer. Raises ``TRANSFER`` for a running one."""
        if not transfer.status.is_settled:
            raise still_running(transfer.request, "release a transfer")
        if isinstance(transfer, NixlTransfer):
            self._drop(transfer)

    def _drop(self, transfer: NixlTransfer) -> None:
        self._open.discard(transfer)
        if transfer.handle is not None:
            self._agent.free(transfer.handle)
            transfer.handle = None

    def notices(self) -> tuple[Notice, ...]:
        """The notices that have arrived from other workers since the last call. Ignores any other message."""
        return tuple(notice for data in self._agent.messages() if (notice := notice_of(data)) is not None)

    def close(self) -> None:
        """Free all handles in the order of rule N3. Running transfers become CANCELLED and touch no more bytes."""
        if self._registered is None:
            return
        for transfer in tuple(self._open):
            with suppress(KVPlanError):  # a handle that NIXL refuses to free ends with its agent
                self._drop(transfer)
            transfer.handle = None
            if not transfer.status.is_settled:
                transfer.is_cancelled = True
                self._settle(transfer)
        for peer in self._peers.values():
            peer.rows.clear()
            self._forget(peer)
        self._peers.clear()
        self._agent.deregister(self._registered)
        self._registered = None
        self._agent.close()

    def _forget(self, peer: _Peer) -> None:
        if peer.attached is None:
            self._agent.unload(peer.agent)
        else:
            self._agent.deregister(peer.attached)

    def _make_room(self, worker: Worker) -> None:
        """Refuse a worker that is connected, and forget one whose connection was lost."""
        known = self._peers.get(worker.key)
        if known is not None and known.lost is not None:
            self.disconnect(known.worker)
        elif known is not None or worker.key == self.worker.key:
            raise KVPlanError(
                "PEER",
                f"connect {worker.label}",
                expected="a worker that is not connected",
                got="a connected one",
                hint="disconnect it first",
                worker=worker.label,
            )

    def __repr__(self) -> str:
        return f"<NixlExecutor {self.worker.label}: {len(self._peers)} peers, {len(self._open)} transfers>"


def settle(executor: Executor, transfers: Iterable[Transfer], timeout_s: float) -> bool:
    """Poll transfers until all are settled, for at most ``timeout_s`` seconds. Return whether all are."""
    deadline = time.monotonic() + timeout_s
    running = list(transfers)
    while running := [transfer for transfer in running if not executor.poll(transfer).is_settled]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(PAUSE_S)
    return True


def _not_connected(key: Key) -> KVPlanError:
    return KVPlanError("PEER", f"find worker {label_of(key)}", expected="a connected worker", got="none of that name")
