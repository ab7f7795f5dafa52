"""MappedExecutor: reads and writes a peer's memory, mapped into this process, by a kernel.

It is a :class:`~kvplan_nixl.executor.NixlExecutor` whose envelope also has handles of the worker's
memory, signed like the rest. Where a peer is on this host and all regions of its handles can be
mapped, bytes move by one kernel that has the plan (:mod:`kvplan_nixl.kernel`), and a request lists
no descriptor ids. With other peers they move through NIXL. Connections are the same for both, and
so are the rules, with these:

- nixl.P1: A copy runs to its end: a transfer that is cancelled, or whose peer is disconnected by
  force, stays RUNNING until the copy no longer touches memory. :meth:`MappedExecutor.close` waits
  for it.
- nixl.P2: Memory stays mapped while a copy of it runs or the peer is connected, and no longer. A
  mapping outlives the process that made the memory, so a copy out of a peer that is killed ends,
  with the bytes that were there. The peer's lease says whether they are still the request's, as
  with NIXL.
- nixl.P3: Memory that cannot be mapped is no error: the executor logs why, once for each peer, and
  moves bytes through NIXL.

When its engine starts, :func:`make_executor` chooses the executor by the worker's memory.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from logging import Logger
from typing import Any, Final

import attrs

from kvplan import Blocks, KVPlanError, ReadSpec, Region, TransferPlan, Worker
from kvplan.describe import Tokens
from kvplan.plan import Ids, Pair
from kvplan.staging.copy_plan import BoundCopy, PairCopy, RowTables, copy_of_spec
from kvplan.support import shown
from kvplan_nixl.backends import UCX, Backends
from kvplan_nixl.cma import Process
from kvplan_nixl.executor import NixlExecutor, NixlTransfer, PreparedRows
from kvplan_nixl.kernel import Copies, KernelCopies, TorchCopies, has_triton
from kvplan_nixl.mapping import MAX_HANDLE_BYTES, Mapped, Mapper, cuda_mapper, unmapped_note
from kvplan_nixl.rearrange import tensor_at

__all__ = ["MappedExecutor"]

ELSEWHERE: Final = "it is on another host or in another PID namespace, or does not say where it is"

MakeCopies = Callable[[Sequence[Region]], Copies]
"""Makes what copies between these regions: those of this worker, and of a peer."""


def copies_between(regions: Sequence[Region]) -> Copies:
    """Return copies by the kernel on a GPU, and by torch's operations where Triton is missing."""
    if has_triton and regions[0].memory == "VRAM":
        return KernelCopies(f"cuda:{regions[0].device_id}")
    return TorchCopies({region.name: tensor_at(region) for region in regions})


@attrs.frozen(eq=False)
class MappedMemory:
    """The regions of a peer in this process, what copies them, and the memory that holds them."""

    regions: tuple[Region, ...]
    copies: Copies
    mapped: tuple[Mapped, ...]

    def close(self) -> None:
        """Unmap the memory. No copy may touch it."""
        for mapped in self.mapped:
            mapped.close()


@attrs.frozen(eq=False)
class MappedRows(PreparedRows):
    """A pair of workers whose bytes ``copies`` move. Of ``tables`` the destination's is first."""

    copies: Copies
    copy: PairCopy
    tables: RowTables
    is_read: bool


class UnlistedSpec(ReadSpec):
    """A spec that lists its ids only if somebody asks for them: the kernel does not."""

    def __init__(
        self, plan: TransferPlan, pair: Pair, request: Mapping[str, Any], bound: BoundCopy
    ):
        # the attributes of a frozen class
        self.__dict__.update(
            operation=plan.operation,
            local=plan.local.key,
            remote=pair.remote,
            local_table=pair.local_table,
            remote_table=pair.remote_table,
            shapes=(),
            bound=bound,
            _plan=plan,
            _request=request,
        )

    lists_ids = False
    bound: BoundCopy
    _plan: TransferPlan
    _request: Mapping[str, Any]

    @cached_property
    def listed(self) -> ReadSpec:
        """The same spec with its ids."""
        specs = self._plan.bind(**self._request)
        return next(spec for spec in specs if spec.remote == self.remote)

    @property
    def local_ids(self) -> Ids:
        """The ids of local descriptors, which are listed now."""
        return self.listed.local_ids

    @property
    def remote_ids(self) -> Ids:
        """The ids of remote descriptors, which are listed now."""
        return self.listed.remote_ids

    @property
    def num_ids(self) -> int:
        """Descriptors on each side, as many as a list of them would have."""
        return self.listed.num_ids if self.bound.has_gaps else self.bound.num_runs

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return self.listed.num_bytes if self.bound.has_gaps else self.bound.num_bytes


class MappedExecutor(NixlExecutor):
    """The executor of a worker whose memory peers of the same host map.

    ``mapper`` maps memory, and ``make_copies`` makes what copies, by default the kernel. Other
    arguments are those of :class:`NixlExecutor`.
    """

    def __init__(
        self,
        worker: Worker,
        backends: Backends = UCX,
        *,
        mapper: Mapper,
        make_copies: MakeCopies = copies_between,
        logger: Logger | None = None,
        **options: Any,
    ) -> None:
        super().__init__(worker, backends, **options)
        self._mapper = mapper
        self._make_copies = make_copies
        self._logger = logging.getLogger(__name__) if logger is None else logger
        self._memories: dict[Any, MappedMemory] = {}
        self._tickets: dict[NixlTransfer, tuple[Copies, Any]] = {}
        self._exports = not unmapped_note(worker, mapper)

    def _handles(self) -> bytes:
        if not self._exports:
            return b""
        handles = [self._mapper.export(region) for region in self.worker.regions]
        texts = [base64.b64encode(handle).decode() for handle in handles]
        return json.dumps({"kind": self._mapper.kind, "regions": texts}).encode()

    def _open_memory(self, peer: Any, handles: bytes) -> None:
        worker = peer.worker
        process = Process.of_agent(peer.agent)
        if process is None or self._process is None or not self._process.shares_host(process):
            self._logger.info("%s is read through NIXL: %s", worker.label, ELSEWHERE)
            return
        if not handles:
            self._through_nixl(
                peer, "its envelope has no handles: map_memory is off there, or its log says why"
            )
            return
        mapped: list[Mapped] = []
        regions: list[Region] = []
        try:
            for region, handle in zip(
                worker.regions, _parsed(handles, self._mapper.kind, worker), strict=True
            ):
                mapped.append(self._mapper.open(handle, process))
                regions.append(self._region_here(worker, region, mapped[-1]))
            copies = self._make_copies((*self.worker.regions, *regions))
        except KVPlanError as error:
            for one in mapped:
                one.close()
            self._through_nixl(peer, error)
            return
        self._memories[peer] = MappedMemory(tuple(regions), copies, tuple(mapped))
        self._logger.info("mapped the memory of %s (%s)", worker.label, self._mapper.kind)

    def _through_nixl(self, peer: Any, reason: KVPlanError | str) -> None:
        self._logger.warning(
            "%s is read through NIXL, since its memory cannot be mapped: %s",
            peer.worker.label,
            reason,
        )

    def _region_here(self, worker: Worker, region: Region, mapped: Mapped) -> Region:
        """Return a region of a peer where its memory is mapped. Raises ``MEMORY``."""
        if mapped.size_bytes < region.size_bytes:
            raise _unmapped(worker, f"{region.size_bytes} bytes", f"{mapped.size_bytes}")
        here = self.worker.regions[0]
        name = f"{worker.label} {region.name}"
        return Region(name, mapped.address, region.size_bytes, here.memory, here.device_id)

    def maps(self, worker: Worker) -> bool:
        """Return whether the memory of a connected worker is mapped."""
        return self._peers.get(worker.key) in self._memories

    def _prepared(self, plan: TransferPlan, pair: Pair, peer: Any) -> PreparedRows:
        memory = self._memories.get(peer)
        if memory is None:
            return super()._prepared(plan, pair, peer)
        tables = plan.direction.by_role(
            pair.local_table, pair.remote_table.in_regions(memory.regions)
        )
        copy = PairCopy.of(pair.group_pairs, tables)
        try:
            memory.copies.prepare(copy)
        except KVPlanError as error:
            self._through_nixl(peer, error)
            return super()._prepared(plan, pair, peer)
        is_read = plan.operation == "READ"
        nothing: Any = None  # NIXL has no rows of this pair
        return MappedRows(pair.local_table, nothing, nothing, memory.copies, copy, tables, is_read)

    def bind(
        self,
        plan: TransferPlan,
        *,
        local: Mapping[str, Blocks],
        remote: Mapping[str, Blocks],
        tokens: Tokens = None,
    ) -> tuple[ReadSpec, ...]:
        """Return the specs of a prepared plan, as its ``bind`` does.

        Those with workers whose memory is mapped list no ids.
        """
        request: dict[str, Any] = {"local": local, "remote": remote, "tokens": tokens}
        rows = {pair.remote: self._mapped_rows(pair) for pair in plan.pairs if pair.group_pairs}
        if not all(rows.values()):
            return plan.bind(**request)
        requested = plan.requested(**request)
        specs = dict(plan.idle)
        for pair in plan.pairs:
            mapped = rows.get(pair.remote)
            if mapped is not None:
                bound = mapped.copy.bind(requested[pair.group_pairs])
                specs[pair.remote] = UnlistedSpec(plan, pair, request, bound)
        return tuple(specs.values())

    def _mapped_rows(self, pair: Pair) -> MappedRows | None:
        peer = self._peers.get(pair.remote)
        rows = None if peer is None else peer.rows.get(pair.remote_table)
        if isinstance(rows, MappedRows) and rows.local_table is pair.local_table:
            return rows
        return None

    def _post(self, transfer: NixlTransfer, peer: Any, rows: PreparedRows) -> bool:
        if not isinstance(rows, MappedRows):
            return super()._post(transfer, peer, rows)
        spec = transfer.spec
        if isinstance(spec, UnlistedSpec):
            bound = spec.bound
        else:
            bound = copy_of_spec(spec, rows.tables, rows.is_read)
        ticket = rows.copies.begin(bound)
        self._tickets[transfer] = (rows.copies, ticket)
        peer.held.add(transfer)
        transfer.watch.made()
        return self._has_moved(transfer)

    def _has_moved(self, transfer: NixlTransfer) -> bool:
        if transfer not in self._tickets:
            return super()._has_moved(transfer)
        copies, ticket = self._tickets[transfer]
        return copies.done(ticket)

    def _drop(self, transfer: NixlTransfer) -> None:
        peer = transfer.peer
        super()._drop(transfer)
        if self._tickets.pop(transfer, None) is not None and peer is not None:
            peer.held.discard(transfer)
            self._drop_disconnected()

    def _drop_disconnected(self) -> None:
        leaving = set(self._disconnected)
        super()._drop_disconnected()
        for peer in leaving - self._disconnected:
            memory = self._memories.pop(peer, None)
            if memory is not None:
                memory.close()

    def close(self) -> None:
        """Free everything, when no copy touches memory any more, rule nixl.P1."""
        for memory in self._memories.values():
            memory.copies.wait()
        super().close()
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
        self._tickets.clear()


def _parsed(handles: bytes, kind: str, worker: Worker) -> list[bytes]:
    """Return the handles of a worker's regions, of one kind. Raises ``MEMORY``."""
    try:
        values = json.loads(handles)
        texts = values["regions"]
        found = values["kind"]
        decoded = [base64.b64decode(text, validate=True) for text in texts]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _unmapped(worker, "handles of regions", "another message") from None
    if found != kind:
        raise _unmapped(worker, f"handles of {kind}", shown(found))
    if len(decoded) != len(worker.regions):
        raise _unmapped(worker, f"{len(worker.regions)} handles", f"{len(decoded)}")
    if any(len(handle) > MAX_HANDLE_BYTES for handle in decoded):
        raise _unmapped(worker, f"handles of at most {MAX_HANDLE_BYTES} bytes", "a longer one")
    return decoded


def _unmapped(worker: Worker, expected: str, got: str) -> KVPlanError:
    action = f"map memory of {worker.label}"
    return KVPlanError("MEMORY", action, expected=expected, got=got, worker=worker.label)


def make_executor(
    worker: Worker,
    backends: Backends = UCX,
    *,
    map_memory: bool = False,
    logger: Logger | None = None,
    **options: Any,
) -> NixlExecutor:
    """Return the executor of an engine's worker.

    With ``map_memory`` it is a mapped one where the worker's memory is that of a GPU. With or
    without, one line is logged about memory of a GPU that UCX reads slowly, since it cannot be
    mapped.
    """
    logger = logging.getLogger(__name__) if logger is None else logger
    mapper = cuda_mapper(worker)
    if mapper is not None and (note := unmapped_note(worker, mapper)):
        logger.warning("%s", note)
    if mapper is None or not map_memory:
        return NixlExecutor(worker, backends, **options)
    return MappedExecutor(worker, backends, mapper=mapper, logger=logger, **options)
